"""Plans that convert against the oracle: every element of random worlds, in place and through staging, bit for bit."""

import os
from collections import defaultdict
from dataclasses import replace
from random import Random
from typing import Any

import conversions
import numpy as np
import oracle
import pytest
import torch
from copy_plans import PAIRS
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import copy, pack
from staged import gather, nbytes_of, scatter
from worlds import Rank, cache_tensor, contiguous, make_world

from kvxfer.errors import GeometryError
from kvxfer.geometry import (
    CacheGeometry,
    CacheTensor,
    ChunkGrid,
    PairPlan,
    Selection,
    TensorSpec,
    common,
    differences,
    resolve,
)
from kvxfer.geometry.copyplan import Elements

GUARD = 64


def expect(source: Rank, target: Rank, selections: list[oracle.Selection], tokens: tuple[int, int]) -> Any:
    """The destination's memory afterwards, and how many elements moved."""
    alike: dict[Any, list[Any]] = defaultdict(list)
    for mine, theirs, head, at, to in oracle.element_moves(
        source.tensors, target.tensors, selections, source.blocks, target.blocks, tokens
    ):
        scales = oracle.scale_of(mine, head), oracle.scale_of(theirs, head)
        alike[mine["dtype"], theirs["dtype"], *scales].append((at, to))
    result, moved = target.memory.copy(), 0
    for (src, dst, multiply, divide), places in alike.items():
        at, to = (np.concatenate(side) for side in zip(*places, strict=True))
        size, room = getattr(torch, src).itemsize, getattr(torch, dst).itemsize
        data = source.memory[at[:, None] + np.arange(size)]
        if (src, multiply) != (dst, divide):
            elements = torch.from_numpy(data).view(getattr(torch, src))[:, 0]
            data = conversions.reference(elements, dst, multiply, divide).view(torch.uint8).numpy().reshape(-1, room)
        result[to[:, None] + np.arange(room)] = data
        moved += len(to)
    return result, moved


def hidden(geometry: CacheGeometry) -> CacheGeometry:
    """As a peer sees it that is not trusted with addresses."""
    return CacheGeometry(tuple(replace(spec, base=0) for spec in geometry.tensors))


def check_pair(source: Rank, target: Rank, selections: Any, tokens: tuple[int, int], rng: Random) -> int:
    plain = [(s.group, s.part, s.kv, s.layers, s.head_start, s.head_stop) for s in selections]
    before = target.memory.copy()
    expected, moved = expect(source, target, plain, tokens)
    here = PairPlan(source.geometry, target.geometry, selections, convert=True)
    copy(pack(here.bind(source.spans, target.spans, range(*tokens)).whole.copy()))
    assert np.array_equal(target.memory, expected)

    target.memory[:] = before
    ends = [
        PairPlan(source.geometry, hidden(target.geometry), selections, convert=True),
        PairPlan(hidden(source.geometry), target.geometry, selections, convert=True),
    ]
    sender, receiver = (end.bind(source.spans, target.spans, range(*tokens)) for end in ends)
    grid = ChunkGrid(
        here.layers, rng.randint(1, len(here.layers)), rng.choice([tokens[1], rng.randint(1, 20)]), *tokens
    )
    assert sender.digest(grid) == receiver.digest(grid)
    for number in range(grid.chunks):
        give, take = sender.chunk(grid, number), receiver.chunk(grid, number)
        assert (give.staged_bytes, give.bytes) == (take.staged_bytes, take.bytes)
        staging = np.full(give.staged_bytes + 2 * GUARD, 0x5A, np.uint8)
        at = staging.ctypes.data + GUARD
        at += -at % 16
        into = gather(give, at)
        assert nbytes_of(into) == give.bytes  # the narrower side's
        copy(pack(into))
        room = staging[at - staging.ctypes.data :][: give.staged_bytes]
        once = room.copy()
        room[:] = 0xA5
        copy(pack(into))
        assert np.array_equal(room, once), "what staging held before would travel"
        edge = at - staging.ctypes.data
        assert (staging[:edge] == 0x5A).all()
        assert (staging[edge + give.staged_bytes :] == 0x5A).all()
        copy(pack(scatter(take, at)))
    assert np.array_equal(target.memory, expected)
    return moved


WORLDS = int(os.environ.get("WORLDS", "75")) * 2 // 5


@settings(derandomize=True, deadline=None, max_examples=WORLDS)
@given(st.integers(0, 1 << 32))
def test_every_world_of_unequal_dtypes_agrees_with_the_oracle(seed: int) -> None:
    rng = Random(seed)
    world = make_world(rng, mixed=True)
    noise = np.random.default_rng(seed)
    for rank in (*world.prefill, *world.decode):
        rank.memory[:] = noise.integers(0, 256, len(rank.memory), np.uint8)
    have = [rank.geometry for rank in world.prefill]
    for number, target in enumerate(world.decode):
        for source, selections in zip(world.prefill, resolve(target.geometry, have, rank=number), strict=True):
            if selections:
                check_pair(source, target, selections, world.tokens, rng)


def test_axes_beyond_the_box_keep_the_numbers_of_their_region() -> None:
    """Two split axes are one more than a box has, so each layer (with a scale of its own) becomes several regions."""

    def rank(axes: str, dtype: str, scales: tuple[float, float]) -> Rank:
        tensors: list[dict[str, Any]] = []
        sizes = {"block": 3, "head": 8, "token": 4, "dim": 8}
        for layer, scale in enumerate(scales):
            item = getattr(torch, dtype).itemsize
            tensor = contiguous(axes, sizes, layers=(layer,), kv=("k",), item=item, base=4096 * 4 * layer)
            tensors.append(tensor | {"dtype": dtype, "scale": (scale,)})
        return Rank(tensors, {"default": ([2, 0, 1], 0)}, {}, (0, 1, 1))

    source = rank("head%4 dim%2 block head/4 token dim/2", "bfloat16", (1.5, 3.0))
    target = rank("block token head dim", "float8_e4m3fn", (0.5, 7.0))
    source.memory[:] = np.random.default_rng(0).integers(0, 256, len(source.memory), np.uint8)
    both = [Selection("default", "", "k", (0, 1), 0, 8)]
    plan = PairPlan(source.geometry, target.geometry, both, convert=True)
    (segment,) = plan.bind(source.spans, target.spans, range(11)).whole.copy().segments
    assert len(segment.regions) > len(plan.classes[0].layers) == 2
    assert check_pair(source, target, both, (0, 11), Random(0)) == 2 * 11 * 8 * 8


# fixed cases

SIZES = {"block": 4, "token": 4, "head": 4, "dim": 8}
EVERYTHING = [Selection("default", "", "k", (0,), 0, 4)]


def spec(dtype: str, scale: tuple[float, ...] = (), **rest: Any) -> TensorSpec:
    item = getattr(torch, dtype).itemsize
    tensor = contiguous("block token head dim", SIZES, kv=("k",), item=item) | {"dtype": dtype, "scale": scale}
    return replace(cache_tensor(np.zeros(tensor["extent"] + 8, np.uint8), tensor).spec(), **rest)


def pair(src: TensorSpec, dst: TensorSpec, *, convert: bool = True) -> PairPlan:
    return PairPlan(CacheGeometry((src,)), CacheGeometry((dst,)), EVERYTHING, convert=convert)


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_dtypes_that_differ_are_refused_unless_asked_for(src: str, dst: str) -> None:
    one, other = spec(src), spec(dst)
    both = CacheGeometry((one,)), CacheGeometry((other,))
    assert pair(one, other).converts == (src != dst)
    assert list(differences(*both, convert=True)) == []
    if src != dst:
        words = f"dtype is {src} at the source, but {dst} at the destination; convert=True at the decode rank would"
        with pytest.raises(GeometryError, match=words):
            pair(one, other, convert=False)
        ((_, found),) = differences(*both, convert=False)
        assert (found.what, found.src, found.dst) == ("dtype", src, dst)


@pytest.mark.parametrize("other", ["int8", "uint8", "int16", "float64"])
def test_what_is_not_a_float_of_at_most_32_bits_is_never_converted(other: str) -> None:
    for src, dst in ((spec("bfloat16"), spec(other)), (spec(other), spec("bfloat16"))):
        with pytest.raises(
            GeometryError, match=f"dtype is {src.dtype} at the source, but {dst.dtype} at the"
        ) as caught:
            pair(src, dst)
        assert "convert=True" not in str(caught.value)
    with pytest.raises(GeometryError, match=f"{other} cannot be converted, only float32, float16, bfloat16"):
        pair(spec(other, (2.0,)), spec(other))
    assert not pair(spec(other, (2.0,)), spec(other, (2.0, 2.0, 2.0, 2.0))).classes[0].key.elements.converts


def test_equal_scales_are_copied_as_they_are() -> None:
    for mine, theirs in (((), (1.0,)), ((0.5,), (0.5,)), ((0.5,), (0.5,) * 4)):
        for src, dst in ((mine, theirs), (theirs, mine)):
            (only,) = pair(spec("float8_e4m3fn", src), spec("float8_e4m3fn", dst), convert=False).classes
            assert only.key.elements == Elements(1, 1)
            assert only.factors.tolist() == [[1, 1]]


def test_heads_with_scales_of_their_own_are_regions_of_their_own() -> None:
    src, dst = spec("float8_e4m3fn", (1.0, 2.0, 3.0, 4.0)), spec("float8_e4m3fn", (2.0,))
    plain, scaled = pair(src, dst).classes
    assert plain.factors.tolist() == [[1, 1]]  # head 1, whose scales agree
    assert scaled.factors.tolist() == [[1, 2], [3, 2], [4, 2]]
    assert plain.bases[0].tolist() == [src.base + 8, dst.base + 8]
    assert (scaled.bases[:, 0] - src.base).tolist() == [0, 16, 24]


def test_scales_of_heads_that_only_one_side_has_do_not_matter() -> None:
    src = spec("bfloat16", (1.0, 2.0, 3.0, 4.0))
    some = contiguous("block token head dim", SIZES | {"head": 2}, kv=("k",), heads=(1, 3))
    dst = cache_tensor(np.zeros(some["extent"] + 8, np.uint8), some | {"dtype": "bfloat16", "scale": (2.0, 3.0)}).spec()
    both = CacheGeometry((src,)), CacheGeometry((dst,))
    assert list(differences(*both, convert=False)) == []
    assert not PairPlan(*both, common(*both), convert=True).converts


def test_the_digest_covers_elements_and_scales() -> None:
    base = spec("bfloat16"), spec("float8_e4m3fn")
    pairs = [
        base,
        (spec("float16"), base[1]),
        (base[0], spec("float8_e5m2")),
        (spec("bfloat16", (2.0,)), base[1]),
        (base[0], spec("float8_e4m3fn", (2.0,))),
        (spec("bfloat16", (2.0,)), spec("float8_e4m3fn", (2.0,))),
        (base[0], base[0]),
        (base[1], base[1]),
    ]
    assert len({pair(*each).digested for each in pairs}) == len(pairs)


def test_elements_that_are_converted_must_be_aligned() -> None:
    one, other = spec("bfloat16"), spec("float32")
    with pytest.raises(GeometryError, match="alignment is 1 bytes at the source, but 4 bytes at the destination"):
        pair(replace(one, base=one.base + 1), other)
    assert pair(replace(one, base=one.base + 1), one)  # bytes may lie anywhere


# scales, as a caller gives them


def given_scale(scale: Any) -> TensorSpec:
    tensor = torch.zeros(2, 4, 3, 8, dtype=torch.float8_e4m3fn)
    return CacheTensor(tensor, "block token head dim", layers=[0], heads=range(3), kv="k", scale=scale).spec()


def test_a_scale_is_read_once() -> None:
    assert given_scale(None).scale == ()
    assert given_scale(torch.tensor(0.1)).scale == (float(np.float32(0.1)),)
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0])[::2].requires_grad_()
    two = CacheTensor(torch.zeros(2, 4, 2, 8), "block token head dim", layers=[0], heads=range(2), kv="k", scale=scale)
    kept = two.spec()
    scale.data.fill_(9)
    assert kept.scale == (1, 3)
    assert kept.scales(range(1, 2)) == (3,)


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (0.5, "scale must be a torch.Tensor of dtype float32, not float"),
        (torch.ones(3, dtype=torch.float64), "scale must be of dtype float32, not float64"),
        (torch.ones(2), r"scale must have the shape \(\) or \(3,\), one number a head, not \(2,\)"),
        (torch.ones(1), r"not \(1,\)"),
        (torch.ones(3, 1), r"not \(3, 1\)"),
        (torch.tensor([1.0, torch.nan, 1.0]), r"scale\[1\] is nan, but a scale must be finite and above 0"),
        (torch.tensor([1.0, 1.0, torch.inf]), r"scale\[2\] is inf"),
        (torch.tensor(0.0), r"scale\[0\] is 0"),
        (torch.tensor(-1.0), r"scale\[0\] is -1"),
    ],
)
def test_wrong_scales_are_refused_by_name(scale: Any, words: str) -> None:
    with pytest.raises(GeometryError, match=words):
        given_scale(scale)


def test_a_scale_without_a_head_axis() -> None:
    for scale in (torch.tensor(0.5), torch.tensor([0.5])):
        assert CacheTensor(torch.zeros(2, 4, 8), "block token dim", layers=[0], scale=scale).spec().scale == (0.5,)
