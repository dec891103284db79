"""Child processes of a benchmark, of the demo and of the doctor: started, listened to, and reaped whatever happens.

Each child runs one function with a `Side`, by which it reports to the parent and talks to the other child. A child that
fails says so by name; the parent then ends the others and raises. Ctrl-C reaches the parent alone, which ends the rest.
A child whose parent is gone ends by itself.
"""

import asyncio
import importlib
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

from kvxfer.errors import MissingExtraError

__all__ = ["BenchFailedError", "Body", "PeerGoneError", "Side", "Step", "collect", "conduct"]

_JOIN_SECONDS: Final = 20.0
_SILENCE_SECONDS: Final = 600.0
_PEER_GONE: Final = 3
"""Exit code of a child that ended because the other one had: not the cause."""

Pipes: TypeAlias = "Connection[Any, Any]"


class BenchFailedError(Exception):
    """A benchmark did not come to its end; the message says which process failed and how."""


class PeerGoneError(Exception):
    """The other child has ended."""


@dataclass(frozen=True, slots=True)
class Step:
    """A child has got on by one step."""

    label: str


@dataclass(frozen=True, slots=True)
class _Broken:
    """A child failed."""

    name: str
    error: str


class Side:
    """What a child has: its device, a folder, the parent to report to, and the other child to talk to."""

    def __init__(self, name: str, device: str, folder: Path, parent: Pipes, other: "Pipes | None") -> None:
        self.name: Final = name
        self.device: Final = device
        self.folder: Final = folder
        self._parent = parent
        self._other = other
        self._heard: asyncio.Queue[Any] | None = None

    def report(self, item: object) -> None:
        """Say something to the parent."""
        self._parent.send(item)

    def send(self, item: object) -> None:
        """Say something to the other child.

        Raises:
            PeerGoneError: If it has ended.
        """
        try:
            self._across.send(item)
        except OSError as error:
            raise PeerGoneError(str(error)) from error

    def receive(self) -> Any:
        """Wait in this thread for what the other child says next. Not together with `hear`.

        Raises:
            PeerGoneError: If it has ended.
        """
        try:
            return self._across.recv()
        except (EOFError, OSError) as error:
            raise PeerGoneError(str(error)) from error

    async def hear(self) -> Any:
        """Wait on the event loop for what the other child says next.

        Raises:
            PeerGoneError: If it has ended.
        """
        if self._heard is None:
            self._heard = asyncio.Queue()
            reader = threading.Thread(target=self._read, args=(asyncio.get_running_loop(), self._heard), daemon=True)
            reader.start()
        item = await self._heard.get()
        if isinstance(item, PeerGoneError):
            raise item
        return item

    async def ask(self, item: object) -> Any:
        """Say something to the other child, and wait for its answer."""
        self.send(item)
        return await self.hear()

    @property
    def _across(self) -> Pipes:
        if self._other is None:
            raise PeerGoneError(f"{self.name} runs alone")
        return self._other

    def _read(self, loop: asyncio.AbstractEventLoop, heard: "asyncio.Queue[Any]") -> None:
        """In a thread that ends with the process: nothing that fails on the loop has to wait for it."""
        while True:
            try:
                item: object = self.receive()
            except PeerGoneError as gone:
                item = gone
            if loop.is_closed():
                return
            with suppress(RuntimeError):  # closed meanwhile
                loop.call_soon_threadsafe(heard.put_nowait, item)
            if isinstance(item, PeerGoneError):
                return


Body: TypeAlias = Callable[[Side, Any], Coroutine[Any, Any, None]]
"""What a child runs; a function of a module, so that another process finds it by its name."""


def conduct(
    bodies: Mapping[str, Body],
    spec: object,
    show: Callable[[Any], None],
    *,
    devices: Mapping[str, str],
    uvloop: bool = False,
    silence: float = _SILENCE_SECONDS,
) -> None:
    """Run one or two children to their end.

    Args:
        bodies: What each child runs, by its name.
        spec: Given to each of them; it is sent to another process.
        show: Gets what they report, but for failures.
        devices: Device of each child.
        uvloop: Run coroutines on uvloop.
        silence: Seconds without any report after which the run is given up.

    Raises:
        BenchFailedError: If a child failed, or none said anything for too long.
        MissingExtraError: If uvloop is wanted and not installed.
    """
    if uvloop:
        _uvloop()
    names = list(bodies)
    with tempfile.TemporaryDirectory(prefix="kvxfer-bench-") as folder, closing(_Children()) as children:
        across: Iterable[Any] = Pipe() if len(names) == 2 else [None]
        for name, other in zip(names, across, strict=True):
            children.start(name, (bodies[name], spec, devices[name], Path(folder), uvloop), other)
        _listen(children, show, silence)


def collect(
    bodies: Mapping[str, Body],
    spec: object,
    total: int,
    on_step: Callable[[str, int, int], None],
    *,
    devices: Mapping[str, str],
    uvloop: bool = False,
) -> list[Any]:
    """Run children to their end; what they report but for steps, of which there will be `total`.

    Raises:
        BenchFailedError: As `conduct` does.
        MissingExtraError: Likewise.
    """
    found: list[Any] = []

    def show(item: object) -> None:
        if not isinstance(item, Step):
            found.append(item)
        on_step(item.label if isinstance(item, Step) else "", len(found), total)

    conduct(bodies, spec, show, devices=devices, uvloop=uvloop)
    return found


def _listen(children: "_Children", show: Callable[[Any], None], silence: float) -> None:
    broken: list[_Broken] = []
    while children.alive and not broken:
        news = list(children.news(silence))
        if not news:
            raise BenchFailedError(f"nothing was heard of {', '.join(children.alive)} for {silence:g} s")
        for item in news:
            if isinstance(item, _Broken):
                broken.append(item)
            else:
                show(item)
    if broken:
        raise BenchFailedError("; ".join(f"{one.name} failed: {one.error}" for one in broken))


class _Children:
    """Processes and the pipes to them."""

    def __init__(self) -> None:
        self._processes: dict[str, SpawnProcess] = {}
        self._pipes: dict[str, Pipes] = {}

    @property
    def alive(self) -> list[str]:
        """Names of those that have not ended."""
        return list(self._pipes)

    def start(self, name: str, arguments: tuple[Any, ...], other: Any) -> None:
        """Start one; its end of the pipe to the other child belongs to it alone from here on."""
        ours, theirs = Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=_child, args=(name, theirs, other, *arguments), name=f"kvxfer-bench-{name}", daemon=True
        )
        with _signals_held():
            process.start()
            self._processes[name] = process
            self._pipes[name] = cast("Pipes", ours)  # type: ignore[redundant-cast]  # not on Windows
        theirs.close()
        if other is not None:
            other.close()

    def news(self, timeout: float) -> Generator[object, None, None]:
        """What they report; waits for it at most so many seconds. The end of one that failed is reported as well."""
        ready = wait(list(self._pipes.values()), timeout)
        for name, pipe in list(self._pipes.items()):
            if pipe not in ready:
                continue
            try:
                yield pipe.recv()
            except (EOFError, OSError):
                self._pipes.pop(name).close()
                process = self._processes[name]
                process.join(_JOIN_SECONDS)
                if process.exitcode == _PEER_GONE:
                    yield Step(f"{name} ended because the other process had")
                elif process.exitcode != 0:
                    yield _Broken(name, f"the process ended early, with exit code {process.exitcode}")
                else:
                    yield Step(f"{name} ended")

    def close(self) -> None:
        """End and reap what still runs: first asked, then killed."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.join(_JOIN_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for pipe in self._pipes.values():
            pipe.close()


@contextmanager
def _signals_held() -> Generator[None, None, None]:
    """This process hears of a signal that comes meanwhile when it leaves: half a start cannot be tidied up.

    What is started inside hears of no Ctrl-C, which goes to the whole group: this process ends the others itself.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    resource_tracker.ensure_running()  # which would let interrupts in again, were it started with a child
    came: list[int] = []
    held = signal.SIGINT, signal.SIGTERM
    before = [signal.signal(one, lambda number, _: came.append(number)) for one in held]  # another thread may take it
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for one, handler in zip(held, before, strict=True):
            signal.signal(one, handler)
        if came:
            signal.raise_signal(came[0])


def _child(
    name: str, parent: Pipes, other: "Pipes | None", body: Body, spec: object, device: str, folder: Path, uvloop: bool
) -> None:
    """Entry point of every child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    threading.Thread(target=_follow, args=(parent,), name="kvxfer-bench-parent", daemon=True).start()
    logging.basicConfig(level=logging.ERROR)
    try:
        from kvxfer.tools.bench.device import make_current

        make_current(device)
        with asyncio.Runner(loop_factory=_uvloop().new_event_loop if uvloop else None) as runner:
            runner.run(body(Side(name, device, folder, parent, other), spec))
    except BaseException as error:  # noqa: BLE001 - the parent hears of it, and the process ends
        cause = _first_cause(error)
        if isinstance(cause, PeerGoneError):
            raise SystemExit(_PEER_GONE) from None
        parent.send(_Broken(name, f"{type(cause).__name__}: {' '.join(str(cause).split())}"))
        raise SystemExit(1) from None


def _uvloop() -> Any:
    """The module; untyped, as it may be missing where types are checked."""
    try:
        return importlib.import_module("uvloop")
    except ImportError as error:
        raise MissingExtraError("--uvloop needs uvloop: pip install uvloop") from error


def _follow(parent: Pipes) -> None:
    """The parent never says anything, so its pipe can be read only when it is gone."""
    with suppress(EOFError, OSError):
        parent.recv()
    os._exit(1)


def _first_cause(error: BaseException) -> BaseException:
    """The first cause: task groups wrap what their tasks raise."""
    if isinstance(error, BaseExceptionGroup):
        causes = cast("BaseExceptionGroup[BaseException]", error).exceptions
        return _first_cause(causes[0])
    return error
