"""How long clients wait for their first token, with kvxfer and with NixlConnector: in turns, in one run.

    make engines ARGS="--full -k first_token"

While one pair of engines has its turn the other is stopped, as a thread of each of NixlConnector's idle engines polls.
The prompts differ, so nothing is held anywhere.
"""

import asyncio
import random
import signal
import time
from contextlib import AsyncExitStack
from statistics import median

import pytest
from make_model import VOCABULARY
from pd import connected, routed, with_nixl

pytestmark = [pytest.mark.timeout(3600), pytest.mark.full]

TURNS = 20
IDLE_SECONDS = 5
TOKENS = 8000
ARGS = ("--dtype", "float32", "--max-model-len", "8192", "--no-enable-prefix-caching", "--block-size", "128")
LOADS = {"kvxfer": "kvxfer_load_seconds", "NixlConnector": "nixl_xfer_time_seconds"}
"""What each connector says itself of how long its loads took."""


async def test_the_first_token_of_short_and_long_prompts(start, model, table, tmp_path):
    folder, draw, engines = model("llama"), random.Random(0), {}

    def pause(name, how):
        for engine in engines[name]:
            engine.signal(how)

    for name in LOADS:
        sides = [f"{side}-{name}" for side in ("prefill", "decode")]
        if name == "NixlConnector":
            both = [with_nixl(side, folder, tmp_path, *ARGS) for side in sides]
        else:  # which is silent while it is not its turn
            patient = {"peer_timeout": 600}
            both = [connected(side, folder, tmp_path, *ARGS, kvxfer=patient) for side in sides]
        for engine in both:
            engine.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # as it is by itself
        engines[name] = start(*both)
        pause(name, signal.SIGSTOP)
    async with AsyncExitStack() as stack:
        routers = {name: await stack.enter_async_context(routed(*pair)) for name, pair in engines.items()}

        async def turn(router, length):
            prompt = [draw.randrange(3, VOCABULARY) for _ in range(length)]
            before = time.monotonic()
            ticket = await router.ticket(prompt)
            between = time.monotonic()
            await router.complete(router.decodes[0], prompt, 1, **ticket)
            return between - before, time.monotonic() - between

        for length in (400, TOKENS):
            took, before, after = {name: [] for name in LOADS}, {}, {}
            for at in range(TURNS + 2):
                for name, router in sorted(routers.items(), reverse=bool(at % 2)):
                    pause(name, signal.SIGCONT)
                    if at == 2:
                        before[name] = engines[name][1].metrics()
                    one = await turn(router, length)
                    if at >= 2:  # connections and caches are warm
                        took[name].append(one)
                    after[name] = engines[name][1].metrics()
                    pause(name, signal.SIGSTOP)
            for name, turns in took.items():
                pause(name, signal.SIGCONT)
                used = -sum(engine.cpu_seconds() for engine in engines[name])
                await asyncio.sleep(IDLE_SECONDS)
                used += sum(engine.cpu_seconds() for engine in engines[name])
                pause(name, signal.SIGSTOP)
                moved = {key: value - before[name].get(key, 0) for key, value in after[name].items()}
                assert moved["external_prefix_cache_hits_total"] == length * TURNS, "everything was loaded"
                load = moved[f"{LOADS[name]}_sum"] / moved[f"{LOADS[name]}_count"]
                first, prefill, decode = (1e3 * median(those) for those in (map(sum, turns), *zip(*turns, strict=True)))
                table.append(
                    f"{length} tokens, {name}: first token after {first:.1f} ms, prefill {prefill:.1f} and decode "
                    f"{decode:.1f}; a load took {1e3 * load:.1f} by its own account; idle, both engines took "
                    f"{used / IDLE_SECONDS:.2f} cores"
                )
