"""Scripted conversations: who sends which frame, in an order that the protocol allows.

Every one begins with the first byte of the stream, so that it can be played against a session and the machines above
it. All numbers are fixed: engines, keys, nonces and times.
"""

import hashlib
import hmac
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from kvxfer.errors import Code
from kvxfer.protocol.framing import encode, encode_body
from kvxfer.protocol.inspect import registry_name
from kvxfer.protocol.messages import (
    WHOLE,
    Abandon,
    Accept,
    Agent,
    AgentBody,
    Cancel,
    Capability,
    Check,
    Claim,
    Fetch,
    Goodbye,
    Grant,
    Hello,
    KvAgentResult,
    Landed,
    MemorySpan,
    Message,
    Probe,
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
    Want,
    Welcome,
)
from kvxfer.protocol.packing import pack_u32
from kvxfer.tickets import EngineCard, Issuer, RankCard, Ticket
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


def _card(engine: str, seed: int) -> EngineCard:
    incarnation = bytes(range(seed, seed + 16)).hex()
    endpoint = f"unix:/run/kvxfer/{engine}-0.sock"
    return EngineCard.of([RankCard(engine=engine, rank=0, world=1, endpoint=endpoint, incarnation=incarnation)])


PREFILL = _card("prefill", 0x10)
DECODE = _card("decode", 0x60)
TICKET = Ticket.parse(Issuer(PREFILL, KEY).ticket("req-1", attempt=258)).ref()


def _greeting(card: EngineCard, seed: int, wire: int = 1, wire_min: int = 1) -> tuple[Any, ...]:
    """The fields that Hello and Welcome share."""
    incarnation = bytes(range(seed, seed + 16))
    nonce = bytes(range(seed + 64, seed + 96))
    epoch = bytes.fromhex(card.epoch)
    return wire, wire_min, "kvxfer 0.1.0", card.engine, epoch, incarnation, 0, 1, CAPABILITIES, nonce, 2000


HELLO = Hello(*_greeting(DECODE, 0x60))


def _proof(role: bytes, hello: Hello, welcome: Welcome) -> bytes:
    """PROTOCOL.md section 4.3, written down once more so that the vectors do not quote the code that they test."""
    bare = msgspec.structs.replace(welcome, proof=b"")
    transcript = b"".join(hashlib.sha256(encode(message)[4:]).digest() for message in (hello, bare))
    return hmac.new(SECRET, role + transcript, hashlib.sha256).digest()


_BARE = Welcome(*_greeting(PREFILL, 0x10))
WELCOME = msgspec.structs.replace(_BARE, proof=_proof(b"server", HELLO, _BARE))


def _body(base: int, staging: Iterable[MemorySpan]) -> bytes:
    tensor = TensorFrame("attention", "", "", "block layer head token dim", [64, 2, 8, 16, 128],
                         [65536, 32768, 4096, 256, 2], LAYERS, 0, 8, "bfloat16", 2, base)  # fmt: skip
    return encode_body(AgentBody("loopback", b"metadata", [tensor], list(staging)))


_STAGING = [MemorySpan("DRAM", 0, 0x1000_0000, 1 << 20)]
CLIENT_AGENT = Agent(FACTS, _body(0, _STAGING), _proof(b"client", HELLO, _BARE))
SERVER_AGENT = Agent(FACTS, _body(0, []))


def _handshake(bare: Welcome) -> list[Line]:
    return [
        ("decode", HELLO),
        ("prefill", msgspec.structs.replace(bare, proof=_proof(b"server", HELLO, bare))),
        ("decode", Agent(FACTS, CLIENT_AGENT.body, _proof(b"client", HELLO, bare))),
        ("prefill", SERVER_AGENT),
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


def _ok(chunk: int, *, last: bool = False, transfer: int = TRANSFER) -> KvAgentResult:
    payload = b"first token" if last else b""
    return KvAgentResult(
        transfer, chunk, Status.OK, CHUNK_BYTES, last, timings=Timings(10, 20, 30, 40), payload=payload
    )


def _extent(chunk: int) -> Grant:
    return Grant(chunk, 0x1000_0000 + chunk * CHUNK_BYTES, CHUNK_BYTES)


def _want(*chunks: int, lease_ms: int = 0, transfer: int = TRANSFER) -> Want:
    return Want(transfer, pack_u32(chunks), lease_ms)


def _reserve(*grants: Grant, transfer: int = TRANSFER) -> Reserve:
    return Reserve(transfer, list(grants), 30_000)


_STAGED: list[Line] = [
    ("decode", _fetch([Route.STAGED])),
    ("prefill", _accept(Route.STAGED)),
    ("prefill", _want(0)),
    ("decode", _reserve(_extent(0))),
    ("prefill", _want(1)),
    ("prefill", _ok(0)),
    ("decode", _reserve(_extent(1))),
    ("prefill", _ok(1, last=True)),
    ("decode", Release(TICKET)),
]
_DIRECT: list[Line] = [
    ("decode", _fetch([Route.DIRECT])),
    ("prefill", _accept(Route.DIRECT)),
    ("prefill", _want(0, 1)),
    ("decode", _reserve(Grant(0, 0, 0), Grant(1, 0, 0))),
    ("prefill", _ok(1)),
    ("prefill", _ok(0, last=True)),
    ("decode", Release(TICKET)),
]
_AGREEMENT = bytes(range(0xC0, 0xE0))
_AHEAD: list[Line] = [
    ("decode", msgspec.structs.replace(_fetch([Route.MAPPED]), lease_ms=30_000, agreement=_AGREEMENT)),
    ("prefill", msgspec.structs.replace(_accept(Route.MAPPED), spans=[], ahead=True, pieces=64)),
    ("prefill", _ok(0)),
    ("prefill", _ok(1, last=True)),
    ("decode", Release(TICKET)),
]
_AHEAD_STAGED: list[Line] = [
    (
        "decode",
        msgspec.structs.replace(
            _fetch([Route.STAGED]),
            staging_lease_ms=30_000,
            agreement=_AGREEMENT,
            staging_address=_extent(0).address,
            staging_bytes=2 * CHUNK_BYTES,
        ),
    ),
    (
        "prefill",
        msgspec.structs.replace(_accept(Route.STAGED), layers_per_chunk=2, tokens_per_chunk=32, chunks=1, ahead=True),
    ),
    ("prefill", msgspec.structs.replace(_ok(0, last=True), bytes=2 * CHUNK_BYTES)),
    ("decode", Release(TICKET)),
]
_VOID: list[Line] = [
    _AHEAD[0],
    ("prefill", Want(TRANSFER, b"")),  # the offer is not there yet: what was granted ahead is void
    ("prefill", _accept(Route.MAPPED)),
    ("prefill", _want(0, 1)),
    ("decode", _reserve(Grant(0, 0, 0), Grant(1, 0, 0))),
    ("prefill", _ok(0)),
    ("prefill", _ok(1, last=True)),
    ("decode", Release(TICKET)),
]
_PULL: list[Line] = [
    ("decode", _fetch([Route.PULL])),
    ("prefill", _accept(Route.PULL)),
    ("prefill", _want(0, 1, lease_ms=30_000)),
    ("decode", Landed(TRANSFER, pack_u32([0]))),
    ("prefill", _ok(0)),
    ("decode", Landed(TRANSFER, pack_u32([1]))),
    ("prefill", _ok(1, last=True)),
    ("decode", Release(TICKET)),
]
_FORGED = TicketRef(TICKET.request, TICKET.attempt, bytes(byte ^ 0xFF for byte in TICKET.mac))
_REFUSED: list[Line] = [
    ("decode", _fetch([Route.STAGED], ticket=_FORGED)),
    ("prefill", Refuse(TRANSFER, Code.TICKET_FORGED, "this engine did not issue the ticket in its present epoch")),
]
_CANCELLED: list[Line] = [
    *_STAGED[:3],
    ("decode", _reserve(_extent(0))),
    ("prefill", _ok(0)),
    ("prefill", _want(1)),
    ("decode", Cancel(TRANSFER, Code.TIMEOUT)),  # instead of a grant for the second chunk
    (
        "prefill",
        KvAgentResult(TRANSFER, WHOLE, Status.CANCELLED, 0, True, Code.TIMEOUT, "cancelled by the decode rank"),
    ),
    ("decode", Release(TICKET, Code.CANCELLED)),
]
_PARKED: list[Line] = [
    ("decode", Claim([TICKET])),
    ("decode", _fetch([Route.STAGED])),
    # the offer is made here; nothing was said meanwhile but Ping
    ("prefill", _accept(Route.STAGED)),
    ("prefill", _want(0, 1)),
    ("decode", _reserve(_extent(0), _extent(1))),
    ("prefill", _ok(0)),
    ("prefill", _ok(1, last=True)),
    ("decode", Release(TICKET)),
]
_PARKED_CANCELLED: list[Line] = [
    ("decode", _fetch([Route.STAGED])),
    ("decode", Cancel(TRANSFER)),
    (
        "prefill",
        KvAgentResult(TRANSFER, WHOLE, Status.CANCELLED, 0, True, Code.CANCELLED, "cancelled by the decode rank"),
    ),
]
_PAYLOAD_LATER: list[Line] = [
    *_PULL[:4],
    ("prefill", _ok(0)),
    ("decode", Landed(TRANSFER, pack_u32([1]))),
    ("prefill", _ok(1)),
    # every chunk has landed before the offer is finished: the payload comes with the transfer as a whole
    ("prefill", KvAgentResult(TRANSFER, WHOLE, Status.OK, 0, True, payload=b"first token")),
    ("decode", Release(TICKET)),
]

_ABANDONED: list[Line] = [
    *_PULL[:3],
    ("decode", Abandon(TRANSFER)),  # the caller cancelled; both chunks are being read
    ("prefill", KvAgentResult(TRANSFER, 0, Status.CANCELLED, 0, False, Code.CANCELLED, "cancelled by the decode rank")),
    # one read does not end; the prefill rank has waited long enough
    (
        "prefill",
        KvAgentResult(TRANSFER, WHOLE, Status.IN_DOUBT, 0, True, Code.CANCELLED, "cancelled by the decode rank"),
    ),
    ("decode", Cancel(TRANSFER)),  # it has ended after all
    (
        "prefill",
        KvAgentResult(TRANSFER, WHOLE, Status.CANCELLED, 0, True, Code.CANCELLED, "cancelled by the decode rank"),
    ),
]

_GROWING: list[Line] = [
    ("decode", _fetch([Route.STAGED])),
    # 16 of 32 tokens are computed: the offer has one block
    ("prefill", msgspec.structs.replace(_accept(Route.STAGED), spans=[Span("attention", 0, pack_u32([40]))])),
    ("prefill", _want(0)),
    ("decode", _reserve(_extent(0))),
    ("prefill", _ok(0)),
    # the others are, in a block that was not named yet
    ("prefill", msgspec.structs.replace(_want(1), spans=[Span("attention", 0, pack_u32([41]))])),
    ("decode", _reserve(_extent(1))),
    ("prefill", _ok(1, last=True)),
    ("decode", Release(TICKET)),
]

_PROBED: list[Line] = [
    *_handshake(msgspec.structs.replace(_BARE, capabilities=CAPABILITIES | Capability.PROBE)),
    ("decode", Probe(TRANSFER, _STAGING[0].address, 1 << 20, 30_000)),
    ("prefill", KvAgentResult(TRANSFER, WHOLE, Status.OK, 0, True)),
]

_SUMS = bytes(range(0x80, 0xA0))  # of two regions and two rows
_SUMMED: list[Line] = [
    *_handshake(msgspec.structs.replace(_BARE, capabilities=CAPABILITIES | Capability.SUMS)),
    ("decode", Check(1)),
    ("decode", _fetch([Route.STAGED])),
    ("prefill", _accept(Route.STAGED)),
    ("prefill", _want(0, 1)),
    ("decode", _reserve(_extent(0), _extent(1))),
    ("prefill", Sums(TRANSFER, 0, _SUMS)),
    ("prefill", _ok(0)),
]
_SUMS_AGREE: list[Line] = [
    *_SUMMED,
    ("prefill", Sums(TRANSFER, 1, _SUMS)),
    ("prefill", _ok(1, last=True)),
    ("decode", Release(TICKET)),
]
_SUMS_DIFFER: list[Line] = [
    *_SUMMED,
    ("decode", Cancel(TRANSFER, Code.INTEGRITY)),  # the blocks add up to something else
    (
        "prefill",
        KvAgentResult(TRANSFER, WHOLE, Status.CANCELLED, 0, True, Code.INTEGRITY, "cancelled by the decode rank"),
    ),
]

_RENEWED: list[Line] = [
    *_handshake(msgspec.structs.replace(_BARE, capabilities=CAPABILITIES | Capability.RENEWED)),
    ("decode", _fetch([Route.STAGED])),
    ("prefill", _accept(Route.STAGED)),
    ("prefill", _want(0, 1)),
    ("decode", _reserve(_extent(0))),
    ("prefill", _ok(0)),
    ("decode", Renewed(1, b"the agent that there is now")),
    ("decode", _reserve(_extent(1))),
    ("prefill", _ok(1, last=True)),
    ("decode", Release(TICKET)),
]

_MARK_KEYS = {"decode": bytes(range(0x20, 0x40)), "prefill": bytes(range(0x40, 0x60))}
_INCARNATIONS = {"decode": HELLO.incarnation, "prefill": WELCOME.incarnation}
_OTHER: dict[Side, Side] = {"decode": "prefill", "prefill": "decode"}
_AGAIN = msgspec.structs.replace(HELLO, nonce=bytes(range(0xA0, 0xC0)))


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


def _mark(side: Side, key: bytes | None = None) -> bytes:
    """PROTOCOL.md section 4.8, written down once more like the proofs: by what a side is known again to the other."""
    return _mac(key or _MARK_KEYS[side], b"kvxfer mark v1", _INCARNATIONS[_OTHER[side]])


def _sealed(side: Side, hello: Hello) -> tuple[bytes, bytes]:
    """The same, sealed in the session that begins with this frame, and the proof of it."""
    hashes = b"".join(hashlib.sha256(encode(message)[4:]).digest() for message in (hello, _BARE))
    said = {"decode": b"client", "prefill": b"server"}[side] + hashes
    mark, seal = _mark(side), _mac(_mark(_OTHER[side]), b"kvxfer seal v1", said)
    return bytes(a ^ b for a, b in zip(mark, seal, strict=True)), _mac(mark, b"kvxfer same v1", said)


def _meeting(hello: Hello, marks: dict[Side, tuple[bytes, bytes]]) -> list[Line]:
    """A handshake in which both show who they are."""
    agents: dict[Side, Agent] = {
        "decode": msgspec.structs.replace(CLIENT_AGENT, proof=_proof(b"client", hello, _BARE)),
        "prefill": SERVER_AGENT,
    }
    said = [(side, msgspec.structs.replace(agents[side], mark=m, same=s)) for side, (m, s) in marks.items()]
    return [
        ("decode", hello),
        ("prefill", msgspec.structs.replace(_BARE, proof=_proof(b"server", hello, _BARE))),
        *said,
    ]


_FIRST_MEETING = _meeting(HELLO, {"decode": (_mark("decode"), b""), "prefill": (_mark("prefill"), b"")})
_MET_AGAIN = _meeting(_AGAIN, {"decode": _sealed("decode", _AGAIN), "prefill": _sealed("prefill", _AGAIN)})
_REFUSAL = Goodbye(
    Code.IDENTITY,
    "60616263 was met before, and nothing proves that this is the same process; if it is no impostor, start it again",
)
_NOT_THE_SAME = [
    *_meeting(_AGAIN, {"decode": (_mark("decode", bytes(32)), b"")}),
    ("prefill", _REFUSAL),
]

# name, what happens, how it ends for the transfer, lines
_SCRIPTS: list[tuple[str, str, str, list[Line]]] = [
    ("staged_two_chunks", "a staged fetch whose second chunk becomes ready later", "done", [*HANDSHAKE, *_STAGED]),
    ("direct_in_place", "grants without addresses; chunks land in any order", "done", [*HANDSHAKE, *_DIRECT]),
    ("granted_ahead", "the grant rides with the fetch, and is used", "done", [*HANDSHAKE, *_AHEAD]),
    ("staging_granted_ahead", "an extent rides with the fetch", "done", [*HANDSHAKE, *_AHEAD_STAGED]),
    ("granted_ahead_in_vain", "the fetch waits for its offer, and its grant is void", "done", [*HANDSHAKE, *_VOID]),
    ("pull_with_landed", "the decode rank reads under a lease and reports", "done", [*HANDSHAKE, *_PULL]),
    ("forged_ticket", "the MAC is wrong: a refusal, and the session goes on", "refused", [*HANDSHAKE, *_REFUSED]),
    ("cancel_between_chunks", "a time-out after the first chunk", "stopped", [*HANDSHAKE, *_CANCELLED]),
    ("fetch_before_offer", "a claim and a fetch wait for their offer", "done", [*HANDSHAKE, *_PARKED]),
    ("cancel_before_offer", "a parked fetch is given up", "stopped", [*HANDSHAKE, *_PARKED_CANCELLED]),
    ("payload_after_the_last_chunk", "the offer is finished late", "done", [*HANDSHAKE, *_PAYLOAD_LATER]),
    ("offer_that_grows", "the second block comes when its tokens are computed", "done", [*HANDSHAKE, *_GROWING]),
    ("lane_measured", "staging memory is lent, written, and given back", "done", _PROBED),
    ("chunks_summed", "what arrived adds up to what was sent (sums here are fixed numbers)", "done", _SUMS_AGREE),
    ("agent_made_anew", "the decode rank rebuilds its agent when nothing is granted", "done", _RENEWED),
    ("chunk_damaged", "what arrived adds up to something else, and its sender hears of it", "stopped", _SUMS_DIFFER),
    ("abandoned_while_it_is_read", "a reader gives up, and a read of it stands still", "stopped",
     [*HANDSHAKE, *_ABANDONED]),
    ("drained", "the prefill rank goes away in order", "none",
     [*HANDSHAKE, ("prefill", Goodbye(Code.DRAINING, "the worker is closing"))]),
    ("first_meeting", "both show their marks", "done", [*_FIRST_MEETING, *_STAGED]),
    ("met_again", "the same two, in another session: the marks are sealed and proved", "done", [*_MET_AGAIN, *_STAGED]),
    ("not_the_same_process", "somebody else says to be the decode rank of first_meeting", "identity", _NOT_THE_SAME),
    ("version_mismatch_seen_by_decode", "the server speaks version 2 alone; the client closes", "mismatch",
     [("decode", HELLO), ("prefill", Welcome(*_greeting(PREFILL, 0x10, 2, 2)))]),
    ("version_mismatch_seen_by_prefill", "the client speaks version 2 alone; the server closes", "mismatch",
     [("decode", Hello(*_greeting(DECODE, 0x60, 2, 2)))]),
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
            "client": CLIENT_AGENT.proof.hex(),
        },
        "epoch": {"incarnations": [bytes(range(0x10, 0x20)).hex()], "epoch": PREFILL.epoch},
        "ticket": {"key": KEY.hex(), "epoch": PREFILL.epoch, **_ticket_fields()},
        "mark": {side: _mark_fields(side) for side in _OTHER},
    }


def _mark_fields(side: Side) -> dict[str, str]:
    """Of the conversation met_again."""
    sealed, same = _sealed(side, _AGAIN)
    key, peer, mark = _MARK_KEYS[side], _INCARNATIONS[_OTHER[side]], _mark(side)
    fields = {"key": key, "incarnation_of_the_other": peer, "mark": mark, "sealed": sealed, "same": same}
    return {name: value.hex() for name, value in fields.items()}


def _ticket_fields() -> dict[str, Any]:
    fields = plain(TICKET)
    return {**fields, "mac": TICKET.mac.hex()} if isinstance(fields, dict) else {}
