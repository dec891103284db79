"""Other work of a process, in a thread of its own: what transfers have to live beside, and what they slow down."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Final

import torch

from kvxfer.tools.bench.device import make_current

__all__ = ["KINDS", "Victim", "beside"]

KINDS: Final = ("python", "engine")
"""What runs beside transfers on any machine; `matmul` needs a GPU."""
_MATRIX: Final = 4096
_BATCH: Final = 4
_SPIN: Final = 200
_STEPS: Final = 60
_WIDTH: Final = 512
_ROWS: Final = 8


class Victim:
    """A thread that counts how often it gets round its loop.

    - One without a name does nothing.
    - `python` never lets go of the interpreter by itself.
    - `engine` does as a decode step does: small products one after the other, each with a little Python, then it waits
      for the last one.
    - `matmul` keeps a GPU busy with large products.
    """

    def __init__(self, kind: str, device: str) -> None:
        loops: dict[str, Callable[[], None]] = {
            "": lambda: None,
            "python": self._spin,
            "engine": self._decode,
            "matmul": self._multiply,
        }
        self._device = device
        self._rounds = 0
        self._going, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(loops[kind],), name=f"kvxfer-bench-{kind}", daemon=True)
        self._thread.start()

    async def rate(self, seconds: float) -> float:
        """Rounds a second, over so many seconds from now, or from its first one."""
        await asyncio.to_thread(self._going.wait)
        rounds, began = self._rounds, time.perf_counter()
        await asyncio.sleep(seconds)
        return (self._rounds - rounds) / (time.perf_counter() - began)

    async def stop(self) -> None:
        """End it."""
        self._stop.set()
        await asyncio.to_thread(self._thread.join)

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        finally:
            self._going.set()  # nobody is to wait for what has failed

    def _went_round(self, times: int = 1) -> None:
        self._rounds += times
        self._going.set()

    def _spin(self) -> None:
        while not self._stop.is_set():
            for number in range(_SPIN):
                _ = number * number
            self._went_round()

    def _decode(self) -> None:
        cuda = self._device != "cpu"
        if cuda:
            make_current(self._device)
        dtype = torch.bfloat16 if cuda else torch.float32
        weights = torch.randn(_WIDTH, _WIDTH, dtype=dtype, device=self._device)
        hidden = torch.randn(_ROWS, _WIDTH, dtype=dtype, device=self._device)
        while not self._stop.is_set():
            for _ in range(_STEPS):
                hidden = torch.relu(hidden @ weights) * 0.1
                _ = {"slots": [number for number in range(40)]}  # noqa: C416 - what a scheduler does in between
                self._went_round()
            if cuda:
                torch.cuda.current_stream().synchronize()

    def _multiply(self) -> None:
        make_current(self._device)
        left, right = (torch.randn(_MATRIX, _MATRIX, dtype=torch.bfloat16, device=self._device) for _ in range(2))
        product = torch.empty_like(left)
        done: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        while not self._stop.is_set():
            for _ in range(_BATCH):
                torch.mm(left, right, out=product)
            done.record()
            done.synchronize()  # of this stream alone: a wait for the device would wait for the transfers too
            self._went_round(_BATCH)


@asynccontextmanager
async def beside(kind: str, device: str) -> AsyncGenerator[None, None]:
    """Run such a thread meanwhile, from when it has begun to go round.

    What is not timed, as to compile a kernel and to compare every byte, could take minutes beside it.
    """
    victim = Victim(kind, device)
    try:
        await victim.rate(0.0)
        yield
    finally:
        await victim.stop()
