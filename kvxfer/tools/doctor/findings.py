"""What a check says: one thing that was looked at, how it is, and what to do about it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeAlias

__all__ = ["Check", "Finding", "Status", "fail", "ok", "said", "skipped", "warn"]


class Status(StrEnum):
    """How something is."""

    OK = "ok"
    WARN = "warn"
    """It works, but worse than it could."""
    FAIL = "fail"
    """Transfers will fail, or be wrong."""
    SKIPPED = "skipped"
    """There is nothing to look at here."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    status: Status
    seen: str  # for people
    remedy: str = ""  # empty only where there is nothing to do
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])  # what was seen, for programs: plain values

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "name": self.name,
            "status": self.status.value,
            "seen": self.seen,
            "remedy": self.remedy,
            "facts": dict(self.facts),
        }


Check: TypeAlias = Callable[[], Iterable[Finding]]

_REPORT: Final = "this is a defect of the check: please report it with this line"


def ok(name: str, seen: str, **facts: Any) -> Finding:
    """It is as it should be."""
    return Finding(name, Status.OK, seen, "", facts)


def warn(name: str, seen: str, remedy: str, **facts: Any) -> Finding:
    """It works, but worse than it could."""
    return Finding(name, Status.WARN, seen, remedy, facts)


def fail(name: str, seen: str, remedy: str, **facts: Any) -> Finding:
    """Transfers will fail, or be wrong."""
    return Finding(name, Status.FAIL, seen, remedy, facts)


def skipped(name: str, why: str, remedy: str = "", **facts: Any) -> Finding:
    """There is nothing to look at here."""
    return Finding(name, Status.SKIPPED, why, remedy, facts)


def said(name: str, check: Check) -> Iterator[Finding]:
    """What a check says. One that cannot be made is a finding too, and the others are made all the same."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001 - checks are supervised here: one that breaks must not hide the others
        yield fail(name, f"the check broke: {type(error).__name__}: {' '.join(str(error).split())}", _REPORT)
