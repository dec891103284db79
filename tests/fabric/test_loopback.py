"""The loopback transport: bytes, bounds, and every fault that it can inject."""

import numpy as np
import pytest
from rigs import memory_of

from kvxfer.copy.port import Descriptors, Operation
from kvxfer.errors import FabricError
from kvxfer.fabric.loopback import EVERY_PEER, LogEntry, LoopbackNetwork, LoopbackTransport
from kvxfer.protocol.messages import MemorySpan

SIZE = 4096


class Agent:
    """A transport and one registered buffer."""

    def __init__(self, name: str, network: LoopbackNetwork, fill: int) -> None:
        self.transport = LoopbackTransport(name, network)
        self.transport.setup()
        self.buffer = np.full(SIZE, fill, dtype=np.uint8)
        self.address = self.buffer.ctypes.data
        self.token = self.transport.register([memory_of(self.buffer)])

    def pieces(self, *spans: tuple[int, int]) -> Descriptors:
        rows = np.array([(self.address + start, length) for start, length in spans], dtype=np.int64)
        return Descriptors("DRAM", 0, rows)


@pytest.fixture
def pair(network: LoopbackNetwork) -> tuple[Agent, Agent]:
    a, b = Agent("a", network, 1), Agent("b", network, 2)
    assert a.transport.connect(b.transport.metadata([b.token])) == "b"
    return a, b


def write(a: Agent, b: Agent, start: int = 0, length: int = 8) -> object:
    return a.transport.post("b", Operation.WRITE, a.pieces((start, length)), b.pieces((start, length)))


def test_write_and_read_move_exactly_the_pieces_and_are_logged(network, pair):
    a, b = pair
    a.buffer[:] = np.arange(SIZE, dtype=np.uint64).astype(np.uint8)
    handle = a.transport.post("b", Operation.WRITE, a.pieces((0, 3), (100, 5)), b.pieces((10, 3), (20, 5)))
    assert a.transport.poll(handle)
    a.transport.release(handle)
    expected = np.full(SIZE, 2, dtype=np.uint8)
    expected[10:13] = a.buffer[0:3]
    expected[20:25] = a.buffer[100:105]
    assert np.array_equal(b.buffer, expected)
    handle = a.transport.post("b", Operation.READ, a.pieces((4000, 2)), b.pieces((10, 2)))
    assert a.transport.poll(handle)
    a.transport.release(handle)
    assert np.array_equal(a.buffer[4000:4002], expected[10:12])
    assert network.log == [
        LogEntry(Operation.WRITE, "a", "b", b.address + 10, 3),
        LogEntry(Operation.WRITE, "a", "b", b.address + 20, 5),
        LogEntry(Operation.READ, "a", "b", b.address + 10, 2),
    ]
    assert a.transport.open_handles == 0


@pytest.mark.parametrize("span", [(SIZE, 1), (SIZE - 4, 5), (-1, 4)])
def test_outside_of_the_registration_is_refused_on_both_sides(network, pair, span):
    a, b = pair
    with pytest.raises(FabricError, match="outside of what b has registered"):
        a.transport.post("b", Operation.WRITE, a.pieces((0, span[1])), b.pieces(span))
    with pytest.raises(FabricError, match="outside of what a"):
        a.transport.post("b", Operation.WRITE, a.pieces(span), b.pieces((0, span[1])))
    assert network.log == []


def test_metadata_names_only_the_registrations_asked_for(network, pair):
    a, b = pair
    other = np.zeros(64, dtype=np.uint8)
    token = b.transport.register([memory_of(other)])
    a.transport.connect(b.transport.metadata([b.token]))
    target = Descriptors("DRAM", 0, np.array([[other.ctypes.data, 8]], dtype=np.int64))
    with pytest.raises(FabricError, match="outside of what b has registered"):
        a.transport.post("b", Operation.WRITE, a.pieces((0, 8)), target)
    a.transport.connect(b.transport.metadata([token]))
    assert a.transport.poll(a.transport.post("b", Operation.WRITE, a.pieces((0, 8)), target))
    assert other[:8].tolist() == [1] * 8


def test_hold_keeps_bytes_back_until_release_even_if_given_up(network, pair):
    a, b = pair
    network.hold("b")
    first, second = write(a, b, 0), write(a, b, 8)
    assert not a.transport.poll(first)
    assert network.held("b") == network.held(EVERY_PEER) == 2
    assert b.buffer[0] == 2
    a.transport.release(second)  # given up
    a.buffer[8:16] = 9  # and the source was used again
    assert network.release("b", posts=1) == 1
    assert a.transport.poll(first)
    assert b.buffer[:16].tolist() == [1] * 8 + [2] * 8
    assert not a.transport.poll(write(a, b, 16)), "still holding"
    assert network.release("b") == 2
    assert b.buffer[:24].tolist() == [1] * 8 + [9] * 8 + [1] * 8, "late bytes are those of the time when they move"
    assert a.transport.poll(write(a, b, 24)), "no longer holding"


def test_late_bytes_are_dropped_where_memory_was_deregistered(network, pair):
    a, b = pair
    network.hold("b")
    write(a, b)
    b.transport.deregister(b.token)
    network.release("b")
    assert b.buffer[0] == 2
    assert network.log == []


def test_on_a_paced_link_posts_take_their_time_one_after_the_other(network, pair):
    a, b = pair
    clock = [10.0]
    network.pace("b", 100.0, lambda: clock[0])
    first, second = write(a, b, 0, 50), write(a, b, 50, 25)
    for now, ended, landed in ((10.4, [False, False], 0), (10.5, [True, False], 50), (10.75, [True, True], 75)):
        clock[0] = now
        assert [a.transport.poll(handle) for handle in (first, second)] == ended
        assert int((b.buffer == 1).sum()) == landed
    clock[0] = 20.0
    third = write(a, b, 100, 10)  # the link was idle meanwhile
    clock[0] = 20.1
    assert a.transport.poll(third)
    network.pace("b", 0.0, lambda: clock[0])
    assert a.transport.poll(write(a, b, 200, 1))


def test_misuse_is_refused(network, pair):
    a, b = pair
    with pytest.raises(FabricError, match="not connected"):
        b.transport.post("a", Operation.WRITE, b.pieces((0, 8)), a.pieces((0, 8)))
    for metadata in (b"{}", b"\xff", b"[" * 100_000, b'{"agent": "b", "memories": {"1": [[1e999, 8]]}}'):
        with pytest.raises(FabricError, match="no metadata"):
            a.transport.connect(metadata)
    with pytest.raises(FabricError, match="memory of this process only"):
        a.transport.register([MemorySpan("VRAM", 0, 4096, 8)])
    with pytest.raises(FabricError, match="open already"):
        LoopbackTransport("a", network).setup()
    a.transport.deregister(a.token)
    with pytest.raises(FabricError, match="not registered"):
        a.transport.deregister(a.token)
    with pytest.raises(FabricError, match="not registered"):
        a.transport.metadata([a.token])


def test_a_handle_is_given_back_once(pair):
    a, b = pair
    handle = write(a, b)
    a.transport.release(handle)
    with pytest.raises(RuntimeError, match="given back before"):
        a.transport.release(handle)
    with pytest.raises(RuntimeError, match="given back before"):
        a.transport.poll(handle)


def test_where_the_target_is_needed_bytes_land_when_it_makes_progress(network, pair):
    a, b = pair
    network.need_target("b")
    handle = write(a, b)
    for _ in range(3):
        a.transport.progress()
        assert not a.transport.poll(handle)
    assert b.buffer[0] == 2
    b.transport.progress()
    assert b.buffer[0] == 1
    assert a.transport.poll(handle)
    late = write(a, b, 8)
    a.transport.release(late)
    assert b.buffer[8] == 2
    b.transport.progress()
    assert b.buffer[8] == 1, "though it was given up"
    network.mend("b")
    assert a.transport.poll(write(a, b, 16))


# ---- notifications ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", ["b", EVERY_PEER])
def test_to_a_mute_peer_notifications_are_lost(network, pair, peer):
    a, b = (one.transport for one in pair)
    a.notify("b", b"before")
    network.mute(peer)
    a.notify("b", b"lost")
    b.notify("a", b"back")
    network.mend(peer)
    a.notify("b", b"after")
    assert b.heard() == [("a", b"before"), ("a", b"after")]
    assert a.heard() == ([("b", b"back")] if peer == "b" else [])


def test_where_it_echoes_notifications_come_again_behind_those_that_came_meanwhile(network, pair):
    a, b = (one.transport for one in pair)
    network.echo("b")
    for what in (b"one", b"two"):
        a.notify("b", what)
    network.mend("b")
    a.notify("b", b"three")
    assert [what for _, what in b.heard()] == [b"one", b"two", b"three", b"one", b"two"]
    network.echo(EVERY_PEER)
    network.mute("b")
    a.notify("b", b"lost")
    b.notify("a", b"twice")
    assert (b.heard(), a.heard()) == ([], [("b", b"twice")] * 2)


@pytest.mark.parametrize("how", ["unknown", "closed", "renewed", "disconnected"])
def test_who_is_gone_cannot_be_notified(network, pair, how):
    a, b = (one.transport for one in pair)
    a.notify("b", b"before")
    if how == "closed":
        b.close()
    elif how == "renewed":
        b.renew()
    elif how == "disconnected":
        network.disconnect("b")
    with pytest.raises(FabricError, match=r"gone|disconnected") as caught:
        a.notify("z" if how == "unknown" else "b", b"x")
    assert (caught.value.disconnected, caught.value.in_doubt) == (True, False)
    if how == "closed":
        new = LoopbackTransport("b", network)
        new.setup()
        assert new.heard() == [], "that was for another one"
    elif how == "renewed":
        a.notify(b.name, b"x")
        assert b.heard() == [("a", b"x")]
