"""Owners of copies take turns, by bytes."""

import asyncio
from collections import Counter

import pytest
from driver import Driver, StubGpu
from hypothesis import given, settings
from hypothesis import strategies as st
from stepped import World

from kvxfer.copy import records


async def test_who_waited_for_an_event_has_gained_nothing_by_it():
    driver = Driver()
    world, fired = World(StubGpu(driver)), driver.event()
    for number in range(20):
        world.submit(("late", number), owner="late", nbytes=100, after=fired)
    await world.settle()
    for number in range(20):
        world.submit(number, owner=number, nbytes=100)
        await world.settle()
        while number not in world.order:
            world.step()
            driver.go()
    driver.fire(fired)
    for _ in range(2):  # launched, and ended
        world.step()
        driver.go()
    world.submit("small", owner="small", nbytes=1)
    await world.settle()
    while len(world.order) < 41:
        world.step()
        driver.go()
    assert "small" in world.order[20:24], world.order[20:]
    await world.close()


async def test_who_comes_back_has_gained_nothing_by_being_away(world):
    for number in range(6):
        world.submit(("steady", number), owner="steady", nbytes=100)
    for number in range(6):  # comes with one at a time, as soon as the last one is gone
        world.submit(("again", number), owner="again", nbytes=100)
        for _ in range(2):
            world.step()
    await world.run(12)
    found = [name for name, _ in world.order]
    assert Counter(found) == {"steady": 6, "again": 6}
    assert not {found[n] for n in range(10) if found[n] == found[n + 1] == found[n + 2]}


async def play(jobs):
    """All wait from the start: then two owners that still wait never differ by more than their largest ones."""
    world = World()
    for number, (owner, nbytes) in enumerate(jobs):
        world.submit((owner, number), owner=owner, nbytes=nbytes)
    await world.run(len(jobs))
    await world.close()
    largest = max(nbytes for _, nbytes in jobs)
    left, got = Counter(owner for owner, _ in jobs), Counter()
    order = {owner: [number for number, (one, _) in enumerate(jobs) if one == owner] for owner in left}
    for owner, number in world.order:
        assert number == order[owner].pop(0), "those of one owner keep their order"
        got[owner] += jobs[number][1]
        left[owner] -= 1
        waiting = [name for name in left if left[name]]
        assert all(abs(got[a] - got[b]) <= 2 * largest for a in waiting for b in waiting)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 1000)), min_size=1, max_size=60))
def test_no_owner_is_ahead_of_another_by_more_than_one_copy_of_each(jobs):
    asyncio.run(play(jobs))


@pytest.mark.parametrize("waiting", [4, 64])
async def test_owners_who_come_ever_anew_do_not_keep_an_old_one_waiting(world, waiting):
    """However many of its copies wait: half of what is copied is its due, so one of 1,000 bytes every 20 of 100."""
    for number in range(waiting):
        world.submit(("old", number), owner="old", nbytes=1000)
    for number in range(40):
        world.submit(number, owner=number, nbytes=100)
        world.step()
    served = sum(isinstance(name, tuple) for name in world.order[:40])
    await world.run(40 + waiting)
    assert served >= 2


async def test_owners_of_long_ago_are_forgotten(world):
    for number in range(3000):
        world.submit(number, owner=number, nbytes=8)
        world.step()
    assert len(world.mover._owners) <= records.MOST_OWNERS
    assert world.machine.state[records.TURN] >= 8
