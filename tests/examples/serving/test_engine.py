"""Blocks are given in turn, and come back when nobody uses them any more: not the model's thread, not a peer."""

import asyncio
import threading
from contextlib import aclosing

import pytest

from examples.serving.engine import Engine, EngineSettings
from kvxfer import MemoryInDoubtError

SMALL = EngineSettings(layers=1, kv_heads=1, head_dim=8, hidden=16, blocks=4, block_tokens=16)


@pytest.fixture
async def engine():
    async with Engine.load(SMALL) as engine:
        yield engine
    assert not engine.alive


async def settled(turns=20):
    """Let other tasks take a few turns."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def test_nobody_overtakes_who_waits_for_many_blocks(engine):
    order, leave = [], asyncio.Event()

    async def guest(name, tokens):
        async with engine.room(tokens) as room:
            assert len(room.sequence.block_ids) == -(-tokens // 16)
            order.append(name)
            await leave.wait()

    guests = [asyncio.create_task(guest(*each)) for each in [("first", 40), ("large", 64), ("small", 1)]]
    await settled()
    assert order == ["first"], "one block is free, and the small one waits behind the large one"
    leave.set()
    await asyncio.gather(*guests)
    assert order == ["first", "large", "small"]
    assert engine.cache.free_blocks == 4


async def test_who_gives_up_waiting_lets_the_next_one_in(engine):
    async with engine.room(40):
        waiting = asyncio.create_task(engine.room(64).__aenter__())
        await settled()
        waiting.cancel()
        async with asyncio.timeout(30), engine.room(16) as room:
            assert len(room.sequence.block_ids) == 1


async def test_blocks_in_doubt_come_back_when_it_is_over(engine):
    over = asyncio.Event()

    async def is_over():
        await over.wait()

    async with engine.room(16) as room:
        room.doubt = MemoryInDoubtError("a peer is silent", settled=is_over)
    await settled()
    assert engine.cache.free_blocks == 3
    over.set()
    await settled()
    assert engine.cache.free_blocks == 4


async def test_a_generation_that_is_given_up_keeps_its_blocks_for_the_step_that_runs(engine):
    inside, go_on = threading.Event(), threading.Event()

    def on_layer(layer, sequence):
        inside.set()
        go_on.wait()

    async def generate():
        async with (
            engine.room(16) as room,
            aclosing(engine.generate(room.sequence, [1, 2], limit=4, on_layer=on_layer)) as saying,
        ):
            async for _ in saying:
                pass

    task = asyncio.create_task(generate())
    await asyncio.to_thread(inside.wait)
    try:
        for _ in range(3):  # however often
            task.cancel()
            await settled()
        assert not task.done()
        assert engine.cache.free_blocks == 3
    finally:
        go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.cache.free_blocks == 4
    assert engine.describe()["running"] == 0
