"""Every token that is handed over is the one that an engine alone would have said, however both engines are set up."""

import asyncio
import json
import os
from dataclasses import dataclass
from typing import Any

import pytest
from pd import LENGTHS, TOKENS, connected, gathered, prompts, routed, shorter

from kvxfer.tickets import KEY_BYTES

pytestmark = pytest.mark.timeout(900)

SMALL = ("--num-gpu-blocks-override", "18", "--block-size", "32", "--no-scheduler-reserve-full-isl")
"""Memory for the longest prompt, and begun for more than fit."""
SOME_AT_ONCE = ("--max-num-batched-tokens", "64", "--long-prefill-token-threshold", "16")
"""Several prompts are computed at a time, a little of each in a step."""

BOTH_WAYS = {"bidirectional_kv_xfer": True, "kvxfer": {"unclaimed_timeout": 5}}
"""Most answers of these tests have no second turn, and blocks of their engines are free sooner."""
FEW = ("--num-gpu-blocks-override", "6")  # so blocks are used again, and in bfloat16 state of others is no number there
APART: dict[str, Any] = {
    "dtype": "bfloat16",
    "args": FEW,
    "cached": False,
    "concurrencies": (1,),
    "lengths": (300,) * 5,
    "alone": ("--max-num-batched-tokens", "299", "--no-enable-prefix-caching"),
}
"""In bfloat16 a last token that is computed apart, as a decode engine does it, may give another answer, alone too."""


@dataclass(frozen=True)
class Configuration:
    """How a prefill engine and decode engines are set up."""

    model: str = "llama"
    dtype: str = "float32"
    args: tuple[str, ...] = ()  # of vLLM's command line, on both sides
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    cached: bool = True  # prefixes are
    layerwise: tuple[str, ...] = ()
    ahead: bool = False  # tickets are made before prompts are computed
    decodes: int = 1
    concurrencies: tuple[int, ...] = (1, 8)
    preempted: tuple[str, ...] = ()  # the sides on which requests must have been
    lengths: tuple[int, ...] = LENGTHS  # of prompts
    alone: tuple[str, ...] = ()  # how an engine that does everything itself is set up
    processes: bool = False  # an engine has all those that it has by itself
    turns: bool = False  # answers are handed back with a second turn, and each engine does either
    drafts: int = 0  # tokens that the same model, as a draft model, guesses in each step, so that all are right

    def engines(self, folder, model, key):
        for side in ["prefill", *(f"decode{n}" for n in range(self.decodes))]:
            kind = side.rstrip("0123456789")
            extra: dict[str, Any] = {"key_file": str(key)} if self.ahead and kind == "prefill" else {}
            args = ("--dtype", self.dtype, f"--{'' if self.cached else 'no-'}enable-prefix-caching")
            args += (*self.args, *getattr(self, kind))
            if self.drafts:
                drafting = {"method": "draft_model", "model": str(model), "num_speculative_tokens": self.drafts}
                args += ("--speculative-config", json.dumps(drafting))
            extra |= BOTH_WAYS if self.turns else {}
            made = connected(
                side, model, folder, *args, layerwise=kind in self.layerwise, layerwise_timeout=60, **extra
            )
            made.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = f"{self.processes:d}"
            if self.turns:
                made.transfer = (made.transfer or {}) | {"kv_role": "kv_both"}
            yield made


CI = {
    "prefixes cached, both ways": Configuration(turns=True),
    "blocks of 32 and 128 tokens, chunked, sliding windows": Configuration(
        model="sliding",
        prefill=("--block-size", "32", "--max-num-batched-tokens", "64"),
        decode=("--block-size", "128"),
        cached=False,
        processes=True,
    ),
}
FULL = {
    "prefixes cached": Configuration(),
    "prefixes not cached, both ways": Configuration(cached=False, turns=True),
    "blocks of 128 and 32 tokens": Configuration(prefill=("--block-size", "128"), decode=("--block-size", "32")),
    "blocks of 32 and 64 tokens": Configuration(prefill=("--block-size", "32"), decode=("--block-size", "64")),
    "bfloat16": Configuration(dtype="bfloat16", args=("--max-num-seqs", "1")),
    "bfloat16, heads of 48": Configuration(model="llama-48", dtype="bfloat16", args=("--max-num-seqs", "1")),
    "chunked prefill": Configuration(args=SOME_AT_ONCE),
    "layerwise on both": Configuration(layerwise=("prefill", "decode"), cached=False),
    "layerwise on both, prefixes cached": Configuration(layerwise=("prefill", "decode")),
    "layerwise on decode": Configuration(layerwise=("decode",), cached=False),
    "tickets made ahead": Configuration(layerwise=("prefill",), ahead=True),
    "tickets made ahead, chunked, layerwise on both": Configuration(
        layerwise=("prefill", "decode"), ahead=True, cached=False, prefill=SOME_AT_ONCE
    ),
    "preemption on prefill": Configuration(prefill=(*SMALL, *SOME_AT_ONCE), preempted=("prefill",)),
    "preemption on decode": Configuration(decode=SMALL, preempted=("decode0",)),
    "4 decode engines": Configuration(decodes=4),
    "a draft model": Configuration(drafts=3, cached=False),
    "a draft model, chunked, layerwise on both": Configuration(
        drafts=3, cached=False, layerwise=("prefill", "decode"), prefill=SOME_AT_ONCE
    ),
    "an indexer": Configuration(model="indexed"),
    "an indexer, chunked, layerwise on both": Configuration(
        model="indexed", cached=False, layerwise=("prefill", "decode"), prefill=SOME_AT_ONCE
    ),
    "sliding windows and full attention": Configuration(model="sliding"),
    "sliding windows, layerwise on both": Configuration(
        model="sliding", layerwise=("prefill", "decode"), cached=False, decode=("--block-size", "64")
    ),
    "short convolution": Configuration(model="short-conv", cached=False),
    "short convolution, chunked prefill, layerwise": Configuration(
        model="short-conv", cached=False, concurrencies=(1,), prefill=SOME_AT_ONCE, layerwise=("prefill", "decode")
    ),
    "short convolution, prefixes cached": Configuration(model="short-conv", concurrencies=(1,)),
    "short convolution, preemption on both": Configuration(
        model="short-conv",
        cached=False,
        concurrencies=(1, 14),
        prefill=(*SMALL, *SOME_AT_ONCE),
        decode=SMALL,
        preempted=("prefill", "decode0"),
        lengths=(60,) * 14,  # of which more begin than can go on
    ),
    # this build computes no prompt of more than a chunk
    "Mamba-2": Configuration(model="mamba2", cached=False, concurrencies=(1,), lengths=LENGTHS[:9], args=FEW),
    "short convolution, bfloat16": Configuration(model="short-conv", **APART),
    "gated delta rule": Configuration(model="delta-rule", **APART),
}


def had(engines):
    """Tokens of prompts that engines have loaded so far, and found in their own caches."""
    seen = [engine.metrics() for engine in engines]
    return [sum(one.get(of, 0) for one in seen) for of in ("external_prefix_cache_hits_total", "local_cache_hit")]


def since(before, engines):
    return [int(now - then) for then, now in zip(before, had(engines), strict=True)]


@pytest.mark.parametrize("name", [*CI, *(pytest.param(name, marks=pytest.mark.full) for name in FULL)])
async def test_tokens_are_those_of_one_engine_and_every_cache_was_loaded(name, start, model, alone, table, tmp_path):
    made = (CI | FULL)[name]
    key = tmp_path / "engine.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(KEY_BYTES))
    alone.begin(made.model, made.dtype, *made.alone)
    prefill, *decodes = start(*made.engines(tmp_path, model(made.model), key))
    async with routed(prefill, *decodes, key=key.read_bytes() if made.ahead else None) as router:

        async def run(what, ask, asked, concurrency):
            before = had(decodes)
            answers = alone.ask(asked, made.model, made.dtype, *made.alone)
            got, wanted = await asyncio.gather(gathered(map(ask, asked), concurrency), answers)
            loaded, held = since(before, decodes)
            equal = sum(one == other for one, other in zip(got, wanted, strict=True))
            tokens = sum(map(len, asked))
            table.append(f"{name}, {what}: {equal} / {len(asked)} | {loaded} / {tokens}, {held} held there")
            assert got == wanted
            return tokens - loaded - held, loaded, held

        # a forward pass computes one token at least, so one that loads inside of it has the rest loaded; of a prompt
        # with windows or state the prefill engine leaves one
        computed = 1 if not made.model.startswith("llama") or ("decode" in made.layerwise and not made.cached) else 0
        seen = []
        for seed, concurrency in enumerate(made.concurrencies):
            asked = prompts(seed, made.lengths)
            missed, _, held = await run(f"{concurrency} at a time", router.ask, asked, concurrency)
            assert missed <= computed * len(asked), "what was not loaded was computed"
            assert held == 0, "prompts have nothing in common"
            seen += asked
        if made.cached:
            missed, _, held = await run("again", router.ask, seen, 8)
            assert missed <= computed * len(seen)
            assert held or made.preempted or made.decodes > 1, "nothing was kept"
            # of blocks in another order full attention tells nothing, but one who needs the first of them does
            _, loaded, held = await run("their beginnings", router.decode, shorter(seen), 8)
            assert loaded == 0
            # of state there is that of the whole prompt alone
            stateful = made.model == "short-conv"
            assert held or made.preempted or made.decodes > 1 or stateful, "nothing was kept"
        for engine in (prefill, *decodes):
            await router.free(engine, 60)
        assert prefill.kvxfer("layout_proved"), "the log is mute"
        for engine, what in ((prefill, "offers_total"), *((one, "load_seconds_count") for one in decodes)):
            assert engine.metrics()[f"kvxfer_{what}"] > 0
            assert engine.metrics()["kvxfer_load_failures_total"] == 0
        if made.drafts:  # without the draft model's cache its guesses would be wrong, and nothing else would tell
            (engine,) = decodes
            guessed, right = (engine.metrics()[f"spec_decode_num_{of}_tokens_total"] for of in ("draft", "accepted"))
            table.append(f"{name}: {right:g} / {guessed:g} guesses are right")
            # of each answer vLLM has no guess yet in the step that computes the last token of a prompt and no other
            assert 0 < guessed - right <= made.drafts * len(seen)
        preempted = [one.name for one in (prefill, *decodes) if one.metrics()["num_preemptions_total"] > 0]
        assert set(made.preempted) <= set(preempted)
    if made.turns:
        for number, both in enumerate(((prefill, *decodes), (*decodes, prefill)), 2):
            async with routed(*both) as router:
                await second_turns(prompts(number), router, made, alone, table)


async def second_turns(asked, router, made, alone, table):
    """What a decode engine has of prompts and of its answers flows back to the prefill engine with a second turn."""
    prefill, (decode,) = router.prefill, router.decodes
    end, talks = prompts(7, [20])[0], []

    async def talk(prompt):
        told = await router.complete(decode, prompt, TOKENS, **await router.ticket(prompt))
        first, back = told["choices"][0]["token_ids"], told["kv_transfer_params"]
        assert back["remote_num_tokens"] == len(prompt) + TOKENS - 1
        turn = [*prompt, *first, *end]
        onward = (await router.complete(prefill, turn, 1, **back))["kv_transfer_params"]
        talks.append((prompt, first))
        talks.append((turn, await router.decode(turn, **onward)))
        return back["remote_num_tokens"]

    before = had([prefill])
    back = sum(await gathered(map(talk, asked), 8))
    loaded, held = since(before, [prefill])
    said, got = zip(*talks, strict=True)
    wanted = await alone.ask(said, made.model, made.dtype, *made.alone)
    equal = sum(one == other for one, other in zip(got, wanted, strict=True))
    table.append(f"second turns, cached {made.cached}: {equal} / {len(talks)} | {loaded} / {back}, {held} held there")
    assert list(got) == wanted
    assert loaded + held >= back, "what the decode engine had was computed again"
    assert held == 0 or made.cached
    for engine in (prefill, decode):
        await router.free(engine, 60)
