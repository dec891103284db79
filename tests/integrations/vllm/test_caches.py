"""What vLLM calls a cache, in kvxfer's words."""

import pytest
import torch
from vllm_stand_in import RECORDED, layer, make

from kvxfer.errors import GeometryError
from kvxfer.geometry import CacheGeometry
from kvxfer.integrations.heads import Place
from kvxfer.integrations.vllm import caches as module
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


def caches(shape, count=1, dtype=torch.float32):
    return {f"model.layers.{layer}.attn": torch.zeros(shape, dtype=dtype) for layer in range(count)}


def known(views, one=None):
    """Layers by name, all of one backend."""
    return dict.fromkeys(views, one or layer("FlashAttentionBackend"))


def described(one, shape, *, rank=0, ranks=1, heads=2, of=None, dtype=torch.float32):
    views = caches(shape, dtype=dtype)
    of = of or layer("FlashAttentionBackend" if one.head_size_v else "FlashMLABackend")
    (tensors,) = describe(views, config([one]), Place(rank, ranks), heads, known(views, of)).values()
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
    views = {"model.layers.0.attn": seen}
    (tensors,) = describe(views, config([spec()]), Place(0, 1), 2, known(views)).values()
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
    found = describe(views, two, Place(0, 1), 2, known(views))
    assert {name: tensors[0].layers for name, tensors in found.items()} == {
        "model.layers.0.attn": [0],
        "model.layers.1.attn": [1],
    }


def test_a_layer_that_uses_anothers_cache_is_passed_over():
    views = caches((BLOCKS, 2, 16, 16))
    views["model.layers.9.attn"] = views["model.layers.0.attn"]
    assert list(describe(views, config([spec()]), Place(0, 1), 2, known(views))) == ["model.layers.0.attn"]


@pytest.mark.parametrize("odd", [{"num_head_slots": 3}, {"state_content_bytes": 36}, {"tokens_per_state": 4}])
def test_packed_caches_are_refused_by_name(odd):
    with pytest.raises(GeometryError, match=next(iter(odd))):
        described(spec(**odd), (BLOCKS, 2, 16, 16))


def test_other_kinds_are_refused_by_name():
    class MambaSpec:
        block_size = 16
        head_size_v = 0

    with pytest.raises(GeometryError, match="MambaSpec"):
        described(MambaSpec(), (BLOCKS, 2, 16, 16))


def test_several_groups_are_refused():
    with pytest.raises(GeometryError, match="disable-hybrid-kv-cache-manager"):
        only_group(config([spec()], groups=2))


@pytest.mark.parametrize("name", ["model.attn", "model.layers.1.experts.2.attn"])
def test_a_layer_without_one_number_is_refused(name):
    group = make("KVCacheGroupSpec", layer_names=[name], kv_cache_spec=spec(), enable_kv_transfer=True)
    found = make("KVCacheConfig", num_blocks=BLOCKS, kv_cache_groups=[group])
    views = {name: torch.zeros(BLOCKS, 2, 16, 16)}
    with pytest.raises(GeometryError, match="numbers"):
        describe(views, found, Place(0, 1), 2, known(views))


def test_two_caches_of_one_layer_are_refused():
    names = ["model.layers.1.attn", "model.layers.1.indexer"]
    group = make("KVCacheGroupSpec", layer_names=names, kv_cache_spec=spec(), enable_kv_transfer=True)
    found = make("KVCacheConfig", num_blocks=BLOCKS, kv_cache_groups=[group])
    views = {name: torch.zeros(BLOCKS, 2, 16, 16) for name in names}
    with pytest.raises(GeometryError, match="several caches"):
        describe(views, found, Place(0, 1), 2, known(views))


@pytest.mark.parametrize("path", (module._AS_SEEN | module._LATENT | module._CPU).values())
def test_backends_that_are_known_are_those_of_a_release(path):
    home, _, name = path.rpartition(".")
    assert RECORDED[name]["module"] == f"{module._HOME}.{home}"


@pytest.mark.parametrize("path", module._AS_SEEN.values())
def test_what_these_backends_store_is_what_the_view_says(path):
    (found,) = described(spec(), (BLOCKS, 2, 16, 16), of=layer(path.rpartition(".")[2]))
    assert found.axes == "block head token kv dim"


@pytest.mark.parametrize("path", module._LATENT.values())
def test_latent_attention_of_these_backends(path):
    one = spec("MLAAttentionSpec", num_kv_heads=1, head_size=24, head_size_v=0)
    (found,) = described(one, (BLOCKS, 1, 16, 24), of=layer(path.rpartition(".")[2]))
    assert found.axes == "block token dim"


@pytest.mark.parametrize("isa", ["vec", "vec16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_cpus_keys_are_columns_and_values_are_rows(isa, dtype):
    views = {"model.layers.0.attn": torch.zeros(BLOCKS, 2, 32, 16, dtype=dtype)}
    of = layer("CPUAttentionBackend", isa=isa)
    (tensors,) = describe(views, config([spec(block_size=32)]), Place(0, 1), 2, known(views, of)).values()
    written = torch.arange(50 * 2 * 8).remainder(251).view(50, 2, 8).to(dtype)
    ((_, view),) = views.items()
    of.impl.do_kv_cache_update(of, written, written + 1, view, torch.arange(32, 32 + 50))
    assert [(one.axes, one.kv, one.heads) for one in tensors] == [
        ("block head dim token", "k", range(2)),
        ("block head token dim", "v", range(2)),
    ]
    keys, values = tensors[0].tensor.transpose(2, 3), tensors[1].tensor
    for token in range(50):
        block, slot = divmod(32 + token, 32)
        assert keys[block, :, slot].equal(written[token])
        assert values[block, :, slot].equal(written[token] + 1)
    assert not keys[0].any()
    assert not values[0].any()


@pytest.mark.parametrize(
    ("backend", "name", "one"),
    [
        ("RocmAttentionBackend", "ROCM_ATTN", spec()),
        ("AiterFlashAttentionBackend", "FLASH_ATTN", spec()),
        ("CPUMLABackend", "CPU_MLA", spec("MLAAttentionSpec", num_kv_heads=1, head_size_v=0)),
        ("AMXMLABackend", "AMX_MLA", spec("MLAAttentionSpec", num_kv_heads=1, head_size_v=0)),
        ("FlashAttentionBackend", "FLASH_ATTN", spec("MLAAttentionSpec", num_kv_heads=1, head_size_v=0)),
        ("FlashMLABackend", "FLASHMLA", spec()),
    ],
)
def test_other_backends_are_refused_by_name(backend, name, one):
    path = f"{RECORDED[backend]['module']}.{backend}"
    with pytest.raises(GeometryError, match="--attention-backend") as refused:
        described(one, (BLOCKS, one.num_kv_heads, 16, one.head_size + one.head_size_v), of=layer(backend, name=name))
    assert f"{name} ({path})" in str(refused.value)


def test_a_backend_for_chunked_local_attention_stores_as_its_base_does():
    """vLLM makes a class of it that plans otherwise, and one of another kind that stores otherwise."""
    one = layer("TritonAttentionBackend")
    base = one.get_attn_backend()
    planned = type("ChunkedLocalAttention_8192_TritonAttentionBackend", (base,), {"get_builder_cls": None})
    one.get_attn_backend = lambda: planned
    (found,) = described(spec(), (BLOCKS, 2, 16, 16), of=one)
    assert found.axes == "block head token kv dim"
    one.get_attn_backend = lambda: type("Other", (base,), {"get_builder_cls": None, "get_impl_cls": None})
    with pytest.raises(GeometryError, match="does not know where it stores"):
        described(spec(), (BLOCKS, 2, 16, 16), of=one)


def test_a_layer_whose_backend_cannot_be_found_is_refused():
    one = layer("TritonAttentionBackend")
    one.get_attn_backend = lambda: None
    with pytest.raises(GeometryError, match="names no attention backend"):
        described(spec(), (BLOCKS, 2, 16, 16), of=one)
    views = caches((BLOCKS, 2, 16, 16))
    with pytest.raises(GeometryError, match=r"no attention layer model\.layers\.0\.attn"):
        describe(views, config([spec()]), Place(0, 1), 2, {})


@pytest.mark.parametrize("isa", ["amx", "neon", "rvv", "vxe", "vsx", None])
def test_other_kernels_of_the_cpu_attention_are_refused_by_name(isa):
    of = layer("CPUAttentionBackend", isa=isa)
    with pytest.raises(GeometryError, match=f"instruction set {isa!r}.*--dtype float32"):
        described(spec(), (BLOCKS, 2, 16, 16), of=of)


def test_keys_and_values_of_different_size_are_refused_on_cpus():
    with pytest.raises(GeometryError, match="heads of 8 and 4"):
        described(spec(head_size_v=4), (BLOCKS, 2, 16, 12), of=layer("CPUAttentionBackend", isa="vec"))


def test_a_cpu_attention_that_writes_otherwise_is_refused():
    def as_the_view_says(cache):
        return cache.split(8, dim=-1)

    of = layer("CPUAttentionBackend", isa="vec", stores=as_the_view_says)
    with pytest.raises(GeometryError, match="in an order that this connector does not know"):
        described(spec(), (BLOCKS, 2, 16, 16), of=of)


@pytest.mark.parametrize("backend", ["CPUAttentionBackend", "FlashAttentionBackend"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_quantised_caches_are_refused(backend, dtype):
    with pytest.raises(GeometryError, match=f"quantised \\({dtype}\\).*--kv-cache-dtype auto"):
        described(spec(), (BLOCKS, 2, 16, 16), of=layer(backend, isa="vec"), dtype=dtype)
