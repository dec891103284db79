"""`kvxfer bench plan`: what planning costs, and how it grows.

Plans copies of 1,000 to 10,000,000 contiguous pieces between two ranks (32 layers of K and V, 8 heads of 128 bfloat16,
blocks of 16 tokens, shuffled block ids) without any memory behind them, and times each step, best of several:

| step | what |
|---|---|
| pair | PairPlan: strides and base addresses; cached per pair |
| bind | block lists and token range of one request |
| tables | all that both sides do before a byte moves: the grid, the digest, counts of rows and pieces |
| gather | the tables of one gather of everything |
| scatter | the tables of one scatter of everything |
| list | the list of every piece, cut, made and merged chunk by chunk as the routes `direct` and `pull` do it |

Times are milliseconds of CPU time, so that what else the machine does counts less. `ns/row` is what bind + tables +
gather take above 0.4 ms, over the rows of all tables (block rows and regions); the target is at most 100. `ns/piece` is
list over the pieces; the target is at most 20 where there are many (some tens of microseconds a chunk do not
depend on them). `plan B` are the bytes of all arrays that the plan keeps or hands to a kernel, `list B` those of the
longest list that exists at a time: only it grows with the pieces, up to those of a chunk.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import log10
from random import Random
from typing import Any, Final

import numpy as np

from kvxfer.geometry import CacheGeometry, ChunkPlan, CopyPlan, PairPlan, Pieces, Span, TransferPlan, common
from kvxfer.plans.planning import Bound, fit_grid, in_place_bytes
from kvxfer.protocol.messages import Route
from kvxfer.tools.bench.report import Chart, Report, Table
from kvxfer.tools.engine import from_hf_config

__all__ = ["LAYOUTS", "PIECES", "Layout", "Planning", "Result", "array_bytes", "measure"]

BLOCK: Final = 16
HEADS: Final = 8
LAYERS: Final = 32
_MODEL: Final = {
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "head_dim": 128,
    "dtype": "bfloat16",
}
PIECES: Final = (10**3, 10**4, 10**5, 10**6, 10**7)
FIXED_MS: Final = 0.4
CHUNK: Final = 256 << 20


@dataclass(frozen=True)
class Layout:
    """How the decode side differs, and how many pieces a block of one layer's K or V falls into."""

    name: str
    pieces_a_block: int
    tp: int = 1
    layout: str = "NHD"

    def sides(self, blocks: int) -> tuple[CacheGeometry, CacheGeometry]:
        """A prefill and a decode rank with so many blocks."""
        src = from_hf_config(_MODEL, blocks=blocks)
        dst = from_hf_config(_MODEL, tp=self.tp, layout=self.layout, blocks=blocks)
        return src.ranks[0], dst.ranks[0]


LAYOUTS: Final = (
    Layout("same layout (32 KiB)", 1),
    Layout("head split (1 KiB)", BLOCK, tp=2),
    Layout("NHD to HND (256 B)", BLOCK * HEADS, layout="HND"),
)


def best(work: Callable[[], Any], seconds: float) -> float:
    """Shortest of several runs, in milliseconds of CPU time."""
    found, until = float("inf"), time.perf_counter() + seconds
    for _ in range(200):
        began = time.process_time()
        work()
        found = min(found, time.process_time() - began)
        if time.perf_counter() > until:
            break
    return found * 1e3


def array_bytes(*plans: TransferPlan | CopyPlan | Pieces) -> int:
    """Bytes of the arrays of plans, each array counted once."""
    arrays: dict[int, int] = {}

    def count(*found: "np.ndarray[Any, Any]") -> None:
        arrays.update({id(one): one.nbytes for one in found})

    for plan in plans:
        if isinstance(plan, TransferPlan):
            for c in plan.pair.classes:
                count(c.places, c.bases)
            for rows in plan.rows:
                count(rows.table, rows.begin)
        elif isinstance(plan, CopyPlan):
            for segment in plan.segments:
                count(segment.regions, segment.stencil.rows)
        else:
            count(plan.src, plan.dst, plan.nbytes)
    return sum(arrays.values())


@dataclass(frozen=True)
class Result:
    """One line of the table: times in milliseconds."""

    layout: str
    pieces: int
    rows: int
    regions: int
    pair: float
    bind: float
    tables: float
    gather: float
    scatter: float
    list: float
    plan_bytes: int
    list_bytes: int

    @property
    def plan_ns_a_row(self) -> float:
        """Over the fixed part, by rows of all tables."""
        return max(0.0, self.bind + self.tables + self.gather - FIXED_MS) * 1e6 / (self.rows + self.regions)

    @property
    def list_ns_a_piece(self) -> float:
        """Cutting, listing and merging."""
        return self.list * 1e6 / self.pieces


def measure(layout: Layout, pieces: int, seconds: float = 0.5) -> Result:
    """Plan one transfer of about so many pieces, and time each step."""
    blocks = max(1, round(pieces / (2 * LAYERS * layout.pieces_a_block)))
    src, dst = layout.sides(blocks + 1)
    selections = common(src, dst)
    pair = PairPlan(src, dst, selections)
    shuffled = [Random(seed).sample(range(blocks), blocks) for seed in (1, 2)]  # noqa: S311
    spans = [{"default": Span(np.asarray(ids, np.int64))} for ids in shuffled]
    tokens = range(blocks * BLOCK)

    def bind() -> TransferPlan:
        return pair.bind(spans[0], spans[1], tokens)

    def tables(plan: TransferPlan) -> Bound:
        grid = fit_grid(plan, target_bytes=in_place_bytes(Route.DIRECT, plan, CHUNK), limit_bytes=CHUNK, listed=True)
        plan.digest(grid)
        return Bound(plan, grid)

    plan = bind()
    whole = plan.whole
    bound = tables(plan)

    def chunks() -> list[ChunkPlan]:
        again = replace(bound.plan)  # of which no window has been looked at
        return [again.chunk(bound.grid, number) for number in range(len(bound.grid))]

    return Result(
        layout.name,
        sum(chunk.copy().pieces for chunk in chunks()),
        sum(map(len, plan.rows)),
        sum(len(c.bases) for c in pair.classes),
        best(lambda: PairPlan(src, dst, selections), seconds),
        best(bind, seconds),
        best(lambda: tables(bind()), seconds) - best(bind, seconds),
        best(lambda: whole.gather(0), seconds),
        best(lambda: whole.scatter(0), seconds),
        best(lambda: sum(len(chunk.listed()) for chunk in chunks()), seconds),
        array_bytes(plan, whole.gather(0)),
        max(array_bytes(chunk.listed()) for chunk in chunks()),
    )


@dataclass(frozen=True, slots=True)
class Planning:
    """What to measure."""

    pieces: tuple[int, ...] = PIECES
    seconds: float = 0.5  # to spend on each step

    def run(self, head: dict[str, Any], on_step: Callable[[str, int, int], None]) -> Report:
        """Measure everything, in this process."""
        results: list[Result] = []
        wanted = [(layout, pieces) for layout in LAYOUTS for pieces in self.pieces]
        for layout, pieces in wanted:
            on_step(f"{layout.name}, {pieces} pieces", len(results), len(wanted))
            results.append(measure(layout, pieces, self.seconds))
        on_step("", len(results), len(wanted))
        return _report(head, results)


def _report(head: dict[str, Any], results: Sequence[Result]) -> Report:
    steps = ("pair", "bind", "tables", "gather", "scatter", "list")
    rates = [{"plan_ns_a_row": r.plan_ns_a_row, "list_ns_a_piece": r.list_ns_a_piece} for r in results]
    cells = [asdict(r) | rate for r, rate in zip(results, rates, strict=True)]
    rows = [
        [
            r.layout,
            str(r.pieces),
            str(r.rows),
            *(f"{cell[step]:.3f}" for step in steps),
            f"{r.plan_ns_a_row:.1f}",
            f"{r.list_ns_a_piece:.1f}",
            str(r.plan_bytes),
            str(r.list_bytes),
        ]
        for r, cell in zip(results, cells, strict=True)
    ]
    headings = ["layout", "pieces", "rows", *steps, "ns/row", "ns/piece", "plan B", "list B"]
    title = (
        "milliseconds of CPU time, best of several; targets: at most 100 ns/row and 20 ns/piece where there are many"
    )
    names = [layout.name for layout in LAYOUTS]
    x = [f"{number:.0e}" for number in sorted({_decade(r.pieces) for r in results})]
    at = {(r.layout, f"{_decade(r.pieces):.0e}"): r.bind + r.tables + r.gather for r in results}
    series = {name: [at.get((name, place)) for place in x] for name in names}
    chart = Chart("plan", "bind + tables + gather", "about how many pieces", "ms of CPU time", x, series, log=True)
    return Report("plan", head, {"cells": cells}, [Table(title, headings, rows)], [chart])


def _decade(pieces: int) -> float:
    return float(10.0 ** round(log10(pieces)))
