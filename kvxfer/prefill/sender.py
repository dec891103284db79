"""One transfer out, from `Fetch` to its last result: the sans-I/O states of `Sending`, run over flows of the mover.

`Sender.run` is all of it, in order: the offer, the plan, what may be read is announced, what is granted is moved.
Chunks that were granted under the same terms are one flow of the mover, which goes on from chunk to chunk by itself. It
ends in `Sender._on_flow_end`, and the transfer in `Sender._finish`, with its last result. What a flow holds is given
back there, and not by a task that waits for the mover: more may be said of a doubt before a task goes on, and a worker
that closes ends its tasks before its mover.

Messages and news come in between. They change its state there and then, so that nothing begins any more once a
transfer is stopped, and wake `run`, which looks at how things stand.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace as with_fields
from numpy.typing import NDArray

from kvxfer.copy.mover import Flow
from kvxfer.copy.port import (
    NO_PIECES,
    READY,
    CopyJob,
    CopyOutcome,
    Direction,
    Event,
    Gate,
    Operation,
    Post,
    Turns,
    has_fired,
    join,
)
from kvxfer.copy.tables import Kind
from kvxfer.errors import (
    Code,
    FailureReport,
    GeometryError,
    KvxferError,
    ProtocolError,
    RefusedError,
    Step,
    TransferFailedError,
)
from kvxfer.geometry import BlockLists, PairPlan, SumPlan, TransferPlan, check_state, cut_digest, selected
from kvxfer.memory.books import Extent, ExtentState, Request
from kvxfer.names import MAX_NAME
from kvxfer.peers.link import Link
from kvxfer.plans.pairs import (
    LISTED,
    BoundPlan,
    block_pieces,
    choose_and_cut,
    decode_spans,
    encode_spans,
    fit,
    in_place_bytes,
    staging_pieces,
    usual_chunks,
)
from kvxfer.plans.routes import Choice, RouteSupport, choose, never
from kvxfer.prefill.offers import Entry
from kvxfer.protocol import messages as wire
from kvxfer.protocol.messages import FOREVER_MS, MAX_CHUNKS, ROUTE_NAMES, Route, Status
from kvxfer.protocol.session import PeerInfo
from kvxfer.protocol.transfer import IN_PLACE, REPEAT_S, UNTIMED, Failure, Sending, SendState, added, is_token
from kvxfer.runtime import Callback, no_op, resolve
from kvxfer.safety.doubt import Exposure, may_outlive_agent, request_rebuild
from kvxfer.site import Site, Tally
from kvxfer.telemetry import Ended, hears_info, logger

__all__ = ["RETRY_MS", "AcceptedPlan", "OfferSnapshot", "Sender", "plan_transfer"]

# --- the answer

_SMALLEST_STREAMED_CHUNK: Final = 1 << 20
"""Bytes below which streaming cuts no smaller chunks: their control frames would cost more than the overlap gains."""
_MOST_STREAMED_CHUNKS: Final = 256
"""About as many chunks a small streamed transfer is cut into at most, however small its steps are."""


class OfferSnapshot(Struct, frozen=True):
    """An offer as it is when a transfer of it is planned."""

    spans: BlockLists  # source blocks by group
    tokens: int  # tokens that they hold
    step: int  # tokens that came last: more will come in steps like it
    finished: bool  # whether nothing will be added
    by_layer: bool  # whether layers become ready one after the other
    all_ready: bool  # whether nothing of it is waited for, so that what its transfer takes tells how fast the pair is


class AcceptedPlan(Struct, frozen=True):
    """What becomes of it."""

    bound: BoundPlan  # its plan, and how it is cut
    choice: Choice  # its route
    message: wire.Accept  # what the decode rank is told
    plain_s: float  # seconds that it would be predicted to take, had transfers with the peer taught nothing


def plan_transfer(
    site: Site,
    peer: PeerInfo,
    fetch: wire.Fetch,
    known: PairPlan | None,
    offer: OfferSnapshot,
    support: RouteSupport,
    ahead: bool,
    checked: bool = False,
) -> AcceptedPlan:
    """Plan a transfer.

    Args:
        site: The worker.
        peer: Whose fetch it is.
        fetch: What it asks for.
        known: The plan of that with the peer, if there is one.
        offer: What there is.
        support: What the pair can do.
        ahead: Whether what the fetch grants ahead still holds.
        checked: Whether sums are wanted of its chunks, or of some: who compares must know which rows are padding, and
            so the blocks of this side also where they need not be named.

    Raises:
        RefusedError: If the two sides do not mean the same by it, no route is left, or no chunk is small enough.
        GeometryError: If it cannot be planned: blocks or tokens that the offer does not hold.
    """
    tokens = range(fetch.token_start, fetch.token_stop)
    try:
        pair = known or site.plans.outgoing(peer, fetch.selections)
    except GeometryError as error:
        raise RefusedError(str(error), reason=Code.WANTS_NOT_HELD) from error
    if pair.has_state:
        check_state(pair, tokens, offer.tokens)
    plan: TransferPlan = pair.template.bind(offer.spans, decode_spans(fetch.spans), tokens, covered=offer.tokens)
    agreement = pair.agreement(plan.dst_spans, tokens)
    if (fetch.lease_ms or fetch.agreement) and fetch.agreement != agreement:  # granted ahead for another plan
        reason = "the two sides do not mean the same by this transfer: their plans differ"
        raise RefusedError(reason, reason=Code.PLAN_DIFFERS)
    nbytes, incarnation = plan.nbytes, peer.identity.incarnation

    def seconds(route: Route, pieces: int) -> float:
        chunks, costs = usual_chunks(site.config, route, nbytes), site.estimates.costs[route]
        return costs.seconds(nbytes=nbytes, chunks=chunks, pieces=pieces) * site.estimates.factor(incarnation, route)

    overdue = partial(site.estimates.overdue, incarnation) if offer.all_ready else never
    choice, bound = choose_and_cut(
        fetch.routes,
        support,
        partial(
            choose,
            site.config.route,
            support,
            nbytes=nbytes,
            pieces=lambda: plan.merged_pieces,
            seconds=seconds,
            overdue=overdue,
        ),
        partial(_cut, site, fetch, offer, plan),
    )
    route, grid, chunks = choice.route, bound.grid, bound.grid.chunks
    fenced = site.peer_gates.has(peer)
    ahead = ahead and offer.finished and _grant_covers(peer, fetch, route, bound, fenced=fenced)
    unnamed = ahead and not checked and route in IN_PLACE  # the decode rank need not know this side's blocks
    pieces = plan.merged_pieces if route in LISTED else bound.pieces
    plain = site.estimates.costs[route].seconds(nbytes=nbytes, chunks=chunks, pieces=pieces)
    predicted = plain * site.estimates.factor(incarnation, route)
    message = wire.Accept(
        transfer=fetch.transfer,
        route=route,
        bytes=nbytes,
        spans=[] if unnamed else encode_spans(offer.spans, pair.groups),
        layers_per_chunk=grid.layers_per_chunk,
        tokens_per_chunk=grid.tokens_per_chunk,
        chunks=chunks,
        digest=cut_digest(agreement, grid.layers_per_chunk, grid.tokens_per_chunk),
        why=choice.why[:MAX_NAME],
        ahead=ahead,
        pieces=bound.pieces,
        predicted_us=min(FOREVER_MS, int(predicted * 1e6)),
        fenced=fenced,
        windows_per_band=grid.band,
    )
    return AcceptedPlan(bound, choice, message, plain)


def _grant_covers(peer: PeerInfo, fetch: wire.Fetch, route: Route, bound: BoundPlan, *, fenced: bool) -> bool:
    """Whether what `Fetch` grants ahead is what the transfer needs, through a gate that this rank can pass."""
    passes_word = route is Route.MAPPED and peer.body.gates > 0
    if fetch.generation and not passes_word and not fenced:
        return False
    if not fetch.ring:
        return route in IN_PLACE
    for place in fetch.ring:
        if place.length < bound.most_bytes:
            return False
    named = not fetch.token or is_token(fetch.token)
    return route is Route.STAGED and named and min(bound.grid.chunks, fetch.ring_chunks) > 0


def _cut(site: Site, fetch: wire.Fetch, offer: OfferSnapshot, plan: TransferPlan, route: Route) -> BoundPlan:
    """How it is cut."""
    nbytes = plan.nbytes
    limit = None
    if route is Route.STAGED:
        target = limit = min(site.config.chunk_bytes, site.send_desk.share.capacity, fetch.max_extent_bytes)
    else:  # takes no memory, so a chunk that is larger than was wished for does no harm
        target = in_place_bytes(route, plan, site.in_place_chunk_bytes)
    if not offer.finished:
        target = min(target, max(_SMALLEST_STREAMED_CHUNK, nbytes // 8))
    step = _streamed_tokens(offer, plan, nbytes) if offer.tokens < plan.tokens.stop else None
    bound = fit(
        plan,
        target_bytes=target,
        limit_bytes=limit,
        layers_per_chunk=1 if offer.by_layer else None,
        tokens_per_chunk=step,
        listed=route in LISTED,
    )
    if offer.all_ready or bound.grid.layer_runs == 1:
        return bound
    # chunks go in their order: all windows of a layer before the next one, of the tokens that are computed together
    together = -(-(plan.tokens.stop if step is None else step) // bound.grid.tokens_per_chunk)
    return BoundPlan(plan, replace(bound.grid, band=min(MAX_CHUNKS, together)))


def _streamed_tokens(offer: OfferSnapshot, plan: TransferPlan, nbytes: int) -> int | None:
    """Tokens of a chunk while blocks are still added: a step's, or more where those are too few to be worth a chunk."""
    if not nbytes:
        return None
    least = min(_SMALLEST_STREAMED_CHUNK, nbytes // _MOST_STREAMED_CHUNKS)
    runs = len(plan.pair.layers) if offer.by_layer else 1
    return max(offer.step, -(-least * len(plan.tokens) * runs // nbytes))


# --- the transfer

I64: TypeAlias = NDArray[np.int64]

_NAME: Final = "kvxfer.send"
_log: Final = logger(_NAME)
_hears_info: Final = hears_info(_NAME)
RETRY_MS: Final = {Code.TOO_MANY: 1000}
"""When to try again after a refusal for this reason: there is nothing that is to come first."""
_PULL_AHEAD: Final = 16
"""Chunks that a puller may have before it: enough for a window of any sensible size."""
_PULL_AHEAD_BYTES: Final = 512 << 20
"""About as many bytes, but two chunks at least."""
_LOOKED_AT: Final = 1024
"""Chunks of a stream that are looked at in a turn of the loop: the decode rank says how small they are."""
_LISTED_AT_ONCE: Final = 8
"""Chunks whose pieces are listed in a turn: no compiled code does that, and each takes up to 0.4 ms, however small."""
_NOTHING_YET: Final = CopyOutcome(None, 0.0)
_WIDTH: Final = 16
"""Chunks that are written in place at once: enough to keep copies and posts going."""
_IDLE_S: Final = 0.01
"""For how long a flow keeps what others could use while nothing is granted."""
_RUNNING: Final = frozenset({SendState.PARKED, SendState.MOVING})


class _Terms(Struct, eq=False):
    """When chunks that were granted may be moved."""

    stop: int  # up to which chunk
    granted: float  # when they were
    until: float  # when the grant's lease ends, by the last that was said of it: nothing is posted later
    generation: int  # as granted, for gates
    renewals: int  # how often the decode rank had made its agent anew by then
    fresh: bool  # whether they go elsewhere than those before

    def continues(self, before: "_Terms") -> bool:
        """Whether they may be moved as those before them, but for the lease."""
        return not self.fresh and (self.generation, self.renewals) == (before.generation, before.renewals)


class _ActiveFlow(Struct, eq=False):
    """Chunks that the mover moves one after another."""

    first: int  # the first of them
    terms: _Terms  # of the grant of the first one
    post: Post | None = None  # to whom, where something is posted
    extents: list[Extent] = field(default_factory=list[Extent])  # staging memory that they take turns in
    request: Request | None = None  # for that, while it is waited for
    gate: Gate | None = None  # in front of the peer's memory, if that is mapped
    reached: Callable[[I64], I64] | None = None  # makes the peer's addresses ours then
    flow: Flow | None = None  # where the mover does it, once there is a step
    stop: int = 0  # up to which chunk it has steps
    allowed: int = 0  # up to which chunk it may go
    reported: CopyOutcome = _NOTHING_YET  # what was heard of its progress last
    finished: bool = False  # whether nothing follows
    since: float = 0.0  # when all that may go had been done last
    idle: asyncio.TimerHandle | None = None  # ends it after a while in which there is nothing to do


@dataclass(slots=True, eq=False)
class _InDoubt:
    """A flow of which bytes may still move, though the mover has given it up."""

    copy: Flow  # what the mover still has
    left: bool  # whether it has left this side: our memory is not read for it any more
    forgotten: bool = False  # whether nobody asks any more what becomes of it at the peer
    let_go: Callback = no_op  # gives that memory back, and wants no other agent any more


class Sender(Struct, eq=False):
    """One transfer, from `Fetch` to its last result."""

    site: Site
    link: Link  # the control stream on which it was asked for, and results go; another one when the peer reconnects
    peer: PeerInfo  # at its other end
    protocol: Sending
    _ended: "Callable[[Sender], None]"  # called when it is over, and again if more is known of what ended in doubt
    _sums_every: int = 0  # of one chunk in how many sums are wanted; 0 for none
    listed: int = 0  # bytes that the lists in its fetch take
    name: str = ""  # its id, as the decode rank says it too
    began: float = 0.0  # when it was asked for
    # how often the decode rank had made its agent anew by its last grant; no later one was posted to
    renewals: int = 0
    offer: Entry | None = None  # the offer that it reads, once there is one
    tally: Tally = field(default_factory=Tally)
    report: FailureReport | None = None  # set when it ends, if it failed
    leave_process: Callback = no_op  # the peer's, whose end may be that of a doubt, though no link leads there any more
    _news: asyncio.Future[None] | None = None  # which `run` waits for
    _ahead: bool = False  # what `Fetch` grants is neither used nor void
    _bound: BoundPlan | None = None
    _answer: AcceptedPlan | None = None
    _all_ready: bool = False  # nothing of it is waited for, as of `OfferSnapshot`
    _named: BlockLists = field(default_factory=dict[str, Any])  # source blocks that the decode rank was told of
    _granted: deque[_Terms] = field(default_factory=deque[_Terms])  # of chunks that the mover does not have yet
    _submitted: int = 0  # the first so many are, or were, the mover's
    _active: _ActiveFlow | None = None  # what the mover does now
    _doubt: _InDoubt | None = None  # what is in doubt of the last one, which no other follows then
    _arrived: int = 0  # the first so many have arrived, and of those
    # these are being added up, or wait for ones before them
    _summing: dict[int, bytes | None] = field(default_factory=dict[int, bytes | None])
    _unreported: wire.Timings = UNTIMED  # what those took that it was not told of
    _reporting: asyncio.TimerHandle | None = None  # the decode rank was just told of something that has arrived
    _firing: Flow | None = None  # `pull`: what waits for the events of the next chunk
    _exposure: Exposure | None = None  # `pull`
    _stopped_at: Step | None = None
    _release_way: Callback = no_op  # open to the peer, and the transport awake, until this is called
    _timer: asyncio.TimerHandle | None = None  # gives up a silent decode rank; once stopped, what does not end

    def __post_init__(self) -> None:
        site, fetch = self.site, self.protocol.fetch
        self.name = f"{self.peer.identity.incarnation.hex()[:8]}-{fetch.transfer}"
        self.began, self.renewals, self._ahead = site.now(), self.link.renewals, fetch.lease_ms > 0
        if fetch.timeout_ms < FOREVER_MS:
            # the decode rank gives up by itself, before, and says so; this bounds one that does not
            self._timer = site.call_at(self.began + fetch.timeout_ms / 1000 + site.config.heartbeat, self._overdue)

    def __repr__(self) -> str:
        return f"<Sender {self.name}>"

    # --- a transfer, in order

    async def run(self) -> None:
        """Wait for the offer, plan, accept; then announce what may be read, and move what is granted.

        What fails is the transfer, whoever brought the news.
        """
        protocol, stop = self.protocol, self.protocol.fetch.token_stop
        try:
            await self._accept()
            while protocol.state is SendState.MOVING and (bound := self._bound) and (offer := self.offer):
                if self._granted:
                    await self._submit(bound, self._granted[0])
                elif offer.finished and offer.tokens < stop:
                    self._refuse_outside(offer)
                elif bound.plan.pair.has_state and offer.tokens > stop:
                    reason = f"the offer grew to {offer.tokens} tokens, and its state is no longer that of {stop}"
                    self.refuse(Code.TOKENS, reason)
                elif bound.plan.covered < min(offer.tokens, stop):  # its block lists reach further than the plan
                    make = partial(bound.grown, offer.spans, offer.tokens)
                    self._bound = await self.site.offload(make, rows=bound.rows)
                else:
                    self._announce(bound, offer)
                    if offer.finished and protocol.granted == protocol.chunks:
                        return  # the rest is in the mover's hands
                    if not await self._prepare_ahead(bound):
                        await self._wait_for_news()
        except KvxferError as error:
            self.refuse(error.reason if isinstance(error, RefusedError) else error.code, str(error))
        except asyncio.CancelledError:  # the worker is closing, and has stopped it if it could
            if self._active is not None and self._active.flow is None:
                self._end_flow(self._active)
            raise
        except Exception as error:  # noqa: BLE001 - tasks are supervised here: a defect ends the transfer, named
            _log.error("task_failed", task=f"kvxfer send {protocol.fetch.transfer}", error=repr(error), exc_info=error)
            self.refuse(Code.FAILED, str(TransferFailedError(f"a step of the transfer failed: {error!r}")))

    async def _wait_for_offer(self) -> Entry | None:
        """Wait for enough of the offer to plan, and for kernels that are being compiled; None if it ended before."""
        protocol, first, stop = self.protocol, self.protocol.fetch.token_start, self.protocol.fetch.token_stop
        while protocol.state is SendState.PARKED:
            offer = self.offer
            if offer is not None and offer.finished and offer.tokens < stop:
                self._refuse_outside(offer)
            elif offer is None or offer.tokens < min(first + 1, stop):
                self._void_ahead()
                await self._wait_for_news()
            elif (task := self.site.warming.get((self.peer.identity.incarnation, True))) and not task.done():
                if len(self.protocol.fetch.ring) > 1:  # others may need so much memory meanwhile
                    self._void_ahead()
                await self._wait_shared(task)
            else:
                return offer
        return None

    async def _wait_for_news(self) -> None:
        """Wait for news. There is none any more once what was said just now has ended it, or lost the link."""
        if self.protocol.state in _RUNNING:
            self._news = self.site.loop.create_future()
            await self._news

    async def _wait_shared(self, done: "asyncio.Future[Any]") -> None:
        """Wait for what others wait for too, but no longer once the transfer has failed."""
        done.add_done_callback(self.wake)
        try:
            while not done.done() and self.protocol.state in _RUNNING:
                await self._wait_for_news()
        finally:
            done.remove_done_callback(self.wake)

    def _refuse_outside(self, offer: Entry) -> None:
        """There is less on offer than was asked for, and no more will come."""
        fetch = self.protocol.fetch
        asked = range(fetch.token_start, fetch.token_stop)
        what = f"tokens {asked.start}..{asked.stop - 1}" if asked else f"the state of {asked.stop} tokens"
        self.refuse(Code.TOKENS_OUTSIDE_OFFER, f"{what} were asked, but {offer.tokens} are on offer")

    def _void_ahead(self) -> None:
        """If this has to wait, tell the decode rank that what `Fetch` granted is void."""
        if self._ahead:
            self._ahead = False
            self.link.send(wire.Ready(self.protocol.fetch.transfer, 0))

    async def _accept(self) -> None:
        """Plan, and say how it will be moved; begin with what `Fetch` grants, if that still holds and is needed."""
        site, protocol, fetch = self.site, self.protocol, self.protocol.fetch
        offer = await self._wait_for_offer()
        if offer is None:
            return
        by_layer = not offer.finished and offer.readiness.by_layer
        self._all_ready = offer.finished and offer.readiness.fired
        # as it is now: the plan may be made in a thread, while the offer grows
        draft = OfferSnapshot(offer.spans, offer.tokens, offer.step, offer.finished, by_layer, self._all_ready)
        wanted = offered = 0
        for asked in fetch.spans:
            wanted += len(asked.ids) // 4  # packed ids of 4 bytes
        for span in draft.spans.values():
            offered += len(span.ids)
        if fetch.token_stop > draft.tokens > 0:  # as many as it will be, if it grows
            offered = offered * fetch.token_stop // draft.tokens
        known, rows = site.plans.asked(self.peer, fetch.selections)
        support = site.route_support(self.peer, trusted=self.link.trusted, sending=True)
        make = partial(plan_transfer, site, self.peer, fetch, known, draft, support, self._ahead, self._sums_every > 0)
        made = await site.offload(make, rows=rows + max(wanted, offered))
        if protocol.state is not SendState.PARKED:  # it ended meanwhile
            return
        self._answer, self._bound, message, choice = made, made.bound, made.message, made.choice
        until = self.began + fetch.lease_ms / 1000
        if message.ahead and site.now() >= until:  # planning, or compiling before, took too long
            message = with_fields(message, ahead=False, spans=encode_spans(draft.spans, made.bound.plan.pair.groups))
        self._named = draft.spans
        tally = self.tally
        tally.chunks, tally.pieces, tally.predicted = message.chunks, made.bound.pieces, message.predicted_us / 1e6
        if self._all_ready:
            site.estimates.note_choice(self.peer.identity.incarnation, choice.route)
        if choice.fallback:
            site.metrics.fell_back(choice.fallback)
            _log.warning("route_fell_back", peer=self.peer.name, transfer=message.transfer, reason=choice.fallback)
        if choice.route is Route.PULL:
            self._release_way = site.mover.hold_awake()  # a target that others read from must make progress
            self._exposure = Exposure(site, self.link, self.name, self.on_unread, frozenset({Route.PULL}))
        else:  # for all chunks: the peer may be lost while one of them is under way
            self._release_way = (site.mappings if choice.route is Route.MAPPED else site.lanes).hold(self.peer)
        # in place nothing waits for that: to move it is more urgent
        self.link.send(*protocol.accept(message), soon=message.ahead and choice.route in IN_PLACE)
        if message.ahead:
            self._on_granted(protocol.granted, until, fetch.generation, fresh=True)

    def _announce(self, bound: BoundPlan, offer: Entry) -> None:
        """Tell the decode rank which chunks may go now."""
        protocol = self.protocol
        ready, most = protocol.ready, protocol.chunks
        if protocol.route is Route.PULL:
            # a lease runs from the announcement on: no more is announced than the other side may soon begin to read
            few = min(_PULL_AHEAD, _PULL_AHEAD_BYTES // max(1, bound.most_bytes))
            most = min(most, protocol.granted + max(2, few))
        if offer.finished and bound.plan.covered >= bound.plan.tokens.stop:
            ready = max(ready, most)
        else:
            few = min(most, ready + _LOOKED_AT)
            while ready < few and self._is_ready(bound, offer, ready):
                ready += 1
            if ready == few < most:
                self.site.loop.call_soon(self.wake)
        if ready > protocol.ready:
            self._send_ready(ready) if protocol.route is not Route.PULL else self._announce_reads(ready, bound)
        if offer.finished and (messages := protocol.finish_offer(offer.payload)):
            self._send(messages)

    @staticmethod
    def _is_ready(bound: BoundPlan, offer: Entry, chunk: int) -> bool:
        layers, start, stop = bound.grid.of(chunk)
        known = stop <= bound.plan.covered
        return known and (offer.finished or offer.readiness.events(layers, start, stop) is not None)

    def _send_ready(self, ready: int, lease_ms: int = 0) -> None:
        """Announce chunks, the first so many, and before them the blocks that they are in."""
        offer, bound = self.offer, self._bound
        if offer is not None and bound is not None and self.protocol.state is SendState.MOVING:
            news: list[wire.Span] = []
            if offer.spans is not self._named:  # an offer that grows gets new lists
                news = encode_spans(offer.spans, bound.plan.pair.groups, said=self._named)
                self._named = offer.spans
            generation = self._exposure.grant(mapped=False) if self._exposure is not None else 0
            self._send(self.protocol.announce(ready, lease_ms, news, generation))

    def _announce_reads(self, ready: int, bound: BoundPlan) -> None:
        """Route `pull`: announce chunks whose events have fired, and not before: the peer may read at once."""
        site, protocol, fired = self.site, self.protocol, self.protocol.ready
        if site.rebuilds.paused:
            site.rebuilds.when_done(self.wake)
            return
        while fired < ready and (self._all_ready or has_fired(self._event_of(fired))):
            fired += 1
        if fired > protocol.ready:
            self._send_ready(fired, site.lease_ms((fired - protocol.granted) * bound.most_bytes))
        if fired < ready and self._firing is None:
            job = CopyJob(None, self._on_event, self._event_of(fired), owner=self.name)
            self._firing = site.mover.submit(job, Direction.GATHER)

    def _on_event(self, outcome: CopyOutcome) -> None:
        """The events of the next chunk have."""
        self._firing = None
        if outcome.error is not None:
            self.refuse(outcome.error.code, str(outcome.error))
        self.wake()

    def _event_of(self, chunk: int) -> Event:
        """When a chunk of an offer may be read that is waited for."""
        offer, bound = self.offer, self._bound
        events = None if offer is None or bound is None else offer.readiness.events(*bound.grid.of(chunk))
        if events is None:
            raise TransferFailedError(f"chunk {chunk} was to be moved before it was ready")
        return join(events)

    # --- chunks, from their grant to their result

    def _on_granted(self, stop: int, until: float, generation: int, *, fresh: bool) -> None:
        """Chunks may be moved: those that the mover has steps of begin now, for the others `run` makes them."""
        self.renewals = self.link.renewals
        terms, active = _Terms(stop, self.site.now(), until, generation, self.renewals, fresh), self._active
        if active is not None and active.flow is not None and not self._granted and self._continues(active, terms):
            self._allow(active, terms)
            if stop <= active.stop:
                return
        self._granted.append(terms)

    def _continues(self, active: _ActiveFlow, terms: _Terms) -> bool:
        """Whether chunks go the way of those before them. Where others wait for memory they do not."""
        return not (active.finished or self._is_contended) and terms.continues(active.terms)

    @property
    def _is_contended(self) -> bool:
        """Whether others wait for what a flow holds."""
        staged = self.protocol.route is Route.STAGED
        return self.site.mover.crowded or (staged and self.site.send_desk.contended)

    async def _submit(self, bound: BoundPlan, terms: _Terms) -> None:
        """Hand chunks to the mover, as soon as there is all that it takes."""
        protocol, active = self.protocol, self._active
        if active is not None and active.allowed < terms.stop and not self._continues(active, terms):
            self._finish_flow(active)
            if self._active is active:
                await self._wait_for_news()  # for its end
            return
        if active is None:
            active = self._active = _ActiveFlow(self._submitted, terms, stop=self._submitted, allowed=terms.stop)
            if protocol.route is Route.MAPPED:
                windows, active.gate = self.site.mappings.windows_of(self.peer, terms.generation)
                active.reached = windows.reached
            else:
                await self._take_lane_and_staging(active, bound)
        while self._active is active and protocol.state is SendState.MOVING:
            if active.finished and active.allowed < terms.stop:  # it was concluded meanwhile, without these
                return
            if active.stop >= terms.stop:
                self._granted.popleft()
                if active.allowed < terms.stop:
                    self._allow(active, terms)
                return
            made, alike = active.stop - active.first, self._all_ready and protocol.route is not Route.DIRECT
            more = max(bound.quick if alike else 1, 2 * made) if made else 1  # the mover begins with the first
            await self._submit_steps(active, bound, min(terms.stop, active.stop + more))
            if active.extents and active.stop < terms.stop:
                await asyncio.sleep(0)  # what is granted meanwhile is heard

    async def _prepare_ahead(self, bound: BoundPlan) -> bool:
        """Make steps of chunks that will be granted soon, if they go the way of those before; whether any were made."""
        active, protocol = self._active, self.protocol
        if active is None or active.flow is None or active.finished:
            return False
        stop = min(protocol.ready, active.allowed + (2 * len(active.extents) or _WIDTH))
        if stop <= active.stop:
            return False
        await self._submit_steps(active, bound, stop)
        return True

    async def _take_lane_and_staging(self, active: _ActiveFlow, bound: BoundPlan) -> None:
        """What chunks need that are posted: a lane to the peer, and memory here to gather them into."""
        site, peer, protocol = self.site, self.peer, self.protocol
        connected = site.lanes.connect(peer, active.terms.renewals)
        if not connected.done():
            await self._wait_shared(connected)
        if self._active is not active:
            return
        runs_on = may_outlive_agent(site, peer)
        active.post = Post(connected.result(), Operation.WRITE, NO_PIECES, NO_PIECES, runs_on, self._on_late_end)
        if protocol.route is Route.STAGED and (nbytes := bound.most_bytes):
            most = min(len(protocol.ring), protocol.chunks - active.first)
            active.extents += site.send_desk.take(peer.account, nbytes, most, ExtentState.WRITING)
            if not active.extents:
                await self._wait_for_staging(active, nbytes, most)

    async def _wait_for_staging(self, active: _ActiveFlow, nbytes: int, most: int) -> None:
        """Wait for staging memory to gather a chunk into, and take as much as is there then."""
        desk = self.site.send_desk

        def on_admitted(found: Extent | KvxferError) -> None:
            active.request = None
            if isinstance(found, Extent):
                active.extents.append(found)
            else:
                self.refuse(found.code, str(found))
            self.wake()

        active.request = desk.request(self.peer.account, nbytes, self.site.config.grant_lease, on_admitted)
        while self._active is active and not active.extents:
            await self._wait_for_news()
        if self._active is active:
            active.extents = desk.begin_writing(active.extents[0], most - 1)

    async def _submit_steps(self, active: _ActiveFlow, bound: BoundPlan, stop: int) -> None:
        """Make steps of some chunks, in a thread where pieces are listed, and give them to the mover."""
        site, listed = self.site, self.protocol.route is Route.DIRECT
        at_once = min(bound.at_once, _LISTED_AT_ONCE) if listed else bound.at_once
        chunks = range(active.stop, min(stop, active.stop + at_once))
        rows = len(chunks) * bound.chunk_pieces if listed else 0
        make = partial(self._steps, active, bound, chunks, active.post, active.extents)  # it has none once it ends
        if 2 * len(chunks) > at_once:
            await asyncio.sleep(0)  # others on the loop have a turn before
        steps = await site.offload(make, rows=rows) if rows else make()
        if self._active is not active or self.protocol.state is not SendState.MOVING:  # it was stopped
            return
        active.stop = chunks.stop
        for step in steps:
            if step.post is not None:
                self.tally.descriptors += len(step.post.local.pieces)
        if active.flow is not None:
            site.mover.add(active.flow, steps)
            return
        terms = active.terms
        # on a GPU the kernel passes a gate by itself, and goes on though this process be stopped
        passage = site.peer_gates.passage(self.peer, terms.generation) if active.gate is None else None
        done, progress = partial(self._on_flow_end, active), partial(self._on_progress, active)
        job = CopyJob(None, done, until=terms.until, passage=passage, owner=self.tally, post=active.post)
        protocol, first, turns = self.protocol, active.first, None
        if protocol.route is Route.STAGED:
            turns = Turns(len(protocol.ring), first, protocol.token, "" if active.post is None else active.post.peer)
        active.flow = site.mover.flow(
            job,
            Direction.GATHER,
            steps,
            total=protocol.chunks - first,
            allowed=active.allowed - first,
            width=len(active.extents) or _WIDTH,
            turns=turns,
            heard=protocol.copied - first,
            progress=progress,
        )
        self._submitted = active.allowed
        self.tally.add_stages(("queued", terms.granted, site.now()))

    def _steps(
        self, active: _ActiveFlow, bound: BoundPlan, chunks: range, post: Post | None, extents: list[Extent]
    ) -> list[CopyJob]:
        """What the mover does about chunks: all of them alike, unless each is ready when others are, or is listed."""
        listed = self.protocol.route is Route.DIRECT
        steps: list[CopyJob] = []
        for part in [chunks] if self._all_ready and not listed else [range(chunk, chunk + 1) for chunk in chunks]:
            event = READY if self._all_ready else self._event_of(part.start)
            if listed:
                steps.append(self._listed_step(bound, part.start, post, event))
            elif post is None or not extents:  # in place, or windows in which no group has a row
                tables = bound.tables(Kind.COPY, part, reached=active.reached)
                steps.append(CopyJob(tables, after=event, gate=active.gate))
            else:
                steps.append(self._gather_step(active, bound, part, post, extents, event))
        return steps

    def _gather_step(
        self, active: _ActiveFlow, bound: BoundPlan, chunks: range, post: Post, extents: list[Extent], event: Event
    ) -> CopyJob:
        """Chunks that are gathered into staging memory, in whose extents they take turns, and written from there."""
        room: list[int] = []
        near: list[int] = []
        far: list[int] = []
        for chunk, place in zip(chunks, self.protocol.places(chunks), strict=True):
            extent = extents[(chunk - active.first) % len(extents)]
            room.append(min(place.length, extent.nbytes))
            near.append(extent.address)
            far.append(place.address)
        made = bound.tables(Kind.GATHER, chunks, near)
        sizes: list[int] = made.staged_bytes.tolist()
        if not any(sizes):
            return CopyJob(made, after=event)
        for most, need in zip(room, sizes, strict=True):
            if not self.peer.body.staging or most < need:
                raise ProtocolError(f"{most} bytes were granted for a chunk of {need}")
        local, remote = staging_pieces([(self.site.send_span, near), (self.peer.body.staging[0], far)], sizes)
        return CopyJob(made, after=event, post=with_fields(post, local=local, remote=remote))

    def _listed_step(self, bound: BoundPlan, chunk: int, post: Post | None, event: Event) -> CopyJob:
        """A chunk whose pieces are listed for the transport."""
        pieces = bound.listed(chunk)
        if post is None or not len(pieces):
            return CopyJob(None, after=event)
        local = block_pieces(self.site.geometry, pieces.src, pieces.nbytes)
        remote = block_pieces(self.site.plans.geometry(self.peer), pieces.dst, pieces.nbytes)
        return CopyJob(None, after=event, post=with_fields(post, local=local, remote=remote))

    def _allow(self, active: _ActiveFlow, terms: _Terms) -> None:
        """Chunks that it has steps of were granted."""
        if active.flow is None:
            return
        active.allowed = self._submitted = terms.stop
        active.terms.until = max(active.terms.until, terms.until)
        self.site.mover.allow(active.flow, active.allowed - active.first, active.terms.until)
        self.tally.add_stages(("queued", terms.granted, self.site.now()))

    def _finish_flow(self, active: _ActiveFlow) -> None:
        """Nothing follows what was granted: it ends when that is done."""
        active.finished = True
        if active.flow is not None:
            self.site.mover.finish(active.flow)
        else:
            self._end_flow(active)

    def _on_idle(self, active: _ActiveFlow) -> None:
        """All that was granted has been moved. What it holds is given back if nothing follows soon."""
        if self._is_contended:
            self._finish_flow(active)
        elif active.idle is None:
            active.idle = self.site.call_at(active.since + _IDLE_S, partial(self._check_idle, active))

    def _check_idle(self, active: _ActiveFlow) -> None:
        active.idle = None
        if active.first + active.reported.steps < active.allowed or active.finished:
            return  # it goes on, or is about to end
        if self.site.now() - active.since >= _IDLE_S:
            self._finish_flow(active)
        else:
            active.idle = self.site.call_at(active.since + _IDLE_S, partial(self._check_idle, active))

    def _on_progress(self, active: _ActiveFlow, outcome: CopyOutcome) -> None:
        self._count_arrived(active, outcome)
        if active.first + outcome.steps == active.allowed:
            active.since = self.site.now()
            self._on_idle(active)

    def _count_arrived(self, active: _ActiveFlow, outcome: CopyOutcome) -> None:
        """Count what has arrived since it was heard of last, and say so."""
        told, active.reported = active.reported, outcome
        if outcome.steps == told.steps:
            return
        copying, posting = outcome.copying - told.copying, outcome.posting - told.posting
        on_wire = outcome.wire - told.wire
        if self.protocol.route is Route.MAPPED:
            copying, on_wire = 0.0, copying
        timings = wire.Timings(0, int(copying * 1e6), int(posting * 1e6), int(on_wire * 1e6))
        self._report_arrived(active.first + outcome.steps, timings)

    def _on_flow_end(self, active: _ActiveFlow, outcome: CopyOutcome) -> None:
        """The mover is through with a flow, or gives it up: give back what it held, and say how it ended."""
        tally, started, posted = self.tally, outcome.started, outcome.posted
        if self.protocol.route is Route.MAPPED:
            posted = started if outcome.steps else 0.0
            tally.add_stages(("wire", started, started + outcome.copying))
        elif posted:
            tally.add_stages(
                ("wire", posted, posted + outcome.wire),
                ("posting", posted, posted + outcome.posting),
                ("gathering", started, started + outcome.copying),
            )
        if posted and tally.first_byte is None:
            tally.first_byte = posted
        self._count_arrived(active, outcome)
        in_doubt, rest = outcome.in_doubt, active.allowed - active.first - outcome.steps
        if in_doubt:
            self._keep_in_doubt(active, outcome)
        elif active.extents:
            self._release_staging(active)
        self._end_flow(active)
        if not rest:
            return
        if outcome.error is None:
            reason = "the grant's lease ran out, or it was taken back, before the chunk was posted"
            failure = Failure(Status.EXPIRED, Code.TIMEOUT, reason)
        else:
            failure = Failure(Status.FAILED, outcome.error.code, str(outcome.error))
        if self.protocol.state is SendState.MOVING:  # else it is being stopped, and this is what that has ended
            self.stop(failure)
        self._send(self.protocol.chunks_dropped(rest, in_doubt=in_doubt))

    def _end_flow(self, active: _ActiveFlow) -> None:
        """It has, or will have, nothing of the mover any more."""
        if active.request is not None:
            self.site.send_desk.withdraw(active.request)
        if active.flow is None:
            self._release_staging(active)
        if active.idle is not None:
            active.idle.cancel()
        active.finished, active.flow, active.post = True, None, None  # which have references to it
        if self._active is active:
            self._active = None
        if self._news is not None:
            self.wake()

    def _release_staging(self, active: _ActiveFlow) -> None:
        extents, active.extents = active.extents, []
        self.site.send_desk.release(*extents)

    def _keep_in_doubt(self, active: _ActiveFlow, outcome: CopyOutcome) -> None:
        """Bytes of a chunk may still move. Our memory is given back now unless our own post may still read it."""
        site, reads, extents = self.site, outcome.may_move, active.extents
        if active.flow is None:
            return
        doubt = self._doubt = _InDoubt(active.flow, left=not reads)
        if not reads:
            self._release_staging(active)
        elif extents:
            for extent in extents:
                site.send_desk.quarantine(extent, "our own post did not end")
            withdraw = request_rebuild(site, self.peer, urgent=False)

            def let_go() -> None:
                withdraw()
                for extent in extents:
                    site.send_desk.settle(extent)

            doubt.let_go = let_go

    def _on_late_end(self, ended: bool) -> None:
        """What was in doubt has ended after all; or our agent has, and what had left it may still land."""
        doubt = self._doubt
        if doubt is None:
            return
        doubt.let_go()
        doubt.left = True
        if ended:
            self._doubt = None
            self.protocol.doubt_ended()
        elif doubt.forgotten:
            self.forget()
        if self.protocol.state is SendState.ENDED:  # else all that remains is said at the end
            if self.offer is not None and self in self.offer.doubtful:
                self.offer.on_transfer_end(self)
            self._ended(self)

    def _report_arrived(self, chunks: int, timings: wire.Timings) -> None:
        """The first so many chunks have arrived: say so, once those are added up of which that is wanted.

        The decode rank is told at once, and once more of all that follow in this turn; or, where our agent tells its
        agent, in a while.
        """
        bound, protocol = self._bound, self.protocol
        begin, self._arrived = self._arrived, chunks
        self._unreported = timings if self._unreported is UNTIMED else added(self._unreported, timings)
        if bound is None:
            return
        if self._sums_every and protocol.state is SendState.MOVING:
            for chunk in range(begin, chunks):
                wanted = selected(protocol.fetch.transfer, chunk, self._sums_every)
                if wanted and bound.carried(chunk, chunk + 1):
                    self._sum_chunk(chunk, bound)
        if self._summing:
            chunks = min([chunk for chunk, sums in self._summing.items() if sums is None], default=chunks)
            for chunk in sorted(self._summing):
                if chunk < chunks and (sums := self._summing.pop(chunk)):
                    self.link.send(wire.Sums(protocol.fetch.transfer, chunk, sums))
        if chunks == protocol.arrived:
            return
        nbytes = bound.carried(protocol.arrived, chunks)
        self.tally.bytes += nbytes
        timings, self._unreported = self._unreported, UNTIMED
        self._send(protocol.chunks_arrived(chunks, nbytes, timings))
        if protocol.state is SendState.MOVING and self._reporting is None:
            self._send(protocol.take_news())
            delay = REPEAT_S if protocol.token else 0.0
            self._reporting = self.site.call_at(self.site.now() + delay, self._report_rest)

    def _sum_chunk(self, chunk: int, bound: BoundPlan) -> None:
        def summed(outcome: CopyOutcome) -> None:
            if outcome.error is None:
                self._summing[chunk] = outcome.sums
            else:
                del self._summing[chunk]
                self._sum_failed(outcome.error)
            self._report_arrived(self._arrived, UNTIMED)

        try:
            sums = SumPlan.at_source(bound.chunk(chunk))
            job = CopyJob(None, summed, owner=self.name, sums=sums)
            self.site.mover.submit(job, Direction.GATHER)
            self._summing[chunk] = None
        except KvxferError as error:
            self._sum_failed(error)

    def _sum_failed(self, error: KvxferError) -> None:
        """It has arrived, but nobody would know whether as it should."""
        self.stop(Failure(Status.FAILED, error.code, str(error)))

    def _report_rest(self) -> None:
        self._reporting = None
        self._send(self.protocol.take_news())

    # --- what the decode rank says

    def on_reserve(self, message: wire.Reserve) -> None:
        """It granted memory, or says that some is free again."""
        chunks, active = self.protocol.on_reserve(message), self._active
        until = self.site.now() + message.lease_ms / 1000
        if self.protocol.state is not SendState.MOVING:  # it is being stopped, and nothing counts as granted
            return
        if active is not None and active.flow is not None and not message.ring:
            self.site.mover.note_peer_steps(active.flow, message.copied - active.first)
        if chunks:
            self._on_granted(chunks.stop, until, message.generation, fresh=bool(message.ring))
            self.wake()
        else:
            self._renew_lease(message.generation, until)

    def _renew_lease(self, generation: int, until: float) -> None:
        """All that was granted, and was not posted yet, may take longer."""
        active = self._active
        for terms in (*self._granted, *([] if active is None else [active.terms])):
            if (terms.generation, terms.renewals) == (generation, self.link.renewals):
                terms.until = max(terms.until, until)
        if active is not None and active.flow is not None:
            self.site.mover.allow(active.flow, active.allowed - active.first, active.terms.until)

    def on_read(self, message: wire.Read) -> None:
        """It has read chunks: confirm them if the offer was held without a gap."""
        if chunks := self.protocol.on_read(message):
            self._report_arrived(chunks.stop, UNTIMED)
        self.wake()

    def on_cancel(self, failure: Failure) -> None:
        """It gave up, or asks (after a lost session) what became of the transfer.

        On `pull` that also says that it reads nothing any more.
        """
        self._send(self.protocol.on_unread())
        self.stop(failure)

    # --- what the offer's owner says

    def wake(self, _: object = None) -> None:
        """There is news: more of the offer is ready, or it was finished, or what was waited for is there."""
        if self._news is not None:
            resolve(self._news, None)

    # --- giving up

    def refuse(self, code: Code, reason: str) -> None:
        """It cannot be done: that is a refusal before anything moved, and a failure afterwards."""
        if self.protocol.state is SendState.PARKED:
            self._stopped_at = self.step
            self.site.metrics.refusals_sent[code.name.lower()] += 1
            self._send(self.protocol.refuse(code, reason, retry_after_ms=RETRY_MS.get(code, 0)))
        else:
            self.stop(Failure(Status.FAILED, code, reason))

    def stop(self, failure: Failure) -> None:
        """Begin nothing more, and take back what is not posted; what is posted is waited for."""
        site, protocol = self.site, self.protocol
        first, self._stopped_at = self._stopped_at is None, self._stopped_at or self.step
        messages = protocol.stop(failure)
        self._granted.clear()
        if protocol.route is not Route.PULL and protocol.granted > self._submitted:
            rest, self._submitted = protocol.granted - self._submitted, protocol.granted
            messages += protocol.chunks_dropped(rest)
        for copy in (self._active.flow if self._active is not None else None, self._firing):
            if copy is not None:
                site.mover.cancel(copy)
        if self._active is not None and self._active.flow is None:
            self._end_flow(self._active)
        if first and protocol.state is SendState.STOPPING:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = site.call_at(site.now() + site.config.revoke_timeout, self._on_revoke_timeout)
            if self._exposure is not None and protocol.being_read:
                self._exposure.seek()
        self._send(messages)
        self.wake()

    def _on_revoke_timeout(self) -> None:
        """Not in time did the decode rank say that it reads no more (`pull`), or our own work end: nobody need wait."""
        site = self.site
        patience, (late, _) = site.config.revoke_timeout, site.fabric.health()
        # nothing but the end of a copy tells that the blocks are not read any more
        flow, summing = self._active.flow if self._active is not None else None, None in self._summing.values()
        copying = summing or (flow is not None and site.mover.may_copy(flow))
        if self.offer is not None and (copying or (flow is not None and late >= patience)):  # in a call for so long
            reads = copying or self.protocol.route is Route.DIRECT
            self.offer.on_transfer_end(self, in_doubt=reads)
            self._send(self.protocol.give_up_waiting())
        elif flow is not None:  # posts have a bound, while the transport stands by it
            self._timer = site.call_at(site.now() + patience, self._on_revoke_timeout)
        self._send(self.protocol.on_unread(in_doubt=True))

    def _overdue(self) -> None:
        """The decode rank has given up. What has not begun does not begin any more."""
        if self.protocol.state is SendState.PARKED:
            self._stop_outlived()
        else:
            self._timer = self.site.call_at(self.site.now() + self.site.config.revoke_timeout, self._stop_outlived)

    def _stop_outlived(self) -> None:
        """The decode rank should have given up by now."""
        seconds = self.protocol.fetch.timeout_ms / 1000
        text = f"the fetch was to end within {seconds:g} s, and its decode rank said nothing"
        self.stop(Failure(Status.EXPIRED, Code.TIMEOUT, text))

    # --- what may still move when it is over

    @property
    def in_doubt(self) -> bool:
        """It is over, but a post of ours may still be under way, or the decode rank may still be reading."""
        read = self._exposure is not None and self._exposure.ended
        return self.protocol.doubts > 0 and not read

    @property
    def is_pulled(self) -> bool:
        """Route `pull`: what may move is what the decode rank reads."""
        return self.protocol.route is Route.PULL

    @property
    def severed(self) -> bool:
        """What is in doubt has left this side: it lands, if at all, at the agent that the decode rank had then."""
        return self._doubt is not None and self._doubt.left and not may_outlive_agent(self.site, self.peer)

    @property
    def _reads(self) -> bool:
        """Whether memory of this side may still be read for what is in doubt."""
        return self._doubt is not None and not self._doubt.left

    def forget(self) -> None:
        """Nobody asks any more what becomes of it at the peer, whose gates are let go of.

        Of what may still read memory of this side the end is looked for before, since nothing else gives that back;
        but where no end of an agent ends it, it might be looked for in vain for ever.
        """
        if (doubt := self._doubt) is not None:
            doubt.forgotten = True
            if doubt.left or may_outlive_agent(self.site, self.peer):
                self.site.mover.forget(doubt.copy)

    def keep_polling(self) -> None:
        """Route `pull`, after it ended in doubt: the decode rank is there, and silent until its reads have ended.

        Over TCP they end only while this side makes progress. If they do not even then, both sides give them up.
        """
        if self.is_pulled:
            self._release_way()
            self._release_way = self.site.mover.hold_awake()
            self.site.call_at(self.site.now() + self.site.config.no_progress_timeout, self._release_way)

    def on_unread(self) -> None:
        """Route `pull`: nobody reads anything of it any more. What was in doubt is not."""
        if self._exposure is None:
            return  # it is our own post that is in doubt
        self._release_way()
        self._exposure.end()
        if self.protocol.state is not SendState.ENDED:
            self._send(self.protocol.on_unread())
            return
        if self.offer is not None:
            self.offer.on_transfer_end(self)
        self._ended(self)

    # --- the end

    @property
    def step(self) -> Step:
        """What it waits for."""
        step = self.protocol.step
        return Step.PLANNING if step is Step.ASKING and self.offer is not None else step

    def _send(self, messages: list[wire.Message]) -> None:
        if messages:
            last = self.protocol.state is SendState.ENDED  # and not because of what comes of sending them
            self.link.send(*messages)
            if last:
                self._finish()

    def _finish(self) -> None:
        """The last result was said: count, log, and let everything go."""
        site, protocol, made = self.site, self.protocol, self._answer
        fetch, failure, route = protocol.fetch, protocol.failure, protocol.route
        stats = self.tally.stats(
            route=ROUTE_NAMES[route],
            why=made.choice.why if made is not None else "",
            peers=(self.peer.name,),
            started=self.began,
            finished=site.now(),
        )
        if failure is None and self._all_ready and made is not None:
            incarnation = self.peer.identity.incarnation
            site.estimates.learn(incarnation, route, plain=made.plain_s, seconds=stats.finished - stats.started)
        # a post of ours may read the blocks
        ours = self._doubt if route is Route.DIRECT and self._reads else None
        reads = ours is not None or (route is Route.PULL and protocol.doubts > 0)
        if failure is not None:
            self.report = FailureReport(
                request=fetch.ticket.request,
                transfer=self.name,
                peer=self.peer.name,
                step=self._stopped_at or self.step,
                elapsed=stats.duration,
                route=stats.route,
                bytes=stats.bytes,
                chunks_done=protocol.arrived,
                chunks=protocol.chunks,
                code=failure.code,
                reason=failure.reason,
                blocks=self.offer.block_ids() if self.offer is not None else {},
                memory_safe=not reads,
            )
        code, key = None if failure is None else failure.code, (fetch.ticket.request, fetch.ticket.attempt)
        stages = self.tally.stages
        site.metrics.transfer_ended(Ended("send", code, stats, self.report, self.name, key, stages, fetch.trace))
        if self.report is not None:
            say = _log.info if self.report.code is Code.CANCELLED else _log.warning
            say("transfer_failed", **stats.log_fields(), **self.report.log_fields())
        elif _hears_info():
            request = fetch.ticket.request
            _log.info("transfer_sent", request=request, transfer=self.name, outcome="ok", **stats.log_fields())
        self.link.moved[route] += stats.bytes
        self._release_way()
        if self._exposure is not None and not protocol.doubts:
            self._exposure.end()
        for timer in (self._timer, self._reporting):
            if timer is not None:
                timer.cancel()
        self._ended(self)
        if self.leave_process is not no_op:
            self.leave_process()
        if self.offer is not None:
            self.offer.stats.append(stats)
            self.offer.on_transfer_end(self, in_doubt=reads, moved=failure is None)
        if ours is not None:
            ours.let_go = request_rebuild(site, self.peer, urgent=True)
        if self._news is not None:
            self.wake()
