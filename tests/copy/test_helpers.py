"""Threads that copy beside the mover: every byte once, and nothing goes on after it was said to be over."""

import asyncio
import os
import threading
import time
from functools import partial

import numpy as np
import pytest
from copy_plans import CANARY, contiguous_rows, expected, random_plan
from packing import copy_parts, packed
from stepped import Reports, World, until

from kvxfer.copy import records
from kvxfer.copy.mover import Mover, usual_threads
from kvxfer.copy.port import CopyJob, Direction
from kvxfer.runtime import ThreadRuntime
from kvxfer.safety.fence import FIRST_GENERATION, LockFile, PeerGate, Permit, Revoked

MIB = 1 << 20
SRC = np.random.default_rng(5).integers(0, 256, 8 * MIB, dtype=np.uint8)
DST = np.zeros_like(SRC)


class Copies:
    """A mover with helpers, and copies that are compared byte by byte."""

    def __init__(self, threads, **options):
        self.before = {*threading.enumerate()}
        self.mover = Mover(ThreadRuntime(), threads=threads, **options)

    def helpers(self):
        return [one for one in threading.enumerate() if one.name == "kvxfer-copy" and one not in self.before]

    async def run(self, plan, nbytes=8 * MIB):
        dst = DST[:nbytes]
        dst[:] = CANARY
        want, reports = expected(plan, SRC, SRC.ctypes.data, dst, dst.ctypes.data), Reports()
        self.mover.submit(CopyJob(packed(plan), reports("a")), Direction.GATHER)
        outcome = (await reports.wait(1))["a"]
        assert (dst == want).all()
        assert (outcome.error, outcome.stopped) == (None, False)

    async def copy(self, *, rows=128, row_bytes=32 << 10, seed=0):
        """Blocks in a random order."""
        rng, at = np.random.default_rng(seed), (SRC.ctypes.data, DST.ctypes.data)
        plan = contiguous_rows(*at, rows=rows, regions=2, row_bytes=row_bytes, pool=rows, rng=rng)
        await self.run(plan, 2 * rows * row_bytes)

    async def close(self):
        assert await self.mover.close(10)
        until = time.monotonic() + 10
        while self.helpers():
            assert time.monotonic() < until
            await asyncio.sleep(0.001)


@pytest.fixture
async def copies():
    copies = Copies(3)
    yield copies
    await copies.close()


def parts_of_at_most(monkeypatch, part_bytes):
    """Cut copies into smaller parts, and have all of them wake everybody."""
    monkeypatch.setattr("kvxfer.copy.template.PART_BYTES", part_bytes)


def copied(thread):
    """CPU seconds of a thread."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


@pytest.mark.parametrize(
    ("rows", "row_bytes", "others"),
    [
        (128, 32 << 10, 2),  # 8 MiB
        (1, 2 * MIB, 1),  # two items
        (64, 16 << 10, 1),  # 2 MiB
        (63, 16 << 10, 0),  # no thread is woken for less than a MiB
        (1, 16, 0),
    ],
)
async def test_copies_are_shared_as_far_as_that_pays(copies, rows, row_bytes, others):
    await copies.copy(rows=rows, row_bytes=row_bytes)
    assert len(copies.helpers()) == others


async def test_the_others_copy_too(copies):
    await copies.copy()
    before, until = [copied(thread) for thread in copies.helpers()], time.monotonic() + 30
    while any(copied(thread) < least + 0.002 for thread, least in zip(copies.helpers(), before, strict=True)):
        await copies.copy()
        assert time.monotonic() < until


async def test_random_plans_in_the_smallest_parts_equal_their_pieces(copies, monkeypatch):
    parts_of_at_most(monkeypatch, 1)
    for seed in range(60):
        await copies.run(random_plan(seed, SRC.ctypes.data, DST.ctypes.data, MIB)[0], MIB)
    assert len(copies.helpers()) == 2


@pytest.mark.parametrize("part_bytes", [1, 3 << 10])
async def test_copies_one_after_the_other_share_nothing_but_the_threads(copies, monkeypatch, part_bytes):
    """Whoever comes late to one finds the next, of another size, or nothing."""
    parts_of_at_most(monkeypatch, part_bytes)
    for seed in range(100):
        await copies.copy(rows=1 + seed % 7, row_bytes=(1 << 10) + seed, seed=seed)


def begun(mover, copy, reports):
    machine = mover._machine
    return reports.outcomes or records.RUNNING in machine.jobs[machine.steps_of(copy.slot), records.STATE]


async def test_what_is_cancelled_is_over_when_it_is_told(copies, monkeypatch):
    """Whoever had begun a part has ended it by then, and nobody begins one."""
    parts_of_at_most(monkeypatch, 4096)
    rows = 8 * MIB // 16  # slow enough that it is caught by one core for all threads
    src, dst = SRC, DST
    plan = contiguous_rows(src.ctypes.data, dst.ctypes.data, rows=rows, regions=1, row_bytes=16, pool=rows, flat="both")
    tables, cut = packed(plan), 0
    for number in range(1000):
        dst[:] = CANARY
        reports = Reports()
        copy = copies.mover.submit(CopyJob(tables, reports(number)), Direction.GATHER)
        await until(partial(begun, copies.mover, copy, reports), 0)
        copies.mover.cancel(copy)
        outcome = (await reports.wait(1))[number]
        found = (dst == src).reshape(rows, 16).all(axis=1)
        dst[:] = CANARY
        assert outcome.stopped or found.all()
        if outcome.stopped and found.any():
            cut += 1
            assert found[int(found.argmax()) :].all(), "parts are taken from the end, and each is copied as a whole"
        assert (dst == CANARY).all()
        if cut == 10:
            break
    assert cut, "none was caught in its midst"


async def test_a_part_that_a_helper_has_begun_is_waited_for_and_so_is_its_lock(monkeypatch):
    """The test takes a part as a helper does, and is slow with it."""
    parts_of_at_most(monkeypatch, 1)
    world, file = World(), LockFile(1)
    key = PeerGate(file.handle)
    copy = world.submit("a", passage=Permit(key, 0, FIRST_GENERATION))
    world.step()
    state = world.machine.state
    assert state[records.TEAM] == 3, "parts that nobody has taken"
    state[records.TEAM] = 2
    for _ in range(5):
        world.step()
    world.mover.cancel(copy)
    world.step()
    assert state[records.TEAM] == 0
    assert (world.order, file.revoke(0)) == ([], None)
    (step,) = world.machine.steps_of(copy.slot)
    copy_parts(int(world.machine.jobs[step, records.PARTS]), 2, 3)
    state[records.TEAM + 1] += 1
    world.step()
    assert world.reports.kinds() == {"a": "done"}, "when it was cancelled, nothing was left to be taken"
    assert world.written()
    assert file.revoke(0) is Revoked.IDLE
    await world.close()
    key.close()
    file.close()


@pytest.mark.parametrize("most", [0, 1])
async def test_it_is_done_where_no_more_threads_can_be_started(copies, monkeypatch, most):
    started, begun = threading.Thread.start, []

    def few_only(thread):
        if len(begun) == most:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", few_only)
    await copies.copy()
    assert len(copies.helpers()) == most
    monkeypatch.undo()
    await copies.copy()
    assert len(copies.helpers()) == 2


async def test_the_others_give_way_to_the_loop_and_stay_where_they_are_put():
    cpu, before = min(os.sched_getaffinity(0)), (os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0))
    copies, until = Copies(2, cpus=frozenset({cpu})), time.monotonic() + 10
    await copies.copy()
    (other,) = [thread.native_id or 0 for thread in copies.helpers()]

    def settled():
        niceness = os.getpriority(os.PRIO_PROCESS, other)
        return os.sched_getaffinity(other) == {cpu} and niceness == min(19, before[1] + 5)

    while not settled():
        await copies.copy()
        assert time.monotonic() < until
    await copies.close()
    assert (os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)) == before


@pytest.mark.parametrize(("cpus", "threads"), [(0, 1), (2, 1), (7, 1), (8, 2), (16, 4), (200, 8)])
def test_most_cpus_are_left_to_the_model(monkeypatch, cpus, threads):
    monkeypatch.setattr("kvxfer.copy.mover.allowed_cpus", lambda: frozenset(range(cpus)))
    assert usual_threads(frozenset()) == threads


def test_threads_that_are_kept_on_few_cpus_are_few(monkeypatch):
    monkeypatch.setattr("kvxfer.copy.mover.allowed_cpus", lambda: frozenset(range(64)))
    assert usual_threads(frozenset({0, 1})) == 1
