"""Whether a pair of tensors can be copied, as bytes or by conversion, and with which numbers.

What is stored at the destination is what is stored at the source, times the scale of the source, divided by the scale
of the destination.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import gcd

from kvxfer.dtypes import CONVERTIBLE, convertible
from kvxfer.geometry.cache import CacheGeometry
from kvxfer.geometry.elements import Elements
from kvxfer.geometry.spec import TensorSpec

__all__ = ["Difference", "Part", "converts", "copied", "difference", "differences", "parts"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Something in which two tensors differ so that one cannot be copied to the other.

    Attributes:
        what: Its name, such as `dtype`.
        src: Its value at the source.
        dst: Its value at the destination.
        advice: What would help, or an empty string.
    """

    what: str
    src: str
    dst: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.what} is {self.src} at the source, but {self.dst} at the destination{self.advice}"


@dataclass(frozen=True, slots=True)
class Part:
    """Heads of a pair of tensors that are copied alike.

    Attributes:
        heads: Global numbers.
        elements: What is done to each element.
        multiply: The scale of the source.
        divide: The scale of the destination.
    """

    heads: range
    elements: Elements
    multiply: float = 1.0
    divide: float = 1.0


def parts(src: TensorSpec, dst: TensorSpec, heads: range) -> Iterator[Part]:
    """How the heads that two tensors have in common are copied: all alike, or each with numbers of its own."""
    pairs = _scales(src, dst, heads)
    runs = [heads] if len(set(pairs)) == 1 else [range(head, head + 1) for head in heads]
    for run, (multiply, divide) in zip(runs, pairs, strict=False):  # of equal pairs one will do
        if src.dtype == dst.dtype and multiply == divide:
            yield Part(run, Elements(src.item_bytes, dst.item_bytes))
        else:
            yield Part(run, Elements(src.item_bytes, dst.item_bytes, src.dtype, dst.dtype), multiply, divide)


def difference(src: TensorSpec, dst: TensorSpec, heads: range, *, convert: bool) -> Difference | None:
    """Why the heads that two tensors have in common cannot be copied from one to the other; None if they can.

    Args:
        src: Tensor of the prefill rank.
        dst: Tensor of the decode rank.
        heads: Global numbers of heads that both hold.
        convert: Whether the decode rank asked for conversion.
    """
    for what, theirs, ours in (
        ("dim", src.count("dim"), dst.count("dim")),
        ("has_tokens", not src.is_state, not dst.is_state),
        ("tokens_per_row", src.tokens_per_row, dst.tokens_per_row),
        *((("kernel_blocks_per_id", src.block_ratio, dst.block_ratio),) if src.is_state else ()),
    ):
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


def differences(src: CacheGeometry, dst: CacheGeometry, *, convert: bool) -> Iterator[tuple[TensorSpec, Difference]]:
    """Every pair of tensors of two ranks that have coordinates in common and cannot be copied."""
    known: dict[tuple[int, int, int, int], Difference | None] = {}
    for source, target, heads in _meetings(src, dst):
        kind = copied(source, target, heads)
        if kind in known:
            found = known[kind]
        else:
            found = difference(source, target, heads, convert=convert)
            if kind is not None:
                known[kind] = found
        if found is not None:
            yield source, found


def converts(src: CacheGeometry, dst: CacheGeometry) -> bool:
    """Whether anything that two ranks have in common is converted on its way."""
    meetings = (meeting for meeting in _meetings(src, dst) if copied(*meeting) is None)
    return any(part.elements.converts for meeting in meetings for part in parts(*meeting))


def _meetings(src: CacheGeometry, dst: CacheGeometry) -> Iterator[tuple[TensorSpec, TensorSpec, range]]:
    """Pairs of tensors with the heads that they have in common; a pair once, however many layers it shares."""
    sources = src.places
    seen: set[tuple[int, int]] = set()
    for place, targets in dst.places.items():
        for source, target in product(sources.get(place, ()), targets):
            key = (id(source), id(target))
            heads = range(
                max(source.heads.start, target.heads.start),
                min(source.heads.stop, target.heads.stop),
            )
            if heads and key not in seen:
                seen.add(key)
                yield source, target, heads


def _scales(src: TensorSpec, dst: TensorSpec, heads: range) -> list[tuple[float, float]]:
    """The scales of both sides: one pair for all these heads, or a pair for each."""
    mine, theirs = src.scales(heads), dst.scales(heads)
    count = max(len(mine), len(theirs))
    return list(zip(_spread(mine, count), _spread(theirs, count), strict=True))


def _spread(scales: tuple[float, ...], count: int) -> tuple[float, ...]:
    return scales * count if len(scales) == 1 else scales
