"""Whether `auto` takes the right route: what a matrix measured with it beside what it measured with routes forced.

Three questions, each answered for every case (cells that differ in nothing but their route) that has what it needs:

- By time: how the cell of `auto` compares with the fastest forced route. It holds the noise of two measurements.
- By choice: how the forced cell of the route that `auto` took compares with the fastest one. That a route is measured
  twice does not count here; how far the two lay apart is the noise by which the answer by time is to be judged.
- Without `mapped`: pairs on different hosts take `staged` or `direct`, whichever is predicted to be faster. How the one
  that they would take compares with the better of the two, both forced.

The last one takes the prediction of a pair's first transfer. Later ones are corrected by what the transfers before them
took, and in a forced cell these are of the same route and the same size: such a prediction only repeats what was
measured. A pair that was left the choice knows less: a route that it has not tried has the correction of those that it
has, so with one of the two tried it compares the two as at first.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvxfer.plans.routes import predicted_faster
from kvxfer.tools.bench.cells import Measured
from kvxfer.tools.bench.report import Chart

__all__ = ["NEAR", "Case", "Judged", "Verdict", "judge"]

NEAR: Final = 1.1
"""A choice is good if it took no more than this times the seconds of the best: differences below are mostly noise."""
_FEWEST: Final = 2
"""Forced routes that a comparison needs: with one there is nothing to choose."""
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """What cells of different routes have in common."""

    layout: str
    request_bytes: int
    ctas: int | None = None

    def __str__(self) -> str:
        return f"{self.layout} pieces, {self.request}"

    @property
    def request(self) -> str:
        """All but the layout, in words."""
        ctas = "" if self.ctas is None else f", {self.ctas} CTAs"
        return f"{self.request_bytes / _MIB:g} MiB{ctas}"


@dataclass(frozen=True, slots=True)
class Judged:
    """A choice in one case."""

    case: Case
    chosen: str  # the route that was taken, or would have been
    best: str  # the forced route with the smallest median
    ratio: float  # median seconds of the choice over those of the best; below 1 if `auto` was faster than all forced

    @property
    def near(self) -> bool:
        """Whether the choice was good."""
        return self.ratio <= NEAR

    def to_json(self) -> dict[str, Any]:
        """As one of `misses`."""
        return {**asdict(self.case), "chosen": self.chosen, "best": self.best, "ratio": self.ratio}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answers, each for the cases that have one; the module says what they mean."""

    by_time: tuple[Judged, ...] = ()
    by_choice: tuple[Judged, ...] = ()
    without_mapped: tuple[Judged, ...] = ()
    noise: tuple[float, ...] = ()  # median seconds of `auto` over those of the forced cell of the same route

    def to_json(self) -> dict[str, Any]:
        """As `auto` of the JSON; a question that no case answers is not in it."""
        questions = {"by_time": self.by_time, "by_choice": self.by_choice, "without_mapped": self.without_mapped}
        found: dict[str, Any] = {name: _counted(judged) for name, judged in questions.items() if judged}
        if self.noise:
            off = self._off()
            found["noise"] = {"cases": len(off), "median": statistics.median(off), "max": max(off)}
        return found

    def lines(self) -> list[str]:
        """The same for people: what was asked, how often the choice was good, and where not."""
        lines: list[str] = []
        if self.by_time:
            choice = f"; by choice, both forced, in {_share(self.by_choice)}" if self.by_choice else ""
            lines.append(f"auto: within 10 % of the best forced route in {_share(self.by_time)} by time{choice}")
        if self.noise:
            off = self._off()
            apart = f"{statistics.median(off):.0%} apart (median of cases), {max(off):.0%} at most"
            lines.append(f"auto: its cells and the forced cells of the same route lie {apart}")
        if self.without_mapped:
            within = f"within 10 % of the better one in {_share(self.without_mapped)}"
            lines.append(f"without mapped: the one of staged and direct that is predicted to be faster is {within}")
        lines += _missed("by time", self.by_time, measured="auto > ")
        lines += _missed("by choice", self.by_choice)
        return lines + _missed("without mapped", self.without_mapped)

    def charts(self) -> list[Chart]:
        """For every question the ratios of all its cases, by pieces, with a line where a choice is no longer good."""
        questions = (
            ("auto-time", "`auto` beside the fastest forced route", self.by_time),
            ("auto-choice", "the route that `auto` took, forced, beside the fastest one", self.by_choice),
            ("auto-without-mapped", "`staged` or `direct`, as predicted, beside the faster one", self.without_mapped),
        )
        return [_chart(f"matrix-{name}", title, judged) for name, title, judged in questions if judged]

    def _off(self) -> list[float]:
        return [abs(ratio - 1) for ratio in self.noise]


def judge(cells: Iterable[Measured]) -> Verdict:
    """Judge the choices of a matrix.

    Args:
        cells: All that was measured, in any order. Those that are not verified, or took no time, are left out, and so
            are those of a forced route in whose place another one was taken.
    """
    cases: dict[Case, list[Measured]] = {}
    for one in cells:
        if not one.difference and one.fetch.median > 0:
            case = Case(one.cell.layout.name, one.nbytes, one.cell.ctas)
            cases.setdefault(case, []).append(one)
    by_time: list[Judged] = []
    by_choice: list[Judged] = []
    without_mapped: list[Judged] = []
    noise: list[float] = []
    for case, runs in cases.items():
        forced = {run.cell.route: run for run in runs if run.cell.route == run.received.route}
        auto = next((run for run in runs if run.cell.route == "auto"), None)
        if auto is not None and len(forced) >= _FEWEST:
            by_time.append(_judged(case, auto, forced))
            if (same := forced.get(auto.received.route)) is not None:
                by_choice.append(_judged(case, same, forced))
                noise.append(auto.fetch.median / same.fetch.median)
        if (chosen := _predicted(forced)) is not None:
            without_mapped.append(_judged(case, chosen, {name: forced[name] for name in ("staged", "direct")}))
    return Verdict(tuple(by_time), tuple(by_choice), tuple(without_mapped), tuple(noise))


def _judged(case: Case, chosen: Measured, forced: Mapping[str, Measured]) -> Judged:
    best = min(forced.values(), key=lambda run: run.fetch.median)
    return Judged(case, chosen.received.route, best.received.route, chosen.fetch.median / best.fetch.median)


def _predicted(forced: Mapping[str, Measured]) -> Measured | None:
    """The one of `staged` and `direct` that a new pair takes if it can do nothing else; None without predictions."""
    staged, direct = forced.get("staged"), forced.get("direct")
    if staged is None or direct is None or not staged.first_predicted or not direct.first_predicted:
        return None
    route = predicted_faster(direct=direct.first_predicted, staged=staged.first_predicted)
    return forced[route.name.lower()]


def _counted(judged: Sequence[Judged]) -> dict[str, Any]:
    misses = [one.to_json() for one in judged if not one.near]
    return {"cases": len(judged), "within_10_percent": len(judged) - len(misses), "misses": misses}


def _share(judged: Sequence[Judged]) -> str:
    return f"{sum(one.near for one in judged)} of {len(judged)} cases"


def _missed(what: str, judged: Sequence[Judged], *, measured: str = "") -> list[str]:
    return [
        f"missed {what}: {one.case}: {measured}{one.chosen} took {one.ratio:.2f} times as long as {one.best}"
        for one in judged
        if not one.near
    ]


def _chart(name: str, title: str, judged: Sequence[Judged]) -> Chart:
    ratios = {(one.case.request, one.case.layout): one.ratio for one in judged}
    x = list(dict.fromkeys(one.case.layout for one in judged))
    requests = dict.fromkeys(one.case.request for one in judged)
    series = {request: [ratios.get((request, layout)) for layout in x] for request in requests}
    return Chart(name, title, "pieces", "times the seconds of the best", x, series, target=NEAR)
