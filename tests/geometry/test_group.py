"""Bare lists of tensors."""

from dataclasses import fields
from inspect import signature

import pytest
import torch

from kvxfer.errors import GeometryError
from kvxfer.geometry import CacheTensor, Interleave, group


def said(tensor):
    return {field.name: getattr(tensor, field.name) for field in fields(tensor) if field.name != "tensor"}


def test_one_tensor_a_layer_in_order():
    tensors = [torch.zeros(2, 4, 16, 8, 32) for _ in range(3)]
    found = group(tensors, "kv block token head dim", layers=range(5, 8), heads=range(8, 16))
    assert [entry.tensor for entry in found] == tensors
    assert [list(entry.layers) for entry in found] == [[5], [6], [7]]
    assert {entry.spec().heads for entry in found} == {range(8, 16)}


def test_pairs_of_k_and_v():
    pairs = [(torch.zeros(4, 16, 8, 32), torch.zeros(4, 16, 8, 32)) for _ in range(2)]
    found = group(pairs, "NHD", heads=range(8))
    assert [(list(entry.layers), entry.kv) for entry in found] == [([0], "k"), ([0], "v"), ([1], "k"), ([1], "v")]
    assert [entry.tensor for entry in found] == [tensor for pair in pairs for tensor in pair]
    assert {entry.spec().axes for entry in found} == {"block token head dim"}


def test_every_option_of_a_cache_tensor_is_passed_through():
    options = {
        "heads": range(2, 4),
        "kv": "v",
        "group": "other",
        "part": "piece",
        "tokens": Interleave(1, 2, 4),
        "kernel_blocks_per_id": 3,
        "tokens_per_row": 5,
        "scale": torch.tensor(2.0),
    }
    (found,) = group([torch.zeros(1)], "block", layers=[9], **options)
    assert said(found) == {"axes": "block", "layers": [9], **options}
    assert set(signature(group).parameters) - {"tensors"} == {field.name for field in fields(CacheTensor)} - {"tensor"}


def test_scales_are_given_for_all_or_for_each():
    scales = [torch.tensor(float(number)) for number in range(4)]
    pairs = [(torch.zeros(1), torch.zeros(1)) for _ in range(2)]
    found = group(pairs, "block", scale=[scales[:2], scales[2]])
    assert [entry.scale for entry in found] == [scales[0], scales[1], scales[2], scales[2]]
    assert [entry.scale for entry in group(pairs, "block", scale=scales[3])] == [scales[3]] * 4
    assert [entry.scale for entry in group([torch.zeros(1)] * 4, "block", scale=scales)] == scales


@pytest.mark.parametrize(
    ("tensors", "options", "words"),
    [
        ([torch.zeros(1)] * 3, {"layers": [1, 2]}, "3 tensors were given, but layers= names 2"),
        ([(torch.zeros(1),)], {}, "layer 0: a layer is one tensor, or its K and its V as a pair; it has 1 tensors"),
        ([torch.zeros(1)] * 3, {"scale": [torch.ones(())]}, "3 tensors were given, but scale= has 1"),
        ([(torch.zeros(1), torch.zeros(1))], {"kv": "k"}, "kv='k' cannot be said of a pair"),
        (None, {}, "tensors= must be a list, with one entry for each layer, not NoneType"),
        (torch.zeros(3, 1), {}, "tensors= must be a list, with one entry for each layer, not Tensor"),
        ([torch.zeros(1)], {"layers": 5}, "layers= must be a list, with one entry for each layer, not int"),
        # with one too few, the V of a layer would not be part of the cache at all
        *(
            ([(torch.zeros(1),) * 2], {"layers": [7], "scale": [(torch.ones(()),) * count]},
             f"layer 7: it is a pair of 2 tensors, but scale= has a list of {count}")
            for count in (0, 1, 3)
        ),
        # of two for the halves of a kv axis, the first would be taken for both
        *(
            ([torch.zeros(2, 1)], {"scale": [[torch.ones(())] * count]},
             f"layer 0: it is one tensor, but scale= has a list of {count} for it")
            for count in (1, 2)
        ),
    ],
)  # fmt: skip
def test_lists_that_do_not_fit_are_refused(tensors, options, words):
    with pytest.raises(GeometryError) as caught:
        group(tensors, "block", **options)
    assert words in str(caught.value)
