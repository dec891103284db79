"""A stall of either process fails nothing by default settings: its interpreter is held, or it is stopped."""

import asyncio
from typing import Any

import pytest
from actors import Actor
from faults import EVERYTHING, RECEIVER_SEED, SENDER_SEED, SIZES, brought, same_bytes, whole
from steps import ROUTES

pytestmark = pytest.mark.timeout(90)

SECONDS = 10.0 if EVERYTHING else 0.5
CASES = [("sender", "held"), ("receiver", "stopped"), ("sender", "stopped"), ("receiver", "held")]


@pytest.mark.parametrize(("side", "kind"), CASES if EVERYTHING else CASES[:2])
async def test_a_stall(side, kind):
    await play(side, kind, seconds=SECONDS)


async def test_both_stand_still_for_longer_than_either_would_be_waited_for():
    """As on a machine that is paused: neither takes that for silence of the other."""
    await play("both", "stopped", seconds=2.0, peer_timeout=1.0)


async def play(side, kind, *, seconds, **settings: Any):
    """A fetch on every route at once, in the midst of which one side stalls; all of them arrive whole."""
    with Actor() as sender, Actor() as receiver:
        card = await sender.open("prefill", seed=SENDER_SEED, layout="NHD", **SIZES, **settings)
        for route in ROUTES:
            await receiver.open(route, seed=RECEIVER_SEED, layout="HND", route=route, **SIZES, **settings)
            await brought(sender, receiver, card, f"before-{route}", route)
            await sender.offer("prefill", route, streamed=True)
            await sender.ready("prefill", route, 0)
        fetches = [asyncio.create_task(receiver.fetch(route, card, route)) for route in ROUTES]
        await asyncio.gather(*(receiver.layer_landed(route, route, 0) for route in ROUTES))
        stalled = {"sender": [sender], "receiver": [receiver], "both": [sender, receiver]}[side]

        async def go_on():
            for route in ROUTES:
                await sender.ready("prefill", route, 1)

        at = asyncio.get_running_loop().time()
        if kind == "stopped":
            for actor in stalled:
                actor.stop()
        if side == "receiver":
            await go_on()
        if kind == "stopped":
            await asyncio.sleep(seconds)
            for actor in stalled:
                actor.thaw()
        else:
            await asyncio.gather(*(actor.hold_interpreter(seconds) for actor in stalled))
        assert asyncio.get_running_loop().time() - at >= seconds
        if side != "receiver":
            await go_on()
        for route, outcome in zip(ROUTES, await asyncio.gather(*fetches), strict=True):
            assert outcome["ok"], f"{route}: {outcome}"
            await same_bytes(receiver, route, "fetched", SENDER_SEED)
        for route in ROUTES:
            await whole(receiver, route, 5)
            assert await receiver.close(route) == {}
        await same_bytes(sender, "prefill", "kept")
        assert await sender.close("prefill") == {}
