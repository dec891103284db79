"""Trivial executors of copy plans, on memory that holds one identity per byte."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer.geometry import CopyPlan, Pieces
from kvxfer.geometry.copyplan import Box, Segment

I64 = NDArray[np.int64]


@dataclass
class Space:
    """Memory at an address: one int64 a byte. Nothing outside it may be touched."""

    base: int
    cells: I64

    def at(self, addresses: I64) -> I64:
        """Indices of byte addresses, checked to lie inside."""
        index = addresses - self.base
        assert index.size == 0 or (index.min() >= 0 and index.max() < len(self.cells)), "a piece reaches outside"
        return index


def byte_pairs(pieces: Pieces) -> I64:
    """int64 (n, 2): every byte of every piece, source and destination address."""
    ends = np.cumsum(pieces.nbytes)
    inside = np.arange(int(pieces.nbytes.sum())) - np.repeat(ends - pieces.nbytes, pieces.nbytes)
    return np.stack([np.repeat(pieces.src, pieces.nbytes) + inside, np.repeat(pieces.dst, pieces.nbytes) + inside], 1)


def table_pairs(plan: CopyPlan) -> I64:
    """The same from the segment tables, by the formula in the docstring of `kvxfer.geometry.copyplan`."""
    found: list[I64] = [np.zeros((0, 2), np.int64)]
    for segment in plan.segments:
        elements = segment.box.elements
        assert not elements.converts, "bytes do not become bytes where elements are converted"
        first = element_pairs(segment)
        found += [first + byte for byte in range(elements.dst_bytes)]
    return np.concatenate(found)


def element_pairs(segment: Segment) -> I64:
    """int64 (n, 2): the first byte of every element that a segment copies, source and destination address."""
    box = segment.box
    if box.token_in_run:
        assert box.src_token == box.run * box.elements.src_bytes
        assert box.dst_token == box.run * box.elements.dst_bytes
    strides = np.asarray([[segment.src_block, box.src_token], [segment.dst_block, box.dst_token]], np.int64)
    firsts = (segment.rows[:, :4].reshape(-1, 2, 2) * strides).sum(axis=2)
    tokens = segment.rows[:, 4].tolist()
    inside = {count: _inside(box, count) for count in set(tokens)}
    rows = [region + at + inside[n] for region in segment.regions for at, n in zip(firsts, tokens, strict=True)]
    return np.concatenate([np.zeros((0, 2), np.int64), *rows])


def _inside(box: Box, tokens: int) -> I64:
    """Where the elements of so many tokens are, counted from the first one."""
    index = np.indices((tokens, *(axis.count for axis in box.outer), box.run), dtype=np.int64)
    sides = [
        (box.src_token, *(axis.src for axis in box.outer), box.elements.src_bytes),
        (box.dst_token, *(axis.dst for axis in box.outer), box.elements.dst_bytes),
    ]
    return np.stack([np.tensordot(strides, index, 1).ravel() for strides in sides], axis=1)


def by_destination(pairs: I64) -> I64:
    """In a defined order, to compare."""
    return pairs[np.lexsort((pairs[:, 0], pairs[:, 1]))]


def run(pieces: Pieces, src: Space, dst: Space) -> tuple[I64, I64]:
    """Copy piece by piece, refusing to write a byte twice; returns the indices read and written."""
    pairs = byte_pairs(pieces)
    read, written = src.at(pairs[:, 0]), dst.at(pairs[:, 1])
    assert len(np.unique(written)) == len(written), "a byte is written twice"
    dst.cells[written] = src.cells[read]
    return read, written
