"""Two engines that step, each with a free list of blocks: nothing in them waits for kvxfer.

    python examples/adapter.py

What to look at: which call frees blocks, and on which event.
"""

import time
from dataclasses import dataclass, field

import torch

import kvxfer

TOKENS = 16  # in a block


def cache_of(blocks: int) -> tuple[torch.Tensor, list[kvxfer.CacheTensor]]:
    cache = torch.randn(2, blocks, TOKENS, 4, 64)
    return cache, [kvxfer.CacheTensor(cache, "kv block token head dim", layers=[0], heads=range(4))]


@dataclass
class Prefill:
    """Offers each request step by step, and frees its blocks when nobody reads them any more."""

    worker: kvxfer.BlockingWorker
    free: list[int]
    held: dict[str, list[int]] = field(default_factory=dict)

    def run(self, request: str, tokens: int) -> dict[str, object]:
        """The prompt, in steps of one block; returns what the router gets."""
        offer, self.held[request] = self.worker.offer(request, streaming=True), []
        for start in range(0, tokens, TOKENS):
            block = self.free.pop()
            self.held[request].append(block)
            offer.extend([block], tokens=range(start, min(start + TOKENS, tokens)))
            offer.ready(after=kvxfer.READY)  # on a GPU: an event that this step has recorded
        offer.finish(b"first token")
        return self.worker.engine.ticket(request)

    def step(self) -> None:
        """Between two steps of the model."""
        for event in self.worker.poll():
            if isinstance(event, kvxfer.OfferInDoubt):
                continue  # OfferSettled will come
            self.free += self.held.pop(event.request)


@dataclass
class Decode:
    """Loads requests, and runs those whose cache is there."""

    worker: kvxfer.BlockingWorker
    free: list[int]
    held: dict[str, list[int]] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)

    def load(self, request: str, ticket: dict[str, object], tokens: int) -> None:
        """Begin to fetch a request that has got its blocks."""
        self.held[request] = [self.free.pop() for _ in range(0, tokens, TOKENS)]
        self.worker.start_fetch(ticket, self.held[request], tokens=range(tokens), after=kvxfer.READY, timeout=60)

    def step(self) -> None:
        """Between two steps of the model."""
        for event in self.worker.poll():
            if isinstance(event, kvxfer.Fetched):
                self.running.append(event.request)
            elif isinstance(event, kvxfer.FetchFailed) and isinstance(event.error, kvxfer.MemoryInDoubtError):
                continue  # Settled will come
            else:
                self.free += self.held.pop(event.request)  # compute the prompt here, or fail the request


with (
    kvxfer.BlockingWorker(kvxfer.Config(engine="prefill")) as theirs,
    kvxfer.BlockingWorker(kvxfer.Config(engine="decode")) as ours,
):
    source, tensors = cache_of(32)
    theirs.register(tensors)
    target, tensors = cache_of(32)
    ours.register(tensors)
    prefill, decode = Prefill(theirs, list(range(32))), Decode(ours, list(range(32)))
    for number in range(3):
        decode.load(f"request-{number}", prefill.run(f"request-{number}", 50), 50)
    at = {request: list(blocks) for request, blocks in prefill.held.items()}
    until = time.monotonic() + 60
    while (len(decode.running) < 3 or prefill.held) and time.monotonic() < until:
        prefill.step()
        decode.step()  # and here the model would run its batch
        time.sleep(0.001)
    print("running:", sorted(decode.running))
    print("free again at the prefill engine:", len(prefill.free), "of 32")
    for request, blocks in at.items():
        whole = [decode.held[request][:3], blocks[:3]]
        print(request, "is as it was:", torch.equal(target[:, whole[0]], source[:, whole[1]]))
