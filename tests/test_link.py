"""A control stream handles what came in a turn at a time, and loses nothing of it."""
# stand-ins for the session, the stream and the worker
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

from kvxfer.errors import PeerLostError, ProtocolError
from kvxfer.peers.link import _SLICE_BYTES, Link
from kvxfer.protocol.messages import Goodbye
from kvxfer.protocol.session import Liveness, Opened, Role, State
from kvxfer.runtime import TURN_SECONDS

PEER_TIMEOUT = 8 * TURN_SECONDS


class Clock:
    def __init__(self):
        self.time = 0.0

    def now(self):
        return self.time


PEER = SimpleNamespace(name="peer", body=SimpleNamespace(renewals=3))
LONG = bytes(range(256)) * (_SLICE_BYTES // 64)  # four slices
GOODBYE = b"goodbye"


class Frames:
    """Stands for an open session in which every byte is a message that comes in, and what is sent stands for itself."""

    def __init__(self, peer):
        self.state, self.peer = State.OPEN, peer
        self.unread, self.unsent = b"", b""
        self.liveness = Liveness(TURN_SECONDS, PEER_TIMEOUT, 0.0, 0.0, 0.0)

    def receive(self, data, now):
        self.excuse(now)
        self.unread += data
        while self.unread:
            number, self.unread = self.unread[0], self.unread[1:]
            if self.state is State.CLOSED:
                return
            if number == 255:
                raise ProtocolError("no such frame")
            yield Opened(PEER) if number == 253 else number

    def excuse(self, now):
        self.liveness.heard = self.liveness.looked = now

    def tick(self, now):
        self.liveness.look(now)
        if self.liveness.silent(now):
            raise PeerLostError("the peer was silent")

    def send(self, message, now, at_once=0):
        del now
        frame = GOODBYE if isinstance(message, Goodbye) else message
        if self.unsent or len(frame) > at_once:
            self.unsent, frame = self.unsent + frame, b""
        return frame

    @property
    def unread_bytes(self):
        return len(self.unread)

    @property
    def unsent_bytes(self):
        return len(self.unsent)

    def take_output(self, most):
        taken, self.unsent = self.unsent[:most], self.unsent[most:]
        return taken

    def next_deadline(self):
        return 1e9

    def close(self):
        self.state = State.CLOSED


class Stream(asyncio.Transport):
    def __init__(self):
        super().__init__()
        self.reading, self.closed, self.cut, self.wrote = True, False, False, []

    def write(self, data):
        self.wrote.append(data)

    def get_extra_info(self, name, default=None):
        del name
        return default

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True

    def abort(self):
        self.closed = self.cut = True


class Handler:
    def __init__(self, clock):
        self.clock, self.got, self.lost_with = clock, [], []
        self.frames_sent, self.frames_received = Counter(), Counter()
        self.looking = asyncio.get_running_loop().create_future()

    def new_session(self, link, process):
        del process
        self.since = link.since
        return Frames(PEER), True

    def examine(self, link):
        assert link.peer is PEER
        return asyncio.create_task(self._look())

    async def _look(self):
        return await self.looking

    def on_opened(self, link, found):
        assert link.renewals == 3
        self.got.append(found)

    def on_peer_news(self, link, message):
        del link
        if message == 254:
            raise ZeroDivisionError
        self.got.append(message)
        self.clock.time += TURN_SECONDS / 2

    def on_lost(self, link, error):
        del link
        self.lost_with.append(error)


@pytest.fixture
async def new():
    """A link whose peer has yet to say what it is, by a byte of 253."""
    clock = Clock()
    handler = Handler(clock)
    made = Link(Role.SERVER, "unix:/there", handler, clock)
    made.handler, made.stream = handler, Stream()
    made.connection_made(made.stream)
    yield made
    made.close()


@pytest.fixture
async def link(new):
    new.data_received(bytes([253]))
    new.handler.looking.set_result("found")
    await new.ready
    await turns()
    new.handler.got.clear()
    return new


async def turns():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_others_have_their_turn_between_frames(link):
    got = link.handler.got
    link.data_received(bytes(range(5)))
    assert got == [0, 1]
    assert not link.stream.reading
    await asyncio.sleep(0)
    assert got == [0, 1, 2, 3]
    assert not link.stream.reading
    await asyncio.sleep(0)
    assert got == [0, 1, 2, 3, 4]
    assert link.stream.reading


async def test_what_a_peer_says_while_it_is_looked_at_has_a_bound(new, monkeypatch):
    monkeypatch.setattr("kvxfer.peers.link._HEARD_BYTES", 4)
    new.data_received(bytes([253]))
    new.data_received(bytes([1, 2, 3]))
    assert new.stream.reading
    new.data_received(bytes([4]))
    assert not new.stream.reading
    new.handler.looking.set_result("found")
    await turns()
    assert new.handler.got == ["found", 1, 2, 3, 4]
    assert new.stream.reading


async def test_who_was_left_while_it_was_looked_at_is_not_opened(new):
    new.data_received(bytes([253, 1]))
    new.close("enough")
    new.handler.looking.set_result("found")
    await turns()
    assert new.handler.got == []


async def test_what_came_before_the_end_of_the_stream_counts(link):
    link.data_received(bytes(range(5)))
    link.stream.close()
    link.connection_lost(None)
    assert link.handler.got == [0, 1]
    assert not link.handler.lost_with
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert link.handler.got == [0, 1, 2, 3, 4]
    (error,) = link.handler.lost_with
    assert isinstance(error, PeerLostError)


async def test_a_peer_is_not_silent_while_what_it_said_is_still_being_handled(link):
    """Nothing more is read meanwhile, so nobody knows whether it has said more."""
    link.data_received(bytes(100))
    while not link.stream.reading:
        link._on_timer()
        assert not link.handler.lost_with
        await asyncio.sleep(0)
    assert len(link.handler.got) == 100
    for passed in (2, 4, 6, 8):
        assert not link.handler.lost_with, passed
        link.handler.clock.time += 2 * TURN_SECONDS
        link._on_timer()
    assert isinstance(link.handler.lost_with[0], PeerLostError)


@pytest.mark.parametrize(("frame", "error"), [(255, ProtocolError), (254, PeerLostError)])
async def test_a_bad_frame_or_a_defect_in_a_later_turn_closes_the_link(link, frame, error):
    link.data_received(bytes([0, 1, 2, frame, 4]))
    await asyncio.sleep(0)
    assert link.handler.got == [0, 1, 2]
    assert isinstance(link.handler.lost_with[0], error)
    assert link.stream.closed


async def test_what_is_long_goes_out_a_slice_a_turn_and_the_next_behind_it(link):
    wrote = link.stream.wrote
    link.send(LONG)
    link.send(b"next")
    assert len(wrote) == 1
    await asyncio.sleep(0)
    assert len(wrote) == 2
    await turns()
    assert b"".join(wrote) == LONG + b"next"
    assert max(map(len, wrote)) == _SLICE_BYTES
    link.send(b"one")
    link.send(b"by one")
    assert wrote[-2:] == [b"one", b"by one"]


async def test_what_may_wait_goes_in_its_order_once_and_before_what_is_sent_until_then(link):
    link.send(b"1", soon=True)
    link.send(b"2", soon=True)
    assert link.stream.wrote == []
    link.send(b"3")
    assert link.stream.wrote == [b"1", b"2", b"3"]
    link.send(b"4", soon=True)
    link.send(b"5", soon=True)
    await turns()
    assert link.stream.wrote[3:] == [b"4", b"5"]
    link.send(b"6", soon=True)
    link.close()
    await turns()
    assert b"".join(link.stream.wrote) == b"123456" + GOODBYE


@pytest.mark.parametrize("paused", [False, True])
async def test_a_link_that_is_closed_says_what_it_had_to_say(link, paused):
    link.send(LONG)
    await asyncio.sleep(0)
    if paused:
        link.pause_writing()
    link.close("enough")
    assert not link.stream.closed
    assert isinstance(link.handler.lost_with[0], PeerLostError)
    await turns()
    assert link.stream.closed is not paused
    if paused:
        link.resume_writing()
        await turns()
    assert b"".join(link.stream.wrote) == LONG + GOODBYE
    assert link.stream.closed
    assert not link.stream.cut


@pytest.mark.parametrize("gone", [False, True])
async def test_a_link_that_is_closed_does_not_wait_for_ever_for_who_reads_nothing(link, monkeypatch, gone):
    monkeypatch.setattr("kvxfer.peers.link._LEAVE_SECONDS", 0.001)
    link.pause_writing()
    link.send(b"more")
    link.data_received(bytes([255]))
    assert isinstance(link.handler.lost_with[0], ProtocolError)
    assert not link.stream.closed
    if gone:
        link.connection_lost(None)
    await asyncio.sleep(0.02)
    assert link.stream.cut is not gone


async def test_who_reads_nothing_of_what_was_asked_for_is_dropped(link, monkeypatch):
    monkeypatch.setattr("kvxfer.peers.link._UNSENT_BYTES", 4)
    link.pause_writing()
    link.send(b"1234")
    assert link.is_open
    link.send(b"5")
    assert link.stream.cut
    (error,) = link.handler.lost_with
    assert isinstance(error, ProtocolError)
    assert "let 4 bytes of replies pile up" in str(error)
    link.resume_writing()
    assert link.stream.wrote == []


async def test_a_handshake_is_timed_from_when_the_stream_was_opened():
    clock = Clock()
    handler = Handler(clock)
    made = Link(Role.CLIENT, "tcp:there:1", handler, clock)
    clock.time = 7.0  # which TLS took
    made.connection_made(Stream())
    assert handler.since == 0.0
    made.close()
