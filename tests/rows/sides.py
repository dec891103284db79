"""The two engines of a case as workers, in whichever process: the harness of `far`, over those of `ranks`."""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
from catalogue import CASES
from far import Ranks, idle
from ranks import Rank, Request, World

from kvxfer import READY
from kvxfer.tickets import EngineCard, Issuer

SIZES: Mapping[str, Any] = {"arena_bytes": "256KiB", "chunk_bytes": "24KiB", "window": 3, "drain_timeout": 1.0}


ROUTES = ("staged", "mapped", "direct", "pull")
_NUMBERS = {name: number for number, name in enumerate(CASES)}


def route_in_turn(name: str, *, ahead: int = 0) -> str:
    """The routes take turns over the cases, and each test begins at another: a case meets all of them in the four."""
    return ROUTES[(_NUMBERS[name] + ahead) % len(ROUTES)]


class Held:
    """A rank as `Ranks` opens it, with its memory as it was then."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.tensors = rank.cache
        self.before = rank.memory.copy()


class Sides(Ranks):
    """Ranks of the engines of a case, which both processes build from its name."""

    world: World  # the case that was opened last

    async def prefill(self, name: str, request: Request | None = None, **config: Any) -> dict[str, Any]:
        """Open all ranks of the prefill engine; returns the engine's card."""
        return await self.prefill_of(World.of(CASES[name], request), **config)

    async def prefill_of(self, world: World, **config: Any) -> dict[str, Any]:
        """The same, of a world that is held already."""
        self.world = world
        return await self.open("prefill", [Held(rank) for rank in self.world.prefill], **{**SIZES, **config})

    async def decode(self, world: World, engine: str = "decode", **config: Any) -> None:
        """Open all ranks of the decode engine of a world that is held already."""
        await self.open(engine, [Held(rank) for rank in world.decode], **{**SIZES, **config})

    def offer_all(self, request: str, **options: Any) -> None:
        """Offer the case's request on every rank of the prefill engine that is here."""
        for at, held in enumerate(self.caches):
            self.offer(at, request, held.rank.spans, tokens=self.world.request.offered, **options)

    async def released_all(self, request: str) -> list[tuple[str, Any]]:
        """How the offers ended, and what their transfers say."""
        return await asyncio.gather(*(self.released(at, request) for at in range(len(self.caches))))

    async def withdrawn_all(self, request: str) -> list[str]:
        """Take the offers back, and say how they ended."""
        endings = [await self._offers[at, request].withdraw() for at in range(len(self.caches))]
        return [type(ending).__name__ for ending in endings]

    def placed(self, cache: Held, device: str) -> Held:
        """It has been placed already, between guards of its own."""
        assert device == "cpu"
        return cache

    def groups(self, cache: Held) -> Any:
        """Properties of its groups."""
        return cache.rank.groups

    def settled(self, cache: Held) -> Any:
        """Nothing is queued on a CPU."""
        del cache
        return READY

    def unchanged(self, given: Held, placed: Held) -> bool:
        """Whether every byte is as it was when the rank was opened."""
        del given
        return np.array_equal(placed.rank.memory, placed.before)


def issuer(card: Mapping[str, Any], key: bytes) -> Issuer:
    """What makes an engine's tickets."""
    return Issuer(EngineCard.from_dict(card), key)


async def all_idle(*engines: Any) -> None:
    """Wait until nothing is under way or held on any rank."""
    async with asyncio.timeout(5):
        for ranks in engines:
            while not idle(await _awaited(ranks.quiet())):  # noqa: ASYNC110 - nobody sets an event for it
                await asyncio.sleep(0.005)


async def _awaited(value: Any) -> Any:
    return await value if asyncio.iscoroutine(value) else value
