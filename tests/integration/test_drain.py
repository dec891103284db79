"""A worker that is to stop: it finishes what runs, says so, and refuses the rest in a way that a retry cures."""
# what failed has a report, and what is fetched was offered
# pyright: reportOptionalMemberAccess=false

import asyncio
import gc

import pytest
from inside import cut, entry, sessions
from stage import DEFAULTS, Cache, eventually, quiet

import kvxfer
from kvxfer.fabric.loopback import LoopbackTransport
from kvxfer.protocol.messages import Goodbye

TOKENS = range(8)


def draining(worker):
    """What a worker has heard of its peers, by role."""
    return {peer["role"]: peer["draining"] for peer in worker.describe()["peers"]}


async def test_peers_are_told_at_its_begin(stage, tap):
    prefill, decode = await stage.pair(Cache(), Cache())
    await stage.bring(prefill, decode)
    assert draining(decode) == {"client": False}
    offer = prefill.offer("before", [1, 2], tokens=8)
    prefill.begin_drain()
    prefill.begin_drain()
    await eventually(lambda: draining(decode) == {"client": True})
    assert draining(prefill) == {"server": False}
    decode.begin_drain()
    await eventually(lambda: draining(prefill) == {"server": True})
    assert [said.code for said in tap.of(Goodbye)] == [kvxfer.Code.DRAINING] * 2
    late = await stage.worker("late", Cache())
    await late.fetch(offer.ticket, [3, 4], tokens=TOKENS, timeout=5)  # it was on offer
    await eventually(lambda: draining(late) == {"client": True})  # who connects later is told too
    assert await prefill.drain() is True


async def test_who_drains_again_and_again_leaves_nothing(stage):
    prefill, decode = await stage.pair(Cache(), Cache())
    offer, transfer = await stage.in_flight(prefill, decode)

    async def drain(times):
        for _ in range(times):
            assert not any([await worker.drain(0.001) for worker in (prefill, decode)])
        gc.collect()
        return len([one for one in gc.get_objects() if isinstance(one, asyncio.Future)])

    before = await drain(3)
    assert await drain(50) == before
    stage.network.release("*")
    await asyncio.gather(transfer, offer.released())
    assert all([await worker.drain() for worker in (prefill, decode)])


async def test_what_can_not_be_done_any_more_is_refused_at_once(stage):
    prefill, decode = await stage.pair(Cache(), Cache())
    ticket = prefill.engine.ticket
    waiting = decode.start_fetch(ticket("waits"), [1], tokens=range(4))
    await eventually(lambda: prefill.describe()["sending"])
    prefill.begin_drain()
    for fetch in (waiting, decode.start_fetch(ticket("new"), [2], tokens=range(4))):
        async with asyncio.timeout(30):
            with pytest.raises(kvxfer.RefusedError, match="draining") as caught:
                await fetch
        assert caught.value.reason is kvxfer.Code.DRAINING
        assert caught.value.retry_after is None  # it never takes it any more
    with pytest.raises(kvxfer.ClosedError, match="draining"):
        prefill.offer("new", [1], tokens=4)
    decode.begin_drain()
    with pytest.raises(kvxfer.ClosedError, match="draining"):
        decode.start_fetch(ticket("new"), [2], tokens=range(4))
    await quiet(prefill, decode)


async def test_what_was_claimed_may_be_declined(stage):
    """What a decode rank will not fetch any more, since it is to stop, is free at once and not when its lease ends."""
    prefill, decode = await stage.pair(Cache(), Cache())
    offer = prefill.offer("r", [1, 2], tokens=8)
    decode.claim(prefill.engine.ticket("r"))
    await eventually(lambda: entry(offer).engine)
    decode.begin_drain()
    async with asyncio.timeout(30):
        await decode.decline(prefill.engine.ticket("r"))
        assert isinstance(await offer.released(), kvxfer.Released)
    await decode.aclose()
    with pytest.raises(kvxfer.ClosedError):
        await decode.decline(prefill.engine.ticket("r"))


async def test_a_stream_that_is_cut_during_a_drain_is_opened_again(stage):
    """Else nobody would ever say what became of the write, and its blocks were lost."""
    prefill, decode = await stage.pair(Cache(), Cache(), route="direct", revoke_timeout=5)
    offer, transfer = await stage.in_flight(prefill, decode)
    decode.begin_drain()
    cut(decode)
    await eventually(lambda: sessions(decode))
    stage.network.release("*")
    with pytest.raises(kvxfer.KvxferError):
        async with asyncio.timeout(30):
            await transfer
    assert transfer.memory_safe
    assert await decode.drain() is True
    await offer.withdraw()
    await quiet(prefill, decode)


# --- other faces


async def test_on_a_loop_of_its_own(stage):
    prefill = await stage.worker("prefill", Cache(), loop="own")
    assert await prefill.drain() is True
    with pytest.raises(kvxfer.ClosedError, match="draining"):
        prefill.offer("r", [1], tokens=4)
    prefill.begin_drain()


def test_an_engine_that_steps(network):
    workers = [
        kvxfer.BlockingWorker(
            kvxfer.Config(**{**DEFAULTS, "engine": name}), transport=lambda name=name: LoopbackTransport(name, network)
        )
        for name in ("prefill", "decode")
    ]
    with workers[0] as prefill, workers[1] as decode:
        with pytest.raises(kvxfer.ClosedError):
            prefill.begin_drain()
        prefill.register(Cache().tensors)
        decode.register(Cache().tensors)
        offer = prefill.offer("r", [1, 2], tokens=8)
        ticket = prefill.engine.ticket
        prefill.begin_drain()
        assert not prefill.idle
        decode.start_fetch(ticket("r"), [3, 4], tokens=TOKENS)
        (event,) = decode.poll(5)
        assert isinstance(event, kvxfer.Fetched)
        refused = decode.start_fetch(ticket("s"), [3, 4], tokens=TOKENS)
        (event,) = decode.poll(5)
        assert refused.error.retry_after is None
        prefill.poll(5)
        assert offer.done
        assert prefill.idle
        assert decode.idle


# --- one after the other is restarted, under load


class Router:
    """Sends requests, and sends one that failed again, elsewhere; it looks at nothing but errors.

    Its workers have names, and each an endpoint of its own that outlives it.
    """

    def __init__(self, stage, folder, prefill, decode):
        self.stage, self.folder, self.prefill, self.decode = stage, folder, prefill, decode
        self.caches = {name: Cache(blocks=64) for name in (*prefill, *decode)}
        self.workers = {}
        self.turn = self.done = 0
        self.errors = []

    async def open(self, name):
        where = f"unix:{self.folder}/{name}"
        self.workers[name] = await self.stage.worker(name, self.caches[name], listen=where, drain_timeout=5)

    async def restart(self, name):
        """As a supervisor does it."""
        await self.workers[name].drain()
        await self.workers[name].aclose()
        await self.open(name)

    async def serve(self, request, block):
        self.turn += 1
        turn = self.turn
        for attempt in range(4):
            source = self.prefill[(turn + attempt) % len(self.prefill)]
            target = self.decode[(turn // 2 + attempt) % len(self.decode)]
            try:
                await self.try_once(request, attempt, block, source, target)
            except kvxfer.KvxferError as error:
                self.errors.append(error)
                await asyncio.sleep(0.005)
            else:
                self.done += 1
                return
        raise AssertionError(f"{request}: no retry has cured it: {self.errors[-4:]}")

    async def try_once(self, request, attempt, block, source, target):
        prefill, decode = self.workers[source], self.workers[target]
        offer = prefill.offer(request, [block], tokens=4, attempt=attempt)
        try:
            ticket = prefill.engine.ticket(request, attempt=attempt)
            await decode.fetch(ticket, [block], tokens=range(4), timeout=5)
        except kvxfer.KvxferError:
            await offer.withdraw()
            raise
        for layer in range(2):
            ours, theirs = self.caches[target].view(layer), self.caches[source].view(layer)
            assert ours[:, block].equal(theirs[:, block]), f"{request} has other bytes"
        assert isinstance(await offer.released(), kvxfer.Released)


@pytest.mark.parametrize("side", ["prefill", "decode", "both"])
async def test_a_rolling_restart_fails_nothing_that_a_retry_does_not_cure(stage, tmp_path, side):
    prefill, decode = ["prefill0", "prefill1"], ["decode0", "decode1"]
    router, stop = Router(stage, tmp_path, prefill, decode), asyncio.Event()
    for name in router.caches:
        await router.open(name)

    async def client(block):
        number = 0
        while not stop.is_set():
            number += 1
            await router.serve(f"{block}-{number}", block)

    async with asyncio.TaskGroup() as group:
        for block in range(16):
            group.create_task(client(block))
        for name in {"prefill": prefill, "decode": decode, "both": [*prefill, *decode]}[side] * 2:
            before = router.done
            await router.restart(name)
            await eventually(lambda before=before: router.done > before + 16)
        stop.set()
    assert router.done > 64
    assert {type(error) for error in router.errors} <= {kvxfer.ClosedError, kvxfer.RefusedError}, router.errors
    await quiet(*router.workers.values())
