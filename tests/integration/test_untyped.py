"""Callers that use no type checker: a wrong type is a typed error, and nothing is lost by it."""

from typing import Any

import pytest
import torch
from stage import Cache

from kvxfer.errors import BlocksError, ClosedError, ConfigError, GeometryError, RequestError, TicketError, TokensError
from kvxfer.geometry import CacheTensor
from kvxfer.tickets import EngineCard, Issuer


@pytest.fixture
async def pair(stage):
    return await stage.pair(Cache(), Cache())


@pytest.mark.parametrize("timeout", ["3", float("inf"), float("nan"), [1]])
async def test_a_wrong_timeout_strands_nothing(pair, timeout):
    prefill, decode = pair
    offer = prefill.offer("r", [1], tokens=4)
    ticket = prefill.engine.ticket("r")
    with pytest.raises(RequestError, match="timeout must be a number of seconds"):
        decode.start_fetch(ticket, [2], tokens=range(4), timeout=timeout)
    assert decode.describe()["custody"].held_blocks == 0
    await decode.fetch(ticket, [2], tokens=range(4), timeout=10)
    await offer.released()


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


async def test_a_key_is_bytes(pair):
    card = EngineCard.of([pair[0].card])
    key: Any = "x" * 32
    with pytest.raises(TicketError, match="bytes"):
        Issuer(card, key)


async def test_the_first_claim_begins_the_lease(stage):
    prefill, decode = await stage.pair(Cache(), Cache(), unclaimed_timeout=60, offer_lease=1.1, heartbeat=0.5)
    offer = prefill.offer("r", [1], tokens=4)
    decode.claim(prefill.engine.ticket("r")).close()
    ending = await offer.released()
    assert "its decode engine stopped renewing it" in ending.reason
