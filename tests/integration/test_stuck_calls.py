"""A call of the transport that does not return, as one may that waits for a GPU: who waits for a post hears in time.

With real threads: in virtual time nothing can stand still in a call.
"""

import asyncio
import contextlib
import tempfile

import pytest
from stage import DEFAULTS, Cache, Copied, eventually, quiet
from standing import Stuck

from kvxfer import BlocksError, Config, KvxferError, MemoryInDoubt, TransferFailedError, Withdrawn
from kvxfer import worker as watch
from kvxfer.worker import Worker

TOKENS = range(8)
REVOKE_SECONDS = 0.3
NO_PROGRESS_SECONDS = 1.0
FOREVER = 300.0


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    """Sockets of these tests alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@contextlib.asynccontextmanager
async def workers(network, **config):
    """A pair that has met, with their caches and the prefill rank's transport."""
    config = {**DEFAULTS, "revoke_timeout": REVOKE_SECONDS, "no_progress_timeout": FOREVER, **config}
    transports = [Stuck(name, network, "post", holding=False) for name in ("p", "d")]
    caches = Cache(), Cache(layout="HND")
    pair = [
        Worker(cache.tensors, Config(**config), transport=transport)
        for cache, transport in zip(caches, transports, strict=True)
    ]
    async with pair[0] as prefill, pair[1] as decode:
        try:
            prefill.offer("before", [1, 2], tokens=8)
            await decode.fetch(prefill.engine.ticket("before"), [3, 4], tokens=TOKENS)
            yield prefill, decode, caches, transports
        finally:
            for transport in transports:
                transport.go.set()


async def goes_on(prefill, decode, caches, stuck, *doubts):
    """The call returns: what was in doubt is over, and another request is brought."""
    stuck.holding = False
    stuck.go.set()
    for doubt in doubts:
        if isinstance(doubt, MemoryInDoubt):
            await doubt.settled()
    await quiet(prefill, decode)
    copied = Copied(caches[1]).bring(caches[0], [5, 6], [3, 4], TOKENS)
    prefill.offer("after", [5, 6], tokens=8)
    await decode.fetch(prefill.engine.ticket("after"), [3, 4], tokens=TOKENS)
    copied.check()


async def raised(awaitable):
    """What it raised or returned; it must not take for ever."""
    async with asyncio.timeout(60):
        (outcome,) = await asyncio.gather(awaitable, return_exceptions=True)
    return outcome


@pytest.mark.parametrize("route", ["staged", "direct"])
async def test_an_offer_ends_and_the_decode_rank_hears(network, route):
    async with workers(network, route=route) as (prefill, decode, caches, transports):
        stuck = transports[0]
        stuck.holding = True
        offer = prefill.offer("r", [1, 2], tokens=8)
        transfer = decode.start_fetch(prefill.engine.ticket("r"), [3, 4], tokens=TOKENS)
        await eventually(stuck.inside.is_set)
        outcome, failure = await asyncio.gather(raised(offer.withdraw()), raised(transfer))
        if route == "direct":
            assert isinstance(outcome, MemoryInDoubt), outcome
            assert isinstance(failure, MemoryInDoubt), failure
            with pytest.raises(BlocksError, match="may still read it"):
                prefill.offer("s", [1], tokens=4)
        else:  # what is posted was gathered before, and reads none of them
            assert isinstance(outcome, Withdrawn), outcome
            assert isinstance(failure, KvxferError), failure
            assert transfer.memory_safe
            assert prefill.describe()["arena"]["send"].free_bytes < prefill.describe()["arena"]["send"].capacity_bytes
        assert "withdrawn" in str(failure)
        assert prefill.describe()["sending"] == 1
        await goes_on(prefill, decode, caches, stuck, outcome, failure)


@pytest.mark.parametrize("route", ["staged", "direct", "pull"])
async def test_a_fetch_without_a_time_out_fails_though_nobody_takes_its_offer_back(network, route, monkeypatch):
    monkeypatch.setattr(watch, "_STALLED_SECONDS", NO_PROGRESS_SECONDS)
    times = {"no_progress_timeout": NO_PROGRESS_SECONDS}
    async with workers(network, route=route, **times) as (prefill, decode, caches, transports):
        stuck = transports[route == "pull"]
        stuck.holding = True
        prefill.offer("r", [1, 2], tokens=8)
        transfer = decode.start_fetch(prefill.engine.ticket("r"), [3, 4], tokens=TOKENS)
        await eventually(stuck.inside.is_set)
        failure = await raised(transfer)
        assert isinstance(failure, MemoryInDoubt if route != "staged" else TransferFailedError), failure
        assert "a call of the transport has not returned for" in str(failure)
        assert transfer.memory_safe == (route == "staged")
        await goes_on(prefill, decode, caches, stuck, failure)
