"""Notices what stands still and cannot say so: the event loop, and the transport in a call that does not return.

With the loop, all transfers, leases and heartbeats of the worker stand still. With the transport, whatever was posted.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from kvxfer.errors import Code
from kvxfer.metrics import Metrics
from kvxfer.protocol.messages import Status
from kvxfer.protocol.sending import Failure
from kvxfer.site import Site
from kvxfer.telemetry import logger

__all__ = ["LoopWatch", "TransportWatch"]

_log: Final = logger("kvxfer.worker")

_PERIOD_SECONDS: Final = 0.25
_LATE_SECONDS: Final = 0.25
"""A beat so late is counted."""
_BLOCKED_SECONDS: Final = 1.0
"""A beat so late is said aloud."""
_STALLED_SECONDS: Final = 5.0
"""What owes something for less was only not given a processor: services give way where many want one."""

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
        look: Callable[[], None],
        *,
        own: bool,
    ) -> None:
        """Begin to watch.

        Args:
            now: The worker's clock.
            at: Calls a function on the loop at a time of this clock.
            metrics: Where late beats are counted.
            look: Called with each beat that comes in time.
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
            arm()  # first: whatever comes of a look, the next beat comes
            if late < _LATE_SECONDS:
                look()

        arm()

    def stop(self) -> None:
        """No beat comes any more. Idempotent, and harmless before `start`."""
        if self._timer is not None:
            self._timer.cancel()


class Poster(Protocol):
    """One of the two roles of a worker, as far as it waits for what it has posted."""

    def stop_posted(self, failure: Failure) -> None:
        """Stop whatever waits for a post."""
        ...


class TransportWatch:
    """Ends what waits for a post while a call of the transport does not return for `no_progress_timeout`, or 5 s.

    A post that makes no progress is given up by the thread that looks after it. That one is in the call.

    Args:
        site: The worker.
        roles: What it does for peers.
    """

    def __init__(self, site: Site, roles: Sequence[Poster]) -> None:
        self._site: Final = site
        self._roles: Final = roles
        self._said = False

    def look(self) -> None:
        """See for how long the transport has owed something.

        Not right after the loop has stood still itself: the process may have been stopped, and the transport with it.
        """
        late, limit = self._site.fabric.health()[0], max(self._site.config.no_progress_timeout, _STALLED_SECONDS)
        if late < limit:
            self._said = False
            return
        if not self._said:
            self._said = True
            _log.error("transport_stalled", lag=late, limit=limit)
        failure = Failure(Status.FAILED, Code.FABRIC, f"a call of the transport has not returned for {late:.1f} s")
        for role in self._roles:
            role.stop_posted(failure)
