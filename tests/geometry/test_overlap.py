"""Shared bytes, against the sets of all addresses."""

from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.geometry import cache as overlap
from kvxfer.geometry.cache import Bytes, shared

View: TypeAlias = tuple[int, list[int], list[int], int]
"""Address, shape, byte strides, bytes of an element."""


@st.composite
def drawn_views(draw: st.DrawFn) -> View:
    """A view without an overlap of its own, its axes in any order."""
    item = draw(st.sampled_from([1, 2, 4]))
    axes: list[tuple[int, int]] = []
    reach = item
    for _ in range(draw(st.integers(0, 4))):
        count, stride = draw(st.integers(1, 4)), reach + draw(st.sampled_from([0, 0, 0, 1, 2, 3, 7]))
        stride = max(stride, draw(st.sampled_from([0, 0, 16, 60])))  # so that some strides are equal
        axes.append((count, stride))
        reach += (count - 1) * stride
    axes = draw(st.permutations(axes))
    return draw(st.integers(1, 80)), [count for count, _ in axes], [stride for _, stride in axes], item


def addresses(view: View) -> set[int]:
    start, shape, strides, item = view
    found = {start}
    for count, stride in zip(shape, strides, strict=True):
        found = {at + index * stride for at in found for index in range(count)}
    return {at + byte for at in found for byte in range(item)}


@settings(max_examples=150, deadline=None)
@given(st.lists(drawn_views(), min_size=2, max_size=5))
def test_it_is_exact(views: list[View]) -> None:
    sets = [addresses(view) for view in views]
    pairs = {(i, j) for j in range(len(views)) for i in range(j) if sets[i] & sets[j]}
    found = shared([Bytes.of(*view) for view in views])
    assert (found is not None) == bool(pairs)
    assert found is None or found in pairs


def cross_layer(layers: int) -> list[Bytes]:
    """K and V of many layers in one tensor, blocks outermost: every range of addresses meets every other."""
    size = 16 * 8 * 128 * 2
    return [
        Bytes.of(4096 + at * size, [1000, 16, 8, 128], [2 * layers * size, 2048, 256, 2], 2) for at in range(2 * layers)
    ]


def test_many_layers_in_one_tensor_take_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_STEPS", 0)
    monkeypatch.setattr(overlap, "_STEPS_A_VIEW", 4)
    views = cross_layer(64)
    assert shared(views) is None
    assert shared([*views, Bytes.of(4096 + 77 * 32768 + 300, [1000, 8], [2 * 64 * 32768, 2], 2)]) == (77, 128)


def test_what_cannot_be_decided_counts_as_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Bytes.of(4096, [97, 89], [9973, 101], 1), Bytes.of(4096 + 9973, [50, 70], [9001, 77], 1)
    assert shared([one, other]) == (0, 1)
    monkeypatch.setattr(overlap, "_STEPS", 0)
    monkeypatch.setattr(overlap, "_STEPS_A_VIEW", 2)
    assert shared([one, other]) is None


def test_views_of_equal_strides_are_decided_whatever_gaps_they_have() -> None:
    shape, strides = [2, 2, 3, 4, 58], [3012, 1508, 512, 120, 2]
    mine = addresses((4096, shape, strides, 2))
    for further in (2, 114, 116, 120, 476, 480, 1024, 1500, 3012, 4500, 6024):
        met = bool(mine & addresses((4096 + further, shape, strides, 2)))
        found = shared([Bytes.of(start, shape, strides, 2) for start in (4096, 4096 + further)])
        assert (found is not None) == met, further
