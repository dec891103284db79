"""A model of the machine beside the machine itself, step by step, and what may never be.

Whoever owns the streams, the events, the locks and the time is this module, so it knows in every moment what has been
launched, what has happened and who is inside of a gate; it looks at the machine's own words only to compare. Events are
words in memory whose code is what the driver says of them, so asking costs no call into Python.
"""

import os
import random
import struct
from collections import deque
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
from copy_plans import CANARY, contiguous_rows
from driver import Driver, StubGpu, copy_headers, word
from packing import pack, parts_of
from stepped import Stepped

from kvxfer.copy import records
from kvxfer.copy.compiler import load
from kvxfer.copy.mover import _EVENT, _FLOW, _READ_BYTES, _Machine
from kvxfer.copy.tables import HEADER_WORDS
from kvxfer.safety.fence import FIRST_GENERATION, LockFile, PeerGate

WINDOWS, WINDOW = 48, 4096
GATES = 4
AHEAD = 512 << 20
NOT_READY, FAULT = 600, 700
FOREVER = (1 << 63) - 1
PREFILLED = (1, 3, 16, 60)  # rows: tables of 25 to 200 words
FIRST_MARK, EVENT_COUNT = 0, 2 * records.QUEUE


@numba.cfunc("int32(int64)")
def _query(event: Any) -> Any:
    return load(event)


@numba.cfunc("int64(int64, int64, int64)")
def _refuse(descriptor: Any, address: Any, nbytes: Any) -> Any:
    return -1


def words(*given: int) -> bytes:
    """A record that begins so."""
    return struct.pack(f"<{records.RECORD_WORDS}q", *given, *[0] * (records.RECORD_WORDS - len(given)))


def generation(file: LockFile, gate: int) -> int:
    """What a grant names for its writer to get in."""
    return file.words[2 * gate] + FIRST_GENERATION


class Job:
    """A copy, and what is known of it."""

    def __init__(self, number, slot, window, lane) -> None:
        self.number, self.slot, self.window, self.lane = number, slot, window, lane
        self.owner = self.nbytes = 0
        self.until = FOREVER
        self.gate = -1
        self.generation = 0
        self.events: list[int] = []
        self.rows = 1
        self.own: Any = None
        self.kept: list[Any] = []
        self.cancelled = False
        self.launched = False
        self.ended = False
        self.failed = 0  # a code
        self.kept_out = False
        self.words = 0
        self.reasons: set[str] = set()

    def cancel(self) -> None:
        """A record says so, which is taken."""
        self.cancelled = True
        self.reasons.add("cancelled")

    def __repr__(self) -> str:
        return f"job {self.number} in slot {self.slot}"


class Model:
    """A machine, what surrounds it, and what it must have done. Kinds of it are made of this."""

    machine: Any

    def __init__(self, seed: int, gpu: Any = None, *, threads: int = 1) -> None:
        self.rng = random.Random(seed)
        self.runtime: Any = Stepped()
        nobody: Any = None
        self.machine = _Machine(self.runtime, gpu, threads, frozenset(), nobody, {})
        self.state, self.rows, self.ports = self.machine.state, self.machine.jobs, self.machine.ports
        self.file = LockFile(GATES)
        self.key = PeerGate(self.file.handle)
        self.now = 10**9
        self.state[records.FIXED] = 1
        self.number = self.steps = 0
        self.sent: list[tuple[bytes, Any]] = []  # records that are not taken yet, and what is called when one is
        self.outcomes: dict[int, int] = {}

    # --- what is done to it

    def actions(self) -> list[tuple[Any, int]]:
        """What may happen between two steps, and how often."""
        return [(self.submit, 30), (self.cancel, 4), (self.nonsense, 1), (self.revoke, 3), (self.pass_time, 10)]

    def submit(self) -> None:
        """Ask for something of random properties."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Ready something no more, or what is not there."""
        raise NotImplementedError

    def send(self, record: bytes, taken: Any = None) -> None:
        """Have it take a record in the next step."""
        self.sent.append((record, taken))

    def nonsense(self) -> None:
        """A record of no kind that there is, or of a row that there is not."""
        kind = self.rng.choice((0, records.POKE, records.FORGET, 99, -1, 1 << 62))
        slot = self.rng.choice((3, -5, records.JOBS + 1))
        if self.rng.random() < 0.5:
            kind, slot = records.FLOW, self.rng.choice((-1, records.JOBS, -(1 << 50)))
        self.send(words(kind, slot))

    def revoke(self) -> None:
        """The owner of a gate takes its grant back, unless somebody is inside."""
        number = self.rng.randrange(GATES)
        inside = self.inside(number)
        found = self.file.revoke(number)
        assert (found is None) == (inside > 0), f"gate {number}: {found} with {inside} inside"

    def inside(self, number: int) -> int:
        """How many copies are inside of a gate."""
        raise NotImplementedError

    def lend(self, gate: int, generation: int) -> tuple[int, ...]:
        """The words of a record about its lock."""
        return (-1, 0, 0, 0, 0) if gate < 0 else self.key.lend(gate, generation)

    def pass_time(self) -> None:
        self.now += self.rng.choice((1, 1000, 50_000, 1_000_000))

    # --- a step

    def step(self) -> int:
        """Let it take its records and do what is ready; look at all that came of it."""
        for _, taken in self.sent:
            if taken is not None:
                taken()
        if self.sent:
            os.write(self.machine._commands, b"".join(record for record, _ in self.sent))
            self.sent.clear()
        self.state[records.NOW] = self.now
        self.before()
        delay = int(self.machine._code.step(self.state, self.rows, self.ports))
        self.steps += 1
        self.after()
        for number in range(GATES):
            inside = self.inside(number)
            assert self.key._inside[number] == inside, f"gate {number} counts {self.key._inside[number]}, not {inside}"
            assert self.key._words[2 * number + 1] == (inside > 0)
        return delay

    def before(self) -> None:
        """What is remembered for the time behind a step."""

    def after(self) -> None:
        """What a step has changed."""

    def play(self, steps: int) -> None:
        """So many steps, and then until all has ended."""
        actions, weights = zip(*self.actions(), strict=True)
        until = self.steps + steps
        while self.steps < until:
            for action in self.rng.choices(actions, weights, k=self.rng.randrange(4)):
                action()
            self.step()
        self.drain()

    def drain(self) -> None:
        """When everything happens that can, everything ends."""
        raise NotImplementedError

    def close(self) -> None:
        """End it."""
        assert self.machine.stop()
        self.key.close()
        assert self.key._pages.closed, "a passage was lent, and not given back"
        self.file.close()


class CopyModel(Model):
    """A machine that only copies: flows of one step."""

    def __init__(self, seed: int, gpu: Any, *, threads: int = 1) -> None:
        super().__init__(seed, gpu, threads=threads)
        self.src = np.random.default_rng(1).integers(0, 256, WINDOWS * WINDOW, dtype=np.uint8)
        self.dst = np.full(WINDOWS * WINDOW, CANARY, np.uint8)
        self.canary = np.full(WINDOW, CANARY, np.uint8)
        self.jobs: dict[int, Job] = {}  # by slot: those of which nobody was told
        self.free = list(range(0, records.JOBS, 7))[: 2 * WINDOWS]
        self.windows = list(range(WINDOWS))
        self.away = 0  # steps for which nobody reads
        self.really_writes = int(self.ports[records.WRITE])
        self.outcomes = dict.fromkeys((records.DONE, records.STOPPED, records.FAILED), 0)
        self.tables = {(window, rows): self._packed(window, rows) for window in range(WINDOWS) for rows in PREFILLED}
        self.row_bytes = {rows: 1 << (WINDOW // rows).bit_length() - 1 for rows in PREFILLED}

    def _packed(self, window, rows):
        nbytes = 1 << (WINDOW // rows).bit_length() - 1
        at = self.src.ctypes.data + window * WINDOW, self.dst.ctypes.data + window * WINDOW
        return pack(contiguous_rows(*at, rows=rows, regions=1, row_bytes=nbytes, pool=rows, flat="both"))

    # --- what is done to it

    def actions(self):
        return [*super().actions(), (self.stop_reading, 1)]

    def submit(self) -> None:
        """Ask for a copy of random properties."""
        rng = self.rng
        if not self.free or not self.windows:
            return
        slot = self.free.pop(rng.randrange(len(self.free)))
        window = self.windows.pop(rng.randrange(len(self.windows)))
        assert (self._window(window) == self.canary).all(), f"window {window} was written after its copy was told"
        job = Job(self.number, slot, window, rng.randrange(2))
        self.number += 1
        job.rows = rng.choice(PREFILLED)
        job.nbytes = rng.choice((0, WINDOW, WINDOW, 1 << 20, 300 << 20))
        job.owner = rng.choice((0, 0, 1, 2, rng.randrange(records.MOST_OWNERS)))
        job.owner = ~job.owner if rng.random() < 0.1 else job.owner
        self.state[records.OWNERS] = rng.randrange(4)
        if rng.random() < 0.3:
            job.until = self.now + rng.randrange(2_000_000)
        if rng.random() < 0.5:
            job.gate = rng.randrange(GATES)
            job.generation = generation(self.file, job.gate) - (rng.random() < 0.1)
        self.jobs[slot] = job
        table = np.frombuffer(self.record(job), np.int64)
        job.kept.append(table)
        common = slot, job.lane, job.owner, 0, job.until, *self.lend(job.gate, job.generation)
        self.send(_FLOW.pack(records.FLOW, *common, table.ctypes.data, *[1] * 5, *[0] * 6, b""))
        if rng.random() < 0.05:  # a row that is taken is not given to another
            self.send(words(records.FLOW, slot, 1 - job.lane, -1, 0, FOREVER, -1))

    def record(self, job: Job) -> bytes:
        """What the only step of a flow is."""
        raise NotImplementedError

    def row(self, job: Job) -> Any:
        """The row of its step; its own if there is none."""
        of, state = self.rows[:, records.OF_FLOW], self.rows[:, records.STATE]
        (found,) = np.nonzero((of == job.slot + 1) & (state != records.FREE))
        return self.rows[found[0] if len(found) else job.slot]

    def of_step(self, slot: int) -> Job:
        """Whose step is in that row."""
        return self.jobs[int(self.rows[slot, records.OF_FLOW]) - 1]

    def cancel(self) -> None:
        """Ready one no more, or one that is not there."""
        if self.jobs and self.rng.random() < 0.9:
            slot = self.rng.choice(list(self.jobs))
        else:
            slot = self.rng.choice((-1, records.JOBS, 1 << 40, self.rng.randrange(records.JOBS)))
        # who comes later, also in the same row, is not meant
        self.send(words(records.CANCEL, slot), self.jobs[slot].cancel if slot in self.jobs else None)

    def stop_reading(self) -> None:
        """Nobody reads events for a while, and the pipe takes none."""
        self.away = self.rng.randrange(1, 60)
        self.ports[records.WRITE] = _refuse.address

    # --- a step

    def before(self) -> None:
        for job in self.jobs.values():
            if job.until <= self.now:
                job.reasons.add("lease")
            if job.gate >= 0 and job.generation != generation(self.file, job.gate):
                job.reasons.add("revoked")

    def step(self) -> int:
        delay = super().step()
        if self.away:
            self.away -= 1
            if not self.away:
                self.ports[records.WRITE] = self.really_writes
        with suppress(BlockingIOError):  # it may have said nothing
            news = os.read(self.machine.news, _READ_BYTES)
            for slot, flags, code, started, copying, posted, wire, posting in _EVENT.iter_unpack(news):
                outcome = flags & records.OUTCOMES
                assert (copying >= 0, posted, wire, posting) == (True, 0, 0, 0)
                assert flags == outcome | records.COUNTED * (outcome == records.DONE)
                self.tell(slot, outcome, code, started)
        steps = np.count_nonzero(self.rows[records.JOBS :, records.STATE] != records.FREE)
        assert self.state[records.LIVE] == len(self.jobs) + steps
        assert (delay == -1) == (len(self.jobs) == 0) or not self.jobs
        return delay

    def tell(self, slot, outcome, code, started) -> None:
        """An event has come."""
        job = self.jobs.pop(slot)  # else it was told twice, or of nobody
        assert (outcome == records.DONE) <= started <= self.now
        self.outcomes[outcome] += 1
        self.judge(job, outcome, code)
        if job.gate >= 0:
            self.key.give_back()
        self._window(job.window)[:] = CANARY
        self.free.append(slot)
        self.windows.append(job.window)

    def judge(self, job: Job, outcome: int, code: int) -> None:
        """Whether a copy may have ended so."""
        raise NotImplementedError

    def _window(self, number):
        return self.dst[number * WINDOW : (number + 1) * WINDOW]

    def written(self, job: Job) -> int:
        """How many of its rows have been copied; nothing else has been touched."""
        nbytes, found = self.row_bytes[job.rows], self._window(job.window)
        used = job.rows * nbytes
        assert (found[used:] == CANARY).all(), f"{job} wrote behind its last row"
        mine = self.src[job.window * WINDOW : job.window * WINDOW + used].reshape(job.rows, nbytes)
        done = (found[:used].reshape(job.rows, nbytes) == mine).all(axis=1)
        assert (found[:used].reshape(job.rows, nbytes)[~done] == CANARY).all(), f"{job} is torn"
        return int(done.sum())

    def drain(self) -> None:
        for _ in range(2000):
            if not self.jobs and not self.sent:
                break
            self.go_on()
            self.step()
        assert not self.jobs, f"these never end: {self.jobs}"
        assert self.step() == -1
        assert all((self._window(number) == self.canary).all() for number in range(WINDOWS))
        for number in range(GATES):
            assert self.file.revoke(number) is not None

    def go_on(self) -> None:
        """Whatever is waited for happens."""


class GpuModel(CopyModel):
    """A machine on a stub of a GPU."""

    def __init__(self, seed: int, *, ring_bytes: int = 2048) -> None:
        self.driver = Driver()
        self.driver.calls = deque(maxlen=40)  # type: ignore[assignment]
        self.words = np.zeros(EVENT_COUNT + 64, np.int64)  # events: first those of the machine
        gpu = StubGpu(self.driver, ring_bytes=ring_bytes)
        at = self.words.ctypes.data
        places = [range(at + 8 * lane * records.QUEUE, at + 8 * (lane + 1) * records.QUEUE, 8) for lane in (0, 1)]
        gpu._marks = [[SimpleNamespace(cuda_event=place) for place in lane] for lane in places]  # type: ignore[misc]
        super().__init__(seed, gpu)
        self.ports[records.QUERY] = _query.address
        self.driver.watch = self.called
        self.driver._mark = self.passed  # type: ignore[method-assign]
        self.lanes: list[deque[Job]] = [deque(), deque()]  # in the order of the stream
        self.streams = dict(zip(gpu.handles, (0, 1), strict=True))
        self.places: dict[int, tuple[int, int]] = {}  # of tables in flight, by number
        self.callers = [at + 8 * (EVENT_COUNT + n) for n in range(64)]
        self.idle_events = list(self.callers)
        self.gate_words = np.full(GATES, 7 << 32, np.int64)
        self.errors: dict[str, int] = {}  # what the next call says
        self.launching: list[Job | None] = [None, None]
        self.by_function: dict[int, Job] = {}
        self.event_errors = False
        self.failed_before = 0  # what a call has said that comes before a launch

    def actions(self):
        return [
            *super().actions(),
            (self.go, 40),
            (self.fire, 12),
            (self.break_call, 2),
            (self.break_mark, 1),
            (self.break_event, 1),
            (self.close_gate, 1),
        ]

    def record(self, job: Job) -> bytes:
        rng, kept = self.rng, job.kept
        tables = self.tables[job.window, job.rows]
        count = rng.choice((0, 0, 1, 3)) if self.idle_events else 0
        for _ in range(min(count, len(self.idle_events))):
            event = self.idle_events.pop()
            word(event).value = rng.choice((0, NOT_READY))
            job.events.append(event)
        events = np.asarray(job.events or [0], np.int64)
        function = 10**6 + job.number
        self.by_function[function] = job
        self.driver.kernels[function] = lambda *given: self.run(job, *given)
        (one,) = tables.launches
        nothing = rng.random() < 0.05
        launches = np.asarray([function, 32, 0, one.first, one.headers, one.tiles], np.int64)
        job.words = len(tables.words)
        if job.words + 4 > int(self.lane(0)[records.RING_WORDS]) or rng.random() < 0.1:
            job.own = np.zeros((2, job.words + 4), np.int64)
        gate = rng.random() < 0.3
        job.kept_out = False
        gates = (self.gate_words.ctypes.data + 8 * rng.randrange(GATES), 7) if gate else (0, 0)
        kept += [tables, events, launches]
        job.launched = job.ended = False
        parts = 0 if nothing else 1
        job.reasons = {"nothing"} if nothing else set()
        return words(
            *(records.COPY, 0, 0, 0, job.nbytes, FOREVER, *[0] * 5),
            *(events.ctypes.data, len(job.events), 0, 0, launches.ctypes.data, parts, 24),
            *(tables.words.ctypes.data, job.words, int(rng.random() < 0.5), *gates, 0),
            *((job.own[0].ctypes.data, job.own[1].ctypes.data) if job.own is not None else (0, 0)),
            *(0, 0),
        )

    def lane(self, number):
        at = records.LANE_AT + number * records.LANE_WORDS
        return self.state[at : at + records.LANE_WORDS]

    # --- what it calls

    def called(self, name, arguments) -> None:
        """A call of the driver."""
        if name == "LAUNCH":
            self.launch(self.by_function[arguments[0]], arguments)
        if name == "RECORD":
            self.recorded(*arguments)
        code = self.errors.pop(name, 0)
        if code:
            self.driver.codes[name] = [code]
            if name == "UPLOAD":
                self.failed_before = code

    def launch(self, job: Job, arguments) -> None:
        """A copy is begun: whether it may be."""
        blocks, stream, parameters = arguments[1], arguments[8], arguments[9]
        assert self.jobs.get(job.slot) is job
        assert not job.launched, f"{job} is launched twice"
        assert self.streams[stream] == job.lane
        assert 0 < blocks <= 24
        self.may_begin(job)
        lane = self.lanes[job.lane]
        assert len(lane) < records.QUEUE
        assert len(lane) < 2 or sum(one.nbytes for one in lane) < AHEAD
        table = word(word(parameters).value).value
        closed = word(word(parameters + 40).value).value
        host, device = (int(self.lane(job.lane)[n]) for n in (records.RING_HOST, records.RING_DEVICE))
        if job.own is not None:
            assert table in (job.own[0].ctypes.data, job.own[1].ctypes.data)
            assert closed == job.own[0].ctypes.data + 8 * job.words
        else:
            start = (closed - host) // 8 - job.words
            assert table in (host + 8 * start, device + 8 * start)
            self.take_place(job, start)
        job.launched = True
        code = self.errors.get("LAUNCH", 0)
        job.failed = job.failed or code
        lane.append(job)

    def may_begin(self, job: Job) -> None:
        """Whether a copy may begin in this step."""
        assert not job.cancelled, f"{job} is begun after its cancel was taken"
        assert self.now < job.until, f"{job} is begun after its lease"
        assert job.gate < 0 or generation(self.file, job.gate) == job.generation, f"{job} is begun after it was revoked"
        assert all(word(event).value == 0 for event in job.events), f"{job} is begun before its events"
        assert job.gate < 0 or self.file.revoke(job.gate) is None, f"{job} is begun without its lock"
        if not self.event_errors:
            for other in self.jobs.values():
                waits = other.lane == job.lane and self.row(other)[records.STATE] == records.WAITING
                if waits and all(word(event).value == 0 for event in other.events):
                    turns = [(int(self.row(one)[records.TAG]), one.nbytes) for one in (job, other)]
                    assert turns[0] <= turns[1], f"{job} is before {other}"

    def take_place(self, job: Job, start: int) -> None:
        end, size = start + job.words + 1, int(self.lane(job.lane)[records.RING_WORDS])
        assert start >= 0
        assert end <= size
        assert start % 2 == 0
        for other in self.lanes[job.lane]:
            if other.own is None and not other.ended:
                first, last = self.places[other.number]
                assert end <= first or last <= start, f"the tables of {job} overwrite those of {other}"
        self.places[job.number] = start, end

    def recorded(self, event, stream) -> None:
        """The mark behind a copy, whose calls may have failed before its launch."""
        lane = self.streams[stream]
        place = (event - self.words.ctypes.data) // 8 - lane * records.QUEUE
        slot = int(self.lane(lane)[records.ORDER + place])
        job = self.of_step(slot)
        if not job.launched:  # what comes before it failed
            self.may_begin(job)
            assert job.failed or self.failed_before, f"{job} is marked, and was not launched"
            job.failed = job.failed or self.failed_before
            job.launched = True
            if job.own is None:
                self.take_place(job, int(self.rows[slot, records.ROOM_START]))
            self.lanes[lane].append(job)
        job.mark = event  # type: ignore[attr-defined]
        self.failed_before = 0
        if self.errors.get("RECORD"):  # the device is broken: what was asked for is not done any more
            job.failed = job.failed or self.errors["RECORD"]
            job.unmarked = True  # type: ignore[attr-defined]
            queue = self.driver.streams.get(stream, deque())
            while queue and queue[-1][0] != "mark":
                queue.pop()
        else:
            word(event).value = NOT_READY

    def run(self, job: Job, table, first, headers, gate, generation, closed) -> None:
        """The kernel's turn in its stream."""
        assert self.jobs.get(job.slot) is job, f"{job} writes, and was told"
        assert job.launched
        assert not job.ended
        if gate and word(gate).value >> 32 != generation:
            word(closed).value = 1
            job.kept_out = True
            return
        (one,) = self.tables[job.window, job.rows].launches
        assert headers == 1
        assert np.ctypeslib.as_array((np.ctypeslib.as_ctypes_type(np.int64) * HEADER_WORDS).from_address(table)).any()
        copy_headers(one.variant, table, first, headers)

    def passed(self, event, token) -> None:
        word(event).value = 0

    # --- what happens

    def before(self) -> None:
        super().before()
        self.event_errors = any(word(event).value == FAULT for event in self.callers)
        for job in self.jobs.values():
            if not job.launched:
                for event in job.events:
                    if word(event).value == FAULT:
                        job.reasons.add("event")

    def after(self) -> None:
        assert not self.driver.broken, self.driver.broken
        for number, lane in enumerate(self.lanes):
            while lane and (getattr(lane[0], "unmarked", False) or word(lane[0].mark).value != NOT_READY):  # type: ignore[attr-defined]
                job = lane.popleft()
                job.ended = True
                if not getattr(job, "unmarked", False) and word(job.mark).value:  # type: ignore[attr-defined]
                    job.failed = job.failed or word(job.mark).value  # type: ignore[attr-defined]
            assert self.lane(number)[records.COUNT] == len(lane)
            assert self.lane(number)[records.UNDERWAY] == sum(job.nbytes for job in lane)

    def inside(self, number):
        return sum(job.gate == number for lane in self.lanes for job in lane)

    def go(self) -> None:
        """A stream does some of its work."""
        stream = self.rng.choice(list(self.streams))
        for _ in range(self.rng.choice((1, 1, 2, 3, 9))):
            self.driver.go_one(stream)

    def fire(self) -> None:
        """An event of the caller's happens."""
        word(self.rng.choice(self.callers)).value = 0

    def break_call(self) -> None:
        self.errors[self.rng.choice(("UPLOAD", "LAUNCH", "RECORD"))] = FAULT

    def break_mark(self) -> None:
        """The device says of the oldest copy that it has failed: nothing of it goes on."""
        stream, lane = self.rng.choice(list(self.streams.items()))
        queue = self.driver.streams.get(stream)
        if self.lanes[lane] and not getattr(self.lanes[lane][0], "unmarked", False) and queue:
            job = self.lanes[lane][0]
            if word(job.mark).value == NOT_READY:  # type: ignore[attr-defined]
                while queue.popleft()[0] != "mark":
                    pass
                word(job.mark).value = FAULT  # type: ignore[attr-defined]

    def break_event(self) -> None:
        event = self.rng.choice(self.callers)
        if word(event).value == NOT_READY:
            word(event).value = FAULT

    def close_gate(self) -> None:
        """The owner of a gate on a GPU raises its generation, or grants it again."""
        self.gate_words[self.rng.randrange(GATES)] = self.rng.choice((7, 7, 8)) << 32

    def judge(self, job, outcome, code) -> None:
        rows = self.written(job)
        if outcome == records.DONE:
            assert not job.failed
            assert rows == job.rows or "nothing" in job.reasons
            assert job.ended or "nothing" in job.reasons
            assert not job.kept_out
        elif outcome == records.STOPPED:
            assert rows == 0, f"{job} wrote, and was stopped"
            assert job.kept_out if job.launched else job.reasons & {"cancelled", "lease", "revoked"}, job.reasons
        else:
            assert code == FAULT
            assert job.failed == FAULT or (not job.launched and "event" in job.reasons)
        del self.by_function[10**6 + job.number], self.driver.kernels[10**6 + job.number]
        self.places.pop(job.number, None)
        for event in job.events:
            word(event).value = 0
            self.idle_events.append(event)

    def go_on(self) -> None:
        self.errors.clear()
        for event in self.callers:
            if word(event).value == NOT_READY:
                word(event).value = 0
        self.driver.go()

    def drain(self) -> None:
        super().drain()
        for number in (0, 1):
            lane = self.lane(number)
            assert lane[records.COUNT] == lane[records.UNDERWAY] == 0
            assert lane[records.HEAD] == lane[records.TAIL]


class HostModel(CopyModel):
    """A machine that copies between CPU memory, alone or with helpers."""

    def __init__(self, seed: int, *, threads: int = 1) -> None:
        super().__init__(seed, None, threads=threads)
        self.threads = threads
        self.current: Job | None = None
        if threads > 1:
            self.machine.helpers(threads - 1)

    def record(self, job: Job) -> bytes:
        tables = self.tables[job.window, job.rows]
        parts, count = parts_of(tables, self.row_bytes[job.rows] * self.rng.choice((1, 1, 4)))
        job.kept += [parts, tables]
        helpers = self.rng.randrange(self.threads)
        return words(
            *(records.COPY, 0, 0, 0, job.nbytes, FOREVER, *[0] * 5),
            *(0, 0, 0, 0, parts.ctypes.data, count, helpers),
        )

    def after(self) -> None:
        slot = int(self.state[records.CURRENT])
        before, self.current = self.current, self.of_step(slot) if slot >= 0 else None
        if before is not None and before is not self.current:
            before.ended = True
        job = self.current
        if job is not None and job is not before:  # it has just begun
            assert not job.launched
            assert not job.cancelled, f"{job} is begun after its cancel was taken"
            assert self.now < job.until, f"{job} is begun after its lease"
            assert job.gate < 0 or generation(self.file, job.gate) == job.generation
            job.launched = True

    def inside(self, number):
        return int(self.current is not None and self.current.gate == number)

    def judge(self, job, outcome, code) -> None:
        rows = self.written(job)
        assert outcome != records.FAILED
        assert code == 0
        if outcome == records.DONE:
            assert rows == job.rows, f"{job} lacks {job.rows - rows} rows"
        else:
            assert job.reasons & {"cancelled", "lease", "revoked"}, job.reasons
            assert rows == 0 or "cancelled" in job.reasons
            assert rows < job.rows

    def drain(self) -> None:
        super().drain()
        assert self.state[records.TEAM] == 0
