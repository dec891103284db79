"""Random copy plans over two byte arenas, and what they mean, byte by byte."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvxfer.geometry.copyplan import BYTES, Box, BoxAxis, CopyPlan, Elements, Segment
from kvxfer.names import CONVERTIBLE

CANARY = 0xA5
PAIRS = [(src, dst) for src in CONVERTIBLE for dst in CONVERTIBLE]
"""Dtypes of which one may be converted into the other."""


def converting(src: str, dst: str) -> Elements:
    """Elements of one dtype that become elements of another."""
    return Elements(CONVERTIBLE[src], CONVERTIBLE[dst], src, dst)


@dataclass
class Side:
    """Strides of one side, in elements: every axis nested in a random order, with random gaps."""

    strides: dict[str, int]
    extent: int


def nest(rng, counts: dict[str, int], run: int, unit: int, *, innermost: str | None) -> Side:
    """Lay axes out without overlap; `innermost` follows the run without a gap."""
    strides: dict[str, int] = {}
    extent = run
    names = [name for name in counts if name != innermost]
    rng.shuffle(names)
    for name in [*([innermost] if innermost else []), *names]:
        gap = 0 if name == innermost else int(rng.choice([0, 0, 1, 3])) * unit
        strides[name] = extent + gap
        extent = (extent + gap) * (counts[name] - 1) + extent
    return Side(strides, extent)


@dataclass
class Shape:
    """What a random segment may look like."""

    unit: int
    run: int
    outer: list[int]
    tokens: int
    rows: int
    regions: int
    token_in_run: bool


def random_shape(rng, *, most: int) -> Shape:
    """Sizes whose product stays below so many elements."""
    unit = int(rng.choice([1, 2, 4, 8, 16]))
    while True:
        shape = Shape(
            unit,
            unit * int(rng.choice([1, 1, 2, 3, 5, 8, 33])),
            [int(n) for n in rng.integers(1, 5, size=int(rng.integers(0, 4)))],
            int(rng.choice([1, 2, 3, 8])),
            int(rng.integers(1, 9)),
            int(rng.integers(1, 4)),
            bool(rng.integers(0, 2)),
        )
        if shape.run * int(np.prod(shape.outer)) * shape.tokens * shape.rows * shape.regions <= most:
            return shape


def random_segment(rng, shape: Shape, e: Elements, src_base: int, dst_base: int) -> tuple[Segment, int, int]:
    """One segment with its regions at these addresses or behind them, and the bytes that it may touch on each side."""
    s, d = e.src_bytes, e.dst_bytes
    room = shape.tokens + int(rng.integers(0, 4))
    counts = {
        "region": shape.regions,
        "block": shape.rows + int(rng.integers(0, 3)),
        "token": room,
        **{str(n): count for n, count in enumerate(shape.outer)},
    }
    innermost = "token" if shape.token_in_run else None
    src, dst = (nest(rng, counts, shape.run, shape.unit, innermost=innermost) for _ in range(2))
    partial = rng.integers(0, 2)
    lengths = rng.integers(1, shape.tokens + 1, size=shape.rows) if partial else np.full(shape.rows, shape.tokens)
    rows = np.stack(
        [
            rng.integers(0, counts["block"], size=shape.rows),
            rng.integers(0, room - lengths + 1),
            rng.permutation(counts["block"])[: shape.rows],
            rng.integers(0, room - lengths + 1),
            lengths,
        ],
        axis=1,
    ).astype(np.int64)
    order = rng.permutation(shape.regions)
    places = order * src.strides["region"] * s, np.arange(shape.regions) * dst.strides["region"] * d
    regions = np.stack([src_base + places[0], dst_base + places[1]], axis=1).astype(np.int64)
    outer = tuple(BoxAxis(n, src.strides[str(k)] * s, dst.strides[str(k)] * d) for k, n in enumerate(shape.outer))
    outer = tuple(turned(rng, axis, regions) for axis in outer)
    box = Box(outer, src.strides["token"] * s, dst.strides["token"] * d, shape.run, shape.token_in_run, e)
    factors = np.exp2(rng.normal(0, 4, (shape.regions, 2))).astype(np.float32) if e.converts else None
    segment = Segment(regions, rows, src.strides["block"] * s, dst.strides["block"] * d, box, factors)
    return segment, src.extent * s, dst.extent * d


def turned(rng, axis: BoxAxis, regions) -> BoxAxis:
    """Now and then an axis that runs backwards on one side, as split axes do; regions then begin at its other end."""
    strides = [axis.src, axis.dst]
    for side in (0, 1):
        if rng.random() < 0.2:
            regions[:, side] += (axis.count - 1) * strides[side]
            strides[side] = -strides[side]
    return BoxAxis(axis.count, *strides)


def random_plan(
    seed: int,
    src_address: int,
    dst_address: int,
    nbytes: int,
    *,
    converts: bool = False,
    most_segments: int = 4,
    most: int = 16384,
) -> tuple[CopyPlan, int, int]:
    """A plan whose segments lie one behind the other in two arenas of `nbytes`, and the bytes that it uses of each."""
    rng = np.random.default_rng(seed)
    segments: list[Segment] = []
    src_at, dst_at = 0, 0
    for _ in range(int(rng.integers(1, most_segments + 1))):
        e = converting(*PAIRS[int(rng.integers(len(PAIRS)))]) if converts else BYTES
        shape = random_shape(rng, most=most)
        align = 16 if rng.integers(0, 2) else 1
        src_at, dst_at = (
            -(-(at + int(rng.integers(0, 16))) // (align * size)) * align * size
            for at, size in ((src_at, e.src_bytes), (dst_at, e.dst_bytes))
        )
        segment, src_extent, dst_extent = random_segment(rng, shape, e, src_address + src_at, dst_address + dst_at)
        if max(src_at + src_extent, dst_at + dst_extent) > nbytes:
            break
        segments.append(segment)
        src_at += src_extent
        dst_at += dst_extent
    return CopyPlan(tuple(segments)), src_at, dst_at


def expected(plan: CopyPlan, src, src_address: int, dst, dst_address: int):
    """What `dst` must be afterwards, piece by piece."""
    result = dst.copy()
    pieces = plan.enumerate()
    columns = (pieces.src - src_address, pieces.dst - dst_address, pieces.nbytes)
    for at, to, count in zip(*(column.tolist() for column in columns), strict=True):
        result[to : to + count] = src[at : at + count]
    return result


def contiguous_rows(src: int, dst: int, *, row_bytes: int, src_gap: int = 0, dst_gap: int = 0, **rest: Any) -> CopyPlan:
    """The first `row_bytes` of blocks, which are larger by the gaps; of `rest` see `box_plan`."""
    box = Box((), row_bytes, row_bytes, row_bytes, token_in_run=True)
    blocks = {"src_block": row_bytes + src_gap, "dst_block": row_bytes + dst_gap}
    return box_plan(src, dst, box=box, tokens=1, **blocks, **rest)


def head_split(src: int, dst: int, *, row_bytes: int = 512, **rest: Any) -> CopyPlan:
    """NHD blocks of 16 tokens, of which a quarter of the heads (a row of `row_bytes`) is taken."""
    box = Box((), 4 * row_bytes, row_bytes, row_bytes, token_in_run=False)
    return box_plan(src, dst, box=box, tokens=16, src_block=64 * row_bytes, dst_block=16 * row_bytes, **rest)


def hnd_to_nhd(src: int, dst: int, **rest: Any) -> CopyPlan:
    """HND blocks of 8 heads x 16 tokens x 256 bytes into NHD blocks."""
    box = Box((BoxAxis(8, 4096, 256),), 256, 2048, 256, token_in_run=False)
    return box_plan(src, dst, box=box, tokens=16, src_block=32768, dst_block=32768, **rest)


def box_plan(
    src: int, dst: int, *, rows: int, regions: int, pool: int, box: Box, tokens: int, src_block: int, dst_block: int,
    rng: Any = None, flat: str = "",
) -> CopyPlan:  # fmt: skip
    """Equal boxes in random blocks, ascending ones on the side `flat` or on both; regions lie `pool` blocks apart."""
    rng, in_order = rng or np.random.default_rng(0), [flat in (side, "both") for side in ("src", "dst")]
    ids = [np.arange(rows) if ascend else rng.permutation(pool)[:rows] for ascend in in_order]
    zero = np.zeros(rows, np.int64)
    table = np.stack([ids[0], zero, ids[1], zero, np.full(rows, tokens)], axis=1).astype(np.int64)
    number = np.arange(regions, dtype=np.int64)
    step = [rows if ascend else pool for ascend in in_order]
    bases = np.stack([src + number * step[0] * src_block, dst + number * step[1] * dst_block], axis=1)
    return CopyPlan((Segment(bases, table, src_block, dst_block, box),))
