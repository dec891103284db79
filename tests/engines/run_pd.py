"""Hand requests over from one vLLM to another and compare every token with one that does all by itself.

    python tests/engines/run_pd.py --block-size 32 128

Starts a prefill engine and a decode engine on CPUs, and after them a plain one, unless an earlier run with the same
model and prompts has left its tokens beside the logs. Prints what differs and one line; exits 0 if all tokens are equal
and all caches were loaded, 1 if not, and 2, with the reason, if an engine did not start.
"""

# neither vLLM nor what comes with it is installed where types are checked
# pyright: reportMissingImports=false

import argparse
import asyncio
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
from make_model import VOCABULARY, make
from pd import (
    LENGTHS,
    PATIENCE,
    Engine,
    EngineError,
    both_at_once,
    complete,
    gathered,
    one_after_the_other,
    prefill,
    prompts,
    token_ids,
)

from kvxfer.tickets import KEY_BYTES, Issuer, Ticket

TOKENS = 24


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/engines"), help="of models and logs")
    parser.add_argument("--name", default="", help="of the logs, and printed")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--head-dim", type=int, default=32, help="of the model, which is made if it is not there")
    parser.add_argument("--block-size", type=int, nargs=2, metavar=("PREFILL", "DECODE"))
    parser.add_argument("--prefix-caching", choices=("on", "off"), default="on")
    parser.add_argument("--layerwise", choices=("none", "prefill", "decode", "both"), default="none")
    parser.add_argument("--ahead", action="store_true", help="make tickets ourselves and send requests to both at once")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1, help="of other prompts each")
    parser.add_argument("--again", action="store_true", help="run all prompts twice: caches are warm the second time")
    parser.add_argument("--setting", action="append", default=[], metavar="KEY=JSON", help="of kvxfer, on both sides")
    parser.add_argument("--vllm-arg", action="append", default=[], help="on both sides")
    return parser.parse_args()


def expected(asked: argparse.Namespace, model: Path, all_prompts: list[list[int]]) -> list[list[int]]:
    """What a plain engine makes of them."""
    what = json.dumps([all_prompts, TOKENS, asked.dtype, asked.head_dim])
    kept = asked.folder / f"expected-{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"
    if not kept.exists():
        engine = Engine("plain", model, asked.folder, ("--dtype", asked.dtype))
        engine.start()
        try:
            engine.wait()

            async def run() -> list[list[int]]:
                async with aiohttp.ClientSession(timeout=PATIENCE) as session:
                    return [token_ids(await complete(session, engine, prompt, TOKENS)) for prompt in all_prompts]

            kept.write_text(json.dumps(asyncio.run(run())))
        finally:
            engine.stop()
    return json.loads(kept.read_text())


def pair(asked: argparse.Namespace, model: Path, key: Path) -> tuple[Engine, Engine]:
    args = ("--dtype", asked.dtype, f"--{'no-' * (asked.prefix_caching == 'off')}enable-prefix-caching")
    settings = {name: json.loads(value) for name, value in (one.split("=", 1) for one in asked.setting)}
    engines: list[Engine] = []
    for at, side in enumerate(("prefill", "decode")):
        extra: dict[str, Any] = {"kvxfer": settings, "layerwise": asked.layerwise in (side, "both")}
        if asked.ahead and side == "prefill":
            extra["key_file"] = str(key)
        transfer = {
            "kv_connector": "KvxferConnector",
            "kv_connector_module_path": "kvxfer.integrations.vllm",
            "kv_role": ("kv_producer", "kv_consumer")[at],
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
        size = ("--block-size", str(asked.block_size[at])) if asked.block_size else ()
        name = "-".join(filter(None, (asked.name, side)))
        engines.append(Engine(name, model, asked.folder, (*args, *size, *asked.vllm_arg), transfer))
    return engines[0], engines[1]


async def handed_over(
    asked: argparse.Namespace, engines: tuple[Engine, Engine], all_prompts: list[list[int]], key: bytes
) -> list[list[int] | BaseException]:
    async with aiohttp.ClientSession(timeout=PATIENCE) as session:
        if not asked.ahead:
            jobs = [one_after_the_other(session, *engines, prompt, TOKENS) for prompt in all_prompts]
        else:
            ticket = (await prefill(session, engines[0], all_prompts[0]))["ticket"]
            issuer = Issuer(Ticket.parse(ticket).card, key)
            jobs = [both_at_once(session, issuer, *engines, prompt, TOKENS) for prompt in all_prompts]
        return await gathered(jobs, asked.concurrency)


def main() -> int:
    asked = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # engines are ended then, too
    asked.folder.mkdir(parents=True, exist_ok=True)
    model, key = asked.folder / f"model-{asked.head_dim}", asked.folder / "engine.key"
    if not model.exists():
        make(model, head_dim=asked.head_dim)
    if not key.exists():
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(KEY_BYTES))
    all_prompts = [
        prompt for seed in range(asked.rounds) for prompt in prompts(LENGTHS, seed=seed, vocabulary=VOCABULARY)
    ]
    engines = pair(asked, model, key)
    try:
        try:
            for engine in engines:
                engine.start()
            for engine in engines:
                engine.wait()
            before, begun = engines[1].metrics(), time.monotonic()
            got = asyncio.run(handed_over(asked, engines, all_prompts * (1 + asked.again), key.read_bytes()))
            took, after = time.monotonic() - begun, engines[1].metrics()
        finally:
            for engine in engines:
                engine.stop()
        wanted = expected(asked, model, all_prompts) * (1 + asked.again)
    except EngineError as error:
        print(f"FAILED {asked.name}: {error}")
        return 2
    all_prompts *= 1 + asked.again
    equal = 0
    for prompt, want, have in zip(all_prompts, wanted, got, strict=True):
        if isinstance(have, BaseException):
            print(f"  prompt of {len(prompt)}: {have!r}")
        elif have != want:
            at = next(at for at in range(TOKENS) if have[at : at + 1] != want[at : at + 1])
            print(f"  prompt of {len(prompt)}: token {at} of {TOKENS} is {have[at : at + 1]}, not {want[at]}")
        else:
            equal += 1
    moved = {name: int(after[name] - before.get(name, 0)) for name in after}
    sources = {name.split("[")[1][:-1]: n for name, n in moved.items() if name.startswith("vllm:prompt_tokens_by_s")}
    loaded, total = moved.get("vllm:external_prefix_cache_hits_total", 0), sum(map(len, all_prompts))
    # a forward pass computes one token at least, so one that loads inside of it has the rest loaded
    in_step = asked.layerwise in ("decode", "both") and asked.prefix_caching == "off"
    good = equal == len(got) and total - len(got) * in_step <= loaded + sources.get("local_cache_hit", 0)
    print(
        f"{'OK' if good else 'FAILED'} {equal} of {len(got)} equal, {asked.name}: {total} prompt tokens, "
        f"{loaded} loaded, by source {sources}; {took:.1f} s"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
