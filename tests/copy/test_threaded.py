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

from kvxfer.copy.port import Direction
from kvxfer.errors import ClosedError
from kvxfer.geometry import SumPlan
from kvxfer.geometry.copyplan import CopyPlan

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
