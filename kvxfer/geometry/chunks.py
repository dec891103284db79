"""Chunks: how a transfer is cut, and one chunk as a gather, a scatter, a copy in place, or what is added up of it.

The staging buffer is just one more strided array, so all three are the same tables with other base addresses.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import GeometryError
from kvxfer.geometry.copyplan import (
    STAGING_ALIGNMENT,
    Blank,
    Box,
    BoxAxis,
    CopyPlan,
    Elements,
    Pieces,
    Segment,
    Stencil,
    fold,
)
from kvxfer.geometry.spec import KV_ORDER
from kvxfer.names import MAX_SUMS, lazy

if TYPE_CHECKING:  # a chunk is made of these, and makes none
    from kvxfer.geometry.intersect import SegmentKey
    from kvxfer.geometry.rows import Rows

__all__ = [
    "MOST_BLANKS",
    "ChunkGrid",
    "ChunkPart",
    "ChunkPlan",
    "Damage",
    "ItemSums",
    "Slice",
    "SumPart",
    "SumPlan",
    "damage",
    "keys",
    "mix",
    "selected",
]

I64: TypeAlias = NDArray[np.int64]
F32: TypeAlias = NDArray[np.float32]

MOST_BLANKS: Final = 8
"""Where more places would have to be zeroed, all of a chunk is: each costs a call."""


@dataclass(frozen=True, slots=True)
class _Banded:
    """Cells of a grid with bands of several windows: see `ChunkGrid`."""

    windows: int
    runs: int
    band: int  # windows in a band
    first: int  # the number of the first window, counted from the first token of all

    def __getitem__(self, chunk: int) -> int:
        lead = min(self.windows, self.band - self.first % self.band)
        begin, size, at = 0, lead, chunk
        if chunk >= lead * self.runs:
            bands, at = divmod(chunk - lead * self.runs, self.band * self.runs)
            begin = lead + bands * self.band
            size = min(self.band, self.windows - begin)
        run, window = divmod(at, size)
        return (begin + window) * self.runs + run


@dataclass(frozen=True)
class ChunkGrid:
    """How a transfer is cut: windows of tokens x runs of layers.

    Chunks go in the order of their numbers: band by band of windows, in a band run by run, and of a run window by
    window. So bands of one window are for a request that grows by tokens, and one band of all windows is for layers
    that are computed one after the other.
    """

    layers: tuple[int, ...]  # all selected layers, ascending
    layers_per_chunk: int  # layers in a run
    tokens_per_chunk: int  # tokens in a window; windows begin at multiples of it
    start: int  # first token of the transfer
    # one past its last token. Where it is `start` too, no token is missing at the destination; the grid then is one
    # window at the last token, to which state belongs
    stop: int
    band: int = 1  # windows in a band; bands begin at multiples of it, as windows do
    # the token at which the first window begins, if not before
    first: int = field(init=False, repr=False, compare=False)
    windows: int = field(init=False, repr=False, compare=False)
    layer_runs: int = field(init=False, repr=False, compare=False)  # runs of layers in each window
    chunks: int = field(init=False, repr=False, compare=False)
    # by chunk, where it is in the table of windows (rows) and runs, counted row by row
    cells: "range | _Banded" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        steps = min(self.layers_per_chunk, self.tokens_per_chunk, self.band)
        if steps < 1 or not self.layers or not 0 < self.stop >= self.start:
            raise GeometryError(f"a chunk grid needs layers, tokens and positive steps, not {self}")
        first, step, note = min(self.start, self.stop - 1), self.tokens_per_chunk, object.__setattr__
        windows, runs = (self.stop - 1) // step - first // step + 1, -(-len(self.layers) // self.layers_per_chunk)
        note(self, "first", first)
        note(self, "windows", windows)
        note(self, "layer_runs", runs)
        note(self, "chunks", windows * runs)
        row_by_row = self.band == 1 or runs == 1 or windows == 1
        note(self, "cells", range(windows * runs) if row_by_row else _Banded(windows, runs, self.band, first // step))

    @property
    def edges(self) -> I64:
        """int64 (windows + 1,): the first token of each window, and one past the last token."""
        window = self.first // self.tokens_per_chunk + np.arange(self.windows + 1, dtype=np.int64)
        return np.clip(window * self.tokens_per_chunk, self.first, self.stop)

    def __len__(self) -> int:
        return self.chunks

    def layers_of(self, first: int, stop: int) -> list[int]:
        """Layers of chunks that follow one another, each as often as it has a part in one of them."""
        cells, runs, each = self.cells, self.layer_runs, self.layers_per_chunk
        found: list[int] = []
        for chunk in range(first, stop):
            begin = cells[chunk] % runs * each
            found += self.layers[begin : begin + each]
        return found

    def of(self, chunk: int) -> tuple[tuple[int, ...], int, int]:
        """Layers, first token and one past the last token of a chunk.

        Raises:
            IndexError: If there is no such chunk.
        """
        if not 0 <= chunk < self.chunks:
            raise IndexError(f"chunk {chunk} is outside 0..{self.chunks - 1}")
        window, run = divmod(self.cells[chunk], self.layer_runs)
        first = (self.first // self.tokens_per_chunk + window) * self.tokens_per_chunk
        layers = self.layers[run * self.layers_per_chunk :][: self.layers_per_chunk]
        return layers, max(first, self.first), min(first + self.tokens_per_chunk, self.stop)


@dataclass(frozen=True, slots=True, eq=False)
class _Folded:
    """Regions with the box that a row copies in each."""

    box: Box
    # int64 (R, 2): addresses at the source and destination; in staging they count from the place of the first row that
    # their region has there
    regions: I64
    number: I64  # int64 (R,): which region of the slice each belongs to
    factors: F32 | None


@dataclass(frozen=True, eq=False)
class Slice:
    """What a run of layers has of one class: all that chunks of it share, whatever the request."""

    number: int  # which class of the pair
    key: "SegmentKey"
    bases: I64  # int64 (R, 2): address of the first element in block 0, at the source and destination, of each region
    factors: F32  # float32 (R, 2): by what its elements are multiplied, and then divided
    places: I64  # int64 (R, 4): layer, half, first head and first dim of each region

    @lazy
    def token_bytes(self) -> int:
        """Of a token row in a region, in staging."""
        return self.key.token_bytes

    @lazy
    def row_bytes(self) -> int:
        """Of a row in staging, where it is head, token, dim in C order and a full sub-block."""
        return self.token_bytes * self.key.grid

    @lazy
    def in_place(self) -> _Folded:
        """From the blocks of one side into those of the other."""
        key = self.key
        return self._folded((*key.heads, *key.dims), self.bases, (key.src_token, key.dst_token), key.elements)

    @lazy
    def gathered(self) -> _Folded:
        """From blocks into staging."""
        key = self.key
        bases = np.stack([self.bases[:, 0], np.zeros(len(self.bases), np.int64)], axis=1)
        return self._folded(self._staging_axes(1), bases, (key.src_token, self._staged_token), key.elements.gathered)

    @lazy
    def scattered(self) -> _Folded:
        """From staging into blocks."""
        key = self.key
        bases = np.stack([np.zeros(len(self.bases), np.int64), self.bases[:, 1]], axis=1)
        return self._folded(self._staging_axes(0), bases, (self._staged_token, key.dst_token), key.elements.scattered)

    @property
    def _staged_token(self) -> int:
        """Bytes between tokens in staging."""
        return self.key.item_bytes * prod(axis.count for axis in self.key.dims)

    def _staging_axes(self, side: int) -> list[BoxAxis]:
        """The box axes with one side replaced by staging."""
        axes: list[BoxAxis] = []
        stride = self.key.item_bytes
        for own, gap in ((self.key.dims, self.key.grid), (self.key.heads, 1)):
            for axis in reversed(own):
                strides = (axis.src, stride) if side else (stride, axis.dst)
                axes.append(BoxAxis(axis.count, *strides))
                stride *= axis.count
            stride *= gap
        return axes

    def _folded(self, axes: Iterable[BoxAxis], bases: I64, tokens: tuple[int, int], elements: Elements) -> _Folded:
        """These axes as a box, those beyond it unrolled into regions; `tokens` are the token strides of both sides."""
        box, unrolled = fold(axes, *tokens, elements)
        factors = self.factors if elements.converts else None
        number = np.arange(len(bases), dtype=np.int64)
        for axis in unrolled:
            steps = np.arange(axis.count, dtype=np.int64)[:, None] * np.asarray([axis.src, axis.dst], np.int64)
            bases = (bases[:, None, :] + steps[None]).reshape(-1, 2)
            number = np.repeat(number, axis.count)
            factors = np.repeat(factors, axis.count, axis=0) if factors is not None else None
        return _Folded(box, bases, number, factors)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPart:
    """What a chunk takes of one class."""

    slice: Slice  # the regions of its layers
    rows: "Rows"  # where the block lists meet

    @property
    def staged_bytes(self) -> int:
        """Room that it takes in staging."""
        return len(self.slice.bases) * len(self.rows.table) * self.slice.row_bytes

    @property
    def bytes(self) -> int:
        """Bytes that it carries."""
        return len(self.slice.bases) * self.rows.total_tokens * self.slice.token_bytes

    def in_place(self, table: I64) -> Segment:
        """From blocks to blocks, by a table of its rows."""
        key, folded = self.slice.key, self.slice.in_place
        return Segment(folded.regions, Stencil(table, key.src_block, key.dst_block, folded.box), folded.factors)

    def gathered(self, staging: int) -> Segment:
        """From blocks into staging from address `staging` on, where row n is block n and begins there."""
        of, table = self.slice, self.rows.table.copy()
        table[:, 2], table[:, 3] = np.arange(len(table)), 0
        return self._staged(of.gathered, Stencil(table, of.key.src_block, of.row_bytes, of.gathered.box), 1, staging)

    def scattered(self, staging: int) -> Segment:
        """From staging from address `staging` on into blocks; likewise."""
        of, table = self.slice, self.rows.table.copy()
        table[:, 0], table[:, 1] = np.arange(len(table)), 0
        return self._staged(of.scattered, Stencil(table, of.row_bytes, of.key.dst_block, of.scattered.box), 0, staging)

    def blanks(self, staging: int) -> Iterator[Blank]:
        """What of its room from address `staging` on no segment writes, and whole rows where a part of them is."""
        rows, row_bytes, nbytes = self.rows.table, self.slice.row_bytes, self.staged_bytes
        cut = np.flatnonzero(rows[:, 4] * self.slice.token_bytes != row_bytes)  # at most the first and the last
        for row in cut.tolist():
            yield Blank(staging + row * row_bytes, row_bytes, len(self.slice.bases), len(rows) * row_bytes)
        if rest := -nbytes % STAGING_ALIGNMENT:
            yield Blank(staging + nbytes, rest)

    def _staged(self, folded: _Folded, stencil: Stencil, side: int, staging: int) -> Segment:
        """With the regions behind each other in staging, which is the source or destination as `side` says."""
        regions = folded.regions.copy()
        regions[:, side] += folded.number * (len(self.rows.table) * self.slice.row_bytes) + staging
        return Segment(regions, stencil, folded.factors)


class ChunkPlan:
    """One chunk: the same rows and regions as a gather into staging, a scatter out of it, or a copy in place.

    Staging holds elements in the narrower of the two dtypes, so one of gather and scatter converts, the other copies.

    Args:
        parts: What it takes of each class that takes part, in the order of staging.
    """

    def __init__(self, parts: Sequence[ChunkPart]) -> None:
        self.parts: Final = parts
        self._copy: CopyPlan | None = None
        self._offsets: Final[list[int]] = []
        offset = carried = 0
        for part in parts:
            self._offsets.append(offset)
            offset += -(-part.staged_bytes // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
            carried += part.bytes
        # room that the chunk takes in staging: every row a full sub-block, segments aligned
        self.staged_bytes: Final = offset
        self.bytes: Final = carried

    def copy(self) -> CopyPlan:
        """Source blocks straight into destination blocks; needs both sides' addresses.

        Nothing of it lies in staging, so rows that only staging tells apart are one.
        """
        if self._copy is None:
            self._copy = CopyPlan(tuple(part.in_place(part.rows.joined) for part in self.parts))
        return self._copy

    def listed(self) -> Pieces:
        """The same as a list of contiguous pieces, neighbours merged, in order of destination."""
        plan = CopyPlan(tuple(part.in_place(part.rows.ascending) for part in self.parts))
        return plan.enumerate().merged()

    def gather(self, staging: int) -> CopyPlan:
        """Source blocks into staging at address `staging`, every byte of which is written: zero where nothing belongs.

        What was there before is another request's, and would travel with this one.
        """
        placed = zip(self.parts, self._offsets, strict=True)
        segments = tuple([part.gathered(staging + offset) for part, offset in placed])
        return CopyPlan(segments, self._blanks(staging) if self.staged_bytes > self.bytes else ())

    def scatter(self, staging: int) -> CopyPlan:
        """Staging at address `staging` into destination blocks."""
        placed = zip(self.parts, self._offsets, strict=True)
        return CopyPlan(tuple([part.scattered(staging + offset) for part, offset in placed]))

    def _blanks(self, staging: int) -> tuple[Blank, ...]:
        """What of staging no segment of a gather writes, or more."""
        placed = zip(self.parts, self._offsets, strict=True)
        found = [blank for part, offset in placed for blank in part.blanks(staging + offset)]
        return tuple(found) if len(found) <= MOST_BLANKS else (Blank(staging, self.staged_bytes),)


# --- sums over what a chunk holds
#
# Each side makes them from its own blocks: they are equal if, and only if, the bytes are.
#
# A chunk is a matrix of items: its regions by its rows. The bytes of an item have one order on both sides (head, token,
# dim, as in staging), so they are the same words of 64 bits there, whatever either layout looks like:
#
#     item(region, row) = mix(sum over its words of (word ^ word >> 32) * key(place of the word in its item)
#                             ^ mix(region << 32 | row))
#
# modulo 2^64. What travels is one sum of items for each region and one for each row, not one for each item: a piece
# that differs shows in one of each, which name its layer and its block. The order of a sum does not matter, so any
# number of threads may make it; places without a byte (rows that a token range has clipped) count as 0.
#
# `mix` and the sequence of keys are those of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
# generators", OOPSLA 2014). A key is odd, so one word that differs always shows in its item. Swapped words, tokens,
# heads, blocks and layers show but for one case in about 2^32. This finds faults; it keeps out nobody who means harm.
#
# Elements that are converted are summed in the form in which they arrive: the source converts what it reads.

U64: TypeAlias = NDArray[np.uint64]

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E37_79B9_7F4A_7C15
_FIRST: Final = 0xBF58_476D_1CE4_E5B9
_SECOND: Final = 0x94D0_49BB_1331_11EB
_CHUNK_BITS: Final = 20
_KEPT_KEYS: Final = 64
_WORD: Final = 8
_ALL_AXES: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class SumPart:
    """What one side reads of one class of a chunk."""

    # a copy of this side's blocks into bytes in the order in which they are summed: from 0 on, item by item, the rows
    # of a region behind each other
    segment: Segment
    grid: int  # token rows that a row has at most
    words: int  # words of 64 bits that an item takes there
    whole: bool  # whether rows fill them all; else the rest counts as 0
    first_region: int  # its first region, counted through the chunk
    first_row: int  # its first row, likewise

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
    """

    def __init__(self, chunk: ChunkPlan, side: int) -> None:
        self._chunk: Final = chunk
        self._side: Final = side
        self.bytes: Final = chunk.bytes  # about how many bytes that is
        regions = sum(len(part.slice.bases) for part in chunk.parts)
        rows = sum(len(part.rows) for part in chunk.parts)
        self.region_step: Final = max(1, -(-regions // MAX_SUMS))  # so many neighbouring regions share a sum
        self.row_step: Final = max(1, -(-rows // MAX_SUMS))  # so many neighbouring rows do
        self.region_sums: Final = -(-regions // self.region_step)  # number of sums over regions, which come first
        self.row_sums: Final = -(-rows // self.row_step)  # number of sums over rows

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
