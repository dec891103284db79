"""Scales: value = stored * scale, one number for a tensor or one for each of its heads.

A scale is read once, when its tensor is registered, and is from then on a plain number of 32 bits that crosses the wire
with the rest of the description.
"""

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any, cast

from kvxfer.errors import GeometryError
from kvxfer.limits import MAX_SCALES

if TYPE_CHECKING:
    import torch

__all__ = ["check_scale", "read_scale"]


def read_scale(scale: "torch.Tensor | Any | None", heads: int) -> tuple[float, ...]:
    """The numbers of a scale tensor; empty without one. Waits for the device that holds it.

    Args:
        scale: float32, of shape () or (heads,).
        heads: Heads that the cache tensor holds.

    Raises:
        GeometryError: If it is no tensor, or of another dtype or shape.
    """
    if scale is None:
        return ()
    if not hasattr(scale, "data_ptr"):
        raise GeometryError(f"scale must be a torch.Tensor of dtype float32, not {type(scale).__name__}")
    dtype, shape = str(scale.dtype).removeprefix("torch."), tuple(scale.shape)
    if dtype != "float32":
        raise GeometryError(f"scale must be of dtype float32, not {dtype}; pass scale.float()")
    if shape not in ((), (heads,)):
        raise GeometryError(f"scale must have the shape () or ({heads},), one number a head, not {shape}")
    numbers = cast("Any", scale).detach().cpu().reshape(-1)  # torch leaves the type of its lists open
    return tuple(map(float, numbers.tolist()))


def check_scale(name: str, scale: Sequence[float], heads: int) -> None:
    """Check the numbers of a scale, one's own or a peer's.

    Raises:
        GeometryError: If there are neither none, one, nor one a head, or one is not finite and above 0.
    """
    if len(scale) > MAX_SCALES:
        raise GeometryError(f"{name}: scale has {len(scale)} numbers, but at most {MAX_SCALES} can be used")
    if len(scale) not in {0, 1, heads}:
        raise GeometryError(f"{name}: scale has {len(scale)} numbers for {heads} heads; give one, or one for each head")
    wrong = next((at for at, number in enumerate(scale) if not 0 < number < inf), None)
    if wrong is not None:
        raise GeometryError(f"{name}: scale[{wrong}] is {scale[wrong]:g}, but a scale must be finite and above 0")
