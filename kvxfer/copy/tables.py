"""A copy plan as one array of 64-bit words: what the kernel reads.

Per variant of the kernel one launch; per launch a list of headers; each header points (relative to itself, so that the
tables work wherever they are put) at its axes, its regions and its rows:

    header   tiles, tiles of the headers before it, words an item (+ how to divide by it), items, rows (+ how to divide
             by it), where the regions are, where the rows are, where the axes are, number of axes
    axis     count (+ how to divide by it), source stride, destination stride, 1 if a row may cut it short
    region   source address, destination address; where elements are converted, also two float32 in one word: by what
             they are multiplied (the low half), and then divided
    row      source offset, destination offset, the count of the axis that it may cut short

A word of the copy is one access: some bytes, or some elements that are converted. An item is one row in one region. Its
words are numbered along the axes, the innermost first, and items follow each
other without a gap, so a tile of the kernel holds as many small rows as fit. Numbers of items and of words within an
item have 31 bits (checked here), offsets and addresses 64.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import GeometryError
from kvxfer.geometry.chunks import STAGING_ALIGNMENT
from kvxfer.geometry.copyplan import CopyPlan, Segment
from kvxfer.geometry.elements import BYTES, Elements

__all__ = ["AXIS_WORDS", "HEADER_WORDS", "TILE_WORDS", "WIDTHS", "Launch", "Tables", "Variant", "pack", "variants"]

I64: TypeAlias = NDArray[np.int64]

WIDTHS: Final = (16, 8, 4, 2, 1)
"""Widths of an access in bytes."""
CONVERTED_WIDTHS: Final = (8, 4, 2, 1)
"""Widths of an access in elements, where they are converted."""
TILE_WORDS: Final = 4096
"""Words (of the access width) that a tile holds."""
CONVERTED_TILE_WORDS: Final = 2048
"""The same where elements are converted: each is held as float32."""
HEADER_WORDS: Final = 13
AXIS_WORDS: Final = 6

_LIMIT: Final = 2**31 - 2 * TILE_WORDS


@dataclass(frozen=True, slots=True, order=True)
class Variant:
    """What the kernel is compiled for.

    Attributes:
        width: Elements an access; they are bytes where nothing is converted.
        elements: What is done to each.
    """

    width: int
    elements: Elements = BYTES

    @property
    def tile(self) -> int:
        """Words that a tile holds."""
        return CONVERTED_TILE_WORDS if self.elements.converts else TILE_WORDS


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of the kernel.

    Attributes:
        variant: Which one.
        first: Where its first header is among the words.
        headers: Number of headers.
        tiles: Tiles to copy.
    """

    variant: Variant
    first: int
    headers: int
    tiles: int


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """A packed plan.

    Attributes:
        words: int64, to be put where the device can read it.
        launches: At most one for each variant; their order does not matter.
        nbytes: Bytes that are written.
    """

    words: I64
    launches: tuple[Launch, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Regions and rows of a segment that allow the same access width."""

    segment: Segment
    width: int
    regions: I64  # as the kernel reads them
    rows: I64  # (N, 3): source offset, destination offset, tokens


def pack(plan: CopyPlan) -> Tables:
    """Make the tables of a plan.

    Raises:
        GeometryError: If a row or a table is too large to be numbered with 31 bits.
    """
    by_variant: dict[Variant, list[_Part]] = {}
    for segment in plan.segments:
        for part in _parts(segment):
            by_variant.setdefault(Variant(part.width, segment.box.elements), []).append(part)
    launches: list[Launch] = []
    words: list[I64] = []
    at = 0
    for variant, parts in by_variant.items():
        packed, tiles = _pack_launch(parts, variant)
        launches.append(Launch(variant, at, len(parts), tiles))
        words.append(packed)
        at += len(packed)
    return Tables(np.concatenate(words) if words else np.zeros(0, np.int64), tuple(launches), plan.bytes)


def variants(plans: Iterable[CopyPlan]) -> set[Variant]:
    """Every variant that these plans need, or would need with rows cut at other tokens."""
    needed: set[Variant] = set()
    for plan in plans:
        for segment in plan.segments:
            own = {part.width for part in _parts(segment)}
            box, elements = segment.box, segment.box.elements
            usable = _usable(elements)
            widest = max(own, default=usable[0])
            token = box.src_token // elements.src_bytes | box.dst_token // elements.dst_bytes
            narrowest = _widest(min(own, default=widest) | box.run | token, usable[0])
            needed |= {Variant(width, elements) for width in usable if width in own or narrowest <= width <= widest}
    return needed


def _usable(elements: Elements) -> tuple[int, ...]:
    """Widths of an access, the widest first. Staging is aligned to 16 bytes, so no wider one may be counted on."""
    if not elements.converts:
        return WIDTHS
    return tuple(width for width in CONVERTED_WIDTHS if width * elements.staged_bytes <= STAGING_ALIGNMENT)


def _widest(bits: int, most: int) -> int:
    """The widest access, up to `most`, that an OR of addresses, strides and sizes (in elements) allows."""
    bits |= most
    return bits & -bits


def _parts(segment: Segment) -> list[_Part]:
    """Split regions and rows by the access width that they allow; nearly always there is one part."""
    box, elements = segment.box, segment.box.elements
    src_item, dst_item = elements.src_bytes, elements.dst_bytes
    most = _usable(elements)[0]
    counts = segment.rows[:, 4]
    table = segment.rows if len(counts) and int(counts.min()) > 0 else segment.rows[counts > 0]
    rows = np.empty((len(table), 3), np.int64)
    rows[:, 0] = table[:, 0] * segment.src_block + table[:, 1] * box.src_token
    rows[:, 1] = table[:, 2] * segment.dst_block + table[:, 3] * box.dst_token
    rows[:, 2] = table[:, 4]
    if not len(rows) or not len(segment.regions) or not box.token_bytes:
        return []
    common = 0 if box.token_in_run else box.run
    for axis in box.outer:
        common |= (axis.src // src_item | axis.dst // dst_item) if axis.count > 1 else 0
    if not box.token_in_run and int(rows[:, 2].max()) > 1:
        common |= box.src_token // src_item | box.dst_token // dst_item
    row_bits = _bits(rows, src_item, dst_item)
    if box.token_in_run:
        row_bits |= rows[:, 2] * box.run
    region_bits = _bits(segment.regions, src_item, dst_item)
    regions = _region_words(segment)
    if _widest(common | int(np.bitwise_or.reduce(row_bits)) | int(np.bitwise_or.reduce(region_bits)), most) == most:
        return [_Part(segment, most, regions, rows)]
    region_widths, row_widths = ((bits | most) & -(bits | most) for bits in (region_bits, row_bits))
    return [
        _Part(segment, _widest(common | wr | wn, most), regions[region_widths == wr], rows[row_widths == wn])
        for wr in np.unique(region_widths).tolist()
        for wn in np.unique(row_widths).tolist()
    ]


def _bits(places: I64, src_item: int, dst_item: int) -> I64:
    """Places at the source and destination, counted in elements, as one number that is as aligned as both."""
    if src_item == dst_item == 1:  # by far the most frequent case, and dividing takes longer than all the rest
        return np.asarray(places[:, 0] | places[:, 1])
    return np.asarray(places[:, 0] // src_item | places[:, 1] // dst_item)


def _region_words(segment: Segment) -> I64:
    """Regions as the kernel reads them."""
    if segment.factors is None:
        return segment.regions
    return np.concatenate([segment.regions, np.ascontiguousarray(segment.factors, "<f4").view("<i8")], axis=1)


def _axes(part: _Part, tokens: int) -> list[tuple[int, int, int, bool]]:
    """(count, source stride, destination stride, cut short by rows), the run in words first, then by destination."""
    box, width = part.segment.box, part.width
    cut = box.token_in_run
    words = (tokens if cut else 1) * box.run // width
    run = (words, width * box.elements.src_bytes, width * box.elements.dst_bytes, cut)
    rest = [(axis.dst, axis.src, axis.count, False) for axis in box.outer if axis.count > 1]
    if tokens > 1 and not cut:
        rest.append((box.dst_token, box.src_token, tokens, True))
    axes = [(count, src, dst, cut) for dst, src, count, cut in sorted(rest)]
    return axes if axes and run[0] == 1 else [run, *axes]


def _pack_launch(parts: list[_Part], variant: Variant) -> tuple[I64, int]:
    """Headers, axes, regions and rows of one launch, and its tiles."""
    head: list[int] = []
    body: list[I64] = []
    at = len(parts) * HEADER_WORDS
    before = 0
    for number, part in enumerate(parts):
        origin = number * HEADER_WORDS
        longest = int(part.rows[:, 2].max())
        axes = _axes(part, longest)
        size = 1
        numbers: list[int] = []
        for count, src, dst, cut in axes:
            size *= count
            numbers += [count, *_divisor(count), src, dst, int(cut)]
        rows = part.rows
        if part.segment.box.token_in_run:
            rows[:, 2] *= part.segment.box.run
            rows[:, 2] //= part.width
        items = len(part.regions) * len(rows)
        tiles = -(-items * size // variant.tile)
        _check(size, items, before + tiles, variant)
        where = (at - origin, at - origin + part.regions.size, at - origin + part.regions.size + rows.size)
        head += [tiles, before, size, *_divisor(size), items, len(rows), *_divisor(len(rows)), *where, len(axes)]
        body += [part.regions.ravel(), rows.ravel(), np.asarray(numbers, np.int64)]
        at += part.regions.size + rows.size + len(numbers)
        before += tiles
    return np.concatenate([np.asarray(head, np.int64), *body]), before


def _check(size: int, items: int, tiles: int, variant: Variant) -> None:
    width = variant.width * variant.elements.dst_bytes
    for what, count in (("words in a row", size), ("rows times regions", items), ("tiles in a launch", tiles)):
        if count >= _LIMIT:
            raise GeometryError(
                f"a copy with {width}-byte accesses has {count} {what}, but at most {_LIMIT - 1} can be numbered: "
                "cut it into smaller ones"
            )


def _divisor(divisor: int) -> tuple[int, int]:
    """Multiplier m and shift s with x // divisor == ((x * m >> 32) + x) >> s for 0 <= x < 2**31.

    Granlund and Montgomery, "Division by invariant integers using multiplication", PLDI 1994, figure 4.1.
    """
    shift = (divisor - 1).bit_length()
    return ((1 << 32) * ((1 << shift) - divisor)) // divisor + 1, shift
