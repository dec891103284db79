"""The control stream is cut, a side closes, the fabric fails: each transfer that waits hears of it, and no other."""

import asyncio
from typing import Any

import inside
import pytest
import torch
from stage import SOON, Cache, Copied, Gate, awake, eventually, frames, is_quiet, quarantined, quiet

import kvxfer
from kvxfer.protocol.messages import Accept

TOKENS = range(8)
ROUTES = ["staged", "direct", "pull"]


@pytest.fixture(params=ROUTES)
def route(request):
    return request.param


async def works(stage, prefill, decode, offer):
    copied = Copied(stage.caches[decode]).bring(stage.caches[prefill], [1, 2], [3, 4], TOKENS)
    await decode.fetch(prefill.engine.ticket(offer.request), [3, 4], tokens=TOKENS, timeout=5)
    copied.check()
    assert isinstance(await offer.released(), kvxfer.Released)
    await quiet(prefill, decode)


async def begin(stage, prefill, decode, step) -> Any:
    """A fetch brought to a step of its life."""
    if step == "in flight":
        return await stage.in_flight(prefill, decode)
    if step == "accepted":
        offer, transfer = stage.begin(prefill, decode, offered={"streaming": True})
        await eventually(lambda: frames(decode, "Accept"))
        return offer, transfer
    transfer = decode.start_fetch(prefill.engine.ticket("r"), [3, 4], tokens=TOKENS)
    await eventually(lambda: prefill.describe()["sending"])
    return None, transfer


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("step", ["parked", "accepted", "in flight"])
async def test_the_stream_is_cut(stage, source, target, route, step, side):
    prefill, decode = await stage.pair(source, target, route=route, revoke_timeout=60)
    offer, transfer = await begin(stage, prefill, decode, step)
    untouched = Copied(target)
    inside.cut({"prefill": prefill, "decode": decode}[side])
    if step == "in flight" and route != "staged":
        # a write (or our own read) is under way: the same incarnation is asked, and says when it has ended
        await eventually(lambda: len(inside.sessions(decode)) == 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not transfer.done
        stage.network.release("*")
    with pytest.raises(kvxfer.PeerLostError, match="hold no usable data"):
        async with asyncio.timeout(30):
            await transfer
    assert transfer.memory_safe
    if step != "in flight":
        untouched.check()
    canary = target.clone()
    stage.network.release("*")
    await quiet(prefill, decode)
    assert all(torch.equal(target.memory[layer], kept) for layer, kept in canary.items())
    if offer is None:
        offer = prefill.offer("r", [1, 2], tokens=8)
    elif step == "accepted":
        offer.ready()
        offer.finish()
    await works(stage, prefill, decode, offer)


async def test_a_flow_may_end_after_its_peer_is_back(stage, source, target, monkeypatch):
    """Only that flow writes the blocks: the fetch does not wait for what the peer has still under way."""
    prefill, decode = await stage.pair(source, target, route="staged", revoke_timeout=60)
    offer, transfer = await begin(stage, prefill, decode, "in flight")
    answer = inside.answer_late(decode, monkeypatch)
    before = inside.session(decode)
    inside.cut(decode)
    await eventually(
        lambda: inside.sessions(decode) and inside.session(decode) is not before and inside.being_stopped(prefill)
    )
    assert not transfer.done
    answer()
    with pytest.raises(kvxfer.PeerLostError, match="hold no usable data"):
        async with asyncio.timeout(5):
            await transfer
    assert transfer.memory_safe
    stage.network.release("*")
    await eventually(lambda: not decode.describe()["receiving"])
    await offer.withdraw()
    await quiet(prefill, decode)


async def test_a_doubt_ends_when_the_same_incarnation_is_back(stage, source, target):
    prefill, decode = await stage.pair(source, target, route="direct", **SOON)
    offer, transfer = await begin(stage, prefill, decode, "in flight")
    inside.cut(decode)
    with pytest.raises(kvxfer.MemoryInDoubt) as caught:
        await transfer
    assert isinstance(caught.value.__cause__, kvxfer.PeerLostError)
    assert caught.value.blocks == {"default": (3, 4)}
    assert caught.value.peer.startswith("prefill")
    await eventually(lambda: len(inside.sessions(decode)) == 1)
    with pytest.raises(kvxfer.BlocksError):
        decode.offer("mine", [3], tokens=4)
    inside.cut(prefill)  # once more, while the answer is outstanding
    await eventually(lambda: frames(decode, "Accept") == 1)
    stage.network.release("*")
    async with asyncio.timeout(30):
        await caught.value.settled()
    await works(stage, prefill, decode, offer)


@pytest.mark.parametrize("returns", ["before the doubt", "in the doubt"])
async def test_a_reader_that_comes_back_is_helped_to_end_its_reads(stage, source, target, returns):
    """Over TCP a read ends only if the other side makes progress, and until it has ended the reader says nothing."""
    prefill, decode = await stage.pair(source, target, route="pull", **SOON)
    offer, transfer = await begin(stage, prefill, decode, "in flight")
    listen_again = inside.turn_deaf(prefill) if returns == "in the doubt" else None  # it is not reached for a while
    inside.cut(decode)
    withdrawing = asyncio.create_task(offer.withdraw())
    for waiting in (transfer, withdrawing):
        with pytest.raises(kvxfer.MemoryInDoubt) as caught:
            await waiting
    if listen_again is not None:
        assert not awake(prefill)  # nobody is there whom it would help
        await listen_again()
    await eventually(lambda: awake(prefill) == 1)
    stage.network.release("*")
    async with asyncio.timeout(30):
        await caught.value.settled()
    await eventually(lambda: not awake(prefill))
    await quiet(prefill, decode)


async def test_a_reader_that_is_back_and_says_nothing_is_helped_for_a_while(stage, source, target):
    prefill, decode = await stage.pair(source, target, route="pull", no_progress_timeout=0.6, **SOON)
    _, transfer = await begin(stage, prefill, decode, "in flight")
    helped = inside.holds(prefill)
    inside.cut(decode)
    with pytest.raises(kvxfer.MemoryInDoubt):
        await transfer
    await eventually(lambda: helped)
    await eventually(lambda: not awake(prefill))
    stage.network.release("*")


async def test_a_cut_stream_gives_up_no_post(stage, source, target, route):
    """Forgetting the peer at once would disconnect the lane under a write, which nobody could ever account for."""
    prefill, decode = await stage.pair(source, target, route=route, revoke_timeout=60)
    offer, transfer = await begin(stage, prefill, decode, "in flight")
    withdrawing = asyncio.create_task(offer.withdraw())
    await eventually(lambda: offer.state.value == "ending")
    old = inside.sessions(prefill, decode)
    inside.cut(prefill)
    await eventually(lambda: len(inside.sessions(prefill) - old) == len(inside.sessions(decode) - old) == 1)
    if route != "pull":  # there the question is put when our own reads have ended
        await eventually(lambda: frames(prefill, "Cancel"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not withdrawing.done()
    stage.network.release("*")
    assert isinstance(await withdrawing, kvxfer.Withdrawn)
    with pytest.raises(kvxfer.KvxferError):
        await transfer
    await quiet(prefill, decode)
    assert not prefill.describe()["custody"].holders


async def test_a_stream_that_is_cut_as_the_question_is_sent_ends_the_fetch(stage, source, target, route, monkeypatch):
    """The peer reads nothing any more, and too much is unsent."""
    prefill, decode = await stage.pair(source, target, route=route)
    await stage.bring(prefill, decode, "before")
    monkeypatch.setattr("kvxfer.peers.link._SLICE_BYTES", 0)
    monkeypatch.setattr("kvxfer.peers.link._UNSENT_BYTES", 0)
    _, transfer = stage.begin(prefill, decode, timeout=None, after=Gate())
    with pytest.raises(kvxfer.PeerLostError):
        await asyncio.wait_for(transfer.outcome, 5)


async def test_lanes_of_lost_peers_are_given_back(stage, source, target):
    prefill, decode = await stage.pair(source, target, route="staged")
    await stage.bring(prefill, decode)
    inside.cut(prefill)
    await eventually(lambda: not prefill.describe()["fabric"]["lanes"] and not inside.sessions(decode))
    await stage.bring(prefill, decode, "s")


@pytest.mark.parametrize("step", ["parked", "accepted", "in flight"])
async def test_the_prefill_worker_closes(stage, source, target, route, step):
    prefill, decode = await stage.pair(source, target, route=route, drain_timeout=0.05, revoke_timeout=60)
    offer, transfer = await begin(stage, prefill, decode, step)
    closing = asyncio.create_task(prefill.aclose())
    if step == "in flight":
        await eventually(lambda: offer.state.value == "ending")
        stage.network.release("*")
    with pytest.raises((kvxfer.TransferFailedError, kvxfer.RefusedError)) as caught:
        async with asyncio.timeout(30):
            await transfer
    assert caught.value.reason is (kvxfer.Code.DRAINING if step == "parked" else kvxfer.Code.OFFER_WITHDRAWN)
    await closing
    if offer is not None:
        assert isinstance(await offer.released(), kvxfer.Withdrawn)
    await quiet(decode)
    with pytest.raises(kvxfer.UnreachableError):
        await decode.fetch(prefill.engine.ticket(transfer.request), [3], tokens=range(4), timeout=5)


@pytest.mark.parametrize("step", ["parked", "accepted", "in flight"])
async def test_the_decode_worker_closes(stage, source, target, route, step):
    prefill, decode = await stage.pair(source, target, route=route, drain_timeout=0.05, revoke_timeout=60)
    offer, transfer = await begin(stage, prefill, decode, step)
    waiting = asyncio.create_task(asyncio.wait_for(transfer, 30))
    closing = asyncio.create_task(decode.aclose())
    if step == "in flight":
        await eventually(lambda: transfer.done or inside.being_stopped(decode))
        stage.network.release("*")
    with pytest.raises(kvxfer.ClosedError, match="the worker was closed"):  # an error, not a cancellation of our task
        await waiting
    await closing
    await quiet(prefill)
    # the claim is kept: somebody else may fetch it
    second = await stage.worker("second", Cache())
    if offer is None:
        offer = prefill.offer("r", [1, 2], tokens=8)
    elif step == "accepted":
        offer.ready()
        offer.finish()
    await works(stage, prefill, second, offer)


async def test_the_decode_worker_vanishes_for_good(stage, source, target):
    """Nobody answers any more: the offer ends with its lease, and its blocks are free."""
    fast = {"offer_lease": 0.2}
    prefill, decode = await stage.pair(source, target, prefill={"route": "staged", **fast}, **SOON)
    offer, transfer = await begin(stage, prefill, decode, "in flight")
    inside.never_come_back(decode)
    inside.hear_of_no_loss(decode)
    inside.cut(decode)
    stage.network.disconnect("decode")
    async with asyncio.timeout(30):
        assert isinstance(await offer.released(), kvxfer.Expired)
    await quiet(prefill)
    transfer.cancel()


async def test_a_new_incarnation_at_the_same_endpoint_is_no_evidence(stage, source, target, tmp_path):
    where = {"listen": f"unix:{tmp_path}/p.sock"}
    prefill, decode = await stage.pair(source, target, prefill=where, route="direct", **SOON)
    offer, transfer = await begin(stage, prefill, decode, "in flight")
    ticket = prefill.engine.ticket("r")
    inside.stop_listening(prefill)
    inside.cut(prefill)
    again = await stage.worker("again", source, route="direct", **where)
    with pytest.raises(kvxfer.MemoryInDoubt) as caught:
        await transfer
    with pytest.raises(kvxfer.MismatchError, match="it has restarted") as restarted:
        await decode.fetch(ticket, [7, 8], tokens=TOKENS, timeout=5)
    assert restarted.value.fields["epoch"] == (ticket["epoch"], again.engine.card.epoch)
    assert decode.describe()["in_doubt"] == 1
    settling = asyncio.create_task(caught.value.settled())
    await decode.aclose(drain=False)
    with pytest.raises(kvxfer.ClosedError, match="never reuse"):
        await settling
    assert offer.request == "r"


# --- the fabric fails


@pytest.mark.parametrize("after", ["before posting", "after some bytes", "at the post", "bytes linger", "disconnected"])
async def test_a_failing_post_fails_its_transfer_alone(stage, source, target, route, after):
    # a later write tells that all before it has ended, unless it waits for them itself, or cannot be made
    doubt = after == "disconnected" and route == "direct"
    fails = kvxfer.MemoryInDoubt if doubt else kvxfer.KvxferError
    times = {**(SOON if doubt else {}), "no_progress_timeout": 0.2}
    prefill, decode = await stage.pair(source, target, route=route, **times)
    far = "prefill" if route == "pull" else "decode"
    others = Copied(target)
    offers = [prefill.offer(f"r{n}", [n], tokens=4) for n in range(4)]
    broken = decode.start_fetch(prefill.engine.ticket("r0"), [8], tokens=range(4))
    how = {"at the post": "at_post", "bytes linger": "lingers", "disconnected": "disconnected"}.get(after)
    if after == "before posting":
        stage.network.refuse_next(far)
    else:
        stage.network.break_next(far, after_bytes=24, **({how: True} if how else {}))
    with pytest.raises(fails) as caught:
        async with asyncio.timeout(30):
            await broken
    assert isinstance(caught.value, kvxfer.MemoryInDoubt) == doubt
    # else it would not be known when it is over: on staged nobody waits for that
    agents = {"pull": (decode,), "direct": (prefill, decode)}.get(route, ()) if after == "bytes linger" else ()
    for worker in (prefill, decode):
        await eventually(lambda worker=worker: worker.describe()["agent"]["rebuilt"] == (worker in agents))
    stage.network.release(far)  # or nothing more would end
    transfers = [
        decode.start_fetch(prefill.engine.ticket(f"r{n}"), [8 + n], tokens=range(4), timeout=5) for n in range(1, 4)
    ]
    for n, transfer in enumerate(transfers, 1):
        await transfer
        others.bring(source, [n], [8 + n], range(4))
    for layer, memory in target.memory.items():
        others.expected[layer][:, 8] = memory[:, 8]  # the broken one's
    others.check()
    assert {type(await offer.released()) for offer in offers[1:]} == {kvxfer.Released}
    if after not in {"bytes linger", "disconnected"}:
        await offers[0].withdraw()
        await quiet(prefill, decode)
    elif route == "staged":
        kept = after == "disconnected"  # what had left may land for ever; what was given up has ended after all
        await eventually(lambda: bool(quarantined(decode, "receive")) == kept)
        await eventually(lambda: not quarantined(prefill, "send"))


@pytest.mark.parametrize(("route", "then"), [("direct", "rebuilds"), ("direct", "closes"), ("staged", "goes on")])
async def test_source_blocks_that_a_lost_post_may_read_stay_in_custody(stage, source, target, route, then):
    prefill, decode = await stage.pair(source, target, route=route, **{**SOON, "no_progress_timeout": 0.2})
    inside.keep_agent(prefill)  # not yet
    offer = prefill.offer("r", [1, 2], tokens=8)
    stage.network.break_next("decode", after_bytes=24, lingers=True)
    for _ in range(3):  # the other chunk, and the write that would tell that all before it has ended
        stage.network.refuse_next("decode")
    with pytest.raises(kvxfer.KvxferError):
        await decode.fetch(prefill.engine.ticket("r"), [3, 4], tokens=TOKENS)
    stage.network.mend("decode")
    stage.network.release("decode")  # or nothing more would end
    assert not offer.wait_end().done()  # it is live: somebody may fetch it again
    await decode.fetch(prefill.engine.ticket("r"), [5, 6], tokens=TOKENS, timeout=5)
    if route == "staged":  # the post read the staging extent, not the blocks
        assert isinstance(await offer.released(), kvxfer.Released)
        return
    with pytest.raises(kvxfer.MemoryInDoubt) as caught:
        await offer.released()
    with pytest.raises(kvxfer.BlocksError, match="may still read it"):
        prefill.offer("s", [1], tokens=4)
    settling = asyncio.create_task(caught.value.settled())
    if then == "closes":
        await prefill.aclose(drain=False)
        with pytest.raises(kvxfer.ClosedError, match="never reuse its blocks"):
            await settling
    else:
        inside.consider_rebuilding(prefill)
        async with asyncio.timeout(3):
            await settling
        await eventually(lambda: prefill.describe()["metrics"]["agents_rebuilt"] == 1)
        prefill.offer("s", [1], tokens=4)


async def test_a_late_result_is_dropped_and_counted(stage, source, target):
    from kvxfer.protocol.messages import Arrived, KvAgentResult, Status

    prefill, decode = await stage.pair(source, target)
    await stage.bring(prefill, decode)
    inside.session(prefill).send(KvAgentResult(2, 0, Status.OK, 8, True), KvAgentResult(99, 0, Status.OK, 8, True))
    inside.session(prefill).send(Arrived(2, 1), Arrived(99, 1))
    await eventually(lambda: decode.describe()["metrics"]["results_dropped"].get("stale") == 4)
    await stage.bring(prefill, decode, "s")


# --- over TCP the target moves the data: it has to help, also with what it waits for no more


@pytest.mark.parametrize("route", ["staged", "direct"])
@pytest.mark.parametrize("how", ["cancelled", "timed out"])
async def test_a_fetch_given_up_before_its_answer_helps_the_peer_to_end_what_it_writes(
    stage, source, target, route, how
):
    """Under the grant of `Fetch` it may be writing, though nobody waits for its answer any more."""
    prefill, decode = await stage.pair(source, target, route=route, revoke_timeout=30, grant_lease=30)
    await stage.bring(prefill, decode, "first")
    await quiet(prefill)
    stage.network.need_target("decode")
    prefill.offer("r", [1], tokens=4)

    def meanwhile(message):  # it was given up while the answer was on its way
        if isinstance(message, Accept):
            transfer.cancel() if how == "cancelled" else inside.time_out(decode)

    inside.before_hearing(decode, meanwhile)
    transfer = decode.start_fetch(prefill.engine.ticket("r"), [3], tokens=range(4), timeout=60)
    async with asyncio.timeout(10):
        with pytest.raises((asyncio.CancelledError, TimeoutError)):
            await transfer
    assert transfer.memory_safe
    await eventually(lambda: is_quiet(decode))
    assert not awake(decode), "and no longer than that"


@pytest.mark.parametrize("route", ["staged", "direct"])
@pytest.mark.parametrize("anew", [False, True])
async def test_a_pause_of_the_target_leaves_nothing_in_doubt(stage, source, target, no_locks, route, anew):
    """What the prefill rank gave up meanwhile ends when the decode rank goes on, or with the agents of both."""
    times = {"no_progress_timeout": 0.2, "revoke_timeout": 20.0}
    prefill, decode = await stage.pair(source, target, route=route, **times)
    await stage.bring(prefill, decode, "first")
    stage.network.need_target("decode")
    paused = True
    target_side = inside.transport(decode)
    progress, target_side.progress = target_side.progress, lambda: None if paused else progress()
    offer, transfer = stage.begin(prefill, decode)
    await eventually(lambda: prefill.describe()["sent_in_doubt"])
    if anew:  # as when it is crowded
        inside.rebuild(prefill, answered=True)
    else:
        inside.keep_agent(prefill)
        paused = False
    with pytest.raises(kvxfer.KvxferError, match="no progress") as caught:
        async with asyncio.timeout(10):
            await transfer
    assert not isinstance(caught.value, kvxfer.MemoryInDoubt)
    await eventually(lambda: is_quiet(decode))
    for worker in (prefill, decode):
        await eventually(lambda worker=worker: worker.describe()["agent"]["rebuilt"] == anew)
    assert not prefill.describe()["sent_in_doubt"]
    paused = False
    await stage.bring(prefill, decode, "after", ids=(5,), into=(7,), tokens=range(4))
    await offer.withdraw()
    await quiet(prefill, decode)
