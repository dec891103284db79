"""The decode role of a worker: claims, fetches, and the doubts that lost sessions leave behind."""

import asyncio
from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any, Final

from kvxfer.blocklists import wanted_blocks, written_blocks
from kvxfer.decode.claims import Claims, TicketKey
from kvxfer.decode.fetch import Demand, Fetch
from kvxfer.decode.receiver import Receiver
from kvxfer.errors import BusyError, ClosedError, Code, KvxferError, ProtocolError
from kvxfer.events import as_event
from kvxfer.geometry import Blocks, Selection
from kvxfer.link import Link
from kvxfer.onlookers import given_seconds
from kvxfer.peers import Peers
from kvxfer.protocol import messages as wire
from kvxfer.protocol.messages import Route, Status
from kvxfer.protocol.sending import Failure
from kvxfer.recovery import Recoveries
from kvxfer.site import Site
from kvxfer.telemetry import logger
from kvxfer.tickets import Ticket
from kvxfer.transfers import Claim, Progress

__all__ = ["Decode"]

_log: Final = logger("kvxfer.receive")
_GONE: Final = frozenset({Code.TICKET_RELEASED, Code.TICKET_EXPIRED, Code.OFFER_WITHDRAWN})
"""Why a fetch fails whose request is not on offer any more: to claim it on would keep nothing."""


class Decode:
    """Everything that this rank fetches from peers.

    Args:
        site: The worker.
        peers: Links to prefill ranks.
    """

    def __init__(self, site: Site, peers: Peers) -> None:
        self.peers: Final = peers
        self._site: Final = site
        self._numbers = count(1)
        self._fetches: set[Fetch] = set()
        self._of_ticket: dict[TicketKey, set[Fetch]] = {}  # the same
        self._windows: dict[TicketKey, tuple[asyncio.TimerHandle, Callable[[], None]]] = {}  # what failed, for a retry
        self._later: dict[TicketKey, asyncio.Task[None]] = {}  # what tells ranks to free it that are being connected
        self._incoming: dict[int, Receiver] = {}
        self._recoveries: Final = Recoveries(site, peers)
        self._claims: Final = Claims(site, peers)

    def __len__(self) -> int:
        return len(self._fetches)

    @property
    def fetches(self) -> Iterable[Fetch]:
        """What has not ended, or is in doubt."""
        return self._fetches

    @property
    def claimed(self) -> int:
        """Requests whose leases are renewed."""
        return len(self._claims)

    @property
    def doubtful(self) -> int:
        """Fetches that ended while a peer's answer was missing."""
        return sum(fetch.transfer.done for fetch in self._fetches)

    # --- what callers do

    def start(
        self, ticket: Ticket, blocks: Blocks, *, tokens: range, after: Any, timeout: float | None, keep: bool
    ) -> Progress:
        """Begin a fetch. Everything that can be checked here is checked before anything is sent.

        Raises:
            UsageError: See `Worker.fetch`.
        """
        site = self._site
        if site.draining:
            raise ClosedError("this worker is draining: fetch on another one")
        if len(self._fetches) >= site.config.max_transfers:
            raise BusyError(f"{len(self._fetches)} fetches are under way; max_transfers is {site.config.max_transfers}")
        spans = wanted_blocks(blocks, site.geometry, tokens)
        written = written_blocks(spans, site.geometry, tokens)
        event = as_event(after, site.geometry)
        limit = given_seconds(timeout, None)
        number = next(self._numbers)
        ident = f"{site.incarnation.hex()[:8]}-{number}"
        site.custody.hold(ident, written)
        fetch = Fetch(site, self, ident, number, Demand(ticket, spans, tokens, event, limit, keep, written))
        self._claims.note_fetch(ticket.key, given_up=False)
        for older in self._of_ticket.get(ticket.key, ()):
            older.supersede()
        if (later := self._later.pop(ticket.key, None)) is not None:
            later.cancel()
        self._close_window(ticket.key)
        self._fetches.add(fetch)
        self._of_ticket.setdefault(ticket.key, set()).add(fetch)
        fetch.begin()
        return fetch.transfer

    def claim(self, ticket: Ticket) -> Claim:
        """Keep a request's lease until it is fetched, declined, or the claim is closed.

        Raises:
            BusyError: If there are too many claims.
        """
        let_go = self._claims.keep(ticket)

        def close() -> None:
            if let_go():
                self._give_back(ticket)

        return Claim(ticket, close, self._site.loop)

    async def decline(self, ticket: Ticket) -> None:
        """Tell every prefill rank that no fetch will come.

        Raises:
            PeerError: If a rank could not be told; it frees its blocks when its lease has run out.
        """
        self._claims.drop(ticket.key)
        self._close_window(ticket.key)
        others = self._release(ticket)
        links = await self._connect(ticket, others)
        for link in links:
            if isinstance(link, Link):
                link.send(wire.Release(ticket.ref(), Code.CANCELLED))
        for link in links:
            if isinstance(link, BaseException):
                raise link

    # --- what fetches say

    def receiver(self, link: Link, selections: tuple[Selection, ...], fetch: Fetch) -> Receiver:
        """What takes one rank's part of a fetch: it gets the messages that are for it."""
        number = fetch.number if not fetch.receivers else next(self._numbers)
        receiver = self._incoming[number] = Receiver(self._site, link, number, selections, fetch)
        return receiver

    def doubted(self, receiver: Receiver) -> None:
        """Its peer is silent: seek evidence that nothing of it is written any more."""
        self._recoveries.begin(receiver)

    def succeeded(self, fetch: Fetch) -> None:
        """Every byte of a fetch is there: it needs no claim any more."""
        self._claims.drop(fetch.demand.ticket.key)

    def given_up(self, fetch: Fetch) -> None:
        """The caller of a fetch has given up, and keeps nothing."""
        self._give_back(fetch.demand.ticket, fetch.links)

    def failed(self, fetch: Fetch) -> None:
        """A fetch ended in an error: unless somebody tries again soon, nobody needs its request."""
        site, ticket, links = self._site, fetch.demand.ticket, tuple(fetch.links)

        def over() -> None:
            self._windows.pop(ticket.key, None)
            for left in self._of_ticket.get(ticket.key, ()):
                left.unwant()
            self._give_back(ticket, links)

        self._close_window(ticket.key)
        self._windows[ticket.key] = site.at(site.now() + site.config.retry_window, over), over

    def ended(self, fetch: Fetch) -> None:
        """A fetch is over; forget it once it leaves nothing in doubt."""
        report, receivers = fetch.transfer.report, fetch.receivers
        if report is not None and report.code in _GONE:
            self._claims.drop(fetch.demand.ticket.key)
        if not fetch.doubtful:
            self._forget(fetch)
            fetch.settle()
            for receiver in receivers[:]:
                if not receiver.owes_an_answer:
                    self._incoming.pop(receiver.transfer, None)
                    receiver.exposure.end()
                    receivers.remove(receiver)  # which knows the fetch: without a cycle, all of it is freed at once

    # --- messages

    def handle(self, link: Link, message: wire.Message) -> None:
        """Take a message of a prefill rank."""
        if not isinstance(message, (wire.Accept, wire.Refuse, wire.Want, wire.Arrived, wire.Sums, wire.KvAgentResult)):
            return
        incoming = self._find(link, message.transfer)
        if incoming is None:
            if isinstance(message, (wire.Arrived, wire.KvAgentResult)):
                self._site.metrics.result_dropped("stale")
            return
        match message:
            case wire.KvAgentResult():
                incoming.result(message)
            case wire.Arrived():
                incoming.came(message)
            case wire.Accept():
                incoming.accepted(message)
            case wire.Refuse():
                incoming.refused(message)
            case wire.Want():
                incoming.wanted(message)
            case wire.Sums():
                incoming.added_up(message)

    def opened(self, link: Link) -> None:
        """A link to a prefill rank is open: ask about what was lost with the last one."""
        if self._site.config.sums_every:
            link.send(wire.Check(self._site.config.sums_every))
            self._site.warm_sums(link.peer, sending=False)
        for receiver in list(self._incoming.values()):
            if receiver.peer.identity.incarnation == link.peer.identity.incarnation and receiver.is_lost:
                receiver.resume(link)

    def lost(self, link: Link, error: KvxferError) -> None:
        """A link is gone: every transfer on it fails."""
        failure = Failure(Status.FAILED, Code.PEER_LOST, str(error))
        for incoming in list(self._incoming.values()):
            if incoming.link is link and not incoming.machine.ended:
                incoming.lost(failure)

    def renewed(self, link: Link) -> None:
        """A prefill rank has made its agent anew."""
        for receiver in list(self._incoming.values()):
            if receiver.peer.identity.incarnation == link.peer.identity.incarnation:
                receiver.exposure.met(link.renewals)

    def abandon_all(self) -> None:
        """Wait for no peer any longer; for shutdown, after `cancel_all`."""
        for fetch in list(self._fetches):
            fetch.abandon()

    def close(self) -> None:
        """Say of what is in doubt that it stays so; for shutdown, after `abandon_all`."""
        for fetch in list(self._fetches):
            fetch.abandon()
            fetch.forsake()

    def outcomes(self) -> "list[asyncio.Future[Any]]":
        """Resolve as fetches end; for the worker's drain."""
        return [fetch.transfer.outcome for fetch in self._fetches if not fetch.transfer.done]

    def cancel_all(self) -> None:
        """Give up every fetch and claim; for shutdown."""
        self._claims.close()
        for timer, over in list(self._windows.values()):  # nobody tries again here
            timer.cancel()
            over()
        self._recoveries.cancel()
        for fetch in list(self._fetches):
            if not fetch.transfer.done:
                fetch.close()
        if ends := self.outcomes():  # the worker waits for its tasks, bounded; that of a fetch may outlast its end
            self._site.tasks.spawn(asyncio.wait(ends), "kvxfer end fetches")

    @property
    def owing(self) -> Iterable[Link]:
        """Links on which something was asked for that has not ended; they may be gone."""
        return (receiver.link for receiver in self._incoming.values())

    @property
    def exposed(self) -> bool:
        """Whether a prefill rank that answers may be writing what it was granted, by way of the agent."""
        return any(self._in_hand())

    def take_back(self, failure: Failure) -> None:
        """Stop what is being written, by way of the agent."""
        for incoming in list(self._in_hand()):
            incoming.stop(failure)

    def stop_posted(self, failure: Failure) -> None:
        """Stop what waits for reads of ours."""
        for incoming in list(self._incoming.values()):
            if incoming.reading:
                incoming.stop(failure)

    # --- inside

    def _in_hand(self) -> Iterator[Receiver]:
        for incoming in self._incoming.values():
            machine = incoming.machine
            if machine.exposed and incoming.route is not Route.MAPPED and not (machine.ended or incoming.is_lost):
                yield incoming

    def _find(self, link: Link, transfer: int) -> Receiver | None:
        incoming = self._incoming.get(transfer)
        if incoming is None or incoming.link is link:
            return incoming
        if incoming.peer.identity.incarnation != link.peer.identity.incarnation:
            raise ProtocolError(f"transfer {transfer} belongs to another peer", peer=link.peer.name)
        return incoming

    def _forget(self, fetch: Fetch) -> None:
        self._fetches.discard(fetch)
        same = self._of_ticket.get(fetch.demand.ticket.key, set())
        same.discard(fetch)
        if not same:
            self._of_ticket.pop(fetch.demand.ticket.key, None)

    def _close_window(self, key: TicketKey) -> None:
        timer, _ = self._windows.pop(key, (None, None))
        if timer is not None:
            timer.cancel()

    def _give_back(self, ticket: Ticket, links: Iterable[Link] = ()) -> None:
        """A fetch was given up: unless the request is claimed, or fetched again, its prefill ranks free its blocks.

        Nobody waits for that, or is connected for it. A rank whose part is in doubt is told when that has ended.
        """
        same = self._of_ticket.get(ticket.key, ())
        if not all(fetch.transfer.done for fetch in same):
            return  # tried again meanwhile
        if self._claims.note_fetch(ticket.key, given_up=True):
            return  # whoever closes the claim comes here
        doubtful = {part.peer.identity.incarnation for fetch in same for part in fetch.receivers if part.in_doubt}
        others = self._release(ticket, links, doubtful)
        if soon := [endpoint for endpoint in others if self.peers.opening(endpoint)]:
            later = self._give_back_later(ticket, soon)
            task = self._site.tasks.spawn(later, f"kvxfer release {ticket.request}", spare=True)
            self._later[ticket.key] = task
            task.add_done_callback(partial(self._not_later, ticket.key))

    async def _give_back_later(self, ticket: Ticket, endpoints: Iterable[str]) -> None:
        """The same once these are connected, or could not be."""
        await self._connect(ticket, endpoints)
        self._give_back(ticket)

    def _not_later(self, key: TicketKey, task: "asyncio.Task[None]") -> None:
        if self._later.get(key) is task:
            del self._later[key]

    def _release(self, ticket: Ticket, links: Iterable[Link] = (), spared: Container[bytes] = ()) -> list[str]:
        """Tell every prefill rank that is connected that no fetch will come. At once: the worker may be about to close.

        Args:
            ticket: Of what.
            links: More ways to its ranks.
            spared: Incarnations that are told later.

        Returns:
            Endpoints to which no link is known.
        """
        epoch = bytes.fromhex(ticket.epoch)
        known = {endpoint: self.peers.known(endpoint, epoch) for endpoint in ticket.rank_endpoints}
        for link in dict.fromkeys((*links, *known.values())):
            if link is not None and link.peer.identity.incarnation not in spared:
                link.send(wire.Release(ticket.ref(), Code.CANCELLED))
        return [endpoint for endpoint, link in known.items() if link is None]

    async def _connect(self, ticket: Ticket, endpoints: Iterable[str]) -> list[Link | BaseException]:
        epoch = bytes.fromhex(ticket.epoch)
        return await asyncio.gather(*(self.peers.link(each, epoch) for each in endpoints), return_exceptions=True)
