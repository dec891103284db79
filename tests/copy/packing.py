"""Tables of any copy plan, made by its definition: what compiled code makes of requests is compared with them.

Also copies of them, in the calling thread, and batches as the mover takes them.
"""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray
from staged import Blank, nbytes_of

from kvxfer.copy import binding
from kvxfer.copy.compiler import compiled
from kvxfer.copy.tables import (
    HEADER_WORDS,
    KINDS,
    PART_BYTES,
    PART_WORDS,
    Variant,
    divisor,
    region_words,
    usable,
)
from kvxfer.copy.template import Batch, Variants
from kvxfer.copy.walk import copy_part
from kvxfer.geometry.copyplan import BYTES, Box, CopyPlan, Elements, Segment

I64: TypeAlias = NDArray[np.int64]


class Launch(Struct, frozen=True):
    """One launch of the kernel."""

    variant: Variant
    first: int  # where its first header is among the words
    headers: int
    tiles: int


class Tables(Struct, frozen=True, eq=False):
    """A packed plan."""

    words: I64  # int64, to be put where the device can read it
    launches: tuple[Launch, ...]  # at most one for each variant; their order does not matter
    nbytes: int
    blanks: tuple[Blank, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Regions and rows of a segment that allow the same access width."""

    width: int  # of an access, in elements
    regions: I64  # as the kernel reads them
    body: I64  # rows, then axes, as it reads those
    rows: int
    axes: int
    size: int  # words of the copy in an item


def pack(plan: CopyPlan) -> Tables:
    """Make the tables of a plan."""
    by_variant: dict[Variant, list[_Part]] = {}
    for segment in plan.segments:
        for part in _parts(segment):
            by_variant.setdefault(Variant(part.width, segment.box.elements), []).append(part)
    launches: list[Launch] = []
    words = [np.zeros(0, np.int64)]
    for variant, parts in by_variant.items():
        packed, tiles = _packed(parts, variant)
        launches.append(Launch(variant, sum(map(len, words)), len(parts), tiles))
        words.append(packed)
    return Tables(np.concatenate(words), tuple(launches), nbytes_of(plan), getattr(plan, "blanks", ()))


def parts_of(tables: Tables, part_bytes: int = PART_BYTES) -> tuple[I64, int]:
    """The list of headers that is walked on a CPU, PART_WORDS each, and parts in all."""
    found: list[tuple[int, ...]] = []
    count, address, words = 0, tables.words.__array_interface__["data"][0], tables.words
    for launch in tables.launches:
        elements, width = launch.variant.elements, launch.variant.width
        for header in range(launch.first, launch.first + launch.headers * HEADER_WORDS, HEADER_WORDS):
            most = max(1, part_bytes // (int(words[header + 2]) * width * elements.dst_bytes))
            count += -(-int(words[header + 5]) // most)
            kinds = KINDS[elements.src], KINDS[elements.dst]
            found.append((address + 8 * header, width, *kinds, most, count))
    return np.asarray(found, np.int64).reshape(-1, PART_WORDS), count


def variants(plans: Iterable[CopyPlan]) -> set[Variant]:
    """Every variant that these plans need, or would need with rows cut at other tokens."""
    needed: set[Variant] = set()
    for plan in plans:
        for segment in plan.segments:
            own = {part.width for part in _parts(segment)}
            box, elements = segment.box, segment.box.elements
            widths = usable(elements)
            widest = max(own, default=widths[0])
            token = box.src_token // elements.src_bytes | box.dst_token // elements.dst_bytes
            narrowest = _widest(min(own, default=widest) | box.run | token, widths[0])
            needed |= {Variant(width, elements) for width in widths if width in own or narrowest <= width <= widest}
    return needed


def _widest(bits: int, most: int) -> int:
    """The widest access, up to `most`, that an OR of addresses, strides and sizes (in elements) allows."""
    bits |= most
    return bits & -bits


def _parts(segment: Segment) -> list[_Part]:
    """Split regions and rows by the access width that they allow; nearly always there is one part."""
    box, elements = segment.box, segment.box.elements
    most = usable(elements)[0]
    if not len(segment.offsets) or not len(segment.regions) or not box.token_bytes:
        return []
    regions = region_words(segment)
    common, region_bits, row_bits = _common_bits(segment), _bits(segment.regions, elements), _row_bits(segment)
    if _widest(common | int(np.bitwise_or.reduce(row_bits)) | int(np.bitwise_or.reduce(region_bits)), most) == most:
        return [_part(box, regions, segment.offsets, most)]
    region_widths, row_widths = ((bits | most) & -(bits | most) for bits in (region_bits, row_bits))
    parts: list[_Part] = []
    for of_regions in np.unique(region_widths).tolist():
        for of_rows in np.unique(row_widths).tolist():
            width = _widest(common | of_regions | of_rows, most)
            rows = segment.offsets[row_widths == of_rows]
            parts.append(_part(box, regions[region_widths == of_regions], rows, width))
    return parts


def _common_bits(segment: Segment) -> int:
    """An OR of the strides and sizes, in elements, of all rows."""
    box, elements = segment.box, segment.box.elements
    found = 0 if box.token_in_run else box.run
    steps = [(axis.src, axis.dst) for axis in box.outer if axis.count > 1]
    if not box.token_in_run and int(segment.offsets[:, 2].max()) > 1:
        steps.append((box.src_token, box.dst_token))
    for src, dst in steps:
        found |= src // elements.src_bytes | dst // elements.dst_bytes
    return found


def _row_bits(segment: Segment) -> I64:
    """For each row an OR of its offsets, and of its length where that may differ."""
    found, box = _bits(segment.offsets, segment.box.elements), segment.box
    return found | segment.offsets[:, 2] * box.run if box.token_in_run else found


def _bits(places: I64, elements: Elements) -> I64:
    """Places at the source and destination, counted in elements, as one number that is as aligned as both."""
    src_item, dst_item = elements.src_bytes, elements.dst_bytes
    if src_item == dst_item == 1:  # by far the most frequent case, and dividing takes longer than all the rest
        return np.asarray(places[:, 0] | places[:, 1])
    return np.asarray(places[:, 0] // src_item | places[:, 1] // dst_item)


def _axes(box: Box, width: int, tokens: int) -> list[tuple[int, int, int, bool]]:
    """(count, source stride, destination stride, cut short by rows), the run in words first, then by destination."""
    cut = box.token_in_run
    words = (tokens if cut else 1) * box.run // width
    run = (words, width * box.elements.src_bytes, width * box.elements.dst_bytes, cut)
    rest = [(axis.dst, axis.src, axis.count, False) for axis in box.outer if axis.count > 1]
    if tokens > 1 and not cut:
        rest.append((box.dst_token, box.src_token, tokens, True))
    axes = [(count, src, dst, cut) for dst, src, count, cut in sorted(rest)]
    return axes if axes and run[0] == 1 else [run, *axes]


def _part(box: Box, regions: I64, offsets: I64, width: int) -> _Part:
    """Of these rows, by their offsets."""
    axes = _axes(box, width, int(offsets[:, 2].max()))
    size = 1
    numbers: list[int] = []
    for count, src, dst, cut in axes:
        size *= count
        numbers += [count, *divisor(count), src, dst, int(cut)]
    body = np.concatenate([offsets.ravel(), np.asarray(numbers, np.int64)])
    if box.token_in_run:
        counts = body[2 : offsets.size : 3]
        counts *= box.run
        counts //= width
    return _Part(width, regions, body, len(offsets), len(axes), size)


def _packed(parts: list[_Part], variant: Variant) -> tuple[I64, int]:
    """Headers, regions, rows and axes of one launch, and its tiles."""
    head: list[int] = []
    words: list[I64] = []
    at = len(parts) * HEADER_WORDS
    before = 0
    for number, part in enumerate(parts):
        items = len(part.regions) * part.rows
        tiles = -(-items * part.size // variant.tile)
        first = at - number * HEADER_WORDS
        rows = first + part.regions.size
        where = (first, rows, rows + 3 * part.rows, part.axes)
        head += [tiles, before, part.size, *divisor(part.size), items, part.rows, *divisor(part.rows), *where]
        words += [part.regions.ravel(), part.body]
        at += part.regions.size + len(part.body)
        before += tiles
    return np.concatenate([np.asarray(head, np.int64), *words]), before


@compiled("void(int64, int64, int64)")
def copy_parts(parts: int, first: int, last: int) -> None:
    """Copy parts of a list of headers, in the calling thread."""
    for number in range(first, last):
        copy_part(parts, number)


def copy(tables: Tables) -> None:
    """Copy now, in the calling thread. All addresses must be valid CPU memory of this process."""
    for blank in tables.blanks:
        for line in range(blank.lines):
            ctypes.memset(blank.address + line * blank.pitch, 0, blank.width)
    parts, count = parts_of(tables)
    copy_parts(parts.ctypes.data, 0, count)


NOTHING = pack(CopyPlan(()))


def batch(*tables: Tables) -> Batch:
    """The same as the mover takes them: each a copy, which carries what it writes."""
    kinds = dict.fromkeys(launch.variant.elements for one in tables for launch in one.launches)
    variants = Variants(list(kinds) or [BYTES])
    said = np.zeros((len(tables), variants.told), np.int64)
    stop = said.size
    for row, one in zip(said, tables, strict=True):
        launches, blanks = np.split(row[binding.TOLD :], [-binding.BLANK_WORDS * binding.BLANKS])
        begin, stop = stop, stop + len(one.words)
        row[: binding.TOLD] = one.nbytes, 0, one.nbytes, begin, stop, len(one.launches), len(one.blanks)
        for number, launch in enumerate(one.launches):
            of = variants.elements.index(launch.variant.elements), launch.variant.width
            said_of = *of, 0, launch.first, launch.headers, launch.tiles
            launches[binding.LAUNCH_WORDS * number :][: binding.LAUNCH_WORDS] = said_of
        for number, blank in enumerate(one.blanks):
            place = blank.address, blank.width, blank.lines, blank.pitch
            blanks[binding.BLANK_WORDS * number :][: binding.BLANK_WORDS] = place
    out = np.concatenate([said.ravel(), *[one.words for one in tables]])
    told = out[: said.size].reshape(said.shape)
    return Batch(variants, out, told, told[:, binding.T_BYTES], told[:, binding.T_STAGED])


def packed(plan: CopyPlan, nbytes: int | None = None) -> Batch:
    """A plan as the mover takes it; it may be said to carry other bytes than it does."""
    tables = pack(plan)
    return batch(tables if nbytes is None else replace(tables, nbytes=nbytes))
