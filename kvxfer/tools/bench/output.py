"""What all benchmarks share towards terminal and files: whether they can be written, progress, the end of a run."""

import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvxfer.errors import UsageError
from kvxfer.tools.bench.report import Report

__all__ = ["check", "finish", "progress"]

_PIPED_COLUMNS: Final = 200  # a pipe has no width; rows should stay whole there


def check(json_file: Path | None, plot_folder: Path | None) -> None:
    """Find out before a run, which may take hours, whether its results can be written, and make the folders.

    Raises:
        MissingExtraError: If matplotlib is not installed and charts are wanted.
        UsageError: If a file or folder cannot be written to.
    """
    if plot_folder is not None:
        from kvxfer.tools.bench import plots

        plots.check()
        _check_folder(plot_folder, f"--plot {plot_folder} cannot be written to")
    if json_file is not None:
        if json_file.is_dir():
            raise UsageError(f"--json {json_file} cannot be written: it is a folder")
        _check_folder(json_file.parent, f"--json {json_file} cannot be written")


def _check_folder(folder: Path, otherwise: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"{otherwise}: {error.strerror}") from error


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


def finish(report: Report, json_file: Path | None, plot_folder: Path | None) -> int:
    """Print, write and draw a report; the exit code."""
    report.show(Console(width=None if sys.stdout.isatty() else _PIPED_COLUMNS, highlight=False))
    if json_file is not None:
        report.write(json_file)
    if plot_folder is not None:
        from kvxfer.tools.bench.plots import draw

        draw(report, plot_folder)
    return 1 if report.failures else 0
