"""`loop="own"`: the same awaitable worker, served by a thread, whatever the caller's loop does meanwhile."""

import asyncio
import contextlib
import gc
import inspect
import threading
import time
from typing import Any

import pytest
from stage import KEY, SOON, Cache, Copied, eventually, frames, raised

from kvxfer import errors
from kvxfer.blocking import OwnLoopWorker
from kvxfer.config import Config
from kvxfer.copy.port import READY
from kvxfer.prefill.offers import Released, Withdrawn
from kvxfer.transfers import TransferState
from kvxfer.worker import Worker

PATIENCE = 20.0


@pytest.fixture
async def pair(stage):
    return await stage.pair(Cache(), Cache(), loop="own")


@pytest.fixture
def brings(stage, pair):
    """What the usual request makes of the destination."""
    return Copied(stage.caches[pair[1]]).bring(stage.caches[pair[0]], [1, 2], [3, 4], range(8))


def streamed(stage, pair, request="r", into=(3, 4), layers=(), **offered):
    """A streaming offer of which these layers are ready so far, and the fetch of it."""
    offer, transfer = stage.begin(*pair, request, into=into, offered={"streaming": True, **offered})
    if layers:
        offer.ready(layers=layers)
    return offer, transfer


def threads():
    """Those of workers: others are the caller's loop's."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvxfer")}


def futures():
    """How many somebody keeps."""
    gc.collect()
    return sum(isinstance(one, asyncio.Future) for one in gc.get_objects())


async def end(transfer):
    transfer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await transfer


async def result(transfer):
    return await transfer


# --- which worker it is


@pytest.mark.parametrize("name", ["__init__", "offer", "start_fetch"])
def test_help_shows_what_it_takes(name):
    assert inspect.signature(getattr(OwnLoopWorker, name)) == inspect.signature(getattr(Worker, name))


def test_the_argument_chooses():
    tensors = Cache().tensors
    own = Worker(tensors, Config(), loop="own")
    assert type(own) is OwnLoopWorker
    assert isinstance(own, Worker)
    assert "own loop" in repr(own)
    assert type(Worker(tensors, Config())) is type(Worker(tensors, Config(), loop="caller")) is Worker
    wrong: Any = "mine"
    with pytest.raises(errors.UsageError, match="loop is 'mine': it is 'caller'"):
        Worker(tensors, Config(), loop=wrong)


# --- a transfer


async def test_bytes_move_while_the_callers_loop_stands_still(stage, pair, brings):
    _, transfer = stage.begin(*pair)
    deadline = time.monotonic() + PATIENCE
    while not brings.has_come() and time.monotonic() < deadline:
        time.sleep(0.005)  # noqa: ASYNC251 - the loop stands still, that is the point
    brings.check()
    assert not transfer.done  # as far as this loop knows
    assert TransferState.FAILED < transfer.state < TransferState.DONE
    assert (await transfer) is transfer.result()
    assert transfer.state is TransferState.DONE


async def test_a_stream_of_layers(stage, pair, brings):
    offer, transfer = streamed(stage, pair)
    for layer in range(2):
        waiting = asyncio.ensure_future(transfer.layers(layer, layer + 1))
        assert not (await asyncio.wait({waiting}, timeout=0.02))[0]
        offer.ready(layers=[layer])
        await waiting
        assert brings.has_come([layer])
        assert not transfer.done
    offer.finish(b"done")
    assert (await transfer).payload == b"done"
    await transfer.layers(0, 2)
    assert (transfer.done, transfer.failed_blocks, transfer.memory_safe) == (True, {}, True)


async def test_an_offer_block_by_block(pair, brings):
    offer = pair[0].offer("r", streaming=True)
    transfer = pair[1].start_fetch(offer.ticket, [3, 4], tokens=range(8))
    for start, block in ((0, 1), (4, 2)):
        offer.extend([block], tokens=range(start, start + 4))
        offer.ready(after=READY)
    assert (offer.key, offer.tokens) == (("r", 0), 8)
    offer.finish()
    got = await transfer
    brings.check()
    ending = await offer.released()
    assert isinstance(ending, Released)
    assert ending.stats[0].bytes == got.stats.bytes
    assert await offer.withdraw() == ending


async def test_it_is_closed_from_several_loops_at_once(stage):
    worker = await stage.worker("prefill", Cache(), loop="own", drain_timeout=60)
    offer = worker.offer("r", [1], tokens=4)
    first = asyncio.create_task(worker.aclose())
    await eventually(lambda: worker.describe()["draining"])
    second = asyncio.create_task(asyncio.to_thread(asyncio.run, worker.aclose()))
    await asyncio.sleep(0.1)
    assert not second.done()
    await offer.withdraw()
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(first, second)
    await asyncio.to_thread(asyncio.run, worker.aclose())


@pytest.mark.parametrize("loop", ["caller", "own"])
async def test_who_looks_often_whether_an_offer_has_ended_leaves_nothing(stage, loop):
    prefill = await stage.worker("prefill", Cache(), loop=loop)
    offer = prefill.offer("r", [1], tokens=4)

    async def look(times):
        for _ in range(times):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(offer.released(), 0.001)
        return futures()

    before = await look(3)
    assert await look(50) == before
    assert isinstance(await offer.withdraw(), Withdrawn)


async def test_it_serves_several_loops(pair):
    offers = [pair[0].offer(f"r{number}", [number], tokens=4) for number in range(3)]

    async def fetch(offer, number):
        return await pair[1].start_fetch(offer.ticket, [number], tokens=range(4))

    fetches = [asyncio.to_thread(asyncio.run, fetch(offer, number)) for number, offer in enumerate(offers)]
    assert [got.request for got in await asyncio.gather(*fetches)] == ["r0", "r1", "r2"]


async def test_a_fetch_whose_loop_is_closed_shows_how_it_ended(pair):
    kept = []

    async def begin(number):
        transfer = pair[1].start_fetch(pair[0].engine.ticket(f"r{number}"), [number], tokens=range(4))
        kept.append(transfer.outcome)
        return transfer

    transfers = [await asyncio.to_thread(asyncio.run, begin(number)) for number in range(2)]
    await eventually(lambda: frames(pair[0], "Fetch") == 2)
    offers = [pair[0].offer(f"r{number}", [number], tokens=4, streaming=True) for number in range(2)]
    offers[0].ready()
    offers[0].finish()
    await offers[1].withdraw()
    await eventually(lambda: all(transfer.done for transfer in transfers))
    assert [transfer.state for transfer in transfers] == [TransferState.DONE, TransferState.FAILED]
    assert transfers[0].result().request == "r0"
    assert transfers[1].failed_blocks == {"default": [1]}
    with pytest.raises(errors.TransferFailedError):
        transfers[1].result()


# --- errors


async def test_errors_are_raised_at_once(pair):
    prefill, decode = pair
    offer = prefill.offer("r", [1], tokens=4, streaming=True)
    transfer = decode.start_fetch(offer.ticket, [3, 4], tokens=range(8))
    for error, call in (
        (errors.BlocksError, lambda: prefill.offer("s", [16], tokens=4)),
        (errors.EventError, lambda: prefill.offer("s", [1], tokens=4, after="soon")),
        (errors.RequestError, lambda: prefill.offer("r", [1], tokens=4)),
        (errors.TokensError, lambda: offer.extend([2], tokens=range(5, 9))),
        (errors.EventError, lambda: offer.ready(after="soon")),
        (errors.BlocksError, lambda: decode.start_fetch(offer.ticket, [2, 2], tokens=range(8))),
        (errors.EventError, lambda: decode.start_fetch(offer.ticket, [5], tokens=range(4), after="soon")),
        (errors.TicketError, lambda: decode.claim(offer.ticket | {"mac": 5})),
        (errors.ConfigError, lambda: prefill.occupy(0)),
        (errors.BlocksError, lambda: decode.start_fetch(offer.ticket, [4], tokens=range(4))),  # in custody
    ):
        with pytest.raises(error):
            call()
    assert offer.tokens == 4
    await end(transfer)


async def test_a_fetch_that_nobody_could_await_is_refused(pair):
    ticket = pair[0].engine.ticket("r")
    with pytest.raises(errors.UsageError, match="no event loop runs in this thread"):
        await asyncio.to_thread(pair[1].start_fetch, ticket, [3, 4], tokens=range(8))


# --- cancellation


@pytest.mark.parametrize("loop", ["caller", "own"])
async def test_one_that_is_dropped_while_it_moves_is_warned_of(stage, monkeypatch, loop):
    monkeypatch.undo()  # nobody looks at it
    pair = await stage.pair(Cache(), Cache(), loop=loop)
    first, transfer = streamed(stage, pair, layers=[0])
    await transfer.layers(0, 1)
    with pytest.warns(ResourceWarning, match=r"'r' .* was dropped: .* the blocks \{default: \[3, 4\]\}"):
        del transfer
    second, transfer = streamed(stage, pair, "s", (5, 6), layers=[0])
    await transfer.layers(0, 1)
    with pytest.warns(ResourceWarning, match=r"'s' .* goes on, .*\{default: \[5, 6\]\}"), pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await transfer.layers(1, 2)
    await end(transfer)
    assert first.key != second.key


async def test_cancelling_a_withdrawal_does_not_stop_it(pair):
    offer, busy = pair[0].offer("r", [1], tokens=4), threading.Event()
    pair[0]._served.thread.post(busy.wait)  # so that the withdrawal has not begun when it is cancelled
    task = asyncio.create_task(offer.withdraw())
    await asyncio.sleep(0)
    await end(task)
    busy.set()
    async with asyncio.timeout(PATIENCE):
        assert isinstance(await offer.released(), Withdrawn)


@pytest.mark.parametrize("loop", ["caller", "own"])
async def test_that_memory_in_doubt_has_settled_is_heard_on_any_loop(stage, loop):
    pair = await stage.pair(Cache(), Cache(), loop=loop, route="direct", **SOON)
    _, transfer = await stage.in_flight(*pair, to="decode")
    task = asyncio.ensure_future(result(transfer))
    await asyncio.sleep(0)
    task.cancel()
    doubt = await raised(task, errors.MemoryInDoubtError)
    assert not transfer.memory_safe
    waiting = [doubt.settled(), asyncio.to_thread(asyncio.run, doubt.settled())]
    settled = [asyncio.ensure_future(each) for each in waiting]
    assert not (await asyncio.wait(settled, timeout=0.05))[0]
    before = futures()
    for _ in range(20):  # as who polls for it does
        await raised(asyncio.wait_for(doubt.settled(), 0.001), TimeoutError)
    assert futures() < before + 10
    stage.network.release("decode")
    await asyncio.gather(*settled)
    assert transfer.memory_safe


# --- life


async def test_no_thread_is_left_behind(stage):
    before = threads()
    prefill, decode = await stage.pair(Cache(), Cache(), loop="own", drain_timeout=0.05)
    offer, transfer = streamed(stage, (prefill, decode), layers=[0])
    waiting = [asyncio.ensure_future(result(transfer)), asyncio.ensure_future(offer.released())]
    await transfer.layers(0, 1)
    await decode.aclose()
    await prefill.aclose()
    assert isinstance(await waiting[1], Withdrawn)
    await raised(waiting[0], errors.ClosedError)
    await decode.aclose()
    transfer.cancel()
    assert isinstance(await offer.withdraw(), Withdrawn)
    with pytest.raises(errors.ClosedError):
        decode.describe()
    await raised(decode.decline({}), errors.ClosedError)
    await eventually(lambda: threads() <= before)


async def test_what_cannot_be_opened_leaves_nothing_behind(stage):
    before = threads()
    nowhere = "unix:/nowhere/at/all.sock"
    await raised(stage.worker("a", Cache(), listen=nowhere, loop="own"), errors.ConfigError)
    await eventually(lambda: threads() <= before)


async def test_a_worker_is_entered_once_and_one_that_was_never_closed_is_a_warning(stage):
    worker = await stage.worker("a", Cache(), loop="own")
    await raised(worker.__aenter__(), errors.ClosedError)
    with pytest.warns(ResourceWarning, match="never closed"):
        worker.__del__()
    await worker.aclose()
    worker.__del__()


async def test_an_engine_of_several_ranks_joins(stage):
    ranks, card = await stage.engine("p", [Cache(), Cache()], join=False, loop="own")
    with pytest.raises(errors.TicketError):
        ranks[0].offer("r", [1], tokens=4)
    for rank in ranks:
        rank.join(card, key=KEY)
    with pytest.raises(errors.TicketError):
        ranks[0].join(card, key=b"short")
    assert ranks[0].engine.ticket("r") == ranks[1].engine.ticket("r")
