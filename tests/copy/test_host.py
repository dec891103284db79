"""Copies on CPU memory: every byte that was asked for, no other, and every job reported once."""

import threading
import time
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from copy_plans import (
    CANARY,
    addresses,
    contiguous_rows,
    expected,
    head_split,
    hnd_to_nhd,
    random_plan,
    rows_with_gaps,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxfer.copy import READY, CopyJob, Direction
from kvxfer.copy.host import HostExecutor, run
from kvxfer.copy.team import Team
from kvxfer.errors import ClosedError, KvxferError, TransferFailedError
from kvxfer.geometry.copyplan import Blank, CopyPlan, Segment, Stencil
from kvxfer.runtime import ThreadRuntime

NBYTES = 1 << 20
SRC = np.random.default_rng(7).integers(0, 256, NBYTES, dtype=np.uint8)


def canvas():
    return np.full(NBYTES, CANARY, np.uint8)


@pytest.fixture(params=[1, 3], ids=["alone", "together"])
def team(request, monkeypatch):
    """Which shares whatever has several items."""
    monkeypatch.setattr("kvxfer.copy.team._PART_BYTES", 1)
    team = Team(request.param)
    yield team
    team.close()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_random_plans_equal_their_pieces(team, seed):
    dst = canvas()
    plan, _, _ = random_plan(seed, SRC.ctypes.data, dst.ctypes.data, NBYTES)
    want = expected(plan, SRC, SRC.ctypes.data, dst, dst.ctypes.data)
    run(plan, team)
    np.testing.assert_array_equal(dst, want)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_pieces_are_those_of_the_formula(seed):
    plan, _, _ = random_plan(seed, 0, 0, NBYTES)
    dst = canvas()
    want = expected(plan, SRC, 0, dst, 0)
    for src, to, count in addresses(plan):
        dst[to : to + count] = SRC[src : src + count]
    np.testing.assert_array_equal(dst, want)


@pytest.mark.parametrize("flat", ["", "src", "dst"])
@pytest.mark.parametrize(
    "make",
    [
        lambda *at, flat: contiguous_rows(*at, rows=5, regions=2, row_bytes=32768, pool=8, flat=flat),
        lambda *at, flat: contiguous_rows(*at, rows=99, regions=2, row_bytes=132, pool=128, flat=flat),
        lambda *at, flat: contiguous_rows(*at, rows=49, regions=2, row_bytes=4098, pool=64, flat=flat),
        lambda *at, flat: contiguous_rows(*at, rows=49, regions=2, row_bytes=4097, pool=64, flat=flat),
        lambda *at, flat: head_split(*at, rows=5, regions=2, pool=8, flat=flat),
        lambda *at, flat: hnd_to_nhd(*at, rows=5, regions=2, pool=8, flat=flat),
    ],
    ids=["32 KiB", "132 bytes", "4,098 bytes", "4,097 bytes", "head split", "HND to NHD"],
)
def test_common_layouts(make, flat, team):
    dst = canvas()
    plan = make(SRC.ctypes.data, dst.ctypes.data, flat=flat)
    want = expected(plan, SRC, SRC.ctypes.data, dst, dst.ctypes.data)
    run(plan, team)
    np.testing.assert_array_equal(dst, want)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    row_bytes=st.one_of(st.integers(1, 40), st.integers(1000, 1050), st.sampled_from([4095, 4096, 4097])),
    gaps=st.tuples(st.integers(0, 70), st.integers(0, 70)),
    at=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    rows=st.integers(1, 60),
    regions=st.integers(1, 3),
    missing=st.sets(st.integers(0, 59), max_size=3),
)
def test_rows_in_order_equal_their_pieces(team, row_bytes, gaps, at, rows, regions, missing):
    dst = canvas()
    plan = rows_with_gaps(
        SRC.ctypes.data + at[0],
        dst.ctypes.data + at[1],
        rows=rows,
        regions=regions,
        row_bytes=row_bytes,
        pool=rows,
        src_gap=gaps[0],
        dst_gap=gaps[1],
        flat="both",
    )
    (segment,) = plan.segments
    stencil = replace(segment.stencil, rows=np.delete(segment.stencil.rows, [n for n in missing if n < rows], axis=0))
    plan = CopyPlan((replace(segment, stencil=stencil),))
    want = expected(plan, SRC, SRC.ctypes.data, dst, dst.ctypes.data)
    run(plan, team)
    np.testing.assert_array_equal(dst, want)


def test_blanks_are_cleared_and_then_written_over():
    dst, cleared = canvas(), canvas()
    at = dst.ctypes.data
    plan = contiguous_rows(SRC.ctypes.data, at, rows=3, regions=1, row_bytes=64, pool=4)
    cleared[:4096] = 0
    for line in range(3):
        cleared[8192 + 256 * line :][:100] = 0
    want = expected(plan, SRC, SRC.ctypes.data, cleared, at)
    run(replace(plan, blanks=(Blank(at, 4096), Blank(at + 8192, 100, 3, 256))))
    np.testing.assert_array_equal(dst, want)
    assert (want != cleared).any()


def test_an_empty_plan_and_rows_without_tokens_copy_nothing():
    dst = canvas()
    plan = contiguous_rows(SRC.ctypes.data, dst.ctypes.data, rows=3, regions=1, row_bytes=64, pool=4)
    plan.segments[0].stencil.rows[:, 4] = 0
    run(plan)
    run(CopyPlan(()))
    assert (dst == CANARY).all()


class Flag:
    def __init__(self, error=None):
        self.fired = False
        self.error = error

    def query(self):
        if self.error:
            raise self.error
        return self.fired


class Unanswerable:
    """Says something that is neither true nor false."""

    def query(self):
        return np.array([0, 1])


class Reports:
    """Collects outcomes by name, in order."""

    def __init__(self):
        self.outcomes = []
        self._changed = threading.Condition()

    def __call__(self, name):
        def done(outcome):
            with self._changed:
                self.outcomes.append((name, outcome))
                self._changed.notify_all()

        return done

    def wait(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.outcomes) >= count, 10), self.outcomes
        return dict(self.outcomes)

    @property
    def names(self):
        return [name for name, _ in self.outcomes]


@pytest.fixture
def executor():
    executor = HostExecutor(ThreadRuntime())
    yield executor
    assert executor.close(10)


def small_plan(dst, *, row_bytes=4096):
    return contiguous_rows(SRC.ctypes.data, dst.ctypes.data, rows=4, regions=1, row_bytes=row_bytes, pool=4)


def test_a_job_is_done_when_its_bytes_are_there_and_only_once(executor):
    dst, reports = canvas(), Reports()
    plan = small_plan(dst)
    executor.warm([plan])
    executor.submit(CopyJob(plan, reports("a")), Direction.GATHER)
    outcome = reports.wait(1)["a"]
    assert outcome.error is None
    assert outcome.started <= outcome.finished
    np.testing.assert_array_equal(dst, expected(plan, SRC, SRC.ctypes.data, canvas(), dst.ctypes.data))
    time.sleep(0.05)
    assert reports.names == ["a"]


@pytest.mark.parametrize("direction", list(Direction))
def test_a_job_whose_event_has_not_fired_does_not_hold_up_the_next(executor, direction):
    dst, reports, flag = canvas(), Reports(), Flag()
    executor.submit(CopyJob(small_plan(dst), reports("late"), flag), direction)
    executor.submit(CopyJob(small_plan(dst), reports("ready"), READY), direction)
    reports.wait(1)
    time.sleep(0.02)
    assert reports.names == ["ready"]
    flag.fired = True
    reports.wait(2)
    assert reports.names == ["ready", "late"]


def test_nothing_is_copied_before_the_event(executor):
    dst, reports, flag = canvas(), Reports(), Flag()
    executor.submit(CopyJob(small_plan(dst), reports("late"), flag), Direction.SCATTER)
    time.sleep(0.02)
    assert (dst == CANARY).all()
    flag.fired = True
    reports.wait(1)
    assert (dst != CANARY).any()


def test_a_failing_plan_and_a_failing_event_are_outcomes(executor):
    dst, reports = canvas(), Reports()
    good = small_plan(dst)
    no_box: Any = None
    broken = Segment(good.segments[0].regions, Stencil(good.segments[0].stencil.rows, 0, 0, no_box))
    executor.submit(CopyJob(CopyPlan((broken,)), reports("plan")), Direction.GATHER)
    executor.submit(CopyJob(good, reports("event"), Flag(RuntimeError("device gone"))), Direction.GATHER)
    executor.submit(CopyJob(good, reports("answer"), cast("Any", Unanswerable())), Direction.GATHER)
    executor.submit(CopyJob(good, reports("own error"), Flag(ClosedError("gone"))), Direction.GATHER)
    executor.submit(CopyJob(good, reports("good")), Direction.GATHER)
    outcomes = reports.wait(5)
    assert isinstance(outcomes["plan"].error, TransferFailedError)
    assert isinstance(outcomes["event"].error, TransferFailedError)
    assert "device gone" in str(outcomes["event"].error)
    assert "ambiguous" in str(outcomes["answer"].error)
    assert isinstance(outcomes["own error"].error, ClosedError)
    assert outcomes["good"].error is None


def test_a_report_that_raises_does_not_stop_the_service(executor, monkeypatch):
    seen = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    dst, reports = canvas(), Reports()

    def done(outcome):
        raise RuntimeError("not mine")

    executor.submit(CopyJob(small_plan(dst), done), Direction.GATHER)
    executor.submit(CopyJob(small_plan(dst), reports("next")), Direction.GATHER)
    assert reports.wait(1)["next"].error is None
    assert [str(args.exc_value) for args in seen] == ["not mine"]


def test_close_finishes_what_was_queued_and_refuses_more():
    executor, dst, reports = HostExecutor(ThreadRuntime()), canvas(), Reports()
    for number in range(20):
        executor.submit(CopyJob(small_plan(dst), reports(number)), Direction.SCATTER)
    assert executor.close(10)
    assert sorted(reports.names) == list(range(20))
    assert executor.close(10)
    with pytest.raises(ClosedError):
        executor.submit(CopyJob(small_plan(dst), reports("late")), Direction.SCATTER)


def test_close_reports_what_never_could_start_as_failed():
    executor, dst, reports = HostExecutor(ThreadRuntime()), canvas(), Reports()
    executor.submit(CopyJob(small_plan(dst), reports("stuck"), Flag()), Direction.SCATTER)
    assert not executor.close(0.05)
    assert isinstance(reports.wait(1)["stuck"].error, KvxferError)
    assert executor.close(10)
