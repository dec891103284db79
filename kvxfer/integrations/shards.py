"""What one rank holds of a paged pool: the tensors of its heads on its device, in one of four layouts."""

from typing import TYPE_CHECKING, Final, Literal

import torch

from kvxfer import shared_empty
from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from kvxfer.geometry import CacheTensor

__all__ = ["Layout", "Shard"]

Layout = Literal["NHD", "HND"]
"""Order of the axes inside a block: `NHD` is token, head, dim; `HND` is head, token, dim."""

_INSIDE: Final[dict[str, str]] = {"NHD": "token head dim", "HND": "head token dim"}
_BY_TOKEN: Final = ("kv", "block", "token", "head", "dim")
_GARBAGE: Final = 4.0
"""Pools are filled with values in (-4, 4): garbage of about the size of real keys and values."""


class Shard:
    """K and V of some heads of every layer, in memory of one device, filled with garbage.

    Args:
        heads: The heads that it holds, by their numbers in the model.
        layers: Layers of the model.
        num_blocks: Blocks.
        block_tokens: Tokens per block.
        head_dim: Size of a head.
        layout: Order of the axes inside a block.
        cross_layer: One tensor whose blocks hold all layers, rather than a tensor a layer.
        dtype: Element type.
        device: Where the memory is. On a CPU it is shared, so that a prefill process on this host may map it.
        seed: Seed of the garbage.

    Attributes:
        heads: As given.
        device: Of the tensors.
        axes: Axis string of each tensor.
        tensors: One a layer, or one. They belong to the shard and live as long as it does.

    Raises:
        ConfigError: `layout` is unknown.
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
