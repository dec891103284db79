"""Streams of transfers, one after the other, of which both ends draw from a seed what each of them is.

The prefill end keeps a few requests on offer, and says in the payload in which of its blocks they are; the decode end
fetches them in order into random blocks of its own, and compares every byte. About one in a hundred goes wrong on
purpose.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stage import KEY, Cache

from kvxfer import BlocksError, KvxferError, MemoryInDoubt, Offer, UnreachableError, Worker
from kvxfer.tickets import EngineCard, Issuer

BLOCK_TOKENS = 16
MOST_BLOCKS = 6
ON_OFFER = 4
FAULT_RATE = 0.01
FAULTS = ("cancel", "cancel", "cut", "timeout", "withdraw")
_FETCH_SECONDS = 20.0
_STUCK_SECONDS = 60.0
_SOON_SECONDS = 0.006
_RETRY_SECONDS = 0.1


@dataclass
class Tally:
    """What became of transfers."""

    ended: int = 0  # how many
    ok: int = 0  # how many of them arrived
    bytes: int = 0  # that they brought
    errors: Counter[str] = field(default_factory=Counter)  # the others, by type
    faults: Counter[str] = field(default_factory=Counter)  # faults that were made, by kind
    wrong: list[str] = field(default_factory=list)  # what must not be: other bytes than were sent, or no end

    def add(self, other: "Tally") -> None:
        """What became of others, too."""
        self.ended += other.ended
        self.ok += other.ok
        self.bytes += other.bytes
        self.errors += other.errors
        self.faults += other.faults
        self.wrong += other.wrong


@dataclass(frozen=True)
class Plan:
    """What one transfer is."""

    tokens: int
    streaming: bool
    fault: str
    soon: float

    @classmethod
    def of(cls, request: str) -> "Plan":
        """The same at both ends."""
        rng = random.Random(request)
        tokens = rng.randint(1, MOST_BLOCKS * BLOCK_TOKENS) if rng.random() < 0.7 else rng.randint(1, BLOCK_TOKENS)
        streaming = rng.random() < 0.2
        fault = rng.choice(FAULTS) if rng.random() < FAULT_RATE else ""
        return cls(tokens, streaming, fault, rng.random() * _SOON_SECONDS)

    @property
    def blocks(self) -> int:
        """How many the tokens fill."""
        return -(-self.tokens // BLOCK_TOKENS)


async def give(worker: Worker, cache: Cache, flow: str, tally: Tally) -> None:
    """Keep a few requests on offer until cancelled; then take them back."""
    offers: set[asyncio.Task[None]] = set()
    number = 0
    try:
        while True:
            while len(offers) < ON_OFFER:
                offers.add(asyncio.create_task(_offer(worker, cache, f"{flow}/{number}", tally)))
                number += 1
            done, offers = await asyncio.wait(offers, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in offers:
            task.cancel()
        await asyncio.gather(*offers, return_exceptions=True)


async def _offer(worker: Worker, cache: Cache, request: str, tally: Tally) -> None:
    plan = Plan.of(request)
    offer, blocks = _begun(worker, cache, request, plan)
    try:
        if plan.streaming:
            for layer in cache.layers:
                offer.ready(layers=[layer])
                await asyncio.sleep(0)
            with contextlib.suppress(KvxferError):  # withdrawn, or ended by itself
                offer.finish(bytes(blocks))
        if plan.fault == "withdraw":
            tally.faults["withdraw"] += 1
            await asyncio.sleep(plan.soon)
            await offer.withdraw()
        ending = type(await offer.released()).__name__
        tally.ok += ending == "Released"
        tally.errors[ending] += ending != "Released"
    except KvxferError as error:
        tally.errors[type(error).__name__] += 1
    except asyncio.CancelledError:
        with contextlib.suppress(KvxferError):
            await offer.withdraw()
        raise
    tally.ended += 1


def _begun(worker: Worker, cache: Cache, request: str, plan: Plan) -> tuple[Offer, list[int]]:
    """An offer of random blocks, none of which somebody silent may still read."""
    held = cache.memory[cache.layers[0]].shape[1]
    while True:
        blocks = random.sample(range(held), plan.blocks)
        payload = b"" if plan.streaming else bytes(blocks)
        with contextlib.suppress(BlocksError):
            offer = worker.offer(request, blocks, tokens=plan.tokens, streaming=plan.streaming, payload=payload)
            return offer, blocks


class Taker:
    """The decode end of a stream of transfers."""

    def __init__(
        self, worker: Worker, cache: Any, given: Cache, pool: range, tally: Tally, cut: Callable[[], None]
    ) -> None:
        self._worker, self._cache, self._given, self._tally, self._cut = worker, cache, given, tally, cut
        self._free = list(pool)
        self._settling: set[asyncio.Task[None]] = set()
        self._rng = random.Random(pool.start)

    async def take(self, card: dict[str, Any], flow: str) -> None:
        """Fetch one after the other until cancelled."""
        issuer = Issuer(EngineCard.from_dict(card), KEY)
        number = 0
        while True:
            request = f"{flow}/{number}"
            if not await self._fetch(issuer.ticket(request), request):
                return
            number += 1

    async def _fetch(self, ticket: dict[str, Any], request: str) -> bool:
        """One of them; False if it has no end."""
        tally, plan, source = self._tally, Plan.of(request), b""
        ids = self._rng.sample(self._free, plan.blocks)
        mark = -self._rng.randrange(1, 1 << 30)
        for layer in self._cache.layers:
            self._cache.view(layer)[:, ids] = mark
        error: BaseException | None = None
        try:
            async with asyncio.timeout(_STUCK_SECONDS):
                source = await self._struck(ticket, ids, plan)
        except (KvxferError, asyncio.CancelledError) as raised:
            error = raised
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the stream itself is being ended
                if isinstance(raised, MemoryInDoubt):
                    self._lend(ids, raised)
                raise asyncio.CancelledError from raised
        except TimeoutError:
            tally.wrong.append(f"{request} has not ended within {_STUCK_SECONDS:g} s")
            return False
        tally.ended += 1
        self._compare(request, ids, plan, mark, list(source))
        if error is None:
            tally.ok += 1
            if not source:
                tally.wrong.append(f"{request} arrived without its payload")
            return True
        tally.errors[type(error).__name__] += 1
        if isinstance(error, MemoryInDoubt):
            self._lend(ids, error)
        if isinstance(error, UnreachableError):  # cut in the midst of a handshake, or dead: then we are ended soon
            await asyncio.sleep(_RETRY_SECONDS)
        with contextlib.suppress(KvxferError):
            await self._worker.decline(ticket)
        return True

    async def _struck(self, ticket: dict[str, Any], ids: list[int], plan: Plan) -> bytes:
        """Fetch, with what is to go wrong; the blocks that it came from."""
        tally, fault = self._tally, plan.fault
        if fault not in ("", "withdraw"):
            tally.faults[fault] += 1
        timeout = 0.001 + plan.soon if fault == "timeout" else _FETCH_SECONDS
        transfer = self._worker.start_fetch(ticket, ids, tokens=range(plan.tokens), timeout=timeout)
        if fault in ("cancel", "cut"):
            await asyncio.sleep(plan.soon)
            if fault == "cancel":
                transfer.cancel()
            else:
                self._cut()
        result = await transfer
        tally.bytes += result.stats.bytes
        return result.payload

    def _compare(self, request: str, ids: list[int], plan: Plan, mark: int, source: list[int]) -> None:
        """All has arrived, or (without a source) each element is old or one of theirs; nothing else was touched."""
        tokens, wrong = range(plan.tokens), 0
        for layer in self._cache.layers:
            found, given = self._cache.view(layer), self._given.view(layer)
            here = found[:, *self._cache.at(ids, tokens)]
            if source:
                wrong += int((here != given[:, *self._given.at(source, tokens)]).sum())
            else:
                wrong += int(((here != mark) & ((here < given.min()) | (here > given.max()))).sum())
            beyond = found[:, ids[-1], plan.tokens - (len(ids) - 1) * BLOCK_TOKENS :]
            wrong += int((beyond != mark).sum())
        if wrong:
            self._tally.wrong.append(f"{request}: {wrong} wrong elements")

    def _lend(self, ids: list[int], error: Any) -> None:
        """Blocks that are in doubt are not ours until they are settled."""
        self._free = [block for block in self._free if block not in ids]

        async def settle() -> None:
            with contextlib.suppress(KvxferError):
                await error.settled()
                self._free += ids

        task = asyncio.create_task(settle())
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
