"""The plan of one copy: small tables from which every address is computed.

Listing all pieces costs tens of nanoseconds each, and there may be millions. Those of some rows are
counted, and those of twice as many: the difference stands for each further lot of rows. So it is seen where pieces
merge across rows, as they do wherever blocks follow each other, even if all rows are one piece. The last row may be cut
by the token range, and stands for itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import GeometryError
from kvxfer.names import lazy

__all__ = [
    "BYTES",
    "MAX_OUTER_AXES",
    "STAGING_ALIGNMENT",
    "Box",
    "BoxAxis",
    "CopyPlan",
    "Elements",
    "Patch",
    "Pieces",
    "Sample",
    "Segment",
    "fold",
    "patches",
    "sample",
]

# --- strides from offsets
#
# Split axes (`dim/8 ... dim%8`) make an axis a mixed radix number, with another radix on either side. Rather than
# treat the pairs of splits case by case, the planner lists the byte offsets of the axis on both sides and reads the
# strides off.

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


# --- elements


@dataclass(frozen=True, slots=True, order=True)
class Elements:
    """Elements of a copy on both sides: their sizes, and their dtypes, empty where bytes are copied as they are."""

    src_bytes: int
    dst_bytes: int
    src: str = ""
    dst: str = ""

    @property
    def converts(self) -> bool:
        """Whether elements are computed anew, and not copied byte by byte."""
        return bool(self.src)

    @property
    def staged_bytes(self) -> int:
        """Size of one in staging and on the wire: the narrower of the two."""
        return min(self.src_bytes, self.dst_bytes)

    @property
    def gathered(self) -> "Elements":
        """The copy into staging. It converts if that makes elements smaller."""
        return self if self.dst_bytes < self.src_bytes else Elements(self.src_bytes, self.src_bytes)

    @property
    def scattered(self) -> "Elements":
        """The copy out of staging. It converts if the other one does not."""
        return Elements(self.dst_bytes, self.dst_bytes) if self.dst_bytes < self.src_bytes else self


BYTES: Final = Elements(1, 1)
"""Where nothing is converted, a run is counted in bytes."""


# --- the plan
#
# `address(region, row, token, axes, byte) = base[region] + block[row] * block_stride + (first_token[row] + token) *
# token_stride + sum(index_k * stride_k) + byte`, once for the source and once for the destination. A segment holds what
# does not change between its rows: strides and the box. The tables are O(regions + rows) although the copy may consist
# of millions of pieces.
#
# A copy that converts is the same walk in elements, which have another size (and dtype) on either side: each is read,
# multiplied by one number of its region, divided by the other (in float32), rounded to the destination's dtype and
# written. A copy of bytes is the case of elements of one byte.

F32: TypeAlias = NDArray[np.float32]

_AT_ONCE: Final = 8192
"""Pieces that are looked at together. What is needed in between is then small: fresh memory for it would cost several
times the arithmetic."""

MAX_OUTER_AXES: Final = 3
"""Outer axes of a box besides its token axis; more are unrolled into regions."""

STAGING_ALIGNMENT: Final = 16
"""Segments begin at multiples of this many bytes in staging, so that the widest accesses stay aligned."""


@dataclass(frozen=True, slots=True)
class Box:
    """The shape of what one row copies in one region."""

    outer: tuple[BoxAxis, ...]  # at most `MAX_OUTER_AXES` axes, outermost first, merged where both sides are contiguous
    src_token: int  # bytes between tokens at the source
    dst_token: int  # bytes between tokens at the destination
    run: int  # contiguous elements; times the row's token count if `token_in_run`
    # true if tokens follow each other without a gap on both sides: they are the run's outermost axis
    token_in_run: bool
    elements: Elements = BYTES  # what is done to each; bytes, unless it is converted

    @property
    def run_bytes(self) -> int:
        """Contiguous bytes that are written; times the row's token count if `token_in_run`."""
        return self.run * self.elements.dst_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes that one token row writes in one region."""
        return self.run_bytes * prod(axis.count for axis in self.outer)


@dataclass(frozen=True, eq=False)
class Segment:
    """A class of equal strides and extents: the same rows in each of its regions, from another base."""

    regions: I64  # int64 (R, 2): base address at the source and at the destination
    rows: I64  # int64 (N, 5): source block, first token there, destination block, first token there, tokens
    src_block: int  # bytes between blocks at the source
    dst_block: int  # bytes between blocks at the destination
    box: Box
    # float32 (R, 2), where elements are converted: by what those of a region are multiplied, and then divided; else
    # None
    factors: F32 | None = None

    @lazy
    def tokens(self) -> int:
        """Token rows in all, in a region."""
        return int(self.rows[:, 4].sum())

    @property
    def pieces(self) -> int:
        """Contiguous runs that it consists of, before neighbours are merged."""
        rows = len(self.rows) if self.box.token_in_run else self.tokens
        return len(self.regions) * rows * prod(axis.count for axis in self.box.outer)

    @lazy
    def offsets(self) -> I64:
        """int64 (N, 3): source offset, destination offset and tokens of each row that has any."""
        rows, box = self.rows, self.box
        counts = rows[:, 4]
        if len(counts) and int(counts.min()) <= 0:
            rows = rows[counts > 0]
        found = np.empty((len(rows), 3), np.int64)
        found[:, 0] = rows[:, 0] * self.src_block + rows[:, 1] * box.src_token
        found[:, 1] = rows[:, 2] * self.dst_block + rows[:, 3] * box.dst_token
        found[:, 2] = rows[:, 4]
        return found

    def enumerate(self) -> "Pieces":
        """List every piece, as far as possible in ascending order of destination.

        Raises:
            GeometryError: If it converts: a descriptor can only say which bytes go where.
        """
        elements, rows = self.box.elements, self.offsets
        if elements.converts:
            raise GeometryError(f"{elements.src} to {elements.dst} cannot be copied piece by piece")
        counts = rows[:, 2]
        if not len(counts) or (counts == counts[0]).all():
            return self._listed(rows)
        return Pieces.joined([self._listed(rows[counts == count]) for count in np.unique(counts)])

    def _listed(self, rows: I64) -> "Pieces":
        """Pieces of rows of one length: the sums of one offset from each level."""
        box, tokens = self.box, int(rows[0, 2]) if len(rows) else 0
        axes = box.outer if box.token_in_run else (*box.outer, BoxAxis(tokens, box.src_token, box.dst_token))
        bases = _ascending(self.regions[:, 0], self.regions[:, 1])
        levels = [bases, _ascending(rows[:, 0], rows[:, 1]), *map(_steps, axes)]
        # levels nest where the wider one is outside, and then sums of ascending offsets ascend
        levels.sort(key=_width, reverse=True)
        src, dst = (reduce(np.add.outer, [level[side] for level in levels]).ravel() for side in (0, 1))
        return Pieces(src, dst, np.full(len(src), box.run_bytes * (tokens if box.token_in_run else 1), np.int64))


def _ascending(src: I64, dst: I64) -> tuple[I64, I64]:
    if (dst[1:] >= dst[:-1]).all():
        return src, dst
    order = np.argsort(dst)
    return src[order], dst[order]


def _width(level: tuple[I64, I64]) -> int:
    dst = level[1]
    return int(dst[-1] - dst[0]) if len(dst) else 0


def _steps(axis: BoxAxis) -> tuple[I64, I64]:
    index = np.arange(axis.count, dtype=np.int64)
    if axis.dst < 0:
        index = index[::-1]
    return index * axis.src, index * axis.dst


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """A copy as a list of contiguous pieces: int64 columns of equal length."""

    src: I64
    dst: I64
    nbytes: I64

    def __len__(self) -> int:
        return len(self.nbytes)

    @classmethod
    def joined(cls, parts: "Sequence[Pieces]") -> "Pieces":
        """Several lists behind each other."""
        if len(parts) == 1:
            return parts[0]
        empty = cls(*np.zeros((3, 0), np.int64))
        columns = zip(*((part.src, part.dst, part.nbytes) for part in (empty, *parts)), strict=True)
        return cls(*map(np.concatenate, columns))

    def merged(self) -> "Pieces":
        """The same copy with neighbours joined, in destination order."""
        src, dst, nbytes = self.src, self.dst, self.nbytes
        if (dst[1:] < dst[:-1]).any():
            order = np.argsort(dst, kind="stable")  # enumerated lists are ascending runs, which this sort makes use of
            src, dst, nbytes = src[order], dst[order], nbytes[order]
        last = _run_ends(src, dst, nbytes)
        count = int(np.count_nonzero(last))
        if count == len(last):
            return Pieces(src, dst, nbytes)
        found = np.empty((3, count), np.int64)
        at = begin = 0  # runs written so far, and where the next one begins
        for low in range(0, len(last), _AT_ONCE):
            ends = np.flatnonzero(last[low : low + _AT_ONCE]) + low
            if len(ends):
                begins = np.concatenate([[begin], ends[:-1] + 1])
                part = found[:, at : at + len(ends)]
                part[0], part[1] = src[begins], dst[begins]
                part[2] = dst[ends] + nbytes[ends] - part[1]
                at, begin = at + len(ends), int(ends[-1]) + 1
        return Pieces(*found)


def _run_ends(src: I64, dst: I64, nbytes: I64) -> NDArray[np.bool_]:
    """Which pieces the next one does not continue."""
    found = np.ones(len(src), np.bool_)
    for low in range(0, len(src) - 1, _AT_ONCE):
        high = min(low + _AT_ONCE, len(src) - 1)
        length = nbytes[low:high]
        found[low:high] = src[low:high] + length != src[low + 1 : high + 1]
        found[low:high] |= dst[low:high] + length != dst[low + 1 : high + 1]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """Segments to copy, in any order; no two of them write the same byte."""

    segments: tuple[Segment, ...]

    @property
    def pieces(self) -> int:
        """Contiguous runs, before neighbours are merged."""
        return sum(segment.pieces for segment in self.segments)

    def enumerate(self) -> Pieces:
        """List every piece. O(pieces): for routes that need descriptors, and for tests."""
        return Pieces.joined([segment.enumerate() for segment in self.segments])


def fold(
    axes: Iterable[BoxAxis], src_token: int, dst_token: int, elements: Elements, *, most: int = MAX_OUTER_AXES
) -> tuple[Box, tuple[BoxAxis, ...]]:
    """Find the longest run and merge what is contiguous.

    The run starts as one element and takes in every axis that continues it on both sides; the token axis only as its
    last, so that a row with fewer tokens is a shorter run of the same box.

    Returns:
        The box, and the axes beyond its `most` outer ones, to be unrolled into regions.
    """
    rest = [axis for axis in axes if axis.count > 1]
    run, elements = (1, elements) if elements.converts else (elements.src_bytes, BYTES)
    token_in_run = False
    while not token_in_run:
        steps = (run * elements.src_bytes, run * elements.dst_bytes)
        inner = next((axis for axis in rest if (axis.src, axis.dst) == steps), None)
        if inner is not None:
            rest.remove(inner)
            run *= inner.count
        elif (src_token, dst_token) == steps:
            token_in_run = True
        else:
            break
    merged: list[BoxAxis] = []
    for axis in sorted(rest, key=lambda a: (-a.dst, -a.src)):
        last = merged[-1] if merged else None
        if last is not None and (last.src, last.dst) == (axis.src * axis.count, axis.dst * axis.count):
            merged[-1] = BoxAxis(last.count * axis.count, axis.src, axis.dst)
        else:
            merged.append(axis)
    by_count = sorted(merged, key=lambda a: a.count)
    unrolled = by_count[: max(0, len(merged) - most)]
    outer = tuple(axis for axis in merged if axis not in unrolled)
    return Box(outer, src_token, dst_token, run, token_in_run, elements), tuple(unrolled)


# --- pieces, from a part of the rows

_FEW: Final = 16
"""Rows that are looked at first, at least: engines may count in blocks of so many kernel blocks, which follow on."""
_AFFORDED: Final = 4
"""For that there may be so many times the pieces that were asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Some pieces of a copy, and how many there are in all."""

    count: float  # pieces of the copy, neighbours merged
    nbytes: I64  # bytes of those that were looked at
    weights: NDArray[np.float64]  # how many pieces each of them stands for


def sample(plan: CopyPlan, pieces: int) -> Sample:
    """Look at about so many pieces of a copy; at all, if there are no more.

    Segments with one table of rows are looked at together, since pieces of one may go on in another. Rows whose source
    block is padding, or not known yet, are taken to be like the others.
    """
    moved: dict[int, list[Segment]] = {}
    for segment in plan.segments:
        moved.setdefault(id(segment.rows), []).append(segment)
    known = [_of_rows(alike, _known(alike)) for alike in moved.values()]
    if sum(one.pieces for one in known) == plan.pieces <= pieces:
        nbytes = CopyPlan(tuple(part for one in known for part in one.segments)).enumerate().merged().nbytes
        return Sample(float(len(nbytes)), nbytes, np.ones(len(nbytes)))
    found = Sample(0.0, np.zeros(0, np.int64), np.zeros(0))
    for alike, one in zip(moved.values(), known, strict=True):
        every = CopyPlan(tuple(alike)).pieces
        nbytes, count = _looked_at(one, pieces // len(moved)) if one.pieces else (found.nbytes[:0], 1.0)
        count *= every / max(1, one.pieces)
        weights = np.full(len(nbytes), count / max(1, len(nbytes)))
        found = Sample(
            found.count + count, np.concatenate([found.nbytes, nbytes]), np.concatenate([found.weights, weights])
        )
    return found


def _looked_at(plan: CopyPlan, pieces: int) -> tuple[I64, float]:
    """Sizes of some pieces of a plan whose segments have one table of rows, and how many pieces it has in all."""
    rows = plan.segments[0].rows
    asked = pieces * len(rows) // plan.pieces
    few = max(1, asked, min(_FEW, _AFFORDED * asked))
    if plan.pieces <= pieces or 2 * few >= len(rows):
        nbytes = plan.enumerate().merged().nbytes
        return nbytes, float(len(nbytes))
    parts = rows[:few], rows[: 2 * few], rows[-2:-1], rows[-2:]
    plans = [_of_rows(plan.segments, some) for some in parts]
    half, begin, before, end = (part.enumerate().merged().nbytes for part in plans)
    added = (len(begin) - len(half)) / (plans[1].pieces - plans[0].pieces)
    rest = plan.pieces - plans[1].pieces - (plans[3].pieces - plans[2].pieces)
    return np.concatenate([begin, end]), len(begin) + added * rest + len(end) - len(before)


def _of_rows(segments: Iterable[Segment], rows: I64) -> CopyPlan:
    return CopyPlan(tuple(replace(one, rows=rows) for one in segments))


def _known(segments: Sequence[Segment]) -> I64:
    rows = segments[0].rows
    return rows[rows[:, 0] >= 0]
