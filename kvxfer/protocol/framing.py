"""Frames: a 4-byte little-endian length and one MessagePack array (PROTOCOL.md section 2).

Sans-I/O: bytes in, messages out. Lengths are checked before anything is buffered for them. The body of an `Agent` may
be long, and is copied neither into its frame nor out of it.
"""

import mmap
import struct
import sys
from collections.abc import Iterator
from typing import Final

import msgspec

from kvxfer.errors import ProtocolError
from kvxfer.protocol.messages import BY_TAG, IGNORABLE_TAG, Agent, AgentBody, Message

__all__ = [
    "HANDSHAKE_FRAME_LIMIT",
    "LENGTH",
    "MAX_DEPTH",
    "SESSION_FRAME_LIMIT",
    "FrameReader",
    "decode",
    "decode_body",
    "encode",
    "encode_body",
    "encode_in_parts",
    "encoder",
    "fits",
    "peek_tag",
]

# --- MessagePack, walked without building values
#
# Used where a decoder cannot help: to bound the nesting of a hostile frame, and to read the tag of a message that this
# version does not know.

# first byte -> bytes that follow it
_PLAIN: Final = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip
# first byte -> bytes of the size that follows it, and how many bytes or values there are for each that it counts
_BYTES: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_VALUES: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
_EXTENSIONS: Final = range(0xC7, 0xCA)


def _step(data: bytes | memoryview, at: int) -> tuple[int | None, int]:
    """How many values the one that begins here holds, None unless it is an array or a map, and where to go on.

    Raises:
        ValueError: If the bytes end too early, or no value begins so.
    """
    first, at, inside = data[at] if at < len(data) else 0xC1, at + 1, None
    if 0x80 <= first < 0xA0:
        inside = (first & 0x0F) * (2 if first < 0x90 else 1)
    elif 0xA0 <= first < 0xC0:
        at += first & 0x1F
    elif first in _VALUES:
        width, times = _VALUES[first]
        inside, at = int.from_bytes(data[at : at + width], "big") * times, at + width
    elif first in _BYTES:
        width = _BYTES[first]
        at += width + int.from_bytes(data[at : at + width], "big") + (first in _EXTENSIONS)
    elif 0xC0 <= first < 0xE0:
        at += _PLAIN.get(first, len(data))
    if at > len(data):
        raise ValueError("this is no MessagePack")
    return inside, at


def fits(data: bytes | memoryview, *, depth: int, items: int) -> bool:
    """Whether the value at the start is nested at most `depth` containers deep and holds at most `items` values.

    Costs about half a microsecond a value. Bytes that are no MessagePack fit: the decoder says it better.
    """
    left = [1]
    at = 0
    try:
        while left:
            if not left[-1]:
                left.pop()
                continue
            left[-1] -= 1
            inside, at = _step(data, at)
            items -= 1
            if inside is not None:
                left.append(inside)
            if items < 0 or len(left) > depth + 1:
                return False
    except ValueError:
        pass
    return True


# --- frames

HANDSHAKE_FRAME_LIMIT: Final = 64 * 1024
"""Largest `Hello`, `Welcome`, and anything else that comes before them."""
SESSION_FRAME_LIMIT: Final = 16 * 1024 * 1024
"""Largest frame afterwards; `Agent` carries the geometry of a whole rank."""
MAX_DEPTH: Final = 64
"""Containers around one value, at most. A receiver may refuse more, and refuses 16,384 for certain."""

_LONG_BYTES: Final = 128 * 1024
"""A longer frame that comes in pieces is put together in memory of its own: a buffer would be moved as it grows."""
LENGTH: Final = struct.Struct("<I")
"""What a frame begins with: how long its payload is."""
_BIN_32: Final = struct.Struct(">BI")
_NO_BODY: Final = b"\xc4\x00"
_BODY_BYTES: Final = 0xFFFF
"""Of an `Agent`: a longer one has its length in 32 bits."""
encoder: Final = msgspec.msgpack.Encoder()
"""Makes a payload of a message."""
_decoder: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(Message)
_body_decoder: Final = msgspec.msgpack.Decoder(AgentBody)
# msgspec skips what it does not know recursively and stops at the interpreter's recursion limit. At the default of
# 1,000 that is safe on any thread's stack; where an application has raised it, a hostile frame could overflow the
# stack and kill the process, so there (and only there: it costs time) the nesting is measured first.
_SAFE_RECURSION: Final = 3_000
_MAX_ITEMS: Final = 1 << 20
_MALFORMED: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
# what an error may quote: a ticket's MAC never begins before the ninth byte of a payload
_QUOTED_BYTES: Final = 8
_TLS_RECORDS: Final = (b"\x15\x03", b"\x16\x03")
"""How an alert and a handshake of TLS begin: read as a length, both are over the limit of a greeting."""


def encode(message: Message) -> bytes:
    """One frame, length included."""
    return b"".join(encode_in_parts(message))


def encode_in_parts(message: Message) -> tuple[bytes | memoryview, ...]:
    """One frame, length included, in parts that follow each other: the long body of an `Agent` is one, as it is."""
    if not isinstance(message, Agent) or len(message.body) <= _BODY_BYTES:
        payload = encoder.encode(message)
        return (LENGTH.pack(len(payload)) + payload,)
    behind = encoder.encode((message.same, message.proof))[1:]
    without = encoder.encode(msgspec.structs.replace(message, body=memoryview(b"")))
    ahead = without.removesuffix(_NO_BODY + behind) + _BIN_32.pack(0xC6, len(message.body))
    return LENGTH.pack(len(ahead) + len(message.body) + len(behind)) + ahead, message.body, behind


def encode_body(body: AgentBody) -> bytes:
    """The second phase of `Agent`, to be put into `Agent.body`."""
    return encoder.encode(body)


def decode_body(data: bytes | memoryview) -> AgentBody:
    """Inverse of `encode_body`.

    Raises:
        ProtocolError: If the bytes are no agent body.
    """
    _refuse_nesting(data)
    try:
        return _body_decoder.decode(data)
    except _MALFORMED as error:
        raise ProtocolError(f"the peer's agent body cannot be decoded: {error}") from error


class FrameReader:
    """Cuts a byte stream into messages.

    It never holds more than `limit`, a length field and one read. Raise it with `limit =` once the peer is known, also
    between two messages of one read.
    """

    def __init__(self, limit: int = HANDSHAKE_FRAME_LIMIT) -> None:
        self.limit = limit
        self._buffer = bytearray()
        self._long: memoryview | None = None  # the frame that is under way, if it is long, in front of the buffer
        self._filled = 0  # of it
        self._broken = ""

    @property
    def buffered_bytes(self) -> int:
        """Bytes received that were not yet yielded as messages."""
        return len(self._buffer) + self._filled

    def feed(self, data: bytes) -> Iterator[Message]:
        """Take in bytes, and yield every message that is complete, each decoded only when it is asked for.

        Nothing is taken in before the first message is asked for. Who stops early loses nothing: the next `feed` goes
        on after the last message that was yielded. A message of an unknown tag that may be ignored is left out.

        Raises:
            ProtocolError: If a frame is larger than the limit or cannot be decoded. The stream is unusable afterwards,
                and every later call says so again.
            BufferError: If more than a whole frame is left over from calls that were not iterated to their end.
        """
        if self._broken:
            raise ProtocolError(f"the stream is unusable: {self._broken}")
        if len(self._buffer) > self.limit + LENGTH.size:
            raise BufferError(f"{len(self._buffer)} bytes were fed, but their messages were not taken out")
        self._buffer += data if self._long is None else data[self._fill(data) :]
        while True:  # whenever a message is yielded, the buffer begins with the frame behind it
            buffer, long = self._buffer, self._long
            if long is not None:
                if self._filled < len(long):
                    return
                self._long, self._filled = None, 0
                payload: bytes | memoryview = long.toreadonly()
            elif len(buffer) < LENGTH.size:
                return
            else:
                (size,) = LENGTH.unpack_from(buffer)
                end = LENGTH.size + size
                if size > self.limit:
                    tls = "; it begins as TLS does: set `tls` on both sides, or on none"
                    looks = tls if buffer.startswith(_TLS_RECORDS) else ""
                    raise self._break(f"a frame of {size} bytes is over the limit of {self.limit}{looks}")
                if len(buffer) < end:
                    if size > _LONG_BYTES:
                        self._long = memoryview(mmap.mmap(-1, size, mmap.MAP_PRIVATE))  # takes memory as bytes come
                        self._fill(buffer[LENGTH.size :])
                        buffer.clear()
                    return
                with memoryview(buffer) as view:
                    payload = bytes(view[LENGTH.size : end])
                del buffer[:end]
            try:
                if len(payload) > _SAFE_RECURSION:
                    _refuse_nesting(payload)
                message = _decoder.decode(payload)
            except (ProtocolError, *_MALFORMED) as error:
                self._leave_out(payload, error)
                continue
            yield message

    def _fill(self, data: bytes | bytearray) -> int:
        """Put the first of these bytes where they belong to a long frame that is under way; how many they were."""
        if self._long is None:
            return 0
        begin, end = self._filled, min(self._filled + len(data), len(self._long))
        self._long[begin:end] = memoryview(data)[: end - begin]
        self._filled = end
        return end - begin

    def _leave_out(self, payload: bytes | memoryview, error: Exception) -> None:
        """Go on behind a frame that cannot be decoded: its tag is unknown, and may be ignored.

        Raises:
            ProtocolError: If that is not so.
        """
        tag, begin = peek_tag(payload), bytes(payload[:_QUOTED_BYTES]).hex()
        if isinstance(error, ProtocolError):
            raise self._break(str(error))
        if not isinstance(error, msgspec.ValidationError) or not _is_skipped(tag):
            what = f"a frame of {len(payload)} bytes cannot be decoded (tag {tag}, begins {begin})"
            raise self._break(f"{what}: {error}") from error

    def _break(self, reason: str) -> ProtocolError:
        self._broken = reason
        self._buffer.clear()
        return ProtocolError(reason)


def decode(payload: bytes | memoryview) -> Message | None:
    """One message from a frame's payload, or None for an unknown tag that may be ignored.

    Raises:
        ProtocolError: If the payload is no message of this protocol.
    """
    return next(FrameReader(len(payload)).feed(LENGTH.pack(len(payload)) + payload), None)


def peek_tag(payload: bytes | memoryview) -> int | None:
    """The integer tag of a MessagePack array without decoding the rest, or None."""
    if not payload or not (0x90 < payload[0] < 0xA0 or payload[0] in {0xDC, 0xDD}):
        return None
    try:
        _, begin = _step(payload, 0)
        _, end = _step(payload, begin)
        return msgspec.msgpack.decode(payload[begin:end], type=int)
    except (ValueError, msgspec.MsgspecError):
        return None


def _is_skipped(tag: int | None) -> bool:
    """Whether a frame of this tag is nothing to this side, whatever follows; a message that it knows is held to it."""
    return tag is not None and tag >= IGNORABLE_TAG and tag not in BY_TAG


def _refuse_nesting(payload: bytes | memoryview) -> None:
    if len(payload) <= _SAFE_RECURSION or sys.getrecursionlimit() <= _SAFE_RECURSION:
        return
    if not fits(payload, depth=MAX_DEPTH, items=_MAX_ITEMS):
        tag = peek_tag(payload)
        if not _is_skipped(tag):
            raise ProtocolError(
                f"a frame of {len(payload)} bytes (tag {tag}) is nested too deeply or has too many values"
            )
