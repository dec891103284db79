"""Golden frames: the bytes in git are what the code writes and reads, and an independent decoder agrees."""

import copy
import hashlib
import hmac
import json
import struct
from typing import get_args

import jsonschema
import msgpack
import msgspec
import pytest

from kvxfer.errors import ProtocolError
from kvxfer.protocol.framing import HANDSHAKE_FRAME_LIMIT, FrameReader, decode, decode_body, encode
from kvxfer.protocol.messages import Agent, Message
from kvxfer.tickets import EngineCard, Issuer
from kvxfer.tools.inspect import registry_name
from proto import generate
from proto.conversations import handshake_vector
from proto.frames import plain, valid
from proto.generate import HERE, changed_vectors, text
from proto.schema import body_schema, messages_schema, to_json

TYPES = {registry_name(kind): kind for kind in get_args(Message)}
VALID = json.loads((HERE / "vectors/valid.json").read_text())["frames"]
INVALID = json.loads((HERE / "vectors/invalid.json").read_text())["frames"]
KNOWN = [entry for entry in VALID if entry["message"]]
EXACT = [entry for entry in VALID if entry["exact"]]
MESSAGES = jsonschema.Draft202012Validator(messages_schema())
BODIES = jsonschema.Draft202012Validator(body_schema())


def name(entry):
    return entry["name"]


def payload(entry):
    frame = bytes.fromhex(entry["hex"])
    assert struct.unpack_from("<I", frame) == (len(frame) - 4,)
    return frame[4:]


def unpacked(data):
    """What the independent decoder reads; it shares no code with msgspec."""
    return msgpack.unpackb(data, raw=False, strict_map_key=False, unicode_errors="replace")


def exact_types(left, right):
    """Equality that tells 1 from True and from 1.0, and bytes from str."""
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(exact_types, left, right))
    return type(left) is type(right) and left == right


def builtins(value):
    """A struct as the list that MessagePack carries."""
    if isinstance(value, msgspec.Struct):
        tag = type(value).__struct_config__.tag
        return [*([] if tag is None else [tag]), *(builtins(getattr(value, f)) for f in value.__struct_fields__)]
    if isinstance(value, list | tuple):
        return [builtins(entry) for entry in value]
    if isinstance(value, memoryview):
        return bytes(value)
    return int(value) if type(value).__name__ in {"Code", "Route", "Status"} else value


@pytest.mark.parametrize("file", ["valid", "invalid", "conversations", "handshake", "plans"])
def test_the_vectors_in_git_are_what_the_code_writes(file):
    document = generate.generate()[f"vectors/{file}.json"]
    assert (HERE / f"vectors/{file}.json").read_text() == text(document), "run `make schema`"


@pytest.mark.parametrize("entry", EXACT, ids=name)
def test_a_frame_encodes_to_its_bytes(entry):
    message = decode(payload(entry))
    assert message is not None
    assert encode(message).hex() == entry["hex"]


@pytest.mark.parametrize("entry", EXACT, ids=name)
def test_an_independent_encoder_writes_the_same_bytes(entry):
    message = decode(payload(entry))
    assert msgpack.packb(builtins(message)) == payload(entry)


@pytest.mark.parametrize("entry", KNOWN, ids=name)
def test_a_frame_decodes_to_its_fields(entry):
    message = decode(payload(entry))
    assert type(message) is TYPES[entry["message"]]
    assert plain(message) == entry["fields"]
    assert list(FrameReader().feed(bytes.fromhex(entry["hex"]))) == [message]


@pytest.mark.parametrize("entry", EXACT, ids=name)
def test_an_independent_decoder_reads_the_same_values(entry):
    assert exact_types(unpacked(payload(entry)), builtins(decode(payload(entry))))


@pytest.mark.parametrize("entry", KNOWN, ids=name)
def test_a_frame_validates_against_the_schema(entry):
    MESSAGES.validate(to_json(unpacked(payload(entry))))
    message = decode(payload(entry))
    if isinstance(message, Agent):
        BODIES.validate(to_json(unpacked(message.body)))
        assert msgpack.packb(builtins(decode_body(message.body))) == message.body


def test_every_message_has_a_golden_frame():
    assert {entry["message"] for entry in EXACT} == set(TYPES)
    assert any(entry["message"] is None for entry in VALID)


@pytest.mark.parametrize("entry", [entry for entry in VALID if not entry["message"]], ids=name)
def test_an_ignorable_frame_is_skipped(entry):
    assert decode(payload(entry)) is None
    assert not MESSAGES.is_valid(to_json(unpacked(payload(entry))))


@pytest.mark.parametrize("entry", [entry for entry in INVALID if entry["outcome"] == "refused"], ids=name)
def test_an_invalid_frame_is_refused(entry):
    reader = FrameReader(entry.get("limit", HANDSHAKE_FRAME_LIMIT))
    with pytest.raises(ProtocolError):
        list(reader.feed(bytes.fromhex(entry["hex"])))
    if "limit" not in entry:
        with pytest.raises(ProtocolError):
            decode(payload(entry))


@pytest.mark.parametrize("entry", [entry for entry in INVALID if entry["outcome"] == "incomplete"], ids=name)
def test_an_incomplete_frame_is_waited_for(entry):
    data = bytes.fromhex(entry["hex"])
    reader = FrameReader()
    assert list(reader.feed(data)) == []
    assert reader.buffered_bytes == len(data)


# What JSON Schema cannot tell: MessagePack that is damaged, bin from str, bytes counts within four, depth.
BEYOND_A_SCHEMA = {
    "payload_is_truncated", "array_is_truncated", "array_of_four_billion", "bin_of_four_gigabytes", "trailing_bytes",
    "byte_c1", "empty", "str_for_bin", "bin_for_str", "float_for_int", "string_is_no_utf8", "string_is_a_surrogate",
    "mac_is_too_long", "incarnation_is_too_short", "incarnation_is_too_long", "agent_proves_too_little",
    "agent_proves_too_much", "ids_are_torn", "layers_are_torn", "span_is_torn", "sums_are_torn",
    "tail_is_nested_too_deeply",
}  # fmt: skip


IN_A_SCHEMA = [
    entry
    for entry in INVALID
    if entry["outcome"] == "refused" and "limit" not in entry and entry["name"] not in BEYOND_A_SCHEMA
]


@pytest.mark.parametrize("entry", IN_A_SCHEMA, ids=name)
def test_the_schema_refuses_it_too(entry):
    assert not MESSAGES.is_valid(to_json(unpacked(payload(entry))))


def test_the_exceptions_are_vectors():
    assert {entry["name"] for entry in INVALID} >= BEYOND_A_SCHEMA
    assert len(IN_A_SCHEMA) > 15


def test_names_are_unique():
    for entries in (VALID, INVALID):
        names = [entry["name"] for entry in entries]
        assert len(set(names)) == len(names)


# --- golden means golden


def test_a_changed_vector_is_noticed():
    old = {"frames": valid()}
    assert changed_vectors(old, copy.deepcopy(old)) == []
    for key, value in (("hex", "00"), ("message", "PING")):
        new = copy.deepcopy(old)
        new["frames"][3][key] = value
        assert changed_vectors(old, new) == [old["frames"][3]["name"]]
    new = copy.deepcopy(old)
    del new["frames"][0]
    new["frames"].append({"name": "a new one", "hex": "", "message": None})
    assert changed_vectors(old, new) == [old["frames"][0]["name"]]


def test_the_generator_does_not_overwrite_golden_bytes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate, "HERE", tmp_path)
    assert generate.main() == 0
    path = tmp_path / "vectors/valid.json"
    original = path.read_text()
    document = json.loads(original)
    document["frames"][5]["hex"] = "02000000" + "9105"
    path.write_text(json.dumps(document))
    schema = tmp_path / "schema/messages.json"
    schema.write_text("{}")
    capsys.readouterr()
    assert generate.main() == 1
    assert document["frames"][5]["name"] in capsys.readouterr().err
    assert json.loads(path.read_text()) == document
    assert schema.read_text() == "{}"


# --- proofs and tickets, computed once more from the specification's words

HANDSHAKE = json.loads((HERE / "vectors/handshake.json").read_text())


@pytest.mark.parametrize("role", ["server", "client"])
def test_a_proof_is_what_the_specification_says(role):
    proof = HANDSHAKE["proof"]
    hello = hashlib.sha256(bytes.fromhex(proof["hello_payload"])).digest()
    welcome = hashlib.sha256(bytes.fromhex(proof["welcome_payload_with_empty_proof"])).digest()
    expected = hmac.new(bytes.fromhex(proof["secret"]), role.encode() + hello + welcome, hashlib.sha256)
    assert proof[role] == expected.hexdigest()
    assert msgpack.unpackb(bytes.fromhex(proof["welcome_payload_with_empty_proof"]))[-1] == b""


def x25519(private, point):
    """RFC 7748, section 5, in its own words and numbers."""
    prime, base = 2**255 - 19, int.from_bytes(point, "little") & (1 << 255) - 1
    scalar = int.from_bytes(private, "little") & ~7 & (1 << 255) - 1 | 1 << 254
    x2, z2, x3, z3 = 1, 0, base, 1
    for bit in reversed(range(255)):
        if scalar >> bit & 1:
            x2, z2, x3, z3 = x3, z3, x2, z2
        a, b = x2 + z2, x2 - z2
        da, cb = (x3 - z3) * a, (x3 + z3) * b
        x3, z3 = (da + cb) ** 2 % prime, base * (da - cb) ** 2 % prime
        aa, bb = a * a, b * b
        x2, z2 = aa * bb % prime, (aa - bb) * (aa + 121665 * (aa - bb)) % prime
        if scalar >> bit & 1:
            x2, z2, x3, z3 = x3, z3, x2, z2
    return (x2 * pow(z2, prime - 2, prime) % prime).to_bytes(32, "little")


@pytest.mark.parametrize(("role", "other"), [("client", "server"), ("server", "client")])
def test_an_incarnation_is_proved_as_the_specification_says(role, other):
    same = {name: bytes.fromhex(value) for name, value in HANDSHAKE["same"].items()}
    private = same[f"{role}_private"]
    assert x25519(private, (9).to_bytes(32, "little")) == same[f"{role}_incarnation"]
    assert x25519(private, same[f"{other}_incarnation"]) == same["shared"]
    hello, welcome = (
        bytes.fromhex(HANDSHAKE["proof"][name]) for name in ("hello_payload", "welcome_payload_with_empty_proof")
    )
    said = {"client": hello, "server": welcome}[role]
    assert msgpack.unpackb(said)[6] == same[f"{role}_incarnation"]
    covered = role.encode() + hashlib.sha256(hello).digest() + hashlib.sha256(welcome).digest()
    assert hmac.new(same["shared"], b"kvxfer same v1" + covered, hashlib.sha256).digest() == same[role]


def test_an_epoch_is_what_the_specification_says():
    epoch = HANDSHAKE["epoch"]
    joined = b"".join(map(bytes.fromhex, epoch["incarnations"]))
    assert epoch["epoch"] == hashlib.sha256(b"kvxfer epoch v1" + joined).hexdigest()[:32]


def test_a_mac_is_what_the_specification_says():
    ticket = HANDSHAKE["ticket"]
    name_bytes = ticket["request"].encode()
    message = b"".join((
        b"kvxfer ticket v1",
        bytes.fromhex(ticket["epoch"]),
        struct.pack("<I", len(name_bytes)),
        name_bytes,
        struct.pack("<q", ticket["attempt"]),
    ))  # fmt: skip
    expected = hmac.new(bytes.fromhex(ticket["key"]), message, hashlib.sha256).digest()[:16]
    assert ticket["mac"] == expected.hex()
    card = EngineCard.from_dict(json.loads((HERE / "vectors/conversations.json").read_text())["setting"]["prefill"])
    assert Issuer(card, bytes.fromhex(ticket["key"])).ticket(ticket["request"], attempt=258)["mac"] == ticket["mac"]


def test_the_handshake_vector_is_stable():
    assert handshake_vector() == HANDSHAKE
