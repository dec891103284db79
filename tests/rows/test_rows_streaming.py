"""Every row while prefill still computes: layers, then tokens, become ready one after the other, and arrive so."""

from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
from catalogue import CASES, Case
from ranks import Rank, World
from sides import Sides, all_idle, issuer
from stage import KEY, eventually

from kvxfer import READY, Offer, Released, Worker
from kvxfer.fabric.loopback import LoopbackNetwork

STREAMED = {str(case): case for case in CASES.values() if case.row not in {"layout", "block size"}} | {
    name: CASES[name]
    for name in (
        "block size: 16 into 48, tokens 7 to 121",
        "block size: 64 into 16, tokens 7 to 121",
        "layout: HND, cross-layer, layer inside, into all",
        "layout: K in vectors of 16, into all",
    )
}
SIZES = {"arena_bytes": "128KiB", "chunk_bytes": "24KiB", "in_place_chunk_bytes": "24KiB"}


@pytest.fixture
async def ranks() -> AsyncIterator[Sides]:
    """Ranks in this process."""
    found = Sides()
    yield found
    await found.close()


class Play:
    """A case on open workers, and what has landed of it."""

    def __init__(self, ranks: Sides, world: World) -> None:
        self.world = world
        self.senders: Sequence[Worker] = ranks.workers[: len(world.prefill)]
        self.receivers: Sequence[Worker] = ranks.workers[len(world.prefill) :]
        self.needs = [world.needs(rank) for rank in world.decode]
        self.before = [rank.memory.copy() for rank in world.decode]
        self.after = [world.expected(rank) for rank in world.decode]

    def arrived(self, landed: Sequence[np.ndarray]) -> bool:
        """Whether by now every rank holds these bytes (a mask over what it needs), and is as before elsewhere."""
        for rank, need, mask, before, after in zip(
            self.world.decode, self.needs, landed, self.before, self.after, strict=True
        ):
            expected = before.copy()
            at = need[mask, 0]
            expected[at] = after[at]
            if not np.array_equal(rank.memory, expected):
                return False
        return True

    async def released_at_once(self, offers: Sequence[Offer]) -> list[tuple[Offer, Rank]]:
        """All offers. Those of ranks that send nothing have ended, and nothing tells their engine not to go on."""
        senders = {number for each in self.world.case.senders for number in each}
        for number, offer in enumerate(offers):
            if number not in senders:
                assert isinstance(await offer.released(), Released)
        return list(zip(offers, self.world.prefill, strict=True))

    def of_layers(self, layers: Sequence[int]) -> list[np.ndarray]:
        """What belongs to these layers."""
        return [self.world.coder.among(need[:, 1], layers) for need in self.needs]

    def before_token(self, stop: int) -> list[np.ndarray]:
        """What belongs to tokens before this one."""
        return [self.world.coder.before(need[:, 1], stop, self.world.request.tokens.stop) for need in self.needs]


async def opened(ranks: Sides, case: Case, route: str) -> tuple[Play, dict[str, object]]:
    world = World.of(case)
    config = {"network": LoopbackNetwork(), "route": route, **SIZES}
    card = await ranks.prefill_of(world, **config)
    await ranks.decode(world, **config)
    return Play(ranks, world), issuer(card, KEY).ticket("r")


@pytest.mark.parametrize("name", list(STREAMED)[::2])
async def test_layers_arrive_as_they_become_ready(ranks: Sides, name: str) -> None:
    route = ("staged", "direct", "pull")[list(STREAMED).index(name) % 3]
    play, ticket = await opened(ranks, STREAMED[name], route)
    world = play.world
    offers = [
        worker.offer("r", rank.spans, tokens=world.request.offered, streaming=True)
        for worker, rank in zip(play.senders, world.prefill, strict=True)
    ]
    transfers = [
        worker.start_fetch(ticket, rank.spans, tokens=world.request.tokens, after=READY, timeout=20)
        for worker, rank in zip(play.receivers, world.decode, strict=True)
    ]
    streamed = await play.released_at_once(offers)
    done: list[int] = []
    for layer in sorted({layer for rank in world.prefill for layer in rank.layers}):
        for offer, rank in streamed:
            if layer in rank.layers:
                offer.ready(layers=[layer])
        done.append(layer)
        await eventually(lambda: play.arrived(play.of_layers(done)))
        for transfer, rank in zip(transfers, world.decode, strict=True):
            assert not transfer.done
            if layer in rank.layers:
                await transfer.layers(layer, layer + 1)
    for offer, _ in streamed:
        offer.finish(b"end")
    for transfer in transfers:
        assert (await transfer).payload == b"end"
    assert play.arrived([np.ones(len(need), np.bool_) for need in play.needs])
    assert {type(await offer.released()) for offer in offers} == {Released}
    await all_idle(ranks)


@pytest.mark.parametrize("name", list(STREAMED)[1::2])
async def test_tokens_arrive_as_they_become_ready(ranks: Sides, name: str) -> None:
    """Chunked prefill: each step brings tokens and the blocks that hold them, while those before are on their way."""
    route = ("pull", "staged", "direct")[list(STREAMED).index(name) % 3]
    play, ticket = await opened(ranks, STREAMED[name], route)
    world, stop = play.world, play.world.request.offered
    offers = [worker.offer("r", streaming=True) for worker in play.senders]
    transfers = [
        worker.start_fetch(ticket, rank.spans, tokens=world.request.tokens, after=READY, timeout=20)
        for worker, rank in zip(play.receivers, world.decode, strict=True)
    ]
    streamed = await play.released_at_once(offers)
    for begin in range(0, stop, world.period):
        end = min(begin + world.period, stop)
        for offer, rank in streamed:
            offer.extend(rank.added(range(begin, end), last=end == stop), tokens=range(begin, end))
            offer.ready()
        await eventually(lambda: play.arrived(play.before_token(end)))  # noqa: B023 - it is waited for in this turn
        assert not any(transfer.done for transfer in transfers)
    for offer, _ in streamed:
        offer.finish(b"end")
    for transfer in transfers:
        assert (await transfer).payload == b"end"
    assert play.arrived([np.ones(len(need), np.bool_) for need in play.needs])
    assert {type(await offer.released()) for offer in offers} == {Released}
    await all_idle(ranks)
