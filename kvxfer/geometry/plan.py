"""The planner: from two geometries, two block lists and a token range to copy plans.

    PairPlan      strides, boxes and base addresses of all that is selected between two ranks; made once a pair
      .bind(...)  with block lists and a token range: a `TransferPlan`, checked to be covered
        .chunk(n) one chunk of the grid (token window x run of layers): a `ChunkPlan`, which is a copy in place, or
                  what is added up of it

The planner is pure: numbers in, numbers out.
"""

import hashlib
import struct
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import lcm, prod
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import BlocksError, GeometryError, TokensError
from kvxfer.geometry.axes import KV_ORDER, RowSide
from kvxfer.geometry.copyplan import (
    STAGING_ALIGNMENT,
    BoxAxis,
    CopyPlan,
    Elements,
    Pieces,
    Segment,
    fold,
    sample,
)
from kvxfer.geometry.intersect import SegmentClass, SegmentKey, Selection, intersect
from kvxfer.geometry.rows import BlockLists, Meeting, Rows, check_spans, check_tokens, meet
from kvxfer.names import MAX_SUMS, MAX_TOKENS, lazy

if TYPE_CHECKING:
    from kvxfer.geometry.cache import CacheGeometry

__all__ = [
    "ChunkGrid",
    "ChunkPart",
    "ChunkPlan",
    "Damage",
    "PairPlan",
    "SumPart",
    "SumPlan",
    "TransferPlan",
    "check_state",
    "cut_digest",
    "damage",
    "keys",
    "mix",
    "selected",
]

# --- chunks

I64: TypeAlias = NDArray[np.int64]
F32: TypeAlias = NDArray[np.float32]


@dataclass(slots=True)
class ChunkGrid:
    """How a transfer is cut: windows of tokens x runs of layers. Nobody changes it once it is made.

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
    # what follows from these: the token at which the first window begins, if not before
    first: int = field(init=False, repr=False, compare=False)
    windows: int = field(init=False, repr=False, compare=False)
    layer_runs: int = field(init=False, repr=False, compare=False)  # runs of layers in each window
    chunks: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        each, step, start, stop = self.layers_per_chunk, self.tokens_per_chunk, self.start, self.stop
        if each < 1 or step < 1 or self.band < 1 or not self.layers or not 0 < stop >= start:
            raise GeometryError(f"a chunk grid needs layers, tokens and positive steps, not {self}")
        first = self.first = start if start < stop else stop - 1
        windows = self.windows = (stop - 1) // step - first // step + 1
        runs = self.layer_runs = -(-len(self.layers) // each)
        self.chunks = windows * runs

    def cell(self, chunk: Any) -> Any:
        """Where a chunk, or each of an array, is in the table of windows (rows) and runs, counted row by row."""
        windows, runs, band = self.windows, self.layer_runs, self.band
        if band == 1 or runs == 1 or windows == 1:
            return chunk
        lead = min(windows, band - self.first // self.tokens_per_chunk % band)
        begin = lead + (chunk - lead * runs) // (band * runs) * band  # of its band, maybe before all windows
        size = np.minimum(begin + band, windows) - np.maximum(begin, 0)
        begin = np.maximum(begin, 0)
        run, window = np.divmod(chunk - begin * runs, size)
        return (begin + window) * runs + run

    def last_of(self, layer: int) -> int:
        """The last chunk that has a part of this layer."""
        first, runs = self.first // self.tokens_per_chunk, self.layer_runs
        run = bisect_left(self.layers, layer) // self.layers_per_chunk
        begin = max(0, (first + self.windows - 1) // self.band * self.band - first)  # of the last band
        return begin * runs + (run + 1) * (self.windows - begin) - 1

    @property
    def edges(self) -> I64:
        """int64 (windows + 1,): the first token of each window, and one past the last token."""
        window = self.first // self.tokens_per_chunk + np.arange(self.windows + 1, dtype=np.int64)
        return np.clip(window * self.tokens_per_chunk, self.first, self.stop)

    def of(self, chunk: int) -> tuple[tuple[int, ...], int, int]:
        """Layers, first token and one past the last token of a chunk.

        Raises:
            IndexError: If there is no such chunk.
        """
        if not 0 <= chunk < self.chunks:
            raise IndexError(f"chunk {chunk} is outside 0..{self.chunks - 1}")
        window, run = divmod(int(self.cell(chunk)), self.layer_runs)
        first = (self.first // self.tokens_per_chunk + window) * self.tokens_per_chunk
        layers = self.layers[run * self.layers_per_chunk :][: self.layers_per_chunk]
        return layers, max(first, self.first), min(first + self.tokens_per_chunk, self.stop)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPart:
    """What a chunk takes of one class."""

    slice: SegmentClass  # the regions of its layers
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
        return Segment(folded.regions, table, key.src_block, key.dst_block, folded.box, folded.factors)


class ChunkPlan:
    """One chunk, as rows and regions: how large it is, and a copy in place.

    Args:
        parts: What it takes of each class that takes part, in the order of staging.
    """

    def __init__(self, parts: Sequence[ChunkPart]) -> None:
        self.parts: Final = parts
        self._copy: CopyPlan | None = None
        offset = carried = 0
        for part in parts:
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

    # a copy of this side's blocks into bytes in the order in which they are summed, each region and row from 0 on
    segment: Segment
    grid: int  # token rows that a row has at most
    words: int  # words of 64 bits that an item takes there
    first_region: int  # its first region, counted through the chunk
    first_row: int  # its first row, likewise

    @property
    def regions(self) -> int:
        """Number of regions."""
        return len(self.segment.regions)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.segment.rows)


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
    axes = [BoxAxis(axis.count, (axis.src, axis.dst)[side], stride) for axis, stride in key.in_order(item)]
    elements = Elements(item, item) if side else key.elements
    box, _ = fold(axes, (key.src_token, key.dst_token)[side], token_bytes, elements, most=_ALL_AXES)
    table = np.zeros((len(rows), 5), np.int64)
    table[:, :2], table[:, 4] = rows.table[:, 2 * side : 2 * side + 2], rows.table[:, 4]
    bases = np.stack([of.bases[:, side], np.zeros(len(of.bases), np.int64)], axis=1)
    factors = of.factors if elements.converts else None
    segment = Segment(bases, table, (key.src_block, key.dst_block)[side], 0, box, factors)
    return SumPart(segment, grid, words, first_region, first_row)


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


# --- pairs and transfers

_SAMPLED: Final = 4096
"""Pieces of a transfer that are looked at to tell how many there are once neighbours are merged."""
_FEW_LAYERS: Final = 8
_FAR_APART: Final = 1 << 44
_KEPT_WINDOWS: Final = 8
"""Windows of tokens whose rows a transfer keeps: a chunk of each may be under way."""
_KEPT: Final = 1024
_ROW_BYTES: Final = 16 << 10
"""Of all layers of a chunk a row has about so many bytes at least, if windows have as many rows: on a fast link they
take no longer than to write the row's addresses."""
_LEAST_ROWS: Final = 64
_K = TypeVar("_K")
_V = TypeVar("_V")
_TWO: Final = struct.Struct("<qq")


class _Kept(dict[_K, _V]):
    """What a function has made, by what it was made of; all is made anew where that would be too much."""

    def __init__(self, make: Callable[[_K], _V]) -> None:
        super().__init__()
        self._make: Final = make

    def __missing__(self, key: _K) -> _V:
        found = self._make(key)
        if len(self) >= _KEPT:
            self.clear()
        self[key] = found
        return found


class PairPlan:
    """Everything about two ranks that does not depend on a request. Immutable, but for `template`; cache it per pair.

    Args:
        src: Geometry of the prefill rank.
        dst: Geometry of the decode rank.
        selections: What goes from one to the other.
        convert: Whether the decode rank asked for conversion of dtypes and scales that differ.

    Raises:
        GeometryError: If a selection is not held by both sides, two of them overlap, or the two sides store it in
            different ways that cannot be copied (dim, state against tokens, dtype unless it is to be converted).
    """

    def __init__(
        self, src: "CacheGeometry", dst: "CacheGeometry", selections: Sequence[Selection], *, convert: bool = False
    ) -> None:
        self.src = src
        self.dst = dst
        self.selections: Final = tuple(sorted(selections))
        self.classes: Final = intersect(src, dst, self.selections, convert=convert)
        self.layers: Final = tuple(sorted({layer for selection in self.selections for layer in selection.layers}))
        self.template: Any = None  # the same as compiled code reads it, if tables will be made
        self._slices: Final = _Kept(self._slice)
        self._staged: Final = _Kept(self._staged_bytes)
        self._fitting: Final = _Kept(self._most_windows)
        self._grids: Final = _Kept(self._grid)

    def prepare(self) -> None:
        """Find out now what requests will ask of it: that takes as long as to make the plan."""
        _ = self.least_chunk_bytes, self.digested, self.meeting_of, self.row_tokens, self._layer_kinds
        _ = self._named, self._rows_bytes, self.has_state
        for geometry in (self.src, self.dst):
            _ = geometry.pool_ids, geometry.sides

    @lazy
    def groups(self) -> tuple[str, ...]:
        """Groups that take part."""
        return tuple(sorted({selection.group for selection in self.selections}))

    @lazy
    def has_state(self) -> bool:
        """Whether a group without tokens takes part."""
        return any(c.key.src_rows.is_state for c in self.classes)

    @lazy
    def converts(self) -> bool:
        """Whether anything is converted on its way."""
        return any(c.key.elements.converts for c in self.classes)

    @lazy
    def meetings(self) -> tuple[Meeting, ...]:
        """Groups and their addressings on both sides, each once: classes of one meet in the same rows."""
        return tuple(dict.fromkeys(_meeting(c.key) for c in self.classes))

    @lazy
    def meeting_of(self) -> tuple[int, ...]:
        """By class, the number of its meeting."""
        return tuple(self.meetings.index(_meeting(c.key)) for c in self.classes)

    def bind(
        self, src_spans: BlockLists, dst_spans: BlockLists, tokens: range, *, covered: int | None = None
    ) -> "TransferPlan":
        """Add block lists and a token range.

        Args:
            src_spans: Source blocks by group.
            dst_spans: Destination blocks by group.
            tokens: The range; `range(n, n)` where the destination lacks no token, and only state moves.
            covered: Up to this token the source lists must reach, where the request is still being computed and they
                grow; the whole range if left out. What lies beyond can be counted, but not copied.

        Raises:
            BlocksError: If a list is missing, ids are outside the pools, repeated at the destination, or do not cover
                the range.
            TokensError: If the range is reversed, or ends at token 0.
        """
        check_tokens(tokens, may_be_empty=True)
        covered = tokens.stop if covered is None else min(covered, tokens.stop)
        plan = TransferPlan(self, src_spans, dst_spans, tokens, covered)
        _ = plan.rows  # which raises
        return plan

    def grid(
        self,
        tokens: range,
        *,
        target_bytes: int,
        layers_per_chunk: int | None = None,
        tokens_per_chunk: int | None = None,
        by_tokens: bool = False,
    ) -> ChunkGrid:
        """Choose a grid whose chunks take at most `target_bytes` of staging, if one can be cut so: the same each time.

        Whole runs of layers over all tokens while one layer fits; otherwise token windows, of one layer, or of a few
        where its rows are so short that a chunk's tables would cost more than its bytes. A chunk exceeds the target
        only where a layer's state, or its smallest window, does.

        Args:
            tokens: The transfer's tokens.
            target_bytes: Size to aim for.
            layers_per_chunk: Upper bound, for streaming by layer.
            tokens_per_chunk: Upper bound, for streaming by tokens; rounded up to a window that cuts no row.
            by_tokens: Rather cut token windows of all layers, so that no piece that reaches over layers is cut.
        """
        # not the range itself: empty ones are all equal
        return self._grids[tokens.start, tokens.stop, target_bytes, layers_per_chunk, tokens_per_chunk, by_tokens]

    def _grid(self, asked: tuple[int, int, int, int | None, int | None, bool]) -> ChunkGrid:
        start, stop, target_bytes, layers_per_chunk, tokens_per_chunk, by_tokens = asked
        tokens = range(start, stop)
        align = self.row_tokens
        touched = max(1, -(-tokens.stop // align) - tokens.start // align)  # state has a window as well
        window = tokens.stop
        if tokens_per_chunk is not None and tokens_per_chunk < len(tokens):
            touched = -(-tokens_per_chunk // align)
            window = min(window, touched * align)
        if by_tokens and layers_per_chunk is None:
            fitting = bisect_right(range(1, touched + 1), target_bytes, key=lambda n: self._staged[n * align][1])
            if fitting:
                return ChunkGrid(self.layers, len(self.layers), min(window, fitting * align), tokens.start, tokens.stop)
        row, most = (max(1, self._staged[rows * align][0]) for rows in (1, touched))
        few = max(1, min(target_bytes // (_LEAST_ROWS * row), -(-_ROW_BYTES // row)))
        fitting = max(few, target_bytes // most)
        layers = min(fitting, layers_per_chunk or fitting, max(1, len(self.layers)))
        if most * layers > target_bytes:
            window = min(window, align * min(touched, self._fitting[target_bytes // layers]))
        return ChunkGrid(self.layers, layers, window, tokens.start, tokens.stop)

    def slices(self, layers: Sequence[int]) -> Sequence[SegmentClass]:
        """What a run of the pair's layers has of each class that it has anything of; the same each time."""
        return self._slices[(layers[0], layers[-1]) if layers else (0, -1)]

    def _slice(self, ends: tuple[int, int]) -> Sequence[SegmentClass]:
        return [part for c in self.classes if (part := c.within(*ends)) is not None]

    @lazy
    def sample(self) -> ChunkPlan:
        """A chunk of two full rows of each class, in the first blocks: the shapes that copies of this pair have."""
        return _two_rows(self.slices(self.layers))

    @lazy
    def least_chunk_bytes(self) -> int:
        """Staging that any chunk can do with, if all is fetched: the smallest window of the largest layer."""
        return self._staged[self.row_tokens][0]

    @lazy
    def joins_layers(self) -> bool:
        """Whether pieces reach from one layer into the next, among the first few: more of them take long to look at."""
        few = self.slices(self.layers[:_FEW_LAYERS])
        apart = [replace(of, bases=of.bases + np.multiply.outer(of.places[:, 0], (0, _FAR_APART))) for of in few]
        together, alone = (len(_two_rows(of).copy().enumerate().merged()) for of in (few, apart))
        return together < alone

    @lazy
    def digested(self) -> bytes:
        """What the digest of every transfer of this pair begins with."""
        found = bytearray(_packed(len(self.selections)))
        for s in self.selections:
            found += _packed(s.group, s.part, s.kv, len(s.layers), *s.layers, s.head_start, s.head_stop)
        found += _packed(len(self.classes))
        for c in self.classes:
            key = c.key
            null = -1 if key.src_rows.null_block is None else key.src_rows.null_block
            found += _packed(key.group, key.part, key.elements.src_bytes, key.elements.dst_bytes)
            found += _packed(key.elements.src, key.elements.dst)
            for axes in (key.heads, key.dims):
                found += _packed(len(axes), *(axis.count for axis in axes))
            found += _packed(len(c.layers), *key.src_rows.shape, null, *key.dst_rows.shape)
            if key.elements.converts:
                found += c.factors.astype("<f4").tobytes()
        return bytes(found)

    def agreement(self, dst_spans: BlockLists, tokens: range) -> bytes:
        """SHA-256 over what decides which bytes go where: selections, shapes, the destination's blocks, token range.

        Addresses and strides are not part of it; they differ between the sides by design. Nor are the source's blocks,
        which may not be there yet. The bytes that are hashed are part of the protocol (section 6.5).
        """
        hashed = [self.digested]
        for group, name in self._named:
            span = dst_spans[group]
            hashed += name, _TWO.pack(span.first_token, len(span.ids)), span.packed
        hashed.append(_TWO.pack(tokens.start, tokens.stop))
        return hashlib.sha256(b"".join(hashed)).digest()

    def most_bytes(self, dst_spans: BlockLists, tokens: range) -> int:
        """Bytes that a transfer of these tokens carries at the most: as many as if both sides held all of them."""
        total = 0
        for group, row_tokens, slot_rows, nbytes in self._rows_bytes:
            rows = len(tokens) // row_tokens + 1 if row_tokens else len(dst_spans[group].ids) * slot_rows
            total += rows * nbytes
        return total

    @lazy
    def _rows_bytes(self) -> Sequence[tuple[str, int, int, int]]:
        """Of each class its group, tokens of a row (0 of state), rows of a slot (0 of tokens), bytes of a row."""
        return [
            (key.group, 0, key.dst_rows.block_ratio, nbytes)
            if key.src_rows.is_state
            else (key.group, key.src_rows.tokens_per_row, 0, nbytes)
            for key, nbytes in ((c.key, len(c.bases) * c.key.token_bytes) for c in self.classes)
        ]

    def most_staged_bytes(self, tokens: range) -> int:
        """Staging that a transfer of these tokens takes at the most, as one chunk."""
        align = self.row_tokens
        rounded = (-(-tokens.stop // align) - tokens.start // align) * align
        return self._staged[rounded][1]

    @lazy
    def row_tokens(self) -> int:
        """Windows begin at multiples of this many tokens, so that they cut no row of a full sub-block."""
        return lcm(*(c.key.grid * c.key.src_rows.tokens_per_row for c in self.classes))

    @lazy
    def _layer_kinds(self) -> Mapping["_LayerKind", int]:
        """What each of the layers takes of staging; most are alike, so each kind and how many there are of it."""
        rows: dict[int, Counter[tuple[RowSide, RowSide]]] = {layer: Counter() for layer in self.layers}
        fixed: Counter[int] = Counter()
        for c in self.classes:
            src, dst, size = c.key.src_rows, c.key.dst_rows, c.key.token_bytes
            filling = STAGING_ALIGNMENT if src.common(dst) * size % STAGING_ALIGNMENT else 0
            regions_of: Counter[int] = Counter(c.layers.tolist())
            for layer, regions in regions_of.items():
                fixed[layer] += filling + (regions * size * src.block_ratio if src.is_state else 0)
                if not src.is_state:
                    rows[layer][src, dst] += regions * size
        return Counter(_LayerKind(frozenset(rows[layer].items()), fixed[layer]) for layer in self.layers)

    def _staged_bytes(self, tokens: int) -> tuple[int, int]:
        """Staging of the largest layer, and of all, in a window of so many tokens that cuts no row."""
        sizes = [(kind.staged_bytes(tokens), count) for kind, count in self._layer_kinds.items()]
        return max([size for size, _ in sizes], default=1), sum(size * count for size, count in sizes)

    def _most_windows(self, target_bytes: int) -> int:
        """How many of the smallest windows of any layer take no more than a target together; 1 if not even one does."""
        align, kinds = self.row_tokens, [kind for kind in self._layer_kinds if kind.rows]
        windows = range(1, MAX_TOKENS // align + 1)
        steps = [bisect_right(windows, target_bytes, key=lambda n: one.staged_bytes(n * align)) for one in kinds]
        return max(1, min(steps, default=MAX_TOKENS))

    @lazy
    def _named(self) -> Sequence[tuple[str, bytes]]:
        """Groups, and how they are hashed."""
        return [(group, _packed(group)) for group in self.groups]


@dataclass(frozen=True, slots=True)
class _LayerKind:
    """What a layer takes of staging."""

    # for each addressing of source and destination, bytes of a token row
    rows: frozenset[tuple[tuple[RowSide, RowSide], int]]
    fixed: int  # bytes in every chunk: state, and alignment

    def staged_bytes(self, tokens: int) -> int:
        """In a window of so many tokens that cuts no row, at most: only the tokens that both sides hold have rows."""
        return self.fixed + sum(min(src.most(tokens), dst.most(tokens)) * size for (src, dst), size in self.rows)


def _meeting(key: SegmentKey) -> Meeting:
    return key.group, key.src_rows, key.dst_rows


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """A pair's plan for one request: block lists and token range added, and the rows in which the lists meet."""

    pair: PairPlan
    src_spans: BlockLists
    dst_spans: BlockLists
    tokens: range
    covered: int  # up to this token the source's blocks are known
    _windows: dict[tuple[int, int, bool], Sequence[Rows | None]] = field(default_factory=dict, init=False)

    @lazy
    def rows(self) -> tuple[Rows, ...]:
        """Of each of the pair's meetings; with those of padding and of unknown blocks.

        Raises:
            BlocksError: As `PairPlan.bind`.
            TokensError: Likewise.
        """
        pair, groups = self.pair, self.pair.groups
        for spans, geometry, receiving in ((self.src_spans, pair.src, False), (self.dst_spans, pair.dst, True)):
            missing = [name for name in groups if name not in spans]
            if missing:
                side = "destination" if receiving else "source"
                raise BlocksError(f"group {missing[0]!r} has no block list at the {side}")
            check_spans({name: spans[name] for name in groups}, geometry, receiving=receiving)
        return tuple(
            meet(group, src, dst, self.src_spans[group], self.dst_spans[group], self.tokens, covered=self.covered)
            for group, src, dst in pair.meetings
        )

    @lazy
    def nbytes(self) -> int:
        """Bytes that it carries, if no source block is padding."""
        return self.outline.bytes

    @lazy
    def staged_bytes(self) -> int:
        """Staging that all of it takes as one chunk, if no source block is padding."""
        return self.outline.staged_bytes

    @lazy
    def pieces(self) -> int:
        """Contiguous runs of copies in place, if no source block is padding; before neighbours are merged."""
        return self.outline.copy().pieces

    @lazy
    def most_rows(self) -> int:
        """Rows of the longest table."""
        return max(map(len, self.rows), default=0)

    @lazy
    def whole(self) -> ChunkPlan:
        """All of it as one chunk.

        Raises:
            BlocksError: If a source block is not known yet.
        """
        padded = any(rows.present() is not rows for rows in self.rows)
        return self.window(self.pair.layers, *self._extent) if padded else self.outline

    @lazy
    def outline(self) -> ChunkPlan:
        """What all of it amounts to if no source block is padding. To be counted, never to be copied."""
        return self.window(self.pair.layers, *self._extent, outline=True)

    def chunk(self, grid: ChunkGrid, chunk: int) -> ChunkPlan:
        """One chunk of the grid.

        Raises:
            BlocksError: If a source block is not known yet.
        """
        if grid.windows == grid.layer_runs == 1:
            return self.whole
        return self.window(*grid.of(chunk))

    def window(self, layers: Sequence[int], start: int, stop: int, *, outline: bool = False) -> ChunkPlan:
        """The part that lies in a run of the pair's layers and in the tokens [start, stop).

        Raises:
            BlocksError: If a source block is not known yet, and not only its outline is asked for.
        """
        rows = self._windows.get((start, stop, outline)) or self._cut(start, stop, outline=outline)
        slices = self.pair.slices(layers)
        return ChunkPlan([ChunkPart(of, found) for of in slices if (found := rows[of.number]) is not None])

    def _cut(self, start: int, stop: int, *, outline: bool) -> Sequence[Rows | None]:
        """The rows of each class in the tokens [start, stop), if any: the same for all layers."""
        cut = [rows.within(start, stop) for rows in self.rows]
        rows = cut if outline else [some.present() for some in cut]
        if len(self._windows) >= _KEPT_WINDOWS:
            self._windows.clear()
        kept = self._windows[start, stop, outline] = [rows[of] or None for of in self.pair.meeting_of]
        return kept

    def largest_chunk_bytes(self, grid: ChunkGrid) -> int:
        """Staging that the largest chunk of a grid takes, if no source block is padding."""
        staged = np.zeros((grid.windows, grid.layer_runs), np.int64)
        for c, of in zip(self.pair.classes, self.pair.meeting_of, strict=True):
            rows = self.rows[of]
            runs = np.searchsorted(grid.layers, c.layers) // grid.layers_per_chunk
            regions = np.bincount(runs, minlength=grid.layer_runs)
            segments = np.outer(rows.counts(grid.edges), regions) * (rows.grid * c.key.token_bytes)
            staged += -(-segments // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
        return int(staged.max())

    @property
    def _extent(self) -> tuple[int, int]:
        """Tokens to look at: where none is missing the last one, since state belongs to it."""
        return min(self.tokens.start, self.tokens.stop - 1), self.tokens.stop

    @lazy
    def merged_pieces(self) -> int:
        """About how many pieces it has once neighbours are merged, counted in a part of it."""
        return max(1, round(sample(self.outline.copy(), _SAMPLED).count))

    def digest(self, grid: ChunkGrid) -> bytes:
        """SHA-256 over all that both sides must agree on: the agreement, and how it is cut."""
        agreement = self.pair.agreement(self.dst_spans, self.tokens)
        return cut_digest(agreement, grid.layers_per_chunk, grid.tokens_per_chunk)


def _two_rows(slices: Iterable[SegmentClass]) -> ChunkPlan:
    """Two full rows of each, in the first blocks."""
    parts: list[ChunkPart] = []
    for one in slices:
        key, grid = one.key, one.key.grid
        table = np.asarray([[0, 0, 0, 0, grid], [1, 0, 1, 0, grid]], np.int64)
        rows = Rows(table, np.asarray([0, grid], np.int64), grid, key.src_rows.tokens_per_row)
        parts.append(ChunkPart(one, rows))
    return ChunkPlan(parts)


def _packed(*values: int | str) -> bytes:
    """Whole numbers as 8 bytes, little-endian, signed; text as its length in bytes (so written) and its UTF-8."""
    found = bytearray()
    for value in values:
        if isinstance(value, str):
            text = value.encode()
            found += len(text).to_bytes(8, "little") + text
        else:
            found += value.to_bytes(8, "little", signed=True)
    return bytes(found)


def cut_digest(agreement: bytes, layers_per_chunk: int, tokens_per_chunk: int) -> bytes:
    """SHA-256 over an agreement and the grid by which it is cut."""
    return hashlib.sha256(agreement + _TWO.pack(layers_per_chunk, tokens_per_chunk)).digest()


def check_state(pair: PairPlan, tokens: range, offered: int) -> None:
    """Refuse a range that ends before the last token so far when state takes part.

    Raises:
        TokensError: Naming the group.
    """
    if pair.has_state and tokens.stop < offered:
        group = next(c.key.group for c in pair.classes if c.key.src_rows.is_state)
        raise TokensError(
            f"group {group!r} is state, which belongs to token {offered - 1}: "
            f"a fetch cannot end at token {tokens.stop - 1}"
        )
