"""A mover on an event loop in a thread of its own: what tests ask of it that are not coroutines, from any thread."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Hashable, Iterable
from functools import partial
from typing import Any

from packing import packed, variants

from kvxfer.copy.mover import Mover
from kvxfer.copy.port import READY, CopyJob, CopyOutcome, Direction, Event, Gate
from kvxfer.geometry.copyplan import CopyPlan
from kvxfer.geometry.plan import SumPlan
from kvxfer.runtime import ThreadRuntime

_START_SECONDS = 300
"""For a GPU that nobody used yet, and for what is compiled."""
_GRACE_SECONDS = 30
"""For what is asked of the loop."""


class Threaded:
    """A mover, and its loop."""

    def __init__(self, device: Any = None, *, gpu: Any = None, **options: Any) -> None:
        self.broken: list[dict[str, Any]] = []  # what the loop complained of
        self.gpu = gpu
        self._closed = False  # then copies are refused in the caller's thread
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda _, context: self.broken.append(context))
        self._thread = threading.Thread(target=self._loop.run_forever, name="loop of a test", daemon=True)
        self._thread.start()
        try:
            self.mover: Mover = self._wait(self._open(device, options), _START_SECONDS)
        except BaseException:
            self._end()
            raise

    async def _open(self, device: Any, options: dict[str, Any]) -> Mover:
        runtime = ThreadRuntime()
        if device is not None:
            from kvxfer.copy.cuda import Gpu

            of_gpu = {name: options.pop(name) for name in ("ctas", "ring_bytes") if name in options}
            self.gpu = await runtime.in_thread(partial(Gpu, device, **of_gpu))
        return Mover(runtime, gpu=self.gpu, **options)

    def _wait(self, work: Coroutine[Any, Any, Any], timeout: float) -> Any:
        """What a coroutine on the loop returns."""
        assert threading.current_thread() is not self._thread, "the loop cannot wait for itself"
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def submit(
        self,
        plan: CopyPlan,
        done: Callable[[CopyOutcome], None],
        direction: Direction = Direction.GATHER,
        *,
        after: Event = READY,
        gate: Gate | None = None,
        sums: SumPlan | None = None,
        owner: Hashable = None,
        nbytes: int | None = None,
        from_nic: bool = False,
    ) -> None:
        """Pack a plan now, and ask for the copy, in the order of the calls. `done` is called on the loop's thread.

        Raises:
            ClosedError: As the mover says it.
        """
        tables = None if sums is not None else packed(plan, nbytes)
        job = CopyJob(tables, done, after, gate=gate, from_nic=from_nic, owner=owner, sums=sums)
        if self._closed:
            self.mover.submit(job, direction)  # refuses it, and touches nothing of its loop
        else:
            self._loop.call_soon_threadsafe(self.mover.submit, job, direction)

    def close(self, timeout: float) -> bool:
        """As the mover's; and nobody may have complained. May be repeated."""
        if self._closed:
            return True
        self._closed = self._wait(self.mover.close(timeout), timeout + _GRACE_SECONDS)
        assert not self.broken, self.broken
        if self._closed:
            self._end()
        return self._closed

    def _end(self) -> None:
        """Stop the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_GRACE_SECONDS)
        assert not self._thread.is_alive(), "the loop does not end"
        self._loop.close()

    # --- what may be asked in any thread

    @property
    def kernel(self) -> Any:
        """Variants of the kernel."""
        return self.gpu.kernel

    @property
    def compiles(self) -> int:
        """Kernel variants compiled so far."""
        compiled: int = self.kernel.compiles
        return compiled

    def stream(self, direction: Direction) -> Any:
        """The stream of a direction, as torch knows it."""
        return self.gpu.streams[list(Direction).index(direction)]

    def inside(self, gate: int, *, raised: bool) -> int:
        return self.mover.writers_inside(gate, raised=raised)

    def warm(self, plans: Iterable[CopyPlan]) -> None:
        self.mover.warm(variants(plans))

    def occupy(self, ctas: int) -> None:
        self.mover.occupy(ctas)


class Outcome:
    """How one copy ended, for whoever waits for it: pass it as `done`."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._outcomes: list[CopyOutcome] = []

    def __call__(self, outcome: CopyOutcome) -> None:
        self._outcomes.append(outcome)
        self._ended.set()

    def wait(self, timeout: float = 60) -> CopyOutcome:
        """It, whatever it is."""
        assert self._ended.wait(timeout)
        assert len(self._outcomes) == 1, "it was reported twice"
        return self._outcomes[0]

    def get(self, timeout: float = 60) -> CopyOutcome:
        """It; its error is raised."""
        outcome = self.wait(timeout)
        if outcome.error is not None:
            raise outcome.error
        return outcome
