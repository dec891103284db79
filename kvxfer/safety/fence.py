"""The gates before memory: those of this worker, by which a grant can be taken back, and those of its peers."""

from collections.abc import Awaitable, Callable
from typing import Final

import numpy as np

from kvxfer.copy.port import Passage
from kvxfer.errors import FabricError
from kvxfer.mapped import check_process, unlike
from kvxfer.mapped.locks import FIRST_GENERATION, SHUT, Key, LockFile, Revoked
from kvxfer.protocol.session import PeerInfo
from kvxfer.telemetry import logger

__all__ = ["GATES", "GATE_BYTES", "SHARED_GATE", "Gates", "Keys", "first_words"]

# --- our own gates
#
# A grant names a gate and its generation. Who writes into memory of a GPU by kernels passes a word there
# (`kvxfer.copy.port.Gate`); everybody else passes a lock (`kvxfer.mapped.locks`). Both have the same generation, which
# is raised in both or in neither.

GATE_BYTES: Final = 128
"""From one gate's word to the next: a cache line of a GPU."""
GATES: Final = 1 << 14
"""Gates of a worker."""
SHARED_GATE: Final = 0
"""The gate of all transfers for which there is none of their own: it is never raised."""


def first_words() -> bytes:
    """What the gates' words in GPU memory hold at first: every gate open for the first generation, nobody inside."""
    words = np.zeros(GATES * GATE_BYTES // 8, np.int64)
    words[:: GATE_BYTES // 8] = FIRST_GENERATION << 32
    return words.tobytes()


class Gates:
    """Which gate is whose.

    `words` is the address of the words in GPU memory, 0 without any. `look` tells how many writers are inside of the
    word at an address, whose generation is raised before if so told.
    """

    def __init__(self, words: int, locks: LockFile | None, look: Callable[[int, bool], Awaitable[int]]) -> None:
        self.words: Final = words
        self._locks: Final = locks
        self._look: Final = look
        self._generations: dict[int, int] = {}  # without locks, of those that were raised
        self._free: list[int] = []
        self._retired: set[int] = set()
        self._raising: dict[int, bool] = {}  # whose words are being raised; whether they were given back meanwhile
        self._fresh = SHARED_GATE + 1

    def allot(self) -> int:
        """A gate for a transfer, until `give_back`."""
        if self._free:
            return self._free.pop()
        if self._fresh == GATES or not (self.words or self._locks):
            return SHARED_GATE
        self._fresh += 1
        return self._fresh - 1

    def give_back(self, number: int) -> None:
        """Nobody writes through a gate any more, by the word of whoever did or because it was revoked."""
        if number in self._raising:  # or it would be granted with a generation that its word does not have yet
            self._raising[number] = True
        elif number != SHARED_GATE and number not in self._retired:
            self._free.append(number)

    def retire(self, number: int) -> None:
        """Never allot a gate again: a writer has died inside of its word, and is counted there for ever."""
        if self.words:
            self._retired.add(number)

    def granted(self, number: int) -> int:
        """What a grant says of a gate: its number (the high 32 bits) and its generation."""
        if self._locks is not None:
            return number << 32 | self._locks.generation(number)
        return number << 32 | self._generations.get(number, FIRST_GENERATION)

    async def revoke(self, number: int) -> Revoked | None:
        """Let nobody in any more who was granted a gate.

        Returns:
            What was found at its lock. None if somebody has passed that and is inside, or if the gate is shared: then
            nothing was changed. Of writers by kernels only `inside` tells.
        """
        if number == SHARED_GATE:
            return None
        found: Revoked | None = Revoked.IDLE
        if self._locks is not None:
            found = self._locks.revoke(number)
        else:
            self._generations[number] = self._generations.get(number, FIRST_GENERATION) + 1
        if found is not None and self.words:
            await self._raise_word(number)
        return found

    async def _raise_word(self, number: int) -> None:
        self._raising[number] = False
        try:
            await self._look(self._word(number), True)
        except BaseException:
            self.retire(number)  # nobody knows whether its two generations are still the same
            raise
        finally:
            if self._raising.pop(number):
                self.give_back(number)

    async def inside(self, number: int) -> int:
        """How many thread blocks write through a gate that was revoked."""
        return (await self._look(self._word(number), False)) if self.words else 0

    def _word(self, number: int) -> int:
        return self.words + number * GATE_BYTES


# --- gates of peers

_log: Final = logger("kvxfer.worker")


class _Shut:
    """A passage that is never granted: none has it."""

    def lend(self) -> tuple[int, int, int, int, int]:
        """What nobody gets through."""
        return SHUT

    def give_back(self) -> None:
        """Nobody has it."""


_SHUT: Final = _Shut()


class Keys:
    """What leads through the gates of peers."""

    def __init__(self) -> None:
        self._keys: dict[bytes, Key | None] = {}

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
        """What a write or a read under a grant has to pass, which names a gate (the high 32 bits) and its generation.

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
        if key is not None:
            key.close()

    def close(self) -> None:
        """Close all of them, each when the mover has none of it."""
        for key in self._keys.values():
            if key is not None:
                key.close()
        self._keys.clear()
