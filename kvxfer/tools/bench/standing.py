"""Offers that are always there: for benchmarks in which fetches follow one another as fast as they can.

The prefill side says once who it is and under which key it issues tickets; the decode side then makes the tickets
itself. Requests are called `<slot>/<number>`, and as soon as one of a slot is released, another one is offered.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import kvxfer
from kvxfer.tickets import KEY_BYTES, EngineCard, Issuer

__all__ = ["AHEAD", "Tickets", "introduce", "keeping"]

AHEAD: Final = 2
"""Offers of a slot that are alive at a time: a fetch finds its offer though it follows at once."""


def introduce(worker: kvxfer.Worker) -> tuple[dict[str, Any], bytes]:
    """Give the engine of a single rank a key that the decode side may know; what that side needs."""
    key = secrets.token_bytes(KEY_BYTES)
    worker.join(EngineCard.of([worker.card]), key=key)
    return worker.card.to_dict(), key


@asynccontextmanager
async def keeping(worker: kvxfer.Worker, slots: int, ids: Sequence[int], tokens: int) -> AsyncGenerator[None, None]:
    """Keep the same blocks on offer in every slot inside; then close the worker at once."""

    async def renew(slot: int, number: int) -> None:
        while True:
            await worker.offer(f"{slot}/{number}", list(ids), tokens=tokens, after=kvxfer.READY).released()
            number += AHEAD

    tasks = [asyncio.create_task(renew(slot, number)) for slot in range(slots) for number in range(AHEAD)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await worker.aclose(drain=False)


class Tickets:
    """Tickets of an engine that was introduced, one slot's after another."""

    def __init__(self, card: dict[str, Any], key: bytes) -> None:
        self._issuer: Final = Issuer(EngineCard.of([card]), key)
        self._numbers: dict[int, int] = {}

    def next(self, slot: int) -> dict[str, Any]:
        """The next ticket of a slot."""
        number = self._numbers.get(slot, 0)
        self._numbers[slot] = number + 1
        return self._issuer.ticket(f"{slot}/{number}")
