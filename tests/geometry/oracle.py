"""Brute force: which byte goes where, from the definition of the global coordinates alone.

Shares nothing with the planner, not even a formula. A tensor is a plain dict:

    group, part       str
    kv                tuple of halves, in the order of the kv axis: ("k", "v"), ("k",), ("v",) or ("",)
    layers            tuple of global layer numbers, in the order of the layer axis
    heads             (first, one past the last), global
    axes              "block token head dim/8 dim%8", in the order of shape and strides
    shape, strides    elements and bytes per axis
    base              byte offset of the first element in the rank's memory
    item              bytes of one element
    interleave        (rank, of, chunk): token t is held if (t // chunk) % of == rank
    ratio             kernel blocks per block id
    unit              tokens per index of the token axis
    null              an id that is no block, or None

    dtype             torch's name, where it matters
    scale             value = stored * scale: (), (one,), or one a head

A block list is (ids, first_token): ids from that of the block on in which first_token lies, and of that block only what
begins there. A selection is (group, part, kv, layers, first head, one past the last head).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

I64: TypeAlias = NDArray[np.int64]
Tensor: TypeAlias = Mapping[str, Any]
BlockList: TypeAlias = tuple[Sequence[int], int]
Selection: TypeAlias = tuple[str, str, str, Sequence[int], int, int]


def is_state(tensor: Tensor) -> bool:
    return "token" not in tensor["axes"].split()


def axis_length(tensor: Tensor, name: str) -> int:
    """Coordinates on an axis, a split one counted once; 1 where there is none."""
    terms = zip(tensor["axes"].split(), tensor["shape"], strict=True)
    return prod(count for term, count in terms if term.replace("%", "/").split("/")[0] == name)


def address(tensor: Tensor, **index: Any) -> Any:
    """Byte offset of an element, from its local index on each axis (numbers, or arrays that broadcast)."""
    at = tensor["base"]
    for term, stride in zip(tensor["axes"].split(), tensor["strides"], strict=True):
        if "/" in term:
            name, inner = term.split("/")
            position = index[name] // int(inner)
        elif "%" in term:
            name, inner = term.split("%")
            position = index[name] % int(inner)
        else:
            position = index[term]
        at = at + position * stride
    return at


def held_rows(tensor: Tensor, blocks: BlockList) -> list[tuple[int, int, int]]:
    """(global row, kernel block, row in that block) for every row that a block list addresses.

    A global row is a token, `unit` tokens of a compressed cache, or the position in the list for state.
    """
    ids, first_token = blocks
    residue, of, chunk = tensor["interleave"]
    per_block = 1 if is_state(tensor) else axis_length(tensor, "token")
    first_row = 0 if is_state(tensor) else first_token // tensor["unit"]
    before = sum(1 for row in range(first_row) if (row // chunk) % of == residue)
    before -= before % (per_block * tensor["ratio"])
    rows: list[tuple[int, int, int]] = []
    for position, block_id in enumerate(ids):
        if block_id == tensor["null"]:
            continue
        for sub in range(tensor["ratio"]):
            for inside in range(per_block):
                local = before + (position * tensor["ratio"] + sub) * per_block + inside
                turn, rest = divmod(local, chunk)
                row = (turn * of + residue) * chunk + rest
                if row >= first_row:
                    rows.append((row, block_id * tensor["ratio"] + sub, inside))
    return rows


def wanted_rows(tensor: Tensor, blocks: BlockList, tokens: tuple[int, int]) -> list[tuple[int, int, int]]:
    """Those of `held_rows` that lie in `tokens`: a row belongs to its last token, and state to the last of all."""
    if is_state(tensor):
        return held_rows(tensor, blocks)
    unit = tensor["unit"]
    return [row for row in held_rows(tensor, blocks) if tokens[0] <= (row[0] + 1) * unit - 1 < tokens[1]]


def byte_pairs(
    src: Iterable[Tensor],
    dst: Iterable[Tensor],
    selections: Iterable[Selection],
    src_blocks: Mapping[str, BlockList],
    dst_blocks: Mapping[str, BlockList],
    tokens: tuple[int, int],
) -> I64:
    """int64 (n, 2): every byte to copy, as (offset at the source, offset at the destination), sorted by destination.

    Args:
        src: Tensors of the prefill rank.
        dst: Tensors of the decode rank.
        selections: What goes from one to the other.
        src_blocks: Block list by group.
        dst_blocks: Block list by group.
        tokens: First token and one past the last.
    """
    src, dst = list(src), list(dst)
    found: list[I64] = []
    for group, part, kv, layers, head_start, head_stop in selections:
        for layer in layers:
            mine: dict[tuple[int, int], I64] = {}
            for tensor in src:
                mine |= _cells(tensor, (group, part, kv, layer), src_blocks, tokens)
            for tensor in dst:
                for cell, to in _cells(tensor, (group, part, kv, layer), dst_blocks, tokens).items():
                    if head_start <= cell[0] < head_stop and cell in mine:
                        pairs = np.stack([mine[cell], to], axis=1)  # element by element along dim
                        found.append((pairs[:, None] + np.arange(tensor["item"])[None, :, None]).reshape(-1, 2))
    if not found:
        return np.zeros((0, 2), np.int64)
    pairs = np.concatenate(found)
    return pairs[np.argsort(pairs[:, 1], kind="stable")]


def element_moves(
    src: Iterable[Tensor],
    dst: Iterable[Tensor],
    selections: Iterable[Selection],
    src_blocks: Mapping[str, BlockList],
    dst_blocks: Mapping[str, BlockList],
    tokens: tuple[int, int],
) -> Iterator[tuple[Tensor, Tensor, int, I64, I64]]:
    """Every element to convert, head by head: both tensors, the head, and the byte offsets of its elements there."""
    src, dst = list(src), list(dst)
    for group, part, kv, layers, head_start, head_stop in selections:
        for layer in layers:
            place = (group, part, kv, layer)
            for tensor, other in product(src, dst):
                mine = _cells(tensor, place, src_blocks, tokens)
                theirs = _cells(other, place, dst_blocks, tokens)
                for cell in mine.keys() & theirs.keys():
                    if head_start <= cell[0] < head_stop:
                        yield tensor, other, cell[0], mine[cell], theirs[cell]


def scale_of(tensor: Tensor, head: int) -> float:
    """The scale of one head (global number)."""
    scale = tensor.get("scale", ())
    if not scale:
        return 1.0
    return scale[0] if len(scale) == 1 else scale[head - tensor["heads"][0]]


def _cells(
    tensor: Tensor,
    wanted: tuple[str, str, str, int],
    blocks: Mapping[str, BlockList],
    tokens: tuple[int, int],
) -> dict[tuple[int, int], I64]:
    """Byte offsets of the elements along dim, by (head, row), of what a tensor holds of one layer and half."""
    group, part, kv, layer = wanted
    if (tensor["group"], tensor["part"]) != (group, part) or kv not in tensor["kv"] or layer not in tensor["layers"]:
        return {}
    rows = wanted_rows(tensor, blocks[group], tokens)
    heads = range(*tensor["heads"])
    if not rows:
        return {}
    numbers, block, inside = np.asarray(rows, np.int64).T
    offsets = np.zeros((len(rows), len(heads), axis_length(tensor, "dim")), np.int64) + address(
        tensor,
        block=block[:, None, None],
        layer=tensor["layers"].index(layer),
        kv=tensor["kv"].index(kv),
        head=np.arange(len(heads))[None, :, None],
        token=inside[:, None, None],
        dim=np.arange(axis_length(tensor, "dim"))[None, None, :],
    )
    return {(head, int(row)): offsets[r, h] for r, row in enumerate(numbers) for h, head in enumerate(heads)}


def holders(
    rank: Iterable[Tensor], selections: Iterable[Selection], tokens: int
) -> dict[tuple[str, str, str, int, int, int], int]:
    """How often selections name what a rank holds: a count by (group, part, kv, layer, head, token)."""
    rank = list(rank)
    counts: dict[tuple[str, str, str, int, int, int], int] = {}
    for group, part, kv, layers, head_start, head_stop in selections:
        for tensor in rank:
            if (tensor["group"], tensor["part"]) != (group, part) or kv not in tensor["kv"]:
                continue
            residue, of, chunk = tensor["interleave"]
            for layer in set(layers) & set(tensor["layers"]):
                for head in range(max(head_start, tensor["heads"][0]), min(head_stop, tensor["heads"][1])):
                    for token in range(tokens):
                        if (token // chunk) % of == residue:
                            key = (group, part, kv, layer, head, token)
                            counts[key] = counts.get(key, 0) + 1
    return counts
