"""What UCX writes down: which lane it took for each kind of operation, and what it complains about.

NIXL does not say which lane was taken. UCX writes a table when it chooses how to do an operation between two kinds of
memory with an endpoint of some configuration, and none when it meets that choice again. The name in it is that of our
own agent, cut short; nothing in it names the peer. Each line stands behind a time, and a process with a thread:

    [1795331872.849208] [vm:18037:0]   +--------+-------------+-----------------------------------+
    [1795331872.849208] [vm:18037:0]   | <agent> intra-node cfg#1                                 |
    [1795331872.849208] [vm:18037:0]   | remote memory write by ucp_put* from host memory to host |
    [1795331872.849208] [vm:18037:0]   +--------+-------------+-----------------------------------+
    [1795331872.849208] [vm:18037:0]   | Range  | Description |              Config               |
    [1795331872.849208] [vm:18037:0]   +--------+-------------+-----------------------------------+
    [1795331872.849208] [vm:18037:0]   | 0..inf | zero-copy   | cma/memory                        |
    [1795331872.849208] [vm:18037:0]   +--------+-------------+-----------------------------------+
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["NAME_CHARACTERS", "Reader", "Table", "complaint", "complaints", "is_tcp", "lane_of"]

NAME_CHARACTERS: Final = 31
"""Of the name of an agent that stand in a table."""
_HEAD: Final = re.compile(r"\[[^\]:]*:(\d+)\s*:(\d+)\s*\]\s")
_OWNER: Final = re.compile(r"\| (.*) (?:self|intra-node|inter-node) cfg#\d+")
_TITLE: Final = re.compile(r"\| remote memory (write|read) by .* (?:from|into) (\S+)(?: memory)? (?:to|from) ([^\s|]+)")
_OTHER: Final = re.compile(r"\| (?:active message|tagged|atomic|rendezvous|stream|remote memory)")
_ROW: Final = re.compile(r"\|\s*\d+(?:\.\.(?:\w+))?\s*\|[^|]*\|\s*([^|]+?)\s*\|\s*$")
_COMPLAINT: Final = re.compile(r"UCX\s+(?:FATAL|ERROR|WARN)\s+(.*)$")
_TRANSPORT: Final = re.compile(r"(\w+)/")
_SHOWN: Final = 300


@dataclass(frozen=True, slots=True)
class Table:
    """What UCX chose for one operation.

    Attributes:
        agent: Whose; the first `NAME_CHARACTERS` of its name.
        operation: `"write"` or `"read"`.
        near: Kind of memory here, as UCX names it (`"host"`, `"cuda"`).
        far: Kind of memory there.
        lane: What the largest pieces go over.
    """

    agent: str
    operation: str
    near: str
    far: str
    lane: str


@dataclass(slots=True)
class _Open:
    """A table of which lines are still to come."""

    agent: str = ""
    title: tuple[str, str, str] | None = None
    lane: str = ""

    def end(self) -> Table | None:
        if self.title is None or not self.lane:
            return None
        operation, near, far = self.title
        return Table(self.agent, operation, near, far, self.lane)


class Reader:
    """Finds tables of writes and reads in what UCX writes, which may come in parts.

    Args:
        process: Whose lines count; None for everybody's.
    """

    def __init__(self, process: int | None = None) -> None:
        self._process: Final = process
        self._open: dict[str, _Open] = {}  # by thread: two may write their tables at a time

    def read(self, lines: Iterable[str]) -> Iterator[Table | str]:
        """Tables that are complete, and complaints, in their order."""
        for line in lines:
            head = _HEAD.search(line)
            if self._process is not None and (head is None or int(head[1]) != self._process):
                continue  # of a child, which has inherited where this process's UCX writes
            if said := complaint(line):
                yield said
            elif table := self._line(head[2] if head else "", line):
                yield table

    def end(self) -> Iterator[Table]:
        """Tables that were not seen to end."""
        yield from (table for each in self._open.values() if (table := each.end()))
        self.forget()

    def forget(self) -> None:
        """What follows does not belong to what was read."""
        self._open.clear()

    def _line(self, thread: str, line: str) -> Table | None:
        now = self._open.setdefault(thread, _Open())
        done: Table | None = None
        if owner := _OWNER.search(line):
            done, self._open[thread] = now.end(), _Open(owner[1])
        elif title := _TITLE.search(line):
            now.title = title[1], title[2].split("/")[0], title[3].split("/")[0]
        elif _OTHER.search(line):
            now.title = None
        elif row := _ROW.search(line):
            now.lane = row[1]  # rows go from small to large
        elif now.lane:
            done, self._open[thread] = now.end(), _Open()
        return done


def lane_of(text: str, operation: Literal["write", "read"]) -> str:
    """What large writes or reads go over, as the last table that says so has it; empty if none does."""
    reader = Reader()
    found = [*reader.read(text.splitlines()), *reader.end()]
    lanes = [table.lane for table in found if isinstance(table, Table) and table.operation == operation]
    return lanes[-1] if lanes else ""


def is_tcp(lane: str) -> bool:
    """Whether everything goes through sockets: `tcp/eth0`, or `52% on tcp/lo and 48% on tcp/eth0`."""
    return set(_TRANSPORT.findall(lane)) == {"tcp"}


def complaint(line: str) -> str:
    """What UCX complains about in a line, shortened; empty if about nothing."""
    found = _COMPLAINT.search(line)
    return str(found[1]).strip()[:_SHOWN] if found else ""


def complaints(text: str) -> str:
    """What UCX complained about, each once, shortened; empty if about nothing."""
    found = [said for line in text.splitlines() if (said := complaint(line))]
    return "; ".join(dict.fromkeys(found))[:_SHOWN]
