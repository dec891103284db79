"""What a benchmark says in the end: the data as JSON, and the tables that are made of them.

And what all of them share towards terminal and files: whether they can be written, progress, the end of a run.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from kvxfer.errors import UsageError
from kvxfer.tools.bench.machine import headline

__all__ = ["Report", "Table", "check", "finish", "progress", "shown_route", "shown_seconds"]

_SCHEMA: Final = 1
_PIPED_COLUMNS: Final = 200  # a pipe has no width; rows should stay whole there


@dataclass(frozen=True, slots=True)
class Table:
    """Rows for people; the data say more."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]  # the first column is flush left, all others flush right
    notes: Sequence[str] = ()  # lines below it


@dataclass(frozen=True, slots=True)
class Report:
    """One run of one benchmark."""

    benchmark: str
    head: dict[str, Any]
    data: dict[str, Any]  # results, as they go into the JSON
    tables: Sequence[Table]
    failures: Sequence[str] = field(default_factory=tuple[str, ...])  # what was measured and found wrong

    def to_json(self) -> dict[str, Any]:
        """Everything but the tables, which are made of it."""
        return {
            "schema": _SCHEMA,
            "benchmark": self.benchmark,
            **self.head,
            **self.data,
            "failures": list(self.failures),
        }

    def write(self, file: Path) -> None:
        """Write the JSON.

        Raises:
            UsageError: If the file cannot be written.
        """
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--json {file} cannot be written: {error.strerror}") from error

    def show(self, console: Console) -> None:
        """Print the tables."""
        console.print(f"kvxfer bench {self.benchmark}: {headline(self.head)}", markup=False, soft_wrap=True)
        for table in self.tables:
            drawn = RichTable(box=None, pad_edge=False)
            for number, heading in enumerate(table.headings):
                drawn.add_column(heading, justify="right" if number else "left", no_wrap=True)
            for row in table.rows:
                drawn.add_row(*row)
            console.print()
            console.print(table.title, markup=False, soft_wrap=True)
            console.print(drawn)
            for note in table.notes:
                console.print(note, markup=False, soft_wrap=True)
        for failure in self.failures:
            console.print(f"FAILED: {failure}", markup=False, soft_wrap=True)


def shown_seconds(seconds: float) -> str:
    """Seconds with three figures and a unit."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    return ""


def shown_route(cell: Mapping[str, Any]) -> str:
    """The route that was set, and the one that was taken if it is another."""
    route, taken = str(cell["route"]), cell["route_taken"]
    return route if taken == route else f"{route} > {taken}"


# --- a run


def check(json_file: Path | None) -> None:
    """Find out before a run, which may take hours, whether its results can be written, and make the folder.

    Raises:
        UsageError: If the file cannot be written.
    """
    if json_file is None:
        return
    if json_file.is_dir():
        raise UsageError(f"--json {json_file} cannot be written: it is a folder")
    try:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=json_file.parent):
            pass
    except OSError as error:
        raise UsageError(f"--json {json_file} cannot be written: {error.strerror}") from error


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
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task("starting", total=None)

        def step(label: str, done: int, total: int) -> None:
            if label:
                bar.update(task, description=label)
            bar.update(task, completed=done, total=total)

        yield step


def finish(report: Report, json_file: Path | None) -> int:
    """Print and write a report; the exit code."""
    report.show(Console(width=None if sys.stdout.isatty() else _PIPED_COLUMNS, highlight=False))
    if json_file is not None:
        report.write(json_file)
    return 1 if report.failures else 0
