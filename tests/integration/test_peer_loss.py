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
    inside.vanish(prefill)
    await eventually(lambda: not any(worker.describe()["fabric"]["lanes"] for worker in (prefill, decode)))


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


async def test_a_stream_that_is_cut_as_the_question_is_sent_ends_the_fetch(stage, source, target, route, monkeypatch):
    """The peer reads nothing any more, and too much is unsent."""
    prefill, decode = await stage.pair(source, target, route=route)
    await stage.bring(prefill, decode, "before")
    monkeypatch.setattr("kvxfer.peers.link._SLICE_BYTES", 0)
    monkeypatch.setattr("kvxfer.peers.link._UNSENT_BYTES", 0)
    _, transfer = stage.begin(prefill, decode, timeout=None, after=Gate())
    with pytest.raises(kvxfer.PeerLostError):
        await asyncio.wait_for(transfer.outcome, 5)


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


# --- over TCP the target moves the data: it has to help, also with what it waits for no more


@pytest.mark.parametrize("route", ["staged", "direct"])
@pytest.mark.parametrize("how", ["cancelled", "timed out"])
async def test_a_fetch_given_up_before_its_answer_helps_the_peer_to_end_what_it_writes(
    stage, source, target, tap, route, how
):
    """Under the grant of `Fetch` it may be writing, though nobody waits for its answer any more."""
    prefill, decode = await stage.pair(source, target, route=route, revoke_timeout=30, grant_lease=30)
    await stage.bring(prefill, decode, "first")
    await quiet(prefill)
    stage.network.need_target("decode")
    prefill.offer("r", [1], tokens=4)

    def meanwhile(accept):  # it is given up while the answer is on its way
        transfer.cancel() if how == "cancelled" else inside.time_out(decode)
        return accept

    tap.change[Accept] = meanwhile
    transfer = decode.start_fetch(prefill.engine.ticket("r"), [3], tokens=range(4), timeout=60)
    async with asyncio.timeout(10):
        with pytest.raises((asyncio.CancelledError, TimeoutError)):
            await transfer
    assert transfer.memory_safe
    await eventually(lambda: is_quiet(decode))
    assert not awake(decode), "and no longer than that"
