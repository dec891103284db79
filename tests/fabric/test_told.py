"""Which lane UCX took to whom: by NIXL in a process of its own, and step by step with what UCX might write."""

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvxfer.fabric import told
from kvxfer.fabric.port import Operation, Told
from kvxfer.fabric.told import LaneBook, UcxLog

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
VARIABLES = ("UCX_PROTO_INFO", "UCX_LOG_FILE", "UCX_LOG_LEVEL", "UCX_LOG_FILE_SIZE", "UCX_LOG_FILE_ROTATE")
CMA, TCP = "cma/memory", "tcp/lo"

# ---- NIXL ------------------------------------------------------------------------------------------------------------

PROLOGUE = """
    import logging, os, sys
    from ends import TCP, Agent, descriptors, finish
    from kvxfer.fabric.port import Operation
    from kvxfer.fabric.ucx import is_tcp
    logging.basicConfig(level=logging.WARNING)

    def files():
        return {os.readlink(one.path) for one in os.scandir("/proc/self/fd") if os.path.exists(one.path)}

    def go(a, b, operation=Operation.WRITE):
        peer = a.transport.connect(b.transport.metadata(b.tokens))
        finish(a.transport.post(peer, operation, descriptors(a.buffers[0]), descriptors(b.buffers[0])), a, b)
        return a.transport.told(peer)

    first = Agent("a")
"""
LANES = """
    before = dict(os.environ)
    near, slow, third, back = Agent("near"), Agent("slow", backend_params=TCP), Agent("third"), Agent("b")
    (to_near,) = go(first, near)
    (to_slow,) = go(first, slow)
    (to_third,) = go(first, third)
    assert to_near.sure and to_slow.sure and not to_third.sure
    assert not is_tcp(to_near.over) and is_tcp(to_slow.over)
    assert to_third.lanes == (to_near.over, to_slow.over), "a lane that was chosen before: which one is not known"
    assert [one.operation for one in go(first, near, Operation.READ)] == ["write", "read"]
    first.transport.disconnect("slow")
    assert first.transport.told("slow") == ()
    (again,) = go(back, near)
    assert again == to_near, "one lane was chosen, so it is that"
    assert back.transport.renew()
    assert back.transport.told("near") == (), "another agent"
    assert dict(os.environ) == before, "children are told nothing"
    for one in (first, near, slow, third):
        one.close()
    back.transport.close()
    print(sorted(one for one in files() if "ucx" in one))
"""


def run(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a process of its own, since UCX decides once a process where it writes."""
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (here, here.parent / "integration", Path(told.__file__).parents[2])))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "NIXL_"))}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROLOGUE) + textwrap.dedent(script)],
        env={**kept, "PYTHONPATH": path, "TMPDIR": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@needs_nixl
def test_lanes_are_told_by_peer_and_operation_and_nothing_is_left(tmp_path):
    done = run(LANES, tmp_path, UCX_PIGEONS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "['/memfd:kvxfer-ucx (deleted)']" in done.stdout, "memory without a name, one a process"
    assert list(tmp_path.iterdir()) == []
    (said,) = [line for line in done.stderr.splitlines() if "ucx_complained" in line and "PIGEONS" in line]
    assert "unused environment variable: UCX_PIGEONS" in said
    assert "remote memory" not in done.stdout + done.stderr, "UCX's tables are nobody's business"


@needs_nixl
def test_who_has_set_where_ucx_writes_finds_it_there(tmp_path):
    file = tmp_path / "mine"
    done = run(
        "print(first.transport.told('b'), files())\nfirst.close()",
        tmp_path,
        UCX_LOG_FILE=str(file),
        UCX_PROTO_INFO="y",
        UCX_LOG_LEVEL="warn",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "UCX_PROTO_INFO is set, so UCX writes where it says" in done.stdout
    assert "memfd:kvxfer" not in done.stdout
    assert "remote memory write" in file.read_text()


# ---- what is set -----------------------------------------------------------------------------------------------------


@pytest.fixture
def unset(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(told, "_libraries", list)


@pytest.mark.parametrize(
    ("name", "value", "level", "ours"),
    [
        ("UCX_LOG_FILE", "", "fatal", False),
        ("UCX_PROTO_INFO", "n", "fatal", False),
        ("UCX_LOG_LEVEL", "info", "info", False),
        ("UCX_LOG_LEVEL", "FATAL", "FATAL", True),
        ("UCX_TLS", "all", "warn", True),
    ],
)
def test_what_is_set_wins(unset, monkeypatch, name, value, level, ours):
    monkeypatch.setenv(name, value)
    log = UcxLog()
    with log.telling(os.environ, quiet=True):
        assert os.environ["UCX_LOG_LEVEL"] == level
        assert ("UCX_LOG_FILE_SIZE" in os.environ) is ours
        assert os.environ.get("UCX_LOG_FILE", "").startswith("/proc/") is ours
        assert (log.why_not == "") is ours
    assert os.environ.get(name) == value
    assert "UCX_LOG_FILE_SIZE" not in os.environ
    if ours:
        os.close(log._file)


@pytest.mark.parametrize(("loaded", "quiet"), [(["libucs.so.0"], True), ([], False)])
def test_ucx_that_writes_elsewhere_is_told_nothing(unset, monkeypatch, loaded, quiet):
    monkeypatch.setattr(told, "_libraries", lambda: loaded)
    log = UcxLog()
    with log.telling(os.environ, quiet=quiet):
        assert "UCX_PROTO_INFO" not in os.environ, "its tables would come on the terminal"
    assert log.why_not


def test_what_cannot_be_looked_at_is_a_reason_and_no_error(unset, monkeypatch):
    def unreadable():
        raise OSError("too many open files")

    monkeypatch.setattr(told, "_libraries", unreadable)
    log = UcxLog()
    with log.telling(os.environ, quiet=True):
        assert "UCX_LOG_FILE" not in os.environ
    assert "too many open files" in log.why_not
    monkeypatch.setattr(told, "_libraries", list)
    with log.telling(os.environ, quiet=True):
        assert os.environ["UCX_LOG_FILE"].startswith("/proc/"), "another agent is made anew, not beside the first"
        monkeypatch.setattr(told, "_libraries", unreadable)
    assert log.why_not == "UCX cannot be asked to write what it holds back"
    os.close(log._file)


# ---- step by step ----------------------------------------------------------------------------------------------------


class Ucx:
    """Writes tables when it is told to, in the middle of whatever is done."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(told, "_libraries", list)
        self.log = UcxLog()
        self.log._file = os.memfd_create("test")
        self.log._flush = lambda: None
        self.place = 0

    def write(self, lane, operation="write", agent="agent"):
        title = f"remote memory {operation} by ucp_{operation}* from host memory to host"
        for line in (f"{agent} intra-node cfg#1", title, f"0..inf | zero-copy | {lane}"):
            self.say(f"  | {line} |")
        self.say("  +---+")

    def say(self, text):
        self.place += os.pwrite(self.log._file, f"[1.5] [vm:{os.getpid()}:0] {text}\n".encode(), self.place)

    def begin_anew(self):
        os.ftruncate(self.log._file, 0)
        self.place = 0


@pytest.fixture
def ucx(monkeypatch):
    made = Ucx(monkeypatch)
    yield made
    os.close(made.log._file)


def post(book, peer, write=lambda: None, operation=Operation.WRITE):
    what = book.posting(peer, operation, "DRAM", "DRAM")
    write()
    book.posted(peer, what)
    return book.told(peer)


def over(*lanes, sure=True, operation="write"):
    return (Told(operation, "host", "host", lanes, sure),)


def test_a_table_belongs_to_whom_was_posted_to(ucx):
    book = LaneBook(ucx.log, "agent")
    assert post(book, "p", lambda: ucx.write(CMA)) == over(CMA)
    assert post(book, "q") == over(CMA), "chosen before, and there is no other"
    assert post(book, "r", lambda: ucx.write(TCP)) == over(TCP)
    assert post(book, "s") == over(CMA, TCP, sure=False)
    assert post(book, "p", lambda: ucx.write(TCP)) == over(CMA, TCP), "of other memory"
    assert book.told("q") == over(CMA), "it took what there was then"
    assert post(book, "t", operation=Operation.READ) == over(sure=False, operation="read"), "nothing was written"


def test_what_an_agent_writes_to_itself_goes_a_way_of_its_own(ucx):
    book = LaneBook(ucx.log, "agent")
    ucx.write("self/memory")
    book.tried()
    assert post(book, "p") == over(sure=False), "no peer takes that way"
    assert post(book, "agent") == over("self/memory")
    book.forget("agent")
    assert post(book, "q", lambda: ucx.write(CMA)) == over(CMA)
    assert post(book, "agent") == over("self/memory"), "UCX tells its own endpoint from others"


def test_what_is_written_between_posts_belongs_to_who_is_being_connected(ucx):
    book = LaneBook(ucx.log, "agent")
    post(book, "p", lambda: ucx.write(CMA))
    ucx.write(TCP)
    assert post(book, "q", lambda: ucx.write("rc/x")) == over("rc/x"), "not what came before"
    assert book.told("p") == over(CMA, TCP)
    ucx.write("a/b")
    book.strays()
    assert book.told("p") == over(CMA, TCP, "a/b", sure=False), "of both it may be"
    assert book.told("q") == over("rc/x", "a/b", sure=False)
    for peer in "pq":
        book.connected(peer)
    ucx.write("c/d")
    book.strays()
    ucx.write("e/f")
    book.strays(ours=False)
    assert book.told("q") == over("rc/x", "a/b", sure=False)


def test_what_is_written_for_a_post_that_fails_is_about_no_other_peer(ucx):
    book = LaneBook(ucx.log, "agent")
    post(book, "p", lambda: ucx.write(CMA))
    what = book.posting("q", Operation.WRITE, "DRAM", "DRAM")
    ucx.write(TCP)
    book.failed("q", what)
    book.strays()
    assert (book.told("p"), book.told("q")) == (over(CMA), over(TCP))
    assert post(book, "r") == over(CMA, TCP, sure=False), "it was chosen"


def test_agents_of_one_process_are_told_apart(ucx):
    first, second = LaneBook(ucx.log, "agent"), LaneBook(ucx.log, "other")
    assert post(first, "p", lambda: (ucx.write(TCP, agent="other"), ucx.write(CMA))) == over(CMA)
    assert post(second, "p", lambda: ucx.write("rc/x", agent="third")) == over(sure=False)
    assert "is called 'agent' too" in str(LaneBook(ucx.log, "agent").told("p"))
    first.close()
    assert post(LaneBook(ucx.log, "agent"), "p", lambda: ucx.write(CMA)) == over(CMA)


def test_what_ucx_begins_anew_is_read_from_its_beginning(ucx):
    book = LaneBook(ucx.log, "agent")
    ucx.say("something long " * 20)
    post(book, "p", lambda: ucx.write(CMA))
    ucx.begin_anew()
    assert post(book, "q", lambda: ucx.write(TCP)) == over(TCP)


def test_half_a_table_takes_no_lane_of_what_comes_after_a_gap(ucx):
    book = LaneBook(ucx.log, "agent")

    def torn():
        ucx.say("  | agent intra-node cfg#1 |")
        ucx.say("  | remote memory write by ucp_put* from host memory to host |")
        book.strays()
        ucx.begin_anew()
        ucx.say(f"  | 0..inf | zero-copy | {TCP} |")
        ucx.say("  +---+")

    assert post(book, "p", torn) == over(sure=False)


def test_complaints_are_logged_once_and_so_many_a_minute(ucx, caplog, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(told.time, "monotonic", lambda: now[0])
    for number in range(told._COMPLAINTS + 5):
        for _ in range(2):
            ucx.say(f"x.c:1 UCX  ERROR no device {number}")
    ucx.log.read()
    assert caplog.text.count("ucx_complained") == told._COMPLAINTS
    now[0] += told._MINUTE
    ucx.say("x.c:1 UCX  WARN  again")
    ucx.log.read()
    assert caplog.text.count("ucx_complained") == told._COMPLAINTS + 1
    assert "message=again dropped=11" in caplog.text, "the second of the last that was logged, and two each of five"
