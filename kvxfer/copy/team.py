"""Threads that copy CPU memory side by side: one alone waits for memory most of the time.

Each is a thread of compiled code, which sleeps on a semaphore and needs the interpreter at its beginning and its end.
"""

import contextlib
import ctypes
import threading
from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.copy import walk
from kvxfer.copy.tables import HEADER_WORDS, KINDS, Tables
from kvxfer.runtime import allowed_cpus, settle

__all__ = ["ALONE", "Team", "usual_threads"]

I64: TypeAlias = NDArray[np.int64]

_PART_BYTES: Final = 1 << 20
"""Of the largest parts that a copy is cut into, if no item is larger; to wake a thread costs as much as a tenth."""
_MOST: Final = 8
_CPUS_EACH: Final = 4
_SEMAPHORE_WORDS: Final = 8
"""More than a `sem_t` takes anywhere."""


def usual_threads() -> int:
    """A quarter of the CPUs that this process may use, so that others have some as well, but no more than 8."""
    return max(1, min(_MOST, len(allowed_cpus()) // _CPUS_EACH))


class Team:
    """The caller's thread, and some more that sleep between copies. One thread at a time may call it.

    Args:
        threads: How many there are, with the caller's own.
        cpus: Where the others are kept; anywhere if there are none.
    """

    def __init__(self, threads: int, cpus: frozenset[int] = frozenset()) -> None:
        self._threads: Final = threads
        self._cpus: Final = cpus
        self._others: Final[list[threading.Thread]] = []
        self._state: I64 | None = None

    def copy(self, tables: Tables) -> None:
        """Copy now what tables say; returns when every byte is there. Their addresses must be valid CPU memory."""
        parts = _parts(tables)
        count = int(parts[-1, -1]) if len(parts) else 0
        others = min(self._threads, count, tables.nbytes // _PART_BYTES) - 1
        if others > 0:
            others = min(others, self._start(others))
        if others > 0 and self._state is not None:
            walk.copy_together(self._state.ctypes.data, parts.ctypes.data, count, others)
        else:
            walk.copy_parts(parts.ctypes.data, count)

    def close(self) -> None:
        """Let the threads go. Nothing may be under way; may be repeated."""
        if self._state is not None:
            self._state[4] = 1
            for _ in self._others:
                _libc().sem_post(ctypes.c_void_p(int(self._state[7])))
        while self._others:
            self._others.pop().join()
        self._state = None

    def _start(self, wanted: int) -> int:
        """See that there are so many others, if the system lets them start; returns how many there are."""
        if self._state is None:
            self._state = _state()
        with contextlib.suppress(RuntimeError):  # it does not: those that there are, or the caller alone, do their part
            while len(self._others) < wanted:
                thread = threading.Thread(target=self._help, args=(self._state,), name="kvxfer-copy", daemon=True)
                thread.start()
                self._others.append(thread)
        return len(self._others)

    def _help(self, state: I64) -> None:
        settle(self._cpus)
        walk.help_out(state.ctypes.data)


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _state() -> I64:
    """What a team shares: see `walk.STATE_WORDS`. The semaphores lie behind it."""
    libc, words = _libc(), np.zeros(walk.STATE_WORDS + 2 * _SEMAPHORE_WORDS, np.int64)
    semaphores = [words.ctypes.data + 8 * (walk.STATE_WORDS + n * _SEMAPHORE_WORDS) for n in range(2)]
    for semaphore in semaphores:
        if libc.sem_init(ctypes.c_void_p(semaphore), 0, 0):
            raise OSError(ctypes.get_errno(), "sem_init failed")
    words[5:9] = [_address(libc.sem_post), _address(libc.sem_wait), *semaphores]
    return words


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _parts(tables: Tables) -> I64:
    """The list of headers that is walked: see `walk.PART_WORDS`."""
    found: list[tuple[int, ...]] = []
    count, address, words = 0, tables.words.ctypes.data, tables.words
    for launch in tables.launches:
        elements, width = launch.variant.elements, launch.variant.width
        for header in range(launch.first, launch.first + launch.headers * HEADER_WORDS, HEADER_WORDS):
            most = max(1, _PART_BYTES // (int(words[header + 2]) * width * elements.dst_bytes))
            count += -(-int(words[header + 5]) // most)
            kinds = KINDS[elements.src], KINDS[elements.dst]
            found.append((address + 8 * header, width, *kinds, most, count))
    return np.asarray(found, np.int64).reshape(-1, walk.PART_WORDS)


ALONE: Final = Team(1)
"""The caller's thread only."""
