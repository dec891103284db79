"""What a worker is given: a wrong type is a typed error that says what to pass."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvxfer.blocking import BlockingWorker
from kvxfer.config import Config
from kvxfer.errors import ConfigError, GeometryError, TokensError
from kvxfer.geometry import CacheTensor, Group
from kvxfer.testing import LoopbackNetwork, LoopbackTransport
from kvxfer.worker import Worker


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.upper().startswith("KVXFER_")]:
        monkeypatch.delenv(name)


def cache() -> CacheTensor:
    return CacheTensor(torch.zeros(4, 4, 8), "block token dim", layers=[0])


@pytest.mark.parametrize("make", [lambda config: Worker([cache()], config), BlockingWorker], ids=["async", "blocking"])
@pytest.mark.parametrize("config", [{}, {"window": 2}, [], 0, "kvxfer.toml", Config])
def test_a_config_is_a_config(make: Callable[[Any], object], config: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        make(config)
    assert f"config must be a kvxfer.Config, not {type(config).__name__}; pass kvxfer.Config(" in str(caught.value)


def test_a_config_may_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_WINDOW", "3")
    assert Worker([cache()]).config.window == 3
    assert Worker([cache()], config=Config(window=5)).config.window == 5


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (cache(), "tensors must be a list of kvxfer.CacheTensor, not one CacheTensor; describe each tensor: ["),
        (None, "not NoneType; describe"),
        (torch.zeros(2, 3), "but item 0 is of type Tensor; describe each tensor"),
        ([torch.zeros(3)], "but item 0 is of type Tensor; describe each tensor"),
        ({"k": cache()}, "but item 0 is of type str"),
        ([cache(), None], "but item 1 is of type NoneType"),
    ],
)
def test_tensors_are_a_list_of_cache_tensors(tensors: Any, words: str) -> None:
    with pytest.raises(GeometryError) as caught:
        Worker(tensors)
    assert words in str(caught.value)
    with BlockingWorker(Config()) as worker, pytest.raises(GeometryError) as caught:
        worker.register(tensors)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (["default"], "groups must be a list of kvxfer.Group, but item 0 is of type str; describe each group: ["),
        ("default", "but item 0 is of type str"),
        (Group("default"), "not one Group"),
        ({"default": 0}, "but item 0 is of type str"),
        (3, "groups must be a list of kvxfer.Group, not int"),
    ],
)
def test_groups_are_a_list_of_groups(groups: Any, words: str) -> None:
    for make in (lambda: Worker([cache()], groups=groups), lambda: BlockingWorker(Config(), groups)):
        with pytest.raises(GeometryError) as caught:
            make()
        assert words in str(caught.value)


def test_anything_that_can_be_walked_over_will_do() -> None:
    worker = Worker((tensor for tensor in [cache()]), groups=iter([Group("default", 0)]))
    assert worker.config.world == 1


@pytest.mark.parametrize("tokens", ["4", 4.5, range(4)])
def test_tokens_of_a_blocking_offer_are_a_number(tokens: Any) -> None:
    network = LoopbackNetwork()
    with BlockingWorker(Config(), transport=lambda: LoopbackTransport("one", network)) as worker:
        worker.register([cache()])
        with pytest.raises(TokensError, match="how many tokens the blocks hold"):
            worker.offer("r", [1], tokens=tokens)
