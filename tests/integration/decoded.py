"""What packed tables say, read word by word: which bytes are read, and which are written."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import numpy as np
from opened import opened
from packing import Tables

from kvxfer.copy.tables import AXIS_WORDS, HEADER_WORDS
from kvxfer.copy.template import Batch
from kvxfer.geometry.copyplan import Elements

_SIZE, _ITEMS, _ROWS, _REGIONS, _LINES, _AXES, _AXIS_COUNT = 2, 5, 6, 9, 10, 11, 12


@dataclass(frozen=True)
class Accesses:
    """Accesses of one width."""

    src: np.ndarray  # int64 (N): where each reads
    dst: np.ndarray  # int64 (N): where it writes
    width: int  # elements of each; bytes, unless they are converted
    elements: Elements  # what is done to them

    @property
    def src_bytes(self):
        return self.width * self.elements.src_bytes

    @property
    def dst_bytes(self):
        return self.width * self.elements.dst_bytes


def accesses(tables: Tables | Batch | None) -> Iterator[Accesses]:
    """All accesses of a copy, or of those of a batch."""
    for one in [tables] if isinstance(tables, Tables) else opened(tables):
        for launch in one.launches:
            elements, width = launch.variant.elements, launch.variant.width
            for number in range(launch.headers):
                at = launch.first + number * HEADER_WORDS
                yield from _of_header(one.words[at:], width, elements)


def _of_header(words, width, elements):
    items, rows, count = int(words[_ITEMS]), int(words[_ROWS]), int(words[_AXIS_COUNT])
    step = 3 if elements.converts else 2
    regions = words[int(words[_REGIONS]) :][: items // rows * step].reshape(-1, step)
    lines = words[int(words[_LINES]) :][: 3 * rows].reshape(-1, 3)
    axes = words[int(words[_AXES]) :][: AXIS_WORDS * count].reshape(-1, AXIS_WORDS)
    for most in np.unique(lines[:, 2]).tolist():
        chosen = lines[lines[:, 2] == most]
        steps = [np.arange(most if axis[5] else axis[0], dtype=np.int64) for axis in axes]
        src, dst = (
            reduce(
                np.add.outer,
                [regions[:, side], chosen[:, side], *(s * a[3 + side] for s, a in zip(steps, axes, strict=True))],
            ).ravel()
            for side in (0, 1)
        )
        yield Accesses(src, dst, width, elements)


def pieces(tables: Tables | Batch | None) -> Iterator[tuple[int, int, int, int]]:
    """Contiguous runs of a copy: source, bytes there, destination, bytes there."""
    for one in accesses(tables):
        order = np.lexsort((one.src, one.dst))
        src, dst = one.src[order], one.dst[order]
        joined = (src[1:] == src[:-1] + one.src_bytes) & (dst[1:] == dst[:-1] + one.dst_bytes)
        first = np.flatnonzero(np.concatenate([[True], ~joined]))
        for begin, end in zip(first.tolist(), [*first[1:].tolist(), len(src)], strict=True):
            yield int(src[begin]), (end - begin) * one.src_bytes, int(dst[begin]), (end - begin) * one.dst_bytes
