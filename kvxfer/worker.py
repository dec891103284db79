"""The worker: one rank's service, composed of its books, its threads and its two roles.

    async with kvxfer.Worker(tensors, config) as worker:
        offer = worker.offer("req-1", blocks, tokens=4096, after=event)      # prefill
        result = await worker.fetch(ticket, blocks, tokens=range(0, 4096), after=event)   # decode

What is done runs on the loop that entered it, and is refused elsewhere; copies and posts run in threads of its own.
"""

import asyncio
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Final, Self, cast

from kvxfer.assembly import Assembly, assemble, given_config
from kvxfer.config import Config
from kvxfer.errors import ClosedError, ConfigError, RequestError
from kvxfer.fabric.port import Transport
from kvxfer.geometry import Blocks, CacheTensor, Group, token_count
from kvxfer.limits import MAX_CTAS
from kvxfer.offers import Offer
from kvxfer.onlookers import given_seconds, see_through, soon
from kvxfer.overview import overview
from kvxfer.runtime import Runtime
from kvxfer.service import Service
from kvxfer.site import Site
from kvxfer.telemetry import logger
from kvxfer.tickets import KEY_BYTES, EngineCard, Issuer, RankCard, Ticket
from kvxfer.transfers import Claim as ClaimHandle
from kvxfer.transfers import FetchResult, Progress, Transfer

__all__ = ["Worker"]

_log: Final = logger("kvxfer.worker")
_NAMED: Final = 5
"""Offers that a warning names at most."""


class Worker:
    """One rank's transfer service. Enter it with `async with`; it may offer and fetch at once.

    Args:
        tensors: The cache tensors of this rank, all on one device. They stay registered, and must stay allocated, until
            the worker is closed.
        config: Settings; `Config.load()` (environment, file, defaults) if left out.
        groups: Properties of layer groups that their tensors do not show.
        transport: What moves the bytes; NIXL if left out. `kvxfer.testing` has an in-process one.
        runtime: Clock, randomness and threads; tests pass a deterministic one.

    Raises:
        GeometryError: If the tensors contradict each other or cannot be expressed.
        ConfigError: If a setting is wrong.
    """

    def __new__(
        cls,
        tensors: Iterable[CacheTensor],
        config: Config | None = None,
        *,
        groups: Iterable[Group] = (),
        transport: Transport | None = None,
        runtime: Runtime | None = None,
    ) -> Self:
        """An `OwnLoopWorker` if the setting `loop` is `own`."""
        own = cls is Worker and given_config(config).loop == "own"
        return super().__new__(cast("type[Self]", _own_loop_worker()) if own else cls)

    def __init__(
        self,
        tensors: Iterable[CacheTensor],
        config: Config | None = None,
        *,
        groups: Iterable[Group] = (),
        transport: Transport | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self._assembly: Final = Assembly.of(tensors, groups, config, transport, runtime)
        self._service: Service | None = None  # once it is open, and after
        self._draining: asyncio.Task[bool] | None = None
        self._hurried = False  # closes without draining
        self._closing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._service is not None:
            raise ClosedError("a worker is entered once")
        site = await assemble(self._assembly)
        service = self._service = Service(site)
        try:
            listener = await service.listen()
            if site.config.world == 1:
                self.join(EngineCard.of([self.card]), key=site.runtime.token(KEY_BYTES))
        except BaseException:
            await self.aclose()
            raise
        _log.info("worker_opened", endpoint=listener.endpoint, rank=site.config.rank, world=site.config.world)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose(drain=error is None)

    def __del__(self) -> None:
        if getattr(self, "_service", None) is not None and self._closing is None and self._assembly.home.here:
            warnings.warn(f"{self!r} was never closed: use `async with`", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        state = "new" if self._service is None else "closed" if self._closing is not None else "open"
        return f"<kvxfer.Worker {self.config.engine}[{self.config.rank}/{self.config.world}] {state}>"

    # --- identity

    @property
    def config(self) -> Config:
        """Effective settings."""
        return self._assembly.config

    @property
    def card(self) -> RankCard:
        """What this rank says of itself; the launcher collects one of each rank.

        Raises:
            ClosedError: If the worker is not open.
        """
        service = self._assembly.home.read(self._entered)
        site, listener = service.site, service.listener
        if listener is None:
            raise ClosedError("the worker does not listen yet")
        return RankCard(
            engine=site.config.engine,
            rank=site.config.rank,
            world=site.config.world,
            endpoint=listener.reached_at(site.config.advertise),
            incarnation=site.incarnation.hex(),
        )

    @property
    def engine(self) -> Issuer:
        """The engine that this rank belongs to: `worker.engine.ticket(request)`.

        Raises:
            TicketError: If it has not joined yet.
        """
        return self._assembly.home.read(self._entered).site.joined

    def join(self, card: EngineCard | Mapping[str, Any], *, key: bytes) -> None:
        """Join an engine of several ranks. One of a single rank has joined itself.

        Args:
            card: Made of the cards of all ranks.
            key: 32 random bytes that all ranks (and the scheduler, if it issues tickets) share.

        Raises:
            TicketError: If this rank is not part of the card, or the key has the wrong length.
        """
        joined = card if isinstance(card, EngineCard) else EngineCard.from_dict(card)
        joined.check_member(self.card)
        service, issuer = self._open, Issuer(joined, key)
        site = service.site
        if site.issuer is None or site.issuer.card.epoch != joined.epoch:
            for link in [*service.links, *service.greeting]:  # these were told another epoch
                link.close("this rank joined an engine")
        site.issuer = issuer

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
        """Offer a request's cache to whoever holds its ticket.

        The blocks belong to the offer until `released()` returns; until then they must not change, beyond what a
        streaming offer has not yet marked as ready.

        Args:
            request: Unique id of the request.
            blocks: Its block ids: a list, an array, or a mapping from group to ids or `Span`.
            tokens: How many tokens the blocks hold, from token 0.
            after: On CUDA required: the blocks may be read once this event (or the work on this stream) has completed.
            attempt: Raise it to offer the same id again.
            streaming: Layers and tokens become ready step by step (`Offer.extend`, `Offer.ready`, `Offer.finish`).
                `blocks` and `tokens` may be given at once or step by step.
            payload: Travels with the last result; for streaming offers give it to `Offer.finish`.

        Raises:
            RequestError: If the id is in use or was just used; `BusyError` if there are too many offers.
            BlocksError: If ids are out of range, too few, or in custody.
            TokensError: If there are no tokens.
            EventError: If `after` is missing or was never recorded.
            ClosedError: If the worker is draining.
        """
        service = self._open
        book = service.prefill.book
        if service.site.draining or self._closing is not None:
            raise ClosedError("this worker is draining or closed: offer on another one")
        if (blocks is None) != (tokens is None) or (blocks is None and not streaming):
            raise RequestError("an offer needs blocks= and tokens=, or streaming=True and none of them")
        if streaming and (payload or after is not None):
            raise RequestError("for a streaming offer, payload= belongs to Offer.finish and after= to Offer.ready")
        entry = book.open(request, attempt)
        offer = Offer(entry)
        try:
            if blocks is not None and tokens is not None:
                offer.extend(blocks, tokens=token_count(tokens))
            if not streaming:
                offer.ready(after=after)
                offer.finish(payload)
        except BaseException:
            book.discard(entry)
            raise
        book.publish(entry)
        return offer

    # --- decode

    def claim(self, ticket: Mapping[str, Any] | Ticket) -> ClaimHandle:
        """Keep a request's lease while it waits for blocks here.

        A fetch that is cancelled or fails while the claim is open can be tried again. When the claim is closed after
        that, the prefill engine frees the blocks.

        Raises:
            TicketError: If the ticket is malformed.
            BusyError: If there are too many claims.
            ClosedError: If the worker is not open.
        """
        service = self._open
        return service.decode.claim(self._ticket(service.site, ticket))

    async def fetch(
        self,
        ticket: Mapping[str, Any] | Ticket,
        blocks: Blocks,
        *,
        tokens: range,
        after: Any = None,
        timeout: float | None = None,
        keep: bool = False,
    ) -> FetchResult:
        """Bring a request's cache into these blocks. `start_fetch` and waiting in one.

        When it returns or raises, no peer writes the blocks any more (`MemoryInDoubtError` alone says otherwise).

        When it is cancelled (`task.cancel()`, `asyncio.wait_for`, a sibling that fails), the prefill ranks that are
        connected free the request's blocks at once, as after `decline`, and its ticket is spent. After an error or a
        time-out they do so `retry_window` (2 s) later. `keep=True`, or a `claim` that is open, holds them for a retry.

        With a time-out it has returned or raised after `timeout` and `config.bounds()["fetch"]` (15 s) more, in which
        a peer that still writes is asked to stop. Without one it waits as long as its request may come;
        `config.bounds()` says after how many seconds it hears of each kind of failure.

        Args:
            ticket: As the prefill side issued it.
            blocks: Destination ids, covering `tokens`; they are the fetch's until it ends.
            tokens: Which tokens; blocks keep what they hold of others, byte for byte. `range(n, n)` if all n are held
                already: then only state and the payload are brought.
            after: On CUDA required: the blocks may be written once this event (or the work on this stream) has
                completed.
            timeout: Seconds; the setting `fetch_timeout` if left out.
            keep: Hold the request's blocks for a retry if this is cancelled or fails, for as long as the lease runs.

        Raises:
            UsageError: If an argument is wrong; nothing was sent.
            PeerError: If the peer cannot be reached, differs, refuses, or is lost.
            TransferError: If the transfer fails or times out.
        """
        return await self.start_fetch(ticket, blocks, tokens=tokens, after=after, timeout=timeout, keep=keep)

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
        """Begin a fetch, to do something while it goes on: `async with worker.start_fetch(...) as transfer:`.

        It returns at once; leaving the block waits for the fetch's end, or cancels it, as `Transfer` says. See `fetch`
        for arguments and errors, and for what a cancellation frees.
        """
        return Transfer(self._begin_fetch(ticket, blocks, tokens, after, timeout, keep=keep))

    async def decline(self, ticket: Mapping[str, Any] | Ticket) -> None:
        """No fetch will come: every prefill rank frees the request's blocks at once. Also while this worker drains.

        Raises:
            PeerError: If a rank could not be told; its lease bounds the wait.
        """
        service = self._open
        await service.decode.decline(self._ticket(service.site, ticket, ends=True))

    # --- watching and closing

    def occupy(self, ctas: int) -> None:
        """Let copies on the GPU occupy so many thread blocks from now on, instead of `copy_ctas`. From any thread.

        Args:
            ctas: 1 to 4096: more while the model leaves the GPU idle. On a CPU it changes nothing.

        Raises:
            ConfigError: If it is out of range.
            ClosedError: If the worker is not open.
        """
        if type(ctas) is not int or not 1 <= ctas <= MAX_CTAS:
            raise ConfigError(f"copies cannot occupy {ctas!r} thread blocks: give a number from 1 to {MAX_CTAS}")
        if self._closing is not None:
            raise ClosedError("this worker is closed")
        self._assembly.home.read(self._entered).site.mover.occupy(ctas)

    def describe(self) -> dict[str, Any]:
        """The worker's state as plain data: identity, peers, arena, threads, offers, transfers and counters."""
        return overview(self.card, self._open, self._assembly)

    def describe_soon(self) -> "Future[dict[str, Any]]":
        """`describe` on the worker's loop, asked for from any thread. Never done while that loop stands still."""
        return soon(self._assembly.home.read(self._entered).site.loop, self.describe)

    def begin_drain(self) -> None:
        """Refuse new work from now on, and tell every peer. What is under way goes on. Idempotent.

        Requests that are on offer may still be fetched. Fetches that wait for an offer are refused: it cannot come.
        """
        self._open.begin_drain()

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new work, tell every peer, and wait for what is under way.

        Args:
            timeout: Seconds to wait at most; the setting `drain_timeout` if left out.

        Returns:
            False if some of it did not end in time; it goes on until the worker is closed.
        """
        service = self._open
        site = service.site
        deadline = site.now() + given_seconds(timeout, site.config.drain_timeout)
        self.begin_drain()
        ends = [offer.wait_end() for offer in service.prefill.book.offers] + service.decode.outcomes()
        if ends:
            await asyncio.wait(ends, timeout=max(0.0, deadline - site.now()))
        return all(end.done() for end in ends)

    async def aclose(self, *, drain: bool = True) -> None:
        """Close the worker: drain (bounded), stop the rest, close links, stop threads, give memory back. Idempotent.

        Cancelling it cuts the drain short, and is let through once the worker is closed. Memory that a silent peer may
        still write is not given back but left to the process's end.
        """
        if self._service is not None:
            self._assembly.home.own(self)
            if self._closing is None:
                if drain and not self._hurried:
                    self._warn_of_a_wait(self._service)
                    self._draining = asyncio.create_task(self.drain(), name="kvxfer drain")
                self._closing = asyncio.create_task(self._close(self._service), name="kvxfer close")
            await see_through(self._closing, self._hurry)

    def _warn_of_a_wait(self, service: Service) -> None:
        """Somebody leaves the worker, and will wonder what takes so long."""
        offers, fetches = [offer.key[0] for offer in service.prefill.book.offers], len(service.decode.outcomes())
        if offers or fetches:
            some = ", ".join(offers[:_NAMED]) + ("" if len(offers) <= _NAMED else ", ...")
            reason = f"{len(offers)} offers that nobody has released ({some}) and {fetches} fetches are waited for"
            _log.warning("close_delayed", timeout=self.config.drain_timeout, reason=reason)

    def _hurry(self) -> None:
        self._hurried = True
        if self._draining is not None:
            self._draining.cancel()

    async def _close(self, service: Service) -> None:
        if self._draining is not None:
            await asyncio.wait({self._draining})
        site = service.site
        until = site.now() + site.config.revoke_timeout + site.config.close_timeout
        await service.end(until)
        await self._assembly.dismantle(site, max(0.0, until - site.now()))
        await site.tasks.drain(site.config.close_timeout)  # memory of peers is unmapped when the last link is gone
        _log.info("worker_closed", rank=site.config.rank, world=site.config.world)

    # --- inside

    @property
    def _open(self) -> Service:
        return self._assembly.home.own(self._entered)

    @property
    def _entered(self) -> Service:
        if self._service is None:
            raise ClosedError("this worker is not open: enter it with `async with`")
        return self._service

    def _begin_fetch(
        self,
        ticket: Mapping[str, Any] | Ticket,
        blocks: Blocks,
        tokens: range,
        after: Any,
        timeout: float | None,
        *,
        keep: bool,
    ) -> Progress:
        service = self._open
        limit = service.site.config.fetch_timeout if timeout is None else timeout
        checked = self._ticket(service.site, ticket)
        return service.decode.start(checked, blocks, tokens=tokens, after=after, timeout=limit, keep=keep)

    def _ticket(self, site: Site, ticket: Mapping[str, Any] | Ticket, *, ends: bool = False) -> Ticket:
        if self._closing is not None or (site.draining and not ends):
            raise ClosedError("this worker is draining or closed: use another one")
        _ = site.joined  # ranks of one engine must be known as such before they fetch
        return Ticket.parse(ticket)


def _own_loop_worker() -> type[Worker]:
    from kvxfer.own_loop import OwnLoopWorker  # it stands on this module

    return OwnLoopWorker
