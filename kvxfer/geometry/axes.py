"""Axis strings: the names of a tensor's axes, in the tensor's own order.

`"kv block head token dim"` names five axes. An axis may be split once: `dim/8` is its outer part and `dim%8` the inner
8 (the vectorised K cache of several engines). `block` and `token` are never split, because block ids and token ranges
address them.
"""

import re
from dataclasses import dataclass
from typing import Final

from kvxfer.errors import GeometryError

__all__ = ["AXIS_NAMES", "Axis", "Factor", "bind_axes", "parse_axes"]

AXIS_NAMES: Final = ("block", "layer", "kv", "head", "token", "dim")
"""Every axis that a cache tensor may have. `block` is always there."""

_TERM: Final = re.compile(r"([a-z]+)(?:([/%])([1-9][0-9]*))?")
_NEVER_SPLIT: Final = frozenset({"block", "token", "layer", "kv"})


@dataclass(frozen=True, slots=True)
class Axis:
    """One term of an axis string.

    Attributes:
        name: One of `AXIS_NAMES`.
        split: 0 for a whole axis, else the size of the inner part.
        inner: True for the inner part (`dim%8`), False for the outer (`dim/8`) or a whole axis.
    """

    name: str
    split: int = 0
    inner: bool = False

    def __str__(self) -> str:
        return f"{self.name}{'%' if self.inner else '/'}{self.split}" if self.split else self.name


@dataclass(frozen=True, slots=True)
class Factor:
    """One axis, or part of a split axis, bound to memory: index i is coordinate `i * unit`, `i * stride` bytes away."""

    count: int
    unit: int
    stride: int


def parse_axes(text: str) -> tuple[Axis, ...]:
    """Read an axis string.

    Raises:
        GeometryError: If a term is unknown, an axis is named twice, a split is incomplete, or `block` is missing.
    """
    axes: list[Axis] = []
    for term in text.split():
        match = _TERM.fullmatch(term)
        if match is None or match[1] not in AXIS_NAMES:
            raise GeometryError(
                f"axes {text!r}: {term!r} is not one of {', '.join(AXIS_NAMES)} (or a split, like dim/8)"
            )
        axis = Axis(match[1], int(match[3] or 0), match[2] == "%")
        if axis.split and axis.name in _NEVER_SPLIT:
            raise GeometryError(f"axes {text!r}: {axis.name} cannot be split; only head and dim can")
        if axis in axes or any(a.name == axis.name and not (a.split and axis.split) for a in axes):
            raise GeometryError(f"axes {text!r}: {axis.name} is named twice")
        axes.append(axis)
    for name in AXIS_NAMES:
        parts = [a for a in axes if a.name == name and a.split]
        if parts and (len(parts) != 2 or parts[0].split != parts[1].split or parts[0].inner == parts[1].inner):
            shown = " ".join(str(part) for part in parts)
            raise GeometryError(
                f"axes {text!r}: a split needs its two parts once each ({name}/n and {name}%n), not {shown}"
            )
    if not any(a.name == "block" for a in axes):
        raise GeometryError(f"axes {text!r}: the axis 'block' is missing")
    return tuple(axes)


def bind_axes(
    axes: tuple[Axis, ...], shape: tuple[int, ...], strides: tuple[int, ...]
) -> dict[str, tuple[Factor, ...]]:
    """Bind parsed axes to a shape and byte strides.

    Returns:
        For each axis that is present its factors, outermost (largest unit) first.

    Raises:
        GeometryError: If the numbers of axes differ, or an inner part is not as long as its split says.
    """
    text = " ".join(map(str, axes))
    if len(axes) != len(shape):
        raise GeometryError(f"axes {text!r} name {len(axes)} axes, but the tensor has {len(shape)}: shape {shape}")
    if len(strides) != len(shape):  # only a peer can say that of a tensor
        raise GeometryError(f"a tensor of {len(shape)} axes ({text!r}) has {len(strides)} strides: {strides}")
    bound: dict[str, list[Factor]] = {}
    for axis, count, stride in zip(axes, shape, strides, strict=True):
        if axis.inner and count != axis.split:
            raise GeometryError(f"axes {text!r}: {axis} must be {axis.split} long, but the tensor has {count} there")
        unit = axis.split if axis.split and not axis.inner else 1
        bound.setdefault(axis.name, []).append(Factor(count, unit, stride))
    return {name: tuple(sorted(factors, key=lambda f: -f.unit)) for name, factors in bound.items()}
