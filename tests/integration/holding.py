"""Ranks whose copies can be made to stand still: on a GPU because their stream waits.

Nothing here allocates or frees memory of a GPU while a stream is held up, since CUDA may wait for all of them then.
"""

import asyncio
import time
from functools import partial
from typing import Any

import inside
import torch
from decoded import pieces
from far import Ranks
from stage import eventually, extents
from standing import Standing

from kvxfer.copy.port import Direction
from kvxfer.errors import KvxferError
from kvxfer.memory.books import ExtentState

WAIT_SECONDS = 20.0
PATIENCE_SECONDS = 4.0
"""For an agent that is made anew: it is tried after a quarter of a second, and ends in a second at most."""
_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ
_WORDS: list[torch.Tensor] = []
"""Never given back: a GPU that is busy with other processes reads one some time after it was set."""
_SIDES = {Direction.GATHER: "send", Direction.SCATTER: "receive"}


def _places(tables: Any, side: int) -> list[int]:
    """Where regions of a copy begin, on one side."""
    return [piece[2 * side] for piece in pieces(tables)]


class _Stream:
    """Copies in one direction of a mover on a GPU: behind a wait for a word, or a kernel that runs until it is set."""

    def __init__(self, mover, direction, how):
        from kvxfer.memory.device import call, load

        self._launched = partial(inside.launched, mover, direction)
        self._word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        _WORDS.append(self._word)
        stream = inside.stream(mover, direction)
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            if how == "kernel":
                from spinning import spin

                spin[(1,)](self._word)
            else:
                driver = load("driver", "holding a stream up")
                call(driver, "cuStreamWaitValue32", int(stream.cuda_stream), self._word.data_ptr(), 1, _GEQ)
            assert not stream.query(), "the stream is not held up"

    @property
    def held(self):
        return self._launched()

    def go(self):
        self._word.fill_(1)


class Holding(Ranks):
    """Ranks of which one at a time is held up."""

    def __init__(self):
        super().__init__()
        self._held: Any = None
        self._doubt: Any = None
        self._rebuilds = 0

    def hold(self, rank, direction, how="wait"):
        """Let copies of this direction stand still, until `go`."""
        worker, direction = self.workers[rank], Direction(direction)
        mover = inside.mover(worker)
        self._held = _Stream(mover, direction, how) if inside.stream(mover, direction) else Standing(worker, direction)

    def go(self):
        """Let them go on."""
        held, self._held = self._held, None
        if held is not None:
            held.go()

    async def standing(self, rank, direction):
        """Wait until a copy stands still; returns the extents that it may touch."""
        await eventually(lambda: self._touched(rank, direction), WAIT_SECONDS)
        return self._touched(rank, direction)

    def _touched(self, rank, direction):
        """What copies that stand still have of the arena; those behind them may still be called off."""
        side = 1 if direction == "gather" else 0
        places = [place for job in self._held.held for place in _places(job.tables, side)]
        kept = self.kept(rank, direction)
        return [(at, length) for at, length in kept if any(at <= place < at + length for place in places)]

    def kept(self, rank, direction):
        """What copies of this direction, and the peer, may touch of the arena."""
        writing = extents(self.workers[rank], _SIDES[Direction(direction)], ExtentState.WRITING)
        return [(one.address, one.length) for one in writing]

    async def rebuild(self, rank):
        """Have the agent made anew: the seconds that it took, None if it did not end while copies stood still.

        And by how much the loop was late meanwhile.
        """
        worker, began = self.workers[rank], time.monotonic()
        self._rebuilds, lag = worker.describe()["agent"]["rebuilt"], 0.0
        inside.rebuild(worker)
        while worker.describe()["agent"]["rebuilt"] == self._rebuilds:
            before = time.monotonic()
            if before - began > PATIENCE_SECONDS:
                return None, lag
            await asyncio.sleep(0.005)
            lag = max(lag, time.monotonic() - before)
        return time.monotonic() - began, lag

    async def rebuilt(self, rank):
        """Wait until that is done; the seconds for which it was waited for."""
        worker, began = self.workers[rank], time.monotonic()
        while worker.describe()["agent"]["rebuilt"] == self._rebuilds:
            if time.monotonic() - began > 2 * WAIT_SECONDS:
                mover = inside.mover(worker)
                running = [len(inside.launched(mover, one)) for one in Direction]
                through = [inside.stream(mover, one) is None or inside.stream(mover, one).query() for one in Direction]
                found = f"{running} copies run, streams are through: {through}, and {worker.describe()}"
                raise AssertionError(f"no other agent in time; {found}")
            await asyncio.sleep(0.005)
        return time.monotonic() - began

    async def withdraw(self, rank, request):
        """Withdraw an offer; how that ended, and after how many seconds."""
        began, offer = time.monotonic(), self._offers[rank, request]
        try:
            ended = type(await offer.withdraw()).__name__
        except KvxferError as error:
            self._doubt, ended = error, type(error).__name__
        return ended, time.monotonic() - began

    async def doubt_ended(self):
        """Wait until what was in doubt is not."""
        async with asyncio.timeout(WAIT_SECONDS):
            await self._doubt.settled()

    async def close(self):
        self.go()
        await super().close()
