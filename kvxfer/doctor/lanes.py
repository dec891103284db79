"""Which lane UCX took: NIXL does not say, but UCX writes down what it chose for each kind of operation.

A table of its file looks so, each line behind a time and a process:

    | <endpoint> intra-node cfg#1                                |
    | remote memory write by ucp_put* from host memory to host  |
    +--------+-------------+------------------------------------+
    | Range  | Description | Config                             |
    +--------+-------------+------------------------------------+
    | 0..inf | zero-copy   | cma/memory                         |
"""

import ctypes
import os
import re
from pathlib import Path
from typing import Final, Literal

from kvxfer.doctor.machine import UCX_LOG

__all__ = ["LaneLog", "complaints", "is_tcp", "lane_of"]

_TITLE: Final = re.compile(r"\| remote memory (write|read) by ")
_ROW: Final = re.compile(r"\|\s*\d+(?:\.\.(?:\w+))?\s*\|[^|]*\|\s*([^|]+?)\s*\|\s*$")
_OTHER: Final = re.compile(r"\| .* (?:intra|inter)-node |\| (?:active message|tagged|atomic|rendezvous|stream)")
_COMPLAINT: Final = re.compile(r"UCX\s+(?:ERROR|WARN)\s+(.*)$")
_TRANSPORT: Final = re.compile(r"(\w+)/")
_SHOWN: Final = 300


def lane_of(text: str, operation: Literal["write", "read"]) -> str:
    """What large writes or reads go over, as the last table that says so has it; empty if none does."""
    found, wanted = "", False
    for line in text.splitlines():
        if title := _TITLE.search(line):
            wanted = title[1] == operation
        elif _OTHER.search(line):
            wanted = False
        elif wanted and (row := _ROW.search(line)):
            found = row[1]  # rows go from small to large
    return found


def is_tcp(lane: str) -> bool:
    """Whether everything goes through sockets: `tcp/eth0`, or `52% on tcp/lo and 48% on tcp/eth0`."""
    return set(_TRANSPORT.findall(lane)) == {"tcp"}


def complaints(text: str) -> str:
    """What UCX complained about, shortened; empty if about nothing."""
    found = dict.fromkeys(match[1].strip() for line in text.splitlines() if (match := _COMPLAINT.search(line)))
    return "; ".join(found)[:_SHOWN]


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
