"""`--plot`: every chart as a PNG, and one HTML page that needs nothing beside it."""

import base64
import importlib
import io
from html import escape
from pathlib import Path
from typing import Any, Final, cast

from kvxfer.errors import MissingExtraError, UsageError
from kvxfer.tools.bench.machine import headline
from kvxfer.tools.bench.report import Chart, Report, Table

__all__ = ["check", "draw"]

_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em;color:black}"
    "table{border-collapse:collapse;margin:1em 0;font-size:13px}th,td{padding:.2em .7em;text-align:right;"
    "border-bottom:1px solid lightgrey}th:first-child,td:first-child{text-align:left}img{max-width:100%}"
    "pre{background:whitesmoke;padding:1em;overflow:auto}.wrong{color:darkred}"
)
_DPI: Final = 110


def check() -> None:
    """Find out before a run whether it could be drawn.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    _matplotlib()


def draw(report: Report, folder: Path) -> None:
    """Write `<chart>.png` for every chart, and `<benchmark>.html`.

    Raises:
        MissingExtraError: If matplotlib is not installed.
        UsageError: If the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        images: list[tuple[Chart, bytes]] = []
        for chart in report.charts:
            image = _png(chart, headline(report.head))
            (folder / f"{chart.name}.png").write_bytes(image)
            images.append((chart, image))
        (folder / f"{report.benchmark}.html").write_text(_page(report, images), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--plot {folder} cannot be written to: {error.strerror}") from error


def _png(chart: Chart, caption: str) -> bytes:
    figures = _matplotlib()
    figure = figures.Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, values in chart.series.items():
        places = [place for place, value in enumerate(values) if value is not None]
        axes.plot(places, [values[place] for place in places], marker="o", label=name)
    axes.set_xticks(range(len(chart.x)), chart.x)
    if chart.target is not None:
        axes.axhline(chart.target, color="grey", linestyle=":")
    if chart.log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.supxlabel(caption, fontsize=6, color="grey")
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=_DPI, metadata={"Software": None})
    return data.getvalue()


def _page(report: Report, images: list[tuple[Chart, bytes]]) -> str:
    head = report.head
    parts = [
        f"<h1>kvxfer bench {escape(report.benchmark)}</h1>",
        f"<p>{escape(headline(head))}<br>{escape(str(head['started']))}</p>",
        *(f'<p class="wrong">FAILED: {escape(failure)}</p>' for failure in report.failures),
        *(
            f'<p><img alt="{escape(chart.title)}" src="data:image/png;base64,{base64.b64encode(image).decode()}"></p>'
            for chart, image in images
        ),
        *map(_table, report.tables),
        "<h2>Machine, versions, settings</h2>",
        f"<pre>{escape(_lines(head))}</pre>",
    ]
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>kvxfer bench {escape(report.benchmark)}</title>'
        f"<style>{_STYLE}</style>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _table(table: Table) -> str:
    def row(tag: str, cells: Any) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    lines = [row("th", table.headings), *(row("td", cells) for cells in table.rows)]
    notes = "".join(f"<p>{escape(note)}</p>" for note in table.notes)
    return f"<h2>{escape(table.title)}</h2><table>{''.join(lines)}</table>{notes}"


def _lines(head: dict[str, Any]) -> str:
    lines: list[str] = []
    for name, given in head.items():
        if isinstance(given, dict):
            lines += [f"{name}.{inner}: {value}" for inner, value in cast("dict[str, Any]", given).items()]
        else:
            lines.append(f"{name}: {given}")
    return "\n".join(lines)


def _matplotlib() -> Any:
    """The module of figures that need no display; untyped, as matplotlib may be missing where types are checked."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingExtraError("--plot needs matplotlib: pip install matplotlib") from error
