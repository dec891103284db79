"""A real Llama on the paged pool gives what it gives on transformers' own cache, and hands over to another pool."""

import gc
import importlib
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvxfer.errors import BlocksError, GeometryError, MissingExtraError, TokensError, UsageError
from kvxfer.integrations.transformers import (
    PagedCache,
    Sequence,
    decode,
    digests,
    forward,
    prefill,
    tiny_llama,
    weights_digest,
)

SEED, STEPS = 3, 20
LENGTHS = [1, 15, 16, 17, 40]
SHAPES = [("NHD", 16), ("HND", 16), ("NHD", 32), ("HND", 32)]


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


# the same as transformers


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


# handing over


@pytest.mark.parametrize("length", [1, 40])
def test_a_decoder_with_other_blocks_and_layout_continues_without_computing_again(model, expected, length):
    source, target = pool(model, "NHD", 16), pool(model, "HND", 32, seed=1)
    sequence = Sequence([])
    first = prefill(model, source, sequence, prompt(length))
    received = copied(source, sequence, target)
    assert digests(target, received) == digests(source, sequence)
    for tensor in source.tensors:
        tensor.fill_(float("nan"))  # the prefill side is gone
    assert [first, *decode(tiny_llama(SEED), target, received, first, STEPS)] == expected[length].tokens
    assert received.tokens == length + STEPS


def test_an_error_in_the_callback_leaves_the_sequence_as_it_was(model, expected):
    cache = pool(model)
    sequence = Sequence([])
    prefill(model, cache, sequence, prompt(40)[:20])

    def fail(layer, running):
        if layer == 2:
            with pytest.raises(UsageError, match="still running"):
                forward(model, cache, running, [1])
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        prefill(model, cache, sequence, prompt(40)[20:], fail)
    assert (sequence.tokens, sequence.writing) == (20, range(0))
    first = prefill(model, cache, sequence, prompt(40)[20:])
    assert [first, *decode(model, cache, sequence, first, STEPS)] == expected[40].tokens


# memory


def tensors_alive():
    gc.collect()
    found = (o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter))
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}


def test_no_copy_of_keys_or_values_outlives_a_step(model):
    cache = pool(model, "NHD", 16)
    held = [value for value in vars(cache).values() if isinstance(value, torch.Tensor)]
    assert held == []
    sequence = Sequence([])
    first = prefill(model, cache, sequence, prompt(17))
    before = tensors_alive()
    first = prefill(model, cache, sequence, [first, *prompt(40)])
    decode(model, cache, sequence, first, 3)
    new = {at: size for at, size in tensors_alive().items() if at not in before}
    assert sum(new.values()) < sequence.tokens * cache.heads * cache.head_dim  # not even a quarter of one layer's keys
    assert sum(t.nbytes for t in cache.tensors) == cache.token_bytes * 40 * 16


# errors


def test_running_out_of_blocks_leaves_the_sequence_as_it_was(model):
    cache = pool(model, num_blocks=3)
    sequence = Sequence([])
    first = prefill(model, cache, sequence, prompt(40))
    with pytest.raises(BlocksError, match="out of blocks"):
        decode(model, cache, sequence, first, 9)  # 48 tokens fit, the 49th does not
    assert sequence.tokens == 48
    assert len(sequence.block_ids) == 3
    with pytest.raises(BlocksError, match="out of blocks"):
        prefill(model, cache, Sequence([]), [1])


def test_impossible_requests_are_refused(model):
    cache = pool(model)
    with pytest.raises(TokensError, match="at least one token"):
        prefill(model, cache, Sequence([]), [])
    with pytest.raises(TokensError, match="nothing to continue"):
        decode(model, cache, Sequence([]), 1, 1)
    with pytest.raises(GeometryError, match="2 layers, the pool 4"):
        prefill(tiny_llama(SEED, layers=2), cache, Sequence([]), [1])
    with pytest.raises(GeometryError, match="keys of layer 0"):
        prefill(tiny_llama(SEED, kv_heads=2), cache, Sequence([]), [1])
    with pytest.raises(GeometryError, match="bfloat16"):
        prefill(tiny_llama(SEED, dtype=torch.bfloat16), cache, Sequence([]), [1])


def test_missing_transformers_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "kvxfer.integrations.transformers")
    with pytest.raises(MissingExtraError, match="pip install transformers"):
        importlib.import_module("kvxfer.integrations.transformers")


# weights


def test_two_processes_build_the_same_weights(model):
    code = (
        "from kvxfer.integrations.transformers import tiny_llama, weights_digest\n"
        f"print(weights_digest(tiny_llama({SEED})).hex())"
    )
    env = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "77"}
    other = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == weights_digest(model).hex()


def test_weights_follow_the_seed_and_nothing_else(model):
    state = torch.get_rng_state()
    torch.manual_seed(99)
    outer = torch.get_rng_state()
    again = tiny_llama(SEED)
    assert torch.equal(torch.get_rng_state(), outer)
    torch.set_rng_state(state)
    assert weights_digest(again) == weights_digest(model)
    assert weights_digest(tiny_llama(SEED + 1)) != weights_digest(model)
    assert not again.training
    assert not any(weight.requires_grad for weight in again.parameters())


def test_bfloat16_runs_with_the_same_weights_rounded(model):
    half = tiny_llama(SEED, dtype=torch.bfloat16)
    for (name, weight), (_, rounded) in zip(model.named_parameters(), half.named_parameters(), strict=True):
        assert torch.equal(weight.bfloat16(), rounded), name
    cache = pool(half, "HND", 16)
    sequence = Sequence([])
    first = prefill(half, cache, sequence, prompt(17))
    own = reference(half, 17)
    assert [first, *decode(half, cache, sequence, first, STEPS)] == own.tokens


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_drawn_on_a_gpu_follow_the_seed_too():
    state = torch.cuda.get_rng_state()
    drawn = [weights_digest(tiny_llama(seed, device="cuda", draw_on="cuda")) for seed in (SEED, SEED, SEED + 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_heads_on_two_gpus_give_what_they_give_on_one(model):
    gpu = tiny_llama(SEED, device="cuda:0")
    one, two = pool(gpu, "HND", 16), pool(gpu, "HND", 16, cross_layer=True, ranks=["cuda:0", "cuda:1"])
    results = []
    for cache in (one, two):
        sequence = Sequence([])
        first = prefill(gpu, cache, sequence, prompt(40))
        results.append(([first, *decode(gpu, cache, sequence, first, STEPS)], digests(cache, sequence)))
    assert results[0] == results[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("layout", "block_tokens"), SHAPES)
def test_cuda_gives_what_the_dynamic_cache_gives_there(model, layout, block_tokens):
    gpu = tiny_llama(SEED, device="cuda")
    assert weights_digest(gpu) == weights_digest(model)
    cache = pool(gpu, layout, block_tokens)
    for length in LENGTHS:
        sequence, ids = Sequence([]), prompt(length)
        if length > 20:
            prefill(gpu, cache, sequence, ids[:19])
        first = prefill(gpu, cache, sequence, ids[sequence.tokens :])
        assert [first, *decode(gpu, cache, sequence, first, STEPS)] == reference(gpu, length).tokens
        target = pool(gpu, "HND", 32, seed=1)
        assert digests(target, copied(cache, sequence, target)) == digests(cache, sequence)
