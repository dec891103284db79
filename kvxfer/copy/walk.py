"""Copies between CPU memory: the tables of a plan, walked by compiled code; and sums of what is there.

The tables are those that kernels read on a GPU (`tables.py`), and elements are converted to the same bits. An item
is a run of elements, or single words of them that lie apart, within some axes. Nothing here needs the
interpreter, so threads copy side by side: they take parts of a copy from a counter until there are none left.
"""

from typing import Any, Final

import numpy as np

from kvxfer.copy.compiler import (
    add,
    bits_of,
    call,
    clear_bytes,
    compiled,
    copy_bytes,
    copy_word,
    exchange,
    float_of,
    inlined,
    load,
    load_word,
    prefetch,
    store_word,
)
from kvxfer.copy.tables import AXIS_WORDS, KINDS, PART_WORDS, SUM_HEADER_WORDS, pack_sums
from kvxfer.geometry.plan import SumPlan, keys

__all__ = ["copy_part", "help_out", "total"]

PLAIN, FLOAT32, FLOAT16, BFLOAT16, E4M3 = (
    KINDS[name] for name in ("", "float32", "float16", "bfloat16", "float8_e4m3fn")
)

_AHEAD: Final = 4
"""Items by which their memory is asked for before they are copied."""
_NEAR_BYTES: Final = 512
"""Of the beginning of each on either side: once a copy is going, the processor does that by itself."""
_AXIS: Final = 8 * AXIS_WORDS
_PART: Final = 8 * PART_WORDS


# --- elements, as the kernel computes them


@inlined
def _read(address: Any, kind: Any) -> Any:
    """The bits of an element."""
    if kind == FLOAT32:
        return load_word(address, 4)
    if kind in (FLOAT16, BFLOAT16):
        return load_word(address, 2)
    return load_word(address, 1)


@inlined
def _write(address: Any, bits: Any, kind: Any) -> None:
    if kind == FLOAT32:
        store_word(address, bits, 4)
    elif kind in (FLOAT16, BFLOAT16):
        store_word(address, bits, 2)
    else:
        store_word(address, bits, 1)


@inlined
def _size(kind: Any) -> Any:
    """Bytes of an element; what is copied as it is consists of bytes."""
    if kind == FLOAT32:
        return 4
    return 2 if kind in (FLOAT16, BFLOAT16) else 1


@inlined
def _decoded(bits: Any, kind: Any) -> Any:
    """The value of an element as float32: exact."""
    if kind == FLOAT32:
        return float_of(bits)
    if kind == BFLOAT16:
        return float_of(bits << 16)
    if kind == E4M3:
        size, sign = bits & 0x7F, (bits & 0x80) << 24
        found = (size << 20) + (120 << 23)
        if size == 0x7F:
            found = 0x7FC00000
        elif size < 8:  # in units of 2^-9
            found = bits_of(np.float32(size) * np.float32(0.001953125))
    else:
        half = bits if kind == FLOAT16 else bits << 8  # of which the other is the upper half
        size, sign = half & 0x7FFF, (half & 0x8000) << 16
        found = (size << 13) + (112 << 23)
        if size >= 0x7C00:  # no number, or no end
            found += 112 << 23
        elif size < 0x400:  # in units of 2^-24
            found = bits_of(np.float32(size) * np.float32(5.9604644775390625e-08))
    return float_of(found | sign)


@inlined
def _encoded(value: Any, kind: Any) -> Any:
    """The element that is nearest, an even one between two; every NaN in one form."""
    bits = bits_of(value)
    size = bits & 0x7FFFFFFF
    if size > 0x7F800000:
        return _nan(kind)
    if kind == FLOAT32:
        return bits
    if kind == BFLOAT16:
        return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    if kind == FLOAT16:
        rounded = 0x7C00 if size >= 0x477FF000 else _narrowed(size, 10, 15)
        return rounded | ((bits >> 16) & 0x8000)
    if kind == E4M3:
        return _narrowed(min(size, 0x43E00000), 3, 7) | ((bits >> 24) & 0x80)
    return _narrowed(min(size, 0x47600000), 2, 15) | ((bits >> 24) & 0x80)


@inlined
def _nan(kind: Any) -> Any:
    if kind == FLOAT32:
        return 0x7FC00000
    if kind == FLOAT16:
        return 0x7E00
    return 0x7FC0 if kind == BFLOAT16 else 0x7F


@inlined
def _narrowed(size: Any, mantissa: Any, bias: Any) -> Any:
    """Bits of a float32 that is neither negative nor too large, rounded to fewer."""
    cut = 23 - mantissa
    rebias = (127 - bias) << 23
    if size >= rebias + (1 << 23):
        return (size - rebias + ((1 << (cut - 1)) - 1) + ((size >> cut) & 1)) >> cut
    # added to a number whose last bit is worth as much as the last of a subnormal, a value is rounded to that
    unit = (127 + 1 - bias - mantissa + 23) << 23
    return bits_of(float_of(size) + float_of(unit)) - unit


# --- items


@inlined
def _axis(axes: Any, at: Any, count: Any, cut: Any) -> Any:
    """Count and steps of an axis of a row; those of one that goes nowhere, if there is none."""
    if at >= count:
        return 1, 0, 0
    axis = axes + at * _AXIS
    return cut if load(axis + 40) else load(axis), load(axis + 24), load(axis + 32)


@inlined
def _copy_line(src: Any, dst: Any, count: Any, of: Any, to: Any, run: Any) -> None:
    """Runs of so many bytes, each further on by these steps."""
    if run == 16:
        for _ in range(count):
            copy_word(dst, src, 16)
            src, dst = src + of, dst + to
    elif run == 8:
        for _ in range(count):
            copy_word(dst, src, 8)
            src, dst = src + of, dst + to
    elif run == 4:
        for _ in range(count):
            copy_word(dst, src, 4)
            src, dst = src + of, dst + to
    elif run == 2:
        for _ in range(count):
            copy_word(dst, src, 2)
            src, dst = src + of, dst + to
    elif run == 1:
        for _ in range(count):
            copy_word(dst, src, 1)
            src, dst = src + of, dst + to
    else:
        for _ in range(count):
            copy_bytes(dst, src, run)
            src, dst = src + of, dst + to


@inlined
def _convert_line(src: Any, dst: Any, count: Any, of: Any, to: Any, run: Any, kinds: Any, factors: Any) -> None:
    """The same of elements, multiplied by one factor and then divided by the other."""
    multiply, divide = float_of(factors), float_of(factors >> 32)
    for _ in range(count):
        taken, put = src, dst
        for _ in range(run):
            _write(put, _encoded(_decoded(_read(taken, kinds[0]), kinds[0]) * multiply / divide, kinds[1]), kinds[1])
            taken, put = taken + _size(kinds[0]), put + _size(kinds[1])
        src, dst = src + of, dst + to


@inlined
def _copy_item(src: Any, dst: Any, cut: Any, axes: Any, count: Any, width: Any, kinds: Any, factors: Any) -> None:
    """Copy one row in one region: lines, within as many axes as there are."""
    run, line = width, 0
    first, of, to = _axis(axes, 0, count, cut)
    if of == width * _size(kinds[0]) and to == width * _size(kinds[1]):
        run, line = width * first, 1
    n1, of1, to1 = _axis(axes, line, count, cut)
    n2, of2, to2 = _axis(axes, line + 1, count, cut)
    n3, of3, to3 = _axis(axes, line + 2, count, cut)
    further = 1
    for at in range(line + 3, count):
        further *= _axis(axes, at, count, cut)[0]
    for number in range(further):
        rest, src_first, dst_first = number, src, dst
        for at in range(line + 3, count):
            n, of, to = _axis(axes, at, count, cut)
            src_first, dst_first = src_first + rest % n * of, dst_first + rest % n * to
            rest //= n
        for i3 in range(n3):
            for i2 in range(n2):
                src_line = src_first + i3 * of3 + i2 * of2
                dst_line = dst_first + i3 * to3 + i2 * to2
                if kinds[0] == PLAIN:
                    _copy_line(src_line, dst_line, n1, of1, to1, run)
                else:
                    _convert_line(src_line, dst_line, n1, of1, to1, run, kinds, factors)


@inlined
def copy_part(parts: Any, number: Any) -> None:
    """Copy a part of a launch's items, by its number among those of all launches."""
    before = 0
    while number >= load(parts + 40):
        before = load(parts + 40)
        parts += _PART
    header, width, most = load(parts), load(parts + 8), load(parts + 32)
    kinds = load(parts + 16), load(parts + 24)
    items, rows = load(header + 40), load(header + 48)
    regions, table = header + 8 * load(header + 72), header + 8 * load(header + 80)
    axes, count = header + 8 * load(header + 88), load(header + 96)
    region_bytes = 16 if kinds[0] == PLAIN else 24
    first = (number - before) * most
    for item in range(first, min(first + most, items)):
        ahead = min(item + _AHEAD, items - 1)
        _fetch(regions + region_bytes * (ahead // rows), table + 24 * (ahead % rows))
        region, row = regions + region_bytes * (item // rows), table + 24 * (item % rows)
        src, dst = load(region) + load(row), load(region + 8) + load(row + 8)
        _copy_item(src, dst, load(row + 16), axes, count, width, kinds, load(region + 16))


@inlined
def _fetch(region: Any, row: Any) -> None:
    """Have the beginning of an item brought near."""
    src, dst = load(region) + load(row), load(region + 8) + load(row + 8)
    for at in range(0, _NEAR_BYTES, 64):
        prefetch(src + at)
        prefetch(dst + at)


# --- together


@compiled("void(int64)")
def help_out(team: int) -> None:
    """Copy parts of a team (`records.TEAM`) whenever somebody wakes this thread, until there will be no more."""
    while True:
        while call(load(team + 40), load(team + 32)) != 0:  # a signal came in between
            pass
        if add(team + 24, 0):
            return
        left = add(team, 0)
        while left > 0:
            if exchange(team, left, left - 1):  # from here until this part has ended nobody changes the list
                copy_part(load(team + 16), left - 1)
                add(team + 8, 1)
            left = add(team, 0)


# --- sums


@inlined
def _mixed(word: Any) -> Any:
    """As `kvxfer.geometry.plan.mix`, of the bits of a number with a sign."""
    word = (word ^ (word >> 30 & 0x3_FFFF_FFFF)) * -0x40A7_B892_E31B_1A47
    word = (word ^ (word >> 27 & 0x1F_FFFF_FFFF)) * -0x6B2F_B644_ECCE_EE15
    return word ^ (word >> 31 & 0x1_FFFF_FFFF)


@inlined
def _divided(number: Any, by: Any) -> Any:
    """A number of 31 bits by what `divisor` has made of another."""
    return ((number * load(by) >> 32) + number) >> load(by + 8)


@inlined
def _item_sum(region: Any, row: Any, head: Any, width: Any, kinds: Any, keys: Any, room: Any) -> Any:
    """The sum of the words of one row in one region, which are brought together in some room unless they are.

    What no row there has filled is 0.
    """
    axes, count, words = head + 8 * load(head + 64), load(head + 56), load(head + 48)
    first = load(region) + load(row)
    held = load(row + 16) if load(axes + 40) else load(axes)
    if kinds[0] != PLAIN or width != 8 or load(axes + 24) != 8 or held != words:
        for at in range(axes, axes + _AXIS * count, _AXIS):
            if load(at + 40) and load(at) > load(row + 16):
                clear_bytes(room, 8 * words)
        _copy_item(first, room, load(row + 16), axes, count, width, kinds, load(region + 16))
        first = room
    total = 0
    for at in range(0, 8 * words, 8):
        word = load(first + at)
        total += (word ^ (word >> 32 & 0xFFFF_FFFF)) * load(keys + at)
    return total


@compiled("void(int64, int64, int64, int64, int64, int64, int64, int64)")
def add_up(head: int, headers: int, width: int, source: int, target: int, keys: int, room: int, sums: int) -> None:
    """Add up the items of some headers of sums, in the calling thread.

    Args:
        head: Address of the first header.
        headers: How many there are.
        width: Elements of an access.
        source: What elements are, as of `KINDS`.
        target: As what they are summed.
        keys: Address of the keys of words.
        room: Address of room for an item.
        sums: Address of the sums, those of regions first.
    """
    kinds, size = (source, target), 16 if source == PLAIN else 24
    for _ in range(headers):
        region = head + 8 * load(head + 72)
        clear_bytes(room, 8 * load(head + 48))
        for number in range(load(head + 88), load(head + 88) + load(head + 16) // load(head + 24)):
            row = head + 8 * load(head + 80)
            for place in range(load(head + 96), load(head + 96) + load(head + 24)):
                total = _item_sum(region, row, head, width, kinds, keys, room)
                total = _mixed(total ^ _mixed(number << 32 | place))
                add(sums + 8 * _divided(number, head + 104), total)
                add(sums + 8 * (load(head + 136) + _divided(place, head + 120)), total)
                row += 24
            region += size
        head += 8 * SUM_HEADER_WORDS


def total(plan: SumPlan) -> bytes:
    """Read all that a plan names in CPU memory, now, in the calling thread; gives its sums as they travel."""
    tables = pack_sums(plan)
    known = keys(max((part.words for part in plan.parts), default=0))
    at, room = tables.words.ctypes.data, np.empty(len(known), np.int64)
    for launch in tables.launches:
        unit, elements = launch.variant.unit, launch.variant.elements
        shape = 1 if elements.converts else unit, KINDS[elements.src], KINDS[elements.dst]
        where = known.ctypes.data, room.ctypes.data, at + 8 * tables.at
        add_up(at + 8 * launch.first, launch.headers, *shape, *where)
    return tables.words[tables.at :].astype("<i8").tobytes()
