"""A step over several sequences gives what a step over each of them alone gives, in tokens and in K and V."""

import pytest
import torch

from examples.serving.batch import decode_step
from kvxfer.errors import BlocksError, TokensError, UsageError
from kvxfer.tools.demo.model import Sequence, decode, prefill, tiny_llama
from tests.demo.test_model import LENGTHS, SEED, pool, prompt

STEPS = 12


@pytest.fixture(scope="module")
def model():
    return tiny_llama(SEED)


@pytest.fixture(scope="module")
def alone(model):
    """Of each length: the tokens, and K and V of the last layer, of a sequence that has the model to itself."""
    cache, expected = pool(model), {}
    for length in LENGTHS:
        sequence = Sequence([])
        first = prefill(model, cache, sequence, prompt(length))
        tokens = [first, *decode(model, cache, sequence, first, STEPS)]
        rows = cache.gather(cache.layers - 1, cache.table(sequence.block_ids), sequence.tokens)
        expected[length] = tokens, [part.clone() for part in rows]
    return expected


@pytest.mark.parametrize(
    ("attention", "layout", "block_tokens", "divided"),
    [("eager", "NHD", 32, {}), ("sdpa", "HND", 16, {"cross_layer": True, "ranks": ["cpu", "cpu"]})],
)
def test_sequences_that_come_and_go_are_as_if_alone(alone, attention, layout, block_tokens, divided):
    model = tiny_llama(SEED)
    model.set_attn_implementation(attention)
    cache = pool(model, layout, block_tokens, **divided)
    waiting, running, done = list(LENGTHS), {}, {}
    while waiting or running:
        if waiting:  # one more joins at each step; each leaves when it has its tokens
            length, sequence = waiting.pop(), Sequence([])
            running[length] = sequence, [prefill(model, cache, sequence, prompt(length))]
        batch = list(running.values())
        following = decode_step(model, cache, [each for each, _ in batch], [tokens[-1] for _, tokens in batch])
        for (_, tokens), token in zip(batch, following, strict=True):
            tokens.append(token)
        for length in [each for each, (_, tokens) in running.items() if len(tokens) > STEPS]:
            done[length] = running.pop(length)
    for length, (tokens, rows) in alone.items():
        sequence, found = done[length]
        assert found == tokens
        mine = cache.gather(cache.layers - 1, cache.table(sequence.block_ids), sequence.tokens)
        for part, expected in zip(mine, rows, strict=True):
            torch.testing.assert_close(part, expected, rtol=0, atol=2e-4)


def test_what_lies_beyond_a_shorter_sequence_is_not_read(model, alone):
    cache = pool(model)
    long, short = Sequence([]), Sequence([])
    prefill(model, cache, long, prompt(40))
    first = prefill(model, cache, short, prompt(1))
    for tensor in cache.tensors:  # block 0, with which tables are padded, and rows that nobody has written
        tensor[:, [i for i in range(cache.num_blocks) if i not in [*long.block_ids, *short.block_ids]]] = 1e6
        tensor[:, short.block_ids, 2:] = 1e6
    assert decode_step(model, cache, [long, short], [5, first])[1] == alone[1][0][1]


def test_a_step_that_cannot_be_taken_is_refused_and_changes_nothing(model):
    cache = pool(model, num_blocks=2)
    one, other = Sequence([]), Sequence([])
    prefill(model, cache, one, prompt(16))
    with pytest.raises(TokensError, match="holds no tokens"):
        decode_step(model, cache, [one, other], [1, 2])
    with pytest.raises(TokensError, match="1 sequences, 2 tokens"):
        decode_step(model, cache, [one], [1, 2])
    with pytest.raises(TokensError, match="0 sequences"):
        decode_step(model, cache, [], [])
    with pytest.raises(UsageError, match="one step at a time"):
        decode_step(model, cache, [one, one], [1, 2])
    prefill(model, cache, other, prompt(16))
    with pytest.raises(BlocksError, match="out of blocks"):
        decode_step(model, cache, [one, other], [1, 2])
    assert (one.tokens, other.tokens) == (16, 16)
