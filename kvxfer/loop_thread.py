"""An event loop in a thread of its own, and the ways into it from other threads and other loops.

Two faces stand on it: `OwnLoopWorker` (the awaitable API, on any loop) and `BlockingWorker` (without one).
What is handed in runs in the order in which it was handed in, whichever way it came.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, Self, TypeVar, overload

from kvxfer.errors import ClosedError, ForkedError, KvxferError, MemoryInDoubtError
from kvxfer.geometry import Blocks
from kvxfer.offerbook import Awaited
from kvxfer.offers import Offer
from kvxfer.runtime import Home
from kvxfer.tickets import Ticket
from kvxfer.transfers import Progress, TransferState
from kvxfer.worker import Worker

__all__ = ["LoopThread", "ServedWorker", "state_under_way", "withdraw"]

_T = TypeVar("_T")


class ServedWorker(Worker):
    """A worker that runs on a `LoopThread`: what `loop="own"` asks for is done, so it is plainly itself.

    The thread serves nobody else, so it is kept where the worker's other threads are.
    """

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._assembly.placement.bind()
        return self

    def begin_fetch(
        self,
        ticket: Mapping[str, Any] | Ticket,
        blocks: Blocks,
        *,
        tokens: range,
        after: Any,
        timeout: float | None,
        keep: bool,
    ) -> Progress:
        """`start_fetch` for whoever holds the fetch for its caller."""
        return self._begin_fetch(ticket, blocks, tokens, after, timeout, keep=keep)

    def awaited(self, request: str, attempt: int) -> Awaited | None:
        """What decode ranks have said of a request that is not on offer yet. From any thread."""
        return self._entered.prefill.book.awaited((request, attempt))

    def hurry(self) -> None:
        """Whoever waits for it to be closed was cancelled: close without draining, or without draining on."""
        self._hurry()


class LoopThread:
    """A thread that runs an event loop until it is closed. It is a daemon: it never keeps a process alive.

    Args:
        name: Name of the thread.

    Attributes:
        home: The process in which the thread runs.
    """

    def __init__(self, name: str) -> None:
        self.home: Final = Home()
        self._loop: Final = asyncio.SelectorEventLoop()
        self._stop: Final = asyncio.Event()
        self._lock: Final = threading.Lock()
        self._closed = False
        self._futures: Final[set[Future[Any]]] = set()  # a loop knows its tasks only weakly
        self._ended: Final[Future[None]] = Future()
        self._thread: Final = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._loop.close()
            raise

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._stop.wait())
        finally:
            self._ended.set_result(None)

    # --- ways in

    def post(self, callback: Callable[[], None]) -> bool:
        """Run `callback` on the loop soon. Returns at once; False if the loop is closed and it will not run."""
        self.home.own(self)  # before the lock, which a thread may have held that a fork has not
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(callback)  # in the context of whoever hands it in
            return not self._closed

    def submit(self, work: Coroutine[Any, Any, _T]) -> "Future[_T]":
        """Run a coroutine on the loop. Returns at once; the future is cancelled if the loop closes before it has ended.

        Raises:
            ClosedError: If the loop is closed.
        """
        try:
            self.home.own(self)
        except ForkedError:
            work.close()
            raise
        with self._lock:
            if self._closed:
                work.close()
                raise _closed_error()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def call(self, work: Callable[[], _T]) -> _T:
        """Run a function on the loop and wait for what it returns. Not from the loop's own thread.

        Raises:
            ClosedError: If the loop is closed.
        """

        async def step() -> _T:
            return work()

        return self.wait(step())

    def wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the loop and block until it has ended. Not from the loop's own thread.

        Raises:
            ClosedError: If the loop is closed, or closes meanwhile.
        """
        try:
            return self.submit(work).result()
        except FutureCancelledError:
            raise _closed_error() from None

    def finish(self, work: Coroutine[Any, Any, None], hurry: Callable[[], None]) -> KeyboardInterrupt | None:
        """Run a coroutine that has a bound of its own and block until it has ended, though Ctrl-C be pressed meanwhile.

        Args:
            work: What must end.
            hurry: Run on the loop when Ctrl-C is pressed, so that the work takes the shortest way to its end.

        Returns:
            The interrupt, for the caller to raise when all is done. Pressed again, it is raised at once.

        Raises:
            ClosedError: If the loop is closed, or closes meanwhile.
        """
        future = self.submit(work)
        try:
            try:
                future.result()
            except KeyboardInterrupt as interrupt:
                self.post(hurry)
                future.result()
                return interrupt
        except FutureCancelledError:
            raise _closed_error() from None
        return None

    async def awaits(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Await a coroutine that runs on the loop, from another loop.

        Cancelling the wait cancels the coroutine and does not wait for its end.

        Raises:
            ClosedError: If the loop is closed, or closes meanwhile.
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

    @overload
    def moved(self, error: MemoryInDoubtError) -> MemoryInDoubtError: ...
    @overload
    def moved(self, error: KvxferError) -> KvxferError: ...

    def moved(self, error: KvxferError) -> KvxferError:
        """An error of this loop as another loop, or none, may have it: `settled()` finds its way back."""
        if not isinstance(error, MemoryInDoubtError):
            return error
        moved = MemoryInDoubtError(
            str(error),
            settled=lambda: self.awaits(error.settled()),
            peer=error.peer,
            transfer=error.transfer,
            blocks=error.blocks,
        )
        moved.__cause__, moved.report = error.__cause__, error.report
        return moved

    # --- the end

    def close(self, timeout: float) -> bool:
        """Run what was handed in, cancel what goes on after that, end the thread. Idempotent.

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


def state_under_way(transfer: Progress) -> TransferState:
    """State of a transfer whose end is not known outside of its loop yet: never one that says that it has ended."""
    state = transfer.state
    return state if TransferState.FAILED < state < TransferState.DONE else TransferState.MOVING


async def withdraw(offer: Offer) -> None:
    """Withdraw an offer whose end somebody else looks at."""
    with suppress(MemoryInDoubtError):
        await offer.withdraw()


def _closed_error() -> ClosedError:
    return ClosedError("this worker is closed: its loop has ended; use another one")
