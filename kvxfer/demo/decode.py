"""The decode process of the demo: 32-token blocks, HND; fetches with `await` and decodes without recomputing."""

import asyncio
from typing import Any

import torch

from kvxfer.config import Config
from kvxfer.copy.port import READY
from kvxfer.demo.script import Decoded, Fetched, LayerLanded, Offered, Parent, Prefilled, Sabotage, Script
from kvxfer.integrations.transformers import PagedCache, Sequence, decode, first_difference, token_digests
from kvxfer.transfers import Transfer
from kvxfer.worker import Worker

__all__ = ["run"]

BLOCK_TOKENS = 32


async def run(script: Script, parent: Parent, device: str) -> None:
    """Fetch every prompt as its ticket comes in, compare its cache, and decode it."""
    model = await asyncio.to_thread(script.model, device)
    blocks = sum(-(-(tokens + script.steps) // BLOCK_TOKENS) for tokens in script.prompts) + 8
    cache = PagedCache(
        model.config,
        num_blocks=blocks,
        block_tokens=BLOCK_TOKENS,
        layout="HND",
        dtype=torch.float32,
        device=device,
        seed=1,
    )
    loop = asyncio.get_running_loop()
    tickets: asyncio.Queue[Offered] = asyncio.Queue()
    expected: list[asyncio.Future[Prefilled]] = [loop.create_future() for _ in script.prompts]

    def deliver(news: Offered | Prefilled) -> None:
        if isinstance(news, Offered):
            tickets.put_nowait(news)
        else:
            expected[news.prompt].set_result(news)

    def listen() -> None:
        while (news := parent.recv()) is not None:
            loop.call_soon_threadsafe(deliver, news)

    listener = loop.run_in_executor(None, listen)
    async with Worker(cache.cache_tensors(), Config(**script.config("decode"))) as worker:
        compute = asyncio.Lock()  # one model, one thread
        async with asyncio.TaskGroup() as group:
            for _ in script.prompts:
                offered = await tickets.get()
                group.create_task(
                    _decode(script, parent, worker, model, cache, compute, offered, expected[offered.prompt])
                )
        await listener


async def _decode(
    script: Script,
    parent: Parent,
    worker: Worker,
    model: Any,
    cache: PagedCache,
    compute: asyncio.Lock,
    offered: Offered,
    expected: "asyncio.Future[Prefilled]",
) -> None:
    prompt, tokens = offered.prompt, script.prompts[offered.prompt]
    sequence = Sequence(cache.allocate(tokens), tokens=tokens)
    cache.scrub(sequence.block_ids)  # stale data must not pass for received data
    after = torch.cuda.current_stream(cache.device) if cache.device.type == "cuda" else READY
    transfer = worker.start_fetch(offered.ticket, sequence.block_ids, tokens=range(tokens), after=after)
    watch = asyncio.create_task(_watch(transfer, parent, prompt, script.layers))
    result = await transfer
    await watch
    parent.send(Fetched(prompt, result.stats))
    _damage(script.sabotage, cache, sequence)
    async with compute:
        mine = await asyncio.to_thread(token_digests, cache, sequence)
        theirs = (await expected).digests
        different = first_difference(theirs, mine)
        first = int.from_bytes(result.payload, "little")
        following = await asyncio.to_thread(decode, model, cache, sequence, first, script.steps)
    difference = f"layer {different.layer}, {different.part}, token {different.token}" if different is not None else ""
    parent.send(Decoded(prompt, [first, *following], difference))
    cache.free(sequence.block_ids)


async def _watch(transfer: Transfer, parent: Parent, prompt: int, layers: int) -> None:
    for layer in range(layers):
        await transfer.layers(layer, layer + 1)
        parent.send(LayerLanded(prompt, layer))


def _damage(sabotage: Sabotage, cache: PagedCache, sequence: Sequence) -> None:
    """Do to the received cache what a wrong copy would do."""
    ids = sequence.block_ids
    tail = sequence.tokens % BLOCK_TOKENS
    for tensor in cache.tensors:  # [kv, block, head, token, dim]
        match sabotage:
            case Sabotage.NONE:
                pass
            case Sabotage.ZERO_BLOCK:
                tensor[:, ids[len(ids) // 2]] = 0
            case Sabotage.SWAP_BLOCKS if len(ids) > 1:
                tensor[:, [ids[0], ids[1]]] = tensor[:, [ids[1], ids[0]]]
            case Sabotage.SWAP_HEADS:
                tensor[:, ids, :2] = tensor[:, ids, :2].flip(2)
            case Sabotage.CUT_TAIL if tail:
                tensor[:, ids[-1], :, :tail] = torch.randn_like(tensor[:, ids[-1], :, :tail])
            case _:
                pass
