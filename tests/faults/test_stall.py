"""A stall of either process fails nothing by default settings; see `stall.play`."""

import pytest
import stall
from faults import EVERYTHING

pytestmark = pytest.mark.timeout(90)

SHORT_SECONDS = 0.5


CASES = [("sender", "held"), ("receiver", "stopped"), ("sender", "stopped"), ("receiver", "held")]


@pytest.mark.parametrize(("side", "kind"), CASES if EVERYTHING else CASES[:2])
async def test_a_stall(side, kind, everything):
    await stall.play(side, kind, seconds=stall.SECONDS if everything else SHORT_SECONDS)


async def test_both_stand_still_for_longer_than_either_would_be_waited_for():
    """As on a machine that is paused: neither takes that for silence of the other."""
    await stall.play("both", "stopped", seconds=2.0, peer_timeout=1.0)
