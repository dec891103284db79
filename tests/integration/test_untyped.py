"""Callers that use no type checker: a wrong type is a typed error, and nothing is lost by it."""

import asyncio
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from inside import waits_for_layers
from stage import DEFAULTS, Cache, eventually

from kvxfer import BlockingWorker, Config, UsageError, Worker
from kvxfer.errors import BlocksError, ClosedError, ConfigError, GeometryError, RequestError, TokensError
from kvxfer.fabric.loopback import LoopbackNetwork, LoopbackTransport
from kvxfer.geometry import CacheTensor

NO_SECONDS: list[Any] = ["3", float("inf"), float("nan"), [1], torch.zeros(3)]
MOMENT: Any = Fraction(1, 100)


async def test_a_wrong_timeout_strands_nothing(pair):
    prefill, decode = pair
    offer = prefill.offer("r", [1], tokens=4)
    ticket = prefill.engine.ticket("r")
    for timeout in NO_SECONDS:
        with pytest.raises(RequestError, match="timeout must be a number of seconds"):
            decode.start_fetch(ticket, [2], tokens=range(4), timeout=timeout)
    assert decode.describe()["custody"].held_blocks == 0
    await decode.fetch(ticket, [2], tokens=range(4), timeout=10)
    await offer.released()


async def test_a_wrong_timeout_of_a_drain_begins_none(pair):
    for timeout in NO_SECONDS:
        with pytest.raises(RequestError, match="timeout must be a number of seconds"):
            await pair[0].drain(timeout)
    assert not pair[0].describe()["draining"]


@pytest.mark.parametrize("loop", ["caller", "own"])
async def test_layers_are_numbers_and_who_stops_waiting_for_them_leaves_nothing(stage, loop):
    prefill, decode = await stage.pair(Cache(), Cache(), decode={"loop": loop})
    transfer = decode.start_fetch(prefill.engine.ticket("never offered"), [2], tokens=range(4), timeout=30)
    await transfer.__aenter__()
    for wrong in [("0", 1), (0, None), (0, 1.0), ([0], 1)]:
        with pytest.raises(RequestError, match="layers are whole numbers"):
            await transfer.layers(*wrong)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(transfer.layers(0, 1), 0.01)
    await eventually(lambda: not waits_for_layers(transfer))
    transfer.cancel()
    await asyncio.wait([transfer.outcome])


async def test_layers_of_an_offer_are_those_that_are_held(pair):
    """And what is none is not looked for in all that was given, which may be without end."""
    offer = pair[0].offer("r", [1], tokens=4, streaming=True)
    wrong: list[Any] = [range(10**30), [0, 2], ["0"], [0.0], 0, [[0]]]
    for layers in wrong:
        with pytest.raises(TokensError, match=r"layer \d+ is not held here|takes a list of layers"):
            offer.ready(layers=layers)
    numbers: list[Any] = ["4", 4.5]
    for tokens in numbers:
        with pytest.raises(TokensError, match="ready"):
            offer.ready(tokens=tokens)
    with pytest.raises(TokensError, match="is ready up to token 0"):
        offer.finish()  # nothing was marked by halves
    offer.ready()
    offer.finish()
    await offer.withdraw()


def test_waits_of_an_engine_that_polls():
    network = LoopbackNetwork()
    with BlockingWorker(Config(**DEFAULTS), transport=lambda: LoopbackTransport("one", network)) as worker:
        worker.register(Cache().tensors)
        ticket = worker.engine.ticket("never offered")
        transfer = worker.start_fetch(ticket, [2], tokens=range(4))
        for wait in (
            worker.poll,
            partial(transfer.wait_layer, 0),
            partial(worker.start_fetch, ticket, [3], tokens=range(4)),
        ):
            for seconds in NO_SECONDS:
                with pytest.raises(RequestError, match="timeout must be a number of seconds"):
                    wait(timeout=seconds)
        for layer in NO_SECONDS[0], NO_SECONDS[3]:
            with pytest.raises(RequestError, match="layers are whole numbers"):
                transfer.wait_layer(layer, timeout=1)
        with pytest.raises(TimeoutError, match=r"did not land within 0\.01 s"):
            transfer.wait_layer(0, timeout=MOMENT)


async def test_a_payload_is_bytes(pair):
    prefill, decode = pair
    wrong: list[Any] = ["text", None, [1], torch.zeros(4)]
    for payload in wrong:
        with pytest.raises(RequestError, match="a payload is bytes"):
            prefill.offer("r", [1], tokens=4, payload=payload)
    offer = prefill.offer("r", [1], tokens=4, payload=bytearray(b"fine"))  # the id was not used up
    result = await decode.fetch(prefill.engine.ticket("r"), [2], tokens=range(4), timeout=10)
    assert result.payload == b"fine"
    await offer.released()


async def test_tokens_of_a_fetch_are_a_range_and_those_of_an_offer_a_number(pair):
    prefill, decode = pair
    fetched: list[Any] = [4, None, (0, 4), [0, 4], "4"]
    for tokens in fetched:
        with pytest.raises(TokensError, match="tokens must be a range"):
            decode.start_fetch(prefill.engine.ticket("r"), [2], tokens=tokens)
    offered: list[Any] = [4.0, "4", range(4)]
    for tokens in offered:
        with pytest.raises(TokensError, match="how many tokens"):
            prefill.offer("r", [1], tokens=tokens)
    blocks: list[Any] = [[[1], [2, 3]], torch.zeros(2, device="meta")]
    for ids in blocks:
        with pytest.raises(BlocksError, match="whole numbers"):
            prefill.offer("r", ids, tokens=4)


def test_what_a_worker_is_built_upon_is_seen_to_be_that():
    """Each face takes a transport in another way: one that was taken for the other is said at once."""
    tensors, config, one = Cache().tensors, Config(**DEFAULTS), LoopbackTransport("one", LoopbackNetwork())
    none: list[Any] = [LoopbackTransport, lambda: one, "UCX"]
    for transport in none:
        with pytest.raises(UsageError, match="transport must be one"):
            Worker(tensors, config, transport=transport)
        with pytest.raises(UsageError, match="runtime must be one"):
            Worker(tensors, config, runtime=transport)
    no_loop: Any = ["own"]
    with pytest.raises(UsageError, match="loop is"):
        Worker(tensors, config, loop=no_loop)
    made: Any = one
    with pytest.raises(UsageError, match="transport must be what makes one"):
        BlockingWorker(config, transport=made)


async def test_thread_blocks_are_a_number(pair):
    wrong: list[Any] = [0, -1, 4097, 1.0, True, "24", None]
    for ctas in wrong:
        with pytest.raises(ConfigError, match="give a number from 1 to 4096"):
            pair[0].occupy(ctas)
    pair[0].occupy(4096)
    await pair[0].aclose()
    with pytest.raises(ClosedError):
        pair[0].occupy(24)


@pytest.mark.parametrize(
    "wrong",
    [{"axes": None}, {"heads": 4}, {"heads": [0, 4]}, {"layers": 0}, {"layers": [0.7]}, {"tokens": None}, {"group": 1}],
)
def test_a_tensor_described_with_wrong_types(wrong):
    good = {"axes": "block token head dim", "heads": range(4), "layers": [0], "kv": "k"}
    settings = {**good, **wrong}
    with pytest.raises(GeometryError):
        CacheTensor(torch.zeros(2, 4, 4, 8), settings.pop("axes"), **settings).spec()
