"""Findings on a terminal."""

import sys
from collections.abc import Iterable
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvxfer.telemetry import printable
from kvxfer.tools.doctor.findings import Finding, Status

__all__ = ["progress", "table", "verdict"]

_STYLES: Final = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red", Status.SKIPPED: "dim"}


def table(findings: Iterable[Finding]) -> Table:
    """One row each, with the remedy below what was seen."""
    rows = Table(box=None, pad_edge=False)
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
    count = dict.fromkeys(Status, 0)
    for finding in findings:
        count[finding.status] += 1
    return ", ".join(f"{number} {status.value}" for status, number in count.items() if number)


def progress(finding: Finding) -> None:
    """Say on a terminal's stderr how far it has got, since the table comes at the end."""
    if sys.stderr.isatty():
        Console(stderr=True).print(f"{finding.name}: {finding.status.value}", style="dim", markup=False)
