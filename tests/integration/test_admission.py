"""Bounds on what moves at once: in place, and announced to a puller."""

import asyncio
import gc

import pytest
from inside import parts_made, send_by, serve_chunks_by, take_all, when_crowded
from stage import Cache, Copied, eventually, in_place, quiet

from kvxfer import KvxferError
from kvxfer.errors import FabricError
from kvxfer.protocol.messages import Landed, Want
from kvxfer.protocol.packing import unpack_u32

IDS = list(range(64))


def announcing():
    return any(task.get_name().startswith("kvxfer want") for task in asyncio.all_tasks())


async def test_a_puller_has_few_chunks_before_it(stage, network, monkeypatch):
    source, target = Cache(blocks=64), Cache(blocks=64)
    prefill, decode = await stage.pair(source, target, in_place_chunk_bytes="1KiB", route="pull")
    outstanding, most = 0, 0

    def watch(send, messages):
        nonlocal outstanding, most
        for message in messages:
            if isinstance(message, Want):
                outstanding += len(unpack_u32(message.chunks))
            elif isinstance(message, Landed):
                outstanding -= len(unpack_u32(message.chunks))
            most = max(most, outstanding)
        return send(*messages)

    send_by(watch, monkeypatch)
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
    await eventually(lambda: in_place(decode).waiting_requests > 0)
    assert in_place(decode).writing_bytes <= 2048
    network.release("decode")
    result = await transfer
    wanted.check()
    assert result.stats.route == "direct"
    await offer.released()
    assert in_place(decode).free_bytes == in_place(decode).capacity_bytes


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_chunk_that_was_ended_while_it_asked_gives_back_what_it_gets(stage, monkeypatch, side, fails):
    """Memory comes back while the second of two chunks asks; the first one is served before, and may end them both."""
    source, target = Cache(), Cache(layout="HND")
    prefill, decode = await stage.pair(source, target, route="staged", window=2)
    worker, share = (prefill, "send") if side == "prefill" else (decode, "receive")
    full, asked, served = take_all(worker, share), [], []

    def crowded():
        asked.append(1)
        if len(asked) == 2:
            full.release()

    def serve(takes, serves):
        served.append(1)
        if fails:
            takes()
            raise FabricError("it cannot be served")
        serves()

    when_crowded(worker, share, crowded, monkeypatch)
    serve_chunks_by(share, serve, monkeypatch)
    offer = prefill.offer("r", [1, 2, 3, 4], tokens=16)
    copied = Copied(target).bring(source, [1, 2, 3, 4], [5, 6, 7, 8], range(16))
    transfer = decode.start_fetch(prefill.engine.ticket("r"), [5, 6, 7, 8], tokens=range(16), timeout=10)
    if fails:
        with pytest.raises(KvxferError, match="it cannot be served"):
            await transfer
    else:
        await transfer
        copied.check()
    assert len(asked) >= 2
    assert (len(served) == 1) is fails
    await offer.withdraw()
    await quiet(prefill, decode)


@pytest.mark.parametrize("route", ["staged", "direct", "pull"])
async def test_nothing_of_a_transfer_that_is_over_is_kept(stage, route, monkeypatch):
    """Its plans are large. Nobody who waited for memory is kept either, and no cycle waits for the collector."""
    made, source, target = parts_made(monkeypatch), Cache(), Cache(layout="HND")
    config = {"route": route, "arena_bytes": "4KiB", "chunk_bytes": "1KiB", "in_place_chunk_bytes": "1KiB"}
    prefill, decode = await stage.pair(source, target, max_in_place_bytes="2KiB", **config)
    gc.disable()
    try:
        for number in range(8):
            prefill.offer(f"r{number}", [number], tokens=4)
        tickets = [prefill.engine.ticket(f"r{number}") for number in range(8)]
        await asyncio.gather(
            *(decode.fetch(one, [at + 8], tokens=range(4), timeout=30) for at, one in enumerate(tickets))
        )
        await quiet(prefill, decode)
        assert decode.describe()["metrics"]["admission_waits"] or route == "pull"
        await eventually(lambda: not [one for one in made if one() is not None])
    finally:
        gc.enable()
