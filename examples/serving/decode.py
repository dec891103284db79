"""The decode server: fetches K and V of a prompt and generates. Without a ticket it is a whole server by itself.

Nothing is said to a client before the cache is whole, and checked; so a transfer that fails costs time, never a wrong
token: the prompt is computed here instead, or the client is told, as the policy says.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, aclosing
from typing import Any

import msgspec
from starlette.applications import Starlette

import kvxfer
from examples.serving.api import (
    HANDLERS,
    ApiError,
    Chunk,
    Order,
    Policy,
    Wording,
    completion_routes,
    new_name,
    state_route,
)
from examples.serving.engine import EngineError, EngineSettings, Room
from examples.serving.node import Handover, Node, prompt_digest
from examples.serving.ranks import OpenWorker, combined
from examples.serving.scheduler import Said
from kvxfer.tools.demo.model import Sequence

_log = logging.getLogger("serving.decode")


class WrongCacheError(Exception):
    """What was fetched is not the cache of this prompt."""


class Decode(Node):
    """Generates, from K and V that it fetches or from a prompt.

    Args:
        on_failure: What becomes of a request whose cache does not come.
    """

    role = "decode"

    def __init__(self, *args: Any, on_failure: Policy, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._on_failure = on_failure
        self._caches = {"fetched": 0, "recomputed": 0}
        self._compared = 0  # prompts, by digest

    async def answer(self, path: str, name: str, body: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        """The chunks of one answer."""
        order = Order.read(path, name, body)
        self.check_length(len(order.prompt), order.limit)
        wording = Wording(order)
        report: dict[str, Any] = {}
        try:
            async with aclosing(_ahead(self._generate(order, report))) as saying:
                opening = wording.opening()  # behind it there is no way back to another status than 200
                async for said in saying:
                    for chunk in [*opening, wording.said(said)]:
                        yield chunk
                    opening = []
        except EngineError as error:
            raise ApiError(500, str(error), "engine_failed") from error
        yield wording.closing(report)

    def describe(self) -> dict[str, Any]:
        """How it is, and where its caches came from."""
        return super().describe() | {"caches": self._caches, "digests_compared": self._compared}

    # --- one request

    async def _generate(self, order: Order, report: dict[str, Any]) -> AsyncGenerator[Said, None]:
        """What the model says; `report` is told how the cache of the prompt came."""
        generated = order.params.generated
        tokens, limit = order.prompt + generated, order.limit - len(generated)
        if limit <= 0 or order.stops.intersection(generated[-1:]):
            return  # another server died when it had said everything, but for that
        async with AsyncExitStack() as stack:
            first, room = None, None
            if order.params.ticket is not None and not generated:
                room, first = await self._fetched(order, order.params.ticket, stack, report)
            if first is not None:
                finish = "stop" if first in order.stops else "length" if limit == 1 else None
                yield Said(first, finish)
                if finish:
                    return
                tokens, limit = [first], limit - 1
            room = room or await self._room(order, stack)
            async with aclosing(self.engine.generate(room.sequence, tokens, limit=limit, stops=order.stops)) as saying:
                async for said in saying:
                    yield said

    def _room(self, order: Order, stack: AsyncExitStack) -> Coroutine[Any, Any, Room]:
        return stack.enter_async_context(self.engine.room(len(order.prompt) + order.limit))

    async def _fetched(
        self, order: Order, ticket: dict[str, Any], stack: AsyncExitStack, report: dict[str, Any]
    ) -> tuple[Room | None, int | None]:
        """A room with the cache of the prompt, and the first token; or, by the policy, nothing of that.

        The room is missing too where a silent peer may still write it: then another one is needed.
        """
        room: Room | None = None
        try:
            with self.ranks.claim(ticket):  # the cache is kept for us while we wait for blocks
                room = await self._room(order, stack)
                return room, await self._fetch(order, ticket, room, report)
        except (kvxfer.KvxferError, WrongCacheError) as error:
            if isinstance(error, kvxfer.MemoryInDoubtError) and room is not None:
                room.doubt, room = error, None
            self.tasks.start(f"decline {new_name()}", self._decline(ticket))
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError from error  # doubt came in place of the cancellation
            return room, self._failed(order, error, report)
        except asyncio.CancelledError:
            self.tasks.start(f"decline {new_name()}", self._decline(ticket))
            raise

    async def _fetch(self, order: Order, ticket: dict[str, Any], room: Room, report: dict[str, Any]) -> int:
        """Bring K and V of the prompt into a room; the first token of the answer."""
        tokens, sequence = len(order.prompt), room.sequence
        blocks = sequence.block_ids[: -(-tokens // self.engine.cache.block_tokens)]
        results = await self.ranks.fetch(ticket, blocks, tokens=range(tokens))
        try:
            handover = msgspec.json.decode(results[0].payload, type=Handover)
        except msgspec.DecodeError as error:
            raise WrongCacheError(f"what came with the cache cannot be read: {error}") from error
        if handover.prompt != prompt_digest(order.prompt):
            raise WrongCacheError("the ticket is that of another prompt")
        held = Sequence(sequence.block_ids, tokens)
        digest = await asyncio.to_thread(self.engine.digest, held) if self.verify else ""
        self._compared += bool(digest and handover.digest)
        if digest != handover.digest:
            raise WrongCacheError(f"K and V have the digest {digest or 'none'}, and {handover.digest or 'none'} there")
        sequence.tokens = tokens
        self._caches["fetched"] += 1
        report |= combined([result.stats for result in results])
        report |= {"digest": digest} if digest else {}
        return handover.first

    def _failed(self, order: Order, error: Exception, report: dict[str, Any]) -> None:
        what = f"{type(error).__name__}: {error}"
        _log.warning("request %s: its cache did not come (%s): %s", order.name, self._on_failure, what)
        if self._on_failure == "fail":
            why = type(error).__name__  # the rest names peers and blocks, which are no client's business
            raise ApiError(502, f"the cache of the prompt did not come: {why}", "transfer_failed") from error
        self._caches["recomputed"] += 1
        report["recomputed"] = what

    async def _decline(self, ticket: dict[str, Any]) -> None:
        """Tell the prefill server, if it is there, that nobody will come for this cache; else its lease ends."""
        with contextlib.suppress(kvxfer.KvxferError):
            await self.ranks.decline(ticket)


async def _ahead(source: AsyncGenerator[Said, None]) -> AsyncGenerator[Said, None]:
    """What is said, as it comes. It is not held up by a client that reads slowly: its blocks are free when all is said.

    What waits for the client is bounded by the tokens of its answer.
    """
    said: asyncio.Queue[Said | None] = asyncio.Queue()

    async def listen() -> None:
        try:
            async with aclosing(source):
                async for one in source:
                    said.put_nowait(one)
        finally:
            said.put_nowait(None)

    listening = asyncio.create_task(listen())
    try:
        while (one := await said.get()) is not None:
            yield one
        await listening
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


def app(
    settings: EngineSettings,
    *,
    on_failure: Policy = "recompute",
    verify: bool = False,
    open_worker: OpenWorker = kvxfer.Worker,
    admin: str = "",
    **config: Any,
) -> Starlette:
    """The server as an ASGI application; arguments as of `Decode` and `Node`, and settings of its worker."""
    config = {"engine": "decode", **config}
    common: dict[str, Any] = {"verify": verify, "open_worker": open_worker, "admin": admin, "config": config}
    server = Decode(settings, on_failure=on_failure, **common)
    routes = [*completion_routes(server.answer), state_route("/stats", server.describe)]
    application = Starlette(routes=routes, lifespan=server.lifespan, exception_handlers=HANDLERS)
    application.state.node = server
    return application
