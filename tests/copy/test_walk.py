"""Tables walked on CPU memory: every byte that was asked for and no other, in parts of any size."""

from dataclasses import replace

import numpy as np
import pytest
from copy_plans import CANARY, contiguous_rows, expected, random_plan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packing import copy, copy_parts, pack, parts_of
from staged import Blank, Blanked

from kvxfer.geometry.copyplan import CopyPlan

NBYTES = 1 << 20
SRC = np.random.default_rng(7).integers(0, 256, NBYTES, dtype=np.uint8)


def canvas():
    return np.full(NBYTES, CANARY, np.uint8)


def copy_backwards(tables):
    """In the smallest parts that there are, the last one first: whoever copies beside others finds any order."""
    parts, count = parts_of(tables, 1)
    for number in reversed(range(count)):
        copy_parts(parts.ctypes.data, number, number + 1)


@pytest.fixture(params=[copy, copy_backwards], ids=["at once", "in parts"])
def walk(request):
    return request.param


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_random_plans_equal_their_pieces(walk, seed):
    dst = canvas()
    plan, _, _ = random_plan(seed, SRC.ctypes.data, dst.ctypes.data, NBYTES)
    want = expected(plan, SRC, SRC.ctypes.data, dst, dst.ctypes.data)
    walk(pack(plan))
    np.testing.assert_array_equal(dst, want)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    row_bytes=st.one_of(st.integers(1, 40), st.integers(1000, 1050), st.sampled_from([4095, 4096, 4097])),
    gaps=st.tuples(st.integers(0, 70), st.integers(0, 70)),
    at=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    rows=st.integers(1, 60),
    regions=st.integers(1, 3),
    missing=st.sets(st.integers(0, 59), max_size=3),
)
def test_rows_in_order_equal_their_pieces(walk, row_bytes, gaps, at, rows, regions, missing):
    dst = canvas()
    plan = contiguous_rows(
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
    plan = CopyPlan((replace(segment, rows=np.delete(segment.rows, [n for n in missing if n < rows], axis=0)),))
    want = expected(plan, SRC, SRC.ctypes.data, dst, dst.ctypes.data)
    walk(pack(plan))
    np.testing.assert_array_equal(dst, want)


@pytest.mark.parametrize("part_bytes", [1, 100, 4096, 1 << 20])
def test_parts_are_no_larger_than_they_have_to_be(part_bytes):
    plan = contiguous_rows(0, NBYTES, rows=32, regions=2, row_bytes=4096, pool=32)
    _, count = parts_of(pack(plan), part_bytes)
    assert count == 64 // max(1, min(64, part_bytes // 4096))


def test_blanks_are_cleared_and_then_written_over():
    dst, cleared = canvas(), canvas()
    at = dst.ctypes.data
    plan = contiguous_rows(SRC.ctypes.data, at, rows=3, regions=1, row_bytes=64, pool=4)
    cleared[:4096] = 0
    for line in range(3):
        cleared[8192 + 256 * line :][:100] = 0
    want = expected(plan, SRC, SRC.ctypes.data, cleared, at)
    copy(pack(Blanked(plan.segments, (Blank(at, 4096), Blank(at + 8192, 100, 3, 256)))))
    np.testing.assert_array_equal(dst, want)
    assert (want != cleared).any()


def test_an_empty_plan_and_rows_without_tokens_copy_nothing(walk):
    dst = canvas()
    plan = contiguous_rows(SRC.ctypes.data, dst.ctypes.data, rows=3, regions=1, row_bytes=64, pool=4)
    plan.segments[0].rows[:, 4] = 0
    walk(pack(plan))
    walk(pack(CopyPlan(())))
    assert (dst == CANARY).all()
