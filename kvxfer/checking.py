"""Whether what arrived at the decode rank is what its prefill rank holds: sums of both, compared chunk by chunk.

A chunk is read back from the caller's blocks once it is there, whatever its route: so the way, the scatter and whoever
else writes those blocks are checked alike.
"""

from dataclasses import dataclass
from functools import partial
from typing import Final

from kvxfer.copy.port import CopyOutcome
from kvxfer.copy.tables import NOTHING
from kvxfer.errors import Code
from kvxfer.geometry import ChunkPlan, Damage, SumPlan, damage, selected
from kvxfer.landing import Host
from kvxfer.planning import Bound
from kvxfer.protocol.messages import Cancel, Status, Sums
from kvxfer.protocol.receiving import ReceiveState
from kvxfer.protocol.sending import Failure

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
    """Compares the chunks of one transfer. It does not keep the transfer, which keeps it.

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
        self._heard: Sums | None = None
        self._sums: dict[int, bytes] = {}  # of chunks that have landed, as the peer adds them up
        self._early: list[tuple[int, int]] = []  # landed before there was a plan
        self._right: set[int] = set()

    @classmethod
    def of(cls, transfer: int, every: int) -> "Checking | None":
        """What compares its chunks; None if that is not wanted."""
        return cls(transfer, every) if every else None

    def planned(self, host: Host, bound: Bound) -> None:
        """There is a plan: what has landed before can be looked at."""
        early, self._early = self._early, []
        for chunk, nbytes in early:
            host.run(self._look, host, bound, chunk, nbytes)

    def heard(self, message: Sums) -> None:
        """The peer says what the chunk adds up to whose result comes next."""
        self._heard = message

    def arrived(self, chunk: int) -> None:
        """A chunk that was waited for has come; what is said of any other is not kept."""
        heard, self._heard = self._heard, None
        if heard is not None and heard.chunk == chunk and selected(self._transfer, chunk, self._every):
            self._sums[chunk] = heard.sums

    def holds(self, host: Host, bound: Bound | None, chunk: int, nbytes: int) -> bool:
        """A chunk is in the caller's blocks. Whether it is not done yet: it is compared first, and then lands again.

        If it is not right, the transfer stops.
        """
        if not nbytes or chunk in self._right or not selected(self._transfer, chunk, self._every):
            return False
        if bound is None:
            self._early.append((chunk, nbytes))
        else:
            self._look(host, bound, chunk, nbytes)
        return True

    def _look(self, host: Host, bound: Bound, chunk: int, nbytes: int) -> None:
        host.plan(partial(bound.chunk, chunk), partial(self._read_back, host, chunk, nbytes), rows=bound.chunk_rows)

    def _read_back(self, host: Host, chunk: int, nbytes: int, part: ChunkPlan) -> None:
        if host.moving:
            compare = partial(self._compare, host, chunk, nbytes, part)
            host.write(NOTHING, nbytes, compare, SumPlan.at_destination(part))

    def _compare(self, host: Host, chunk: int, nbytes: int, part: ChunkPlan, outcome: CopyOutcome) -> None:
        if outcome.error is not None:
            raise outcome.error
        theirs = self._sums.pop(chunk, b"")
        if not host.moving:  # given up meanwhile
            return
        if theirs == outcome.sums:
            host.site.metrics.chunk_checked("ok")
            self._right.add(chunk)
            host.landed(chunk, nbytes)
        elif len(theirs) != len(outcome.sums):
            self._fail(host, Finding(chunk, _NOWHERE), f"{host.peer.name} did not say what chunk {chunk} adds up to")
        else:
            where = damage(part, outcome.sums, theirs)
            self._fail(host, Finding(chunk, where), f"chunk {chunk} is not what {host.peer.name} holds: {_said(where)}")

    def _fail(self, host: Host, finding: Finding, reason: str) -> None:
        self.finding = finding
        host.site.metrics.chunk_checked("damaged")
        host.stop(Failure(Status.FAILED, Code.INTEGRITY, reason))
        if host.machine.state is ReceiveState.STOPPED:  # its last result has come, so there was nothing to ask
            host.say(Cancel(self._transfer, Code.INTEGRITY))


def _said(where: Damage) -> str:
    blocks = "; ".join(f"{_short(ids)} of group {group!r}" for group, ids in where.blocks.items())
    return f"layers {_short(where.layers)} ({', '.join(where.tensors)}) differ in blocks {blocks}"


def _short(numbers: tuple[int, ...]) -> str:
    more = f", ... ({len(numbers)})" if len(numbers) > _NAMED else ""
    return ", ".join(map(str, numbers[:_NAMED])) + more
