"""`kvxfer bench interference`: how much slower other work of the same GPU or process gets while transfers run.

A victim is a loop that does nothing but its own work (`victims.py`): large matrix products on the sending GPU, or plain
Python, or what an engine does, in a thread of the prefill or of the decode process. Its speed is taken in turns without
and with transfers that follow one another without a pause; how fast those are without and with the victim is said too.
"""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import kvxfer
from kvxfer.tools.bench.caches import Request, Slab, in_shared_memory
from kvxfer.tools.bench.cells import settings
from kvxfer.tools.bench.children import Side, Step, collect
from kvxfer.tools.bench.device import Kind, sides
from kvxfer.tools.bench.layouts import plain
from kvxfer.tools.bench.report import Report, Table, shown_route
from kvxfer.tools.bench.samples import rate
from kvxfer.tools.bench.standing import Tickets, introduce, keeping
from kvxfer.tools.bench.victims import KINDS, Victim

__all__ = ["CTAS", "Interference"]

MIB: Final = 1 << 20
CTAS: Final = (8, 16, 24, 32, 64, 132)
_LAYOUT: Final = plain(32 << 10)
_FETCH_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class Interference:
    """What to measure."""

    device: Kind
    routes: tuple[str, ...]
    ctas: tuple[int, ...] = CTAS  # on a CPU there are none
    request_bytes: int = 512 * MIB
    seconds: float = 2.0  # how long a victim's speed is taken, each time
    turns: int = 3  # how often, without and with transfers

    def run(self, head: dict[str, Any], on_step: Callable[[str, int, int], None]) -> Report:
        """Measure everything."""
        bodies = {"prefill": prefill, "decode": decode}
        total = len(self.routes) * len(self.settings) * len(self.victims)
        return _report(head, collect(bodies, self, total, on_step, devices=sides(self.device)))

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
        return max(1, _LAYOUT.blocks(self.request_bytes))


@dataclass(frozen=True, slots=True)
class _Open:
    route: str
    ctas: int | None
    seed: int


@dataclass(frozen=True, slots=True)
class _Disturb:
    kind: str


@dataclass(frozen=True, slots=True)
class _Rate:
    seconds: float


async def prefill(side: Side, spec: Interference) -> None:
    """Keep a request on offer, and run victims as told."""
    slab = Slab(side.device, [(_LAYOUT, spec.blocks)], source=True)
    while isinstance(order := await side.hear(), _Open):
        cache = slab.cache(_LAYOUT, spec.blocks, shared=in_shared_memory(order.route))
        request = Request(order.seed, tuple(range(spec.blocks)))
        await asyncio.to_thread(cache.write, request)
        config = settings(side, order.route, order.ctas)
        async with kvxfer.Worker(cache.cache_tensors(), config) as worker:
            side.send(introduce(worker))
            async with keeping(worker, 1, request.ids, spec.blocks * _LAYOUT.block_tokens):
                await _disturb(side)
        side.send("closed")


async def _disturb(side: Side) -> None:
    """Victims, one after the other, until there is no further one."""
    while isinstance(order := await side.hear(), _Disturb):
        victim = Victim(order.kind, side.device)
        side.send("begun")
        while isinstance(asked := await side.hear(), _Rate):
            side.send(await victim.rate(asked.seconds))
        await victim.stop()
        side.send("ended")


async def decode(side: Side, spec: Interference) -> None:
    """For each route and CTA count: every victim."""
    slab = Slab(side.device, [(_LAYOUT, spec.blocks + 1)], source=False)
    for route in spec.routes:
        for ctas in spec.settings:
            seed = time.time_ns()
            cache = slab.cache(_LAYOUT, spec.blocks + 1, shared=in_shared_memory(route))
            tickets = Tickets(*await side.ask(_Open(route, ctas, seed)))
            async with kvxfer.Worker(cache.cache_tensors(), settings(side, route, ctas)) as worker:
                traffic = _Traffic(worker, tickets, spec.blocks)
                await traffic.fetch()
                for kind, where in spec.victims:
                    side.report(Step(f"{route}, {ctas or 'no'} CTAs, {kind} in {where}"))
                    values = await _suffer(side, spec, traffic, kind, where)
                    await asyncio.to_thread(cache.scrub)
                    await traffic.fetch()
                    difference = await asyncio.to_thread(cache.difference, Request(seed, tuple(traffic.ids)))
                    named = {"route": route, "route_taken": traffic.route, "device": spec.device, "ctas": ctas}
                    checked = {"verified": not difference, "difference": difference}
                    side.report({**named, "victim": kind, "side": where, **values, **checked})
                side.send("no more victims")
                await side.hear()
    side.send("closed")


async def _suffer(side: Side, spec: Interference, traffic: "_Traffic", kind: str, where: str) -> dict[str, Any]:
    """One victim: its speed without and with transfers, and theirs without and with it."""
    alone: list[float] = []
    for _ in range(spec.turns):
        async with traffic.flowing():
            await asyncio.sleep(spec.seconds)
        alone.append(traffic.gbps)
    mine = Victim(kind, side.device) if where == side.name else None
    if mine is None:
        await side.ask(_Disturb(kind))

    async def rate() -> float:
        return float(await side.ask(_Rate(spec.seconds)) if mine is None else await mine.rate(spec.seconds))

    quiet, busy, beside = list[float](), list[float](), list[float]()
    for _ in range(spec.turns):
        quiet.append(await rate())
        async with traffic.flowing():
            busy.append(await rate())
        beside.append(traffic.gbps)
    await (side.ask("enough") if mine is None else mine.stop())
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

    worker: kvxfer.Worker
    tickets: Tickets
    blocks: int
    gbps: float = 0.0  # while they last flowed
    route: str = ""  # that the last one took
    ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """The last block of the cache is for nobody."""
        self.ids = list(range(self.blocks))

    async def fetch(self) -> None:
        """One of them."""
        tokens = range(self.blocks * _LAYOUT.block_tokens)
        ticket = self.tickets.next(0)
        result = await self.worker.fetch(ticket, self.ids, tokens=tokens, after=kvxfer.READY, timeout=_FETCH_SECONDS)
        self.route = result.stats.route

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
        self.gbps = rate(count * self.blocks * _LAYOUT.block_bytes, time.perf_counter() - began)


def _report(head: dict[str, Any], cells: Sequence[dict[str, Any]]) -> Report:
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
    notes = [f"on {head['hardware']['cores']} cores: a thread also loses what transfers need of the cores themselves"]
    table = Table("how many times slower a victim is while transfers run", headings, rows, notes)
    wrong = [f"{one['route']}, {one['victim']}: {one['difference']}" for one in cells if one["difference"]]
    return Report("interference", head, {"cells": list(cells)}, [table], wrong)
