"""The grant that rides with a fetch: used where the offer is ready, void where it is not, and in doubt until known."""

import asyncio

import pytest
from inside import hear, holds, pause_grants, resume_grants, send_by, session
from msgspec.structs import replace
from stage import Cache, Copied, Gate, eventually, extents, is_quiet, quiet, written
from wire import virtual

from kvxfer import PeerLostError, RefusedError
from kvxfer.errors import Code, TransferFailedError
from kvxfer.protocol.messages import FOREVER_MS, Accept, Arrived, Cancel, Fetch, Ready, Reserve

HELD = list(range(8))
ONE_CHUNK = {"chunk_bytes": "32KiB", "arena_bytes": "128KiB"}


def caches():
    return Cache(shared=True), Cache(shared=True, layout="HND")


def begin(prefill, decode, request="r", **options):
    return decode.start_fetch(prefill.engine.ticket(request), HELD, tokens=range(3, 30), **{"timeout": 5, **options})


@pytest.fixture
def bring(stage):
    """A fetch of most of what is offered."""

    def bringing(prefill, decode, request="r", **options):
        return stage.bring(prefill, decode, request, HELD[::-1], HELD, range(3, 30), **options)

    return bringing


@pytest.mark.parametrize("route", ["mapped", "direct"])
async def test_a_transfer_that_is_ready_needs_one_exchange(stage, tap, route, bring):
    prefill, decode = await stage.pair(*caches(), route=route)
    result, released = await bring(prefill, decode, offered={"payload": b"first"})
    (ending,) = released.stats
    assert result.payload == b"first"
    assert not tap.of(Ready)
    assert not tap.of(Reserve)
    assert tap.of(Accept)[0].spans == []
    said = ("route", "chunks", "pieces", "bytes")
    assert [getattr(result.stats, name) for name in said] == [getattr(ending, name) for name in said]
    assert result.stats.chunks > 1
    assert result.stats.pieces > 1
    await quiet(prefill, decode)


@pytest.mark.parametrize("route", ["direct", "staged"])
async def test_what_was_moved_under_another_plan_still_arrives_when_that_is_noticed(stage, tap, route, bring):
    """The fetch has failed by then, and the session serves others."""
    prefill, decode = await stage.pair(*caches(), route=route, **ONE_CHUNK)
    prefill.offer("r", HELD, tokens=30)
    heard = []

    def arrives(transfer):
        hear(decode, session(decode), Arrived(transfer, 1))
        heard.append(transfer)

    def crosses(cancel):
        asyncio.get_running_loop().call_soon(arrives, cancel.transfer)
        return cancel

    tap.change[Accept] = lambda accept: replace(accept, digest=bytes(32))
    tap.change[Cancel] = crosses
    held = holds(decode)
    with pytest.raises(TransferFailedError) as caught:
        await begin(prefill, decode)
    assert caught.value.reason is Code.PLAN_DIFFERS
    assert tap.of(Accept)[0].ahead
    assert len(held) == len(heard) == 1, "what was on its way by then needs this side's help to arrive over TCP"
    link = session(decode)
    await quiet(decode)
    del tap.change[Accept]
    await bring(prefill, decode, "again")
    assert session(decode) is link
    await begin(prefill, decode)
    await quiet(prefill, decode)


@pytest.mark.parametrize(("route", "streaming"), [("direct", False), ("direct", True), ("staged", False)])
async def test_a_fetch_that_waits_for_its_offer_grants_nothing_meanwhile(stage, tap, route, streaming):
    source, target = caches()
    prefill, decode = await stage.pair(source, target, route=route, **ONE_CHUNK)
    offer = prefill.offer("r", streaming=True) if streaming else None
    transfer = begin(prefill, decode)
    await eventually(lambda: tap.of(Ready))
    assert tap.of(Ready) == [Ready(tap.of(Fetch)[0].transfer, 0)]
    await eventually(lambda: not (written(decode) if route == "direct" else extents(decode, "receive")))
    copied = Copied(target).bring(source, HELD, HELD, range(3, 30))
    if offer is None:
        prefill.offer("r", HELD, tokens=30)
    else:
        offer.extend(HELD, tokens=range(30))
        offer.ready()
        offer.finish()
    await transfer
    copied.check()
    assert tap.of(Reserve)
    await quiet(prefill, decode)


@pytest.mark.parametrize("why", ["blocks in use", "nothing may be granted", "pull"])
async def test_nothing_is_granted_ahead_that_cannot_be(stage, tap, why, bring):
    route = "pull" if why == "pull" else "direct"
    prefill, decode = await stage.pair(*caches(), route=route)
    await bring(prefill, decode, "r0")
    tap.sent.clear()
    after = Gate()
    after.fired = why != "blocks in use"
    if why == "nothing may be granted":
        pause_grants(decode)
    prefill.offer("r", HELD, tokens=30)
    transfer = begin(prefill, decode, after=after)
    await eventually(lambda: tap.of(Ready))
    if why == "nothing may be granted":
        resume_grants(decode)
    after.fired = True
    await transfer
    assert [(fetch.lease_ms, fetch.agreement) for fetch in tap.of(Fetch)] == [(0, b"")]
    await quiet(prefill, decode)


@pytest.mark.parametrize(("route", "agreement"), [("direct", bytes(32)), ("direct", b""), ("staged", bytes(32))])
async def test_plans_that_differ_are_refused_before_a_byte_is_written(stage, tap, route, agreement):
    source, target = caches()
    prefill, decode = await stage.pair(source, target, route=route, **ONE_CHUNK)
    prefill.offer("r", HELD, tokens=30)
    before = Copied(target)
    tap.change[Fetch] = lambda fetch: replace(fetch, agreement=agreement)
    with pytest.raises(RefusedError, match="their plans differ") as caught:
        await begin(prefill, decode)
    assert caught.value.reason is Code.PLAN_DIFFERS
    before.check()
    await quiet(prefill, decode)


async def test_nothing_is_held_of_a_grant_that_could_not_be_sent(stage, monkeypatch, bring):
    """The session may be lost between a fetch's look for it and its first frame."""
    prefill, decode = await stage.pair(*caches(), route="direct")
    await bring(prefill, decode, "r0")
    prefill.offer("r", HELD, tokens=30)
    send_by(lambda send, messages: False, monkeypatch)
    with pytest.raises(PeerLostError):
        await begin(prefill, decode)
    assert not written(decode)
    assert decode.describe()["receiving"] == decode.describe()["in_doubt"] == 0


@pytest.mark.parametrize("route", ["direct", "pull", "staged"])
async def test_more_bytes_have_a_longer_lease(stage, tap, route):
    """As long as a slow wire needs to begin with the last of what is under way."""
    sizes = {"chunk_bytes": "2KiB", "window": 2, "grant_lease": 2}
    prefill, decode = await stage.pair(Cache(blocks=128), Cache(blocks=128, layout="HND"), route=route, **sizes)
    result, _ = await stage.bring(prefill, decode, "r", range(128), range(128), range(512))
    frames = {"direct": tap.of(Fetch), "pull": tap.of(Ready), "staged": tap.of(Reserve)}[route]
    per_byte = 2000 / (2 * 2048)
    if route == "direct":
        assert frames[0].lease_ms == pytest.approx(result.stats.bytes * per_byte, rel=0.1)
    elif route == "pull":
        assert result.stats.chunks > 16
        assert max(frame.lease_ms for frame in frames) == pytest.approx(16 * 2048 * per_byte, rel=0.1)
    else:
        assert max(frame.lease_ms for frame in frames) <= 2000 * 1.01


async def test_no_lease_is_longer_than_a_frame_can_say(stage, tap, bring):
    sizes = {"chunk_bytes": "1KiB", "window": 1, "grant_lease": 1_000_000}
    await bring(*await stage.pair(*caches(), route="direct", **sizes))
    assert tap.of(Fetch)[0].lease_ms == FOREVER_MS


@virtual
async def test_the_lease_counts_from_the_fetch(one, tap):
    source, target = caches()
    await one.pair(source=source, target=target, route="direct")
    after = Gate()
    one.prefill.offer("r", HELD, tokens=30, after=after)
    tap.change[Fetch] = lambda fetch: replace(fetch, lease_ms=200)
    transfer = begin(one.prefill, one.decode)
    await one.until(lambda: tap.of(Accept))
    assert tap.of(Accept)[0].ahead
    await asyncio.sleep(0.25)
    after.fired = True
    with pytest.raises(TransferFailedError, match="lease ran out"):
        await transfer
    await one.until(lambda: is_quiet(one.prefill) and is_quiet(one.decode))
