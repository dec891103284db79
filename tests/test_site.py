"""What rooms of a worker share: who waits for memory, or for a new agent, places of peers, and counts of transfers."""
# a clock that the tests set
# pyright: reportAttributeAccessIssue=false

import asyncio
import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer import ArenaError
from kvxfer.memory.books import Share
from kvxfer.site import Desk, Quota, Rebuilds, Tally
from kvxfer.telemetry import Metrics

# --- waiting for memory: who is told, when, and what happens when those who are told give something back at once


PAGE = 4096


class Clock:
    def __init__(self):
        self.time = 0.0

    def __call__(self):
        return self.time


@pytest.fixture
async def desk():
    clock = Clock()
    made = Desk(Share("receive", base=PAGE, capacity=4 * PAGE), clock, asyncio.get_running_loop(), Metrics())
    made.clock = clock
    yield made
    made.close()


async def expired(desk, nbytes, timeout):
    """What one is told who waits as long."""
    told = asyncio.get_running_loop().create_future()
    assert desk.request("late", nbytes, timeout, told.set_result) is not None
    return await told


async def test_who_waits_is_told_once_and_in_turn(desk):
    told = []
    desk.request("a", 4 * PAGE, 1.0, told.append)
    waiting = [desk.request(peer, 2 * PAGE, 9.0, told.append) for peer in "abc"]
    assert None not in waiting
    assert len(told) == 1
    desk.clock.time = 0.5
    desk.release(told[0])
    assert len(told) == 3  # the third finds no room
    assert desk._metrics.snapshot()["admission_waits"] == 2
    assert desk._metrics.snapshot()["admission_wait_seconds"] == 1.0
    desk.withdraw(waiting[2])
    desk.withdraw(waiting[2])
    desk.release(told[1])
    desk.release(told[2])
    assert len(told) == 3
    assert desk.share.snapshot().free_bytes == 4 * PAGE


async def test_thousands_who_give_back_at_once_are_served_without_recursion(desk):
    served = []

    def give_back(answer):
        served.append(answer)
        desk.release(answer)

    told = []
    desk.request("a", 4 * PAGE, 1.0, told.append)
    for _ in range(3000):
        desk.request("a", 4 * PAGE, 1e9, give_back)
    desk.release(told[0])
    assert len(served) == 3000
    assert desk.share.snapshot().free_bytes == 4 * PAGE


async def test_who_is_withdrawn_by_one_that_was_told_before_is_not_told(desk):
    told = []
    desk.request("a", 4 * PAGE, 1.0, told.append)

    def first(answer):
        told.append(answer)
        desk.withdraw(second)

    desk.request("a", PAGE, 9.0, first)
    second = desk.request("a", PAGE, 9.0, lambda _: told.append("never"))
    desk.release(told[0])
    assert "never" not in told
    desk.release(told[1])
    assert desk.share.snapshot().free_bytes == 4 * PAGE


async def test_who_has_waited_long_enough_is_told_so_and_leaves_nothing(desk):
    told = []
    desk.request("a", 4 * PAGE, 1.0, told.append)
    desk.request("b", PAGE, math.inf, told.append)
    desk.withdraw(desk.request("b", PAGE, 0.001, lambda _: pytest.fail("told")))
    error = await expired(desk, PAGE, 0.002)
    assert isinstance(error, ArenaError)
    assert "waited 0.000 s" in str(error)
    assert len(told) == 1, "and nobody else"
    desk.release(*told)
    desk.release(told[1])
    assert desk.share.snapshot().free_bytes == 4 * PAGE


async def test_who_waits_behind_one_that_has_waited_long_enough_is_served(desk):
    told = []
    desk.request("a", 2 * PAGE, 1.0, told.append)
    desk.share.max_overtakes = 0
    large = asyncio.get_running_loop().create_future()
    desk.request("b", 3 * PAGE, 0.001, large.set_result)
    desk.request("c", PAGE, math.inf, told.append)
    assert len(told) == 1
    await large
    assert len(told) == 2


async def test_nobody_is_turned_away_while_nothing_is_granted(desk):
    held, told = [], []
    desk.request("a", 4 * PAGE, 1.0, held.append)
    desk.request("b", PAGE, 0.0, told.append)
    withdrawn = desk.request("b", PAGE, 0.0, lambda _: pytest.fail("told"))
    desk.pause()
    await asyncio.sleep(0.001)  # their time is over
    await asyncio.sleep(0.001)
    assert told == []
    desk.withdraw(withdrawn)
    desk.resume()
    assert isinstance(told[0], ArenaError)
    assert not desk.contended


async def test_what_can_never_fit_is_refused_at_once(desk):
    with pytest.raises(ArenaError):
        desk.request("a", 5 * PAGE, 1.0, lambda _: pytest.fail("told"))


async def test_it_is_contended_while_somebody_waits_or_nothing_is_granted(desk):
    """And not by whoever has all of it, as long as nobody else wants any."""
    told = []
    assert not desk.contended
    desk.request("a", 4 * PAGE, 1.0, told.append)
    assert not desk.contended
    waiting = desk.request("b", PAGE, 9.0, told.append)
    assert desk.contended
    desk.release(told[0])
    assert not desk.contended, "it was served"
    more = desk.request("a", 4 * PAGE, 9.0, told.append)
    assert desk.contended
    desk.withdraw(more)
    assert not desk.contended
    assert isinstance(await expired(desk, 4 * PAGE, 0.0), ArenaError)
    assert not desk.contended, "it waits no longer"
    desk.pause()
    assert desk.contended
    desk.resume()
    assert not desk.contended
    assert waiting is not None
    desk.release(told[1])


# --- places that peers share


@given(limit=st.integers(1, 40), steps=st.lists(st.tuples(st.booleans(), st.integers(0, 5))))
def test_it_is_bounded_and_who_has_none_gets_one(limit, steps):
    quota, held = Quota(limit), dict.fromkeys(range(6), 0)
    for take, peer in steps:
        free = limit - sum(held.values())
        if take:
            got = quota.take(peer)
            assert got == (free > 0 and held[peer] < 3 * free)
            held[peer] += got
        elif held[peer]:
            quota.give(peer)
            held[peer] -= 1
        else:
            with pytest.raises(ValueError, match="no place"):
                quota.give(peer)
        assert len(quota) == sum(held.values()) <= limit
        assert quota._held == {peer: places for peer, places in held.items() if places}


# --- the books of a new agent: whom it helps, and what waits for it


@pytest.fixture
async def rebuilds():
    loop = asyncio.get_running_loop()
    return Rebuilds(loop.time, loop)


async def test_what_is_wanted_while_it_is_made_is_not_over_with_it(rebuilds):
    """Its post may have been made by the new one."""
    rebuilds.request(urgent=True)
    rebuilds.begin()
    rebuilds.request(urgent=False)
    rebuilds.end(done=True)
    assert (rebuilds.count, [one.urgent for one in rebuilds.requests]) == (1, [False])
    rebuilds.begin()
    rebuilds.end(done=False)
    assert (rebuilds.count, len(rebuilds.requests)) == (1, 1)
    rebuilds.begin()
    rebuilds.end(done=True)
    assert (rebuilds.count, rebuilds.requests) == (2, {})


@pytest.mark.parametrize("done", [True, False])
async def test_what_waits_while_it_is_made_goes_on_once(rebuilds, done):
    said, coming = [], rebuilds.next
    rebuilds.when_done(partial(said.append, "at once"))
    rebuilds.begin()
    rebuilds.when_done(partial(said.append, "later"))
    assert said == ["at once"]
    rebuilds.end(done=done)
    rebuilds.begin()
    rebuilds.end(done=done)
    assert said == ["at once", "later"]
    assert (coming.done(), rebuilds.next.done()) == (done, False)


# --- counts of one side of a transfer, and their sum over ranks


def test_stages_are_unions_and_ranks_are_summed():
    one, other = Tally(), Tally()
    one.add_stages(("wire", 1.0, 3.0))
    one.add_stages(("wire", 2.0, 4.0))
    one.add_stages(("gathering", 5.0, 4.0))  # the other side's clock, about: an interval that ends too soon is empty
    one.first_byte, other.first_byte = 1.0, 0.25
    one.bytes, one.pieces, one.chunks, one.descriptors = 1, 2, 3, 4
    other.add_stages(("wire", 3.5, 5.0))
    other.add_stages(("scattering", 0.0, 1.0))
    other.bytes, other.pieces, other.chunks, other.descriptors = 10, 20, 30, 40
    whole = Tally()
    whole.merge(one)
    whole.merge(other)
    stats = whole.stats(route="staged", why="told", peers=("a", "b"), started=0.0, finished=6.0)
    assert (stats.bytes, stats.pieces, stats.chunks, stats.descriptors) == (11, 22, 33, 44)
    assert (stats.wire, stats.scattering, stats.gathering, stats.posting, stats.queued) == (4.0, 1.0, 0.0, 0.0, 0.0)
    assert stats.first_byte == 0.25
    assert (stats.route, stats.why, stats.peers, stats.duration) == ("staged", "told", ("a", "b"), 6.0)


def test_a_rank_without_a_byte_does_not_hide_the_first_of_another():
    whole, late = Tally(), Tally(first_byte=7.0)
    for part in (Tally(), late, Tally()):
        whole.merge(part)
    assert whole.first_byte == 7.0
