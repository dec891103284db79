"""What a peer names is held against what was announced and granted; one that lies moves nothing and is let go."""

import pytest
from inside import session, staging
from msgspec.structs import replace
from stage import Cache, Copied, eventually, quiet

from kvxfer import KvxferError
from kvxfer.protocol.messages import WHOLE, Accept, Arrived, Fetch, Grant, KvAgentResult, Reserve, Status, pack_u32

PLENTY = {"arena_bytes": "64KiB", "chunk_bytes": "16KiB", "route": "staged"}  # for all of a fetch in one chunk


@pytest.fixture
async def pair(stage, tap):
    tap.change[Fetch] = lambda fetch: replace(fetch, ring=[])  # what is granted is granted by `Reserve`
    source, target = Cache(), Cache()
    prefill, decode = await stage.pair(source, target, route="staged")  # in several chunks, each granted by itself
    return prefill, decode, source, target


@pytest.fixture
async def narrow(stage, tap):
    """As `pair`, in turns of two chunks, so that not all of a fetch are granted at once."""
    tap.change[Fetch] = lambda fetch: replace(fetch, ring=[])
    source, target = Cache(), Cache()
    prefill, decode = await stage.pair(source, target, route="staged", window=2)
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
    tap.change[Reserve] = lambda message: replace(message, ring=[move(place, span) for place in message.ring])
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
        (place,) = fetch.ring
        return replace(fetch, ring=[Grant(move(Grant(0, 0), span).address, place.length)])

    tap.change[Fetch] = change
    await ends_badly(start((prefill, decode, source, target)), target)
    assert "outside the staging memory" in caplog.text
    assert prefill.describe()["metrics"]["send"]["bytes"] == {}
    await quiet(prefill)


async def test_a_grant_that_is_too_short_is_not_written(pair, tap, caplog):
    prefill, _, _, target = pair
    tap.change[Reserve] = lambda message: replace(
        message, ring=[replace(place, length=place.length - 16) for place in message.ring]
    )
    await ends_badly(start(pair), target)
    assert "bytes were granted for a chunk of" in caplog.text
    await quiet(prefill)


async def test_a_place_that_is_too_short_ends_a_transfer_that_has_begun(pair, tap, caplog):
    """The first chunk is the mover's by then."""
    prefill, _, _, _ = pair
    tap.change[Reserve] = lambda message: replace(
        message, ring=[*message.ring[:1], *(replace(place, length=place.length - 16) for place in message.ring[1:])]
    )
    with pytest.raises(KvxferError):
        await start(pair)
    assert "bytes were granted for a chunk of" in caplog.text
    assert "nobody took" not in caplog.text
    await quiet(prefill)


async def test_a_grant_without_a_place_is_not_written(pair, tap, caplog):
    prefill, _, _, _ = pair
    tap.change[Reserve] = lambda message: replace(message, ring=[], token=b"")
    with pytest.raises(KvxferError):
        await start(pair, tokens=64)
    assert "protocol_violated" in caplog.text
    assert not prefill.describe()["metrics"]["send"]["bytes"]
    await quiet(prefill)


@pytest.mark.parametrize("token", [True, False])
async def test_chunks_of_a_grant_wait_for_their_places(pair, tap, token):
    """However many it is for, no two are under way to one place."""
    prefill, decode, source, target = pair
    tap.change[Reserve] = lambda message: message if token else replace(message, token=b"")
    prefill.offer("r", list(range(16)), tokens=64)
    copied = Copied(target).bring(source, range(16), range(16), range(64))
    await decode.fetch(prefill.engine.ticket("r"), list(range(16)), tokens=range(64), timeout=3)
    copied.check()
    said = tap.of(Reserve)
    assert max(one.chunks for one in said) > len(said[0].ring)


@pytest.mark.parametrize("ring", ["the same", "another"])
async def test_a_ring_is_not_taken_while_chunks_are_under_way_in_one(stage, narrow, tap, ring, caplog):
    prefill, decode, _, _ = narrow
    stage.network.hold("decode")
    transfer = start(narrow, tokens=64)
    await eventually(lambda: stage.network.held("decode") == 2)
    (said,) = tap.of(Reserve)
    places = said.ring if ring == "the same" else said.ring[::-1]
    session(decode).send(replace(said, chunks=said.chunks + 1, ring=places))
    await eventually(lambda: "protocol_violated" in caplog.text)
    stage.network.release("decode")
    with pytest.raises(KvxferError):
        await transfer
    assert len(stage.network.log) == 2
    await quiet(prefill)


@pytest.mark.parametrize("chunk", ["never granted", "none of these"])
async def test_what_was_not_granted_is_not_scattered_when_it_is_said_to_have_arrived(
    stage, narrow, tap, chunk, caplog, monkeypatch
):
    monkeypatch.setattr("kvxfer.decode.receiver._turns", lambda _: 2)  # else all is granted at once
    changed = []
    stage.network.hold("decode")

    def lie(message):
        if changed:
            return message
        granted, (accept,) = tap.of(Reserve)[-1].chunks, tap.of(Accept)
        assert granted < accept.chunks
        changed.append(message)
        return replace(message, chunks=(granted if chunk == "never granted" else accept.chunks) + 1)

    tap.change[Arrived] = lie
    transfer = start(narrow, tokens=64)
    await eventually(lambda: len(tap.of(Reserve)) == 1)  # so much ahead that no more is granted for the first to come
    await eventually(lambda: stage.network.held("decode") == 2)
    stage.network.release("decode", 1)
    with pytest.raises(KvxferError):
        await transfer
    stage.network.release("decode")
    assert changed
    assert "protocol_violated" in caplog.text


@pytest.mark.parametrize("sizes", ["of many chunks", "of one"])
async def test_a_result_with_another_number_of_bytes_fails_the_fetch(stage, tap, sizes):
    """Whatever it has brought: the two sides have meant something else by it."""
    source, target = Cache(), Cache()
    prefill, decode = await stage.pair(source, target, **(PLENTY if sizes == "of one" else {"route": "staged"}))
    tap.change[KvAgentResult] = lambda result: (
        replace(result, bytes=result.bytes + 16) if result.status is Status.OK and result.chunk == WHOLE else result
    )
    with pytest.raises(KvxferError, match=r"(\d+) bytes were to come by this side's plan, and (?!\1)\d+ by"):
        await start((prefill, decode, source, target))
    await quiet(prefill, decode)


async def test_block_ids_beyond_the_pool_are_refused(pair, tap):
    _, _, _, target = pair
    tap.change[Fetch] = lambda fetch: replace(
        fetch, spans=[replace(span, ids=pack_u32([10_000] * (len(span.ids) // 4))) for span in fetch.spans]
    )
    await ends_badly(start(pair), target)


async def test_a_peer_that_lied_can_come_back_and_be_served(pair, tap):
    prefill, decode, source, target = pair
    tap.change[Reserve] = lambda message: replace(message, ring=[replace(place, address=16) for place in message.ring])
    await ends_badly(start(pair), target)
    del tap.change[Reserve]
    prefill.offer("s", [1, 2], tokens=8)
    copied = Copied(target).bring(source, [1, 2], [3, 4], range(8))
    await decode.fetch(prefill.engine.ticket("s"), [3, 4], tokens=range(8), timeout=3)
    copied.check()
