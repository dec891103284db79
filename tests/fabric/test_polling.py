"""How often the fabric's thread looks at what is under way, and how late it sees its end: on a wire made of time."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import FabricError
from kvxfer.fabric import wire
from kvxfer.fabric.loopback import LoopbackNetwork, LoopbackTransport
from kvxfer.fabric.port import Cell, Descriptors, Operation, Outcome, Post, PostResult
from kvxfer.fabric.pump import Fabric

US = 1e-6
STEP = 8 * US
"""Time that goes by in a pass of the service."""
LATE = 60 * US
"""Time by which a sleep is longer than it was to be."""
KNOWN = 20
"""Parts after which it is known how long the next one takes, and none of the next four is a probe."""


@dataclass(eq=False)
class Part:
    """A post that takes its time, and nothing else."""

    takes: float
    ends: float
    polls: int = 0
    seen: float = 0.0
    lost: bool = False


@dataclass
class World:
    """A fabric, the clock, and one wire a peer that moves one part after the other."""

    takes: Callable[[int, int], float]  # (bytes, pieces) -> seconds
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    now: float = 100.0
    free: dict[str, float] = field(default_factory=dict[str, float])
    parts: list[Part] = field(default_factory=list[Part])
    results: list[PostResult] = field(default_factory=list[PostResult])

    def __post_init__(self) -> None:
        self.transport: Any = LoopbackTransport("a", LoopbackNetwork())
        self.transport.post = self._post
        self.transport.poll = self._poll
        self.transport.release = lambda handle: None
        self.transport.connect = bytes.decode
        self.transport.disconnect = lambda peer: None
        runtime: Any = SimpleNamespace(now=lambda: self.now, start=self._start)
        self.fabric = Fabric(self.transport, runtime, **{"max_post_bytes": 1 << 30, **self.settings})
        self.fabric.start()
        self.connect("b")

    def _start(self, name: str, step: Callable[[], float | None], *, setup: Callable[[], None]) -> Any:
        self.step = step
        setup()
        return SimpleNamespace(wake=lambda: None, stop=lambda timeout: True)

    def _post(self, peer: str, operation: Operation, local: Descriptors, remote: Descriptors) -> Part:
        begins = max(self.now, self.free.get(peer, 0.0))
        takes = self.takes(local.nbytes, len(local.pieces))
        self.free[peer] = begins + takes
        self.parts.append(Part(takes, self.free[peer]))
        return self.parts[-1]

    def _poll(self, part: Part) -> bool:
        part.polls += 1
        if part.lost:
            raise FabricError("lost")
        if self.now < part.ends:
            return False
        part.seen = self.now
        return True

    def connect(self, peer: str) -> None:
        future = self.fabric.connect(peer.encode())
        self.step()
        assert future.result(0) == peer

    def post(self, nbytes: int, *, pieces: int = 1, peer: str = "b") -> None:
        rows = np.zeros((pieces, 2), dtype=np.int64)
        rows[:, 1] = nbytes // pieces
        here = Descriptors("VRAM", 0, rows)
        self.fabric.post(Post(peer, Operation.WRITE, here, here, Cell(1e9), self.results.append))

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Let the service work until it has nothing more to do."""
        while True:
            delay = self.step()
            self.now += STEP
            if delay is None or (until is not None and until()):
                return
            self.now += delay + LATE if delay > 0 else 0.0

    def move(self, nbytes: int, times: int, **kind: Any) -> list[Part]:
        """One post after the other; what is known then of the parts."""
        before = len(self.parts)
        for _ in range(times):
            self.post(nbytes, **kind)
            self.run()
            self.now += 1e-3
        assert {result.outcome for result in self.results} == {Outcome.DONE}
        return self.parts[before:]


def seconds(value: float) -> Callable[[int, int], float]:
    return lambda nbytes, pieces: value


def lateness(parts: list[Part]) -> list[float]:
    return [part.seen - part.ends for part in parts]


BEFORE = {100 * US: 14, 175 * US: 23, 700 * US: 31, 2e-3: 34, 10e-3: 43}
"""How often a part was looked at while nothing was foreseen."""


@pytest.mark.parametrize(("takes", "polls", "late"), [
    (20 * US, 4, 0.0), (100 * US, 14, 0.0), (175 * US, 6, 0.0), (700 * US, 7, LATE + 50 * US),
    (2e-3, 9, LATE + 2e-3 / 32), (10e-3, 17, LATE + 10e-3 / 32),
])  # fmt: skip
def test_what_is_known_is_looked_at_a_few_times_and_seen_soon(takes, polls, late):
    world = World(seconds(takes))
    first = world.move(64 << 20, 1)[0].polls
    assert first == BEFORE.get(takes, 4), "nothing is known yet"
    world.move(64 << 20, KNOWN)
    parts = world.move(64 << 20, 64)
    assert sum(part.polls for part in parts) / len(parts) <= polls
    foreseen = sorted(lateness(parts))[:56]  # one in eight is looked at as if nothing were known
    assert foreseen[-1] <= late + 2 * STEP
    if takes in BEFORE:
        assert [part.polls for part in parts].count(first) == (64 if takes <= 100 * US else 8)


def test_four_posts_at_a_time_are_looked_at_when_the_oldest_is_due():
    world = World(seconds(175 * US))
    for _ in range(20):
        for _ in range(4):
            world.post(64 << 20)
        world.run()
    parts = world.parts[16:]
    assert len(parts) == 64
    assert sum(part.polls for part in parts) / len(parts) <= 20, "87 while nothing was foreseen"
    assert max(lateness(parts)) <= 4 * STEP


def test_the_peer_whose_part_is_due_first_decides():
    world = World(lambda nbytes, pieces: 2e-3 if nbytes > 1 << 24 else 300 * US)
    world.connect("c")
    for _ in range(16):
        world.post(64 << 20)
        world.post(1 << 20, peer="c")
        world.run()
    shorter = [part for part in world.parts[16:] if part.takes < 1e-3]
    assert max(lateness(shorter)) <= 200 * US / 4 + LATE + 2 * STEP


def test_a_short_part_behind_a_long_one_may_end_first():
    world = World(seconds(2e-3))
    world.move(64 << 20, KNOWN)
    world.takes = seconds(30 * US)
    world.move(1 << 20, KNOWN)
    world.takes = seconds(2e-3)
    world.post(64 << 20)
    world.run(until=lambda: world.now > world.parts[-1].ends - 1.8e-3)
    world.takes, world.free["b"] = seconds(30 * US), world.now  # it does not wait for the long one
    world.post(1 << 20)
    world.run()
    assert lateness(world.parts)[-1] <= 4 * STEP


def test_bounds_of_a_part_that_waited_for_another():
    pieces = np.array([[0, 1 << 20]], dtype=np.int64)
    here = Descriptors("VRAM", 0, pieces)
    post = Post("b", Operation.WRITE, here, here, Cell(1e9), print)
    one, two, three = (wire.Flight.of(object(), post, 1 << 20, 1) for _ in range(3))
    line = wire.Wire()
    for began, flight in enumerate((one, two, three)):
        line.posted(flight, 1.0 + began)
    for look in (4.0, 10.0, 12.0):
        line.looked(look)
    line.ended(one, 12.5)  # after 10, when it had not: in 9 to 11.5 seconds
    line.looked(20.0)
    line.looked(24.0)
    line.ended(two, 24.5)  # after 20, and the other one had ended after 10 and by 12.5: in 7.5 to 14.5 seconds
    line.ended(three, 24.75)  # in no time, or since 20
    (least,) = line._known.values()
    assert [(low * (1 << 20), high * (1 << 20)) for low, high in least._last] == [(9.0, 11.5), (7.5, 14.5), (0.0, 4.75)]


def test_pieces_take_time_of_their_own():
    """4 us a piece: as many bytes in more pieces are foreseen to take longer, and the other way round."""
    world = World(lambda nbytes, pieces: 10 * US + 4 * US * pieces + nbytes / 390e9)
    kinds = [(1, 8 << 20), (128, 8 << 20), (1024, 8 << 20), (1024, 64 << 20)]
    for pieces, nbytes in kinds * 16:
        world.move(nbytes, 1, pieces=pieces)
    for pieces, nbytes in kinds:
        parts = world.move(nbytes, 8, pieces=pieces)
        takes = world.takes(nbytes, pieces)
        assert sorted(lateness(parts))[-2] <= LATE + max(50 * US, takes / 32) + 2 * STEP
        if takes > 100 * US:
            assert min(part.polls for part in parts) <= 4 + takes / 1e-3


def test_a_slower_wire_is_seen_in_proportion_and_then_known():
    world = World(seconds(1e-3))
    world.move(64 << 20, KNOWN)
    world.takes = seconds(8e-3)
    parts = world.move(64 << 20, 16)
    assert max(lateness(parts)) <= 1e-3 + LATE + 2 * STEP, "max_poll_interval, whatever was known"
    world.takes = seconds(1e-3)
    assert max(lateness(world.move(64 << 20, 8))) <= 1e-3 + LATE + 2 * STEP
    assert max(lateness(world.move(64 << 20, 7))) <= 200 * US + LATE


def test_the_first_write_on_a_connection_may_take_long():
    world = World(seconds(10e-3))
    world.move(64 << 20, 1)
    world.takes = seconds(175 * US)
    world.move(64 << 20, 12)
    parts = world.move(64 << 20, 32)
    assert max(lateness(parts)) <= STEP
    assert sum(part.polls for part in parts) / len(parts) <= 6


def test_posts_that_copy_inside_the_call_teach_nothing():
    """Those of CPU memory: what takes long is the call, and the first poll finds them done."""
    world = World(seconds(0.0))
    real = world.transport.post

    def post(*arguments: Any) -> Part:
        world.now += 1e-3
        return real(*arguments)

    world.transport.post = post
    for _ in range(20):
        world.post(4 << 20)
        world.run()
    assert [part.polls for part in world.parts] == [1] * 20
    assert max(lateness(world.parts)) == 0.0
    known = world.fabric._peers["b"]._known
    assert [least.takes(4 << 20) for least in known.values()] == [0.0]


def test_parts_that_want_a_turn_are_posted_at_once():
    world = World(seconds(2e-3), {"max_descriptors": 1, "max_parts_in_flight": 3})
    world.move(64 << 20, KNOWN)
    world.post(256 << 20, pieces=4)
    delays = [world.step() for _ in range(3)]
    assert delays[:2] == [0.0, 0.0]
    assert delays[2] == pytest.approx(1e-3), "the fourth has to wait, and the oldest takes 2 ms"


def test_a_hold_has_its_interval_beside_what_is_under_way():
    world = World(seconds(5e-3))
    world.move(64 << 20, KNOWN)
    release = world.fabric.hold_awake()
    world.post(64 << 20)
    assert world.step() == pytest.approx(100 * US)
    release()
    assert world.step() == pytest.approx(1e-3)


def test_what_was_lost_or_given_up_teaches_nothing_and_is_not_waited_for():
    world = World(seconds(2e-3), {"no_progress_timeout": 1.0})
    world.move(64 << 20, KNOWN)
    known = list(world.fabric._peers["b"]._known.values())
    (least,) = known
    learned = list(least._last)
    world.post(64 << 20)
    world.step()
    world.parts[-1].lost = True
    world.run()
    world.takes = seconds(math.inf)
    world.post(64 << 20)
    ended = len(world.results) + 1
    world.run(until=lambda: len(world.results) == ended)
    assert [result.outcome for result in world.results[-2:]] == [Outcome.FAILED, Outcome.IN_DOUBT]
    assert world.parts[-1].polls <= 1100, "at most once in a millisecond, for a second"
    assert list(least._last) == learned
    assert world.fabric._peers["b"]._flights == {}
    assert world.step() == 0.01, "whether it ends after all is looked at seldom"


def test_a_peer_that_was_forgotten_is_unknown():
    world = World(seconds(2e-3))
    world.move(64 << 20, KNOWN)
    assert world.move(64 << 20, 1)[0].polls < 10
    world.connect("b")
    assert world.fabric._peers["b"]._known, "more of its memory: still the same peer"
    for left in (["b"], []):  # as often as it was connected
        future = world.fabric.disconnect("b")
        world.step()
        assert future.result(0) is None
        assert list(world.fabric._peers) == left
    world.connect("b")
    assert world.move(64 << 20, 1)[0].polls == BEFORE[2e-3]


def test_what_is_known_of_a_peer_is_bounded():
    world = World(seconds(10 * US))
    world.move(4, 1)
    ((used, least),) = world.fabric._peers["b"]._known.items()
    for size in range(3, 41):
        for pieces in (1, 2, 4):
            world.move(1 << size, 1, pieces=pieces)
        world.move(4, 1)
    known = world.fabric._peers["b"]._known
    assert len(known) == wire._MOST_CLASSES
    assert (41, 3) in {alike[3:] for alike in known}, "the latest ones"
    assert known[used] is least, "what goes on"
    assert (4, 1) not in {alike[3:] for alike in known}


@given(
    st.lists(st.tuples(st.floats(0.0, 3e-3), st.integers(1, 1 << 30), st.integers(0, 1)), min_size=1, max_size=60),
    st.integers(1, 4),
)
@settings(max_examples=60)
def test_whatever_parts_take_they_are_seen_within_the_longest_sleep(parts, at_a_time):
    durations = iter([takes for takes, _, _ in parts])
    world = World(lambda nbytes, pieces: next(durations))
    world.connect("c")
    for index, (_, nbytes, peer) in enumerate(parts):
        world.post(nbytes, peer="bc"[peer])
        if index % at_a_time == 0:
            world.run()
    world.run()
    assert len(world.results) == len(parts)
    assert max(lateness(world.parts)) <= 1e-3 + LATE + 2 * STEP
