"""Pairs of cache layouts by the size of the pieces that a copy between them falls into.

A layout is a prefill and a decode cache of bfloat16 with `DIM` elements a head and one tensor a layer. Blocks of both
are drawn at random for every request, so a contiguous piece never goes beyond a block:

- A plain size p: both sides NHD, so K of one block and layer is one piece of block tokens x heads x DIM x 2 bytes. From
  2 KiB on there are 8 heads and p / 2 KiB tokens a block; below, blocks of one token with p / 256 heads.
- `head-split`: NHD on both sides in blocks of 16 tokens; the decode side holds the first half of the heads, as the
  first of two tensor-parallel ranks does. A piece is one token: 1 KiB.
- `nhd-hnd`: NHD to HND, blocks of 16 tokens; a piece is one head of one token: 256 bytes.

There are as many layers, 32 at most, as let a block of every layer fit into the smallest request. Where not even one
layer's K and V would, there is one layer whose K and V are not told apart, as with MLA (`block token head dim`).
"""

from dataclasses import dataclass
from typing import Final

from kvxfer.config import parse_size
from kvxfer.errors import UsageError
from kvxfer.tools.shown import size

__all__ = ["DIM", "ITEM_BYTES", "KIB", "MIB", "NAMED", "PIECES", "SMALLEST_REQUEST", "Layout", "parse_layout", "plain"]

KIB: Final = 1024
MIB: Final = 1024 * KIB
DIM: Final = 128
ITEM_BYTES: Final = 2
SMALLEST_REQUEST: Final = 2 * MIB
PIECES: Final = (512, 2 * KIB, 8 * KIB, 32 * KIB, 256 * KIB, 2 * MIB)
_ROW: Final = DIM * ITEM_BYTES
_HEADS: Final = 8
_LAYERS: Final = 32
_NHD: Final = "kv block token head dim"
_HND: Final = "kv block head token dim"
_LATENT: Final = "block token head dim"


@dataclass(frozen=True, slots=True)
class Layout:
    """A prefill and a decode cache."""

    name: str
    piece_bytes: int  # contiguous, of a copy between them
    layers: int
    heads: int  # at the prefill side
    block_tokens: int
    source_axes: str = _NHD
    target_axes: str = _NHD
    target_heads: range = range(0)

    def __post_init__(self) -> None:
        """All heads at the decode side, unless told otherwise."""
        if not self.target_heads:
            object.__setattr__(self, "target_heads", range(self.heads))

    def __str__(self) -> str:
        return self.name

    @property
    def regions(self) -> int:
        """K and V of every layer, or what stands for both."""
        return self.layers * (2 if "kv" in self.source_axes.split() else 1)

    @property
    def block_bytes(self) -> int:
        """Bytes that a block of tokens is at the decode side, all layers together; what a request counts in."""
        return self.regions * self.block_tokens * len(self.target_heads) * _ROW

    @property
    def source_block_bytes(self) -> int:
        """The same at the prefill side."""
        return self.regions * self.block_tokens * self.heads * _ROW

    def blocks(self, request_bytes: int) -> int:
        """Whole blocks in a request of so many bytes; 0 if it is smaller than one."""
        return request_bytes // self.block_bytes

    def pool(self, request_bytes: int) -> int:
        """Blocks of a cache for such requests: half as many again, which a transfer must not touch."""
        blocks = self.blocks(request_bytes)
        return blocks + max(1, blocks // 2)


def plain(piece_bytes: int) -> Layout:
    """The layout whose pieces have this size.

    Raises:
        UsageError: If no layout of this kind has such pieces.
    """
    whole_heads = piece_bytes % _ROW == 0 and 1 <= piece_bytes // _ROW <= _HEADS
    heads = piece_bytes // _ROW if whole_heads else _HEADS
    row = heads * _ROW
    if piece_bytes < _ROW or piece_bytes % row or piece_bytes > SMALLEST_REQUEST:
        raise UsageError(
            f"no layout has pieces of {piece_bytes} bytes: up to {_HEADS * _ROW} they are multiples of {_ROW}, above "
            f"it of {_HEADS * _ROW}, and {SMALLEST_REQUEST} is the largest"
        )
    layers = min(_LAYERS, SMALLEST_REQUEST // (2 * piece_bytes))
    tokens = piece_bytes // row
    name = size(piece_bytes).replace(" ", "")
    if not layers:
        return Layout(name, piece_bytes, 1, heads, tokens, _LATENT, _LATENT)
    return Layout(name, piece_bytes, layers, heads, tokens)


NAMED: Final = {
    layout.name: layout
    for layout in (
        Layout("head-split", _HEADS // 2 * _ROW, _LAYERS, _HEADS, 16, target_heads=range(_HEADS // 2)),
        Layout("nhd-hnd", _ROW, _LAYERS, _HEADS, 16, target_axes=_HND),
    )
}
"""Layouts that differ between the two sides."""


def parse_layout(text: str) -> Layout:
    """A named layout, or the one with pieces of this size, as in `8KiB`.

    Raises:
        UsageError: If there is none.
    """
    if text in NAMED:
        return NAMED[text]
    try:
        nbytes = parse_size(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is neither a size of pieces ({error}) nor one of {', '.join(NAMED)}") from error
    return plain(nbytes)
