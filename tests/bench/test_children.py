"""Child processes end well, are named when they fail, and never outlive the run."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvxfer.errors import MissingExtraError
from kvxfer.tools.bench.children import BenchFailedError, Step, conduct

BODIES = textwrap.dedent(
    """
    import asyncio, os, signal
    from kvxfer.tools.bench.children import Step

    async def lead(side, spec):
        side.report(Step("begun"))
        side.send(spec)
        side.report(Step(f"heard {side.receive()}"))

    async def follow(side, spec):
        heard = await side.hear()
        side.send(heard + 1)

    async def fail(side, spec):
        async with asyncio.TaskGroup() as group:
            group.create_task(raising())

    async def raising():
        raise ValueError("no such thing")

    async def die(side, spec):
        os.kill(os.getpid(), signal.SIGKILL)

    async def wait(side, spec):
        await side.hear()

    async def stay(side, spec):
        side.report(Step("here"))
        signal.pause()
    """
)


@pytest.fixture
def bodies(tmp_path, monkeypatch):
    """Functions that a child finds by name."""
    (tmp_path / "bench_bodies.py").write_text(BODIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    import bench_bodies  # pyright: ignore[reportMissingImports]

    yield bench_bodies
    del sys.modules["bench_bodies"]


def run(bodies, spec=41, **options):
    said = []
    conduct(bodies, spec, said.append, devices=dict.fromkeys(bodies, "cpu"), **options)
    return [one.label for one in said if isinstance(one, Step)]


@pytest.mark.parametrize("uvloop", [False, True])
def test_two_children_talk_and_report(bodies, uvloop):
    said = run({"a": bodies.lead, "b": bodies.follow}, uvloop=uvloop)
    assert [one for one in said if "ended" not in one] == ["begun", "heard 42"]
    assert sorted(one for one in said if "ended" in one) == ["a ended", "b ended"]


def test_without_uvloop_nothing_is_started(bodies, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with pytest.raises(MissingExtraError, match="pip install uvloop"):
        run({"a": bodies.die}, uvloop=True)


@pytest.mark.parametrize(
    ("does", "words", "options"),
    [
        ("wait fail", r"^b failed: ValueError: no such thing$", {}),
        ("die wait", r"^a failed: the process ended early, with exit code -9$", {}),
        ("wait wait", r"nothing was heard of a, b for 0\.5 s", {"silence": 0.5}),
    ],
)
def test_a_child_that_raises_or_is_killed_or_silent_is_named(bodies, does, words, options):
    with pytest.raises(BenchFailedError, match=words):
        run({name: getattr(bodies, what) for name, what in zip("ab", does.split(), strict=True)}, **options)


def test_an_interrupt_ends_all(bodies):
    def interrupted(item):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conduct({"a": bodies.stay, "b": bodies.wait}, 0, interrupted, devices={"a": "cpu", "b": "cpu"})


PROGRAM = """
import signal, sys
import bench_bodies
from kvxfer.tools.bench.children import conduct

def show(item):
    print(item.label, flush=True)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # as the command has it
    conduct({"a": bench_bodies.stay, "b": bench_bodies.wait}, 0, show, devices={"a": "cpu", "b": "cpu"})
"""


STRUCK = """
import os, signal
from multiprocessing import util

def started(path, arguments, files, *, begin=util.spawnv_passfds):
    process = begin(path, arguments, files)
    if b"--multiprocessing-fork" in map(os.fsencode, arguments):  # and it was not yet told what to do
        os.kill(os.getpid(), {number})
    return process

util.spawnv_passfds = started
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_as_a_child_starts_is_heard_of(bodies, tmp_path, number):
    program = tmp_path / "program.py"
    program.write_text(STRUCK.format(number=int(number)) + PROGRAM)
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (143 if number is signal.SIGTERM else -number, "")
    assert done.stderr.count("Traceback") == (number is signal.SIGINT), done.stderr  # the program's own


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_child_outlives_the_parent(bodies, tmp_path, number):
    """Ctrl-C on a terminal goes to the whole group; a killed parent can tell nobody."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        (os.killpg if number is signal.SIGINT else os.kill)(process.pid, number)
        _, err = process.communicate(timeout=60)  # every process of the group has closed the pipes
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode == (143 if number is signal.SIGTERM else -number)
    assert err.count("Traceback") == (number is signal.SIGINT), err  # the program's own, of the KeyboardInterrupt
    if number is signal.SIGKILL:  # nobody was left to remove it
        for folder in Path(os.environ["TMPDIR"]).iterdir():
            folder.rmdir()
