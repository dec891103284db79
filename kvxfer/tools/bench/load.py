"""`kvxfer bench load`: many fetches at once, of very different sizes, for some seconds.

There are as many fetches under way as `concurrency` says, each in a slot of its own that begins the next one when one
has ended. A slot fetches one size all the time; sizes take turns over the slots. The prefill side keeps two offers of
every slot alive, so that a fetch finds its offer. Both sides watch how late their loop runs a timer, once without and
once under load.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import kvxfer
from kvxfer.tools.bench.caches import Cache, Request, Slab, in_shared_memory
from kvxfer.tools.bench.cells import settings
from kvxfer.tools.bench.children import Side, Step, collect
from kvxfer.tools.bench.device import Kind, available_bytes, sides
from kvxfer.tools.bench.layouts import Layout
from kvxfer.tools.bench.report import Report, Table, shown_seconds
from kvxfer.tools.bench.samples import Samples, rate
from kvxfer.tools.bench.standing import AHEAD, Tickets, introduce, keeping

__all__ = ["SIZES", "Load"]

KIB: Final = 1024
MIB: Final = 1024 * KIB
SIZES: Final = (64 * KIB, 1 * MIB, 16 * MIB, 64 * MIB)
CONCURRENCY: Final = (64, 128, 256, 512)
_LAYOUT: Final = Layout("64KiB", 8 * KIB, 4, 8, 4)
"""A block of all layers has 64 KiB."""
_TICK_SECONDS: Final = 0.005
_IDLE_SECONDS: Final = 0.5
_FETCH_SECONDS: Final = 120.0
_ROOM: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Load:
    """What to measure."""

    device: Kind
    routes: tuple[str, ...]
    concurrency: tuple[int, ...] = CONCURRENCY  # each number is a run of its own
    sizes: tuple[int, ...] = SIZES  # slots take them in turn
    seconds: float = 10.0
    uvloop: bool = False

    def run(self, head: dict[str, Any], on_step: Callable[[str, int, int], None]) -> Report:
        """Measure everything."""
        bodies = {"prefill": prefill, "decode": decode}
        total = len(self.routes) * len(self.concurrency)
        found = collect(bodies, self, total, on_step, devices=sides(self.device), uvloop=self.uvloop)
        return _report(head, found)

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


@dataclass(frozen=True, slots=True)
class _Open:
    route: str
    slots: int
    seed: int


class Lateness:
    """How late the loop runs timers that are due every few milliseconds."""

    def __init__(self) -> None:
        self._late: list[float] = []
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _TICK_SECONDS
            await asyncio.sleep(_TICK_SECONDS)
            self._late.append(max(0.0, loop.time() - due))

    def take(self) -> dict[str, float]:
        """Percentiles since the last time."""
        samples, self._late = Samples.of(self._late or [0.0]), []
        return {"p50_s": samples.percentile(50), "p99_s": samples.percentile(99), "max_s": max(samples.seconds)}

    def stop(self) -> None:
        """Watch no more."""
        self._task.cancel()


# --- the prefill process


async def prefill(side: Side, spec: Load) -> None:
    """Keep offers alive until told to stop."""
    slab = Slab(side.device, [(_LAYOUT, spec.largest)], source=True)
    while isinstance(order := await side.hear(), _Open):
        cache = slab.cache(_LAYOUT, spec.largest, shared=in_shared_memory(order.route))
        request = Request(order.seed, tuple(range(spec.largest)))
        await asyncio.to_thread(cache.write, request)
        config = settings(side, order.route, None, max_transfers=AHEAD * order.slots)
        async with kvxfer.Worker(cache.cache_tensors(), config) as worker:
            card, key = introduce(worker)
            lateness = Lateness()
            await asyncio.sleep(_IDLE_SECONDS)
            idle = lateness.take()
            async with keeping(worker, order.slots, request.ids, len(request.ids) * _LAYOUT.block_tokens):
                await asyncio.sleep(0)
                side.send((card, key, idle))
                await side.hear()  # warm, and about to be measured
                lateness.take()
                await side.hear()
                side.send(lateness.take())
                await side.hear()
                lateness.stop()
        side.send("closed")


# --- the decode process


async def decode(side: Side, spec: Load) -> None:
    """Fetch from many slots at once, once for each route and concurrency."""
    free = available_bytes(side.device)
    needed = {slots: (spec.pool(slots) + spec.largest) * _LAYOUT.block_bytes + _ROOM for slots in spec.concurrency}
    pools = [(_LAYOUT, spec.pool(slots)) for slots in spec.concurrency if needed[slots] <= free]
    slab = Slab(side.device, pools, source=False)
    for route in spec.routes:
        for slots in spec.concurrency:
            side.report(Step(f"{route}, {slots} fetches at once"))
            named: dict[str, Any] = {"route": route, "concurrency": slots, "device": spec.device}
            if needed[slots] > free:
                reason = f"it needs {needed[slots] // MIB} MiB of memory, and {free // MIB} MiB are free"
                side.report({**named, "skipped": reason})
                continue
            cache = slab.cache(_LAYOUT, spec.pool(slots), shared=in_shared_memory(route))
            side.report(named | await _measure(side, spec, route, slots, cache))
    side.send("closed")


async def _measure(side: Side, spec: Load, route: str, slots: int, cache: Cache) -> dict[str, Any]:
    """One run: warm up with one fetch of each slot, run, then poison everything and verify one more fetch of each."""
    seed, counts = time.time_ns(), list(map(spec.blocks, range(slots)))
    ids = [range(stop - count, stop) for count, stop in zip(counts, accumulate(counts), strict=True)]
    took: dict[int, list[float]] = {}
    routes: set[str] = set()

    async def fetch(slot: int) -> None:
        ticket, tokens = tickets.next(slot), range(counts[slot] * _LAYOUT.block_tokens)
        began = time.perf_counter()
        result = await worker.fetch(ticket, list(ids[slot]), tokens=tokens, after=kvxfer.READY, timeout=_FETCH_SECONDS)
        took.setdefault(counts[slot], []).append(time.perf_counter() - began)
        routes.add(result.stats.route)

    async def each() -> None:
        async with asyncio.TaskGroup() as group:
            for slot in range(slots):
                group.create_task(fetch(slot))

    async def again(slot: int, until: float) -> None:
        while time.perf_counter() < until:
            await fetch(slot)

    card, key, idle_there = await side.ask(_Open(route, slots, seed))
    config = settings(side, route, None, max_transfers=2 * slots)
    async with kvxfer.Worker(cache.cache_tensors(), config) as worker:
        tickets, lateness = Tickets(card, key), Lateness()
        await asyncio.sleep(_IDLE_SECONDS)
        idle = lateness.take()
        await each()
        took.clear()
        side.send("begun")
        lateness.take()
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for slot in range(slots):
                group.create_task(again(slot, began + spec.seconds))
        elapsed = time.perf_counter() - began
        here, there = lateness.take(), await side.ask("ended")
        lateness.stop()
        timed = {blocks: list(seconds) for blocks, seconds in sorted(took.items())}  # but not what is verified
        await asyncio.to_thread(cache.scrub)
        await each()
        difference = await asyncio.to_thread(cache.difference, *(Request(seed, tuple(one)) for one in ids))
        await side.ask("close")
    fetches = sum(map(len, timed.values()))
    return {
        "routes_taken": sorted(routes),
        "seconds": elapsed,
        "fetches": fetches,
        "fetches_per_s": fetches / elapsed,
        "gbps": rate(sum(blocks * _LAYOUT.block_bytes * len(seconds) for blocks, seconds in timed.items()), elapsed),
        "sizes": [
            {"request_bytes": blocks * _LAYOUT.block_bytes, **Samples.of(seconds).percentiles()}
            for blocks, seconds in timed.items()
        ],
        "verified": not difference,
        "difference": difference,
        "lag": {"decode": here, "prefill": there, "decode_idle": idle, "prefill_idle": idle_there},
    }


def _report(head: dict[str, Any], found: Sequence[dict[str, Any]]) -> Report:
    cells = [one for one in found if "skipped" not in one]
    skipped = [one for one in found if "skipped" in one]
    rows = [
        [
            f"{one['route']}, {one['concurrency']}" if first else "",
            f"{one['fetches_per_s']:.0f}" if first else "",
            f"{one['gbps']:.2f}" if first else "",
            f"{size['request_bytes'] // KIB} KiB",
            str(size["repetitions"]),
            shown_seconds(size["p50_s"]),
            shown_seconds(size["p99_s"]),
            _lag(one["lag"]["decode"], one["lag"]["decode_idle"]) if first else "",
            _lag(one["lag"]["prefill"], one["lag"]["prefill_idle"]) if first else "",
            ("yes" if one["verified"] else "NO") if first else "",
        ]
        for one in cells
        for first, size in ((size is one["sizes"][0], size) for size in one["sizes"])
    ]
    headings = ["route, at once", "fetches/s", "GB/s", "size", "fetches", "p50", "p99", "decode loop late p50/p99/max",
                "prefill loop late", "verified"]  # fmt: skip
    notes = [f"skipped: {one['route']}, {one['concurrency']} at once: {one['skipped']}" for one in skipped]
    notes.insert(0, "loop late: how much later than due a timer ran; in brackets p99 without any load")
    wrong = [f"{one['route']}, {one['concurrency']} at once: {one['difference']}" for one in cells if one["difference"]]
    data = {"cells": cells, "skipped": skipped}
    return Report("load", head, data, [Table("many fetches at once", headings, rows, notes)], wrong)


def _lag(loaded: dict[str, float], idle: dict[str, float]) -> str:
    shown = " / ".join(f"{loaded[name] * 1e3:.1f}" for name in ("p50_s", "p99_s", "max_s"))
    return f"{shown} ms ({idle['p99_s'] * 1e3:.1f})"
