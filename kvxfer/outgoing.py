"""One transfer at the prefill rank: runs the sans-I/O `Sending` machine over copies and posts."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Final

from msgspec.structs import replace

from kvxfer.answer import Answer, Asked, Draft, answer
from kvxfer.copy.mover import Copy
from kvxfer.copy.port import READY, CopyOutcome, Direction, Event, Outcome, join
from kvxfer.copy.tables import NOTHING
from kvxfer.encoding import encode_spans
from kvxfer.errors import Code, FailureReport, KvxferError, RefusedError, Step
from kvxfer.exposure import Exposure
from kvxfer.geometry import BlockLists, SumPlan, selected
from kvxfer.link import Link
from kvxfer.offers import Offer
from kvxfer.planning import Bound, Part
from kvxfer.protocol.messages import (
    FOREVER_MS,
    Fetch,
    Grant,
    Landed,
    Message,
    Reserve,
    Route,
    Span,
    Status,
    Timings,
    Want,
)
from kvxfer.protocol.sending import Failure, Sending, SendState
from kvxfer.rebuilding import runs_on, want_end
from kvxfer.routes.chooser import Choice
from kvxfer.sent import count, log_transfer, report
from kvxfer.shipment import SHIPMENTS, Moved, Shipment, Terms
from kvxfer.site import Site, no_hold
from kvxfer.steps import Steps
from kvxfer.tally import Tally
from kvxfer.telemetry import TransferStats, logger

__all__ = ["RETRY_MS", "Outgoing"]

_log: Final = logger("kvxfer.send")
RETRY_MS: Final = {Code.TOO_MANY: 1000, Code.DRAINING: 1000}
"""When to try again after a refusal for one of these reasons: there is nothing that is to come first."""
_PULL_AHEAD: Final = 16
"""Chunks that a puller may have before it: enough for a window of any sensible size."""
_PULL_AHEAD_BYTES: Final = 512 << 20
"""About as many bytes, but two chunks at least."""


class Outgoing(Steps):
    """One transfer, from `Fetch` to its last result.

    Attributes:
        machine: The sans-I/O state.
        link: Where results go; replaced when the same incarnation reconnects.
        offer: The offer that it reads, once there is one.
        tally: Counts.
        began: When it was asked for.
        stats: Set when it ends.
        report: Set when it ends, if it failed.
        renewals: How often the decode rank had made its agent anew by its last grant; no later one was posted to.
    """

    def __init__(
        self, site: Site, link: Link, fetch: Fetch, ended: Callable[["Outgoing"], None], *, sums_every: int = 0
    ) -> None:
        super().__init__(site, f"kvxfer send {fetch.transfer}")
        self.machine: Final = Sending(fetch)
        self.link = link
        self.peer: Final = link.peer
        self.offer: Offer | None = None
        self.stats: TransferStats | None = None
        self.report: FailureReport | None = None
        self.renewals = link.renewals
        self._ended: Final = ended
        self._sums_every: Final = sums_every
        self.tally: Final = Tally()
        self.began: Final = site.now()
        self._stopped_at: Step | None = None
        self._bound: Bound | None = None
        self._choice: Choice | None = None
        self._said: BlockLists = {}  # source blocks that the decode rank was told of
        self._remaining: list[int] = []  # chunks that were not announced yet
        self._planning = False
        lease_ms = fetch.lease_ms or fetch.staging_lease_ms
        self._ahead = lease_ms > 0  # what `Fetch` grants is neither used nor void
        self._ahead_until = self.began + lease_ms / 1000
        self._prompt, self._plain_s = False, 0.0  # as of `Draft` and `Answer`
        self._shipments: Final[dict[int, Shipment]] = {}
        self._announcing: dict[int, Copy] = {}  # chunks that will be announced when their events have fired (`pull`)
        self._readable = self._summing = 0  # chunks announced and not yet read (`pull`); being added up
        self._unsure: dict[int, bool] = {}  # chunks in doubt, and whether our own work on them is over
        self._copies: dict[int, Copy] = {}  # of these
        self._unwant: Callable[[], None] = no_hold
        self._exposure: Exposure | None = None  # route pull
        self._revoke: asyncio.TimerHandle | None = None
        self._patience: asyncio.TimerHandle | None = None
        if fetch.timeout_ms < FOREVER_MS:
            # the decode rank gives up by itself, before, and says so; this bounds one that does not
            given_up = self.began + fetch.timeout_ms / 1000 + site.config.heartbeat
            self._patience = site.at(given_up, self._overdue)
        self._way: Callable[[], None] = no_hold  # open to the peer, and the transport awake, until this is called

    @property
    def _chunk_bytes(self) -> int:
        """About so many, once there is a plan."""
        return max(1, self._bound.plan.nbytes // len(self._bound.grid)) if self._bound is not None else 1

    @property
    def name(self) -> str:
        """Its id, as the decode rank says it too."""
        return f"{self.peer.identity.incarnation.hex()[:8]}-{self.machine.transfer}"

    @property
    def first_token(self) -> int:
        """Where what it wants begins."""
        return self.machine.fetch.token_start

    @property
    def step(self) -> Step:
        """What it waits for."""
        step = self.machine.step
        return Step.PLANNING if step is Step.ASKING and self.offer is not None else step

    # --- news

    def attach(self, offer: Offer) -> None:
        """The offer is there."""
        self.offer = offer
        offer.transfers.add(self)
        self.offer_grew()

    def offer_grew(self) -> None:
        """More is ready, or the offer was finished. What fails is this transfer, not whoever says so."""
        self.run(self._heed)

    def _heed(self) -> None:
        offer, fetch = self.offer, self.machine.fetch
        if offer is None or self.machine.state is SendState.ENDED:
            return
        bound, asked = self._bound, range(fetch.token_start, fetch.token_stop)
        if offer.finished and offer.tokens < asked.stop:
            what = f"tokens {asked.start}..{asked.stop - 1}" if asked else f"the state of {asked.stop} tokens"
            reason = f"{what} were asked, but {offer.tokens} are on offer"
            self._deny(Code.TOKENS_OUTSIDE_OFFER, reason)
        elif bound is None and min(asked.start + 1, asked.stop) <= offer.tokens and not self._planning:
            self._planning = True
            self.run(partial(self.site.when_warm, self.peer, partial(self.run, self._plan, offer), sending=True))
        elif bound is not None and bound.plan.pair.has_state and offer.tokens > asked.stop:
            reason = f"the offer grew to {offer.tokens} tokens, and its state is no longer that of {asked.stop}"
            self._deny(Code.TOKENS, reason)
        elif bound is not None and bound.plan.covered < min(offer.tokens, asked.stop):
            self._grow(bound, offer)
        else:
            self._announce()

    def void_ahead(self) -> None:
        """Say that what `Fetch` grants is not used, if it must wait: the decode rank shall not have to fear for it."""
        if self._ahead and self.machine.state is SendState.PARKED and not self._planning:
            self._ahead = False
            self.link.send(Want(self.machine.transfer, b""))

    def refuse(self, code: Code, reason: str) -> None:
        """End before anything moved."""
        if self.machine.state is SendState.PARKED:
            self._stopped_at = self.step
            self.site.metrics.refused(code, by_peer=False)
            self._say(self.machine.refuse(code, reason, retry_after_ms=RETRY_MS.get(code, 0)))

    def stop(self, failure: Failure) -> None:
        """Give up: kill what is not posted, wait for what is."""
        self._stopped_at = self._stopped_at or self.step
        for waiting in self._announcing.values():
            self.site.mover.cancel(waiting)
        messages = self.machine.stop(failure)
        for shipment in list(self._shipments.values()):
            shipment.stop()
        if self.machine.state is SendState.STOPPING and self._revoke is None:
            self._revoke = self.site.at(self.site.now() + self.site.config.revoke_timeout, self._unanswered)
            if self._exposure is not None and self.machine.being_read:
                self._exposure.seek()
        self._say(messages)

    def _unanswered(self) -> None:
        """Not in time did the decode rank say that it reads no more (`pull`), or our own work end: nobody need wait."""
        site = self.site
        patience, (late, _) = site.config.revoke_timeout, site.fabric.health()
        copying = self._summing or any(shipment.copying for shipment in self._shipments.values())
        if self.offer is not None and (copying or (self._shipments and late >= patience)):  # in a call for so long
            reads = copying or self.machine.route is Route.DIRECT
            self.offer.left(self, in_doubt=self.peer.name if reads else "")
            self._say(self.machine.overdue())
        elif self._shipments:  # posts have a bound, while the transport stands by it
            self._revoke = site.at(site.now() + patience, self._unanswered)
        self._say(self.machine.unread(in_doubt=True))

    def cancelled(self, failure: Failure) -> None:
        """The decode rank gave up, or asks (after a lost session) what became of the transfer.

        On `pull` that also says that it reads nothing any more.
        """
        self._say(self.machine.unread())
        self.stop(failure)

    @property
    def in_doubt(self) -> bool:
        """It is over, but a post of ours may still be under way, or the decode rank may still be reading."""
        read = self._exposure is not None and self._exposure.ended
        return self.machine.in_doubt and not read

    @property
    def severed(self) -> bool:
        """What is in doubt has left this side: it lands, if at all, at the agent that the decode rank had then."""
        return bool(self._unsure) and all(self._unsure.values()) and not runs_on(self.site, self.peer)

    @property
    def copies(self) -> list[Copy]:
        """What is in doubt."""
        return list(self._copies.values())

    def help_to_read(self) -> None:
        """Route `pull`, after it ended in doubt: the decode rank is there, and silent until its reads have ended.

        Over TCP they do not end unless this side makes progress. Where they do not end for all that, the decode rank
        gives them up, and so does this side.
        """
        if self.machine.route is Route.PULL:
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

    def reserve(self, message: Reserve) -> None:
        """The decode rank granted memory."""
        grants = self.machine.reserve(message)
        if self._bound is not None and grants:  # none if it is being stopped, on `pull` too, which ships nothing
            self._ship(self._bound, grants, self.site.now() + message.lease_ms / 1000, message.generation)

    def _ship(self, bound: Bound, grants: Sequence[Grant], until: float, generation: int) -> None:
        """Move chunks that were granted."""
        make, self.renewals = SHIPMENTS[self.machine.route], self.link.renewals
        for grant in grants:
            terms = Terms(until, self._events(bound, grant.chunk), generation, self.renewals)
            shipment = make(self.site, self.peer, bound, grant, terms, self.tally, self._reported, self._late)
            self._shipments[grant.chunk] = shipment
            shipment.run(shipment.begin)
            if self.machine.state is not SendState.MOVING:  # one before it has failed at once
                shipment.stop()

    def landed(self, message: Landed) -> None:
        """The decode rank has read chunks: confirm them if the offer was held without a gap."""
        bound, offer = self._bound, self.offer
        for chunk in self.machine.landed(message):
            if bound is None or offer is None:
                continue
            part = bound.part(chunk)
            self.tally.bytes += part.bytes
            self._readable -= 1
            self._confirm(chunk, part, Timings())
        self._announce()

    # --- accepting

    def failed(self, error: KvxferError) -> None:
        """A step raised."""
        self._deny(error.reason if isinstance(error, RefusedError) else error.code, str(error))

    def _deny(self, code: Code, reason: str) -> None:
        """Refuse if nothing was accepted yet, and stop otherwise."""
        if self.machine.state is SendState.PARKED:
            self.refuse(code, reason)
        else:
            self.stop(Failure(Status.FAILED, code, reason))

    def _plan(self, offer: Offer) -> None:
        if self.machine.state is not SendState.PARKED:  # it ended while kernels were compiled for it
            self._planning = False
            return
        wanted = sum(len(span.ids) for span in self.machine.fetch.spans) // 4  # packed ids of 4 bytes
        rows = max(wanted, sum(len(span.ids) for span in offer.spans.values()))
        rows += self.site.plans.outgoing_rows(self.peer, self.machine.fetch.selections)
        draft = Draft.of(offer)  # as it is now: the plan may be made in a thread, while the offer grows
        means = self.site.means(self.peer, trusted=self.link.trusted, sending=True)
        asked = Asked(self.peer, self.machine.fetch, ahead=self._ahead, checked=self._sums_every > 0)
        self.plan(lambda: answer(self.site, asked, draft, means), partial(self._accept, offer, draft), rows=rows)

    def _accept(self, offer: Offer, draft: Draft, made: Answer) -> None:
        self._planning = False
        if self.machine.state is not SendState.PARKED:
            return
        self._bound, choice, message = made.bound, made.choice, made.message
        if message.ahead and self.site.now() >= self._ahead_until:  # planning, or compiling before, took too long
            message = replace(message, ahead=False, spans=encode_spans(draft.spans, self._bound.plan.pair.groups))
        self._said, self._choice = draft.spans, choice
        self._remaining = [] if message.ahead else list(range(message.chunks))
        self.tally.chunks, self.tally.pieces = message.chunks, self._bound.pieces
        self.tally.predicted = message.predicted_us / 1e6
        self._prompt, self._plain_s = draft.prompt, made.plain_s
        if self._prompt:
            self.site.estimates.chose(self.peer.identity.incarnation, choice.route)
        if choice.fallback:
            self.site.metrics.fell_back(choice.fallback)
            _log.warning("route_fell_back", peer=self.peer.name, transfer=message.transfer, reason=choice.fallback)
        if choice.route is Route.PULL:
            self._way = self.site.mover.hold_awake()  # a target that others read from must make progress
            self._exposure = Exposure(self.site, self.link, self.name, self.unread_at_last, {Route.PULL})
        else:
            self._way = SHIPMENTS[choice.route].hold(self.site, self.peer)
        self._say(self.machine.accept(message))
        if message.ahead:
            fetch = self.machine.fetch
            grants = [Grant(chunk, fetch.staging_address, fetch.staging_bytes) for chunk in range(message.chunks)]
            self._ship(self._bound, grants, self._ahead_until, fetch.generation)
        self.offer_grew()

    def _grow(self, bound: Bound, offer: Offer) -> None:
        """The offer's block lists reach further than the plan."""
        if self._planning or self.machine.state is not SendState.MOVING:
            return
        self._planning = True
        spans, covered = offer.spans, offer.tokens

        def grown(bound: Bound) -> None:
            self._planning = False
            self._bound = bound
            self.offer_grew()

        self.plan(lambda: bound.grown(spans, covered), grown, rows=bound.rows)

    def _announce(self) -> None:
        """Tell the decode rank which chunks may go now."""
        bound, offer = self._bound, self.offer
        if bound is None or offer is None or self.machine.state is not SendState.MOVING:
            return
        most = len(self._remaining)
        if self.machine.route is Route.PULL:
            # a lease runs from the announcement on, so no more is announced than the other side may soon begin to read
            ahead = max(2, min(_PULL_AHEAD, _PULL_AHEAD_BYTES // self._chunk_bytes))
            most = max(0, ahead - self._readable)
        whole = offer.finished and bound.plan.covered == bound.plan.tokens.stop
        known = self._remaining if whole else filter(partial(self._is_ready, bound, offer), self._remaining)
        ready = list(islice(known, most))
        if ready:
            gone = set(ready)
            self._remaining = [chunk for chunk in self._remaining if chunk not in gone]
            if self.machine.route is Route.PULL:
                self._readable += len(ready)
                for chunk in ready:
                    self._announce_readable(bound, chunk)
            else:
                self._want(bound, ready)
        if offer.finished:
            self._say(self.machine.finish_offer(offer.payload))

    @staticmethod
    def _is_ready(bound: Bound, offer: Offer, chunk: int) -> bool:
        layers, start, stop = bound.grid.of(chunk)
        known = stop <= bound.plan.covered
        return known and (offer.finished or offer.readiness.events(layers, start, stop) is not None)

    def _want(self, bound: Bound, chunks: Sequence[int], lease_ms: int = 0) -> None:
        """Announce chunks, and before them the blocks that they are in."""
        offer = self.offer
        if offer is not None and self.machine.state is SendState.MOVING:
            news: list[Span] = []
            if offer.spans is not self._said:  # an offer that grows gets new lists
                news = encode_spans(offer.spans, bound.plan.pair.groups, said=self._said)
                self._said = offer.spans
            generation = self._exposure.grant(mapped=False) if self._exposure is not None else 0
            self._say(self.machine.ready(chunks, lease_ms, news, generation))

    def _announce_readable(self, bound: Bound, chunk: int) -> None:
        """Route `pull`: the peer may read at once, so a chunk is announced only when its events have fired."""

        def readable(outcome: CopyOutcome) -> None:
            self._announcing.pop(chunk, None)
            if outcome.error is not None:
                raise outcome.error
            if not outcome.stopped:
                self.site.rebuilds.when_open(partial(self.run, self._readable_now, bound, chunk))

        def wait() -> None:
            self._announcing[chunk] = self.copy(NOTHING, Direction.GATHER, readable, self._events(bound, chunk))

        self.run(wait)

    def _readable_now(self, bound: Bound, chunk: int) -> None:
        self._want(bound, [chunk], self.site.lease_ms(self._readable * self._chunk_bytes))

    # --- moving

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

    def _events(self, bound: Bound, chunk: int) -> Event:
        """When a chunk may be read."""
        if self._prompt or self.offer is None:
            return READY
        return join(self.offer.readiness.events(*bound.grid.of(chunk)) or [])

    # --- reporting

    def _reported(self, chunk: int, moved: Moved) -> None:
        """A shipment is over."""
        shipment = self._shipments.pop(chunk)
        if moved.outcome is Outcome.DONE:
            self.tally.bytes += moved.bytes
            self._confirm(chunk, shipment.part, moved.timings)
            return
        if moved.outcome is Outcome.STOPPED:
            reason = "the grant's lease ran out, or it was taken back, before the chunk was posted"
            failure = Failure(Status.EXPIRED, Code.TIMEOUT, reason)
        else:
            code = moved.error.code if moved.error is not None else Code.FAILED
            failure = Failure(Status.FAILED, code, str(moved.error or "the chunk could not be moved"))
        if moved.outcome is Outcome.IN_DOUBT and shipment.move is not None:
            self._unsure[chunk], self._copies[chunk] = not moved.may_read, shipment.move
        if self.machine.state is SendState.MOVING:  # else it is being stopped, and this is one of those that are
            self.stop(failure)
        self._say(self.machine.dropped(chunk, in_doubt=moved.outcome is Outcome.IN_DOUBT))

    def _late(self, chunk: int, ended: bool) -> None:
        """A chunk in doubt has ended after all; or our agent has, and what had left it may still land."""
        if ended:
            del self._unsure[chunk], self._copies[chunk]
            self.machine.settled(chunk)
        else:
            self._unsure[chunk] = True
        if self.machine.state is SendState.ENDED:  # else all that remains is said at the end
            if all(self._unsure.values()):
                self._unwant()
                if self.offer is not None and self in self.offer.doubtful:
                    self.offer.left(self)
            self._ended(self)

    def _confirm(self, chunk: int, part: Part | None, timings: Timings) -> None:
        """A chunk has been moved: say so, once it is added up where that is wanted."""
        nbytes = 0 if part is None else part.bytes
        wanted = self._sums_every and selected(self.machine.transfer, chunk, self._sums_every)
        if part is None or not nbytes or not wanted or self.machine.state is not SendState.MOVING:
            self._say(self.machine.moved(chunk, nbytes, timings))
            return

        def summed(outcome: CopyOutcome) -> None:
            self._summing -= 1
            if outcome.error is not None:
                self._not_summed(chunk, outcome.error)
            else:
                self._say(self.machine.moved(chunk, nbytes, timings, outcome.sums))

        try:
            self.copy(NOTHING, Direction.GATHER, summed, nbytes=nbytes, sums=SumPlan.at_source(part.plan))
            self._summing += 1
        except KvxferError as error:
            self._not_summed(chunk, error)

    def _not_summed(self, chunk: int, error: KvxferError) -> None:
        """It has arrived, but nobody would know whether as it should."""
        self.stop(Failure(Status.FAILED, error.code, str(error)))
        self._say(self.machine.dropped(chunk))

    def _say(self, messages: list[Message]) -> None:
        if messages:
            self.link.send(*messages)
        if self.machine.state is SendState.ENDED and self.stats is None:
            self._finish()

    def _finish(self) -> None:
        machine, failure = self.machine, self.machine.failure
        self.stats = self.tally.stats(
            route="" if machine.route is Route.UNKNOWN else machine.route.name.lower(),
            why=self._choice.why if self._choice else "",
            limited_by=self._bound.limited_by if self._bound else "",
            peers=(self.peer.name,),
            started=self.began,
            finished=self.site.now(),
        )
        if failure is None and self._prompt:
            self.site.estimates.took(
                self.peer.identity.incarnation, machine.route, plain=self._plain_s, seconds=self.stats.duration
            )
        ours = machine.route is Route.DIRECT and not all(self._unsure.values())  # a post of ours may read the blocks
        reads = ours or (machine.in_doubt and machine.route is Route.PULL)
        if failure is not None:
            offer, at = self.offer, self._stopped_at or self.step
            blocks = offer.block_ids() if offer is not None else {}
            self.report = report(machine, failure, self.stats, name=self.name, step=at, blocks=blocks, reads=reads)
        count(self.site.metrics, machine, failure, self.stats, self.report, self.tally.stages, name=self.name)
        self.link.moved[machine.route] += self.stats.bytes
        log_transfer(self.stats, self.report, request=machine.fetch.ticket.request, transfer=self.name)
        self._way()
        if self._exposure is not None and not machine.in_doubt:
            self._exposure.end()
        for timer in (self._revoke, self._patience):
            if timer is not None:
                timer.cancel()
        self._ended(self)
        if self.offer is not None:
            self.offer.stats.append(self.stats)
            self.offer.left(self, in_doubt=self.peer.name if reads else "", moved=failure is None)
        if ours:
            self._unwant = want_end(self.site, self.peer, urgent=True)
