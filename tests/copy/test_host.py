"""Copies on CPU memory: every byte that was asked for, no other, and every job reported once."""

import sys
import threading
import time
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from copy_plans import (
    CANARY,
    addresses,
    box_plan,
    contiguous_rows,
    expected,
    head_split,
    hnd_to_nhd,
    random_plan,
    rows_with_gaps,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.copy import READY, CopyJob, Direction, host
from kvxfer.copy.host import HostExecutor, run
from kvxfer.copy.team import ALONE, Team
from kvxfer.errors import ClosedError, KvxferError, TransferFailedError
from kvxfer.geometry.copyplan import Blank, Box, CopyPlan, Segment, Stencil
from kvxfer.geometry.factor import BoxAxis
from kvxfer.runtime import ThreadRuntime

NBYTES = 1 << 20
SRC = np.random.default_rng(7).integers(0, 256, NBYTES, dtype=np.uint8)


def canvas():
    return np.full(NBYTES, CANARY, np.uint8)


class Eager(Team):
    """Shares whatever has several steps."""

    def shares(self, steps, nbytes, copies):
        return max(1, min(3, steps))


@pytest.fixture(scope="module")
def team():
    team = Eager(3)
    yield team
    team.close()


WAYS = pytest.mark.parametrize("row_ns", [0.0, host._ROW_NS, 1e9], ids=["row by row", "estimated", "item by item"])


@WAYS
@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shared=st.booleans(),
    buffer_bytes=st.sampled_from([1 << 12, host._BUFFER_BYTES]),
    batch=st.sampled_from([5, 100, host._ITEMS_PER_BATCH]),
    few=st.sampled_from([0, host._FEW_BYTES]),
)
def test_random_plans_equal_their_pieces(row_ns, team, seed, shared, buffer_bytes, batch, few):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "_ROW_NS", row_ns)
        patch.setattr(host, "_RUN_NS", host._RUN_NS if row_ns else 0.0)
        patch.setattr(host, "_WORD_NS", host._WORD_NS if row_ns else 0.0)
        patch.setattr(host, "_BUFFER_BYTES", buffer_bytes)
        patch.setattr(host, "_ITEMS_PER_BATCH", batch)
        patch.setattr(host, "_FEW_BYTES", few)
        dst = canvas()
        plan, _, _ = random_plan(seed, SRC.ctypes.data, dst.ctypes.data, NBYTES)
        want = expected(plan, SRC, SRC.ctypes.data, dst, dst.ctypes.data)
        run(plan, team if shared else ALONE)
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


@WAYS
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
def test_common_layouts(make, flat, row_ns, team, monkeypatch):
    monkeypatch.setattr(host, "_ROW_NS", row_ns)
    monkeypatch.setattr(host, "_BUFFER_BYTES", 1 << 16)
    dst = canvas()
    plan = make(SRC.ctypes.data, dst.ctypes.data, flat=flat)
    want = expected(plan, SRC, SRC.ctypes.data, dst, dst.ctypes.data)
    run(plan, team)
    np.testing.assert_array_equal(dst, want)


@pytest.mark.parametrize(
    ("row_bytes", "threads", "by_item"),
    [
        (256, 1, True),
        (8 << 10, 1, True),
        (32 << 10, 1, False),  # a pass through the buffer costs more than a step in Python
        (30 << 10, 2, True),  # too short for slices in two threads
        (256 << 10, 8, False),
    ],
)
def test_short_rows_are_moved_by_index_and_long_ones_as_slices(row_bytes, threads, by_item, monkeypatch):
    moved = []
    monkeypatch.setattr(host._Items, "copy", lambda *_: moved.append(True))
    monkeypatch.setattr(host._RowClass, "_copy_runs", lambda *_: moved.append(False))
    team = Team(threads)
    try:
        rows = (16 << 20) // row_bytes  # nothing is touched
        run(contiguous_rows(1 << 40, 1 << 41, rows=rows, regions=2, row_bytes=row_bytes, pool=2 * rows), team)
    finally:
        team.close()
    assert set(moved) == {by_item}


@pytest.mark.parametrize(
    ("row_bytes", "gaps", "flat", "threads", "way"),
    [
        (16, (0, 16), "both", 1, "_copy_rows"),  # a step in Python for each is many times slower than to copy so little
        (16, (16, 48), "both", 2, "_copy_rows"),
        (1 << 10, (1 << 10, 0), "both", 1, "_copy_rows"),
        (1023, (3, 5), "both", 1, "_copy_rows"),
        (32 << 10, (32 << 10, 0), "both", 1, "_copy_rows"),
        (32 << 10, (0, 0), "both", 1, "_copy_runs"),  # one slice
        (16, (0, 0), "both", 1, "_copy_runs"),
        (2 << 20, (0, 0), "both", 1, "_copy_runs"),
        (2 << 20, (0, 0), "both", 2, "_copy_rows"),  # which two threads cannot share
        (2 << 20, (2 << 20, 0), "both", 2, "_copy_runs"),
        (2 << 20, (0, 0), "", 2, "_copy_runs"),
        (32 << 10, (32 << 10, 0), "", 1, "_copy_runs"),
        (1 << 10, (1 << 10, 0), "", 1, "copy"),
    ],
)
def test_rows_in_order_are_copied_in_few_assignments(row_bytes, gaps, flat, threads, way, monkeypatch):
    moved = set()
    for owner, name in ((host._Items, "copy"), (host._RowClass, "_copy_runs"), (host._RowClass, "_copy_rows")):
        monkeypatch.setattr(owner, name, lambda *_, name=name: moved.add(name))
    team = Team(threads)
    try:
        rows = min(4096, (16 << 20) // row_bytes)  # nothing is touched
        sizes = {"row_bytes": row_bytes, "src_gap": gaps[0], "dst_gap": gaps[1]}
        run(rows_with_gaps(1 << 40, 1 << 41, rows=rows, regions=2, pool=2 * rows, flat=flat, **sizes), team)
    finally:
        team.close()
    assert moved == {way}


def test_few_rows_in_order_need_no_views(monkeypatch):
    moved = []
    monkeypatch.setattr(host._RowClass, "_copy_runs", lambda _, slices: moved.append(len(slices)))
    run(rows_with_gaps(1 << 40, 1 << 41, rows=3, regions=2, row_bytes=1024, src_gap=1024, pool=3, flat="both"))
    assert moved == [3]


@pytest.mark.parametrize("row_bytes", [64 << 10, 3 << 10])
def test_a_team_shares_rows_in_order_alike(row_bytes, monkeypatch):
    together, parts = threading.Barrier(4), []

    def meet(_self, keys):
        together.wait(10)
        parts.append(sum(dst.stop - dst.start for dst, _ in keys))

    monkeypatch.setattr(host, "_BATCH_NS", 1e12)  # never by item: nothing is to be touched
    monkeypatch.setattr(host._RowClass, "_copy_rows", meet)
    team = Team(4)
    try:
        rows = (5 << 20) // row_bytes // 4 * 4  # a MiB for each would leave one
        run(head_split(1 << 40, 1 << 41, rows=rows, regions=8, pool=rows, flat="both", row_bytes=row_bytes // 16), team)
    finally:
        team.close()
    assert parts == [rows // 4] * 4


@settings(max_examples=150, deadline=None)
@given(
    row_bytes=st.one_of(st.integers(1, 40), st.integers(1000, 1050), st.sampled_from([4095, 4096, 4097])),
    gaps=st.tuples(st.integers(0, 70), st.integers(0, 70)),
    at=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    rows=st.integers(1, 60),
    regions=st.integers(1, 3),
    missing=st.sets(st.integers(0, 59), max_size=3),
    shared=st.booleans(),
    buffer_bytes=st.sampled_from([1 << 10, host._BUFFER_BYTES]),
    item_ns=st.sampled_from([host._ITEM_NS, 1e9]),
)
def test_rows_in_order_equal_their_pieces(
    team, row_bytes, gaps, at, rows, regions, missing, shared, buffer_bytes, item_ns
):
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "_BUFFER_BYTES", buffer_bytes)
        patch.setattr(host, "_ITEM_NS", item_ns)
        run(plan, team if shared else ALONE)
    np.testing.assert_array_equal(dst, want)


@pytest.mark.parametrize(
    ("run_bytes", "regions", "by_item"),
    [
        (2, 1, False),
        (2, 64, False),  # numpy copies single words with strides faster than it looks up an index
        (8, 64, False),
        (16, 1, False),  # the index would be as large as what is copied, and is made by one thread
        (16, 64, True),
        (256, 64, True),
    ],
)
def test_short_runs_are_moved_by_index_only_where_that_is_faster(run_bytes, regions, by_item, monkeypatch):
    """NHD to a key cache whose heads are cut into pieces of so many bytes, in eight threads."""
    moved, tokens, heads, pieces = [], 16, 8, 256 // run_bytes
    monkeypatch.setattr(host._Items, "copy", lambda *_: moved.append(True))
    monkeypatch.setattr(host._RowClass, "_copy_rows", lambda *_: moved.append(False))
    outer = (BoxAxis(heads, 256, pieces * tokens * run_bytes), BoxAxis(pieces, run_bytes, tokens * run_bytes))
    block = heads * tokens * 256
    team = Team(8)
    try:
        plan = box_plan(
            *(1 << 40, 1 << 41),  # nothing is touched
            rows=512 // regions,
            regions=regions,
            pool=512,
            rng=np.random.default_rng(1),
            flat="",
            box=Box(outer, heads * 256, run_bytes, run_bytes, token_in_run=False),
            tokens=tokens,
            src_block=block,
            dst_block=block,
        )
        run(plan, team)
    finally:
        team.close()
    assert set(moved) == {by_item}


def test_a_team_moves_items_side_by_side(team, monkeypatch):
    together, copy = threading.Barrier(3), host._Items.copy

    def meet(self, steps):
        together.wait(10)
        copy(self, steps)

    monkeypatch.setattr(host, "_ROW_NS", 1e9)
    monkeypatch.setattr(host, "_BUFFER_BYTES", 1 << 14)
    monkeypatch.setattr(host._Items, "copy", meet)
    dst = canvas()
    plan = contiguous_rows(SRC.ctypes.data, dst.ctypes.data, rows=60, regions=1, row_bytes=8192, pool=100)
    want = expected(plan, SRC, SRC.ctypes.data, dst, dst.ctypes.data)
    run(plan, team)
    np.testing.assert_array_equal(dst, want)


@pytest.mark.parametrize(
    ("rows", "regions", "row_bytes", "threads"),
    [
        (4, 2, 256 << 10, 2),  # a MiB for each of two, which neither region has alone
        (64, 64, 8 << 10, 1),  # 32 MiB, in copies that are too short
    ],
)
def test_what_is_in_all_regions_decides_how_many_copy(rows, regions, row_bytes, threads, monkeypatch):
    together, parts = threading.Barrier(threads), []

    def meet(_self, slices):
        together.wait(10)
        parts.append(len(slices))

    monkeypatch.setattr(host, "_BATCH_NS", 1e12)  # never by item: nothing is to be touched
    monkeypatch.setattr(host._RowClass, "_copy_runs", meet)
    team = Team(2)
    try:
        plan = contiguous_rows(1 << 40, 1 << 41, rows=rows, regions=regions, row_bytes=row_bytes, pool=4 * rows)
        run(plan, team)
    finally:
        team.close()
    assert len(parts) == threads


@pytest.mark.parametrize("index", [slice(0, 128), np.arange(128)[::-1]], ids=["slice", "index"])
def test_others_have_the_interpreter_while_items_are_put(index):
    items = np.ones(8 << 20, np.uint8).view("V65536")
    target = np.zeros_like(items)
    began, turn, before = threading.Event(), threading.Event(), sys.getswitchinterval()
    other = threading.Thread(target=lambda: (began.wait(), turn.set()))
    sys.setswitchinterval(60)  # nobody has to let go of it
    other.start()
    try:
        began.set()  # now it waits for the interpreter
        until = time.monotonic() + 10
        host._put(target, index, items)
        while not turn.is_set() and time.monotonic() < until:
            host._put(target, index, items)
        assert turn.is_set()
    finally:
        sys.setswitchinterval(before)
        other.join()
    assert target.view("u1").all()


def test_rows_too_large_for_items_are_copied_whole(team):
    dst = canvas()
    plan = contiguous_rows(SRC.ctypes.data, dst.ctypes.data, rows=3, regions=1, row_bytes=300_000, pool=3, flat="src")
    plan.segments[0].stencil.rows[:, 2] = plan.segments[0].stencil.rows[:, 0]
    want = expected(plan, SRC, SRC.ctypes.data, dst, dst.ctypes.data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "_BUFFER_BYTES", 1 << 16)
        patch.setattr(host._Items, "copy", lambda *_: pytest.fail("an item is larger than what holds it"))
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
