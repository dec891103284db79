"""Copies on a GPU: one service thread, one stream per direction, tables in rings, completion by polled events.

A job's tables are written into a slot of a ring of pinned memory, copied from there into the same slot of a ring of
device memory, and read there by the kernel, all in the order of the stream; small ones are read where they are. The
slot is reused only after the event behind the kernel has happened, so neither copy of the tables can change under its
reader. Nothing here waits for the device.

Addresses may be memory of this GPU, pinned host memory, or a peer's memory that this process has mapped and this GPU
can reach.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer.copy.jobs import Backlog, as_kvxfer_error
from kvxfer.copy.port import CopyJob, Direction, Event, Gate
from kvxfer.copy.ring import Ring
from kvxfer.copy.stream import Stream
from kvxfer.copy.sum_tables import SumTables, pack_sums, sum_variants
from kvxfer.copy.tables import Tables, pack, variants
from kvxfer.errors import KvxferError
from kvxfer.geometry.copyplan import CopyPlan
from kvxfer.geometry.sums import SumPlan
from kvxfer.memory.flush import Arrival, arrival, flush
from kvxfer.pace import Linear, Pace
from kvxfer.runtime import Runtime
from kvxfer.telemetry import logger

if TYPE_CHECKING:  # importing the kernel imports triton
    from kvxfer.copy.kernel import Kernel

__all__ = ["CudaExecutor", "recorded"]

I64: TypeAlias = NDArray[np.int64]

_log: Final = logger("kvxfer.receive")
_SLOT_WORDS: Final = 2  # slots begin at multiples of 16 bytes
_NO_GATE: Final = (0, 0, 0)

_PACE: Final = Pace(before=60e-6, after=1e-3, shortest=50e-6, longest=2e-3, back_off=1 / 8)
"""When to look at the device again: a copy is spun for, a late one for a millisecond."""
_LAUNCH_S: Final = 20e-6
_FIRST_GUESS_S_PER_BYTE: Final = 1 / 400e9
_FIRST_FIXED_S: Final = 8e-6
_LARGE_BYTES: Final = 1 << 20
_AHEAD_BYTES: Final = 512 << 20
"""Bytes that are launched ahead, by two jobs at least: more than a millisecond of the fastest copies."""
_TIMED: Final = 8
"""Of so many copies one is timed on the device: after a pause a mark takes the driver as long as a launch."""
_NEAR_WORDS: Final = 512
_NEAR_TILES: Final = 64
"""Tables of so few words for so few tiles are read from pinned memory: copying them to the device takes longer."""


def recorded(event: Event) -> bool:
    """Whether a CUDA event was ever recorded.

    An event that was not says `query() == True`, so it must not be taken for one that has fired. torch creates the
    driver's event at the first record, so until then there is none to ask for.

    Args:
        event: Anything that may be passed as `after=`; what is not a torch event counts as recorded.
    """
    for handle in ("cuda_event", "event_id"):  # torch.cuda.Event, torch.Event
        if hasattr(event, handle):
            return bool(getattr(event, handle))
    return True


class CudaExecutor:
    """Runs copy jobs on one GPU, gathers and scatters on streams of their own.

    Args:
        runtime: Clock and services.
        device: The GPU that copies.
        ctas: Thread blocks that a copy uses at most, so that other work keeps its share of the GPU.
        ring_bytes: Size of each direction's table ring, on the host and on the device. A plan whose tables are larger
            gets memory of its own.

    Raises:
        MissingExtraError: If triton cannot be imported.
    """

    def __init__(
        self, runtime: Runtime, device: torch.device | int, *, ctas: int = 24, ring_bytes: int = 4 << 20
    ) -> None:
        self._runtime = runtime
        self._device = torch.empty(0, device=device).device  # with its index, also if `device` is the current one
        self._ctas = ctas
        self._backlog = Backlog(runtime)
        self._lanes = {
            Direction.GATHER: _Lane(self._device, ring_bytes // 8, urgent=True),
            Direction.SCATTER: _Lane(self._device, ring_bytes // 8, urgent=False),
        }
        self._kernel = _load_kernel(self._lanes[Direction.GATHER].device_ring)
        self._idle_polls = 0
        self._arrival: Arrival | None = None  # once it had to be known
        self._service = runtime.start(f"kvxfer-copy-{self._device}", self._step, setup=self._enter_device)

    @property
    def compiles(self) -> int:
        """Kernel variants compiled so far."""
        return self._kernel.compiles

    def submit(self, job: CopyJob, direction: Direction) -> None:
        """Queue a job. Safe from any thread.

        Raises:
            ClosedError: If the executor is closed.
        """
        self._backlog.submit(job, direction)
        self._service.wake()

    def warm(self, plans: Iterable[CopyPlan]) -> None:
        """Compile every variant that these plans, or the same with other tokens, need. Takes seconds the first time."""
        for variant in sorted(variants(plans), reverse=True):
            self._kernel.compile(variant)

    def warm_sums(self, plans: Iterable[SumPlan]) -> None:
        """Compile every variant that these sums, or the same of other blocks, need."""
        for variant in sorted(sum_variants(plans), reverse=True):
            self._kernel.compile_sums(variant)

    def occupy(self, ctas: int) -> None:
        """Let copies that are launched from now on occupy so many thread blocks. Safe from any thread."""
        self._ctas = ctas

    def inside(self, gate: int, *, raised: bool) -> int:
        """How many thread blocks of other GPUs write through a gate in memory of this one.

        Waits for the device: call it from a worker thread.

        Args:
            gate: Its address.
            raised: Whether to raise its generation first, so that nobody else gets in.
        """
        return self._kernel.touch_gate(gate, raised=raised)

    def standing(self, since: float) -> bool:
        """Whether a copy that was launched before `since` still runs. Safe from any thread."""
        return any(one.started < since for lane in self._lanes.values() for one in tuple(lane.running))

    def close(self, timeout: float) -> bool:
        """Refuse new jobs, finish the rest, stop. Blocks; may be repeated.

        Jobs that still wait for their events after `timeout` seconds are reported as failed. Those that run are
        reported when they end, and only then.

        Returns:
            False if a job had not been reported by then; the service goes on until the device has finished.
        """
        deadline = self._runtime.now() + timeout
        self._backlog.refuse()
        if not self._backlog.wait_idle(timeout):
            self._backlog.cancel_waiting()
            self._service.wake()
            return False
        return self._service.stop(max(0.0, deadline - self._runtime.now()))

    def _enter_device(self) -> None:
        Stream.enter(self._device)

    def _step(self) -> float | None:
        moved = 0
        for direction, lane in self._lanes.items():
            if lane.held is not None or self._backlog.is_waiting(direction):
                moved += self._launch_ready(direction, lane)
            if lane.running:
                moved += self._reap(lane)
        return self._delay(moved)

    def _launch_ready(self, direction: Direction, lane: "_Lane") -> int:
        """Launch what has become ready next, if the ring has room. Returns how many jobs left the backlog.

        One at a time: a launch takes as long as many a copy, and what has ended meanwhile is waited for elsewhere.
        """
        if lane.held is None:
            if lane.full:  # what is launched cannot be overtaken any more
                return 0
            job = self._backlog.pop_ready(direction)
            if job is None:
                return 0
            try:
                lane.held = _Packed.of(job)
            except Exception as caught:  # noqa: BLE001 - the job fails with it; the service goes on
                now = self._runtime.now()
                self._backlog.report(job, now, as_kvxfer_error("a copy could not be prepared", caught))
                return 1
        if not self._launch_held(lane, lane.held):
            return 0
        lane.held = None
        return 1

    def _launch_held(self, lane: "_Lane", packed: "_Packed") -> bool:
        """Launch one job. False if its tables have to wait for room in the ring."""
        started = self._runtime.now()
        job, tables, sums = packed.job, packed.tables, packed.sums
        if not tables.launches and not job.plan.blanks and not job.plan.from_nic and sums is None:
            self._backlog.report(job, started)
            return True
        try:
            slot = lane.reserve(len(packed.words) + 1, near=packed.near)
        except Exception as caught:  # noqa: BLE001 - no memory for the tables of this job; the service goes on
            self._backlog.report(job, started, as_kvxfer_error("a copy could not be prepared", caught))
            return True
        if slot is None:
            return False
        running = _Running(job, started, slot)

        def launch() -> None:
            running.nbytes = packed.nbytes
            running.first = lane.first_mark(packed.nbytes)
            lane.upload(slot, packed.words)
            if job.plan.from_nic:
                self._see_writes()
            for blank in job.plan.blanks:
                lane.stream.clear(blank)
            for one in tables.launches:
                self._kernel.launch(one, slot.table, slot.start, self._ctas, lane.handle, gate)
            if sums is not None:
                begin = slot.start + len(tables.words)
                for each in sums.launches:
                    self._kernel.launch_sums(each, slot.table, begin, begin + sums.at, self._ctas, lane.handle)
                running.sums = lane.download(slot, len(tables.words) + sums.at, len(packed.words))

        lane.running.append(running)  # before it is launched: a call that does that may stand still itself
        try:
            gate = lane.gate(slot, job.gate)
            running.stopped = not job.permit.post(self._runtime.now, launch)
        except Exception as caught:  # noqa: BLE001 - reported once what was launched before it has ended
            running.error = as_kvxfer_error("a copy could not be launched", caught)
        try:
            running.last = lane.mark()
        except Exception as caught:  # noqa: BLE001 - the device is broken; reported in the order of the ring's slots
            running.error = running.error or as_kvxfer_error("a copy failed on the device", caught)
        return True

    def _see_writes(self) -> None:
        """Let the device see what NICs have written into its memory."""
        if self._arrival is None:
            self._arrival = arrival(self._device.index)
            if self._arrival is Arrival.UNKNOWN:
                _log.warning("writes_not_flushed", device=str(self._device), reason="the device has no way to do it")
        if self._arrival is Arrival.FLUSHED:
            flush()

    def _reap(self, lane: "_Lane") -> int:
        """Report the copies that have ended. Those of a stream end in order, so only the oldest is asked."""
        ended = 0
        while lane.running:
            oldest = lane.running[0]
            try:
                if oldest.last is not None and not lane.passed(oldest.last):
                    break
                took = lane.seconds(oldest)
            except Exception as caught:  # noqa: BLE001 - a broken device reports itself here
                oldest.error = oldest.error or as_kvxfer_error("a copy failed on the device", caught)
                took = 0.0
            lane.running.popleft()
            now = self._runtime.now()
            stopped = oldest.stopped or (oldest.job.gate is not None and lane.kept_out(oldest.slot))
            sums = b"" if oldest.sums is None or oldest.error else oldest.sums.astype("<i8").tobytes()
            lane.release(oldest.slot)
            before = lane.last_end
            lane.learn(oldest, took, now)
            started = max(oldest.started, now - took) if took else max(oldest.started, before)
            self._backlog.report(oldest.job, started, oldest.error, stopped=stopped, sums=sums)
            ended += 1
        return ended

    def _delay(self, moved: int) -> float | None:
        """When to step again."""
        now = self._runtime.now()
        delays = [lane.delay(now) for lane in self._lanes.values() if lane.running]
        waiting = any(map(self._backlog.is_waiting, self._lanes))
        if waiting:
            self._idle_polls = 0 if moved else self._idle_polls + 1
            delays.append(0.0 if moved else min(_PACE.longest / 2, _PACE.shortest * (1 + self._idle_polls / 8)))
        return min(delays, default=None)


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """A job with its tables, as one array of words."""

    job: CopyJob
    tables: Tables
    sums: SumTables | None
    words: I64

    @classmethod
    def of(cls, job: CopyJob) -> "_Packed":
        """Make them."""
        tables = pack(job.plan)
        if job.sums is None:
            return cls(job, tables, None, tables.words)
        sums = pack_sums(job.sums)
        return cls(job, tables, sums, np.concatenate([tables.words, sums.words]))

    @property
    def near(self) -> bool:
        """Whether they are read where they are; what the device adds up must lie in its own memory."""
        few = len(self.words) <= _NEAR_WORDS and sum([one.tiles for one in self.tables.launches]) <= _NEAR_TILES
        return few and self.sums is None

    @property
    def nbytes(self) -> int:
        """Bytes that are copied or added up."""
        return self.tables.nbytes + (self.sums.nbytes if self.sums is not None else 0)


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """Where a job's tables lie: words of the rings, or of memory of its own. The last one tells of a closed gate."""

    start: int
    words: int
    memory: "_Tables"
    near: bool
    of_ring: bool

    @property
    def table(self) -> int:
        """Address at which the kernel finds the memory that holds them."""
        return self.memory.pinned if self.near else self.memory.on_device

    @property
    def pinned(self) -> int:
        """Address of the first word in pinned memory."""
        return self.memory.pinned + 8 * self.start


class _Tables:
    """Room for tables: in pinned memory, which the device can read, and as much on the device."""

    def __init__(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self.of_torch: Final = host, device
        self.words: Final[I64] = host.numpy()
        self.pinned: Final = host.data_ptr()
        self.on_device: Final = device.data_ptr()


@dataclass(slots=True, eq=False)
class _Running:
    """A launched job: between two marks of its stream."""

    job: CopyJob
    started: float
    slot: _Slot
    nbytes: int = 0
    first: Any = None
    last: Any = None
    error: KvxferError | None = None
    stopped: bool = False
    sums: I64 | None = None  # where they will be


class _Lane:
    """One direction: its stream, its table rings, and what runs on it. Belongs to the service's thread.

    What is urgent has the highest priority that there is: its thread blocks come before those of any other stream that
    wait for room on the GPU, as every kernel of a model does that keeps it busy.
    """

    def __init__(self, device: torch.device, ring_words: int, *, urgent: bool) -> None:
        with torch.cuda.device(device):
            self.stream: Final = Stream(device, urgent=urgent)
            self.handle: Final = self.stream.handle
            self.host_ring: Final = torch.empty(ring_words, dtype=torch.int64, pin_memory=True)
            self.device_ring: Final = torch.empty(ring_words, dtype=torch.int64, device=device)
        self.prepare(ring_words)

    def prepare(self, ring_words: int) -> None:
        """The books."""
        self._tables = _Tables(self.host_ring, self.device_ring)
        self._ring = Ring(ring_words // _SLOT_WORDS)
        self.held: _Packed | None = None
        self.running: deque[_Running] = deque()
        self.estimate = Linear(_FIRST_FIXED_S, _FIRST_GUESS_S_PER_BYTE, _LARGE_BYTES)
        self.last_end = 0.0
        self._untimed = {False: 0, True: 0}  # small and large copies since one was timed

    def reserve(self, words: int, *, near: bool = False) -> _Slot | None:
        """A slot of the rings, or None until older ones are released; memory of its own for more than a ring."""
        units = -(-words // _SLOT_WORDS)
        if units <= self._ring.capacity:
            start = self._ring.take(units)
            if start is None:
                return None
            return _Slot(start * _SLOT_WORDS, words, self._tables, near, of_ring=True)
        host = torch.empty(words, dtype=torch.int64, pin_memory=True)
        device = torch.empty(words, dtype=torch.int64, device=self.device_ring.device)
        return _Slot(0, words, _Tables(host, device), near, of_ring=False)

    def release(self, slot: _Slot) -> None:
        """Give the oldest slot back, after its reader has run."""
        if slot.of_ring:
            self._ring.give_back()

    def upload(self, slot: _Slot, words: I64) -> None:
        """Put tables where the kernel will read them."""
        self._words(slot)[: len(words)] = words
        if not slot.near:
            self.stream.upload(slot.table + 8 * slot.start, slot.pinned, 8 * len(words))

    def download(self, slot: _Slot, first: int, last: int) -> I64:
        """Bring back what the kernel wrote behind its tables; returns where it will be."""
        self.stream.download(slot.pinned + 8 * first, slot.table + 8 * (slot.start + first), 8 * (last - first))
        return self._words(slot)[first:last]

    def _words(self, slot: _Slot) -> I64:
        """A slot's words in pinned memory."""
        return slot.memory.words[slot.start : slot.start + slot.words]

    def gate(self, slot: _Slot, gate: Gate | None) -> tuple[int, int, int]:
        """What the kernel needs to pass a gate: its address, the generation, and where to say that it was closed."""
        if gate is None:
            return _NO_GATE
        self._words(slot)[-1] = 0
        return gate.address, gate.generation, slot.pinned + 8 * (slot.words - 1)

    def kept_out(self, slot: _Slot) -> bool:
        """Whether a thread block found its gate closed."""
        return bool(self._words(slot)[-1])

    @property
    def full(self) -> bool:
        """Whether enough runs to keep the device busy until there is time to launch more."""
        return len(self.running) > 1 and sum(one.nbytes for one in self.running) >= _AHEAD_BYTES

    def first_mark(self, nbytes: int) -> Any:
        """Where a job begins, if it is to be timed; None for most."""
        large = nbytes >= _LARGE_BYTES
        self._untimed[large] = (self._untimed[large] + 1) % _TIMED
        return self.stream.mark() if self._untimed[large] == 1 else None

    def mark(self) -> Any:
        """Where a job ends."""
        return self.stream.mark()

    def passed(self, mark: Any) -> bool:
        """Whether the device has come to a mark."""
        return self.stream.passed(mark)

    def seconds(self, ended: _Running) -> float:
        """How long the device took for a job, whose marks are not needed any more; 0 where nothing was launched."""
        marks = [mark for mark in (ended.first, ended.last) if mark is not None]
        took = self.stream.seconds(*marks) if len(marks) == 2 else 0.0
        self.stream.recycle(*marks)
        return took

    def learn(self, ended: _Running, took: float, now: float) -> None:
        """Correct the estimate of how long a copy takes."""
        self.last_end = now
        if took:
            self.estimate.learn(ended.nbytes, took)

    def delay(self, now: float) -> float:
        """Seconds until the oldest running copy should be looked at."""
        oldest = self.running[0]
        takes = self.estimate.takes(oldest.nbytes)
        return _PACE.delay(now, max(oldest.started + _LAUNCH_S, self.last_end) + takes, takes)


def _load_kernel(table: torch.Tensor) -> "Kernel":
    try:
        from kvxfer.copy.kernel import Kernel
    except ImportError as error:
        from kvxfer.errors import MissingExtraError

        raise MissingExtraError(
            "copies on a GPU need triton, which comes with torch for CUDA on Linux: pip install triton"
        ) from error
    return Kernel(table)
