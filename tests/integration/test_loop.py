"""What a transfer costs the loop: a task a side, and nothing left for the garbage collector."""

import asyncio
import gc
from collections import Counter

import pytest
from inside import TRANSFER_PARTS
from stage import Cache, eventually, quiet


def alive():
    return Counter(type(thing).__name__ for thing in gc.get_objects() if type(thing) in TRANSFER_PARTS)


async def bring(prefill, decode, request):
    offer = prefill.offer(request, [1, 2], tokens=8)
    result = await decode.fetch(prefill.engine.ticket(request), [3, 4], tokens=range(8), timeout=5)
    await offer.released()
    return result.stats.chunks


@pytest.mark.parametrize("route", ["staged", "direct", "pull"])
async def test_a_fetch_is_one_task_at_each_end_at_most_however_many_chunks_it_has(stage, route):
    prefill, decode = await stage.pair(Cache(), Cache(), route=route)
    await bring(prefill, decode, "first")
    made = []

    def factory(loop, work, **options):
        made.append(work.__qualname__)
        return asyncio.Task(work, loop=loop, **options)

    loop = asyncio.get_running_loop()
    loop.set_task_factory(factory)
    try:
        chunks = await bring(prefill, decode, "second")
    finally:
        loop.set_task_factory(None)
    assert chunks > 1
    assert len(made) <= 2
    await quiet(prefill, decode)


@pytest.mark.parametrize("route", ["staged", "direct", "pull"])
async def test_a_transfer_that_is_over_is_freed_without_a_collection(stage, route):
    prefill, decode = await stage.pair(Cache(), Cache(), route=route)
    await bring(prefill, decode, "first")
    gc.collect()
    before = alive()  # what tests before this one have left in doubt is kept to the end of the process
    gc.disable()
    try:
        for number in range(5):
            await bring(prefill, decode, f"r{number}")
        await quiet(prefill, decode)
        await eventually(lambda: alive() <= before)  # a thread may still be about to let go of what it did last
    finally:
        gc.enable()
