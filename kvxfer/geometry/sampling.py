"""How many pieces a copy has once neighbours are merged, and how large they are, from a part of its rows.

Listing all of them costs tens of nanoseconds a piece, and there may be millions. A part is a stretch of neighbouring
rows in the middle, because pieces merge across rows wherever blocks follow each other. What counts is how many pieces
each row adds to those before it: even where all rows are one piece, a stretch then tells so. The first and the last row
may be cut by the token range, and stand for themselves.
"""

from collections.abc import Iterable
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

    Rows whose source block is padding, or not known yet, are taken to be like the others.
    """
    known = [replace(segment, rows=segment.rows[segment.rows[:, 0] >= 0]) for segment in plan.segments]
    whole = CopyPlan(tuple(known))
    if whole.pieces == plan.pieces <= pieces:
        listed = whole.enumerate().merged()  # also across segments
        return Sample.of([(listed, float(len(listed)))])
    parts: list[tuple[Pieces, float]] = []
    for given, segment in zip(plan.segments, known, strict=True):
        if len(segment.rows):
            like = given.pieces / segment.pieces
            parts += [(listed, count * like) for listed, count in _looked_at(segment, pieces // len(known))]
        else:
            parts.append((segment.enumerate(), float(given.pieces)))
    return Sample.of(parts)


def _looked_at(segment: Segment, pieces: int) -> list[tuple[Pieces, float]]:
    """Pieces of some rows, and how many of the segment's they stand for."""
    rows = segment.rows
    each = segment.pieces // len(rows)
    kept = max(pieces // each, min(_STRETCH, _AFFORDED * pieces // each))
    if segment.pieces <= pieces or kept + 2 >= len(rows):
        listed = _merged(segment, rows)
        return [(listed, float(len(listed)))]
    begin = (len(rows) - kept) // 2
    if not kept:  # so many pieces a row that one says enough
        listed = _merged(segment, rows[begin : begin + 1])
        return [(listed, len(listed) * segment.pieces / replace(segment, rows=rows[begin : begin + 1]).pieces)]
    first, stretch, last = (_merged(segment, part) for part in (rows[:1], rows[begin - 1 : begin + kept], rows[-2:]))
    added = len(stretch) - len(_merged(segment, rows[begin - 1 : begin]))
    times = replace(segment, rows=rows[1:-1]).pieces / replace(segment, rows=rows[begin : begin + kept]).pieces
    ends = len(last) - len(_merged(segment, rows[-2:-1]))
    return [(first, float(len(first))), (stretch, added * times), (_merged(segment, rows[-1:]), float(ends))]


def _merged(segment: Segment, rows: I64) -> Pieces:
    return replace(segment, rows=rows).enumerate().merged()
