"""What a peer names is held against what was announced and granted; one that lies moves nothing and is let go."""

import pytest
from inside import staging
from msgspec.structs import replace
from stage import Cache, Copied, Tap, quiet

from kvxfer import KvxferError
from kvxfer.protocol.messages import WHOLE, Fetch, Grant, KvAgentResult, Reserve, Status
from kvxfer.protocol.packing import pack_u32

PLENTY = {"arena_bytes": "64KiB", "chunk_bytes": "16KiB", "route": "staged"}  # for all of a fetch in one chunk


@pytest.fixture
def tap(monkeypatch):
    return Tap(monkeypatch)


@pytest.fixture
async def pair(stage):
    source, target = Cache(), Cache()
    prefill, decode = await stage.pair(source, target, route="staged")  # in several chunks, each granted by itself
    return prefill, decode, source, target


def start(pair, tokens=32):
    prefill, decode, _, _ = pair
    blocks = list(range(tokens // 4))
    prefill.offer("r", blocks, tokens=tokens)
    return decode.start_fetch(prefill.engine.ticket("r"), blocks, tokens=range(tokens), timeout=3)


async def ends_badly(transfer, target):
    untouched = Copied(target)
    with pytest.raises(KvxferError) as caught:
        await transfer
    untouched.check()
    return str(caught.value)


def outside(place):
    """The address in a grant is moved out of the staging memory that was announced."""

    def change(grant, span):
        first, last = span.address, span.address + span.length
        address = {"before": first - 16, "behind": last, "across the end": last - 16, "far": (1 << 63) - 4096}[place]
        return replace(grant, address=address)

    return change


@pytest.mark.parametrize("place", ["before", "behind", "across the end", "far"])
async def test_a_grant_outside_of_staging_memory_is_not_written(pair, tap, place, caplog):
    prefill, decode, _, target = pair
    span, move = staging(decode, "receive"), outside(place)
    tap.change[Reserve] = lambda message: replace(message, grants=[move(grant, span) for grant in message.grants])
    await ends_badly(start(pair), target)
    assert "outside the staging memory" in caplog.text
    assert prefill.describe()["metrics"]["send"]["bytes"] == {}
    await quiet(prefill)


@pytest.mark.parametrize("place", ["before", "behind", "across the end", "far"])
async def test_nor_is_one_that_rides_with_a_fetch(stage, tap, place, caplog):
    source, target = Cache(), Cache()
    prefill, decode = await stage.pair(source, target, **PLENTY)
    span, move = staging(decode, "receive"), outside(place)

    def change(fetch):
        assert fetch.staging_bytes
        return replace(fetch, staging_address=move(Grant(0, 0, 0), span).address)

    tap.change[Fetch] = change
    await ends_badly(start((prefill, decode, source, target)), target)
    assert "outside the staging memory" in caplog.text
    assert prefill.describe()["metrics"]["send"]["bytes"] == {}
    await quiet(prefill)


async def test_a_grant_that_is_too_short_is_not_written(pair, tap, caplog):
    prefill, _, _, target = pair
    tap.change[Reserve] = lambda message: replace(
        message, grants=[replace(grant, length=grant.length - 16) for grant in message.grants]
    )
    await ends_badly(start(pair), target)
    assert "bytes were granted for a chunk of" in caplog.text
    await quiet(prefill)


@pytest.mark.parametrize("chunk", ["never granted", "none of these"])
async def test_a_result_for_what_was_not_granted_is_not_scattered(pair, tap, chunk, caplog):
    number = {"never granted": lambda chunks: chunks - 1, "none of these": lambda chunks: chunks}[chunk]
    changed = []

    def lie(result):
        if result.status is not Status.OK or result.chunk == WHOLE or changed:
            return result
        changed.append(result)
        return replace(result, chunk=number(8), last=False)

    tap.change[KvAgentResult] = lie
    with pytest.raises(KvxferError):
        await start(pair, tokens=64)
    assert changed
    assert "protocol_violated" in caplog.text


async def test_a_result_with_another_number_of_bytes_fails_the_fetch(pair, tap):
    _, _, _, target = pair
    tap.change[KvAgentResult] = lambda result: (
        replace(result, bytes=result.bytes + 16) if result.status is Status.OK and result.chunk != WHOLE else result
    )
    assert "bytes" in await ends_badly(start(pair), target)


async def test_block_ids_beyond_the_pool_are_refused(pair, tap):
    _, _, _, target = pair
    tap.change[Fetch] = lambda fetch: replace(
        fetch, spans=[replace(span, ids=pack_u32([10_000] * (len(span.ids) // 4))) for span in fetch.spans]
    )
    await ends_badly(start(pair), target)


async def test_a_peer_that_lied_can_come_back_and_be_served(pair, tap):
    prefill, decode, source, target = pair
    tap.change[Reserve] = lambda message: replace(message, grants=[replace(g, address=16) for g in message.grants])
    await ends_badly(start(pair), target)
    del tap.change[Reserve]
    prefill.offer("s", [1, 2], tokens=8)
    copied = Copied(target).bring(source, [1, 2], [3, 4], range(8))
    await decode.fetch(prefill.engine.ticket("s"), [3, 4], tokens=range(8), timeout=3)
    copied.check()
