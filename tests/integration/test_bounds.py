"""`Config.bounds()` keeps its word: each kind of failure is made, in virtual time, and heard of in time.

Every case also names the earliest moment at which it may be heard: a failure that is reported long before its bound
would mean that the settings behind the bound are not what decides.
"""

import asyncio
from functools import partial

import pytest
from inside import live_where, never_move, rebuild, when_rebuilt
from stage import Gate, frames, quarantined, raised
from wire import TIMES, deaf_port, play, virtual

import kvxfer

SLACK = 0.05
"""Scheduling comes on top of a bound; in virtual time that is a poll's interval or two."""
CONFIG = kvxfer.Config(**TIMES)
BOUNDS = CONFIG.bounds()


CASES = []
"""Kinds of failures, and scenarios that make them."""


def hears(kind, *given):
    """This scenario makes a failure of this kind; with what is given, once for each of it."""

    def note(scenario):
        CASES.extend((kind, partial(scenario, **each)) for each in given or ({},))
        return scenario

    return note


def in_time(kind, waited, *, least):
    """Heard of no later than the bound, and no earlier than `least`."""
    assert least - SLACK <= waited <= BOUNDS[kind] + SLACK, f"{kind}: {waited:.3f} s, bound {BOUNDS[kind]:g} s"


async def in_flight(play, route, request="r", **config):
    """Workers, an offer and a fetch whose bytes are kept in flight by the network."""
    await play.pair(route=route, **{**TIMES, **config})
    play.network.hold("*")
    offer = play.prefill.offer(request, [1, 2], tokens=8)
    transfer = play.start(request)
    await play.until(lambda: play.network.held("*"))
    return offer, transfer


async def wedged(play, route, target="decode"):
    """The same of which a post stands still for ever."""
    await play.pair(route=route, **TIMES)
    play.network.wedge(target)
    offer = play.prefill.offer("r", [1, 2], tokens=8)
    return offer, play.start("r")


# --- reaching a peer


@hears("unreachable_peer")
async def nobody_takes_the_connection(play):
    await play.pair(**TIMES)
    with deaf_port() as endpoint:
        ticket = play.ticket("r") | {"endpoints": {"prefix": endpoint}}
        outcome, waited = await play.timed(play.decode.fetch(ticket, [3], tokens=range(4)))
    assert isinstance(outcome, kvxfer.UnreachableError)
    in_time("unreachable_peer", waited, least=CONFIG.connect_timeout)


@hears("handshake")
async def the_peer_answers_and_then_stalls(play):
    await play.pair(**TIMES)
    play.wire.silence()
    outcome, waited = await play.timed(play.start("r"))
    assert isinstance(outcome, kvxfer.UnreachableError)
    in_time("handshake", waited, least=CONFIG.handshake_timeout)


# --- losing a peer


@hears("silent_peer")
async def silence_while_the_offer_is_waited_for(play):
    await play.pair(**TIMES)
    transfer = play.start("r")
    await asyncio.sleep(20.5)  # heartbeats alone keep it
    assert not transfer.done
    play.wire.silence()
    await raised(transfer, kvxfer.PeerLostError)
    assert transfer.memory_safe
    in_time("silent_peer", play.now - play.wire.last, least=CONFIG.peer_timeout)


@hears("silent_peer", {"route": "direct"}, {"route": "pull"})
async def silence_while_the_peer_may_write_or_this_side_reads(play, route):
    _, transfer = await in_flight(play, route)
    play.wire.silence()
    await raised(transfer, kvxfer.MemoryInDoubt)
    assert not transfer.memory_safe
    in_time("silent_peer", play.now - play.wire.last, least=BOUNDS["silent_peer"])


@hears("dead_peer")
async def death_while_the_offer_is_waited_for(play):
    await play.pair(**TIMES)
    transfer = play.start("r")
    await asyncio.sleep(1.0)
    began = play.now
    play.wire.cut()
    await raised(transfer, kvxfer.PeerLostError)
    in_time("dead_peer", play.now - began, least=0)


@hears("dead_peer", {"route": "direct"}, {"route": "staged"})
async def death_while_the_peer_may_write(play, route):
    _, transfer = await in_flight(play, route)
    began, staged = play.now, route == "staged"
    play.wire.cut()
    await raised(transfer, kvxfer.PeerLostError if staged else kvxfer.MemoryInDoubt)
    assert transfer.memory_safe == staged, "the arena alone is written on the route staged"
    in_time("dead_peer", play.now - began, least=0 if staged else BOUNDS["dead_peer"])


# --- offers


@hears("unclaimed_offer")
async def an_offer_that_nobody_claims(play):
    await play.pair(**TIMES)
    ending, waited = await play.timed(play.prefill.offer("r", [1], tokens=4).released())
    assert isinstance(ending, kvxfer.Expired)
    in_time("unclaimed_offer", waited, least=BOUNDS["unclaimed_offer"])


@hears("unclaimed_offer")
async def a_fetch_that_no_offer_follows(play):
    await play.pair(**TIMES)
    outcome, waited = await play.timed(play.start("r"))
    assert isinstance(outcome, kvxfer.RefusedError)
    assert outcome.reason is kvxfer.Code.NEVER_OFFERED
    in_time("unclaimed_offer", waited, least=BOUNDS["unclaimed_offer"])


@hears("unclaimed_offer")
async def a_claim_that_no_offer_follows_gives_its_place_back(play):
    await play.pair(max_transfers=1, **TIMES)
    claim = play.decode.claim(play.ticket("r"))
    await asyncio.sleep(0.1)
    claim.close()
    began = play.now
    outcome = await raised(play.start("s"), kvxfer.RefusedError)
    while isinstance(outcome, kvxfer.RefusedError) and outcome.reason is kvxfer.Code.TOO_MANY:
        await asyncio.sleep(0.25)
        waiting = play.start("s")
        await asyncio.wait([waiting.outcome], timeout=0.5)
        outcome = waiting.outcome.exception() if waiting.done else None
    assert outcome is None  # it is parked now
    in_time("unclaimed_offer", play.now - began - 0.75, least=BOUNDS["unclaimed_offer"] - 0.85)


@hears("released_by_lease")
async def a_claim_that_is_not_renewed(play):
    await play.pair(**TIMES)
    offer = play.prefill.offer("r", [1], tokens=4)
    play.decode.claim(play.ticket("r"))
    await asyncio.sleep(30.5)
    assert not offer.wait_end().done()
    play.wire.silence()
    assert isinstance(await offer.released(), kvxfer.Expired)
    renewed = play.now - CONFIG.offer_lease  # a third of a lease passes between two renewals
    assert renewed <= play.wire.last + SLACK
    in_time("released_by_lease", play.now - play.wire.last, least=CONFIG.offer_lease * 2 / 3)


@hears("released_by_lease")
async def a_fetch_of_a_peer_that_fell_silent(play):
    offer, _ = await in_flight(play, "pull")
    began = play.now
    play.wire.silence()
    await raised(offer.released(), kvxfer.MemoryInDoubt)
    in_time("released_by_lease", play.now - began, least=CONFIG.peer_timeout + CONFIG.revoke_timeout)


@hears("released_by_lease")
async def a_post_that_stands_still_when_the_peer_falls_silent(play):
    offer, _ = await wedged(play, "direct")
    await play.until(lambda: frames(play.prefill, "Fetch"))
    began = play.now
    play.wire.silence()
    await raised(offer.released(), kvxfer.MemoryInDoubt)
    in_time("released_by_lease", play.now - began, least=CONFIG.no_progress_timeout)


@hears("released_by_lease")
async def a_late_post_that_stands_still_when_the_peer_falls_silent(play):
    await play.pair(route="direct", **TIMES)
    play.network.wedge("decode")
    offer = play.prefill.offer("r", [1, 2], tokens=8, streaming=True)
    play.start("r")
    await asyncio.sleep(9)  # most of the lease, which the fetch began
    offer.ready()
    offer.finish()
    await play.until(lambda: frames(play.prefill, "Reserve"))
    play.wire.silence()
    await raised(offer.released(), kvxfer.MemoryInDoubt)
    in_time("released_by_lease", play.now - play.wire.last, least=CONFIG.no_progress_timeout)


# --- giving up


@hears("revoke", {"route": "direct"}, {"route": "staged"})
async def a_cancellation_while_the_peer_may_write(play, route):
    _, transfer = await in_flight(play, route)
    task = asyncio.ensure_future(transfer)
    await asyncio.sleep(0)
    began, staged = play.now, route == "staged"
    task.cancel()
    await raised(task, asyncio.CancelledError if staged else kvxfer.MemoryInDoubt)
    assert transfer.memory_safe == staged, "on the route staged no peer writes the blocks"
    in_time("revoke", play.now - began, least=0 if staged else BOUNDS["revoke"])


@hears("revoke")
async def a_withdrawal_while_the_peer_reads(play):
    offer, _ = await in_flight(play, "pull")
    outcome, waited = await play.timed(offer.withdraw())
    assert isinstance(outcome, kvxfer.MemoryInDoubt)
    in_time("revoke", waited, least=BOUNDS["revoke"])


@hears("fetch")
async def a_fetch_that_nothing_ends_but_its_time_out(play):
    await play.pair(route="pull", **TIMES)
    play.network.hold("*")
    play.prefill.offer("r", [1, 2], tokens=8)
    outcome, waited = await play.timed(play.start("r", timeout=10))
    assert isinstance(outcome, kvxfer.MemoryInDoubt)
    assert isinstance(outcome.__cause__, kvxfer.TransferTimeoutError)
    assert f"{CONFIG.revoke_timeout:g} s more" in str(outcome.__cause__)
    in_time("fetch", waited - 10, least=BOUNDS["fetch"])


@hears("stuck_link", {"route": "direct"}, {"route": "staged"}, {"route": "pull", "target": "prefill"})
async def a_post_that_stands_still(play, route, target="decode"):
    _, transfer = await wedged(play, route, target)
    outcome, waited = await play.timed(transfer)
    assert isinstance(outcome, kvxfer.TransferFailedError), "agents were made anew in time"
    assert transfer.memory_safe
    in_time("stuck_link", waited, least=CONFIG.no_progress_timeout)


@hears("stuck_link")
async def a_withdrawal_while_a_write_stands_still(play):
    offer, _ = await wedged(play, "direct")
    await play.until(lambda: frames(play.prefill, "Fetch"))
    outcome, waited = await play.timed(offer.withdraw())
    assert isinstance(outcome, kvxfer.MemoryInDoubt)
    in_time("stuck_link", waited, least=CONFIG.no_progress_timeout)


# --- what only a new agent ends


async def settles(play, worker, side, *, least):
    """Seconds from the quarantine on."""
    await play.until(lambda: quarantined(worker, side))
    began = play.now
    await play.until(lambda: not quarantined(worker, side))
    in_time("rebuild", play.now - began, least=least)


@hears("rebuild")
async def staging_memory_that_a_write_of_ours_reads_which_stands_still(play):
    await wedged(play, "staged")
    await settles(play, play.prefill, "send", least=CONFIG.peer_timeout)


@hears("rebuild")
async def staging_memory_that_a_host_may_write_which_is_gone(play):
    with pytest.MonkeyPatch.context() as patch:
        live_where(lambda: "another boot, another pid:[1]", patch)
        _, transfer = await in_flight(play, "staged")
    play.wire.silence()
    await settles(play, play.decode, "receive", least=CONFIG.peer_timeout)
    await raised(transfer, kvxfer.KvxferError)


@hears("rebuild")
async def what_is_noticed_when_it_is_being_done_for_others(play):
    """Both times nobody moves what he was granted, and a post of ours stands still."""
    await play.pair(route="direct", **TIMES)
    paused = lambda: play.prefill.describe()["agent"]["paused"]  # noqa: E731

    async def stands_still(request, block):
        play.prefill.offer(request, [block], tokens=4)
        play.start(request, [block], range(4))
        await play.until(lambda: play.network.held("decode") == block)

    with pytest.MonkeyPatch.context() as patch:
        never_move(CONFIG.revoke_timeout, patch)
        play.network.hold("decode")
        await stands_still("r", 1)
        rebuild(play.prefill)
        await play.until(paused)
        began, over = play.now, []
        rebuild(play.prefill, urgent=False)
        await play.until(lambda: not paused())
        when_rebuilt(play.prefill, lambda: over.append(play.now))
        await stands_still("s", 2)
        await play.until(lambda: over)
    in_time("rebuild", over[0] - began, least=CONFIG.peer_timeout + CONFIG.revoke_timeout)


# --- closing


@hears("drain")
async def an_offer_that_is_not_fetched_before_the_worker_closes(play):
    await play.pair(**TIMES)
    offer = play.prefill.offer("r", [1], tokens=4)
    closing = asyncio.create_task(play.prefill.aclose())
    ending, waited = await play.timed(offer.released())
    assert isinstance(ending, kvxfer.Withdrawn)
    in_time("drain", waited, least=CONFIG.drain_timeout)
    await closing


@hears("drain")
async def a_fetch_that_does_not_end_before_the_worker_closes(play):
    _, transfer = await in_flight(play, "direct")
    closing = asyncio.create_task(play.decode.aclose())
    outcome, waited = await play.timed(transfer)
    assert isinstance(outcome, kvxfer.MemoryInDoubt)
    in_time("drain", waited, least=BOUNDS["drain"])
    await closing


@hears("drain")
async def a_drain_that_does_not_end(play):
    _, transfer = await in_flight(play, "direct")
    for worker in (play.prefill, play.decode):
        drained, waited = await play.timed(worker.drain())
        assert drained is False
        in_time("drain", waited, least=CONFIG.drain_timeout)
    play.network.release("*")
    await transfer


@hears("close")
async def closing_with_nothing_left(play):
    await play.pair(**TIMES)
    await play.bring("r")
    for worker in (play.prefill, play.decode):
        error, waited = await play.timed(worker.aclose())
        assert error is None
        in_time("close", waited, least=0)


async def closes(play, side, *, least=CONFIG.drain_timeout):
    error, waited = await play.timed(getattr(play, side).aclose())
    assert error is None
    in_time("close", waited, least=least)


IN_FLIGHT = [{"side": "decode", "route": "pull"}, {"side": "decode", "route": "direct"}]
IN_FLIGHT += [{"side": "prefill", "route": "pull"}, {"side": "prefill", "route": "direct"}]


@hears("close", *IN_FLIGHT)
async def closing_while_bytes_are_in_flight(play, side, route):
    """A reader or a writer of what stands still, or where a peer may write or read."""
    await in_flight(play, route)
    await closes(play, side)


@hears("close")
async def closing_with_an_event_that_never_fires(play):
    await play.pair(**TIMES)
    play.prefill.offer("r", [1, 2], tokens=8, after=Gate())
    transfer = play.start("r", after=Gate())
    await play.until(lambda: play.prefill.describe()["sending"])
    await closes(play, "prefill")
    await closes(play, "decode", least=0)
    await raised(transfer, kvxfer.KvxferError)


@pytest.mark.parametrize("moves", [1.1, 0.9])
@virtual
async def test_a_link_is_slow_and_not_stuck_if_it_moves_in_time_what_is_under_way(play, moves):
    """Two chunks of one part each: the second one ends when both have moved."""
    await play.pair(route="staged", **TIMES)
    play.network.pace("*", moves * 4096 / CONFIG.no_progress_timeout, lambda: play.now)
    play.prefill.offer("r", [1, 2], tokens=8)
    outcome, waited = await play.timed(play.start("r"))
    if moves > 1:
        assert outcome.stats.bytes == 4096
        assert waited > CONFIG.no_progress_timeout / 2  # it was slow
    else:
        assert isinstance(outcome, kvxfer.TransferFailedError)
        assert "no progress for 13 s" in str(outcome)


@pytest.mark.parametrize(
    ("kind", "scenario"), CASES, ids=lambda one: one if isinstance(one, str) else one.func.__name__
)
def test_the_caller_hears_in_time(kind, scenario, tmp_path):
    play(scenario, tmp_path)


def test_every_bound_is_put_to_the_test():
    assert {kind for kind, _ in CASES} == set(BOUNDS)
