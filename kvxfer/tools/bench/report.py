"""What a benchmark says on its way and in the end: progress, a table, and data as JSON."""

import json
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvxfer.tools.bench.machine import headline
from kvxfer.tools.shown import console, table

__all__ = ["Report", "finish", "progress", "shown_route"]

_SCHEMA: Final = 1


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a benchmark: data for programs, and a table of them for people."""

    data: dict[str, Any]  # as they go into the JSON
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]  # the first column is flush left, all others flush right
    notes: Sequence[str]  # lines below the table
    failures: Sequence[str]  # what was measured and found wrong


def shown_route(cell: Mapping[str, Any]) -> str:
    """The route that was set, and the one that was taken if it is another."""
    route, taken = str(cell["route"]), cell["route_taken"]
    return route if taken == route else f"{route} > {taken}"


@contextmanager
def progress(name: str) -> Generator[Callable[[str, int, int], None], None, None]:
    """A bar on stderr if that is a terminal; nothing elsewhere. Gives a function of (what is done, steps done, all)."""
    bar = Progress(
        TextColumn(f"bench {name}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        transient=True,
        disable=not os.isatty(2),
    )
    with bar:
        task = bar.add_task("starting", total=None)

        def step(label: str, done: int, total: int) -> None:
            if label:
                bar.update(task, description=label)
            bar.update(task, completed=done, total=total)

        yield step


def finish(name: str, head: dict[str, Any], report: Report, json_file: Path | None) -> None:
    """Print a report and write it behind its head, see `machine.describe`."""
    drawn = table()
    for number, heading in enumerate(report.headings):
        drawn.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in report.rows:
        drawn.add_row(*row)
    failures = [f"FAILED: {failure}" for failure in report.failures]
    above = [f"kvxfer bench {name}: {headline(head)}", "", report.title]
    out = console()
    for part in (*above, drawn, *report.notes, *failures):
        out.print(part, markup=False, soft_wrap=isinstance(part, str))
    if json_file is not None:
        whole = {"schema": _SCHEMA, "benchmark": name, **head, **report.data, "failures": list(report.failures)}
        json_file.write_text(json.dumps(whole, indent=1, default=str) + "\n", encoding="utf-8")
