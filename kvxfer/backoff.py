"""How long to wait before something that failed is tried again."""

from collections.abc import Callable
from typing import Final

__all__ = ["Backoff"]

_DRAWN_BYTES: Final = 4


class Backoff:
    """Waits that double, each drawn at random from the upper half of what it may be.

    The draw is what keeps many that failed at the same moment, as all do when a peer dies, from coming back at the same
    moment too.

    Args:
        token: Draws random bytes, as `Runtime.token` does.
        least: Seconds that the first wait takes at most.
        most: Seconds that any wait takes at most.
    """

    def __init__(self, token: Callable[[int], bytes], *, least: float, most: float) -> None:
        self._token: Final = token
        self._most: Final = most
        self._next = least

    def wait(self) -> float:
        """Seconds to wait after one more failure."""
        longest, self._next = self._next, min(2 * self._next, self._most)
        drawn = int.from_bytes(self._token(_DRAWN_BYTES), "little") / (1 << 8 * _DRAWN_BYTES)
        return longest * (1 + drawn) / 2
