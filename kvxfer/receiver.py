"""The decode role of a worker: claims, fetches, and the doubts that lost sessions leave behind."""

import asyncio
import math
from itertools import count
from typing import Any, Final

from kvxfer.blocklists import wanted_blocks, written_blocks
from kvxfer.errors import ClosedError, Code, KvxferError, ProtocolError, RequestError
from kvxfer.events import as_event
from kvxfer.fetching import Demand, Fetching
from kvxfer.geometry import Blocks
from kvxfer.incoming import Incoming
from kvxfer.lending import Lender, Loan
from kvxfer.link import Link
from kvxfer.peers import Peers
from kvxfer.protocol.messages import MAX_TICKETS, Accept, KvAgentResult, Message, Refuse, Release, Status, Want
from kvxfer.protocol.messages import Claim as ClaimMessage
from kvxfer.protocol.sending import Failure
from kvxfer.site import Site
from kvxfer.telemetry import logger
from kvxfer.tickets import Ticket
from kvxfer.transfers import Claim, Transfer, TransferState

__all__ = ["Receiver"]

_log: Final = logger("kvxfer.receive")
_RETRY_SECONDS: Final = 0.5
_RETRY_SECONDS_MAX: Final = 10.0
_RENEWALS: Final = 3
"""A claim is renewed so many times within a lease."""


class Receiver:
    """Everything that this rank fetches from peers.

    Args:
        site: The worker.
        peers: Links to prefill ranks.
    """

    def __init__(self, site: Site, peers: Peers) -> None:
        self._site: Final = site
        self._peers: Final = peers
        self._numbers = count(1)
        self._fetches: set[Fetching] = set()
        self._incoming: dict[int, Incoming] = {}
        self._lender: Final = Lender(site, lambda: next(self._numbers))
        self._claims: dict[tuple[str, str, int], Ticket] = {}
        self._renewal: asyncio.TimerHandle | None = None
        self._recoveries: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._fetches)

    @property
    def doubtful(self) -> int:
        """Fetches that ended while a peer's answer was missing."""
        return sum(fetching.transfer.done for fetching in self._fetches)

    # --- what callers do

    def start(self, ticket: Ticket, blocks: Blocks, *, tokens: range, after: Any, timeout: float | None) -> Transfer:
        """Begin a fetch. Everything that can be checked here is checked before anything is sent.

        Raises:
            UsageError: See `Worker.fetch`.
        """
        site = self._site
        if site.draining:
            raise ClosedError("this worker is draining: fetch on another one")
        if len(self._fetches) >= site.config.max_transfers:
            raise RequestError(
                f"{len(self._fetches)} fetches are under way; max_transfers is {site.config.max_transfers}"
            )
        spans = wanted_blocks(blocks, site.geometry, tokens)
        written = written_blocks(spans, site.geometry, tokens)
        event = as_event(after, site.geometry)
        try:
            finite = timeout is None or math.isfinite(timeout)
        except (TypeError, OverflowError):
            finite = False
        if not finite:
            raise RequestError(f"timeout must be a number of seconds, or None, not {timeout!r}")
        ident = f"{site.incarnation.hex()[:8]}-{next(self._numbers)}"
        site.custody.hold(ident, written)
        demand = Demand(ticket, spans, tokens, event, timeout, written)
        fetching = Fetching(site, self._peers, ident, demand, lambda: next(self._numbers), self._known, self._ended)
        self._fetches.add(fetching)
        fetching.begin()
        return fetching.transfer

    def claim(self, ticket: Ticket) -> Claim:
        """Keep a request's lease until it is fetched, declined, or the claim is closed."""
        self._claims[ticket.key] = ticket
        self._site.tasks.spawn(self._send_claim(ticket), f"kvxfer claim {ticket.request}")
        self._arm()
        return Claim(ticket, lambda: self._unclaim(ticket))

    async def decline(self, ticket: Ticket) -> None:
        """Tell every prefill rank that no fetch will come.

        Raises:
            PeerError: If a rank could not be told; it frees its blocks when its lease has run out.
        """
        self._unclaim(ticket)
        epoch = bytes.fromhex(ticket.epoch)
        links = await asyncio.gather(
            *(self._peers.link(endpoint, epoch) for endpoint in ticket.rank_endpoints), return_exceptions=True
        )
        for link in links:
            if isinstance(link, Link):
                link.send(Release(ticket.ref(), Code.CANCELLED))
        for link in links:
            if isinstance(link, BaseException):
                raise link

    # --- messages

    def handle(self, link: Link, message: Message) -> None:
        """Take a message of a prefill rank."""
        match message:
            case KvAgentResult():  # a chunk landed, or a transfer ended
                if (incoming := self._find(link, message.transfer)) is not None:
                    incoming.result(message)
                elif (loan := self._lender.find(link, message.transfer)) is not None:
                    self._lender.result(loan, message)
                else:
                    self._site.metrics.result_dropped("stale")
            case Accept():
                if (incoming := self._find(link, message.transfer)) is not None:
                    incoming.accepted(message)
            case Refuse():
                if (incoming := self._find(link, message.transfer)) is not None:
                    incoming.refused(message)
            case Want():
                if (incoming := self._find(link, message.transfer)) is not None:
                    incoming.wanted(message)
            case _:
                pass

    def opened(self, link: Link) -> None:
        """A link to a prefill rank is open: ask about what was lost with the last one."""
        unanswered: list[Incoming | Loan] = [*self._incoming.values(), *self._lender.loans.values()]
        for owed in unanswered:
            if owed.peer.identity.incarnation == link.peer.identity.incarnation and owed.is_lost:
                owed.resume(link)

    def lost(self, link: Link, error: KvxferError) -> None:
        """A link is gone: every transfer on it fails."""
        failure = Failure(Status.FAILED, Code.PEER_LOST, str(error))
        for incoming in list(self._incoming.values()):
            if incoming.link is link and not incoming.machine.ended:
                incoming.lost(failure)
                if not incoming.finished or incoming.owes_an_answer:
                    self._begin_recovery(incoming)
        for loan in self._lender.lost(link):
            self._begin_recovery(loan)

    def close(self) -> None:
        """Stop renewing; for shutdown, after `cancel_all`."""
        self._claims.clear()
        if self._renewal is not None:
            self._renewal.cancel()
        for fetching in list(self._fetches):
            fetching.abandon()
            fetching.forsake()

    def outcomes(self) -> "list[asyncio.Future[Any]]":
        """Resolve as fetches end; for the worker's drain."""
        return [fetching.transfer.outcome for fetching in self._fetches if not fetching.transfer.done]

    def cancel_all(self) -> None:
        """Give up every fetch; for shutdown."""
        for task in self._recoveries:
            task.cancel()
        for fetching in list(self._fetches):
            if not fetching.transfer.done:
                fetching.close()
        if ends := self.outcomes() + self._lender.recall():  # the worker waits for its tasks, bounded; these are none
            self._site.tasks.spawn(asyncio.wait(ends), "kvxfer end fetches")

    # --- inside

    def _known(self, incoming: Incoming) -> None:
        self._incoming[incoming.machine.transfer] = incoming

    def _find(self, link: Link, transfer: int) -> Incoming | None:
        incoming = self._incoming.get(transfer)
        if incoming is None or incoming.link is link:
            return incoming
        if incoming.peer.identity.incarnation != link.peer.identity.incarnation:
            raise ProtocolError(f"transfer {transfer} belongs to another peer", peer=link.peer.name)
        return incoming

    def _ended(self, fetching: Fetching) -> None:
        """A fetch is over; forget it once it leaves nothing in doubt."""
        if fetching.transfer.state is TransferState.DONE:
            self._unclaim_key(fetching.ticket.key)
            for incoming in fetching.incoming:
                self._lender.used(incoming.link, incoming.route)
        if not fetching.doubtful:
            self._fetches.discard(fetching)
            fetching.settle()
            for incoming in fetching.incoming:
                self._incoming.pop(incoming.machine.transfer, None)
            fetching.incoming.clear()  # they know the fetch: without a cycle, all of it is freed at once

    def _begin_recovery(self, owed: Incoming | Loan) -> None:
        task = self._site.tasks.spawn(self._recover(owed), f"kvxfer recover {owed.transfer}")
        self._recoveries.add(task)
        task.add_done_callback(self._recoveries.discard)

    async def _recover(self, owed: Incoming | Loan) -> None:
        """Reach the same incarnation again, so that it can say what became of its writes.

        It goes on until there is an answer, because nothing else is evidence; the memory stays in quarantine meanwhile.
        """
        delay = _RETRY_SECONDS
        while not owed.ended and not self._site.draining:
            try:
                link = await self._peers.link(owed.link.endpoint, None)
            except KvxferError:
                link = None
            if link is None or not link.is_open:  # not reached, or lost again in the turn in which it was opened
                await asyncio.sleep(delay)
                delay = min(2 * delay, _RETRY_SECONDS_MAX)
                continue
            if link.peer.identity.incarnation != owed.peer.identity.incarnation:
                _log.warning("peer_replaced", peer=owed.peer.name, incarnation=link.peer.name)
                return
            if owed.is_lost:
                owed.resume(link)
            return

    async def _send_claim(self, ticket: Ticket) -> None:
        epoch = bytes.fromhex(ticket.epoch)
        for endpoint in ticket.rank_endpoints:
            try:
                link = await self._peers.link(endpoint, epoch)
            except KvxferError as error:
                _log.warning("claim_not_sent", request=ticket.request, endpoint=endpoint, error=str(error))
                continue
            link.send(ClaimMessage([ticket.ref()]))

    def _renew(self) -> None:
        """Renew all claims: one frame a prefill rank."""
        by_endpoint: dict[str, list[Ticket]] = {}
        for ticket in self._claims.values():
            for endpoint in ticket.rank_endpoints:
                by_endpoint.setdefault(endpoint, []).append(ticket)
        for link in self._peers.links:
            refs = [ticket.ref() for ticket in by_endpoint.pop(link.endpoint, [])]
            for first in range(0, len(refs), MAX_TICKETS):
                link.send(ClaimMessage(refs[first : first + MAX_TICKETS]))
        missed = {ticket.key: ticket for tickets in by_endpoint.values() for ticket in tickets}
        for ticket in missed.values():  # no link (any more): open one
            self._site.tasks.spawn(self._send_claim(ticket), f"kvxfer claim {ticket.request}")
        self._renewal = None
        self._arm()

    def _arm(self) -> None:
        if self._renewal is None and self._claims:
            config = self._site.config
            # the lease is the prefill engine's, which may be shorter than ours; it is longer than two heartbeats
            period = min(config.offer_lease / _RENEWALS, config.heartbeat)
            self._renewal = self._site.at(self._site.now() + period, self._renew)

    def _unclaim(self, ticket: Ticket) -> None:
        self._unclaim_key(ticket.key)

    def _unclaim_key(self, key: tuple[str, str, int]) -> None:
        self._claims.pop(key, None)
