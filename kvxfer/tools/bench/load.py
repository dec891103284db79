"""`kvxfer bench load`: many fetches at once, of very different sizes, for some seconds.

There are as many fetches under way as `concurrency` says, each in a slot of its own that begins the next one when one
has ended. A slot fetches one size all the time; sizes take turns over the slots. The prefill side keeps two offers of
every slot alive, so that a fetch finds its offer. Both sides watch how late their loop runs a timer, once without and
once under load.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

from kvxfer.telemetry import rate
from kvxfer.tools.bench.caches import Request, Slab
from kvxfer.tools.bench.children import Side, Step
from kvxfer.tools.bench.device import Kind, available_bytes, lacking
from kvxfer.tools.bench.layouts import KIB, MIB, Layout
from kvxfer.tools.bench.matrix import routes
from kvxfer.tools.bench.prefill import AHEAD, Lateness, Prefill, ask, measure, opened
from kvxfer.tools.bench.report import Report
from kvxfer.tools.bench.samples import Samples
from kvxfer.tools.shown import duration, size

__all__ = ["SIZES", "Load"]

SIZES: Final = (64 * KIB, 1 * MIB, 16 * MIB, 64 * MIB)
CONCURRENCY: Final = (64, 128, 256, 512)
_LAYOUT: Final = Layout("64KiB", 8 * KIB, 4, 8, 4)
"""A block of all layers has 64 KiB."""
_IDLE_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Load:
    """What to measure."""

    device: Kind
    routes: tuple[str, ...] = field(default_factory=routes)
    concurrency: tuple[int, ...] = CONCURRENCY  # each number is a run of its own
    sizes: tuple[int, ...] = SIZES  # slots take them in turn
    seconds: float = 10.0
    uvloop: bool = False

    def run(self, on_step: Callable[[str, int, int], None]) -> Report:
        """Measure everything."""
        total = len(self.routes) * len(self.concurrency)
        return _report(measure(_decode, self, total, on_step, uvloop=self.uvloop))

    def blocks(self, slot: int) -> int:
        """Blocks of each fetch of a slot."""
        return max(1, self.sizes[slot % len(self.sizes)] // _LAYOUT.block_bytes)

    def pool(self, slots: int) -> int:
        """Blocks of a destination: those of all slots, and some for nobody."""
        return sum(map(self.blocks, range(slots))) + self.largest

    @property
    def largest(self) -> int:
        """Blocks of the largest fetch."""
        return max(map(self.blocks, range(len(self.sizes))))


async def _decode(side: Side, spec: Load) -> None:
    """Fetch from many slots at once, once for each route and concurrency."""
    free = available_bytes(side.device)
    lack = {slots: lacking((spec.pool(slots) + spec.largest) * _LAYOUT.block_bytes, free) for slots in spec.concurrency}
    pools = [(_LAYOUT, spec.pool(slots)) for slots, reason in lack.items() if not reason]
    await ask(side, Prefill.begin, [(_LAYOUT, spec.largest)])
    slab = Slab(side.device, pools, source=False)
    for route in spec.routes:
        for slots in spec.concurrency:
            side.report(Step(f"{route}, {slots} fetches at once"))
            named: dict[str, Any] = {"route": route, "concurrency": slots, "device": spec.device}
            if lack[slots]:
                side.report({**named, "skipped": lack[slots]})
                continue
            side.report(named | await _measure(side, spec, route, slots, slab))
    await side.ask(None)


async def _measure(side: Side, spec: Load, route: str, slots: int, slab: Slab) -> dict[str, Any]:
    """One run: warm up with one fetch of each slot, run, then poison everything and verify one more fetch of each."""
    seed, counts = time.time_ns(), list(map(spec.blocks, range(slots)))
    ids = [range(stop - count, stop) for count, stop in zip(counts, accumulate(counts), strict=True)]
    took: dict[int, list[float]] = {}
    taken: set[str] = set()

    async def fetch(slot: int) -> None:
        seconds, stats = await here.fetch(here.tickets.next(slot), list(ids[slot]))
        took.setdefault(counts[slot], []).append(seconds)
        taken.add(stats.route)

    async def each() -> None:
        async with asyncio.TaskGroup() as group:
            for slot in range(slots):
                group.create_task(fetch(slot))

    async def again(slot: int, until: float) -> None:
        while time.perf_counter() < until:
            await fetch(slot)

    pools, source = ((_LAYOUT, spec.largest), (_LAYOUT, spec.pool(slots))), Request(seed, tuple(range(spec.largest)))
    async with opened(side, slab, *pools, route, max_transfers=AHEAD * slots) as here:
        await ask(side, Prefill.write, source)
        lateness = Lateness()
        await ask(side, Prefill.watch)
        await asyncio.sleep(_IDLE_SECONDS)
        idle, idle_there = lateness.take(), await ask(side, Prefill.late)
        await ask(side, Prefill.keep, slots, source.ids, len(source.ids) * _LAYOUT.block_tokens)
        await each()
        took.clear()
        await ask(side, Prefill.late)
        lateness.take()
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for slot in range(slots):
                group.create_task(again(slot, began + spec.seconds))
        elapsed = time.perf_counter() - began
        ours, theirs = lateness.take(), await ask(side, Prefill.late)
        lateness.stop()
        timed = {blocks: list(seconds) for blocks, seconds in sorted(took.items())}  # but not what is verified
        await asyncio.to_thread(here.cache.scrub)
        await each()
        difference = await asyncio.to_thread(here.cache.difference, *(Request(seed, tuple(one)) for one in ids))
    fetches = sum(map(len, timed.values()))
    return {
        "routes_taken": sorted(taken),
        "seconds": elapsed,
        "fetches": fetches,
        "fetches_per_s": fetches / elapsed,
        "gbps": rate(sum(blocks * _LAYOUT.block_bytes * len(seconds) for blocks, seconds in timed.items()), elapsed),
        "sizes": [
            {"request_bytes": blocks * _LAYOUT.block_bytes, **Samples(seconds).percentiles()}
            for blocks, seconds in timed.items()
        ],
        "verified": not difference,
        "difference": difference,
        "lag": {"decode": ours, "prefill": theirs, "decode_idle": idle, "prefill_idle": idle_there},
    }


def _report(found: Sequence[dict[str, Any]]) -> Report:
    cells = [one for one in found if "skipped" not in one]
    skipped = [one for one in found if "skipped" in one]
    rows = [
        [
            f"{one['route']}, {one['concurrency']}" if first else "",
            f"{one['fetches_per_s']:.0f}" if first else "",
            f"{one['gbps']:.2f}" if first else "",
            size(row["request_bytes"]),
            str(row["repetitions"]),
            duration(row["p50_s"]),
            duration(row["p99_s"]),
            _lag(one["lag"]["decode"], one["lag"]["decode_idle"]) if first else "",
            _lag(one["lag"]["prefill"], one["lag"]["prefill_idle"]) if first else "",
            ("yes" if one["verified"] else "NO") if first else "",
        ]
        for one in cells
        for first, row in ((row is one["sizes"][0], row) for row in one["sizes"])
    ]
    headings = ["route, at once", "fetches/s", "GB/s", "size", "fetches", "p50", "p99", "decode loop late p50/p99/max",
                "prefill loop late", "verified"]  # fmt: skip
    notes = [f"skipped: {one['route']}, {one['concurrency']} at once: {one['skipped']}" for one in skipped]
    notes.insert(0, "loop late: how much later than due a timer ran; in brackets p99 without any load")
    wrong = [f"{one['route']}, {one['concurrency']} at once: {one['difference']}" for one in cells if one["difference"]]
    return Report({"cells": cells, "skipped": skipped}, "many fetches at once", headings, rows, notes, wrong)


def _lag(loaded: dict[str, float], idle: dict[str, float]) -> str:
    shown = " / ".join(f"{loaded[name] * 1e3:.1f}" for name in ("p50_s", "p99_s", "max_s"))
    return f"{shown} ms ({idle['p99_s'] * 1e3:.1f})"
