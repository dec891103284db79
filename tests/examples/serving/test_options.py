"""What is asked of the command line and makes no sense is said in a line, before anything is started."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from examples.serving.__main__ import main

ROOT = Path(__file__).parents[3]


def run(*options):
    command = [sys.executable, "-m", "examples.serving", *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100, check=False)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--batch", "0"], "--batch: 0 is not from 1"),
        (["--chunk", "0"], "--chunk: 0 is not from 1"),
        (["--prefills", "-1"], "--prefills: -1 is not from 0"),
        (["--decodes", "0"], "--decodes: 0 is not from 1"),
        (["--port", "65536"], "--port: 65536 is not from 0 to 65535"),
        (["--admin", "127.0.0.1:0"], "--admin is of one prefill or decode server"),
        (["router", "--decode", "http://x", "--admin", "127.0.0.1:0"], "--admin is of one prefill or decode server"),
        (["--decode", "http://127.0.0.1:9"], "--decode are of a router"),
        (["router"], "a router needs --decode"),
    ],
)
def test_options_that_nobody_reads_or_could_use_are_refused(monkeypatch, capsys, options, says):
    monkeypatch.setattr(sys, "argv", ["serving", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_a_process_ends_with_what_is_wrong_as_its_last_line():
    done = run("router")
    assert (done.returncode, done.stdout) == (2, "")
    assert "a router needs --decode" in done.stderr.splitlines()[-1]


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("router", "--decode", "http://127.0.0.1:9", "--port", str(port))
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf"127\.0\.0\.1:{port} cannot be listened on: .*in use\n", done.stderr)


def test_a_server_that_cannot_start_says_why_and_ends_like_a_program():
    done = run("--port", "0", "--prefills", "0", "--device", "nonsense")
    assert done.returncode == 1
    assert "decode 0 has ended with code 3" in done.stdout
    assert "nonsense" in done.stderr
    assert "Fatal Python error" not in done.stderr
