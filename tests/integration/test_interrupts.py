"""Ctrl-C, as a real signal to a process of its own."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def presses(what: str, limit: float) -> int:
    """How often the process pressed Ctrl-C on itself in the middle of a call; all of its checks held."""
    command = [sys.executable, "-W", "error", str(HERE / "interrupted.py"), what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "never retrieved" not in done.stderr
    assert "was never awaited" not in done.stderr
    return int(done.stdout.split()[-1])


def test_ctrl_c_in_every_await():
    assert presses("awaits", 110) > 3


def test_ctrl_c_in_calls_that_block():
    assert presses("calls", 60) == 3
