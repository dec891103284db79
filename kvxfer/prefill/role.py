"""The prefill role of a worker: takes `Fetch`, `Claim`, `Release` and what follows, and runs the transfers."""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvxfer.errors import Code, ProtocolError
from kvxfer.mapped.host import elsewhere
from kvxfer.peers.link import Link
from kvxfer.prefill.offers import Entry, OfferBook
from kvxfer.prefill.sender import RETRY_MS, Sender
from kvxfer.protocol import messages as wire
from kvxfer.protocol.messages import Route, Status
from kvxfer.protocol.transfer import Failure, Sending, build_result
from kvxfer.runtime import Callback, no_op
from kvxfer.safety.doubt import Stop
from kvxfer.site import Quota, Site
from kvxfer.telemetry import logger

__all__ = ["Doubt", "Doubts", "Prefill"]

# --- what is over and may still move
#
# Forgotten it is
#
# - when what was given up has ended after all;
# - when the peer's process has ended;
# - when the peer has made its agent anew, so that nothing lands any more which was on its way to the old one, and
#   either it is on another host or our own agent was made anew too, which writes by itself on this one;
# - on `pull`, when the peer has said that it reads nothing.
#
# Until then it keeps its place among the transfers. A peer whose process cannot be watched may never come back: when it
# disconnects its places are given back, and of writes in doubt only the numbers of their transfers are kept.

_MOST: Final = 1 << 14
"""Numbers that are kept without a place at most, of all peers; beyond them places are kept too."""


@dataclass(slots=True, eq=False)
class Doubt:
    """A transfer of which something may still move."""

    ended: Sender  # which
    severed: bool  # whether what may move has left this side, and is on its way to the agent that the peer had then
    placed: bool = True  # whether it has a place
    # ends the watch over the peer's process, unless that is not known; a later session may know it
    unwatch: Callback = no_op
    withdraw: Callback = no_op  # says that it needs no new agent


class Doubts:
    """The books of them."""

    def __init__(self, site: Site, places: Quota) -> None:
        self._site: Final = site
        self._places: Final = places
        self._doubts: dict[bytes, dict[int, Doubt]] = {}
        self._unplaced = 0

    def __len__(self) -> int:
        return sum(map(len, self._doubts.values()))

    def add(self, transfer: int, ended: Sender) -> None:
        """Something has ended in doubt, of a peer that is connected."""
        peer = ended.link.peer
        who, doubt = peer.identity.incarnation, Doubt(ended, elsewhere(peer.body.host))
        if ended.severed:
            self.sever(doubt)
        self._doubts.setdefault(who, {})[transfer] = doubt
        doubt.unwatch = self._site.processes.when_ended(peer, partial(self.forget, who, transfer))

    def sever(self, doubt: Doubt) -> None:
        """What may move has left this side: let a peer on this host hear that only its own agent is left."""
        if not doubt.severed:
            doubt.severed, doubt.withdraw = True, self._site.rebuilds.request(urgent=False)

    def find(self, incarnation: bytes, transfer: int) -> Doubt | None:
        """What is remembered of a transfer."""
        doubts = self._doubts.get(incarnation)
        return None if doubts is None else doubts.get(transfer)

    def of_peer(self, incarnation: bytes) -> list[Doubt]:
        """All of a peer's."""
        return list(self._doubts.get(incarnation, {}).values())

    def on_link_lost(self, incarnation: bytes) -> None:
        """A peer is not connected any more."""
        for doubt in self.of_peer(incarnation):
            bound = doubt.unwatch is not no_op or doubt.ended.is_pulled
            if doubt.placed and not bound and self._unplaced < _MOST:
                doubt.placed = False
                self._unplaced += 1
                self._places.give(incarnation)

    def on_agent_renewed(self, link: Link) -> dict[int, Doubt]:
        """By number, what is over since a peer has made its agent anew as often as it says on this link."""
        who = link.peer.identity.incarnation
        over = {
            transfer: doubt
            for transfer, doubt in self._doubts.get(who, {}).items()
            if doubt.severed and not doubt.ended.is_pulled and doubt.ended.renewals < link.renewals
        }
        for transfer in over:
            self.forget(who, transfer)
        return over

    def forget(self, incarnation: bytes, transfer: int) -> None:
        """Nothing of a transfer is in doubt any more, or nobody is left who could ask. Harmless if it is not known."""
        doubts = self._doubts.get(incarnation, {})
        doubt = doubts.pop(transfer, None)
        if doubt is None:
            return
        if not doubts:
            del self._doubts[incarnation]
        doubt.ended.forget()
        doubt.unwatch()
        doubt.withdraw()
        if doubt.placed:
            self._places.give(incarnation)
        else:
            self._unplaced -= 1


# --- the role

_log: Final = logger("kvxfer.send")
_CANCELLED: Final = "cancelled by the decode rank"
_AT_ONCE: Final = 2
"""Transfers that begin in one turn of the loop: to plan one takes some tenths of a millisecond."""
_FEW_BYTES: Final = 256 << 10
"""Of lists in a fetch, which are kept as long as it is: those of 65,536 blocks. Each may have so much."""
_MANY_BYTES: Final = 512 << 20
"""Of lists in all fetches, beyond which none with more than a few is taken: a peer can send 16 MiB of them in each."""
_POSTED: Final = frozenset({Route.STAGED, Route.DIRECT})
"""Routes on which the transport writes what this rank sends."""


class Prefill:
    """Everything that peers fetch from this rank."""

    def __init__(self, site: Site) -> None:
        self.book: Final = OfferBook(site)
        self._site: Final = site
        self.transfers: Final[dict[tuple[bytes, int], Sender]] = {}  # what has not ended, by decode rank and number
        self.places: Final = Quota(site.config.max_transfers)  # one a transfer, and one of what is in doubt
        self.doubts: Final = Doubts(site, self.places)  # what is over here and may still move
        self._checks: dict[Link, int] = {}  # of one chunk in how many sums are wanted
        self._starting = 0  # transfers in the next turn of the loop
        self._waiting: Final[dict[Sender, None]] = {}  # those that begin in a later one, unless they end before
        self._links: dict[bytes, Link] = {}  # by incarnation of the decode rank, the link to it

    def on_message(self, link: Link, message: wire.Message) -> None:
        """Take a message of a decode rank."""
        match message:
            case wire.Reserve():  # memory for chunks
                if (sender := self._sender_of(link, message.transfer)) is not None:
                    sender.on_reserve(message)
            case wire.Read():  # chunks were read
                if (sender := self._sender_of(link, message.transfer)) is not None:
                    sender.on_read(message)
            case wire.Fetch():
                self.on_fetch(link, message)
            case wire.Cancel():
                self.on_cancel(link, message)
            case wire.Abandon():
                self.on_abandon(link, message)
            case wire.Claim():
                self.on_claim(link, message)
            case wire.Release():
                self.on_release(link, message)
            case wire.Check():
                self.on_check(link, message)
            case _:
                pass

    def on_fetch(self, link: Link, message: wire.Fetch) -> None:
        """A decode rank asks for a part of a request.

        Raises:
            ProtocolError: If its number stands for something else that is under way, or in doubt.
        """
        key = (link.peer.identity.incarnation, message.transfer)
        if key in self.transfers or self.doubts.find(*key) is not None:
            raise ProtocolError(f"transfer {message.transfer} is under way already", peer=link.peer.name)
        site, offer_key = self._site, (message.ticket.request, message.ticket.attempt)
        found, refusal = self.book.find(offer_key), None
        listed = 512 * len(message.selections)  # they have names, too
        for span in message.spans:
            listed += len(span.ids)
        for selection in message.selections:
            listed += len(selection.layers)
        if site.issuer is None:
            refusal = Code.TICKET_UNKNOWN
        elif not site.issuer.verify(message.ticket):
            refusal = Code.TICKET_FORGED
        elif isinstance(found, Code):
            refusal = found
        elif found is None and site.draining:
            refusal = Code.DRAINING
        elif (
            listed > _FEW_BYTES and listed + sum(one.listed for one in self.transfers.values()) > _MANY_BYTES
        ) or not self.places.take(key[0]):
            refusal = Code.TOO_MANY
        if refusal is not None:
            site.metrics.refusals_sent[refusal.name.lower()] += 1
            link.send(wire.Refuse(message.transfer, refusal, _REASONS[refusal], RETRY_MS.get(refusal, 0)))
            return
        site.fenced[link.peer.identity.incarnation] = message.fenced
        sums_every = self._checks.get(link, 0)
        sender = self.transfers[key] = Sender(site, link, link.peer, Sending(message), self._on_end, sums_every, listed)
        self._waiting[sender] = None
        if isinstance(found, Entry):
            self.book.attach(found, sender)
        elif not self.book.park(offer_key, sender):
            sender.refuse(
                Code.TOO_MANY,
                f"as many fetches wait for their offers as may, in all or of one peer "
                f"(max_transfers={site.config.max_transfers})",
            )
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Let some begin of those that came all at once: each plans, and everybody else on the loop has a turn too."""
        while self._waiting and self._starting < _AT_ONCE:
            self._starting += 1
            self._site.loop.call_soon(self._on_started)
            del self._waiting[sender := next(iter(self._waiting))]
            self._site.tasks.spawn(sender.run(), f"kvxfer send {sender.protocol.fetch.transfer}")

    def _on_started(self) -> None:
        self._starting -= 1
        if self._waiting:
            self._start_waiting()

    def on_cancel(self, link: Link, message: wire.Cancel) -> None:
        """The decode rank gives up, or asks after a lost session what became of a transfer."""
        key = (link.peer.identity.incarnation, message.transfer)
        failure = Failure(Status.CANCELLED, message.code, _CANCELLED)
        if message.code is Code.INTEGRITY:
            self._site.metrics.chunks_checked["reported"] += 1
            _log.warning("damage_reported", peer=link.peer.name, transfer=message.transfer)
        if (sender := self.transfers.get(key)) is not None:
            sender.link = link
            sender.on_cancel(failure)
            return
        if (doubt := self.doubts.find(*key)) is not None:
            doubt.ended.on_unread()
        if (doubt := self.doubts.find(*key)) is not None:
            link.send(build_result(message.transfer, Status.IN_DOUBT, last=True, failure=doubt.ended.protocol.failure))
            return
        link.send(build_result(message.transfer, failure.status, last=True, failure=failure))  # nothing of it is posted

    def on_abandon(self, link: Link, message: wire.Abandon) -> None:
        """The decode rank gives up, and is reading (`pull`): `Cancel` follows. What has ended has been answered."""
        sender = self.transfers.get((link.peer.identity.incarnation, message.transfer))
        if sender is not None:
            sender.link = link
            sender.stop(Failure(Status.CANCELLED, message.code, _CANCELLED))

    def on_claim(self, link: Link, message: wire.Claim) -> None:
        """Requests still wait for a place at the decode rank."""
        who, issuer = link.peer.identity, self._site.issuer
        for ref in message.tickets:
            if issuer is None or not issuer.verify(ref):
                continue
            key = (ref.request, ref.attempt)
            found = self.book.find(key)
            if isinstance(found, Entry):
                self.book.renew(found, who.epoch, who.world)
            elif found is None:
                self.book.claim_early(key, who)

    def on_release(self, link: Link, message: wire.Release) -> None:
        """A decode rank is done with a request."""
        ref, issuer = message.ticket, self._site.issuer
        if issuer is not None and issuer.verify(ref):
            declined = message.code is Code.CANCELLED
            self.book.release((ref.request, ref.attempt), link.peer.identity, declined=declined)

    def on_link_opened(self, link: Link) -> None:
        """A decode rank is there (again), and may still read what it was announced before."""
        incarnation = link.peer.identity.incarnation
        self._links[incarnation] = link
        self.on_agent_renewed(link)
        for doubt in self.doubts.of_peer(incarnation):
            doubt.ended.keep_polling()

    def on_agent_renewed(self, link: Link) -> None:
        """A decode rank has made its agent anew, or something of ours has left for the one that it had.

        It may say so first on the stream on which we fetch from it, where it takes no results.
        """
        here = self._links.get(link.peer.identity.incarnation)
        for transfer, doubt in self.doubts.on_agent_renewed(link).items():
            if here is not None:  # else it asks when it is back
                here.send(_doubt_ended(transfer, doubt.ended.protocol.failure))

    def on_check(self, link: Link, message: wire.Check) -> None:
        """A decode rank compares what it fetches on this link from now on with what is here."""
        if link not in self._checks:
            self._site.warm_sums(link.peer, sending=True)
        self._checks[link] = message.every

    def on_link_lost(self, link: Link) -> None:
        """A session is gone: nothing new is posted for it. The transfers stay known until they have ended."""
        incarnation = link.peer.identity.incarnation
        if self._links.get(incarnation) is link:
            del self._links[incarnation]
        self._checks.pop(link, None)
        failure = Failure(Status.CANCELLED, Code.PEER_LOST, "the session was lost")
        for sender in list(self.transfers.values()):
            if sender.link is link:
                sender.leave_process()
                sender.leave_process = self._site.processes.hold(link.peer)  # until it ends, perhaps much later
                sender.stop(failure)
        if incarnation not in self._links:
            self.doubts.on_link_lost(incarnation)

    def refuse_parked(self) -> None:
        """No new offer will come: whoever waits for one had better go elsewhere at once."""
        for sender in list(self.transfers.values()):
            if sender.offer is None:
                sender.refuse(Code.DRAINING, _REASONS[Code.DRAINING])

    def withdraw_all(self) -> None:
        """Take every offer back; for shutdown."""
        for offer in self.book.offers:
            offer.withdraw("the prefill worker is closing")
        self.refuse_parked()
        ends = [offer.wait_end() for offer in self.book.offers]
        if ends:  # the worker waits for its tasks, bounded; peers that read our blocks are no tasks of ours
            self._site.tasks.spawn(asyncio.wait(ends), "kvxfer withdraw all")

    @property
    def exposed(self) -> list[Stop]:
        """What stops each transfer of which a decode rank that answers may be reading what it was told of (`pull`)."""
        return [sender.stop for sender in self.transfers.values() if sender.protocol.being_read]

    @property
    def posted(self) -> list[Stop]:
        """What stops each that waits for posts of ours."""
        posting = (one for one in self.transfers.values() if one.protocol.moving and one.protocol.route in _POSTED)
        return [sender.stop for sender in posting]

    # --- inside

    def _sender_of(self, link: Link, transfer: int) -> Sender | None:
        """A transfer that its decode rank moves on, which renews the offer's lease.

        None for one that has just ended here: what is said to it is answered by its result, which is on its way.
        """
        sender = self.transfers.get((link.peer.identity.incarnation, transfer))
        if sender is not None and sender.offer is not None:
            sender.offer.renew_lease()
        return sender

    def _on_end(self, sender: Sender) -> None:
        who, transfer = sender.peer.identity.incarnation, sender.protocol.fetch.transfer
        self._waiting.pop(sender, None)
        if sender.offer is None:
            ticket = sender.protocol.fetch.ticket
            self.book.unpark((ticket.request, ticket.attempt), sender)
        if self.transfers.get((who, transfer)) is not sender:
            self._on_doubt(who, transfer, sender)
            return
        del self.transfers[who, transfer]
        if not sender.in_doubt:
            self.places.give(who)
            return
        self.doubts.add(transfer, sender)
        if (here := self._links.get(who)) is None:
            self.doubts.on_link_lost(who)
        else:
            sender.keep_polling()
            self.on_agent_renewed(here)  # it may have told of that before our post to the old one ended

    def _on_doubt(self, who: bytes, transfer: int, moved: Sender) -> None:
        """More is known of what ended in doubt."""
        doubt, here = self.doubts.find(who, transfer), self._links.get(who)
        if doubt is None or doubt.ended is not moved:  # it was forgotten, and its number may be another's by now
            return
        if not moved.in_doubt:
            self.doubts.forget(who, transfer)
            if here is not None and not doubt.ended.is_pulled:  # who reads has said so itself, and has its answer
                here.send(_doubt_ended(transfer, doubt.ended.protocol.failure))
        elif moved.severed:
            self.doubts.sever(doubt)
            if here is not None:
                self.on_agent_renewed(here)


_REASONS: Final = {
    Code.TICKET_UNKNOWN: "this rank has not joined its engine yet",
    Code.TICKET_FORGED: "this engine did not issue the ticket in its present epoch",
    Code.TICKET_EXPIRED: "the offer's lease ran out",
    Code.TICKET_RELEASED: "the request was released already",
    Code.OFFER_WITHDRAWN: "the offer was withdrawn",
    Code.TOO_MANY: "here are as many transfers, or blocks of them, as may be, in all or of one peer (max_transfers)",
    Code.DRAINING: "the prefill rank is draining",
}


def _doubt_ended(transfer: int, failure: Failure | None) -> wire.KvAgentResult:
    """What ends a doubt that the decode rank was told of: nothing of the transfer is under way any more."""
    return build_result(transfer, Status.FAILED, last=True, failure=failure)
