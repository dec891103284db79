"""The paged pool alone: block accounting, layouts, and digests that tell every kind of damage apart."""

import hashlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.errors import BlocksError, ConfigError, GeometryError, TokensError
from kvxfer.integrations.paged import Difference, PagedCache, Sequence, digests, first_difference, token_digests

LAYERS, HEADS, DIM, TOKENS = 3, 4, 8, 75
SHAPES = [("NHD", 16), ("HND", 16), ("NHD", 32), ("HND", 32), ("HND", 7)]
DIVIDED: list[dict[str, Any]] = [{}, {"cross_layer": True}, {"ranks": 2}, {"cross_layer": True, "ranks": 4}]


def pool(layout: Any = "NHD", block_tokens=16, *, ranks=1, **changes):
    own = {"num_blocks": 24, "dtype": torch.float32, "seed": 0, "cross_layer": False}
    own = {name: changes.pop(name, value) for name, value in own.items()}
    model = {"num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": HEADS, "head_dim": DIM}
    config = SimpleNamespace(**{**model, "hidden_size": 64, **changes})
    return PagedCache(config, block_tokens=block_tokens, layout=layout, device="cpu", ranks=["cpu"] * ranks, **own)


def logical(tokens=TOKENS, dtype=torch.float32):
    """K and V that nobody computed: [layer, kv, head, token, dim]."""
    generator = torch.Generator().manual_seed(11)
    return torch.randn((LAYERS, 2, HEADS, tokens, DIM), generator=generator).to(dtype)


def filled(cache, data=None):
    """A sequence that holds `data`, written in three uneven pieces."""
    data = logical(dtype=cache.dtype) if data is None else data
    sequence = Sequence(cache.allocate(data.shape[3]))
    table = cache.table(sequence.block_ids)
    for layer in range(LAYERS):
        for start, stop in ((0, 1), (1, 40), (40, data.shape[3])):
            cache.write(layer, table, start, data[layer, 0, :, start:stop], data[layer, 1, :, start:stop])
    sequence.tokens = data.shape[3]
    return sequence


# blocks


def test_blocks_come_in_a_shuffled_order_that_the_seed_repeats():
    ids = pool().allocate(16 * 24)
    assert sorted(ids) == list(range(24))
    assert ids != sorted(ids)
    assert ids != sorted(ids, reverse=True)
    assert pool().allocate(16 * 24) == ids
    assert pool(seed=1).allocate(16 * 24) != ids


def test_allocate_rounds_up_to_whole_blocks():
    for tokens, blocks in [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)]:
        cache = pool()
        assert len(cache.allocate(tokens)) == blocks
        assert cache.free_blocks == 24 - blocks


def test_running_out_of_blocks_takes_none_and_says_how_many_were_needed():
    cache = pool(num_blocks=3)
    cache.allocate(16)
    with pytest.raises(BlocksError, match="3 of 16 tokens are needed, 2 of 3 are free"):
        cache.allocate(33)
    assert cache.free_blocks == 2
    with pytest.raises(TokensError):
        cache.allocate(-1)


def test_blocks_are_never_held_twice():
    cache = pool(num_blocks=8)
    held = []
    for _ in range(50):
        held.append(cache.allocate(32))
        assert len({i for ids in held for i in ids}) == 2 * len(held)
        if len(held) == 4:
            cache.free(held.pop(1))
            cache.free(held.pop(0))


def test_a_wrong_free_is_refused_whole():
    cache = pool()
    ids = cache.allocate(48)
    with pytest.raises(BlocksError, match="named twice"):
        cache.free([ids[0], ids[1], ids[0]])
    with pytest.raises(BlocksError, match="outside the pool of 24"):
        cache.free([ids[0], 24])
    with pytest.raises(BlocksError, match="outside the pool"):
        cache.free([-1])
    assert cache.free_blocks == 21
    cache.free(ids)
    with pytest.raises(BlocksError, match=f"block {ids[1]} at position 0 is not allocated"):
        cache.free([ids[1]])
    assert cache.free_blocks == 24


def test_reserve_appends_what_is_missing_and_refuses_a_table_that_is_too_short():
    cache = pool()
    sequence = Sequence(cache.allocate(10), tokens=10)
    first = list(sequence.block_ids)
    cache.reserve(sequence, 16)
    assert sequence.block_ids == first
    cache.reserve(sequence, 33)
    assert sequence.block_ids[:1] == first
    assert len(set(sequence.block_ids)) == 3
    with pytest.raises(BlocksError, match="49 tokens do not fit: 3 blocks of 16 tokens hold 48 at most"):
        cache.reserve(Sequence(sequence.block_ids, tokens=49), 50)


def test_tables_that_are_too_short_or_name_blocks_of_others_are_refused():
    cache = pool()
    sequence = filled(cache)
    table, part = cache.table(sequence.block_ids[:2]), torch.zeros(HEADS, 3, DIM)
    with pytest.raises(BlocksError, match="33 tokens do not fit"):
        cache.write(0, table, 30, part, part)
    with pytest.raises(BlocksError, match="33 tokens do not fit"):
        cache.gather(0, table, 33)
    with pytest.raises(BlocksError, match="named twice"):
        cache.table([*table.tolist(), int(table[0])])
    with pytest.raises(BlocksError, match="hold 80 at most"):
        digests(cache, Sequence(sequence.block_ids, tokens=81))
    cache.free(sequence.block_ids)
    with pytest.raises(BlocksError, match="not allocated"):
        digests(cache, sequence)


# contents


@pytest.mark.parametrize("divided", DIVIDED, ids=str)
@pytest.mark.parametrize(("layout", "block_tokens"), SHAPES)
def test_every_element_lies_where_the_axis_string_says(layout, block_tokens, divided):
    cache = pool(layout, block_tokens, **divided)
    data = logical()
    sequence = filled(cache, data)
    for layer, kv, token, head, dim in [(0, 0, 0, 0, 0), (2, 1, 74, 3, 7), (1, 0, 33, 2, 5), (2, 1, 16, 1, 0)]:
        (shard,) = [shard for shard in cache.shards if head in shard.heads]
        block, row = sequence.block_ids[token // block_tokens], token % block_tokens
        at = {"kv": kv, "block": block, "token": row, "dim": dim, "head": head - shard.heads.start, "layer": layer}
        tensor = shard.tensors[0] if len(shard.tensors) == 1 else shard.tensors[layer]
        assert tensor[tuple(at[axis] for axis in shard.axes.split())] == data[layer, kv, head, token, dim]
    for layer in range(LAYERS):
        both = cache.gather(layer, cache.table(sequence.block_ids), TOKENS)
        assert all(torch.equal(found, data[layer, kv].transpose(0, 1)) for kv, found in enumerate(both))


@pytest.mark.parametrize(
    ("layout", "axes", "shape"),
    [("NHD", "kv block token head dim", (2, 24, 16, 4, 8)), ("HND", "kv block head token dim", (2, 24, 4, 16, 8))],
)
def test_a_tensor_a_layer_is_described_as_it_is(layout, axes, shape):
    cache = pool(layout, dtype=torch.bfloat16)
    assert [tuple(t.shape) for t in cache.tensors] == [shape] * LAYERS
    assert cache.axes == axes
    assert all(t.is_contiguous() for t in cache.tensors)
    assert cache.token_bytes * 16 * 24 == sum(t.nbytes for t in cache.tensors)
    described = cache.cache_tensors()
    assert [(t.axes, list(t.layers), t.heads) for t in described] == [(axes, [n], range(HEADS)) for n in range(LAYERS)]
    assert all(t.tensor is raw and t.spec() for t, raw in zip(described, cache.tensors, strict=True))


@pytest.mark.parametrize(("layout", "inner", "shape"), [("NHD", "token head", (16, 2)), ("HND", "head token", (2, 16))])
def test_cross_layer_blocks_of_two_ranks(layout, inner, shape):
    cache = pool(layout, cross_layer=True, ranks=2)
    assert [tuple(t.shape) for t in cache.tensors] == [(24, LAYERS, 2, *shape, 8)] * 2, "a tensor a rank"
    for shard, heads in zip(cache.shards, (range(2), range(2, 4)), strict=True):
        (described,) = shard.cache_tensors()
        assert (described.axes, list(described.layers)) == (f"block layer kv {inner} dim", list(range(LAYERS)))
        assert described.heads == shard.heads == heads
        assert described.spec() is not None
    assert cache.token_bytes * 16 * 24 == sum(t.nbytes for t in cache.tensors)
    with pytest.raises(GeometryError, match=r"divided among 2 ranks.*shards\[rank\]"):
        cache.cache_tensors()


def test_a_write_touches_its_own_tokens_only():
    cache = pool("HND", 16)
    before = [t.clone() for t in cache.tensors]
    ids = cache.allocate(40)
    part = logical(5)
    cache.write(1, cache.table(ids), 14, part[1, 0], part[1, 1])
    changed = before[1] != cache.tensors[1]
    assert changed.sum() == 2 * HEADS * 5 * DIM
    assert changed[:, ids[0], :, 14:].all()
    assert changed[:, ids[1], :, :3].all()
    assert torch.equal(before[0], cache.tensors[0])
    assert torch.equal(before[2], cache.tensors[2])


@pytest.mark.parametrize("divided", DIVIDED, ids=str)
def test_the_pool_starts_with_garbage_and_scrub_brings_fresh_garbage(divided):
    cache = pool(**divided)
    for tensor in cache.tensors:
        assert tensor.isfinite().all()
        assert (tensor == 0).sum() == 0
    assert not torch.equal(cache.tensors[0], pool(seed=1, **divided).tensors[0])
    ids = cache.allocate(33)
    before = [t.clone() for t in cache.tensors]
    cache.scrub(ids)
    others = [i for i in range(24) if i not in ids]
    block = cache.axes.split().index("block")
    for old, new in zip(before, cache.tensors, strict=True):
        changed = (old != new).movedim(block, 0)
        assert changed[ids].float().mean() > 0.99
        assert not changed[others].any()


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"layout": "NDH"}, ConfigError, "layout 'NDH'"),
        ({"block_tokens": 0}, ConfigError, "block_tokens=0"),
        ({"ranks": 3}, GeometryError, "4 heads of K and V cannot be divided equally among 3 ranks"),
        ({"sliding_window": 4096}, GeometryError, "sliding_window=4096"),
        ({"layer_types": ["linear_attention", "full_attention"]}, GeometryError, "linear_attention"),
    ],
)
def test_what_the_pool_cannot_store_is_refused_by_name(asked, error, says):
    with pytest.raises(error, match=says):
        pool(**asked)


def test_what_does_not_fit_into_the_pool_is_not_written():
    cache = pool()
    table, good = cache.table(cache.allocate(4)), torch.zeros(HEADS, 4, DIM)
    with pytest.raises(GeometryError, match="values of layer 2"):
        cache.write(2, table, 0, good, good[:, :3])
    with pytest.raises(GeometryError, match="keys of layer 0"):
        cache.write(0, table, 0, good.double(), good)


def test_head_count_and_size_have_the_defaults_of_transformers():
    cache = pool(num_key_value_heads=None, head_dim=None)
    assert (cache.heads, cache.head_dim) == (8, 8)


# digests


def test_digests_do_not_depend_on_layout_block_size_or_block_ids():
    results = []
    shapes = [(*shape, divided) for shape in SHAPES for divided in DIVIDED]
    for seed, (layout, block_tokens, divided) in enumerate(shapes):
        cache = pool(layout, block_tokens, seed=seed, **divided)
        cache.allocate(3)  # shifts the ids
        sequence = filled(cache)
        results.append((digests(cache, sequence), token_digests(cache, sequence)))
    assert all(result == results[0] for result in results)
    assert len({d for layer in results[0][0] for d in layer}) == 2 * LAYERS
    assert all(first_difference(results[0][1], result[1]) is None for result in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_digests_are_of_the_bytes_in_token_head_dim_order(dtype):
    cache = pool("HND", 32, dtype=dtype)
    data = logical(dtype=dtype)
    sequence = filled(cache, data)
    raw = data[1, 0].transpose(0, 1).contiguous().view(torch.uint8).numpy().tobytes()
    assert digests(cache, sequence)[1][0] == hashlib.blake2b(raw, digest_size=32).digest()
    row = raw[9 * len(raw) // TOKENS : 10 * len(raw) // TOKENS]
    assert token_digests(cache, sequence)[1][0][9] == hashlib.blake2b(row, digest_size=32).digest()


def heads_view(cache, layer):
    return cache.tensors[layer] if cache.layout == "HND" else cache.tensors[layer].transpose(2, 3)


def to(factor, offset):
    return lambda cells, at, _: cells[at] * factor + offset


def from_(source):
    return lambda cells, _, ids: cells[source(ids)]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("at", "comes", "where"),
    [  # cells are [kv, block, head, token, dim] of one layer
        (lambda ids: np.s_[:, ids[2]], to(0, 0), Difference(1, "k", 32)),
        (lambda ids: np.s_[1, ids[2]], to(0, 0), Difference(1, "v", 32)),
        (lambda ids: np.s_[:, [ids[1], ids[3]]], from_(lambda ids: np.s_[:, [ids[3], ids[1]]]), Difference(0, "k", 16)),
        (lambda ids: np.s_[:, ids[0], [0, 1]], from_(lambda ids: np.s_[:, ids[0], [1, 0]]), Difference(2, "k", 0)),
        (lambda ids: np.s_[:, ids[-1], :, (TOKENS - 1) % 16], to(0, 0.5), Difference(2, "k", TOKENS - 1)),
        (lambda ids: np.s_[1, ids[1], 3, 4, 5], to(1, 1e-6), Difference(1, "v", 20)),
        (lambda ids: np.s_[0, ids[0], 0, 0, 0], to(1, 1e-6), Difference(0, "k", 0)),
        (lambda ids: np.s_[[0, 1], ids[0]], from_(lambda ids: np.s_[[1, 0], ids[0]]), Difference(2, "k", 0)),
    ],
    ids=["block", "values", "blocks swapped", "heads swapped", "last", "an element", "the first", "halves swapped"],
)
def test_damage_changes_the_digests_and_is_named(layout, at, comes, where):
    cache = pool(layout, 16)
    sequence = filled(cache)
    whole, by_token = digests(cache, sequence), token_digests(cache, sequence)
    cells, ids = heads_view(cache, where.layer), sequence.block_ids
    cells[at(ids)] = comes(cells, at(ids), ids)
    after = digests(cache, sequence)
    assert [i for i in range(LAYERS) if whole[i] != after[i]] == [where.layer]
    assert first_difference(by_token, token_digests(cache, sequence)) == where


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_rows_beyond_the_last_token_do_not_count(layout):
    cache = pool(layout, 16)
    sequence = filled(cache)
    whole = digests(cache, sequence)
    for layer in range(LAYERS):
        heads_view(cache, layer)[:, sequence.block_ids[-1], :, TOKENS % 16 :] = 9.0
    assert digests(cache, sequence) == whole


def test_a_missing_tail_is_named_as_the_first_missing_token():
    cache = pool()
    sequence = filled(cache)
    whole = token_digests(cache, sequence)
    sequence.tokens -= 1
    assert first_difference(whole, token_digests(cache, sequence)) == Difference(0, "k", TOKENS - 1)
    with pytest.raises(GeometryError, match="3 layers with one of 2"):
        first_difference(whole, whole[:2])


def test_an_empty_sequence_has_digests():
    cache = pool()
    assert len(set(digests(cache, Sequence([])))) == 1
    assert token_digests(cache, Sequence([])) == [([], [])] * LAYERS


def test_the_pool_needs_no_transformers():
    code = "import sys, kvxfer.integrations.paged; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
