"""The file that UCX writes in a process of the doctor's, which has UCX tell more than a worker does."""

import ctypes
import os
from pathlib import Path
from typing import Final

from kvxfer.doctor.machine import UCX_LOG

__all__ = ["LaneLog"]


class LaneLog:
    """The file that this process's UCX writes, once `let_ucx_tell` was called.

    Args:
        folder: That it was called with.
    """

    def __init__(self, folder: Path) -> None:
        self._file: Final = folder / UCX_LOG.format(process=os.getpid())
        self._read = 0

    def forget(self) -> None:
        """From here on only what is written later counts."""
        self._read = len(self._bytes())

    @property
    def text(self) -> str:
        """What was written since then."""
        return self._bytes()[self._read :].decode("utf-8", "replace")

    def _bytes(self) -> bytes:
        ctypes.CDLL(None).fflush(None)  # UCX leaves what it writes in libc's buffer
        try:
            return self._file.read_bytes()
        except OSError:
            return b""
