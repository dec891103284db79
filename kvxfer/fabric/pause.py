"""A time in which the fabric's thread lets its transport be: what lands then was moved by the peer alone."""

from typing import Final

__all__ = ["Pause"]


class Pause:
    """Begun by `Fabric.pause`; it ends by itself, or when there is something to do.

    Attributes:
        until: When it ends at the latest, by the runtime's clock. May be set, from any thread.
        firm: Whether it goes on though others are held awake for.
        intact: Nothing was called on the transport since it began. Set by the fabric's thread, before it does.

    Args:
        until: As the attribute.
        firm: As the attribute.
    """

    def __init__(self, until: float, *, firm: bool) -> None:
        self.until = until
        self.firm: Final = firm
        self.intact = True

    def lasts(self, now: float, *, held: bool) -> bool:
        """Whether it is not over."""
        return now < self.until and (self.firm or not held)
