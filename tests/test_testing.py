"""Virtual time: the same seed gives the same run, and an hour costs nothing."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from kvxfer.config import Config
from kvxfer.geometry import CacheTensor
from kvxfer.testing import LoopbackNetwork, LoopbackTransport, simulate
from kvxfer.worker import Worker

BLOCK_TOKENS = 4
SETTINGS = {"arena_bytes": "64KiB", "chunk_bytes": "4KiB"}


def trace(seed):
    """What a few tasks and machines do, and when."""
    seen = []

    async def scenario(runtime):
        def note(what):
            seen.append((what, runtime.now()))

        def step(name, left):
            note(name)
            left[0] -= 1
            return runtime.jitter() if left[0] else None

        for name in "abc":
            runtime.drive(name, SimpleNamespace(step=lambda name=name, left=[6]: step(name, left)))
        note(runtime.token(8))
        await asyncio.sleep(1.0)

    simulate(scenario, seed=seed)
    return seen


def test_the_same_seed_gives_the_same_run():
    assert trace(3) == trace(3)
    orders = {tuple(what for what, _ in trace(seed)[1:]) for seed in range(8)}
    assert len(orders) > 4
    assert all(sorted(order) == sorted("abc" * 6) for order in orders)


def test_time_jumps_and_stands_still_in_a_thread():
    async def scenario(runtime):
        begin = runtime.now()
        await asyncio.sleep(1e6)
        assert runtime.now() - begin == pytest.approx(1e6, abs=1e-3)
        began = runtime.now()
        assert await runtime.in_thread(lambda: 7) == 7
        assert runtime.now() == began
        async with asyncio.timeout(30.0) as bound:
            await asyncio.sleep(29.999)
        assert not bound.expired()
        return "done"

    assert simulate(scenario, limit=1e7) == "done"


def test_a_timer_comes_neither_early_nor_much_later():
    async def scenario(runtime):
        for delay in (1e-6, 0.5, 120.0, 100_000.0):
            begin = runtime.now()
            await asyncio.sleep(delay)
            assert delay <= runtime.now() - begin < delay + 1e-4

    simulate(scenario)


def test_a_simulation_in_which_nothing_can_happen_any_more():
    async def scenario(runtime):
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="the simulation is stuck"):
        simulate(scenario)


def test_a_simulation_in_which_timers_go_on_for_ever_ends(tmp_path, monkeypatch):
    """An open worker watches its loop, so there is always a timer."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def forever(runtime):
        cache = torch.zeros(2, BLOCK_TOKENS, 1, 8, dtype=torch.uint8)
        tensor = CacheTensor(cache, "block token head dim", layers=[0], heads=range(1))
        transport = LoopbackTransport("w", LoopbackNetwork())
        async with Worker([tensor], Config(**SETTINGS), transport=transport, runtime=runtime):
            await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="not ended after 100 virtual seconds"):
        simulate(forever, limit=100)


def test_what_a_scenario_raises_comes_out():
    async def scenario(runtime):
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        simulate(scenario)


def test_machines_wake_sleep_and_stop():
    async def scenario(runtime):
        ran, delays = [], [5.0, None]

        def step():
            ran.append(runtime.now())
            return delays.pop(0) if delays else None

        stop, wake = runtime.drive("probe", SimpleNamespace(step=step))
        assert ran == []
        await asyncio.sleep(10.0)
        assert ran[1] - ran[0] == pytest.approx(5.0, abs=1e-3)
        for _ in range(3):
            wake()
        await asyncio.sleep(1.0)
        assert len(ran) == 3  # wake-ups before the next step are merged
        wake()
        assert stop(0.0)
        wake()
        await asyncio.sleep(1.0)
        assert len(ran) == 3

    simulate(scenario)


def test_a_machine_that_raises_is_reported_and_over():
    async def scenario(runtime):
        problems, steps = [], []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context["exception"]))

        def step():
            steps.append(None)
            raise ValueError("broken")

        stop, wake = runtime.drive("probe", SimpleNamespace(step=step))
        await asyncio.sleep(1.0)
        wake()
        await asyncio.sleep(1.0)
        (problem,) = problems
        assert isinstance(problem, ValueError)
        assert len(steps) == 1
        assert stop(0.0)

    simulate(scenario)
