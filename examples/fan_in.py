"""An engine of two prefill ranks and one decode rank: heads are split at one side and together at the other.

    python examples/fan_in.py

What to look at: each prefill rank offers what it holds, one ticket stands for both, and the decode rank works out by
itself what to fetch from whom. The ranks are in one process here to fit on a screen; they are processes in life, and
their launcher collects the cards and hands out the engine's card and key.
"""

import asyncio
import secrets
from contextlib import AsyncExitStack

import torch

import kvxfer
from kvxfer.geometry import group
from kvxfer.tickets import KEY_BYTES, EngineCard, Issuer

LAYERS, HEADS, DIM, TOKENS = 2, 8, 64, 200


def prefill_rank(rank: int, cache: torch.Tensor) -> kvxfer.Worker:
    """Half of the heads, in cross-layer blocks of 16 tokens."""
    heads = range(rank * HEADS // 2, (rank + 1) * HEADS // 2)
    tensor = kvxfer.CacheTensor(cache, "block layer kv token head dim", layers=range(LAYERS), heads=heads)
    return kvxfer.Worker([tensor], kvxfer.Config(engine="prefill", rank=rank, world=2))


def decode_rank(cache: list[torch.Tensor]) -> kvxfer.Worker:
    """All heads, one tensor a layer, HND in blocks of 32 tokens."""
    tensors = group(cache, "kv block head token dim", heads=range(HEADS))
    return kvxfer.Worker(tensors, kvxfer.Config(engine="decode"))


async def main() -> None:
    sources = [torch.randn(20, LAYERS, 2, 16, HEADS // 2, DIM) for _ in range(2)]
    target = [torch.zeros(2, 10, HEADS, 32, DIM) for _ in range(LAYERS)]
    async with AsyncExitStack() as stack:
        ranks = [await stack.enter_async_context(prefill_rank(rank, cache)) for rank, cache in enumerate(sources)]
        decode = await stack.enter_async_context(decode_rank(target))

        card, key = EngineCard.of([rank.card for rank in ranks]), secrets.token_bytes(KEY_BYTES)
        for rank in ranks:
            rank.join(card, key=key)
        ticket = Issuer(card, key).ticket("req-1")  # in the scheduler; every rank would make the same

        offers = [rank.offer("req-1", list(range(3, 16)), tokens=TOKENS) for rank in ranks]
        result = await decode.fetch(ticket, list(range(7)), tokens=range(TOKENS), timeout=60)
        endings = [await offer.released() for offer in offers]

    print(f"{result.stats.bytes} bytes from {len(result.stats.peers)} ranks; offers: {endings[0].__class__.__name__}")
    sent = torch.cat([cache[3:16].permute(1, 2, 0, 3, 4, 5).flatten(2, 3) for cache in sources], dim=3)
    landed = torch.stack(target)[:, :, :7].transpose(3, 4).flatten(2, 3)
    print("every head where it belongs:", torch.equal(sent[:, :, :TOKENS], landed[:, :, :TOKENS]))


if __name__ == "__main__":
    asyncio.run(main())
