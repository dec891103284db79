"""Copies of a chunk into staging memory and out of it, by their definition.

Staging holds elements in the narrower of the two dtypes, so one of gather and scatter converts, the other copies.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvxfer.copy.binding import BLANKS
from kvxfer.geometry.copyplan import STAGING_ALIGNMENT, CopyPlan, Segment
from kvxfer.geometry.intersect import Folded
from kvxfer.geometry.plan import ChunkPart, ChunkPlan


@dataclass(frozen=True, slots=True)
class Blank:
    """Lines of bytes at a destination, `pitch` bytes from one to the next, that are zeroed before all copies."""

    address: int
    width: int
    lines: int = 1
    pitch: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Blanked(CopyPlan):
    """A plan, and what is zeroed before anything is copied."""

    blanks: tuple[Blank, ...] = ()


def nbytes_of(plan: CopyPlan) -> int:
    """Bytes that a plan writes."""
    return sum(len(one.regions) * one.tokens * one.box.token_bytes for one in plan.segments)


def _placed(chunk: ChunkPlan, staging: int) -> Iterator[tuple[ChunkPart, int]]:
    """What a chunk takes of each class, and where in staging that is."""
    for part in chunk.parts:
        yield part, staging
        staging += -(-part.staged_bytes // STAGING_ALIGNMENT) * STAGING_ALIGNMENT


def _segment(part: ChunkPart, folded: Folded, side: int, staging: int) -> Segment:
    """From staging (`side` 0) or into it (1), where row n is block n, and regions lie behind each other."""
    of, table, regions = part.slice, part.rows.table.copy(), folded.regions.copy()
    table[:, 2 * side], table[:, 2 * side + 1] = np.arange(len(table)), 0
    number = np.arange(len(regions)) // (len(regions) // len(of.bases))
    regions[:, side] += number * (len(table) * of.row_bytes) + staging
    strides = (of.row_bytes, of.key.dst_block) if side == 0 else (of.key.src_block, of.row_bytes)
    return Segment(regions, table, *strides, folded.box, folded.factors)


def gather(chunk: ChunkPlan, staging: int) -> Blanked:
    """Source blocks into staging at an address, every byte of which is written: zero where nothing belongs."""
    placed = list(_placed(chunk, staging))
    blanks = [blank for part, at in placed for blank in _blanks(part, at)] if chunk.staged_bytes > chunk.bytes else []
    few = tuple(blanks) if len(blanks) <= BLANKS else (Blank(staging, chunk.staged_bytes),)
    return Blanked(tuple(_segment(part, part.slice.gathered, 1, at) for part, at in placed), few)


def scatter(chunk: ChunkPlan, staging: int) -> CopyPlan:
    """Staging at an address into destination blocks."""
    return CopyPlan(tuple(_segment(part, part.slice.scattered, 0, at) for part, at in _placed(chunk, staging)))


def _blanks(part: ChunkPart, staging: int) -> Iterator[Blank]:
    """What of its room no segment writes, and whole rows where a part of them is."""
    rows, row_bytes, nbytes = part.rows.table, part.slice.row_bytes, part.staged_bytes
    cut = np.flatnonzero(rows[:, 4] * part.slice.token_bytes != row_bytes)  # at most the first and the last
    for row in cut.tolist():
        yield Blank(staging + row * row_bytes, row_bytes, len(part.slice.bases), len(rows) * row_bytes)
    if rest := -nbytes % STAGING_ALIGNMENT:
        yield Blank(staging + nbytes, rest)
