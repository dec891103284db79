"""Names of layouts: which axis string each is, and tensors described by a name."""

import pytest
import torch

from kvxfer.errors import GeometryError
from kvxfer.geometry import LAYOUTS, CacheTensor
from kvxfer.geometry.axes import expand_layout

VLLM = {"LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC"}
LETTERS = {"L": "layer", "B": "block", "N": "token", "H": "head", "C": "kv dim"}


def test_the_names_are_those_of_vllm_and_each_letter_is_its_axis():
    assert set(LAYOUTS) == VLLM | {"NHD", "HND"}
    for name in VLLM:
        assert LAYOUTS[name] == " ".join(LETTERS[letter] for letter in name)
    assert (LAYOUTS["NHD"], LAYOUTS["HND"]) == ("block token head dim", "block head token dim")


def test_an_axis_string_is_its_own_name():
    assert expand_layout("  kv   block head dim/8 token dim%8 ") == "kv block head dim/8 token dim%8"
    assert expand_layout(" HND ") == "block head token dim"


SIZES = {"L": 3, "B": 5, "N": 4, "H": 2, "C": 12}


@pytest.mark.parametrize("name", sorted(VLLM))
def test_a_named_tensor_is_that_with_its_content_taken_apart(name):
    tensor = torch.zeros([SIZES[letter] for letter in name])
    spec = CacheTensor(tensor, name, layers=range(3), heads=range(2)).spec()
    content = tensor.unflatten(-1, (2, 6))
    plain = CacheTensor(content, LAYOUTS[name], layers=range(3), heads=range(2)).spec()
    assert spec == plain
    assert (spec.axes, spec.kv) == (LAYOUTS[name], ("k", "v"))


def test_the_view_of_one_layer_that_an_engine_registers_needs_no_layer_axis():
    everything = torch.zeros(3, 5, 4, 2, 12)  # LBNHC in memory
    view = everything[1].transpose(1, 2)  # block, head, token, content: what vLLM hands out for every layout
    spec = CacheTensor(view, "LBHNC", layers=[1], heads=range(2)).spec()
    assert (spec.axes, spec.shape) == ("block head token kv dim", (5, 2, 4, 2, 6))
    assert spec.strides == (4 * 2 * 12 * 4, 12 * 4, 2 * 12 * 4, 6 * 4, 4)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((3, 5, 4, 2, 2, 6), "names 5 axes (4 for one layer), but the tensor has 6"),
        ((5, 4, 12), "but the tensor has 3"),
        ((3, 5, 4, 2, 13), "13 is odd"),
    ],
)
def test_a_tensor_that_does_not_fit_the_name_is_refused(shape, words):
    with pytest.raises(GeometryError) as caught:
        CacheTensor(torch.zeros(shape), "LBNHC", layers=range(3), heads=range(2)).spec()
    assert words in str(caught.value)
