"""The paged pool alone: block accounting, layouts, and digests that tell every kind of damage apart."""

import hashlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.errors import BlocksError, ConfigError, GeometryError
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


def test_the_pool_needs_no_transformers():
    code = "import sys, kvxfer.integrations.paged; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
