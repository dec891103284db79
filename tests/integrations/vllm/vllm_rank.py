"""A worker process: one rank of every engine, each engine in a thread of its own, as vLLM's worker drives a connector.

What the model computes can be told for every token of a prompt, so the caches of a decode engine are compared with what
its own forward pass would have left there. They are on a GPU where there is one, else in memory of the CPU.
"""

import contextlib
import os
import pickle
import threading
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import vllm_stand_in
from vllm_engine import BLOCKS, DIM, HEADS, LAYERS, configured

from kvxfer import BusyError, shared_empty

vllm_stand_in.install()

from kvxfer.integrations.vllm import KvxferConnector  # noqa: E402 - vLLM must be there first

ORDERS = {"LBNHC": (0, 2, 1, 3), "LBHNC": (0, 1, 2, 3)}
"""Where the axes block, head, token and content of a layer lie in memory."""
GPUS = torch.cuda.device_count()
EMPTY: Any = partial(torch.empty, device="cuda") if GPUS else partial(shared_empty, dtype=torch.float32)
PATIENCE = 30
NAMES = ("chunk_bytes", "route", "unclaimed_timeout")
"""Of settings that are looked at."""


def content(seed: int, tokens: range, layer: int, heads: range) -> torch.Tensor:
    """K and V of some tokens: `[heads, tokens, 2 * DIM]`."""
    head, token, at = torch.meshgrid(
        *(torch.arange(axis.start, axis.stop) for axis in (heads, tokens, range(2 * DIM))), indexing="ij"
    )
    return ((seed * 7919 + layer * 1009 + head * 211 + token * 17 + at) % 9973).float()


class Gates:
    """Places where a thread stands until another has come by."""

    def __init__(self) -> None:
        self._events: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> threading.Event:
        with self._lock:
            return self._events.setdefault(name, threading.Event())


class Rank:
    """One rank of one engine."""

    def __init__(self, engine: dict[str, Any], rank: int, gates: Gates) -> None:
        self._engine, self._rank = engine, rank
        self._gates, self._second = gates, rank == 1
        held = HEADS // engine["world"]
        self._heads = range(rank * held, (rank + 1) * held)
        self._block_tokens: int = engine["block_tokens"]
        order = ORDERS[engine["layout"]]
        sizes = (BLOCKS, held, self._block_tokens, 2 * DIM)
        self._views = {}
        config, role, caches = configured(engine, rank)
        for layer in range(LAYERS):
            memory = EMPTY(tuple(sizes[axis] for axis in order)).fill_(-1)
            name = f"model.layers.{layer}.self_attn.attn"
            self._views[name] = memory.permute(*(order.index(axis) for axis in range(4)))
            config.compilation_config.static_forward_context[name].kv_cache = self._views[name]
        self.connector: Any = KvxferConnector(config, role, caches)
        self.connector.register_kv_caches(self._views)

    def handshake(self) -> Any:
        return self.connector.get_handshake_metadata()

    def sleep(self) -> None:
        """As vLLM goes to sleep: the contents are gone afterwards."""
        self.connector.unregister_kv_caches()
        self.connector.unregister_kv_caches()
        for view in self._views.values():
            view.fill_(-2)

    def wake_up(self) -> None:
        self.connector.restore_kv_caches()
        self.connector.restore_kv_caches()

    def settings(self, extra: dict[str, Any], role: str, batches: int = 0, runner: Any = ()) -> dict[str, Any]:
        """What they would be with another extra configuration, role or runner, or with micro-batches."""
        described = self._engine | {"extra": self._engine["extra"] | extra, "role": role, "ubatches": batches}
        described |= dict(runner)
        with patch.dict(os.environ, described.pop("environment", {})):
            side = KvxferConnector(*configured(described, self._rank))._worker
        found = {name: getattr(side._worker.config, name) for name in (*NAMES, "engine", "model", "rank", "world")}
        return found | {"by_layer": side.offers._layerwise, "late": side.offers._late}

    def refuse_loads(self) -> None:
        """From now on no fetch can be begun by this rank, if it is the second."""
        if self._second:

            def refuse(*_: Any, **__: Any) -> None:
                raise BusyError("nobody polls")

            self.connector._worker._worker.start_fetch = refuse

    def close(self) -> None:
        self.connector.shutdown()

    def execute(self, output: Any, work: list[dict[str, Any]]) -> tuple[Any, list[str]]:
        """One step, in the order of calls of vLLM's runner: its output, and requests whose cache is not what it was."""
        connector = self.connector
        connector.handle_preemptions(output.kv_connector_metadata)
        connector.bind_connector_metadata(output.kv_connector_metadata)
        if output.has_sync_kv_loads:
            connector.start_load_kv(None, scheduler_output=output)
        wrong = self._forward(work)
        if not output.has_sync_kv_loads:
            connector.start_load_kv(None, scheduler_output=output)
        connector.wait_for_save()
        results = connector.get_transfer_results(output.finished_req_ids)
        answer = vllm_stand_in.make(
            "KVConnectorOutput",
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
        )
        connector.clear_connector_metadata()
        return answer, wrong

    def _forward(self, work: list[dict[str, Any]]) -> list[str]:
        wrong = set()
        for layer, (name, view) in enumerate(self._views.items() if work else ()):
            for request in work:
                if gate := request["gates"].get(("before", layer)):
                    assert self._gates[gate].wait(PATIENCE), f"nobody came to {gate}"
            self.connector.wait_for_layer_load(name)
            for request in work:
                if gate := request["gates"].get(("after", layer)):
                    self._gates[gate].set()
                if not self._matches(request, layer, view):
                    wrong.add(request["request"])
                self._compute(request, layer, view)
            self.connector.save_kv_layer(name, view, object())
        return sorted(wrong)

    def _matches(self, request: dict[str, Any], layer: int, view: torch.Tensor) -> bool:
        """Whether the tokens before this step are in the cache."""
        before = range(request["start"])
        found = view[request["blocks"]].transpose(0, 1).flatten(1, 2)[:, : len(before)]
        return torch.equal(found.cpu(), content(request["seed"], before, layer, self._heads))

    def _compute(self, request: dict[str, Any], layer: int, view: torch.Tensor) -> None:
        tokens = range(request["start"], request["stop"])
        wanted = content(request["seed"], tokens, layer, self._heads).to(view.device)
        for at, token in enumerate(tokens):
            view[request["blocks"][token // self._block_tokens], :, token % self._block_tokens] = wanted[:, at]


def serve(rank: int, wires: list[Any]) -> None:
    """The process: every wire is one engine's, until it is closed."""
    torch.set_num_threads(1)
    gates = Gates()
    threads = [threading.Thread(target=_answer, args=(rank, wire, gates)) for wire in wires]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _answer(rank: int, wire: Any, gates: Gates) -> None:
    found: Any = None
    if GPUS:
        torch.cuda.set_device(rank % GPUS)  # of this thread
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            name, arguments = pickle.loads(wire.recv_bytes())
            try:
                if name == "open":
                    (engine,) = arguments
                    found, value = Rank(engine, rank, gates), None
                else:
                    value = getattr(found, name)(*arguments)
                answer = (value, "")
            except Exception as error:  # noqa: BLE001 - whoever called hears of it
                answer = (None, repr(error))
            wire.send_bytes(pickle.dumps(answer))
