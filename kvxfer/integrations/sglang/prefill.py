"""A request at the prefill engine: an offer that grows with each chunk of the prompt.

sglang computes a prompt once its decode engine has said where to put it; here that is the fetch that waits for the
offer, and says from which token on. Whole pages are sent: what lies behind the prompt travels, and nobody reads it.
"""

from collections.abc import Sequence
from typing import Any, Final

from kvxfer.blocking import (
    BlockingOffer,
    OfferExpired,
    OfferFailed,
    OfferInDoubt,
    OfferReleased,
    OfferSettled,
    PollEvent,
)
from kvxfer.errors import ClosedError, KvxferError
from kvxfer.geometry import Span
from kvxfer.integrations.sglang.rooms import Poll, Rooms, failure, request_of
from kvxfer.telemetry import TransferStats

__all__ = ["Sending"]


class Sending:
    """One request, from when it waits for its decode engine until its pages are free.

    Args:
        rooms: This rank's.
        room: sglang's number of it.
    """

    def __init__(self, rooms: Rooms, room: int) -> None:
        self._rooms: Final = rooms
        self._room: Final = room
        self._name: Final = request_of(room)
        self._since: Final = rooms.now()
        self._first: int | None = None  # where what the decode engine lacks begins; None: it has not said
        self._wanted = True  # it needs something of this rank
        self._pages = self._sent = 0
        self._row: int | None = None
        self._offer: BlockingOffer | None = None
        self._finished = self._over = self._doubt = False
        self._reason = rooms.take(room, self)
        self._end: Poll | None = Poll.FAILED if self._reason else None
        self.stats: tuple[TransferStats, ...] = ()

    @property
    def under_way(self) -> bool:
        """See `Room`."""
        return self._end is None or (self._offer is not None and not self._over)

    @property
    def first_token(self) -> int:
        """Where what the decode engine lacks begins; 0 before it has said."""
        return self._first or 0

    def poll(self) -> Poll:
        """How it stands."""
        self._rooms.pump()
        if self._end is None and self._offer is None:
            self._look()
        if self._end is not None:
            return self._end
        if self._offer is not None:
            return Poll.TRANSFERRING
        return Poll.BOOTSTRAPPING if self._first is None else Poll.WAITING

    def begin(self, pages: int, row: int | None) -> None:
        """So many pages will be sent, and this row of metadata with the last of them."""
        self._pages, self._row = pages, row

    def send(self, pages: Sequence[int], after: Any = None) -> None:
        """Send the next pages; they may be read once `after` has fired, or else what is queued by now has run."""
        if self._end is Poll.FAILED:
            return
        try:
            self._send(pages, after)
        except KvxferError as error:
            self._fail(str(error))

    def abort(self) -> None:
        """Give up. Blocks until nobody reads its pages.

        Raises:
            FabricError: If a silent peer may still read them: sglang has no way to spare them.
        """
        self._fail("it was aborted")
        self._make_safe()

    def failed(self) -> Exception:
        """Why it failed. Blocks as `abort` does: sglang frees the pages next.

        Raises:
            FabricError: See `abort`.
        """
        reason = self._reason
        self._fail("")
        self._make_safe()
        return failure(self._room, reason)

    def clear(self) -> None:
        """Forget what is over."""
        if self._offer is not None and self._over:
            self._rooms.forget(self._offer)

    def note(self, event: PollEvent) -> None:
        """The offer is over, or its pages are not in doubt any more."""
        match event:
            case OfferInDoubt():
                self._doubt = True
                self._fail(str(event.error))
                return
            case OfferSettled():
                self._doubt = False
            case OfferReleased():
                self.stats = event.stats
                self._released()
            case OfferExpired():
                self._fail(event.reason)
            case OfferFailed():
                self._fail(str(event.error))
            case _:
                self._fail("it was withdrawn")
        self._over = True

    def _send(self, pages: Sequence[int], after: Any) -> None:
        rooms, first = self._rooms, self.first_token
        if self._offer is None:
            self._offer = rooms.worker.offer(self._name, streaming=True)
            rooms.begun(self._offer, self)
        offer, before = self._offer, self._sent
        self._sent += len(pages)
        stop = first + self._sent * rooms.page_tokens
        start = first + before * rooms.page_tokens if before else 0
        if stop > start:
            offer.extend(list(pages) if before else Span(list(pages), first), tokens=range(start, stop))
            offer.ready(tokens=stop, after=rooms.queued() if after is None else after)
        if self._sent >= self._pages:
            offer.finish(b"" if self._row is None else rooms.rows.read(self._row))
            self._finished = True
            if self._over:  # of this rank nothing was wanted
                self._end = Poll.SUCCESS

    def _released(self) -> None:
        if self._finished:
            self._end = self._end or Poll.SUCCESS
        elif self._wanted:
            self._fail("the decode engine gave it up")

    def _look(self) -> None:
        """Whether the decode engine has said what it lacks, and still wants it."""
        try:
            seen = self._rooms.worker.awaited(self._name)
        except ClosedError as error:
            self._fail(str(error))
            return
        if seen is not None and seen.declined:
            self._fail("the decode engine gave it up")
        elif seen is not None:
            self._first, self._wanted = seen.first_token or 0, seen.first_token is not None
        elif self._first is not None:
            self._fail("the decode engine does not wait for it any more")
        elif self._rooms.now() - self._since >= self._rooms.patience:
            self._fail(f"no decode engine asked for it within {self._rooms.patience:g} s")

    def _fail(self, reason: str) -> None:
        self._reason = self._reason or reason
        if self._end is None:
            self._end = Poll.FAILED
            if self._offer is not None and not self._over:
                self._offer.withdraw()

    def _make_safe(self) -> None:
        if self._offer is not None:
            self._offer.withdraw()
            self._rooms.wait(lambda: self._over, lambda: self._doubt, self._room)
            self._rooms.forget(self._offer)
