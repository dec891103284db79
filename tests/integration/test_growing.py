"""Offers whose block lists grow while they are fetched, and fetches that lack no token."""

import asyncio
import threading

import pytest
from inside import break_steps, cut, plan_steps_in_threads, timers
from stage import Cache, Copied, eventually, extents, frames, quiet, written
from wire import virtual

import kvxfer
from kvxfer.plans.pairs import decode_spans
from kvxfer.prefill.sender import _IDLE_S, plan_transfer
from kvxfer.protocol.messages import Reserve

ROUTES = ["staged", "direct", "pull"]
IDS = [3, 2, 1, 0]
INTO = [4, 5, 6, 7]


async def streams(stage, route="auto", caches=None, tokens=range(16), **config):
    """A pair, an offer without a block yet, and a fetch of it."""
    source, target = caches or (Cache(), Cache())
    prefill, decode = await stage.pair(source, target, route=route, **config)
    offer = prefill.offer("r", streaming=True)
    into = range(len(IDS), len(IDS) + -(-tokens.stop // source.block_tokens))
    transfer = decode.start_fetch(offer.ticket, list(into), tokens=tokens, timeout=20)
    return source, target, prefill, decode, offer, transfer


@pytest.mark.parametrize("steps", [[16], [8, 8]])
@pytest.mark.parametrize("route", ROUTES)
async def test_each_layer_of_a_step_moves_though_it_is_several_chunks(stage, route, steps):
    """None waits for the next layer, which is not computed yet."""
    caches = Cache(layers=range(3)), Cache(layers=range(3), layout="HND")
    source, target, prefill, decode, offer, transfer = await streams(stage, route, caches, chunk_bytes="1KiB")
    reached, first = Copied(target), 0
    for tokens in steps:
        stop = first + tokens
        offer.extend(IDS[first // 4 : stop // 4], tokens=range(first, stop))
        for layer in range(3):
            offer.ready(layers=[layer])
            reached.bring(source, IDS, INTO, range(stop), layers=[layer])
            await eventually(reached.has_come)
            if stop == 16:
                await transfer.layers(0, layer + 1)
        first = stop
    offer.finish()
    assert (await transfer).stats.chunks == 12
    await quiet(prefill, decode)


@pytest.mark.parametrize("route", ["staged", "direct"])
async def test_a_stream_that_waits_for_its_end_keeps_no_memory(stage, source, target, route):
    """All of it has landed, and its payload may be long in coming."""
    prefill, decode = await stage.pair(source, target, route=route)
    copied = Copied(target).bring(source, IDS, INTO, range(16))
    offer, transfer = stage.begin(prefill, decode, "r", IDS, INTO, range(16), offered={"streaming": True})
    offer.ready()
    await eventually(copied.has_come)
    await eventually(lambda: not (written(decode) or extents(decode, "receive")))
    assert not transfer.done
    offer.finish()
    await transfer
    await quiet(prefill, decode)


async def test_what_is_granted_in_place_is_granted_once(stage, source, target, monkeypatch):
    """Chunks wait there for no place, so nothing has to be said of them again."""
    prefill, decode = await stage.pair(source, target, route="direct", grant_lease=77.0)
    seconds = timers(decode, monkeypatch)
    copied = Copied(target).bring(source, IDS, INTO, range(16))
    offer, transfer = stage.begin(prefill, decode, "r", IDS, INTO, range(16), offered={"streaming": True})
    offer.ready()
    await eventually(copied.has_come)
    assert not [one for one in seconds if 25 < one < 26], "a third of the lease"
    offer.finish()
    await transfer
    await quiet(prefill, decode)


async def test_what_was_written_in_place_counts_no_more_once_its_session_is_lost(stage):
    source, target, prefill, decode, offer, transfer = await streams(stage, "direct")
    copied = Copied(target).bring(source, IDS, INTO, range(8))
    offer.extend(IDS[:2], tokens=range(8))
    offer.ready()
    await eventually(copied.has_come)
    cut(decode)
    with pytest.raises(kvxfer.PeerLostError):
        await transfer
    await offer.withdraw()
    await quiet(prefill, decode)


async def test_a_stream_that_began_with_one_chunk_goes_on_with_as_many_as_others(stage, tap):
    stage.network.hold("decode")
    source, target, prefill, decode, offer, transfer = await streams(stage, "staged")
    copied = Copied(target).bring(source, IDS, INTO, range(16))
    offer.extend(IDS[:1], tokens=range(4))
    offer.ready(layers=[0])
    await eventually(lambda: stage.network.held("decode"))
    offer.extend(IDS[1:], tokens=range(4, 16))
    offer.ready()
    heard = frames(decode, "Ready")
    await eventually(lambda: frames(decode, "Ready") > heard)
    offer.finish()
    stage.network.release("decode")
    result = await transfer
    copied.check()
    assert result.stats.chunks > 5
    assert [len(said.ring) for said in tap.of(Reserve) if said.ring][:2] == [1, 6]
    await quiet(prefill, decode)


@virtual
async def test_what_goes_on_after_a_pause_gives_its_memory_back_with_its_last_chunk(one):
    """And not only when it is seen to be idle, as it was before that."""
    await one.pair(route="staged")
    offer, transfer = one.prefill.offer("r", IDS, tokens=16, streaming=True), one.start("r", INTO, range(16))
    offer.ready(layers=[0])
    await transfer.layers(0, 1)
    await asyncio.sleep(1.0)
    assert not extents(one.prefill, "send")
    offer.ready(layers=[1])
    offer.finish()
    await transfer
    await asyncio.sleep(_IDLE_S / 2)
    assert not extents(one.prefill, "send")


@virtual
async def test_what_pauses_gives_its_memory_at_once_to_who_waits_for_it(one):
    await one.pair(route="staged", prefill={"arena_bytes": "4KiB"})
    paused, whole = one.prefill.offer("a", IDS, tokens=16, streaming=True), one.prefill.offer("b", IDS, tokens=16)
    transfers = one.start("a", INTO, range(16)), one.start("b", [8, 9, 10, 11], range(16))
    paused.ready(layers=[0])
    begun = one.now
    await transfers[1]
    assert one.now - begun < _IDLE_S
    assert isinstance(await whole.released(), kvxfer.Released)
    paused.ready(layers=[1])
    paused.finish()
    await transfers[0]


async def test_an_offer_that_ends_too_early_fails_the_fetch(stage):
    source, target, prefill, decode, offer, transfer = await streams(stage)
    offer.extend([3, 2], tokens=range(8))
    offer.ready()
    copied = Copied(target).bring(source, IDS, INTO, range(8))
    await eventually(copied.has_come)
    offer.finish()
    with pytest.raises(kvxfer.TransferFailedError, match=r"tokens 0\.\.15 were asked, but 8 are on offer") as caught:
        await transfer
    assert caught.value.reason is kvxfer.Code.TOKENS_OUTSIDE_OFFER
    copied.check()
    await decode.fetch(prefill.engine.ticket("r"), INTO[:2], tokens=range(8), timeout=5)
    assert isinstance(await offer.released(), kvxfer.Released)
    await quiet(prefill, decode)


@pytest.mark.parametrize("small_plan", [2048, 0], ids=["planned here", "planned in threads"])
@pytest.mark.parametrize("when", ["before the fetch", "between two steps"])
async def test_many_small_steps_at_once(stage, monkeypatch, when, small_plan):
    """Steps that come faster than they are planned and told."""
    plan_steps_in_threads(small_plan, monkeypatch)
    source, target = Cache(blocks=64), Cache(blocks=64)
    prefill, decode = await stage.pair(source, target)
    offer = prefill.offer("r", streaming=True)
    ticket, into = prefill.engine.ticket("r"), list(range(63, -1, -1))
    transfer = None
    for block in range(64):
        offer.extend([block], tokens=range(4 * block, 4 * block + 4))
        offer.ready()
        if block == (0 if when == "before the fetch" else 30):
            transfer = decode.start_fetch(ticket, into, tokens=range(3, 255), timeout=5)
        if transfer is not None:
            await asyncio.sleep(0)
    offer.finish()
    assert transfer is not None
    copied = Copied(target).bring(source, list(range(64)), into, range(3, 255))
    await transfer
    copied.check()
    await quiet(prefill, decode)


async def test_whatever_fails_in_a_transfer_is_not_told_to_the_owner_of_its_offer(stage, monkeypatch):
    """Who adds to an offer is heard of by every transfer that reads it, there and then."""
    _, _, prefill, decode, offer, transfer = await streams(stage)
    offer.extend([3], tokens=range(4))
    await eventually(lambda: transfer.state is kvxfer.TransferState.WAITING and prefill.describe()["sending"])
    break_steps(monkeypatch)
    offer.ready()
    with pytest.raises(kvxfer.TransferFailedError, match="a step of the transfer failed: ZeroDivisionError"):
        await transfer
    await offer.withdraw()
    await quiet(prefill, decode)


async def test_a_prefill_rank_whose_blocks_grow_beyond_its_pool_fails_the_fetch_alone(stage, monkeypatch):
    """The news comes over a stream that other transfers share."""

    def misheard(spans, *, follow):
        found = decode_spans(spans, follow=follow)
        return {
            group: kvxfer.Span([16 if at == 1 else block for at, block in enumerate(found[group].ids)])
            for group in found
        }

    monkeypatch.setattr("kvxfer.decode.receiver.decode_spans", misheard)
    source, target, prefill, decode, offer, transfer = await streams(stage)
    other = decode.start_fetch(prefill.engine.ticket("other"), [2], tokens=range(4), timeout=5)
    offer.extend([3], tokens=range(4))
    offer.ready()
    copied = Copied(target).bring(source, IDS, INTO, range(4))
    await eventually(copied.has_come)
    offer.extend([2], tokens=range(4, 8))
    offer.ready()
    with pytest.raises(kvxfer.TransferFailedError, match=r"block id 16 at position 1 is outside 0\.\.15"):
        await transfer
    prefill.offer("other", [1], tokens=4)
    await other
    await offer.withdraw()
    await quiet(prefill, decode)


async def test_steps_that_are_too_small_are_not_worth_a_chunk_each(stage):
    source, target = (Cache(blocks=512, block_tokens=1, layers=range(4)) for _ in range(2))
    prefill, decode = await stage.pair(source, target, chunk_bytes="1MiB", arena_bytes="4MiB")
    offer = prefill.offer("r", streaming=True)
    transfer = decode.start_fetch(prefill.engine.ticket("r"), list(range(512)), tokens=range(512), timeout=10)
    for token in range(512):
        offer.extend([511 - token], tokens=range(token, token + 1))
        for layer in range(4):
            offer.ready(layers=[layer])
        if token == 0:
            await eventually(lambda: frames(prefill, "Fetch"))
            await asyncio.sleep(0)
    offer.finish()
    result = await transfer
    assert 100 < result.stats.chunks <= 300
    Copied(target).bring(source, list(range(511, -1, -1)), list(range(512)), range(512)).check()
    await quiet(prefill, decode)


async def test_the_offer_must_hold_the_last_token_all_the_same(stage):
    prefill, decode = await stage.pair(Cache(), Cache())
    _, transfer = stage.begin(prefill, decode, tokens=range(8, 8), offered={"tokens": 4})
    with pytest.raises(kvxfer.RefusedError, match="but 4 are on offer"):
        await transfer
    await quiet(decode)


async def test_what_few_blocks_will_grow_into_is_planned_in_a_thread(stage, monkeypatch):
    """Hardly a block of it is named by either side: that of the destination is large, and others are to come."""
    source = Cache(heads=range(1), dim=1)
    prefill, decode = await stage.pair(source, Cache(blocks=1, block_tokens=1 << 18, heads=range(1), dim=1))
    threads = []

    def planned(*args):
        threads.append(threading.current_thread())
        return plan_transfer(*args)

    monkeypatch.setattr("kvxfer.prefill.sender.plan_transfer", planned)
    streaming = {"tokens": 8, "streaming": True}
    offer, transfer = stage.begin(prefill, decode, into=[0], tokens=range(1 << 18), offered=streaming)
    await eventually(lambda: threads)
    assert threads[0] is not threading.current_thread()
    transfer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await transfer
    await offer.released()
