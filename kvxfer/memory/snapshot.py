"""What the books show to `describe()` and to metrics: plain numbers, copied at one moment."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvxfer.memory.extent import ExtentState

__all__ = ["ArenaSnapshot", "ExtentRow", "PeerSnapshot", "ShareSnapshot"]


class ExtentRow(NamedTuple):
    """One held extent: where it is in its share, in bytes, its state and its peer."""

    offset: int
    length: int
    state: ExtentState
    peer: str


@dataclass(frozen=True, slots=True)
class PeerSnapshot:
    """What one peer holds of a share, in bytes by state, and how many of its requests wait."""

    reserved_bytes: int
    writing_bytes: int
    quarantined_bytes: int
    waiting_requests: int

    @property
    def held_bytes(self) -> int:
        """All that the peer holds, quarantined bytes included."""
        return self.reserved_bytes + self.writing_bytes + self.quarantined_bytes


@dataclass(frozen=True, slots=True)
class ShareSnapshot:
    """One share at one moment. The bytes by state add up to the capacity.

    Attributes:
        name: Name of the share.
        capacity_bytes: Usable bytes.
        free_bytes: Bytes that nobody holds.
        reserved_bytes: Bytes that were granted and whose address nobody was told yet.
        writing_bytes: Bytes that are in use: somebody may write them, or they have arrived and are being copied on.
        quarantined_bytes: Bytes in doubt.
        largest_gap_bytes: The largest extent that could be granted now.
        waiting_requests: Requests that wait.
        waiting_bytes: Bytes that they would occupy.
        peers: By name, each peer that holds bytes or waits.
        extents: Every held extent, by offset.
        reasons: By offset, why an extent is in quarantine.
    """

    name: str
    capacity_bytes: int
    free_bytes: int
    reserved_bytes: int
    writing_bytes: int
    quarantined_bytes: int
    largest_gap_bytes: int
    waiting_requests: int
    waiting_bytes: int
    peers: Mapping[str, PeerSnapshot]
    extents: list[ExtentRow]
    reasons: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class ArenaSnapshot:
    """Both shares at one moment; `enabled` is False where `arena_bytes=0`."""

    enabled: bool
    sending: ShareSnapshot
    receiving: ShareSnapshot
