"""What both sides have in common: one worker for all rooms of a rank, and how a request stands.

A room is sglang's number of a request, which its router gives to both engines. It is the request's id here.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from kvxfer.blocking import BlockingOffer, BlockingTransfer, BlockingWorker, FetchEvent, PollEvent
from kvxfer.errors import FabricError, TransferFailedError
from kvxfer.integrations.sglang.caches import Rows

__all__ = ["Poll", "Room", "RoomFailedError", "Rooms", "failure", "request_of"]


class Poll(IntEnum):
    """How a request stands, by sglang's numbers (`KVPoll`): ranks of an engine agree on the least."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING = 2
    TRANSFERRING = 3
    SUCCESS = 4


class RoomFailedError(TransferFailedError):
    """A request of sglang's was not handed over, as its scheduler asks for the reason.

    Remedy: read `failure_reason`; sglang reports the request as failed, and the client may try again.
    """

    def __init__(self, room: int, reason: str, *, elsewhere: bool) -> None:
        super().__init__(f"room {room}: {reason}")
        self.bootstrap_room = room
        self.failure_reason = reason
        self.is_from_another_rank = elsewhere


class Room(Protocol):
    """One request of one side."""

    @property
    def under_way(self) -> bool:
        """Whether anything may still become of it."""
        ...

    def note(self, event: PollEvent) -> None:
        """Something of it is over."""
        ...


def request_of(room: int) -> str:
    """The id of a request."""
    return f"sglang-{room}"


def failure(room: int, reason: str) -> RoomFailedError:
    """What sglang's scheduler is told; without a reason here it was another rank that failed."""
    return RoomFailedError(room, reason or "it failed on another rank", elsewhere=not reason)


@dataclass(slots=True)
class Rooms:
    """One side of an engine's rank. All from one thread, as sglang's scheduler does.

    Attributes:
        worker: Does the work.
        page_tokens: Tokens of a page.
        rows: Metadata.
        device: Where the pages are.
        patience: Seconds that a request waits for the other engine.
        now: A clock.
    """

    worker: BlockingWorker
    page_tokens: int
    rows: Rows
    device: torch.device
    patience: float
    now: Callable[[], float] = time.monotonic
    _live: dict[BlockingOffer | BlockingTransfer, Room] = field(default_factory=dict)
    _taken: WeakValueDictionary[int, Room] = field(default_factory=WeakValueDictionary)

    def take(self, number: int, room: Room) -> str:
        """Let a request have this number; why not, if another one has it that is under way.

        A number is the request's name to the other engine: with the same one, each would get the other's pages.
        """
        other = self._taken.get(number)
        if other is not None and other.under_way:
            return f"another request with bootstrap_room {number} is under way"
        self._taken[number] = room
        return ""

    def begun(self, handle: BlockingOffer | BlockingTransfer, room: Room) -> None:
        """What becomes of an offer or a fetch is told to this request."""
        self._live[handle] = room

    def pump(self, timeout: float = 0.0) -> None:
        """Tell requests what has become of them."""
        self.tell(self.worker.poll(timeout))

    def tell(self, events: Iterable[PollEvent]) -> None:
        """Tell requests of these events."""
        for event in events:
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
        until = time.monotonic() + max(self.worker.config.bounds().values())
        while not is_safe():
            self.pump(0.05)
            if is_in_doubt() or time.monotonic() >= until:
                raise FabricError(
                    f"room {room}: a silent peer may still touch its pages, which sglang is about to give to others"
                )

    def queued(self) -> Any:
        """What `after=` takes for all work on the pages that was queued so far."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
