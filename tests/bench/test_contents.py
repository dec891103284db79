"""The check of a destination sees every wrong byte, wherever it is, and takes the right ones for right."""

import random

import pytest
import torch

from kvxfer.tools.bench import caches
from kvxfer.tools.bench.caches import Request, Slab, draw
from kvxfer.tools.bench.layouts import Layout, plain

SMALL = [
    Layout("same", 2048, 3, 4, 2),
    Layout("split", 512, 2, 4, 4, target_heads=range(2)),
    Layout("turned", 256, 2, 3, 4, target_axes="kv block head token dim"),
    Layout("latent", 1024, 2, 2, 2, "block token head dim", "block token head dim"),
]
EACH = pytest.mark.parametrize("layout", SMALL, ids=lambda layout: layout.name)
BLOCKS, POOL = 4, 7


def pair(layout):
    return [Slab("cpu", [(layout, POOL)], source=source).cache(layout, POOL) for source in (True, False)]


def moved(layout, seed=1):
    """A destination to which a slow loop copied the request, element by element in logical order."""
    source, target = pair(layout)
    ours, theirs = (draw(seed, POOL, BLOCKS, source=side) for side in (True, False))
    source.write(ours)
    target.scrub()
    for one, other in zip(source.tensors, target.tensors, strict=True):
        names, turned = source.axes.split(), target.axes.split()
        for a, b in zip(ours.ids, theirs.ids, strict=True):
            block = one.select(names.index("block"), a)
            rest = [name for name in names if name != "block"]
            there = [name for name in turned if name != "block"]
            block = block.permute([rest.index(name) for name in there])
            block = block.narrow(there.index("head"), 0, len(target.heads))
            other.select(turned.index("block"), b).copy_(block)
    return target, theirs


@EACH
def test_a_right_copy_is_right(layout):
    target, request = moved(layout)
    assert target.difference(request) == ""


@EACH
@pytest.mark.parametrize("slice_bytes", [1, 1 << 20])
def test_every_byte_counts(layout, slice_bytes, monkeypatch):
    monkeypatch.setattr(caches, "_SLICE_BYTES", slice_bytes)
    target, request = moved(layout)
    numbers = random.Random(3)
    for tensor in target.tensors:
        flat = tensor.view(torch.uint8).view(-1)
        for at in numbers.sample(range(flat.numel()), 40):
            bit = 1 << numbers.randrange(8)
            flat[at] ^= bit
            assert target.difference(request) != ""
            flat[at] ^= bit
    assert target.difference(request) == ""


@EACH
def test_a_planted_byte_is_found_and_its_place_is_named(layout):
    target, request = moved(layout)
    target.corrupt(request.ids[-1])
    found = target.difference(request)
    assert f"layer {layout.layers - 1}, block {request.ids[-1]} of the request" in found


@EACH
def test_a_byte_written_outside_is_found(layout):
    target, request = moved(layout)
    (outside, *_) = set(range(POOL)) - set(request.ids)
    target.corrupt(outside)
    assert f"block {outside} that must stay untouched" in target.difference(request)


@EACH
@pytest.mark.parametrize("axis", ["kv", "block", "head", "token"])
def test_whatever_is_swapped_is_found(layout, axis):
    target, request = moved(layout)
    names = target.axes.split()
    if axis not in names:
        return
    at = names.index(axis)
    first, second = request.ids[:2] if axis == "block" else (0, 1)
    for tensor in target.tensors:
        one, other = tensor.select(at, first), tensor.select(at, second)
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
    assert target.difference(request) != ""


def test_layers_that_are_swapped_are_found():
    target, request = moved(SMALL[0])
    target.tensors[0].copy_(target.tensors[1].clone())
    assert "layer 0" in target.difference(request)


def test_what_was_there_before_is_not_taken_for_what_should_come():
    target, request = moved(SMALL[0], seed=1)
    assert target.difference(Request(2, request.ids)) != ""
    target.scrub()
    assert target.difference(request) != ""
    assert target.difference() == ""


def test_several_requests_share_a_cache():
    cache = Slab("cpu", [(plain(512), 6)], source=False).cache(plain(512), 6)
    requests = [Request(1, (0, 3)), Request(2, (5, 1))]
    cache.write(*requests)
    assert cache.difference(*requests) == ""
    assert cache.difference(requests[0]) != ""
    assert cache.difference(Request(1, (0, 3)), Request(2, (1, 5))) != ""
