"""What stands still as where a GPU is held up by somebody else's work: copies once launched, a call of a transport."""

import asyncio
import threading

import inside

from kvxfer.copy.port import CopyOutcome, Direction
from kvxfer.copy.sums import total
from kvxfer.copy.walk import copy
from kvxfer.testing import LoopbackTransport


class Standing:
    """In place of a worker's mover: copies and sums of one direction are launched, and none ends before `go`.

    Their bytes move then: the latest moment at which those of a kernel may.

    Attributes:
        held: Jobs that stand still.
        real: What copies otherwise.
        holding: Whether those that come yet stand still too.
    """

    def __init__(self, worker, direction: Direction):
        self.held = []
        self._worker, self._direction = worker, direction
        self.real, self.holding = inside.mover(worker), True
        inside.replace_mover(worker, self)

    def submit(self, job, direction):
        moves = bool(job.tables.launches) or job.sums is not None
        if not (self.holding and moves and direction is self._direction and job.after.query()):
            return self.real.submit(job, direction)
        entered = inside.now(self._worker) < job.until and (job.passage is None or job.passage.enter())
        if entered:
            self.held.append(job)
        else:
            asyncio.get_running_loop().call_soon(lambda: self._end(job, stopped=True))
        return job

    def cancel(self, asked):
        if asked not in self.held:  # what was launched is not called back
            self.real.cancel(asked)

    def go(self):
        """Let them end, and hold no more."""
        self.holding = False
        while self.held:
            job = self.held.pop(0)
            copy(job.tables)
            self._leave(job)
            self._end(job, sums=b"" if job.sums is None else total(job.sums))

    def fail(self, error):
        """Let the oldest of them end so."""
        job = self.held.pop(0)
        self._leave(job)
        self._end(job, error)

    async def close(self, timeout):
        closed = await self.real.close(timeout)
        return closed and not self.held

    def __getattr__(self, name):
        return getattr(self.real, name)

    @staticmethod
    def _leave(job):
        if job.passage is not None:
            job.passage.leave()

    def _end(self, job, error=None, **how):
        at = inside.now(self._worker)
        job.done(CopyOutcome(error, at, at, **how))


class Stuck(LoopbackTransport):
    """Each call of one kind waits for `go`; from the start, or once `holding` is set.

    Attributes:
        inside: Set when one waits.
    """

    def __init__(self, name, network, call, *, holding=True):
        super().__init__(name, network)
        self.inside, self.go, self.holding, real = threading.Event(), threading.Event(), holding, getattr(self, call)

        def stuck(*arguments):
            if self.holding:
                self.inside.set()
                self.go.wait()
            return real(*arguments)

        setattr(self, call, stuck)
