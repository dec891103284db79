"""Both ends of posts in real threads: two agents in one process, or two processes, over NIXL; or the loopback."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from preloaded import Away
from rigs import PART, Outcome, ending, memory_of

from kvxfer.copy.mover import Flow, Mover
from kvxfer.copy.port import CopyJob, CopyOutcome, Descriptors, Direction, Native, Operation, Post
from kvxfer.fabric import nixl
from kvxfer.fabric.calls import Fabric
from kvxfer.fabric.nixl import NixlTransport
from kvxfer.runtime import ThreadRuntime

SIZE = 1 << 20
TCP = {"UCX": {"engine_config": "TLS=tcp"}}
"""Over TCP the target moves the data: one that does not poll keeps a write in flight."""


class Agent:
    """A transport and buffers that are registered one by one."""

    def __init__(self, name: str, buffers: int = 1, **settings: Any) -> None:
        self.transport = NixlTransport(name, **settings)
        self.transport.setup()
        self.library = nixl.opened(nixl.find())
        self.buffers = [np.zeros(SIZE, dtype=np.uint8) for _ in range(buffers)]
        self.tokens = [self.transport.register([memory_of(buffer)]) for buffer in self.buffers]

    @property
    def native(self) -> Native:
        return self.transport.native()

    def post(self, peer: str, operation: Operation, here: Descriptors, there: Descriptors) -> int:
        """Begin to move pieces, as the mover does but for its turns; `finish` it."""
        near, far = (self.library.pieces(side.kind, side.pieces.tolist(), side.device) for side in (here, there))
        way = nixl.WRITE if operation is Operation.WRITE else nixl.READ
        request = self.library.request(self.native.agent, way, near, far, peer)
        self.library.post_xfer_req(self.native.agent, request, None)
        return request

    def close(self) -> None:
        for token in self.tokens:
            self.transport.deregister(token)
        self.transport.close()


def descriptors(buffer: np.ndarray, *spans: tuple[int, int]) -> Descriptors:
    rows = [(buffer.ctypes.data + start, length) for start, length in spans or ((0, buffer.nbytes),)]
    return Descriptors("DRAM", 0, np.array(rows, dtype=np.int64))


def finish(request: int, *agents: Agent) -> None:
    """Poll at both ends, as two movers would, until it has ended; give it back."""
    first, *others = agents
    while first.library.get_xfer_status(first.native.agent, request) == nixl.IN_PROGRESS:
        for other in others:
            other.library.get_notifs(other.native.agent, other.native.notices, None)
    first.library.give_back(first.native.agent, request)


class Side:
    """A mover and a fabric in threads, and one registered buffer, in whichever process: over NIXL unless told."""

    token: object
    metadata: bytes
    asked: Flow  # the last post

    def __init__(self, name: str, nbytes: int, settings: dict[str, Any] | None = None, *, over: Any = None) -> None:
        runtime = ThreadRuntime()
        self.transport: Any = over or NixlTransport(name, **(settings or {}))
        options: dict[str, Any] = {"max_post_bytes": PART} if over else {}
        self.mover = Mover(runtime, **options)
        self.fabric = Fabric(self.transport, runtime, self.mover)
        self.buffer = np.zeros(nbytes, dtype=np.uint8)
        self.address = self.buffer.ctypes.data

    async def open(self) -> "Side":
        await self.fabric.open()
        self.token = await self.now(self.fabric.register([memory_of(self.buffer)]))
        self.metadata = await self.now(self.fabric.metadata([self.token]))
        return self

    async def now(self, future: "Future[Any]") -> Any:
        """The answer to a call."""
        async with asyncio.timeout(30):
            return await asyncio.wrap_future(future)

    def post(
        self, peer: str, address: int, nbytes: int, operation: Operation = Operation.WRITE
    ) -> "asyncio.Future[CopyOutcome]":
        """Move the first bytes of the buffer there, or what is there here."""
        ended = asyncio.get_running_loop().create_future()
        rows = ([[self.address, nbytes]], [[address, nbytes]])
        here, there = (Descriptors("DRAM", 0, np.array(row, np.int64)) for row in rows)
        job = CopyJob(None, ended.set_result, post=Post(peer, operation, here, there))
        self.asked = self.mover.submit(job, Direction.GATHER)
        return ended

    async def close(self, timeout: float = 5.0) -> bool:
        while not await self.mover.close(timeout):
            timeout = 0.0
        return await self.fabric.close()


class Target:
    """What another process does for a test, that has memory which is written."""

    def __init__(self, name: str, nbytes: int, settings: dict[str, Any]) -> None:
        self._side = Side(name, nbytes, settings)
        self._release: Callable[[], None] = lambda: None

    async def open(self) -> tuple[bytes, int]:
        """How it is reached, and where its memory is."""
        side = await self._side.open()
        return side.metadata, side.address

    def hold(self) -> None:
        """Make progress all the time, so that whatever is under way to it lands."""
        self._release = self._side.mover.hold_awake()

    def let_go(self) -> None:
        self._release()

    def count(self, byte: int) -> int:
        """How many bytes of its memory are that."""
        return int((self._side.buffer == byte).sum())

    def sum(self) -> int:
        return int(self._side.buffer.view(np.uint64).sum())

    async def close(self) -> bool:
        return await self._side.close(10)


class Remote(Away):
    """The other process, with a target that is open."""

    def __init__(self, nbytes: int, settings: dict[str, Any]) -> None:
        super().__init__(Target, "target", nbytes, settings)
        self.metadata, self.address = self.open()


@asynccontextmanager
async def two_processes(nbytes: int, **settings: Any) -> AsyncIterator[tuple[Side, Remote]]:
    remote = Remote(nbytes, settings)
    side = await Side("initiator", nbytes, settings).open()
    try:
        yield side, remote
    finally:
        remote.end()
        await side.close()


async def write(side: Side, remote: Remote, nbytes: int, *, seconds: float = 30) -> CopyOutcome:
    """How a write to the other process ends."""
    async with asyncio.timeout(seconds):
        return await side.post("target", remote.address, nbytes)


async def met(side: Side, remote: Remote, *, stuck_bytes: int = 0) -> "asyncio.Future[CopyOutcome]":
    """They have met, and written a little; then so many bytes are under way that the other process does not take."""
    remote.hold()
    assert await side.now(side.fabric.connect(remote.metadata)) == "target"
    assert ending(await write(side, remote, 64)) is Outcome.DONE
    if stuck_bytes:
        remote.let_go()
    ended = side.post("target", remote.address, stuck_bytes or 64)
    if stuck_bytes:
        while not side.mover.under_way:  # noqa: ASYNC110 - nobody announces it
            await asyncio.sleep(0)
        assert not ended.done()
    return ended
