"""Which process is watched: the one that the peer says to be its own, and nothing but the kernel shows that it is."""

import asyncio
import contextlib
import os
import platform
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer.mapped import host as numbers
from kvxfer.mapped.host import here, number_of, own_number, process_of_stream
from kvxfer.protocol.framing import encode_body
from kvxfer.protocol.messages import AgentBody, MemorySpan
from kvxfer.protocol.session import Identity, PeerInfo
from kvxfer.safety import processes as module
from kvxfer.safety.fence import LockFile
from kvxfer.safety.processes import Processes

CONNECTS = """
import os, socket, sys
stream = socket.socket(socket.AF_UNIX)
stream.connect(sys.argv[1])
if sys.argv[2] == "forks":
    child = os.fork()
    if not child:
        os.read(0, 1)
        os._exit(0)
stream.sendall(str(os.fstat(os.pidfd_open(os.getpid())).st_ino).encode())
os.read(0, 1)
"""
APART = here().partition(" ")[0] + " pid:[1]"
"""A namespace on this host that nobody is in."""

KERNEL = tuple(int(part) for part in platform.release().split(".")[:2])
pytestmark = pytest.mark.skipif(KERNEL < (6, 9), reason="this kernel has no numbers of processes (Linux 6.9)")


class Other:
    """A process that has connected to a Unix socket of this one, and what it said of itself."""

    def __init__(self, folder, how):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "here"))
            listener.listen()
            command = [sys.executable, "-c", CONNECTS, str(folder / "here"), how]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE)
            self.stream, _ = listener.accept()
        self.number = int(self.stream.recv(64))

    def opened(self):
        """A descriptor, as a link opens it."""
        self.descriptor = process_of_stream(self.stream)
        return self.descriptor

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self):
        self.kill()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.stream.close()


@contextlib.contextmanager
def other(folder, how="waits"):
    one = Other(folder, how)
    try:
        yield one
    finally:
        one.end()


@pytest.fixture
def one(tmp_path):
    with other(tmp_path) as one:
        yield one


def peer(number, *, host=APART, locks=b"", staging="DRAM", process=0):
    body = AgentBody("x", b"", [], [MemorySpan(staging, 0, 0, 1)], host=host, locks=locks, process=number)
    return PeerInfo(Identity("e", b"e" * 16, b"i" * 16, 0, 1, 0, ""), encode_body(body), process)


@pytest.fixture
async def watched():
    """Processes, and how many descriptors there are more than before when all is over."""
    before = open_files()
    one = Processes(asyncio.get_running_loop(), gpu=False)
    yield one
    one.close()
    assert open_files() <= before


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def is_closed(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return True
    return False


@pytest.mark.parametrize("how", ["waits", "forks"])
async def test_a_process_elsewhere_is_seen_to_end(tmp_path, watched, how):
    """Though a child that it has forked holds its stream open; and whatever its locks would name here."""
    with other(tmp_path, how) as one:
        watched.on_session(peer(one.number, locks=(1).to_bytes(24, "little")), one.opened)
        leave = watched.hold(peer(one.number))
        ended = watched.end_of(peer(one.number))
        assert ended is not None
        assert not watched.has_ended(peer(one.number))
        one.kill()
        await asyncio.wait_for(ended, 20)
        assert watched.has_ended(peer(one.number))
        assert is_closed(one.descriptor)
        watched.forget(peer(one.number))
        assert watched.has_ended(peer(one.number))  # somebody still asks
        leave()
        assert watched.end_of(peer(one.number)) is None


async def test_closing_ends_every_watch(one):
    watched = Processes(asyncio.get_running_loop(), gpu=False)
    watched.on_session(peer(one.number), one.opened)
    leave = watched.hold(peer(one.number))
    watched.close()
    assert is_closed(one.descriptor)
    assert watched.end_of(peer(one.number)) is None
    leave()


async def test_who_passes_the_stream_on_is_not_the_peer(watched, one):
    """Its end would say nothing of the process that speaks."""
    watched.on_session(peer(one.number + 1), one.opened)
    assert watched.end_of(peer(one.number + 1)) is None
    assert is_closed(one.descriptor)


@pytest.mark.parametrize(
    "said",
    [{"number": 0}, {"host": "another-boot pid:[1]"}, {"host": ""}, {"staging": "VRAM"}],
    ids=["no number", "another host", "who knows where", "a GPU"],
)
async def test_nobody_is_watched_of_whom_it_would_be_no_evidence(watched, one, said):
    about = peer(**{"number": one.number, **said})
    watched.on_session(about, one.opened)
    assert watched.end_of(about) is None
    assert not hasattr(one, "descriptor")


async def test_a_gpu_here_is_reason_enough(one):
    watched = Processes(asyncio.get_running_loop(), gpu=True)
    watched.on_session(peer(one.number), one.opened)
    assert watched.end_of(peer(one.number)) is None


async def test_this_process_is_not_watched(watched):
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        watched.on_session(peer(own_number()), lambda: process_of_stream(ours))
        assert watched.end_of(peer(own_number())) is None


async def test_a_peer_in_this_namespace_that_was_told_no_locks_is_seen_too(watched, one):
    watched.on_session(peer(one.number, host=here()), one.opened)
    assert watched.end_of(peer(one.number)) is not None


async def test_without_a_descriptor_nobody_is_watched(watched):
    watched.on_session(peer(4711), lambda: -1)
    assert watched.end_of(peer(4711)) is None
    watched.hold(peer(4711))()
    watched.forget(peer(4711))
    assert not watched.has_ended(peer(4711))


# --- by the locks


@pytest.fixture
def locks(monkeypatch):
    """A handle that names another process."""
    made = []

    def named(process):
        file = LockFile(1)
        made.append(file)
        return process.to_bytes(4, "little") + file.handle[4:]

    yield named
    for file in made:
        file.close()


@pytest.mark.parametrize(("told", "leads", "seen"), [
    ("its own", "there", True), ("none", "there", True), ("another's", "there", False), ("its own", "elsewhere", False),
])  # fmt: skip
async def test_a_number_that_was_used_again_is_not_the_peer_nor_are_locks_of_another_process_than_the_streams(
    watched, one, locks, told, leads, seen
):
    number = {"its own": one.number, "none": 0, "another's": one.number + 1}[told]
    process = one.process.pid if leads == "there" else os.getpid()
    about = peer(number, host=here(), locks=locks(one.process.pid), process=process)
    watched.on_session(about, one.opened)
    assert (watched.end_of(about) is not None) is seen
    assert not hasattr(one, "descriptor")  # what holds the locks is watched, whatever the stream leads to


async def test_on_an_older_kernel_the_number_in_the_locks_is_believed(watched, one, locks, monkeypatch):
    monkeypatch.setattr(module, "number_of", lambda descriptor: 0)
    about = peer(one.number, host=here(), locks=locks(one.process.pid))
    watched.on_session(about, one.opened)
    assert watched.end_of(about) is not None


async def test_whether_it_has_forked_is_not_asked_for_longer_than_it_is_watched(one, locks, monkeypatch):
    watched, asked = Processes(asyncio.get_running_loop(), gpu=True), []

    class Asked:
        forked = False

        def __init__(self, handle):
            asked.append(handle)

        def close(self):
            asked.pop()

    monkeypatch.setattr(module, "Lineage", Asked)
    for number, open_ones in ((one.number + 1, 0), (one.number, 1)):
        about = peer(number, host=here(), locks=locks(one.process.pid))
        watched.on_session(about, one.opened)
        assert len(asked) == open_ones
    watched.close()
    assert not asked


async def test_locks_of_this_process_are_not_watched(watched, locks):
    about = peer(own_number(), host=here(), locks=locks(os.getpid()), process=os.getpid())
    watched.on_session(about, lambda: -1)
    assert watched.end_of(about) is None


async def test_a_second_session_opens_nothing(watched, one):
    watched.on_session(peer(one.number), one.opened)
    first = one.descriptor
    watched.on_session(peer(one.number), lambda: pytest.fail("it is watched already"))
    watched.forget(peer(one.number))
    assert is_closed(first)


async def test_whoever_is_held_is_watched_on_and_met_again(watched, one):
    watched.on_session(peer(one.number), one.opened)
    leave = watched.hold(peer(one.number))
    watched.forget(peer(one.number))
    assert watched.end_of(peer(one.number)) is not None
    watched.on_session(peer(one.number), lambda: -1)
    leave()
    leave()  # once is enough
    assert watched.end_of(peer(one.number)) is not None  # a link leads there again
    watched.forget(peer(one.number))
    assert watched.end_of(peer(one.number)) is None


async def test_who_waits_for_the_end_may_take_it_back(tmp_path, watched):
    with other(tmp_path) as one:
        watched.on_session(peer(one.number), one.opened)
        told = []
        watched.when_ended(peer(one.number), lambda: told.append("stays"))
        watched.when_ended(peer(one.number), lambda: told.append("withdrawn"))()
        ended = watched.end_of(peer(one.number))
        one.kill()
        await asyncio.wait_for(ended, 20)
        await asyncio.sleep(0)
        assert told == ["stays"]
        watched.forget(peer(one.number))
        assert watched.end_of(peer(one.number)) is None  # nobody holds it any more
    assert watched.when_ended(peer(4711), told.append)() is None


# --- numbers


def test_numbers_are_of_processes(one):
    descriptors = [os.pidfd_open(one.process.pid), process_of_stream(one.stream), os.pidfd_open(os.getpid())]
    assert [number_of(descriptor) for descriptor in descriptors] == [one.number, one.number, own_number()]
    assert one.number != own_number()
    assert not os.get_inheritable(descriptors[1])
    for descriptor in descriptors:
        os.close(descriptor)


def test_no_number_is_told_where_all_processes_have_the_same(monkeypatch):
    """As on kernels before 6.9, whose pidfds have the inode of everything that is no file."""
    status = os.fstat(descriptor := os.pidfd_open(os.getpid()))
    os.close(descriptor)
    monkeypatch.setattr(numbers, "_shared_by_all", lambda: (status.st_dev, status.st_ino))
    assert own_number() == 0


def test_a_number_that_the_wire_has_no_room_for_is_not_told(monkeypatch):
    number = own_number()
    for most, told in ((number, number), (number - 1, 0)):
        monkeypatch.setattr(numbers, "_MAX", most)
        assert own_number() == told


def test_a_system_without_pidfds_has_no_numbers(monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    assert own_number() == 0


@pytest.mark.parametrize("kind", ["none", "tcp", "an older kernel"])
def test_streams_that_say_nothing_of_a_process(kind, monkeypatch):
    if kind == "none":
        assert process_of_stream(None) == -1
        return
    family = socket.AF_INET if kind == "tcp" else socket.AF_UNIX
    if kind != "tcp":
        monkeypatch.setattr(numbers, "_SO_PEERPIDFD", 9999)
    with socket.socket(family) as one:
        assert process_of_stream(one) == -1
