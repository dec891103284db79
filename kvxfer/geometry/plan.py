"""The planner: from two geometries, two block lists and a token range to copy plans.

    PairPlan      strides, boxes and base addresses of all that is selected between two ranks; made once a pair
      .bind(...)  with block lists and a token range: a `TransferPlan`, checked to be covered
        .chunk(n) one chunk of the grid (token window x run of layers): a `ChunkPlan`

The planner is pure: numbers in, numbers out.
"""

import hashlib
import struct
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvxfer.errors import BlocksError, TokensError
from kvxfer.geometry.chunks import ChunkGrid, ChunkPart, ChunkPlan, Slice
from kvxfer.geometry.copyplan import STAGING_ALIGNMENT, sample
from kvxfer.geometry.intersect import SegmentKey, Selection, intersect
from kvxfer.geometry.rows import BlockLists, Meeting, Rows, check_spans, check_tokens, meet
from kvxfer.geometry.spec import RowSide
from kvxfer.names import MAX_TOKENS, lazy

if TYPE_CHECKING:
    from kvxfer.geometry.cache import CacheGeometry

__all__ = ["PairPlan", "TransferPlan", "check_state", "cut_digest"]

_SAMPLED: Final = 4096
"""Pieces of a transfer that are looked at to tell how many there are once neighbours are merged."""
_KEPT_SLICES: Final = 1024
_FEW_LAYERS: Final = 8
_FAR_APART: Final = 1 << 44
_KEPT_WINDOWS: Final = 8
"""Windows of tokens whose rows a transfer keeps: a chunk of each may be under way."""
_KEPT_SIZES: Final = 1024
_ROW_BYTES: Final = 16 << 10
"""Of all layers of a chunk a row has about so many bytes at least, if windows have as many rows: on a fast link they
take no longer than to write the row's addresses."""
_LEAST_ROWS: Final = 64
_TWO: Final = struct.Struct("<qq")


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
        self.template: Any = None  # the same as compiled code reads it, if somebody has made that
        self._slices: dict[tuple[int, int], list[Slice]] = {}
        self._staged: dict[int, tuple[int, int]] = {}  # by tokens, what `_staged_bytes` says of them
        self._windows: dict[int, int] = {}  # by bytes, what `_fitting` does
        self._grids: dict[tuple[object, ...], ChunkGrid] = {}  # by what was asked of `grid`

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
        limits = target_bytes, layers_per_chunk, tokens_per_chunk, by_tokens
        key = tokens.start, tokens.stop, *limits  # and not the range: empty ones are all equal
        found = self._grids.get(key)
        if found is None:
            if len(self._grids) >= _KEPT_SIZES:
                self._grids.clear()
            found = self._grids[key] = self._grid(tokens, *limits)
        return found

    def _grid(
        self,
        tokens: range,
        target_bytes: int,
        layers_per_chunk: int | None,
        tokens_per_chunk: int | None,
        by_tokens: bool,
    ) -> ChunkGrid:
        align = self.row_tokens
        touched = -(-tokens.stop // align) - tokens.start // align
        window = tokens.stop
        if tokens_per_chunk is not None and tokens_per_chunk < len(tokens):
            touched = -(-tokens_per_chunk // align)
            window = min(window, touched * align)
        if by_tokens and layers_per_chunk is None:
            fitting = bisect_right(range(1, touched + 1), target_bytes, key=lambda n: self._staged_bytes(n * align)[1])
            if fitting:
                return ChunkGrid(self.layers, len(self.layers), min(window, fitting * align), tokens.start, tokens.stop)
        row, most = (max(1, self._staged_bytes(rows * align)[0]) for rows in (1, touched))
        few = max(1, min(target_bytes // (_LEAST_ROWS * row), -(-_ROW_BYTES // row)))
        fitting = max(few, target_bytes // most)
        layers = min(fitting, layers_per_chunk or fitting, max(1, len(self.layers)))
        if most * layers > target_bytes:
            window = min(window, align * min(touched, self._fitting(target_bytes // layers)))
        return ChunkGrid(self.layers, layers, window, tokens.start, tokens.stop)

    def chunk_bytes(self, grid: ChunkGrid) -> int:
        """Staging that a chunk of a grid takes at most; it may be a little more than any does."""
        align, step = self.row_tokens, grid.tokens_per_chunk
        rows = -(-grid.stop // align) - grid.start // align
        if grid.windows > 1:
            rows = min(rows, -(-step // align) + (step % align > 0))  # a window that cuts rows may cut one more
        most, total = self._staged_bytes(rows * align)
        return min(total, grid.layers_per_chunk * most)

    def slices(self, layers: Sequence[int]) -> Sequence[Slice]:
        """What a run of the pair's layers has of each class that it has anything of; the same each time."""
        key = (layers[0], layers[-1]) if layers else (0, -1)
        found = self._slices.get(key)
        if found is None:
            found = list[Slice]()
            for number, c in enumerate(self.classes):
                low, high = bisect_left(c.layers, key[0]), bisect_left(c.layers, key[1] + 1)
                if low < high:
                    found.append(Slice(number, c.key, c.bases[low:high], c.factors[low:high], c.places[low:high]))
            if len(self._slices) >= _KEPT_SLICES:
                self._slices.clear()
            self._slices[key] = found
        return found

    @lazy
    def sample(self) -> ChunkPlan:
        """A chunk of two full rows of each class, in the first blocks: the shapes that copies of this pair have."""
        return _two_rows(self.slices(self.layers))

    @lazy
    def least_chunk_bytes(self) -> int:
        """Staging that no chunk can do without, if all is fetched: the smallest window of the largest layer."""
        found: Counter[int] = Counter()
        for c in self.classes:
            src, dst = c.key.src_rows, c.key.dst_rows
            rows = src.block_ratio if src.is_state else min(src.most(self.row_tokens), dst.most(self.row_tokens))
            regions_of: Counter[int] = Counter(c.layers.tolist())
            for layer, regions in regions_of.items():
                found[layer] += -(-regions * rows * c.key.token_bytes // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
        return max(found.values(), default=0)

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
        return self._staged_bytes((-(-tokens.stop // align) - tokens.start // align) * align)[1]

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
        found = self._staged.get(tokens)
        if found is None:
            sizes = [(kind.staged_bytes(tokens), count) for kind, count in self._layer_kinds.items()]
            found = max([size for size, _ in sizes], default=1), sum(size * count for size, count in sizes)
            if len(self._staged) >= _KEPT_SIZES:
                self._staged.clear()
            self._staged[tokens] = found
        return found

    def _fitting(self, target_bytes: int) -> int:
        """How many of the smallest windows of any layer take no more than a target together; 1 if not even one does."""
        found = self._windows.get(target_bytes)
        if found is None:
            align, kinds = self.row_tokens, [kind for kind in self._layer_kinds if kind.rows]
            windows = range(1, MAX_TOKENS // align + 1)
            steps = [bisect_right(windows, target_bytes, key=lambda n: one.staged_bytes(n * align)) for one in kinds]
            if len(self._windows) >= _KEPT_SIZES:
                self._windows.clear()
            found = self._windows[target_bytes] = max(1, min(steps, default=MAX_TOKENS))
        return found

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

    def chunk(self, grid: ChunkGrid, chunk: int, *, outline: bool = False) -> ChunkPlan:
        """One chunk of the grid, or its outline.

        Raises:
            BlocksError: If a source block is not known yet.
        """
        if grid.windows == grid.layer_runs == 1:
            return self.outline if outline else self.whole
        return self.window(*grid.of(chunk), outline=outline)

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


def _two_rows(slices: Iterable[Slice]) -> ChunkPlan:
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
