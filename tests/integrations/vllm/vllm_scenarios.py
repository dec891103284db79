"""What happens between a prefill and a decode engine of two ranks each, told by the scheduler's process of both.

Each scenario returns what a test looks at.
"""

import json
import secrets
import sys
import tempfile
import time
import traceback
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import vllm_stand_in
from vllm_engine import BLOCKS, LAYERS, STATUS, Engine, Workers, configured

from kvxfer.errors import ConfigError
from kvxfer.tickets import KEY_BYTES, Issuer, Ticket

vllm_stand_in.install()

from kvxfer.integrations.vllm import KvxferConnector  # noqa: E402 - vLLM must be there first

PATIENCE = 30.0
ENGINE = {"name": "e", "world": 1, "block_tokens": 16, "extra": {}}
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def opened(name, workers, *, block_tokens, layout, layerwise=False, budget=64, **extra):
    """An engine whose ranks are open."""
    kvxfer = {"arena_bytes": "1MiB", "chunk_bytes": "16KiB"}
    described = {
        "name": name,
        "world": len(workers._wires),
        "block_tokens": block_tokens,
        "layout": layout,
        "extra": {"layerwise": layerwise, "kvxfer": kvxfer, **extra},
    }
    engine = Engine(KvxferConnector(*configured(described, None)), workers, block_tokens=block_tokens, budget=budget)
    engine.stats = KvxferConnector.build_kv_connector_stats()
    workers.call("open", described)
    engine.shake_hands()
    return engine


class Pair:
    """Two engines whose block sizes and layouts differ, and which two processes hold the ranks of."""

    def __init__(self, wires: list[list[Any]], *, ranks=2, prefill=None, **both: Any) -> None:
        mine, theirs = Workers(wires[0][:ranks]), Workers(wires[1])
        self.prefill = opened("prefill", mine, block_tokens=16, layout="LBNHC", **both, **(prefill or {}))
        self.decode = opened("decode", theirs, block_tokens=8, layout="LBHNC", **both)

    def __str__(self) -> str:
        engines = (self.prefill, self.decode)
        return str([{one: str(request.status) for one, request in engine.requests.items()} for engine in engines])

    def until(self, condition: Any, *engines: Engine) -> None:
        """Step both engines, or these, until something is so."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"it has not come to that: {self}"
            for engine in engines or (self.prefill, self.decode):
                engine.step()

    def until_over(self) -> dict[str, Any]:
        """Step until no request holds anything; what both engines say then. Closes them.

        It takes seconds at most: an offer that nobody released would last for minutes.
        """
        engines = {"prefill": self.prefill, "decode": self.decode}
        self.until(lambda: not self.prefill.requests and not self.decode.requests)
        for engine in engines.values():
            engine.close()
        return {
            "wrong": self.prefill.wrong + self.decode.wrong,
            "ended": self.prefill.ended | self.decode.ended,
            "sampled": dict(self.decode.sampled),
            "lost": {name: sorted(set(range(1, BLOCKS)).difference(engine.free)) for name, engine in engines.items()},
            "reported": {(name, *key): n for name, engine in engines.items() for key, n in engine.reported.items()},
            "failed_together": self.decode.failed_together,
            "stats": {name: engine.stats.reduce() for name, engine in engines.items()},
        }

    def prefilled(self, request_id: str, seed: int, prompt: int) -> dict[str, Any]:
        """Let the prefill engine compute a prompt; what a router gets for it, as it comes out of JSON."""
        self.prefill.add(request_id, seed, prompt, params=dict(PREFILL))
        self.until(lambda: request_id in self.prefill.ended, self.prefill)
        return json.loads(json.dumps(self.prefill.params[request_id]))

    def early(self, request_id: str, tokens: int) -> dict[str, Any]:
        """What a router would get, before the prefill engine has begun."""
        ticket = self.prefill.connector._scheduler._issuer.ticket(request_id)
        return {"do_remote_prefill": True, "ticket": ticket, "remote_num_tokens": tokens}

    def half(self) -> None:
        """A prompt of which some is computed, and is being fetched."""
        self.prefill.add("p", 1, 64, params=dict(PREFILL))
        self.decode.add("d", 1, 64, params=self.early("p", 64))
        self.until(lambda: self.waits("d") and self.prefill.requests["p"].num_computed_tokens >= 32)

    def waits(self, request_id: str) -> bool:
        """Whether a request of the decode engine waits for its load."""
        return self.decode.requests[request_id].status is STATUS.WAITING_FOR_REMOTE_KVS


def handed_over(wires, **settings):
    """Three prompts, computed in several steps that they share."""
    pair = Pair(wires, prefill={"budget": 24}, **settings)
    prompts = {"a": (1, 40), "b": (2, 17), "c": (3, 64)}
    for one, (seed, prompt) in prompts.items():
        pair.prefill.add(f"p-{one}", seed, prompt, params=dict(PREFILL))
    params = {}
    for one, (seed, prompt) in prompts.items():
        pair.until(lambda one=one: f"p-{one}" in pair.prefill.ended, pair.prefill)
        params[one] = pair.prefill.params[f"p-{one}"]
        pair.decode.add(f"d-{one}", seed, prompt, params=json.loads(json.dumps(params[one])), tokens=3)
    return pair.until_over() | {"params": params}


def one_rank_to_two(wires):
    return handed_over(wires, ranks=1)


def layers_overlap(wires):
    """A router makes a ticket itself; the prefill engine computes its last layer when the first one has been read."""
    key = secrets.token_bytes(KEY_BYTES)
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(key)
        pair = Pair(wires, layerwise=True, key_file=file.name)
    first = pair.prefilled("p-first", 2, 24)
    pair.decode.add("d-first", 2, 40, params=first)
    issuer = Issuer(Ticket.parse(first["ticket"]).card, key)
    mine = {"do_remote_prefill": True, "ticket": issuer.ticket("mine"), "remote_num_tokens": 32}
    pair.until(lambda: not pair.prefill.requests and not pair.decode.requests)
    pair.prefill.add("p", 1, 32, params=PREFILL | {"transfer_id": "mine"}, gates={("before", LAYERS - 1): "layer read"})
    pair.decode.add("d", 1, 40, params=mine, gates={("after", 0): "layer read"})
    pair.prefill.step()
    pair.decode.step()
    return pair.until_over()


def aborted_while_prefilling(wires):
    """The client leaves while its prompt is computed, and a decode engine fetches what there is."""
    pair = Pair(wires, prefill={"budget": 16})
    pair.half()
    pair.prefill.finish("p")
    assert pair.prefill.params["p"] is None
    return pair.until_over()


def aborted_before_it_is_computed(wires):
    """A router makes a ticket itself, and the client leaves before the prompt's first step."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(secrets.token_bytes(KEY_BYTES))
        pair = Pair(wires, layerwise=True, key_file=file.name)
    pair.prefill.step()  # its ranks join
    pair.prefill.add("p", 1, 64, params=dict(PREFILL))
    pair.decode.add("d", 1, 64, params=pair.early("p", 64))
    pair.prefill.finish("p")
    return pair.until_over()


def preempted(wires):
    """A prompt loses its blocks to others while a decode engine fetches it, and is computed again."""
    pair = Pair(wires, prefill={"budget": 16})
    pair.half()
    pair.prefill.preempt("p")
    pair.prefill.free.reverse()  # so that the next ones get its blocks
    pair.prefill.add("other", 2, 48, params=dict(PREFILL))
    pair.until(lambda: "p" in pair.prefill.ended and "other" in pair.prefill.ended)
    params = {one: pair.prefill.params[one] for one in ("p", "other")}
    pair.decode.add("d-2", 1, 64, params=params["p"])
    pair.decode.add("d-other", 2, 48, params=params["other"])
    return pair.until_over() | {"attempts": {one: known["ticket"]["attempt"] for one, known in params.items()}}


def load_fails_on_one_rank(wires):
    """One rank of two cannot even begin."""
    pair = Pair(wires)
    params = pair.prefilled("p", 1, 40)
    pair.decode.workers.call("refuse_loads")
    pair.decode.add("d", 1, 40, params=params)
    return pair.until_over()


def slept(wires):
    """Both engines give their memory up and get it back: they are new engines, and work as before."""
    pair = Pair(wires)
    pair.decode.add("d", 1, 40, params=pair.prefilled("p", 1, 40))
    pair.until(lambda: not pair.prefill.requests and not pair.decode.requests)
    early = pair.early("p-2", 40)
    pair.prefill.sleep()
    pair.decode.sleep()
    pair.decode.add("d-2", 1, 40, params=pair.prefilled("p-2", 1, 40))
    pair.decode.add("d-early", 1, 40, params=early)
    return pair.until_over()


def configured_ranks(wires):
    """What ranks make of their settings; and what a connector refuses, or says before there is one."""
    pair = Pair(wires)
    refused = {}
    odd = {f"layerwise_timeout={given}": given for given in ("2 s", 0, True, float("nan"), float("inf"))}
    odd |= {"trust_layout=false": "false", "layerwize=": True, "kvxfer=": None, "key_file=": "/nowhere/key"}
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size", *odd):
        extra = {name.partition("=")[0]: odd[name]} if name in odd else {}
        config, role, caches = configured(ENGINE | {"extra": extra}, None)
        if not extra:
            setattr(config.parallel_config, name, 2)
        try:
            KvxferConnector(config, role, caches)
        except ConfigError as error:
            refused[name] = str(error)
    graphs = [KvxferConnector.requires_piecewise_for_cudagraph(extra) for extra in ({}, {"layerwise": True})]
    steps = {}
    how = {"": {}, "overlap": {"batches": 2}, "v2": {"v2": True}, "only prefills": {"role": "kv_producer"}}
    for policy, name in product(("fail", "recompute"), how):
        changed = {"extra": {"layerwise": True}, "policy": policy} | how[name]
        steps[policy, name] = KvxferConnector(*configured(ENGINE | changed, None))._scheduler._layerwise
    named = {}
    for cached, images in product((False, True), (None, 0, 0.5)):
        changed = {"cached": cached} | ({} if images is None else {"images": images})
        named[cached, images] = KvxferConnector(*configured(ENGINE | changed, None))._scheduler._named
    given = {"kvxfer": {"unclaimed_timeout": 7, "route": "auto", "chunk_bytes": 16 << 10}}
    extras: tuple[dict[str, Any], ...] = ({}, {"layerwise": True}, {"layerwise": True} | given, {"key_file": "key"})
    settings = [pair.prefill.workers.call("settings", extra, "kv_both") for extra in extras]
    settings.append(pair.prefill.workers.call("settings", extras[1], "kv_producer"))
    settings.append(pair.prefill.workers.call("settings", extras[1], "kv_both", 2))
    given = {"environment": {"KVXFER_MODEL": "given"}}
    for changed in ({"v2": True}, {"zeroes": True}, {"v2": True, "zeroes": True}, given):
        settings.append(pair.prefill.workers.call("settings", {}, "kv_both", 0, changed))
    factors = {"rope_type": "longrope", "original_max_position_embeddings": 256}
    models: list[dict[str, Any]] = [{"revision": "r1"}]
    by_kind = {"full": {"rope_type": "default"}, "sliding": factors, "without": None}
    for rope in ({"rope_type": "default"}, factors, by_kind):
        for tokens in (256, 257):
            models.append({"hf_text_config": SimpleNamespace(rope_parameters=rope), "max_model_len": tokens})
    changes = [{"model": model} for model in models] + [given | {"model": model} for model in models[-2:]]
    known = [pair.prefill.workers.call("settings", {}, "kv_both", 0, changed) for changed in changes]
    zeroed = KvxferConnector(*configured(ENGINE | {"zeroes": True}, None)).get_loaded_kv_cache_group_ids("r")
    dropped = [engine.connector.requires_kv_delivery for engine in (pair.prefill, pair.decode)]
    return pair.until_over() | {
        "settings": settings,
        "refused": refused,
        "graphs": graphs,
        "steps": steps,
        "named": named,
        "models": [each["model"] for each, _ in known],
        "dropped": dropped,
        "zeroed": zeroed,
    }


def serve(wire: Any, wires: list[list[Any]]) -> None:
    """The process: scenarios by name, until the pipe is closed."""
    while True:
        try:
            name = wire.recv()
        except EOFError:
            return
        try:
            answer = (globals()[name](wires), "")
        except BaseException as error:  # noqa: BLE001 - whoever called hears of it
            answer = (None, "".join(traceback.format_exception(error)))
        wire.send((answer, sorted({"torch", "nixl"} & set(sys.modules))))
