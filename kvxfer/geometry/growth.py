"""How the runs of a plan grow, and what ends them: derives an `Explanation` from the tables that are copied.

A run begins as one element and takes in every axis whose next index lies, on both sides, just where the run ends. It
is over when no axis is left that does. Then either one side goes on with some axis and the other does not (it is the
other that limits), or neither goes on with any, or nothing but the next block is left. All of it is read off the
strides of a class and the base addresses of its regions. Regions whose runs grow differently, because only some of them
are neighbours in memory, are told apart.

Where elements are converted, both sides are counted in bytes of the narrower dtype.

The statements are exact for full rows (sub-blocks that the token range does not cut) of one class, but for pieces that
touch by chance in two coordinates at once (the last of one axis and the first of another).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.geometry.cache import CacheGeometry
from kvxfer.geometry.conversion import Place, by_place
from kvxfer.geometry.explain import Breaks, Cause, Explanation, Limit, Run, Side, Step
from kvxfer.geometry.factor import BoxAxis
from kvxfer.geometry.intersect import KV_ORDER, SegmentClass, SegmentKey
from kvxfer.geometry.rows import Meeting, Rows, row_grid
from kvxfer.geometry.spec import TensorSpec

__all__ = ["explain"]

I64: TypeAlias = NDArray[np.int64]

_COLUMNS: Final[Mapping[str, int]] = {"dim": 3, "head": 2, "kv": 1, "layer": 0}
"""Axes that tell the regions of a class apart: their columns in `SegmentClass.places`, the usual inner ones first."""

_FAR: Final = 1 << 47
"""Bytes that are no distance within one tensor, nor between two addresses."""


def explain(
    src: CacheGeometry, dst: CacheGeometry, classes: Iterable[SegmentClass], rows: Mapping[Meeting, Rows] | None = None
) -> Explanation:
    """Explain the runs of a pair, or of one of its transfers.

    Args:
        src: Geometry of the prefill rank.
        dst: Geometry of the decode rank.
        classes: What they have in common.
        rows: The rows of one transfer.
    """
    sides = (_Holder(by_place(src), addressed=src.addressed), _Holder(by_place(dst), addressed=dst.addressed))
    found: list[Run] = []
    for c in classes:
        key = _as_staged(c.key)
        met = rows[key.group, key.src_rows, key.dst_rows] if rows is not None else None
        if met is None or len(met):
            items = (key.elements.src_bytes, key.elements.dst_bytes)
            bases = [
                side.addresses(key, c.places, own * key.item_bytes // item)
                for side, own, item in zip(sides, c.bases.T, items, strict=True)
            ]
            regions = _Regions(c.places, c.places, np.stack(bases, axis=1))
            found += _ClassRuns(key, *sides, met).grow(_first(key), regions, key.item_bytes, ())
    return Explanation(tuple(found))


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


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis that a run has not taken in; a stride is None where its indices are not evenly apart."""

    name: str
    count: int
    src: int | None
    dst: int | None


def _first(key: SegmentKey) -> tuple[_Axis, ...]:
    """The axes of one region of a class."""
    axes = [_Axis("dim", axis.count, axis.src, axis.dst) for axis in key.dims]
    axes += [_Axis("head", axis.count, axis.src, axis.dst) for axis in key.heads]
    axes.append(_Axis("token", row_grid(key.src_rows, key.dst_rows), key.src_token, key.dst_token))
    return tuple(axis for axis in axes if axis.count > 1)


@dataclass(frozen=True, slots=True)
class _Holder:
    """One side: its tensors by what they hold, and whether their addresses are known."""

    places: Mapping[Place, Sequence[TensorSpec]]
    addressed: bool

    def spec(self, key: SegmentKey, place: I64) -> TensorSpec:
        """The tensor that holds a region."""
        layer, half, head, _ = place.tolist()
        specs = self.places[key.group, key.part, KV_ORDER[half], layer]
        return next(spec for spec in specs if head in spec.heads)

    def addresses(self, key: SegmentKey, places: I64, bases: I64) -> I64:
        """Where regions lie: without addresses only distances within one tensor are known, so tensors lie far apart."""
        if self.addressed:
            return bases
        numbers: dict[int, int] = {}
        owners = [numbers.setdefault(id(self.spec(key, place)), len(numbers)) for place in places]
        return bases + np.asarray(owners, np.int64) * (2 * _FAR)


@dataclass(frozen=True, slots=True)
class _Regions:
    """Regions, or chains of regions that a run goes through: least and greatest coordinates, and where they begin."""

    low: I64
    high: I64
    bases: I64

    def __len__(self) -> int:
        return len(self.bases)

    def in_order(self, column: int, by: I64) -> tuple[I64, NDArray[np.bool_]]:
        """Their order by one number each, and which differ from the one before in one coordinate alone."""
        others = [at for at in _COLUMNS.values() if at != column]
        order = np.lexsort((by, *(self.low[:, at] for at in others)))
        ordered = self.low[order]
        return order, (ordered[1:, others] == ordered[:-1, others]).all(axis=1)

    def chained(self, order: I64, starts: I64) -> "_Regions":
        """In this order, those from each start to the next as one."""
        return _Regions(
            np.minimum.reduceat(self.low[order], starts),
            np.maximum.reduceat(self.high[order], starts),
            self.bases[order][starts],
        )

    def some(self, which: NDArray[np.bool_]) -> "_Regions":
        """A part of them."""
        return _Regions(self.low[which], self.high[which], self.bases[which])


@dataclass(frozen=True, slots=True)
class _ClassRuns:
    """Grows the runs of one class."""

    key: SegmentKey
    src: _Holder
    dst: _Holder
    rows: Rows | None

    def grow(self, axes: tuple[_Axis, ...], regions: _Regions, run: int, steps: tuple[Step, ...]) -> list[Run]:
        """Runs of these regions: take in one axis, and go on with each family of regions for which that is alike."""
        inner = next((axis for axis in axes if axis.src == axis.dst == run), None)
        if inner is not None:
            rest = tuple(axis for axis in axes if axis is not inner)
            run *= inner.count
            return self.grow(rest, regions, run, (*steps, Step(inner.name, inner.count, run)))
        for name, column in _COLUMNS.items():
            chains, lengths = self._chains(column, regions, run)
            if len(chains) < len(regions):
                found: list[Run] = []
                for length in np.unique(lengths).tolist():
                    more = (Step(name, length, run * length),) if length > 1 else ()
                    found += self.grow(axes, chains.some(lengths == length), run * length, (*steps, *more))
                return found
        return [self._run(axes, regions, run, steps)]

    def _chains(self, column: int, regions: _Regions, run: int) -> tuple[_Regions, I64]:
        """Chains of neighbours in memory along one coordinate, and how many regions each has."""
        order, alike = regions.in_order(column, regions.bases[:, 0])  # either way round, if both sides agree
        joins = alike & (np.diff(regions.bases[order], axis=0) == run).all(axis=1)
        starts = np.concatenate([[0], np.flatnonzero(~joins) + 1])
        return regions.chained(order, starts), np.diff(np.append(starts, len(order)))

    # --- the end of a run

    def _run(self, axes: tuple[_Axis, ...], regions: _Regions, run: int, steps: tuple[Step, ...]) -> Run:
        key, low, high = self.key, regions.low.min(axis=0).tolist(), regions.high.max(axis=0).tolist()
        return Run(
            key.group,
            key.part,
            KV_ORDER[low[1] : high[1] + 1],
            (low[0], high[0]),
            (low[2], high[2] + prod(axis.count for axis in key.heads)),
            " to ".join(dict.fromkeys(side.spec(key, regions.low[0]).dtype for side in (self.src, self.dst))),
            key.item_bytes,
            steps,
            run,
            len(regions) * prod(axis.count for axis in axes),
            row_grid(key.src_rows, key.dst_rows),
            self._limits((*axes, *self._region_axes(regions, run)), regions.low[0], run),
        )

    def _region_axes(self, regions: _Regions, run: int) -> Iterable[_Axis]:
        """The coordinates in which regions still differ, as axes."""
        for name, column in _COLUMNS.items():
            numbers = regions.low[:, column]
            order, alike = regions.in_order(column, numbers)
            if alike.any():
                strides = (np.unique(steps[alike]).tolist() for steps in np.diff(regions.bases[order], axis=0).T)
                first = regions.low[order][int(np.argmax(alike))]
                src, dst = (
                    steps[0] if len(steps) == 1 and (steps[0] == run or self._within(side, first, steps[0])) else None
                    for steps, side in zip(strides, (self.src, self.dst), strict=True)
                )
                chains = np.diff(np.flatnonzero(np.concatenate([[True], ~alike, [True]])))
                yield _Axis(name, int(chains.max()), src, dst)

    def _within(self, side: _Holder, place: I64, distance: int) -> bool:
        """Whether something so far from a region may lie in the same tensor, or in another view of its memory."""
        spec = side.spec(self.key, place)
        return abs(distance) * spec.item_bytes < spec.extent_bytes * self.key.item_bytes

    def _block(self) -> tuple[_Axis, Side]:
        """From one full row to the next, and on which sides that is another block."""
        key = self.key
        grid = row_grid(key.src_rows, key.dst_rows)
        within = [not rows.is_state and rows.block_tokens > grid for rows in (key.src_rows, key.dst_rows)]
        src = grid * key.src_token if within[0] else key.src_block
        dst = grid * key.dst_token if within[1] else key.dst_block
        side = Side.BOTH if within[0] == within[1] else Side.DESTINATION if within[0] else Side.SOURCE
        return _Axis("block", 0, src, dst), side

    def _limits(self, axes: Iterable[_Axis], place: I64, run: int) -> tuple[Limit, ...]:
        """Every axis that continues the run on one side only; or the next ones, where none does on either."""
        key = self.key
        block, side = self._block()
        if (key.src_rows.of, key.src_rows.chunk) != (key.dst_rows.of, key.dst_rows.chunk):
            turns = key.src_rows.of > key.dst_rows.of
            end = Limit("block", Side.DESTINATION if turns else Side.SOURCE, Cause.TURNS, run, None, None)
            open_axes = [axis for axis in axes if axis.count > 1]
        elif block.src == block.dst == run:
            cause = Cause.ROWS if key.src_rows.of > 1 and side is Side.BOTH else Cause.BLOCK_IDS
            return (Limit("block", side, cause, run, run, run, breaks=self._breaks(run)),)
        else:
            end = None
            open_axes = [*(axis for axis in axes if axis.count > 1), block]
        limits = [
            self._limit(axis, Side.DESTINATION if axis.src == run else Side.SOURCE, place, run)
            for axis in open_axes
            if run in (axis.src, axis.dst)
        ]
        if end is not None:
            return (end, *limits)
        if not limits and open_axes:
            limits = [self._limit(min(open_axes, key=_reach), Side.BOTH, place, run)]
        return tuple(limits)

    def _limit(self, axis: _Axis, side: Side, place: I64, run: int) -> Limit:
        strides = {Side.SOURCE: [axis.src], Side.DESTINATION: [axis.dst], Side.BOTH: [axis.src, axis.dst]}[side]
        cause = Cause.APART if None in strides else Cause.STRIDE
        between: tuple[str, ...] = ()
        held: tuple[int, int] | None = None
        stride = strides[-1]
        if stride is not None:
            spec = (self.src if side is Side.SOURCE else self.dst).spec(self.key, place)
            near, far = (number * spec.item_bytes // self.key.item_bytes for number in (run, abs(stride)))
            between = tuple(
                name
                for name, factors in spec.factors.items()
                if name != axis.name
                and any(f.count > 1 and f.stride < far and f.stride * f.count > near for f in factors)
            )
            copied = prod(one.count for one in self.key.heads)
            if "head" in between and len(spec.heads) > copied:
                held = (spec.heads.start, spec.heads.stop)
        return Limit(axis.name, side, cause, run, axis.src, axis.dst, axis.count, between, held)

    def _breaks(self, run: int) -> Breaks | None:
        """How the full rows of a transfer follow each other."""
        if self.rows is None:
            return None
        key, table = self.key, self.rows.table
        table = table[(table[:, 4] == self.rows.grid) & (table[:, 0] >= 0)]  # not of padding
        src = table[:, 0] * key.src_block + table[:, 1] * key.src_token
        dst = table[:, 2] * key.dst_block + table[:, 3] * key.dst_token
        order = np.argsort(dst)
        breaks_src, breaks_dst = (np.diff(side[order]) != run for side in (src, dst))
        return Breaks(
            max(0, len(table) - 1),
            int((breaks_src & ~breaks_dst).sum()),
            int((breaks_dst & ~breaks_src).sum()),
            int((breaks_src & breaks_dst).sum()),
        )


def _reach(axis: _Axis) -> tuple[bool, int]:
    """Where the next index of an axis lies: the nearest first, and what has no one stride last."""
    known = [abs(stride) for stride in (axis.src, axis.dst) if stride is not None]
    return len(known) < 2, max(known, default=0)
