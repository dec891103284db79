"""One transfer out, from `Fetch` to its last result: the sans-I/O machine `Sending`, run over copies and posts.

`Sender.run` is all of it, in order: the offer, the plan, what may be read is announced, what is granted is moved. Each
chunk ends in `Sender._shipped`, where the mover says how, and the transfer in `Sender._finish`, with its last result.
What a chunk holds is given back there, and not by a task that waits for the mover: more may be said of a doubt before
a task goes on, and a worker that closes ends its tasks before its mover.

Messages and news come in between. They change the machine there and then, so that nothing begins any more once a
transfer is stopped, and wake `run`, which looks at how things stand.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from kvxfer.copy.mover import Copy
from kvxfer.copy.port import READY, CopyJob, CopyOutcome, Direction, Event, Gate, Post, has_fired, join
from kvxfer.copy.tables import NOTHING, Tables
from kvxfer.encoding import encode_spans
from kvxfer.errors import Code, FailureReport, KvxferError, ProtocolError, RefusedError, Step, TransferFailedError
from kvxfer.exposure import Exposure
from kvxfer.fabric.port import Descriptors, Operation
from kvxfer.geometry import BlockLists, SumPlan, selected
from kvxfer.link import Link
from kvxfer.memory import Extent
from kvxfer.metrics import Ended
from kvxfer.offers import Offer
from kvxfer.planning import Bound, Part, block_pieces, staging_pieces
from kvxfer.prefill.answer import Answer, Draft, answer
from kvxfer.protocol.messages import (
    FOREVER_MS,
    Fetch,
    Landed,
    Message,
    Reserve,
    Route,
    Span,
    Status,
    Sums,
    Timings,
    Want,
)
from kvxfer.protocol.sending import Failure, Sending, SendState
from kvxfer.rebuilding import runs_on, want_end
from kvxfer.site import Callback, Site, no_hold, resolve
from kvxfer.tally import Tally
from kvxfer.telemetry import TransferStats, hears_info, logger

__all__ = ["RETRY_MS", "Sender"]

_NAME: Final = "kvxfer.send"
_log: Final = logger(_NAME)
RETRY_MS: Final = {Code.TOO_MANY: 1000, Code.DRAINING: 1000}
"""When to try again after a refusal for one of these reasons: there is nothing that is to come first."""
_PULL_AHEAD: Final = 16
"""Chunks that a puller may have before it: enough for a window of any sensible size."""
_PULL_AHEAD_BYTES: Final = 512 << 20
"""About as many bytes, but two chunks at least."""
_UNTIMED: Final = Timings()
_RUNNING: Final = frozenset({SendState.PARKED, SendState.MOVING})


@dataclass(frozen=True, slots=True)
class _Terms:
    """When chunks that were granted may be moved.

    Attributes:
        granted: When they were.
        until: When the grant's lease ends: nothing is posted later.
        generation: As granted, for gates.
        renewals: How often the decode rank had made its agent anew by then.
    """

    granted: float
    until: float
    generation: int
    renewals: int


@dataclass(slots=True, eq=False)
class _Unsure:
    """A chunk of which bytes may still move, though the mover has given it up.

    Attributes:
        copy: What the mover still has.
        left: Whether it has left this side: our memory is not read for it any more.
        let_go: Gives that memory back.
    """

    copy: Copy
    left: bool
    let_go: Callback = no_hold


class Sender:
    """One transfer, from `Fetch` to its last result.

    Args:
        site: The worker.
        link: The control stream on which it was asked for.
        fetch: What was asked for.
        ended: Called when it is over, and again if more is known of what ended in doubt.
        sums_every: Of one chunk in how many sums are wanted; 0 for none.

    Attributes:
        machine: The sans-I/O state.
        link: Where results go; replaced when the same incarnation reconnects.
        peer: The decode rank.
        name: Its id, as the decode rank says it too.
        first_token: Where what it wants begins.
        offer: The offer that it reads, once there is one.
        tally: Counts.
        began: When it was asked for.
        stats: Set when it ends.
        report: Set when it ends, if it failed.
        renewals: How often the decode rank had made its agent anew by its last grant; no later one was posted to.
    """

    def __init__(
        self, site: Site, link: Link, fetch: Fetch, ended: "Callable[[Sender], None]", *, sums_every: int = 0
    ) -> None:
        self.site: Final = site
        self.machine: Final = Sending(fetch)
        self.link = link
        self.peer: Final = link.peer
        self.name: Final = f"{self.peer.identity.incarnation.hex()[:8]}-{fetch.transfer}"
        self.first_token: Final = fetch.token_start
        self.offer: Offer | None = None
        self.tally: Final = Tally()
        self.began: Final = site.now()
        self.stats: TransferStats | None = None
        self.report: FailureReport | None = None
        self.renewals = link.renewals
        self._ended: Final = ended
        self._sums_every: Final = sums_every
        self._news: asyncio.Future[None] | None = None  # which `run` waits for
        lease_ms = fetch.lease_ms or fetch.staging_lease_ms
        self._ahead = lease_ms > 0  # what `Fetch` grants is neither used nor void
        self._ahead_until = self.began + lease_ms / 1000
        self._bound: Bound | None = None
        self._answer: Answer | None = None
        self._prompt = False  # nothing of it is waited for, as of `Draft`
        self._said: BlockLists = {}  # source blocks that the decode rank was told of
        self._granted: deque[tuple[int, _Terms]] = deque()  # chunks that `run` has not looked at yet
        self._unshipped: dict[int, Callback] = {}  # chunks granted, and not the mover's yet; ends what they wait for
        self._shipping: dict[int, Copy] = {}  # chunks that the mover has
        self._unsure: dict[int, _Unsure] = {}  # chunks in doubt
        self._summing = 0  # chunks that are being added up
        self._told = False  # whether the decode rank was told in this turn of something that has arrived
        self._chunk_bytes = 1  # about so many, once there is a plan
        self._fired = 0  # `pull`: of the first so many chunks it is known that their events have
        self._firing: Copy | None = None  # `pull`: what waits for those of the next one
        self._waits_for_agent = False  # `pull`
        self._exposure: Exposure | None = None  # `pull`
        self._stopped_at: Step | None = None
        self._unwant: Callback = no_hold
        self._way: Callback = no_hold  # open to the peer, and the transport awake, until this is called
        self._revoke: asyncio.TimerHandle | None = None
        self._patience: asyncio.TimerHandle | None = None
        if fetch.timeout_ms < FOREVER_MS:
            # the decode rank gives up by itself, before, and says so; this bounds one that does not
            given_up = self.began + fetch.timeout_ms / 1000 + site.config.heartbeat
            self._patience = site.at(given_up, self._overdue)

    # --- a transfer, in order

    def begin(self) -> None:
        """Go."""
        if self.machine.state is SendState.PARKED:
            self._spawn(self.run)

    async def run(self) -> None:
        """Wait for the offer, plan, accept; then announce what may be read, and move what is granted."""
        site, machine, stop = self.site, self.machine, self.machine.fetch.token_stop
        offer = await self._offered()
        if offer is None:
            return
        draft = Draft.of(offer)  # as it is now: the plan may be made in a thread, while the offer grows
        means = site.means(self.peer, trusted=self.link.trusted, sending=True)
        make = partial(answer, site, self.peer, machine.fetch, draft, means, self._ahead, self._sums_every > 0)
        made = await site.plan(make, rows=self._rows(draft))
        if machine.state is SendState.PARKED:  # else it ended meanwhile
            self._accept(draft, made)
        while machine.state is SendState.MOVING and (bound := self._bound) is not None:
            if self._granted:
                await self._ship(bound, *self._granted.popleft())
            elif offer.finished and offer.tokens < stop:
                self._outside(offer)
            elif bound.plan.pair.has_state and offer.tokens > stop:
                reason = f"the offer grew to {offer.tokens} tokens, and its state is no longer that of {stop}"
                self._deny(Code.TOKENS, reason)
            elif bound.plan.covered < min(offer.tokens, stop):  # its block lists reach further than the plan
                self._bound = await site.plan(partial(bound.grown, offer.spans, offer.tokens), rows=bound.rows)
            else:
                self._announce(bound, offer)
                if offer.finished and machine.granted == machine.chunks:
                    return  # the rest is in the mover's hands
                await self._wait()

    async def _offered(self) -> Offer | None:
        """Wait for enough of the offer to plan, and for kernels that are being compiled; None if it ended before."""
        machine, first, stop = self.machine, self.first_token, self.machine.fetch.token_stop
        while machine.state is SendState.PARKED:
            offer = self.offer
            if offer is not None and offer.finished and offer.tokens < stop:
                self._outside(offer)
            elif offer is None or offer.tokens < min(first + 1, stop):
                self._void_ahead()
                await self._wait()
            elif (task := self.site.warming.get((self.peer.identity.incarnation, True))) and not task.done():
                await self._until(task)
            else:
                return offer
        return None

    async def _wait(self) -> None:
        """Wait for news. There is none any more once what was said just now has ended it, or lost the link."""
        if self.machine.state in _RUNNING:
            self._news = self.site.loop.create_future()
            await self._news

    async def _until(self, done: "asyncio.Future[Any]") -> None:
        """Wait for what others wait for too, but no longer once the transfer has failed."""
        done.add_done_callback(self._wake)
        while not done.done() and self.machine.failure is None:
            await self._wait()
        done.remove_done_callback(self._wake)

    def _outside(self, offer: Offer) -> None:
        """There is less on offer than was asked for, and no more will come."""
        fetch = self.machine.fetch
        asked = range(fetch.token_start, fetch.token_stop)
        what = f"tokens {asked.start}..{asked.stop - 1}" if asked else f"the state of {asked.stop} tokens"
        self._deny(Code.TOKENS_OUTSIDE_OFFER, f"{what} were asked, but {offer.tokens} are on offer")

    def _void_ahead(self) -> None:
        """Say that what `Fetch` grants is not used, if it must wait: the decode rank shall not have to fear for it."""
        if self._ahead:
            self._ahead = False
            self.link.send(Want(self.machine.transfer, 0))

    def _rows(self, draft: Draft) -> int:
        """As many table rows as take the time of the plan."""
        fetch, wanted, offered = self.machine.fetch, 0, 0
        for asked in fetch.spans:
            wanted += len(asked.ids) // 4  # packed ids of 4 bytes
        for span in draft.spans.values():
            offered += len(span.ids)
        return max(wanted, offered) + self.site.plans.outgoing_rows(self.peer, fetch.selections)

    def _accept(self, draft: Draft, made: Answer) -> None:
        """Say how it will be moved, and begin with what `Fetch` grants, if that still holds and is what is needed."""
        site, machine, fetch, message, choice = self.site, self.machine, self.machine.fetch, made.message, made.choice
        self._answer, self._bound, self._prompt = made, made.bound, draft.prompt
        if message.ahead and site.now() >= self._ahead_until:  # planning, or compiling before, took too long
            message = replace(message, ahead=False, spans=encode_spans(draft.spans, made.bound.plan.pair.groups))
        self._said = draft.spans
        tally = self.tally
        tally.chunks, tally.pieces, tally.predicted = message.chunks, made.bound.pieces, message.predicted_us / 1e6
        if self._prompt:
            site.estimates.chose(self.peer.identity.incarnation, choice.route)
        if choice.fallback:
            site.metrics.fell_back(choice.fallback)
            _log.warning("route_fell_back", peer=self.peer.name, transfer=message.transfer, reason=choice.fallback)
        if choice.route is Route.PULL:
            self._way = site.mover.hold_awake()  # a target that others read from must make progress
            self._exposure = Exposure(site, self.link, self.name, self.unread_at_last, {Route.PULL})
        else:  # for all chunks: the peer may be lost while one of them is under way
            self._way = (site.mappings if choice.route is Route.MAPPED else site.lanes).hold(self.peer)
        self._chunk_bytes = max(1, message.bytes // max(1, message.chunks))
        self._say(machine.accept(message))
        if message.ahead:
            self._take(range(message.chunks), self._ahead_until, fetch.generation)

    def _announce(self, bound: Bound, offer: Offer) -> None:
        """Tell the decode rank which chunks may go now."""
        machine = self.machine
        ready, most = machine.ready, machine.chunks
        if machine.route is Route.PULL:
            # a lease runs from the announcement on: no more is announced than the other side may soon begin to read
            most = min(most, machine.granted + max(2, min(_PULL_AHEAD, _PULL_AHEAD_BYTES // self._chunk_bytes)))
        if offer.finished and bound.plan.covered >= bound.plan.tokens.stop:
            ready = max(ready, most)
        else:
            while ready < most and self._is_ready(bound, offer, ready):
                ready += 1
        if ready > machine.ready:
            self._want(ready) if machine.route is not Route.PULL else self._let_read(ready)
        if offer.finished:
            self._say(machine.finish_offer(offer.payload))

    @staticmethod
    def _is_ready(bound: Bound, offer: Offer, chunk: int) -> bool:
        layers, start, stop = bound.grid.of(chunk)
        known = stop <= bound.plan.covered
        return known and (offer.finished or offer.readiness.events(layers, start, stop) is not None)

    def _want(self, ready: int, lease_ms: int = 0) -> None:
        """Announce chunks, the first so many, and before them the blocks that they are in."""
        offer, bound = self.offer, self._bound
        if offer is not None and bound is not None and self.machine.state is SendState.MOVING:
            news: list[Span] = []
            if offer.spans is not self._said:  # an offer that grows gets new lists
                news = encode_spans(offer.spans, bound.plan.pair.groups, said=self._said)
                self._said = offer.spans
            generation = self._exposure.grant(mapped=False) if self._exposure is not None else 0
            self._say(self.machine.announce(ready, lease_ms, news, generation))

    def _let_read(self, ready: int) -> None:
        """Route `pull`: announce chunks whose events have fired, and not before: the peer may read at once."""
        site, machine = self.site, self.machine
        if site.rebuilds.paused:
            if not self._waits_for_agent:
                self._waits_for_agent = True
                site.rebuilds.when_open(self._agent_is_there)
            return
        fired = max(self._fired, machine.ready)
        while fired < ready and (self._prompt or has_fired(self._events(fired))):
            fired += 1
        self._fired = fired
        if fired > machine.ready:
            self._want(fired, site.lease_ms((fired - machine.granted) * self._chunk_bytes))
        if fired < ready and self._firing is None:
            job = CopyJob(NOTHING, partial(self._has_fired, fired), self._events(fired), owner=self.name)
            self._firing = site.mover.submit(job, Direction.GATHER)

    def _has_fired(self, chunk: int, outcome: CopyOutcome) -> None:
        """The events of a chunk have."""
        self._firing = None
        if outcome.error is not None:
            self._deny(outcome.error.code, str(outcome.error))
        elif not outcome.stopped:
            self._fired = chunk + 1
            self._wake()

    def _agent_is_there(self) -> None:
        """It was made anew."""
        self._waits_for_agent = False
        self._wake()

    def _events(self, chunk: int) -> Event:
        """When a chunk may be read."""
        if self._prompt or self.offer is None or self._bound is None:
            return READY
        return join(self.offer.readiness.events(*self._bound.grid.of(chunk)) or [])

    # --- a chunk, from its grant to its result

    def _take(self, chunks: range, until: float, generation: int) -> None:
        """Chunks may be moved: `run` does it."""
        self.renewals = self.link.renewals
        terms = _Terms(self.site.now(), until, generation, self.renewals)
        for chunk in chunks:
            self._unshipped[chunk] = no_hold
            self._granted.append((chunk, terms))

    async def _ship(self, bound: Bound, chunk: int, terms: _Terms) -> None:
        """Hand a chunk to the mover, as soon as there is all that it takes."""
        site, peer, route, rows = self.site, self.peer, self.machine.route, bound.part_rows
        part = await site.plan(partial(bound.part, chunk), rows=rows) if rows else bound.part(chunk)
        if chunk not in self._unshipped:  # it was stopped
            return
        if not part.bytes:  # a window in which no group has a row
            del self._unshipped[chunk]
            self._confirm(chunk, part, _UNTIMED)
        elif route is Route.MAPPED:
            windows, gate = site.mappings.way(peer, terms.generation)
            self._submit(part, terms, part.copy(windows.reached), gate)
        else:
            connected = site.lanes.connect(peer, terms.renewals)
            if not connected.done():
                await self._until(connected)
                if chunk not in self._unshipped:
                    return
            lane = connected.result()
            if route is Route.DIRECT:
                pieces = await site.plan(part.listed, rows=bound.chunk_pieces)
                local = block_pieces(site.geometry, pieces.src, pieces.nbytes)
                remote = block_pieces(site.plans.geometry(peer), pieces.dst, pieces.nbytes)
                self._submit(part, terms, NOTHING, post=self._post(lane, chunk, local, remote))
            else:
                place = self.machine.place(chunk)
                if not peer.body.staging or place.length < part.staged_bytes:
                    raise ProtocolError(f"{place.length} bytes were granted for a chunk of {part.staged_bytes}")
                extent = site.send_desk.take(peer.account, part.staged_bytes) or await self._room(part)
                if extent is not None:
                    self._gather(part, terms, place.address, lane, extent)

    async def _room(self, part: Part) -> Extent | None:
        """Wait for staging memory to gather a chunk into; None if it was stopped."""
        desk, chunk = self.site.send_desk, part.number
        admitted: asyncio.Future[Extent | KvxferError | None] = self.site.loop.create_future()
        lease = self.site.config.grant_lease
        request = desk.ask(self.peer.account, part.staged_bytes, lease, partial(resolve, admitted))

        def forgo() -> None:
            """Wait no longer, and give back what was granted and not taken yet."""
            if request is not None:
                desk.withdraw(request)
            found = admitted.result() if admitted.done() and not admitted.cancelled() else None
            if isinstance(found, Extent):
                desk.release(found)
            resolve(admitted, None)

        self._unshipped[chunk] = forgo
        extent = await admitted
        if chunk not in self._unshipped:  # `forgo` was called
            return None
        self._unshipped[chunk] = no_hold
        if isinstance(extent, KvxferError):
            raise extent
        return extent

    def _gather(self, part: Part, terms: _Terms, address: int, lane: str, extent: Extent) -> None:
        """Copy a chunk into staging memory here, and write it from there into staging memory of the peer."""
        site, nbytes = self.site, part.staged_bytes
        try:
            site.send_desk.share.write(extent)
            local = staging_pieces(site.arena, extent.address, nbytes)
            remote = staging_pieces(self.peer.body.staging[0], address, nbytes)
            post = self._post(lane, part.number, local, remote)
            self._submit(part, terms, part.gather(extent.address), post=post, extent=extent)
        except BaseException:
            site.send_desk.release(extent)
            raise

    def _post(self, lane: str, chunk: int, local: Descriptors, remote: Descriptors) -> Post:
        self.tally.descriptors += len(local.pieces)
        late = partial(self._late, chunk)
        return Post(lane, Operation.WRITE, local, remote, runs_on(self.site, self.peer), late)

    def _submit(
        self,
        part: Part,
        terms: _Terms,
        tables: Tables,
        gate: Gate | None = None,
        post: Post | None = None,
        extent: Extent | None = None,
    ) -> None:
        """The mover has it from now on, unless it was stopped."""
        site, chunk = self.site, part.number
        if chunk in self._unshipped:
            # on a GPU the kernel passes a gate by itself, and goes on though this process be stopped
            passage = site.keys.passage(self.peer, terms.generation) if gate is None else None
            done, event = partial(self._shipped, part, extent), READY if self._prompt else self._events(chunk)
            job = CopyJob(tables, done, event, terms.until, passage, gate, part.bytes, self.tally, post=post)
            self._shipping[chunk] = site.mover.submit(job, Direction.GATHER)
            del self._unshipped[chunk]
            self.tally.spent("queued", terms.granted, site.now())

    def _shipped(self, part: Part, extent: Extent | None, outcome: CopyOutcome) -> None:
        """The mover is through with a chunk, or gives it up: give back what it held, and say how it ended."""
        site, chunk, tally = self.site, part.number, self.tally
        copy, in_doubt = self._shipping.pop(chunk), outcome.in_doubt
        if in_doubt:
            self._doubt(chunk, copy, extent, outcome)
        elif extent is not None:
            site.send_desk.release(extent)
        started, copied, posted, finished = outcome.started, outcome.copied, outcome.posted, outcome.finished
        done = outcome.error is None and not outcome.stopped and not in_doubt
        if self.machine.route is Route.MAPPED:
            if done:
                tally.began(started)
                tally.spent("wire", started, finished)
            timings = Timings(wire_us=_us(finished - started))
        else:
            tally.spent("gathering", started, copied)
            if posted:
                tally.began(posted)
                tally.spent("wire", posted, finished)
                tally.spent("posting", posted, posted + outcome.posting)
            wire_us = _us(finished - posted) if posted else 0
            timings = Timings(gather_us=_us(copied - started), post_us=_us(outcome.posting), wire_us=wire_us)
        if done:
            tally.bytes += part.bytes
            self._confirm(chunk, part, timings)
            return
        if outcome.error is None:
            reason = "the grant's lease ran out, or it was taken back, before the chunk was posted"
            failure = Failure(Status.EXPIRED, Code.TIMEOUT, reason)
        else:
            failure = Failure(Status.FAILED, outcome.error.code, str(outcome.error))
        if self.machine.state is SendState.MOVING:  # else it is being stopped, and this is one of those that are
            self.stop(failure)
        self._say(self.machine.dropped(chunk, in_doubt=in_doubt))

    def _doubt(self, chunk: int, copy: Copy, extent: Extent | None, outcome: CopyOutcome) -> None:
        """Bytes of a chunk may still move. Our memory is given back now unless our own post may still read it."""
        site, reads = self.site, outcome.may_move
        doubt = self._unsure[chunk] = _Unsure(copy, left=not reads)
        if extent is not None and reads:
            site.send_desk.quarantine(extent, "our own post did not end")
            unwant = want_end(site, self.peer, urgent=False)

            def let_go() -> None:
                unwant()
                site.send_desk.settle(extent)

            doubt.let_go = let_go
        elif extent is not None:
            site.send_desk.release(extent)

    def _late(self, chunk: int, ended: bool) -> None:
        """A chunk in doubt has ended after all; or our agent has, and what had left it may still land."""
        doubt = self._unsure[chunk]
        doubt.let_go()
        doubt.left = True
        if ended:
            del self._unsure[chunk]
            self.machine.settled(chunk)
        if self.machine.state is SendState.ENDED:  # else all that remains is said at the end
            if not self._reads:
                self._unwant()
                if self.offer is not None and self in self.offer.doubtful:
                    self.offer.left(self)
            self._ended(self)

    def _confirm(self, chunk: int, part: Part, timings: Timings) -> None:
        """A chunk has been moved: say so, once it is added up where that is wanted."""
        nbytes, machine = part.bytes, self.machine
        wanted = self._sums_every and selected(machine.transfer, chunk, self._sums_every)
        if not nbytes or not wanted or machine.state is not SendState.MOVING:
            self._moved(chunk, nbytes, timings)
            return

        def summed(outcome: CopyOutcome) -> None:
            self._summing -= 1
            if outcome.error is not None:
                self._not_summed(chunk, outcome.error)
            else:
                self._moved(chunk, nbytes, timings, outcome.sums)

        try:
            job = CopyJob(NOTHING, summed, nbytes=nbytes, owner=self.name, sums=SumPlan.at_source(part.plan))
            self.site.mover.submit(job, Direction.GATHER)
            self._summing += 1
        except KvxferError as error:
            self._not_summed(chunk, error)

    def _moved(self, chunk: int, nbytes: int, timings: Timings, sums: bytes = b"") -> None:
        """A chunk has arrived. The decode rank is told at once, and once more of all that follow in this turn."""
        machine = self.machine
        if sums:
            self.link.send(Sums(machine.transfer, chunk, sums))
        self._say(machine.moved(chunk, nbytes, timings))
        if machine.state is SendState.MOVING and not self._told:
            self._told = True
            self._say(machine.news())
            self.site.loop.call_soon(self._tell_the_rest)

    def _tell_the_rest(self) -> None:
        self._told = False
        self._say(self.machine.news())

    def _not_summed(self, chunk: int, error: KvxferError) -> None:
        """It has arrived, but nobody would know whether as it should."""
        self.stop(Failure(Status.FAILED, error.code, str(error)))
        self._say(self.machine.dropped(chunk))

    # --- what the decode rank says

    def reserve(self, message: Reserve) -> None:
        """It granted memory."""
        if chunks := self.machine.reserve(message):  # none if it is being stopped, and then nothing counts as granted
            self._take(chunks, self.site.now() + message.lease_ms / 1000, message.generation)
            self._wake()

    def landed(self, message: Landed) -> None:
        """It has read chunks: confirm them if the offer was held without a gap."""
        for chunk in self.machine.landed(message):
            if self._bound is not None:
                part = self._bound.part(chunk)
                self.tally.bytes += part.bytes
                self._confirm(chunk, part, _UNTIMED)
        self._wake()

    def cancelled(self, failure: Failure) -> None:
        """It gave up, or asks (after a lost session) what became of the transfer.

        On `pull` that also says that it reads nothing any more.
        """
        self._say(self.machine.unread())
        self.stop(failure)

    # --- what the offer's owner says

    def attach(self, offer: Offer) -> None:
        """The offer is there."""
        self.offer = offer
        offer.transfers.add(self)
        self._wake()

    def offer_grew(self) -> None:
        """More is ready, or the offer was finished."""
        self._wake()

    def _wake(self, _: object = None) -> None:
        if self._news is not None:
            resolve(self._news, None)

    # --- giving up

    def refuse(self, code: Code, reason: str) -> None:
        """End before anything moved."""
        if self.machine.state is SendState.PARKED:
            self._stopped_at = self.step
            self.site.metrics.refused(code, by_peer=False)
            self._say(self.machine.refuse(code, reason, retry_after_ms=RETRY_MS.get(code, 0)))

    def stop(self, failure: Failure) -> None:
        """Begin nothing more, and take back what is not posted; what is posted is waited for."""
        site, machine = self.site, self.machine
        self._stopped_at = self._stopped_at or self.step
        messages = machine.stop(failure)
        unshipped, self._unshipped = self._unshipped, {}
        for chunk, forgo in unshipped.items():
            forgo()
            messages += machine.dropped(chunk)
        for copy in (*self._shipping.values(), *([] if self._firing is None else [self._firing])):
            site.mover.cancel(copy)
        if machine.state is SendState.STOPPING and self._revoke is None:
            self._revoke = site.at(site.now() + site.config.revoke_timeout, self._unanswered)
            if self._exposure is not None and machine.being_read:
                self._exposure.seek()
        self._say(messages)
        self._wake()

    def _deny(self, code: Code, reason: str) -> None:
        """Refuse if nothing was accepted yet, and stop otherwise."""
        if self.machine.state is SendState.PARKED:
            self.refuse(code, reason)
        else:
            self.stop(Failure(Status.FAILED, code, reason))

    def _unanswered(self) -> None:
        """Not in time did the decode rank say that it reads no more (`pull`), or our own work end: nobody need wait."""
        site = self.site
        patience, (late, _) = site.config.revoke_timeout, site.fabric.health()
        # nothing but the end of a copy tells that the blocks are not read any more
        copying = self._summing or any(map(site.mover.may_copy, self._shipping.values()))
        if self.offer is not None and (copying or (self._shipping and late >= patience)):  # in a call for so long
            reads = copying or self.machine.route is Route.DIRECT
            self.offer.left(self, in_doubt=self.peer.name if reads else "")
            self._say(self.machine.overdue())
        elif self._shipping:  # posts have a bound, while the transport stands by it
            self._revoke = site.at(site.now() + patience, self._unanswered)
        self._say(self.machine.unread(in_doubt=True))

    def _overdue(self) -> None:
        """The decode rank has given up. What has not begun does not begin any more."""
        if self.machine.state is SendState.PARKED:
            self._outlived()
        else:
            self._patience = self.site.at(self.site.now() + self.site.config.revoke_timeout, self._outlived)

    def _outlived(self) -> None:
        """The decode rank should have given up by now."""
        text = (
            f"the fetch was to end within {self.machine.fetch.timeout_ms / 1000:g} s, and its decode rank said nothing"
        )
        self.stop(Failure(Status.EXPIRED, Code.TIMEOUT, text))

    # --- what may still move when it is over

    @property
    def in_doubt(self) -> bool:
        """It is over, but a post of ours may still be under way, or the decode rank may still be reading."""
        read = self._exposure is not None and self._exposure.ended
        return self.machine.in_doubt and not read

    @property
    def failure(self) -> Failure | None:
        """Why it stopped."""
        return self.machine.failure

    @property
    def is_read(self) -> bool:
        """Route `pull`: what may move is what the decode rank reads."""
        return self.machine.route is Route.PULL

    @property
    def severed(self) -> bool:
        """What is in doubt has left this side: it lands, if at all, at the agent that the decode rank had then."""
        return bool(self._unsure) and not self._reads and not runs_on(self.site, self.peer)

    @property
    def copies(self) -> list[Copy]:
        """What is in doubt."""
        return [doubt.copy for doubt in self._unsure.values()]

    @property
    def _reads(self) -> bool:
        """Whether memory of this side may still be read for what is in doubt."""
        return not all(doubt.left for doubt in self._unsure.values())

    def help_to_read(self) -> None:
        """Route `pull`, after it ended in doubt: the decode rank is there, and silent until its reads have ended.

        Over TCP they do not end unless this side makes progress. Where they do not end for all that, the decode rank
        gives them up, and so does this side.
        """
        if self.is_read:
            self._way()
            self._way = self.site.mover.hold_awake()
            self.site.at(self.site.now() + self.site.config.no_progress_timeout, self._way)

    def unread_at_last(self) -> None:
        """Route `pull`: nobody reads anything of it any more. What was in doubt is not."""
        if self._exposure is None:
            return  # it is our own post that is in doubt
        self._way()
        self._exposure.end()
        if self.machine.state is not SendState.ENDED:
            self._say(self.machine.unread())
            return
        if self.offer is not None:
            self.offer.left(self)
        self._ended(self)

    # --- supervision, and the end

    @property
    def step(self) -> Step:
        """What it waits for."""
        step = self.machine.step
        return Step.PLANNING if step is Step.ASKING and self.offer is not None else step

    def _spawn(self, work: Callable[..., "Coroutine[Any, Any, None]"], *arguments: Any) -> None:
        self.site.tasks.spawn(self._see_through(work, *arguments), f"kvxfer send {self.machine.transfer}")

    async def _see_through(self, work: Callable[..., "Coroutine[Any, Any, None]"], *arguments: Any) -> None:
        """Do something of the transfer. What fails is the transfer, whoever brought the news."""
        try:
            await work(*arguments)
        except RefusedError as error:
            self._deny(error.reason, str(error))
        except KvxferError as error:
            self._deny(error.code, str(error))
        except asyncio.CancelledError:  # the worker is closing, and has stopped it if it could
            unshipped, self._unshipped = self._unshipped, {}
            for forgo in unshipped.values():
                forgo()
            raise
        except Exception as error:  # noqa: BLE001 - tasks are supervised here: a defect ends the transfer, named
            _log.error("task_failed", task=f"kvxfer send {self.machine.transfer}", error=repr(error), exc_info=error)
            self._deny(Code.FAILED, str(TransferFailedError(f"a step of the transfer failed: {error!r}")))

    def _say(self, messages: list[Message]) -> None:
        if messages:
            self.link.send(*messages)
        if self.machine.state is SendState.ENDED and self.stats is None:
            self._finish()

    def _finish(self) -> None:
        """The last result was said: count, log, and let everything go."""
        machine, failure, made, route = self.machine, self.machine.failure, self._answer, self.machine.route
        stats = self.stats = self.tally.stats(
            route="" if route is Route.UNKNOWN else route.name.lower(),
            why=made.choice.why if made is not None else "",
            limited_by=made.bound.limited_by if made is not None else "",
            peers=(self.peer.name,),
            started=self.began,
            finished=self.site.now(),
        )
        if failure is None and self._prompt and made is not None:
            incarnation = self.peer.identity.incarnation
            self.site.estimates.took(incarnation, route, plain=made.plain_s, seconds=stats.finished - stats.started)
        ours = route is Route.DIRECT and self._reads  # a post of ours may read the blocks
        reads = ours or (route is Route.PULL and machine.in_doubt)
        self._tell(stats, failure, reads=reads)
        self.link.moved[route] += stats.bytes
        self._way()
        if self._exposure is not None and not machine.in_doubt:
            self._exposure.end()
        for timer in (self._revoke, self._patience):
            if timer is not None:
                timer.cancel()
        self._ended(self)
        if self.offer is not None:
            self.offer.stats.append(stats)
            self.offer.left(self, in_doubt=self.peer.name if reads else "", moved=failure is None)
        if ours:
            self._unwant = want_end(self.site, self.peer, urgent=True)
        self._wake()

    def _tell(self, stats: TransferStats, failure: Failure | None, *, reads: bool) -> None:
        """One call to who counts, and one line in the log; `reads` if the offered blocks may still be read."""
        machine, fetch = self.machine, self.machine.fetch
        if failure is not None:
            self.report = FailureReport(
                request=fetch.ticket.request,
                transfer=self.name,
                peer=self.peer.name,
                step=self._stopped_at or self.step,
                elapsed=stats.duration,
                route=stats.route,
                bytes=stats.bytes,
                chunks_done=machine.arrived,
                chunks=machine.chunks,
                code=failure.code,
                reason=failure.reason,
                blocks=self.offer.block_ids() if self.offer is not None else {},
                memory_safe=not reads,
            )
        self.site.metrics.transfer_ended(
            Ended(
                side="send",
                code=None if failure is None else failure.code,
                stats=stats,
                report=self.report,
                transfer=self.name,
                key=(fetch.ticket.request, fetch.ticket.attempt),
                stages=self.tally.stages,
                trace=fetch.trace,
            )
        )
        if self.report is not None:
            say = _log.info if self.report.code is Code.CANCELLED else _log.warning
            say("transfer_failed", **stats.log_fields(), **self.report.log_fields())
        elif hears_info(_NAME):
            request = fetch.ticket.request
            _log.info("transfer_sent", request=request, transfer=self.name, outcome="ok", **stats.log_fields())


def _us(seconds: float) -> int:
    return max(0, int(seconds * 1e6))
