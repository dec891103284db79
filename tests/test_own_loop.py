"""`loop="own"`: the same awaitable worker, served by a thread, whatever the caller's loop does meanwhile."""

import asyncio
import inspect
import threading
import time
from typing import Any

import pytest
import torch

from kvxfer import errors
from kvxfer.blocking import OwnLoopWorker
from kvxfer.config import Config
from kvxfer.copy.port import READY
from kvxfer.geometry import CacheTensor
from kvxfer.prefill.offers import Released, Withdrawn
from kvxfer.runtime import ThreadRuntime
from kvxfer.testing import LoopbackNetwork, LoopbackTransport
from kvxfer.tickets import EngineCard
from kvxfer.transfers import TransferState
from kvxfer.worker import Worker

LAYERS, BLOCKS, BLOCK_TOKENS, HEADS = 4, 32, 16, 2
PATIENCE = 20.0


def cache(seed=None):
    """A tensor of all layers, with its description."""
    shape = (BLOCKS, LAYERS, 2, BLOCK_TOKENS, HEADS, 8)
    tensor = torch.zeros(shape)
    if seed is not None:
        tensor.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    return tensor, [CacheTensor(tensor, "block layer kv token head dim", layers=range(LAYERS), heads=range(HEADS))]


class Pair:
    """A prefill and a decode worker, both on loops of their own."""

    def __init__(self, loop: Any = "own", **settings):
        plain = {"arena_bytes": "1MiB", "chunk_bytes": "16KiB", "revoke_timeout": "5s"}
        self.network = LoopbackNetwork()
        self.source, sources = cache(seed=1)
        self.sink, sinks = cache()
        config = Config(**(plain | settings))
        self.prefill = Worker(sources, config, transport=LoopbackTransport("prefill", self.network), loop=loop)
        self.decode = Worker(sinks, config=config, transport=LoopbackTransport("decode", self.network), loop=loop)

    async def __aenter__(self):
        await self.prefill.__aenter__()
        await self.decode.__aenter__()
        return self

    async def __aexit__(self, *_):
        self.network.release("*")
        await self.decode.aclose(drain=False)
        await self.prefill.aclose(drain=False)

    def start(self, request, blocks=(2, 7), tokens=32, **more):
        return self.decode.start_fetch(self.prefill.engine.ticket(request), blocks, tokens=range(tokens), **more)

    def offer(self, request, layers=None):
        """A streaming offer of blocks 3 and 5, of which these layers are ready so far."""
        offer = self.prefill.offer(request, [3, 5], tokens=32, streaming=True)
        if layers:
            offer.ready(layers=layers)
        return offer

    def landed(self, layers=slice(None)):
        return torch.equal(self.sink[[2, 7], layers], self.source[[3, 5], layers])


@pytest.fixture
async def pair():
    async with Pair() as pair:
        yield pair


def no_new_threads(before):
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        if not thread.name.startswith(("asyncio", "AnyIO")):  # those are the caller's loop's
            thread.join(PATIENCE)
    return [thread.name for thread in left if thread.is_alive() and thread.name.startswith("kvxfer")] == []


# --- which worker it is


@pytest.mark.parametrize("name", ["__init__", "offer", "start_fetch"])
def test_help_shows_what_it_takes(name):
    assert inspect.signature(getattr(OwnLoopWorker, name)) == inspect.signature(getattr(Worker, name))


def test_the_argument_chooses():
    _, tensors = cache()
    own = Worker(tensors, Config(), loop="own")
    assert type(own) is OwnLoopWorker
    assert isinstance(own, Worker)
    assert "own loop" in repr(own)
    assert type(Worker(tensors, Config())) is Worker
    assert type(Worker(tensors, Config(), loop="caller")) is Worker
    wrong: Any = "mine"
    with pytest.raises(errors.UsageError, match="loop is 'mine': it is 'caller'"):
        Worker(tensors, Config(), loop=wrong)


# --- a transfer


async def test_a_fetch(pair):
    offer = pair.prefill.offer("r", [3, 5], tokens=32, payload=b"first token")
    result = await pair.decode.fetch(pair.prefill.engine.ticket("r"), [2, 7], tokens=range(32))
    assert result.payload == b"first token"
    assert pair.landed()
    ending = await offer.released()
    assert isinstance(ending, Released)
    assert ending.stats[0].bytes == result.stats.bytes
    assert await offer.withdraw() == ending
    assert offer.key == ("r", 0)


async def test_bytes_move_while_the_callers_loop_stands_still(pair):
    pair.prefill.offer("r", [3, 5], tokens=32)
    transfer = pair.start("r")
    deadline = time.monotonic() + PATIENCE
    while not pair.landed() and time.monotonic() < deadline:
        time.sleep(0.005)  # noqa: ASYNC251 - the loop stands still, that is the point
    assert pair.landed()
    assert not transfer.done  # as far as this loop knows
    assert TransferState.FAILED < transfer.state < TransferState.DONE
    assert (await transfer) is transfer.result()
    assert transfer.state is TransferState.DONE


async def test_a_stream_of_layers(pair):
    offer, transfer = pair.offer("r"), pair.start("r")
    for layer in range(LAYERS):
        waiting = asyncio.ensure_future(transfer.layers(layer, layer + 1))
        assert not (await asyncio.wait({waiting}, timeout=0.02))[0]
        offer.ready(layers=[layer])
        await waiting
        assert pair.landed([layer])
        assert not transfer.done
    offer.finish(b"done")
    assert (await transfer).payload == b"done"
    await transfer.layers(0, LAYERS)
    assert (transfer.done, transfer.failed_blocks, transfer.memory_safe) == (True, {}, True)


async def test_an_offer_block_by_block(pair):
    offer = pair.prefill.offer("r", streaming=True)
    transfer = pair.start("r")
    for start, block in ((0, 3), (16, 5)):
        offer.extend([block], tokens=range(start, start + 16))
        offer.ready(after=READY)
    assert offer.tokens == 32
    offer.finish()
    await transfer
    assert pair.landed()


def test_it_serves_several_loops():
    pair = Pair()

    async def fetch(number):
        return await pair.start(f"r{number}", [number], 16)

    async def main():
        async with pair:
            for number in range(3):
                pair.prefill.offer(f"r{number}", [number], tokens=16)
            return await asyncio.gather(*(asyncio.to_thread(asyncio.run, fetch(number)) for number in range(3)))

    assert sorted(result.request for result in asyncio.run(main())) == ["r0", "r1", "r2"]
    assert torch.equal(pair.sink[:3], pair.source[:3])


# --- errors


async def test_errors_are_raised_at_once(pair):
    ticket = pair.prefill.engine.ticket("r")
    with pytest.raises(errors.BlocksError):
        pair.prefill.offer("r", [BLOCKS], tokens=16)
    with pytest.raises(errors.EventError):
        pair.prefill.offer("r", [1], tokens=16, after="soon")
    offer = pair.prefill.offer("r", [1], tokens=16, streaming=True)
    with pytest.raises(errors.RequestError):
        pair.prefill.offer("r", [1], tokens=16)
    with pytest.raises(errors.TokensError):
        offer.extend([2], tokens=range(20, 36))
    with pytest.raises(errors.EventError):
        offer.ready(after="soon")
    with pytest.raises(errors.BlocksError):
        pair.start("r", [2, 2])
    with pytest.raises(errors.EventError):
        pair.start("r", after="soon")
    with pytest.raises(errors.TicketError):
        pair.decode.claim(ticket | {"mac": 5})
    with pytest.raises(errors.ConfigError):
        pair.prefill.occupy(0)
    transfer = pair.start("r")
    with pytest.raises(errors.BlocksError):
        pair.start("r")
    assert offer.tokens == 16
    await end(transfer)


# --- cancellation


async def under_way(pair, request="r", blocks=(2, 7)):
    pair.offer(request, [0])
    transfer = pair.start(request, blocks)
    await transfer.layers(0, 1)
    return transfer


async def end(transfer):
    transfer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await transfer


@pytest.mark.parametrize("loop", ["caller", "own"])
async def test_one_that_is_dropped_while_it_moves_is_warned_of(loop):
    async with Pair(loop=loop) as pair:
        transfer = await under_way(pair)
        with pytest.warns(ResourceWarning, match=r"'r' .* was dropped: .* the blocks \{default: \[2, 7\]\}"):
            del transfer
        transfer = await under_way(pair, "s", [4, 5])
        with (
            pytest.warns(ResourceWarning, match=r"'s' .* goes on, .*\{default: \[4, 5\]\}"),
            pytest.raises(TimeoutError),
        ):
            async with asyncio.timeout(0.01):
                await transfer.layers(1, 2)
        await end(transfer)


async def test_cancelling_a_withdrawal_does_not_stop_it(pair):
    offer, busy = pair.offer("r"), threading.Event()
    pair.prefill._thread.post(busy.wait)  # so that the withdrawal has not begun when it is cancelled
    task = asyncio.create_task(offer.withdraw())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    busy.set()
    async with asyncio.timeout(PATIENCE):
        assert isinstance(await offer.released(), Withdrawn)


async def test_memory_in_doubt_settles_from_the_callers_loop():
    async with Pair(route="direct", trust="full", revoke_timeout="200ms") as pair:
        pair.network.hold("decode")
        pair.prefill.offer("r", [3, 5], tokens=32)
        transfer = pair.start("r")
        while not pair.network.held("decode"):
            await asyncio.wait({transfer.outcome}, timeout=0.01)
        task = asyncio.ensure_future(_result(transfer))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(errors.MemoryInDoubtError) as caught:
            await task
        assert not transfer.memory_safe
        settled = asyncio.ensure_future(caught.value.settled())
        assert not (await asyncio.wait({settled}, timeout=0.05))[0]
        pair.network.release("decode")
        await settled
        assert transfer.memory_safe


async def _result(transfer):
    return await transfer


# --- life


async def test_no_thread_is_left_behind():
    before = threading.enumerate()
    async with Pair(drain_timeout="50ms") as pair:
        offer, transfer = pair.offer("r", [0]), pair.start("r")
        waiting = [asyncio.ensure_future(_result(transfer)), asyncio.ensure_future(offer.released())]
        await transfer.layers(0, 1)
        await pair.decode.aclose()
        await pair.prefill.aclose()
        assert isinstance(await waiting[1], Withdrawn)
        with pytest.raises(errors.ClosedError):
            await waiting[0]
        await pair.decode.aclose()
        transfer.cancel()
        assert isinstance(await offer.withdraw(), Withdrawn)
        with pytest.raises(errors.ClosedError):
            pair.decode.describe()
        with pytest.raises(errors.ClosedError):
            await pair.decode.decline({})
    assert no_new_threads(before)


async def test_what_cannot_be_opened_leaves_nothing_behind():
    before, network = threading.enumerate(), LoopbackNetwork()
    with pytest.raises(errors.GeometryError):
        await Worker([], Config(), loop="own").__aenter__()
    config = Config(arena_bytes="1MiB", chunk_bytes="64KiB", listen="unix:/nowhere/at/all.sock")
    worker = Worker(cache()[1], config, transport=LoopbackTransport("a", network), loop="own")
    with pytest.raises(errors.ConfigError):
        await worker.__aenter__()
    with pytest.raises(errors.ClosedError):
        await worker.__aenter__()
    assert no_new_threads(before)


async def test_a_worker_that_was_never_closed_is_a_warning():
    worker = Worker(
        cache()[1],
        Config(arena_bytes="1MiB", chunk_bytes="64KiB"),
        transport=LoopbackTransport("a", LoopbackNetwork()),
        runtime=ThreadRuntime(),
        loop="own",
    )
    await worker.__aenter__()
    with pytest.warns(ResourceWarning, match="never closed"):
        worker.__del__()
    await worker.aclose()
    worker.__del__()


async def test_an_engine_of_several_ranks_joins():
    network, config = (LoopbackNetwork(), {"arena_bytes": "1MiB", "chunk_bytes": "64KiB", "world": 2})
    transports = [LoopbackTransport(f"p{rank}", network) for rank in range(2)]
    one, two = (
        Worker(cache()[1], Config(rank=rank, **config), transport=transports[rank], loop="own") for rank in range(2)
    )
    async with one, two:
        with pytest.raises(errors.TicketError):
            one.offer("r", [1], tokens=16)
        card = EngineCard.of([one.card, two.card])
        for rank in (one, two):
            rank.join(card, key=bytes(32))
        with pytest.raises(errors.TicketError):
            one.join(card, key=b"short")
        assert one.engine.ticket("r") == two.engine.ticket("r")
