"""The machines of one transfer, each facing a peer that says anything at any time.

The test plays the shell as it is, and holds the machine to what memory depends on: nothing is moved or placed that was
not granted, nothing twice, and what was refused has changed nothing.
"""

from random import Random

import campaign
import pytest
from mutation import SPOKEN, VALID, Mutator, decoded

from kvxfer.errors import Code, ProtocolError
from kvxfer.protocol import messages as wire
from kvxfer.protocol.framing import encode
from kvxfer.protocol.transfer import Failure, ReceiveState, Receiving, Sending, SendState, build_result

FAILURE = Failure(wire.Status.CANCELLED, Code.CANCELLED, "stopped")
ROUTES = [wire.Route.STAGED, wire.Route.DIRECT, wire.Route.PULL, wire.Route.MAPPED]
STEPS = 40


def payloads(messages):
    return [encode(message)[4:] for message in messages]


class Peer:
    """Says messages of some types: near what would be right now, or far from it."""

    def __init__(self, kinds, templates):
        golden = [payload for payload in [*VALID, *SPOKEN] if isinstance(decoded(payload), kinds)]
        self.kinds = kinds
        self.mutator = Mutator([*golden, *payloads(templates)])

    def says(self, draw: Random, likely):
        if draw.random() < 0.4:
            return likely
        message = decoded(self.mutator.payload(draw))
        return message if isinstance(message, self.kinds) else None


PLACES = [wire.Place(4096 * number, 64) for number in range(1, 8)]


DECODE_RANK = Peer(
    (wire.Reserve, wire.Read),
    [wire.Reserve(1, count, 100, 0, PLACES[:places]) for count in range(5) for places in (0, 1, 3)]
    + [wire.Read(1, count) for count in range(4)],
)


class Sender:
    """The prefill rank's machine and its shell."""

    def __init__(self, draw: Random):
        self.draw = draw
        self.route = draw.choice(ROUTES)
        self.chunks = draw.randrange(7)
        ring = {"ring": PLACES[: draw.randrange(1, 3)], "ring_chunks": draw.randrange(1, 5)}
        self.fetch = wire.Fetch(
            1, wire.TicketRef("r", 0, b"m"), [], [], 0, 1, [self.route], 1, 1, lease_ms=1000, **ring
        )
        self.machine = Sending(self.fetch)
        self.announced = self.granted = self.arrived = self.dropped = self.told = 0
        self.readable = 0  # route pull: so many chunks may be read
        self.parted = False
        self.doubts = 0
        self.ring, self.ring_at = [], 0
        self.lasts = 0
        self.luck = draw.choice((0.6, 0.98))  # how likely chunks are to arrive

    @property
    def hands(self):
        """The chunks that the shell has and has not reported."""
        return range(self.arrived, self.granted - self.dropped)

    def say(self, messages):
        for message in messages:
            match message:
                case wire.Ready(chunks=chunks):
                    assert self.lasts == 0
                    assert self.announced < chunks <= self.chunks
                    assert not self.parted
                    self.announced = self.readable = chunks
                case wire.Arrived(chunks=chunks):
                    assert self.lasts == 0
                    assert self.told < chunks == self.arrived
                    self.told = chunks
                case wire.KvAgentResult():
                    self.result(message)
                case wire.Refuse():
                    assert not self.hands
                case _:
                    assert isinstance(message, wire.Accept)

    def result(self, message):
        assert self.lasts == 0
        assert message.last == (message.chunk == wire.WHOLE)
        self.lasts += message.last
        if message.chunk != wire.WHOLE:
            assert message.status is not wire.Status.OK
            assert self.arrived <= message.chunk < self.announced
        elif message.status is wire.Status.OK:
            assert self.arrived == self.chunks
            assert message.bytes == 64 * self.chunks
        elif message.status is not wire.Status.IN_DOUBT:
            assert not self.doubts
            assert self.route is not wire.Route.PULL or self.readable == self.granted, (
                "blocks would be freed while read"
            )
        if message.chunk == wire.WHOLE:  # also one that leaves doubt: of what the shell has, it knows the end
            assert not self.hands

    def accept(self):
        if self.machine.state is SendState.PARKED:
            ahead = self.route is not wire.Route.PULL and self.draw.random() < 0.2
            accept = wire.Accept(1, self.route, 0, [], 1, 1, self.chunks, b"", ahead=ahead)
            if ahead:
                self.announced = self.granted = self.chunks
                if self.route is wire.Route.STAGED:
                    self.granted, self.ring = min(self.chunks, self.fetch.ring_chunks), self.fetch.ring
            self.say(self.machine.accept(accept))

    def announce(self):
        if self.machine.state is SendState.MOVING:
            self.say(self.machine.announce(self.draw.randrange(self.chunks + 1)))

    def finish(self):
        if self.machine.state is SendState.MOVING:
            self.say(self.machine.finish_offer(b"payload"))

    def report(self):
        if self.hands:
            chunks = self.draw.randint(1, len(self.hands))
            if self.draw.random() < self.luck:
                self.arrived += chunks
                self.say(self.machine.chunks_arrived(self.arrived, 64 * chunks, wire.Timings(wire_us=chunks)))
            else:
                in_doubt = self.draw.random() < 0.5
                self.dropped += chunks
                self.doubts += in_doubt
                self.say(self.machine.chunks_dropped(chunks, in_doubt=in_doubt))

    def report_wrongly(self):
        """What the shell does not have it cannot report; and that changes nothing."""
        before = self.known()
        for report, counts in (
            (lambda chunks: self.machine.chunks_arrived(chunks, 64), (self.arrived, self.hands.stop + 1)),
            (self.machine.chunks_dropped, (0, len(self.hands) + 1)),
        ):
            with pytest.raises(ProtocolError):
                report(self.draw.choice(counts))
        assert self.known() == before

    def news(self):
        self.say(self.machine.take_news())

    def settle(self):
        if self.doubts and self.route is not wire.Route.PULL:
            self.doubts -= 1
            self.machine.doubt_ended()

    def stop(self):
        self.say(self.machine.stop(FAILURE))

    def overdue(self):
        self.say(self.machine.give_up_waiting())

    def unread(self):
        in_doubt = self.draw.random() < 0.5
        if self.route is wire.Route.PULL:
            self.doubts += in_doubt and self.machine.being_read
            self.parted = self.parted or self.readable > self.granted  # it read, and said that it does not
            self.readable = self.granted
        self.say(self.machine.on_unread(in_doubt=in_doubt))

    def known(self):
        """What the machine knows, for comparison."""
        machine = self.machine
        counts = machine.ready, machine.granted, machine.arrived, machine.moving, machine.nbytes
        return (
            machine.state,
            counts,
            machine.being_read,
            machine.doubts,
            [*machine.ring],
            machine._ring_at,
            machine.copied,
            machine.token,
        )

    def hear(self):
        draw, machine = self.draw, self.machine
        upto = max(0, self.granted + draw.choice((0, 1, 1, 1, 2, 3)))
        places = draw.choice((0, 0, 0, 1, 2)) if self.ring else draw.choice((0, 1, 1, 2, 4))
        ring = draw.choices(PLACES, k=places) if self.route is wire.Route.STAGED else []
        likely = wire.Read(1, upto) if self.route is wire.Route.PULL else wire.Reserve(1, upto, 100, 0, ring)
        message = DECODE_RANK.says(draw, likely)
        if not isinstance(message, wire.Reserve | wire.Read):
            return
        before, running = self.known(), machine.state in (SendState.PARKED, SendState.MOVING)
        try:
            granted = machine.on_reserve(message) if isinstance(message, wire.Reserve) else machine.on_read(message)
        except ProtocolError:
            assert self.known() == before
            return
        if not running:
            assert not granted
            assert self.known() == before
            return
        assert isinstance(message, wire.Read) == (self.route is wire.Route.PULL)
        assert granted == range(self.granted, message.chunks)
        assert len(granted) > 0 or (isinstance(message, wire.Reserve) and not message.ring)  # a lease is renewed
        assert message.chunks <= (self.readable if self.route is wire.Route.PULL else self.announced)
        if isinstance(message, wire.Reserve) and message.ring:
            assert self.route is wire.Route.STAGED
            assert not self.hands or message.copied == self.granted, "a ring under what is being written"
            self.ring, self.ring_at = message.ring, self.granted
        self.granted = message.chunks

    def check(self):
        machine = self.machine
        assert machine.moving == len(self.hands)
        assert machine.chunks in (0, self.chunks)
        assert (machine.ready, machine.granted) == (self.announced, self.granted)
        assert machine.arrived == self.arrived
        assert machine.doubts == self.doubts
        if self.route is wire.Route.STAGED:
            assert len(self.machine.ring) == len(self.ring)
            places = [(chunk - self.ring_at) % len(self.ring) for chunk in self.hands]
            for chunk, place in zip(self.hands, places, strict=True):
                assert machine.places(range(chunk, chunk + 1)) == [self.ring[place]]

    def play(self) -> int:
        acts = [self.accept, *[self.announce] * 2, self.finish, *[self.report] * 2, self.news, *[self.hear] * 6]
        acts += [self.report_wrongly]
        if self.draw.random() < 0.4:
            acts += [self.stop, self.unread, self.overdue, self.settle]
        if self.draw.random() < 0.8:
            self.accept()
        for _ in range(STEPS):
            self.draw.choice(acts)()
            self.check()
        self.wind_down()
        return STEPS * 6 // len(acts)

    def wind_down(self):
        """However it went: once the shell is through, it ends, and says so once."""
        self.stop()
        self.unread()
        while self.hands:
            self.report()
        while self.doubts and self.route is not wire.Route.PULL:
            self.check()
            self.settle()
        self.check()
        assert self.machine.state is SendState.ENDED
        assert self.lasts <= 1
        before = self.known()
        assert not self.machine.on_reserve(wire.Reserve(1, 1, 1, 0, PLACES))
        assert not self.machine.on_read(wire.Read(1, 1))
        assert self.machine.take_news() == self.machine.announce(self.chunks) == self.machine.give_up_waiting() == []
        assert self.known() == before


def one_sender(draw: Random) -> int:
    return Sender(draw).play()


def test_sending():
    campaign.run("sending", one_sender)


PREFILL_RANK = Peer(
    (wire.Accept, wire.Refuse, wire.Ready, wire.Arrived, wire.KvAgentResult),
    [
        *(
            wire.Accept(1, route, 64, [], 1, 1, count, b"", ahead=ahead)
            for route in ROUTES
            for count, ahead in ((3, False), (1, True))
        ),
        *(wire.Ready(1, count, 100) for count in range(4)),
        *(wire.Arrived(1, count, wire.Timings(1, 2, 3, 4)) for count in range(5)),
        *(build_result(1, status, chunk=chunk) for status in wire.Status for chunk in (0, 1, wire.WHOLE)),
        *(wire.KvAgentResult(1, chunk, wire.Status.OK, 0, True, payload=b"p") for chunk in (0, 2, wire.WHOLE)),
        wire.Refuse(1, Code.TOO_MANY, "no"),
    ],
)


class Receiver:
    """The decode rank's machine and its shell."""

    def __init__(self, draw: Random):
        self.draw = draw
        self.ahead, self.staging = draw.random() < 0.4, draw.choice([0, 0, 1, 3])
        self.machine = Receiving(1, ahead=self.ahead, staged_ahead=self.staging)
        self.ready = self.reading = self.granted = self.arrived = self.placed = self.chunks = 0
        self.route = wire.Route.UNKNOWN

    def known(self):
        """What the machine knows, for comparison."""
        machine = self.machine
        counts = machine.ready, machine.reading, machine.granted, machine.arrived, machine.chunks_done, machine.chunks
        return machine.state, counts, machine.ahead, machine.exposed, machine.heard_last, machine.failure

    def hear(self):
        draw = self.draw
        near = draw.choice((0, 1, 1, 2))
        likely = draw.choice(
            [
                wire.Accept(1, draw.choice(ROUTES), 64, [], 1, 1, draw.randrange(5), b"", ahead=draw.random() < 0.3),
                *[wire.Ready(1, self.ready + near)] * 3,
                *[wire.Arrived(1, self.arrived + near)] * 3,
                build_result(1, wire.Status.FAILED, chunk=self.arrived),
                build_result(1, wire.Status.OK, last=True),
            ]
        )
        message = PREFILL_RANK.says(draw, likely)
        before = self.known()
        try:
            self.take(message)
        except ProtocolError:
            assert self.known() == before

    def take(self, message):
        machine = self.machine
        match message:
            case wire.Accept():
                asked = machine.state is ReceiveState.ASKED
                exposed = machine.ahead
                assert machine.on_accept(message) == asked
                if asked:
                    assert not message.ahead or exposed
                    self.chunks, self.route = message.chunks, message.route
                    self.ready = self.chunks if message.ahead else 0
                    self.granted = min(self.ready, self.staging or self.ready)
            case wire.Refuse():
                machine.on_refuse(message)
                assert machine.ended
            case wire.Ready():
                running = machine.state in (ReceiveState.ASKED, ReceiveState.MOVING)
                news = machine.on_ready(message)
                if running:
                    assert not machine.ahead
                    assert news == range(self.ready, message.chunks)
                    assert message.chunks <= self.chunks
                    self.ready = message.chunks
                else:
                    assert not news
            case wire.Arrived():
                running = machine.state in (ReceiveState.ASKED, ReceiveState.MOVING)
                self.arrive(machine.on_arrived(message), message.chunks, ended=machine.ended)
                assert not running or message.chunks <= self.granted, "what was not granted is said to have arrived"
            case wire.KvAgentResult():
                ended, failed = machine.ended or machine.heard_last, machine.failure is not None
                chunks = machine.on_result(message)
                if message.chunk != wire.WHOLE and not failed:
                    fails = message.status is not wire.Status.OK and self.arrived <= message.chunk < self.ready
                    assert (machine.failure is not None) == (fails and not ended)
                assert message.status is wire.Status.OK or not chunks
                if machine.heard_last and not ended:
                    assert (message.chunk, message.status) == (wire.WHOLE, wire.Status.OK)
                    assert machine.state is ReceiveState.STOPPED or self.granted == self.chunks
                self.arrive(chunks, self.granted, ended=ended)
            case _:
                return

    def arrive(self, chunks, upto, *, ended):
        """Only what was granted arrives, each chunk once, in their order, and nothing after the end."""
        if chunks:
            assert not ended
            assert chunks == range(self.arrived, upto)
            assert upto <= self.granted
            self.arrived = upto

    def grant(self):
        if self.machine.state is not ReceiveState.MOVING:
            return
        begun = self.reading if self.route is wire.Route.PULL else self.granted
        if begun < self.ready:
            upto = self.draw.randint(begun + 1, self.ready)
            if self.route is wire.Route.PULL:
                self.machine.begin_reads(upto)
                self.reading = upto
            else:
                ring = PLACES[: self.draw.randrange(3)]
                assert self.machine.grant(upto, 100, 7, ring) == [wire.Reserve(1, upto, 100, 7, ring)]
                self.granted = upto

    def read(self):
        if self.granted < self.reading:
            upto = self.draw.randint(self.granted + 1, self.reading)
            for wrong in (self.granted, self.reading + 1):
                with pytest.raises(ProtocolError):
                    self.machine.chunks_read(wrong)
            assert self.machine.chunks_read(upto) == [wire.Read(1, upto)]
            self.granted = upto

    def place(self):
        if self.placed < self.arrived:
            self.placed = self.draw.randint(self.placed + 1, self.arrived)
            self.machine.chunks_landed(self.placed)

    def cancel(self):
        self.machine.cancel(FAILURE)

    def lose(self):
        self.machine.on_link_lost(FAILURE)
        if self.machine.state is ReceiveState.LOST and self.draw.random() < 0.7:
            self.machine.resume()

    def play(self) -> int:
        acts = [*[self.grant] * 2, self.read, self.place, self.place, *[self.hear] * 7]
        if self.draw.random() < 0.3:
            acts += [self.cancel, self.lose]
        if self.draw.random() < 0.8:
            ahead = self.ahead and self.draw.random() < 0.5
            route = wire.Route.STAGED if ahead and self.staging else self.draw.choice(ROUTES[1:2] if ahead else ROUTES)
            chunks = self.draw.randrange(int(ahead and self.staging > 0), 6)
            self.take(wire.Accept(1, route, 64, [], 1, 1, chunks, b"", ahead=ahead))
        for _ in range(STEPS):
            self.draw.choice(acts)()
            self.check()
        return STEPS * 7 // len(acts)

    def check(self):
        machine = self.machine
        counts = machine.ready, machine.reading, machine.granted, machine.arrived, machine.chunks_done
        assert counts == (self.ready, self.reading, self.granted, self.arrived, self.placed)
        assert 0 <= self.placed <= self.arrived <= self.granted <= self.ready <= self.chunks <= wire.MAX_CHUNKS
        assert machine.chunks == self.chunks
        assert machine.exposed == (machine.ahead or self.arrived < self.granted)
        if machine.state is ReceiveState.DONE:
            assert self.placed == self.chunks
            assert machine.failure is None
        if machine.state is ReceiveState.STOPPED:
            assert machine.failure is not None
        if self.ahead and machine.state is ReceiveState.ASKED and not machine.chunks and not machine.ahead:
            assert not machine.exposed


def one_receiver(draw: Random) -> int:
    return Receiver(draw).play()


def test_receiving():
    campaign.run("receiving", one_receiver)
