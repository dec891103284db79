"""The mover: every copy once and told once, whatever is cancelled, revoked, closed, forked or ended meanwhile."""

import asyncio
import errno
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from copy_plans import CANARY, contiguous_rows, expected
from packing import packed, variants
from stepped import Flag, Reports, World, kind, until

from kvxfer.copy import records
from kvxfer.copy.mover import _POKE, Mover, _machines
from kvxfer.copy.port import READY, CopyJob, Direction, Native
from kvxfer.errors import ClosedError, FabricError
from kvxfer.runtime import ThreadRuntime
from kvxfer.safety.fence import FIRST_GENERATION, Permit

ROOT = Path(__file__).parent.parent.parent
MIB = 1 << 20
SRC = np.random.default_rng(7).integers(0, 256, MIB, dtype=np.uint8)


def canvas():
    return np.full(MIB, CANARY, np.uint8)


def small_plan(dst):
    return contiguous_rows(SRC.ctypes.data, dst.ctypes.data, rows=4, regions=1, row_bytes=4096, pool=4)


@pytest.fixture
async def mover():
    mover = Mover(ThreadRuntime())
    yield mover
    assert await mover.close(10)


@pytest.fixture
async def abandoned():
    """The same, which is not expected to end."""
    world = World()
    yield world
    world.mover._end()


@pytest.fixture
async def tiny_parts(monkeypatch):
    """Copies are cut into their rows."""
    monkeypatch.setattr("kvxfer.copy.template.PART_BYTES", 1)


# --- in its thread


async def test_a_copy_is_done_when_its_bytes_are_there_and_only_once(mover):
    dst, reports = canvas(), Reports()
    plan = small_plan(dst)
    mover.warm(variants([plan]))
    mover.submit(CopyJob(packed(plan), reports("a")), Direction.GATHER)
    assert reports.outcomes == {}, "it is never told at once"
    outcome = (await reports.wait(1))["a"]
    assert (kind(outcome), outcome.sums) == ("done", b"")
    assert outcome.copying > 0
    np.testing.assert_array_equal(dst, expected(plan, SRC, SRC.ctypes.data, canvas(), dst.ctypes.data))


@pytest.mark.parametrize("direction", list(Direction))
async def test_an_event_that_has_not_happened_holds_up_nobody(mover, direction):
    first, second, reports, flag = canvas(), canvas(), Reports(), Flag()
    mover.submit(CopyJob(packed(small_plan(first)), reports("late"), flag), direction)
    assert len(mover._asked.steps) == 1
    mover.submit(CopyJob(packed(small_plan(second)), reports("ready"), READY), direction)
    await reports.wait(1)
    asked = flag.asked
    await until(lambda: flag.asked >= asked + 3)
    assert reports.order == ["ready"]
    assert (first == CANARY).all(), "nothing is copied before its event"
    flag.fired = True
    await reports.wait(2)
    assert reports.order == ["ready", "late"]
    assert (first != CANARY).any()
    assert len(mover._asked.steps) == 0


def descriptors():
    return {*Path("/proc/self/fd").iterdir()}


async def test_events_that_fail_are_outcomes_of_their_copies(mover):
    class Unanswerable:
        """Says something that is neither true nor false."""

        def query(self):
            return np.array([0, 1])

    dst, reports = canvas(), Reports()
    tables = packed(small_plan(dst))
    failing = {
        "event": Flag(RuntimeError("device gone")),
        "answer": cast("Any", Unanswerable()),
        "own error": Flag(ClosedError("gone")),
        "good": READY,
    }
    for name, after in failing.items():
        mover.submit(CopyJob(tables, reports(name), after), Direction.GATHER)
    outcomes = await reports.wait(4)
    assert reports.kinds() == {
        "event": "TransferFailedError",
        "answer": "TransferFailedError",
        "own error": "ClosedError",
        "good": "done",
    }
    assert "device gone" in str(outcomes["event"].error)
    assert "ambiguous" in str(outcomes["answer"].error)


@pytest.mark.parametrize("error", [RuntimeError("not mine"), asyncio.CancelledError("not mine")], ids=repr)
async def test_a_report_that_raises_strands_nobody(world, error):
    """Of copies that ended, and of one whose event failed; others are told behind it."""
    seen = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: seen.append(context["exception"]))

    def done(outcome):
        raise error

    for name in ("before", "after"):
        world.mover.submit(CopyJob(packed(world.plan()), done), Direction.GATHER)
        world.submit(name)
    for _ in range(8):  # all of them are in the pipe when it is read
        world.machine.step()
    await world.settle()
    assert world.order == ["before", "after"]
    assert seen == [error] * 2
    world.mover.submit(CopyJob(packed(world.plan()), done, Flag(RuntimeError("event"))), Direction.GATHER)
    world.submit("fails", after=Flag(RuntimeError("another")))
    await world.settle()
    assert kind(world.outcomes["fails"]) == "TransferFailedError"
    assert seen == [error] * 3


async def test_a_signal_that_interrupts_a_report_strands_nobody(world):
    def done(outcome):
        raise KeyboardInterrupt

    world.mover.submit(CopyJob(packed(world.plan()), done), Direction.GATHER)
    world.submit("after")
    for _ in range(8):  # both are in the pipe when it is read
        world.machine.step()
    with pytest.raises(KeyboardInterrupt):
        world.mover._read_events()
    await world.settle()
    assert world.order == ["after"]


async def test_records_wait_for_room_in_the_pipe_and_keep_their_order(world):
    """The machine stands still meanwhile, as behind a call of a driver: the loop does not."""
    for number in range(700):
        world.submit(number)
    copy = world.submit("cancelled")
    world.mover.cancel(copy)
    assert len(world.machine._unsent) > 100
    await world.run(701)
    assert world.order[-1] == "cancelled" or kind(world.outcomes["cancelled"]) == "stopped"
    assert [name for name in world.order if name != "cancelled"] == list(range(700))
    assert len(world.machine._unsent) == 0


async def test_a_thread_that_wants_the_interpreter_does_not_get_it_from_the_pipes(mover):
    """What gives it up for a call has it again only when that thread gives it up, or has had it for 5 ms."""
    turns, over, interval = [], threading.Event(), sys.getswitchinterval()

    def want():
        while not over.is_set():
            turns.append(None)
            time.sleep(0)

    other = threading.Thread(target=want)
    sys.setswitchinterval(60)
    try:
        other.start()
        await until(lambda: turns)
        before = len(turns)
        for _ in range(100):  # for which there is room in the pipe
            mover._machine.send(_POKE)
            mover._read_events()
        assert len(turns) == before
    finally:
        sys.setswitchinterval(interval)
        over.set()
        other.join()


async def test_the_functions_of_an_agent_are_there_until_the_machine_has_surely_read_of_the_next(world):
    tables = []
    for _ in range(3):
        table = np.zeros(records.PORTS - records.AGENT_PORTS, np.int64)
        tables.append(weakref.ref(table))
        world.mover.attach(Native(table, 0, 0, lambda *_: FabricError("nobody asks")), anew=True)
        del table
    assert [table() is not None for table in tables] == [False, True, True]


# --- leases and cancelling


async def test_a_copy_whose_cancelling_waits_for_room_in_the_pipe_may_be_copied_yet(world):
    """The machine stands still, and will read of the copy first."""
    copy = world.submit("cancelled")
    for number in range(300):
        world.submit(number)
    world.mover.cancel(copy)
    may_copy = world.mover.may_copy(copy)
    await world.run(301)
    assert may_copy or kind(world.outcomes["cancelled"]) == "stopped"


async def test_cancelled_while_its_event_is_waited_for(world):
    flag, other = Flag(), Flag()
    copy = world.submit("a", after=flag)
    world.submit("b", after=other, at=4096)
    await world.settle()
    world.mover.cancel(copy)
    assert world.order == [], "its end is not told at once"
    await world.settle()
    assert world.reports.kinds() == {"a": "stopped"}
    flag.fired = other.fired = True
    asked = flag.asked
    while len(world.order) < 2:
        world.step()
        await asyncio.sleep(0.001)
    assert flag.asked == asked
    assert not world.written()
    assert world.written(at=4096)


async def test_cancelled_by_the_report_of_another_while_events_are_asked(world):
    """Both wait; the first one's event fails, and whoever hears of that wants the second one no more."""
    never = Flag()

    def done(outcome):
        world.mover.cancel(second)

    world.mover.submit(CopyJob(packed(world.plan()), done, Flag(RuntimeError("gone"))), Direction.GATHER)
    second = world.submit("second", after=never)
    await world.settle()
    assert world.reports.kinds() == {"second": "stopped"}


async def test_cancelled_in_the_queue_and_in_the_machine(world):
    copies = [world.submit(number) for number in range(records.JOBS)]
    queued = [world.submit(name, at=4096) for name in ("first", "second", "third")]
    world.mover.cancel(queued[1])
    world.mover.cancel(copies[5])
    await world.settle()
    assert world.reports.kinds() == {"second": "stopped"}
    await world.run(records.JOBS + 3)
    assert [name for name in world.order if isinstance(name, str)] == ["second", "first", "third"]
    stopped = {name for name, what in world.reports.kinds().items() if what == "stopped"}
    assert stopped <= {"second", 5}


async def test_cancelled_when_it_is_over(world, tiny_parts):
    copy = world.submit("a")
    for _ in range(4):
        world.machine.step()
    world.mover.cancel(copy)  # before the loop has read how it ended
    world.machine.step()
    await world.run(1)
    assert kind(world.outcomes["a"]) == "done"
    world.mover.cancel(copy)
    again = world.submit("b", at=4096)
    assert again.slot == copy.slot, "the next one is in its row"
    world.mover.cancel(copy)
    await world.run(2)
    assert kind(world.outcomes["b"]) == "done"


# --- closing


async def test_close_finishes_what_was_asked_for_and_refuses_more():
    mover, dst, reports = Mover(ThreadRuntime()), canvas(), Reports()
    for number in range(20):
        mover.submit(CopyJob(packed(small_plan(dst)), reports(number)), Direction.SCATTER)
    assert await mover.close(10)
    assert sorted(reports.order) == list(range(20))
    assert await mover.close(10)
    with pytest.raises(ClosedError):
        mover.submit(CopyJob(packed(small_plan(dst)), reports("late")), Direction.SCATTER)
    assert "late" not in reports.outcomes


async def test_close_reports_what_never_could_begin(world):
    """For want of an event, of a row, or of a turn."""
    world.submit("stuck", after=Flag())
    for number in range(records.JOBS + 1):
        world.submit(number)
    assert not await world.mover.close(0.0)
    with pytest.raises(ClosedError):
        world.submit("late")
    await world.settle()
    assert world.reports.kinds() == {"stuck": "ClosedError", records.JOBS: "ClosedError"}
    await world.run(records.JOBS + 2)
    assert {"ClosedError"} <= set(world.reports.kinds().values()) <= {"ClosedError", "done"}
    assert await world.mover.close(1.0)


async def test_close_does_not_leave_descriptors_or_threads_behind():
    before = descriptors(), {*threading.enumerate()}
    for _ in range(3):
        mover = Mover(ThreadRuntime(), threads=2)
        reports, dst = Reports(), np.empty(4 * MIB, np.uint8)
        plan = contiguous_rows(dst.ctypes.data, dst.ctypes.data + 2 * MIB, rows=32, regions=1, row_bytes=65536, pool=32)
        mover.submit(CopyJob(packed(plan), reports("a")), Direction.GATHER)
        assert await mover.close(10)
    await until(
        lambda: not [one for one in threading.enumerate() if one.name == "kvxfer-copy" and one not in before[1]]
    )
    assert (descriptors(), {*threading.enumerate()}) == before


@pytest.mark.parametrize("most", [0, 1])
async def test_where_the_system_gives_no_pipes_nothing_is_left(monkeypatch, most):
    made, before = [], descriptors()
    pipe = os.pipe2

    def few(flags):
        if len(made) == most:
            raise OSError(errno.EMFILE, "Too many open files")
        made.append(pipe(flags))
        return made[-1]

    monkeypatch.setattr(os, "pipe2", few)
    with pytest.raises(FabricError, match=r"no pipes: .*Too many open files"):
        Mover(ThreadRuntime())
    assert descriptors() == before


async def test_where_no_thread_can_be_started_nothing_is_left(monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    before, machines = descriptors(), set(_machines)
    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(FabricError, match="can't start new thread"):
        Mover(ThreadRuntime())
    assert (descriptors(), set(_machines)) == (before, machines)


# --- passages


async def test_an_owner_who_is_at_it_keeps_a_copy_out(world, gate):
    import fcntl
    import struct

    file, key = gate
    locked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 3, 1, 0)
    fcntl.fcntl(file._descriptor, fcntl.F_OFD_SETLK, locked)
    world.submit("a", passage=Permit(key, 3, FIRST_GENERATION))
    await world.run(1)
    assert kind(world.outcomes["a"]) == "stopped"
    fcntl.fcntl(file._descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_UNLCK, os.SEEK_SET, 3, 1, 0))
    world.submit("b", passage=Permit(key, 3, FIRST_GENERATION))
    await world.run(2)
    assert kind(world.outcomes["b"]) == "done"


async def test_a_key_that_is_gone_stops_its_copies_and_nobody_else(abandoned, gate):
    """A copy still waited for its event when the peer's memory was given up."""
    _, key = gate
    flag, never = Flag(), Flag()
    abandoned.submit("late", after=flag, passage=Permit(key, 3, FIRST_GENERATION))
    abandoned.submit("other", after=never, at=4096)
    key.close()
    assert key._pages.closed
    flag.fired = True
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # of what is not asserted here
    await abandoned.settle()
    never.fired = True
    async with asyncio.timeout(1):
        while len(abandoned.order) < 2:
            abandoned.step()
            await asyncio.sleep(0.001)
    assert kind(abandoned.outcomes["late"]) != "done"
    assert kind(abandoned.outcomes["other"]) == "done"


# --- processes


SCENE = """
import asyncio, os, sys, time
import numpy as np
sys.path[:0] = {path!r}
from copy_plans import contiguous_rows
from packing import packed
from stepped import Flag, Reports
from kvxfer.copy import records
from kvxfer.copy.port import CopyJob, Direction
from kvxfer.copy.mover import Mover
from kvxfer.runtime import ThreadRuntime
MIB = 1 << 20
def plan(src, dst, rows, row_bytes, regions=1):
    at = src.ctypes.data, dst.ctypes.data
    return packed(contiguous_rows(*at, rows=rows, regions=regions, row_bytes=row_bytes, pool=rows))
{body}
"""


def played(body):
    """A process that ends by itself, in time."""
    path = [str(ROOT), str(Path(__file__).parent), *sys.path]
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SCENE.format(path=path, body=body)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stdout + done.stderr)
    assert "Traceback" not in done.stderr
    return done.stdout


FORKED = """
async def anew():
    mover, reports = Mover(ThreadRuntime(), threads=2), Reports()
    src, dst = np.ones(4 * MIB, np.uint8), np.zeros(4 * MIB, np.uint8)
    mover.submit(CopyJob(plan(src, dst, 64, 65536), reports("a")), Direction.GATHER)
    await reports.wait(1)
    assert dst.all()
    assert await mover.close(10)

async def main():
    mover, reports = Mover(ThreadRuntime(), threads=2), Reports()
    src, dst = np.ones(4 * MIB, np.uint8), np.zeros(4 * MIB, np.uint8)
    mover.submit(CopyJob(plan(src, dst, 64, 65536), reports("before")), Direction.GATHER)
    await reports.wait(1)
    pipes = list(mover._machine._descriptors)
    child = os.fork()
    if not child:
        try:
            for one in pipes:
                try:
                    os.fstat(one)
                except OSError:
                    continue
                os._exit(1)
            asyncio.run(anew())
            os._exit(0)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dst[:] = 0
    mover.submit(CopyJob(plan(src, dst, 64, 65536), reports("after")), Direction.GATHER)
    await reports.wait(2)
    assert dst.all()
    assert await mover.close(10)
asyncio.run(main())
print("played")
"""


def test_a_forked_child_has_neither_pipes_nor_threads_of_it():
    assert "played" in played(FORKED)


EXIT = """
src, dst = np.ones(256 * MIB, np.uint8), np.zeros(256 * MIB, np.uint8)
def row(mover):
    return mover._machine.jobs[records.ROWS - 1]
async def main():
{body}
asyncio.run(main())
began = time.monotonic()
import atexit
atexit._run_exitfuncs()
print("took", time.monotonic() - began)
del src, dst
"""
SMALL = """
    global movers
    movers = [Mover(ThreadRuntime(), threads=3) for _ in range(3)]
    stuck, many, over = movers
    stuck.submit(CopyJob(plan(src, dst, 1, 64), print, Flag()), Direction.GATHER)
    for number in range(1000):
        many.submit(CopyJob(plan(src, dst, 1, 64), print), Direction.GATHER)
    over.submit(CopyJob(plan(src, dst, 1, 64), print), Direction.GATHER)
    while row(over)[records.STATE] or not row(over)[records.FINISHED]:
        pass
"""
LARGE = """
    global mover
    mover = Mover(ThreadRuntime(), threads={threads})
    mover.submit(CopyJob(plan(src, dst, 256, MIB), print), Direction.GATHER)
    while not (row(mover)[records.STARTED] or row(mover)[records.FINISHED]):  # the first is 0 once it was told
        pass
"""


def ends_soon(body):
    assert float(played(EXIT.format(body=body)).split("took")[1]) < 1.5


def test_a_process_that_ends_without_closing_it_ends_soon():
    """One waits for an event, one has more to do than its pipe takes, of one nobody has heard that it is done."""
    ends_soon(SMALL)


def test_the_machine_has_what_it_reads_also_when_nobody_has_its_mover_any_more():
    """A loop that ended under a mover has forgotten it, and the machine has not: it takes the record from the pipe."""

    async def scene():
        world = World()
        copy = world.submit("a")
        return world.machine, weakref.ref(copy.refs[0].kept[0].out)

    machine, parts = asyncio.run(scene())
    try:
        gc.collect()
        assert parts() is not None
    finally:
        _machines.discard(machine)
        machine.close()


def test_a_process_that_ends_under_a_large_copy_ends_soon():
    """And nothing of it goes on while memory is taken down."""
    ends_soon(LARGE.format(threads=3))


def test_a_simulation_that_was_not_closed_does_not_disturb_the_end_of_its_process():
    scene = """
from kvxfer.testing import simulate
async def scenario(runtime):
    Mover(runtime)
    await asyncio.sleep(1)
simulate(scenario)
simulate(scenario)
"""
    played(scene)


ENDS = """
import asyncio, atexit, select, threading, time

read = threading.Event()
atexit.register(read.wait, 60)  # others have something to do at the end too

from kvxfer.copy.port import CopyJob, Direction
from kvxfer.copy.mover import Mover
from kvxfer.runtime import ThreadRuntime

begun, loop, broken = threading.Event(), asyncio.new_event_loop(), []
loop.set_exception_handler(lambda _, context: broken.append(context["exception"]))

def begin():
    mover = Mover(ThreadRuntime())
    mover.submit(CopyJob(None), Direction.GATHER)
    select.select([mover._machine.news], [], [])  # the machine has done it, and says so
    loop.call_soon(stand_still)
    loop.call_later(0, lambda: loop.call_soon(read.set))

def stand_still():  # in the turn in which it is to be read
    begun.set()
    time.sleep(1)

loop.call_soon(begin)
threading.Thread(target=loop.run_forever, daemon=True).start()
begun.wait()
atexit.register(lambda: print("ends"))
atexit._run_exitfuncs()
print(broken)
"""


def test_a_loop_in_another_thread_reads_on_while_the_process_ends():
    """What it reads from is not closed, nor another file by then that has got its number."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["ends", "[]"]), done.stderr
