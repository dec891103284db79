"""The two processes of the demo. Prefill: 16-token blocks, NHD; decode: 32-token blocks, HND."""

import asyncio
from typing import Any

import torch

from kvxfer.config import Config
from kvxfer.copy.port import READY
from kvxfer.errors import KvxferError
from kvxfer.prefill.offers import OfferState, Released
from kvxfer.tools.bench.children import Side
from kvxfer.tools.demo import model as llama
from kvxfer.tools.demo.model import Layout, PagedCache, Sequence, first_difference, token_digests
from kvxfer.tools.demo.script import (
    DECODE_BLOCK_TOKENS,
    PREFILL_BLOCK_TOKENS,
    Decoded,
    Fetched,
    Layer,
    Offered,
    Prefilled,
    Reference,
    Script,
)
from kvxfer.transfers import FetchResult
from kvxfer.worker import Worker

__all__ = ["decode", "prefill"]


def _cache(script: Script, model: Any, device: str, block_tokens: int, layout: Layout, seed: int) -> PagedCache:
    blocks = sum(-(-(tokens + script.steps) // block_tokens) for tokens in script.prompts) + 8
    return PagedCache(
        model.config,
        num_blocks=blocks,
        block_tokens=block_tokens,
        layout=layout,
        dtype=torch.float32,
        device=device,
        seed=seed,
    )


async def prefill(side: Side, script: Script) -> None:
    """Prefill every prompt, whose layers go out while the model computes; then continue each alone as the reference."""
    loop, compute = asyncio.get_running_loop(), asyncio.Lock()  # one model, one thread
    model = await asyncio.to_thread(script.model, side.device)
    cache = _cache(script, model, side.device, PREFILL_BLOCK_TOKENS, "NHD", seed=0)

    async def tell(news: Offered | Prefilled) -> None:
        await asyncio.to_thread(side.send, news)  # digests are more than a pipe holds
        side.report(news)

    async def serve(prompt: int) -> None:
        tokens, name = script.prompts[prompt], f"prompt-{prompt}"
        async with compute:
            sequence = Sequence(cache.allocate(tokens))
            offer = worker.offer(name, list(sequence.block_ids), tokens=tokens, streaming=True)
            await tell(Offered(prompt, worker.engine.ticket(name)))

            def ready(layer: int, after: Any) -> None:
                if offer.state is OfferState.LIVE:  # when this process ends early the model's thread still runs
                    offer.ready(layers=[layer], after=after)
                    side.report(Layer(prompt, layer, landed=False))

            def on_layer(layer: int, _: Sequence) -> None:  # in the model's thread
                after = torch.cuda.current_stream(cache.device).record_event() if cache.device.type == "cuda" else READY
                loop.call_soon_threadsafe(ready, layer, after)

            # the thread's end comes to the loop by the same queue as its calls of `ready`, and so after them
            first = await asyncio.to_thread(llama.prefill, model, cache, sequence, script.token_ids(prompt), on_layer)
            offer.finish(payload=first.to_bytes(4, "little"))
            await tell(Prefilled(prompt, await asyncio.to_thread(token_digests, cache, sequence)))
        ending = await offer.released()
        if not isinstance(ending, Released) or not ending.stats:
            raise KvxferError(f"prompt {prompt} was not fetched: {ending}")
        async with compute:
            alone = await asyncio.to_thread(llama.decode, model, cache, sequence, first, script.steps)
        cache.free(sequence.block_ids)
        side.report(Reference(prompt, [first, *alone], ending.stats[0]))

    async with (
        Worker(cache.shards[0].cache_tensors(), Config(**script.config("prefill", side.folder))) as worker,
        asyncio.TaskGroup() as group,
    ):
        for prompt in range(len(script.prompts)):
            group.create_task(serve(prompt))


async def decode(side: Side, script: Script) -> None:
    """Fetch every prompt as its ticket comes in, compare its cache, and decode it without computing it again."""
    loop, compute = asyncio.get_running_loop(), asyncio.Lock()  # one model, one thread
    model = await asyncio.to_thread(script.model, side.device)
    cache = _cache(script, model, side.device, DECODE_BLOCK_TOKENS, "HND", seed=1)
    expected: list[asyncio.Future[Prefilled]] = [loop.create_future() for _ in script.prompts]

    async def fetch(offered: Offered, sequence: Sequence) -> FetchResult:
        after = torch.cuda.current_stream(cache.device) if cache.device.type == "cuda" else READY
        ids, tokens = sequence.block_ids, range(sequence.tokens)
        async with worker.start_fetch(offered.ticket, ids, tokens=tokens, after=after) as transfer:
            for layer in range(script.layers):
                await transfer.layers(layer, layer + 1)
                side.report(Layer(offered.prompt, layer, landed=True))
            return await transfer

    async def serve(offered: Offered) -> None:
        prompt, tokens = offered.prompt, script.prompts[offered.prompt]
        sequence = Sequence(cache.allocate(tokens), tokens=tokens)
        cache.scrub(sequence.block_ids)  # stale data must not pass for received data
        result = await fetch(offered, sequence)
        side.report(Fetched(prompt, result.stats))
        _damage(script.sabotage, cache, sequence)
        theirs = (await expected[prompt]).digests
        async with compute:
            difference = first_difference(theirs, await asyncio.to_thread(token_digests, cache, sequence))
            first = int.from_bytes(result.payload, "little")
            following = await asyncio.to_thread(llama.decode, model, cache, sequence, first, script.steps)
        side.report(Decoded(prompt, [first, *following], difference))
        cache.free(sequence.block_ids)

    async with (
        Worker(cache.shards[0].cache_tensors(), Config(**script.config("decode", side.folder))) as worker,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(2 * len(script.prompts)):
            news: Offered | Prefilled = await side.hear()
            match news:
                case Offered() as offered:
                    group.create_task(serve(offered))
                case Prefilled() as prefilled:
                    expected[prefilled.prompt].set_result(prefilled)


def _damage(sabotage: str, cache: PagedCache, sequence: Sequence) -> None:
    """Do to the received cache what a wrong copy would do."""
    ids = sequence.block_ids
    tail = sequence.tokens % DECODE_BLOCK_TOKENS
    for tensor in cache.tensors:  # [kv, block, head, token, dim]
        match sabotage:
            case "zero-block":
                tensor[:, ids[len(ids) // 2]] = 0
            case "swap-blocks":  # the prompts of one block stay as they are
                tensor[:, ids[:2]] = tensor[:, ids[:2]].flip(1)
            case "swap-heads":
                tensor[:, ids, :2] = tensor[:, ids, :2].flip(2)
            case "cut-tail":  # those that end with a block stay as they are
                tensor[:, ids[-1], :, :tail] = torch.randn_like(tensor[:, ids[-1], :, :tail])
            case _:
                pass
