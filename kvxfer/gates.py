"""The gates in front of this worker's memory: one for each transfer, by which a grant can be taken back.

A grant names a gate and its generation. Who writes into memory of a GPU by kernels passes a word there
(`kvxfer.copy.port.Gate`); everybody else passes a lock (`kvxfer.mapped.locks`). Both have the same generation, which is
raised in both or in neither.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import numpy as np

from kvxfer.mapped.locks import FIRST_GENERATION, LockFile, Revoked

__all__ = ["GATES", "GATE_BYTES", "SHARED_GATE", "Gates", "first_words"]

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

    Args:
        words: Address of the words in GPU memory; 0 without any.
        locks: The locks; None where the system has none.
        look: How many writers are inside of the word at an address, whose generation is raised before if so told.
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
