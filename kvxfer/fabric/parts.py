"""One post under way: cut into parts, posted a few at a time, polled, and turned into exactly one result.

Everything here runs on the fabric's thread and decides nothing about other posts; `kvxfer.fabric.pump` does.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import FabricError
from kvxfer.fabric.port import Descriptors, Handle, Operation, Outcome, Post, PostResult, Transport
from kvxfer.fabric.wire import Flight, Wire
from kvxfer.lazy import lazy

__all__ = ["Limits", "LivePost", "Poster", "Release", "cut", "restated"]


class Poster(Protocol):
    """What takes a part."""

    def post(self, peer: str, operation: Operation, local: Descriptors, remote: Descriptors) -> Handle:
        """As of `Transport`."""
        ...


Release: TypeAlias = Callable[[Handle], None]
"""Gives a handle back to the transport, once, and never raises `FabricError`."""

_SEVERITY: Final = {Outcome.DONE: 0, Outcome.STOPPED: 1, Outcome.FAILED: 2, Outcome.IN_DOUBT: 3}


_UNBOUNDED: Final = 1 << 62
_FLUSH_BYTES: Final = 64
_LISTED_MORE: Final = 16
"""How many times as many pieces a part has where they are taken as one list."""


@dataclass(frozen=True)
class Limits:
    """How a post is cut and how much of it is under way at once.

    Attributes:
        max_descriptors: Pieces in one part at most.
        max_post_bytes: Bytes in one part at most, where host memory is involved.
        max_parts_in_flight: Parts of one post that are posted and not yet ended, at most.
        no_progress_timeout: Seconds without any part posted or ended after which a post is given up.
        listed: Whether the pieces of a post between GPUs are taken as one list.
        flushes: Whether a part that is done says that every earlier one to its peer has ended.
    """

    max_descriptors: int
    max_post_bytes: int
    max_parts_in_flight: int
    no_progress_timeout: float
    listed: bool = False
    flushes: bool = False

    @lazy
    def between_gpus(self) -> "Limits":
        """Bounds of a post between two GPUs.

        Posting only starts a copy engine there, so bytes need no bound: what the bound protects against is a post that
        copies, with the thread inside it, as those of host memory do. Where pieces are taken as one list, a piece keeps
        the thread for a tenth of the time, and long lists move faster.
        """
        descriptors = self.max_descriptors * (_LISTED_MORE if self.listed else 1)
        return replace(self, max_post_bytes=_UNBOUNDED, max_descriptors=descriptors)


def restated(error: FabricError, *, disconnected: bool = False, in_doubt: bool = False) -> FabricError:
    """The same error as an object of its own: one that is raised to many would collect all their tracebacks."""
    again = FabricError(str(error), disconnected=error.disconnected or disconnected, in_doubt=in_doubt)
    again.__cause__ = error.__cause__
    return again


Slice: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]


def cut(local: NDArray[np.int64], remote: NDArray[np.int64], limits: Limits) -> list[Slice]:
    """Cut paired pieces into parts, in order.

    Args:
        local: int64 (N, 2), address and length in bytes.
        remote: int64 (N, 2), as long as `local` piece by piece.
        limits: Bounds of one part. A piece that is larger than `max_post_bytes` is split.

    Returns:
        (local, remote) pieces of each part. Every byte is in exactly one part; pieces of length 0 are dropped.

    Raises:
        FabricError: The two sides differ, a length is negative, or there is nothing to move.
    """
    if local.ndim != 2 or local.shape[1:] != (2,) or local.shape != remote.shape:
        raise FabricError(f"pieces must be two (N, 2) arrays of one shape, got {local.shape} and {remote.shape}")
    if len(local) == 1 and 0 < local.item(1) == remote.item(1) <= limits.max_post_bytes:
        return [(local, remote)]
    lengths = local[:, 1]
    if not np.array_equal(lengths, remote[:, 1]):
        raise FabricError("local and remote pieces differ in length")
    if not lengths.any() or int(lengths.min()) < 0:
        raise FabricError("pieces must have positive lengths and move at least one byte")
    local, remote = _split(local, remote, limits.max_post_bytes)
    ends = np.cumsum(local[:, 1])
    parts: list[Slice] = []
    first, before = 0, 0
    while first < len(ends):
        by_bytes = int(np.searchsorted(ends, before + limits.max_post_bytes, side="right"))
        last = min(first + limits.max_descriptors, by_bytes)
        parts.append((local[first:last], remote[first:last]))
        first, before = last, int(ends[last - 1])
    return parts


def _split(local: NDArray[np.int64], remote: NDArray[np.int64], limit_bytes: int) -> Slice:
    """Split every piece into ones of at most `limit_bytes`; drop the empty ones."""
    lengths = local[:, 1]
    if int(lengths.min()) > 0 and int(lengths.max()) <= limit_bytes:
        return local, remote
    pieces = -(-lengths // limit_bytes)
    owner = np.repeat(np.arange(len(lengths)), pieces)
    offset = (np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * limit_bytes
    length = np.minimum(lengths[owner] - offset, limit_bytes)
    return (
        np.stack([local[owner, 0] + offset, length], axis=1),
        np.stack([remote[owner, 0] + offset, length], axis=1),
    )


class LivePost:
    """A post from the moment the fabric's thread takes it to its result.

    The worst thing that happened decides the outcome: `IN_DOUBT` over `FAILED` over `STOPPED` over `DONE`. Once
    something has gone wrong nothing more is posted, and the result waits until the parts in flight have ended, or have
    made no progress for too long.

    A part that fails, while the peer is there, may have left some of its pieces in flight. If the transport can tell,
    a few bytes are moved once more then, to and from where they were: when that is done, so is all that came before,
    and the post has `FAILED`. It is tried once, as a part like any other.

    Args:
        post: What to move.
        limits: How to cut it.
        refusal: If given, nothing is posted and the result is `FAILED` with this error.
        wire: What is under way to its peer; is told of every part. Its own if left out.
    """

    def __init__(
        self, post: Post, limits: Limits, refusal: FabricError | None = None, *, wire: Wire | None = None
    ) -> None:
        self.post: Final = post
        self.wire: Final = wire or Wire()
        self.may_linger: bool = False
        """The transport may still touch this post's memory, here or there, although its result was made."""
        self._limits = limits
        self._parts: list[Slice] = []
        self._next = 0
        self._in_flight: deque[Flight] = deque()
        self._may_flush = limits.flushes  # once at most
        self._flush_due = False  # as soon as nothing is in flight any more
        self._flush: Flight | None = None
        self._watched: deque[Flight] = deque()  # given up, and still looked at
        self._verdict = Outcome.DONE
        self._error: FabricError | None = None
        self._posted_bytes = 0
        self._posting = 0.0
        self._first: float | None = None
        self._progress_at = 0.0
        try:
            if refusal is not None:
                raise refusal
            bounds = limits.between_gpus if post.local.kind == post.remote.kind == "VRAM" else limits
            self._parts = cut(post.local.pieces, post.remote.pieces, bounds)
        except FabricError as error:
            post.cell.kill()
            self._worsen(Outcome.FAILED, error)

    @property
    def wants_turn(self) -> bool:
        """Another part could be posted now."""
        if self._flush_due:
            return not self._in_flight
        return (
            self._verdict is Outcome.DONE
            and self._next < len(self._parts)
            and len(self._in_flight) < self._limits.max_parts_in_flight
        )

    @property
    def under_way(self) -> bool:
        """Parts are in flight."""
        return bool(self._in_flight)

    @property
    def unsure(self) -> bool:
        """Parts are in flight, or some of one that failed may be: a flush would tell."""
        return bool(self._in_flight) or self._flush_due

    @property
    def settled(self) -> bool:
        """Nothing is in flight and nothing more will be posted: the result can be made."""
        over = self._verdict is not Outcome.DONE or self._next == len(self._parts)
        return over and not self._in_flight and not self._flush_due

    def post_part(self, transport: Poster, now: Callable[[], float], clock: float) -> bool:
        """Post the next part, if the cell allows it. True if the transport took it.

        Args:
            transport: Where to.
            now: The runtime's clock, for the lease and for `posting`.
            clock: The pump's clock of lived time, for `silent`.
        """
        if self._flush_due:
            return self._post_flush(transport, now)
        local, remote = self._parts[self._next]
        whole = local is self.post.local.pieces
        nbytes = self.post.local.nbytes if whole else int(local[:, 1].sum())
        started = now()

        try:
            allowed = self.post.cell.post(now, lambda: self._launch(transport, local, remote, nbytes))
        except FabricError as error:
            self._fail(error, in_doubt=error.in_doubt)
            return False
        except Exception as error:
            self._fail(FabricError(f"posting raised {error!r}", in_doubt=True), in_doubt=True)
            raise
        if not allowed:
            self._worsen(Outcome.STOPPED, None)
            return False
        self.wire.posted(self._in_flight[-1], started)
        self._posting += now() - started
        self._first = started if self._first is None else self._first
        self._posted_bytes += nbytes
        self._next += 1
        self._progress_at = clock
        return True

    def _post_flush(self, transport: Poster, now: Callable[[], float]) -> bool:
        """Move the first few bytes once more. That is no progress: who gives up does so no later for it."""
        self._flush_due = self._may_flush = False
        local, remote = (side[:1].copy() for side in self._parts[0])
        nbytes = local[0, 1] = remote[0, 1] = min(_FLUSH_BYTES, int(local[0, 1]))
        started = now()
        try:
            if not self.post.cell.again(lambda: self._launch(transport, local, remote, nbytes)):
                return False
        except FabricError as error:
            self._fail(error, in_doubt=True)
            return False
        self._flush = self._in_flight[-1]
        self.wire.posted(self._flush, started)
        return True

    def _launch(self, transport: Poster, local: NDArray[np.int64], remote: NDArray[np.int64], nbytes: int) -> None:
        post = self.post
        here = post.local if local is post.local.pieces else replace(post.local, pieces=local)
        there = post.remote if remote is post.remote.pieces else replace(post.remote, pieces=remote)
        handle = transport.post(post.peer, post.operation, here, there)
        self._in_flight.append(Flight.of(handle, post, nbytes, len(local)))

    def poll(self, transport: Transport, release: Release, now: Callable[[], float], clock: float) -> bool:
        """Look at every part in flight and give back those that ended. True if any ended."""
        some_ended = False
        for _ in range(len(self._in_flight)):
            flight = self._in_flight[0]
            try:
                ended = transport.poll(flight.handle)
            except FabricError as error:
                self._fail(error, in_doubt=True)
                self.wire.lost(flight)
                ended = True
            else:
                if ended:
                    self._progress_at = clock
                    self.wire.ended(flight, now())
                    self._flushed(flight)
            self._in_flight.popleft()
            if ended:
                some_ended = True
                release(flight.handle)
            else:
                self._in_flight.append(flight)
        return some_ended

    def silent(self, clock: float) -> bool:
        """Parts are in flight and none was posted or ended for `no_progress_timeout` seconds."""
        return bool(self._in_flight) and clock - self._progress_at >= self._limits.no_progress_timeout

    def give_up(self, reason: FabricError, release: Release, *, watch: bool = False) -> None:
        """Settle it now: `IN_DOUBT` if anything is in flight, `FAILED` if nothing is.

        Args:
            reason: What the result says.
            release: Gives back every handle.
            watch: Keep them, for `ends_late`, if their ends tell the end of all of it.
        """
        self.post.cell.kill()
        self._flush_due = False
        watch = watch and (self._verdict is not Outcome.IN_DOUBT or self._flush in self._in_flight)
        if self._in_flight:
            self.may_linger = True
            self._worsen(Outcome.IN_DOUBT, restated(reason, in_doubt=True))
        elif not self.settled:
            self._worsen(Outcome.FAILED, reason)
        for flight in self._in_flight:
            self.wire.lost(flight)
        self._watched, self._in_flight = self._in_flight, deque()
        if not watch:
            self.let_go(release)

    @property
    def watched(self) -> bool:
        """It was given up, and has handles that may still end."""
        return bool(self._watched)

    def ends_late(self, transport: Transport, release: Release) -> bool:
        """Look at what was in flight when it was given up. True once all of it has ended as it should."""
        for flight in tuple(self._watched):
            try:
                ended = transport.poll(flight.handle)
            except FabricError:  # what that part has left in flight nobody can say
                self.let_go(release)
                return False
            if ended:
                self._watched.remove(flight)
                release(flight.handle)
        if not self._watched:
            self.may_linger = False
            self.post.cell.end()
        return not self._watched

    def let_go(self, release: Release) -> None:
        """Give back the handles of what was given up."""
        while self._watched:
            release(self._watched.popleft().handle)

    def cut_off(self) -> None:
        """The agent that had it under way is no more: it touches no memory of this side, unless it runs on."""
        if self.post.runs_on:
            return
        self.may_linger = False
        if self._error is not None:
            self._error = restated(self._error, disconnected=True, in_doubt=True)

    def result(self, now: float) -> PostResult:
        """Make the one result, for the caller to deliver. Ends the cell unless bytes may still move.

        A read whose peer is gone brings nothing any more; what was written may still be under way to it.
        """
        in_doubt, error = self._verdict is Outcome.IN_DOUBT, self._error
        if in_doubt and self.may_linger and error is not None and error.disconnected:
            # true of the part that failed first, but another one never ended
            error = FabricError(f"{error}, and not every part has ended", in_doubt=True)
        if not in_doubt or (self.post.operation is Operation.READ and not self.may_linger):
            self.post.cell.end()
        return PostResult(
            outcome=self._verdict,
            error=error,
            posted_bytes=self._posted_bytes,
            posting=self._posting,
            first=0.0 if self._first is None else self._first,
            finished=now,
        )

    def _fail(self, error: FabricError, *, in_doubt: bool) -> None:
        # a transport that reports the peer gone has ended its own work on that link; any other error says nothing
        self.may_linger |= in_doubt and not error.disconnected
        self._flush_due = self._may_flush and self.may_linger and not error.disconnected
        self._worsen(Outcome.IN_DOUBT if in_doubt else Outcome.FAILED, error)

    def _flushed(self, flight: Flight) -> None:
        """If this was the flush, everything before it has ended too."""
        if flight is self._flush and self._error is not None:
            self.may_linger = False
            self._verdict, self._error = Outcome.FAILED, restated(self._error)

    def _worsen(self, outcome: Outcome, error: FabricError | None) -> None:
        if _SEVERITY[outcome] > _SEVERITY[self._verdict]:
            self._verdict, self._error = outcome, error
