"""Offers whose block lists grow while they are fetched, and fetches that lack no token."""

import asyncio

import pytest
from inside import break_steps, cut, plan_steps_in_threads, timers
from stage import Cache, Copied, eventually, extents, frames, quiet, written

import kvxfer
from kvxfer.plans.planning import decode_spans
from kvxfer.protocol.messages import Reserve

ROUTES = ["staged", "direct", "pull"]
STEPS = ((range(3), [3]), (range(3, 4), []), (range(4, 9), [2, 1]), (range(9, 16), [0]))
"""Tokens, and source blocks of 4 that come with them."""
IDS = [3, 2, 1, 0]
INTO = [4, 5, 6, 7]


def with_state():
    """Tokens, and state without any."""
    return [Cache(group="full"), Cache(group="state", layers=[7], layout="state", blocks=4)]


async def streams(stage, route="auto", caches=None, tokens=range(16), **config):
    """A pair, an offer without a block yet, and a fetch of it."""
    source, target = caches or (Cache(), Cache())
    prefill, decode = await stage.pair(source, target, route=route, **config)
    offer = prefill.offer("r", streaming=True)
    into = range(len(IDS), len(IDS) + -(-tokens.stop // source.block_tokens))
    transfer = decode.start_fetch(offer.ticket, list(into), tokens=tokens, timeout=20)
    return source, target, prefill, decode, offer, transfer


def landed(copied):
    """Whether the destination is as expected by now."""
    try:
        copied.check()
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("route", ROUTES)
async def test_each_step_moves_while_the_next_is_computed(stage, route, by_layer):
    caches = Cache(), Cache(layout="HND")
    source, target, prefill, decode, offer, transfer = await streams(stage, route, caches, range(2, 14))
    before = Copied(target)
    for tokens, blocks in STEPS:
        offer.extend(blocks, tokens=tokens)
        for layers in [[0], [1]] if by_layer else [None]:
            offer.ready(layers=layers, tokens=None if by_layer else tokens.stop)
        reached = Copied(target)
        reached.expected = {layer: memory.clone() for layer, memory in before.expected.items()}
        whole = tokens.stop // 4 * 4  # chunks end where blocks do
        reached.bring(source, IDS, INTO, range(2, max(2, min(whole, 14))))
        await eventually(lambda: landed(reached))  # noqa: B023 - it is waited for in this turn
    assert not transfer.done
    offer.finish(b"done")
    result = await transfer
    assert result.payload == b"done"
    assert result.stats.bytes == 2 * 12 * 2 * 4 * 8 * 4
    assert isinstance(await offer.released(), kvxfer.Released)
    await quiet(prefill, decode)


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
        whole = Copied(target).bring(source, IDS, INTO, range(stop))
        for layer in range(3):
            offer.ready(layers=[layer])
            reached.expected[layer] = whole.expected[layer]
            await eventually(lambda: landed(reached))
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
    await eventually(lambda: landed(copied))
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
    await eventually(lambda: landed(copied))
    assert not [one for one in seconds if 25 < one < 26], "a third of the lease"
    offer.finish()
    await transfer
    await quiet(prefill, decode)


async def test_what_was_written_in_place_counts_no_more_once_its_session_is_lost(stage):
    source, target, prefill, decode, offer, transfer = await streams(stage, "direct")
    copied = Copied(target).bring(source, IDS, INTO, range(8))
    offer.extend(IDS[:2], tokens=range(8))
    offer.ready()
    await eventually(lambda: landed(copied))
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
    heard = decode.describe()["metrics"]["frames_received"]["Want"]
    await eventually(lambda: decode.describe()["metrics"]["frames_received"]["Want"] > heard)
    offer.finish()
    stage.network.release("decode")
    result = await transfer
    copied.check()
    assert result.stats.chunks > 5
    assert [len(said.ring) for said in tap.of(Reserve) if said.ring][:2] == [1, 6]
    await quiet(prefill, decode)


@pytest.mark.parametrize("route", ROUTES)
async def test_padding_may_come_with_any_step(stage, route):
    """The null block at the source has no tokens; those at the destination keep what they hold."""
    null = {"prefill": {"groups": [kvxfer.Group("default", 9)]}}
    source, target, prefill, decode, offer, transfer = await streams(stage, route, tokens=range(1, 16), **null)
    copied = Copied(target)
    for at, block in enumerate([9, 3, 9, 2]):
        offer.extend([block], tokens=range(4 * at, 4 * at + 4))
        offer.ready()
        if block != 9:
            copied.bring(source, [block], [INTO[at]], range(4 * at, 4 * at + 4), 4 * at, 4 * at)
            await eventually(lambda: landed(copied))
    offer.finish()
    assert (await transfer).stats.bytes == 2 * 8 * 2 * 4 * 8 * 4
    copied.check()
    await quiet(prefill, decode)


async def test_an_offer_that_ends_too_early_fails_the_fetch(stage):
    source, target, prefill, decode, offer, transfer = await streams(stage)
    offer.extend([3, 2], tokens=range(8))
    offer.ready()
    copied = Copied(target).bring(source, IDS, INTO, range(8))
    await eventually(lambda: landed(copied))
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


@pytest.mark.parametrize("small_plan", [2048, 0], ids=["planned here", "planned in threads"])
async def test_a_decode_rank_that_cannot_be_planned_fails_alone(stage, monkeypatch, small_plan):
    """It names two slots of state where the request has one, which shows when the slot comes with the last step."""
    plan_steps_in_threads(small_plan, monkeypatch)
    written = lambda spans, *_: {group: span.ids for group, span in spans.items()}  # noqa: E731
    monkeypatch.setattr("kvxfer.plans.planning.check_cover", written)

    sources, targets = with_state(), with_state()
    prefill = await stage.worker("prefill", sources)
    ranks, _ = await stage.engine("decode", [with_state(), targets])
    ticket = prefill.engine.ticket("r")
    wrong = ranks[0].start_fetch(ticket, {"full": [1, 2], "state": [3, 1]}, tokens=range(8), timeout=5)
    await eventually(lambda: prefill.describe()["sending"] == 1)  # so that it is the first to be told
    right = ranks[1].start_fetch(ticket, {"full": [1, 2], "state": [3]}, tokens=range(8), timeout=5)
    await eventually(lambda: prefill.describe()["sending"] == 2)
    offer = prefill.offer("r", streaming=True)
    offer.extend({"full": [5], "state": []}, tokens=range(4))
    offer.ready()
    copied = [Copied(target) for target in targets]
    copied[0].bring(sources[0], [5], [1], range(4))
    await eventually(lambda: landed(copied[0]))
    offer.extend({"full": [6], "state": [2]}, tokens=range(4, 8))
    offer.ready()
    offer.finish(b"end")
    with pytest.raises(kvxfer.TransferFailedError, match="1 slots at the source, 2 at the destination"):
        await wrong
    assert (await right).payload == b"end"
    copied[0].bring(sources[0], [6], [2], range(4, 8), 4, 4)
    copied[1].bring(sources[1], [2], [3], range(1))
    for one in copied:
        one.check()
    await ranks[0].decline(ticket)
    assert isinstance(await offer.released(), kvxfer.Released)
    await quiet(prefill, *ranks)


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
    await eventually(lambda: landed(copied))
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


async def test_an_offer_without_its_slot_of_state_is_refused_to_its_owner(stage):
    prefill = await stage.worker("prefill", [Cache(group="full"), Cache(group="state", layers=[7], layout="state")])
    for streaming in (False, True):
        with pytest.raises(
            kvxfer.BlocksError, match="group 'state' is state, which has one slot for a request: 2 were given"
        ):
            prefill.offer("r", {"full": [5, 6], "state": [2, 2]}, tokens=8, streaming=streaming)
    without = {"full": [5, 6], "state": []}
    with pytest.raises(kvxfer.BlocksError, match="one slot for a request: 0 were given"):
        prefill.offer("r", without, tokens=8)
    offer = prefill.offer("r", without, tokens=8, streaming=True)
    offer.ready()
    with pytest.raises(kvxfer.BlocksError, match="one slot for a request: 0 were given"):
        offer.finish()
    offer.extend({"full": [7], "state": [2]}, tokens=range(8, 9))
    offer.ready()
    with pytest.raises(kvxfer.BlocksError, match="one slot for a request: 2 were given"):
        offer.extend({"full": [], "state": [2]}, tokens=range(9, 10))
    offer.finish()
    await offer.withdraw()


async def test_turns_that_are_not_covered_are_refused_to_whoever_says_so(stage):
    """Of eight tokens each rank holds four; two blocks of four are for sixteen."""

    def caches():
        return [Cache(turns=kvxfer.Interleave(rank, 2, 1)) for rank in range(2)]

    prefill, _ = await stage.engine("prefill", caches())
    decode, _ = await stage.engine("decode", caches())
    offer = prefill[0].offer("r", [1], tokens=8, streaming=True)
    for ids, tokens in (([], range(8, 10)), ([2], range(8, 18))):
        with pytest.raises(kvxfer.BlocksError, match="of this rank's turns, but"):
            offer.extend(ids, tokens=tokens)
    offer.extend([2], tokens=range(8, 16))
    with pytest.raises(
        kvxfer.BlocksError, match="1 blocks of 4 tokens reach up to token 4 of this rank's turns, but 8 are needed"
    ):
        decode[0].start_fetch(prefill[0].engine.ticket("r"), [1], tokens=range(16))
    await offer.withdraw()


# --- a destination that lacks no token


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("held", [[1, 2], []], ids=["blocks named", "no blocks"])
async def test_state_moves_where_every_token_is_held(stage, route, held):
    sources, targets = with_state(), with_state()
    prefill, decode = await stage.pair(sources, targets, route=route)
    for stop in (6, 8, 5):  # of other requests of the pair, whose last token is in another window
        offer = prefill.offer(f"r{stop}", {"full": [5, 6], "state": [2]}, tokens=stop, payload=b"token")
        copied = [Copied(target) for target in targets]
        copied[1].bring(sources[1], [2], [3], range(1))
        targets[1].memory[7][:, 3] = 0
        into, tokens = {"full": held, "state": [3]}, range(stop, stop)
        result = await decode.fetch(prefill.engine.ticket(f"r{stop}"), into, tokens=tokens, timeout=5)
        assert result.payload == b"token"
        assert result.stats.bytes == 4 * 8 * 4
        for one in copied:
            one.check()
        assert isinstance(await offer.released(), kvxfer.Released)
    await quiet(prefill, decode)


@pytest.mark.parametrize("route", ROUTES)
async def test_only_the_payload_moves_where_there_is_no_state(stage, route):
    _, target, prefill, decode, offer, transfer = await streams(stage, route, tokens=range(8, 8))
    copied = Copied(target)
    for at in range(2):
        offer.extend([at], tokens=range(4 * at, 4 * at + 4))
        offer.ready()
    offer.finish(b"token")
    result = await transfer
    assert (result.payload, result.stats.bytes) == (b"token", 0)
    copied.check()
    assert isinstance(await offer.released(), kvxfer.Released)
    await quiet(prefill, decode)


async def test_the_offer_must_hold_the_last_token_all_the_same(stage):
    prefill, decode = await stage.pair(Cache(), Cache())
    _, transfer = stage.begin(prefill, decode, tokens=range(8, 8), offered={"tokens": 4})
    with pytest.raises(kvxfer.RefusedError, match="but 4 are on offer"):
        await transfer
    await quiet(decode)


@pytest.mark.parametrize(("window", "first"), [([], 8), ([2], 8), ([], 7), ([2, 3], 7)])
async def test_a_window_that_begins_after_the_range_needs_no_blocks(stage, window, first):
    """Sliding windows: of a range that lies before the window nothing of that group moves."""

    def caches():
        return [Cache(group="full"), Cache(group="window", layers=[4])]

    sources, targets = caches(), caches()
    prefill, decode = await stage.pair(sources, targets)
    prefill.offer("r", {"full": [0, 1, 2, 3], "window": kvxfer.Span([8, 9], 8)}, tokens=16)
    copied = [Copied(target) for target in targets]
    copied[0].bring(sources[0], [0, 1], [4, 5], range(6))
    into = {"full": [4, 5], "window": kvxfer.Span(window, first)}
    await decode.fetch(prefill.engine.ticket("r"), into, tokens=range(6), timeout=5)
    for one in copied:
        one.check()
