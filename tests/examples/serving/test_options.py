"""What is asked of the command line and makes no sense is said in a line, before anything is started."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.serving.__main__ import main
from examples.serving.service import Service, parser

ROOT = Path(__file__).parents[3]


def run(*options, **environment):
    command, environment = [sys.executable, "-m", "examples.serving", *options], os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=100, check=False)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--batch", "0"], "--batch: 0 is not from 1"),
        (["--decodes", "1000"], "--decodes: 1000 is not from 1 to 64"),
        (["--port", "65536"], "--port: 65536 is not from 0 to 65535"),
        (["--admin", "127.0.0.1:0"], "--admin 127.0.0.1:0: it is HOST:PORT, the port of the first of 2 servers from 1"),
        (["--decodes", "2", "--admin", "x:65534"], "the port of the first of 3 servers from 1 to 65533"),
        (["prefill", "--admin", "x:65536"], "--admin x:65536: it is HOST:PORT, the port from 0 to 65535"),
        (["decode", "--admin", "9471"], "--admin 9471: it is HOST:PORT"),
        (["router", "--decode", "http://x", "--admin", "127.0.0.1:1"], "--admin is of prefill and decode servers"),
        (["router"], "a router needs --decode"),
        (["--tp", "x"], "--tp: 'x' is not P:D, ranks of a prefill and of a decode server"),
        (["--tp", "3:1"], "--kv-heads 4 cannot be divided equally among 3 ranks"),
        (["decode", "--device", "cpu,cpu,cpu"], "--kv-heads 4 cannot be divided equally among 3 ranks"),
        (["--kv-heads", "3"], "--hidden 128 is no multiple of 6, the query heads"),
        (["--device", "cpu:3"], "--device: 'cpu:3' is neither cpu, cuda nor cuda:N"),
        (["--device", "cuda", "--decodes", "2"], "--device: there is no cuda:1, cuda:2 here: torch finds 1 GPUs"),
    ],
)
def test_options_that_nobody_reads_or_could_use_are_refused(monkeypatch, capsys, options, says):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["serving", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        service = Service(parser().parse_args(["--port", str(port)]))
        with pytest.raises(SystemExit, match=f"127.0.0.1:{port} cannot be listened on"):
            service.start()
        assert service.processes == {}
        done = run("router", "--decode", "http://127.0.0.1:9", "--port", str(port))
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf"127\.0\.0\.1:{port} cannot be listened on: .*in use\n", done.stderr)


def test_the_service_ends_with_a_server_that_cannot_start():
    done = run("--port", "0", "--prefills", "0", KVXFER_NONSENSE="1")
    assert (done.returncode, done.stdout) == (1, "decode 0 has ended with code 3\n")
    assert "KVXFER_NONSENSE" in done.stderr
