"""A bare list of tensors, one a layer, as the cache tensors of one group."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

from kvxfer.errors import GeometryError
from kvxfer.geometry.cache import CacheTensor
from kvxfer.geometry.spec import EVERY_TOKEN, Interleave

if TYPE_CHECKING:
    import torch

__all__ = ["group"]

_Layer: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor] | list[torch.Tensor]"
_Scale: TypeAlias = "_Layer | None"
_T = TypeVar("_T")


def group(
    tensors: "Iterable[_Layer]",
    axes: str,
    *,
    layers: Iterable[int] | None = None,
    heads: range | None = None,
    kv: str | None = None,
    group: str = "default",
    part: str = "",
    tokens: Interleave = EVERY_TOKEN,
    kernel_blocks_per_id: int = 1,
    tokens_per_row: int = 1,
    scale: "torch.Tensor | Sequence[_Layer] | None" = None,
) -> list[CacheTensor]:
    """Describe a list of tensors, one a layer, in order.

    Args:
        tensors: For each layer its tensor, or the pair of its K and its V.
        axes: Of every tensor, as in `CacheTensor`; a name such as `"NHD"` will do.
        layers: Their global numbers, in the same order; 0, 1, 2 and so on by default.
        heads: As in `CacheTensor`, as are all that follow.
        kv: Not for pairs, which say it themselves.
        group: Block-address space.
        part: Tells tensors of one layer with other meaning apart.
        tokens: Which tokens they hold, under context parallelism.
        kernel_blocks_per_id: Blocks of the tensors that one block id stands for.
        tokens_per_row: Tokens that one index of the token axis stands for.
        scale: Of every tensor, as in `CacheTensor`; or a list with one for each layer, where a pair of tensors may have
            a pair.

    Returns:
        One `CacheTensor` a tensor, for `Worker` or `CacheGeometry.of`. They keep references to the tensors.

    Raises:
        GeometryError: If the numbers of tensors, layers and scales differ, or a pair is not one.
    """
    given = _listed("tensors", tensors)
    numbers = _listed("layers", range(len(given)) if layers is None else layers)
    if len(numbers) != len(given):
        raise GeometryError(f"{len(given)} tensors were given, but layers= names {len(numbers)}: give one a layer")
    alike: Sequence[_Scale] = scale if isinstance(scale, tuple | list) else [cast("_Scale", scale)] * len(given)
    if len(alike) != len(given):
        raise GeometryError(f"{len(given)} tensors were given, but scale= has {len(alike)}: give one for all, or each")
    found: list[CacheTensor] = []
    for number, layer, own in zip(numbers, given, alike, strict=True):
        halves = _halves(number, layer, kv)
        for (half, tensor), factor in zip(halves, _scales(number, layer, own, len(halves)), strict=True):
            found.append(
                CacheTensor(
                    tensor,
                    axes,
                    layers=[number],
                    heads=heads,
                    kv=half,
                    group=group,
                    part=part,
                    tokens=tokens,
                    kernel_blocks_per_id=kernel_blocks_per_id,
                    tokens_per_row=tokens_per_row,
                    scale=factor,
                )
            )
    return found


def _listed(what: str, given: "Iterable[_T]") -> "list[_T]":
    """Callers may be untyped: a tensor can be iterated over, but is no list of what the layers have."""
    if hasattr(given, "data_ptr") or not hasattr(given, "__iter__"):
        raise GeometryError(f"{what}= must be a list, with one entry for each layer, not {type(given).__name__}")
    return list(given)


def _scales(number: int, layer: "_Layer", own: "_Scale", tensors: int) -> "Sequence[torch.Tensor | None]":
    """The scale of each tensor of one layer."""
    if not isinstance(own, tuple | list):
        return [own] * tensors
    if not isinstance(layer, tuple | list) or len(own) != tensors:
        held = f"a pair of {tensors} tensors" if isinstance(layer, tuple | list) else "one tensor"
        raise GeometryError(
            f"layer {number}: it is {held}, but scale= has a list of {len(own)} for it: give one scale, or to a pair "
            "of tensors a pair"
        )
    return cast("Sequence[torch.Tensor | None]", own)


def _halves(number: int, layer: "_Layer", kv: str | None) -> "list[tuple[str | None, torch.Tensor]]":
    """The tensors of one layer, and which half each of them holds."""
    if not isinstance(layer, tuple | list):
        return [(kv, layer)]
    pair = cast("Sequence[torch.Tensor]", layer)
    if len(pair) != 2 or kv is not None:
        problem = f"kv={kv!r} cannot be said of a pair" if len(pair) == 2 else f"it has {len(pair)} tensors"
        raise GeometryError(f"layer {number}: a layer is one tensor, or its K and its V as a pair; {problem}")
    return [("k", pair[0]), ("v", pair[1])]
