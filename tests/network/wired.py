"""A prefill and a decode rank on two hosts, and what a fetch between them must make of every byte."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from cable import ADDRESSES, CONTROL_PORT, HOSTS, Impairment
from hosts import Hosts
from stage import KEY, Cache, Copied

from kvxfer import Config
from kvxfer.tickets import EngineCard, Issuer

ASKED = 60
"""Blocks of a request."""
ZONES = 3
"""Each with the blocks of a request and four that are nobody's business: what is in doubt in one leaves the others."""
BLOCKS = ZONES * (ASKED + 4)
TOKENS = range(5, ASKED * 16 - 3)
SIZES: dict[str, Any] = {
    "arena_bytes": "8MiB",
    "chunk_bytes": "256KiB",
    "window": 3,
    "secret": "of both engines, as the tests say",
}
QUICK: dict[str, Any] = {
    "peer_timeout": 3.0,
    "revoke_timeout": 1.5,
    "offer_lease": 3.0,
    "no_progress_timeout": 3.0,
    "connect_timeout": 2.0,
    "drain_timeout": 0.0,
}
STARVED_SECONDS = 3.0
"""Scheduling comes on top of every bound, and these tests share their cores."""
BACK_SECONDS = 30.0
"""Within which all is as before once the network is: TCP waits longer the longer nothing came through."""


class Pair:
    """One rank on each host; `decode` fetches what `prefill` offers."""

    def __init__(self, hosts: Hosts, route: str) -> None:
        self.hosts, self.route = hosts, route
        self.bounds: Mapping[str, float] = {}  # what the settings promise
        shape: dict[str, Any] = {"blocks": BLOCKS, "block_tokens": 16, "heads": range(8), "dim": 64}
        self._source, self._mirror = (Cache(layers=range(3), **shape) for _ in range(2))
        held = sum(memory.nbytes for memory in self._source.memory.values())
        self.nbytes = held * len(TOKENS) // (BLOCKS * self._source.block_tokens)  # bytes of one request
        self._expected: dict[str, Copied] = {}
        self._turns = 0
        self._zones: dict[str, int] = {}
        self._asked: dict[str, tuple[list[int], dict[str, Any]]] = {}
        self.doubted: dict[str, int] = {}  # requests that failed and left their blocks in doubt, with the zone of these
        self._issuer: Issuer | None = None

    async def open(self, **config: Any) -> "Pair":
        settings = {**SIZES, **QUICK, **config, "route": self.route}
        self.bounds = Config(**settings).bounds()
        for way, cache in zip(HOSTS, (self._source, self._mirror), strict=True):
            listen = f"tcp:{ADDRESSES[way]}:{CONTROL_PORT}"
            card = await self.hosts.of(way).open(way, [cache], listen=listen, **settings)
            self._issuer = self._issuer or Issuer(EngineCard.from_dict(card), KEY)
        return self

    async def begin(self, request: str, zone: int = 0, **options: Any) -> None:
        """Offer a request there and start to fetch it here, into blocks in another order each time."""
        assert self._issuer is not None
        first = zone * (ASKED + 4)
        blocks = list(range(first, first + ASKED))
        await self.hosts.prefill.offer(0, request, blocks, tokens=ASKED * 16)
        self._turns += 7
        self._zones[request] = zone
        into = [first + (block + self._turns) % ASKED for block in range(ASKED)]
        for layer, memory in (await self.hosts.decode.contents()).items():
            self._mirror.memory[layer].copy_(memory)
        self._expected[request] = Copied(self._mirror).bring(self._source, blocks, into, TOKENS)
        self._asked[request] = into, options
        await self._ask(request)

    async def _ask(self, request: str) -> None:
        assert self._issuer is not None
        into, options = self._asked[request]
        await self.hosts.decode.begin(request, self._issuer.ticket(request), into, tokens=TOKENS, **options)

    async def check(self, request: str) -> None:
        """Every byte of the destination is what it must be, those that were not asked for included.

        Blocks in doubt are nobody's business until they are settled.
        """
        expected = self._expected[request]
        zones = [zone for zone in range(ZONES) if zone not in self.doubted.values()]
        for layer, memory in (await self.hosts.decode.contents()).items():
            found, wanted = (_by_zone(each) for each in (memory, expected.expected[layer]))
            assert torch.equal(found[:, zones], wanted[:, zones]), f"layer {layer} differs"

    async def succeeds(self, request: str, zone: int = 0, **options: Any) -> float:
        """Fetch a request, byte for byte; the seconds that it took."""
        began = time.monotonic()
        await self.begin(request, zone, timeout=BACK_SECONDS, **options)
        return await self.arrived(request) - began

    async def succeeds_again(self, request: str, zone: int = 0) -> None:
        """Fetch a request from a host that was away, again where the error says so, and after as long as it says.

        That is left in peace for a while, and an agent may be made anew while the first fetch waits for the network.
        """
        await self.begin(request, zone, timeout=BACK_SECONDS)
        async with asyncio.timeout(BACK_SECONDS):
            while _again(outcome := await self.hosts.decode.outcome(request)):
                await asyncio.sleep(outcome["retry_after"])
                await self._ask(request)
        await self.arrived(request)

    async def arrived(self, request: str) -> float:
        """It was fetched, byte for byte; when."""
        outcome = await self.hosts.decode.outcome(request)
        assert not outcome["error"], outcome["text"]
        assert outcome["route"] == self.route
        assert outcome["safe"]
        await self.check(request)
        assert await self.hosts.prefill.ended(request) == "Released"
        return outcome["at"]

    async def fails(self, request: str, within: float) -> str:
        """It failed in time, with an error of the library's own that says whether memory is safe; the error's name."""
        began = time.monotonic()
        outcome = await self.hosts.decode.outcome(request)
        assert "KvxferError" in outcome["error"], outcome
        assert outcome["safe"] == ("MemoryInDoubtError" not in outcome["error"])
        assert time.monotonic() - began <= within + STARVED_SECONDS
        if not outcome["safe"]:
            self.doubted[request] = self._zones[request]
        return outcome["error"][0]

    async def struck(self, **impairments: Impairment) -> None:
        """In the middle of what is under way, frames begin to fare like this."""
        await self.hosts.cable.impair_after("prefill", self.nbytes // 4, **impairments)

    async def burnt(self) -> None:
        """It has come about."""
        async with asyncio.timeout(10):
            while not await self.hosts.cable.burnt():  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.005)

    async def quiet(self) -> None:
        """Nothing under way, held, in quarantine or in doubt on either host."""
        for request in list(self.doubted):
            async with asyncio.timeout(BACK_SECONDS):
                await self.hosts.decode.no_more_doubt(request)
            del self.doubted[request]
        await self._books(lambda *both: not any(count for books in both for count in books.values()))

    async def accounted(self) -> None:
        """Nothing is under way on either host but what is in doubt, nothing held but that and what is in quarantine."""

        def right(prefill: dict[str, int], decode: dict[str, int]) -> bool:
            settled = prefill["sending"] <= decode["in doubt"] == decode["receiving"]
            return settled and all(books["bytes"] <= books["quarantined"] for books in (prefill, decode))

        await self._books(right)

    async def _books(self, right: Callable[[dict[str, int], dict[str, int]], bool]) -> None:
        """Wait until the books of both hosts are right."""
        seen: tuple[Any, ...] = ()
        try:
            async with asyncio.timeout(BACK_SECONDS):
                while not seen or not right(*seen):
                    await asyncio.sleep(0.02)
                    seen = (await self.hosts.prefill.books(), await self.hosts.decode.books())
        except TimeoutError:
            raise AssertionError(seen) from None

    async def resumed(self) -> None:
        """The transport uses the connection again that it had; TCP waits longer the longer nothing came through."""
        async with asyncio.timeout(BACK_SECONDS):
            while not await self.hosts.cable.transported():  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)

    async def crossed(self) -> int:
        """Bytes that the prefill host sent over the cable so far."""
        return (await self.hosts.prefill.crossed())["out"]


def _again(outcome: dict[str, Any]) -> bool:
    """Whether a fetch failed as one may that is to be tried again."""
    rebuilt = outcome["safe"] and "is being rebuilt: try again" in outcome["text"]
    return "UnreachableError" in outcome["error"] or rebuilt


def _by_zone(memory: Any) -> Any:
    """A layer with an axis for its zones, after that of K and V."""
    return memory.unflatten(1, (ZONES, -1))
