"""Axis strings."""

import pytest

from kvxfer.errors import GeometryError
from kvxfer.geometry.axes import Factor, bind_axes, parse_axes


@pytest.mark.parametrize(
    "text", ["block head dim/8 token dim%8", "dim%8 block dim/8", "head/2 block head%2 dim%4 dim/4"]
)
def test_a_split_axis_reads_back_as_written(text: str) -> None:
    assert " ".join(map(str, parse_axes(text))) == text


@pytest.mark.parametrize(("text", "words"), [
    ("block head slot", "'slot' is not one of block, layer"), ("Block dim", "'Block' is not one of"),
    ("block dim/0 dim%0", "'dim/0' is not one of"), ("block dim/08 dim%08", "'dim/08' is not one of"),
    ("block dim/-8 dim%8", "'dim/-8' is not one of"), ("token dim", "the axis 'block' is missing"),
    ("", "the axis 'block' is missing"), ("block block dim", "block is named twice"),
    ("block dim dim", "dim is named twice"), ("block dim dim/8", "dim is named twice"),
    ("block dim%8 dim", "dim is named twice"), ("block dim/8 dim/8", "dim is named twice"),
    ("block dim/8", "its two parts once each (dim/n and dim%n), not dim/8"),
    ("block head%2", "its two parts once each (head/n and head%n), not head%2"),
    ("block dim/8 dim%4", "not dim/8 dim%4"), ("block dim/8 dim/4", "not dim/8 dim/4"),
    ("block dim/8 dim%8 dim%4", "not dim/8 dim%8 dim%4"),
    ("block/2 block%2", "block cannot be split; only head and dim can"),
    ("block token/2 token%2", "token cannot be split"), ("block layer/2 layer%2", "layer cannot be split"),
    ("block kv/2 kv%2", "kv cannot be split"),
])  # fmt: skip
def test_a_wrong_axis_string_is_refused_with_its_text(text: str, words: str) -> None:
    with pytest.raises(GeometryError) as caught:
        parse_axes(text)
    assert words in str(caught.value)
    assert repr(text) in str(caught.value)


def test_binding_puts_the_largest_unit_first() -> None:
    bound = bind_axes(parse_axes("dim%8 block head dim/8"), (8, 5, 2, 3), (2, 1000, 100, 30))
    assert bound == {
        "dim": (Factor(3, 8, 30), Factor(8, 1, 2)),
        "block": (Factor(5, 1, 1000),),
        "head": (Factor(2, 1, 100),),
    }


def test_binding_refuses_another_number_of_strides() -> None:
    for strides in ((6,), (6, 3, 1)):
        with pytest.raises(GeometryError, match=rf"a tensor of 2 axes \('block dim'\) has {len(strides)} strides"):
            bind_axes(parse_axes("block dim"), (1, 2), strides)
