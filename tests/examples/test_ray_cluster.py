"""The example for Ray, as it stands, with a cluster whose nodes are processes of this machine.

Ray starts processes that outlive a parent which is killed. So the example gets a session of its own, and at the end, be
it a failure, whatever is in that session is killed.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 240  # it took 46 on two cores with a load of 5: starting four Ray nodes and five workers is most of it
REAP_SECONDS = 30
SHARED = Path("/dev/shm")
SHARED_BYTES = 512 << 20


def cannot_run():
    """Why Ray cannot run here, or nothing."""
    if missing := [name for name in ("ray", "nixl") if find_spec(name) is None]:
        return f"{missing[0]} is not installed: pip install ray"
    if not SHARED.is_dir() or shutil.disk_usage(SHARED).free < SHARED_BYTES:
        return f"{SHARED} has less than {SHARED_BYTES >> 20} MiB free, which the nodes' object stores need"
    return ""


def members(session):
    """Processes of a session that have not ended."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # gone meanwhile
            state, _, _, number = path.read_text().rpartition(")")[2].split()[:4]
            if int(number) == session and state not in "ZX":
                yield int(path.parent.name)


def end(session):
    deadline = time.monotonic() + REAP_SECONDS
    while found := list(members(session)):
        assert time.monotonic() < deadline, f"processes {found} do not end"
        for number in found:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.05)


@contextmanager
def running(command, folder, **environment):
    """A process that leads a session of its own, of which nothing is left when the block is."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVXFER_", "RAY_"))}
    path = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH"))))
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=folder,
            env=kept | {"PYTHONPATH": path, "TMPDIR": str(folder)} | environment,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            end(process.pid)
            process.wait(REAP_SECONDS)


@pytest.fixture
def folder():
    """With a short name, since Ray puts Unix sockets below it."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.mark.skipif(bool(cannot_run()), reason=cannot_run())
@pytest.mark.timeout(SECONDS + 60)
def test_every_answer_is_right_though_nodes_join_and_are_lost(folder):
    settings = {"RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    command = [sys.executable, "-W", "error", str(ROOT / "examples/ray_cluster.py")]
    with running(command, folder, **settings) as process:
        code = process.wait(SECONDS)
    out, err = ((folder / name).read_text() for name in ("out", "err"))
    assert code == 0, out + err
    assert re.findall(r"^(.*): (\d+) engines for prefill, (\d+) for decode$", out, re.MULTILINE) == [
        ("three nodes", "1", "1"),
        ("a node has joined", "2", "2"),
        ("a node is lost", "2", "1"),
        ("a node is lost", "1", "1"),
    ]
    said = re.search(r"^(\d+) answers are right, 0 wrong; (\d+) attempts had failed$", out, re.MULTILINE)
    assert said is not None, out
    assert int(said[1]) >= 6 * 3 * 4, "six clients had three answers in each of four stages"
    assert int(said[2]) >= 2, "requests were under way on both nodes that were lost"


def test_what_a_killed_program_leaves_is_ended(folder):
    """As a driver of Ray that is killed leaves its nodes: in process groups of their own, and deaf to SIGTERM."""
    left = (
        "import os, signal; os.setpgid(0, 0); signal.signal(15, signal.SIG_IGN); print(1, flush=True); signal.pause()"
    )
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {left!r}]).wait()"
    with running([sys.executable, "-c", program], folder) as process:
        deadline = time.monotonic() + REAP_SECONDS
        while not (folder / "out").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
        process.wait(REAP_SECONDS)
        assert len(list(members(process.pid))) == 1, "it outlives its parent"
    assert list(members(process.pid)) == []
