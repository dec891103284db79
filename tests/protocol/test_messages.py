"""Every message survives the wire; what is outside its bounds does not."""

import enum
import sys
from typing import Annotated, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import Code, ProtocolError
from kvxfer.protocol import messages as wire
from kvxfer.protocol.framing import decode, decode_body, encode, encode_body

MESSAGES = get_args(wire.Message)
TICKET = wire.TicketRef("req-1", 0, bytes(16))
PACKED = {("Selection", "layers"), ("Span", "ids"), ("TensorFrame", "layers"), ("TensorFrame", "scale")}


def values(kind, meta=None):
    """Values of a field's type, its bounds included."""
    if get_origin(kind) is Annotated:
        return values(kind.__origin__, kind.__metadata__[0])
    low, high = (meta.min_length or 0, meta.max_length) if meta else (0, None)
    if kind is bool:
        return st.booleans()
    if kind is int and meta is not None:
        return st.integers(meta.ge, meta.le) | st.sampled_from([meta.ge, meta.le])
    if kind is str:
        return st.text(min_size=low, max_size=min(high or 8, 8))
    if kind in {bytes, memoryview}:
        return st.binary(min_size=low, max_size=max(low, min(high or 8, 8))).map(kind)
    if get_origin(kind) is list:
        return st.lists(values(get_args(kind)[0]), max_size=3)
    if get_origin(kind) is tuple:
        return st.tuples(*map(values, get_args(kind)))
    if issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    return structs(kind)


def structs(kind):
    fields = {}
    for field in msgspec.structs.fields(kind):
        packed = (kind.__name__, field.name) in PACKED
        ids = st.lists(st.integers(0, 0xFFFF_FFFF), max_size=5).map(wire.pack_u32)
        fields[field.name] = ids if packed else values(field.type)
        if (kind, field.name) == (wire.Sums, "sums"):
            fields[field.name] = st.lists(st.binary(min_size=8, max_size=8), max_size=3).map(b"".join)
    return st.builds(kind, **fields)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_survives_the_wire(kind):
    @settings(max_examples=25, deadline=None)
    @given(structs(kind))
    def survives(message):
        frame = encode(message)
        assert int.from_bytes(frame[:4], "little") == len(frame) - 4
        assert decode(frame[4:]) == message
        assert decode(memoryview(frame)[4:]) == message

    survives()


@settings(max_examples=25, deadline=None)
@given(structs(wire.AgentBody))
def test_a_body_survives_the_wire(body):
    assert decode_body(encode_body(body)) == body


def test_defaults_are_part_of_the_wire():
    assert decode(encode(wire.Cancel(1))[4:]) == wire.Cancel(1, Code.CANCELLED)
    assert decode(bytes.fromhex("920d01")) == wire.Cancel(1, Code.CANCELLED)
    assert decode(bytes.fromhex("910f")) == wire.Goodbye(Code.DRAINING, "")
    assert decode(bytes.fromhex("93090105")) == wire.Ready(1, 5, 0, [], 0)
    assert decode(bytes.fromhex("940a010507")) == wire.Reserve(1, 5, 7, 0, [])
    assert decode(bytes.fromhex("93100105")) == wire.Arrived(1, 5, wire.Timings())
    result = decode(bytes.fromhex("960c01000100c2"))
    assert result == wire.KvAgentResult(1, 0, wire.Status.OK, 0, last=False)


@pytest.mark.parametrize(("kind", "known"), [(wire.Route, 4), (wire.Status, 5), (Code, 68)])
@pytest.mark.parametrize("number", [-(2**63), -1, 77, 1000, 2**64 - 1])
def test_an_unknown_enum_value_is_unknown(kind, known, number):
    assert kind(known).name != "UNKNOWN"
    assert kind(number) is kind.UNKNOWN
    packed = msgspec.msgpack.encode(number)
    assert msgspec.msgpack.decode(packed, type=kind) is kind.UNKNOWN


@pytest.mark.parametrize("kind", [wire.Route, wire.Status, Code])
@pytest.mark.parametrize("value", ["OK", None, 1.5, b"1", [1]])
def test_an_enum_value_of_another_type_is_refused(kind, value):
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind)


def test_a_refusal_with_an_unknown_code_is_still_a_refusal():
    assert decode(msgspec.msgpack.encode([8, 1, 5000, "newer"])) == wire.Refuse(1, Code.UNKNOWN, "newer")


def test_unknown_capability_bits_survive():
    assert wire.Capability(0x8001) & wire.Capability.STAGED
    assert int(wire.Capability(0x8001)) == 0x8001


@given(st.lists(st.integers(0, 0xFFFF_FFFF), max_size=20))
def test_packed_ids_survive(ids):
    packed = wire.pack_u32(ids)
    assert len(packed) == 4 * len(ids)
    assert list(wire.unpack_u32(packed)) == ids


def test_packed_ids_are_little_endian_on_every_machine(monkeypatch):
    assert wire.pack_u32([1, 0x01020304]) == bytes.fromhex("0100000004030201")
    monkeypatch.setattr(sys, "byteorder", "big" if sys.byteorder == "little" else "little")
    assert wire.pack_u32([1]) == bytes.fromhex("00000001")  # swapped, since this machine is not what it says
    assert list(wire.unpack_u32(bytes.fromhex("00000001"))) == [1]


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_ids_that_do_not_fit_are_refused(bad):
    with pytest.raises(OverflowError):
        wire.pack_u32([bad])


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "make",
    [
        lambda torn: wire.Span("g", 0, torn),
        lambda torn: wire.Selection("g", "", "k", torn, 0, 1),
        lambda torn: wire.TensorFrame("g", "", "k", "block", [1], [1], torn, 0, 1, "int8", 1, 0),
        lambda torn: wire.Sums(1, 0, torn),
    ],
)
def test_torn_ids_are_refused(make, size):
    with pytest.raises(ValueError, match=f"^{size} bytes are no whole number"):
        make(bytes(size))
    with pytest.raises(ValueError, match="multiple"):
        wire.unpack_u32(bytes(size))


def raw(message, **changes):
    """The payload of a message with some fields replaced, whatever they are."""
    fields = {name: getattr(message, name) for name in message.__struct_fields__} | changes
    return msgspec.msgpack.encode([message.__struct_config__.tag, *fields.values()])


FETCH = wire.Fetch(1, TICKET, [], [], 0, 1, [], 0, 0)
ACCEPT = wire.Accept(1, wire.Route.STAGED, 0, [], 1, 1, 1, b"")
COUNTING = [wire.Ready(1, 1), wire.Reserve(1, 1, 1), wire.Read(1, 1), wire.Arrived(1, 1)]


@pytest.mark.parametrize(
    ("message", "changes", "fits"),
    [
        (ACCEPT, {"chunks": wire.MAX_CHUNKS + 1}, {"chunks": wire.MAX_CHUNKS}),
        (ACCEPT, {"spans": [wire.Span("g", 0, b"")] * 1025}, {"spans": [wire.Span("g", 0, b"")] * 1024}),
        (ACCEPT, {"digest": bytes(65)}, {"digest": bytes(64)}),
        (FETCH, {"routes": [1] * 17}, {"routes": [1] * 16}),
        (FETCH, {"selections": [["g", "", "k", b"", 0, 1]] * 4097}, {"selections": [["g", "", "k", b"", 0, 1]] * 4096}),
        (FETCH, {"timeout_ms": 2**32}, {"timeout_ms": 2**32 - 1}),
        (FETCH, {"max_extent_bytes": 2**63}, {"max_extent_bytes": 2**63 - 1}),
        (wire.Claim([]), {"tickets": [TICKET] * (wire.MAX_TICKETS + 1)}, {"tickets": [TICKET] * wire.MAX_TICKETS}),
        *((kind, {"chunks": wire.MAX_CHUNKS + 1}, {"chunks": wire.MAX_CHUNKS}) for kind in COUNTING),
        *((kind, {"chunks": -1}, {"chunks": 0}) for kind in COUNTING),
        (
            wire.Reserve(1, 1, 0),
            {"ring": [wire.Place(0, 0)] * (wire.MAX_PLACES + 1)},
            {"ring": [wire.Place(0, 0)] * wire.MAX_PLACES},
        ),
        (wire.Goodbye(), {"reason": "x" * 1025}, {"reason": "\N{GRINNING FACE}" * 1024}),
        (wire.KvAgentResult(1, 0, wire.Status.OK, 0, last=True), {"payload": bytes(65537)}, {"payload": bytes(65536)}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else type(value).__name__,
)
def test_bounds(message, changes, fits):
    assert decode(raw(message, **fits)) is not None
    with pytest.raises(ProtocolError):
        decode(raw(message, **changes))


TENSOR = wire.TensorFrame("g", "", "k", "block", [1], [1], b"", 0, 1, "int8", 1, 0)


@pytest.mark.parametrize(("changes", "fits"), [
    ({"strides": [2**63]}, {"strides": [-(2**63), 2**63 - 1]}), ({"shape": [-1]}, {"shape": [0, 2**32 - 1]}),
    ({"shape": [1] * 17}, {"shape": [1] * 16}), ({"null_block": -2}, {"null_block": -1}),
    ({"null_block": 2**32}, {"null_block": 2**32 - 1}), ({"base": -1}, {"base": 2**63 - 1}),
])  # fmt: skip
def test_bounds_of_a_tensor(changes, fits):
    def body(change):
        fields = {name: getattr(TENSOR, name) for name in TENSOR.__struct_fields__} | change
        return msgspec.msgpack.encode(["f", b"", [list(fields.values())]])

    assert decode_body(body(fits)).tensors
    with pytest.raises(ProtocolError, match="agent body cannot be decoded"):
        decode_body(body(changes))
