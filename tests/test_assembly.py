"""What a worker is given: a wrong type is a typed error that says what to pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvxfer.blocking import BlockingWorker
from kvxfer.config import Config
from kvxfer.errors import ConfigError, GeometryError
from kvxfer.geometry import CacheTensor, Group
from kvxfer.worker import Worker

pytestmark = pytest.mark.usefixtures("no_settings")


def cache() -> CacheTensor:
    return CacheTensor(torch.zeros(4, 4, 8), "block token dim", layers=[0])


@pytest.mark.parametrize("make", [lambda config: Worker([cache()], config), BlockingWorker], ids=["async", "blocking"])
@pytest.mark.parametrize("config", [{}, {"window": 2}, [], 0, "kvxfer.toml", Config])
def test_a_config_is_a_config(make: Callable[[Any], object], config: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        make(config)
    assert f"config must be a kvxfer.Config, not {type(config).__name__}; pass kvxfer.Config(" in str(caught.value)


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
