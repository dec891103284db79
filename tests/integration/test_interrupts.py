"""Ctrl-C, as a real signal to a process of its own."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def test_ctrl_c_in_every_await_and_in_calls_that_block():
    """The process says how often it pressed Ctrl-C on itself in the midst of each; all of its checks held."""
    command = [sys.executable, "-W", "error", str(HERE / "interrupted.py"), "awaits", "calls"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "never retrieved" not in done.stderr
    assert "was never awaited" not in done.stderr
    awaits, calls = map(int, done.stdout.split())
    assert awaits > 3
    assert calls == 3
