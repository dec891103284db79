"""Callers that use no type checker: a wrong type is a typed error, and nothing is lost by it."""

import asyncio
import os
import signal
from functools import partial
from typing import Any

import pytest
import torch
from inside import waits_for_layers
from stage import DEFAULTS, Cache, eventually

from kvxfer import BlockingWorker, Config, UsageError, drain_on_signal
from kvxfer.errors import BlocksError, ClosedError, ConfigError, GeometryError, RequestError, TicketError, TokensError
from kvxfer.fabric.loopback import LoopbackNetwork, LoopbackTransport
from kvxfer.geometry import CacheTensor
from kvxfer.tickets import EngineCard, Issuer

NO_SECONDS: list[Any] = ["3", float("inf"), float("nan"), [1], torch.zeros(3)]


@pytest.mark.parametrize("timeout", NO_SECONDS)
async def test_a_wrong_timeout_strands_nothing(pair, timeout):
    prefill, decode = pair
    offer = prefill.offer("r", [1], tokens=4)
    ticket = prefill.engine.ticket("r")
    with pytest.raises(RequestError, match="timeout must be a number of seconds"):
        decode.start_fetch(ticket, [2], tokens=range(4), timeout=timeout)
    assert decode.describe()["custody"].held_blocks == 0
    await decode.fetch(ticket, [2], tokens=range(4), timeout=10)
    await offer.released()


@pytest.mark.parametrize("timeout", NO_SECONDS)
async def test_a_wrong_timeout_of_a_drain_is_heard_before_it_begins(pair, timeout):
    """And not when the signal comes, which is too late."""
    with pytest.raises(RequestError, match="timeout must be a number of seconds"):
        await pair[0].drain(timeout)
    with pytest.raises(RequestError, match="timeout must be a number of seconds"):
        await drain_on_signal(pair[0], timeout=timeout)
    assert not pair[0].describe()["draining"]


@pytest.mark.parametrize("signals", [("SIGTERM",), (None,), (15.0,), (0,), (10_000,)])
async def test_what_is_no_signal_is_heard_before_one_comes(pair, signals):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(UsageError, match="cannot be handled here"):
        await drain_on_signal(pair[0], signal.SIGTERM, *signals)
    assert signal.getsignal(signal.SIGTERM) is before


async def test_a_signal_may_be_a_number(pair):
    number: Any = int(signal.SIGUSR1)
    waiting = asyncio.create_task(drain_on_signal(pair[0], number))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGUSR1)
    async with asyncio.timeout(30):
        assert await waiting is True


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


@pytest.mark.parametrize("layers", [range(10**30), [0, 2], ["0"], [0.0], 0, [[0]]])
async def test_layers_of_an_offer_are_those_that_are_held(pair, layers):
    """And what is none is not looked for in all that was given, which may be without end."""
    offer = pair[0].offer("r", [1], tokens=4, streaming=True)
    with pytest.raises(TokensError, match=r"layer \d+ is not held here|takes a list of layers"):
        offer.ready(layers=layers)
    offer.ready()  # nothing was marked by halves
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


@pytest.mark.parametrize("payload", ["text", None, [1], torch.zeros(4)])
async def test_a_payload_is_bytes(pair, payload):
    prefill, decode = pair
    with pytest.raises(RequestError, match="a payload is bytes"):
        prefill.offer("r", [1], tokens=4, payload=payload)
    offer = prefill.offer("r", [1], tokens=4, payload=bytearray(b"fine"))  # the id was not used up
    result = await decode.fetch(prefill.engine.ticket("r"), [2], tokens=range(4), timeout=10)
    assert result.payload == b"fine"
    await offer.released()


@pytest.mark.parametrize("tokens", [4, None, (0, 4), [0, 4], "4"])
async def test_tokens_of_a_fetch_are_a_range(pair, tokens):
    prefill, decode = pair
    with pytest.raises(TokensError, match="tokens must be a range"):
        decode.start_fetch(prefill.engine.ticket("r"), [2], tokens=tokens)


@pytest.mark.parametrize("tokens", [4.0, "4", range(4)])
async def test_tokens_of_an_offer_are_a_number(pair, tokens):
    with pytest.raises(TokensError, match="how many tokens"):
        pair[0].offer("r", [1], tokens=tokens)


@pytest.mark.parametrize("ctas", [0, -1, 4097, 1.0, True, "24", None])
async def test_thread_blocks_are_a_number(pair, ctas):
    with pytest.raises(ConfigError, match="give a number from 1 to 4096"):
        pair[0].occupy(ctas)
    pair[0].occupy(4096)
    await pair[0].aclose()
    with pytest.raises(ClosedError):
        pair[0].occupy(24)


async def test_marks_of_a_streaming_offer(pair):
    offer = pair[0].offer("r", [1], tokens=4, streaming=True)
    for wrong in ({"tokens": "4"}, {"tokens": 4.5}, {"layers": 0}):
        with pytest.raises(TokensError, match="ready"):
            offer.ready(**wrong)
    await offer.withdraw()


@pytest.mark.parametrize("blocks", [[[1], [2, 3]], torch.zeros(2, device="meta")])
async def test_blocks_that_are_no_list_of_ids(pair, blocks):
    with pytest.raises(BlocksError, match="whole numbers"):
        pair[0].offer("r", blocks, tokens=4)


@pytest.mark.parametrize(
    "wrong",
    [{"axes": None}, {"heads": 4}, {"heads": [0, 4]}, {"layers": 0}, {"layers": [0.7]}, {"tokens": None}, {"group": 1}],
)
def test_a_tensor_described_with_wrong_types(wrong):
    good = {"axes": "block token head dim", "heads": range(4), "layers": [0], "kv": "k"}
    settings = {**good, **wrong}
    with pytest.raises(GeometryError):
        CacheTensor(torch.zeros(2, 4, 4, 8), settings.pop("axes"), **settings).spec()


@pytest.mark.parametrize("key", ["x" * 32, 1.0, None, [0] * 32])
async def test_a_key_is_bytes(pair, key):
    card = EngineCard.of([pair[0].card])
    with pytest.raises(TicketError, match="bytes"):
        Issuer(card, key)


@pytest.mark.parametrize("cards", [None, 1, [None], "cards", {"world": 1}])
def test_cards_are_a_list_of_cards(cards):
    with pytest.raises(TicketError, match="card"):
        EngineCard.of(cards)


@pytest.mark.parametrize("file", [1, b"settings.toml", ["settings.toml"], {}])
def test_a_file_of_settings_is_a_path(file):
    with pytest.raises(ConfigError, match="give the path of a TOML or JSON file"):
        Config.load(file)
