"""How much Python one fetch runs: the latency of a small one is nothing else.

Both ends are in this process, so what is counted is both sides together. Sides that wait for each other may take their
turns in more than one order; the fetch that took the fewest calls is the one that nothing came in between of.
"""

import logging
import sys
from collections import Counter
from pathlib import Path

import pytest
from stage import Cache

import kvxfer
from kvxfer import READY
from kvxfer.copy import binding

PACKAGE = f"{Path(kvxfer.__file__).parent}/"
TESTS = f"{Path(__file__).parents[1]}/"
COMPILED = {(binding.__file__, name) for name, one in vars(binding).items() if hasattr(one, "py_func")}
"""Of functions that are machine code: numba tells a profiler of them, and no Python runs."""
BUDGETS = {
    "mapped": {"calls": 328, "of our own": 228, "modules": 27},
    "staged": {"calls": 408, "of our own": 294, "modules": 27},
}
"""What one warm fetch of one chunk may take: calls of Python functions in all, those of functions under `kvxfer/`, and
modules there that they are in. The goal for either route is 600 calls, of which 300 our own, in 30 modules."""
FURTHER = {"mapped": 0.6, "staged": 2}
"""Calls that a further chunk may take, both ends and asyncio included. The goal for either is 0."""
FETCHES = 20


class Calls:
    """Counts calls of Python functions while it is entered, by the file of the function."""

    def __init__(self):
        self._files = Counter()

    def __enter__(self):
        self._files.clear()
        sys.setprofile(self._note)

    def __exit__(self, *_):
        sys.setprofile(None)

    def _note(self, frame, event, _):
        if event == "call" and (frame.f_code.co_filename, frame.f_code.co_name) not in COMPILED:
            self._files[frame.f_code.co_filename] += 1

    @property
    def spent(self):
        files = {file: calls for file, calls in self._files.items() if not file.startswith(TESTS)}
        own = {file: calls for file, calls in files.items() if file.startswith(PACKAGE)}
        return {"calls": sum(files.values()), "of our own": sum(own.values()), "modules": len(own)}


@pytest.fixture(autouse=True)
def looked_at():
    """Nobody looks on, unlike in other scenes: what is counted is the fetch alone."""


@pytest.mark.parametrize("route", BUDGETS)
async def test_a_warm_fetch_of_one_chunk_stays_within_its_budget(stage, route, caplog, monkeypatch):
    caplog.set_level(logging.WARNING, "kvxfer")  # without the line that tells of each
    for shell in ("peers.link", "copy.mover"):  # on a busy machine a turn ends in the midst of a fetch, and takes calls
        monkeypatch.setattr(f"kvxfer.{shell}.TURN_SECONDS", 60.0)
    source, target = Cache(shared=True), Cache(shared=True)
    prefill, decode = await stage.pair(source, target, route=route, arena_bytes="256KiB", chunk_bytes="32KiB")
    calls, blocks, least = Calls(), range(4), dict[str, int]()
    for number in range(10 * FETCHES):
        prefill.offer(f"r{number}", blocks, tokens=16, after=READY)
        ticket = prefill.engine.ticket(f"r{number}")
        with calls:
            result = await decode.fetch(ticket, blocks, tokens=range(16), after=READY)
        assert (result.stats.route, result.stats.chunks) == (route, 1)
        least = {name: min(spent, least.get(name, spent)) for name, spent in calls.spent.items()}
        if number >= FETCHES and all(least[name] <= most for name, most in BUDGETS[route].items()):
            return  # else the sides may have taken more turns than they need, in all of these
    pytest.fail(str(least))


@pytest.mark.parametrize("route", FURTHER)
async def test_a_further_chunk_stays_within_its_budget(stage, route, caplog):
    caplog.set_level(logging.WARNING, "kvxfer")
    few, many, each = 8, 160, 4  # chunks, and blocks of one; how much of their news comes singly evens out over many
    source, target = (Cache(shared=True, blocks=many * each) for _ in range(2))
    nbytes = sum(memory.nbytes for memory in source.memory.values()) // many
    prefill, decode = await stage.pair(source, target, route=route, chunk_bytes=nbytes, arena_bytes=64 * nbytes)
    calls, least = Calls(), {}
    for number in range(10 * FETCHES):
        chunks = (few, many)[number % 2]
        blocks = range(chunks * each)
        prefill.offer(f"r{number}", blocks, tokens=4 * len(blocks), after=READY)
        ticket = prefill.engine.ticket(f"r{number}")
        with calls:
            result = await decode.fetch(ticket, blocks, tokens=range(4 * len(blocks)), after=READY)
        assert (result.stats.route, result.stats.chunks) == (route, chunks)
        least[chunks] = min(calls.spent["calls"], least.get(chunks, sys.maxsize))
        if number >= FETCHES and least[many] - least[few] <= FURTHER[route] * (many - few):
            return  # else the machine may have been busy, and more news than that came singly
    pytest.fail(f"calls by chunks: {least}")
