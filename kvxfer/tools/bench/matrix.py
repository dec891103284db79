"""`kvxfer bench matrix`: routes x pieces x request sizes, each cell beside one contiguous copy of the same bytes.

A repetition is: new block ids on both sides, new content at the prefill side, poison at the decode side; a fetch of one
block, which finds two processes that were idle and leaves them as awake as servers are; the fetch, timed at its caller;
the whole decode cache compared; then the reference, at the prefill side. So transfers and references alternate, and
what else the machine does meets both.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, get_args

import numpy as np

from kvxfer.config import Config
from kvxfer.telemetry import TransferStats
from kvxfer.tools.bench.caches import Request, Slab, draw, in_shared_memory
from kvxfer.tools.bench.children import BenchFailedError, Side, Step
from kvxfer.tools.bench.device import Kind, available_bytes, lacking
from kvxfer.tools.bench.layouts import MIB, NAMED, PIECES, Layout, plain
from kvxfer.tools.bench.prefill import Opened, Pool, Prefill, ask, measure, opened, refer
from kvxfer.tools.bench.reference import ReferenceKind, Target, kind_for
from kvxfer.tools.bench.report import Report, shown_route
from kvxfer.tools.bench.samples import Samples
from kvxfer.tools.bench.victims import beside
from kvxfer.tools.shown import size

__all__ = ["SIZES", "Matrix", "draw_unwritten", "routes", "stages"]

SIZES: Final = (2 * MIB, 32 * MIB, 512 * MIB, 2048 * MIB)
_WARMUPS: Final = 2
"""The first one connects and compiles; after two every block of the decode side was written, and has its pages."""


def routes() -> tuple[str, ...]:
    """Every route that the setting knows; those whose caches lie in shared memory on a CPU are the last."""
    known: tuple[str, ...] = get_args(Config.model_fields["route"].annotation)
    return tuple(sorted(known, key=in_shared_memory))


@dataclass(frozen=True, slots=True)
class Matrix:
    """What to measure."""

    device: Kind
    routes: tuple[str, ...] = field(default_factory=routes)
    layouts: tuple[Layout, ...] = field(default_factory=lambda: (*map(plain, PIECES), *NAMED.values()))
    sizes: tuple[int, ...] = SIZES
    ctas: tuple[int, ...] = ()  # empty leaves the setting alone
    repetitions: int = 5
    cell_seconds: float = 60.0  # when a cell has taken so long, it ends after the repetition under way
    uvloop: bool = False
    beside: str = ""  # what runs in a thread of each process meanwhile: see `Victim`
    sabotage: str = ""  # `byte` changes one byte of what was received, `outside` one beside it: the checks must notice

    def cells(self) -> "tuple[_Cell, ...]":
        """In the order in which they are shown: by layout, then size, then route."""
        return tuple(
            _Cell(route, layout, nbytes, ctas)
            for layout in self.layouts
            for nbytes in self.sizes
            for route in self.routes
            for ctas in self.ctas or (None,)
        )

    def run(self, on_step: Callable[[str, int, int], None]) -> Report:
        """Measure everything."""
        order = {cell: at for at, cell in enumerate(self.cells())}
        found = measure(_decode, self, len(order), on_step, uvloop=self.uvloop)
        return _report(sorted(found, key=lambda one: order[one[0]]))


@dataclass(frozen=True, slots=True)
class _Cell:
    """One row of the matrix."""

    route: str
    layout: Layout
    request_bytes: int  # about how many: whole blocks are fetched
    ctas: int | None = None  # thread blocks of a copy on a GPU; None leaves the setting alone

    @property
    def blocks(self) -> int:
        """Of a request."""
        return self.layout.blocks(self.request_bytes)

    @property
    def nbytes(self) -> int:
        """Of a request, exactly."""
        return self.blocks * self.layout.block_bytes

    @property
    def pool(self) -> Pool:
        """What its caches are."""
        return self.layout, self.layout.pool(self.request_bytes)

    def lacks(self, device: str, free: int) -> str:
        """Why it cannot be measured; empty if it can.

        Both sides may lie on one GPU, as they do in one host's memory: two caches, and the buffers of the references.
        """
        layout = self.layout
        if not self.blocks:
            return f"the request is smaller than one block of all layers ({layout.block_bytes} bytes)"
        if self.ctas is not None and device == "cpu":
            return "thread blocks are a setting of GPUs"
        return lacking(self.pool[1] * (layout.block_bytes + layout.source_block_bytes) + 3 * self.nbytes, free)

    def __str__(self) -> str:
        ctas = "" if self.ctas is None else f", {self.ctas} CTAs"
        return f"{self.route}, {self.layout.name} pieces, {size(self.request_bytes)}{ctas}"


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


# --- the decode process


async def _decode(side: Side, matrix: Matrix) -> None:
    """Measure every cell, and report each by its name as it is done."""
    free = available_bytes(side.device)
    cells = {cell: cell.lacks(side.device, free) for cell in matrix.cells()}
    fitting = [cell for cell, reason in cells.items() if not reason]
    target = Target(f"kvxfer-bench-{side.name}", side.device, max((cell.nbytes for cell in fitting), default=1))
    await target.open()
    pools = [cell.pool for cell in fitting]
    await ask(side, Prefill.begin, pools, await target.card())
    slab = Slab(side.device, pools, source=False)
    # on a CPU those whose caches lie in shared memory come last: see `Slab`
    for cell in sorted(cells, key=lambda one: in_shared_memory(one.route)):
        side.report(Step(str(cell)))
        if reason := cells[cell]:
            side.report((cell, {"cell": str(cell), "reason": reason}))
            continue
        async with opened(side, slab, cell.pool, cell.pool, cell.route, cell.ctas) as here:
            found = await _Run(side, matrix, cell, target, here).measure()
        side.report((cell, found))
    await side.ask(None)  # nobody is to reach for a target that is gone
    await target.close()


@dataclass(frozen=True, slots=True)
class _Run:
    """One cell at the decode side."""

    side: Side
    matrix: Matrix
    cell: _Cell
    target: Target
    here: Opened

    async def measure(self) -> dict[str, Any]:
        """Repeat; the cell as it is in `cells[]` of the JSON."""
        cell, until = self.cell, time.monotonic() + self.matrix.cell_seconds
        fetched: list[tuple[float, TransferStats, TransferStats | None]] = []
        references: list[float] = []
        first_predicted: float | None = None
        difference, kind = "", kind_for(cell.route, self.side.device)
        pool = cell.pool[1]
        unwritten = set(range(pool))
        for number in range(_WARMUPS + self.matrix.repetitions):
            request = draw_unwritten(random.SystemRandom().getrandbits(62), pool, cell.blocks, unwritten)
            unwritten -= set(request.ids)
            seconds, received, sent, differs = await self._transfer(request, first=number == 0)
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
            self.side.report(Step(str(cell)))
        fetch, referred = Samples([one[0] for one in fetched], _WARMUPS), Samples(references, _WARMUPS)
        _, received, sent = sorted(fetched, key=lambda one: one[0])[(len(fetched) - 1) // 2]  # the one in the middle
        gbps, reference_gbps = fetch.gbps(cell.nbytes), referred.gbps(cell.nbytes)
        return {
            "route": cell.route,
            "device": self.matrix.device,
            "layout": cell.layout.name,
            "piece_bytes": cell.layout.piece_bytes,
            "request_bytes": cell.nbytes,
            "ctas": cell.ctas,
            "gbps": gbps,
            "reference_gbps": reference_gbps,
            "ratio": gbps / reference_gbps if reference_gbps else None,
            "verified": not difference,
            "difference": difference,
            **fetch.to_json(),
            "reference": {"kind": kind, "spread": referred.spread, **referred.to_json()},
            "route_taken": received.route,
            "why": received.why,
            "pieces": received.pieces,
            "chunks": received.chunks,
            "predicted_s": received.predicted,
            # of the pair's first transfer, the warm-up: by the profile alone, which no transfer had corrected yet
            "first_predicted_s": first_predicted,
            "stages": {"decode": stages(received), "prefill": stages(sent)},
        }

    async def _transfer(
        self, request: Request, *, first: bool
    ) -> tuple[float, TransferStats, TransferStats | None, str]:
        """One fetch and its check: seconds, stats of both sides, and how the cache differs from what it should be.

        Before all but the `first` there is one of a single block.
        """
        side, cell, tickets, name = self.side, self.cell, self.here.tickets, f"{request.seed:x}"
        source, block_tokens = draw(request.seed, cell.pool[1], cell.blocks, source=True), cell.layout.block_tokens
        others = sorted(set(range(cell.pool[1])) - set(request.ids))  # blocks for nobody
        spare = [] if first else [Request(request.seed, (others[0],))]
        await ask(side, Prefill.write, source)
        await asyncio.to_thread(self.here.cache.scrub)
        offers = [(f"{name}-0", source.ids[:1], block_tokens) for _ in spare]
        await ask(side, Prefill.offer, *offers, (name, source.ids, cell.blocks * block_tokens))
        victim = "" if first else self.matrix.beside
        await ask(side, Prefill.disturb, victim)
        async with beside(victim, side.device):
            for one in spare:
                await self.here.fetch(tickets.of(f"{name}-0"), np.array(one.ids))
            seconds, stats = await self.here.fetch(tickets.of(name), np.array(request.ids))
        sent = await ask(side, Prefill.released)
        await ask(side, Prefill.calm)
        if self.matrix.sabotage:
            self.here.cache.corrupt(request.ids[0] if self.matrix.sabotage == "byte" else others[-1])
        difference = await asyncio.to_thread(self.here.cache.difference, request, *spare)
        if not difference and stats.bytes != cell.nbytes:
            difference = f"the stats say {stats.bytes} bytes, but {cell.nbytes} were asked for"
        return seconds, stats, sent, difference

    async def _refer(self, kind: ReferenceKind) -> float:
        seconds = await refer(self.side, self.target, kind, self.cell.nbytes)
        if kind != "memcpy" and not await self.target.landed(self.cell.nbytes):
            raise BenchFailedError(f"{self.cell}: the reference {kind} did not land whole")
        return seconds


# --- the end


def _noise(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How far references for the same bytes lay apart, in one cell and from cell to cell, as part of their median."""
    alike: dict[tuple[str, int], list[float]] = {}
    for one in cells:
        alike.setdefault((one["reference"]["kind"], one["request_bytes"]), []).append(one["reference"]["median_s"])
    between = [
        (max(medians) - min(medians)) / statistics.median(medians) for medians in alike.values() if len(medians) > 1
    ]
    within = [one["reference"]["spread"] for one in cells]
    return {
        "reference_spread_within_cells": statistics.median(within) if within else None,
        "reference_spread_between_cells": max(between) if between else None,
    }


def _report(found: "Sequence[tuple[_Cell, dict[str, Any]]]") -> Report:
    cells, skipped = ([one for _, one in found if ("reason" in one) is left_out] for left_out in (False, True))
    headings = ["route", "pieces", "request", "ms", "GB/s", "reference", "GB/s", "ratio", "verified", "stages, ms"]
    rows = [
        [
            shown_route(cell) + ("" if cell["ctas"] is None else f" {cell['ctas']}"),
            cell["layout"],
            size(cell["request_bytes"]),
            f"{cell['median_s'] * 1e3:.2f}",
            f"{cell['gbps']:.2f}",
            cell["reference"]["kind"],
            f"{cell['reference_gbps']:.2f}",
            f"{cell['ratio']:.3f}",
            "yes" if cell["verified"] else "NO",
            _stages(cell["stages"]),
        ]
        for cell in cells
    ]
    noise, notes = _noise(cells), [f"skipped: {one['cell']}: {one['reason']}" for one in skipped]
    if (within := noise["reference_spread_within_cells"]) is not None:
        between = noise["reference_spread_between_cells"]
        also = "" if between is None else f", those of different cells up to {between:.0%}"
        notes.insert(0, f"noise: references of one cell lie {within:.0%} apart (median of cells){also}")
    title = "whole `await fetch` after one of a block, at its caller, median; ratio: to one contiguous copy of as much"
    wrong = [f"{cell}: {one['difference']}" for cell, one in found if one.get("difference")]
    return Report({"cells": cells, "skipped": skipped, "noise": noise}, title, headings, rows, notes, wrong)


def _stages(both: dict[str, Any]) -> str:
    """Where the time went: gather and post at the prefill side, wire and scatter at the decode side."""
    sent, received = both["prefill"] or both["decode"], both["decode"]
    parts = {"gather": sent["gathering"], "post": sent["posting"], "wire": received["wire"]}
    parts["scatter"] = received["scattering"]
    return " ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in parts.items() if seconds)
