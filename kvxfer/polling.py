"""What an engine that steps and polls holds of its fetches and offers, and the events that `poll` gives it.

Every fetch and every offer ends with exactly one event; one more follows if that said that memory is in doubt:

    fetch    Fetched | FetchFailed                                       FetchFailed -> Settled
    offer    OfferReleased | OfferExpired | OfferWithdrawn | OfferFailed | OfferInDoubt -> OfferSettled

An event is there to be polled by the time its fetch or offer says that it is done.
"""

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from kvxfer.errors import BusyError, KvxferError, MemoryInDoubtError
from kvxfer.telemetry import TransferStats
from kvxfer.transfers import FetchResult

if TYPE_CHECKING:
    from kvxfer.handles import BlockingOffer, BlockingTransfer

__all__ = [
    "MAX_EVENTS",
    "FetchEvent",
    "FetchFailed",
    "Fetched",
    "Handle",
    "OfferEvent",
    "OfferExpired",
    "OfferFailed",
    "OfferInDoubt",
    "OfferReleased",
    "OfferSettled",
    "OfferWithdrawn",
    "Outbox",
    "PollEvent",
    "Settled",
]


@dataclass(frozen=True, slots=True)
class Fetched:
    """A fetch succeeded: every byte that was asked for has landed and is visible."""

    request: str
    transfer: "BlockingTransfer"
    result: FetchResult


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """A fetch failed or was cancelled; `transfer.failed_blocks` hold no usable data.

    Unless `error` is a `MemoryInDoubtError`, nobody writes the blocks any more; if it is, wait for `Settled`.
    """

    request: str
    transfer: "BlockingTransfer"
    error: KvxferError


@dataclass(frozen=True, slots=True)
class Settled:
    """Memory that a `FetchFailed` left in doubt is safe: its blocks are the caller's again."""

    request: str
    transfer: "BlockingTransfer"


@dataclass(frozen=True, slots=True)
class OfferReleased:
    """Every rank of the decode engine is done; the blocks are the caller's again."""

    request: str
    offer: "BlockingOffer"
    stats: tuple[TransferStats, ...]


@dataclass(frozen=True, slots=True)
class OfferExpired:
    """Nobody claimed or renewed the offer in time; the blocks are the caller's again."""

    request: str
    offer: "BlockingOffer"
    reason: str


@dataclass(frozen=True, slots=True)
class OfferWithdrawn:
    """The offer was withdrawn, or its worker closed; the blocks are the caller's again."""

    request: str
    offer: "BlockingOffer"


@dataclass(frozen=True, slots=True)
class OfferFailed:
    """The offer, or a step of it, could not be made, and it was taken back; the blocks are the caller's again."""

    request: str
    offer: "BlockingOffer"
    error: KvxferError


@dataclass(frozen=True, slots=True)
class OfferInDoubt:
    """The offer is over, but a silent peer or a stuck post may still read its blocks: wait for `OfferSettled`."""

    request: str
    offer: "BlockingOffer"
    error: MemoryInDoubtError


@dataclass(frozen=True, slots=True)
class OfferSettled:
    """Memory that an `OfferInDoubt` left in doubt is safe: its blocks are the caller's again."""

    request: str
    offer: "BlockingOffer"


FetchEvent: TypeAlias = Fetched | FetchFailed | Settled
OfferEvent: TypeAlias = OfferReleased | OfferExpired | OfferWithdrawn | OfferFailed | OfferInDoubt | OfferSettled
PollEvent: TypeAlias = FetchEvent | OfferEvent


class Handle(Protocol):
    """A fetch or an offer, as the outbox knows it."""

    def note(self, event: PollEvent) -> None:
        """Take over what an event says. Called before it can be polled; must not block."""
        ...

    def abandon(self) -> None:
        """The worker is gone: end, though nobody knows how."""
        ...


MAX_EVENTS: Final = 65_536
"""Events that wait for `poll`, and fetches and offers that will bring one, at most."""


class Outbox:
    """Events on their way to `poll`, and what has not ended yet. Safe from any thread."""

    def __init__(self) -> None:
        self._events: list[PollEvent] = []
        self._changed: Final = threading.Condition()
        self._live: Final[set[Handle]] = set()

    def take(self, timeout: float) -> list[PollEvent]:
        """Every event that came since the last call; waits for the first one at most `timeout` seconds."""
        with self._changed:
            if timeout > 0:
                self._changed.wait_for(lambda: bool(self._events), timeout)
            events, self._events = self._events, []
            return events

    @property
    def idle(self) -> bool:
        """Whether all that was added has ended."""
        return not self._live

    def add(self, handle: Handle) -> None:
        """A fetch or an offer begins.

        Raises:
            BusyError: If so many events wait for `poll` that nobody seems to ask for them.
        """
        with self._changed:
            if len(self._events) + len(self._live) >= MAX_EVENTS:
                raise BusyError(f"{len(self._events)} events wait for poll(), {len(self._live)} are to come: call it")
            self._live.add(handle)

    def discard(self, handle: Handle) -> bool:
        """It could not begin after all. False if it has ended."""
        with self._changed:
            live = handle in self._live
            self._live.discard(handle)
            return live

    def end(self, handle: Handle, event: PollEvent) -> None:
        """A fetch or an offer is over. Only the first end of each counts."""
        with self._changed:
            if handle in self._live:
                self._live.discard(handle)
                self._put(handle, event)

    def settle(self, handle: Handle, event: Settled | OfferSettled) -> None:
        """What an end left in doubt is safe."""
        with self._changed:
            self._put(handle, event)

    def abandon(self) -> None:
        """The worker is gone: whatever has not ended never will."""
        with self._changed:
            for handle in list(self._live):
                handle.abandon()

    def _put(self, handle: Handle, event: PollEvent) -> None:
        handle.note(event)
        self._events.append(event)
        self._changed.notify_all()
