"""What stands still as where a GPU is held up by somebody else's work: copies once launched, a call of a transport."""

import asyncio
import threading

import inside
from apart import Apart, knows_apart
from msgspec.structs import replace
from opened import opened
from packing import copy
from passing import enter

from kvxfer.copy.mover import Flow
from kvxfer.copy.port import READY, CopyOutcome, Direction
from kvxfer.copy.walk import total
from kvxfer.testing import LoopbackTransport


class Standing:
    """In place of a worker's mover: copies and sums of one direction are launched, and none ends before `go`.

    Their bytes move then: the latest moment at which those of a kernel may.
    """

    def __init__(self, worker, direction: Direction):
        self.held = []  # jobs that stand still
        self._unwanted, self._posted, self._inside = set(), {}, {}
        self._worker, self._direction = worker, direction
        # what copies otherwise; whether those that come yet stand still too
        self.real, self.holding = inside.mover(worker), True
        knows_apart(self)
        inside.replace_mover(worker, self)

    def flow(self, job, direction, steps, **how):
        taken_apart = self.holding and direction is self._direction
        return (
            Apart(self, job, direction, steps, **how) if taken_apart else self.real.flow(job, direction, steps, **how)
        )

    def submit(self, job, direction):
        moves = bool(opened(job.tables)[0].launches) or job.sums is not None
        if not (self.holding and moves and direction is self._direction and job.after.query()):
            return self.real.submit(job, direction)
        guarded = job.post is None and job.passage is not None
        entered = inside.now(self._worker) < job.until
        if entered and guarded:
            entered = self._inside[job] = enter(job.passage)
        if entered:
            self.held.append(job)
        else:
            asyncio.get_running_loop().call_soon(lambda: self._end(job, stopped=True))
        return job

    def cancel(self, asked):
        if asked in self.held:  # what was launched is not called back, but nothing is posted then
            self._unwanted.add(asked)
        elif asked in self._posted:
            self.real.cancel(self._posted[asked])
        elif isinstance(asked, Flow):
            self.real.cancel(asked)

    def may_copy(self, asked):
        moving = self._posted.get(asked, asked)
        return self.real.may_copy(moving) if isinstance(moving, Flow) else asked in self.held

    def go(self):
        """Let them end, and hold no more."""
        self.holding = False
        while self.held:
            job = self.held.pop(0)
            copy(*opened(job.tables))
            if job.post is not None and job not in self._unwanted:
                self._posted[job] = self.real.submit(replace(job, tables=None, after=READY), self._direction)
                continue
            self._leave(job)
            self._end(job, stopped=job.post is not None, sums=b"" if job.sums is None else total(job.sums))

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

    def _leave(self, job):
        if (passed := self._inside.pop(job, None)) is not None:
            passed.leave()

    def _end(self, job, error=None, **how):
        job.done(CopyOutcome(error, inside.now(self._worker), **how))


class Stuck(LoopbackTransport):
    """Each call of one kind waits for `go`; from the start, or once `holding` is set."""

    def __init__(self, name, network, call, *, holding=True):
        super().__init__(name, network)
        # set when one waits
        self.inside, self.go, self.holding, real = threading.Event(), threading.Event(), holding, getattr(self, call)

        def stuck(*arguments):
            if self.holding:
                self.inside.set()
                self.go.wait()
            return real(*arguments)

        setattr(self, call, stuck)
