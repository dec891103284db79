"""Over HTTP: every answer is that of one server alone, whatever becomes of transfers, servers and clients."""

import asyncio
import json
import re
from contextlib import asynccontextmanager
from itertools import product

import pytest

from examples.serving import servers

PROMPTS = ["", "Hello", "fifteen letters", "k" * 200, "long " * 60]
DEAD = "http://127.0.0.1:9"  # nobody listens there: discard


def text_of(response):
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["text"]


async def events(response):
    """Chunks of a stream, and whether it ended as it should."""
    chunks = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    return [json.loads(chunk) for chunk in chunks if chunk != "[DONE]"], chunks[-1:] == ["[DONE]"]


@asynccontextmanager
async def streaming(service, url, **body):
    """The lines of a streamed answer, as a client gets them that leaves with the block."""
    body = {"prompt": "x", "max_tokens": 8, "stream": True, **body}
    async with service.client.stream("POST", f"{url}/v1/completions", json=body) as response:
        yield response


async def streamed(response):
    """The text of a stream that ended as it should, and its last chunk."""
    chunks, whole = await events(response)
    assert whole
    return "".join(chunk["choices"][0]["text"] for chunk in chunks), chunks[-1]


async def ticket(service, prefill, prompt):
    """What a prefill server says of a cache that a decode server is to fetch."""
    asked = await service.post(prefill, prompt=prompt, kv_transfer_params={"do_remote_decode": True})
    return asked.json()["kv_transfer_params"]


# the same answers


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_are_those_of_one_server(service, alone, stream):
    urls = await service.all(verify=True)
    for prompt in PROMPTS:
        if stream:
            async with streaming(service, urls.router, prompt=prompt) as response:
                text, last = await streamed(response)
            assert (text, last["choices"][0]["finish_reason"]) == (alone(prompt).text, alone(prompt).finish)
        else:
            response = await service.post(urls.router, prompt=prompt)
            assert text_of(response) == alone(prompt).text == text_of(await service.post(urls.decode, prompt=prompt))
    stats = await service.stats(urls.decode)
    assert stats["caches"] == {"fetched": len(PROMPTS), "recomputed": 0}
    assert stats["digests_compared"] == len(PROMPTS)
    await service.idle("prefill", "decode")


async def test_many_at_once_share_batches_and_blocks(service, alone):
    urls = await service.all()
    prompts = [f"request {i} {'and more ' * (5 * i)}" for i in range(12)]  # more than fit into either pool at once
    engine = service.nodes["decode"].engine
    with service.paused("decode"):
        asking = [asyncio.create_task(service.post(urls.router, prompt=prompt)) for prompt in prompts]
        # some have their caches, and others wait for blocks
        await service.eventually(lambda: engine._turn.locked() and engine._inbox.qsize() > 2)
    for prompt, response in zip(prompts, await asyncio.gather(*asking), strict=True):
        assert text_of(response) == alone(prompt).text
    stats = await service.stats(urls.decode)
    assert stats["largest_batch"] > 1
    assert stats["caches"] == {"fetched": len(prompts), "recomputed": 0}
    await service.idle("prefill", "decode")


async def test_no_ticket_is_for_a_request_that_waits_for_blocks(service, alone):
    """Else a decode server would hold blocks for it that the one before it needs."""
    prefill, decode = await service.prefill(), await service.decode()
    first, second = "y" * 600, "z" * 600  # each takes more than half of the blocks
    params = await ticket(service, prefill, first)
    waiting = asyncio.create_task(ticket(service, prefill, second))
    await service.eventually(lambda: len(service.nodes["prefill"].tasks) == 2)
    for _ in range(20):  # it would have been answered meanwhile
        await service.stats(prefill)
    assert not waiting.done()
    assert text_of(await service.post(decode, prompt=first, kv_transfer_params=params)) == alone(first).text
    assert text_of(await service.post(decode, prompt=second, kv_transfer_params=await waiting)) == alone(second).text
    assert (await service.stats(decode))["caches"] == {"fetched": 2, "recomputed": 0}
    await service.idle("prefill", "decode")


async def test_layers_travel_while_the_prompt_is_computed(service, alone):
    urls = await service.all()
    prompt = "layer by layer " * 60
    with service.paused("prefill"):  # until the decode server waits for the first layer
        asking = asyncio.create_task(service.post(urls.router, prompt=prompt))
        await service.eventually(lambda: service.nodes["prefill"].ranks.workers[0].describe()["sending"])
    assert text_of(await asking) == alone(prompt).text
    await service.idle("prefill")
    assert (await service.stats(urls.decode))["caches"] == {"fetched": 1, "recomputed": 0}
    (recent,) = (await service.stats(urls.prefill))["recent"]
    assert recent["chunks"] >= 2 * (len(prompt) // 64), "two layers, in windows of what the model takes at once"
    assert recent["first_chunk_after_ms"] < recent["compute_ms"]
    assert recent["transfer_beside_compute_ms"] > 0
    assert recent["transfer_ms"] == pytest.approx(recent["transfer_beside_compute_ms"] + recent["after_compute_ms"])


async def test_offered_whole_nothing_travels_before_the_prompt_is_computed(service, alone):
    prefill, decode = await service.prefill(verify=True, offer_by="whole"), await service.decode(verify=True)
    router, prompt = await service.router([prefill], [decode]), "all at once " * 60
    assert text_of(await service.post(router, prompt=prompt)) == alone(prompt).text
    await service.idle("prefill")
    assert (await service.stats(decode))["caches"] == {"fetched": 1, "recomputed": 0}
    (recent,) = (await service.stats(prefill))["recent"]
    assert recent["first_chunk_after_ms"] >= recent["compute_ms"]
    assert recent["transfer_beside_compute_ms"] == 0


@pytest.mark.parametrize("cross_layer", [(False, False), (True, True), (True, False)], ids=str)
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 2)], ids=str)
async def test_ranks_that_divide_the_heads_and_any_layout_say_the_same(service, alone, ranks, cross_layer):
    prefill = await service.prefill(verify=True, devices=("cpu",) * ranks[0], cross_layer=cross_layer[0])
    decode = await service.decode(verify=True, devices=("cpu",) * ranks[1], cross_layer=cross_layer[1])
    router = await service.router([prefill], [decode], "fail")
    for prompt in PROMPTS:
        assert text_of(await service.post(router, prompt=prompt)) == alone(prompt).text
    await service.idle("prefill", "decode")
    assert (await service.stats(decode))["caches"] == {"fetched": len(PROMPTS), "recomputed": 0}
    for name, count in zip(("prefill", "decode"), ranks, strict=True):
        node = service.nodes[name]
        assert len(node.ranks.workers) == count
        assert [list(shard.heads) for shard in node.engine.cache.shards] == {1: [[0, 1]], 2: [[0], [1]]}[count]


# tickets stay inside


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_ticket_reaches_no_client_and_comes_from_none(service, path):
    urls = await service.all(on_failure="fail")
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    body["kv_transfer_params"] = {"do_remote_prefill": True, "ticket": {"forged": 1}, "generated": [65, 66]}
    whole = await service.client.post(urls.router + path, json=body)
    async with service.client.stream("POST", urls.router + path, json=body | {"stream": True}) as response:
        streamed = await response.aread()
    assert whole.status_code == response.status_code == 200, "it would have failed with that ticket"
    for text in (whole.text, streamed.decode()):
        assert "kv_transfer_params" not in text
        assert "mac" not in text
    assert whole.json()["usage"]["completion_tokens"] == 4


async def test_the_ticket_of_another_prompt_is_noticed(service, alone):
    urls = await service.all()
    params = await ticket(service, urls.prefill, "one prompt")
    answer = await service.post(urls.decode, prompt="not this 1", kv_transfer_params=params)
    assert text_of(answer) == alone("not this 1").text
    assert "another prompt" in answer.json()["kv_transfer_params"]["transfer"]["recomputed"]


# what fails


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
@pytest.mark.parametrize("fault", ["refuse_next", "damage_next"])
async def test_a_failed_transfer_costs_time_or_an_error_and_never_a_wrong_token(service, alone, fault, on_failure):
    urls = await service.all(verify=True, on_failure=on_failure)
    assert text_of(await service.post(urls.router, prompt="before")) == alone("before").text
    getattr(service.network, fault)("decode")
    async with streaming(service, urls.router, prompt="Hello") as response:
        if on_failure == "fail":
            assert response.status_code == 502
            error = json.loads(await response.aread())["error"]
            assert (error["type"], error["code"]) == ("server_error", "transfer_failed")
            assert not re.search(r"blocks|prefill|[@\[]", error["message"]), "peers and blocks are no client's business"
        else:
            assert (await streamed(response))[0] == alone("Hello").text
    stats = await service.stats(urls.decode)
    assert stats["caches"] == {"fetched": 1, "recomputed": int(on_failure == "recompute")}
    assert text_of(await service.post(urls.router, prompt="after")) == alone("after").text
    await service.idle("prefill", "decode")


async def test_a_step_that_fails_is_an_error_of_its_request_alone(service, alone, monkeypatch):
    urls = await service.all()
    engine = service.nodes["decode"].engine
    run = engine._model.forward

    def failing(*args, **kwargs):
        monkeypatch.setattr(engine._model, "forward", run)
        raise RuntimeError("out of memory, say")

    monkeypatch.setattr(engine._model, "forward", failing)
    answer = await service.post(urls.router, prompt="Hello")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed")
    assert "out of memory, say" in answer.text
    assert text_of(await service.post(urls.router, prompt="Hello")) == alone("Hello").text
    await service.idle("prefill", "decode")


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
async def test_a_router_says_whether_it_can_serve(service, impatient, on_failure):
    prefill, decode = await service.prefill(), await service.decode()
    router = await service.router([DEAD, prefill], [DEAD, decode], on_failure)

    async def healthy():
        answer = await service.client.get(f"{router}/health")
        assert answer.json() == {"ok": answer.status_code == 200}
        assert answer.status_code in {200, 503}
        return answer.json()["ok"]

    async def becomes(expected):
        while await healthy() != expected:  # noqa: ASYNC110 - HTTP alone tells
            await asyncio.sleep(0.005)

    await becomes(True)
    stats = await service.stats(router)
    assert stats["ok"]
    assert [server["answers"] for server in stats["decode"]] == [False, True]
    service.stop(prefill if on_failure == "fail" else decode)
    await becomes(False)
    assert not (await service.stats(router))["ok"]


# servers that stand still


@pytest.fixture
def impatient(monkeypatch):
    """Routers look at their servers all the time."""
    monkeypatch.setattr(servers, "_LOOK_SECONDS", 0.01)


async def test_a_decode_server_that_stands_still_in_mid_answer_is_replaced(service, alone, impatient):
    prefill, decode = await service.prefill(), await service.decode()
    wire = await service.wire(decode)
    router = await service.router([prefill], [wire.url, decode], silent_after=1)
    wire.freeze_at = b"token_ids"
    async with streaming(service, router, prompt="Hello") as response:
        assert (await streamed(response))[0] == alone("Hello").text
    assert [server["failures"] for server in (await service.stats(router))["decode"]] == [1, 0]
    await service.idle("prefill")
    wire.thaw()  # it goes on, and nobody hears what it says
    await service.idle("decode")


@pytest.mark.parametrize(("on_failure", "silent_after"), [("recompute", 1), ("fail", 0.1)])
async def test_a_prefill_server_that_stands_still_is_waited_for_no_longer(
    service, alone, impatient, on_failure, silent_after
):
    prefill, decode = await service.prefill(), await service.decode()
    wire = await service.wire(prefill)
    router = await service.router([wire.url], [decode], on_failure, silent_after=silent_after)
    await service.eventually(lambda: service.connections(prefill))
    wire.freeze()
    answer = await service.post(router, prompt="Hello")
    if on_failure == "fail":
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_prefill_server")
    else:
        assert text_of(answer) == alone("Hello").text
    wire.thaw()
    await service.idle("prefill", "decode")


async def test_without_any_decode_server_the_prompt_is_taken_back(service):
    prefill = await service.prefill()
    router = await service.router([prefill], [DEAD])
    answer = await service.post(router, prompt="Hello")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_decode_server")
    await service.idle("prefill")


# clients that go away


async def test_a_client_that_goes_before_the_prompt_is_computed(service):
    urls = await service.all()
    with service.paused("prefill"):
        asking = asyncio.create_task(service.post(urls.router, prompt="Hello"))
        await service.eventually(lambda: service.nodes["prefill"].ranks.workers[0].describe()["sending"])
        asking.cancel()
        await service.idle("decode")
        assert len(service.nodes["prefill"].tasks) == 1, "its model has still to let go of the blocks"
    await service.idle("prefill")


@pytest.mark.parametrize(("ranks", "held"), [(1, "decode"), (2, "decode 1")])
async def test_a_client_that_goes_in_the_midst_of_a_transfer(service, ranks, held):
    """Of two ranks one still receives."""
    prefill, decode = await service.prefill(), await service.decode(devices=("cpu",) * ranks)
    router = await service.router([prefill], [decode])
    service.network.hold(held)
    asking = asyncio.create_task(service.post(router, prompt="Hello"))
    await service.eventually(lambda: service.network.held(held))
    asking.cancel()
    while (await service.stats(router))["decode"][0]["under_way"]:  # noqa: ASYNC110 - HTTP alone tells
        await asyncio.sleep(0.005)
    assert service.nodes["decode"].engine.cache.free_blocks < 64, "they may still be written"
    service.network.release(held)
    await service.idle("prefill", "decode")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_in_the_midst_of_an_answer(service, stream):
    urls = await service.all()
    engine = service.nodes["decode"].engine
    long = {"max_tokens": 1500, "ignore_eos": True}
    asking = asyncio.create_task(service.post(urls.router, prompt="Hello", **long, stream=stream))
    await service.eventually(lambda: engine.counts.generated_tokens)
    asking.cancel()
    await service.idle("prefill", "decode")
    assert engine.counts.generated_tokens < 1499


# requests


REFUSED = [
    ({"prompt": None}, "a completion needs a prompt"),
    ({"prompt": [1, 262]}, "0 to 261"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "temperature": 0.7}, "most likely"),
    ({"prompt": "x", "logit_bias": {"50": 100}}, "logit_bias: this example does not support it; leave it out"),
    ({"prompt": "x", "logprobs": True}, "probabilities"),
    ({"prompt": "x", "stream": "true"}, "stream: "),
    ({"prompt": "x", "n": 2}, "n: this example does not support any other value than 1"),
    ({"prompt": ["x", "y"]}, "prompt: this example supports one text or one list of tokens"),
    ({"prompt": "x", "max_tokens": 100_000}, "2 tokens of the prompt and 100000 to generate are too many"),
    ({"prompt": "y" * 3000}, "3001 tokens of the prompt "),
    (b'{"prompt": "x", "max_tokens": NaN}', "max_tokens: "),
    (b'{"prompt": "x", "other": %b}' % (b"[" * 100_000 + b"]" * 100_000), "no JSON"),
    (b'{"prompt": "x", "other": "%b"}' % (b"y" * 2**24), "more than"),
]


async def test_what_cannot_be_served_is_refused_by_name_and_no_failure_of_the_server(service):
    urls = await service.all()
    for url, (body, says) in product((urls.router, urls.decode), REFUSED):
        content = body if isinstance(body, bytes) else json.dumps({"max_tokens": 8, **body})
        answer = await service.client.post(f"{url}/v1/completions", content=content)
        assert answer.status_code == (413 if says == "more than" else 400), (says, answer.text)
        error = answer.json()["error"]
        assert says in error["message"]
        assert error["type"] == "invalid_request_error"


async def test_null_is_as_if_a_field_were_left_out(service, alone):
    urls = await service.all()
    fields = ["stream", "stream_options", "max_completion_tokens", "temperature", "n", "stop", "logprobs", "suffix"]
    for url in (urls.router, urls.decode):
        assert text_of(await service.post(url, prompt="Hello", **dict.fromkeys(fields))) == alone("Hello").text
