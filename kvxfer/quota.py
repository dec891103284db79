"""Places that peers share: bounded in all, and no peer can take every one of them."""

from collections.abc import Hashable
from typing import Final

__all__ = ["Quota"]

_GREED: Final = 3
"""A peer may hold so many times as many places as are free: three quarters of all of them while it is alone."""


class Quota:
    """Counts places by peer.

    A peer gets another place while it holds less than three times as many as are free (a dynamic threshold, as switches
    have for the buffers that their ports share). So a peer that is alone has three quarters, `n` peers that all want as
    many as they can get have equal parts, and there is always a place for one that has none yet, until all are taken.

    Args:
        limit: Places in all.
    """

    def __init__(self, limit: int) -> None:
        self.limit: Final = limit
        self._held: Final[dict[Hashable, int]] = {}
        self._taken = 0

    def __len__(self) -> int:
        return self._taken

    def held(self, peer: Hashable) -> int:
        """Places that a peer holds."""
        return self._held.get(peer, 0)

    def take(self, peer: Hashable) -> bool:
        """Take a place, to be given back with `give`. False if there is none for this peer now."""
        held = self._held.get(peer, 0)
        if held >= _GREED * (self.limit - self._taken):
            return False
        self._held[peer] = held + 1
        self._taken += 1
        return True

    def give(self, peer: Hashable) -> None:
        """Give a place back.

        Raises:
            ValueError: If the peer holds none.
        """
        if peer not in self._held:
            raise ValueError(f"{peer!r} holds no place")
        self._held[peer] -= 1
        self._taken -= 1
        if not self._held[peer]:
            del self._held[peer]
