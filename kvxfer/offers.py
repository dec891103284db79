"""What a prefill worker offers, as its owner sees it, and what callers may pass as `after=`.

An offer ends when every rank of the decode engine has released it, when its lease runs out, or when it is withdrawn; in
each case only after the last transfer that touches its blocks is quiescent.
"""

import asyncio
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import numpy as np

from kvxfer.copy.port import READY, AllOf, Event, has_fired
from kvxfer.errors import BlocksError, ClosedError, Code, EventError, MemoryInDoubtError, RequestError, TokensError
from kvxfer.geometry import Blocks, CacheGeometry, Span, check_tokens
from kvxfer.plans.planning import check_cover, offered_blocks
from kvxfer.protocol.messages import Status
from kvxfer.protocol.transfer import Failure
from kvxfer.runtime import Home
from kvxfer.site import Site, resolve
from kvxfer.telemetry import TransferStats
from kvxfer.transfers import follow

if TYPE_CHECKING:
    from kvxfer.prefill.offers import OfferBook
    from kvxfer.prefill.sender import Sender

__all__ = ["Ending", "Entry", "Expired", "Offer", "OfferKey", "OfferState", "Released", "Withdrawn", "as_event"]

# --- `after=`


def as_event(after: Any, geometry: CacheGeometry) -> Event:
    """Turn `after=` into an event that can be queried.

    Args:
        after: A recorded CUDA event, a stream (an event is recorded on it now), `READY`, or None on CPU memory.
        geometry: Tells whether an event is needed.

    Raises:
        EventError: If it is missing for CUDA memory, was never recorded, or is none of these.
    """
    if after is None:
        if geometry.kind == "cuda":
            raise EventError(
                "after= is required for CUDA memory: pass a recorded torch.cuda.Event, a stream, or kvxfer.READY "
                "if the work on these blocks is known to be complete"
            )
        return READY
    if after is READY or isinstance(after, AllOf):
        return READY if after is READY else after
    if isinstance(after, type):  # its methods are there, and none of them can be called
        raise EventError(
            f"after= must be an event, a stream or kvxfer.READY, not the class {after.__name__} itself; "
            "pass an event that was recorded, or a stream"
        )
    record = getattr(after, "record_event", None)
    if callable(record):  # a torch.cuda.Stream
        return cast("Event", record())
    if not callable(getattr(after, "query", None)):
        raise EventError(f"after= must be an event, a stream or kvxfer.READY, not {type(after).__name__}")
    # torch makes the CUDA event when it is first recorded; until then its handle is 0 and query() says True
    if getattr(after, "cuda_event", None) == 0 or getattr(after, "event_id", None) == 0:
        raise EventError("the event passed as after= was never recorded")
    recorded: Event = after
    return recorded


# --- offers

OfferKey: TypeAlias = tuple[str, int]
"""Request id and attempt."""


@dataclass(frozen=True, slots=True)
class Released:
    """Every rank of the decode engine is done; the blocks are the caller's again."""

    stats: tuple[TransferStats, ...] = ()


@dataclass(frozen=True, slots=True)
class Expired:
    """Nobody claimed or renewed the offer in time; the blocks are the caller's again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The owner withdrew the offer; the blocks are the caller's again."""


Ending: TypeAlias = Released | Expired | Withdrawn


class OfferState(StrEnum):
    """Life of an offer."""

    LIVE = "live"
    ENDING = "ending"  # no new transfer; the last ones are waited for
    ENDED = "ended"


_Marks: TypeAlias = tuple[tuple[int, Event], ...]
"""Tokens up to which something is ready, ascending, and after which event."""


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
            TypeError: If one is no whole number; likewise.
        """
        marked = self._layers if layers is None else frozenset(map(self._known, layers))
        self.by_layer = len(marked) < len(self._layers)
        if self._of_all is not None and not self.by_layer:
            self._of_all = _longer(self._of_all, stop, event)
            return
        if self._of_all is not None:
            self._marks, self._of_all = dict.fromkeys(self._layers, self._of_all), None
        longer = {id(marks): _longer(marks, stop, event) for marks in self._distinct(marked)}
        for layer in marked:
            self._marks[layer] = longer[id(self._marks[layer])]

    def _known(self, layer: object) -> int:
        number = operator.index(layer)  # type: ignore[arg-type]  # it raises for what is none
        if number not in self._layers:
            raise TokensError(f"layer {number} is not held here; this cache has {sorted(self._layers)}")
        return number

    def missing(self, stop: int) -> list[int]:
        """Layers of which some tokens before `stop` were never marked."""
        if all(_reached(marks) >= stop for marks in self._distinct(self._layers)):
            return []
        return sorted(layer for layer in self._layers if self.reached(layer) < stop)

    def events(self, layers: Sequence[int], start: int, stop: int) -> list[Event] | None:
        """Events after which the tokens [start, stop) of these layers may be read; None if some are not marked yet."""
        found: list[Event] = []
        for marks in self._distinct(layers):
            if _reached(marks) < stop:
                return None
            begin = 0
            for end, event in marks:
                if begin < stop and start < end and event is not READY and event not in found:
                    found.append(event)
                begin = end
        return found

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
    return (*marks, (stop, event)) if stop > _reached(marks) else marks


class Entry:
    """An offer as its book has it: what its owner has said, who reads its blocks, and how it ends."""

    def __init__(self, book: "OfferBook", site: Site, key: OfferKey) -> None:
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
        self.doubtful: Final[dict[Sender, str]] = {}  # over, but its reads may be in flight; with the peer
        self.stats: Final[list[TransferStats]] = []
        self._book = book
        self._ended: Final[asyncio.Future[Ending]] = site.loop.create_future()
        self._quiescent: Final[asyncio.Future[None]] = site.loop.create_future()
        # the engine that claimed it, the ranks of it that released it, and until when its lease runs
        self.engine: bytes | None = None
        self.superseded: set[bytes] = set()
        self.world = 0
        self.released_ranks: set[int] = set()
        self.lease: float = site.now() + site.config.unclaimed_timeout

    def wait_end(self) -> "asyncio.Future[Ending]":
        """See `Offer.wait_end`."""
        return follow(self._ended)

    def touched(self) -> None:
        """Its decode engine moves it: that renews the lease as a claim would."""
        self.lease = max(self.lease, self.site.now() + self.site.config.offer_lease)

    def grew(self) -> None:
        """Its owner has added to it."""
        for transfer in list(self.transfers):
            transfer.wake()
        self._book.grew(self)

    def end(self, ending: Ending, failure: Failure) -> None:
        """Begin to end: stop what still reads the blocks."""
        if self.state is not OfferState.LIVE:
            return
        self.state, self.ending = OfferState.ENDING, ending
        for transfer in list(self.transfers):
            transfer.stop(failure)
        self.settle()

    def settle(self) -> None:
        """End if nothing reads the blocks any more."""
        if self.state is not OfferState.ENDING or self.transfers or self.ending is None:
            return
        if self.doubtful:
            self._doubt(",".join(sorted(set(self.doubtful.values()))))
            return
        self.state = OfferState.ENDED
        ending = self.ending
        if isinstance(ending, Released):
            ending = Released(tuple(self.stats))
        self._book.ended(self, ending)
        if not self._ended.done():
            self._ended.set_result(ending)
        else:
            self.site.custody.settle(self._holder)
            resolve(self._quiescent, None)  # unless the worker was closed meanwhile, and has said that it will not come

    def left(self, transfer: "Sender", *, in_doubt: str = "", moved: bool = False) -> None:
        """A transfer is over.

        Args:
            transfer: Which.
            in_doubt: Names the peer if its reads of the blocks may still be in flight.
            moved: Whether it succeeded: then its decode engine lives, and has a whole lease to say that it is done.
        """
        self.transfers.discard(transfer)
        self.doubtful.pop(transfer, None)
        if in_doubt:
            self.doubtful[transfer] = in_doubt
        if moved:
            self.touched()
        if self.state is not OfferState.LIVE:
            self.settle()
        elif not self.transfers:  # none keeps it any more: its lease counts again
            self._book.watch(self.key, self.lease)

    def forsake(self) -> None:
        """The worker is closed: what is in doubt now stays so. The memory is left to the process's end."""
        if self.state is OfferState.ENDED:
            return
        self._doubt(",".join(sorted({t.peer.name for t in self.transfers} | set(self.doubtful.values()))))
        if not self._quiescent.done():
            self._quiescent.set_exception(
                ClosedError(f"the worker was closed while offer {self.key[0]!r} was in doubt: never reuse its blocks")
            )
            self._quiescent.exception()

    def block_ids(self) -> dict[str, tuple[int, ...]]:
        """Its blocks by group."""
        return {group: tuple(np.asarray(span.ids).tolist()) for group, span in self.spans.items()}

    @property
    def _holder(self) -> str:
        """Its name in the custody books."""
        return f"offer {self.key[0]}/{self.key[1]}"

    def _doubt(self, peer: str) -> None:
        """Reads of the blocks did not end: tell whoever waits, and keep the blocks in custody."""
        if self._ended.done():
            return
        blocks = self.block_ids()
        self.site.custody.doubt_reads(self._holder, blocks)
        error = MemoryInDoubtError(
            f"the blocks of offer {self.key[0]!r} may still be read by a copy or post of ours, or by {peer}, which is "
            "silent",
            settled=lambda: asyncio.shield(self._quiescent),
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
    def key(self) -> OfferKey:
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
        return self._entry.site.joined.ticket(self.request, attempt=self.attempt)

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
        entry.grew()

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
        event = as_event(after, self._entry.site.geometry)
        try:
            self._entry.readiness.mark(layers, stop, event)
        except TypeError as error:
            raise TokensError(f"ready() takes a list of layers: {error}") from error
        self._entry.grew()

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
        try:
            content = bytes(memoryview(payload))
        except (TypeError, ValueError, BufferError) as error:
            raise RequestError(f"a payload is bytes, not {type(payload).__name__}; encode it first") from error
        if len(content) > 65536:
            raise TokensError(f"a payload has at most 65536 bytes, not {len(content)}")
        entry.payload, entry.finished = content, True
        entry.grew()

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
        failure = Failure(Status.CANCELLED, Code.OFFER_WITHDRAWN, "the offer was withdrawn")
        self._home.own(self._entry).end(Withdrawn(), failure)
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
