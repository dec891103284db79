"""A loop in a thread: work runs in the context of whoever hands it in, ends with its wait, and holds up nobody."""

import asyncio
import threading
from contextvars import ContextVar, copy_context

import pytest

from kvxfer.blocking import LoopThread

PATIENCE = 20.0


@pytest.fixture
def thread():
    thread = LoopThread()
    yield thread
    assert thread.close(PATIENCE)


async def forever():
    await asyncio.get_running_loop().create_future()


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


@pytest.mark.timeout(10)
def test_what_comes_while_its_thread_hands_something_in_may_do_so_too(thread, monkeypatch):
    """A signal, or a finaliser that the collection of garbage calls: it would wait for itself."""
    hand_in, seen, ended = thread._loop.call_soon_threadsafe, [], threading.Event()

    def interrupted(callback):
        monkeypatch.undo()
        thread.post(lambda: seen.append("signal"))
        hand_in(callback)

    monkeypatch.setattr(thread._loop, "call_soon_threadsafe", interrupted)
    thread.post(lambda: seen.append("call"))
    thread.post(ended.set)
    assert ended.wait(PATIENCE)
    assert seen == ["signal", "call"]


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
