"""The ranks of an engine that divides its heads (tensor parallelism), as if they were one worker.

Each rank has a worker of its own, for its heads, on its device: it offers them, and fetches them. A ticket stands for
all ranks of the engine that made it, and each rank that fetches finds by itself what it needs from whom; so neither
side asks how many ranks the other has. Here all ranks are in one process, which is enough to see that; in life they
are processes, and a launcher collects the cards and hands out the key.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from typing import Any, Self, TypeVar

import torch

import kvxfer
from kvxfer.tickets import KEY_BYTES, EngineCard
from kvxfer.tools.demo.model import PagedCache

OpenWorker = Callable[..., kvxfer.Worker]
"""Makes a worker of cache tensors and a `kvxfer.Config`."""
_T = TypeVar("_T")


class Ranks:
    """The workers of one engine. Make it with `open`."""

    def __init__(self, workers: Sequence[kvxfer.Worker]) -> None:
        self.workers = workers

    @classmethod
    @asynccontextmanager
    async def open(cls, cache: PagedCache, open_worker: OpenWorker, **config: Any) -> AsyncIterator[Self]:
        """A worker for each shard of a pool, open while the block lasts."""
        world = len(cache.shards)
        async with AsyncExitStack() as stack:
            workers: list[kvxfer.Worker] = []
            for rank, shard in enumerate(cache.shards):
                worker = open_worker(shard.cache_tensors(), kvxfer.Config(**config, rank=rank, world=world))
                workers.append(await stack.enter_async_context(worker))
            if world > 1:  # one alone has joined itself
                card, key = EngineCard.of([worker.card for worker in workers]), secrets.token_bytes(KEY_BYTES)
                for worker in workers:
                    worker.join(card, key=key)
            yield cls(workers)

    def ticket(self, request: str) -> dict[str, Any]:
        """The ticket of a request; every rank would make the same."""
        return self.workers[0].engine.ticket(request)

    def offer(self, request: str) -> "Offers":
        """Offer a request layer by layer."""
        return Offers([worker.offer(request, streaming=True) for worker in self.workers])

    def claim(self, ticket: Mapping[str, Any]) -> ExitStack:
        """Keep a request's lease while the stack is open."""
        with ExitStack() as stack:
            for worker in self.workers:
                stack.enter_context(closing(worker.claim(ticket)))
            return stack.pop_all()

    async def fetch(self, ticket: Mapping[str, Any], blocks: list[int], *, tokens: range) -> list[kvxfer.FetchResult]:
        """Bring K and V into these blocks, to each rank those of its heads; if one fails, all end.

        Raises:
            KvxferError: What went wrong first; if memory is in doubt at any rank, that.
        """
        # READY on GPUs too: who had these blocks has left, and the model's thread waits for the GPUs at each step
        fetches = [
            asyncio.create_task(worker.fetch(ticket, blocks, tokens=tokens, after=kvxfer.READY))
            for worker in self.workers
        ]
        failures: list[BaseException] = []
        # to the end of all of them, however often this is cancelled: until then a peer may write the blocks
        while under_way := [fetch for fetch in fetches if not fetch.done()]:
            try:
                await asyncio.wait(under_way, return_when=asyncio.FIRST_EXCEPTION)
            except asyncio.CancelledError as error:
                failures.append(error)
            if failures or any(_failure(fetch) for fetch in fetches if fetch.done()):
                for fetch in under_way:
                    fetch.cancel()
        failures += [error for fetch in fetches if (error := _failure(fetch))]
        if failures:
            raise _gravest(failures)
        return [fetch.result() for fetch in fetches]

    async def drain(self) -> None:
        """Promise nothing more, and wait until what was promised was fetched."""
        await _all(worker.drain() for worker in self.workers)

    async def decline(self, ticket: Mapping[str, Any]) -> None:
        """No fetch will come."""
        await _all(worker.decline(ticket) for worker in self.workers)


class Offers:
    """One request on offer, by each rank its heads. Made by `Ranks.offer`."""

    def __init__(self, offers: Sequence[kvxfer.Offer]) -> None:
        self._offers = offers

    @property
    def live(self) -> bool:
        """Whether somebody may still fetch it."""
        return any(offer.state == "live" for offer in self._offers)

    @property
    def tokens(self) -> int:
        """Tokens on offer so far."""
        return max(offer.tokens for offer in self._offers)

    def extend(self, blocks: list[int], *, tokens: range) -> None:
        """Add blocks and the tokens that they hold."""
        for offer in self._offers:
            offer.extend(blocks, tokens=tokens)

    def ready(self, *, layers: list[int] | None = None, tokens: int, after: Sequence[Any]) -> None:
        """Say that K and V may be read, at each rank once its event (of `queued`) has fired."""
        for offer, event in zip(self._offers, after, strict=True):
            offer.ready(layers=layers, tokens=tokens, after=event)

    def finish(self, payload: bytes) -> None:
        """Everything is on offer."""
        for offer in self._offers:
            offer.finish(payload)

    async def released(self) -> list[Any]:
        """Wait until nobody reads the blocks any more, and say how each offer ended.

        Raises:
            MemoryInDoubtError: If a silent peer may still read them at any rank.
        """
        return await _all(offer.released() for offer in self._offers)

    async def withdraw(self) -> None:
        """Take it back; returns when nobody reads the blocks any more, or raises as `released` does."""
        await _all(offer.withdraw() for offer in self._offers)


def queued(cache: PagedCache) -> list[Any]:
    """For each rank, when what this thread has queued on its device until now will be done."""
    return [
        torch.cuda.current_stream(shard.device).record_event() if shard.device.type == "cuda" else kvxfer.READY
        for shard in cache.shards
    ]


def combined(stats: Sequence[Any]) -> dict[str, Any]:
    """What the transfers of one request did in all, for people."""
    return {
        "route": "+".join(sorted({each.route for each in stats})),
        "bytes": sum(each.bytes for each in stats),
        "chunks": sum(each.chunks for each in stats),
        "ms": (max(each.finished for each in stats) - min(each.started for each in stats)) * 1e3,
    }


async def _all(awaited: Iterable[Awaitable[_T]]) -> list[_T]:
    """What all of them say, once the last has; if any raised, the gravest."""
    results = await asyncio.gather(*awaited, return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:
        raise _gravest(failures)
    return [result for result in results if not isinstance(result, BaseException)]


def _failure(fetch: "asyncio.Task[Any]") -> BaseException | None:
    return None if fetch.cancelled() else fetch.exception()


def _gravest(failures: Sequence[BaseException]) -> BaseException:
    """The first of them; or, if memory is in doubt, a doubt that ends when that of each rank has."""
    doubts = [failure for failure in failures if isinstance(failure, kvxfer.MemoryInDoubtError)]
    if not doubts:
        return failures[0]

    async def settled() -> None:
        await asyncio.gather(*(doubt.settled() for doubt in doubts))

    return kvxfer.MemoryInDoubtError("; ".join(map(str, doubts)), settled=settled)
