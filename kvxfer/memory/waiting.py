"""Who waits for arena bytes, in which order: round-robin over peers, and within a peer over those who ask."""

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
        owner: Which of those who ask for this peer it is of, such as a transfer: they take turns.
    """

    peer: str
    nbytes: int
    length: int
    number: int
    requested_at: float
    deadline: float
    owner: object = None


class WaitingQueue:
    """Waiting requests. The peer at the front of the round is the one that was served longest ago, or never.

    A peer that is served goes to the back of the round; a peer that cannot be served keeps its place, so it comes to
    the front and stays there. Likewise the owners of a peer's requests; those of one owner are served in the order in
    which they came. How often a request was overtaken is counted here; what follows from that is the share's matter.
    """

    def __init__(self) -> None:
        self._round: OrderedDict[str, OrderedDict[object, OrderedDict[Request, None]]] = OrderedDict()
        self._count: dict[str, int] = {}
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
        return self._count.get(peer, 0)

    def heads(self) -> list[Request]:
        """The waiting request of each peer whose turn it is, in the order of the round."""
        return [next(iter(next(iter(owners.values())))) for owners in self._round.values()]

    def requests(self) -> list[Request]:
        """Every waiting request, peer by peer."""
        return [request for owners in self._round.values() for own in owners.values() for request in own]

    def add(self, request: Request) -> None:
        """Put `request` behind those of its owner; who did not wait, owner or peer, joins at the back of the round."""
        owners = self._round.setdefault(request.peer, OrderedDict())
        owners.setdefault(request.owner, OrderedDict())[request] = None
        self._count[request.peer] = self._count.get(request.peer, 0) + 1
        self._overtaken[request] = 0
        if request.deadline < math.inf:
            heapq.heappush(self._deadlines, (request.deadline, request.number, request))

    def remove(self, request: Request) -> bool:
        """Take `request` out, whatever its place. False if it does not wait."""
        if self._overtaken.pop(request, None) is None:
            return False
        owners = self._round[request.peer]
        own = owners[request.owner]
        del own[request]
        self._count[request.peer] -= 1
        if not own:
            del owners[request.owner]
        if not owners:
            del self._round[request.peer]
            del self._count[request.peer]
        if len(self._deadlines) > 2 * len(self._overtaken) + _SLACK:
            self._deadlines = [entry for entry in self._deadlines if entry[2] in self._overtaken]
            heapq.heapify(self._deadlines)
        return True

    def serve(self, request: Request) -> None:
        """Take `request` out because it was granted; its peer, and its owner there, go to the back of the round."""
        self.remove(request)
        owners = self._round.get(request.peer)
        if owners is not None:
            self._round.move_to_end(request.peer)
            if request.owner in owners:
                owners.move_to_end(request.owner)

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
