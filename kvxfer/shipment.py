"""One chunk on its way out: a lane, memory, the gather, the post, and one report of how it ended."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvxfer.copy.port import READY, CopyJob, CopyOutcome, Direction, Event
from kvxfer.errors import FabricError, KvxferError, ProtocolError
from kvxfer.events import Until
from kvxfer.fabric.port import Cell, CellState, Descriptors, Operation, Outcome, Post, PostResult
from kvxfer.geometry import ChunkPlan, CopyPlan, Pieces
from kvxfer.memory import Extent, Request
from kvxfer.planning import Bound, block_pieces, staging_pieces
from kvxfer.protocol.messages import Grant, Timings
from kvxfer.protocol.session import PeerInfo
from kvxfer.site import Site, no_hold
from kvxfer.steps import Steps
from kvxfer.tally import Tally

__all__ = ["Moved", "Shipment"]

_NOTHING: Final = CopyPlan(())
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


class Shipment(Steps):
    """A chunk that was granted.

    Args:
        site: The worker.
        peer: The decode rank.
        bound: The transfer's plan.
        grant: Which chunk, and where to.
        staged: Whether it is gathered into staging memory.
        until: When the grant's lease ends; nothing is posted later.
        after: The blocks may be read when this has fired.
        tally: Counts.
        report: Called once, when nothing of it is under way any more or it is in doubt.
    """

    def __init__(
        self,
        site: Site,
        peer: PeerInfo,
        bound: Bound,
        grant: Grant,
        *,
        staged: bool,
        until: float,
        after: Event,
        tally: Tally,
        report: Callable[[int, Moved], None],
    ) -> None:
        super().__init__(site, f"kvxfer send chunk {grant.chunk}")
        self._peer: Final = peer
        self._bound: Final = bound
        self._grant: Final = grant
        self._staged: Final = staged
        # an event that never fires must not keep a dead cell: what is copied then is not posted
        cell = self._cell = Cell(until)
        self._after: Final = Until(after, lambda: cell.state is CellState.DEAD) if after is not READY else READY
        self._tally: Final = tally
        self._report: Callable[[int, Moved], None] | None = report
        self._began: Final = site.now()
        self._part: ChunkPlan | None = None
        self._lane = ""
        self._release: Callable[[], None] = no_hold
        self._request: Request | None = None
        self._extent: Extent | None = None
        self._submitted = False  # the executor or the fabric has it, and will answer
        self._gathered = (0.0, 0.0)

    def begin(self) -> None:
        """Go."""
        self.run(self._begin)

    def kill(self) -> None:
        """Post nothing more."""
        self._cell.kill()

    def stop(self) -> None:
        """Post nothing more, and end; what is posted is waited for."""
        killed = self._cell.kill()
        if killed and not self._submitted:
            self._end(Moved(Outcome.STOPPED))

    def failed(self, error: KvxferError) -> None:
        """A step raised: nothing was posted, or it cannot be said what became of it."""
        self._end(Moved(Outcome.FAILED if self._cell.kill() else Outcome.IN_DOUBT, error))

    # --- steps

    def _begin(self) -> None:
        bound, chunk = self._bound, self._grant.chunk
        self._release = self.site.lanes.hold(self._peer)
        self.plan(lambda: bound.chunk(chunk), self._planned, rows=bound.rows)

    def _planned(self, part: ChunkPlan) -> None:
        self._part = part
        if part.bytes == 0:  # a window in which no group has a row
            self._end(Moved(Outcome.DONE))
        elif self._report is not None:
            self.when(self.site.lanes.connect(self._peer), self._connected)

    def _connected(self, lane: str) -> None:
        self._lane = lane
        part, site = self._part, self.site
        if part is None or self._report is None:
            return
        if not self._staged:
            self.plan(lambda: part.copy().enumerate().merged(), self._listed, rows=self._bound.pieces)
            return
        if not self._peer.body.staging or self._grant.length < part.staged_bytes:
            raise ProtocolError(f"{self._grant.length} bytes were granted for a chunk of {part.staged_bytes}")
        step = self.run
        self._request = site.send_desk.ask(
            self._peer.name, part.staged_bytes, site.config.grant_lease, lambda answer: step(self._admitted, answer)
        )
        self._withdraw_if_over()

    def _withdraw_if_over(self) -> None:
        """For what somebody ended who was told in the same round of decisions."""
        if self._report is None and self._request is not None:
            self.site.send_desk.withdraw(self._request)

    def _admitted(self, answer: Extent | KvxferError) -> None:
        part, desk, self._request = self._part, self.site.send_desk, None
        if isinstance(answer, KvxferError):
            raise answer
        if part is None or self._report is None:
            desk.release(answer)
            return
        self._extent = answer
        desk.share.write(answer)
        local = staging_pieces(self.site.arena, answer.address, part.staged_bytes)
        remote = staging_pieces(self._peer.body.staging[0], self._grant.address, part.staged_bytes)
        self._go(part.gather(answer.address), local, remote)

    def _listed(self, pieces: Pieces) -> None:
        if self._report is not None:
            local = block_pieces(self.site.geometry, pieces.src, pieces.nbytes)
            remote = block_pieces(self.site.plans.geometry(self._peer), pieces.dst, pieces.nbytes)
            self._go(_NOTHING, local, remote)

    def _go(self, gather: CopyPlan, local: Descriptors, remote: Descriptors) -> None:
        """Gather, then write: handed from the executor to the fabric without a trip through the loop."""
        site, cell, lane = self.site, self._cell, self._lane
        self._tally.descriptors += len(local.pieces)
        self._tally.spent("queued", self._began, site.now())
        timed = bool(gather.segments)

        def copied(outcome: CopyOutcome) -> None:  # on the executor's thread
            if timed:
                self._gathered = (outcome.started, outcome.finished)
            if outcome.error is None:
                site.fabric.post(Post(lane, Operation.WRITE, local, remote, cell, posted))
            else:
                cell.kill()
                site.hand_over(partial(self.run, self._end, Moved(Outcome.FAILED, outcome.error)))

        def posted(result: PostResult) -> None:  # on the fabric's
            site.hand_over(partial(self.run, self._posted, result))

        site.executor.submit(CopyJob(gather, copied, self._after), Direction.GATHER)
        self._submitted = True

    def _posted(self, result: PostResult) -> None:
        tally, gathered = self._tally, self._gathered
        tally.spent("gathering", *gathered)
        if result.first:
            tally.began(result.first)
            tally.spent("wire", result.first, result.finished)
            tally.spent("posting", result.first, result.first + result.posting)
        timings = Timings(
            gather_us=_us(gathered[1] - gathered[0]),
            post_us=_us(result.posting),
            wire_us=_us(result.finished - result.first),
        )
        self._end(Moved(result.outcome, result.error, self._part.bytes if self._part else 0, timings))

    def _end(self, moved: Moved) -> None:
        """Give everything back and report, once."""
        report, self._report = self._report, None
        if report is None:
            return
        desk = self.site.send_desk
        self._release()
        if self._request is not None:
            desk.withdraw(self._request)
        if self._extent is not None and moved.may_read:
            desk.quarantine(self._extent, "our own post did not end")
        elif self._extent is not None:
            desk.release(self._extent)
        report(self._grant.chunk, moved)


def _us(seconds: float) -> int:
    return max(0, int(seconds * 1e6))
