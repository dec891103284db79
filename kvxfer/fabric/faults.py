"""What may happen to a post of the loopback transport, and a post to which it happens."""

import ctypes
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvxfer.errors import FabricError
from kvxfer.fabric.port import Operation

__all__ = ["Fault", "Faults", "Initiator", "LogEntry", "Part"]


class Initiator(Protocol):
    """Who posted."""

    @property
    def name(self) -> str:
        """Unique name of this agent."""
        ...

    def keys(self) -> frozenset[int]:
        """Numbers of its registrations that are in force."""
        ...


class LogEntry(NamedTuple):
    """A range of bytes that was touched at the far end of a post, when it was touched.

    Attributes:
        operation: What the initiator did.
        src: Agent that posted.
        dst: Agent whose memory was written or read.
        address: First byte there.
        length: Number of bytes.
    """

    operation: Operation
    src: str
    dst: str
    address: int
    length: int


@dataclass(slots=True, eq=False)
class Fault:
    """What happens to one coming post.

    Attributes:
        skip: Posts that pass before.
        refuse: It is refused; else it breaks off.
        after_bytes: Bytes that land before it does.
        at_post: Whether the call that posts fails, or a poll.
        disconnected: Whether the error says that the peer is gone.
        lingers: Whether the rest of the bytes stays in flight.
        damage: It ends as if nothing were, but a bit of this byte is flipped on the way.
    """

    skip: int
    refuse: bool
    after_bytes: int = 0
    at_post: bool = False
    disconnected: bool = False
    lingers: bool = False
    damage: int | None = None


@dataclass(slots=True, eq=False)
class Part:
    """A posted part: the handle of this transport.

    Attributes:
        src: Who posted it.
        dst: Name of the agent at the far end.
        operation: Which way the bytes go.
        copies: What it still owes: (local address, remote address, bytes).
        keys: The registrations on both sides that must still be in force when bytes move.
        polls: Polls to answer with "not yet".
        due: When its bytes land, by the clock of `LoopbackNetwork.pace`.
        held: It waits for `LoopbackNetwork.release`.
        wedged: It never ends.
        released: It was given back.
        error: What a poll raises.
        carried: What its copies carry, once they are read already.
        damage: Which of its bytes arrives with a bit flipped.
    """

    src: "Initiator"
    dst: str
    operation: Operation
    copies: list[tuple[int, int, int]]
    keys: frozenset[int]
    polls: int = 0
    due: float = 0.0
    held: bool = False
    wedged: bool = False
    released: bool = False
    error: FabricError | None = None
    carried: list[bytes] | None = None
    damage: int | None = None

    def owing(self, nbytes: int) -> list[tuple[int, int, int]]:
        """What it owes once so many bytes of it have landed."""
        rest: list[tuple[int, int, int]] = []
        for here, there, length in self.copies:
            gone = min(nbytes, length)
            nbytes -= gone
            if gone < length:
                rest.append((here + gone, there + gone, length - gone))
        return rest

    def leave(self) -> None:
        """Have no more to do with the initiator's memory: what a write carries was read, a read carries nothing."""
        if self.operation is Operation.READ:
            self.copies.clear()
        elif self.carried is None:
            self.carried = [ctypes.string_at(here, length) for here, _, length in self.copies]


@dataclass(slots=True)
class Faults:
    """The faults that one peer is under.

    Attributes:
        coming: Those of single posts.
        polls: Polls that are answered with "not yet".
        held: Posts wait for `LoopbackNetwork.release`.
        wedged: Posts never end.
        needs_target: Their bytes land when the far end makes progress.
        mute: Notifications are lost.
        echo: They come twice.
        bytes_per_second: Speed of the link; 0 for none.
        busy_until: When the link is through with what was posted so far.
    """

    coming: list[Fault] = field(default_factory=list[Fault])
    polls: int = 0
    held: bool = False
    wedged: bool = False
    needs_target: bool = False
    mute: bool = False
    echo: bool = False
    bytes_per_second: float = 0.0
    busy_until: float = 0.0
