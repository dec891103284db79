"""The walker agrees with an independent decoder, and never goes beyond the bytes."""

import msgpack
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.protocol.framing import fits, peek_tag

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


def walk(value, depth=1):
    """Of a value and everything in it, in how many containers it lies, or it holds, if it is one."""
    if isinstance(value, list | dict):
        yield depth
        for entry in value if isinstance(value, list) else (part for pair in value.items() for part in pair):
            yield from walk(entry, depth + 1)
    else:
        yield depth - 1


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_it_agrees_with_an_independent_encoder(value):
    data, depths = packb(value), list(walk(value))
    assert fits(data, depth=max(depths), items=len(depths))
    assert not fits(data, depth=max(depths) - 1, items=len(depths))
    assert not fits(data, depth=max(depths), items=len(depths) - 1)


@settings(max_examples=200, deadline=None)
@given(VALUES, st.data())
def test_what_is_cut_fits(value, data):
    packed = packb(value)
    cut = data.draw(st.integers(0, len(packed) - 1))
    assert fits(packed[:cut], depth=10_000, items=len(packed))


@given(NUMBERS, VALUES, st.sampled_from([b"\x92", b"\xdc\x00\x02", b"\xdd\x00\x00\x00\x02"]), st.data())
def test_a_tag_is_read_without_the_rest(number, value, array, data):
    head = array + packb(number)
    packed = head + packb(value)
    assert peek_tag(packed) == number
    cut = data.draw(st.integers(0, len(packed)))
    assert peek_tag(packed[:cut]) == (number if cut >= len(head) else None)


def test_every_first_byte():
    for first in {*range(256)} - {0xC1}:  # with which no value begins
        data = b"\x91" + bytes([first]) + bytes(40)
        assert fits(data, depth=2, items=2_000)
        assert not fits(data, depth=1, items=1)
        ints = first < 0x80 or first >= 0xE0 or 0xCC <= first < 0xD4
        assert (peek_tag(data) is not None) == ints


def test_depth_and_number_of_values_are_bounded():
    nested = b"\x91" * 10 + b"\x01"
    assert fits(nested, depth=10, items=11)
    assert not fits(nested, depth=9, items=11)
    assert not fits(nested, depth=10, items=10)
    assert not fits(b"\xdd\xff\xff\xff\xff" + b"\x01" * 100, depth=1, items=50)
    assert fits(packb([[[]]] * 50), depth=3, items=1000)
