"""Fewest bytes: nothing crosses the wire twice, and nothing is written that was not asked for.

Every case of the catalogue, with token ranges, block lists and chunk sizes drawn anew, several requests one after
another into the same blocks, the routes in turn. What crossed is what the network says, and what was written is what
it says, or what the tables of copies do; since every byte is where it belongs in the end, no more of them than there
are means each of them once. On `mapped` the prefill rank's copies are what crosses.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from catalogue import CASES, Case
from decoded import accesses
from far import Ranks
from ranks import I64, Request, World
from sides import SIZES, Sides, all_idle, issuer, route_in_turn
from stage import KEY
from stored import Converted, Stored

from kvxfer import READY
from kvxfer.copy.mover import Flow, Mover
from kvxfer.copy.port import CopyJob, Direction, Operation
from kvxfer.testing import LoopbackNetwork

REQUESTS = {False: 3, True: 2}
"""By whether a case has all layouts at once, and so moves many times as much."""
CHUNKS = {False: ["2KiB", "6KiB", "64KiB"], True: ["24KiB", "64KiB"]}
"""Likewise: the smallest chunk holds a window of each group."""


class Moved:
    """What was moved since it was asked last, between workers on a network of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.network = LoopbackNetwork()
        self._copied: list[I64] = []
        self._logged = 0
        note = self._note

        class Noting(Mover):
            """The shipped copies, of which every step is noted."""

            def submit(self, job: CopyJob, direction: Direction) -> Flow:
                note([job])
                return super().submit(job, direction)

            def flow(self, job: CopyJob, direction: Direction, steps: Iterable[CopyJob], **how: Any) -> Flow:
                return super().flow(job, direction, note(steps), **how)

            def add(self, flow: Flow, steps: Iterable[CopyJob]) -> None:
                super().add(flow, note(steps))

        monkeypatch.setattr("kvxfer.worker.Mover", Noting)

    def _note(self, steps: Iterable[CopyJob]) -> list[CopyJob]:
        noted = list(steps)
        for one in (one for job in noted for one in accesses(job.tables)):
            self._copied.append((one.dst[:, None] + np.arange(one.dst_bytes)).ravel())
        return noted

    def taken(self) -> tuple[dict[str, int], I64]:
        """How many bytes crossed to each agent, and the addresses of all that were written."""
        log, self._logged = self.network.log[self._logged :], len(self.network.log)
        crossed: dict[str, int] = {}
        written, self._copied = [np.zeros(0, np.int64), *self._copied], []
        for entry in log:
            agent = entry.dst if entry.operation is Operation.WRITE else entry.src
            crossed[agent] = crossed.get(agent, 0) + entry.length
            if entry.operation is Operation.WRITE:
                written.append(np.arange(entry.address, entry.address + entry.length))
        return crossed, np.concatenate(written)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Moved:
    """What is, by workers that are opened from now on."""
    return Moved(monkeypatch)


@pytest.fixture(scope="module")
def kind_of_ranks() -> type[Sides]:
    """Ranks of cases."""
    return Sides


@pytest.fixture
async def storing() -> AsyncIterator[Ranks]:
    """Ranks of caches of floats in this process."""
    found = Ranks()
    yield found
    await found.close()


def drawn(case: Case, rng: Random) -> Request:
    """A request that the engines of a case could have."""
    stop = rng.randint(min(case.tokens.start + 1, case.tokens.stop), case.tokens.stop)
    start = rng.choice([0, rng.randrange(stop), rng.randrange(stop), stop - 1, stop])
    bound = any(one.state or one.window for one in case.model)  # belongs to the last token of what is on offer
    offered = stop if bound else stop + rng.choice([0, 1, 17])
    return Request(range(start, stop), offered, rng.randrange(1 << 16))


def within(written: I64, base: int, nbytes: int) -> I64:
    """Those in some memory, in order."""
    return np.sort(written[(base <= written) & (written < base + nbytes)])


def most_rounding(block: int, classes: int, needed: int, tokens: int, chunks: int) -> int:
    """Bytes that staging may add: less than a block at either end of the range, and the alignment of each segment."""
    return 2 * block * needed // max(1, tokens) + 16 * classes * chunks


@pytest.mark.parametrize("name", CASES)
async def test_no_byte_too_many(near: Sides, name: str, moved: Moved) -> None:
    case, rng = CASES[name], Random(name)
    large = case.row == "layout"
    route, chunk_bytes = route_in_turn(name), rng.choice(CHUNKS[large])
    request = Request.of(case)
    world = World.of(case, Request(request.tokens, request.offered + 17))  # pools for the longest that is drawn
    sizes = {"network": moved.network, "route": route, "chunk_bytes": chunk_bytes}
    tickets = issuer(await near.prefill_of(world, **sizes), KEY)
    await near.decode(world, **sizes)
    senders, receivers = near.workers[: len(world.prefill)], near.workers[len(world.prefill) :]
    sides = (case.prefill, case.decode)
    block = max(engine.block_of(one.group) for engine in sides for one in case.model if not one.state)
    classes = sum(len(one.dims) for one in case.model) * max(len(rank.cache) for rank in world.decode)
    for number in range(REQUESTS[large]):
        world.begin(request if number == 0 else drawn(case, rng))
        needs, expected = zip(*[(world.needs(rank), world.expected(rank)) for rank in world.decode], strict=True)
        given = [rank.memory.copy() for rank in world.prefill]
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
        assert {type(await offer.released()).__name__ for offer in offers} == {"Released"}
        crossed, written = moved.taken()
        for rank, memory in zip(world.prefill, given, strict=True):
            assert np.array_equal(rank.memory, memory)
        for rank, need, memory, result in zip(world.decode, needs, expected, results, strict=True):
            assert np.array_equal(rank.memory, memory), f"rank {rank.number}: {(rank.memory != memory).sum()} bytes"
            assert (result.stats.route, result.stats.bytes) == (route, len(need))
            if route != "pull":  # a reader's own posts write there: as many bytes as cross
                here = within(written, rank.base, len(rank.memory))
                assert np.array_equal(here, np.sort(need[:, 0]) + rank.base)
            bytes_crossed = crossed.get(f"decode{rank.number}", 0)
            most = most_rounding(block, classes, len(need), len(tokens), result.stats.chunks)
            more = bytes_crossed - (0 if route == "mapped" else len(need))
            assert 0 <= more <= (most if route == "staged" else 0)
    await all_idle(near)


def elements(cache: Stored, ids: Sequence[int], tokens: range) -> I64:
    """Addresses of the bytes of a request's elements."""
    block, slot = cache.at(ids, tokens)
    found = []
    for memory in cache.memory.values():
        at = memory.data_ptr() + torch.arange(memory.numel()).reshape(memory.shape) * memory.itemsize
        found.append(at.permute(cache._order)[:, block, slot].ravel()[:, None] + torch.arange(memory.itemsize))
    return torch.cat(found).ravel().numpy()


@pytest.mark.parametrize("chunk_bytes", ["2KiB", "64KiB"])
@pytest.mark.parametrize("route", ["staged", "mapped"])
@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float8_e4m3fn), (torch.float8_e4m3fn, torch.bfloat16)], ids=["narrower", "wider"]
)
async def test_what_is_converted_crosses_once_as_the_narrower_of_two_dtypes(
    storing: Ranks, moved: Moved, dtypes: tuple[torch.dtype, torch.dtype], route: str, chunk_bytes: str
) -> None:
    """Several requests into the same blocks. On `mapped` a copy converts from cache to cache, and nothing is sent."""
    rng, (src, dst) = Random(f"{dtypes} {route} {chunk_bytes}"), dtypes
    given = Stored(src, "head", blocks=14, block_tokens=16)
    ours = Stored(dst, "tensor", seed=2, blocks=6, block_tokens=64, layout="HND")
    sizes = {**SIZES, "chunk_bytes": chunk_bytes, "route": route, "network": moved.network}
    tickets = issuer(await storing.open("prefill", [given], **sizes), KEY)
    await storing.open("decode", [ours], convert=True, **sizes)
    (prefill, decode), (_, mine) = storing.workers, storing.caches
    copied = Converted(ours, mine)
    for tokens in (range(208), range(5, 200), range(63, 129), range(17, 18)):
        ids, into, request = rng.sample(range(14), 13), rng.sample(range(6), 4), str(tokens)
        copied.bring(given, ids, into, tokens)
        offer = prefill.offer(request, ids, tokens=208)
        result = await decode.fetch(tickets.ticket(request), into, tokens=tokens, timeout=10)
        assert result.stats.route == route
        copied.check()
        assert type(await offer.released()).__name__ == "Released"
        crossed, written = moved.taken()
        here = [within(written, memory.data_ptr(), memory.nbytes) for memory in mine.memory.values()]
        at = elements(mine, into, tokens)
        assert np.array_equal(np.sort(np.concatenate(here)), np.sort(at))
        narrow = len(at) // dst.itemsize * min(src.itemsize, dst.itemsize)
        most = most_rounding(ours.block_tokens, 2 * len(ours.memory), narrow, len(tokens), result.stats.chunks)
        if route == "staged":
            assert 0 <= crossed["decode0"] - narrow <= most
        else:
            assert crossed == {}
    await all_idle(storing)
