"""Which failures of a scene are played again: those that a lack of time explains, and no other."""

from typing import Any

import company
import pytest
from actors import Actor, ActorFailedError, DefectError
from company import Company
from faults import HarmError
from starving import Starving, between, counted


@pytest.mark.parametrize(
    ("failure", "starved", "patience"),
    [
        (AssertionError, True, [1.0, 4.0]),
        (TimeoutError, True, [1.0, 4.0]),
        (ActorFailedError, True, [1.0, 4.0]),
        (AssertionError, False, [1.0]),
        (HarmError, True, [1.0]),
        (DefectError, True, [1.0]),
    ],
)
async def test_a_failure_is_played_again_only_if_somebody_had_no_time(monkeypatch, failure, starved, patience):
    assert await played(monkeypatch, failure, [], starved=starved) == (failure, patience)


async def test_a_failure_that_comes_before_the_harm_is_looked_for_does_not_hide_it(monkeypatch):
    seen = [[], ["other bytes"]]
    assert await played(monkeypatch, AssertionError, seen, starved=True) == (HarmError, [1.0])
    assert await played(monkeypatch, AssertionError, [[], []], starved=True) == (AssertionError, [1.0, 4.0])


async def played(monkeypatch, failure, harm, *, starved):
    """What came of a scene that fails, whose actors have seen such harm, and with which patience it was played."""
    patiences = []

    class Seeing:
        answers = True

        def __init__(self, seen):
            self.seen = seen

        async def harm(self):
            return self.seen

    class Failing:
        def __init__(self, *_, patience):
            patiences.append(patience)

        def runs(self):
            return []

        def everybody(self):
            return [Seeing(seen) for seen in harm]

        async def play(self):
            raise failure("it went wrong")

    async def told(*_):
        return starved

    monkeypatch.setattr(company, "starved", told)
    three = Company()
    shown: Any = Failing
    try:
        with pytest.raises(Exception, match=r"it went wrong|other bytes") as caught:
            await three.play("cma", shown)
    finally:
        three.end()
    return caught.type, patiences


@pytest.mark.parametrize(
    ("seconds", "waited", "ran", "starved"),
    [
        (0.5, 0.45, 0.01, True),  # it stood still, and wanted a core
        (0.5, 0.0, 0.5, False),  # somebody kept the interpreter
        (0.1, 0.05, 0.06, False),
        (0.1, 0.06, 0.05, True),
    ],
)
def test_who_gets_no_time_is_told_from_who_takes_it(seconds, waited, ran, starved):
    now, count = [10.0], [(0, {"1": 0})]
    starving = Starving(lambda: now[0], lambda: count[0])
    now[0] += 0.02 + seconds
    count[0] = (round(ran * 1e9), {"1": round(waited * 1e9)})
    starving.look()
    assert starving.told(0.4) is starved
    now[0] += 0.02
    starving.look()
    assert not starving.told(0.4)


def test_a_thread_that_ends_takes_nothing_back():
    assert between((5, {"1": 10, "2": 90}), (8, {"1": 12, "3": 4})) == (3, 6)


def test_the_kernel_counts_what_this_process_does():
    before = counted()
    sum(range(2_000_000))
    ran, waited = between(before, counted())
    assert ran > 0
    assert waited >= 0
    assert before[1]


async def test_what_is_raised_over_there_is_a_failure_or_a_defect():
    with Actor() as actor:
        with pytest.raises(DefectError, match="KeyError"):
            await actor.fill_arena("nobody")
        await actor.open("prefill", seed=1, layout="NHD")
        with pytest.raises(ActorFailedError, match="AssertionError"):
            await actor.arena_intact("prefill")  # of which nothing was taken
        assert actor.answers
        actor.stop()
        assert not actor.answers
        actor.thaw()
        actor.kill()
        assert not actor.answers
