"""The face of a mover that tests on GPUs have, on CPU memory and on a stub of the driver."""

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from copy_plans import CANARY, contiguous_rows
from driver import Driver, StubGpu
from stepped import Flag
from threaded import Outcome, Threaded

from kvxfer.copy.port import Direction
from kvxfer.errors import ClosedError

NBYTES = 1 << 20


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
