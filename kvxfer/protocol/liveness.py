"""When a side must speak, and when its peer has been silent for too long (PROTOCOL.md section 4.6)."""

from dataclasses import dataclass
from typing import Final

__all__ = ["Liveness"]

_SHORTEST_SECONDS: Final = 0.1
"""No peer can ask for more: each of many that only listen would cost a side that much work."""


@dataclass(slots=True)
class Liveness:
    """Of one session. Times are monotonic seconds.

    Attributes:
        heartbeat: Seconds after which this side must speak: its own, or the peer's once that is known and shorter.
        peer_timeout: Seconds of silence after which the peer is in doubt.
        heard: When the peer last said something, or later if this side stood still since.
        spoke: When this side last said something.
        looked: When this side last did anything.
    """

    heartbeat: float
    peer_timeout: float
    heard: float
    spoke: float
    looked: float

    def agree(self, heartbeat: float) -> None:
        """Speak as often as the peer does: what it waits for, and its leases, are longer than twice that."""
        self.heartbeat = min(self.heartbeat, max(heartbeat, _SHORTEST_SECONDS))

    def hear(self, now: float) -> None:
        """The peer said something, or what it has said is still being handled."""
        self.heard = self.looked = now

    def look(self, now: float) -> None:
        """Of the time for which this side stood still, a part counts as silence of the peer: it may have as well."""
        counted = max(self.heartbeat, self.peer_timeout / 4)  # so that it is noticed however often that happens
        self.heard += max(0.0, now - self.looked - counted)
        self.looked = now

    def silent(self, now: float) -> bool:
        """Whether nothing was heard for too long."""
        return now >= self.heard + self.peer_timeout

    def due(self, now: float) -> bool:
        """Whether this side must speak."""
        return now >= self.spoke + self.heartbeat

    def next_deadline(self) -> float:
        """When the earlier of the two comes true."""
        return min(self.spoke + self.heartbeat, self.heard + self.peer_timeout)
