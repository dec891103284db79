"""One token of each of several sequences in a single forward pass: the step of a continuous batch.

The sequences have different lengths and live in blocks of their own, so the pass reads a table of tables: row `b`
lists the blocks of sequence `b`, padded with block 0. What attention gets is as long as the longest sequence; a mask
hides what lies beyond the others, which is whatever those blocks hold.

    tokens = decode_step(model, cache, [first, second], [17, 4])      # the next token of each

`kvxfer.tools.demo.model` says how a model is made to read through tables, and runs prompts.
"""

from collections.abc import Sequence as ListOf
from typing import Any

import torch
from transformers.cache_utils import Cache

from kvxfer.errors import GeometryError, TokensError, UsageError
from kvxfer.tools.demo.model import PagedCache, PoolLayer, Sequence

__all__ = ["decode_step"]


class _Batch:
    """What the layers share during one pass: where each sequence keeps its tokens, and where its new one goes."""

    def __init__(self, cache: PagedCache, sequences: ListOf[Sequence]) -> None:
        tables = [cache.table(sequence.block_ids) for sequence in sequences]
        self.cache = cache
        self.table = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)  # [batch, blocks]
        self.tokens = torch.tensor([sequence.tokens for sequence in sequences], device=cache.device)
        self.longest = max(sequence.tokens for sequence in sequences)
        rows = torch.arange(len(sequences), device=cache.device)
        self.place = (self.table[rows, self.tokens // cache.block_tokens], self.tokens % cache.block_tokens)

    @property
    def mask(self) -> torch.Tensor:
        """Bool `[batch, longest + 1]`: what each sequence holds, its new token included."""
        return torch.arange(self.longest + 1, device=self.cache.device) <= self.tokens.unsqueeze(1)


class _BatchLayer(PoolLayer):
    def __init__(self, batch: _Batch, index: int) -> None:
        super().__init__(index, batch.longest)
        self._batch = batch

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[batch, heads, 1, dim]` through the tables; return `[batch, heads, longest + 1, dim]`."""
        batch, pool = self._batch, self._batch.cache
        pool.put(self._index, batch.place, key_states[:, :, 0], value_states[:, :, 0])
        keys, values = (
            half.flatten(1, 2)[:, : batch.longest + 1].transpose(1, 2) for half in pool.take(self._index, batch.table)
        )
        return keys, values


def decode_step(model: Any, cache: PagedCache, sequences: ListOf[Sequence], token_ids: ListOf[int]) -> list[int]:
    """Run the next token of every sequence, and choose the one that follows it.

    Blocks that are missing are taken from the pool. Each `sequence.tokens` grows by one when all layers are done; after
    an exception none has grown, and the same tokens may be run again.

    Args:
        model: As for `kvxfer.tools.demo.model.forward`.
        cache: The pool that holds the sequences.
        sequences: At least one, each with at least one token, none of them twice.
        token_ids: The next token of each.

    Returns:
        The most likely token after it, one for each sequence. It differs from that of a pass over one sequence alone
        only where two tokens are equally likely but for rounding.

    Raises:
        TokensError: There is no sequence, one is empty, or the numbers of sequences and tokens differ.
        UsageError: A sequence is given twice, or another pass over it is still running.
        BlocksError: The pool has too few free blocks, or a sequence names blocks that are not allocated.
        GeometryError: The model and the pool differ in layers.
    """
    if not sequences or len(sequences) != len(token_ids):
        raise TokensError(
            f"a step needs one token for each sequence: {len(sequences)} sequences, {len(token_ids)} tokens"
        )
    if not all(sequence.tokens for sequence in sequences):
        raise TokensError("a step continues sequences, and one of these holds no tokens yet")
    if len({id(sequence) for sequence in sequences}) < len(sequences) or any(one.writing for one in sequences):
        raise UsageError("a sequence takes one step at a time: one is given twice, or is still running")
    if int(model.config.num_hidden_layers) != cache.layers:
        raise GeometryError(f"the model has {model.config.num_hidden_layers} layers, the pool {cache.layers}")
    for sequence in sequences:
        cache.reserve(sequence, sequence.tokens + 1)
    batch = _Batch(cache, sequences)
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor([[token] for token in token_ids], dtype=torch.int64, device=cache.device),
            position_ids=batch.tokens.unsqueeze(1),
            attention_mask=batch.mask,
            past_key_values=Cache(layers=[_BatchLayer(batch, index) for index in range(cache.layers)]),
            use_cache=True,
            logits_to_keep=1,
        )
    following: list[int] = output.logits[:, -1].argmax(-1).tolist()
    for sequence in sequences:
        sequence.tokens += 1
    return following
