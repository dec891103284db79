"""How a rank may lay out its cache in memory, as torch views.

A layout is a function of the memory and of the shares that a rank holds. Most are strings: what stands before the bar
has a tensor of its own for each value, what stands behind it is the order of the tensor's axes. Axes that a share does
not have (the heads of latents, the tokens of state) are left out. `block+5` leaves 5 elements unused behind each block.

    "layer kv | block token head dim"     a tensor for each layer's K, and one for its V
    "| block layer kv head token dim"     one tensor, in which a block holds everything of its tokens
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from kvxfer import shared_empty
from kvxfer.geometry import CacheTensor, Interleave

ALIGNMENT = 64
GUARD = 64
"""Bytes before and after every allocation, which nobody may touch."""


@dataclass(frozen=True)
class Tensors:
    """A class of a model's cache tensors, whole."""

    dims: Mapping[str, int]  # elements of a row by half: `k` and `v`, or the one half without a name
    layers: Sequence[int]  # global numbers
    heads: int = 0  # how many; 0 where there is no head axis, and every rank of a stage holds all of it
    dtype: torch.dtype = torch.bfloat16  # of the elements
    group: str = "default"  # as in `CacheTensor`
    part: str = ""  # as in `CacheTensor`
    state: bool = False  # whether it has slots instead of tokens
    window: int = 0  # tokens before the end of a request that its block lists cover; 0 for all


@dataclass(frozen=True)
class Share:
    """What one rank holds of a class."""

    of: Tensors  # the class
    layers: tuple[int, ...]  # of the rank's stage
    heads: range  # of the rank
    tokens: Interleave  # of the rank, under context parallelism
    ids: int  # block ids in the pool
    block: int  # tokens of this rank that one id covers
    ratio: int  # kernel blocks of one id

    def size(self, term: str, halves: Sequence[str], layers: Sequence[int]) -> int:
        """Length of an axis, or of one part of a split axis."""
        name, inner = _split(term)
        whole = {
            "block": self.ids * self.ratio,
            "layer": len(layers),
            "kv": len(halves),
            "head": len(self.heads),
            "token": self.block // self.ratio,
            "dim": self.of.dims[halves[0]],
        }[name]
        return inner if "%" in term else whole // inner

    def has(self, term: str) -> bool:
        """Whether the class has this axis."""
        absent = {"kv": "" in self.of.dims, "head": not self.of.heads, "token": self.of.state}
        return not absent.get(_split(term)[0], False)

    def tensor(
        self, view: torch.Tensor, axes: Iterable[str], layers: Sequence[int], halves: Sequence[str]
    ) -> CacheTensor:
        """A view of its memory, described."""
        return CacheTensor(
            view,
            " ".join(axes),
            layers=layers,
            heads=self.heads if self.of.heads else None,
            kv="".join(halves) or None,
            group=self.of.group,
            part=self.of.part,
            tokens=self.tokens,
            kernel_blocks_per_id=self.ratio,
        )


def _split(term: str) -> tuple[str, int]:
    name, _, inner = term.replace("%", "/").partition("/")
    return name, int(inner or 1)


class Room:
    """Memory of a rank, of which allocations are cut with guards between them."""

    def __init__(self, nbytes: int) -> None:
        self.memory = shared_empty((nbytes,), dtype=torch.uint8)
        self.used = GUARD

    def take(self, nbytes: int) -> int:
        """Offset of so many bytes."""
        at = -(-self.used // ALIGNMENT) * ALIGNMENT
        self.used = at + nbytes + GUARD
        if self.used > len(self.memory):
            raise MemoryError(f"{self.used} bytes are needed")
        return at

    def view(self, at: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        """A tensor over the bytes from `at` on; strides in bytes."""
        item = dtype.itemsize
        size = item + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        flat = self.memory[at : at + -(-size // item) * item].view(dtype)
        return flat.as_strided(tuple(shape), tuple(stride // item for stride in strides))


Layout: TypeAlias = Callable[[Room, Sequence[Share]], Iterable[CacheTensor]]


def strided(text: str, *, offset: int = 0, v: str | None = None) -> Layout:
    """Tensors of their own for every class; `offset` elements of each are left out, `v` is V's layout, if another."""

    def lay(room: Room, shares: Sequence[Share]) -> Iterator[CacheTensor]:
        for share in shares:
            for half_text, halves in _halves(text, v, share):
                apart, _, axes = half_text.partition("|")
                for layers in [(layer,) for layer in share.layers] if "layer" in apart else [share.layers]:
                    yield _allocated(room, share, axes.split(), layers, halves, offset)

    return lay


def _halves(text: str, v: str | None, share: Share) -> list[tuple[str, tuple[str, ...]]]:
    """Layout and halves of each allocation of a layer."""
    halves = tuple(share.of.dims)
    if v is None and "kv" not in text.partition("|")[0]:
        return [(text, halves)]
    return [(v if half == "v" and v is not None else text, (half,)) for half in halves]


def _allocated(
    room: Room, share: Share, terms: Sequence[str], layers: Sequence[int], halves: Sequence[str], offset: int
) -> CacheTensor:
    pads = {term.partition("+")[0]: int(term.partition("+")[2] or 0) for term in terms if share.has(_bare(term))}
    axes = list(pads)
    item = share.of.dtype.itemsize
    strides, size = dict[str, int](), item
    for term in reversed(axes):
        strides[term] = size
        size = size * share.size(term, halves, layers) + pads[term] * item
    at = room.take(size + offset * item) + offset * item
    shape = [share.size(term, halves, layers) for term in axes]
    return share.tensor(room.view(at, share.of.dtype, shape, [strides[t] for t in axes]), axes, layers, halves)


def _bare(term: str) -> str:
    return term.partition("+")[0]


# --- several classes in one memory


@dataclass(frozen=True)
class _Place:
    """A class inside of a block: its axes, byte strides, and where it begins."""

    share: Share
    axes: tuple[str, ...]
    strides: tuple[int, ...]
    at: int
    end: int


def _inside(share: Share, axes: str, at: int, strides: Mapping[str, int] | None = None) -> _Place:
    """Place a class (K and V, if it has both) behind what lies in the block already."""
    at = -(-at // share.of.dtype.itemsize) * share.of.dtype.itemsize
    halves, terms = tuple(share.of.dims), [term for term in axes.split() if share.has(term)]
    found, size = dict[str, int](), share.of.dtype.itemsize
    for term in reversed(terms):
        found[term] = (strides or {}).get(term, size)
        size *= share.size(term, halves, share.layers)
    return _Place(share, tuple(terms), tuple(found[term] for term in terms), at, at + size)


def _pages(room: Room, places: Sequence[_Place], layers: Mapping[str, int], pad: int = 0) -> Iterator[CacheTensor]:
    """One allocation of pages that hold a kernel block of each of these places; layers by group."""
    page = -(-max(place.end for place in places) // 16) * 16 + pad
    blocks = max(place.share.ids * place.share.ratio for place in places)
    base = room.take(page * blocks)
    for place in places:
        share = place.share
        halves, own = tuple(share.of.dims), (layers[share.of.group],)
        shape = [share.size(term, halves, own) for term in place.axes]
        view = room.view(base + place.at, share.of.dtype, [share.ids * share.ratio, *shape], [page, *place.strides])
        yield share.tensor(view, ("block", *place.axes), own, halves)


def behind_each_other(*axes: str) -> Layout:
    """A block holds all of the first class, then all of the second; one tensor of bytes for each layer."""

    def lay(room: Room, shares: Sequence[Share]) -> Iterator[CacheTensor]:
        for layer in shares[0].layers:
            places: list[_Place] = []
            for share, inner in zip(shares, axes, strict=True):
                places.append(_inside(share, inner, places[-1].end if places else 0))
            yield from _pages(room, places, {share.of.group: layer for share in shares})

    return lay


def row_by_row(room: Room, shares: Sequence[Share]) -> Iterator[CacheTensor]:
    """A row of a token is the first class's elements, then the second's (values, and what scales them)."""
    row = sum(share.of.dims[""] * share.of.dtype.itemsize for share in shares)
    for layer in shares[0].layers:
        places, at = list[_Place](), 0
        for share in shares:
            placed = _inside(share, "token dim", at, {"token": row})
            end = row * share.block // share.ratio
            places.append(_Place(share, placed.axes, placed.strides, at, end))
            at += share.of.dims[""] * share.of.dtype.itemsize
        yield from _pages(room, places, {share.of.group: layer for share in shares})


def hybrid(attention: str, *, channels_first: bool, pad: int = 0) -> Layout:
    """Pages that hold either a block of attention or a slot of state, as pools of hybrid models do.

    The first page of the pool belongs to the first layer of either kind, and so on. Of the state, all classes but the
    last (`ssm`) are runs of channels of one convolution tensor.

    Args:
        attention: Order of axes in a block of attention.
        channels_first: Whether a slot holds channel by channel (or else time step by time step).
        pad: Unused bytes behind each page.
    """

    def lay(room: Room, shares: Sequence[Share]) -> Iterator[CacheTensor]:
        tokens = [share for share in shares if not share.of.state]
        *conv, ssm = [share for share in shares if share.of.state]
        for paged, slot in zip(tokens[0].layers, ssm.layers, strict=True):
            places = [_inside(tokens[0], attention, 0), *_convolution(conv, channels_first=channels_first)]
            places.append(_inside(ssm, "head dim/4 dim%4", max(place.end for place in places[1:])))
            yield from _pages(room, places, {tokens[0].of.group: paged, ssm.of.group: slot}, pad)

    return lay


def _convolution(shares: Sequence[Share], *, channels_first: bool) -> list[_Place]:
    """Sub-projections as runs of channels of one tensor of (channel, time) or (time, channel)."""
    item, time = shares[0].of.dtype.itemsize, shares[0].of.dims[""]
    channels = sum(len(share.heads) for share in shares)
    places, first = list[_Place](), 0
    for share in shares:
        if channels_first:
            places.append(_inside(share, "head dim", first * time * item))
        else:
            end = ((time - 1) * channels + first + len(share.heads)) * item
            places.append(_Place(share, ("dim", "head"), (channels * item, item), first * item, end))
        first += len(share.heads)
    return places


def by_group(**layouts: Layout) -> Layout:
    """A layout for each group."""

    def lay(room: Room, shares: Sequence[Share]) -> Iterator[CacheTensor]:
        for group, layout in layouts.items():
            mine = [share for share in shares if share.of.group == group]
            if mine:
                yield from layout(room, mine)

    return lay


def by_part(*layouts: tuple[tuple[str, ...], Layout]) -> Layout:
    """A layout for each of these sets of parts."""

    def lay(room: Room, shares: Sequence[Share]) -> Iterator[CacheTensor]:
        for parts, layout in layouts:
            mine = [share for share in shares if share.of.part in parts]
            if mine:
                yield from layout(room, mine)

    return lay


def room_bytes(shares: Sequence[Share]) -> int:
    """More than any of these layouts needs."""
    each = [
        share.ids * max(1, share.block) * sum(share.of.dims.values()) * max(1, len(share.heads)) * len(share.layers)
        for share in shares
    ]
    return 2 * sum(n * share.of.dtype.itemsize for n, share in zip(each, shares, strict=True)) + (1 << 17)


_VECTORS = "layer kv | block head dim/{x} token dim%{x}"

NHD = strided("layer kv | block token head dim")
HND = strided("layer kv | block head token dim")

PLAIN: Mapping[str, Layout] = {
    "NHD, K and V apart": NHD,
    "HND, K and V apart": HND,
    "NHD, packed per layer": strided("layer | kv block token head dim"),
    "HND, packed per layer": strided("layer | kv block head token dim"),
    "NHD, packed per block": strided("layer | block kv token head dim"),
    "HND, packed per block": strided("layer | block kv head token dim"),
    "NHD, packed per token": strided("layer | block token kv head dim"),
    "HND, packed per row": strided("layer | block head token kv dim"),
    "NHD, cross-layer, layer outside": strided("| block layer kv token head dim"),
    "HND, cross-layer, layer outside": strided("| block layer kv head token dim"),
    "NHD, cross-layer, layer inside": strided("| block kv layer token head dim"),
    "HND, cross-layer, layer inside": strided("| block kv layer head token dim"),
    "K in vectors of 8": strided(_VECTORS.format(x=8), v="layer kv | block head dim token"),
    "K in vectors of 16": strided(_VECTORS.format(x=16), v="layer kv | block head dim token"),
    "padding between rows": strided("layer kv | block token head+4 dim+8"),
    "padding between blocks": strided("layer | kv+24 block+40 head token dim"),
    "a storage offset": strided("layer | block kv token head dim", offset=24),
}
"""Layouts of K and V that are copied into one another in all pairs."""
