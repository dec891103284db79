"""Fetches that are given up at any moment, between two processes that are well, where the target moves the data.

What the other process may be writing by then ends at once, and so do they: nobody waits for `revoke_timeout`.
"""

import asyncio

import pytest
from actors import Actor
from faults import _GPU, EVERYTHING, RECEIVER_SEED, SENDER_SEED, SIZES

pytestmark = pytest.mark.timeout(240)

LANES = {"tcp": f"tcp{_GPU}", "shared memory without CMA": f"self,posix,sysv,tcp{_GPU}"}
BEFORE_SECONDS = 5.0
"""A third of `revoke_timeout`."""
FEW, MANY = 12, 150
HOW = ("timed out", "cancelled")
CASES = [
    (route, lane, how)
    for r, route in enumerate(["staged", "direct", "pull"])
    for n, lane in enumerate(LANES)
    for h, how in enumerate(HOW)
    if EVERYTHING or (r + n + h) % 2 == 0
]
"""In a quick run every two of these together."""


@pytest.mark.parametrize(("route", "lane", "how"), CASES)
async def test_a_fetch_that_is_given_up_leaves_nothing_and_is_heard_of_at_once(route, lane, how):
    sender, receiver = (Actor(environment={"UCX_TLS": LANES[lane]}) for _ in range(2))
    try:
        sizes = {**SIZES, "chunk_bytes": "128KiB"}  # one chunk, which is granted with the request
        card = await sender.open("prefill", seed=SENDER_SEED, layout="NHD", **sizes)
        await receiver.open("decode", seed=RECEIVER_SEED, layout="HND", route=route, **sizes)
        usual = await brought(sender, receiver, card, "first")
        usual = min([await brought(sender, receiver, card, f"usual-{n}") for n in range(3)] + [usual])
        tries = MANY if EVERYTHING else FEW
        for number in range(tries):  # at moments from the first to the last of a fetch
            request, moment = f"r{number}", usual * (number + 1) / tries
            await sender.offer("prefill", request)
            options = {"timeout": moment} if how == "timed out" else {"cancel_after": moment}
            began = asyncio.get_running_loop().time()
            outcome = await receiver.fetch("decode", card, request, **options)
            assert outcome["safe"], outcome
            assert asyncio.get_running_loop().time() - began < BEFORE_SECONDS, outcome
            await receiver.restore("decode")
        for actor, name in ((receiver, "decode"), (sender, "prefill")):
            state = await actor.quiet(name, doubts=True, within=BEFORE_SECONDS)
            assert (state["quarantined"], state["custody"]) == (0, 0), state
        await brought(sender, receiver, card, "last")
        assert await sender.wrong("prefill", "kept") == []
        assert (await receiver.close("decode"), await sender.close("prefill")) == ({}, {})
    finally:
        sender.end()
        receiver.end()


async def brought(sender, receiver, card, request):
    """A fetch that succeeds; seconds that it took."""
    await sender.offer("prefill", request)
    began = asyncio.get_running_loop().time()
    outcome = await receiver.fetch("decode", card, request, 20)
    took = asyncio.get_running_loop().time() - began
    assert outcome["ok"], outcome
    assert await receiver.wrong("decode", "fetched", SENDER_SEED) == []
    await receiver.restore("decode")
    return took
