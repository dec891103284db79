"""Lists of numbers in frames: packed words of four bytes, little-endian."""

import array
import sys
from collections.abc import Iterable, Sequence

__all__ = ["pack_f32", "pack_u32", "unpack_f32", "unpack_u32"]


def pack_f32(values: Iterable[float]) -> bytes:
    """Pack numbers as little-endian float32."""
    packed = array.array("f", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_f32(data: bytes) -> Sequence[float]:
    """Inverse of `pack_f32`.

    Raises:
        ValueError: If the length is not a multiple of four.
    """
    unpacked = array.array("f")
    unpacked.frombytes(data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked


def pack_u32(values: Iterable[int]) -> bytes:
    """Pack ids as little-endian u32.

    Raises:
        OverflowError: If a value is negative or does not fit into 32 bits.
    """
    packed = array.array("I", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_u32(data: bytes) -> Sequence[int]:
    """Inverse of `pack_u32`.

    Raises:
        ValueError: If the length is not a multiple of four.
    """
    unpacked = array.array("I")
    unpacked.frombytes(data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked
