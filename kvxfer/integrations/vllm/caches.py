"""vLLM's cache tensors in kvxfer's words.

vLLM gives one view a layer, whose axes are block, head, token and content, in this order whatever the order in memory
is: strides tell. Content is K and V side by side; of latent attention (MLA) it is one vector, and there is no head.
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


def describe(caches: Mapping[str, Any], config: Any, place: Place, total_heads: int) -> dict[str, list[CacheTensor]]:
    """Describe the caches of a worker.

    Args:
        caches: Views by the names of vLLM's layers. Layers that use another's cache are in there again.
        config: vLLM's `KVCacheConfig`.
        place: This worker's among those that share the heads.
        total_heads: KV heads of the model.

    Returns:
        Tensors by the names of vLLM's layers.

    Raises:
        GeometryError: If a cache is of a kind that cannot be handed over, or a layer's number cannot be told.
    """
    group = only_group(config)
    found: dict[str, list[CacheTensor]] = {}
    for name in group.layer_names:
        if name in caches:
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            found[name] = list(_tensors(name, caches[name], spec, config.num_blocks, place, total_heads))
    numbers = [tensors[0].layers[0] for tensors in found.values()]
    if len(set(numbers)) < len(numbers):
        raise GeometryError(f"layers {sorted(n for n in set(numbers) if numbers.count(n) > 1)} have several caches")
    return found


def _tensors(
    name: str, cache: Any, spec: Any, num_blocks: int, place: Place, total_heads: int
) -> Iterator[CacheTensor]:
    kind = type(spec).__name__
    odd = {"num_head_slots": None, "state_content_bytes": None, "tokens_per_state": 1}
    packed = [field for field, plain in odd.items() if getattr(spec, field, plain) != plain]
    if kind not in _KNOWN or packed:
        raise GeometryError(
            f"the cache of {name} is a {kind}{''.join(f' with {field}' for field in packed)}, which this connector "
            f"cannot describe; it knows {' and '.join(sorted(_KNOWN))} of plain elements"
        )
    layers, ratio = [_number(name)], cache.shape[0] // num_blocks
    key: int = spec.head_size
    value: int = spec.head_size_v
    if not value:
        yield CacheTensor(cache[:, 0], "block token dim", layers=layers, kernel_blocks_per_id=ratio)
        return
    heads = place.heads(total_heads, spec.num_kv_heads)
    if key == value:
        yield CacheTensor(cache, "LBHNC", layers=layers, heads=heads, kernel_blocks_per_id=ratio)
        return
    for half, part in (("k", cache[..., :key]), ("v", cache[..., key:])):
        yield CacheTensor(part, "block head token dim", layers=layers, heads=heads, kv=half, kernel_blocks_per_id=ratio)


def _number(name: str) -> int:
    """The global number of a layer, which is the one number in its name."""
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    if len(numbers) != 1:
        raise GeometryError(f"the name {name!r} has {len(numbers)} numbers, so the layer's cannot be told")
    return int(numbers[0])
