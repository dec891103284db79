"""What is under way to one peer, in the order in which it was posted, and when the next end is due.

Parts are taken to be moved one after the other, so each begins when the one before it has ended. Where they share the
wire, several end at about the same time; what is learned is then the short time between two ends, and they are looked
at as if nothing were known. How long a part takes is learned for parts alike: of one operation between the same kinds
of memory, with as many bytes and as many pieces up to a factor of two. A GPU needs some microseconds for each piece, so
bytes alone say little; within such a class they do.
"""

from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from kvxfer.fabric.port import Handle, Post
from kvxfer.pace import Least, Pace

__all__ = ["Flight", "Paces", "Wire"]

_MOST_CLASSES: Final = 64
_CLOSE: Final = 60e-6
"""Seconds before and after a part is due during which it is looked at closely: a thread that sleeps wakes so late."""

_SPUN: Final = 400e-6
"""What takes more seconds is never spun for: a sleep is short beside it."""

_Class: TypeAlias = tuple[str, str, str, int, int]


@dataclass(frozen=True, slots=True)
class Paces:
    """When the fabric's thread looks again at a part.

    Attributes:
        known: Where it is known how long it takes. What takes less than some 100 us is spun for from the start, what
            takes more than 400 us is looked at in short sleeps around the time at which it is due.
        unknown: Where it is not: spun for, then looked at in proportion to the wait.
    """

    known: Pace
    unknown: Pace

    @classmethod
    def of(cls, spin_time: float, shortest: float, longest: float) -> "Paces":
        """From the time (seconds) to spin for what is unknown, and the bounds of a sleep."""
        unknown = Pace(before=0.0, after=spin_time, shortest=shortest, longest=longest, back_off=1 / 4)
        known = replace(unknown, before=_CLOSE, after=_CLOSE, worthwhile=shortest, spun=_SPUN)
        return cls(known, unknown)


@dataclass(slots=True, eq=False)
class Flight:
    """A part that is posted and not known to have ended.

    Attributes:
        handle: The transport's.
        nbytes: Its size, > 0.
        alike: What it has in common with those from which its duration is foreseen.
        began: When the call that posted it began; bytes may move inside of it.
        takes: Seconds that it should take; 0 if nothing is known.
        probe: It is looked at as if nothing were known.
    """

    handle: Handle
    nbytes: int
    alike: _Class
    began: float = 0.0
    takes: float = 0.0
    probe: bool = False

    @classmethod
    def of(cls, handle: Handle, post: Post, nbytes: int, pieces: int) -> "Flight":
        """A part of a post, with so many bytes in so many pieces."""
        alike = (post.operation, post.local.kind, post.remote.kind, nbytes.bit_length(), pieces.bit_length())
        return cls(handle, nbytes, alike)


class Wire:
    """The parts under way to one peer. Belongs to the fabric's thread; forgotten with the peer."""

    def __init__(self) -> None:
        self._flights: dict[Flight, None] = {}
        self._known: dict[_Class, Least] = {}
        self._looks: tuple[float, float] = (0.0, 0.0)  # when it was looked last, and the time before
        self._freed: tuple[float, float] = (0.0, 0.0)  # between which times the last part to end did so

    def posted(self, flight: Flight, began: float) -> None:
        """The transport has taken a part."""
        flight.began = began
        known = self._known.get(flight.alike)
        if known is not None:
            flight.takes = known.takes(flight.nbytes)
            flight.probe = known.probes()
        self._flights[flight] = None

    def looked(self, now: float) -> None:
        """Every part under way is about to be looked at."""
        self._looks = now, self._looks[0]

    def ended(self, flight: Flight, now: float) -> None:
        """A part was found to have ended, in the look that was announced last."""
        self.lost(flight)
        open_until = max(self._looks[1], flight.began)
        low = open_until - max(flight.began, self._freed[1])
        high = now - max(flight.began, self._freed[0])
        self._freed = open_until, now
        self._learn(flight, max(low, 0.0), high)

    def lost(self, flight: Flight) -> None:
        """A part is not waited for any more, and how long it took says nothing."""
        del self._flights[flight]

    def delay(self, now: float, paces: Paces) -> float | None:
        """Seconds until what is under way should be looked at again; None if nothing is.

        The part that is due first decides, each taken to be the next that ends: a short one may overtake.
        """
        soonest: float | None = None
        for flight in self._flights:
            began = max(flight.began, self._freed[1])
            if flight.takes and not (flight.probe and soonest is None):  # a probe is one once it is the oldest
                delay = paces.known.delay(now, began + flight.takes, flight.takes)
            else:
                delay = paces.unknown.delay(now, began, 0.0)
            soonest = delay if soonest is None else min(soonest, delay)
        return soonest

    def _learn(self, flight: Flight, low: float, high: float) -> None:
        known = self._known.pop(flight.alike, None) or Least()
        known.learn(flight.nbytes, low, high)
        self._known[flight.alike] = known
        if len(self._known) > _MOST_CLASSES:  # that of which no part has ended for longest
            del self._known[next(iter(self._known))]
