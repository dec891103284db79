"""Over HTTP: every answer is that of one server alone, whatever becomes of transfers, servers and clients."""

import asyncio
import json
import re
from contextlib import asynccontextmanager
from itertools import product

import httpx
import pytest
from inside import keep_given_up

import kvxfer.tools.admin
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


async def test_tokens_and_digests_agree_to_the_byte(service, alone):
    urls = await service.all(verify=True)
    for prompt in PROMPTS:
        params = await ticket(service, urls.prefill, prompt)
        answer = (await service.post(urls.decode, prompt=prompt, kv_transfer_params=params)).json()
        said = answer["kv_transfer_params"]
        assert said["token_ids"] == alone(prompt).tokens
        assert said["transfer"]["digest"] == alone(prompt).digest
        assert said["transfer"]["route"] == "staged"
        assert answer["usage"]["completion_tokens"] == len(alone(prompt).tokens)


async def test_a_client_that_does_not_read_holds_no_blocks(service, alone):
    await service.all()
    node = service.nodes["decode"]
    whole = node.engine.cache.free_blocks
    answer = node.answer("/v1/completions", "slow", {"prompt": "slow", "max_tokens": 8, "stream": True})
    first = await anext(answer)
    await service.eventually(lambda: node.engine.cache.free_blocks == whole)
    said = [first, *[chunk async for chunk in answer]]
    assert "".join(choice["text"] for chunk in said for choice in chunk["choices"]) == alone("slow").text


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


async def test_who_waits_for_blocks_at_a_prefill_server_can_be_taken_back(service):
    prefill = await service.prefill()
    params = {"do_remote_decode": True}
    await service.post(prefill, prompt="y" * 600, kv_transfer_params=params)
    body = {"prompt": "z" * 600, "kv_transfer_params": params}
    headers = {"x-request-id": "waits"}
    waiting = asyncio.create_task(service.client.post(f"{prefill}/v1/completions", json=body, headers=headers))
    await service.eventually(lambda: "waits" in service.nodes["prefill"].tasks)
    await service.client.delete(f"{prefill}/v1/requests/waits")
    answer = await waiting
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "withdrawn")
    assert "waits" not in service.nodes["prefill"].tasks


async def test_a_prefill_server_that_does_not_answer_in_time_is_asked_no_more(service, alone, monkeypatch):
    urls = await service.all()
    tasks, prompt, post = service.nodes["prefill"].tasks, "z" * 600, httpx.AsyncClient.post
    held = (await service.post(urls.prefill, prompt="y" * 600, kv_transfer_params={"do_remote_decode": True})).json()

    async def impatient(client, url, **asked):
        """The router's request to the prefill server, which names it, comes there and is given up."""
        asking = asyncio.create_task(post(client, url, **asked))
        if "headers" not in asked:
            return await asking
        await service.eventually(lambda: len(tasks) == 2)
        asking.cancel()
        raise httpx.ReadTimeout("")

    monkeypatch.setattr(httpx.AsyncClient, "post", impatient)
    assert text_of(await service.post(urls.router, prompt=prompt, max_tokens=1)) == alone(prompt, 1).text
    await service.eventually(lambda: len(tasks) == 1)
    assert held["id"] in tasks


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


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
async def test_one_rank_that_fails_fails_the_request_and_frees_all_of_them(service, alone, on_failure):
    prefill = await service.prefill(verify=True)
    decode = await service.decode(verify=True, on_failure=on_failure, devices=("cpu", "cpu"))
    router = await service.router([prefill], [decode], on_failure)
    service.network.refuse_next("decode 1")
    answer = await service.post(router, prompt="Hello")
    if on_failure == "fail":
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "transfer_failed")
    else:
        assert text_of(answer) == alone("Hello").text
    assert text_of(await service.post(router, prompt="after")) == alone("after").text
    await service.idle("prefill", "decode")
    stats = await service.stats(decode)
    assert stats["caches"] == {"fetched": 1, "recomputed": int(on_failure == "recompute")}


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


async def test_a_prefill_that_fails_is_computed_by_the_decode_server(service, alone, monkeypatch):
    urls = await service.all()

    def failing(*args, **kwargs):
        raise RuntimeError("out of memory, say")

    monkeypatch.setattr(service.nodes["prefill"].engine._model, "forward", failing)
    assert text_of(await service.post(urls.router, prompt="Hello")) == alone("Hello").text
    assert (await service.stats(urls.decode))["caches"] == {"fetched": 0, "recomputed": 1}
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


async def test_servers_with_as_much_to_do_are_asked_by_turns(service, alone):
    prefills = [await service.prefill(name) for name in ("one", "two")]
    decodes = [await service.decode(name, on_failure="fail") for name in ("left", "right")]
    router = await service.router(prefills, decodes, "fail")
    for prompt in ("a", "b", "c", "d"):
        assert text_of(await service.post(router, prompt=prompt)) == alone(prompt).text
    assert [service.nodes[name].engine.counts.prompt_tokens for name in ("one", "two")] == [4, 4]
    assert [(await service.stats(url))["caches"]["fetched"] for url in decodes] == [2, 2]
    assert {
        each["under_way"] for servers in ("prefill", "decode") for each in (await service.stats(router))[servers]
    } == {0}


async def test_a_dead_decode_server_is_replaced(service, alone):
    urls = await service.all(on_failure="fail")
    router = await service.router([urls.prefill], [DEAD, urls.decode], "fail")
    for _ in range(2):
        assert text_of(await service.post(router, prompt="Hello")) == alone("Hello").text
    first, second = (await service.stats(router))["decode"]
    assert (first["failures"], second["failures"]) == (1, 0), "the second request did not try it again"
    assert (await service.stats(urls.decode))["caches"] == {"fetched": 2, "recomputed": 0}


async def test_the_ticket_of_a_decode_server_that_died_is_good_at_another(service, alone, monkeypatch):
    prefill, first, second = await service.prefill(), await service.decode("first"), await service.decode("second")
    router = await service.router([prefill], [first, second], "fail")

    async def never(_):
        """The dead decline nothing."""

    monkeypatch.setattr(service.nodes["first"], "_decline", never)
    for worker in service.nodes["first"].ranks.workers:
        keep_given_up(worker, monkeypatch)
    with service.paused("prefill"):
        asking = asyncio.create_task(service.post(router, prompt="Hello"))
        await service.eventually(lambda: service.nodes["prefill"].ranks.workers[0].describe()["sending"])
        service.cut_off(first)
        await service.eventually(lambda: service.nodes["second"].ranks.workers[0].describe()["receiving"])
    assert text_of(await asking) == alone("Hello").text
    assert (await service.stats(second))["caches"] == {"fetched": 1, "recomputed": 0}
    assert [server["failures"] for server in (await service.stats(router))["decode"]] == [1, 0]
    await service.idle("prefill", "first", "second")


async def test_what_a_prefill_server_has_promised_is_fetched_though_it_stops(service, alone):
    prefill, decode = await service.prefill(), await service.decode(on_failure="fail")
    params = await ticket(service, prefill, "Hello")
    (worker,) = service.nodes["prefill"].ranks.workers
    await service.eventually(lambda: worker.describe()["offers"])
    service.stop(prefill)
    await service.eventually(lambda: worker.describe()["draining"])
    assert text_of(await service.post(decode, prompt="Hello", kv_transfer_params=params)) == alone("Hello").text
    assert (await service.stats(decode))["caches"] == {"fetched": 1, "recomputed": 0}


# servers that stand still


@pytest.fixture
def impatient(monkeypatch):
    """Routers look at their servers all the time."""
    monkeypatch.setattr(servers, "_LOOK_SECONDS", 0.01)


async def test_who_does_not_say_in_time_how_he_is_is_silent_until_he_does(service, impatient):
    wire = await service.wire(await service.router([], [DEAD]))  # says how it is, as all servers do
    server = servers.Server(wire.url)
    watching = asyncio.create_task(server.watch(service.client, 0.05))
    assert await server.heard(asyncio.sleep(0, "something")) == "something"
    waiting = asyncio.create_task(server.heard(asyncio.Event().wait()))
    for _ in range(2):
        wire.freeze()
        await service.eventually(lambda: server.silent)
        with pytest.raises(servers.SilentError):
            await server.heard(asyncio.Event().wait())
        assert list(servers.in_order([server])) == []
        wire.thaw()
        await service.eventually(lambda: not server.silent)
        assert list(servers.in_order([server])) == [server]
    with pytest.raises(servers.SilentError):
        await waiting
    watching.cancel()
    await asyncio.wait({watching})


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


async def test_a_server_that_is_to_stop_is_not_ready_and_says_all_of_the_answers_that_it_began(
    service, alone, impatient, monkeypatch
):
    pages, serve, refused, get = [], kvxfer.tools.admin.serve, [], httpx.AsyncClient.get

    def remembered(*workers, **options):
        pages.append(serve(*workers, **options))
        return pages[-1]

    async def counted(client, url, **asked):
        try:
            return await get(client, url, **asked)
        except httpx.ConnectError as error:
            refused.append(error)
            raise

    async def ready():
        return (await service.client.get(f"{pages[0].url}readyz")).json()

    monkeypatch.setattr(kvxfer.tools.admin, "serve", remembered)
    monkeypatch.setattr(httpx.AsyncClient, "get", counted)
    decode = await service.decode(admin="127.0.0.1:0")
    router = await service.router([], [decode], "fail")
    assert (await ready())["ready"]
    cache = service.nodes["decode"].engine.cache
    whole = cache.free_blocks
    with service.paused("decode"):
        answering = asyncio.create_task(service.post(router, prompt="Hello"))
        await service.eventually(lambda: cache.free_blocks < whole)
        service.stop(decode)
        assert await ready() == {"ready": False, "reasons": {"decode[0]": ["its application stops"]}}
        await service.eventually(lambda: len(refused) > 1)  # when the router asks how it is
    assert text_of(await answering) == alone("Hello").text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_answer_goes_on_where_another_server_left_it(service, path):
    decode = await service.decode()
    asked = {"prompt": "Hello", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    whole = (await service.client.post(decode + path, json=asked)).json()
    tokens = whole["kv_transfer_params"]["token_ids"]
    for done in range(1, len(tokens) + 1):
        body = {**asked, "stream": True, "stream_options": {"include_usage": True}}
        body["kv_transfer_params"] = {"generated": tokens[:done], "ticket": {"of": "no use any more"}}
        async with service.client.stream("POST", decode + path, json=body) as response:
            chunks, ended = await events(response)
        assert ended
        assert [chunk["kv_transfer_params"].get("token_ids") for chunk in chunks] == [
            *([t] for t in tokens[done:]),
            None,
        ]
        assert chunks[-1]["usage"] == whole["usage"]


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


async def test_a_client_that_goes_before_there_is_a_ticket(service, monkeypatch):
    urls = await service.all()
    node = service.nodes["prefill"]
    check = node.check_length

    def leave(tokens):
        asking.cancel()
        check(tokens)

    monkeypatch.setattr(node, "check_length", leave)
    with service.paused("decode"):
        asking = asyncio.create_task(service.post(urls.router, prompt="Hello"))
        await asyncio.wait({asking})
        assert asking.cancelled()
    await service.idle("prefill", "decode")


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
    ({"prompt": []}, "a prompt of tokens"),
    ({"prompt": [1, 262]}, "0 to 261"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "temperature": 0.7}, "most likely"),
    ({"prompt": "x", "presence_penalty": 2}, "most likely"),
    ({"prompt": "x", "logit_bias": {"50": 100}}, "logit_bias: this example does not support it; leave it out"),
    ({"prompt": "x", "suffix": "y"}, "suffix: this example does not support it"),
    ({"prompt": "x", "logprobs": 0}, "logprobs: "),
    ({"prompt": "x", "logprobs": True}, "probabilities"),
    ({"prompt": "x", "stream": "true"}, "stream: "),
    ({"prompt": "x", "stream_options": 5}, "stream_options: "),
    ({"prompt": "x", "n": 2}, "n: this example does not support any other value than 1"),
    ({"prompt": "x", "stop": ["."]}, "stop: this example does not support it"),
    ({"prompt": "x", "tools": [{}]}, "tools: this example does not support it"),
    ({"prompt": ["x", "y"]}, "prompt: this example supports one text or one list of tokens"),
    ({"prompt": ["1", "2"]}, "and not several prompts"),
    ({"prompt": "x", "max_tokens": 100_000}, "2 tokens of the prompt and 100000 to generate are too many"),
    ({"prompt": "x", "max_tokens": 100_000}, "a decode server has room for 2048"),
    ({"prompt": "y" * 3000}, "3001 tokens of the prompt "),
    (b'{"prompt": "x", "max_tokens": NaN}', "max_tokens: "),
    (b'{"prompt": "x", "max_tokens": 1e999}', "max_tokens: "),
    (b'{"prompt": "x", "temperature": NaN}', "temperature: "),
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


async def test_a_prompt_that_is_too_long_is_so_by_itself(service):
    urls = await service.all()
    for url in (urls.router, urls.prefill):
        answer = await service.post(url, prompt="y" * 3000, kv_transfer_params={"do_remote_decode": True})
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["message"] == "3001 tokens of the prompt are too many: a prefill server has room for 1024"


async def test_what_no_model_reads_is_refused_and_not_left_out(service):
    urls = await service.all()
    picture = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    for url in (urls.router, urls.decode):
        answer = await service.post(url, "/v1/chat/completions", messages=[{"role": "user", "content": picture}])
        assert answer.status_code == 400
        assert "messages.0.content: " in answer.json()["error"]["message"]
        assert "text alone" in answer.json()["error"]["message"]


async def test_null_is_as_if_a_field_were_left_out(service, alone):
    urls = await service.all()
    fields = ["stream", "stream_options", "max_completion_tokens", "temperature", "n", "stop", "logprobs", "suffix"]
    for url in (urls.router, urls.decode):
        assert text_of(await service.post(url, prompt="Hello", **dict.fromkeys(fields))) == alone("Hello").text


async def test_half_a_character_is_a_prompt_like_another(service, alone):
    urls = await service.all()
    for url in (urls.router, urls.decode):
        answer = await service.client.post(f"{url}/v1/completions", content=rb'{"prompt": "\ud800", "max_tokens": 8}')
        assert text_of(answer) == alone("\ud800").text


async def test_who_leaves_in_the_midst_of_a_body_is_no_error(service, capsys):
    urls = await service.all()
    _, writer = await asyncio.open_connection("127.0.0.1", urls.router.rpartition(":")[2])
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    (connection,) = await service.eventually(lambda: [*service.connections(urls.router)])
    writer.close()
    await service.eventually(lambda: connection not in service.connections(urls.router))
    assert text_of(await service.post(urls.router, prompt="Hello")) != ""
    assert capsys.readouterr().err == ""


async def test_paths_and_methods_that_there_are_not(service):
    urls = await service.all()
    for url in (urls.router, urls.prefill, urls.decode):
        nowhere = await service.client.get(f"{url}/v1/nowhere")
        assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "not_found")
        assert nowhere.json()["error"]["message"] == "GET /v1/nowhere: Not Found"
        got = await service.client.get(f"{url}/v1/completions")
        assert (got.status_code, got.json()["error"]["code"]) == (405, "method_not_allowed")
        assert got.headers["allow"] == "POST"


async def test_bad_requests_of_other_kinds(service):
    urls = await service.all()
    answers = [
        await service.client.post(f"{urls.router}/v1/completions", content=b"{"),
        await service.client.post(f"{urls.router}/v1/completions", content=b"[]"),
        await service.post(urls.router, "/v1/chat/completions", messages=[{"role": "wizard", "content": "x"}]),
        await service.post(urls.router, model="gpt-9", prompt="x"),
        await service.post(urls.prefill, prompt="x"),
    ]
    assert [answer.status_code for answer in answers] == [400, 400, 400, 404, 400]
    codes = ["invalid_json", "invalid_json", "invalid_value", "model_not_found", "not_a_router"]
    assert [answer.json()["error"]["code"] for answer in answers] == codes
