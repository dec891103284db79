"""What an agent was told: which memory is registered, and who its peers are. Told again when the agent is made anew.

What it hands out stays valid then: tokens of registrations, and names of peers. A peer is told of again when something
is to be posted to it, and not before: one that is gone may keep the caller waiting for seconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvxfer.errors import FabricError
from kvxfer.fabric.port import Memory, Transport

__all__ = ["Holdings"]


@dataclass(slots=True, eq=False)
class _Registered:
    """Memory that is registered; what is handed out for it."""

    memories: tuple[Memory, ...]
    token: object
    """The transport's own."""


@dataclass(slots=True, eq=False)
class _Peer:
    """How a peer is reached, by how many who said so, and whether the present agent was told."""

    metadata: list[bytes]
    users: int = 0
    told: bool = True


class Holdings:
    """Registrations and peers of one transport. Belongs to the fabric's thread.

    Args:
        transport: What is told.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport: Final = transport
        self._registered: list[_Registered] = []
        self._peers: dict[str, _Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def register(self, memories: Sequence[Memory]) -> object:
        """Make memory reachable; returns a token."""
        held = _Registered(tuple(memories), self._transport.register(memories))
        self._registered.append(held)
        return held

    def deregister(self, token: object) -> None:
        """Undo one `register`.

        Raises:
            FabricError: If that was done before, or the transport fails to.
        """
        held = self._of(token)
        self._registered.remove(held)
        self._transport.deregister(held.token)

    def metadata(self, tokens: Sequence[object]) -> bytes:
        """What a peer needs to reach these memories, by way of the present agent."""
        return self._transport.metadata([self._of(token).token for token in tokens])

    def connect(self, metadata: bytes) -> str:
        """Learn about a peer, or about more of its memory; returns its name."""
        name = self._transport.connect(metadata)
        peer = self._peers.setdefault(name, _Peer([]))
        peer.users += 1
        if metadata not in peer.metadata:
            peer.metadata.append(metadata)
        return name

    def leave(self, name: str) -> bool:
        """Undo one `connect`. True if it was the last that is not undone: then `disconnect`."""
        peer = self._peers.get(name)
        if peer is not None:
            peer.users -= 1
        return peer is not None and not peer.users

    def disconnect(self, name: str) -> None:
        """Forget a peer that is known."""
        if self._peers.pop(name).told:
            self._transport.disconnect(name)

    def told(self, name: str) -> bool:
        """Whether the present agent knows a peer, or nobody does. From any thread."""
        peer = self._peers.get(name)
        return peer is None or peer.told

    def tell(self, name: str) -> None:
        """Have the present agent know a peer."""
        peer = self._peers.get(name)
        if peer is not None and not peer.told:
            for metadata in peer.metadata:
                self._transport.connect(metadata)
            peer.told = True

    def renew(self) -> bool:
        """Make the agent anew, with the same memory. False if that cannot be done now: nothing has changed.

        Raises:
            FabricError: The new one does not take the memory.
        """
        if not self._transport.renew():
            return False
        for held in self._registered:
            held.token = self._transport.register(held.memories)
        for peer in self._peers.values():
            peer.told = False
        return True

    def undo(self) -> list[Callable[[], None]]:
        """What undoes all of it, each once. Nothing is held from now on."""
        steps: list[Callable[[], None]] = [
            partial(self._transport.disconnect, name) for name, peer in self._peers.items() if peer.told
        ]
        steps += [partial(self._transport.deregister, held.token) for held in self._registered]
        self._peers, self._registered = {}, []
        return steps

    def _of(self, token: object) -> _Registered:
        held = next((held for held in self._registered if held is token), None)
        if held is None:
            raise FabricError("this memory is not registered (any more)")
        return held
