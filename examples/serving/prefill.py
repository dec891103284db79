"""The prefill server: runs prompts, and offers K and V of each layer as soon as the model has written it.

Or, so that one can see what that is worth, all of them when the whole prompt is computed.

It answers a request when that has blocks, before the model has seen it, with the ticket under which the cache will be
found; so the decode server is there, and asks, while the first layers are still computed. What ends a request is not
its HTTP connection, then, but the offer: the decode server has fetched it or declines it, the router takes it back
(`DELETE /v1/requests/...`), or nobody ever claims it.

Not before it has blocks: a decode server takes blocks for the ticket, and if those waited for blocks here while these
wait for blocks there, both would wait for ever.
"""

import asyncio
import time
from collections import deque
from contextlib import aclosing
from typing import Any, Literal, NamedTuple

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import kvxfer
from examples.serving.api import HANDLERS, PATHS, ApiError, Order, new_name, read_json, state_route
from examples.serving.engine import EngineError, EngineSettings, Room
from examples.serving.node import Handover, Node, prompt_digest
from examples.serving.ranks import Offers, OpenWorker, combined, queued
from kvxfer.tools.demo.model import Sequence

OfferBy = Literal["layers", "whole"]
"""When K and V are offered: each layer of a chunk of the prompt as it is written, or all when the last one is."""
_MOST_REQUESTS = 256
"""Requests that wait, are computed, or are not fetched yet; one more is turned away."""


class _Computed(NamedTuple):
    """When the model had a prompt, by the monotonic clock."""

    began: float
    ended: float


class Prefill(Node):
    """Serves prompts.

    Args:
        offer_by: When K and V are offered.
    """

    role = "prefill"

    def __init__(self, *args: Any, offer_by: OfferBy, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._offer_by = offer_by
        self._recent: deque[dict[str, Any]] = deque(maxlen=32)

    async def submit(self, request: Request) -> JSONResponse:
        """Take a prompt, and answer with its ticket once it has blocks."""
        name = request.headers.get("x-request-id") or new_name()
        order = Order.read(request.url.path, name, await read_json(request))
        if not order.params.do_remote_decode:
            raise ApiError(400, "a prefill server takes requests of routers only (do_remote_decode)", "not_a_router")
        if len(self.tasks) >= _MOST_REQUESTS:
            raise ApiError(503, f"{_MOST_REQUESTS} requests are here already", "busy")
        if order.name in self.tasks:
            raise ApiError(409, f"request {order.name} is here already", "duplicate")
        self.check_length(len(order.prompt))
        offered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        serving = self.tasks.start(order.name, self._serve(order, offered))
        await asyncio.wait({serving, offered}, return_when=asyncio.FIRST_COMPLETED)
        if not offered.done():
            raise ApiError(503, "the request was taken back, or this server stops", "withdrawn")
        ticket = self.ranks.ticket(order.name)
        return JSONResponse(
            {
                "id": order.name,
                "object": order.kind,
                "choices": [],
                "usage": {"prompt_tokens": len(order.prompt), "completion_tokens": 0},
                "kv_transfer_params": {"do_remote_prefill": True, "ticket": ticket},
            }
        )

    async def withdraw(self, request: Request) -> Response:
        """Nobody wants this request any more."""
        self.tasks.cancel(request.path_params["name"])
        return Response(status_code=204)

    def describe(self) -> dict[str, Any]:
        """How it is, and how the last transfers went beside the computing."""
        return super().describe() | {"recent": list(self._recent)}

    # --- one request

    async def _serve(self, order: Order, offered: "asyncio.Future[None]") -> None:
        async with self.engine.room(len(order.prompt)) as room:
            try:
                offer = self.ranks.offer(order.name)
            except kvxfer.ClosedError:  # the server stops, and nobody has a ticket of this
                return
            offered.set_result(None)
            computing = asyncio.create_task(self._compute(order, room.sequence, offer))
            try:
                endings = await _ended(offer, room)
            finally:
                computing.cancel()  # it has ended, unless the request was given up
                await asyncio.wait({computing})
        computed = None if computing.cancelled() else computing.result()
        stats = [each for ending in endings if isinstance(ending, kvxfer.Released) for each in ending.stats]
        if computed and stats:
            self._recent.append(combined(stats) | _beside(computed, stats))

    async def _compute(self, order: Order, sequence: Sequence, offer: Offers) -> _Computed | None:
        """Run the prompt, and offer it."""
        loop, cache = asyncio.get_running_loop(), self.engine.cache

        def on_layer(layer: int, running: Sequence) -> None:  # in the model's thread; on a GPU the work is only queued
            loop.call_soon_threadsafe(mark, [layer], running.writing, queued(cache))

        def mark(layers: list[int] | None, written: range, after: list[Any]) -> None:
            if not offer.live:
                return  # the model may be a step behind an offer that was taken back
            if offer.tokens < written.stop:  # the first layer of a chunk
                first, last = (-(-token // cache.block_tokens) for token in (written.start, written.stop))
                offer.extend(sequence.block_ids[first:last], tokens=written)
            offer.ready(layers=layers, tokens=written.stop, after=after)

        began, streamed = time.monotonic(), on_layer if self._offer_by == "layers" else None
        try:
            async with aclosing(self.engine.generate(sequence, order.prompt, limit=1, on_layer=streamed)) as saying:
                first = await anext(saying)  # comes by the same way as the marks, and so behind them
        except EngineError:
            await offer.withdraw()  # the decode server hears of it
            return None
        ended = time.monotonic()
        if streamed is None:
            mark(None, range(len(order.prompt)), queued(cache))
        digest = await asyncio.to_thread(self.engine.digest, sequence) if self.verify else ""
        if offer.live:
            offer.finish(msgspec.json.encode(Handover(first.token, prompt_digest(order.prompt), digest)))
        return _Computed(began, ended)


async def _ended(offer: Offers, room: Room) -> list[Any]:
    """How an offer ended at each rank; if this is cancelled, it is taken back.

    Nobody reads its blocks afterwards; if that is in doubt, the room knows of it.
    """
    try:
        try:
            return await offer.released()
        except asyncio.CancelledError:
            await offer.withdraw()
            raise
    except kvxfer.MemoryInDoubtError as doubt:
        room.doubt = doubt
        return []


def _beside(computed: _Computed, stats: list[Any]) -> dict[str, Any]:
    """How much of a transfer the client did not have to wait for, since the model still computed."""
    first = min(each.finished if each.first_byte is None else each.first_byte for each in stats)
    finished = max(each.finished for each in stats)
    return {
        "compute_ms": (computed.ended - computed.began) * 1e3,
        "first_chunk_after_ms": (first - computed.began) * 1e3,
        "transfer_ms": (finished - first) * 1e3,
        "transfer_beside_compute_ms": max(0.0, min(computed.ended, finished) - max(computed.began, first)) * 1e3,
        "after_compute_ms": max(0.0, finished - computed.ended) * 1e3,
    }


def app(
    settings: EngineSettings,
    *,
    offer_by: OfferBy = "layers",
    verify: bool = False,
    open_worker: OpenWorker = kvxfer.Worker,
    admin: str = "",
    **config: Any,
) -> Starlette:
    """The server as an ASGI application; arguments as of `Prefill` and `Node`, and settings of its workers."""
    config = {"engine": "prefill", **config}
    server = Prefill(settings, offer_by=offer_by, verify=verify, open_worker=open_worker, admin=admin, config=config)
    routes = [
        *(Route(path, server.submit, methods=["POST"]) for path in PATHS),
        Route("/v1/requests/{name}", server.withdraw, methods=["DELETE"]),
        state_route("/stats", server.describe),
    ]
    application = Starlette(routes=routes, lifespan=server.lifespan, exception_handlers=HANDLERS)
    application.state.node = server
    return application
