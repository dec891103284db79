"""A paged KV pool in plain torch: blocks, sequences, and digests that do not depend on the layout.

`PagedCache` owns the tensors of all layers and hands out their blocks in a shuffled order. A `Sequence` is a block
table: token `t` of a request lives in block `block_ids[t // block_tokens]`, row `t % block_tokens`. Nothing
else holds K or V: whoever wants them reads through the table.

The pool starts filled with random values, and freed blocks keep what they held. A wrong block id, a row
beyond the sequence or a block that was never received therefore changes logits and digests instead of passing
for zeros.

This module needs torch only. `kvxfer.integrations.transformers` puts a model on top of it.
"""

import hashlib
import random
import threading
from collections.abc import Iterable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch

from kvxfer import shared_empty
from kvxfer.errors import BlocksError, ConfigError, GeometryError, TokensError

if TYPE_CHECKING:
    from kvxfer.geometry import CacheTensor

__all__ = ["Difference", "Layout", "PagedCache", "Sequence", "Shard", "digests", "first_difference", "token_digests"]


Layout = Literal["NHD", "HND"]
"""Order of the axes inside a block: `NHD` is token, head, dim; `HND` is head, token, dim."""

_INSIDE: Final[dict[str, str]] = {"NHD": "token head dim", "HND": "head token dim"}
_BY_TOKEN: Final = ("kv", "block", "token", "head", "dim")
_GARBAGE: Final = 4.0
"""Pools are filled with values in (-4, 4): garbage of about the size of real keys and values."""


@dataclass(slots=True)
class Sequence:
    """The tokens of one request in one pool.

    A process that received its blocks from elsewhere makes one with its own block ids and the number of
    tokens that they hold, and continues from there; nothing is computed again.

    Attributes:
        block_ids: Blocks in token order. They belong to the caller, who frees them with `PagedCache.free`;
            `PagedCache.reserve` appends to this list.
        tokens: Number of tokens whose K and V are complete in every layer.
        writing: Tokens that the running forward pass is writing, layer by layer; empty between passes.
    """

    block_ids: list[int]
    tokens: int = 0
    writing: range = range(0)


class Shard:
    """K and V of some heads of every layer, in memory of one device, filled with garbage.

    `tensors` are one a layer, or one for all; `axes` names the axes of each. They live as long as the shard does. On a
    CPU their memory is shared, so that a prefill process on this host may map it.
    """

    def __init__(
        self,
        *,
        heads: range,
        layers: int,
        num_blocks: int,
        block_tokens: int,
        head_dim: int,
        layout: Layout,
        cross_layer: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        seed: int,
    ) -> None:
        if layout not in _INSIDE:
            raise ConfigError(f"layout {layout!r} is unknown; use one of {', '.join(_INSIDE)}")
        self.heads: Final = heads
        self.axes: Final = f"{'block layer kv' if cross_layer else 'kv block'} {_INSIDE[layout]}"
        sizes = {"block": num_blocks, "layer": layers, "kv": 2, "token": block_tokens, "head": len(heads)}
        shape = tuple((sizes | {"dim": head_dim})[axis] for axis in self.axes.split())
        shared = torch.device(device).type == "cpu"
        self.tensors: Final = [
            shared_empty(shape, dtype=dtype) if shared else torch.empty(shape, dtype=dtype, device=device)
            for _ in range(1 if cross_layer else layers)
        ]
        self.device: Final = self.tensors[0].device
        by_layer = self.tensors[0].unbind(1) if cross_layer else self.tensors
        order = [axis for axis in self.axes.split() if axis != "layer"]
        self._by_token: Final = [layer.permute([order.index(axis) for axis in _BY_TOKEN]) for layer in by_layer]
        self._noise: Final = torch.Generator(device=self.device)
        self._noise.manual_seed(seed)
        for tensor in self.tensors:
            tensor.uniform_(-_GARBAGE, _GARBAGE, generator=self._noise)

    def by_token(self, layer: int) -> torch.Tensor:
        """View of a layer as `[kv, block, token, head, dim]`, whatever the layout."""
        return self._by_token[layer]

    def cache_tensors(self) -> "list[CacheTensor]":
        """Describe the shard to kvxfer, in the group `default`."""
        from kvxfer.geometry import CacheTensor, group

        if "layer" not in self.axes.split():
            return group(self.tensors, self.axes, heads=self.heads)
        return [CacheTensor(self.tensors[0], self.axes, layers=range(len(self._by_token)), heads=self.heads)]

    def scrub(self, ids: torch.Tensor) -> None:
        """Overwrite blocks with fresh garbage in every layer."""
        chosen = ids.to(self.device)
        for layer in self._by_token:
            part = torch.empty_like(layer[:, chosen])
            layer[:, chosen] = part.uniform_(-_GARBAGE, _GARBAGE, generator=self._noise)


class PagedCache:
    """A pool of KV blocks for one decoder model, shared by any number of sequences.

    Layer `i` is `tensors[i]`, one tensor for K and V, of shape `[2, num_blocks, block_tokens, heads,
    head_dim]` (`NHD`) or `[2, num_blocks, heads, block_tokens, head_dim]` (`HND`); `axes` names these axes as
    kvxfer does. With `cross_layer` there is one tensor, `[num_blocks, layers, 2, ...]`, so that a block is one
    contiguous piece of all layers. Block ids mean the same block in every layer.

    The heads may be divided among ranks, as tensor parallelism does. What each holds is a `Shard`, on a device of
    its own; `write` and `gather` take and give all heads, on the model's device. A rank's worker gets
    `shards[rank].cache_tensors()`; block ids mean the same block at every rank.

    `allocate`, `reserve` and `free` may be called from any thread. Tensor contents are not guarded: whoever
    holds a block orders its reads and writes.

    Args:
        config: Configuration of the model, as transformers defines it: `num_hidden_layers`,
            `num_attention_heads`, `hidden_size`, and where they exist `num_key_value_heads`, `head_dim`,
            `layer_types`, `sliding_window`.
        num_blocks: Blocks in the pool.
        block_tokens: Tokens per block.
        layout: Order of the axes inside a block.
        dtype: Element type of K and V; the model's.
        device: The model's device, where the pool lives.
        cross_layer: One tensor whose blocks hold all layers, rather than a tensor a layer.
        ranks: Devices among which the heads are divided, one a rank, in order; `device` alone if left out.
        seed: Seed of the order in which blocks are handed out, and of the initial garbage.

    Attributes:
        shards: What each rank holds.
        tensors: The tensors of all shards. They belong to the cache and live as long as it does.
        axes: Axis string of every tensor in `tensors`.

    Raises:
        ConfigError: A size is not positive, or `layout` is unknown.
        GeometryError: The model does not keep plain K and V for every token (sliding windows, recurrent
            layers), or its heads cannot be divided equally.
    """

    def __init__(
        self,
        config: Any,
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
        if num_blocks < 1 or block_tokens < 1:
            raise ConfigError(f"num_blocks={num_blocks} and block_tokens={block_tokens} must both be at least 1")
        _check_plain_attention(config)
        attention_heads = int(config.num_attention_heads)
        self.layers: Final = int(config.num_hidden_layers)
        self.heads: Final = int(getattr(config, "num_key_value_heads", None) or attention_heads)
        self.head_dim: Final = int(getattr(config, "head_dim", None) or config.hidden_size // attention_heads)
        self.num_blocks: Final = num_blocks
        self.block_tokens: Final = block_tokens
        self.layout: Final[Layout] = layout
        self.dtype: Final = dtype
        places = list(ranks) or [device]
        self.shards: Final = [
            Shard(
                heads=heads,
                layers=self.layers,
                num_blocks=num_blocks,
                block_tokens=block_tokens,
                head_dim=self.head_dim,
                layout=layout,
                cross_layer=cross_layer,
                dtype=dtype,
                device=place,
                seed=seed + rank,
            )
            for rank, (heads, place) in enumerate(zip(_divided(self.heads, len(places)), places, strict=True))
        ]
        self.tensors: Final = [tensor for shard in self.shards for tensor in shard.tensors]
        self.axes: Final = self.shards[0].axes
        self.device: Final = torch.empty(0, device=device).device  # with its number, where `device` leaves that out

        self._lock = threading.Lock()
        self._order = random.Random(seed)  # noqa: S311 - a shuffled order, not a secret
        self._free = list(range(num_blocks))
        self._order.shuffle(self._free)
        self._held: set[int] = set()

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V that one token takes over all layers."""
        return 2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize

    @property
    def free_blocks(self) -> int:
        """Blocks that `allocate` can still hand out."""
        with self._lock:
            return len(self._free)

    def cache_tensors(self) -> "list[CacheTensor]":
        """Describe the pool of an engine of one rank to kvxfer, in the group `default`.

        Raises:
            GeometryError: The heads are divided among ranks; each `Shard` has its own tensors then.
        """
        if len(self.shards) > 1:
            raise GeometryError(
                f"this pool is divided among {len(self.shards)} ranks: give each worker shards[rank].cache_tensors()"
            )
        return self.shards[0].cache_tensors()

    # blocks

    def allocate(self, tokens: int) -> list[int]:
        """Take the blocks that `tokens` tokens need, in shuffled order; they keep what they held.

        Returns:
            `ceil(tokens / block_tokens)` ids. They are the caller's until `free`.

        Raises:
            TokensError: `tokens` is negative.
            BlocksError: Too few blocks are free; none was taken.
        """
        if tokens < 0:
            raise TokensError(f"cannot allocate blocks for {tokens} tokens")
        return self._take(-(-tokens // self.block_tokens))

    def reserve(self, sequence: Sequence, tokens: int) -> None:
        """Append fresh blocks to `sequence.block_ids` until they have room for `tokens` tokens.

        Raises:
            BlocksError: The blocks of the sequence do not even cover the tokens it claims to hold, or too few
                are free.
        """
        self._check_room(len(sequence.block_ids), sequence.tokens)
        room = len(sequence.block_ids) * self.block_tokens
        if tokens > room:
            sequence.block_ids += self._take(-(-(tokens - room) // self.block_tokens))

    def free(self, block_ids: Iterable[int]) -> None:
        """Give blocks back. Their contents stay until somebody overwrites them.

        The caller must be done with them: no forward pass uses them, and no peer reads or writes them any
        more.

        Raises:
            BlocksError: An id is outside the pool, free already, or named twice; nothing was given back then.
        """
        ids = list(block_ids)
        _check_distinct(ids)
        with self._lock:
            self._check_held(ids)
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

    def _take(self, blocks: int) -> list[int]:
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

    def _check_held(self, ids: list[int]) -> None:
        for position, block in enumerate(ids):
            if not 0 <= block < self.num_blocks:
                raise BlocksError(f"block {block} at position {position} is outside the pool of {self.num_blocks}")
            if block not in self._held:
                raise BlocksError(
                    f"block {block} at position {position} is not allocated: never taken, or freed before"
                )

    def _check_room(self, blocks: int, tokens: int) -> None:
        room = blocks * self.block_tokens
        if tokens > room:
            raise BlocksError(
                f"{tokens} tokens do not fit: {blocks} blocks of {self.block_tokens} tokens hold {room} at most"
            )

    # contents

    def table(self, block_ids: Iterable[int]) -> torch.Tensor:
        """Return a block table for `write` and `gather`: int64 ids on the pool's device.

        Raises:
            BlocksError: An id is not allocated in this pool, or named twice.
        """
        ids = list(block_ids)
        _check_distinct(ids)
        with self._lock:
            self._check_held(ids)
        return torch.tensor(ids, dtype=torch.int64, device=self.device)

    def write(
        self, layer: int, table: torch.Tensor, first_token: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store the K and V of consecutive tokens of one layer through a block table.

        Args:
            layer: Index of the layer.
            table: Blocks of the sequence, from `table`; they must have room for the tokens.
            first_token: Position of the first token in the sequence.
            keys: `[heads, n, head_dim]`, positions already encoded.
            values: `[heads, n, head_dim]`.

        Raises:
            GeometryError: The shape or dtype is not the pool's.
            BlocksError: The table has no room for the tokens.
        """
        n = keys.shape[1] if keys.ndim == 3 else 0
        expected = (self.heads, n, self.head_dim)
        for name, given in (("keys", keys), ("values", values)):
            if tuple(given.shape) != expected or given.dtype != self.dtype:
                raise GeometryError(
                    f"{name} of layer {layer}: the pool stores {list(expected)} of {self.dtype}, "
                    f"the model gave {list(given.shape)} of {given.dtype}"
                )
        self._check_room(len(table), first_token + n)
        positions = torch.arange(first_token, first_token + n, device=self.device)
        at = (table[positions // self.block_tokens], positions % self.block_tokens)
        self.put(layer, at, keys.transpose(0, 1), values.transpose(0, 1))

    def gather(self, layer: int, table: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read K and V of the first `tokens` tokens of one layer through a block table.

        Returns:
            K and V, each a fresh tensor `[tokens, heads, head_dim]`; for one use, the cache keeps no
            reference.

        Raises:
            BlocksError: The table covers fewer tokens.
        """
        self._check_room(len(table), tokens)
        used = table[: -(-tokens // self.block_tokens)]
        keys, values = (half.flatten(0, 1)[:tokens] for half in self.take(layer, used))
        return keys, values

    def put(
        self, layer: int, place: tuple[torch.Tensor, torch.Tensor], keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store K and V of tokens anywhere in one layer.

        Args:
            layer: Index of the layer.
            place: Of each token its block id, and its row in there.
            keys: `[n, heads, head_dim]`.
            values: `[n, heads, head_dim]`.
        """
        for shard in self.shards:
            at, mine = tuple(each.to(shard.device) for each in place), slice(shard.heads.start, shard.heads.stop)
            for half, given in zip(shard.by_token(layer), (keys, values), strict=True):
                half.index_put_(at, given[:, mine].to(shard.device))

    def take(self, layer: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Read whole blocks of one layer: K and V, each `[*table.shape, block_tokens, heads, head_dim]`, and fresh."""
        parts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for shard in self.shards:
            ids = table.flatten().to(shard.device)
            for half, found in zip(shard.by_token(layer), parts, strict=True):
                found.append(half.index_select(0, ids).to(self.device))
        keys, values = (found[0] if len(found) == 1 else torch.cat(found, -2) for found in parts)
        return keys.view(*table.shape, *keys.shape[1:]), values.view(*table.shape, *values.shape[1:])


def _divided(heads: int, ranks: int) -> list[range]:
    each, over = divmod(heads, ranks)
    if over:
        raise GeometryError(f"{heads} heads of K and V cannot be divided equally among {ranks} ranks")
    return [range(rank * each, (rank + 1) * each) for rank in range(ranks)]


def _check_distinct(ids: list[int]) -> None:
    if len(set(ids)) != len(ids):
        raise BlocksError(f"blocks are named twice: {sorted({i for i in ids if ids.count(i) > 1})}")


def _check_plain_attention(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise GeometryError(f"layers of the kinds {sorted(kinds)}: this pool stores full attention only")
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "layer_types", None) is None:
        raise GeometryError(f"sliding_window={window}: this pool stores full attention only")


# digests


class Difference(NamedTuple):
    """The first place where two caches differ: the layer, `k` or `v`, and the position of the token."""

    layer: int
    part: Literal["k", "v"]
    token: int


def digests(cache: PagedCache, sequence: Sequence) -> list[tuple[bytes, bytes]]:
    """Digest K and V of a sequence, layer by layer, in logical order.

    The bytes are taken by token (0 to `sequence.tokens - 1`), then head, then dim. Pools of different layout,
    block size or block ids agree exactly if they hold the same tokens in the same dtype.

    Returns:
        Per layer (digest of K, digest of V), 32 bytes each (BLAKE2b).
    """
    return [(_digest(keys.tobytes()), _digest(values.tobytes())) for keys, values in _host_rows(cache, sequence)]


def token_digests(cache: PagedCache, sequence: Sequence) -> list[tuple[list[bytes], list[bytes]]]:
    """Digest K and V of each token of a sequence, for `first_difference`.

    Returns:
        Per layer (digests of K, digests of V), each with one 32-byte digest per token, over its bytes by
        head, then dim.
    """
    return [
        ([_digest(row.tobytes()) for row in keys], [_digest(row.tobytes()) for row in values])
        for keys, values in _host_rows(cache, sequence)
    ]


def first_difference(
    one: list[tuple[list[bytes], list[bytes]]], other: list[tuple[list[bytes], list[bytes]]]
) -> Difference | None:
    """Name the first (layer, k or v, token) in which two results of `token_digests` differ, or None.

    If one side has fewer tokens and they all agree, the first token that only the other side has is named.

    Raises:
        GeometryError: The numbers of layers differ.
    """
    if len(one) != len(other):
        raise GeometryError(f"cannot compare a cache of {len(one)} layers with one of {len(other)}")
    parts: tuple[Literal["k", "v"], ...] = ("k", "v")
    for layer, (halves, other_halves) in enumerate(zip(one, other, strict=True)):
        for part, a, b in zip(parts, halves, other_halves, strict=True):
            if a == b:
                continue
            common = min(len(a), len(b))
            return Difference(layer, part, next((t for t in range(common) if a[t] != b[t]), common))
    return None


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def _host_rows(cache: PagedCache, sequence: Sequence) -> Iterable[tuple[Any, Any]]:
    """Yield K and V of each layer as numpy bytes `[tokens, bytes per token]`."""
    table = cache.table(sequence.block_ids)
    for layer in range(cache.layers):
        keys, values = cache.gather(layer, table, sequence.tokens)
        yield _rows(keys), _rows(values)


def _rows(part: torch.Tensor) -> Any:
    return part.cpu().contiguous().flatten(1).view(torch.uint8).numpy()
