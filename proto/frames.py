"""Golden frames: every message at least once, the edges of its fields, and what must be refused.

The bytes of a name never change once they are in git: `proto.generate` refuses to write others. What is invalid is
written byte by byte here, since the encoder cannot make it.
"""

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from kvxfer.errors import Code
from kvxfer.protocol.framing import HANDSHAKE_FRAME_LIMIT, SESSION_FRAME_LIMIT, decode, encode, encode_body
from kvxfer.protocol.messages import (
    MAX_CHUNKS,
    MAX_PLACES,
    WHOLE,
    Abandon,
    Accept,
    Agent,
    AgentBody,
    Arrived,
    Cancel,
    Capability,
    Check,
    Claim,
    Fetch,
    Goodbye,
    Hello,
    KvAgentResult,
    MappedMemory,
    MemorySpan,
    Message,
    Ping,
    Place,
    Read,
    Ready,
    Refuse,
    Release,
    Renewed,
    Reserve,
    Route,
    Selection,
    Span,
    Status,
    Sums,
    TensorFrame,
    TicketRef,
    Timings,
    Welcome,
    pack_f32,
    pack_u32,
)
from kvxfer.tools.inspect import registry_name
from proto.schema import to_json

__all__ = ["BODY", "invalid", "plain", "valid"]

MAC = bytes(range(0x40, 0x50))
TICKET = TicketRef("req-1", 0, MAC)
EPOCH = bytes.fromhex("00112233445566778899aabbccddeeff")
INCARNATION, SAME = bytes(range(32, 64)), bytes(range(64, 96))
DIGEST = bytes(range(32))
GROUPS = [Span("attention", 0, pack_u32([7, 3, 4]))]
PLACE = Place(0x7F10_0000_0000, 1_048_576)
MAX_U64 = 2**63 - 1
BODY = AgentBody(
    fabric="nixl/UCX",
    metadata=b"\x00\x01\xfe\xff",
    tensors=[
        TensorFrame("attention", "", "k", "block token head dim", [64, 16, 8, 128], [32768, 2048, 256, 2],
                    pack_u32([0, 1]), 0, 8, "bfloat16", 2, 0),
        TensorFrame("state", "ssm", "", "block head dim", [32, 64, 16], [4096, 64, 4], pack_u32([2]), 0, 64, "float32",
                    4, 0x7F00_0000_0000, 1, 1, 0, 1, 0, 0, "VRAM", 1),
        TensorFrame("attention", "", "v", "block token head dim", [64, 16, 2, 128], [4096, 256, 128, 1],
                    pack_u32([0, 1]), 0, 2, "float8_e4m3fn", 1, 0, scale=pack_f32([0.5, 0.03125])),
    ],
    staging=[MemorySpan("VRAM", 1, 0x7F10_0000_0000, 268_435_456)],
    max_chunk_bytes=33_554_432,
    host="8d1cf3a2-6a0e-4d55-9a1d-2f1b8f6f0c11 pid:[4026531836]",
    mapped=[MappedMemory("cuda_ipc", "00112233445566778899aabbccddeeff", 0x7F00_0000_0000, 268_435_456, bytes(68))],
    gates=0x7F20_0000_0000,
)  # fmt: skip


def plain(value: object) -> object:
    """A struct as JSON data, by field names."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return to_json(int(value) if isinstance(value, Route | Status | Code) else value)


def _pieces() -> list[MappedMemory]:
    """Three pieces that adjoin: two by open files, told in one entry, and one by a fabric handle."""
    gpu, base, size = "00112233445566778899aabbccddeeff", 0x7F00_0000_0000, 20 << 20
    files = b"".join(struct.pack("<IIQI", 4711, 1, size, number) for number in (57, 58))
    fabric = struct.pack("<IIQ", 4711, 8, size) + bytes(range(64))
    return [
        MappedMemory("cuda_vmm", gpu, base, 2 * size, files),
        MappedMemory("cuda_vmm", gpu, base + 2 * size, size, fabric),
    ]


def _agent(facts: list[tuple[str, str]], body: AgentBody, proof: bytes = b"") -> Agent:
    return Agent(facts, memoryview(encode_body(body)), SAME, proof)


def _through_gates() -> Iterator[tuple[str, Message]]:
    """Messages that name gates, or who passes them."""
    gate = 6 << 32 | 2
    yield "agent_with_locks", _agent([], msgspec.structs.replace(BODY, locks=bytes(range(24))))
    fetch = Fetch(1, TICKET, [], GROUPS, 0, 48, [Route.PULL], 33_554_432, 10_000)
    yield "fetch_that_may_read_through_gates", msgspec.structs.replace(fetch, fenced=True)
    yield "accept_that_passes_gates", Accept(1, Route.STAGED, 8192, GROUPS, 2, 32, 1, DIGEST, "", False, 64, 9, True)
    yield "ready_through_a_gate", Ready(1, 6, 30_000, [], gate)
    yield "reserve_through_a_gate", Reserve(1, 1, 30_000, gate, [PLACE])


def _greetings() -> Iterator[tuple[str, Message]]:
    """How a stream begins."""
    hello = (2, 2, "kvxfer 0.1.0", "decode", EPOCH, INCARNATION, 1, 2)
    able = int(Capability.STAGED | Capability.STREAMING)
    yield "hello", Hello(*hello, able, bytes(range(32)), 2000)
    yield "hello_of_another_version", Hello(9, 8, "kvxfer 9.0", "", b"", INCARNATION, 0, 1, MAX_U64, b"", 0)
    yield "welcome", Welcome(*hello, able, bytes(range(32)), 2000, bytes(range(32, 64)))
    yield "welcome_without_secret", Welcome(*hello, able, bytes(range(32)), 2000)
    facts = [("attention/k.dtype", "bfloat16"), ("model", "m")]
    yield "agent", _agent(facts, BODY, bytes(range(32)))
    yield "agent_without_secret", _agent(facts, BODY)
    yield "agent_with_pieces_of_memory", _agent([], msgspec.structs.replace(BODY, mapped=_pieces()))
    yield "agent_of_a_rank_that_holds_nothing", _agent([], AgentBody("", b"", []))


def _messages() -> Iterator[tuple[str, Message]]:
    """Messages that encode to the bytes of their vector, exactly."""
    yield from _through_gates()
    yield from _greetings()
    yield "ping", Ping()
    yield "claim", Claim([TICKET, TicketRef("req-2", 3, MAC)])
    yield "claim_of_nothing", Claim([])
    keys = [Selection("attention", "", kv, pack_u32([0, 1]), 0, 8) for kv in "kv"]
    yield "fetch", Fetch(1, TICKET, keys, GROUPS, 0, 48, [Route.STAGED, Route.PULL], 33_554_432, 10_000)
    longest = TicketRef("\N{GRINNING FACE}" * 256, 0xFFFF_FFFF, bytes(64))
    state = [Selection("state", "ssm", "", pack_u32([2]), 0, 64)]
    spans = [Span("state", 0, pack_u32([0xFFFF_FFFF]))]
    yield "fetch_at_its_bounds", Fetch(MAX_U64, longest, state, spans, 0, 0xFFFF_FFFF, [], MAX_U64, 0xFFFF_FFFF)
    bounds = (33_554_432, 10_000)
    ahead = Fetch(1, TICKET, keys, GROUPS, 0, 48, [Route.MAPPED], *bounds, 30_000, 5 << 32 | 1, DIGEST)
    yield "fetch_that_grants_ahead", ahead
    extent = (30_000, 0, DIGEST, [PLACE, PLACE], 4, bytes(range(1, 17)))
    yield "fetch_that_grants_staging_ahead", Fetch(1, TICKET, keys, GROUPS, 0, 48, [Route.STAGED], *bounds, *extent)
    yield "fetch_that_is_traced", msgspec.structs.replace(ahead, trace=f"00-{MAC.hex()[:32]}-{MAC.hex()[:16]}-01")
    yield "accept_of_what_was_granted_ahead", Accept(1, Route.MAPPED, 8192, [], 2, 32, 1, DIGEST, "", True, 64)
    yield "accept", Accept(1, Route.STAGED, 1_572_864, GROUPS, 2, 32, 2, DIGEST)
    yield "accept_with_a_reason", Accept(1, Route.DIRECT, 8192, GROUPS, 2, 32, 1, DIGEST, "only 2 pieces")
    yield "refuse", Refuse(1, Code.TICKET_FORGED, "this engine did not issue the ticket")
    yield "refuse_for_a_while", Refuse(1, Code.TOO_MANY, "", 250)
    yield from _counts()
    yield "result_of_a_chunk", KvAgentResult(1, 3, Status.FAILED, 0, False, Code.FABRIC, "a write is stuck")
    timings = Timings(10, 20, 30, 40)
    yield "result", KvAgentResult(1, WHOLE, Status.OK, 1_572_864, True, timings=timings, payload=b"first token")
    yield "result_without_payload", KvAgentResult(1, WHOLE, Status.OK, 0, True)
    yield (
        "result_of_the_whole",
        KvAgentResult(1, WHOLE, Status.CANCELLED, 0, True, Code.CANCELLED, "cancelled by the decode rank", DIGEST),
    )
    yield "result_in_doubt", KvAgentResult(1, WHOLE, Status.IN_DOUBT, 0, True, Code.FABRIC, "a write is stuck")
    yield "cancel", Cancel(1)
    yield "cancel_for_a_time_out", Cancel(1, Code.TIMEOUT)
    yield "release", Release(TICKET)
    yield "release_of_a_failed_request", Release(TICKET, Code.CANCELLED)
    yield "goodbye", Goodbye()
    yield "goodbye_with_a_reason", Goodbye(Code.CLOSED, "out of service")
    yield from _sums()
    yield "abandon", Abandon(1)
    yield "abandon_for_a_time_out", Abandon(MAX_U64, Code.TIMEOUT)
    yield "renewed", Renewed(1, b"transport")
    yield "renewed_often", Renewed(0xFFFF_FFFF, b"")


def _counts() -> Iterator[tuple[str, Message]]:
    """Messages that count chunks."""
    yield "ready", Ready(1, 2)
    yield "ready_of_nothing_yet", Ready(1, 0)
    yield "ready_with_a_lease", Ready(1, 6, 30_000)
    yield "ready_with_blocks", Ready(1, 3, 0, [Span("attention", 0, pack_u32([41, 7]))])
    yield "ready_at_its_bounds", Ready(MAX_U64, MAX_CHUNKS, 0xFFFF_FFFF, [], MAX_U64)
    yield "reserve_a_place", Reserve(1, 1, 30_000, 0, [PLACE])
    yield "reserve_a_ring", Reserve(1, 2, 30_000, 0, [PLACE, Place(PLACE.address + PLACE.length, 524_288)])
    yield "reserve_in_the_ring_that_there_is", Reserve(1, 3, 30_000)
    yield "reserve_in_place", Reserve(1, 2, 30_000, 42)
    yield "reserve_a_ring_to_take_turns_in", Reserve(1, 2, 30_000, 0, [PLACE], 0, bytes(range(1, 17)))
    yield "reserve_nothing_more", Reserve(1, 3, 30_000, 0, [], 2)
    ring = [Place(MAX_U64, MAX_U64)]
    yield "reserve_at_its_bounds", Reserve(MAX_U64, MAX_CHUNKS, 0xFFFF_FFFF, MAX_U64, ring, MAX_CHUNKS, b"\xff" * 16)
    yield "read", Read(1, 2)
    yield "arrived", Arrived(1, 2, Timings(10, 20, 30, 40))
    yield "arrived_at_its_bounds", Arrived(MAX_U64, MAX_CHUNKS, Timings(MAX_U64, MAX_U64, MAX_U64, MAX_U64))


def _sums() -> Iterator[tuple[str, Message]]:
    yield "check", Check(1)
    yield "check_of_some", Check(16)
    yield "sums", Sums(1, 0, bytes(range(24)))
    yield "sums_at_their_bounds", Sums(MAX_U64, 0xFFFF_FFFF, b"")


# Frames that a receiver must read although no peer of this version sends them in this form: (name, note, payload).
_READABLE: list[tuple[str, str, bytes]] = [
    ("ready_without_its_tail", "three fields are missing: their defaults hold", bytes.fromhex("93090101")),
    ("reserve_without_its_tail", "four fields are missing: their defaults hold", bytes.fromhex("940a010119")),
    ("arrived_without_its_tail", "timings are missing: all are 0", bytes.fromhex("93100101")),
    ("arrived_with_some_timings", "two of four are missing: they are 0", bytes.fromhex("9410010192050a")),
    ("result_without_its_tail", "five fields are missing: their defaults hold",
     bytes.fromhex("960c01ceffffffff01cd0400c3")),
    ("goodbye_without_fields", "every field has a default", bytes.fromhex("910f")),
    ("agent_without_its_tail", "the proof is missing: its default holds",
     bytes.fromhex("940390c40f9ba166c400909000a09000c4000000c420") + SAME),
    ("ping_with_a_tail", "unknown tail fields are ignored, whatever they are",
     bytes.fromhex("94040182a16b91c0a16cc0d40500")),
    ("cancel_with_a_tail", "one field of a later version", bytes.fromhex("940d0144 a47461696c")),
    ("ping_with_a_nested_tail", "60 arrays in each other: within the bound of 64",
     b"\x92\x04" + b"\x91" * 60 + b"\x01"),
    ("ping_with_a_torn_string_in_its_tail", "what is ignored is not looked at", bytes.fromhex("9204a2fffe")),
    ("cancel_with_an_unknown_code", "999 is read as UNKNOWN", bytes.fromhex("930d01cd03e7")),
    ("cancel_with_a_negative_code", "-3 is read as UNKNOWN", bytes.fromhex("930d01fd")),
    ("cancel_with_a_huge_code", "2^64 - 1 is read as UNKNOWN", bytes.fromhex("930d01cfffffffffffffffff")),
    ("result_with_an_unknown_status", "77 is read as UNKNOWN", bytes.fromhex("960c01ceffffffff4d00c3")),
    ("fetch_with_an_unknown_route", "routes 1, 77: the second is read as UNKNOWN",
     bytes.fromhex("9a060193a17200c4009090000192014d0000")),
    ("ping_with_a_wide_tag", "an integer may be written longer than it needs to be", bytes.fromhex("91cd0004")),
    ("cancel_with_a_wide_array", "so may a length", bytes.fromhex("dc0002 0d01")),
]  # fmt: skip
# Unknown tags of 128 and up are skipped without a look at what follows them.
_IGNORABLE: list[tuple[str, str, bytes]] = [
    ("tag_128", "the lowest that may be ignored", bytes.fromhex("91cc80")),
    ("tag_129", "of the past: it is not used again", bytes.fromhex("92cc8107")),
    ("tag_200_with_fields", "whatever its fields are", bytes.fromhex("94ccc80181a16bc0c4020102")),
    ("tag_65535", "written as u16", bytes.fromhex("91cdffff")),
    ("tag_200_as_a_signed_integer", "a positive integer in a signed form", bytes.fromhex("91d100c8")),
]


def valid() -> list[dict[str, Any]]:
    """Frames that decode, with what they say."""
    exact = [(name, "", encode(message), True) for name, message in _messages()]
    readable = [(name, note, _frame(payload), False) for name, note, payload in _READABLE + _IGNORABLE]
    return [_vector(*entry) for entry in exact + readable]


def _vector(name: str, note: str, frame: bytes, exact: bool) -> dict[str, Any]:
    message = decode(frame[4:])
    entry: dict[str, Any] = {
        "name": name,
        "message": None if message is None else registry_name(type(message)),
        "exact": exact,
        "hex": frame.hex(),
    }
    if note:
        entry["note"] = note
    if message is not None:
        entry["fields"] = plain(message)
    return entry


def _frame(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def _text(size: int) -> bytes:
    return b"\xda" + size.to_bytes(2, "big") + b"x" * size


def _hash(size: int) -> bytes:
    return b"\xc4" + size.to_bytes(1, "big") + bytes(size)


def _hello(incarnation: bytes, rank: str) -> bytes:
    return bytes.fromhex("9c010101a0a0c400") + incarnation + bytes.fromhex(rank + "0100c40000")


_TICKET = bytes.fromhex("93a17200c400")  # ["r", 0, b""]
_INVALID: list[tuple[str, str, bytes]] = [
    ("empty", "a frame without a payload", b""),
    ("no_array", "a map", bytes.fromhex("80")),
    ("no_tag", "an array without entries", bytes.fromhex("90")),
    ("tag_is_a_string", "the tag must be an integer", bytes.fromhex("91a450696e67")),
    ("tag_is_negative", "the tag must not be negative", bytes.fromhex("91ff")),
    ("tag_0", "no message, and not ignorable", bytes.fromhex("9100")),
    ("tag_17", "the lowest that this version does not know", bytes.fromhex("9111")),
    ("tag_127", "the highest that may not be ignored", bytes.fromhex("917f")),
    ("payload_is_truncated", "the length field agrees, the MessagePack inside is cut",
     bytes.fromhex("930f40a8616263")),
    ("array_is_truncated", "three entries are announced, two are there", bytes.fromhex("93090100")[:3]),
    ("array_of_four_billion", "a size that no frame can hold", bytes.fromhex("9205ddffffffff")),
    ("bin_of_four_gigabytes", "a size that no frame can hold", bytes.fromhex("920e93a17200c6ffffffff")),
    ("trailing_bytes", "bytes after the array", bytes.fromhex("9104") + b"\x00"),
    ("byte_c1", "a byte that begins no MessagePack value", bytes.fromhex("9204c1")),
    ("required_field_is_missing", "Ready needs chunks", bytes.fromhex("920901")),
    ("nil_for_bin", "no field may be nil", bytes.fromhex("920e93a17200c0")),
    ("nil_for_int", "no field may be nil", bytes.fromhex("930901c0")),
    ("ids_for_a_count", "chunks are counted, not named", bytes.fromhex("930901c40400000000")),
    ("grants_for_a_count", "chunks are counted, not named", bytes.fromhex("940a0191930000 0019")),
    ("str_for_bin", "a mac must be bin", bytes.fromhex("920e93a17200a400000000")),
    ("bin_for_str", "reason must be str", bytes.fromhex("930f40c40161")),
    ("float_for_int", "transfer must be an integer", bytes.fromhex("920dcb3ff0000000000000")),
    ("bool_for_int", "transfer must be an integer", bytes.fromhex("920dc3")),
    ("int_for_bool", "last must be a bool", bytes.fromhex("960c0100010001")),
    ("str_for_code", "a code must be an integer", bytes.fromhex("930d01a141")),
    ("map_for_struct", "a ticket must be an array", bytes.fromhex("920e80")),
    ("negative_transfer", "no number may be negative", bytes.fromhex("920dff")),
    ("negative_rank", "no number may be negative", _hello(_hash(32), "ff")),
    ("incarnation_is_too_short", "31 bytes, it has 32", _hello(_hash(31), "00")),
    ("incarnation_is_too_long", "33 bytes, it has 32", _hello(_hash(33), "00")),
    ("agent_proves_nothing", "the proof of an incarnation must be there", bytes.fromhex("930390c400")),
    ("agent_proves_too_little", "31 bytes, a proof has 32", bytes.fromhex("940390c400") + _hash(31)),
    ("agent_proves_too_much", "33 bytes, a proof has 32", bytes.fromhex("940390c400") + _hash(33)),
    ("negative_attempt", "no number may be negative", bytes.fromhex("920e93a172ffc400")),
    ("transfer_of_2_to_the_63", "u64 stays below 2^63", bytes.fromhex("920dcf8000000000000000")),
    ("attempt_of_2_to_the_32", "u32 stays below 2^32", bytes.fromhex("920e93a172cf0000000100000000c400")),
    ("request_is_empty", "a request id has at least one character", bytes.fromhex("920e93a000c400")),
    ("request_is_too_long", "257 characters, 256 are allowed", b"\x92\x0e\x93" + _text(257) + bytes.fromhex("00c400")),
    ("reason_is_too_long", "1025 characters, 1024 are allowed", b"\x93\x0f\x40" + _text(1025)),
    ("mac_is_too_long", "65 bytes, 64 are allowed", bytes.fromhex("920e93a17200") + _hash(65)),
    ("string_is_no_utf8", "reason must be UTF-8", bytes.fromhex("930f40a2fffe")),
    ("string_is_a_surrogate", "reason must be UTF-8", bytes.fromhex("930f40a3eda080")),
    ("ids_are_torn", "three bytes are no whole number of u32", bytes.fromhex("9509010100 9193a167 00 c403000000")),
    ("layers_are_torn", "five bytes are no whole number of u32",
     bytes.fromhex("9a0601") + _TICKET + bytes.fromhex("9196a0a0a0c4050000000000 0001 90 0001 90 0000")),
    ("span_is_torn", "two bytes are no whole number of u32",
     bytes.fromhex("9a0601") + _TICKET + bytes.fromhex("90 9193a000c4020000 0001 90 0000")),
    ("chunks_over_the_bound", "2^20 + 1 chunks, 2^20 are allowed",
     bytes.fromhex("9907010100 90 0101ce00100001 c400")),
    ("ready_over_the_bound", "2^20 + 1 chunks, 2^20 are allowed", bytes.fromhex("930901ce00100001")),
    ("reserve_over_the_bound", "2^20 + 1 chunks, 2^20 are allowed", bytes.fromhex("940a01ce0010000100")),
    ("landed_over_the_bound", "2^20 + 1 chunks, 2^20 are allowed", bytes.fromhex("930b01ce00100001")),
    ("arrived_over_the_bound", "2^20 + 1 chunks, 2^20 are allowed", bytes.fromhex("931001ce00100001")),
    ("negative_count", "no number may be negative", bytes.fromhex("931001ff")),
    ("place_without_a_length", "a place is an address and a length", bytes.fromhex("960a01010000 919100")),
    ("too_many_places", "1025 places, 1024 are allowed",
     bytes.fromhex("960a01010000 dc") + (MAX_PLACES + 1).to_bytes(2, "big") + b"\x92\x00\x00" * (MAX_PLACES + 1)),
    ("too_many_routes", "17 routes, 16 are allowed",
     bytes.fromhex("9a0601") + _TICKET + bytes.fromhex("9090 0001 dc0011") + b"\x01" * 17 + bytes.fromhex("0000")),
    ("too_many_tickets", "4097 tickets are announced, 4096 are allowed",
     b"\x92\x05\xdc" + (4097).to_bytes(2, "big") + _TICKET * 4097),
    ("trace_is_too_long", "65 characters, 64 are allowed",
     bytes.fromhex("dc00130601") + _TICKET + bytes.fromhex("9090 0001 90 0000 000000 c400 000000 c2") + _text(65)),
    ("sums_are_torn", "seven bytes are no whole number of u64", bytes.fromhex("94cc830100c407") + bytes(7)),
    ("every_is_negative", "a tag of 128 and up is skipped only if it is not known", bytes.fromhex("92cc82ff")),
    ("tail_is_nested_too_deeply", "20,000 arrays in each other", b"\x92\x04" + b"\x91" * 20_000 + b"\x01"),
]  # fmt: skip


def invalid() -> list[dict[str, Any]]:
    """Bytes that a receiver must refuse, and bytes of which it must wait for the rest."""
    cases: list[dict[str, Any]] = [
        {"name": name, "note": note, "outcome": "refused", "hex": _frame(payload).hex()}
        for name, note, payload in _INVALID
    ]
    for name, limit in (("handshake", HANDSHAKE_FRAME_LIMIT), ("session", SESSION_FRAME_LIMIT)):
        cases.append(
            {
                "name": f"length_over_the_{name}_limit",
                "note": "refused by its length alone, before any of it has arrived",
                "outcome": "refused",
                "limit": limit,
                "hex": struct.pack("<I", limit + 1).hex(),
            }
        )
    ping = encode(Ready(1, 1))
    cases.extend(
        {
            "name": f"cut_after_{cut}_bytes",
            "note": "no message yet, and no error: the rest may come",
            "outcome": "incomplete",
            "hex": ping[:cut].hex(),
        }
        for cut in (0, 1, 3, 4, 5, len(ping) - 1)
    )
    return cases
