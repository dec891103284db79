"""Sums over what a chunk holds, made by each side from its own blocks: they are equal if, and only if, the bytes are.

A chunk is a matrix of items: its regions by its rows. The bytes of an item have one order on both sides (head, token,
dim, as in staging), so they are the same words of 64 bits there, whatever either layout looks like:

    item(region, row) = mix(sum over its words of (word ^ word >> 32) * key(place of the word in its item)
                            ^ mix(region << 32 | row))

modulo 2^64. What travels is one sum of items for each region and one for each row, not one for each item: a piece that
differs shows in one of each, which name its layer and its block. The order of a sum does not matter, so any number of
threads may make it; places without a byte (rows that a token range has clipped) count as 0.

`mix` and the sequence of keys are those of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014). A key is odd, so one word that differs always shows in its item. Swapped words, tokens,
heads, blocks and layers show but for one case in about 2^32. This finds faults; it keeps out nobody who means harm.

Elements that are converted are summed in the form in which they arrive: the source converts what it reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from kvxfer.geometry.chunks import ChunkPart, ChunkPlan
from kvxfer.geometry.copyplan import BoxAxis, Segment, Stencil, fold
from kvxfer.geometry.intersect import KV_ORDER
from kvxfer.geometry.spec import Elements
from kvxfer.names import MAX_SUMS, lazy

__all__ = ["Damage", "ItemSums", "SumPart", "SumPlan", "damage", "keys", "mix", "selected"]

U64: TypeAlias = NDArray[np.uint64]

_WORD: Final = 8
_ALL_AXES: Final = 64
_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E37_79B9_7F4A_7C15
_FIRST: Final = 0xBF58_476D_1CE4_E5B9
_SECOND: Final = 0x94D0_49BB_1331_11EB
_CHUNK_BITS: Final = 20
_KEPT_KEYS: Final = 64


def mix(words: U64) -> U64:
    """SplitMix64's last step: every bit of a result depends on every bit of the word. One to one."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(_FIRST)
    words = (words ^ words >> np.uint64(27)) * np.uint64(_SECOND)
    return words ^ words >> np.uint64(31)


@lru_cache(maxsize=_KEPT_KEYS)
def keys(words: int) -> U64:
    """The key of each word of an item of so many. Not to be written to."""
    found = mix(np.arange(1, words + 1, dtype=np.uint64) * np.uint64(_GOLDEN)) | np.uint64(1)
    found.setflags(write=False)
    return found


def selected(transfer: int, chunk: int, every: int) -> bool:
    """Whether a chunk is summed where one in `every` is; the same on both sides. None is where `every` is 0."""
    if every <= 1:
        return every == 1
    word = np.array([(transfer << _CHUNK_BITS | chunk) & _MASK], np.uint64)
    return int(mix(word)[0]) % every == 0


@dataclass(frozen=True, slots=True, eq=False)
class SumPart:
    """What one side reads of one class of a chunk.

    Attributes:
        segment: A copy of this side's blocks into bytes in the order in which they are summed: from 0 on, item by item,
            the rows of a region behind each other.
        grid: Token rows that a row has at most.
        words: Words of 64 bits that an item takes there.
        whole: Whether rows fill them all; else the rest counts as 0.
        first_region: Its first region, counted through the chunk.
        first_row: Its first row, likewise.
    """

    segment: Segment
    grid: int
    words: int
    whole: bool
    first_region: int
    first_row: int

    @property
    def regions(self) -> int:
        """Number of regions."""
        return len(self.segment.regions)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.segment.stencil.rows)

    def cut(self, regions: slice, rows: slice, address: int) -> Segment:
        """Some of its items, copied to an address."""
        whole = self.segment
        table = whole.stencil.rows[rows].copy()
        table[:, 2] = np.arange(len(table))
        bases = whole.regions[regions].copy()
        bases[:, 1] = address + np.arange(len(bases), dtype=np.int64) * (len(table) * self.words * _WORD)
        stencil = Stencil(table, whole.stencil.src_block, whole.stencil.dst_block, whole.stencil.box)
        return Segment(bases, stencil, None if whole.factors is None else whole.factors[regions])


class SumPlan:
    """What one side reads of a chunk, and how its items are added up.

    Args:
        chunk: The chunk.
        side: 0 for its source, 1 for its destination.

    Attributes:
        bytes: About how many bytes that is.
        region_step: So many neighbouring regions share a sum.
        row_step: So many neighbouring rows do.
        region_sums: Number of sums over regions, which come first.
        row_sums: Number of sums over rows.
    """

    def __init__(self, chunk: ChunkPlan, side: int) -> None:
        self._chunk: Final = chunk
        self._side: Final = side
        self.bytes: Final = chunk.bytes
        regions = sum(len(part.slice.bases) for part in chunk.parts)
        rows = sum(len(part.rows) for part in chunk.parts)
        self.region_step: Final = max(1, -(-regions // MAX_SUMS))
        self.row_step: Final = max(1, -(-rows // MAX_SUMS))
        self.region_sums: Final = -(-regions // self.region_step)
        self.row_sums: Final = -(-rows // self.row_step)

    @classmethod
    def at_source(cls, chunk: ChunkPlan) -> "SumPlan":
        """What the prefill rank reads."""
        return cls(chunk, 0)

    @classmethod
    def at_destination(cls, chunk: ChunkPlan) -> "SumPlan":
        """What the decode rank reads, once it has arrived."""
        return cls(chunk, 1)

    @lazy
    def parts(self) -> Sequence[SumPart]:
        """What it reads of each class. Made where it is first asked for: not on the event loop."""
        found: list[SumPart] = []
        regions = rows = 0
        for part in self._chunk.parts:
            found.append(_part(part, self._side, regions, rows))
            regions += found[-1].regions
            rows += found[-1].rows
        return found


class ItemSums:
    """Adds items up, in any order."""

    def __init__(self, plan: SumPlan) -> None:
        self._plan: Final = plan
        self._sums: Final = np.zeros(plan.region_sums + plan.row_sums, np.uint64)

    def add(self, part: SumPart, regions: slice, rows: slice, items: U64) -> None:
        """Take the plain sums of some items, (regions, rows)."""
        plan = self._plan
        region = np.arange(regions.start, regions.stop, dtype=np.uint64) + np.uint64(part.first_region)
        row = np.arange(rows.start, rows.stop, dtype=np.uint64) + np.uint64(part.first_row)
        mixed = mix(items ^ mix(region[:, None] << np.uint64(32) | row))
        np.add.at(self._sums, (region // np.uint64(plan.region_step)).astype(np.int64), mixed.sum(axis=1))
        into = plan.region_sums + (row // np.uint64(plan.row_step)).astype(np.int64)
        np.add.at(self._sums, into, mixed.sum(axis=0))

    def packed(self) -> bytes:
        """All sums as they travel: 64 bits each, little-endian, those of regions first."""
        return self._sums.astype("<u8").tobytes()


@dataclass(frozen=True, slots=True)
class Damage:
    """Where what arrived differs: layers, tensors (group, part and half joined by `/`), target blocks by group."""

    layers: tuple[int, ...]
    tensors: tuple[str, ...]
    blocks: Mapping[str, tuple[int, ...]]


def damage(chunk: ChunkPlan, ours: bytes, theirs: bytes) -> Damage:
    """Name what differs, from the sums of both sides. Where neighbours share a sum, all of them are named."""
    plan = SumPlan.at_destination(chunk)
    differ = np.frombuffer(ours, "<u8") != np.frombuffer(theirs, "<u8")
    regions = np.repeat(differ[: plan.region_sums], plan.region_step)
    rows = np.repeat(differ[plan.region_sums :], plan.row_step)
    layers: set[int] = set()
    tensors: set[str] = set()
    blocks: dict[str, set[int]] = {}
    for part, summed in zip(chunk.parts, plan.parts, strict=True):
        key = part.slice.key
        for place in part.slice.places[regions[summed.first_region :][: summed.regions]]:
            layers.add(int(place[0]))
            tensors.add("/".join(filter(None, (key.group, key.part, KV_ORDER[int(place[1])]))))
        wrong = part.rows.table[rows[summed.first_row :][: summed.rows], 2] // key.dst_rows.block_ratio
        if len(wrong):
            blocks.setdefault(key.group, set()).update(cast("list[int]", wrong.tolist()))
    named = {group: tuple(sorted(ids)) for group, ids in blocks.items()}
    return Damage(tuple(sorted(layers)), tuple(sorted(tensors)), named)


def _part(part: ChunkPart, side: int, first_region: int, first_row: int) -> SumPart:
    of, rows = part.slice, part.rows
    key, grid, item = of.key, rows.grid, of.key.elements.dst_bytes
    token_bytes = item * prod(axis.count for axis in key.dims)
    row_bytes = token_bytes * grid * prod(axis.count for axis in key.heads)
    words = -(-row_bytes // _WORD)
    axes: list[BoxAxis] = []
    stride = item
    for own, gap in ((key.dims, grid), (key.heads, 1)):
        for axis in reversed(own):
            axes.append(BoxAxis(axis.count, (axis.src, axis.dst)[side], stride))
            stride *= axis.count
        stride *= gap
    elements = Elements(item, item) if side else key.elements
    box, _ = fold(axes, (key.src_token, key.dst_token)[side], token_bytes, elements, most=_ALL_AXES)
    table = np.zeros((len(rows), 5), np.int64)
    table[:, :2] = rows.table[:, 2 * side : 2 * side + 2]
    table[:, 2], table[:, 4] = np.arange(len(rows)), rows.table[:, 4]
    number = np.arange(len(of.bases), dtype=np.int64)
    bases = np.stack([of.bases[:, side], number * (len(rows) * words * _WORD)], axis=1)
    stencil = Stencil(table, (key.src_block, key.dst_block)[side], words * _WORD, box)
    segment = Segment(bases, stencil, of.factors if elements.converts else None)
    whole = row_bytes == words * _WORD and bool((table[:, 4] == grid).all())
    return SumPart(segment, grid, words, whole, first_region, first_row)
