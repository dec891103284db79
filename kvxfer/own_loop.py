"""`Worker` with `loop="own"`: the service runs on a loop in a thread of its own, the caller awaits on another one.

For servers whose own loop also runs the model: while that loop stands still, leases are renewed, peers are answered and
bytes move all the same. Offers and transfers look and behave as those of any worker. Methods that are not awaited
(`offer`, `start_fetch`, `Offer.extend`, ...) raise their errors at once, so they wait for the worker's loop: a hop from
thread to thread and back, a fraction of a millisecond, more if other threads hold the GIL.
"""

import asyncio
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from kvxfer.config import Config
from kvxfer.errors import ClosedError, KvxferError
from kvxfer.events import as_event
from kvxfer.fabric.port import Transport
from kvxfer.geometry import Blocks, CacheGeometry, CacheTensor, Group
from kvxfer.loop_thread import LoopThread, ServedWorker, state_under_way, withdraw
from kvxfer.offers import Ending, Offer
from kvxfer.onlookers import follow, see_through
from kvxfer.runtime import Runtime
from kvxfer.telemetry import logger
from kvxfer.tickets import EngineCard, Issuer, RankCard, Ticket
from kvxfer.transfers import Claim, FetchResult, Progress, Transfer, TransferState
from kvxfer.worker import Worker

__all__ = ["OwnLoopOffer", "OwnLoopTransfer", "OwnLoopWorker"]

_log: Final = logger("kvxfer.worker")


class OwnLoopWorker(Worker):
    """What `Worker(tensors, config)` makes if `config.loop` is `"own"`; arguments, methods and errors are the same.

    It may be used from any loop of the process, a `start_fetch` from a running one.
    """

    def __init__(
        self,
        tensors: Iterable[CacheTensor],
        config: Config | None = None,
        *,
        groups: Iterable[Group] = (),
        transport: Transport | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self._thread: LoopThread | None = None
        super().__init__(tensors, config, groups=groups, transport=transport, runtime=runtime)
        parts = self._assembly
        self._inner: Final = ServedWorker(
            parts.tensors, parts.config, groups=parts.groups, transport=transport, runtime=parts.runtime
        )

    async def __aenter__(self) -> Self:
        if self._thread is not None:
            raise ClosedError("a worker is entered once")
        thread = self._thread = LoopThread("kvxfer-loop")
        opening = asyncio.create_task(thread.awaits(self._inner.__aenter__()), name="kvxfer open")
        try:
            await see_through(opening)  # to its end, so that closing finds all that is to be given back
        except BaseException:
            await self.aclose(drain=False)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose(drain=error is None)

    def __del__(self) -> None:
        if self._thread is not None and self._closing is None:
            warnings.warn(f"{self!r} was never closed: use `async with`", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        state = "new" if self._thread is None else "closed" if self._closing is not None else "open"
        config = self._assembly.config
        return f"<kvxfer.Worker {config.engine}[{config.rank}/{config.world}] {state}, on its own loop>"

    # --- identity

    @property
    def card(self) -> RankCard:
        """See `Worker.card`."""
        return self._inner.card

    @property
    def engine(self) -> Issuer:
        """See `Worker.engine`."""
        return self._inner.engine

    def join(self, card: EngineCard | Mapping[str, Any], *, key: bytes) -> None:
        """See `Worker.join`."""
        self._served[0].call(lambda: self._inner.join(card, key=key))

    # --- prefill

    def offer(
        self,
        request: str,
        blocks: Blocks | None = None,
        *,
        tokens: int | None = None,
        after: Any = None,
        attempt: int = 0,
        streaming: bool = False,
        payload: bytes = b"",
    ) -> Offer:
        """See `Worker.offer`."""
        thread, geometry = self._served
        event = after if streaming else as_event(after, geometry)

        def make() -> OwnLoopOffer:
            inner = self._inner.offer(
                request, blocks, tokens=tokens, after=event, attempt=attempt, streaming=streaming, payload=payload
            )
            return OwnLoopOffer(inner, thread, geometry)

        return thread.call(make)

    # --- decode

    def claim(self, ticket: Mapping[str, Any] | Ticket) -> Claim:
        """See `Worker.claim`."""
        thread, _ = self._served
        inner = thread.call(lambda: self._inner.claim(ticket))

        def close() -> None:
            thread.post(inner.close)

        return Claim(inner.ticket, close)

    def start_fetch(
        self,
        ticket: Mapping[str, Any] | Ticket,
        blocks: Blocks,
        *,
        tokens: range,
        after: Any = None,
        timeout: float | None = None,
        keep: bool = False,
    ) -> Transfer:
        """See `Worker.start_fetch`."""
        thread, geometry = self._served
        loop, event = asyncio.get_running_loop(), as_event(after, geometry)

        def start() -> OwnLoopTransfer:
            inner = self._inner.begin_fetch(ticket, blocks, tokens=tokens, after=event, timeout=timeout, keep=keep)
            return OwnLoopTransfer(inner, thread, loop)

        return thread.call(start)

    async def decline(self, ticket: Mapping[str, Any] | Ticket) -> None:
        """See `Worker.decline`."""
        await self._served[0].awaits(self._inner.decline(ticket))

    # --- watching and closing

    def occupy(self, ctas: int) -> None:
        """See `Worker.occupy`."""
        self._inner.occupy(ctas)

    def describe(self) -> dict[str, Any]:
        """See `Worker.describe`."""
        return self._served[0].call(self._inner.describe)

    def describe_soon(self) -> "Future[dict[str, Any]]":
        """See `Worker.describe_soon`."""
        _ = self._served
        return self._inner.describe_soon()

    def begin_drain(self) -> None:
        """See `Worker.begin_drain`."""
        self._served[0].call(self._inner.begin_drain)

    async def drain(self, timeout: float | None = None) -> bool:
        """See `Worker.drain`."""
        return await self._served[0].awaits(self._inner.drain(timeout))

    async def aclose(self, *, drain: bool = True) -> None:
        """See `Worker.aclose`. The thread has ended when it returns."""
        thread = self._thread
        if thread is None:
            return
        if self._closing is None:
            self._closing = asyncio.create_task(self._shut(thread, drain=drain), name="kvxfer close")
        await see_through(self._closing, lambda: thread.post(self._inner.hurry))

    async def _shut(self, thread: LoopThread, *, drain: bool) -> None:
        timeout = self.config.close_timeout
        try:
            await thread.awaits(self._inner.aclose(drain=drain))
        finally:
            if not await thread.aclose(timeout):
                _log.error("loop_thread_stuck", timeout=timeout)

    @property
    def _served(self) -> tuple[LoopThread, CacheGeometry]:
        if self._thread is None:
            raise ClosedError("this worker is not open: enter it with `async with`")
        return self._thread, self._assembly.geometry


class OwnLoopOffer(Offer):
    """An `Offer` whose worker has a loop of its own: the same methods, from any thread or loop.

    Args:
        inner: The offer on the worker's loop, where this is called.
        thread: That loop.
        geometry: What the worker holds.
    """

    def __init__(self, inner: Offer, thread: LoopThread, geometry: CacheGeometry) -> None:
        super().__init__(inner._entry)  # noqa: SLF001 - of its own class
        self._inner = inner
        self._thread = thread
        self._geometry = geometry
        self._ended: Final[Future[Ending]] = Future()
        inner.wait_end().add_done_callback(self._over)

    def extend(self, blocks: Blocks, *, tokens: range) -> None:
        """See `Offer.extend`."""
        self._thread.call(lambda: self._inner.extend(blocks, tokens=tokens))

    def ready(self, *, layers: Sequence[int] | None = None, tokens: int | None = None, after: Any = None) -> None:
        """See `Offer.ready`."""
        event = as_event(after, self._geometry)
        self._thread.call(lambda: self._inner.ready(layers=layers, tokens=tokens, after=event))

    def finish(self, payload: bytes = b"") -> None:
        """See `Offer.finish`."""
        self._thread.call(lambda: self._inner.finish(payload))

    def wait_end(self) -> "asyncio.Future[Ending]":
        """See `Offer.wait_end`."""
        self._thread.home.own(self)  # nobody would resolve it there
        return follow(asyncio.wrap_future(self._ended))

    async def withdraw(self) -> Ending:
        """See `Offer.withdraw`."""
        if not self._ended.done():
            self._thread.submit(withdraw(self._inner))  # goes on though the caller is cancelled
        return await self.released()

    def _over(self, ended: "asyncio.Future[Ending]") -> None:
        error = ended.exception()
        if error is None:
            self._ended.set_result(ended.result())
        else:
            self._ended.set_exception(self._thread.moved(error) if isinstance(error, KvxferError) else error)


class OwnLoopTransfer(Transfer):
    """A `Transfer` whose worker has a loop of its own: the same methods, on the caller's loop.

    It ends there as the one on the worker's loop has ended. So leaving its block, or cancelling whoever awaits it,
    cancels the one there and waits until its memory is safe.

    Args:
        inner: The one on the worker's loop, where this is called.
        thread: That loop.
        loop: The caller's loop.
    """

    def __init__(self, inner: Progress, thread: LoopThread, loop: asyncio.AbstractEventLoop) -> None:
        def cancel() -> None:
            thread.post(inner.cancel)

        here = Progress(inner.id, inner.request, loop, cancel, inner.blocks)
        super().__init__(here)
        self._inner = inner
        self._thread = thread
        inner.outcome.add_done_callback(partial(_over, inner, thread, here))  # nothing here keeps what is dropped

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
        self._progress.cancel()

    async def _landed(self, wanted: range) -> None:
        if self.done or not await self._thread.awaits(_landed(self._inner, wanted)):
            await asyncio.shield(self.outcome)


async def _landed(inner: Progress, wanted: range) -> bool:
    """Whether these layers landed; False if the transfer failed before. Runs on the worker's loop."""
    try:
        await inner.layers(wanted)
    except (KvxferError, asyncio.CancelledError):
        if not inner.done:
            raise
        return False
    return True


def _over(inner: Progress, thread: LoopThread, here: Progress, outcome: "asyncio.Future[FetchResult]") -> None:
    """A transfer has ended. Runs on the worker's loop; the outcome is set for good, and may be read from the other."""

    def end() -> None:
        error = outcome.exception()
        if error is None:
            here.succeed(outcome.result())
            return
        here.failed_blocks = inner.failed_blocks
        if isinstance(error, KvxferError):
            here.fail(thread.moved(error), inner.report)
        else:
            here.fail(asyncio.CancelledError(*error.args), inner.report)

    with suppress(RuntimeError):  # the caller's loop is closed: nobody is left to hear it
        here.loop.call_soon_threadsafe(end)
