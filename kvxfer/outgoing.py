"""One transfer at the prefill rank: runs the sans-I/O `Sending` machine over copies and posts."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from kvxfer.copy.port import READY, CopyJob, CopyOutcome, Direction, Event
from kvxfer.errors import Code, FabricError, KvxferError, ProtocolError, RefusedError
from kvxfer.events import Until, join
from kvxfer.fabric.port import Cell, Operation, Outcome, Post, PostResult
from kvxfer.geometry import ChunkGrid, ChunkPlan, CopyPlan, TransferPlan, check_state
from kvxfer.link import Link
from kvxfer.memory import Extent
from kvxfer.offers import Offer
from kvxfer.planning import block_pieces, decode_spans, encode_spans, fit_grid, merged_pieces, staging_pieces
from kvxfer.protocol.messages import Accept, Fetch, Grant, Landed, Message, Reserve, Route, Status, Timings
from kvxfer.protocol.sending import Failure, Sending, SendState
from kvxfer.routes.chooser import Choice, choose
from kvxfer.site import Site, no_hold, resolve
from kvxfer.telemetry import Intervals, TransferStats, logger

__all__ = ["Outgoing"]

_log: Final = logger("kvxfer.send")
_NOTHING: Final = CopyPlan(())
_PULL_AHEAD: Final = 16
"""Chunks that a puller may have before it: enough for a window of any sensible size, few enough for one lease."""
_SMALLEST_STREAMED_CHUNK: Final = 1 << 20
"""Bytes below which streaming cuts no smaller chunks: their control frames would cost more than the overlap gains."""


@dataclass(slots=True)
class _Bound:
    """A transfer that was accepted: plan, grid, and where the chunks stand."""

    plan: TransferPlan
    grid: ChunkGrid
    remaining: list[int]
    choice: Choice
    pieces: int

    @property
    def rows(self) -> int:
        """Blocks that a chunk's plan walks over, about."""
        return sum(len(span.ids) for span in self.plan.src_spans.values())


@dataclass(frozen=True, slots=True)
class _Moved:
    """How one chunk ended on this side."""

    outcome: Outcome
    error: KvxferError | None
    nbytes: int
    gather: tuple[float, float]
    post: PostResult | None

    @property
    def may_read(self) -> bool:
        """Whether our post may still read the source; not where the transport says that the peer is gone."""
        gone = isinstance(self.error, FabricError) and self.error.disconnected
        return self.outcome is Outcome.IN_DOUBT and not gone


class Outgoing:
    """One transfer, from `Fetch` to its last result.

    Attributes:
        machine: The sans-I/O state.
        link: Where results go; replaced when the same incarnation reconnects.
        offer: The offer that it reads, once there is one.
        stats: Set when it ends.
    """

    def __init__(self, site: Site, link: Link, fetch: Fetch, ended: Callable[["Outgoing"], None]) -> None:
        self.machine: Final = Sending(fetch)
        self.link = link
        self.offer: Offer | None = None
        self.stats: TransferStats | None = None
        self._site = site
        self._plans = site.plans
        self.peer: Final = link.peer
        self._means = site.means(link.peer, trusted=link.trusted)
        self._ended = ended
        self._bound: _Bound | None = None
        self._planning = False
        self._cells: dict[int, Cell] = {}
        self._began = site.now()
        self._intervals = {name: Intervals() for name in ("queued", "gathering", "posting", "wire")}
        self._moved_bytes = 0
        self._descriptors = 0
        self._readable = 0  # route pull: chunks announced and not yet read
        self._waits: set[asyncio.Task[Any]] = set()  # tasks that only wait for memory or a lane
        self._doubt = False  # a post of ours may still read the blocks
        self._unread_timer: asyncio.TimerHandle | None = None
        self._awake: Callable[[], None] = no_hold

    @property
    def peer_name(self) -> str:
        """How logs name the decode rank."""
        return self.peer.name

    # --- news

    def attach(self, offer: Offer) -> None:
        """The offer is there."""
        self.offer = offer
        offer.transfers.add(self)
        self.offer_grew()

    def offer_grew(self) -> None:
        """More is ready, or the offer was finished."""
        offer, fetch = self.offer, self.machine.fetch
        if offer is None or self.machine.state is SendState.ENDED:
            return
        bound = self._bound
        if bound is not None and bound.plan.pair.has_state and offer.tokens != fetch.token_stop:
            reason = f"the offer grew to {offer.tokens} tokens, and its state is no longer that of {fetch.token_stop}"
            self.stop(Failure(Status.FAILED, Code.TOKENS, reason))
        elif bound is not None:
            self._announce()
        elif offer.tokens >= fetch.token_stop:
            if not self._planning:
                self._planning = True
                self._site.tasks.spawn(
                    self._accept(offer),
                    f"kvxfer accept {fetch.transfer}",
                    failed=lambda error: self.refuse(Code.FAILED, f"the plan could not be made: {error!r}"),
                )
        elif offer.finished:
            self.refuse(
                Code.TOKENS_OUTSIDE_OFFER,
                f"tokens {fetch.token_start}..{fetch.token_stop - 1} were asked, but {offer.tokens} are on offer",
            )

    def refuse(self, code: Code, reason: str) -> None:
        """End before anything moved."""
        if self.machine.state is SendState.PARKED:
            self._site.metrics.refused(code, by_peer=False)
            self._say(self.machine.refuse(code, reason))

    def stop(self, failure: Failure) -> None:
        """Give up: kill what is not posted, wait for what is."""
        messages = self.machine.stop(failure)
        for cell in self._cells.values():
            cell.kill()
        for task in self._waits:
            task.cancel()
        if self.machine.being_read and self._unread_timer is None:
            bound = self._site.now() + self._site.config.revoke_timeout
            self._unread_timer = self._site.at(bound, lambda: self._say(self.machine.unread(in_doubt=True)))
        self._say(messages)

    def cancelled(self, failure: Failure) -> None:
        """The decode rank gave up, or asks (after a lost session) what became of the transfer.

        On `pull` that also says that it reads nothing any more.
        """
        self._say(self.machine.unread())
        self.stop(failure)

    def unread_at_last(self) -> bool:
        """Route `pull`, after it ended in doubt: the decode rank has said that it reads nothing any more.

        Returns:
            Whether that ends the doubt; on other routes it is our own post that is in doubt.
        """
        if self.machine.route is not Route.PULL:
            return False
        if self.offer is not None:
            self.offer.left(self)
        return True

    def reserve(self, message: Reserve) -> None:
        """The decode rank granted memory."""
        bound = self._bound
        grants = self.machine.reserve(message)
        if bound is None:
            return
        deadline = self._site.now() + message.lease_ms / 1000
        for grant in grants:
            cell = self._cells[grant.chunk] = Cell(deadline)
            self._site.tasks.spawn(
                self._move(bound, grant, cell),
                f"kvxfer send {self.machine.transfer}/{grant.chunk}",
                failed=partial(self._broken, grant.chunk, cell),
            )

    def landed(self, message: Landed) -> None:
        """The decode rank has read chunks: confirm them if the offer was held without a gap."""
        bound, offer = self._bound, self.offer
        for chunk in self.machine.landed(message):
            if bound is None or offer is None:
                continue
            nbytes = bound.plan.chunk(bound.grid, chunk).bytes
            self._moved_bytes += nbytes
            self._readable -= 1
            self._say(self.machine.moved(chunk, nbytes, Timings()))
        self._announce()

    # --- accepting

    async def _accept(self, offer: Offer) -> None:
        try:
            await self._site.warmed(self.peer)
            rows = sum(len(span.ids) for span in offer.spans.values())
            bound, message = await self._plans.run(lambda: self._bind(offer), rows=rows)
        except KvxferError as error:
            self.refuse(error.reason if isinstance(error, RefusedError) else error.code, str(error))
            return
        if self.machine.state is not SendState.PARKED:
            return
        self._bound = bound
        if bound.choice.fallback:
            self._site.metrics.fell_back(bound.choice.fallback)
            _log.warning(
                "route_fell_back", peer=self.peer_name, transfer=message.transfer, reason=bound.choice.fallback
            )
        if bound.choice.route is Route.PULL:
            self._awake = self._site.fabric.hold_awake()  # a target that others read from must make progress
        self._say(self.machine.accept(message))
        self._announce()

    def _bind(self, offer: Offer) -> tuple[_Bound, Accept]:
        """Plan the transfer. Pure: may run in a worker thread."""
        fetch, config = self.machine.fetch, self._site.config
        tokens = range(fetch.token_start, fetch.token_stop)
        pair = self._plans.outgoing(self.peer, fetch.selections)
        check_state(pair, tokens, offer.tokens)
        plan = pair.bind(offer.spans, decode_spans(fetch.spans), tokens)
        whole = plan.whole.copy()
        pieces = merged_pieces(plan) if self._means.direct else whole.pieces
        choice = choose(config.route, self._means, fetch.routes, nbytes=plan.whole.bytes, pieces=pieces)
        limit = min(config.chunk_bytes, fetch.max_extent_bytes or config.chunk_bytes)
        if choice.route is Route.STAGED:
            limit = min(limit, self._site.send_desk.share.capacity)
        target = limit if offer.finished else min(limit, max(_SMALLEST_STREAMED_CHUNK, plan.whole.bytes // 8))
        layers = None if offer.finished else 1
        grid = fit_grid(plan, target_bytes=target, limit_bytes=limit, layers_per_chunk=layers)
        message = Accept(
            transfer=fetch.transfer,
            route=choice.route,
            bytes=plan.whole.bytes,
            spans=encode_spans(offer.spans, pair.groups),
            layers_per_chunk=grid.layers_per_chunk,
            tokens_per_chunk=grid.tokens_per_chunk,
            chunks=len(grid),
            digest=plan.digest(grid),
        )
        return _Bound(plan, grid, list(range(len(grid))), choice, whole.pieces), message

    def _announce(self) -> None:
        """Tell the decode rank which chunks may go now."""
        bound, offer = self._bound, self.offer
        if bound is None or offer is None or self.machine.state is not SendState.MOVING:
            return
        ready = [chunk for chunk in bound.remaining if offer.readiness.events(*bound.grid.of(chunk)) is not None]
        if self.machine.route is Route.PULL:
            # a lease runs from the announcement on, so no more is announced than the other side may soon begin to read
            ready = ready[: max(0, _PULL_AHEAD - self._readable)]
            self._readable += len(ready)
        if ready:
            gone = set(ready)
            bound.remaining = [chunk for chunk in bound.remaining if chunk not in gone]
            if self.machine.route is Route.PULL:
                self._site.tasks.spawn(self._announce_readable(bound, ready), f"kvxfer want {self.machine.transfer}")
            else:
                self._say(self.machine.ready(ready))
        if offer.finished:
            self._say(self.machine.finish_offer(offer.payload))

    async def _announce_readable(self, bound: _Bound, chunks: list[int]) -> None:
        """Route `pull`: the peer may read at once, so a chunk is announced only when its events have fired."""
        for chunk in chunks:
            outcome = await self._gathered(bound, chunk, _NOTHING)
            if outcome.error is not None:
                self.stop(Failure(Status.FAILED, outcome.error.code, str(outcome.error)))
                return
            lease = int(self._site.config.grant_lease * 1000)
            self._say(self.machine.ready([chunk], lease))

    # --- moving

    async def _move(self, bound: _Bound, grant: Grant, cell: Cell) -> None:
        chunk, site = grant.chunk, self._site
        began = site.now()
        extent: Extent | None = None
        moved = _Moved(Outcome.STOPPED, None, 0, (0.0, 0.0), None)
        release = site.lanes.hold(self.peer)
        try:
            part = await self._plans.run(lambda: bound.plan.chunk(bound.grid, chunk), rows=bound.rows)
            if part.bytes == 0:  # a window in which no group has a row
                self._say(self.machine.moved(chunk, 0, Timings()))
                return
            with self._waiting():
                lane = await site.lanes.connect(self.peer)
                if self.machine.route is Route.STAGED:
                    extent = await site.send_desk.acquire(self.peer_name, part.staged_bytes, site.config.grant_lease)
                    site.send_desk.share.write(extent)
            self._intervals["queued"].add(began, site.now())
            moved = await self._gather_and_post(bound, grant, part, extent, lane, cell)
        except KvxferError as error:
            moved = _Moved(Outcome.FAILED, error, 0, (0.0, 0.0), None)
        except asyncio.CancelledError:
            if not cell.kill():  # the worker is closing and could not wait for the post
                raise
        finally:
            self._cells.pop(chunk, None)
            release()
        if extent is not None and moved.may_read:
            site.send_desk.quarantine(extent, "our own post did not end")
            site.metrics.quarantined(extent.length)
        elif extent is not None:
            site.send_desk.release(extent)
        self._report(chunk, moved)

    @contextmanager
    def _waiting(self) -> Generator[None, None, None]:
        """The task inside only waits: giving up the transfer cancels it."""
        task = asyncio.current_task()
        if task is None or self.machine.state is not SendState.MOVING:
            raise asyncio.CancelledError
        self._waits.add(task)
        try:
            yield
        finally:
            self._waits.discard(task)

    def _broken(self, chunk: int, cell: Cell, error: BaseException) -> None:
        outcome = Outcome.FAILED if cell.kill() else Outcome.IN_DOUBT
        self._report(chunk, _Moved(outcome, FabricError(f"moving it failed: {error!r}"), 0, (0.0, 0.0), None))

    async def _gather_and_post(
        self, bound: _Bound, grant: Grant, part: ChunkPlan, extent: Extent | None, lane: str, cell: Cell
    ) -> _Moved:
        site = self._site
        if extent is None:
            gather = _NOTHING
            pieces = await self._plans.run(lambda: part.copy().enumerate().merged(), rows=bound.pieces)
            local = block_pieces(site.geometry, pieces.src, pieces.nbytes)
            remote = block_pieces(self._plans.geometry(self.peer), pieces.dst, pieces.nbytes)
        else:
            gather = await self._plans.run(lambda: part.gather(extent.address), rows=bound.rows)
            if grant.length < part.staged_bytes or not self.peer.body.staging:
                raise ProtocolError(f"{grant.length} bytes were granted for a chunk of {part.staged_bytes}")
            local = staging_pieces(site.arena, extent.address, part.staged_bytes)
            remote = staging_pieces(self.peer.body.staging[0], grant.address, part.staged_bytes)
        self._descriptors += len(local.pieces)
        done: asyncio.Future[_Moved] = site.loop.create_future()
        timing: list[tuple[float, float]] = [(0.0, 0.0)]

        def finish(outcome: Outcome, error: KvxferError | None, post: PostResult | None) -> None:
            moved = _Moved(outcome, error, part.bytes, timing[0], post)
            site.hand_over(lambda: resolve(done, moved))

        def posted(result: PostResult) -> None:
            finish(result.outcome, result.error, result)

        def gathered(outcome: CopyOutcome) -> None:  # on the executor's thread: straight on to the fabric's
            if gather.segments:
                timing[0] = (outcome.started, outcome.finished)
            if outcome.error is not None:
                cell.kill()
                finish(Outcome.FAILED, outcome.error, None)
            else:
                site.fabric.post(Post(lane, Operation.WRITE, local, remote, cell, posted))

        site.executor.submit(CopyJob(gather, gathered, self._after(bound, grant.chunk)), Direction.GATHER)
        return await done

    def _after(self, bound: _Bound, chunk: int) -> Event:
        """When a chunk may be read; at once when the transfer is given up, whose dead cells then let no byte out."""
        events = self.offer.readiness.events(*bound.grid.of(chunk)) if self.offer is not None else []
        return Until(join(events), lambda: self.machine.state is not SendState.MOVING) if events else READY

    async def _gathered(self, bound: _Bound, chunk: int, plan: CopyPlan) -> CopyOutcome:
        done: asyncio.Future[CopyOutcome] = self._site.loop.create_future()

        def ended(outcome: CopyOutcome) -> None:
            self._site.hand_over(lambda: resolve(done, outcome))

        self._site.executor.submit(CopyJob(plan, ended, self._after(bound, chunk)), Direction.GATHER)
        return await done

    # --- reporting

    def _report(self, chunk: int, moved: _Moved) -> None:
        post = moved.post
        if moved.gather[1]:
            self._intervals["gathering"].add(*moved.gather)
        if post is not None and post.first:
            self._intervals["wire"].add(post.first, post.finished)
            self._intervals["posting"].add(post.first, post.first + post.posting)
        if moved.outcome is Outcome.DONE and post is not None:
            self._moved_bytes += moved.nbytes
            timings = Timings(
                gather_us=_us(moved.gather[1] - moved.gather[0]),
                post_us=_us(post.posting),
                wire_us=_us(post.finished - post.first),
            )
            self._say(self.machine.moved(chunk, moved.nbytes, timings))
            return
        if moved.outcome is Outcome.STOPPED:
            failure = Failure(Status.EXPIRED, Code.TIMEOUT, "the grant's lease ran out before the chunk was posted")
        else:
            code = moved.error.code if moved.error is not None else Code.FAILED
            failure = Failure(Status.FAILED, code, str(moved.error or "the chunk could not be moved"))
        self._doubt = self._doubt or (moved.may_read and self.machine.route is not Route.STAGED)
        self.stop(failure)
        self._say(self.machine.dropped(chunk, in_doubt=moved.outcome is Outcome.IN_DOUBT))

    def _say(self, messages: list[Message]) -> None:
        if messages:
            self.link.send(*messages)
        if self.machine.state is SendState.ENDED and self.stats is None:
            self._finish()

    def _finish(self) -> None:
        now, machine, spent = self._site.now(), self.machine, self._intervals
        bound = self._bound
        failure = machine.failure
        self.stats = TransferStats(
            route=machine.route.name.lower(),
            why=bound.choice.why if bound else "",
            bytes=self._moved_bytes,
            pieces=bound.pieces if bound else 0,
            chunks=len(bound.grid) if bound else 0,
            descriptors=self._descriptors,
            peers=(self.peer_name,),
            queued=spent["queued"].length,
            gathering=spent["gathering"].length,
            posting=spent["posting"].length,
            wire=spent["wire"].length,
            scattering=0.0,
            started=self._began,
            first_byte=spent["wire"].first,
            finished=now,
        )
        _log.info(
            "transfer_sent" if failure is None else "transfer_failed",
            peer=self.peer_name,
            request=machine.fetch.ticket.request,
            transfer=machine.transfer,
            route=self.stats.route,
            bytes=self._moved_bytes,
            chunks=self.stats.chunks,
            duration=self.stats.duration,
            outcome=failure.code.name.lower() if failure else "ok",
            reason=failure.reason if failure else "",
        )
        self._awake()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        self._ended(self)
        offer = self.offer
        if offer is not None:
            offer.stats.append(self.stats)
            reads = self._doubt or (machine.in_doubt and machine.route is Route.PULL)
            offer.left(self, in_doubt=self.peer_name if reads else "")


def _us(seconds: float) -> int:
    return max(0, int(seconds * 1e6))
