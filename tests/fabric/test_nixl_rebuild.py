"""A NIXL agent made anew, between processes over TCP: what is under way to the old one is late, and must not land."""

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pytest
from ends import SIZE, TCP, Agent, Side, descriptors, finish, two_processes, write

from kvxfer.errors import FabricError
from kvxfer.fabric.port import Cell, Descriptors, Operation, Outcome, Post, PostResult

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")

LARGE = 96 * SIZE
OLD, NEW = 7, 9


def writer(wire: Connection, byte: int) -> None:
    """Another process: writes where it is told, and says how that ended."""
    side = Side(f"writer {byte}", LARGE, {"backend_params": TCP})
    side.buffer[:] = byte
    while (told := wire.recv()) is not None:
        metadata, address, nbytes = told
        peer = side.fabric.connect(metadata).result(20)
        here = np.array([[side.buffer.ctypes.data, nbytes]], dtype=np.int64)
        local, far = (Descriptors("DRAM", 0, rows) for rows in (here, np.array([[address, nbytes]], dtype=np.int64)))

        def ended(result: PostResult) -> None:
            wire.send(result.outcome.value)

        side.fabric.post(Post(peer, Operation.WRITE, local, far, Cell(1e12), ended))
    wire.send(side.fabric.close(10).result(20))


class Writer:
    """That process, as the test sees it."""

    def __init__(self, byte: int) -> None:
        self.wire, theirs = preloaded.CONTEXT.Pipe()
        self.process = preloaded.process(writer, (theirs, byte))
        self.process.start()

    def write(self, side: Side, at: int, nbytes: int) -> None:
        self.wire.send((side.metadata, side.buffer.ctypes.data + at, nbytes))

    def outcome(self) -> str:
        assert self.wire.poll(60), "the other process does not answer"
        return self.wire.recv()

    def done(self, side: Side, at: int, nbytes: int) -> bool:
        self.write(side, at, nbytes)
        return self.outcome() == Outcome.DONE.value


@contextmanager
def company() -> Iterator[tuple[Side, Writer, Writer]]:
    """A target here, and two that write to it, which have done so before."""
    writers = Writer(OLD), Writer(NEW)
    side = Side("target", LARGE + SIZE, {"backend_params": TCP})
    release = side.fabric.hold_awake()
    try:
        assert all(one.done(side, LARGE, 64) for one in writers)
        yield side, *writers
    finally:
        for one in writers:
            one.process.kill()
            one.process.join(20)
            one.process.close()
            one.wire.close()
        release()
        side.fabric.close(5).result(20)


def anew(side: Side) -> None:
    assert side.fabric.rebuild(0.0).result(30) is True
    side.metadata = side.fabric.metadata([side.token]).result(20)


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_bytes_of_a_write_in_flight_do_not_land_after_a_rebuild_and_those_of_others_do(fault):
    with company() as (side, victim, other):
        assert other.done(side, LARGE, SIZE)
        assert (side.buffer[LARGE:] == NEW).all()
        victim.write(side, 0, LARGE)
        while not side.buffer[0]:
            time.sleep(0)
        assert victim.process.pid
        os.kill(victim.process.pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        anew(side)
        assert not (side.buffer[:LARGE] == OLD).all(), "it was in the midst of it"
        side.buffer[:] = 0
        if fault == "stop":
            os.kill(victim.process.pid, signal.SIGCONT)
        for _ in range(5):
            side.buffer[LARGE:] = 0
            assert other.done(side, LARGE, SIZE)
            assert (side.buffer[LARGE:] == NEW).all()
        if fault == "stop":
            assert victim.outcome() == Outcome.IN_DOUBT.value
            assert victim.done(side, LARGE, 64), "it may write again, once it has learned where"
        assert not side.buffer[:LARGE].any(), "bytes of the old write landed in memory that was given to somebody else"


def test_a_post_of_our_own_that_is_stuck_reads_nothing_after_a_rebuild():
    with two_processes(LARGE, backend_params=TCP) as (side, remote):
        remote.say("hold")
        side.fabric.connect(remote.metadata).result(20)
        side.buffer[:] = OLD
        assert write(side, remote, 64).result(30).outcome is Outcome.DONE
        remote.say("let go")
        stuck = write(side, remote, LARGE)
        while not any(live.under_way for queue in list(side.fabric._posts._posts.values()) for live in queue):
            time.sleep(0)
        assert side.fabric.rebuild(0.2).result(30) is True
        result = stuck.result(0)
        assert result.outcome is Outcome.IN_DOUBT
        assert result.error is not None
        assert result.error.disconnected
        side.buffer[:] = NEW
        remote.say("hold")  # now it takes what is left of it
        assert write(side, remote, 64).result(30).outcome is Outcome.DONE, "the peer is known as before"
        assert remote.say(NEW) == 64, "something of what was written over later was sent"
        assert 0 < remote.say(OLD) < LARGE - SIZE, "it was in the midst of it"
        assert side.fabric.close(5).result(20) is True


def test_errors_of_a_peer_that_died_do_not_keep_the_agent():
    with two_processes(LARGE, backend_params=TCP) as (side, remote):
        remote.say("hold")
        side.fabric.connect(remote.metadata).result(20)
        assert write(side, remote, 64).result(30).outcome is Outcome.DONE
        remote.say("let go")
        during = write(side, remote, LARGE)
        remote.kill()
        kept = [during.result(20), *(write(side, remote, 64).result(20) for _ in range(2))]
        assert all(result.error is not None for result in kept)
        assert side.fabric.rebuild(0.0).result(30) is True


def test_rebuilding_again_and_again_leaks_neither_descriptors_nor_threads():
    side = Side("target", SIZE, {"backend_params": TCP})

    def open_now() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))

    anew(side)
    before = open_now()
    rebuilds = 10
    for _ in range(rebuilds):
        anew(side)
    files, threads = open_now()
    assert files - before[0] < rebuilds // 2, "some come a moment later than the agent"
    assert threads == before[1]
    assert side.fabric.close(5).result(20) is True


def test_without_another_agent_the_old_one_stays(monkeypatch):
    a, b = Agent("a"), Agent("b")
    peer = a.transport.connect(b.transport.metadata(b.tokens))

    def no_network(*_: Any) -> Any:
        raise FabricError("there is no device")

    with monkeypatch.context() as patch:
        patch.setattr(a.transport, "_created", no_network)
        assert a.transport.renew() is False
    finish(a.transport.post(peer, Operation.WRITE, descriptors(a.buffers[0]), descriptors(b.buffers[0])), a, b)
    assert a.transport.renew() is True
    a.tokens = []
    a.close()
    b.close()


def test_an_agent_is_destroyed_though_errors_are_kept_and_not_while_a_post_is():
    a, b = Agent("a"), Agent("b")
    peer = a.transport.connect(b.transport.metadata(b.tokens))
    here, there = descriptors(a.buffers[0], (0, 64)), descriptors(b.buffers[0], (0, 64))
    kept: list[Any] = []
    with pytest.raises(FabricError) as caught:
        a.transport.post(peer, Operation.WRITE, here, descriptors(b.buffers[0], (0, 63)))
    kept.append(caught.value)  # its frames refer to the agent
    handle = a.transport.post(peer, Operation.WRITE, here, there)
    assert a.transport.renew() is False
    assert a.transport.name == "a"
    finish(handle, a, b)
    assert a.transport.renew() is True
    assert a.transport.name == "a.1"
    a.tokens = [a.transport.register([])]
    a.close()
    b.close()
