"""Who counts on the transport to make progress here while nothing of our own is under way, and how often it has to."""

import threading
from collections.abc import Callable
from typing import Final

__all__ = ["Holds"]

_GROWTH: Final = 10_000.0
"""With nothing but a hold the sleep is this fraction of the wait: 0.1 ms for the first second, 1 ms after ten."""


class Holds:
    """Counts them; from any thread.

    Args:
        often: Seconds between two passes for who needs them; grows to `seldom` while nothing is done here.
        seldom: Seconds between two for who most likely does not.
    """

    def __init__(self, often: float, seldom: float) -> None:
        self._often: Final = often
        self._seldom: Final = seldom
        self._lock: Final = threading.Lock()
        self._held = 0
        self._needed = 0

    def __len__(self) -> int:
        return self._held

    def add(self, *, needed: bool) -> Callable[[], None]:
        """Hold until the returned function is called; further calls of it do nothing."""
        held = True

        def release() -> None:
            nonlocal held
            with self._lock:
                self._held -= held
                self._needed -= held and needed
                held = False

        with self._lock:
            self._held += 1
            self._needed += needed
        return release

    def delay(self, idle: float) -> float:
        """Seconds until the next pass, where nothing was done for `idle` seconds."""
        return min(max(idle / _GROWTH, self._often), self._seldom) if self._needed else self._seldom
