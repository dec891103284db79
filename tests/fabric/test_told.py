"""Which lanes UCX took: by NIXL in a process of its own, and step by step with what UCX might write."""

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvxfer.fabric import told
from kvxfer.fabric.port import Told
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
        return a.transport.told()

    first = Agent("a")
"""
LANES = """
    before = dict(os.environ)
    near, slow, back = Agent("near"), Agent("slow", backend_params=TCP), Agent("b")
    (to_near,) = go(first, near)
    assert to_near.sure and not is_tcp(to_near.over)
    (both,) = go(first, slow)
    assert not both.sure and both.lanes[0] == to_near.over and is_tcp(both.lanes[1])
    assert [one.operation for one in go(first, near, Operation.READ)] == ["write", "read"]
    (to_slow,) = go(back, slow)
    assert to_slow.sure and is_tcp(to_slow.over), "no other agent's"
    assert back.transport.renew()
    assert back.transport.told() == (), "another agent"
    assert dict(os.environ) == before, "children are told nothing"
    for one in (first, near, slow):
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
def test_lanes_are_told_by_agent_and_operation_and_nothing_is_left(tmp_path):
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
        "print(first.transport.told(), files())\nfirst.close()",
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


def over(*lanes, operation="write"):
    return Told(operation, "host", "host", lanes, len(lanes) == 1)


def test_an_agent_has_the_lanes_that_its_tables_name(ucx):
    book = LaneBook(ucx.log, "agent")
    assert book.told() == ()
    ucx.write(CMA)
    assert book.told() == book.told() == (over(CMA),)
    ucx.write(CMA)
    ucx.write(TCP)
    ucx.write(TCP, "read")
    assert book.told() == (over(CMA, TCP), over(TCP, operation="read"))


def test_what_an_agent_writes_to_itself_goes_a_way_of_its_own(ucx):
    book = LaneBook(ucx.log, "agent")
    ucx.write("self/memory")
    book.tried()
    ucx.write(CMA)
    assert book.told() == (over(CMA),), "no peer takes that way"


def test_agents_of_one_process_are_told_apart(ucx):
    first, second = LaneBook(ucx.log, "agent"), LaneBook(ucx.log, "other")
    ucx.write(TCP, agent="other")
    ucx.write(CMA)
    ucx.write("rc/x", agent="third")
    assert (first.told(), second.told()) == ((over(CMA),), (over(TCP),))
    assert "is called 'agent' too" in str(LaneBook(ucx.log, "agent").told())
    first.close()
    again = LaneBook(ucx.log, "agent")
    ucx.write("rc/x")
    assert again.told() == (over("rc/x"),)


def test_what_ucx_begins_anew_is_read_from_its_beginning(ucx):
    book = LaneBook(ucx.log, "agent")
    ucx.say("something long " * 20)
    ucx.write(CMA)
    book.read()
    ucx.begin_anew()
    ucx.write(TCP)
    assert book.told() == (over(CMA, TCP),)


def test_half_a_table_takes_no_lane_of_what_comes_after_a_gap(ucx):
    book = LaneBook(ucx.log, "agent")
    ucx.say("  | agent intra-node cfg#1 |")
    ucx.say("  | remote memory write by ucp_put* from host memory to host |")
    book.read()
    ucx.begin_anew()
    ucx.say(f"  | 0..inf | zero-copy | {TCP} |")
    ucx.say("  +---+")
    assert book.told() == ()


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
