"""Frames as text, for people: what `kvxfer inspect` prints.

    frame 0 at byte 0: 4 bytes, tag 9 WANT
      transfer          7
      chunks            5
      lease_ms          0 ms (absent, default)

Secrets are never shown whole: of MACs, proofs, nonces and payloads a line gives the length and at most two bytes.
Sans-I/O; works on hostile bytes.
"""

import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, cast, get_args

import msgspec

from kvxfer.errors import ProtocolError
from kvxfer.protocol.framing import (
    CONTAINERS,
    MAX_DEPTH,
    SESSION_FRAME_LIMIT,
    ScanError,
    decode,
    decode_body,
    head,
    peek_tag,
)
from kvxfer.protocol.messages import IGNORABLE_TAG, WHOLE, Agent, Capability, Message, unpack_f32, unpack_u32

__all__ = ["Item", "find", "frames", "from_hex", "registry_name", "scan"]

_LENGTH: Final = struct.Struct("<I")
_SHOWN_RANGES: Final = 8
_SHOWN_ITEMS: Final = 64
_WIDTH: Final = 18
_SECRET: Final = frozenset({"mac", "proof", "same", "nonce", "payload", "metadata"})
_PACKED: Final = frozenset({"ids", "layers"})
_ADDRESSES: Final = frozenset({"address", "base"})
_UNITS: Final = {"_ms": "ms", "_us": "us", "_bytes": "bytes"}
_BYTE_COUNTS: Final = frozenset({"bytes", "length"})
_HEX: Final = re.compile(r"(?:0[xX])?([0-9a-fA-F]*)")
_PATH: Final = re.compile(r"at `\$((?:\[\d+\])+)`")


# --- MessagePack, value by value


@dataclass(frozen=True, slots=True)
class Item:
    """One value as it stands in the bytes."""

    offset: int  # its first byte
    depth: int  # containers around it
    index: int  # its position in the container around it; keys and values of a map count each
    kind: str  # as `framing.head` says, as is
    value: int


def scan(data: bytes | memoryview) -> Iterator[Item]:
    """Yield the first value, and everything in it, in the order of the bytes.

    Raises:
        ScanError: Where the bytes are no MessagePack.
    """
    at, left, indices = 0, [1], [0]  # entries still to come, and the next index, of every open container
    while left:
        if not left[-1]:
            left.pop()
            indices.pop()
            continue
        left[-1] -= 1
        kind, value, end = head(data, at)
        yield Item(at, len(left) - 1, indices[-1], kind, value)
        indices[-1] += 1
        at = end
        if kind in CONTAINERS:
            left.append(value * 2 if kind == "map" else value)
            indices.append(0)


def find(data: bytes | memoryview, path: Sequence[int]) -> Item | None:
    """The value at a path of indices from the outermost container, or None.

    Raises:
        ScanError: If the bytes before it are no MessagePack.
    """
    matched = 0
    for item in scan(data):
        if item.depth == 0:
            if not path:
                return item
        elif item.depth <= matched:
            return None
        elif item.depth == matched + 1 and item.index == path[matched]:
            matched += 1
            if matched == len(path):
                return item
    return None


# --- frames


def registry_name(message: type[Any]) -> str:
    """The name of a message in `proto/registry.toml`: `KvAgentResult` is `KV_AGENT_RESULT`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", message.__name__).upper()


_TYPES: Final[Mapping[int, type[Any]]] = {kind.__struct_config__.tag: kind for kind in get_args(Message)}


def from_hex(text: str) -> bytes:
    """Bytes from hex digits as one finds them in logs.

    White space, commas, colons, and a leading `0x` of each word are ignored.

    Raises:
        ValueError: If something else is in it, or a digit is missing; names the position.
    """
    digits: list[str] = []
    for word in re.finditer(r"[^\s,:]+", text):
        found = _HEX.fullmatch(word.group())
        if found is None:
            bad = _HEX.match(word.group())
            at = word.start() + (bad.end() if bad else 0)
            raise ValueError(f"{text[at]!r} at position {at} is no hex digit")
        digits.append(found.group(1))
    joined = "".join(digits)
    if len(joined) % 2:
        raise ValueError(f"{len(joined)} hex digits make no whole number of bytes")
    return bytes.fromhex(joined)


def frames(data: bytes) -> Iterator[tuple[list[str], bool]]:
    """Yield the lines that describe each frame of a sequence, and whether all of it could be decoded.

    Never raises: what cannot be decoded is explained, and the frame after it is tried, unless the damage hides where
    that one begins.
    """
    if not data:
        yield ["no bytes"], True
    at = number = 0
    while at < len(data):
        left = len(data) - at
        if left < _LENGTH.size:
            yield [f"frame {number} at byte {at}: cut short: {left} of the 4 bytes of its length"], False
            return
        (size,) = _LENGTH.unpack_from(data, at)
        begin = at + _LENGTH.size
        payload = data[begin : begin + size]
        title = f"frame {number} at byte {at}: {size} bytes, {_title(payload)}"
        if size > SESSION_FRAME_LIMIT:
            why = f"  ! a length of {size} is over the limit of {SESSION_FRAME_LIMIT}: no frame begins at byte {at}"
            yield [title, why], False
            return
        if len(payload) < size:
            yield [title, f"  ! cut short at byte {len(data)}: {len(payload)} of {size} bytes are there"], False
            return
        lines, whole = _frame(payload, begin)
        yield [title, *lines], whole
        at = begin + size
        number += 1


def _title(payload: bytes) -> str:
    tag = peek_tag(payload)
    if tag is None:
        return "no tag"
    kind = _TYPES.get(tag)
    if kind is not None:
        return f"tag {tag} {registry_name(kind)}"
    return f"tag {tag}, unknown to this version; " + (
        "may be ignored" if tag >= IGNORABLE_TAG else "closes the session"
    )


def _frame(payload: bytes, begin: int) -> tuple[list[str], bool]:
    """The lines of one whole frame whose payload begins at byte `begin` of the input; whether all of it was decoded."""
    try:
        message = decode(payload)
    except ProtocolError as error:
        return [f"  ! {_explain(payload, error, begin)}"], False
    if message is None:
        return [], True
    _, entries, _ = head(payload, 0)
    lines = list(_struct(message, payload, entries - 1, (1,), "  "))
    if not isinstance(message, Agent):
        return lines, True
    body = bytes(message.body)
    try:
        decoded = decode_body(body)
        _, entries, _ = head(body, 0)
    except ProtocolError as error:
        return [*lines, f"    ! {_explain(body, error, 0)} of the body"], False
    return [*lines, *_struct(decoded, body, entries, (0,), "    ")], True


def _struct(value: msgspec.Struct, data: bytes, present: int, first: tuple[int, ...], indent: str) -> Iterator[str]:
    """One line a field; `first` is the path of the first field in `data`, `present` counts those that are there."""
    fields = value.__struct_fields__
    for number, name in enumerate(fields):
        path = (*first[:-1], first[-1] + number)
        item: object = getattr(value, name)
        absent = " (absent, default)" if number >= present else ""
        structs = _structs(item)
        if structs:
            yield f"{indent}{name:<{_WIDTH}}{len(structs)} {'entry' if len(structs) == 1 else 'entries'}"
            for index, entry in enumerate(structs[:_SHOWN_ITEMS]):
                yield f"{indent}  [{index}] {_inline(entry)}"
            if len(structs) > _SHOWN_ITEMS:
                yield f"{indent}  ... and {len(structs) - _SHOWN_ITEMS} more"
        else:
            yield f"{indent}{name:<{_WIDTH}}{_value(name, item, data, path)}{absent}"
    if present > len(fields):
        yield f"{indent}({present - len(fields)} unknown tail fields, ignored)"


def _structs(value: object) -> list[msgspec.Struct]:
    """The entries of a list of structs; empty for anything else."""
    if not isinstance(value, list):
        return []
    return [entry for entry in cast("list[object]", value) if isinstance(entry, msgspec.Struct)]


def _inline(value: msgspec.Struct) -> str:
    return " ".join(f"{name}={_value(name, getattr(value, name))}" for name in value.__struct_fields__)


def _value(name: str, value: object, data: bytes = b"", path: tuple[int, ...] = ()) -> str:
    match value:
        case bytes():
            shown = _bytes(name, value)
        case memoryview():
            shown = _bytes(name, value.tobytes())
        case bool():
            shown = "yes" if value else "no"
        case IntEnum():
            shown = _enum(value, data, path)
        case int():
            shown = _number(name, value)
        case msgspec.Struct():
            shown = _inline(value)
        case list() | tuple():
            shown = _sequence(name, cast("Sequence[object]", value), data, path)
        case _:
            shown = repr(value)  # repr, so that a peer's text cannot steer a terminal
    return shown


def _sequence(name: str, value: Sequence[object], data: bytes, path: tuple[int, ...]) -> str:
    shown = [_value(name, entry, data, (*path, index)) for index, entry in enumerate(value[:_SHOWN_ITEMS])]
    more = f", ... and {len(value) - _SHOWN_ITEMS} more" if len(value) > _SHOWN_ITEMS else ""
    return f"[{', '.join(shown)}{more}]"


def _bytes(name: str, value: bytes) -> str:
    if name in _PACKED:
        return _ranges(unpack_u32(value))
    if name == "scale":
        return _numbers(unpack_f32(value))
    if name == "body":
        return f"{len(value)} bytes, decoded below"
    if not value:
        return "empty"
    if name in _SECRET:
        return f"{value[:2].hex()}... ({len(value)} bytes)" if len(value) >= 16 else f"... ({len(value)} bytes)"
    return value.hex()


def _enum(value: IntEnum, data: bytes, path: tuple[int, ...]) -> str:
    if value or not data:
        return f"{value.name} ({value:d})"
    item = find(data, path)  # none where the field is absent
    raw = item.value if item is not None and item.kind == "int" else 0
    return "UNKNOWN (0)" if raw == 0 else f"UNKNOWN ({raw}, not known to this version)"


def _number(name: str, value: int) -> str:
    if name == "chunk" and value == WHOLE:
        return "WHOLE (the transfer)"
    if name == "capabilities":
        known = [bit.name or "" for bit in Capability if bit & value]
        rest = value & ~sum(Capability)
        return " | ".join([*known, *([f"unknown {rest:#x}"] if rest else [])]) or "none"
    if name in _ADDRESSES:
        return hex(value)
    if name in _BYTE_COUNTS:
        return f"{value} bytes"
    if name == "strides":
        return f"{value} bytes"
    unit = next((unit for suffix, unit in _UNITS.items() if name.endswith(suffix)), "")
    return f"{value} {unit}".rstrip()


def _ranges(numbers: Iterable[int]) -> str:
    """Ids as runs: `0-3, 8 (5)`. The order is kept, and only ascending neighbours are joined."""
    runs: list[list[int]] = []
    total = 0
    for number in numbers:
        total += 1
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs[:_SHOWN_RANGES])
    more = f", ... {len(runs) - _SHOWN_RANGES} more runs" if len(runs) > _SHOWN_RANGES else ""
    return f"{shown}{more} ({total})" if total else "none (0)"


def _numbers(numbers: Sequence[float]) -> str:
    shown = ", ".join(f"{number:g}" for number in numbers[:_SHOWN_RANGES])
    more = f", ... {len(numbers) - _SHOWN_RANGES} more" if len(numbers) > _SHOWN_RANGES else ""
    return f"{shown}{more}" or "none (1)"


def _explain(payload: bytes, error: ProtocolError, begin: int) -> str:
    """Why a payload is no message, with the byte of the input at which it goes wrong."""
    last = deep = torn = None
    try:
        for last in scan(payload):
            if last.depth > MAX_DEPTH and deep is None:
                deep = last
            if last.kind == "str" and torn is None and not _is_text(payload, last):
                torn = last
    except ScanError as damage:
        return f"no MessagePack at byte {begin + damage.offset}: {damage}"
    end = head(payload, last.offset)[2] if last else 0
    if end < len(payload):
        return f"{len(payload) - end} bytes too many, from byte {begin + end}"
    cause = error.__cause__
    if isinstance(cause, UnicodeDecodeError) and torn is not None:
        return f"a string that is not UTF-8 at byte {begin + torn.offset}"
    if not isinstance(cause, msgspec.MsgspecError) and deep is not None:
        return f"nested deeper than {MAX_DEPTH} containers from byte {begin + deep.offset}"
    item, field = _culprit(payload, str(cause or error))
    return f"cannot be decoded at byte {begin + (item.offset if item else 0)}{field}: {cause or error}"


def _is_text(payload: bytes, item: Item) -> bool:
    end = head(payload, item.offset)[2]
    try:
        payload[end - item.value : end].decode()
    except UnicodeDecodeError:
        return False
    return True


def _culprit(payload: bytes, reason: str) -> tuple[Item | None, str]:
    """The value that a decoder's error names by its path, and the message's field in which it lies."""
    found = _PATH.search(reason)
    if found is None:
        return None, ""
    path = [int(index) for index in re.findall(r"\d+", found.group(1))]
    kind = _TYPES.get(peek_tag(payload) or 0)
    field = ""
    if kind is not None and 1 <= path[0] <= len(kind.__struct_fields__):
        field = f" (field `{kind.__struct_fields__[path[0] - 1]}`)"
    return find(payload, path), field
