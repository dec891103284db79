"""`kvxfer bench matrix`: routes x pieces x request sizes, each cell beside one contiguous copy of the same bytes."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, get_args

from kvxfer.config import Config
from kvxfer.errors import UsageError
from kvxfer.tools.bench.caches import in_shared_memory
from kvxfer.tools.bench.cells import Cell, Measured, Skipped, decode, prefill, stages
from kvxfer.tools.bench.children import collect
from kvxfer.tools.bench.device import Kind, sides
from kvxfer.tools.bench.layouts import NAMED, PIECES, Layout, plain
from kvxfer.tools.bench.report import Report, Table, shown_route

__all__ = ["SIZES", "Matrix", "known_routes", "quick", "routes"]

MIB: Final = 1 << 20
SIZES: Final = (2 * MIB, 32 * MIB, 512 * MIB, 2048 * MIB)


def routes() -> tuple[str, ...]:
    """Every route that the setting knows; those whose caches lie in shared memory on a CPU are the last."""
    known: tuple[str, ...] = get_args(Config.model_fields["route"].annotation)
    return tuple(sorted(known, key=in_shared_memory))


def known_routes(text: str | None) -> tuple[str, ...]:
    """The routes that a text names, separated by commas; all without one.

    Raises:
        UsageError: If the setting knows one of them not.
    """
    named = tuple(text.split(",")) if text else routes()
    if unknown := sorted(set(named) - set(routes())):
        raise UsageError(f"--routes: {unknown[0]!r} is none of {', '.join(routes())}")
    return named


@dataclass(frozen=True, slots=True)
class Matrix:
    """What to measure."""

    device: Kind
    routes: tuple[str, ...] = field(default_factory=routes)
    layouts: tuple[Layout, ...] = field(default_factory=lambda: (*map(plain, PIECES), *NAMED.values()))
    sizes: tuple[int, ...] = SIZES
    ctas: tuple[int, ...] = ()  # empty leaves the setting alone
    repetitions: int = 5
    cell_seconds: float = 60.0  # when a cell has taken so long, it ends after the repetition under way
    uvloop: bool = False
    beside: str = ""  # what runs in a thread of each process meanwhile: see `Victim`
    sabotage: str = ""  # `byte` changes one byte of what was received, `outside` one beside it: the checks must notice

    def __post_init__(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            UsageError: Naming it.
        """
        if not self.routes or not self.layouts or not self.sizes or min(self.sizes) < 1 or self.repetitions < 1:
            raise UsageError("a matrix needs at least one route, one layout, one size, and one repetition")
        if self.sabotage not in {"", "byte", "outside"}:
            raise UsageError(f"--sabotage {self.sabotage}: byte or outside")

    def cells(self) -> tuple[Cell, ...]:
        """In the order in which they are measured: by layout, then size, then route."""
        return tuple(
            Cell(route, layout, size, ctas)
            for layout in self.layouts
            for size in self.sizes
            for route in self.routes
            for ctas in self.ctas or (None,)
        )

    def run(self, head: dict[str, Any], on_step: Callable[[str, int, int], None]) -> Report:
        """Measure everything."""
        bodies, order = {"prefill": prefill, "decode": decode}, {cell: at for at, cell in enumerate(self.cells())}
        done = collect(bodies, self, len(order), on_step, devices=sides(self.device), uvloop=self.uvloop)
        return _report(head, self.device, sorted(done, key=lambda one: order[one.cell]))


def quick(device: Kind, **changes: Any) -> Matrix:
    """The matrix that takes less than a minute on two cores; `changes` are the attributes that were asked for."""
    small: dict[str, Any] = {
        "layouts": (plain(8192), NAMED["nhd-hnd"]),
        "sizes": (2 * MIB, 16 * MIB),
        "repetitions": 3,
        "cell_seconds": 1.0,
    }
    return Matrix(device, **(small | changes))


def as_json(device: Kind, one: Measured) -> dict[str, Any]:
    """One cell, as `cells[]` of the JSON."""
    cell, received = one.cell, one.received
    gbps, reference = one.fetch.gbps(one.nbytes), one.reference.gbps(one.nbytes)
    return {
        "route": cell.route,
        "device": device,
        "layout": cell.layout.name,
        "piece_bytes": cell.layout.piece_bytes,
        "request_bytes": one.nbytes,
        "ctas": cell.ctas,
        "gbps": gbps,
        "reference_gbps": reference,
        "ratio": gbps / reference if reference else None,
        "verified": not one.difference,
        "difference": one.difference,
        **one.fetch.to_json(),
        "reference": {"kind": one.reference_kind, "spread": one.reference.spread, **one.reference.to_json()},
        "route_taken": received.route,
        "why": received.why,
        "pieces": received.pieces,
        "chunks": received.chunks,
        "predicted_s": received.predicted,
        "first_predicted_s": one.first_predicted,
        "stages": {"decode": stages(received), "prefill": stages(one.sent)},
    }


def noise(cells: Sequence[Measured]) -> dict[str, Any]:
    """How far references for the same bytes lay apart, in one cell and from cell to cell, as part of their median."""
    alike: dict[tuple[str, int], list[float]] = {}
    for one in cells:
        alike.setdefault((one.reference_kind, one.nbytes), []).append(one.reference.median)
    between = [
        (max(medians) - min(medians)) / statistics.median(medians) for medians in alike.values() if len(medians) > 1
    ]
    return {
        "reference_spread_within_cells": statistics.median([one.reference.spread for one in cells]) if cells else None,
        "reference_spread_between_cells": max(between) if between else None,
    }


def _report(head: dict[str, Any], device: Kind, done: Sequence[Measured | Skipped]) -> Report:
    measured = [one for one in done if isinstance(one, Measured)]
    skipped = [one for one in done if isinstance(one, Skipped)]
    data: dict[str, Any] = {
        "cells": [as_json(device, one) for one in measured],
        "skipped": [{"cell": str(one.cell), "reason": one.reason} for one in skipped],
        "noise": noise(measured),
    }
    return Report(
        "matrix",
        head,
        data,
        [_table(data["cells"], data["noise"], skipped)],
        [f"{one.cell}: {one.difference}" for one in measured if one.difference],
    )


def _table(cells: Sequence[dict[str, Any]], spread: dict[str, Any], skipped: Sequence[Skipped]) -> Table:
    headings = ["route", "pieces", "request", "ms", "GB/s", "reference", "GB/s", "ratio", "verified", "stages, ms"]
    rows = [
        [
            route_name(cell),
            cell["layout"],
            f"{cell['request_bytes'] / MIB:g} MiB",
            f"{cell['median_s'] * 1e3:.2f}",
            f"{cell['gbps']:.2f}",
            cell["reference"]["kind"],
            f"{cell['reference_gbps']:.2f}",
            f"{cell['ratio']:.3f}",
            "yes" if cell["verified"] else "NO",
            _stages(cell["stages"]),
        ]
        for cell in cells
    ]
    notes = [f"skipped: {one.cell}: {one.reason}" for one in skipped]
    if spread["reference_spread_within_cells"] is not None:
        within, between = spread["reference_spread_within_cells"], spread["reference_spread_between_cells"]
        also = "" if between is None else f", those of different cells up to {between:.0%}"
        notes.insert(0, f"noise: references of one cell lie {within:.0%} apart (median of cells){also}")
    title = "whole `await fetch` after one of a block, at its caller, median; ratio: to one contiguous copy of as much"
    return Table(title, headings, rows, notes)


def route_name(cell: dict[str, Any]) -> str:
    """The route that was set, the one that was taken if it is another, and the CTAs if they were set."""
    return shown_route(cell) + ("" if cell["ctas"] is None else f" {cell['ctas']}")


def _stages(both: dict[str, Any]) -> str:
    """Where the time went: gather and post at the prefill side, wire and scatter at the decode side."""
    sent, received = both["prefill"] or both["decode"], both["decode"]
    parts = {"gather": sent["gathering"], "post": sent["posting"], "wire": received["wire"]}
    parts["scatter"] = received["scattering"]
    return " ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in parts.items() if seconds)
