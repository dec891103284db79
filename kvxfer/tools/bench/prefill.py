"""The prefill process of benchmarks: it has the source, and does what the decode process asks for, which leads.

What is asked for is a method of `Prefill` with its arguments, and is answered once it is done:

    seconds = await ask(side, Prefill.offer, ("name", ids, tokens))

The decode process makes tickets itself. Offers of benchmarks in which fetches follow one another as fast as they can
are called `<slot>/<number>`, and as soon as one of a slot is released, another one is offered.
"""

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any, Concatenate, Final, ParamSpec, TypeAlias, TypeVar

import kvxfer
from kvxfer.config import Config
from kvxfer.telemetry import TransferStats
from kvxfer.tickets import KEY_BYTES, EngineCard, Issuer
from kvxfer.tools.bench.caches import Cache, Request, Slab
from kvxfer.tools.bench.children import Body, Side, collect
from kvxfer.tools.bench.device import sides
from kvxfer.tools.bench.layouts import Layout
from kvxfer.tools.bench.reference import Card, ReferenceKind, Source, Target
from kvxfer.tools.bench.samples import Samples
from kvxfer.tools.bench.victims import Victim

__all__ = ["AHEAD", "Lateness", "Opened", "Pool", "Prefill", "Tickets", "ask", "measure", "opened", "refer"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
Pool: TypeAlias = tuple[Layout, int]
"""What a cache is: its layout, and the number of its blocks."""
AHEAD: Final = 2
"""Offers of a slot that are alive at a time: a fetch finds its offer though it follows at once."""
_TICK_SECONDS: Final = 0.005
_FETCH_SECONDS: Final = 300.0


def measure(
    decode: Body, spec: Any, total: int, on_step: Callable[[str, int, int], None], *, uvloop: bool = False
) -> list[Any]:
    """Run a decode process and its prefill process to their end: what the former reports, see `collect`."""
    bodies = {"prefill": _follow, "decode": decode}
    return collect(bodies, spec, total, on_step, devices=sides(spec.device), uvloop=uvloop)


async def ask(
    side: Side, work: "Callable[Concatenate[Prefill, _P], Awaitable[_T]]", *args: _P.args, **kwargs: _P.kwargs
) -> _T:
    """In the decode process: have the other one do something, and wait until it has."""
    answer: _T = await side.ask((work, args, kwargs))
    return answer


@dataclass(frozen=True, slots=True)
class Opened:
    """In the decode process: a worker on each side."""

    worker: kvxfer.Worker  # of this process
    cache: Cache  # likewise
    tickets: "Tickets"  # of the other one's engine
    block_tokens: int

    async def fetch(self, ticket: dict[str, Any], ids: Any) -> tuple[float, TransferStats]:
        """Fetch into these blocks: the seconds that whoever asks for it has to wait, and what it says of itself."""
        tokens, began = range(len(ids) * self.block_tokens), time.perf_counter()
        result = await self.worker.fetch(ticket, ids, tokens=tokens, after=kvxfer.READY, timeout=_FETCH_SECONDS)
        return time.perf_counter() - began, result.stats


@asynccontextmanager
async def opened(
    side: Side, slab: Slab, source: Pool, target: Pool, route: str, ctas: int | None = None, **more: Any
) -> AsyncGenerator[Opened, None]:
    """In the decode process: open a worker on each side."""
    cache = slab.cache(*target, route)
    tickets = Tickets(*await ask(side, Prefill.open, source, route, ctas, more))
    async with kvxfer.Worker(cache.cache_tensors(), _settings(side, route, ctas, **more)) as worker:
        yield Opened(worker, cache, tickets, target[0].block_tokens)
        await ask(side, Prefill.close)


async def refer(side: Side, target: Target, kind: ReferenceKind, nbytes: int) -> float:
    """In the decode process: seconds of one copy, which the prefill process makes."""
    async with target.serving() if kind == "nixl_write" else nullcontext():
        return await ask(side, Prefill.refer, kind, nbytes)


def _settings(side: Side, route: str, ctas: int | None, **more: Any) -> Config:
    """A worker's settings: what a benchmark fixes; all else comes from the environment and the defaults."""
    fixed: dict[str, Any] = {"engine": f"bench-{side.name}", "route": route, **more}
    if ctas is not None:
        fixed["copy_ctas"] = ctas
    return Config(listen=f"unix:{side.folder / side.name}.sock", **fixed)


async def _follow(side: Side, _: object) -> None:
    """The prefill process: until it is asked for nothing."""
    async with AsyncExitStack() as kept:
        here = Prefill(side, kept)
        while (asked := await side.hear()) is not None:
            work, args, kwargs = asked
            side.send(await work(here, *args, **kwargs))
    side.send("closed")


class Prefill:
    """What the prefill process has and does. One worker at a time."""

    def __init__(self, side: Side, kept: AsyncExitStack) -> None:
        self._side: Final = side
        self._kept: Final = kept  # to the end
        self._opened: Final = AsyncExitStack()  # likewise, until the worker is closed
        kept.push_async_exit(self._opened)
        self._slab: Slab
        self._reference: Source
        self._worker: kvxfer.Worker

    async def begin(self, pools: list[Pool], card: Card | None = None) -> None:
        """Make room for a source of each of these shapes and, where the target of references has a card, for these."""
        self._slab = Slab(self._side.device, pools, source=True)
        if card is not None:
            self._reference = Source(f"kvxfer-bench-{self._side.name}", self._side.device, card)
            await self._reference.open()
            self._kept.push_async_callback(self._reference.close)

    async def open(
        self, pool: Pool, route: str, ctas: int | None, more: dict[str, Any]
    ) -> tuple[dict[str, Any], bytes]:
        """Open a worker on such a source; what `Tickets` are made of: an engine card, and a key that may be known."""
        self._cache = self._slab.cache(*pool, route)
        worker = kvxfer.Worker(self._cache.cache_tensors(), _settings(self._side, route, ctas, **more))
        self._worker = await self._opened.enter_async_context(worker)
        card, key = EngineCard.of([worker.card]), secrets.token_bytes(KEY_BYTES)
        worker.join(card, key=key)
        return card.to_dict(), key

    async def write(self, request: Request) -> None:
        """Make this the content of the source."""
        await asyncio.to_thread(self._cache.write, request)

    async def offer(self, *offers: tuple[str, Sequence[int], int]) -> float:
        """Offer these names, each with so many tokens in these blocks: seconds that took."""
        began = time.perf_counter()
        self._offers = [
            self._worker.offer(name, list(ids), tokens=tokens, after=kvxfer.READY) for name, ids, tokens in offers
        ]
        return time.perf_counter() - began

    async def released(self) -> TransferStats | None:
        """Wait until all of these are: what the last one came to here."""
        endings = [await offer.released() for offer in self._offers]
        last = endings[-1]
        return last.stats[0] if isinstance(last, kvxfer.Released) and last.stats else None

    async def keep(self, slots: int, ids: Sequence[int], tokens: int) -> None:
        """Keep the same blocks on offer in every slot until the worker is closed, which is then done at once."""
        await self._opened.enter_async_context(self._keeping(slots, ids, tokens))

    async def watch(self) -> None:
        """Watch the loop until the worker is closed."""
        self._lateness = Lateness()
        self._opened.callback(self._lateness.stop)

    async def late(self) -> dict[str, float]:
        """How late the loop was since it was asked last."""
        return self._lateness.take()

    async def cpu(self) -> float:
        """Seconds that the event loop's thread has used of a core."""
        return time.thread_time()

    async def disturb(self, kind: str) -> None:
        """Have such a victim go round."""
        self._victim = Victim(kind, self._side.device)
        await self._victim.rate(0.0)

    async def rate(self, seconds: float) -> float:
        """How often a second the victim goes round."""
        return await self._victim.rate(seconds)

    async def calm(self) -> None:
        """End the victim."""
        await self._victim.stop()

    async def refer(self, kind: ReferenceKind, nbytes: int) -> float:
        """Copy so many bytes to the target of references: seconds."""
        return await self._reference.measure(kind, nbytes)

    async def close(self) -> None:
        """Close the worker."""
        await self._opened.aclose()

    @asynccontextmanager
    async def _keeping(self, slots: int, ids: Sequence[int], tokens: int) -> AsyncGenerator[None, None]:
        worker = self._worker

        async def renew(slot: int, number: int) -> None:
            while True:
                await worker.offer(f"{slot}/{number}", list(ids), tokens=tokens, after=kvxfer.READY).released()
                number += AHEAD

        tasks = [asyncio.create_task(renew(slot, number)) for slot in range(slots) for number in range(AHEAD)]
        try:
            await asyncio.sleep(0)  # each of them has an offer
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await worker.aclose(drain=False)


class Tickets:
    """Tickets of the engine that a prefill process has opened."""

    def __init__(self, card: dict[str, Any], key: bytes) -> None:
        self.of: Final = Issuer(card, key).ticket
        self._numbers: Final = defaultdict[int, "count[int]"](count)

    def next(self, slot: int) -> dict[str, Any]:
        """The next ticket of a slot."""
        return self.of(f"{slot}/{next(self._numbers[slot])}")


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
        samples, self._late = Samples(self._late or [0.0]), []
        return {"p50_s": samples.percentile(50), "p99_s": samples.percentile(99), "max_s": max(samples.seconds)}

    def stop(self) -> None:
        """Watch no more."""
        self._task.cancel()
