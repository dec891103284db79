"""Peers that the fabric knows, once per incarnation: connected when the first bytes are to move.

A peer that has made its agent anew is connected again, under another name, by whatever needs it from then on.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvxfer.errors import FabricError, ProtocolError
from kvxfer.fabric.calls import Fabric
from kvxfer.fabric.nixl import check_owner
from kvxfer.protocol.session import PeerInfo

__all__ = ["Lanes"]

_MOST_OLD: Final = 16
"""Agents of a peer's past that are known at most."""


@dataclass(slots=True, eq=False)
class _Lane:
    """A peer's lane.

    Attributes:
        renewals: How often the peer had made its agent anew when it said `metadata`.
        metadata: How its agent is reached.
        name: That agent's name in the fabric.
        old: Names of those before it, each with the users that there were then: until none of these is left.
        users: Whoever posts to it, or is about to.
        wanted: Whether a link still leads to the peer.
    """

    renewals: int
    metadata: bytes
    name: "asyncio.Future[str] | None" = None
    old: "list[tuple[asyncio.Future[str], set[object]]]" = field(default_factory=list)
    users: set[object] = field(default_factory=set[object])
    wanted: bool = True


class Lanes:
    """Connects the fabric to peers, once per incarnation, however many links lead there."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric: Final = fabric
        self._lanes: dict[bytes, _Lane] = {}

    def __len__(self) -> int:
        return len(self._lanes)

    def hold(self, peer: PeerInfo) -> Callable[[], None]:
        """Keep a peer's lane until the returned function is first called, though the last link to it be lost meanwhile.

        Disconnecting gives up whatever is posted, and a post that was given up is in doubt.
        """
        key, lane, user = peer.identity.incarnation, self._of(peer), object()
        lane.users.add(user)

        def leave() -> None:  # of no effect when called again
            lane.users.discard(user)
            for _, users in lane.old:
                users.discard(user)
            self._prune(key, lane)

        return leave

    def connect(self, peer: PeerInfo, renewals: int) -> "asyncio.Future[str]":
        """The fabric's name of a peer, connecting it if it is new. Call it under `hold`; never cancel what it returns.

        The future fails with `FabricError` if the transport refuses the peer's metadata. `renewals` is how often the
        peer had made its agent anew by its own word, on the stream on which it granted what is to be moved.

        Raises:
            FabricError: If it has done so since, by what it said elsewhere: it counts on the old agent's end. Or if its
                agent goes by the name of another worker's.
        """
        lane = self._of(peer)
        if lane.renewals > renewals:
            raise FabricError(f"{peer.name} has made its agent anew since this was granted: try again")
        name = lane.name
        if name is None:
            check_owner(lane.metadata, peer.identity.incarnation)
            name = lane.name = asyncio.wrap_future(self._fabric.connect(lane.metadata))
            name.add_done_callback(lambda done: self._failed(lane, done))
        return name

    def wanted(self, peer: PeerInfo) -> None:
        """A link to this peer is open (again)."""
        key = peer.identity.incarnation
        if key in self._lanes:
            lane = self._of(peer)
            lane.wanted = True
            self._prune(key, lane)

    def renewed(self, peer: PeerInfo, renewals: int, metadata: bytes) -> None:
        """A peer says how it is reached now; of no effect if it said so before, or something later.

        Raises:
            ProtocolError: If it did so too often while one transfer lasted: what is known of its agents would pile up.
        """
        lane = self._of(peer)
        _renew(lane, renewals, metadata)
        self._prune(peer.identity.incarnation, lane)

    def forget(self, peer: PeerInfo) -> None:
        """The last link to this peer is gone: disconnect when nothing is posted. Not a fence."""
        key = peer.identity.incarnation
        lane = self._lanes.get(key)
        if lane is not None:
            lane.wanted = False
            self._prune(key, lane)

    def _of(self, peer: PeerInfo) -> _Lane:
        """Its lane, by the latest that is known of it: its session may be older, or younger, than that.

        Raises:
            ProtocolError: As `renewed` does.
        """
        key, body = peer.identity.incarnation, peer.body
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(body.renewals, body.metadata)
        if body.renewals > lane.renewals:
            _renew(lane, body.renewals, body.metadata)
        return lane

    @staticmethod
    def _failed(lane: _Lane, name: "asyncio.Future[str]") -> None:
        """Forget a connection that failed, so that the next one who needs it tries again."""
        if (name.cancelled() or name.exception() is not None) and lane.name is name:
            lane.name = None

    def _prune(self, key: bytes, lane: _Lane) -> None:
        if self._lanes.get(key) is not lane or (lane.wanted and not lane.old):
            return
        over = not lane.wanted and not lane.users
        gone = [name for name, users in lane.old if not users]
        gone += [lane.name] if over and lane.name is not None else []
        for name in gone:
            if not name.done():
                # who comes back meanwhile must find it here: a second connection would be cut by the end of the first
                name.add_done_callback(lambda _: self._prune(key, lane))
                return
        lane.old = [(name, users) for name, users in lane.old if users]
        if over:
            del self._lanes[key]
        for name in gone:
            if not name.cancelled() and name.exception() is None:
                self._fabric.disconnect(name.result())


def _renew(lane: _Lane, renewals: int, metadata: bytes) -> None:
    """The peer is reached so now, unless something later is known.

    Raises:
        ProtocolError: If too many of its agents are known already.
    """
    if renewals <= lane.renewals:
        return
    if len(lane.old) >= _MOST_OLD:
        raise ProtocolError(f"it has made its agent anew {len(lane.old)} times while one transfer lasted")
    lane.renewals, lane.metadata = renewals, metadata
    if lane.name is not None:
        lane.old.append((lane.name, set(lane.users)))
        lane.name = None
