"""Types of the fields of messages, with their bounds (PROTOCOL.md sections 2.3 and 2.5)."""

from enum import IntEnum, IntFlag, unique
from typing import Annotated, Final

import msgspec

from kvxfer.limits import MAX_NAME, MAX_SCALES, MAX_SUMS, MAX_TRACE

__all__ = [
    "I64",
    "ROUTE_NAMES",
    "U32",
    "U64",
    "Bytes32",
    "Capability",
    "Hash",
    "Ids",
    "Name",
    "Packed64",
    "Payload",
    "Reason",
    "RequestId",
    "Route",
    "Scale",
    "Status",
    "TraceParent",
    "torn",
]

U32 = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF_FFFF)]
# msgspec's bounds are signed 64-bit; every u64 of the protocol is an address or a count and stays below 2^63
U64 = Annotated[int, msgspec.Meta(ge=0, le=0x7FFF_FFFF_FFFF_FFFF)]
I64 = Annotated[int, msgspec.Meta(ge=-0x8000_0000_0000_0000, le=0x7FFF_FFFF_FFFF_FFFF)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Reason = Annotated[str, msgspec.Meta(max_length=1024)]
Hash = Annotated[bytes, msgspec.Meta(max_length=64)]
Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Payload = Annotated[bytes, msgspec.Meta(max_length=65536)]
TraceParent = Annotated[str, msgspec.Meta(max_length=MAX_TRACE)]
# four bytes a number; one a head at most
Scale = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_SCALES, description="float32 numbers, little-endian, packed")]
# a struct with one of these checks it in __post_init__: a length that is no multiple of four is refused while decoding
Ids = Annotated[bytes, msgspec.Meta(description="u32 numbers, little-endian, packed")]
Packed64 = Annotated[bytes, msgspec.Meta(max_length=16 * MAX_SUMS, description="u64 numbers, little-endian, packed")]


@unique
class Route(IntEnum):
    """How the bytes of one transfer travel."""

    UNKNOWN = 0
    STAGED = 1
    DIRECT = 2
    PULL = 3
    MAPPED = 4

    @classmethod
    def _missing_(cls, value: object) -> "Route | None":
        return cls.UNKNOWN if isinstance(value, int) else None


ROUTE_NAMES: Final = {route: route.name.lower() if route else "" for route in Route}
"""How stats name them."""


@unique
class Status(IntEnum):
    """Outcome of a chunk, or of a whole transfer."""

    UNKNOWN = 0
    OK = 1
    FAILED = 2
    CANCELLED = 3
    EXPIRED = 4
    IN_DOUBT = 5

    @classmethod
    def _missing_(cls, value: object) -> "Status | None":
        return cls.UNKNOWN if isinstance(value, int) else None


class Capability(IntFlag):
    """What one side can do; bits are appended in `proto/registry.toml`. Unknown bits are ignored."""

    STAGED = 1 << 0
    DIRECT = 1 << 1
    PULL = 1 << 2
    MAPPED = 1 << 3
    STREAMING = 1 << 4
    CONVERT = 1 << 5
    SUMS = 1 << 7
    GATES = 1 << 8
    RENEWED = 1 << 9


def torn(packed: bytes) -> ValueError:
    """Why a list is refused whose length is no multiple of four; msgspec makes an error of its own of it."""
    return ValueError(f"{len(packed)} bytes are no whole number of words of 4")
