"""Who waits for a transfer, and what it hears; and waiting that a cancellation cannot turn into harm."""

import asyncio
import gc
import threading
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import ClosedError, MemoryInDoubtError, PeerLostError
from kvxfer.runtime import Home
from kvxfer.site import Tally
from kvxfer.transfers import FetchResult, Progress, Transfer, follow, see_through, soon

STATS = Tally().stats(route="staged", why="", peers=(), started=0.0, finished=1.0)
RESULT = FetchResult("r", b"", STATS)


async def turns(count=5):
    for _ in range(count):
        await asyncio.sleep(0)


def begun():
    """A transfer as its caller has it, and as the worker has it."""
    loop = asyncio.get_running_loop()
    progress = Progress("0-1", "r", loop, {"default": np.array([3, 4])})
    return Transfer(progress, Home(loop)), progress


async def waited(transfer, name, heard, layers=None):
    try:
        await (transfer if layers is None else transfer.layers(*layers))
    except (PeerLostError, MemoryInDoubtError, asyncio.CancelledError) as error:
        heard.append((name, type(error)))
        raise
    heard.append((name, None))


@pytest.mark.parametrize("error", [None, PeerLostError("gone")], ids=["succeeds", "fails"])
async def test_they_go_on_in_the_order_in_which_they_came_and_those_of_layers_first(error):
    (transfer, progress), heard = begun(), []
    waiting = [asyncio.create_task(waited(transfer, name, heard)) for name in range(12)]
    waiting += [asyncio.create_task(waited(transfer, "layer", heard, (0, 1)))]
    await turns()
    if error is None:
        progress.succeed(RESULT)
    else:
        progress.fail(error)
    await asyncio.gather(*waiting, return_exceptions=True)
    kind = None if error is None else PeerLostError
    assert heard == [("layer", kind), *((name, kind) for name in range(12))]
    await asyncio.gather(waited(transfer, "late", heard), return_exceptions=True)
    assert heard[-1] == ("late", kind)


async def leaves(transfer, body, heard):
    try:
        async with transfer:
            await body()
    except BaseException as error:
        heard.append(error)
        raise
    heard.append(None)


async def fails():
    raise LookupError("the caller's own")


async def test_a_cancellation_while_its_block_is_left_by_an_error_is_not_lost():
    (transfer, progress), heard = begun(), []
    waiting = asyncio.create_task(leaves(transfer, fails, heard))
    await turns()
    for _ in range(3):
        waiting.cancel()
        await turns()
    assert not heard
    progress.fail(asyncio.CancelledError())
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert waiting.cancelled()
    assert isinstance(heard[0].__context__, LookupError)


@pytest.mark.parametrize("body", [fails, lambda: asyncio.Event().wait()], ids=["an error", "a cancellation"])
async def test_memory_in_doubt_takes_the_place_of_what_leaves_its_block(body):
    (transfer, progress), heard = begun(), []
    waiting = asyncio.create_task(leaves(transfer, body, heard))
    await turns()
    waiting.cancel()
    await turns()
    doubt = MemoryInDoubtError("may be written", settled=turns)
    progress.fail(doubt)
    with pytest.raises(MemoryInDoubtError) as caught:
        await waiting
    assert caught.value is doubt
    assert isinstance(doubt.__cause__, LookupError if body is fails else asyncio.CancelledError)


async def test_a_doubt_that_has_settled_is_not_raised_again():
    transfer, progress = begun()
    doubt = MemoryInDoubtError("may be written", settled=turns)
    progress.fail(doubt)

    async def settles():
        with pytest.raises(MemoryInDoubtError):
            await transfer
        progress.memory_safe = True
        await fails()

    with pytest.raises(LookupError):
        await leaves(transfer, settles, [])


@pytest.mark.filterwarnings("error::ResourceWarning")
async def test_a_cancellation_is_one_also_where_warnings_are_errors():
    transfer, progress = begun()
    waiting = asyncio.create_task(transfer.layers(0, 1))
    await turns()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    progress.succeed(RESULT)
    await transfer


async def test_one_that_somebody_waits_for_is_not_warned_of():
    heard = []
    transfer, progress = begun()
    waiting, layers = asyncio.create_task(waited(transfer, "it", heard)), asyncio.create_task(transfer.layers(0, 1))
    await turns()
    layers.cancel()
    await asyncio.wait([layers])
    looked_at, its = begun()
    outcome = looked_at.outcome
    del looked_at
    gc.collect()
    its.succeed(RESULT)
    progress.succeed(RESULT)
    await asyncio.gather(waiting, outcome)


async def test_nobody_is_waited_for_any_more_who_has_gone():
    (transfer, progress), heard = begun(), []
    waiting = asyncio.create_task(waited(transfer, "it", heard))
    for _ in range(20):
        await turns(2)
        waiting.cancel()
    assert len(progress.waiters) == 1
    closed = transfer.__await__()
    next(closed)
    closed.close()
    assert len(progress.waiters) == 1
    progress.fail(asyncio.CancelledError())
    await asyncio.wait([waiting])
    assert progress.waiters == {}


def test_a_result_is_plain_data_for_whoever_keeps_it():
    assert asdict(RESULT) == {"request": "r", "payload": b"", "stats": asdict(STATS)}


# --- what waiting is made of


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
