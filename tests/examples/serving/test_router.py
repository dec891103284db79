"""What a router makes of servers that say what no server should."""

import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from examples.serving import servers
from examples.serving.api import PATHS, ApiError

COMMON = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "tiny-llama"}
CHOICE = {"index": 0, "logprobs": None, "text": "", "finish_reason": None}
USAGE = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
DONE = "data: [DONE]\n\n"


def said(choice=None, **more):
    """An event of a stream."""
    chunk = {**COMMON, "choices": [] if choice is None else [{**CHOICE, **choice}], **more}
    return f"data: {json.dumps(chunk)}\n\n"


SOUND = said({"text": "sound", "finish_reason": "stop"}) + said(usage=USAGE) + DONE
HTML = "<html>who are you?</html>"
OF_ANY = [
    {"content": HTML},
    {"content": "no gzip", "headers": {"content-encoding": "gzip"}},
    {"status_code": 302, "headers": {"location": "/login"}},
    {"status_code": 404, "content": "no"},
    {"status_code": 404, "content": json.dumps(ApiError(404, "POST //v1/completions", "not_found").body)},
    {"status_code": 502, "content": b"\xff"},
]
OF_PREFILL = [
    *OF_ANY,
    *({"content": text} for text in ("{}", "null", '{"kv_transfer_params": "a ticket"}', "[" * 200_000)),
    {"content": b'{"kv_transfer_params": {"ticket": "\xff"}}'},
]
OF_DECODE = [
    *OF_ANY,
    *({"content": f"data: {text}\n\n{DONE}"} for text in (HTML, "5", "[]", "{}", '{"error": "?"}', "[" * 200_000)),
    {"content": said({"text": None}) + SOUND},
    {"content": said({}, kv_transfer_params=None) + SOUND},
    {"content": said({}, kv_transfer_params={"token_ids": "Hello"}) + SOUND},
    {"content": said({}, object="chat.completion.chunk") + SOUND},
    {"content": DONE},
    {"content": said({}) + DONE},
]


class Impostor:
    """A server that says the same to every request, but how it is."""

    def __init__(self, **answer: Any) -> None:
        self.answer = answer
        routes = [Route(path, self._complete, methods=["POST"]) for path in PATHS]
        routes += [Route("/stats", self._state), Route("/v1/requests/{name}", self._withdraw, methods=["DELETE"])]
        self.application = Starlette(routes=routes)

    async def _complete(self, _):
        return Response(**self.answer)

    async def _state(self, _):
        return JSONResponse({"ok": True})

    async def _withdraw(self, _):
        return Response(status_code=204)


@pytest.fixture
def forgiving(monkeypatch):
    """A server that failed is asked again in its turn."""
    monkeypatch.setattr(servers, "_REST_SECONDS", 0)


async def test_a_prefill_server_that_cannot_be_understood_is_one_that_cannot_be_reached(service):
    strange = Impostor()
    prefill = await service.start(strange.application)
    decode = await service.start(Impostor(content=SOUND).application)
    lenient = await service.router([prefill], [decode])
    strict = await service.router([prefill], [decode], "fail")
    for strange.answer in OF_PREFILL:
        answered = await service.post(lenient, prompt="Hello")
        assert text(answered) == "sound", strange.answer
        refused = await service.post(strict, prompt="Hello")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_prefill_server"), strange.answer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_server_that_cannot_be_understood_is_one_that_died(service, stream, forgiving):
    strange = Impostor()
    first = await service.start(strange.application)
    second = await service.start(Impostor(content=SOUND).application)
    both, one = await service.router([], [first, second]), await service.router([], [first])
    for number, strange.answer in enumerate(OF_DECODE, 1):
        answered = await service.post(both, prompt="Hello", stream=stream)
        assert text(answered).endswith("sound"), strange.answer
        assert [server["failures"] for server in (await service.stats(both))["decode"]] == [number, 0], strange.answer
        refused = await service.post(one, prompt="Hello")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_decode_server"), strange.answer


def text(answered):
    """All that was said, streamed or not."""
    assert answered.status_code == 200, answered.text
    if not answered.headers["content-type"].startswith("text/event-stream"):
        return answered.json()["choices"][0]["text"]
    events = [line.removeprefix("data: ") for line in answered.text.split("\n") if line]
    assert events.pop() == "[DONE]"
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])
