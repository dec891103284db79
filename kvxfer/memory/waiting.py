"""Who waits for arena bytes, in which order: round-robin over peers, first come first served within a peer."""

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

__all__ = ["Request", "WaitingQueue"]

_SLACK: Final = 64
"""Deadlines of departed requests that the heap may keep, beyond one for each waiting request, before it is cleaned."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A reservation that was asked for. A handle: the `Share` knows what became of it.

    Attributes:
        peer: For whom.
        nbytes: Bytes asked for.
        length: Bytes that it will occupy: `nbytes` rounded up to the alignment of the share.
        number: Its place in the order of arrival at the share, from 1 upwards.
        requested_at: When it was asked for, in seconds of the caller's clock.
        deadline: When it expires if it still waits, in seconds of the same clock; infinity if never.
    """

    peer: str
    nbytes: int
    length: int
    number: int
    requested_at: float
    deadline: float


class WaitingQueue:
    """Waiting requests. The peer at the front of the round is the one that was served longest ago, or never.

    A peer that is served goes to the back of the round; a peer that cannot be served keeps its place, so it comes to
    the front and stays there. How often a request was overtaken is counted here; what follows from that is the share's
    matter.
    """

    def __init__(self) -> None:
        self._round: OrderedDict[str, OrderedDict[Request, None]] = OrderedDict()
        self._overtaken: dict[Request, int] = {}
        self._deadlines: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._overtaken)

    @property
    def peers(self) -> Iterable[str]:
        """Peers with a waiting request, in the order of the round."""
        return self._round.keys()

    def waiting(self, peer: str) -> int:
        """How many requests of `peer` wait."""
        return len(self._round.get(peer, ()))

    def heads(self) -> list[Request]:
        """The oldest waiting request of each peer, in the order of the round."""
        return [next(iter(requests)) for requests in self._round.values()]

    def requests(self) -> list[Request]:
        """Every waiting request, peer by peer."""
        return [request for requests in self._round.values() for request in requests]

    def add(self, request: Request) -> None:
        """Put `request` behind those of its peer; a peer that did not wait joins at the back of the round."""
        self._round.setdefault(request.peer, OrderedDict())[request] = None
        self._overtaken[request] = 0
        if request.deadline < math.inf:
            heapq.heappush(self._deadlines, (request.deadline, request.number, request))

    def remove(self, request: Request) -> bool:
        """Take `request` out, whatever its place. False if it does not wait."""
        if self._overtaken.pop(request, None) is None:
            return False
        requests = self._round[request.peer]
        del requests[request]
        if not requests:
            del self._round[request.peer]
        if len(self._deadlines) > 2 * len(self._overtaken) + _SLACK:
            self._deadlines = [entry for entry in self._deadlines if entry[2] in self._overtaken]
            heapq.heapify(self._deadlines)
        return True

    def serve(self, request: Request) -> None:
        """Take `request` out because it was granted; its peer goes to the back of the round."""
        self.remove(request)
        if request.peer in self._round:
            self._round.move_to_end(request.peer)

    def overtaken(self, request: Request) -> int:
        """How often a request behind this one was granted while this one could have been, but for want of a gap."""
        return self._overtaken[request]

    def overtake(self, request: Request) -> int:
        """Count that `request` was overtaken once more, and return the new count."""
        self._overtaken[request] += 1
        return self._overtaken[request]

    def expire(self, now: float) -> list[Request]:
        """Take out every request whose deadline is `now` or earlier, and return them by deadline."""
        expired: list[Request] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if self.remove(request):
                expired.append(request)
        return expired

    def next_deadline(self) -> float | None:
        """The earliest deadline of a waiting request; None if none waits or none of them expires."""
        while self._deadlines and self._deadlines[0][2] not in self._overtaken:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None
