"""A request at the decode engine: a fetch that is asked for before the prompt is computed."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from kvxfer.blocking import BlockingTransfer, Fetched, FetchFailed, PollEvent
from kvxfer.errors import ClosedError, KvxferError, MemoryInDoubtError, PeerError
from kvxfer.geometry import Span
from kvxfer.integrations.sglang.rooms import Poll, Rooms, failure

__all__ = ["Receiving"]


class Receiving:
    """One request, from when it is known until its pages hold the prompt, or are free.

    Args:
        rooms: This rank's.
        room: sglang's number of it.
        lost: Called if it failed in a way that says that the prefill engine may be another one by now.
    """

    def __init__(self, rooms: Rooms, room: int, lost: Callable[[], None]) -> None:
        self._rooms: Final = rooms
        self._room: Final = room
        self._lost: Final = lost
        self._ticket: dict[str, Any] | None = None
        self._row: int | None = None
        self._transfer: BlockingTransfer | None = None
        self._over = self._doubt = False
        self._reason = rooms.take(room, self)
        self._end: Poll | None = Poll.FAILED if self._reason else None

    @property
    def under_way(self) -> bool:
        """See `Room`."""
        return self._end is None or not self.over

    @property
    def over(self) -> bool:
        """Whether nobody writes its pages any more, and none will."""
        return self._transfer is None or self._over

    def begin(self, ticket: dict[str, Any]) -> None:
        """The prefill engine is known."""
        if self._end is None:  # a ticket of a room that is another's is not to be declined
            self._ticket = ticket

    def poll(self) -> Poll:
        """How it stands. Never that it failed while its own pages are written, unless a silent peer may."""
        self._rooms.pump()
        if self._end is not None:
            return self._end
        if self._transfer is not None:
            return Poll.TRANSFERRING
        return Poll.BOOTSTRAPPING if self._ticket is None else Poll.WAITING

    def fetch(self, pages: Sequence[int], row: int | None, first_token: int) -> None:
        """Ask for the tokens from `first_token` on, into these pages; metadata goes into this row."""
        if self._end is not None or self._ticket is None:
            self.fail("its prefill engine is not known")
            return
        rooms = self._rooms
        tokens = range(first_token, first_token + len(pages) * rooms.page_tokens)
        self._row = row
        try:
            self._transfer = rooms.worker.start_fetch(
                self._ticket,
                Span(list(pages), first_token),
                tokens=tokens,
                after=rooms.queued(),
                timeout=rooms.patience,
            )
        except KvxferError as error:
            self.fail(str(error))
            return
        rooms.begun(self._transfer, self)

    def abort(self) -> None:
        """Give up. It has failed once nobody writes its pages any more; without any, at once."""
        self._reason = self._reason or "it was aborted"
        if self._transfer is None:
            self.fail(self._reason)
        elif not self._over:
            self._transfer.cancel()

    def fail(self, reason: str) -> None:
        """It has failed: the prefill engine need not go on."""
        self._reason = self._reason or reason
        if self._end is None:
            self._end = Poll.FAILED
            if self._ticket is not None:
                with suppress(ClosedError):  # asleep: the lease ends it
                    self._rooms.worker.decline(self._ticket)

    def failed(self) -> Exception:
        """Why it failed; another rank did if it has not, and may have found that the prefill engine is gone."""
        if not self._reason:
            self._lost()
        return failure(self._room, self._reason)

    def clear(self) -> None:
        """Sglang gives its pages to others. Blocks until nobody writes them.

        Raises:
            FabricError: If a silent peer may still write them: sglang has no way to spare them.
        """
        if self._transfer is not None:
            if not self.over:
                self._transfer.cancel()
                self._rooms.wait(lambda: self.over, lambda: self._doubt, self._room)
            self._rooms.forget(self._transfer)

    def note(self, event: PollEvent) -> None:
        """The fetch is over, or its pages are not in doubt any more."""
        match event:
            case Fetched():
                self._over = True
                self._fetched(event.result.payload)
            case FetchFailed():
                self._doubt = isinstance(event.error, MemoryInDoubtError)
                self._over = not self._doubt
                if isinstance(event.error, PeerError):
                    self._lost()
                self.fail(str(event.error))
            case _:
                self._doubt, self._over = False, True

    def _fetched(self, row: bytes) -> None:
        if self._row is not None and not self._rooms.rows.write(self._row, row):
            self.fail(f"its metadata has {len(row)} bytes there, and {self._rooms.rows.nbytes} here")
        elif self._reason:  # it was aborted too late
            self.fail(self._reason)
        else:
            self._end = Poll.SUCCESS
