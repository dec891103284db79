"""Over which lanes an agent's bytes go, as this process's UCX tells.

UCX is let write into memory of the kernel's (memfd): it has no name that could be left behind, whatever ends the
process, and UCX itself begins it anew when it is full. UCX decides where it writes once, when it is loaded with the
first agent of a process, so there is one such file a process; what it writes with each agent is decided with that
agent. The environment that says so is changed only while an agent is made, since children would inherit it.

Whoever has set one of these variables himself wants to read it himself, and finds it where he asked for it.
"""

import contextlib
import ctypes
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, MutableMapping
from pathlib import Path
from typing import Final

from kvxfer.fabric.port import Told
from kvxfer.fabric.ucx import NAME_CHARACTERS, Reader, Table
from kvxfer.telemetry import logger

__all__ = ["LaneBook", "UcxLog", "ucx_log"]

_log: Final = logger("kvxfer.fabric")

_TABLES: Final = "UCX_PROTO_INFO"
_FILE: Final = "UCX_LOG_FILE"
_LEVEL: Final = "UCX_LOG_LEVEL"
_SILENT: Final = "fatal"
_BYTES: Final = 1 << 20
"""Of the file at most. Some 15 KiB are written for an agent and its first peer, and nothing for each transfer."""
_LOADED: Final = "UCX was loaded before this process opened a worker, and has decided where it writes"
_LIBRARY: Final = re.compile(r"/libucs[-.]")
_COMPLAINTS: Final = 20
"""Lines that are logged in a minute at most, each once; the next one says how many were not."""
_MINUTE: Final = 60.0


class UcxLog:
    """What the UCX of this process writes. Any thread may read; each line counts once.

    Attributes:
        why_not: Why nothing is known of what it writes; empty if it is.
    """

    def __init__(self) -> None:
        self.why_not = ""
        self._process: Final = os.getpid()
        self._lock: Final = threading.Lock()
        self._making = 0
        self._kept: dict[str, str | None] = {}
        self._file = -1
        self._flush: Callable[[], object] | None = None
        self._place = 0
        self._rest = b""
        self._reader: Final = Reader(self._process)
        self._books: dict[str, deque[Table]] = {}
        self._complaints: dict[str, float] = {}
        self._dropped = 0

    @contextlib.contextmanager
    def telling(self, environment: MutableMapping[str, str], *, quiet: bool) -> Generator[None]:
        """An agent is made in here: UCX is told to write, unless somebody told it something else.

        Args:
            environment: The process's.
            quiet: Whether it shall write nothing where it writes otherwise.
        """
        with self._lock:
            self._making += 1
            if self._making == 1:
                self._begin(environment, quiet=quiet)
        try:
            yield
        finally:
            with self._lock:
                self._making -= 1
                if not self._making:
                    self._restore(environment)
                if self._file >= 0 and self._flush is None:
                    self._flush = _flusher()
                    self.why_not = "" if self._flush else "UCX cannot be asked to write what it holds back"
            self.read()

    def _begin(self, environment: MutableMapping[str, str], *, quiet: bool) -> None:
        said = [name for name in (_TABLES, _FILE) if name in environment]
        said += [_LEVEL] if environment.get(_LEVEL, _SILENT).lower() != _SILENT else []
        if not quiet:
            self.why_not = "UCX was to say on the terminal what it has to say"
        elif said:
            self.why_not = f"{said[0]} is set, so UCX writes where it says, and not for this worker"
        elif os.getpid() != self._process:
            self.why_not = _LOADED
        elif self._file < 0 and (why := self._opened()):
            self.why_not = why
        else:
            self.why_not = ""
            place = f"/proc/{self._process}/fd/{self._file}"
            size = {"UCX_LOG_FILE_SIZE": str(_BYTES), "UCX_LOG_FILE_ROTATE": "0"}
            self._set(environment, {_FILE: place, _TABLES: "y", **size})
            if _LEVEL not in environment:
                self._set(environment, {_LEVEL: "warn"})
        if quiet:
            environment.setdefault(_LEVEL, _SILENT)

    def _opened(self) -> str:
        """Make the file; why it cannot be made."""
        try:
            if _libraries():
                return _LOADED
            self._file = os.memfd_create("kvxfer-ucx")
            os.close(os.open(f"/proc/{self._process}/fd/{self._file}", os.O_WRONLY | os.O_CLOEXEC))
        except OSError as error:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1
            return f"there is nothing that UCX could write to: {error}"
        return ""

    def _set(self, environment: MutableMapping[str, str], variables: Mapping[str, str]) -> None:
        for name, value in variables.items():
            self._kept[name] = environment.get(name)
            environment[name] = value

    def _restore(self, environment: MutableMapping[str, str]) -> None:
        while self._kept:
            name, value = self._kept.popitem()
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value

    def enter(self, agent: str) -> deque[Table] | None:
        """Where tables of an agent will be found; None if another one's could not be told from them."""
        with self._lock:
            key = agent[:NAME_CHARACTERS]
            return None if key in self._books else self._books.setdefault(key, deque())

    def leave(self, agent: str) -> None:
        """An agent that has entered is gone."""
        with self._lock:
            self._books.pop(agent[:NAME_CHARACTERS], None)

    def read(self) -> None:
        """Read what is new, give tables to whom they belong, and log what UCX complains about."""
        flush = self._flush
        if flush is None:
            return
        flush()
        if os.lseek(self._file, 0, os.SEEK_END) != self._place:
            with self._lock:
                self._read()

    def _read(self) -> None:
        size = os.lseek(self._file, 0, os.SEEK_END)
        if size < self._place:  # UCX has begun it anew
            self._place, self._rest = 0, b""
            self._reader.forget()
        data = self._rest + os.pread(self._file, size - self._place, self._place)
        self._place = size
        lines, found, self._rest = data.rpartition(b"\n")
        for each in self._reader.read(lines.decode("utf-8", "replace").splitlines() if found else ()):
            if isinstance(each, str):
                self._complained(each)
            elif (book := self._books.get(each.agent)) is not None:
                book.append(each)

    def _complained(self, what: str) -> None:
        now = time.monotonic()
        told = self._complaints = {one: at for one, at in self._complaints.items() if now - at < _MINUTE}
        if what in told or len(told) == _COMPLAINTS:
            self._dropped += 1
            return
        told[what], dropped, self._dropped = now, self._dropped, 0
        _log.warning("ucx_complained", message=what, dropped=dropped)


def _libraries() -> list[str]:
    """UCX's libraries that are loaded in this process, by their files."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    return sorted({line.split(maxsplit=5)[5] for line in maps.splitlines() if _LIBRARY.search(line)})


def _flusher() -> Callable[[], object] | None:
    """What makes UCX write down what it has in its buffer. The interpreter's lock is kept: it takes a microsecond."""
    with contextlib.suppress(OSError):
        for path in _libraries():
            with contextlib.suppress(OSError, AttributeError):
                return ctypes.PyDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY).ucs_log_flush
    return None


_process: UcxLog | None = None
_process_lock: Final = threading.Lock()


def ucx_log() -> UcxLog:
    """What the UCX of this process writes."""
    global _process  # noqa: PLW0603 - UCX writes to one file a process
    with _process_lock:
        _process = _process or UcxLog()
        return _process


class LaneBook:
    """The lanes of one agent: of all its peers, since UCX does not say of whom a table is.

    Args:
        log: What UCX writes; None before there is an agent.
        agent: Its name.
    """

    def __init__(self, log: UcxLog | None, agent: str) -> None:
        why_not = "there is no agent yet" if log is None else log.why_not
        tables = None if log is None or why_not else log.enter(agent)
        self._why_not: Final = why_not or ("" if tables is not None else f"another agent is called {agent!r} too")
        self._log: Final = log if tables is not None else None
        self._agent: Final = agent
        self._tables: Final = tables if tables is not None else deque[Table]()
        self._lanes: Final[dict[tuple[str, str, str], dict[str, None]]] = {}

    def told(self) -> tuple[Told, ...] | str:
        """What is known of its lanes, or why nothing is. From one thread."""
        if self._why_not:
            return self._why_not
        self.read()
        for _ in range(len(self._tables)):
            table = self._tables.popleft()
            self._lanes.setdefault((table.operation, table.near, table.far), {})[table.lane] = None
        return tuple(Told(*what, tuple(lanes), sure=len(lanes) == 1) for what, lanes in self._lanes.items())

    def tried(self) -> None:
        """The agent wrote to itself: what UCX says of that is of no peer, since it tells itself from others."""
        self.read()
        self._tables.clear()

    def read(self) -> None:
        """See what UCX has written: what it complains about is logged. From any thread."""
        if self._log is not None:
            self._log.read()

    def close(self) -> None:
        """The agent is gone."""
        if self._log is not None:
            self._log.read()
            self._log.leave(self._agent)
