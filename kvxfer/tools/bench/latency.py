"""`kvxfer bench latency`: one small block at a time, warm; how long the fetch takes, and what it costs both loops.

All requests are on offer before the clock starts, so that a fetch finds its offer and neither loop makes offers
meanwhile; what an offer costs is said beside it. Fetches follow one another without a pause.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import kvxfer
from kvxfer.telemetry import TransferStats
from kvxfer.tools.bench.caches import Cache, Slab, draw, in_shared_memory
from kvxfer.tools.bench.cells import settings, stages
from kvxfer.tools.bench.children import Side, Step, collect
from kvxfer.tools.bench.device import Kind, sides
from kvxfer.tools.bench.layouts import Layout, plain
from kvxfer.tools.bench.matrix import routes
from kvxfer.tools.bench.reference import Refer, Source, Target, kind_for
from kvxfer.tools.bench.report import Report, Table, shown_route, shown_seconds
from kvxfer.tools.bench.samples import Samples
from kvxfer.tools.bench.victims import beside

__all__ = ["BLOCKS", "Latency"]

KIB: Final = 1024
BLOCKS: Final = (Layout("64KiB", 8 * KIB, 4, 8, 4), plain(32 * KIB))
"""One block of all layers: 4 of them with 64 KiB, 32 with 2 MiB."""
_POOL: Final = 16
_WARMUPS: Final = 20
_REFERENCES: Final = 50
_FETCH_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Latency:
    """What to measure."""

    device: Kind
    routes: tuple[str, ...]
    fetches: int = 1000  # of each kind
    uvloop: bool = False
    beside: str = ""

    def run(self, head: dict[str, Any], on_step: Callable[[str, int, int], None]) -> Report:
        """Measure everything."""
        bodies = {"prefill": prefill, "decode": decode}
        total = len(BLOCKS) * len(self.routes)
        found = collect(bodies, self, total, on_step, devices=sides(self.device), uvloop=self.uvloop)
        return _report(head, found)


@dataclass(frozen=True, slots=True)
class _Open:
    layout: Layout
    route: str
    seed: int
    requests: int


async def prefill(side: Side, spec: Latency) -> None:
    """Offer everything, then only answer."""
    reference = Source(f"kvxfer-bench-{side.name}", side.device, await side.hear())
    await reference.open()
    slab = Slab(side.device, [(layout, _POOL) for layout in BLOCKS], source=True)
    while isinstance(order := await side.hear(), _Open):
        cache = slab.cache(order.layout, _POOL, shared=in_shared_memory(order.route))
        request = draw(order.seed, _POOL, 1, source=True)
        await asyncio.to_thread(cache.write, request)
        config = settings(side, order.route, None, max_transfers=order.requests)
        async with kvxfer.Worker(cache.cache_tensors(), config) as worker:
            began, names = time.perf_counter(), [str(number) for number in range(order.requests)]
            tokens, ids = order.layout.block_tokens, list(request.ids)
            offers = [worker.offer(name, ids, tokens=tokens, after=kvxfer.READY) for name in names]
            each = (time.perf_counter() - began) / len(names)
            side.send(([worker.engine.ticket(name) for name in names], each))
            await _answer(side, spec, reference)
            for offer in offers:
                await offer.released()
        side.send("closed")
    await reference.close()
    side.send("closed")


async def _answer(side: Side, spec: Latency, reference: Source) -> None:
    while True:
        match await side.hear():
            case "begin":  # what warms up is over
                async with beside(spec.beside, side.device):
                    side.send(time.thread_time())  # of the loop, and nothing else
                    await side.hear()
                    side.send(time.thread_time())
            case Refer(kind, nbytes):
                side.send(await reference.measure(kind, nbytes))
            case _:
                return


async def decode(side: Side, spec: Latency) -> None:
    """Fetch one block after the other, by each route."""
    target = Target(f"kvxfer-bench-{side.name}", side.device, max(layout.block_bytes for layout in BLOCKS))
    await target.open()
    side.send(await target.card())
    slab = Slab(side.device, [(layout, _POOL) for layout in BLOCKS], source=False)
    for layout in BLOCKS:
        for route in spec.routes:
            side.report(Step(f"{route}, one block of {layout.block_bytes // KIB} KiB"))
            cache = slab.cache(layout, _POOL, shared=in_shared_memory(route))
            side.report(await _measure(side, spec, layout, route, cache, target))
    await side.ask("close")
    await target.close()


async def _measure(
    side: Side, spec: Latency, layout: Layout, route: str, cache: Cache, target: Target
) -> dict[str, Any]:
    seed = time.time_ns()
    request = draw(seed, _POOL, 1, source=False)
    await asyncio.to_thread(cache.scrub)
    tickets, offering = await side.ask(_Open(layout, route, seed, _WARMUPS + spec.fetches))
    ids, tokens = list(request.ids), range(layout.block_tokens)
    seconds: list[float] = []
    last: TransferStats | None = None
    async with kvxfer.Worker(cache.cache_tensors(), settings(side, route, None)) as worker:
        for ticket in tickets[:_WARMUPS]:
            await worker.fetch(ticket, ids, tokens=tokens, after=kvxfer.READY, timeout=_FETCH_SECONDS)
        there = float(await side.ask("begin"))
        async with beside(spec.beside, side.device):
            here = time.thread_time()
            for ticket in tickets[_WARMUPS:]:
                began = time.perf_counter()
                result = await worker.fetch(ticket, ids, tokens=tokens, after=kvxfer.READY, timeout=_FETCH_SECONDS)
                seconds.append(time.perf_counter() - began)
                last = result.stats
            here = time.thread_time() - here
        there = float(await side.ask("end")) - there
        difference = await asyncio.to_thread(cache.difference, request)
        taken = last.route if last is not None else route
        kind = kind_for(taken, side.device)
        reference = Samples.of([await target.refer(side, kind, layout.block_bytes) for _ in range(_REFERENCES)])
        await side.ask("close")
    samples = Samples.of(seconds, _WARMUPS)
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
        "loop_cpu_s": {"decode": here / len(seconds), "prefill": there / len(seconds)},
        "offer_s": offering,
        "reference": {"kind": kind, **reference.percentiles()},
        "stages": stages(last),
    }


def _report(head: dict[str, Any], found: Sequence[dict[str, Any]]) -> Report:
    headings = ["route", "block", "p50", "p90", "p99", "min", "max", "reference p50", "decode loop", "prefill loop",
                "fetches/s", "verified"]  # fmt: skip
    rows = [
        [
            shown_route(one),
            f"{one['request_bytes'] // KIB} KiB",
            *(shown_seconds(one[f"{name}_s"]) for name in ("p50", "p90", "p99", "min", "max")),
            f"{shown_seconds(one['reference']['p50_s'])} ({one['reference']['kind']})",
            shown_seconds(one["loop_cpu_s"]["decode"]),
            shown_seconds(one["loop_cpu_s"]["prefill"]),
            f"{one['per_second']:.0f}",
            "yes" if one["verified"] else "NO",
        ]
        for one in found
    ]
    notes = ["loop: CPU time of the event loop's thread a transfer; fetches follow one another"]
    if len({one["route"] for one in found}) < len(routes()):
        notes.append(f"routes that the setting knows: {', '.join(routes())}")
    wrong = [f"{one['route']}, {one['request_bytes']} bytes: {one['difference']}" for one in found if one["difference"]]
    table = Table("one block at a time, warm: whole `await fetch`", headings, rows, notes)
    return Report("latency", head, {"cells": list(found)}, [table], wrong)
