"""An in-process transport that can be made to fail, for tests of kvxfer and of programs that use it.

    network = LoopbackNetwork()
    a, b = LoopbackTransport("a", network), LoopbackTransport("b", network)
    network.hold("b")              # posts to b stay in flight, their bytes unmoved
    ...                            # a's fabric gives up
    network.release("b")           # now they land: the late bytes that corrupt reused memory

Bytes are copied between addresses of this process, within what is registered; nothing happens outside of a call, there
is no thread and, unless `pace` brings one, no clock, so a test decides every interleaving. Faults are told to the
network by the name of the agent at the far end of a post, or `EVERY_PEER`. The network may be used from any thread.
"""

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import FabricError
from kvxfer.fabric.faults import LogEntry, Part
from kvxfer.fabric.network import EVERY_PEER, LoopbackNetwork
from kvxfer.fabric.port import Descriptors, Handle, Memory, Native, Operation
from kvxfer.fabric.ported import ported

__all__ = ["EVERY_PEER", "LogEntry", "LoopbackNetwork", "LoopbackTransport"]


class LoopbackTransport:
    """A `Transport` between agents of one `LoopbackNetwork`. Memory is `"DRAM"` of this process.

    It is stricter than NIXL: pieces outside the registrations named by the peer's metadata are refused, and so is a
    handle that is given back twice (a `RuntimeError`: that is a defect, no outcome).

    Args:
        name: Unique in the network while it is open.
        network: Shared by all agents that shall meet.

    Attributes:
        open_handles: Parts that were posted and not yet given back.
        progressed: How often `progress` was called.
    """

    def __init__(self, name: str, network: LoopbackNetwork) -> None:
        self.open_handles = 0
        self.progressed = 0
        self._name = self._first_name = name
        self._renewals = 0
        self._network = network
        self._registered: dict[int, tuple[Memory, ...]] = {}
        self._peers: dict[str, dict[int, tuple[Memory, ...]]] = {}
        self._open = False

    @property
    def name(self) -> str:
        """Unique name of this agent."""
        return self._name

    @property
    def takes_lists(self) -> bool:
        """It copies piece by piece."""
        return False

    @property
    def orderly(self) -> bool:
        """A part is done when every earlier one to its peer has ended, but for those that were told to be held."""
        return True

    def keys(self) -> frozenset[int]:
        """Numbers of the registrations that are in force."""
        return frozenset(self._registered)

    def setup(self) -> None:
        """Join the network."""
        self._network.attach(self)
        self._open = True

    def native(self) -> Native:
        """Its functions, for compiled code."""
        return ported(self)

    def register(self, memories: Sequence[Memory]) -> object:
        """Note memory as reachable; its owner keeps it allocated until `deregister`."""
        self._check_open()
        for memory in memories:
            if memory.kind != "DRAM" or memory.address <= 0 or memory.nbytes <= 0:
                raise FabricError(f"the loopback takes memory of this process only: {memory}")
        key = self._network.key()
        self._registered = {**self._registered, key: tuple(memories)}
        return key

    def deregister(self, token: object) -> None:
        """Undo one `register`."""
        self._check_open()
        if token not in self._registered:
            raise FabricError(f"{token!r} is not registered (any more)")
        self._registered = {key: memories for key, memories in self._registered.items() if key != token}

    def metadata(self, tokens: Sequence[object]) -> bytes:
        """Name of this agent, and what these registrations cover."""
        self._check_open()
        if unknown := [token for token in tokens if token not in self._registered]:
            raise FabricError(f"{unknown} is not registered (any more)")
        covered = {
            key: [(memory.address, memory.nbytes) for memory in memories]
            for key, memories in self._registered.items()
            if key in tokens
        }
        return json.dumps({"agent": self._name, "memories": covered}).encode()

    def connect(self, metadata: bytes) -> str:
        """Learn about a peer of the same network, or about more of its memory."""
        self._check_open()
        try:
            content = json.loads(metadata)
            peer = str(content["agent"])
            memories = {
                int(key): tuple(Memory("DRAM", 0, int(address), int(nbytes)) for address, nbytes in ranges)
                for key, ranges in content["memories"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FabricError(f"this is no metadata of a loopback agent: {error!r}") from error
        self._peers.setdefault(peer, {}).update(memories)
        return peer

    def disconnect(self, peer: str) -> None:
        """Forget a peer. Not a fence: held bytes may still land."""
        self._check_open()
        self._peers.pop(peer, None)

    def post(self, peer: str, operation: Operation, local: Descriptors, remote: Descriptors) -> Handle:
        """Move pieces, or begin to, as the network's faults have it."""
        self._check_open()
        if peer not in self._peers:
            raise FabricError(f"{peer!r} is not connected")
        here = _covering(local.pieces, self._registered, f"{self._name} (local)")
        there = _covering(remote.pieces, self._peers[peer], peer)
        copies = [
            (int(a), int(b), int(length))
            for (a, length), (b, _) in zip(local.pieces.tolist(), remote.pieces.tolist(), strict=True)
        ]
        part = Part(self, peer, operation, copies, here | there)
        self._network.begin(part)
        self.open_handles += 1
        return part

    def poll(self, handle: Handle) -> bool:
        """True when the part is done."""
        self._check_open()
        return self._network.poll(_part(handle))

    def release(self, handle: Handle) -> None:
        """Give back a handle, once. What it still owes can land later."""
        _part(handle).released = True
        self.open_handles -= 1

    def progress(self) -> None:
        """Count the call, and take in what waits for it."""
        self._check_open()
        self.progressed += 1
        self._network.progress(self._name)

    def notify(self, agent: str, message: bytes) -> None:
        """Tell another agent something, which comes with the next thing it is asked for (`heard`)."""
        self._check_open()
        self._network.notify(self._name, agent, message)

    def heard(self) -> list[tuple[str, bytes]]:
        """What agents have told this one since it was asked last: who, and what."""
        return self._network.heard(self._name)

    def renew(self) -> bool:
        """Come back as another agent, which knows nothing."""
        self._check_open()
        self._renewals += 1
        name = f"{self._first_name}.{self._renewals}"
        self._network.renew(self, name)
        self._name, self._registered, self._peers = name, {}, {}
        return True

    def close(self) -> None:
        """Leave the network; no byte moves from or to its memory any more. Idempotent."""
        self._open = False
        self._registered = {}
        self._network.detach(self)

    def _check_open(self) -> None:
        if not self._open:
            raise FabricError(f"agent {self._name!r} is not open")


def _part(handle: Handle) -> Part:
    if not isinstance(handle, Part) or handle.released:
        raise RuntimeError(f"a defect: {handle!r} was given back before, or never posted")
    return handle


def _covering(pieces: NDArray[np.int64], registered: dict[int, tuple[Memory, ...]], whose: str) -> frozenset[int]:
    """Numbers of the registrations that hold these pieces.

    Raises:
        FabricError: A piece is not inside one of them.
    """
    keys: set[int] = set()
    inside = np.zeros(len(pieces), dtype=np.bool_)
    for key, memories in registered.items():
        for memory in memories:
            within = pieces[:, 0] >= memory.address
            within &= pieces.sum(axis=1) <= memory.address + memory.nbytes
            if within.any():
                keys.add(key)
                inside |= within
    if not inside.all():
        address, nbytes = pieces[int(np.argmin(inside))].tolist()
        raise FabricError(f"{nbytes} bytes at {address:#x} are outside of what {whose} has registered")
    return frozenset(keys)
