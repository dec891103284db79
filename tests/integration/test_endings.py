"""A transfer that the prefill side ends: nothing of it goes on afterwards, however much of it was under way."""

import asyncio
import logging
import time

import pytest
from inside import take_all
from stage import Cache, Gate, eventually, frames, quiet

from kvxfer import KvxferError, Released, TransferFailedError, TransferTimeoutError, Withdrawn
from kvxfer.copy.mover import Mover
from kvxfer.protocol.messages import Reserve


async def granted(prefill, tap, chunks):
    """The only transfer may move so many chunks, and its prefill rank knows."""

    def heard():
        said = tap.of(Reserve)
        count = frames(prefill, "Reserve")
        return said and said[-1].chunks >= chunks and count == len(said)

    await eventually(heard)


@pytest.mark.parametrize("how", ["withdraw", "cancel"])
async def test_hundreds_of_chunks_that_were_granted_end_at_once(stage, tap, how):
    """The decode rank's window decides how many there are; most of them wait for memory to gather into."""
    blocks = 1024
    sizes = {"route": "staged", "arena_bytes": "8MiB", "chunk_bytes": "1KiB"}
    few, caches = {"arena_bytes": "160KiB"}, (Cache(blocks=blocks), Cache(blocks=blocks))
    prefill, decode = await stage.pair(*caches, **sizes, decode={"window": 1000}, prefill=few)
    ids, tokens = range(blocks), range(4 * blocks)
    offer, transfer = stage.begin(prefill, decode, "r", ids, ids, tokens, offered={"after": Gate()})
    await granted(prefill, tap, 500)
    if how == "withdraw":
        assert isinstance(await asyncio.wait_for(offer.withdraw(), 3), Withdrawn)
        with pytest.raises(TransferFailedError):
            await transfer
    else:
        transfer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await transfer
        await offer.withdraw()
    await quiet(prefill, decode)


@pytest.mark.parametrize("route", ["staged", "direct"])
async def test_chunks_that_never_became_readable_are_not_sent(stage, tap, route, monkeypatch):
    """However long it takes to cancel them: giving up must not look as if the events had fired."""
    cancel = Mover.cancel

    def slow(mover, copy):
        time.sleep(0.003)  # as if another thread held the GIL
        cancel(mover, copy)

    source = Cache()
    prefill, decode = await stage.pair(source, Cache(), route=route, window=64)
    offer = prefill.offer("r", streaming=True)
    offer.extend([1, 2], tokens=range(8))
    offer.ready(after=Gate())
    transfer = decode.start_fetch(prefill.engine.ticket("r"), [3, 4], tokens=range(8))
    layers = sorted({layer for tensor in source.tensors for layer in tensor.layers})
    waits = [asyncio.ensure_future(transfer.layers(layer, layer + 1)) for layer in layers]
    await granted(prefill, tap, len(layers))
    monkeypatch.setattr(Mover, "cancel", slow)
    await offer.withdraw()
    with pytest.raises(TransferFailedError):
        await transfer
    ends = await asyncio.gather(*waits, return_exceptions=True)
    assert all(isinstance(end, KvxferError) for end in ends)
    await quiet(prefill, decode)


async def test_who_waits_for_layers_hears_of_the_failure(stage, source, target):
    prefill, decode = await stage.pair(source, target)
    offer, transfer = stage.begin(prefill, decode, offered={"streaming": True})
    waiting = asyncio.create_task(transfer.layers(0, 1))
    await eventually(lambda: prefill.describe()["sending"])
    await offer.withdraw()
    with pytest.raises(KvxferError, match="withdrawn"):
        await waiting
    with pytest.raises(KvxferError, match="withdrawn"):
        await transfer.layers(1, 2)
    assert transfer.failed_blocks == {"default": [3, 4]}
    assert transfer.memory_safe
    await quiet(decode)


async def test_memory_that_is_granted_in_the_moment_of_the_end_is_given_back(stage, source, target, caplog):
    prefill, decode = await stage.pair(source, target, route="staged")
    taken = take_all(prefill, "send")
    offer, transfer = stage.begin(prefill, decode)
    await eventually(lambda: prefill.describe()["arena"]["send"].waiting_requests)
    taken.release()  # granted at once, before the one who waits for it runs again
    await offer.withdraw()
    with pytest.raises(KvxferError, match="withdrawn"):
        await transfer
    await quiet(prefill, decode)
    assert "task_failed" not in caplog.text, "nor is it used"


async def test_a_line_that_fails_keeps_no_request_of_its_own_or_another(stage, monkeypatch):
    """They succeed in one turn, and are counted after it."""
    prefill, decode = await stage.pair(Cache(), Cache())
    await stage.bring(prefill, decode, "before")
    failed = []

    def fails():
        if not failed:
            failed.append(True)
            raise OSError("the log cannot be written")
        return False

    monkeypatch.setattr("kvxfer.decode.fetch._hears_info", fails)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    begun = [stage.begin(prefill, decode, f"r{at}", (at,), (at + 4,), range(4)) for at in range(3)]
    await asyncio.gather(*(transfer for _, transfer in begun))
    endings = await asyncio.gather(*(asyncio.wait_for(offer.released(), 3) for offer, _ in begun))
    assert failed
    assert all(isinstance(ending, Released) for ending in endings)


@pytest.mark.parametrize("loop", ["caller", "own"])
async def test_transfers_and_offers_end_though_no_line_can_be_written(stage, loop, monkeypatch, caplog):
    class Full(logging.Handler):
        def emit(self, record):
            tried.add(vars(record)["kvxfer"]["event"])
            raise OSError("no space left on device")

    tried = set()
    caplog.set_level(logging.INFO, "kvxfer")
    monkeypatch.setattr(logging, "raiseExceptions", False)
    monkeypatch.setattr(logging.getLogger("kvxfer"), "handlers", [Full()])
    prefill, decode = await stage.pair(Cache(), Cache(), loop=loop)
    await stage.bring(prefill, decode)
    offer, transfer = stage.begin(prefill, decode, "late", offered={"streaming": True}, timeout=0.1)
    (ended,), _ = await asyncio.wait({transfer.outcome}, timeout=3)
    assert isinstance(ended.exception(), TransferTimeoutError)
    assert isinstance(await asyncio.wait_for(offer.withdraw(), 3), Withdrawn)
    assert tried >= {"transfer_sent", "fetch_ended", "offer_ended", "transfer_failed", "fetch_failed"}
    await quiet(prefill, decode)
