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
words are numbered along the axes, the innermost first, and items follow each other without a gap, so a tile of the
kernel holds as many small rows as fit. Numbers of items and of words within an item have 31 bits (checked where they
are written), offsets and addresses 64.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import GeometryError
from kvxfer.geometry.copyplan import BYTES, STAGING_ALIGNMENT, Elements, Segment

if TYPE_CHECKING:  # what is packed is given
    from kvxfer.geometry.plan import SumPart, SumPlan

__all__ = [
    "AXIS_WORDS",
    "HEADER_WORDS",
    "KINDS",
    "LIMIT",
    "PART_BYTES",
    "PART_WORDS",
    "SPARE_WORDS",
    "SUM_HEADER_WORDS",
    "TILE_WORDS",
    "WIDTHS",
    "Kind",
    "SumLaunch",
    "SumTables",
    "SumVariant",
    "Variant",
    "divisor",
    "pack_sums",
    "region_words",
    "sum_variants",
    "usable",
]

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

KINDS: Final[Mapping[str, int]] = MappingProxyType(
    {"": 0, "float32": 1, "float16": 2, "bfloat16": 3, "float8_e4m3fn": 4, "float8_e5m2": 5}
)
"""By what number compiled code knows a dtype; bytes that are copied as they are have none."""

PART_WORDS: Final = 6
"""Of each header in the list of those that are copied: where it is, elements in a word, what they are at the source and
at the destination, items in a part, and parts of it and of those before it."""
PART_BYTES: Final = 1 << 20
"""Of the largest parts that a copy is cut into, if no item is larger; to wake a thread costs as much as a tenth."""

SPARE_WORDS: Final = 4
"""Behind tables on a GPU: the word that tells of a closed gate, and what makes their number a multiple of 16 bytes."""
LIMIT: Final = 2**31 - 2 * TILE_WORDS
"""Items, words of an item, and tiles of a launch are fewer."""


class Kind(IntEnum):
    """What the tables of a chunk do: copy in place, gather into staging, scatter out of it."""

    COPY = 0
    GATHER = 1
    SCATTER = 2


@dataclass(frozen=True, slots=True, order=True)
class Variant:
    """What the kernel is compiled for."""

    width: int  # elements an access; they are bytes where nothing is converted
    elements: Elements = BYTES  # what is done to each

    @property
    def tile(self) -> int:
        """Words that a tile holds."""
        return CONVERTED_TILE_WORDS if self.elements.converts else TILE_WORDS


def usable(elements: Elements) -> tuple[int, ...]:
    """Widths of an access, the widest first. Staging is aligned to 16 bytes, so no wider one may be counted on."""
    if not elements.converts:
        return WIDTHS
    return tuple(width for width in CONVERTED_WIDTHS if width * elements.staged_bytes <= STAGING_ALIGNMENT)


def region_words(segment: Segment) -> I64:
    """Regions as the kernel reads them."""
    if segment.factors is None:
        return segment.regions
    return np.concatenate([segment.regions, np.ascontiguousarray(segment.factors, "<f4").view("<i8")], axis=1)


def divisor(number: int) -> tuple[int, int]:
    """Multiplier m and shift s with x // number == ((x * m >> 32) + x) >> s for 0 <= x < 2**31.

    Granlund and Montgomery, "Division by invariant integers using multiplication", PLDI 1994, figure 4.1.
    """
    shift = (number - 1).bit_length()
    return ((1 << 32) * ((1 << shift) - number)) // number + 1, shift


# --- sums of a chunk, likewise as one array of words, which the kernel reads, or `walk.py`
#
#     header   blocks of items, blocks of the headers before it, items, rows (+ how to divide by it), words of an item,
#              number of axes, where they, the regions and the rows are, first region, first row, how to divide by the
#              regions and by the rows that share a sum, number of sums over regions
#     axis, region, row    as of a copy, each item of which goes to address 0
#
# Places count from the header. Behind the last of them lie the sums, 0 at first. The axes number the accesses of an
# item as they lie in the common order, the innermost first, so a word is as many neighbours of them as it has room
# for; what a row does not hold is not read.

SUM_HEADER_WORDS: Final = 18
_WORD: Final = 8
_SUM_TILE: Final = 2048
_SHORT_ITEM: Final = 128
_SHORT, _LONG = 32, 512
_SUM_LIMIT: Final = 2**31 - _SUM_TILE * _WORD


@dataclass(frozen=True, slots=True, order=True)
class SumVariant:
    """What the kernel is compiled for."""

    unit: int  # bytes of an access, as they are summed
    words: int  # words of an item that are looked at together
    elements: Elements = BYTES  # what is done to each element before

    @property
    def items(self) -> int:
        """Items that are looked at together."""
        return _SUM_TILE // self.words


@dataclass(frozen=True, slots=True)
class SumLaunch:
    """One launch of the kernel: its headers, from the first of the words on, and blocks of items."""

    variant: SumVariant
    first: int
    headers: int
    blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class SumTables:
    """A packed plan."""

    words: I64  # int64, to be put where the device can read and write it
    launches: tuple[SumLaunch, ...]  # at most one for each variant; their order does not matter
    at: int  # where the sums are among the words: all that follow


def pack_sums(plan: "SumPlan") -> SumTables:
    """Make the tables of a plan.

    Raises:
        GeometryError: If an item or a table is too large to be numbered with 31 bits.
    """
    by_variant: dict[SumVariant, list[SumPart]] = {}
    for part in plan.parts:
        by_variant.setdefault(_sum_variant(part), []).append(part)
    words: list[I64] = []
    launches: list[SumLaunch] = []
    at = 0
    for variant, parts in by_variant.items():
        heads: list[list[int]] = []
        bodies: list[I64] = []
        end, before = len(parts) * SUM_HEADER_WORDS, 0
        for number, part in enumerate(parts):
            body, places = _sum_body(part, variant)
            blocks = -(-part.regions * part.rows // variant.items)
            _check_sums(part, blocks + before)
            begin = end - number * SUM_HEADER_WORDS
            head = [blocks, before, part.regions * part.rows, part.rows, *divisor(part.rows), part.words]
            head += [places[0], *(begin + place for place in places[1:]), part.first_region, part.first_row]
            heads.append([*head, *divisor(plan.region_step), *divisor(plan.row_step), plan.region_sums])
            bodies.append(body)
            end += len(body)
            before += blocks
        words += [np.asarray(heads, np.int64).ravel(), *bodies]
        launches.append(SumLaunch(variant, at, len(parts), before))
        at += end
    sums = np.zeros(plan.region_sums + plan.row_sums, np.int64)
    return SumTables(np.concatenate([*words, sums]), tuple(launches), at)


def sum_variants(plans: "Iterable[SumPlan]") -> set[SumVariant]:
    """Every variant that these plans need, or would need in other blocks, with rows cut at other tokens."""
    return {_sum_variant(part) for plan in plans for part in plan.parts}


def _sum_variant(part: "SumPart") -> SumVariant:
    segment = part.segment
    box, elements = segment.box, segment.box.elements
    words = _SHORT if part.words <= _SHORT_ITEM else _LONG
    if elements.converts:
        return SumVariant(elements.dst_bytes, words, elements)
    bits = box.run | box.src_token | segment.src_block | _WORD
    for axis in box.outer:
        bits |= axis.src
    bits |= int(np.bitwise_or.reduce(segment.regions[:, 0]))
    return SumVariant(bits & -bits, words)


def _sum_body(part: "SumPart", variant: SumVariant) -> tuple[I64, tuple[int, int, int, int]]:
    """Regions, rows and axes; the number of axes, and where these, the regions and the rows are."""
    segment = part.segment
    box, elements = segment.box, segment.box.elements
    step = 1 if elements.converts else variant.unit  # an access in units of the run
    cut = box.token_in_run
    first = (step * elements.dst_bytes, box.run * (part.grid if cut else 1) // step, step * elements.src_bytes, cut)
    rest = [(axis.dst, axis.count, axis.src, False) for axis in box.outer]
    if part.grid > 1 and not cut:
        rest.append((box.dst_token, part.grid, box.src_token, True))
    axes = [first, *sorted(rest)]
    numbers = [number for dst, count, src, short in axes for number in (count, *divisor(count), src, dst, int(short))]
    words, offsets = region_words(segment), segment.offsets
    if cut:
        offsets = offsets * (1, 1, box.run) // (1, 1, step)
    body = np.concatenate([words.ravel(), offsets.ravel(), np.asarray(numbers, np.int64)])
    return body, (len(axes), words.size + offsets.size, 0, words.size)


def _check_sums(part: "SumPart", blocks: int) -> None:
    items = part.regions * part.rows
    for what, count in (("bytes in an item", part.words * _WORD), ("items", items), ("blocks", blocks)):
        if count >= _SUM_LIMIT:
            raise GeometryError(f"{count} {what} are too many to be summed at once, {_SUM_LIMIT - 1} can be numbered")
