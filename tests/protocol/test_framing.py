"""Frames are cut at the right bytes, nothing is lost, nothing is hoarded, and hostile bytes are a `ProtocolError`."""

import gc
import struct
import subprocess
import sys

import msgspec
import pytest

from kvxfer.errors import ProtocolError
from kvxfer.protocol.framing import SESSION_FRAME_LIMIT, FrameReader, decode, encode, encode_in_parts, peek_tag
from kvxfer.protocol.messages import Agent, Goodbye, Ping, Ready, Release, Span, TicketRef, pack_u32

DEEP = b"\x92\x04" + b"\x91" * 100_000 + b"\x01"


def frame(payload):
    return struct.pack("<I", len(payload)) + payload


def agent(size):
    return Agent([("model", "m")], memoryview(b"b" * size), b"s" * 32, b"p" * 32)


def wants(count):
    return [Ready(number, number) for number in range(count)]


@pytest.mark.parametrize("size", [0, 255, 256, 65_535, 65_536, 200_000])
def test_the_parts_of_a_frame_are_what_msgspec_makes_of_the_message(size):
    assert b"".join(encode_in_parts(agent(size))) == frame(msgspec.msgpack.encode(agent(size)))


def test_a_long_body_is_copied_neither_into_its_frame_nor_out_of_it():
    sent, reader = agent(200_000), FrameReader(SESSION_FRAME_LIMIT)
    parts = encode_in_parts(sent)
    assert parts[1] is sent.body
    assert sum(map(len, parts)) < 200_100
    data = b"".join(parts) + encode(Ping())
    assert list(reader.feed(data[:150_000])) == []
    assert reader._long is not None
    memory = reader._long.obj
    got, ping = reader.feed(data[150_000:])
    assert (got, ping) == (sent, Ping())
    assert isinstance(got, Agent)
    assert got.body.obj is memory
    assert reader.buffered_bytes == 0


def test_the_limit_may_be_raised_between_two_messages_of_one_read():
    big = Goodbye(reason="x" * 500)
    reader = FrameReader(limit=50)
    messages = reader.feed(encode(Ping()) + encode(big))
    assert next(messages) == Ping()
    reader.limit = 1000
    assert list(messages) == [big]


def test_an_iterator_that_was_left_behind_does_no_harm():
    one, two, three, four = wants(4)
    reader = FrameReader()
    left = reader.feed(encode(one) + encode(two))
    assert next(left) == one
    assert next(reader.feed(encode(three))) == two
    assert next(left) == three
    del left
    gc.collect()
    assert list(reader.feed(encode(four))) == [four]
    assert reader.buffered_bytes == 0


def test_who_never_iterates_to_the_end_is_stopped():
    reader = FrameReader(limit=100)
    left = reader.feed(encode(Ping()) * 21)  # 120 bytes behind the first: more than one frame of 100 and its length
    assert next(left) == Ping()
    with pytest.raises(BufferError, match="120 bytes were fed"):
        next(reader.feed(b""))
    assert len(list(left)) == 20


@pytest.mark.parametrize("bad", [frame(b"\xc1"), struct.pack("<I", 2**31)])
def test_a_damaged_stream_stays_damaged(bad):
    reader = FrameReader()
    with pytest.raises(ProtocolError):
        list(reader.feed(bad))
    for _ in range(2):
        with pytest.raises(ProtocolError, match="unusable"):
            list(reader.feed(encode(Ping())))
    assert reader.buffered_bytes == 0


@pytest.mark.parametrize(
    "tag", ["cc80", "ccff", "cd0100", "ceffffffff", "cfffffffffffffffff", "d100c8", "d3000000000000ffff"]
)
def test_ignorable_tags_are_skipped(tag):
    payload = b"\x92" + bytes.fromhex(tag) + b"\xc1"
    assert decode(payload) is None
    assert list(FrameReader().feed(frame(payload) + encode(Ping()))) == [Ping()]


@pytest.mark.parametrize("tag", ["00", "10", "7f", "cc7f", "ff", "d0ff"])
def test_other_unknown_tags_are_refused(tag):
    with pytest.raises(ProtocolError):
        decode(b"\x91" + bytes.fromhex(tag))


@pytest.mark.parametrize(
    ("payload", "tag"),
    [("9104", 4), ("91cc80", 128), ("dc000104", 4), ("dd0000000104", 4), ("91d0ff", -1), ("", None), ("90", None),
     ("80", None), ("91", None), ("91cd00", None), ("91a141", None), ("dc00", None)],
)  # fmt: skip
def test_peek_tag(payload, tag):
    assert peek_tag(bytes.fromhex(payload)) == tag


def test_an_error_never_quotes_a_mac():
    mac = bytes(range(0xA0, 0xB0))
    payload = encode(Release(TicketRef("r", 0, mac)))[4:] + b"\x00"
    with pytest.raises(ProtocolError) as caught:
        decode(payload)
    assert mac[:1].hex() not in str(caught.value).partition("begins ")[2][:18]
    assert "(tag 14, begins 930e93a17200c410)" in str(caught.value)


# --- hostile nesting


HOSTILE = """
import sys
sys.setrecursionlimit(1_000_000)
from kvxfer.errors import ProtocolError
from kvxfer.protocol.framing import SESSION_FRAME_LIMIT, FrameReader, decode_body
tail = b"\\x91" * 4_000_000 + b"\\x01"
for decoder in (
    lambda: list(FrameReader(SESSION_FRAME_LIMIT).feed((len(tail) + 2).to_bytes(4, "little") + b"\\x92\\x04" + tail)),
    lambda: decode_body(b"\\x95\\xa1f\\xc4\\x00\\x90\\x90" + tail),
):
    try:
        decoder()
    except ProtocolError as error:
        print("refused:", error)
"""


def test_deep_nesting_cannot_kill_a_process_that_raised_its_recursion_limit():
    done = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"the process died: {done.returncode}"
    assert done.stdout.count("refused:") == 2


def test_a_raised_recursion_limit_does_not_change_what_is_accepted(monkeypatch):
    monkeypatch.setattr(sys, "getrecursionlimit", lambda: 1_000_000)
    want = Ready(1, 1, spans=[Span("g", 0, pack_u32(range(5000)))])
    assert decode(encode(want)[4:]) == want
    assert decode(b"\x92\xcc\x80" + DEEP[2:]) is None
    with pytest.raises(ProtocolError, match="nested too deeply"):
        decode(DEEP)
    many = b"\x92\x0d\xdd" + (2_000_000).to_bytes(4, "big") + b"\x01" * 2_000_000
    with pytest.raises(ProtocolError, match="too many values"):
        decode(many)
