"""The walker agrees with an independent decoder, and never goes beyond the bytes."""

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.protocol.framing import ScanError, fits, head
from kvxfer.tools.inspect import find, scan

NUMBERS = st.integers(-(2**63), 2**64 - 1)
LEAVES = (
    st.none()
    | st.booleans()
    | NUMBERS
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=300)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20))
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=20) | st.dictionaries(NUMBERS, inner, max_size=4), max_leaves=30
)


def packb(value) -> bytes:
    """`msgpack.packb`, which says that it may return None."""
    return bytes(msgpack.packb(value) or b"")


def found(data, path):
    item = find(data, path)
    return None if item is None else (item.kind, item.value)


def walk(value, depth=0, index=0):
    """(depth, index, kind, value) of a value and everything in it."""
    if isinstance(value, msgpack.ExtType):
        yield depth, index, "ext", len(value.data)
    elif isinstance(value, list):
        yield depth, index, "array", len(value)
        for at, entry in enumerate(value):
            yield from walk(entry, depth + 1, at)
    elif isinstance(value, dict):
        yield depth, index, "map", len(value)
        for at, entry in enumerate(part for pair in value.items() for part in pair):
            yield from walk(entry, depth + 1, at)
    else:
        size = {type(None): lambda v: 0, bool: int, int: int, float: lambda v: 8}.get(type(value))
        kinds = {type(None): "nil", bool: "bool", int: "int", float: "float", str: "str", bytes: "bin"}
        length = size(value) if size else len(value.encode() if isinstance(value, str) else value)
        yield depth, index, kinds[type(value)], length


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_it_agrees_with_an_independent_encoder(value):
    data = packb(value)
    items = list(scan(data))
    assert [(i.depth, i.index, i.kind, i.value) for i in items] == list(walk(value))
    assert head(data, items[-1].offset)[2] == len(data)
    assert head(b"\xc0" + data, 1)[:2] == (items[0].kind, items[0].value)


@settings(max_examples=40, deadline=None)
@given(VALUES, st.data())
def test_a_cut_is_found(value, data):
    packed = packb(value)
    cut = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(ScanError) as caught:
        list(scan(packed[:cut]))
    assert 0 <= caught.value.offset <= cut


def test_every_first_byte():
    for first in range(256):
        if first == 0xC1:
            with pytest.raises(ScanError, match="0xc1 begins no value"):
                head(bytes([first]) + bytes(40), 0)
        else:
            kind, _, end = head(bytes([first]) + bytes(40), 0)
            assert kind in {"array", "map", "int", "str", "bin", "ext", "float", "bool", "nil"}
            assert 1 <= end <= 41


def test_find():
    data = packb([4, [1, [2, 3, {"a": 8}]], 7])
    assert found(data, []) == ("array", 3)
    assert found(data, [0]) == ("int", 4)
    assert found(data, [1, 1, 2, 1]) == ("int", 8)
    assert found(data, [2]) == ("int", 7)
    assert found(data, [1, 2]) is None
    assert found(data, [3]) is None
    assert found(data, [0, 0]) is None
    assert found(packb([[9], 5]), [1, 0]) is None


def test_depth_and_number_of_values_are_bounded():
    nested = b"\x91" * 10 + b"\x01"
    assert fits(nested, depth=10, items=11)
    assert not fits(nested, depth=9, items=11)
    assert not fits(nested, depth=10, items=10)
    assert not fits(b"\xdd\xff\xff\xff\xff" + b"\x01" * 100, depth=1, items=50)
    assert fits(packb([[[]]] * 50), depth=3, items=1000)
