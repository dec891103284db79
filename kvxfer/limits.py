"""Bounds that more than one layer checks."""

from typing import Final

__all__ = ["MAX_SCALES", "MAX_WORLD"]

MAX_SCALES: Final = 65_536
"""Numbers in the scale of one cache tensor at most."""
MAX_WORLD: Final = 16_384
"""Ranks of an engine at most: what a card and a ticket may name."""
