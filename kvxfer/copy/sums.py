"""Sums of a chunk: its plan as one array of 64-bit words, which the kernel reads (`walk.py` adds up CPU memory)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.copy.tables import divisor, region_words
from kvxfer.errors import GeometryError
from kvxfer.geometry.chunks import SumPart, SumPlan
from kvxfer.geometry.spec import BYTES, Elements

__all__ = ["SUM_AXIS_WORDS", "SUM_HEADER_WORDS", "SumLaunch", "SumTables", "SumVariant", "pack_sums", "sum_variants"]

# --- tables
#
#     header   blocks of items, blocks of the headers before it, items, rows (+ how to divide by it), words of an item,
#              number of axes, where they, the regions and the rows are, first region, first row, how to divide by the
#              regions and by the rows that share a sum, number of sums over regions
#     axis     count (+ how to divide by it), stride, 1 if a row may cut it short
#     region   address; where elements are converted, also two float32 in one word, as in `kvxfer.copy.tables`
#     row      offset, the count of the axis that it may cut short
#
# Places count from the header. Behind the last of them lie the sums, 0 at first. The axes number the accesses of an
# item as they lie in the common order, the innermost first, so a word is as many neighbours of them as it has room
# for; what a row does not hold is not read.

I64: TypeAlias = NDArray[np.int64]

SUM_HEADER_WORDS: Final = 18
SUM_AXIS_WORDS: Final = 5
_WORD: Final = 8
_TILE: Final = 2048
_SHORT_ITEM: Final = 128
_SHORT, _LONG = 32, 512
_LIMIT: Final = 2**31 - _TILE * _WORD


@dataclass(frozen=True, slots=True, order=True)
class SumVariant:
    """What the kernel is compiled for.

    Attributes:
        unit: Bytes of an access, as they are summed.
        words: Words of an item that are looked at together.
        elements: What is done to each element before.
    """

    unit: int
    words: int
    elements: Elements = BYTES

    @property
    def items(self) -> int:
        """Items that are looked at together."""
        return _TILE // self.words


@dataclass(frozen=True, slots=True)
class SumLaunch:
    """One launch of the kernel: its headers, from the first of the words on, and blocks of items."""

    variant: SumVariant
    first: int
    headers: int
    blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class SumTables:
    """A packed plan.

    Attributes:
        words: int64, to be put where the device can read and write it.
        launches: At most one for each variant; their order does not matter.
        at: Where the sums are among the words: all that follow.
    """

    words: I64
    launches: tuple[SumLaunch, ...]
    at: int


def pack_sums(plan: SumPlan) -> SumTables:
    """Make the tables of a plan.

    Raises:
        GeometryError: If an item or a table is too large to be numbered with 31 bits.
    """
    by_variant: dict[SumVariant, list[SumPart]] = {}
    for part in plan.parts:
        by_variant.setdefault(_variant(part), []).append(part)
    words: list[I64] = []
    launches: list[SumLaunch] = []
    at = 0
    for variant, parts in by_variant.items():
        heads: list[list[int]] = []
        bodies: list[I64] = []
        end, before = len(parts) * SUM_HEADER_WORDS, 0
        for number, part in enumerate(parts):
            body, places = _body(part, variant)
            blocks = -(-part.regions * part.rows // variant.items)
            _check(part, blocks + before)
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


def sum_variants(plans: Iterable[SumPlan]) -> set[SumVariant]:
    """Every variant that these plans need, or would need in other blocks, with rows cut at other tokens."""
    return {_variant(part) for plan in plans for part in plan.parts}


def _variant(part: SumPart) -> SumVariant:
    stencil = part.segment.stencil
    box, elements = stencil.box, stencil.box.elements
    words = _SHORT if part.words <= _SHORT_ITEM else _LONG
    if elements.converts:
        return SumVariant(elements.dst_bytes, words, elements)
    bits = box.run | box.src_token | stencil.src_block | _WORD
    for axis in box.outer:
        bits |= axis.src
    bits |= int(np.bitwise_or.reduce(part.segment.regions[:, 0]))
    return SumVariant(bits & -bits, words)


def _body(part: SumPart, variant: SumVariant) -> tuple[I64, tuple[int, int, int, int]]:
    """Regions, rows and axes; the number of axes, and where these, the regions and the rows are."""
    stencil = part.segment.stencil
    box, elements = stencil.box, stencil.box.elements
    step = 1 if elements.converts else variant.unit  # an access in units of the run
    cut = box.token_in_run
    axes = [(box.run * (part.grid if cut else 1) // step, step * elements.src_bytes, cut)]
    rest = [(axis.dst, axis.count, axis.src, False) for axis in box.outer]
    if part.grid > 1 and not cut:
        rest.append((box.dst_token, part.grid, box.src_token, True))
    axes += [(count, src, short) for _, count, src, short in sorted(rest)]
    numbers = [number for count, src, short in axes for number in (count, *divisor(count), src, int(short))]
    words = region_words(part.segment)
    words = np.delete(words, 1, axis=1)  # where it is in the common order follows from its number
    offsets = stencil.offsets[:, [0, 2]].copy()
    if cut:
        offsets[:, 1] *= box.run
        offsets[:, 1] //= step
    body = np.concatenate([words.ravel(), offsets.ravel(), np.asarray(numbers, np.int64)])
    return body, (len(axes), words.size + offsets.size, 0, words.size)


def _check(part: SumPart, blocks: int) -> None:
    items = part.regions * part.rows
    for what, count in (("bytes in an item", part.words * _WORD), ("items", items), ("blocks", blocks)):
        if count >= _LIMIT:
            raise GeometryError(f"{count} {what} are too many to be summed at once, {_LIMIT - 1} can be numbered")
