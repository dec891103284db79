"""Staging memory that rides with a fetch: a place for the only chunk, or a ring for the first ones."""

import pytest
from inside import keep_plans, kept_of_peers, plan_late, sessions, take_all, tell
from msgspec.structs import replace
from stage import Cache, Copied, Gate, eventually, frames, quiet

from kvxfer.errors import TransferFailedError
from kvxfer.geometry import CacheGeometry, PairPlan
from kvxfer.plans.pairs import geometry_to_wire
from kvxfer.protocol.messages import Accept, Fetch, Place, Ready, Reserve

HELD = list(range(8))
LARGE = {"route": "staged", "chunk_bytes": "32KiB", "arena_bytes": "128KiB"}


@pytest.fixture
def begin(stage):
    """A fetch of most of what is offered."""

    def beginning(prefill, decode, request="r", **options):
        _, transfer = stage.begin(prefill, decode, request, HELD, HELD, range(3, 30), **{"timeout": 5, **options})
        return transfer

    return beginning


@pytest.mark.parametrize("tokens", [range(30), range(3, 30), range(5, 6), range(29, 30)])
async def test_a_transfer_of_one_chunk_needs_one_exchange(stage, tap, tokens):
    prefill, decode = await stage.pair(Cache(), Cache(layout="HND", block_tokens=8), **LARGE)
    offered = {"tokens": 30, "payload": b"first"}
    result, _ = await stage.bring(prefill, decode, "r", HELD[::-1], HELD, tokens, offered=offered)
    assert (result.payload, result.stats.route, result.stats.chunks) == (b"first", "staged", 1)
    assert not tap.of(Ready)
    assert not tap.of(Reserve)
    (fetch,), (accept,) = tap.of(Fetch), tap.of(Accept)
    assert accept.ahead
    assert accept.spans, "the decode rank plans too, and needs to know which blocks are padding"
    assert (len(fetch.ring), fetch.ring_chunks) == (1, 1)
    assert fetch.ring[0].length >= result.stats.bytes
    await quiet(prefill, decode)


@pytest.mark.parametrize("chunk_bytes", ["2KiB", "1KiB"])
async def test_the_first_chunks_of_a_large_transfer_need_no_exchange(stage, tap, chunk_bytes, begin, monkeypatch):
    source, target = Cache(), Cache(layout="HND", block_tokens=8)
    sizes = {"chunk_bytes": chunk_bytes, "arena_bytes": "16KiB"}
    prefill, decode = await stage.pair(source, target, route="staged", **sizes)
    after = Gate()
    monkeypatch.setattr("kvxfer.decode.receiver.Grants.turns", lambda _: 3)
    for number in range(4):
        tap.change[Fetch] = (lambda fetch: replace(fetch, token=bytes(16))) if number == 2 else (lambda fetch: fetch)
        copied = Copied(target).bring(source, HELD, HELD, range(3, 30))
        after.fired = number < 3  # at last no turns are taken, which may take long: a place is for one chunk
        transfer = begin(prefill, decode, f"r{number}", after=after)
        await eventually(lambda: len(tap.of(Accept)) > number)  # noqa: B023
        after.fired = True
        result = await transfer
        copied.check()
        fetch, accept = tap.of(Fetch)[-1], tap.of(Accept)[-1]
        assert accept.ahead == (number in {1, 3}), "the agents do not know each other yet, or the token is none"
        if accept.ahead:
            assert 1 < len(fetch.ring) < result.stats.chunks == accept.chunks
            assert kept_of_peers(decode)["estimates.paces"] == 1
            assert fetch.ring_chunks == (3 if number == 1 else 1) * len(fetch.ring)
    assert len(tap.of(Ready)) == sum(bool(message.ring) for message in tap.of(Reserve)) == 2
    await quiet(prefill, decode)


@pytest.mark.parametrize("larger", [False, True])
async def test_the_plan_may_be_made_after_the_bytes_have_landed(stage, monkeypatch, begin, larger):
    source, target = Cache(), Cache(layout="HND")
    prefill, decode = await stage.pair(source, target, **LARGE)
    copied = Copied(target).bring(source, HELD, HELD, range(3, 30))
    plans = keep_plans(decode, monkeypatch)
    transfer = begin(prefill, decode)
    await eventually(lambda: frames(decode, "KvAgentResult"))
    assert len(plans) == 1, "the plan of the transfer"
    if larger:  # the peer says meanwhile, on a stream of its own, that its blocks are: the plan is what was agreed upon
        told = geometry_to_wire(CacheGeometry.of(Cache(block_tokens=6).tensors), with_addresses=True)
        tell(prefill, lambda body: replace(body, tensors=told))
        offer = decode.offer("back", [8], tokens=4)
        claim = prefill.claim(offer.ticket)
        await eventually(lambda: len(sessions(decode)) > 1)
        claim.close()
        await offer.withdraw()
    assert not transfer.done
    plans.pop()()
    await transfer
    copied.check()
    await quiet(prefill, decode)


async def test_bytes_wait_in_staging_until_the_blocks_may_be_written(stage, begin):
    source, target = Cache(), Cache(layout="HND")
    prefill, decode = await stage.pair(source, target, **LARGE)
    before = Copied(target)
    after = Gate()
    transfer = begin(prefill, decode, after=after)
    await eventually(lambda: frames(decode, "KvAgentResult"))
    before.check()
    after.fired = True
    copied = before.bring(source, HELD, HELD, range(3, 30))
    await transfer
    copied.check()
    await quiet(prefill, decode)


@pytest.mark.parametrize("why", ["nothing free", "direct is preferred"])
async def test_nothing_rides_with_a_fetch_that_cannot(stage, tap, why, begin):
    source, target = Cache(), Cache(layout="HND")
    config = LARGE | ({"route": "direct"} if why == "direct is preferred" else {})
    prefill, decode = await stage.pair(source, target, **config)
    full = take_all(decode, "receive") if why == "nothing free" else None
    copied = Copied(target).bring(source, HELD, HELD, range(3, 30))
    transfer = begin(prefill, decode)
    await eventually(lambda: tap.of(Accept))
    assert [fetch.ring for fetch in tap.of(Fetch)] == [[]]
    if full is not None:
        full.release()
    await transfer
    copied.check()
    await quiet(prefill, decode)


@pytest.mark.parametrize("why", ["too small", "direct there"])
async def test_a_grant_that_does_not_fit_is_void(stage, tap, why):
    there, here = ("direct", "auto") if why == "direct there" else ("staged", "staged")
    prefill, decode = await stage.pair(
        Cache(), Cache(layout="HND"), prefill={**LARGE, "route": there}, decode={**LARGE, "route": here}
    )
    if why == "too small":
        tap.change[Fetch] = lambda fetch: replace(fetch, ring=[Place(fetch.ring[0].address, 1024)])
    result, _ = await stage.bring(prefill, decode)
    assert (len(tap.of(Fetch)[0].ring), tap.of(Accept)[0].ahead) == (1, False)
    assert tap.of(Reserve)
    assert result.stats.route == there
    await quiet(prefill, decode)


@pytest.mark.parametrize("route", ["staged", "direct"])
async def test_a_grant_that_has_run_out_before_it_could_be_used_is_void(stage, tap, monkeypatch, route):
    """Kernels may have to be compiled first, or the plan is large."""
    prefill, decode = await stage.pair(Cache(), Cache(layout="HND"), **{**LARGE, "route": route})
    plan_late(0.02, monkeypatch)
    tap.change[Fetch] = lambda fetch: replace(fetch, lease_ms=min(fetch.lease_ms, 1))
    await stage.bring(prefill, decode)
    assert not tap.of(Accept)[0].ahead
    assert tap.of(Reserve)
    await quiet(prefill, decode)


async def test_a_chunk_that_is_larger_than_what_was_granted_is_never_scattered(stage, tap, monkeypatch, begin):
    """Whoever claims to have used a grant that was too small wrote beside it, or nothing."""
    target = Cache(layout="HND")
    prefill, decode = await stage.pair(Cache(), target, **LARGE)
    before = Copied(target)
    monkeypatch.setattr(PairPlan, "most_staged_bytes", lambda pair, tokens: 1024)
    tap.change[Fetch] = lambda fetch: replace(fetch, ring=[Place(fetch.ring[0].address, 32 << 10)])
    with pytest.raises(TransferFailedError, match="was said to fit into 1024"):
        await begin(prefill, decode)
    before.check()
    await quiet(prefill, decode)
