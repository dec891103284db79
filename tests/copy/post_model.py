"""Flows of many steps that are posted in parts, against a stub of an agent that knows what may still move.

What the machine says of itself is not believed: which parts are under way, and which may be though they failed or were
given back, follows from what the stub was asked for and from what it answered. The stub's functions judge each call as
it comes: whose turn it is, how a post is cut, whom a notification concerns. How a flow ended, and why, is judged as
that is written; the loop, which reads it later, is another actor here.
"""

import ctypes
from collections import deque
from functools import partial
from typing import Any

import numba
import numpy as np
from driver import word
from model import FAULT, FOREVER, GATES, NOT_READY, Model, generation, words

from kvxfer.copy import records as r
from kvxfer.copy.compiler import load, store
from kvxfer.copy.mover import _EVENT
from kvxfer.copy.posts import IN_PROGRESS, PEER_IS_GONE, REFUSED

PEERS, MOST_FLOWS = 5, 24
CELLS, REQUESTS, AGENTS = 1 << 13, 1 << 13, 1 << 10
PATIENCE = 40_000_000
FAR = 1 << 60  # what is far lies so much behind what is near
SERIAL_BITS = 24
DEAD = -99
NEAR_SIDE, FAR_SIDE = (0, 3), (1, 5)  # kinds of memory, and devices
FLUSH_BYTES = 64
COUNTERS = "SENDING_COUNT WATCHED LISTENING FLOW_COUNT EAGER DUE_COUNT LIVE CATCHING BUSY"


@numba.cfunc("int32(int64, int64)")
def _status(agent: Any, request: Any) -> Any:
    if load(agent + 8) != 1:  # it may not be called: counted, since nobody is above a C function
        store(agent + 16, load(agent + 16) + 1)
    return load(request + 8)


@numba.cfunc("int32(int64, int64)")
def _cause(handle: Any, number: Any) -> Any:
    return number


@numba.cfunc("int32(int64)")
def _query(event: Any) -> Any:
    return load(event)


class Flow:
    """What was asked for, what the machine was told of it, and what has come of it."""

    def __init__(self, number: int, slot: int, total: int, width: int, room: int, lane: int) -> None:
        self.number, self.slot, self.total, self.width, self.lane = number, slot, total, width, lane
        self.table = np.zeros((room, r.RECORD_WORDS), np.int64)
        self.steps: list[Step] = []
        self.way = self.gate = self.peer = self.generation = self.most_bytes = 0
        self.most_pieces, self.stays, self.unlucky, self.copies = 1, False, False, False
        self.until, self.soonest = FOREVER, FOREVER
        self.fed = 0  # how many had a row, as was seen last
        self.places = self.base = self.token = self.other = 0
        # what the loop has decided: may begin, heard of the peer, until when; and knows: how many are done
        self.allowed = self.heard = self.told = 0
        self.unwanted = self.ended = False
        self.failed = self.faulty = False  # a step has; an event has, or something that was made was not begun
        self.lefts: dict[int, Step] = {}
        # what was taken: known, allowed, total, until; how many the peer has done
        self.said: tuple[int, ...] = (0, 0, 0, 0)
        self.peer_steps = self.notified = self.news = self.done = self.could = 0
        self.worst: Any = None  # of its steps in doubt, the first that was told of: its code, whether its peer is gone
        self.epoch, self.lingers = 0, False  # when that was told; whether bytes of this side could move for any
        self.prevented = FOREVER  # the first step that never begins
        self.reasons: set[str] = set()

    def __repr__(self) -> str:
        return f"flow {self.number} in slot {self.slot}"

    def passed(self) -> int:
        """How many of the first steps are done."""
        while self.done < len(self.steps) and self.steps[self.done].is_done():
            self.done += 1
        return self.done

    def stands(self) -> bool:
        """Whether there may be reasons why no step begins."""
        return self.failed or bool(self.reasons) or self.prevented != FOREVER

    def limit(self) -> int:
        """How many steps may begin."""
        most, passed = min(self.said[0], self.said[1]), self.passed()
        if self.places and self.lane == 0:
            return min(most, min(self.peer_steps, passed) + self.places)
        return min(most, self.peer_steps, passed + self.places) if self.places else most


class Step:
    """One step, and what the stub knows of it."""

    def __init__(self, flow: Flow, number: int, index: int, serial: int, cell: int, event: int) -> None:
        self.flow, self.number, self.cell, self.event = flow, number, cell, event  # addresses, or 0
        self.index, self.serial = index, serial
        self.handles = np.array([event], np.int64)
        self.until = FOREVER
        self.todo: deque[list[int]] = deque()  # near pieces that no part has had
        self.lengths: dict[int, int] = {}  # of pieces that no part has had any of, by address
        self.first: tuple[int, int] = (0, 0)  # what is moved once more
        self.pieces: Any = None
        self.flying: set[Part] = set()
        self.unreached = False  # whether the last that failed did so since the peer is gone
        self.entered = self.flushed = self.tried = self.cut = self.severed = self.forgotten = self.told = False
        self.loose = False  # something of this side may move, and nobody looks at it
        self.far = False  # what was written may land though this side moves nothing
        self.verdict, self.code, self.gone = r.DONE, 0, False  # the worst of what went wrong, and the first of that
        self.lost = -1  # which agent said that the peer is gone
        self.lively = self.silent = self.finished = 0
        self.served, self.since = 0, FOREVER  # which turn was its last; behind which it got its row, at least
        self.began = self.posted = self.posting = 0  # when a part was made last, the first posted; how long all took

    def __repr__(self) -> str:
        return f"step {self.number} of {self.flow}"

    def is_done(self) -> bool:
        copied = not self.cell or word(self.cell).value == 0
        return copied and not self.todo and not self.flying and self.verdict == r.DONE

    def worsen(self, verdict: int, code: int, *, gone: bool = False) -> None:
        """What is worst counts, and of that the first."""
        if verdict > self.verdict:
            self.verdict, self.code, self.gone, self.flow.failed = verdict, code, gone, True

    def has_parts(self) -> bool:
        """Whether something of it may be posted next."""
        goes_on = self.silent < PATIENCE and not (self.flow.stands() or self.flow.faulty)
        return goes_on and bool(self.todo) and len(self.flying) < r.MOST_PARTS

    def in_doubt(self) -> bool:
        """Whether the lock in front of the peer's memory must be held."""
        return bool(self.flying) or ((self.loose or self.far) and not self.forgotten)


class Part:
    """A request."""

    def __init__(self, step: Step, pieces: list[tuple[int, int]], request: int) -> None:
        self.step, self.pieces, self.request = step, pieces, request
        self.begun = self.flush = self.given_back = False


class PostModel(Model):
    """A machine with an agent."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.outcomes = {}
        self.flows: dict[int, Flow] = {}  # by slot: those of which nobody was told
        self.slots: dict[int, Flow] = {}  # as the loop has them
        self.free = self.rng.sample(range(r.JOBS), 3 * MOST_FLOWS)
        self.open: dict[Step, None] = {}  # posts that have begun, and of which something may be under way
        self.left: dict[int, Step] = {}  # those in doubt, by row
        self.doubtful: dict[Flow, None] = {}  # flows that have ended, and have some of these, as the loop knows
        self.serials: dict[int, Step] = {}
        self.tokens: dict[int, Flow] = {}
        self.cells, self.shadow, self.events = (np.zeros(CELLS, np.int64) for _ in range(3))
        self.free_cells, self.by_cell = list(range(CELLS)), {}
        self.blanks = np.zeros((CELLS, 4), np.int64)
        self.blanks[:] = np.c_[self.cells.ctypes.data + 8 * np.arange(CELLS), np.full((CELLS, 3), (8, 1, 8))]
        self.unfired: list[int] = []
        self.lists: dict[int, tuple[int, list[tuple[int, int, int]]]] = {}
        self.request_words = np.zeros((REQUESTS, 2), np.int64)
        self.free_requests = [self.request_words.ctypes.data + 16 * n for n in range(REQUESTS)]
        self.parts: dict[int, Part] = {}  # requests that were made and not given back
        self.released: set[int] = set()
        self.moving: list[Part] = []
        self.silent: set[int] = set()  # peers to which nothing moves
        self.names = [ctypes.create_string_buffer(b"peer 012"[: 4 + n]) for n in range(PEERS)]  # one begins as the next
        self.turns = self.turned = 0  # of parts, and before this step
        self.served = [0] * PEERS  # which was the last of each peer
        self.strange = [0, 0, 0]  # what nobody waits for: as it was counted; how much more of it there is, from and to
        self.ailing = 0  # why it made no progress first
        self.mail: dict[int, list[Any]] = {}  # notifications, by peer
        self.inbox: dict[int, list[Any]] = {}  # those that the machine reads, by the address of a name
        self.agent_words = np.zeros((AGENTS, 3), np.int64)
        self.agents = iter(range(self.agent_words.ctypes.data, self.agent_words.ctypes.data + 24 * AGENTS, 24))
        self.agent = self.epoch = 0  # what may be called, of those that there were
        self.halted = self.catching = self.claimed = False
        self.stage = "caught"  # of an agent that is replaced
        self.full = self.late = self.deaf = self.claim = 0  # steps: no room for news, nobody reads, nobody hears
        self.lived = self.stepped = 0
        self.delay = 0
        # rows that are free; taken since; of posts, by peer
        self.spare, self.given, self.held = r.STEPS, 0, np.zeros(r.MOST_OWNERS, np.int64)
        self.heard: deque[Any] = deque()  # events that the loop has not read
        self.bounds = [[0, 0] for _ in range(GATES)]
        self.broken: list[BaseException] = []
        self.kept: list[Any] = []
        self.state[r.PATIENCE], self.state[r.ORDERLY] = PATIENCE, self.rng.random() < 0.8
        self.ports[r.QUERY], self.ports[r.STATUS], self.ports[r.CAUSE] = _query.address, _status.address, _cause.address
        for name, count in (
            *(("WRITE", 3), ("CREATE_LIST", 2), ("ADD_PIECE", 4), ("DESTROY_LIST", 1), ("MAKE", 7), ("BEGIN", 3)),
            *(("RELEASE", 2), ("DESTROY", 1), ("NOTICES", 3), ("FORGET_NOTICES", 1), ("NOTIFY", 5)),
            *(("NOTICE_AGENTS", 2), ("NOTICE_AGENT", 3), ("NOTICE_COUNT", 3), ("NOTICE", 5)),
        ):
            result = ctypes.c_int64 if name == "WRITE" else ctypes.c_int
            called = partial(self.called, getattr(self, name.lower()))
            function = ctypes.CFUNCTYPE(result, *[ctypes.c_int64] * count)(called)
            self.kept.append(function)
            self.ports[getattr(r, name)] = ctypes.cast(function, ctypes.c_void_p).value

    # --- what is done to it

    def actions(self):
        return [
            *((action, 4 * weight) for action, weight in super().actions()),
            *((self.go, 400), (self.fail, 30), (self.still, 12), (self.extend, 160), (self.flood, 1)),
            *((self.prevent, 12), (self.mistake, 5), (self.fire, 80), (self.notify_us, 80), (self.forget, 60)),
            *((self.claim_agent, 8), (self.rebuild, 7), (self.hold, 4), (self.wait_long, 20)),
            *((partial(self.suffer, what, most), 8) for what, most in (("full", 80), ("late", 300), ("deaf", 10))),
        ]

    def submit(self) -> None:
        if len(self.slots) < MOST_FLOWS and self.free:
            self.begin_flow(self.rng.choice((1, 1, 2, 5, 9, 20)), self.rng.choice((1, 2, 4, 64)))

    def flood(self) -> None:
        """More posts than there are rows."""
        if sum(len(flow.steps) for flow in self.slots.values()) < 800:
            self.begin_flow(600, 1000)

    def begin_flow(self, total: int, width: int) -> None:
        rng = self.rng
        slot = self.free.pop(rng.randrange(len(self.free)))
        room = min(total, width + rng.randrange(4))
        flow = Flow(self.number, slot, total, width, room, rng.randrange(2))
        self.number += 1
        posts = flow.lane == 0 or total > 20 or rng.random() < 0.3
        flow.way = rng.choice((r.WRITES, r.WRITES, r.READS)) if posts else 0
        flow.copies = flow.way == 0 or rng.random() < 0.3
        flow.peer, flow.gate = rng.randrange(PEERS), rng.choice((-1, rng.randrange(GATES)))
        flow.generation = generation(self.file, max(0, flow.gate)) - (rng.random() < 0.05)
        flow.stays, flow.unlucky = rng.random() < 0.3, rng.random() < 0.25
        flow.most_pieces, flow.most_bytes = rng.choice((1, 2, 8)), rng.choice((100, 1000, 1 << 62))
        if total > 20:
            flow.most_pieces, flow.most_bytes = 8, 1 << 62
        flow.until = self.now + rng.randrange(100_000_000) if rng.random() < 0.2 else FOREVER
        flow.allowed = total if total > 20 else rng.randrange(total + 1)
        if rng.random() < 0.5 and total <= 20:
            flow.places, flow.base = rng.randrange(1, 6), rng.choice((0, 7, 1 << 40))
            flow.token = rng.randrange(1, 1 << 62) if rng.random() < 0.8 else 0
            flow.other = ~flow.token if flow.token else rng.randrange(2)
            self.tokens[flow.token] = flow
        self.flows[slot] = self.slots[slot] = flow
        self.push(flow)
        owner, peer = rng.randrange(8), 10 + flow.peer
        record = np.zeros(r.RECORD_WORDS, np.int64)
        record[: r.EVENTS] = (r.FLOW, slot, flow.lane, owner, 0, flow.until, *self.lend(flow.gate, flow.generation))
        record[r.STEPS_AT : r.QUIET + 1] = (flow.table.ctypes.data, room, width, *self.progress(flow))
        record[r.HEARD], record[r.PLACES], record[r.BASE] = flow.heard, flow.places, flow.base
        record[r.TOKEN : r.TOKEN + 2] = flow.token, flow.other
        record[r.PEER], record[r.PEER_NUMBER] = ctypes.addressof(self.names[flow.peer]), peer
        self.send(record.tobytes(), self.taken(flow))

    def push(self, flow: Flow) -> None:
        """Make steps, as many as there is room for, or fewer."""
        room = min(flow.total, flow.told + len(flow.table)) - len(flow.steps)
        for _ in range(room if flow.total > 20 else self.rng.randrange(room + 1)):
            self.add_step(flow)

    def add_step(self, flow: Flow) -> None:
        rng, number = self.rng, len(flow.steps)
        cell, serial = self.free_cells.pop(), self.number
        self.number += 1
        at = self.cells.ctypes.data + 8 * cell if flow.copies else 0
        waits = rng.random() < 0.2 and flow.total <= 20  # of a flood all may begin at once
        event = self.events.ctypes.data + 8 * cell if waits else 0
        step = Step(flow, number, cell, serial, at, event)
        self.cells[cell] = self.shadow[cell] = flow.copies
        self.by_cell[cell], self.serials[serial] = step, step
        record = flow.table[number % len(flow.table)]
        record[:] = 0
        if rng.random() < 0.06 and flow.total <= 20:
            step.until = self.now + rng.randrange(50_000_000)
            flow.soonest = min(flow.soonest, step.until)
        record[r.LANE], record[r.BYTES], record[r.UNTIL], record[r.LOCK] = flow.lane, 100, step.until, -1
        if step.event:
            word(step.event).value = rng.choice((0, 0, NOT_READY))
            self.unfired.append(cell)
            record[r.EVENTS], record[r.EVENT_COUNT] = step.handles.ctypes.data, 1
        if flow.copies:
            record[r.BLANKS], record[r.BLANK_COUNT] = self.blanks[cell].ctypes.data, 1
        if flow.way:
            lengths = [rng.choice((0, 1, 50, 100, 300, 999, 2500)) for _ in range(rng.choice((1, 1, 2, 4)))]
            lengths[-1] = lengths[-1] or 70
            near = np.array([((serial << SERIAL_BITS) + (n << 12), nbytes) for n, nbytes in enumerate(lengths)])
            step.pieces = near, near + np.array((FAR, 0))
            step.todo.extend([at, nbytes] for at, nbytes in near.tolist() if nbytes)
            step.lengths = {at: nbytes for at, nbytes in step.todo}  # noqa: C416 - they are lists
            step.first = step.todo[0][0], min(step.todo[0][1], FLUSH_BYTES)
            here, there = (side.ctypes.data for side in step.pieces)
            peer = ctypes.addressof(self.names[flow.peer])
            record[r.POST : r.OF_FLOW] = (
                *(flow.way, peer, 0, *NEAR_SIDE, here, *FAR_SIDE, there, len(near)),
                *(flow.most_pieces, flow.most_bytes, flow.stays),
            )
        flow.steps.append(step)

    def progress(self, flow: Flow) -> tuple[int, ...]:
        return len(flow.steps), flow.allowed, flow.total, self.rng.choice((0, 1_000_000, 25_000_000))

    def taken(self, flow: Flow) -> Any:
        """What a record about a flow says, as it is taken."""
        said, heard = (len(flow.steps), flow.allowed, flow.total, flow.until), flow.heard

        def take() -> None:
            flow.said, flow.peer_steps = said, max(flow.peer_steps, heard)

        return take

    def send_on(self, flow: Flow) -> None:
        if not flow.unwanted:
            record = np.zeros(r.RECORD_WORDS, np.int64)
            record[:2], record[r.UNTIL], record[r.HEARD] = (r.ON, flow.slot), flow.until, flow.heard
            record[r.KNOWN : r.QUIET + 1] = self.progress(flow)
            self.send(record.tobytes(), self.taken(flow))

    def any_flow(self) -> Any:
        return self.rng.choice(list(self.slots.values())) if self.slots else None

    def extend(self) -> None:
        """Let a flow go on, or no further than it may; its lease changes."""
        rng, flow = self.rng, self.any_flow()
        if flow is None or flow.unwanted:
            return
        self.push(flow)
        flow.allowed = min(flow.total, flow.allowed + rng.randrange(6))
        if rng.random() < 0.02 and flow.allowed >= max(1, len(flow.steps)):
            flow.total = flow.allowed
        if rng.random() < 0.1:
            flow.until = self.now + rng.randrange(100_000_000)
        if flow.places and rng.random() < (0.3 if flow.token else 1):
            flow.heard = max(flow.heard, self.honest(flow))
        self.send_on(flow)

    def honest(self, flow: Flow) -> int:
        """How many steps the peer may have done."""
        return self.rng.randint(0, flow.passed() if flow.lane == 0 else min(flow.total, flow.passed() + flow.places))

    def cancel(self) -> None:
        flow = self.any_flow()
        slot = flow.slot if flow and self.rng.random() < 0.9 else self.rng.choice((-1, r.JOBS, 1 << 40, self.free[0]))
        if slot in self.slots:
            self.stop(self.slots[slot])
        else:
            self.send(words(r.CANCEL, slot))

    def stop(self, flow: Flow) -> None:
        flow.unwanted = True
        self.send(words(r.CANCEL, flow.slot), lambda: flow.reasons.add("cancelled"))

    def prevent(self) -> None:
        """See to it that nothing begins, whenever the cancel is heard."""
        flow = self.any_flow()
        if flow is not None:
            self.stop(flow)
            self.deaf = self.rng.choice((0, self.rng.randrange(30)))
            fed = int(self.rows[flow.slot, r.NEXT]) if flow.said[3] else 0
            assert not self.machine.may_go_on(flow.slot)
            flow.prevented = min(flow.prevented, fed)

    def mistake(self) -> None:
        """Somebody asks of a row that is another's by now."""
        waiting = np.flatnonzero(self.rows[r.JOBS :, r.STATE] == r.WAITING)
        if len(waiting):
            row = self.rows[r.JOBS + self.rng.choice(waiting.tolist())]
            assert self.machine.posts.prevent_start(row.ctypes.data, int(row[r.OF_FLOW]) + 1)

    def forget(self) -> None:
        """Nobody asks any more for what the loop believes to be in doubt."""
        found = [(slot, step) for flow in self.doubtful for slot, step in flow.lefts.items()]
        late = [(slot, step) for slot, step in found if self.left.get(slot) is not step]
        if late or (found and self.rng.random() < 0.2):
            self.ask_no_more(*self.rng.choice(late or found))

    def ask_no_more(self, slot: int, step: Step) -> None:
        def take() -> None:
            step.forgotten = self.left.get(slot) is step

        self.send(words(r.FORGET, slot, step.finished), take)

    # --- what happens outside

    def go(self) -> None:
        """Parts end."""
        for _ in range(self.rng.choice((1, 3, 12))):
            self.end_part(0, 0)

    def fail(self) -> None:
        self.end_part(-5, PEER_IS_GONE if self.rng.random() < 0.4 else 0)

    def end_part(self, status: int, cause: int) -> None:
        if not self.moving:
            return
        at = self.rng.randrange(len(self.moving))
        part = self.moving[at]
        if part.step.flow.peer in self.silent and not part.given_back and not status:
            return
        if part.step.told and self.rng.random() < 0.2:
            status = -5
        self.moving[at] = self.moving[-1]
        self.moving.pop()
        if not part.given_back:
            word(part.request).value, word(part.request + 8).value = cause, status

    def still(self) -> None:
        """A peer stands still, or goes on."""
        self.silent ^= {self.rng.randrange(PEERS)}

    def fire(self) -> None:
        """Events happen, or say that the device is broken."""
        for cell in self.unfired[:8]:
            if self.events[cell] == NOT_READY:
                self.events[cell] = 0 if self.rng.random() < 0.98 else FAULT
                if self.events[cell] == FAULT and cell in self.by_cell:
                    self.by_cell[cell].flow.faulty = True
        del self.unfired[:8]

    def wait_long(self) -> None:
        self.now += self.rng.choice((5_000_000, 11_000_000, 11_000_000, 3_000_000_000))

    def claim_agent(self) -> None:
        """Somebody else calls the agent for a while."""
        if not self.claim:
            self.claim = self.rng.randrange(1, 20)
            self.claimed = self.acquire()
            assert self.claimed, "the machine is out of the agent between its steps"

    def acquire(self) -> bool:
        return self.machine.posts.acquire_agent(self.state.ctypes.data)

    def rebuild(self) -> None:
        """Go on replacing the agent."""
        if self.stage == "":
            self.stage = "halted"
            if self.rng.random() < 0.8:
                self.send(words(r.HALT), partial(setattr, self, "halted", True))
        elif self.stage == "halted":
            self.stage = "catching"
            self.send(words(r.CATCH), partial(setattr, self, "catching", True))
        elif self.stage == "caught":  # it ends, or goes on, or there is none for a while
            anew, none = self.rng.random() < 0.7, self.rng.random() < 0.1
            agent, self.stage = 0 if none else next(self.agents), "caught" if none else ""
            self.send(words(r.AGENT, agent, agent + 1, anew), partial(self.on_agent, agent, anew))

    def on_agent(self, agent: int, anew: bool) -> None:
        self.halted, self.agent = False, agent
        self.epoch += anew
        for step in self.open if anew else ():
            if step.loose and not step.flow.stays and not step.forgotten:
                step.loose, step.severed, step.far = False, True, step.flow.way == r.WRITES

    def hold(self) -> None:
        self.state[r.HELD] = self.rng.randrange(2)
        self.send(words(r.POKE))

    def suffer(self, what: str, most: int) -> None:
        """For so many steps at most, there is no room for news, or nobody reads them, or no record comes."""
        setattr(self, what, self.rng.randrange(most))

    def notify_us(self) -> None:
        """A peer, or somebody else, says how far it is, or anything else."""
        rng, flow = self.rng, self.any_flow()
        if flow is None or not flow.places:
            return
        peer, lane, token, nbytes = flow.peer, 1 - flow.lane, flow.token, r.NOTE_BYTES
        count = self.honest(flow) if rng.random() < 0.7 else rng.choice((-5, flow.total + 9, 1 << 61))
        # the wrong name, direction, either word of the token, or size, or as it should be
        what = rng.randrange(20) if token else 5
        text = np.array([token + (what == 2), flow.other + (what == 3), 2 * (flow.base + count) + lane ^ (what == 1)])
        peer = (peer + rng.choice((1, PEERS - 1)) * (what == 0)) % PEERS
        nbytes = rng.choice((0, 8, nbytes - 1, nbytes + 1, 2 * nbytes)) if what == 4 else nbytes
        times = (1, 1, 2, 1030 if rng.random() < 0.02 else 3)[rng.randrange(4)]
        self.mail.setdefault(peer, []).extend([(text, nbytes, flow if token and what > 4 else None, count)] * times)

    # --- a step

    def step(self) -> int:
        self.now += 1
        held_back = []
        if self.stage and self.rng.random() < 0.15:
            self.rebuild()
        if self.deaf:
            self.deaf -= 1
            held_back, self.sent = self.sent, held_back
        elif len(self.sent) > 100:
            held_back, self.sent = self.sent[100:], self.sent[:100]
        if self.delay >= 0 or self.sent:
            self.delay = super().step()
            if self.delay < 0:
                self.judge_sleep()
            assert self.delay <= 0 or self.flows or not self.state[r.EAGER], "it waits for steps, and there is no flow"
            listens = any(flow.token and flow.said[3] for flow in self.flows.values())
            assert listens or not self.state[r.LISTENING], "it listens, and no flow takes turns"
        else:
            self.steps += 1  # it sleeps
        self.sent = held_back + self.sent
        self.full -= self.full > 0
        if self.claim:
            self.claimed = self.acquire()
            assert self.claimed, "the machine is out of the agent between its steps"
            self.claim -= 1
            if not self.claim:
                self.machine.posts.release_agent(self.state.ctypes.data)
                self.claimed = False
        for _ in range(self.rng.random() < 0.2 if self.late else len(self.heard)):
            self.read()
        self.late -= self.late > 0
        return self.delay

    def before(self) -> None:
        if not self.claim:
            self.lived += min(self.now - self.stepped, 1_000_000_000, PATIENCE // 4)
        self.stepped, self.turned = self.now, self.turns
        self.note_reasons()
        self.reachable = bool(self.agent) and not self.claim and not self.catching
        if self.agent:
            word(self.agent + 8).value = not self.claimed

    def note_reasons(self) -> None:
        """Why no step of a flow begins any more."""
        for flow in self.flows.values():
            if self.now >= min(flow.said[3] or FOREVER, flow.soonest):
                flow.reasons.add("lease")
            if flow.gate >= 0 and flow.generation != generation(self.file, flow.gate):
                flow.reasons.add("revoked")

    def after(self) -> None:
        if self.broken:
            raise self.broken[0]
        self.look_at_copies()
        assert not self.agent_words[:, 2].any(), "an agent was asked that may not be called"
        assert self.state[r.BROKEN] == self.ailing, "not the first cause is kept for which it makes no progress"
        before, least, most = self.strange
        counted = int(self.state[r.STRANGE])
        assert least <= counted - before <= most, f"{counted - before} notifications are strange, not {least} to {most}"
        self.strange = [counted, 0, 0]
        self.bounds = [[0, 0] for _ in range(GATES)]
        waits = set()
        for step in list(self.open):
            flow, must = step.flow, step.in_doubt()
            goes_on = bool(step.todo) and not flow.reasons & {"cancelled"} and step.verdict == r.DONE and not step.told
            if flow.gate >= 0:
                self.bounds[flow.gate][0] += must
                self.bounds[flow.gate][1] += must or goes_on
            if not must and not goes_on:
                del self.open[step]
            elif must and not step.told:
                waits.add(flow)
                step.silent = max(step.silent, self.lived - step.lively) if step.flying else step.silent
                if step.flying and self.reachable and not self.full:
                    assert step.silent < PATIENCE, f"{step} is silent, and not given up"
        self.reachable = self.reachable and not self.claim
        for flow in self.flows.values():
            fed = int(self.rows[flow.slot, r.NEXT]) if flow.said[3] else 0
            for step in flow.steps[flow.fed : fed]:
                step.since = self.turned
            self.given += fed - flow.fed
            flow.fed = fed
        self.judge_rest(waits)
        if not self.steps % 16:
            self.judge_rows()

    def judge_rest(self, waits: set[Flow]) -> None:
        """Nothing is forgotten: not by a machine that sleeps either."""
        steps = self.rows[r.JOBS :]
        used = steps[:, r.STATE] != r.FREE
        free, given, held = self.spare, self.given, self.held
        self.spare, self.given = r.STEPS - int(np.count_nonzero(used)), 0
        self.held = np.bincount(steps[used & (steps[:, r.POST] != 0), r.PEER_NUMBER], minlength=r.MOST_OWNERS)
        if self.full:
            return
        short: list[tuple[Flow, int]] = []
        for flow in self.flows.values():
            fed, could = flow.fed, flow.could
            flow.could = min(flow.limit(), flow.passed() + flow.width)
            assert fed <= flow.could, f"{fed} steps of {flow} have a row, and only {flow.could} may"
            if fed < could and not (flow.steps[fed].event or flow.stands()):
                short.append((flow, could))
            if "cancelled" in flow.reasons:
                assert flow in waits, f"{flow} was cancelled, has nothing under way, and its end is not told"
            elif flow.token and self.reachable and flow.prevented == FOREVER:
                owes = flow.lane == 0 or flow.passed() < flow.said[2]
                assert not owes or flow.notified == flow.passed(), f"the peer of {flow} was not told of all its steps"
        for flow, could in short:
            spare = free - given - (r.KEPT if flow.way else 0)  # at least, as that was looked at
            most = held[10 + flow.peer] + given
            room = spare > 0 and not (flow.way and most >= r.GREED * spare)
            assert not room, f"only {flow.fed} steps of {flow} have a row, and {could} may"

    def judge_sleep(self) -> None:
        """It does nothing before a record comes, and none has to."""
        assert not self.catching, "it sleeps, and does not say that all is caught"
        assert not any(step.flying for step in self.open), "it sleeps, and parts are under way"
        for flow in self.flows.values():
            could = min(flow.limit(), flow.passed() + flow.width) if flow.said[3] else 0
            assert self.rows[flow.slot, r.NEXT] >= could or flow.stands(), f"it sleeps, and steps of {flow} may begin"

    def judge_rows(self) -> None:
        """Rows of posts are counted by peer, and shared."""
        steps = self.rows[r.JOBS :]
        used = (steps[:, r.STATE] != r.FREE) & (steps[:, r.POST] != 0)
        counts = np.bincount(steps[used, r.PEER_NUMBER], minlength=r.MOST_OWNERS)
        np.testing.assert_array_equal(self.state[r.POSTED : r.POSTED + r.MOST_OWNERS], counts)
        assert counts.sum() <= r.STEPS - r.KEPT
        assert counts.max() <= (r.STEPS - r.KEPT) * r.GREED // (r.GREED + 1) + 1

    def inside(self, number):
        counted, (least, most) = int(self.key._inside[number]), self.bounds[number]
        assert least <= counted <= most, f"gate {number} counts {counted}, not {least} to {most}"
        return counted

    # --- what begins

    def may_begin(self, step: Step, what: str = "is posted") -> None:
        """Whether something of a step may begin now."""
        flow = step.flow
        assert self.flows.get(flow.slot) is flow, f"{step} {what}, and its flow has ended"
        assert "cancelled" not in flow.reasons, f"{step} {what} after its cancel was taken"
        assert self.now < min(step.until, flow.said[3]), f"{step} {what} after its lease"
        assert step.number < flow.limit(), f"{step} {what}, and only {flow.limit()} may"
        assert step.number < flow.passed() + flow.width, f"{step} {what} behind {flow.passed()}"
        assert not step.event or word(step.event).value == 0, f"{step} {what} before its event"
        begun = what == "is posted" and step.number < flow.prevented
        assert begun or flow.prevented == FOREVER, f"{step} {what}, which was prevented"
        if flow.gate >= 0 and (what == "is posted" or not flow.way):
            assert generation(self.file, flow.gate) == flow.generation, f"{step} {what} after it was revoked"

    def look_at_copies(self) -> None:
        """What was copied in this step might be."""
        for cell in np.flatnonzero(self.cells != self.shadow).tolist():
            self.may_begin(self.by_cell[cell], "is copied")
            self.shadow[cell] = self.cells[cell]

    # --- what the machine calls

    def called(self, function: Any, *arguments: int) -> int:
        try:
            return function(*arguments) or 0
        except BaseException as error:  # noqa: BLE001 - nobody is above a C function
            self.broken.append(error)
            return -1

    def enter(self, agent: int) -> None:
        """The agent is called."""
        assert agent == self.agent != 0, "an agent is called that there is not"
        assert not self.claimed, "an agent is called that somebody else calls"
        if self.rng.random() < 0.002 and not self.claim:
            assert not self.acquire(), "somebody else may call the agent, and the machine does"
            self.claim = 3

    def write(self, descriptor: int, address: int, nbytes: int) -> int:
        if self.full and self.rng.random() < 0.9:
            return -1
        event = _EVENT.unpack(ctypes.string_at(address, nbytes))
        self.heard.append((*event[:2], self.hear(*event)))
        return nbytes

    def create_list(self, kind: int, out: int) -> int:
        for _, near in self.lists.values():  # so it is known of which step this is the far one
            if failed := self.spoil(self.serials[near[0][0] >> SERIAL_BITS]):
                return failed
        self.number += 1
        self.lists[self.number] = kind, []
        word(out).value = self.number
        return 0

    def add_piece(self, made: int, address: int, nbytes: int, device: int) -> int:
        kind, pieces = self.lists[made]
        step = self.serials[address % FAR >> SERIAL_BITS]
        if kind == NEAR_SIDE[0] and not pieces:
            self.serve(step)
        pieces.append((address, nbytes, device))
        return self.spoil(step)

    def serve(self, step: Step) -> None:
        """It is its turn: of those that have parts that of the peer who had none for longest, and so of its posts."""
        turn = self.served[step.flow.peer], step.served or min(step.since, self.turned)
        for other in self.open:
            if other.served and other.has_parts():
                behind = self.served[other.flow.peer], other.served if other.flow.peer == step.flow.peer else FOREVER
                assert turn <= behind, f"{step} has its turn before {other}"
        self.turns += 1
        self.served[step.flow.peer] = step.served = self.turns
        step.began = self.now

    def spoil(self, step: Step) -> int:
        """A call may fail for it, whereby nothing is under way."""
        if not step.flow.unlucky or self.rng.random() > 0.02:
            return 0
        step.tried = step.verdict == r.IN_DOUBT
        step.worsen(r.FAILED, -3)
        return -3

    def destroy_list(self, made: int) -> None:
        del self.lists[made]

    def make(self, agent: int, way: int, near: int, far: int, peer: int, out: int, options: int) -> int:
        self.enter(agent)
        (kind, here), (far_kind, there) = self.lists[near], self.lists[far]
        step = self.serials[here[0][0] >> SERIAL_BITS]
        assert (kind, far_kind, here[0][2]) == (NEAR_SIDE[0], *FAR_SIDE[:1], NEAR_SIDE[1])
        assert [(at + FAR, nbytes, FAR_SIDE[1]) for at, nbytes, _ in here] == there
        assert peer == ctypes.addressof(self.names[step.flow.peer])
        assert way == (step.flow.way == r.WRITES)
        failed = self.spoil(step)
        if not failed:
            request = word(out).value = self.free_requests.pop()
            self.parts[request] = Part(step, [piece[:2] for piece in here], request)
            self.dwell(step.flow, 0.02)
        return failed

    def dwell(self, flow: Flow, share: float) -> None:
        """It takes so long to make a request that by then it may not be begun any more; or to begin it."""
        if self.rng.random() < share:
            self.look_at_copies()
            if flow.gate >= 0 and self.rng.random() < 0.5:
                self.file.revoke(flow.gate)
            else:
                self.now = self.state[r.NOW] = self.now + self.rng.randrange(50_000_000)
            self.note_reasons()

    def begin(self, agent: int, request: int, options: int) -> int:
        self.enter(agent)
        part, rng = self.parts[request], self.rng
        step = part.step
        flow, part.flush = step.flow, step.verdict != r.DONE
        assert not self.halted, f"a part of {step} begins, and nothing may"
        assert not step.told, f"a part of {step} begins, which is in doubt"
        if part.flush:
            assert (step.verdict, step.loose, step.flushed, len(step.flying)) == (r.IN_DOUBT, True, False, 0)
            assert (part.pieces, bool(self.state[r.ORDERLY]), step.unreached) == ([step.first], True, False)
            step.flushed = step.tried = True
        else:
            self.may_begin(step)
            assert not step.cell or word(step.cell).value == 0, f"{step} is posted before it is copied"
            assert len(step.flying) < r.MOST_PARTS
            assert len(part.pieces) <= flow.most_pieces
            assert sum(nbytes for _, nbytes in part.pieces) <= flow.most_bytes
            if flow.gate >= 0:
                assert self.file.revoke(flow.gate) is None, f"{step} begins without its lock"
            self.open[step] = None
            step.lively, step.silent = self.lived, 0
            self.dwell(flow, 0.1 * flow.unlucky)
            step.posting += self.now - step.began
        if flow.unlucky and rng.random() < 0.3:
            gone = rng.random() < 0.4
            word(request).value = PEER_IS_GONE if gone else 0
            if rng.random() < 0.3:
                step.worsen(r.FAILED, REFUSED - 1, gone=gone)
                step.lost = self.epoch if gone else step.lost
                return REFUSED - 1
            self.doubt(step, -7, gone=gone)
            return -7
        if not part.flush:
            self.cut(step, part.pieces)
            step.posted = step.posted or step.began
        part.begun = True
        step.flying.add(part)
        word(request).value, word(request + 8).value = 0, IN_PROGRESS
        self.moving.append(part)
        return IN_PROGRESS

    def cut(self, step: Step, pieces: list[tuple[int, int]]) -> None:
        """The next part has these: pieces stay whole that may, and no part ends before it has to."""
        most, total = step.flow.most_bytes, 0
        for at, nbytes in pieces:
            expected = step.todo[0]
            assert at == expected[0], f"{step} is posted out of its order"
            assert nbytes <= expected[1]
            assert nbytes == expected[1] or step.lengths.get(at, FOREVER) > most, f"a piece of {step} is cut"
            total += nbytes
            expected[:] = at + nbytes, expected[1] - nbytes
            if not expected[1]:
                step.todo.popleft()
        if step.todo and len(pieces) < step.flow.most_pieces and total < most:
            at, nbytes = step.todo[0]
            assert at in step.lengths
            assert nbytes <= most < total + nbytes, f"a part of {step} ends before it has to"

    def doubt(self, step: Step, code: int, *, gone: bool) -> None:
        """Something of a step may be under way that nobody looks at."""
        step.worsen(r.IN_DOUBT, code, gone=gone)
        step.unreached = gone
        if gone:
            step.lost, step.far = self.epoch, step.far or step.flow.way == r.WRITES
        else:
            step.loose = True

    def release(self, agent: int, request: int) -> int:
        self.enter(agent)
        part, status = self.parts.pop(request), word(request + 8).value
        step, part.given_back = part.step, True
        step.flow.faulty |= not part.begun
        if part.begun:
            step.flying.remove(part)
            unseen = self.catching and not step.told and step.silent >= PATIENCE  # given up, and nobody looks any more
            if status == IN_PROGRESS or unseen:
                silent = self.lived - step.lively >= PATIENCE
                assert self.catching or silent or step.forgotten or step.told, f"{step} is given up, and was not silent"
                step.loose, step.cut = True, step.cut or self.catching
                step.worsen(r.IN_DOUBT, r.SILENT if silent or unseen else r.CUT_OFF)
            elif status < 0:
                self.doubt(step, status, gone=word(request).value == PEER_IS_GONE and not step.told)
            elif part.flush:  # all that came before it has ended
                step.loose = step.far = False
                step.verdict = step.verdict if step.told else r.FAILED
            step.lively = step.lively if step.told or status else self.lived
        word(request + 8).value = DEAD
        if self.rng.random() < 0.02:  # the agent keeps it
            return -1
        self.released.add(request)
        return 0

    def destroy(self, request: int) -> None:
        self.released.remove(request)
        self.free_requests.append(request)

    def notify(self, agent: int, peer: int, message: int, nbytes: int, options: int) -> int:
        self.enter(agent)
        token, other, said = (word(message + 8 * n).value for n in range(3))
        flow = self.tokens[token]
        count = (said >> 1) - flow.base
        assert (other, said & 1, nbytes) == (~token, flow.lane, r.NOTE_BYTES)
        assert peer == ctypes.addressof(self.names[flow.peer])
        assert flow.notified < count <= flow.passed(), f"the peer of {flow} is told of {count} steps"
        flow.notified = count
        return self.rng.choice((0, 0, 0, -4))

    def notices(self, agent: int, notices: int, options: int) -> int:
        self.enter(agent)
        assert notices == agent + 1
        assert not self.inbox, "notifications were not forgotten"
        self.room = r.JOBS
        if self.rng.random() < 0.01:  # no progress: nothing has come
            self.notes = 0
            failed = self.rng.choice((-2, -3))
            self.ailing = self.ailing or failed
            return failed
        self.inbox = {ctypes.addressof(self.names[peer]): said for peer, said in self.mail.items()}
        self.mail, self.notes = {}, 0
        return 0

    def forget_notices(self, notices: int) -> None:
        self.inbox = {}

    def notice_agents(self, notices: int, out: int) -> None:
        word(out).value = len(self.inbox)

    def notice_agent(self, notices: int, number: int, out: int) -> None:
        word(out).value = list(self.inbox)[number]

    def notice_count(self, notices: int, agent: int, out: int) -> int:
        count = word(out).value = len(self.inbox[agent])
        if self.rng.random() < 0.98:
            self.note_strange(max(0, count - self.room))
            self.room = max(0, self.room - count)
            return 0
        self.inbox[agent] = []  # it is not found: what is said of how many there are is nothing
        self.note_strange(1)
        return -1

    def note_strange(self, least: int, most: int = 0) -> None:
        """So many notifications are of no use to anybody."""
        self.strange[1] += least
        self.strange[2] += max(least, most)

    def notice(self, notices: int, agent: int, number: int, out: int, nbytes_out: int) -> int:
        text, nbytes, flow, count = self.inbox[agent][number]
        self.notes += 1
        assert self.notes <= r.JOBS, "more notifications are read at once than there can be flows"
        word(out).value, word(nbytes_out).value = text.ctypes.data, nbytes
        if self.rng.random() < 0.02:
            self.note_strange(1)
            return -1
        if flow is None or not flow.said[3] or self.flows.get(flow.slot) is not flow:  # it does not know it (yet)
            self.note_strange(1)
            return 0
        self.note_strange(0, flow.stands() or flow.passed() >= flow.said[2])  # its end may be due
        flow.peer_steps = max(flow.peer_steps, count)
        return 0

    # --- what it says

    def hear(self, slot, flags, code, started, copied, posted, finished, posting) -> Any:
        """Whether that may be said, as it is written; of what it is said."""
        if slot == r.NOBODY:
            assert self.catching
            assert not self.parts, "all is caught, and something was not given back"
            if self.agent:
                word(self.agent + 8).value = 0
            self.catching, self.agent = False, 0
            for step in self.open:
                step.cut |= step.loose
            return None
        if slot < r.JOBS:
            self.look_at_copies()
            flow = self.flows[slot]  # else it was told twice, or of nobody
            self.on_flow(flow, flags, code, posted, posting)
            return flow
        if flags & r.OUTCOMES == r.IN_DOUBT:
            step = self.flows[started].steps[self.rows[slot, r.STEP]]
            assert slot not in self.left
            assert not step.told
        else:
            step = self.left.pop(slot)
        self.on_step(step, flags, code)
        if flags & r.IS_LEFT:
            self.left[slot] = step
        assert (posted, posting) == (step.posted, step.posting)
        step.finished = finished
        return step

    def on_flow(self, flow: Flow, flags: int, code: int, posted: int, posting: int) -> None:
        """More steps are done, or it has ended."""
        outcome, count, gone = flags & r.OUTCOMES, flags // r.COUNTED, bool(flags & r.IS_GONE)
        before, flow.news = flow.news, count
        assert before + (outcome == r.PASSING) <= count <= flow.passed(), f"{flow} says {count} steps"
        if outcome == r.PASSING:
            return
        del self.flows[flow.slot]
        self.given += int(self.rows[flow.slot, r.NEXT]) - flow.fed
        self.tokens.pop(flow.token, None)
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        assert count == flow.passed(), f"{flow} ends with {count} steps, and has done more"
        worst = max((step.verdict for step in flow.steps), default=r.DONE)
        for step in flow.steps:
            assert step.told or not step.in_doubt(), f"{flow} ends, and {step} may be under way"
            assert step.told == (step.verdict == r.IN_DOUBT), f"{flow} ends, and {step} was not told of"
        if outcome == r.DONE:
            assert count == flow.said[2], f"{flow} is done with {count} steps"
        elif worst < r.FAILED and outcome == r.FAILED:
            assert code == FAULT
            assert any(step.event and word(step.event).value == FAULT for step in flow.steps)
        else:
            assert outcome == max(worst, r.STOPPED), f"{flow} ended as {outcome}, not as {worst}"
            assert outcome != r.STOPPED or flow.reasons, f"{flow} was stopped for nothing"
            assert count < flow.said[2]
        assert bool(flags & r.IS_LINGERING) == flow.lingers
        times = [step.posted for step in flow.steps if step.posted] or [0]
        assert posted in times
        assert posting == sum(step.posting for step in flow.steps if step.posted)
        if outcome == r.IN_DOUBT:
            was_gone, was = flow.worst
            assert (gone, code) == (was_gone, r.CUT_OFF if was_gone and flow.epoch < self.epoch else was)
        elif outcome == r.FAILED and code != FAULT:
            found = {(step.gone, r.CUT_OFF if step.lost in range(self.epoch) else step.code) for step in flow.steps}
            assert (gone, code) in found, f"{flow} failed with {code} of a peer that is gone: {gone}, not {found}"

    def on_step(self, step: Step, flags: int, code: int) -> None:
        """A step ended in doubt, or more is known of that."""
        outcome, lingers, gone = flags & r.OUTCOMES, step.loose or bool(step.flying), bool(flags & r.IS_GONE)
        stays = outcome != r.OVER and (lingers or (step.flow.gate >= 0 and step.in_doubt()))
        assert bool(flags & r.IS_LEFT) == stays, f"{step} is left: {not stays}"
        if outcome == r.SEVERED:
            assert step.severed
            assert not lingers
            return
        if outcome == r.OVER:
            assert step.forgotten or not step.in_doubt(), f"{step} is over, and may land"
            assert not code or not lingers
            self.open.pop(step, None)
            step.loose = step.far = False
            return
        assert outcome == r.IN_DOUBT
        assert bool(flags & r.IS_LINGERING) == lingers, f"{step} lingers: {lingers}"
        silent = max(step.silent, self.lived - step.lively) >= PATIENCE
        if step.severed or (gone and step.lost < self.epoch):  # it is not the peer of this agent that is gone
            assert (gone, code) == (True, r.CUT_OFF)
        elif code == r.SILENT or step.flying:
            assert silent, f"{step} is given up, and was not silent"
            assert (gone, code) == ((step.gone, step.code) if step.verdict == r.IN_DOUBT else (False, r.SILENT))
        else:
            assert (gone, code) == (step.gone, step.code)
        flow = step.flow
        if flow.worst is None:
            flow.worst, flow.epoch = (gone, code), self.epoch
        flow.lingers |= lingers
        asks = self.state[r.ORDERLY] and step.loose and step.lost < 0 and not step.cut and not silent
        assert step.tried or not asks, f"nothing of {step} was moved once more"
        step.worsen(r.IN_DOUBT, code, gone=gone)
        step.told = True

    def read(self) -> None:
        """What the loop does with the oldest event, if there is one."""
        if not self.heard:
            return
        slot, flags, what = self.heard.popleft()
        if slot == r.NOBODY:
            self.stage = "caught"
            return
        flow = what if slot < r.JOBS else what.flow
        if slot < r.JOBS:
            flow.told, flow.ended = flags // r.COUNTED, flags & r.OUTCOMES != r.PASSING
            if flow.ended:
                del self.slots[slot]
                self.free.append(slot)
        elif flags & r.IS_LEFT:
            flow.lefts[slot] = what
        else:
            flow.lefts.pop(slot, None)
        if flow.ended:
            self.leave(flow)

    def leave(self, flow: Flow) -> None:
        """It has ended; its memory is kept while something of it is in doubt."""
        self.doubtful[flow] = None
        if not flow.lefts:
            del self.doubtful[flow]
            if flow.gate >= 0:
                self.key.give_back()
            for step in flow.steps:
                del self.serials[step.serial], self.by_cell[step.index]
                self.free_cells.append(step.index)

    # --- the end

    def drain(self) -> None:
        self.silent.clear()
        asked: set[Any] = set()
        for _ in range(6000):
            if not self.slots and not self.doubtful and not self.sent and not self.stage:
                break
            if self.stage:
                self.rebuild()
            for flow in self.slots.values():
                while not flow.unwanted and len(flow.steps) < min(flow.total, flow.told + len(flow.table)):
                    self.add_step(flow)
                flow.allowed = flow.total
                flow.heard = flow.passed() + (flow.places if flow.lane else 0)
                if (state := (flow, len(flow.steps), flow.heard)) not in asked:
                    asked.add(state)
                    self.send_on(flow)
            for slot, step in [found for flow in self.doubtful for found in flow.lefts.items()]:
                if (slot, step.finished) not in asked:
                    asked.add((slot, step.finished))
                    self.ask_no_more(slot, step)
            for _ in range(100):
                self.end_part(0, 0)
                self.fire()
            self.now += self.rng.choice((0, 0, 3_000_000))
            self.step()
        assert not self.slots, f"these never end: {self.slots}"
        assert not self.doubtful, f"of these it is never told that they are over: {self.doubtful}"
        self.state[r.HELD] = 0
        self.send(words(r.POKE))
        while self.claim or self.sent:
            self.step()
        assert self.delay == -1
        kept = self.left, self.heard, self.lists, self.parts, self.released
        assert not any(kept), f"rows, events, lists, or requests were not given back: {kept}"
        for name in COUNTERS.split():
            assert self.state[getattr(r, name)] == 0, name
        assert self.state[r.SPARE_COUNT] == r.STEPS
        self.judge_rows()
        assert not self.key._inside.any()
