"""How commands say things: tables, sizes and durations, on a console as wide as where it prints."""

import os
from typing import Final

from rich.console import Console
from rich.table import Table

__all__ = ["console", "duration", "size", "table"]

_PIPED_COLUMNS: Final = 200  # a pipe has no width, nor has what is closed; rows should stay whole there


def console() -> Console:
    """Standard output."""
    return Console(width=None if os.isatty(1) else _PIPED_COLUMNS, highlight=False)


def table(*headings: str) -> Table:
    """An empty one without a frame, with these columns."""
    drawn = Table(box=None, pad_edge=False)
    for heading in headings:
        drawn.add_column(heading, overflow="fold")
    return drawn


def size(nbytes: float) -> str:
    """Bytes with at most four figures and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def duration(seconds: float) -> str:
    """Seconds with at most three figures and a unit."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1 or unit == "us":
            return f"{float(f'{seconds * factor:.3g}'):g} {unit}"
    return ""
