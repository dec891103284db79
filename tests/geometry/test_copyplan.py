"""Segment tables: addresses, pieces, folding and merging."""

from random import Random

import numpy as np
import pytest
from execute import by_destination, byte_pairs, table_pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from staged import nbytes_of

from kvxfer.geometry import CopyPlan, Pieces
from kvxfer.geometry.copyplan import MAX_OUTER_AXES, Box, BoxAxis, Elements, Segment, fold


def pieces(*rows: tuple[int, int, int]) -> Pieces:
    return Pieces(*np.asarray(rows, np.int64).reshape(-1, 3).T)


def listed(found: Pieces) -> list[tuple[int, int, int]]:
    return list(zip(found.src.tolist(), found.dst.tolist(), found.nbytes.tolist(), strict=True))


# fold


@pytest.mark.parametrize(
    ("axes", "tokens", "expected"),
    [
        # NHD to NHD: a whole block is one run
        ([BoxAxis(2, 16, 16), BoxAxis(8, 2, 2)], (32, 32), Box((), 32, 32, 32, token_in_run=True)),
        # HND to HND: the tokens of one head are a run, heads are apart
        ([BoxAxis(2, 64, 64), BoxAxis(8, 2, 2)], (16, 16), Box((BoxAxis(2, 64, 64),), 16, 16, 16, token_in_run=True)),
        # NHD to HND: a run is one head of one token
        ([BoxAxis(2, 16, 64), BoxAxis(8, 2, 2)], (32, 16), Box((BoxAxis(2, 16, 64),), 32, 16, 16, token_in_run=False)),
        # some heads only: tokens have gaps at the source
        ([BoxAxis(2, 16, 16), BoxAxis(8, 2, 2)], (64, 32), Box((), 64, 32, 32, token_in_run=False)),
        # token innermost on both sides: a run is the tokens of one element
        ([BoxAxis(8, 8, 8)], (2, 2), Box((BoxAxis(8, 8, 8),), 2, 2, 2, token_in_run=True)),
        # dim not innermost at the destination
        ([BoxAxis(8, 2, 32)], (16, 2), Box((BoxAxis(8, 2, 32),), 16, 2, 2, token_in_run=False)),
        # state: no token axis
        ([BoxAxis(8, 2, 2)], (0, 0), Box((), 0, 0, 16, token_in_run=False)),
        # neighbours that continue each other outside the run are one axis
        (
            [BoxAxis(3, 40, 80), BoxAxis(4, 10, 20)],
            (99, 99),
            Box((BoxAxis(12, 10, 20),), 99, 99, 2, token_in_run=False),
        ),
        # axes of one coordinate vanish
        ([BoxAxis(1, 7, 9), BoxAxis(8, 2, 2)], (99, 16), Box((), 99, 16, 16, token_in_run=False)),
    ],
)
def test_fold(axes: list[BoxAxis], tokens: tuple[int, int], expected: Box) -> None:
    for given_axes in (axes, axes[::-1]):
        assert fold(given_axes, *tokens, Elements(2, 2)) == (expected, ())


def test_axes_beyond_the_box_are_unrolled_smallest_first() -> None:
    axes = [BoxAxis(n, 10**n, 7 * 10**n) for n in (5, 2, 4, 3)]
    box, unrolled = fold(axes, 1, 1, Elements(8, 8))
    assert unrolled == (BoxAxis(2, 100, 700),)
    assert len(box.outer) == MAX_OUTER_AXES
    assert sorted(box.outer) == sorted(set(axes) - set(unrolled))


# enumerate


def small_segments() -> st.SearchStrategy[Segment]:
    """Segments of any numbers, whether or not they overlap: enumeration is arithmetic."""
    numbers = st.integers(0, 50)
    axes = st.lists(st.builds(BoxAxis, st.integers(1, 3), numbers, numbers), max_size=MAX_OUTER_AXES).map(tuple)
    free = st.builds(Box, axes, numbers, numbers, st.integers(1, 4), st.just(value=False))
    joined = st.tuples(axes, st.integers(1, 4)).map(lambda p: Box(p[0], p[1], p[1], p[1], token_in_run=True))

    def table(width: int) -> st.SearchStrategy[np.ndarray]:
        row = st.tuples(*[st.integers(1, 4) if column == 4 else numbers for column in range(width)])
        return st.lists(row, min_size=1, max_size=4).map(lambda rows: np.asarray(rows, np.int64))

    return st.builds(Segment, table(2), table(5), numbers, numbers, free | joined)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(small_segments(), max_size=3))
def test_pieces_are_what_the_tables_say(segments: list[Segment]) -> None:
    plan = CopyPlan(tuple(segments))
    found = plan.enumerate()
    assert np.array_equal(by_destination(byte_pairs(found)), by_destination(table_pairs(plan)))
    assert plan.pieces == len(found)
    assert nbytes_of(plan) == found.nbytes.sum()
    for column in (found.src, found.dst, found.nbytes):
        assert column.dtype == np.int64
        assert column.flags.c_contiguous


# merged


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 4)), max_size=12), st.randoms(use_true_random=False))
def test_merging_moves_the_same_bytes(steps: list[tuple[int, int]], rng: Random) -> None:
    made, src, dst = [], 1000, 0
    for gap, nbytes in steps:
        src, dst = src - 50 * gap, dst + gap
        made.append((src, dst, nbytes))
        src, dst = src + nbytes, dst + nbytes
    rng.shuffle(made)
    found = pieces(*made).merged()
    assert np.array_equal(by_destination(byte_pairs(found)), by_destination(byte_pairs(pieces(*made))))
    assert len(found) == sum(gap for gap, _ in steps) + (bool(steps) and not steps[0][0])


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 1.0])
@pytest.mark.parametrize("count", [8191, 8192, 8193, 20_000])
def test_long_lists_are_merged_like_short_ones(count: int, share: float) -> None:
    """They are gone through part by part; a run may begin in one part and end in a later one."""
    joined = np.random.default_rng(count).random(count) < share
    nbytes = np.arange(count) % 5 + 1
    src = np.cumsum(nbytes + np.where(joined, 0, 7)) - nbytes
    dst = np.cumsum(nbytes) - nbytes
    found = Pieces(src, dst, nbytes).merged()
    starts = [0, *(at for at in range(1, count) if not joined[at])]
    assert found.src.tolist() == src[starts].tolist()
    assert found.dst.tolist() == dst[starts].tolist()
    assert found.nbytes.tolist() == [int(part.sum()) for part in np.split(nbytes, starts[1:])]
