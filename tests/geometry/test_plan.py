"""The planner against the brute-force oracle: whole copies, staged chunks, merged pieces, both ends."""

import os
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from agree import check_world, without_bases
from hypothesis import given, settings
from hypothesis import strategies as st
from staged import gather, nbytes_of, scatter
from worlds import Rank, contiguous, make_world

from kvxfer.errors import BlocksError, GeometryError, TokensError
from kvxfer.geometry import CacheGeometry, ChunkGrid, PairPlan, Span, TensorSpec, check_state, resolve

WORLDS = int(os.environ.get("WORLDS", "75"))
"""`make simulate` plans four times as many."""


@settings(derandomize=True, deadline=None, max_examples=WORLDS)
@given(st.integers(0, 1 << 32))
def test_every_world_agrees_with_the_oracle(seed: int) -> None:
    rng = Random(seed)
    check_world(make_world(rng), rng)


# fixed cases, each named after what it shows

KV = ("k", "v")


# binding and refusing


def simple_pair() -> tuple[PairPlan, Rank, Rank]:
    """Two ranks alike, but for the blocks that hold 12 tokens."""
    sizes = {"block": 5, "layer": 2, "kv": 2, "head": 2, "token": 4, "dim": 32}
    source, target = (
        Rank(
            [contiguous("layer kv block token head dim", sizes, layers=(0, 1), heads=(0, 2), kv=KV)],
            {"default": (Random(seed).sample(range(5), 3), 0)}, {}, (0, 1, 1),
        )
        for seed in (1, 2)
    )  # fmt: skip
    return PairPlan(source.geometry, target.geometry, resolve(target.geometry, [source.geometry])[0]), source, target


def test_binding_checks_the_lists() -> None:
    pair, source, target = simple_pair()
    good = source.spans, target.spans
    short = {"default": Span(target.spans["default"].ids[:2])}
    for lists, words in (
        (({}, good[1]), "group 'default' has no block list at the source"),
        ((good[0], {}), "group 'default' has no block list at the destination"),
        ((short, good[1]), "the block list of the source (2 blocks of 4 from token 0) does not cover tokens 0..11"),
        (
            (good[0], short),
            "the block list of the destination (2 blocks of 4 from token 0) does not cover tokens 0..11",
        ),
        ((good[0], {"default": Span([1, 0, 1])}), "block id 1 is named twice, at positions 0 and 2"),
        (({"default": Span([1, 5, 0])}, good[1]), "block id 5 at position 1 is outside 0..4"),
    ):
        with pytest.raises(BlocksError) as caught:
            pair.bind(*lists, range(12))
        assert words in str(caught.value)
    with pytest.raises(TokensError, match="that ends after token 0"):
        pair.bind(*good, range(3, 2))


def test_digest_covers_what_must_agree() -> None:
    pair, source, target = simple_pair()
    tokens = range(1, 12)
    grid = pair.grid(tokens, target_bytes=1 << 30)
    ids, to = source.spans["default"].ids, target.spans["default"].ids

    def digest(plan: PairPlan, src: Span, dst: Span, asked: range = tokens, cut: ChunkGrid = grid) -> bytes:
        return plan.bind({"default": src}, {"default": dst}, asked).digest(cut)

    base = digest(pair, Span(ids), Span(to))
    assert len(base) == 32
    assert base == digest(pair, Span(list(map(int, ids))), Span(list(map(int, to))))
    assert base == digest(pair, Span(ids[::-1]), Span(to))  # the source's blocks may not all be known yet
    blind = PairPlan(without_bases(source.geometry), without_bases(target.geometry), pair.selections)
    assert base == digest(blind, Span(ids), Span(to))
    coarser = CacheGeometry(
        tuple(replace(spec, shape=(2, 2, 5, 2, 2, 32), block_ratio=1) for spec in source.geometry.tensors)
    )
    nulls = CacheGeometry(tuple(replace(spec, null_block=0) for spec in source.geometry.tensors))
    fewer = PairPlan(source.geometry, target.geometry, pair.selections[:1])
    narrower = PairPlan(source.geometry, target.geometry, [s._replace(head_stop=1) for s in pair.selections])
    others = [
        digest(pair, Span(ids), Span(to[::-1])),
        digest(pair, Span(ids), Span(to), range(2, 12)),
        digest(pair, Span(ids), Span(to), range(1, 11)),
        digest(pair, Span(ids), Span(to[1:], 4)),
        digest(pair, Span(ids), Span(to), cut=replace(grid, layers_per_chunk=1)),
        digest(pair, Span(ids), Span(to), cut=replace(grid, tokens_per_chunk=4)),
        digest(fewer, Span(ids), Span(to)),
        digest(narrower, Span(ids), Span(to)),
        digest(PairPlan(nulls, target.geometry, pair.selections), Span(ids), Span(to)),
        digest(PairPlan(coarser, target.geometry, pair.selections), Span([0, 1, 2, 3, 4, 0]), Span(to)),
    ]
    assert len({base, *others}) == len(others) + 1


def test_state_needs_the_last_token() -> None:
    tensors = [contiguous("block head dim", {"block": 3, "head": 4, "dim": 8}) for _ in range(2)]
    source, target = (Rank([tensor], {"default": ([1], 0)}, {}, (0, 1, 1)) for tensor in tensors)
    pair = PairPlan(source.geometry, target.geometry, resolve(target.geometry, [source.geometry])[0])
    assert pair.has_state
    check_state(pair, range(90, 100), 100)
    with pytest.raises(TokensError, match=r"group 'default' is state, which belongs to token 99: .* end at token 98"):
        check_state(pair, range(99), 100)
    without, *_ = simple_pair()
    assert not without.has_state
    check_state(without, range(99), 100)
    plan = pair.bind(source.spans, target.spans, range(90, 100))
    grid = ChunkGrid((0,), 1, 4, 90, 100)
    assert [plan.chunk(grid, n).bytes for n in range(grid.chunks)] == [0, 0, 64]


def test_nothing_selected_is_nothing_to_cut() -> None:
    _, source, target = simple_pair()
    pair = PairPlan(source.geometry, target.geometry, ())
    assert pair.bind({}, {}, range(4)).whole.staged_bytes == 0
    with pytest.raises(GeometryError, match="a chunk grid needs layers"):
        pair.grid(range(4), target_bytes=100)


# size of the tables, and large numbers


def spec_at(base: int, layer: int, kv: str, blocks: int, heads: int = 8) -> TensorSpec:
    strides = (16 * heads * 256, heads * 256, 256, 2)
    shape = (blocks, 16, heads, 128)
    return TensorSpec(
        "g", "", (kv,), (layer,), range(heads), "block token head dim", shape, strides, "bfloat16", 2, base
    )


def large_pair(layers: int, blocks: int, base: int) -> PairPlan:
    size = blocks * 16 * 8 * 256
    cache = CacheGeometry(
        tuple(
            spec_at(base + (2 * layer + at) * size, layer, kv, blocks)
            for layer in range(layers)
            for at, kv in enumerate(KV)
        )
    )
    return PairPlan(cache, cache, resolve(cache, [cache])[0])


def test_tables_are_regions_plus_rows() -> None:
    """1 GiB in pieces of 32 KiB."""
    pair = large_pair(32, 600, 1 << 40)
    ids = np.random.default_rng(0).permutation(600)[:512]
    whole = pair.bind({"g": Span(ids)}, {"g": Span(ids[::-1])}, range(512 * 16)).whole
    assert whole.bytes == whole.staged_bytes == 1 << 30
    for plan in (whole.copy(), gather(whole, 0), scatter(whole, 0)):
        (segment,) = plan.segments
        assert (segment.regions.shape, segment.rows.shape) == ((64, 2), (512, 5))
        assert nbytes_of(plan) == 1 << 30
    assert whole.copy().pieces == 32768


def test_addresses_are_64_bits_wide() -> None:
    """A pool of 2**41 bytes that ends near 2**47."""
    blocks, top = 1 << 22, 1 << 47
    base = top - 2 * blocks * 32768 * 8
    pair = large_pair(8, blocks, base)
    last = blocks - 1
    whole = pair.bind({"g": Span([last, 0])}, {"g": Span([0, last])}, range(3, 30)).whole
    staging = top - (1 << 20)
    size = blocks * 32768
    for plan in (whole.copy(), gather(whole, staging), scatter(whole, staging)):
        found = plan.enumerate()
        assert found.nbytes.sum() == 27 * 2048 * 16
        assert min(found.src.min(), found.dst.min()) >= base
        assert max((found.src + found.nbytes).max(), (found.dst + found.nbytes).max()) <= top
    copied = whole.copy().enumerate().merged()
    expected = []
    for region in range(16):
        at = base + region * size
        expected += [(at + last * 32768 + 3 * 2048, at + 3 * 2048, 13 * 2048), (at, at + last * 32768, 14 * 2048)]
    assert list(zip(copied.src.tolist(), copied.dst.tolist(), copied.nbytes.tolist(), strict=True)) == expected
