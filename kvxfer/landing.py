"""One chunk on its way in: memory, grant, arrival and scatter; or, on `pull`, a read."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from kvxfer.copy.mover import Copy
from kvxfer.copy.port import CopyJob, CopyOutcome, Outcome, Passage, Post
from kvxfer.copy.tables import NOTHING, Tables
from kvxfer.desk import Desk
from kvxfer.errors import Code, KvxferError, ProtocolError
from kvxfer.fabric.port import Operation
from kvxfer.geometry import Pieces, SumPlan
from kvxfer.mapped import may_be_elsewhere
from kvxfer.memory import Extent, ExtentState, Request
from kvxfer.ownwork import MakePost
from kvxfer.planning import Bound, Part, block_pieces
from kvxfer.protocol.messages import Grant, KvAgentResult, Message, Status
from kvxfer.protocol.receiving import Receiving
from kvxfer.protocol.sending import Failure
from kvxfer.protocol.session import PeerInfo
from kvxfer.rebuilding import runs_on
from kvxfer.site import Site, no_hold
from kvxfer.tally import Tally

__all__ = ["Copied", "Host", "Landing", "Reading", "seen"]

_T = TypeVar("_T")
_FLUSH: Final = replace(NOTHING, from_nic=True)
Copied: TypeAlias = Callable[[CopyOutcome], None]
"""What goes on with how a copy ended."""


class Host(Protocol):
    """The transfer that a chunk belongs to, as the chunk needs it."""

    @property
    def site(self) -> Site:
        """The worker."""
        ...

    @property
    def peer(self) -> PeerInfo:
        """The prefill rank."""
        ...

    @property
    def machine(self) -> Receiving:
        """The sans-I/O state."""
        ...

    @property
    def tally(self) -> Tally:
        """Counts."""
        ...

    @property
    def moving(self) -> bool:
        """Whether anything new may be begun."""
        ...

    def gate(self) -> int:
        """What a grant says of the gate that it leads through."""
        ...

    @property
    def patience(self) -> float:
        """Seconds to wait for memory at most; may be infinity."""
        ...

    def run(self, step: Callable[..., None], *arguments: Any) -> None:
        """Run a step; what it raises stops the transfer."""
        ...

    def plan(self, make: Callable[[], _T], then: Callable[[_T], None], *, rows: int) -> None:
        """Make a plan and go on with it."""
        ...

    def when(self, future: "asyncio.Future[_T]", then: Callable[[_T], None]) -> None:
        """Go on with what a future brings."""
        ...

    def say(self, *messages: Message) -> None:
        """Send to the prefill rank."""
        ...

    def when_writable(self, then: Callable[[bool], None]) -> None:
        """Go on with True once the caller's blocks may be written, with False if the transfer was given up before."""
        ...

    def write(self, tables: Tables, nbytes: int, then: Copied, sums: SumPlan | None = None) -> None:
        """Copy about so many bytes into the caller's blocks, or add up what is there."""
        ...

    def read(self, post: MakePost, then: Copied) -> Copy:
        """Post a read into the caller's blocks."""
        ...

    def stop(self, failure: Failure) -> None:
        """Give up the transfer."""
        ...

    def landed(self, chunk: int, nbytes: int) -> None:
        """A chunk is where it belongs, and visible."""
        ...


class Landing:
    """A chunk that the peer writes: into staging memory, to be scattered from there, or in place.

    Args:
        host: Its transfer.
        chunk: Its number.
        desk: Where its memory comes from. In place the extent is no memory, but its part of what may be under way.
        staged: Whether it is scattered from staging memory.
        extent: Memory that the peer was granted for it already.
    """

    def __init__(self, host: Host, chunk: int, desk: Desk, *, staged: bool, extent: Extent | None = None) -> None:
        self._host: Final = host
        self._chunk: Final = chunk
        self._desk: Final = desk
        self._staged: Final = staged
        self._part: Part | None = None
        self._asked_at = host.site.now()
        self._granted_at = self._asked_at
        self._request: Request | None = None
        self._extent = extent  # in the peer's hands
        self._early: KvAgentResult | None = None  # came before the plan was made
        self._landed: Extent | None = None  # ours again, to be scattered from

    @property
    def holds(self) -> bool:
        """Whether it holds memory: in the peer's hands, or to be scattered from."""
        return self._extent is not None or self._landed is not None

    def begin(self, bound: Bound) -> None:
        """The chunk is ready at the peer, and the window has room."""
        self._host.plan(partial(bound.part, self._chunk), self._planned, rows=bound.part_rows)

    def arrived(self, message: KvAgentResult) -> None:
        """Its bytes are in the memory that was granted."""
        self._host.tally.arrived(self._granted_at, self._host.site.now(), message.timings)
        self._early = message
        self._take_over()

    def _take_over(self) -> None:
        """What has arrived is this side's again, once it is known what that is."""
        host, message, extent, part = self._host, self._early, self._extent, self._part
        if message is None or extent is None or part is None or not host.moving:
            return  # if it is being stopped, `settle` gives the memory back
        if message.bytes != part.bytes:
            host.stop(_differs(self._chunk, part.bytes, message.bytes))
            return
        self._extent = None
        if self._staged:
            self._desk.share.scatter(extent)
            self._landed = extent
            host.run(host.when_writable, self._scatter)
        else:
            self._desk.release(extent)
            seen(host, self._chunk, part.bytes)

    def give_up(self) -> None:
        """Wait for nothing any more."""
        if self._request is not None:
            self._desk.withdraw(self._request)
            self._request = None

    def settle(self, *, lost: bool) -> None:
        """The transfer has ended at the peer, so its memory is ours again; or the peer is lost, and may still write."""
        extent = self._extent
        if extent is None:
            return
        if not lost:
            self._extent = None
            give_back = self._desk.settle if extent.state is ExtentState.QUARANTINED else self._desk.release
            give_back(extent)
        elif extent.state is not ExtentState.QUARANTINED:
            self._desk.quarantine(extent, f"{self._host.peer.name} is silent")

    def _planned(self, part: Part) -> None:
        self._part = part
        if self._extent is not None:
            if part.staged_bytes > self._extent.nbytes:
                raise ProtocolError(
                    f"a chunk of {part.staged_bytes} bytes was said to fit into {self._extent.nbytes} granted ahead"
                )
            self._take_over()
        elif self._staged:
            self._ask(part.staged_bytes)
        else:
            self._host.when_writable(lambda writable: self._ask(part.bytes) if writable else None)

    def _ask(self, nbytes: int) -> None:
        host, desk, nbytes = self._host, self._desk, max(1, nbytes)
        if not host.moving:
            return
        if (extent := desk.take(host.peer.account, nbytes)) is not None:
            self._grant(extent)
            return
        admitted = partial(host.run, self._admitted)
        who = host.machine.transfer  # its number: a request may be kept for a while, and would keep the whole transfer
        self._request = desk.ask(host.peer.account, nbytes, host.patience, admitted, owner=who)
        if not self._host.moving:  # somebody gave up who was told in the same round of decisions
            self.give_up()

    def _admitted(self, answer: Extent | KvxferError) -> None:
        self._request = None
        if isinstance(answer, KvxferError):
            raise answer
        if self._host.moving:
            self._grant(answer)
        else:
            self._desk.release(answer)

    def _grant(self, extent: Extent) -> None:
        """Put memory into the peer's hands."""
        host, share = self._host, self._desk.share
        share.write(extent)
        self._extent = extent
        now = host.site.now()
        host.tally.spent("queued", self._asked_at, now)
        self._granted_at = now
        lease = host.site.lease_ms(share.held_bytes(host.peer.account))
        place = (extent.address, extent.nbytes) if self._staged else (0, 0)
        host.say(*host.machine.grant([Grant(self._chunk, *place)], lease, host.gate()))

    def _scatter(self, writable: bool) -> None:
        extent, part = self._landed, self._part
        if extent is None or part is None or not writable:
            self._drop()
            return
        try:
            tables = part.scatter(extent.address)
            if _by_nic(self._host, staged=True):
                tables = replace(tables, from_nic=True)
            self._host.write(tables, part.bytes, self._scattered)
        except KvxferError:
            self._drop()
            raise

    def _scattered(self, outcome: CopyOutcome) -> None:
        self._drop()
        if outcome.error is not None:
            raise outcome.error
        self._host.tally.spent("scattering", outcome.started, outcome.finished)
        self._host.landed(self._chunk, self._part.bytes if self._part is not None else 0)

    def _drop(self) -> None:
        """Give back the memory that was scattered from."""
        extent, self._landed = self._landed, None
        if extent is not None:
            self._desk.release(extent)


class Reading:
    """A chunk that this side reads into place; the peer then confirms that the offer was held meanwhile.

    Args:
        host: Its transfer.
        chunk: Its number.
        until: When it may be read no more, by the runtime's clock.
        passage: What leads to what is read.
        renewals: How often the prefill rank had made its agent anew when it announced the chunk.
    """

    def __init__(self, host: Host, chunk: int, until: float, passage: Passage | None, renewals: int) -> None:
        self._host: Final = host
        self._chunk: Final = chunk
        self._until: Final = until
        self._passage: Final = passage
        self._renewals: Final = renewals
        self._pieces: Pieces | None = None
        self._posted: Copy | None = None
        self._release: Callable[[], None] = no_hold

    @property
    def holds(self) -> bool:
        """The peer holds no memory of ours."""
        return False

    def begin(self, bound: Bound) -> None:
        """The chunk may be read."""
        chunk = self._chunk

        def pieces() -> Pieces:
            return bound.chunk(chunk).listed()

        self._host.plan(pieces, self._planned, rows=bound.chunk_pieces)

    def arrived(self, message: KvAgentResult) -> None:
        """The peer confirms that what was read was not changed meanwhile."""
        host, nbytes = self._host, int(self._pieces.nbytes.sum()) if self._pieces is not None else 0
        host.tally.began(host.site.now())
        if message.bytes != nbytes:
            host.stop(_differs(self._chunk, nbytes, message.bytes))
        elif host.moving:
            seen(host, self._chunk, nbytes)

    def give_up(self) -> None:
        """Post nothing any more."""
        if self._posted is None:
            self._release()
        else:
            self._host.site.mover.cancel(self._posted)

    def settle(self, *, lost: bool) -> None:
        """It holds no memory."""

    def _planned(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._host.when_writable(self._connect)

    def _connect(self, writable: bool) -> None:
        site, peer = self._host.site, self._host.peer
        if writable:
            self._release = site.lanes.hold(peer)
            self._host.when(site.lanes.connect(peer, self._renewals), self._read)

    def _read(self, lane: str) -> None:
        host, pieces, chunk = self._host, self._pieces, self._chunk
        if pieces is None or not host.moving:
            return
        host.machine.reading([chunk])
        if not len(pieces):  # a window in which no group has a row
            self._release()
            host.say(*host.machine.landed([chunk]))
            return
        local = block_pieces(host.site.geometry, pieces.dst, pieces.nbytes)
        remote = block_pieces(host.site.plans.geometry(host.peer), pieces.src, pieces.nbytes)
        host.tally.descriptors += len(pieces)
        stays = runs_on(host.site, host.peer)

        def job(done: Copied, late: Callable[[bool], None]) -> CopyJob:
            post = Post(lane, Operation.READ, local, remote, stays, late)
            return CopyJob(
                NOTHING, done, until=self._until, passage=self._passage, owner=host.machine.transfer, post=post
            )

        self._posted = host.read(job, self._has_read)

    def _has_read(self, result: CopyOutcome) -> None:
        host, self._posted = self._host, None
        self._release()
        if result.posted:
            host.tally.spent("posting", result.posted, result.posted + result.posting)
            host.tally.spent("wire", result.posted, result.finished)
        if result.outcome is not Outcome.DONE:
            reason = str(result.error or "the lease ran out before the chunk was read")
            host.stop(Failure(Status.FAILED, Code.FABRIC if result.error else Code.TIMEOUT, reason))
        elif host.moving:
            host.say(*host.machine.landed([self._chunk]))


def seen(host: Host, chunk: int, nbytes: int) -> None:
    """A chunk is in the caller's blocks, and has landed once the device sees it too."""

    def flushed(outcome: CopyOutcome) -> None:
        if outcome.error is not None:
            raise outcome.error
        host.landed(chunk, nbytes)

    if _by_nic(host, staged=False):
        host.write(_FLUSH, 0, flushed)
    else:
        host.landed(chunk, nbytes)


def _by_nic(host: Host, *, staged: bool) -> bool:
    """Whether a NIC writes what comes from the peer into memory of a GPU."""
    site = host.site
    if staged and (site.staging is None or site.staging.kind != "VRAM"):
        return False
    return site.geometry.kind == "cuda" and may_be_elsewhere(host.peer.body.host)


def _differs(chunk: int, here: int, there: int) -> Failure:
    """The two sides do not mean the same by a chunk: its bytes are not where they belong."""
    reason = f"chunk {chunk} has {here} bytes by this side's plan, and {there} by the prefill rank's"
    return Failure(Status.FAILED, Code.PLAN_DIFFERS, reason)
