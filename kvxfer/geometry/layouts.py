"""Names of layouts: what vLLM calls the order of a cache's axes, as axis strings.

vLLM names a layout by one letter an axis, in the order of memory: L layer, B block, N token in the block, H head, C the
content of one token of one head. For attention, C is K and V side by side, so it becomes `kv dim` here. `NHD` and `HND`
say only what a block of K, or one of V, looks like inside.

A name stands for an axis string wherever one is taken. Only the axis string is kept, so names never travel.
"""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from kvxfer.errors import GeometryError
from kvxfer.geometry.axes import Axis

__all__ = ["LAYOUTS", "across_layers", "bind_layout", "expand_layout"]

LAYOUTS: Final = MappingProxyType(
    {
        "NHD": "block token head dim",
        "HND": "block head token dim",
        "LBNHC": "layer block token head kv dim",
        "LBHNC": "layer block head token kv dim",
        "LHBNC": "layer head block token kv dim",
        "BLNHC": "block layer token head kv dim",
        "BLHNC": "block layer head token kv dim",
        "BHLNC": "block head layer token kv dim",
    }
)
"""The axis string of each name. The last six are the members of vLLM's `KVCacheLayout`."""

_CONTENT: Final = "C"


def expand_layout(axes: str) -> str:
    """The axis string that a name stands for; any other text as it is, with single spaces."""
    return LAYOUTS.get(axes.strip(), " ".join(axes.split()))


def bind_layout(
    axes: str, shape: Sequence[int], strides: Sequence[int]
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Fit an axis string, or the name of a layout, to a tensor.

    A tensor that a name with C describes has one axis a letter, its content whole; a tensor of one layer may do without
    the layer axis.

    Args:
        axes: An axis string, or a name of `LAYOUTS`; its axes in the tensor's order.
        shape: Elements per axis.
        strides: Distance per axis, in any unit.

    Returns:
        The axis string, and the shape and strides that go with it: the content is taken apart into K and V.

    Raises:
        GeometryError: If the tensor has another number of axes than the name, or the content no two equal halves.
    """
    name, text, sizes, steps = axes.strip(), expand_layout(axes), tuple(shape), tuple(strides)
    if name not in LAYOUTS or not name.endswith(_CONTENT):
        return text, sizes, steps
    if len(sizes) not in {len(name), len(name) - 1}:
        raise GeometryError(
            f"layout {name} names {len(name)} axes ({len(name) - 1} for one layer), but the tensor has {len(sizes)}: "
            f"shape {sizes}; where K and V are an axis of their own, write the axis string: {text!r}"
        )
    if sizes[-1] % 2:
        raise GeometryError(
            f"layout {name}: the last axis holds K and V side by side, but {sizes[-1]} is odd; describe a latent cache "
            "by an axis string such as 'block token dim'"
        )
    if len(sizes) < len(name):
        text = " ".join(term for term in text.split() if term != "layer")
    half = sizes[-1] // 2
    return text, (*sizes[:-1], 2, half), (*steps[:-1], half * steps[-1], steps[-1])


def across_layers(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The same inside of a block, with all layers of a block next to each other and K and V of each layer together."""
    inside = tuple(axis for axis in axes if axis.name not in {"block", "layer"})
    kv = () if any(axis.name == "kv" for axis in inside) else (Axis("kv"),)
    return (Axis("block"), Axis("layer"), *kv, *inside)
