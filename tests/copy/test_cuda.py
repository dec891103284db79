"""The GPU executor's decisions, without a GPU: events that a test fires, memory that is never read."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from copy_plans import contiguous_rows
from sum_plans import pair_of

from kvxfer.copy import READY, CopyJob, Direction, cuda
from kvxfer.copy.cuda import CudaExecutor, recorded
from kvxfer.copy.port import FREELY, Gate
from kvxfer.errors import ClosedError, FabricError, TransferFailedError
from kvxfer.geometry import SumPlan
from kvxfer.geometry.copyplan import Blank, CopyPlan
from kvxfer.memory.flush import Arrival


class Mark:
    """A completion event."""

    def __init__(self):
        self.fired = False
        self.error = None

    def query(self):
        if self.error:
            raise self.error
        return self.fired


class FakeLane(cuda._Lane):
    """A lane whose stream runs when the test says so."""

    made: list

    def __init__(self, device, ring_words, *, urgent):
        words = torch.zeros(ring_words, dtype=torch.int64)
        self.timed, self.cleared = [], []
        stream = SimpleNamespace(mark=lambda: self.timed.append(len(self.running)), clear=self.cleared.append)
        vars(self).update(host_ring=words, device_ring=words, handle=0, stream=stream)
        self.urgent = urgent
        self.prepare(ring_words)
        self.estimate.s_per_byte = 1e-12
        self.marks, self.record_error = [], None
        self.made.append(self)

    def upload(self, slot, words):
        slot.memory.words[slot.start : slot.start + len(words)] = words

    def download(self, slot, first, last):
        self._words(slot)[first:last] = range(1, 1 + last - first)  # what the device adds up
        return self._words(slot)[first:last]

    def mark(self):
        if self.record_error:
            raise self.record_error
        self.marks.append(Mark())
        return self.marks[-1]

    def passed(self, mark):
        return mark.query()

    def seconds(self, ended):
        return 0.0


class FakeRuntime:
    """Services step when the test says so."""

    step: Any

    def __init__(self):
        self.time = 1.0
        self.woken = 0

    def now(self):
        return self.time

    def start(self, name, step, *, setup=None):
        self.step = step
        return SimpleNamespace(wake=self._wake, stop=lambda timeout: True)

    def _wake(self):
        self.woken += 1


class World:
    def __init__(self, monkeypatch, *, ring_bytes=4096):
        FakeLane.made = []
        self.launched, self.gates, self.launch_error = [], [], None
        self.tables, self.summed = [], []
        monkeypatch.setattr(cuda, "_Lane", FakeLane)
        kernel = SimpleNamespace(launch=self._launch, launch_sums=self._launch_sums)
        monkeypatch.setattr(cuda, "_load_kernel", lambda table: kernel)
        self.runtime: Any = FakeRuntime()
        self.executor = CudaExecutor(self.runtime, torch.device("cpu"), ring_bytes=ring_bytes)
        self.gather, self.scatter = FakeLane.made
        self.outcomes, self.order = {}, []

    def _launch(self, launch, table, first, ctas, stream, gate):
        if self.launch_error and launch.variant.width != 16:
            raise self.launch_error
        self.tables.append(table)
        self.launched.append((launch.variant.width, first))
        self.gates.append(gate)

    def _launch_sums(self, launch, table, first, at, ctas, stream):
        self.summed.append((table, first, at))

    def submit(
        self, name, *, rows=4, after=READY, direction=Direction.GATHER, plan=None, permit=FREELY, gate=None, sums=None
    ):
        plan = plan or contiguous_rows(0, 1 << 20, rows=rows, regions=1, row_bytes=64, pool=rows)

        def done(outcome):
            assert name not in self.outcomes
            self.outcomes[name] = outcome
            self.order.append(name)

        self.executor.submit(CopyJob(plan, done, after, permit, gate, sums=sums), direction)

    def step(self):
        """Step while it is asked for at once, as long as something is launched; at least once."""
        while True:
            before = len(self.launched) + len(self.gather.running)
            delay = self.runtime.step()
            if before == len(self.launched) + len(self.gather.running):
                return delay


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


class Refused:
    """A permit that was withdrawn before the launch."""

    ended = 0

    def post(self, now, make):
        return False

    def end(self):
        self.ended += 1


def test_a_copy_whose_permit_is_refused_is_not_launched_and_is_reported_as_stopped(world):
    permit = Refused()
    world.submit("a", permit=permit)
    world.step()
    assert world.launched == []
    world.gather.marks[0].fired = True
    world.step()
    assert (world.outcomes["a"].stopped, world.outcomes["a"].error, permit.ended) == (True, None, 1)


def test_a_copy_that_found_its_gate_closed_is_reported_as_stopped(world):
    for name in "ab":
        world.submit(name, gate=Gate(1 << 40, 7))
    world.step()
    ring = world.gather.host_ring
    (_, _, first), (_, _, second) = world.gates
    assert [gate[:2] for gate in world.gates] == [(1 << 40, 7)] * 2
    ring[(second - ring.data_ptr()) // 8] = 1  # as a thread block does
    for mark in world.gather.marks:
        mark.fired = True
    world.step()
    assert first != second
    assert [world.outcomes[name].stopped for name in "ab"] == [False, True]
    world.submit("c")  # a word that was set is not looked at by who has no gate
    ring[:] = 1
    world.step()
    world.gather.marks[-1].fired = True
    world.step()
    assert not world.outcomes["c"].stopped


def test_a_job_is_reported_when_its_event_has_happened(world):
    world.submit("a")
    assert world.runtime.woken == 1
    assert world.step() is not None
    assert world.launched == [(16, 0)]
    assert world.outcomes == {}
    world.gather.marks[0].fired = True
    world.runtime.time = 2.0
    assert world.step() is None, "nothing to do: sleep until woken"
    assert world.outcomes["a"].error is None
    assert (world.outcomes["a"].started, world.outcomes["a"].finished) == (1.0, 2.0)


@pytest.mark.parametrize("direction", Direction)
def test_a_copy_stands_from_before_its_launch_to_its_end(world, direction):
    """A call that launches it waits too, where the stream is held up and takes no more: it is asked meanwhile."""
    executor, seen = world.executor, []
    launch = world._launch

    def asked(*arguments):
        seen.append(executor.standing(1.5))
        launch(*arguments)

    executor._kernel.launch = asked
    world.submit("a", after=(event := Mark()), direction=direction)
    world.step()
    assert not executor.standing(1.5), "it waits for its event"
    event.fired = True
    world.step()
    assert seen == [True]
    assert executor.standing(1.5)
    assert not executor.standing(1.0), "it began no sooner"
    lane = {Direction.GATHER: world.gather, Direction.SCATTER: world.scatter}[direction]
    lane.marks[0].fired = True
    world.step()
    assert world.outcomes["a"].error is None
    assert not executor.standing(1.5)


def test_gathers_come_before_other_work_on_the_gpu(world):
    assert world.gather.urgent
    assert not world.scatter.urgent


def test_a_job_whose_event_has_not_fired_lets_the_next_pass(world):
    late = Mark()
    world.submit("late", after=late)
    world.submit("ready")
    world.submit("other", direction=Direction.SCATTER)
    assert world.step() == 0.0
    delay = world.step()
    assert len(world.gather.running) == len(world.scatter.running) == 1
    world.gather.marks[0].fired = world.scatter.marks[0].fired = late.fired = True
    world.step()
    world.gather.marks[1].fired = True
    world.step()
    assert delay is not None
    assert world.order == ["ready", "other", "late"]


def test_waiting_for_an_event_sleeps_longer_and_longer_but_not_for_ever(world):
    world.submit("late", after=Mark())
    delays = [world.step() for _ in range(400)]
    assert delays[0] <= 1e-4
    assert delays == sorted(delays)
    assert delays[-1] == 1e-3


def test_small_tables_are_read_where_they_are_and_large_ones_on_the_device(monkeypatch):
    world = World(monkeypatch, ring_bytes=1 << 20)
    lane = world.gather
    lane.device_ring = torch.zeros(1 << 17, dtype=torch.int64)
    lane.prepare(1 << 17)
    few = contiguous_rows(0, 1 << 40, rows=4, regions=1, row_bytes=64, pool=4)
    many_rows = contiguous_rows(0, 1 << 40, rows=200, regions=1, row_bytes=64, pool=200)
    many_bytes = contiguous_rows(0, 1 << 40, rows=4, regions=1, row_bytes=8 << 20, pool=4)
    for name, plan in (("few", few), ("rows", many_rows), ("bytes", many_bytes)):
        world.submit(name, plan=plan)
    world.step()
    assert world.tables == [lane.host_ring.data_ptr(), *[lane.device_ring.data_ptr()] * 2]


def test_one_of_eight_copies_is_timed(world):
    for name in range(20):
        world.submit(name)
        world.step()
        world.gather.marks[-1].fired = True
        world.step()
    assert len(world.outcomes) == 20
    assert len(world.gather.timed) == 3


def test_tables_wait_for_room_in_the_ring(monkeypatch):
    world = World(monkeypatch, ring_bytes=1024)
    for name in range(20):
        world.submit(name, rows=8)
    for _ in range(5):
        world.step()
    fit = len(world.gather.running)
    assert 1 < fit < 20
    slots = [(running.slot.start, running.slot.of_ring) for running in world.gather.running]
    assert len(set(slots)) == fit
    for done in range(20):
        world.gather.marks[done].fired = True
        world.step()
        world.step()
    assert world.order == list(range(20))
    assert len(world.gather._ring) == 0


def test_a_failed_launch_is_reported_after_what_was_launched_before_it(world):
    world.launch_error = RuntimeError("no such kernel")
    both = [
        contiguous_rows(at, at, rows=2, regions=1, row_bytes=64, pool=2).segments[0] for at in (0, 1 << 20, 1 << 21)
    ]
    both[1].regions[0, 0] += 4
    world.submit("a", plan=CopyPlan(tuple(both)))
    world.submit("b")
    world.step()
    assert world.outcomes == {}, "the first width still runs"
    for mark in world.gather.marks:
        mark.fired = True
    world.step()
    assert isinstance(world.outcomes["a"].error, TransferFailedError)
    assert "no such kernel" in str(world.outcomes["a"].error)
    assert world.outcomes["b"].error is None


def test_a_broken_device_fails_every_job_once_and_gives_every_slot_back(world):
    world.submit("running")
    world.submit("behind")
    world.step()
    world.gather.marks[0].error = world.gather.marks[1].error = RuntimeError("illegal address")
    world.gather.record_error = RuntimeError("illegal address")
    world.submit("next")
    world.step()
    world.step()
    assert world.order == ["running", "behind", "next"]
    assert all("illegal address" in str(outcome.error) for outcome in world.outcomes.values())
    assert len(world.gather._ring) == 0


def test_gaps_are_cleared_before_anything_is_copied(world):
    blanks = (Blank(1 << 20, 64), Blank(1 << 21, 32, 3, 96))
    plan = replace(contiguous_rows(0, 1 << 20, rows=2, regions=1, row_bytes=64, pool=2), blanks=blanks)
    cleared_at = []
    kernel = world.executor._kernel
    launch = kernel.launch
    kernel.launch = lambda *given: (cleared_at.append(len(world.gather.cleared)), launch(*given))
    world.submit("with gaps", plan=plan)
    world.step()
    assert world.gather.cleared == list(blanks)
    assert cleared_at == [2]
    world.submit("gaps alone", plan=CopyPlan((), blanks[:1]))
    world.step()
    assert world.gather.cleared == [*blanks, blanks[0]]
    assert world.outcomes == {}, "until the device has come past them"
    for mark in world.gather.marks:
        mark.fired = True
    world.step()
    assert world.order == ["with gaps", "gaps alone"]


@pytest.mark.parametrize("how", list(Arrival))
def test_what_a_nic_wrote_is_flushed_before_it_is_read(world, monkeypatch, how, caplog):
    steps, asked = [], []
    monkeypatch.setattr(cuda, "arrival", lambda device: (asked.append(device), how)[1])
    monkeypatch.setattr(cuda, "flush", lambda: steps.append("flush"))
    kernel = world.executor._kernel
    launch = kernel.launch
    kernel.launch = lambda *given: (steps.append("copy"), launch(*given))
    plan = contiguous_rows(0, 1 << 20, rows=2, regions=1, row_bytes=64, pool=2)
    for name in "ab":
        world.submit(name, plan=replace(plan, from_nic=True), direction=Direction.SCATTER)
        world.step()
    world.submit("from this host", plan=plan, direction=Direction.SCATTER)
    world.step()
    world.submit("in place", plan=CopyPlan((), from_nic=True), direction=Direction.SCATTER)
    world.step()
    flush = ["flush"] * (how is Arrival.FLUSHED)
    assert steps == [*flush, "copy", *flush, "copy", "copy", *flush]
    assert len(asked) == 1
    assert caplog.text.count("writes_not_flushed") == (how is Arrival.UNKNOWN)


def test_a_flush_that_fails_fails_its_job_alone(world, monkeypatch):
    def broken():
        raise FabricError("cuFlushGPUDirectRDMAWrites() failed")

    monkeypatch.setattr(cuda, "arrival", lambda device: Arrival.FLUSHED)
    monkeypatch.setattr(cuda, "flush", broken)
    world.submit("broken", plan=CopyPlan((), from_nic=True))
    world.submit("next")
    world.step()
    for mark in world.gather.marks:
        mark.fired = True
    world.step()
    assert isinstance(world.outcomes["broken"].error, FabricError)
    assert world.outcomes["next"].error is None
    assert len(world.launched) == 1


def test_what_copies_nothing_is_done_at_once(world):
    world.submit("empty", plan=CopyPlan(()))
    world.step()
    assert world.outcomes["empty"].error is None
    assert world.launched == []


def test_close_reports_what_waits_but_not_what_runs(world):
    world.submit("running")
    world.submit("waiting", after=Mark())
    world.step()
    assert not world.executor.close(0.0)
    world.step()
    assert world.order == ["waiting"]
    assert isinstance(world.outcomes["waiting"].error, ClosedError)
    assert not world.executor.close(0.0)
    world.gather.marks[0].fired = True
    world.step()
    assert world.executor.close(0.0)
    with pytest.raises(ClosedError):
        world.submit("late")


def test_the_device_is_asked_when_a_copy_should_be_done(world):
    lane = world.gather
    lane.estimate.s_per_byte = 1e-9
    world.submit("a", plan=contiguous_rows(0, 1 << 30, rows=16, regions=1, row_bytes=1 << 20, pool=16))
    world.step()
    due = lane.running[0].started + (16 << 20) * 1e-9
    assert lane.delay(1.0) > 1e-3, "asleep at first"
    assert lane.delay(due) == 0.0, "spins when it is due"
    assert 0.0 < lane.delay(due + 0.01) <= 2e-3, "backs off when it is late"


def test_what_counts_as_recorded():
    assert recorded(READY)
    assert recorded(Mark())
    for handle in ("cuda_event", "event_id"):  # torch.cuda.Event, torch.Event
        event: Any = SimpleNamespace(query=lambda: True, **{handle: 0})
        assert not recorded(event)
        setattr(event, handle, 0x7F00)
        assert recorded(event)


def test_sums_follow_their_copy_and_are_read_when_it_has_run(world):
    source, target, chunk = pair_of(2)
    sums = SumPlan.at_destination(chunk)
    world.submit("copied", plan=chunk.copy(), sums=sums)
    world.submit("summed", plan=CopyPlan(()), sums=sums)
    world.step()
    world.step()
    assert len(world.launched) >= 1
    assert len(world.summed) == 2
    assert world.outcomes == {}
    count = sums.region_sums + sums.row_sums
    small = CopyJob(chunk.copy(), world.outcomes.update)
    assert cuda._Packed.of(small).near
    assert not cuda._Packed.of(replace(small, sums=sums)).near  # what the device adds up is in its memory
    for mark in world.gather.marks:
        mark.fired = True
    world.step()
    expected = b"".join(number.to_bytes(8, "little") for number in range(1, count + 1))
    assert [world.outcomes[name].sums for name in ("copied", "summed")] == [expected] * 2
    del source, target


def test_what_was_not_allowed_has_no_sums(world):
    source, target, chunk = pair_of(2)
    permit: Any = SimpleNamespace(post=lambda now, make: False, end=lambda: None)
    world.submit("denied", plan=chunk.copy(), sums=SumPlan.at_source(chunk), permit=permit)
    world.step()
    world.gather.marks[0].fired = True
    world.step()
    assert (world.outcomes["denied"].stopped, world.outcomes["denied"].sums) == (True, b"")
    assert world.summed == []
    del source, target
