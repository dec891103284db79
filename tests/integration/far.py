"""Ranks of an engine in another process, which does what it is told over a pipe. Every answer is waited for.

    far = Far()                                               # a process of its own
    card = await far.open("prefill", caches, route="direct")
    await far.offer(0, "r", [1, 2], tokens=32)
    far.end()                                                 # killed and reaped

The caches of such ranks, and those of ranks in this process, may be on any device (`place`), and events may fire late
there (`event_after`): what is expected of them is worked out on the CPU.
"""

import asyncio
import contextlib
import copy
import os
import signal
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import preloaded
import torch
from inside import call_agent_by
from stage import CANARY, KEY, guarded

from kvxfer import READY, Config, Worker, shared_empty
from kvxfer.copy.records import BEGIN
from kvxfer.testing import LoopbackTransport
from kvxfer.tickets import EngineCard

SLEEP_CYCLES = 1_000_000_000
"""About half a second of a GPU: a copy that does not wait is done long before."""
LATE_QUERIES = 50
JUNK = -7
GROWTH = 1_000
GUARD = 4096
"""Elements before and after a layer."""
_alive: list[object] = []


def empty(count, dtype, device):
    """Memory of which peers may map what lies on a CPU, as they may what lies on a GPU."""
    if torch.device(device).type == "cpu":
        return shared_empty((count,), dtype=dtype)
    return torch.empty(count, dtype=dtype, device=device)


def place(cache, device):
    """A cache of the same contents on a device, each layer between two guards that nobody may touch."""
    placed = copy.copy(cache)
    placed.memory, placed.guards = {}, []
    for layer, memory in cache.memory.items():
        room = empty(memory.numel() + 2 * GUARD, memory.dtype, device)
        room.view(torch.uint8).fill_(CANARY)
        placed.memory[layer] = room[GUARD:-GUARD].view(memory.shape)
        placed.memory[layer].copy_(memory)
        placed.guards += [room[:GUARD], room[-GUARD:]]
    if device_of(placed) != "cpu":
        torch.cuda.current_stream(device).synchronize()
    return placed


def device_of(cache) -> str:
    """Where a cache is, as torch names it."""
    return str(next(iter(cache.memory.values())).device)


def now_on(cache) -> Any:
    """What `after=` takes for work on this cache that was queued so far."""
    device = device_of(cache)
    return READY if device == "cpu" else torch.cuda.current_stream(device)


def event_after(cache, work: Callable[[Any], None]) -> Any:
    """An event that fires late, when `work(cache)` was done just before: whoever does not wait for it is found out."""
    device = device_of(cache)
    if device == "cpu":
        return _LateOnCpu(lambda: work(cache))
    with torch.cuda.device(device):
        stream, event = torch.cuda.Stream(), torch.cuda.Event()
        rehearsal = place(cache, device)
        with torch.cuda.stream(stream):
            work(rehearsal)  # a kernel that is loaded only now would wait for the one that sleeps
            torch.cuda._sleep(1)
            event.record()
            stream.synchronize()
            torch.cuda._sleep(SLEEP_CYCLES)
            work(cache)
            event.record()
    _alive.append(work)  # what it uses must not be given to somebody else while it is queued
    assert not event.query(), "the host waited for the kernel that sleeps: this event is not late"
    return event


def grow(cache):
    """The last kernel of a prefill: every element changes by a number that cannot be mistaken."""
    for memory in cache.memory.values():
        memory.add_(GROWTH)


def spoiler(cache, ids) -> Callable[[Any], None]:
    """The last kernel that used these blocks before: they hold junk afterwards."""
    index = torch.tensor(ids, device=device_of(cache))  # made now: a copy to a GPU waits for what is queued there

    def spoil(cache):
        for layer in cache.layers:
            cache.view(layer).index_fill_(1, index, JUNK)

    return spoil


class _LateOnCpu:
    def __init__(self, work):
        self._work = work
        self._left = LATE_QUERIES

    def query(self):
        self._left -= 1
        if self._left == 0:
            self._work()
        return self._left <= 0


class Ranks:
    """The ranks of one engine, in whichever process."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []  # one a rank
        self.caches: list[Any] = []  # theirs
        self._stack = contextlib.AsyncExitStack()
        self._given: list[Any] = []
        self._offers: dict[tuple[int, str], Any] = {}
        self._fetches: dict[tuple[int, str], Any] = {}

    async def open(self, engine, caches, *, device="cpu", network=None, **config) -> dict[str, Any]:
        """Open a rank for each cache and join them; returns the engine's card. Without a network it is over NIXL."""
        for rank, cache in enumerate(caches):
            placed = self.placed(cache, device)
            settings = Config(engine=engine, rank=rank, world=len(caches), **config)
            transport = None if network is None else LoopbackTransport(f"{engine}{rank}", network)
            worker = Worker(placed.tensors, settings, groups=self.groups(cache), transport=transport)
            self._given.append(cache)
            self.caches.append(placed)
            self.workers.append(await self._stack.enter_async_context(worker))
        fresh = self.workers[len(self.workers) - len(caches) :]
        card = EngineCard.of([worker.card for worker in fresh])
        for worker in fresh:
            worker.join(card, key=KEY)
        return card.to_dict()

    def placed(self, cache, device):
        """A cache as a worker gets it."""
        return place(cache, device)

    def groups(self, cache):
        """Properties of its groups."""
        del cache
        return ()

    def settled(self, cache):
        """What `after=` takes for all work on it that was queued so far."""
        return now_on(cache)

    def unchanged(self, given, placed):
        """Whether it, and what is around it, holds what it was opened with."""
        same = all(torch.equal(placed.memory[layer].cpu(), memory) for layer, memory in given.memory.items())
        return same and guarded(placed)

    async def close(self):
        stack, self._stack = self._stack, contextlib.AsyncExitStack()
        self.workers.clear()
        self.caches.clear()
        self._given.clear()
        await stack.aclose()

    def offer(self, rank, request, ids=None, *, late=False, **options):
        """Offer; `late`: of contents that are written a while after this returns."""
        worker, cache = self.workers[rank], self.caches[rank]
        if not options.get("streaming"):
            options["after"] = event_after(cache, grow) if late else self.settled(cache)
        self._offers[rank, request] = worker.offer(request, ids, **options)

    def ready(self, rank, request, **options):
        self._offers[rank, request].ready(after=self.settled(self.caches[rank]), **options)

    def finish(self, rank, request, payload=b""):
        self._offers[rank, request].finish(payload)

    async def released(self, rank, request):
        """How it ended, and what its transfers say."""
        ending = await self._offers[rank, request].released()
        return type(ending).__name__, getattr(ending, "stats", ())

    def start_fetch(self, rank, ticket, ids, **options):
        options.setdefault("after", self.settled(self.caches[rank]))
        self._fetches[rank, ticket["request"]] = self.workers[rank].start_fetch(ticket, ids, **options)

    async def layers(self, rank, request, start, stop):
        await self._fetches[rank, request].layers(start, stop)

    def intact(self):
        """Whether every cache, and what is around it, holds what it was opened with."""
        return all(map(self.unchanged, self._given, self.caches))

    def arenas(self):
        """The kind of memory that each rank's arena is."""
        return [worker.describe()["arena"]["kind"] for worker in self.workers]

    def occupy(self, rank, ctas):
        self.workers[rank].occupy(ctas)

    def quiet(self):
        """What is under way or held, rank by rank."""
        return [_held(worker.describe()) for worker in self.workers]


class Doomed(Ranks):
    """Ranks whose process dies in the midst of a write over NIXL: what it has posted is under way, or just landed."""

    def die_when_posting(self):
        """Be killed in the next post."""

        def last(begin, *request):
            status: int = begin(*request)
            os.kill(os.getpid(), signal.SIGKILL)
            return status

        call_agent_by(BEGIN, 3, last)

    def fork(self, seconds):
        """Have a child for so long, which outlives this process and has open what it has."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of forks in processes with threads: the child does nothing
            if os.fork() == 0:
                time.sleep(seconds)
                os._exit(0)


def _held(seen):
    arena = seen["arena"]
    return {
        "sending": seen["sending"],
        "receiving": seen["receiving"],
        "in doubt": seen["in_doubt"],
        "holders": len(seen["custody"].holders),
        "bytes": sum(share.capacity_bytes - share.free_bytes for share in (arena["send"], arena["receive"])),
    }


def idle(ranks):
    """Whether nothing is, of what `quiet` said."""
    return all(not any(seen.values()) for seen in ranks)


class Far(preloaded.Away):
    """Another process with `Ranks`; every method of theirs can be awaited here."""

    def __init__(self, kind: type[Ranks] = Ranks) -> None:
        super().__init__(kind)

    def __getattr__(self, name: str) -> Any:
        return partial(asyncio.to_thread, super().__getattr__(name))
