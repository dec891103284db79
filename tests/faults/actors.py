"""Processes that can be stopped at a step, told to go on, frozen and killed.

actor = Actor(environment={"UCX_TLS": "tcp"})    # a fresh process; some 50 ms, for torch and nixl are there already
card = await actor.open("prefill", ...)          # any method of `staff.Ranks`, several at a time
await actor.halt("leased")                       # it stands still at this step when it gets there
await actor.reached("leased")                    # and says so
actor.stop(); actor.proceed(); actor.thaw()      # frozen; when it is thawed it goes on
actor.end()                                      # killed and reaped, as at the end of `with Actor() as actor`
actor = Actor(apart=True)                        # in a PID namespace of its own, as in another Pod; takes root
"""

import asyncio
import contextlib
import ctypes
import itertools
import logging
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import preloaded

from kvxfer import KvxferError

ANSWER_SECONDS = 20.0
_EXPECTED = (AssertionError, TimeoutError, KvxferError)
_NEW_PIDS, _NEW_MOUNTS = 0x2000_0000, 0x0002_0000
_PRIVATE = 0x4000 | 0x4_0000


class ActorFailedError(Exception):
    """A call failed over there, as it may, or the process is gone."""


class DefectError(Exception):
    """A call raised over there what nothing should."""


class Actor:
    """A process with `Ranks`, each method of which can be awaited here."""

    def __init__(self, environment: Mapping[str, str] | None = None, *, apart: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="actor-"))
        self._wire, theirs = preloaded.CONTEXT.Pipe()
        go, self._go = preloaded.CONTEXT.Pipe(duplex=False)
        given = {**(environment or {}), "TMPDIR": str(self.folder)}
        serve = _serve_apart if apart else _serve
        self.process = preloaded.process(serve, (theirs, go, given))
        self.process.start()
        self._apart = apart
        theirs.close()
        go.close()
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._steps: dict[str, asyncio.Future[float]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments, **options: self._call(name, arguments, options)

    async def reached(self, step: str) -> float:
        """Wait until it stands still there; when that was."""
        self._listen()
        async with asyncio.timeout(ANSWER_SECONDS):
            return await asyncio.shield(self._step(step))

    def proceed(self, what: str = "") -> None:
        """Let it go on from the step at which it stands, doing this first (`cut`: its control streams)."""
        self._go.send(what)

    def kill(self) -> float:
        """SIGKILL, and wait until it is gone; when it was sent."""
        at = time.monotonic()
        for process in _children(self.process.pid) if self._apart else []:
            os.kill(process, signal.SIGKILL)
        if not self._apart:
            self.process.kill()
        self.process.join(20)
        return at

    @property
    def answers(self) -> bool:
        """Whether it lives and is not frozen."""
        return self.process.is_alive() and _state(self.process.pid) != "T"

    def stop(self) -> float:
        """SIGSTOP, and wait until all of it stands still; when it was sent."""
        at = time.monotonic()
        os.kill(self.process.pid, signal.SIGSTOP)
        until = at + ANSWER_SECONDS
        while _state(self.process.pid) != "T":
            if time.monotonic() > until:
                raise TimeoutError("it does not stop")
        return at

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        """Kill, reap, and leave nothing behind. Idempotent."""
        if self._loop is not None:
            self._loop.remove_reader(self._wire.fileno())
            self._loop = None
        with contextlib.suppress(ValueError):
            self.kill()
            self.process.close()  # raises if it still runs
        self._wire.close()
        self._go.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def leave_loop(self) -> None:
        """Forget the event loop of the test that has ended; another one may follow."""
        if self._loop is not None:
            self._loop.remove_reader(self._wire.fileno())
            self._loop = None
        self._calls.clear()
        self._steps.clear()

    async def _call(self, name: str, arguments: Any, options: Any) -> Any:
        self._listen()
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        self._wire.send_bytes(pickle.dumps((number, name, arguments, options)))
        async with asyncio.timeout(ANSWER_SECONDS):
            value, error, expected = await answer
        if error:
            raise (ActorFailedError if expected else DefectError)(f"{name} failed over there: {error}")
        return value

    def _step(self, step: str) -> "asyncio.Future[float]":
        return self._steps.setdefault(step, asyncio.get_running_loop().create_future())

    def _listen(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._wire.fileno(), self._hear)

    def _hear(self) -> None:
        try:
            what, *rest = pickle.loads(self._wire.recv_bytes())
        except (EOFError, OSError):
            if self._loop is not None:
                self._loop.remove_reader(self._wire.fileno())
            for waiting in [*self._calls.values(), *self._steps.values()]:
                if not waiting.done():
                    waiting.set_exception(ActorFailedError("the process is gone"))
                    waiting.exception()  # nobody may be waiting any more
            return
        if what == "reached":
            step, at = rest
            if not self._step(step).done():
                self._step(step).set_result(at)
            return
        number, *outcome = rest
        answer = self._calls.pop(number, None)
        if answer is not None and not answer.done():
            answer.set_result(outcome)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Halts:
    """The actor's side of the pipes: answers calls, and stands still where it was told to."""

    def __init__(self, wire: Connection, go: Connection) -> None:
        self._wire = wire
        self._go = go
        self._lock = threading.Lock()
        self.armed: set[str] = set()

    def halt(self, step: str) -> str:
        """Stand still in this thread until told to go on, if this step was asked for; what to do first."""
        if step not in self.armed:
            return ""
        self.armed.discard(step)
        self.send(("reached", step, time.monotonic()))
        return str(self._go.recv())

    def send(self, item: object) -> None:
        with self._lock:
            self._wire.send_bytes(pickle.dumps(item))

    async def answer_all(self, target: Any) -> None:
        """Run every call as a task of its own, until the pipe is closed."""
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()
        over = loop.create_future()

        def receive() -> None:
            try:
                number, name, arguments, options = pickle.loads(self._wire.recv_bytes())
            except (EOFError, OSError):
                loop.remove_reader(self._wire.fileno())
                over.set_result(None)
                return
            task = loop.create_task(self._answer(number, target, name, arguments, options))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        loop.add_reader(self._wire.fileno(), receive)
        await over

    async def _answer(self, number: int, target: Any, name: str, arguments: Any, options: Any) -> None:
        value, error, expected = None, "", True
        try:
            value = getattr(target, name)(*arguments, **options)
            if asyncio.iscoroutine(value):
                value = await value
        except Exception as raised:  # noqa: BLE001 - whoever called hears of it
            value, error, expected = None, repr(raised), isinstance(raised, _EXPECTED)
        self.send(("answer", number, value, error, expected))


def _serve(wire: Connection, go: Connection, environment: Mapping[str, str]) -> None:
    """The process: one loop, until the pipe is closed."""
    os.environ.update(environment)
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if level := os.environ.get("FAULTS_LOG"):
        logging.basicConfig(level=level, format=f"%(relativeCreated)d {os.getpid()} %(message)s")
    import staff

    halts = Halts(wire, go)

    async def run() -> None:
        await halts.answer_all(staff.Ranks(halts))
        os._exit(0)  # whoever started it is gone, or wants no more of it: nothing is waited for

    asyncio.run(run())


def _serve_apart(wire: Connection, go: Connection, environment: Mapping[str, str]) -> None:
    """The same in a namespace of its own, with its own `/proc`; returns when it has ended."""
    apart()
    child = os.fork()
    if not child:
        own_proc()
        _serve(wire, go, environment)
    wire.close()
    go.close()
    os.waitpid(child, 0)


def apart() -> None:
    """Children of this process are in a new PID namespace from now on.

    Raises:
        OSError: If that is not allowed.
    """
    _call("unshare", _NEW_PIDS | _NEW_MOUNTS)


def own_proc() -> None:
    """Of this process, the first one of its PID namespace: what `/proc` shows."""
    _call("mount", None, b"/", None, _PRIVATE, None)
    _call("mount", b"proc", b"/proc", b"proc", 0, None)


def _call(name: str, *arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
