"""What a prefill worker offers, as its owner sees it, and the books of all offers of a rank.

An offer ends when every rank of the decode engine has released it, when its lease runs out, or when it is withdrawn; in
each case only after the last transfer that touches its blocks is quiescent. It is bound to the decode engine that
claims or fetches it first. A fetch or claim by another one takes it over; what the superseded engine still sends of its
own accord (renewals, a late release) changes nothing any more.
"""

import asyncio
import heapq
import math
import operator
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from kvxfer.copy.port import READY, Event, as_event, has_fired
from kvxfer.errors import (
    BlocksError,
    BusyError,
    ClosedError,
    Code,
    MemoryInDoubtError,
    RequestError,
    TicketError,
    TokensError,
)
from kvxfer.geometry import Blocks, Span, check_tokens
from kvxfer.names import MAX_WORLD, lazy
from kvxfer.plans.pairs import check_cover, offered_blocks
from kvxfer.protocol.messages import Status
from kvxfer.protocol.session import Identity
from kvxfer.protocol.transfer import Failure
from kvxfer.runtime import Home
from kvxfer.site import Quota, Site
from kvxfer.telemetry import RequestKey, TransferStats, hears_info, logger
from kvxfer.transfers import Settling, follow

if TYPE_CHECKING:
    from kvxfer.prefill.sender import Sender

__all__ = [
    "Awaited",
    "Ending",
    "Entry",
    "Expired",
    "Offer",
    "OfferBook",
    "OfferState",
    "Released",
    "Withdrawn",
    "given_layers",
    "given_payload",
]

# --- offers


@dataclass(frozen=True, slots=True)
class Released:
    """Every rank of the decode engine is done; the blocks are the caller's again. With its last 1,024 transfers."""

    stats: tuple[TransferStats, ...] = ()


@dataclass(frozen=True, slots=True)
class Expired:
    """Nobody claimed or renewed the offer in time; the blocks are the caller's again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The owner withdrew the offer; the blocks are the caller's again."""


Ending: TypeAlias = Released | Expired | Withdrawn
_STATS: Final = 1024
"""Transfers of an offer that are remembered: a decode rank can begin and give up any number of them."""


class OfferState(StrEnum):
    """Life of an offer."""

    LIVE = "live"
    ENDING = "ending"  # no new transfer; the last ones are waited for
    ENDED = "ended"


_Marks: TypeAlias = tuple[tuple[int, Event], ...]
"""Tokens up to which something is ready, ascending, and after which event."""
_stop_of: Final = operator.itemgetter(0)


class Readiness:
    """Up to which token each layer is ready, and after which events."""

    def __init__(self, layers: Iterable[int]) -> None:
        self._layers: Final = frozenset(layers)
        self._of_all: _Marks | None = ()  # while all layers are marked alike, as they mostly are
        self._marks: dict[int, _Marks] = {}  # of each layer from then on; those with the same share one tuple
        self.by_layer = True  # whether layers become ready one after the other, as far as that was seen

    def reached(self, layer: int) -> int:
        """One past the last token of a layer that is (or will be, after its events) ready."""
        return _reached(self._marks[layer] if self._of_all is None else self._of_all)

    def mark(self, layers: Iterable[int] | None, stop: int, event: Event) -> None:
        """Tokens up to `stop` of these layers, or of all, are ready once `event` has fired.

        Raises:
            TokensError: If a layer is unknown here; nothing is marked then.
        """
        marked = self._layers if layers is None else frozenset(given_layers(layers, self._layers))
        self.by_layer = len(marked) < len(self._layers)
        if self._of_all is not None and not self.by_layer:
            self._of_all = _longer(self._of_all, stop, event)
            return
        if self._of_all is not None:
            self._marks, self._of_all = dict.fromkeys(self._layers, self._of_all), None
        longer = {id(marks): _longer(marks, stop, event) for marks in self._distinct(marked)}
        for layer in marked:
            self._marks[layer] = longer[id(self._marks[layer])]

    def missing(self, stop: int) -> list[int]:
        """Layers of which some tokens before `stop` were never marked."""
        if all(_reached(marks) >= stop for marks in self._distinct(self._layers)):
            return []
        return sorted(layer for layer in self._layers if self.reached(layer) < stop)

    def events(self, layers: Sequence[int], start: int, stop: int) -> list[Event] | None:
        """Events after which the tokens [start, stop) of these layers may be read; None if some are not marked yet."""
        found: dict[int, Event] = {}  # by identity: whether events of the caller's are equal is not asked
        for marks in self._distinct(layers):
            if _reached(marks) < stop:
                return None
            first, last = bisect_right(marks, start, key=_stop_of), bisect_left(marks, stop, key=_stop_of)
            found.update((id(event), event) for _, event in marks[first : last + 1] if event is not READY)
        return list(found.values())

    @property
    def fired(self) -> bool:
        """Whether all that was marked may be read now."""
        for marks in self._distinct(self._layers) if self._of_all is None else (self._of_all,):
            for _, event in marks:
                if event is not READY and not has_fired(event):
                    return False
        return True

    def _distinct(self, layers: Iterable[int]) -> Iterable[_Marks]:
        """The marks of layers, those that several share once."""
        if (of_all := self._of_all) is not None:  # read once: another thread may plan while more is marked
            return (of_all,)
        return {id(marks): marks for marks in map(self._marks.__getitem__, layers)}.values()


def _reached(marks: _Marks) -> int:
    return marks[-1][0] if marks else 0


def _longer(marks: _Marks, stop: int, event: Event) -> _Marks:
    if stop <= _reached(marks):
        return marks
    return (*(marks[:-1] if marks and marks[-1][1] is event else marks), (stop, event))


@dataclass(slots=True)
class _Claimant:
    """The decode engine that claimed an offer."""

    epoch: bytes
    world: int  # ranks that it has
    released: set[int] = field(default_factory=set[int])  # those that are done


class Entry:
    """An offer as its book has it: what its owner has said, who reads its blocks, and how it ends."""

    def __init__(self, book: "OfferBook", site: Site, key: RequestKey) -> None:
        self.site: Final = site
        self.key: Final = key
        self.tokens = 0  # on offer so far; final once it is finished
        self.step = 0  # tokens that came with the last extension
        self.spans: dict[str, Span] = {}
        self.readiness: Final = Readiness(site.geometry.layers)
        self.finished = False
        self.payload = b""
        self.state = OfferState.LIVE
        self.ending: Ending | None = None
        self.transfers: Final[set[Sender]] = set()
        self.doubtful: Final[dict[Sender, None]] = {}  # over, but its reads may be in flight
        self.stats: Final = deque[TransferStats](maxlen=_STATS)
        self._book = book
        self._ended: Final[asyncio.Future[Ending]] = site.loop.create_future()
        self.engine: _Claimant | None = None  # that has it
        self.superseded: set[bytes] = set()  # engines from which it was taken over
        self.lease: float = site.now() + site.config.unclaimed_timeout  # kept until then

    def wait_end(self) -> "asyncio.Future[Ending]":
        """See `Offer.wait_end`."""
        return follow(self._ended)

    def renew_lease(self) -> None:
        """Its decode engine moves it: that renews the lease as a claim would."""
        self.lease = self.site.now() + self.site.config.offer_lease

    def on_growth(self) -> None:
        """Its owner has added to it, and is alive: that keeps an unclaimed offer from expiring."""
        for transfer in list(self.transfers):
            transfer.wake()
        if self.engine is None:
            self.lease = max(self.lease, self.site.now() + self.site.config.unclaimed_timeout)
            self._book.watch(self.key, self.lease)

    def end(self, ending: Ending, failure: Failure) -> None:
        """Begin to end: stop what still reads the blocks."""
        if self.state is not OfferState.LIVE:
            return
        self.state, self.ending = OfferState.ENDING, ending
        for transfer in list(self.transfers):
            transfer.stop(failure)
        self.end_if_unread()

    def withdraw(self, why: str = "the offer was withdrawn") -> None:
        """Its owner takes it back. Idempotent."""
        self.end(Withdrawn(), Failure(Status.CANCELLED, Code.OFFER_WITHDRAWN, why))

    def end_if_unread(self) -> None:
        """End if nothing reads the blocks any more."""
        if self.state is not OfferState.ENDING or self.transfers or self.ending is None:
            return
        if self.doubtful:
            self._keep_in_doubt()
            return
        self.state = OfferState.ENDED
        ending = self.ending
        if isinstance(ending, Released):
            ending = Released(tuple(self.stats))
        self._book.on_end(self, ending)
        if not self._ended.done():
            self._ended.set_result(ending)
        else:
            self.site.custody.settle(self._holder)
            if not self._quiescent.done:  # the worker was not closed meanwhile, and has said that it will not come
                self._quiescent.end()

    def on_transfer_end(self, transfer: "Sender", *, in_doubt: bool = False, moved: bool = False) -> None:
        """A transfer is over; `in_doubt` if its reads of the blocks may still be in flight.

        If it succeeded (`moved`), its decode engine lives, and has a whole lease to say that it is done.
        """
        self.transfers.discard(transfer)
        self.doubtful.pop(transfer, None)
        if in_doubt:
            self.doubtful[transfer] = None
        if moved:
            self.renew_lease()
        if self.state is not OfferState.LIVE:
            self.end_if_unread()
        elif not self.transfers:  # none keeps it any more: its lease counts again
            self._book.watch(self.key, self.lease)

    def leave_in_doubt(self) -> None:
        """The worker is closed: what is in doubt now stays so. The memory is left to the process's end."""
        self._keep_in_doubt()
        self._quiescent.end(
            ClosedError(f"the worker was closed while offer {self.key[0]!r} was in doubt: never reuse its blocks")
        )

    def block_ids(self) -> dict[str, tuple[int, ...]]:
        """Its blocks by group."""
        return {group: tuple(np.asarray(span.ids).tolist()) for group, span in self.spans.items()}

    @lazy
    def _quiescent(self) -> Settling:
        """Whether blocks that were in doubt are not."""
        return Settling()

    @property
    def _holder(self) -> str:
        """Its name in the custody books."""
        return f"offer {self.key[0]}/{self.key[1]}"

    def _keep_in_doubt(self) -> None:
        """Reads of the blocks did not end: tell whoever waits, and keep the blocks in custody."""
        if self._ended.done():
            return
        blocks, peer = self.block_ids(), ",".join(sorted({t.peer.name for t in (*self.transfers, *self.doubtful)}))
        self.site.custody.doubt_reads(self._holder, blocks)
        error = MemoryInDoubtError(
            f"the blocks of offer {self.key[0]!r} may still be read by a copy or post of ours, or by {peer}, which is "
            "silent",
            settled=self._quiescent.wait,
            peer=peer,
            blocks=blocks,
        )
        reports = [transfer.report for transfer in self.doubtful if transfer.report is not None]
        error.report = reports[0] if reports else None  # there is none of what has not ended: the worker is closed
        self._ended.set_exception(error)
        self._ended.exception()


class Offer:
    """One request on offer, as its owner sees it. Made by `Worker.offer`.

    In a process that was forked off this one every method raises `ForkedError`, in another thread or on another loop
    `UsageError`.
    """

    def __init__(self, entry: Entry) -> None:
        self._entry: Final = entry
        self._home: Final = Home(entry.site.loop)

    def __repr__(self) -> str:
        return f"Offer({self.request!r}, attempt={self.attempt}, tokens={self.tokens}, {self.state.value})"

    @property
    def key(self) -> RequestKey:
        """Request id and attempt."""
        return self._entry.key

    @property
    def request(self) -> str:
        """The request's id."""
        return self._entry.key[0]

    @property
    def attempt(self) -> int:
        """Which attempt at this id."""
        return self._entry.key[1]

    @property
    def tokens(self) -> int:
        """Tokens on offer so far; final once the offer is finished."""
        return self._entry.tokens

    @property
    def state(self) -> OfferState:
        """Whether it is live, ending or ended."""
        return self._entry.state

    @property
    def ticket(self) -> dict[str, Any]:
        """With which a decode engine fetches it: plain JSON data, and a secret.

        Raises:
            TicketError: If the worker has not joined its engine yet.
        """
        return self._entry.site.engine_issuer.ticket(self.request, attempt=self.attempt)

    def extend(self, blocks: Blocks, *, tokens: range) -> None:
        """Add blocks and the tokens that they hold; for streaming offers.

        An offer may end while it is still computed: its lease runs out, or its decode engine needs nothing of this
        rank. Then this does nothing, as `ready` and `finish` do; `released` says how it ended.

        Args:
            blocks: Ids appended to those given before, by group.
            tokens: The tokens that become part of the offer; starts where the last range ended.

        Raises:
            BlocksError: If ids are out of range, in custody, or too few for the tokens, or state has two slots.
            TokensError: If the range does not continue the last one.
            RequestError: If the offer is finished or was withdrawn.
        """
        if not self._is_open("extend"):
            return
        entry, geometry = self._entry, self._entry.site.geometry
        check_tokens(tokens)
        if tokens.start != self.tokens:
            raise TokensError(f"tokens {tokens} do not continue the offer, which has {self.tokens} tokens")
        added = offered_blocks(blocks, geometry)
        entry.site.custody.check({group: np.asarray(span.ids, np.int64) for group, span in added.items()})
        spans = {group: self._appended(group, span) for group, span in added.items()}
        check_cover(spans, geometry, tokens, complete=False)
        entry.spans = spans
        entry.tokens, entry.step = tokens.stop, len(tokens)
        entry.on_growth()

    def ready(self, *, layers: Sequence[int] | None = None, tokens: int | None = None, after: Any = None) -> None:
        """Say that K and V may be read once `after` has fired.

        Args:
            layers: These layers; all if left out.
            tokens: Up to this token; all that were added so far if left out.
            after: CUDA event, stream, or `kvxfer.READY`; required for CUDA memory.

        Raises:
            TokensError: If a layer is unknown, or `tokens` is beyond the offer.
            EventError: If `after` is missing or was never recorded.
            RequestError: If the offer is finished or was withdrawn.
        """
        if not self._is_open("mark ready"):
            return
        try:
            stop = self.tokens if tokens is None else operator.index(tokens)
        except TypeError as error:
            raise TokensError(f"ready() takes a number of tokens: {error}") from error
        if not 0 < stop <= self.tokens:
            raise TokensError(f"ready up to token {stop} is outside the {self.tokens} tokens on offer")
        self._entry.readiness.mark(layers, stop, as_event(after, self._entry.site.geometry))
        self._entry.on_growth()

    def finish(self, payload: bytes = b"") -> None:
        """Everything is on offer; no blocks or tokens follow. `payload` travels with the last result.

        Args:
            payload: Up to 64 KiB for the decoder (the first token, sampling state).

        Raises:
            RequestError: If the offer is finished already, or was withdrawn.
            TokensError: If nothing was offered, a layer was not marked as ready up to the last token, or the payload is
                too large.
            BlocksError: If a group of state has no slot.
        """
        if not self._is_open("finish"):
            return
        entry = self._entry
        if entry.tokens == 0:
            raise TokensError(f"offer {self.request!r} is finished without any token")
        check_cover(entry.spans, entry.site.geometry, range(entry.tokens))
        missing = entry.readiness.missing(entry.tokens)
        if missing:
            raise TokensError(
                f"offer {self.request!r} cannot finish: layer {missing[0]} is ready up to token "
                f"{entry.readiness.reached(missing[0])} of {entry.tokens}; call ready() first"
            )
        entry.payload, entry.finished = given_payload(payload), True
        entry.on_growth()

    async def released(self) -> Ending:
        """Wait until the blocks are the caller's again, and say why. Cancelling the wait changes nothing.

        Raises:
            MemoryInDoubtError: If a silent peer, or a copy or post of ours that stands still, may still read them.
        """
        return await self.wait_end()

    def wait_end(self) -> "asyncio.Future[Ending]":
        """Resolves when the offer has ended, as `released` does. Cancelling it changes nothing."""
        return self._home.own(self._entry).wait_end()

    async def withdraw(self) -> Ending:
        """Take the offer back: stops its transfers and returns when nobody reads its blocks. Idempotent."""
        self._home.own(self._entry).withdraw()
        return await self.released()

    def _is_open(self, what: str) -> bool:
        """Whether more may be added. Not where the offer has ended by itself: its owner could not foresee that."""
        entry = self._home.own(self._entry)
        if entry.finished or isinstance(entry.ending, Withdrawn):
            state = "finished" if entry.state is OfferState.LIVE else entry.state.value
            raise RequestError(f"cannot {what}: offer {self.request!r} is {state}")
        return entry.state is OfferState.LIVE

    def _appended(self, group: str, span: Span) -> Span:
        before = self._entry.spans.get(group)
        if before is None:
            return span
        if span.first_token:
            raise BlocksError(f"group {group!r}: first_token belongs to the first block list of an offer only")
        return Span(np.concatenate([np.asarray(before.ids), np.asarray(span.ids)]), before.first_token)


def given_layers(layers: Any, held: frozenset[int]) -> tuple[int, ...]:
    """Layers as a caller named them: of what is none, or has no end, no more is looked at than what is wrong first.

    Raises:
        TokensError: If they are none, or one is not held here.
    """

    def known(layer: Any) -> int:
        number = operator.index(layer)
        if number not in held:
            raise TokensError(f"layer {number} is not held here; this cache has {sorted(held)}")
        return number

    try:
        return tuple(map(known, layers))
    except TypeError as error:
        raise TokensError(f"ready() takes a list of layers: {error}") from error


def given_payload(payload: Any) -> bytes:
    """A payload as a caller gave it, copied: the memory may be used for something else at once.

    Raises:
        RequestError: If it is none.
        TokensError: If it is too large.
    """
    try:
        content = payload if type(payload) is bytes else bytes(memoryview(payload))
    except (TypeError, ValueError, BufferError) as error:
        raise RequestError(f"a payload is bytes, not {type(payload).__name__}; encode it first") from error
    if len(content) > 65536:
        raise TokensError(f"a payload has at most 65536 bytes, not {len(content)}")
    return content


# --- the book

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
_GONE: Final = {Released: Code.TICKET_RELEASED, Expired: Code.TICKET_EXPIRED, Withdrawn: Code.OFFER_WITHDRAWN}
_OVER: Final = Failure(Status.CANCELLED, Code.TICKET_RELEASED, "the request was released")


@dataclass(frozen=True, slots=True)
class Awaited:
    """What decode ranks have said of a request that is not on offer yet."""

    first_token: int | None
    """Where the first of their fetches begins; None if they want nothing of this rank."""
    declined: bool = False
    """Whether one of them has said that it will not fetch it."""


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
        self._offers: dict[RequestKey, Entry] = {}
        self._early: dict[RequestKey, Early] = {}
        self._places: Final = Quota(site.config.max_transfers)  # one a request that somebody was early for
        self._past: OrderedDict[RequestKey, tuple[float, Code]] = OrderedDict()
        self._ends: list[tuple[float, RequestKey]] = []  # a heap of when to look at whom
        self._watched: dict[RequestKey, float] = {}  # the entry of the heap that counts
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
        issuer = self._site.engine_issuer
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
            when = "is live" if key in self._offers else f"was just used, less than {REMEMBERED_SECONDS:g} s ago"
            raise RequestError(f"request {request!r} (attempt {attempt}) {when}; raise attempt= to offer it again")
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
        early = self._early.get(offer.key)
        if early is not None:
            for engine, world in early.claims.items():
                self.renew(offer, engine, world)
            while early.fetches:  # one may end another
                fetch = early.fetches.pop(0)
                self.attach(offer, fetch)
                fetch.wake()
            self._forget_early(offer.key)
            for who in early.releases.values():
                self.release(offer.key, who, kept=True)
        self.watch(offer.key, offer.lease)

    def find(self, key: RequestKey) -> Entry | Code | None:
        """The live offer; or why there is none any more; or None if it has not come yet."""
        offer = self._offers.get(key)
        if offer is not None:
            return offer if offer.ending is None else _GONE[type(offer.ending)]
        past = self._past.get(key)
        return past[1] if past is not None else None

    def awaited(self, key: RequestKey) -> Awaited | None:
        """Who waits for a request that is not on offer yet. From any thread: it reads, and each read is whole."""
        early = self._early.get(key)
        if early is None:
            return None
        fetches = tuple(early.fetches)
        if not (fetches or early.declined):
            said = Counter((who.epoch, who.world) for who in tuple(early.releases.values()))
            if not any(ranks >= world for (_, world), ranks in said.items()):
                return None  # a claim alone, or ranks that want nothing of this one: another one may want something
        return Awaited(min((fetch.protocol.fetch.token_start for fetch in fetches), default=None), early.declined)

    def claim_early(self, key: RequestKey, who: Identity) -> None:
        """A decode rank claims what is not on offer yet. Without room it is not kept: a claim comes again."""
        early = self._keep_early(key, who.incarnation)
        if early is not None and (who.epoch in early.claims or len(early.claims) < _ENGINES):
            early.claims[who.epoch] = who.world

    def park(self, key: RequestKey, fetch: "Sender") -> bool:
        """Keep a fetch that came before its offer. False if there is no room."""
        early = self._keep_early(key, fetch.peer.identity.incarnation)
        if early is None:
            return False
        early.fetches.append(fetch)
        return True

    def unpark(self, key: RequestKey, fetch: "Sender") -> None:
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
        before, superseded = offer.engine, offer.superseded
        if before is not None and before.epoch != engine:
            if engine not in superseded and len(superseded) >= _ENGINES:
                return False
            superseded.discard(engine)
            superseded.add(before.epoch)
            failure = Failure(Status.CANCELLED, Code.SUPERSEDED, "another decode engine claimed this request")
            for transfer in list(offer.transfers):
                transfer.stop(failure)
            before = None
        if before is None:
            offer.engine = _Claimant(engine, world)
        else:
            before.world = world
        # the first claim begins the lease, whatever was left of the wait for one
        offer.lease = self._site.now() + self._site.config.offer_lease
        self.watch(offer.key, offer.lease)
        return True

    def release(self, key: RequestKey, who: Identity, *, declined: bool = False, kept: bool = False) -> None:
        """One rank of a decode engine is done with the request; `declined` if it never wanted it.

        It ends that rank's transfers, but not if it was `kept` until the offer came: these were begun after it.
        """
        found, engine = self.find(key), who.epoch
        if isinstance(found, Entry):
            if found.engine is None:
                self.bind(found, engine, who.world)
            bound = found.engine
            if bound is None or bound.epoch != engine:
                return  # of an engine that was superseded: the offer is another one's now
            for transfer in () if kept else tuple(found.transfers):
                if transfer.peer.identity.incarnation == who.incarnation:
                    transfer.on_cancel(_OVER)
            if len(bound.released) < MAX_WORLD:  # no engine has more ranks, whatever a peer says
                bound.released.add(who.rank)
            if len(bound.released) >= bound.world:
                found.end(_RELEASED, _OVER)
        elif found is None:
            early = self._keep_early(key, who.incarnation)
            if early is not None and len(early.releases) < MAX_WORLD:
                early.releases[engine, who.rank] = who
                early.declined |= declined
                for fetch in tuple(early.fetches):
                    if fetch.peer.identity.incarnation == who.incarnation:
                        fetch.stop(_OVER)

    def on_end(self, offer: Entry, ending: Ending) -> None:
        """Books of an offer that is over."""
        self._offers.pop(offer.key, None)
        self._past[offer.key] = (self._site.now(), _GONE[type(ending)])
        outcome = type(ending).__name__.lower()
        self._site.metrics.offer_ended(offer.key, outcome, self._site.now())
        if _hears_info():
            _log.info("offer_ended", request=offer.key[0], attempt=offer.key[1], outcome=outcome)

    def close(self) -> None:
        """Stop the timers; for shutdown, after every offer was withdrawn and had time to end."""
        if self._timer is not None:
            self._timer.cancel()
        for offer in self.offers:
            offer.leave_in_doubt()

    def watch(self, key: RequestKey, until: float) -> None:
        """Look at a request at `until`, or before: whoever is renewed meanwhile is then watched anew."""
        if self._watched.get(key, math.inf) <= until:
            return
        self._watched[key] = until
        heapq.heappush(self._ends, (until, key))
        if self._ends[0] == (until, key) and self._site.now() < self._due:  # else it fires as soon as it can
            self._set_timer()

    def _set_timer(self) -> None:
        """One timer for all: set to the nearest end."""
        if self._timer is not None:
            self._timer.cancel()
        self._due = max(self._ends[0][0], self._site.now()) if self._ends else math.inf
        self._timer = self._site.call_at(self._due, self._on_timer) if self._ends else None

    def _on_timer(self) -> None:
        now, heartbeat = self._site.now(), self._site.config.heartbeat
        # after a standstill of this process: of others that stood still with it, renewals come only now
        self._slept = not self._slept and now > self._due + _LATE_SECONDS
        if self._slept:
            self._timer = self._site.call_at(now + heartbeat, self._on_timer)
            return
        try:
            while self._ends and self._ends[0][0] <= now:
                until, key = heapq.heappop(self._ends)
                if self._watched.get(key) == until:
                    del self._watched[key]
                    try:
                        self._expire_or_watch(key, now)
                    except BaseException:
                        self.watch(key, now + heartbeat)
                        raise
        finally:  # whatever one of them meets, others end
            self._set_timer()

    def _expire_or_watch(self, key: RequestKey, now: float) -> None:
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

    def _keep_early(self, key: RequestKey, peer: bytes) -> Early | None:
        """Where to keep what a peer says before the offer comes; None if there is no room for it."""
        early = self._early.get(key)
        if early is None and self._places.take(peer):
            early = self._early[key] = Early(self._site.now() + self._site.config.unclaimed_timeout, peer)
            self.watch(key, early.until)
        return early

    def _forget_early(self, key: RequestKey) -> None:
        early = self._early.pop(key, None)
        if early is not None:
            self._places.give(early.peer)

    def _expire(self, offer: Entry) -> None:
        config = self._site.config
        waited = config.offer_lease if offer.engine else config.unclaimed_timeout
        who = "its decode engine stopped renewing it" if offer.engine else "nobody claimed it"
        failure = Failure(Status.EXPIRED, Code.TICKET_EXPIRED, "the offer's lease ran out")
        offer.end(Expired(f"{who} for {waited:g} s"), failure)
