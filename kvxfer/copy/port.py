"""What is asked of the mover: a copy, a post, or one after the other; when it may begin, and what guards the memory.

A copy is reported once, after every byte is visible to work that is launched afterwards on any stream of the device.
What is posted then cannot be recalled, but each of its parts can be kept from being posted.
"""

import asyncio
from collections.abc import Callable, Hashable, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvxfer.errors import EventError, FabricError, KvxferError

if TYPE_CHECKING:  # what is asked for needs nothing of those who plan it
    from kvxfer.copy.template import Batch
    from kvxfer.geometry.cache import CacheGeometry
    from kvxfer.geometry.plan import SumPlan

__all__ = [
    "FOREVER",
    "MEMORIES",
    "NO_PIECES",
    "READY",
    "AllOf",
    "CopyJob",
    "CopyOutcome",
    "Descriptors",
    "Direction",
    "Event",
    "Gate",
    "Native",
    "Operation",
    "Passage",
    "Post",
    "Turns",
    "as_event",
    "has_fired",
    "join",
]


class Event(Protocol):
    """Something on the device that will have happened. `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether it has happened; never blocks."""
        ...


class AllOf:
    """Has happened when all of its events have."""

    def __init__(self, events: Sequence[Event] = ()) -> None:
        self.events: Final = list(events)  # those that had not when they were last asked

    def query(self) -> bool:
        """Whether all have happened; those that have are not asked again."""
        while self.events:
            if not self.events[-1].query():
                return False
            self.events.pop()
        return True

    def __repr__(self) -> str:
        return f"AllOf({self.events})" if self.events else "kvxfer.READY"


READY: Final[Event] = AllOf()
"""Pass it as `after=` when the work on the blocks is known to be complete."""


FOREVER: Final = 9e9
"""Seconds of the runtime's clock at which nothing ends any more. None is later: in ns it would not fit in 64 bits."""


def has_fired(event: Event) -> bool:
    """Whether an event has happened. Not if that cannot be asked: whoever waits for it is told why."""
    try:
        return bool(event.query())
    except (Exception, asyncio.CancelledError):  # noqa: BLE001 - an event of the caller's
        return False


class Direction(StrEnum):
    """Gathers and scatters have a stream each on a GPU, so that neither waits for the other."""

    GATHER = "gather"
    SCATTER = "scatter"


def join(events: Sequence[Event]) -> Event:
    """One event for several."""
    if not events:
        return READY
    return events[0] if len(events) == 1 else AllOf(events)


def as_event(after: Any, geometry: "CacheGeometry") -> Event:
    """Turn `after=` into an event that can be queried.

    Args:
        after: A recorded CUDA event, a stream (an event is recorded on it now), `READY`, or None on CPU memory.
        geometry: Tells whether an event is needed.

    Raises:
        EventError: If it is missing for CUDA memory, was never recorded, or is none of these.
    """
    if after is None:
        if geometry.kind == "cuda":
            raise EventError(
                "after= is required for CUDA memory: pass a recorded torch.cuda.Event, a stream, or kvxfer.READY "
                "if the work on these blocks is known to be complete"
            )
        return READY
    if isinstance(after, AllOf):
        return after
    if isinstance(after, type):  # its methods are there, and none of them can be called
        raise EventError(
            f"after= must be an event, a stream or kvxfer.READY, not the class {after.__name__} itself; "
            "pass an event that was recorded, or a stream"
        )
    record = getattr(after, "record_event", None)
    if callable(record):  # a torch.cuda.Stream
        return cast("Event", record())
    if not callable(getattr(after, "query", None)):
        raise EventError(f"after= must be an event, a stream or kvxfer.READY, not {type(after).__name__}")
    # torch makes the CUDA event when it is first recorded; until then its handle is 0 and query() says True
    if getattr(after, "cuda_event", None) == 0 or getattr(after, "event_id", None) == 0:
        raise EventError("the event passed as after= was never recorded")
    recorded: Event = after
    return recorded


class Passage(Protocol):
    """A way into memory of another process, whose owner may close it: see `kvxfer.safety.fence`."""

    def lend(self) -> tuple[int, int, int, int, int]:
        """What the mover passes it by, until `give_back`: as the words of a record from LOCK on."""
        ...

    def give_back(self) -> None:
        """The mover is through with it."""
        ...


class Gate(Struct, frozen=True):
    """A word in the memory of the GPU that is written to, with which its owner keeps writers out.

    Its high half is a generation, its low half counts the thread blocks that write. Each block counts itself in, goes
    on only if the generation is the one that it was given, and counts itself out when all that it wrote is visible. The
    owner raises the generation, and knows that nobody writes any more when the count is 0.
    """

    address: int  # where this GPU addresses it; a multiple of 8
    generation: int  # what was granted


class CopyOutcome(Struct, frozen=True):
    """How a job ended."""

    error: KvxferError | None  # None if every byte has been copied and is visible
    started: float  # when the copy was launched, by the runtime's clock
    # whether it was cancelled, its lease had ended, or something kept (a part of) it out. Nothing of it is under way
    stopped: bool = False
    sums: bytes = b""  # what was added up, as it travels; empty if nothing was to be, or the job failed
    in_doubt: bool = False  # whether something that was posted may still land. `error` says why
    posted: float = 0.0  # when the first part was posted; 0.0 if none was
    # seconds from the launch to when the copy was seen to be complete; of a flow, of all steps together
    copying: float = 0.0
    posting: float = 0.0  # seconds in which parts were being posted; likewise
    # seconds from the first part's post to the last one's end; of a flow, in which any step was between these
    wire: float = 0.0
    steps: int = 0  # of a flow, how many of its steps are done, from the first one on

    @property
    def may_move(self) -> bool:
        """Whether memory of this side may still be read or written for it; not where the peer is known to be gone."""
        gone = isinstance(self.error, FabricError) and self.error.disconnected
        return self.in_doubt and not gone


class Operation(StrEnum):
    """Direction of a post, seen from the side that makes it."""

    WRITE = "write"
    READ = "read"


MEMORIES: Final = MappingProxyType({"DRAM": 0, "VRAM": 1})
"""Kinds of memory, and how NIXL numbers them."""


class Descriptors(Struct, frozen=True, eq=False):
    """Contiguous pieces on one side of a post."""

    kind: str  # one of `MEMORIES`
    device: int  # index of the GPU; 0 for DRAM
    pieces: NDArray[np.int64]  # int64 (N, 2): address and length in bytes


class Native(Struct, frozen=True, eq=False):
    """A transport's agent as compiled code calls it."""

    # int64: addresses of C functions, in the order of `kvxfer.copy.records` from `AGENT_PORTS` on
    table: NDArray[np.int64]
    agent: int  # what they take as their first argument
    notices: int  # where notifications are put
    # what a code means that one of them returned, from: the code, what was being done, whether the peer is gone,
    # whether something may still be under way
    error: Callable[[int, str, bool, bool], FabricError]
    for_good: bool = False  # whether a peer that is gone never comes back under its name
    # whether it works inside of these calls only, and a part that is done ends with all before it to that peer
    orderly: bool = False
    listed: bool = False  # whether it takes pieces between GPUs as one list


class Turns(Struct, frozen=True):
    """How a flow takes turns with one of a peer's: what is gathered fills places, what is scattered empties them."""

    places: int  # in how many. A step waits until the one so many before it is done at the far side
    first: int = 0  # which of all steps the flow's first one is; both sides count them alike
    # 16 bytes that both name it by, where their movers notify each other; empty if only the loops do
    token: bytes = b""
    agent: str = ""  # with whose agent, as `Fabric.connect` named it


NO_PIECES: Final = Descriptors("DRAM", 0, np.zeros((0, 2), np.int64))
"""Where the steps of a flow say which."""


def _nobody(ended: bool) -> None:
    """Nobody waits for the end of what was given up."""


class Post(Struct, frozen=True, eq=False):
    """Pieces that the transport writes or reads."""

    peer: str  # name that `Fabric.connect` returned
    operation: Operation  # write local pieces into remote ones, or read remote into local
    local: Descriptors
    remote: Descriptors  # pieces there, piece by piece as long as the local ones, which move at least one byte
    # whether it goes on without the agent that has it under way, as a copy between GPUs of one host does
    runs_on: bool = False
    # called at most once after the job ended `IN_DOUBT`, when that is over for memory of this side: with True if all of
    # it has ended after all, with False if the agent was made anew, so that only what had left this side may still land
    # at the peer
    late: Callable[[bool], None] = _nobody


def _unheard(_: CopyOutcome) -> None:
    """Nobody hears of a step of a flow by itself."""


class CopyJob(Struct, frozen=True, eq=False):
    """One copy to run, and what is to be posted when it has run; or only one of the two.

    Of a flow it says what its steps have in common: `done`, `until`, `passage`, `owner`, and all of `post` but the
    pieces. Of a step it says the rest, and `until` if its own lease ends before. It may say so of several steps that
    follow one another, with a batch of tables: then each has a like share of the pieces. A single one without bytes is
    not posted.
    """

    tables: "Batch | None"  # what to copy, if anything. Its addresses must stay valid until `done` has been called
    # called exactly once, on the loop; must return quickly and must not raise
    done: Callable[[CopyOutcome], None] = _unheard
    after: Event = READY  # the copy is launched when this has fired
    # when its lease ends, by the runtime's clock: then it is not launched, and nothing posted, any more
    until: float = FOREVER
    # passed right before anything is written to memory of another process. It is kept until nothing of the job is under
    # way, or in doubt
    passage: Passage | None = None
    gate: Gate | None = None  # where the memory that is copied to is another process's, and that is on a GPU
    # whether a NIC wrote what is read, or what others read when this has run: on a GPU it is flushed first
    from_nic: bool = False
    owner: Hashable = None  # on whose behalf: owners take turns, by bytes
    sums: "SumPlan | None" = None  # what is added up, and nothing is copied. Its addresses must stay valid likewise
    post: Post | None = None  # what is posted then. Its addresses must stay valid until it has ended
