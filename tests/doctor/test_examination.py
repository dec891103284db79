"""The whole: what is asked for, what comes of it, and the command."""

import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest

from kvxfer.errors import UnreachableError, UsageError
from kvxfer.tools.doctor import examination, remote
from kvxfer.tools.doctor.examination import Examination
from kvxfer.tools.doctor.findings import Status, fail, ok, shown, skipped, warn
from kvxfer.tools.doctor.machine import Machine


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "kvxfer.tools.cli", "doctor", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )


@pytest.mark.parametrize(
    ("findings", "code"),
    [([ok("a", "")], 0), ([warn("a", "", "x"), skipped("b", "")], 0), ([ok("a", ""), fail("b", "", "x")], 1), ([], 0)],
)
def test_the_exit_code_says_whether_something_fails(findings, code):
    whole = Examination(lambda _: None, found=findings)
    assert whole.exit_code == code
    assert whole.to_json()["ok"] is (code == 0)
    assert sum(whole.to_json()["count"].values()) == len(findings)


def test_a_terminal_obeys_nothing_that_a_peer_says():
    from rich.console import Console

    console = Console(width=80, file=(printed := io.StringIO()))
    console.print(shown([fail("peer", "\x1b[2J\x07 here", "mend it")]))
    assert "?[2J? here" in printed.getvalue()


def test_what_cannot_be_imported_is_not_tried(monkeypatch, tmp_path):
    monkeypatch.setattr(examination, "check_pair", lambda *_: pytest.fail("it was tried"))
    machine = Machine(root=tmp_path, package=lambda _: "", cuda=lambda: "", ucx=lambda: "")
    whole = Examination(lambda _: None, machine)
    whole.local()
    assert {one.name for one in whole.found if one.status is Status.FAIL} == {"torch", "nixl"}


def test_a_machine_without_gpus_has_none_to_be_asked_for(tmp_path):
    with pytest.raises(UsageError, match="CUDA shows no GPU here"):
        Examination(lambda _: None, Machine(root=tmp_path), "cuda").local()


@pytest.mark.parametrize(
    "error", [UnreachableError("nobody there"), KeyError("nbytes"), ValueError("x"), OverflowError("y")]
)
def test_a_peer_that_fails_is_a_finding(monkeypatch, tmp_path, error):
    async def broken(*_):
        yield ok("peer", "")
        raise error

    monkeypatch.setattr(remote, "check_peer", broken)
    monkeypatch.setenv("UCX_LOG_FILE", "")
    monkeypatch.setenv("UCX_LOG_LEVEL", "warn")
    monkeypatch.setenv("UCX_PROTO_INFO", "n")
    whole = Examination(lambda _: None, Machine(root=tmp_path))
    whole.peer("code@tcp:x:1")
    last = whole.found[-1]
    assert (last.name, last.status) == ("peer", Status.FAIL)
    assert str(error) in last.seen


def test_this_machine():
    done = run("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert found["shared memory"]["status"] == "ok"
    assert found["nixl agent"]["status"] == "ok"
    routes = [name for name in found if "->" in name]
    assert len(routes) == 8, "four routes, in both directions"
    for name in routes:
        route, facts = name.split(" ")[0], found[name]["facts"]
        assert (facts["route"], facts["reasons"]) == (route, [])
        assert facts["gbps"] > 0
        assert route == "mapped" or facts["lane"], "UCX says which lane it took"


def test_an_agent_that_cannot_be_made_fails_and_no_process_stays():
    done = run("--device", "cpu", UCX_TLS="bogus")
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("nixl agent")]
    assert line.split()[2] == "fail"
    assert "unset UCX_TLS (it is bogus)" in done.stdout
    assert "without a NIXL agent there are no transfers to probe" in done.stdout


def test_a_process_that_dies_is_a_finding(monkeypatch, tmp_path):
    (tmp_path / "doctor_bodies.py").write_text("import os\n\ndef die(side, names):\n    os._exit(9)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import doctor_bodies  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(examination, "_examine", doctor_bodies.die)
    found = []
    examination.check_pair(("cpu", "cpu"), found.append)
    del sys.modules["doctor_bodies"]
    assert [(one.name, one.status) for one in found] == [("two processes", Status.FAIL)]
    assert "the process ended early, with exit code 9" in found[0].seen
    assert multiprocessing.active_children() == []


def test_a_doctor_that_is_asked_to_end_leaves_no_folder(tmp_path):
    arguments = "-m kvxfer.tools.cli doctor --device cpu --json --listen tcp:127.0.0.1:0"
    command = [sys.executable, *arguments.split()]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)})
    assert process.stderr is not None
    try:
        assert "kvxfer doctor --peer" in process.stderr.readline()
        assert list(tmp_path.iterdir())
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait(30)
        process.stderr.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--listen", "unix:/x", "--peer", "y"], "not both"),
        (["--peer", "nonsense"], "paste what the listening side has printed"),
        (["--peer", "code@tcp:x"], "an endpoint is"),
        (["--listen", "tcp:127.0.0.1"], "an endpoint is"),
        (["--listen", "tcp:0.0.0.0:0"], "name the address at which the other side reaches this host"),
        (["--listen", "unix"], "give a path that both sides see"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(command, arguments, said):
    code, out, err = command("doctor", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1
