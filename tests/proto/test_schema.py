"""The schema follows the types, and means what the decoder means."""

from typing import get_args

import jsonschema
import msgspec
import pytest

from kvxfer.protocol.messages import AgentBody, Message, Route, TensorFrame
from kvxfer.tools.inspect import registry_name
from proto.generate import HERE, generate, text
from proto.schema import body_schema, messages_schema

DOCUMENTS = generate()
MESSAGES = jsonschema.Draft202012Validator(messages_schema())


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name.startswith("schema/")])
def test_the_schema_in_git_is_current(name):
    assert (HERE / name).read_text() == text(DOCUMENTS[name]), "run `make schema`"


def test_there_is_no_other_schema():
    found = {f"{folder}/{path.name}" for folder in ("schema", "vectors") for path in (HERE / folder).iterdir()}
    assert found == set(DOCUMENTS)


@pytest.mark.parametrize("schema", [messages_schema(), body_schema()], ids=["messages", "body"])
def test_it_is_a_schema(schema):
    jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("kind", [*get_args(Message), AgentBody, TensorFrame], ids=lambda kind: kind.__name__)
def test_fields_have_their_names(kind):
    definition = (messages_schema() if kind in get_args(Message) else body_schema())["$defs"][kind.__name__]
    tag = kind.__struct_config__.tag
    titles = [item["title"] for item in definition["prefixItems"]]
    assert titles == [*(["tag"] if tag is not None else []), *kind.__struct_fields__]
    assert definition["minItems"] == (tag is not None) + sum(f.required for f in msgspec.structs.fields(kind))
    assert "items" not in definition, "unknown tail fields must validate"
    if tag is not None:
        assert definition["prefixItems"][0]["const"] == tag
        assert definition["x-registry-name"] == registry_name(kind)


def test_enums_are_open():
    assert MESSAGES.is_valid([13, 1, 68])
    assert MESSAGES.is_valid([13, 1, 999])
    assert MESSAGES.is_valid([13, 1, -1])
    assert not MESSAGES.is_valid([13, 1, "68"])
    known = messages_schema()["$defs"]["Route"]["x-known"]
    assert known == {member.name: member.value for member in Route}


def test_tails():
    assert MESSAGES.is_valid([4, {"any": "thing"}, None])
    assert MESSAGES.is_valid([15])
    assert not MESSAGES.is_valid([13])
    assert not MESSAGES.is_valid([16])
    assert not MESSAGES.is_valid([])
