"""The decode process of the demo: 32-token blocks, HND; fetches with `await` and decodes without recomputing."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvxfer.config import Config
from kvxfer.copy.port import READY
from kvxfer.integrations.transformers import PagedCache, Sequence, decode, first_difference, token_digests
from kvxfer.tools.demo.script import (
    DECODE_BLOCK_TOKENS,
    Decoded,
    Fetched,
    LayerLanded,
    Offered,
    Parent,
    Prefilled,
    Sabotage,
    Script,
)
from kvxfer.transfers import FetchResult
from kvxfer.worker import Worker

__all__ = ["run"]


@dataclass(frozen=True, slots=True)
class _Server:
    """What serves every prompt."""

    script: Script
    parent: Parent
    worker: Worker
    model: Any
    cache: PagedCache
    compute: asyncio.Lock = field(default_factory=asyncio.Lock)  # one model, one thread


async def run(script: Script, parent: Parent, device: str, folder: Path) -> None:
    """Fetch every prompt as its ticket comes in, compare its cache, and decode it."""
    model = await asyncio.to_thread(script.model, device)
    cache = PagedCache(
        model.config,
        num_blocks=sum(-(-(tokens + script.steps) // DECODE_BLOCK_TOKENS) for tokens in script.prompts) + 8,
        block_tokens=DECODE_BLOCK_TOKENS,
        layout="HND",
        dtype=torch.float32,
        device=device,
        seed=1,
    )
    loop = asyncio.get_running_loop()
    expected: list[asyncio.Future[Prefilled]] = [loop.create_future() for _ in script.prompts]
    async with Worker(cache.cache_tensors(), Config(**script.config("decode", folder))) as worker:
        server = _Server(script, parent, worker, model, cache)
        async with asyncio.TaskGroup() as group:
            for _ in range(2 * len(script.prompts)):
                match await parent.news.get():
                    case Offered() as offered:
                        group.create_task(_serve(server, offered, expected[offered.prompt]))
                    case Prefilled() as prefilled:
                        expected[prefilled.prompt].set_result(prefilled)
        await parent.dismissed.wait()


async def _serve(server: _Server, offered: Offered, expected: "asyncio.Future[Prefilled]") -> None:
    script, parent, cache = server.script, server.parent, server.cache
    prompt, tokens = offered.prompt, script.prompts[offered.prompt]
    sequence = Sequence(cache.allocate(tokens), tokens=tokens)
    cache.scrub(sequence.block_ids)  # stale data must not pass for received data
    result = await _fetch(server, offered, sequence)
    parent.send(Fetched(prompt, result.stats))
    damaged = _damage(script.sabotage, cache, sequence)
    theirs = (await expected).digests
    async with server.compute:
        mine = await asyncio.to_thread(token_digests, cache, sequence)
        different = first_difference(theirs, mine)
        first = int.from_bytes(result.payload, "little")
        following = await asyncio.to_thread(decode, server.model, cache, sequence, first, script.steps)
    where = f"layer {different.layer}, {different.part}, token {different.token}" if different is not None else ""
    parent.send(Decoded(prompt, [first, *following], where, damaged))
    cache.free(sequence.block_ids)


async def _fetch(server: _Server, offered: Offered, sequence: Sequence) -> FetchResult:
    cache = server.cache
    after = torch.cuda.current_stream(cache.device) if cache.device.type == "cuda" else READY
    tokens = range(sequence.tokens)
    async with server.worker.start_fetch(offered.ticket, sequence.block_ids, tokens=tokens, after=after) as transfer:
        for layer in range(server.script.layers):
            await transfer.layers(layer, layer + 1)
            server.parent.send(LayerLanded(offered.prompt, layer))
        return await transfer


def _damage(sabotage: Sabotage, cache: PagedCache, sequence: Sequence) -> bool:
    """Do to the received cache what a wrong copy would do; False if that changed nothing of this prompt."""
    ids = sequence.block_ids
    tail = sequence.tokens % DECODE_BLOCK_TOKENS
    before = [tensor[:, ids].clone() for tensor in cache.tensors]  # [kv, block, head, token, dim]
    for tensor in cache.tensors:
        match sabotage:
            case Sabotage.NONE:
                return False
            case Sabotage.ZERO_BLOCK:
                tensor[:, ids[len(ids) // 2]] = 0
            case Sabotage.SWAP_BLOCKS:  # the prompts of one block stay as they are
                tensor[:, ids[:2]] = tensor[:, ids[:2]].flip(1)
            case Sabotage.SWAP_HEADS:
                tensor[:, ids, :2] = tensor[:, ids, :2].flip(2)
            case Sabotage.CUT_TAIL:  # those that end with a block stay as they are
                tensor[:, ids[-1], :, :tail] = torch.randn_like(tensor[:, ids[-1], :, :tail])
    return not all(torch.equal(tensor[:, ids], old) for tensor, old in zip(cache.tensors, before, strict=True))
