"""What is asked of the mover: a copy, when it may begin, and what guards the memory that it writes.

A copy is reported once, after every byte is visible to work that is launched afterwards on any stream of the device.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from kvxfer.copy.tables import Tables
from kvxfer.errors import KvxferError
from kvxfer.geometry.sums import SumPlan

__all__ = ["READY", "AllOf", "CopyJob", "CopyOutcome", "Direction", "Event", "Gate", "Passage", "join"]


class Event(Protocol):
    """Something on the device that will have happened. `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether it has happened; never blocks."""
        ...


class _Ready:
    """An event that has always fired."""

    def query(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "kvxfer.READY"


READY: Final[Event] = _Ready()
"""Pass it as `after=` when the work on the blocks is known to be complete."""


class Direction(StrEnum):
    """Gathers and scatters have a stream each on a GPU, so that neither waits for the other."""

    GATHER = "gather"
    SCATTER = "scatter"


class AllOf:
    """Has happened when all of its events have.

    Attributes:
        events: Those that had not when they were last asked.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.events: Final = list(events)

    def query(self) -> bool:
        """Whether all have happened; those that have are not asked again."""
        while self.events:
            if not self.events[-1].query():
                return False
            self.events.pop()
        return True


def join(events: Sequence[Event]) -> Event:
    """One event for several."""
    if not events:
        return READY
    return events[0] if len(events) == 1 else AllOf(events)


class Passage(Protocol):
    """A way into memory of another process, whose owner may close it: see `kvxfer.mapped.locks`."""

    def lend(self) -> tuple[int, int, int, int, int]:
        """What the mover passes it by, until `give_back`: as the words of a record from LOCK on."""
        ...

    def give_back(self) -> None:
        """The mover is through with it."""
        ...


@dataclass(frozen=True, slots=True)
class Gate:
    """A word in the memory of the GPU that is written to, with which its owner keeps writers out.

    Its high half is a generation, its low half counts the thread blocks that write. Each block counts itself in, goes
    on only if the generation is the one that it was given, and counts itself out when all that it wrote is visible. The
    owner raises the generation, and knows that nobody writes any more when the count is 0.

    Attributes:
        address: Where this GPU addresses it; a multiple of 8.
        generation: What was granted.
    """

    address: int
    generation: int


@dataclass(frozen=True, slots=True)
class CopyOutcome:
    """How a job ended.

    Attributes:
        error: None if every byte has been copied and is visible.
        started: When the copy was launched, by the runtime's clock.
        finished: When it was seen to be complete.
        stopped: Whether it was cancelled, its lease had ended, or something kept (a part of) it out. Nothing of it is
            under way.
        sums: What was added up, as it travels; empty if nothing was to be, or the job failed.
    """

    error: KvxferError | None
    started: float
    finished: float
    stopped: bool = False
    sums: bytes = b""


@dataclass(frozen=True, slots=True, eq=False)
class CopyJob:
    """One copy to run.

    Attributes:
        tables: What to copy. Its addresses must stay valid until `done` has been called.
        done: Called exactly once, on the loop; must return quickly and must not raise.
        after: The copy is launched when this has fired.
        until: When its lease ends, by the runtime's clock: then it is not launched any more.
        passage: Passed in the moment of the launch, where the memory that is written is another process's. It is kept
            until nothing of the copy is under way.
        gate: Where the memory that is written is another process's, and that is on a GPU.
        nbytes: About how many bytes it copies.
        owner: On whose behalf: owners take turns, by bytes.
        sums: What is added up when the copy has run. Its addresses must stay valid likewise.
    """

    tables: Tables
    done: Callable[[CopyOutcome], None]
    after: Event = READY
    until: float = math.inf
    passage: Passage | None = None
    gate: Gate | None = None
    nbytes: int = 0
    owner: Hashable = None
    sums: SumPlan | None = None
