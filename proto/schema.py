"""JSON Schema of the messages and of the agent body, from the msgspec types.

What msgspec makes is nearly right. Three things are mended: fields of array-like structs get their names (as `title`),
enums accept every integer (a receiver reads unknown ones as 0), and the tag is a constant.

MessagePack has a type that JSON lacks: before validation, `bin` values are written as base64 strings (`to_json`).
"""

import base64
import enum
from typing import Any, get_args

import msgspec

from kvxfer.errors import Code
from kvxfer.protocol.framing import HANDSHAKE_FRAME_LIMIT, SESSION_FRAME_LIMIT
from kvxfer.protocol.messages import AgentBody, Message, Route, Status
from kvxfer.tools.inspect import registry_name

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ENUMS: dict[str, type[enum.IntEnum]] = {"Code": Code, "Route": Route, "Status": Status}
_NOTE = (
    "The MessagePack payload of a frame, with every bin value written as a base64 string. JSON Schema cannot tell bin "
    "from str, nor 1 from 1.0: PROTOCOL.md section 2 says which type is meant."
)


def to_json(value: Any) -> Any:
    """Write a value as decoded from MessagePack as JSON data: bytes become base64 strings."""
    match value:
        case bytes() | memoryview():
            return base64.b64encode(value).decode()
        case list() | tuple():
            return [to_json(entry) for entry in value]
        case dict():
            return {str(key): to_json(entry) for key, entry in value.items()}
        case _:
            return value


def messages_schema() -> dict[str, Any]:
    """The schema of a frame's payload."""
    schema = _schema(
        Message,
        "kvxfer messages",
        f"{_NOTE} Hello and Welcome: at most {HANDSHAKE_FRAME_LIMIT} bytes; others: at most {SESSION_FRAME_LIMIT}.",
    )
    for kind in get_args(Message):
        schema["$defs"][kind.__name__]["x-registry-name"] = registry_name(kind)
    return schema


def body_schema() -> dict[str, Any]:
    """The schema of `Agent.body`, which is packed apart."""
    return _schema(AgentBody, "kvxfer agent body", _NOTE)


def _schema(kind: Any, title: str, description: str) -> dict[str, Any]:
    """One document: what msgspec makes, mended."""
    (root,), definitions = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    for name, definition in definitions.items():
        if name in _ENUMS:
            definitions[name] = _open_enum(_ENUMS[name], definition)
    for struct in _structs(kind):
        _name_fields(definitions[struct.__name__], struct)
    ordered = {name: definitions[name] for name in sorted(definitions)}
    return {"$schema": _DIALECT, "title": title, "description": description, **root, "$defs": ordered}


def _open_enum(kind: type[enum.IntEnum], definition: dict[str, Any]) -> dict[str, Any]:
    return {
        "title": definition["title"],
        "description": " ".join(definition["description"].split()),
        "type": "integer",
        "minimum": -(2**63),
        "maximum": 2**64 - 1,
        "x-known": {member.name: member.value for member in kind},
    }


def _name_fields(definition: dict[str, Any], struct: type[msgspec.Struct]) -> None:
    definition["description"] = " ".join(definition["description"].split())
    names = list(struct.__struct_fields__)
    items = definition["prefixItems"]
    if struct.__struct_config__.tag is not None:
        items[0] = {"title": "tag", "const": struct.__struct_config__.tag}
        items = items[1:]
    for name, item in zip(names, items, strict=True):
        rest = dict(item)
        item.clear()
        item.update({"title": name, **rest})


def _structs(kind: Any) -> set[type[msgspec.Struct]]:
    """Every struct that a type consists of."""
    found: set[type[msgspec.Struct]] = set()
    left = [kind]
    while left:
        here = left.pop()
        if isinstance(here, type) and issubclass(here, msgspec.Struct):
            if here not in found:
                found.add(here)
                left += [field.type for field in msgspec.structs.fields(here)]
        else:
            left += [argument for argument in get_args(here) if not isinstance(argument, msgspec.Meta)]
    return found
