"""Waiting for memory on the event loop: the shell around one `Share` of the arena, with callbacks instead of awaits."""

import asyncio
from collections.abc import Callable
from typing import Final, TypeAlias

from kvxfer.errors import KvxferError
from kvxfer.memory import Extent, Request, Share
from kvxfer.metrics import Metrics

__all__ = ["Admitted", "Desk"]

Admitted: TypeAlias = Callable[[Extent | KvxferError], None]
"""Gets the extent, to be given back with `release` exactly once, or why there is none. Must not raise."""


class Desk:
    """Hands out extents of one share in the order that its books decide.

    Args:
        share: The books.
        now: Monotonic seconds.
        loop: The worker's event loop.
        metrics: Where waits are counted.
    """

    def __init__(
        self, share: Share, now: Callable[[], float], loop: asyncio.AbstractEventLoop, metrics: Metrics
    ) -> None:
        self.share: Final = share
        self._now = now
        self._loop = loop
        self._metrics = metrics
        self._waiting: dict[Request, Admitted] = {}
        self._since: dict[Request, float] = {}  # of those that were not served at once
        self._timer: asyncio.TimerHandle | None = None
        self._deciding = False
        self._again = False
        self._paused = False
        self.emptied: Callable[[], object] | None = None
        """Called when the last extent was given back: for a desk that is kept for those alone."""

    def ask(self, peer: str, nbytes: int, timeout: float, then: Admitted, *, owner: object = None) -> Request | None:
        """Wait for an extent of at least `nbytes` bytes, which `take` did not give; `then` is called once.

        Args:
            peer: On whose behalf.
            nbytes: Room that is needed.
            timeout: Seconds to wait at most.
            then: Gets the extent; or an `ArenaError` when `timeout` has passed, or when so much of the share went into
                quarantine that what remains cannot hold it.
            owner: Who asks on the peer's behalf, such as a transfer: each gets its turn.

        Returns:
            For `withdraw`; None if `then` was called before this returned.

        Raises:
            ArenaError: It can never fit; `then` is not called.
        """
        now = self._now()
        request = self.share.request(peer, nbytes, now=now, deadline=now + timeout, owner=owner)
        self._waiting[request] = then
        self.advance()
        if request not in self._waiting:
            return None
        self._since[request] = now
        return request

    def take(self, peer: str, nbytes: int) -> Extent | None:
        """An extent of at least `nbytes` bytes if there is one right now, and nobody waits."""
        return None if self._waiting or self._paused else self.share.take(peer, nbytes)

    @property
    def contended(self) -> bool:
        """Whether others wait, or nothing is granted now: whoever has an extent had better give it back soon."""
        return self._paused or bool(self._waiting)

    def withdraw(self, request: Request) -> None:
        """Wait no longer; `then` will not be called. Harmless if it was."""
        if self._waiting.pop(request, None) is not None:
            self._since.pop(request, None)
            extent = self.share.withdraw(request)
            if extent is not None:
                self.share.release(extent)
            self.advance()

    def release(self, extent: Extent) -> None:
        """Give an extent back: nobody will write it any more."""
        self.share.release(extent)
        if self._waiting:
            self.advance()
        if self.emptied is not None:
            self._end_if_empty()

    def quarantine(self, extent: Extent, reason: str) -> None:
        """Somebody may still touch an extent: keep it until `settle`, and tell whoever can now wait no longer."""
        self.share.quarantine(extent, reason)
        self._metrics.quarantined(extent.length)
        self.advance()

    def settle(self, extent: Extent) -> None:
        """Give a quarantined extent back: there is evidence now."""
        self.share.settle(extent)
        self._metrics.settled(extent.length)
        self.advance()
        self._end_if_empty()

    def advance(self) -> None:
        """Let the books decide who is next, and tell them."""
        self._again = True
        if self._deciding or self._paused:  # the round that is under way, or comes, sees what was given back
            return
        self._deciding = True
        try:
            while self._again and self._waiting:
                self._again = False
                self._decide()
        finally:
            self._deciding = False
        self._arm()

    def pause(self) -> None:
        """Grant nothing until `resume`. Nobody who waits is turned away meanwhile either."""
        self._paused = True

    def resume(self) -> None:
        """Go on, with all that has waited."""
        self._paused = False
        self.advance()

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _end_if_empty(self) -> None:
        if self.emptied is not None and not self.share.extents():
            self.emptied()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.share.next_deadline() if self._waiting else None
        if deadline is not None:
            self._timer = self._loop.call_later(max(0.0, deadline - self._now()), self.advance)

    def _decide(self) -> None:
        """One round of decisions."""
        decisions = self.share.advance(self._now())
        for request, extent in decisions.granted:
            self._tell(request, extent)
        for request in decisions.expired:
            self._tell(request, self.share.expiry_error(request))
        for request, error in decisions.refused:
            self._tell(request, error)

    def _tell(self, request: Request, answer: Extent | KvxferError) -> None:
        then = self._waiting.pop(request, None)
        if then is None:  # withdrawn (and its extent given back) by somebody who was told before, in the same round
            return
        if (since := self._since.pop(request, None)) is not None:
            self._metrics.admission_waited(self._now() - since)
        then(answer)
