"""The registry and the code say the same, both ways."""

import tomllib
from pathlib import Path
from typing import get_args

import pytest

from kvxfer.errors import Code
from kvxfer.protocol.messages import IGNORABLE_TAG, WIRE_MIN, WIRE_VERSION, Capability, Message, Route, Status
from kvxfer.tools.inspect import registry_name

PROTO = Path(__file__).parents[2] / "proto"
REGISTRY = tomllib.loads((PROTO / "registry.toml").read_text())
NUMBER = {"message": "tag", "code": "number", "route": "number", "status": "number", "capability": "bit"}
SECTIONS = sorted(NUMBER)


def registered(section):
    return {entry["name"]: entry[NUMBER[section]] for entry in REGISTRY[section]}


def test_versions():
    assert (REGISTRY["wire_version"], REGISTRY["wire_min"]) == (WIRE_VERSION, WIRE_MIN)
    assert set(REGISTRY) == {"wire_version", "wire_min", *NUMBER}


@pytest.mark.parametrize(
    ("section", "code"),
    [
        ("message", {registry_name(kind): kind.__struct_config__.tag for kind in get_args(Message)}),
        ("code", {member.name: member.value for member in Code}),
        ("route", {member.name: member.value for member in Route}),
        ("status", {member.name: member.value for member in Status}),
        ("capability", {member.name: member.value.bit_length() - 1 for member in Capability}),
    ],
)
def test_the_registry_is_the_code(section, code):
    assert registered(section) == code


@pytest.mark.parametrize("section", SECTIONS)
def test_entries_are_complete_unique_and_in_order(section):
    entries = REGISTRY[section]
    numbers = [entry[NUMBER[section]] for entry in entries]
    assert numbers == sorted(set(numbers))
    assert len({entry["name"] for entry in entries}) == len(entries)
    for entry in entries:
        assert set(entry) == {"name", NUMBER[section], "since", "meaning"}
        assert 1 <= entry["since"] <= WIRE_VERSION
        assert entry["name"].replace("_", "").isupper()
        assert entry["meaning"].endswith(".")
        assert "\n" not in entry["meaning"]


def test_unknown_is_always_zero():
    assert all(registered(section)["UNKNOWN"] == 0 for section in ("code", "route", "status"))


def test_numbers_of_the_past_are_not_used_again():
    assert 129 not in registered("message").values()
    assert 6 not in registered("capability").values()


def test_what_came_after_the_first_version_may_be_ignored_by_it():
    may_be_ignored = {name for name, tag in registered("message").items() if tag >= IGNORABLE_TAG}
    assert may_be_ignored == {"CHECK", "SUMS", "ABANDON", "RENEWED"}
