"""Workers over NIXL on CPU memory, two engines in two processes: every byte, and what happens when one is killed."""

import asyncio
import importlib.util
import itertools
import time
from typing import Any

import pytest
import torch
from far import Far, guarded
from scene import IDS, INTO, ONE_TO_TWO, SIZES, TOKENS, begin, sources, targets

from kvxfer import (
    READY,
    CacheTensor,
    Config,
    KvxferError,
    MemoryInDoubt,
    PeerLostError,
    TransferFailedError,
    Worker,
    shared_empty,
)

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed"),
    pytest.mark.timeout(60),
]

ROUTES = ["staged", "direct", "pull"]


@pytest.fixture
async def far(process):
    """The other process, of which all ranks are closed afterwards."""
    yield process
    if process.process.is_alive():
        await process.close()


QUICK: dict[str, Any] = {
    "peer_timeout": 1.5,
    "revoke_timeout": 1.0,
    "offer_lease": 1.0,
    "no_progress_timeout": 1.5,
    "connect_timeout": 1.0,
    "drain_timeout": 0.0,
}
STARVED_SECONDS = 3.0
"""Scheduling comes on top of every bound, and these tests share their cores."""


async def error_of(transfer):
    """What a fetch raised, and when."""
    (error,) = await asyncio.gather(transfer, return_exceptions=True)
    return error, time.monotonic()


async def test_a_prefill_process_that_is_killed_in_the_middle(near):
    far = Far()
    try:
        moves, transfers = [], []
        for number, route in enumerate(ROUTES):
            issuer, move = await begin(far, near, ONE_TO_TWO, route=route, **QUICK)
            await far.offer(number, "r", IDS, tokens=len(IDS) * 16, streaming=True)
            await far.ready(number, "r", layers=[0, 1])
            moves.append(move)
            transfers.append(move.fetch(issuer.ticket("r")))
        every = list(itertools.chain(*transfers))
        await asyncio.gather(*(transfer.layers(0, 1) for transfer in every))
        watched = [asyncio.ensure_future(error_of(transfer)) for transfer in every]
        began = time.monotonic()
        far.kill()
        outcomes = await asyncio.gather(*watched)
    finally:
        far.end()
    bound = Config(**QUICK).bounds()["dead_peer"]
    for transfer, (error, heard) in zip(every, outcomes, strict=True):
        assert isinstance(error, PeerLostError | MemoryInDoubt | TransferFailedError), error
        assert heard - began <= bound + STARVED_SECONDS
        assert transfer.failed_blocks == {"default": INTO}
        assert transfer.memory_safe == (not isinstance(error, MemoryInDoubt))
    for transfer, (error, _) in zip(transfers[0], outcomes[:2], strict=True):
        assert isinstance(error, PeerLostError)  # staged: only our own copies write the blocks
        assert transfer.memory_safe
    untouched_beside(moves)


def untouched_beside(moves):
    """Blocks that were not asked for, tokens that were not asked for, and layers that never became ready."""
    for move in moves:
        move.bring([0])
        for one in move.expected:
            assert guarded(one.placed)
            for layer, expected in one.expected.items():
                found, wanted = (memory.permute(one.cache._order) for memory in (one.placed.memory[layer], expected))
                if layer != 1:
                    assert torch.equal(found, wanted)
                assert torch.equal(found[:, [3, 5, 6, 8]], wanted[:, [3, 5, 6, 8]])
                assert torch.equal(found[:, INTO[0], :5], wanted[:, INTO[0], :5])
                assert torch.equal(found[:, INTO[-1], -3:], wanted[:, INTO[-1], -3:])


async def test_a_decode_process_that_is_killed_in_the_middle(near):
    far = Far()
    try:
        theirs = sources([range(8)])
        for number, route in enumerate(ROUTES):
            await near.open("prefill", theirs, route=route, **QUICK, **SIZES)
            near.offer(number, "r", IDS, tokens=len(IDS) * 16, streaming=True)
            near.ready(number, "r", layers=[0, 1])
            ticket = near.issuer.ticket("r")
            await far.open("decode", targets([range(8)]), route=route, **QUICK, **SIZES)
            await far.start_fetch(number, ticket, INTO, tokens=TOKENS)
            await far.layers(number, "r", 0, 1)
        endings = [asyncio.ensure_future(near.released(number, "r")) for number in range(3)]
        began = time.monotonic()
        far.kill()
        ended: list[Any] = await asyncio.gather(*endings, return_exceptions=True)
        waited = time.monotonic() - began
    finally:
        far.end()
    assert waited <= Config(**QUICK).bounds()["released_by_lease"] + STARVED_SECONDS
    for ending in ended:
        assert isinstance(ending, KvxferError) or ending[0] == "Expired", ending
    assert ended[0][0] == "Expired"  # staged: nobody reads the blocks but our own copies
    assert near.intact()


@pytest.mark.parametrize("route", [*ROUTES, "mapped"])
async def test_a_worker_may_fetch_from_itself(route):
    """NIXL refuses to be told what it is itself."""
    cache = shared_empty((2, 8, 16, 2, 8)).fill_(7.0)
    cache[:, :3].uniform_()
    tensor = CacheTensor(cache, "kv block token head dim", layers=[0], heads=range(2))
    expected = cache.clone()
    expected[:, 5:] = expected[:, :3]
    async with Worker([tensor], Config(route=route, **SIZES)) as worker:
        for request in "ab":
            offer = worker.offer(request, [0, 1, 2], tokens=48)
            ticket = worker.engine.ticket(request)
            await worker.fetch(ticket, [5, 6, 7], tokens=range(48), after=READY, timeout=20)
            assert torch.equal(cache, expected)
            cache[:, 5:] = 0.0
            await offer.released()
        await worker.decline(worker.engine.ticket("c"))
