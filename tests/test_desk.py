"""Waiting for memory: who is told, when, and what happens when those who are told give something back at once."""
# a clock that the tests set
# pyright: reportAttributeAccessIssue=false

import asyncio

import pytest

from kvxfer import ArenaError
from kvxfer.memory import Share
from kvxfer.site import Desk
from kvxfer.telemetry import Metrics

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


async def test_who_waits_is_told_once_and_in_turn(desk):
    told = []
    desk.ask("a", 4 * PAGE, 1.0, told.append)
    waiting = [desk.ask(peer, 2 * PAGE, 9.0, told.append) for peer in "abc"]
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
    desk.ask("a", 4 * PAGE, 1.0, told.append)
    for _ in range(3000):
        desk.ask("a", 4 * PAGE, 1e9, give_back)
    desk.release(told[0])
    assert len(served) == 3000
    assert desk.share.snapshot().free_bytes == 4 * PAGE


async def test_who_is_withdrawn_by_one_that_was_told_before_is_not_told(desk):
    told = []
    desk.ask("a", 4 * PAGE, 1.0, told.append)

    def first(answer):
        told.append(answer)
        desk.withdraw(second)

    desk.ask("a", PAGE, 9.0, first)
    second = desk.ask("a", PAGE, 9.0, lambda _: told.append("never"))
    desk.release(told[0])
    assert "never" not in told
    desk.release(told[1])
    assert desk.share.snapshot().free_bytes == 4 * PAGE


async def test_what_can_never_fit_is_refused_at_once(desk):
    with pytest.raises(ArenaError):
        desk.ask("a", 5 * PAGE, 1.0, lambda _: pytest.fail("told"))


async def test_it_is_contended_while_somebody_waits_or_nothing_is_granted(desk):
    """And not by whoever has all of it, as long as nobody else wants any."""
    told = []
    assert not desk.contended
    desk.ask("a", 4 * PAGE, 1.0, told.append)
    assert not desk.contended
    waiting = desk.ask("b", PAGE, 9.0, told.append)
    assert desk.contended
    desk.release(told[0])
    assert not desk.contended, "it was served"
    more = desk.ask("a", 4 * PAGE, 9.0, told.append)
    assert desk.contended
    desk.withdraw(more)
    assert not desk.contended
    desk.ask("a", 4 * PAGE, 0.5, told.append)
    desk.clock.time = 1.0
    desk.advance()
    assert isinstance(told.pop(), ArenaError)
    assert not desk.contended, "it waits no longer"
    desk.pause()
    assert desk.contended
    desk.resume()
    assert not desk.contended
    assert waiting is not None
    desk.release(told[1])
