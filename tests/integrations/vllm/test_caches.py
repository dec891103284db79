"""What vLLM calls a cache, in kvxfer's words."""

import pytest
import torch
from vllm_stand_in import make

from kvxfer.errors import GeometryError
from kvxfer.geometry import CacheGeometry
from kvxfer.integrations.heads import Place
from kvxfer.integrations.vllm.caches import describe, only_group

BLOCKS = 6


def spec(kind="FullAttentionSpec", **fields):
    usual = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "head_size_v": 8}
    return make(kind, **(usual | fields))


def config(specs, *, groups=1):
    """Layers in one group, each with a spec of its own if they differ."""
    names = [f"model.layers.{layer}.attn" for layer in range(len(specs))]
    kind = specs[0] if len(set(map(id, specs))) == 1 else None
    kind = kind or make("UniformTypeKVCacheSpecs", kv_cache_specs=dict(zip(names, specs, strict=True)))
    group = make("KVCacheGroupSpec", layer_names=names, kv_cache_spec=kind, enable_kv_transfer=True)
    return make("KVCacheConfig", num_blocks=BLOCKS, kv_cache_groups=[group] * groups)


def caches(shape, count=1):
    return {f"model.layers.{layer}.attn": torch.zeros(shape) for layer in range(count)}


def described(one, shape, *, rank=0, ranks=1, heads=2):
    (tensors,) = describe(caches(shape), config([one]), Place(rank, ranks), heads).values()
    return CacheGeometry.of(tensors).tensors


@pytest.mark.parametrize(
    ("rank", "ranks", "total", "held", "expected"),
    [(0, 2, 8, 4, range(4)), (1, 2, 8, 4, range(4, 8)), (1, 4, 2, 1, range(1)), (2, 4, 2, 1, range(1, 2))],
)
def test_heads_of_a_rank(rank, ranks, total, held, expected):
    assert Place(rank, ranks).heads(total, held) == expected


def test_attention_is_one_tensor_a_layer():
    (found,) = described(spec(), (BLOCKS, 2, 16, 16), rank=1, ranks=2, heads=4)
    assert (found.axes, found.kv, found.layers, found.heads) == (
        "block head token kv dim",
        ("k", "v"),
        (0,),
        range(2, 4),
    )
    assert (found.block_ratio, found.shape) == (1, (BLOCKS, 2, 16, 2, 8))


def test_memory_may_have_any_order():
    seen = torch.zeros(BLOCKS, 16, 2, 16).transpose(1, 2)
    (tensors,) = describe({"model.layers.0.attn": seen}, config([spec()]), Place(0, 1), 2).values()
    assert CacheGeometry.of(tensors).tensors[0].strides == (16 * 2 * 16 * 4, 16 * 4, 2 * 16 * 4, 8 * 4, 4)


def test_kernel_blocks_are_counted():
    (found,) = described(spec(), (4 * BLOCKS, 2, 4, 16))
    assert (found.block_ratio, found.id_tokens) == (4, 16)


def test_keys_and_values_of_different_size_are_two_tensors():
    keys, values = described(spec(head_size=8, head_size_v=4), (BLOCKS, 2, 16, 12))
    assert (keys.kv, keys.shape[-1], values.kv, values.shape[-1]) == (("k",), 8, ("v",), 4)
    assert values.base - keys.base == 8 * 4


def test_latent_attention_has_neither_heads_nor_halves():
    one = spec("MLAAttentionSpec", num_kv_heads=1, head_size=24, head_size_v=0)
    (found,) = described(one, (BLOCKS, 1, 16, 24))
    assert (found.axes, found.kv, found.shape) == ("block token dim", ("",), (BLOCKS, 16, 24))


def test_layers_of_one_group_may_differ():
    two = config([spec(), spec(head_size=4, head_size_v=4)])
    views = caches((BLOCKS, 2, 16, 16)) | {"model.layers.1.attn": torch.zeros(BLOCKS, 2, 16, 8)}
    found = describe(views, two, Place(0, 1), 2)
    assert {name: tensors[0].layers for name, tensors in found.items()} == {
        "model.layers.0.attn": [0],
        "model.layers.1.attn": [1],
    }


def test_a_layer_that_uses_anothers_cache_is_passed_over():
    views = caches((BLOCKS, 2, 16, 16))
    views["model.layers.9.attn"] = views["model.layers.0.attn"]
    assert list(describe(views, config([spec()]), Place(0, 1), 2)) == ["model.layers.0.attn"]


@pytest.mark.parametrize(
    "odd",
    [{"num_head_slots": 3}, {"state_content_bytes": 36}, {"tokens_per_state": 4}],
)
def test_packed_caches_are_refused_by_name(odd):
    with pytest.raises(GeometryError, match=next(iter(odd))):
        described(spec(**odd), (BLOCKS, 2, 16, 16))


def test_other_kinds_are_refused_by_name():
    class MambaSpec:
        block_size = 16

    with pytest.raises(GeometryError, match="MambaSpec"):
        described(MambaSpec(), (BLOCKS, 2, 16, 16))


def test_several_groups_are_refused():
    with pytest.raises(GeometryError, match="disable-hybrid-kv-cache-manager"):
        only_group(config([spec()], groups=2))


@pytest.mark.parametrize("name", ["model.attn", "model.layers.1.experts.2.attn"])
def test_a_layer_without_one_number_is_refused(name):
    group = make("KVCacheGroupSpec", layer_names=[name], kv_cache_spec=spec(), enable_kv_transfer=True)
    known = make("KVCacheConfig", num_blocks=BLOCKS, kv_cache_groups=[group])
    with pytest.raises(GeometryError, match="numbers"):
        describe({name: torch.zeros(BLOCKS, 2, 16, 16)}, known, Place(0, 1), 2)


def test_two_caches_of_one_layer_are_refused():
    names = ["model.layers.1.attn", "model.layers.1.indexer"]
    group = make("KVCacheGroupSpec", layer_names=names, kv_cache_spec=spec(), enable_kv_transfer=True)
    known = make("KVCacheConfig", num_blocks=BLOCKS, kv_cache_groups=[group])
    views = {name: torch.zeros(BLOCKS, 2, 16, 16) for name in names}
    with pytest.raises(GeometryError, match="several caches"):
        describe(views, known, Place(0, 1), 2)
