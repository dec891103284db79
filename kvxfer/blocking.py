"""Workers whose loop runs in a thread of its own: for engines that step and poll, and for callers on another loop.

with kvxfer.BlockingWorker(config) as worker:
    worker.register(tensors)
    offer = worker.offer("req-1", blocks, tokens=4096, after=event)                     # prefill
    transfer = worker.start_fetch(ticket, blocks, tokens=range(0, 4096), after=event)   # decode
    for event in worker.poll():  # each step
        ...
"""

import asyncio
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import wait as wait_for_any
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, TypeVar, assert_never

from kvxfer.config import Config
from kvxfer.copy.port import as_event
from kvxfer.errors import (
    BusyError,
    ClosedError,
    Code,
    FabricError,
    KvxferError,
    MemoryInDoubtError,
    RequestError,
    TransferFailedError,
    UsageError,
)
from kvxfer.fabric import Transport
from kvxfer.geometry import Blocks, CacheGeometry, CacheTensor, Group, check_tokens, token_count
from kvxfer.plans.pairs import check_cover, offered_blocks, wanted_blocks
from kvxfer.prefill.offers import (
    Awaited,
    Ending,
    Expired,
    Offer,
    OfferState,
    Released,
    Withdrawn,
    given_layers,
    given_payload,
)
from kvxfer.runtime import Home
from kvxfer.telemetry import TransferStats, logger
from kvxfer.tickets import EngineCard, Issuer, RankCard, Ticket
from kvxfer.transfers import (
    Claim,
    FetchResult,
    Progress,
    Transfer,
    TransferState,
    follow,
    given_seconds,
    layer_range,
    see_through,
)
from kvxfer.worker import Assembly, Service, Worker, check_offer, given_config, given_groups

__all__ = [
    "MAX_EVENTS",
    "BlockingOffer",
    "BlockingTransfer",
    "BlockingWorker",
    "FetchEvent",
    "FetchFailed",
    "Fetched",
    "OfferEvent",
    "OfferExpired",
    "OfferFailed",
    "OfferInDoubt",
    "OfferReleased",
    "OfferSettled",
    "OfferWithdrawn",
    "OwnLoopOffer",
    "OwnLoopTransfer",
    "OwnLoopWorker",
    "PollEvent",
    "Settled",
]

# --- a loop in a thread of its own
#
# Two faces stand on it: `OwnLoopWorker` (the awaitable API, on any loop) and `BlockingWorker` (without one). What is
# handed in runs in the order in which it was handed in, whichever way it came.

_T = TypeVar("_T")


_running: Final = threading.local()
"""Has a `loop` in the thread of a `LoopThread`, and nowhere else."""


def check_may_block() -> None:
    """Refuse to wait for such a loop in the thread of one, which would wait for itself, or they for each other.

    A callback may run there (of `describe_soon`, of an event, of the garbage collector: a finaliser of the caller's).

    Raises:
        UsageError: If this is such a thread.
    """
    if hasattr(_running, "loop"):
        raise UsageError(
            "this call blocks until a worker's loop has done something, and was made in the thread of such a loop, by "
            "a callback or a finaliser: make it in another thread"
        )


class LoopThread:
    """A thread that runs an event loop until it is closed. It is a daemon: it never keeps a process alive.

    What is handed in when it is closed, or has not ended as it closes, raises `ClosedError` for whoever waits for it.
    """

    def __init__(self) -> None:
        self.home: Final = Home()
        self._loop: Final = asyncio.SelectorEventLoop()
        self._stop: Final = asyncio.Event()
        self._lock: Final = threading.RLock()  # a signal, or a finaliser, may come while its thread has it
        self._closed = False
        self._futures: Final[set[Future[Any]]] = set()  # a loop knows its tasks only weakly
        self._finishing: Final[set[asyncio.Task[Any]]] = set()
        self._ended: Final[Future[None]] = Future()
        self._thread: Final = threading.Thread(target=self._run, name="kvxfer-loop", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._loop.close()
            raise FabricError(f"the system lets this process start no thread kvxfer-loop: {error}") from error
        except KeyboardInterrupt:
            self._begin_close()
            raise

    def _run(self) -> None:
        _running.loop = self
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._until_closed())
        finally:
            self._ended.set_result(None)

    async def _until_closed(self) -> None:
        await self._stop.wait()
        while self._finishing:
            await asyncio.wait(self._finishing)

    # --- ways in

    def post(self, callback: Callable[[], None]) -> bool:
        """Run `callback` on the loop soon. Returns at once; False if the loop is closed and it will not run."""
        self.home.own(self)  # before the lock, which a thread may have held that a fork has not
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(callback)  # in the context of whoever hands it in
            return not self._closed

    def submit(self, work: Coroutine[Any, Any, _T]) -> "Future[_T]":
        """Run a coroutine on the loop. Returns at once; the future is cancelled if the loop closes before its end."""
        try:
            self.home.own(self)
            with self._lock:
                if self._closed:
                    raise _closed_error()
                future = asyncio.run_coroutine_threadsafe(work, self._loop)
                self._futures.add(future)
        except KvxferError:
            work.close()
            raise
        future.add_done_callback(self._futures.discard)
        return future

    def call(self, work: Callable[[], _T]) -> _T:
        """Run a function on the loop and wait for what it returns, as `wait` does."""

        async def step() -> _T:
            return work()

        return self.wait(step)

    def wait(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run a coroutine on the loop and block until it has ended.

        Raises:
            UsageError: In the thread of such a loop: see `check_may_block`.
        """
        check_may_block()
        try:
            return self.submit(work()).result()
        except FutureCancelledError:
            raise _closed_error() from None

    def finish(
        self, work: Callable[[], Coroutine[Any, Any, None]], hurry: Callable[[], None]
    ) -> KeyboardInterrupt | None:
        """Run a coroutine that has a bound of its own and block until it has ended, though Ctrl-C be pressed meanwhile.

        Then `hurry` is run on the loop, so that the work takes the shortest way to its end, and the work once more,
        which finds what is done already: nobody knows whether it had been handed in.

        Returns:
            The interrupt, for the caller to raise when all is done. Pressed again, it is raised at once; the work goes
            on to its end all the same, though the loop be closed meanwhile.
        """

        async def to_its_end() -> None:
            self._finishing.add(task := asyncio.create_task(work()))
            task.add_done_callback(self._finishing.discard)
            await task

        try:
            self.wait(to_its_end)
        except KeyboardInterrupt as interrupt:
            self.post(hurry)
            self.wait(to_its_end)
            return interrupt
        return None

    async def awaits(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Await a coroutine that runs on the loop, from another loop.

        Cancelling the wait cancels the coroutine and does not wait for its end.
        """
        outcome = asyncio.wrap_future(self.submit(work))
        try:
            await asyncio.wait({outcome})
        except asyncio.CancelledError:
            outcome.cancel()
            raise
        if outcome.cancelled():
            raise _closed_error()
        return outcome.result()

    # --- the end

    def close(self, timeout: float) -> bool:
        """Run what was handed in, what `finish` was given to its end, cancel what else goes on, end the thread.

        Idempotent.

        Returns:
            False if the thread had not ended `timeout` seconds later.
        """
        self._begin_close()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    async def aclose(self, timeout: float) -> bool:
        """`close`, awaited from another loop."""
        self._begin_close()
        ended = asyncio.wrap_future(self._ended)
        await asyncio.wait({ended}, timeout=timeout)
        if ended.done():
            self._thread.join()  # it has nothing left to do
        return ended.done()

    def _begin_close(self) -> None:
        self.home.own(self)
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._stop.set)


class ServedWorker(Worker):
    """A worker on a loop in a thread of its own. Whoever has it hands in what is to run there.

    The thread serves nobody else, so it is kept where the worker's other threads are.
    """

    _own_loop = True

    def __new__(cls, parts: Assembly) -> Self:  # of what whoever has it was given, and has checked
        del parts
        return object.__new__(cls)

    def __init__(self, parts: Assembly) -> None:
        self._assembly = parts
        self.thread: Final = LoopThread()

    def __del__(self) -> None:
        """Whoever has it says that it was never closed."""

    @property
    def geometry(self) -> CacheGeometry:
        """What it holds."""
        return self._assembly.geometry

    @property
    def service(self) -> Service | None:
        """What runs on its loop, for whoever reads of it what may be read in any thread."""
        return self._service

    def begin_fetch(self, ticket: Mapping[str, Any] | Ticket, blocks: Blocks, **options: Any) -> Progress:
        """`start_fetch` for whoever holds the fetch for its caller."""
        decode, parsed = self._shown(ticket)
        return decode.start(parsed, blocks, **options)

    def awaited(self, request: str, attempt: int) -> Awaited | None:
        """What decode ranks have said of a request that is not on offer yet. From any thread."""
        book = self._assembly.home.read(self._service).prefill.book
        try:
            return book.awaited((request, attempt))
        except TypeError as error:
            raise RequestError(f"no request has the id {request!r}, attempt {attempt!r}: {error}") from error

    def hurry(self) -> None:
        """Whoever waits for it to close was cancelled: without draining, or without draining on."""
        self._hurry()

    async def _open(self) -> None:
        await super()._open()
        self._assembly.placement.bind()


def state_under_way(transfer: Progress) -> TransferState:
    """State of a transfer whose end is not known outside of its loop yet: never one that says that it has ended."""
    state = transfer.state
    return state if TransferState.FAILED < state < TransferState.DONE else TransferState.MOVING


def _closed_error() -> ClosedError:
    return ClosedError("this worker is closed: its loop has ended; use another one")


# --- the worker on it
#
# For servers whose own loop also runs the model: while that loop stands still, leases are renewed, peers are answered
# and bytes move all the same. Offers and transfers look and behave as those of any worker. Methods that are not
# awaited (`offer`, `start_fetch`, `Offer.extend`, ...) raise their errors at once, so they wait for the worker's loop:
# a hop from thread to thread and back, a fraction of a millisecond, more if other threads hold the GIL.

_log: Final = logger("kvxfer.worker")


class OwnLoopWorker(Worker):
    """What `Worker(tensors, config, loop="own")` makes; arguments, methods and errors are the same.

    It may be used from any loop of the process, a `start_fetch` from a running one.
    """

    _inner: ServedWorker | None = None

    def _enter(self) -> None:
        super()._enter()
        self._inner = ServedWorker(self._assembly)

    async def _open(self) -> None:
        inner = self._served
        await inner.thread.awaits(inner.__aenter__())
        self._service = inner.service  # of which `card`, `engine` and others read, in any thread

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, on its own loop>"

    def join(self, card: EngineCard | Mapping[str, Any], *, key: bytes) -> None:
        """See `Worker.join`."""
        self._served.thread.call(partial(self._served.join, card, key=key))

    def offer(self, request: str, blocks: Blocks | None = None, *, after: Any = None, **options: Any) -> Offer:
        """See `Worker.offer`."""
        inner = self._served
        event = after if options.get("streaming") else as_event(after, inner.geometry)

        def make() -> OwnLoopOffer:
            return OwnLoopOffer(inner.offer(request, blocks, after=event, **options), inner.thread)

        return inner.thread.call(make)

    def claim(self, ticket: Mapping[str, Any] | Ticket) -> Claim:
        """See `Worker.claim`."""
        thread = self._served.thread
        there = thread.call(partial(self._served.claim, ticket))
        return Claim(there.ticket, partial(thread.post, there.close))

    def start_fetch(
        self, ticket: Mapping[str, Any] | Ticket, blocks: Blocks, *, after: Any = None, **options: Any
    ) -> Transfer:
        """See `Worker.start_fetch`."""
        inner = self._served
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise UsageError(
                "a fetch is awaited on the loop that began it, and no event loop runs in this thread: begin it in a "
                "coroutine, or use a BlockingWorker"
            ) from None
        event = as_event(after, inner.geometry)

        def start() -> OwnLoopTransfer:
            return OwnLoopTransfer(inner.begin_fetch(ticket, blocks, after=event, **options), inner.thread, loop)

        return inner.thread.call(start)

    async def decline(self, ticket: Mapping[str, Any] | Ticket) -> None:
        """See `Worker.decline`."""
        await self._served.thread.awaits(self._served.decline(ticket))

    def describe(self) -> dict[str, Any]:
        """See `Worker.describe`."""
        return self._served.thread.call(self._served.describe)

    def begin_drain(self) -> None:
        """See `Worker.begin_drain`."""
        self._served.thread.call(self._served.begin_drain)

    async def drain(self, timeout: float | None = None) -> bool:
        """See `Worker.drain`."""
        return await self._served.thread.awaits(self._served.drain(timeout))

    async def aclose(self, *, drain: bool = True) -> None:
        """See `Worker.aclose`. The thread has ended when it returns."""
        inner = self._inner
        if inner is None:
            return
        # each call waits by itself: another one may have come from another loop
        closing = asyncio.create_task(self._shut(inner, drain=drain), name="kvxfer close")
        self._closing = self._closing or closing
        await see_through(closing, lambda: inner.thread.post(inner.hurry))

    async def _shut(self, inner: ServedWorker, *, drain: bool) -> None:
        timeout = self.config.close_timeout
        try:
            with suppress(ClosedError):  # its loop has ended, after another call
                await inner.thread.awaits(inner.aclose(drain=drain))
        finally:
            if not await inner.thread.aclose(timeout):
                _log.error("loop_thread_stuck", timeout=timeout)

    @property
    def _served(self) -> ServedWorker:
        return self._assembly.home.read(self._inner)


for _method in ("offer", "start_fetch"):  # whose arguments `help` shows, as those of `Worker`
    setattr(getattr(OwnLoopWorker, _method), "__wrapped__", getattr(Worker, _method))  # noqa: B010 - of functions


class OwnLoopOffer(Offer):
    """An `Offer` whose worker has a loop of its own: the same methods, from any thread or loop."""

    def __init__(self, there: Offer, thread: LoopThread) -> None:
        super().__init__(there._entry)  # noqa: SLF001 - of its own class
        self._thread = thread
        self._ended: Final[Future[Ending]] = Future()
        # the same on each loop that has asked, once: such a future keeps all who have waited for it
        self._here: Final[dict[asyncio.AbstractEventLoop, asyncio.Future[Ending]]] = {}
        there.wait_end().add_done_callback(self._over)

    def extend(self, blocks: Blocks, *, tokens: range) -> None:
        """See `Offer.extend`."""
        self._thread.call(partial(super().extend, blocks, tokens=tokens))

    def ready(self, *, layers: Sequence[int] | None = None, tokens: int | None = None, after: Any = None) -> None:
        """See `Offer.ready`."""
        event = as_event(after, self._entry.site.geometry)
        self._thread.call(partial(super().ready, layers=layers, tokens=tokens, after=event))

    def finish(self, payload: bytes = b"") -> None:
        """See `Offer.finish`."""
        self._thread.call(partial(super().finish, payload))

    def wait_end(self) -> "asyncio.Future[Ending]":
        """See `Offer.wait_end`."""
        ended, loop = self._thread.home.read(self._ended), asyncio.get_running_loop()
        if loop not in self._here:
            self._here[loop] = here = asyncio.wrap_future(ended)
            here.add_done_callback(lambda ended: ended.exception())  # whoever waits sees it
        return follow(self._here[loop])

    async def withdraw(self) -> Ending:
        """See `Offer.withdraw`."""
        self._thread.post(self._entry.withdraw)  # goes on though the caller is cancelled
        return await self.released()

    def _over(self, ended: "asyncio.Future[Ending]") -> None:
        error = ended.exception()
        if error is None:
            self._ended.set_result(ended.result())
        else:
            self._ended.set_exception(error)


class OwnLoopTransfer(Transfer):
    """A `Transfer` whose worker has a loop of its own: the same methods, on the caller's loop.

    It ends there as the one on the worker's loop has ended. So leaving its block, or cancelling whoever awaits it,
    cancels the one there and waits until its memory is safe.
    """

    def __init__(self, inner: Progress, thread: LoopThread, loop: asyncio.AbstractEventLoop) -> None:
        here = Progress(inner.id, inner.request, loop, inner.written)
        super().__init__(here, Home(loop))
        self._inner = inner
        self._thread = thread
        inner.outcome.add_done_callback(partial(_over, inner, here))  # nothing here keeps what is dropped

    @property
    def state(self) -> TransferState:
        """See `Transfer`."""
        return self._progress.state if self.done else state_under_way(self._inner)

    @property
    def memory_safe(self) -> bool:
        """See `Transfer`."""
        return self._inner.memory_safe

    def cancel(self) -> None:
        """See `Transfer.cancel`."""
        self._thread.post(self._inner.cancel)

    async def _landed(self, wanted: range) -> None:
        if self.done or not await self._thread.awaits(_landed(self._inner, wanted)):
            await self.outcome


async def _landed(inner: Progress, wanted: range) -> bool:
    """Whether these layers landed; False if the transfer failed before. Runs on the worker's loop."""
    try:
        await inner.layers(wanted)
    except (KvxferError, asyncio.CancelledError):
        if not inner.done:
            raise
        return False
    return True


def _over(inner: Progress, here: Progress, outcome: "asyncio.Future[FetchResult]") -> None:
    """A transfer has ended. Runs on the worker's loop; the outcome is set for good, and may be read from the other."""

    def end() -> None:
        error = outcome.exception()
        if error is None:
            here.succeed(outcome.result())
            return
        here.fail(error if isinstance(error, KvxferError) else asyncio.CancelledError(*error.args), inner.report)

    try:
        here.loop.call_soon_threadsafe(end)
    except RuntimeError:  # the caller's loop is closed: nobody waits there any more, but others may look
        for futures in (vars(here), here.watched, here.waiters):  # in the first those that are made when asked for
            futures.clear()
        end()


# --- events that `poll` gives
#
# Every fetch and every offer ends with exactly one event; one more follows if that said that memory is in doubt:
#
#     fetch    Fetched | FetchFailed                                       FetchFailed -> Settled
#     offer    OfferReleased | OfferExpired | OfferWithdrawn | OfferFailed | OfferInDoubt -> OfferSettled
#
# An event is there to be polled by the time its fetch or offer says that it is done.


@dataclass(frozen=True, slots=True)
class _OfFetch:
    request: str
    transfer: "BlockingTransfer"


@dataclass(frozen=True, slots=True)
class _OfOffer:
    request: str
    offer: "BlockingOffer"


@dataclass(frozen=True, slots=True)
class Fetched(_OfFetch):
    """A fetch succeeded: every byte that was asked for has landed and is visible."""

    result: FetchResult


@dataclass(frozen=True, slots=True)
class FetchFailed(_OfFetch):
    """A fetch failed or was cancelled; `transfer.failed_blocks` hold no usable data.

    Unless `error` is a `MemoryInDoubtError`, nobody writes the blocks any more; if it is, wait for `Settled`.
    """

    error: KvxferError


@dataclass(frozen=True, slots=True)
class Settled(_OfFetch):
    """Memory that a `FetchFailed` left in doubt is safe: its blocks are the caller's again."""


@dataclass(frozen=True, slots=True)
class OfferReleased(_OfOffer):
    """Every rank of the decode engine is done; the blocks are the caller's again."""

    stats: tuple[TransferStats, ...]


@dataclass(frozen=True, slots=True)
class OfferExpired(_OfOffer):
    """Nobody claimed or renewed the offer in time; the blocks are the caller's again."""

    reason: str


@dataclass(frozen=True, slots=True)
class OfferWithdrawn(_OfOffer):
    """The offer was withdrawn, or its worker closed; the blocks are the caller's again."""


@dataclass(frozen=True, slots=True)
class OfferFailed(_OfOffer):
    """The offer, or a step of it, could not be made, and it was taken back; the blocks are the caller's again."""

    error: KvxferError


@dataclass(frozen=True, slots=True)
class OfferInDoubt(_OfOffer):
    """The offer is over, but a silent peer or a stuck post may still read its blocks: wait for `OfferSettled`."""

    error: MemoryInDoubtError


@dataclass(frozen=True, slots=True)
class OfferSettled(_OfOffer):
    """Memory that an `OfferInDoubt` left in doubt is safe: its blocks are the caller's again."""


FetchEvent: TypeAlias = Fetched | FetchFailed | Settled
OfferEvent: TypeAlias = OfferReleased | OfferExpired | OfferWithdrawn | OfferFailed | OfferInDoubt | OfferSettled
PollEvent: TypeAlias = FetchEvent | OfferEvent
_Handle: TypeAlias = "BlockingTransfer | BlockingOffer"


MAX_EVENTS: Final = 65_536
"""Events that wait for `poll`, and fetches and offers that will bring one, at most."""


class Outbox:
    """Events on their way to `poll`, and what has not ended yet. Safe from any thread."""

    def __init__(self) -> None:
        self._events: list[PollEvent] = []
        self._changed: Final = threading.Condition()
        self._live: Final[set[_Handle]] = set()

    def take(self, timeout: float) -> list[PollEvent]:
        """Every event that came since the last call; waits for news at most `timeout` seconds."""
        with self._changed:
            if timeout > 0 and not self._events:
                check_may_block()
                self._changed.wait(timeout)
            events, self._events = self._events, []
            return events

    @property
    def idle(self) -> bool:
        """Whether all that was added has ended."""
        return not self._live

    def add(self, handle: _Handle) -> None:
        """A fetch or an offer begins.

        Raises:
            BusyError: If so many events wait for `poll` that nobody seems to ask for them.
        """
        with self._changed:
            if len(self._events) + len(self._live) >= MAX_EVENTS:
                raise BusyError(f"{len(self._events)} events wait for poll(), {len(self._live)} are to come: call it")
            self._live.add(handle)

    def discard(self, handle: _Handle) -> bool:
        """It could not begin after all. False if it has ended."""
        with self._changed:
            live = handle in self._live
            self._live.discard(handle)
            return live

    def end(self, handle: _Handle, event: PollEvent) -> None:
        """A fetch or an offer is over. Only the first end of each counts."""
        with self._changed:
            if handle in self._live:
                self._live.discard(handle)
                self._put(handle, event)

    async def settle(self, handle: _Handle, error: MemoryInDoubtError, event: Settled | OfferSettled) -> None:
        """Wait until what an end left in doubt is safe, and say so. If the worker closes before, nobody ever knows."""
        with suppress(ClosedError):
            await error.settled()
            with self._changed:
                self._put(handle, event)

    def abandon(self) -> None:
        """The worker is gone: whatever has not ended never will."""
        with self._changed:
            for handle in list(self._live):
                handle.abandon()
            self._changed.notify_all()

    def _put(self, handle: _Handle, event: PollEvent) -> None:
        handle.note(event)
        self._events.append(event)
        self._changed.notify_all()


# --- fetches and offers of an engine that polls
#
# Each has two halves: methods for the engine's threads, which look at what is noted here and hand the rest to the
# worker's loop without waiting; and, from `begin` on, what runs on that loop.

_offer_log: Final = logger("kvxfer.offer")


class BlockingTransfer:
    """One fetch under way. Made by `BlockingWorker.start_fetch`."""

    def __init__(self, request: str, written: Mapping[str, Sequence[int]], thread: LoopThread, outbox: Outbox) -> None:
        self.request: Final = request
        self._written = written
        self._thread = thread
        self._outbox = outbox
        self._inner: Progress | None = None
        self._ended: Final[Future[FetchResult]] = Future()
        self._safe = False

    def __repr__(self) -> str:
        return f"BlockingTransfer({self.id}, request={self.request!r}, {self.state.name})"

    @property
    def id(self) -> str:
        """As in the logs of both sides; empty until the worker's loop has taken the fetch up."""
        return self._inner.id if self._inner is not None else ""

    @property
    def state(self) -> TransferState:
        """See `TransferState`."""
        if self._ended.done():
            return TransferState.DONE if self._ended.exception() is None else TransferState.FAILED
        return TransferState.CONNECTING if self._inner is None else state_under_way(self._inner)

    @property
    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._ended.done()

    @property
    def memory_safe(self) -> bool:
        """Whether the blocks are the caller's again: it has ended, and no peer can write them (any more)."""
        return self._ended.done() and self._safe

    @property
    def failed_blocks(self) -> Mapping[str, Sequence[int]]:
        """Destination blocks that hold no usable data, by group; empty unless the fetch failed."""
        return self._written if self.state is TransferState.FAILED else {}

    @property
    def error(self) -> KvxferError | None:
        """Why it failed; None if it did not, or not yet. A cancelled fetch failed with the reason `Code.CANCELLED`."""
        error = self._ended.exception() if self._ended.done() else None
        return error if isinstance(error, KvxferError) else None

    def result(self) -> FetchResult:
        """The result of a fetch that is done. Does not block.

        Raises:
            KvxferError: If it failed.
            RequestError: If it is not done.
        """
        if not self._ended.done():
            raise RequestError(f"the fetch of {self.request!r} is not done: poll for its event first")
        return self._ended.result()

    def cancel(self) -> None:
        """Give up. Returns at once; the event says when the memory is safe. Idempotent.

        The prefill side frees the request's blocks then, unless it was begun with `keep=True` or a claim is open.
        """
        self._thread.post(self._cancel)

    def give_up(self) -> bool:
        """Cancel, and block until nobody writes the blocks any more; False if it has ended in doubt about that.

        A peer that is silent may owe its last word then, and the event comes with that, or after `revoke_timeout`.

        Raises:
            ClosedError: If the worker is closed.
        """
        return self._thread.wait(self._spared)

    def wait_layer(self, layer: int, stream: Any = None, timeout: float | None = None) -> None:
        """Block until every byte of a layer has landed.

        A layer is reported once its bytes are visible to work launched afterwards on any stream of the device. So when
        this returns, work that is launched on `stream` sees the layer, and nothing is left to be waited for there.

        Args:
            layer: Its global number. One that this cache does not hold has landed when the whole fetch has.
            stream: The CUDA stream on which the layer will be read.
            timeout: Seconds; None waits until the fetch has ended.

        Raises:
            KvxferError: If the fetch has failed, or fails before.
            RequestError: If the layer or the time-out is no number.
            TimeoutError: If the layer has not landed in time; the fetch goes on.
        """
        del stream  # it needs no event to wait for, see above
        limit = given_seconds(timeout, None)
        if not self._ended.done():
            check_may_block()
            landed = self._thread.submit(self._landed(layer_range(layer, layer).start))
            either: set[Future[Any]] = {landed, self._ended}
            came, _ = wait_for_any(either, limit, FIRST_COMPLETED)
            landed.cancel()
            if not self._ended.done():
                if not came:
                    raise TimeoutError(f"layer {layer} of {self.request!r} did not land within {limit:g} s")
                if not landed.cancelled() and landed.result():
                    return
        self._ended.result()

    # --- on the worker's loop

    def begin(self, start: Callable[[], Progress]) -> None:
        """Start the fetch."""
        try:
            self._inner = start()
        except KvxferError as error:
            self._outbox.end(self, FetchFailed(self.request, self, error))
        else:
            self._inner.outcome.add_done_callback(self._over)

    def note(self, event: PollEvent) -> None:
        """Take over what an event says. Called before it can be polled; does not block."""
        match event:
            case Fetched():
                self._safe = True
                self._ended.set_result(event.result)
            case FetchFailed():
                self._safe = not isinstance(event.error, MemoryInDoubtError)
                self._ended.set_exception(event.error)
            case _:
                self._safe = True

    def abandon(self) -> None:
        """The worker is gone: end, though nobody knows how."""
        error = _abandoned(f"the fetch of {self.request!r}", self._written)
        self._outbox.end(self, FetchFailed(self.request, self, error))

    def _over(self, outcome: "asyncio.Future[FetchResult]") -> None:
        error = outcome.exception()
        if error is None:
            self._outbox.end(self, Fetched(self.request, self, outcome.result()))
            return
        if not isinstance(error, KvxferError):
            error = TransferFailedError(
                f"the fetch of {self.request!r} was cancelled",
                reason=Code.CANCELLED,
                transfer=self.id,
                blocks=self._written,
            )
            error.report = self._inner.report if self._inner is not None else None
        self._outbox.end(self, FetchFailed(self.request, self, error))
        if isinstance(error, MemoryInDoubtError):
            self._thread.submit(self._outbox.settle(self, error, Settled(self.request, self)))

    def _cancel(self) -> None:
        if self._inner is not None:
            self._inner.cancel()

    async def _spared(self) -> bool:
        self._cancel()
        if self._inner is None:  # it never began
            return True
        await follow(self._inner.spared)
        return self._inner.memory_safe or not self._inner.done

    async def _landed(self, layer: int) -> bool:
        return self._inner is not None and await _landed(self._inner, range(layer, layer + 1))


class BlockingOffer:
    """One request on offer. Made by `BlockingWorker.offer`.

    Its methods return at once. Arguments are checked then and there as far as they can be (see `BlockingWorker`); if
    the worker finds a step wrong later, it takes the offer back and says why by `OfferFailed`. Steps of an offer that
    is over change nothing.
    """

    def __init__(self, request: str, attempt: int, worker: ServedWorker, outbox: Outbox) -> None:
        self.request: Final = request
        self.attempt: Final = attempt  # which attempt at this id
        self._worker = worker
        self._outbox = outbox
        self._inner: Offer | None = None
        self._failure: KvxferError | None = None
        self._finished = False
        self._done = False

    def __repr__(self) -> str:
        return f"BlockingOffer({self.request!r}, attempt={self.attempt}, {'over' if self._done else 'live'})"

    @property
    def done(self) -> bool:
        """Whether it is over, in whatever way; its event says which."""
        return self._done

    @property
    def ticket(self) -> dict[str, Any]:
        """With which a decode engine fetches it; see `Offer.ticket`.

        Raises:
            TicketError: If the worker has not joined its engine yet.
        """
        return self._worker.engine.ticket(self.request, attempt=self.attempt)

    def extend(self, blocks: Blocks, *, tokens: range) -> None:
        """Add blocks and the tokens that they hold; see `Offer.extend`.

        Raises:
            BlocksError: If ids are malformed or out of range.
            TokensError: If the range is empty or has a step.
            RequestError: If the offer is finished.
        """
        self._check_unfinished("extend")
        check_tokens(tokens)
        spans = offered_blocks(blocks, self._worker.geometry)
        self._step(lambda offer: offer.extend(spans, tokens=tokens))

    def ready(self, *, layers: Sequence[int] | None = None, tokens: int | None = None, after: Any = None) -> None:
        """Say that K and V may be read once `after` has fired; see `Offer.ready`.

        Raises:
            TokensError: If a layer is unknown.
            EventError: If `after` is missing or was never recorded.
            RequestError: If the offer is finished.
        """
        self._check_unfinished("mark ready")
        event = as_event(after, self._worker.geometry)
        which = None if layers is None else given_layers(layers, self._worker.geometry.layers)
        self._step(lambda offer: offer.ready(layers=which, tokens=tokens, after=event))

    def finish(self, payload: bytes = b"") -> None:
        """Everything is on offer; see `Offer.finish`.

        Raises:
            RequestError: If the offer is finished, or the payload is none.
            TokensError: If the payload is too large.
        """
        self._check_unfinished("finish")
        content = given_payload(payload)
        self._finished = True
        self._step(lambda offer: offer.finish(content))

    def withdraw(self) -> None:
        """Take the offer back. Returns at once; the event says when nobody reads its blocks. Idempotent."""
        self._worker.thread.post(self._withdraw)

    # --- on the worker's loop

    def begin(self, make: Callable[[], Offer]) -> None:
        """Make the offer."""
        try:
            self._inner = make()
        except KvxferError as error:
            self._outbox.end(self, OfferFailed(self.request, self, error))
        else:
            self._inner.wait_end().add_done_callback(self._over)

    def note(self, event: PollEvent) -> None:
        """Take over what an event says. Called before it can be polled; does not block."""
        del event
        self._done = True

    def abandon(self) -> None:
        """The worker is gone: end, though nobody knows how."""
        self._outbox.end(self, OfferInDoubt(self.request, self, _abandoned(f"the offer of {self.request!r}", {})))

    def _step(self, step: Callable[[Offer], None]) -> None:
        def take() -> None:
            if self._inner is None or self._inner.state is not OfferState.LIVE or self._failure is not None:
                return  # it is over, or about to be: the event says how
            try:
                step(self._inner)
            except KvxferError as error:
                _offer_log.warning("offer_step_failed", request=self.request, attempt=self.attempt, error=str(error))
                self._failure = error
                self._withdraw()

        self._worker.thread.post(take)

    def _withdraw(self) -> None:
        if self._inner is not None and not self._done:
            self._worker.thread.submit(self._inner.withdraw())

    def _over(self, ended: "asyncio.Future[Ending]") -> None:
        error = ended.exception()
        if isinstance(error, MemoryInDoubtError):
            self._outbox.end(self, OfferInDoubt(self.request, self, error))
            self._worker.thread.submit(self._outbox.settle(self, error, OfferSettled(self.request, self)))
            return
        ending = ended.result()
        match ending:
            case Released():
                self._outbox.end(self, OfferReleased(self.request, self, ending.stats))
            case Expired():
                self._outbox.end(self, OfferExpired(self.request, self, ending.reason))
            case Withdrawn() if self._failure is not None:
                self._outbox.end(self, OfferFailed(self.request, self, self._failure))
            case Withdrawn():
                self._outbox.end(self, OfferWithdrawn(self.request, self))
            case _:
                assert_never(ending)

    def _check_unfinished(self, what: str) -> None:
        if self._finished:
            raise RequestError(f"cannot {what}: offer {self.request!r} is finished")


def _abandoned(what: str, blocks: Mapping[str, Sequence[int]]) -> MemoryInDoubtError:
    async def settled() -> None:
        raise ClosedError("the worker is closed: nothing more will be known of the blocks that it left in doubt")

    return MemoryInDoubtError(
        f"{what} had not ended when its worker was closed: a peer may still touch its blocks",
        settled=settled,
        blocks=blocks,
    )


# --- the worker


class BlockingWorker:
    """One rank's transfer service, for engines that step and poll. Safe from any thread.

    The service runs on an event loop in a thread of its own. Nothing here waits for it but what must by its nature:
    `register`, `join`, `unregister`, `close`, `BlockingTransfer.wait_layer`, and `poll` if it is given a time-out.

    So errors come in two ways. What can be seen in the arguments is raised at once, and nothing was sent: a malformed
    ticket, block ids that are malformed, out of range, named twice or too few, an empty token range, a missing or
    unrecorded event, a payload that is none, a time-out that is no number, a worker that is not registered. What only
    the service can know comes by `poll`, as `FetchFailed` or `OfferFailed`: an id that is in use, blocks in custody, a
    step that does not fit its streaming offer, limits, and everything about peers. Block lists and payloads are copied;
    on a stream that is given as `after`, the event is recorded at once, in the calling thread.

    Args:
        config: Settings; `Config.load()` (environment, file, defaults) if left out.
        groups: Properties of layer groups that their tensors do not show.
        transport: Makes what moves the bytes, anew for each `register`; NIXL if left out.

    Raises:
        ConfigError: If a setting is wrong.
        UsageError: If `transport` is something else.
    """

    _worker: ServedWorker | None = None  # while tensors are registered

    def __init__(
        self,
        config: Config | None = None,
        groups: Iterable[Group] = (),
        transport: Callable[[], Transport] | None = None,
    ) -> None:
        if transport is not None and not callable(transport):
            raise UsageError(f"transport must be what makes one, for each register(), not {transport!r}")
        self._config: Final = given_config(config)
        self._groups: Final = given_groups(groups)
        self._transport: Final = transport
        self._outbox: Final = Outbox()
        self._lifecycle: Final = threading.Lock()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=error is None)

    def __del__(self) -> None:
        if self._worker is not None and self._worker.thread.home.here:
            warnings.warn(f"{self!r} was never closed: use `with`", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "registered" if self._worker is not None else "not registered"
        return f"<kvxfer.BlockingWorker {self._config.engine}[{self._config.rank}/{self._config.world}] {state}>"

    # --- memory

    def register(self, tensors: Iterable[CacheTensor]) -> None:
        """Register the cache tensors of this rank and open the service. Blocks.

        They must stay allocated until `unregister` or `close` has returned.

        Raises:
            GeometryError: If the tensors contradict each other or cannot be expressed.
            ConfigError: If a setting is wrong.
            FabricError: If the memory cannot be registered.
            RequestError: If tensors are registered already.
            ClosedError: If the worker was closed.
        """
        check_may_block()
        with self._lifecycle:
            if self._closed:
                raise ClosedError("this worker was closed: make another one")
            if self._worker is not None:
                raise RequestError("tensors are registered already: call unregister() first")
            transport = self._transport() if self._transport is not None else None
            worker = ServedWorker(Assembly.of(tensors, self._groups, self._config, transport, None))
            try:
                worker.thread.wait(worker.__aenter__)
                if self._closed:
                    raise ClosedError("this worker was closed while it opened")
                self._worker = worker
            except BaseException:
                self._worker = None
                try:
                    worker.thread.finish(partial(worker.aclose, drain=False), worker.hurry)
                finally:
                    worker.thread.close(self._config.close_timeout)
                raise

    def unregister(self, *, drain: bool = True) -> bool:
        """Take the tensors back, as for an engine that goes to sleep. Blocks, at most `config.bounds()["close"]`.

        New work is refused, what is under way may end (bounded), what is left is cancelled, and the service stops; its
        events can still be polled. Ctrl-C cuts the drain short and is raised once the service has stopped. Tensors may
        be registered again; that makes another incarnation, with another card, and an engine of several ranks must join
        again.

        Args:
            drain: Whether what is under way may end; otherwise it is cancelled at once.

        Returns:
            False if a silent peer may still touch some of the blocks. Then kvxfer keeps the tensors for as long as the
            process lives, and their memory must not be used for anything else. Harmless if nothing is registered.
        """
        check_may_block()  # before the lock, which may be held by somebody who waits for that loop
        self._check_process()
        with self._lifecycle:
            worker, self._worker = self._worker, None
            if worker is None:
                return True
            try:
                interrupt = worker.thread.finish(partial(worker.aclose, drain=drain), worker.hurry)
                state = worker.thread.call(worker.describe)
            finally:
                if not worker.thread.close(self._config.close_timeout):
                    _log.error("loop_thread_stuck", timeout=self._config.close_timeout)
                self._outbox.abandon()
            doubtful: int = state["custody"].doubtful_blocks
            if doubtful:
                _log.warning("memory_leaked", blocks=doubtful, reason="a silent peer may still touch it")
            if interrupt is not None:
                raise interrupt
            return not doubtful

    def close(self, *, drain: bool = True) -> None:
        """Unregister for good. Blocks, as `unregister` does. Idempotent."""
        check_may_block()
        self._closed = True
        self.unregister(drain=drain)

    def begin_drain(self) -> None:
        """Refuse new work from now on, and tell every peer; see `Worker.begin_drain`. Does not wait.

        For an engine that is to stop: go on stepping and polling until `idle`, or for as long as there is time, and
        then `close`. A signal handler may call it.

        Raises:
            ClosedError: If nothing is registered.
        """
        worker = self._open
        self._post(worker, worker.begin_drain)

    @property
    def idle(self) -> bool:
        """Whether every fetch and every offer that was begun has ended. Their events may still wait for `poll`."""
        return self._outbox.idle

    # --- identity

    @property
    def config(self) -> Config:
        """Effective settings."""
        return self._config

    @property
    def card(self) -> RankCard:
        """What this rank says of itself; the launcher collects one of each rank.

        Raises:
            ClosedError: If nothing is registered.
        """
        return self._open.card

    @property
    def engine(self) -> Issuer:
        """The engine that this rank belongs to: `worker.engine.ticket(request)`.

        Raises:
            ClosedError: If nothing is registered.
            TicketError: If it has not joined yet.
        """
        return self._open.engine

    def join(self, card: EngineCard | Mapping[str, Any], *, key: bytes) -> None:
        """Join an engine of several ranks, after each `register`; see `Worker.join`. Waits for the service to do so."""
        worker = self._open
        worker.thread.call(partial(worker.join, card, key=key))

    def describe_soon(self) -> "Future[dict[str, Any]]":
        """The service's state as plain data, as `Worker.describe` has it. Does not wait.

        Raises:
            ClosedError: If nothing is registered.
        """
        return self._open.describe_soon()

    def occupy(self, ctas: int) -> None:
        """Let copies on the GPU occupy so many thread blocks from now on; see `Worker.occupy`. Does not wait.

        Raises:
            ConfigError: If it is out of range.
            ClosedError: If nothing is registered.
        """
        self._open.occupy(ctas)

    # --- prefill

    def offer(
        self,
        request: str,
        blocks: Blocks | None = None,
        *,
        tokens: int | None = None,
        after: Any = None,
        streaming: bool = False,
        payload: bytes = b"",
        attempt: int = 0,
    ) -> BlockingOffer:
        """Offer a request's cache to whoever holds its ticket; see `Worker.offer` for the arguments.

        The blocks belong to the offer until its event says that they are the caller's again.

        Raises:
            UsageError: If an argument is wrong; see the class for what is found out later.
        """
        worker, payload = self._open, given_payload(payload)
        check_offer(blocks, tokens, after=after, streaming=streaming, payload=payload)
        spans = None
        if blocks is not None and tokens is not None:
            held = token_count(tokens)
            check_tokens(held)
            spans = offered_blocks(blocks, worker.geometry)
            check_cover(spans, worker.geometry, held, complete=not streaming)
        event = None if streaming else as_event(after, worker.geometry)
        offer = BlockingOffer(request, attempt, worker, self._outbox)
        make = partial(worker.offer, request, spans, tokens=tokens, after=event, attempt=attempt)
        make = partial(make, streaming=streaming, payload=payload)
        self._begin(worker, offer, partial(offer.begin, make))
        return offer

    def awaited(self, request: str, *, attempt: int = 0) -> Awaited | None:
        """What decode ranks have said of a request that is not on offer yet; None before one fetches or declines it.

        For an engine that computes a prompt when somebody wants it, or from where somebody wants it on. Does not wait.

        Raises:
            RequestError: If the id or the attempt is of a kind that no request has.
            ClosedError: If nothing is registered.
        """
        return self._open.awaited(request, attempt)

    # --- decode

    def claim(self, ticket: Mapping[str, Any] | Ticket) -> Claim:
        """Keep a request's lease while it waits for blocks here; `Claim.close` ends that.

        One that finds too many claims, or a rank that has not joined its engine, is logged, and renews nothing.

        Raises:
            TicketError: If the ticket is malformed.
            ClosedError: If nothing is registered.
        """
        worker, parsed = self._open, Ticket.parse(ticket)
        made: list[Claim] = []

        def close() -> None:
            while made:
                made.pop().close()

        def begin() -> None:
            try:
                made.append(worker.claim(parsed))
            except KvxferError as error:
                _log.warning("claim_failed", request=parsed.request, attempt=parsed.attempt, error=str(error))

        self._post(worker, begin)
        return Claim(parsed, partial(worker.thread.post, close))

    def decline(self, ticket: Mapping[str, Any] | Ticket) -> None:
        """No fetch will come: every prefill rank frees the request's blocks at once.

        A rank that cannot be told is logged; its lease bounds the wait.

        Raises:
            TicketError: If the ticket is malformed.
            ClosedError: If nothing is registered.
        """
        worker, parsed = self._open, Ticket.parse(ticket)
        worker.thread.submit(_decline(worker, parsed))

    def start_fetch(
        self,
        ticket: Mapping[str, Any] | Ticket,
        blocks: Blocks,
        *,
        tokens: range,
        after: Any = None,
        timeout: float | None = None,
        keep: bool = False,
    ) -> BlockingTransfer:
        """Bring a request's cache into these blocks; see `Worker.fetch`, also for what a cancellation frees.

        The blocks belong to the fetch until it is `memory_safe`.

        Raises:
            UsageError: If an argument is wrong; see the class for what is found out later.
        """
        worker, parsed = self._open, Ticket.parse(ticket)
        spans, written = wanted_blocks(blocks, worker.geometry, tokens)
        event, limit, keep = as_event(after, worker.geometry), given_seconds(timeout, None), bool(keep)
        ids = {group: blocks.tolist() for group, blocks in written.items()}
        transfer = BlockingTransfer(parsed.request, ids, worker.thread, self._outbox)
        start = partial(worker.begin_fetch, parsed, spans, tokens=tokens, after=event, timeout=limit, keep=keep)
        self._begin(worker, transfer, partial(transfer.begin, start))
        return transfer

    # --- what became of it

    def poll(self, timeout: float = 0.0) -> list[PollEvent]:
        """Every event that came since the last call, each once, whichever thread asks. Also after `unregister`.

        Args:
            timeout: Seconds to wait for the first one, unless another thread closes the worker, or takes that one; by
                default it does not wait.

        Raises:
            RequestError: If the time-out is no number.
            UsageError: If it would wait in the thread of a worker's loop, on which alone events come.
            ForkedError: In a process that was forked off the one in which its worker runs.
        """
        self._check_process()
        return self._outbox.take(given_seconds(timeout, 0.0))

    # --- inside

    def _check_process(self) -> None:
        """Refuse a forked process before it waits for a lock that a thread may hold which it has not."""
        worker = self._worker
        if worker is not None:
            worker.thread.home.own(worker)

    @property
    def _open(self) -> ServedWorker:
        worker = self._worker
        if worker is None:
            state = "was closed" if self._closed else "has no tensors: call register() first"
            raise ClosedError(f"this worker {state}")
        return worker.thread.home.own(worker)

    def _begin(self, worker: ServedWorker, handle: _Handle, callback: Callable[[], None]) -> None:
        self._outbox.add(handle)
        try:
            self._post(worker, callback)
        except ClosedError:
            if self._outbox.discard(handle):  # else it was given up with all others, and its event says so
                raise

    def _post(self, worker: ServedWorker, callback: Callable[[], None]) -> None:
        if not worker.thread.post(callback):
            raise ClosedError("this worker has just given up its tensors: call register() first")


async def _decline(worker: ServedWorker, ticket: Ticket) -> None:
    try:
        await worker.decline(ticket)
    except KvxferError as error:
        _log.warning("decline_failed", request=ticket.request, attempt=ticket.attempt, error=str(error))
