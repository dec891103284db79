"""What of a ring is given back, and when: never what the peer may still write."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.copy.mover import _LATE_NS
from kvxfer.decode.receiver import Grants, _Said
from kvxfer.memory import ExtentState, Share
from kvxfer.protocol.transfer import REPEAT_S
from kvxfer.site import Desk
from kvxfer.telemetry import Metrics

PAGE = 4096


@pytest.fixture
async def grants():
    share = Share("receive", base=PAGE, capacity=12 * PAGE)
    desk = Desk(share, lambda: 0.0, asyncio.get_running_loop(), Metrics())
    site: Any = SimpleNamespace(receive_desk=desk, written=Counter(), lease_ms=lambda held: 1000)
    peer: Any = SimpleNamespace(account="peer", name="peer", identity=SimpleNamespace(incarnation=b"peer"))
    yield Grants(site, peer)
    desk.close()


def hold(grants, places, chunk=0):
    extent = grants.desk.take("peer", PAGE)
    assert extent is not None
    return [place.address for place in grants.hold(extent, places, chunk)]


def held(grants, state):
    return sorted(extent.address for extent in grants.desk.share.extents() if extent.state is state)


async def test_chunks_take_turns(grants):
    first = hold(grants, 3, 5)
    assert len(set(first)) == 3
    assert [place.address for place in grants.places(range(5, 12))] == [*first, *first, first[0]]


async def test_no_more_places_than_one_peer_may_hold(grants):
    assert len(hold(grants, 100)) == 9


@pytest.mark.parametrize("granted", range(1, 13))
@pytest.mark.parametrize("places", range(1, 5))
async def test_what_a_lost_peer_may_write_is_kept_however_often_it_is_met_and_lost_again(grants, places, granted):
    """It may say of one chunk after the other that it has arrived, and be lost after each."""
    ring = hold(grants, places)
    for arrived in range(max(0, granted - places), granted):
        grants.settle(range(arrived, granted), lost=True)
        kept = sorted(ring[chunk % places] for chunk in range(arrived, granted))
        assert held(grants, ExtentState.QUARANTINED) == kept
        assert grants.desk.share.snapshot().free_bytes == (12 - len(kept)) * PAGE
    grants.settle(range(granted, granted), lost=False)
    assert not grants
    assert grants.desk.share.snapshot().free_bytes == 12 * PAGE


def test_a_ring_is_granted_far_ahead_only_while_its_turns_are_quick():
    """Others who wait for memory wait for all that is granted."""
    said, now = _Said(), 5.0
    said.restart(10, now)
    assert said.turns == 2
    said.note(13, now + 0.01, 4)  # not a whole turn yet
    assert said.turns == 2
    said.note(14, now + 1 / 64, 4)
    assert said.turns == 4  # of 16 ms, in 50
    said.note(18, now + 9 / 64, 4)
    assert said.turns == 1
    said.note(26, now + 10 / 64, 4)
    assert said.turns == 7  # of 8 ms
    said.note(30, now + 10 / 64, 4)
    assert said.turns == 50
    said.restart(30, now + 1)
    assert said.turns == 2
    assert _LATE_NS == REPEAT_S * 1e9 / 2, "a loop hears of turns before it is to repeat them"
