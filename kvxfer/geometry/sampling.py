"""How many pieces a copy has once neighbours are merged, and how large they are, from a part of its rows.

Listing all of them costs tens of nanoseconds a piece, and there may be millions. A part is a stretch of neighbouring
rows in the middle, because pieces merge across rows wherever blocks follow each other. What counts is how many pieces
each row adds to those before it: even where all rows are one piece, a stretch then tells so. The first and the last row
may be cut by the token range, and stand for themselves.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.geometry.copyplan import CopyPlan, Pieces, Segment

__all__ = ["Sample", "sample"]

I64: TypeAlias = NDArray[np.int64]
F64: TypeAlias = NDArray[np.float64]

_STRETCH: Final = 16
"""Rows of a stretch at least: engines may count in blocks of so many kernel blocks, which follow each other."""
_AFFORDED: Final = 4
"""For that a stretch may have so many times the pieces that were asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Some pieces of a copy, and how many there are in all.

    Attributes:
        count: Pieces of the copy, neighbours merged.
        nbytes: Bytes of those that were looked at.
        weights: How many pieces each of them stands for.
    """

    count: float
    nbytes: I64
    weights: F64

    @classmethod
    def of(cls, parts: Iterable[tuple[Pieces, float]]) -> "Sample":
        """Lists of pieces, each of which stands for so many."""
        found = [(listed.nbytes, count) for listed, count in parts]
        return cls(
            sum(count for _, count in found),
            np.concatenate([nbytes for nbytes, _ in found]),
            np.concatenate([np.full(len(nbytes), count / max(1, len(nbytes))) for nbytes, count in found]),
        )


def sample(plan: CopyPlan, pieces: int) -> Sample:
    """Look at about so many pieces of a copy; at all, if there are no more.

    Segments with one table of rows are looked at together, since pieces of one may go on in another. Rows whose source
    block is padding, or not known yet, are taken to be like the others.
    """
    moved: dict[int, list[Segment]] = {}
    for segment in plan.segments:
        moved.setdefault(id(segment.stencil.rows), []).append(segment)
    whole = CopyPlan(tuple(part for alike in moved.values() for part in _with(alike, _known(alike)).segments))
    if whole.pieces == plan.pieces <= pieces:
        listed = whole.enumerate().merged()
        return Sample.of([(listed, float(len(listed)))])
    parts: list[tuple[Pieces, float]] = []
    for alike in moved.values():
        known, every = _with(alike, _known(alike)), CopyPlan(tuple(alike)).pieces
        if known.pieces:
            found = _looked_at(known, known.segments[0].stencil.rows, pieces // len(moved))
            parts += [(listed, count * every / known.pieces) for listed, count in found]
        else:
            parts.append((known.enumerate(), float(every)))
    return Sample.of(parts)


def _looked_at(plan: CopyPlan, rows: I64, pieces: int) -> list[tuple[Pieces, float]]:
    """Pieces of some of the rows that all segments of a plan have, and how many of its pieces they stand for."""
    each = plan.pieces // len(rows)
    kept = max(pieces // each, min(_STRETCH, _AFFORDED * pieces // each))
    if plan.pieces <= pieces or kept + 2 >= len(rows):
        listed = plan.enumerate().merged()
        return [(listed, float(len(listed)))]

    def merged(some: I64) -> Pieces:
        return _with(plan.segments, some).enumerate().merged()

    begin = (len(rows) - kept) // 2
    stretch = rows[begin : begin + max(1, kept)]
    times = plan.pieces / _with(plan.segments, stretch).pieces
    if not kept:  # so many pieces a row that one says enough
        listed = merged(stretch)
        return [(listed, len(listed) * times)]
    first, more, last = merged(rows[:1]), merged(rows[begin - 1 : begin + kept]), merged(rows[-1:])
    added = len(more) - len(merged(rows[begin - 1 : begin]))
    inner = added * times * _with(plan.segments, rows[1:-1]).pieces / plan.pieces
    ends = len(merged(rows[-2:])) - len(merged(rows[-2:-1]))
    return [(first, float(len(first))), (more, inner), (last, float(ends))]


def _with(segments: Iterable[Segment], rows: I64) -> CopyPlan:
    return CopyPlan(tuple(replace(one, stencil=replace(one.stencil, rows=rows)) for one in segments))


def _known(segments: Sequence[Segment]) -> I64:
    rows = segments[0].stencil.rows
    return rows[rows[:, 0] >= 0]
