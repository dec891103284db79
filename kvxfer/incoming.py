"""One transfer at the decode rank with one prefill rank: runs the sans-I/O `Receiving` machine."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from kvxfer.ahead import IN_PLACE, Ahead
from kvxfer.asking import fetch_message
from kvxfer.checking import Checking
from kvxfer.copy.mover import Copy
from kvxfer.copy.port import READY, CopyOutcome, Direction
from kvxfer.copy.tables import NOTHING, Tables
from kvxfer.encoding import joined_spans
from kvxfer.errors import Code, KvxferError, ProtocolError, RefusedError, Step
from kvxfer.exposure import Exposure
from kvxfer.geometry import BlockLists, ChunkGrid, SumPlan
from kvxfer.landing import Copied, Landing, Reading
from kvxfer.lazy import lazy
from kvxfer.link import Link
from kvxfer.need import Need, Owner
from kvxfer.ownwork import MakePost, OwnWork
from kvxfer.planning import Bound, bind
from kvxfer.protocol.messages import (
    WHOLE,
    Accept,
    KvAgentResult,
    Message,
    Refuse,
    Route,
    Span,
    Status,
    Want,
)
from kvxfer.protocol.receiving import ReceiveState, Receiving
from kvxfer.protocol.sending import Failure
from kvxfer.site import Site, no_hold
from kvxfer.steps import Steps
from kvxfer.tally import Tally

__all__ = ["Incoming"]

_HOPEFUL: Final = frozenset({ReceiveState.ASKED, ReceiveState.MOVING, ReceiveState.DONE})


class Incoming(Steps):
    """One transfer, from `Fetch` to the last chunk in place.

    Attributes:
        machine: The sans-I/O state.
        link: The control stream; replaced when the same incarnation is reached again.
        peer: The prefill rank.
        tally: Counts.
        route: As the sender chose it.
        why: Why it chose that.
        exposure: What the sender may write, and the gate before it.
        checking: Compares what arrived with what the peer holds, if that is wanted.
    """

    def __init__(self, site: Site, link: Link, transfer: int, need: Need, owner: Owner) -> None:
        super().__init__(site, f"kvxfer receive {transfer}")
        self.link = link
        self.peer: Final = link.peer
        self.tally: Final = Tally()
        self.route = Route.UNKNOWN
        self.why = ""
        self._need: Final = need
        self._owner: Final = owner
        # of a peer that was lost since it was looked up nothing is known any more
        self._asked: Final = site.routes(self.peer, trusted=link.trusted, sending=False) if link.is_open else []
        self._ahead: Final = Ahead.of(site, self.peer, need, self._asked) if link.is_open else None
        name = f"{site.incarnation.hex()[:8]}-{transfer}"
        self.exposure: Final = Exposure(site, link, name, self._safe, self._asked if self._ahead is not None else ())
        if self._ahead is not None:
            self._ahead.generation = self.exposure.grant(mapped=Route.MAPPED in self._asked)
        staging = self._ahead is not None and self._ahead.staged
        self.machine: Final = Receiving(transfer, ahead=self._ahead is not None, staging=staging)
        self._bound: Bound | None = None
        self._grid: ChunkGrid | None = None
        self.checking: Final = Checking.of(transfer, site.config.sums_every)
        self._source: BlockLists = {}  # the peer's blocks, as far as it named them
        self._stale = self._growing = False  # they have grown since the plan was made; it is being made again
        self._queue: deque[tuple[int, float, int]] = deque()  # chunks that are ready; until when, through what to read
        self._chunks: dict[int, Landing | Reading | Ahead] = {}  # under way
        self._own: Final = OwnWork(self.peer)
        self._writable = need.after is READY
        self._when_writable: list[Callable[[bool], None]] = []
        self._writing: Copy | None = None  # of nothing: its end tells when the blocks may be written
        self._given_up = False
        self._awake: Callable[[], None] = no_hold

    @lazy
    def layers(self) -> list[int]:
        """Every layer of which this rank sends something."""
        return sorted({layer for selection in self._need.selections for layer in selection.layers})

    @property
    def limited_by(self) -> str:
        """What keeps pieces from being longer; empty before there is a plan."""
        known = self._bound or self._ahead
        return known.limited_by if known is not None and self._grid is not None else ""

    @property
    def transfer(self) -> int:
        """Its number."""
        return self.machine.transfer

    @property
    def step(self) -> Step:
        """What it waits for, or waited for when it ended."""
        step = self.machine.step
        return Step.PLANNING if self._grid is None and step is not Step.ASKING else step

    @property
    def ended(self) -> bool:
        """Whether the peer has said its last word."""
        return self.machine.ended

    @property
    def is_lost(self) -> bool:
        """Whether the session is gone, and the peer may still write."""
        return self.machine.state is ReceiveState.LOST

    @property
    def in_doubt(self) -> bool:
        """Whether something may write the caller's blocks: on `staged` nothing but our own scatter does."""
        theirs = self.machine.exposed and not self.machine.ended and self._in_place
        return self._own.writes or theirs

    @property
    def copying(self) -> bool:
        """Whether a copy of our own writes the caller's blocks."""
        return self._own.copies

    @property
    def reading(self) -> bool:
        """Whether a read of our own writes the caller's blocks."""
        return self._own.reads

    @property
    def _in_place(self) -> bool:
        """Whether what was granted are the caller's blocks."""
        if self.route is Route.UNKNOWN:
            return self._ahead is not None and not self._ahead.staged
        return self.route in IN_PLACE

    @property
    def quiet(self) -> bool:
        """Whether it is over and nobody writes the caller's blocks any more."""
        return (self.machine.ended or self.machine.state is ReceiveState.LOST) and not self.in_doubt

    @property
    def finished(self) -> bool:
        """Whether nothing of it is under way or in doubt, staging memory included."""
        return self.quiet and not any(chunk.holds for chunk in self._holders())

    @property
    def owes_an_answer(self) -> bool:
        """Whether the peer may keep its blocks for us until it hears that we read nothing any more: on `pull`.

        It may have accepted with that route, and announced chunks, though nothing of this was heard.
        """
        pull = Route.PULL in self._asked if self.route is Route.UNKNOWN else self.route is Route.PULL
        return pull and self.machine.state is ReceiveState.LOST

    @property
    def moving(self) -> bool:
        """Whether anything new may be begun."""
        return self.machine.state is ReceiveState.MOVING and not self._given_up

    @property
    def patience(self) -> float:
        """Seconds that a chunk waits for memory at most; infinity where the fetch has a time-out, which ends it."""
        need, site = self._need, self.site
        if need.deadline is not None:
            return math.inf
        before = 0 if self.route is Route.STAGED else site.in_place_desk(self.peer).share.held_bytes(self.peer.account)
        return site.lease_ms(before) / 1000

    def start(self) -> None:
        """Ask."""
        ahead, number, link = self._ahead, self.machine.transfer, self.link
        sent = link.is_open and link.send(fetch_message(self.site, self.peer, number, self._need, self._asked, ahead))
        if not sent:  # it was lost since it was looked up, so `lost` will not tell
            self.machine.ahead = False
            if ahead is not None:
                ahead.void()
            self.lost(Failure(Status.FAILED, Code.PEER_LOST, "the control stream was lost"))

    # --- messages

    def accepted(self, message: Accept) -> None:
        """The peer made a plan: make the same one."""
        if not self.machine.accept(message):
            return
        if self._ahead is not None and not message.ahead:
            self._ahead.void()
        if message.route not in self._asked:
            name = message.route.name.lower()
            reason = f"the peer chose the route {name}, which was not among those it was asked for"
            self.stop(Failure(Status.FAILED, Code.NO_COMMON_ROUTE, reason))
            return
        self.route, self.why = message.route, message.why
        self.tally.predicted = message.predicted_us / 1e6 if message.predicted_us else None
        self.site.heard(self.peer, fenced=message.fenced)
        if not message.ahead:
            self.exposure.void()
        self.exposure.routes = frozenset({message.route})
        self._help()
        if self._ahead is not None and message.ahead:
            if not self._ahead.staged:
                self.run(self._follow, self._ahead, message)
                if self.checking is None:
                    return
            else:
                self._chunks[0] = Landing(self, 0, self._ahead.desk, staged=True, extent=self._ahead.give())
        self.run(self._learn, message.spans)
        self.run(partial(self.site.when_warm, self.peer, partial(self.run, self._plan, message), sending=False))

    def refused(self, message: Refuse) -> None:
        """The peer refused."""
        self.site.metrics.refused(message.code, by_peer=True)
        self.machine.refused(message)
        self._settle()

    def wanted(self, message: Want) -> None:
        """Chunks are ready at the peer, and perhaps its block lists have grown."""
        until = self.site.now() + message.lease_ms / 1000
        self._queue += [(chunk, until, message.generation) for chunk in self.machine.wanted(message)]
        if self._ahead is not None and not self.machine.exposed:
            self._ahead.void()
        if message.spans and self.moving:
            self._stale = True
            self.run(self._learn, message.spans)
        self._pump()

    def result(self, message: KvAgentResult) -> None:
        """A chunk has landed, or the transfer ended at the peer."""
        stale = self.machine.stale
        chunk = self.machine.result(message)
        if self.machine.stale > stale:
            self.site.metrics.result_dropped("stale")
        if chunk is not None and chunk in self._chunks:
            if self.checking is not None:
                self.checking.arrived(chunk)
            self._chunks[chunk].arrived(message)
        if self.machine.failure is not None and self.machine.state is ReceiveState.MOVING:
            self.stop(self.machine.failure)
        if message.status is Status.IN_DOUBT and message.chunk == WHOLE:
            self.exposure.told_in_doubt()
        self._settle()

    def stop(self, failure: Failure) -> None:
        """Give up; `quiet` becomes true when memory is safe."""
        self._give_up()
        if self.machine.ahead:  # whose answer nobody waits for any more, and which the peer may be writing by now
            self._help()
        self.say(*self.machine.cancel(failure, reading=self._own.reads))
        self._settle()

    def lost(self, failure: Failure) -> None:
        """The session is gone, or the peer is silent."""
        self._give_up()
        self.machine.lost(failure)
        self._settle()

    def resume(self, link: Link) -> None:
        """The same incarnation is back: ask what became of the transfer."""
        self.link = link
        self.exposure.met(link.renewals)
        if self.machine.state is ReceiveState.LOST:
            if self.route is not Route.PULL and not self.finished:
                self._help()
            self.say(*self.machine.resume(reading=self._own.reads))
            self._settle()

    def _help(self) -> None:
        """Make progress for what the peer posts: over TCP the target moves the data."""
        self._awake()
        if self.route is not Route.MAPPED:
            self._awake = self.site.mover.hold_awake(needed=self.route not in self.link.proved)

    # --- accepting

    def _follow(self, ahead: Ahead, message: Accept) -> None:
        """The peer moves everything under the grant of `Fetch`: there is nothing to plan or to grant."""
        grid = ahead.grid(message)
        if grid is None:
            raise RefusedError(str(_plan_differs(message)), reason=Code.PLAN_DIFFERS)
        ahead.used(self, message.chunks)
        self._chunks = dict.fromkeys(range(message.chunks), ahead)
        self.tally.pieces = message.pieces
        self._cut(grid)

    def _cut(self, grid: ChunkGrid) -> None:
        """It is known how the transfer is cut."""
        self._grid = grid
        self.tally.chunks = len(grid)
        self._owner.planned(self.layers, dict.fromkeys(grid.layers, grid.windows))

    def _plan(self, message: Accept) -> None:
        if not self.moving:  # it ended while kernels were compiled for it
            return
        site, need = self.site, self._need
        spans = self._source
        rows = max(sum(len(span.ids) for span in side.values()) for side in (spans, need.spans))

        def make() -> Bound:
            pair = site.plans.incoming(self.peer, need.selections)
            plan = bind(pair, spans, need.spans, need.tokens, covered=0)
            grid = ChunkGrid(
                pair.layers, message.layers_per_chunk, message.tokens_per_chunk, need.tokens.start, need.tokens.stop
            )
            same = len(grid) == message.chunks and plan.digest(grid) == message.digest
            if not same or plan.nbytes != message.bytes:
                raise _plan_differs(message)
            return Bound.of(plan, grid)

        def checked() -> Bound:
            try:
                return make()
            except KvxferError as error:
                raise RefusedError(str(error), reason=Code.PLAN_DIFFERS) from error

        self.plan(checked, self._bind, rows=rows)

    def _bind(self, bound: Bound) -> None:
        if not self.moving:
            return
        self._bound = bound
        self.tally.pieces = bound.pieces
        if self._grid is None:
            self._cut(bound.grid)
        if self.checking is not None:
            self.checking.planned(self, bound)
        for holder in list(self._chunks.values()):
            if isinstance(holder, Landing):  # of a chunk that was granted ahead
                self.run(holder.begin, bound)
        self._pump()

    # --- moving

    def _pump(self) -> None:
        """Begin with chunks from the queue while the credit window has room."""
        bound = self._bound
        if self._stale or self._growing:
            self.run(self._grow)
            return
        site, window = self.site, self.site.config.window
        while bound is not None and self._queue and len(self._chunks) < window and self.moving:
            chunk, until, generation = self._queue.popleft()
            if self.route is Route.PULL:
                passage = site.keys.passage(self.peer, generation)
                begun: Landing | Reading = Reading(self, chunk, until, passage, self.link.renewals)
            elif self.route is Route.STAGED:
                begun = Landing(self, chunk, site.receive_desk, staged=True)
            else:
                begun = Landing(self, chunk, site.in_place_desk(self.peer), staged=False)
            self._chunks[chunk] = begun
            self.run(begun.begin, bound)

    def _learn(self, spans: Sequence[Span]) -> None:
        """Block ids of the peer that it did not name before; only of what was asked for, or they would pile up here."""
        asked = {selection.group for selection in self._need.selections}
        if strange := [span.group for span in spans if span.group not in asked]:
            raise ProtocolError(f"the peer named blocks of group {strange[0]!r}, of which nothing was asked for")
        self._source = joined_spans(self._source, spans)

    def _grow(self) -> None:
        """The source's block lists have grown since the plan was made: no chunk may begin with the old one."""
        bound, source = self._bound, self._source
        if bound is None or self._growing or not self.moving:
            return
        self._growing, self._stale = True, False

        def grown(bound: Bound) -> None:
            self._growing = False
            self._bound = bound
            self._pump()

        self.plan(lambda: bound.grown(source, covered=0), grown, rows=bound.rows)

    def landed(self, chunk: int, nbytes: int) -> None:
        """A chunk is where it belongs, and visible."""
        if self.checking is not None and self.checking.holds(self, self._bound, chunk, nbytes):
            return  # and comes again when it is known to be right
        grid = self._grid
        self._chunks.pop(chunk, None)
        self.tally.bytes += nbytes
        self.machine.chunk_done(chunk)
        if grid is not None:
            self._owner.landed(grid.runs[chunk % grid.layer_runs])
        self._pump()
        self._settle()

    def say(self, *messages: Message) -> None:
        """Send to the prefill rank."""
        if messages:
            self.link.send(*messages)

    def when_writable(self, then: Callable[[bool], None]) -> None:
        """Go on with True once `after` has fired, with False if the transfer was given up before."""
        if self._given_up or self._writable:
            then(not self._given_up)
            return
        self._when_writable.append(then)
        if len(self._when_writable) == 1:
            self._writing = self.copy(NOTHING, Direction.SCATTER, self._became_writable, self._need.after)

    def gate(self) -> int:
        """What a grant says of the gate that it leads through: 0 where the peer passes none."""
        return self.exposure.grant(mapped=self.route is Route.MAPPED)

    def write(self, tables: Tables, nbytes: int, then: Copied, sums: SumPlan | None = None) -> None:
        """Copy about so many bytes into the caller's blocks, or add up what is there."""
        self._own.copy(self, self._settle, tables, nbytes, then, sums)

    def read(self, post: MakePost, then: Copied) -> Copy:
        """Post a read into the caller's blocks."""
        return self._own.read(self, self._settle, post, then)

    def _became_writable(self, outcome: CopyOutcome) -> None:
        waiting, self._when_writable = self._when_writable, []
        self._writing = None
        self._writable = outcome.error is None and not outcome.stopped
        for then in waiting:
            self.run(then, self._writable and not self._given_up)
        self._settle()
        if outcome.error is not None:
            raise outcome.error

    # --- ending

    def failed(self, error: KvxferError) -> None:
        """A step raised."""
        code = error.reason if isinstance(error, RefusedError) else error.code
        self.stop(Failure(Status.FAILED, code, str(error)))

    def _give_up(self) -> None:
        """Begin nothing new, and wait for nothing but what is in flight."""
        self._given_up = True
        if self._writing is not None:
            self.site.mover.cancel(self._writing)
        self._queue.clear()
        for chunk in self._holders():
            chunk.give_up()

    def _safe(self) -> None:
        """There is evidence, other than the peer's word, that nothing of it is written any more."""
        self.machine.safe()
        self._settle()

    def _settle(self) -> None:
        """Give back what the peer is through with; quarantine what it may still write."""
        machine = self.machine
        if machine.state is ReceiveState.MOVING and machine.failure is None:
            return  # all goes well
        hopeless = machine.failure is not None or machine.state not in _HOPEFUL
        if hopeless and not self._given_up:
            self._give_up()  # whoever ended it: no scatter begins any more
        if not self._own.reads:
            self.say(*machine.unread())
        lost = machine.state is ReceiveState.LOST
        if machine.ended or lost:
            for chunk in self._holders():
                chunk.settle(lost=lost)
            if machine.ended or self.finished or not self.link.is_open or self.route is Route.PULL:
                self._awake()  # else the peer is there, and what it has posted may need this side to end
                self._awake = no_hold
        if machine.ended:
            self.exposure.end()
        if machine.ended or lost or machine.failure is not None:
            self._owner.changed()
        if lost and (not self.finished or self.owes_an_answer):
            self._owner.doubted(self)

    def _holders(self) -> list[Landing | Reading | Ahead]:
        """Whatever has memory, or admission, for something of it."""
        ahead = [] if self._ahead is None else [self._ahead]
        return list(dict.fromkeys([*self._chunks.values(), *ahead]))


def _plan_differs(message: Accept) -> KvxferError:
    return ProtocolError(
        f"the two sides plan transfer {message.transfer} differently "
        f"({message.chunks} chunks, {message.bytes} bytes there)"
    )
