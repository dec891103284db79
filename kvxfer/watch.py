"""Notices that the event loop stands still: transfers, leases and heartbeats of the worker stand still with it."""

from collections.abc import Callable
from typing import Final, Protocol

from kvxfer.metrics import Metrics
from kvxfer.telemetry import logger

__all__ = ["LoopWatch"]

_log: Final = logger("kvxfer.worker")

_PERIOD_SECONDS: Final = 0.25
_LATE_SECONDS: Final = 0.25
"""A beat so late is counted."""
_BLOCKED_SECONDS: Final = 1.0
"""A beat so late is said aloud."""

_CALLER = "code that runs on the same loop did not yield; move it to a thread, or set loop='own'"
_OWN = "the loop has a thread of its own, so the whole process stood still or a thread held the GIL"


class Timer(Protocol):
    """A callback that is to come."""

    def cancel(self) -> None:
        """It shall not come."""
        ...


class LoopWatch:
    """Measures how late a periodic callback runs. Four beats a second cost next to nothing.

    How late each beat is goes into the metrics, which count those that are very late. The first one that is later still
    is logged; the incident is over, and the next may be logged, once a beat was in time again. A loop that stands still
    for `t` seconds makes a beat late by something between `t - 0.25` and `t`.
    """

    def __init__(self) -> None:
        self._timer: Timer | None = None
        self._due = 0.0
        self._blocked = False

    def start(
        self,
        now: Callable[[], float],
        at: Callable[[float, Callable[[], None]], Timer],
        metrics: Metrics,
        *,
        own: bool,
    ) -> None:
        """Begin to watch.

        Args:
            now: The worker's clock.
            at: Calls a function on the loop at a time of this clock.
            metrics: Where late beats are counted.
            own: Whether the loop has a thread of its own; decides which cause the log line names.
        """

        def arm() -> None:
            self._due = now() + _PERIOD_SECONDS
            self._timer = at(self._due, beat)

        def beat() -> None:
            late = now() - self._due
            metrics.loop_late(late, blocked=late >= _LATE_SECONDS)
            if late < _LATE_SECONDS:
                self._blocked = False
            if late >= _BLOCKED_SECONDS and not self._blocked:
                self._blocked = True
                _log.warning("loop_blocked", lag=late, limit=_BLOCKED_SECONDS, reason=_OWN if own else _CALLER)
            arm()

        arm()

    def stop(self) -> None:
        """No beat comes any more. Idempotent, and harmless before `start`."""
        if self._timer is not None:
            self._timer.cancel()
