"""When to look again at something that ends unannounced: how long its like takes, and what that means for the looker.

Whoever looks too often takes the interpreter's lock from everybody else in the process; whoever looks too seldom is
late. So an end is foreseen, slept towards, and waited for closely only around the time at which it is due.

What a post takes is only known between two looks, and looking may itself be what moves it on: see `Least`.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

__all__ = ["Least", "Pace"]

_WINDOW: Final = 8
_ENOUGH: Final = 4


@dataclass(frozen=True, slots=True)
class Pace:
    """When to look, given when something is due. All times are seconds.

    Attributes:
        before: Looking closely begins so much before it is due, and a sixteenth of what it takes: a thread that sleeps
            wakes late.
        after: Looking closely ends so much after it was due.
        shortest: Shortest sleep once it is looked at closely, or late.
        longest: Longest sleep ever, so that no end is seen later than this, however wrong the estimate was.
        back_off: What is late is looked at again after this fraction of the time that it is late.
        worthwhile: Sleeps before it is due that would be shorter than this are spun through.
        spun: Looking closely is without a pause for what takes at most this long. For what takes longer there are
            pauses of a 32nd of what it takes.
    """

    before: float
    after: float
    shortest: float
    longest: float
    back_off: float
    worthwhile: float = 0.0
    spun: float = math.inf

    def delay(self, now: float, due: float, takes: float) -> float:
        """Seconds until something should be looked at again.

        Args:
            now: The time.
            due: When it should have ended.
            takes: How long it should take in all.
        """
        sleep = due - self.before - takes / 16 - now
        if sleep > 0 and sleep >= self.worthwhile:
            return min(sleep, self.longest)
        if now < due + self.after:
            return 0.0 if takes <= self.spun else self._bounded(takes / 32)
        return self._bounded((now - due) * self.back_off)

    def _bounded(self, sleep: float) -> float:
        return min(max(sleep, self.shortest), self.longest)


class Least:
    """Seconds in proportion to bytes, for things alike, from bounds: the least that the last eight durations allow.

    That is the largest lower bound, or the smallest upper one where these contradict each other. Bounds that are wide
    (the looker slept, or stood still) so say little. The least, because an estimate that is too short costs a few
    looks and one that is too long delays whoever waits for the end; and because a single one that took long, as the
    first one on a new connection does, then counts for nothing.

    One in eight is to be looked at as if nothing were known. So the eight hold one that was not slept through, and
    where sleeping makes things take longer, the estimate does not follow.
    """

    def __init__(self) -> None:
        self._last: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._s_per_byte = 0.0
        self._asked = 0

    def takes(self, nbytes: int) -> float:
        """Seconds that so many bytes should take; 0 until four durations were seen."""
        return self._s_per_byte * nbytes

    def learn(self, nbytes: int, low: float, high: float) -> None:
        """So many bytes (> 0) took between `low` and `high` seconds."""
        self._last.append((low / nbytes, high / nbytes))
        if len(self._last) >= _ENOUGH:
            lows, highs = zip(*self._last, strict=True)
            self._s_per_byte = max(0.0, min(max(lows), *highs))

    def probes(self) -> bool:
        """Whether the next one is to be looked at as if nothing were known. Ask once for each."""
        self._asked = (self._asked + 1) % _WINDOW
        return self._asked == 0
