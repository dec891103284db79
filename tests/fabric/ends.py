"""Both ends of posts over NIXL: two agents in one process, or two processes."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import preloaded

from kvxfer.fabric.nixl import NixlTransport
from kvxfer.fabric.port import Cell, Descriptors, Memory, Operation, Post, PostResult
from kvxfer.fabric.pump import Fabric
from kvxfer.runtime import ThreadRuntime

SIZE = 1 << 20
TCP = {"UCX": {"engine_config": "TLS=tcp"}}
"""Over TCP the target moves the data: one that does not poll keeps a write in flight."""


class Agent:
    """A transport and buffers that are registered one by one."""

    def __init__(self, name: str, buffers: int = 1, **settings: Any) -> None:
        self.transport = NixlTransport(name, **settings)
        self.transport.setup()
        self.buffers = [np.zeros(SIZE, dtype=np.uint8) for _ in range(buffers)]
        self.tokens = [self.transport.register([memory(buffer)]) for buffer in self.buffers]

    def close(self) -> None:
        for token in self.tokens:
            self.transport.deregister(token)
        self.transport.close()


def memory(buffer: np.ndarray) -> Memory:
    return Memory("DRAM", 0, buffer.ctypes.data, buffer.nbytes)


def descriptors(buffer: np.ndarray, *spans: tuple[int, int]) -> Descriptors:
    rows = [(buffer.ctypes.data + start, length) for start, length in spans or ((0, buffer.nbytes),)]
    return Descriptors("DRAM", 0, np.array(rows, dtype=np.int64))


def finish(handle: object, *agents: Agent) -> None:
    """Poll at both ends, as two fabrics would, until the part has ended; give the handle back."""
    first, *others = agents
    while not first.transport.poll(handle):
        for other in others:
            other.transport.progress()
    first.transport.release(handle)


class Side:
    """A fabric over NIXL and one registered buffer, in whichever process."""

    def __init__(self, name: str, nbytes: int, settings: dict[str, Any]) -> None:
        self.fabric = Fabric(NixlTransport(name, **settings), ThreadRuntime())
        self.fabric.start()
        self.buffer = np.zeros(nbytes, dtype=np.uint8)
        self.token = self.fabric.register([memory(self.buffer)]).result(20)
        self.metadata = self.fabric.metadata([self.token]).result(20)


def target(wire: Connection, nbytes: int, settings: dict[str, Any]) -> None:
    """The other process: does what it is told, one word at a time, until it is told to end or killed.

    It answers a word with the sum of what it holds, and a number with how many of its bytes are that.
    """
    side = Side("target", nbytes, settings)
    wire.send((side.metadata, side.buffer.ctypes.data))
    release: Callable[[], None] = lambda: None  # noqa: E731
    while (word := wire.recv()) != "end":
        if word == "hold":
            release = side.fabric.hold_awake()
        elif word == "let go":
            release()
        wire.send(int((side.buffer == word).sum()) if isinstance(word, int) else int(side.buffer.view(np.uint64).sum()))
    wire.send(side.fabric.close(10).result(20))


class Remote:
    """The other process, as the test sees it."""

    def __init__(self, process: Any, wire: Any) -> None:
        self.process = process
        self._wire = wire
        self.metadata: bytes
        self.address: int
        self.metadata, self.address = self._receive()

    def say(self, word: str | int) -> Any:
        self._wire.send(word)
        return self._receive()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(20)

    def _receive(self) -> Any:
        assert self._wire.poll(60), "the other process does not answer"
        return self._wire.recv()


@contextmanager
def two_processes(nbytes: int, **settings: Any) -> Iterator[tuple[Side, Remote]]:
    ours, theirs = preloaded.CONTEXT.Pipe()
    process = preloaded.process(target, (theirs, nbytes, settings))
    process.start()
    side = Side("initiator", nbytes, settings)
    try:
        yield side, Remote(process, ours)
    finally:
        process.kill()
        process.join(20)
        process.close()  # raises if it still runs
        ours.close()
        theirs.close()
        side.fabric.close(5).result(20)


def write(side: Side, remote: Remote, nbytes: int) -> "Future[PostResult]":
    result: Future[PostResult] = Future()
    here = np.array([[side.buffer.ctypes.data, nbytes]], dtype=np.int64)
    there = np.array([[remote.address, nbytes]], dtype=np.int64)
    local, far = Descriptors("DRAM", 0, here), Descriptors("DRAM", 0, there)
    side.fabric.post(Post("target", Operation.WRITE, local, far, Cell(1e12), result.set_result))
    return result
