"""Waiting that a cancellation cannot turn into harm."""

import asyncio
import threading
from typing import Any

import pytest

from kvxfer.errors import ClosedError
from kvxfer.transfers import follow, see_through, soon


async def turns(count=5):
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("error", [None, KeyError("x")], ids=["succeeds", "fails"])
async def test_the_wait_goes_on_however_often_it_is_cancelled_and_an_error_of_the_task_is_then_the_cause(error):
    go, hurried = asyncio.Event(), []

    async def ends():
        await go.wait()
        if error is not None:
            raise error

    work = asyncio.create_task(ends())
    waiting = asyncio.create_task(see_through(work, lambda: hurried.append(1)))
    await turns()
    for _ in range(3):
        waiting.cancel()
        await turns()
        assert not waiting.done()
        assert not work.done()
    go.set()
    with pytest.raises(asyncio.CancelledError) as caught:
        await waiting
    assert caught.value.__cause__ is error
    assert work.exception() is error
    assert hurried == [1]


async def test_without_a_cancellation_it_is_the_task_s_result_or_error():
    async def fail():
        raise KeyError("x")

    assert await see_through(asyncio.create_task(asyncio.sleep(0, "done"))) == "done"
    with pytest.raises(KeyError):
        await see_through(asyncio.create_task(fail()))


@pytest.mark.parametrize("early", [True, False])
async def test_a_follower_ends_as_what_it_follows(early):
    loop = asyncio.get_running_loop()
    for value, error in ((7, None), (None, KeyError("x"))):
        followed = loop.create_future()
        follower = None if early else follow(followed)
        followed.set_result(value) if error is None else followed.set_exception(error)
        follower = follow(followed) if follower is None else follower
        await turns()
        assert (follower.exception(), None if error else follower.result()) == (error, value)


async def test_cancelling_a_follower_leaves_the_rest_alone():
    followed = asyncio.get_running_loop().create_future()
    first, second = follow(followed), follow(followed)
    first.cancel()
    followed.set_result(7)
    assert await second == 7
    assert followed.result() == 7


async def test_soon_brings_the_error_and_heeds_a_cancellation():
    loop, ran = asyncio.get_running_loop(), []

    def fail():
        raise ClosedError("x")

    asked: list[Any] = []

    def ask():
        asked.extend((soon(loop, fail), soon(loop, lambda: ran.append(1))))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()  # so that the loop stands still meanwhile
    failed, cancelled = asked
    assert not failed.done()
    assert cancelled.cancel()
    await turns()
    assert isinstance(failed.exception(timeout=0), ClosedError)
    assert ran == []


async def test_soon_hides_no_defect():
    loop, seen = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: seen.append(context["exception"]))

    def fail():
        raise KeyError("x")

    failed = await asyncio.to_thread(soon, loop, fail)
    assert isinstance(await asyncio.to_thread(failed.exception), KeyError)
    assert seen == [failed.exception()]
