"""One reserved run of arena bytes and the states that it may pass through, as a table.

    FREE               -> RESERVED      granted
    RESERVED           -> WRITING       the address is told, or our own gather begins
    RESERVED, WRITING  -> FREE          it is proven that nobody writes or reads the bytes any more
    RESERVED, WRITING  -> QUARANTINED   somebody may still touch the bytes
    QUARANTINED        -> FREE          there is evidence that nobody can

Anything else is an `InvariantError`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum, unique
from types import MappingProxyType
from typing import Final

__all__ = ["TRANSITIONS", "Extent", "ExtentState", "InvariantError", "check_transition"]


class InvariantError(RuntimeError):
    """The books would become wrong: an illegal transition, a second release, a stale handle.

    It means a defect in kvxfer, never a mistake of the caller or of a peer, and is therefore no `KvxferError`. The call
    that raised it changed nothing.
    """


@unique
class ExtentState(StrEnum):
    """What may be happening to an extent's bytes."""

    FREE = "free"
    """Nobody holds them; the next grant may."""
    RESERVED = "reserved"
    """Granted, and nobody has been told the address yet."""
    WRITING = "writing"
    """In use until given back: the peer writes them and our own copies read them, chunk after chunk, or we gather."""
    QUARANTINED = "quarantined"
    """In doubt: they leave this state only on evidence, never because time has passed."""


TRANSITIONS: Final[Mapping[ExtentState, frozenset[ExtentState]]] = MappingProxyType(
    {
        ExtentState.FREE: frozenset({ExtentState.RESERVED}),
        ExtentState.RESERVED: frozenset({ExtentState.WRITING, ExtentState.QUARANTINED, ExtentState.FREE}),
        ExtentState.WRITING: frozenset({ExtentState.QUARANTINED, ExtentState.FREE}),
        ExtentState.QUARANTINED: frozenset({ExtentState.FREE}),
    }
)
"""Every legal move: from each state, where it may go."""


def check_transition(source: ExtentState, target: ExtentState) -> None:
    """Refuse a move that the table does not have.

    Raises:
        InvariantError: `TRANSITIONS` has no move from `source` to `target`.
    """
    if target not in TRANSITIONS[source]:
        legal = ", ".join(sorted(state.name for state in TRANSITIONS[source]))
        raise InvariantError(f"an extent cannot go from {source.name} to {target.name}; from there only to {legal}")


@dataclass(slots=True, eq=False)
class Extent:
    """A run of arena bytes that one peer holds. Only the `Share` that granted it changes it.

    Two extents are equal only if they are the same grant: the same bytes granted again are another extent, with another
    generation.

    Attributes:
        address: First byte, as an absolute address in this process or on this device; a multiple of the alignment.
        offset: First byte, counted from the base of the share.
        length: Bytes that it occupies: `nbytes` rounded up to the alignment.
        nbytes: Bytes that were asked for; the rest is padding, and no part of any grant to the peer.
        peer: Who holds it.
        generation: Number of the grant within its share, from 1 upwards, never used twice.
        state: Where it is in the table above; FREE for ever once it was released.
        reason: Why it was quarantined, else empty.
    """

    address: Final[int]
    offset: Final[int]
    length: Final[int]
    nbytes: Final[int]
    peer: Final[str]
    generation: Final[int]
    state: ExtentState = ExtentState.RESERVED
    reason: str = ""
