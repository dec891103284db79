"""Waiting for what somebody else carries to its end: a cancellation ends the waiting at most, never the work.

`asyncio.shield` alone is not enough for either: it lets the first cancellation through at once, though memory may still
be in use, and the future that it guards is open to whoever holds it.
"""

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from kvxfer.errors import KvxferError, RequestError

__all__ = ["follow", "given_seconds", "see_through", "soon"]

_T = TypeVar("_T")


async def see_through(task: "asyncio.Task[_T]", hurry: Callable[[], object] = lambda: None) -> _T:
    """Wait until a task has ended, however often the waiting is cancelled; then let the cancellation through.

    Args:
        task: What must end; it has a bound of its own.
        hurry: Called once the waiting was cancelled, so that the task takes the shortest way to its end.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            if cancelled is None:
                cancelled = error
                hurry()
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    return task.result()


def follow(future: "asyncio.Future[_T]") -> "asyncio.Future[_T]":
    """A future that ends as another one does. Cancelling it leaves that one alone."""
    follower: asyncio.Future[_T] = future.get_loop().create_future()

    def tell(ended: "asyncio.Future[_T]") -> None:
        error = ended.exception()
        if follower.done():
            return
        if error is None:
            follower.set_result(ended.result())
        else:
            follower.set_exception(error)
            follower.exception()  # whoever waits sees it; if nobody does, that is no defect

    if future.done():
        tell(future)
    else:
        future.add_done_callback(tell)
    return follower


def given_seconds(seconds: Any, default: _T) -> float | _T:
    """How long a caller wants to wait at most; the default if he says None.

    Raises:
        RequestError: If it is no number, or no finite one.
    """
    if seconds is None:
        return default
    try:
        if math.isfinite(seconds):
            return float(seconds)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # the middle two of tensors that are not one number
        pass
    raise RequestError(f"timeout must be a number of seconds, or None, not {seconds!r}")


def soon(loop: asyncio.AbstractEventLoop, work: Callable[[], _T]) -> "Future[_T]":
    """Run a function on a loop, from any thread, without waiting; at once if this is that loop.

    Args:
        loop: Where it runs; nothing does any more once it is closed.
        work: What it returns, or raises, is in the future. It is not run if the future was cancelled before.
    """
    answer: Future[_T] = Future()

    def run() -> None:
        if not answer.set_running_or_notify_cancel():
            return
        try:
            value = work()
        except KvxferError as error:
            answer.set_exception(error)
        except BaseException as error:  # a defect: whoever asked hears of it, and so does the loop
            answer.set_exception(error)
            raise
        else:
            answer.set_result(value)

    try:
        here = asyncio.get_running_loop() is loop
    except RuntimeError:
        here = False
    if here:
        run()
    else:
        with suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(run)
    return answer
