"""What a peer says of its cache: wrong shapes, strides, counts and addresses, read and planned with as a worker would.

Either it is refused with a documented error, soon; or every plan that comes of it stays inside of this rank's memory.
"""

from random import Random
from time import thread_time

import campaign
import msgspec
import numpy as np
import pytest
from mutation import Mutator
from stage import Cache

import kvxfer.copy.template  # noqa: F401  # as a worker does when it opens: what is timed is the peer's doing
from kvxfer.errors import KvxferError, ProtocolError
from kvxfer.geometry import CacheGeometry
from kvxfer.plans.pairs import PairPlans, decode_spans, fit, geometry_to_wire
from kvxfer.protocol.framing import decode_body, encode_body
from kvxfer.protocol.messages import AgentBody, Span, TensorFrame, pack_u32
from kvxfer.protocol.session import Identity, PeerInfo

OWN = Cache()
GEOMETRY = CacheGeometry.of(OWN.tensors)
MEMORY = [(memory.data_ptr(), memory.data_ptr() + memory.nbytes) for memory in OWN.memory.values()]
PEERS = [
    Cache(),
    Cache(layout="HND", block_tokens=8, blocks=8),
    Cache(heads=range(2, 8), layers=range(1, 4)),
    Cache(layout="MLA"),
    Cache(layout="state"),
]
SECONDS = 3.0
"""CPU time for one body and the plans with it."""


def body(cache):
    frames = geometry_to_wire(CacheGeometry.of(cache.tensors), with_addresses=True)
    return encode_body(AgentBody("loopback", b"metadata", frames))


MUTATOR = Mutator([body(cache) for cache in PEERS])
FIELDS = [field.name for field in msgspec.structs.fields(TensorFrame)]


def drawn(draw: Random) -> AgentBody:
    """A body with some fields of some tensors changed, that a frame can hold."""
    while True:
        if (found := attempt(draw)) is not None:
            return found


def attempt(draw: Random) -> AgentBody | None:
    if draw.random() < 0.3:
        try:
            return decode_body(MUTATOR.payload(draw))
        except ProtocolError:
            return None
    found = decode_body(draw.choice(MUTATOR.payloads))
    tensors = list(found.tensors)
    try:
        for _ in range(draw.choice((1, 1, 2, 4))):
            at, name = draw.randrange(len(tensors)), draw.choice(FIELDS)
            value = MUTATOR.changed(draw, getattr(tensors[at], name), 1)
            if draw.random() < 0.3:  # in all of them alike
                tensors = [msgspec.structs.replace(tensor, **{name: value}) for tensor in tensors]
            else:
                tensors[at] = msgspec.structs.replace(tensors[at], **{name: value})
        return decode_body(encode_body(msgspec.structs.replace(found, tensors=tensors)))
    except (ProtocolError, TypeError, ValueError, OverflowError):  # no frame holds it
        return None


def inside(addresses, lengths):
    for address, length in zip(addresses.tolist(), lengths.tolist(), strict=True):
        assert any(start <= address and address + length <= stop for start, stop in MEMORY)


def plan_with(draw: Random, peer: PeerInfo) -> int:
    """Meet it in both roles, plan a transfer with it, and look where its pieces lie; how many plans there were."""
    made = 0
    for sending in (True, False):
        plans = PairPlans(GEOMETRY)
        try:
            plans.add_peer(peer, plans.examine(peer, sending=sending, convert=draw.random() < 0.3))
            whole = plans._agreed[peer.identity.incarnation, sending].pair
            if whole is None:
                continue
            pair = plans.pair(peer, whole.selections, sending=sending)
            if not sending:
                plans.shares([peer], rank=0)
            tokens = range(draw.randrange(4), draw.choice((5, 16, 30)))
            ours = {group: some_span(draw, 16) for group in pair.groups}
            theirs = decode_spans([Span(g, draw.randrange(3), pack_u32(some_ids(draw))) for g in pair.groups])
            src, dst = (ours, theirs) if sending else (theirs, ours)
            plan = pair.template.bind(src, dst, tokens, covered=tokens.stop)
            bound = fit(plan, target_bytes=2048, limit_bytes=4096)
            for number in range(min(bound.grid.chunks, 4)):
                pieces = bound.chunk(number).listed()
                inside(pieces.src if sending else pieces.dst, pieces.nbytes)
            made += 1
        except KvxferError as error:
            campaign.is_short(error, 1 << 20)
    return made


def some_span(draw: Random, ids: int):
    from kvxfer.geometry import Span as Blocks

    return Blocks(np.asarray(draw.sample(range(ids), 8), np.int64), 0)


def some_ids(draw: Random):
    return draw.choice(
        ([*range(8)], [*range(8)], [7] * 12, draw.choices(range(20), k=10), [0xFFFF_FFFF] * 8, [], [*range(16)])
    )


def test_bodies():
    made = 0
    for number in range(max(1000, campaign.FRAMES // 100)):
        draw = Random(f"{campaign.SEED}/geometry/{number}")
        told = drawn(draw)
        identity = Identity("peer", b"e" * 16, b"i" * 16, 0, 1, 0b1111111, "kvxfer")
        began = thread_time()
        try:
            made += plan_with(draw, PeerInfo(identity, encode_body(told)))
            assert thread_time() - began < SECONDS
        except BaseException as error:
            error.add_note(f"FUZZ_SEED={campaign.SEED}, case {number}: {told!r:.3000}")
            raise
    assert made > 100


def huge(**fields):
    """Tensors that are as large as a frame can say."""
    return [msgspec.structs.replace(tensor, **fields) for tensor in decode_body(body(PEERS[0])).tensors]


LARGE = {
    "many blocks": huge(shape=[2, 0xFFFF_FFFF, 4, 4, 8]),
    "many tensors": [
        msgspec.structs.replace(huge()[0], layers=pack_u32([layer]), base=0, part=f"p{layer}") for layer in range(4000)
    ],
    "many layers": huge(layers=pack_u32(range(1_000_000))),
    "many layers in each of many": huge(layers=pack_u32(range(16_384)))[:1] * 60,
    "many layers on an axis": [
        msgspec.structs.replace(
            huge()[0],
            axes="layer kv block token head dim",
            shape=[16_384, 2, 16, 4, 4, 8],
            strides=[16384, 8192, 512, 128, 32, 4],
            layers=pack_u32(range(16_384)),
        )
    ],
    "many heads": huge(head_stop=1 << 24, shape=[2, 16, 4, 1 << 24, 8], strides=[1 << 40, 1 << 36, 1 << 31, 32, 4]),
    "wide rows": huge(shape=[2, 16, 4, 4, 1 << 24], strides=[1 << 40, 1 << 36, 1 << 31, 1 << 27, 4]),
    "a base at the end": huge(base=(1 << 63) - 1),
    "many scales": huge(scale=b"\x00\x00\x80\x3f" * 65_536),
    "scales that are no numbers": huge(scale=b"\x00\x00\xc0\x7f"),
    "tokens without end": huge(shape=[2, 16, 0xFFFF_FFFF, 4, 8], strides=[1 << 46, 1 << 40, 128, 32, 4]),
    "turns without end": huge(interleave_of=16_384, interleave_chunk=0xFFFF_FFFF),
    "rows without end": huge(tokens_per_row=0xFFFF_FFFF),
}


@pytest.mark.parametrize("what", LARGE)
def test_bodies_that_are_as_large_as_they_can_be(what):
    told = AgentBody("loopback", b"metadata", LARGE[what])
    identity = Identity("peer", b"e" * 16, b"i" * 16, 0, 1, 0b1111111, "kvxfer")
    began = thread_time()
    plan_with(Random(1), PeerInfo(identity, encode_body(told)))
    assert thread_time() - began < SECONDS
