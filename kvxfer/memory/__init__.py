"""The books of memory: who holds which bytes of the arena, and which of the caller's blocks are spoken for.

Synchronous and deterministic: no clock, and every decision is returned for the caller to carry out. Only `device`
touches real memory.
"""

from kvxfer.memory.books import (
    ALIGNMENT,
    TRANSITIONS,
    Arena,
    Custody,
    CustodySnapshot,
    Extent,
    ExtentRow,
    ExtentState,
    HolderSnapshot,
    InvariantError,
    PeerSnapshot,
    Request,
    Share,
    ShareSnapshot,
)
from kvxfer.memory.device import Backing, Kind, allocate

__all__ = [
    "ALIGNMENT",
    "TRANSITIONS",
    "Arena",
    "Backing",
    "Custody",
    "CustodySnapshot",
    "Extent",
    "ExtentRow",
    "ExtentState",
    "HolderSnapshot",
    "InvariantError",
    "Kind",
    "PeerSnapshot",
    "Request",
    "Share",
    "ShareSnapshot",
    "allocate",
]
