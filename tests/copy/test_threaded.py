"""The face of a mover that tests on GPUs have, on CPU memory and on a stub of the driver."""

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from copy_plans import CANARY, contiguous_rows
from driver import Driver, StubGpu
from stepped import Flag
from sum_plans import pair_of
from threaded import Outcome, Threaded

from kvxfer.copy.port import Direction, Gate
from kvxfer.copy.sums import total
from kvxfer.errors import ClosedError, TransferFailedError
from kvxfer.geometry import SumPlan
from kvxfer.geometry.copyplan import Blank, CopyPlan

NBYTES = 1 << 20
NOTHING = CopyPlan(())


def stubbed(**options) -> Threaded:
    """On a stub whose streams go on whenever somebody asks for an event."""
    driver = Driver()
    driver.watch = lambda name, _: driver.go() if name == "QUERY" else None
    return Threaded(gpu=StubGpu(driver, **options), ctas=5)


MAKE = {"cpu": Threaded, "stub": stubbed, "small ring": partial(stubbed, ring_bytes=1024)}


@pytest.fixture(params=MAKE)
def copies(request):
    made: Any = MAKE[request.param]()
    yield made
    assert made.close(10)
    assert made.close(10)
    assert made.gpu is None or not made.gpu.driver.broken


@pytest.fixture
def stub():
    made: Any = stubbed()
    yield made
    assert made.close(10)
    assert not made.gpu.driver.broken


@pytest.fixture
def memory():
    src = np.random.default_rng(7).integers(0, 256, NBYTES, dtype=np.uint8)
    return src, np.full(NBYTES, CANARY, np.uint8)


def rows(memory, *, at=0, count=4, row_bytes=64):
    where = [side.ctypes.data + at for side in memory]
    return contiguous_rows(*where, rows=count, regions=1, row_bytes=row_bytes, pool=count, flat="both")


def test_copies_that_many_threads_ask_for(copies, memory):
    outcomes = [Outcome() for _ in range(256)]

    def ask(first):
        for number in range(first, 256, 4):
            direction = list(Direction)[number % 2]
            copies.submit(rows(memory, at=number * 4096, row_bytes=1024), outcomes[number], direction, owner=number % 3)

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outcome in outcomes:
        assert not outcome.get().stopped
    np.testing.assert_array_equal(memory[1], memory[0])


def test_copies_end_in_the_order_in_which_one_thread_asked_for_them(copies, memory):
    names, last = [], Outcome()
    for number in range(200):
        copies.submit(rows(memory, at=256 * number), partial(lambda number, _: names.append(number), number))
    copies.submit(rows(memory, at=NBYTES - 256), last)
    last.get()
    assert names == list(range(200))


def test_what_has_ended_is_told_on_the_thread_of_the_loop_and_copied_on_that_of_the_mover(stub, memory):
    told, copied = Outcome(), []
    stub.gpu.driver.watch = lambda name, _: (copied.append(threading.current_thread().name), stub.gpu.driver.go())
    names = []

    def done(outcome):
        names.append(threading.current_thread().name)
        told(outcome)

    stub.submit(rows(memory), done)
    told.get()
    assert names == ["loop of a test"]
    assert set(copied) == {"kvxfer-mover"}


def test_sums_are_those_of_a_cpu(copies):
    for seed in range(4):
        *kept, chunk = pair_of(seed)
        want = total(SumPlan.at_source(chunk))
        if copies.gpu is not None:  # it adds nothing up
            copies.gpu.driver.sums = np.frombuffer(want, "<i8").tolist()
        outcome = Outcome()
        copies.submit(chunk.copy(), outcome, Direction.SCATTER, sums=SumPlan.at_destination(chunk))
        assert outcome.get().sums == want
        del kept


def test_an_event_of_the_callers_and_one_that_cannot_be_asked(copies, memory):
    flag, late, broken = Flag(), Outcome(), Outcome()
    copies.submit(rows(memory), late, after=flag)
    copies.submit(rows(memory), broken, after=Flag(ValueError("no")))
    with pytest.raises(TransferFailedError, match="cannot be queried"):
        broken.get()
    assert (memory[1] == CANARY).all()
    flag.fired = True
    late.get()
    np.testing.assert_array_equal(memory[1][:256], memory[0][:256])


def test_a_gate_keeps_copies_out_and_is_raised(stub, memory):
    word, plan = np.asarray([1 << 32], np.int64), rows(memory)
    gate = Gate(word.ctypes.data, 1)
    for generation in (1, 2):
        outcome = Outcome()
        stub.submit(plan, outcome, gate=gate)
        assert outcome.get().stopped is (generation == 2)
        assert stub.inside(gate.address, raised=True) == 0
    assert word[0] == 3 << 32


def test_what_is_warm_and_what_it_occupies(stub, memory):
    before = stub.compiles
    stub.warm([rows(memory)])
    assert stub.compiles == before
    stub.warm_sums([SumPlan.at_source(pair_of(0)[2])])
    assert stub.compiles > before
    assert stub.kernel.compiles == stub.compiles
    assert {stub.stream(direction).cuda_stream for direction in Direction} == {*stub.gpu.handles}
    outcome = Outcome()
    stub.occupy(1)
    stub.submit(rows(memory, count=64, row_bytes=4096), outcome)
    outcome.get()
    assert [arguments[1] for arguments in stub.gpu.driver.made("LAUNCH")] == [1]


def test_blanks(copies, memory):
    outcome = Outcome()
    at = memory[1].ctypes.data
    copies.submit(CopyPlan((), (Blank(at + 3, 5), Blank(at + 100, 7, 3, 50))), outcome)
    outcome.get()
    want = np.full(NBYTES, CANARY, np.uint8)
    for first, width in ((3, 5), (100, 7), (150, 7), (200, 7)):
        want[first : first + width] = 0
    np.testing.assert_array_equal(memory[1], want)


def test_closing_refuses_and_fails_what_waits(copies, memory):
    stuck, good = Outcome(), Outcome()
    copies.submit(rows(memory), stuck, after=Flag())
    copies.submit(rows(memory), good)
    assert not copies.close(0.2)
    assert isinstance(stuck.wait().error, ClosedError)
    good.get()
    for _ in range(2):  # while its loop runs, and when it has ended
        with pytest.raises(ClosedError):
            copies.submit(rows(memory), Outcome())
        assert copies.close(10)
    assert (copies._thread.is_alive(), copies._loop.is_closed()) == (False, True)


def test_whoever_does_not_take_an_outcome_is_found_out(memory):
    copies: Any = Threaded()
    copies.submit(NOTHING, partial(pytest.fail, pytrace=False))
    with pytest.raises(AssertionError, match="nobody took the end"):
        copies.close(10)
    copies.broken.clear()
    assert copies.close(10)


def test_what_cannot_be_made_leaves_no_thread():
    before = threading.active_count()
    with pytest.raises(TypeError):
        Threaded(no_such_option=1)
    assert threading.active_count() == before


def test_how_long_copies_take(copies, memory):
    took = copies.seconds(rows(memory, row_bytes=4096), 7, Direction.SCATTER)
    assert len(took) == 7
    assert all(seconds > 0 for seconds in took)
    np.testing.assert_array_equal(memory[1][:16384], memory[0][:16384])
