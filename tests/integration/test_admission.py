"""Bounds on what moves at once: in place, and announced to a puller."""

import asyncio
import gc

import pytest
from inside import parts_kept, serve_chunks_by, take_all, when_crowded
from stage import Cache, Copied, eventually, quiet

from kvxfer import KvxferError
from kvxfer.errors import FabricError
from kvxfer.protocol.messages import Read, Ready

IDS = list(range(64))


async def test_a_puller_has_few_chunks_before_it(stage, network, tap):
    source, target = Cache(blocks=64), Cache(blocks=64)
    prefill, decode = await stage.pair(source, target, chunk_bytes="1KiB", route="pull")
    said, most = {Ready: 0, Read: 0}, 0

    def watch(message):
        nonlocal most
        said[type(message)] = message.chunks
        most = max(most, said[Ready] - said[Read])
        return message

    tap.change |= dict.fromkeys(said, watch)
    wanted = Copied(target).bring(source, IDS, IDS[::-1], range(256))
    network.hold("*")
    offer, transfer = stage.begin(prefill, decode, "r", IDS, IDS[::-1], range(256), timeout=10)
    await eventually(lambda: said[Ready] - said[Read] >= 16)
    network.release("*")
    result = await transfer
    wanted.check()
    await offer.released()
    assert result.stats.chunks > 16  # else the bound would not have been reached
    assert most == 16
    assert said == dict.fromkeys(said, result.stats.chunks)


@pytest.mark.parametrize("ending", ["served", "fails", "cancelled"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_chunk_that_was_ended_while_it_asked_gives_back_what_it_gets(stage, monkeypatch, side, ending):
    """Memory comes back while a chunk asks; then it is served, or that fails, or nobody wants it any more."""
    source, target = Cache(), Cache(layout="HND")
    prefill, decode = await stage.pair(source, target, route="staged", window=2)
    worker, share = (prefill, "send") if side == "prefill" else (decode, "receive")
    full, asked, served = take_all(worker, share), [], []

    def crowded():
        asked.append(1)
        if len(asked) == 1:
            full.release()
            if ending == "cancelled":
                transfer.cancel()

    def serve(takes, serves):
        served.append(1)
        if ending == "fails":
            takes()
            raise FabricError("it cannot be served")
        serves()

    when_crowded(worker, share, crowded, monkeypatch)
    serve_chunks_by(share, serve, monkeypatch)
    copied = Copied(target).bring(source, range(1, 5), range(5, 9), range(16))
    offer, transfer = stage.begin(prefill, decode, "r", range(1, 5), range(5, 9), range(16), timeout=10)
    if ending == "fails":
        with pytest.raises(KvxferError, match="it cannot be served"):
            await transfer
        assert len(served) == 1
    elif ending == "cancelled":
        with pytest.raises(asyncio.CancelledError):
            await transfer
    else:
        await transfer
        copied.check()
        assert served
    assert len(asked) == 1
    await offer.withdraw()
    await quiet(prefill, decode)


@pytest.mark.parametrize("route", ["staged", "direct", "pull"])
async def test_nothing_of_a_transfer_that_is_over_is_kept(stage, route):
    """Its plans are large. Nobody who waited for memory is kept either, and no cycle waits for the collector."""
    source, target = Cache(), Cache(layout="HND")
    config = {"route": route, "arena_bytes": "4KiB", "chunk_bytes": "1KiB"}
    prefill, decode = await stage.pair(source, target, **config)
    gc.collect()
    gc.disable()
    before = len(parts_kept())
    try:
        for number in range(8):
            prefill.offer(f"r{number}", [number], tokens=4)
        tickets = [prefill.engine.ticket(f"r{number}") for number in range(8)]
        fetches = [decode.start_fetch(one, [at + 8], tokens=range(4), timeout=30) for at, one in enumerate(tickets)]
        assert len(parts_kept()) >= before + len(fetches)
        while fetches:
            await fetches.pop()
        await quiet(prefill, decode)
        assert decode.describe()["metrics"]["admission_waits"] or route != "staged"
        await eventually(lambda: len(parts_kept()) == before)
    finally:
        gc.enable()
