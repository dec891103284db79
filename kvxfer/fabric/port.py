"""The fabric port: one-sided writes and reads between registered memories of two processes.

`Transport` is what a library underneath (NIXL) offers: synchronous calls, of which one is made at a time.
`kvxfer.fabric.calls.Fabric` owns a transport and makes those that may block for a while; posts are made by the mover,
which calls C functions (`Native`). The in-process loopback is another `Transport`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvxfer.copy.port import Descriptors, Native, Operation

__all__ = ["Descriptors", "Memory", "Native", "Operation", "Transport"]


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


class Transport(Protocol):
    """The library underneath. Calls come one at a time, from the fabric's thread unless they say otherwise.

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

    def setup(self) -> None:
        """Called once on the fabric's thread before anything else (device context, agent creation)."""
        ...

    def native(self) -> Native:
        """The agent as it is now, as the mover calls it; another one after `renew`."""
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
