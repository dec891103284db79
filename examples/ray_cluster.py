"""Prefill and decode workers as Ray actors on different nodes; nodes join and are lost while requests run.

    pip install ray
    python examples/ray_cluster.py       # with a cluster of small nodes on this machine

What to look at: Ray carries what is small (cards, tickets, prompts, answers), and kvxfer the caches, straight from node
to node. A request that meets a node that is gone begins again with others, as its next attempt. In a cluster of your
own, `ray.init("auto")` takes the place of `local_cluster`; give nodes the resources that the actors ask for, and an
autoscaler brings one when an actor waits for it. On GPUs that is `num_gpus=1`, and offers and fetches need `after=`.
Ray runs actors at a niceness of 15; where others use the same CPUs, nodes should have `RAY_worker_niceness=0`. It
carries tickets, keys and the secret in the clear unless it has TLS of its own.
"""

import asyncio
import functools
import hashlib
import itertools
import logging
import operator
import secrets
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from ray.exceptions import RayActorError, RayError

import kvxfer
from kvxfer.tickets import KEY_BYTES, EngineCard, Issuer

LAYERS, HEADS, DIM, TOKENS = 2, 8, 64, 256
ATTEMPTS, CLIENTS, ANSWERS = 5, 6, 3


def model(prompt: int) -> torch.Tensor:
    """K and V of a prompt: layer, kv, token, head, dim. In the place of a model, which also computes the same twice."""
    return torch.randn(LAYERS, 2, TOKENS, HEADS, DIM, generator=torch.Generator().manual_seed(prompt))


def digest(kv: torch.Tensor) -> str:
    return hashlib.sha256(kv.contiguous().numpy().tobytes()).hexdigest()


class Rank:
    """A worker, its cache, and which blocks of that are free."""

    def __init__(self, cache: torch.Tensor, axes: str, heads: range, block_tokens: int, **config: Any) -> None:
        listen = f"tcp:{ray.util.get_node_ip_address()}:0"  # the secret keeps strangers out; SECURITY.md has the rest
        tensor = kvxfer.CacheTensor(cache, axes, layers=range(LAYERS), heads=heads)
        self.worker = kvxfer.Worker([tensor], kvxfer.Config(listen=listen, **config))
        self.cache, self.doubts = cache, set[asyncio.Task[None]]()
        self.free = asyncio.Queue[list[int]]()
        for blocks in torch.randperm(len(cache)).view(-1, TOKENS // block_tokens).tolist():
            self.free.put_nowait(blocks)

    async def open(self) -> dict[str, Any]:
        """Let others connect; this rank's card."""
        await self.worker.__aenter__()
        return self.worker.card.to_dict()

    def join(self, card: dict[str, Any], key: bytes) -> None:
        """Learn which engine this is a rank of."""
        self.worker.join(card, key=key)

    async def close(self) -> None:
        """End; what is under way ends first."""
        await self.worker.aclose()

    @asynccontextmanager
    async def blocks(self) -> AsyncIterator[list[int]]:
        """Blocks for a request. They are free again when nobody touches them any more."""
        blocks, safe = await self.free.get(), True
        try:
            yield blocks
        except kvxfer.MemoryInDoubtError as doubt:  # a silent peer may; the request does not wait for that
            safe = False
            self.doubts.add(asyncio.create_task(self.free_after(doubt, blocks)))
            raise
        finally:
            if safe:
                self.free.put_nowait(blocks)

    async def free_after(self, doubt: kvxfer.MemoryInDoubtError, blocks: list[int]) -> None:
        """Have blocks back once it is known that nobody touches them."""
        await doubt.settled()
        self.free.put_nowait(blocks)


@ray.remote(num_cpus=0, resources={"prefill": 1})
class Prefill(Rank):
    """A rank of a prefill engine: its share of the heads, NHD in blocks of 16 tokens."""

    def __init__(self, rank: int, world: int, **config: Any) -> None:
        self.heads = range(rank * HEADS // world, (rank + 1) * HEADS // world)
        cache = torch.zeros(256, LAYERS, 2, 16, len(self.heads), DIM)
        super().__init__(cache, "block layer kv token head dim", self.heads, 16, rank=rank, world=world, **config)

    async def prefill(self, request: str, attempt: int, prompt: int) -> None:
        """Compute K and V, and keep them until they were fetched; when cancelled, until nobody reads them."""
        async with self.blocks() as blocks:
            kv = model(prompt)[:, :, :, self.heads.start : self.heads.stop]
            self.cache[blocks] = kv.unflatten(2, (-1, 16)).permute(2, 0, 1, 3, 4, 5)
            offer = self.worker.offer(request, blocks, tokens=TOKENS, attempt=attempt)
            try:
                await offer.released()
            finally:
                await offer.withdraw()


@ray.remote(num_cpus=0, resources={"decode": 1})
class Decode(Rank):
    """A decode engine of one rank: all heads, HND in blocks of 32 tokens."""

    def __init__(self, rank: int, world: int, **config: Any) -> None:
        cache = torch.zeros(64, LAYERS, 2, HEADS, 32, DIM)
        super().__init__(cache, "block layer kv head token dim", range(HEADS), 32, rank=rank, world=world, **config)

    async def decode(self, ticket: dict[str, Any]) -> str:
        """Fetch K and V, and generate; the answer here is their digest."""
        async with self.blocks() as blocks:
            await self.worker.fetch(ticket, blocks, tokens=range(TOKENS))
            await asyncio.sleep(0.5)  # a model would take its time now
            return digest(self.cache[blocks].permute(1, 2, 0, 4, 3, 5).flatten(2, 3))


@dataclass(eq=False)
class Engine:
    """Ranks on different nodes that work as one, and who makes their tickets."""

    ranks: list[Any]
    issuer: Issuer
    busy: int = 0

    @classmethod
    async def start(cls, kind: Any, world: int, **config: Any) -> "Engine":
        """Start the ranks, each as soon as there is a node for it, and make an engine of them."""
        ranks = [kind.remote(rank, world, **config) for rank in range(world)]
        card = EngineCard.of(await asyncio.gather(*(rank.open.remote() for rank in ranks)))
        key = secrets.token_bytes(KEY_BYTES)
        await asyncio.gather(*(rank.join.remote(card.to_dict(), key) for rank in ranks))
        return cls(ranks, Issuer(card, key))

    async def alive(self) -> bool:
        """Whether every rank answers."""
        try:
            await asyncio.gather(*(rank.__ray_ready__.remote() for rank in self.ranks))
        except RayActorError:
            return False
        return True

    async def stop(self) -> None:
        """Close every rank."""
        await asyncio.gather(*(rank.close.remote() for rank in self.ranks))


least_busy = functools.partial(min, key=operator.attrgetter("busy"))


class Router:
    """Has a request answered by the two engines that have the least to do, and by others if that fails."""

    def __init__(self) -> None:
        self.prefills, self.decodes = list[Engine](), list[Engine]()
        self.failed = 0

    async def answer(self, request: str, prompt: int) -> str:
        """What the model says to a prompt, whoever computes it in the end."""
        attempt = 0
        while True:
            prefill, decode = least_busy(self.prefills), least_busy(self.decodes)
            try:
                return await self.attempt(prefill, decode, request, attempt, prompt)
            except RayError:  # a node is gone, or the transfer failed: then it is a kvxfer.KvxferError as well
                self.failed, attempt = self.failed + 1, attempt + 1
                if attempt == ATTEMPTS:
                    raise
                await self.forget_the_dead()

    async def attempt(self, prefill: Engine, decode: Engine, request: str, attempt: int, prompt: int) -> str:
        """The same by these two, or an error."""
        ticket = prefill.issuer.ticket(request, attempt=attempt)
        work = [decode.ranks[0].decode.remote(ticket)]  # asks before there is an answer, and waits over there
        work += [rank.prefill.remote(request, attempt, prompt) for rank in prefill.ranks]
        prefill.busy, decode.busy = prefill.busy + 1, decode.busy + 1
        try:
            return (await asyncio.gather(*work))[0]
        except BaseException:
            for one in work:
                ray.cancel(one)
            raise
        finally:
            prefill.busy, decode.busy = prefill.busy - 1, decode.busy - 1

    async def forget_the_dead(self) -> None:
        """Who has lost a rank is no engine any more. Ray ends the other ranks, since nobody holds them."""
        for engines in (self.prefills, self.decodes):
            for engine in list(engines):
                if not await engine.alive() and engine in engines:
                    engines.remove(engine)


# a cluster on this machine, and clients


@contextmanager
def local_cluster() -> Iterator[Cluster]:
    """Nodes that are processes of this machine."""
    cluster = Cluster()
    try:
        add_node(cluster, prefill=1)
        ray.init(cluster.address, log_to_driver=False, logging_level=logging.WARNING)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def add_node(cluster: Cluster, **resources: int) -> Any:
    return cluster.add_node(num_cpus=0, resources=resources, object_store_memory=80 << 20, include_dashboard=False)


class Clients:
    """Ask one thing after the other, and look whether the answers are right."""

    def __init__(self, router: Router) -> None:
        self.router, self.prompts, self.news, self.leave = router, itertools.count(), asyncio.Event(), False
        self.right, self.wrong = [0] * CLIENTS, [0] * CLIENTS

    async def run(self, client: int) -> None:
        """One of them."""
        while not self.leave:
            prompt = next(self.prompts)
            answer = await self.router.answer(f"request-{prompt}", prompt)
            (self.right if answer == digest(model(prompt)) else self.wrong)[client] += 1
            self.news.set()

    async def served(self, what: str) -> None:
        """Let everybody have some more answers, what they wait for now among them."""
        enough = [answers + ANSWERS for answers in self.right]
        while any(map(operator.lt, self.right, enough)) and not any(self.wrong):
            await self.news.wait()
            self.news.clear()
        await self.router.forget_the_dead()  # also those whose last request failed before Ray knew why
        engines = self.router.prefills, self.router.decodes
        print(f"{what}: {len(engines[0])} engines for prefill, {len(engines[1])} for decode", flush=True)


async def main(cluster: Cluster) -> bool:
    router, secret = Router(), secrets.token_hex()
    clients = Clients(router)

    async def start(prefill_ranks: int) -> None:
        starting = Engine.start(Prefill, prefill_ranks, secret=secret), Engine.start(Decode, 1, secret=secret)
        for engines, engine in zip((router.prefills, router.decodes), await asyncio.gather(*starting), strict=True):
            engines.append(engine)

    lost = [add_node(cluster, decode=1), add_node(cluster, prefill=1)]
    await start(prefill_ranks=2)
    async with asyncio.TaskGroup() as group:
        for client in range(CLIENTS):
            group.create_task(clients.run(client))
        await clients.served("three nodes")
        add_node(cluster, prefill=1, decode=1)
        await start(prefill_ranks=1)
        await clients.served("a node has joined")
        for node in lost:
            cluster.remove_node(node, allow_graceful=False)
            await clients.served("a node is lost")
        clients.leave = True
    await asyncio.gather(*(engine.stop() for engine in router.prefills + router.decodes))
    right, wrong = sum(clients.right), sum(clients.wrong)
    print(f"{right} answers are right, {wrong} wrong; {router.failed} attempts had failed")
    return wrong == 0


if __name__ == "__main__":
    with local_cluster() as cluster:
        sys.exit(0 if asyncio.run(main(cluster)) else 1)
