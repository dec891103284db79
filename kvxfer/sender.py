"""The prefill role of a worker: takes `Fetch`, `Claim`, `Release` and what follows, and runs the transfers."""

import asyncio
from functools import partial
from typing import Final

from kvxfer.errors import Code, ProtocolError
from kvxfer.gauging import Gauging
from kvxfer.link import Link
from kvxfer.offerbook import TOO_MANY_ENGINES, OfferBook
from kvxfer.offers import Offer, Withdrawn
from kvxfer.outgoing import RETRY_MS, Outgoing
from kvxfer.protocol.messages import (
    Abandon,
    Cancel,
    Check,
    Claim,
    Fetch,
    KvAgentResult,
    Landed,
    Message,
    Probe,
    Refuse,
    Release,
    Reserve,
    Status,
    TicketRef,
)
from kvxfer.protocol.sending import Failure, SendState, build_result
from kvxfer.quota import Quota
from kvxfer.site import Callback, Site
from kvxfer.telemetry import logger

__all__ = ["Sender"]

_log: Final = logger("kvxfer.send")
_CANCELLED: Final = "cancelled by the decode rank"
_UNSURE: Final = 16
"""Measurements that are left in doubt at most: with so many, no lane is measured any more."""


class Sender:
    """Everything that peers fetch from this rank.

    Args:
        site: The worker.
    """

    def __init__(self, site: Site) -> None:
        self.book: Final = OfferBook(site)
        self._site: Final = site
        self._transfers: dict[tuple[bytes, int], Outgoing] = {}
        self._places: Final = Quota(site.config.max_transfers)  # one a transfer, until nothing of it is in doubt
        self._doubtful: dict[tuple[bytes, int], Outgoing] = {}  # over, but something may still move
        self._watched: dict[tuple[bytes, int], Callback] = {}  # of those, what ends the watch over the peer's process
        self._checks: dict[Link, int] = {}  # of one chunk in how many sums are wanted
        self._gaugings: dict[tuple[bytes, int], Gauging] = {}  # the lane that is being measured
        self._unsure: dict[tuple[bytes, int], Gauging] = {}  # over, but a write may still be under way
        self._here: dict[bytes, Link] = {}  # by incarnation of the decode rank, the link to it
        site.send_desk.crowded = self._make_room

    def __len__(self) -> int:
        return len(self._transfers)

    def handle(self, link: Link, message: Message) -> None:
        """Take a message of a decode rank."""
        match message:
            case Reserve():  # memory for chunks
                if (outgoing := self._moved(link, message.transfer)) is not None:
                    outgoing.reserve(message)
            case Landed():  # chunks were read
                if (outgoing := self._moved(link, message.transfer)) is not None:
                    outgoing.landed(message)
            case Fetch():
                self.fetch(link, message)
            case Cancel():
                self.cancel(link, message)
            case Abandon():
                self.abandon(link, message)
            case Claim():
                self.claim(link, message)
            case Release():
                self.release(link, message)
            case Probe():
                self.probe(link, message)
            case Check():
                self.check(link, message)
            case _:
                pass

    def fetch(self, link: Link, message: Fetch) -> None:
        """A decode rank asks for a part of a request."""
        key = (link.peer.identity.incarnation, message.transfer)
        if key in self._transfers or key in self._gaugings or key in self._unsure:
            raise ProtocolError(f"transfer {message.transfer} is under way already", peer=link.peer.name)
        offer_key = (message.ticket.request, message.ticket.attempt)
        refusal, found = self._refusal(message.ticket), self.book.find(offer_key)
        if refusal is None and found is None and self._site.draining:
            refusal = Code.DRAINING
        elif refusal is None and isinstance(found, Code):
            refusal = found
        elif refusal is None and not self._places.take(key[0]):
            refusal = Code.TOO_MANY
        if refusal is not None:
            self._refuse(link, message.transfer, refusal)
            return
        self._site.heard(link.peer, fenced=message.fenced)
        outgoing = Outgoing(self._site, link, message, self._ended, sums_every=self._checks.get(link, 0))
        self._transfers[key] = outgoing
        if isinstance(found, Offer):
            self._attach(outgoing, found)
        elif not self.book.park(offer_key, outgoing):
            outgoing.refuse(
                Code.TOO_MANY,
                f"as many fetches wait for their offers as may, in all or of one peer "
                f"(max_parked={self._site.config.max_parked})",
            )
        outgoing.void_ahead()

    def cancel(self, link: Link, message: Cancel) -> None:
        """The decode rank gives up, or asks after a lost session what became of a transfer."""
        key = (link.peer.identity.incarnation, message.transfer)
        failure = Failure(Status.CANCELLED, message.code, _CANCELLED)
        if message.code is Code.INTEGRITY:
            self._site.metrics.chunk_checked("reported")
            _log.warning("damage_reported", peer=link.peer.name, transfer=message.transfer)
        if (gauging := self._gaugings.get(key) or self._unsure.get(key)) is not None:
            gauging.cancelled(link, failure)
            return
        if (outgoing := self._transfers.get(key)) is not None:
            outgoing.link = link
            outgoing.cancelled(failure)
            return
        if (outgoing := self._doubtful.get(key)) is not None:
            outgoing.unread_at_last()
            if outgoing.in_doubt:
                link.send(build_result(message.transfer, Status.IN_DOUBT, last=True, failure=outgoing.machine.failure))
                return
        link.send(_terminal(message.transfer, failure))

    def abandon(self, link: Link, message: Abandon) -> None:
        """The decode rank gives up, and is reading (`pull`): `Cancel` follows. What has ended has been answered."""
        outgoing = self._transfers.get((link.peer.identity.incarnation, message.transfer))
        if outgoing is not None:
            outgoing.link = link
            outgoing.stop(Failure(Status.CANCELLED, message.code, _CANCELLED))

    def claim(self, link: Link, message: Claim) -> None:
        """Requests still wait for a place at the decode rank."""
        who = link.peer.identity
        for ref in message.tickets:
            if self._refusal(ref) is not None:
                continue
            key = (ref.request, ref.attempt)
            found = self.book.find(key)
            if isinstance(found, Offer):
                self.book.renew(found, who.epoch, who.world)
            elif found is None:
                self.book.claim_early(key, who)

    def release(self, link: Link, message: Release) -> None:
        """A decode rank is done with a request."""
        who = link.peer.identity
        if self._refusal(message.ticket) is None:
            self.book.release((message.ticket.request, message.ticket.attempt), who)

    def probe(self, link: Link, message: Probe) -> None:
        """A decode rank lends memory, so that the lane to it can be measured (if nothing else moves there now) or seen.

        One lane at a time, and none over which a write of the last measurement may still be under way. Only trusted
        peers: for others the choice that is measured for is not open.
        """
        who = link.peer.identity
        key = (who.incarnation, message.transfer)
        if key in self._transfers or key in self._gaugings or key in self._unsure:
            raise ProtocolError(f"transfer {message.transfer} is under way already", peer=link.peer.name)
        moving = (to for to, outgoing in self._transfers.items() if outgoing.machine.state is not SendState.PARKED)
        timed = not message.nonce
        busy = bool(self._gaugings) or (timed and any(incarnation == who.incarnation for incarnation, _ in moving))
        busy |= len(self._unsure) >= _UNSURE or any(incarnation == who.incarnation for incarnation, _ in self._unsure)
        if busy or self._site.draining or not link.trusted or self._site.sending is None:
            failure = Failure(Status.CANCELLED, Code.TOO_MANY, "the lane is not measured now")
            link.send(_terminal(message.transfer, failure))
            return
        gauging = self._gaugings[key] = Gauging(self._site, link, message, self._gauged)
        gauging.begin()

    def opened(self, link: Link) -> None:
        """A decode rank is there (again), and may still read what it was announced before."""
        incarnation = link.peer.identity.incarnation
        self._here[incarnation] = link
        for (reader, _), outgoing in self._doubtful.items():
            if reader == incarnation:
                outgoing.help_to_read()

    def check(self, link: Link, message: Check) -> None:
        """A decode rank compares what it fetches on this link from now on with what is here."""
        if link not in self._checks:
            self._site.warm_sums(link.peer, sending=True)
        self._checks[link] = message.every

    def lost(self, link: Link) -> None:
        """A session is gone: nothing new is posted for it. The transfers stay known until they have ended."""
        incarnation = link.peer.identity.incarnation
        if self._here.get(incarnation) is link:
            del self._here[incarnation]
        self._checks.pop(link, None)
        failure = Failure(Status.CANCELLED, Code.PEER_LOST, "the session was lost")
        for gauging in self._gaugings.values():
            if gauging.link is link:
                gauging.stop(failure)
        for outgoing in list(self._transfers.values()):
            if outgoing.link is link:
                outgoing.stop(failure)

    def refuse_parked(self) -> None:
        """No new offer will come: whoever waits for one had better go elsewhere at once."""
        for outgoing in list(self._transfers.values()):
            if outgoing.offer is None:
                outgoing.refuse(Code.DRAINING, _REASONS[Code.DRAINING])

    def withdraw_all(self) -> None:
        """Take every offer back; for shutdown."""
        failure = Failure(Status.CANCELLED, Code.OFFER_WITHDRAWN, "the prefill worker is closing")
        for offer in self.book.offers:
            offer.end(Withdrawn(), failure)
        for gauging in self._gaugings.values():
            gauging.stop(failure)
        self.refuse_parked()
        ends = [offer.wait_end() for offer in self.book.offers]
        if ends:  # the worker waits for its tasks, bounded; peers that read our blocks are no tasks of ours
            self._site.tasks.spawn(asyncio.wait(ends), "kvxfer withdraw all")

    @property
    def exposed(self) -> bool:
        """Whether a decode rank that answers may be reading what it was told of (`pull`)."""
        return any(outgoing.machine.being_read for outgoing in self._transfers.values())

    def take_back(self, failure: Failure) -> None:
        """Stop what is being read."""
        for outgoing in list(self._transfers.values()):
            if outgoing.machine.being_read:
                outgoing.stop(failure)

    # --- inside

    def _attach(self, outgoing: Outgoing, offer: Offer) -> None:
        who = outgoing.peer.identity
        if self.book.admits(offer, who.epoch):
            self.book.bind(offer, who.epoch, who.world)
            outgoing.attach(offer)
        else:
            outgoing.refuse(Code.TOO_MANY, TOO_MANY_ENGINES)

    def _refusal(self, ref: TicketRef) -> Code | None:
        """Why a ticket is not honoured here, or None."""
        site = self._site
        if site.issuer is None:
            return Code.TICKET_UNKNOWN
        return None if site.issuer.verify(ref) else Code.TICKET_FORGED

    def _refuse(self, link: Link, transfer: int, code: Code) -> None:
        self._site.metrics.refused(code, by_peer=False)
        link.send(Refuse(transfer, code, _REASONS.get(code, code.name.lower()), RETRY_MS.get(code, 0)))

    def _moved(self, link: Link, transfer: int) -> Outgoing | None:
        """A transfer that its decode rank moves on, which renews the offer's lease.

        None for one that has just ended here: what is said to it is answered by its result, which is on its way.
        """
        outgoing = self._transfers.get((link.peer.identity.incarnation, transfer))
        if outgoing is not None and outgoing.offer is not None:
            self.book.touched(outgoing.offer)
        return outgoing

    def _make_room(self) -> None:
        """A chunk waits for memory to gather into."""
        for gauging in self._gaugings.values():
            gauging.stop(Failure(Status.CANCELLED, Code.TOO_MANY, "the memory is needed"))

    def _gauged(self, gauging: Gauging) -> None:
        key = (gauging.peer.identity.incarnation, gauging.transfer)
        del self._gaugings[key]
        if gauging.in_doubt:
            self._unsure[key] = gauging
            self._site.processes.when_gone(gauging.peer, partial(self._forget_gauging, key))

    def _forget_gauging(self, key: tuple[bytes, int]) -> None:
        """Nobody is left who could ask what became of it."""
        self._unsure.pop(key, None)

    def _ended(self, outgoing: Outgoing) -> None:
        key = (outgoing.peer.identity.incarnation, outgoing.machine.transfer)
        if outgoing.offer is None:
            ticket = outgoing.machine.fetch.ticket
            self.book.unpark((ticket.request, ticket.attempt), outgoing)
        if outgoing.in_doubt:
            del self._transfers[key]
            self._doubtful[key] = outgoing
            self._watched[key] = self._site.processes.when_gone(outgoing.peer, partial(self._forget, key))
            if key[0] in self._here:
                outgoing.help_to_read()
        elif self._transfers.pop(key, None) is not None:
            self._places.give(key[0])
        else:
            self._forget(key)

    def _forget(self, key: tuple[bytes, int]) -> None:
        """Nothing of a transfer is in doubt any more, or nobody is left who could ask what became of it."""
        if self._doubtful.pop(key, None) is not None:
            self._watched.pop(key)()
            self._places.give(key[0])


_REASONS: Final = {
    Code.TICKET_UNKNOWN: "this rank has not joined its engine yet",
    Code.TICKET_FORGED: "this engine did not issue the ticket in its present epoch",
    Code.TICKET_EXPIRED: "the offer's lease ran out",
    Code.TICKET_RELEASED: "the request was released already",
    Code.OFFER_WITHDRAWN: "the offer was withdrawn",
    Code.TOO_MANY: "the prefill rank has as many transfers as it takes, in all or of one peer (max_transfers)",
    Code.DRAINING: "the prefill rank is draining",
}


def _terminal(transfer: int, failure: Failure) -> KvAgentResult:
    """The answer for a transfer that is not known (any more): nothing of it is posted, and nothing will be."""
    return build_result(transfer, failure.status, last=True, failure=failure)
