"""What clients say and hear: OpenAI's completions and chat, streamed or whole, and errors in OpenAI's form.

Servers make chunks, the objects of a stream, and `Reply` sends them as server-sent events, or joined into one object.
`kv_transfer_params` is where servers speak with each other: in a request, the ticket under which K and V of its prompt
can be fetched; in a chunk, the tokens that its text stands for, and how the cache came.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from examples.serving.scheduler import Said
from examples.serving.tokenizer import ROLES, STOPS, VOCABULARY, TextStream, encode, encode_chat

MODEL = "tiny-llama"
PATHS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat.completion"}
"""Where requests go, and what the whole answer is called."""
_UNSUPPORTED = {
    "none_required": "this example does not support it; leave it out",
    "literal_error": "this example does not support any other value than {expected}",
}
"""What fields that can have one value alone say of others, by pydantic's type of the error."""
_T = TypeVar("_T", bound=BaseModel)
_MOST_BYTES = 16 * 2**20
"""Of a request's body. A token is a few bytes there, so this is more than any prompt takes."""
_NOWHERE = {"not_found", "method_not_allowed"}
"""Codes of paths and methods that there are not; they say nothing of a request."""
Chunk = dict[str, Any]
"""An object of a stream, as JSON."""
Policy = Literal["recompute", "fail"]
"""What becomes of a request whose cache does not come: its prompt is computed once more, or the client is told."""


class ApiError(Exception):
    """What a client is told instead of an answer.

    Attributes:
        status: Of HTTP.
        message: For people.
        code: For programs.
    """

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}

    @classmethod
    def read(cls, status: int, body: str | bytes) -> Self | None:
        """What another server said of a request; None if it is no error of this form, or of another path."""
        try:
            error = json.loads(body)["error"]
            said = cls(status, str(error["message"]), str(error["code"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return said if status >= 400 and said.code not in _NOWHERE else None


# requests


class TransferParams(BaseModel):
    """`kv_transfer_params` of a request. Other names in it are ignored: routers carry them for other engines.

    Attributes:
        do_remote_decode: To a prefill server: run the prompt and offer its K and V.
        do_remote_prefill: To a decode server: they are offered elsewhere, under `ticket`.
        ticket: Of kvxfer.
        generated: Tokens that the client has already; the answer goes on behind them.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    ticket: dict[str, Any] | None = None
    generated: list[int] = []


class _Message(BaseModel):
    role: str
    content: str | list[dict[str, Any]]

    @field_validator("content")
    @classmethod
    def _text_alone(cls, value: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        if not isinstance(value, str) and not all(isinstance(part.get("text"), str) for part in value):
            raise ValueError("this model reads text alone")
        return value

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part["text"] for part in self.content)


class _StreamOptions(BaseModel):
    include_usage: bool = False


class _Streaming(BaseModel):
    """How an answer is to be sent."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    stream: StrictBool | None = None
    stream_options: _StreamOptions | None = None


class _Body(_Streaming):
    """A request as JSON. What would change the answer and is not served is refused; the rest is ignored."""

    model: str = MODEL
    prompt: str | list[StrictInt] | None = None
    messages: list[_Message] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    ignore_eos: bool = False
    temperature: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: bool | None = Field(None, strict=True)  # 0 asks for some
    logit_bias: None = None
    suffix: None = None
    stop: None = None
    tools: None = None
    functions: None = None
    response_format: None = None
    kv_transfer_params: TransferParams | None = None

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _one_prompt(cls, value: object, read: ValidatorFunctionWrapHandler) -> object:
        try:
            return read(value)
        except ValidationError as error:
            raise ValueError("this example supports one text or one list of tokens, and not several prompts") from error

    @field_validator("temperature", "presence_penalty", "frequency_penalty")
    @classmethod
    def _greedy(cls, value: float | None) -> float | None:
        if value:
            raise ValueError("this service chooses the most likely token always; leave it out, or say 0")
        return value

    @field_validator("logprobs")
    @classmethod
    def _unsaid(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("this service says no probabilities")
        return value

    @model_validator(mode="after")
    def _prompted(self) -> Self:
        if isinstance(self.prompt, list) and not (self.prompt and all(0 <= each < VOCABULARY for each in self.prompt)):
            raise ValueError(f"a prompt of tokens has at least one, each from 0 to {VOCABULARY - 1}")
        if self.messages is not None and (not self.messages or {each.role for each in self.messages} - ROLES):
            raise ValueError(f"messages has at least one, each of a role in {sorted(ROLES)}")
        return self


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be done for a request.

    Attributes:
        kind: What the whole answer is called; one of `PATHS`.
        name: Of the request, in logs and ids.
        prompt: Tokens.
        limit: Tokens to generate at most.
        stops: Tokens that end the answer before.
        params: What other servers say of it.
    """

    kind: str
    name: str
    prompt: list[int]
    limit: int
    stops: frozenset[int] = STOPS
    params: TransferParams = field(default_factory=TransferParams)

    @classmethod
    def read(cls, path: str, name: str, body: object) -> Self:
        """Check a request.

        Raises:
            ApiError: If it cannot be served, naming the field.
        """
        asked = _read(_Body, body)
        if asked.model != MODEL:
            raise ApiError(404, f"there is no model {asked.model!r} here, only {MODEL!r}", "model_not_found")
        limit = asked.max_completion_tokens or asked.max_tokens or 16
        stops = frozenset[int]() if asked.ignore_eos else STOPS
        params = asked.kv_transfer_params or TransferParams()
        return cls(PATHS[path], name, _tokens(path, asked), limit, stops, params)


def _read(model: type[_T], body: object) -> _T:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "request"
        what = first["msg"].removeprefix("Value error, ")
        if first["type"] in _UNSUPPORTED:
            what = _UNSUPPORTED[first["type"]].format(**first.get("ctx", {}))
        raise ApiError(400, f"{where}: {what}", "invalid_value") from error


def _tokens(path: str, asked: _Body) -> list[int]:
    if PATHS[path] == "chat.completion":
        if asked.messages is None:
            raise ApiError(400, "a chat needs messages", "missing")
        return encode_chat((each.role, each.text) for each in asked.messages)
    if asked.prompt is None:
        raise ApiError(400, "a completion needs a prompt", "missing")
    return encode(asked.prompt) if isinstance(asked.prompt, str) else asked.prompt


async def read_json(request: Request) -> dict[str, Any]:
    """The body of a request.

    Raises:
        ApiError: If it is no object, or too large, or breaks off.
    """
    text = bytearray()
    try:
        async for part in request.stream():
            text += part
            if len(text) > _MOST_BYTES:
                raise ApiError(413, f"the body has more than {_MOST_BYTES} bytes", "too_large")
        body = json.loads(text)
    except ClientDisconnect as error:
        raise ApiError(400, "the body breaks off", "invalid_json") from error  # which nobody hears
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}", "invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be an object", "invalid_json")
    return body


# answers


class Wording:
    """The chunks of one answer, in words."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._created = int(time.time())
        self._tokens = len(order.params.generated)
        self._text = TextStream()
        for token in order.params.generated:  # said already
            self._text.feed(token)

    def opening(self) -> list[Chunk]:
        """What comes before the first token, if anything does."""
        if self._order.kind == "text_completion" or self._tokens:
            return []
        return [self._chunk({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})]

    def said(self, said: Said) -> Chunk:
        """One token."""
        self._tokens += 1
        text = self._text.feed(said.token) + (self._text.end() if said.finish else "")
        words = {"text": text} if self._order.kind == "text_completion" else {"delta": {"content": text}}
        return self._chunk(words | {"finish_reason": said.finish}, token_ids=[said.token])

    def closing(self, transfer: Mapping[str, Any] | None) -> Chunk:
        """What it has cost, and how the cache of the prompt came here."""
        prompt = len(self._order.prompt)
        usage = {"prompt_tokens": prompt, "completion_tokens": self._tokens, "total_tokens": prompt + self._tokens}
        chunk = self._chunk(None, transfer=transfer)
        return chunk | {"usage": usage}

    def _chunk(self, choice: dict[str, Any] | None, **params: Any) -> Chunk:
        chat = self._order.kind == "chat.completion"
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self._order.name}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": self._created,
            "model": MODEL,
            "choices": [] if choice is None else [{"index": 0, "logprobs": None, **choice}],
            "kv_transfer_params": params,
        }


def join(chunks: list[Chunk]) -> dict[str, Any]:
    """One object that says what the chunks of a stream say."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    finish = choices[-1]["finish_reason"] if choices else None
    whole: dict[str, Any] = {key: chunks[0][key] for key in ("id", "object", "created", "model")}
    if whole["object"] == "text_completion":
        words: dict[str, Any] = {"text": "".join(choice["text"] for choice in choices)}
    else:
        whole["object"] = "chat.completion"
        content = "".join(choice["delta"].get("content", "") for choice in choices)
        words = {"message": {"role": "assistant", "content": content}}
    whole["choices"] = [{"index": 0, "logprobs": None, **words, "finish_reason": finish}]
    whole["usage"] = next(chunk["usage"] for chunk in chunks if "usage" in chunk)
    params = [chunk["kv_transfer_params"] for chunk in chunks if "kv_transfer_params" in chunk]
    if params:
        tokens = [token for each in params for token in each.get("token_ids", ())]
        whole["kv_transfer_params"] = {**params[-1], "token_ids": tokens}
    return whole


class Reply:
    """A response that is computed while its client waits, and given up as soon as the client has gone.

    Args:
        chunks: The answer; closed (and so cancelled) whatever becomes of the client.
        stream: Send chunks as they come, as server-sent events.
        usage: Tell the one who streams what it has cost.
    """

    def __init__(self, chunks: AsyncGenerator[Chunk, None], *, stream: bool, usage: bool) -> None:
        self._chunks = chunks
        self._stream = stream
        self._usage = usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application."""
        answering = asyncio.create_task(self._answer(scope, receive, send), name="answer")
        leaving = asyncio.create_task(_left(receive), name="client")
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            answering.cancel()
            await asyncio.wait({answering, leaving})
        if not answering.cancelled():
            answering.result()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            try:
                first = await anext(chunks)  # only now is it known whether there is an answer
                if self._stream:
                    await self._send(send, first, chunks)
                    return
                response = JSONResponse(join([first, *[chunk async for chunk in chunks]]))
            except ApiError as error:
                response = JSONResponse(error.body, error.status)
        await response(scope, receive, send)

    async def _send(self, send: Send, first: Chunk, chunks: AsyncGenerator[Chunk, None]) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._event(send, first)
        try:
            async for chunk in chunks:
                if chunk["choices"] or self._usage:
                    await self._event(send, chunk)
        except ApiError as error:
            await self._event(send, error.body)
        else:
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _event(self, send: Send, data: dict[str, Any]) -> None:
        await send(
            {"type": "http.response.body", "body": b"data: %b\n\n" % json.dumps(data).encode(), "more_body": True}
        )


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# servers


Answer = Callable[[str, str, dict[str, Any]], AsyncGenerator[Chunk, None]]
"""Makes the chunks for (path, name of the request, body)."""


def completion_routes(answer: Answer) -> list[Route]:
    """The two paths to which requests are posted, and the list of models."""

    async def complete(request: Request) -> Reply:
        body = await read_json(request)
        name = request.headers.get("x-request-id") or new_name()
        asked = _read(_Streaming, body)
        usage = asked.stream_options is not None and asked.stream_options.include_usage
        return Reply(answer(request.url.path, name, body), stream=bool(asked.stream), usage=usage)

    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "kvxfer"}]})

    routes = [Route(path, complete, methods=["POST"]) for path in PATHS]  # type: ignore[arg-type]
    return [*routes, Route("/v1/models", models)]


def state_route(path: str, describe: Callable[[], Mapping[str, Any]]) -> Route:
    """A path at which a server says how it is, as plain data."""

    async def state(_: Request) -> JSONResponse:
        return JSONResponse(describe())

    return Route(path, state)


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    """A request is refused before there is an answer."""
    if isinstance(error, ApiError):
        return JSONResponse(error.body, error.status)
    if not isinstance(error, HTTPException):
        raise error
    what = f"{request.method} {request.url.path}: {error.detail}"
    body = ApiError(error.status_code, what, HTTPStatus(error.status_code).name.lower()).body
    return JSONResponse(body, error.status_code, error.headers)


HANDLERS = {ApiError: _refuse, HTTPException: _refuse}
"""Of the exceptions of an application."""


def new_name() -> str:
    """A name for a request that no other one has."""
    return uuid.uuid4().hex
