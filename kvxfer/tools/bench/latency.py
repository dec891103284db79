"""`kvxfer bench latency`: one small block at a time, warm; how long the fetch takes, and what it costs both loops.

All requests are on offer before the clock starts, so that a fetch finds its offer and neither loop makes offers
meanwhile; what an offer costs is said beside it. Fetches follow one another without a pause.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from kvxfer.telemetry import TransferStats
from kvxfer.tools.bench.caches import Slab, draw
from kvxfer.tools.bench.children import Side, Step
from kvxfer.tools.bench.device import Kind
from kvxfer.tools.bench.layouts import KIB, Layout, plain
from kvxfer.tools.bench.matrix import routes, stages
from kvxfer.tools.bench.prefill import Prefill, ask, measure, opened, refer
from kvxfer.tools.bench.reference import Target, kind_for
from kvxfer.tools.bench.report import Report, shown_route
from kvxfer.tools.bench.samples import Samples
from kvxfer.tools.bench.victims import beside
from kvxfer.tools.shown import duration, size

__all__ = ["BLOCKS", "Latency"]

BLOCKS: Final = (Layout("64KiB", 8 * KIB, 4, 8, 4), plain(32 * KIB))
"""One block of all layers: 4 of them with 64 KiB, 32 with 2 MiB."""
_POOL: Final = 16
_WARMUPS: Final = 20
_REFERENCES: Final = 50


@dataclass(frozen=True, slots=True)
class Latency:
    """What to measure."""

    device: Kind
    routes: tuple[str, ...] = field(default_factory=routes)
    fetches: int = 1000  # of each kind
    uvloop: bool = False
    beside: str = ""

    def run(self, on_step: Callable[[str, int, int], None]) -> Report:
        """Measure everything."""
        return _report(measure(_decode, self, len(BLOCKS) * len(self.routes), on_step, uvloop=self.uvloop))


async def _decode(side: Side, spec: Latency) -> None:
    """Fetch one block after the other, by each route."""
    target = Target(f"kvxfer-bench-{side.name}", side.device, max(layout.block_bytes for layout in BLOCKS))
    await target.open()
    pools = [(layout, _POOL) for layout in BLOCKS]
    await ask(side, Prefill.begin, pools, await target.card())
    slab = Slab(side.device, pools, source=False)
    for layout in BLOCKS:
        for route in spec.routes:
            side.report(Step(f"{route}, one block of {size(layout.block_bytes)}"))
            side.report(await _measure(side, spec, layout, route, slab, target))
    await side.ask(None)
    await target.close()


async def _measure(side: Side, spec: Latency, layout: Layout, route: str, slab: Slab, target: Target) -> dict[str, Any]:
    seed, number = time.time_ns(), _WARMUPS + spec.fetches
    source, request = (draw(seed, _POOL, 1, source=at) for at in (True, False))
    ids = list(request.ids)
    names = [str(each) for each in range(number)]
    seconds: list[float] = []
    last: TransferStats | None = None
    pool = layout, _POOL
    async with opened(side, slab, pool, pool, route, max_transfers=number) as here:
        await asyncio.to_thread(here.cache.scrub)
        await ask(side, Prefill.write, source)
        offering = await ask(side, Prefill.offer, *((name, source.ids, layout.block_tokens) for name in names))
        waiting = [here.tickets.of(name) for name in names]
        for ticket in waiting[:_WARMUPS]:
            await here.fetch(ticket, ids)
        await ask(side, Prefill.disturb, spec.beside)
        theirs = await ask(side, Prefill.cpu)  # of the loop, and nothing else
        async with beside(spec.beside, side.device):
            ours = time.thread_time()
            for ticket in waiting[_WARMUPS:]:
                took, last = await here.fetch(ticket, ids)
                seconds.append(took)
            ours = time.thread_time() - ours
        theirs = await ask(side, Prefill.cpu) - theirs
        await ask(side, Prefill.calm)
        difference = await asyncio.to_thread(here.cache.difference, request)
        taken = last.route if last is not None else route
        kind = kind_for(taken, side.device)
        reference = Samples([await refer(side, target, kind, layout.block_bytes) for _ in range(_REFERENCES)])
    samples = Samples(seconds, _WARMUPS)
    return {
        "route": route,
        "route_taken": taken,
        "device": spec.device,
        "uvloop": spec.uvloop,
        "beside": spec.beside,
        "layout": asdict(layout) | {"target_heads": len(layout.target_heads)},
        "request_bytes": layout.block_bytes,
        "verified": not difference,
        "difference": difference,
        **samples.percentiles(),
        "per_second": len(seconds) / sum(seconds),
        "loop_cpu_s": {"decode": ours / len(seconds), "prefill": theirs / len(seconds)},
        "offer_s": offering / number,
        "reference": {"kind": kind, **reference.percentiles()},
        "stages": stages(last),
    }


def _report(found: Sequence[dict[str, Any]]) -> Report:
    headings = ["route", "block", "p50", "p90", "p99", "min", "max", "reference p50", "decode loop", "prefill loop",
                "fetches/s", "verified"]  # fmt: skip
    rows = [
        [
            shown_route(one),
            size(one["request_bytes"]),
            *(duration(one[f"{name}_s"]) for name in ("p50", "p90", "p99", "min", "max")),
            f"{duration(one['reference']['p50_s'])} ({one['reference']['kind']})",
            duration(one["loop_cpu_s"]["decode"]),
            duration(one["loop_cpu_s"]["prefill"]),
            f"{one['per_second']:.0f}",
            "yes" if one["verified"] else "NO",
        ]
        for one in found
    ]
    notes = ["loop: CPU time of the event loop's thread a transfer; fetches follow one another"]
    if len({one["route"] for one in found}) < len(routes()):
        notes.append(f"routes that the setting knows: {', '.join(routes())}")
    wrong = [f"{one['route']}, {one['request_bytes']} bytes: {one['difference']}" for one in found if one["difference"]]
    return Report({"cells": found}, "one block at a time, warm: whole `await fetch`", headings, rows, notes, wrong)
