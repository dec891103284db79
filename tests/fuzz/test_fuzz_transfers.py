"""The machines of one transfer, each facing a peer that says anything at any time.

The test plays the shell as it is, and holds the machine to what memory depends on: nothing is moved or placed that was
not granted, nothing twice, and what was refused has changed nothing.
"""

from collections import deque
from random import Random

import campaign
from mutation import SPOKEN, VALID, Mutator

from kvxfer.errors import Code, ProtocolError
from kvxfer.protocol.framing import decode, encode
from kvxfer.protocol.messages import (
    MAX_CHUNKS,
    WHOLE,
    Accept,
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
from kvxfer.protocol.packing import pack_u32
from kvxfer.protocol.receiving import ReceiveState, Receiving
from kvxfer.protocol.sending import Failure, Sending, SendState, build_result

FAILURE = Failure(Status.CANCELLED, Code.CANCELLED, "stopped")
ROUTES = [Route.STAGED, Route.DIRECT, Route.PULL, Route.MAPPED]
STEPS = 12


def payloads(messages):
    return [encode(message)[4:] for message in messages]


class Peer:
    """Says messages of some types: near what would be right now, or far from it."""

    def __init__(self, kinds, templates):
        golden = [payload for payload in [*VALID, *SPOKEN] if isinstance(taken(payload), kinds)]
        self.kinds = kinds
        self.mutator = Mutator([*golden, *payloads(templates)])

    def says(self, draw: Random, likely):
        if draw.random() < 0.4:
            return likely
        message = taken(self.mutator.payload(draw))
        return message if isinstance(message, self.kinds) else None


def taken(payload):
    try:
        return decode(payload)
    except ProtocolError:
        return None


DECODE_RANK = Peer(
    (Reserve, Landed),
    [Reserve(1, [Grant(n, 4096, 64) for n in range(count)], 100) for count in range(4)]
    + [Landed(1, pack_u32(range(count))) for count in range(4)],
)


class Sender:
    """The prefill rank's machine and its shell."""

    def __init__(self, draw: Random):
        self.draw = draw
        self.route = draw.choice(ROUTES)
        self.chunks = draw.randrange(5)
        self.machine = Sending(Fetch(1, TicketRef("r", 0, b"m"), [], [], 0, 1, [self.route], 1, 1))
        self.announced, self.hands, self.moved = set(), set(), set()
        self.lasts = 0

    def say(self, messages):
        for message in messages:
            match message:
                case Want(chunks=chunks):
                    news = {int.from_bytes(chunks[at : at + 4], "little") for at in range(0, len(chunks), 4)}
                    assert not news & (self.announced | self.hands | self.moved)
                    self.announced |= news
                case KvAgentResult(chunk=chunk, last=last, status=status):
                    assert self.lasts == 0
                    self.lasts += last
                    if chunk == WHOLE and status is not Status.IN_DOUBT:
                        assert not self.hands
                case Refuse():
                    assert not self.hands
                case _:
                    assert isinstance(message, Accept)

    def accept(self):
        if self.machine.state is SendState.PARKED:
            ahead = self.route is not Route.PULL and self.draw.random() < 0.2
            accept = Accept(1, self.route, 0, [], 1, 1, self.chunks, b"", ahead=ahead)
            self.hands |= set(range(self.chunks)) if ahead else set()
            self.say(self.machine.accept(accept))

    def ready(self):
        if self.chunks and self.machine.state is SendState.MOVING:
            self.say(self.machine.ready(self.draw.choices(range(self.chunks), k=2)))

    def finish(self):
        if self.machine.state is SendState.MOVING:
            self.say(self.machine.finish_offer(b"payload"))

    def report(self):
        if self.hands:
            chunk = self.draw.choice(sorted(self.hands))
            self.hands.discard(chunk)
            self.moved.add(chunk)
            if self.draw.random() < 0.8:
                self.say(self.machine.moved(chunk, 64, Timings()))
            else:
                self.say(self.machine.dropped(chunk, in_doubt=self.draw.random() < 0.5))

    def stop(self):
        self.say(self.machine.stop(FAILURE))

    def unread(self):
        self.say(self.machine.unread(in_doubt=self.draw.random() < 0.5))
        if self.route is Route.PULL:
            self.announced = set()

    def hear(self):
        draw, machine = self.draw, self.machine
        some = (
            draw.choices(sorted(self.announced), k=draw.randrange(3)) if self.announced else []
        )  # one twice, at times
        pull = self.route is Route.PULL
        likely = Landed(1, pack_u32(some)) if pull else Reserve(1, [Grant(n, 4096, 64) for n in some], 100)
        message = DECODE_RANK.says(draw, likely)
        before = ([*machine._chunks], machine.moving, machine._announced, machine.state)
        try:
            if isinstance(message, Reserve):
                granted = [grant.chunk for grant in machine.reserve(message)]
            elif isinstance(message, Landed):
                granted = machine.landed(message)
            else:
                return
        except ProtocolError:
            assert ([*machine._chunks], machine.moving, machine._announced, machine.state) == before
            return
        assert len(granted) == len(set(granted))
        assert set(granted) <= self.announced
        self.announced -= set(granted)
        self.hands |= set(granted)

    def play(self) -> int:
        acts = [self.accept, self.ready, self.ready, self.finish, self.report, *[self.hear] * 6]
        if self.draw.random() < 0.4:
            acts += [self.stop, self.unread]
        for _ in range(STEPS):
            self.draw.choice(acts)()
            assert self.machine.moving == len(self.hands)
            assert len(self.machine._chunks) in (0, self.chunks)
        self.wind_down()
        return STEPS * 6 // len(acts)

    def wind_down(self):
        """However it went: once the shell is through, it ends, and says so once."""
        self.stop()
        self.unread()
        while self.hands:
            self.report()
        assert self.machine.state is SendState.ENDED
        assert self.lasts <= 1
        assert self.machine.reserve(Reserve(1, [Grant(0, 0, 0)], 1)) == []


def one_sender(draw: Random) -> int:
    return Sender(draw).play()


def test_sending():
    campaign.run("sending", one_sender)


PREFILL_RANK = Peer(
    (Accept, Refuse, Want, KvAgentResult),
    [
        *(
            Accept(1, route, 64, [], 1, 1, count, b"", ahead=ahead)
            for route in ROUTES
            for count, ahead in ((3, False), (1, True))
        ),
        *(Want(1, pack_u32(range(count)), 100) for count in range(4)),
        *(build_result(1, status, chunk=chunk) for status in Status for chunk in (0, 1, WHOLE)),
        *(build_result(1, Status.OK, chunk=chunk, last=True, payload=b"p") for chunk in (0, 2, WHOLE)),
        Refuse(1, Code.TOO_MANY, "no"),
    ],
)


class Receiver:
    """The decode rank's machine and its shell."""

    def __init__(self, draw: Random):
        self.draw = draw
        self.ahead, self.staging = draw.random() < 0.4, draw.random() < 0.5
        self.machine = Receiving(1, ahead=self.ahead, staging=self.staging)
        self.queue, self.granted, self.reading = deque(), set(), set()
        self.landed, self.placed = set(), set()
        self.chunks = 0
        self.route = Route.UNKNOWN

    def hear(self):
        machine, draw = self.machine, self.draw
        chunk = draw.choice(sorted(self.granted) or [0])
        likely = draw.choice(
            [
                Accept(1, draw.choice(ROUTES), 64, [], 1, 1, draw.randrange(4), b"", ahead=draw.random() < 0.3),
                Want(1, pack_u32(draw.choices(range(4), k=draw.choice((1, 1, 2))))),
                build_result(1, Status.OK, chunk=chunk, last=draw.random() < 0.3),
                build_result(1, Status.OK, last=True),
            ]
        )
        message = PREFILL_RANK.says(draw, likely)
        before = ([*machine._chunks], machine.state, machine.ahead, machine.heard_last)
        try:
            self.take(message)
        except ProtocolError:
            assert ([*machine._chunks], machine.state, machine.ahead, machine.heard_last) == before

    def take(self, message):
        machine = self.machine
        match message:
            case Accept():
                asked = machine.state is ReceiveState.ASKED
                exposed = machine.ahead
                assert machine.accept(message) == asked
                if asked:
                    assert not message.ahead or exposed
                    self.chunks, self.route = message.chunks, message.route
                    self.granted = set(range(self.chunks)) if message.ahead else set()
            case Refuse():
                machine.refused(message)
                assert machine.ended
            case Want():
                news = machine.wanted(message)
                assert not set(news) & (set(self.queue) | self.granted | self.reading | self.landed | self.placed)
                self.queue += news
            case KvAgentResult():
                chunk = machine.result(message)
                if chunk is not None:
                    assert chunk in self.granted
                    self.granted.discard(chunk)
                    self.landed.add(chunk)
            case _:
                return

    def grant(self):
        if self.queue and self.machine.state is ReceiveState.MOVING:
            chunk = self.queue.popleft()
            if self.route is Route.PULL:
                self.machine.reading([chunk])
                self.reading.add(chunk)
            else:
                self.machine.grant([Grant(chunk, 4096, 64)], 100)
                self.granted.add(chunk)

    def read(self):
        if self.reading:
            chunk = self.reading.pop()
            self.machine.landed([chunk])
            self.granted.add(chunk)

    def place(self):
        if self.landed:
            chunk = self.landed.pop()
            self.machine.chunk_done(chunk)
            self.placed.add(chunk)

    def cancel(self):
        self.machine.cancel(FAILURE)

    def lose(self):
        self.machine.lost(FAILURE)
        if self.machine.state is ReceiveState.LOST and self.draw.random() < 0.7:
            self.machine.resume()

    def play(self) -> int:
        acts = [*[self.grant] * 2, self.read, self.place, self.place, *[self.hear] * 7]
        if self.draw.random() < 0.3:
            acts += [self.cancel, self.lose]
        for _ in range(STEPS):
            self.draw.choice(acts)()
            self.check()
        return STEPS * 7 // len(acts)

    def check(self):
        machine = self.machine
        assert set(machine.granted) == self.granted
        assert len(machine._chunks) <= MAX_CHUNKS
        assert machine.outstanding == len(self.granted) + len(self.reading) + len(self.landed)
        if machine.state is ReceiveState.DONE:
            assert self.placed == set(range(self.chunks))
            assert machine.failure is None
        if self.ahead and machine.state is ReceiveState.ASKED and not machine._chunks and not machine.ahead:
            assert not machine.exposed


def one_receiver(draw: Random) -> int:
    return Receiver(draw).play()


def test_receiving():
    campaign.run("receiving", one_receiver)
