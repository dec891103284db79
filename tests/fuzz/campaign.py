"""Runs cases of one target by the thousand, each from a seed of its own, so that any of them can be played again alone.

FUZZ_FRAMES=1000000 pytest tests/fuzz -s            # how many frames all targets get together; `make fuzz`
FUZZ_SEED=7 pytest tests/fuzz                       # other ones
FUZZ_SEED=7 FUZZ_CASE=session:815 pytest tests/fuzz # the one that failed, as the failure says
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

FRAMES = int(os.environ.get("FUZZ_FRAMES", "40000"))
SEED = os.environ.get("FUZZ_SEED", "1")
CASE = os.environ.get("FUZZ_CASE", "")

SHARES = {
    "decoder": 0.446,
    "reader": 0.10,
    "inspect": 0.03,
    "session": 0.20,
    "sending": 0.10,
    "receiving": 0.10,
    "hostile decode rank": 0.012,
    "hostile prefill rank": 0.012,
}
"""What part of all frames each target gets: those that cost little get most."""
CASE_SECONDS = 5.0
"""CPU time of one case, at most; all but those of whole workers take a hundredth of it."""
GROWTH_BYTES = 96 << 20
"""How much larger the process may be after a campaign: what its allocator keeps, and no more for more frames."""


class Campaign:
    """Cases of one target, counted and timed."""

    def __init__(self, target: str):
        self.target = target
        self.wanted = round(FRAMES * SHARES[target])
        self.frames = self.cases = 0
        self.slowest = (0.0, 0)
        self._began = time.perf_counter()
        self._resident = resident_bytes()

    def __iter__(self):
        """The random source of each case; the body counts its frames by `count`."""
        chosen, _, number = CASE.partition(":")
        if CASE:
            if chosen != self.target:
                pytest.skip(f"only {CASE} is played")
            yield int(number), Random(f"{SEED}/{self.target}/{number}")
            return
        while self.frames < self.wanted:
            began = time.thread_time()
            yield self.cases, Random(f"{SEED}/{self.target}/{self.cases}")
            took = time.thread_time() - began
            self.slowest = max(self.slowest, (took, self.cases))
            assert took < CASE_SECONDS, self.replay(self.cases)
            self.cases += 1

    def replay(self, number: int) -> str:
        return f"play it again: FUZZ_SEED={SEED} FUZZ_CASE='{self.target}:{number}' python -m pytest tests/fuzz"

    def finish(self):
        if CASE:
            return
        grown = resident_bytes() - self._resident
        seconds = time.perf_counter() - self._began
        took, number = self.slowest
        print(
            f"\nfuzz {self.target}: {self.frames} frames in {self.cases} cases, {seconds:.1f} s, seed {SEED}; "
            f"slowest case {number}: {took * 1e3:.1f} ms; grown by {grown >> 20} MiB"
        )
        assert grown < GROWTH_BYTES


def run(target: str, play: Callable[[Random], int]):
    """Play cases until there were enough frames; each returns how many it had."""
    campaign = Campaign(target)
    for number, draw in campaign:
        try:
            campaign.frames += play(draw)
        except BaseException as error:
            error.add_note(campaign.replay(number))
            raise
    campaign.finish()


def is_short(error: Exception, most: int = 1 << 14):
    """What an error quotes of its cause is cut: it goes to logs."""
    assert len(str(error)) < most, f"{len(str(error))} characters: {str(error)[:200]}"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
