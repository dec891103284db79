"""Chunks: how a transfer is cut, and one chunk as a gather, a scatter, or a copy in place.

The staging buffer is just one more strided array, so all three are the same tables with other base addresses.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import GeometryError
from kvxfer.geometry.copyplan import Box, CopyPlan, Pieces, Segment, fold
from kvxfer.geometry.elements import Elements
from kvxfer.geometry.factor import BoxAxis
from kvxfer.geometry.intersect import SegmentKey
from kvxfer.geometry.rows import Rows
from kvxfer.lazy import lazy

__all__ = ["STAGING_ALIGNMENT", "ChunkGrid", "ChunkPart", "ChunkPlan", "Slice"]

I64: TypeAlias = NDArray[np.int64]
F32: TypeAlias = NDArray[np.float32]

STAGING_ALIGNMENT: Final = 16
"""Segments begin at multiples of this many bytes in staging, so that the widest accesses stay aligned."""


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """How a transfer is cut: windows of tokens x runs of layers, numbered window by window.

    Attributes:
        layers: All selected layers, ascending.
        layers_per_chunk: Layers in a run.
        tokens_per_chunk: Tokens in a window; windows begin at multiples of it.
        start: First token of the transfer.
        stop: One past its last token. Where it is `start` too, no token is missing at the destination; the grid then
            is one window at the last token, to which state belongs.
    """

    layers: tuple[int, ...]
    layers_per_chunk: int
    tokens_per_chunk: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.layers_per_chunk < 1 or self.tokens_per_chunk < 1 or not self.layers or not 0 < self.stop >= self.start:
            raise GeometryError(f"a chunk grid needs layers, tokens and positive steps, not {self}")

    @property
    def first(self) -> int:
        """The token at which the first window begins, if not before."""
        return min(self.start, self.stop - 1)

    @property
    def layer_runs(self) -> int:
        """Runs of layers in each window."""
        return -(-len(self.layers) // self.layers_per_chunk)

    @property
    def windows(self) -> int:
        """Token windows."""
        return (self.stop - 1) // self.tokens_per_chunk - self.first // self.tokens_per_chunk + 1

    @property
    def edges(self) -> I64:
        """int64 (windows + 1,): the first token of each window, and one past the last token."""
        window = self.first // self.tokens_per_chunk + np.arange(self.windows + 1, dtype=np.int64)
        return np.clip(window * self.tokens_per_chunk, self.first, self.stop)

    def __len__(self) -> int:
        return self.windows * self.layer_runs

    def of(self, chunk: int) -> tuple[tuple[int, ...], int, int]:
        """Layers, first token and one past the last token of a chunk.

        Raises:
            IndexError: If there is no such chunk.
        """
        if not 0 <= chunk < len(self):
            raise IndexError(f"chunk {chunk} is outside 0..{len(self) - 1}")
        window, run = divmod(chunk, self.layer_runs)
        first = (self.first // self.tokens_per_chunk + window) * self.tokens_per_chunk
        layers = self.layers[run * self.layers_per_chunk : (run + 1) * self.layers_per_chunk]
        return layers, max(first, self.first), min(first + self.tokens_per_chunk, self.stop)


@dataclass(frozen=True, slots=True, eq=False)
class _Folded:
    """Regions with the box that a row copies in each."""

    box: Box
    regions: I64
    factors: F32 | None


@dataclass(frozen=True, eq=False)
class Slice:
    """What a run of layers has of one class: all that chunks of it share, whatever the request.

    Attributes:
        key: Strides, extents and elements of the class.
        bases: int64 (R, 2): address of the first element in block 0, at the source and destination, of each region.
        factors: float32 (R, 2): by what its elements are multiplied, and then divided.
    """

    key: SegmentKey
    bases: I64
    factors: F32

    @lazy
    def in_place(self) -> _Folded:
        """From the blocks of one side into those of the other."""
        key = self.key
        return self.folded((*key.heads, *key.dims), self.bases, (key.src_token, key.dst_token), key.elements)

    def folded(self, axes: Iterable[BoxAxis], bases: I64, tokens: tuple[int, int], elements: Elements) -> _Folded:
        """These axes as a box, those beyond it unrolled into regions; `tokens` are the token strides of both sides."""
        box, unrolled = fold(axes, *tokens, elements)
        factors = self.factors if elements.converts else None
        for axis in unrolled:
            steps = np.arange(axis.count, dtype=np.int64)[:, None] * np.asarray([axis.src, axis.dst], np.int64)
            bases = (bases[:, None, :] + steps[None]).reshape(-1, 2)
            factors = np.repeat(factors, axis.count, axis=0) if factors is not None else None
        return _Folded(box, bases, factors)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPart:
    """What a chunk takes of one class.

    Attributes:
        slice: The regions of its layers.
        rows: Where the block lists meet.
    """

    slice: Slice
    rows: Rows

    @property
    def key(self) -> SegmentKey:
        """Of the class."""
        return self.slice.key

    @property
    def bases(self) -> I64:
        """Of its regions."""
        return self.slice.bases


class ChunkPlan:
    """One chunk: the same rows and regions as a gather into staging, a scatter out of it, or a copy in place.

    Staging holds elements in the narrower of the two dtypes, so one of gather and scatter converts, the other copies.

    Args:
        parts: What it takes of each class that takes part, in the order of staging.

    Attributes:
        staged_bytes: Room that the chunk takes in staging: every row a full sub-block, segments aligned.
        bytes: Bytes that it carries.
    """

    def __init__(self, parts: Sequence[ChunkPart]) -> None:
        self._parts: Final = parts
        self._copy: CopyPlan | None = None
        self._offsets: Final[list[int]] = []
        offset = 0
        for part in parts:
            self._offsets.append(offset)
            offset += len(part.bases) * len(part.rows) * part.rows.grid * part.key.token_bytes
            offset = -(-offset // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
        self.staged_bytes: Final = offset
        self.bytes: Final = sum(len(part.bases) * part.rows.total_tokens * part.key.token_bytes for part in parts)

    def copy(self) -> CopyPlan:
        """Source blocks straight into destination blocks; needs both sides' addresses.

        Nothing of it lies in staging, so rows that only staging tells apart are one.
        """
        if self._copy is None:
            self._copy = self._in_place(lambda rows: rows.joined)
        return self._copy

    def listed(self) -> Pieces:
        """The same as a list of contiguous pieces, neighbours merged, in order of destination."""
        return self._in_place(lambda rows: rows.ascending).enumerate().merged()

    def _in_place(self, table: Callable[[Rows], I64]) -> CopyPlan:
        segments: list[Segment] = []
        for part in self._parts:
            key, folded = part.key, part.slice.in_place
            rows = table(part.rows)
            segments.append(Segment(folded.regions, rows, key.src_block, key.dst_block, folded.box, folded.factors))
        return CopyPlan(tuple(segments))

    def gather(self, staging: int) -> CopyPlan:
        """Source blocks into staging at address `staging`."""
        return self._staged(staging, scatter=False)

    def scatter(self, staging: int) -> CopyPlan:
        """Staging at address `staging` into destination blocks."""
        return self._staged(staging, scatter=True)

    def _staged(self, staging: int, *, scatter: bool) -> CopyPlan:
        segments: list[Segment] = []
        for part, offset in zip(self._parts, self._offsets, strict=True):
            key, own, rows = part.key, part.bases, part.rows
            count = len(rows)
            token, row = _staging_strides(key, rows.grid)
            axes = _staging_axes(key, rows.grid, scatter=scatter)
            side = own[:, 1 if scatter else 0]
            flat = staging + offset + np.arange(len(own), dtype=np.int64) * (count * row)
            table = rows.table.copy()  # in staging, row n is block n and begins with its first token
            if scatter:
                table[:, 0], table[:, 1] = np.arange(count), 0
                bases, tokens, blocks = np.stack([flat, side], axis=1), (token, key.dst_token), (row, key.dst_block)
                elements = key.elements.scattered
            else:
                table[:, 2], table[:, 3] = np.arange(count), 0
                bases, tokens, blocks = np.stack([side, flat], axis=1), (key.src_token, token), (key.src_block, row)
                elements = key.elements.gathered
            folded = part.slice.folded(axes, bases, tokens, elements)
            segments.append(Segment(folded.regions, table, *blocks, folded.box, folded.factors))
        return CopyPlan(tuple(segments))


def _staging_strides(key: SegmentKey, grid: int) -> tuple[int, int]:
    """Bytes between tokens and between rows in staging, where a row is head, token, dim in C order."""
    token = key.item_bytes * prod(axis.count for axis in key.dims)
    return token, token * grid * prod(axis.count for axis in key.heads)


def _staging_axes(key: SegmentKey, grid: int, *, scatter: bool) -> list[BoxAxis]:
    """The box axes with one side replaced by staging."""
    axes: list[BoxAxis] = []
    stride = key.item_bytes
    for axis in reversed(key.dims):
        axes.append(BoxAxis(axis.count, stride, axis.dst) if scatter else BoxAxis(axis.count, axis.src, stride))
        stride *= axis.count
    stride *= grid
    for axis in reversed(key.heads):
        axes.append(BoxAxis(axis.count, stride, axis.dst) if scatter else BoxAxis(axis.count, axis.src, stride))
        stride *= axis.count
    return axes
