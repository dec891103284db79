"""What the two processes of the demo agree on beforehand: model, prompts, caches, and what they tell their parent."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from kvxfer.telemetry import TransferStats

__all__ = [
    "DECODE_BLOCK_TOKENS",
    "PREFILL_BLOCK_TOKENS",
    "Decoded",
    "Fetched",
    "Layer",
    "News",
    "Offered",
    "Prefilled",
    "Reference",
    "Script",
]

PREFILL_BLOCK_TOKENS: Final = 16
DECODE_BLOCK_TOKENS: Final = 32
_VOCABULARY: Final = 512


@dataclass(frozen=True, slots=True)
class Script:
    """Everything about one run of the demo."""

    route: str = "auto"
    device: str = "cpu"
    sabotage: str = ""  # damage done to the received cache before it is checked, to show that the checks would notice
    prompts: tuple[int, ...] = (1, 15, 17, 64, 130, 400, 1000, 1500)  # tokens of each
    steps: int = 24  # tokens to decode for each
    layers: int = 8
    kv_heads: int = 8  # there are twice as many query heads
    head_dim: int = 128
    hidden: int = 256
    seed: int = 7  # of weights, prompts and block order

    @property
    def token_bytes(self) -> int:
        """K and V of one token in all layers (float32)."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 4

    @property
    def total_bytes(self) -> int:
        """K and V of all prompts."""
        return self.token_bytes * sum(self.prompts)

    def token_ids(self, prompt: int) -> list[int]:
        """The tokens of a prompt; the same in both processes."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + prompt)
        drawn: Any = torch.randint(0, _VOCABULARY, (self.prompts[prompt],), generator=generator)
        return [int(token) for token in drawn]

    def model(self, device: str) -> Any:
        """The model; the same weights in both processes."""
        from kvxfer.tools.demo.model import tiny_llama

        return tiny_llama(
            self.seed,
            layers=self.layers,
            heads=2 * self.kv_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            hidden=self.hidden,
            vocabulary=_VOCABULARY,
            device=device,
        )

    def config(self, role: str, folder: Path) -> Mapping[str, Any]:
        """Settings of the worker of one side, which listens in `folder`: that is removed whatever becomes of it."""
        return {"engine": role, "model": f"tiny-llama-{self.seed}", "route": self.route, "arena_bytes": "128MiB",
                "chunk_bytes": "8MiB", "listen": f"unix:{folder / role}.sock"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Offered:
    """Prefill: a prompt is on offer; its ticket goes to the decode side."""

    prompt: int
    ticket: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Layer:
    """Prefill: the model has written this layer of a prompt. Decode: it is in place."""

    prompt: int
    layer: int
    landed: bool


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prefill: the prompt is complete; what its cache and its continuation must look like."""

    prompt: int
    # by layer, of K and of V, token by token in logical order
    digests: list[list[list[bytes]]] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Reference:
    """Prefill: what one process alone generates."""

    prompt: int
    tokens: list[int]
    stats: TransferStats


@dataclass(frozen=True, slots=True)
class Fetched:
    """Decode: the prompt's cache is here."""

    prompt: int
    stats: TransferStats


@dataclass(frozen=True, slots=True)
class Decoded:
    """Decode: tokens generated, and the first difference between the caches if there is one."""

    prompt: int
    tokens: list[int]  # the first one came with the cache
    difference: str


News: TypeAlias = Offered | Layer | Prefilled | Reference | Fetched | Decoded
