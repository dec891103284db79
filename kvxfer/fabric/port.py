"""The fabric port: one-sided writes and reads between registered memories of two processes.

`Transport` is what a library underneath (NIXL) offers: synchronous calls that may block for a while and must all come
from one thread. `kvxfer.fabric.pump.Fabric` owns a transport, calls it from one service only, and gives the rest of
kvxfer an interface that never blocks. The in-process loopback is another `Transport`.

A post cannot be recalled. What can be decided, once and for all, is whether it is made: that is the `Cell`.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import FabricError
from kvxfer.lazy import lazy

__all__ = [
    "Cell",
    "CellState",
    "Descriptors",
    "Handle",
    "Memory",
    "Operation",
    "Outcome",
    "Passage",
    "Post",
    "PostResult",
    "Told",
    "Transport",
]


class Operation(StrEnum):
    """Direction of a post, seen from the side that makes it."""

    WRITE = "write"
    READ = "read"


@dataclass(frozen=True, slots=True)
class Told:
    """Over which lane posts of one kind go to a peer, as the library underneath says it.

    Attributes:
        operation: `"write"` or `"read"`.
        near: Kind of memory here, as the library calls it (`"host"`, `"cuda"`).
        far: Kind of memory there.
        lanes: Their names; several where memory of one kind goes over several, none where nothing was said.
        sure: False where it is one of `lanes`, and which is not known.
    """

    operation: str
    near: str
    far: str
    lanes: tuple[str, ...]
    sure: bool

    @property
    def over(self) -> str:
        """The lanes in words; empty without any."""
        return (" and " if self.sure else " or ").join(self.lanes)


@dataclass(frozen=True, slots=True)
class Memory:
    """A stretch of memory to register.

    Attributes:
        kind: `"DRAM"` or `"VRAM"`.
        device: Index of the GPU; 0 for DRAM.
        address: First byte.
        nbytes: Length.
    """

    kind: str
    device: int
    address: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class Descriptors:
    """Contiguous pieces on one side of a post.

    Attributes:
        kind: As in `Memory`.
        device: As in `Memory`.
        pieces: int64 (N, 2): address and length in bytes.
        kept: What transports have made of it, by a key of theirs; it must not depend on which of them made it.
    """

    kind: str
    device: int
    pieces: NDArray[np.int64]
    kept: dict[Hashable, Any] = field(default_factory=dict[Hashable, Any], init=False, repr=False)

    @lazy
    def nbytes(self) -> int:
        """Bytes in all."""
        return int(self.pieces[:, 1].sum())


class Passage(Protocol):
    """A way into memory whose owner may close it: see `kvxfer.mapped.locks`."""

    def enter(self) -> bool:
        """Before anything is posted. False if the owner has taken its grant back: then nothing may be, now or ever."""
        ...

    def leave(self) -> None:
        """Once after an `enter` that was granted, when nothing of it is under way any more."""
        ...


class CellState(StrEnum):
    """`QUEUED -> POSTED -> ENDED`, or `QUEUED -> DEAD`."""

    QUEUED = "queued"
    POSTED = "posted"
    ENDED = "ended"
    DEAD = "dead"


class Cell:
    """Decides once whether a chunk is written: the fabric's thread posts it, or the loop kills it, never both.

    A post is cut into several; the lease is checked before each of them, inside the same critical section. `kill` never
    waits for a post that is being made: it then answers False, asks that no further part be posted, and the result of
    the post tells how far it went.

    Args:
        deadline: When the lease ends, by the clock that `post` is given.
        passage: What leads to the memory that is written or read: entered before the first part is posted, left when
            everything has ended, and kept while anything is in doubt.
    """

    def __init__(self, deadline: float, passage: Passage | None = None) -> None:
        self._lock = threading.Lock()
        self._state = CellState.QUEUED
        self._deadline = deadline
        self._passage = passage
        self._stop = False

    @property
    def state(self) -> CellState:
        """Where the cell stands now; `DEAD` and `ENDED` are final."""
        return self._state

    def post(self, now: Callable[[], float], make: Callable[[], None]) -> bool:
        """Run `make` (post one part) unless the cell is dead, stopped, past its lease or kept out. False if it was not.

        Only the thread that posts (the fabric's, or a copy's on `mapped`) calls this. A first refusal kills the cell.
        """
        with self._lock:
            over = self._stop or self._state in (CellState.DEAD, CellState.ENDED) or now() >= self._deadline
            if over or (self._state is CellState.QUEUED and self._passage is not None and not self._passage.enter()):
                if self._state is CellState.QUEUED:
                    self._state = CellState.DEAD
                return False
            self._state = CellState.POSTED
            make()
            return True

    def again(self, make: Callable[[], None]) -> bool:
        """Run `make` (move once more what was moved before), if anything was posted. False if it was not run.

        Neither the lease nor `kill` keeps it out: what it touches may be touched already, until `end`.
        """
        with self._lock:
            if self._state is CellState.POSTED:
                make()
            return self._state is CellState.POSTED

    def kill(self) -> bool:
        """Make sure that nothing more is posted. True if nothing ever was, and so nothing is in flight."""
        self._stop = True
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._state is CellState.QUEUED:
                self._state = CellState.DEAD
            return self._state is CellState.DEAD
        finally:
            self._lock.release()

    def end(self) -> None:
        """Everything that was posted has ended, as the thread that posts says, or whoever knows it of an agent."""
        with self._lock:
            if self._state is CellState.POSTED:
                self._state = CellState.ENDED
                if self._passage is not None:
                    self._passage.leave()


class Outcome(StrEnum):
    """How a post ended."""

    DONE = "done"  # every byte is at its destination
    STOPPED = "stopped"  # killed or past its lease; what had been posted has ended, nothing is in flight
    FAILED = "failed"  # the transport refused it, or failed and has been through with it since; nothing is in flight
    IN_DOUBT = "in_doubt"  # the transport failed after posting, or made no progress: bytes may still land


@dataclass(frozen=True, slots=True)
class PostResult:
    """The end of a post.

    Attributes:
        outcome: See `Outcome`.
        error: The transport's error, translated, unless the outcome is `DONE` or `STOPPED`.
        posted_bytes: Bytes of the parts that were posted.
        posting: Seconds spent inside the transport's post calls.
        first: When the first part was posted, by the runtime's clock (0.0 if none was).
        finished: When the end was seen.
    """

    outcome: Outcome
    error: FabricError | None
    posted_bytes: int
    posting: float
    first: float
    finished: float


def _nobody(ended: bool) -> None:
    """Nobody waits for the end of what was given up."""


@dataclass(frozen=True, slots=True, eq=False)
class Post:
    """One chunk to write or read.

    Attributes:
        peer: Name that `connect` returned.
        operation: Write local pieces into remote ones, or read remote into local.
        local: Pieces here.
        remote: Pieces there, piece by piece as long as the local ones.
        cell: Decides whether it is posted.
        done: Called exactly once, on the fabric's thread; must return quickly and must not raise.
        runs_on: Whether it goes on without the agent that has it under way, as a copy between GPUs of one host does.
        late: Called likewise, at most once, if it was `IN_DOUBT` and that is over for memory of this side: with True if
            all of it has ended after all, with False if the agent was made anew, so that only what had left this side
            may still land at the peer.
    """

    peer: str
    operation: Operation
    local: Descriptors
    remote: Descriptors
    cell: Cell
    done: Callable[[PostResult], None]
    runs_on: bool = False
    late: Callable[[bool], None] = _nobody


Handle: TypeAlias = object
"""What a transport returns for a posted part."""


class Transport(Protocol):
    """The library underneath. Calls come from the fabric's thread unless they say otherwise.

    Every error is a `FabricError`.
    """

    @property
    def name(self) -> str:
        """Unique name of this agent; another one after `renew`."""
        ...

    @property
    def takes_lists(self) -> bool:
        """Whether pieces between two GPUs are posted as one list, and not one by one. Asked after `setup`."""
        ...

    @property
    def orderly(self) -> bool:
        """Whether it works inside of these calls only, and a part that is done ends with all before it to that peer."""
        ...

    @property
    def attributable(self) -> bool:
        """Whether what lands here while none of these is called was moved by its writer's process, and ends with it.

        Not where a device might move it that a process can leave to another one, as a NIC is left to a forked child.
        """
        ...

    def told(self, peer: str) -> tuple[Told, ...] | str:
        """Over which lanes posts to this peer go, as far as there were any, or why it says none. From any thread."""
        ...

    def setup(self) -> None:
        """Called once on the fabric's thread before anything else (device context, agent creation)."""
        ...

    def register(self, memories: Sequence[Memory]) -> object:
        """Make memory reachable; returns a token for `deregister`."""
        ...

    def deregister(self, token: object) -> None:
        """Undo one `register`, exactly once."""
        ...

    def metadata(self, tokens: Sequence[object]) -> bytes:
        """What a peer needs to reach the memories of these registrations, and only those."""
        ...

    def connect(self, metadata: bytes) -> str:
        """Learn about a peer; returns its name."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer. Not a fence: what was posted may still land."""
        ...

    def post(self, peer: str, operation: Operation, local: Descriptors, remote: Descriptors) -> Handle:
        """Begin to move pieces. May block while it copies."""
        ...

    def poll(self, handle: Handle) -> bool:
        """True when the part is done. Raises `FabricError` if it failed."""
        ...

    def release(self, handle: Handle) -> None:
        """Give back a handle, once, after it ended or was given up."""
        ...

    def progress(self) -> None:
        """Let the library work; a target needs this too."""
        ...

    def renew(self) -> bool:
        """Destroy the agent and make another in its place, under a new name, which knows no memory and no peer.

        Every handle was given back before. What is left of posts to and by the old agent moves no byte of this side
        any more: of those that came, or were to go, over a network; over shared memory a peer may still write.

        Returns:
            False if the old agent cannot be destroyed, or another not be made now: then nothing has changed.
        """
        ...

    def close(self) -> None:
        """Destroy the agent. Idempotent."""
        ...
