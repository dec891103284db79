"""The gates of peers on this host, opened once per incarnation: what leads into their memory."""

from typing import Final, TypeAlias

from kvxfer.errors import FabricError
from kvxfer.mapped import check_process, unlike
from kvxfer.mapped.locks import SHUT, Key
from kvxfer.mapped.locks import Passage as _Open
from kvxfer.protocol.session import PeerInfo
from kvxfer.telemetry import logger

__all__ = ["Keys", "Passage"]

_log: Final = logger("kvxfer.worker")


class _Shut:
    """A passage that is never granted: none has it."""

    def lend(self) -> tuple[int, int, int, int, int]:
        """What nobody gets through."""
        return SHUT

    def give_back(self) -> None:
        """Nobody has it."""


Passage: TypeAlias = _Open | _Shut
"""A way through a gate."""
_SHUT: Final = _Shut()


class Keys:
    """What leads through the gates of peers."""

    def __init__(self) -> None:
        self._keys: dict[bytes, Key | None] = {}
        self._late: list[Key] = []  # of peers that were forgotten with something of this rank inside

    def __len__(self) -> int:
        return sum(key is not None for key in self._keys.values())

    def met(self, peer: PeerInfo) -> None:
        """A session with a peer begins: open its gates, if it has any, unless that was tried before.

        It takes some 50 us. What speaks against it is logged, once.
        """
        incarnation = peer.identity.incarnation
        if incarnation in self._keys or not peer.body.locks or unlike(peer.body.host):
            return
        try:
            check_process(peer.body.locks, peer.process)
            self._keys[incarnation] = Key(peer.body.locks)
        except FabricError as error:
            self._keys[incarnation] = None
            _log.warning("gates_not_opened", peer=peer.name, reason=str(error))

    def has(self, peer: PeerInfo) -> bool:
        """Whether this rank passes the gates that a peer's grants name."""
        return self._keys.get(peer.identity.incarnation) is not None

    def passage(self, peer: PeerInfo, granted: int) -> Passage | None:
        """What a write or a read under a grant has to pass.

        Args:
            peer: Who granted it.
            granted: Number of the gate (the high 32 bits) and its generation; 0 if the grant names none.

        Returns:
            None if there is nothing to pass. What nobody gets through, if there is no such gate, or no key to it.
        """
        if not granted:
            return None
        key = self._keys.get(peer.identity.incarnation)
        try:
            return key.passage(granted >> 32, granted & 0xFFFF_FFFF) if key is not None else _SHUT
        except FabricError:
            return _SHUT

    def forget(self, peer: PeerInfo) -> None:
        """The last link to this peer is gone: its gates are closed here when nothing of this rank is inside."""
        key = self._keys.pop(peer.identity.incarnation, None)
        if key is None:
            return
        key.close()
        self._late = [late for late in self._late if late.is_open]
        if key.is_open:  # one a session, each with what was begun in it
            self._late.append(key)

    def close(self) -> None:
        """Close all of them, each when the mover has none of it."""
        for key in [*self._keys.values(), *self._late]:
            if key is not None:
                key.close()
        self._keys.clear()
        self._late.clear()
