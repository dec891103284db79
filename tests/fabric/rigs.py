"""A mover and a fabric over the loopback: stepped by hand at the time that a test says."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from enum import StrEnum
from typing import Any

import numpy as np
from stepped import Stepped

from kvxfer.copy import records
from kvxfer.copy.mover import Flow, Mover
from kvxfer.copy.port import CopyJob, CopyOutcome, Descriptors, Direction, Operation, Passage, Post
from kvxfer.errors import FabricError
from kvxfer.fabric.calls import Fabric
from kvxfer.fabric.loopback import LoopbackNetwork, LoopbackTransport
from kvxfer.protocol.messages import MemorySpan
from kvxfer.safety.fence import FIRST_GENERATION, LockFile, PeerGate, Permit

SIZE = 1 << 16
PART = 1024
"""max_post_bytes of every mover here."""
FLUSH = 64
"""Bytes that are moved once more."""


class ManualService:
    """A service that runs when the test says so."""

    def __init__(self, step: Callable[[], float | None]) -> None:
        self.step = step
        self.woken = 0
        self.stopped = False

    def wake(self) -> None:
        self.woken += 1

    def stop(self, timeout: float) -> bool:
        del timeout
        self.stopped = True
        return True


class Served(Stepped):
    """A runtime without threads, whose service runs when the test says so too."""

    service: ManualService | None = None

    def __init__(self) -> None:
        super().__init__()
        self.time = 100.0

    def token(self, nbytes: int) -> bytes:
        return bytes(nbytes)

    def drive(self, name: str, machine: Any, *, gives_way: bool = False) -> Any:
        if not gives_way:
            return super().drive(name, machine)
        self.service = ManualService(machine.step)
        return self.service.stop, self.service.wake


class Way:
    """A way into a peer's memory, through a gate of its own."""

    def __init__(self) -> None:
        self.file = LockFile(1)
        self.key = PeerGate(self.file.handle)
        self.passage = Permit(self.key, 0, FIRST_GENERATION)

    @property
    def inside(self) -> int:
        """How many are inside, by whoever is."""
        return int(self.key._inside[0])

    @property
    def lent(self) -> int:
        """How many may go in."""
        return self.key._borrowers

    def close(self) -> None:
        self.key._borrowers = 0
        self.key.close()
        self.file.close()


def pieces(*rows: tuple[int, int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def memory_of(buffer: np.ndarray) -> MemorySpan:
    return MemorySpan("DRAM", 0, buffer.ctypes.data, buffer.nbytes)


Outcome = StrEnum("Outcome", "DONE STOPPED FAILED IN_DOUBT")


def ending(outcome: CopyOutcome) -> Outcome:
    """How a job ended, in a word."""
    if outcome.in_doubt:
        return Outcome.IN_DOUBT
    if outcome.error is not None:
        return Outcome.FAILED
    return Outcome.STOPPED if outcome.stopped else Outcome.DONE


class Moving:
    """A mover that is stepped by hand, and what became of what it was asked for."""

    def __init__(self, **settings: Any) -> None:
        self.runtime: Any = Served()
        self.mover = Mover(self.runtime, **{"max_post_bytes": PART, **settings})
        self.machine: Any = self.runtime.machine
        self.results: dict[str, list[CopyOutcome]] = {}
        self.order: list[str] = []
        self.late: list[bool] = []
        self.ways: list[Way] = []

    @property
    def state(self) -> Any:
        return self.machine.state

    def step(self, times: int = 1, *, seconds: float = 0.0) -> float | None:
        """So many steps, and what the last one says; before each of them time passes."""
        delay: float | None = None
        for _ in range(times):
            self.runtime.time += seconds
            delay = self.machine.step()
            self.mover._read_events()
        return delay

    async def settle(self) -> None:
        """Let everything that is due on the loop happen."""
        for _ in range(8):
            await asyncio.sleep(0)

    async def run(self, awaitable: Awaitable[Any]) -> Any:
        """Step all there is until this is done."""
        task, until = asyncio.ensure_future(awaitable), time.monotonic() + 10
        while not task.done():
            assert time.monotonic() < until, "it does not end"
            if self.machine._descriptors:
                self.step()
            self.serve()
            await asyncio.sleep(0)
        return task.result()

    def serve(self) -> None:
        """There may be a fabric."""

    def way(self) -> Way:
        self.ways.append(Way())
        return self.ways[-1]

    def submit(
        self, tag: str, post: Post | None, *, tables: Any = None, until: float = 1e9, passage: Passage | None = None,
        **job: Any,
    ) -> Flow:  # fmt: skip
        self.results[tag] = []

        def done(outcome: CopyOutcome) -> None:
            self.results[tag].append(outcome)
            self.order.append(tag)

        job = {"owner": tag, **job}
        return self.mover.submit(
            CopyJob(tables, done, until=until, passage=passage, post=post, **job), Direction.GATHER
        )

    def result(self, tag: str = "x") -> CopyOutcome:
        (result,) = self.results[tag]
        return result

    def ended(self, outcome: Outcome, said: str = "", *, disconnected: bool = False, may_move: bool = False) -> None:
        """It ended so: what its error says, whether of a peer that is gone, and whether bytes may move yet."""
        result, error = self.result(), self.result().error
        assert ending(result) is outcome
        assert isinstance(error, FabricError)
        assert said in str(error)
        told = error.in_doubt, error.disconnected, result.may_move
        assert told == (outcome is Outcome.IN_DOUBT, disconnected, may_move)

    def counted(self) -> list[int]:
        """What the machine counts of posts, and what there is of them."""
        counts = self.state[[records.SENDING_COUNT, records.WATCHED]].tolist()
        return [*counts, self.left(), self.mover.lingering, int(self.mover.under_way)]

    def left(self) -> int:
        """In how many rows something is left of posts that were given up."""
        return int((self.mover._machine.jobs[:, records.STATE] == records.LEFT).sum())

    async def end(self) -> None:
        """End it, whatever still waits."""
        until = time.monotonic() + 10
        while not await self.run(self.mover.close(0.0)):
            assert time.monotonic() < until, "it does not end"
        for way in self.ways:
            way.close()


def counted(transport: LoopbackTransport) -> Callable[[], int]:
    """How often it was called that may have moved bytes by it, from now on."""
    calls = 0

    def watch(name: str) -> None:
        original = getattr(transport, name)

        def called(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            return original(*arguments)

        setattr(transport, name, called)

    for name in ("post", "poll", "progress"):
        watch(name)
    return lambda: calls


class Rig(Moving):
    """A fabric over agent "a" beside the mover, and peers with one registered buffer each."""

    token: object

    def __init__(self, *peers: str, nbytes: int = SIZE, **settings: Any) -> None:
        super().__init__(**settings)
        self.network = LoopbackNetwork()
        self.transport = LoopbackTransport("a", self.network)
        self.called = counted(self.transport)
        self.fabric = Fabric(self.transport, self.runtime, self.mover)
        self.source = (np.arange(nbytes) % 251 + 1).astype(np.uint8)
        self.memory = {peer: np.zeros(nbytes, dtype=np.uint8) for peer in peers or ("b",)}
        self.others: dict[str, LoopbackTransport] = {}
        self.closed: bool | None = None

    async def open(self) -> None:
        await self.run(self.fabric.open())
        self.token = await self.now(self.fabric.register([memory_of(self.source)]))
        self.keys = self.transport.keys()
        for peer, memory in self.memory.items():
            other = self.others[peer] = LoopbackTransport(peer, self.network)
            other.setup()
            token = other.register([memory_of(memory)])
            assert await self.now(self.fabric.connect(other.metadata([token]))) == peer
        self.step()

    @property
    def service(self) -> ManualService:
        assert self.runtime.service is not None
        return self.runtime.service

    def serve(self, times: int = 1) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Steps of the fabric's service."""
        delay: float | None = None
        for _ in range(times):
            if self.runtime.service is not None:
                delay = self.service.step()
        return delay

    async def now(self, future: "Future[Any]") -> Any:
        """The answer to a call, which is made at once."""
        self.serve()
        await self.settle()
        return future.result(timeout=0)

    def piece(self, nbytes: int, *, peer: str = "b", at: int = 0) -> tuple[Descriptors, Descriptors]:
        rows = (pieces((memory.ctypes.data + at, nbytes)) for memory in (self.source, self.memory[peer]))
        here, there = (Descriptors("DRAM", 0, row) for row in rows)
        return here, there

    def post(
        self, tag: str = "x", nbytes: int = 8 * PART, *, peer: str = "b", at: int = 0, way: Way | None = None,
        operation: Operation = Operation.WRITE, runs_on: bool = False, **job: Any,
    ) -> Flow:  # fmt: skip
        post = Post(peer, operation, *self.piece(nbytes, peer=peer, at=at), runs_on, self.late.append)
        return self.submit(tag, post, passage=way.passage if way else None, **job)

    def moved(self) -> list[int]:
        """How many bytes, each time that any were."""
        return [entry.length for entry in self.network.log]

    def landed(self, peer: str = "b") -> int:
        return int(np.count_nonzero(self.memory[peer]))

    async def given_up(self, **post: Any) -> Flow:
        """A post of which nothing moves for as long as the mover waits."""
        copy = self.post(**post)
        self.step()
        self.step(8, seconds=0.2)
        assert ending(self.result()) == "in_doubt"
        return copy

    async def rebuilt(self, timeout: float = 0.0) -> bool:
        return await self.run(self.fabric.rebuild(timeout))

    async def close(self) -> bool:
        """Close the mover and then the fabric; whether that has closed the transport."""
        await Moving.end(self)
        self.closed = closed = bool(await self.run(self.fabric.close()))
        return closed

    async def end(self) -> None:
        if self.closed is None:
            await self.close()
