"""Caches are cut from one allocation, and fill it without touching each other's layers."""

import torch

import kvxfer
from kvxfer.tools.bench.caches import Slab, in_shared_memory
from kvxfer.tools.bench.layouts import NAMED, plain

POOLS = [(plain(512), 5), (NAMED["head-split"], 3)]


def test_every_cache_lies_in_the_same_memory():
    for source in (True, False):
        slab = Slab("cpu", POOLS, source=source)
        caches = [slab.cache(*pool) for pool in POOLS]
        starts = {cache.tensors[0].untyped_storage().data_ptr() for cache in caches}
        assert len(starts) == 1
        heads = [len(cache.heads) for cache in caches]
        assert heads == ([2, 8] if source else [2, 4])


def test_layers_do_not_touch():
    layers = Slab("cpu", POOLS, source=True).cache(*POOLS[0]).tensors
    ends = [layer.data_ptr() + layer.numel() * layer.element_size() for layer in layers]
    assert all(end < layer.data_ptr() for end, layer in zip(ends, layers[1:], strict=False))
    assert all(layer.is_contiguous() for layer in layers)


def test_shared_memory_is_asked_for_where_it_exists(monkeypatch):
    asked = []

    def shared_empty(shape, *, dtype):
        asked.append(shape)
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setitem(vars(kvxfer), "shared_empty", shared_empty)
    slab = Slab("cpu", POOLS, source=True)
    slab.cache(*POOLS[0])
    assert asked == []
    first = slab.cache(*POOLS[0], shared=in_shared_memory("mapped"))
    again = slab.cache(*POOLS[1], shared=in_shared_memory("auto"))
    assert len(asked) == 1
    assert first.tensors[0].data_ptr() == again.tensors[0].data_ptr()
    assert not in_shared_memory("staged")
