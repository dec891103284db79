"""Scripted conversations: who sends which frame, in an order that the protocol allows.

Every one begins with the first byte of the stream, so that it can be played against a session and the machines above
it. All numbers are fixed: engines, keys, nonces and times.
"""

import hashlib
import hmac
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from kvxfer.errors import Code
from kvxfer.protocol.framing import encode, encode_body
from kvxfer.protocol.messages import (
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
    MemorySpan,
    Message,
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
    pack_u32,
)
from kvxfer.tickets import EngineCard, Issuer, RankCard, Ticket
from kvxfer.tools.inspect import registry_name
from proto.frames import plain

__all__ = ["FACTS", "SECRET", "conversations", "handshake_vector"]

SECRET = b"a secret that both engines share"
KEY = bytes(range(32))
FACTS = [("attention.dtype", "bfloat16"), ("attention.dim", "128")]
CAPABILITIES = 0b11111
TRANSFER = 1
LAYERS = pack_u32([0, 1])
DIGEST = hashlib.sha256(b"the plan of this conversation").digest()

Side = Literal["decode", "prefill"]
Line = tuple[Side, Message]


def _private(seed: int) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes(range(seed, seed + 32)))


def _incarnation(seed: int) -> bytes:
    return _private(seed).public_key().public_bytes_raw()


def _card(engine: str, seed: int) -> EngineCard:
    incarnation = _incarnation(seed).hex()
    endpoint = f"unix:/run/kvxfer/{engine}-0.sock"
    return EngineCard.of([RankCard(engine=engine, rank=0, world=1, endpoint=endpoint, incarnation=incarnation)])


PREFILL = _card("prefill", 0x10)
DECODE = _card("decode", 0x60)
TICKET = Ticket.parse(Issuer(PREFILL, KEY).ticket("req-1", attempt=258)).ref()


def _greeting(card: EngineCard, seed: int, wire: int = 2, wire_min: int = 2) -> tuple[Any, ...]:
    """The fields that Hello and Welcome share."""
    incarnation = _incarnation(seed)
    nonce = bytes(range(seed + 64, seed + 96))
    epoch = bytes.fromhex(card.epoch)
    return wire, wire_min, "kvxfer 0.1.0", card.engine, epoch, incarnation, 0, 1, CAPABILITIES, nonce, 2000


HELLO = Hello(*_greeting(DECODE, 0x60))


def _proof(role: bytes, hello: Hello, welcome: Welcome) -> bytes:
    """PROTOCOL.md section 4.3, written down once more so that the vectors do not quote the code that they test."""
    return hmac.new(SECRET, role + _transcript(hello, welcome), hashlib.sha256).digest()


def _transcript(hello: Hello, welcome: Welcome) -> bytes:
    bare = msgspec.structs.replace(welcome, proof=b"")
    return b"".join(hashlib.sha256(encode(message)[4:]).digest() for message in (hello, bare))


def _same(role: bytes, hello: Hello, welcome: Welcome, seed: int | None = None) -> bytes:
    """Section 4.8, likewise: what the side of this role proves, or somebody who has another key."""
    own, peer = (0x60, welcome.incarnation) if role == b"client" else (0x10, hello.incarnation)
    shared = _private(own if seed is None else seed).exchange(X25519PublicKey.from_public_bytes(peer))
    return hmac.new(shared, b"kvxfer same v1" + role + _transcript(hello, welcome), hashlib.sha256).digest()


_BARE = Welcome(*_greeting(PREFILL, 0x10))
WELCOME = msgspec.structs.replace(_BARE, proof=_proof(b"server", HELLO, _BARE))


def _body(base: int, staging: Iterable[MemorySpan]) -> memoryview:
    tensor = TensorFrame("attention", "", "", "block layer head token dim", [64, 2, 8, 16, 128],
                         [65536, 32768, 4096, 256, 2], LAYERS, 0, 8, "bfloat16", 2, base)  # fmt: skip
    return memoryview(encode_body(AgentBody("loopback", b"metadata", [tensor], list(staging))))


_STAGING = [MemorySpan("DRAM", 0, 0x1000_0000, 1 << 20)]


def _handshake(bare: Welcome) -> list[Line]:
    client = _same(b"client", HELLO, bare), _proof(b"client", HELLO, bare)
    return [
        ("decode", HELLO),
        ("prefill", msgspec.structs.replace(bare, proof=_proof(b"server", HELLO, bare))),
        ("decode", Agent(FACTS, _body(0, _STAGING), *client)),
        ("prefill", Agent(FACTS, _body(0, []), _same(b"server", HELLO, bare))),
    ]


HANDSHAKE = _handshake(_BARE)

# 32 tokens of 2 layers x 8 heads x 128 dims x 2 bytes, in two windows of 16 tokens
CHUNK_BYTES = 16 * 2 * 8 * 128 * 2


def _fetch(routes: list[Route], *, ticket: TicketRef = TICKET, transfer: int = TRANSFER) -> Fetch:
    selections = [Selection("attention", "", "", LAYERS, 0, 8)]
    spans = [Span("attention", 0, pack_u32([5, 9]))]
    return Fetch(transfer, ticket, selections, spans, 0, 32, routes, 1 << 20, 10_000)


def _accept(route: Route, transfer: int = TRANSFER) -> Accept:
    spans = [Span("attention", 0, pack_u32([40, 41]))]
    return Accept(transfer, route, 2 * CHUNK_BYTES, spans, 2, 16, 2, DIGEST)


def _arrived(chunks: int, new: int = 1) -> Arrived:
    """So many chunks have arrived, of which so many are new."""
    return Arrived(TRANSFER, chunks, Timings(10 * new, 20 * new, 30 * new, 40 * new))


def _done(new: int = 1) -> KvAgentResult:
    """The last result of both chunks, so many of which were not told yet."""
    timings = Timings(10 * new, 20 * new, 30 * new, 40 * new)
    return KvAgentResult(TRANSFER, WHOLE, Status.OK, 2 * CHUNK_BYTES, True, timings=timings, payload=b"first token")


def _stopped(code: Code, status: Status = Status.CANCELLED, chunk: int = WHOLE) -> KvAgentResult:
    reason = "cancelled by the decode rank"
    return KvAgentResult(TRANSFER, chunk, status, 0, chunk == WHOLE, code, reason)


def _place(number: int) -> Place:
    return Place(0x1000_0000 + number * CHUNK_BYTES, CHUNK_BYTES)


def _ready(chunks: int, lease_ms: int = 0) -> Ready:
    return Ready(TRANSFER, chunks, lease_ms)


def _reserve(chunks: int, *ring: Place, copied: int = 0, token: bytes = b"") -> Reserve:
    return Reserve(TRANSFER, chunks, 30_000, 0, list(ring), copied, token)


_STAGED: list[Line] = [
    ("decode", _fetch([Route.STAGED])),
    ("prefill", _accept(Route.STAGED)),
    ("prefill", _ready(1)),
    ("decode", _reserve(1, _place(0), _place(1))),
    ("prefill", _ready(2)),
    ("decode", _reserve(2)),  # the second place
    ("prefill", _arrived(1)),
    ("prefill", _done()),
    ("decode", Release(TICKET)),
]
_TURNS: list[Line] = [
    ("decode", _fetch([Route.STAGED])),
    ("prefill", _accept(Route.STAGED)),
    ("prefill", _ready(2)),
    ("decode", _reserve(1, _place(0))),
    ("prefill", _arrived(1)),
    ("decode", _reserve(2, copied=1)),  # the first chunk is scattered: the same place again
    ("prefill", _done()),
    ("decode", Release(TICKET)),
]
_TURNS_OF_AGENTS: list[Line] = [
    *_TURNS[:3],
    ("decode", _reserve(1, _place(0), token=bytes(range(1, 17)))),
    ("decode", _reserve(2)),  # the agents notify each other when the place is free
    ("prefill", _arrived(1)),  # a while after the agent has said so
    ("decode", _reserve(2, copied=1)),  # likewise
    ("prefill", _done()),
    ("decode", Release(TICKET)),
]
_OTHER_RING: list[Line] = [
    *_TURNS[:5],
    ("decode", _reserve(2, _place(3))),  # nothing granted is under way
    ("prefill", _done()),
    ("decode", Release(TICKET)),
]
_DIRECT: list[Line] = [
    ("decode", _fetch([Route.DIRECT])),
    ("prefill", _accept(Route.DIRECT)),
    ("prefill", _ready(2)),
    ("decode", _reserve(2)),
    # one after the other or both at once, in either order: the last result tells of both
    ("prefill", _done(2)),
    ("decode", Release(TICKET)),
]
_AGREEMENT = bytes(range(0xC0, 0xE0))
_AHEAD: list[Line] = [
    ("decode", msgspec.structs.replace(_fetch([Route.MAPPED]), lease_ms=30_000, agreement=_AGREEMENT)),
    ("prefill", msgspec.structs.replace(_accept(Route.MAPPED), spans=[], ahead=True, pieces=64)),
    ("prefill", _done(2)),
    ("decode", Release(TICKET)),
]
_AHEAD_STAGED: list[Line] = [
    (
        "decode",
        msgspec.structs.replace(
            _fetch([Route.STAGED]),
            lease_ms=30_000,
            agreement=_AGREEMENT,
            ring=[Place(_place(0).address, 2 * CHUNK_BYTES)],
            ring_chunks=1,
        ),
    ),
    (
        "prefill",
        msgspec.structs.replace(_accept(Route.STAGED), layers_per_chunk=2, tokens_per_chunk=32, chunks=1, ahead=True),
    ),
    ("prefill", _done()),
    ("decode", Release(TICKET)),
]
_VOID: list[Line] = [
    _AHEAD[0],
    ("prefill", Ready(TRANSFER, 0)),  # the offer is not there yet: what was granted ahead is void
    ("prefill", _accept(Route.MAPPED)),
    ("prefill", _ready(2)),
    ("decode", _reserve(2)),
    ("prefill", _arrived(1)),
    ("prefill", _done()),
    ("decode", Release(TICKET)),
]
_PULL: list[Line] = [
    ("decode", _fetch([Route.PULL])),
    ("prefill", _accept(Route.PULL)),
    ("prefill", _ready(2, lease_ms=30_000)),
    ("decode", Read(TRANSFER, 1)),
    ("prefill", _arrived(1)),
    ("decode", Read(TRANSFER, 2)),
    ("prefill", _done()),
    ("decode", Release(TICKET)),
]
_FORGED = TicketRef(TICKET.request, TICKET.attempt, bytes(byte ^ 0xFF for byte in TICKET.mac))
_REFUSED: list[Line] = [
    ("decode", _fetch([Route.STAGED], ticket=_FORGED)),
    ("prefill", Refuse(TRANSFER, Code.TICKET_FORGED, "this engine did not issue the ticket in its present epoch")),
]
_CANCELLED: list[Line] = [
    *_STAGED[:3],
    ("decode", _reserve(1, _place(0))),
    ("prefill", _arrived(1)),
    ("prefill", _ready(2)),
    ("decode", Cancel(TRANSFER, Code.TIMEOUT)),  # instead of a grant for the second chunk
    ("prefill", _stopped(Code.TIMEOUT)),
    ("decode", Release(TICKET, Code.CANCELLED)),
]
_OVERDUE: list[Line] = [
    *_STAGED[:4],
    # the offer is withdrawn, and the write of the first chunk does not end: nobody need wait to hear that it fails
    ("prefill", KvAgentResult(TRANSFER, 0, Status.CANCELLED, 0, False, Code.OFFER_WITHDRAWN, "withdrawn")),
    ("decode", Cancel(TRANSFER)),
    ("prefill", KvAgentResult(TRANSFER, WHOLE, Status.CANCELLED, 0, True, Code.OFFER_WITHDRAWN, "withdrawn")),
]
_PARKED: list[Line] = [
    ("decode", Claim([TICKET])),
    ("decode", _fetch([Route.STAGED])),
    # the offer is made here; nothing was said meanwhile but Ping
    ("prefill", _accept(Route.STAGED)),
    ("prefill", _ready(2)),
    ("decode", _reserve(2, _place(0), _place(1))),
    ("prefill", _done(2)),
    ("decode", Release(TICKET)),
]
_PARKED_CANCELLED: list[Line] = [
    ("decode", _fetch([Route.STAGED])),
    ("decode", Cancel(TRANSFER)),
    ("prefill", _stopped(Code.CANCELLED)),
]
_PAYLOAD_LATER: list[Line] = [
    *_PULL[:4],
    ("prefill", _arrived(1)),
    ("decode", Read(TRANSFER, 2)),
    ("prefill", _arrived(2)),
    # every chunk has arrived before the offer is finished: the last result tells of none
    ("prefill", _done(0)),
    ("decode", Release(TICKET)),
]

_ABANDONED: list[Line] = [
    *_PULL[:3],
    ("decode", Abandon(TRANSFER)),  # the caller cancelled; both chunks are being read
    ("prefill", _stopped(Code.CANCELLED, chunk=0)),
    # one read does not end; the prefill rank has waited long enough
    ("prefill", _stopped(Code.CANCELLED, Status.IN_DOUBT)),
    ("decode", Cancel(TRANSFER)),  # it has ended after all
    ("prefill", _stopped(Code.CANCELLED)),
]

_GROWING: list[Line] = [
    ("decode", _fetch([Route.STAGED])),
    # 16 of 32 tokens are computed: the offer has one block
    ("prefill", msgspec.structs.replace(_accept(Route.STAGED), spans=[Span("attention", 0, pack_u32([40]))])),
    ("prefill", _ready(1)),
    ("decode", _reserve(1, _place(0))),
    ("prefill", _arrived(1)),
    # the others are, in a block that was not named yet
    ("prefill", msgspec.structs.replace(_ready(2), spans=[Span("attention", 0, pack_u32([41]))])),
    ("decode", _reserve(2)),
    ("prefill", _done()),
    ("decode", Release(TICKET)),
]

_SUMS = bytes(range(0x80, 0xA0))  # of two regions and two rows
_SUMMED: list[Line] = [
    *_handshake(msgspec.structs.replace(_BARE, capabilities=CAPABILITIES | Capability.SUMS)),
    ("decode", Check(1)),
    ("decode", _fetch([Route.STAGED])),
    ("prefill", _accept(Route.STAGED)),
    ("prefill", _ready(2)),
    ("decode", _reserve(2, _place(0), _place(1))),
    ("prefill", Sums(TRANSFER, 0, _SUMS)),
    ("prefill", _arrived(1)),
]
_SUMS_AGREE: list[Line] = [
    *_SUMMED,
    ("prefill", Sums(TRANSFER, 1, _SUMS)),
    ("prefill", _done()),
    ("decode", Release(TICKET)),
]
_SUMS_DIFFER: list[Line] = [
    *_SUMMED,
    ("decode", Cancel(TRANSFER, Code.INTEGRITY)),  # the blocks add up to something else
    ("prefill", _stopped(Code.INTEGRITY)),
]

_RENEWED: list[Line] = [
    *_handshake(msgspec.structs.replace(_BARE, capabilities=CAPABILITIES | Capability.RENEWED)),
    ("decode", _fetch([Route.STAGED])),
    ("prefill", _accept(Route.STAGED)),
    ("prefill", _ready(2)),
    ("decode", _reserve(1, _place(0))),
    ("prefill", _arrived(1)),
    ("decode", Renewed(1, b"the agent that there is now")),
    ("decode", _reserve(2)),
    ("prefill", _done()),
    ("decode", Release(TICKET)),
]

_STOLEN = msgspec.structs.replace(HELLO, nonce=bytes(range(0xA0, 0xC0)))
_NOT_THE_SAME: list[Line] = [
    ("decode", _STOLEN),
    ("prefill", msgspec.structs.replace(_BARE, proof=_proof(b"server", _STOLEN, _BARE))),
    (
        "decode",
        Agent(
            FACTS, _body(0, _STAGING), _same(b"client", _STOLEN, _BARE, seed=0x20), _proof(b"client", _STOLEN, _BARE)
        ),
    ),
    (
        "prefill",
        Goodbye(
            Code.IDENTITY,
            f"nothing proves that this is the process of incarnation {HELLO.incarnation.hex()[:8]}; if it is no "
            "impostor, start it again",
        ),
    ),
]

# name, what happens, how it ends for the transfer, lines
_SCRIPTS: list[tuple[str, str, str, list[Line]]] = [
    ("staged_two_chunks", "a staged fetch whose second chunk becomes ready later", "done", [*HANDSHAKE, *_STAGED]),
    ("staged_in_turns", "one place of staging memory for two chunks", "done", [*HANDSHAKE, *_TURNS]),
    ("staged_in_turns_of_agents", "the same, and no loop has a part in it", "done", [*HANDSHAKE, *_TURNS_OF_AGENTS]),
    ("staged_in_another_ring", "the second chunk is granted other memory", "done", [*HANDSHAKE, *_OTHER_RING]),
    ("direct_in_place", "a grant without a ring, and one result for all of it", "done", [*HANDSHAKE, *_DIRECT]),
    ("granted_ahead", "the grant rides with the fetch, and is used", "done", [*HANDSHAKE, *_AHEAD]),
    ("staging_granted_ahead", "an extent rides with the fetch", "done", [*HANDSHAKE, *_AHEAD_STAGED]),
    ("granted_ahead_in_vain", "the fetch waits for its offer, and its grant is void", "done", [*HANDSHAKE, *_VOID]),
    ("pull", "the decode rank reads under a lease and reports", "done", [*HANDSHAKE, *_PULL]),
    ("forged_ticket", "the MAC is wrong: a refusal, and the session goes on", "refused", [*HANDSHAKE, *_REFUSED]),
    ("cancel_between_chunks", "a time-out after the first chunk", "stopped", [*HANDSHAKE, *_CANCELLED]),
    ("write_that_does_not_end", "the failure is told before its promise can be made", "stopped",
     [*HANDSHAKE, *_OVERDUE]),
    ("fetch_before_offer", "a claim and a fetch wait for their offer", "done", [*HANDSHAKE, *_PARKED]),
    ("cancel_before_offer", "a parked fetch is given up", "stopped", [*HANDSHAKE, *_PARKED_CANCELLED]),
    ("payload_after_the_last_chunk", "the offer is finished late", "done", [*HANDSHAKE, *_PAYLOAD_LATER]),
    ("offer_that_grows", "the second block comes when its tokens are computed", "done", [*HANDSHAKE, *_GROWING]),
    ("chunks_summed", "what arrived adds up to what was sent (sums here are fixed numbers)", "done", _SUMS_AGREE),
    ("agent_made_anew", "the decode rank rebuilds its agent when nothing is granted", "done", _RENEWED),
    ("chunk_damaged", "what arrived adds up to something else, and its sender hears of it", "stopped", _SUMS_DIFFER),
    ("abandoned_while_it_is_read", "a reader gives up, and a read of it stands still", "stopped",
     [*HANDSHAKE, *_ABANDONED]),
    ("drained", "the prefill rank goes away in order", "none",
     [*HANDSHAKE, ("prefill", Goodbye(Code.DRAINING, "the worker is closing"))]),
    ("not_the_same_process", "somebody else says to be the decode rank", "identity", _NOT_THE_SAME),
    ("version_mismatch_seen_by_decode", "the server speaks version 3 alone; the client closes", "mismatch",
     [("decode", HELLO), ("prefill", Welcome(*_greeting(PREFILL, 0x10, 3, 3)))]),
    ("version_mismatch_seen_by_prefill", "the client speaks version 3 alone; the server closes", "mismatch",
     [("decode", Hello(*_greeting(DECODE, 0x60, 3, 3)))]),
]  # fmt: skip


def conversations() -> dict[str, Any]:
    """All scripts, with what one needs to play them."""
    return {
        "setting": {
            "secret": SECRET.hex(),
            "engine_key": KEY.hex(),
            "prefill": PREFILL.to_dict(),
            "decode": DECODE.to_dict(),
            "facts": FACTS,
            "opaque": ["ACCEPT.digest and FETCH.agreement: fixed numbers, not those of a plan"],
        },
        "conversations": [
            {"name": name, "note": note, "outcome": outcome, "frames": [_line(*line) for line in lines]}
            for name, note, outcome, lines in _SCRIPTS
        ],
    }


def _line(side: Side, message: Message) -> dict[str, Any]:
    return {"from": side, "frame": encode(message).hex(), "message": registry_name(type(message))}


def handshake_vector() -> dict[str, Any]:
    """The proofs and the ticket's MAC, step by step."""
    bare = encode(_BARE)[4:]
    return {
        "proof": {
            "secret": SECRET.hex(),
            "hello_payload": encode(HELLO)[4:].hex(),
            "welcome_payload_with_empty_proof": bare.hex(),
            "sha256_of_hello": hashlib.sha256(encode(HELLO)[4:]).hexdigest(),
            "sha256_of_welcome": hashlib.sha256(bare).hexdigest(),
            "server": WELCOME.proof.hex(),
            "client": _proof(b"client", HELLO, _BARE).hex(),
        },
        "epoch": {"incarnations": [WELCOME.incarnation.hex()], "epoch": PREFILL.epoch},
        "ticket": {"key": KEY.hex(), "epoch": PREFILL.epoch, **_ticket_fields()},
        "same": _same_fields(),
    }


def _same_fields() -> dict[str, str]:
    """Of the handshake with which most conversations begin."""
    fields = {
        "client_private": bytes(range(0x60, 0x80)),
        "client_incarnation": HELLO.incarnation,
        "server_private": bytes(range(0x10, 0x30)),
        "server_incarnation": WELCOME.incarnation,
        "shared": _private(0x60).exchange(X25519PublicKey.from_public_bytes(WELCOME.incarnation)),
        "client": _same(b"client", HELLO, WELCOME),
        "server": _same(b"server", HELLO, WELCOME),
    }
    return {name: value.hex() for name, value in fields.items()}


def _ticket_fields() -> dict[str, Any]:
    fields = plain(TICKET)
    return {**fields, "mac": TICKET.mac.hex()} if isinstance(fields, dict) else {}
