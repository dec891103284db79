"""What a benchmark says in the end: the data as JSON, and the tables and charts that are made of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table as RichTable

from kvxfer.errors import UsageError
from kvxfer.tools.bench.machine import headline

__all__ = ["Chart", "Report", "Table", "shown_seconds"]

_SCHEMA: Final = 1


@dataclass(frozen=True, slots=True)
class Table:
    """Rows for people; the data say more."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]  # the first column is flush left, all others flush right
    notes: Sequence[str] = ()  # lines below it


@dataclass(frozen=True, slots=True)
class Chart:
    """Series over common places."""

    name: str  # of the file that it is drawn into
    title: str
    x_label: str
    y_label: str
    x: Sequence[str]  # names of the places
    series: Mapping[str, Sequence[float | None]]  # None where there is no value
    log: bool = False  # whether the values' axis is logarithmic
    target: float | None = None  # a value to draw a line at


@dataclass(frozen=True, slots=True)
class Report:
    """One run of one benchmark."""

    benchmark: str
    head: dict[str, Any]
    data: dict[str, Any]  # results, as they go into the JSON
    tables: Sequence[Table]
    charts: Sequence[Chart] = ()
    failures: Sequence[str] = field(default_factory=tuple[str, ...])  # what was measured and found wrong

    def to_json(self) -> dict[str, Any]:
        """Everything but the tables and charts, which are made of it."""
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
