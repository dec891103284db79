"""A stall of either process fails nothing by default settings; see `stall.play`."""

import pytest
import stall

pytestmark = pytest.mark.timeout(90)

SHORT_SECONDS = 0.5


@pytest.mark.parametrize("kind", ["held", "stopped"])
@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_a_stall(side, kind, everything):
    await stall.play(side, kind, seconds=stall.SECONDS if everything else SHORT_SECONDS)
