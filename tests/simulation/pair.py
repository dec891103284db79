"""One `Sending` and one `Receiving` joined by two queues: a model of both shells around them.

The model plays the two shells: it knows which chunks the sender may still write and which the receiver still reads,
and in which place of staging memory each chunk is until it was scattered. It holds both machines to what their messages
promise about that. Who has the memory (`crowd`) says how much may be granted, and grants it.
"""
# the model knows when there is a sender
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

from collections import deque

import pytest

from kvxfer.errors import Code
from kvxfer.protocol import messages as wire
from kvxfer.protocol.transfer import Failure, ReceiveState, Receiving, Sending, SendState, build_result

TOKEN = b"first token"
CALLER = Failure(wire.Status.CANCELLED, Code.CANCELLED, "the caller cancelled")
THEIRS = Failure(wire.Status.CANCELLED, Code.CANCELLED, "cancelled by the decode rank")
OWNER = Failure(wire.Status.CANCELLED, Code.OFFER_WITHDRAWN, "withdrawn")
GONE = Failure(wire.Status.CANCELLED, Code.PEER_LOST, "the session was lost")
SILENT = Failure(wire.Status.FAILED, Code.PEER_LOST, "no answer")


def chosen(number, options):
    options = sorted(options)
    return options[number % len(options)]


class Pair:
    def begin(self, route, chunks, ahead, sticky, troubles):
        self.route, self.chunks = route, chunks
        staging = route is wire.Route.STAGED and chunks == 1
        self.ahead = ahead and (route is wire.Route.DIRECT or staging)  # the prefill side has a grant for everything
        self.troubles = troubles  # how often somebody gives up
        lease = 1000 if self.ahead else 0
        fetch = wire.Fetch(1, wire.TicketRef("r", 0, b"m"), [], [], 0, 1, [route], 1, 1, lease_ms=lease)
        self.receiver = Receiving(1, ahead=self.ahead, staged_ahead=staging)
        self.sender = None
        self.connected = True
        self.to_sender, self.to_receiver = deque([fetch]), deque()
        self.heard = []  # what this session has said of chunks and of the end
        # the prefill shell
        self.hands = set()  # chunks that it moves (pull: is about to confirm)
        self.zombies = set()  # chunks whose writes may arrive at any later time
        self.moved_chunks = set()
        self.offered = False
        self.lasts = self.payloads = self.told = self.wire_us = 0
        # the decode shell
        self.reads = set()
        self.landed = set()
        self.placed = []
        self.where = {}  # the place that each chunk was granted
        self.sticky = sticky  # one of the first reads does not end
        self.stuck = set()
        self.given_up = False

    # --- work, and what may be due

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
        pull = self.route is wire.Route.PULL
        steps = [
            (sending is SendState.PARKED, self.accept, 1),
            (sending is SendState.PARKED and self.ahead, self.void, 0),
            (sending is SendState.MOVING, self.announce, 1),
            (sending is SendState.MOVING and not self.offered, self.finish_offer, 0),
            (self.hands, self.moved, 1),
            (sending is SendState.MOVING and self.sender.arrived > self.told, self.news, 0),
            (self.to_sender, self.deliver_to_sender, 0),
            (self.to_receiver, self.deliver_to_receiver, 0),
            (self.readable if pull else self.grantable(), self.read if pull else self.grant, 1),
            (self.reads, self.read_ends, 1),
            (self.landed, self.place, 1),
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
            match message:
                case wire.KvAgentResult():
                    assert self.lasts == 0, "a result after the last one"
                    self.lasts += message.last
                    self.payloads += bool(message.payload)
                    self.promised(message)
                case wire.Arrived():
                    assert self.lasts == 0
                    assert self.told < message.chunks <= self.chunks
                    assert set(range(message.chunks)) <= self.moved_chunks
                    self.told = message.chunks
                    self.wire_us += message.timings.wire_us
        if self.connected:
            self.to_receiver.extend(messages)

    def promised(self, message):
        if message.chunk != wire.WHOLE or message.status is wire.Status.IN_DOUBT:
            return
        assert not self.hands
        assert not self.zombies
        if message.status is wire.Status.OK:
            assert self.moved_chunks == set(range(self.chunks))
            assert message.bytes == 64 * self.chunks
            assert self.wire_us + message.timings.wire_us == self.chunks, "the time of each chunk is told once"
        elif self.route is wire.Route.PULL:
            assert not self.reading, "the offer's blocks would be freed while they are read"
            if self.connected and self.receiver.state is ReceiveState.MOVING:
                assert self.receiver.reading == self.receiver.ready
                assert not any(isinstance(frame, wire.Ready) for frame in self.to_receiver)

    # --- the prefill shell

    def live(self):
        return self.sender is not None and self.sender.state is not SendState.ENDED

    def accept(self, number):
        used = self.ahead and number % 4 > 0
        self.say(self.sender.accept(wire.Accept(1, self.route, 1, [], 1, 1, self.chunks, b"", ahead=used)))
        self.ahead = False
        if used:
            self.take(range(self.chunks))

    def void(self):
        """The offer is not there: the grant is not used."""
        self.ahead = False
        self.say([wire.Ready(1, 0)])

    def refuse(self):
        self.troubles -= 1
        self.say(self.sender.refuse(Code.TOO_MANY, "busy"))

    def announce(self, number):
        self.say(self.sender.announce(number % (self.chunks + 1)))

    def finish_offer(self):
        self.offered = True
        self.say(self.sender.finish_offer(TOKEN))

    def moved(self, number):
        """Some chunks have arrived, the first of those in its hands."""
        fresh = sorted(self.hands)[: 1 + number % len(self.hands)]
        self.hands -= set(fresh)
        self.moved_chunks |= set(fresh)
        self.say(self.sender.chunks_arrived(fresh[-1] + 1, 64 * len(fresh), wire.Timings(wire_us=len(fresh))))

    def news(self):
        self.say(self.sender.take_news())

    def dropped(self, which, in_doubt, reason):
        """Of what is in its hands, some chunk and those after it will not arrive."""
        self.troubles -= self.sender.state is SendState.MOVING
        lost = set(sorted(self.hands)[which % len(self.hands) :])
        if reason:
            self.say(self.sender.stop(OWNER))
        self.hands -= lost
        in_doubt = in_doubt and self.route is not wire.Route.PULL  # there, what it holds are confirmations
        if in_doubt:
            self.zombies |= lost
        self.say(self.sender.chunks_dropped(len(lost), in_doubt=in_doubt))

    def stop(self):
        self.troubles -= 1
        self.say(self.sender.stop(OWNER))

    def reader_is_silent(self):
        self.say(self.sender.on_unread(in_doubt=True))

    def deliver_to_sender(self):
        message = self.to_sender.popleft()
        match message:
            case wire.Fetch():
                self.sender = Sending(message)
            case wire.Cancel():
                self.cancelled()
            case wire.Abandon() if self.live():
                self.say(self.sender.stop(THEIRS))
            case wire.Reserve() if self.live():
                self.take(self.sender.on_reserve(message))
            case wire.Read() if self.live():
                self.take(self.sender.on_read(message))

    def take(self, chunks):
        """Chunks come into the prefill shell's hands, to be written where the decode shell expects them."""
        assert not set(chunks) & (self.hands | self.moved_chunks | self.zombies)
        self.hands |= set(chunks)
        if self.route is wire.Route.STAGED:
            for chunk in chunks:
                assert self.sender.places(range(chunk, chunk + 1))[0].address == self.where[chunk]

    def cancelled(self):
        if self.live():
            self.say(self.sender.on_unread())
            self.say(self.sender.stop(THEIRS))
            return
        doubt = self.sender is not None and self.sender.doubts > 0 and self.route is not wire.Route.PULL
        answer = build_result(1, wire.Status.IN_DOUBT if doubt else wire.Status.CANCELLED, last=True, failure=THEIRS)
        self.promised(answer)
        if self.connected:
            self.to_receiver.append(answer)

    # --- the decode shell

    def deliver_to_receiver(self):
        message = self.to_receiver.popleft()
        receiver = self.receiver
        match message:
            case wire.Accept():
                receiver.on_accept(message)
            case wire.Refuse():
                receiver.on_refuse(message)
            case wire.Ready():
                receiver.on_ready(message)
            case wire.Arrived():
                self.heard.append(message)
                self.arrive(receiver.on_arrived(message) or ())
            case wire.KvAgentResult():
                self.heard.append(message)
                self.arrive(receiver.on_result(message) or ())
                if receiver.failure is not None and receiver.state is ReceiveState.MOVING:
                    self.give_up(receiver.failure)

    def arrive(self, chunks):
        assert set(chunks) <= self.moved_chunks
        assert not set(chunks) & (self.landed | set(self.placed))
        self.landed |= set(chunks)

    @property
    def running(self):
        return self.receiver.state is ReceiveState.MOVING and not self.given_up

    @property
    def readable(self):
        """How many more chunks may be read."""
        return self.receiver.ready - self.receiver.reading if self.running else 0

    def read(self, number):
        first = self.receiver.reading
        upto = first + 1 + number % self.readable
        self.receiver.begin_reads(upto)
        self.reads |= set(range(first, upto))
        if self.sticky:
            self.reads.remove(upto - 1)
            self.stuck.add(upto - 1)
        self.sticky = False

    def read_ends(self, number):
        self.reads.remove(chosen(number, self.reads))
        read = min(self.reads | self.stuck, default=self.receiver.reading)
        if self.receiver.state is ReceiveState.MOVING and read > self.receiver.granted:
            self.to_peer(self.receiver.chunks_read(read))
        self.say_unread()

    def place(self, number):
        """A chunk is scattered, in whatever order; it counts when all before it are."""
        chunk = chosen(number, self.landed)
        self.landed.remove(chunk)
        self.placed.append(chunk)
        done = next(count for count in range(self.chunks + 1) if count not in self.placed)
        if done > self.receiver.chunks_done:
            self.receiver.chunks_landed(done)

    def cancel(self):
        self.troubles -= 1
        self.give_up(CALLER)

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
            self.to_peer(self.receiver.reads_ended())

    def peer_is_silent(self):
        self.receiver.on_link_lost(SILENT)

    def lose_the_session(self):
        self.troubles -= 1
        self.connected = False
        self.to_sender.clear()
        self.to_receiver.clear()
        self.heard.clear()
        self.given_up = True
        self.receiver.on_link_lost(GONE)
        if self.live():
            self.say(self.sender.stop(GONE))

    def resume(self):
        self.connected = True
        if self.receiver.state is ReceiveState.LOST:
            self.to_peer(self.receiver.resume(reading=self.reading))

    def a_message_comes_twice(self, which):
        before = self.snapshot()
        message = self.heard[which % len(self.heard)]
        assert not (self.receiver.on_arrived if isinstance(message, wire.Arrived) else self.receiver.on_result)(message)
        assert self.snapshot() == before

    def snapshot(self):
        receiver = self.receiver
        counts = receiver.ready, receiver.reading, receiver.granted, receiver.arrived, receiver.chunks_done
        return receiver.state, receiver.failure, receiver.payload, counts, receiver.ended, receiver.exposed

    # --- what must hold

    def check(self):
        self.memory_is_safe_when_it_is_said_to_be()
        self.success_is_whole()
        self.the_payload_comes_once()

    def memory_is_safe_when_it_is_said_to_be(self):
        if self.receiver.ended:
            assert not self.hands
            assert not self.zombies
        assert not (self.landed | set(self.placed)) & (self.hands | self.zombies)
        taken, receiver = self.hands | self.zombies, self.receiver
        if self.route is not wire.Route.PULL and not receiver.ended:
            assert receiver.exposed or not taken
            assert receiver.ahead or taken <= set(range(receiver.arrived, receiver.granted))
        assert self.sender is None or self.sender.moving == len(self.hands)
        assert self.sender is None or set(range(self.sender.arrived)) == self.moved_chunks
        held = [self.where[chunk] for chunk in self.where if chunk not in self.placed]
        assert len(held) == len(set(held)), "two chunks in one place"

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

    def without_the_stuck_reads(self):
        """The transfer is given up if it was not; then the offer waits for no read, and hears when they have ended."""
        if not self.given_up:
            self.give_up(CALLER)
            self.drain()
        assert self.sender is None or (self.sender.state is SendState.ENDED and self.sender.doubts)
        self.reads, self.stuck = self.stuck, set()
        self.drain()

    def drain(self):
        """Nobody gives up any more: deliver every frame, do all work; then the prefill rank waits no longer."""
        for _ in range(200):
            if self.live() and self.sender.state is SendState.MOVING:
                self.say(self.sender.announce(self.chunks))
            due = [(act, arguments) for act, arguments in self.due() if act not in (self.announce, self.resume)]
            if due:
                act, arguments = due[0]
                act(*[0] * arguments)
            elif self.live() and self.sender.state is SendState.STOPPING and self.sender.being_read:
                self.reader_is_silent()
            else:
                return
        pytest.fail("it goes on for ever")
