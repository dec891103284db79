"""The messages of the control stream, as msgspec structs with bounded fields (PROTOCOL.md sections 2.3, 2.5 and 3).

Each message is one MessagePack array: an integer tag, then the fields in the order written here. Tail fields that are
not known are ignored, missing ones have defaults: so fields are appended, and never moved or removed. Bulk ids travel
as packed little-endian u32, addresses and byte counts as u64, durations in milliseconds, instants never.
"""

import array
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import IntFlag, unique
from typing import Annotated, Any, Final, TypeAlias, TypeVar, get_args

import msgspec

from kvxfer.errors import Code, OpenEnum
from kvxfer.names import MAX_FACTS, MAX_HANDLE, MAX_NAME, MAX_REQUEST, MAX_SCALES, MAX_SUMS, MAX_TENSORS, MAX_TRACE

__all__ = [
    "BY_TAG",
    "FOREVER_MS",
    "I64",
    "IGNORABLE_TAG",
    "MAX_CHUNKS",
    "MAX_PLACES",
    "MAX_SELECTIONS",
    "MAX_SPANS",
    "MAX_TENSORS",
    "MAX_TICKETS",
    "ROUTE_NAMES",
    "TOKEN_BYTES",
    "U32",
    "U64",
    "WHOLE",
    "WIRE_MIN",
    "WIRE_VERSION",
    "Abandon",
    "Accept",
    "Agent",
    "AgentBody",
    "Arrived",
    "Bytes32",
    "Cancel",
    "Capability",
    "Check",
    "Claim",
    "Fetch",
    "Goodbye",
    "Hash",
    "Hello",
    "Ids",
    "KvAgentResult",
    "MappedMemory",
    "MemorySpan",
    "Message",
    "Name",
    "Packed64",
    "Payload",
    "Ping",
    "Place",
    "Read",
    "Ready",
    "Reason",
    "Refuse",
    "Release",
    "Renewed",
    "RequestId",
    "Reserve",
    "Route",
    "Scale",
    "Selection",
    "Span",
    "Status",
    "Sums",
    "TensorFrame",
    "TicketRef",
    "Timings",
    "TraceParent",
    "Welcome",
    "pack_f32",
    "pack_u32",
    "torn",
    "unpack_f32",
    "unpack_u32",
]

# --- packed numbers

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


# --- fields

U32 = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF_FFFF)]
# msgspec's bounds are signed 64-bit; every u64 of the protocol is an address or a count and stays below 2^63
U64 = Annotated[int, msgspec.Meta(ge=0, le=0x7FFF_FFFF_FFFF_FFFF)]
I64 = Annotated[int, msgspec.Meta(ge=-0x8000_0000_0000_0000, le=0x7FFF_FFFF_FFFF_FFFF)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_REQUEST)]
Reason = Annotated[str, msgspec.Meta(max_length=1024)]
Hash = Annotated[bytes, msgspec.Meta(max_length=64)]
Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Payload = Annotated[bytes, msgspec.Meta(max_length=65536)]
TraceParent = Annotated[str, msgspec.Meta(max_length=MAX_TRACE)]
# four bytes a number; one a head at most
Scale = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_SCALES, description="float32 numbers, little-endian, packed")]
# a struct with one of these checks it in __post_init__: a length of no whole words is refused while decoding
Ids = Annotated[bytes, msgspec.Meta(description="u32 numbers, little-endian, packed")]
Packed64 = Annotated[bytes, msgspec.Meta(max_length=16 * MAX_SUMS, description="u64 numbers, little-endian, packed")]


@unique
class Route(OpenEnum):
    """How the bytes of one transfer travel."""

    UNKNOWN = 0
    STAGED = 1
    DIRECT = 2
    PULL = 3
    MAPPED = 4


ROUTE_NAMES: Final = {route: route.name.lower() if route else "" for route in Route}
"""How stats name them."""


@unique
class Status(OpenEnum):
    """Outcome of a chunk, or of a whole transfer."""

    UNKNOWN = 0
    OK = 1
    FAILED = 2
    CANCELLED = 3
    EXPIRED = 4
    IN_DOUBT = 5


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


def torn(packed: bytes, word: int = 4) -> ValueError:
    """Why a list is refused whose length is no multiple of its words; msgspec makes an error of its own of it."""
    return ValueError(f"{len(packed)} bytes are no whole number of words of {word}")


# --- messages

WIRE_VERSION: Final = 2
"""The protocol version that this package speaks best."""
WIRE_MIN: Final = 2
"""The oldest one it still speaks."""
WHOLE: Final = 0xFFFF_FFFF
"""Chunk number that stands for the transfer as a whole in `KvAgentResult`."""
IGNORABLE_TAG: Final = 128
"""Messages with this tag or a higher one may be ignored by a peer that does not know them."""

FOREVER_MS: Final = 0xFFFF_FFFF
"""A time limit that is none."""
MAX_CHUNKS: Final = 1 << 20
"""Most chunks of one transfer, so that a peer's number never decides how much memory a table of them takes."""
MAX_TICKETS: Final = 4096
"""Most tickets in one `Claim`; who has more sends more frames."""
MAX_PLACES: Final = 1024
"""Most places in the ring of one `Reserve`."""
MAX_SELECTIONS: Final = 4096
"""Most selections in one `Fetch`."""
TOKEN_BYTES: Final = 16
"""What names the turns that two agents take."""
MAX_SPANS: Final = 1024
"""Most layer groups, and so most spans of one side."""

Chunks = Annotated[int, msgspec.Meta(ge=0, le=MAX_CHUNKS)]
Axes = Annotated[list[U32], msgspec.Meta(max_length=16)]
Strides = Annotated[list[I64], msgspec.Meta(max_length=16)]
Spans = Annotated[list["Span"], msgspec.Meta(max_length=MAX_SPANS)]


class TicketRef(msgspec.Struct, frozen=True, array_like=True):
    """What of a ticket travels: enough for the prefill rank to find the offer and to check the MAC."""

    request: RequestId
    attempt: U32
    mac: Hash

    def __repr__(self) -> str:  # a ticket is a secret, also in tracebacks and logs
        return f"TicketRef(request={self.request!r}, attempt={self.attempt}, mac=...)"


class Selection(msgspec.Struct, frozen=True, array_like=True):
    """Part of a tensor class that one decode rank wants from one prefill rank: layers x a range of heads."""

    group: Name
    part: Name
    kv: Name
    layers: Ids
    head_start: U32
    head_stop: U32

    def __post_init__(self) -> None:
        if len(self.layers) % 4:
            raise torn(self.layers)


class Span(msgspec.Struct, frozen=True, array_like=True):
    """One side's blocks of one group, in token order, from the one that holds `first_token` on."""

    group: Name
    first_token: U32
    ids: Ids

    def __post_init__(self) -> None:
        if len(self.ids) % 4:
            raise torn(self.ids)


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Staging memory for a chunk, and then for another one: a place in the ring of a transfer."""

    address: U64
    length: U64


class Timings(msgspec.Struct, frozen=True, array_like=True):
    """Where the sender's time went, in microseconds."""

    queued_us: U64 = 0
    gather_us: U64 = 0
    post_us: U64 = 0
    wire_us: U64 = 0


class MemorySpan(msgspec.Struct, frozen=True, array_like=True):
    """Registered memory that a peer may name in descriptors."""

    kind: Name
    device: U32
    address: U64
    length: U64


class MappedMemory(msgspec.Struct, frozen=True, array_like=True):
    """An allocation, or pieces of one, that a trusted peer on the same host may map, with what it needs for that."""

    kind: Name
    device: Name
    address: U64
    length: U64
    handle: Annotated[bytes, msgspec.Meta(max_length=MAX_HANDLE)]


class TensorFrame(msgspec.Struct, frozen=True, array_like=True):
    """One cache tensor. `shape` and `strides` (bytes) follow `axes`; `base` is 0 unless the peer is trusted with it.

    `scale` has one number, one for each head, or none for 1: value = stored * scale.
    """

    group: Name
    part: Name
    kv: Name
    axes: Name
    shape: Axes
    strides: Strides
    layers: Ids
    head_start: U32
    head_stop: U32
    dtype: Name
    item_bytes: U32
    base: U64
    block_ratio: U32 = 1
    tokens_per_row: U32 = 1
    interleave_rank: U32 = 0
    interleave_of: U32 = 1
    interleave_chunk: U32 = 0
    null_block: Annotated[int, msgspec.Meta(ge=-1, le=0xFFFF_FFFF)] = -1
    kind: Name = "DRAM"
    device: U32 = 0
    scale: Scale = b""

    def __post_init__(self) -> None:
        if len(self.layers) % 4:
            raise torn(self.layers)
        if len(self.scale) % 4:
            raise torn(self.scale)


class AgentBody(msgspec.Struct, frozen=True, array_like=True):
    """The second phase of `Agent`, decoded only when the facts of the first agree."""

    fabric: Name
    metadata: bytes
    tensors: Annotated[list[TensorFrame], msgspec.Meta(max_length=MAX_TENSORS)]
    staging: Annotated[list[MemorySpan], msgspec.Meta(max_length=1024)] = []
    max_chunk_bytes: U64 = 0
    host: Name = ""
    mapped: Annotated[list[MappedMemory], msgspec.Meta(max_length=MAX_TENSORS)] = []
    gates: U64 = 0
    locks: Annotated[bytes, msgspec.Meta(max_length=MAX_HANDLE)] = b""
    renewals: U32 = 0
    process: U64 = 0


class _Greeting(msgspec.Struct, frozen=True, array_like=True):
    """What each side says of itself first."""

    wire: U32
    wire_min: U32
    package: Name
    engine: Name
    epoch: Hash
    incarnation: Bytes32
    rank: U32
    world: U32
    capabilities: U64
    nonce: Hash
    heartbeat_ms: U32


class Hello(_Greeting, frozen=True, array_like=True, tag=1):
    """First frame of the side that opened the stream (the decode rank)."""


class Welcome(_Greeting, frozen=True, array_like=True, tag=2):
    """The answer to `Hello`; `proof` is empty when no secret is configured."""

    proof: Hash = b""


class Agent(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """What a side is: facts that must agree, and then (packed apart) its transport and its geometry.

    `same` proves that it is the process of its incarnation, and `proof` that it knows the secret.
    """

    facts: Annotated[list[tuple[Name, Reason]], msgspec.Meta(max_length=MAX_FACTS)]
    body: memoryview  # of the frame that it came in, which may be long: it is not copied out of it
    same: Bytes32
    proof: Hash = b""


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Sent when nothing else was, so that silence means something."""


class Claim(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """These requests still wait for a place here; renews the leases of their offers."""

    tickets: Annotated[list[TicketRef], msgspec.Meta(max_length=MAX_TICKETS)]


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Asks for a part of a request's cache. `routes` are those this side accepts, best first.

    With `lease_ms` it also grants chunks ahead: all, on routes in place, or with a `ring`, on `STAGED`, the first
    `ring_chunks`, as a `Reserve` would. The first answer uses that grant or voids it.
    """

    transfer: U64
    ticket: TicketRef
    selections: Annotated[list[Selection], msgspec.Meta(max_length=MAX_SELECTIONS)]
    spans: Spans
    token_start: U32
    token_stop: U32
    routes: Annotated[list[Route], msgspec.Meta(max_length=16)]
    max_extent_bytes: U64
    timeout_ms: U32
    lease_ms: U32 = 0
    generation: U64 = 0
    agreement: Hash = b""
    ring: Annotated[list[Place], msgspec.Meta(max_length=MAX_PLACES)] = []
    ring_chunks: Chunks = 0
    token: Annotated[bytes, msgspec.Meta(max_length=TOKEN_BYTES)] = b""
    fenced: bool = False
    trace: TraceParent = ""


class Accept(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The offer exists and the plan is made; chunk numbers follow the grid (PROTOCOL.md section 6)."""

    transfer: U64
    route: Route
    bytes: U64
    spans: Spans
    layers_per_chunk: U32
    tokens_per_chunk: U32
    chunks: Chunks
    digest: Hash
    why: Name = ""
    ahead: bool = False
    pieces: U64 = 0
    predicted_us: U32 = 0
    fenced: bool = False
    windows_per_band: U32 = 1


class Refuse(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """This transfer will not happen. Nothing of it is in flight and nothing will be."""

    transfer: U64
    code: Code
    reason: Reason
    retry_after_ms: U32 = 0


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The first so many chunks are ready to go. On `pull` those that are new may be read for `lease_ms`.

    The ids in `spans` follow those of `Accept` and of earlier frames: the offer's block lists have grown. One without
    chunks before `Accept` says that the fetch waits for its offer, and what it granted ahead is void.
    """

    transfer: U64
    chunks: Chunks
    lease_ms: U32 = 0
    spans: Spans = []
    generation: U64 = 0


class Reserve(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The grant: the first so many chunks may be written; those that are new, to begin within `lease_ms`.

    On `staged` the chunks from the first new one on take turns in `ring`; an empty one is that of the grant before. The
    first `copied` chunks have left their places. A ring with a `token` may be granted to more chunks than it has
    places: of how many have arrived, and have left, the two agents notify each other by that token.
    """

    transfer: U64
    chunks: Chunks
    lease_ms: U32
    generation: U64 = 0
    ring: Annotated[list[Place], msgspec.Meta(max_length=MAX_PLACES)] = []
    copied: Chunks = 0
    token: Annotated[bytes, msgspec.Meta(max_length=TOKEN_BYTES)] = b""


class Read(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """`pull` only: the first so many chunks have been read."""

    transfer: U64
    chunks: Chunks


class KvAgentResult(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Outcome of the transfer as a whole (`chunk == WHOLE`), or why it will fail; registry name KV_AGENT_RESULT.

    With `chunk == WHOLE` and any status but `IN_DOUBT` it also promises that no write of this transfer is posted and
    none will be.
    """

    transfer: U64
    chunk: U32
    status: Status
    bytes: U64
    last: bool
    code: Code = Code.UNKNOWN
    reason: Reason = ""
    digest: Hash = b""
    timings: Timings = Timings()
    payload: Payload = b""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Ends a transfer and keeps the claim. Answered by `KvAgentResult` with `chunk == WHOLE`."""

    transfer: U64
    code: Code = Code.CANCELLED


class Release(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """This rank is done with the request (also: needs nothing of it); ends its claim."""

    ticket: TicketRef
    code: Code = Code.UNKNOWN


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """The sender of this frame is draining: transfers finish, new ones are refused."""

    code: Code = Code.DRAINING
    reason: Reason = ""


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """The first so many chunks have arrived (on `pull`: were readable and unchanged while they were read).

    `timings` are those of the chunks that are new.
    """

    transfer: U64
    chunks: Chunks
    timings: Timings = Timings()


class Check(msgspec.Struct, frozen=True, array_like=True, tag=130):
    """Of each fetch that follows on this stream, sums are wanted of one chunk in `every`; of none if it is 0."""

    every: U32


class Sums(msgspec.Struct, frozen=True, array_like=True, tag=131):
    """What a chunk adds up to at the prefill rank (PROTOCOL.md section 6.7), said before it is said to have arrived."""

    transfer: U64
    chunk: U32
    sums: Packed64

    def __post_init__(self) -> None:
        if len(self.sums) % 8:
            raise torn(self.sums, 8)


class Abandon(msgspec.Struct, frozen=True, array_like=True, tag=132):
    """`pull` only: the transfer is given up while reads of it are under way. `Cancel` follows when they have ended."""

    transfer: U64
    code: Code = Code.CANCELLED


class Renewed(msgspec.Struct, frozen=True, array_like=True, tag=133):
    """The agent of this rank was made anew: who posts to it from now on must know its metadata (section 7.6)."""

    renewals: U32
    metadata: bytes


Message: TypeAlias = (
    Hello
    | Welcome
    | Agent
    | Ping
    | Claim
    | Fetch
    | Accept
    | Refuse
    | Ready
    | Reserve
    | Read
    | Arrived
    | KvAgentResult
    | Cancel
    | Release
    | Goodbye
    | Check
    | Sums
    | Abandon
    | Renewed
)
"""Every message of version 2."""

BY_TAG: Final[Mapping[int, type[Any]]] = {kind.__struct_config__.tag: kind for kind in get_args(Message)}
"""The same by their tags."""
