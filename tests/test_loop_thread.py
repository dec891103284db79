"""A loop in a thread: what is handed in runs in order, and nobody waits forever for a loop that has ended."""

import asyncio
import threading
from contextvars import ContextVar, copy_context

import pytest

from kvxfer.blocking import LoopThread
from kvxfer.errors import ClosedError, KvxferError, MemoryInDoubtError, RequestError

PATIENCE = 20.0


@pytest.fixture
def thread():
    thread = LoopThread()
    yield thread
    assert thread.close(PATIENCE)


async def forever():
    await asyncio.get_running_loop().create_future()


async def answer():
    return threading.current_thread().name


def test_what_is_handed_in_runs_in_order(thread):
    seen = []

    async def note(number):
        seen.append(number)

    go = threading.Event()
    thread.post(go.wait)
    futures = []
    for number in range(0, 20, 2):
        assert thread.post(lambda number=number: seen.append(number))
        futures.append(thread.submit(note(number + 1)))
    go.set()
    for future in futures:
        future.result(PATIENCE)
    assert [n for n in seen if n % 2 == 0] == list(range(0, 20, 2))
    assert [n for n in seen if n % 2] == list(range(1, 20, 2))
    for number in range(0, 20, 2):
        assert seen.index(number) < seen.index(number + 1)


def test_what_is_handed_in_runs_in_the_context_of_whoever_hands_it_in(thread):
    told = ContextVar("told", default="nothing")
    go, seen, ended = threading.Event(), [], threading.Event()
    thread.post(go.wait)  # so that all of it runs in one turn of the loop
    for name in ("one", "other"):
        context = copy_context()
        context.run(told.set, name)
        context.run(thread.post, lambda: seen.append(told.get()))
    thread.post(lambda: seen.append(told.get()))
    thread.post(ended.set)
    go.set()
    assert ended.wait(PATIENCE)
    assert seen == ["one", "other", "nothing"]


async def raising():
    raise RequestError("no")


def test_errors_come_back(thread):
    with pytest.raises(RequestError):
        thread.wait(raising())
    with pytest.raises(RequestError):
        asyncio.run(thread.awaits(raising()))
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 / 0)


def test_a_closed_loop_takes_nothing_in(thread):
    assert thread.close(PATIENCE)
    assert thread.close(PATIENCE)
    assert not thread.post(lambda: None)
    for way in (thread.submit, thread.wait, lambda work: asyncio.run(thread.awaits(work))):
        with pytest.raises(ClosedError):
            way(answer())
    with pytest.raises(ClosedError):
        thread.call(lambda: None)


def test_what_was_handed_in_before_it_closes_still_runs(thread):
    seen, go = [], threading.Event()
    thread.post(go.wait)
    thread.post(lambda: seen.append(1))
    closer = threading.Thread(target=thread.close, args=(PATIENCE,))
    closer.start()
    go.set()
    closer.join(PATIENCE)
    assert seen == [1]


@pytest.mark.parametrize("wait", [LoopThread.wait, lambda thread, work: asyncio.run(thread.awaits(work))])
def test_closing_ends_every_wait(thread, wait):
    errors, began = [], threading.Event()

    async def work():
        began.set()
        await forever()

    def look_on():
        try:
            wait(thread, work())
        except ClosedError as error:
            errors.append(error)

    waiter = threading.Thread(target=look_on)
    waiter.start()
    assert began.wait(PATIENCE)
    assert thread.close(PATIENCE)
    waiter.join(PATIENCE)
    assert len(errors) == 1


async def test_a_wait_that_is_cancelled_cancels_the_work(thread):
    began, ended = threading.Event(), threading.Event()

    async def work():
        began.set()
        try:
            await forever()
        finally:
            ended.set()

    task = asyncio.create_task(thread.awaits(work()))
    await asyncio.to_thread(began.wait, PATIENCE)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(ended.wait, PATIENCE)


def test_a_loop_that_stands_still_is_not_waited_for():
    thread, go = LoopThread(), threading.Event()

    def stand_still():
        go.wait(PATIENCE)

    thread.post(stand_still)
    assert not thread.close(0.01)
    assert not asyncio.run(thread.aclose(0.01))
    go.set()
    assert asyncio.run(thread.aclose(PATIENCE))
    assert thread.close(PATIENCE)


def test_an_error_in_a_callback_stops_nothing(thread, caplog):
    thread.post(lambda: 1 / 0)
    assert thread.call(lambda: 5) == 5
    assert "ZeroDivisionError" in caplog.text


def test_a_doubt_is_settled_from_any_loop(thread):
    settled = thread.call(lambda: asyncio.get_running_loop().create_future())
    cause = KvxferError("why")
    error = MemoryInDoubtError("m", settled=lambda: asyncio.shield(settled), peer="p", transfer="t", blocks={"g": [1]})
    error.__cause__ = cause
    moved = thread.moved(error)
    assert (str(moved), moved.peer, moved.transfer, moved.blocks) == ("m", "p", "t", {"g": (1,)})
    assert moved.__cause__ is cause
    assert thread.moved(cause) is cause
    thread.post(lambda: settled.set_result(None))
    asyncio.run(moved.settled())
