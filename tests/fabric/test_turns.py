"""Flows that take turns: one fills places in a peer's memory, the peer's own empties them, told by notifications."""

import asyncio
import contextlib
import importlib.util
import struct
import threading

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


def other(direction: Direction) -> Direction:
    return SCATTER if direction is GATHER else GATHER


class Side(Moving):
    """A mover over an agent of a network, and one flow of it."""

    begun_flow: Flow

    def __init__(self, name: str, network: LoopbackNetwork, **settings) -> None:
        super().__init__(**settings)
        self.transport = LoopbackTransport(name, network)
        self.transport.setup()
        self.mover.attach(self.transport.native())
        self.counts: list[int] = []  # how many of its steps were done, each time that this was told
        self.peers: dict[str, LoopbackTransport] = {}  # agents that say what the test says

    def flow(self, direction, steps=None, *, turns=None, total=STEPS, allowed=None, post=None, **options) -> None:
        """Begin it; its steps do nothing unless there are others."""
        self.results["x"] = []
        job = CopyJob(None, self.results["x"].append, owner="x", post=post)
        turns = turns or Turns(PLACES, token=TOKEN, agent="b")
        made = [CopyJob(None)] * total if steps is None else steps
        allowed = total if allowed is None else allowed

        def told(outcome):
            self.counts.append(outcome.steps)

        self.begun_flow = self.mover.flow(
            job, direction, made, total=total, allowed=allowed, turns=turns, progress=told, **options
        )

    def hear(self, steps: int) -> None:
        self.mover.note_peer_steps(self.begun_flow, steps)

    def word(self, word: int) -> int:
        return int(self.machine.jobs[self.begun_flow.slot][word])

    @property
    def done(self) -> int:
        """How many steps are."""
        return self.results["x"][0].steps if self.results["x"] else self.word(records.PASSED)

    async def end(self) -> None:
        await super().end()
        assert self.state[records.LISTENING] == 0
        self.transport.close()


@pytest.fixture
async def side(network):
    """A mover over agent "a", beside two agents that notify it of what the test says."""
    side = Side("a", network)
    for name in "bc":
        side.peers[name] = LoopbackTransport(name, network)
        side.peers[name].setup()
    yield side
    await side.end()


def say(side: Side, message: bytes, *, by: str = "b") -> None:
    """An agent notifies it of something, and it hears that."""
    side.peers[by].notify("a", message)
    side.step(4)


def told(side: Side, *, whom: str = "b") -> list[tuple[str, bytes]]:
    """What it has notified an agent of, since this was asked last."""
    return side.peers[whom].heard()


@pytest.mark.parametrize(("allowed", "heard"), [(STEPS, [1, STEPS - 1]), (STEPS - 1, [1, 4, 6, STEPS - 1])])
async def test_a_loop_hears_of_half_while_it_may_let_more_begin_and_else_once_in_a_while(side, allowed, heard):
    side.flow(SCATTER, allowed=allowed)
    for steps in range(1, STEPS):
        say(side, note(steps, GATHER))
    side.runtime.time += 0.025
    side.step(4)
    assert (side.done, side.counts) == (STEPS - 1, heard)
    side.mover.cancel(side.begun_flow)


# ---- what is said ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["notified", "heard"])
async def test_no_more_is_emptied_at_once_than_there_are_places_though_more_is_claimed(side, how):
    side.flow(SCATTER)
    side.step()
    if how == "notified":
        side.peers["b"].notify("a", note(1 << 40, GATHER))
        side.step()  # it hears that behind its own work
    else:
        side.hear(1 << 40)
    for done in (PLACES, 2 * PLACES, STEPS):
        side.step()
        assert side.done == done
    side.step(2)
    assert ending(side.result()) is Outcome.DONE


@pytest.mark.parametrize("token", [b"", bytes(16), bytes(8) + bytes(range(8))])
@pytest.mark.parametrize("direction", list(Direction))
async def test_without_a_token_nobody_is_notified_and_nobody_heeded(side, direction, token):
    side.flow(direction, turns=Turns(PLACES, 0, token, "b"))
    side.step(4)
    before = side.done
    release = side.mover.hold_awake()
    say(side, note(2, other(direction), token.ljust(16, b"\0")))
    assert (side.done, side.word(records.HEARD), side.mover.unknown_notifications) == (before, 0, 1)
    side.hear(2)
    side.step(4)
    assert side.done == before + 2
    assert told(side) == []
    release()


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(
    "wrong",
    ["token", "end of the token", "no token", "direction", "agent", "longer name", "shorter name", 0, 8, 23, 25, 48],
)
async def test_what_does_not_concern_a_flow_is_counted_and_changes_nothing(side, network, direction, wrong):
    name = "bb" if wrong == "shorter name" else "b"
    side.flow(direction, turns=Turns(PLACES, 0, TOKEN, name))
    side.step(4)
    before, by = side.done, "b"
    right = message = note(2, other(direction))
    if wrong == "token":
        message = bytes([TOKEN[0] ^ 1]) + right[1:]
    elif wrong == "end of the token":
        message = right[:15] + bytes([TOKEN[15] ^ 1]) + right[16:]
    elif wrong == "no token":
        message = bytes(16) + right[16:]
    elif wrong == "direction":
        message = note(2, direction)
    elif wrong == "agent":
        by = "c"
    elif wrong == "longer name":
        by, side.peers["bb"] = "bb", LoopbackTransport("bb", network)
        side.peers["bb"].setup()
    elif isinstance(wrong, int):
        message = (right * 2)[:wrong]
    for count in (1, 2):
        say(side, message, by=by)
        assert (side.done, side.word(records.HEARD), side.mover.unknown_notifications) == (before, 0, count)
    if name == "b":
        say(side, right)
        assert (side.done, side.word(records.HEARD), side.mover.unknown_notifications) == (before + 2, 2, 2)


@pytest.mark.parametrize("direction", list(Direction))
async def test_what_nobody_can_have_done_changes_nothing(side, direction):
    """Counts before the first one, and those that a signed word has as negative."""
    side.flow(direction, turns=Turns(PLACES, 9, TOKEN, "b"))
    side.step(4)
    before = side.done
    for steps in (0, 8, 9, (1 << 63) - 1, 1 << 62):
        say(side, note(steps, other(direction)))
        assert (side.done, side.word(records.HEARD)) == (before, 0)


@pytest.mark.parametrize("direction", list(Direction))
async def test_while_another_thread_calls_the_agent_nothing_is_said_and_later_all_of_it(side, direction):
    side.flow(direction)
    side.step(2)
    said = told(side)
    claims: list[bool] = []

    def claim() -> None:
        claims.append(side.mover.acquire_agent())

    thread = threading.Thread(target=claim)
    thread.start()
    thread.join()
    assert claims == [True]
    done = side.done
    for steps in (1, 2, 4):
        side.hear(steps)
        side.peers["b"].notify("a", note(5, other(direction)))
        side.step(4)
    assert side.done == done + 4, "its own work goes on, and it has not heard of a fifth"
    assert told(side) == []
    side.mover.release_agent()
    side.step()
    assert told(side)[:1] == [("a", note(done + 4, direction))], "once, for all of them"
    side.step(4)
    assert side.done == done + 5
    assert len(said) == done


async def test_who_cannot_be_notified_hears_it_of_the_loops(side):
    """Neither does the flow fail, nor the agent."""
    side.flow(GATHER, turns=Turns(PLACES, 0, TOKEN, "nobody"))
    side.step(4)
    side.hear(STEPS)
    side.step(8)
    assert ending(side.result()) is Outcome.DONE
    assert side.mover.failure() is None


async def test_a_flow_without_an_agent_goes_by_what_the_loops_say(side):
    side.mover.attach(None)
    side.flow(SCATTER)
    side.step(4)
    side.hear(2)
    side.step(4)
    assert side.done == 2
    side.mover.attach(side.transport.native())
    side.step(4)
    assert told(side) == [("a", note(2, SCATTER))], "with an agent it is said"


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
