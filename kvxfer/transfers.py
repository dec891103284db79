"""Transfers as their caller sees them: `await transfer` looks on while a task of the worker does the work."""

import asyncio
import contextlib
import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from kvxfer.errors import FailureReport, KvxferError, MemoryInDoubtError, RequestError
from kvxfer.onlookers import follow
from kvxfer.runtime import Home
from kvxfer.telemetry import TransferStats
from kvxfer.tickets import Ticket

__all__ = ["Claim", "FetchResult", "Transfer", "TransferState", "layer_range"]


class TransferState(IntEnum):
    """Where a transfer stands; ordered, so that ranks may all-reduce the minimum."""

    FAILED = 0
    CONNECTING = 1
    WAITING = 2
    MOVING = 3
    DONE = 4


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
    was claimed more than once stays claimed until all of its claims were closed.
    """

    def __init__(
        self, ticket: Ticket, close: Callable[[], None], loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.ticket: Final = ticket
        self._close = close
        self._home: Final = Home(loop)

    def close(self) -> None:
        """Stop renewing the lease; the prefill engine frees the blocks when it has run out. Idempotent.

        Raises:
            ForkedError: In a process that was forked off the one that made the claim.
            UsageError: In another thread, unless the worker has a loop of its own.
        """
        self._home.own(self)
        close, self._close = self._close, _over
        close()


class Transfer:
    """One fetch under way. Made by `Worker.start_fetch`; await it for its `FetchResult`.

    Cancelling the waiting task cancels the transfer, waits (bounded by `revoke_timeout`) until its memory is safe, and
    then lets the cancellation through; if memory is not safe by then, `MemoryInDoubt` is raised instead. In a process
    that was forked off this one only its attributes can be read: what waits or cancels raises `ForkedError`, and in
    another thread or on another loop `UsageError`.

    Attributes:
        id: As in the logs of both sides.
        request: The request's id.
        state: See `TransferState`.
        memory_safe: Whether it has ended and no peer can write the destination blocks any more.
        failed_blocks: Destination blocks that hold no usable data, by group; empty unless the transfer failed.
        report: What is known of its failure, also if it was cancelled; None unless it failed.
    """

    def __init__(self, ident: str, request: str, loop: asyncio.AbstractEventLoop, cancel: Callable[[], None]) -> None:
        self.id: Final = ident
        self.request: Final = request
        self.state = TransferState.CONNECTING
        self.memory_safe = False
        self.failed_blocks: Mapping[str, Sequence[int]] = {}
        self.report: FailureReport | None = None
        self._cancel = cancel
        self._home: Final = Home(loop)
        self._loop = loop
        self._outcome: asyncio.Future[FetchResult] = loop.create_future()
        self._layers: dict[int, int] = {}  # layer -> parts of it that are still to land
        self._layer_waiters: dict[asyncio.Future[None], range] = {}
        self._waiters: dict[asyncio.Future[None], None] = {}  # in the order in which they came

    def __await__(self) -> Generator[Any, None, FetchResult]:
        return self._wait().__await__()

    def __repr__(self) -> str:
        return f"Transfer({self.id}, request={self.request!r}, {self.state.name})"

    @property
    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._outcome.done()

    def cancel(self) -> None:
        """Give up. Returns at once; await the transfer to know that its memory is safe. Idempotent."""
        self._home.own(self)
        self._cancel()

    @property
    def outcome(self) -> "asyncio.Future[FetchResult]":
        """Resolves when it has ended. Cancelling it changes nothing; `cancel` gives up."""
        return follow(self._home.own(self._outcome))

    async def layers(self, start: int, stop: int) -> None:
        """Wait until every byte of the layers [start, stop) has landed. Cancelling the wait leaves the transfer alone.

        Raises:
            KvxferError: If the transfer fails before; the same error that awaiting it raises.
            RequestError: If a layer is no number.
        """
        self._home.own(self)
        wanted = layer_range(start, stop)
        if self._outcome.done():
            self._outcome.result()
            return
        if self._have_landed(wanted):
            return
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._layer_waiters[waiter] = wanted
        waiter.add_done_callback(self._layer_waiters.pop)  # also when whoever waits is cancelled, however often that is
        await waiter

    def result(self) -> FetchResult:
        """The result of a transfer that is done.

        Raises:
            KvxferError: If it failed.
            asyncio.InvalidStateError: If it is not done.
        """
        return self._outcome.result()

    async def _wait(self) -> FetchResult:
        self._home.own(self)
        try:
            await self._ended()
        except asyncio.CancelledError as cancelled:
            self.cancel()
            while not self._outcome.done():
                with contextlib.suppress(asyncio.CancelledError):  # cancelled again: memory is still not safe
                    await self._ended()
            error = self._outcome.exception()
            if isinstance(error, MemoryInDoubtError):
                raise error from cancelled
            raise
        return self._outcome.result()

    async def _ended(self) -> None:
        """Return when it has ended: a turn of the loop earlier than `asyncio.shield` would."""
        if not self._outcome.done():
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters[waiter] = None
            try:
                await waiter
            finally:
                del self._waiters[waiter]

    # --- for the worker

    def expect(self, layers: Mapping[int, int]) -> None:
        """So many parts of each layer are to land."""
        if not self._layers:
            self._layers = dict(layers)
            return
        for layer, parts in layers.items():
            self._layers[layer] = self._layers.get(layer, 0) + parts

    def landed(self, layers: Sequence[int]) -> None:
        """One part of each of these layers has landed."""
        for layer in layers:
            self._layers[layer] -= 1
        for waiter, wanted in self._layer_waiters.items():
            if not waiter.done() and self._have_landed(wanted):
                waiter.set_result(None)

    def succeed(self, result: FetchResult) -> None:
        """Every byte is there."""
        self.state = TransferState.DONE
        self.memory_safe = True
        self._outcome.set_result(result)
        self._end(None)

    def fail(self, error: KvxferError | asyncio.CancelledError, report: FailureReport | None = None) -> None:
        """It is over without success, and its memory is safe (unless the error says otherwise)."""
        self.report = report
        self.state = TransferState.FAILED
        self.memory_safe = not isinstance(error, MemoryInDoubtError)
        self._outcome.set_exception(error)
        self._outcome.exception()  # whoever waits sees it; if nobody does, the log line does
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        for waiter in self._layer_waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)
                waiter.exception()  # whoever waits sees it; if nobody does any more, that is no defect
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._cancel = _over

    def _have_landed(self, layers: range) -> bool:
        return all(self._layers.get(layer, 1) == 0 for layer in layers)


def _over() -> None:
    """What cancelling does to a transfer that has ended, and closing to a claim that is closed."""


def layer_range(start: Any, stop: Any) -> range:
    """Layers as a caller names them.

    Raises:
        RequestError: If a layer is no whole number.
    """
    try:
        return range(operator.index(start), operator.index(stop))
    except TypeError as error:
        raise RequestError(f"layers are whole numbers: {error}") from error
