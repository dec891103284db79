"""Flows that take turns: one fills places in a peer's memory, the peer's own empties them, told by notifications."""

import asyncio
import contextlib
import importlib.util
import struct

import numpy as np
import pytest
from copy_plans import contiguous_rows
from ends import Side as NixlSide
from packing import packed
from rigs import Moving, Outcome, ending, pieces

from kvxfer.copy import records
from kvxfer.copy.mover import Flow
from kvxfer.copy.port import NO_PIECES, CopyJob, Descriptors, Direction, Operation, Post, Turns
from kvxfer.fabric.loopback import LoopbackNetwork, LoopbackTransport

STEPS, PLACES = 8, 3
TOKEN = bytes(range(1, 17))
GATHER, SCATTER = Direction.GATHER, Direction.SCATTER
needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")


def note(steps: int, by: Direction, token: bytes = TOKEN) -> bytes:
    """What a mover notifies a peer of whose flow of this direction has done so many steps."""
    return token + struct.pack("<Q", 2 * steps + (by is SCATTER))


class Side(Moving):
    """A mover over agent "a" of a network, one flow of it, and agent "b", which says what the test says."""

    begun_flow: Flow

    def __init__(self) -> None:
        super().__init__()
        network = LoopbackNetwork()
        self.transport, self.peer = (LoopbackTransport(name, network) for name in "ab")
        for transport in (self.transport, self.peer):
            transport.setup()
        self.mover.attach(self.transport.native())
        self.counts: list[int] = []  # how many of its steps were done, each time that this was told

    def flow(self, direction, *, token=TOKEN, allowed=STEPS) -> None:
        """Begin it; its steps do nothing."""
        self.results["x"] = []
        self.begun_flow = self.mover.flow(
            CopyJob(None, self.results["x"].append, owner="x"),
            direction,
            [CopyJob(None)] * STEPS,
            total=STEPS,
            allowed=allowed,
            turns=Turns(PLACES, 0, token, "b"),
            progress=lambda told: self.counts.append(told.steps),
        )

    def say(self, message: bytes) -> None:
        """The peer's agent notifies it of something, and it hears that."""
        self.peer.notify("a", message)
        self.step(4)

    def word(self, word: int) -> int:
        return int(self.machine.jobs[self.begun_flow.slot][word])

    async def end(self) -> None:
        await super().end()
        assert self.state[records.LISTENING] == 0


@pytest.fixture
async def side():
    side = Side()
    yield side
    await side.end()


@pytest.mark.parametrize(("allowed", "heard"), [(STEPS, [1, STEPS - 1]), (STEPS - 1, [1, 4, 6, STEPS - 1])])
async def test_a_loop_hears_of_half_while_it_may_let_more_begin_and_else_once_in_a_while(side, allowed, heard):
    side.flow(SCATTER, allowed=allowed)
    for steps in range(1, STEPS):
        side.say(note(steps, GATHER))
    side.runtime.time += 0.025
    side.step(4)
    assert (side.word(records.PASSED), side.counts) == (STEPS - 1, heard)
    side.mover.cancel(side.begun_flow)


@pytest.mark.parametrize("token", [b"", bytes(8) + bytes(range(8))])
@pytest.mark.parametrize(("direction", "other"), [(GATHER, SCATTER), (SCATTER, GATHER)])
async def test_without_a_token_nobody_is_notified_and_nobody_heeded(side, direction, other, token):
    side.flow(direction, token=token)
    side.step(4)
    before = side.word(records.PASSED)
    release = side.mover.hold_awake()
    side.say(note(2, other, token.ljust(16, b"\0")))
    assert (side.word(records.PASSED), side.word(records.HEARD)) == (before, 0)
    assert side.mover.unknown_notifications == 1
    side.mover.note_peer_steps(side.begun_flow, 2)
    side.step(4)
    assert side.word(records.PASSED) == before + 2
    assert side.peer.heard() == []
    release()


# ---- over NIXL -------------------------------------------------------------------------------------------------------


@needs_nixl
@pytest.mark.parametrize("known", [True, False])
async def test_over_nixl_they_take_turns_by_notifications_alone_unless_an_agent_is_not_known(known):
    chunks, places, nbytes = 50, 3, 4096
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        sides = []
        for name in ("fills", "empties"):
            sides.append(await NixlSide(name, chunks * nbytes, {}).open())
            stack.push_async_callback(sides[-1].close)
        a, b = sides
        assert await a.now(a.fabric.connect(b.metadata)) == "empties"
        if known:
            assert await b.now(b.fabric.connect(a.metadata)) == "fills"
        a.buffer[:] = np.random.default_rng(1).integers(1, 256, a.buffer.nbytes)
        target = np.zeros_like(a.buffer)
        ended = [loop.create_future() for _ in sides]
        gathers, scatters = [], []
        for chunk in range(chunks):
            place = b.buffer.ctypes.data + chunk % places * nbytes
            rows = [pieces((at, nbytes)) for at in (a.buffer.ctypes.data + chunk * nbytes, place)]
            here, there = (Descriptors("DRAM", 0, row) for row in rows)
            post = Post("empties", Operation.WRITE, here, there)
            gathers.append(CopyJob(None, post=post))
            where = place, target.ctypes.data + chunk * nbytes
            plan = contiguous_rows(*where, rows=1, regions=1, row_bytes=nbytes, pool=1, flat="both")
            scatters.append(CopyJob(packed(plan)))
        common = Post("empties", Operation.WRITE, NO_PIECES, NO_PIECES)
        flow = a.mover.flow(
            CopyJob(None, ended[0].set_result, post=common),
            GATHER,
            gathers,
            total=chunks,
            allowed=chunks,
            turns=Turns(places, 7, TOKEN, "empties"),
            progress=lambda _: None,
        )
        b.mover.flow(
            CopyJob(None, ended[1].set_result),
            SCATTER,
            scatters,
            total=chunks,
            allowed=chunks,
            turns=Turns(places, 7, TOKEN, "fills"),
            progress=lambda told: None if known else a.mover.note_peer_steps(flow, told.steps),
        )
        async with asyncio.timeout(20):
            outcomes = await asyncio.gather(*ended)
        assert [(ending(one), one.steps) for one in outcomes] == [(Outcome.DONE, chunks)] * 2
        np.testing.assert_array_equal(target, a.buffer)
        assert (b.mover.unknown_notifications, a.mover.failure(), b.mover.failure()) == (0, None, None)
