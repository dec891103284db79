"""Conversion of elements on a CPU: what the kernel computes on a GPU, bit for bit.

    result = round(float32(element) * multiply / divide)

Product and quotient are rounded to float32 each, and the result to the nearest element of its dtype, to an even one
where two are equally near. What is too large becomes the largest finite number of an 8-bit dtype, and infinity in the
others. A NaN stays one, in the one form that `NAN` gives, since processors differ in sign and payload.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer.errors import MissingExtraError
from kvxfer.geometry.elements import Elements

__all__ = ["NAN", "check_exact", "convert"]

Bits: TypeAlias = NDArray[np.signedinteger[Any]]

NAN: Final[Mapping[str, int]] = MappingProxyType(
    {"float32": 0x7FC0_0000, "float16": 0x7E00, "bfloat16": 0x7FC0, "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7F}
)
"""The bits of a NaN by dtype."""
_SATURATING: Final = frozenset({"float8_e4m3fn", "float8_e5m2"})
_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def convert(bits: Bits, elements: Elements, multiply: np.float32, divide: np.float32) -> Bits:
    """Convert an array of elements; both are seen as integers of their size, of any shape."""
    given = _tensor(bits).view(getattr(torch, elements.src))
    values: NDArray[np.float32] = given.to(torch.float32).numpy()
    with np.errstate(all="ignore"):  # infinities and NaN are results like others
        values = values * multiply
        values /= divide
    if elements.dst in _SATURATING:
        largest = torch.finfo(getattr(torch, elements.dst)).max
        np.clip(values, -largest, largest, out=values)  # lets a NaN be
    rounded = _tensor(values).to(getattr(torch, elements.dst))
    result: Bits = rounded.view(_INTEGERS[elements.dst_bytes]).numpy()
    np.copyto(result, NAN[elements.dst], where=np.isnan(values))
    return result


def check_exact(ptx: str) -> None:
    """Refuse a compiled conversion that takes subnormal numbers for zero, as compilers before Triton 3.6 make it.

    Args:
        ptx: Its instructions, as the compiler wrote them.

    Raises:
        MissingExtraError: It would not give the bits that `convert` does.
    """
    if ".ftz" in ptx:
        raise MissingExtraError(
            "this version of Triton takes subnormal numbers for zero, so dtypes cannot be converted on a GPU: "
            "pip install 'torch>=2.10' (with Triton 3.6 or later)"
        )


def _tensor(values: NDArray[Any]) -> torch.Tensor:
    """An array as a tensor that shows the same memory."""
    tensor: torch.Tensor = cast("Any", torch).from_numpy(values)  # torch leaves its argument untyped
    return tensor
