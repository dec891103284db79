"""How the runs of a plan grow: from one element to a piece of a full row, read off the tables that are copied.

A run takes in whatever begins, on both sides, just where it ends:

    an axis of its class, with all indices
    the next regions of its class, in another layer, half, head or dim
    a run of another kind: another part in the same page, say

and so on from there, since what has grown may meet its like again. Runs that grow alike are one family. Two families
can go on with each other where the same rows move both, at the same distances, and what they have not taken in is
alike, so that each run of the one meets a run of the other.

Where elements are converted, both sides are counted in bytes of the narrower dtype. Where a side does not show its
addresses, its tensors count as apart.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.geometry.cache import CacheGeometry
from kvxfer.geometry.factor import BoxAxis
from kvxfer.geometry.intersect import KV_ORDER, SegmentClass, SegmentKey
from kvxfer.geometry.rows import Rows, row_grid
from kvxfer.geometry.spec import TensorSpec
from kvxfer.tools.explain import Step, Stretch

__all__ = ["COLUMNS", "Axis", "Family", "Holder", "Regions", "families", "within"]

I64: TypeAlias = NDArray[np.int64]

COLUMNS: Final[Mapping[str, int]] = {"dim": 3, "head": 2, "kv": 1, "layer": 0}
"""Axes that tell the regions of a class apart: their columns in `SegmentClass.places`, the usual inner ones first."""

_FAR: Final = 1 << 47
"""Bytes that are no distance within one tensor, nor between two addresses."""


def families(
    sides: "tuple[Holder, Holder]", classes: Sequence[SegmentClass], rows: Sequence[Rows] | None = None
) -> "list[Family]":
    """Every run of a pair, or of one of its transfers, as long as it becomes.

    Args:
        sides: The prefill rank, and the decode rank.
        classes: What they have in common.
        rows: The rows of one transfer, by class; classes without any are left out.
    """
    numbers: dict[tuple[object, ...], int] = {}
    found: list[Family] = []
    for c, met in zip(classes, [None] * len(classes) if rows is None else rows, strict=True):
        key = _as_staged(c.key)
        if met is None or len(met):
            items = (key.elements.src_bytes, key.elements.dst_bytes)
            bases = [
                side.addresses(key, c.places, own * key.item_bytes // item)
                for side, own, item in zip(sides, c.bases.T, items, strict=True)
            ]
            src, dst = (numbers.setdefault(frame, len(numbers)) for frame in _frames(key, met))
            regions = Regions(c.places[:, None], c.places[:, None], np.stack(bases, axis=1))
            found.append(Family(key, met, (src, dst), _first(key, sides, c.places[0]), _axes(key), regions))
    return _grown(found)


def _as_staged(key: SegmentKey) -> SegmentKey:
    """The class as if both sides had elements as wide as those in staging, so that runs of both can be compared."""
    if not key.elements.converts:
        return key
    item, src, dst = key.item_bytes, key.elements.src_bytes, key.elements.dst_bytes

    def scaled(axes: Iterable[BoxAxis]) -> tuple[BoxAxis, ...]:
        return tuple(BoxAxis(axis.count, axis.src * item // src, axis.dst * item // dst) for axis in axes)

    return replace(
        key,
        heads=scaled(key.heads),
        dims=scaled(key.dims),
        src_token=key.src_token * item // src,
        dst_token=key.dst_token * item // dst,
        src_block=key.src_block * item // src,
        dst_block=key.dst_block * item // dst,
    )


def _frames(key: SegmentKey, met: Rows | None) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """What two classes must have in common on either side, so that what meets in one row meets in every row.

    Before there are block lists, groups have rows of their own.
    """
    rows = (key.group if met is None else met.table.tobytes(), key.src_rows, key.dst_rows)
    elements = key.elements if key.elements.converts else None
    src, dst = within(key)
    return (
        (*rows, elements, key.src_block, src and key.src_token),
        (*rows, elements, key.dst_block, dst and key.dst_token),
    )


def within(key: SegmentKey) -> tuple[bool, bool]:
    """Whether several full rows lie in one block, on either side."""
    grid = row_grid(key.src_rows, key.dst_rows)
    src, dst = (not rows.is_state and rows.block_tokens > grid for rows in (key.src_rows, key.dst_rows))
    return src, dst


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis that a run has not taken in; a stride is None where its indices are not evenly apart."""

    name: str
    count: int
    src: int | None
    dst: int | None


def _axes(key: SegmentKey) -> tuple[Axis, ...]:
    """The axes of one region of a class."""
    axes = [Axis("dim", axis.count, axis.src, axis.dst) for axis in key.dims]
    axes += [Axis("head", axis.count, axis.src, axis.dst) for axis in key.heads]
    axes.append(Axis("token", row_grid(key.src_rows, key.dst_rows), key.src_token, key.dst_token))
    return tuple(axis for axis in axes if axis.count > 1)


class Holder:
    """One side: its tensors by what they hold, and whether their addresses are known."""

    def __init__(self, geometry: CacheGeometry) -> None:
        self._places: Final = geometry.places
        self._owners: Final = {id(spec): number for number, spec in enumerate(geometry.tensors)}
        self._addressed: Final = geometry.addressed

    def spec(self, key: SegmentKey, place: I64) -> TensorSpec:
        """The tensor that holds a region."""
        layer, half, head, _ = place.tolist()
        specs = self._places[key.group, key.part, KV_ORDER[half], layer]
        return next(spec for spec in specs if head in spec.heads)

    def addresses(self, key: SegmentKey, places: I64, bases: I64) -> I64:
        """Where regions lie: without addresses only distances within one tensor are known, so tensors lie far apart."""
        if self._addressed:
            return bases
        owners = [self._owners[id(self.spec(key, place))] for place in places]
        return bases + np.asarray(owners, np.int64) * (2 * _FAR)


def _first(key: SegmentKey, sides: Sequence[Holder], place: I64) -> Stretch:
    """One element of a class; its heads count from 0, and layers and halves are open, until it is placed."""
    dtypes = dict.fromkeys(side.spec(key, place).dtype for side in sides)
    heads = (0, prod(axis.count for axis in key.heads))
    return Stretch(key.group, key.part, (), (0, 0), heads, " to ".join(dtypes), key.item_bytes)


def _placed(stretch: Stretch, places: Iterator[tuple[list[int], list[int]]]) -> Stretch:
    """A stretch, and those that it goes on with, each with its least and greatest coordinates."""
    low, high = next(places)
    return replace(
        stretch,
        halves=KV_ORDER[low[1] : high[1] + 1],
        layers=(low[0], high[0]),
        heads=(low[2], high[2] + stretch.heads[1]),
        steps=tuple(replace(step, then=step.then and _placed(step.then, places)) for step in stretch.steps),
    )


# --- growth


@dataclass(frozen=True, slots=True)
class Regions:
    """Regions, or what runs that go through several begin with.

    Attributes:
        low: int64 (R, S, 4): least coordinates of each of S stretches.
        high: int64 (R, S, 4): the greatest.
        bases: int64 (R, 2): where they begin.
    """

    low: I64
    high: I64
    bases: I64

    def __len__(self) -> int:
        return len(self.bases)

    def in_order(self, column: int, by: I64) -> tuple[I64, NDArray[np.bool_]]:
        """Their order by one number each, and which differ from the one before in one coordinate alone."""
        places = self.low[:, 0]
        others = [at for at in COLUMNS.values() if at != column]
        order = np.lexsort((by, *(places[:, at] for at in others)))
        ordered = places[order]
        return order, (ordered[1:, others] == ordered[:-1, others]).all(axis=1)

    def chained(self, order: I64, starts: I64) -> "Regions":
        """In this order, those from each start to the next as one."""
        return Regions(
            np.minimum.reduceat(self.low[order], starts),
            np.maximum.reduceat(self.high[order], starts),
            self.bases[order][starts],
        )

    def some(self, which: NDArray[np.bool_] | I64) -> "Regions":
        """A part of them."""
        return Regions(self.low[which], self.high[which], self.bases[which])


@dataclass(frozen=True, slots=True)
class Family:
    """Runs that grow alike.

    Attributes:
        key: The class in which they begin.
        rows: The rows of one transfer.
        frames: On either side, equal for classes that the same rows move by the same distances.
        first: What they are made of, not yet placed.
        axes: What they have not taken in of a region.
        regions: Where they are, at index 0 of these axes.
    """

    key: SegmentKey
    rows: Rows | None
    frames: tuple[int, int]
    first: Stretch
    axes: tuple[Axis, ...]
    regions: Regions

    @property
    def run(self) -> int:
        """Bytes of each."""
        return self.first.nbytes

    @property
    def stretch(self) -> Stretch:
        """What they are made of, with least and greatest coordinates."""
        low, high = self.regions.low.min(axis=0).tolist(), self.regions.high.max(axis=0).tolist()
        return _placed(self.first, zip(low, high, strict=True))

    def shape(self, *sides: int) -> tuple[object, ...]:
        """Equal for families of which each run meets one of the other on these sides, if the first ones do."""
        strides = ((axis.count, (axis.src, axis.dst)) for axis in self.axes)
        frames = tuple(self.frames[side] for side in sides)
        return frames, frozenset((count, *(stride[side] for side in sides)) for count, stride in strides)

    def grown(self) -> "list[Family]":
        """Take in axes and the next regions, each of the families apart for which that is alike."""
        inner = next((axis for axis in self.axes if axis.src == axis.dst == self.run), None)
        if inner is not None:
            rest = tuple(axis for axis in self.axes if axis is not inner)
            return replace(self._taking(inner.name, inner.count), axes=rest).grown()
        for name, column in COLUMNS.items():
            chains, lengths = self._chains(column)
            if len(chains) < len(self.regions):
                found: list[Family] = []
                for length in np.unique(lengths).tolist():
                    more = self._taking(name, length) if length > 1 else self
                    found += replace(more, regions=chains.some(lengths == length)).grown()
                return found
        return [self]

    def _taking(self, name: str, count: int) -> "Family":
        return self._with(Step(name, count, self.run * count))

    def _with(self, step: Step) -> "Family":
        return replace(self, first=replace(self.first, steps=(*self.first.steps, step)))

    def _chains(self, column: int) -> tuple[Regions, I64]:
        """Chains of neighbours in memory along one coordinate, and how many regions each has."""
        regions = self.regions
        order, alike = regions.in_order(column, regions.bases[:, 0])  # either way round, if both sides agree
        joins = alike & (np.diff(regions.bases[order], axis=0) == self.run).all(axis=1)
        starts = np.concatenate([[0], np.flatnonzero(~joins) + 1])
        return regions.chained(order, starts), np.diff(np.append(starts, len(order)))

    def then(self, other: "Family") -> "tuple[Family, list[Family], list[Family]]":
        """The runs that go on with one of another family; those that do not, and those of the other that are left."""
        starts = {(src, dst): at for at, (src, dst) in enumerate(other.regions.bases.tolist())}
        found = np.asarray([starts.get((src, dst), -1) for src, dst in (self.regions.bases + self.run).tolist()])
        theirs = found[found >= 0]
        mine, next_ones = self.regions.some(found >= 0), other.regions.some(theirs)
        both = Regions(
            np.concatenate([mine.low, next_ones.low], axis=1),
            np.concatenate([mine.high, next_ones.high], axis=1),
            mine.bases,
        )
        whole = self._with(Step(self.unlike(other), 1, self.run + other.run, other.first))
        return (
            replace(whole, regions=both),
            self.some(found < 0),
            other.some(~np.isin(np.arange(len(other.regions)), theirs)),
        )

    def some(self, which: NDArray[np.bool_]) -> "list[Family]":
        """A part of them, if there are any."""
        return [replace(self, regions=self.regions.some(which))] if which.any() else []

    def unlike(self, other: "Family") -> str:
        """In what the regions of another family are others than these."""
        mine, theirs = (family.regions.low[0, 0] for family in (self, other))
        if self.key.group != other.key.group:
            return "group"
        if self.key.part != other.key.part:
            return "part"
        return next((name for name in ("kv", "layer", "head") if mine[COLUMNS[name]] != theirs[COLUMNS[name]]), "dim")


def _grown(families: Iterable[Family]) -> list[Family]:
    """Let runs take in what continues them, until nothing does."""
    found = [grown for family in families for grown in family.grown()]
    while (pair := _next(found)) is not None:
        one, other = pair
        whole, left, others_left = found[one].then(found[other])
        becomes = {one: [*whole.grown(), *left], other: others_left}
        found = [part for at, family in enumerate(found) for part in becomes.get(at, [family])]
    return found


def _next(families: Sequence[Family]) -> tuple[int, int] | None:
    """Two families of which runs of the one end where runs of the other begin: those that do so most often."""
    shapes = [family.shape(0, 1) for family in families]
    several = {shape for shape, number in Counter(shapes).items() if number > 1}
    bases = {at: families[at].regions.bases for at, shape in enumerate(shapes) if shape in several}
    starts = {(shapes[at], src, dst): at for at, begin in bases.items() for src, dst in begin.tolist()}
    met = Counter(
        (at, starts[shapes[at], src, dst])
        for at, begin in bases.items()
        for src, dst in (begin + families[at].run).tolist()
        if starts.get((shapes[at], src, dst), at) != at
    )
    return max(met, key=met.__getitem__, default=None)
