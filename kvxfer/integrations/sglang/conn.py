"""The classes that sglang makes: they bring its calls and numbers into kvxfer's, and know nothing of transfers.

A manager is made once in each scheduler's process, a sender or a receiver for each request of its engine. All are
called from the scheduler's thread.
"""

# sglang is not installed where types are checked
# pyright: reportMissingImports=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

import math
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

import torch

from kvxfer.blocking import BlockingWorker
from kvxfer.config import Config
from kvxfer.errors import ConfigError, FabricError, KvxferError, MissingExtraError, UnreachableError
from kvxfer.integrations.heads import Place
from kvxfer.integrations.sglang.caches import Rows, describe
from kvxfer.integrations.sglang.meeting import Directory, Engine, Meeting, ask, keep_registering, register_room
from kvxfer.integrations.sglang.rooms import Receiving, Rooms, Sending, request_of
from kvxfer.telemetry import logger
from kvxfer.tickets import KEY_BYTES, EngineCard

try:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.disaggregation.base.conn import (
        BaseKVBootstrapServer,
        BaseKVManager,
        BaseKVReceiver,
        BaseKVSender,
        KVTransferDestination,
        KVTransferMetric,
    )
    from sglang.srt.disaggregation.utils import DisaggregationMode, KVClassType, TransferBackend
    from sglang.srt.environ import envs
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.runtime_context import get_disagg, get_parallel, get_serving
except ModuleNotFoundError as exc:
    if exc.name is None or exc.name.split(".")[0] != "sglang":
        raise
    raise MissingExtraError(
        "kvxfer.integrations.sglang.conn needs sglang, which is not installed: pip install sglang"
    ) from exc

__all__ = ["KvxferKVBootstrapServer", "KvxferKVManager", "KvxferKVReceiver", "KvxferKVSender", "install"]

_log: Final = logger("kvxfer.sglang")
_PLUGIN: Final = "kvxfer"
_QUERIES_AT_ONCE: Final = 64  # two a prefill server are under way
_ANSWER_SECONDS: Final = 0.5
_ANYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - what is connected to instead


class KvxferKVManager(BaseKVManager):  # type: ignore[misc]  # its base is Any there
    """One rank of an engine: its worker, and where it finds the other engines."""

    supports_deferred_decode_kv_release = True

    def __init__(self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: Any = False) -> None:
        parallel = get_parallel()
        _check(parallel)
        self.kv_args = args
        self.prefill_info_table: dict[str, Directory] = {}  # by address of their bootstrap servers
        self.prefilling: Final = disaggregation_mode is DisaggregationMode.PREFILL
        if not self.prefilling:  # the pass under way may still write in pages that another request is given by now
            envs.SGLANG_FORCE_COARSE_WAR_BARRIER.set(True)  # so the stream whose events fetches wait for waits for it
        self.enable_deferred_decode_kv_release = envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get()
        whole = parallel.dp_size == 1  # of data parallelism; within attention there may be some
        self.dp_size = parallel.attn_dp_size if whole else parallel.dp_size
        self.dp_rank = parallel.attn_dp_rank if whole else args.system_dp_rank or 0
        self._by_room = parallel.load_balance_method == "follow_bootstrap_room"
        self.is_asked = not self._by_room or envs.SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK.get()
        self.says_where = self.dp_size > 1 and self.is_asked and parallel.attn_tp_rank == 0
        self._queries: Final = ThreadPoolExecutor(_QUERIES_AT_ONCE, thread_name_prefix="kvxfer-sglang-query")
        self._asked: Final[set[str]] = set()  # addresses that are asked now
        self._registering: threading.Thread | None = None
        device = torch.device("cuda", args.gpu_id) if torch.cuda.is_available() else torch.device("cpu")
        total = 0 if is_mla_backend else _total_heads(args, server_args)
        place = Place(parallel.attn_tp_rank, parallel.attn_tp_size)
        self._tensors = describe(args, device, place, total, latent=bool(is_mla_backend))
        timeouts = envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT, envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT
        bootstrap, waiting = (float(timeout.get()) for timeout in timeouts)
        worker = BlockingWorker(_settings(server_args, parallel, self.dp_rank, bootstrap + waiting, self.prefilling))
        self.rooms = Rooms(
            worker=worker,
            page_tokens=args.page_size,
            rows=Rows(args.aux_data_ptrs, args.aux_item_lens),
            device=device,
            patience=bootstrap if self.prefilling else waiting,
        )
        self.register_buffer_to_engine()

    def register_buffer_to_engine(self) -> None:
        """Open the worker, with all ranks of the engine at once. Also after memory has come back."""
        worker = self.rooms.worker
        worker.register(self._tensors)
        told = get_parallel().attn_tp_group.all_gather_object((worker.card.to_dict(), secrets.token_hex(KEY_BYTES)))
        card, key = EngineCard.of([rank for rank, _ in told]), told[0][1]
        worker.join(card, key=bytes.fromhex(key))
        args, dtype = self.kv_args, self.kv_args.kv_cache_dtype_str or ""
        self._engine = Engine(self.dp_rank, self.dp_size, card.to_dict(), key, args.page_size, dtype, self._by_room)
        if self.prefilling:
            self.register_to_bootstrap()

    def deregister_buffer_to_engine(self) -> None:
        """Let go of the memory before sglang gives it up.

        Raises:
            FabricError: If a silent peer may still touch it.
        """
        if not self.rooms.worker.unregister():
            raise FabricError("a silent peer may still touch pages of this pool: its memory must not be given up")

    def register_to_bootstrap(self) -> None:
        """Tell the bootstrap server of this engine; its first rank does. It may begin later than this rank."""
        if get_parallel().attn_tp_rank == 0:
            self.meets_at = _bootstrap_address()
            self._registering = keep_registering(self.meets_at, self._engine, self.rooms.patience)

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Whether a prefill server is known whose pages are as here; asks for it if not.

        sglang asks again for a while, and then fails the request: another one may name another server. One that lives
        answers at once, and for one whose host is gone all that is decoded here does not wait.
        """
        if bootstrap_addr not in self.prefill_info_table and bootstrap_addr not in self._asked:
            self._asked.add(bootstrap_addr)
            with suppress(TimeoutError):
                self._queries.submit(self._find, bootstrap_addr).result(_ANSWER_SECONDS)
        return bootstrap_addr in self.prefill_info_table

    def _find(self, bootstrap_addr: str) -> None:
        """Ask for a prefill server. Blocks, in a thread of its own."""
        try:
            found = ask(bootstrap_addr)
        except UnreachableError as error:
            _log.warning("prefill_server_not_found", address=bootstrap_addr, error=str(error))
            return
        finally:
            self._asked.discard(bootstrap_addr)
        mine = self._engine
        for theirs in found.engines.values():
            if (theirs.page_tokens, theirs.dtype) != (mine.page_tokens, mine.dtype):
                why = (
                    f"it has pages of {theirs.page_tokens} tokens of {theirs.dtype}, and this one of "
                    f"{mine.page_tokens} of {mine.dtype}: give both the same --page-size and --kv-cache-dtype"
                )
                _log.error("prefill_server_refused", address=bootstrap_addr, error=why)
                return
        self.prefill_info_table[bootstrap_addr] = found

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether nobody writes the pages of a request that has failed."""
        del required_acks  # kvxfer counts by itself
        self.rooms.pump()
        return not self.rooms.is_taken(bootstrap_room)

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """Nothing: its receiver is told to clear next."""

    def submit_prefill_recompute(self, kv_receiver: Any, payload: Any) -> None:
        """Refused: a room that was used stands for one computation of a prompt."""
        del payload
        kv_receiver.refuse("kvxfer does not hand over a retracted request again")

    def _ensure_prefill_recompute_executor(self) -> ThreadPoolExecutor:
        """Where sglang's scheduler asks a bootstrap server which data-parallel ranks have its requests.

        sglang's own backends also compute retracted requests again there, which its name says.
        """
        return self._queries

    def teardown(self) -> None:
        """Stop the worker. Blocks."""
        self._queries.shutdown(wait=False, cancel_futures=True)
        self.rooms.worker.close(drain=False)


class KvxferKVSender(BaseKVSender):  # type: ignore[misc]  # likewise
    """One request at a prefill engine."""

    def __init__(
        self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, req_has_disagg_prefill_dp_rank: bool = False
    ) -> None:
        del bootstrap_addr  # a client may have named it, and nobody may live there
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self._early_send_wait_event: Any = None  # sglang sets it before it sends what is still being computed
        self._inner: Final = Sending(mgr.rooms, bootstrap_room)
        told, by_room = req_has_disagg_prefill_dp_rank, bootstrap_room % mgr.dp_size
        if not (told or mgr.is_asked) and by_room != mgr.dp_rank:  # a client has named this rank
            self._inner.fail(
                f"its decode engine asks data-parallel rank {by_room} for it, as its room says: "
                "set SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK=1 on both sides"
            )
        elif mgr.says_where and not told:
            try:
                register_room(mgr.meets_at, bootstrap_room, mgr.dp_rank)
            except UnreachableError as error:
                self._inner.fail(str(error))  # nobody will ask for it

    def init(self, num_kv_indices: int, aux_index: Any = None) -> None:
        """So many pages will be sent, and this row of metadata."""
        self._inner.begin(num_kv_indices, aux_index)

    def pop_decode_prefix_len(self) -> int:
        """Tokens that the decode engine has already."""
        return self._inner.first_token

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        """The last chunk brings the metadata, though it have no page."""
        return num_pages > 0 or last_chunk

    def send(self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: Any = None) -> None:
        """Send the next pages."""
        del num_kv_tokens  # whole pages travel
        if state_indices:
            raise ConfigError("this model has state beside its pages, which cannot be handed over by kvxfer yet")
        after, self._early_send_wait_event = self._early_send_wait_event, None
        self._inner.send(kv_indices, after)

    def mark_prefill_complete(self) -> None:
        """Nothing: pages are sent when both sides have them."""

    def get_transfer_metric(self) -> Any:
        """What was sent, as far as it is known."""
        stats = self._inner.stats
        return KVTransferMetric(
            transfer_latency_s=max((one.duration for one in stats), default=None),
            transfer_total_bytes=sum(one.bytes for one in stats) if stats else None,
        )

    def poll(self) -> Any:
        """How it stands."""
        return int(self._inner.poll())

    def poll_pp_consensus(self) -> Any:
        """The same: there is one stage."""
        return self.poll()

    def failure_exception(self) -> None:
        """Raise why it failed."""
        raise self._inner.failed()

    def clear(self) -> None:
        """It has ended."""
        self._inner.clear()

    def abort(self) -> None:
        """Give up; its pages are safe afterwards."""
        self._inner.abort()


class KvxferKVReceiver(BaseKVReceiver):  # type: ignore[misc]  # likewise
    """One request at a decode engine."""

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: Any = None) -> None:
        self.kv_mgr = mgr
        self.bootstrap_addr = bootstrap_addr
        self.bootstrap_room = bootstrap_room
        self.bootstrap_infos: list[Any] = []  # nobody acknowledges by sglang's own messages
        self.abort_notified = False  # whether sglang shall keep the pages of a failed request until they are safe
        self._inner: Final = Receiving(mgr.rooms, bootstrap_room, self._lost)

    @property
    def conclude_state(self) -> Any:
        """How it ended; None before."""
        state = self.poll()
        return state if state in (0, 4) else None

    def init(self, prefill_dp_rank: int) -> None:
        """Its prefill engine is known."""
        found = self.kv_mgr.prefill_info_table.get(self.bootstrap_addr)
        try:
            if found is None:
                raise UnreachableError("its prefill server is gone", peer=self.bootstrap_addr)
            self._inner.begin(found.ticket(prefill_dp_rank, request_of(self.bootstrap_room)))
        except KvxferError as error:
            self._inner.fail(str(error))

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: Any = None,
        state_indices: Any = None,
        decode_prefix_len: Any = None,
        destination: Any = KVTransferDestination.DEVICE,
    ) -> None:
        """Ask for it."""
        if state_indices or destination != KVTransferDestination.DEVICE:
            self._inner.fail("only pages of the device can be handed over by kvxfer, and no state")
            return
        self._inner.fetch(kv_indices, aux_index, decode_prefix_len or 0)

    def poll(self) -> Any:
        """How it stands."""
        return int(self._inner.poll())

    def failure_exception(self) -> None:
        """Raise why it failed."""
        raise self._inner.failed()

    def is_abort_release_safe(self) -> bool:
        """Whether nobody writes its pages."""
        return self._inner.over

    def refuse(self, reason: str) -> None:
        """It cannot be done."""
        self._inner.fail(reason)

    def clear(self) -> None:
        """Its pages are given to others."""
        self._inner.clear()

    def abort(self) -> None:
        """Give up; it has failed when its pages are safe."""
        self._inner.abort()
        self.ensure_abort_notified()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """It failed here or elsewhere: stop what writes its pages, and let sglang keep them until that is so."""
        del force_arm
        self._inner.abort()
        self.abort_notified = True

    def _lost(self) -> None:
        self.kv_mgr.prefill_info_table.pop(self.bootstrap_addr, None)


class KvxferKVBootstrapServer(BaseKVBootstrapServer):  # type: ignore[misc]  # likewise
    """Where decode engines find the prefill engines of a server."""

    def __init__(self, host: str, port: int) -> None:
        self._meeting: Final = Meeting(host, port)

    def close(self) -> None:
        """Stop."""
        self._meeting.close()


def install() -> None:
    """Let these classes take the place of the backend `nixl`, if `SGLANG_PLUGINS` names this plugin."""
    wanted = envs.SGLANG_PLUGINS.get() or ""
    if _PLUGIN in (name.strip() for name in wanted.split(",")):
        # pages go to others once nobody writes them, and not because a time is over
        envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT.set(math.inf)
        HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", _class_of, HookType.AROUND)


def _class_of(original: Any, transfer_backend: Any, class_type: Any) -> Any:
    """What sglang makes, by backend and kind."""
    ours = {
        KVClassType.MANAGER: KvxferKVManager,
        KVClassType.SENDER: KvxferKVSender,
        KVClassType.RECEIVER: KvxferKVReceiver,
        KVClassType.BOOTSTRAP_SERVER: KvxferKVBootstrapServer,
    }
    if transfer_backend is TransferBackend.NIXL and class_type in ours:
        return ours[class_type]
    return original(transfer_backend, class_type)


def _check(parallel: Any) -> None:
    spread = {"pp_size": "pipeline", "attn_cp_size": "context", "attn_dcp_size": "decode context"}
    for field, kind in spread.items():
        if (size := getattr(parallel, field)) > 1:
            raise ConfigError(f"{kind} parallelism cannot be handed over by kvxfer yet: {field} is {size}")
    if parallel.enable_kv_cache_sharding:
        raise ConfigError("--enable-kv-cache-sharding is not supported by kvxfer: each rank has some pages alone")
    policy = get_disagg().disaggregation_decode_allocation_policy
    if policy != "early":
        raise ConfigError(
            f"--disaggregation-decode-allocation-policy {policy} is not supported by kvxfer: leave it out"
        )
    if envs.SGLANG_DISAGG_STAGING_BUFFER.get():
        raise ConfigError(
            "SGLANG_DISAGG_STAGING_BUFFER is not supported by kvxfer, which has buffers of its own: unset it"
        )
    if envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.get() == "INTRA_NODE_NVLINK":
        raise ConfigError(
            "SGLANG_MOONCAKE_CUSTOM_MEM_POOL=INTRA_NODE_NVLINK is not supported by kvxfer: it puts rows of metadata on "
            "the GPU, where they are not read; unset it"
        )


def _total_heads(args: Any, server_args: Any) -> int:
    """KV heads of the model: of a decode engine sglang does not say them beside the pages."""
    told: int | None = getattr(args, "total_kv_head_num", None)
    return told or ModelConfig.from_server_args(server_args).get_total_num_kv_heads()


def _settings(server_args: Any, parallel: Any, dp_rank: int, patience: float, prefilling: bool) -> Config:
    """Settings of this rank: what the environment and a file say, and what follows from sglang's."""
    known = Config.load().sources()
    role = "prefill" if prefilling else "decode"
    usual: dict[str, Any] = {
        "engine": f"sglang-{role}-{dp_rank}",
        "model": server_args.model_path,
        "unclaimed_timeout": patience,  # a fetch waits here while its prompt is in sglang's queue
        "max_transfers": 16_384,  # and a decode engine may have 4,096 of them wait
    }
    given = {name: value for name, value in usual.items() if known[name] == "default"}
    return Config.load(**given, rank=parallel.attn_tp_rank, world=parallel.attn_tp_size)


def _bootstrap_address() -> str:
    """Where the bootstrap server of this prefill server is reached from its ranks."""
    serving, port = get_serving(), get_disagg().disaggregation_bootstrap_port
    leader: str | None = get_parallel().dist_init_addr
    host = leader.rpartition(":")[0] if leader else _ANYWHERE.get(serving.host, serving.host)
    return f"{host}:{port}"
