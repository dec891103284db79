"""The one door through which time, randomness and threads enter.

Everything above is written against `Runtime`; production uses `ThreadRuntime`, tests and simulations the deterministic
one of `kvxfer.testing`, in which time is virtual and every step happens in an order drawn from a seed.

A `Machine` is work that must not run on the event loop (calls of a fabric, copies). The runtime decides where it runs:
in a thread of its own, or step by step as callbacks of the simulated loop.
"""

import asyncio
import contextlib
import ctypes
import os
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol, Self, TypeAlias, TypeVar

import anyio
import anyio.to_thread

from kvxfer.errors import ClosedError, ConfigError, FabricError, ForkedError, KvxferError, UsageError
from kvxfer.names import cpu_numbers, runs

__all__ = [
    "TURN_SECONDS",
    "Callback",
    "Home",
    "Machine",
    "Placement",
    "Runtime",
    "ThreadRuntime",
    "allowed_cpus",
    "bind",
    "no_op",
    "place",
    "resolve",
    "settle",
]

Callback: TypeAlias = Callable[[], None]
Stop = Callable[[float], bool]
_T = TypeVar("_T")

TURN_SECONDS: Final = 0.0005
"""How long a callback on the loop goes on with what is queued for it. Then everybody else on the loop has a turn."""
_MOST_LENT: Final = 40
"""Worker threads at a time, as many as AnyIO lends to all others together."""
_SET_TIMER_SLACK: Final = 29  # PR_SET_TIMERSLACK
_LIBC: Final = ctypes.CDLL(None)
_USUAL: Final = ctypes.c_void_p(-1)  # FE_DFL_ENV
_Arithmetic: Final = ctypes.c_char * 64  # more than a `fenv_t` takes anywhere
_NICENESS: Final = 5
"""How far threads give way to the loop where they have to share its cores; nothing changes where cores are free."""


def no_op() -> None:
    """Does nothing: stands in until there is something to release."""


def resolve(future: "asyncio.Future[_T]", value: _T) -> None:
    """Give a future its value, unless whoever waited for it is gone."""
    if not future.done():
        future.set_result(value)


def allowed_cpus() -> frozenset[int]:
    """Numbers of the CPUs on which this thread may run; none where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if sys.platform == "linux" else frozenset()


def bind(cpus: frozenset[int]) -> None:
    """Keep the calling thread, and threads that it starts from now on, on these CPUs.

    Raises:
        OSError: If the system refuses.
    """
    if sys.platform == "linux":  # there, and only there, 0 means this thread
        os.sched_setaffinity(0, cpus)


class Machine(Protocol):
    """Work that sleeps by itself until there is something to do.

    Nothing should be raised by it: whoever waits for its work would not hear of it. What is raised is reported as any
    thread's (`threading.excepthook`; in a simulation, the loop's exception handler), and ends it; `stop` works as ever.
    """

    def run(self) -> None:
        """Go on until it is told to stop, in whatever way it is told things."""
        ...

    def step(self) -> float | None:
        """Do what is ready; in how many seconds it wants to run again (0.0: at once, None: only when woken)."""
        ...


class Runtime(Protocol):
    """Clock, randomness, machines and work in threads."""

    def now(self) -> float:
        """Monotonic seconds. Comparable within this process only."""
        ...

    def token(self, nbytes: int) -> bytes:
        """Unpredictable bytes."""
        ...

    def drive(self, name: str, machine: Machine, *, gives_way: bool = False) -> tuple[Stop, Callable[[], None] | None]:
        """Run a machine: in a thread of its own, which may give way to the loop, or step by step.

        Returns:
            Its `stop`, before which it must be told to end: waits at most so many seconds, and says whether it ended in
            time. And its `wake`, from any thread, after which `step` runs soon: None where it hears of its work by
            itself.
        """
        ...

    def placed(self, cpus: frozenset[int]) -> "Runtime":
        """The same, with what it runs in threads kept on these CPUs; without any it may run anywhere."""
        ...

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """Run `work`, which may take a while, so that the loop is not blocked meanwhile."""
        ...


class Home:
    """Where something lives: in a process, whose threads a forked child does not have, and perhaps on a loop of it.

    That loop alone may use it, while it runs; without one any thread may.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._process: Final = os.getpid()
        self._loop: Final = loop

    @property
    def here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._process

    def own(self, thing: _T | None) -> _T:
        """Give a thing to whoever may use it.

        Raises:
            ClosedError: If there is none: the worker was not entered yet. If its loop is closed.
            ForkedError: If this process was forked off the one in which it lives.
            UsageError: If this is another thread, or another loop runs here.
        """
        try:
            running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if thing is not None and running is not None and running is self._loop:  # which no forked process has
            return thing
        if thing is None or os.getpid() != self._process:
            raise self._refusal(thing)
        if self._loop is not None and self._loop.is_closed():
            raise ClosedError("its event loop is closed, and the worker with it: open another one")
        if self._loop not in (None, running) and (running is not None or self._loop.is_running()):
            which = "no" if running is None else "another"
            raise UsageError(
                f"thread {threading.current_thread().name!r} runs {which} event loop; a worker, its offers and fetches "
                "belong to the loop that opened it: call them there (asyncio.run_coroutine_threadsafe), or give the "
                "worker a loop of its own (loop='own', BlockingWorker)"
            )
        return thing

    def read(self, thing: _T | None) -> _T:
        """Give it to whoever reads what does not change, in whatever thread.

        Raises:
            ClosedError: If there is none: the worker was not entered yet.
            ForkedError: If this process was forked off the one in which it lives.
        """
        if thing is None or os.getpid() != self._process:
            raise self._refusal(thing)
        return thing

    def _refusal(self, thing: object) -> KvxferError:
        if thing is None:
            return ClosedError("this worker is not open: enter it with `async with`")
        return ForkedError(
            f"this is process {os.getpid()}, forked off process {self._process}, where the worker runs; a fork has "
            "none of its threads: open another worker here, and start processes with spawn or forkserver"
        )


def settle(cpus: frozenset[int], *, gives_way: bool = True) -> None:
    """Make this thread one that works for the loop: it stays on these CPUs, if any, and may give way to it."""
    if sys.platform == "linux":  # there, and only there, it is a thread that has a priority
        with contextlib.suppress(OSError):
            if gives_way:
                os.nice(_NICENESS)
        _LIBC.prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)  # short sleeps end 50 us sooner
        _LIBC.fesetenv(_USUAL)
    _bind_if(cpus)


def _bind_if(cpus: frozenset[int]) -> None:
    """Bind the calling thread if there is a wish. What was possible at the start may not be any more: it runs on."""
    if cpus:
        with contextlib.suppress(OSError):
            bind(cpus)


@contextlib.contextmanager
def _usual_arithmetic() -> Generator[None]:
    """Round to the nearest here, and take no subnormal number for zero.

    A thread inherits that from whoever started it (`torch.set_flush_denormal`), and what elements are converted to must
    not depend on it.
    """
    if sys.platform != "linux":
        yield
        return
    before = _Arithmetic()
    _LIBC.fegetenv(before)
    _LIBC.fesetenv(_USUAL)
    try:
        yield
    finally:
        _LIBC.fesetenv(before)


class ThreadRuntime:
    """Production: the monotonic clock, the system's randomness, one thread a machine, on these CPUs or anywhere."""

    def __init__(self, cpus: frozenset[int] = frozenset()) -> None:
        self._cpus = cpus
        self._limiter = anyio.CapacityLimiter(_MOST_LENT)

    now = staticmethod(time.monotonic)

    def token(self, nbytes: int) -> bytes:
        """Unpredictable bytes from the operating system."""
        return secrets.token_bytes(nbytes)

    def drive(self, name: str, machine: Machine, *, gives_way: bool = False) -> tuple[Stop, None]:
        """Run a machine in a daemon thread called `name`, where it sleeps by itself.

        Raises:
            FabricError: If the system lets this process start none.
        """

        def run() -> None:
            settle(self._cpus, gives_way=gives_way)
            machine.run()

        def stop(timeout: float) -> bool:
            thread.join(timeout)
            return not thread.is_alive()

        thread = threading.Thread(target=run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise FabricError(f"the system lets this process start no thread {name}: {error}") from error
        return stop, None

    def placed(self, cpus: frozenset[int]) -> Self:
        """The same, with threads that run on these CPUs."""
        return type(self)(cpus)

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """Run `work` in a worker thread, which belongs to the whole process: it is lent, and goes back as it was.

        How many this runtime has at a time is its own limit. The usual one is the application's, all of whose threads
        may be waiting for what is to be done here.
        """
        try:
            return await anyio.to_thread.run_sync(lambda: self._lent(work), limiter=self._limiter)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # AnyIO's have what has the error, and so all that waits for it
            raise

    def _lent(self, work: Callable[[], _T]) -> _T:
        before = allowed_cpus() if self._cpus else frozenset[int]()
        _bind_if(self._cpus)
        try:
            with _usual_arithmetic():
                return work()
        finally:
            _bind_if(before)


# --- where threads run: on the NUMA node of the GPU
#
# A thread on another node writes tables, launches kernels and polls over the link between the sockets, and so do the
# GPU and the NIC that use memory there. Threads are bound to CPUs. Memory follows them: pinned memory gets its pages
# while the call that allocates it runs, from the node of the thread that makes the call, so it is allocated by a bound
# thread. A memory policy (`set_mempolicy`) would say the same more strongly, but the usual sandboxes of containers
# forbid it, and it would override one that the whole process was started under. The caller's own threads, and its event
# loop, are never bound.

_SYSFS: Final = Path("/sys")


@dataclass(frozen=True, slots=True)
class Placement:
    """What was chosen: where threads are kept, empty if they may run anywhere, and where that comes from."""

    cpus: frozenset[int] = frozenset()
    why: str = "not chosen yet"

    @property
    def listed(self) -> str:
        """The CPUs as text such as `0-7,16`; `any` if threads may run anywhere."""
        return _listed(self.cpus) or "any"

    def run(self, work: Callable[[], _T]) -> _T:
        """Do work that allocates pinned memory: in a thread there, which is waited for, or here if there is no wish."""
        if not self.cpus:
            return work()

        def bound() -> _T:
            bind(self.cpus)
            return work()

        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvxfer-arena") as executor:
            return executor.submit(bound).result()

    def bind(self) -> None:
        """Keep the calling thread there."""
        _bind_if(self.cpus)

    def refusal(self) -> OSError | None:
        """Why no thread can be kept there, if that is so."""
        try:
            self.run(lambda: None)
        except OSError as error:
            return error
        return None

    def describe(self) -> dict[str, object]:
        """As plain data: the CPUs, None for any, and why."""
        return {"cpus": sorted(self.cpus) or None, "why": self.why}


def place(
    affinity: Literal["auto", "off"] | tuple[int, ...], device: int | None, *, bus_id: Callable[[int], str]
) -> Placement:
    """Choose CPUs for an `affinity`, among those that this process may use; `bus_id` says where a GPU is, by sysfs.

    Raises:
        ConfigError: If the setting names CPUs that the process may not use, or the system does not let it choose.
    """
    if affinity == "off":
        return Placement(why="affinity is off")
    if affinity != "auto":
        return _given(affinity)
    if device is None:
        return Placement(why="the cache is not on a GPU")
    return _next_to(device, bus_id)


def _given(cpus: tuple[int, ...]) -> Placement:
    allowed = allowed_cpus()
    if outside := frozenset(cpus) - allowed:
        raise ConfigError(
            f"affinity names CPUs that this process may not use: {_listed(outside)}; it may use "
            f"{_listed(allowed) or 'none that it could choose'}"
        )
    placement = Placement(frozenset(cpus), "affinity names them")
    if refusal := placement.refusal():
        raise ConfigError(f"affinity is {placement.listed}, but threads cannot be bound here: {refusal}")
    return placement


def _next_to(device: int, bus_id: Callable[[int], str]) -> Placement:
    """CPUs of the GPU's node, if that leaves a choice. Nothing fails here: threads may run anywhere, only slower."""
    try:
        node, near = _node(bus_id(device))
    except (KvxferError, OSError, ValueError) as error:
        return Placement(why=f"the NUMA node of GPU {device} is not known: {error}")
    allowed = allowed_cpus()
    chosen = near & allowed
    placement = Placement(chosen, f"they are on NUMA node {node}, where GPU {device} is")
    if not chosen:
        return Placement(why=f"this process may use no CPU of NUMA node {node}, where GPU {device} is")
    if chosen == allowed:
        return Placement(why=f"every CPU that this process may use is on NUMA node {node}, where GPU {device} is")
    if refusal := placement.refusal():
        return Placement(why=f"threads cannot be bound here: {refusal}")
    return placement


def _node(bus_id: str) -> tuple[int, frozenset[int]]:
    """The NUMA node of a PCI device, and its CPUs.

    Raises:
        OSError: If the kernel does not show them.
        ValueError: If it knows of no node.
    """
    node = int((_SYSFS / "bus/pci/devices" / bus_id / "numa_node").read_text())
    if node < 0:
        raise ValueError(f"the system gives none for {bus_id}")
    return node, frozenset(cpu_numbers((_SYSFS / f"devices/system/node/node{node}/cpulist").read_text()))


def _listed(cpus: Iterable[int]) -> str:
    """Numbers as text such as `0-7,16`."""
    return ",".join(runs(sorted(cpus)))
