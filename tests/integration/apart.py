"""Flows taken apart: what the mover would do in its own machine is asked of it step by step.

So a test may count, hold or spoil each step's copy where it is submitted, as any other.
"""

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any

from msgspec.structs import replace
from opened import singly

from kvxfer.copy.port import CopyJob, CopyOutcome, Direction
from kvxfer.errors import KvxferError


def _badness(outcome: CopyOutcome) -> tuple[bool, bool, bool]:
    return outcome.in_doubt, outcome.error is not None, outcome.stopped


class Apart:
    """In place of a flow: each step is submitted to `mover` when it may begin, until one of them does not end well."""

    def __init__(
        self,
        mover: Any,
        job: CopyJob,
        direction: Direction,
        steps: Iterable[CopyJob],
        *,
        total: int,
        allowed: int,
        progress: Any,
        width: int = 64,
        turns: Any = None,
        heard: int = 0,
    ) -> None:
        self.job, self.slot, self.cancelled, self.left = job, -1, False, False
        self._mover, self._direction, self._progress = mover, direction, progress
        self._total, self._width, self._until = total, width, job.until
        self._allowed = self._next = self._doubts = 0
        self._turns, self._heard = turns, heard
        self._steps: list[CopyJob] = []
        self._under_way: dict[int, Any] = {}
        self._kept: list[Any] = []  # those in doubt
        self._done: set[int] = set()
        self._severed = self._stopping = self._over = False
        self._told, self._verdict = CopyOutcome(None, 0.0), CopyOutcome(None, 0.0)
        self._let_go = mover.hold_awake() if direction is Direction.SCATTER else lambda: None  # as for what may arrive
        self._steps.extend(singly(steps))
        self.allow(allowed)

    def add(self, steps: Iterable[CopyJob]) -> None:
        """See `Mover.add`."""
        self._steps.extend(singly(steps))
        self._go_on()

    def allow(self, steps: int, until: float | None = None) -> None:
        """See `Mover.allow`."""
        self._allowed = max(self._allowed, min(steps, self._total))
        self._until = self._until if until is None else until
        self._go_on()

    def note_peer_steps(self, steps: int) -> None:
        """See `Mover.note_peer_steps`. No notification tells of these steps, so the loops of both sides do."""
        self._heard = max(self._heard, steps)
        self._go_on()

    def report_soon(self) -> None:
        """See `Mover.report_soon`: each step is told of."""

    @property
    def _may_begin(self) -> int:
        if self._turns is None:
            return self._allowed
        before = self._turns.places if self._direction is Direction.GATHER else 0
        return min(self._allowed, self._heard + before)

    def finish(self) -> None:
        """See `Mover.finish`."""
        self._total = min(self._total, self._allowed)
        asyncio.get_running_loop().call_soon(self._look)

    def cancel(self) -> None:
        """See `Mover.cancel`."""
        self.cancelled = True
        self._stop()
        asyncio.get_running_loop().call_soon(self._look)

    def may_copy(self) -> bool:
        """See `Mover.may_copy`."""
        standing = [self._mover.may_copy(copy) for copy in self._under_way.values()]
        return not self.cancelled or any(standing)

    def forget(self) -> None:
        """See `Mover.forget`."""
        for copy in self._kept:
            self._mover.forget(copy)

    def _go_on(self) -> None:
        """Begin what may begin."""
        while (
            not (self._stopping or self._over)
            and self._next < min(self._may_begin, len(self._steps))
            and self._next - self._told.steps < self._width
        ):
            number, step = self._next, self._steps[self._next]
            self._next += 1
            done, post = partial(self._ended, number), step.post and replace(step.post, late=self._late)
            common = {"until": min(self._until, step.until), "passage": self.job.passage, "owner": self.job.owner}
            job = replace(step, done=done, post=post, **common)
            self._under_way[number] = None
            try:
                self._under_way[number] = self._mover.submit(job, self._direction)
            except KvxferError as error:
                failed = CopyOutcome(error, 0.0)
                asyncio.get_running_loop().call_soon(self._ended, number, failed)

    def _stop(self) -> None:
        self._stopping = True
        for copy in list(self._under_way.values()):
            self._mover.cancel(copy)

    def _ended(self, number: int, outcome: CopyOutcome) -> None:
        """A step has."""
        copy, told = self._under_way.pop(number), self._told
        self._told = replace(
            told,
            started=told.started or outcome.started,
            posted=told.posted or outcome.posted,
            copying=told.copying + outcome.copying,
            posting=told.posting + outcome.posting,
            wire=told.wire + outcome.wire,
        )
        if not any(_badness(outcome)):
            self._done.add(number)
            while self._told.steps in self._done:
                self._told = replace(self._told, steps=self._told.steps + 1)
            self._go_on()
        else:
            self._verdict = max(self._verdict, outcome, key=_badness)
            if outcome.in_doubt:
                self._doubts += outcome.may_move
                self._severed |= not outcome.may_move
                self._kept.append(copy)
            self._stop()
        if not self._look() and self._told.steps > told.steps:
            self._progress(self._told)

    def _look(self) -> bool:
        """Whether it is over; say so, once."""
        whole = self._told.steps == self._total
        if not self._over and not self._under_way and (whole or self._stopping):
            self._over = True
            self._let_go()
            verdict = self._verdict
            stopped = not whole and verdict.error is None
            self.job.done(replace(self._told, error=verdict.error, stopped=stopped, in_doubt=verdict.in_doubt))
        return self._over

    def _late(self, ended: bool) -> None:
        """A step that ended in doubt has ended after all, or its agent has."""
        self._doubts -= 1
        self._severed |= not ended
        if not self._doubts and self.job.post is not None:
            self.job.post.late(not self._severed)


def knows_apart(owner: Any) -> None:
    """Let a mover, or the class of all, know flows that were taken apart."""
    for name in ("add", "allow", "note_peer_steps", "report_soon", "finish", "cancel", "may_copy", "forget"):
        setattr(owner, name, _knowing(name, getattr(owner, name)))


def _knowing(name: str, known: Any) -> Any:
    def called(*arguments: Any, **options: Any) -> Any:
        for at, one in enumerate(arguments[:2]):  # the first is the mover where the class knows them
            if isinstance(one, Apart):
                return getattr(one, name)(*arguments[at + 1 :], **options)
        return known(*arguments, **options)

    return called
