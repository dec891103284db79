"""A pause of a process that outlasts what the other one waits for leaves nothing behind once it is over.

Over TCP, where the target moves the data: what was posted to a process that stands still goes on when that does.
"""

import asyncio

import pytest
from actors import Actor
from faults import (
    EVERYTHING,
    LANES,
    QUICK,
    RECEIVER_SEED,
    SENDER_SEED,
    SIZES,
    STARVED_SECONDS,
    brought,
    same_bytes,
    whole,
)

pytestmark = pytest.mark.timeout(120)

BACK_SECONDS = 2.0
IMPATIENT = {"no_progress_timeout": 0.4}
LEFT = {**IMPATIENT, "peer_timeout": QUICK["peer_timeout"], "revoke_timeout": 2.0}
"""The stream is given up too, and the agent made anew."""


CASES = [("staged", IMPATIENT, False), ("direct", LEFT, True), ("staged", LEFT, True), ("direct", IMPATIENT, False)]
"""A post is given up, or all is and the agent made anew; in a quick run each on one route."""


@pytest.mark.parametrize(("route", "settings", "anew"), CASES if EVERYTHING else CASES[:2])
async def test_a_pause_of_the_decode_process_leaves_nothing_behind(route, settings, anew):
    with Actor(LANES["tcp"]) as sender, Actor(LANES["tcp"]) as receiver:
        settings = {**SIZES, **settings, "route": route}
        card = await sender.open("prefill", seed=SENDER_SEED, layout="NHD", **settings)
        await receiver.open("decode", seed=RECEIVER_SEED, layout="HND", **settings)
        await brought(sender, receiver, card, "before")
        await sender.halt("sender", "in the midst of the write")
        await sender.offer("prefill", "r")
        fetching = asyncio.create_task(receiver.fetch("decode", card, "r"))
        await sender.reached("in the midst of the write")
        receiver.stop()
        sender.proceed()
        async with asyncio.timeout(20):
            while (state := await sender.state("prefill"))["busy"] or state["rebuilt"] < anew:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        receiver.thaw()
        for actor, name in ((receiver, "decode"), (sender, "prefill")):
            await whole(actor, name, BACK_SECONDS + STARVED_SECONDS)
        outcome = await fetching
        assert not outcome["ok"]
        assert outcome["safe"], outcome
        await receiver.restore("decode")
        await brought(sender, receiver, card, "after")
        await same_bytes(sender, "prefill", "kept")
        assert (await receiver.close("decode"), await sender.close("prefill")) == ({}, {})
