"""Whole workers in virtual time, one of which meets a rank that lies while an honest one does its work with it.

Every case is a simulation of its own. What must hold, whatever is said: the honest rank's bytes are exact, nothing else
of any cache changes, and when the liar is gone all memory is back or accounted for as in doubt.
"""

import asyncio
import contextlib
import logging
import tempfile
from pathlib import Path
from random import Random

import campaign
import pytest
import torch
from crooked import CrookedWire
from inside import unanswered
from stage import Cache, Copied, is_quiet

from kvxfer import Config, Worker
from kvxfer.copy.port import Operation
from kvxfer.errors import KvxferError, MemoryInDoubtError
from kvxfer.fabric.loopback import PostedPart
from kvxfer.testing import LoopbackNetwork, LoopbackTransport, simulate

SIZES = {"arena_bytes": "16KiB", "chunk_bytes": "1KiB", "trust": "full"}
TIMES = {"revoke_timeout": 2.0, "grant_lease": 3.0, "offer_lease": 10.0, "unclaimed_timeout": 20.0}
ROUNDS = 3
"""Requests that the honest rank brings, and the liar in each of two lanes at once."""
ROUTES = ("staged", "staged", "direct", "pull", "auto")
PATIENCE = 200.0
"""Virtual seconds in which everything must have ended: far more than `Config.bounds` says."""
TOKENS = range(1, 23)
BLOCKS = 24
OURS, LANES = range(6), (range(8, 14), range(16, 22))
"""Blocks of the attacked cache: of honest requests, and of the liar's. The others are nobody's business."""
THEIRS = [block for lane in LANES for block in lane]


class Mute(LoopbackTransport):
    """Reports every post as done and moves nothing: who lies about results shall not also write as it likes."""

    def post(self, peer, operation, local, remote):
        self.open_handles += 1
        return PostedPart(self, peer, operation, [], frozenset())


class Scene:
    """An attacked worker, an honest one, and a liar."""

    def __init__(self, runtime, folder: Path, draw: Random, stack: contextlib.AsyncExitStack):
        self.runtime, self.folder, self.draw, self.stack = runtime, folder, draw, stack
        self.network = LoopbackNetwork()
        self.shaken = 0

    async def worker(self, name, cache, transport=LoopbackTransport, **config):
        worker = Worker(
            cache.tensors,
            Config(engine=name, **SIZES, **TIMES, **config),
            transport=transport(name, self.network),
            runtime=self.runtime,
        )
        await worker.__aenter__()
        self.stack.push_async_callback(worker.aclose, drain=False)
        return worker

    async def wire(self, target, *, from_far):
        wire = CrookedWire(self.folder / "crooked", target.card.endpoint, self.draw, from_far=from_far)
        await wire.open()
        self.stack.push_async_callback(wire.close)
        return wire

    async def until(self, condition, what):
        end = self.runtime.now() + PATIENCE
        while not condition():
            assert self.runtime.now() < end, what()
            await asyncio.sleep(0.05)

    async def trouble(self, wire):
        """Interruptions at any time."""
        while True:
            await asyncio.sleep(self.draw.random() * 0.3)
            wire.interrupt()
            if self.draw.random() < 0.02:
                wire.reset()

    async def bring(self, prefill, decode, name, into, *, wire=None):
        """One request, through the wire if there is one."""
        draw = self.draw
        streaming = draw.random() < 0.3
        ids = draw.sample(range(BLOCKS), 6)
        offer = prefill.offer(name, streaming=True) if streaming else prefill.offer(name, ids, tokens=24)
        ticket = prefill.engine.ticket(name) | ({"endpoints": {"prefix": wire.endpoint}} if wire else {})
        if draw.random() < 0.3:
            decode.claim(ticket)
        transfer = decode.start_fetch(ticket, into, tokens=TOKENS, timeout=30 if wire is None else draw.uniform(0.1, 5))
        if streaming:
            await self.stream(offer, ids)
        return ids, offer, transfer

    async def stream(self, offer, ids):
        for step in range(3):
            offer.extend(ids[2 * step : 2 * step + 2], tokens=range(8 * step, 8 * step + 8))
            for layer in range(2):
                offer.ready(layers=[layer])
                await asyncio.sleep(self.draw.random() * 1e-3)
        offer.finish(b"payload")

    async def end(self, *offers):
        """Nobody fetches any more: every offer ends, or its blocks are named as in doubt."""
        for offer in offers:
            try:
                async with asyncio.timeout(PATIENCE):
                    await offer.withdraw()
            except MemoryInDoubtError:
                self.shaken += 1

    def check_bounds(self, *workers):
        for worker in workers:
            seen, config = worker.describe(), worker.config
            assert seen["sending"] <= config.max_transfers
            assert seen["receiving"] <= config.max_transfers
            assert seen["parked"] <= config.max_transfers
            assert seen["offers"] <= 3 * ROUNDS
            assert len(seen["peers"]) <= 4
            assert len(unanswered(worker)) <= 3 * ROUNDS


def accounted(worker):
    """Nothing is under way; what is not free is in quarantine, and known to be."""
    seen = worker.describe()
    shares = (seen["arena"]["send"], seen["arena"]["receive"])
    return seen["sending"] == 0 and all(
        share.free_bytes + share.quarantined_bytes == share.capacity_bytes and not share.waiting_requests
        for share in shares
    )


async def honest(scene, prefill, decode, source, target):
    """The same engine pair at work all the while: every byte is compared, each time."""
    for number in range(ROUNDS):
        await asyncio.sleep(scene.draw.random() * 0.02)
        into = scene.draw.sample(OURS, 6)
        copied = Copied(target)
        ids, offer, transfer = await scene.bring(prefill, decode, f"honest-{number}", into)
        await transfer
        copied.bring(source, ids, into, TOKENS)
        for layer, memory in target.memory.items():  # what others fetch meanwhile
            copied.expected[layer][:, THEIRS] = memory[:, THEIRS]
        copied.check()
        await offer.released()


async def play_hostile_decode(scene: Scene) -> int:
    """The liar fetches from the attacked worker, which serves an honest rank besides."""
    source, target, theirs = (
        Cache(blocks=BLOCKS),
        Cache(blocks=BLOCKS, layout="HND"),
        Cache(blocks=BLOCKS, layout="HND"),
    )
    route = scene.draw.choice(ROUTES)
    attacked = await scene.worker("prefill", source)
    decode = await scene.worker("decode", target)
    liar = await scene.worker("liar", theirs, route=route)
    before = source.clone(), target.clone()
    wire = await scene.wire(attacked, from_far=False)
    trouble = asyncio.create_task(scene.trouble(wire))
    offers = []

    async def lie(lane):
        for number in range(ROUNDS):
            name, into = f"lie-{lane.start}-{number}", scene.draw.sample(lane, 6)
            _, offer, transfer = await scene.bring(attacked, liar, name, into, wire=wire)
            offers.append(offer)
            await asyncio.gather(transfer, return_exceptions=True)
            with contextlib.suppress(KvxferError):
                await offer_ends(offer)
            if scene.draw.random() < 0.3:
                await asyncio.gather(liar.decline(ticket_of(attacked, f"ghost-{name}", wire)), return_exceptions=True)

    await asyncio.gather(*map(lie, LANES), honest(scene, attacked, decode, source, target))
    scene.check_bounds(attacked, decode)
    trouble.cancel()
    wire.honest = True
    await asyncio.gather(trouble, return_exceptions=True)
    await liar.aclose(drain=False)
    await wire.close()
    await scene.end(*offers)
    await scene.until(lambda: is_quiet(decode), decode.describe)
    await scene.until(lambda: is_quiet(attacked) or (scene.shaken and accounted(attacked)), attacked.describe)
    same(source.memory, before[0])
    same(target.memory, before[1], but=OURS)
    check_writes(scene.network, wire, theirs)
    return wire.lies


async def offer_ends(offer):
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            await offer.released()


def ticket_of(worker, name, wire):
    return worker.engine.ticket(name) | {"endpoints": {"prefix": wire.endpoint}}


def check_writes(network, wire, cache):
    """Every write to the liar went to where a frame had allowed it: a grant of its own, or blocks that were named."""
    grants = {address: sorted(lengths) for address, lengths in wire.grants.items()}
    for entry in network.log:
        if entry.dst != "liar" or entry.operation is not Operation.WRITE:
            continue
        first, last = entry.address, entry.address + entry.length
        enough = [length for length in grants.get(first, []) if length >= entry.length]
        if enough:
            grants[first].remove(enough[0])
            continue
        assert wire.in_place
        assert blocks_of(cache, first, last) <= wire.blocks


def blocks_of(cache, first, last):
    """The block that a range of bytes is in; of none that it leaves."""
    for memory in cache.memory.values():
        start, size = memory.data_ptr(), memory[0, 0].nbytes
        if start <= first and last <= start + memory.nbytes and (first - start) // size == (last - 1 - start) // size:
            return {(first - start) // size % memory.shape[1]}
    return {-1}


async def play_hostile_prefill(scene: Scene) -> int:
    """The attacked worker fetches from the liar, and from an honest rank besides."""
    source, target, theirs = Cache(blocks=BLOCKS), Cache(blocks=BLOCKS, layout="HND"), Cache(blocks=BLOCKS)
    route = scene.draw.choice(ROUTES)
    attacked = await scene.worker("decode", target, route=route)
    prefill = await scene.worker("prefill", source)
    liar = await scene.worker("liar", theirs, Mute)
    before = source.clone(), target.clone()
    wire = await scene.wire(liar, from_far=True)
    trouble = asyncio.create_task(scene.trouble(wire))
    doubts = 0

    async def trust(lane):
        nonlocal doubts
        for number in range(ROUNDS):
            name, into = f"lie-{lane.start}-{number}", scene.draw.sample(lane, 6)
            with contextlib.suppress(KvxferError):
                _, offer, transfer = await scene.bring(liar, attacked, name, into, wire=wire)
                try:
                    await transfer
                except MemoryInDoubtError:
                    doubts += 1
                    return
                except KvxferError:
                    pass
                # given back: nothing may write there any more
                for memory in target.memory.values():
                    memory.permute(target._order)[:, list(lane)] = 4711
                await asyncio.sleep(scene.draw.random())
                for memory in target.memory.values():
                    assert (memory.permute(target._order)[:, list(lane)] == 4711).all()
                await offer_ends(offer)

    await asyncio.gather(*map(trust, LANES), honest(scene, prefill, attacked, source, target))
    scene.check_bounds(attacked, prefill)
    trouble.cancel()
    wire.honest = True
    await asyncio.gather(trouble, return_exceptions=True)
    await scene.until(lambda: is_quiet(prefill), prefill.describe)
    await scene.until(lambda: is_quiet(attacked), attacked.describe)  # it is reached again, and says what became of it
    await liar.aclose(drain=False)
    same(source.memory, before[0])
    same(target.memory, before[1], but=[*OURS, *THEIRS])
    return wire.lies


def same(found, expected, but=()):
    """Nothing changed, but these blocks."""
    for layer, memory in found.items():
        others = [block for block in range(memory.shape[1]) if block not in but]
        assert torch.equal(memory[:, others], expected[layer][:, others])


def case(play):
    def one(draw: Random) -> int:
        async def scenario(runtime):
            async with contextlib.AsyncExitStack() as stack:
                return await play(Scene(runtime, Path(folder), draw, stack))

        with tempfile.TemporaryDirectory(prefix="kvxfer-fuzz-") as folder:
            return simulate(scenario, seed=draw.randrange(1 << 30), limit=5000.0)

    return one


@pytest.fixture(autouse=True)
def no_defects(caplog):
    """What the library logs as an error is a defect of its own, whoever provoked it."""
    caplog.set_level(logging.ERROR, "kvxfer")
    yield
    assert [record.getMessage() for record in caplog.records] == []


def test_hostile_decode_rank(caplog):
    campaign.run("hostile decode rank", sound(case(play_hostile_decode), caplog))


def test_hostile_prefill_rank(caplog):
    campaign.run("hostile prefill rank", sound(case(play_hostile_prefill), caplog))


def sound(play, caplog):
    """Fails in the case that logged a defect."""

    def one(draw: Random) -> int:
        said = play(draw)
        assert [record.getMessage() for record in caplog.records] == []
        return max(1, said)

    return one
