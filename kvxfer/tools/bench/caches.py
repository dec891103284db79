"""Memory of caches: one allocation a process, from which every cache of a run is cut.

An engine allocates its cache once, and so do benchmarks: what was registered with a transport, or mapped by another
process, is not freed between two cells, since that other process may keep it mapped. Caches of one slab lie in the same
memory, so only the one that was cut last may be used.
"""

from math import prod
from typing import Final

import torch

from kvxfer.tools.bench.contents import SOURCE_POISON, TARGET_POISON, Cache
from kvxfer.tools.bench.device import empty
from kvxfer.tools.bench.layouts import DIM, ITEM_BYTES, Layout

__all__ = ["Slab", "in_shared_memory"]

_GAP: Final = 512
"""Bytes between two layers: no piece goes from one into the next."""


def in_shared_memory(route: str) -> bool:
    """Whether, on a CPU, caches for this route lie in memory that another process can map."""
    return route in {"mapped", "auto"}


class Slab:
    """One allocation, made when a cache is first asked for.

    Args:
        device: Where.
        layouts: Caches that are to fit: layouts with the number of blocks.
        source: Whether they are those of the prefill side.
    """

    def __init__(self, device: str, layouts: list[tuple[Layout, int]], *, source: bool) -> None:
        self._device: Final = device
        self._source: Final = source
        self._elements: Final = max((_elements(*one, source=source) for one in layouts), default=0)
        self._memory: torch.Tensor | None = None
        self._shared = False

    def cache(self, layout: Layout, blocks: int, *, shared: bool = False) -> Cache:
        """An uninitialised cache with so many blocks. Whatever was cut before is not to be used any more.

        On a CPU another kind of memory takes the place of what is there: ask for all caches of one kind first.
        """
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
