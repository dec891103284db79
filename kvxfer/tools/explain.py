"""Why the pieces of a plan are no longer than they are, as values: what a run is made of, where it ends, on which side.

A run is over when nothing is left that continues it on both sides. Then either one side goes on with something and the
other does not (it is the other that limits), or neither goes on with anything, or nothing but the next block is left.

The statements hold for full rows (sub-blocks that the token range does not cut), and never count too few pieces. They
count too many where only some of the runs of two families touch, or where runs of one family touch by the choice of its
addresses rather than by a stride: such are the last index of one axis and the first of another, as in a convolution of
which the very last value alone borders on the state behind it, or heads of which a rank holds the middle ones. Groups
count as apart. Both sides must show their addresses.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.geometry.cache import CacheGeometry
from kvxfer.geometry.copyplan import BoxAxis
from kvxfer.geometry.intersect import SegmentClass, SegmentKey
from kvxfer.geometry.plan import PairPlan, TransferPlan
from kvxfer.geometry.spec import KV_ORDER, TensorSpec

__all__ = ["Cause", "Explanation", "Limit", "Run", "Side", "Step", "explain", "explain_classes"]

# --- what runs are made of
#
# `str()` of each is for people; `dataclasses.asdict` of an `Explanation` is plain data.

_MANY: Final = {"head": "heads", "token": "tokens", "kv": "halves", "layer": "layers"}
_UNITS: Final = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


class Side(StrEnum):
    """Which side ends a run."""

    SOURCE = "source"
    DESTINATION = "destination"
    BOTH = "both sides"


class Cause(StrEnum):
    """Why the next index of an axis does not continue a run."""

    STRIDE = "stride"  # it lies elsewhere in the same layout
    APART = "apart"  # it lies in other memory: there is no one stride
    BLOCK_IDS = "block ids"  # it continues the run in the same block and where block ids follow each other
    KIND = "kind"  # what continues it on the other side is of another kind, and lies elsewhere on this one
    TURNS = "turns"  # the tokens take turns over ranks, so the next ones are not between these two


@dataclass(frozen=True, slots=True)
class Step:
    """What a run has taken in: an axis, or a stretch of another kind that begins where the run ended on both sides."""

    axis: str  # of a stretch, in what it differs: part, kv, layer, head or dim
    count: int
    nbytes: int  # of the run with it
    then: "Stretch | None" = None  # the stretch that the run goes on with; None for an axis


@dataclass(frozen=True, slots=True)
class Stretch:
    """What one part of a cache puts into a piece, or all of it."""

    group: str
    part: str
    halves: tuple[str, ...]
    layers: tuple[int, int]  # first and last
    heads: tuple[int, int]  # first, and one past the last
    dtype: str  # of both sides where they differ
    item_bytes: int  # of the narrower dtype where they differ: both sides are counted in it
    steps: tuple[Step, ...] = ()  # the innermost axis first; of the first stretch of a piece, how the piece went on

    @property
    def nbytes(self) -> int:
        """Bytes with all steps."""
        return self.steps[-1].nbytes if self.steps else self.item_bytes

    def __iter__(self) -> "Iterator[Stretch]":
        """This one, and those that it goes on with, in order of memory."""
        yield self
        for step in self.steps:
            yield from step.then or ()


@dataclass(frozen=True, slots=True)
class Limit:
    """One axis that would continue a run if it lay elsewhere."""

    axis: str  # dim, head, token, kv, layer or block; part for what is of another kind
    side: Side  # where it would have to lie elsewhere
    cause: Cause
    expected: int  # the stride that would continue the run: its length
    src_stride: int | None  # None where there is no one number
    dst_stride: int | None
    count: int = 0  # indices of the axis; 0 for blocks, whose number a request decides
    between: tuple[str, ...] = ()  # axes whose other indices lie in between, on that side
    # the heads that lie on that side (first, one past the last), where more do than are copied
    held: tuple[int, int] | None = None
    then: Stretch | None = None  # what continues it on the other side, where that is of another kind

    @property
    def name(self) -> str:
        """In two or three words, for logs."""
        named = {Cause.STRIDE: f"{self.axis} stride", Cause.APART: self.axis, Cause.KIND: self.axis}
        what = named.get(self.cause, str(self.cause))
        return f"{what} of both sides" if self.side is Side.BOTH else f"{self.side} {what}"

    def __str__(self) -> str:
        if self.cause is Cause.TURNS:
            return "the row ends: the tokens that follow take their turn on another rank"
        if self.cause is Cause.BLOCK_IDS:
            return f"the block ends ({self.side}); within it and where block ids follow each other, the run goes on"
        other = Side.SOURCE if self.side is Side.DESTINATION else Side.DESTINATION
        if self.then is not None:
            what = ", ".join(_named(tuple(self.then)).values())
            return f"the {other} goes on with {what}, but the {self.side} does not{self._split()}"
        strides = {Side.SOURCE: self.src_stride, Side.DESTINATION: self.dst_stride}
        sides = (Side.SOURCE, Side.DESTINATION) if self.side is Side.BOTH else (self.side,)
        found = [
            f"at the {side} the next {self.axis} "
            + ("lies in other memory" if strides[side] is None else f"lies {strides[side]} B on")
            for side in sides
        ]
        goes_on = "" if self.side is Side.BOTH else f"the {other} goes on with the next {self.axis}, but "
        text = f"{goes_on}{' and '.join(found)}, not {self.expected} B"
        between = [axis for axis in self.between if axis != "head" or self.held is None]
        if between:
            text += f" (between: {', '.join(between)})"
        text += self._split()
        if self.count:
            text += f"; {self.expected} B would make pieces of at least {_size(self.expected * self.count)}"
        return text

    def _split(self) -> str:
        if self.held is None:
            return ""
        return f"; heads are split: {self.held[0]}..{self.held[1] - 1} lie there, and only some are copied"


@dataclass(frozen=True, slots=True)
class Run:
    """The pieces of regions that are alike."""

    first: Stretch  # what a piece begins with, and by its steps all that it is made of
    piece_bytes: int  # in a full row, as is `pieces`
    pieces: int
    row_tokens: int  # in a full row; 1 for state
    limits: tuple[Limit, ...]  # any one of them mended would make pieces longer

    def __str__(self) -> str:
        row = f"row of {self.row_tokens} tokens" if self.row_tokens > 1 else "row"
        pieces = f"{self.pieces} pieces of" if self.pieces > 1 else "one piece of"
        first = self.first
        lines = [
            f"{', '.join(_named(tuple(first)).values())}: {pieces} {_size(self.piece_bytes)} a {row}",
            f"  one piece: {first.item_bytes} B ({first.dtype})" + "".join(_taken(first, step) for step in first.steps),
            *(f"  {limit}" for limit in self.limits),
        ]
        return "\n".join(lines)


def _taken(first: Stretch, step: Step) -> str:
    """What a run takes in; of another stretch, in what it is unlike the first."""
    if step.then is None:
        return f", x {step.count} {_MANY.get(step.axis, step.axis)} = {_size(step.nbytes)}"
    before = _named((first,))
    unlike = [text for what, text in _named(tuple(step.then)).items() if text != before.get(what)]
    return f", goes on with {', '.join(unlike)} ({_size(step.then.nbytes)}) = {_size(step.nbytes)}"


def _named(stretches: Sequence[Stretch]) -> dict[str, str]:
    """What stretches are of, in words: all groups, parts, halves and layers, and the heads where they are the same."""
    groups, parts = (tuple(dict.fromkeys(names)) for names in zip(*((s.group, s.part) for s in stretches), strict=True))
    halves = [half for half in dict.fromkeys(half for s in stretches for half in s.halves) if half]
    first, last = min(s.layers[0] for s in stretches), max(s.layers[1] for s in stretches)
    heads = {s.heads for s in stretches}
    found = {"group": _counted("group", groups)}
    if any(parts):
        found["part"] = _counted("part", parts)
    if halves:
        found["kv"] = "+".join(halves)
    found["layer"] = f"layers {first}..{last}" if last > first else f"layer {first}"
    (start, stop), *more = heads
    if stop > 1 and not more:
        found["head"] = f"heads {start}..{stop - 1}"
    return found


def _counted(what: str, names: Sequence[str]) -> str:
    return f"{what}{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why the pieces of a pair, or of one transfer, are as long as they are; `str()` of it is for people."""

    runs: tuple[Run, ...]

    @property
    def limited_by(self) -> str:
        """What ends the runs that make the most pieces, in a few words; empty if there are none."""
        if not self.runs:
            return ""
        most = max(self.runs, key=lambda run: run.pieces)
        return ", ".join(limit.name for limit in most.limits)

    def __str__(self) -> str:
        return "\n".join(map(str, self.runs))


def _size(nbytes: int) -> str:
    for unit, size in _UNITS:
        if nbytes >= size and nbytes % (size // 16) == 0:
            return f"{nbytes / size:g} {unit}"
    return f"{nbytes} B"


# --- how runs grow
#
# A run takes in whatever begins, on both sides, just where it ends:
#
#     an axis of its class, with all indices
#     the next regions of its class, in another layer, half, head or dim
#     a run of another kind: another part in the same page, say
#
# and so on from there, since what has grown may meet its like again. Runs that grow alike are one family. Two families
# can go on with each other where the same rows move both, at the same distances, and what they have not taken in is
# alike, so that each run of the one meets a run of the other.
#
# Where elements are converted, both sides are counted in bytes of the narrower dtype.

I64: TypeAlias = NDArray[np.int64]

COLUMNS: Final[Mapping[str, int]] = {"dim": 3, "head": 2, "kv": 1, "layer": 0}
"""Axes that tell the regions of a class apart: their columns in `SegmentClass.places`, the usual inner ones first."""


def _families(sides: tuple[CacheGeometry, CacheGeometry], classes: Sequence[SegmentClass]) -> "list[Family]":
    """Every run of a pair, or of one of its transfers, as long as it becomes."""
    numbers: dict[tuple[object, ...], int] = {}
    found: list[Family] = []
    for c in classes:
        key = _as_staged(c.key)
        bases = c.bases * key.item_bytes // np.asarray([key.elements.src_bytes, key.elements.dst_bytes])
        src, dst = (numbers.setdefault(frame, len(numbers)) for frame in _frames(key))
        regions = Regions(c.places[:, None], c.places[:, None], bases)
        found.append(Family(key, (src, dst), _first(key, sides, c.places[0]), _axes(key), regions))
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


def _frames(key: SegmentKey) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """What two classes must have in common on either side, so that what meets in one row meets in every row.

    Groups have block lists of their own, and so rows.
    """
    rows = (key.group, key.src_rows, key.dst_rows)
    elements = key.elements if key.elements.converts else None
    src, dst = _within(key)
    return (
        (*rows, elements, key.src_block, src and key.src_token),
        (*rows, elements, key.dst_block, dst and key.dst_token),
    )


def _within(key: SegmentKey) -> tuple[bool, bool]:
    """Whether several full rows lie in one block, on either side."""
    src, dst = (not rows.is_state and rows.block_tokens > key.grid for rows in (key.src_rows, key.dst_rows))
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
    axes.append(Axis("token", key.grid, key.src_token, key.dst_token))
    return tuple(axis for axis in axes if axis.count > 1)


def _spec(side: CacheGeometry, key: SegmentKey, place: I64) -> TensorSpec:
    """The tensor that holds a region."""
    layer, half, head, _ = place.tolist()
    specs = side.places[key.group, key.part, KV_ORDER[half], layer]
    return next(spec for spec in specs if head in spec.heads)


def _first(key: SegmentKey, sides: Sequence[CacheGeometry], place: I64) -> Stretch:
    """One element of a class; its heads count from 0, and layers and halves are open, until it is placed."""
    dtypes = dict.fromkeys(_spec(side, key, place).dtype for side in sides)
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
    """Regions, or what runs that go through several begin with."""

    low: I64  # int64 (R, S, 4): least coordinates of each of S stretches
    high: I64  # int64 (R, S, 4): the greatest
    bases: I64  # int64 (R, 2): where they begin

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
    """Runs that grow alike."""

    key: SegmentKey  # of the class in which they begin
    frames: tuple[int, int]  # on either side, equal for classes that the same rows move by the same distances
    first: Stretch  # what they are made of, not yet placed
    axes: tuple[Axis, ...]  # what they have not taken in of a region
    regions: Regions  # at index 0 of these axes

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


# --- what ends them


def explain(plan: PairPlan | TransferPlan) -> Explanation:
    """Say why the pieces of a plan are as long as they are, and which side limits them.

    Args:
        plan: Of a pair: in full rows of whatever request. Of one transfer: only what is a part of it.
    """
    if isinstance(plan, PairPlan):
        return explain_classes(plan.src, plan.dst, plan.classes)
    pair = plan.pair
    moved = [c for c, of in zip(pair.classes, pair.meeting_of, strict=True) if len(plan.rows[of])]
    return explain_classes(pair.src, pair.dst, moved)


def explain_classes(src: CacheGeometry, dst: CacheGeometry, classes: Sequence[SegmentClass]) -> Explanation:
    """The same of some of what two ranks have in common."""
    found = _families((src, dst), classes)
    return Explanation(tuple(_Ending(family, src, dst).run(found) for family in found))


@dataclass(frozen=True, slots=True)
class _Ending:
    """Says of a family why its runs are over."""

    family: Family
    src: CacheGeometry
    dst: CacheGeometry

    def run(self, others: Iterable[Family]) -> Run:
        """The runs, and what ends them; among these others."""
        family = self.family
        key = family.key
        return Run(
            family.stretch,
            family.run,
            len(family.regions) * prod(axis.count for axis in family.axes),
            key.grid,
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

    def _near(self, side: CacheGeometry, place: I64, distance: int) -> bool:
        """Whether something so far from a region may lie in the same tensor, or in another view of its memory."""
        spec = _spec(side, self.family.key, place)
        return abs(distance) * spec.item_bytes < spec.extent_bytes * self.family.key.item_bytes

    def _block(self) -> tuple[Axis, Side]:
        """From one full row to the next, and on which sides that is another block."""
        key, inside = self.family.key, _within(self.family.key)
        grid = key.grid
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
            return (Limit("block", side, Cause.BLOCK_IDS, run, run, run),)
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
        geometry = self.src if side is Side.SOURCE else self.dst
        return _spec(geometry, self.family.key, self.family.regions.low[0, 0])

    def _held(self, spec: TensorSpec) -> tuple[int, int] | None:
        """The heads of a tensor, where more are than are copied."""
        first, stop = self.family.stretch.heads
        whole = first <= spec.heads.start and spec.heads.stop <= stop
        return None if whole else (spec.heads.start, spec.heads.stop)


def _reach(axis: Axis) -> tuple[bool, int]:
    """Where the next index of an axis lies: the nearest first, and what has no one stride last."""
    known = [abs(stride) for stride in (axis.src, axis.dst) if stride is not None]
    return len(known) < 2, max(known, default=0)
