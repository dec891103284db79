"""The prefill process of the demo: 16-token blocks, NHD; layers go out while the model computes."""

import asyncio
from typing import Any

import torch

from kvxfer.config import Config
from kvxfer.copy.port import READY
from kvxfer.demo.script import LayerReady, Offered, Parent, Prefilled, Reference, Script
from kvxfer.errors import KvxferError
from kvxfer.integrations.transformers import PagedCache, Sequence, decode, prefill, token_digests
from kvxfer.offers import Offer, Released
from kvxfer.worker import Worker

__all__ = ["run"]

BLOCK_TOKENS = 16


async def run(script: Script, parent: Parent, device: str) -> None:
    """Prefill and offer every prompt, then continue each alone as the reference."""
    model = await asyncio.to_thread(script.model, device)
    blocks = sum(-(-(tokens + script.steps) // BLOCK_TOKENS) for tokens in script.prompts) + 8
    cache = PagedCache(
        model.config, num_blocks=blocks, block_tokens=BLOCK_TOKENS, layout="NHD", dtype=torch.float32, device=device
    )
    async with Worker(cache.cache_tensors(), Config(**script.config("prefill"))) as worker:
        compute = asyncio.Lock()  # one model, one thread
        await asyncio.gather(
            *(_serve(script, parent, worker, model, cache, compute, prompt) for prompt in range(len(script.prompts)))
        )


async def _serve(
    script: Script, parent: Parent, worker: Worker, model: Any, cache: PagedCache, compute: asyncio.Lock, prompt: int
) -> None:
    tokens = script.prompts[prompt]
    loop = asyncio.get_running_loop()
    async with compute:
        sequence = Sequence(cache.allocate(tokens))
        offer = worker.offer(f"prompt-{prompt}", list(sequence.block_ids), tokens=tokens, streaming=True)
        parent.send(Offered(prompt, worker.engine.ticket(f"prompt-{prompt}")))

        def on_layer(layer: int, _: Sequence) -> None:  # in the model's thread
            after = torch.cuda.current_stream(cache.device).record_event() if cache.device.type == "cuda" else READY
            loop.call_soon_threadsafe(_ready, offer, layer, after)
            parent.send(LayerReady(prompt, layer))

        first = await asyncio.to_thread(prefill, model, cache, sequence, script.token_ids(prompt), on_layer)
        await asyncio.sleep(0)  # the last layer's call is ahead of us in the loop's queue
        offer.finish(payload=first.to_bytes(4, "little"))
        digests = await asyncio.to_thread(token_digests, cache, sequence)
        await asyncio.to_thread(parent.send, Prefilled(prompt, digests))
    ending = await offer.released()
    if not isinstance(ending, Released):
        raise KvxferError(f"prompt {prompt} was not fetched: {ending}")
    async with compute:
        alone = await asyncio.to_thread(decode, model, cache, sequence, first, script.steps)
    cache.free(sequence.block_ids)
    parent.send(Reference(prompt, [first, *alone], ending.stats[0]))


def _ready(offer: Offer, layer: int, after: Any) -> None:
    offer.ready(layers=[layer], after=after)
