"""The decode role of a worker: claims, fetches, and the doubts that lost sessions leave behind."""

import asyncio
import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice, repeat
from typing import Any, Final, TypeAlias

from kvxfer.copy.port import READY, as_event
from kvxfer.decode.fetch import Fetch
from kvxfer.decode.receiver import Part, PrefillEngine, Receiver
from kvxfer.errors import BusyError, Code, IdentityError, KvxferError, MismatchError, ProtocolError
from kvxfer.geometry import Blocks, PairPlan
from kvxfer.peers.connections import Backoff, Peers
from kvxfer.peers.link import Link
from kvxfer.plans.pairs import selection_to_wire, wanted_blocks
from kvxfer.protocol import messages as wire
from kvxfer.protocol.messages import MAX_TICKETS, Route, Status
from kvxfer.protocol.transfer import Failure
from kvxfer.safety.doubt import Stop
from kvxfer.site import Site, Tally
from kvxfer.telemetry import TransferStats, logger
from kvxfer.tickets import Ticket
from kvxfer.transfers import Claim, Progress, given_seconds

__all__ = ["Claims", "Decode", "TicketKey"]

# --- claims
#
# However many there are, a renewal takes one frame a prefill rank (or as few as hold them). What is claimed in one
# turn of the loop is said together. Each prefill rank is told as often as its session asks for, whatever others ask
# for.

_log: Final = logger("kvxfer.receive")
_MAX_CLAIMS: Final = 65_536
_RETRY_SECONDS: Final = 1.0
"""After how long a rank that was not reached is tried again at most; or a heartbeat of ours, if that is shorter."""
RETRY_WINDOW_SECONDS: Final = 2.0
"""How long after an error or a time-out of a fetch its request is kept for a retry, unless it is claimed."""
_SLOWER: Final = 6
"""How often the pause doubles for a rank that answers, and is not the one that is meant."""
_RANKS_A_TURN: Final = 512
"""To how many ranks something new is said in one turn of the loop."""

TicketKey: TypeAlias = tuple[str, wire.TicketRef]
"""See `Ticket.key`."""


@dataclass(slots=True, eq=False)
class _Kept:
    """One request that is claimed."""

    holders: int = 0  # claims of it that were made and not ended
    given_up: bool = False  # its last fetch was, by its caller: then nothing needs it when they have ended


@dataclass(slots=True, eq=False)
class _Rank:
    endpoint: str  # where it is said to be
    at: str  # where the last link to it led: hosts can have two names
    connecting: bool = False  # it is being connected: it is told everything when it is there, and nothing before
    failures: int = 0  # how often in a row it was not reached; the first has been logged
    due: float = 0.0  # when it is told everything again
    timer: asyncio.TimerHandle | None = None  # fires then


@dataclass(slots=True, eq=False)
class _Engine:
    """One prefill engine, as tickets name it. It is kept for a heartbeat when nothing is claimed there any more."""

    place: object  # by what it is found
    epoch: bytes
    ranks: list[_Rank]
    busy: int = 0  # how many timers they have, and how many of them are being connected
    kept: dict[TicketKey, _Kept] = field(default_factory=dict[TicketKey, _Kept])
    unsent: list[TicketKey] = field(default_factory=list[TicketKey])  # of this turn; some of it may have ended since


class Claims:
    """Keeps claims and renews them."""

    def __init__(self, site: Site, peers: Peers) -> None:
        self._site: Final = site
        self._peers: Final = peers
        self._engine_of: dict[TicketKey, _Engine] = {}
        self._engines: dict[object, _Engine] = {}

    def __len__(self) -> int:
        return len(self._engine_of)

    def __contains__(self, key: TicketKey) -> bool:
        return key in self._engine_of

    def add(self, ticket: Ticket) -> Callable[[], bool]:
        """Claim a request from now on.

        Returns:
            Ends this claim, to be called once. The request stays claimed while others of it have not ended. If this was
            the last one, it says whether the prefill ranks need not keep the request any longer.

        Raises:
            BusyError: If there are too many claims.
        """
        key = ticket.key
        if len(self) >= _MAX_CLAIMS and key not in self._engine_of:
            raise BusyError(f"{len(self)} claims are kept, which is as many as may")
        kept = self.remove(key) or _Kept()  # a ticket of the same request may name other endpoints
        kept.holders += 1
        place = ticket.epoch, ticket.world, ticket.endpoints
        engine = self._engines.get(place)
        if engine is None:
            ranks = [_Rank(endpoint, endpoint) for endpoint in ticket.rank_endpoints]
            engine = self._engines[place] = _Engine(place, bytes.fromhex(ticket.epoch), ranks)
        self._engine_of[key], engine.kept[key] = engine, kept
        if not engine.unsent:
            self._site.loop.call_soon(self._send_new, engine)
        engine.unsent.append(key)
        return partial(self._close_claim, key, kept)

    def remove(self, key: TicketKey) -> _Kept | None:
        """Claim it no longer, whoever did."""
        engine = self._engine_of.pop(key, None)
        if engine is None:
            return None
        kept = engine.kept.pop(key)
        self._forget_if_idle(engine)
        return kept

    def note_fetch(self, key: TicketKey, *, given_up: bool) -> bool:
        """A fetch of it begins, or was given up by its caller. Whether it is claimed."""
        engine = self._engine_of.get(key)
        if engine is not None:
            engine.kept[key].given_up = given_up
        return engine is not None

    def close(self) -> None:
        """Stop renewing, and connect nobody; for shutdown."""
        for engine in self._engines.values():
            for rank in engine.ranks:
                if rank.timer is not None:
                    rank.timer.cancel()
            engine.kept.clear()  # for those that are being connected
        self._engine_of.clear()
        self._engines.clear()

    def _close_claim(self, key: TicketKey, kept: _Kept) -> bool:
        kept.holders -= 1
        engine = self._engine_of.get(key)
        last = not kept.holders and engine is not None and engine.kept[key] is kept
        if last:
            self.remove(key)
        return last and kept.given_up

    def _forget_if_idle(self, engine: _Engine) -> None:
        """If nothing is claimed there, and nothing to come would find it here."""
        if not (engine.kept or engine.unsent or engine.busy):
            self._engines.pop(engine.place, None)

    def _send_new(self, engine: _Engine) -> None:
        unsaid, engine.unsent = engine.unsent, []
        engine.busy += 1
        self._send_batch(engine, unsaid, iter(engine.ranks))

    def _send_batch(self, engine: _Engine, unsaid: list[TicketKey], ranks: Iterator[_Rank]) -> None:
        """Tell some of the ranks, and leave the others to the next turn, also if this one fails."""
        rank, kept = None, [key for key in unsaid if key in engine.kept]
        try:
            for rank in islice(ranks, _RANKS_A_TURN):
                self._send_to(engine, rank, kept)
        finally:
            if rank is not None:
                self._site.loop.call_soon(self._send_batch, engine, unsaid, ranks)
            else:
                engine.busy -= 1
                self._forget_if_idle(engine)

    def _renew(self, engine: _Engine, rank: _Rank) -> None:
        rank.timer = None
        engine.busy -= 1
        self._send_to(engine, rank, list(engine.kept))
        self._forget_if_idle(engine)

    def _send_to(self, engine: _Engine, rank: _Rank, kept: list[TicketKey]) -> None:
        """Tell a prefill rank; one that is not connected (any more) is connected first, by one task."""
        if not kept or rank.connecting:
            return
        link = self._peers.known(rank.at, engine.epoch)
        if link is not None:
            rank.failures = 0
            self._schedule(engine, rank, link.heartbeat)  # its leases are longer than two of its own
            _send(link, kept)
        else:
            rank.connecting = True
            engine.busy += 1
            self._site.tasks.spawn(self._connect(engine, rank), f"kvxfer claim at {rank.endpoint}", spare=True)

    async def _connect(self, engine: _Engine, rank: _Rank) -> None:
        pause = _RETRY_SECONDS
        try:
            link = await self._peers.link(rank.endpoint, engine.epoch)
            rank.at, rank.failures, pause = link.endpoint, 0, link.heartbeat
            _send(link, engine.kept)
        except KvxferError as error:
            if isinstance(error, (IdentityError, MismatchError)):  # whoever answers may well say so again
                pause *= 2 ** min(rank.failures, _SLOWER)
            pause = max(min(pause, self._site.config.heartbeat), error.retry_after or 0.0)
            rank.failures += 1
            if rank.failures == 1:
                _log.warning("claim_not_sent", count=len(engine.kept), endpoint=rank.endpoint, error=str(error))
        finally:
            rank.connecting = False
            engine.busy -= 1
            self._schedule(engine, rank, pause)

    def _schedule(self, engine: _Engine, rank: _Rank, seconds: float) -> None:
        """Tell a rank everything after so many seconds at the latest."""
        if self._engines.get(engine.place) is not engine:  # it was closed meanwhile
            return
        due = self._site.now() + seconds
        if rank.timer is None:
            engine.busy += 1
        elif rank.due <= due:
            return
        else:
            rank.timer.cancel()
        rank.due, rank.timer = due, self._site.call_at(due, partial(self._renew, engine, rank))


def _send(link: Link, kept: Iterable[TicketKey]) -> None:
    refs = [ref for _, ref in kept]
    for first in range(0, len(refs), MAX_TICKETS):
        link.send(wire.Claim(refs[first : first + MAX_TICKETS]))


# --- the role

_GONE: Final = frozenset({Code.TICKET_RELEASED, Code.TICKET_EXPIRED, Code.OFFER_WITHDRAWN})
"""Why a fetch fails whose request is not on offer any more: to claim it on would keep nothing."""
_KNOWN_ENGINES: Final = 1024
_ASK_SECONDS: Final = 0.5
_ASK_SECONDS_MAX: Final = 10.0
_NO_REF: Final = wire.TicketRef("", 0, b"")


class Decode:
    """Everything that this rank fetches from peers."""

    def __init__(self, site: Site, peers: Peers) -> None:
        self.peers: Final = peers
        self._site: Final = site
        self.numbers: Final = count(1)
        self.prefix: Final = f"{site.key.incarnation.hex()[:8]}-"  # of names of transfers
        # by epoch, and where its ranks are; forgotten when a link is opened or lost
        self.engines: Final[dict[tuple[str, tuple[str, ...]], PrefillEngine]] = {}
        self._ending: list[tuple[Fetch, Tally, TransferStats]] = []  # have succeeded, and are to be counted
        self.fetches: Final[set[Fetch]] = set()  # what has not ended, or is in doubt
        self._of_ticket: dict[TicketKey, set[Fetch]] = {}  # the same
        self._retries: dict[TicketKey, tuple[asyncio.TimerHandle, Callable[[], None]]] = {}  # what failed, for a retry
        self._later: dict[TicketKey, asyncio.Task[None]] = {}  # what tells ranks to free it that are being connected
        self.incoming: Final[dict[int, Receiver]] = {}  # what takes parts of them, by number
        self._asking: set[int] = set()  # of which of these peers are asked what became of them
        self.claims: Final = Claims(site, peers)

    # --- what callers do

    def start(
        self,
        ticket: Ticket,
        blocks: Blocks,
        *,
        tokens: range,
        after: Any = None,
        timeout: float | None = None,
        keep: bool = False,
    ) -> Progress:
        """Begin a fetch. Everything that can be checked here is checked before anything is sent.

        Raises:
            UsageError: See `Worker.fetch`.
        """
        site, key = self._site, ticket.key
        if len(self.fetches) >= site.config.max_transfers:
            raise BusyError(f"{len(self.fetches)} fetches are under way; max_transfers is {site.config.max_transfers}")
        spans, written = wanted_blocks(blocks, site.geometry, tokens)
        event = after if after is READY else as_event(after, site.geometry)
        limit, keep = given_seconds(timeout, math.inf), bool(keep)  # whatever says so, it is asked here
        number, now = next(self.numbers), site.now()
        ident = f"{self.prefix}{number}"
        site.custody.hold(ident, written)
        fetch = Fetch(
            ident,
            ticket.request,
            site.loop,
            site=site,
            role=self,
            number=number,
            ticket=ticket,
            spans=spans,
            tokens=tokens,
            after=event,
            keep=keep,
            written=written,
            began=now,
            deadline=now + limit,
            key=key,
            trace=site.metrics.fetch_began(ident, (ticket.request, ticket.attempt), now),
        )
        self.claims.note_fetch(key, given_up=False)
        if same := self._of_ticket.get(key):
            for older in same:
                older.superseded, older.unwanted = True, False
            same.add(fetch)
        else:
            self._of_ticket[key] = {fetch}
        if key in self._later:
            self._later.pop(key).cancel()
        self._close_retry_window(key)
        self.fetches.add(fetch)
        fetch.begin()
        return fetch

    def claim(self, ticket: Ticket) -> Claim:
        """Keep a request's lease until it is fetched, declined, or the claim is closed.

        Raises:
            BusyError: If there are too many claims.
        """
        let_go = self.claims.add(ticket)

        def close() -> None:
            if let_go():
                self.release_request(ticket)
            for fetch in list(self._of_ticket.get(ticket.key, ())):
                fetch.release_idle()

        return Claim(ticket, close, self._site.loop)

    async def decline(self, ticket: Ticket) -> None:
        """Tell every prefill rank that no fetch will come; one that is being read is told when that has ended.

        Raises:
            PeerError: If a rank could not be told; it frees its blocks when its lease has run out.
        """
        self.claims.remove(ticket.key)
        self._close_retry_window(ticket.key)
        read = self.read_yet(ticket.key)
        others = self._send_release(ticket, spared=read)
        links = await self._connect(ticket, others)
        for link in links:
            if isinstance(link, Link) and link.peer.identity.incarnation not in read:
                link.send(wire.Release(ticket.ref(), Code.CANCELLED))
        for link in links:
            if isinstance(link, BaseException):
                raise link

    # --- what fetches say

    def known_links(self, ticket: Ticket) -> list[Link | None]:
        """Links to all ranks of its engine; None for one that is not connected."""
        return list(map(self.peers.known, ticket.rank_endpoints, repeat(bytes.fromhex(ticket.epoch))))

    def engine(self, ticket: Ticket) -> PrefillEngine | None:
        """What its ranks send, if all are connected, and it is known what each of them has."""
        found = self.engines.get((ticket.epoch, ticket.rank_endpoints))
        if found is not None:
            return found
        links, plans = self.known_links(ticket), self._site.plans
        peers = [link.peer for link in links if link is not None]
        known = len(peers) == len(links) and not plans.shares_rows(peers)
        return self.make_engine(ticket, links, plans.shares(peers, rank=self._site.config.rank)) if known else None

    def make_engine(
        self, ticket: Ticket, links: Sequence[Link | None], pairs: Sequence[PairPlan | None]
    ) -> PrefillEngine:
        """The same of those that could be reached, and what each of these has that this rank needs."""
        site, parts = self._site, list[Part]()
        for link, pair in zip(links, pairs, strict=True):
            if link is not None and pair is not None:
                peer, wanted = link.peer, list(map(selection_to_wire, pair.selections))
                routes = site.routes(peer, trusted=link.trusted, sending=False) if link.is_open else []
                asks = wire.Fetch(0, _NO_REF, wanted, [], 0, 0, routes, site.place_bytes, 0)
                parts.append(Part(link, pair, asks))
        there, busy = list(filter(None, links)), [part.link for part in parts]
        engine = PrefillEngine(there, parts, [link for link in there if link not in busy])
        if len(there) == len(links) and all(link.is_open for link in there):
            if len(self.engines) >= _KNOWN_ENGINES:
                self.engines.clear()
            self.engines[ticket.epoch, ticket.rank_endpoints] = engine
        return engine

    def on_success(self, fetch: Fetch, tally: Tally, stats: TransferStats) -> None:
        """Every byte of a fetch is there, and nothing of it in doubt: it is forgotten, and needs no claim."""
        for receiver in fetch.receivers:
            del self.incoming[receiver.protocol.transfer]
        fetch.receivers.clear()  # which know the fetch: without a cycle, all of it is freed at once
        self._forget(fetch)
        # those that go on by now: one that begins in this turn comes too late
        fetch.superseded = fetch.key in self._of_ticket and self._leave_to_another(fetch.key)
        if not fetch.superseded:
            self.claims.remove(fetch.key)
        if not self._ending:  # when whoever awaits it has gone on, perhaps with another one
            self._site.loop.call_soon(self.finish_successes)
        self._ending.append((fetch, tally, stats))

    def finish_successes(self) -> None:
        """Tell prefill ranks of what has succeeded, and count it: before counters are read, and soon at any rate."""
        try:
            while self._ending:
                fetch, tally, stats = self._ending.pop(0)
                others = fetch.superseded or fetch.key in self._of_ticket
                fetch.finish_success(tally, stats, self._told_later(fetch) if others else ())
        finally:  # of one that a log handler or an observer failed for the others hear nothing
            if self._ending:
                self._site.loop.call_soon(self.finish_successes)

    def read_yet(self, key: TicketKey) -> set[bytes]:
        """Incarnations that are being read for a request that nobody needs: each is told so when that has ended."""
        read = set[bytes]()
        for fetch in self._of_ticket.get(key, ()):
            for receiver in fetch.receivers:
                if receiver.reading:
                    fetch.unwanted = True
                    read.add(receiver.peer.identity.incarnation)
        return read

    def release_request(self, ticket: Ticket, links: Iterable[Link] = ()) -> None:
        """A fetch was given up: unless the request is claimed, or fetched again, its prefill ranks free its blocks.

        Nobody waits for that, or is connected for it. A rank whose part is in doubt is told when that has ended.
        """
        same = self._of_ticket.get(ticket.key, ())
        if self._leave_to_another(ticket.key) or any(one.keep and not (one.done or one.superseded) for one in same):
            return  # it is that one's business, or kept for a retry of that one
        if self.claims.note_fetch(ticket.key, given_up=True):
            return  # whoever closes the claim comes here
        for left in same:  # what has not ended yet, or is in doubt, comes here when it has
            left.unwanted = True
        if not all(fetch.done for fetch in same):
            return
        doubtful = {part.peer.identity.incarnation for fetch in same for part in fetch.receivers if part.in_doubt}
        others = self._send_release(ticket, links, doubtful)
        soon = [one for one in others if one in self.peers.connecting]  # in an order that a seed repeats
        if soon and ticket.key not in self._later:  # once: a rank may be about to be there for good
            later = self._release_when_connected(ticket, soon)
            self._later[ticket.key] = self._site.tasks.spawn(later, f"kvxfer release {ticket.request}", spare=True)

    def on_failure(self, fetch: Fetch) -> None:
        """A fetch ended in an error: unless somebody tries again soon, nobody needs its request."""
        site, ticket, links = self._site, fetch.ticket, tuple(fetch.links)
        if self._leave_to_another(ticket.key):
            return

        def over() -> None:
            self._retries.pop(ticket.key, None)
            self.release_request(ticket, links)

        self._close_retry_window(ticket.key)
        self._retries[ticket.key] = site.call_at(site.now() + RETRY_WINDOW_SECONDS, over), over

    def on_end(self, fetch: Fetch) -> None:
        """A fetch is over; forget it once it leaves nothing in doubt."""
        report, receivers = fetch.report, fetch.receivers
        if report is not None and report.code in _GONE:
            self.claims.remove(fetch.key)
        if not fetch.doubtful:
            self._forget(fetch)
            fetch.on_doubt_ended()
            for receiver in receivers[:]:
                if not receiver.owes_an_answer:
                    self.incoming.pop(receiver.protocol.transfer, None)
                    receiver.exposure.end()
                    receiver.grants.release()
                    receivers.remove(receiver)  # which knows the fetch: without a cycle, all of it is freed at once

    def recover(self, receiver: Receiver) -> None:
        """Something is in doubt: seek evidence, and ask its peer, until either has ended that."""
        receiver.exposure.seek()
        number = receiver.protocol.transfer
        if number not in self._asking and not self._site.closing.done():
            self._asking.add(number)
            task = self._site.tasks.spawn(self._ask(receiver), f"kvxfer ask about {number}", spare=True)
            task.add_done_callback(lambda _: self._asking.discard(number))

    # --- messages

    def on_message(self, link: Link, message: wire.Message) -> None:
        """Take a message of a prefill rank."""
        if not isinstance(message, (wire.Accept, wire.Refuse, wire.Ready, wire.Arrived, wire.Sums, wire.KvAgentResult)):
            return
        incoming = self.incoming.get(message.transfer)
        if incoming is None:
            if isinstance(message, (wire.Arrived, wire.KvAgentResult)):
                self._site.metrics.results_dropped["stale"] += 1
            return
        if incoming.link is not link and incoming.peer.identity.incarnation != link.peer.identity.incarnation:
            raise ProtocolError(f"transfer {message.transfer} belongs to another peer", peer=link.peer.name)
        match message:
            case wire.KvAgentResult():
                incoming.on_result(message)
            case wire.Arrived():
                incoming.on_arrived(message)
            case wire.Accept():
                incoming.on_accept(message)
            case wire.Refuse():
                incoming.on_refuse(message)
            case wire.Ready():
                incoming.on_ready(message)
            case wire.Sums():
                incoming.on_sums(message)

    def on_link_opened(self, link: Link) -> None:
        """A link to a prefill rank is open: ask about what was lost with the last one."""
        if self._site.config.sums_every:
            link.send(wire.Check(self._site.config.sums_every))
            self._site.warm_sums(link.peer, sending=False)
        for receiver in list(self.incoming.values()):
            if receiver.peer.identity.incarnation == link.peer.identity.incarnation and receiver.is_lost:
                receiver.resume(link)

    def on_link_lost(self, link: Link, error: KvxferError) -> None:
        """A link is gone: every transfer on it fails."""
        failure = Failure(Status.FAILED, Code.PEER_LOST, str(error))
        for incoming in list(self.incoming.values()):
            if incoming.link is link and not incoming.protocol.ended:
                incoming.on_link_lost(failure)

    def on_agent_renewed(self, link: Link) -> None:
        """A prefill rank has made its agent anew."""
        for receiver in list(self.incoming.values()):
            if receiver.peer.identity.incarnation == link.peer.identity.incarnation:
                receiver.exposure.on_renewals(link.renewals)

    def abandon_all(self) -> None:
        """Wait for no peer any longer; for shutdown, after `cancel_all`."""
        for fetch in list(self.fetches):
            if not fetch.done:
                fetch.abandon()

    def close(self) -> None:
        """Say of what is in doubt that it stays so; for shutdown, after `abandon_all`."""
        for fetch in self.fetches:
            fetch.leave_in_doubt()

    def outcomes(self) -> "list[asyncio.Future[Any]]":
        """Resolve as fetches end; for the worker's drain."""
        return [fetch.outcome for fetch in self.fetches if not fetch.done]

    def cancel_all(self) -> None:
        """Give up every fetch and claim; for shutdown."""
        self.claims.close()
        for timer, over in list(self._retries.values()):  # nobody tries again here
            timer.cancel()
            over()
        for fetch in list(self.fetches):
            if not fetch.done:
                fetch.close()
        if ends := self.outcomes():  # the worker waits for its tasks, bounded; those of fetches may outlast their ends
            self._site.tasks.spawn(asyncio.wait(ends), "kvxfer end fetches")

    @property
    def exposed(self) -> list[Stop]:
        """What stops each transfer whose grant a prefill rank that answers may be writing, by way of the agent."""
        return [
            one.stop
            for one in self.incoming.values()
            if one.protocol.exposed and one.route is not Route.MAPPED and not (one.protocol.ended or one.is_lost)
        ]

    @property
    def posted(self) -> list[Stop]:
        """What stops each that waits for reads of ours."""
        return [incoming.stop for incoming in self.incoming.values() if incoming.reading]

    # --- inside

    async def _ask(self, receiver: Receiver) -> None:
        """Reach the same incarnation again, so that it can say what became of its writes."""
        backoff = Backoff(self._site.runtime.token, least=_ASK_SECONDS, most=_ASK_SECONDS_MAX)
        before = receiver.peer
        while not receiver.exposure.ended:
            if receiver.is_lost:
                try:
                    link = await self.peers.link(receiver.link.endpoint, None)
                except KvxferError:
                    link = None
                if link is not None and link.is_open:
                    if link.peer.identity.incarnation != before.identity.incarnation:  # it knows nothing of all this
                        _log.warning("peer_replaced", peer=before.name, incarnation=link.peer.name)
                        if receiver.finished:
                            receiver.exposure.on_evidence("nobody is left who waits to hear that nothing is read")
                        return
                    # on the stream on which it was asked already, the answer will come or will not
                    if link is not receiver.link and receiver.is_lost:
                        receiver.resume(link)
            await asyncio.sleep(backoff.wait())

    def _forget(self, fetch: Fetch) -> None:
        self.fetches.discard(fetch)
        if (same := self._of_ticket.get(fetch.key)) is not None:
            same.discard(fetch)
            if not same:
                del self._of_ticket[fetch.key]

    def _leave_to_another(self, key: TicketKey) -> bool:
        """Leave what becomes of a request to its fetches that go on, old or new; whether there is one."""
        going_on = [fetch for fetch in self._of_ticket.get(key, ()) if fetch.going_on]
        for fetch in going_on:
            fetch.superseded = False
        return bool(going_on)

    def _told_later(self, fetch: Fetch) -> Collection[bytes]:
        """Incarnations to which its success is told later: those that its request is still fetched, or read, from."""
        if fetch.superseded:  # `Release` would end that
            return {link.peer.identity.incarnation for link in fetch.links}
        return self.read_yet(fetch.key)

    def _close_retry_window(self, key: TicketKey) -> None:
        timer, _ = self._retries.pop(key, (None, None))
        if timer is not None:
            timer.cancel()

    async def _release_when_connected(self, ticket: Ticket, endpoints: Iterable[str]) -> None:
        """The same once these are connected, or could not be."""
        await self._connect(ticket, endpoints)
        self.release_request(ticket)
        del self._later[ticket.key]

    def _send_release(self, ticket: Ticket, links: Iterable[Link] = (), spared: Container[bytes] = ()) -> list[str]:
        """Tell every prefill rank that is connected that no fetch will come. At once: the worker may be about to close.

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
