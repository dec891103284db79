"""Every await of the public API, found by looking at it, and every way in which such an await is cancelled."""

import asyncio
import inspect
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import anyio

import kvxfer
from kvxfer import blocking

__all__ = ["WAYS", "Outcome", "every_await", "interrupt", "once"]

_PROTOCOL = {"__await__", "__aenter__", "__aexit__", "__aiter__", "__anext__"}
_AWAITABLE = ("Future", "Task", "Awaitable", "Coroutine", "AsyncIterator", "AsyncGenerator", "AsyncContextManager")


def public_classes() -> Iterator[type]:
    """Classes that users hold: exported ones, and what methods of these return for workers with a loop of their own."""
    for module in (kvxfer, blocking):
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isclass(found):
                yield found


def _returned(member: Any) -> str:
    """What a method or a property says that it returns."""
    function = member.fget if isinstance(member, property) else member
    return str(getattr(function, "__annotations__", {}).get("return", ""))


def is_awaited(name: str, member: Any) -> bool:
    """Whether a member is awaited, iterated or entered by `async`, or returns what is."""
    if name in _PROTOCOL:
        return True
    if name.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
        return False
    if inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member):
        return True
    returned = _returned(member)
    if returned.startswith("Future["):  # of concurrent.futures: threads wait for it, and nobody awaits it
        return False
    return any(word in returned for word in _AWAITABLE)


def every_await() -> set[tuple[str, str]]:
    """Class and member of everything public that is awaited."""
    return {
        (cls.__name__, name)
        for cls in public_classes()
        for name, member in inspect.getmembers_static(cls)
        if is_awaited(name, member)
    } | {("", name) for name in kvxfer.__all__ if inspect.iscoroutinefunction(getattr(kvxfer, name))}


@dataclass(frozen=True)
class Outcome:
    """How a call ended that was to be cancelled."""

    late: bool  # the cancellation came too late: the call had ended
    error: BaseException | None  # what it raised, as whoever cancelled it sees it: `None` if it returned
    turns: int = 0  # iterations of the loop before it was cancelled or had ended, where they were counted


Call = Callable[[], Awaitable[Any]]


async def _turns(count: int, until: Callable[[], bool] = lambda: False) -> int:
    """Let the loop run so many iterations, or until something holds; how many it were."""
    for number in range(count):
        if until():
            return number
        await asyncio.sleep(0)
    return count


async def _run(call: Call) -> Any:
    return await call()


async def _end(task: "asyncio.Task[Any]") -> BaseException | None:
    await asyncio.wait({task})
    return asyncio.CancelledError() if task.cancelled() else task.exception()


async def _cancelled(call: Call, turn: int, again: int) -> Outcome:
    """Cancel a task, and `again` in each of so many iterations."""
    task = asyncio.create_task(_run(call))
    turns = await _turns(turn, task.done)
    late = task.done()
    task.cancel()
    for _ in range(again):
        await _turns(1)
        task.cancel()
    return Outcome(late, await _end(task), turns)


async def once(call: Call, turn: int, seconds: float) -> Outcome:
    """`task.cancel()`."""
    return await _cancelled(call, turn, 0)


async def twice(call: Call, turn: int, seconds: float) -> Outcome:
    """`task.cancel()`, and again an iteration later."""
    return await _cancelled(call, turn, 1)


async def in_the_clean_up(call: Call, turn: int, seconds: float) -> Outcome:
    """`task.cancel()`, and again in each of many iterations."""
    return await _cancelled(call, turn, 100)


async def _limited(work: Awaitable[Any]) -> Outcome:
    """What stands under a limit in time: it is late if the limit was not reached."""
    task = asyncio.ensure_future(work)
    error = await _end(task)
    return Outcome(error is None, error)


async def wait_for(call: Call, turn: int, seconds: float) -> Outcome:
    """`asyncio.wait_for`."""
    return await _limited(asyncio.wait_for(_run(call), turn * seconds))


async def timeout(call: Call, turn: int, seconds: float) -> Outcome:
    """`asyncio.timeout`."""

    async def limited() -> None:
        async with asyncio.timeout(turn * seconds):
            await call()

    return await _limited(limited())


async def fail_after(call: Call, turn: int, seconds: float) -> Outcome:
    """`anyio.fail_after`."""

    async def limited() -> None:
        with anyio.fail_after(turn * seconds):
            await call()

    return await _limited(limited())


class SiblingError(Exception):
    """Why a group of tasks ends."""


async def sibling(call: Call, turn: int, seconds: float) -> Outcome:
    """Another task of an `asyncio.TaskGroup` fails."""
    ended: list[BaseException | None] = []

    async def watched() -> None:
        try:
            await call()
        except BaseException as error:
            ended.append(error)
            raise
        ended.append(None)

    async def fail() -> None:
        await _turns(turn)
        raise SiblingError

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watched())
            tasks.create_task(fail())
    except BaseExceptionGroup as errors:
        if errors.subgroup(SiblingError) is None:
            raise
    error = ended[0] if ended else asyncio.CancelledError()  # it had not even begun
    return Outcome(error is None, error)


async def interrupt(call: Call, turn: int, seconds: float) -> Outcome:
    """Ctrl-C while the main task of `asyncio.run` is in the call. For a process of its own: this is a real SIGINT."""

    async def press() -> None:
        await _turns(turn)
        os.kill(os.getpid(), signal.SIGINT)

    pressing = asyncio.create_task(press())
    error: BaseException | None = None
    try:
        await call()
    except (asyncio.CancelledError, Exception) as raised:  # noqa: BLE001 - the scene judges it
        error = raised
    late = error is None
    if late:
        pressing.cancel()
    await asyncio.wait({pressing})
    return Outcome(late, error)


WAYS = [once, twice, in_the_clean_up, wait_for, timeout, fail_after, sibling]
"""Each takes what to call, after how many iterations to cancel it, and the seconds that an iteration takes."""
