"""Threads that copy side by side: every byte once, and nothing goes on after it was said to be over."""

import os
import threading
import time

import numpy as np
import pytest
from copy_plans import CANARY, contiguous_rows, expected

from kvxfer.copy.tables import pack
from kvxfer.copy.team import ALONE, Team, usual_threads

MIB = 1 << 20
SRC = np.random.default_rng(5).integers(0, 256, 8 * MIB, dtype=np.uint8)
DST = np.zeros_like(SRC)


def helpers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvxfer-copy")]


@pytest.fixture
def team():
    team = Team(3)
    yield team
    team.close()
    assert not helpers()


def copy(team, *, rows=128, row_bytes=32 << 10, seed=0):
    """Copy blocks in a random order, and compare every byte."""
    DST[:] = CANARY
    rng, at = np.random.default_rng(seed), (SRC.ctypes.data, DST.ctypes.data)
    plan = contiguous_rows(*at, rows=rows, regions=2, row_bytes=row_bytes, pool=rows, rng=rng)
    want = expected(plan, SRC, at[0], DST, at[1])
    team.copy(pack(plan))
    np.testing.assert_array_equal(DST, want)


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
def test_copies_are_shared_as_far_as_that_pays(team, rows, row_bytes, others):
    copy(team, rows=rows, row_bytes=row_bytes)
    assert len(helpers()) == others


def test_alone_it_is_the_callers_thread():
    copy(ALONE)
    assert not helpers()
    ALONE.close()


def test_the_others_copy_too(team):
    copy(team)
    before, until = [copied(thread) for thread in helpers()], time.monotonic() + 30
    while any(copied(thread) < least + 0.002 for thread, least in zip(helpers(), before, strict=True)):
        copy(team)
        assert time.monotonic() < until


@pytest.mark.parametrize("part_bytes", [1, 3 << 10, MIB])
def test_copies_one_after_the_other_share_nothing_but_the_threads(team, monkeypatch, part_bytes):
    """Whoever comes late to one finds the next, of another size, or nothing."""
    monkeypatch.setattr("kvxfer.copy.team._PART_BYTES", part_bytes)
    for seed in range(200):
        copy(team, rows=1 + seed % 7, row_bytes=(1 << 10) + seed, seed=seed)


@pytest.mark.parametrize("most", [0, 1])
def test_it_is_done_where_no_more_threads_can_be_started(team, monkeypatch, most):
    started, begun = threading.Thread.start, []

    def few_only(thread):
        if len(begun) == most:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", few_only)
    copy(team)
    assert len(helpers()) == most


def test_who_was_closed_begins_anew(team):
    copy(team)
    team.close()
    assert not helpers()
    copy(team)
    assert len(helpers()) == 2


def test_the_others_give_way_to_the_loop_and_stay_where_they_are_put():
    cpu, before = min(os.sched_getaffinity(0)), (os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0))
    team, until = Team(2, frozenset({cpu})), time.monotonic() + 10
    copy(team)
    (other,) = [thread.native_id or 0 for thread in helpers()]

    def settled():
        niceness = os.getpriority(os.PRIO_PROCESS, other)
        return os.sched_getaffinity(other) == {cpu} and (niceness > before[1] or niceness == 19)

    while not settled():
        copy(team)
        assert time.monotonic() < until
    team.close()
    assert (os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)) == before


@pytest.mark.parametrize(("cpus", "threads"), [(0, 1), (2, 1), (7, 1), (8, 2), (16, 4), (200, 8)])
def test_most_cpus_are_left_to_the_model(monkeypatch, cpus, threads):
    monkeypatch.setattr("kvxfer.copy.team.allowed_cpus", lambda: frozenset(range(cpus)))
    assert usual_threads() == threads
