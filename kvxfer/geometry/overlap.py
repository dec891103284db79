"""Whether strided views share a byte, from their addresses and strides alone.

Ranges of addresses do not tell: K and V packed in one tensor, slices by head, and layers inside of a block lie between
each other without a common byte. So the question is decided in two steps. Views whose largest strides are equal are
folded by that stride, and what then lies apart cannot meet; this leaves few pairs, however many layers there are. For
each of these it is decided exactly: is there an index into either view such that the two addresses are closer than the
runs are long? With equal strides that takes a few steps. With strides that have nothing to do with each other it is a
subset-sum problem, so the steps are counted, and a pair that is undecided when they are used up counts as apart.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import gcd
from typing import Final, TypeAlias

__all__ = ["Bytes", "shared"]

_STEPS: Final = 50_000
"""Steps for a whole list of views, beyond those that each view may take by itself: well under 0.1 s."""
_STEPS_A_VIEW: Final = 64

_Axes: TypeAlias = tuple[tuple[int, int], ...]
"""(stride, count), the largest stride first."""


class _UndecidedError(Exception):
    """The steps are used up."""


@dataclass(slots=True)
class _Steps:
    left: int

    def take(self, number: int = 1) -> None:
        self.left -= number
        if self.left < 0:
            raise _UndecidedError


@dataclass(frozen=True, slots=True)
class Bytes:
    """Where the bytes of a view lie: runs of equal length at regular places.

    Attributes:
        start: Address of the first.
        axes: (bytes, count) of every axis that is longer than 1, the largest stride first; none steps inside of those
            after it.
        run: Bytes that lie together at each index.
    """

    start: int
    axes: _Axes
    run: int

    @classmethod
    def of(cls, start: int, shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> "Bytes":
        """The bytes of a tensor whose axes do not overlap; axes without a gap between them become one."""
        axes: list[tuple[int, int]] = []
        run = item_bytes
        for stride, count in sorted(zip(strides, shape, strict=True)):
            if count == 1:
                continue
            if not axes and stride == run:
                run *= count
            elif axes and stride == axes[-1][0] * axes[-1][1]:
                axes[-1] = (axes[-1][0], axes[-1][1] * count)
            else:
                axes.append((stride, count))
        return cls(start, tuple(reversed(axes)), run)

    @property
    def stop(self) -> int:
        """One past the last byte."""
        return self.start + self.run + sum((count - 1) * stride for stride, count in self.axes)

    def folded(self, stride: int) -> "Iterator[Bytes]":
        """The view without its largest axis, on a circle of that stride: twice where it lies across the cut."""
        one = Bytes(self.start % stride, self.axes[1:], self.run)
        yield one
        if one.stop > stride:
            yield Bytes(one.start - stride, one.axes, one.run)


def shared(views: Sequence[Bytes]) -> tuple[int, int] | None:
    """Positions of two views that have a byte in common; None if there are none, or it could not be decided."""
    steps = _Steps(_STEPS + _STEPS_A_VIEW * len(views))
    try:
        for one, other in _suspects(list(enumerate(views)), steps):
            if _meet(views[one], views[other], steps):
                return min(one, other), max(one, other)
    except _UndecidedError:
        pass
    return None


def _suspects(views: list[tuple[int, Bytes]], steps: _Steps) -> Iterator[tuple[int, int]]:
    """Pairs that may share a byte; all that do are among them."""
    steps.take(len(views))
    for close in _clusters(views):
        strides = {view.axes[0][0] if view.axes else 0 for _, view in close}
        stride = strides.pop()
        if strides or not stride:
            for (one, _), (other, _) in combinations(close, 2):
                steps.take()
                if one != other:
                    yield one, other
        else:
            yield from _suspects([(at, part) for at, view in close for part in view.folded(stride)], steps)


def _clusters(views: Iterable[tuple[int, Bytes]]) -> Iterator[list[tuple[int, Bytes]]]:
    """Views whose ranges hang together, where there is more than one."""
    close: list[tuple[int, Bytes]] = []
    stop = 0
    for at, view in sorted(views, key=lambda item: item[1].start):
        if close and view.start >= stop:
            if len(close) > 1:
                yield close
            close = []
        stop = max(stop, view.stop) if close else view.stop
        close.append((at, view))
    if len(close) > 1:
        yield close


def _meet(one: Bytes, other: Bytes, steps: _Steps) -> bool:
    """Whether two views have a byte in common: exact.

    The distance from an address in `one` to an address in `other` is a fixed number and a multiple of each stride,
    where a stride of both views counts once, with all differences of the two indices. They share a byte if a distance
    lies between `-other.run` and `one.run`, neither included.
    """
    reach: dict[int, tuple[int, int]] = {}
    for stride, count in one.axes:
        reach[stride] = (1 - count, 0)
    for stride, count in other.axes:
        low, high = reach.get(stride, (0, 0))
        reach[stride] = (low, high + count - 1)
    terms = [(stride, *reach[stride]) for stride in sorted(reach, reverse=True)]
    rest = [(0, 0, 0)]  # behind each term: least and largest sum of those after it, and what divides all of these
    for stride, low, high in reversed(terms):
        least, most, unit = rest[-1]
        rest.append((least + stride * low, most + stride * high, gcd(unit, stride)))
    rest.reverse()

    def reachable(at: int, low: int, high: int) -> bool:
        """Whether the terms from `at` on can sum up to something from `low` to `high`."""
        steps.take()
        least, most, unit = rest[at]
        low, high = max(low, least), min(high, most)
        if low > high or (unit and high // unit * unit < low):
            return False
        if at == len(terms):
            return True
        stride, first, last = terms[at]
        least, most, _ = rest[at + 1]
        factors = range(max(first, -((most - low) // stride)), min(last, (high - least) // stride) + 1)
        return any(reachable(at + 1, low - factor * stride, high - factor * stride) for factor in factors)

    distance = other.start - one.start
    return reachable(0, 1 - other.run - distance, one.run - 1 - distance)
