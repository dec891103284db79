"""Transfers as their caller sees them: `await transfer` looks on while a task of the worker does the work."""

import asyncio
import contextlib
import math
import operator
import threading
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvxfer.errors import ClosedError, FailureReport, KvxferError, MemoryInDoubtError, RequestError
from kvxfer.names import lazy
from kvxfer.runtime import Home, no_op, resolve
from kvxfer.telemetry import TransferStats
from kvxfer.tickets import Ticket

__all__ = [
    "Claim",
    "FetchResult",
    "Progress",
    "Settling",
    "Transfer",
    "TransferState",
    "follow",
    "given_seconds",
    "layer_range",
    "see_through",
    "short",
    "soon",
]

# --- waiting for what somebody else carries to its end
#
# `asyncio.shield` alone is not enough for either: it lets the first cancellation through at once, though memory may
# still be in use, and the future that it guards is open to whoever holds it.

_T = TypeVar("_T")


async def see_through(task: "asyncio.Task[_T]", hurry: Callable[[], object] = lambda: None) -> _T:
    """Wait until a task has ended, however often the waiting is cancelled; then let the cancellation through.

    The task has a bound of its own. `hurry` is called once the waiting was cancelled: it takes the shortest way then.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            if cancelled is None:
                cancelled = error
                hurry()
    try:
        if cancelled is not None:
            raise cancelled from (None if task.cancelled() else task.exception())
        return task.result()
    finally:
        del task, hurry, cancelled  # which have what is raised: that would keep them, and all that waits


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
        follower.add_done_callback(lambda _: future.remove_done_callback(tell))  # who waits many times leaves nothing
    return follower


class Settling:
    """Whether what is in doubt has settled, for any loop of the process. Whoever waits no longer leaves nothing here.

    It may stay so for good, and who polls for it waits many times: a `concurrent.futures.Future` would keep them all.
    """

    def __init__(self) -> None:
        self.done = False
        self._error: KvxferError | None = None
        self._waiters: Final[dict[asyncio.Future[None], None]] = {}
        self._lock: Final = threading.Lock()
        self._home: Final = Home()

    def end(self, error: KvxferError | None = None) -> None:
        """It has, or nobody will ever know whether it has. Once."""
        with self._lock:
            self.done, self._error = True, error
            for waiter in self._waiters:
                with suppress(RuntimeError):  # its loop is closed
                    waiter.get_loop().call_soon_threadsafe(resolve, waiter, None)

    async def wait(self) -> None:
        """Return once it has.

        Raises:
            ForkedError: If this process was forked off the one in which it is known: nobody would tell it.
            KvxferError: If nobody will ever know.
        """
        self._home.read(self)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiters[waiter] = None
            if self.done:
                waiter.set_result(None)
        try:
            await waiter
        finally:
            with self._lock:
                del self._waiters[waiter]
        if self._error is not None:
            raise self._error


def given_seconds(seconds: Any, default: _T) -> float | _T:
    """How long a caller wants to wait at most; the default if he says None.

    Raises:
        RequestError: If it is no number, or no finite one.
    """
    if seconds is None:
        return default
    try:
        if math.isfinite(seconds):
            return min(float(seconds), threading.TIMEOUT_MAX)  # more than that no thread can wait
    except (TypeError, ValueError, RuntimeError, OverflowError):  # the middle two of tensors that are not one number
        pass
    raise RequestError(f"timeout must be a number of seconds, or None, not {seconds!r}")


def soon(loop: asyncio.AbstractEventLoop, work: Callable[[], _T]) -> "Future[_T]":
    """Run a function on a loop, from any thread, without waiting; at once if this is that loop.

    What it returns, or raises, is in the future. It is not run if that was cancelled before, nor if the loop is closed:
    `ClosedError` is in the future then.
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
        return answer
    try:
        loop.call_soon_threadsafe(run)
    except RuntimeError:
        answer.set_exception(ClosedError("its event loop is closed, and the worker with it"))
    return answer


# --- transfers

I64: TypeAlias = NDArray[np.int64]


class TransferState(IntEnum):
    """Where a transfer stands; ordered, so that ranks may all-reduce the minimum."""

    FAILED = 0
    CONNECTING = 1
    WAITING = 2
    MOVING = 3
    DONE = 4

    def __str__(self) -> str:
        return self.name

    def __format__(self, spec: str) -> str:
        return format(self.name, spec)


@dataclass(frozen=True, slots=True)
class FetchResult:
    """Every byte that was asked for has landed and is visible.

    Attributes:
        request: The request's id.
        payload: What the prefill side attached when it finished the offer.
        stats: Bytes, pieces, route and where the time went.
    """

    request: str
    payload: bytes
    stats: TransferStats


class Claim:
    """Keeps a request's lease at the prefill engine while it waits for a place here. Made by `Worker.claim`.

    It ends with a successful fetch, or one that finds the offer over, with `Worker.decline`, or `close`. A request that
    was claimed more than once stays claimed until all of its claims were closed. A fetch that is cancelled or fails
    leaves it open, for a retry.
    """

    def __init__(
        self, ticket: Ticket, close: Callable[[], object], loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.ticket: Final = ticket
        self._close = close
        self._home: Final = Home(loop)

    def close(self) -> None:
        """Stop renewing the lease; the prefill engine frees the blocks when it has run out. Idempotent.

        If the last fetch of the request was cancelled, it frees them at once; if it failed, 2 s after that.

        Raises:
            ForkedError: In a process that was forked off the one that made the claim.
            UsageError: In another thread, unless the worker has a loop of its own.
        """
        self._home.own(self)
        close, self._close = self._close, no_op
        close()


class Progress(Struct, eq=False, dict=True):
    """What becomes of a fetch: noted by the worker, looked at by whoever holds it for its caller (see `Transfer`).

    All of it happens on one loop.
    """

    id: str
    request: str
    loop: asyncio.AbstractEventLoop
    written: Mapping[str, I64] = {}  # blocks that it writes, by group: int64 ids
    state: TransferState = TransferState.CONNECTING
    done: bool = False
    memory_safe: bool = False
    report: FailureReport | None = None
    watched: dict["asyncio.Future[None]", range] = {}  # layers that somebody waits for, by who does
    # what those wait for who wait for its end, in the order in which they came: whoever goes on takes his out
    waiters: dict["asyncio.Future[None]", None] = {}
    _result: FetchResult | None = None

    # --- for whoever looks on

    def cancel(self) -> None:
        """Give up. Idempotent."""

    @lazy
    def listed(self) -> Mapping[str, Sequence[int]]:
        """The blocks that it writes as lists: made for errors only, since there may be many."""
        return {group: ids.tolist() for group, ids in self.written.items()}

    def watch(self) -> None:
        """Somebody waits for layers."""

    def have_landed(self, layers: range) -> bool:
        """Whether every byte of these layers has; of one that nobody sends that is not known before the end."""
        return not layers

    @lazy
    def _outcome(self) -> "asyncio.Future[FetchResult]":
        """How it ended: made for whoever waits for that in a future, and where it failed."""
        outcome: asyncio.Future[FetchResult] = self.loop.create_future()
        if self._result is not None:
            outcome.set_result(self._result)
        return outcome

    @lazy
    def spared(self) -> "asyncio.Future[None]":
        """Resolves when nobody writes the blocks any more, though a peer may owe its last word, and at the end."""
        spared: asyncio.Future[None] = self.loop.create_future()
        if self.done:
            spared.set_result(None)
        return spared

    @property
    def outcome(self) -> "asyncio.Future[FetchResult]":
        """Resolves when it has ended. Cancelling it changes nothing."""
        return follow(self._outcome)

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None if it did not, or not yet."""
        return self._outcome.exception() if self.done else None

    def result(self) -> FetchResult:
        """See `Transfer.result`."""
        return self._outcome.result() if self._result is None else self._result

    async def layers(self, wanted: range) -> None:
        """Return when every byte of these layers has landed. See `Transfer.layers`."""
        if self.done:
            self.result()
            return
        if self.have_landed(wanted):
            return
        waiter: asyncio.Future[None] = self.loop.create_future()
        self.watched[waiter] = wanted
        waiter.add_done_callback(self.watched.pop)  # also when whoever waits is cancelled, however often that is
        self.watch()
        await waiter

    def ended(self) -> "asyncio.Future[None]":
        """One of `waiters`, which resolves as it ends: a turn of the loop earlier than `asyncio.shield` would."""
        waiter: asyncio.Future[None] = self.loop.create_future()
        self.waiters[waiter] = None
        if self.done:
            waiter.set_result(None)
        return waiter

    # --- for the worker

    def landed(self) -> None:
        """More has landed. Harmless if it is over."""
        if not self.done:
            self.state = TransferState.MOVING
            for waiter, wanted in self.watched.items():
                if not waiter.done() and self.have_landed(wanted):
                    waiter.set_result(None)

    def succeed(self, result: FetchResult) -> None:
        """Every byte is there."""
        self.state, self.memory_safe, self._result = TransferState.DONE, True, result
        self._end(None)

    def fail(self, error: KvxferError | asyncio.CancelledError, report: FailureReport | None = None) -> None:
        """It is over without success, and its memory is safe (unless the error says otherwise)."""
        self.state, self.memory_safe = TransferState.FAILED, not isinstance(error, MemoryInDoubtError)
        self.report = report
        self._outcome.set_exception(error)
        self._outcome.exception()  # whoever waits sees it; if nobody does, the log line does
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self.done = True
        if made := vars(self):
            if self._result is not None and "_outcome" in made:
                self._outcome.set_result(self._result)
            if "spared" in made:
                resolve(self.spared, None)
        for waiter in self.watched:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)
                waiter.exception()  # whoever waits sees it; if nobody does any more, that is no defect
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)


class Transfer:
    """One fetch under way. Made by `Worker.start_fetch`, and used as a context manager.

        async with worker.start_fetch(ticket, blocks, tokens=tokens, after=event) as transfer:
            await transfer.layers(0, 8)
            ...

    Leaving the block waits for the transfer's end, and raises its error as awaiting it does. Leaving it by an exception
    or a cancellation cancels the transfer, waits (bounded by `revoke_timeout`, and however often it is cancelled
    meanwhile) until its memory is safe, and then lets the exception through; if memory is not safe by then,
    `MemoryInDoubtError` is raised instead, with the exception as its cause. `await transfer` gives its `FetchResult`,
    and when it is cancelled does the same.

    Whoever uses it without the block must await it before its blocks are used again. One that is dropped before its
    end, and one that nobody awaits as a wait for its layers is cancelled, gives a `ResourceWarning` that names the
    blocks: peers still write them.

    In a process that was forked off this one only its attributes can be read: what waits or cancels raises
    `ForkedError`, and in another thread or on another loop `UsageError`.
    """

    def __init__(self, progress: Progress, home: Home) -> None:
        self._progress: Final = progress
        self._home: Final = home
        self._warned = self._entered = False

    async def __aenter__(self) -> Self:
        self._home.own(self)
        self._entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = False
        if error is None:
            await self
        else:
            await self._give_up(error)

    def __await__(self) -> Generator[Any, None, FetchResult]:
        progress = self._home.own(self._progress)
        waiter = progress.ended()
        try:
            try:
                yield from waiter
            finally:
                del progress.waiters[waiter]
        except asyncio.CancelledError as cancelled:
            yield from self._give_up(cancelled).__await__()
            raise
        return progress.result()

    def __del__(self) -> None:
        if not self._progress.done and self._home.here:
            self._warn("was dropped")

    def __repr__(self) -> str:
        return f"Transfer({self.id}, request={self.request!r}, {self.state.name})"

    @property
    def id(self) -> str:
        """As in the logs of both sides."""
        return self._progress.id

    @property
    def request(self) -> str:
        """The request's id."""
        return self._progress.request

    @property
    def state(self) -> TransferState:
        """See `TransferState`."""
        return self._progress.state

    @property
    def memory_safe(self) -> bool:
        """Whether it has ended and no peer can write the destination blocks any more."""
        return self._progress.memory_safe

    @property
    def failed_blocks(self) -> Mapping[str, Sequence[int]]:
        """Destination blocks that hold no usable data, by group; empty unless the transfer failed."""
        return self._progress.listed if self._progress.state is TransferState.FAILED else {}

    @property
    def report(self) -> FailureReport | None:
        """What is known of its failure, also if it was cancelled; None unless it failed."""
        return self._progress.report

    @property
    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._progress.done

    def cancel(self) -> None:
        """Give up. Returns at once; await the transfer to know that its memory is safe. Idempotent.

        The prefill side frees the request's blocks then, unless it was begun with `keep=True` or a claim is open.
        """
        self._home.own(self)
        self._progress.cancel()

    @property
    def outcome(self) -> "asyncio.Future[FetchResult]":
        """Resolves when it has ended. Cancelling it changes nothing; `cancel` gives up."""
        outcome = self._home.own(self._progress).outcome
        outcome.add_done_callback(self._told)
        return outcome

    async def layers(self, start: int, stop: int) -> None:
        """Wait until every byte of the layers [start, stop) has landed. Cancelling the wait leaves the transfer alone.

        Raises:
            KvxferError: If the transfer fails before; the same error that awaiting it raises.
            RequestError: If a layer is no number.
        """
        self._home.own(self)
        wanted = layer_range(start, stop)
        try:
            await self._landed(wanted)
        except asyncio.CancelledError:
            if not (self._entered or self._progress.waiters):
                with contextlib.suppress(ResourceWarning):  # where warnings are errors it is still a cancellation
                    self._warn("goes on, and whoever waited for its layers was cancelled")
            raise

    def result(self) -> FetchResult:
        """The result of a transfer that is done.

        Raises:
            KvxferError: If it failed.
            asyncio.CancelledError: If it was cancelled.
            asyncio.InvalidStateError: If it is not done.
        """
        return self._progress.result()

    async def _give_up(self, cause: BaseException) -> None:
        """Cancel it, and return when its memory is safe, however often that is cancelled, for the cause to be raised.

        Raises:
            MemoryInDoubtError: If it is not safe.
            asyncio.CancelledError: If whoever waits was cancelled only now.
        """
        self.cancel()
        cancelled: asyncio.CancelledError | None = None
        while not self.done:
            waiter = self._progress.ended()
            try:
                await waiter
            except asyncio.CancelledError as again:  # memory is still not safe
                cancelled = again
            finally:
                del self._progress.waiters[waiter]
        doubt = self._progress.error
        if isinstance(doubt, MemoryInDoubtError) and doubt is not cause and not self.memory_safe:
            raise doubt from cause
        if cancelled is not None and not isinstance(cause, asyncio.CancelledError):
            raise cancelled

    async def _landed(self, wanted: range) -> None:
        await self._progress.layers(wanted)

    def _told(self, outcome: "asyncio.Future[FetchResult]") -> None:
        """Whoever looks at the outcome keeps the transfer, which is not dropped before that is known."""

    def _warn(self, what: str) -> None:
        if not (self.done or self._warned):
            self._warned = True
            warnings.warn(
                f"the fetch of {self.request!r} ({self.id}) {what}: peers may write the blocks "
                f"{short(self._progress.listed)}; use `async with worker.start_fetch(...)`",
                ResourceWarning,
                stacklevel=3,
                source=self,
            )


def short(blocks: Mapping[str, Sequence[int]]) -> str:
    """Block lists as messages show them."""
    parts = [f"{group}: {list(ids[:8])}{'...' if len(ids) > 8 else ''}" for group, ids in blocks.items()]
    return "{" + ", ".join(parts) + "}"


def layer_range(start: Any, stop: Any) -> range:
    """Layers as a caller names them.

    Raises:
        RequestError: If a layer is no whole number.
    """
    try:
        return range(operator.index(start), operator.index(stop))
    except TypeError as error:
        raise RequestError(f"layers are whole numbers: {error}") from error
