"""What a peer names is held against what was announced and granted; one that lies moves nothing and is let go."""

import pytest
from inside import before_hearing, hear, session, staging
from msgspec.structs import replace
from stage import Copied, Gate, eventually, quiet

from kvxfer import KvxferError
from kvxfer.protocol.messages import WHOLE, Accept, Arrived, Fetch, KvAgentResult, Reserve, Status, pack_u32

PLENTY = {"arena_bytes": "64KiB", "chunk_bytes": "16KiB", "route": "staged"}  # for all of a fetch in one chunk


@pytest.fixture
async def pair(stage, source, target, tap):
    tap.change[Fetch] = lambda fetch: replace(fetch, ring=[])  # what is granted is granted by `Reserve`
    return await stage.pair(source, target, route="staged")  # in several chunks, each granted by itself


@pytest.fixture
async def narrow(stage, source, target, tap):
    """As `pair`, in turns of two chunks, so that not all of a fetch are granted at once."""
    tap.change[Fetch] = lambda fetch: replace(fetch, ring=[])
    return await stage.pair(source, target, route="staged", window=2)


def start(stage, pair, tokens=32):
    blocks = range(tokens // 4)
    _, transfer = stage.begin(*pair, "r", blocks, blocks, range(tokens), timeout=3)
    return transfer


async def ends_badly(transfer, target):
    untouched = Copied(target)
    with pytest.raises(KvxferError) as caught:
        await transfer
    untouched.check()
    return str(caught.value)


@pytest.mark.parametrize("rides", [False, True], ids=["", "with a fetch"])
@pytest.mark.parametrize("place", ["before", "behind", "across the end", "far"])
async def test_a_grant_outside_of_staging_memory_is_not_written(stage, source, target, tap, place, rides, caplog):
    prefill, decode = await stage.pair(source, target, **(PLENTY if rides else {"route": "staged"}))
    first = staging(decode, "receive").address
    last = first + staging(decode, "receive").length
    address = {"before": first - 16, "behind": last, "across the end": last - 16, "far": (1 << 63) - 4096}[place]

    def moved(message):
        return replace(message, ring=[replace(place, address=address) for place in message.ring])

    tap.change |= {Fetch: moved} if rides else {Fetch: lambda fetch: replace(fetch, ring=[]), Reserve: moved}
    await ends_badly(start(stage, (prefill, decode)), target)
    assert "outside the staging memory" in caplog.text
    assert prefill.describe()["metrics"]["send"]["bytes"] == {}
    await quiet(prefill)


@pytest.mark.parametrize("first", [0, 1], ids=["", "behind the first"])
async def test_a_place_that_is_too_short_is_not_written(stage, pair, target, tap, first, caplog):
    """Nor is one behind others, though the first chunk is the mover's by then."""
    tap.change[Reserve] = lambda message: replace(
        message,
        ring=[replace(place, length=place.length - 16 * (n >= first)) for n, place in enumerate(message.ring)],
    )
    untouched = Copied(target)
    with pytest.raises(KvxferError):
        await start(stage, pair)
    if first == 0:
        untouched.check()
    assert "bytes were granted for a chunk of" in caplog.text
    assert "nobody took" not in caplog.text
    await quiet(pair[0])


async def test_a_grant_without_a_place_is_not_written(stage, pair, tap, caplog):
    tap.change[Reserve] = lambda message: replace(message, ring=[], token=b"")
    with pytest.raises(KvxferError):
        await start(stage, pair, tokens=64)
    assert "protocol_violated" in caplog.text
    assert not pair[0].describe()["metrics"]["send"]["bytes"]
    await quiet(pair[0])


@pytest.mark.parametrize("token", [True, False])
async def test_chunks_of_a_grant_wait_for_their_places(stage, pair, tap, token):
    """However many it is for, no two are under way to one place."""
    tap.change[Reserve] = lambda message: message if token else replace(message, token=b"")
    await stage.bring(*pair, "r", range(16), range(16), range(64))
    said = tap.of(Reserve)
    assert max(one.chunks for one in said) > len(said[0].ring)


@pytest.mark.parametrize("ring", ["the same", "another"])
async def test_a_ring_is_not_taken_while_chunks_are_under_way_in_one(stage, narrow, tap, ring, caplog):
    prefill, decode = narrow
    stage.network.hold("decode")
    transfer = start(stage, narrow, tokens=64)
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
async def test_what_was_not_granted_is_not_scattered_when_it_is_said_to_have_arrived(stage, narrow, tap, chunk, caplog):
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
    transfer = start(stage, narrow, tokens=64)
    await eventually(lambda: len(tap.of(Reserve)) == 1)  # so much ahead that no more is granted for the first to come
    await eventually(lambda: stage.network.held("decode") == 2)
    stage.network.release("decode", 1)
    with pytest.raises(KvxferError):
        await transfer
    stage.network.release("decode")
    assert changed
    assert "protocol_violated" in caplog.text


@pytest.mark.parametrize("sizes", ["of many chunks", "of one"])
async def test_a_result_with_another_number_of_bytes_fails_the_fetch(stage, source, target, tap, sizes):
    """Whatever it has brought: the two sides have meant something else by it."""
    prefill, decode = await stage.pair(source, target, **(PLENTY if sizes == "of one" else {"route": "staged"}))
    tap.change[KvAgentResult] = lambda result: (
        replace(result, bytes=result.bytes + 16) if result.status is Status.OK and result.chunk == WHOLE else result
    )
    with pytest.raises(KvxferError, match=r"(\d+) bytes were to come by this side's plan, and (?!\1)\d+ by"):
        await start(stage, (prefill, decode))
    await quiet(prefill, decode)


async def test_another_last_result_counts_for_nothing(stage, source, target):
    prefill, decode = await stage.pair(source, target, **PLENTY)
    gate, last = Gate(), []
    before_hearing(decode, lambda message: last.append(message) if isinstance(message, KvAgentResult) else None)
    copied = Copied(target).bring(source, [1, 2], [3, 4], range(8))
    _, transfer = stage.begin(prefill, decode, after=gate)
    await eventually(lambda: last)
    hear(decode, session(decode), replace(last[0], bytes=last[0].bytes + 16))
    gate.fired = True
    await transfer
    copied.check()
    await quiet(prefill, decode)


async def test_block_ids_beyond_the_pool_are_refused(stage, pair, target, tap):
    tap.change[Fetch] = lambda fetch: replace(
        fetch, spans=[replace(span, ids=pack_u32([10_000] * (len(span.ids) // 4))) for span in fetch.spans]
    )
    await ends_badly(start(stage, pair), target)


async def test_a_peer_that_lied_can_come_back_and_be_served(stage, pair, target, tap):
    tap.change[Reserve] = lambda message: replace(message, ring=[replace(place, address=16) for place in message.ring])
    await ends_badly(start(stage, pair), target)
    del tap.change[Reserve]
    await stage.bring(*pair, "s")
