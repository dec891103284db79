"""The steps of one transfer: callbacks on the loop, each of which runs to its end, and whose failure is the transfer's.

Callbacks rather than tasks: a chunk takes about six steps, and a task would cost several turns of the loop for each. A
step never waits; it asks for something (a plan, memory, a lane, a copy, a post) and names the step that comes next.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from kvxfer.copy.mover import Copy
from kvxfer.copy.port import READY, CopyJob, CopyOutcome, Direction, Event
from kvxfer.copy.tables import Tables
from kvxfer.errors import KvxferError, TransferFailedError
from kvxfer.geometry import SumPlan
from kvxfer.site import Site
from kvxfer.telemetry import logger

__all__ = ["Steps"]

_log: Final = logger("kvxfer.worker")
_T = TypeVar("_T")


class Steps(ABC):
    """Base of what runs in steps.

    Args:
        site: The worker.
        name: For logs.
    """

    def __init__(self, site: Site, name: str) -> None:
        self.site: Final = site
        self._name: Final = name

    @abstractmethod
    def failed(self, error: KvxferError) -> None:
        """A step raised: stop."""

    def run(self, step: Callable[..., None], *arguments: Any) -> None:
        """Run a step now."""
        try:
            step(*arguments)
        except KvxferError as error:
            self.failed(error)
        except Exception as error:  # noqa: BLE001 - steps are supervised here: a defect ends the transfer, named
            _log.error("task_failed", task=self._name, error=repr(error), exc_info=error)
            self.failed(TransferFailedError(f"a step of the transfer failed: {error!r}"))

    def plan(self, make: Callable[[], _T], then: Callable[[_T], None], *, rows: int) -> None:
        """Make a plan, here if its tables are small, else in a worker thread, and go on with it: the end of a step."""
        if self.site.is_small(rows):
            then(make())
        else:
            self.site.tasks.spawn(self._plan_off_loop(make, then), f"{self._name} plan", failed=self._abandoned)

    def when(self, future: "asyncio.Future[_T]", then: Callable[[_T], None]) -> None:
        """Go on with what a future brings; at once if it has. It is never cancelled by this."""
        if future.done():
            then(future.result())
        else:
            future.add_done_callback(partial(self.run, self._arrived, then))

    def copy(
        self,
        tables: Tables,
        direction: Direction,
        then: Callable[[CopyOutcome], None],
        after: Event = READY,
        nbytes: int = 0,
        sums: SumPlan | None = None,
    ) -> Copy:
        """Copy once `after` has fired, add up what is to be, and go on with how it ended.

        Returns:
            What can be cancelled.

        Raises:
            KvxferError: If no more copies are taken; nothing is copied then.
        """
        job = CopyJob(tables, partial(self.run, then), after, nbytes=nbytes, owner=self._name, sums=sums)
        return self.site.mover.submit(job, direction)

    async def _plan_off_loop(self, make: Callable[[], _T], then: Callable[[_T], None]) -> None:
        try:
            made = await self.site.runtime.in_thread(make)
        except KvxferError as error:
            self.failed(error)
        else:
            self.run(then, made)

    def _abandoned(self, error: BaseException) -> None:
        self.failed(TransferFailedError(f"a plan could not be made: {error!r}"))

    @staticmethod
    def _arrived(then: Callable[[_T], None], future: "asyncio.Future[_T]") -> None:
        if not future.cancelled():
            then(future.result())
