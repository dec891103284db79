"""Bounds that more than one layer checks."""

from typing import Final

__all__ = ["MAX_WORLD"]

MAX_WORLD: Final = 16_384
"""Ranks of an engine at most: what a card and a ticket may name."""
