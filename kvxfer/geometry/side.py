"""How one side addresses the tokens of a group: which of its blocks holds a token, and where in that."""

from dataclasses import dataclass, field
from math import gcd
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.geometry.spec import TensorSpec

__all__ = ["RowSide"]

I64: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowSide:
    """How one side addresses tokens of a group: tokens per kernel block, kernel blocks per id, interleaving.

    `block_tokens` counts token rows, and is 0 for state.

    Attributes:
        is_state: True without a token axis.
        id_tokens: Tokens that one block id covers on this rank; 0 for state.
    """

    block_tokens: int
    block_ratio: int
    tokens_per_row: int
    rank: int
    of: int
    chunk: int
    null_block: int | None
    is_state: bool = field(init=False, repr=False, compare=False)
    id_tokens: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_state", self.block_tokens == 0)
        object.__setattr__(self, "id_tokens", self.block_tokens * self.tokens_per_row * self.block_ratio)

    @classmethod
    def of_tensor(cls, spec: TensorSpec) -> "RowSide":
        """The row addressing of one cache tensor."""
        return cls(
            0 if spec.is_state else spec.count("token"),
            spec.block_ratio,
            spec.tokens_per_row,
            spec.tokens.rank,
            spec.tokens.of,
            spec.tokens.chunk,
            spec.null_block,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """All but the null block: numbers, which have an order."""
        return (self.block_tokens, self.block_ratio, self.tokens_per_row, self.rank, self.of, self.chunk)

    @property
    def grid(self) -> int:
        """Rows never cross a multiple of this many token rows."""
        return gcd(self.block_tokens, self.chunk) if self.of > 1 else self.block_tokens

    def holds(self, tokens: I64) -> NDArray[np.bool_]:
        """Which of these tokens are on this rank."""
        if self.of == 1:
            return np.ones(len(tokens), np.bool_)
        return np.asarray((tokens // self.chunk) % self.of == self.rank)

    def local(self, tokens: I64) -> I64:
        """How many tokens before these this rank holds: where in its blocks they are, if it holds them."""
        if self.of == 1:
            return tokens
        turn = self.chunk * self.of
        return tokens // turn * self.chunk + np.clip(tokens % turn - self.rank * self.chunk, 0, self.chunk)

    def most(self, tokens: int) -> int:
        """How many token rows this rank holds of so many neighbouring tokens, at most."""
        turns, rest = divmod(tokens, self.chunk * self.of)
        return (turns * self.chunk + min(rest, self.chunk)) // self.tokens_per_row

    def kernel_blocks(self, ids: I64) -> I64:
        """Kernel block numbers of a list of block ids."""
        if self.block_ratio == 1:
            return ids
        return (ids[:, None] * self.block_ratio + np.arange(self.block_ratio, dtype=np.int64)).ravel()
