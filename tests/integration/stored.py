"""Caches of floats with scales, and what a fetch that converts must make of them."""

from dataclasses import replace

import torch
from stage import Cache, Copied, bits


class Stored(Cache):
    """Random numbers as they are stored, with a scale of each layer: "" for none, "tensor" or "head"."""

    def __init__(self, dtype, scale="", *, seed=1, **options):
        super().__init__(dtype=dtype, **options)
        rng = torch.Generator().manual_seed(seed)
        self.scales = {}
        for layer, memory in self.memory.items():
            memory.copy_((torch.randn(memory.shape, generator=rng) * 20).to(dtype))
            shape = {"": (), "tensor": (), "head": (len(self.heads),)}[scale]
            numbers = torch.rand(shape, generator=rng) * 3 + 0.01
            self.scales[layer] = numbers if scale else None

    def __getstate__(self):
        """As integers: torch does not pickle floats of 8 bits."""
        dtypes = {layer: memory.dtype for layer, memory in self.memory.items()}
        return {**self.__dict__, "memory": {layer: bits(m) for layer, m in self.memory.items()}, "dtypes": dtypes}

    def __setstate__(self, state):
        dtypes = state.pop("dtypes")
        self.__dict__ = {**state, "memory": {layer: m.view(dtypes[layer]) for layer, m in state["memory"].items()}}

    @property
    def tensors(self):
        return [replace(tensor, scale=self.scales[tensor.layers[0]]) for tensor in super().tensors]

    def scale_of(self, layer, head):
        scale = self.scales[layer]
        if scale is None:
            return torch.ones(1)
        return (scale if scale.ndim == 0 else scale[self.heads.index(head)]).reshape(1)


class Converted(Copied):
    """What a fetch must make of a destination, by torch's own arithmetic."""

    def made(self, values, source, layer, head, dtype):
        values = values.float() * source.scale_of(layer, head) / self.cache.scale_of(layer, head)
        if dtype.itemsize == 1:
            largest = torch.finfo(dtype).max
            values = values.clamp(-largest, largest)
        return values.to(dtype)
