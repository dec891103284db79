"""A mover whose machine steps when a test says so, at the time that the test says: no thread, nothing waits."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from copy_plans import CANARY, contiguous_rows
from packing import packed

from kvxfer.copy import records
from kvxfer.copy.mover import Flow, Mover
from kvxfer.copy.port import CopyJob, CopyOutcome, Direction
from kvxfer.geometry.copyplan import CopyPlan

NBYTES = 1 << 20


class Stepped:
    """A runtime without threads."""

    machine: Any  # what was to be driven

    def __init__(self) -> None:
        self.time = 1.0  # what time it is

    def now(self) -> float:
        return self.time

    def drive(self, name, machine) -> Any:
        del name
        self.machine = machine  # the test steps it
        return self.stop, lambda: None

    def stop(self, timeout) -> bool:
        del timeout
        self.machine.step()
        return bool(self.machine.state[records.STOPPING])

    async def in_thread(self, work) -> Any:
        await asyncio.sleep(0)  # it takes a while, so others run meanwhile
        return work()


async def until(condition: Callable[[], object], seconds: float = 0.0005) -> None:
    """Wait for what nobody announces, looking every so many seconds."""
    while not condition():  # noqa: ASYNC110 - as said
        await asyncio.sleep(seconds)


class Flag:
    """An event that needs the interpreter."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.fired = False
        self.error = error
        self.asked = 0

    def query(self) -> Any:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.fired


class Reports:
    """What became of copies, by name: each is reported once."""

    def __init__(self) -> None:
        self.outcomes: dict[Any, CopyOutcome] = {}

    def __call__(self, name) -> Any:
        def done(outcome: CopyOutcome) -> None:
            assert name not in self.outcomes, f"{name} was reported twice"
            self.outcomes[name] = outcome

        return done

    @property
    def order(self) -> list[Any]:
        return list(self.outcomes)

    async def wait(self, count: int, timeout: float = 30) -> dict[Any, CopyOutcome]:
        async with asyncio.timeout(timeout):
            await until(lambda: len(self.outcomes) >= count)
        return self.outcomes

    def kinds(self) -> dict[Any, str]:
        """Each in a word."""
        return {name: kind(outcome) for name, outcome in self.outcomes.items()}


def kind(outcome: CopyOutcome) -> str:
    """What became of a copy, in a word."""
    if outcome.error is not None:
        return type(outcome.error).__name__
    return "stopped" if outcome.stopped else "done"


class World:
    """A mover, memory that it copies, and what it reported."""

    def __init__(self, gpu=None, **options) -> None:
        self.runtime: Any = Stepped()
        self.mover = Mover(self.runtime, gpu=gpu, **options)
        self.machine: Any = self.runtime.machine
        self.src = np.random.default_rng(7).integers(0, 256, NBYTES, dtype=np.uint8)
        self.dst = np.full(NBYTES, CANARY, np.uint8)
        self.reports = Reports()

    def plan(self, *, rows=4, row_bytes=64, at=0) -> CopyPlan:
        """Rows of the source in the same places of the destination, but for `at` bytes."""
        where = self.src.ctypes.data + at, self.dst.ctypes.data + at
        return contiguous_rows(*where, rows=rows, regions=1, row_bytes=row_bytes, pool=rows, flat="both")

    def written(self, *, nbytes=256, at=0) -> bool:
        """Whether that has been copied; anything in between is an error."""
        found = self.dst[at : at + nbytes]
        if (found == CANARY).all():
            return False
        np.testing.assert_array_equal(found, self.src[at : at + nbytes])
        return True

    def submit(
        self, name, plan: CopyPlan | None = None, direction=Direction.GATHER, *, rows=4, at=0, nbytes=None, **job
    ) -> Flow:
        """Ask for a copy."""
        tables = packed(self.plan(rows=rows, at=at) if plan is None else plan, nbytes)
        return self.mover.submit(CopyJob(tables, self.reports(name), **job), direction)

    def step(self) -> float | None:
        """One step, and whatever it says."""
        delay: float | None = self.machine.step()
        self.mover._read_events()
        while self.mover._news:  # also what would come later, because it takes long
            self.mover._deliver()
        return delay

    async def settle(self) -> None:
        """Let everything that is due on the loop happen."""
        for _ in range(6):
            await asyncio.sleep(0)

    async def run(self, count: int) -> None:
        """Step until so many have been reported."""
        for _ in range(100_000):
            if len(self.reports.outcomes) >= count:
                return
            self.step()
            await asyncio.sleep(0)
        raise AssertionError(f"{count - len(self.reports.outcomes)} of {count} are missing")

    @property
    def order(self) -> list[Any]:
        return self.reports.order

    @property
    def outcomes(self) -> dict[Any, CopyOutcome]:
        return self.reports.outcomes

    async def close(self) -> None:
        """End it, whatever still waits."""
        for _ in range(1000):
            if await self.mover.close(0.0):
                return
            await self.settle()
            if self.machine._descriptors:
                self.step()
            await self.settle()
        raise AssertionError("it does not end")
