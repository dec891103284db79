"""Frames as text, for people: what `kvxfer inspect` prints.

    frame 0 at byte 0: 4 bytes, tag 9 WANT
      transfer          7
      chunks            5
      lease_ms          0 ms (absent, default)

Secrets are never shown whole: of MACs, proofs, nonces and payloads a line gives the length and at most two bytes.
Sans-I/O; works on hostile bytes.
"""

import re
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, Final, cast

import msgspec

from kvxfer.errors import ProtocolError
from kvxfer.names import runs
from kvxfer.protocol.framing import LENGTH, SESSION_FRAME_LIMIT, decode, decode_body, peek_tag
from kvxfer.protocol.messages import BY_TAG, IGNORABLE_TAG, WHOLE, Agent, AgentBody, Capability, unpack_f32, unpack_u32

__all__ = ["frames", "from_hex", "registry_name"]

_SHOWN_RANGES: Final = 8
_SHOWN_ITEMS: Final = 64
_WIDTH: Final = 18
_SECRET: Final = frozenset({"mac", "proof", "same", "nonce", "payload", "metadata"})
_PACKED: Final = frozenset({"ids", "layers"})
_ADDRESSES: Final = frozenset({"address", "base"})
_UNITS: Final = {"_ms": "ms", "_us": "us", "bytes": "bytes", "length": "bytes", "strides": "bytes"}
"""By how names of fields end."""
_HEX: Final = re.compile(r"(?:0[xX])?([0-9a-fA-F]*)")
_FIELD: Final = re.compile(r"at `\$\[(\d+)\]")


def registry_name(message: type[Any]) -> str:
    """The name of a message in `proto/registry.toml`: `KvAgentResult` is `KV_AGENT_RESULT`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", message.__name__).upper()


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
        if left < LENGTH.size:
            yield [f"frame {number} at byte {at}: cut short: {left} of the 4 bytes of its length"], False
            return
        (size,) = LENGTH.unpack_from(data, at)
        begin = at + LENGTH.size
        payload = data[begin : begin + size]
        title = f"frame {number} at byte {at}: {size} bytes, {_title(payload)}"
        if size > SESSION_FRAME_LIMIT:
            why = f"  ! a length of {size} is over the limit of {SESSION_FRAME_LIMIT}: no frame begins at byte {at}"
            yield [title, why], False
            return
        if len(payload) < size:
            yield [title, f"  ! cut short at byte {len(data)}: {len(payload)} of {size} bytes are there"], False
            return
        lines, whole = _frame(payload)
        yield [title, *lines], whole
        at = begin + size
        number += 1


def _title(payload: bytes) -> str:
    tag = peek_tag(payload)
    if tag is None:
        return "no tag"
    kind = BY_TAG.get(tag)
    if kind is not None:
        return f"tag {tag} {registry_name(kind)}"
    return f"tag {tag}, unknown to this version; " + (
        "may be ignored" if tag >= IGNORABLE_TAG else "closes the session"
    )


def _frame(payload: bytes) -> tuple[list[str], bool]:
    """The lines of one whole frame; whether all of it was decoded."""
    try:
        message = decode(payload)
    except ProtocolError as error:
        kind = BY_TAG.get(peek_tag(payload) or 0)
        return [f"  ! {_explain(error, ('', *kind.__struct_fields__) if kind else ())}"], False
    if message is None:
        return [], True
    lines = list(_struct(message, payload, 1, "  "))
    if not isinstance(message, Agent):
        return lines, True
    body = bytes(message.body)
    try:
        decoded = decode_body(body)
    except ProtocolError as error:
        return [*lines, f"    ! the body {_explain(error, AgentBody.__struct_fields__)}"], False
    return [*lines, *_struct(decoded, body, 0, "    ")], True


def _explain(error: ProtocolError, fields: Sequence[str]) -> str:
    """Why bytes are no message, with the field in which they go wrong, of those that the array should have."""
    reason = str(error.__cause__ or error)
    found = _FIELD.search(reason)
    at = int(found[1]) if found else len(fields)
    return f"cannot be decoded{f' (field `{fields[at]}`)' if at < len(fields) and fields[at] else ''}: {reason}"


def _struct(value: msgspec.Struct, data: bytes, before: int, indent: str) -> Iterator[str]:
    """One line a field of the array in `data`, which begins with so many entries that are no fields."""
    fields = value.__struct_fields__
    raw = msgspec.msgpack.decode(data, type=list[msgspec.Raw])[before:]
    for number, name in enumerate(fields):
        item: object = getattr(value, name)
        structs = _structs(item)
        if structs:
            yield f"{indent}{name:<{_WIDTH}}{len(structs)} {'entry' if len(structs) == 1 else 'entries'}"
            for index, entry in enumerate(structs[:_SHOWN_ITEMS]):
                yield f"{indent}  [{index}] {_inline(entry)}"
            if len(structs) > _SHOWN_ITEMS:
                yield f"{indent}  ... and {len(structs) - _SHOWN_ITEMS} more"
        elif number < len(raw):
            yield f"{indent}{name:<{_WIDTH}}{_value(name, item, raw[number])}"
        else:
            yield f"{indent}{name:<{_WIDTH}}{_value(name, item)} (absent, default)"
    if len(raw) > len(fields):
        yield f"{indent}({len(raw) - len(fields)} unknown tail fields, ignored)"


def _structs(value: object) -> list[msgspec.Struct]:
    """The entries of a list of structs; empty for anything else."""
    if not isinstance(value, list):
        return []
    return [entry for entry in cast("list[object]", value) if isinstance(entry, msgspec.Struct)]


def _inline(value: msgspec.Struct) -> str:
    return " ".join(f"{name}={_value(name, getattr(value, name))}" for name in value.__struct_fields__)


def _value(name: str, value: object, raw: msgspec.Raw | None = None) -> str:
    """A value in words; `raw` are the bytes that it was decoded from, where they are known."""
    match value:
        case bytes():
            shown = _bytes(name, value)
        case memoryview():
            shown = _bytes(name, value.tobytes())
        case bool():
            shown = "yes" if value else "no"
        case IntEnum():
            shown = _enum(value, raw)
        case int():
            shown = _number(name, value)
        case msgspec.Struct():
            shown = _inline(value)
        case list() | tuple():
            shown = _sequence(name, cast("Sequence[object]", value), raw)
        case _:
            shown = repr(value)  # repr, so that a peer's text cannot steer a terminal
    return shown


def _sequence(name: str, value: Sequence[object], raw: msgspec.Raw | None) -> str:
    parts = msgspec.msgpack.decode(raw, type=list[msgspec.Raw]) if raw and value else [None] * len(value)
    shown = [_value(name, *both) for both in zip(value[:_SHOWN_ITEMS], parts, strict=False)]
    more = f", ... and {len(value) - _SHOWN_ITEMS} more" if len(value) > _SHOWN_ITEMS else ""
    return f"[{', '.join(shown)}{more}]"


def _bytes(name: str, value: bytes) -> str:
    if name in _PACKED:
        return _ranges(unpack_u32(value))
    if name == "scale":
        return _some([f"{number:g}" for number in unpack_f32(value)]) or "none (1)"
    if name == "body":
        return f"{len(value)} bytes, decoded below"
    if not value:
        return "empty"
    if name in _SECRET:
        return f"{value[:2].hex()}... ({len(value)} bytes)" if len(value) >= 16 else f"... ({len(value)} bytes)"
    return value.hex()


def _enum(value: IntEnum, raw: msgspec.Raw | None) -> str:
    number = msgspec.msgpack.decode(raw) if raw and not value else int(value)
    return f"{value.name} ({number})" if number == value else f"{value.name} ({number}, not known to this version)"


def _number(name: str, value: int) -> str:
    if name == "chunk" and value == WHOLE:
        return "WHOLE (the transfer)"
    if name == "capabilities":
        known = [bit.name or "" for bit in Capability if bit & value]
        rest = value & ~sum(Capability)
        return " | ".join([*known, *([f"unknown {rest:#x}"] if rest else [])]) or "none"
    if name in _ADDRESSES:
        return hex(value)
    unit = next((unit for suffix, unit in _UNITS.items() if name.endswith(suffix)), "")
    return f"{value} {unit}".rstrip()


def _ranges(numbers: Sequence[int]) -> str:
    """Ids as runs: `0-3, 8 (5)`."""
    return f"{_some(runs(numbers), ' runs') or 'none'} ({len(numbers)})"


def _some(shown: Sequence[str], what: str = "") -> str:
    more = f", ... {len(shown) - _SHOWN_RANGES} more{what}" if len(shown) > _SHOWN_RANGES else ""
    return ", ".join(shown[:_SHOWN_RANGES]) + more
