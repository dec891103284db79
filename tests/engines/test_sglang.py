"""Every token that real engines of sglang hand over is the one that an engine alone would have said."""

# neither sglang nor what comes with it is installed where types are checked
# pyright: reportMissingImports=false

import asyncio

import pytest
from pd import Alone, gathered, prompts, routed
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
    folder = tmp_path_factory.mktemp("plain")
    engine = Alone(lambda name: Sglang("plain", model(name), folder), Rooms)
    yield engine
    engine.stop()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (at >= CI)) for at, name in enumerate(CONFIGURATIONS)]
)
async def test_tokens_are_those_of_one_engine(name, start, model, alone, table, tmp_path):
    kind, token_bytes, *both = CONFIGURATIONS[name]
    sides = zip(("prefill", "decode"), both, strict=True)
    alone.begin(kind)
    prefill, decode = start(*[Sglang(side, model(kind), tmp_path, args) for side, args in sides])
    async with routed(prefill, decode, kind=Rooms) as router:

        async def run(what, asked, concurrency):
            before = prefill.metrics()
            got, wanted = await asyncio.gather(gathered(map(router.ask, asked), concurrency), alone.ask(asked, kind))
            sent = prefill.metrics().get(SENT, 0) - before.get(SENT, 0)
            loaded = round(sent * 2**20 / token_bytes)
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
