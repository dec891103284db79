"""Calls to a transport that somebody waits for: made on the fabric's thread, answered through a future."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvxfer.errors import FabricError

__all__ = ["Call", "Renewal", "broken_by"]


def broken_by(error: Exception) -> FabricError:
    """What everybody gets to hear after a defect."""
    broken = FabricError(f"the fabric is broken by a defect: {error!r}")
    broken.__cause__ = error
    return broken


@dataclass(frozen=True, slots=True)
class Call:
    """One call.

    Attributes:
        run: Makes it.
        future: Gets what it returns or raises.
    """

    run: Callable[[], Any]
    future: Future[Any]

    def make(self) -> None:
        """Make it, unless nobody waits any more. Lets out what is no `FabricError`: that is a defect."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            value = self.run()
        except FabricError as error:
            self.future.set_exception(error)
        except Exception as error:
            self.future.set_exception(broken_by(error))
            raise
        else:
            self.future.set_result(value)

    def refuse(self, error: FabricError) -> None:
        """Do not make it."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


@dataclass(slots=True)
class Renewal:
    """That the agent is to be made anew, as soon as nothing is in flight or `until` has come; says whether it was.

    It is done though nobody waits for the answer any more, which can therefore not be cancelled.
    """

    until: float
    answer: Future[bool] = field(default_factory=Future[bool])

    def __post_init__(self) -> None:
        self.answer.set_running_or_notify_cancel()

    def refused(self, asked: Future[None]) -> None:
        """The call that asks for it was answered: with an error, if it is not to be."""
        error = asked.exception()
        if error is not None:
            self.answer.set_exception(error)
