"""The cell: a chunk is posted or killed, never both."""

import sys
import threading
import time

import numpy as np
import pytest

from kvxfer.errors import FabricError
from kvxfer.fabric.port import Cell, CellState, Descriptors


def never() -> None:
    pytest.fail("this part must not be posted")


class Clock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_post_then_end():
    cell, made = Cell(10.0), []
    assert cell.state is CellState.QUEUED
    assert cell.post(Clock(), lambda: made.append(1))
    assert cell.post(Clock(9.9), lambda: made.append(2))
    assert cell.state is CellState.POSTED
    cell.end()
    assert cell.state is CellState.ENDED
    assert not cell.post(Clock(), never)
    assert made == [1, 2]


def test_a_killed_cell_is_never_posted():
    cell = Cell(10.0)
    assert cell.kill()
    assert cell.state is CellState.DEAD
    assert not cell.post(Clock(), never)
    cell.end()
    assert cell.state is CellState.DEAD
    assert cell.kill(), "killing twice gives the same answer"


def test_a_lease_that_ran_out_kills_the_cell():
    cell = Cell(10.0)
    assert not cell.post(Clock(10.0), never)
    assert cell.state is CellState.DEAD
    assert cell.kill()


def test_a_lease_that_runs_out_between_parts_stops_but_does_not_deny_the_first():
    cell, clock = Cell(10.0), Clock()
    assert cell.post(clock, lambda: None)
    clock.now = 10.0
    assert not cell.post(clock, never)
    assert cell.state is CellState.POSTED
    assert not cell.kill(), "something was posted"


def test_kill_after_a_part_stops_the_next():
    cell = Cell(10.0)
    assert cell.post(Clock(), lambda: None)
    assert not cell.kill()
    assert not cell.post(Clock(), never)
    cell.end()
    assert cell.state is CellState.ENDED
    assert not cell.kill()


def test_kill_does_not_wait_for_a_post_that_is_being_made():
    cell, inside, go = Cell(10.0), threading.Event(), threading.Event()

    def make() -> None:
        inside.set()
        assert go.wait(10)

    poster = threading.Thread(target=cell.post, args=(Clock(), make))
    poster.start()
    assert inside.wait(10)
    assert not cell.kill(), "it answers at once, although the post holds the cell"
    go.set()
    poster.join(10)
    assert cell.state is CellState.POSTED
    assert not cell.post(Clock(), never), "the kill was not forgotten"


def test_a_post_that_raises_may_have_moved_bytes():
    cell = Cell(10.0)

    def make() -> None:
        raise FabricError("refused")

    with pytest.raises(FabricError):
        cell.post(Clock(), make)
    assert cell.state is CellState.POSTED
    assert not cell.kill()


def test_exactly_one_of_kill_and_post_wins():
    """Two threads at one cell, many rounds; both winners must occur, or nothing was raced."""
    rounds = 2000
    cells = [Cell(1e9) for _ in range(rounds)]
    posted, killed = [False] * rounds, [False] * rounds
    gate = threading.Barrier(2)

    def dawdle(turns: int) -> None:
        for _ in range(turns):
            time.sleep(0)

    def now() -> float:
        time.sleep(0)  # inside the critical section: the other thread may run here
        return 0.0

    def post() -> None:
        for i, cell in enumerate(cells):
            gate.wait(10)
            dawdle(i % 8)
            cell.post(now, lambda i=i: posted.__setitem__(i, True))

    def kill() -> None:
        for i, cell in enumerate(cells):
            gate.wait(10)
            dawdle(i // 8 % 8)
            killed[i] = cell.kill()

    threads = [threading.Thread(target=post), threading.Thread(target=kill)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # switch inside the critical sections, too
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    for i, cell in enumerate(cells):
        assert not (posted[i] and killed[i]), "a cell that was killed was posted"
        if killed[i]:
            assert cell.state is CellState.DEAD
        elif not posted[i]:
            # the killer came while the post held the cell and was told so; the post then saw its wish
            assert cell.state is CellState.DEAD
            assert cell.kill()
    assert any(posted)
    assert any(killed)


def test_descriptors_count_their_bytes():
    pieces = np.array([[4096, 10], [8192, 1 << 40]], dtype=np.int64)
    assert Descriptors("DRAM", 0, pieces).nbytes == 10 + (1 << 40)
