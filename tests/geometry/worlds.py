"""Random pairs of engines: a model, the ranks on both sides with their memory, block lists and a token range.

Everything is drawn from a `random.Random`, so a world is named by its seed. A rank is described twice: as the plain
dicts of `oracle`, and as `CacheTensor`s over real torch memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from oracle import BlockList

from kvxfer.geometry import CacheGeometry, CacheTensor, Group, Interleave, Span

DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.int64}
FLOATS = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
BLOCK_TOKENS = [(4, 4), (4, 16), (16, 4), (4, 12), (8, 12), (12, 8), (16, 16)]
WIDE_BLOCK_TOKENS = [(16, 64), (64, 16), (16, 48), (32, 48)]
USUAL_ORDERS = [
    "kv block layer head token dim",
    "layer kv block token head dim",
    "block kv token layer head dim",
    "block layer kv head token dim",
    "block kv layer token head dim",
    "block token layer head kv dim",
    "block head dim layer kv token",
]


@dataclass(frozen=True)
class Part:
    """A tensor class of the model, whole: `heads` is 0 where there is no head axis."""

    group: str
    name: str
    dims: dict[str, int]  # by half: k and v, or the one half ""
    heads: int
    item: int
    layers: tuple[int, ...]
    unit: int = 1
    state: bool = False
    state_ratio: int = 1
    dtype: str = ""  # of worlds in which the two sides differ


@dataclass
class Rank:
    """One rank: plain description, real memory, and what the planner is given."""

    tensors: list[dict[str, Any]]
    blocks: dict[str, BlockList]
    nulls: dict[str, int]
    tokens: tuple[int, int, int]
    memory: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))

    def __post_init__(self) -> None:
        self.memory = np.zeros(max(t["base"] + t["extent"] for t in self.tensors) + 64, np.uint8)
        self.geometry = CacheGeometry.of(
            [cache_tensor(self.memory, t) for t in self.tensors],
            [Group(name, null) for name, null in self.nulls.items()],
        )
        self.spans = {group: Span(np.asarray(ids, np.int64), first) for group, (ids, first) in self.blocks.items()}

    @property
    def base(self) -> int:
        """Address of the first byte of its memory."""
        return int(self.memory.ctypes.data)


@dataclass
class World:
    """Two engines and one request."""

    prefill: list[Rank]
    decode: list[Rank]
    tokens: tuple[int, int]


def cache_tensor(memory: NDArray[np.uint8], tensor: dict[str, Any]) -> CacheTensor:
    """The plain description as a torch view of real memory."""
    item = tensor["item"]
    dtype = getattr(torch, tensor["dtype"]) if tensor.get("dtype") else DTYPES[item]
    flat = torch.from_numpy(memory[: len(memory) // 8 * 8]).view(dtype)
    view = torch.as_strided(flat, tensor["shape"], [s // item for s in tensor["strides"]], tensor["base"] // item)
    residue, of, chunk = tensor["interleave"]
    halves = "".join(tensor["kv"])
    return CacheTensor(
        view,
        tensor["axes"],
        layers=tensor["layers"],
        heads=range(*tensor["heads"]) if tensor["heads"] != (0, 1) or "head" in tensor["axes"] else None,
        kv=None if halves in ("", "kv") else halves,
        group=tensor["group"],
        part=tensor["part"],
        tokens=Interleave(residue, of, chunk),
        kernel_blocks_per_id=tensor["ratio"],
        tokens_per_row=tensor["unit"],
        scale=_scale_tensor(tensor.get("scale", ())),
    )


def _scale_tensor(scale: tuple[float, ...]) -> torch.Tensor | None:
    if not scale:
        return None
    return torch.tensor(scale[0] if len(scale) == 1 else scale, dtype=torch.float32)


def contiguous(
    axes: str,
    sizes: dict[str, int],
    *,
    layers: Sequence[int] = (0,),
    heads: tuple[int, int] | None = None,
    kv: tuple[str, ...] = ("",),
    base: int = 0,
    **rest: Any,
) -> dict[str, Any]:
    """A plain tensor without gaps; a split axis takes its inner length from its name."""
    shape = [_term_length(term, sizes) for term in axes.split()]
    item = rest.get("item", 2)
    strides = [item * prod(shape[i + 1 :]) for i in range(len(shape))]
    tensor: dict[str, Any] = {
        "group": "default",
        "part": "",
        "kv": kv,
        "layers": tuple(layers),
        "heads": heads or (0, sizes.get("head", 1)),
        "axes": axes,
        "shape": tuple(shape),
        "strides": tuple(strides),
        "base": base,
        "item": item,
        "interleave": (0, 1, 1),
        "ratio": 1,
        "unit": 1,
        "null": None,
        "extent": item * prod(shape),
    }
    return tensor | rest


def _term_length(term: str, sizes: dict[str, int]) -> int:
    if "%" in term:
        return int(term.split("%")[1])
    name, _, inner = term.partition("/")
    return sizes[name] // int(inner or 1)


def make_world(rng: Random, *, mixed: bool = False) -> World:
    """Draw a world; in a mixed one the two sides store other dtypes, with scales."""
    wide = rng.random() < 0.1
    parts = _model(rng, small=wide)
    theirs, ours = (_mixed(rng, parts), _mixed(rng, parts)) if mixed else (parts, parts)
    block_tokens = {p.group: rng.choice(WIDE_BLOCK_TOKENS if wide else BLOCK_TOKENS) for p in parts}
    start = rng.choice([0, rng.randint(0, 40)])
    stop = start + rng.choice([1, rng.randint(1, 16), rng.randint(1, 48)])
    if wide:
        stop += 48
    decode_ways, prefill_ways = _ways(rng), _ways(rng)
    decode_blocks, prefill_blocks = ({g: sizes[i] for g, sizes in block_tokens.items()} for i in (1, 0))
    slots = {p.group: rng.choice([1, 1, 2]) for p in parts if p.state}
    decode = _side(rng, ours, decode_blocks, decode_ways, slots, (start, stop), None)
    lows = {
        group: max(start, min((rank.blocks[group][1] for rank in decode if group in rank.blocks), default=0))
        for group in block_tokens
    }
    prefill = _side(rng, theirs, prefill_blocks, prefill_ways, slots, (start, stop), lows)
    return World(prefill, decode, (start, stop))


def _mixed(rng: Random, parts: list[Part]) -> list[Part]:
    chosen = [rng.choice(sorted(FLOATS)) for _ in parts]
    return [replace(part, dtype=dtype, item=FLOATS[dtype]) for part, dtype in zip(parts, chosen, strict=True)]


def _scale(rng: Random, heads: tuple[int, int]) -> tuple[float, ...]:
    """None, one, or one a head; often those of the other side."""
    numbers = [float(np.float32(rng.choice([1.0, 0.5, rng.uniform(0.01, 30)]))) for _ in range(*heads)]
    return rng.choice([(), (1.0,), (0.5,), tuple(numbers)])


def _model(rng: Random, *, small: bool) -> list[Part]:
    layers = tuple(range(rng.randint(1, 2 if small else 4)))
    parts: list[Part] = []

    def some_layers() -> tuple[int, ...]:
        return layers if rng.random() < 0.6 else tuple(sorted(rng.sample(layers, rng.randint(1, len(layers)))))

    for kind in rng.sample(["attention", "latent", "state"], 1 if small else rng.choice([1, 1, 2, 3])):
        held = some_layers()
        if kind == "attention":
            heads, dim = rng.choice([1, 2, 3, 4, 8]), rng.choice([1, 3, 4, 8] if small else [1, 2, 3, 8, 16, 32])
            dims = {"k": dim, "v": dim if rng.random() < 0.8 else rng.choice([1, 4, 6])}
            parts.append(Part(kind, "", dims, heads, rng.choice([1, 2, 2, 4]), held))
            if rng.random() < 0.3:
                parts.append(Part(kind, "scale", {"k": 1, "v": 1}, heads, 4, held))
            if rng.random() < 0.2:
                parts.append(Part(kind, "indexer", {"": 132}, 0, 1, some_layers()))
        elif kind == "latent":
            parts.append(Part(kind, "", {"": rng.choice([5, 16, 36])}, 0, 2, held))
            if rng.random() < 0.5:
                parts.append(Part(kind, "indexer", {"": rng.choice([7, 132])}, 0, 1, some_layers()))
            if rng.random() < 0.4:
                parts.append(Part(kind, "pooled", {"": 6}, 0, 4, some_layers(), unit=rng.choice([2, 4])))
        else:
            ratio = rng.choice([1, 1, 2])
            parts.append(Part(kind, "conv.x", {"": 3}, rng.choice([4, 6, 12]), 2, held, state=True, state_ratio=ratio))
            if rng.random() < 0.6:
                ssm = Part(kind, "ssm", {"": 16}, rng.choice([2, 4]), 4, held, state=True, state_ratio=ratio)
                parts.append(ssm)
    return parts


def _ways(rng: Random) -> tuple[int, int, int, int]:
    """Tensor, pipeline and context parallelism, and the chunk of the last."""
    tp, pp, cp = rng.choice([1, 1, 2, 3, 4]), rng.choice([1, 1, 1, 2]), rng.choice([1, 1, 1, 1, 2, 3])
    return (tp, pp, cp, rng.choice([1, 2, 4, 6, 16])) if tp * pp * cp <= 6 else (tp, 1, 1, 1)


def _cuts(rng: Random, count: int, ways: int) -> list[tuple[int, int]]:
    """`count` coordinates for `ways` ranks: equal, unequal, or replicated where there are too few."""
    if count == 0:
        return [(0, 1)] * ways
    if count < ways:
        return [(r * count // ways, r * count // ways + 1) for r in range(ways)]
    edges = [r * count // ways for r in range(ways + 1)]
    if rng.random() < 0.4:
        edges = [0, *sorted(rng.sample(range(1, count), ways - 1)), count]
    return list(pairwise(edges))


def _side(
    rng: Random,
    parts: list[Part],
    block_tokens: dict[str, int],
    ways: tuple[int, int, int, int],
    slots: dict[str, int],
    tokens: tuple[int, int],
    lows: dict[str, int] | None,
) -> list[Rank]:
    tp, pp, cp, chunk = ways
    every_layer = sorted({layer for part in parts for layer in part.layers})
    stages = _cuts(rng, len(every_layer), pp)
    heads = {(p.group, p.name): _cuts(rng, p.heads, tp) for p in parts}
    whole = {p.group for p in parts if p.unit > 1 or p.state}  # compressed rows and state are not interleaved
    ranks: list[Rank] = []
    for stage in stages:
        mine = every_layer[slice(*stage)]
        for t in range(tp):
            for c in range(cp):
                held = [
                    (p, [layer for layer in p.layers if layer in mine], heads[p.group, p.name][t])
                    for p in parts
                    if set(p.layers) & set(mine)
                ]
                if held:
                    interleave = (c, cp, chunk)
                    ranks.append(_rank(rng, held, block_tokens, interleave, whole, slots, tokens, lows))
    return ranks


def _rank(
    rng: Random,
    held: list[tuple[Part, list[int], tuple[int, int]]],
    block_tokens: dict[str, int],
    interleave: tuple[int, int, int],
    whole: set[str],
    slots: dict[str, int],
    tokens: tuple[int, int],
    lows: dict[str, int] | None,
) -> Rank:
    blocks: dict[str, BlockList] = {}
    nulls: dict[str, int] = {}
    pools: dict[str, int] = {}
    for group in dict.fromkeys(part.group for part, _, _ in held):
        ways = (0, 1, 1) if group in whole else interleave
        low = None if lows is None else lows[group]
        count, first = (slots[group], 0) if group in slots else _span(rng, block_tokens[group], ways, tokens, low)
        pools[group] = count + rng.randint(1, 3)
        ids = list(range(pools[group]))
        if rng.random() < 0.3:
            nulls[group] = ids.pop(rng.randrange(len(ids)))
        chosen = rng.sample(ids, count)
        if rng.random() < 0.3:
            chosen.sort()
        if low is not None:  # only a source may have padding, or name a block twice
            if group in nulls and group not in slots:
                chosen = [nulls[group] if rng.random() < 0.3 else block for block in chosen]
            if rng.random() < 0.1:
                chosen[-1] = chosen[0]
        blocks[group] = (chosen, first)
    tensors: list[dict[str, Any]] = []
    cursor, room = rng.randint(0, 3) * 8, 0
    for part, layers, heads in held:
        ways = (0, 1, 1) if part.group in whole else interleave
        for tensor in _lay_out(rng, part, layers, heads, block_tokens[part.group], pools[part.group]):
            tensor |= {"interleave": ways, "null": nulls.get(part.group)}
            if part.dtype:
                tensor |= {"dtype": part.dtype, "scale": _scale(rng, tensor["heads"])}
            if tensor.pop("fresh"):
                room = cursor
                room += -room % 8 + rng.randint(0, 3) * part.item
                cursor = room + tensor["allocation"] + 8
            tensor["base"] += room
            tensors.append(tensor)
    rng.shuffle(tensors)
    return Rank(tensors, blocks, nulls, interleave)


def _held_below(token: int, ways: tuple[int, int, int]) -> int:
    residue, of, chunk = ways
    return sum(1 for t in range(token) if (t // chunk) % of == residue)


def _span(
    rng: Random, block: int, ways: tuple[int, int, int], tokens: tuple[int, int], low: int | None
) -> tuple[int, int]:
    """Number of blocks and first token of a list that covers the range (from `low` on, if given)."""
    reach = tokens[1] if low is None else low
    skipped = _held_below(reach, ways) // block
    skipped = rng.choice([0, skipped, rng.randint(0, skipped)])
    need = max(1, -(-(_held_below(tokens[1], ways) - skipped * block) // block))
    first, later = (_nth_held(count * block, ways) for count in (skipped, skipped + 1))
    if rng.random() < 0.3:  # anywhere in the first block
        first = rng.randint(first, max(first, min(later, reach if low is not None else reach - 1) - 1))
    return need + rng.choice([0, 0, 1]), first if skipped or rng.random() < 0.5 else 0


def _nth_held(position: int, ways: tuple[int, int, int]) -> int:
    """Token at a position among those that a rank holds."""
    residue, of, chunk = ways
    turn, rest = divmod(position, chunk)
    return (turn * of + residue) * chunk + rest


def _lay_out(
    rng: Random, part: Part, layers: list[int], heads: tuple[int, int], block_tokens: int, ids: int
) -> list[dict[str, Any]]:
    """Tensors that hold some layers and heads of a part, in a layout of their own."""
    head_ranges = [heads]
    if part.heads and heads[1] - heads[0] > 1 and rng.random() < 0.15:
        middle = rng.randint(heads[0] + 1, heads[1] - 1)
        head_ranges = [(heads[0], middle), (middle, heads[1])]
    order = list(layers)
    layer_runs = [[layer] for layer in order]
    if rng.random() < 0.5:
        rng.shuffle(order)
        cut = rng.randint(1, len(order))
        layer_runs = [run for run in (order[:cut], order[cut:]) if run]
    rows = block_tokens // part.unit
    ratio = part.state_ratio if part.state else rng.choice([r for r in (1, 1, 1, 2, 4, rows) if rows % r == 0])
    same = len(set(part.dims.values())) == 1
    halves = tuple(part.dims)
    style = rng.choice(["axis", "apart", "packed"]) if same and len(halves) == 2 else rng.choice(["apart", "packed"])
    found: list[dict[str, Any]] = []
    for run in layer_runs:
        for head_range in head_ranges:
            groups = [halves] if style != "apart" else [(half,) for half in halves]
            for group in groups:
                found += _allocate(rng, part, run, head_range, rows // ratio, ids * ratio, ratio, group, style)
    return found


def _allocate(
    rng: Random,
    part: Part,
    layers: list[int],
    heads: tuple[int, int],
    rows: int,
    blocks: int,
    ratio: int,
    halves: tuple[str, ...],
    style: str,
) -> list[dict[str, Any]]:
    """One allocation and the tensors that are views of it."""
    dim = part.dims[halves[0]]
    packed_dim = len(halves) == 2 and style == "packed" and (rng.random() < 0.5 or len(set(part.dims.values())) > 1)
    sizes = {"block": blocks}
    if len(layers) > 1 or rng.random() < 0.3:
        sizes["layer"] = len(layers)
    kv_axis = len(halves) == 2 and not packed_dim
    if kv_axis or (len(halves) == 1 and halves != ("",) and rng.random() < 0.1):
        sizes["kv"] = len(halves)
    if part.heads and (heads[1] - heads[0] > 1 or rng.random() < 0.8):
        sizes["head"] = heads[1] - heads[0]
    if not part.state:
        sizes["token"] = rows
    whole_dim = sum(part.dims.values()) if packed_dim else dim
    if whole_dim > 1 or rng.random() < 0.5:
        sizes["dim"] = whole_dim
    names = [name for name in rng.choice(USUAL_ORDERS).split() if name in sizes]
    if rng.random() < 0.4:
        rng.shuffle(names)
    terms: list[tuple[str, int]] = []
    for name in names:
        inner = rng.choice([n for n in (2, 3, 4, 8, 16) if sizes[name] % n == 0] or [0])
        if inner and name in ("dim", "head") and not packed_dim and rng.random() < 0.35:
            terms += [(f"{name}/{inner}", sizes[name] // inner), (f"{name}%{inner}", inner)]
        else:
            terms.append((name, sizes[name]))
    if rng.random() < 0.25:
        rng.shuffle(terms)
    strides: dict[str, int] = {}
    size = part.item
    for term, count in reversed(terms):
        strides[term] = size
        size *= count
        if rng.random() < 0.15:
            size += part.item * rng.randint(1, 3)
    kv = halves if rng.random() < 0.7 else tuple(reversed(halves))
    tensor: dict[str, Any] = {
        "group": part.group,
        "part": part.name,
        "kv": kv,
        "layers": tuple(layers),
        "heads": heads,
        "item": part.item,
        "ratio": ratio,
        "unit": part.unit,
        "base": 0,
        "allocation": size,
    }
    if packed_dim:  # two views, one behind the other along dim
        at, views = 0, []
        for half in kv:
            shape = [part.dims[half] if term == "dim" else count for term, count in terms]
            views.append((half, [t for t, _ in terms], shape, [strides[t] for t, _ in terms], at * strides["dim"]))
            at += part.dims[half]
    elif style == "packed" and kv_axis:  # two views, each one index of the kv axis
        rest = [(term, count) for term, count in terms if term != "kv"]
        views = [
            (half, [t for t, _ in rest], [n for _, n in rest], [strides[t] for t, _ in rest], i * strides["kv"])
            for i, half in enumerate(kv)
        ]
    else:
        names = [t for t, _ in terms]
        views = [(None, names, [n for _, n in terms], [strides[t] for t in names], 0)]
    return [
        tensor
        | {
            "kv": kv if half is None else (half,),
            "axes": " ".join(axes),
            "shape": tuple(shape),
            "strides": tuple(steps),
            "base": at,
            "extent": part.item + sum((n - 1) * s for n, s in zip(shape, steps, strict=True)),
            "fresh": index == 0,
        }
        for index, (half, axes, shape, steps, at) in enumerate(views)
    ]
