"""The books of all offers of one rank: leases, claims, releases, and what came before its offer.

An offer is bound to the decode engine that claims or fetches it first. A fetch or claim by another one takes it over;
what the superseded engine still sends of its own accord (renewals, a late release) changes nothing any more.
"""

import asyncio
import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvxfer.errors import BusyError, Code, RequestError, TicketError
from kvxfer.names import MAX_WORLD
from kvxfer.offers import Ending, Entry, Expired, OfferKey, OfferState, Released, Withdrawn
from kvxfer.protocol.messages import Status
from kvxfer.protocol.session import Identity
from kvxfer.protocol.transfer import Failure
from kvxfer.site import Quota, Site
from kvxfer.telemetry import hears_info, logger

if TYPE_CHECKING:
    from kvxfer.prefill.sender import Sender

__all__ = ["Awaited", "OfferBook"]

_NAME: Final = "kvxfer.offer"
_log: Final = logger(_NAME)
_hears_info: Final = hears_info(_NAME)
_ENGINES: Final = 16
"""Decode engines that one request is kept for, before its offer and after: more do not try in vain by then."""
REMEMBERED_SECONDS: Final = 600.0
"""How long a used request id is refused."""
_LATE_SECONDS: Final = 0.05
"""A timer that is later than that may have been so for any time."""
_RELEASED: Final = Released()
_OVER: Final = Failure(Status.CANCELLED, Code.TICKET_RELEASED, "the request was released")


@dataclass(frozen=True, slots=True)
class Awaited:
    """What decode ranks have said of a request that is not on offer yet."""

    first_token: int | None  # where the first of their fetches begins; None if they want nothing of this rank
    declined: bool = False  # whether one of them has said that it will not fetch it


@dataclass(slots=True)
class Early:
    """What came for a request before its offer did."""

    until: float  # when it is forgotten
    peer: bytes  # incarnation of the decode rank that was the first, in whose places it is counted
    fetches: "list[Sender]" = field(default_factory=list)  # transfers that wait
    claims: dict[bytes, int] = field(default_factory=dict[bytes, int])  # size of each engine that claims it, by epoch
    # who has released it, by engine and rank
    releases: dict[tuple[bytes, int], Identity] = field(default_factory=dict[tuple[bytes, int], Identity])
    declined: bool = False  # whether one of them said that no fetch will come


class OfferBook:
    """All offers of one rank: leases, claims, releases, and what came before its offer."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._most: Final = site.config.max_offers
        self._offers: dict[OfferKey, Entry] = {}
        self._early: dict[OfferKey, Early] = {}
        self._places: Final = Quota(site.config.max_transfers)  # one a request that somebody was early for
        self._past: OrderedDict[OfferKey, tuple[float, Code]] = OrderedDict()
        self._ends: list[tuple[float, OfferKey]] = []  # a heap of when to look at whom
        self._watched: dict[OfferKey, float] = {}  # the entry of the heap that counts
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf  # when it fires
        self._slept = False

    def __len__(self) -> int:
        return len(self._offers)

    @property
    def parked(self) -> int:
        """Requests that somebody was early for: they were asked for, claimed or declined before they were offered."""
        return len(self._early)

    @property
    def offers(self) -> list[Entry]:
        """Every offer that has not ended."""
        return list(self._offers.values())

    def open(self, request: str, attempt: int) -> Entry:
        """A new offer.

        Raises:
            RequestError: If the id is malformed or live, or was used less than `REMEMBERED_SECONDS` ago.
            BusyError: If there are too many offers.
        """
        issuer = self._site.joined
        try:
            issuer.ticket(request, attempt=attempt)
        except TicketError as error:
            raise RequestError(f"no ticket can be made for request {request!r}, attempt {attempt}: {error}") from error
        key = (request, attempt)
        # old ids are forgotten: by age, and so that the memory of them stays bounded, as each of them was opened once
        oldest, limit = self._site.now() - REMEMBERED_SECONDS, 16 * self._most
        while self._past and (len(self._past) > limit or next(iter(self._past.values()))[0] < oldest):
            self._past.popitem(last=False)
        if key in self._offers or key in self._past:
            when = "live" if key in self._offers else "just used"
            raise RequestError(f"request {request!r} (attempt {attempt}) is {when}; raise attempt= to offer it again")
        if len(self._offers) >= self._most:
            raise BusyError(
                f"there are {len(self._offers)} offers already; 4 times max_transfers, which is "
                f"{self._site.config.max_transfers}, are the limit, or 4096 if that is more"
            )
        offer = Entry(self, self._site, key)
        self._offers[key] = offer
        return offer

    def discard(self, offer: Entry) -> None:
        """Forget an offer that was never published."""
        self._offers.pop(offer.key, None)
        offer.state = OfferState.ENDED

    def publish(self, offer: Entry) -> None:
        """The offer is complete enough to be found: hand it what came early."""
        self._site.metrics.offer_began(offer.key, self._site.now())
        early = self._forget_early(offer.key)
        if early is not None:
            for engine, world in early.claims.items():
                self.renew(offer, engine, world)
            for fetch in early.fetches:
                self.attach(offer, fetch)
                fetch.wake()
            for who in early.releases.values():
                self.release(offer.key, who)
        self.watch(offer.key, offer.lease)

    def find(self, key: OfferKey) -> Entry | Code | None:
        """The live offer; or why there is none any more; or None if it has not come yet."""
        offer = self._offers.get(key)
        if offer is not None and offer.state is OfferState.LIVE:
            return offer
        if offer is not None:
            return Code.OFFER_WITHDRAWN
        past = self._past.get(key)
        return past[1] if past is not None else None

    def awaited(self, key: OfferKey) -> Awaited | None:
        """Who waits for a request that is not on offer yet. From any thread: it reads, and each read is whole."""
        early = self._early.get(key)
        if early is None:
            return None
        fetches = tuple(early.fetches)
        if not fetches and not early.releases:
            return None  # a claim alone: nothing is known of what will be wanted
        return Awaited(min((fetch.machine.fetch.token_start for fetch in fetches), default=None), early.declined)

    def claim_early(self, key: OfferKey, who: Identity) -> None:
        """A decode rank claims what is not on offer yet. Without room it is not kept: a claim comes again."""
        early = self._keep_early(key, who.incarnation)
        if early is not None and (who.epoch in early.claims or len(early.claims) < _ENGINES):
            early.claims[who.epoch] = who.world

    def park(self, key: OfferKey, fetch: "Sender") -> bool:
        """Keep a fetch that came before its offer. False if there is no room."""
        early = self._keep_early(key, fetch.peer.identity.incarnation)
        if early is None:
            return False
        early.fetches.append(fetch)
        return True

    def unpark(self, key: OfferKey, fetch: "Sender") -> None:
        """A fetch ended before its offer came."""
        early = self._early.get(key)
        if early is not None and fetch in early.fetches:
            early.fetches.remove(fetch)
            if not (early.fetches or early.claims or early.releases):
                self._forget_early(key)

    def renew(self, offer: Entry, engine: bytes, world: int) -> None:
        """A decode engine claims the offer. One that was superseded renews in vain: it does not know it yet."""
        if engine not in offer.superseded:
            self.bind(offer, engine, world)

    def attach(self, offer: Entry, fetch: "Sender") -> None:
        """A fetch reads the offer from now on."""
        who = fetch.peer.identity
        if self.bind(offer, who.epoch, who.world):
            fetch.offer = offer
            offer.transfers.add(fetch)
        else:
            fetch.refuse(Code.TOO_MANY, f"{_ENGINES} decode engines have lost this request to others already")

    def bind(self, offer: Entry, engine: bytes, world: int) -> bool:
        """A decode engine claims or fetches the offer; renews its lease. Another engine takes it over.

        Returns:
            False if it may not: of those that it was taken over from, a few are remembered.
        """
        if offer.engine not in (None, engine) and engine not in offer.superseded and len(offer.superseded) >= _ENGINES:
            return False
        offer.superseded.discard(engine)
        if offer.engine is not None and offer.engine != engine:
            offer.superseded.add(offer.engine)
            failure = Failure(Status.CANCELLED, Code.SUPERSEDED, "another decode engine claimed this request")
            for transfer in list(offer.transfers):
                transfer.stop(failure)
            offer.released_ranks = set()
        lease = self._site.now() + self._site.config.offer_lease
        # the first claim begins the lease, whatever was left of the wait for one; a renewal never shortens it
        offer.lease = lease if offer.engine != engine else max(offer.lease, lease)
        offer.engine, offer.world = engine, world
        self.watch(offer.key, offer.lease)
        return True

    def release(self, key: OfferKey, who: Identity, *, declined: bool = False) -> None:
        """One rank of a decode engine is done with the request; `declined` if it never wanted it."""
        found, engine = self.find(key), who.epoch
        if isinstance(found, Entry):
            if found.engine is None:
                self.bind(found, engine, who.world)
            if found.engine != engine:
                return  # of an engine that was superseded: the offer is another one's now
            if len(found.released_ranks) < MAX_WORLD:  # no engine has more ranks, whatever a peer says
                found.released_ranks.add(who.rank)
            if len(found.released_ranks) >= found.world:
                found.end(_RELEASED, _OVER)
        elif found is None:
            early = self._keep_early(key, who.incarnation)
            if early is not None and len(early.releases) < MAX_WORLD:
                early.releases[engine, who.rank] = who
                early.declined |= declined

    def grew(self, offer: Entry) -> None:
        """The offer's owner is alive: a live stream of layers keeps an unclaimed offer from expiring."""
        if offer.engine is None:
            offer.lease = max(offer.lease, self._site.now() + self._site.config.unclaimed_timeout)
            self.watch(offer.key, offer.lease)

    def ended(self, offer: Entry, ending: Ending) -> None:
        """Books of an offer that is over."""
        code = {Released: Code.TICKET_RELEASED, Expired: Code.TICKET_EXPIRED, Withdrawn: Code.OFFER_WITHDRAWN}
        self._offers.pop(offer.key, None)
        self._past[offer.key] = (self._site.now(), code[type(ending)])
        outcome = type(ending).__name__.lower()
        self._site.metrics.offer_ended(offer.key, outcome, self._site.now())
        if _hears_info():
            _log.info("offer_ended", request=offer.key[0], attempt=offer.key[1], outcome=outcome)

    def close(self) -> None:
        """Stop the timers; for shutdown, after every offer was withdrawn and had time to end."""
        if self._timer is not None:
            self._timer.cancel()
        for offer in self.offers:
            offer.forsake()

    def watch(self, key: OfferKey, until: float) -> None:
        """Look at a request at `until`, or before: whoever is renewed meanwhile is then watched anew."""
        if self._watched.get(key, math.inf) <= until:
            return
        self._watched[key] = until
        heapq.heappush(self._ends, (until, key))
        if self._ends[0] == (until, key) and self._site.now() < self._due:  # else it fires as soon as it can
            self._arm()

    def _arm(self) -> None:
        """One timer for all: set to the nearest end."""
        if self._timer is not None:
            self._timer.cancel()
        self._due = max(self._ends[0][0], self._site.now()) if self._ends else math.inf
        self._timer = self._site.at(self._due, self._look) if self._ends else None

    def _look(self) -> None:
        now, heartbeat = self._site.now(), self._site.config.heartbeat
        # after a standstill of this process: of others that stood still with it, renewals come only now
        self._slept = not self._slept and now > self._due + _LATE_SECONDS
        if self._slept:
            self._timer = self._site.at(now + heartbeat, self._look)
            return
        try:
            while self._ends and self._ends[0][0] <= now:
                until, key = heapq.heappop(self._ends)
                if self._watched.get(key) == until:
                    del self._watched[key]
                    try:
                        self._look_at(key, now)
                    except BaseException:
                        self.watch(key, now + heartbeat)
                        raise
        finally:  # whatever one of them meets, others end
            self._arm()

    def _look_at(self, key: OfferKey, now: float) -> None:
        """End what has run out, or watch it on."""
        offer, early = self._offers.get(key), self._early.get(key)
        if offer is not None and offer.state is OfferState.LIVE:
            if offer.transfers:  # they keep it, and their own leases bound them; the last that leaves looks earlier
                self.watch(key, max(offer.lease, now + self._site.config.heartbeat))
            elif offer.lease > now:
                self.watch(key, offer.lease)
            else:
                self._expire(offer)
        if early is not None and early.until > now:
            self.watch(key, early.until)
        elif early is not None:
            self._forget_early(key)
            reason = f"the request was not offered within {self._site.config.unclaimed_timeout:g} s"
            for fetch in early.fetches:
                fetch.refuse(Code.NEVER_OFFERED, reason)

    def _keep_early(self, key: OfferKey, peer: bytes) -> Early | None:
        """Where to keep what a peer says before the offer comes; None if there is no room for it."""
        early = self._early.get(key)
        if early is None and self._places.take(peer):
            early = self._early[key] = Early(self._site.now() + self._site.config.unclaimed_timeout, peer)
            self.watch(key, early.until)
        return early

    def _forget_early(self, key: OfferKey) -> Early | None:
        early = self._early.pop(key, None)
        if early is not None:
            self._places.give(early.peer)
        return early

    def _expire(self, offer: Entry) -> None:
        config = self._site.config
        waited = config.offer_lease if offer.engine else config.unclaimed_timeout
        who = "its decode engine stopped renewing it" if offer.engine else "nobody claimed it"
        failure = Failure(Status.EXPIRED, Code.TICKET_EXPIRED, "the offer's lease ran out")
        offer.end(Expired(f"{who} for {waited:g} s"), failure)
