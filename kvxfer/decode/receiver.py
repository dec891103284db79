"""One transfer in: what one prefill rank sends of a request, from `Fetch` to the last chunk in place.

On `staged` the chunks of a ring are one flow of the mover, which copies each to where it belongs once it has arrived.
On `pull` one flow reads chunks that the peer lets us read, each under the lease that it was announced with.

`send_fetch` asks, and `on_accept` takes the answer in. From there `run` drives the transfer. It is not needed where
`Fetch` granted the blocks themselves, of which this side makes no plan, nor on `staged` where the mover was given all
chunks with the answer. Messages are handled beside it: they are fed to the state protocol (`protocol.transfer`) where
the frame is handled, so that what breaks the protocol is raised there, and wake whoever waits for them. What counts
memory is done where the news comes in, and not by whoever goes on with it a turn later.

Whatever goes wrong ends in `stop` or `on_link_lost`. Then nothing new begins, and `_reclaim` gives back what the peer
is through with, and quarantines what it may still write.
"""

import asyncio
import math
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from operator import attrgetter
from secrets import token_bytes
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from kvxfer.copy.mover import Flow
from kvxfer.copy.port import NO_PIECES, READY, CopyJob, CopyOutcome, Direction, Operation, Post, Turns, has_fired
from kvxfer.copy.tables import Kind
from kvxfer.errors import Code, FabricError, KvxferError, ProtocolError, RefusedError, Step, TransferFailedError
from kvxfer.geometry import BlockLists, ChunkGrid, ChunkPlan, Damage, PairPlan, SumPlan, cut_digest, damage, selected
from kvxfer.mapped.host import may_be_elsewhere
from kvxfer.memory.books import Extent, ExtentState, Request
from kvxfer.peers.link import Link
from kvxfer.plans.pairs import SMALL_PLAN, BoundPlan, block_pieces, decode_spans, encode_spans
from kvxfer.protocol import messages as wire
from kvxfer.protocol.messages import FOREVER_MS, ROUTE_NAMES, TOKEN_BYTES, WHOLE, Route, Status
from kvxfer.protocol.session import PeerInfo
from kvxfer.protocol.transfer import IN_PLACE, REPEAT_S, UNTIMED, Failure, ReceiveState, Receiving
from kvxfer.runtime import Callback, no_op, resolve
from kvxfer.safety.doubt import Exposure, may_outlive_agent, request_rebuild
from kvxfer.site import Site, Tally
from kvxfer.telemetry import logger

if TYPE_CHECKING:
    from kvxfer.decode.fetch import Fetch

__all__ = ["Checking", "Part", "PrefillEngine", "Receiver"]

# --- sums, compared
#
# A chunk is read back from the caller's blocks once it is there, whatever its route: so the way, the scatter and
# whoever else writes those blocks are checked alike.

_NAMED: Final = 8
_WHOLE_BYTES: Final = 16 << 20
"""Of sums that are kept as they came, of one transfer: beyond that a hash is, by which they are compared as well."""
_HASH_BYTES: Final = 33
"""As no sums have, which have 8 bytes an item."""
_NOWHERE: Final = Damage((), (), {})


class Checking:
    """What a prefill rank says the chunks of one transfer add up to, and the first that differs."""

    def __init__(self, transfer: int, every: int) -> None:
        # the first that differs, and where; nowhere if the prefill rank did not say what it should be
        self.found: tuple[int, Damage] | None = None
        self._transfer: Final = transfer
        self._every: Final = every
        self._sums: dict[int, bytes] = {}  # by chunk
        self._kept = 0  # bytes of them

    def on_sums(self, message: wire.Sums) -> None:
        """The peer says what a chunk adds up to that it has, and that has not arrived yet."""
        if selected(self._transfer, message.chunk, self._every):
            sums = message.sums
            self._kept -= len(self._sums.pop(message.chunk, b""))  # it may say so again
            if self._kept + len(sums) > _WHOLE_BYTES:
                sums = _hash(sums)
            self._sums[message.chunk] = sums
            self._kept += len(sums)

    def wants(self, chunk: int, nbytes: int) -> bool:
        """Whether a chunk of so many bytes is compared."""
        return nbytes > 0 and selected(self._transfer, chunk, self._every)

    def compare(self, chunk: int, part: ChunkPlan, ours: bytes, peer: str) -> str:
        """What is wrong with a chunk that adds up to this here; empty if nothing is."""
        theirs = self._sums.pop(chunk, b"")
        self._kept -= len(theirs)
        hashed = len(theirs) == _HASH_BYTES
        if theirs == (_hash(ours) if hashed else ours):
            return ""
        if len(theirs) != len(ours):
            self.found = chunk, _NOWHERE
            if hashed:
                return f"chunk {chunk} is not what {peer} holds"
            return f"{peer} did not say what chunk {chunk} adds up to"
        where = damage(part, ours, theirs)
        self.found = chunk, where
        return f"chunk {chunk} is not what {peer} holds: {_said(where)}"


def _hash(sums: bytes) -> bytes:
    return blake2b(sums, digest_size=_HASH_BYTES).digest()


def _said(where: Damage) -> str:
    blocks = "; ".join(f"{_short(ids)} of group {group!r}" for group, ids in where.blocks.items())
    return f"layers {_short(where.layers)} ({', '.join(where.tensors)}) differ in blocks {blocks}"


def _short(numbers: tuple[int, ...]) -> str:
    more = f", ... ({len(numbers)})" if len(numbers) > _NAMED else ""
    return ", ".join(map(str, numbers[:_NAMED])) + more


# --- the transfer

_T = TypeVar("_T")
_log: Final = logger("kvxfer.worker")
_group_of: Final = attrgetter("group")
_ids_of: Final = attrgetter("ids")
_address_of: Final = attrgetter("address")
_nbytes_of: Final = attrgetter("nbytes")
_TURNS: Final = 2
"""How many turns of a ring are granted at once, at least: more if the peer last took more in `REPEAT_S`, in which the
loops must grant the next ones. While others wait for memory, no more than these."""
_TURN_S: Final = 1e-3
"""Seconds that none is taken to be quicker than."""
_RENEWALS: Final = 3
"""How often the lease of what waits for a place is renewed in the time that it has."""
_RUNNING: Final = (ReceiveState.ASKED, ReceiveState.MOVING)


class Grants(Struct, eq=False):
    """What one transfer puts into its peer's hands: staging memory. In place its part is counted, and no more.

    On `staged` chunks take turns in a ring of extents: the peer writes a place, our own copy reads it, and then the
    peer may write it again. Its mover and ours see to that; here the ring is one thing, in the peer's hands until all
    that was granted has been copied, or the transfer is over there and our copies are here.
    """

    site: Site
    peer: PeerInfo
    ring: Sequence[Extent] = ()  # what chunks take turns in; before any answer, what `Fetch` grants of that
    _first: int = 0  # the chunk that the first place was for
    _turn: int = 0  # the chunk with which the turn began that is under way
    _since: float = 0.0  # when that was
    _in_place: int = 0  # bytes of blocks that the peer may write

    def __bool__(self) -> bool:
        """Whether it has any memory."""
        return bool(self.ring)

    def count_in_place(self, nbytes: int) -> None:
        """Let the peer write so many bytes of the caller's blocks: for them its leases get longer."""
        if nbytes:
            self._in_place += nbytes
            written, key = self.site.written_in_place, self.peer.identity.incarnation
            written[key] = written.get(key, 0) + nbytes

    def release(self) -> None:
        """The peer writes nothing under what it was granted, and nothing of that is read."""
        extents, self.ring = self.ring, ()
        if extents:
            self._give_back(extents)
        nbytes, self._in_place = self._in_place, 0
        if nbytes:
            written, key = self.site.written_in_place, self.peer.identity.incarnation
            if left := written.pop(key) - nbytes:
                written[key] = left

    def begin_ring(self, extent: Extent, most: int, chunk: int) -> list[wire.Place]:
        """Let chunks from this one on take turns in an extent, and in as many more as are wanted and free right now."""
        self.ring, self._first = self.site.receive_desk.begin_writing(extent, most - 1), chunk
        return to_places(self.ring)

    def turns(self) -> int:
        """How many turns of the ring may be granted at once, if nobody waits for what they occupy."""
        pace = self.site.estimates.paces.get(self.peer.identity.incarnation, 0.0)
        ring = self.ring
        if not pace or self.site.receive_desk.contended or self.site.mover.crowded:
            return _TURNS
        return max(_TURNS, math.ceil(REPEAT_S / max(_TURN_S, len(ring) * ring[0].nbytes / pace)))

    def begin_turns(self, chunk: int, now: float) -> None:
        """The first chunk of this grant is this one, and those before it have left their places."""
        self._turn, self._since = chunk, now

    def measure_turns(self, copied: int, now: float, nbytes: int) -> None:
        """So many chunks, of at most so many bytes each, have left their places: see how fast turns are."""
        chunks, key = copied - self._turn, self.peer.identity.incarnation
        if chunks >= len(self.ring) > 0 and now > self._since and self.site.plans.knows(self.peer):
            self.site.estimates.paces[key] = chunks * nbytes / (now - self._since)
            self._turn, self._since = copied, now

    def next_lease_ms(self) -> int:
        """For how long a grant holds that is given now."""
        written = self.site.written_in_place.get(self.peer.identity.incarnation, 0)
        return self.site.lease_ms(written + self.site.receive_desk.share.held.get(self.peer.account, 0))

    def places(self, chunks: range) -> list[Extent]:
        """Where chunks go, or are."""
        return [self.ring[(chunk - self._first) % len(self.ring)] for chunk in chunks]

    def quarantine(self, hands: range) -> None:
        """The peer is lost, and may still write the places of these chunks; nothing of them is read any more.

        What it does not have in its hands is given back.
        """
        ring = self.ring
        kept: Sequence[Extent] = ring if hands else ()
        if 0 < len(hands) < len(ring):
            kept = self.places(hands)
        if len(kept) < len(ring):
            self.ring, self._first = kept, hands.start  # more may arrive yet: it must be known where that is
        for extent in kept:
            if extent.state is not ExtentState.QUARANTINED:
                self.site.receive_desk.quarantine(extent, f"{self.peer.name} is silent")
        if ring:
            self._give_back([extent for extent in ring if extent not in kept] if kept else ring)

    def _give_back(self, extents: Sequence[Extent]) -> None:
        written = extents
        for extent in extents:
            if extent.state is ExtentState.QUARANTINED:
                self.site.receive_desk.settle(extent)
                written = [one for one in written if one is not extent]
        if written:
            self.site.receive_desk.release(*written)


def to_places(ring: Sequence[Extent]) -> list[wire.Place]:
    """Places as the peer is told of them."""
    return list(map(wire.Place, map(_address_of, ring), map(_nbytes_of, ring)))


class _LastReserve(Struct, eq=False):
    """What the peer was told by the last grant."""

    copied: int = 0  # so many chunks had left their places
    renewal: float = 0.0  # when its lease is to be renewed
    again: asyncio.TimerHandle | None = None  # says it again
    news: bool = False  # whether that is because more have left, and not for the lease


class Part(Struct, frozen=True, eq=False):
    """What one prefill rank sends of every request: the same until a link of this worker is opened or lost."""

    link: Link  # to it
    pair: PairPlan  # of the part of the cache that it has
    asks: wire.Fetch  # what every question says of it, the routes that this rank accepts among that, best first


class PrefillEngine(Struct, frozen=True, eq=False):
    """A prefill engine as far as it can be reached."""

    links: Sequence[Link]  # to all of its ranks
    parts: Sequence[Part]  # of those that have anything that this rank needs
    idle: Sequence[Link]  # to the others


class _ActiveFlow(Struct, eq=False):
    """Chunks that the mover moves one after another."""

    flow: Flow  # where it does
    first: int  # the first of them
    source: tuple[str, int]  # of what is read: the peer's agent, and what its memory is granted by
    copying: float = 0.0  # seconds that copying them took
    withdraw_rebuild: Callback = no_op  # wants no other agent any more, which would end what is in doubt


class Receiver(Struct, eq=False):
    """One transfer in."""

    site: Site
    link: Link  # the control stream to the prefill rank; another one when the same incarnation is reached again
    part: Part  # what is asked for
    fetch: "Fetch"  # what it is a part of
    peer: PeerInfo
    grants: Grants  # memory in its hands
    exposure: Exposure  # what it may touch, and the gate before it
    protocol: Receiving
    tally: Tally = field(default_factory=Tally)
    checking: Checking | None = None  # what it says its chunks add up to, if that is compared
    route: Route = Route.UNKNOWN  # as the prefill rank chose it
    why: str = ""
    _source: BlockLists = {}  # the peer's blocks, as far as it named them
    _granted: list[tuple[int, float]] = []  # up to which chunk, and when
    _readable: list[tuple[int, float, int]] = []  # up to which chunk, until when, through what
    _shared: asyncio.Future[Any] | None = None  # which `run` waits for, and others do
    _last_reserve: _LastReserve = field(default_factory=_LastReserve)
    _writable: bool = False  # whether the caller's blocks may be written
    _bound: BoundPlan | None = None
    _grid: ChunkGrid | None = None
    _stale: bool = False  # the peer's blocks have grown since the plan was made
    _flushes: bool = False  # what comes into the caller's blocks has to be made visible to the device
    _active: _ActiveFlow | None = None  # copies what has arrived (`pull`: reads), or may be in doubt
    _turns: Turns | None = None  # which it takes with the peer's
    _submitted: int = 0  # of the first so many chunks there are steps
    _copied: int = 0  # the first so many have been copied (`pull`: read)
    _agreement: bytes = b""  # what is meant by what is granted with the question
    _asked: float = 0.0  # since when memory is waited for
    _request: Request | None = None
    _extent: Extent | None = None  # what was waited for
    _nbytes: int | None = None  # that the peer has moved, as it says
    _needs_plan: bool = True  # whether this side makes a plan of it
    _pending_accept: wire.Accept | None = None  # with which `run` has not begun yet
    _news: asyncio.Future[None] | None = None  # which `run` waits for, or, done, has not looked at
    _copies: int = 0  # of our own, in the caller's blocks
    _given_up: bool = False
    _stop_polling: Callback = no_op
    _release_lane: Callback = no_op

    # --- what others ask

    @property
    def step(self) -> Step:
        """What it waits for, or waited for when it ended."""
        step = self.protocol.step
        return Step.PLANNING if self._grid is None and step is not Step.ASKING else step

    @property
    def is_lost(self) -> bool:
        """Whether the session is gone, and the peer may still write."""
        return self.protocol.state is ReceiveState.LOST

    @property
    def copying(self) -> bool:
        """Whether a copy of our own writes the caller's blocks, which needs no peer and no agent."""
        return self._copies > 0 or (self._active is not None and not self.reading)

    @property
    def reading(self) -> bool:
        """Whether a read of our own may write the caller's blocks."""
        return self._active is not None and self.route is Route.PULL

    @property
    def in_doubt(self) -> bool:
        """Whether something may write the caller's blocks: on `staged` nothing but our own scatter does."""
        if self._active is not None or self._copies:
            return True
        if self.protocol.ended or not self.protocol.exposed:
            return False
        return not IN_PLACE.isdisjoint(self.exposure.routes)

    @property
    def blocks_safe(self) -> bool:
        """Whether it is over, or was lost, and nobody writes the caller's blocks any more.

        A peer that is back is asked what became of it; the blocks do not wait for that where it cannot write them.
        """
        return (self.protocol.ended or self.protocol.was_lost) and not self.in_doubt

    @property
    def finished(self) -> bool:
        """Whether nothing of it is under way or in doubt, staging memory included."""
        return self.blocks_safe and not self.grants

    @property
    def owes_an_answer(self) -> bool:
        """Whether the peer may keep its blocks for us until it hears that we read nothing any more: on `pull`.

        It may have accepted with that route, and announced chunks, though nothing of this was heard.
        """
        pull = Route.PULL in self.part.asks.routes if self.route is Route.UNKNOWN else self.route is Route.PULL
        return pull and self.is_lost

    @property
    def moving(self) -> bool:
        """Whether anything new may be begun."""
        return self.protocol.state is ReceiveState.MOVING and not self._given_up

    def _check_moving(self) -> None:
        """End `run` where nothing new may be begun any more."""
        if not self.moving:
            raise asyncio.CancelledError

    def watch(self) -> None:
        """Hear of chunks soon: somebody waits for them one by one."""
        if self._active is not None:
            self.site.mover.report_soon(self._active.flow)

    # --- from the question to the last chunk

    def send_fetch(self) -> bool:
        """Ask, and grant with the question what may be. False if the link is gone.

        Where a route in place comes first that is the whole transfer, if the caller's blocks may be written now. Where
        `STAGED` does it is a place for the only chunk, or a ring for the first ones, if the two agents can tell each
        other of the turns that are taken in it.
        """
        site, fetch, part, link, grants = self.site, self.fetch, self.part, self.link, self.grants
        spans, tokens, after, pair = fetch.spans, fetch.tokens, fetch.after, part.pair
        protocol, exposure = self.protocol, self.exposure
        routes, writes = part.asks.routes, after is READY
        first = routes[0] if routes else Route.UNKNOWN
        staged = first is Route.STAGED
        self._writable, exposure.then = writes, self._on_evidence
        if site.sums_every:
            self.checking = Checking(self.protocol.transfer, site.sums_every)
        ahead = (staged or (first in IN_PLACE and (writes or has_fired(after)))) and not site.rebuilds.paused
        if ahead:
            self._agreement = pair.agreement(spans, tokens)  # it may raise: nothing is taken, and nobody knows of this
        fetch.receivers.append(self)
        fetch.role.incoming[self.protocol.transfer] = self
        generation, lease_ms, self._asked = 0, 0, site.now()
        if ahead and staged:
            ahead = self._grant_ahead(tokens)
        elif ahead:
            grants.count_in_place(pair.most_bytes(spans, tokens))
        if ahead:
            protocol.ahead, lease_ms = True, grants.next_lease_ms()
            self._last_reserve.renewal = self._asked + lease_ms / 1000 / _RENEWALS
            exposure.routes = (first,) if staged else routes
            generation = exposure.grant(mapped=Route.MAPPED in routes)
        left, turns = fetch.deadline - self._asked, self._turns
        message = replace(
            part.asks,
            transfer=self.protocol.transfer,
            ticket=fetch.key[1],
            spans=encode_spans(spans, pair.groups),
            token_start=tokens.start,
            token_stop=tokens.stop,
            timeout_ms=FOREVER_MS if left == math.inf else min(FOREVER_MS, max(1, int(left * 1000))),
            lease_ms=lease_ms,
            generation=generation,
            agreement=self._agreement if ahead else b"",
            ring=to_places(grants.ring) if grants.ring else [],
            ring_chunks=protocol.staged_ahead,
            token=b"" if turns is None else turns.token,
            fenced=site.peer_gates.has(self.peer),
            trace=fetch.trace,
        )
        if link.send(message):
            return protocol.state is not ReceiveState.LOST  # what the peer has not read was too much
        protocol.ahead = False
        self._void_ahead()
        self.on_link_lost(Failure(Status.FAILED, Code.PEER_LOST, "the control stream was lost"))
        return False

    def _grant_ahead(self, tokens: range) -> bool:
        """Take staging memory that is granted with the question. Whether there is any."""
        site, grants, most, token, agent = self.site, self.grants, 1, b"", ""
        nbytes = self.part.pair.most_staged_bytes(tokens)
        if nbytes > site.place_bytes:
            places, nbytes = -(-nbytes // site.place_bytes), site.place_bytes
            most = min(site.config.window, site.receive_desk.share.most_extents(nbytes), places)
            token, agent = _new_token(None if self.checking is not None else self._peer_agent())
            if not token:
                return False
        grants.ring = site.receive_desk.take(self.peer.account, max(1, nbytes), most, ExtentState.WRITING)
        places = self.protocol.staged_ahead = len(grants.ring)
        if token and places:
            self._turns = Turns(places, 0, token, agent)
            if places == most and has_fired(self.fetch.after):
                self.protocol.staged_ahead = grants.turns() * places
        return places > 0

    async def run(self, message: wire.Accept) -> None:
        """Receive what was asked for. What fails stops all of it."""
        protocol, rows = self.protocol, self._table_rows()
        try:
            if self._needs_plan and self._bound is None:
                warming = self.site.warming.get((self.peer.identity.incarnation, False))
                if warming is not None and not warming.done():
                    await self._wait_shared(asyncio.ensure_future(asyncio.wait({warming})))
                self._stale = False  # while a thread plans with the peer's blocks, they may grow
                self._bound = made = await self.site.offload(partial(self._plan, message, self._source), rows=rows)
                self.tally.pieces, self._grid = made.pieces, made.grid
            bound = self._bound
            while self.moving:
                if protocol.chunks_done == message.chunks:  # the last result may be long in coming, or the offer's end
                    self._release_ring()
                    await self._wait_for_news()
                elif bound is not None and self._stale:  # no chunk may begin with the old lists
                    self._stale, self._bound = False, None  # nor does any land by them
                    grown = partial(bound.grown, self._source, covered=0)
                    self._bound = bound = await self.site.offload(grown, rows=max(bound.rows, self._table_rows()))
                else:
                    await self._advance(bound)
        except asyncio.CancelledError:
            if not self._given_up:
                raise
        except Exception as error:  # noqa: BLE001 - tasks are supervised here: a defect ends the transfer, named
            self._fail(error)

    def _begin(self, message: wire.Accept) -> None:
        """Let the mover know of all chunks where the answer tells all and the plan takes no time; else `run` does."""
        site, ring = self.site, self.grants.ring
        self._pending_accept = message
        if not self._needs_plan:  # there is nothing to do before chunks arrive
            self._keep_polling()
            return
        warming = site.warming.get((self.peer.identity.incarnation, False))
        known = self._grid is not None and message.chunks <= len(ring) and self.checking is None
        if known and (warming is None or warming.done()) and self._table_rows() <= SMALL_PLAN and not self._given_up:
            self._bound = bound = self._plan(message, self._source)
            self.tally.pieces = bound.pieces
            self._submit(self._scatter_steps(bound, range(message.chunks), ring), message.chunks, Turns(len(ring)))
            return  # the mover does what there is to do, and keeps the transport progressing meanwhile
        self._keep_polling()
        self._wake()

    def _table_rows(self) -> int:
        """About how many rows the tables of its plan have."""
        theirs, ours = map(_ids_of, self._source.values()), map(_ids_of, self.fetch.spans.values())
        return max(sum(map(len, theirs)), sum(map(len, ours)))

    def _plan(self, message: wire.Accept, source: BlockLists) -> BoundPlan:
        """The plan that the peer has made. From any thread."""
        # agreed upon with the answer, if that uses what was granted ahead; the peer may have said other things since
        fetch, agreed = self.fetch, self._grid
        try:
            grid = self._chunk_grid(message) if agreed is None else agreed
            plan = self.part.pair.template.bind(source, fetch.spans, fetch.tokens, covered=0)
            differs = agreed is None and plan.digest(grid) != message.digest
            if differs or plan.nbytes != message.bytes:
                raise _plan_differs(message)
        except KvxferError as error:
            raise RefusedError(str(error), reason=Code.PLAN_DIFFERS) from error
        return BoundPlan(plan, grid)

    def _chunk_grid(self, message: wire.Accept) -> ChunkGrid:
        """How the peer cuts it, which has to make as many chunks as it says."""
        tokens, window, band = self.fetch.tokens, message.tokens_per_chunk, message.windows_per_band
        grid = ChunkGrid(self.part.pair.layers, message.layers_per_chunk, window, tokens.start, tokens.stop, band)
        if grid.chunks != message.chunks:
            raise _plan_differs(message)
        return grid

    # --- chunks, in their order

    async def _advance(self, bound: BoundPlan | None) -> None:
        """Do all that can be done now, and wait for news."""
        protocol = self.protocol
        staged = self.route is Route.STAGED
        if bound is None or not staged:
            if bound is not None and self.route is Route.PULL:
                await self._submit_reads(bound)
            there = protocol.arrived
            if self._flushes and protocol.chunks_done < there:  # into the caller's blocks, once for all of it
                await self._flush_or_sum()
        else:
            if self._submitted < protocol.granted and not self._stale:
                await self._submit_scatters(bound)
            there = self._copied
        if protocol.chunks_done < there:
            await self._land_checked(bound, there)
        if protocol.chunks_done < protocol.chunks:
            if bound is not None and self.route in IN_PLACE:
                await self._grant_in_place(bound)
            elif bound is not None and staged and protocol.granted < protocol.chunks:
                await self._grant_ring(bound)
            if self._submitted == protocol.granted or not staged:
                await self._wait_for_news()
            else:
                await asyncio.sleep(0)

    async def _grant_in_place(self, bound: BoundPlan) -> None:
        """Let the peer write chunks that are ready, once the caller's blocks may be written."""
        protocol, rebuilds = self.protocol, self.site.rebuilds
        if protocol.granted == protocol.ready:
            return
        await self._wait_until_writable()
        if rebuilds.paused and self.route is Route.DIRECT:
            rebuilds.when_done(self._wake)
        elif self.moving:
            self.grants.count_in_place((protocol.ready - protocol.granted) * bound.most_bytes)
            self._reserve(protocol.ready)

    async def _grant_ring(self, bound: BoundPlan) -> None:
        """Put chunks that are ready into the peer's hands, as far as there is memory for them.

        Where others wait for memory no place is used again: when the last one is free, all are given back, and this
        transfer takes its turn as well. So they are where there are fewer than are wanted by now: a stream begins with
        the few chunks that are ready first.
        """
        protocol, grants, desk = self.protocol, self.grants, self.site.receive_desk
        self._check_moving()
        more, free = protocol.granted < protocol.ready, self._copied
        room, contended = desk.share.most_extents(bound.most_bytes), desk.contended
        most = min(self.site.config.window, room, protocol.ready - protocol.granted)
        if grants.ring and free == protocol.granted and (not more or contended or len(grants.ring) < most):
            self._release_ring()
        if grants.ring and more and not contended:
            ahead = self._most_ahead(most)
            if ahead == len(grants.ring):  # a place is used again once this has heard that it is free
                self.watch()
            if ahead == len(grants.ring) or protocol.granted - free <= ahead // 2:  # far ahead there is no hurry
                self._reserve(min(protocol.ready, free + ahead))
        elif more and not grants.ring and self._request is None and self._extent is None:
            self._request_staging(bound)
        if self._extent is not None:
            rebuilds = self.site.rebuilds
            named = None if rebuilds.paused else await self._turns_token()
            if named is None or rebuilds.paused:  # what is granted now would be for an agent that is about to go
                rebuilds.when_done(self._wake)
                return
            (token, agent), extent, self._extent, contended = named, self._extent, None, desk.contended
            ring = grants.begin_ring(extent, most, protocol.granted)
            # now: what is heard of chunks before there is a flow for them would be lost
            self._turns = Turns(len(ring), protocol.granted, token, agent)
            self._submit([], 0, self._turns)
            self.tally.add_stages(("queued", self._asked, self.site.now()))
            ahead = len(grants.ring) if contended else self._most_ahead(most)
            self._reserve(min(protocol.ready, protocol.granted + ahead), ring, token)

    def _most_ahead(self, most: int) -> int:
        """How many chunks of a ring may be granted before the first of them has left it."""
        places = len(self.grants.ring)
        return self.grants.turns() * places if self._movers_take_turns and places >= most else places

    @property
    def _movers_take_turns(self) -> bool:
        """Whether the peer's mover and ours see to it that a place is free: then more may be granted than there are.

        Not while that may take long, since the caller's blocks may not be written yet, or our mover has no room: the
        peer would keep for it what others could use.
        """
        turns, active = self._turns, self._active
        if turns is None or not turns.token or active is None or active.flow.slot < 0:
            return False
        self._writable = self._writable or has_fired(self.fetch.after)
        return self._writable

    async def _turns_token(self) -> tuple[bytes, str]:
        """A token by which the peer's agent and ours notify each other, and the name of the peer's; or nothing.

        Sums of a chunk have to be here before it is copied, so the loops say when that is.
        """
        if self.checking is not None or self.protocol.chunks - self.protocol.granted == 1:
            return b"", ""
        agent = self._peer_agent()
        if agent is not None and not agent.done():  # no longer than the loops would be late
            await self._wait_shared(asyncio.ensure_future(asyncio.wait({agent}, timeout=REPEAT_S)))
        return _new_token(agent)

    def _peer_agent(self) -> "asyncio.Future[str] | None":
        """The name of the peer's agent, once ours knows it; None if it will not."""
        if self._release_lane is no_op:
            self._release_lane = self.site.lanes.hold(self.peer)
        try:
            return self.site.lanes.connect(self.peer, self.link.renewals)
        except FabricError:
            return None

    def _request_staging(self, bound: BoundPlan) -> None:
        """Ask for memory that holds any chunk, and wait for it no longer than a grant holds."""
        desk, account, nbytes = self.site.receive_desk, self.peer.account, max(1, bound.most_bytes)
        self._asked = self.site.now()
        if free := desk.take(account, nbytes):
            self._extent = free[0]
        else:  # where the fetch has a time-out, that ends it
            patience = math.inf if self.fetch.deadline < math.inf else self.site.config.grant_lease
            self._request = desk.request(account, nbytes, patience, self._on_admitted)

    def _on_admitted(self, found: Extent | KvxferError) -> None:
        """There is memory, or there will not be."""
        self._request = None
        if isinstance(found, KvxferError):
            self._fail(found)
        elif self._given_up:
            self.site.receive_desk.release(found)
        else:
            self._extent = found
            self._wake()

    def _reserve(self, chunks: int, ring: Sequence[wire.Place] = (), token: bytes = b"") -> None:
        """Say that the peer may write the first so many chunks, and which places are free again."""
        protocol = self.protocol
        if chunks > protocol.granted:
            self._granted.append((chunks, self.site.now()))
            if self._copied == protocol.granted:
                self.grants.begin_turns(protocol.granted, self.site.now())
            self._send_reserve(chunks, ring, token)

    def _send_reserve(self, chunks: int, ring: Sequence[wire.Place] = (), token: bytes = b"") -> None:
        said, lease_ms = self._last_reserve, self.grants.next_lease_ms()
        said.copied = self._copied if self.route is Route.STAGED else 0
        said.renewal = self.site.now() + lease_ms / 1000 / _RENEWALS
        gate = self.exposure.grant(mapped=self.route is Route.MAPPED)
        self.link.send(*self.protocol.grant(chunks, lease_ms, gate, ring, said.copied, token))
        if self._turns is not None:  # in place nothing waits for a place, nor is told by agents
            self._schedule_reserve()

    def _schedule_reserve(self) -> None:
        """Say again what our agent tells the peer's, should that not come, and renew the lease of what waits for it."""
        said = self._last_reserve
        news = said.copied < self._copied
        if said.again is not None and news and not said.news:  # it need not wait as long as the lease
            said.again.cancel()
            said.again = None
        waits = self.protocol.granted - self._copied > len(self.grants.ring)  # some have no place yet
        if said.again is None and (waits or (self._movers_take_turns and self._copied < self.protocol.granted)):
            said.news = news
            said.again = self.site.call_at(self.site.now() + REPEAT_S if news else said.renewal, self._repeat_reserve)

    def _repeat_reserve(self) -> None:
        self._last_reserve.again = None
        if self.moving and self._copied < self.protocol.granted:
            self._send_reserve(self.protocol.granted)

    async def _submit_scatters(self, bound: BoundPlan) -> None:
        """Let the mover know how chunks that were granted are copied to where they belong."""
        begun, made = self._submitted, 0 if self._active is None else self._submitted - self._active.first
        more = max(len(self.grants.ring), max(bound.quick, 2 * made) if made else 1)  # the mover begins with the first
        chunks = range(begun, min(self.protocol.granted, begun + min(more, bound.at_once)))
        places = self.grants.places(chunks)  # which are given back when it ends
        if 2 * len(chunks) > bound.at_once:
            await asyncio.sleep(0)  # others on the loop have a turn before
            self._check_moving()
        self._submit(
            self._scatter_steps(bound, chunks, places), len(chunks), Turns(len(self.grants.ring), chunks.start)
        )

    async def _submit_reads(self, bound: BoundPlan) -> None:
        """Let the mover read chunks that the peer lets us read. It then confirms that the offer was held meanwhile."""
        most = 2 * self.site.config.window  # so that the mover always has the next one
        while self._submitted < min(self.protocol.ready, self._copied + most) and not self._stale:
            await self._submit_read(self._submitted, bound)
        if self._copied == self._submitted:  # more may be long in coming
            self._release_ring()

    async def _submit_read(self, chunk: int, bound: BoundPlan) -> None:
        site, peer = self.site, self.peer
        pieces = await site.offload(partial(bound.listed, chunk), rows=bound.chunk_pieces)
        await self._wait_until_writable()
        if self._release_lane is no_op:
            self._release_lane = site.lanes.hold(peer)
        while chunk >= self._readable[0][0]:
            del self._readable[0]
        _, until, generation = self._readable[0]
        lane = await self._wait_shared(site.lanes.connect(peer, self.link.renewals))
        while self._active is not None and self._active.source != (lane, generation):  # this comes behind it
            if self._copied < self._submitted:
                await self._wait_for_news()
                lane = await self._wait_shared(site.lanes.connect(peer, self.link.renewals))
            else:
                self._release_ring()
        post = Post(lane, Operation.READ, NO_PIECES, NO_PIECES, may_outlive_agent(site, peer), self._on_late_read)
        step = CopyJob(None)
        if len(pieces):
            local = block_pieces(site.geometry, pieces.dst, pieces.nbytes)
            remote = block_pieces(site.plans.geometry(peer), pieces.src, pieces.nbytes)
            step = CopyJob(None, until=until, post=replace(post, local=local, remote=remote))
        self.protocol.begin_reads(chunk + 1)
        self.tally.descriptors += len(pieces)
        self._submit([step], 1, post=post, generation=generation)

    def _submit(
        self,
        steps: Sequence[CopyJob],
        chunks: int,
        turns: Turns | None = None,
        *,
        post: Post | None = None,
        generation: int = 0,
    ) -> None:
        """The next so many chunks are copied out of a ring, or read, by steps of a flow: a new one if there is none."""
        site, protocol, first, active = self.site, self.protocol, self._submitted, self._active
        self._submitted += chunks
        if active is not None:
            site.mover.add(active.flow, steps)
            site.mover.allow(active.flow, self._submitted - active.first)
            return
        passage = None if post is None else site.peer_gates.passage(self.peer, generation)
        progress = partial(self._on_progress, first)
        flow = site.mover.flow(
            CopyJob(None, partial(progress, over=True), passage=passage, owner=self.protocol.transfer, post=post),
            Direction.SCATTER,
            steps,
            total=protocol.chunks - first,
            allowed=chunks,
            width=site.config.window,
            turns=turns,
            heard=protocol.arrived - first,
            progress=progress,
        )
        self._active = _ActiveFlow(flow, first, ("" if post is None else post.peer, generation))
        if self.fetch.watched:
            self.watch()

    def _scatter_steps(self, bound: BoundPlan, chunks: range, places: Sequence[Extent]) -> list[CopyJob]:
        """How the mover copies chunks out of staging memory."""
        staging = list(map(_address_of, places))
        made = bound.tables(Kind.SCATTER, chunks, staging)
        for extent, need in zip(places, made.staged_bytes.tolist(), strict=True):
            if extent.nbytes < need:
                raise ProtocolError(f"a chunk of {need} bytes was said to fit into {extent.nbytes}")
        return [CopyJob(made, after=self.fetch.after, from_nic=_by_nic(self, staged=True))]

    def _on_progress(self, first: int, outcome: CopyOutcome, *, over: bool = False) -> None:
        """More chunks are where they belong, or all; or one could not be copied, or read."""
        site, protocol, tally, active = self.site, self.protocol, self.tally, self._active
        if over and outcome.posted:
            posted = outcome.posted
            tally.add_stages(("posting", posted, posted + outcome.posting), ("wire", posted, posted + outcome.wire))
        if active is None or active.first != first:  # it was let go: nothing was left to be done of it
            return
        if over and outcome.error is not None and outcome.may_move:
            active.withdraw_rebuild = request_rebuild(site, self.peer, urgent=True)
        elif over:
            self._active = None
        now, copying, moved = site.now(), outcome.copying - active.copying, first + outcome.steps
        if moved > self._copied and self.route is not Route.PULL:
            tally.add_stages(("scattering", now - copying, now))
            if moved > protocol.arrived:
                self._on_chunks(protocol.on_notified(moved), UNTIMED)
        elif moved > self._copied and self.moving:
            self.link.send(*protocol.chunks_read(moved))
        self._copied, active.copying = max(self._copied, moved), outcome.copying
        if self._turns is not None:
            if self._bound is not None:
                self.grants.measure_turns(self._copied, now, self._bound.most_bytes)
            self._schedule_reserve()
        if outcome.error is not None:
            self._fail(outcome.error)
        elif outcome.stopped and not self._given_up:
            self.stop(Failure(Status.FAILED, Code.TIMEOUT, "the lease ran out before the chunk was read"))
        self._land_or_wake()
        if self._given_up or protocol.ended:
            self._reclaim()

    def _on_late_read(self, _: bool) -> None:
        """What was read in doubt has ended, or our agent has."""
        active, self._active = self._active, None
        if active is not None:
            active.withdraw_rebuild()
        self._reclaim()

    def _release_ring(self) -> None:
        """Nothing is in the peer's hands, nor to be copied: others may have the memory, and the mover's place."""
        self.grants.release()
        active, self._active, self._turns = self._active, None, None
        if active is not None:
            self.site.mover.finish(active.flow)

    async def _land_checked(self, bound: BoundPlan | None, there: int) -> None:
        """The first so many chunks are in place: they have landed if they are as they should be."""
        protocol = self.protocol
        while bound is not None and (checking := self.checking) is not None and protocol.chunks_done < there:
            chunk = protocol.chunks_done
            if checking.wants(chunk, bound.carried(chunk, chunk + 1)):
                await self._compare_sums(chunk, bound, checking)
            if self._given_up:
                raise asyncio.CancelledError
            self._mark_landed(chunk + 1)
        if protocol.chunks_done < there:
            self._mark_landed(there)
        if protocol.ended:
            self._reclaim()

    def _mark_landed(self, stop: int) -> None:
        """The first so many chunks have landed.

        Raises:
            RefusedError: If all have, and not so many bytes as the peer says.
        """
        protocol, bound = self.protocol, self._bound
        if bound is not None:
            self.tally.bytes += bound.carried(protocol.chunks_done, stop)
            if stop == protocol.chunks and self._nbytes not in {None, self.tally.bytes}:
                raise self._bytes_differ()
        elif self._nbytes is None:  # about: this side has no plan of it, and the last result says it
            self.tally.bytes = protocol.nbytes * stop // protocol.chunks
        protocol.chunks_landed(stop)
        self.fetch.landed()

    def has_landed(self, layer: int) -> bool:
        """Whether all chunks have that have a part of a layer."""
        return self._grid is not None and self._grid.last_of(layer) < self.protocol.chunks_done

    def _land_or_wake(self) -> None:
        """Something has come, or was copied: say so now where that is all. `run` does what else there is."""
        protocol = self.protocol
        there = self._copied if self.route is Route.STAGED else protocol.arrived
        planned = not self._needs_plan or (self._bound is not None and not self._stale)
        plain = self.checking is None and not self._flushes
        lands = planned and plain and protocol.state is ReceiveState.MOVING and not self._given_up
        if lands and protocol.chunks_done < there:
            try:
                self._mark_landed(there)
            except KvxferError as error:
                self._fail(error)
        if protocol.ended:
            return
        waits = protocol.chunks_done < protocol.granted == protocol.chunks  # for the others, which are granted
        if not (lands and waits and self.route is not Route.PULL):
            self._wake()

    def _bytes_differ(self) -> RefusedError:
        """The two sides do not mean the same by the transfer: its bytes are not where they belong."""
        reason = f"{self.tally.bytes} bytes were to come by this side's plan, and {self._nbytes} by the prefill rank's"
        return RefusedError(reason, reason=Code.PLAN_DIFFERS)

    async def _compare_sums(self, chunk: int, bound: BoundPlan, checking: Checking) -> None:
        """Compare a chunk that is in the caller's blocks with what the peer says it adds up to."""
        part = await self.site.offload(partial(bound.chunk, chunk), rows=bound.chunk_rows)
        self._check_moving()
        outcome = await self._flush_or_sum(SumPlan.at_destination(part))
        self._check_moving()
        wrong = checking.compare(chunk, part, outcome.sums, self.peer.name)
        self.site.metrics.chunks_checked["damaged" if wrong else "ok"] += 1
        if wrong:
            self.stop(Failure(Status.FAILED, Code.INTEGRITY, wrong))
            if self.protocol.state is ReceiveState.STOPPED:  # its last result has come, so there was nothing to ask
                self.link.send(wire.Cancel(self.protocol.transfer, Code.INTEGRITY))
            raise asyncio.CancelledError

    async def _flush_or_sum(self, sums: SumPlan | None = None) -> CopyOutcome:
        """Add up what is in the caller's blocks, or flush what has come there.

        Raises:
            KvxferError: If it failed, or no more copies are taken.
        """
        ended: asyncio.Future[CopyOutcome] = self.site.loop.create_future()

        def done(outcome: CopyOutcome) -> None:
            self._copies -= 1
            resolve(ended, outcome)
            self._reclaim()

        owner = self.protocol.transfer
        job = CopyJob(None, done, from_nic=sums is None, owner=owner, sums=sums)
        self.site.mover.submit(job, Direction.SCATTER)
        self._copies += 1
        outcome = await ended
        if outcome.error is not None:
            raise outcome.error
        return outcome

    # --- messages

    def on_accept(self, message: wire.Accept) -> None:
        """The peer made a plan."""
        protocol, route = self.protocol, message.route
        if not protocol.on_accept(message):
            return
        site, grants, tally, exposure = self.site, self.grants, self.tally, self.exposure
        if message.ahead:  # even if it is stopped below: what is under way may still arrive
            self._granted.append((protocol.granted, site.now()))
        else:
            self._void_ahead()
        routes = self.part.asks.routes
        if route not in routes:
            reason = f"the peer chose the route {route.name.lower()}, which was not among those it was asked for"
            self.stop(Failure(Status.FAILED, Code.NO_COMMON_ROUTE, reason))
            return
        if (preferred := site.config.route) != "auto" and ROUTE_NAMES[routes[0]] != preferred:  # it was not asked
            reason = f"{preferred} is not possible for this pair"
            site.metrics.fell_back(reason)
            _log.warning("route_fell_back", peer=self.peer.name, transfer=self.fetch.id, reason=reason)
        self.route, self.why, staged = route, message.why, route is Route.STAGED
        self._flushes = not staged and _by_nic(self, staged=False)
        tally.chunks, tally.predicted = message.chunks, message.predicted_us / 1e6 or None
        site.fenced[self.peer.identity.incarnation] = message.fenced
        exposure.routes = (route,)
        try:
            if message.ahead:
                if message.digest != cut_digest(self._agreement, message.layers_per_chunk, message.tokens_per_chunk):
                    raise _plan_differs(message)
                self._grid = self._chunk_grid(message)
                if self._turns is not None:
                    self._submit([], 0, self._turns)
                    grants.begin_turns(0, site.now())
                    self._schedule_reserve()
                # else the peer has compared what both mean by it
                self._needs_plan = staged or self.checking is not None
                tally.pieces = message.pieces
            else:
                exposure.void()
            if message.spans:
                self._extend_source(message.spans)
            self._begin(message)
        except Exception as error:  # noqa: BLE001 - as in `run`
            self._fail(error)

    def _void_ahead(self) -> None:
        """The peer writes nothing under the grant of `Fetch`."""
        self.grants.release()
        self._turns = None

    def on_refuse(self, message: wire.Refuse) -> None:
        """The peer refused."""
        self.site.metrics.refusals_received[message.code.name.lower()] += 1
        self.protocol.on_refuse(message)
        self._reclaim()

    def on_ready(self, message: wire.Ready) -> None:
        """Chunks are ready at the peer, and perhaps its block lists have grown."""
        if self.protocol.on_ready(message):
            self._readable.append((message.chunks, self.site.now() + message.lease_ms / 1000, message.generation))
        if self.route is not Route.STAGED and not self.protocol.exposed:  # else our own copies may read the ring yet
            self._void_ahead()
        if message.spans and self.moving:
            self._stale = True
            self._extend_source(message.spans)
        self._wake()

    def on_arrived(self, message: wire.Arrived) -> None:
        """Chunks have arrived."""
        self._on_chunks(self.protocol.on_arrived(message), message.timings)

    def on_sums(self, message: wire.Sums) -> None:
        """What a chunk adds up to at the peer that has been granted."""
        if self.checking is not None and self.protocol.arrived <= message.chunk < self.protocol.granted:
            self.checking.on_sums(message)

    def on_result(self, message: wire.KvAgentResult) -> None:
        """The transfer ended at the peer, or will fail."""
        protocol = self.protocol
        if message.chunk == WHOLE:
            if message.status is Status.IN_DOUBT:
                self.exposure.on_in_doubt()
            elif message.status is Status.OK and protocol.state is ReceiveState.MOVING and not protocol.heard_last:
                self._nbytes = nbytes = message.bytes
                if not self._needs_plan:
                    self.tally.bytes = nbytes
                elif protocol.chunks_done == protocol.chunks and nbytes != self.tally.bytes:
                    self._fail(self._bytes_differ())
        self._on_chunks(protocol.on_result(message), message.timings)
        if protocol.failure is not None and protocol.state is ReceiveState.MOVING:
            self.stop(protocol.failure)
        if protocol.ended or protocol.failure is not None:
            self._reclaim()

    def _on_chunks(self, chunks: range | None, timings: wire.Timings) -> None:
        """The peer, or its agent, says that it is through with chunks; None of what nothing waits for."""
        if chunks is None:
            self.site.metrics.results_dropped["stale"] += 1
            return
        now, granted, active = self.site.now(), self._granted, self._active
        if self.route is Route.PULL:
            if not chunks:
                return
            if self.tally.first_byte is None:
                self.tally.first_byte = now
        elif chunks:
            self.tally.add_chunks(granted[0][1], now, timings)
            while granted and granted[0][0] <= chunks.stop:
                del granted[0]
            if active is not None and self.route is Route.STAGED:
                self.site.mover.note_peer_steps(active.flow, chunks.stop - active.first)
                if chunks.stop <= self._submitted:
                    return  # there is nothing to do before it is copied
        elif timings != UNTIMED:
            self.tally.add_chunks(now, now, timings)
        self._land_or_wake()

    def _extend_source(self, spans: Sequence[wire.Span]) -> None:
        """Block ids of the peer that it did not name before; only of what was asked for, or they would pile up here."""
        strange = set(map(_group_of, spans)).difference(self.part.pair.groups)
        try:
            if strange:
                raise ProtocolError(f"the peer named blocks of group {min(strange)!r}, of which nothing was asked for")
            self._source = decode_spans(spans, follow=self._source)
        except KvxferError as error:
            self._fail(error)

    # --- waiting, which ends when we give up

    async def _wait_shared(self, future: "asyncio.Future[_T]") -> _T:
        """What a future brings that is somebody else's too."""
        mine = asyncio.shield(future)
        self._shared = mine
        try:
            found = await mine
        finally:
            self._shared = None
        self._check_moving()
        return found

    async def _wait_for_news(self) -> None:
        """A chunk was announced, or has landed, or the last result is there."""
        if self._given_up:
            raise asyncio.CancelledError
        self._news = news = self._news or asyncio.Future(loop=self.site.loop)
        await news
        self._news = None

    def _wake(self) -> None:
        """There is news. The first after the peer's answer begins `run`, which sees what there is."""
        if self._pending_accept is not None and self.moving:
            plan, self._pending_accept = self._pending_accept, None
            name = f"kvxfer receive {self.exposure.name}"
            self.site.tasks.spawn(self.run(plan), name, self.fetch.on_error, spare=True)
            return
        self._news = news = self._news or asyncio.Future(loop=self.site.loop)
        if not news.done():
            news.set_result(None)

    async def _wait_until_writable(self) -> None:
        """The caller's blocks may be written."""
        self._check_moving()
        while not self._writable:
            asked: asyncio.Future[CopyOutcome] = self.site.loop.create_future()
            job = CopyJob(None, partial(resolve, asked), self.fetch.after, owner=self.protocol.transfer)
            waits = self.site.mover.submit(job, Direction.SCATTER)
            try:
                outcome = await self._wait_shared(asked)
            finally:
                self.site.mover.cancel(waits)  # of no effect if the event has fired
            if outcome.error is not None:
                raise outcome.error
            self._writable = not outcome.stopped

    # --- ending

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, KvxferError):
            _log.error("task_failed", task=f"kvxfer receive {self.exposure.name}", error=repr(error), exc_info=error)
            error = TransferFailedError(f"a step of the transfer failed: {error!r}")
        code = error.reason if isinstance(error, RefusedError) else error.code
        self.stop(Failure(Status.FAILED, code, str(error)))

    def stop(self, failure: Failure) -> None:
        """Give up; `blocks_safe` becomes true when memory is safe."""
        self._give_up()
        if messages := self.protocol.cancel(failure, reading=self.reading):
            self.link.send(*messages)
        self._reclaim()

    def on_link_lost(self, failure: Failure) -> None:
        """The session is gone, or the peer is silent. After its last word there is nothing to be lost."""
        if self.protocol.heard_last:
            return
        self._give_up()
        self.protocol.on_link_lost(failure)
        self._reclaim()

    def resume(self, link: Link) -> None:
        """The incarnation that was lost is back: ask what became of the transfer."""
        self.link = link
        self.exposure.on_renewals(link.renewals)
        if self.route is not Route.PULL and not self.finished:
            self._keep_polling()
        self.link.send(*self.protocol.resume(reading=self.reading))
        self._reclaim()

    def _keep_polling(self) -> None:
        """Make progress for what the peer posts: over TCP the target moves the data."""
        if self.route is not Route.MAPPED and self._stop_polling is no_op:
            self._stop_polling = self.site.mover.hold_awake()

    def _give_up(self) -> None:
        """Begin nothing new, and wait for nothing but what is in flight."""
        self._given_up = True
        if self.protocol.exposed:  # perhaps before its answer was understood: the peer may be writing by now
            self._keep_polling()
        if self._request is not None:
            self.site.receive_desk.withdraw(self._request)
            self._request = None
        if self._extent is not None:
            self.site.receive_desk.release(self._extent)
            self._extent = None
        if self._active is not None:
            self.site.mover.cancel(self._active.flow)
        if self._news is not None:
            self._news.cancel()
        if self._shared is not None:
            self._shared.cancel()

    def _on_evidence(self) -> None:
        """There is evidence, other than the peer's word, that nothing of it is written any more."""
        self.protocol.on_evidence()
        self._reclaim()

    def _reclaim(self) -> None:
        """Give back what the peer is through with; quarantine what it may still write."""
        protocol, state = self.protocol, self.protocol.state
        ended, lost = protocol.ended, state is ReceiveState.LOST
        if protocol.failure is None and state in _RUNNING:
            return  # all goes well
        if not self._given_up and state is not ReceiveState.DONE:
            self._give_up()  # whoever ended it: no scatter begins any more
        if self.route is Route.PULL and not self.reading and (unread := protocol.reads_ended()):
            self.link.send(*unread)
        if self._active is None and ended:  # else our own copies read it yet
            self.grants.release()
        elif self._active is None and lost:
            self._quarantine()
        if ended or self.finished or (lost and (not self.link.is_open or self.route is Route.PULL)):
            self._leave_peer()
        if ended:
            self.exposure.end()
            if self._pending_accept is None:  # else `run` has not begun, and will not
                self._wake()
        self.fetch.end_if_over()
        if lost and (not self.finished or self.owes_an_answer):
            self.fetch.role.recover(self)

    def _quarantine(self) -> None:
        """Keep what the lost peer has in its hands: it writes no chunk before there is a place for it."""
        protocol, turns = self.protocol, self._turns
        granted = protocol.staged_ahead if protocol.ahead else protocol.granted
        stop = granted if turns is None else min(granted, self._copied + turns.places)
        self.grants.quarantine(range(protocol.arrived, stop))

    def _leave_peer(self) -> None:
        """Nothing that the peer has posted needs this side to end any more, nor does it wait for news of it."""
        if self._stop_polling is not no_op:
            self._stop_polling()
            self._stop_polling = no_op
        if self._release_lane is not no_op and self._active is None:
            self._release_lane()
        if self._last_reserve.again is not None:
            self._last_reserve.again.cancel()


def _new_token(agent: "asyncio.Future[str] | None") -> tuple[bytes, str]:
    """A token by which an agent and ours notify each other, and its name; nothing if ours does not know it (yet).

    Then the loops say what has arrived.
    """
    if agent is None or not agent.done() or agent.cancelled() or agent.exception() is not None:
        return b"", ""
    return b"\1" + token_bytes(TOKEN_BYTES - 1), agent.result()


def _by_nic(receiver: Receiver, *, staged: bool) -> bool:
    """Whether a NIC writes what comes from the peer into memory of a GPU."""
    site = receiver.site
    if staged and (site.staging is None or site.staging.kind != "VRAM"):
        return False
    return site.geometry.kind == "cuda" and may_be_elsewhere(receiver.peer.body.host)


def _plan_differs(message: wire.Accept) -> RefusedError:
    return RefusedError(
        f"the two sides plan transfer {message.transfer} differently "
        f"({message.chunks} chunks, {message.bytes} bytes there)",
        reason=Code.PLAN_DIFFERS,
    )
