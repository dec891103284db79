"""`kvxfer bench scale`: what peers cost, from 1 to 1,000 of them, over the in-process transport.

One worker, the hub, holds the cache and runs on a loop of its own (`loop="own"`); peers are workers on the main loop,
all in one process, so the CPU time of either loop's thread is told apart. Memory is that of the process: what a worker
that is open takes, and what the two ends of a connection add; likewise its open files. Control streams are Unix
sockets; their bytes are counted by a relay, in a run of its own. Unless NIXL is asked for, it takes no part, and then
nothing here says how fast bytes move or what its connections take.
"""

import asyncio
import gc
import os
import resource
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import anyio
from anyio.abc import ByteStream

import kvxfer
from kvxfer.config import Config
from kvxfer.fabric.loopback import LoopbackNetwork, LoopbackTransport
from kvxfer.tools.bench.caches import Cache, Request, Slab
from kvxfer.tools.bench.children import Side, Step, collect
from kvxfer.tools.bench.device import Kind
from kvxfer.tools.bench.layouts import KIB, MIB, Layout
from kvxfer.tools.bench.report import Report
from kvxfer.tools.bench.samples import Samples
from kvxfer.tools.shown import duration, size

__all__ = ["Scale"]

PEERS: Final = (1, 10, 100, 1000)
_LAYERS: Final = 4
_POOL: Final = 4
_IDLE_SECONDS: Final = 2.0
_COUNTED: Final = 50
_FETCH_SECONDS: Final = 60.0
_SEED: Final = 1


@dataclass(frozen=True, slots=True)
class Scale:
    """What to measure."""

    device: Kind = "cpu"  # there is no other
    peers: tuple[int, ...] = PEERS
    route: str = "staged"
    transfers: int = 1000  # warm ones at each number of peers, at least one of each
    idle_seconds: float = _IDLE_SECONDS
    layers: int = _LAYERS  # a tensor each, with 16 KiB a block
    nixl: bool = False  # move the bytes by NIXL, with an agent for each worker

    @property
    def layout(self) -> Layout:
        """Of the caches on both sides."""
        return Layout("16KiB a layer", 8 * KIB, self.layers, 8, 4)

    def run(self, on_step: Callable[[str, int, int], None]) -> Report:
        """Measure everything."""
        return _report(collect({"peers": measure}, self, 1 + len(self.peers), on_step, devices={"peers": "cpu"}))


async def measure(side: Side, spec: Scale) -> None:
    """Count frames and bytes with one peer, then add peers step by step."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    side.report(Step("control frames and bytes"))
    async with AsyncExitStack() as stack:
        side.report(await _count(_Place(side, spec, stack)))
    async with AsyncExitStack() as stack:
        place, peers = _Place(side, spec, stack), list[_Peer]()
        hub = await _Hub.open(place)
        for count in sorted(set(spec.peers)):
            side.report(Step(f"{count} peers"))
            side.report(await _grow(place, hub, peers, count))


class _Place:
    """Where workers are opened: what is opened later is closed earlier."""

    def __init__(self, side: Side, spec: Scale, stack: AsyncExitStack) -> None:
        self.spec: Final = spec
        self.folder: Final = side.folder
        self.stack: Final = stack
        self.network: Final = LoopbackNetwork()

    async def worker(
        self, name: str, cache: Cache, loop: Literal["caller", "own"] = "caller", **settings: Any
    ) -> kvxfer.Worker:
        """Open a worker on this process's transport, or on NIXL."""
        config = Config(listen=f"unix:{self.folder / name}.sock", route=self.spec.route, engine=name, **settings)
        transport = None if self.spec.nixl else LoopbackTransport(name, self.network)
        worker = kvxfer.Worker(cache.cache_tensors(), config, transport=transport, loop=loop)
        return await self.stack.enter_async_context(worker)


class _Hub:
    """The worker with the cache, and what its loop's thread has used."""

    def __init__(self, worker: kvxfer.Worker, layout: Layout) -> None:
        self._worker: Final = worker
        self._tokens: Final = layout.block_tokens
        self._offered = 0
        threads = [one.ident for one in threading.enumerate() if one.name == "kvxfer-loop"]
        self._clock: Final = time.pthread_getcpuclockid(threads[-1] or 0)

    @classmethod
    async def open(cls, place: _Place, **settings: Any) -> "_Hub":
        """Open it with the content that everybody fetches."""
        layout = place.spec.layout
        cache = Slab("cpu", [(layout, _POOL)], source=True).cache(layout, _POOL)
        cache.write(Request(_SEED, (0,)))
        most = max(place.spec.transfers, _COUNTED, *place.spec.peers)
        bounds = {"max_transfers": 2 * most}
        memory = {"arena_bytes": 64 * MIB, "chunk_bytes": MIB}
        return cls(await place.worker("hub", cache, loop="own", **memory, **bounds, **settings), layout)

    @property
    def cpu_seconds(self) -> float:
        """Of the thread that its loop runs in."""
        return time.clock_gettime(self._clock)

    def offer(self, count: int) -> list[dict[str, Any]]:
        """Put so many requests on offer; their tickets."""
        names = [str(number) for number in range(self._offered, self._offered + count)]
        self._offered += count
        for name in names:
            self._worker.offer(name, [0], tokens=self._tokens)
        return [self._worker.engine.ticket(name) for name in names]

    def frames(self) -> Counter[str]:
        """Control frames so far, by message, with the direction as the hub sees it."""
        metrics = self._worker.describe()["metrics"]
        sent = {f"sent {name}": count for name, count in metrics["frames_sent"].items()}
        return Counter(sent | {f"received {name}": count for name, count in metrics["frames_received"].items()})


@dataclass(frozen=True, slots=True)
class _Peer:
    """One decode worker with a small cache."""

    worker: kvxfer.Worker
    cache: Cache
    tokens: range

    @classmethod
    async def open(cls, place: _Place, number: int) -> "_Peer":
        """Open it; it is not connected yet."""
        layout = place.spec.layout
        cache = Slab("cpu", [(layout, _POOL)], source=False).cache(layout, _POOL)
        cache.scrub()
        memory: dict[str, Any] = {"arena_bytes": 4 * MIB, "chunk_bytes": MIB}
        return cls(await place.worker(f"peer{number}", cache, **memory), cache, range(layout.block_tokens))

    async def fetch(self, ticket: dict[str, Any]) -> float:
        """Seconds that one block takes."""
        began = time.perf_counter()
        await self.worker.fetch(ticket, [1], tokens=self.tokens, timeout=_FETCH_SECONDS)
        return time.perf_counter() - began


async def _count(place: _Place) -> dict[str, Any]:
    """Frames and bytes of a warm transfer with one peer, on a stream that a relay counts."""
    listen = place.folder / "relay.sock"
    passed = await place.stack.enter_async_context(_relayed(listen, place.folder / "hub.sock"))
    hub = await _Hub.open(place, advertise=f"unix:{listen}")
    peer = await _Peer.open(place, 0)
    first, *tickets = hub.offer(1 + _COUNTED)
    await peer.fetch(first)
    handshake, before = Counter(passed), hub.frames()
    for ticket in tickets:
        await peer.fetch(ticket)
    frames = hub.frames() - before
    return {
        "first_fetch_bytes": handshake,
        "bytes_a_transfer": {way: (passed[way] - handshake[way]) / _COUNTED for way in handshake},
        "frames_a_transfer": {name: count / _COUNTED for name, count in sorted(frames.items())},
        "transfers": _COUNTED,
        "request_bytes": place.spec.layout.block_bytes,
    }


@asynccontextmanager
async def _relayed(listen: Path, target: Path) -> AsyncGenerator[Counter[str], None]:
    """Listen at one Unix socket, and pass everything on to another one and back: the bytes each way so far."""
    passed = Counter[str]()

    async def pump(source: ByteStream, sink: ByteStream, way: str) -> None:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for data in source:
                passed[way] += len(data)
                await sink.send(data)
        await sink.aclose()

    async def serve(stream: ByteStream) -> None:
        async with stream, await anyio.connect_unix(target) as hub, anyio.create_task_group() as ways:
            ways.start_soon(pump, stream, hub, "to_hub")
            ways.start_soon(pump, hub, stream, "from_hub")

    async with await anyio.create_unix_listener(listen) as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        yield passed
        group.cancel_scope.cancel()


async def _grow(place: _Place, hub: _Hub, peers: list[_Peer], count: int) -> dict[str, Any]:
    """Add peers until there are so many, and measure."""
    spec, before = place.spec, _Held.now()
    new = [await _Peer.open(place, number) for number in range(len(peers), count)]
    opened = _Held.now()
    theirs, ours = hub.cpu_seconds, time.thread_time()
    first = [await peer.fetch(ticket) for peer, ticket in zip(new, hub.offer(len(new)), strict=True)]
    first_cpu = {"hub": hub.cpu_seconds - theirs, "peer": time.thread_time() - ours}
    connected = _Held.now()
    peers += new
    transfers = max(spec.transfers, count)
    tickets = hub.offer(transfers)
    for peer in peers:
        peer.cache.scrub()
    theirs, ours = hub.cpu_seconds, time.thread_time()
    took = [await peers[number % count].fetch(ticket) for number, ticket in enumerate(tickets)]
    theirs, ours = hub.cpu_seconds - theirs, time.thread_time() - ours
    difference = next(filter(None, (peer.cache.difference(Request(_SEED, (1,))) for peer in peers)), "")
    place.network.log.clear()
    return {
        "peers": count,
        "added": len(new),
        "verified": not difference,
        "difference": difference,
        "memory_bytes": _each(before.bytes, opened.bytes, connected.bytes, len(new)),
        "open_files": _each(before.files, opened.files, connected.files, len(new)),
        "first_fetch": Samples(first).percentiles(),
        "first_fetch_loop_cpu_s": {side: used / len(new) for side, used in first_cpu.items()},
        "fetch": Samples(took).percentiles(),
        "loop_cpu_s": {"hub": theirs / transfers, "peer": ours / transfers},
        "idle": await _idle(hub, count, spec.idle_seconds),
    }


async def _idle(hub: _Hub, count: int, seconds: float) -> dict[str, float]:
    """What connections cost while nothing moves: CPU seconds of each loop a second."""
    theirs, ours, began = hub.cpu_seconds, time.thread_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    elapsed = time.perf_counter() - began
    hub_rate, peer_rate = (hub.cpu_seconds - theirs) / elapsed, (time.thread_time() - ours) / elapsed
    return {"hub_cpu": hub_rate, "peers_cpu": peer_rate, "hub_cpu_a_peer": hub_rate / count, "seconds": elapsed}


@dataclass(frozen=True, slots=True)
class _Held:
    """What this process has."""

    bytes: int
    files: int

    @classmethod
    def now(cls) -> "_Held":
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")))  # noqa: PTH208 - a count


def _each(before: int, opened: int, connected: int, workers: int) -> dict[str, float]:
    """How much of it a worker took when it opened, and its connection to the hub when they met."""
    return {"an_open_worker": (opened - before) / workers, "a_connection": (connected - opened) / workers}


def _report(found: Sequence[dict[str, Any]]) -> Report:
    counted, *cells = found
    rows = [
        [
            str(one["peers"]),
            *(size(one["memory_bytes"][what]) for what in ("an_open_worker", "a_connection")),
            *(f"{one['open_files'][what]:.1f}" for what in ("an_open_worker", "a_connection")),
            duration(one["first_fetch"]["p50_s"]),
            duration(one["first_fetch_loop_cpu_s"]["hub"]),
            duration(one["fetch"]["p50_s"]),
            duration(one["fetch"]["p99_s"]),
            duration(one["loop_cpu_s"]["hub"]),
            duration(one["loop_cpu_s"]["peer"]),
            f"{one['idle']['hub_cpu']:.2%}",
            "yes" if one["verified"] else "NO",
        ]
        for one in cells
    ]
    headings = ["peers", "an open worker", "a connection", "files a worker", "files a connection",
                "first fetch", "hub loop for it", "fetch p50", "p99", "hub loop a transfer", "peer loop a transfer",
                "hub loop idle", "verified"]  # fmt: skip
    to_hub, from_hub = (counted["bytes_a_transfer"][way] for way in ("to_hub", "from_hub"))
    frames = counted["frames_a_transfer"]
    first = counted["first_fetch_bytes"]
    listed = ", ".join(f"{name} {count:g}" for name, count in frames.items())
    notes = [
        "an open worker: resident memory, its threads and cache included",
        "a connection: both ends, plans included, and on staged the part of the arena that its first block touches",
        "files: open ones, likewise; hub loop for it: CPU time of the hub's loop for the first fetch",
        "first fetch: connecting, the handshake and the plan of the pair, then one block",
        f"control frames a transfer: {sum(frames.values()):g} ({listed})",
        f"bytes of the control stream a transfer: {to_hub:.0f} to the hub, {from_hub:.0f} back",
        f"and of the first fetch: {first['to_hub']} to the hub, {first['from_hub']} back",
    ]
    wrong = [f"{one['peers']} peers: {one['difference']}" for one in cells if one["difference"]]
    title = f"one hub, warm transfers of one block of {size(counted['request_bytes'])}, one at a time"
    return Report({"control": counted, "cells": cells}, title, headings, rows, notes, wrong)
