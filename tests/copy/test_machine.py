"""What the machine decides where a GPU copies, on a stub of its driver: streams go on when a test says so."""

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from copy_plans import CANARY
from driver import FAULT, Driver, StubGpu
from packing import variants
from staged import Blank, Blanked
from stepped import Flag, World, kind, until
from sum_plans import pair_of

from kvxfer.copy import cuda, records
from kvxfer.copy.port import AllOf, Direction
from kvxfer.copy.tables import pack_sums
from kvxfer.errors import TransferFailedError
from kvxfer.geometry import SumPlan
from kvxfer.geometry.copyplan import CopyPlan
from kvxfer.memory.device import Arrival

GATHERS, SCATTERS = 11, 12


class Scene(World):
    """A mover on a stub of a GPU."""

    def __init__(self, *, ctas=24, ring_bytes=4096, warm=True, **options):
        self.driver = Driver()
        self.gpu = StubGpu(self.driver, ctas=ctas, ring_bytes=ring_bytes, warm=warm)
        super().__init__(self.gpu, **options)

    def lane(self, number=0):
        """A direction as the machine keeps it."""
        at = records.LANE_AT + number * records.LANE_WORDS
        return self.machine.state[at : at + records.LANE_WORDS]

    def running(self, number=0):
        return int(self.lane(number)[records.COUNT])

    async def steps(self, count=3):
        """So many of them, and what they say; whatever was to be prepared is ready before."""
        await self.settle()
        for _ in range(count):
            self.step()
        assert not self.driver.broken, self.driver.broken
        await self.settle()

    async def finish(self):
        """Let streams go on until nothing is left."""
        for _ in range(5000):
            if not self.mover._unreported:
                return
            self.driver.go()
            await self.steps(1)
        raise AssertionError(f"{self.mover._unreported} are missing")


@pytest.fixture
async def scene():
    scene = Scene()
    yield scene
    scene.driver.go()
    await scene.close()


# --- from the record to its end


async def test_a_copy_is_told_when_its_event_has_happened(scene):
    scene.submit("a")
    await scene.steps()
    assert scene.driver.names() == ["LAUNCH", "RECORD"]
    assert scene.order == []
    assert not scene.written()
    scene.runtime.time = 2.0
    scene.driver.go()
    await scene.steps(1)
    outcome = scene.outcomes["a"]
    assert (kind(outcome), outcome.started, outcome.copying) == ("done", 1.0, 1.0)
    assert scene.written()
    assert scene.machine.step() is None, "nothing to do: it sleeps until a record comes"


@pytest.mark.parametrize("direction", list(Direction))
async def test_a_copy_stands_from_before_its_launch_to_its_end(scene, direction):
    """A call that launches it waits too, where the stream is held up and takes no more: it is asked meanwhile."""
    event, seen = scene.driver.event(), []
    scene.driver.watch = lambda name, _: seen.append(scene.mover.has_copy_since(1.5)) if name == "LAUNCH" else None
    scene.submit("a", after=event, direction=direction)
    await scene.steps()
    assert not scene.mover.has_copy_since(1.5), "it waits for its event"
    scene.driver.fire(event)
    await scene.steps()
    assert seen == [True]
    assert scene.mover.has_copy_since(1.5)
    assert not scene.mover.has_copy_since(1.0), "it began no sooner"
    scene.driver.go()
    await scene.steps()
    assert kind(scene.outcomes["a"]) == "done"
    assert not scene.mover.has_copy_since(math.inf)


async def test_what_has_not_been_launched_does_not_stand_because_of_who_was_in_its_row_before(scene):
    first = scene.submit("a")
    await scene.steps()
    scene.driver.go()
    await scene.steps()
    assert kind(scene.outcomes["a"]) == "done"
    second = scene.submit("b", after=scene.driver.event())
    assert second.slot == first.slot
    assert not scene.mover.has_copy_since(math.inf)


# --- events of the caller


async def test_cuda_events_are_asked_by_the_machine_and_hold_up_nobody(scene):
    late, other = scene.driver.event(), Flag()
    scene.submit("late", after=late)
    scene.submit("both", after=AllOf([late, other]), at=4096)
    scene.submit("ready", at=8192)
    scene.submit("scatter", direction=Direction.SCATTER, at=12288)
    await scene.steps()
    assert len(scene.mover._asked.steps) == 1
    assert (scene.running(0), scene.running(1)) == (1, 1)
    scene.driver.go()
    await scene.steps()
    assert scene.order == ["ready", "scatter"]
    assert not scene.written()
    scene.driver.fire(late)
    await scene.steps()
    scene.driver.go()
    await scene.steps()
    assert scene.order == ["ready", "scatter", "late"]
    other.fired = True
    async with asyncio.timeout(10):
        await until(lambda: not scene.mover._asked.steps)
    await scene.finish()
    assert scene.order[3:] == ["both"]
    assert scene.written(at=4096)


async def test_torchs_newer_events_are_asked_too(scene):
    event: Any = scene.driver.event()
    newer: Any = type("Newer", (), {"event_id": event.cuda_event, "query": event.query})()
    scene.submit("a", after=newer)
    await scene.steps()
    assert scene.running() == 0
    scene.driver.fire(event)
    await scene.finish()
    assert kind(scene.outcomes["a"]) == "done"


# --- how much is launched


async def test_copies_occupy_as_many_thread_blocks_as_they_may():
    scene = Scene(ring_bytes=1 << 20, ctas=3)
    scene.submit("many tiles", scene.plan(rows=8, row_bytes=65536))
    scene.submit("one tile", at=1 << 19)
    await scene.steps()
    scene.mover.occupy(5)
    scene.submit("more", scene.plan(rows=8, row_bytes=65536))
    await scene.steps()
    assert [call[1] for call in scene.driver.made("LAUNCH")] == [3, 1, 5]
    await scene.finish()
    await scene.close()


# --- errors of the driver


@pytest.mark.parametrize("name", ["UPLOAD", "CLEAR", "CLEAR_LINES", "LAUNCH", "DOWNLOAD"])
async def test_whatever_fails_fails_its_copy_and_what_follows_of_it_is_not_asked_for(scene, name):
    source, target, chunk = pair_of(2)
    at = scene.dst.ctypes.data
    plan = Blanked(scene.plan(rows=100).segments, (Blank(at + 65536, 64), Blank(at + 131072, 8, 2, 64)))
    scene.driver.codes[name] = [FAULT]
    adds = name in {"UPLOAD", "DOWNLOAD"}
    scene.submit("a", CopyPlan(()) if adds else plan, sums=SumPlan.at_source(chunk) if adds else None)
    await scene.steps()
    calls = scene.driver.names()
    assert calls[calls.index(name) + 1 :] == ["RECORD"]
    await scene.finish()
    assert kind(scene.outcomes["a"]) == "TransferFailedError"
    assert scene.outcomes["a"].sums == b""
    scene.submit("b")
    await scene.finish()
    assert kind(scene.outcomes["b"]) == "done"
    del source, target


async def test_what_cannot_be_compiled_fails_its_copy_alone():
    scene = Scene(warm=False)
    scene.gpu.kernel.error = RuntimeError("no such kernel")
    scene.submit("a")
    await scene.steps()
    assert isinstance(scene.outcomes["a"].error, TransferFailedError)
    assert "no such kernel" in str(scene.outcomes["a"].error)
    scene.gpu.kernel.error = None
    scene.submit("b")
    copy = scene.submit("c", at=4096)
    scene.mover.cancel(copy)  # while it is prepared
    await scene.finish()
    assert scene.reports.kinds() == {"a": "TransferFailedError", "b": "done", "c": "stopped"}
    assert scene.gpu.kernel.compiles == 1
    await scene.close()


async def test_copies_that_wait_for_a_kernel_leave_threads_to_others():
    scene = Scene(warm=False)
    inside, compiled = [], asyncio.Event()

    async def in_thread(work):
        inside.append(work)
        await compiled.wait()
        return work()

    scene.runtime.in_thread = in_thread
    for name in range(100):
        scene.submit(name, at=1024 * name)
    await scene.settle()
    assert len(inside) == 8, "of 40 that there are"
    compiled.set()
    await scene.finish()
    assert scene.order == list(range(100))
    await scene.close()


async def test_nothing_is_compiled_after_warming():
    scene = Scene(warm=False)
    plan = scene.plan(rows=3, row_bytes=24)
    scene.mover.warm(variants([plan]))
    before = scene.gpu.kernel.compiles
    assert before >= 1
    scene.submit("a", plan)
    scene.step()
    assert scene.running() == 1, "it goes to the machine at once"
    await scene.finish()
    assert scene.gpu.kernel.compiles == before
    await scene.close()


# --- gaps, NICs, sums


async def test_gaps_are_cleared_before_anything_is_copied(scene):
    at = scene.dst.ctypes.data
    blanks = (Blank(at, 4096), Blank(at + 8192, 32, 3, 96))
    scene.submit("with gaps", Blanked(scene.plan().segments, blanks))
    await scene.steps()
    assert scene.driver.names() == ["CLEAR", "CLEAR_LINES", "LAUNCH", "RECORD"]
    scene.submit("gaps alone", Blanked((), (Blank(at + 65536, 64),)))
    await scene.steps()
    assert scene.driver.names()[4:] == ["CLEAR", "RECORD"]
    assert scene.order == [], "until the device has come past them"
    await scene.finish()
    assert scene.order == ["with gaps", "gaps alone"]
    want = np.full(len(scene.dst), CANARY, np.uint8)
    want[256:4096] = want[65536 : 65536 + 64] = 0
    want[:256] = scene.src[:256]
    for line in range(3):
        want[8192 + 96 * line :][:32] = 0
    np.testing.assert_array_equal(scene.dst, want)


@pytest.mark.parametrize("how", list(Arrival))
async def test_what_a_nic_wrote_is_flushed_before_it_is_read(scene, monkeypatch, how, caplog):
    asked = []
    monkeypatch.setattr(cuda, "arrival", lambda device: (asked.append(device), how)[1])
    plan = scene.plan()
    for name in "ab":
        scene.submit(name, plan, Direction.SCATTER, from_nic=True)
        await scene.steps()
    scene.submit("from this host", plan, Direction.SCATTER)
    await scene.steps()
    scene.submit("in place", CopyPlan(()), Direction.SCATTER, from_nic=True)
    await scene.finish()
    flush = ["FLUSH"] * (how is Arrival.FLUSHED)
    assert scene.driver.names("RECORD") == [*flush, "LAUNCH", *flush, "LAUNCH", "LAUNCH", *flush]
    assert len(asked) == 1
    assert caplog.text.count("writes_not_flushed") == (how is Arrival.UNKNOWN)
    assert set(scene.reports.kinds().values()) == {"done"}


async def test_a_flush_that_fails_fails_its_copy_alone(scene, monkeypatch):
    monkeypatch.setattr(cuda, "arrival", lambda device: Arrival.FLUSHED)
    scene.driver.codes["FLUSH"] = [801]
    scene.submit("broken", from_nic=True)
    scene.submit("next", at=4096)
    await scene.finish()
    assert scene.reports.kinds() == {"broken": "TransferFailedError", "next": "done"}
    assert len(scene.driver.made("LAUNCH")) == 1
    assert not scene.written()


@pytest.mark.parametrize("ring_bytes", [1 << 16, 256], ids=["ring", "room"])
async def test_sums_are_read_when_they_have_been_added_up(ring_bytes):
    scene = Scene(ring_bytes=ring_bytes)
    source, target, chunk = pair_of(2)
    sums = SumPlan.at_destination(chunk)
    count = sums.region_sums + sums.row_sums
    scene.driver.sums = list(range(1, count + 1))
    scene.submit("summed", CopyPlan(()), sums=sums)
    await scene.steps()
    adding = ["LAUNCH"] * len(pack_sums(sums).launches)
    assert scene.driver.names() == ["UPLOAD", *adding, "DOWNLOAD", "RECORD"]
    assert scene.outcomes == {}
    await scene.finish()
    assert scene.outcomes["summed"].sums == b"".join(number.to_bytes(8, "little") for number in range(1, count + 1))
    del source, target
    await scene.close()


# --- closing, and the thread


async def test_close_reports_what_waits_but_not_what_runs(scene):
    scene.submit("running")
    scene.submit("waiting", after=scene.driver.event())
    scene.submit("flagged", after=Flag())
    await scene.steps()
    assert not await scene.mover.close(0.0)
    await scene.steps()
    assert scene.reports.kinds() == {"waiting": "ClosedError", "flagged": "ClosedError"}
    assert not await scene.mover.close(0.0)
    scene.driver.go()
    await scene.steps(1)
    assert kind(scene.outcomes["running"]) == "done"
    assert await scene.mover.close(0.0)


async def test_gates_of_its_own_memory_are_raised(scene):
    gate = np.asarray([7 << 32 | 3], np.int64)
    assert scene.mover.writers_inside(gate.ctypes.data, raised=True) == 3
    assert int(gate[0]) == 8 << 32 | 3
    assert scene.mover.writers_inside(gate.ctypes.data, raised=False) == 3


def test_what_the_stub_is_given_is_what_the_driver_has():
    assert set(cuda.FUNCTIONS) == set(Driver().functions)
