"""One fetch over all prefill ranks: resolve, ask each, gather their outcomes, and end once.

It belongs to the worker. Whatever happens to the caller, it goes on until no peer writes the blocks any more, or until
it can say which blocks are in doubt.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.copy.port import Event
from kvxfer.errors import (
    ClosedError,
    Code,
    FailureReport,
    GeometryError,
    KvxferError,
    MismatchError,
    PeerLostError,
    Step,
    TransferFailedError,
    TransferTimeoutError,
)
from kvxfer.failures import Cause, Standing, Subject, in_doubt, reported, short, standing, translated
from kvxfer.geometry import BlockLists, Selection
from kvxfer.incoming import Incoming
from kvxfer.link import Link
from kvxfer.metrics import Ended
from kvxfer.need import Need
from kvxfer.peers import Peers
from kvxfer.protocol.messages import Release, Route, Status
from kvxfer.protocol.sending import Failure
from kvxfer.site import Site
from kvxfer.steps import Steps
from kvxfer.tally import Tally
from kvxfer.telemetry import TransferStats, hears_info, logger
from kvxfer.tickets import Ticket
from kvxfer.transfers import FetchResult, Progress, TransferState

__all__ = ["Demand", "Fetching"]

I64: TypeAlias = NDArray[np.int64]

_NAME: Final = "kvxfer.receive"
_log: Final = logger(_NAME)


@dataclass(frozen=True, slots=True)
class Demand:
    """What the caller asked for, checked.

    Attributes:
        ticket: The right to it.
        spans: Destination blocks of every group.
        tokens: Token range.
        after: The blocks may be written when this has fired.
        timeout: Seconds, or None.
        keep: Whether the prefill ranks keep the request, for a retry, if its caller gives up.
        written: Blocks that the fetch will write, by group: int64 ids.
    """

    ticket: Ticket
    spans: BlockLists
    tokens: range
    after: Event
    timeout: float | None
    keep: bool
    written: Mapping[str, I64]


class Fetching(Steps):
    """Runs one fetch.

    Args:
        site: The worker.
        peers: Links to prefill ranks.
        ident: Name of the transfer, also the holder in the custody books.
        demand: What to fetch.
        number: Draws a fresh transfer id.
        known: Makes an `Incoming` known, so that it gets its messages.
        doubted: Seeks evidence that an `Incoming` whose peer is silent writes nothing any more.
        succeeded: Called when every byte is there, before whoever awaits it goes on.
        given_up: Called when it is over because its caller gave up, who keeps nothing; and again when nothing that it
            left in doubt is so any more.
        failed: Called when it is over because of an error, and nobody keeps it or has tried again.
        ended: Called when it is over, and again when nothing of it is in doubt any more.
    """

    def __init__(
        self,
        site: Site,
        peers: Peers,
        ident: str,
        demand: Demand,
        number: Callable[[], int],
        known: Callable[[Incoming], None],
        doubted: Callable[[Incoming], None],
        succeeded: Callable[["Fetching"], None],
        given_up: Callable[["Fetching"], None],
        failed: Callable[["Fetching"], None],
        ended: Callable[["Fetching"], None],
    ) -> None:
        super().__init__(site, f"kvxfer fetch {ident}")
        subject = Subject(demand.ticket.request, ident, demand.written)
        self._subject: Final = subject
        self.transfer: Final = Progress(
            ident, demand.ticket.request, site.loop, self.cancel, lambda: short(subject.blocks)
        )
        self.incoming: Final[list[Incoming]] = []
        self._peers = peers
        self._demand = demand
        self._number = number
        self._known = known
        self._doubted = doubted
        self._succeeded = succeeded
        self._given_up = given_up
        self._broke = failed
        self._ended = ended
        self._unwanted = self._superseded = False
        self._error: Cause | None = None
        self._standing = Standing(Step.CONNECTING)  # when it failed, once it has
        self._in_doubt = False
        self._links: list[Link] = []
        self._asked = self._asking = False
        self._connecting: asyncio.Task[None] | None = None
        self._revoke: asyncio.TimerHandle | None = None
        self._settled: asyncio.Future[None] = site.loop.create_future()
        self.began: Final = site.now()
        self._trace: Final = site.metrics.fetch_began(ident, (demand.ticket.request, demand.ticket.attempt), self.began)
        self._timer: asyncio.TimerHandle | None = None
        if demand.timeout is not None:
            self._timer = site.at(self.began + demand.timeout, self._timed_out)

    @property
    def ticket(self) -> Ticket:
        """The right to what is fetched."""
        return self._demand.ticket

    @property
    def links(self) -> Sequence[Link]:
        """To every prefill rank that was told what is needed of it."""
        return self._links

    @property
    def doubtful(self) -> bool:
        """Whether something of it is under way or in doubt: the caller's blocks, or staging memory."""
        return not all(incoming.finished for incoming in self.incoming)

    def begin(self) -> None:
        """Ask at once if every prefill rank is connected, else connect first."""
        ticket = self._demand.ticket
        epoch = bytes.fromhex(ticket.epoch)
        known = [self._peers.known(endpoint, epoch) for endpoint in ticket.rank_endpoints]
        links = [link for link in known if link is not None]
        if len(links) == len(known):
            self.run(self._resolve, links, None)
        else:
            connecting = self._connect(epoch)
            self._connecting = self.site.tasks.spawn(connecting, f"kvxfer fetch {self.transfer.id}", self._abandoned)

    def cancel(self) -> None:
        """The caller gave up, also one whose fetch has failed already, and is winding down."""
        self._unwanted = not self._demand.keep
        self._stop(asyncio.CancelledError())

    def close(self) -> None:
        """The worker is closing."""
        self._stop(ClosedError(f"the worker was closed before the fetch of {self.transfer.request!r} had ended"))

    def abandon(self) -> None:
        """The worker is closing and cannot wait any longer."""
        if not self.transfer.done:
            if self._error is None:
                self._fail(ClosedError(f"the fetch of {self.transfer.request!r} was abandoned"))
            self._silence()

    def failed(self, error: KvxferError) -> None:
        """A step raised."""
        self._stop(error)

    # --- steps

    async def _connect(self, epoch: bytes) -> None:
        """Reach every prefill rank."""
        ticket = self._demand.ticket
        found = await asyncio.gather(
            *(self._peers.link(endpoint, epoch) for endpoint in ticket.rank_endpoints), return_exceptions=True
        )
        lost: KvxferError | None = None
        links: list[Link | None] = []
        for rank, outcome in enumerate(found):
            if isinstance(outcome, Link):
                links.append(outcome)
            elif isinstance(outcome, KvxferError):
                lost = lost or outcome
                links.append(None)
                _log.warning("rank_not_reached", rank=rank, endpoint=ticket.rank_endpoints[rank], error=str(outcome))
            else:
                raise outcome
        self.run(self._resolve, links, lost)

    def _abandoned(self, error: BaseException) -> None:
        """Connecting was cancelled because the fetch is over, or broke."""
        if self._error is None:
            text = f"fetch of {self.transfer.request!r} could not begin: {error!r}"
            self._stop(TransferFailedError(text, transfer=self.transfer.id, blocks=self._subject.blocks))

    def _resolve(self, links: Sequence[Link | None], lost: KvxferError | None) -> None:
        """Divide what is needed among the ranks, and ask each."""
        plans, rank = self.site.plans, self.site.config.rank
        peers = [None if link is None else link.peer for link in links]

        def shares() -> Sequence[tuple[Selection, ...]]:
            try:
                return plans.shares(peers, rank=rank)
            except (GeometryError, MismatchError) as error:  # a rank that is not there may be the one that is missing
                if lost is not None:
                    raise lost from error
                gone = next((link for link in links if link is not None and link.failure is not None), None)
                if gone is None:
                    raise
                what = f"fetch of {self.transfer.request!r} had not begun when {gone.peer.name} was lost"
                raise PeerLostError(f"{what}: {gone.failure}", peer=gone.peer.name) from error

        if self._error is None:
            self.plan(shares, partial(self._resolved, links), rows=plans.shares_rows(peers))

    def _resolved(self, links: Sequence[Link | None], shares: Sequence[tuple[Selection, ...]]) -> None:
        if self._error is not None:
            return
        self._asking = self._asked = True
        try:
            self._ask(shares, links)
        finally:
            self._asking = False
        self.changed()

    def _ask(self, shares: Sequence[tuple[Selection, ...]], links: Sequence[Link | None]) -> None:
        """Tell every prefill rank by `Fetch`, or by `Release` that nothing of it is needed."""
        demand, site = self._demand, self.site
        self.transfer.state = TransferState.WAITING
        deadline = None if demand.timeout is None else self.began + demand.timeout
        for selections, link in zip(shares, links, strict=True):
            if link is None:
                continue
            self._links.append(link)
            if not selections:
                link.send(Release(demand.ticket.ref()))
                continue
            need = Need(
                demand.ticket.ref(), selections, demand.spans, demand.tokens, demand.after, deadline, self._trace
            )
            incoming = Incoming(site, link, self._number(), need, self)
            self.transfer.expect(dict.fromkeys(incoming.layers, 1))
            self.incoming.append(incoming)
            self._known(incoming)
            incoming.start()

    def changed(self) -> None:
        """Something of a rank's part has changed: stop the others if it failed, and end when all are quiet."""
        if self.transfer.done:
            self._ended(self)
        elif self._asked and not self._asking:
            self._collect_failures()
            if self._error is not None:
                self._wind_down(self._error)
            self._end_if_quiet()

    def _end_if_quiet(self) -> None:
        if not self.transfer.done and all(incoming.quiet for incoming in self.incoming):
            self._end()

    def _wind_down(self, error: Cause) -> None:
        """Stop what still runs; what is not quiet within `revoke_timeout` is in doubt."""
        if self._revoke is not None:
            return
        self._revoke = self.site.at(self.site.now() + self.site.config.revoke_timeout, self._silence)
        code = Code.CANCELLED if isinstance(error, asyncio.CancelledError) else error.code
        failure = Failure(Status.CANCELLED, code, str(error) or "the caller cancelled")
        for incoming in self.incoming:
            if not incoming.quiet:
                incoming.stop(failure)

    def _silence(self) -> None:
        """Nobody is waited for any longer."""
        silent = Failure(Status.FAILED, Code.PEER_LOST, f"no answer within {self.site.config.revoke_timeout:g} s")
        for incoming in self.incoming:
            if not incoming.quiet:
                incoming.lost(silent)
        if not self.transfer.done:
            self._collect_failures()
            self._end()

    def _end(self) -> None:
        """Tell the caller, and keep in custody what may still be written."""
        for timer in (self._timer, self._revoke):
            if timer is not None:
                timer.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
        self._in_doubt = any(incoming.in_doubt for incoming in self.incoming)
        if self._in_doubt:
            self.site.custody.doubt(self.transfer.id)
        else:
            self.site.custody.release(self.transfer.id)
        if self._error is None:  # before whoever awaits the fetch goes on, perhaps with another one
            self.site.loop.call_soon(self._release)
            self._succeeded(self)
        self._finish()
        if self._unwanted:
            self.site.loop.call_soon(self._give_back)  # a retry may begin in this turn
        elif self._error is not None and not (self._demand.keep or self._superseded):
            self._broke(self)
        self._ended(self)

    def supersede(self) -> None:
        """The request is fetched anew: what becomes of it is that fetch's business."""
        self._superseded, self._unwanted = True, False

    def unwant(self) -> None:
        """Nobody has tried again: what is in doubt of it is given back when that has ended."""
        self._unwanted = True

    def _give_back(self) -> None:
        if self._unwanted:
            self._given_up(self)

    def _release(self) -> None:
        """Tell every prefill rank that nothing more of the request is needed."""
        for link in self._links:
            link.send(Release(self._demand.ticket.ref()))

    def _collect_failures(self) -> None:
        """The first failure of any rank becomes the fetch's error."""
        for incoming in self.incoming:
            failure = incoming.machine.failure
            if failure is not None and self._error is None:
                self._fail(translated(self._subject, incoming, failure), incoming)

    def _fail(self, error: Cause, failed: Incoming | None = None) -> None:
        """Note why it fails, and where it stands."""
        self._error, self._standing = error, standing(self.incoming, failed)

    # --- ending

    def _finish(self) -> None:
        tally = self._tally()
        stats = self._stats(tally)
        error, report = self._error, None
        if error is not None:
            self.transfer.failed_blocks = self._subject.blocks
            if self._in_doubt:
                silent = ",".join(i.peer.name for i in self.incoming if i.in_doubt)
                who = "a copy of our own" if any(i.copying for i in self.incoming) else "a silent peer"
                error = in_doubt(self._subject, error, lambda: asyncio.shield(self._settled), silent, who)
            error, report = reported(self._subject, self._standing, error, elapsed=stats.duration, route=stats.route)
        code = None if error is None else Code.CANCELLED if isinstance(error, asyncio.CancelledError) else error.code
        self.site.metrics.transfer_ended(
            Ended(
                side="receive",
                code=code,
                stats=stats,
                report=report,
                transfer=self.transfer.id,
                key=(self.ticket.request, self.ticket.attempt),
                stages=tally.stages,
            )
        )
        for incoming in self.incoming:
            incoming.link.moved[incoming.route] += incoming.tally.bytes
        self._log(stats, report)
        if error is None or report is None:
            payload = next((i.machine.payload for i in self.incoming if i.machine.payload), b"")
            self.transfer.succeed(FetchResult(self.transfer.request, payload, stats))
        else:
            self.transfer.fail(error, report)

    def _log(self, stats: TransferStats, report: FailureReport | None) -> None:
        """The one line of this fetch."""
        if report is not None:
            say = _log.info if report.code is Code.CANCELLED else _log.warning
            say("fetch_failed", **stats.log_fields(), **report.log_fields())
        elif hears_info(_NAME):
            _log.info(
                "fetch_ended",
                request=self.transfer.request,
                transfer=self.transfer.id,
                outcome="ok",
                **stats.log_fields(),
            )

    def settle(self) -> None:
        """Evidence came in: no peer can write the blocks any more."""
        if not self._settled.done():
            if self._in_doubt:
                self.site.custody.settle(self.transfer.id)
                if self._unwanted:
                    self._given_up(self)
            self.transfer.memory_safe = True
            self._settled.set_result(None)

    def forsake(self) -> None:
        """The worker is closed: there will be no evidence any more. The memory is left to the process's end."""
        if not self._settled.done():
            self._settled.set_exception(
                ClosedError(f"the worker was closed while blocks of {self.transfer.id} were in doubt: never reuse them")
            )
            self._settled.exception()

    def _tally(self) -> Tally:
        """What all ranks' parts counted."""
        if len(self.incoming) == 1:
            return self.incoming[0].tally
        tally = Tally()
        for incoming in self.incoming:
            tally.merge(incoming.tally)
        return tally

    def _stats(self, tally: Tally) -> TransferStats:
        return tally.stats(
            route="+".join(sorted({i.route.name.lower() for i in self.incoming if i.route is not Route.UNKNOWN})),
            why="; ".join(dict.fromkeys(incoming.why for incoming in self.incoming if incoming.why)),
            limited_by="; ".join(dict.fromkeys(i.limited_by for i in self.incoming if i.limited_by)),
            peers=tuple(incoming.peer.name for incoming in self.incoming),
            started=self.began,
            finished=self.site.now(),
        )

    def planned(self, needed: Sequence[int], parts: Mapping[int, int]) -> None:
        """One rank's plan is made: of each of the layers that it sends, so many parts will land."""
        self.transfer.expect(parts)
        self.transfer.landed(needed)  # each counted as one part until now

    def doubted(self, incoming: Incoming) -> None:
        """A rank says nothing more of its part."""
        self._doubted(incoming)

    def landed(self, layers: Sequence[int]) -> None:
        """One chunk of these layers is in place."""
        if not self.transfer.done:
            self.transfer.state = max(self.transfer.state, TransferState.MOVING)
            self.transfer.landed(layers)

    def _timed_out(self) -> None:
        waited, at = self.site.now() - self.began, standing(self.incoming)
        hint = "; it may not be on offer there" if at.step is Step.ASKING else ""
        self._stop(
            TransferTimeoutError(
                f"fetch of {self.transfer.request!r} did not end within {self._demand.timeout:g} s ({waited:.3f} s "
                f"passed while {at.step.value}, {at.bytes} bytes landed, state {self.transfer.state.name}){hint}; "
                f"what was under way had {self.site.config.revoke_timeout:g} s more to end",
                peer=at.peer,
                transfer=self.transfer.id,
                blocks=self._subject.blocks,
            )
        )

    def _stop(self, error: Cause) -> None:
        if self._error is not None or self.transfer.done:
            return
        self._fail(error)
        if self._asked:
            self.changed()
        else:
            self._end()  # nobody was asked for anything yet
