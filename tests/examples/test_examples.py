"""Every example runs, as it stands in the repository, and says what its first lines promise."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SECONDS = 60
REAP_SECONDS = 10

nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, cuda])])


@contextmanager
def running(name, *arguments, tmp_path, **options):
    """An example as a process of its own, which is gone when the block is left."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVXFER_")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment |= {"PYTHONPATH": path, "TMPDIR": str(tmp_path)}  # its private socket is made in there
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(EXAMPLES / name), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - a shell's background jobs ignore it
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=REAP_SECONDS)


def outcome(process, text=None):
    """Exit code, standard output and standard error of a process that ends by itself."""
    out, err = process.communicate(text, timeout=SECONDS)
    return process.returncode, out, err


def run(name, tmp_path):
    with running(name, tmp_path=tmp_path) as process:
        code, out, err = outcome(process)
    assert code == 0, err
    return out.splitlines()


@pytest.fixture
def folder(tmp_path_factory):
    """A folder with a short name: the path of a Unix socket has at most 107 bytes."""
    return tmp_path_factory.mktemp("e")


@nixl
@devices
def test_prefill_and_decode_by_a_file(folder, device):
    ticket = folder / "ticket.json"
    with running("prefill.py", ticket, "--device", device, tmp_path=folder) as prefill:
        wait_for(ticket, prefill)
        assert ticket.stat().st_mode & 0o077 == 0, "a ticket is a secret"
        with running("decode.py", ticket, "--device", device, tmp_path=folder) as decode:
            code, out, err = outcome(decode)
        assert code == 0, out + err
        assert outcome(prefill)[0] == 0
    assert re.search(r"^decode: 16384000 bytes by (mapped|staged|direct) in [\d.]+ ms$", out, re.MULTILINE)
    here, there = re.findall(r"\b[0-9a-f]{16}\b", out)
    assert here == there
    assert list(folder.glob("kvxfer-*")) == [], "the private sockets are gone"


@nixl
def test_prefill_and_decode_by_standard_output(folder):
    with running("prefill.py", tmp_path=folder) as prefill:
        assert prefill.stdout is not None
        line = prefill.stdout.readline()
        assert json.loads(line)["request"] == "req-1"
        with running("decode.py", tmp_path=folder) as decode:
            code, out, err = outcome(decode, line)
        assert code == 0, out + err
        code, out, err = outcome(prefill)
        assert (code, out) == (0, "")
    assert re.fullmatch(r"prefill: Released, [0-9a-f]{16}\n", err)


@nixl
def test_ctrl_c_ends_both_in_a_line_and_leaves_no_ticket(folder):
    ticket = folder / "ticket.json"
    with running("decode.py", ticket, tmp_path=folder) as decode:
        assert decode.stderr is not None
        assert decode.stderr.readline().startswith(f"decode: waiting for {ticket}, which prefill.py writes")
        decode.send_signal(signal.SIGINT)
        assert outcome(decode) == (1, "", "decode: given up\n")
    with running("prefill.py", ticket, tmp_path=folder) as prefill:
        wait_for(ticket, prefill)
        prefill.send_signal(signal.SIGINT)
        assert outcome(prefill) == (1, "", "prefill: given up; the ticket is worth nothing any more\n")
    assert list(folder.iterdir()) == []


@nixl
@pytest.mark.parametrize(("name", "ticket"), [("decode.py", '{"v": 1, "eng'), ("prefill.py", None)])
def test_a_ticket_that_cannot_be_read_or_written_is_told_of_in_a_line(folder, name, ticket):
    path = folder / "a-file" / "ticket.json"
    if ticket is None:
        path.parent.touch()
    else:
        path.parent.mkdir()
        path.write_text(ticket)
    with running(name, path, tmp_path=folder) as process:
        code, out, err = outcome(process)
    assert (code, out) == (1, "")
    assert re.fullmatch(rf"{name[:-3]}: \w+Error: [^\n]+\n", err), err


def test_loopback(folder):
    assert run("loopback.py", folder) == [
        "whole blocks equal: True",
        "last 8 of 16 tokens of the third block untouched: True",
        "offer: Released",
        "fetch: TransferFailedError of blocks {'default': (0,)}",
        "offer: Expired after 120 s",
    ]


@nixl
def test_fan_in(folder):
    assert run("fan_in.py", folder) == [
        "1638400 bytes from 2 ranks; offers: Released",
        "every head where it belongs: True",
    ]


@nixl
def test_adapter(folder):
    assert run("adapter.py", folder) == [
        "running: ['request-0', 'request-1', 'request-2']",
        "free again at the prefill engine: 32 of 32",
        *(f"request-{number} is as it was: True" for number in range(3)),
    ]


def test_no_example_is_left_out():
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    tested = set(re.findall(r'"(?:examples/)?(\w+\.py)"', tests))
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def wait_for(path, process):
    """Until a process has written a whole line into a file."""
    import time

    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if path.exists() and path.read_text().endswith("\n"):
            return
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    pytest.fail(f"{path} was not written within {SECONDS} s")
