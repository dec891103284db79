"""One transfer in: what one prefill rank sends of a request, from `Fetch` to the last chunk in place.

`Receiver.run` is that from top to bottom. Messages come in beside it: they are fed to the state machine
(`protocol.receiving`) where the frame is handled, so that what breaks the protocol is raised there, and wake whoever
waits for them. What counts memory is done where the news comes in, and not by whoever goes on with it a turn later.

Whatever goes wrong ends in `stop` or `lost`. Then nothing new begins, and `_settle` gives back what the peer is through
with, and quarantines what it may still write.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvxfer.copy.mover import Copy
from kvxfer.copy.port import READY, CopyJob, CopyOutcome, Direction, Outcome, Passage, Post, has_fired
from kvxfer.copy.tables import NOTHING, Tables
from kvxfer.decode.checking import Checking
from kvxfer.desk import Desk
from kvxfer.encoding import encode_spans, joined_spans, selection_to_wire
from kvxfer.errors import Code, KvxferError, ProtocolError, RefusedError, Step, TransferFailedError
from kvxfer.exposure import Exposure
from kvxfer.fabric.port import Operation
from kvxfer.geometry import BlockLists, ChunkGrid, PairPlan, Pieces, Selection, SumPlan, cut_digest
from kvxfer.link import Link
from kvxfer.mapped import may_be_elsewhere
from kvxfer.memory import Extent, ExtentState
from kvxfer.planning import IN_PLACE, Bound, bind, block_pieces
from kvxfer.protocol import messages as wire
from kvxfer.protocol.messages import FOREVER_MS, WHOLE, Grant, KvAgentResult, Route, Status
from kvxfer.protocol.receiving import ReceiveState, Receiving
from kvxfer.protocol.sending import Failure
from kvxfer.protocol.session import PeerInfo
from kvxfer.rebuilding import runs_on, want_end
from kvxfer.site import Site, no_hold, resolve
from kvxfer.tally import Tally
from kvxfer.telemetry import logger

if TYPE_CHECKING:
    from kvxfer.decode.fetch import Fetch

__all__ = ["Receiver"]

_T = TypeVar("_T")
_log: Final = logger("kvxfer.worker")
_FLUSH: Final = replace(NOTHING, from_nic=True)
_HOPEFUL: Final = frozenset({ReceiveState.ASKED, ReceiveState.MOVING, ReceiveState.DONE})


class Grants:
    """What one transfer puts into its peer's hands: staging memory, or in place its part of what the peer may write.

    Attributes:
        desk: Where it comes from.
        staged: Whether it is staging memory.
        theirs: What the peer may be writing, by chunk; under `AHEAD` what `Fetch` grants before any answer.
        ours: Staging memory that the peer is through with, until it has been scattered from, by chunk.
        copied: Those of them that are being scattered from.
        lease_ms: For how long `Fetch` grants, from its arrival on.
    """

    AHEAD: Final = -1

    def __init__(self, site: Site, peer: PeerInfo) -> None:
        self.desk: Desk = site.receive_desk
        self.staged = True
        self.theirs: Final[dict[int, Extent]] = {}
        self.ours: Final[dict[int, Extent]] = {}
        self.copied: Final[set[int]] = set()
        self.lease_ms = 0
        self._site: Final = site
        self._peer: Final = peer

    def choose(self, *, staged: bool) -> None:
        """It is known where memory comes from."""
        self.staged = staged
        self.desk = self._site.receive_desk if staged else self._site.in_place_desk(self._peer)

    def take_ahead(self, nbytes: int) -> bool:
        """Grant so much with the question, if it is free right now."""
        extent = self.desk.take(self._peer.account, max(1, nbytes))
        if extent is not None:
            self.give(self.AHEAD, extent)
            self.lease_ms = self.next_lease_ms()
        return extent is not None

    def give(self, chunk: int, extent: Extent) -> None:
        """The peer is about to hear of it."""
        self.desk.share.write(extent)
        self.theirs[chunk] = extent

    def next_lease_ms(self) -> int:
        """For how long a grant holds that is given now."""
        return self._site.lease_ms(self.desk.share.held_bytes(self._peer.account))

    def arrived(self, chunk: int) -> None:
        """The peer is through with a chunk, if it was granted by itself."""
        extent = self.theirs.pop(chunk, None)
        if extent is not None and self.staged:
            self.desk.share.scatter(extent)
            self.ours[chunk] = extent
        elif extent is not None:
            self.desk.release(extent)

    def void_ahead(self) -> None:
        """The peer writes nothing under the grant of `Fetch`."""
        self._give_back(self.AHEAD)

    def scattered(self, chunk: int) -> None:
        """Nothing is copied from a chunk's memory any more."""
        self.copied.discard(chunk)
        self.desk.release(self.ours.pop(chunk))

    def give_up(self) -> None:
        """Nothing more will be scattered."""
        for chunk in [chunk for chunk in self.ours if chunk not in self.copied]:
            self.desk.release(self.ours.pop(chunk))

    def settle(self, *, lost: bool) -> None:
        """The transfer has ended at the peer, so its memory is ours again; or the peer is lost, and may still write."""
        for chunk, extent in list(self.theirs.items()):
            if not lost:
                self._give_back(chunk)
            elif extent.state is not ExtentState.QUARANTINED:
                self.desk.quarantine(extent, f"{self._peer.name} is silent")

    def _give_back(self, chunk: int) -> None:
        extent = self.theirs.pop(chunk, None)
        if extent is not None:
            (self.desk.settle if extent.state is ExtentState.QUARANTINED else self.desk.release)(extent)


class Receiver:
    """One transfer in.

    Args:
        site: The worker.
        link: To the prefill rank.
        number: Of the transfer, unique within this rank's incarnation.
        selections: Which part of the cache is asked for.
        fetch: What it is a part of.

    Attributes:
        machine: The sans-I/O state.
        link: The control stream; another one when the same incarnation is reached again.
        peer: The prefill rank.
        tally: Counts.
        route: As the prefill rank chose it.
        why: Why it chose that.
        exposure: What the prefill rank may touch, and the gate before it.
        checking: What it says its chunks add up to, if that is compared.
        grants: Memory in its hands.
        layers: Every layer of which it sends something.
    """

    def __init__(self, site: Site, link: Link, number: int, selections: tuple[Selection, ...], fetch: "Fetch") -> None:
        self.site: Final = site
        self.link = link
        self.peer: Final = link.peer
        self.transfer: Final = number
        self.tally: Final = Tally()
        self.route = Route.UNKNOWN
        self.why = ""
        self.layers: Final = sorted({layer for selection in selections for layer in selection.layers})
        self.checking: Final = Checking.of(number, site.config.sums_every)
        self.grants: Final = Grants(site, link.peer)
        self._selections: Final = selections
        self._fetch: Final = fetch
        self._demand: Final = fetch.demand
        # of a peer that was lost since it was looked up nothing is known any more
        self._routes: Final = site.routes(self.peer, trusted=link.trusted, sending=False) if link.is_open else []
        self._pair: PairPlan | None = None
        ahead = self._grant_ahead()
        name = f"{site.incarnation.hex()[:8]}-{number}"
        self.exposure: Final = Exposure(site, link, name, self._safe, self._routes if ahead else ())
        self.machine: Final = Receiving(number, ahead=ahead, staging=ahead and self.grants.staged)
        self._grid: ChunkGrid | None = None
        self._source: BlockLists = {}  # the peer's blocks, as far as it named them
        self._stale = False  # they have grown since the plan was made
        self._queue: Final = deque[tuple[int, float, int]]()  # chunks that are ready; to read: until when, through what
        self._under_way: Final[set[int]] = set()  # those that were taken from there, and have not landed
        self._answer: Final[asyncio.Future[wire.Accept]] = site.loop.create_future()
        self._arrivals: Final[dict[int, tuple[float, asyncio.Future[KvAgentResult]]]] = {}  # since when it is granted
        self._waits: Final[set[asyncio.Future[Any]]] = set()  # for what is not our own
        self._news: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._posted: Final[dict[int, Copy]] = {}  # reads, by chunk; under -1 what waits until blocks may be written
        self._copies = self._reads = self._doubts = 0  # of our own, in the caller's blocks; reads that are in doubt
        self._given_up = False
        self._awake: Callable[[], None] = no_hold

    # --- what others ask

    @property
    def limited_by(self) -> str:
        """What keeps pieces from being longer; empty before there is a plan."""
        return self._pair.limited_by if self._pair is not None and self._grid is not None else ""

    @property
    def step(self) -> Step:
        """What it waits for, or waited for when it ended."""
        step = self.machine.step
        return Step.PLANNING if self._grid is None and step is not Step.ASKING else step

    @property
    def is_lost(self) -> bool:
        """Whether the session is gone, and the peer may still write."""
        return self.machine.state is ReceiveState.LOST

    @property
    def copying(self) -> bool:
        """Whether a copy of our own writes the caller's blocks, which needs no peer and no agent."""
        return self._copies > 0

    @property
    def reading(self) -> bool:
        """Whether a read of our own may write the caller's blocks."""
        return self._reads + self._doubts > 0

    @property
    def in_doubt(self) -> bool:
        """Whether something may write the caller's blocks: on `staged` nothing but our own scatter does."""
        if self._copies or self._reads or self._doubts:
            return True
        if self.machine.ended or not self.machine.exposed:
            return False
        return not self.grants.staged if self.route is Route.UNKNOWN else self.route in IN_PLACE

    @property
    def quiet(self) -> bool:
        """Whether it is over and nobody writes the caller's blocks any more."""
        return (self.machine.ended or self.machine.state is ReceiveState.LOST) and not self.in_doubt

    @property
    def finished(self) -> bool:
        """Whether nothing of it is under way or in doubt, staging memory included."""
        return self.quiet and not (self.grants.theirs or self.grants.ours)

    @property
    def owes_an_answer(self) -> bool:
        """Whether the peer may keep its blocks for us until it hears that we read nothing any more: on `pull`.

        It may have accepted with that route, and announced chunks, though nothing of this was heard.
        """
        pull = Route.PULL in self._routes if self.route is Route.UNKNOWN else self.route is Route.PULL
        return pull and self.machine.state is ReceiveState.LOST

    @property
    def moving(self) -> bool:
        """Whether anything new may be begun."""
        return self.machine.state is ReceiveState.MOVING and not self._given_up

    # --- from the question to the last chunk

    def ask(self) -> None:
        """Ask, and grant with the question what may be granted."""
        site, demand, grants = self.site, self._demand, self.grants
        left, ahead = self._fetch.deadline - site.now(), grants.theirs.get(grants.AHEAD)
        staging = ahead if grants.staged else None
        message = wire.Fetch(
            transfer=self.transfer,
            ticket=self._fetch.ref,
            selections=[selection_to_wire(selection) for selection in self._selections],
            spans=encode_spans(demand.spans, sorted({selection.group for selection in self._selections})),
            token_start=demand.tokens.start,
            token_stop=demand.tokens.stop,
            routes=self._routes,
            max_extent_bytes=min(site.config.chunk_bytes, site.receive_desk.share.capacity),
            timeout_ms=FOREVER_MS if left == math.inf else min(FOREVER_MS, max(1, int(left * 1000))),
            in_place_bytes=site.config.max_in_place_bytes,
            lease_ms=grants.lease_ms if staging is None else 0,
            generation=0 if ahead is None else self.exposure.grant(mapped=Route.MAPPED in self._routes),
            agreement=b"" if ahead is None else self._agreement,
            staging_address=0 if staging is None else staging.address,
            staging_bytes=0 if staging is None else staging.nbytes,
            staging_lease_ms=0 if staging is None else grants.lease_ms,
            fenced=site.keys.has(self.peer),
            trace=self._fetch.trace,
        )
        if not (self.link.is_open and self.link.send(message)):  # lost since it was looked up: `lost` will not tell
            self.machine.ahead = False
            grants.void_ahead()
            self.lost(Failure(Status.FAILED, Code.PEER_LOST, "the control stream was lost"))

    async def run(self) -> None:
        """Receive what was asked for. To be run by `supervised`, since what fails stops the transfer."""
        message = await self._answer
        if message.ahead and not self.grants.staged and self.checking is None:
            self.tally.pieces = message.pieces  # the peer has compared what both mean by it: no plan is needed here
            for chunk in range(message.chunks):
                await self._arrived(chunk)
        else:
            bound = await self._planned(message)
            for chunk in range(message.chunks if message.ahead else 0):
                await self._land(chunk, bound, granted=True)
            while self.moving and self.machine.chunks_done < message.chunks:
                if self._stale:  # no chunk may begin with the old lists
                    self._stale = False
                    bound = await self.site.plan(partial(bound.grown, self._source, covered=0), rows=bound.rows)
                    continue
                await self._begin(bound)
        while self.moving:  # for the last result
            await self._until_news()

    async def _planned(self, message: wire.Accept) -> Bound:
        """Make the plan that the peer has made, once kernels are compiled for it."""
        site, demand = self.site, self._demand
        warming = site.warming.get((self.peer.identity.incarnation, False))
        if warming is not None and not warming.done():
            await self._wait(asyncio.ensure_future(asyncio.wait({warming})))
        source, self._stale = self._source, False  # while a thread plans with these, they may grow

        def make() -> Bound:
            try:
                pair = site.plans.incoming(self.peer, self._selections)
                plan = bind(pair, source, demand.spans, demand.tokens, covered=0)
                grid = _grid(pair, message, demand.tokens)
                if len(grid) != message.chunks or plan.digest(grid) != message.digest or plan.nbytes != message.bytes:
                    raise _plan_differs(message)
            except KvxferError as error:
                raise RefusedError(str(error), reason=Code.PLAN_DIFFERS) from error
            return Bound.of(plan, grid)

        bound = await site.plan(make, rows=max(_rows(source), _rows(demand.spans)))
        self._pair = bound.plan.pair
        self.tally.pieces = bound.pieces
        if self._grid is None:
            self._cut(bound.grid)
        return bound

    def _agreed(self, message: wire.Accept) -> ChunkGrid:
        """How the peer cut what was granted with the question.

        Raises:
            RefusedError: If it means something else by it.
        """
        pair = self._pair
        if pair is None or message.digest != cut_digest(
            self._agreement, message.layers_per_chunk, message.tokens_per_chunk
        ):
            raise _plan_differs(message)
        grid = _grid(pair, message, self._demand.tokens)
        if len(grid) != message.chunks:
            raise _plan_differs(message)
        return grid

    def _cut(self, grid: ChunkGrid) -> None:
        """It is known how the transfer is cut."""
        self._grid = grid
        self.tally.chunks = len(grid)
        self._fetch.planned(self.layers, dict.fromkeys(grid.layers, grid.windows))

    async def _begin(self, bound: Bound) -> None:
        """Begin with chunks that are ready while the window has room, and wait for what comes next."""
        while self._queue and len(self._under_way) < self.site.config.window:
            chunk, until, generation = self._queue.popleft()
            self._under_way.add(chunk)
            reads = self.route is Route.PULL
            work = partial(self._read, chunk, bound, until, generation) if reads else partial(self._land, chunk, bound)
            if len(bound.grid) == 1:
                await work()
                return
            name = f"kvxfer receive {self.transfer} chunk {chunk}"
            self.site.tasks.spawn(self.supervised(work), name, spare=True)
        await self._until_news()

    async def _land(self, chunk: int, bound: Bound, *, granted: bool = False) -> None:
        """A chunk that the peer writes: into staging memory, to be scattered from there, or in place.

        Args:
            chunk: Its number.
            bound: The plan.
            granted: Whether the peer has memory for it already.
        """
        asked, grants = self.site.now(), self.grants
        part = await self.site.plan(partial(bound.part, chunk), rows=bound.part_rows)
        if not granted:
            if not grants.staged:
                await self._until_writable()
            await self._grant(chunk, part.staged_bytes if grants.staged else part.bytes, asked)
        elif (extent := grants.theirs.get(chunk) or grants.ours.get(chunk)) and extent.nbytes < part.staged_bytes:
            raise ProtocolError(
                f"a chunk of {part.staged_bytes} bytes was said to fit into {extent.nbytes} granted ahead"
            )
        if grants.staged:
            message = await self._arrivals[chunk][1]
            _compare(chunk, part.bytes, message.bytes)
            await self._until_writable()
            tables = part.scatter(grants.ours[chunk].address)
            if _by_nic(self, staged=True):
                tables = replace(tables, from_nic=True)
            copied = await self._copy(tables, part.bytes, chunk=chunk)
            self.tally.spent("scattering", copied.started, copied.finished)
            await self._check(chunk, bound, part.bytes)
            self._landed(chunk, part.bytes)
        else:
            await self._arrived(chunk, bound, part.bytes)

    async def _grant(self, chunk: int, nbytes: int, asked: float) -> None:
        """Put memory for a chunk into the peer's hands, as soon as there is some."""
        site, grants = self.site, self.grants
        extent = await self._extent(max(1, nbytes))
        grants.give(chunk, extent)
        now = site.now()
        self.tally.spent("queued", asked, now)
        self._arrivals[chunk] = now, site.loop.create_future()
        place = (extent.address, extent.nbytes) if grants.staged else (0, 0)
        gate = self.exposure.grant(mapped=self.route is Route.MAPPED)
        self.link.send(*self.machine.grant([Grant(chunk, *place)], grants.next_lease_ms(), gate))

    async def _extent(self, nbytes: int) -> Extent:
        """Memory, or admission in place, of so many bytes. Waits for it no longer than `_patience`."""
        desk, account = self.grants.desk, self.peer.account
        if not self.moving:
            raise asyncio.CancelledError
        extent = desk.take(account, nbytes)
        if extent is not None:
            return extent
        answer: asyncio.Future[Extent | KvxferError] = self.site.loop.create_future()
        # its number: a request may be kept for a while, and would keep the whole transfer
        request = desk.ask(account, nbytes, self._patience, partial(_admitted, desk, answer), owner=self.transfer)
        self._waits.add(answer)
        try:
            found = await answer
        finally:
            self._waits.discard(answer)
            if answer.cancelled() and request is not None:
                desk.withdraw(request)
        if isinstance(found, KvxferError):
            raise found
        if self._given_up:
            desk.release(found)
            raise asyncio.CancelledError
        return found

    @property
    def _patience(self) -> float:
        """Seconds that a chunk waits for memory at most; infinity where the fetch has a time-out, which ends it."""
        if self._fetch.deadline < math.inf:
            return math.inf
        before = 0 if self.grants.staged else self.grants.desk.share.held_bytes(self.peer.account)
        return self.site.lease_ms(before) / 1000

    async def _read(self, chunk: int, bound: Bound, until: float, generation: int) -> None:
        """A chunk that this side reads into place; the peer then confirms that the offer was held meanwhile.

        Args:
            chunk: Its number.
            bound: The plan.
            until: When it may be read no more, by the runtime's clock.
            generation: What leads through the gate to it.
        """
        site, peer, machine, renewals = self.site, self.peer, self.machine, self.link.renewals
        passage = site.keys.passage(peer, generation)
        pieces = await site.plan(lambda: bound.chunk(chunk).listed(), rows=bound.chunk_pieces)
        await self._until_writable()
        leave = site.lanes.hold(peer)
        try:
            lane = await self._wait(site.lanes.connect(peer, renewals))
            machine.reading([chunk])
            if len(pieces) and not await self._has_read(chunk, lane, pieces, until, passage):
                return
        finally:
            leave()
        self._arrivals[chunk] = site.now(), site.loop.create_future()
        self.link.send(*machine.landed([chunk]))
        await self._arrived(chunk, bound, int(pieces.nbytes.sum()))

    async def _has_read(self, chunk: int, lane: str, pieces: Pieces, until: float, passage: Passage | None) -> bool:
        """Post a read into the caller's blocks. Whether it is done, and the transfer goes on."""
        site, peer, unwant = self.site, self.peer, no_hold
        ended: asyncio.Future[CopyOutcome] = site.loop.create_future()

        def done(outcome: CopyOutcome) -> None:
            nonlocal unwant
            del self._posted[chunk]
            self._reads -= 1
            if outcome.may_move:
                self._doubts += 1
                unwant = want_end(site, peer, urgent=True)
            if outcome.outcome is not Outcome.DONE:
                reason = str(outcome.error or "the lease ran out before the chunk was read")
                self.stop(Failure(Status.FAILED, Code.FABRIC if outcome.error else Code.TIMEOUT, reason))
            resolve(ended, outcome)
            self._settle()

        def late(_: bool) -> None:  # it has ended, or our agent has
            unwant()
            self._doubts -= 1
            self._settle()

        local = block_pieces(site.geometry, pieces.dst, pieces.nbytes)
        remote = block_pieces(site.plans.geometry(peer), pieces.src, pieces.nbytes)
        post = Post(lane, Operation.READ, local, remote, runs_on(site, peer), late)
        job = CopyJob(NOTHING, done, until=until, passage=passage, owner=self._owner, post=post)
        self._posted[chunk] = site.mover.submit(job, Direction.SCATTER)
        self._reads += 1
        self.tally.descriptors += len(pieces)
        outcome = await ended
        if outcome.posted:
            self.tally.spent("posting", outcome.posted, outcome.posted + outcome.posting)
            self.tally.spent("wire", outcome.posted, outcome.finished)
        return outcome.outcome is Outcome.DONE and self.moving

    async def _arrived(self, chunk: int, bound: Bound | None = None, nbytes: int = -1) -> None:
        """A chunk comes into the caller's blocks: it has landed once the device sees it, and it is as it should be.

        Args:
            chunk: Its number.
            bound: The plan, if one was made.
            nbytes: How many bytes it has by that.
        """
        message = await self._arrivals[chunk][1]
        if not self.moving:
            raise asyncio.CancelledError
        if bound is not None:
            _compare(chunk, nbytes, message.bytes)
        if _by_nic(self, staged=False):
            await self._copy(_FLUSH, 0)
        if bound is not None:
            await self._check(chunk, bound, nbytes)
        self._landed(chunk, message.bytes)

    async def _check(self, chunk: int, bound: Bound, nbytes: int) -> None:
        """Compare a chunk that is in the caller's blocks with what the peer says it adds up to, if that is wanted."""
        checking = self.checking
        if checking is None or not checking.wants(chunk, nbytes):
            return
        part = await self.site.plan(partial(bound.chunk, chunk), rows=bound.chunk_rows)
        if not self.moving:
            raise asyncio.CancelledError
        outcome = await self._copy(NOTHING, nbytes, sums=SumPlan.at_destination(part))
        if not self.moving:
            raise asyncio.CancelledError
        wrong = checking.compare(chunk, part, outcome.sums, self.peer.name)
        self.site.metrics.chunk_checked("damaged" if wrong else "ok")
        if wrong:
            self.stop(Failure(Status.FAILED, Code.INTEGRITY, wrong))
            if self.machine.state is ReceiveState.STOPPED:  # its last result has come, so there was nothing to ask
                self.link.send(wire.Cancel(self.transfer, Code.INTEGRITY))
            raise asyncio.CancelledError

    def _landed(self, chunk: int, nbytes: int) -> None:
        """A chunk is where it belongs, and visible."""
        grid = self._grid
        self._arrivals.pop(chunk, None)
        self._under_way.discard(chunk)
        self.tally.bytes += nbytes
        self.machine.chunk_done(chunk)
        if grid is not None:
            self._fetch.landed(grid.runs[chunk % grid.layer_runs])
        self._wake()
        self._settle()

    async def _copy(self, tables: Tables, nbytes: int, *, chunk: int = -1, sums: SumPlan | None = None) -> CopyOutcome:
        """Copy about so many bytes into the caller's blocks, or add up what is there.

        Args:
            tables: What to copy.
            nbytes: How much that is.
            chunk: Whose staging memory is copied from, if that is.
            sums: What to add up.

        Raises:
            KvxferError: If it failed, or no more copies are taken.
        """
        ended: asyncio.Future[CopyOutcome] = self.site.loop.create_future()

        def done(outcome: CopyOutcome) -> None:
            self._copies -= 1
            if chunk >= 0:
                self.grants.scattered(chunk)
            resolve(ended, outcome)
            self._settle()

        job = CopyJob(tables, done, nbytes=nbytes, owner=self._owner, sums=sums)
        self.site.mover.submit(job, Direction.SCATTER)
        self._copies += 1
        if chunk >= 0:
            self.grants.copied.add(chunk)
        outcome = await ended
        if outcome.error is not None:
            raise outcome.error
        return outcome

    @property
    def _owner(self) -> str:
        """On whose behalf things are copied. Its name: an owner is known for a while, and would keep the transfer."""
        return f"kvxfer receive {self.transfer}"

    def _grant_ahead(self) -> bool:
        """Take memory, or admission, for the whole transfer, to be granted with the question; whether there is some.

        That is so only if all of it may be under way at once; where a route in place comes first, the caller's blocks
        may be written now; and where `STAGED` does, it is one chunk at the most.
        """
        site, demand, first = self.site, self._demand, self._routes[0] if self._routes else Route.UNKNOWN
        staged = first is Route.STAGED
        if not staged and (first not in IN_PLACE or not has_fired(demand.after)):
            return False
        pair = site.plans.incoming(self.peer, self._selections)
        nbytes = pair.most_staged_bytes(demand.tokens) if staged else pair.most_bytes(demand.spans, demand.tokens)
        if staged and max(1, nbytes) > site.config.chunk_bytes:
            return False
        agreement = pair.agreement(demand.spans, demand.tokens)
        self.grants.choose(staged=staged)
        if not self.grants.take_ahead(nbytes):  # last: what raises before has taken nothing
            return False
        self._pair, self._agreement = pair, agreement
        return True

    # --- messages

    def accepted(self, message: wire.Accept) -> None:
        """The peer made a plan."""
        if not self.machine.accept(message):
            return
        site, grants = self.site, self.grants
        if not message.ahead:
            grants.void_ahead()
        if message.route not in self._routes:
            name = message.route.name.lower()
            reason = f"the peer chose the route {name}, which was not among those it was asked for"
            self.stop(Failure(Status.FAILED, Code.NO_COMMON_ROUTE, reason))
            return
        self.route, self.why = message.route, message.why
        self.tally.predicted = message.predicted_us / 1e6 if message.predicted_us else None
        site.heard(self.peer, fenced=message.fenced)
        self.exposure.routes = frozenset({message.route})
        if message.ahead:
            try:
                grid = self._agreed(message)
            except KvxferError as error:
                self._failed(error)
                return
            self._cut(grid)
            now = site.now()
            for chunk in range(message.chunks):
                self._arrivals[chunk] = now, site.loop.create_future()
            if grants.staged:
                grants.theirs[0] = grants.theirs.pop(grants.AHEAD)
        else:
            self.exposure.void()
            if message.route is not Route.PULL:
                grants.choose(staged=message.route is Route.STAGED)
        self._help()
        self._learn(message.spans)
        resolve(self._answer, message)

    def refused(self, message: wire.Refuse) -> None:
        """The peer refused."""
        self.site.metrics.refused(message.code, by_peer=True)
        self.machine.refused(message)
        self._settle()

    def wanted(self, message: wire.Want) -> None:
        """Chunks are ready at the peer, and perhaps its block lists have grown."""
        until = self.site.now() + message.lease_ms / 1000
        self._queue.extend((chunk, until, message.generation) for chunk in self.machine.wanted(message))
        if not self.machine.exposed:
            self.grants.void_ahead()
        if message.spans and self.moving:
            self._stale = True
            self._learn(message.spans)
        self._wake()

    def result(self, message: KvAgentResult) -> None:
        """A chunk has landed, or the transfer ended at the peer."""
        stale = self.machine.stale
        chunk = self.machine.result(message)
        if self.machine.stale > stale:
            self.site.metrics.result_dropped("stale")
        arrival = None if chunk is None else self._arrivals.get(chunk)
        if chunk is not None and arrival is not None:
            if self.checking is not None:
                self.checking.arrived(chunk)
            if self.route is Route.PULL:
                self.tally.began(self.site.now())
            else:
                self.tally.arrived(arrival[0], self.site.now(), message.timings)
            if self.moving:  # if it is being stopped, `_settle` gives the memory back
                self.grants.arrived(chunk)
                resolve(arrival[1], message)
        if self.machine.failure is not None and self.machine.state is ReceiveState.MOVING:
            self.stop(self.machine.failure)
        if message.status is Status.IN_DOUBT and message.chunk == WHOLE:
            self.exposure.told_in_doubt()
        self._settle()

    def _learn(self, spans: Sequence[wire.Span]) -> None:
        """Block ids of the peer that it did not name before; only of what was asked for, or they would pile up here."""
        asked = {selection.group for selection in self._selections}
        strange = [span.group for span in spans if span.group not in asked]
        try:
            if strange:
                raise ProtocolError(f"the peer named blocks of group {strange[0]!r}, of which nothing was asked for")
            if spans:
                self._source = joined_spans(self._source, spans)
        except KvxferError as error:
            self._failed(error)

    # --- waiting, which ends when we give up

    async def _wait(self, future: "asyncio.Future[_T]") -> _T:
        """What a future brings that is somebody else's too."""
        mine = asyncio.shield(future)
        self._waits.add(mine)
        try:
            found = await mine
        finally:
            self._waits.discard(mine)
        if not self.moving:
            raise asyncio.CancelledError
        return found

    async def _until_news(self) -> None:
        """A chunk was announced, or has landed, or the last result is there."""
        self._news = self.site.loop.create_future()
        await self._news

    def _wake(self) -> None:
        if self._news is not None:
            resolve(self._news, None)

    async def _until_writable(self) -> None:
        """The caller's blocks may be written."""
        if not self.moving:
            raise asyncio.CancelledError
        if self._demand.after is READY:
            return
        if self._writable is None:
            self._writable = self.site.loop.create_future()
            waits = CopyJob(NOTHING, self._became_writable, self._demand.after, owner=self._owner)
            self._posted[-1] = self.site.mover.submit(waits, Direction.SCATTER)
        if not self._writable.done():
            await self._wait(self._writable)

    def _became_writable(self, outcome: CopyOutcome) -> None:
        del self._posted[-1]
        if outcome.error is not None:
            self._failed(outcome.error)
        elif not outcome.stopped and self._writable is not None:
            resolve(self._writable, None)
        self._settle()

    # --- ending

    async def supervised(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do a part of it. What fails stops all of it."""
        try:
            await work()
        except asyncio.CancelledError:
            if not self._given_up:
                raise
        except KvxferError as error:
            self._failed(error)
        except Exception as error:  # noqa: BLE001 - tasks are supervised here: a defect ends the transfer, named
            _log.error("task_failed", task=self._owner, error=repr(error), exc_info=error)
            self._failed(TransferFailedError(f"a step of the transfer failed: {error!r}"))

    def _failed(self, error: KvxferError) -> None:
        code = error.reason if isinstance(error, RefusedError) else error.code
        self.stop(Failure(Status.FAILED, code, str(error)))

    def stop(self, failure: Failure) -> None:
        """Give up; `quiet` becomes true when memory is safe."""
        self._give_up()
        if self.machine.ahead:  # whose answer nobody waits for any more, and which the peer may be writing by now
            self._help()
        if messages := self.machine.cancel(failure, reading=self.reading):
            self.link.send(*messages)
        self._settle()

    def lost(self, failure: Failure) -> None:
        """The session is gone, or the peer is silent. After its last word there is nothing to be lost."""
        if self.machine.heard_last:
            return
        self._give_up()
        self.machine.lost(failure)
        self._settle()

    def resume(self, link: Link) -> None:
        """The same incarnation is back: ask what became of the transfer."""
        self.link = link
        self.exposure.met(link.renewals)
        if self.machine.state is ReceiveState.LOST:
            if self.route is not Route.PULL and not self.finished:
                self._help()
            if messages := self.machine.resume(reading=self.reading):
                self.link.send(*messages)
            self._settle()

    def _help(self) -> None:
        """Make progress for what the peer posts: over TCP the target moves the data."""
        self._awake()
        if self.route is not Route.MAPPED:
            self._awake = self.site.mover.hold_awake()

    def _give_up(self) -> None:
        """Begin nothing new, and wait for nothing but what is in flight."""
        self._given_up = True
        self._queue.clear()
        self.grants.give_up()
        for copy in self._posted.values():
            self.site.mover.cancel(copy)
        self._answer.cancel()
        if self._news is not None:
            self._news.cancel()
        for _, arrival in self._arrivals.values():
            arrival.cancel()
        for waiting in list(self._waits):
            waiting.cancel()

    def _safe(self) -> None:
        """There is evidence, other than the peer's word, that nothing of it is written any more."""
        self.machine.safe()
        self._settle()

    def _settle(self) -> None:
        """Give back what the peer is through with; quarantine what it may still write."""
        machine = self.machine
        if machine.state is ReceiveState.MOVING and machine.failure is None:
            return  # all goes well
        if not self._given_up and (machine.failure is not None or machine.state not in _HOPEFUL):
            self._give_up()  # whoever ended it: no scatter begins any more
        if not self.reading and (unread := machine.unread()):
            self.link.send(*unread)
        lost = machine.state is ReceiveState.LOST
        if machine.ended or lost:
            self.grants.settle(lost=lost)
            if machine.ended or self.finished or not self.link.is_open or self.route is Route.PULL:
                self._awake()  # else the peer is there, and what it has posted may need this side to end
                self._awake = no_hold
        if machine.ended:
            self.exposure.end()
            self._wake()
        if machine.ended or lost or machine.failure is not None:
            self._fetch.changed()
        if lost and (not self.finished or self.owes_an_answer):
            self._fetch.doubted(self)


def _by_nic(receiver: Receiver, *, staged: bool) -> bool:
    """Whether a NIC writes what comes from the peer into memory of a GPU."""
    site = receiver.site
    if staged and (site.staging is None or site.staging.kind != "VRAM"):
        return False
    return site.geometry.kind == "cuda" and may_be_elsewhere(receiver.peer.body.host)


def _admitted(desk: Desk, answer: "asyncio.Future[Extent | KvxferError]", found: Extent | KvxferError) -> None:
    """Hand over what a desk gives, or give it back where nobody waits any more."""
    if not answer.done():
        answer.set_result(found)
    elif isinstance(found, Extent):
        desk.release(found)


def _rows(side: BlockLists) -> int:
    return sum(len(span.ids) for span in side.values())


def _grid(pair: PairPlan, message: wire.Accept, tokens: range) -> ChunkGrid:
    return ChunkGrid(pair.layers, message.layers_per_chunk, message.tokens_per_chunk, tokens.start, tokens.stop)


def _plan_differs(message: wire.Accept) -> RefusedError:
    return RefusedError(
        f"the two sides plan transfer {message.transfer} differently "
        f"({message.chunks} chunks, {message.bytes} bytes there)",
        reason=Code.PLAN_DIFFERS,
    )


def _compare(chunk: int, here: int, there: int) -> None:
    """Check that the two sides mean the same by a chunk.

    Raises:
        RefusedError: If they do not: its bytes are not where they belong.
    """
    if here != there:
        reason = f"chunk {chunk} has {here} bytes by this side's plan, and {there} by the prefill rank's"
        raise RefusedError(reason, reason=Code.PLAN_DIFFERS)
