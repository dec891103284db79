"""Strides from offsets."""

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.geometry.axes import Factor, axis_offsets
from kvxfer.geometry.copyplan import Patch, patches


def split(count: int, inner: int, item: int = 2, gap: int = 0) -> tuple[Factor, ...]:
    """An axis as inner elements together, `gap` bytes after each stretch of them."""
    if inner == count:
        return (Factor(count, 1, item),)
    return (Factor(count // inner, inner, inner * item + gap), Factor(inner, 1, item))


def offsets_of(patch: Patch) -> list[tuple[int, int]]:
    """Every offset that a patch stands for, by counting through its axes."""
    found = [(patch.src, patch.dst)]
    for axis in patch.axes:
        found = [(s + i * axis.src, d + i * axis.dst) for s, d in found for i in range(axis.count)]
    return found


@pytest.mark.parametrize(("src", "dst", "counts"), [
    (8, 128, (16, 8)), (8, 4, (16, 2, 4)), (8, 16, (8, 2, 8)), (16, 8, (8, 2, 8)), (8, 8, (16, 8)), (128, 128, (128,)),
])  # fmt: skip
def test_splits_that_divide_each_other_are_one_patch(src: int, dst: int, counts: tuple[int, ...]) -> None:
    found = patches(axis_offsets(split(128, src, gap=50), 0, 128), axis_offsets(split(128, dst, gap=70), 0, 128))
    assert [tuple(axis.count for axis in patch.axes) for patch in found] == [counts]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.data())
def test_patches_are_the_offsets_in_order(data: st.DataObject) -> None:
    count = data.draw(st.sampled_from([1, 2, 6, 12, 24, 48]))
    sides = []
    for _ in range(2):
        inner = data.draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8, 12, count) if count % n == 0]))
        sides.append(split(count, inner, gap=data.draw(st.sampled_from([0, 2, 64]))))
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    src, dst = (axis_offsets(side, start, stop) for side in sides)
    found = patches(src, dst)
    assert [pair for patch in found for pair in offsets_of(patch)] == list(zip(src.tolist(), dst.tolist(), strict=True))
    assert [patch.count for patch in found] == [len(offsets_of(patch)) for patch in found]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=20))
def test_any_offsets_at_all(pairs: list[tuple[int, int]]) -> None:
    """Also where nothing repeats: a patch is only ever what the offsets say."""
    src, dst = np.asarray(pairs, np.int64).T
    assert [pair for patch in patches(src, dst) for pair in offsets_of(patch)] == pairs
    assert sum(prod(axis.count for axis in patch.axes) for patch in patches(src, dst)) == len(pairs)
