"""PROTOCOL.md says what the types say: fields, order, bounds, defaults, and sections that exist."""

import itertools
import math
import re
import tomllib
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from kvxfer.errors import GeometryError
from kvxfer.mapped import host
from kvxfer.plans.pairs import geometry_from_wire
from kvxfer.protocol import framing, messages
from kvxfer.protocol.messages import Message, TensorFrame, pack_u32
from kvxfer.safety import fence
from kvxfer.tools.inspect import registry_name
from proto.schema import body_schema, messages_schema

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "proto/PROTOCOL.md").read_text()
REGISTRY = tomllib.loads((ROOT / "proto/registry.toml").read_text())
KINDS = {kind.__name__: kind for kind in get_args(Message)}


def section(number):
    """The text of a section or subsection."""
    level = "##" if "." not in number else "###"
    found = re.search(rf"^{level} {re.escape(number)}\.? .*?(?=^{level[:2]}#? |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    assert found, f"no section {number}"
    return found[0]


def table(text):
    """Rows of the first table with a column `field`."""
    rows, inside = [], False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells[:1] == ["field"]:
            inside = True
        elif inside and not cells:
            return rows
        elif inside and not cells[0].startswith("---"):
            rows.append(cells + [""] * (4 - len(cells)))  # a table without defaults has no column for them
    return rows


def numbered():
    """(section number, message) as the headings of section 3 have them."""
    headings = re.findall(r"^### 3\.(\d+) `(\w+)` \((\d+)\)", TEXT, re.MULTILINE)
    return [(f"3.{n}", name, int(tag)) for n, name, tag in headings]


SECTIONS = numbered()


def test_every_message_has_a_section_and_a_row():
    tags = {name: kind.__struct_config__.tag for name, kind in KINDS.items()}
    assert {name: tag for _, name, tag in SECTIONS} == tags
    assert [number for number, _, _ in SECTIONS] == [f"3.{n}" for n in range(1, 1 + len(SECTIONS))]
    assert [tag for _, _, tag in SECTIONS] == sorted(tags.values())
    rows = dict(re.findall(r"^\| (\d+) \| `(\w+)` \|", TEXT, re.MULTILINE))
    assert {name: int(tag) for tag, name in rows.items()} == tags


@pytest.mark.parametrize(("number", "name", "tag"), SECTIONS, ids=[name for _, name, _ in SECTIONS])
def test_fields_and_defaults_are_those_of_the_type(number, name, tag):
    fields = msgspec.structs.fields(KINDS[name])
    rows = table(section(number))
    if name == "Welcome":
        assert len(table(section("3.1"))) == 11
        fields = fields[11:]
    assert [row[0] for row in rows] == [field.name for field in fields]
    for row, field in zip(rows, fields, strict=True):
        assert (row[3] != "") == (not field.required), f"default of {field.name}"


def test_fields_of_a_tensor_are_those_of_the_type():
    text = section("3.3")
    rows = table(text[text.index("A **tensor** is") :])
    assert [row[0] for row in rows] == list(TensorFrame.__struct_fields__)
    for row, field in zip(rows, msgspec.structs.fields(TensorFrame), strict=True):
        if row[3]:
            assert row[3].strip("`") == (str(field.default) if field.default != b"" else "empty")
        else:
            assert field.required


def is_read(kv, halves):
    """Whether a peer may describe a tensor so, with an axis `kv` of that length or without one."""
    axes, shape = ("block kv token dim", [4, halves, 2, 8]) if halves else ("block token dim", [4, 2, 8])
    strides = [4 * math.prod(shape[at + 1 :]) for at in range(len(shape))]
    frame = TensorFrame("g", "", kv, axes, shape, strides, pack_u32([0]), 0, 1, "float32", 4, 0)
    try:
        geometry_from_wire([frame])
    except GeometryError:
        return False
    return True


def test_halves_of_a_tensor_are_said_as_they_are_read():
    text = section("3.3")
    meaning = next(row[2] for row in table(text[text.index("A **tensor** is") :]) if row[0] == "kv")
    (one, two) = (set(re.findall(r"`(\w+)`", part)) for part in meaning.split(";")[:2])
    spellings = {"".join(letters) for n in range(4) for letters in itertools.product("kvx", repeat=n)}
    assert {kv for kv in spellings if is_read(kv, 0)} == one | {""}
    assert {kv for kv in spellings if is_read(kv, 1)} == one | {""}
    assert {kv for kv in spellings if is_read(kv, 2)} == two
    assert meaning.split(";")[2].strip().startswith("empty")


def test_tokens_that_no_rank_shares_have_turns_of_one():
    text = section("3.3")
    turn = next(row for row in table(text[text.index("A **tensor** is") :]) if row[0] == "interleave_chunk")
    assert turn[2].endswith("0 is read as 1")  # the digest (6.5) counts it as that
    frame = TensorFrame("g", "", "", "block token dim", [4, 2, 8], [64, 32, 4], pack_u32([0]), 0, 1, "float32", 4, 0)
    assert [geometry_from_wire([frame]).tensors[0].tokens.chunk, frame.interleave_chunk] == [1, 0]


def test_shared_files_are_called_what_a_peer_looks_for():
    text = section("3.3")
    assert f"a memfd called `{host._NAME}`" in text
    assert f"a memfd `{fence._NAME}`" in text


WIRE_TYPES = {
    "u32": {"minimum": 0, "maximum": 2**32 - 1},
    "u64": {"minimum": 0, "maximum": 2**63 - 1},
    "name": {"type": "string", "maxLength": 128},
    "reason": {"type": "string", "maxLength": 1024},
    "trace": {"type": "string", "maxLength": 64},
    "hash": {"contentEncoding": "base64", "maxLength": 88},
    "bytes32": {"contentEncoding": "base64", "minLength": 44, "maxLength": 44},
    "payload": {"contentEncoding": "base64", "maxLength": 87384},
    "ids": {"description": "u32 numbers, little-endian, packed"},
    "sums": {"description": "u64 numbers, little-endian, packed", "maxLength": 174764},
    "bool": {"type": "boolean"},
    "bin": {"contentEncoding": "base64"},
    "bin, at most 16": {"contentEncoding": "base64", "maxLength": 24},
    "u32, at most 2^20": {"maximum": 2**20},
    "route": {"$ref": "#/$defs/Route"},
    "status": {"$ref": "#/$defs/Status"},
    "code": {"$ref": "#/$defs/Code"},
    "ticket": {"$ref": "#/$defs/TicketRef"},
}


@pytest.mark.parametrize(("number", "name", "tag"), SECTIONS, ids=[name for _, name, _ in SECTIONS])
def test_types_and_bounds_are_those_of_the_schema(number, name, tag):
    items = {item["title"]: item for item in messages_schema()["$defs"][name]["prefixItems"]}
    for field, kind, *_ in table(section(number)):
        item = items[field]
        if kind.startswith("list of"):
            assert item["type"] == "array"
            assert item["maxItems"] == int(kind.rsplit(" ", 1)[1].replace(",", ""))
        elif kind == "timings":
            assert "Timings" in str(item)
        else:
            expected = WIRE_TYPES[kind]
            actual = item.get("allOf", [{}])[0] if "$ref" in expected and "$ref" not in item else item
            assert {key: actual.get(key) for key in expected} == expected, field


def test_bounds_of_the_body():
    items = {item["title"]: item for item in body_schema()["$defs"]["AgentBody"]["prefixItems"]}
    assert items["tensors"]["maxItems"] == messages.MAX_TENSORS == 16_384
    assert items["staging"]["maxItems"] == 1_024
    rows = {row[0]: row[1] for row in table(section("3.3")[section("3.3").index("The **agent body**") :])}
    assert rows == {
        "fabric": "name",
        "metadata": "bin",
        "tensors": "list of tensor, at most 16,384",
        "staging": "list of memory span, at most 1,024",
        "max_chunk_bytes": "u64",
        "host": "name",
        "mapped": "list of mapped memory, at most 16,384",
        "gates": "u64",
        "locks": "bin, at most 256",
        "renewals": "u32",
        "process": "u64",
    }


def test_limits_are_those_of_the_code():
    text = section("2.2")
    assert f"{framing.HANDSHAKE_FRAME_LIMIT:,} bytes" in text
    assert f"{framing.SESSION_FRAME_LIMIT:,} bytes" in text
    assert f"deeper than {framing.MAX_DEPTH} levels" in section("2.6")
    assert f"unknown tag of {messages.IGNORABLE_TAG} or above" in section("2.5")
    assert "`WHOLE` = 2^32 - 1" in section("3.12")
    assert messages.WHOLE == 2**32 - 1
    assert f"version {messages.WIRE_VERSION}\n" in TEXT.splitlines(keepends=True)[0]


@pytest.mark.parametrize(("kind", "number"), [("route", "5.4"), ("status", "5.5"), ("capability", "3.1")])
def test_every_registered_name_is_explained(kind, number):
    names = [entry["name"] for entry in REGISTRY[kind] if (kind, entry["name"]) != ("route", "UNKNOWN")]
    assert [name for name in names if f"`{name}`" not in section(number)] == []


def test_only_registered_names_are_used():
    registered = {entry["name"] for entries in REGISTRY.values() if isinstance(entries, list) for entry in entries}
    used = set(re.findall(r"`([A-Z][A-Z_]+[A-Z])`", TEXT))
    assert used - registered == {"WHOLE", "QUEUED", "POSTED", "DEAD", "DRAM", "VRAM"}
    assert registry_name(messages.KvAgentResult) in used


def test_references_lead_somewhere():
    headings = set(re.findall(r"^##+ (\d+(?:\.\d+)?)\b", TEXT, re.MULTILINE))
    cited = set(re.findall(r"sections? (\d+(?:\.\d+)?)", TEXT))
    for path in [*(ROOT / "kvxfer").rglob("*.py"), *(ROOT / "proto").rglob("*.py")]:
        cited |= set(re.findall(r"PROTOCOL\.md sections? (\d+(?:\.\d+)?)", path.read_text()))
    assert len(cited) > 10
    assert cited <= headings
    assert [n for n in sorted(headings, key=float) if "." not in n] == list("123456789")
