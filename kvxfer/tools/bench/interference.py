"""`kvxfer bench interference`: how much slower other work of the same GPU or process gets while transfers run.

A victim is a loop that does nothing but its own work (`victims.py`): large matrix products on the sending GPU, or plain
Python, or what an engine does, in a thread of the prefill or of the decode process. Its speed is taken in turns without
and with transfers that follow one another without a pause; how fast those are without and with the victim is said too.
"""

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from kvxfer.telemetry import rate
from kvxfer.tools.bench.caches import Request, Slab
from kvxfer.tools.bench.children import Side, Step
from kvxfer.tools.bench.device import Kind
from kvxfer.tools.bench.layouts import MIB, plain
from kvxfer.tools.bench.matrix import routes
from kvxfer.tools.bench.prefill import Opened, Prefill, ask, measure, opened
from kvxfer.tools.bench.report import Report, shown_route
from kvxfer.tools.bench.victims import KINDS, Victim

__all__ = ["CTAS", "Interference"]

CTAS: Final = (8, 16, 24, 32, 64, 132)
_LAYOUT: Final = plain(32 << 10)


@dataclass(frozen=True, slots=True)
class Interference:
    """What to measure."""

    device: Kind
    routes: tuple[str, ...] = field(default_factory=routes)
    ctas: tuple[int, ...] = CTAS  # on a CPU there are none
    request_bytes: int | None = None  # 512 MiB, on a CPU 32 MiB
    seconds: float = 2.0  # how long a victim's speed is taken, each time
    turns: int = 3  # how often, without and with transfers

    def run(self, on_step: Callable[[str, int, int], None]) -> Report:
        """Measure everything."""
        total = len(self.routes) * len(self.settings) * len(self.victims)
        return _report(measure(_decode, self, total, on_step))

    @property
    def settings(self) -> tuple[int | None, ...]:
        """Values of `copy_ctas`; None leaves the setting alone."""
        return self.ctas if self.device == "cuda" else (None,)

    @property
    def victims(self) -> tuple[tuple[str, str], ...]:
        """(kind, side) of each victim."""
        threads = tuple((kind, side) for kind in KINDS for side in ("prefill", "decode"))
        return (("matmul", "prefill"), *threads) if self.device == "cuda" else threads

    @property
    def blocks(self) -> int:
        """Blocks of a request."""
        usual = (32 if self.device == "cpu" else 512) * MIB
        return max(1, _LAYOUT.blocks(usual if self.request_bytes is None else self.request_bytes))


async def _decode(side: Side, spec: Interference) -> None:
    """For each route and CTA count: every victim."""
    source, target = (_LAYOUT, spec.blocks), (_LAYOUT, spec.blocks + 1)
    await ask(side, Prefill.begin, [source])
    slab = Slab(side.device, [target], source=False)
    for route in spec.routes:
        for ctas in spec.settings:
            request = Request(time.time_ns(), tuple(range(spec.blocks)))
            async with opened(side, slab, source, target, route, ctas) as here:
                await ask(side, Prefill.write, request)
                await ask(side, Prefill.keep, 1, request.ids, spec.blocks * _LAYOUT.block_tokens)
                traffic = _Traffic(here, request)
                await traffic.fetch()
                for kind, where in spec.victims:
                    side.report(Step(f"{route}, {ctas or 'no'} CTAs, {kind} in {where}"))
                    values = await _suffer(side, spec, traffic, kind, where)
                    await asyncio.to_thread(here.cache.scrub)
                    await traffic.fetch()
                    difference = await asyncio.to_thread(here.cache.difference, request)
                    named = {"route": route, "route_taken": traffic.route, "device": spec.device, "ctas": ctas}
                    checked = {"verified": not difference, "difference": difference}
                    side.report({**named, "victim": kind, "side": where, **values, **checked})
    await side.ask(None)


async def _suffer(side: Side, spec: Interference, traffic: "_Traffic", kind: str, where: str) -> dict[str, Any]:
    """One victim: its speed without and with transfers, and theirs without and with it."""
    alone: list[float] = []
    for _ in range(spec.turns):
        async with traffic.flowing():
            await asyncio.sleep(spec.seconds)
        alone.append(traffic.gbps)
    mine = Victim(kind, side.device) if where == side.name else None
    if mine is None:
        await ask(side, Prefill.disturb, kind)

    async def rate() -> float:
        return await (ask(side, Prefill.rate, spec.seconds) if mine is None else mine.rate(spec.seconds))

    quiet, busy, beside = list[float](), list[float](), list[float]()
    for _ in range(spec.turns):
        quiet.append(await rate())
        async with traffic.flowing():
            busy.append(await rate())
        beside.append(traffic.gbps)
    await (ask(side, Prefill.calm) if mine is None else mine.stop())
    return {
        "rounds_per_s": statistics.median(quiet),
        "rounds_per_s_with_transfers": statistics.median(busy),
        "slow_down": statistics.median(quiet) / max(statistics.median(busy), 1e-9),
        "noise": (max(quiet) - min(quiet)) / max(statistics.median(quiet), 1e-9),
        "turns": spec.turns,
        "gbps": statistics.median(alone),
        "gbps_with_victim": statistics.median(beside),
        "request_bytes": spec.blocks * _LAYOUT.block_bytes,
    }


@dataclass(slots=True)
class _Traffic:
    """Fetches that follow one another."""

    here: Opened
    request: Request  # whose blocks are the same on both sides; the last one of this cache is for nobody
    gbps: float = 0.0  # while they last flowed
    route: str = ""  # that the last one took

    async def fetch(self) -> None:
        """One of them."""
        _, stats = await self.here.fetch(self.here.tickets.next(0), list(self.request.ids))
        self.route = stats.route

    @asynccontextmanager
    async def flowing(self) -> AsyncGenerator[None, None]:
        """They flow inside; the last one ends before this does."""
        stop, count, began = False, 0, time.perf_counter()

        async def flow() -> None:
            nonlocal count
            while not stop:
                await self.fetch()
                count += 1

        flowing = asyncio.ensure_future(flow())
        try:
            yield
        finally:
            stop = True
            with contextlib.suppress(asyncio.CancelledError):
                await flowing
        self.gbps = rate(count * len(self.request.ids) * _LAYOUT.block_bytes, time.perf_counter() - began)


def _report(cells: Sequence[dict[str, Any]]) -> Report:
    rows = [
        [
            shown_route(one),
            "-" if one["ctas"] is None else str(one["ctas"]),
            f"{one['victim']} in {one['side']}",
            f"{one['slow_down']:.2f}",
            f"{one['noise']:.0%}",
            f"{one['gbps']:.2f}",
            f"{one['gbps_with_victim']:.2f}",
            "yes" if one["verified"] else "NO",
        ]
        for one in cells
    ]
    headings = ["route", "CTAs", "victim", "slow-down", "noise", "GB/s", "GB/s with victim", "verified"]
    cores = len(os.sched_getaffinity(0))
    notes = [f"on {cores} cores: a thread also loses what transfers need of the cores themselves"]
    wrong = [f"{one['route']}, {one['victim']}: {one['difference']}" for one in cells if one["difference"]]
    title = "how many times slower a victim is while transfers run"
    return Report({"cells": cells}, title, headings, rows, notes, wrong)
