"""Peers that the fabric knows, once per incarnation: connected when the first bytes are to move."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvxfer.fabric.pump import Fabric
from kvxfer.protocol.session import PeerInfo

__all__ = ["Lanes", "once"]


def once(action: Callable[[], None]) -> Callable[[], None]:
    """Does it the first time it is called, and nothing after that."""
    pending = [action]

    def act() -> None:
        if pending:
            pending.pop()()

    return act


@dataclass(slots=True, eq=False)
class _Lane:
    """A peer's lane: its name in the fabric, how many posts need it, and whether a link still leads to the peer."""

    name: "asyncio.Future[str] | None" = None
    users: int = 0
    wanted: bool = True


class Lanes:
    """Connects the fabric to peers, once per incarnation, however many links lead there.

    Args:
        fabric: The transport.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric: Final = fabric
        self._lanes: dict[bytes, _Lane] = {}

    def __len__(self) -> int:
        return len(self._lanes)

    def hold(self, peer: PeerInfo) -> Callable[[], None]:
        """Keep a peer's lane until the returned function is first called, though the last link to it be lost meanwhile.

        Disconnecting gives up whatever is posted, and a post that was given up is in doubt.
        """
        key = peer.identity.incarnation
        lane = self._lanes.setdefault(key, _Lane())
        lane.users += 1

        def leave() -> None:
            lane.users -= 1
            self._prune(key, lane)

        return once(leave)

    def connect(self, peer: PeerInfo) -> "asyncio.Future[str]":
        """The fabric's name of a peer, connecting it if it is new. Call it under `hold`; never cancel what it returns.

        The future fails with `FabricError` if the transport refuses the peer's metadata.
        """
        lane = self._lanes.setdefault(peer.identity.incarnation, _Lane())
        name = lane.name
        if name is None:
            name = lane.name = asyncio.wrap_future(self._fabric.connect(peer.body.metadata))
            name.add_done_callback(lambda done: self._failed(lane, done))
        return name

    def wanted(self, peer: PeerInfo) -> None:
        """A link to this peer is open (again)."""
        lane = self._lanes.get(peer.identity.incarnation)
        if lane is not None:
            lane.wanted = True

    def forget(self, peer: PeerInfo) -> None:
        """The last link to this peer is gone: disconnect when nothing is posted. Not a fence."""
        key = peer.identity.incarnation
        lane = self._lanes.get(key)
        if lane is not None:
            lane.wanted = False
            self._prune(key, lane)

    @staticmethod
    def _failed(lane: _Lane, name: "asyncio.Future[str]") -> None:
        """Forget a connection that failed, so that the next one who needs it tries again."""
        if (name.cancelled() or name.exception() is not None) and lane.name is name:
            lane.name = None

    def _prune(self, key: bytes, lane: _Lane) -> None:
        if lane.users or lane.wanted or self._lanes.get(key) is not lane:
            return
        name = lane.name
        if name is not None and not name.done():
            # who comes back meanwhile must find it here: a second connection would be cut by the end of the first
            name.add_done_callback(lambda _: self._prune(key, lane))
            return
        del self._lanes[key]
        if name is not None and not name.cancelled() and name.exception() is None:
            self._fabric.disconnect(name.result())
