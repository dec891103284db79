"""The Triton kernel that makes every copy on a GPU. The one module that imports triton; import it only to use one.

A persistent grid walks tiles of the tables that `kvxfer.copy.tables` describes. Everything that differs between plans
is read from those tables, so there is one compiled variant per access width, and a plan is one launch per width.

Triton's language has no types, so this module is checked less strictly than the rest.
"""

# pyright: basic
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: ANN001, ANN201, ANN202, N803
# (parameters of kernels are tensors of Triton's language; its compile-time constants are written in capitals)

import threading
from typing import Any, Final

import torch
import triton
import triton.language as tl

from kvxfer.copy.tables import AXIS_WORDS, HEADER_WORDS, TILE_WORDS, Launch

__all__ = ["OPTIONS", "Kernel", "constants", "copy_boxes"]

OPTIONS: Final[dict[str, Any]] = {"num_warps": 32, "num_stages": 1, "enable_fp_fusion": False}
"""How every variant is compiled. Three dozen registers a thread leave room for 32 warps."""


HEADER = tl.constexpr(HEADER_WORDS)
AXIS = tl.constexpr(AXIS_WORDS)


@triton.jit
def _load(word):
    """A number of at most 31 bits."""
    return tl.load(word).to(tl.uint32)


@triton.jit
def _divide(number, multiplier, shift):
    """`number` // divisor, for the pair that `tables._divisor` made of it."""
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
def _copy_tile(head, item, word, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Copy TILE words from word `word` of item `item` on, across items."""
    size = _load(head + 2)
    items = _load(head + 5)
    rows = _load(head + 6)
    lane = tl.arange(0, TILE)[:, None].to(tl.uint32) + word
    over = _divide(lane, _load(head + 3), _load(head + 4))
    rest = lane - over * size
    number = item + over
    live = number < items
    number = tl.minimum(number, items - 1)
    region = _divide(number, _load(head + 7), _load(head + 8))
    row = head + tl.load(head + 10) + (number - region * rows).to(tl.int64) * 3
    pair = head + tl.load(head + 9) + region.to(tl.int64) * 2
    src = tl.load(pair) + tl.load(row)
    dst = tl.load(pair + 1) + tl.load(row + 1)
    most = _load(row + 2)
    axis = head + tl.load(head + 11)
    for _ in range(1, tl.load(head + 12).to(tl.int32)):
        outer = _divide(rest, _load(axis + 1), _load(axis + 2))
        src, dst, live = _advance(axis, rest - outer * _load(axis), most, src, dst, live)
        rest = outer
        axis += AXIS
    src, dst, live = _advance(axis, rest, most, src, dst, live)
    _copy_words(src, dst, live, WIDTH)


@triton.jit(do_not_specialize=["table", "first", "headers"])
def copy_boxes(table, first, headers, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Copy all tiles of `headers` headers that begin at word `first` of `table`."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    for number in range(headers):
        head = table + first + number * HEADER
        size = _load(head + 2)
        before = tl.load(head + 1).to(tl.int32)
        start = (program + programs - before % programs) % programs  # tiles are dealt to programs across headers
        offset = (start * TILE).to(tl.uint32)
        stride = (programs * TILE).to(tl.uint32)
        item = _divide(offset, _load(head + 3), _load(head + 4))
        item_stride = _divide(stride, _load(head + 3), _load(head + 4))
        word = offset - item * size
        word_stride = stride - item_stride * size
        for _ in range(start, tl.load(head).to(tl.int32), programs):
            _copy_tile(head, item, word, WIDTH, TILE)
            word += word_stride
            carry = word >= size
            word = tl.where(carry, word - size, word)
            item = tl.where(carry, item + 1, item) + item_stride


class Kernel:
    """The compiled variants on one device.

    `compile` may be called from any thread while another launches.

    Args:
        table: Any int64 tensor on the device; it only shows the compiler the type of a table.

    Attributes:
        compiles: Variants compiled or loaded so far; at most one for each width.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self._table: Final = table
        self._lock: Final = threading.Lock()
        self._variants: Final[dict[int, Any]] = {}
        self.compiles = 0

    def compile(self, width: int) -> Any:
        """Compile the variant of one access width and load it into the device, unless that has been done."""
        with self._lock:
            variant = self._variants.get(width)
            if variant is None:
                with torch.cuda.device(self._table.device):
                    variant = copy_boxes.warmup(self._table, 0, 0, **constants(width), **OPTIONS, grid=(1,))
                    stream = torch.cuda.current_stream().cuda_stream
                    variant[1, 1, 1](self._table.data_ptr(), 0, 0, *constants(width).values(), stream=stream)
                self._variants[width] = variant
                self.compiles += 1
        return variant

    def launch(self, launch: Launch, table: int, first: int, ctas: int, stream: int) -> None:
        """Launch a copy. The kernel's device must be the current one.

        Args:
            launch: What to launch.
            table: Address of memory that holds tables.
            first: Word at which the plan's tables begin in it; they must stay there until the copy has run.
            ctas: At most so many thread blocks.
            stream: Handle of the stream.
        """
        variant = self._variants.get(launch.width) or self.compile(launch.width)
        # a variant is launched by hand: the way through `copy_boxes[grid]` specialises and looks up on every call
        grid = (min(ctas, launch.tiles), 1, 1)
        arguments = (table, first + launch.first, launch.headers, *constants(launch.width).values())
        variant[grid](*arguments, stream=stream)


def constants(width: int) -> dict[str, int]:
    """The compile-time constants of the variant for one access width, in the order of the kernel's parameters."""
    return {"WIDTH": width, "TILE": TILE_WORDS}
