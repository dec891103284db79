"""What stands still as where a GPU is held up by somebody else's work: copies once launched, a call of a transport."""

import threading

import inside

from kvxfer.copy.host import run
from kvxfer.copy.port import CopyOutcome, Direction
from kvxfer.copy.sums import total
from kvxfer.testing import LoopbackTransport


class Standing:
    """In place of a worker's executor: copies and sums of one direction are launched, and none ends before `go`.

    Their bytes move then: the latest moment at which those of a kernel may.

    Attributes:
        held: Jobs that stand still.
        real: What copies otherwise.
        holding: Whether those that come yet stand still too.
    """

    def __init__(self, worker, direction: Direction):
        self.held = []
        self._worker, self._direction = worker, direction
        self.real, self.holding = inside.executor(worker), True
        inside.replace_executor(worker, self)

    def submit(self, job, direction):
        moves = bool(job.plan.segments) or job.sums is not None
        if not (self.holding and moves and direction is self._direction and job.after.query()):
            self.real.submit(job, direction)
        elif job.permit.post(lambda: inside.now(self._worker), lambda: None):
            self.held.append(job)
        else:
            self._end(job, stopped=True)

    def go(self):
        """Let them end, and hold no more."""
        self.holding = False
        while self.held:
            job = self.held.pop(0)
            run(job.plan)
            self._end(job, sums=b"" if job.sums is None else total(job.sums, run))

    def close(self, timeout):
        closed = self.real.close(timeout)
        return closed and not self.held

    def __getattr__(self, name):
        return getattr(self.real, name)

    def _end(self, job, **how):
        job.permit.end()
        at = inside.now(self._worker)
        job.done(CopyOutcome(None, at, at, **how))


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
