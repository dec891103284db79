"""Lists of numbers in frames: packed words of four bytes, little-endian."""

import array
import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

__all__ = ["pack_f32", "pack_u32", "unpack_f32", "unpack_u32"]

_Number = TypeVar("_Number", int, float)


def pack_f32(values: Iterable[float]) -> bytes:
    """Pack numbers as little-endian float32."""
    return _swapped(array.array("f", values)).tobytes()


def unpack_f32(data: bytes) -> Sequence[float]:
    """Inverse of `pack_f32`.

    Raises:
        ValueError: If the length is not a multiple of four.
    """
    return _swapped(array.array("f", data))


def pack_u32(values: Iterable[int]) -> bytes:
    """Pack ids as little-endian u32.

    Raises:
        OverflowError: If a value is negative or does not fit into 32 bits.
    """
    return _swapped(array.array("I", values)).tobytes()


def unpack_u32(data: bytes) -> Sequence[int]:
    """Inverse of `pack_u32`.

    Raises:
        ValueError: If the length is not a multiple of four.
    """
    return _swapped(array.array("I", data))


def _swapped(words: "array.array[_Number]") -> "array.array[_Number]":
    """From this machine's order of bytes to that of frames, or back."""
    if sys.byteorder == "big":
        words.byteswap()
    return words
