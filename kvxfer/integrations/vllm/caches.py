"""vLLM's cache tensors in kvxfer's words.

vLLM gives one view a layer, whose axes are block, head, token and content, in this order whatever the order in memory
is: strides tell. Content is K and V side by side; of latent attention (MLA) it is one vector, and there is no head.

That is what the view says, and an attention backend may store something else in it: nothing fails then, and the tokens
are wrong. So backends are listed here by what was found out of each, and every other is refused.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvxfer.errors import GeometryError
from kvxfer.geometry import CacheTensor
from kvxfer.integrations.heads import Place

__all__ = ["describe", "only_group"]

_KNOWN: Final = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
"""vLLM's classes of caches that hold every token of a request."""

_PLAIN: Final = frozenset({"torch.float32", "torch.float16", "torch.bfloat16"})
"""Elements that are their values. vLLM has several formats of fp8 as bytes, and their scales elsewhere."""

_HOME: Final = "vllm.v1.attention.backends"
_AS_SEEN: Final = {
    "FLASH_ATTN": "flash_attn.FlashAttentionBackend",
    "FLASH_ATTN_DIFFKV": "flash_attn_diffkv.FlashAttentionDiffKVBackend",
    "FLASHINFER": "flashinfer.FlashInferBackend",
    "FLEX_ATTENTION": "flex_attention.FlexAttentionBackend",
    "TRITON_ATTN": "triton_attn.TritonAttentionBackend",
    "TRITON_ATTN_DIFFKV": "triton_attn_diffkv.TritonAttentionDiffKVBackend",
}
"""Backends that store K and V where the view has them, by vLLM's names. These are not unique, so classes decide."""

_LATENT: Final = {
    "CUTLASS_MLA": "mla.cutlass_mla.CutlassMLABackend",
    "FLASHINFER_MLA": "mla.flashinfer_mla.FlashInferMLABackend",
    "FLASHMLA": "mla.flashmla.FlashMLABackend",
    "FLASH_ATTN_MLA": "mla.flashattn_mla.FlashAttnMLABackend",
    "TOKENSPEED_MLA": "mla.tokenspeed_mla.TokenspeedMLABackend",
    "TRITON_MLA": "mla.triton_mla.TritonMLABackend",
}
"""Backends of latent attention that store vectors where the view has them."""

_CPU: Final = {"CPU_ATTN": "cpu_attn.CPUAttentionBackend"}
"""The backend that stores something else: see `_by_columns`."""

_BY_COLUMNS: Final = ("vec", "vec16")
"""Its kernels, which vLLM calls instruction sets, that store as `_by_columns` says. `amx` stores tiles of bfloat16."""


def only_group(config: Any) -> Any:
    """The one group of layers that share block ids, of vLLM's `KVCacheConfig`.

    Raises:
        GeometryError: If there are several.
    """
    groups = [group for group in config.kv_cache_groups if group.enable_kv_transfer]
    if len(groups) != 1:
        raise GeometryError(
            f"this model has {len(groups)} groups of cache blocks, and this connector takes one: run vLLM with "
            "--disable-hybrid-kv-cache-manager; models with recurrent state cannot be handed over by it"
        )
    return groups[0]


def describe(
    caches: Mapping[str, Any], config: Any, place: Place, total_heads: int, layers: Mapping[str, Any]
) -> dict[str, list[CacheTensor]]:
    """Describe the caches of a worker.

    Args:
        caches: Views by the names of vLLM's layers. Layers that use another's cache are in there again.
        config: vLLM's `KVCacheConfig`.
        place: This worker's among those that share the heads.
        total_heads: KV heads of the model.
        layers: vLLM's attention layers by their names, once their backends have been set up.

    Returns:
        Tensors by the names of vLLM's layers.

    Raises:
        GeometryError: If a cache is of a kind that cannot be handed over, what its backend stores is not known, or a
            layer's number cannot be told.
    """
    group = only_group(config)
    found: dict[str, list[CacheTensor]] = {}
    for name in group.layer_names:
        if name in caches:
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            held = _tensors(name, caches[name], spec, config.num_blocks, place, total_heads, layers.get(name))
            found[name] = list(held)
    numbers = [tensors[0].layers[0] for tensors in found.values()]
    if len(set(numbers)) < len(numbers):
        raise GeometryError(f"layers {sorted(n for n in set(numbers) if numbers.count(n) > 1)} have several caches")
    return found


def _tensors(
    name: str, cache: Any, spec: Any, num_blocks: int, place: Place, total_heads: int, layer: Any
) -> Iterator[CacheTensor]:
    kind = type(spec).__name__
    odd = {"num_head_slots": None, "state_content_bytes": None, "tokens_per_state": 1}
    packed = [field for field, plain in odd.items() if getattr(spec, field, plain) != plain]
    if kind not in _KNOWN or packed:
        raise GeometryError(
            f"the cache of {name} is a {kind}{''.join(f' with {field}' for field in packed)}, which this connector "
            f"cannot describe; it knows {' and '.join(sorted(_KNOWN))} of plain elements"
        )
    if str(cache.dtype) not in _PLAIN:
        raise GeometryError(
            f"the cache of {name} is quantised ({cache.dtype}), and neither its format nor its scales can be told from "
            "that, which both sides would have to share: run vLLM with --kv-cache-dtype auto"
        )
    layers, ratio = [_number(name)], cache.shape[0] // num_blocks
    key: int = spec.head_size
    value: int = spec.head_size_v
    if not value:
        _check_backend(name, layer, _LATENT)
        yield CacheTensor(cache[:, 0], "block token dim", layers=layers, kernel_blocks_per_id=ratio)
        return
    heads = place.heads(total_heads, spec.num_kv_heads)
    if _check_backend(name, layer, _AS_SEEN | _CPU) in _CPU:
        _check_kernel(name, layer, cache, key, value)
        _check_written(name, layer, cache, key)
        for half, part, axes in _by_columns(cache, key):
            yield CacheTensor(part, axes, layers=layers, heads=heads, kv=half, kernel_blocks_per_id=ratio)
        return
    if key == value:
        yield CacheTensor(cache, "LBHNC", layers=layers, heads=heads, kernel_blocks_per_id=ratio)
        return
    for half, part in (("k", cache[..., :key]), ("v", cache[..., key:])):
        yield CacheTensor(part, "block head token dim", layers=layers, heads=heads, kv=half, kernel_blocks_per_id=ratio)


def _check_backend(name: str, layer: Any, known: Mapping[str, str]) -> str:
    """The name of the attention backend of a layer, which is one of these."""
    advice = f"run vLLM with --attention-backend and one that is known ({', '.join(known)}), or without this connector"
    if layer is None:
        raise GeometryError(f"vLLM has no attention layer {name}, so what its backend stores cannot be told: {advice}")
    backend: Any = layer.get_attn_backend()
    if backend is None:
        raise GeometryError(f"vLLM names no attention backend for {name}, so what it stores cannot be told: {advice}")
    while _overrides(backend) == ["get_builder_cls"]:
        (backend,) = backend.__bases__  # made by vLLM for chunked local attention, and stores as its base does
    path = f"{backend.__module__}.{backend.__qualname__}"
    for known_name, known_class in known.items():
        if path == f"{_HOME}.{known_class}":
            return known_name
    raise GeometryError(
        f"the cache of {name} is written by attention backend {backend.get_name()} ({path}), of which this connector "
        f"does not know where it stores what: {advice}"
    )


def _overrides(kind: type) -> list[str]:
    """What a class has of its own, but for what every class has."""
    return [name for name in vars(kind) if not name.startswith("_")]


def _check_kernel(name: str, layer: Any, cache: Any, key: int, value: int) -> None:
    """Refuse what else the CPU attention stores than `_by_columns` says; its layers name the kernel that writes."""
    kernel = getattr(layer, "isa", None)
    if kernel not in _BY_COLUMNS or key != value:
        raise GeometryError(
            f"vLLM's CPU attention stores {name} ({cache.dtype}, heads of {key} and {value}) by its instruction set "
            f"{kernel!r}, in an order that this connector cannot describe; it knows {' and '.join(_BY_COLUMNS)}, "
            "with K and V of one size: where AMX is taken for bfloat16, run vLLM with --dtype float32 or float16 on "
            "both sides"
        )


def _check_written(name: str, layer: Any, cache: Any, size: int) -> None:
    """Have the CPU attention write a block of its own, and look for K and V where `_by_columns` has them."""
    import torch

    _, heads, tokens, _ = cache.shape
    key = (torch.arange(tokens * heads * size) % 251).view(tokens, heads, size).to(cache.dtype)  # exact in bfloat16
    block = cache.new_zeros(1, *cache.shape[1:])
    layer.impl.do_kv_cache_update(layer, key, -key, block, torch.arange(tokens))
    (_, keys, _), (_, values, _) = _by_columns(block, size)
    if not (keys[0].equal(key.permute(1, 2, 0)) and values[0].equal(-key.transpose(0, 1))):
        raise GeometryError(
            f"vLLM's CPU attention wrote a block of {name} ({cache.dtype}, instruction set {layer.isa!r}) in an order "
            "that this connector does not know; it knows that of vLLM 0.32.0: run this one, or look for a newer kvxfer"
        )


def _by_columns(cache: Any, size: int) -> Iterator[tuple[str, Any, str]]:
    """K and V of a cache of vLLM's CPU attention, with the names of their axes.

    Of what a head has in a block, the first half is K by columns, the second V by rows.
    """
    blocks, heads, tokens, _ = cache.shape
    if not cache[0, 0].is_contiguous():
        raise GeometryError(
            f"vLLM's CPU attention has a cache of shape {tuple(cache.shape)}, strides {cache.stride()}: what a head "
            "has in a block does not lie together, so this connector cannot tell K from V in it"
        )
    halves = cache.view(blocks, heads, 2, tokens * size)
    yield "k", halves[:, :, 0].unflatten(-1, (size, tokens)), "block head dim token"
    yield "v", halves[:, :, 1].unflatten(-1, (tokens, size)), "block head token dim"


def _number(name: str) -> int:
    """The global number of a layer, which is the one number in its name."""
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    if len(numbers) != 1:
        raise GeometryError(f"the name {name!r} has {len(numbers)} numbers, so the layer's cannot be told")
    return int(numbers[0])
