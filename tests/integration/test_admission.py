"""Bounds on what moves at once: in place, and announced to a puller."""

import asyncio

from stage import Cache, Copied, eventually

from kvxfer.link import Link
from kvxfer.protocol.messages import Landed, Want
from kvxfer.protocol.packing import unpack_u32

IDS = list(range(64))


def announcing():
    return any(task.get_name().startswith("kvxfer want") for task in asyncio.all_tasks())


async def test_a_puller_has_few_chunks_before_it(stage, network, monkeypatch):
    source, target = Cache(blocks=64), Cache(blocks=64)
    prefill, decode = await stage.pair(source, target, in_place_chunk_bytes="1KiB", route="pull")
    outstanding, most = 0, 0
    original = Link.send

    def watch(link, *messages):
        nonlocal outstanding, most
        for message in messages:
            if isinstance(message, Want):
                outstanding += len(unpack_u32(message.chunks))
            elif isinstance(message, Landed):
                outstanding -= len(unpack_u32(message.chunks))
            most = max(most, outstanding)
        return original(link, *messages)

    monkeypatch.setattr(Link, "send", watch)
    wanted = Copied(target).bring(source, IDS, IDS[::-1], range(256))
    offer = prefill.offer("r", IDS, tokens=256)
    network.hold("*")
    transfer = decode.start_fetch(prefill.engine.ticket("r"), IDS[::-1], tokens=range(256), timeout=10)
    await eventually(lambda: outstanding >= 16 and not announcing())
    network.release("*")
    result = await transfer
    wanted.check()
    await offer.released()
    assert result.stats.chunks > 16  # else the bound would not have been reached
    assert most == 16
    assert outstanding == 0


async def test_in_place_grants_are_bounded(stage, network):
    source, target = Cache(blocks=64), Cache(blocks=64)
    bound = {
        "chunk_bytes": "1KiB",
        "in_place_chunk_bytes": "1KiB",
        "max_in_place_bytes": "2KiB",
        "window": 8,
        "route": "direct",
    }
    prefill, decode = await stage.pair(source, target, **bound)
    network.hold("decode")
    wanted = Copied(target).bring(source, IDS, IDS, range(256))
    offer = prefill.offer("r", IDS, tokens=256)
    transfer = decode.start_fetch(prefill.engine.ticket("r"), IDS, tokens=range(256), timeout=10)
    await eventually(lambda: network.held("decode") > 0)
    (desk,) = decode._site.in_place_desks.values()
    await eventually(lambda: desk.share.snapshot().waiting_requests > 0)
    assert desk.share.snapshot().writing_bytes <= 2048
    network.release("decode")
    result = await transfer
    wanted.check()
    assert result.stats.route == "direct"
    await offer.released()
    assert desk.share.snapshot().free_bytes == desk.share.capacity
