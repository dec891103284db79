"""Fetches and offers as an engine that steps and polls holds them. Safe from any thread; see `kvxfer.polling`.

Each has two halves: methods for the engine's threads, which look at what is noted here and hand the rest to the
worker's loop without waiting; and, from `begin` on, what runs on that loop.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for_any
from contextlib import suppress
from typing import Any, Final, assert_never

from kvxfer.blocklists import offered_blocks
from kvxfer.errors import (
    ClosedError,
    Code,
    KvxferError,
    MemoryInDoubtError,
    RequestError,
    TokensError,
    TransferError,
    TransferFailedError,
)
from kvxfer.events import as_event
from kvxfer.geometry import Blocks, CacheGeometry, check_tokens
from kvxfer.loop_thread import LoopThread, state_under_way, withdraw
from kvxfer.offers import Ending, Expired, Offer, OfferState, Released, Withdrawn
from kvxfer.onlookers import given_seconds
from kvxfer.polling import (
    Fetched,
    FetchFailed,
    OfferExpired,
    OfferFailed,
    OfferInDoubt,
    OfferReleased,
    OfferSettled,
    OfferWithdrawn,
    Outbox,
    PollEvent,
    Settled,
)
from kvxfer.telemetry import logger
from kvxfer.transfers import FetchResult, Progress, TransferState, layer_range

__all__ = ["BlockingOffer", "BlockingTransfer", "offered_blocks"]

_log: Final = logger("kvxfer.offer")


class BlockingTransfer:
    """One fetch under way. Made by `BlockingWorker.start_fetch`.

    Attributes:
        request: The request's id.
    """

    def __init__(self, request: str, written: Mapping[str, Sequence[int]], thread: LoopThread, outbox: Outbox) -> None:
        self.request: Final = request
        self._written = written
        self._thread = thread
        self._outbox = outbox
        self._inner: Progress | None = None
        self._ended: Final[Future[FetchResult]] = Future()
        self._safe = False
        self._lock: Final = threading.Lock()
        self._layers: Final[dict[int, Future[bool]]] = {}

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
            landed = self._landing(layer_range(layer, layer).start)
            either: set[Future[Any]] = {landed, self._ended}
            wait_for_any(either, limit, FIRST_COMPLETED)
            if not self._ended.done():
                if not landed.done():
                    raise TimeoutError(f"layer {layer} of {self.request!r} did not land within {timeout:g} s")
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
        """See `Handle`."""
        match event:
            case Fetched():
                self._safe = True
                self._ended.set_result(event.result)
            case FetchFailed():
                self._safe = not isinstance(event.error, TransferError) or event.error.memory_safe
                self._ended.set_exception(event.error)
            case _:
                self._safe = True

    def abandon(self) -> None:
        """See `Handle`."""
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
        self._outbox.end(self, FetchFailed(self.request, self, self._thread.moved(error)))
        if isinstance(error, MemoryInDoubtError):
            self._thread.submit(self._settle(error))

    async def _settle(self, error: MemoryInDoubtError) -> None:
        with suppress(ClosedError):  # the worker closed before: the blocks stay in doubt for good
            await error.settled()
            self._outbox.settle(self, Settled(self.request, self))

    def _cancel(self) -> None:
        if self._inner is not None:
            self._inner.cancel()

    def _landing(self, layer: int) -> "Future[bool]":
        """Resolves when a layer has landed or the fetch has ended; one for each layer, however often it is asked for.

        Raises:
            ClosedError: If the worker is closed.
        """
        with self._lock:
            if layer not in self._layers:
                self._layers[layer] = self._thread.submit(self._landed(layer))
            return self._layers[layer]

    async def _landed(self, layer: int) -> bool:
        if self._inner is None:
            return False
        with suppress(KvxferError):  # what ended the fetch is noted by then, or about to be
            await self._inner.layers(range(layer, layer + 1))
            return True
        return False


class BlockingOffer:
    """One request on offer. Made by `BlockingWorker.offer`.

    Its methods return at once. Arguments are checked then and there as far as they can be (see `BlockingWorker`); if
    the worker finds a step wrong later, it takes the offer back and says why by `OfferFailed`. Steps of an offer that
    is over change nothing.

    Attributes:
        request: Its id.
        attempt: Which attempt at this id.
    """

    def __init__(self, request: str, attempt: int, thread: LoopThread, outbox: Outbox, geometry: CacheGeometry) -> None:
        self.request: Final = request
        self.attempt: Final = attempt
        self._thread = thread
        self._outbox = outbox
        self._geometry = geometry
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

    def extend(self, blocks: Blocks, *, tokens: range) -> None:
        """Add blocks and the tokens that they hold; see `Offer.extend`.

        Raises:
            BlocksError: If ids are malformed or out of range.
            TokensError: If the range is empty or has a step.
            RequestError: If the offer is finished.
        """
        self._check_unfinished("extend")
        check_tokens(tokens)
        spans = offered_blocks(blocks, self._geometry)
        self._step(lambda offer: offer.extend(spans, tokens=tokens))

    def ready(self, *, layers: Sequence[int] | None = None, tokens: int | None = None, after: Any = None) -> None:
        """Say that K and V may be read once `after` has fired; see `Offer.ready`.

        Raises:
            EventError: If `after` is missing or was never recorded.
            RequestError: If the offer is finished.
        """
        self._check_unfinished("mark ready")
        event = as_event(after, self._geometry)
        try:
            which = None if layers is None else tuple(layers)
        except TypeError as error:
            raise TokensError(f"ready() takes a list of layers: {error}") from error
        self._step(lambda offer: offer.ready(layers=which, tokens=tokens, after=event))

    def finish(self, payload: bytes = b"") -> None:
        """Everything is on offer; see `Offer.finish`.

        Raises:
            RequestError: If the offer is finished.
        """
        self._check_unfinished("finish")
        self._finished = True
        self._step(lambda offer: offer.finish(payload))

    def withdraw(self) -> None:
        """Take the offer back. Returns at once; the event says when nobody reads its blocks. Idempotent."""
        self._thread.post(self._withdraw)

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
        """See `Handle`."""
        del event
        self._done = True

    def abandon(self) -> None:
        """See `Handle`."""
        self._outbox.end(self, OfferInDoubt(self.request, self, _abandoned(f"the offer of {self.request!r}", {})))

    def _step(self, step: Callable[[Offer], None]) -> None:
        def take() -> None:
            if self._inner is None or self._inner.state is not OfferState.LIVE or self._failure is not None:
                return  # it is over, or about to be: the event says how
            try:
                step(self._inner)
            except KvxferError as error:
                _log.warning("offer_step_failed", request=self.request, attempt=self.attempt, error=str(error))
                self._failure = error
                self._withdraw()

        self._thread.post(take)

    def _withdraw(self) -> None:
        if self._inner is not None and not self._done:
            self._thread.submit(withdraw(self._inner))

    def _over(self, ended: "asyncio.Future[Ending]") -> None:
        error = ended.exception()
        if isinstance(error, MemoryInDoubtError):
            moved = self._thread.moved(error)
            self._outbox.end(self, OfferInDoubt(self.request, self, moved))
            self._thread.submit(self._settle(error))
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

    async def _settle(self, error: MemoryInDoubtError) -> None:
        with suppress(ClosedError):  # the worker closed before: the blocks stay in doubt for good
            await error.settled()
            self._outbox.settle(self, OfferSettled(self.request, self))

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
