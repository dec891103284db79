"""Three rows as they are served: a process for each rank."""

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest
from catalogue import CASES
from far import Far
from ranks import World
from sides import Sides, issuer
from stage import KEY

from kvxfer.tickets import EngineCard

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")

PROCESSES = 3
"""Besides this one, which is the first rank of the decode engine."""
SERVED = [
    ("TP ratios: 8 heads, 2:1", "staged"),
    ("hybrid state: TP 1:2", "direct"),
    ("pipeline stages: 2 of TP 1 into 1 of TP 2", "pull"),
]


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Far]]:
    """One for each rank that is not here; they start side by side."""
    found = [Far(Sides) for _ in range(PROCESSES)]
    yield found
    for far in found:
        far.end()


@pytest.fixture
async def ranks(processes: list[Far]) -> AsyncIterator[tuple[Sides, list[Far]]]:
    """This process and the others, of which all ranks are closed afterwards."""
    near = Sides()
    yield near, processes
    await asyncio.gather(near.close(), *(far.close() for far in processes))


async def joined(name: str, side: str, places: Sequence[Sides | Far], route: str) -> EngineCard:
    """Open an engine, a rank in each of these processes."""
    cards = await asyncio.gather(*(place.one(name, side, at, route=route) for at, place in enumerate(places)))
    card = EngineCard.of(cards)
    for place in places:
        if isinstance(place, Far):
            await place.joined(card.to_dict())
        else:
            place.joined(card.to_dict())
    return card


@pytest.mark.parametrize(("name", "route"), SERVED)
async def test_a_process_for_each_rank(ranks: tuple[Sides, list[Far]], name: str, route: str) -> None:
    near, others = ranks
    world = World.of(CASES[name])
    senders, receivers = others[: len(world.prefill)], others[len(world.prefill) :][: len(world.decode) - 1]
    assert len(senders) + len(receivers) + 1 == len(world.prefill) + len(world.decode)
    card = await joined(name, "prefill", senders, route)
    await joined(name, "decode", [near, *receivers], route)
    ticket = issuer(card.to_dict(), KEY).ticket("r")
    near.fetch_all("r", ticket, timeout=20)
    await asyncio.gather(*(far.fetch_all("r", ticket, timeout=20) for far in receivers))
    await asyncio.gather(*(far.offer_all("r") for far in senders))
    stats = [await near.fetched_all("r"), *[await far.fetched_all("r") for far in receivers]]
    assert [one.bytes for (one,) in stats] == [len(world.needs(rank)) for rank in world.decode]
    assert {one.route for (one,) in stats} == {route}
    assert [near.differences(), *[await far.differences() for far in receivers]] == [[0]] * len(world.decode)
    for far in senders:
        ((ending, _),) = await far.released_all("r")
        assert ending == "Released"
        assert await far.intact()
