"""The cache of a probe: what it holds is known byte for byte, before and after."""

import random
from typing import Any, Final

import numpy as np
import torch

import kvxfer
from kvxfer.tools.bench.device import available_bytes, empty, synchronize

__all__ = ["ProbeCache", "probe_bytes"]

_MIB: Final = 1 << 20
_LAYERS: Final = 2
_TOKENS, _HEADS, _DIM = 16, 8, 128
_PIECE: Final = _TOKENS * _HEADS * _DIM * 2
"""Bytes of one block of one layer, which are contiguous: 32 KiB."""
_POISON: Final = 0xA5
_NEEDED: Final = 12
"""How much memory there should be for each byte that is moved: the pool, what it is compared with, an arena, others."""


def probe_bytes(device: str) -> int:
    """How much a probe moves here: enough to be worth timing, and little beside what is free."""
    wanted = 16 * _MIB if device == "cpu" else 256 * _MIB
    return max(_MIB, min(wanted, available_bytes(device) // _NEEDED))


class ProbeCache:
    """A pool of twice the blocks that are moved, so that those that are not can be looked at as well.

    Args:
        device: `cpu` or `cuda:<index>`; on a CPU other processes can map it.
        nbytes: Bytes of one transfer, as both sides have agreed.
        seed: Of the content, likewise.
    """

    def __init__(self, device: str, nbytes: int, seed: int) -> None:
        self._device: Final = device
        self._count: Final = max(1, nbytes // (_LAYERS * _PIECE))
        self._pool: Final = 2 * self._count
        self._cache: Final = empty([_LAYERS, self._pool, _TOKENS, _HEADS, _DIM], device, shared=True)
        self._bytes: Final[Any] = self._cache.view(torch.uint8).view(_LAYERS, self._pool, _PIECE)
        drawn = np.random.PCG64(seed).random_raw(_LAYERS * self._count * _PIECE // 8)  # the same with every numpy
        content: Any = torch.from_numpy(drawn.view(np.uint8))  # pyright: ignore[reportUnknownMemberType]
        self._content: Final[Any] = content.view(_LAYERS, self._count, _PIECE).to(device)

    @property
    def tensors(self) -> list[kvxfer.CacheTensor]:
        """For a worker: keys without values, one tensor a layer."""
        heads = range(_HEADS)
        return [
            kvxfer.CacheTensor(layer, axes="block token head dim", kv="k", layers=[number], heads=heads)
            for number, layer in enumerate(self._cache)
        ]

    @property
    def tokens(self) -> int:
        """Of one transfer."""
        return self._count * _TOKENS

    @property
    def nbytes(self) -> int:
        """Of one transfer."""
        return self._count * _LAYERS * _PIECE

    def source(self, number: int) -> list[int]:
        """Blocks from which a transfer is read; they hold what belongs to it afterwards."""
        ids = self._ids(2 * number)
        self._bytes[:, ids] = self._content ^ (number % 256)
        synchronize(self._device)
        return ids

    def target(self, number: int) -> list[int]:
        """Blocks into which a transfer is written; the whole pool holds something else afterwards."""
        self._bytes.fill_(_POISON)
        synchronize(self._device)
        return self._ids(2 * number + 1)

    def difference(self, number: int) -> str:
        """How the pool differs from what it should be after a transfer; empty if it does not."""
        ids = self._ids(2 * number + 1)
        wrong = int((self._bytes[:, ids] != (self._content ^ (number % 256))).sum())
        others = torch.ones(self._pool, dtype=torch.bool)
        others[ids] = False
        touched = int((self._bytes[:, others.to(self._device)] != _POISON).sum())
        if wrong:
            return f"{wrong} of {self.nbytes} bytes are wrong"
        return f"{touched} bytes outside of the request were overwritten" if touched else ""

    def _ids(self, seed: int) -> list[int]:
        return random.Random(seed).sample(range(self._pool), self._count)  # noqa: S311
