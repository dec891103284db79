"""The class that vLLM loads: it sorts vLLM's calls, scheduler's and workers', and hands each to its side."""

# vLLM is not installed where types are checked
# pyright: reportMissingImports=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from kvxfer.errors import ConfigError, MissingExtraError
from kvxfer.integrations.heads import Place
from kvxfer.integrations.vllm.caches import Model, block_groups, describe
from kvxfer.integrations.vllm.orders import Orders
from kvxfer.integrations.vllm.scheduler import SchedulerSide
from kvxfer.integrations.vllm.seen import Counts
from kvxfer.telemetry import join_logs, logger

try:
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
except ModuleNotFoundError as exc:
    if exc.name is None or exc.name.split(".")[0] != "vllm":
        raise
    raise MissingExtraError(
        "kvxfer.integrations.vllm.connector needs vLLM, which is not installed: pip install vllm"
    ) from exc

__all__ = ["KvxferConnector", "KvxferHandshake", "KvxferMetadata", "KvxferPromMetrics", "KvxferStats"]

_UNCLAIMED_SECONDS: Final = 30.0
"""How long a prompt waits for whoever has its ticket: a router passes that on at once."""
_CLAIMED_SECONDS: Final = 60.0
"""How long a request waits for blocks to load into where its engine offers too: another may wait for those on offer."""

_METRICS: Final = {
    "load_seconds": "How long loads of a KV cache took",
    "load_bytes": "Bytes of a load",
    "load_failures": "Loads of a KV cache that failed",
    "offers": "Prompts, counted by each rank, that whoever had the ticket has released",
    "offers_lost": "Prompts that nobody came for, or that could not be offered",
}
"""What each field of `Counts` is."""
_BUCKETS: Final[Mapping[str, Sequence[float]]] = {
    "load_seconds": (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
    "load_bytes": [2**power for power in range(14, 37, 2)],
}

_log: Final = logger("kvxfer.vllm")


@dataclass
class KvxferMetadata(KVConnectorMetadata):  # type: ignore[misc]  # its base is Any there
    """What the scheduler's side tells the workers with each step."""

    orders: Orders


@dataclass
class KvxferHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # likewise
    """What a worker says of itself once its caches are registered."""

    card: dict[str, Any]
    page: int = 0  # tokens of a page of an indexer, if there is any, of which the scheduler's process is not told


class KvxferStats(KVConnectorStats):  # type: ignore[misc]  # its base is Any there
    """`Counts` of all workers, which vLLM sends to the process that logs as `data`, a dict."""

    def _counts(self) -> Counts:
        return Counts(**self.data)

    def reset(self) -> None:
        """Forget all."""
        self.data = asdict(Counts())

    def is_empty(self) -> bool:
        """Whether nothing has ended."""
        return not self._counts()

    def aggregate(self, other: Any) -> Any:
        """Add another's."""
        both = self._counts()
        both.add(Counts(**other.data))
        self.data = asdict(both)
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log line says of some time."""
        counts = self._counts()
        loads, seconds, nbytes = len(counts.load_seconds), sum(counts.load_seconds), sum(counts.load_bytes)
        return {
            "Num loads": loads,
            "Avg load time (ms)": round(1e3 * seconds / loads, 3) if loads else 0,
            "Avg MB per load": round(nbytes / loads / 2**20, 3) if loads else 0,
            "Num failed loads": counts.load_failures,
            "Num offers released": counts.offers,
            "Num offers nobody fetched": counts.offers_lost,
        }


class KvxferPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # likewise
    """`Counts` of each engine as `vllm:kvxfer_*`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: Final = {name: self._made(name, text) for name, text in _METRICS.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take what has ended in one step of an engine."""
        for name, found in transfer_stats_data.items():
            metric = self._metrics[name][engine_idx]
            if name in _BUCKETS:
                for value in found:
                    metric.observe(value)
            else:
                metric.inc(found)

    def _made(self, name: str, text: str) -> Mapping[int, Any]:
        given: dict[str, Any] = {"name": f"vllm:kvxfer_{name}", "documentation": text, "labelnames": self._labelnames}
        metric = (
            self._histogram_cls(buckets=_BUCKETS[name], **given) if name in _BUCKETS else self._counter_cls(**given)
        )
        return {engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()}


class _Extra(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `kv_connector_extra_config` may hold."""

    kvxfer: dict[str, Any] = {}  # settings as `kvxfer.Config` has them
    # whether offers grow by layers and, without prefix caching, loads run inside of the forward pass that needs them
    layerwise: bool = False
    layerwise_timeout: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 2.0  # seconds that a pass waits
    key_file: str | None = None  # holds the engine's key where a router makes tickets as well
    bidirectional_kv_xfer: bool = False  # whether a decode engine hands back what it holds when a request ends
    trust_layout: bool = False  # whether what views say of caches is believed

    @classmethod
    def read(cls, given: dict[str, Any]) -> "_Extra":
        """It, or `ConfigError` if a name is not known, or a value cannot be taken."""
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            names = ", ".join(cls.__struct_fields__)
            raise ConfigError(f"kv_connector_extra_config, which may hold {names}: {error}") from error

    def read_key(self) -> bytes | None:
        """The engine's key; None if nobody else makes tickets."""
        try:
            return None if self.key_file is None else Path(self.key_file).read_bytes()
        except (OSError, ValueError) as error:
            raise ConfigError(f"key_file in kv_connector_extra_config: {error}") from error


class KvxferConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # likewise
    """Hands requests of a prefill engine over to decode engines. Any engine may be both."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        join_logs("vllm")
        parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
        if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
            raise ConfigError("this connector cannot describe caches whose tokens are spread over ranks (DCP, PCP)")
        extra = _Extra.read(transfer.kv_connector_extra_config)
        layerwise, back = extra.layerwise, extra.bidirectional_kv_xfer
        groups = block_groups(kv_cache_config)
        # vLLM takes failed blocks, and loads inside of a step, only where a request has all blocks before them
        simple = [group.window for group in groups] == [None] and len(kv_cache_config.kv_cache_groups) == 1
        # it counts the blocks of a load inside of a step as cached before they are: another request may hit them, and
        # they stay in its cache if their own has gone when the load fails
        cached = bool(vllm_config.cache_config.enable_prefix_caching)
        # where steps overlap the next one reads what this one could not load, and its tokens are believed, unless the
        # request ends with the load; so it is with model runner V2, which goes on behind what it is to compute again
        believed = transfer.kv_load_failure_policy != "fail" and (
            vllm_config.max_concurrent_batches > 1 or vllm_config.use_v2_model_runner
        )
        in_steps = layerwise and simple and not cached and not believed and transfer.kv_role != "kv_producer"
        stateful = any(group.state for group in groups)
        # of a layer with attention and state vLLM says only when the attention is through, and when a micro-batch is
        whole = stateful or parallel.enable_dbo or parallel.ubatch_size > 1
        if stateful and vllm_config.cache_config.use_replayssm:
            raise ConfigError(
                "with --use-replayssm a request has state beside its cache: this connector cannot hand over"
            )
        if role is KVConnectorRole.SCHEDULER:
            answers = back and all(group.window is None for group in groups)
            shown = vllm_config.model_config.multimodal_config
            self._scheduler = SchedulerSide(
                groups,
                cached=cached,
                layerwise=in_steps,
                key=extra.read_key(),
                answers=answers,
                named=cached or shown is None or shown.mm_processor_cache_gb > 0,
                patience=_CLAIMED_SECONDS if back or transfer.kv_role == "kv_both" else math.inf,
            )
            if layerwise and not in_steps and transfer.kv_role != "kv_producer":
                why = "prefix caching is on" if cached else "kv_load_failure_policy is not fail, and steps overlap"
                why = why if simple else "there are several groups of blocks, windows or state"
                offers = "as well" if whole else "are by layer"
                _log.warning("layerwise_refused", reason=f"{why}: loads are whole, offers {offers}")
            return
        from kvxfer.config import Config
        from kvxfer.integrations.vllm.worker import WorkerSide

        model = vllm_config.model_config
        size: int = parallel.tensor_parallel_size
        self._place: Final = Place(parallel.rank % size, size)
        spoken = getattr(vllm_config.speculative_config, "draft_model_config", None)
        heads = [one.get_total_num_kv_heads() for one in (model, spoken) if one is not None]
        self._model: Final = Model(model.get_total_num_hidden_layers(), *heads)
        settings = extra.kvxfer | {"rank": parallel.rank, "world": parallel.world_size}
        self._trust_layout: Final = extra.trust_layout
        config = Config.load(**settings)
        settings["model"] = _known_as(model, config.model if "model" in config.model_fields_set else None)
        ours: dict[str, Any] = {"engine": transfer.engine_id}
        if extra.key_file is None:  # else prompts may be claimed before they are computed, and queue for long
            ours["unclaimed_timeout"] = _UNCLAIMED_SECONDS
        indexed = any(group.indexed for group in groups)
        if in_steps and not indexed and config.arena_bytes:
            ours["route"] = "staged"  # peers write no blocks, so a load that takes too long can be given up at once
        ours = {name: value for name, value in ours.items() if name not in config.model_fields_set}
        held = [group.name for group in groups if kv_cache_config.kv_cache_groups[group.index].layer_names]
        config = Config.load(**settings | ours)
        self._worker = WorkerSide(
            config,
            held,
            layerwise=layerwise and not whole,
            by_block=simple,
            patience=extra.layerwise_timeout,
            # model runner V2 zeroes the blocks of a step before it says whose they were
            late=vllm_config.use_v2_model_runner and kv_cache_config.needs_kv_cache_zeroing,
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether vLLM drops what a step has sampled for a request that was preempted meanwhile.

        In any role: any engine may hand requests on, and the step may have read a load that failed, of which vLLM does
        not find the request any more.
        """
        return True

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Hooks between layers are not called by a graph of the whole model."""
        return bool(extra_config.get("layerwise"))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvxferStats:
        """What workers counted, in the process that logs."""
        return KvxferStats(data=asdict(Counts()) if data is None else data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> KvxferPromMetrics:
        """See `KvxferPromMetrics`."""
        return KvxferPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def get_kv_connector_stats(self) -> KvxferStats | None:
        """What has ended since the last step; nothing in the scheduler's process, where nothing does."""
        counts = None if self.role is KVConnectorRole.SCHEDULER else self._worker.ledger.take()
        return KvxferStats(data=asdict(counts)) if counts else None

    # --- in the scheduler's process

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], KvxferHandshake]) -> None:
        """Take the workers' cards."""
        page = max((handshake.page for handshake in metadata.values()), default=0)
        self._scheduler.collect([handshake.card for handshake in metadata.values()], page=page)

    def on_new_request(self, request: Any) -> None:
        """See `SchedulerSide`."""
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `SchedulerSide`."""
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Groups whose blocks vLLM need not zero: none, as nothing is loaded behind a block's last token.

        What another request left there may be no number for a group of another dtype.
        """
        return ()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See `SchedulerSide`."""
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvxferMetadata:
        """See `SchedulerSide`."""
        return KvxferMetadata(self._scheduler.build_connector_meta(scheduler_output))

    def has_pending_push_work(self) -> bool:
        """Whether the engine should step without requests: ranks join their engine with its first step."""
        return self._scheduler.pending

    def update_connector_output(self, connector_output: Any) -> None:
        """See `SchedulerSide`."""
        self._scheduler.update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `SchedulerSide`."""
        return self._scheduler.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Likewise."""
        return self._scheduler.request_finished(request, block_ids)

    # --- in a worker's process

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register the caches. Blocks."""
        layers = self._vllm_config.compilation_config.static_forward_context
        told = self._kv_cache_config, self._place, self._model, layers
        found = describe(kv_caches, *told, release=str(vllm.__version__), trusted=self._trust_layout)
        self._worker.register(found)

    def get_handshake_metadata(self) -> KvxferHandshake | None:
        """This rank's card; another one after each wake-up."""
        card = self._worker.card
        return None if card is None else KvxferHandshake(card, self._worker.page)

    def unregister_kv_caches(self) -> None:
        """Go to sleep: the memory is about to be given up."""
        self._worker.unregister()

    def restore_kv_caches(self) -> None:
        """Wake up: the memory is back."""
        self._worker.restore()

    def handle_preemptions(self, kv_connector_metadata: KvxferMetadata) -> None:
        """Return once nobody reads blocks that this step may overwrite."""
        self._worker.preempt(kv_connector_metadata.orders)

    def bind_connector_metadata(self, connector_metadata: KvxferMetadata) -> None:
        """Begin a step. Offers by layer begin here, as `start_load_kv` may come after the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin_step(connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's fetches."""
        self._worker.loads.begin(self._get_connector_metadata().orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for a layer that this step's forward pass reads."""
        self._worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer of this step is ready, once the work that was queued so far is done."""
        self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """All layers of this step are."""
        self._worker.offers.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Requests whose offers are over, and requests whose loads are, each once; and which of these failed."""
        sent, received = self._worker.poll(finished_req_ids)
        return KVConnectorTransferResults(
            finished_sending=sent, finished_recving=received, failed_recving=self._worker.loads.take_failed(received)
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that hold nothing usable, in the step in which their request is named, or before."""
        return self._worker.loads.take_failed_blocks()

    def shutdown(self) -> None:
        """Close the service. The scheduler's side has none."""
        if self.role is KVConnectorRole.WORKER:
            self._worker.close()


def _known_as(model: Any, given: str | None) -> str:
    """A model by the name that was given, or its own, and by what else decides what is cached of a token."""
    rope: Any = getattr(model.hf_text_config, "rope_parameters", None) or {}
    kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, Mapping)]  # it may be by kinds of layers
    first = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    name = f"{model.model}, revision {model.revision}" if model.revision else str(model.model)
    name = name if given is None else given  # empty: any model will do
    long = any(model.max_model_len > tokens for tokens in first)  # vLLM then turns K of all prompts by other angles
    return f"{name}, long factors of RoPE" if name and long else name
