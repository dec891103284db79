"""Element types that a copy can convert into each other, by torch's names without the prefix."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = ["CONVERTIBLE", "convertible"]

CONVERTIBLE: Final[Mapping[str, int]] = MappingProxyType(
    {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
)
"""Bytes of an element by dtype. Integers are not among them: what their bits mean is the engine's secret."""


def convertible(src: str, dst: str) -> bool:
    """Whether a copy can convert one dtype into the other."""
    return src in CONVERTIBLE and dst in CONVERTIBLE
