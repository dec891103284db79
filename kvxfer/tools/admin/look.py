"""Asks workers how they are, without waiting for one that does not answer, and whether each should be given work."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, Final, Protocol

from kvxfer.config import Config
from kvxfer.errors import ConfigError, KvxferError, RequestError

__all__ = ["PATIENCE_SECONDS", "Limits", "Look", "Watched", "given_workers", "look"]

PATIENCE_SECONDS: Final = 2.0
"""How long a worker's loop may take to answer by default."""


class Watched(Protocol):
    """A worker of any kind: `kvxfer.Worker`, on the caller's loop or its own, or `kvxfer.BlockingWorker`."""

    @property
    def config(self) -> Config:
        """Effective settings."""
        ...

    def describe_soon(self) -> "Future[dict[str, Any]]":
        """Its state, asked for from any thread."""
        ...


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Limits:
    """From when on a worker counts as not ready.

    Attributes:
        quarantine: The part of a share of the arena that is in quarantine. At more than one half the share refuses what
            the rest cannot hold.
        stuck_after: Seconds for which the mover, or a call of the transport, stands still. A host that cannot be
            reached holds one for about ten.
        stopping: Whether the application takes no more requests, while its workers still serve those that it has. Asked
            from the admin server's threads.

    Raises:
        ConfigError: If one of them is no such number.
    """

    quarantine: float = 0.5
    stuck_after: float = 15.0
    stopping: Callable[[], bool] = _never

    def __post_init__(self) -> None:
        if not 0 < self.quarantine <= 1 or not self.stuck_after > 0:
            raise ConfigError(
                f"quarantine={self.quarantine} must be above 0 and at most 1, stuck_after={self.stuck_after} above 0"
            )


@dataclass(frozen=True, slots=True)
class Look:
    """One worker at one moment."""

    engine: str  # its name, with a number behind it if another one here is called so
    rank: int
    state: Mapping[str, Any] | None  # as `describe` gives it; None if it did not answer
    why: str = ""

    def reasons(self, limits: Limits) -> list[str]:
        """Why it is not ready; empty if it is."""
        state = self.state
        found = ["its application stops"] if limits.stopping() else []
        if state is None:
            return [*found, self.why]
        if state["closed"]:
            found.append("it is closed")
        elif state["draining"]:
            found.append("it is draining")
        fabric = state["fabric"]
        if fabric["broken"]:
            found.append(f"its fabric is broken: {fabric['broken']}")
        if fabric["late"] >= limits.stuck_after:
            found.append(f"its fabric has stood still for {fabric['late']:.0f} s")
        for share in (state["arena"]["send"], state["arena"]["receive"]):
            held = share.quarantined_bytes
            if share.capacity_bytes and held >= limits.quarantine * share.capacity_bytes:
                part = held / share.capacity_bytes
                found.append(f"{part:.0%} of the {share.name} share of its arena ({held} bytes) is in quarantine")
        return found


def given_workers(workers: "Watched | Iterable[Watched]", patience: Any) -> Sequence[Watched]:
    """One worker or several, as a list.

    Raises:
        RequestError: If one of them is something else, or nobody could wait for them so long.
    """
    if not (isinstance(patience, int | float) and 0 <= patience <= threading.TIMEOUT_MAX):
        raise RequestError(f"patience must be a number of seconds, not {patience!r}")
    found = tuple(workers) if isinstance(workers, Iterable) else (workers,)
    for one in found:
        if not hasattr(one, "describe_soon"):
            raise RequestError(f"workers must be a kvxfer.Worker, a BlockingWorker, or several of them, not {one!r}")
    return found


def look(workers: Iterable[Watched], patience: float) -> list[Look]:
    """Ask all of them, and wait `patience` seconds in all. Not to be called on a loop that is to go on."""
    asked = [(worker.config, _ask(worker)) for worker in workers]
    until, taken = time.monotonic() + patience, set[tuple[str, int]]()
    return [_answer(*_name(config, taken), question, until, patience) for config, question in asked]


def _name(config: Config, taken: set[tuple[str, int]]) -> tuple[str, int]:
    """What to call a worker: what two of them say must not read as said twice by one."""
    numbered = chain([config.engine], (f"{config.engine}#{number}" for number in count(2)))
    name = next((engine, config.rank) for engine in numbered if (engine, config.rank) not in taken)
    taken.add(name)
    return name


def _ask(worker: Watched) -> "Future[dict[str, Any]]":
    try:
        return worker.describe_soon()
    except KvxferError as error:
        refused: Future[dict[str, Any]] = Future()
        refused.set_exception(error)
        return refused


def _answer(engine: str, rank: int, asked: "Future[dict[str, Any]]", until: float, patience: float) -> Look:
    try:
        return Look(engine, rank, asked.result(max(0.0, until - time.monotonic())))
    except TimeoutError:
        asked.cancel()  # it is not run when the loop comes back: nobody would hear it
        return Look(engine, rank, None, f"its event loop has not answered for {patience:g} s")
    except KvxferError as error:
        return Look(engine, rank, None, str(error))
