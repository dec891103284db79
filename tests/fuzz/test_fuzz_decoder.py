"""The decoder, the reader of frames and `inspect`, on frames that are wrong: a message, or a documented error."""

import gc
import tracemalloc
from random import Random

import campaign
import msgpack
import msgspec
import pytest
from mutation import INVALID, SPOKEN, VALID, Mutator, decoded, frame, pack, pieces

from kvxfer.errors import ProtocolError
from kvxfer.protocol.framing import FrameReader, decode, encode, encode_body, fits, peek_tag
from kvxfer.protocol.messages import BY_TAG, IGNORABLE_TAG, AgentBody
from kvxfer.tools.inspect import frames

MUTATOR = Mutator([*VALID, *INVALID, *SPOKEN])
LIMIT = 4096
"""Of a reader that is fed: small, so that frames over it are common."""


def one_payload(draw: Random) -> int:
    payload = MUTATOR.payload(draw)
    try:
        message = decode(payload)
    except ProtocolError as error:
        campaign.is_short(error, 4096)
        return 1
    if message is None:
        tag = peek_tag(payload)
        assert tag is not None
        assert tag >= IGNORABLE_TAG
        assert tag not in BY_TAG
        return 1
    # what it took is MessagePack for an independent reader too, with the tag of the message
    assert tag_of(payload) == message.__struct_config__.tag
    again = encode(message)
    assert decode(again[4:]) == message
    return 1


def tag_of(payload):
    """The tag, by another reader of MessagePack, to which the payload must be one whole value."""
    whole, parts = msgpack.Unpacker(), msgpack.Unpacker()
    whole.feed(payload)
    try:
        whole.skip()
    except msgpack.StackError:
        pass  # an ignored tail may be nested as deep as ours reads it, which is deeper than this reader goes
    else:
        assert whole.tell() == len(payload)
    parts.feed(payload)
    parts.read_array_header()
    return parts.unpack()


def test_decoder():
    campaign.run("decoder", one_payload)


def in_pieces(draw: Random) -> int:
    payloads = [MUTATOR.payload(draw) for _ in range(draw.randrange(1, 6))]
    data = MUTATOR.stream(draw, payloads)
    whole, whole_error = read([data])
    parts, parts_error = read(pieces(draw, data))
    assert parts == whole
    assert parts_error == whole_error
    return len(payloads)


def read(chunks):
    """Messages, and what ended them."""
    reader, found = FrameReader(LIMIT), []
    try:
        for chunk in chunks:
            found += reader.feed(chunk)
            assert reader.buffered_bytes <= LIMIT + 4 + len(chunk)
            assert reader.buffered_bytes < LIMIT + 4
    except ProtocolError as error:
        assert reader.buffered_bytes == 0
        with pytest.raises(ProtocolError):
            next(iter(reader.feed(b"\x00" * LIMIT)))
        assert reader.buffered_bytes == 0
        return found, str(error)
    return found, ""


def test_reader_in_pieces():
    campaign.run("reader", in_pieces)


def as_text(draw: Random) -> int:
    payloads = [MUTATOR.payload(draw) for _ in range(draw.randrange(1, 4))]
    data = MUTATOR.stream(draw, payloads)
    said = "\n".join(line for lines, _ in frames(data) for line in lines)
    assert len(said) < 64 * len(data) + 4096
    assert said.isprintable() or all(line.isprintable() for line in said.split("\n"))
    for payload in payloads:
        assert fits(payload, depth=10_000_000, items=len(payload) + 1)
    return len(payloads)


def test_inspect():
    campaign.run("inspect", as_text)


@pytest.mark.parametrize("name", ["as golden", "mutated"])
def test_memory_is_in_proportion_to_the_frame(name):
    draw = Random(campaign.SEED)
    payloads = [*VALID, *SPOKEN] if name == "as golden" else [MUTATOR.payload(draw) for _ in range(1500)]
    payloads += DENSE
    for payload in payloads:
        assert peak_of(lambda payload=payload: decoded(payload)) < 64 * len(payload) + 32 * 1024


DENSE = [
    pack([10, 1, 1024, 0, 0, [[0, 0]] * 1024], Random(0)),  # a ring
    pack([9, 1, 0, 0, [["", 0, b""]] * 1024], Random(0)),  # spans
    pack([5, [["r", 0, b""]] * 4096], Random(0)),
    pack([3, [["", ""]] * 1024, b""], Random(0)),
    pack([200, [[]] * 100_000], Random(0)),
    b"\x92\xcc\xc8" + b"\x91" * 200_000 + b"\x01",
    b"\x92\x04" + b"\xdd\xff\xff\xff\xff" * 20_000,
]
"""Frames that make as many objects of their bytes as they can, or announce more than there is."""


def peak_of(work) -> int:
    gc.disable()  # what other tests have left may say as it goes that nobody closed it, and look up who made it
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
        gc.enable()


def test_nothing_of_a_frame_stays():
    """Frames that were refused leave nothing behind, however many there are."""
    draw = Random(campaign.SEED)

    def some():
        for _ in range(1500):
            one_payload(draw)
            in_pieces(draw)

    some()
    gc.collect()
    tracemalloc.start()
    try:
        some()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 64 * 1024
    finally:
        tracemalloc.stop()


def test_every_cut_of_every_golden_frame():
    for payload in [*VALID, *SPOKEN]:
        for stop in range(min(len(payload), 600)):
            decoded(payload[:stop])
            assert list(FrameReader().feed(frame(payload)[:stop])) == []


def test_bodies_are_bodies_or_a_protocol_error():
    from kvxfer.protocol.framing import decode_body

    bodies = [bytes(m.body) for m in map(decoded, [*VALID, *SPOKEN]) if type(m).__name__ == "Agent"]  # type: ignore[union-attr]
    mutator = Mutator(bodies)
    draw = Random(campaign.SEED)
    taken = 0
    for _ in range(max(2000, campaign.FRAMES // 50)):
        try:
            body = decode_body(mutator.payload(draw))
        except ProtocolError:
            continue
        taken += 1
        assert isinstance(body, AgentBody)
        assert msgspec.msgpack.decode(encode_body(body), type=AgentBody) == body
    assert taken > 100
