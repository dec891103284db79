"""Chunks: how a transfer is cut, and one chunk as a gather, a scatter, or a copy in place.

The staging buffer is just one more strided array, so all three are the same tables with other base addresses.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import GeometryError
from kvxfer.geometry.copyplan import CopyPlan, Segment, fold
from kvxfer.geometry.factor import BoxAxis
from kvxfer.geometry.intersect import SegmentKey
from kvxfer.geometry.rows import Rows

__all__ = ["STAGING_ALIGNMENT", "ChunkGrid", "ChunkPlan"]

I64: TypeAlias = NDArray[np.int64]

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


class ChunkPlan:
    """One chunk: the same rows and regions as a gather into staging, a scatter out of it, or a copy in place.

    Args:
        parts: For each class that takes part its key, the bases of its regions (int64 (R, 2): address of the first
            element in block 0, at the source and destination) and its rows, in the order of staging.

    Attributes:
        staged_bytes: Room that the chunk takes in staging: every row a full sub-block, segments aligned.
        bytes: Bytes that it carries.
    """

    def __init__(self, parts: tuple[tuple[SegmentKey, I64, Rows], ...]) -> None:
        self._parts: Final = parts
        self._offsets: Final[list[int]] = []
        offset = 0
        for key, bases, rows in parts:
            self._offsets.append(offset)
            offset += len(bases) * len(rows) * rows.grid * key.token_bytes
            offset = -(-offset // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
        self.staged_bytes: Final = offset
        self.bytes: Final = sum(len(bases) * rows.total_tokens * key.token_bytes for key, bases, rows in parts)

    def copy(self) -> CopyPlan:
        """Source blocks straight into destination blocks; needs both sides' addresses."""
        return CopyPlan(
            tuple(
                _segment(
                    (*key.heads, *key.dims),
                    bases,
                    (key.src_block, key.src_token),
                    (key.dst_block, key.dst_token),
                    rows.table,
                    key.item_bytes,
                )
                for key, bases, rows in self._parts
            )
        )

    def gather(self, staging: int) -> CopyPlan:
        """Source blocks into staging at address `staging`."""
        return self._staged(staging, scatter=False)

    def scatter(self, staging: int) -> CopyPlan:
        """Staging at address `staging` into destination blocks."""
        return self._staged(staging, scatter=True)

    def _staged(self, staging: int, *, scatter: bool) -> CopyPlan:
        segments: list[Segment] = []
        for (key, own, rows), offset in zip(self._parts, self._offsets, strict=True):
            count = len(rows)
            token, row = _staging_strides(key, rows.grid)
            axes = _staging_axes(key, rows.grid, scatter=scatter)
            side = own[:, 1 if scatter else 0]
            flat = staging + offset + np.arange(len(own), dtype=np.int64) * (count * row)
            table = rows.table.copy()  # in staging, row n is block n and begins with its first token
            if scatter:
                table[:, 0], table[:, 1] = np.arange(count), 0
                bases, src, dst = np.stack([flat, side], axis=1), (row, token), (key.dst_block, key.dst_token)
            else:
                table[:, 2], table[:, 3] = np.arange(count), 0
                bases, src, dst = np.stack([side, flat], axis=1), (key.src_block, key.src_token), (row, token)
            segments.append(_segment(axes, bases, src, dst, table, key.item_bytes))
        return CopyPlan(tuple(segments))


def _segment(
    axes: Iterable[BoxAxis],
    bases: I64,
    src: tuple[int, int],
    dst: tuple[int, int],
    rows: I64,
    item_bytes: int,
) -> Segment:
    """A segment from (block stride, token stride) of both sides, its axes beyond the box unrolled into regions."""
    box, unrolled = fold(axes, src[1], dst[1], item_bytes)
    for axis in unrolled:
        steps = np.arange(axis.count, dtype=np.int64)[:, None] * np.asarray([axis.src, axis.dst], np.int64)
        bases = (bases[:, None, :] + steps[None]).reshape(-1, 2)
    return Segment(bases, rows, src[0], dst[0], box)


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
