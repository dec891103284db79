"""`kvxfer bench matrix` as its two processes see it: the decode process leads, the prefill process follows.

A repetition is: new block ids on both sides, new content at the prefill side, poison at the decode side; a fetch of one
block, which finds two processes that were idle and leaves them as awake as servers are; the fetch, timed at its caller;
the whole decode cache compared; then the reference, at the prefill side. So transfers and references alternate, and
what else the machine does meets both.
"""

import asyncio
import random
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import kvxfer
from kvxfer.config import Config
from kvxfer.telemetry import TransferStats
from kvxfer.tools.bench.caches import Cache, Request, Slab, draw, in_shared_memory
from kvxfer.tools.bench.children import BenchFailedError, Side, Step
from kvxfer.tools.bench.device import available_bytes
from kvxfer.tools.bench.layouts import Layout
from kvxfer.tools.bench.reference import Refer, ReferenceKind, Source, Target, kind_for
from kvxfer.tools.bench.samples import Samples
from kvxfer.tools.bench.victims import beside

if TYPE_CHECKING:
    from kvxfer.tools.bench.matrix import Matrix

__all__ = ["Cell", "Measured", "Skipped", "decode", "draw_unwritten", "prefill", "settings", "stages"]

_FETCH_SECONDS: Final = 300.0
_ROOM: Final = 1 << 30
_WARMUPS: Final = 2
"""The first one connects and compiles; after two every block of the decode side was written, and has its pages."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the matrix."""

    route: str
    layout: Layout
    request_bytes: int  # about how many: whole blocks are fetched
    ctas: int | None = None  # thread blocks of a copy on a GPU; None leaves the setting alone

    @property
    def shared(self) -> bool:
        """Whether, on a CPU, the caches lie in memory that another process can map."""
        return in_shared_memory(self.route)

    @property
    def pool(self) -> tuple[Layout, int]:
        """What its caches are: the layout, and the number of blocks."""
        return self.layout, self.layout.pool(self.request_bytes)

    def __str__(self) -> str:
        ctas = "" if self.ctas is None else f", {self.ctas} CTAs"
        return f"{self.route}, {self.layout.name} pieces, {self.request_bytes >> 20} MiB{ctas}"


@dataclass(frozen=True, slots=True)
class Measured:
    """One cell's results, of repetitions that were each verified."""

    cell: Cell
    nbytes: int
    fetch: Samples
    reference: Samples
    reference_kind: ReferenceKind
    difference: str  # how the first wrong cache differed from what it should be
    received: TransferStats  # of the repetition in the middle
    sent: TransferStats | None
    # of the pair's first transfer, the warm-up: by the profile alone, which no transfer had corrected yet
    first_predicted: float | None


@dataclass(frozen=True, slots=True)
class Skipped:
    """A cell that was not measured, and why."""

    cell: Cell
    reason: str


@dataclass(frozen=True, slots=True)
class _Serve:
    request: str
    seed: int
    first: bool  # nothing goes before it


def settings(side: Side, route: str, ctas: int | None, **more: Any) -> Config:
    """A worker's settings: what a benchmark fixes; all else comes from the environment and the defaults."""
    fixed: dict[str, Any] = {"engine": f"bench-{side.name}", "route": route, **more}
    if ctas is not None:
        fixed["copy_ctas"] = ctas
    return Config(listen=f"unix:{side.folder / side.name}.sock", **fixed)


def draw_unwritten(seed: int, pool: int, blocks: int, unwritten: set[int]) -> Request:
    """As `draw` at the decode side, but blocks that no transfer has written yet come first."""
    ids = sorted(draw(seed, pool, pool, source=False).ids, key=lambda block: block not in unwritten)
    return Request(seed, tuple(ids[:blocks]))


def stages(stats: TransferStats | None) -> dict[str, Any] | None:
    """Seconds by stage, as one side saw them."""
    if stats is None:
        return None
    found = asdict(stats)
    first = None if stats.first_byte is None else stats.first_byte - stats.started
    names = ("queued", "gathering", "posting", "wire", "scattering", "descriptors")
    return {name: found[name] for name in names} | {"duration": stats.duration, "first_byte_after": first}


# --- the prefill process


async def prefill(side: Side, matrix: "Matrix") -> None:
    """Open, serve and close as the decode process says."""
    reference = Source(f"kvxfer-bench-{side.name}", side.device, await side.hear())
    await reference.open()
    slab = Slab(side.device, await side.hear(), source=True)
    while isinstance(cell := await side.hear(), Cell):
        await _serve(side, matrix, cell, slab.cache(*cell.pool, shared=cell.shared), reference)
    await reference.close()
    side.send("closed")


async def _serve(side: Side, matrix: "Matrix", cell: Cell, cache: Cache, reference: Source) -> None:
    """One cell: a worker, and requests until the decode process closes it."""
    layout = cell.layout
    blocks, pool = layout.blocks(cell.request_bytes), layout.pool(cell.request_bytes)
    async with kvxfer.Worker(cache.cache_tensors(), settings(side, cell.route, cell.ctas)) as worker:
        side.send("open")
        while True:
            match await side.hear():
                case _Serve(name, seed, first):
                    request = draw(seed, pool, blocks, source=True)
                    await asyncio.to_thread(cache.write, request)
                    tokens = blocks * layout.block_tokens
                    offer = worker.offer(name, np.array(request.ids), tokens=tokens, after=kvxfer.READY)
                    block = [] if first else [(f"{name}-0", request.ids[:1], layout.block_tokens)]
                    before = [worker.offer(who, ids, tokens=n, after=kvxfer.READY).ticket for who, ids, n in block]
                    async with beside("" if first else matrix.beside, side.device):
                        side.send((before, offer.ticket))
                        ending = await offer.released()
                    stats = ending.stats if isinstance(ending, kvxfer.Released) else ()
                    side.send(stats[0] if stats else None)
                case Refer(kind, nbytes):
                    side.send(await reference.measure(kind, nbytes))
                case _:
                    break
    side.send("closed")


# --- the decode process


async def decode(side: Side, matrix: "Matrix") -> None:
    """Measure every cell, and report each as it is done."""
    free = available_bytes(side.device)
    cells = matrix.cells()
    reasons = [_reason(cell, side.device, free) for cell in cells]
    fitting = [cell for cell, reason in zip(cells, reasons, strict=True) if not reason]
    target = Target(f"kvxfer-bench-{side.name}", side.device, max(map(_nbytes, fitting), default=1))
    await target.open()
    side.send(await target.card())
    pools = [cell.pool for cell in fitting]
    side.send(pools)
    slab = Slab(side.device, pools, source=False)
    # on a CPU those whose caches lie in shared memory come last: see `Slab`
    for cell, reason in sorted(zip(cells, reasons, strict=True), key=lambda one: one[0].shared):
        side.report(Step(str(cell)))
        if reason:
            side.report(Skipped(cell, reason))
            continue
        cache = slab.cache(*cell.pool, shared=cell.shared)
        side.report(await _Run(side, matrix, cell, cache, target).measure())
    await side.ask("close")  # nobody is to reach for a target that is gone
    await target.close()


def _nbytes(cell: Cell) -> int:
    return cell.layout.blocks(cell.request_bytes) * cell.layout.block_bytes


def _reason(cell: Cell, device: str, free: int) -> str:
    """Why a cell cannot be measured; empty if it can.

    Both sides may lie on one GPU, as they do in one host's memory: two caches, the buffers of the references, and some
    room for what is compared.
    """
    layout = cell.layout
    if not layout.blocks(cell.request_bytes):
        return f"the request is smaller than one block of all layers ({layout.block_bytes} bytes)"
    if cell.ctas is not None and device == "cpu":
        return "thread blocks are a setting of GPUs"
    caches = layout.pool(cell.request_bytes) * (layout.block_bytes + layout.source_block_bytes)
    needed = caches + 3 * _nbytes(cell) + _ROOM
    return f"it needs {needed >> 20} MiB of memory, and {free >> 20} MiB are free" if needed > free else ""


@dataclass(frozen=True, slots=True)
class _Run:
    """One cell at the decode side."""

    side: Side
    matrix: "Matrix"
    cell: Cell
    cache: Cache
    target: Target

    async def measure(self) -> Measured:
        """Open a worker on each side, repeat, close both."""
        side, cell = self.side, self.cell
        if await side.ask(cell) != "open":
            raise BenchFailedError(f"{cell}: the prefill side did not open")
        try:
            config = settings(side, cell.route, cell.ctas)
            async with kvxfer.Worker(self.cache.cache_tensors(), config) as worker:
                return await self._repeat(worker)
        finally:
            await side.ask("close")

    async def _repeat(self, worker: kvxfer.Worker) -> Measured:
        matrix, until = self.matrix, time.monotonic() + self.matrix.cell_seconds
        fetched: list[tuple[float, TransferStats, TransferStats | None]] = []
        references: list[float] = []
        first_predicted: float | None = None
        difference, kind = "", kind_for(self.cell.route, self.side.device)
        blocks, pool = self.cell.layout.blocks(self.cell.request_bytes), self.cell.pool[1]
        unwritten = set(range(pool))
        for number in range(_WARMUPS + matrix.repetitions):
            request = draw_unwritten(random.SystemRandom().getrandbits(62), pool, blocks, unwritten)
            unwritten -= set(request.ids)
            seconds, received, sent, differs = await self._transfer(worker, request, first=number == 0)
            if number == 0:
                first_predicted = received.predicted
            difference = difference or differs
            kind = kind_for(received.route, self.side.device)
            reference = await self._refer(kind)
            if number >= _WARMUPS:
                fetched.append((seconds, received, sent))
                references.append(reference)
                if time.monotonic() >= until:
                    break
            self.side.report(Step(str(self.cell)))
        samples = Samples.of([one[0] for one in fetched], _WARMUPS)
        middle = sorted(fetched, key=lambda one: one[0])[(len(fetched) - 1) // 2]
        return Measured(
            cell=self.cell,
            nbytes=_nbytes(self.cell),
            fetch=samples,
            reference=Samples.of(references, _WARMUPS),
            reference_kind=kind,
            difference=difference,
            received=middle[1],
            sent=middle[2],
            first_predicted=first_predicted,
        )

    async def _transfer(
        self, worker: kvxfer.Worker, request: Request, *, first: bool
    ) -> tuple[float, TransferStats, TransferStats | None, str]:
        """One fetch and its check: seconds, stats of both sides, and how the cache differs from what it should be."""
        side, cell = self.side, self.cell
        side.send(_Serve(f"{request.seed:x}", request.seed, first))
        await asyncio.to_thread(self.cache.scrub)
        (before, ticket), ids = await side.hear(), np.array(request.ids)
        tokens, expected = range(len(ids) * cell.layout.block_tokens), [request]
        for one in before:
            spare = [min(set(range(cell.pool[1])) - set(request.ids))]
            await worker.fetch(one, spare, tokens=range(cell.layout.block_tokens), after=kvxfer.READY)
            expected.append(Request(request.seed, tuple(spare)))
        async with beside("" if first else self.matrix.beside, side.device):
            began = time.perf_counter()
            result = await worker.fetch(ticket, ids, tokens=tokens, after=kvxfer.READY, timeout=_FETCH_SECONDS)
            seconds = time.perf_counter() - began
        sent = await side.hear()
        if self.matrix.sabotage:
            outside = max(set(range(cell.pool[1])) - set(request.ids))
            self.cache.corrupt(request.ids[0] if self.matrix.sabotage == "byte" else outside)
        difference = await asyncio.to_thread(self.cache.difference, *expected)
        if not difference and result.stats.bytes != _nbytes(cell):
            difference = f"the stats say {result.stats.bytes} bytes, but {_nbytes(cell)} were asked for"
        return seconds, result.stats, sent, difference

    async def _refer(self, kind: ReferenceKind) -> float:
        nbytes = _nbytes(self.cell)
        seconds = await self.target.refer(self.side, kind, nbytes)
        if kind != "memcpy" and not await self.target.landed(nbytes):
            raise BenchFailedError(f"{self.cell}: the reference {kind} did not land whole")
        return seconds
