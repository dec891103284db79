"""The model, its paged pool, and the thread in which both work. On the event loop's side: rooms and generations.

    async with engine.room(tokens) as room:                       # blocks; waits until there are enough
        async with aclosing(engine.generate(room.sequence, prompt, limit=16)) as saying:
            async for said in saying: ...

The thread alone touches the model and what is in blocks that it was given. The loop alone gives blocks and takes them
back, and does so only when the thread (and whoever fetches or is sent them) is done with them.
"""

import asyncio
import hashlib
import logging
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, Self

import torch

import kvxfer
from examples.serving.batch import decode_step
from examples.serving.scheduler import Generation, OnLayer, Said, Scheduler, Step
from examples.serving.tokenizer import VOCABULARY
from kvxfer.tools.demo.model import Layout, PagedCache, Sequence, prefill, rows_by_layer, tiny_llama, weights_digest

_log = logging.getLogger("serving.engine")


class EngineError(Exception):
    """The model could not run a step."""


class TooLongError(ValueError):
    """A request needs more blocks than there are."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The model and its pool.

    Attributes:
        devices: `cpu`, `cuda:0`, ... one a rank of tensor parallelism, which has its part of the heads of K and V. The
            model computes on the first, and its thread brings there what the others hold.
        dtype: Of weights, K and V.
        draw_on: Where weights are drawn: the CPU, or for a large model its device, if all servers have the same kind.
        seed: Of the weights; all servers of a service have the same.
        layers: Decoder layers.
        kv_heads: Heads of K and V; there are twice as many query heads.
        head_dim: Size of a head.
        hidden: Width of the model.
        blocks: Blocks in the pool.
        block_tokens: Tokens in a block.
        layout: Order of the axes in a block.
        cross_layer: Whether a block holds all layers, next to each other, or each layer has a tensor of its own.
        batch: Generations in one pass at most.
        chunk: Tokens of a prompt in one pass at most.
    """

    devices: tuple[str, ...] = ("cpu",)
    dtype: Literal["float32", "bfloat16"] = "float32"
    draw_on: str = "cpu"
    seed: int = 7
    layers: int = 4
    kv_heads: int = 4
    head_dim: int = 32
    hidden: int = 128
    blocks: int = 512
    block_tokens: int = 16
    layout: Layout = "NHD"
    cross_layer: bool = False
    batch: int = 8
    chunk: int = 256


@dataclass(slots=True)
class Room:
    """Blocks of one request.

    Attributes:
        sequence: The blocks, and what they hold.
        doubt: Set where a silent peer may still touch them: they are given back when that has ended.
    """

    sequence: Sequence
    doubt: kvxfer.MemoryInDoubtError | None = None


@dataclass(slots=True)
class Counts:
    """What the thread has done."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    largest_batch: int = 0


@dataclass(eq=False, slots=True)
class _Asked:
    """A generation, and the queue on the loop's side in which what it says is waited for."""

    generation: Generation
    said: "asyncio.Queue[Said | EngineError]" = field(default_factory=asyncio.Queue)


class Engine:
    """One model and one pool. Make it with `load`, in any thread; then enter it on the event loop."""

    def __init__(self, settings: EngineSettings, model: Any, cache: PagedCache) -> None:
        self.settings = settings
        self.cache = cache
        self.model_name = f"tiny-llama-{weights_digest(model).hex()[:16]}"
        self.counts = Counts()
        self._model = model
        self._scheduler = Scheduler(batch=settings.batch, chunk=settings.chunk)
        self._asked: dict[Generation, _Asked] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="serving-model", daemon=True)
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._settling: set[asyncio.Task[None]] = set()

    @classmethod
    def load(cls, settings: EngineSettings) -> Self:
        """Build the model and its pool, which takes a while."""
        model = tiny_llama(
            settings.seed,
            layers=settings.layers,
            heads=2 * settings.kv_heads,
            kv_heads=settings.kv_heads,
            head_dim=settings.head_dim,
            hidden=settings.hidden,
            vocabulary=VOCABULARY,
            initializer_range=min(0.2, 0.2 * (128 / settings.hidden) ** 0.5),  # a wider model must not be a wilder one
            dtype=getattr(torch, settings.dtype),
            device=settings.devices[0],
            draw_on=settings.draw_on,
        )
        cache = PagedCache(
            model.config,
            num_blocks=settings.blocks,
            block_tokens=settings.block_tokens,
            layout=settings.layout,
            dtype=model.dtype,
            device=settings.devices[0],
            cross_layer=settings.cross_layer,
            ranks=settings.devices,
        )
        return cls(settings, model, cache)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._settling:
            task.cancel()
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def alive(self) -> bool:
        """Whether the model's thread runs."""
        return self._thread.is_alive()

    def describe(self) -> dict[str, Any]:
        """What it has and has done, as plain data."""
        pool = {"blocks": self.cache.num_blocks, "free_blocks": self.cache.free_blocks}
        return {"model": self.model_name, "running": len(self._scheduler), **pool, **asdict(self.counts)}

    def digest(self, sequence: Sequence) -> str:
        """One digest of all K and V of a sequence, the same whatever the layout. Reads all of it: not on the loop."""
        found = hashlib.blake2b(digest_size=16)
        for layer in rows_by_layer(self.cache, sequence):
            for half in layer:
                found.update(half)
        return found.hexdigest()

    # --- on the loop: rooms

    @property
    def most_tokens(self) -> int:
        """What one request can have at most, with all blocks."""
        return self.cache.num_blocks * self.cache.block_tokens

    @asynccontextmanager
    async def room(self, tokens: int) -> AsyncIterator[Room]:
        """Blocks for so many tokens; waits for them behind those who came before.

        All that a request can need is taken at once, so whoever runs need never be interrupted for lack of blocks.

        Raises:
            TooLongError: If the pool could not hold it even if it were empty.
        """
        if tokens > self.most_tokens:
            raise TooLongError(f"{tokens} tokens are too many: {self.most_tokens} at most")
        blocks = -(-tokens // self.cache.block_tokens)
        async with self._turn:  # a fair lock, so many small requests do not keep a large one out
            while self.cache.free_blocks < blocks:
                self._freed.clear()
                await self._freed.wait()
            room = Room(Sequence(self.cache.allocate(tokens)))
        try:
            yield room
        finally:
            if room.doubt is None:
                self._free(room.sequence)
            else:
                task = asyncio.create_task(self._free_when_settled(room.sequence, room.doubt))
                self._settling.add(task)
                task.add_done_callback(self._settling.discard)

    def _free(self, sequence: Sequence) -> None:
        self.cache.free(sequence.block_ids)
        self._freed.set()

    async def _free_when_settled(self, sequence: Sequence, doubt: kvxfer.MemoryInDoubtError) -> None:
        await doubt.settled()
        self._free(sequence)

    # --- on the loop: generations

    async def generate(
        self,
        sequence: Sequence,
        tokens: list[int],
        *,
        limit: int,
        stops: frozenset[int] = frozenset(),
        on_layer: OnLayer | None = None,
    ) -> AsyncGenerator[Said, None]:
        """Continue a sequence by these tokens, and then greedily by up to `limit` more, which are said as they come.

        A token of `stops` is the last.

        When it is left, in whatever way, the thread is done with the blocks. Close it (`contextlib.aclosing`).

        Raises:
            EngineError: If the model fails.
        """
        asked = _Asked(Generation(sequence, list(tokens), limit, stops, on_layer))
        self._inbox.put(partial(self._add, asked))
        try:
            while True:
                item = await asked.said.get()
                if isinstance(item, EngineError):
                    raise item
                yield item
                if item.finish:
                    return
        finally:
            await self._left(asked)

    async def _left(self, asked: _Asked) -> None:
        """Wait until the thread has dropped it, however often that is cancelled: a step may be using its blocks."""
        left = self._loop.create_future()
        self._inbox.put(partial(self._drop, asked, left))
        cancelled: asyncio.CancelledError | None = None
        while not left.done():
            try:
                await asyncio.shield(left)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    # --- in the thread

    def _run(self) -> None:
        if self.cache.device.type == "cuda":
            torch.cuda.set_device(self.cache.device)
        while True:
            step = self._scheduler.step()
            try:
                order = self._inbox.get(block=step is None)
            except queue.Empty:
                if step is not None:
                    self._take(step)
                continue
            if order is None:
                return
            order()  # and look again: what is said to the thread comes before the next step

    def _add(self, asked: _Asked) -> None:
        self._asked[asked.generation] = asked
        self._scheduler.add(asked.generation)

    def _drop(self, asked: _Asked, left: "asyncio.Future[None]") -> None:
        self._scheduler.drop(asked.generation)
        self._asked.pop(asked.generation, None)
        self._loop.call_soon_threadsafe(left.set_result, None)

    def _take(self, step: Step) -> None:
        self.counts.steps += 1
        self.counts.largest_batch = max(self.counts.largest_batch, len(step.batch))
        if step.batch:
            self._try(step.batch, self._decode)
        if step.prompt is not None:
            self._try([step.prompt], partial(self._prefill, step.chunk))

    def _try(self, generations: list[Generation], run: Callable[[list[Generation]], None]) -> None:
        try:
            run(generations)
        except Exception as error:  # noqa: BLE001 - whoever it was for hears of it; the thread serves the others
            _log.exception("a step failed")
            for shard in self.cache.shards:  # what was queued may still write blocks, which are about to be given away
                if shard.device.type == "cuda":
                    torch.cuda.synchronize(shard.device)
            for generation in generations:
                self._scheduler.drop(generation)
                self._say(generation, EngineError(f"{type(error).__name__}: {error}"))

    def _decode(self, batch: list[Generation]) -> None:
        following = decode_step(
            self._model, self.cache, [each.sequence for each in batch], [each.pending[0] for each in batch]
        )
        self.counts.generated_tokens += len(batch)
        for generation, token in zip(batch, following, strict=True):
            self._say(generation, self._scheduler.took(generation, 1, token))

    def _prefill(self, chunk: list[int], generations: list[Generation]) -> None:
        (generation,) = generations
        token = prefill(self._model, self.cache, generation.sequence, chunk, generation.on_layer)
        self.counts.prompt_tokens += len(chunk)
        self._say(generation, self._scheduler.took(generation, len(chunk), token))

    def _say(self, generation: Generation, item: Said | EngineError | None) -> None:
        if item is not None:
            self._loop.call_soon_threadsafe(self._asked[generation].said.put_nowait, item)
