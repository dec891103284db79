"""How many turns of a ring are granted ahead: as many as are taken in a short while."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.copy.mover import _LATE_NS
from kvxfer.decode.receiver import Grants
from kvxfer.memory.books import Share
from kvxfer.plans.routes import Estimates, profile_of
from kvxfer.protocol.transfer import REPEAT_S
from kvxfer.site import Desk
from kvxfer.telemetry import Metrics

PAGE = 4096


@pytest.fixture
async def site():
    desk = Desk(Share("receive", base=PAGE, capacity=12 * PAGE), lambda: 0.0, asyncio.get_running_loop(), Metrics())
    site = SimpleNamespace(receive_desk=desk, written_in_place=Counter(), lease_ms=lambda held: 1000)
    site.plans = SimpleNamespace(knows=lambda peer: True)
    site.estimates, site.mover = Estimates(profile_of("cpu")), SimpleNamespace(crowded=False)
    yield site
    desk.close()


@pytest.fixture
def grants(site):
    peer: Any = SimpleNamespace(account="peer", name="peer", identity=SimpleNamespace(incarnation=b"peer"))
    return Grants(site, peer)


def begin_ring(grants, places, chunk=0):
    (extent,) = grants.site.receive_desk.take("peer", PAGE)
    grants.begin_ring(extent, places, chunk)


async def test_a_ring_is_granted_far_ahead_only_while_its_turns_are_quick(grants):
    """Others who wait for memory wait for all that is granted."""
    begin_ring(grants, 4, 10)
    grants.begin_turns(10, 5.0)
    for copied, later, turns in [
        (13, 0.01, 2),  # not a whole turn yet, and nothing known of the peer
        (14, 1 / 64, 4),  # of 16 ms, in 50
        (18, 9 / 64, 2),
        (26, 10 / 64, 7),  # of 8 ms
        (30, 10 / 64, 7),  # in no time, by this clock
        (34, 10 / 64 + 1e-4, 50),
    ]:
        grants.measure_turns(copied, 5.0 + later, PAGE)
        assert grants.turns() == turns
    assert _LATE_NS == REPEAT_S * 1e9 / 2, "a loop hears of turns before it is to repeat them"


async def test_how_far_ahead_is_kept_for_the_next_ring_of_a_peer_that_is_here(grants, site):
    begin_ring(grants, 4)
    grants.begin_turns(0, 5.0)
    grants.measure_turns(4, 5.0 + 1 / 64, PAGE // 2)  # chunks are smaller than their places
    assert grants.turns() == 2
    grants.release()
    begin_ring(grants, 1)  # a quarter as long
    assert grants.turns() == 7
    site.mover.crowded = True
    assert grants.turns() == 2
    site.plans.knows = lambda peer: False
    site.estimates.forget(b"peer")
    grants.measure_turns(9, 6.0, PAGE)
    assert not site.estimates.paces
