"""The jobs of an executor that have not been reported yet.

A job waits here until its event has fired; one whose event has not fired does not hold up those behind it. Every job is
reported exactly once, whatever happens to it.
"""

import threading
from collections import deque

from kvxfer.copy.port import CopyJob, CopyOutcome, Direction
from kvxfer.copy.turns import Turns
from kvxfer.errors import ClosedError, KvxferError, TransferFailedError
from kvxfer.runtime import Runtime

__all__ = ["Backlog", "as_kvxfer_error"]


def as_kvxfer_error(doing: str, error: Exception) -> KvxferError:
    """Translate whatever a copy raised; the original becomes the cause."""
    if isinstance(error, KvxferError):
        return error
    translated = TransferFailedError(f"{doing}: {type(error).__name__}: {error}")
    translated.__cause__ = error
    return translated


class Backlog:
    """Jobs by direction, from `submit` to their report.

    `submit`, `refuse`, `cancel_waiting` and `wait_idle` are safe from any thread; the rest belongs to the service of
    that direction.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._inbox: dict[Direction, deque[CopyJob]] = {direction: deque() for direction in Direction}
        self._waiting: dict[Direction, Turns] = {direction: Turns() for direction in Direction}
        self._unreported = 0
        self._refusing = False
        self._cancelling = False

    def submit(self, job: CopyJob, direction: Direction) -> None:
        """Queue a job.

        Raises:
            ClosedError: If the executor is closed; `done` will not be called.
        """
        with self._lock:
            if self._refusing:
                raise ClosedError("this executor is closed and takes no more copies")
            self._unreported += 1
            self._inbox[direction].append(job)

    def refuse(self) -> None:
        """Take no more jobs."""
        with self._lock:
            self._refusing = True

    def cancel_waiting(self) -> None:
        """Let the services report every job that has not been launched as failed."""
        with self._lock:
            self._cancelling = True

    def wait_idle(self, timeout: float) -> bool:
        """Wait until every job has been reported. False if that took longer than `timeout` seconds."""
        with self._idle:
            return self._idle.wait_for(lambda: self._unreported == 0, timeout)

    def is_waiting(self, direction: Direction) -> bool:
        """Whether a job of this direction waits for its event."""
        return bool(self._waiting[direction].waiting or self._inbox[direction])

    def pop_ready(self, direction: Direction) -> CopyJob | None:
        """The next job whose event has fired, or None. A job whose event cannot be queried is reported as failed."""
        inbox, waiting = self._inbox[direction], self._waiting[direction]
        while inbox:
            waiting.add(inbox.popleft())
        if not waiting.waiting:
            return None
        failed: list[Exception] = []

        def ready(job: CopyJob) -> bool:
            try:
                if self._cancelling:
                    raise ClosedError("the executor was closed before the copy was launched")
                return bool(job.after.query())  # whatever it returns is asked here, not where nobody is prepared
            except Exception as error:  # noqa: BLE001 - an event of the caller's: one bad one must not stop the service
                failed.append(error)
                return True

        while (job := waiting.pop(ready)) is not None and failed:
            error = as_kvxfer_error("the event that a copy waits for cannot be queried", failed.pop())
            self.report(job, self._runtime.now(), error)
        return job

    def report(
        self,
        job: CopyJob,
        started: float,
        error: KvxferError | None = None,
        *,
        stopped: bool = False,
        sums: bytes = b"",
    ) -> None:
        """Call the job's `done`. Every job is passed here once."""
        job.permit.end()
        try:
            job.done(CopyOutcome(error, started, self._runtime.now(), stopped, sums))
        except Exception as caught:  # noqa: BLE001 - `done` must not raise; if it does, the other jobs still go on
            where = threading.current_thread()
            threading.excepthook(threading.ExceptHookArgs((type(caught), caught, caught.__traceback__, where)))
        with self._lock:
            self._unreported -= 1
            if not self._unreported:
                self._idle.notify_all()
