"""Waiting for staging memory on the event loop: the asyncio shell around one `Share` of the arena."""

import asyncio
from collections.abc import Callable
from typing import Final

from kvxfer.errors import KvxferError
from kvxfer.memory import Extent, Request, Share

__all__ = ["Desk"]


class Desk:
    """Hands out extents of one share in the order that its books decide.

    Args:
        share: The books.
        now: Monotonic seconds.
        loop: The worker's event loop.
    """

    def __init__(self, share: Share, now: Callable[[], float], loop: asyncio.AbstractEventLoop) -> None:
        self.share: Final = share
        self._now = now
        self._loop = loop
        self._waiting: dict[Request, asyncio.Future[Extent]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def acquire(self, peer: str, nbytes: int, timeout: float) -> Extent:
        """An extent of at least `nbytes` bytes, to be given back with `release` exactly once.

        Cancelling the wait leaves nothing behind.

        Raises:
            ArenaError: At once if it can never fit; or when `timeout` seconds have passed, or when so much of the share
                went into quarantine that what remains cannot hold it.
        """
        now = self._now()
        request = self.share.request(peer, nbytes, now=now, deadline=now + timeout)
        future: asyncio.Future[Extent] = self._loop.create_future()
        self._waiting[request] = future
        self.advance()
        try:
            return await future
        except asyncio.CancelledError:
            self._waiting.pop(request, None)
            extent = self.share.withdraw(request)
            if extent is not None:  # it was granted in the very moment in which the wait was cancelled
                self.share.release(extent)
            self.advance()
            raise

    def release(self, extent: Extent) -> None:
        """Give an extent back: nobody will write it any more."""
        self.share.release(extent)
        self.advance()

    def quarantine(self, extent: Extent, reason: str) -> None:
        """Somebody may still touch an extent: keep it until `settle`, and tell whoever can now wait no longer."""
        self.share.quarantine(extent, reason)
        self.advance()

    def settle(self, extent: Extent) -> None:
        """Give a quarantined extent back: there is evidence now."""
        self.share.settle(extent)
        self.advance()

    def advance(self) -> None:
        """Let the books decide who is next, and tell them."""
        while self._decide():
            pass  # somebody who was granted an extent had gone: it is the next one's turn
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.share.next_deadline()
        if deadline is not None:
            self._timer = self._loop.call_later(max(0.0, deadline - self._now()), self.advance)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _decide(self) -> bool:
        """One round of decisions. True if a granted extent came back at once, so that another round is due."""
        decisions = self.share.advance(self._now())
        came_back = False
        for request, extent in decisions.granted:
            future = self._waiting.pop(request, None)
            if future is None or future.done():
                self.share.release(extent)
                came_back = True
            else:
                future.set_result(extent)
        for request in decisions.expired:
            self._fail(request, self.share.expiry_error(request))
        for request, error in decisions.refused:
            self._fail(request, error)
        return came_back

    def _fail(self, request: Request, error: KvxferError) -> None:
        future = self._waiting.pop(request, None)
        if future is not None and not future.done():
            future.set_exception(error)
