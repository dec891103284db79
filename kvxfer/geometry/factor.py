"""Strides from offsets: cut two sequences of addresses into patches in which both advance by constant strides.

Split axes (`dim/8 ... dim%8`) make an axis a mixed radix number, with another radix on either side. Rather than treat
the pairs of splits case by case, the planner lists the byte offsets of the axis on both sides and reads the strides
off.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.geometry.axes import Factor

__all__ = ["BoxAxis", "Patch", "axis_offsets", "patches"]

I64: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class BoxAxis:
    """`count` steps, each `src` bytes at the source and `dst` bytes at the destination."""

    count: int
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Patch:
    """Part of an axis: where it begins on both sides (bytes) and its factors, outermost first."""

    src: int
    dst: int
    axes: tuple[BoxAxis, ...]

    @property
    def count(self) -> int:
        """Coordinates in this patch."""
        return int(np.prod([axis.count for axis in self.axes], dtype=np.int64))


def axis_offsets(factors: tuple[Factor, ...], start: int, stop: int) -> I64:
    """Byte offsets of the coordinates [start, stop) of an axis; a missing axis has the one coordinate 0."""
    coordinates = np.arange(start, stop, dtype=np.int64)
    offsets = np.zeros_like(coordinates)
    for factor in factors:
        offsets += coordinates // factor.unit % factor.count * factor.stride
    return offsets


def patches(src: I64, dst: I64) -> tuple[Patch, ...]:
    """Cut two offset sequences of equal length into the fewest patches that a left-to-right pass finds.

    Two unsplit axes give one patch of one factor; splits by 8 and by 16 give one patch of up to three.
    """
    found: list[Patch] = []
    at = 0
    while at < len(src):
        length, axes = _longest(src[at:], dst[at:])
        found.append(Patch(int(src[at]), int(dst[at]), axes))
        at += length
    return tuple(found)


def _longest(src: I64, dst: I64) -> tuple[int, tuple[BoxAxis, ...]]:
    """Length and factors of a long strided prefix."""
    if len(src) == 1:
        return 1, ()
    steps = np.stack([np.diff(src), np.diff(dst)])
    same = (steps == steps[:, :1]).all(axis=0)
    inner = len(src) if bool(same.all()) else int(np.argmin(same)) + 1
    axis = BoxAxis(inner, int(steps[0, 0]), int(steps[1, 0]))
    whole = len(src) // inner
    if whole < 2:
        return inner, (axis,)
    # how many of the following stretches of this length repeat the first one
    pairs = np.stack([src[: whole * inner], dst[: whole * inner]]).reshape(2, whole, inner)
    repeats = ((pairs - pairs[:, :, :1]) == (pairs[:, :1] - pairs[:, :1, :1])).all(axis=(0, 2))
    count = whole if bool(repeats.all()) else int(np.argmin(repeats))
    if count < 2:
        return inner, (axis,)
    length, outer = _longest(pairs[0, :count, 0], pairs[1, :count, 0])
    return length * inner, (*outer, axis)
