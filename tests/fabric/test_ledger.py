"""What the machine makes of a library's it gives back: a ledger of stubs in place of NIXL's functions.

Every list is destroyed once, every request released once and destroyed once unless it was not taken back, nothing is
used before or afterwards, whatever fails and however a post ends.
"""

import asyncio
import ctypes
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rigs import Moving, pieces

from kvxfer.copy import records
from kvxfer.copy.mover import Flow
from kvxfer.copy.port import CopyJob, Descriptors, Direction, Native, Operation, Outcome, Post, Turns
from kvxfer.copy.tables import NOTHING
from kvxfer.errors import FabricError

OK, IN_PROGRESS, BACKEND, GONE = 0, 1, -2, -10
CALLS = {
    "create_list": 2,
    "add_piece": 4,
    "destroy_list": 1,
    "make": 7,
    "begin": 3,
    "status": 2,
    "release": 2,
    "destroy": 1,
    "notices": 3,
    "forget_notices": 1,
    "notify": 5,
    "notice_agents": 2,
    "notice_agent": 3,
    "notice_count": 3,
    "notice": 5,
    "cause": 2,
}
"""In the order of `records` from AGENT_PORTS on, and how much each takes."""
FALLIBLE = ["create_list", "add_piece", "make", "begin", "status", "release", "notices", "notify"]


class Ledger:
    """Functions that note what is made and given back. Those that may fail do so as `fails` says, which is asked."""

    def __init__(self) -> None:
        self.wrong: list[str] = []  # what should not have been called so
        self.calls: list[str] = []  # names, in order
        self.lists: dict[int, list[tuple[int, int, int]]] = {}
        self.requests: dict[int, str] = {}
        self.moved: list[tuple[int, tuple[Any, ...], tuple[Any, ...], str]] = []
        self.notified: list[tuple[str, bytes]] = []
        self.coming: dict[bytes, list[bytes]] = {}  # until it makes progress
        self.heard: dict[bytes, list[bytes]] = {}  # until that is forgotten
        self.made: Counter[str] = Counter()
        self.stuck = 0
        self.ends = self.gone = False  # whether what is begun ends when it is looked at
        self.fails: Any = lambda name: OK
        self._kept: list[Any] = []
        self._agents: list[int] = []
        self.agent = self.notices = self._word()

    def _word(self) -> int:
        """A handle: something is read from where it points to."""
        word = ctypes.c_int64(4711)
        self._kept.append(word)
        return ctypes.addressof(word)

    def native(self) -> Native:
        """Another agent; the one before is no more."""
        self.agent, self.notices = self._word(), self._word()
        table = [self._function(name, count) for name, count in CALLS.items()]
        return Native(np.array(table, np.int64), self.agent, self.notices, self._error)

    def _error(self, code: int, doing: str, gone: bool, in_doubt: bool) -> FabricError:
        return FabricError(f"could not {doing}: {code}", disconnected=gone, in_doubt=in_doubt)

    def _function(self, name: str, count: int) -> int:
        function = getattr(self, f"_{name}")

        def called(*arguments: int) -> int:
            self.calls.append(name)
            try:
                status = self.fails(name) if name in FALLIBLE else OK
                return function(status, *arguments)
            except BaseException as error:  # noqa: BLE001 - nobody is above a C function
                self.wrong.append(f"{name}{arguments}: {error!r}")
                return BACKEND

        made = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * count)(called)
        self._kept.append(made)
        return ctypes.cast(made, ctypes.c_void_p).value or 0

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)

    def _create_list(self, status: int, kind: int, out: int) -> int:
        self._expect(kind in (0, 1), f"a list of kind {kind}")
        handle = self._word()
        ctypes.c_int64.from_address(out).value = handle  # also where it fails: whatever is there is not to be used
        if status == OK:
            self.made["list"] += 1
            self.lists[handle] = []
        return status

    def _add_piece(self, status: int, handle: int, address: int, nbytes: int, device: int) -> int:
        self._expect(nbytes > 0, f"a piece of {nbytes} bytes")
        self.lists[handle].append((address, nbytes, device))
        return status

    def _destroy_list(self, _: int, handle: int) -> int:
        del self.lists[handle]
        return OK

    def _make(self, status: int, agent: int, way: int, near: int, far: int, peer: int, out: int, options: int) -> int:
        here, there = self.lists[near], self.lists[far]
        self._expect(agent == self.agent and options == 0, "made by another agent")
        self._expect(bool(here) and [one[1] for one in here] == [one[1] for one in there], "two sides that do not fit")
        handle = self._word()
        ctypes.c_int64.from_address(out).value = handle
        if status == OK:
            self.made["request"] += 1
            self.requests[handle] = "made"
            self.moved.append((way, tuple(here), tuple(there), ctypes.string_at(peer).decode()))
        return status

    def _begin(self, status: int, agent: int, handle: int, options: int) -> int:
        self._expect(agent == self.agent and options == 0, "begun by another agent")
        self._expect(self.requests[handle] == "made", f"begun, and was {self.requests[handle]}")
        self.requests[handle] = "begun" if status == OK else "failed"
        return IN_PROGRESS if status == OK else status

    def _status(self, status: int, agent: int, handle: int) -> int:
        self._expect(agent == self.agent, "looked at by another agent")
        self._expect(self.requests[handle] == "begun", f"looked at, and was {self.requests[handle]}")
        if status == OK and not self.ends:
            return IN_PROGRESS
        self.requests[handle] = "ended" if status == OK else "failed"
        return status

    def _release(self, status: int, agent: int, handle: int) -> int:
        self._expect(agent == self.agent, "given back to another agent")
        self._expect(self.requests[handle] != "released", "given back twice")
        if status == OK:
            self.requests[handle] = "released"
        else:  # it stays, and is not to be touched any more
            self.requests[handle] = "stuck"
            self.stuck += 1
        return status

    def _destroy(self, _: int, handle: int) -> int:
        self._expect(self.requests.pop(handle) == "released", "destroyed before it was given back")
        return OK

    def _notices(self, status: int, agent: int, notices: int, options: int) -> int:
        self._expect((agent, notices, options) == (self.agent, self.notices, 0), "progress of another agent")
        self._expect(self.heard == {}, "notifications that were not forgotten")
        if status == OK:
            self.heard, self.coming = self.coming, {}
        return status

    def _forget_notices(self, _: int, notices: int) -> int:
        self._expect(notices == self.notices, "another's notifications")
        self.heard = {}
        return OK

    def _notify(self, status: int, agent: int, peer: int, message: int, nbytes: int, options: int) -> int:
        self._expect(agent == self.agent and options == 0, "notified by another agent")
        if status == OK:
            self.notified.append((ctypes.string_at(peer).decode(), ctypes.string_at(message, nbytes)))
        return status

    def _notice_agents(self, _: int, notices: int, out: int) -> int:
        return self._said(notices, out, len(self.heard))

    def _notice_agent(self, _: int, notices: int, number: int, out: int) -> int:
        return self._said(notices, out, self._text(list(self.heard)[number]))

    def _notice_count(self, _: int, notices: int, agent: int, out: int) -> int:
        name = ctypes.string_at(agent)
        return self._said(notices, out, len(self.heard[name])) if name in self.heard else BACKEND

    def _notice(self, _: int, notices: int, agent: int, number: int, out: int, nbytes: int) -> int:
        message = self.heard[ctypes.string_at(agent)][number]
        self._said(notices, nbytes, len(message))
        return self._said(notices, out, self._text(message) if message else 0)  # of nothing there is no address

    def _said(self, notices: int, out: int, number: int) -> int:
        self._expect(notices == self.notices, "another's notifications")
        ctypes.c_int64.from_address(out).value = number
        return OK

    def _text(self, text: bytes) -> int:
        self._kept.append(ctypes.create_string_buffer(text))
        return ctypes.addressof(self._kept[-1])

    def _cause(self, _: int, agent: int, request: int) -> int:
        self._expect((agent, request) == (4711, 4711), "it takes what handles point to")
        return GONE if self.gone else OK

    def check(self) -> None:
        """Everything was given back, but for what was not taken."""
        assert self.wrong == []
        assert self.lists == {}
        assert list(self.requests.values()) == ["stuck"] * self.stuck


class Ledgered(Moving):
    """A mover over a ledger."""

    def __init__(self, *, orderly: bool = True, **options: Any) -> None:
        super().__init__(max_descriptors=3, max_post_bytes=100, **options)
        self.ledger = Ledger()
        self.orderly = orderly
        self.attach()

    def attach(self, *, anew: bool = False) -> None:
        self.mover.attach(self.ledger.native(), orderly=self.orderly, anew=anew)

    def post(self, tag: str, rows: np.ndarray, *, kind: str = "DRAM", device: int = 0, **job: Any) -> Flow:
        here, there = Descriptors(kind, device, rows), Descriptors(kind, device, rows + np.array([[1 << 20, 0]]))
        return self.submit(tag, Post("b", Operation.WRITE, here, there, late=self.late.append), **job)


ROWS = pieces((64, 30), (128, 40), (256, 20), (512, 100), (1024, 250))
"""Of these, five parts are made."""


@pytest.fixture
async def ledgered():
    moving = Ledgered()
    yield moving
    await moving.end()
    moving.ledger.check()


def failing(name: str, number: int, status: int = BACKEND) -> Any:
    """The n-th call of a function fails."""
    seen = Counter[str]()

    def fails(called: str) -> int:
        seen[called] += 1
        return status if called == name and seen[called] == number else OK

    return fails


async def test_a_post_makes_two_lists_and_a_request_a_part_and_gives_all_of_them_back(ledgered):
    ledgered.ledger.ends = True
    ledgered.post("x", ROWS, kind="VRAM", device=3)
    ledgered.step(3)
    assert ledgered.result().outcome is Outcome.DONE
    assert [call for call in ledgered.ledger.calls if call != "add_piece"] == [
        *("create_list", "create_list", "make", "destroy_list", "destroy_list", "begin", "status", "release", "destroy")
    ] * 2
    assert [(way, peer) for way, _, _, peer in ledgered.ledger.moved] == [(1, "b")] * 2
    assert [list(here) for _, here, _, _ in ledgered.ledger.moved] == [
        [(address, nbytes, 3) for address, nbytes in rows.tolist()] for rows in (ROWS[:3], ROWS[3:])
    ]
    assert ledgered.ledger.made == {"list": 4, "request": 2}


@pytest.mark.parametrize("status", [BACKEND, -4])
@pytest.mark.parametrize(
    ("name", "number", "outcome"),
    [
        *(("create_list", number, Outcome.FAILED) for number in (1, 2, 3, 4)),
        *(("add_piece", number, Outcome.FAILED) for number in range(1, 9)),
        *(("make", number, Outcome.FAILED) for number in (1, 2)),
        *(("begin", number, Outcome.FAILED) for number in (1, 2)),  # in doubt until a flush has passed it
        *(("status", number, Outcome.FAILED) for number in (1, 2)),
        *(("release", number, Outcome.DONE) for number in (1, 2, 5)),
    ],
)
async def test_whatever_fails_nothing_is_leaked_and_nothing_given_back_twice(ledgered, name, number, outcome, status):
    ledger = ledgered.ledger
    ledger.ends, ledger.fails = True, failing(name, number, status)
    ledgered.post("x", ROWS)
    ledgered.step(12)
    assert ledgered.result().outcome is outcome
    if outcome is Outcome.FAILED:
        assert f": {status}" in str(ledgered.result().error)
    assert ledgered.counted() == [0] * 5
    ledger.check()
    assert ledger.stuck == (name == "release")


@pytest.mark.parametrize("why", ["lease", "gate"])
async def test_a_request_that_may_not_be_begun_any_more_is_given_back(ledgered, why):
    way = ledgered.way()

    def fails(name: str) -> int:
        if name == "make" and why == "lease":  # it takes too long
            ledgered.state[records.NOW] += 2_000_000_000
        elif name == "make":
            way.file.revoke(0)
        return OK

    ledgered.ledger.fails = fails
    ledgered.post("x", ROWS[:3], passage=way.passage, until=101.0)
    ledgered.step(2)
    assert ledgered.result().outcome is Outcome.STOPPED
    assert ledgered.ledger.calls[-2:] == ["release", "destroy"]
    assert "begin" not in ledgered.ledger.calls
    assert (way.inside, way.lent) == (0, 0)


@pytest.mark.parametrize("gone", [True, False])
@pytest.mark.parametrize("name", ["begin", "status"])
async def test_only_where_the_peer_is_gone_there_is_no_flush(ledgered, name, gone):
    ledger = ledgered.ledger
    ledger.ends, ledger.gone, ledger.fails = True, gone, failing(name, 1)
    ledgered.post("x", ROWS[:3])
    ledgered.step(5)
    result = ledgered.result()
    assert result.outcome is (Outcome.IN_DOUBT if gone else Outcome.FAILED)
    assert ledger.made["request"] == (1 if gone else 2)
    assert result.error is not None
    assert result.error.disconnected is gone


@pytest.mark.parametrize(("rows", "flush"), [
    (pieces((0, 0), (64, 30), (128, 60)), (64, 30, 0)), (pieces((640, 200)), (640, 64, 0)),
])  # fmt: skip
async def test_a_flush_moves_the_first_bytes_once_more(ledgered, rows, flush):
    ledger = ledgered.ledger
    ledger.ends, ledger.fails = True, failing("status", 1)
    ledgered.post("x", rows)
    ledgered.step(6)
    assert ledgered.result().outcome is Outcome.FAILED
    assert ledger.moved[-1][1] == (flush,)


@pytest.mark.parametrize("orderly", [True, False])
async def test_progress_that_fails_forgets_its_notifications_too(orderly):
    moving = Ledgered(orderly=orderly)
    moving.ledger.fails = failing("notices", 2)
    release = moving.mover.hold_awake()
    moving.step(3)
    release()
    assert moving.ledger.calls == ["notices", "notice_agents", "forget_notices"] * 3
    assert "make progress: -2" in str(moving.mover.failure())
    await moving.end()


TOKEN = bytes(range(1, 17))


def note(steps: int, scatter: bool) -> bytes:
    return TOKEN + (2 * steps + scatter).to_bytes(8, "little")


def turning(moving: Ledgered, direction: Direction, tag: str = "x") -> Flow:
    """A flow of steps that do nothing, and take turns with those of a peer."""
    moving.results[tag] = []
    job, turns = CopyJob(NOTHING, moving.results[tag].append, owner=tag), Turns(2, 0, TOKEN, "b")
    options: Any = {"total": 6, "allowed": 6, "turns": turns, "progress": lambda _: None}
    return moving.mover.flow(job, direction, [CopyJob(NOTHING)] * 6, **options)


async def test_flows_that_take_turns_notify_and_hear_by_the_librarys_functions(ledgered):
    """Of several agents, and several of each; another length than theirs is not read."""
    ledger = ledgered.ledger
    turning(ledgered, Direction.GATHER)
    ledgered.step(3)
    assert ledger.notified == [("b", note(1, False)), ("b", note(2, False))]
    ledger.coming = {b"bb": [note(6, True)], b"b": [b"", note(6, True)[:23], note(1, True), note(2, True)], b"": [b"?"]}
    ledgered.step(3)
    assert ledger.notified[2:] == [("b", note(steps, False)) for steps in (3, 4)]
    assert ledgered.mover.unknown_notifications == 4
    ledger.coming = {b"b": [note(3, True), note(6, True), note(5, True)]}
    ledgered.step(4)
    assert ledgered.result().outcome is Outcome.DONE
    assert ledger.notified[4:] == [("b", note(steps, False)) for steps in (5, 6)]
    calls = len(ledger.calls)
    ledgered.step(3)
    assert len(ledger.calls) == calls, "nobody listens any more"


async def test_of_a_flood_no_more_is_read_at_once_than_there_can_be_flows(ledgered):
    ledger, flow = ledgered.ledger, turning(ledgered, Direction.SCATTER)
    ledgered.step(2)
    ledger.coming = {b"b": [b"?"] * 3000, b"c": [b"?"]}
    ledgered.step()
    assert (ledger.calls.count("notice"), ledgered.mover.unknown_notifications) == (records.JOBS, 3001)
    ledger.coming = {str(name).encode(): [b"?"] for name in range(3000)}
    ledgered.step()
    assert (ledger.calls.count("notice_agent"), ledgered.mover.unknown_notifications) == (2 + records.JOBS, 6001)
    ledger.coming = {b"b": [note(6, False)] * 3000}
    ledgered.step(6)
    assert ledgered.result().outcome is Outcome.DONE, flow


async def test_under_a_name_with_a_zero_in_it_nothing_is_found_and_nothing_read(ledgered):
    """Whoever notifies says by what name, and C finds another one; what was found before is no more by then."""
    ledger = ledgered.ledger
    turning(ledgered, Direction.SCATTER)
    for coming in ({b"b": [note(1, False), note(2, False)]}, {b"c\0b": [b"?"]}):
        ledger.coming = dict(coming)
        ledgered.step(3)
    assert ledger.calls.count("notice") == 2
    assert ledgered.mover.unknown_notifications == 1
    ledger.coming = {b"b": [note(6, False)]}
    ledgered.step(6)
    assert ledgered.result().outcome is Outcome.DONE


@pytest.mark.parametrize("direction", list(Direction))
async def test_what_cannot_be_notified_is_said_with_what_is_next(ledgered, direction):
    ledger = ledgered.ledger
    ledger.fails = lambda name: BACKEND if name == "notify" else OK
    flow = turning(ledgered, direction)
    ledgered.mover.note_peer_steps(flow, 2)
    ledgered.step(6)
    done = 4 if direction is Direction.GATHER else 2
    assert (ledger.calls.count("notify"), ledger.notified) == (done, []), "it is not tried again"
    ledger.fails = lambda name: OK
    ledgered.mover.note_peer_steps(flow, 3)
    ledgered.step(4)
    assert ledger.notified == [("b", note(done + 1, direction is Direction.SCATTER))]
    assert ledgered.mover.failure() is None


async def played(seed: int) -> Ledgered:
    """Posts that fail in every way, cancels, leases, silence, other agents, and flows that are notified, or not."""
    rng = random.Random(seed)
    moving = Ledgered(orderly=rng.random() < 0.7, no_progress_timeout=rng.choice([2.0, 1e6]))
    ledger, copies = moving.ledger, list[Flow]()
    rates = {name: rng.choice([0.0, 0.0, 0.05, 0.3]) for name in FALLIBLE}
    ledger.fails = lambda name: rng.choice([BACKEND, -4]) if rng.random() < rates[name] else OK
    holds = list[Any]()
    for number in range(60):
        ledger.ends, ledger.gone = rng.random() < 0.5, rng.random() < 0.3
        what = rng.random()
        if what < 0.4:
            rows = pieces(
                *((4096 * at, rng.choice([0, 1, 50, 100, 230])) for at in range(1, rng.randint(2, 6))), (8, 8)
            )
            until = rng.choice([1e9, moving.runtime.time + 0.5])
            way = rng.choice([None, moving.way()])
            copies.append(moving.post(str(number), rows, until=until, passage=way and way.passage))
        elif what < 0.5 and copies:
            moving.mover.cancel(rng.choice(copies))
        elif what < 0.55 and copies:
            moving.mover.forget(rng.choice(copies))
        elif what < 0.6:
            holds.append(moving.mover.hold_awake())
        elif what < 0.65:
            moving.mover.stop_posting()
            moving.step(rng.randint(0, 2))
            await moving.run(moving.mover.abandon_posts())
            assert all(state == "stuck" for state in ledger.requests.values()), "an agent could not be destroyed"
            ledger.requests.clear()
            ledger.stuck = 0
            moving.attach(anew=rng.random() < 0.7)
        elif what < 0.75:
            copies.append(turning(moving, rng.choice(list(Direction)), str(number)))
        if rng.random() < 0.3:
            said = [note(rng.randrange(7), rng.random() < 0.5), b"", TOKEN, bytes(24)]
            ledger.coming = {peer: rng.choices(said, k=rng.randrange(4)) for peer in (b"b", b"c")}
        moving.step(rng.randint(1, 4), seconds=rng.choice([0.0, 0.0, 0.6]))
    for release in holds:
        release()
    ledger.ends, ledger.fails = True, lambda name: OK
    for copy in copies:
        if copy.turns is not None:
            moving.mover.cancel(copy)
    for _ in range(200):
        moving.step(1, seconds=0.3)
        for copy in copies:
            moving.mover.forget(copy)
    return moving


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_whatever_happens_the_books_balance(seed):
    async def play() -> None:
        moving = await played(seed)
        moving.ledger.check()
        assert all(len(results) == 1 for results in moving.results.values())
        assert moving.counted() == [0] * 5
        assert moving.state[records.LISTENING] == 0
        assert len(moving.late) <= len(moving.results)
        assert {way.inside for way in moving.ways} <= {0}
        assert {way.lent for way in moving.ways} <= {0}
        await moving.end()

    asyncio.run(play())
