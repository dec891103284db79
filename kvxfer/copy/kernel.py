"""The Triton kernel that makes every copy on a GPU. The one module that imports triton; import it only to use one.

A persistent grid walks tiles of the tables that `kvxfer.copy.tables` describes. Everything that differs between plans
is read from those tables, so there is one compiled variant per access width (and pair of dtypes, where elements are
converted), and a plan is one launch per variant.

Elements are decoded and rounded in integer arithmetic: it gives the same bits as `kvxfer.copy.walk` on a CPU, on
every GPU, including those that know nothing of 8-bit floats.

Triton's language has no types, so this module is checked less strictly than the rest.
"""

# pyright: basic
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: ANN001, ANN201, ANN202, N803
# (parameters of kernels are tensors of Triton's language; its compile-time constants are written in capitals)

import threading
from typing import Any, Final, cast

import torch
import triton
import triton.language as tl

from kvxfer.copy.tables import AXIS_WORDS, HEADER_WORDS, KINDS, SUM_HEADER_WORDS, SumVariant, Variant
from kvxfer.errors import MissingExtraError

__all__ = ["OPTIONS", "Kernel", "check_exact", "constants", "copy_boxes", "sum_items", "touch_gate"]

OPTIONS: Final[dict[str, Any]] = {"num_warps": 32, "num_stages": 1, "enable_fp_fusion": False}
"""How every variant of the copy is compiled. 54 registers a thread leave room for 32 warps."""
SUM_OPTIONS: Final[dict[str, Any]] = {"num_warps": 16, "num_stages": 1, "enable_fp_fusion": False}
"""The same for sums."""

HEADER = tl.constexpr(HEADER_WORDS)
AXIS = tl.constexpr(AXIS_WORDS)
SUM_HEADER = tl.constexpr(SUM_HEADER_WORDS)
PLAIN = tl.constexpr(0)
FLOAT32 = tl.constexpr(1)
FLOAT16 = tl.constexpr(2)
BFLOAT16 = tl.constexpr(3)
E4M3 = tl.constexpr(4)
E5M2 = tl.constexpr(5)


def check_exact(ptx: str) -> None:
    """Refuse a compiled conversion that takes subnormal numbers for zero, as compilers before Triton 3.6 make it.

    Raises:
        MissingExtraError: It would not give the bits that a CPU does.
    """
    if ".ftz" in ptx:
        raise MissingExtraError(
            "this version of Triton takes subnormal numbers for zero, so dtypes cannot be converted on a GPU: "
            "pip install 'torch>=2.10' (with Triton 3.6 or later)"
        )


@triton.jit
def _load(word):
    """A number of at most 31 bits."""
    return tl.load(word).to(tl.uint32)


@triton.jit
def _divide(number, multiplier, shift):
    """`number` // divisor, for the pair that `tables.divisor` made of it."""
    return (tl.umulhi(number, multiplier) + number) >> shift


@triton.jit
def _advance(axis, index, most, src, dst, live):
    """Move both addresses `index` steps along an axis; words beyond what the row holds are not live."""
    live = live & (index < tl.where(_load(axis + 5) > 0, most, _load(axis)))
    steps = index.to(tl.int64)
    return src + steps * tl.load(axis + 3), dst + steps * tl.load(axis + 4), live


@triton.jit
def _copy_words(src, dst, live, WIDTH: tl.constexpr):
    """One access of WIDTH bytes for each address; 16 bytes are two lanes of one vector."""
    if WIDTH == 16:
        lane = tl.arange(0, 2)[None, :]
        source = tl.multiple_of(src.to(tl.pointer_type(tl.int64)), (16, 16)) + lane
        target = tl.multiple_of(dst.to(tl.pointer_type(tl.int64)), (16, 16)) + lane
    elif WIDTH == 8:
        source = src.to(tl.pointer_type(tl.int64))
        target = dst.to(tl.pointer_type(tl.int64))
    elif WIDTH == 4:
        source = src.to(tl.pointer_type(tl.int32))
        target = dst.to(tl.pointer_type(tl.int32))
    elif WIDTH == 2:
        source = src.to(tl.pointer_type(tl.int16))
        target = dst.to(tl.pointer_type(tl.int16))
    else:
        source = src.to(tl.pointer_type(tl.int8))
        target = dst.to(tl.pointer_type(tl.int8))
    tl.store(target, tl.load(source, mask=live), mask=live)


@triton.jit
def _elements(address, WIDTH: tl.constexpr, KIND: tl.constexpr):
    """Pointers to WIDTH elements behind each address, as integers of their size."""
    if KIND == FLOAT32:
        first = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), (4 * WIDTH, 4 * WIDTH))
    elif KIND == FLOAT16 or KIND == BFLOAT16:  # noqa: PLR1714, SIM109 - Triton compiles no `in`
        first = tl.multiple_of(address.to(tl.pointer_type(tl.int16)), (2 * WIDTH, 2 * WIDTH))
    else:
        first = tl.multiple_of(address.to(tl.pointer_type(tl.int8)), (WIDTH, WIDTH))
    return first + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _decode(bits, KIND: tl.constexpr):
    """The values of elements as float32: exact."""
    if KIND == FLOAT32:
        value = bits.to(tl.float32, bitcast=True)
    elif KIND == FLOAT16:
        value = bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == BFLOAT16:
        value = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == E5M2:  # the upper half of a float16
        value = (bits.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        wide = bits.to(tl.int32)
        size = wide & 0x7F
        small = (size.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)  # in units of 2^-9
        large = (size << 20) + (120 << 23)
        exact = tl.where(size == 0x7F, 0x7FC00000, tl.where(size < 8, small, large))
        value = (exact | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _narrowed(bits, KIND: tl.constexpr):
    """Bits of float32 that are no NaN, rounded to an 8-bit float; what is too large becomes the largest."""
    mantissa = 3 if KIND == E4M3 else 2
    bias = 7 if KIND == E4M3 else 15
    size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000 if KIND == E4M3 else 0x47600000)  # 448, 57344
    cut = 23 - mantissa
    rebias = (127 - bias) << 23
    normal = (size - rebias + ((1 << (cut - 1)) - 1) + ((size >> cut) & 1)) >> cut
    # added to a number whose last bit is worth as much as the last of a subnormal, a value is rounded to that
    unit = (127 + 1 - bias - mantissa + 23) << 23
    magic = tl.full(size.shape, unit, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (size.to(tl.float32, bitcast=True) + magic).to(tl.int32, bitcast=True) - unit
    return tl.where(size < rebias + (1 << 23), subnormal, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _encode(value, KIND: tl.constexpr):
    """The elements that are nearest to float32 values, to even ones between two; every NaN in one form."""
    bits = value.to(tl.int32, bitcast=True)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if KIND == FLOAT32:
        found = tl.where(nan, 0x7FC00000, bits)
    elif KIND == FLOAT16:
        found = tl.where(nan, 0x7E00, value.to(tl.float16).to(tl.int16, bitcast=True)).to(tl.int16)
    elif KIND == BFLOAT16:
        found = tl.where(nan, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    else:
        found = tl.where(nan, 0x7F, _narrowed(bits, KIND)).to(tl.int8)
    return found


@triton.jit
def _factor(bits):
    """The float32 in the lower half of a word."""
    return (bits & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _convert_words(src, dst, live, factors, WIDTH: tl.constexpr, SRC: tl.constexpr, DST: tl.constexpr):
    """Convert WIDTH elements for each address: one access on either side, if their bytes are no more than 16."""
    value = _decode(tl.load(_elements(src, WIDTH, SRC), mask=live), SRC)
    value = tl.div_rn(value * _factor(factors), tl.broadcast_to(_factor(factors >> 32), value.shape))
    tl.store(_elements(dst, WIDTH, DST), _encode(value, DST), mask=live)


@triton.jit
def _copy_tile(header, item, word, WIDTH: tl.constexpr, TILE: tl.constexpr, SRC: tl.constexpr, DST: tl.constexpr):
    """Copy TILE words from word `word` of item `item` on, across items. `header` is as `_copy_headers` makes it."""
    size, size_by, size_shift, items, rows, rows_by, rows_shift, regions, lines, axis, axes = header
    lane = tl.arange(0, TILE)[:, None].to(tl.uint32) + word
    over = _divide(lane, size_by, size_shift)
    rest = lane - over * size
    number = item + over
    live = number < items
    number = tl.minimum(number, items - 1)
    region = _divide(number, rows_by, rows_shift)
    row = lines + (number - region * rows).to(tl.int64) * 3
    pair = regions + region.to(tl.int64) * (2 if SRC == PLAIN else 3)
    src = tl.load(pair) + tl.load(row)
    dst = tl.load(pair + 1) + tl.load(row + 1)
    most = _load(row + 2)
    for _ in range(1, axes):
        outer = _divide(rest, _load(axis + 1), _load(axis + 2))
        src, dst, live = _advance(axis, rest - outer * _load(axis), most, src, dst, live)
        rest = outer
        axis += AXIS
    src, dst, live = _advance(axis, rest, most, src, dst, live)
    if SRC == PLAIN:
        _copy_words(src, dst, live, WIDTH)
    else:
        _convert_words(src, dst, live, tl.load(pair + 2), WIDTH, SRC, DST)


@triton.jit
def _copy_headers(table, first, headers, WIDTH: tl.constexpr, TILE: tl.constexpr, SRC: tl.constexpr, DST: tl.constexpr):
    """This thread block's part of all tiles."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    for number in range(headers):
        head = table + first + number * HEADER
        before = tl.load(head + 1).to(tl.int32)
        size, size_by, size_shift = _load(head + 2), _load(head + 3), _load(head + 4)
        items, rows, rows_by, rows_shift = _load(head + 5), _load(head + 6), _load(head + 7), _load(head + 8)
        regions, lines, axis = head + tl.load(head + 9), head + tl.load(head + 10), head + tl.load(head + 11)
        axes = tl.load(head + 12).to(tl.int32)
        # held for all tiles: where each tile reads them anew, 24 thread blocks are 3 % slower
        header = (size, size_by, size_shift, items, rows, rows_by, rows_shift, regions, lines, axis, axes)
        start = (program + programs - before % programs) % programs  # tiles are dealt to programs across headers
        offset = (start * TILE).to(tl.uint32)
        stride = (programs * TILE).to(tl.uint32)
        item = _divide(offset, size_by, size_shift)
        item_stride = _divide(stride, size_by, size_shift)
        word = offset - item * size
        word_stride = stride - item_stride * size
        for _ in range(start, tl.load(head).to(tl.int32), programs):
            _copy_tile(header, item, word, WIDTH, TILE, SRC, DST)
            word += word_stride
            carry = word >= size
            word = tl.where(carry, word - size, word)
            item = tl.where(carry, item + 1, item) + item_stride


@triton.jit(do_not_specialize=["table", "first", "headers", "gate", "generation", "closed"])
def copy_boxes(
    table,
    first,
    headers,
    gate,
    generation,
    closed,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SRC: tl.constexpr,
    DST: tl.constexpr,
):
    """Copy all tiles of `headers` headers that begin at word `first` of `table`.

    A gate other than 0 is the address of a word as `kvxfer.copy.port.Gate` describes it, in memory of another GPU;
    where it is closed, nothing is copied, and the word at `closed` is set.
    """
    word = gate.to(tl.int64).to(tl.pointer_type(tl.int64))
    seen = generation.to(tl.int64) << 32
    if gate != 0:
        seen = tl.atomic_add(word, 1, sem="acquire", scope="sys")
    if (seen >> 32) == generation:
        _copy_headers(table, first, headers, WIDTH, TILE, SRC, DST)
    else:
        tl.store(closed.to(tl.int64).to(tl.pointer_type(tl.int64)), 1)
    if gate != 0:
        tl.debug_barrier()
        tl.atomic_add(word, -1, sem="release", scope="sys")


@triton.jit(do_not_specialize=["gate", "raised", "found"])
def touch_gate(gate, raised, found):
    """Raise the generation at `gate` by 0 or 1, and store the word before that at `found`: addresses on this GPU."""
    word = gate.to(tl.int64).to(tl.pointer_type(tl.int64))
    seen = tl.atomic_add(word, raised.to(tl.int64) << 32, sem="acq_rel", scope="sys")
    tl.store(found.to(tl.int64).to(tl.pointer_type(tl.int64)), seen)


@triton.jit
def _mix(word):
    """As `kvxfer.geometry.plan.mix`; words are uint64."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _read(address, factors, live, UNIT: tl.constexpr, SRC: tl.constexpr, DST: tl.constexpr):
    """UNIT bytes of each address as they are summed, as a number; 0 where nothing is to be read."""
    if SRC == PLAIN:
        if UNIT == 8:
            found = tl.load(address.to(tl.pointer_type(tl.uint64)), mask=live, other=0)
        elif UNIT == 4:
            found = tl.load(address.to(tl.pointer_type(tl.uint32)), mask=live, other=0)
        elif UNIT == 2:
            found = tl.load(address.to(tl.pointer_type(tl.uint16)), mask=live, other=0)
        else:
            found = tl.load(address.to(tl.pointer_type(tl.uint8)), mask=live, other=0)
    else:
        if SRC == FLOAT32:
            bits = tl.load(address.to(tl.pointer_type(tl.int32)), mask=live, other=0)
        elif SRC == FLOAT16 or SRC == BFLOAT16:  # noqa: PLR1714, SIM109 - Triton compiles no `in`
            bits = tl.load(address.to(tl.pointer_type(tl.int16)), mask=live, other=0)
        else:
            bits = tl.load(address.to(tl.pointer_type(tl.int8)), mask=live, other=0)
        value = _decode(bits, SRC)
        value = tl.div_rn(value * _factor(factors), tl.broadcast_to(_factor(factors >> 32), value.shape))
        bits = _encode(value, DST)
        if UNIT == 4:
            found = bits.to(tl.uint32, bitcast=True)
        elif UNIT == 2:
            found = bits.to(tl.uint16, bitcast=True)
        else:
            found = bits.to(tl.uint8, bitcast=True)
        found = tl.where(live, found, 0)
    return found.to(tl.uint64)


@triton.jit
def _item_words(head, base, factors, most, live, word, UNIT: tl.constexpr, SRC: tl.constexpr, DST: tl.constexpr):
    """Words of items in the order in which they are summed, made of what accesses of UNIT bytes find."""
    found = tl.zeros(live.shape, tl.uint64)
    for part in tl.static_range(8 // UNIT):  # pyright: ignore[reportGeneralTypeIssues] - a class of Triton's language
        rest = word * (8 // UNIT) + part
        address, here = base, live
        axis = head + tl.load(head + 8)
        for _ in range(1, tl.load(head + 7).to(tl.int32)):
            outer = _divide(rest, _load(axis + 1), _load(axis + 2))
            address, _, here = _advance(axis, rest - outer * _load(axis), most, address, address, here)
            rest = outer
            axis += AXIS
        address, _, here = _advance(axis, rest, most, address, address, here)
        found |= _read(address, factors, here, UNIT, SRC, DST) << (8 * UNIT * part)
    return found


@triton.jit
def _sum_block(
    head,
    block,
    sums,
    UNIT: tl.constexpr,
    ITEMS: tl.constexpr,
    WORDS: tl.constexpr,
    SRC: tl.constexpr,
    DST: tl.constexpr,
):
    """Add up the items of a block."""
    rows = _load(head + 3)
    number = (tl.arange(0, ITEMS) + block * ITEMS).to(tl.uint32)
    live = number < _load(head + 2)
    number = tl.minimum(number, _load(head + 2) - 1)
    region = _divide(number, _load(head + 4), _load(head + 5))
    row = number - region * rows
    pair = head + tl.load(head + 9) + region.to(tl.int64) * (2 if SRC == PLAIN else 3)
    line = head + tl.load(head + 10) + row.to(tl.int64) * 3
    base = (tl.load(pair) + tl.load(line))[:, None] + tl.zeros((ITEMS, WORDS), tl.int64)
    most = _load(line + 2)[:, None]
    factors = (tl.load(pair) if SRC == PLAIN else tl.load(pair + 2))[:, None]
    total = tl.zeros((ITEMS,), tl.uint64)
    for start in range(0, tl.load(head + 6).to(tl.int32), WORDS):
        word = (tl.arange(0, WORDS) + start).to(tl.uint32)[None, :]
        found = _item_words(head, base, factors, most, live[:, None] & (word >= 0), word, UNIT, SRC, DST)
        key = _mix((word.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15) | 1
        total += tl.sum((found ^ (found >> 32)) * key, axis=1)
    region += _load(head + 11)
    row += _load(head + 12)
    item = _mix(total ^ _mix((region.to(tl.uint64) << 32) | row.to(tl.uint64))).to(tl.int64, bitcast=True)
    tl.atomic_add(sums + _divide(region, _load(head + 13), _load(head + 14)), item, mask=live, sem="relaxed")
    after = sums + tl.load(head + 17)
    tl.atomic_add(after + _divide(row, _load(head + 15), _load(head + 16)), item, mask=live, sem="relaxed")


@triton.jit(do_not_specialize=["table", "first", "headers", "at"])
def sum_items(
    table,
    first,
    headers,
    at,
    UNIT: tl.constexpr,
    ITEMS: tl.constexpr,
    WORDS: tl.constexpr,
    SRC: tl.constexpr,
    DST: tl.constexpr,
):
    """Add up all items of `headers` headers that begin at word `first` of `table`, into the sums from word `at` on."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    for number in range(headers):
        head = table + first + number * SUM_HEADER
        before = tl.load(head + 1).to(tl.int32)
        start = (program + programs - before % programs) % programs  # blocks are dealt to programs across headers
        for block in range(start, tl.load(head).to(tl.int32), programs):
            _sum_block(head, block, table + at, UNIT, ITEMS, WORDS, SRC, DST)


class Kernel:
    """The compiled variants on one device.

    `compile` may be called from any thread. It is the mover that launches (`machine.py`).

    Args:
        table: Any int64 tensor on the device; it only shows the compiler the type of a table.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self._table: Final = table
        self._lock: Final = threading.Lock()
        self._variants: Final[dict[Variant | SumVariant, Any]] = {}
        self.compiles = 0  # variants compiled or loaded so far

    def compile(self, variant: Variant | SumVariant) -> Any:
        """Compile a variant and load it into the device, unless that has been done."""
        with self._lock:
            compiled = self._variants.get(variant)
            if compiled is None:
                word = 1 << 40  # shows the compiler that it has 64 bits
                sums = isinstance(variant, SumVariant)
                shown, fixed = [0, 0, 0] if sums else [0, 0, word, word, word], constants(variant)
                kernel, options = (sum_items, SUM_OPTIONS) if sums else (copy_boxes, OPTIONS)
                with torch.cuda.device(self._table.device):
                    compiled = kernel.warmup(self._table, *shown, **fixed, **options, grid=(1,))
                    if variant.elements.converts:
                        check_exact(compiled.asm["ptx"])
                    stream = torch.cuda.current_stream().cuda_stream
                    compiled[1, 1, 1](self._table.data_ptr(), *[0] * len(shown), *fixed.values(), stream=stream)
                self._variants[variant] = compiled
                self.compiles += 1
        return compiled

    def touch_gate(self, address: int, *, raised: bool) -> int:
        """How many thread blocks are inside of a gate in memory of this GPU; if `raised`, nobody else gets in.

        Waits for the device: call it from a worker thread.
        """
        with torch.cuda.device(self._table.device), torch.cuda.stream(cast("Any", torch.cuda).Stream()):
            found = torch.zeros(1, dtype=torch.int64, device=self._table.device)
            touch_gate[1,](address, int(raised), found.data_ptr())
            return int(found.item()) & 0xFFFF_FFFF

    def launchable(self, variant: Variant | SumVariant) -> tuple[int, int, int]:
        """What a launch of a variant names: function, threads and bytes of shared memory; 0 if it is not compiled."""
        compiled = self._variants.get(variant)
        if compiled is None:
            return 0, 0, 0
        return int(compiled.function), 32 * int(compiled.metadata.num_warps), int(compiled.metadata.shared)


def constants(variant: Variant | SumVariant) -> dict[str, int]:
    """The compile-time constants of a variant, in the order of the kernel's parameters."""
    if isinstance(variant, SumVariant):
        shape = {"UNIT": variant.unit, "ITEMS": variant.items, "WORDS": variant.words}
    else:
        shape = {"WIDTH": variant.width, "TILE": variant.tile}
    return {**shape, "SRC": KINDS[variant.elements.src], "DST": KINDS[variant.elements.dst]}
