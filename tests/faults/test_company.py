"""Which failures of a scene are played again: those that a lack of time explains, and no other."""

import company
import pytest
from actors import ActorFailedError
from company import Company
from faults import HarmError


@pytest.mark.parametrize(
    ("failure", "starved", "patience"),
    [
        (AssertionError, True, [1.0, 4.0]),
        (TimeoutError, True, [1.0, 4.0]),
        (ActorFailedError, True, [1.0, 4.0]),
        (AssertionError, False, [1.0]),
        (HarmError, True, [1.0]),
        (ValueError, True, [1.0]),
    ],
)
async def test_a_failure_is_played_again_only_if_somebody_had_no_time(monkeypatch, failure, starved, patience):
    played = []

    class Failing:
        def __init__(self, *_, patience):
            played.append(patience)

        def runs(self):
            return []

        async def play(self):
            raise failure("it went wrong")

    async def told(*_):
        return starved

    monkeypatch.setattr(company, "starved", told)
    three = Company()
    try:
        with pytest.raises(failure, match="it went wrong"):
            await three.play("cma", Failing)
    finally:
        three.end()
    assert played == patience
