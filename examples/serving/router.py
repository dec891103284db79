"""The router: what clients talk to. It sends a prompt to a prefill server, and its ticket to a decode server.

It knows neither the model nor kvxfer. A ticket is to it what the prefill server put into `kv_transfer_params`, and goes
into the request to the decode server. It is a secret: whoever holds it may fetch the cache. So nothing under that name
reaches a client, or is taken from one.

A decode server that dies, or stands still, is replaced by another, even in the midst of an answer: that one is told
which tokens the client has. Both choose the most likely token, so the answer goes on as it would have. Nothing is read
any more of the one that was replaced, so no token comes twice.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import httpx
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from examples.serving.api import HANDLERS, ApiError, Chunk, Policy, completion_routes, new_name, state_route
from examples.serving.servers import FAILURES, SILENT_SECONDS, Server, UnavailableError, in_order

_TIMEOUT = httpx.Timeout(120.0, connect=5.0)


@dataclass(slots=True)
class _Answer:
    """What has been said of one answer.

    Attributes:
        name: Of the request, here and at all servers.
        body: The request, without anything that only servers say.
        params: What the prefill server has said; empty without one.
        generated: Tokens that the client has.
        prefill: The server that has the prompt, or was about to get it.
        opened: Whether it was said who speaks, which comes before the first token of a chat.
        done: Whether all of it was said, so that nobody needs the prompt's cache any more.
    """

    name: str
    body: dict[str, Any]
    params: dict[str, Any]
    generated: list[int]
    prefill: Server | None = None
    opened: bool = False
    done: bool = False


class Router:
    """Sends requests to servers.

    Args:
        prefill: Addresses of prefill servers; there may be none.
        decode: Addresses of decode servers.
        on_failure: Whether a decode server may compute a prompt itself where no prefill server can.
        silent_after: Seconds for which a server may stand still; then its requests go to others.
    """

    client: httpx.AsyncClient

    def __init__(
        self,
        *,
        prefill: list[str],
        decode: list[str],
        on_failure: Policy = "recompute",
        silent_after: float = SILENT_SECONDS,
    ) -> None:
        self._prefill = [Server(url) for url in prefill]
        self._decode = [Server(url) for url in decode]
        self._on_failure = on_failure
        self._silent_after = silent_after
        self._withdrawing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """As an ASGI server runs it."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=_TIMEOUT, limits=limits, trust_env=False) as self.client:
            watching = [
                asyncio.create_task(server.watch(self.client, self._silent_after))
                for server in (*self._prefill, *self._decode)
            ]
            try:
                yield
                await asyncio.gather(*self._withdrawing)
            finally:
                for task in watching:
                    task.cancel()
                await asyncio.gather(*watching, return_exceptions=True)

    async def answer(self, path: str, _: str, body: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        """The chunks of one answer, as clients may see them."""
        answer = _Answer(new_name(), body | {"stream": True, "stream_options": {"include_usage": True}}, {}, [])
        try:
            await self._prefilled(path, answer)
            async with aclosing(self._decoded(path, answer)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            if answer.prefill is not None and not answer.done:  # who fetches declines; perhaps nobody does
                self._take_back(answer.prefill, answer.name)

    def describe(self) -> dict[str, Any]:
        """How its servers are."""
        groups = {"prefill": self._prefill, "decode": self._decode}
        shown = {name: [each.describe() for each in servers] for name, servers in groups.items()}
        return {"ok": self._can_serve, **shown}

    async def health(self, _: Request) -> JSONResponse:
        """Whether requests have a chance: 200, otherwise 503."""
        return JSONResponse({"ok": self._can_serve}, 200 if self._can_serve else 503)

    @property
    def _can_serve(self) -> bool:
        needed = [self._decode, self._prefill] if self._prefill and self._on_failure == "fail" else [self._decode]
        return all(any(server.answers for server in servers) for servers in needed)

    # --- prefill

    async def _prefilled(self, path: str, answer: _Answer) -> None:
        """Have the prompt computed somewhere; the answer then has a ticket."""
        body = {key: value for key, value in answer.body.items() if key not in {"stream", "stream_options"}}
        body["kv_transfer_params"] = {"do_remote_decode": True}  # in place of what the client may have said
        for server in in_order(self._prefill):
            try:
                answer.prefill = server  # also if we are cancelled before it answers
                with server.asked():
                    asking = self.client.post(server.url + path, **_sent(body, answer.name))
                    answer.params = _params(await server.heard(asking))
            except FAILURES as error:
                server.failed(error)
                self._take_back(server, answer.name)  # it may be there, and have no blocks for it yet
            else:
                return
        answer.prefill = None
        if self._prefill and self._on_failure == "fail":
            raise ApiError(503, "no prefill server can be reached", "no_prefill_server")

    def _take_back(self, server: Server, name: str) -> None:
        task = asyncio.create_task(self._withdraw(server, name))
        self._withdrawing.add(task)
        task.add_done_callback(self._withdrawing.discard)

    async def _withdraw(self, server: Server, name: str) -> None:
        with contextlib.suppress(*FAILURES):  # otherwise nobody claims it, and it ends by itself
            await self.client.delete(f"{server.url}/v1/requests/{name}", timeout=self._silent_after)

    # --- decode

    async def _decoded(self, path: str, answer: _Answer) -> AsyncGenerator[Chunk, None]:
        """The chunks of a decode server; if it dies, the rest from another one."""
        for server in in_order(self._decode):
            try:
                async with aclosing(self._chunks(server, path, answer)) as chunks:
                    async for chunk in chunks:
                        answer.generated += chunk.pop("kv_transfer_params", {}).get("token_ids", [])
                        opening = any("role" in choice.get("delta", ()) for choice in chunk["choices"])
                        answer.done = chunk.get("usage") is not None  # it comes last
                        if not opening or not answer.opened:
                            answer.opened |= opening
                            yield chunk
            except FAILURES as error:
                server.failed(error)
            if answer.done:
                return
            if answer.generated and self._on_failure == "fail":
                raise ApiError(502, "the decode server died in the midst of the answer", "decode_server_died")
        raise ApiError(503, "no decode server can be reached", "no_decode_server")

    async def _chunks(self, server: Server, path: str, answer: _Answer) -> AsyncGenerator[Chunk, None]:
        body = answer.body | {"kv_transfer_params": answer.params | {"generated": answer.generated}}
        asking = self.client.stream("POST", server.url + path, **_sent(body, answer.name))
        with server.asked():
            async with AsyncExitStack() as stack:
                response = await server.heard(stack.enter_async_context(asking))
                if (status := response.status_code) != 200:
                    error = ApiError.read(status, await server.heard(response.aread()))
                    raise UnavailableError(f"status {status}") if error is None or status == 503 else error
                lines = response.aiter_lines()
                while (line := await server.heard(anext(lines, None))) is not None:
                    said = line.removeprefix("data:").strip()
                    if said == "[DONE]" and answer.done:
                        return
                    if said and said != line:  # the others say nothing to us
                        yield _chunk(said)
            raise UnavailableError("the stream ended before the answer did")


class _Tokens(BaseModel):
    token_ids: list[int] = []


class _Choice(BaseModel):
    finish_reason: str | None


class _Text(_Choice):
    text: str


class _Delta(_Choice):
    delta: dict[str, str]


class _Event(BaseModel):
    """What is read of a chunk, here or where chunks are joined. The rest is passed on as it is."""

    id: str
    created: int
    model: str
    kv_transfer_params: _Tokens = _Tokens()


class _TextEvent(_Event):
    object: Literal["text_completion"]
    choices: list[_Text]


class _ChatEvent(_Event):
    object: Literal["chat.completion.chunk"]
    choices: list[_Delta]


def _sent(body: dict[str, Any], name: str) -> dict[str, Any]:
    """A request as it was read. What httpx itself would not send, as NaN or half a character, a server refuses by name.

    Raises:
        ApiError: If it is nested too deeply.
    """
    try:
        content = json.dumps(body).encode()
    except RecursionError as error:
        raise ApiError(400, f"the body is no JSON: {error}", "invalid_json") from error
    return {"content": content, "headers": {"x-request-id": name, "content-type": "application/json"}}


def _params(response: httpx.Response) -> dict[str, Any]:
    """What a prefill server says to the decode server."""
    status = response.status_code
    if status == 200:
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            if isinstance(params := response.json()["kv_transfer_params"], dict):
                return params
        raise UnavailableError("it answers what cannot be read")
    error = ApiError.read(status, response.content)
    raise UnavailableError(f"status {status}") if error is None or status >= 500 else error


def _chunk(text: str) -> Chunk:
    """What a server-sent event says."""
    if (error := ApiError.read(500, text)) is not None:
        raise error
    try:
        chunk: Chunk = json.loads(text)
        model = _ChatEvent if chunk.get("object") == "chat.completion.chunk" else _TextEvent
        model.model_validate(chunk, strict=True)
    except (ValidationError, ValueError, AttributeError, RecursionError) as error:
        raise UnavailableError(f"it says what cannot be read: {type(error).__name__}") from error
    return chunk


def app(
    *, prefill: list[str], decode: list[str], on_failure: Policy = "recompute", silent_after: float = SILENT_SECONDS
) -> Starlette:
    """The router as an ASGI application; arguments as of `Router`."""
    router = Router(prefill=prefill, decode=decode, on_failure=on_failure, silent_after=silent_after)
    states = [Route("/health", router.health), state_route("/stats", router.describe)]
    routes = [*completion_routes(router.answer), *states]
    return Starlette(routes=routes, lifespan=router.lifespan, exception_handlers=HANDLERS)
