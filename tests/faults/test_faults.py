"""A process is killed, frozen or cut off at each step of a transfer, on each route, over NIXL; see `faults.Scene`."""

import os
from functools import partial

import pytest
from faults import every_case, scene, spread

pytestmark = pytest.mark.timeout(240)

FEW = 24
CASES = every_case()
ASKED = os.environ.get("FAULTS", str(FEW))
CHOSEN = CASES if ASKED == "all" else spread(CASES, int(ASKED))


@pytest.mark.parametrize("case", CHOSEN, ids=str)
async def test_a_fault(company, case):
    await company.play(case.lane, partial(scene, case))


def test_the_few_are_well_spread():
    assert len(CASES) >= 300
    few = spread(CASES, FEW)
    assert {case.route for case in few} == {case.route for case in CASES}
    assert {(case.side, case.fault) for case in few} == {(case.side, case.fault) for case in CASES}
    assert {(case.lane, case.fault) for case in few} == {(case.lane, case.fault) for case in CASES}
    assert len({(case.side, case.step) for case in few}) == FEW, "no step twice before each has had its turn"
