"""A small Llama whose K and V live in a paged pool: of `kvxfer demo` and of the serving example.

`PagedCache` owns the tensors of all layers and hands out their blocks in a shuffled order. A `Sequence` is a block
table: token `t` of a request lives in block `block_ids[t // block_tokens]`, row `t % block_tokens`. Nothing else holds
K or V: whoever wants them reads through the table. The pool starts filled with random values, and freed blocks keep
what they held, so a wrong block id, a row beyond the sequence or a block that was never received changes logits and
digests instead of passing for zeros.

How attention reads through the table: every decoder attention of transformers 5 hands its new K and V to
`past_key_values.update(...)` right before it calls its attention function, and attends to what comes back. `update`
writes the new tokens into their blocks and returns what it reads back through the table, a temporary that dies with
that layer's attention. Masks and positions follow from two numbers that the cache reports, tokens already there and
tokens being added, so a chunk of a prompt and a single token are run alike.
"""

import hashlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin

from kvxfer import shared_empty
from kvxfer.errors import BlocksError, GeometryError
from kvxfer.geometry import CacheTensor, group

__all__ = [
    "Layout",
    "OnLayer",
    "PagedCache",
    "PoolLayer",
    "Sequence",
    "Shard",
    "decode",
    "first_difference",
    "forward",
    "prefill",
    "rows_by_layer",
    "tiny_llama",
    "token_digests",
    "weights_digest",
]

# --- the pool

Layout = Literal["NHD", "HND"]
"""Order of the axes inside a block: `NHD` is token, head, dim; `HND` is head, token, dim."""

_INSIDE: Final[dict[str, str]] = {"NHD": "token head dim", "HND": "head token dim"}
_BY_TOKEN: Final = ("kv", "block", "token", "head", "dim")
_GARBAGE: Final = 4.0
"""Pools are filled with values in (-4, 4): garbage of about the size of real keys and values."""


@dataclass(slots=True)
class Sequence:
    """The tokens of one request in one pool.

    Whoever received its blocks from elsewhere makes one with their ids and the number of tokens that they hold, and
    continues from there; nothing is computed again.

    Attributes:
        block_ids: Blocks in token order; `PagedCache.reserve` appends to this list.
        tokens: Number of tokens whose K and V are complete in every layer.
        writing: Tokens that the running forward pass is writing, layer by layer; empty between passes.
    """

    block_ids: list[int]
    tokens: int = 0
    writing: range = range(0)


class Shard:
    """K and V of some heads of every layer, in memory of one device, filled with garbage.

    `tensors` are one a layer, or one for all; `axes` names the axes of each. On a CPU their memory is shared, so that a
    prefill process on this host may map it.
    """

    def __init__(
        self,
        sizes: dict[str, int],
        heads: range,
        *,
        layout: Layout,
        cross_layer: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        seed: int,
    ) -> None:
        self.heads: Final = heads
        self.axes: Final = f"{'block layer kv' if cross_layer else 'kv block'} {_INSIDE[layout]}"
        shape = tuple((sizes | {"kv": 2, "head": len(heads)})[axis] for axis in self.axes.split())
        shared = torch.device(device).type == "cpu"
        self.tensors: Final = [
            shared_empty(shape, dtype=dtype) if shared else torch.empty(shape, dtype=dtype, device=device)
            for _ in range(1 if cross_layer else sizes["layer"])
        ]
        self.device: Final = self.tensors[0].device
        by_layer = self.tensors[0].unbind(1) if cross_layer else self.tensors
        order = [axis for axis in self.axes.split() if axis != "layer"]
        # of each layer a view as [kv, block, token, head, dim], whatever the layout
        self.by_token: Final = [layer.permute([order.index(axis) for axis in _BY_TOKEN]) for layer in by_layer]
        self._noise: Final = torch.Generator(device=self.device)
        self._noise.manual_seed(seed)
        for tensor in self.tensors:
            tensor.uniform_(-_GARBAGE, _GARBAGE, generator=self._noise)

    def cache_tensors(self) -> list[CacheTensor]:
        """Describe the shard to kvxfer, in the group `default`."""
        if "layer" not in self.axes.split():
            return group(self.tensors, self.axes, heads=self.heads)
        return [CacheTensor(self.tensors[0], self.axes, layers=range(len(self.by_token)), heads=self.heads)]

    def scrub(self, ids: torch.Tensor) -> None:
        """Overwrite blocks with fresh garbage in every layer."""
        chosen = ids.to(self.device)
        for layer in self.by_token:
            part = torch.empty_like(layer[:, chosen])
            layer[:, chosen] = part.uniform_(-_GARBAGE, _GARBAGE, generator=self._noise)


class PagedCache:
    """A pool of KV blocks for one model, shared by any number of sequences.

    The heads may be divided among ranks, as tensor parallelism does. What each holds is a `Shard`, on a device of
    its own; `write` and `gather` take and give all heads, on the model's device. A rank's worker gets
    `shards[rank].cache_tensors()`; block ids mean the same block at every rank.

    `allocate`, `reserve` and `free` may be called from any thread. Tensor contents are not guarded: whoever
    holds a block orders its reads and writes.

    Args:
        config: Configuration of the model.
        num_blocks: Blocks in the pool.
        block_tokens: Tokens per block.
        layout: Order of the axes inside a block.
        dtype: Element type of K and V; the model's.
        device: The model's device.
        cross_layer: One tensor whose blocks hold all layers, rather than a tensor a layer.
        ranks: Devices among which the heads are divided, one a rank, in order; `device` alone if left out.
        seed: Seed of the order in which blocks are handed out, and of the initial garbage.

    Raises:
        GeometryError: The heads cannot be divided equally.
    """

    def __init__(
        self,
        config: Any,  # a `LlamaConfig`
        *,
        num_blocks: int,
        block_tokens: int,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device | str,
        cross_layer: bool = False,
        ranks: ListOf[torch.device | str] = (),
        seed: int = 0,
    ) -> None:
        self.num_blocks: Final = num_blocks
        self.block_tokens: Final = block_tokens
        self.layers: Final = int(config.num_hidden_layers)
        self.device: Final = torch.empty(0, device=device).device  # with its number, where `device` leaves that out
        heads, places = int(config.num_key_value_heads), list(ranks) or [device]
        each, over = divmod(heads, len(places))
        if over:
            raise GeometryError(f"{heads} heads of K and V cannot be divided equally among {len(places)} ranks")
        sizes = {"block": num_blocks, "layer": self.layers, "token": block_tokens, "dim": config.head_dim}
        inside: dict[str, Any] = {"layout": layout, "cross_layer": cross_layer, "dtype": dtype}
        self.shards: Final = [
            Shard(sizes, range(rank * each, (rank + 1) * each), **inside, device=place, seed=seed + rank)
            for rank, place in enumerate(places)
        ]
        self.tensors: Final = [tensor for shard in self.shards for tensor in shard.tensors]

        self._lock: Final = threading.Lock()
        self._order: Final = random.Random(seed)  # noqa: S311 - a shuffled order, not a secret
        self._free = list(range(num_blocks))
        self._order.shuffle(self._free)
        self._held: Final[set[int]] = set()

    @property
    def free_blocks(self) -> int:
        """Blocks that `allocate` can still hand out."""
        return len(self._free)

    def allocate(self, tokens: int) -> list[int]:
        """Take the blocks that so many tokens need, in shuffled order; they keep what they held.

        Raises:
            BlocksError: Too few blocks are free; none was taken.
        """
        blocks = -(-tokens // self.block_tokens)
        with self._lock:
            if blocks > len(self._free):
                raise BlocksError(
                    f"out of blocks: {blocks} of {self.block_tokens} tokens are needed, {len(self._free)} of "
                    f"{self.num_blocks} are free; free finished sequences or make the pool larger"
                )
            cut = len(self._free) - blocks
            taken, self._free = self._free[cut:], self._free[:cut]
            self._held.update(taken)
            return taken

    def reserve(self, sequence: Sequence, tokens: int) -> None:
        """Append fresh blocks to `sequence.block_ids` until they have room for `tokens` tokens.

        Raises:
            BlocksError: Too few blocks are free.
        """
        room = len(sequence.block_ids) * self.block_tokens
        sequence.block_ids += self.allocate(max(0, tokens - room))

    def free(self, block_ids: Iterable[int]) -> None:
        """Give blocks back that no forward pass and no peer uses any more.

        Raises:
            BlocksError: An id is outside the pool, free already, or named twice; nothing was given back then.
        """
        with self._lock:
            ids = self._checked(block_ids)
            self._held.difference_update(ids)
            self._free += ids
            self._order.shuffle(self._free)

    def scrub(self, block_ids: Iterable[int]) -> None:
        """Overwrite blocks with fresh garbage in every layer: nothing stale can then pass for received data.

        Raises:
            BlocksError: An id is not allocated.
        """
        ids = self.table(block_ids)
        for shard in self.shards:
            shard.scrub(ids)

    def _checked(self, block_ids: Iterable[int]) -> list[int]:
        ids = list(block_ids)
        if len(set(ids)) < len(ids) or not self._held.issuperset(ids):
            raise BlocksError(f"blocks {ids} are not all allocated, or one is named twice")
        return ids

    # --- contents

    def table(self, block_ids: Iterable[int]) -> torch.Tensor:
        """Return a block table for `write` and `gather`: int64 ids on the model's device.

        Raises:
            BlocksError: An id is not allocated in this pool, or named twice.
        """
        with self._lock:
            return torch.tensor(self._checked(block_ids), dtype=torch.int64, device=self.device)

    def write(self, layer: int, table: torch.Tensor, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store K and V, each `[heads, n, dim]`, of consecutive tokens from `first` on through a block table."""
        positions = torch.arange(first, first + keys.shape[1], device=self.device)
        at = (table[positions // self.block_tokens], positions % self.block_tokens)
        self.put(layer, at, keys.transpose(0, 1), values.transpose(0, 1))

    def gather(self, layer: int, table: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read K and V of the first tokens through a block table: each fresh, `[tokens, heads, dim]`."""
        used = table[: -(-tokens // self.block_tokens)]
        keys, values = (half.flatten(0, 1)[:tokens] for half in self.take(layer, used))
        return keys, values

    def put(
        self, layer: int, place: tuple[torch.Tensor, torch.Tensor], keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store K and V, each `[n, heads, dim]`, of tokens anywhere: `place` is the block id and the row of each."""
        for shard in self.shards:
            at, mine = tuple(each.to(shard.device) for each in place), slice(shard.heads.start, shard.heads.stop)
            for half, given in zip(shard.by_token[layer], (keys, values), strict=True):
                half.index_put_(at, given[:, mine].to(shard.device))

    def take(self, layer: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Read whole blocks of one layer: K and V, each `[*table.shape, block_tokens, heads, dim]`, and fresh."""
        parts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for shard in self.shards:
            ids = table.flatten().to(shard.device)
            for half, found in zip(shard.by_token[layer], parts, strict=True):
                found.append(half.index_select(0, ids).to(self.device))
        keys, values = (found[0] if len(found) == 1 else torch.cat(found, -2) for found in parts)
        return keys.view(*table.shape, *keys.shape[1:]), values.view(*table.shape, *values.shape[1:])


# --- digests


def rows_by_layer(cache: PagedCache, sequence: Sequence) -> Iterator[list[Any]]:
    """K and V of each layer as numpy bytes `[tokens, bytes per token]`: by token, head, dim, whatever the layout."""
    table = cache.table(sequence.block_ids)
    for layer in range(cache.layers):
        both = cache.gather(layer, table, sequence.tokens)
        yield [part.cpu().contiguous().flatten(1).view(torch.uint8).numpy() for part in both]


def token_digests(cache: PagedCache, sequence: Sequence) -> list[list[list[bytes]]]:
    """Digests of each token of a sequence, by layer, then of K and of V."""
    return [
        [[hashlib.blake2b(row.tobytes(), digest_size=32).digest() for row in half] for half in halves]
        for halves in rows_by_layer(cache, sequence)
    ]


def first_difference(one: list[list[list[bytes]]], other: list[list[list[bytes]]]) -> str:
    """The first place in which two results of `token_digests` differ, in words; empty if they do not.

    If one side has fewer tokens and they all agree, the first token that only the other side has is named.
    """
    for layer, (halves, other_halves) in enumerate(zip(one, other, strict=True)):
        for part, a, b in zip("kv", halves, other_halves, strict=True):
            if a != b:
                common = min(len(a), len(b))
                token = next((t for t in range(common) if a[t] != b[t]), common)
                return f"layer {layer}, {part}, token {token}"
    return ""


# --- the model

OnLayer = Callable[[int, Sequence], None]
"""Called with (layer index, sequence) in the model's thread once that layer has written its K and V.

`sequence.writing` is the range of tokens just written and `sequence.block_ids` are their blocks. On CUDA the
write is queued on the current stream, not complete: record an event there. An exception ends the forward
pass.
"""


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
    def __init__(
        self, index: int, cache: PagedCache, sequence: Sequence, table: torch.Tensor, on_layer: OnLayer | None
    ) -> None:
        super().__init__(index, sequence.tokens)
        self._cache = cache
        self._sequence = sequence
        self._table = table
        self._on_layer = on_layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[1, heads, n, dim]` through the table; return all tokens as `[1, heads, tokens, dim]`."""
        self._cache.write(self._index, self._table, self._tokens, key_states[0], value_states[0])
        self._tokens += key_states.shape[2]
        if self._on_layer is not None:
            self._on_layer(self._index, self._sequence)
        keys, values = self._cache.gather(self._index, self._table, self._tokens)
        return keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)


def forward(
    model: Any, cache: PagedCache, sequence: Sequence, token_ids: ListOf[int], on_layer: OnLayer | None = None
) -> torch.Tensor:
    """Run the model over the next tokens of a sequence, at least one, and keep their K and V in the pool.

    Blocks that are still missing are taken from the pool. `sequence.tokens` grows only when all layers are done; after
    an exception it is as before, and the same tokens may be run again.

    Returns:
        Logits after the last token, `[vocabulary]`.

    Raises:
        BlocksError: The pool has too few free blocks, or the sequence names blocks that are not allocated.
    """
    first, new = sequence.tokens, len(token_ids)
    cache.reserve(sequence, first + new)
    table = cache.table(sequence.block_ids)
    view = Cache(layers=[_PagedLayer(index, cache, sequence, table, on_layer) for index in range(cache.layers)])
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
    model: Any, cache: PagedCache, sequence: Sequence, token_ids: ListOf[int], on_layer: OnLayer | None = None
) -> int:
    """Run a prompt, or the next chunk of one, as `forward` does.

    Returns:
        The most likely next token. Its own K and V are not in the cache yet.
    """
    return int(forward(model, cache, sequence, token_ids, on_layer).argmax())


def decode(model: Any, cache: PagedCache, sequence: Sequence, first_token: int, steps: int) -> list[int]:
    """Continue a sequence greedily by so many tokens after the one that `prefill` returned, as `forward` does.

    The K and V of `first_token` and of all but the last result are written.
    """
    tokens = [first_token]
    for _ in range(steps):
        tokens.append(prefill(model, cache, sequence, tokens[-1:]))
    return tokens[1:]


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
    CPU and a GPU, get the same ones; `weights_digest` confirms it. The global random state is left as it was.

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
    """Digest names, dtypes, shapes and bytes of all weights, in 32 bytes: equal in two processes if the models are."""
    digest = hashlib.blake2b(digest_size=32)
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()
