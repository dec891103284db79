"""The worker for engines that step and poll instead of awaiting.

    with kvxfer.BlockingWorker(config) as worker:
        worker.register(tensors)
        offer = worker.offer("req-1", blocks, tokens=4096, after=event)                     # prefill
        transfer = worker.start_fetch(ticket, blocks, tokens=range(0, 4096), after=event)   # decode
        for event in worker.poll():  # each step
            ...

What `poll` gives is in `kvxfer.polling`, what `offer` and `start_fetch` return in `kvxfer.handles`.
"""

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from kvxfer.assembly import given_config, given_groups, given_tensors
from kvxfer.blocklists import check_cover, offered_blocks, wanted_blocks, written_blocks
from kvxfer.config import Config
from kvxfer.errors import BusyError, ClosedError, PeerError, RequestError
from kvxfer.events import as_event
from kvxfer.fabric.port import Transport
from kvxfer.geometry import (
    Blocks,
    CacheGeometry,
    CacheTensor,
    Group,
    check_tokens,
    token_count,
)
from kvxfer.handles import BlockingOffer, BlockingTransfer
from kvxfer.loop_thread import LoopThread, ServedWorker
from kvxfer.offerbook import Awaited
from kvxfer.onlookers import given_seconds
from kvxfer.polling import Handle, Outbox, PollEvent
from kvxfer.runtime import Runtime, ThreadRuntime
from kvxfer.telemetry import logger
from kvxfer.tickets import EngineCard, Issuer, RankCard, Ticket
from kvxfer.transfers import Claim

__all__ = ["BlockingWorker"]

_log: Final = logger("kvxfer.worker")

_kept: Final[list[ServedWorker]] = []
"""Workers whose tensors a silent peer may still touch. They are never let go."""


@dataclass(frozen=True, slots=True)
class _Service:
    """What there is while tensors are registered."""

    thread: LoopThread
    worker: ServedWorker
    geometry: CacheGeometry


class BlockingWorker:
    """One rank's transfer service, for engines that step and poll. Safe from any thread.

    The service runs on an event loop in a thread of its own. Nothing here waits for it but what must by its nature:
    `register`, `join`, `unregister`, `close`, `BlockingTransfer.wait_layer`, and `poll` if it is given a time-out.

    So errors come in two ways. What can be seen in the arguments is raised at once, and nothing was sent: a malformed
    ticket, block ids that are malformed, out of range, named twice or too few, an empty token range, a missing or
    unrecorded event, a time-out that is no number, a worker that is not registered. What only the service can know
    comes by `poll`, as `FetchFailed` or `OfferFailed`: an id that is in use, blocks in custody, a step that does not
    fit its streaming offer, limits, and everything about peers. Block lists are copied; on a stream that is given as
    `after`, the event is recorded at once, in the calling thread.

    Args:
        config: Settings; `Config.load()` (environment, file, defaults) if left out. The setting `loop` has no meaning.
        groups: Properties of layer groups that their tensors do not show.
        transport: Makes what moves the bytes, anew for each `register`; NIXL if left out.
        runtime: Clock, randomness and threads.

    Raises:
        ConfigError: If a setting is wrong.
    """

    def __init__(
        self,
        config: Config | None = None,
        groups: Iterable[Group] = (),
        transport: Callable[[], Transport] | None = None,
        *,
        runtime: Runtime | None = None,
    ) -> None:
        self._service: _Service | None = None
        self._config: Final = given_config(config).model_copy(update={"loop": "own"})
        self._groups: Final = given_groups(groups)
        self._transport: Final = transport
        self._runtime: Final = runtime or ThreadRuntime()
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
        if self._service is not None:
            warnings.warn(f"{self!r} was never closed: use `with`", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "registered" if self._service is not None else "not registered"
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
        with self._lifecycle:
            if self._closed:
                raise ClosedError("this worker was closed: make another one")
            if self._service is not None:
                raise RequestError("tensors are registered already: call unregister() first")
            given = given_tensors(tensors)
            geometry = CacheGeometry.of(given, self._groups)
            transport = self._transport() if self._transport is not None else None
            worker = ServedWorker(given, self._config, groups=self._groups, transport=transport, runtime=self._runtime)
            thread = LoopThread("kvxfer-loop")
            try:
                thread.wait(worker.__aenter__())
            except BaseException:
                thread.close(self._config.close_timeout)
                raise
            self._service = _Service(thread, worker, geometry)

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
        with self._lifecycle:
            service, self._service = self._service, None
            if service is None:
                return True
            try:
                interrupt = service.thread.finish(service.worker.aclose(drain=drain), service.worker.hurry)
                state = service.thread.call(service.worker.describe)
            finally:
                if not service.thread.close(self._config.close_timeout):
                    _log.error("loop_thread_stuck", timeout=self._config.close_timeout)
                self._outbox.abandon()
            doubtful: int = state["custody"].doubtful_blocks
            if doubtful:
                _kept.append(service.worker)
                _log.warning("memory_leaked", blocks=doubtful, reason="a silent peer may still touch it")
            if interrupt is not None:
                raise interrupt
            return not doubtful

    def close(self, *, drain: bool = True) -> None:
        """Unregister for good. Blocks, as `unregister` does. Idempotent."""
        self._closed = True
        self.unregister(drain=drain)

    def begin_drain(self) -> None:
        """Refuse new work from now on, and tell every peer; see `Worker.begin_drain`. Does not wait.

        For an engine that is to stop: go on stepping and polling until `idle`, or for as long as there is time, and
        then `close`. Not from a signal handler, which may interrupt a call that holds a lock: set a flag there, and
        call this in the next step.

        Raises:
            ClosedError: If nothing is registered.
        """
        service = self._open
        self._post(service, service.worker.begin_drain)

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
        return self._open.worker.card

    @property
    def engine(self) -> Issuer:
        """The engine that this rank belongs to: `worker.engine.ticket(request)`.

        Raises:
            ClosedError: If nothing is registered.
            TicketError: If it has not joined yet.
        """
        return self._open.worker.engine

    def join(self, card: EngineCard | Mapping[str, Any], *, key: bytes) -> None:
        """Join an engine of several ranks, after each `register`; see `Worker.join`. Waits for the service to do so."""
        service = self._open
        service.thread.call(lambda: service.worker.join(card, key=key))

    def describe_soon(self) -> "Future[dict[str, Any]]":
        """The service's state as plain data, as `Worker.describe` has it. Does not wait.

        Raises:
            ClosedError: If nothing is registered.
        """
        return self._open.worker.describe_soon()

    def occupy(self, ctas: int) -> None:
        """Let copies on the GPU occupy so many thread blocks from now on; see `Worker.occupy`. Does not wait.

        Raises:
            ConfigError: If it is out of range.
            ClosedError: If nothing is registered.
        """
        self._open.worker.occupy(ctas)

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
        service = self._open
        if not streaming and (blocks is None or tokens is None):
            raise RequestError("an offer needs blocks= and tokens=, or streaming=True")
        held = None if tokens is None else token_count(tokens)
        if held is not None:
            check_tokens(held)
        spans = None if blocks is None else offered_blocks(blocks, service.geometry)
        if spans is not None and held is not None:
            check_cover(spans, service.geometry, held, complete=not streaming)
        event = None if streaming else as_event(after, service.geometry)
        offer = BlockingOffer(request, attempt, service.thread, self._outbox, service.geometry)
        self._begin(
            service,
            offer,
            lambda: offer.begin(
                lambda: service.worker.offer(
                    request, spans, tokens=tokens, after=event, attempt=attempt, streaming=streaming, payload=payload
                )
            ),
        )
        return offer

    def awaited(self, request: str, *, attempt: int = 0) -> Awaited | None:
        """What decode ranks have said of a request that is not on offer yet; None if nothing.

        For an engine that computes a prompt when somebody wants it, or from where somebody wants it on. Does not wait.

        Raises:
            ClosedError: If nothing is registered.
        """
        return self._open.worker.awaited(request, attempt)

    # --- decode

    def claim(self, ticket: Mapping[str, Any] | Ticket) -> Claim:
        """Keep a request's lease while it waits for blocks here; `Claim.close` ends that.

        One that finds too many claims is logged, and renews nothing.

        Raises:
            TicketError: If the ticket is malformed.
            ClosedError: If nothing is registered.
        """
        service, parsed = self._open, Ticket.parse(ticket)
        made: list[Claim] = []

        def close() -> None:
            while made:
                made.pop().close()

        def stop() -> None:
            service.thread.post(close)

        def begin() -> None:
            try:
                made.append(service.worker.claim(parsed))
            except (BusyError, ClosedError) as error:
                _log.warning("claim_failed", request=parsed.request, attempt=parsed.attempt, error=str(error))

        self._post(service, begin)
        return Claim(parsed, stop)

    def decline(self, ticket: Mapping[str, Any] | Ticket) -> None:
        """No fetch will come: every prefill rank frees the request's blocks at once.

        A rank that cannot be told is logged; its lease bounds the wait.

        Raises:
            TicketError: If the ticket is malformed.
            ClosedError: If nothing is registered.
        """
        service, parsed = self._open, Ticket.parse(ticket)
        service.thread.submit(_decline(service.worker, parsed))

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
        service, parsed = self._open, Ticket.parse(ticket)
        spans = wanted_blocks(blocks, service.geometry, tokens)
        event, limit = as_event(after, service.geometry), given_seconds(timeout, None)
        written = {group: ids.tolist() for group, ids in written_blocks(spans, service.geometry, tokens).items()}
        transfer = BlockingTransfer(parsed.request, written, service.thread, self._outbox)
        self._begin(
            service,
            transfer,
            lambda: transfer.begin(
                lambda: service.worker.begin_fetch(parsed, spans, tokens=tokens, after=event, timeout=limit, keep=keep)
            ),
        )
        return transfer

    # --- what became of it

    def poll(self, timeout: float = 0.0) -> list[PollEvent]:
        """Every event that came since the last call, each once, whichever thread asks. Also after `unregister`.

        Args:
            timeout: Seconds to wait for the first one; by default it does not wait.

        Raises:
            RequestError: If the time-out is no number.
        """
        return self._outbox.take(given_seconds(timeout, 0.0))

    # --- inside

    @property
    def _open(self) -> _Service:
        service = self._service
        if service is None:
            state = "was closed" if self._closed else "has no tensors: call register() first"
            raise ClosedError(f"this worker {state}")
        return service

    def _begin(self, service: _Service, handle: Handle, callback: Callable[[], None]) -> None:
        """Let a fetch or an offer begin."""
        self._outbox.add(handle)
        try:
            self._post(service, callback)
        except ClosedError:
            if self._outbox.discard(handle):  # else it was given up with all others, and its event says so
                raise

    def _post(self, service: _Service, callback: Callable[[], None]) -> None:
        if not service.thread.post(callback):
            raise ClosedError("this worker has just given up its tensors: call register() first")


async def _decline(worker: ServedWorker, ticket: Ticket) -> None:
    try:
        await worker.decline(ticket)
    except (PeerError, ClosedError) as error:
        _log.warning("decline_failed", request=ticket.request, attempt=ticket.attempt, error=str(error))
