"""The copy port: what every implementation of a copy offers, on whatever device.

An executor runs copy plans off the event loop, one direction independent of the other. It reports each job
once, from its own thread, after every byte is visible to work that is launched afterwards on any stream of the device.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from kvxfer.errors import KvxferError
from kvxfer.geometry.copyplan import CopyPlan
from kvxfer.geometry.sums import SumPlan

__all__ = ["FREELY", "READY", "CopyJob", "CopyOutcome", "Direction", "Event", "Executor", "Gate", "Permit"]


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
    """Gathers and scatters have streams (or threads) of their own, so that neither waits for the other."""

    GATHER = "gather"
    SCATTER = "scatter"


class Permit(Protocol):
    """Decides, in the moment of the launch, whether a copy may run."""

    def post(self, now: Callable[[], float], make: Callable[[], None]) -> bool:
        """Run `make`, which launches the copy, or answer False: then it is not launched, now or ever."""
        ...

    def end(self) -> None:
        """Nothing of the copy is under way any more."""
        ...


class _Freely:
    """A permit that is always given."""

    def post(self, now: Callable[[], float], make: Callable[[], None]) -> bool:
        make()
        return True

    def end(self) -> None:
        """Nobody asks."""


FREELY: Final[Permit] = _Freely()
"""For copies within memory of one's own."""


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
        stopped: Whether its permit was refused, or a gate kept (a part of) it out. Nothing of it is under way.
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
        plan: What to copy. Its addresses must stay valid until `done` has been called.
        done: Called exactly once, from the executor's thread; must return quickly and must not raise.
        after: The copy is launched when this has fired.
        permit: Asked in the moment of the launch.
        gate: Where the memory that is written is another process's, and that is on a GPU.
        nbytes: About how many bytes it copies.
        owner: On whose behalf: owners take turns, by bytes.
        sums: What is added up when the copy has run. Its addresses must stay valid likewise.
    """

    plan: CopyPlan
    done: Callable[[CopyOutcome], None]
    after: Event = READY
    permit: Permit = FREELY
    gate: Gate | None = None
    nbytes: int = 0
    owner: Hashable = None
    sums: SumPlan | None = None


class Executor(Protocol):
    """Runs copy jobs on one device."""

    def submit(self, job: CopyJob, direction: Direction) -> None:
        """Queue a job. Safe from any thread; jobs of one owner and direction are launched in order of their events."""
        ...

    def warm(self, plans: Iterable[CopyPlan]) -> None:
        """Compile whatever copies of this shape need. May take seconds: call it from a worker thread, once a pair."""
        ...

    def warm_sums(self, plans: Iterable[SumPlan]) -> None:
        """The same for sums."""
        ...

    def occupy(self, ctas: int) -> None:
        """Let copies occupy so many thread blocks from now on, where the device has such. Safe from any thread."""
        ...

    def inside(self, gate: int, *, raised: bool) -> int:
        """How many writers of other devices are inside of a `Gate` in memory of this one, whose address is `gate`.

        If `raised`, its generation is raised, so that nobody else gets in. May wait for the device: call it from a
        worker thread.
        """
        ...

    def standing(self, since: float) -> bool:
        """Whether a copy that was launched before `since` still runs where other calls of a driver would wait for it.

        Safe from any thread.
        """
        ...

    def close(self, timeout: float) -> bool:
        """Refuse new jobs, finish the rest, stop. False if it did not end within `timeout` seconds."""
        ...
