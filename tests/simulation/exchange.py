"""One request of a simulation: producers that offer it, consumers that fetch it, and what both are promised."""

import asyncio
import contextlib
import itertools
from dataclasses import dataclass, field

import torch
from inside import in_custody
from stage import Gate
from world import HEADS, Engine, Rank, World

from kvxfer import READY, KvxferError, MemoryInDoubtError
from kvxfer.errors import BlocksError, ClosedError, RequestError
from kvxfer.prefill.offers import OfferState
from kvxfer.transfers import Transfer

SLACK = 0.02
"""Virtual seconds for jitter, polls, and streams that are slow."""
_values = itertools.count(1)


@dataclass(frozen=True)
class Plan:
    """What becomes of a request: drawn before it begins."""

    name: str  # its id
    tokens: int  # how many are offered
    start: int  # first token that is fetched
    streaming: bool  # whether it is offered step by step
    late: bool  # whether the producer writes only when its events fire, as a GPU does
    producer: str  # `offers`, `withdraws`, or `never`
    consumer: str  # `fetches`, `cancels` (the transfer), `interrupts` (whoever awaits it), `declines`, or `never`
    timeout: float | None  # of the fetch, in seconds, or None
    delays: tuple[float, float, float, float]  # seconds before producers and consumers begin, and before they give up
    claims: bool  # whether the consumer claims it first
    retries: bool  # whether a fetch that failed is tried again with the same ticket

    @classmethod
    def draw(cls, name, rnd) -> "Plan":
        tokens = rnd.choice([4, 8, 13, 16, 24])
        return cls(
            name=name,
            tokens=tokens,
            start=rnd.choice([0, 0, 0, rnd.randrange(tokens)]),
            streaming=rnd.random() < 0.4,
            late=rnd.random() < 0.5,
            producer=rnd.choice(["offers"] * 12 + ["withdraws"] * 3 + ["never"]),
            consumer=rnd.choice(["fetches"] * 10 + ["cancels"] * 3 + ["interrupts"] * 2 + ["declines", "never"]),
            timeout=rnd.choice([None, None, None, 0.3, 0.05, 0.004]),
            delays=tuple(rnd.choice([0, 0, 1e-5, 1e-4, 5e-4, 2e-3, 0.02]) for _ in range(4)),
            claims=rnd.random() < 0.3,
            retries=rnd.random() < 0.3,
        )


class Contents:
    """What the tokens of a request hold: (kv, token, head, dim) of each layer, every element of its own."""

    def __init__(self, cache, tokens):
        kv, _, _, heads, dim = cache.view(cache.layers[0]).shape
        heads = 1 if cache.layout == "MLA" else HEADS
        shape = (kv, tokens, heads, dim)
        count = torch.Size(shape).numel()
        first = [next(_values) * 100_003 for _ in cache.layers]
        self.layers = {
            layer: (torch.arange(count, dtype=torch.int32) + value).reshape(shape)
            for layer, value in zip(cache.layers, first, strict=True)
        }

    def of(self, cache, layer, tokens):
        """What a rank holds of these tokens."""
        heads = slice(cache.heads.start, cache.heads.stop)
        return self.layers[layer][:, tokens][:, :, heads]

    def write(self, cache, ids, tokens, layers=None):
        """Compute them: the producer's kernels."""
        block, slot = cache.at(ids, tokens)
        for layer in cache.layers if layers is None else layers:
            cache.view(layer)[:, block, slot] = self.of(cache, layer, list(tokens))

    def wrong(self, cache, ids, tokens):
        """Layers of a destination in which these tokens are not what they should be."""
        block, slot = cache.at(ids, tokens)
        return [
            layer
            for layer in cache.layers
            if not cache.view(layer)[:, block, slot].equal(self.of(cache, layer, list(tokens)))
        ]


@dataclass(eq=False)
class Part:
    """What one decode rank brings in: what its blocks held before, and how it ended."""

    rank: Rank
    ids: list[int]
    before: dict[int, torch.Tensor] = field(default_factory=dict)
    transfer: Transfer | None = None
    began: float = 0.0
    gives_up: float = float("inf")
    doubt: MemoryInDoubtError | None = None


class Request:
    """Runs one request from its offers to the re-use of every block."""

    def __init__(self, world: World, plan: Plan, source: Engine, target: Engine):
        self.world, self.plan, self.source, self.target = world, plan, source, target
        self.ticket = source.issuer.ticket(plan.name)
        self.contents = Contents(source.ranks[0].cache, plan.tokens)
        self.source_ids = source.blocks(plan.tokens, world.rnd)
        self.target_ids = target.blocks(plan.tokens, world.rnd) if self.source_ids else []
        self.offers: dict[Rank, object] = {}
        self.parts: list[Part] = []
        self.succeeded: set[Rank] = set()
        self.quiet_since = 0.0
        self._kernels = 0
        if self.source_ids and not self.target_ids:
            source.spare += self.source_ids

    async def run(self):
        """All of it; returns when everything of it has ended, or is in doubt."""
        if not self.target_ids:
            return
        world = self.world
        for rank in self.source.ranks:
            world.ledger.say(rank.books.take(self.source_ids))
        for rank in self.target.ranks:
            world.ledger.say(rank.books.take(self.target_ids))
        world.note(f"{self.plan} {self.source.name}{self.source_ids} -> {self.target.name}{self.target_ids}")
        producing = [asyncio.create_task(self._produce(rank)) for rank in self.source.ranks]
        consuming = [asyncio.create_task(self._consume(rank)) for rank in self.target.ranks]
        safe = all(await asyncio.gather(*consuming))
        self.quiet_since = world.now
        released = all(await asyncio.gather(*producing))
        while self._kernels:  # noqa: ASYNC110 - nobody uses blocks again that kernels of his own still write
            await asyncio.sleep(0.005)
        if safe and self.target.alive:
            self.reuse(self.target, self.target_ids)
        if released and self.source.alive:
            self.reuse(self.source, self.source_ids)

    def reuse(self, engine, ids):
        """Somebody else's from now on."""
        for rank in engine.ranks:
            rank.books.spare(ids)
        engine.spare += ids

    # --- prefill

    async def _produce(self, rank: Rank):
        """One prefill rank; returns whether its blocks are its own again."""
        plan = self.plan
        await asyncio.sleep(plan.delays[0])
        if plan.producer == "never" or not rank.alive:
            return True
        try:
            if plan.streaming:
                offer = rank.worker.offer(plan.name, streaming=True)
            else:
                gate = Gate() if plan.late else READY
                if not plan.late:
                    self.contents.write(rank.cache, self.source_ids, range(plan.tokens))
                rank.books.offered(self.source_ids)
                offer = rank.worker.offer(plan.name, self.source_ids, tokens=plan.tokens, after=gate, payload=b"first")
                if plan.late:
                    self._fire(rank, gate, range(plan.tokens), None)
        except (ClosedError, BlocksError):
            if not plan.streaming:
                rank.books.released(self.source_ids)
            return True
        self.offers[rank] = offer
        if plan.streaming:
            rank.books.offered(self.source_ids)
        streaming = asyncio.create_task(self._stream(rank, offer)) if plan.streaming else None
        released = await self._released(rank, offer)
        if streaming is not None:
            await streaming
        return released

    def _fire(self, rank, gate, tokens, layers):
        """The kernel that computes these tokens ends a while later."""

        def fire():
            self._kernels -= 1
            if rank.books.alive:
                self.contents.write(rank.cache, self.source_ids, tokens, layers)
                gate.fired = True

        self._kernels += 1
        self.world.loop.call_later(self.world.rnd.choice([0, 1e-5, 1e-3, 0.01]), fire)

    async def _stream(self, rank, offer):
        """Layers and tokens become ready step by step."""
        plan, rnd, given = self.plan, self.world.rnd, 0
        block_tokens = rank.cache.block_tokens
        try:
            while given < plan.tokens and rank.alive:
                step = range(given, min(plan.tokens, given + rnd.choice([3, block_tokens, 16])))
                named = -(-given // block_tokens)
                offer.extend(self.source_ids[named : -(-step.stop // block_tokens)], tokens=step)
                for layers in [None] if rnd.random() < 0.5 else [[layer] for layer in rank.cache.layers]:
                    gate = Gate() if plan.late else READY
                    if not plan.late:
                        self.contents.write(rank.cache, self.source_ids, step, layers)
                    offer.ready(layers=layers, after=gate)
                    if plan.late:
                        self._fire(rank, gate, step, layers)
                    await asyncio.sleep(rnd.choice([0, 1e-5, 1e-3]))
                given = step.stop
            if rank.alive:
                offer.finish(b"first")
        except RequestError:  # withdrawn meanwhile
            pass

    async def _released(self, rank, offer):
        """Wait until the blocks are the producer's again; whether they are."""
        world, plan = self.world, self.plan
        ending = asyncio.ensure_future(offer.released())
        asked = float("inf")
        if plan.producer == "withdraws":
            await asyncio.wait([ending], timeout=plan.delays[1])
            if not ending.done() and rank.alive:
                asked = world.now
                ending.cancel()
                ending = asyncio.ensure_future(offer.withdraw())
        bounds = world.config.bounds()
        on_its_way = max(bounds["stuck_link"], bounds["handshake"])  # for so long what a decode rank says may take
        while not ending.done():
            await asyncio.wait([ending], timeout=0.05)
            if not rank.books.alive:
                ending.cancel()
                return False
            since = min(asked, self.quiet_since or float("inf"))
            if world.now > since + bounds["released_by_lease"] + on_its_way + SLACK and not ending.done():
                world.say(f"the offer of {plan.name} at {rank.name} has not ended {world.now - since:.2f} s after")
                ending.cancel()
                return False
        try:
            ending.result()
        except MemoryInDoubtError as error:
            if offer.state is not OfferState.ENDED:
                self._check_custody(rank, error)
            settled = await self._settled(rank, error)
            if settled:
                rank.books.released(self.source_ids)
            return settled
        except ClosedError:
            return False
        rank.books.released(self.source_ids)
        return True

    # --- decode

    async def _consume(self, rank: Rank):
        """One decode rank; returns whether its blocks are its own again."""
        plan, world = self.plan, self.world
        await asyncio.sleep(plan.delays[2])
        claim, safe = None, True
        try:
            if plan.claims and rank.alive:
                claim = rank.worker.claim(self.ticket)
                await asyncio.sleep(plan.delays[0])
            if plan.consumer == "declines" and rank.alive:
                await rank.worker.decline(self.ticket)
            elif plan.consumer not in {"declines", "never"} and rank.alive:
                safe = await self._fetch(Part(rank, self.target_ids))
                if safe and plan.retries and rank not in self.succeeded and rank.alive:
                    safe = await self._fetch(Part(rank, self.target_ids))
        except KvxferError as error:
            world.note(f"{plan.name} at {rank.name}: {type(error).__name__}")
        finally:
            if claim is not None:
                claim.close()
        return safe

    async def _fetch(self, part: Part):
        """Fetch into the blocks of one rank; whether they are its own again."""
        plan, world, rank = self.plan, self.world, part.rank
        self.parts.append(part)
        part.before = {layer: rank.cache.view(layer)[:, part.ids].clone() for layer in rank.cache.layers}
        part.began = world.now
        rank.books.writes(part.ids, next(world.tags))
        try:
            transfer = rank.worker.start_fetch(
                self.ticket,
                part.ids,
                tokens=range(plan.start, plan.tokens),
                after=READY,
                timeout=plan.timeout,
                keep=plan.retries,
            )
        except BaseException:
            rank.books.writes(part.ids, 0)
            raise
        if plan.timeout is not None:
            part.gives_up = world.now + plan.timeout
        part.transfer = transfer
        transfer.outcome.add_done_callback(lambda outcome: self._ended(part, outcome))
        waiter = asyncio.create_task(_outcome(transfer))
        if plan.consumer in {"cancels", "interrupts"}:
            await asyncio.wait([waiter], timeout=plan.delays[3])
            if not waiter.done() and rank.alive:
                part.gives_up = min(part.gives_up, world.now)
                transfer.cancel() if plan.consumer == "cancels" else waiter.cancel()
        return await self._awaited(part, transfer, waiter)

    async def _awaited(self, part: Part, transfer: Transfer, waiter):
        world, bounds, rank = self.world, self.world.config.bounds(), part.rank
        patience = bounds["unclaimed_offer"] + bounds["silent_peer"] + bounds["released_by_lease"]
        while not waiter.done():
            await asyncio.wait([waiter], timeout=0.02)
            if not rank.books.alive:
                waiter.cancel()
                return False
            late = world.now > part.gives_up + bounds["revoke"] + SLACK
            if (late or world.now > part.began + patience) and not waiter.done():
                world.say(f"the fetch of {self.plan.name} at {rank.name} has not ended")
                return False
        if part.doubt is not None:
            return await self._settled(rank, part.doubt, part)
        return not part.rank.closed or transfer.memory_safe

    def _ended(self, part: Part, outcome):
        """The fetch returns or raises, right now."""
        if not part.rank.books.alive:
            return
        error = outcome.exception() if not outcome.cancelled() else asyncio.CancelledError()
        name = f"{self.plan.name} at {part.rank.name}"
        self.world.note(f"{name}: {type(error).__name__ if error else outcome.result().stats.route}")
        if isinstance(error, MemoryInDoubtError):
            part.doubt = error
            if part.transfer is not None and not part.transfer.memory_safe:
                self._check_custody(part.rank, error)
            return
        part.rank.books.writes(part.ids, 0)
        if error is None:
            self.succeeded.add(part.rank)
            wrong = self.contents.wrong(part.rank.cache, part.ids, range(self.plan.start, self.plan.tokens))
            result = outcome.result()
            self.world.ledger.say(f"{name}: layer {layer} is wrong ({result.stats.route})" for layer in wrong)
            if result.payload != b"first":
                self.world.say(f"{name}: payload {result.payload!r}")
        self._check_untouched(part)

    def _check_untouched(self, part: Part):
        """Not one byte outside of the tokens that were asked for."""
        cache, asked = part.rank.cache, range(self.plan.start, self.plan.tokens)
        for layer in cache.layers:
            found = cache.view(layer)[:, part.ids]
            for token in set(range(len(part.ids) * cache.block_tokens)) - set(asked):
                block, slot = divmod(token, cache.block_tokens)
                if not found[:, block, slot].equal(part.before[layer][:, block, slot]):
                    self.world.say(f"{self.plan.name} at {part.rank.name}: token {token} was not asked for")

    def _check_custody(self, rank, error):
        """Blocks in doubt are refused to everybody."""
        if not rank.alive:
            return
        if not in_custody(rank.worker, dict([next(iter(error.blocks.items()))])):
            self.world.say(f"blocks of {self.plan.name} at {rank.name} are in doubt, but not in custody")

    async def _settled(self, rank, error, part=None):
        """Wait a while for evidence."""
        try:
            await asyncio.wait_for(error.settled(), 0.5)
        except (TimeoutError, ClosedError):
            return False
        if part is not None and rank.books.alive:
            rank.books.writes(part.ids, 0)
            self._check_untouched(part)
        return rank.books.alive


async def _outcome(transfer):
    """Await it as a caller does, and keep quiet about how it ended."""
    with contextlib.suppress(KvxferError, asyncio.CancelledError):
        await transfer
