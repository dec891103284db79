"""One chunk on its way out, by route: from its grant to one report of how it ended."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

from kvxfer.copy.mover import Copy
from kvxfer.copy.port import CopyJob, CopyOutcome, Direction, Event, Outcome, Post
from kvxfer.copy.tables import NOTHING, Tables
from kvxfer.errors import FabricError, KvxferError, ProtocolError
from kvxfer.fabric.port import Descriptors, Operation
from kvxfer.geometry import Pieces
from kvxfer.keys import Passage
from kvxfer.memory import Extent, ExtentState, Request
from kvxfer.planning import Bound, Part, block_pieces, staging_pieces
from kvxfer.protocol.messages import Grant, Route, Timings
from kvxfer.protocol.session import PeerInfo
from kvxfer.rebuilding import runs_on, want_end
from kvxfer.site import Callback, Site, no_hold
from kvxfer.steps import Steps
from kvxfer.tally import Tally

__all__ = ["SHIPMENTS", "Moved", "Shipment", "Terms"]

_UNTIMED: Final = Timings()


@dataclass(frozen=True, slots=True)
class Moved:
    """How a chunk ended on this side.

    Attributes:
        outcome: As of a post.
        error: Why it did not arrive.
        bytes: Bytes of cache that it carries.
        timings: Where the time went.
    """

    outcome: Outcome
    error: KvxferError | None = None
    bytes: int = 0
    timings: Timings = _UNTIMED

    @property
    def may_read(self) -> bool:
        """Whether our post may still read the source; not where the transport says that the peer is gone."""
        gone = isinstance(self.error, FabricError) and self.error.disconnected
        return self.outcome is Outcome.IN_DOUBT and not gone


@dataclass(frozen=True, slots=True)
class Terms:
    """When a granted chunk may be moved.

    Attributes:
        until: When the grant's lease ends; nothing is posted later.
        after: The blocks may be read when this has fired.
        generation: As granted, for gates.
        renewals: How often the decode rank had made its agent anew by then.
    """

    until: float
    after: Event
    generation: int = 0
    renewals: int = 0


class Shipment(Steps):
    """A chunk that was granted: base of what the routes make of it.

    Attributes:
    Args:
        site: The worker.
        peer: The decode rank.
        bound: The transfer's plan.
        grant: Which chunk, and where to.
        terms: When it may be moved.
        tally: Counts.
        report: Called once, when nothing of it is under way any more or it is in doubt.
        late: Called at most once after that, if it was in doubt, as `late` of a post.
    """

    def __init__(
        self,
        site: Site,
        peer: PeerInfo,
        bound: Bound,
        grant: Grant,
        terms: Terms,
        tally: Tally,
        report: Callable[[int, Moved], None],
        late: Callable[[int, bool], None],
    ) -> None:
        super().__init__(site, f"kvxfer send chunk {grant.chunk}")
        self.peer: Final = peer
        self.bound: Final = bound
        self.grant: Final = grant
        self.terms: Final = terms
        self.way_in: Final = self.passage(site, peer, terms.generation)
        self.tally: Final = tally
        self.part: Part | None = None
        self._report: Callable[[int, Moved], None] | None = report
        self._late: Final = late
        self._began: Final = site.now()
        self.move: Copy | None = None  # which the mover has, or had
        self._answered = False
        self._error: KvxferError | None = None  # of a step, while the mover had it

    @property
    def over(self) -> bool:
        """Whether it has been reported."""
        return self._report is None

    @property
    def copying(self) -> bool:
        """Whether it is being copied: nothing but the end of that tells that the blocks are not read any more."""
        return self.move is not None and not self._answered and self.site.mover.may_copy(self.move)

    def begin(self) -> None:
        """Go: a step."""
        bound = self.bound
        self.plan(partial(bound.part, self.grant.chunk), self._planned, rows=bound.part_rows)

    def stop(self) -> None:
        """Copy and post nothing more, and end; what is under way is waited for."""
        if self.move is None:
            self.end(Moved(Outcome.STOPPED))
        else:
            self.site.mover.cancel(self.move)

    def failed(self, error: KvxferError) -> None:
        """A step raised: nothing more is copied or posted."""
        self._error = self._error or error
        if self.move is not None and not self._answered:
            self.stop()
        else:
            self.end(Moved(Outcome.FAILED, error))

    def _planned(self, part: Part) -> None:
        self.part = part
        if part.bytes == 0:  # a window in which no group has a row
            self.end(Moved(Outcome.DONE))
        elif not self.over:
            self.prepare(part)

    @staticmethod
    def passage(site: Site, peer: PeerInfo, generation: int) -> Passage | None:
        """What has to be passed before anything is written."""
        return site.keys.passage(peer, generation)

    @staticmethod
    @abstractmethod
    def hold(site: Site, peer: PeerInfo) -> Callable[[], None]:
        """Keep the way to the peer open, for all chunks of a transfer, until the returned function is called."""

    @abstractmethod
    def prepare(self, part: Part) -> None:
        """The plan is made, and the chunk carries something."""

    def give_back(self, moved: Moved) -> None:
        """Give back whatever it holds: it is over."""

    def give_back_late(self) -> None:
        """Give back what it held for a post of ours that was in doubt."""

    def submit(self, job: CopyJob) -> None:
        """Hand it to the mover."""
        self.tally.spent("queued", self._began, self.site.now())
        self.move = self.site.mover.submit(job, Direction.GATHER)  # what is refused ends with `failed`

    def moved(self, outcome: CopyOutcome, timings: Timings) -> None:
        """The mover is through with it."""
        self._answered = True
        if not outcome.in_doubt:
            self.move = None  # which knows this shipment: without a cycle, it is freed at once
        nbytes = self.part.bytes if self.part else 0
        if self._error is not None and not outcome.in_doubt:
            self.end(Moved(Outcome.FAILED, self._error))
        else:
            self.end(Moved(outcome.outcome, outcome.error, nbytes, timings))

    def end(self, moved: Moved) -> None:
        """Give everything back and report, once."""
        report, self._report = self._report, None
        if report is not None:
            self.give_back(moved)
            report(self.grant.chunk, moved)


class _OverFabric(Shipment):
    """A chunk that the fabric writes."""

    _lane = ""

    @staticmethod
    def hold(site: Site, peer: PeerInfo) -> Callable[[], None]:
        """Keep the lane to the peer."""
        return site.lanes.hold(peer)

    def prepare(self, part: Part) -> None:
        """Connect."""
        self.when(self.site.lanes.connect(self.peer, self.terms.renewals), partial(self._connected, part))

    def _connected(self, part: Part, lane: str) -> None:
        self._lane = lane
        if not self.over:
            self.connected(part)

    @abstractmethod
    def connected(self, part: Part) -> None:
        """There is a lane to the peer."""

    def go(self, gather: Tables, local: Descriptors, remote: Descriptors) -> None:
        """Gather, then write."""
        terms, late = self.terms, partial(self.run, self._posted_late)
        self.tally.descriptors += len(local.pieces)
        post = Post(self._lane, Operation.WRITE, local, remote, runs_on(self.site, self.peer), late)
        done, nbytes = partial(self.run, self._posted), self.part.bytes if self.part else 0
        self.submit(
            CopyJob(gather, done, terms.after, terms.until, self.way_in, nbytes=nbytes, owner=self.tally, post=post)
        )

    def _posted(self, outcome: CopyOutcome) -> None:
        tally, gathered = self.tally, outcome.copied - outcome.started
        tally.spent("gathering", outcome.started, outcome.copied)
        wire = 0.0
        if outcome.posted:
            wire = outcome.finished - outcome.posted
            tally.began(outcome.posted)
            tally.spent("wire", outcome.posted, outcome.finished)
            tally.spent("posting", outcome.posted, outcome.posted + outcome.posting)
        self.moved(outcome, Timings(gather_us=_us(gathered), post_us=_us(outcome.posting), wire_us=_us(wire)))

    def _posted_late(self, ended: bool) -> None:
        self.give_back_late()
        self._late(self.grant.chunk, ended)


class StagedShipment(_OverFabric):
    """A chunk that is gathered into staging memory here, and written from there into staging memory of the peer."""

    _request: Request | None = None
    _extent: Extent | None = None
    _unwant: Callback = staticmethod(no_hold)

    def connected(self, part: Part) -> None:
        """Ask for memory to gather into."""
        if not self.peer.body.staging or self.grant.length < part.staged_bytes:
            raise ProtocolError(f"{self.grant.length} bytes were granted for a chunk of {part.staged_bytes}")
        desk, lease = self.site.send_desk, self.site.config.grant_lease
        if (extent := desk.take(self.peer.account, part.staged_bytes)) is not None:
            self._gather(part, extent)
            return
        admitted = partial(self.run, self._admitted, part)
        self._request = desk.ask(self.peer.account, part.staged_bytes, lease, admitted)
        if self.over and self._request is not None:  # somebody ended it who was told in the same round of decisions
            desk.withdraw(self._request)

    def _admitted(self, part: Part, answer: Extent | KvxferError) -> None:
        self._request = None
        if isinstance(answer, KvxferError):
            raise answer
        if self.over:
            self.site.send_desk.release(answer)
        else:
            self._gather(part, answer)

    def _gather(self, part: Part, extent: Extent) -> None:
        site = self.site
        self._extent = extent
        site.send_desk.share.write(extent)
        local = staging_pieces(site.arena, extent.address, part.staged_bytes)
        remote = staging_pieces(self.peer.body.staging[0], self.grant.address, part.staged_bytes)
        self.go(part.gather(extent.address), local, remote)

    def give_back(self, moved: Moved) -> None:
        """Give the memory back, unless our own post may still read it."""
        desk, extent = self.site.send_desk, self._extent
        if self._request is not None:
            desk.withdraw(self._request)
        if extent is not None and moved.may_read:
            desk.quarantine(extent, "our own post did not end")
            self._unwant = want_end(self.site, self.peer, urgent=False)
        elif extent is not None:
            desk.release(extent)

    def give_back_late(self) -> None:
        """Give the memory back after all."""
        self._unwant()
        if self._extent is not None and self._extent.state is ExtentState.QUARANTINED:
            self.site.send_desk.settle(self._extent)


class DirectShipment(_OverFabric):
    """A chunk whose pieces the fabric writes where they belong, each by a descriptor of its own."""

    def connected(self, part: Part) -> None:
        """List the pieces."""
        self.plan(part.listed, self._listed, rows=self.bound.chunk_pieces)

    def _listed(self, pieces: Pieces) -> None:
        if not self.over:
            local = block_pieces(self.site.geometry, pieces.src, pieces.nbytes)
            remote = block_pieces(self.site.plans.geometry(self.peer), pieces.dst, pieces.nbytes)
            self.go(NOTHING, local, remote)


class MappedShipment(Shipment):
    """A chunk that our own copy puts where it belongs, in memory of the peer that is mapped here."""

    @staticmethod
    def passage(site: Site, peer: PeerInfo, generation: int) -> Passage | None:
        """On a GPU the kernel passes a gate by itself, and goes on though this process be stopped."""
        return None if peer.body.gates else site.keys.passage(peer, generation)

    @staticmethod
    def hold(site: Site, peer: PeerInfo) -> Callable[[], None]:
        """Keep the peer's memory mapped."""
        return site.mappings.hold(peer)

    def prepare(self, part: Part) -> None:
        """Copy."""
        site = self.site
        windows, gate = site.mappings.way(self.peer, self.terms.generation)
        tables, terms = part.copy(windows.reached), self.terms
        moved = partial(self.run, self._moved)
        self.submit(CopyJob(tables, moved, terms.after, terms.until, self.way_in, gate, part.bytes, self.tally))

    def _moved(self, outcome: CopyOutcome) -> None:
        if outcome.outcome is Outcome.DONE:
            self.tally.began(outcome.started)
            self.tally.spent("wire", outcome.started, outcome.finished)
        self.moved(outcome, Timings(wire_us=_us(outcome.finished - outcome.started)))


SHIPMENTS: Final[Mapping[Route, type[Shipment]]] = MappingProxyType(
    {Route.STAGED: StagedShipment, Route.DIRECT: DirectShipment, Route.MAPPED: MappedShipment}
)
"""What a granted chunk becomes, by route."""


def _us(seconds: float) -> int:
    return max(0, int(seconds * 1e6))
