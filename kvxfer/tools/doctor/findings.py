"""What a check says: one thing that was looked at, how it is, and what to do about it; and how a terminal shows it."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvxfer.telemetry import printable
from kvxfer.tools.shown import table

__all__ = [
    "Check",
    "Finding",
    "Status",
    "fail",
    "ok",
    "progress",
    "said",
    "shown",
    "skipped",
    "verdict",
    "warn",
    "words",
]


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
        yield fail(name, f"the check broke: {type(error).__name__}: {words(error)}", _REPORT)


def words(error: BaseException) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split())


# --- on a terminal

_STYLES: Final = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red", Status.SKIPPED: "dim"}


def shown(findings: Iterable[Finding]) -> Table:
    """One row each, with the remedy below what was seen."""
    rows = table()
    for heading in ("check", "", "seen"):
        rows.add_column(heading, overflow="fold", no_wrap=heading != "seen")
    for finding in findings:
        style = _STYLES[finding.status]
        # a part of it is what the other side of a probe says
        seen = Text(printable(finding.seen), style="dim" if finding.status is Status.SKIPPED else "")
        if finding.remedy:
            seen.append(f"\n-> {finding.remedy}", style="bold" if finding.status is Status.FAIL else "italic")
        rows.add_row(finding.name, Text(finding.status.value, style), seen)
    return rows


def verdict(findings: Iterable[Finding]) -> str:
    """One line at the end."""
    count = Counter(finding.status for finding in findings)
    return ", ".join(f"{count[status]} {status.value}" for status in Status if count[status])


def progress(finding: Finding) -> None:
    """Say on a terminal's stderr how far it has got, since the table comes at the end."""
    if sys.stderr.isatty():
        Console(stderr=True).print(f"{finding.name}: {finding.status.value}", style="dim", markup=False)
