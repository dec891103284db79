"""Whether this process got too little time, as the kernel counts it: somebody who keeps the interpreter takes none."""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

_LOOK_SECONDS = 0.02

Counted = tuple[int, int]
"""Nanoseconds for which threads had a core, and wanted one."""


def counted() -> Counted:
    """Of the threads that this process has (Linux, `sched/sched-stats`)."""
    sums = [0, 0]
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            ran, waited, _ = (task / "schedstat").read_text().split()
            sums = [sums[0] + int(ran), sums[1] + int(waited)]
    return sums[0], sums[1]


class Starving:
    """Looks at it all the time.

    Args:
        now: Seconds.
        count: What the kernel has counted so far.
    """

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
        (last, (_, before)), self._last, self._so_far = (self._last, self._so_far), self._now(), self._count()
        stood = self._last - last - _LOOK_SECONDS
        self._stalled = max(self._stalled, min(stood, (self._so_far[1] - before) / 1e9))

    def told(self, stalled: float) -> bool:
        """Whether it wanted a core for so many seconds at a time, or for longer than it had one, since last asked."""
        longest, self._stalled = self._stalled, 0.0
        before, self._asked = self._asked, self._count()
        ran, waited = (now - then for now, then in zip(self._asked, before, strict=True))
        return longest > stalled or waited > ran
