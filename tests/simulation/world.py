"""Engines of several ranks on one loopback network, in virtual time, drawn from a seed."""

import asyncio
import itertools
import os
import random
import zlib
from dataclasses import dataclass, field

import inside
from ownership import BlockBooks, Ledger, WatchedNetwork
from stage import KEY, Cache
from streams import Streams

from kvxfer import Config, Worker, site
from kvxfer import worker as assembly
from kvxfer import worker as watch
from kvxfer.copy import mover
from kvxfer.decode import role as recovery
from kvxfer.decode.fetch import Fetch
from kvxfer.peers.link import Link
from kvxfer.prefill.sender import Sender
from kvxfer.protocol.messages import Route
from kvxfer.safety import processes
from kvxfer.testing import DeterministicRuntime, LoopbackTransport
from kvxfer.tickets import EngineCard, Issuer

BLOCKS = 20
HEADS = 4
TIMES = {
    "peer_timeout": 0.25,
    "revoke_timeout": 0.1,
    "offer_lease": 0.4,
    "unclaimed_timeout": 0.5,
    "connect_timeout": 0.1,
    "no_progress_timeout": 0.15,
    "drain_timeout": 0.1,
}
"""Short, since a heartbeat costs as much real time in virtual time as anywhere."""
SHAPES = [(1, 1)] * 6 + [(2, 1)] * 2 + [(1, 2)] * 2 + [(2, 2)] + [(1, 1, 1)]
"""Ranks of each engine."""


class Mortal(DeterministicRuntime):
    """The runtime of one process, which may be killed: its threads stop where they are."""

    def __init__(self, runtime: DeterministicRuntime):
        self.__dict__.update(runtime.__dict__)
        self._stops = []

    def drive(self, name, machine, *, gives_way=False):
        stop, wake = super().drive(name, machine, gives_way=gives_way)
        self._stops.append(stop)
        return stop, wake

    def kill(self):
        for stop in self._stops:
            stop(0.0)


@dataclass(eq=False)
class Rank:
    """One rank of an engine."""

    name: str
    worker: Worker
    runtime: Mortal
    cache: Cache
    books: BlockBooks
    transport: LoopbackTransport
    closed: bool = False

    @property
    def alive(self):
        return not self.closed and self.books.alive


@dataclass(eq=False)
class Engine:
    """Ranks that hold the same tokens, and the block ids that are spare in all of them."""

    name: str
    ranks: list[Rank]
    issuer: Issuer
    block_tokens: int
    spare: list[int] = field(default_factory=lambda: list(range(1, BLOCKS)))

    @property
    def alive(self):
        return all(rank.alive for rank in self.ranks)

    def blocks(self, tokens, rnd):
        """Ids for so many tokens; none if there are not enough."""
        count = -(-tokens // self.block_tokens)
        if len(self.spare) < count:
            return []
        return [self.spare.pop(rnd.randrange(len(self.spare))) for _ in range(count)]


class World:
    """Everything of one simulation."""

    def __init__(self, runtime: DeterministicRuntime, rnd: random.Random, ledger: Ledger, folder):
        self.runtime, self.rnd, self.ledger = runtime, rnd, ledger
        self.loop = asyncio.get_running_loop()
        self.network = WatchedNetwork(ledger)
        self.streams = Streams(self.loop)
        self.engines: list[Engine] = []
        self.trail: list[str] = []  # what was done, for whoever replays a seed
        self.tags = itertools.count(1)
        self.left: list[Rank] = []  # killed
        self.settings = self._draw_settings()  # of every worker
        self._folder = folder
        self._names = itertools.count()
        self.layouts = self.rnd.choice([["NHD", "HND"]] * 3 + [["MLA"]])  # of which each engine has one
        self.layers = self.rnd.choice([1, 1, 2, 3])  # how many there are
        self.block_tokens = [4, 4, 8]  # of which each engine has one
        self.shared = self.rnd.random() < 0.3  # whether caches are memory that peers may map
        # the kind of a world draws nothing: seeds play what they played
        kind = zlib.crc32(repr(self.settings).encode()) % 6
        self.apart = kind % 3 == 0  # each rank says that it is on a host of its own
        self.watched = kind == 1  # the end of a process is seen, and with it that of all that it moves
        self.without_locks = kind == 4  # on one host; only a new agent is evidence, and nobody is killed
        self.judged = self.watched or self.without_locks or kind == 3  # what is left in the end has no excuse
        self._ends: dict[bytes, int] = {}  # by incarnation, what shows that

    @property
    def now(self):
        return self.runtime.now()

    @property
    def ranks(self):
        return [rank for engine in self.engines for rank in engine.ranks]

    def note(self, what):
        self.trail.append(f"{self.now:.6f} {what}")

    def say(self, what):
        self.ledger.say([what])

    def _draw_settings(self):
        draw = self.rnd.choice
        chunk = draw([512, 1024, 2048])
        return {
            **TIMES,
            "trust": "full",
            "arena_bytes": draw([2, 4, 8]) * 2 * chunk,
            "chunk_bytes": chunk,
            "window": draw([1, 2, 4]),
            "route": draw(["auto"] * 4 + ["staged", "direct", "pull"]),
            "revoke_timeout": draw([0.05, 0.1]),
            "grant_lease": draw([0.005, 0.05, 0.3]),
        }

    @property
    def config(self):
        return Config(**self.settings)

    async def open(self, monkeypatch, shape=None):
        """Open every engine; `shape` says how many ranks each has, if that is not to be drawn."""
        _make_sets_orderly(monkeypatch, self.loop)
        self.streams.install(monkeypatch)
        if self.apart:
            monkeypatch.setattr(assembly, "here", lambda: f"boot-{next(self._names)} pid:[1]")
        if self.without_locks:
            inside.share_no_locks(monkeypatch)
        if self.watched:
            monkeypatch.setattr(processes, "_by_locks", lambda peer: os.dup(self._ends[peer.identity.incarnation]))
        if shape is None:
            self._choose_routes(monkeypatch)
        _make_times_short(monkeypatch)
        for number, ranks in enumerate(shape or self.rnd.choice(SHAPES)):
            self.engines.append(await self.engine("abc"[number], ranks))

    async def engine(self, name, count) -> Engine:
        block_tokens, layout = self.rnd.choice(self.block_tokens), self.rnd.choice(self.layouts)
        ranks = []
        for rank in range(count):
            heads = range(rank * HEADS // count, (rank + 1) * HEADS // count)
            cache = Cache(
                blocks=BLOCKS,
                block_tokens=block_tokens,
                layers=range(self.layers),
                heads=heads if layout != "MLA" else range(1),
                dim=4,
                layout=layout,
                shared=self.shared,
            )
            ranks.append(await self._open_rank(name, rank, count, cache))
        card = EngineCard.of([rank.worker.card for rank in ranks])
        if count > 1:
            for rank in ranks:
                rank.worker.join(card, key=KEY)
        return Engine(name, ranks, ranks[0].worker.engine, block_tokens)

    async def _open_rank(self, name, rank, count, cache) -> Rank:
        runtime = Mortal(self.runtime)
        unique = f"{name}{rank}-{next(self._names)}"
        settings = {**self.settings, "engine": name, "rank": rank, "world": count}
        settings["listen"] = f"unix:{self._folder}/{name}{rank}"
        transport = LoopbackTransport(unique, self.network)
        worker = Worker(cache.tensors, Config(**settings), transport=transport, runtime=runtime)
        await worker.__aenter__()
        self._ends[bytes.fromhex(worker.card.incarnation)] = os.eventfd(0, os.EFD_NONBLOCK)
        books = self.ledger.cache(unique, cache)
        self.ledger.arena(unique, worker)
        return Rank(unique, worker, runtime, cache, books, transport)

    def kill(self, rank: Rank):
        """No goodbye, no clean-up: it is gone; what it has posted may still land, but where its end is seen."""
        self.note(f"kill {rank.name}")
        worker = rank.worker
        rank.books.alive = False
        rank.runtime.kill()
        self.streams.kill(worker)
        inside.die(worker)
        if self.watched:
            self.network.gone.add(rank.transport.name)
        os.eventfd_write(self._ends[bytes.fromhex(worker.card.incarnation)], 1)
        self.left.append(rank)

    async def close(self, rank: Rank, *, drain):
        """Close a worker; returns when it is."""
        self.note(f"close {rank.name} drain={drain}")
        rank.closed = True
        began = self.now
        await rank.worker.aclose(drain=drain)
        if self.now - began > self.config.bounds()["close"] + 0.05:
            self.say(f"closing {rank.name} took {self.now - began:.3f} s")
        if rank.transport.name not in self.network.agents:  # else it was left open because something may be in flight
            self.ledger.forget_arena(rank.name)

    async def end(self):
        """Close what is open."""
        await asyncio.gather(*(self.close(rank, drain=False) for rank in self.ranks if rank.alive))
        self.network.release("*")  # what is still in flight lands now: below, memory of dead processes is given back
        for rank in self.left:
            inside.bury(rank.worker)
        for end in self._ends.values():
            os.close(end)
        inside.free_leaked()

    def _choose_routes(self, monkeypatch):
        """Let each fetch take any route that is open, so that all of them meet."""
        acceptable, rnd = site.acceptable, self.rnd

        def drawn(preference, means) -> list[Route]:
            found = acceptable(preference, means)
            return [rnd.choice(found)] if found and rnd.random() < 0.7 else found

        monkeypatch.setattr(site, "acceptable", drawn)


class _Task(asyncio.Task):
    """A task with a place of its own in sets, see below."""

    numbers = itertools.count(1)

    def __init__(self, *arguments, **options):
        self._number = next(self.numbers)
        super().__init__(*arguments, **options)

    def __hash__(self):
        return self._number


def _make_sets_orderly(monkeypatch, loop):
    """Let sets of objects have the same order in every run: by when they came, not by where they lie in memory."""
    numbers = itertools.count(1)
    _Task.numbers = itertools.count(1)
    loop.set_task_factory(lambda loop, work, **options: _Task(work, loop=loop, **options))
    for kind in (Link, Fetch):
        monkeypatch.setattr(kind, "__hash__", lambda self: self.__dict__.setdefault("_order", next(numbers)))
    monkeypatch.setattr(Sender, "__hash__", lambda self: self.protocol.fetch.transfer)


def _make_times_short(monkeypatch):
    """What is no setting, in proportion to what is."""
    monkeypatch.setattr(recovery, "_ASK_SECONDS", 0.02)
    monkeypatch.setattr(recovery, "_ASK_SECONDS_MAX", 0.1)
    monkeypatch.setattr(watch, "_PERIOD_SECONDS", 1e6)
    monkeypatch.setattr(mover, "_OFTEN_NS", 5_000_000)
    monkeypatch.setattr(mover, "_SELDOM_NS", 5_000_000)
