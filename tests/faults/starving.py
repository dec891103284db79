"""Whether this process got too little time, as the kernel counts it: somebody who keeps the interpreter takes none."""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

_LOOK_SECONDS = 0.02

Counted = tuple[int, dict[str, int]]
"""Nanoseconds for which this process had a core, and for which each of its threads has wanted one so far."""


def counted() -> Counted:
    """By the kernel (Linux, `sched/sched-stats`)."""
    waited: dict[str, int] = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            waited[task.name] = int((task / "schedstat").read_text().split()[1])
    return time.process_time_ns(), waited


def between(before: Counted, after: Counted) -> tuple[int, int]:
    """Nanoseconds for which it had a core, and wanted one. What ended threads wanted is not known."""
    waited = sum(max(0, so_far - before[1].get(thread, 0)) for thread, so_far in after[1].items())
    return after[0] - before[0], waited


class Starving:
    """Looks at it all the time."""

    def __init__(self, now: Callable[[], float] = time.monotonic, count: Callable[[], Counted] = counted) -> None:
        self._now, self._count = now, count
        self._last, self._so_far = now(), count()
        self._asked = self._so_far
        self._stalled = 0.0

    def start(self) -> None:
        """In a thread, until the process ends."""
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        """Note for how long all of the process stood still since the last look, as far as it wanted a core then."""
        last, before = self._last, self._so_far
        self._last, self._so_far = self._now(), self._count()
        _, waited = between(before, self._so_far)
        self._stalled = max(self._stalled, min(self._last - last - _LOOK_SECONDS, waited / 1e9))

    def told(self, stalled: float) -> bool:
        """Whether it wanted a core for so many seconds at a time, or for longer than it had one, since last asked."""
        longest, self._stalled = self._stalled, 0.0
        before, self._asked = self._asked, self._count()
        ran, waited = between(before, self._asked)
        return longest > stalled or waited > ran
