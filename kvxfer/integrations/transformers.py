"""Greedy prefill and decode of a transformers decoder whose K and V live in a `PagedCache`.

How attention reads through the block table: every decoder attention of transformers 5 hands its new K and V
to `past_key_values.update(...)` right before it calls its attention function, and attends to what comes back.
`update` here writes the new tokens into their blocks and returns the K and V that it reads back through the
table, a temporary that dies with that layer's attention. This seam has the same form in the releases that
were tried (5.17 and 5.23) and does not depend on the attention function (eager, sdpa). A registered attention
function would reach the same reads by a longer way: it changes the configuration of the model, needs a mask
function of its own under the same name, and the model could then no longer run with the caches of
transformers, which are the reference in tests.

Masks and positions follow from two numbers that the cache reports, tokens already there and tokens being
added, so several tokens after a cached prefix (chunked prefill) and a single one (decode) need no code of
their own; grouped queries are the attention function's affair, the pool stores the K and V heads once.

One call runs one sequence. Sequences may be interleaved call by call in any order.
"""

import hashlib
from collections.abc import Callable
from collections.abc import Sequence as IntSequence
from typing import Any

import torch

from kvxfer.errors import GeometryError, MissingExtraError, TokensError, UsageError
from kvxfer.integrations.paged import (
    Difference,
    Layout,
    PagedCache,
    Sequence,
    digests,
    first_difference,
    token_digests,
)

try:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.cache_utils import Cache as Cache  # noqa: PLC0414 - for batch.py too, which this guards as well
    from transformers.cache_utils import CacheLayerMixin
except ModuleNotFoundError as exc:
    if exc.name != "transformers":
        raise
    raise MissingExtraError(
        "kvxfer.integrations.transformers needs transformers, which is not installed: pip install transformers"
    ) from exc

__all__ = [
    "Difference",
    "Layout",
    "OnLayer",
    "PagedCache",
    "Sequence",
    "decode",
    "digests",
    "first_difference",
    "forward",
    "prefill",
    "tiny_llama",
    "token_digests",
    "weights_digest",
]

OnLayer = Callable[[int, Sequence], None]
"""Called with (layer index, sequence) in the model's thread once that layer has written its K and V.

`sequence.writing` is the range of tokens just written and `sequence.block_ids` are their blocks. On CUDA the
write is queued on the current stream, not complete: record an event there. An exception ends the forward
pass.
"""


class _Pass:
    """What the layers share during one forward pass."""

    __slots__ = ("cache", "new", "on_layer", "sequence", "table")

    def __init__(self, cache: PagedCache, sequence: Sequence, new: int, on_layer: OnLayer | None) -> None:
        self.cache = cache
        self.sequence = sequence
        self.new = new
        self.on_layer = on_layer
        self.table = cache.table(sequence.block_ids)


class PoolLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers ships no types: its classes are Any
    """One layer of the pool, as transformers sees it during one forward pass. It holds no K and no V."""

    is_sliding = False

    def __init__(self, index: int, tokens: int) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers
        self._index = index
        self._tokens = tokens
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool exists already."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (tokens that attention will see, position of the first of them)."""
        return self._tokens + query_length, 0

    def get_seq_length(self) -> int:
        """Return the tokens that this layer holds, of the longest sequence."""
        return self._tokens

    def get_max_length(self) -> int:
        """Return -1: tables grow as long as the pool has blocks."""
        return -1


class _PagedLayer(PoolLayer):
    def __init__(self, run: _Pass, index: int) -> None:
        super().__init__(index, run.sequence.tokens)
        self._run = run

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[1, heads, n, dim]` through the table; return all tokens as `[1, heads, tokens, dim]`."""
        run = self._run
        if key_states.shape[0] != 1 or key_states.shape[2] != run.new:
            raise GeometryError(
                f"layer {self._index} was given keys of shape {list(key_states.shape)}; this pass runs one "
                f"sequence with {run.new} new tokens"
            )
        run.cache.write(self._index, run.table, self._tokens, key_states[0], value_states[0])
        self._tokens += run.new
        if run.on_layer is not None:
            run.on_layer(self._index, run.sequence)
        keys, values = run.cache.gather(self._index, run.table, self._tokens)
        return keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)


def forward(
    model: Any,
    cache: PagedCache,
    sequence: Sequence,
    token_ids: IntSequence[int],
    on_layer: OnLayer | None = None,
) -> torch.Tensor:
    """Run the model over the next tokens of a sequence and keep their K and V in the pool.

    Blocks that are still missing are taken from the pool and appended to `sequence.block_ids`.
    `sequence.tokens` grows only when all layers are done; after an exception it is as before, and the same
    tokens may be run again.

    Args:
        model: A decoder with a language-model head, in eval mode, on the pool's device and in its dtype.
        cache: The pool that holds the sequence.
        sequence: What came before; may be empty.
        token_ids: The next tokens, at positions `sequence.tokens` and up. At least one.
        on_layer: See `OnLayer`.

    Returns:
        Logits after the last token, `[vocabulary]`.

    Raises:
        TokensError: `token_ids` is empty.
        BlocksError: The pool has too few free blocks, or the sequence names blocks that are not allocated.
        GeometryError: The model and the pool differ in layers, heads, head size or dtype.
        UsageError: Another forward pass of this sequence is still running.
    """
    new = len(token_ids)
    if new == 0:
        raise TokensError("a forward pass needs at least one token")
    if sequence.writing:
        raise UsageError(f"a forward pass over tokens {sequence.writing} of this sequence is still running")
    if int(model.config.num_hidden_layers) != cache.layers:
        raise GeometryError(f"the model has {model.config.num_hidden_layers} layers, the pool {cache.layers}")
    first = sequence.tokens
    cache.reserve(sequence, first + new)
    run = _Pass(cache, sequence, new, on_layer)
    view = Cache(layers=[_PagedLayer(run, index) for index in range(cache.layers)])
    sequence.writing = range(first, first + new)
    try:
        with torch.no_grad():
            output = model(
                input_ids=torch.tensor([list(token_ids)], dtype=torch.int64, device=cache.device),
                position_ids=torch.arange(first, first + new, device=cache.device).unsqueeze(0),
                past_key_values=view,
                use_cache=True,
                logits_to_keep=1,
            )
        sequence.tokens = first + new
    finally:
        sequence.writing = range(0)
    logits: torch.Tensor = output.logits[0, -1]
    return logits


def prefill(
    model: Any,
    cache: PagedCache,
    sequence: Sequence,
    token_ids: IntSequence[int],
    on_layer: OnLayer | None = None,
) -> int:
    """Run a prompt, or the next chunk of one, and choose the token that follows it.

    For chunked prefill call it once per chunk; only the last result is the first token of the answer.

    Args:
        model: As for `forward`.
        cache: As for `forward`.
        sequence: As for `forward`.
        token_ids: The prompt or the chunk; at least one token.
        on_layer: See `OnLayer`.

    Returns:
        The most likely next token. Its own K and V are not in the cache yet.

    Raises:
        UsageError: As for `forward`.
    """
    return int(forward(model, cache, sequence, token_ids, on_layer).argmax())


def decode(model: Any, cache: PagedCache, sequence: Sequence, first_token: int, steps: int) -> list[int]:
    """Continue a sequence greedily, one token a step.

    `sequence.tokens` grows by `steps`: the K and V of `first_token` and of all but the last result are
    written.

    Args:
        model: As for `forward`.
        cache: As for `forward`.
        sequence: The prefilled tokens, computed here or received.
        first_token: The token that `prefill` returned.
        steps: Number of tokens to generate after `first_token`. End-of-sequence tokens do not stop it.

    Returns:
        The `steps` tokens that follow `first_token`.

    Raises:
        TokensError: The sequence holds no tokens.
        UsageError: As for `forward`.
    """
    if sequence.tokens == 0:
        raise TokensError("nothing to continue: the sequence holds no tokens")
    tokens: list[int] = []
    token = first_token
    for _ in range(steps):
        token = int(forward(model, cache, sequence, [token]).argmax())
        tokens.append(token)
    return tokens


def tiny_llama(
    seed: int,
    *,
    layers: int = 4,
    heads: int = 8,
    kv_heads: int = 4,
    head_dim: int = 32,
    hidden: int = 128,
    vocabulary: int = 512,
    initializer_range: float = 0.2,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    draw_on: torch.device | str = "cpu",
) -> Any:
    """Build a real `transformers.LlamaForCausalLM` with random weights that depend on `seed` alone.

    The weights are drawn in float32 and then converted, on the CPU unless told otherwise, so two processes, or a
    CPU and a GPU, get the same ones; `weights_digest` confirms it. The global random state is left as it was. K
    and V of one token take `2 * layers * kv_heads * head_dim * dtype.itemsize` bytes.

    Args:
        seed: Seed of the weights.
        layers: Decoder layers.
        heads: Query heads.
        kv_heads: Heads of K and V; divides `heads`.
        head_dim: Size of a head; need not be `hidden / heads`.
        hidden: Width of the model. The feed-forward layers are twice as wide.
        vocabulary: Number of token ids.
        initializer_range: Standard deviation of the weights. With the usual 0.02 attention is so flat that
            damaged K and V do not change the greedy tokens; from 0.1 on they do.
        dtype: Type of weights, K and V.
        device: Where the model is put.
        draw_on: Where the weights are drawn. A large model takes a GPU a moment and a CPU minutes, but only
            devices of one kind draw the same.

    Returns:
        The model, in eval mode, without gradients. It generates with no end-of-sequence token.
    """
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=32768,
        initializer_range=initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    drawn_on = torch.device(draw_on)
    gpus = [drawn_on] if drawn_on.type == "cuda" else []
    with torch.random.fork_rng(gpus), drawn_on:  # pyright: ignore[reportUnknownMemberType]  # torch gives no types
        model: Any = LlamaForCausalLM(config)
    model.float()
    generator = torch.Generator(drawn_on).manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if "norm" in name:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, initializer_range, generator=generator)
    model.requires_grad_(False)
    return model.to(device=device, dtype=dtype).eval()


def weights_digest(model: Any) -> bytes:
    """Digest names, dtypes, shapes and bytes of all weights: equal in two processes if the models are.

    Returns:
        32 bytes (BLAKE2b).
    """
    digest = hashlib.blake2b(digest_size=32)
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()
