"""What kvxfer ships for tests, its own and its users': no GPU, no NIXL, no waiting for time to pass.

    network = LoopbackNetwork()                          # in-process transport with fault injection
    worker = Worker(tensors, config, transport=LoopbackTransport("prefill", network), runtime=runtime)

    def scenario(runtime): ...                           # async; builds workers with this runtime
    simulate(scenario, seed=7)                           # virtual time; the same seed gives the same run

In a simulation a second costs nothing: when nothing can happen any more, the clock jumps to the next timer. Machines,
which have threads in production, become callbacks of the loop whose order is drawn from the seed.
"""

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, Final, Self, TypeVar

from kvxfer.fabric.loopback import LoopbackNetwork, LoopbackTransport
from kvxfer.runtime import Machine

__all__ = ["DeterministicRuntime", "LoopbackNetwork", "LoopbackTransport", "simulate"]

_T = TypeVar("_T")
_STEP_SECONDS: Final = 1e-6
"""How far virtual time moves on with every turn of the loop, so that a machine that spins cannot stop it."""
_JITTER_SECONDS: Final = 50e-6


class _VirtualSelector(selectors.DefaultSelector):
    """Never sleeps: what the loop would have waited for, time jumps over."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        self.now += _STEP_SECONDS
        if not events and timeout is not None and timeout > 0:
            self.now += timeout
        elif not events and timeout is None:
            raise RuntimeError("the simulation is stuck: nothing can happen any more, and no timer is set")
        return events


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, selector: _VirtualSelector) -> None:
        self._virtual = selector
        super().__init__(selector)

    def time(self) -> float:
        return self._virtual.now


class _Steps:
    """A machine's steps as callbacks of the loop, each after a delay drawn from the seed."""

    def __init__(self, runtime: "DeterministicRuntime", step: Callable[[], float | None]) -> None:
        self._runtime = runtime
        self._step = step
        self._next: asyncio.TimerHandle | None = None
        self._stopped = False
        self.wake()

    def wake(self) -> None:
        self._schedule(0.0)

    def stop(self, timeout: float) -> bool:
        self._stopped = True
        if self._next is not None:
            self._next.cancel()
        return True

    def _schedule(self, delay: float) -> None:
        loop = self._runtime.loop
        when = loop.time() + delay + self._runtime.jitter()
        if self._stopped or (self._next is not None and self._next.when() <= when):
            return
        if self._next is not None:
            self._next.cancel()
        self._next = loop.call_at(when, self._run)

    def _run(self) -> None:
        self._next = None
        try:
            delay = self._step()
        except BaseException:
            self._stopped = True  # as a thread would be; the loop reports it
            raise
        if delay is not None:
            self._schedule(delay)


class DeterministicRuntime:
    """Clock, randomness and machines of a simulation.

    Args:
        loop: The virtual loop; `simulate` makes it.
        seed: Of everything that is drawn.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seed: int) -> None:
        self.loop: Final = loop
        self._random = random.Random(seed)  # noqa: S311 - predictable on purpose

    def now(self) -> float:
        """Virtual seconds."""
        return self.loop.time()

    def token(self, nbytes: int) -> bytes:
        """Bytes that the seed determines: for simulations only, they can be predicted."""
        return self._random.randbytes(nbytes)

    def jitter(self) -> float:
        """A small delay in seconds."""
        return self._random.random() * _JITTER_SECONDS

    def drive(
        self, name: str, machine: Machine, *, gives_way: bool = False
    ) -> tuple[Callable[[float], bool], Callable[[], None]]:
        """Run a machine step by step, as callbacks of the loop."""
        del name, gives_way
        steps = _Steps(self, machine.step)
        return steps.stop, steps.wake

    def placed(self, cpus: frozenset[int]) -> Self:
        """The same: there are no threads to be placed."""
        del cpus
        return self

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """Run `work` here: time stands still meanwhile."""
        return work()


def simulate(
    scenario: Callable[[DeterministicRuntime], Coroutine[Any, Any, _T]], *, seed: int = 0, limit: float = 1e6
) -> _T:
    """Run an async scenario in virtual time.

    Args:
        scenario: Gets the runtime to build workers with.
        seed: The same seed gives the same order of events.
        limit: Virtual seconds within which it has to end. An open worker always has a timer, so nothing else would tell
            that everybody waits for ever.

    Raises:
        RuntimeError: If nothing can happen any more, or `limit` has passed, although the scenario has not ended.
    """
    loop = _VirtualLoop(_VirtualSelector())
    runtime = DeterministicRuntime(loop, seed)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(_within(limit, scenario(runtime)))


async def _within(limit: float, work: Coroutine[Any, Any, _T]) -> _T:
    bound = asyncio.timeout(limit)
    try:
        async with bound:
            return await work
    except TimeoutError as error:
        if not bound.expired():
            raise
        raise RuntimeError(f"the simulation is stuck: it has not ended after {limit:g} virtual seconds") from error
