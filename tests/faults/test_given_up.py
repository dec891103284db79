"""Fetches that are given up at any moment, between two processes that are well, where the target moves the data.

What the other process may be writing by then ends at once, and so do they: nobody waits for `revoke_timeout`.
"""

import asyncio

import pytest
from actors import Actor
from faults import _GPU, EVERYTHING, RECEIVER_SEED, SENDER_SEED, SIZES, brought, same_bytes, whole

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
    environment = {"UCX_TLS": LANES[lane]}
    with Actor(environment) as sender, Actor(environment) as receiver:
        sizes = {**SIZES, "chunk_bytes": "128KiB"}  # one chunk, which is granted with the request
        card = await sender.open("prefill", seed=SENDER_SEED, layout="NHD", **sizes)
        await receiver.open("decode", seed=RECEIVER_SEED, layout="HND", route=route, **sizes)
        usual = min([await brought(sender, receiver, card, f"usual-{n}") for n in range(4)])
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
            await whole(actor, name, BEFORE_SECONDS)
        await brought(sender, receiver, card, "last")
        await same_bytes(sender, "prefill", "kept")
        assert (await receiver.close("decode"), await sender.close("prefill")) == ({}, {})
