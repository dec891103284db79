"""A real Llama on the paged pool gives what it gives on transformers' own cache, and hands over to another pool."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvxfer.tools.demo.model import (
    PagedCache,
    Sequence,
    decode,
    first_difference,
    forward,
    prefill,
    tiny_llama,
    token_digests,
    weights_digest,
)

SEED, STEPS = 3, 20
LENGTHS = [1, 15, 16, 17, 40]
SHAPES = [("NHD", 16), ("HND", 16), ("NHD", 32), ("HND", 32)]
LAYERS, HEADS, DIM, TOKENS = 3, 4, 8, 75
ODD = [*SHAPES, ("HND", 7)]
DIVIDED: list[dict[str, Any]] = [{}, {"cross_layer": True}, {"ranks": 2}, {"cross_layer": True, "ranks": 4}]


# --- the pool alone


def bare(layout: Any = "NHD", block_tokens=16, *, ranks=1, num_blocks=24, seed=0, cross_layer=False):
    """A pool that no model was made for."""
    config = SimpleNamespace(num_hidden_layers=LAYERS, num_key_value_heads=HEADS, head_dim=DIM)
    sizes = {"num_blocks": num_blocks, "block_tokens": block_tokens, "ranks": ["cpu"] * ranks}
    own: dict[str, Any] = sizes | {"dtype": torch.float32, "device": "cpu", "cross_layer": cross_layer, "seed": seed}
    return PagedCache(config, layout=layout, **own)


def filled(cache):
    """A sequence that holds K and V that nobody computed, written in three uneven pieces, and these."""
    data = torch.randn((LAYERS, 2, HEADS, TOKENS, DIM), generator=torch.Generator().manual_seed(11))
    sequence = Sequence(cache.allocate(TOKENS), TOKENS)
    for layer in range(LAYERS):
        for start, stop in ((0, 1), (1, 40), (40, TOKENS)):
            both = data[layer, :, :, start:stop]
            cache.write(layer, cache.table(sequence.block_ids), start, *both)
    return sequence, data


@pytest.mark.parametrize("divided", DIVIDED, ids=str)
@pytest.mark.parametrize(("layout", "block_tokens"), ODD)
def test_every_element_lies_where_the_axis_string_says(layout, block_tokens, divided):
    cache = bare(layout, block_tokens, **divided)
    sequence, data = filled(cache)
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
    cache = bare(**divided)
    for tensor in cache.tensors:
        assert tensor.isfinite().all()
        assert (tensor == 0).sum() == 0
    assert not torch.equal(cache.tensors[0], bare(seed=1, **divided).tensors[0])
    ids = cache.allocate(33)
    before = [t.clone() for t in cache.tensors]
    cache.scrub(ids)
    others = [i for i in range(24) if i not in ids]
    for old, new in zip(before, cache.tensors, strict=True):
        changed = (old != new).movedim(cache.shards[0].axes.split().index("block"), 0)
        assert changed[ids].float().mean() > 0.99
        assert not changed[others].any()


# --- digests


def test_digests_do_not_depend_on_layout_block_size_or_block_ids():
    results = []
    shapes = [(*shape, divided) for shape in ODD for divided in DIVIDED]
    for seed, (layout, block_tokens, divided) in enumerate(shapes):
        cache = bare(layout, block_tokens, seed=seed, **divided)
        cache.allocate(3)  # shifts the ids
        results.append(token_digests(cache, filled(cache)[0]))
    assert all(first_difference(results[0], result) == "" for result in results)
    assert len({token for layer in results[0] for half in layer for token in half}) == 2 * LAYERS * TOKENS


@pytest.mark.parametrize(
    ("layer", "kv", "token", "where"),
    [(0, 0, 0, "0, k, token 0"), (1, 1, 20, "1, v, token 20"), (2, 0, 74, "2, k, token 74"), (2, 1, 75, "")],
)
def test_damage_to_one_element_is_named_and_what_lies_beyond_the_last_token_does_not_count(layer, kv, token, where):
    cache = bare()
    sequence, _ = filled(cache)
    whole = token_digests(cache, sequence)
    cache.tensors[layer][kv, sequence.block_ids[token // 16], token % 16, 3, 5] += 1e-6
    assert first_difference(whole, token_digests(cache, sequence)) == (where and f"layer {where}")


# --- the model on it


def prompt(length):
    return torch.randint(512, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def pool(model, layout: Any = "NHD", block_tokens=16, *, num_blocks=40, seed=0, **divided):
    return PagedCache(
        model.config,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        layout=layout,
        dtype=model.dtype,
        device=model.device,
        seed=seed,
        **divided,
    )


def reference(model, length):
    """Greedy tokens, logits of every step and the final cache, by the model with its own DynamicCache."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    tokens, logits, ids = [], [], prompt(length)
    with torch.no_grad():
        for _ in range(STEPS + 1):
            inputs = torch.tensor([ids], device=model.device)
            logits.append(model(input_ids=inputs, past_key_values=cache, use_cache=True).logits[0, -1])
            ids = [int(logits[-1].argmax())]
            tokens += ids
    return SimpleNamespace(tokens=tokens, logits=torch.stack(logits), cache=cache)


def said(model, cache, length):
    """The greedy tokens of a prompt, and its sequence."""
    sequence = Sequence([])
    first = prefill(model, cache, sequence, prompt(length))
    return [first, *decode(model, cache, sequence, first, STEPS)], sequence


@pytest.fixture(scope="module")
def model():
    return tiny_llama(SEED)


@pytest.fixture(scope="module")
def expected(model):
    return {length: reference(model, length) for length in LENGTHS}


def copied(source, sequence, target):
    """Move a sequence to another pool element by element in logical order, as a transfer would."""
    ids = target.allocate(sequence.tokens)
    for layer in range(source.layers):
        keys, values = source.gather(layer, source.table(sequence.block_ids), sequence.tokens)
        target.write(layer, target.table(ids), 0, keys.transpose(0, 1), values.transpose(0, 1))
    return Sequence(ids, sequence.tokens)


@pytest.mark.parametrize(("layout", "block_tokens"), SHAPES[::3])
def test_greedy_tokens_and_logits_equal_those_of_the_dynamic_cache(model, expected, layout, block_tokens):
    cache = pool(model, layout, block_tokens)
    for length in LENGTHS:
        sequence, ids, logits = Sequence(cache.allocate(length)), prompt(length), []
        for _ in range(STEPS + 1):
            logits.append(forward(model, cache, sequence, ids))
            ids = [int(logits[-1].argmax())]
        assert sequence.tokens == length + STEPS
        torch.testing.assert_close(torch.stack(logits), expected[length].logits, rtol=0, atol=2e-4)
        assert [int(row.argmax()) for row in logits] == expected[length].tokens


@pytest.mark.parametrize(("layout", "block_tokens", "cuts"), [("NHD", 32, (7, 32)), ("HND", 16, (1, 15, 16, 17, 39))])
def test_chunked_prefill_equals_a_prefill_in_one_piece(model, expected, layout, block_tokens, cuts):
    cache = pool(model, layout, block_tokens)
    sequence, ids, logits = Sequence([]), prompt(40), torch.empty(0)
    for start, stop in zip((0, *cuts), (*cuts, 40), strict=True):
        logits = forward(model, cache, sequence, ids[start:stop])
        assert sequence.tokens == stop
    torch.testing.assert_close(logits, expected[40].logits[0], rtol=0, atol=2e-4)
    first = int(logits.argmax())
    assert [first, *decode(model, cache, sequence, first, STEPS)] == expected[40].tokens


@pytest.mark.parametrize("length", [1, 40])
def test_a_decoder_with_other_blocks_and_layout_continues_without_computing_again(model, expected, length):
    source, target = pool(model, "NHD", 16), pool(model, "HND", 32, seed=1)
    sequence = Sequence([])
    first = prefill(model, source, sequence, prompt(length))
    received = copied(source, sequence, target)
    assert token_digests(target, received) == token_digests(source, sequence)
    for tensor in source.tensors:
        tensor.fill_(float("nan"))  # the prefill side is gone
    assert [first, *decode(tiny_llama(SEED), target, received, first, STEPS)] == expected[length].tokens
    assert received.tokens == length + STEPS


# --- weights


def test_two_processes_build_the_same_weights(model):
    code = (
        "from kvxfer.tools.demo.model import tiny_llama, weights_digest\n"
        f"print(weights_digest(tiny_llama({SEED})).hex())"
    )
    env = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "77"}
    other = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == weights_digest(model).hex()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_heads_on_two_gpus_give_what_they_give_on_one():
    gpu = tiny_llama(SEED, device="cuda:0")
    results = []
    for cache in (pool(gpu, "HND", 16), pool(gpu, "HND", 16, cross_layer=True, ranks=["cuda:0", "cuda:1"])):
        tokens, sequence = said(gpu, cache, 40)
        results.append((tokens, token_digests(cache, sequence)))
    assert results[0] == results[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("layout", "block_tokens"), SHAPES)
def test_cuda_gives_what_the_dynamic_cache_gives_there(model, layout, block_tokens):
    gpu = tiny_llama(SEED, device="cuda")
    assert weights_digest(gpu) == weights_digest(model)
    cache = pool(gpu, layout, block_tokens)
    for length in LENGTHS:
        tokens, sequence = said(gpu, cache, length)
        assert tokens == reference(gpu, length).tokens
        target = pool(gpu, "HND", 32, seed=1)
        assert token_digests(target, copied(cache, sequence, target)) == token_digests(cache, sequence)
