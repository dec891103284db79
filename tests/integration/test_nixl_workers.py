"""A worker over NIXL on CPU memory that is its own peer. Two processes are played by the rows and the faults."""

import importlib.util

import pytest
import torch
from scene import SIZES

from kvxfer import READY, CacheTensor, Config, Worker, shared_empty

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed"),
    pytest.mark.timeout(60),
]


@pytest.mark.parametrize("route", ["staged", "direct", "pull", "mapped"])
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
