"""Several ranks as one: nothing is over before it is over at each of them, and a doubt at one is a doubt of all."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from examples.serving.ranks import Offers, Ranks
from kvxfer import MemoryInDoubtError, TransferFailedError


class Rank:
    """Stands for a worker: a fetch under way until it is told how it ends; cancelled, it still has to clean up."""

    def __init__(self):
        self.ending = asyncio.get_running_loop().create_future()
        self.cleaned = asyncio.Event()
        self.cancels = 0

    async def fetch(self, ticket, blocks, *, tokens, after):
        try:
            return await asyncio.shield(self.ending)
        except asyncio.CancelledError:
            self.cancels += 1
            while not self.cleaned.is_set():
                try:
                    await self.cleaned.wait()
                except asyncio.CancelledError:
                    self.cancels += 1
            if self.ending.done():
                self.ending.result()
            raise


@pytest.fixture
async def ranks():
    return [Rank(), Rank()]


def fetching(ranks):
    whole = Ranks(cast("Any", ranks))
    return asyncio.create_task(whole.fetch({}, [0], tokens=range(1)))


def doubt(over=None):
    async def settled():
        if over is not None:
            await over.wait()

    return MemoryInDoubtError("a peer is silent", settled=settled)


async def settled(turns=10):
    """Let other tasks take a few turns."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def test_where_one_fails_the_others_end_first(ranks):
    task = fetching(ranks)
    await settled()
    ranks[1].ending.set_exception(TransferFailedError("it broke"))
    await settled()
    assert not task.done(), "the other one's blocks may still be written"
    ranks[0].cleaned.set()
    with pytest.raises(TransferFailedError, match="it broke"):
        await task
    assert ranks[0].cancels == 1


async def test_however_often_it_is_cancelled_it_waits_for_all(ranks):
    task = fetching(ranks)
    await settled()
    for number in range(3):
        task.cancel()
        await settled()
        assert not task.done()
        if number == 1:
            ranks[0].cleaned.set()
    ranks[1].cleaned.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_a_doubt_comes_before_a_failure_and_a_cancellation(ranks):
    over = asyncio.Event()
    task = fetching(ranks)
    await settled()
    ranks[0].ending.set_exception(TransferFailedError("it broke"))
    await settled()
    task.cancel()
    await settled()
    ranks[1].ending.set_exception(doubt(over))
    ranks[1].cleaned.set()
    with pytest.raises(MemoryInDoubtError, match="a peer is silent") as caught:
        await task
    settling = asyncio.create_task(caught.value.settled())
    await settled()
    assert not settling.done()
    over.set()
    await settling


async def test_a_doubt_ends_when_that_of_each_rank_has(ranks):
    first, second = asyncio.Event(), asyncio.Event()
    ranks[0].ending.set_exception(doubt(first))
    ranks[1].ending.set_exception(doubt(second))
    with pytest.raises(MemoryInDoubtError, match="silent; a peer") as caught:
        await fetching(ranks)
    settling = asyncio.create_task(caught.value.settled())
    first.set()
    await settled()
    assert not settling.done()
    second.set()
    await settling


async def test_an_offer_is_over_when_nobody_reads_at_any_rank(ranks):
    offers = Offers(cast("Any", [SimpleNamespace(released=rank.fetch_ending) for rank in map(_Offer, ranks)]))
    waiting = asyncio.create_task(offers.released())
    ranks[0].ending.set_exception(doubt())
    await settled()
    assert not waiting.done(), "the other one's blocks are still read"
    ranks[1].ending.set_result("Released")
    with pytest.raises(MemoryInDoubtError):
        await waiting


class _Offer:
    def __init__(self, rank):
        self._rank = rank

    async def fetch_ending(self):
        return await asyncio.shield(self._rank.ending)
