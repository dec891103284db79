"""What two ranks have in common: strides, boxes and base addresses of all that is selected between them.

Each selected pair of tensors is intersected in global coordinates. Pairs with equal strides and extents on both sides
form one class, whose members (regions) differ only in their base addresses, and in the two numbers of a conversion.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import GeometryError
from kvxfer.geometry.axes import Factor
from kvxfer.geometry.cache import CacheGeometry, Place
from kvxfer.geometry.conversion import copied, difference, parts
from kvxfer.geometry.elements import Elements
from kvxfer.geometry.factor import BoxAxis, Patch, axis_offsets, patches
from kvxfer.geometry.resolve import Selection
from kvxfer.geometry.side import RowSide
from kvxfer.geometry.spec import TensorSpec

__all__ = ["KV_ORDER", "SegmentClass", "SegmentKey", "intersect"]

I64: TypeAlias = NDArray[np.int64]
F32: TypeAlias = NDArray[np.float32]

_Region: TypeAlias = tuple[int, int, int, int, int, int, float, float]
"""Layer, kv, first head, first dim, base at the source, base at the destination, and the two numbers of a conversion.
The first four are unique in a class and order its regions alike on both sides; addresses differ between the sides and
must not."""

_Cut: TypeAlias = tuple[list[_Region], int, int, int, int, float, float]
"""Where regions of a class are collected; first head, first dim, how far they begin behind the bases of the two
tensors, and the two numbers of a conversion."""

KV_ORDER: Final = ("", "k", "v")
"""Halves in the order of regions."""


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
    def item_bytes(self) -> int:
        """Bytes of one element in staging."""
        return self.elements.staged_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token row in one region, in staging."""
        return self.item_bytes * prod(axis.count for axis in (*self.heads, *self.dims))

    def sort_key(self) -> tuple[object, ...]:
        """Total order; both sides sort by the same numbers."""
        return (self.group, self.part, self.elements, self.heads, self.dims, self.src_token, self.dst_token,
                self.src_block, self.dst_block, self.src_rows.shape, self.dst_rows.shape)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class SegmentClass:
    """One class of a pair: its key and its regions, ordered by (layer, kv, head, dim).

    Attributes:
        key: Strides and extents.
        places: int64 (R, 4): its layer, half (an index of `KV_ORDER`), first head and first dim.
        bases: int64 (R, 2): address of the region's first selected element in block 0, at the source and destination.
        factors: float32 (R, 2): by what elements are multiplied, and then divided; 1 where nothing is converted.
    """

    key: SegmentKey
    places: I64
    bases: I64
    factors: F32

    @property
    def layers(self) -> I64:
        """The layer of each region, ascending."""
        return self.places[:, 0]


def intersect(
    src: CacheGeometry, dst: CacheGeometry, selections: Sequence[Selection], *, convert: bool
) -> tuple[SegmentClass, ...]:
    """Intersect every selected pair of tensors and collect equal ones, in the order of staging.

    Raises:
        GeometryError: If a selection is not held by both sides, two selections name the same coordinates, or a pair of
            tensors differs in what cannot be converted, or is not to be.
    """
    _check_disjoint(selections)
    sources, targets = src.places, dst.places
    found: dict[SegmentKey, list[_Region]] = {}
    cuts: dict[tuple[int, int, int, int], list[_Cut]] = {}
    for selection in selections:
        heads = range(selection.head_start, selection.head_stop)
        for place in _places(selection):
            covered = 0  # neither side holds a coordinate twice, so counting is enough
            for source, target in product(sources.get(place, ()), targets.get(place, ())):
                common = range(
                    max(source.heads.start, target.heads.start, heads.start),
                    min(source.heads.stop, target.heads.stop, heads.stop),
                )
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
                    f"layer {place[3]}, heads {heads.start}..{heads.stop - 1}, kv {selection.kv or '-'} of group "
                    f"{selection.group!r}, part {selection.part!r} were selected, but are not held by both sides"
                )
    return tuple(_collected(found))


def _collected(found: Mapping[SegmentKey, list[_Region]]) -> Iterator[SegmentClass]:
    for key in sorted(found, key=SegmentKey.sort_key):
        regions = sorted(found[key])
        table = np.asarray([region[:6] for region in regions], np.int64)
        factors = np.asarray([region[6:] for region in regions], np.float32)
        yield SegmentClass(key, table[:, :4], table[:, 4:], factors)


def _places(selection: Selection) -> Iterator[Place]:
    return ((selection.group, selection.part, selection.kv, layer) for layer in selection.layers)


def _check_disjoint(selections: Iterable[Selection]) -> None:
    """Selections come from a peer: what is named twice would be written twice."""
    named: dict[Place, list[Selection]] = {}
    for selection in selections:
        for place in _places(selection):
            rivals = named.setdefault(place, [])
            for other in rivals:
                if selection.head_start < other.head_stop and other.head_start < selection.head_stop:
                    raise GeometryError(
                        f"layer {place[3]}, kv {selection.kv or '-'} of group {selection.group!r}, part "
                        f"{selection.part!r} was selected twice: heads {other.head_start}..{other.head_stop - 1} "
                        f"and {selection.head_start}..{selection.head_stop - 1}"
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
    for part in parts(src, dst, common):
        heads = _axis_patches(
            src.factors.get("head", ()),
            dst.factors.get("head", ()),
            part.heads.start - src.heads.start,
            part.heads.start - dst.heads.start,
            len(part.heads),
        )
        dims = _axis_patches(src.factors.get("dim", ()), dst.factors.get("dim", ()), 0, 0, src.count("dim"))
        for (head_at, head), (dim_at, dim) in product(heads, dims):
            key = SegmentKey(
                src.group,
                src.part,
                part.elements,
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
            at = (part.heads.start + head_at, dim_at, head.src + dim.src, head.dst + dim.dst)
            yield regions, *at, part.multiply, part.divide


@lru_cache(maxsize=512)
def _axis_patches(
    src: tuple[Factor, ...], dst: tuple[Factor, ...], src_start: int, dst_start: int, count: int
) -> tuple[tuple[int, Patch], ...]:
    """Patches of one axis, each with the coordinate at which it begins. Cached: layers are alike."""
    found = patches(
        axis_offsets(src, src_start, src_start + count),
        axis_offsets(dst, dst_start, dst_start + count),
    )
    starts = accumulate((patch.count for patch in found), initial=0)
    return tuple(zip(starts, found, strict=False))  # the last start is the end of the axis
