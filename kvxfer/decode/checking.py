"""Whether what arrived at the decode rank is what its prefill rank holds: sums of both, compared chunk by chunk.

A chunk is read back from the caller's blocks once it is there, whatever its route: so the way, the scatter and whoever
else writes those blocks are checked alike.
"""

from dataclasses import dataclass
from typing import Final

from kvxfer.geometry import ChunkPlan, Damage, damage, selected
from kvxfer.protocol import messages as wire

__all__ = ["Checking", "Finding"]

_NAMED: Final = 8
_NOWHERE: Final = Damage((), (), {})


@dataclass(frozen=True, slots=True)
class Finding:
    """A chunk that is not what it should be.

    Attributes:
        chunk: Its number.
        damage: Where it differs; empty if the prefill rank did not say what it should be.
    """

    chunk: int
    damage: Damage


class Checking:
    """What a prefill rank says the chunks of one transfer add up to, and the first that differs.

    Args:
        transfer: Its number.
        every: One chunk in so many is compared.

    Attributes:
        finding: The first that differs.
    """

    def __init__(self, transfer: int, every: int) -> None:
        self.finding: Finding | None = None
        self._transfer: Final = transfer
        self._every: Final = every
        self._sums: dict[int, bytes] = {}  # by chunk

    def heard(self, message: wire.Sums) -> None:
        """The peer says what a chunk adds up to that it has, and that has not arrived yet."""
        if selected(self._transfer, message.chunk, self._every):
            self._sums[message.chunk] = message.sums

    def wants(self, chunk: int, nbytes: int) -> bool:
        """Whether a chunk of so many bytes is compared."""
        return nbytes > 0 and selected(self._transfer, chunk, self._every)

    def compare(self, chunk: int, part: ChunkPlan, ours: bytes, peer: str) -> str:
        """What is wrong with a chunk that adds up to this here; empty if nothing is."""
        theirs = self._sums.pop(chunk, b"")
        if theirs == ours:
            return ""
        if len(theirs) != len(ours):
            self.finding = Finding(chunk, _NOWHERE)
            return f"{peer} did not say what chunk {chunk} adds up to"
        self.finding = Finding(chunk, damage(part, ours, theirs))
        return f"chunk {chunk} is not what {peer} holds: {_said(self.finding.damage)}"


def _said(where: Damage) -> str:
    blocks = "; ".join(f"{_short(ids)} of group {group!r}" for group, ids in where.blocks.items())
    return f"layers {_short(where.layers)} ({', '.join(where.tensors)}) differ in blocks {blocks}"


def _short(numbers: tuple[int, ...]) -> str:
    more = f", ... ({len(numbers)})" if len(numbers) > _NAMED else ""
    return ", ".join(map(str, numbers[:_NAMED])) + more
