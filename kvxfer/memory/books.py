"""The books of memory: of the arena, and of the caller's own blocks.

The arena is one contiguous allocation in two shares: who holds which bytes of it, and who waits for some. The shares
are disjoint for ever, so that two workers that fetch from each other cannot wait for each other's bytes.

A block of the caller's is *held* while a fetch writes it, by that fetch alone. It is *in doubt* while a silent peer may
still write it (after a fetch) or read it (after an offer); blocks in doubt leave the books only by `settle`, on
evidence. Offers hold nothing, since requests that share a prefix offer the same blocks at once; they only `check`.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto, unique
from types import MappingProxyType
from typing import Final, NoReturn, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvxfer.errors import ArenaError, BlocksError

__all__ = [
    "ALIGNMENT",
    "TRANSITIONS",
    "Custody",
    "CustodySnapshot",
    "Extent",
    "ExtentState",
    "Gaps",
    "HolderSnapshot",
    "InvariantError",
    "Request",
    "Share",
    "ShareSnapshot",
    "WaitingQueue",
]

# --- extents
#
#     FREE               -> RESERVED      granted
#     RESERVED           -> WRITING       the address is told, or our own gather begins
#     RESERVED, WRITING  -> FREE          it is proven that nobody writes or reads the bytes any more
#     RESERVED, WRITING  -> QUARANTINED   somebody may still touch the bytes
#     QUARANTINED        -> FREE          there is evidence that nobody can
#
# Anything else is an `InvariantError`.


class InvariantError(RuntimeError):
    """The books would become wrong: an illegal transition, a second release, a stale handle.

    It means a defect in kvxfer, never a mistake of the caller or of a peer, and is therefore no `KvxferError`. The call
    that raised it changed nothing.
    """


@unique
class ExtentState(StrEnum):
    """What may be happening to an extent's bytes."""

    FREE = "free"
    """Nobody holds them; the next grant may."""
    RESERVED = "reserved"
    """Granted, and nobody has been told the address yet."""
    WRITING = "writing"
    """In use until given back: the peer writes them and our own copies read them, chunk after chunk, or we gather."""
    QUARANTINED = "quarantined"
    """In doubt: they leave this state only on evidence, never because time has passed."""


TRANSITIONS: Final[Mapping[ExtentState, frozenset[ExtentState]]] = MappingProxyType(
    {
        ExtentState.FREE: frozenset({ExtentState.RESERVED}),
        ExtentState.RESERVED: frozenset({ExtentState.WRITING, ExtentState.QUARANTINED, ExtentState.FREE}),
        ExtentState.WRITING: frozenset({ExtentState.QUARANTINED, ExtentState.FREE}),
        ExtentState.QUARANTINED: frozenset({ExtentState.FREE}),
    }
)
"""Every legal move: from each state, where it may go."""


class Extent(Struct, eq=False):
    """A run of arena bytes that one peer holds. Only the `Share` that granted it changes it.

    Two extents are equal only if they are the same grant: the same bytes granted again are another extent.
    """

    address: int  # first byte, as an absolute address in this process or on this device; a multiple of the alignment
    offset: int  # first byte, counted from the base of the share
    length: int  # bytes that it occupies: `nbytes` rounded up to the alignment
    nbytes: int  # bytes that were asked for; the rest is padding, and no part of any grant to the peer
    peer: str
    state: ExtentState = ExtentState.RESERVED  # where it is in the table above; FREE for ever once it was released
    reason: str = ""  # why it was quarantined, else empty


# --- free gaps


class Gaps:
    """Disjoint free runs within `[0, capacity)`, none of which touches another.

    Two sorted lists, one by offset (to join neighbours) and one by length (to find the best fit): each operation is a
    few bisections, and a list insertion that moves at most a few thousand pointers.
    """

    __slots__ = ("_by_length", "_capacity", "_lengths", "_offsets", "free", "largest")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._offsets: list[int] = []
        self._lengths: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []
        # bytes in all gaps together; bytes of the largest gap; 0 if nothing is free
        self.free = self.largest = capacity
        if capacity:
            self._offsets, self._lengths, self._by_length = [0], {0: capacity}, [(capacity, 0)]

    def take(self, length: int) -> int:
        """Take `length` bytes from the smallest gap that holds them, the lowest one of equals; returns their offset.

        Raises:
            InvariantError: no gap is so large.
        """
        index = bisect_left(self._by_length, (length, 0))
        if index == len(self._by_length):
            raise InvariantError(f"no gap holds {length} bytes: the largest has {self.largest}")
        gap, offset = self._by_length.pop(index)
        place = bisect_left(self._offsets, offset)
        del self._lengths[offset]
        if gap > length:  # what is left of it stands where it stood
            rest, left = offset + length, gap - length
            self._offsets[place] = rest
            self._lengths[rest] = left
            insort(self._by_length, (left, rest))
        else:
            del self._offsets[place]
        self.free -= length
        self.largest = self._by_length[-1][0] if self._by_length else 0
        return offset

    def give(self, offset: int, length: int) -> None:
        """Make `[offset, offset + length)` free, joined with the gaps on either side.

        Raises:
            InvariantError: part of it is free already, or outside the share.
        """
        end = offset + length
        offsets, lengths, by_length = self._offsets, self._lengths, self._by_length
        index = bisect_right(offsets, offset)
        before = offsets[index - 1] if index else None
        after = offsets[index] if index < len(offsets) else None
        before_end = before + lengths[before] if before is not None else 0
        limit = after if after is not None else self._capacity
        if length <= 0 or offset < before_end or end > limit:
            raise InvariantError(f"bytes {offset} to {end} of {self._capacity} are free already or out of range")
        start, first, last = offset, index, index  # of the gaps from `first` to `last` one is made
        if before is not None and before_end == offset:
            start, first = before, index - 1
        if after is not None and after == end:
            end, last = end + lengths[after], index + 1
        for joined in offsets[first:last]:
            del by_length[bisect_left(by_length, (lengths.pop(joined), joined))]
        offsets[first:last] = [start]
        lengths[start] = end - start
        insort(by_length, (end - start, start))
        self.free += length
        self.largest = by_length[-1][0]


# --- who waits


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A reservation that was asked for. A handle: the `Share` knows what became of it."""

    peer: str
    nbytes: int
    length: int  # bytes that it will occupy: `nbytes` rounded up to the alignment of the share


class WaitingQueue:
    """Waiting requests. The peer at the front of the round is the one that was served longest ago, or never.

    A peer that is served goes to the back of the round; a peer that cannot be served keeps its place, so it comes to
    the front and stays there. Requests of one peer are served in the order in which they came. How often a request was
    overtaken is kept here; what follows from that is the share's matter.
    """

    def __init__(self) -> None:
        self._round: OrderedDict[str, dict[Request, None]] = OrderedDict()
        # of each that waits, how often one behind it was granted while it could have been, but for want of a gap
        self.overtaken: Final[dict[Request, int]] = {}

    def __len__(self) -> int:
        return len(self.overtaken)

    @property
    def peers(self) -> Collection[str]:
        """Peers with a waiting request, in the order of the round."""
        return self._round.keys()

    def heads(self) -> list[Request]:
        """The waiting request of each peer whose turn it is, in the order of the round."""
        return [next(iter(own)) for own in self._round.values()]

    def requests(self) -> list[Request]:
        """Every waiting request, peer by peer."""
        return [request for own in self._round.values() for request in own]

    def add(self, request: Request) -> None:
        """Put `request` behind those of its peer; a peer that did not wait joins at the back of the round."""
        self._round.setdefault(request.peer, {})[request] = None
        self.overtaken[request] = 0

    def remove(self, request: Request) -> None:
        """Take `request` out, whatever its place. Harmless if it does not wait."""
        if self.overtaken.pop(request, None) is None:
            return
        own = self._round[request.peer]
        del own[request]
        if not own:
            del self._round[request.peer]

    def serve(self, request: Request) -> None:
        """Take `request` out because it was granted; its peer goes to the back of the round."""
        self.remove(request)
        if request.peer in self._round:
            self._round.move_to_end(request.peer)


# --- what the books show


@dataclass(frozen=True, slots=True)
class ShareSnapshot:
    """One share at one moment. The bytes by state add up to the capacity."""

    name: str
    capacity_bytes: int
    free_bytes: int
    reserved_bytes: int
    writing_bytes: int
    quarantined_bytes: int
    largest_gap_bytes: int
    waiting_requests: int
    waiting_bytes: int
    extents: list[Extent]  # copies of those that are held, by offset


# --- a share
#
# Synchronous and deterministic: no clock, no loop, no memory is touched. `request` and `withdraw` note what is wanted,
# `advance` decides, and the caller acts on the decisions. How long somebody waits is the caller's matter.
#
# Who is served. Peers take turns, each by the order of its requests. At its turn a request
#
# - is *held back*, and nobody waits for it, while its peer has more than a quarter of the share in quarantine, while
#   its peer holds so much that this request would go beyond its cap, or while only the end of a quarantine can make
#   room;
# - is *granted* if a gap holds it;
# - otherwise *blocks*: it keeps its place, and at most `max_overtakes` requests behind it may be granted before it.
#   Then the share grants nothing before it: since every extent can be finished without another grant, what is in use
#   drains, the gaps join, and the request is served.
#
# A peer's cap is three quarters of the share while no other peer waits, and otherwise the share divided by the number
# of peers that hold or wait. A peer whose only bytes are in quarantine, or that holds none, may have one request
# beyond the cap: else a request larger than a fair share would never be served. So every request that fits the share
# is granted sooner or later, as long as extents are released and quarantines end.

ALIGNMENT: Final = 512
"""Bytes: every extent begins at a multiple of it and occupies a multiple; any access width needs no more."""


class _Turn(Enum):
    """What a request can expect at its turn."""

    FITS = auto()
    BLOCKS = auto()
    HELD_BACK = auto()


class Share:
    """The books of one direction's share of the arena."""

    max_overtakes = 16  # requests that may be granted before one that waits for a gap; 0 for strict turns

    def __init__(self, name: str, *, base: int, capacity: int) -> None:
        """Make the books of an empty share.

        Args:
            name: What messages and metrics call it.
            base: Address of the first byte, a multiple of `ALIGNMENT`.
            capacity: Bytes from there on; what exceeds a multiple of `ALIGNMENT` is left unused.
        """
        self.name: Final = name
        self.base: Final = base
        self.capacity: Final = capacity // ALIGNMENT * ALIGNMENT
        self._alone = self.capacity * 3 // 4
        self._gaps = Gaps(self.capacity)
        self._queue = WaitingQueue()
        self.live: Final[dict[Extent, None]] = {}  # extents that are held, in the order in which they were granted
        self.held: Final[dict[str, int]] = {}  # by peer, bytes that it holds, quarantined ones included
        self._doubtful: dict[str, int] = {}  # by peer, those
        self._quarantined: list[tuple[int, int]] = []  # offset and length of those extents, sorted
        self._doubt_grew = False  # since those who wait were last looked at for that
        self._reach: int | None = None  # see `_reachable`; None if it is to be seen anew

    # --- asking

    def request(self, peer: str, nbytes: int) -> Request:
        """Ask for `nbytes` for `peer`. Grants nothing yet: call `advance`.

        Raises:
            ArenaError: it can never be served: it is larger than the share (which is also the most that one peer may
                ever hold), or more than half of that is in quarantine and none of what remains holds the request.
        """
        length = nbytes + -nbytes % ALIGNMENT
        if length > self.capacity:
            raise ArenaError(
                f"a reservation of {nbytes} bytes ({length} with alignment) can never be served: the {self.name} share "
                f"of the arena, and the most that one peer may hold, is {self.capacity} bytes; "
                "raise arena_bytes or lower chunk_bytes"
            )
        if self._hopeless(length):
            raise self._quarantine_error(nbytes, length)
        request = Request(peer, nbytes, length)
        self._queue.add(request)
        return request

    def take(self, peer: str, nbytes: int, most: int = 1, state: ExtentState = ExtentState.RESERVED) -> list[Extent]:
        """Up to so many extents of at least `nbytes` bytes for `peer` that are there right now, if nobody waits.

        They are what requests would be granted by the next `advance`, without any; `state` is WRITING where their
        addresses are told at once.
        """
        found: list[Extent] = []
        length = nbytes + -nbytes % ALIGNMENT
        contenders = len(self.held) + (peer not in self.held)
        while len(found) < most and not self._queue.overtaken:
            if self._judge(peer, length, contenders, alone=True) is not _Turn.FITS:
                break
            found.append(self._reserve(peer, nbytes, length, state))
        return found

    def most_extents(self, nbytes: int) -> int:
        """How many extents of so many bytes one peer may hold while it is alone; at least 1."""
        return max(1, self._alone // max(ALIGNMENT, nbytes + -nbytes % ALIGNMENT))

    def withdraw(self, request: Request) -> None:
        """Give up `request`. Harmless if it waits no longer; what it was granted is given back with `release`."""
        self._queue.remove(request)

    def advance(self) -> list[tuple[Request, Extent | ArenaError]]:
        """Decide what can be decided: whom to serve, and what is hopeless.

        Call it after `request`, `withdraw`, `release`, `quarantine` and `settle`.

        Returns:
            Requests served, in that order, each with its extent in state RESERVED, which is the caller's from now on.
            Then those that can no longer be served, because more than half of the share is in quarantine and none of
            what remains holds them; each with the exception to raise.
        """
        refused: list[tuple[Request, ArenaError]] = []
        grew, self._doubt_grew = self._doubt_grew, False
        for request in self._queue.requests() if grew else ():
            if self._hopeless(request.length):
                self._queue.remove(request)
                refused.append((request, self._quarantine_error(request.nbytes, request.length)))
        granted: list[tuple[Request, Extent]] = []
        if self._queue.overtaken:
            # a grant moves its peer from those that wait to those that hold: the number of both stays the same
            contenders = len(self.held.keys() | set(self._queue.peers))
            while self._serve_round(contenders, granted):
                pass
        return [*granted, *refused]

    def expiry_error(self, request: Request, waited: float) -> ArenaError:
        """The exception that tells the owner of a `request` that he has waited so many seconds in vain."""
        return ArenaError(
            f"a reservation of {request.nbytes} bytes for {request.peer} waited {waited:.3f} s for the {self.name} "
            f"share of the arena and passed its deadline: of {self.capacity} bytes {self._gaps.free} are free "
            f"(largest gap {self._gaps.largest}), {self.quarantined_bytes()} are in quarantine, and "
            f"{len(self._queue)} more requests wait; raise arena_bytes or the time-out"
        )

    # --- the life of an extent: an `InvariantError` if it is stale, of another share, or in another state

    def begin_writing(self, extent: Extent, more: int = 0) -> list[Extent]:
        """RESERVED -> WRITING, before anybody is told the address: it, and up to `more` like it that are free now."""
        self._move(extent, ExtentState.WRITING)
        return [extent, *self.take(extent.peer, extent.nbytes, more, ExtentState.WRITING)]

    def release(self, extent: Extent) -> None:
        """RESERVED or WRITING -> FREE, exactly once; the bytes may be granted again at once.

        The caller vouches that nobody reads or writes them: the address was never told, or a terminal result says that
        no write is or will be posted, and our own copies there have ended. Without such evidence, `quarantine` it.
        """
        if extent.state is ExtentState.QUARANTINED:
            raise InvariantError(f"{extent} is in quarantine: only settle(), on evidence, frees it")
        self._move(extent, ExtentState.FREE)

    def quarantine(self, extent: Extent, reason: str) -> None:
        """RESERVED or WRITING -> QUARANTINED: somebody may still touch the bytes, because of `reason`."""
        self._move(extent, ExtentState.QUARANTINED)
        extent.reason = reason

    def settle(self, extent: Extent) -> None:
        """QUARANTINED -> FREE, exactly once: there is evidence that nobody can touch the bytes any more."""
        if extent.state not in {ExtentState.QUARANTINED, ExtentState.FREE}:
            raise InvariantError(f"{extent} is not in quarantine, so there is nothing to settle")
        self._move(extent, ExtentState.FREE)

    # --- looking

    def quarantined_bytes(self) -> int:
        """Bytes in quarantine."""
        return sum(self._doubtful.values())

    def snapshot(self) -> ShareSnapshot:
        """What is where now. It costs time in proportion to the extents and the waiting requests."""
        by_state = Counter[ExtentState]()
        for extent in self.live:
            by_state[extent.state] += extent.length
        return ShareSnapshot(
            name=self.name,
            capacity_bytes=self.capacity,
            free_bytes=self._gaps.free,
            reserved_bytes=by_state[ExtentState.RESERVED],
            writing_bytes=by_state[ExtentState.WRITING],
            quarantined_bytes=by_state[ExtentState.QUARANTINED],
            largest_gap_bytes=self._gaps.largest,
            waiting_requests=len(self._queue),
            waiting_bytes=sum(request.length for request in self._queue.requests()),
            extents=sorted(map(copy, self.live), key=lambda extent: extent.offset),
        )

    # --- inside

    def _serve_round(self, contenders: int, granted: list[tuple[Request, Extent]]) -> bool:
        """Give every waiting peer one turn; append what was granted. False if a further round would grant nothing."""
        served, overtaken = False, self._queue.overtaken
        passed: list[Request] = []
        for request in self._queue.heads():
            turn = self._judge(request.peer, request.length, contenders, alone=len(self._queue.peers) == 1)
            if turn is _Turn.BLOCKS:
                if overtaken[request] >= self.max_overtakes:
                    return False
                passed.append(request)
            elif turn is _Turn.FITS:
                granted.append((request, self._reserve(request.peer, request.nbytes, request.length)))
                self._queue.serve(request)
                served = True
                for blocked in passed:
                    overtaken[blocked] += 1
                if any(overtaken[blocked] >= self.max_overtakes for blocked in passed):
                    return False
        return served

    def _judge(self, peer: str, length: int, contenders: int, *, alone: bool) -> _Turn:
        """Whether `length` bytes can be given to a peer now; it is `alone` if no other waits."""
        if (held := self.held.get(peer)) is not None:
            doubtful = self._doubtful.get(peer, 0)
            cap = self._alone if alone else self.capacity // contenders
            if doubtful * 4 > self.capacity or (held > doubtful and held + length > cap):
                return _Turn.HELD_BACK
        if length <= self._gaps.largest:
            return _Turn.FITS
        return _Turn.BLOCKS if length <= self._reachable() else _Turn.HELD_BACK

    def _reserve(self, peer: str, nbytes: int, length: int, state: ExtentState = ExtentState.RESERVED) -> Extent:
        offset = self._gaps.take(length)
        extent = Extent(self.base + offset, offset, length, nbytes, peer, state)
        self.live[extent] = None
        self.held[peer] = self.held.get(peer, 0) + length
        return extent

    def _move(self, extent: Extent, target: ExtentState) -> None:
        """Carry out one transition of an extent: beside `_reserve` the only place where a state and a count change."""
        source = extent.state
        if extent not in self.live:
            why = "was released already" if source is ExtentState.FREE else "belongs to another share"
            raise InvariantError(f"{extent} {why}")
        if target not in TRANSITIONS[source]:
            legal = ", ".join(sorted(state.name for state in TRANSITIONS[source]))
            raise InvariantError(f"an extent cannot go from {source.name} to {target.name}; from there only to {legal}")
        peer, length = extent.peer, extent.length
        if target is ExtentState.QUARANTINED:
            self._doubtful[peer] = self._doubtful.get(peer, 0) + length
            insort(self._quarantined, (extent.offset, length))
            self._doubt_grew, self._reach = True, None
        elif source is ExtentState.QUARANTINED:
            del self._quarantined[bisect_left(self._quarantined, (extent.offset, length))]
            self._reach = None
            if left := self._doubtful.pop(peer) - length:
                self._doubtful[peer] = left
        if target is ExtentState.FREE:
            self._gaps.give(extent.offset, length)
            del self.live[extent]
            if left := self.held.pop(peer) - length:
                self.held[peer] = left
        extent.state = target

    def _hopeless(self, length: int) -> bool:
        """Whether so much is in quarantine that a request of `length` bytes had better fail now than wait."""
        return length > self._reachable() and self.quarantined_bytes() * 2 > self.capacity

    def _reachable(self) -> int:
        """Bytes of the largest run without a quarantined byte: no gap can be larger before a quarantine ends."""
        if self._reach is None:
            largest = end = 0
            for offset, length in self._quarantined:
                largest, end = max(largest, offset - end), offset + length
            self._reach = max(largest, self.capacity - end)
        return self._reach

    def _quarantine_error(self, nbytes: int, length: int) -> ArenaError:
        names = ", ".join(f"{peer} ({held} bytes)" for peer, held in sorted(self._doubtful.items()))
        return ArenaError(
            f"a reservation of {nbytes} bytes ({length} with alignment) cannot be served: of the {self.capacity} bytes "
            f"of the {self.name} share {self.quarantined_bytes()} are in quarantine, and the largest run beside them "
            f"is {self._reachable()} bytes; silent peers may still touch the rest: {names}"
        )


# --- the caller's blocks

I64: TypeAlias = NDArray[np.int64]

Blocks: TypeAlias = Mapping[str, Sequence[int] | I64]
"""Block ids by group, not negative."""


@dataclass(frozen=True, slots=True)
class HolderSnapshot:
    """One holder: the number of its blocks, and whether they are in doubt."""

    blocks: int
    in_doubt: bool


@dataclass(frozen=True, slots=True)
class CustodySnapshot:
    """All blocks in the books at one moment."""

    held_blocks: int
    doubtful_blocks: int  # blocks in doubt; one that two offers left in doubt counts twice
    holders: Mapping[str, HolderSnapshot]


class _Entry(Struct):
    """What one holder has in the books."""

    blocks: dict[str, I64]
    in_doubt: bool = False
    reads: bool = False


class _Entries(dict[str, _Entry]):
    def __missing__(self, holder: str) -> NoReturn:
        raise InvariantError(f"{holder} has no blocks in the books (any more)")


@dataclass(slots=True)
class _GroupBooks:
    # by id, for as many as were asked about: whether a fetch writes the block
    marks: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    # the offers after which an id may still be read
    readers: dict[int, list[str]] = field(default_factory=dict[int, list[str]])


class Custody:
    """The books of the caller's blocks. A holder is the name of a transfer or an offer, as messages give it."""

    def __init__(self) -> None:
        self._groups: defaultdict[str, _GroupBooks] = defaultdict(_GroupBooks)
        self._entries: Final = _Entries()

    def check(self, blocks: Blocks) -> None:
        """Refuse blocks that a fetch writes or that are in doubt: an offer must not read them, nor a fetch write them.

        Raises:
            BlocksError: the first such block; the message names its group, position in the list, id and holder.
        """
        for group, listed in blocks.items():
            books, ids = self._groups[group], np.asarray(listed, np.int64)
            if not len(ids):
                continue
            if (most := int(ids[ids.argmax()])) >= len(books.marks):
                books.marks = np.concatenate([books.marks, np.zeros(most + 1 - len(books.marks), np.bool_)])
            taken = books.marks[ids]
            if books.readers:
                taken |= np.fromiter((block in books.readers for block in ids.tolist()), np.bool_, len(ids))
            if taken[taken.argmax()]:
                first = int(np.flatnonzero(taken)[0])
                self._refuse(group, first, int(ids[first]), books)

    def hold(self, holder: str, blocks: Blocks) -> None:
        """Note that the fetch `holder` writes `blocks`, each once, alone until `release`, or `doubt` and `settle`.

        All or nothing: if it raises, nothing was noted.

        Raises:
            BlocksError: a block is held or in doubt; the message names group, position, id and holder.
            InvariantError: `holder` has blocks in the books already.
        """
        if holder in self._entries:
            raise InvariantError(f"{holder} has blocks in the books already")
        self.check(blocks)
        held = {group: np.array(ids, np.int64) for group, ids in blocks.items()}
        for group, ids in held.items():
            self._groups[group].marks[ids] = True
        self._entries[holder] = _Entry(held)

    def release(self, holder: str) -> None:
        """The fetch `holder` is over and no peer will write its blocks any more. Exactly once.

        Raises:
            InvariantError: `holder` holds nothing (any more), or its blocks are in doubt.
        """
        entry = self._entries[holder]
        if entry.in_doubt:
            raise InvariantError(f"the blocks of {holder} are in doubt: only settle(), on evidence, frees them")
        del self._entries[holder]
        for group, ids in entry.blocks.items():
            self._groups[group].marks[ids] = False

    def doubt(self, holder: str) -> None:
        """A silent peer may still write the blocks that the fetch `holder` holds: refuse them until `settle`.

        Raises:
            InvariantError: `holder` holds nothing, or its blocks are in doubt already.
        """
        entry = self._entries[holder]
        if entry.in_doubt:
            raise InvariantError(f"the blocks of {holder} are in doubt already")
        entry.in_doubt = True

    def doubt_reads(self, holder: str, blocks: Blocks) -> None:
        """Somebody silent may still read `blocks` that the offer `holder` offered: refuse them until `settle`.

        Unlike a fetch's, such blocks may be in doubt for several offers at once; the last one that settles frees them.

        Raises:
            InvariantError: `holder` has blocks in the books already.
        """
        if holder in self._entries:
            raise InvariantError(f"{holder} has blocks in the books already")
        taken = {group: np.unique(np.asarray(ids, np.int64)) for group, ids in blocks.items()}
        for group, ids in taken.items():
            readers = self._groups[group].readers
            for block in ids.tolist():
                readers.setdefault(block, []).append(holder)
        self._entries[holder] = _Entry(taken, in_doubt=True, reads=True)

    def settle(self, holder: str) -> None:
        """There is evidence that no peer can touch the blocks of `holder` any more. Exactly once.

        Raises:
            InvariantError: `holder` has no blocks in doubt (any more).
        """
        entry = self._entries[holder]
        if not entry.in_doubt:
            raise InvariantError(f"the blocks of {holder} are not in doubt, so there is nothing to settle")
        del self._entries[holder]
        for group, ids in entry.blocks.items():
            books = self._groups[group]
            if entry.reads:
                for block in ids.tolist():
                    books.readers[block].remove(holder)
                    if not books.readers[block]:
                        del books.readers[block]
            else:
                books.marks[ids] = False

    def snapshot(self) -> CustodySnapshot:
        """Who holds how many blocks now."""
        holders = {
            name: HolderSnapshot(sum(map(len, entry.blocks.values())), entry.in_doubt)
            for name, entry in self._entries.items()
        }
        return CustodySnapshot(
            held_blocks=sum(row.blocks for row in holders.values() if not row.in_doubt),
            doubtful_blocks=sum(row.blocks for row in holders.values() if row.in_doubt),
            holders=holders,
        )

    def _refuse(self, group: str, position: int, block: int, books: _GroupBooks) -> NoReturn:
        written = block < len(books.marks) and bool(books.marks[block])
        holder = self._writer(group, block) if written else books.readers[block][0]
        if not self._entries[holder].in_doubt:
            why = f"{holder} is fetching into it; wait until that fetch has returned or raised"
        elif written:
            why = f"a silent peer of {holder} may still write it; await settled() of its MemoryInDoubt"
        else:
            why = f"a silent peer of {holder} may still read it; await settled() of its MemoryInDoubt"
        raise BlocksError(f"block {block} of group {group!r} (position {position}) is in use: {why}")

    def _writer(self, group: str, block: int) -> str:
        """Whose a marked block is."""
        return next(
            name
            for name, entry in self._entries.items()
            if not entry.reads and group in entry.blocks and (entry.blocks[group] == block).any()
        )
