"""Passes the gates of peers as the mover does, where a test copies in its place."""

import ctypes
import fcntl
import os
import struct
import threading
from typing import Any

from kvxfer.safety.fence import FIRST_GENERATION

_FLOCK = struct.Struct("hhqqi4x")
_one_at_a_time = threading.Lock()
"""In the product one thread passes a gate."""


def enter(passage: Any) -> "Inside | None":
    """Pass; None if the grant was taken back, or somebody is at it. It is lent until `leave`."""
    with _one_at_a_time:
        inside = Inside(passage)
    return inside if inside.entered else None


class Inside:
    """Somebody inside of a gate, or who tried."""

    def __init__(self, passage: Any) -> None:
        self._passage = passage
        self._file, self._number, granted, words, users = passage.lend()
        if self._file < 0:  # whoever takes guards away, lends this
            self.entered, self._users = True, ctypes.c_int64(1)
            return
        self._users = ctypes.c_int64.from_address(users)
        self.entered = bool(self._users.value) or self._lock(fcntl.F_RDLCK)
        self._words = (ctypes.c_uint32 * 2).from_address(words) if words else None
        if self.entered and (self._words is None or self._words[0] + FIRST_GENERATION != granted):
            self.entered = False
            if not self._users.value:
                self._lock(fcntl.F_UNLCK)
        if not self.entered:
            passage.give_back()
            return
        self._users.value += 1
        self._words[1] = 1  # type: ignore[index]

    def leave(self) -> None:
        """Nothing of it is under way any more."""
        with _one_at_a_time:
            if self._file >= 0 and not self._passage.key._pages.closed:  # else it was closed by force
                self._users.value -= 1
                if not self._users.value:
                    self._words[1] = 0  # type: ignore[index]
                    self._lock(fcntl.F_UNLCK)
            self._passage.give_back()

    def _lock(self, kind: int) -> bool:
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, self._number, 1, 0))
        except OSError:
            return False
        return True
