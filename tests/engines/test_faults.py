"""What engines that stop, are killed or come back, and clients that go, leave of all others' answers and of memory."""

# neither vLLM nor what comes with it is installed where types are checked
# pyright: reportMissingImports=false

import asyncio
import signal
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial

import aiohttp
import pytest
from pd import Engine, EngineError, Router, connected, gathered, prompts, routed

pytestmark = pytest.mark.timeout(900)

SETTINGS = {"peer_timeout": 2, "revoke_timeout": 3, "no_progress_timeout": 5, "offer_lease": 5, "unclaimed_timeout": 5}
AFTER = 60
"""Seconds that doubts and leases of these settings have surely ended after."""


@pytest.fixture(scope="module")
def pair(model, tmp_path_factory):
    """Both engines, which outlive a test unless it kills them."""
    folder = tmp_path_factory.mktemp("faults")
    extra = {"kvxfer": SETTINGS}
    args = ("--dtype", "float32", "--no-enable-prefix-caching")
    prefill, decode = (connected(name, model("llama"), folder, *args, **extra) for name in ("prefill", "decode"))
    yield prefill, decode
    prefill.stop()
    decode.stop()


@dataclass
class Scene:
    prefill: Engine
    decode: Engine
    router: Router
    expected: dict
    layerwise: bool = False  # a forward pass computes one token at least

    def wanted(self, asked):
        return [self.expected[tuple(prompt)] for prompt in asked]

    async def under_load(self, asked, strike):
        """What became of them, eight at a time, if this happens after the third."""
        after, answered = asyncio.Event(), 0

        async def one(prompt):
            nonlocal answered
            try:
                return await self.router.ask(prompt)
            except (EngineError, aiohttp.ClientError) as error:
                return error
            finally:
                answered += 1
                if answered == 3:
                    after.set()

        asking = asyncio.create_task(gathered(map(one, asked), 8))
        await after.wait()
        await strike()
        return await asking

    async def kill(self, engine, other):
        """Kill one, which is there again long after this, and ask the other."""
        engine.signal(signal.SIGKILL)
        engine.start()
        await self.others(other)

    async def others(self, engine):
        """Requests of others, which an engine answers alone."""
        asked = prompts(2)
        replies = [self.router.complete(engine, prompt, len(self.wanted(asked)[0])) for prompt in asked]
        got = [reply["choices"][0]["token_ids"] for reply in await asyncio.gather(*replies)]
        assert got == self.wanted(asked)

    async def works(self):
        """Whether nothing is held any more, and caches are loaded."""
        for engine in (self.prefill, self.decode):
            await self.router.free(engine, AFTER)
        asked, before = prompts(1), self.decode.metrics()
        assert await gathered(map(self.router.ask, asked), 8) == self.wanted(asked)
        loaded = self.decode.metrics()["external_prefix_cache_hits_total"] - before["external_prefix_cache_hits_total"]
        assert loaded == sum(map(len, asked)) - len(asked) * bool(self.layerwise)


@pytest.fixture
async def expected(alone):
    """What an engine alone makes of what is asked here, which may be while others are killed."""
    asked = [prompt for seed in range(3) for prompt in prompts(seed)]
    answers = await alone.ask(asked, "llama", "float32")
    return dict(zip(map(tuple, asked), answers, strict=True))


@pytest.fixture
async def scene(pair, expected):
    dead = [engine for engine in pair if engine.process is None or engine.process.poll() is not None]
    for engine in dead:
        engine.start()  # on the port that it had
    for engine in dead:
        engine.wait()
    async with routed(*pair) as router:
        yield Scene(pair[0], pair[1], router, expected)


async def test_a_prefill_engine_killed_under_load_costs_nobody_his_answer_and_comes_back_on_its_port(scene):
    asked, kill = prompts(0) + prompts(1), partial(scene.kill, scene.prefill, scene.decode)
    assert await scene.under_load(asked, kill) == scene.wanted(asked)
    await scene.router.free(scene.decode, AFTER)
    scene.prefill.wait()
    *left, own = scene.prefill.folders()
    assert left
    assert own
    assert not any(left), "who starts sweeps what was left"
    await scene.works()


@pytest.mark.full
async def test_who_has_a_ticket_of_a_prefill_engine_that_was_killed_computes_his_prompt(scene):
    asked = prompts(0)
    tickets = [await scene.router.ticket(prompt) for prompt in asked]
    scene.prefill.signal(signal.SIGKILL)
    answers = (scene.router.decode(prompt, **ticket) for prompt, ticket in zip(asked, tickets, strict=True))
    assert await gathered(answers, 8) == scene.wanted(asked)
    await scene.router.free(scene.decode, AFTER)


@pytest.mark.full
async def test_windows_that_were_not_handed_over_are_computed(start, model, alone, tmp_path):
    """A prompt is taken to be shorter, so the prefill engine has let go of what that would see; then it is killed."""
    asked = prompts(0)
    wanted = await alone.ask(asked, "sliding", "float32")
    args = ("--dtype", "float32", "--no-enable-prefix-caching", "--block-size", "32")
    made = (connected(name, model("sliding"), tmp_path, *args, kvxfer=SETTINGS) for name in ("prefill", "decode"))
    prefill, decode = start(*made)
    async with routed(prefill, decode) as router:
        tickets = [await router.ticket(prompt) for prompt in asked]
        for ticket in tickets:
            ticket["remote_num_tokens"] = max(1, ticket["remote_num_tokens"] - 40)
            del ticket["remote_tokens_digest"]
        answered = (router.decode(prompt, **ticket) for prompt, ticket in zip(asked, tickets, strict=True))
        assert await gathered(answered, 8) == wanted
        tickets = [await router.ticket(prompt) for prompt in asked]
        prefill.signal(signal.SIGKILL)
        answered = (router.decode(prompt, **ticket) for prompt, ticket in zip(asked, tickets, strict=True))
        assert await gathered(answered, 8) == wanted
        await router.free(decode, AFTER)


@pytest.mark.full
async def test_a_prefill_engine_that_stands_still_costs_nobody_else_anything(scene):
    """And those who have its tickets are computed; or told so, where it could still write."""
    asked = prompts(0)
    tickets = [await scene.router.ticket(prompt) for prompt in asked]

    async def one(prompt, ticket):
        try:
            return await scene.router.decode(prompt, **ticket)
        except EngineError as error:
            return str(error)

    scene.prefill.signal(signal.SIGSTOP)
    try:
        loads = asyncio.create_task(gathered(map(one, asked, tickets), 8))
        await scene.others(scene.decode)
        got = await loads
    finally:
        scene.prefill.signal(signal.SIGCONT)
    assert got == scene.wanted(asked)
    await scene.works()


@pytest.mark.full
async def test_with_layerwise_a_forward_pass_does_not_wait_for_long(start, model, expected, table, tmp_path):
    """For whom a prefill engine that stands still holds up is computed; with settings as they are by themselves."""
    args = ("--dtype", "float32", "--no-enable-prefix-caching")
    engines = [connected(side, model("llama"), tmp_path, *args, layerwise=True) for side in ("prefill", "decode")]
    prefill, decode = start(*engines)
    async with routed(prefill, decode) as router:
        scene = Scene(prefill, decode, router, expected, layerwise=True)
        assert await gathered(map(router.ask, prompts(0)), 8) == scene.wanted(prompts(0))
        asked = prompts(1)[-8:]
        tickets = [await router.ticket(prompt) for prompt in asked]
        worst = 0.0

        async def others():
            nonlocal worst
            while True:
                before = time.monotonic()
                await router.complete(decode, [3, 4, 5], 1)
                worst = max(worst, time.monotonic() - before)

        prefill.signal(signal.SIGSTOP)
        try:
            other = asyncio.create_task(others())
            for some in (slice(4), slice(4, 8)):  # of the later ones it is known by then
                loads = (
                    router.decode(prompt, **ticket) for prompt, ticket in zip(asked[some], tickets[some], strict=True)
                )
                assert await asyncio.gather(*loads) == scene.wanted(asked[some])
            other.cancel()
        finally:
            prefill.signal(signal.SIGCONT)
        table.append(f"layerwise, prefill stopped: an unrelated request took {worst:.2f} s at most")
        assert 1 < worst < 6, "2 s by default, and 20 until the peer is lost"
        assert decode.metrics()["kvxfer_load_failures_total"] == 8
        await router.free(decode, 10)
        before = time.monotonic()
        await router.ticket(asked[0])
        await router.free(prefill, AFTER)
        table.append(f"a reply that nobody read kept its blocks for {time.monotonic() - before:.0f} s")
        assert time.monotonic() - before > 25, "it was free before somebody could have come"
        await scene.works()


@pytest.mark.full
async def test_a_prefill_engine_that_stands_still_under_load_gives_no_wrong_answer(scene):
    async def pause():
        scene.prefill.signal(signal.SIGSTOP)
        try:
            await scene.others(scene.decode)
        finally:
            scene.prefill.signal(signal.SIGCONT)

    asked = prompts(0) + prompts(1)
    assert await scene.under_load(asked, pause) == scene.wanted(asked)
    await scene.works()


@pytest.mark.full
async def test_a_decode_engine_that_is_killed_under_load_leaves_the_prefill_engine_free(scene):
    asked, kill = prompts(0) + prompts(1), partial(scene.kill, scene.decode, scene.prefill)
    got = await scene.under_load(asked, kill)
    wrong = [
        one for one, wanted in zip(got, scene.wanted(asked), strict=True) if isinstance(one, list) and one != wanted
    ]
    assert wrong == []
    await scene.router.free(scene.prefill, AFTER)
    scene.decode.wait()
    await scene.works()


async def test_clients_that_hang_up_harm_nobody(scene, table):
    """84 of them: while their prompt is computed, with a ticket that nobody redeems, while it is loaded, and later."""
    asked = (prompts(0) + prompts(1)) * 3
    gone = Counter()

    async def client(at, prompt):
        leaves, patience = ("ticket", "prompt", "answer", None)[at % 4], at / len(asked)  # seconds: the first are quick
        try:
            async with asyncio.timeout(patience if leaves == "prompt" else None):
                params = await scene.router.ticket(prompt)
            if leaves != "ticket":
                async with asyncio.timeout(patience if leaves == "answer" else None):
                    return await scene.router.decode(prompt, **params)
        except TimeoutError:
            pass
        gone[leaves] += 1
        return None

    clients = asyncio.gather(*(client(at, prompt) for at, prompt in enumerate(asked)))
    await scene.others(scene.decode)
    await scene.others(scene.prefill)
    got = await clients
    assert set(gone) == {"prompt", "ticket", "answer"}
    assert all(one in (None, wanted) for one, wanted in zip(got, scene.wanted(asked), strict=True))
    await scene.works()
    table.append(f"84 clients of whom hung up: {dict(gone)}")
