"""What one open worker has: books, threads, clock and tasks, shared by its sending and its receiving side."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from kvxfer.config import Config
from kvxfer.copy.mover import Mover
from kvxfer.errors import ArenaError, KvxferError, MismatchError, TicketError
from kvxfer.fabric.calls import Fabric, Lanes
from kvxfer.geometry import CacheGeometry
from kvxfer.mapped.host import unlike
from kvxfer.memory.books import Custody, Extent, ExtentState, Request, Share
from kvxfer.peers.link import Link
from kvxfer.plans.pairs import SMALL_PLAN, Agreed, PairPlans
from kvxfer.plans.routes import Estimates, RouteSupport, acceptable
from kvxfer.protocol import messages as wire
from kvxfer.protocol.messages import FOREVER_MS, Capability, Route
from kvxfer.protocol.session import IdentityKey, PeerInfo, Role
from kvxfer.runtime import Callback, Runtime, no_op
from kvxfer.safety.fence import Gates, Mappings, PeerGates
from kvxfer.safety.processes import Processes
from kvxfer.telemetry import Intervals, Metrics, Stage, TransferStats, logger
from kvxfer.tickets import Issuer

__all__ = ["Admitted", "Desk", "Quota", "Rebuilds", "Site", "Tally", "Tasks"]

# --- what one side counts while it runs


class Tally(msgspec.Struct, eq=False):
    """Counts of one transfer, or of one rank's part of it."""

    bytes: int = 0  # bytes of cache moved
    pieces: int = 0  # contiguous runs that they are in, in the blocks
    chunks: int = 0  # chunks of the plan
    descriptors: int = 0  # pieces that this side handed to its transport
    first_byte: float | None = None  # when the first chunk had landed, or was posted; None before
    predicted: float | None = None  # seconds that it was expected to take; None without a prediction
    # intervals of each stage that was seen
    stages: defaultdict[Stage, Intervals] = msgspec.field(
        default_factory=partial(defaultdict[Stage, Intervals], Intervals)
    )

    def add_stages(self, *intervals: tuple[Stage, float, float]) -> None:
        """Count intervals of stages, from and to seconds of the runtime's clock; one that ends too early is empty."""
        for stage, start, end in intervals:
            spans = self.stages[stage]
            spans.append((start, max(start, end)))
            if len(spans) >= spans.room:
                spans.unite()

    def add_chunks(self, granted: float, now: float, sender: wire.Timings) -> None:
        """Count a chunk that the sender wrote between its grant and now, and what it says of its own work on it."""
        if self.first_byte is None:
            self.first_byte = now
        sent = now - sender.wire_us / 1e6  # about: the sender's durations, on this side's clock
        on_wire = self.stages["wire"]
        on_wire.append((granted, now))
        self.stages["posting"].append((sent, sent + sender.post_us / 1e6))
        self.stages["gathering"].append((sent - sender.gather_us / 1e6, sent))
        if len(on_wire) >= on_wire.room:
            for spans in self.stages.values():
                spans.unite()

    def merge(self, other: "Tally") -> None:
        """Count what another rank's part counted."""
        self.bytes += other.bytes
        self.pieces += other.pieces
        self.chunks += other.chunks
        self.descriptors += other.descriptors
        if other.first_byte is not None:
            self.first_byte = min(other.first_byte, other.first_byte if self.first_byte is None else self.first_byte)
        if other.predicted is not None:  # ranks move their parts at the same time
            self.predicted = max(other.predicted, self.predicted or 0.0)
        for stage, intervals in other.stages.items():
            self.stages[stage].merge(intervals)

    def stats(self, *, route: str, why: str, peers: tuple[str, ...], started: float, finished: float) -> TransferStats:
        """The counts as the caller sees them."""
        seconds: dict[Stage, float] = {}
        for stage, intervals in self.stages.items():
            first, last = intervals[0] if len(intervals) == 1 else (0.0, intervals.length)  # of most there is one
            seconds[stage] = last - first
        return TransferStats(
            route=route,
            why=why,
            bytes=self.bytes,
            pieces=self.pieces,
            chunks=self.chunks,
            descriptors=self.descriptors,
            peers=peers,
            started=started,
            first_byte=self.first_byte,
            finished=finished,
            predicted=self.predicted,
            **seconds,
        )


# --- places that peers share

_GREED: Final = 3
"""A peer may hold so many times as many places as are free: three quarters of all of them while it is alone."""


class Quota:
    """Counts places by peer.

    A peer gets another place while it holds less than three times as many as are free (a dynamic threshold, as switches
    have for the buffers that their ports share). So a peer that is alone has three quarters, `n` peers that all want as
    many as they can get have equal parts, and there is always a place for one that has none yet, until all are taken.
    """

    def __init__(self, limit: int) -> None:
        self.limit: Final = limit
        self._held: Final[dict[Hashable, int]] = {}
        self._taken = 0

    def __len__(self) -> int:
        return self._taken

    def take(self, peer: Hashable) -> bool:
        """Take a place, to be given back with `give`. False if there is none for this peer now."""
        held = self._held.get(peer, 0)
        if held >= _GREED * (self.limit - self._taken):
            return False
        self._held[peer] = held + 1
        self._taken += 1
        return True

    def give(self, peer: Hashable) -> None:
        """Give a place back.

        Raises:
            ValueError: If the peer holds none.
        """
        if peer not in self._held:
            raise ValueError(f"{peer!r} holds no place")
        self._held[peer] -= 1
        self._taken -= 1
        if not self._held[peer]:
            del self._held[peer]


# --- who waits for the agent to be made anew


@dataclass(frozen=True, slots=True, eq=False)
class RebuildRequest:
    """A doubt that nothing else is likely to end."""

    since: float  # when it was noticed
    urgent: bool  # whether it is about the caller's blocks, and not about staging memory
    answered: bool = False  # whether the peer has said all that it can, and is not to be waited for


class Rebuilds:
    """The books of it."""

    def __init__(self, now: Callable[[], float], loop: asyncio.AbstractEventLoop) -> None:
        self.count = 0  # how often the agent was made anew
        self.paused = False  # it is about to be: nothing is granted to peers, and nothing announced to be read
        self.on_request: Callback = no_op  # called when somebody new waits for it
        self._now: Final = now
        self._loop: Final = loop
        self.requests: Final[dict[RebuildRequest, None]] = {}  # who waits
        self._taken: list[RebuildRequest] = []
        self._held: list[Callable[[], None]] = []
        self.next: asyncio.Future[None] = loop.create_future()  # done when it has been done once more

    def request(self, *, urgent: bool, answered: bool = False) -> Callable[[], None]:
        """Wait for it until it has been begun and done, or until the returned function is called."""
        request = RebuildRequest(self._now(), urgent, answered)
        self.requests[request] = None
        self.on_request()
        return partial(self.requests.pop, request, None)

    def when_done(self, then: Callable[[], None]) -> None:
        """Call `then` once peers may be granted or told something: at once, unless it is about to be done."""
        if self.paused:
            self._held.append(then)
        else:
            then()

    def begin(self) -> None:
        """It is about to be done. What is wanted by now will be over then, and nothing that comes later."""
        self.paused = True
        self._taken = list(self.requests)

    def end(self, *, done: bool) -> None:
        """It has been, or could not be."""
        taken, self._taken = self._taken, []
        held, self._held = self._held, []
        self.paused = False
        if done:
            self.count += 1
            self.next.set_result(None)
            self.next = self._loop.create_future()
            for request in taken:
                self.requests.pop(request, None)
        for then in held:
            then()


# --- waiting for memory

Admitted: TypeAlias = Callable[[Extent | KvxferError], None]
"""Gets the extent, to be given back with `release` exactly once, or why there is none. Must not raise."""


class _Wait(msgspec.Struct, eq=False):
    """One who waits for memory."""

    then: Admitted
    since: float | None = None  # None if he may be served at once
    timer: asyncio.TimerHandle | None = None  # fires when his time is over

    def end(self) -> None:
        """He waits no longer."""
        if self.timer is not None:
            self.timer.cancel()


class Desk:
    """Hands out extents of one share in the order that its books decide."""

    def __init__(
        self, share: Share, now: Callable[[], float], loop: asyncio.AbstractEventLoop, metrics: Metrics
    ) -> None:
        self.share: Final = share
        self._now = now
        self._loop = loop
        self._metrics = metrics
        self._waiting: dict[Request, _Wait] = {}
        self._overdue: list[Request] = []  # whose time was over while nothing was granted
        self._deciding = False
        self._again = False
        self._paused = False

    def request(self, peer: str, nbytes: int, timeout: float, then: Admitted) -> Request | None:
        """Wait for an extent of at least `nbytes` bytes, which `take` did not give; `then` is called once.

        Args:
            peer: On whose behalf.
            nbytes: Room that is needed.
            timeout: Seconds to wait at most.
            then: Gets the extent; or an `ArenaError` when `timeout` has passed, or when so much of the share went into
                quarantine that what remains cannot hold it.

        Returns:
            For `withdraw`; None if `then` was called before this returned.

        Raises:
            ArenaError: It can never fit; `then` is not called.
        """
        request = self.share.request(peer, nbytes)
        wait = self._waiting[request] = _Wait(then)
        self.advance()
        if request not in self._waiting:
            return None
        wait.since = self._now()
        if timeout < math.inf:
            wait.timer = self._loop.call_later(timeout, self._expire, request)
        return request

    def take(self, peer: str, nbytes: int, most: int = 1, state: ExtentState = ExtentState.RESERVED) -> list[Extent]:
        """Up to so many extents of at least `nbytes` bytes that are there right now, if nobody waits."""
        return [] if self._waiting or self._paused else self.share.take(peer, nbytes, most, state)

    def begin_writing(self, extent: Extent, more: int) -> list[Extent]:
        """Let a peer write an extent, and up to so many like it that are there right now, if nobody waits: these."""
        return self.share.begin_writing(extent, 0 if self._waiting or self._paused else more)

    @property
    def contended(self) -> bool:
        """Whether others wait, or nothing is granted now: whoever has an extent had better give it back soon."""
        return self._paused or bool(self._waiting)

    def withdraw(self, request: Request) -> None:
        """Wait no longer; `then` will not be called. Harmless if it was."""
        wait = self._waiting.pop(request, None)
        if wait is not None:
            wait.end()
            self.share.withdraw(request)
            self.advance()

    def release(self, *extents: Extent) -> None:
        """Give extents back: nobody will write them any more."""
        for extent in extents:
            self.share.release(extent)
        if self._waiting:
            self.advance()

    def quarantine(self, extent: Extent, reason: str) -> None:
        """Somebody may still touch an extent: keep it until `settle`, and tell whoever can now wait no longer."""
        self.share.quarantine(extent, reason)
        self._metrics.quarantined_bytes_ever += extent.length
        self.advance()

    def settle(self, extent: Extent) -> None:
        """Give a quarantined extent back: there is evidence now."""
        self.share.settle(extent)
        self.advance()

    def advance(self) -> None:
        """Let the books decide who is next, and tell them."""
        self._again = True
        if self._deciding or self._paused:  # the round that is under way, or comes, sees what was given back
            return
        self._deciding = True
        try:
            while self._again and self._waiting:
                self._again = False
                for request, answer in self.share.advance():
                    self._deliver(request, answer)
        finally:
            self._deciding = False

    def pause(self) -> None:
        """Grant nothing until `resume`. Nobody who waits is turned away meanwhile either."""
        self._paused = True

    def resume(self) -> None:
        """Go on, with all that has waited."""
        self._paused = False
        overdue, self._overdue = self._overdue, []
        for request in overdue:
            self._expire(request)
        self.advance()

    def close(self) -> None:
        """Stop the timers."""
        for wait in self._waiting.values():
            wait.end()

    def _expire(self, request: Request) -> None:
        if self._paused:
            self._overdue.append(request)
        elif (wait := self._waiting.get(request)) is not None and wait.since is not None:
            self.share.withdraw(request)
            self._deliver(request, self.share.expiry_error(request, self._now() - wait.since))
            self.advance()

    def _deliver(self, request: Request, answer: Extent | KvxferError) -> None:
        wait = self._waiting.pop(request, None)
        if wait is not None:
            wait.end()
            if wait.since is not None:
                self._metrics.admission_waited(self._now() - wait.since)
            wait.then(answer)
        elif isinstance(answer, Extent):  # withdrawn by somebody who was told before, in the same round
            self.release(answer)


# --- the site

_log: Final = logger("kvxfer.worker")
_T = TypeVar("_T")

_AT_ONCE_BYTES: Final = 4096
"""How long two descriptions of caches may be for a look at both to take about a millisecond."""


class Tasks:
    """Tasks that the worker owns: whoever waits for them only looks on, and closing waits for all of them."""

    def __init__(self) -> None:
        self._loop: Final = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._spare: set[asyncio.Task[Any]] = set()  # of these

    def spawn(
        self,
        work: Coroutine[Any, Any, Any],
        name: str,
        failed: Callable[[BaseException], None] | None = None,
        *,
        spare: bool = False,
    ) -> "asyncio.Task[Any]":
        """Start a task. An exception that it lets out is a defect: it is logged, but for errors of the library's own.

        Args:
            work: What to run.
            name: For logs.
            failed: Called with an exception that was let out, or with the cancellation that ended the task, so that
                nobody waits for ever for what it was to do.
            spare: Nobody needs it when all others have ended.
        """
        task = self._loop.create_task(work, name=name)  # also between two runs of the loop
        self._tasks.add(task)
        if spare:
            self._spare.add(task)

        def ended(task: "asyncio.Task[Any]") -> None:
            self._tasks.discard(task)
            self._spare.discard(task)
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, (asyncio.CancelledError, KvxferError)):
                _log.error("task_failed", task=task.get_name(), error=repr(error), exc_info=error)
            if error is not None and failed is not None:
                failed(error)

        task.add_done_callback(ended)
        return task

    async def drain(self, timeout: float, *, spare: bool = True) -> bool:
        """Wait for every task, also those that are started meanwhile. False if some did not end in time.

        Args:
            timeout: Seconds.
            spare: Those that are spare as well.
        """
        try:
            async with asyncio.timeout(timeout):
                while waited := set(self._tasks) if spare else self._tasks - self._spare:
                    await asyncio.wait(waited)
        except TimeoutError:
            return False
        return True

    def cancel(self) -> None:
        """Cancel what is left; for shutdown, after `drain`."""
        for task in list(self._tasks):
            task.cancel()


@dataclass(slots=True)
class Site:
    """Everything that the two sides of a worker share."""

    config: Config  # effective settings
    runtime: Runtime  # clock, randomness, machines
    loop: asyncio.AbstractEventLoop  # the worker's event loop
    geometry: CacheGeometry  # what this rank holds
    custody: Custody  # books of the caller's blocks
    send_desk: Desk  # staging memory to gather into
    receive_desk: Desk  # staging memory that peers may write
    plans: PairPlans  # plans with peers
    estimates: Estimates  # what transfers with peers are expected to take
    fabric: Fabric  # the transport
    lanes: Lanes  # peers that the fabric knows
    mover: Mover
    metrics: Metrics  # counters
    key: IdentityKey  # by what this rank proves its incarnation
    body: dict[bool, bytes]  # encoded `AgentBody`, by whether the peer is trusted with addresses
    reachable: Mapping[bool, Sequence[object]]  # by the same, what of the fabric's registrations the peer is told of
    facts: Sequence[tuple[str, str]]  # (name, value) pairs on which peers must agree
    capabilities: Capability  # what this rank can do
    staging: wire.MemorySpan | None  # staging memory that peers may write, as they see it; None without an arena
    sending: wire.MemorySpan | None  # staging memory that this rank gathers into; None without an arena
    in_place: bool  # whether the caller's blocks are registered, so that `direct` and `pull` are possible
    mappings: Mappings  # memory of peers that this rank's copies can address
    gates: Gates  # what keeps peers out of this rank's memory
    processes: Processes  # whether peers on this host are still there
    peer_gates: PeerGates = field(default_factory=PeerGates)  # what leads through the gates of peers
    # by incarnation, whether peers pass gates that grants name: each says so, and may not have opened them again
    fenced: dict[bytes, bool] = field(default_factory=dict[bytes, bool])
    issuer: Issuer | None = None  # makes and checks tickets; None until the engine is joined
    tasks: Tasks = field(default_factory=Tasks)  # work that the worker owns
    # tasks that look for evidence: closing does not wait for them, but has them look once more
    lookouts: Tasks = field(default_factory=Tasks)
    # by incarnation of the peer, bytes of blocks that it may be writing in place
    written_in_place: dict[bytes, int] = field(default_factory=dict[bytes, int])
    # by incarnation of the peer and direction (true: sending), the task that compiles the kernels for it
    warming: dict[tuple[bytes, bool], "asyncio.Task[None]"] = field(default_factory=dict)
    # by incarnation, trust and direction, what was found of a peer: `route_support`, but for what could not be mapped
    support_of: dict[tuple[bytes, bool, bool], tuple[PeerInfo, RouteSupport]] = field(default_factory=dict)
    draining: bool = False  # true once new work is refused
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while a thread looks at what a new peer holds
    # done once the worker waits for no peer any more: what is in doubt is looked at once more, and left
    closing: "asyncio.Future[None]" = field(init=False)
    now: Callable[[], float] = field(init=False)  # monotonic seconds, the runtime's
    place_bytes: int = field(init=False)  # how large a chunk may be in staging memory that peers write
    in_place_chunk_bytes: int = field(init=False)  # as of the settings
    sums_every: int = field(init=False)  # likewise
    rebuilds: Rebuilds = field(init=False)  # when the agent was made anew, and who waits for that

    def __post_init__(self) -> None:
        self.closing = self.loop.create_future()
        self.now = self.runtime.now
        self.place_bytes = min(self.config.chunk_bytes, self.receive_desk.share.capacity)
        self.in_place_chunk_bytes, self.sums_every = self.config.in_place_chunk_bytes, self.config.sums_every
        self.rebuilds = Rebuilds(self.now, self.loop)

    def call_at(self, when: float, callback: Callback) -> asyncio.TimerHandle:
        """Call `callback` on the loop at `when` (by `now`)."""
        return self.loop.call_later(max(0.0, when - self.now()), callback)

    async def offload(self, make: Callable[[], _T], *, rows: int) -> _T:
        """What `make` makes: at once if its tables are small, else in a worker thread."""
        return make() if rows <= SMALL_PLAN else await self.runtime.in_thread(make)

    async def examine(self, peer: PeerInfo, *, sending: bool) -> Agreed:
        """Look at what a new peer says to hold, and plan copies of it in one direction. Nothing is noted yet.

        What takes longer than a moment is done in a thread, for one peer after the other: the loop then shares the
        interpreter with no more than one.

        Raises:
            MismatchError: If its description contradicts itself, or what both sides hold cannot be copied as it is.
            ProtocolError: If it cannot be read.
        """
        theirs = peer.identity.capabilities
        asked = theirs if sending else self.capabilities  # the decode rank's
        if self.config.sums_every and not sending and not theirs & Capability.SUMS:
            raise MismatchError(
                f"integrity={self.config.integrity} is set here, but {peer.name} cannot add up what it sends",
                peer=peer.name,
                fields={"integrity": (self.config.integrity, "none")},
            )

        def look() -> Agreed:
            agreed = self.plans.examine(peer, sending=sending, convert=bool(asked & Capability.CONVERT))
            self.mappings.check_session(peer, agreed.geometry)
            return agreed

        if len(peer.told) + len(self.body[False]) <= _AT_ONCE_BYTES:
            return look()
        async with self.looking:
            return await self.runtime.in_thread(look)

    def admit(self, link: Link, agreed: Agreed) -> None:
        """Take note of the peer of a new link, of which `examine` has found this, and begin to prepare copies.

        Raises:
            MismatchError: If what both sides hold cannot be copied on any route, or in no chunk that the settings
                allow; or if the peer holds something else than what is mapped of it.
        """
        peer, trusted, sending = link.peer, link.trusted, link.role is Role.SERVER
        self.support_of.clear()
        self.plans.add_peer(peer, agreed)
        self.mappings.check_session(peer, agreed.geometry)
        self.peer_gates.on_session(peer)
        if trusted and peer.identity.capabilities & Capability.GATES:  # it was told of the locks, and says if they fail
            self.fenced.setdefault(peer.identity.incarnation, True)  # it may have, on another link
        self.processes.on_session(peer, link.process)
        least, here = self.plans.least_chunk_bytes(peer, sending=sending), self.config.chunk_bytes
        there, excluded = peer.body.max_chunk_bytes or here, ""
        if not self.plans.chunk_fits(peer, here, sending=sending) and self._both_stage(peer):
            excluded = (
                f"the smallest chunk of what both sides hold is {least} bytes, but chunks have room for {here} here "
                f"and {there} at the peer: raise chunk_bytes (and, for the route staged, arena_bytes)"
            )
        if least and not self.routes(peer, trusted=trusted, sending=sending):
            if not excluded:
                self._no_route(peer, trusted=trusted, sending=sending)
            raise MismatchError(excluded, peer=peer.name, fields={"chunk_bytes": (str(here), str(there))})
        if excluded:
            _log.warning("route_excluded", peer=peer.name, route="staged", reason=excluded)
        self.metrics.sessions_opened["send" if sending else "receive"] += 1
        self.lanes.wanted(peer)
        self.warm(peer, trusted=trusted, sending=sending)

    def routes(self, peer: PeerInfo, *, trusted: bool, sending: bool) -> list[Route]:
        """Routes that are open with a peer, best first. A prefill rank takes any that the decode rank accepts."""
        support = self.route_support(peer, trusted=trusted, sending=sending)
        if sending:
            return [route for route in Route if route in support.routes]
        return acceptable(self.config.route, support)

    def _no_route(self, peer: PeerInfo, *, trusted: bool, sending: bool) -> NoReturn:
        """Name why there is no route."""
        here, there = (
            "an arena" if staged else "none"
            for staged in (self.staging, peer.identity.capabilities & Capability.STAGED)
        )
        support = self.route_support(peer, trusted=trusted, sending=sending)
        if support.converts:
            raise MismatchError(
                "dtypes or scales differ, and only mapped and staged convert them: mapped is not possible here, and "
                f"staged needs an arena on both sides: here {here} (arena_bytes is {self.config.arena_bytes}), at the "
                f"peer {there}",
                peer=peer.name,
                fields={"arena": (here, there)},
            )
        raise MismatchError(
            f"there is no common route: route={self.config.route} is set here, and this pair can do {support}. "
            f"The route staged needs an arena on both sides (here {here}, at the peer {there}), direct and pull need "
            "registered blocks and trust on both",
            peer=peer.name,
            fields={"route": (self.config.route, str(support))},
        )

    def warm(self, peer: PeerInfo, *, trusted: bool, sending: bool) -> None:
        """Begin to prepare for copies with a new peer: map its memory, and compile what a GPU needs."""
        key = (peer.identity.incarnation, sending)
        maps = sending and trusted and self.in_place and Mappings.is_offered(peer)
        if (maps or self.geometry.kind == "cuda") and key not in self.warming:
            self.warming[key] = self.tasks.spawn(self._warm(peer, maps, sending=sending), f"kvxfer warm {peer.name}")

    async def _warm(self, peer: PeerInfo, maps: bool, *, sending: bool) -> None:
        if not self.plans.knows(peer):  # it left in the turn in which it came
            return
        if maps:
            await self.mappings.open(peer, self.plans.geometry(peer))
        try:
            variants = self.plans.variants(peer, sending=sending, mapped=maps)
            await self.runtime.in_thread(lambda: self.mover.warm(variants))
        except KvxferError as error:  # an odd pair compiles when it first copies
            _log.warning("kernels_not_compiled", peer=peer.name, error=str(error))

    def warm_sums(self, peer: PeerInfo, *, sending: bool) -> None:
        """Begin to prepare for sums of what is fetched: compile what a GPU needs."""
        key = (peer.identity.incarnation, sending)
        if self.geometry.kind == "cuda":
            work = self._warm_sums(peer, self.warming.get(key), sending=sending)
            self.warming[key] = self.tasks.spawn(work, f"kvxfer warm sums {peer.name}")

    async def _warm_sums(self, peer: PeerInfo, first: "asyncio.Task[None] | None", *, sending: bool) -> None:
        if first is not None:
            await asyncio.wait({first})
        try:
            await self.runtime.in_thread(lambda: self.mover.warm(self.plans.sum_variants(peer, sending=sending)))
        except KvxferError as error:
            _log.warning("kernels_not_compiled", peer=peer.name, error=str(error))

    def lease_ms(self, nbytes: int) -> int:
        """Milliseconds within which so many bytes that are under way must be begun: as many as a slow wire needs."""
        config = self.config
        times = max(1.0, nbytes / (config.window * config.chunk_bytes))
        return min(FOREVER_MS, int(config.grant_lease * 1000 * times))

    def pause(self) -> None:
        """The agent is about to be made anew: grant nothing that is reached through it."""
        self.rebuilds.begin()
        self.receive_desk.pause()

    def resume(self, *, done: bool) -> None:
        """It has been, or could not be: go on."""
        self.rebuilds.end(done=done)
        self.receive_desk.resume()

    def forget(self, peer: PeerInfo) -> None:
        """The last link to a peer is gone."""
        key = peer.identity.incarnation
        self.support_of.clear()
        self.lanes.forget(peer)
        self.mappings.forget(peer)
        self.peer_gates.forget(peer)
        self.processes.forget(peer)
        self.fenced.pop(key, None)
        self.plans.forget(peer)
        self.estimates.forget(key)
        for sending in (True, False):
            self.warming.pop((key, sending), None)

    @property
    def send_span(self) -> wire.MemorySpan:
        """The arena as descriptors name it.

        Raises:
            ArenaError: If there is none.
        """
        if self.sending is None:
            raise ArenaError("the route staged is off here: arena_bytes is 0")
        return self.sending

    def route_support(self, peer: PeerInfo, *, trusted: bool, sending: bool) -> RouteSupport:
        """What this rank and a peer can do together.

        Args:
            peer: The other side; whether it shared its addresses shows in its geometry.
            trusted: Whether this side shared its own.
            sending: Whether this rank is the prefill rank.
        """
        key = peer.identity.incarnation, trusted, sending
        before, support = self.support_of.get(key, (None, None))
        if support is None or before is not peer:
            support = self._support(peer, trusted=trusted, sending=sending)
            self.support_of[key] = peer, support
        if sending and Route.MAPPED in support.routes and self.mappings.reason_unmapped(peer):
            support = replace(support, routes=support.routes - {Route.MAPPED})
        return support

    def _support(self, peer: PeerInfo, *, trusted: bool, sending: bool) -> RouteSupport:
        """The same, but for memory that could not be mapped."""
        theirs = peer.identity.capabilities
        converts = self.plans.converts(peer, sending=sending)
        known = self.in_place and self.plans.geometry(peer).addressed and trusted
        if sending:
            mapped = known and Mappings.is_offered(peer)
        else:
            mapped = known and bool(self.capabilities & Capability.MAPPED) and not unlike(peer.body.host)
        writable = theirs if sending else self.capabilities  # the decode rank's
        fits = self._both_stage(peer) and self.plans.chunk_fits(peer, self.config.chunk_bytes, sending=sending)
        possible = {
            Route.STAGED: fits,
            Route.DIRECT: known and not converts and writable & Capability.DIRECT,
            Route.PULL: known and not converts and theirs & Capability.PULL,
            Route.MAPPED: mapped,  # as far as this side knows
        }
        return RouteSupport(frozenset(route for route, can in possible.items() if can), converts)

    def _both_stage(self, peer: PeerInfo) -> bool:
        return self.staging is not None and bool(peer.identity.capabilities & Capability.STAGED)

    @property
    def engine_issuer(self) -> Issuer:
        """The issuer of this engine.

        Raises:
            TicketError: If the worker has not joined its engine yet.
        """
        if self.issuer is None:
            raise TicketError(
                f"this is rank {self.config.rank} of {self.config.world}: call worker.join(card, key=...) first"
            )
        return self.issuer
