"""sglang's memory in kvxfer's words: pools of pages given as addresses, and rows of metadata.

Of a pool sglang tells address, length and bytes of a page for each layer, of K and V apart or of latents alone; not the
type of an element. Both sides of a transfer have the same one, which is compared when they meet, so bytes are copied.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import torch

from kvxfer.errors import ConfigError, GeometryError
from kvxfer.geometry import CacheTensor
from kvxfer.integrations.heads import Place
from kvxfer.mapped.host import tensor_at

__all__ = ["MAX_ROW_BYTES", "Rows", "describe"]

MAX_ROW_BYTES: Final = 65_536
"""A row of metadata travels as the payload of an offer."""


class Rows:
    """Metadata of requests: one row in each of several buffers of CPU memory.

    Raises:
        ConfigError: If a row is too long to travel.
    """

    def __init__(self, addresses: Sequence[int], row_bytes: Sequence[int]) -> None:
        self._buffers: Final = tuple(zip(addresses, row_bytes, strict=True))
        self.nbytes: Final = sum(row_bytes)
        if self.nbytes > MAX_ROW_BYTES:
            raise ConfigError(
                f"a row of sglang's metadata has {self.nbytes} bytes, and {MAX_ROW_BYTES} travel with a request: "
                "hidden states for speculative decoding or sampling masks (--sampling-mask-max-tokens) make it so long"
            )

    def read(self, index: int) -> bytes:
        """One row of every buffer."""
        return b"".join(ctypes.string_at(address + index * size, size) for address, size in self._buffers)

    def write(self, index: int, row: bytes) -> bool:
        """Write what `read` gave on the other side. False, and nothing is written, if its rows are others."""
        if len(row) != self.nbytes:
            return False
        at = 0
        for address, size in self._buffers:
            ctypes.memmove(address + index * size, row[at : at + size], size)
            at += size
        return True


def describe(args: Any, device: torch.device, place: Place, total_heads: int, *, latent: bool) -> list[CacheTensor]:
    """Describe the pools of a rank.

    Args:
        args: sglang's `KVArgs`.
        device: Where they are.
        place: This rank's among those that share the heads.
        total_heads: KV heads of the model; no matter if `latent`.
        latent: Whether a layer has one vector for each token, and no heads (MLA).

    Raises:
        GeometryError: If the model keeps what this cannot describe.
    """
    _check(args)
    entries = list(zip(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, strict=True))
    layers = len(entries) if latent else len(entries) // 2
    if not layers or (not latent and len(entries) % 2):
        raise GeometryError(f"sglang names {len(entries)} buffers, which are not K and V of each layer")
    first = getattr(args, "prefill_start_layer", 0) or 0
    numbers = list(args.kv_layer_ids) or [first + at % layers for at in range(len(entries))]
    halves = [None if latent else "kv"[at // layers] for at in range(len(entries))]
    return [
        _tensor(*entry, args.page_size, device, number, half, place, total_heads)
        for entry, number, half in zip(entries, numbers, halves, strict=True)
    ]


def _check(args: Any) -> None:
    odd = {
        "state_types": "recurrent state, sliding windows or sparse indexers beside its pages",
        "num_draft_entries": "pages of a draft model",
        "kv_layout": "pages of a layout of their own",
        "mla_compression_ratios": "compressed pages",
    }
    for field, what in odd.items():
        if getattr(args, field, None):
            raise GeometryError(f"this model has {what} (KVArgs.{field}), which cannot be handed over by kvxfer yet")
    if "DRAM" in getattr(args, "kv_data_mem_kinds", ()):
        raise GeometryError(
            "this engine keeps pages in host memory beside a GPU, which one kvxfer worker does not take"
        )


def _tensor(
    address: int,
    nbytes: int,
    page_bytes: int,
    page_tokens: int,
    device: torch.device,
    layer: int,
    half: str | None,
    place: Place,
    total_heads: int,
) -> CacheTensor:
    pages, token_bytes = nbytes // page_bytes, page_bytes // page_tokens
    memory = tensor_at(address, pages * page_bytes, device)
    if half is None:
        return CacheTensor(memory.view(pages, page_tokens, token_bytes), "block token dim", layers=[layer])
    held = max(1, total_heads // place.ranks)
    if token_bytes % held:
        raise GeometryError(f"{token_bytes} bytes of a token are no whole number for each of {held} heads")
    shaped = memory.view(pages, page_tokens, held, token_bytes // held)
    heads = place.heads(total_heads, held)
    return CacheTensor(shaped, "block token head dim", layers=[layer], heads=heads, kv=half)
