"""Cancellation at every step and by every means: when the await returns, memory is safe, or says that it is not."""
# what failed has a report, and what is fetched was offered
# pyright: reportOptionalMemberAccess=false

import asyncio

import pytest
from inside import take_all
from stage import SOON, Copied, eventually, quiet

from kvxfer import BlocksError, KvxferError, MemoryInDoubt, Released

TOKENS = range(8)


# --- longer than revoke_timeout


async def test_direct_in_doubt_until_the_peer_has_answered(stage, source, target):
    prefill, decode = await stage.pair(source, target, route="direct", **SOON)
    offer, transfer = await stage.in_flight(prefill, decode, "decode", keep=True)
    transfer.cancel()
    with pytest.raises(MemoryInDoubt) as caught:
        await transfer
    doubt = caught.value
    assert isinstance(doubt.__cause__, asyncio.CancelledError)
    assert not doubt.memory_safe
    assert doubt.blocks == {"default": (3, 4)}
    assert doubt.peer.startswith("prefill")
    assert f": {doubt.peer}, which is silent, may still write" in str(doubt)
    assert str(doubt).endswith("(the caller cancelled)")
    for use in (
        lambda: decode.start_fetch(prefill.engine.ticket("r"), [4], tokens=range(4)),
        lambda: decode.offer("mine", [3], tokens=4),
    ):
        with pytest.raises(BlocksError, match="may still write it; await settled"):
            use()
    settling = asyncio.create_task(doubt.settled())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not settling.done()
    assert decode.describe()["in_doubt"] == 1
    copied = Copied(target).bring(source, [1, 2], [3, 4], TOKENS)
    stage.network.release("decode")  # the late bytes land
    async with asyncio.timeout(30):
        await settling
        await doubt.settled()
    copied.expected = target.clone()
    await quiet(prefill, decode)
    copied.check()
    copied = Copied(target).bring(source, [1, 2], [3, 4], TOKENS)
    await decode.fetch(prefill.engine.ticket("r"), [3, 4], tokens=TOKENS, timeout=5)
    copied.check()
    assert isinstance(await offer.released(), Released)


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
