"""The prefill process of the demo: 16-token blocks, NHD; layers go out while the model computes."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvxfer.config import Config
from kvxfer.copy.port import READY
from kvxfer.errors import KvxferError
from kvxfer.integrations.transformers import PagedCache, Sequence, decode, prefill, token_digests
from kvxfer.offers import Offer, OfferState, Released
from kvxfer.tools.demo.script import PREFILL_BLOCK_TOKENS, LayerReady, Offered, Parent, Prefilled, Reference, Script
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
    """Prefill and offer every prompt, then continue each alone as the reference."""
    model = await asyncio.to_thread(script.model, device)
    cache = PagedCache(
        model.config,
        num_blocks=sum(-(-(tokens + script.steps) // PREFILL_BLOCK_TOKENS) for tokens in script.prompts) + 8,
        block_tokens=PREFILL_BLOCK_TOKENS,
        layout="NHD",
        dtype=torch.float32,
        device=device,
    )
    async with Worker(cache.cache_tensors(), Config(**script.config("prefill", folder))) as worker:
        server = _Server(script, parent, worker, model, cache)
        async with asyncio.TaskGroup() as group:
            for prompt in range(len(script.prompts)):
                group.create_task(_serve(server, prompt))
        await parent.dismissed.wait()


async def _serve(server: _Server, prompt: int) -> None:
    script, parent, cache = server.script, server.parent, server.cache
    tokens, name = script.prompts[prompt], f"prompt-{prompt}"
    loop = asyncio.get_running_loop()
    async with server.compute:
        sequence = Sequence(cache.allocate(tokens))
        offer = server.worker.offer(name, list(sequence.block_ids), tokens=tokens, streaming=True)
        parent.send(Offered(prompt, server.worker.engine.ticket(name)))

        def on_layer(layer: int, _: Sequence) -> None:  # in the model's thread
            after = torch.cuda.current_stream(cache.device).record_event() if cache.device.type == "cuda" else READY
            loop.call_soon_threadsafe(_ready, offer, layer, after)
            parent.send(LayerReady(prompt, layer))

        # the thread's end comes to the loop by the same queue as its calls of `_ready`, and so after them
        first = await asyncio.to_thread(prefill, server.model, cache, sequence, script.token_ids(prompt), on_layer)
        offer.finish(payload=first.to_bytes(4, "little"))
        digests = await asyncio.to_thread(token_digests, cache, sequence)
        await asyncio.to_thread(parent.send, Prefilled(prompt, digests))
    ending = await offer.released()
    if not isinstance(ending, Released) or not ending.stats:
        raise KvxferError(f"prompt {prompt} was not fetched: {ending}")
    async with server.compute:
        alone = await asyncio.to_thread(decode, server.model, cache, sequence, first, script.steps)
    cache.free(sequence.block_ids)
    parent.send(Reference(prompt, [first, *alone], ending.stats[0]))


def _ready(offer: Offer, layer: int, after: Any) -> None:
    if offer.state is OfferState.LIVE:  # after Ctrl-C the worker has taken it back, and the model's thread still runs
        offer.ready(layers=[layer], after=after)
