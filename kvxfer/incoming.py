"""One transfer at the decode rank with one prefill rank: runs the sans-I/O `Receiving` machine."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kvxfer.copy.port import READY, CopyJob, CopyOutcome, Direction, Event
from kvxfer.desk import Desk
from kvxfer.errors import Code, KvxferError, ProtocolError, RefusedError
from kvxfer.events import Until
from kvxfer.fabric.port import Cell, Operation, Outcome, Post, PostResult
from kvxfer.geometry import ChunkGrid, ChunkPlan, CopyPlan, Pieces, TransferPlan
from kvxfer.link import Link
from kvxfer.memory import Extent, ExtentState
from kvxfer.need import Need, Owner
from kvxfer.planning import block_pieces, decode_spans, encode_spans, selection_to_wire
from kvxfer.protocol.messages import (
    Accept,
    Fetch,
    Grant,
    KvAgentResult,
    Message,
    Refuse,
    Route,
    Status,
    Want,
)
from kvxfer.protocol.receiving import ReceiveState, Receiving
from kvxfer.protocol.sending import Failure
from kvxfer.routes.chooser import acceptable
from kvxfer.site import Site, no_hold, resolve
from kvxfer.telemetry import Intervals

__all__ = ["Incoming"]

_NOTHING: Final = CopyPlan(())
_T = TypeVar("_T")


@dataclass(slots=True)
class _Bound:
    plan: TransferPlan
    grid: ChunkGrid
    rows: int


class Incoming:
    """One transfer, from `Fetch` to the last chunk in place.

    Attributes:
        machine: The sans-I/O state.
        link: The control stream; replaced when the same incarnation is reached again.
        route: As the sender chose it.
        over: Resolves when it is known whether the transfer succeeds.
        quiet: Resolves when nobody writes the caller's blocks any more.
    """

    def __init__(self, site: Site, link: Link, transfer: int, need: Need, owner: Owner) -> None:
        self.machine: Final = Receiving(transfer)
        self.link = link
        self.peer: Final = link.peer
        self.route = Route.UNKNOWN
        self.over: Final[asyncio.Future[None]] = site.loop.create_future()
        self.quiet: Final[asyncio.Future[None]] = site.loop.create_future()
        self.bytes = 0
        self.pieces = 0
        self.chunks = 0
        self.descriptors = 0
        self.first_byte: float | None = None
        self.intervals: Final = {name: Intervals() for name in ("queued", "posting", "wire", "gathering", "scattering")}
        self._site = site
        self._need = need
        self._owner = owner
        self._bound: _Bound | None = None
        self._asked: list[Route] = []
        self._queue: deque[int] = deque()
        self._active: set[int] = set()
        self._tasks = 0  # tasks of this transfer that are under way
        self._writing = 0  # copies and reads of ours that may write the caller's blocks
        self._waits: set[asyncio.Task[Any]] = set()  # tasks that only wait for memory, a lane or an event
        self._given_up = False
        self._writable: asyncio.Future[CopyOutcome] | None = None
        self._extents: dict[int, Extent] = {}
        self._granted_at: dict[int, float] = {}
        self._leases: dict[int, float] = {}  # route pull: until when a chunk may begin to be read
        self._cells: dict[int, Cell] = {}
        self._unsaid: list[Message] = []  # a Cancel that waits for our own reads
        self._own_doubt = False
        self._awake: Callable[[], None] = no_hold

    @property
    def layers(self) -> list[int]:
        """Every layer of which this rank sends something."""
        return sorted({layer for selection in self._need.selections for layer in selection.layers})

    @property
    def _desk(self) -> Desk:
        """Where this transfer takes admission."""
        return self._site.receive_desk if self.route is Route.STAGED else self._site.in_place_desk(self.peer)

    @property
    def in_doubt(self) -> bool:
        """Whether something may write the caller's blocks: on `staged` nothing but our own scatter does."""
        theirs = self.route is Route.DIRECT and not self.machine.ended and bool(self.machine.granted)
        return self._own_doubt or self._writing > 0 or theirs

    @property
    def finished(self) -> bool:
        """Whether nothing of it is under way or in doubt, staging memory included."""
        return self.quiet.done() and not self._extents

    def start(self) -> None:
        """Ask."""
        site, need = self._site, self._need
        means = site.means(self.peer, trusted=self.link.trusted)
        left = 0xFFFF_FFFF if need.deadline is None else max(1, int((need.deadline - site.now()) * 1000))
        self._asked = acceptable(site.config.route, means)
        sent = self.link.send(
            Fetch(
                transfer=self.machine.transfer,
                ticket=need.ticket,
                selections=[selection_to_wire(selection) for selection in need.selections],
                spans=encode_spans(need.spans, sorted({s.group for s in need.selections})),
                token_start=need.tokens.start,
                token_stop=need.tokens.stop,
                routes=self._asked,
                max_extent_bytes=min(site.config.chunk_bytes, site.receive_desk.share.capacity),
                timeout_ms=min(left, 0xFFFF_FFFF),
            )
        )
        if not sent:  # it was lost since it was looked up, so `lost` will not tell
            self.lost(Failure(Status.FAILED, Code.PEER_LOST, "the control stream was lost"))

    # --- messages

    def accepted(self, message: Accept) -> None:
        """The peer made a plan: make the same one."""
        if not self.machine.accept(message):
            return
        if message.route not in self._asked:
            reason = (
                f"the peer chose the route {message.route.name.lower()}, which was not among those it was asked for"
            )
            self.stop(Failure(Status.FAILED, Code.NO_COMMON_ROUTE, reason))
            return
        self.route = message.route
        self._awake = self._site.fabric.hold_awake()  # over TCP the target moves the data
        self._spawn(self._bind(message), f"kvxfer bind {message.transfer}")

    def refused(self, message: Refuse) -> None:
        """The peer refused."""
        self._site.metrics.refused(message.code, by_peer=True)
        self.machine.refused(message)
        self._settle()

    def wanted(self, message: Want) -> None:
        """Chunks are ready at the peer."""
        chunks = self.machine.wanted(message)
        self._leases.update(dict.fromkeys(chunks, self._site.now() + message.lease_ms / 1000))
        self._queue.extend(chunks)
        self._pump()

    def result(self, message: KvAgentResult) -> None:
        """A chunk has landed, or the transfer ended at the peer."""
        stale = self.machine.stale
        chunk = self.machine.result(message)
        if self.machine.stale > stale:
            self._site.metrics.result_dropped("stale")
        if chunk is not None:
            self._arrived(chunk, message)
        if self.machine.failure is not None and self.machine.state is ReceiveState.MOVING:
            self.stop(self.machine.failure)
        self._settle()

    def stop(self, failure: Failure) -> None:
        """Give up; `quiet` resolves when memory is safe."""
        self._give_up()
        self._unsaid += self.machine.cancel(failure)
        self._settle()

    def lost(self, failure: Failure) -> None:
        """The session is gone, or the peer is silent."""
        self._give_up()
        self.machine.lost(failure)
        self._settle()

    def resume(self, link: Link) -> None:
        """The same incarnation is back: ask what became of the transfer."""
        self.link = link
        if self.machine.state is ReceiveState.LOST:
            self._unsaid = self.machine.resume()
            self._settle()

    def _give_up(self) -> None:
        """Begin nothing new, and wait for nothing but what is in flight."""
        self._given_up = True
        self._queue.clear()
        for cell in self._cells.values():
            cell.kill()
        for task in self._waits:
            task.cancel()

    # --- accepting

    async def _bind(self, message: Accept) -> None:
        site, need = self._site, self._need
        try:
            await site.warmed(self.peer)
            spans = decode_spans(message.spans)
            rows = sum(len(span.ids) for span in spans.values())

            def make() -> tuple[_Bound, int]:
                pair = site.plans.incoming(self.peer, need.selections)
                plan = pair.bind(spans, need.spans, need.tokens)
                grid = ChunkGrid(
                    pair.layers, message.layers_per_chunk, message.tokens_per_chunk, need.tokens.start, need.tokens.stop
                )
                same = len(grid) == message.chunks and plan.digest(grid) == message.digest
                if not same or plan.whole.bytes != message.bytes:
                    raise _plan_differs(message)
                return _Bound(plan, grid, rows), plan.whole.copy().pieces

            bound, self.pieces = await site.plans.run(make, rows=rows)
        except KvxferError as error:
            raise RefusedError(str(error), reason=Code.PLAN_DIFFERS) from error
        self._bound, self.chunks = bound, message.chunks
        self._owner.planned(self.layers, dict.fromkeys(bound.grid.layers, bound.grid.windows))
        self._pump()

    # --- granting

    def _pump(self) -> None:
        """Take chunks from the queue while the credit window has room."""
        bound = self._bound
        while bound is not None and self._queue and len(self._active) < self._site.config.window:
            chunk = self._queue.popleft()
            self._active.add(chunk)
            work = self._grant(bound, chunk) if self.route is not Route.PULL else self._read(bound, chunk)
            self._spawn(work, f"kvxfer receive {self.machine.transfer}/{chunk}")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run a step; whatever it raises stops the transfer."""
        self._tasks += 1
        self._site.tasks.spawn(self._supervise(work), name, failed=self._broken)

    async def _supervise(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            if not self._given_up:
                raise
        except KvxferError as error:
            code = error.reason if isinstance(error, RefusedError) else error.code
            self.stop(Failure(Status.FAILED, code, str(error)))
        finally:
            self._tasks -= 1
            self._settle()

    def _broken(self, error: BaseException) -> None:
        self.stop(Failure(Status.FAILED, Code.FAILED, f"a step of the transfer failed: {error!r}"))

    @contextmanager
    def _waiting(self) -> Generator[None, None, None]:
        """The task inside only waits: giving up the transfer cancels it."""
        task = asyncio.current_task()
        if task is None or self._given_up:
            raise asyncio.CancelledError
        self._waits.add(task)
        try:
            yield
        finally:
            self._waits.discard(task)

    async def _grant(self, bound: _Bound, chunk: int) -> None:
        site, config = self._site, self._site.config
        began = site.now()
        staged = self.route is Route.STAGED
        part = await site.plans.run(lambda: bound.plan.chunk(bound.grid, chunk), rows=bound.rows)
        if not staged:
            await self._when_writable()
        wait = config.grant_lease if self._need.deadline is None else max(0.001, self._need.deadline - began)
        with self._waiting():
            # on `direct` the extent is no memory, but the chunk's part of what a peer may write in place at once
            extent = await self._desk.acquire(self.peer.name, max(1, part.staged_bytes if staged else part.bytes), wait)
        if self.machine.state is not ReceiveState.MOVING:
            self._desk.release(extent)
            return
        self._desk.share.write(extent)
        self._extents[chunk] = extent
        address, length = (extent.address, part.staged_bytes) if staged else (0, 0)
        now = site.now()
        self.intervals["queued"].add(began, now)
        self._granted_at[chunk] = now
        grants = self.machine.grant([Grant(chunk, address, length)], int(config.grant_lease * 1000))
        self.link.send(*grants)

    async def _when_writable(self) -> None:
        """Wait for `after`: from then on the caller's blocks may be written."""
        if self._need.after is READY:
            return
        if self._writable is None:
            after = Until(self._need.after, lambda: self._given_up)
            self._writable = asyncio.ensure_future(self._copied(_NOTHING, after))
        with self._waiting():
            outcome = await asyncio.shield(self._writable)
        if outcome.error is not None:
            raise outcome.error

    async def _read(self, bound: _Bound, chunk: int) -> None:
        """Route `pull`: read a chunk into place, then tell the peer."""
        site = self._site
        part = await site.plans.run(lambda: bound.plan.chunk(bound.grid, chunk), rows=bound.rows)
        pieces = await site.plans.run(lambda: part.copy().enumerate().merged(), rows=self.pieces)
        await self._when_writable()
        release = site.lanes.hold(self.peer)
        try:
            with self._waiting():
                lane = await site.lanes.connect(self.peer)
            if self.machine.state is not ReceiveState.MOVING:
                return
            self.machine.reading([chunk])
            if len(pieces):  # else a window in which no group has a row
                await self._post_read(chunk, lane, pieces)
            if self.machine.state is ReceiveState.MOVING:
                self.link.send(*self.machine.landed([chunk]))
        finally:
            self._cells.pop(chunk, None)
            release()

    async def _post_read(self, chunk: int, lane: str, pieces: Pieces) -> None:
        site = self._site
        cell = self._cells[chunk] = Cell(self._leases[chunk])
        done: asyncio.Future[PostResult] = site.loop.create_future()
        local = block_pieces(site.geometry, pieces.dst, pieces.nbytes)
        remote = block_pieces(site.plans.geometry(self.peer), pieces.src, pieces.nbytes)
        self.descriptors += len(pieces)
        self._writing += 1

        def ended(result: PostResult) -> None:
            error = result.error
            # where the transport says that the peer is gone, it has ended its own work too
            gone = error is not None and error.disconnected
            self._own_doubt = self._own_doubt or (result.outcome is Outcome.IN_DOUBT and not gone)
            self._wrote(done, result)

        site.fabric.post(
            Post(lane, Operation.READ, local, remote, cell, lambda result: site.hand_over(lambda: ended(result)))
        )
        result = await done
        if result.first:
            self.intervals["posting"].add(result.first, result.first + result.posting)
            self.intervals["wire"].add(result.first, result.finished)
        if result.outcome is not Outcome.DONE:
            reason = str(result.error or "the lease ran out before the chunk was read")
            self.stop(Failure(Status.FAILED, Code.FABRIC if result.error else Code.TIMEOUT, reason))

    # --- landing

    def _arrived(self, chunk: int, message: KvAgentResult) -> None:
        """A granted chunk is in staging memory (or in place)."""
        now = self._site.now()
        self.first_byte = self.first_byte or now
        granted = self._granted_at.pop(chunk, None)
        if granted is not None:
            self.intervals["wire"].add(granted, now)
        bound = self._bound
        if self.machine.state is not ReceiveState.MOVING or bound is None:
            return  # it is being stopped: `_settle` gives the extent back
        extent = self._extents.pop(chunk, None)
        if extent is None or self.route is not Route.STAGED:
            if extent is not None:
                self._desk.release(extent)
            self._done(chunk, message.bytes)
            return
        self._desk.share.scatter(extent)
        self._spawn(self._scatter(bound, chunk, extent, message.bytes), f"kvxfer scatter {message.transfer}/{chunk}")

    async def _scatter(self, bound: _Bound, chunk: int, extent: Extent, nbytes: int) -> None:
        site = self._site
        try:
            part: ChunkPlan = await site.plans.run(lambda: bound.plan.chunk(bound.grid, chunk), rows=bound.rows)
            plan = await site.plans.run(lambda: part.scatter(extent.address), rows=bound.rows)
            await self._when_writable()
            if self.machine.state is not ReceiveState.MOVING:
                return
            outcome = await self._copied(plan)
            if outcome.finished > outcome.started:
                self.intervals["scattering"].add(outcome.started, outcome.finished)
            if outcome.error is not None:
                self.stop(Failure(Status.FAILED, outcome.error.code, f"scatter failed: {outcome.error}"))
                return
        finally:
            self._desk.release(extent)
        self._done(chunk, nbytes)

    def _done(self, chunk: int, nbytes: int) -> None:
        self.machine.chunk_done(chunk)
        self.bytes += nbytes
        self._active.discard(chunk)
        if self._bound is not None:
            self._owner.landed(self._bound.grid.of(chunk)[0])
        self._pump()

    async def _copied(self, plan: CopyPlan, after: Event = READY) -> CopyOutcome:
        done: asyncio.Future[CopyOutcome] = self._site.loop.create_future()
        self._writing += bool(plan.segments)
        wrote = self._wrote if plan.segments else resolve

        def ended(outcome: CopyOutcome) -> None:
            self._site.hand_over(lambda: wrote(done, outcome))

        try:
            self._site.executor.submit(CopyJob(plan, ended, after), Direction.SCATTER)
        except KvxferError:
            self._writing -= bool(plan.segments)
            raise
        return await done

    def _wrote(self, done: "asyncio.Future[_T]", outcome: _T) -> None:
        """A copy or a read of ours has ended; whoever waited for it may have been cancelled."""
        self._writing -= 1
        resolve(done, outcome)
        self._settle()

    # --- ending

    def _settle(self) -> None:
        """Give back what the peer is through with; quarantine what it may still write."""
        machine = self.machine
        if self._unsaid and not (self.route is Route.PULL and (self._writing or self._own_doubt)):
            # on `pull` it also says that nothing is read any more
            unsaid, self._unsaid = self._unsaid, []
            self.link.send(*unsaid)
        lost = machine.state is ReceiveState.LOST
        if machine.ended:
            extents, self._extents = self._extents, {}
            for extent in extents.values():
                self._give_back(extent)
        elif lost:
            for extent in self._extents.values():
                if extent.state is not ExtentState.QUARANTINED:
                    self._desk.quarantine(extent, f"{self.peer.name} is silent")
                    self._site.metrics.quarantined(extent.length)
        if (machine.ended or machine.failure is not None) and not self.over.done():
            self.over.set_result(None)
        safe = (machine.ended or lost) and not self._tasks and not self.in_doubt
        if safe and not self.quiet.done():
            self._awake()
            self.quiet.set_result(None)
        if self.finished:
            self._owner.settled()

    def _give_back(self, extent: Extent) -> None:
        desk = self._desk
        if extent.state is ExtentState.QUARANTINED:
            self._site.metrics.settled(extent.length)
            desk.settle(extent)
        else:
            desk.release(extent)


def _plan_differs(message: Accept) -> KvxferError:
    return ProtocolError(
        f"the two sides plan transfer {message.transfer} differently "
        f"({message.chunks} chunks, {message.bytes} bytes there)"
    )
