"""A NIXL agent made anew, between processes over TCP: what is under way to the old one is late, and must not land."""

import asyncio
import importlib.util
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from ends import SIZE, TCP, Agent, Side, descriptors, finish, met, two_processes, write
from preloaded import Away
from rigs import Outcome, ending

from kvxfer.copy.port import Operation
from kvxfer.errors import FabricError
from kvxfer.protocol.messages import MemorySpan

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")

LARGE = 96 * SIZE
OLD, NEW = 7, 9


class Writing:
    """What another process does: it writes where it is told, and says how that ended."""

    def __init__(self, byte: int) -> None:
        self._side, self._byte = Side(f"writer {byte}", LARGE, {"backend_params": TCP}), byte

    async def begin(self, metadata: bytes, address: int, nbytes: int) -> None:
        """To write, which need not end."""
        if not self._side.buffer.any():
            await self._side.open()
            self._side.buffer[:] = self._byte
        peer = await self._side.now(self._side.fabric.connect(metadata))
        self._ended = self._side.post(peer, address, nbytes)

    async def outcome(self) -> Outcome:
        """Of what it began last."""
        return ending(await self._ended)


class Writer(Away):
    """That process, as the test sees it."""

    def __init__(self, byte: int) -> None:
        super().__init__(Writing, byte)

    def write(self, side: Side, at: int, nbytes: int) -> None:
        self.begin(side.metadata, side.address + at, nbytes)

    def done(self, side: Side, at: int, nbytes: int) -> bool:
        self.write(side, at, nbytes)
        return self.outcome() is Outcome.DONE


@asynccontextmanager
async def company() -> AsyncIterator[tuple[Side, Writer, Writer]]:
    """A target here, and two that write to it, which have done so before."""
    writers = Writer(OLD), Writer(NEW)
    side = await Side("target", LARGE + SIZE, {"backend_params": TCP}).open()
    release = side.mover.hold_awake()
    try:
        assert all(one.done(side, LARGE, 64) for one in writers)
        yield side, *writers
    finally:
        for one in writers:
            one.end()
        release()
        await side.close()


async def rebuilt(side: Side, timeout: float = 0.0) -> bool:
    async with asyncio.timeout(30):
        return await side.fabric.rebuild(timeout)


async def anew(side: Side) -> None:
    assert await rebuilt(side) is True
    side.metadata = await side.now(side.fabric.metadata([side.token]))


@pytest.mark.parametrize("fault", ["kill", "stop"])
async def test_bytes_of_a_write_in_flight_do_not_land_after_a_rebuild_and_those_of_others_do(fault):
    async with company() as (side, victim, other):
        assert other.done(side, LARGE, SIZE)
        assert (side.buffer[LARGE:] == NEW).all()
        victim.write(side, 0, LARGE)
        while not side.buffer[0]:  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0)
        assert victim.process.pid
        os.kill(victim.process.pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        await anew(side)
        assert not (side.buffer[:LARGE] == OLD).all(), "it was in the midst of it"
        side.buffer[:] = 0
        if fault == "stop":
            os.kill(victim.process.pid, signal.SIGCONT)
        for _ in range(5):
            side.buffer[LARGE:] = 0
            assert other.done(side, LARGE, SIZE)
            assert (side.buffer[LARGE:] == NEW).all()
        if fault == "stop":
            assert victim.outcome() is Outcome.IN_DOUBT
            assert victim.done(side, LARGE, 64), "it may write again, once it has learned where"
        assert not side.buffer[:LARGE].any(), "bytes of the old write landed in memory that was given to somebody else"


async def test_a_post_of_our_own_that_is_stuck_reads_nothing_after_a_rebuild():
    async with two_processes(LARGE, backend_params=TCP) as (side, remote):
        side.buffer[:] = OLD
        stuck = await met(side, remote, stuck_bytes=LARGE)
        assert await rebuilt(side, 0.2) is True
        async with asyncio.timeout(5):
            result = await stuck
        assert ending(result) is Outcome.IN_DOUBT
        assert isinstance(result.error, FabricError)
        assert result.error.disconnected
        assert not result.may_move
        side.buffer[:] = NEW
        remote.hold()  # now it takes what is left of it
        assert ending(await write(side, remote, 64)) is Outcome.DONE, "the peer is known as before"
        assert remote.count(NEW) == 64, "something of what was written over later was sent"
        assert 0 < remote.count(OLD) < LARGE - SIZE, "it was in the midst of it"
        assert await side.close() is True


async def test_errors_of_a_peer_that_died_do_not_keep_the_agent():
    async with two_processes(LARGE, backend_params=TCP) as (side, remote):
        during = await met(side, remote, stuck_bytes=LARGE)
        remote.kill()
        async with asyncio.timeout(20):
            kept = [await during, *[await write(side, remote, 64) for _ in range(2)]]
        assert all(result.error is not None for result in kept)
        assert await rebuilt(side) is True


async def test_rebuilding_again_and_again_leaks_neither_descriptors_nor_threads():
    side = await Side("target", SIZE, {"backend_params": TCP}).open()

    def open_now() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))

    await anew(side)
    before = open_now()
    rebuilds = 10
    for _ in range(rebuilds):
        await anew(side)
    files, threads = open_now()
    assert files - before[0] < rebuilds // 2, "some come a moment later than the agent"
    assert threads == before[1]
    assert await side.close() is True


def test_without_another_agent_the_old_one_stays(monkeypatch):
    a, b = Agent("a"), Agent("b")
    peer = a.transport.connect(b.transport.metadata(b.tokens))

    def no_network(*_: Any) -> Any:
        raise FabricError("there is no device")

    with monkeypatch.context() as patch:
        patch.setattr(a.transport, "_created", no_network)
        assert a.transport.renew() is False
    finish(a.post(peer, Operation.WRITE, descriptors(a.buffers[0]), descriptors(b.buffers[0])), a, b)
    assert a.transport.renew() is True
    a.tokens = []
    a.close()
    b.close()


def test_an_agent_is_destroyed_though_errors_are_kept():
    a, b = Agent("a"), Agent("b")
    with pytest.raises(FabricError) as caught:
        a.transport.register([MemorySpan("VRAM", 0, a.buffers[0].ctypes.data, 64)])
    kept: list[Any] = [caught.value]  # its frames refer to the agent
    assert a.transport.renew() is True
    assert kept
    assert a.transport.name == "a.1"
    a.tokens = [a.transport.register([])]
    a.close()
    b.close()
