"""What two ranks have in common: who sends what, whether it can be copied, and strides and addresses of all of it.

Each selected pair of tensors is intersected in global coordinates. Pairs with equal strides and extents on both sides
form one class, whose members (regions) differ only in their base addresses, and in the two numbers of a conversion.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, pairwise, product
from math import gcd, prod
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import GeometryError, MismatchError
from kvxfer.geometry.axes import KV_ORDER, Factor, Interleave, Place, RowSide, TensorSpec, axis_offsets
from kvxfer.geometry.copyplan import Box, BoxAxis, Elements, Patch, fold, patches
from kvxfer.names import CONVERTIBLE, convertible, lazy

if TYPE_CHECKING:
    from kvxfer.geometry.cache import CacheGeometry

__all__ = [
    "Difference",
    "Folded",
    "Holders",
    "SegmentClass",
    "SegmentKey",
    "Selection",
    "common",
    "copied",
    "difference",
    "differences",
    "intersect",
    "resolve",
]

# --- who sends what
#
# Heads by overlap, layers by stage, tokens by the turns that meet, replicated data from one owner each. Where several
# ranks hold the same coordinates the owner is rotated by the decode rank, so that the load spreads. The result is a
# pure function of the geometries: every decode rank computes its own part, and nobody has to agree.


class Selection(NamedTuple):
    """Part of a tensor class that goes from one prefill rank to one decode rank.

    A tuple, since plans are looked up by it for every transfer.
    """

    group: str  # as in `CacheTensor`
    part: str  # as in `CacheTensor`
    kv: str  # `"k"`, `"v"` or `""`
    layers: tuple[int, ...]  # global layer numbers, ascending
    head_start: int  # first head
    head_stop: int  # one past the last head


@dataclass(frozen=True, slots=True)
class _Holding:
    rank: int
    start: int
    stop: int
    tokens: Interleave


_Held = dict[Place, tuple[_Holding, ...]]


def resolve(need: "CacheGeometry", have: "Sequence[CacheGeometry]", *, rank: int = 0) -> list[tuple[Selection, ...]]:
    """Divide what `need` holds among the ranks of `have`.

    Args:
        need: Geometry of one decode rank.
        have: Geometries of all ranks of the prefill engine, by rank.
        rank: The decode rank, which rotates the owners of replicated data.

    Returns:
        For each rank of `have` its selections; empty for ranks from which nothing is needed.

    Raises:
        MismatchError: If coordinates that `need` holds are on no rank. It names every class of which that is so, with
            what is held here and there.
    """
    return Holders(have).resolve(need, rank=rank)


class Holders:
    """Which ranks of a prefill engine hold what: found once for all decode ranks that ask."""

    def __init__(self, have: "Sequence[CacheGeometry]") -> None:
        held, known = dict[Place, list[_Holding]](), dict[tuple[_Holding, ...], tuple[_Holding, ...]]()
        for rank, geometry in enumerate(have):
            for spec in geometry.tensors:
                holding = _Holding(rank, spec.heads.start, spec.heads.stop, spec.tokens)
                for layer in spec.layers:
                    for kv in spec.kv:
                        held.setdefault((spec.group, spec.part, kv, layer), []).append(holding)
        # equal ones become one object: they are compared once, however many layers and decode ranks there are
        self._held: Final[_Held] = {place: known.setdefault(one := tuple(all_), one) for place, all_ in held.items()}
        self._ranks: Final = len(have)

    def resolve(self, need: "CacheGeometry", *, rank: int = 0) -> list[tuple[Selection, ...]]:
        """See `resolve`."""
        held, missing = self._held, dict[str, tuple[str, str]]()
        share: dict[tuple[int, int, int, Interleave], list[tuple[int, int, int]]] = {}
        found: dict[tuple[int, str, str, str, int, int], list[int]] = {}
        for spec in need.tensors:
            for layer in spec.layers:
                for kv in spec.kv:
                    holdings = held.get((spec.group, spec.part, kv, layer), ())
                    key = (id(holdings), spec.heads.start, spec.heads.stop, spec.tokens)
                    if key not in share:
                        share[key] = _share(holdings, spec, rank)
                    for owner, start, stop in share[key]:
                        if owner < 0:
                            missing |= _missing(need, spec, kv, layer, held)
                        found.setdefault((owner, spec.group, spec.part, kv, start, stop), []).append(layer)
        if missing:
            shown = "; ".join(f"{name}: {here} here, {there} there" for name, (here, there) in missing.items())
            raise MismatchError(f"no prefill rank holds all that this one needs: {shown}", fields=missing)
        result: list[list[Selection]] = [[] for _ in range(self._ranks)]
        for (owner, group, part, kv, start, stop), layers in found.items():
            result[owner].append(Selection(group, part, kv, tuple(sorted(layers)), start, stop))
        return [tuple(sorted(selections)) for selections in result]


def common(src: "CacheGeometry", dst: "CacheGeometry") -> tuple[Selection, ...]:
    """Everything that both hold: what a transfer between the two can be about."""
    sources = src.places
    found: dict[tuple[str, str, str, int, int], list[int]] = {}
    for (group, part, kv, layer), targets in dst.places.items():
        for source, target in product(sources.get((group, part, kv, layer), ()), targets):
            heads = _overlap(source.heads, target.heads)
            if heads and source.tokens.meets(target.tokens):
                found.setdefault((group, part, kv, heads.start, heads.stop), []).append(layer)
    return tuple(
        sorted(
            Selection(group, part, kv, tuple(sorted(layers)), start, stop)
            for (group, part, kv, start, stop), layers in found.items()
        )
    )


def _overlap(*heads: range) -> range:
    """Heads that are in all of these; none if it is empty."""
    return range(max(some.start for some in heads), min(some.stop for some in heads))


def _missing(need: "CacheGeometry", spec: TensorSpec, kv: str, layer: int, held: _Held) -> dict[str, tuple[str, str]]:
    """What of a tensor of this rank is on no prefill rank: its name, what of its class is held here, and what there."""
    label, kind = spec.label(kv), (spec.group, spec.part, kv)
    there = {place: holdings for place, holdings in held.items() if place[:3] == kind}
    if not there:
        names = sorted({"/".join(filter(None, place[:3])) for place in held})
        return {label: ("held", f"only {', '.join(names)}" if names else "nothing")}
    here = [own for own in need.tensors if (own.group, own.part) == kind[:2] and kv in own.kv]
    if (*kind, layer) not in held:
        return {f"{label}.layers": (_runs(n for own in here for n in own.layers), _runs(place[3] for place in there))}
    holdings = held[*kind, layer]
    heads = {head for holding in holdings for head in range(holding.start, holding.stop)}
    if not heads.issuperset(spec.heads):
        return {f"{label}.heads": (_runs(n for own in here for n in own.heads), _runs(heads))}
    turns = sorted({(h.tokens.of, h.tokens.chunk, h.tokens.rank) for h in holdings})
    mine = (spec.tokens.of, spec.tokens.chunk, spec.tokens.rank)
    told = [f"part {rank} of {of} in turns of {chunk}" for of, chunk, rank in (mine, *turns)]
    return {f"{label}.tokens": ("all" if spec.tokens.of == 1 else told[0], ", ".join(told[1:]))}


def _runs(numbers: Iterable[int]) -> str:
    """Numbers as `0..3, 7`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] + 1 == number:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}..{last}" if last > first else f"{first}" for first, last in runs)


def _share(holdings: tuple[_Holding, ...], need: TensorSpec, turn: int) -> list[tuple[int, int, int]]:
    """(owner, first head, one past the last) covering the heads of `need`; owner -1 where nobody holds them."""
    heads = need.heads
    cuts = {heads.start, heads.stop}
    cuts |= {edge for h in holdings for edge in (h.start, h.stop) if heads.start < edge < heads.stop}
    edges = sorted(cuts)
    shares: dict[int, list[tuple[int, int, int]]] = {}
    for start, stop in pairwise(edges):
        holders = [h for h in holdings if h.start <= start and stop <= h.stop]
        for owner in _owners(holders, need.tokens, turn):
            mine = shares.setdefault(owner, [])
            first = mine.pop()[1] if mine and mine[-1][2] == start else start
            mine.append((owner, first, stop))
    return list(chain.from_iterable(shares.values()))


def _owners(holders: list[_Holding], tokens: Interleave, turn: int) -> list[int]:
    """One owner for every residue of the token interleaving that meets these tokens; [-1] if such a one has none."""
    by_residue: dict[Interleave, list[int]] = {}
    for holder in holders:
        by_residue.setdefault(holder.tokens, []).append(holder.rank)
    for of, chunk in sorted({(residue.of, residue.chunk) for residue in by_residue}):
        owners: list[int] = []
        for residue in (Interleave(rank, of, chunk) for rank in range(of)):
            if not residue.meets(tokens):
                continue
            if residue not in by_residue:
                break
            owners.append(by_residue[residue][turn % len(by_residue[residue])])
        else:
            return owners
    return [-1]


# --- whether and how elements are converted
#
# What is stored at the destination is what is stored at the source, times the scale of the source, divided by the
# scale of the destination.


@dataclass(frozen=True, slots=True)
class Difference:
    """Something in which two tensors differ so that one cannot be copied to the other, and what would help."""

    what: str
    src: str
    dst: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.what} is {self.src} at the source, but {self.dst} at the destination{self.advice}"


def _head_runs(src: TensorSpec, dst: TensorSpec, heads: range) -> Iterator[tuple[range, Elements, float, float]]:
    """How the heads that two tensors have in common are copied: all alike, or each with numbers of its own.

    Yields heads (global numbers), what is done to their elements, and by what these are multiplied and then divided.
    """
    pairs = _scales(src, dst, heads)
    runs = [heads] if len(set(pairs)) == 1 else [range(head, head + 1) for head in heads]
    for run, (multiply, divide) in zip(runs, pairs, strict=False):  # of equal pairs one will do
        if src.dtype == dst.dtype and multiply == divide:
            yield run, Elements(src.item_bytes, dst.item_bytes), 1.0, 1.0
        else:
            yield run, Elements(src.item_bytes, dst.item_bytes, src.dtype, dst.dtype), multiply, divide


def difference(src: TensorSpec, dst: TensorSpec, heads: range, *, convert: bool) -> Difference | None:
    """Why the heads that two tensors have in common cannot be copied from one to the other; None if they can."""
    for (what, theirs), (_, ours) in zip(src.facts(), dst.facts(), strict=False):  # unequal where `has_tokens` is
        if ours != theirs:
            return Difference(what, str(theirs), str(ours))
    able = convertible(src.dtype, dst.dtype)
    advice = "; convert=True at the decode rank would convert it" if able and not convert else ""
    if src.dtype != dst.dtype:
        if not (able and convert):
            return Difference("dtype", src.dtype, dst.dtype, advice)
    elif src.item_bytes != dst.item_bytes:
        return Difference("item_bytes", str(src.item_bytes), str(dst.item_bytes))
    unequal = next(((s, d, h) for (s, d), h in zip(_scales(src, dst, heads), heads, strict=False) if s != d), None)
    if unequal is not None and not (able and convert):
        advice = advice or f"; {src.dtype} cannot be converted, only {', '.join(CONVERTIBLE)}"
        return Difference(f"scale of head {unequal[2]}", f"{unequal[0]:g}", f"{unequal[1]:g}", advice)
    return _misaligned(src, dst) if src.dtype != dst.dtype or unequal is not None else None


def _misaligned(src: TensorSpec, dst: TensorSpec) -> Difference | None:
    """Elements that are converted are read and written one by one, so they must lie where their size says."""
    aligned = [gcd(spec.base, spec.item_bytes, *spec.strides) for spec in (src, dst)]
    if aligned == [src.item_bytes, dst.item_bytes]:
        return None
    advice = "; elements that are converted must lie at multiples of their size"
    return Difference("alignment", f"{aligned[0]} bytes", f"{aligned[1]} bytes", advice)


def copied(src: TensorSpec, dst: TensorSpec, heads: range) -> tuple[int, int, int, int] | None:
    """What is the same for all pairs of tensors whose heads are copied alike, byte by byte; None for one with scales.

    It names objects by their ids, so it is good for as long as the tensors are there.
    """
    if src.dtype != dst.dtype or src.scale or dst.scale:
        return None
    return id(src.form), id(dst.form), heads.start, heads.stop


def differences(
    src: "CacheGeometry", dst: "CacheGeometry", *, convert: bool
) -> Iterator[tuple[TensorSpec, Difference]]:
    """Every pair of tensors of two ranks that have coordinates in common and cannot be copied, each once."""
    known: dict[tuple[int, int, int, int], Difference | None] = {}
    sources, seen = src.places, set[tuple[int, int]]()
    for place, targets in dst.places.items():
        for source, target in product(sources.get(place, ()), targets):
            heads, pair = _overlap(source.heads, target.heads), (id(source), id(target))
            if not heads or pair in seen:
                continue
            seen.add(pair)
            kind = copied(source, target, heads)
            if kind in known:
                found = known[kind]
            else:
                found = difference(source, target, heads, convert=convert)
                if kind is not None:
                    known[kind] = found
            if found is not None:
                yield source, found


def _scales(src: TensorSpec, dst: TensorSpec, heads: range) -> list[tuple[float, float]]:
    """The scales of both sides: one pair for all these heads, or a pair for each."""
    mine, theirs = src.scales(heads), dst.scales(heads)
    count = max(len(mine), len(theirs))
    return list(zip(_spread(mine, count), _spread(theirs, count), strict=True))


def _spread(scales: tuple[float, ...], count: int) -> tuple[float, ...]:
    return scales * count if len(scales) == 1 else scales


# --- boxes

I64: TypeAlias = NDArray[np.int64]
F32: TypeAlias = NDArray[np.float32]

_Region: TypeAlias = tuple[int, int, int, int, int, int, float, float]
"""Layer, kv, first head, first dim, base at the source, base at the destination, and the two numbers of a conversion.
The first four are unique in a class and order its regions alike on both sides; addresses differ between the sides and
must not."""

_Cut: TypeAlias = tuple[list[_Region], int, int, int, int, float, float]
"""Where regions of a class are collected; first head, first dim, how far they begin behind the bases of the two
tensors, and the two numbers of a conversion."""


@dataclass(frozen=True, slots=True)
class SegmentKey:
    """What makes two pairs of tensors one class: equal strides, extents and elements on both sides.

    The order of its fields is the order of segments in a staged chunk (protocol, section 6).
    """

    group: str
    part: str
    elements: Elements
    heads: tuple[BoxAxis, ...]
    dims: tuple[BoxAxis, ...]
    src_token: int
    dst_token: int
    src_block: int
    dst_block: int
    src_rows: RowSide
    dst_rows: RowSide

    @property
    def grid(self) -> int:
        """Token rows of a full row."""
        return self.src_rows.common(self.dst_rows)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element in staging."""
        return self.elements.staged_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token row in one region, in staging."""
        return self.item_bytes * prod(axis.count for axis in (*self.heads, *self.dims))

    def in_order(self, item_bytes: int) -> Iterator[tuple[BoxAxis, int]]:
        """The axes of a row that is head, token, dim in C order, the innermost first, and the stride of each."""
        stride = item_bytes
        for own, gap in ((self.dims, self.grid), (self.heads, 1)):
            for axis in reversed(own):
                yield axis, stride
                stride *= axis.count
            stride *= gap

    def sort_key(self) -> tuple[object, ...]:
        """Total order; both sides sort by the same numbers."""
        return (self.group, self.part, self.elements, self.heads, self.dims, self.src_token, self.dst_token,
                self.src_block, self.dst_block, self.src_rows.shape, self.dst_rows.shape)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """Regions with the box that a row copies in each."""

    box: Box
    # int64 (R, 2): addresses at the source and destination; in staging they count from the place of the first row that
    # their region has there
    regions: I64
    factors: F32 | None


@dataclass(frozen=True, eq=False)
class SegmentClass:
    """One class of a pair, or what a run of layers has of it: its key and its regions, by (layer, kv, head, dim)."""

    number: int  # which class of the pair
    key: SegmentKey
    places: I64  # int64 (R, 4): its layer, half (an index of `KV_ORDER`), first head and first dim
    bases: I64  # int64 (R, 2): address of the region's first selected element in block 0, at the source and destination
    factors: F32  # float32 (R, 2): by what elements are multiplied, and then divided; 1 where nothing is converted

    @property
    def layers(self) -> I64:
        """The layer of each region, ascending."""
        return self.places[:, 0]

    def within(self, first: int, last: int) -> "SegmentClass | None":
        """What layers up to `last` have of it; None if that is nothing."""
        some = slice(bisect_left(self.layers, first), bisect_left(self.layers, last + 1))
        places = self.places[some]
        return (
            SegmentClass(self.number, self.key, places, self.bases[some], self.factors[some]) if len(places) else None
        )

    @lazy
    def token_bytes(self) -> int:
        """Of a token row in a region, in staging."""
        return self.key.token_bytes

    @lazy
    def row_bytes(self) -> int:
        """Of a row in staging, where it is head, token, dim in C order and a full sub-block."""
        return self.token_bytes * self.key.grid

    @lazy
    def in_place(self) -> Folded:
        """From the blocks of one side into those of the other."""
        key = self.key
        return self._folded((*key.heads, *key.dims), self.bases, (key.src_token, key.dst_token), key.elements)

    @lazy
    def gathered(self) -> Folded:
        """From blocks into staging."""
        key = self.key
        bases = np.stack([self.bases[:, 0], np.zeros(len(self.bases), np.int64)], axis=1)
        axes = [BoxAxis(axis.count, axis.src, stride) for axis, stride in key.in_order(key.item_bytes)]
        return self._folded(axes, bases, (key.src_token, self._staged_token), key.elements.gathered)

    @lazy
    def scattered(self) -> Folded:
        """From staging into blocks."""
        key = self.key
        bases = np.stack([np.zeros(len(self.bases), np.int64), self.bases[:, 1]], axis=1)
        axes = [BoxAxis(axis.count, stride, axis.dst) for axis, stride in key.in_order(key.item_bytes)]
        return self._folded(axes, bases, (self._staged_token, key.dst_token), key.elements.scattered)

    @property
    def _staged_token(self) -> int:
        """Bytes between tokens in staging."""
        return self.key.item_bytes * prod(axis.count for axis in self.key.dims)

    def _folded(self, axes: Iterable[BoxAxis], bases: I64, tokens: tuple[int, int], elements: Elements) -> Folded:
        """These axes as a box, those beyond it unrolled into regions; `tokens` are the token strides of both sides."""
        box, unrolled = fold(axes, *tokens, elements)
        factors = self.factors if elements.converts else None
        for axis in unrolled:
            steps = np.arange(axis.count, dtype=np.int64)[:, None] * np.asarray([axis.src, axis.dst], np.int64)
            bases = (bases[:, None, :] + steps[None]).reshape(-1, 2)
            factors = np.repeat(factors, axis.count, axis=0) if factors is not None else None
        return Folded(box, bases, factors)


def intersect(
    src: "CacheGeometry", dst: "CacheGeometry", selections: Sequence[Selection], *, convert: bool
) -> tuple[SegmentClass, ...]:
    """Intersect every selected pair of tensors and collect equal ones, in the order of staging.

    Raises:
        GeometryError: If a selection is not held by both sides, two selections name the same coordinates, or a pair of
            tensors differs in what cannot be converted, or is not to be.
    """
    sources, targets = src.places, dst.places
    named: dict[Place, list[Selection]] = {}  # held by both sides, so however much a peer selects
    found: dict[SegmentKey, list[_Region]] = {}
    cuts: dict[tuple[int, int, int, int], list[_Cut]] = {}
    for selection in selections:
        heads = range(selection.head_start, selection.head_stop)
        for layer in selection.layers:
            place: Place = (selection.group, selection.part, selection.kv, layer)
            _check_disjoint(selection, named.setdefault(place, []), layer)
            covered = 0  # neither side holds a coordinate twice, so counting is enough
            for source, target in product(sources.get(place, ()), targets.get(place, ())):
                common = _overlap(source.heads, target.heads, heads)
                if not common:
                    continue
                covered += len(common)
                kind = copied(source, target, common)
                cut = None if kind is None else cuts.get(kind)
                if cut is None:
                    unlike = difference(source, target, common, convert=convert)
                    if unlike is not None:
                        raise GeometryError(f"{source.name}: {unlike}")
                    cut = list(_cut(source, target, common, found))
                    if kind is not None:
                        cuts[kind] = cut
                half = KV_ORDER.index(place[2])
                at_src, at_dst = (_base(spec, place) for spec in (source, target))
                for regions, head, dim, from_src, from_dst, multiply, divide in cut:
                    regions.append((place[3], half, head, dim, at_src + from_src, at_dst + from_dst, multiply, divide))
            if not heads or covered != len(heads):
                raise GeometryError(
                    f"layer {layer}, heads {heads.start}..{heads.stop - 1}, kv {selection.kv or '-'} of group "
                    f"{selection.group!r}, part {selection.part!r} were selected, but are not held by both sides"
                )
    return tuple(_collected(found))


def _collected(found: Mapping[SegmentKey, list[_Region]]) -> Iterator[SegmentClass]:
    for number, key in enumerate(sorted(found, key=SegmentKey.sort_key)):
        regions = sorted(found[key])
        table = np.asarray([region[:6] for region in regions], np.int64)
        factors = np.asarray([region[6:] for region in regions], np.float32)
        yield SegmentClass(number, key, table[:, :4], table[:, 4:], factors)


def _check_disjoint(selection: Selection, rivals: list[Selection], layer: int) -> None:
    """Selections come from a peer: what is named twice would be written twice."""
    for other in rivals:
        if selection.head_start < other.head_stop and other.head_start < selection.head_stop:
            raise GeometryError(
                f"layer {layer}, kv {selection.kv or '-'} of group {selection.group!r}, part {selection.part!r} was "
                f"selected twice: heads {other.head_start}..{other.head_stop - 1} and "
                f"{selection.head_start}..{selection.head_stop - 1}"
            )
    rivals.append(selection)


def _base(spec: TensorSpec, place: Place) -> int:
    """Where the first element of a layer and half lies in block 0."""
    _, _, kv, layer = place
    base = spec.base
    if len(spec.layers) > 1:
        base += spec.stride("layer") * spec.layers.index(layer)
    return base + spec.stride("kv") * spec.kv.index(kv) if len(spec.kv) > 1 else base


def _cut(src: TensorSpec, dst: TensorSpec, common: range, found: dict[SegmentKey, list[_Region]]) -> "Iterator[_Cut]":
    """One region for every patch of some common heads and the dims of two tensors: the same in each layer and half."""
    for run, elements, multiply, divide in _head_runs(src, dst, common):
        heads = _axis_patches(
            src.factors.get("head", ()),
            dst.factors.get("head", ()),
            run.start - src.heads.start,
            run.start - dst.heads.start,
            len(run),
        )
        dims = _axis_patches(src.factors.get("dim", ()), dst.factors.get("dim", ()), 0, 0, src.count("dim"))
        for (head_at, head), (dim_at, dim) in product(heads, dims):
            key = SegmentKey(
                src.group,
                src.part,
                elements,
                head.axes,
                dim.axes,
                src.stride("token"),
                dst.stride("token"),
                src.stride("block"),
                dst.stride("block"),
                RowSide.of_tensor(src),
                RowSide.of_tensor(dst),
            )
            regions = found.setdefault(key, [])
            at = (run.start + head_at, dim_at, head.src + dim.src, head.dst + dim.dst)
            yield regions, *at, multiply, divide


@lru_cache(maxsize=512)
def _axis_patches(
    src: tuple[Factor, ...], dst: tuple[Factor, ...], src_start: int, dst_start: int, count: int
) -> tuple[tuple[int, Patch], ...]:
    """Patches of one axis, each with the coordinate at which it begins. Cached: layers are alike."""
    found = patches(axis_offsets(src, src_start, src_start + count), axis_offsets(dst, dst_start, dst_start + count))
    starts = accumulate((patch.count for patch in found), initial=0)
    return tuple(zip(starts, found, strict=False))  # the last start is the end of the axis
