"""Copies between CPU memory, by compiled code that walks the tables of a plan (`walk.py`)."""

import ctypes
from collections.abc import Iterable
from functools import partial
from typing import Final

from kvxfer.copy.jobs import Backlog, as_kvxfer_error
from kvxfer.copy.port import CopyJob, Direction
from kvxfer.copy.sums import total
from kvxfer.copy.tables import pack
from kvxfer.copy.team import ALONE, Team
from kvxfer.errors import KvxferError
from kvxfer.geometry.copyplan import CopyPlan
from kvxfer.geometry.sums import SumPlan
from kvxfer.runtime import Runtime

__all__ = ["HostExecutor", "run"]

_POLL_S: Final = 0.0005
"""How often unfired events are queried."""


class HostExecutor:
    """Runs copy jobs whose addresses are CPU memory of this process, in one service per direction.

    Args:
        runtime: Clock and services.
        threads: How many may work on one copy.
        cpus: Where they are kept; anywhere if there are none.
    """

    def __init__(self, runtime: Runtime, *, threads: int = 1, cpus: frozenset[int] = frozenset()) -> None:
        self._runtime = runtime
        self._teams = {direction: Team(threads, cpus) for direction in Direction}
        self._backlog = Backlog(runtime)
        self._services = {
            direction: runtime.start(f"kvxfer-{direction.value}", self._stepper(direction)) for direction in Direction
        }

    def submit(self, job: CopyJob, direction: Direction) -> None:
        """Queue a job. Safe from any thread.

        Raises:
            ClosedError: If the executor is closed.
        """
        self._backlog.submit(job, direction)
        self._services[direction].wake()

    def warm(self, plans: Iterable[CopyPlan]) -> None:
        """Nothing to compile."""

    def warm_sums(self, plans: Iterable[SumPlan]) -> None:
        """Nothing to compile."""

    def occupy(self, ctas: int) -> None:
        """A CPU has no thread blocks: nothing changes."""

    def inside(self, gate: int, *, raised: bool) -> int:
        """Nobody: memory of a CPU has no such gates."""
        return 0

    def standing(self, since: float) -> bool:
        """None: nobody else waits for a copy between CPU memory."""
        return False

    def close(self, timeout: float) -> bool:
        """Refuse new jobs, finish the rest, stop. Blocks; may be repeated.

        Jobs that still wait for their events after `timeout` seconds are reported as failed.

        Returns:
            False if a job had not been reported by then; the services end what they are doing.
        """
        deadline = self._runtime.now() + timeout
        self._backlog.refuse()
        if not self._backlog.wait_idle(timeout):
            self._backlog.cancel_waiting()
            for service in self._services.values():
                service.wake()
            return False
        stopped = [s.stop(max(0.0, deadline - self._runtime.now())) for s in self._services.values()]
        if all(stopped):
            for team in self._teams.values():
                team.close()
        return all(stopped)

    def _stepper(self, direction: Direction) -> "_Step":
        return _Step(self._runtime, self._backlog, direction, self._teams[direction])


class _Step:
    """One step of a direction's service: run the first job whose event has fired."""

    def __init__(self, runtime: Runtime, backlog: Backlog, direction: Direction, team: Team) -> None:
        self._runtime = runtime
        self._backlog = backlog
        self._direction = direction
        self._team = team

    def __call__(self) -> float | None:
        job = self._backlog.pop_ready(self._direction)
        if job is None:
            return _POLL_S if self._backlog.is_waiting(self._direction) else None
        started = self._runtime.now()
        error: KvxferError | None = None
        allowed, sums = True, b""
        try:
            allowed = job.permit.post(self._runtime.now, lambda: run(job.plan, self._team))
            if job.sums is not None and allowed:
                sums = total(job.sums, partial(run, team=self._team))
        except Exception as caught:  # noqa: BLE001 - the job fails with it; the service goes on
            error = as_kvxfer_error("a copy on CPU memory failed", caught)
        self._backlog.report(job, started, error, stopped=not allowed, sums=sums)
        return 0.0


def run(plan: CopyPlan, team: Team = ALONE) -> None:
    """Copy now, with a team if there is one. The plan's addresses must be valid CPU memory of this process.

    Raises:
        GeometryError: As `pack` does.
    """
    tables = pack(plan)
    for blank in plan.blanks:
        for line in range(blank.lines):
            ctypes.memset(blank.address + line * blank.pitch, 0, blank.width)
    team.copy(tables)
