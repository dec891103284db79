"""Frames as text: every message reads well, secrets stay hidden, and damage is explained."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.protocol import messages as wire
from kvxfer.protocol.framing import encode, encode_body
from kvxfer.tools.inspect import frames, from_hex
from proto.frames import invalid, valid

SECRET = bytes(range(0xA0, 0xC0))


def describe(data):
    return [line for lines, _ in frames(data) for line in lines]


def lines(*messages):
    return describe(b"".join(encode(message) for message in messages))


def raw(payload_hex):
    payload = bytes.fromhex(payload_hex)
    return describe(struct.pack("<I", len(payload)) + payload)


def damaged(data):
    """The frames that cannot be decoded."""
    return [number for number, (_, whole) in enumerate(frames(data)) if not whole]


@pytest.mark.parametrize("entry", valid(), ids=lambda entry: entry["name"])
def test_every_valid_frame_is_described_without_a_complaint(entry):
    first, *rest = describe(bytes.fromhex(entry["hex"]))
    assert first.startswith(f"frame 0 at byte 0: {len(entry['hex']) // 2 - 4} bytes, tag ")
    assert first.endswith(entry["message"] or "may be ignored")
    assert not any("!" in line.split(":")[0] for line in rest)
    assert damaged(bytes.fromhex(entry["hex"])) == []
    for name in entry.get("fields", {}):
        assert any(line.split()[0] == name for line in rest if line.split()), name


@pytest.mark.parametrize("entry", invalid(), ids=lambda entry: entry["name"])
def test_every_invalid_frame_is_explained(entry):
    text = "\n".join(describe(bytes.fromhex(entry["hex"])))
    assert ("  ! " in text) or ("cut short" in text) or text == "no bytes"
    assert damaged(bytes.fromhex(entry["hex"])) == ([] if text == "no bytes" else [0])


def test_frames_that_cannot_be_decoded_are_counted():
    ping, bad, body = (
        encode(wire.Ping()),
        bytes.fromhex("0200000091c1"),
        encode(wire.Agent([("model", "m")], memoryview(b"\x93\xa1f\xa1x\x90"), SECRET)),
    )
    ignorable = struct.pack("<I", 3) + bytes.fromhex("91cc80")
    assert damaged(ping + bad + ignorable + body + ping) == [1, 3]
    assert damaged(ping + bad + ping[:-1]) == [1, 2]
    assert damaged(ping + bad + b"\x01") == [1, 2]
    assert damaged(ping + b"\xff\xff\xff\xff" + ping) == [1]


def test_a_damaged_body_does_not_hide_the_facts():
    text = "\n".join(lines(wire.Agent([("model", "m")], memoryview(b"\x93\xa1f\xa1x\x90"), SECRET)))
    assert "['model', 'm']" in text
    assert "! the body cannot be decoded (field `metadata`): Expected `bytes`, got `str`" in text


def secrets():
    ticket = wire.TicketRef("r", 0, SECRET)
    greeting = (1, 1, "p", "e", b"", bytes(32), 0, 1, 0, SECRET, 0)
    yield wire.Hello(*greeting)
    yield wire.Welcome(*greeting, SECRET)
    yield wire.Agent([], memoryview(encode_body(wire.AgentBody("f", SECRET, []))), SECRET, SECRET)
    yield wire.Release(ticket)
    yield wire.Fetch(1, ticket, [], [], 0, 1, [], 0, 0)
    yield wire.KvAgentResult(1, wire.WHOLE, wire.Status.OK, 0, last=True, payload=SECRET)


@pytest.mark.parametrize("message", list(secrets()), ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("damage", [b"", b"\x00"], ids=["whole", "damaged"])
def test_secrets_are_never_shown_whole(message, damage):
    payload = encode(message)[4:] + damage
    text = "\n".join(describe(struct.pack("<I", len(payload)) + payload))
    shown = text.replace("_", "").lower()
    assert SECRET[:3].hex() not in shown
    assert SECRET[-3:].hex() not in shown
    assert repr(SECRET[:3])[2:-1] not in text


@pytest.mark.parametrize("size", [1, 4, 15])
def test_short_secrets_are_hidden_entirely(size):
    text = "\n".join(lines(wire.Release(wire.TicketRef("r", 0, SECRET[:size]))))
    assert f"mac=... ({size} bytes)" in text
    assert "a0" not in text


def test_a_peers_text_cannot_steer_a_terminal():
    text = "\n".join(lines(wire.Goodbye(reason="\x1b[2J\r\n\x07"), wire.Release(wire.TicketRef("\x1b[31m", 0, b""))))
    assert not [character for character in text if ord(character) < 32 and character != "\n"]
    assert "'\\x1b[2J" in text


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        ("930901a161", "(field `chunks`): Expected `int`, got `str` - at `$[2]`"),
        ("920e93a172ffc400", "(field `ticket`): Expected `int` >= 0 - at `$[1][1]`"),
        ("930901c404", ": Input data was truncated"),
        ("93090ac1", ": MessagePack data is malformed: invalid opcode '\\xc1' (byte 3)"),
        ("930f40a2fffe", ": 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        ("", ": Input data was truncated"),
        ("9204" + "91" * 20_000 + "01", ": maximum recursion depth exceeded while deserializing an object"),
    ],
)
def test_damage_is_explained(payload, why):
    (line,) = raw(payload)[1:]
    assert line.startswith("  ! cannot be decoded")
    assert line.endswith(why)


def test_cut_streams_and_lengths_over_the_limit():
    assert describe(b"") == ["no bytes"]
    assert describe(b"\x01\x00") == ["frame 0 at byte 0: cut short: 2 of the 4 bytes of its length"]
    assert describe(encode(wire.Cancel(1))[:-1])[1] == "  ! cut short at byte 7: 3 of 4 bytes are there"
    over = describe(b"\xff\xff\xff\xff" + encode(wire.Ping()))
    assert over[1] == "  ! a length of 4294967295 is over the limit of 16777216: no frame begins at byte 0"
    assert len(over) == 2


def test_unknown_numbers_are_shown_as_they_came():
    assert raw("930d01cd03e7")[2] == "  code              UNKNOWN (999, not known to this version)"
    assert raw("930d0100")[2] == "  code              UNKNOWN (0)"
    assert "[STAGED (1), UNKNOWN (77, not known to this version)]" in raw("9a060193a17200c4009090000192014d0000")[7]


def test_absent_and_unknown_fields_are_marked():
    assert raw("93090105")[1:] == [
        "  transfer          1",
        "  chunks            5",
        "  lease_ms          0 ms (absent, default)",
        "  spans             [] (absent, default)",
        "  generation        0 (absent, default)",
    ]
    assert raw("94040102c3")[1:] == ["  (3 unknown tail fields, ignored)"]
    assert raw("9164")[0].endswith("tag 100, unknown to this version; closes the session")
    assert raw("91cc80") == ["frame 0 at byte 0: 3 bytes, tag 128, unknown to this version; may be ignored"]


@pytest.mark.parametrize(
    ("ids", "shown"),
    [
        ([], "none (0)"),
        ([1, 2, 3], "1-3 (3)"),
        ([0xFFFF_FFFE, 0xFFFF_FFFF, 0], "4294967294-4294967295, 0 (3)"),
        (list(range(0, 40, 2)), "0, 2, 4, 6, 8, 10, 12, 14, ... 12 more runs (20)"),
    ],
)
def test_ids_are_shown_as_ranges(ids, shown):
    line = f"    [0] group='g' first_token=0 ids={shown}"
    assert line in lines(wire.Ready(1, 1, spans=[wire.Span("g", 0, wire.pack_u32(ids))]))


@settings(max_examples=100)
@given(st.binary(max_size=20), st.sampled_from(["", " ", ":", ", ", "\n", "\t"]))
def test_hex_survives(data, between):
    assert from_hex(data.hex(between[0]).replace(between[0], between) if between and data else data.hex()) == data


def test_hex_as_one_finds_it():
    assert from_hex("0x0102 0X03\n 04:05,06\tAB") == bytes.fromhex("010203040506ab")
    assert from_hex("  \n") == b""
    assert from_hex("0 1") == b"\x01"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("01 zz", "'z' at position 3"),
        ("0x0g", "'g' at position 3"),
        ("123", "3 hex digits"),
        ("01 0x2", "3 hex digits"),
    ],
)
def test_what_is_no_hex_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        from_hex(text)
