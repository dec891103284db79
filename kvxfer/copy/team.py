"""Threads that copy CPU memory side by side: one alone waits for memory most of the time.

numpy lets go of the interpreter while it copies many bytes or items. Between two such copies it holds it, so more
threads than find work meanwhile only get into each other's way.
"""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final, TypeVar

from kvxfer.runtime import allowed_cpus, settle

__all__ = ["ALONE", "Team", "usual_threads"]

_T = TypeVar("_T")
_COPY_BYTES: Final = 16 * 1024
"""How much a single copy has to move for every thread: below, they wait for the interpreter rather than for memory."""
_PART_BYTES: Final = 1 << 20
"""What a thread takes on at least: to wake it costs as much as to copy some 100 KiB."""
_MOST: Final = 8
_CPUS_EACH: Final = 4


def usual_threads() -> int:
    """A quarter of the CPUs that this process may use, so that others have some as well, but no more than 8."""
    return max(1, min(_MOST, len(allowed_cpus()) // _CPUS_EACH))


class Team:
    """The caller's thread, and some more that sleep between calls.

    Args:
        threads: How many there are, with the caller's own.
        cpus: Where the others are kept; anywhere if there are none.
    """

    def __init__(self, threads: int, cpus: frozenset[int] = frozenset()) -> None:
        self._threads: Final = threads
        self._cpus: Final = cpus
        self._others: Final[list[threading.Thread]] = []
        self._calls: Final[queue.SimpleQueue[Callable[[], None] | None]] = queue.SimpleQueue()

    def shares(self, steps: int, nbytes: int, copies: int) -> int:
        """Among how many it pays to share work: at least 1.

        Args:
            steps: In how many parts it can be done.
            nbytes: What all of them move together.
            copies: In how many copies they do that.
        """
        return max(1, min(self._threads, steps, nbytes // _PART_BYTES, nbytes // max(copies, 1) // _COPY_BYTES))

    def share(self, work: Callable[[Sequence[_T]], None], steps: Sequence[_T], nbytes: int, copies: int) -> None:
        """Do `work` for all steps, each of which copies about as much: in parts, side by side, as far as that pays.

        Returns when every part has ended, also where one has failed: until then memory is read and written.

        Args:
            work: Copies some of them.
            steps: What is to be copied, in any order.
            nbytes: By all of them together.
            copies: In how many copies they do that.
        """
        count = self.shares(len(steps), nbytes, copies)
        if count < 2:
            work(steps)
            return
        bounds = [len(steps) * part // count for part in range(count + 1)]
        parts = _Parts(work, [steps[start:stop] for start, stop in pairwise(bounds)])
        try:
            for _ in range(min(count - 1, self._start(count - 1))):
                self._calls.put(parts.help)
        finally:  # whatever went wrong: some may be at it
            parts.end()

    def close(self) -> None:
        """Let the threads go. Nothing may be under way; may be repeated."""
        for _ in self._others:
            self._calls.put(None)
        while self._others:
            self._others.pop().join()

    def _start(self, wanted: int) -> int:
        """See that there are so many others, if the system lets them start; returns how many there are."""
        with contextlib.suppress(RuntimeError):  # it does not: those that there are, or the caller alone, do their part
            while len(self._others) < wanted:
                thread = threading.Thread(target=self._serve, name="kvxfer-copy", daemon=True)
                thread.start()
                self._others.append(thread)
        return len(self._others)

    def _serve(self) -> None:
        settle(self._cpus)
        while True:
            call = self._calls.get()
            if call is None:
                return
            call()
            del call  # and all that it copied between


class _Parts:
    """Parts of one piece of work: whoever has time takes the next, so nothing depends on who comes, or how late."""

    def __init__(self, work: Callable[[Sequence[_T]], None], parts: Sequence[Sequence[_T]]) -> None:
        self._work: Final[Callable[[Any], None]] = work
        self._left: Final = deque[Any](parts)
        self._ended = threading.Semaphore(0)
        self._count: Final = len(parts)
        self._error: Exception | None = None

    def help(self) -> None:
        """Do parts as long as there are some."""
        while True:
            try:
                part = self._left.popleft()
            except IndexError:
                return
            try:
                self._work(part)
            except Exception as error:  # noqa: BLE001 - raised by `end`, when nobody is at work any more
                self._error = error
            finally:
                self._ended.release()

    def end(self) -> None:
        """Help, and wait until every part has ended; raises what one of them raised."""
        self.help()
        for _ in range(self._count):
            self._ended.acquire()
        if self._error is not None:
            raise self._error


ALONE: Final = Team(1)
"""The caller's thread only."""
