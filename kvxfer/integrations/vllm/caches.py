"""vLLM's cache tensors in kvxfer's words.

vLLM gives one view a layer, whose axes are block, head, token and content, in this order whatever the order in memory
is: strides tell. Content is K and V side by side; of latent attention (MLA) it is one vector, and there is no head.

That is what the view says, and an attention backend may store something else in it: nothing fails then, and the tokens
are wrong. So each is made to show where it has K and V, and if that is elsewhere, that is what is described.

Recurrent state (Mamba, short convolution, a gated delta rule) has no tokens: a block is a page that holds what a layer
remembers of all tokens so far, and the layer is bound to views of its parts. These are described, each as it is.

What an indexer keeps beside the cache of a layer (sparse attention) is quantised, in an order that its kernel alone
knows. So nothing is said of the inside of a page: it goes as it is, to an engine of the same release and platform.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import Any, Final

from kvxfer.errors import GeometryError
from kvxfer.geometry import CacheTensor
from kvxfer.integrations.heads import Place
from kvxfer.telemetry import logger

__all__ = ["INDEXER", "BlockGroup", "Model", "backend_name", "block_groups", "describe"]

_WINDOWED: Final = "SlidingWindowSpec"
_RECURRENT: Final = "MambaSpec"
_KNOWN: Final = frozenset({"FullAttentionSpec", "MLAAttentionSpec", _WINDOWED})
"""vLLM's classes of caches that hold every token of a request, or the last ones."""
INDEXER: Final = "indexer"
"""What vLLM calls the part that the cache of one plays, and what our name of its pages begins with."""

_DRAFTED: Final = "draft_model."
"""What names of a draft model's layers begin with."""

_log: Final = logger("kvxfer.vllm")


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Layers that share block ids, and what a request keeps of them."""

    name: str
    index: int  # in vLLM's lists of groups
    block_tokens: int
    window: int | None  # so many tokens up to the one that is computed are read; none: all
    state: bool = False  # what is left of all tokens so far is, and lies in the block that the last of them would be in
    indexed: bool = False  # layers of it have an indexer, whose cache goes by whole pages

    def live(self, tokens: int, *, whole: bool) -> int:
        """The first token that is still held once so many are computed; or the first of the block that holds it."""
        first = 0 if self.window is None else max(0, tokens + 1 - self.window)
        return first - first % self.block_tokens if whole else first


@dataclass(frozen=True, slots=True)
class Model:
    """What a model's caches do not say: where layers of what speculates begin, and how many heads all ranks have."""

    layers: int  # of the model itself
    heads: int  # KV heads
    draft_heads: int | None = None  # likewise of what speculates; None: as many

    def number(self, name: str) -> int:
        """The global number of a layer, which is the one number in its name.

        Those of what speculates come behind the model's own. EAGLE's and MTP's are numbered so; a draft model's begin
        at 0 again.

        Raises:
            GeometryError: If there are several numbers, or none.
        """
        numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
        if len(numbers) != 1:
            raise GeometryError(f"the name {name!r} has {len(numbers)} numbers, so the layer's cannot be told")
        return int(numbers[0]) + (self.layers if name.startswith(_DRAFTED) else 0)

    def total_heads(self, number: int) -> int:
        """KV heads of a layer, those of all ranks together."""
        return self.heads if number < self.layers or self.draft_heads is None else self.draft_heads


def block_groups(config: Any) -> list[BlockGroup]:
    """The groups that are handed over, of vLLM's `KVCacheConfig`.

    Raises:
        GeometryError: If the layers of one see windows of different sizes, or it is in the host's memory.
    """
    found: list[BlockGroup] = []
    held = [(at, group) for at, group in enumerate(config.kv_cache_groups) if group.enable_kv_transfer]
    seen: Counter[str] = Counter()
    for at, group in held:
        spec = group.kv_cache_spec
        if getattr(group, "host_resident", False):
            raise GeometryError("cache blocks in the host's memory (HiSparse) cannot be handed over")
        every = list(getattr(spec, "kv_cache_specs", {"": spec}).values())
        windows = {_window(one) for one in every}
        if len(windows) != 1:
            raise GeometryError(f"layers of one group of cache blocks have windows of {windows} tokens")
        (window,) = windows
        state = _is_state(every[0])
        name = "state" if state else "full" if window is None else f"window-{window}"
        seen[name] += 1
        name = "default" if len(held) == 1 else f"{name}.{seen[name]}"
        found.append(BlockGroup(name, at, spec.block_size, window, state, any(map(_is_index, every))))
    return found


def _window(spec: Any) -> int | None:
    """What vLLM keeps of a request for these layers: with tokens that are read again by what speculates."""
    if _is_state(spec):
        return 2  # the next token needs what is left of the one before it
    return spec.sliding_window + spec.extra_retained_tokens if type(spec).__name__ == _WINDOWED else None


def _is_state(spec: Any) -> bool:
    """Whether these layers are recurrent, so that a block of theirs holds no tokens."""
    return type(spec).__name__ == _RECURRENT


def _is_index(spec: Any) -> bool:
    """Whether this is what an indexer keeps beside the cache of a layer."""
    return getattr(spec, "cache_role", None) == INDEXER


def describe(
    caches: Mapping[str, Any],
    config: Any,
    place: Place,
    model: Model,
    layers: Mapping[str, Any],
    *,
    release: str = "",
    trusted: bool = False,
) -> dict[str, list[CacheTensor]]:
    """Describe the caches of a worker.

    Args:
        caches: Views by the names of vLLM's layers. Layers that use another's cache are in there again.
        config: vLLM's `KVCacheConfig`.
        place: This worker's among those that share the heads.
        model: The model.
        layers: vLLM's attention layers by their names, once their backends are set up and their caches are bound.
        release: vLLM's: of another one, pages that are not looked into may hold something else.
        trusted: Believe what the views say.

    Returns:
        Tensors by the names of vLLM's layers.

    Raises:
        GeometryError: If a cache is of a kind that cannot be handed over, its backend does not show where it has K and
            V, or has them where no axes say, or a layer's number cannot be told.
    """
    found: dict[str, list[CacheTensor]] = {}
    shown: Counter[tuple[str, str]] = Counter()
    whole: Counter[tuple[str, str]] = Counter()
    groups = block_groups(config)
    for group in groups:
        of = config.kv_cache_groups[group.index]
        specs = getattr(of.kv_cache_spec, "kv_cache_specs", {})
        held_here = {name: specs.get(name, of.kv_cache_spec) for name in of.layer_names if name in caches}
        numbers = Counter((model.number(name), _is_index(spec)) for name, spec in held_here.items())
        if several := [number for (number, _), count in numbers.items() if count > 1]:
            raise GeometryError(f"layers {sorted(several)} have several caches in one group of cache blocks")
        for name, spec in held_here.items():
            number = model.number(name)
            held = {"layers": [number], "group": group.name}
            if _is_index(spec):
                pages, how = _index(name, caches[name], spec, config.num_blocks, layers.get(name), held, release)
                found[name], whole[how] = [pages], whole[how] + 1
                continue
            if group.state:
                found[name], how = _states(name, caches[name], spec, place, layers.get(name), held)
                shown[how] += 1
                continue
            said = _said(name, caches[name], spec, config.num_blocks, place, model.total_heads(number), held)
            if trusted:
                found[name] = said
            else:
                found[name], how = _shown(name, caches[name], spec, said, layers.get(name))
                shown[how] += 1
    # pages are asked for as if they were full: other layers need room for as many tokens, and state is of one alone
    page = max((one.block_tokens for one in groups if one.indexed), default=0)
    if page and any(one.state or one.block_tokens % page for one in groups):
        others = ", ".join("state" if one.state else str(one.block_tokens) for one in groups)
        raise GeometryError(
            f"an indexer has pages of {page} tokens, which go whole and do not fill blocks of all groups ({others})"
        )
    for (backend, layout), count in shown.items():
        _log.info("layout_proved", backend=backend, count=count, value=layout)
    for (backend, layout), count in whole.items():
        _log.info("layout_skipped", backend=backend, count=count, value=layout, why="an indexer's pages go whole")
    if trusted:
        _log.warning("layout_trusted", count=len(found), why="trust_layout: if it is another one, tokens are wrong")
    return found


def _said(
    name: str, cache: Any, spec: Any, num_blocks: int, place: Place, total_heads: int, held: dict[str, Any]
) -> list[CacheTensor]:
    """A cache as its view says."""
    kind = type(spec).__name__
    odd = {"num_head_slots": None, "state_content_bytes": None, "tokens_per_state": 1}
    packed = [field for field, plain in odd.items() if getattr(spec, field, plain) != plain]
    if kind not in _KNOWN or packed:
        raise GeometryError(
            f"the cache of {name} is a {kind}{''.join(f' with {field}' for field in packed)}, which this connector "
            f"cannot describe; it knows {' and '.join(sorted(_KNOWN))} of plain elements"
        )
    if not cache.dtype.is_floating_point or cache.element_size() < 2:
        raise GeometryError(
            f"the cache of {name} is quantised ({cache.dtype}), and neither its format nor its scales can be told from "
            "that, which both sides would have to share: run vLLM with --kv-cache-dtype auto"
        )
    key, value = spec.head_size, spec.head_size_v
    if (cache.shape[1], *cache.shape[3:]) != (spec.num_kv_heads, key + value):
        raise GeometryError(
            f"the cache of {name} has shape {tuple(cache.shape)}, which is not block, head, token and content of "
            f"{spec.num_kv_heads} heads of {key} and {value} elements"
        )
    held = held | {"kernel_blocks_per_id": cache.shape[0] // num_blocks}
    if not value:
        return [CacheTensor(cache[:, 0], "block token dim", **held)]
    held["heads"] = place.heads(total_heads, spec.num_kv_heads)
    if key == value:
        return [CacheTensor(cache, "LBHNC", **held)]
    halves = zip("kv", cache.split([key, value], dim=-1), strict=True)
    return [CacheTensor(part, "block head token dim", kv=half, **held) for half, part in halves]


def _shown(
    name: str, cache: Any, spec: Any, said: list[CacheTensor], layer: Any
) -> tuple[list[CacheTensor], tuple[str, str]]:
    """A cache as its backend writes it, as the view says or not; and which backend has it how."""
    from kvxfer.integrations.vllm.layout import Probe  # brings torch, which the scheduler's process does without

    sizes = {"k": spec.head_size, "v": spec.head_size_v} if spec.head_size_v else {"": spec.head_size}
    probe = Probe(name, layer, cache, sizes)
    if probe.backend.startswith("CPU_MLA "):
        raise GeometryError(
            f"the cache of {name} is written by attention backend {probe.backend}, which makes other tokens of a cache "
            "than of the prompt that is in it, so vLLM runs it without prefix caching; this connector cannot either"
        )
    if probe.shows(said):
        return said, (probe.backend, "as its view says")
    held = {field: getattr(said[0], field) for field in ("group", "layers", "heads", "kernel_blocks_per_id")}
    found = [CacheTensor(view, axes, kv=half or None, **held) for half, view, axes in probe.found()]
    if not probe.shows(found):
        raise probe.refusal("the next time they were elsewhere")
    return found, (probe.backend, ", ".join(f"{one.kv or ''} {one.axes}".strip() for one in found))


def backend_name(backend: Any) -> str:
    """An attention backend by vLLM's name, which is not unique, and its class."""
    return f"{backend.get_name()} ({backend.__module__}.{backend.__qualname__})"


def _index(
    name: str, cache: Any, spec: Any, num_blocks: int, layer: Any, held: dict[str, Any], release: str
) -> tuple[CacheTensor, tuple[str, str]]:
    """The pages of an indexer, each as a row that stands for all of its tokens; and which backend has what in them."""
    bound: Any = getattr(layer, "kv_cache", None)
    if bound is None or bound.data_ptr() != cache.data_ptr() or not cache[0].is_contiguous():
        raise GeometryError(
            f"the cache of {name} is an indexer's, and no layer is bound to its pages, or they have gaps "
            f"(shape {tuple(cache.shape)}, strides {cache.stride()}): it cannot be handed over by whole pages"
        )
    import torch

    backend, pages = layer.get_attn_backend(), cache.flatten(1).view(torch.uint8).unsqueeze(1)
    ratio = len(pages) // num_blocks
    held |= {"kernel_blocks_per_id": ratio, "tokens_per_row": spec.block_size // ratio}
    # where all of this is equal, so is what is in a page; AMD's GPUs do not all have the same 8 bits for a number
    cuda: Any = torch.cuda
    chip: str = cuda.get_device_properties(cache.device).gcnArchName if torch.version.hip else cache.device.type
    inside = f"{spec.dtype} {list(bound.shape[1:])}"
    layout = f"vllm {release} on {chip}: {inside}, {getattr(spec, 'tokens_per_state', 1)} tokens a state"
    digest = blake2b(f"{backend.__module__}.{backend.__qualname__} {layout}".encode(), digest_size=4).hexdigest()
    pages = CacheTensor(pages, "block token dim", part=f"{INDEXER} {backend.__qualname__[:64]} {digest}", **held)
    return pages, (backend_name(backend), f"{layout} ({digest})")


def _states(
    name: str, pages: Any, spec: Any, place: Place, layer: Any, held: dict[str, Any]
) -> tuple[list[CacheTensor], tuple[str, str]]:
    """The parts of a recurrent layer's state, once each is shown to lie inside of its page; and who has them how."""
    if spec.num_speculative_blocks:
        raise GeometryError(
            f"the cache of {name} is a {_RECURRENT} with num_speculative_blocks={spec.num_speculative_blocks}: of the "
            "states of guessed tokens this connector cannot tell which is a request's; run vLLM without speculation"
        )
    kind: str = spec.mamba_type.name.lower()
    size, step = pages[0].numel() * pages.element_size(), pages.stride(0) * pages.element_size()
    due: list[tuple[Any, ...]] = []
    end = 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        due.append(((pages.shape[0], *shape), dtype, end))
        end += prod(shape) * dtype.itemsize
    views: list[Any] = list(getattr(layer, "kv_cache", ()))
    seen = [(tuple(view.shape), view.dtype, view.data_ptr() - pages.data_ptr()) for view in views]
    whole = all(view[0].is_contiguous() and view.stride(0) * view.element_size() == step for view in views)
    if seen != due or not whole or end > size:
        raise GeometryError(
            f"the state of {name} ({kind}) is not part by part in its pages of {size} bytes, {step} apart: it is "
            f"bound to {seen} of strides {[view.stride() for view in views]}, not {due} (shape, dtype, first byte)"
        )
    # a rank has a part of it that only as many ranks cut alike, or all of it
    held["heads"] = range(1) if spec.tp_replicated else range(place.rank, place.rank + 1)
    parts = [f"{kind}.{at} {'x'.join(map(str, shape))}" for at, shape in enumerate(spec.shapes)]
    tensors = [
        CacheTensor(view.flatten(1), "block dim", part=part, **held) for part, view in zip(parts, views, strict=True)
    ]
    return tensors, (backend_name(layer.get_attn_backend()), "state: " + ", ".join(parts))
