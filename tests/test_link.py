"""A control stream handles what came in a turn at a time, and loses nothing of it."""
# stand-ins for the session, the stream and the worker
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import asyncio

import pytest

from kvxfer.errors import PeerLostError, ProtocolError
from kvxfer.link import Link
from kvxfer.protocol.session import Received, Role, State
from kvxfer.runtime import TURN_SECONDS


class Clock:
    def __init__(self):
        self.time = 0.0

    def now(self):
        return self.time


class Frames:
    """Stands for an open session in which every byte is a message."""

    def __init__(self, peer):
        self.state, self.peer, self.draining = State.OPEN, peer, False
        self.unread_bytes = 0

    def receive(self, data, now):
        del now
        self.unread_bytes += len(data)
        for number in data:
            self.unread_bytes -= 1
            if self.state is State.CLOSED:
                return
            if number == 255:
                raise ProtocolError("no such frame")
            yield Received(number)

    def send(self, message, now):
        del message, now

    def take_output(self):
        return b""

    def next_deadline(self):
        return 1e9

    def close(self):
        self.state = State.CLOSED


class Stream(asyncio.Transport):
    def __init__(self):
        super().__init__()
        self.reading, self.closed = True, False

    def set_write_buffer_limits(self, high=None, low=None):
        del high, low

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

    abort = close


class Handler:
    def __init__(self, clock):
        self.clock, self.got, self.lost_with = clock, [], []

    def session(self, role, *, process, endpoint, since):
        del role, process, endpoint
        self.since = since
        return Frames("peer"), True

    def received(self, link, message):
        del link
        if message == 254:
            raise ZeroDivisionError
        self.got.append(message)
        self.clock.time += TURN_SECONDS / 2

    def sent(self, link, message):
        del link, message

    def lost(self, link, error):
        del link
        self.lost_with.append(error)


@pytest.fixture
async def link():
    clock = Clock()
    handler = Handler(clock)
    made = Link(Role.SERVER, "unix:/there", handler, clock)
    made.handler, made.stream = handler, Stream()
    made.connection_made(made.stream)
    made.ready.set_result("peer")
    yield made
    made.close()


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


async def test_reading_goes_on_if_a_turn_leaves_nothing(link):
    link.data_received(bytes(range(2)))  # just as many as a turn is long
    assert link.handler.got == [0, 1]
    assert link.stream.reading


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


async def test_nothing_is_handled_after_the_link_was_closed(link):
    link.data_received(bytes(range(5)))
    link.close("enough")
    await asyncio.sleep(0)
    assert link.handler.got == [0, 1]
    assert link.stream.closed


async def test_a_bad_frame_in_a_later_turn_closes_the_link(link):
    link.data_received(bytes([0, 1, 2, 255, 4]))
    await asyncio.sleep(0)
    assert link.handler.got == [0, 1, 2]
    assert isinstance(link.handler.lost_with[0], ProtocolError)
    assert link.stream.closed


async def test_a_defect_in_a_later_turn_closes_the_link_too(link):
    link.data_received(bytes([0, 1, 2, 254, 4]))
    await asyncio.sleep(0)
    assert link.handler.got == [0, 1, 2]
    assert isinstance(link.handler.lost_with[0], PeerLostError)
    assert link.stream.closed


async def test_a_handshake_is_timed_from_when_the_stream_was_opened():
    clock = Clock()
    handler = Handler(clock)
    made = Link(Role.CLIENT, "tcp:there:1", handler, clock)
    clock.time = 7.0  # which TLS took
    made.connection_made(Stream())
    assert handler.since == 0.0
    made.close()


async def test_a_link_that_was_closed_while_tls_was_agreed_upon_stays_closed():
    clock = Clock()
    made = Link(Role.CLIENT, "tcp:there:1", Handler(clock), clock)
    made.close("enough")
    stream = Stream()
    made.connection_made(stream)
    assert stream.closed
    assert not made.is_open
