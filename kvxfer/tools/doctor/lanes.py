"""What UCX writes down in a process of the doctor's: which lane it took, and what it complains about.

NIXL does not say which lane was taken. UCX writes a table when it chooses how to do an operation between two kinds of
memory, and none when it meets that choice again. Each line stands behind a time, and a process with a thread:

    [1795331872.849208] [vm:18037:0]   +--------+-------------+-----------------------------------+
    [1795331872.849208] [vm:18037:0]   | <agent> intra-node cfg#1                                 |
    [1795331872.849208] [vm:18037:0]   | remote memory write by ucp_put* from host memory to host |
    [1795331872.849208] [vm:18037:0]   +--------+-------------+-----------------------------------+
    [1795331872.849208] [vm:18037:0]   | Range  | Description |              Config               |
    [1795331872.849208] [vm:18037:0]   +--------+-------------+-----------------------------------+
    [1795331872.849208] [vm:18037:0]   | 0..inf | zero-copy   | cma/memory                        |
    [1795331872.849208] [vm:18037:0]   +--------+-------------+-----------------------------------+
"""

import ctypes
import os
import re
from pathlib import Path
from typing import Final, Literal

from kvxfer.tools.doctor.machine import UCX_LOG

__all__ = ["LaneLog", "complaints", "is_tcp", "lane_of"]

_HEAD: Final = re.compile(r"\[[^\]:]*:\d+\s*:(\d+)\s*\]\s")
_TITLE: Final = re.compile(r"\| remote memory (write|read) by ")
_OTHER: Final = re.compile(r"\| (?:active message|tagged|atomic|rendezvous|stream|remote memory)")
_ROW: Final = re.compile(r"\|\s*\d+(?:\.\.(?:\w+))?\s*\|[^|]*\|\s*([^|]+?)\s*\|\s*$")
_COMPLAINT: Final = re.compile(r"UCX\s+(?:FATAL|ERROR|WARN)\s+(.*)$", re.MULTILINE)
_TRANSPORT: Final = re.compile(r"(\w+)/")
_SHOWN: Final = 300


class LaneLog:
    """The file that this process's UCX writes, once `let_ucx_tell` was called."""

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


def lane_of(text: str, operation: Literal["write", "read"]) -> str:
    """What large writes or reads go over, as the last table that says so has it; empty if none does."""
    lane, tables = "", dict[str, str]()  # which table a thread writes: two may write theirs at a time
    for line in text.splitlines():
        head = _HEAD.search(line)
        thread = head[1] if head else ""
        if title := _TITLE.search(line):
            tables[thread] = title[1]
        elif _OTHER.search(line):
            tables[thread] = ""
        elif (row := _ROW.search(line)) and tables.get(thread) == operation:
            lane = row[1]  # rows go from small to large
    return lane


def is_tcp(lane: str) -> bool:
    """Whether everything goes through sockets: `tcp/eth0`, or `52% on tcp/lo and 48% on tcp/eth0`."""
    return set(_TRANSPORT.findall(lane)) == {"tcp"}


def complaints(text: str) -> str:
    """What UCX complained about, each once, shortened; empty if about nothing."""
    return "; ".join(dict.fromkeys(said.strip()[:_SHOWN] for said in _COMPLAINT.findall(text)))[:_SHOWN]
