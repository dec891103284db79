"""Copies of our own that stand still: nobody gets their memory, everybody hears in time, and they may end at any time.

In virtual time. On GPUs the same is tried with streams that are held up (`tests/gpu/test_standing_gpu.py`).
"""

import asyncio

import inside
import pytest
from stage import Cache, Copied, extents, is_quiet, raised
from standing import Standing
from wire import virtual

from kvxfer import BlocksError, ClosedError, Config, KvxferError, MemoryInDoubt, Released
from kvxfer.copy.port import Direction

TOKENS = range(8)
SLACK = 0.05
TIMES = {"peer_timeout": 7.0, "revoke_timeout": 3.0, "offer_lease": 11.0, "drain_timeout": 4.0}
BOUNDS = Config(**TIMES).bounds()
SIDES = [
    pytest.param("prefill", Direction.GATHER, id="gather"),
    pytest.param("decode", Direction.SCATTER, id="scatter"),
]


async def standing(play, side, direction, **config):
    """Two workers, and a transfer of which a copy stands still."""
    caches = {"source": Cache(shared=True), "target": Cache(shared=True)}
    await play.pair(**{"route": "staged", **caches, **TIMES, **config})
    await play.bring("before")
    copies = Standing(getattr(play, side), direction)
    offer, transfer = play.prefill.offer("r", [1, 2], tokens=8), play.start("r")
    await play.until(lambda: copies.held)
    return copies, offer, transfer


def held_of(play, side):
    return extents(getattr(play, side), "send" if side == "prefill" else "receive")


async def rebuilt(play, worker):
    """Have its agent made anew, and see that it does not take longer than it may."""
    began, over = play.now, []
    inside.rebuild(worker)
    inside.when_rebuilt(worker, lambda: over.append(play.now))
    await play.until(lambda: over)
    assert over[0] - began <= BOUNDS["rebuild"] + SLACK
    assert not worker.describe()["agent"]["paused"]


async def ends(play, copies, transfer):
    """What stood still goes on, and brings its bytes."""
    copied = Copied(play.target).bring(play.source, [1, 2], [3, 4], TOKENS)
    copies.go()
    await transfer
    copied.check()


async def quiet(play, *workers):
    await play.until(lambda: all(is_quiet(worker) for worker in workers or (play.prefill, play.decode)))


@pytest.mark.parametrize(
    ("side", "direction", "who"),
    [
        pytest.param("prefill", Direction.GATHER, "prefill", id="gather"),
        pytest.param("decode", Direction.SCATTER, "decode", id="scatter"),
        pytest.param("decode", Direction.SCATTER, "prefill", id="scatter, the peer's agent"),
    ],
)
@virtual
async def test_it_outlives_the_agent_and_brings_its_bytes(play, side, direction, who):
    copies, offer, transfer = await standing(play, side, direction)
    held = [(extent.offset, extent.state) for extent in held_of(play, side)]
    assert held
    await rebuilt(play, getattr(play, who))
    assert not transfer.done
    assert [(extent.offset, extent.state) for extent in held_of(play, side)] == held
    await ends(play, copies, transfer)
    assert isinstance(await offer.released(), Released)
    await quiet(play)
    await play.bring("after", ids=(5, 6), into=(9, 10))


@pytest.mark.parametrize(("side", "direction"), SIDES)
@virtual
async def test_no_agent_is_made_where_that_would_wait_for_it(play, monkeypatch, side, direction):
    """As on a GPU, where the process would stand still with it."""
    copies, _, transfer = await standing(play, side, direction)
    worker, launched, over = getattr(play, side), play.now, []
    monkeypatch.setattr(copies.real, "has_copy_since", lambda since: bool(copies.held) and launched <= since)
    inside.rebuild(worker)
    inside.when_rebuilt(worker, lambda: over.append(play.now))
    await play.until(lambda: worker.describe()["agent"]["paused"])
    await play.until(lambda: not worker.describe()["agent"]["paused"])
    copies.holding = False
    await play.bring("beside", ids=(5, 6), into=(9, 10))
    await play.until(lambda: worker.describe()["agent"]["paused"])  # it is tried again
    await play.until(lambda: not worker.describe()["agent"]["paused"])
    assert not over
    assert worker.describe()["agent"]["rebuilt"] == 0
    ended = play.now
    await ends(play, copies, transfer)
    await play.until(lambda: over)
    assert over[0] - ended <= BOUNDS["rebuild"] + SLACK
    await quiet(play)


@virtual
async def test_what_is_posted_as_it_ends_at_last_has_time_to_end_itself(play, monkeypatch):
    """Though nearly all the time is over in which it may end before no agent is made."""
    copies, _, transfer = await standing(play, "prefill", Direction.GATHER)
    monkeypatch.setattr(copies.real, "has_copy_since", lambda since: bool(copies.held))
    inside.rebuild(play.prefill)
    await play.until(lambda: play.prefill.describe()["agent"]["paused"])
    await asyncio.sleep(TIMES["revoke_timeout"] / 5 - 0.01)
    play.network.hold("decode")
    copied = Copied(play.target).bring(play.source, [1, 2], [3, 4], TOKENS)
    copies.go()
    await asyncio.sleep(0.1)
    assert play.network.held("decode")
    play.network.release("decode")
    await transfer
    copied.check()
    await play.until(lambda: play.prefill.describe()["agent"]["rebuilt"])
    await quiet(play)


@virtual
async def test_what_was_granted_to_it_is_taken_back_and_a_retry_brings_it(play):
    copies, _, transfer = await standing(play, "prefill", Direction.GATHER)
    await rebuilt(play, play.decode)
    assert "try again" in str(await raised(transfer, KvxferError))
    assert transfer.memory_safe
    copies.holding = False
    copied = Copied(play.target).bring(play.source, [1, 2], [3, 4], TOKENS)
    await play.start("r")  # though the first one stands still
    copied.check()
    await quiet(play, play.decode)
    moved = len(play.network.log)
    copies.go()
    await quiet(play)
    assert len(play.network.log) == moved, "and the first one wrote to whom its memory belongs by now"


@pytest.mark.parametrize("route", ["staged", "mapped"])
@pytest.mark.parametrize("rebuild", [False, True], ids=["", "rebuilt"])
@virtual
async def test_an_offer_whose_blocks_it_reads_is_in_doubt_in_time(play, route, rebuild):
    copies, offer, transfer = await standing(play, "prefill", Direction.GATHER, route=route)
    began = play.now
    ending = asyncio.ensure_future(raised(offer.withdraw(), MemoryInDoubt))
    if rebuild:
        await rebuilt(play, play.prefill)
        assert copies.held
    outcome = await ending
    assert BOUNDS["revoke"] - SLACK <= play.now - began <= BOUNDS["revoke"] + SLACK
    await rebuilt(play, play.prefill)
    settled = asyncio.ensure_future(outcome.settled())
    await asyncio.sleep(1)
    assert not settled.done()
    with pytest.raises(BlocksError, match="may still read it"):
        play.prefill.offer("s", [1], tokens=4)
    failure = await raised(transfer, KvxferError)
    assert "withdrawn" in str(failure)
    assert transfer.memory_safe is (route == "staged")
    assert play.now - began <= 2 * BOUNDS["revoke"] + BOUNDS["rebuild"]
    moved, kept = len(play.network.log), play.target.clone()
    copies.go()
    await settled
    await play.until(lambda: transfer.memory_safe)
    assert len(play.network.log) == moved, "it was posted though nobody wanted it any more"
    if route == "staged":
        assert all(kept[layer].equal(memory) for layer, memory in play.target.memory.items())
    await quiet(play)
    await play.bring("after")


@virtual
async def test_so_is_one_whose_fetch_was_cancelled_and_whose_lease_ran_out(play):
    copies, offer, transfer = await standing(play, "prefill", Direction.GATHER)
    transfer.cancel()
    began = play.now
    await raised(transfer, asyncio.CancelledError)
    assert transfer.memory_safe
    await play.decode.decline(play.ticket("other"))  # the stream lives
    outcome = await raised(offer.released(), MemoryInDoubt)
    assert play.now - began <= BOUNDS["released_by_lease"] + SLACK
    copies.go()
    await outcome.settled()
    await quiet(play)


@virtual
async def test_so_is_one_whose_blocks_are_added_up(play):
    await play.pair(route="direct", integrity="full", **TIMES)
    copies = Standing(play.prefill, Direction.GATHER)
    offer, transfer = play.prefill.offer("r", [1, 2], tokens=8), play.start("r")
    await play.until(lambda: copies.held)
    began = play.now
    outcome = await raised(offer.withdraw(), MemoryInDoubt)
    assert play.now - began <= BOUNDS["revoke"] + SLACK
    copies.go()
    await outcome.settled()
    await raised(transfer, KvxferError)
    await quiet(play)


@pytest.mark.parametrize("gone", [False, True], ids=["", "the peer is gone"])
@virtual
async def test_blocks_that_it_writes_are_in_doubt_in_time_and_a_new_agent_is_no_evidence(play, gone, monkeypatch):
    if gone:  # and everybody is on a host of his own, so that a new agent ends what the peer may do
        names = iter(range(9))
        inside.live_where(lambda: f"boot-{next(names)} pid:[1]", monkeypatch)
    copies, _, transfer = await standing(play, "decode", Direction.SCATTER)
    if gone:
        play.wire.cut()
    began = play.now
    transfer.cancel()
    outcome = await raised(transfer, MemoryInDoubt)
    assert "copy" in str(outcome)
    assert play.now - began <= BOUNDS["revoke"] + SLACK
    await rebuilt(play, play.decode)
    kept = [extent.state.value for extent in held_of(play, "decode")]
    assert kept == ["writing"] * len(copies.held)
    settled = asyncio.ensure_future(outcome.settled())
    with pytest.raises(BlocksError, match="may still write it"):
        play.start("s")
    await asyncio.sleep(1)
    assert not settled.done()
    assert not transfer.memory_safe
    late = Copied(play.target).bring(play.source, [1, 2], [3, 4], TOKENS)
    copies.go()
    late.check()  # they landed while the blocks were still kept from everybody
    await settled
    await quiet(play, play.decode)


@pytest.mark.parametrize("transport", [True, False], ids=["", "nor does the transport return"])
@pytest.mark.parametrize(("side", "direction"), SIDES)
@virtual
async def test_closing_does_not_wait_for_it_and_leaks_what_it_touches(play, side, direction, caplog, transport):
    copies, offer, transfer = await standing(play, side, direction)
    worker = getattr(play, side)
    if not transport:
        inside.close_fabric_by(worker, asyncio.Event().wait)
    kept, before = held_of(play, side), len(inside.leaked())
    _, waited = await play.timed(worker.aclose(drain=False))
    assert waited <= BOUNDS["close"] - TIMES["drain_timeout"] + SLACK
    assert copies.held
    assert kept
    assert len(inside.leaked()) == before + 1
    assert not inside.holds_arena(worker)
    assert caplog.text.count("memory_leaked") == 1
    outcome = await raised(offer.released() if side == "prefill" else transfer, MemoryInDoubt)
    with pytest.raises(ClosedError, match="never reuse"):
        await outcome.settled()
    copies.go()  # into memory that is there for good
    await asyncio.gather(transfer, return_exceptions=True)


@virtual
async def test_a_worker_that_closes_keeps_what_its_copy_writes_mapped_and_stays_inside_of_its_gate(play):
    """Until the copy ends: the other one finds the gate empty then, and no sooner."""
    copies, _, transfer = await standing(play, "prefill", Direction.GATHER, route="mapped")
    mapped = inside.mapped_windows(play.prefill)
    assert len(mapped) == 1
    await play.prefill.aclose(drain=False)
    outcome = await raised(transfer, MemoryInDoubt)
    await asyncio.sleep(10 * TIMES["revoke_timeout"])
    assert not transfer.memory_safe
    assert inside.mapped_windows(play.prefill) == mapped
    late = Copied(play.target).bring(play.source, [1, 2], [3, 4], TOKENS)
    copies.go()
    late.check()
    await outcome.settled()
    await quiet(play, play.decode)


@virtual
async def test_a_worker_that_closes_stays_inside_of_the_gate_of_a_post_that_it_leaves_in_flight(play):
    await play.pair(route="direct", **TIMES)
    await play.bring("before")
    play.network.hold("decode")
    play.prefill.offer("r", [1, 2], tokens=8)
    transfer = play.start("r")
    await play.until(lambda: play.network.held("decode"))
    await play.prefill.aclose(drain=False)
    outcome = await raised(transfer, MemoryInDoubt)
    await asyncio.sleep(10 * TIMES["revoke_timeout"])
    assert not transfer.memory_safe
    late = Copied(play.target).bring(play.source, [1, 2], [3, 4], TOKENS)
    play.network.release("decode")
    late.check()
    await play.decode.aclose(drain=False)
    with pytest.raises(ClosedError, match="never reuse"):
        await outcome.settled()
