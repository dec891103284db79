"""The pump over the loopback: by hand, one step at a time, and in a real thread."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import ConfigError, FabricError
from kvxfer.fabric import pump
from kvxfer.fabric.loopback import LoopbackNetwork, LoopbackTransport
from kvxfer.fabric.parts import Limits, LivePost, cut
from kvxfer.fabric.port import Cell, CellState, Descriptors, Memory, Operation, Outcome, Post, PostResult
from kvxfer.fabric.pump import Fabric
from kvxfer.runtime import HandOver, ThreadRuntime

SIZE = 1 << 16
PART = 1024
"""max_post_bytes of every fabric here."""
FLUSH = 64
"""Bytes that are moved once more."""


class ManualService:
    def __init__(self) -> None:
        self.woken = 0
        self.stopped = False

    def wake(self) -> None:
        self.woken += 1

    def stop(self, timeout: float) -> bool:
        self.stopped = True
        return True


class ManualRuntime:
    """Time moves when the test says so, and `step` runs when the test calls it."""

    def __init__(self) -> None:
        self.time = 100.0
        self.service = ManualService()
        self.step: Callable[[], float | None] = lambda: None

    def now(self) -> float:
        return self.time

    def token(self, nbytes: int) -> bytes:
        return bytes(nbytes)

    def start(
        self, name: str, step: Callable[[], float | None], *, setup: Callable[[], None] | None = None
    ) -> ManualService:
        self.step = step
        if setup is not None:
            setup()
        return self.service

    def drive(self, name, machine):
        return self.start(name, machine.step)

    def placed(self, cpus: frozenset[int]) -> "ManualRuntime":
        return self

    def hand_over(self, loop: asyncio.AbstractEventLoop) -> HandOver:
        raise NotImplementedError

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        raise NotImplementedError


class Rig:
    """A fabric over agent "a", stepped by hand, and peers with one registered buffer each."""

    def __init__(self, *peers: str, **settings: Any) -> None:
        self.network = LoopbackNetwork()
        self.runtime = ManualRuntime()
        self.transport = LoopbackTransport("a", self.network)
        self.fabric = Fabric(self.transport, self.runtime, **{"max_post_bytes": PART, **settings})
        self.fabric.start()
        self.source = (np.arange(SIZE) % 251 + 1).astype(np.uint8)
        self.token = self.now(self.fabric.register([Memory("DRAM", 0, self.source.ctypes.data, SIZE)]))
        self.keys = self.transport.keys()
        self.memory: dict[str, np.ndarray] = {}
        self.others: dict[str, LoopbackTransport] = {}
        self.results: dict[str, list[PostResult]] = {}
        self.order: list[str] = []
        self.late: list[bool] = []
        for peer in peers or ("b",):
            other = self.others[peer] = LoopbackTransport(peer, self.network)
            other.setup()
            self.memory[peer] = np.zeros(SIZE, dtype=np.uint8)
            token = other.register([Memory("DRAM", 0, self.memory[peer].ctypes.data, SIZE)])
            assert self.now(self.fabric.connect(other.metadata([token]))) == peer

    def step(self, times: int = 1) -> float | None:
        delay: float | None = None
        for _ in range(times):
            delay = self.runtime.step()
        return delay

    def now(self, future: "Future[Any]") -> Any:
        self.step()
        return future.result(timeout=0)

    def post(
        self, tag: str = "x", nbytes: int = 8 * PART, *, peer: str = "b", at: int = 0, cell: Cell | None = None,
        operation: Operation = Operation.WRITE, runs_on: bool = False,
    ) -> Cell:  # fmt: skip
        cell = cell or Cell(deadline=1e9)
        self.results[tag] = []

        def done(result: PostResult) -> None:
            self.results[tag].append(result)
            self.order.append(tag)

        local = np.array([[self.source.ctypes.data + at, nbytes]], dtype=np.int64)
        remote = np.array([[self.memory[peer].ctypes.data + at, nbytes]], dtype=np.int64)
        here, there = Descriptors("DRAM", 0, local), Descriptors("DRAM", 0, remote)
        self.fabric.post(Post(peer, operation, here, there, cell, done, runs_on, self.late.append))
        return cell

    def result(self, tag: str = "x") -> PostResult:
        (result,) = self.results[tag]
        return result

    def moved(self) -> list[int]:
        """How many bytes, each time that any were."""
        return [entry.length for entry in self.network.log]

    def landed(self, peer: str = "b") -> int:
        return int(np.count_nonzero(self.memory[peer]))


# ---- cutting ---------------------------------------------------------------------------------------------------------


def limits(descriptors: int, nbytes: int) -> Limits:
    return Limits(descriptors, nbytes, 4, 30.0)


def pieces(*rows: tuple[int, int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def test_cut_respects_both_bounds_and_splits_large_pieces():
    local = pieces((0, 10), (100, 250), (1000, 0), (2000, 100), (3000, 1))
    remote = local + np.array([[1 << 40, 0]])
    parts = cut(local, remote, limits(2, 100))
    assert [here.tolist() for here, _ in parts] == [
        [[0, 10]],
        [[100, 100]],
        [[200, 100]],
        [[300, 50]],
        [[2000, 100]],
        [[3000, 1]],
    ]
    for here, there in parts:
        assert np.array_equal(there - here, np.broadcast_to([1 << 40, 0], here.shape))


@pytest.mark.parametrize("seed", range(20))
def test_cut_covers_every_byte_once(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 300, size=50)
    local = np.stack([np.cumsum(lengths + 7), lengths], axis=1).astype(np.int64)
    remote = np.stack([np.cumsum(lengths + 3)[::-1], lengths], axis=1).astype(np.int64)
    bound = limits(int(rng.integers(1, 6)), int(rng.integers(1, 200)))
    pairs = {(int(a) + i, int(b) + i) for (a, n), (b, _) in zip(local, remote, strict=True) for i in range(n)}
    seen: list[tuple[int, int]] = []
    for here, there in cut(local, remote, bound):
        assert len(here) <= bound.max_descriptors
        assert 0 < here[:, 1].sum() <= bound.max_post_bytes
        assert np.array_equal(here[:, 1], there[:, 1])
        seen += [(int(a) + i, int(b) + i) for (a, n), (b, _) in zip(here, there, strict=True) for i in range(n)]
    assert len(seen) == len(pairs)
    assert set(seen) == pairs


def test_cut_packs_as_much_as_fits():
    small = np.stack([np.arange(100) * 64, np.full(100, 10)], axis=1).astype(np.int64)
    assert [len(here) for here, _ in cut(small, small, limits(1024, 250))] == [25] * 4
    assert [len(here) for here, _ in cut(small, small, limits(30, 1 << 30))] == [30, 30, 30, 10]


@pytest.mark.parametrize(
    ("local", "remote"),
    [
        (pieces((0, 8)), pieces((0, 9))),
        (pieces((0, 8)), pieces((0, 8), (8, 8))),
        (pieces((0, -8), (8, 16)), pieces((0, -8), (8, 16))),
        (pieces(), pieces()),
        (pieces((0, 0)), pieces((0, 0))),
        (np.zeros(2, np.int64), np.zeros(2, np.int64)),
    ],
)
def test_cut_refuses_what_makes_no_sense(local, remote):
    with pytest.raises(FabricError):
        cut(local, remote, limits(2, 100))


# ---- one post --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("here", "there", "parts"), [("VRAM", "VRAM", 1), ("VRAM", "DRAM", 8), ("DRAM", "VRAM", 8)])
def test_only_posts_that_touch_host_memory_are_cut_by_bytes(here, there, parts):
    rows = pieces((0, 8 * PART))
    post = Post("b", Operation.WRITE, Descriptors(here, 0, rows), Descriptors(there, 0, rows), Cell(1e9), print)
    assert len(LivePost(post, limits(1024, PART))._parts) == parts


@pytest.mark.parametrize(("here", "there", "listed", "parts"), [
    ("VRAM", "VRAM", True, 1), ("VRAM", "VRAM", False, 4), ("VRAM", "DRAM", True, 4),
])  # fmt: skip
def test_posts_between_gpus_have_longer_parts_where_pieces_are_taken_as_a_list(here, there, listed, parts):
    rows = pieces(*((128 * at, 64) for at in range(40)))
    post = Post("b", Operation.WRITE, Descriptors(here, 0, rows), Descriptors(there, 0, rows), Cell(1e9), print)
    assert len(LivePost(post, replace(limits(10, PART), listed=listed))._parts) == parts


@pytest.mark.parametrize("listed", [True, False])
def test_the_transport_is_asked_once_it_is_set_up(listed, monkeypatch):
    monkeypatch.setattr(LoopbackTransport, "takes_lists", listed)
    assert Rig().fabric._limits.listed is listed


@pytest.mark.parametrize("operation", list(Operation))
def test_a_post_is_cut_and_done(operation):
    rig = Rig()
    rig.memory["b"][:] = 7
    rig.source[:] = 9
    cell = rig.post(nbytes=8 * PART + 5, at=3, operation=operation)
    while not rig.results["x"]:
        rig.step()
        rig.runtime.time += 0.25
    result = rig.result()
    assert result.outcome is Outcome.DONE
    assert result.error is None
    assert result.posted_bytes == 8 * PART + 5
    assert result.first == 100.0
    assert result.finished == 100.0 + 8 * 0.25
    assert cell.state is CellState.ENDED
    changed = rig.memory["b"] == 9 if operation is Operation.WRITE else rig.source == 7
    assert np.flatnonzero(changed).tolist() == list(range(3, 8 * PART + 8))
    assert [entry.length for entry in rig.network.log] == [PART] * 8 + [5]
    assert rig.transport.open_handles == 0
    rig.runtime.time += 1
    assert rig.step() is None, "idle again"


def test_only_a_few_parts_are_under_way_at_once():
    rig = Rig(max_parts_in_flight=3)
    rig.network.hold("b")
    rig.post(nbytes=10 * PART)
    rig.step(20)
    assert rig.network.held("b") == 3
    rig.network.release("b", posts=2)
    rig.step(20)
    assert rig.network.held("b") == 3
    assert len(rig.network.log) == 2
    rig.network.release("b")
    rig.step(20)
    assert rig.result().outcome is Outcome.DONE


def test_killed_before_the_first_part():
    rig = Rig()
    cell = rig.post()
    assert cell.kill()
    rig.step()
    result = rig.result()
    assert (result.outcome, result.posted_bytes, result.first, result.error) == (Outcome.STOPPED, 0, 0.0, None)
    assert cell.state is CellState.DEAD
    assert rig.network.log == []


def test_killed_between_parts_waits_for_those_in_flight():
    rig = Rig()
    rig.network.hold("b")
    cell = rig.post()
    rig.step(2)
    assert not cell.kill()
    rig.step(5)
    assert rig.results["x"] == [], "two parts are still in flight"
    rig.network.release("b")
    rig.step()
    assert rig.result().outcome is Outcome.STOPPED
    assert rig.result().posted_bytes == rig.landed() == 2 * PART
    assert cell.state is CellState.ENDED
    assert rig.transport.open_handles == 0


def test_a_lease_that_runs_out_between_parts():
    rig = Rig()
    cell = rig.post(cell=Cell(deadline=102.0))
    rig.step(3)
    rig.runtime.time = 102.0
    rig.step(3)
    assert rig.result().outcome is Outcome.STOPPED
    assert rig.result().posted_bytes == rig.landed() == 3 * PART
    assert cell.state is CellState.ENDED


def test_a_kill_after_the_last_part_was_posted_changes_nothing():
    rig = Rig()
    rig.network.hold("b")
    cell = rig.post(nbytes=PART)
    rig.step(2)
    assert not cell.kill()
    rig.network.release("b")
    rig.step()
    assert rig.result().outcome is Outcome.DONE


def test_refused_before_anything_was_posted():
    rig = Rig()
    rig.network.refuse_next("b")
    cell = rig.post()
    rig.step(2)
    result = rig.result()
    assert (result.outcome, result.posted_bytes, rig.landed()) == (Outcome.FAILED, 0, 0)
    assert "told to refuse" in str(result.error)
    assert cell.state is CellState.ENDED
    rig.post("y")
    rig.step(10)
    assert rig.result("y").outcome is Outcome.DONE


def test_refused_later_is_failed_once_the_rest_has_ended():
    rig = Rig()
    rig.network.hold("b")
    rig.network.refuse_next("b", skip=2)
    cell = rig.post()
    rig.step(8)
    assert rig.results["x"] == []
    rig.network.release("b")
    rig.step()
    assert rig.result().outcome is Outcome.FAILED
    assert rig.result().posted_bytes == rig.landed() == 2 * PART
    assert cell.state is CellState.ENDED


class Pass:
    """A way through a gate, which counts who is inside."""

    def __init__(self) -> None:
        self.inside = 0

    def enter(self) -> bool:
        self.inside += 1
        return True

    def leave(self) -> None:
        self.inside -= 1


@pytest.mark.parametrize("at_post", [True, False])
@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize("operation", list(Operation))
def test_an_error_after_bytes_moved_is_in_doubt_until_a_later_write_has_passed_them(at_post, skip, operation):
    rig, gate = Rig(), Pass()
    rig.network.break_next("b", after_bytes=100, skip=skip, at_post=at_post, lingers=True)
    cell = rig.post(cell=Cell(1e9, gate), operation=operation)
    rig.step(10)
    assert rig.results["x"] == [], "924 bytes of a part are in flight"
    assert gate.inside == 1
    assert rig.moved() == [PART] * skip + [100, FLUSH]
    rig.network.release("b")
    rig.step(2)
    result = rig.result()
    assert result.outcome is Outcome.FAILED
    assert result.error is not None
    assert "told to break" in str(result.error)
    assert (result.error.in_doubt, result.error.disconnected) == (False, False)
    assert rig.moved() == [PART] * skip + [100, FLUSH, PART - 100]
    assert cell.state is CellState.ENDED
    assert gate.inside == 0
    assert rig.transport.open_handles == 0
    rig.post("y")
    rig.step(10)
    assert rig.result("y").outcome is Outcome.DONE


def test_what_is_moved_once_more_is_so_though_the_lease_is_over_and_nobody_wants_it():
    rig = Rig()
    cell = rig.post(cell=Cell(101.0), nbytes=PART)
    rig.network.break_next("b")
    rig.network.delay("b", 1)
    rig.step()
    cell.kill()
    rig.runtime.time += 2
    rig.step(10)
    assert rig.result().outcome is Outcome.FAILED
    assert rig.moved() == [FLUSH]


def test_what_does_not_end_is_given_up_no_later_than_without_another_write():
    rig = Rig(no_progress_timeout=5.0)
    rig.network.delay("b", 4)
    rig.network.break_next("b", lingers=True)
    cell = rig.post(nbytes=PART)
    rig.step(1)
    for _ in range(5):
        assert rig.results["x"] == []
        rig.runtime.time += 1.0
        rig.step(2)
    result = rig.result()
    assert result.outcome is Outcome.IN_DOUBT
    assert result.error is not None
    assert result.error.in_doubt
    assert cell.state is CellState.POSTED, "it did not end"
    assert rig.transport.open_handles == 1, "that of the other write, whose end would tell"


@pytest.mark.parametrize("how", ["refused", "broken", "broken at once", "lost"])
def test_one_more_write_is_tried_and_if_that_fails_it_stays_in_doubt(how):
    rig = Rig()
    rig.network.break_next("b")
    match how:
        case "refused":
            rig.network.refuse_next("b", skip=1)
        case "broken" | "broken at once":
            rig.network.break_next("b", skip=1, at_post=how != "broken")
        case _:
            rig.network.break_next("b", skip=1, disconnected=True)
    cell = rig.post(nbytes=PART)
    rig.step(10)
    result = rig.result()
    assert result.outcome is Outcome.IN_DOUBT
    assert result.error is not None
    assert (result.error.in_doubt, result.error.disconnected) == (True, False)
    assert cell.state is CellState.POSTED
    assert rig.fabric._lingering
    assert rig.moved() == []


def test_a_transport_that_does_not_flush_leaves_the_doubt(monkeypatch):
    monkeypatch.setattr(LoopbackTransport, "orderly", False)
    rig = Rig()
    rig.network.break_next("b", after_bytes=100)
    rig.post()
    rig.step(10)
    assert rig.result().outcome is Outcome.IN_DOUBT
    assert rig.moved() == [100]


@pytest.mark.parametrize("end", ["close", "disconnect"])
def test_who_ends_before_it_is_known_leaves_the_doubt(end):
    rig = Rig()
    rig.network.break_next("b", lingers=True)
    rig.post(nbytes=PART)
    rig.step(3)
    if end == "close":
        closed = rig.fabric.close(0.0)
        rig.step()
        assert not closed.result(0)
    else:
        rig.now(rig.fabric.disconnect("b"))
        rig.step()
    assert rig.result().outcome is Outcome.IN_DOUBT


def test_an_error_waits_for_the_other_parts_in_flight():
    rig = Rig()
    rig.network.break_next("b", skip=2)
    rig.network.hold("b")
    rig.post()
    rig.step(5)
    assert rig.results["x"] == [], "two parts are still in flight"
    rig.network.release("b")
    rig.step(2)
    assert rig.result().outcome is Outcome.FAILED
    assert rig.moved()[-1] == FLUSH, "after all others"


def test_a_lost_peer_is_in_doubt_first_and_failed_afterwards():
    rig = Rig()
    rig.network.hold("b")
    rig.post()
    rig.step(2)
    rig.network.disconnect("b")
    rig.step(2)
    error = rig.result().error
    assert rig.result().outcome is Outcome.IN_DOUBT
    assert error is not None
    assert error.disconnected
    rig.post("y")
    rig.step()
    assert rig.result("y").outcome is Outcome.FAILED
    closed = rig.fabric.close(1.0)
    rig.step()
    assert closed.result(0), "a transport that reports the peer gone has nothing in flight to it"


@pytest.mark.parametrize("operation", list(Operation))
def test_a_read_from_a_lost_peer_leaves_its_gate_and_a_write_does_not(operation):
    """The reader says that it reads nothing any more, and the gate is given to another; bytes that were written may
    still be under way."""
    rig, gate = Rig(), Pass()
    rig.network.hold("b")
    rig.post(cell=Cell(1e9, gate), operation=operation)
    rig.step(2)
    rig.network.disconnect("b")
    rig.step(2)
    assert rig.result().outcome is Outcome.IN_DOUBT
    assert gate.inside == (operation is Operation.WRITE)


@pytest.mark.parametrize("operation", list(Operation))
def test_that_a_peer_is_lost_is_not_said_where_a_part_never_ended(operation):
    """Else whoever posted would use memory again that a part may still read or write."""
    rig, gate = Rig(no_progress_timeout=5.0), Pass()
    rig.network.wedge("b")
    rig.network.break_next("b", disconnected=True, skip=2)
    rig.post(cell=Cell(1e9, gate), operation=operation)
    rig.step(4)
    assert rig.results["x"] == []
    for _ in range(8):
        rig.runtime.time += 1.0
        rig.step()
    result = rig.result()
    assert result.outcome is Outcome.IN_DOUBT
    assert result.error is not None
    assert (result.error.in_doubt, result.error.disconnected) == (True, False)
    assert gate.inside == 1


def test_no_progress_gives_up_and_late_bytes_still_land():
    rig = Rig(no_progress_timeout=5.0)
    rig.network.hold("b")
    cell = rig.post()
    rig.step(4)
    for _ in range(4):
        rig.runtime.time += 1.0
        rig.step()
    rig.network.release("b", posts=1)  # progress: the time starts anew
    for _ in range(6):  # seen by the first step; the second posts another part
        rig.runtime.time += 1.0
        rig.step()
    assert rig.results["x"] == []
    rig.runtime.time += 1.0
    rig.step()
    result = rig.result()
    assert result.outcome is Outcome.IN_DOUBT
    assert result.error is not None
    assert result.error.in_doubt
    assert "no progress for 5 s to b" in str(result.error)
    assert cell.state is CellState.POSTED
    assert rig.landed() == PART
    rig.step()
    assert rig.late == []
    rig.network.release("b")
    assert rig.landed() == 5 * PART, "this is why it was in doubt"
    assert cell.state is CellState.POSTED, "nobody has seen it yet"
    rig.step()
    assert (rig.late, cell.state) == ([True], CellState.ENDED)
    assert rig.transport.open_handles == 0
    assert rig.step() is None, "nothing more is looked at"


@pytest.mark.parametrize("timeout", [0.8, 5.0])
def test_a_process_that_stood_still_does_not_doubt_its_peers(timeout):
    rig = Rig(no_progress_timeout=timeout)
    rig.network.hold("b")
    rig.post(nbytes=PART)
    rig.step()
    rig.runtime.time += 3600.0
    rig.step()
    assert rig.results["x"] == []
    rig.network.release("b")
    rig.step()
    assert rig.result().outcome is Outcome.DONE


def test_a_malformed_post_fails_alone():
    rig = Rig()
    results: list[PostResult] = []
    one, two = pieces((rig.source.ctypes.data, 8)), pieces((rig.memory["b"].ctypes.data, 9))
    cell = Cell(1e9)
    rig.fabric.post(
        Post("b", Operation.WRITE, Descriptors("DRAM", 0, one), Descriptors("DRAM", 0, two), cell, results.append)
    )
    rig.post("y")
    rig.step(10)
    assert results[0].outcome is Outcome.FAILED
    assert cell.kill()
    assert rig.result("y").outcome is Outcome.DONE


# ---- many posts ------------------------------------------------------------------------------------------------------


def test_peers_and_the_posts_of_a_peer_take_turns():
    rig = Rig("b", "c")
    rig.post("b1", 4 * PART, peer="b")
    rig.post("b2", 2 * PART, peer="b", at=8 * PART)
    rig.post("c1", 2 * PART, peer="c")
    rig.step(10)
    offset = {peer: memory.ctypes.data for peer, memory in rig.memory.items()}
    posted = [(entry.dst, (entry.address - offset[entry.dst]) // PART) for entry in rig.network.log]
    assert posted == [("b", 0), ("c", 0), ("b", 8), ("c", 1), ("b", 1), ("b", 9), ("b", 2), ("b", 3)]
    assert rig.order == ["c1", "b2", "b1"], "a small post does not wait for a large one"


def test_a_wedged_post_does_not_hold_up_others():
    rig = Rig("b", "c", no_progress_timeout=5.0)
    rig.network.wedge("b")
    rig.post("stuck", peer="b")
    rig.step()
    rig.network.mend("b")
    rig.post("same peer", peer="b", at=8 * PART)
    rig.post("other peer", peer="c")
    rig.step(20)
    assert rig.result("same peer").outcome is Outcome.DONE
    assert rig.result("other peer").outcome is Outcome.DONE
    assert rig.results["stuck"] == []


def test_completions_of_a_pass_are_delivered_together_and_a_broken_callback_strands_none():
    rig = Rig("b", "c")
    rig.network.hold("b")
    rig.network.hold("c")
    rig.post("one", PART, peer="b")
    rig.post("two", PART, peer="c")

    def broken(result: PostResult) -> None:
        rig.order.append("broken")
        raise ZeroDivisionError

    row = pieces((rig.source.ctypes.data, 8))
    there = Descriptors("DRAM", 0, pieces((rig.memory["b"].ctypes.data, 8)))
    rig.fabric.post(Post("b", Operation.WRITE, Descriptors("DRAM", 0, row), there, Cell(1e9), broken))
    rig.step(3)
    rig.network.release("b")
    rig.network.release("c")
    rig.step()
    assert sorted(rig.order) == ["broken", "one", "two"]
    with pytest.raises(FabricError, match="ZeroDivisionError"):
        rig.fabric.metadata([]).result(timeout=0)


# ---- idling and polling ----------------------------------------------------------------------------------------------


def test_idle_until_woken():
    rig = Rig()
    rig.runtime.time += 1
    assert rig.step() is None
    woken = rig.runtime.service.woken
    rig.post()
    assert rig.runtime.service.woken == woken + 1


def test_polling_slows_down_while_nothing_happens():
    rig = Rig()
    rig.network.hold("b")
    rig.post(nbytes=PART)
    assert rig.step() == 0.0
    delays: list[float] = []
    for waited in (100e-6, 200e-6, 1e-3, 2e-3, 4e-3, 1.0):
        rig.runtime.time = 100.0 + waited
        delays.append(rig.step() or 0.0)
    assert delays == pytest.approx([0.0, 50e-6, 250e-6, 500e-6, 1e-3, 1e-3], rel=1e-6)


def test_a_hold_keeps_the_transport_progressing():
    rig = Rig()
    rig.runtime.time += 10
    assert rig.step() is None
    progressed = rig.transport.progressed
    woken = rig.runtime.service.woken
    first, second = rig.fabric.hold_awake(), rig.fabric.hold_awake()
    assert rig.runtime.service.woken > woken
    assert rig.step() == pytest.approx(100e-6)
    rig.runtime.time += 5
    assert rig.step() == pytest.approx(500e-6)
    rig.runtime.time += 60
    assert rig.step() == pytest.approx(1e-3)
    assert rig.transport.progressed == progressed + 3
    first()
    first()
    assert rig.step() is not None, "releasing one hold twice must not release the other"
    second()
    assert rig.step() is None
    assert rig.transport.progressed == progressed + 4


def test_for_who_moves_its_bytes_itself_the_transport_progresses_seldom():
    rig = Rig()
    unaided = rig.fabric.hold_awake(needed=False)
    progressed = rig.transport.progressed
    assert rig.step() == pytest.approx(1e-3)
    assert rig.transport.progressed == progressed + 1
    aided = rig.fabric.hold_awake()
    assert rig.step() == pytest.approx(100e-6)
    aided()
    aided()
    assert rig.step() == pytest.approx(1e-3)
    aided = rig.fabric.hold_awake()
    unaided()
    unaided()
    assert rig.step() == pytest.approx(100e-6)
    aided()
    assert rig.step() is None


# ---- calls and defects -----------------------------------------------------------------------------------------------


def test_in_a_pause_the_transport_is_not_called():
    rig = Rig()
    pause = rig.now(rig.fabric.pause(5.0))
    before = rig.transport.progressed
    assert rig.step(3) == pytest.approx(5.0)
    assert (pause.intact, rig.transport.progressed) == (True, before)
    rig.runtime.time += 5.0
    assert rig.step() is None
    assert not pause.intact, "it is over"


@pytest.mark.parametrize("needed", [True, False])
def test_a_pause_gives_way_to_a_hold_unless_it_is_firm(needed):
    rig = Rig()
    pause = rig.now(rig.fabric.pause(5.0))
    release = rig.fabric.hold_awake(needed=needed)
    rig.step()
    assert not pause.intact
    assert rig.transport.progressed == 1
    assert rig.now(rig.fabric.pause(5.0)) is None
    firm = rig.now(rig.fabric.pause(5.0, firm=True))
    seen = rig.transport.progressed
    assert rig.step(3) == pytest.approx(5.0)
    assert (firm.intact, rig.transport.progressed) == (True, seen)
    rig.runtime.time += 5.0
    rig.step()
    assert (firm.intact, rig.transport.progressed) == (False, seen + 1)
    release()


def test_who_wants_a_pause_no_longer_ends_it():
    rig = Rig()
    pause = rig.now(rig.fabric.pause(5.0))
    pause.until = 0.0
    assert rig.step() is None
    assert not pause.intact


@pytest.mark.parametrize("what", ["call", "post", "pause", "close"])
def test_whatever_comes_in_ends_a_pause_before_the_transport_is_called(what, monkeypatch):
    rig = Rig()
    pause = rig.now(rig.fabric.pause(5.0, firm=True))
    seen = []
    for name in ("metadata", "post", "close"):
        original = getattr(rig.transport, name)

        def called(*arguments, original=original):
            seen.append(pause.intact)
            return original(*arguments)

        monkeypatch.setattr(rig.transport, name, called)
    match what:
        case "call":
            rig.now(rig.fabric.metadata([]))
        case "post":
            rig.post(nbytes=PART)
            rig.step(2)
            assert rig.result().outcome is Outcome.DONE
        case "pause":
            assert rig.now(rig.fabric.pause(5.0)) is not pause
        case _:
            rig.fabric.close(1.0)
            rig.step()
    assert not pause.intact
    assert seen == ([] if what == "pause" else [False])


@pytest.mark.parametrize("missing", ["orderly", "attributable"])
def test_there_is_no_pause_under_a_post_or_where_the_transport_works_by_itself(monkeypatch, missing):
    rig = Rig()
    rig.network.hold("b")
    rig.post(nbytes=PART)
    assert rig.now(rig.fabric.pause(5.0, firm=True)) is None
    rig.network.release("b")
    rig.step(2)
    assert rig.now(rig.fabric.pause(5.0)) is not None
    monkeypatch.setattr(LoopbackTransport, missing, False)
    assert rig.now(rig.fabric.pause(5.0)) is None


def test_calls_are_answered_in_order_and_errors_are_outcomes():
    rig = Rig()
    unknown = rig.fabric.deregister("nonsense")
    twice = rig.fabric.deregister(rig.token)
    again = rig.fabric.deregister(rig.token)
    garbage = rig.fabric.connect(b"garbage")
    meta = rig.fabric.metadata([])
    rig.step()
    for future in (unknown, again, garbage):
        with pytest.raises(FabricError):
            future.result(timeout=0)
    assert twice.result(timeout=0) is None
    assert b'"a"' in meta.result(timeout=0)


def test_a_cancelled_call_is_not_made():
    rig = Rig()
    future = rig.fabric.deregister(rig.token)
    assert future.cancel()
    rig.step()
    assert rig.transport.keys() == rig.keys


def test_disconnect_ends_the_posts_of_that_peer():
    rig = Rig("b", "c")
    rig.network.hold("b")
    rig.post("under way", peer="b")
    rig.step()
    queued = rig.post("queued", peer="b")
    rig.fabric.disconnect("b").add_done_callback(lambda _: rig.order.append("disconnected"))
    rig.fabric.disconnect("b")
    rig.post("other", peer="c")
    rig.step(10)
    assert rig.result("under way").outcome is Outcome.IN_DOUBT
    assert rig.result("queued").outcome is Outcome.FAILED
    assert queued.state is CellState.DEAD
    assert rig.result("other").outcome is Outcome.DONE
    rig.post("unknown", peer="b")
    rig.step()
    assert rig.result("unknown").outcome is Outcome.FAILED


@pytest.mark.parametrize("call", ["post", "poll", "release", "progress"])
def test_a_defect_breaks_the_fabric_loudly_and_answers_everybody(monkeypatch, call):
    rig = Rig("b", "c")
    rig.network.hold("c")
    rig.post("under way", peer="c")
    rig.step()
    rig.fabric.hold_awake()

    def defect(*_: object) -> bool:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(rig.transport, call, defect)
    rig.post("next", peer="b")
    queued = rig.fabric.metadata([])
    rig.step()
    if call == "release":
        rig.network.release("c")
        rig.step(2)
    assert queued.result(timeout=0)
    for tag in ("under way", "next"):
        assert rig.result(tag).outcome in {Outcome.IN_DOUBT, Outcome.FAILED} or call == "release"
    if call in {"post", "poll", "progress"}:
        assert rig.result("under way").outcome is Outcome.IN_DOUBT
        assert "a bug" in str(rig.result("under way").error)
    with pytest.raises(FabricError, match="a bug") as caught:
        rig.fabric.metadata([]).result(timeout=0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    cell = rig.post("after")
    assert rig.result("after").outcome is Outcome.FAILED
    assert cell.state is CellState.DEAD
    monkeypatch.undo()
    closed = rig.fabric.close(1.0)
    rig.step(3)
    assert closed.done()
    assert rig.runtime.service.stopped


def test_a_transport_that_cannot_be_set_up_fails_every_call(monkeypatch):
    network, runtime = LoopbackNetwork(), ManualRuntime()
    LoopbackTransport("a", network).setup()
    fabric = Fabric(LoopbackTransport("a", network), runtime)
    fabric.start()
    early = fabric.metadata([])
    runtime.step()
    for future in (early, fabric.metadata([])):
        with pytest.raises(FabricError, match="open already"):
            future.result(timeout=0)
    closed = fabric.close(1.0)
    runtime.step()
    assert closed.result(timeout=0)


def test_settings_are_checked():
    cases: list[dict[str, Any]] = [{"max_descriptors": 0}, {"no_progress_timeout": 0.0}, {"min_poll_interval": 1.0}]
    for bad in [*cases, {"spin_time": -1.0}]:
        with pytest.raises(ConfigError):
            Fabric(LoopbackTransport("a", LoopbackNetwork()), ManualRuntime(), **bad)


# ---- closing ---------------------------------------------------------------------------------------------------------


def test_close_lets_accepted_posts_end_and_undoes_everything_once(monkeypatch):
    rig = Rig("b", "c")
    undone: list[tuple[str, object]] = []
    for name in ("disconnect", "deregister"):
        real = getattr(rig.transport, name)
        monkeypatch.setattr(
            rig.transport, name, lambda what, name=name, real=real: (undone.append((name, what)), real(what))
        )
    rig.post()
    closed = rig.fabric.close(5.0)
    rig.post("late")
    assert rig.result("late").outcome is Outcome.FAILED
    assert "closed" in str(rig.result("late").error)
    with pytest.raises(FabricError, match="closed"):
        rig.fabric.register([]).result(timeout=0)
    rig.step(10)
    assert rig.result().outcome is Outcome.DONE
    assert closed.result(timeout=0) is True
    assert rig.fabric.close(0.0) is closed
    assert undone == [("disconnect", "b"), ("disconnect", "c"), *(("deregister", key) for key in rig.keys)]
    assert rig.runtime.service.stopped
    assert rig.step() is None
    with pytest.raises(FabricError, match="not open"):
        rig.transport.progress()


def test_what_was_undone_before_is_not_undone_again(monkeypatch):
    rig = Rig("b", "c")
    rig.now(rig.fabric.deregister(rig.token))
    rig.now(rig.fabric.disconnect("b"))
    undone: list[object] = []
    for name in ("disconnect", "deregister"):
        monkeypatch.setattr(rig.transport, name, undone.append)
    closed = rig.fabric.close(5.0)
    rig.step()
    assert closed.result(timeout=0) is True
    assert undone == ["c"]


def test_close_under_a_write_leaves_the_transport_open():
    rig = Rig()
    rig.network.hold("b")
    cell = rig.post()
    rig.step(2)
    closed = rig.fabric.close(5.0)
    rig.step()
    assert not closed.done()
    rig.runtime.time += 5.0
    rig.step()
    assert rig.result().outcome is Outcome.IN_DOUBT
    assert cell.state is CellState.POSTED
    assert closed.result(timeout=0) is False
    assert rig.runtime.service.stopped
    rig.transport.progress()  # still open
    assert rig.transport.keys() == rig.keys
    assert rig.transport in pump._LEAKED
    before = rig.landed()
    rig.network.release("b")
    assert rig.landed() > before, "this is why it was left open"


def test_close_after_a_post_was_given_up_leaves_the_transport_open():
    rig = Rig(no_progress_timeout=0.5)
    rig.network.wedge("b")
    rig.post()
    rig.step(4)
    for _ in range(4):
        rig.runtime.time += 1.0
        rig.step()
    assert rig.result().outcome is Outcome.IN_DOUBT
    closed = rig.fabric.close(5.0)
    rig.step()
    assert closed.result(timeout=0) is False


def test_close_fails_what_was_never_posted():
    rig = Rig()
    rig.runtime.time += 1
    cell = rig.post()
    other = rig.fabric.metadata([])
    closed = rig.fabric.close(0.0)
    rig.network.refuse_next("b")
    rig.step()
    assert rig.result().outcome is Outcome.FAILED
    assert other.result(timeout=0)
    assert cell.state is not CellState.POSTED
    assert closed.result(timeout=0) is True


def test_close_goes_on_when_a_step_of_it_fails(monkeypatch):
    rig = Rig("b", "c")

    def refuse(peer: str) -> None:
        raise FabricError("no")

    monkeypatch.setattr(rig.transport, "disconnect", refuse)
    closed = rig.fabric.close(5.0)
    rig.step()
    assert closed.result(timeout=0) is True
    assert rig.transport.keys() == frozenset()


# ---- made anew -------------------------------------------------------------------------------------------------------


def rebuilt(rig: Rig, timeout: float = 5.0, steps: int = 2) -> bool:
    answer = rig.fabric.rebuild(timeout)
    rig.step(steps)
    return answer.result(timeout=0)


def write_back(rig: Rig, metadata: bytes, nbytes: int = SIZE) -> object:
    """Agent b writes into a's memory, by what it was told of it."""
    other = rig.others["b"]
    address = rig.source.ctypes.data
    pieces = [np.array([[base, nbytes]], dtype=np.int64) for base in (rig.memory["b"].ctypes.data, address)]
    here, there = (Descriptors("DRAM", 0, rows) for rows in pieces)
    return other.post(other.connect(metadata), Operation.WRITE, here, there)


def test_a_rebuilt_agent_keeps_tokens_and_peers_and_is_reached_by_new_metadata_only():
    rig = Rig()
    before = rig.now(rig.fabric.metadata([rig.token]))
    assert rebuilt(rig)
    assert rig.transport.name == "a.1"
    after = rig.now(rig.fabric.metadata([rig.token]))
    assert b'"a.1"' in after
    assert rig.transport.keys().isdisjoint(rig.keys), "registered again, and not as before"
    with pytest.raises(FabricError, match="gone"):
        write_back(rig, before)
    rig.memory["b"][:] = 255
    write_back(rig, after)
    assert (rig.source == 255).all()
    rig.post()
    rig.step(10)
    assert rig.result().outcome is Outcome.DONE, "b is told of again by the post"
    rig.now(rig.fabric.deregister(rig.token))
    assert rig.transport.keys() == set()


@pytest.mark.parametrize("way", ["hold", "delay", "wedge", "pace"])
def test_what_comes_late_to_the_old_agent_never_lands(way):
    rig = Rig()
    metadata = rig.now(rig.fabric.metadata([rig.token]))
    now = [0.0]
    {
        "hold": lambda: rig.network.hold("a"),
        "delay": lambda: rig.network.delay("a", 3),
        "wedge": lambda: rig.network.wedge("a"),
        "pace": lambda: rig.network.pace("a", 1.0, lambda: now[0]),
    }[way]()
    rig.memory["b"][:] = 255
    handle = write_back(rig, metadata)
    assert rebuilt(rig)
    now[0] = 1e9
    with pytest.raises(FabricError) as caught:
        rig.others["b"].poll(handle)
    assert caught.value.disconnected
    assert caught.value.in_doubt
    rig.network.release("a")
    assert (rig.source != 255).all()
    rig.network.mend("a")
    rig.network.hold("a")  # faults are of the agent, whatever it is called now
    write_back(rig, rig.now(rig.fabric.metadata([rig.token])))
    assert rig.network.held("a") == 1
    assert rig.network.release("a") == 1
    assert (rig.source == 255).all()


def test_parts_in_flight_have_time_to_end_and_nothing_is_posted_meanwhile():
    rig = Rig(max_parts_in_flight=2)
    rig.network.hold("b")
    rig.post()
    rig.step()
    answer = rig.fabric.rebuild(5.0)
    rig.post("later")
    rig.step()
    rig.runtime.time += 4.0
    assert rig.step(5), "it does not spin for parts that must wait"
    assert rig.network.held("b") == 1, "no part was posted"
    assert not answer.done()
    rig.network.release("b")
    rig.step(30)
    assert answer.result(timeout=0) is True
    assert rig.transport.name == "a.1"
    assert rig.result().outcome is rig.result("later").outcome is Outcome.DONE
    assert np.array_equal(rig.memory["b"][: 8 * PART], rig.source[: 8 * PART])


@pytest.mark.parametrize("operation", Operation)
def test_a_post_that_does_not_end_is_given_up_and_touches_our_memory_no_more(operation):
    rig = Rig()
    rig.network.hold("b")
    rig.memory["b"][:] = 254
    passage = Pass()
    rig.post(operation=operation, cell=Cell(1e9, passage))
    rig.step()
    answer = rig.fabric.rebuild(0.5)
    rig.runtime.time += 0.4
    rig.step()
    assert not answer.done()
    rig.runtime.time += 0.2
    rig.step()
    assert answer.result(timeout=0) is True
    result = rig.result()
    assert result.outcome is Outcome.IN_DOUBT
    assert result.error is not None
    assert result.error.disconnected, "this side has ended its own work"
    assert rig.transport.open_handles == 0
    assert passage.inside == (operation is Operation.WRITE), "what was written may still be under way"
    ours = rig.source.copy()
    rig.source[:] = 253
    rig.network.release("b")
    assert 253 not in rig.memory["b"], "it is not read any more"
    if operation is Operation.READ:
        assert (rig.source == 253).all(), "nor written"
    else:
        assert np.array_equal(rig.memory["b"][:PART], ours[:PART]), "what had left can still land"
    assert rig.now(rig.fabric.close(1.0)) is True, "nothing is left that may touch memory here"


@pytest.mark.parametrize("operation", Operation)
def test_what_was_given_up_before_is_over_once_the_agent_is_rebuilt(operation):
    rig = Rig(no_progress_timeout=0.5)
    rig.network.wedge("b")
    passage = Pass()
    rig.post(operation=operation, cell=Cell(1e9, passage))
    rig.step()
    for _ in range(8):
        rig.runtime.time += 0.2
        rig.step()
    assert rig.result().outcome is Outcome.IN_DOUBT
    assert passage.inside
    assert rig.late == []
    assert rebuilt(rig)
    assert rig.late == [False], "memory of this side is not touched any more"
    assert passage.inside == (operation is Operation.WRITE)
    assert rig.now(rig.fabric.close(1.0)) is True


@pytest.mark.parametrize("given_up", ["before", "for it"])
@pytest.mark.parametrize("operation", Operation)
def test_a_post_that_runs_on_without_an_agent_stays_in_doubt(operation, given_up):
    """A copy between GPUs of one host: its memory is nobody's until the process ends."""
    rig = Rig(no_progress_timeout=0.5)
    rig.network.wedge("b")
    passage = Pass()
    rig.post(operation=operation, cell=Cell(1e9, passage), runs_on=True)
    rig.step()
    for _ in range(8 if given_up == "before" else 0):
        rig.runtime.time += 0.2
        rig.step()
    assert rebuilt(rig, 0.0)
    result = rig.result()
    assert result.outcome is Outcome.IN_DOUBT
    assert result.error is not None
    assert not result.error.disconnected
    assert passage.inside
    assert rig.late == []
    assert rig.now(rig.fabric.close(1.0)) is False


def given_up(rig, **post):
    rig.post(**post)
    rig.step()
    for _ in range(8):
        rig.runtime.time += 0.2
        rig.step()
    assert rig.result().outcome is Outcome.IN_DOUBT


@pytest.mark.parametrize("operation", Operation)
def test_what_was_given_up_is_seen_to_end_though_its_peer_was_left_meanwhile(operation):
    """A session that ends with a pause leaves the lane; without it no end could be seen."""
    rig, passage = Rig(no_progress_timeout=0.5), Pass()
    rig.network.hold("b")
    given_up(rig, operation=operation, cell=Cell(1e9, passage), nbytes=PART)
    rig.now(rig.fabric.disconnect("b"))
    rig.step()
    assert (rig.late, passage.inside, list(rig.fabric._peers)) == ([], 1, ["b"])
    rig.network.release("b")
    rig.step()
    assert (rig.late, passage.inside, list(rig.fabric._peers)) == ([True], 0, [])
    assert rig.transport.open_handles == 0
    assert rig.now(rig.fabric.close(1.0)) is True


def test_a_flush_that_was_given_up_tells_the_end_of_what_had_failed_before():
    rig, passage = Rig(no_progress_timeout=0.5), Pass()
    rig.network.break_next("b", after_bytes=24, lingers=True)
    given_up(rig, cell=Cell(1e9, passage), nbytes=PART)
    assert (rig.late, passage.inside) == ([], 1)
    rig.network.release("b")
    rig.step()
    assert (rig.late, passage.inside) == ([True], 0)


def test_a_part_that_fails_after_it_was_given_up_stays_in_doubt():
    """What it has left in flight nobody can say."""
    rig, passage = Rig(no_progress_timeout=0.5), Pass()
    rig.network.hold("b")
    given_up(rig, cell=Cell(1e9, passage), nbytes=PART)
    rig.network.disconnect("b")
    rig.step(2)
    assert (rig.late, passage.inside, rig.transport.open_handles) == ([], 1, 0)
    assert rig.now(rig.fabric.close(1.0)) is False


def test_a_post_that_falls_silent_while_a_rebuild_waits_for_it_keeps_no_handle(monkeypatch):
    rig, handles, polled = Rig(no_progress_timeout=2.0), [], []
    rig.network.wedge("b")
    rig.post(nbytes=PART, cell=Cell(1e9, Pass()))
    rig.step()
    renew = rig.transport.renew
    monkeypatch.setattr(rig.transport, "renew", lambda: (handles.append(rig.transport.open_handles), renew())[1])
    answer = rig.fabric.rebuild(100.0)
    for _ in range(12):
        rig.runtime.time += 0.4
        rig.step()
    assert answer.result(timeout=0) is True
    assert handles == [0], "each was given back before"
    monkeypatch.setattr(rig.transport, "poll", polled.append)
    rig.step()
    assert (rig.result().outcome, rig.late, polled) == (Outcome.IN_DOUBT, [False], [])


def test_what_ends_late_forgets_no_peer_to_which_something_falls_silent_then():
    rig = Rig(no_progress_timeout=2.0)
    rig.network.wedge("b")
    rig.post("one", nbytes=PART)
    for _ in range(8):
        rig.step()
        rig.runtime.time += 0.4
    ((first,),) = (live._watched for live in rig.fabric._lingering)
    rig.post("two", nbytes=PART)
    rig.step()
    rig.fabric.disconnect("b")
    for _ in range(4):
        rig.runtime.time += 0.4
        rig.step()
    first.handle.wedged = False  # pyright: ignore[reportAttributeAccessIssue]
    rig.runtime.time += 0.5
    rig.step(2)
    assert rig.result("two").outcome is Outcome.IN_DOUBT
    assert rig.fabric.health()[1] == ""


def test_a_defect_in_looking_back_is_one_defect(monkeypatch):
    rig = Rig(no_progress_timeout=0.5)
    rig.network.hold("b")
    given_up(rig, nbytes=PART)

    def poll(handle):
        raise RuntimeError("defect")

    monkeypatch.setattr(rig.transport, "poll", poll)
    rig.step(3)
    assert "defect" in rig.fabric.health()[1]
    assert rig.step() is None, "nothing is looked at any more"


def test_no_agent_is_made_anew_while_what_runs_on_is_seen_to_end():
    """Else its end would never be seen."""
    rig = Rig(no_progress_timeout=0.5)
    rig.network.hold("b")
    given_up(rig, nbytes=PART, runs_on=True)
    answer = rig.fabric.rebuild(10.0)
    rig.step()
    assert not answer.done()
    rig.network.release("b")
    rig.step(2)
    assert (rig.late, answer.result(timeout=0)) == ([True], True)


@pytest.mark.parametrize("rest", ["ends", "stands still"])
def test_a_post_that_failed_before_is_over_too_once_the_agent_is_rebuilt(rest):
    """One part failed, and nobody knows how far it went; a flush would have told, but waits, or for the other part."""
    rig = Rig(max_parts_in_flight=2)
    rig.network.delay("b", 1)
    rig.network.break_next("b", lingers=True)
    if rest == "stands still":
        rig.network.wedge("b")
    rig.post(nbytes=2 * PART)
    rig.step(2)
    assert rebuilt(rig, 0.0, steps=1)
    result = rig.result()
    assert result.outcome is Outcome.IN_DOUBT, "there, what it wrote may still land"
    assert result.error is not None
    assert result.error.disconnected, "here, nothing reads the source any more, and nobody has to wait for that again"
    assert rig.now(rig.fabric.close(1.0)) is True


def test_whoever_waits_for_a_rebuild_may_give_up(caplog):
    """As a worker that closes does: the agent is made anew all the same, and nothing breaks."""
    rig = Rig()
    rig.network.wedge("b")
    rig.post()
    rig.step()
    answer = rig.fabric.rebuild(1.0)
    rig.step()
    answer.cancel()
    rig.runtime.time += 2.0
    rig.step()
    assert rig.transport.name == "a.1"
    assert rig.now(rig.fabric.metadata([rig.token]))
    assert "fabric_broken" not in caplog.text


def test_an_agent_that_cannot_be_destroyed_stays_as_it_is(monkeypatch):
    rig = Rig(no_progress_timeout=0.5)
    rig.network.wedge("b")
    rig.post()
    rig.step()
    monkeypatch.setattr(rig.transport, "renew", lambda: False)
    rig.runtime.time += 1.0
    assert rebuilt(rig, 0.0) is False
    error = rig.result().error
    assert error is not None
    assert not error.disconnected
    assert rig.now(rig.fabric.metadata([rig.token]))
    assert rig.transport.keys() == rig.keys
    assert rig.now(rig.fabric.close(1.0)) is False


@pytest.mark.parametrize("step", ["renew", "register"])
def test_an_agent_that_cannot_be_made_again_breaks_the_fabric(monkeypatch, step):
    rig = Rig()
    rig.network.hold("b")
    rig.post()
    rig.step()

    def fails(*_: object) -> object:
        raise FabricError("there is no device any more")

    monkeypatch.setattr(rig.transport, step, fails)
    answer = rig.fabric.rebuild(0.0)
    rig.step(2)
    for future in (answer, rig.fabric.metadata([])):
        with pytest.raises(FabricError, match="no device"):
            future.result(timeout=0)
    assert rig.result().outcome is Outcome.IN_DOUBT
    rig.fabric.close(0.0)
    rig.step()
    assert rig.runtime.service.stopped


def test_a_rebuild_is_answered_though_the_fabric_closes_and_is_refused_twice_or_after():
    rig = Rig()
    rig.network.wedge("b")
    rig.post()
    rig.step()
    answers = [rig.fabric.rebuild(60.0), rig.fabric.rebuild(60.0)]
    rig.step()
    rig.fabric.close(0.0)
    rig.step()
    answers.append(rig.fabric.rebuild(60.0))
    for answer, words in zip(answers, ["closed", "being rebuilt already", "closed"], strict=True):
        with pytest.raises(FabricError, match=words):
            answer.result(timeout=0)


@pytest.mark.parametrize("end", ["rebuilt", "closed"])
def test_whoever_waits_for_a_rebuild_no_longer_breaks_nothing(end, caplog):
    rig = Rig()
    rig.network.hold("b")
    rig.post()
    rig.step()
    answer = rig.fabric.rebuild(5.0)
    rig.step()
    answer.cancel()
    if end == "rebuilt":
        rig.runtime.time += 6.0
        rig.step()
        assert rig.transport.name == "a.1"
        assert rig.now(rig.fabric.metadata([rig.token]))
    closed = rig.fabric.close(0.0)
    rig.step()
    assert closed.done()
    assert "fabric_broken" not in caplog.text


def test_a_peer_that_is_gone_fails_its_own_post_after_a_rebuild():
    rig = Rig("b", "c")
    assert rebuilt(rig)
    rig.others["b"].close()
    for peer in ("b", "c"):
        rig.post(peer, peer=peer)
    rig.step(10)
    assert [rig.result(peer).outcome for peer in ("b", "c")] == [Outcome.FAILED, Outcome.DONE]
    rig.now(rig.fabric.disconnect("b"))
    assert rebuilt(rig)
    rig.now(rig.fabric.disconnect("c"))  # which the new agent was not told of
    assert rig.now(rig.fabric.close(1.0)) is True


def test_close_without_start():
    fabric = Fabric(LoopbackTransport("a", LoopbackNetwork()), ManualRuntime())
    waiting = fabric.metadata([])
    assert fabric.close(1.0).result(timeout=0) is True
    with pytest.raises(FabricError, match="closed"):
        waiting.result(timeout=0)
    with pytest.raises(FabricError, match="once"):
        fabric.start()


# ---- in a thread -----------------------------------------------------------------------------------------------------


class Threaded:
    """Two fabrics in threads of their own."""

    def __init__(self) -> None:
        runtime = ThreadRuntime()
        self.network = LoopbackNetwork()
        self.fabrics = [Fabric(LoopbackTransport(name, self.network), runtime, max_post_bytes=PART) for name in "ab"]
        self.buffers = [np.zeros(SIZE, dtype=np.uint8) for _ in "ab"]
        for fabric in self.fabrics:
            fabric.start()
        tokens = [
            fabric.register([Memory("DRAM", 0, buffer.ctypes.data, SIZE)]).result(10)
            for fabric, buffer in zip(self.fabrics, self.buffers, strict=True)
        ]
        assert self.fabrics[0].connect(self.fabrics[1].metadata([tokens[1]]).result(10)).result(10) == "b"

    def post(self, start: int, nbytes: int, cell: Cell) -> "Future[PostResult]":
        result: Future[PostResult] = Future()
        rows = [pieces((buffer.ctypes.data + start, nbytes)) for buffer in self.buffers]
        here, there = (Descriptors("DRAM", 0, row) for row in rows)
        self.fabrics[0].post(Post("b", Operation.WRITE, here, there, cell, result.set_result))
        return result

    def close(self) -> list[bool]:
        return [fabric.close(10.0).result(10) for fabric in self.fabrics]


@pytest.fixture
def threaded():
    rig = Threaded()
    yield rig
    rig.close()


def fabric_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvxfer-fabric"]


def test_in_a_thread_posts_are_done_and_the_service_ends():
    rig = Threaded()
    rig.buffers[0][:] = np.random.default_rng(1).integers(1, 256, SIZE)
    results = [rig.post(start, SIZE // 16, Cell(1e12)) for start in range(0, SIZE, SIZE // 16)]
    assert {result.result(10).outcome for result in results} == {Outcome.DONE}
    assert np.array_equal(rig.buffers[0], rig.buffers[1])
    threads = fabric_threads()
    assert rig.close() == [True, True]
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_kills_from_another_thread_leave_no_byte_unaccounted(threaded):
    rng = np.random.default_rng(2)
    outcomes: set[Outcome] = set()
    for delay in rng.integers(0, 400, size=60):
        cell, before = Cell(1e12), len(threaded.network.log)
        result = threaded.post(0, SIZE, cell)
        for _ in range(int(delay)):
            time.monotonic()
        never = cell.kill()
        end = result.result(10)
        outcomes.add(end.outcome)
        moved = sum(entry.length for entry in threaded.network.log[before:])
        assert moved == end.posted_bytes
        assert end.outcome is Outcome.DONE or end.outcome is Outcome.STOPPED
        if never:
            assert moved == 0
    assert Outcome.STOPPED in outcomes


def test_an_idle_service_uses_no_processor_time(threaded):
    threaded.post(0, SIZE, Cell(1e12)).result(10)
    threads = fabric_threads()
    assert len(threads) == 2
    quiet = threading.Event()
    clocks = [time.pthread_getcpuclockid(thread.ident or 0) for thread in threads]
    before = [time.clock_gettime(clock) for clock in clocks]
    quiet.wait(0.3)
    for clock, earlier in zip(clocks, before, strict=True):
        used = time.clock_gettime(clock) - earlier
        assert used < 0.003, f"{used} s in 0.3 s"


def test_hold_awake_makes_a_thread_progress(threaded):
    transport = threaded.fabrics[1]._transport
    progressed = threading.Event()
    real = transport.progress

    def progress() -> None:
        real()
        if transport.progressed >= 10:
            progressed.set()

    transport.progress = progress
    release = threaded.fabrics[1].hold_awake()
    assert progressed.wait(10)
    release()


# ---- health


def test_a_service_that_owes_nothing_is_well():
    rig = Rig()
    rig.runtime.time += 50.0
    assert rig.fabric.health() == (0.0, "")
    rig.post()
    rig.step(30)
    assert rig.results
    rig.runtime.time += 50.0
    assert rig.fabric.health() == (0.0, "")


def test_a_service_that_does_not_come_is_late_by_the_oldest_call():
    rig = Rig()
    rig.post()
    rig.runtime.time += 3.0
    rig.post("y")
    rig.runtime.time += 4.0
    assert rig.fabric.health() == (7.0, "")
    rig.step(30)
    assert rig.fabric.health() == (0.0, "")


def test_a_call_that_does_not_return_is_late(monkeypatch):
    rig, seen = Rig(), []

    def deregister(token: object) -> None:
        rig.runtime.time += 11.0
        seen.append(rig.fabric.health())

    monkeypatch.setattr(rig.transport, "deregister", deregister)
    rig.now(rig.fabric.deregister(rig.token))
    assert seen == [(11.0, "")]
    assert rig.fabric.health() == (0.0, "")


def test_what_broke_the_fabric_is_named_until_it_is_closed(monkeypatch):
    rig = Rig()

    def broken() -> None:
        raise FabricError("the device is gone")

    monkeypatch.setattr(rig.transport, "progress", broken)
    release = rig.fabric.hold_awake()
    rig.step()
    release()
    assert rig.fabric.health() == (0.0, "the device is gone")
    closed = rig.fabric.close(0.0)
    rig.step(3)
    assert closed.done()
    rig.fabric.hold_awake()
    rig.runtime.time += 9.0
    assert rig.fabric.health() == (0.0, "")
