"""The mover as the event loop sees it: copies and posts go in as records, and come back as events.

Two pipes join the loop and the machine (`machine.py`). A record is the whole of what was decided: which bytes, until
when, past which lock or gate. From then on the machine alone knows how it stands, and the loop, which may cancel it, is
told once how it ended. What a record points to (tables, handles of events) is kept here until then.

Copies that follow one another make a flow, and so does one alone. The loop adds steps and says how many of them may
begin; the machine goes on from one to the next by itself, and the loop is told how many are done.

What ended in doubt stays in the machine as long as it may move bytes, or keeps the lock in front of a peer's memory.

On a machine with a GPU the events of CUDA that a copy waits for are asked by the machine. Anything else that may be
waited for has a method `query`, which needs the interpreter, so it is asked here; the record goes when it has happened.
"""

import asyncio
import atexit
import contextlib
import ctypes
import os
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace
from numpy.typing import NDArray

from kvxfer.copy import records
from kvxfer.copy.port import (
    FOREVER,
    MEMORIES,
    READY,
    AllOf,
    CopyJob,
    CopyOutcome,
    Direction,
    Event,
    Native,
    Operation,
    Post,
    Turns,
)
from kvxfer.copy.tables import SumTables, SumVariant, Variant
from kvxfer.errors import ClosedError, FabricError, KvxferError, TransferFailedError
from kvxfer.runtime import TURN_SECONDS, Runtime, allowed_cpus, resolve, settle

if TYPE_CHECKING:
    from kvxfer.copy.cuda import Gpu
    from kvxfer.copy.template import Batch

__all__ = ["Flow", "Mover", "usual_threads"]

I64: TypeAlias = NDArray[np.int64]

_NS: Final = 1_000_000_000
_BRIEF: Final = struct.Struct(f"<4q{8 * records.RECORD_WORDS - 32}s")
_POKE: Final = _BRIEF.pack(records.POKE, 0, 0, 0, b"")  # has it look at what the loop has put into `state`
_EVENT: Final = struct.Struct(f"<{records.EVENT_WORDS}q")
_READ_BYTES: Final = 256 * _EVENT.size
_LANES: Final = {Direction.GATHER: 0, Direction.SCATTER: 1}
_first_byte: Final = cast("Callable[[Any], ctypes.c_char]", ctypes.c_char.from_buffer)  # numpy takes 3 us to say it
_libc: Final[Any] = ctypes.CDLL(None)
_read, _write = ctypes.PyDLL(None).read, ctypes.PyDLL(None).write
"""Unlike those of `os` they keep the interpreter, which a thread that waits for it may not give back for 5 ms."""
_NO_LOCK: Final = (-1, 0, 0, 0, 0)
_GAP: Final = 8 * (records.HEARD - records.QUIET - 1)
_ON: Final = struct.Struct(f"<2q24xq80x4q{_GAP}xq{8 * (records.RECORD_WORDS - records.HEARD - 1)}x")
_FLOW: Final = struct.Struct(f"<11q16x7q{_GAP}xq8x4q16s{8 * (records.RECORD_WORDS - records.TOKEN - 2)}x")
_LATE_NS: Final = 25_000_000
"""After which a loop hears of steps of which movers tell each other: half of the time after which loops repeat that."""
_ROOM: Final = 256
"""Steps of a flow that the machine may see ahead."""
_MOST_AWAITING: Final = records.JOBS // 2
_NOWHERE: Final = (0, 0)
_NO_POST: Final = (0,) * (records.OF_FLOW - records.POST)
_BROKEN: Final = frozenset({records.FAILED, records.IN_DOUBT})
_MOST_NAMED: Final = 1024
_PEER: Final = "peer"
"""What makes a peer, among owners, another than an owner of its name."""
_DOING: Final = {Operation.READ: "read from", Operation.WRITE: "write to"}
_WAYS: Final = {Operation.READ: records.READS, Operation.WRITE: records.WRITES}
_UNBOUNDED: Final = 1 << 62
_LISTED_MORE: Final = 16
"""How many times as many pieces a part has where they are taken as one list."""
_CATCH_S: Final = 0.5
"""Seconds that a machine which works needs at most to let go of what it has posted."""
_LIBC: Final = {
    records.READ: "read",
    records.WRITE: "write",
    records.PPOLL: "ppoll",
    records.CLOCK_GETTIME: "clock_gettime",
    records.FCNTL: "fcntl",
    records.SEM_POST: "sem_post",
}
_SPIN_NS: Final = 200_000
"""For how long the machine looks without a pause for what may end at any moment."""
_OFTEN_NS, _SELDOM_NS = 100_000, 1_000_000
"""For how long it sleeps at most: where the transport may need it to go on; else. Over TCP, where the target moves the
data, 1 ms costs two thirds of the speed."""
_SPINS_FROM_CPUS: Final = 3
"""With fewer CPUs whoever spins keeps somebody from working for whom it waits."""
_SEMAPHORE_WORDS: Final = 8
"""More than a `sem_t` takes anywhere."""
_LOOK_S: Final = 0.0005
_LOOK_MAX_S: Final = 0.002
_LOOK_GROWTH: Final = 1.1
"""How often events that need the interpreter are asked: at first, and after a while."""
_MOST_PREPARING: Final = 8
"""Worker threads that prepare copies at once: all that need a kernel wait in theirs until it is compiled."""
_EXIT_S: Final = 2.0
_STOP_LOOK_S: Final = 0.001
_MOST_THREADS: Final = 8
_CPUS_EACH: Final = 4


def usual_threads(cpus: frozenset[int]) -> int:
    """A quarter of these CPUs, or of all that this process may use: others have some as well. But no more than 8."""
    return max(1, min(_MOST_THREADS, len(cpus or allowed_cpus()) // _CPUS_EACH))


class _Step(Struct, eq=False):
    """One copy of a flow, or several that follow one another, until they are done."""

    job: CopyJob
    flow: "Flow"
    # events that have not happened yet, and need the interpreter
    waits: list[Event] = field(default_factory=list[Event])
    handles: list[int] = field(default_factory=list[int])  # events that the machine asks
    kept: list[Any] = field(default_factory=list[Any])  # what its records point to
    room: Any = None  # memory for tables that are larger than a ring
    sums: SumTables | None = None  # what is added up on a GPU when it has run
    records: I64 | None = None  # its records, once they are made
    laid: int = 0  # how many of these are where the machine finds them
    stop: int = 0  # how many copies of the flow these and those before them are


class Flow(Struct, eq=False):
    """Copies that follow one another, until `job.done` is called."""

    job: CopyJob  # what they have in common
    lane: int
    total: int = 1  # how many there will be
    allowed: int = 1  # how many may begin
    width: int = 1  # how many may be under way at once
    # called when more are done; `steps` of what it is given are, and its times are those of all of them
    progress: Callable[[CopyOutcome], None] = lambda _: None
    awaits: bool = False  # whether it depends on the progress of peers: what does not must not queue behind it
    turns: Turns | None = None  # how it takes turns with a flow of a peer's
    peer_steps: int = 0  # how many steps that has done, as the loop heard
    slot: int = -1  # its row in the machine; -1 if it was not there yet
    cancelled: bool = False  # whether nobody wants it any more
    steps: deque[_Step] = field(default_factory=deque[_Step])  # those that the machine does not know yet
    table: Any = None  # records of those that it knows, from the one that is not done on
    pushed: int = 0  # how many it knows
    steps_done: int = 0  # how many are done
    until: int = 0  # when their lease ends, in ns
    quiet: int = 0  # for how long more may be done that the loop is not told of, in ns
    refs: deque[_Step] = field(default_factory=deque[_Step])  # what the records point to, of those that are not done
    kept: list[Any] = field(default_factory=list[Any])  # what its own record points to, and who prepares a step
    held: bool = False  # whether the next step has to wait, or is being prepared
    found: I64 | None = None  # where the machine puts what it adds up on a GPU behind the only step
    sent: tuple[int, ...] = ()  # what the machine was told last
    # rows of steps in doubt; of each, whether bytes of this side may still move, and when it ended, in ns
    lefts: dict[int, tuple[bool, int]] = field(default_factory=dict[int, tuple[bool, int]])
    error: KvxferError | None = None  # what has gone wrong before a step got to the machine
    over: bool = False  # whether it has ended, but for those
    doubtful: bool = False  # whether bytes of this side could move for a step in doubt, and nobody was told of the end
    # whether one of them may land though this side moves nothing: its agent has ended, or its peer is gone
    severed: bool = False
    forgotten: bool = False  # whether nobody asks any more for one of them


class _Asked:
    """Events that need the interpreter: the loop asks whether they have happened, time and again.

    Args:
        loop: Which asks.
        free: Called of each flow all of whose next step's events have.
        fail: Called of one whose cannot be asked, and why.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        free: Callable[[Flow], None],
        fail: Callable[[Flow, KvxferError], None],
    ) -> None:
        self._loop: Final = loop
        self._free: Final = free
        self._fail: Final = fail
        self.steps: Final[dict[_Step, None]] = {}  # that wait for any
        self._timer: asyncio.Handle | None = None
        self._delay = _LOOK_S

    def add(self, step: _Step) -> None:
        """Ask of the events of a step, the next one of its flow."""
        self.steps[step] = None
        self._delay = _LOOK_S
        if self._timer is None:
            self._timer = self._loop.call_soon(self._ask)

    def drop(self, flow: Flow) -> bool:
        """Whether the next step of a flow has waited here, which it does no more."""
        return bool(flow.steps) and self.steps.pop(flow.steps[0], self) is None

    def stop(self) -> None:
        """Ask no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _ask(self) -> None:
        self._timer = None
        asked = list(self.steps)
        fired: list[tuple[int, int, Flow]] = []
        turns: Counter[Hashable] = Counter()
        try:
            for step in asked:
                flow, failed = step.flow, None
                try:
                    while step in self.steps and step.waits and bool(step.waits[-1].query()):  # `bool` asks too
                        step.waits.pop()
                except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the caller's: the copy fails with it
                    failed = _error("the event that a copy waits for cannot be queried", error)
                if step not in self.steps or (step.waits and failed is None):  # whoever is told of one may cancel any
                    continue
                del self.steps[step]
                if failed is not None:
                    self._fail(flow, failed)
                else:
                    turns[flow.job.owner] += 1
                    fired.append((turns[flow.job.owner], len(fired), flow))
        finally:  # also where a signal has interrupted it: nobody else would ask the rest
            for _, _, flow in sorted(fired, key=lambda one: one[:2]):  # owners in turn, also on the way to the machine
                self._free(flow)
            self._delay = _LOOK_S if len(self.steps) < len(asked) else min(_LOOK_MAX_S, self._delay * _LOOK_GROWTH)
            if self.steps and self._timer is None:
                self._timer = self._loop.call_later(self._delay, self._ask)


class Mover:
    """Copies of one worker. All calls come from the loop on which it was made, but for those that say otherwise.

    Args:
        runtime: Clock, and what the machine runs in.
        gpu: The GPU whose memory is copied; None for CPU memory.
        threads: How many may work on one copy between CPU memory.
        cpus: Where they are kept; anywhere if there are none.
        max_descriptors: Pieces in one part of a post at most.
        max_post_bytes: Bytes in one part at most where host memory is involved; a larger piece is split. Between GPUs a
            post only starts a copy engine, so bytes need no bound there: what the bound protects against is a post that
            copies, with the thread inside it.
        no_progress_timeout: Seconds without any part of a post posted or ended until it is given up as `IN_DOUBT`. They
            count while the machine runs: a process that stood still does not doubt its peers for it.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        gpu: "Gpu | None" = None,
        threads: int = 1,
        cpus: frozenset[int] = frozenset(),
        max_descriptors: int = 1024,
        max_post_bytes: int = 4 << 20,
        no_progress_timeout: float = 30.0,
    ) -> None:
        self._loop: Final = asyncio.get_running_loop()
        self._runtime: Final = runtime
        self._gpu: Final = gpu
        self._flows: Final[dict[int, Flow]] = {}  # by slot, and by those of steps in doubt: the machine has them
        self._free: Final = list(range(records.JOBS))
        self._queue: Final[deque[Flow]] = deque()  # for which there is no slot
        self._awaiting = 0  # flows that go on as peers do, and have a slot
        self._parked: Final[deque[Flow]] = deque()  # those for which there is none
        self._asked: Final = _Asked(self._loop, self._on_step_free, self._fail)
        self._preparing: Final = asyncio.Semaphore(_MOST_PREPARING)
        self._inbox: Final = ctypes.create_string_buffer(_READ_BYTES)
        self._news: Final[deque[tuple[int, ...]]] = deque()  # events that were read, and not told
        self._unreported = 0  # flows of which nobody was told yet
        # by what number the machine knows them, and how many copies it has of each; who came last is behind
        self._owners: Final[dict[Hashable, tuple[int, int]]] = {}
        self._refusing = self._closing = False
        self._idle: Final = self._loop.create_future()  # done when nothing is awaited any more, nor will be
        self._limits: Final = max_descriptors, max_post_bytes
        self._native: Native | None = None  # of the agent that the machine has, or had last
        self._disconnected: Final[set[str]] = set()  # peers of which a post said so
        self._unwatched: Final[dict[str, list[Callable[[], object]]]] = {}  # by peer, what `part_with` calls later
        self._abandoning: asyncio.Future[None] | None = None
        self.ready: Callable[[str], asyncio.Future[Any] | None] = lambda _: None
        """Whoever knows peers: what is to be waited for before something is posted to one of them, if anything."""
        self._machine: Final = _Machine(runtime, gpu, threads, cpus, self._loop, self._flows)
        self._machine.state[records.PATIENCE] = int(min(no_progress_timeout, FOREVER) * _NS)
        self._loop.add_reader(self._machine.news, self._read_events)

    # --- asking

    def submit(self, job: CopyJob, direction: Direction) -> Flow:
        """Copy once its events have fired and it is its turn: a flow of one step, which waits for no peer.

        Raises:
            ClosedError: If it is closed; `job.done` is not called then.
        """
        return self._begin(Flow(job, _LANES[direction]), [job], alone=True)

    def flow(
        self,
        job: CopyJob,
        direction: Direction,
        steps: Iterable[CopyJob],
        *,
        total: int,
        allowed: int,
        width: int = _ROOM,
        turns: Turns | None = None,
        heard: int = 0,
        progress: Callable[[CopyOutcome], None],
    ) -> Flow:
        """Begin copies that follow one another. `job.done` is called on this loop, once, and not now.

        A step that is stopped or fails ends the flow: no other begins then, and those that are under way are stopped.

        Args:
            job: What they have in common.
            direction: Theirs.
            steps: The first of them; `add` brings more.
            total: How many there will be.
            allowed: How many may begin; `allow` lets more.
            width: Of them, how many may be under way at once: a step begins when the one so many before it is done.
            turns: How it takes turns with a flow of a peer's, if it does.
            heard: How many steps that one has done; `note_peer_steps` says more.
            progress: Called when more are done, but not when all are: half of what may begin, or a while is over. Must
                return quickly and must not raise.

        Raises:
            ClosedError: If it is closed; `job.done` is not called then.
        """
        awaits = direction is Direction.SCATTER
        flow = Flow(job, _LANES[direction], total, allowed, width, progress, awaits, turns, heard)
        return self._begin(flow, steps)

    def _begin(self, flow: Flow, steps: Iterable[CopyJob], *, alone: bool = False) -> Flow:
        """Begin with these steps, or `alone` with the only one, to which nobody says anything more."""
        if self._refusing:
            raise ClosedError("this worker is closing, and takes no more copies")
        job, turns = flow.job, flow.turns
        flow.quiet = _LATE_NS if turns and turns.token else records.SOON_NS
        flow.table = np.zeros((min(flow.total, max(flow.width, _ROOM)), records.RECORD_WORDS), np.int64)
        flow.until = int(job.until * _NS)
        flow.steps.extend(self._make_steps(flow, steps))
        self._unreported += 1
        # what is to arrive may need the transport to progress here, also while there is no place for its flow
        self._machine.state[records.HELD] += flow.awaits
        if job.post is not None and job.post.peer in self._disconnected:
            error = FabricError(f"{job.post.peer} is disconnected", disconnected=True)
            self._loop.call_soon(self._report, flow, self._outcome(error))
        elif alone and flow.steps[0].waits:  # it needs no place before
            self._await_events(flow)
        else:
            self._start(flow)
        return flow

    def add(self, flow: Flow, steps: Iterable[CopyJob]) -> None:
        """Let more steps follow, once they are allowed. Harmless if it is over."""
        flow.steps.extend(self._make_steps(flow, steps))
        self._push_steps(flow)
        self._send_progress(flow)

    def allow(self, flow: Flow, steps: int, until: float | None = None) -> None:
        """The first so many steps may begin, none of them later than `until`, or its own. Harmless if it is over."""
        flow.allowed = max(flow.allowed, min(steps, flow.total))
        if until is not None:
            flow.until = int(until * _NS)
        self._send_progress(flow)

    def note_peer_steps(self, flow: Flow, steps: int) -> None:
        """The peer has done the first so many steps of the flow that this one takes turns with. Harmless if it is over.

        Its mover says so to ours, and sooner; this is for what that does not bring.
        """
        if steps > flow.peer_steps:
            flow.peer_steps = steps
            self._send_progress(flow)

    def report_soon(self, flow: Flow) -> None:
        """Somebody waits for its steps, one by one: call `progress` soon from now on. Harmless if it is over."""
        flow.quiet = records.SOON_NS
        self._send_progress(flow)

    def finish(self, flow: Flow) -> None:
        """No step follows those that may begin. Harmless if it is over."""
        flow.total = min(flow.total, flow.allowed)
        self._send_progress(flow)

    @property
    def crowded(self) -> bool:
        """Whether something waits for a place in the machine, which flows that are idle occupy."""
        return bool(self._queue)

    def cancel(self, flow: Flow) -> None:
        """Do not begin it, or stop it where it can be stopped. Its `done` tells what came of it, and is not called now.

        Harmless if it is over.
        """
        flow.cancelled = True
        unfired = self._asked.drop(flow)
        if self._flows.get(flow.slot) is flow:
            self._machine.send(_BRIEF.pack(records.CANCEL, flow.slot, 0, 0, b""))
            return
        if flow in self._queue:
            self._queue.remove(flow)
        elif flow in self._parked:
            self._parked.remove(flow)
        elif not unfired:  # it is over, or its event has just happened, and it is reported where it would begin
            return
        self._loop.call_soon(self._report, flow, self._outcome(stopped=True))

    def warm(self, variants: Iterable[Variant | SumVariant]) -> None:
        """Compile these for the GPU, if there is one. May take seconds: call it from a worker thread."""
        if self._gpu is not None:
            for variant in variants:
                self._gpu.kernel.compile(variant)

    def keep(self, *owners: object) -> None:
        """Keep what owns memory that copies and posts may touch, also if nobody closes this and all is dropped."""
        self._machine.kept = owners

    def occupy(self, ctas: int) -> None:
        """Let copies that are asked for from now on occupy so many thread blocks. Safe from any thread."""
        if self._gpu is not None:
            self._gpu.ctas = ctas

    def writers_inside(self, gate: int, *, raised: bool) -> int:
        """How many writers of other devices are inside of a `Gate` in memory of this one, whose address is `gate`.

        If `raised`, its generation is raised, so that nobody else gets in. May wait for the device: call it from a
        worker thread.
        """
        return 0 if self._gpu is None else self._gpu.kernel.touch_gate(gate, raised=raised)

    def has_copy_since(self, since: float) -> bool:
        """Whether a copy that was launched before `since` still runs where calls of a driver would wait for it."""
        jobs = self._machine.jobs
        started = jobs[jobs[:, records.STATE] == records.RUNNING, records.STARTED]
        return self._gpu is not None and bool(((started > 0) & (started < since * _NS)).any())

    # --- the transport

    def attach(self, native: Native | None, *, anew: bool = False) -> None:
        """Post by this agent from now on; by none if there is none.

        With `anew` the one before has ended, and with it all that was posted by it and needs it.
        """
        self._native = native or self._native
        if anew:
            self._disconnected.clear()
        self._machine.attach(native, anew=anew)

    def hold_awake(self) -> Callable[[], None]:
        """Keep the transport progressing, for peers that write into our memory, until the returned function is called.

        Returns:
            Releases this hold; further calls do nothing.
        """
        state, holder = self._machine.state, [1]
        state[records.HELD] += 1
        self._machine.send(_POKE)

        def release() -> None:
            if holder:
                state[records.HELD] -= holder.pop()

        return release

    @property
    def held_awake(self) -> int:
        """For how many reasons the transport progresses though nothing is posted here: holds, and flows that await."""
        return int(self._machine.state[records.HELD])

    @property
    def lingering(self) -> int:
        """Posts that were given up, and may still touch memory."""
        jobs = self._machine.jobs
        return int(jobs[jobs[:, records.STATE] == records.LEFT, records.LINGERS].sum())

    @property
    def unknown_notifications(self) -> int:
        """Notifications of peers that no flow takes turns with, or not in this way."""
        return int(self._machine.state[records.STRANGE])

    def acquire_agent(self) -> bool:
        """Keep the machine from calling the agent; whether it is out of it. May be asked again. From any thread."""
        return bool(self._machine.posts.acquire_agent(self._machine.state.ctypes.data))

    def release_agent(self) -> None:
        """The machine may call the agent again. From any thread."""
        self._machine.posts.release_agent(self._machine.state.ctypes.data)

    def failure(self) -> FabricError | None:
        """Why the agent does not work, if it said so where nobody waits for an answer."""
        code, native = int(self._machine.state[records.BROKEN]), self._native
        return native.error(code, "make progress", False, False) if code and native is not None else None

    def owed_seconds(self) -> float:
        """For how many seconds the machine has owed a step."""
        owing = self.held_awake > 0 or any(not flow.over for flow in self._flows.values())
        return self._machine.owed_seconds(self._runtime.now()) if owing else 0.0

    def stop_posting(self) -> None:
        """Post nothing more until there is an agent (again)."""
        self._machine.send(_BRIEF.pack(records.HALT, 0, 0, 0, b""))

    @property
    def posting(self) -> bool:
        """Whether parts of posts may begin: also behind `stop_posting`, until the machine has heard of that."""
        return not (self._idle.done() or self._machine.state[records.HALTED])

    @property
    def under_way(self) -> bool:
        """Whether parts of posts are: also those that were given up and run on, as far as they are looked at."""
        jobs = self._machine.jobs
        runs_on = any(flow.lefts and flow.job.post and flow.job.post.runs_on for flow in self._flows.values())
        looked_at = (jobs[:, records.STATE] == records.SENDING) | runs_on
        return bool((looked_at & (jobs[:, records.FLYING] > 0)).any())

    async def abandon_posts(self) -> None:
        """Give up what is under way, whose end is told when `attach` was called. Nothing is once this has ended."""
        if self._idle.done():
            return
        if self._abandoning is None:
            self._abandoning = self._loop.create_future()
            self._machine.send(_BRIEF.pack(records.CATCH, 0, 0, 0, b""))
        await asyncio.shield(self._abandoning)

    @property
    def peers(self) -> set[str]:
        """To and from whom something is posted, or to be."""
        return {flow.job.post.peer for flow in self._flows.values() if flow.job.post is not None and not flow.over}

    def part_with(self, peer: str, then: Callable[[], object]) -> None:
        """Forget whether a peer is there, and call `then`: while something that was given up is looked at, later."""
        flying = self._machine.jobs[:, records.FLYING]
        if any(
            slot in flow.lefts and flow.job.post is not None and flow.job.post.peer == peer and flying[slot]
            for slot, flow in self._flows.items()
        ):
            self._unwatched.setdefault(peer, []).append(then)
        else:
            self._disconnected.discard(peer)
            then()

    def may_copy(self, flow: Flow) -> bool:
        """Whether a copy of it is under way, or may be yet: of one that was cancelled no other begins from now on."""
        begun = self._flows.get(flow.slot) is flow
        return not flow.cancelled or (begun and self._machine.may_go_on(flow.slot))

    def cancel_posts(self) -> None:
        """Post nothing of all that is asked for."""
        for flow in self._live():
            if flow.job.post is not None and not (flow.over and flow.lefts):
                self.cancel(flow)

    def forget(self, flow: Flow) -> None:
        """Nobody asks any more for what ended in doubt: the lock in front of a peer's memory is given back."""
        for slot, (_, finished) in flow.lefts.items() if flow.over else ():
            self._machine.send(_BRIEF.pack(records.FORGET, slot, finished, 0, b""))

    # --- ending

    async def close(self, timeout: float) -> bool:
        """Refuse new copies, finish the rest, stop. May be repeated.

        Copies that still wait for their events after `timeout` seconds are reported as failed. Those that run are
        reported when they end, and only then; the machine stops when they have.

        Returns:
            False if a copy had not been reported by then.
        """
        self._refusing = True
        deadline = self._loop.time() + timeout
        if self._unreported:
            await asyncio.wait({self._idle}, timeout=timeout)
        elif not self._idle.done():
            self._end()
        if self._unreported:
            self._closing = True
            for flow in self._live():
                self.cancel(flow)
            if any(flow.job.post is not None for flow in self._flows.values()):
                await self._end_posts()
            if self._unreported:
                return False
        while not self._machine.stop():
            if self._loop.time() >= deadline:
                return False
            await asyncio.sleep(_STOP_LOOK_S)
        return True

    def give_back(self) -> None:
        """It has ended, and the transport with it: give back what leads to memory of peers, still inside or not."""
        for flow in set(self._flows.values()):
            if flow.job.passage is not None:
                flow.job.passage.give_back()
        self._flows.clear()

    def _live(self) -> list[Flow]:
        """All that has been asked for, and is not over."""
        waiting = [step.flow for step in self._asked.steps]
        return list(dict.fromkeys([*waiting, *self._queue, *self._parked, *self._flows.values()]))

    async def _end_posts(self) -> None:
        catching = asyncio.ensure_future(self.abandon_posts())
        await asyncio.wait({catching}, timeout=_CATCH_S)
        if catching.done():
            self.attach(None)
            await asyncio.wait({self._idle}, timeout=_CATCH_S)
        else:
            catching.cancel()

    def _end(self) -> None:
        """Nothing is awaited any more, nor will be: hear of the machine no more, and have it stop."""
        resolve(self._idle, None)
        self._loop.remove_reader(self._machine.news)
        if self._abandoning is not None:
            resolve(self._abandoning, None)
        self._asked.stop()
        self._machine.stop()

    # --- events that need the interpreter

    def _sort_events(self, event: Event, step: _Step) -> None:
        """Who asks whether an event has happened: the machine, or this loop."""
        for one in event.events if isinstance(event, AllOf) else (event,):
            handle = int(getattr(one, "cuda_event", 0) or getattr(one, "event_id", 0) or 0)
            if self._gpu is not None and handle:
                step.handles.append(handle)
                step.kept.append(one)
            else:
                step.waits.append(one)

    def _await_events(self, flow: Flow) -> None:
        """The next step of a flow waits for events of which this loop asks."""
        flow.held = True
        self._asked.add(flow.steps[0])

    # --- records

    async def _prepare(self, step: _Step, batch: "Batch", met: "asyncio.Future[Any] | None") -> None:
        """See to what comes before a step: what takes a while is done in a worker thread."""
        gpu = self._gpu
        try:
            if met is not None:
                await asyncio.shield(met)
            if gpu is not None:
                prepare = partial(gpu.prepare, batch, step.job, step.flow.lane)
                async with self._preparing:
                    step.sums, step.room = await self._runtime.in_thread(prepare)
        except Exception as error:  # noqa: BLE001 - the copy fails with it
            self._fail(step.flow, _error("a copy could not be prepared", error))
        else:
            self._on_step_free(step.flow)

    def _start(self, flow: Flow) -> None:
        """Give it to the machine, if that has room."""
        if flow.cancelled:
            self._loop.call_soon(self._report, flow, self._outcome(stopped=True))
        elif flow.awaits and self._awaiting >= _MOST_AWAITING:
            self._parked.append(flow)
        elif not self._free:
            self._queue.append(flow)
        else:
            flow.slot = self._free.pop()
            self._flows[flow.slot] = flow
            self._awaiting += flow.awaits
            job = flow.job
            lock = _NO_LOCK if job.passage is None else job.passage.lend()
            owner = self._lend_number(job.owner)
            peer = 0 if job.post is None else self._lend_number((_PEER, job.post.peer))
            self._push_steps(flow)
            flow.sent = flow.pushed, flow.allowed, flow.total, flow.quiet, flow.peer_steps, flow.until
            where = ctypes.addressof(_first_byte(flow.table)), len(flow.table), flow.width
            common = flow.slot, flow.lane, owner, 0, flow.until, *lock
            agent, places, first, token = 0, 0, 0, b""
            if (turns := flow.turns) is not None:
                flow.kept.append(name := _named(turns.agent))
                agent, places, first, token = ctypes.addressof(name), turns.places, turns.first, turns.token
            said = *flow.sent[:5], agent, peer, places, first, token
            self._machine.send(_FLOW.pack(records.FLOW, *common, *where, *said))

    def _write_records(self, step: _Step) -> I64 | None:
        """Make the records of a step; None if something has to be seen to before, which begins."""
        flow, job, kept, gpu, sums = step.flow, step.job, step.kept, self._gpu, step.sums
        batch = job.tables or self._machine.nothing
        met = None if job.post is None else self.ready(job.post.peer)
        known = gpu is None or ((job.sums is None or sums is not None) and (gpu.arrival or not job.from_nic))
        if met is None and known:
            until = int(job.until * _NS)
            common = (
                *(records.COPY, 0, flow.lane, 0, 0, until),
                *(*_NO_LOCK, *(_listed(kept, step.handles) if step.handles else _NOWHERE), 0, 0, 0, 0),
                *(0 if gpu is None else gpu.ctas, 0, 0, 0),
                *(_NOWHERE if job.gate is None else (job.gate.address, job.gate.generation)),
                *(int(gpu is not None and job.from_nic and gpu.flushes), 0, 0, 0, 0),
                *(_NO_POST if job.post is None else self._post_words(kept, job.post, len(batch.said))),
                0,
            )
            step.records = batch.write_records(common, gpu, kept, step.room)
            if step.records is not None:
                if batch.helpers:
                    wanted = step.records[:, records.HELPERS]
                    np.minimum(wanted, self._machine.helpers(batch.helpers), out=wanted)
                elif gpu is not None and job.sums is not None and sums is not None:
                    step.records[0, records.BYTES] = job.sums.bytes
                    flow.found = gpu.add_sums(step.records[0], sums, kept, step.room)
                return step.records
        flow.kept.append(self._loop.create_task(self._prepare(step, batch, met), name="kvxfer prepare a copy"))
        return None

    def _post_words(self, kept: list[Any], post: Post, steps: int) -> tuple[int, ...]:
        """What a record says from POST on; of so many steps, the first. `kept` gets what it points to."""
        name, near, far = _named(post.peer), post.local, post.remote
        here, there = np.ascontiguousarray(near.pieces, np.int64), np.ascontiguousarray(far.pieces, np.int64)
        kept += [name, here, there]
        pieces, nbytes = self._limits
        if near.kind == far.kind == "VRAM":
            lists = self._native is not None and self._native.listed
            pieces, nbytes = _LISTED_MORE * pieces if lists else pieces, _UNBOUNDED
        return (
            *(_WAYS[post.operation], ctypes.addressof(name), 0),
            *(MEMORIES[near.kind], near.device, ctypes.addressof(_first_byte(here)) if len(here) else 0),
            *(MEMORIES[far.kind], far.device, ctypes.addressof(_first_byte(there)) if len(there) else 0),
            *(len(here) // steps, pieces, nbytes, int(post.runs_on)),
        )

    def _lend_number(self, owner: Hashable) -> int:
        """By what number the machine knows one that is sent a copy: negative (`~`) where it hears of it first.

        An owner that has had no copy for long is forgotten.
        """
        new, owners = len(self._owners), self._owners
        number, copies = owners.pop(owner, (-1, 0))
        if number < 0 and new == records.MOST_OWNERS:
            new, _ = owners.pop(next(one for one, (_, others) in owners.items() if not others))
        owners[owner] = new if number < 0 else number, copies + 1
        self._machine.state[records.OWNERS] += not copies
        return ~new if number < 0 else number

    # --- flows

    def _make_steps(self, flow: Flow, jobs: Iterable[CopyJob]) -> list[_Step]:
        found: list[_Step] = []
        for job in jobs:
            step = _Step(job, flow)
            if job.after is not READY:
                self._sort_events(job.after, step)
            found.append(step)
        return found

    def _push_steps(self, flow: Flow) -> None:
        """Put steps where the machine finds them, as far as there is room and nothing has to come before."""
        if flow.slot < 0 or flow.over:
            return
        steps, table, room = flow.steps, flow.table, len(flow.table)
        while steps and (free := room - flow.pushed + flow.steps_done) > 0 and not flow.held:
            step = steps[0]
            if step.waits:
                self._await_events(flow)
                return
            found, laid = step.records, step.laid
            if found is None and (found := self._write_records(step)) is None:
                flow.held = True
                return
            if not laid:
                step.stop = flow.pushed + len(found)
                flow.refs.append(step)
            at, many = flow.pushed % room, min(free, len(found) - laid)
            first = min(many, room - at)
            table[at : at + first] = found[laid : laid + first]
            table[: many - first] = found[laid + first : laid + many]
            step.laid += many
            flow.pushed += many
            if step.laid == len(found):
                steps.popleft()

    def _on_step_free(self, flow: Flow) -> None:
        """What the next step had to wait for has happened."""
        flow.held = False
        if flow.slot < 0:
            self._start(flow)
        else:
            self._push_steps(flow)
            self._send_progress(flow)

    def _send_progress(self, flow: Flow) -> None:
        said = flow.pushed, flow.allowed, flow.total, flow.quiet, flow.peer_steps, flow.until
        if said != flow.sent and self._flows.get(flow.slot) is flow and not flow.cancelled:
            flow.sent = said
            self._machine.send(_ON.pack(records.ON, flow.slot, said[5], *said[:5]))

    def _fail(self, flow: Flow, error: KvxferError) -> None:
        """Its next step cannot even get to the machine."""
        if flow.slot < 0:
            self._report(flow, self._outcome(error))
        elif not flow.over:
            flow.error = flow.error or error
            self.cancel(flow)

    def _on_flow(
        self, flow: Flow, flags: int, code: int, started: int, copying: int, posted: int, wire: int, posting: int
    ) -> None:
        """More steps of a flow are done, or it has ended."""
        outcome = flags & records.OUTCOMES
        told = CopyOutcome(
            self._error(flow.job, outcome, code, flags) if outcome in _BROKEN else None,
            started / _NS,
            stopped=outcome == records.STOPPED,
            in_doubt=outcome == records.IN_DOUBT,
            posted=posted / _NS,
            copying=copying / _NS,
            posting=posting / _NS,
            wire=wire / _NS,
            steps=flags // records.COUNTED,
        )
        flow.steps_done = told.steps
        while flow.refs and flow.refs[0].stop <= flow.steps_done:
            flow.refs.popleft()
        if flow.awaits:  # what was copied had come
            flow.peer_steps = max(flow.peer_steps, flow.steps_done)
        if outcome == records.PASSING:
            if flow.steps:
                self._push_steps(flow)
                self._send_progress(flow)
            if told.steps == flow.total:  # its end comes next
                return
            try:
                flow.progress(told)
            except Exception as error:  # noqa: BLE001 - as in `_report`
                self._loop.call_exception_handler({"message": "nobody took the progress of a flow", "exception": error})
            return
        flow.over = True
        self._free_slot(flow)
        flow.steps.clear()
        if flow.error is not None and told.error is None:
            told = replace(told, error=flow.error, stopped=False)
        if flow.job.sums is not None and outcome == records.DONE:
            if flow.found is None:
                flow.kept.append(self._loop.create_task(self._sum_on_host(flow, told), name="kvxfer add up"))
                return
            told = replace(told, sums=flow.found.astype("<i8").tobytes())
        try:
            self._report(flow, told)
        finally:  # also where a signal has interrupted it
            if flow.lefts or flow.doubtful:
                self._settle_steps(flow)
            else:
                flow.refs.clear()

    def _on_step(self, slot: int, flow_at: int, flags: int, outcome: int, code: int, finished: int) -> None:
        """A step of a flow ended in doubt, or more is known of that."""
        flow = self._flows[flow_at if outcome == records.IN_DOUBT else slot]
        lingers = bool(flags & records.IS_LINGERING)
        if flags & records.IS_LEFT:
            self._flows[slot] = flow
            flow.lefts[slot] = lingers, finished
        elif slot in flow.lefts:
            del self._flows[slot], flow.lefts[slot]
            if flow.over and not flow.lefts:
                self._leave_peer(flow.job)
        if outcome == records.IN_DOUBT:
            flow.doubtful |= lingers
            flow.severed |= not lingers  # nobody will say of what has left this side that it does not land any more
        flow.severed |= outcome == records.SEVERED
        flow.forgotten |= outcome == records.OVER and not code
        self._settle_steps(flow)

    def _settle_steps(self, flow: Flow) -> None:
        """Of steps in doubt some may be over."""
        if not flow.over:
            return
        if not flow.lefts:
            flow.refs.clear()
            flow.kept.clear()
        if flow.doubtful and not any(lingers for lingers, _ in flow.lefts.values()):
            flow.doubtful = False
            self._report_late(flow)

    def _leave_peer(self, job: CopyJob) -> None:
        """The machine has no row of a post in doubt any more, nor the lock in front of its peer's memory."""
        if job.post is not None:
            peer = _PEER, job.post.peer
            number, copies = self._owners[peer]
            self._owners[peer] = number, copies - 1
            self._machine.state[records.OWNERS] -= copies == 1
        if job.passage is not None:
            job.passage.give_back()

    # --- events of the machine

    def _read_events(self) -> None:
        first = not self._news  # else a turn in which the rest is told is due
        if (nbytes := _read(self._machine.news, self._inbox, len(self._inbox))) < 0:  # there is none after all
            return
        self._news.extend(_EVENT.iter_unpack(memoryview(self._inbox)[:nbytes]))
        if first:
            self._deliver()

    def _deliver(self) -> None:
        """Tell whoever asked. When that takes long, everybody else on the loop has a turn in between."""
        until = self._runtime.now() + TURN_SECONDS
        try:
            while self._news:
                event = self._news.popleft()
                if event[1] & records.OUTCOMES == records.PASSING and self._news and self._news[0][0] == event[0]:
                    continue  # the next one says more of the same flow
                slot, flags, code, started, *times = event
                if slot == records.NOBODY:
                    self._on_caught()
                elif slot < records.JOBS:
                    self._on_flow(self._flows[slot], flags, code, started, *times)
                else:
                    self._on_step(slot, started, flags, flags & records.OUTCOMES, code, times[2])
                if self._runtime.now() >= until:
                    break
        finally:  # also where a signal has interrupted it: nobody else would tell the rest
            if self._news:
                self._loop.call_soon(self._deliver)

    def _on_caught(self) -> None:
        """What was under way is given up."""
        caught, self._abandoning = self._abandoning, None
        if caught is not None:
            resolve(caught, None)

    def _free_slot(self, flow: Flow) -> None:
        """The machine has nothing of it any more, but for steps in doubt."""
        job = flow.job
        if self._asked.steps:
            self._asked.drop(flow)
        del self._flows[flow.slot]
        self._free.append(flow.slot)
        for owner in (job.owner,) if flow.lefts or job.post is None else (job.owner, (_PEER, job.post.peer)):
            number, copies = self._owners[owner]
            self._owners[owner] = number, copies - 1  # without a job its number may be another's
            self._machine.state[records.OWNERS] -= copies == 1
        if job.passage is not None and not flow.lefts:
            job.passage.give_back()
        self._awaiting -= flow.awaits
        while self._queue and self._free:  # one of them may have to wait elsewhere, and does not take it
            self._start(self._queue.popleft())
        if self._parked and self._free and self._awaiting < _MOST_AWAITING:
            self._start(self._parked.popleft())

    def _error(self, job: CopyJob, outcome: int, code: int, flags: int) -> KvxferError | None:
        """Why a job failed; a driver's codes are positive, a transport's are not."""
        if code > 0 and self._gpu is not None:
            return self._gpu.error(code)
        post, native = job.post, self._native
        if post is None or native is None:
            return TransferFailedError(f"a copy failed with code {code}")
        lingers, in_doubt = bool(flags & records.IS_LINGERING), outcome == records.IN_DOUBT
        gone = bool(flags & records.IS_GONE) and not lingers  # else that is true of one part
        if code == records.SILENT:
            patience = self._machine.state[records.PATIENCE] / _NS
            return FabricError(f"no progress for {patience:g} s to {post.peer}", in_doubt=in_doubt)
        if code == records.CUT_OFF:
            why = "the worker was closed" if self._closing else "the agent was rebuilt"
            return FabricError(f"{why} while a post to {post.peer} was under way", disconnected=gone, in_doubt=in_doubt)
        if flags & records.IS_GONE and native.for_good:
            self._disconnected.add(post.peer)
        error = native.error(code, f"{_DOING[post.operation]} {post.peer}", gone, in_doubt)
        if lingers and flags & records.IS_GONE:
            error = FabricError(f"{error}, and not every part has ended", in_doubt=in_doubt)
        return error

    def _report_late(self, flow: Flow) -> None:
        """What was in doubt has ended, or its agent has."""
        post = flow.job.post
        if post is None:
            return
        for then in self._unwatched.pop(post.peer, ()):
            self.part_with(post.peer, then)
        if flow.forgotten:  # nobody is left to be told
            return
        try:
            post.late(not flow.severed)
        except Exception as error:  # noqa: BLE001 - as in `_report`
            self._loop.call_exception_handler({"message": "nobody took the end of a doubt", "exception": error})

    async def _sum_on_host(self, flow: Flow, told: CopyOutcome) -> None:
        """Add up what CPU memory holds, in a worker thread."""
        plan = flow.job.sums
        try:
            if plan is not None:
                told = replace(told, sums=await self._runtime.in_thread(partial(self._machine.walk.total, plan)))
        except Exception as error:  # noqa: BLE001 - the copy fails with it
            told = replace(told, error=_error("sums of CPU memory failed", error))
        self._report(flow, told)

    def _outcome(self, error: KvxferError | None = None, *, stopped: bool = False) -> CopyOutcome:
        """Of what the machine never had."""
        return CopyOutcome(error, self._runtime.now(), stopped)

    def _report(self, flow: Flow, outcome: CopyOutcome) -> None:
        self._machine.state[records.HELD] -= flow.awaits
        if outcome.stopped and self._closing:
            outcome = replace(outcome, stopped=False, error=ClosedError("the worker was closed before it was copied"))
        try:
            flow.job.done(outcome)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - `done` must not raise: the others still hear
            self._loop.call_exception_handler({"message": "nobody took the end of a copy", "exception": error})
        finally:
            if not flow.lefts:
                flow.kept.clear()
            self._unreported -= 1
            if self._refusing and not self._unreported:
                self._end()


class _Machine:
    """The machine's memory, its pipes, and what it runs in: a thread, or the steps of a simulation."""

    def __init__(
        self,
        runtime: Runtime,
        gpu: "Gpu | None",
        threads: int,
        cpus: frozenset[int],
        loop: asyncio.AbstractEventLoop,
        flows: dict[int, Flow],
    ) -> None:
        self._held: Final = flows  # by slot: what the records point to, as long as the machine may read it
        self._code: Final = import_module("kvxfer.copy.machine")  # compiled when it is first needed, and not before
        self.nothing: Final[Batch] = import_module("kvxfer.copy.template").Batch.nothing()
        self.walk: Final = import_module("kvxfer.copy.walk")
        self.posts: Final = import_module("kvxfer.copy.posts")
        self._runtime: Final = runtime
        self._loop: Final = loop
        self._cpus: Final = cpus
        self._most: Final = threads
        self._helpers: Final[list[threading.Thread]] = []
        self._stopping = False
        self._unsent: Final[deque[bytes]] = deque()  # records for which the pipe had no room
        self._asked = 0.0  # when it was told something as it was asleep
        self.state: Final = np.zeros(records.STATE_WORDS, np.int64)
        self.jobs: Final = np.zeros((records.ROWS, records.JOB_WORDS), np.int64)
        self.ports: Final = np.zeros(records.PORTS, np.int64)
        self._natives: Final[list[Native]] = []  # whose functions it may call
        self._semaphore: Final = np.zeros(_SEMAPHORE_WORDS, np.int64)
        self._descriptors: Final[list[int]] = []
        try:
            for _ in range(2):
                self._descriptors.extend(os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as error:
            self.close()
            raise FabricError(f"the system gives the mover no pipes: {error}") from error
        commands, self._commands, self.news, news = self._descriptors  # from `news` events are read
        state = self.state
        for port, name in _LIBC.items():
            self.ports[port] = _address(_libc[name])
        _libc.sem_init(ctypes.c_void_p(self._semaphore.ctypes.data), 0, 0)
        state[records.HERE], state[records.ROWS_AT] = state.ctypes.data, self.jobs.ctypes.data
        state[records.COMMANDS], state[records.NEWS], state[records.CURRENT] = commands, news, -1
        state[records.SPARE : records.TAGS] = range(records.JOBS, records.ROWS)
        state[records.SPARE_COUNT] = records.STEPS
        state[records.OFTEN], state[records.SELDOM] = _OFTEN_NS, _SELDOM_NS
        state[records.SPIN] = _SPIN_NS if len(cpus or allowed_cpus()) >= _SPINS_FROM_CPUS else 0
        state[records.TEAM + 4], state[records.TEAM + 5] = self._semaphore.ctypes.data, _address(_libc.sem_wait)
        where = records.PARAMETERS
        arguments = state.ctypes.data + 8 * records.ARGUMENTS
        state[where : where + 8] = [arguments + 8 * number for number in range(8)]
        if gpu is not None:
            gpu.install(state, self.ports)
        self._gpu: Final = gpu  # whose memory it uses
        self.kept: tuple[object, ...] = ()  # what must not be freed before it has stopped
        try:
            self._join, self.wake = runtime.drive("kvxfer-mover", self)
        except KvxferError:
            self.close()
            raise
        _machines.add(self)

    def run(self) -> None:
        """Go on until STOP: in a thread."""
        self._code.run(self.state, self.jobs, self.ports)

    def step(self) -> float | None:
        """One step, at the time of a simulation."""
        self.state[records.FIXED], self.state[records.NOW] = 1, int(self._runtime.now() * _NS)
        delay = self._code.step(self.state, self.jobs, self.ports)
        return None if delay < 0 else delay / _NS

    def steps_of(self, slot: int) -> list[int]:
        """Slots that steps of a flow have, or had last."""
        found = np.flatnonzero(self.jobs[records.JOBS :, records.OF_FLOW] == slot + 1) + records.JOBS
        slots: list[int] = found.tolist()
        return slots

    def may_go_on(self, flow: int) -> bool:
        """Whether a step of a flow is copied, or may be yet: no other begins from now on."""
        if self._unsent:  # also that it is cancelled, perhaps, behind what the machine has yet to read of it
            return True
        off = self.posts.prevent_steps(self.jobs[flow].ctypes.data)
        rows = [self.jobs[slot] for slot in self.steps_of(flow)]
        held = [self.posts.prevent_start(row.ctypes.data, flow + 1) for row in rows]  # of each it is seen to
        going = [row[records.STATE] in (records.WAITING, records.RUNNING) for row in rows]
        return not off or any(one and not two for one, two in zip(going, held, strict=True))

    def attach(self, native: Native | None, *, anew: bool) -> None:
        """See `Mover.attach`."""
        self._natives[:] = [*self._natives[-1:], *([] if native is None else [native])]
        if native is not None:
            self.ports[records.AGENT_PORTS :] = native.table
            self.state[records.ORDERLY] = native.orderly
        agent, notices = (0, 0) if native is None else (native.agent, native.notices)
        self.send(_BRIEF.pack(records.AGENT, agent, notices, int(anew), b""))

    def owed_seconds(self, now: float) -> float:
        """For how long there was no step since one was asked for."""
        stepped = int(self.state[records.STEPPED]) / _NS
        if self.state[records.ASLEEP] and self._asked <= stepped:
            return 0.0
        return max(0.0, now - max(self._asked, stepped))

    def send(self, record: bytes) -> None:
        """Put a record into the pipe, as soon as there is room. Of no effect when it has ended."""
        if not self._descriptors:
            return
        if self.state[records.ASLEEP] and self._asked <= int(self.state[records.STEPPED]) / _NS:
            self._asked = self._runtime.now()
        if self._unsent:
            self._unsent.append(record)
        else:
            try:
                # a pipe takes so few bytes whole, or not at all
                if _write(self._commands, record, len(record)) < 0:
                    os.write(self._commands, record)
            except BlockingIOError:
                self._loop.add_writer(self._commands, self._write_pending)
                self._unsent.append(record)
        if self.wake is not None:
            self.wake()

    def _write_pending(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                os.write(self._commands, self._unsent[0])
                self._unsent.popleft()
        if not self._unsent:
            self._loop.remove_writer(self._commands)
        if self.wake is not None:
            self.wake()

    def helpers(self, wanted: int) -> int:
        """How many helpers of so many a copy on CPU memory wakes. They are started when they are first needed."""
        wanted = min(wanted, self._most - 1)
        while len(self._helpers) < wanted:
            helper = threading.Thread(target=self._run_helper, name="kvxfer-copy", daemon=True)
            try:
                helper.start()
            except RuntimeError:  # the system does not let it: who is there does its part
                break
            self._helpers.append(helper)
        return max(0, min(wanted, len(self._helpers)))

    def _run_helper(self) -> None:
        settle(self._cpus)
        self.walk.help_out(self.state.ctypes.data + 8 * records.TEAM)

    def stop(self, timeout: float = 0.0) -> bool:
        """Stop, and close the pipes; with a time-out leave them. Nothing may be under way.

        Returns:
            False if that takes longer; may be repeated.
        """
        if self not in _machines:
            return True
        if not self._stopping:
            self._stopping = True
            self.send(_BRIEF.pack(records.STOP, 0, 0, 0, b""))
        if not self._join(timeout):
            return False
        _machines.discard(self)
        self.kept = ()
        self.state[records.TEAM] = 0  # what nobody has taken, as the process ends, is left alone
        self.state[records.TEAM + 3] = 1
        for _ in self._helpers:
            _libc.sem_post(ctypes.c_void_p(self._semaphore.ctypes.data))
        for helper in self._helpers if timeout else ():
            helper.join(timeout)
        if not timeout:  # else the process ends, and a loop in another thread may be about to read
            self.close()
        return True

    def close(self) -> None:
        """Close its pipes."""
        while self._descriptors:
            os.close(self._descriptors.pop())


_machines: Final[set[_Machine]] = set()
"""All that run in this process."""


def _end_all() -> None:
    """The interpreter ends: whoever runs without it must not outlive what it works on, be it memory of a peer here."""
    # what a simulation steps is left as it is, and may have gone with its loop
    ending = {one: one.kept for one in _machines if one.wake is None}
    for one in ending:
        one.stop(_EXIT_S)


def _forget_all() -> None:
    """This is a forked child: it has none of the threads."""
    for one in _machines:
        one.close()
    _machines.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)


@lru_cache(_MOST_NAMED)
def _named(agent: str) -> "ctypes.Array[ctypes.c_char]":
    """An agent's name as C reads it. To make one takes long: its type is made with it, and is garbage after it."""
    return ctypes.create_string_buffer(agent.encode())


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _listed(kept: list[Any], numbers: Sequence[Any]) -> tuple[int, int]:
    """Numbers as the machine reads them: where they are, and how many."""
    found = np.asarray(numbers, np.int64)
    kept.append(found)
    return found.ctypes.data, len(found)


def _error(doing: str, error: BaseException) -> KvxferError:
    """Translate whatever was raised; the original becomes the cause."""
    if isinstance(error, KvxferError):
        return error
    translated = TransferFailedError(f"{doing}: {type(error).__name__}: {error}")
    translated.__cause__ = error
    return translated
