"""Caches of benchmarks: what caches hold while they are measured, so that every byte of a destination can be checked.

Each 8-byte word of a request is `seed + place * factor` modulo 2^64, where `place` numbers the words by layer, K or V,
token, head and element: no two places hold the same word, and another seed gives other words everywhere. Blocks that do
not belong to the request hold one poison word, another one on either side. So the destination is right exactly if the
blocks of the request hold what the formula says of their tokens and all others hold poison still; the whole of it is
compared, word by word, and nothing needs to be sent along.

An engine allocates its cache once, and so do benchmarks: what was registered with a transport, or mapped by another
process, is not freed between two cells, since that other process may keep it mapped. Caches of one slab lie in the same
memory, so only the one that was cut last may be used.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import torch

from kvxfer.geometry import CacheTensor
from kvxfer.tools.bench.device import empty, synchronize
from kvxfer.tools.bench.layouts import DIM, ITEM_BYTES, Layout

__all__ = ["SOURCE_POISON", "TARGET_POISON", "WORD_BYTES", "Cache", "Request", "Slab", "draw", "in_shared_memory"]

WORD_BYTES: Final = 8
_WORDS: Final = DIM * ITEM_BYTES // WORD_BYTES
"""Words of one head of one token."""
_FACTOR: Final = 0x9E37_79B9_7F4A_7C15  # odd, so that multiplying by it maps no two numbers to one
_HEADS: Final = 1 << 16
_TOKENS: Final = 1 << 28
_SLICE_BYTES: Final = 64 << 20
SOURCE_POISON: Final = 0x5AA5_5AA5_5AA5_5AA5
TARGET_POISON: Final = 0x2BAD_F00D_2BAD_F00D
_GAP: Final = 512
"""Bytes between two layers: no piece goes from one into the next."""


@dataclass(frozen=True, slots=True)
class Request:
    """Content of one request, and the blocks that it lies in on one side."""

    seed: int
    ids: tuple[int, ...]  # in the order of its tokens


def draw(seed: int, pool: int, blocks: int, *, source: bool) -> Request:
    """Content and block ids of one request; the two sides draw other ids from the same seed."""
    return Request(seed, tuple(random.Random(2 * seed + source).sample(range(pool), blocks)))  # noqa: S311


@dataclass(frozen=True, slots=True, eq=False)
class Cache:
    """The cache of one side: one tensor a layer."""

    tensors: Sequence[torch.Tensor]  # bfloat16, one a layer, contiguous, with `dim` as their last axis
    axes: str
    heads: range  # by their global numbers
    poison: int  # word that blocks hold which belong to no request

    def cache_tensors(self) -> list[CacheTensor]:
        """As a worker takes them."""
        return [
            CacheTensor(tensor, self.axes, layers=[layer], heads=self.heads)
            for layer, tensor in enumerate(self.tensors)
        ]

    def scrub(self) -> None:
        """Fill everything with poison, and wait until that is done."""
        for tensor in self.tensors:
            tensor.view(torch.int64).fill_(self.poison)
        synchronize(str(self.tensors[0].device))

    def write(self, *requests: Request) -> None:
        """Make these requests, whose blocks are disjoint, the whole content: all other blocks get poison. Waits."""
        for layer in range(len(self.tensors)):
            for _, found, wanted in self._slices(layer, requests):
                found.copy_(wanted)
        synchronize(str(self.tensors[0].device))

    def difference(self, *requests: Request) -> str:
        """Where the cache first differs from what `write` of these requests makes; empty if every word is right."""
        for layer in range(len(self.tensors)):
            for start, found, wanted in self._slices(layer, requests):
                if not torch.equal(found, wanted):
                    return self._place(layer, start, found, wanted, requests)
        return ""

    def corrupt(self, block: int) -> None:
        """Change one byte of a block: what the checks must notice."""
        last = self.tensors[-1].view(torch.uint8).select(self.axes.split().index("block"), block)
        last[(-1,) * last.dim()] ^= 1

    def _slices(self, layer: int, requests: Sequence[Request]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """(first block, words that are there, words that should be) for runs of blocks of one layer."""
        words = self.tensors[layer].view(torch.int64)
        names = self.axes.split()
        at = names.index("block")
        blocks = words.shape[at]
        first = torch.zeros(blocks, dtype=torch.int64)  # by block, the request's seed and what its first token adds
        idle = torch.ones(blocks, dtype=torch.bool)
        block_tokens = words.shape[names.index("token")]
        for request in requests:
            ids = torch.tensor(request.ids, dtype=torch.int64)
            first[ids] = _wrap(request.seed) + torch.arange(len(ids)) * _wrap(block_tokens * _step("token"))
            idle[ids] = False
        rest = torch.tensor(_wrap(layer * _step("layer")))
        for axis, name in enumerate(names):
            if name != "block":
                start = self.heads.start if name == "head" else 0
                numbers = torch.arange(start, start + words.shape[axis]) * _wrap(_step(name))
                rest = rest + _along(numbers, axis, len(names))
        rest, first, idle = rest.to(words.device), first.to(words.device), idle.to(words.device)
        run = max(1, _SLICE_BYTES // (words.numel() // blocks * WORD_BYTES))
        for start in range(0, blocks, run):
            found = words.narrow(at, start, min(run, blocks - start))
            count = found.shape[at]
            wanted = rest + _along(first.narrow(0, start, count), at, len(names))
            yield start, found, wanted.masked_fill_(_along(idle.narrow(0, start, count), at, len(names)), self.poison)

    def _place(
        self, layer: int, start: int, found: torch.Tensor, wanted: torch.Tensor, requests: Sequence[Request]
    ) -> str:
        at = [int(number) for number in (found != wanted).nonzero()[0]]
        value = f"{int(found[tuple(at)]) & (1 << 64) - 1:#x}, not {int(wanted[tuple(at)]) & (1 << 64) - 1:#x}"
        names = self.axes.split()
        at[names.index("block")] += start
        block = at[names.index("block")]
        whose = "of the request" if any(block in request.ids for request in requests) else "that must stay untouched"
        return f"layer {layer}, block {block} {whose}, {dict(zip(names, at, strict=True))} (dim in words): {value}"


def _step(name: str) -> int:
    """What one step along an axis adds to a word."""
    places = {
        "dim": 1,
        "head": _WORDS,
        "token": _HEADS * _WORDS,
        "kv": _TOKENS * _HEADS * _WORDS,
        "layer": 2 * _TOKENS * _HEADS * _WORDS,
    }
    return places[name] * _FACTOR


def _wrap(number: int) -> int:
    """The number modulo 2^64, as a signed one: what torch computes with."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _along(numbers: torch.Tensor, axis: int, dims: int) -> torch.Tensor:
    """A vector as an array of so many dimensions, along one of them."""
    return numbers.view([-1 if at == axis else 1 for at in range(dims)])


def in_shared_memory(route: str) -> bool:
    """Whether, on a CPU, caches for this route lie in memory that another process can map."""
    return route in {"mapped", "auto"}


class Slab:
    """One allocation, made when a cache is first asked for: one of these layouts, with so many blocks."""

    def __init__(self, device: str, layouts: list[tuple[Layout, int]], *, source: bool) -> None:
        self._device: Final = device
        self._source: Final = source
        self._elements: Final = max((_elements(*one, source=source) for one in layouts), default=0)
        self._memory: torch.Tensor | None = None
        self._shared = False

    def cache(self, layout: Layout, blocks: int, route: str = "") -> Cache:
        """An uninitialised cache with so many blocks. Whatever was cut before is not to be used any more.

        On a CPU another kind of memory takes the place of what is there, where the route wants it: ask for all caches
        of one kind first.
        """
        shared = in_shared_memory(route)
        if self._memory is None or (shared != self._shared and self._device == "cpu"):
            self._memory = None  # given back before as much is asked for
            self._memory, self._shared = empty([self._elements], self._device, shared=shared), shared
        tensors: list[torch.Tensor] = []
        shape, start = _shape(layout, blocks, source=self._source), 0
        for _ in range(layout.layers):
            tensors.append(self._memory.narrow(0, start, prod(shape)).view(shape))
            start += prod(shape) + _GAP // ITEM_BYTES
        heads = range(layout.heads) if self._source else layout.target_heads
        axes = layout.source_axes if self._source else layout.target_axes
        return Cache(tensors, axes, heads, SOURCE_POISON if self._source else TARGET_POISON)


def _shape(layout: Layout, blocks: int, *, source: bool) -> list[int]:
    heads = layout.heads if source else len(layout.target_heads)
    axes = layout.source_axes if source else layout.target_axes
    sizes = {"kv": 2, "block": blocks, "token": layout.block_tokens, "head": heads, "dim": DIM}
    return [sizes[name] for name in axes.split()]


def _elements(layout: Layout, blocks: int, *, source: bool) -> int:
    return layout.layers * (prod(_shape(layout, blocks, source=source)) + _GAP // ITEM_BYTES)
