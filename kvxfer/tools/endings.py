"""What ends the runs of a plan: derives an `Explanation` from families of runs that have grown as long as they become.

A run is over when nothing is left that continues it on both sides. Then either one side goes on with something and the
other does not (it is the other that limits), or neither goes on with anything, or nothing but the next block is left.

The statements hold for full rows (sub-blocks that the token range does not cut), and never count too few pieces. They
count too many where only some of the runs of two families touch, or where runs of one family touch by the choice of its
addresses rather than by a stride: such are the last index of one axis and the first of another, as in a convolution of
which the very last value alone borders on the state behind it, or heads of which a rank holds the middle ones. Without
block lists, groups count as apart.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.geometry.cache import CacheGeometry
from kvxfer.geometry.intersect import SegmentClass
from kvxfer.geometry.plan import PairPlan, TransferPlan
from kvxfer.geometry.rows import Rows, row_grid
from kvxfer.geometry.spec import TensorSpec
from kvxfer.tools.explain import Breaks, Cause, Explanation, Limit, Run, Side
from kvxfer.tools.growth import COLUMNS, Axis, Family, Holder, families, within

__all__ = ["explain", "explain_classes"]

I64: TypeAlias = NDArray[np.int64]


def explain(plan: PairPlan | TransferPlan) -> Explanation:
    """Say why the pieces of a plan are as long as they are, and which side limits them.

    Args:
        plan: Of a pair: in full rows of whatever request. Of one transfer: also how often block ids end a run.
    """
    if isinstance(plan, PairPlan):
        return explain_classes(plan.src, plan.dst, plan.classes)
    pair = plan.pair
    return explain_classes(pair.src, pair.dst, pair.classes, [plan.rows[of] for of in pair.meeting_of])


def explain_classes(
    src: CacheGeometry, dst: CacheGeometry, classes: Sequence[SegmentClass], rows: Sequence[Rows] | None = None
) -> Explanation:
    """The same of some of what two ranks have in common.

    Args:
        src: Geometry of the prefill rank.
        dst: Geometry of the decode rank.
        classes: What they have in common.
        rows: The rows of one transfer, by class.
    """
    sides = (Holder(src), Holder(dst))
    found = families(sides, classes, rows)
    return Explanation(tuple(_Ending(family, *sides).run(found) for family in found))


@dataclass(frozen=True, slots=True)
class _Ending:
    """Says of a family why its runs are over."""

    family: Family
    src: Holder
    dst: Holder

    def run(self, others: Iterable[Family]) -> Run:
        """The runs, and what ends them; among these others."""
        family = self.family
        key = family.key
        return Run(
            family.stretch,
            family.run,
            len(family.regions) * prod(axis.count for axis in family.axes),
            row_grid(key.src_rows, key.dst_rows),
            self._limits((*family.axes, *self._region_axes()), list(self._neighbours(others))),
        )

    def _region_axes(self) -> Iterable[Axis]:
        """The coordinates in which regions still differ, as axes."""
        regions, run = self.family.regions, self.family.run
        places = regions.low[:, 0]
        for name, column in COLUMNS.items():
            order, alike = regions.in_order(column, places[:, column])
            if alike.any():
                strides = (np.unique(steps[alike]).tolist() for steps in np.diff(regions.bases[order], axis=0).T)
                first = places[order][int(np.argmax(alike))]
                src, dst = (
                    steps[0] if len(steps) == 1 and (steps[0] == run or self._near(side, first, steps[0])) else None
                    for steps, side in zip(strides, (self.src, self.dst), strict=True)
                )
                chains = np.diff(np.flatnonzero(np.concatenate([[True], ~alike, [True]])))
                yield Axis(name, int(chains.max()), src, dst)

    def _neighbours(self, others: Iterable[Family]) -> Iterable[Limit]:
        """Runs of other classes that all of these go on with, if it were not for one side."""
        family, run = self.family, self.family.run
        ends = family.regions.bases + run
        for other in (other for other in others if other.key != family.key):
            for at, side in enumerate((Side.DESTINATION, Side.SOURCE)):
                if other.shape(at) == family.shape(at):
                    starts = {base[at]: number for number, base in enumerate(other.regions.bases.tolist())}
                    met = [starts.get(end, -1) for end in ends[:, at].tolist()]
                    if -1 not in met and (other.regions.bases[met] != ends).any(axis=1).all():
                        src, dst = (run, None) if side is Side.DESTINATION else (None, run)
                        name, held = family.unlike(other), self._held(self._spec(side))
                        yield Limit(name, side, Cause.KIND, run, src, dst, held=held, then=other.stretch)

    def _near(self, side: Holder, place: I64, distance: int) -> bool:
        """Whether something so far from a region may lie in the same tensor, or in another view of its memory."""
        spec = side.spec(self.family.key, place)
        return abs(distance) * spec.item_bytes < spec.extent_bytes * self.family.key.item_bytes

    def _block(self) -> tuple[Axis, Side]:
        """From one full row to the next, and on which sides that is another block."""
        key, inside = self.family.key, within(self.family.key)
        grid = row_grid(key.src_rows, key.dst_rows)
        src = grid * key.src_token if inside[0] else key.src_block
        dst = grid * key.dst_token if inside[1] else key.dst_block
        side = Side.BOTH if inside[0] == inside[1] else Side.DESTINATION if inside[0] else Side.SOURCE
        return Axis("block", 0, src, dst), side

    def _limits(self, axes: Iterable[Axis], neighbours: Sequence[Limit]) -> tuple[Limit, ...]:
        """Everything that continues the run on one side only; or the next ones, where nothing does on either."""
        key, run = self.family.key, self.family.run
        block, side = self._block()
        if (key.src_rows.of, key.src_rows.chunk) != (key.dst_rows.of, key.dst_rows.chunk):
            turns = key.src_rows.of > key.dst_rows.of
            end = Limit("block", Side.DESTINATION if turns else Side.SOURCE, Cause.TURNS, run, None, None)
            open_axes = [axis for axis in axes if axis.count > 1]
        elif block.src == block.dst == run:
            return (Limit("block", side, Cause.BLOCK_IDS, run, run, run, breaks=self._breaks()),)
        else:
            end = None
            open_axes = [*(axis for axis in axes if axis.count > 1), block]
        limits = [
            self._limit(axis, Side.DESTINATION if axis.src == run else Side.SOURCE)
            for axis in open_axes
            if run in (axis.src, axis.dst)
        ]
        limits += neighbours
        if end is not None:
            return (end, *limits)
        if not limits and open_axes:
            limits = [self._limit(min(open_axes, key=_reach), Side.BOTH)]
        return tuple(limits)

    def _limit(self, axis: Axis, side: Side) -> Limit:
        key, run = self.family.key, self.family.run
        strides = {Side.SOURCE: [axis.src], Side.DESTINATION: [axis.dst], Side.BOTH: [axis.src, axis.dst]}[side]
        cause = Cause.APART if None in strides else Cause.STRIDE
        between: tuple[str, ...] = ()
        held: tuple[int, int] | None = None
        stride = strides[-1]
        if stride is not None:
            spec = self._spec(side)
            near, far = (number * spec.item_bytes // key.item_bytes for number in (run, abs(stride)))
            between = tuple(
                name
                for name, factors in spec.factors.items()
                if name != axis.name
                and any(f.count > 1 and f.stride < far and f.stride * f.count > near for f in factors)
            )
            held = self._held(spec) if "head" in between else None
        return Limit(axis.name, side, cause, run, axis.src, axis.dst, axis.count, between, held)

    def _spec(self, side: Side) -> TensorSpec:
        """The tensor in which the first of the runs begins."""
        return (self.src if side is Side.SOURCE else self.dst).spec(self.family.key, self.family.regions.low[0, 0])

    def _held(self, spec: TensorSpec) -> tuple[int, int] | None:
        """The heads of a tensor, where more are than are copied."""
        first, stop = self.family.stretch.heads
        whole = first <= spec.heads.start and spec.heads.stop <= stop
        return None if whole else (spec.heads.start, spec.heads.stop)

    def _breaks(self) -> Breaks | None:
        """How the full rows of a transfer follow each other."""
        if self.family.rows is None:
            return None
        key, table = self.family.key, self.family.rows.table
        table = table[(table[:, 4] == self.family.rows.grid) & (table[:, 0] >= 0)]  # not of padding
        src = table[:, 0] * key.src_block + table[:, 1] * key.src_token
        dst = table[:, 2] * key.dst_block + table[:, 3] * key.dst_token
        order = np.argsort(dst)
        breaks_src, breaks_dst = (np.diff(side[order]) != self.family.run for side in (src, dst))
        return Breaks(
            max(0, len(table) - 1),
            int((breaks_src & ~breaks_dst).sum()),
            int((breaks_dst & ~breaks_src).sum()),
            int((breaks_src & breaks_dst).sum()),
        )


def _reach(axis: Axis) -> tuple[bool, int]:
    """Where the next index of an axis lies: the nearest first, and what has no one stride last."""
    known = [abs(stride) for stride in (axis.src, axis.dst) if stride is not None]
    return len(known) < 2, max(known, default=0)
