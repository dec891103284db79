"""A time in which nobody calls the transport: what lands then was moved by the peer alone."""

from collections.abc import Callable
from typing import Final

from kvxfer.copy.mover import Mover

__all__ = ["Pause"]


class Pause:
    """Begun by `Fabric.pause`; it ends by itself, or when there is something to do.

    Args:
        mover: What does not call the transport meanwhile.
        until: When it ends at the latest, by the runtime's clock.
        calls: How many calls were made elsewhere.
        firm: Whether it goes on though others are held awake for.
    """

    def __init__(self, mover: Mover, until: float, calls: Callable[[], int], *, firm: bool) -> None:
        self._mover: Final = mover
        self._calls: Final = calls
        mover.hush(until, firm=firm)
        self._before: Final = calls(), mover.calls

    @property
    def intact(self) -> bool:
        """Whether nothing was called on the transport since it began."""
        return (self._calls(), self._mover.calls) == self._before

    def end(self) -> None:
        """Let the transport progress again."""
        self._mover.unhush()
