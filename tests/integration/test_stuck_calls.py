"""A call of the transport that does not return, as one may that waits for a GPU: who waits for a post hears in time.

With real threads: in virtual time nothing can stand still in a call.
"""

import asyncio

import pytest
from stage import Cache, eventually, quiet, raised
from standing import Stuck

from kvxfer import BlocksError, KvxferError, MemoryInDoubt, TransferFailedError, Withdrawn
from kvxfer import worker as watch

REVOKE_SECONDS = 0.3
NO_PROGRESS_SECONDS = 1.0
FOREVER = 300.0


async def stuck(stage, route, **config):
    """A pair that has met, and a request whose post stands still in a call of a transport: all that there is of it."""
    config = {"revoke_timeout": REVOKE_SECONDS, "no_progress_timeout": FOREVER, **config}
    transports = [Stuck(name, stage.network, "post", holding=False) for name in ("prefill", "decode")]
    prefill, decode = [
        await stage.worker(transport.name, Cache(), transport=transport, route=route, **config)
        for transport in transports
    ]
    for transport in transports:
        stage.stack.callback(transport.go.set)
    await stage.bring(prefill, decode, "before")
    held = transports[route == "pull"]
    held.holding = True
    offer, transfer = stage.begin(prefill, decode)
    await eventually(held.inside.is_set)
    return prefill, decode, offer, transfer, held


async def goes_on(stage, prefill, decode, held, *outcomes):
    """The call returns: what was in doubt is over, and another request is brought."""
    held.holding = False
    held.go.set()
    for doubt in outcomes:
        if isinstance(doubt, MemoryInDoubt):
            await doubt.settled()
    await quiet(prefill, decode)
    await stage.bring(prefill, decode, "after", ids=(5, 6))


@pytest.mark.parametrize("route", ["staged", "direct"])
async def test_an_offer_ends_and_the_decode_rank_hears(stage, route):
    prefill, decode, offer, transfer, held = await stuck(stage, route)
    outcome, failure = await asyncio.gather(offer.withdraw(), transfer.outcome, return_exceptions=True)
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
    await goes_on(stage, prefill, decode, held, outcome, failure)


async def test_a_fetch_without_a_time_out_fails_though_nobody_takes_its_offer_back(stage, route, monkeypatch):
    monkeypatch.setattr(watch, "_STALLED_SECONDS", NO_PROGRESS_SECONDS)
    prefill, decode, _, transfer, held = await stuck(stage, route, no_progress_timeout=NO_PROGRESS_SECONDS)
    failure = await raised(transfer, MemoryInDoubt if route != "staged" else TransferFailedError)
    assert "a call of the transport has not returned for" in str(failure)
    assert transfer.memory_safe == (route == "staged")
    await goes_on(stage, prefill, decode, held, failure)
