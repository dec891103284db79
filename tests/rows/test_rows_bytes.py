"""Fewest bytes: nothing crosses the wire twice, and nothing is written that was not asked for.

Every case of the catalogue, with token ranges, block lists and chunk sizes drawn anew, several requests one after
another into the same blocks, the routes in turn; counted from what the fabric and the copies were given. On `mapped`
the prefill rank's copies are what crosses.
"""

from collections.abc import AsyncIterator, Sequence
from random import Random

import numpy as np
import pytest
import torch
from catalogue import CASES, Case
from far import Ranks
from ledger import NOTHING, Ledger, RecordingNetwork, RecordingTransport, recording_mover, watch_all, watch_staging
from ranks import I64, Request, World
from sides import SIZES, Sides, all_idle, issuer, route_in_turn
from stage import KEY
from stored import Converted, Stored

from kvxfer import READY

REQUESTS = {False: 3, True: 2}
"""By whether a case has all layouts at once, and so moves many times as much."""
CHUNKS = {False: ["2KiB", "6KiB", "64KiB"], True: ["24KiB", "64KiB"]}
"""Likewise: the smallest chunk holds a window of each group."""


class Recorded(Ranks):
    """Ranks whose transport is recorded."""

    def transport(self, name: str, network: RecordingNetwork) -> RecordingTransport:
        """An agent that notes its posts."""
        return RecordingTransport(name, network)


class RecordedSides(Recorded, Sides):
    """The same of a case."""


@pytest.fixture(scope="module")
def kind_of_ranks() -> type[RecordedSides]:
    """Ranks of cases."""
    return RecordedSides


@pytest.fixture
async def storing() -> AsyncIterator[Recorded]:
    """Ranks of caches of floats in this process."""
    found = Recorded()
    yield found
    await found.close()


def drawn(case: Case, rng: Random) -> Request:
    """A request that the engines of a case could have."""
    stop = rng.randint(min(case.tokens.start + 1, case.tokens.stop), case.tokens.stop)
    start = rng.choice([0, rng.randrange(stop), rng.randrange(stop), stop - 1, stop])
    bound = any(one.state or one.window for one in case.model)  # belongs to the last token of what is on offer
    offered = stop if bound else stop + rng.choice([0, 1, 17])
    return Request(range(start, stop), offered, rng.randrange(1 << 16))


def check(world: World, ledger: Ledger, route: str) -> None:
    """What moved is what was asked for."""
    sides = (world.case.prefill, world.case.decode)
    block = max(engine.block_of(one.group) for engine in sides for one in world.case.model if not one.state)
    classes = sum(len(one.dims) for one in world.case.model) * max(len(rank.cache) for rank in world.decode)
    for rank in world.decode:
        needed = world.needs(rank) + np.asarray([rank.base, 0])
        rounding = check_rank(ledger, f"decode{rank.number}", needed[:, 0], needed[:, 1], needed[:, 1])
        most = most_rounding(block, classes, len(needed), len(world.request.tokens), ledger.posts)
        assert rounding <= (most if route == "staged" else 0)
    assert route != "mapped" or not ledger.posts  # nothing crosses the fabric


def check_rank(ledger: Ledger, agent: str, at: I64, codes: I64, wire: I64) -> int:
    """A decode rank got these bytes, each once and no other, and of its cache these were written; returns rounding."""
    crossed, written = (
        np.concatenate(found.get(agent, [np.zeros(0, np.int64)])) for found in (ledger.wire, ledger.written)
    )
    cache = crossed[crossed != NOTHING]
    assert np.array_equal(np.sort(cache), np.sort(wire))
    assert np.array_equal(np.sort(written), np.sort(at))
    assert np.array_equal(ledger.holds(at), codes)
    return len(crossed) - len(cache)


def most_rounding(block: int, classes: int, needed: int, tokens: int, posts: int) -> int:
    """Bytes that staging may add: less than a block at either end of the range, and the alignment of each segment."""
    return 2 * block * needed // max(1, tokens) + 16 * classes * posts


@pytest.mark.parametrize("name", CASES)
async def test_no_byte_too_many(near: RecordedSides, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, rng, network = CASES[name], Random(name), RecordingNetwork()
    ledger = network.ledger
    monkeypatch.setattr("kvxfer.worker.Mover", recording_mover(ledger))
    large = case.row == "layout"
    route, chunk_bytes = route_in_turn(name), rng.choice(CHUNKS[large])
    request = Request.of(case)
    world = World.of(case, Request(request.tokens, request.offered + 17))  # pools for the longest that is drawn
    sizes = {"network": network, "route": route, "chunk_bytes": chunk_bytes}
    tickets = issuer(await near.prefill_of(world, **sizes), KEY)
    await near.decode(world, **sizes)
    watch_all(ledger, world, near.workers)
    senders, receivers = near.workers[: len(world.prefill)], near.workers[len(world.prefill) :]
    for number in range(REQUESTS[large]):
        world.begin(request if number == 0 else drawn(case, rng))
        ledger.begin(*(rank.cells(world.coder) + np.asarray([rank.base, 0]) for rank in world.prefill))
        expected = [world.expected(rank) for rank in world.decode]
        tokens, ident = world.request.tokens, f"{name} {number}"
        offers = [
            worker.offer(ident, rank.spans, tokens=world.request.offered, after=READY)
            for worker, rank in zip(senders, world.prefill, strict=True)
        ]
        transfers = [
            worker.start_fetch(tickets.ticket(ident), rank.spans, tokens=tokens, after=READY, timeout=20)
            for worker, rank in zip(receivers, world.decode, strict=True)
        ]
        results = [await transfer for transfer in transfers]
        for rank, memory in zip(world.decode, expected, strict=True):
            assert np.array_equal(rank.memory, memory), f"rank {rank.number}: {(rank.memory != memory).sum()} bytes"
        assert {type(await offer.released()).__name__ for offer in offers} == {"Released"}
        check(world, ledger, route)
        assert {result.stats.route for result in results} == {route}
        assert [result.stats.bytes for result in results] == [len(world.needs(rank)) for rank in world.decode]
    await all_idle(near)


def elements(cache: Stored, ids: Sequence[int], tokens: range) -> I64:
    """Addresses of a request's elements, in one order of global coordinates whatever the layout and the dtype."""
    block, slot = cache.at(ids, tokens)
    found = []
    for memory in cache.memory.values():
        at = memory.data_ptr() + torch.arange(memory.numel()).reshape(memory.shape) * memory.itemsize
        found.append(at.permute(cache._order)[:, block, slot].movedim(1, 0))
    return torch.stack(found, 1).reshape(len(tokens), -1).numpy()


def each_byte(first: I64, item: int) -> I64:
    """Addresses of the bytes of elements."""
    return (first.ravel()[:, None] + np.arange(item)).ravel()


@pytest.mark.parametrize("chunk_bytes", ["2KiB", "64KiB"])
@pytest.mark.parametrize("route", ["staged", "mapped"])
@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float8_e4m3fn), (torch.float8_e4m3fn, torch.bfloat16)], ids=["narrower", "wider"]
)
async def test_what_is_converted_crosses_once_as_the_narrower_of_two_dtypes(
    storing: Recorded,
    monkeypatch: pytest.MonkeyPatch,
    dtypes: tuple[torch.dtype, torch.dtype],
    route: str,
    chunk_bytes: str,
) -> None:
    """Several requests into the same blocks. On `mapped` a copy converts from cache to cache, and nothing is sent."""
    rng, network, (src, dst) = Random(f"{dtypes} {route} {chunk_bytes}"), RecordingNetwork(), dtypes
    ledger = network.ledger
    monkeypatch.setattr("kvxfer.worker.Mover", recording_mover(ledger))
    given = Stored(src, "head", blocks=14, block_tokens=16)
    ours = Stored(dst, "tensor", seed=2, blocks=6, block_tokens=64, layout="HND")
    sizes = {**SIZES, "chunk_bytes": chunk_bytes, "route": route}
    tickets = issuer(await storing.open("prefill", [given], network=network, **sizes), KEY)
    await storing.open("decode", [ours], network=network, convert=True, **sizes)
    (prefill, decode), (theirs, mine) = storing.workers, storing.caches
    for cache, agent in ((theirs, ""), (mine, "decode0")):
        for memory in cache.memory.values():
            ledger.watch(memory.data_ptr(), memory.nbytes, agent=agent)
    watch_staging(ledger, storing.workers)
    copied = Converted(ours, mine)
    for tokens in (range(208), range(5, 200), range(63, 129), range(17, 18)):
        ids, into, request = rng.sample(range(14), 13), rng.sample(range(6), 4), str(tokens)
        copied.bring(given, ids, into, tokens)
        held = elements(theirs, ids, range(208))
        codes = np.arange(held.size).reshape(held.shape)
        ledger.begin(np.stack([each_byte(held, src.itemsize), codes.ravel().repeat(src.itemsize)], axis=1))
        offer = prefill.offer(request, ids, tokens=208)
        result = await decode.fetch(tickets.ticket(request), into, tokens=tokens, timeout=10)
        assert result.stats.route == route
        copied.check()
        assert type(await offer.released()).__name__ == "Released"
        wanted = codes[tokens.start : tokens.stop].ravel()
        at = each_byte(elements(mine, into, tokens), dst.itemsize)
        wire = wanted.repeat(min(src.itemsize, dst.itemsize) if route == "staged" else dst.itemsize)
        rounding = check_rank(ledger, "decode0", at, wanted.repeat(dst.itemsize), wire)
        classes = 2 * len(ours.memory)
        most = most_rounding(ours.block_tokens, classes, len(wire), len(tokens), ledger.posts)
        assert rounding <= (most if route == "staged" else 0)
        assert (ledger.posts > 0) == (route == "staged")
    await all_idle(storing)
