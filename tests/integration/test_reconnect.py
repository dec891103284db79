"""A control stream that is cut at an unlucky moment, between two workers that both live: nothing is lost for good."""

import asyncio
import os
import threading

import pytest
import torch
from inside import cut, cut_session, cut_unheard, session, sessions, when_connected
from stage import SOON, Cache, Gate, awake, eventually, frames, quiet
from stored import Converted, Stored

from kvxfer import PeerLostError, Released
from kvxfer.testing import LoopbackTransport


class Slow(LoopbackTransport):
    """Its first connection takes as long as the test wants."""

    def __init__(self, name, network):
        super().__init__(name, network)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def connect(self, metadata):
        first = not self.begun.is_set()
        self.begun.set()
        if first:
            assert self.go_on.wait(10)
        return super().connect(metadata)


async def test_a_stream_is_cut_while_the_transport_connects(stage, route):
    """The connection of the session before must not be ended under the next one."""
    transports = [Slow(name, stage.network) for name in ("prefill", "decode")]
    prefill, decode = [
        await stage.worker(transport.name, Cache(), transport=transport, route=route) for transport in transports
    ]
    slow, other = transports[:: -1 if route == "pull" else 1]
    other.begun.set()
    _, first = stage.begin(prefill, decode, "r0", timeout=5)
    await eventually(slow.begun.is_set)
    before = session(prefill)
    cut(decode)
    with pytest.raises(PeerLostError):
        await first
    await eventually(lambda: before not in sessions(prefill))
    bringing = asyncio.create_task(stage.bring(prefill, decode, "r1", into=(5, 6)))
    mover, frame = {"staged": (prefill, "Reserve"), "direct": (prefill, "Fetch"), "pull": (decode, "Ready")}[route]
    await eventually(lambda: frames(mover, frame) > 1)
    await asyncio.sleep(0)  # now it asks for the connection
    slow.go_on.set()
    await bringing
    for number in range(2, 4):
        await stage.bring(prefill, decode, f"r{number}")


async def test_conversion_is_agreed_upon_again_though_the_old_stream_seems_open(stage):
    given, ours = Stored(torch.bfloat16, "head"), Stored(torch.float8_e4m3fn, "head", seed=2, layout="HND")
    prefill, decode = await stage.pair(given, ours, decode={"convert": True})
    for request in ("first", "second"):
        prefill.offer(request, [1, 2], tokens=8)
        copied = Converted(ours).bring(given, [1, 2], [5, 6], range(8))
        await decode.fetch(prefill.engine.ticket(request), [5, 6], tokens=range(8), timeout=5)
        copied.check()
        stage.stack.callback(os.close, cut_unheard(decode))
        await eventually(lambda: not sessions(decode))
        assert len(sessions(prefill)) == 1


async def test_what_was_announced_to_a_reader_is_given_up_after_a_cut(stage):
    """Route `pull`: the reader had not begun, and says so when it is back."""
    prefill, decode = await stage.pair(Cache(), Cache(layout="HND"), route="pull")
    offer, fetch = stage.begin(prefill, decode, timeout=5, after=Gate())
    await eventually(lambda: frames(decode, "Ready"))
    cut(decode)
    with pytest.raises(PeerLostError):
        await fetch
    assert fetch.memory_safe
    await eventually(lambda: frames(prefill, "Cancel"))
    await eventually(lambda: not prefill.describe()["sending"])
    assert not awake(decode), "nothing of it is left here, and the answer is not heard"
    await decode.fetch(prefill.engine.ticket("r"), [5, 6], tokens=range(8), timeout=5)
    async with asyncio.timeout(30):
        assert isinstance(await offer.released(), Released)
    await quiet(prefill, decode)


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize("route", ["staged", "direct"])
async def test_a_stream_that_is_cut_again_as_soon_as_it_is_back(stage, route):
    prefill, decode = await stage.pair(Cache(), Cache(layout="HND"), route=route, **SOON)
    stage.network.hold("*")
    _, fetch = stage.begin(prefill, decode, timeout=5)
    await eventually(lambda: frames(decode, "Accept"))
    if route == "staged":  # on others `Fetch` has granted all
        await eventually(lambda: frames(prefill, "Reserve"))
    cuts = []

    def cut_twice(link):
        if len(cuts) < 2:
            cuts.append(link)
            cut_session(link)

    when_connected(decode, cut_twice)
    cut(decode)
    with pytest.raises(Exception, match="code PEER_LOST"):
        await fetch
    await eventually(lambda: len(cuts) == 2, 10)
    stage.network.release("*")
    await eventually(lambda: not decode.describe()["in_doubt"], 10)
    await quiet(decode)
