"""The mover as the event loop sees it: copies go in as records, and come back as events.

Two pipes join the loop and the machine (`machine.py`). A record is the whole of what was decided: which bytes, until
when, past which lock or gate. From then on the machine alone knows how it stands, and the loop, which may cancel it, is
told once how it ended. What a record points to (tables, handles of events) is kept here until then.

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
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.copy import records
from kvxfer.copy.port import READY, AllOf, CopyJob, CopyOutcome, Direction, Event
from kvxfer.copy.sum_tables import SumTables, pack_sums
from kvxfer.copy.tables import PART_BYTES, parts_of
from kvxfer.errors import ClosedError, KvxferError, TransferFailedError
from kvxfer.geometry.copyplan import CopyPlan
from kvxfer.geometry.sums import SumPlan
from kvxfer.runtime import TURN_SECONDS, Runtime, allowed_cpus, settle

if TYPE_CHECKING:
    from kvxfer.copy.cuda import Gpu

__all__ = ["Copy", "Mover", "usual_threads"]

I64: TypeAlias = NDArray[np.int64]

_NS: Final = 1_000_000_000
_FOREVER_NS: Final = (1 << 63) - 1
_RECORD: Final = struct.Struct(f"<{records.RECORD_WORDS}q")
_CANCEL: Final = struct.Struct(f"<2q{8 * records.RECORD_WORDS - 16}s")
_EVENT: Final = struct.Struct(f"<{records.EVENT_WORDS}q")
_READ_BYTES: Final = 256 * _EVENT.size
_LANES: Final = {Direction.GATHER: 0, Direction.SCATTER: 1}
_NO_LOCK: Final = (-1, 0, 0, 0, 0)
_NOWHERE: Final = (0, 0)
_NO_LAUNCH: Final = (0,) * 10
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
_SPINS_FROM_CPUS: Final = 3
"""With fewer CPUs whoever spins keeps somebody from working for whom it waits."""
_SEMAPHORE_WORDS: Final = 8
"""More than a `sem_t` takes anywhere."""
_LOOK_S: Final = 0.0005
_LOOK_MAX_S: Final = 0.002
_LOOK_GROWTH: Final = 1.1
"""How often events that need the interpreter are asked: at first, and after a while."""
_EXIT_S: Final = 2.0
_STOP_LOOK_S: Final = 0.001
_MOST_THREADS: Final = 8
_CPUS_EACH: Final = 4


def usual_threads() -> int:
    """A quarter of the CPUs that this process may use, so that others have some as well, but no more than 8."""
    return max(1, min(_MOST_THREADS, len(allowed_cpus()) // _CPUS_EACH))


@dataclass(slots=True, eq=False)
class Copy:
    """A copy that was asked for, until `job.done` is called.

    Attributes:
        job: What was asked for.
        lane: Its direction.
        waits: Events that have not happened yet, and need the interpreter.
        handles: Events that the machine asks.
        kept: What its record points to.
        room: Memory for tables that are larger than a ring.
        sums: What is added up on a GPU when it has run.
        found: Where the machine puts that.
        slot: Its row in the machine; -1 if it is not there.
        cancelled: Whether nobody wants it any more.
        closed: Whether that is because the worker is closing.
    """

    job: CopyJob
    lane: int
    waits: list[Event] = field(default_factory=list[Event])
    handles: list[int] = field(default_factory=list[int])
    kept: list[Any] = field(default_factory=list[Any])
    room: Any = None
    sums: SumTables | None = None
    found: I64 | None = None
    slot: int = -1
    cancelled: bool = False
    closed: bool = False


class Mover:
    """Copies of one worker. All calls come from the loop on which it was made, but for those that say otherwise.

    Args:
        runtime: Clock, and what the machine runs in.
        gpu: The GPU whose memory is copied; None for CPU memory.
        ctas: Thread blocks that a copy occupies at most, so that other work keeps its share of the GPU.
        threads: How many may work on one copy between CPU memory.
        cpus: Where they are kept; anywhere if there are none.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        gpu: "Gpu | None" = None,
        ctas: int = 24,
        threads: int = 1,
        cpus: frozenset[int] = frozenset(),
    ) -> None:
        self._loop: Final = asyncio.get_running_loop()
        self._runtime: Final = runtime
        self._gpu: Final = gpu
        self._ctas = ctas
        self._copies: Final[dict[int, Copy]] = {}  # by slot: the machine has them
        self._free: Final = list(range(records.JOBS))
        self._queue: Final[deque[Copy]] = deque()  # for which there is no slot
        self._behind: Final[dict[Hashable, deque[Copy]]] = {}  # by owner, those that wait for one that is prepared
        self._unfired: list[Copy] = []  # whose events need the interpreter
        self._news: Final[deque[tuple[int, ...]]] = deque()  # events that were read, and not told
        self._untold = 0  # copies of which nobody was told yet
        self._owners: Final[dict[Hashable, int]] = {}  # by what number the machine knows them, who came last behind
        self._sent: Final[Counter[Hashable]] = Counter()  # copies that it has of each
        self._look: asyncio.Handle | None = None
        self._delay = _LOOK_S
        self._refusing = self._closing = False
        self._idle: Final = self._loop.create_future()
        self._machine: Final = _Machine(runtime, gpu, threads, cpus, self._loop, self._copies)
        self._loop.add_reader(self._machine.news, self._read)

    # --- asking

    def submit(self, job: CopyJob, direction: Direction) -> Copy:
        """Copy once its events have fired and it is its turn. `job.done` is called on this loop, once, and not now.

        Raises:
            ClosedError: If it is closed; `job.done` is not called then.
        """
        if self._refusing:
            raise ClosedError("this worker is closing, and takes no more copies")
        self._untold += 1
        copy = Copy(job, _LANES[direction])
        if job.after is not READY:
            self._split(job.after, copy)
        if copy.waits:
            self._unfired.append(copy)
            self._delay = _LOOK_S
            if self._look is None:
                self._look = self._loop.call_soon(self._ask)
        else:
            self._prepare(copy)
        return copy

    def cancel(self, copy: Copy) -> None:
        """Do not begin it, or stop it where it can be stopped. Its `done` tells what came of it, and is not called now.

        Harmless if it is over.
        """
        copy.cancelled = True
        if copy in self._unfired:
            self._unfired.remove(copy)
        elif copy in self._queue:
            self._queue.remove(copy)
        else:
            if self._copies.get(copy.slot) is copy:
                self._machine.tell(_CANCEL.pack(records.CANCEL, copy.slot, b""))
            return
        self._loop.call_soon(self._tell, copy, self._outcome(stopped=True))

    def warm(self, plans: Iterable[CopyPlan]) -> None:
        """Compile whatever copies of this shape need. May take seconds: call it from a worker thread, once a pair."""
        if self._gpu is not None:
            self._gpu.warm(plans)

    def warm_sums(self, plans: Iterable[SumPlan]) -> None:
        """The same for sums."""
        if self._gpu is not None:
            self._gpu.warm_sums(plans)

    def occupy(self, ctas: int) -> None:
        """Let copies that are asked for from now on occupy so many thread blocks. Safe from any thread."""
        self._ctas = ctas

    def inside(self, gate: int, *, raised: bool) -> int:
        """How many writers of other devices are inside of a `Gate` in memory of this one, whose address is `gate`.

        If `raised`, its generation is raised, so that nobody else gets in. May wait for the device: call it from a
        worker thread.
        """
        return 0 if self._gpu is None else self._gpu.kernel.touch_gate(gate, raised=raised)

    def standing(self, since: float) -> bool:
        """Whether a copy that was launched before `since` still runs where calls of a driver would wait for it."""
        return self._gpu is not None and any(0 < self._machine.started(slot) < since * _NS for slot in self._copies)

    def waiting(self, direction: Direction) -> int:
        """How many copies wait for events that need the interpreter."""
        return sum(copy.lane == _LANES[direction] for copy in self._unfired)

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
        if self._untold:
            await asyncio.wait({self._idle}, timeout=timeout)
        if self._untold:
            self._closing = True
            for copy in [*self._unfired, *self._queue, *self._copies.values()]:
                copy.closed = True
                self.cancel(copy)
            return False
        self._hang_up()
        while not self._machine.stop():
            if self._loop.time() >= deadline:
                return False
            await asyncio.sleep(_STOP_LOOK_S)
        return True

    def _hang_up(self) -> None:
        """Nothing is awaited any more."""
        self._loop.remove_reader(self._machine.news)
        if self._look is not None:
            self._look.cancel()

    # --- events that need the interpreter

    def _split(self, event: Event, copy: Copy) -> None:
        """Who asks whether an event has happened: the machine, or this loop."""
        for one in event.events if isinstance(event, AllOf) else (event,):
            handle = int(getattr(one, "cuda_event", 0) or getattr(one, "event_id", 0) or 0)
            if self._gpu is not None and handle:
                copy.handles.append(handle)
                copy.kept.append(one)
            elif one is not READY:
                copy.waits.append(one)

    def _ask(self) -> None:
        """Ask each event that is waited for."""
        self._look = None
        asked, self._unfired = self._unfired, []
        fired: list[tuple[int, int, Copy]] = []
        turns: Counter[Hashable] = Counter()
        for copy in asked:
            if copy.cancelled:  # by whoever was told of one before it
                self._tell(copy, self._outcome(stopped=True))
                continue
            try:
                while copy.waits and bool(copy.waits[-1].query()):  # whatever it returns is asked here
                    copy.waits.pop()
            except Exception as error:  # noqa: BLE001 - an event of the caller's: the copy fails with it
                self._tell(copy, self._outcome(_error("the event that a copy waits for cannot be queried", error)))
            else:
                if copy.waits:
                    self._unfired.append(copy)
                else:
                    turns[copy.job.owner] += 1
                    fired.append((turns[copy.job.owner], len(fired), copy))
        for _, _, copy in sorted(fired, key=lambda one: one[:2]):  # owners in turn, also on the way to the machine
            self._prepare(copy)
        self._delay = _LOOK_S if len(self._unfired) < len(asked) else min(_LOOK_MAX_S, self._delay * _LOOK_GROWTH)
        if self._unfired and self._look is None:
            self._look = self._loop.call_later(self._delay, self._ask)

    # --- records

    def _prepare(self, copy: Copy) -> None:
        """Make what the record points to: at once, or in a worker thread what would take a while."""
        job, gpu = copy.job, self._gpu
        behind = self._behind.get(job.owner)
        if behind is not None:  # those of one owner keep their order
            behind.append(copy)
        elif gpu is None or (job.sums is None and gpu.is_prepared(job.tables)):
            self._send(copy)
        else:
            self._behind[job.owner] = deque()
            copy.kept.append(self._loop.create_task(self._prepare_off_loop(copy, gpu), name="kvxfer prepare a copy"))

    async def _prepare_off_loop(self, copy: Copy, gpu: "Gpu") -> None:
        job = copy.job

        def make() -> None:
            if job.sums is not None:
                copy.sums = pack_sums(job.sums)
            copy.room = gpu.prepare(job.tables, copy.sums, copy.lane)

        try:
            await self._runtime.in_thread(make)
        except Exception as error:  # noqa: BLE001 - the copy fails with it
            self._tell(copy, self._outcome(_error("a copy could not be prepared", error)))
        else:
            self._send(copy)
        behind = self._behind.pop(job.owner)
        while behind:
            self._prepare(behind.popleft())
            if (again := self._behind.get(job.owner)) is not None:  # which had to be prepared too
                again.extend(behind)
                return

    def _send(self, copy: Copy) -> None:
        """Give it to the machine, if that has room."""
        if copy.cancelled:
            self._loop.call_soon(self._tell, copy, self._outcome(stopped=True))
        elif not self._free:
            self._queue.append(copy)
        else:
            copy.slot = self._free.pop()
            self._copies[copy.slot] = copy
            self._machine.tell(self._record(copy))

    def _record(self, copy: Copy) -> bytes:
        job, kept = copy.job, copy.kept
        tables, passage = job.tables, job.passage
        until = _FOREVER_NS if job.until >= _FOREVER_NS / _NS else int(job.until * _NS)
        lock = _NO_LOCK if passage is None else passage.lend()
        events = blanks = _NOWHERE
        if copy.handles:
            events = _listed(kept, copy.handles)
        if tables.blanks:
            blanks = _listed(kept, [(one.address, one.width, one.lines, one.pitch) for one in tables.blanks])
        if self._gpu is None:
            parts, count = parts_of(tables)
            kept.append(parts)
            copying: tuple[int, ...] = (
                parts.ctypes.data,
                count,
                self._machine.helpers(count, tables.nbytes),
                *_NO_LAUNCH,
            )
        else:
            copying = self._launches(copy, self._gpu)
        return _RECORD.pack(
            records.COPY,
            copy.slot,
            copy.lane,
            self._owner(job.owner),
            job.nbytes,
            until,
            *lock,
            *events,
            *blanks,
            *copying,
        )

    def _launches(self, copy: Copy, gpu: "Gpu") -> tuple[int, ...]:
        """What a record says from PARTS on, where a GPU copies."""
        job, kept, sums = copy.job, copy.kept, copy.sums
        words, gate = job.tables.words, job.gate
        launches = gpu.launches(job.tables, sums)
        sums_at = target = 0
        if sums is not None:
            sums_at = len(words) + sums.at
            words = np.concatenate([words, sums.words])
            copy.found = np.zeros(len(words) - sums_at, np.int64)
            target = copy.found.ctypes.data
        kept += [launches, words]
        return (
            *(launches.ctypes.data, len(launches), self._ctas),
            *(words.ctypes.data, len(words), int(gpu.near(job.tables, sums))),
            *((gate.address, gate.generation) if gate is not None else _NOWHERE),
            int(job.tables.from_nic and gpu.flushes),
            *(_NOWHERE if copy.room is None else (copy.room[0].data_ptr(), copy.room[1].data_ptr())),
            *(sums_at, target),
        )

    def _owner(self, owner: Hashable) -> int:
        """By what number the machine knows an owner. One that has had no copy for long is forgotten."""
        self._sent[owner] += 1
        self._machine.owners = len(self._sent)
        number = self._owners.pop(owner, None)
        if number is None and len(self._owners) < records.MOST_OWNERS:
            self._owners[owner] = len(self._owners)
            return ~self._owners[owner]
        if number is None:
            oldest = next(one for one in self._owners if one not in self._sent)
            self._owners[owner] = number = self._owners.pop(oldest)
            return ~number
        self._owners[owner] = number
        return number

    # --- events of the machine

    def _read(self) -> None:
        """Take what the machine says."""
        first = not self._news
        self._news.extend(_EVENT.iter_unpack(self._machine.read()))
        if first:
            self._deliver()

    def _deliver(self) -> None:
        """Tell whoever asked. When that takes long, everybody else on the loop has a turn in between."""
        until = self._runtime.now() + TURN_SECONDS
        while self._news:
            slot, outcome, code, started, finished = self._news.popleft()
            copy = self._copies.pop(slot)
            self._free.append(slot)
            self._sent[copy.job.owner] -= 1
            if not self._sent[copy.job.owner]:
                del self._sent[copy.job.owner]
                self._machine.owners = len(self._sent)
            if self._queue:
                self._send(self._queue.popleft())
            if copy.job.passage is not None:
                copy.job.passage.give_back()
            error = self._gpu.error(code) if outcome == records.FAILED and self._gpu is not None else None
            summed = copy.found is not None and outcome == records.DONE
            found = copy.found.astype("<i8").tobytes() if summed and copy.found is not None else b""
            told = CopyOutcome(error, started / _NS, finished / _NS, outcome == records.STOPPED, found)
            if copy.job.sums is not None and self._gpu is None and outcome == records.DONE:
                copy.kept.append(self._loop.create_task(self._add_up(copy, told), name="kvxfer add up"))
            else:
                self._tell(copy, told)
            if self._news and self._runtime.now() >= until:
                self._loop.call_soon(self._deliver)
                return

    async def _add_up(self, copy: Copy, told: CopyOutcome) -> None:
        """Add up what CPU memory holds, in a worker thread."""
        plan = copy.job.sums
        try:
            if plan is not None:
                sums = await self._runtime.in_thread(lambda: self._machine.total(plan))
                told = replace(told, sums=sums)
        except Exception as error:  # noqa: BLE001 - the copy fails with it
            told = replace(told, error=_error("sums of CPU memory failed", error))
        self._tell(copy, told)

    def _outcome(self, error: KvxferError | None = None, *, stopped: bool = False) -> CopyOutcome:
        """Of what the machine never had."""
        now = self._runtime.now()
        return CopyOutcome(error, now, now, stopped)

    def _tell(self, copy: Copy, outcome: CopyOutcome) -> None:
        if outcome.stopped and copy.closed:
            outcome = replace(outcome, stopped=False, error=ClosedError("the worker was closed before it was copied"))
        try:
            copy.job.done(outcome)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - `done` must not raise: the others still hear
            self._loop.call_exception_handler({"message": "nobody took the end of a copy", "exception": error})
        copy.kept.clear()
        self._untold -= 1
        if self._refusing and not self._untold:
            if not self._idle.done():
                self._idle.set_result(None)
            if self._closing:
                self._hang_up()
                self._machine.stop()


class _Machine:
    """The machine's memory, its pipes, and what it runs in: a thread, or the steps of a simulation.

    Attributes:
        news: The descriptor from which events are read.
    """

    def __init__(
        self,
        runtime: Runtime,
        gpu: "Gpu | None",
        threads: int,
        cpus: frozenset[int],
        loop: asyncio.AbstractEventLoop,
        copies: dict[int, Copy],
    ) -> None:
        self._held: Final = copies  # by slot: what the records point to, as long as the machine may read it
        self._code: Final = import_module("kvxfer.copy.machine")  # compiled when it is first needed, and not before
        self._walk: Final = import_module("kvxfer.copy.walk")
        self._sums: Final = import_module("kvxfer.copy.sums")
        self._runtime: Final = runtime
        self._loop: Final = loop
        self._cpus: Final = cpus
        self._most: Final = threads
        self._helpers: Final[list[threading.Thread]] = []
        self._stopping = False
        self._unsent: Final[deque[bytes]] = deque()  # records for which the pipe had no room
        self.state: Final = np.zeros(records.STATE_WORDS, np.int64)
        self.jobs: Final = np.zeros((records.JOBS, records.JOB_WORDS), np.int64)
        self.ports: Final = np.zeros(records.PORTS, np.int64)
        self._semaphore: Final = np.zeros(_SEMAPHORE_WORDS, np.int64)
        commands, self._commands = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.news, news = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._descriptors: Final = [commands, self._commands, self.news, news]
        state, libc = self.state, _libc()
        for port, name in _LIBC.items():
            self.ports[port] = _address(libc[name])
        libc.sem_init(ctypes.c_void_p(self._semaphore.ctypes.data), 0, 0)
        state[records.HERE] = state.ctypes.data
        state[records.COMMANDS], state[records.NEWS], state[records.CURRENT] = commands, news, -1
        state[records.SPIN] = _SPIN_NS if len(allowed_cpus()) >= _SPINS_FROM_CPUS else 0
        state[records.TEAM + 4], state[records.TEAM + 5] = self._semaphore.ctypes.data, _address(libc.sem_wait)
        where = records.PARAMETERS
        arguments = state.ctypes.data + 8 * records.ARGUMENTS
        state[where : where + 8] = [arguments + 8 * number for number in range(8)]
        if gpu is not None:
            gpu.install(state, self.ports)
        self._gpu: Final = gpu  # whose memory it uses
        _machines.add(self)
        self._service: Final = runtime.drive("kvxfer-mover", self)

    def run(self) -> None:
        """Go on until STOP: in a thread."""
        self._code.run(self.state, self.jobs, self.ports)

    def step(self) -> float | None:
        """One step, at the time of a simulation."""
        self.state[records.FIXED], self.state[records.NOW] = 1, int(self._runtime.now() * _NS)
        delay = self._code.step(self.state, self.jobs, self.ports)
        return None if delay < 0 else delay / _NS

    def total(self, plan: SumPlan) -> bytes:
        """Add up what CPU memory holds, in the calling thread."""
        sums: bytes = self._sums.total(plan)
        return sums

    @property
    def owners(self) -> int:
        """How many owners of copies there are."""
        return int(self.state[records.OWNERS])

    @owners.setter
    def owners(self, count: int) -> None:
        self.state[records.OWNERS] = count

    def started(self, slot: int) -> int:
        """When the copy in a slot was launched, in nanoseconds; 0 if it was not."""
        return int(self.jobs[slot, records.STARTED])

    def tell(self, record: bytes) -> None:
        """Put a record into the pipe, as soon as there is room."""
        if self._unsent or not self._write(record):
            if not self._unsent:
                self._loop.add_writer(self._commands, self._send)
            self._unsent.append(record)
        self._service.wake()

    def _write(self, record: bytes) -> bool:
        try:
            os.write(self._commands, record)  # a pipe takes so few bytes whole, or not at all
        except BlockingIOError:
            return False
        return True

    def _send(self) -> None:
        while self._unsent and self._write(self._unsent[0]):
            self._unsent.popleft()
        if not self._unsent:
            self._loop.remove_writer(self._commands)
        self._service.wake()

    def read(self) -> bytes:
        """Events that have come."""
        try:
            return os.read(self.news, _READ_BYTES)
        except BlockingIOError:
            return b""

    def helpers(self, parts: int, nbytes: int) -> int:
        """How many helpers a copy on CPU memory wakes. They are started when they are first needed."""
        wanted = min(self._most, parts, nbytes // PART_BYTES) - 1
        with contextlib.suppress(RuntimeError):  # the system does not let them start: who is there does their part
            while len(self._helpers) < wanted:
                helper = threading.Thread(target=self._help, name="kvxfer-copy", daemon=True)
                helper.start()
                self._helpers.append(helper)
        return max(0, min(wanted, len(self._helpers)))

    def _help(self) -> None:
        settle(self._cpus)
        self._walk.help_out(self.state.ctypes.data + 8 * records.TEAM)

    def stop(self, timeout: float = 0.0) -> bool:
        """Stop, and close the pipes. Nothing may be under way. False if that takes longer; may be repeated."""
        if self not in _machines:
            return True
        if not self._stopping:
            self._stopping = True
            self.tell(_CANCEL.pack(records.STOP, 0, b""))
        if not self._service.stop(timeout):
            return False
        _machines.discard(self)
        self.state[records.TEAM] = 0  # what nobody has taken, as the process ends, is left alone
        self.state[records.TEAM + 3] = 1
        for _ in self._helpers:
            _libc().sem_post(ctypes.c_void_p(self._semaphore.ctypes.data))
        for helper in self._helpers if timeout else ():
            helper.join(timeout)
        self.close()
        return True

    def close(self) -> None:
        """Close its pipes."""
        while self._descriptors:
            os.close(self._descriptors.pop())


_machines: Final[set[_Machine]] = set()
"""All that run in this process."""


def _end_all() -> None:
    """The interpreter ends: whoever runs without it must not outlive what it works on."""
    for one in list(_machines):
        with contextlib.suppress(RuntimeError):  # that of a simulation has gone with its loop
            one.stop(_EXIT_S)


def _forget_all() -> None:
    """This is a forked child: it has none of the threads."""
    for one in _machines:
        one.close()
    _machines.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _listed(kept: list[Any], numbers: Sequence[Any]) -> tuple[int, int]:
    """Numbers as the machine reads them: where they are, and how many."""
    found = np.asarray(numbers, np.int64)
    kept.append(found)
    return found.ctypes.data, len(found)


def _error(doing: str, error: Exception) -> KvxferError:
    """Translate whatever was raised; the original becomes the cause."""
    if isinstance(error, KvxferError):
        return error
    translated = TransferFailedError(f"{doing}: {type(error).__name__}: {error}")
    translated.__cause__ = error
    return translated
