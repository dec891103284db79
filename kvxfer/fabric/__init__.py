"""The fabric: one-sided writes and reads between registered memories of two processes.

`Transport` is what is asked of a library underneath: synchronous calls, of which one is made at a time. `calls` owns
one, makes those that may take long and knows the peers; posts are made by the mover, which calls C functions
(`Native`). `nixl` is the transport of production, the only module that opens NIXL's library, and `loopback` an
in-process one that can be made to fail, for tests.
"""

import re
import struct
from collections.abc import Sequence
from typing import Final, Protocol

from kvxfer.copy.port import Native
from kvxfer.errors import FabricError
from kvxfer.protocol.messages import MemorySpan

__all__ = ["Transport", "agent_name", "check_owner", "is_of_worker", "pack", "unpack"]

# --- the port


class Transport(Protocol):
    """The library underneath. Calls come one at a time, from the fabric's thread unless they say otherwise.

    Every error is a `FabricError`.
    """

    @property
    def name(self) -> str:
        """Unique name of this agent; another one after `renew`."""
        ...

    def setup(self) -> None:
        """Called once on the fabric's thread before anything else (device context, agent creation)."""
        ...

    def native(self) -> Native:
        """The agent as it is now, as the mover calls it; another one after `renew`."""
        ...

    def register(self, memories: Sequence[MemorySpan]) -> object:
        """Make memory reachable, which is of kind `DRAM` or `VRAM`; returns a token for `deregister`."""
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


# --- metadata of an agent

_ENVELOPE: Final = struct.Struct("<4s16sHH")
"""Magic, incarnation, bytes of the agent's name, number of blobs; then their lengths (u32), the name, the blobs."""
_MAGIC: Final = b"kvx1"
_MOST_BLOBS: Final = 3
"""How the agent is reached, memory of the host, and of GPUs."""
_WORKERS: Final = re.compile(r"(kvxfer-[0-9a-f]{32})(\.[0-9]+)?")
"""What the agents of workers are called; a number follows when one was made anew."""


def agent_name(incarnation: bytes) -> str:
    """How the agent of a worker is called."""
    return f"kvxfer-{incarnation.hex()[:32]}"


def is_of_worker(agent: str) -> bool:
    """Whether it is a name that `check_owner` keeps to one worker."""
    return _WORKERS.fullmatch(agent) is not None


def check_owner(metadata: bytes, incarnation: bytes) -> None:
    """See that metadata, if it is under the name of a worker's agent, is under that of this worker's.

    NIXL knows agents by their names, and no two by one: whoever took that of another would keep it away.

    Raises:
        FabricError: If it is under the name of another.
    """
    try:
        _, name, _ = unpack(metadata)
    except FabricError:  # of another transport, or damaged: the transport will say
        return
    named = _WORKERS.fullmatch(name)
    if named and named[1] != agent_name(incarnation):
        raise FabricError(f"the agent of {agent_name(incarnation)} says to be {name}")


def pack(incarnation: bytes, name: str, blobs: Sequence[bytes]) -> bytes:
    """Several metadata blobs of one agent as one: NIXL makes one of how it is reached, and one a kind of memory."""
    encoded = name.encode()
    lengths = struct.pack(f"<{len(blobs)}I", *map(len, blobs))
    return _ENVELOPE.pack(_MAGIC, incarnation, len(encoded), len(blobs)) + lengths + encoded + b"".join(blobs)


def unpack(metadata: bytes) -> tuple[bytes, str, list[bytes]]:
    """Take apart what `pack` put together: incarnation, name, blobs. Every length is checked.

    Raises:
        FabricError: It is of another version, or damaged.
    """
    if len(metadata) < _ENVELOPE.size:
        raise FabricError("a peer's metadata is cut short")
    magic, incarnation, name_bytes, count = _ENVELOPE.unpack_from(metadata)
    start = _ENVELOPE.size + 4 * count
    if magic != _MAGIC or not 1 <= count <= _MOST_BLOBS or len(metadata) < start:
        raise FabricError("a peer's metadata is not of this version, or cut short")
    lengths: tuple[int, ...] = (name_bytes, *struct.unpack_from(f"<{count}I", metadata, _ENVELOPE.size))
    if start + sum(lengths) != len(metadata):
        raise FabricError("a peer's metadata is cut short or too long")
    fields: list[bytes] = []
    for length in lengths:
        fields.append(metadata[start : start + length])
        start += length
    return incarnation, fields[0].decode(errors="replace"), fields[1:]
