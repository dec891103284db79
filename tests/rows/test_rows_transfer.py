"""Cases of the catalogue as workers over NIXL, the two engines in two processes: every byte of every rank.

In a quick run a third of the cases of each row: every one of them is moved within one process, by `test_rows_bytes` and
`test_rows_streaming`.
"""

import asyncio
import importlib.util
from typing import Any

import numpy as np
import pytest
from catalogue import CASES, a_third
from far import Far
from ranks import Request, World
from sides import Sides, all_idle, issuer, route_in_turn
from stage import KEY

from kvxfer import READY, RefusedError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")


@pytest.fixture(scope="module")
def kind_of_ranks() -> type[Sides]:
    """The prefill engines have a process of their own."""
    return Sides


def senders(endings: list[tuple[str, Any]], ranks: int) -> tuple[tuple[int, ...], ...]:
    """For each decode rank the prefill ranks that had a transfer with it, as the offers tell."""
    found: list[list[int]] = [[] for _ in range(ranks)]
    for prefill, (_, each) in enumerate(endings):
        for stats in each:
            found[int(stats.peers[0].partition("[")[2].partition("/")[0])].append(prefill)
    return tuple(map(tuple, found))


@pytest.mark.parametrize("name", a_third(0))
async def test_every_byte_between_two_processes(far: Far, near: Sides, name: str) -> None:
    world = World.of(CASES[name])
    needed = [len(world.needs(rank)) for rank in world.decode]
    tickets = issuer(await far.prefill(name), KEY)
    expected = [world.expected(rank) for rank in world.decode]
    route = route_in_turn(name, ahead=1)
    await far.offer_all(name, payload=b"token")
    await near.decode(world, route=route)
    fetches = [
        worker.fetch(tickets.ticket(name), rank.spans, tokens=world.request.tokens, after=READY, timeout=20)
        for worker, rank in zip(near.workers, world.decode, strict=True)
    ]
    results = await asyncio.gather(*fetches)
    for rank, memory in zip(world.decode, expected, strict=True):
        assert np.array_equal(rank.memory, memory), f"rank {rank.number}: {(rank.memory != memory).sum()} bytes"
    assert {(result.payload, result.stats.route) for result in results} == {(b"token", route)}
    endings = await far.released_all(name)
    assert {ending for ending, _ in endings} == {"Released"}
    assert [result.stats.bytes for result in results] == needed
    assert sum(stats.bytes for _, each in endings for stats in each) == sum(needed)
    assert senders(endings, len(world.decode)) == world.case.senders
    assert await far.intact()
    await all_idle(far, near)


async def test_a_fetch_that_ends_before_the_last_token_is_refused_by_the_name_of_the_state(
    far: Far, near: Sides
) -> None:
    name = "hybrid state: TP 2:1"
    tokens = range(CASES[name].tokens.stop - 1)
    world = World.of(CASES[name], Request(tokens, CASES[name].tokens.stop))
    tickets = issuer(await far.prefill(name, world.request), KEY)
    await far.offer_all("short")
    await near.decode(world)
    (rank,), before = world.decode, world.decode[0].memory.copy()
    with pytest.raises(RefusedError, match="group 'state' is state, which belongs to token 20"):
        await near.workers[0].fetch(tickets.ticket("short"), rank.spans, tokens=tokens, after=READY, timeout=20)
    assert np.array_equal(rank.memory, before)
    assert await far.withdrawn_all("short") == ["Withdrawn", "Withdrawn"]
