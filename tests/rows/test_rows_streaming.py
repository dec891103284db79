"""Every case while prefill still computes: by layers, and by tokens, it becomes ready bit by bit and arrives so.

The routes take turns over the catalogue, and a case has one of them by layers and another by tokens. Blocks hold
something else until they are computed, so what is read too early is found out, if only in the end. Steps of tokens go
by layers half of the time, so a quick run has whole layers of a third of the cases alone.
"""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from catalogue import CASES, Case, a_third
from inside import entry
from numpy.typing import NDArray
from ranks import Rank, World, contents
from sides import Sides, all_idle, issuer, route_in_turn
from stage import KEY, eventually

from kvxfer import READY, Offer, Released, Transfer, Worker
from kvxfer.fabric.loopback import LoopbackNetwork
from kvxfer.protocol.transfer import SendState

Mask = NDArray[np.bool_]

SIZES = {"arena_bytes": "128KiB", "chunk_bytes": "24KiB"}
SMALLEST_STEP = 2
"""Tokens of the smallest chunk by tokens: of a shorter step such a small request would have too many."""

TURNS = 50
"""Turns of the loop in which a chunk comes to be read that was granted too early."""


@pytest.fixture(scope="module")
def kind_of_ranks() -> type[Sides]:
    """All of them are in this process."""
    return Sides


class Play:
    """A case on open workers, what is computed of it, and what has landed."""

    def __init__(self, ranks: Sides, world: World) -> None:
        self.world = world
        self.senders: Sequence[Worker] = ranks.workers[: len(world.prefill)]
        self.receivers: Sequence[Worker] = ranks.workers[len(world.prefill) :]
        self.needs = [world.needs(rank) for rank in world.decode]
        self.before = [rank.memory.copy() for rank in world.decode]
        self.after = [world.expected(rank) for rank in world.decode]
        self._cells = [rank.cells(world.coder) for rank in world.prefill]
        for rank, cells in zip(world.prefill, self._cells, strict=True):
            rank.memory[cells[:, 0]] ^= 0xFF  # nothing is computed

    def compute(self, rank: Rank, tokens: range, layers: Sequence[int]) -> None:
        """A prefill rank computes these tokens of these layers."""
        coder, last = self.world.coder, self.world.request.tokens.stop
        at, codes = self._cells[rank.number].T
        done = coder.among(codes, layers) & coder.before(codes, tokens.stop, last)
        done &= ~coder.before(codes, tokens.start, last)
        rank.memory[at[done]] = contents(codes[done], self.world.request.seed)

    def arrived(self, landed: Sequence[Mask], ready: Sequence[Mask] | None = None) -> bool:
        """Whether every rank holds these bytes, at most those that are ready, and is as before elsewhere.

        Both are masks over what it needs; where only one is given, neither more nor less may be there.
        """
        for number, rank in enumerate(self.world.decode):
            at, after = self.needs[number][:, 0], self.after[number]
            there = landed[number]
            if ready is not None:
                there = there | ready[number] & (rank.memory[at] == after[at])
            expected = self.before[number].copy()
            expected[at[there]] = after[at[there]]
            if not np.array_equal(rank.memory, expected):
                return False
        return True

    async def streamed(self, offers: Sequence[Offer]) -> list[tuple[Offer, Rank]]:
        """All offers, once fetches of those that are needed are here.

        The others have ended by themselves, and nothing tells their engine to stop.
        """
        asked = [sum(number in each for each in self.world.case.senders) for number in range(len(offers))]
        for offer, askers in zip(offers, asked, strict=True):
            if not askers:
                assert isinstance(await offer.released(), Released)
        await eventually(lambda: [len(entry(offer).transfers) for offer in offers] == asked)
        return list(zip(offers, self.world.prefill, strict=True))

    async def end(self, offers: Sequence[Offer], transfers: Sequence[Transfer], route: str) -> None:
        """Finish the offers: every byte is there, and nothing is held any more."""
        for offer in offers:
            offer.finish(b"end")
        results = [await transfer for transfer in transfers]
        assert {(result.payload, result.stats.route) for result in results} == {(b"end", route)}
        assert self.arrived([np.ones(len(need), np.bool_) for need in self.needs])
        assert {type(await offer.released()) for offer in offers} == {Released}

    def of_layers(self, layers: Sequence[int]) -> list[Mask]:
        """What belongs to these layers."""
        return [self.world.coder.among(need[:, 1], layers) for need in self.needs]

    def before_token(self, stop: int) -> list[Mask]:
        """What belongs to tokens before this one."""
        return [self.world.coder.before(need[:, 1], stop, self.world.request.tokens.stop) for need in self.needs]


async def opened(ranks: Sides, case: Case, route: str) -> tuple[Play, dict[str, object]]:
    world = World.of(case)
    config = {"network": LoopbackNetwork(), "route": route, **SIZES}
    card = await ranks.prefill_of(world, **config)
    await ranks.decode(world, **config)
    return Play(ranks, world), issuer(card, KEY).ticket("r")


@pytest.mark.parametrize("name", a_third(1))
async def test_layers_arrive_as_they_become_ready(near: Sides, name: str) -> None:
    route = route_in_turn(name, ahead=3)
    play, ticket = await opened(near, CASES[name], route)
    world, whole = play.world, range(play.world.request.offered)
    offers = [
        worker.offer("r", rank.spans, tokens=len(whole), streaming=True)
        for worker, rank in zip(play.senders, world.prefill, strict=True)
    ]
    transfers = [
        worker.start_fetch(ticket, rank.spans, tokens=world.request.tokens, after=READY, timeout=20)
        for worker, rank in zip(play.receivers, world.decode, strict=True)
    ]
    streamed = await play.streamed(offers)
    done: list[int] = []
    for layer in sorted({layer for rank in world.prefill for layer in rank.layers}):
        for offer, rank in streamed:
            if layer in rank.layers:
                play.compute(rank, whole, [layer])
                offer.ready(layers=[layer])
        done.append(layer)
        await eventually(lambda: play.arrived(play.of_layers(done)))
        for transfer, rank in zip(transfers, world.decode, strict=True):
            assert not transfer.done
            if layer in rank.layers:
                await transfer.layers(layer, layer + 1)
    await play.end(offers, transfers, route)
    await all_idle(near)


async def turns() -> None:
    """Let everything go on that does: what does not wait until it is ready is read now."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


def accepted(offers: Sequence[Offer]) -> bool:
    """Whether every transfer of these offers has been planned."""
    transfers: list[Any] = [transfer for offer in offers for transfer in entry(offer).transfers]
    return all(transfer.protocol.state is SendState.MOVING for transfer in transfers)


def steps(stop: int, rng: Random) -> list[range]:
    """Steps of any size up to this token, one of them of a single token."""
    single = rng.randrange(stop)
    edges = sorted({0, stop, single, single + 1, *(rng.randrange(stop) for _ in range(4))})
    return [range(start, end) for start, end in pairwise(edges)]


def sure(world: World, end: int, step: int) -> int:
    """Up to which token all must have landed when those before `end` are ready: less than a chunk may be missing.

    A chunk is the step with which the transfer was planned, rounded up to the smaller block of the two engines.
    """
    case, tokens = world.case, world.request.tokens
    if end >= tokens.stop:
        return end
    if step >= len(tokens):
        return 0
    groups = [one.group for one in case.model if not one.state]
    block = max(min(case.prefill.block_of(group), case.decode.block_of(group)) for group in groups)
    return end - (max(step, SMALLEST_STEP) + block - 2)


@pytest.mark.parametrize("name", CASES)
async def test_tokens_arrive_as_they_become_ready(near: Sides, name: str) -> None:
    """Chunked prefill: each step brings tokens and the blocks that hold them, while those before are on their way."""
    route = route_in_turn(name, ahead=2)
    play, ticket = await opened(near, CASES[name], route)
    world, rng = play.world, Random(name)
    stop, first = world.request.offered, min(world.request.tokens.start + 1, world.request.tokens.stop)
    offers = [worker.offer("r", streaming=True) for worker in play.senders]
    transfers = [
        worker.start_fetch(ticket, rank.spans, tokens=world.request.tokens, after=READY, timeout=20)
        for worker, rank in zip(play.receivers, world.decode, strict=True)
    ]
    streamed = await play.streamed(offers)
    every = sorted({layer for rank in world.prefill for layer in rank.layers})
    planned = 0  # tokens of the step that brought the first one that is asked for
    for step in steps(stop, rng):
        for offer, rank in streamed:
            offer.extend(rank.added(step, last=step.stop == stop), tokens=step)
        at_once = rng.random() < 0.5
        for layers in [every] if at_once else [[layer] for layer in rng.sample(every, len(every))]:
            await turns()
            for offer, rank in streamed:
                if held := [layer for layer in rank.layers if layer in layers]:
                    play.compute(rank, step, held)
                    offer.ready(layers=held)
        if step.stop >= first:
            planned = planned or len(step)
            await eventually(lambda: accepted(offers))
            landed = play.before_token(sure(world, step.stop, planned))
        else:
            landed = play.before_token(0)
        ready = play.before_token(step.stop)
        await eventually(lambda: play.arrived(landed, ready))  # noqa: B023 - it is waited for in this turn
        assert not any(transfer.done for transfer in transfers)
    await play.end(offers, transfers, route)
    await all_idle(near)
