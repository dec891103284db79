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
from kvxfer.protocol.messages import IGNORABLE_TAG, Agent, AgentBody, Message
from kvxfer.protocol.scan import ScanError, fits, head

__all__ = [
    "HANDSHAKE_FRAME_LIMIT",
    "MAX_DEPTH",
    "SESSION_FRAME_LIMIT",
    "FrameReader",
    "decode",
    "decode_body",
    "encode",
    "encode_body",
    "encode_in_parts",
    "peek_tag",
]

HANDSHAKE_FRAME_LIMIT: Final = 64 * 1024
"""Largest `Hello`, `Welcome`, and anything else that comes before them."""
SESSION_FRAME_LIMIT: Final = 16 * 1024 * 1024
"""Largest frame afterwards; `Agent` carries the geometry of a whole rank."""
MAX_DEPTH: Final = 64
"""Containers around one value, at most. A receiver may refuse more, and refuses 16,384 for certain."""

_LONG_BYTES: Final = 64 * 1024
"""A longer frame that comes in pieces is put together in memory of its own: a buffer would be moved as it grows."""
_LENGTH: Final = struct.Struct("<I")
_BIN_32: Final = struct.Struct(">BI")
_NO_BODY: Final = b"\xc4\x00"
_BODY_BYTES: Final = 0xFFFF
"""Of an `Agent`: a longer one has its length in 32 bits."""
_encoder: Final = msgspec.msgpack.Encoder()
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
    if isinstance(message, Agent) and len(message.body) > _BODY_BYTES:
        return b"".join(encode_in_parts(message))
    payload = _encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


def encode_in_parts(message: Message) -> tuple[bytes | memoryview, ...]:
    """One frame, length included, in parts that follow each other: the long body of an `Agent` is one, as it is."""
    if not isinstance(message, Agent) or len(message.body) <= _BODY_BYTES:
        return (encode(message),)
    behind = _encoder.encode((message.same, message.proof))[1:]
    without = _encoder.encode(msgspec.structs.replace(message, body=memoryview(b"")))
    ahead = without.removesuffix(_NO_BODY + behind) + _BIN_32.pack(0xC6, len(message.body))
    return _LENGTH.pack(len(ahead) + len(message.body) + len(behind)) + ahead, message.body, behind


def encode_body(body: AgentBody) -> bytes:
    """The second phase of `Agent`, to be put into `Agent.body`."""
    return _encoder.encode(body)


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


def decode(payload: bytes | memoryview) -> Message | None:
    """One message from a frame's payload, or None for an unknown tag that may be ignored.

    Raises:
        ProtocolError: If the payload is no message of this protocol.
    """
    if len(payload) > _SAFE_RECURSION:
        _refuse_nesting(payload)
    try:
        return _decoder.decode(payload)
    except _MALFORMED as error:
        tag = peek_tag(payload)
        if isinstance(error, msgspec.ValidationError) and tag is not None and tag >= IGNORABLE_TAG:
            return None
        size, begin = len(payload), bytes(payload[:_QUOTED_BYTES]).hex()
        raise ProtocolError(
            f"a frame of {size} bytes cannot be decoded (tag {tag}, begins {begin}): {error}"
        ) from error


class FrameReader:
    """Cuts a byte stream into messages.

    It never holds more than `limit`, a length field and one read.

    Args:
        limit: Largest payload in bytes; raise it with `limit =` once the peer is known, also between two messages of
            one read.
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
        """Take in bytes at once, and yield every message that is complete, each decoded only when it is asked for.

        Who stops early loses nothing: the next `feed` goes on after the last message that was yielded.

        Raises:
            ProtocolError: If a frame is larger than the limit or cannot be decoded. The stream is unusable afterwards,
                and every later call says so again.
            BufferError: If more than a whole frame is left over from calls that were not iterated to their end.
        """
        if not self._broken:
            if len(self._buffer) > self.limit + _LENGTH.size:
                raise BufferError(f"{len(self._buffer)} bytes were fed, but their messages were not taken out")
            self._buffer += data if self._long is None else data[self._fill(data) :]
        return self._messages()

    def _messages(self) -> Iterator[Message]:
        """Take one whole frame after the other out of the buffer, which is consistent whenever one is yielded."""
        while True:
            if self._broken:
                raise ProtocolError(f"the stream is unusable: {self._broken}")
            buffer, long = self._buffer, self._long
            if long is not None:
                if self._filled < len(long):
                    return
                self._long, self._filled = None, 0
                payload: bytes | memoryview = long.toreadonly()
            elif len(buffer) < _LENGTH.size:
                return
            else:
                (size,) = _LENGTH.unpack_from(buffer)
                end = _LENGTH.size + size
                if size > self.limit:
                    tls = "; it begins as TLS does: set `tls` on both sides, or on none"
                    looks = tls if buffer.startswith(_TLS_RECORDS) else ""
                    self._break(f"a frame of {size} bytes is over the limit of {self.limit}{looks}")
                    raise ProtocolError(self._broken)
                if len(buffer) < end:
                    if size > _LONG_BYTES:
                        self._long = memoryview(mmap.mmap(-1, size, mmap.MAP_PRIVATE))  # takes memory as bytes come
                        self._fill(buffer[_LENGTH.size :])
                        buffer.clear()
                    return
                with memoryview(buffer) as view:
                    payload = bytes(view[_LENGTH.size : end])
                del buffer[:end]
            try:
                message = decode(payload)
            except ProtocolError as error:
                self._break(str(error))
                raise
            if message is not None:
                yield message

    def _fill(self, data: bytes | bytearray) -> int:
        """Put the first of these bytes where they belong to a long frame that is under way; how many they were."""
        if self._long is None:
            return 0
        begin, end = self._filled, min(self._filled + len(data), len(self._long))
        self._long[begin:end] = memoryview(data)[: end - begin]
        self._filled = end
        return end - begin

    def _break(self, reason: str) -> None:
        self._broken = reason
        self._buffer.clear()


def peek_tag(payload: bytes | memoryview) -> int | None:
    """The integer tag of a MessagePack array without decoding the rest, or None."""
    try:
        kind, entries, at = head(payload, 0)
        if kind != "array" or not entries:
            return None
        kind, tag, _ = head(payload, at)
    except ScanError:
        return None
    return tag if kind == "int" else None


def _refuse_nesting(payload: bytes | memoryview) -> None:
    if len(payload) <= _SAFE_RECURSION or sys.getrecursionlimit() <= _SAFE_RECURSION:
        return
    if not fits(payload, depth=MAX_DEPTH, items=_MAX_ITEMS):
        tag = peek_tag(payload)
        if tag is None or tag < IGNORABLE_TAG:
            raise ProtocolError(
                f"a frame of {len(payload)} bytes (tag {tag}) is nested too deeply or has too many values"
            )
