"""Every token that real engines of sglang hand over is the one that an engine alone would have said."""

# neither sglang nor what comes with it is installed where types are checked
# pyright: reportMissingImports=false

import asyncio

import aiohttp
import pytest
from pd import PATIENCE, gathered, prompts
from sglang_pd import Rooms, Sglang

pytestmark = pytest.mark.timeout(600)

CHUNKED = ("--chunked-prefill-size", "64")
CACHED = ("--disaggregation-decode-enable-radix-cache",)
ASKED = ("--dp-size", "2", "--load-balance-method", "round_robin")
CONFIGURATIONS = {
    "chunked, prefixes cached": ("llama", 4096, CHUNKED, CACHED),
    "1 rank to 2": ("llama", 4096, CHUNKED, ("--tp-size", "2")),
    "2 ranks to 1": ("llama", 4096, (*CHUNKED, "--tp-size", "2"), ()),
    "2 data-parallel ranks, of which the server is asked": ("llama", 4096, ASKED, ()),
}
"""By name: a model, bytes of a token, and what is added to each command line."""
CI = 1
PAGE = 16
SENT = "kv_transfer_total_mb_sum"


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    """What an engine that does everything itself makes of prompts."""
    known = {}

    async def ask(name):
        if name not in known:
            engine = Sglang("plain", model(name), tmp_path_factory.mktemp("plain"))
            every = [prompt for seed in range(2) for prompt in prompts(seed)]
            try:
                engine.start()
                engine.wait()
                async with aiohttp.ClientSession(timeout=PATIENCE) as session:
                    router = Rooms(session, engine, [engine])
                    said = await gathered(map(router.decode, every), 1)
            finally:
                engine.stop()
            known[name] = {tuple(prompt): tokens for prompt, tokens in zip(every, said, strict=True)}
        return known[name]

    return ask


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (at >= CI)) for at, name in enumerate(CONFIGURATIONS)]
)
async def test_tokens_are_those_of_one_engine(name, start, model, alone, table, tmp_path):
    kind, token_bytes, *both = CONFIGURATIONS[name]
    expected = await alone(kind)
    sides = zip(("prefill", "decode"), both, strict=True)
    prefill, decode = start(*[Sglang(side, model(kind), tmp_path, args) for side, args in sides])
    async with aiohttp.ClientSession(timeout=PATIENCE) as session:
        router = Rooms(session, prefill, [decode])

        async def run(what, asked, concurrency):
            before = prefill.metrics()
            got = await gathered(map(router.ask, asked), concurrency)
            sent = prefill.metrics().get(SENT, 0) - before.get(SENT, 0)
            loaded = round(sent * 2**20 / token_bytes)
            wanted = [expected[tuple(prompt)] for prompt in asked]
            equal = sum(one == other for one, other in zip(got, wanted, strict=True))
            table.append(f"sglang, {name}, {what}: {equal} / {len(asked)} | {loaded} / {sum(map(len, asked))}")
            assert got == wanted
            return loaded

        one, other = prompts(0), prompts(1)
        whole = sum(-(-len(prompt) // PAGE) * PAGE for prompt in one)  # so much travels
        assert await run("1 at a time", one, 1) == whole
        assert await run("8 at a time", other, 8) == whole
        loaded = await run("again", other, 8)
        assert loaded < whole if both[1] == CACHED else loaded == whole
        hung = [asyncio.create_task(router.ask(prompt)) for prompt in one]
        await asyncio.wait(hung, return_when=asyncio.FIRST_COMPLETED)  # others travel or wait by then
        for task in hung:
            task.cancel()
        await asyncio.gather(*hung, return_exceptions=True)
        await run("after 14 clients that hung up, which may have loaded", one, 8)
