"""One `Sending` and one `Receiving` joined by two queues: a model of both shells around them.

The model plays the two shells: it knows which chunks the sender may still write and which the receiver still reads,
and holds both machines to what their messages promise about that.
"""
# the model knows when there is a sender
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

from collections import deque

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvxfer.errors import Code
from kvxfer.protocol.messages import (
    WHOLE,
    Abandon,
    Accept,
    Cancel,
    Fetch,
    Grant,
    KvAgentResult,
    Landed,
    Refuse,
    Reserve,
    Route,
    Status,
    TicketRef,
    Timings,
    Want,
)
from kvxfer.protocol.receiving import ReceiveState, Receiving
from kvxfer.protocol.sending import Failure, Sending, SendState, build_result

TOKEN = b"first token"
CALLER = Failure(Status.CANCELLED, Code.CANCELLED, "the caller cancelled")
THEIRS = Failure(Status.CANCELLED, Code.CANCELLED, "cancelled by the decode rank")
OWNER = Failure(Status.CANCELLED, Code.OFFER_WITHDRAWN, "withdrawn")
GONE = Failure(Status.CANCELLED, Code.PEER_LOST, "the session was lost")
SILENT = Failure(Status.FAILED, Code.PEER_LOST, "no answer")

pick = st.integers(0, 7)


def chosen(number, options):
    options = sorted(options)
    return options[number % len(options)]


class Pair(RuleBasedStateMachine):
    @initialize(
        route=st.sampled_from([Route.STAGED, Route.DIRECT, Route.PULL]),
        chunks=st.integers(1, 3),
        ahead=st.booleans(),
        sticky=st.booleans(),
        troubles=st.integers(0, 3),
        calm=st.integers(0, 30).flatmap(lambda n: st.lists(st.integers(0, 1000), min_size=n, max_size=n)),
    )
    def begin(self, route, chunks, ahead, sticky, troubles, calm):
        self.route, self.chunks = route, chunks
        staging = route is Route.STAGED and chunks == 1
        self.ahead = ahead and (route is Route.DIRECT or staging)  # the prefill side has a grant for everything
        self.troubles = troubles  # how often somebody gives up; it begins calmly, or no schedule would get far
        lease = 1000 if self.ahead else 0
        fetch = Fetch(1, TicketRef("r", 0, b"m"), [], [], 0, 1, [route], 1, 1, lease_ms=lease)
        self.receiver = Receiving(1, ahead=self.ahead, staging=staging)
        self.sender = None
        self.connected = True
        self.to_sender, self.to_receiver = deque([fetch]), deque()
        self.heard = []  # results that this session has delivered
        # the prefill shell
        self.hands = set()  # chunks that it moves (pull: is about to confirm)
        self.zombies = set()  # chunks whose writes may arrive at any later time
        self.moved_chunks = set()
        self.offered = False
        self.lasts = self.payloads = 0
        # the decode shell
        self.reads = set()
        self.landed = set()
        self.placed = []
        self.sticky = sticky  # the first read does not end
        self.stuck = set()
        self.given_up = False
        self.work(calm)

    # --- work, and what may be due

    @rule(numbers=st.lists(st.integers(0, 1000), min_size=1, max_size=8))
    def work(self, numbers):
        """So many steps of whatever is due: long runs of these are what gets a transfer anywhere."""
        for number in numbers:
            due = self.due()
            if not due:
                return
            act, arguments = due[number % len(due)]
            act(*(number // 16 for _ in range(arguments)))
            self.check()

    def due(self):
        """Everything that can happen without anybody giving up, with how many numbers it takes."""
        sending = self.sender.state if self.live() else None
        pull = self.route is Route.PULL
        steps = [
            (sending is SendState.PARKED, self.accept, 1),
            (sending is SendState.PARKED and self.ahead, self.void, 0),
            (sending is SendState.MOVING, self.ready, 1),
            (sending is SendState.MOVING and not self.offered, self.finish_offer, 0),
            (self.hands, self.moved, 1),
            (self.to_sender, self.deliver_to_sender, 0),
            (self.to_receiver, self.deliver_to_receiver, 0),
            (self.can_grant(), self.read if pull else self.grant, 1),
            (self.reads, self.read_ends, 1),
            (self.landed, self.chunk_done, 1),
            (not self.connected, self.resume, 0),
        ]
        return [(act, arguments) for condition, act, arguments in steps if condition]

    # --- the wire

    def to_peer(self, messages):
        if self.connected:
            self.to_sender.extend(messages)

    def say(self, messages):
        """What the sending machine says: held to its promises, whether or not anybody hears it."""
        for message in messages:
            if isinstance(message, KvAgentResult):
                assert self.lasts == 0, "a result after the last one"
                self.lasts += message.last
                self.payloads += bool(message.payload)
                self.promised(message)
        if self.connected:
            self.to_receiver.extend(messages)

    def promised(self, message):
        if message.chunk != WHOLE or message.status is Status.IN_DOUBT:
            return
        assert not self.hands
        assert not self.zombies
        if self.route is Route.PULL and message.status is not Status.OK:
            assert not self.reading, "the offer's blocks would be freed while they are read"
            if self.connected and self.receiver.state is ReceiveState.MOVING:
                assert not self.readable
                assert not any(isinstance(frame, Want) for frame in self.to_receiver)

    @property
    def readable(self):
        return self.receiver_chunks("wanted")

    def receiver_chunks(self, *states):
        return {chunk for chunk, state in enumerate(self.receiver._chunks) if state.value in states}

    # --- the prefill shell

    def live(self):
        return self.sender is not None and self.sender.state is not SendState.ENDED

    def accept(self, number):
        used = self.ahead and number % 4 > 0
        self.say(self.sender.accept(Accept(1, self.route, 1, [], 1, 1, self.chunks, b"", ahead=used)))
        self.ahead = False
        if used:
            self.hands |= set(range(self.chunks))

    def void(self):
        """The offer is not there: the grant is not used."""
        self.ahead = False
        self.say([Want(1, b"")])

    @precondition(lambda self: self.troubles and self.live() and self.sender.state is SendState.PARKED)
    @rule()
    def refuse(self):
        self.troubles -= 1
        self.say(self.sender.refuse(Code.TOO_MANY, "busy"))

    def ready(self, number):
        self.say(self.sender.ready([number % self.chunks, number // 4 % self.chunks]))

    def finish_offer(self):
        self.offered = True
        self.say(self.sender.finish_offer(TOKEN))

    def moved(self, number):
        chunk = chosen(number, self.hands)
        self.hands.remove(chunk)
        self.moved_chunks.add(chunk)
        self.say(self.sender.moved(chunk, 64, Timings()))

    @precondition(lambda self: self.hands and (self.troubles or self.sender.state is SendState.STOPPING))
    @rule(which=pick, in_doubt=st.booleans(), reason=st.booleans())
    def dropped(self, which, in_doubt, reason):
        self.troubles -= self.sender.state is SendState.MOVING
        chunk = chosen(which, self.hands)
        if reason:
            self.say(self.sender.stop(OWNER))
        self.hands.remove(chunk)
        in_doubt = in_doubt and self.route is not Route.PULL  # there, what it holds are confirmations
        if in_doubt:
            self.zombies.add(chunk)
        self.say(self.sender.dropped(chunk, in_doubt=in_doubt))

    @precondition(lambda self: self.troubles and self.live())
    @rule()
    def stop(self):
        self.troubles -= 1
        self.say(self.sender.stop(OWNER))

    @precondition(lambda self: self.live() and self.sender.state is SendState.STOPPING and self.sender.being_read)
    @rule()
    def reader_is_silent(self):
        self.say(self.sender.unread(in_doubt=True))

    def deliver_to_sender(self):
        message = self.to_sender.popleft()
        match message:
            case Fetch():
                self.sender = Sending(message)
            case Cancel():
                self.cancelled()
            case Abandon() if self.live():
                self.say(self.sender.stop(THEIRS))
            case Reserve() if self.live():
                self.hands |= {grant.chunk for grant in self.sender.reserve(message)}
            case Landed() if self.live():
                self.hands |= set(self.sender.landed(message))

    def cancelled(self):
        if self.live():
            self.say(self.sender.unread())
            self.say(self.sender.stop(THEIRS))
            return
        doubt = self.sender is not None and self.sender.in_doubt and self.route is not Route.PULL
        answer = build_result(1, Status.IN_DOUBT if doubt else Status.CANCELLED, last=True, failure=THEIRS)
        self.promised(answer)
        if self.connected:
            self.to_receiver.append(answer)

    # --- the decode shell

    def deliver_to_receiver(self):
        message = self.to_receiver.popleft()
        receiver = self.receiver
        match message:
            case Accept():
                receiver.accept(message)
            case Refuse():
                receiver.refused(message)
            case Want():
                receiver.wanted(message)
            case KvAgentResult():
                self.heard.append(message)
                chunk = receiver.result(message)
                if chunk is not None:
                    assert chunk in self.moved_chunks
                    self.landed.add(chunk)
                if receiver.failure is not None and receiver.state is ReceiveState.MOVING:
                    self.give_up(receiver.failure)

    def can_grant(self):
        return self.receiver.state is ReceiveState.MOVING and not self.given_up and bool(self.readable)

    def grant(self, number):
        chunks = {chosen(number, self.readable), chosen(number // 4, self.readable)}
        self.to_peer(self.receiver.grant([Grant(chunk, 4096, 64) for chunk in sorted(chunks)], 1000))

    def read(self, number):
        chunk = chosen(number, self.readable)
        self.receiver.reading([chunk])
        (self.stuck if self.sticky else self.reads).add(chunk)
        self.sticky = False

    def read_ends(self, number):
        chunk = chosen(number, self.reads)
        self.reads.remove(chunk)
        if self.receiver.state is ReceiveState.MOVING:
            self.to_peer(self.receiver.landed([chunk]))
        self.say_unread()

    def chunk_done(self, number):
        chunk = chosen(number, self.landed)
        self.landed.remove(chunk)
        self.placed.append(chunk)
        self.receiver.chunk_done(chunk)

    @precondition(lambda self: self.troubles)
    @rule()
    def cancel(self):
        self.troubles -= 1
        self.give_up(CALLER)

    @precondition(lambda self: self.receiver.ended or self.receiver.state is ReceiveState.LOST)
    @rule()
    def cancel_too_late(self):
        before = self.snapshot()
        assert self.receiver.cancel(CALLER) == []
        assert self.snapshot() == before

    @property
    def reading(self):
        return bool(self.reads | self.stuck)

    def give_up(self, failure):
        self.given_up = True
        self.to_peer(self.receiver.cancel(failure, reading=self.reading))

    def say_unread(self):
        """A Cancel says that nothing is read any more."""
        if not self.reading:
            self.to_peer(self.receiver.unread())

    @precondition(lambda self: self.receiver.state is ReceiveState.STOPPING)
    @rule()
    def peer_is_silent(self):
        self.receiver.lost(SILENT)

    @precondition(lambda self: self.troubles and self.connected)
    @rule()
    def lose_the_session(self):
        self.troubles -= 1
        self.connected = False
        self.to_sender.clear()
        self.to_receiver.clear()
        self.heard.clear()
        self.given_up = True
        self.receiver.lost(GONE)
        if self.live():
            self.say(self.sender.stop(GONE))

    def resume(self):
        self.connected = True
        if self.receiver.state is ReceiveState.LOST:
            self.to_peer(self.receiver.resume(reading=self.reading))

    @precondition(lambda self: self.heard)
    @rule(which=pick)
    def a_result_comes_twice(self, which):
        before = self.snapshot()
        assert self.receiver.result(self.heard[which % len(self.heard)]) is None
        assert self.snapshot() == before

    def snapshot(self):
        receiver = self.receiver
        return receiver.state, receiver.failure, receiver.payload, list(receiver._chunks), receiver.ended

    # --- what must hold

    @invariant()
    def check(self):
        self.memory_is_safe_when_it_is_said_to_be()
        self.success_is_whole()
        self.the_payload_comes_once()

    def memory_is_safe_when_it_is_said_to_be(self):
        if self.receiver.ended:
            assert not self.hands
            assert not self.zombies
        assert not (self.landed | set(self.placed)) & (self.hands | self.zombies)
        if self.route is not Route.PULL and not self.receiver.ended:
            assert self.receiver.exposed or not (self.hands | self.zombies)
        assert self.sender is None or self.sender.moving == len(self.hands)

    def success_is_whole(self):
        if self.receiver.state is ReceiveState.DONE:
            assert sorted(self.placed) == list(range(self.chunks))
            assert self.moved_chunks == set(self.placed)
            assert self.receiver.payload == TOKEN
            assert self.receiver.failure is None
            assert self.offered
        elif self.receiver.ended:
            assert self.receiver.failure is not None

    def the_payload_comes_once(self):
        assert self.payloads <= 1
        assert self.lasts <= 1
        assert self.receiver.payload in (b"", TOKEN)

    # --- every schedule ends

    def teardown(self):
        if not hasattr(self, "receiver"):
            return
        self.drain()
        if self.stuck:
            self.without_the_stuck_reads()
        if self.receiver.state is ReceiveState.LOST:  # the same incarnation is asked until it knows
            if self.connected:
                self.lose_the_session()
            self.resume()
            self.drain()
        assert self.sender is None or self.sender.state is SendState.ENDED
        if self.receiver.state is ReceiveState.LOST:
            assert self.zombies
            assert self.receiver.failure is not None
        else:
            assert self.receiver.ended
        self.check()

    def without_the_stuck_reads(self):
        """The transfer is given up if it was not; then the offer waits for no read, and hears when they have ended."""
        if not self.given_up:
            self.give_up(CALLER)
            self.drain()
        assert self.sender is None or (self.sender.state is SendState.ENDED and self.sender.in_doubt)
        self.reads, self.stuck = self.stuck, set()
        self.drain()

    def drain(self):
        """Nobody gives up any more: deliver every frame, do all work; then the prefill rank waits no longer."""
        for _ in range(200):
            if self.live() and self.sender.state is SendState.MOVING:
                self.say(self.sender.ready(range(self.chunks)))
            due = [(act, arguments) for act, arguments in self.due() if act not in (self.ready, self.resume)]
            if due:
                act, arguments = due[0]
                act(*[0] * arguments)
            elif self.live() and self.sender.state is SendState.STOPPING and self.sender.being_read:
                self.reader_is_silent()
            else:
                return
        pytest.fail("it goes on for ever")
