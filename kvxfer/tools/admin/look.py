"""Asks workers how they are, and does not wait for one that does not answer."""

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvxfer.config import Config
from kvxfer.errors import KvxferError

__all__ = ["PATIENCE_SECONDS", "Look", "Watched", "given_workers", "look"]

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


@dataclass(frozen=True, slots=True)
class Look:
    """One worker at one moment."""

    engine: str
    rank: int
    state: Mapping[str, Any] | None  # as `describe` gives it; None if it did not answer
    why: str = ""


def given_workers(workers: "Watched | Iterable[Watched]") -> Sequence[Watched]:
    """One worker or several, as a list."""
    return tuple(workers) if isinstance(workers, Iterable) else (workers,)


def look(workers: Iterable[Watched], patience: float) -> list[Look]:
    """Ask all of them, and wait `patience` seconds in all. Not to be called on a loop that is to go on."""
    asked = [(worker.config, _ask(worker)) for worker in workers]
    until = time.monotonic() + patience
    return [_answer(config, question, until, patience) for config, question in asked]


def _ask(worker: Watched) -> "Future[dict[str, Any]] | KvxferError":
    try:
        return worker.describe_soon()
    except KvxferError as error:
        return error


def _answer(config: Config, asked: "Future[dict[str, Any]] | KvxferError", until: float, patience: float) -> Look:
    try:
        if isinstance(asked, KvxferError):
            raise asked
        return Look(config.engine, config.rank, asked.result(max(0.0, until - time.monotonic())))
    except TimeoutError:
        if isinstance(asked, Future):
            asked.cancel()  # it is not run when the loop comes back: nobody would hear it
        return Look(config.engine, config.rank, None, f"its event loop has not answered for {patience:g} s")
    except KvxferError as error:
        return Look(config.engine, config.rank, None, str(error))
