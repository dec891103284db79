"""What an operator sees of loads and offers: a log line a minute, and counts for vLLM's own metrics."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from kvxfer.telemetry import logger

__all__ = ["MINUTE_SECONDS", "Counts", "Ledger"]

MINUTE_SECONDS: Final = 60.0

_log: Final = logger("kvxfer.vllm")


@dataclass(slots=True)
class Counts:
    """What has ended in some time, as one rank saw it."""

    load_seconds: list[float] = field(default_factory=list[float])  # of each load that went well
    load_bytes: list[int] = field(default_factory=list[int])  # likewise
    load_failures: int = 0
    offers: int = 0  # that were fetched
    offers_lost: int = 0  # that nobody came for, or that could not be made

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)

    def add(self, other: "Counts") -> None:
        """Count what another has counted too."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Ledger:
    """Counts what ends, for vLLM step by step, and in one log line for each minute in which something did."""

    def __init__(self, later: Callable[[float, Callable[[], None]], Any] = threading.Timer) -> None:
        self._later: Final = later
        self._lock: Final = threading.Lock()  # the timer's thread takes the minute's
        self._timer: Any = None
        self._minute, self._step = Counts(), Counts()

    def count(self, new: Counts) -> None:
        """Something has ended."""
        self._step.add(new)
        with self._lock:
            self._minute.add(new)
            if self._timer is None:
                self._timer = self._later(MINUTE_SECONDS, self._say)
                self._timer.daemon = True
                self._timer.start()

    def take(self) -> Counts:
        """What has ended since the last call."""
        step, self._step = self._step, Counts()
        return step

    def close(self) -> None:
        """Say what is left to say."""
        with self._lock:
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            self._say()

    def _say(self) -> None:
        with self._lock:
            minute, self._minute, self._timer = self._minute, Counts(), None
        loads, seconds = len(minute.load_seconds), sum(minute.load_seconds)
        if loads or minute.load_failures:
            nbytes = sum(minute.load_bytes)
            _log.info("loads_counted", count=loads, bytes=nbytes, duration=seconds, failures=minute.load_failures)
        if minute.offers or minute.offers_lost:
            _log.info("offers_counted", count=minute.offers, failures=minute.offers_lost)
