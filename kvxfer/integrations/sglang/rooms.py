"""How requests stand at either engine, and the one worker that a rank has for all of them.

A room is sglang's number of a request, which its router gives to both engines. It is the request's id here.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, TypeAlias
from weakref import WeakValueDictionary

import torch

from kvxfer.blocking import (
    BlockingOffer,
    BlockingTransfer,
    BlockingWorker,
    Fetched,
    FetchEvent,
    FetchFailed,
    OfferExpired,
    OfferFailed,
    OfferInDoubt,
    OfferReleased,
    OfferSettled,
    PollEvent,
)
from kvxfer.errors import (
    ClosedError,
    FabricError,
    KvxferError,
    MemoryInDoubtError,
    PeerError,
    RefusedError,
    TransferFailedError,
)
from kvxfer.geometry import Span
from kvxfer.geometry.rows import Ids
from kvxfer.integrations.sglang.caches import Rows
from kvxfer.telemetry import TransferStats

__all__ = ["Poll", "Receiving", "Room", "RoomFailedError", "Rooms", "Sending", "request_of"]

# --- what both engines have in common


class Poll(IntEnum):
    """How a request stands, by sglang's numbers (`KVPoll`): ranks of an engine agree on the least."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING = 2
    TRANSFERRING = 3
    SUCCESS = 4


class RoomFailedError(TransferFailedError):
    """A request of sglang's was not handed over, as its scheduler asks for the reason: without one another rank failed.

    Remedy: read `failure_reason`; sglang reports the request as failed, and the client may try again.
    """

    def __init__(self, room: int, reason: str) -> None:
        self.failure_reason = reason or "it failed on another rank"
        super().__init__(f"room {room}: {self.failure_reason}")
        self.bootstrap_room = room
        self.is_from_another_rank = not reason


Room: TypeAlias = "Sending | Receiving"
"""One request of one side."""


def request_of(room: int) -> str:
    """The id of a request."""
    return f"sglang-{room}"


@dataclass(slots=True)
class Rooms:
    """One side of an engine's rank. All from one thread, as sglang's scheduler does."""

    worker: BlockingWorker
    page_tokens: int
    rows: Rows
    device: torch.device
    patience: float  # seconds that a request waits for the other engine
    _live: dict[BlockingOffer | BlockingTransfer, Room] = field(default_factory=dict)
    _taken: WeakValueDictionary[int, Room] = field(default_factory=WeakValueDictionary)
    _broken: FabricError | None = None  # pages may have been given to others which a silent peer may still touch

    def take(self, number: int, room: Room) -> str:
        """Let a request have this number; why not, if another one has it that is under way.

        A number is the request's name to the other engine: with the same one, each would get the other's pages.
        """
        if self.is_taken(number):
            return f"another request with bootstrap_room {number} is under way"
        self._taken[number] = room
        return ""

    def is_taken(self, number: int) -> bool:
        """Whether a request has it that is under way."""
        room = self._taken.get(number)
        return room is not None and room.under_way

    def begun(self, handle: BlockingOffer | BlockingTransfer, room: Room) -> None:
        """What becomes of an offer or a fetch is told to this request."""
        self._live[handle] = room

    def pump(self, timeout: float = 0.0) -> None:
        """Tell requests what has become of them. Sglang may have logged what `wait` raised: that is raised again."""
        if self._broken is not None:
            raise self._broken
        for event in self.worker.poll(timeout):
            handle = event.transfer if isinstance(event, FetchEvent) else event.offer
            room = self._live.get(handle)
            if room is not None:
                room.note(event)

    def forget(self, handle: BlockingOffer | BlockingTransfer) -> None:
        """Nothing follows of it."""
        self._live.pop(handle, None)

    def wait(self, is_safe: Callable[[], bool], is_in_doubt: Callable[[], bool], room: int) -> None:
        """Block until nobody touches the pages of a request any more: sglang gives them to others next.

        Raises:
            FabricError: If a silent peer may still touch them, or that is not known in time.
        """
        bounds, since = self.worker.config.bounds(), time.monotonic()
        while not is_safe():
            self.pump(0.05)
            # what is in doubt already, as after an error of a post, may soon be known to be safe
            if time.monotonic() - since >= (bounds["revoke"] if is_in_doubt() else max(bounds.values())):
                what = f"room {room}: a silent peer may still touch its pages, which sglang is about to give to others"
                self._broken = FabricError(what)
                raise self._broken

    def queued(self) -> Any:
        """What `after=` takes for all work on the pages that was queued so far."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None


# --- at the prefill engine: an offer that grows with each chunk of the prompt
#
# sglang computes a prompt once its decode engine has said where to put it; here that is the fetch that waits for the
# offer, and says from which token on. Whole pages are sent: what lies behind the prompt travels, and nobody reads it.


class Sending:
    """One request, from when it waits for its decode engine until its pages are free."""

    def __init__(self, rooms: Rooms, room: int) -> None:
        self._rooms: Final = rooms
        self._room: Final = room
        self._name: Final = request_of(room)
        self._since: Final = time.monotonic()
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
        """Whether anything may still become of it."""
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

    def send(self, pages: Ids, after: Any = None) -> None:
        """Send the next pages; they may be read once `after` has fired, or else what is queued by now has run."""
        if self._end is Poll.FAILED:
            return
        try:
            self._send(pages, after)
        except KvxferError as error:
            self.fail(str(error))

    def fail(self, reason: str) -> None:
        """It has failed: the decode engine need not wait."""
        self._reason = self._reason or reason
        if self._end is None:
            self._end = Poll.FAILED
            with suppress(ClosedError):  # asleep: the lease ends it
                offer = self._offer or self._rooms.worker.offer(self._name, streaming=True)
                offer.withdraw()  # so whoever waits for its first page, or comes later, hears of it

    def abort(self) -> None:
        """Give up. Blocks until nobody reads its pages.

        Raises:
            FabricError: If a silent peer may still read them: sglang has no way to spare them.
        """
        self.fail("it was aborted")
        self._make_safe()

    def failed(self) -> Exception:
        """Why it failed. Blocks as `abort` does: sglang frees the pages next.

        Raises:
            FabricError: See `abort`.
        """
        reason = self._reason
        self.fail("")
        self._make_safe()
        return RoomFailedError(self._room, reason)

    def clear(self) -> None:
        """Forget what is over."""
        if self._offer is not None and self._over:
            self._rooms.forget(self._offer)

    def note(self, event: PollEvent) -> None:
        """The offer is over, or its pages are not in doubt any more."""
        match event:
            case OfferInDoubt():
                self._doubt = True
                self.fail(str(event.error))
                return
            case OfferSettled():
                self._doubt = False
            case OfferReleased():
                self.stats = event.stats
                self._released()
            case OfferExpired():
                self.fail(event.reason)
            case OfferFailed():
                self.fail(str(event.error))
            case _:
                self.fail("it was withdrawn")
        self._over = True

    def _send(self, pages: Ids, after: Any) -> None:
        rooms, first = self._rooms, self.first_token
        if self._offer is None:
            self._offer = rooms.worker.offer(self._name, streaming=True)
            rooms.begun(self._offer, self)
        offer, before = self._offer, self._sent
        self._sent += len(pages)
        stop = first + self._sent * rooms.page_tokens
        start = first + before * rooms.page_tokens if before else 0
        if stop > start:
            offer.extend(pages if before else Span(pages, first), tokens=range(start, stop))
            offer.ready(tokens=stop, after=rooms.queued() if after is None else after)
        if self._sent >= self._pages:
            offer.finish(b"" if self._row is None else rooms.rows.read(self._row))
            self._finished = True
            if self._over:  # of this rank nothing was wanted
                self._end = Poll.SUCCESS

    def _released(self) -> None:
        if not self._finished and self._wanted:
            self.fail("the decode engine gave it up")
        elif self._finished and self._end is None:
            self._end = Poll.SUCCESS

    def _look(self) -> None:
        """Whether the decode engine has said what it lacks, and still wants it."""
        try:
            seen = self._rooms.worker.awaited(self._name)
        except ClosedError as error:
            self.fail(str(error))
            return
        if seen is not None and seen.declined:
            self.fail("the decode engine gave it up")
        elif seen is not None:
            if self._first is None:  # sglang may have been told already, and count its pages from there
                self._first = seen.first_token or 0
            self._wanted = seen.first_token is not None
        elif self._first is not None:
            self.fail("the decode engine does not wait for it any more")
        elif time.monotonic() - self._since >= self._rooms.patience:
            self.fail(f"no decode engine asked for it within {self._rooms.patience:g} s")

    def _make_safe(self) -> None:
        if self._offer is not None:
            self._rooms.wait(lambda: self._over, lambda: self._doubt, self._room)
            self._rooms.forget(self._offer)


# --- at the decode engine: a fetch that is asked for before the prompt is computed


class Receiving:
    """One request, from when it is known until its pages hold the prompt, or are free."""

    def __init__(self, rooms: Rooms, room: int, lost: Callable[[], None]) -> None:
        self._rooms: Final = rooms
        self._room: Final = room
        self._lost: Final = lost  # to be called if the prefill engine may be another one by now
        self._ticket: dict[str, Any] | None = None
        self._row: int | None = None
        self._transfer: BlockingTransfer | None = None
        self._over = False
        self._reason = rooms.take(room, self)
        self._end: Poll | None = Poll.FAILED if self._reason else None

    @property
    def under_way(self) -> bool:
        """Whether anything may still become of it."""
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

    def fetch(self, pages: Ids, row: int | None, first_token: int) -> None:
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
                Span(pages, first_token),
                tokens=tokens,
                after=rooms.queued(),
                timeout=rooms.patience,
            )
        except KvxferError as error:
            self.fail(str(error))
            return
        rooms.begun(self._transfer, self)

    def abort(self) -> None:
        """Give up, also what has arrived and was not taken yet. It has failed once nobody writes its pages any more."""
        self._reason = self._reason or "it was aborted"
        if self._transfer is None or self._over:
            self.fail(self._reason)
        else:
            self._transfer.cancel()

    def fail(self, reason: str) -> None:
        """It has failed: the prefill engine need not go on."""
        self._reason = self._reason or reason
        if self._end is None and self._ticket is not None:
            with suppress(ClosedError):  # asleep: the lease ends it
                self._rooms.worker.decline(self._ticket)
        self._end = Poll.FAILED

    def failed(self) -> Exception:
        """Why it failed; another rank did if it has not, and may have found that the prefill engine is gone."""
        if not self._reason:
            self._lost()
        return RoomFailedError(self._room, self._reason)

    def clear(self) -> None:
        """Sglang gives its pages to others. Blocks until nobody writes them.

        Raises:
            FabricError: If a silent peer may still write them: sglang has no way to spare them.
        """
        if (transfer := self._transfer) is not None:
            if not self.over:
                transfer.cancel()
                self._rooms.wait(lambda: self.over, lambda: transfer.done and not transfer.memory_safe, self._room)
            self._rooms.forget(transfer)

    def note(self, event: PollEvent) -> None:
        """The fetch is over, or its pages are not in doubt any more."""
        match event:
            case Fetched():
                self._over = True
                self._fetched(event.result.payload)
            case FetchFailed():
                self._over = not isinstance(event.error, MemoryInDoubtError)
                if isinstance(event.error, PeerError) and not isinstance(event.error, RefusedError):
                    self._lost()
                self.fail(str(event.error))
            case _:
                self._over = True

    def _fetched(self, row: bytes) -> None:
        if self._row is not None and not self._rooms.rows.write(self._row, row):
            self.fail(f"its metadata has {len(row)} bytes there, and {self._rooms.rows.nbytes} here")
        elif self._reason:  # it was aborted too late
            self.fail(self._reason)
        else:
            self._end = Poll.SUCCESS
