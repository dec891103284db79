"""What the two processes of the demo agree on beforehand: model, prompts, caches, and what they tell their parent."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from kvxfer.errors import UsageError
from kvxfer.telemetry import TransferStats

__all__ = [
    "DECODE_BLOCK_TOKENS",
    "PREFILL_BLOCK_TOKENS",
    "Decoded",
    "Fetched",
    "LayerLanded",
    "LayerReady",
    "News",
    "Offered",
    "Prefilled",
    "Reference",
    "Sabotage",
    "Script",
]

PREFILL_BLOCK_TOKENS: Final = 16
DECODE_BLOCK_TOKENS: Final = 32
_VOCABULARY: Final = 512


class Sabotage(Enum):
    """Damage done to the received cache before it is checked, to show that the checks would notice."""

    NONE = "none"
    ZERO_BLOCK = "zero-block"
    SWAP_BLOCKS = "swap-blocks"
    SWAP_HEADS = "swap-heads"
    CUT_TAIL = "cut-tail"


@dataclass(frozen=True, slots=True)
class Script:
    """Everything about one run of the demo."""

    route: str = "auto"
    device: str = "cpu"
    sabotage: Sabotage = Sabotage.NONE
    prompts: tuple[int, ...] = (1, 15, 17, 64, 130, 400, 1000, 1500)  # tokens of each
    steps: int = 24  # tokens to decode for each
    layers: int = 8
    kv_heads: int = 8  # there are twice as many query heads
    head_dim: int = 128
    hidden: int = 256
    seed: int = 7  # of weights, prompts and block order

    def __post_init__(self) -> None:
        """Refuse what would show nothing: a run without prompts, or damage that these prompts cannot take.

        Raises:
            UsageError: Naming what is missing.
        """
        if not self.prompts or min(self.prompts) < 1 or self.steps < 1:
            raise UsageError("the demo needs at least one prompt of at least one token, and one step")
        cannot = {
            Sabotage.SWAP_BLOCKS: max(self.prompts) <= DECODE_BLOCK_TOKENS and "a prompt of two blocks",
            Sabotage.CUT_TAIL: not any(n % DECODE_BLOCK_TOKENS for n in self.prompts) and "a block that is partly full",
            Sabotage.SWAP_HEADS: self.kv_heads < 2 and "two heads",
        }.get(self.sabotage)
        if cannot:
            raise UsageError(f"sabotage {self.sabotage.value} needs {cannot}")

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
class LayerReady:
    """Prefill: the model has written this layer of a prompt."""

    prompt: int
    layer: int


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
class LayerLanded:
    """Decode: this layer of a prompt is in place."""

    prompt: int
    layer: int


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
    damaged: bool  # whether the sabotage changed anything of this prompt


News: TypeAlias = Offered | LayerReady | Prefilled | Reference | LayerLanded | Fetched | Decoded
