"""Whether `auto` took the right route, over cells whose verdict is obvious."""

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.telemetry import TransferStats
from kvxfer.tools.bench.cells import Cell, Measured
from kvxfer.tools.bench.layouts import plain
from kvxfer.tools.bench.samples import Samples
from kvxfer.tools.bench.verdict import Case, Judged, Verdict, judge

MIB = 1 << 20
CASE = Case("8KiB", 2 * MIB)
FORCED = ("mapped", "staged", "direct", "pull")


def cell(route, seconds, *, taken=None, first=None, later=None, size=2 * MIB, ctas=None, difference="", piece=8192):
    """One cell; its median, what its first transfer was predicted to take, and the one in the middle."""
    stats = TransferStats(route=taken or route, started=0.0, finished=1.0, predicted=later)
    return Measured(
        cell=Cell(route, plain(piece), size, ctas),
        nbytes=size,
        fetch=Samples.of([seconds]),
        reference=Samples.of([1.0]),
        reference_kind="memcpy",
        difference=difference,
        received=stats,
        sent=None,
        first_predicted=first,
    )


def test_the_fastest_route_by_time_and_by_choice():
    found = judge([cell("auto", 10, taken="mapped"), cell("mapped", 10), cell("staged", 30), cell("direct", 20)])
    best = (Judged(CASE, "mapped", "mapped", 1.0),)
    assert found == Verdict(by_time=best, by_choice=best, noise=(1.0,))
    good = {"cases": 1, "within_10_percent": 1, "misses": []}
    assert found.to_json() == {
        "by_time": good,
        "by_choice": good,
        "noise": {"cases": 1, "median": 0.0, "max": 0.0},
    }
    assert found.lines() == [
        "auto: within 10 % of the best forced route in 1 of 1 cases by time; by choice, both forced, in 1 of 1 cases",
        "auto: its cells and the forced cells of the same route lie 0% apart (median of cases), 0% at most",
    ]


def test_a_wrong_choice_is_missed_in_both_ways_and_named():
    found = judge([cell("auto", 36, taken="staged"), cell("staged", 30), cell("direct", 20), cell("pull", 40)])
    place = {"layout": "8KiB", "request_bytes": 2 * MIB, "ctas": None, "chosen": "staged", "best": "direct"}
    answer = found.to_json()
    assert answer["by_time"] == {"cases": 1, "within_10_percent": 0, "misses": [{**place, "ratio": 1.8}]}
    assert answer["by_choice"] == {"cases": 1, "within_10_percent": 0, "misses": [{**place, "ratio": 1.5}]}
    assert found.lines()[-2:] == [
        "missed by time: 8KiB pieces, 2 MiB: auto > staged took 1.80 times as long as direct",
        "missed by choice: 8KiB pieces, 2 MiB: staged took 1.50 times as long as direct",
    ]


def test_the_right_choice_in_a_noisy_run_is_missed_by_time_alone():
    found = judge([cell("auto", 15, taken="mapped"), cell("mapped", 10), cell("direct", 20)])
    assert (found.by_time[0].near, found.by_choice[0].near) == (False, True)
    assert found.to_json()["noise"] == {"cases": 1, "median": 0.5, "max": 0.5}


@pytest.mark.parametrize(("seconds", "near"), [(11.0, True), (11.01, False), (5.0, True)])
def test_within_ten_percent_is_the_border_and_faster_than_all_is_near(seconds, near):
    (found,) = judge([cell("auto", seconds, taken="mapped"), cell("mapped", 10), cell("direct", 12)]).by_time
    assert (found.ratio, found.near) == (seconds / 10, near)


def test_noise_counts_in_both_directions_and_from_case_to_case():
    cells = []
    for size, seconds in ((2 * MIB, 8), (4 * MIB, 11), (8 * MIB, 10)):
        cells += [cell("auto", seconds, taken="mapped", size=size)]
        cells += [cell("mapped", 10, size=size), cell("staged", 20, size=size)]
    found = judge(cells)
    assert found.to_json()["noise"] == {"cases": 3, "median": pytest.approx(0.1), "max": pytest.approx(0.2)}
    assert found.lines()[1].endswith("lie 10% apart (median of cases), 20% at most")


@pytest.mark.parametrize(
    "cells",
    [
        [],
        [cell("auto", 10, taken="mapped")],
        [cell("mapped", 10), cell("staged", 20), cell("pull", 20)],
        [cell("auto", 10, taken="mapped"), cell("mapped", 10)],
        [cell("auto", 10, taken="mapped"), cell("mapped", 10), cell("staged", 20, difference="wrong")],
        [cell("auto", 10, taken="mapped", difference="wrong"), cell("mapped", 10), cell("staged", 20)],
        [cell("auto", 10, taken="mapped"), cell("mapped", 10), cell("staged", 0)],
        [cell("auto", 0, taken="mapped"), cell("mapped", 10), cell("staged", 20)],
        [cell("auto", 10, taken="mapped"), cell("mapped", 10), cell("direct", 20, taken="staged")],
        [cell("auto", 10, taken="mapped"), cell("mapped", 10), cell("staged", 20, size=4 * MIB)],
        [cell("auto", 10, taken="mapped"), cell("mapped", 10), cell("staged", 20, ctas=24)],
    ],
    ids=[
        "nothing",
        "only auto",
        "no auto",
        "one route",
        "a route is wrong",
        "auto is wrong",
        "a route took no time",
        "auto took no time",
        "a route fell back",
        "another size",
        "other CTAs",
    ],
)
def test_what_cannot_be_compared_is_not_in_the_answer(cells):
    found = judge(cells)
    assert found == Verdict()
    assert found.to_json() == {}
    assert found.lines() == []


def test_a_route_that_was_not_forced_is_judged_by_time_alone():
    answer = judge([cell("auto", 10, taken="mapped"), cell("staged", 30), cell("direct", 20)])
    assert set(answer.to_json()) == {"by_time"}
    assert answer.by_time == (Judged(CASE, "mapped", "direct", 0.5),)
    assert answer.lines() == ["auto: within 10 % of the best forced route in 1 of 1 cases by time"]


def test_thread_blocks_are_cases_of_their_own():
    cells = [cell("auto", 20 - n, taken="mapped", ctas=n) for n in (8, 4)]
    cells += [cell(route, 10, ctas=n) for route in ("mapped", "staged") for n in (4, 8)]
    found = judge(cells)
    assert [(str(one.case), one.ratio) for one in found.by_time] == [
        ("8KiB pieces, 2 MiB, 8 CTAs", 1.2),
        ("8KiB pieces, 2 MiB, 4 CTAs", 1.6),
    ]


@pytest.mark.parametrize(
    ("direct", "staged", "chosen"),
    [(1.0, 2.0, "direct"), (2.0, 1.0, "staged"), (1.05, 1.0, "direct"), (1.06, 1.0, "staged")],
)
def test_without_mapped_the_rule_of_the_chooser_decides(direct, staged, chosen):
    found = judge([cell("mapped", 1), cell("direct", 10, first=direct), cell("staged", 20, first=staged)])
    ratio = {"direct": 1.0, "staged": 2.0}[chosen]
    assert found == Verdict(without_mapped=(Judged(CASE, chosen, "direct", ratio),))


def test_without_mapped_the_first_prediction_counts_and_no_later_one():
    """What repetitions of the same route taught is not known to a pair that has to choose."""
    cells = [cell("direct", 10, first=3.0, later=10.0), cell("staged", 20, first=2.0, later=20.0)]
    (found,) = judge(cells).without_mapped
    assert (found.chosen, found.best) == ("staged", "direct")
    said, missed = judge(cells).lines()
    assert said.endswith(
        "staged and direct that is predicted to be faster is within 10 % of the better one in 0 of 1 cases"
    )
    assert missed == "missed without mapped: 8KiB pieces, 2 MiB: staged took 2.00 times as long as direct"


@pytest.mark.parametrize("first", [None, 0.0])
def test_without_a_prediction_there_is_no_choice(first):
    assert judge([cell("direct", 10, first=first), cell("staged", 20, first=1.0)]) == Verdict()
    assert judge([cell("direct", 10, first=1.0), cell("staged", 20, first=first)]) == Verdict()


def test_a_chart_a_question_with_all_its_cases():
    cells = []
    for piece, size, seconds in ((8192, 2 * MIB, 10), (8192, 4 * MIB, 15), (32768, 2 * MIB, 20)):
        cells += [cell("auto", seconds, taken="mapped", size=size, piece=piece)]
        cells += [cell(route, 10, size=size, piece=piece) for route in ("mapped", "staged")]
    by_time, by_choice = judge(cells).charts()
    assert (by_time.name, by_choice.name) == ("matrix-auto-time", "matrix-auto-choice")
    assert list(by_time.x) == ["8KiB", "32KiB"]
    assert by_time.series == {"2 MiB": [1.0, 2.0], "4 MiB": [1.5, None]}
    assert by_choice.series == {"2 MiB": [1.0, 1.0], "4 MiB": [1.0, None]}
    assert by_time.target == 1.1
    assert judge([]).charts() == []


@given(
    seconds=st.fixed_dictionaries(dict.fromkeys(("auto", *FORCED), st.integers(1, 40))),
    taken=st.sampled_from(FORCED),
    seed=st.integers(0, 9),
)
def test_against_arithmetic(seconds, taken, seed):
    cells = [cell("auto", seconds["auto"], taken=taken), *(cell(route, seconds[route]) for route in FORCED)]
    Random(seed).shuffle(cells)
    answer = judge(cells).to_json()
    best = min(seconds[route] for route in FORCED)
    assert answer["by_time"]["within_10_percent"] == (10 * seconds["auto"] <= 11 * best)
    assert answer["by_choice"]["within_10_percent"] == (10 * seconds[taken] <= 11 * best)
    assert answer["noise"]["max"] == pytest.approx(abs(seconds["auto"] - seconds[taken]) / seconds[taken])
    for question in ("by_time", "by_choice"):
        assert answer[question]["within_10_percent"] + len(answer[question]["misses"]) == answer[question]["cases"] == 1
    assert json.loads(json.dumps(answer)) == answer
