"""One engine: its ranks, and the queues of its scheduler, stepped in the order in which sglang's event loops call.

sglang runs a scheduler a rank, and these agree on how each request stands by the least of all ranks. Here one thread
steps all ranks of an engine, and takes the least. Pages are on a GPU where there is one.
"""

import logging
import math
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import sglang_stand_in
import torch
from sglang_stand_in import query_prefill_dp_ranks

LAYERS, PAGES, PAGE, HEADS, DIM, ROWS = 2, 32, 4, 4, 8, 8
UNTOUCHED = -1.0
LOG: deque[str] = deque(maxlen=1000)
"""What this process has logged."""


class _Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        LOG.append(record.getMessage())


logging.getLogger("kvxfer").addHandler(_Listener())


def content(room: int, tokens: range, layer: int, half: int, heads: range) -> torch.Tensor:
    """K or V of some tokens: `[tokens, heads, DIM]`."""
    token, head, at = torch.meshgrid(
        *(torch.arange(axis.start, axis.stop) for axis in (tokens, heads, range(DIM))), indexing="ij"
    )
    return ((room * 7919 + layer * 1009 + half * 503 + head * 211 + token * 17 + at) % 9973).float()


class Group:
    """Ranks that come together, each in a thread."""

    def __init__(self, ranks: int) -> None:
        self._told: dict[int, Any] = {}
        self._barrier = threading.Barrier(ranks, timeout=60)

    def of(self, rank: int) -> Any:
        def all_gather_object(told: Any) -> list[Any]:
            self._told[rank] = told
            self._barrier.wait()
            found = [self._told[one] for one in sorted(self._told)]
            self._barrier.wait()
            return found

        return SimpleNamespace(all_gather_object=all_gather_object)


class Rank:
    """One rank: its pages, its rows of metadata, its manager."""

    def __init__(self, told: dict[str, Any], rank: int, group: Group, classes: Any) -> None:
        size: int = told["tp"]
        held = max(1, HEADS // size)
        first = rank * HEADS // size
        self.heads = range(first, first + held)
        self.latent: bool = told["latent"]
        inner = (DIM,) if self.latent else (held, DIM)
        halves = 1 if self.latent else 2
        device = torch.device("cuda", rank % gpus) if (gpus := torch.cuda.device_count()) else torch.device("cpu")
        self.pools = [torch.full((PAGES, PAGE, *inner), UNTOUCHED, device=device) for _ in range(LAYERS * halves)]
        self.rooms = torch.zeros((ROWS, 8), dtype=torch.int64)
        self.tokens = torch.zeros((ROWS, 16), dtype=torch.int32)
        self.enter(told, rank, group)
        args = SimpleNamespace(
            engine_rank=rank,
            system_dp_rank=told["dp_rank"],
            gpu_id=device.index or 0,
            kv_data_ptrs=[pool.data_ptr() for pool in self.pools],
            kv_data_lens=[pool.nbytes for pool in self.pools],
            kv_item_lens=[pool[0].nbytes for pool in self.pools],
            kv_layer_ids=[],
            kv_cache_dtype_str=told["dtype"],
            kv_layout=None,
            page_size=PAGE,
            aux_data_ptrs=[rows.data_ptr() for rows in (self.rooms, self.tokens)],
            aux_data_lens=[rows.nbytes for rows in (self.rooms, self.tokens)],
            aux_item_lens=[rows[0].nbytes for rows in (self.rooms, self.tokens)],
            state_types=told["state_types"],
        )
        if told["role"] == "PREFILL" and not self.latent:
            args.kv_head_num, args.total_kv_head_num = held, HEADS
        model = SimpleNamespace(get_total_num_kv_heads=lambda: HEADS)
        server = SimpleNamespace(model_path="m", model_config=model)
        mode = sglang_stand_in.DisaggregationMode[told["role"]]
        self.manager = classes("MANAGER")(args, mode, server, self.latent)

    def enter(self, told: dict[str, Any], rank: int, group: Group) -> None:
        """What this thread's `get_parallel` and so on say from now on."""
        context = sglang_stand_in.context
        context.parallel = SimpleNamespace(
            attn_tp_rank=rank,
            attn_tp_size=told["tp"],
            attn_tp_group=group.of(rank),
            attn_dp_rank=told["dp_rank"],
            attn_dp_size=told["dp_size"],
            dp_size=1,
            pp_size=told["pp_size"],
            attn_cp_size=1,
            attn_dcp_size=1,
            enable_kv_cache_sharding=told["sharded"],
            load_balance_method=told["load_balance"],
            dist_init_addr=None,
        )
        context.serving = SimpleNamespace(host="0.0.0.0")
        context.disagg = SimpleNamespace(
            disaggregation_bootstrap_port=told["port"], disaggregation_decode_allocation_policy=told["policy"]
        )
        context.environment = {
            "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": told["bootstrap_timeout"],
            "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": told["waiting_timeout"],
            "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE": told["deferred"],
            "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK": told["force_query"],
            "SGLANG_DISAGG_STAGING_BUFFER": told["staging"],
            "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": told["mem_pool"],
            "SGLANG_PLUGINS": "kvxfer",
        }

    def pool(self, layer: int, half: int) -> torch.Tensor:
        return self.pools[half * LAYERS + layer]

    def each(self, room: int, tokens: range) -> Any:
        """Every pool with what these tokens are in it."""
        for layer in range(LAYERS):
            for half in range(1 if self.latent else 2):
                wanted = content(room, tokens, layer, half, range(1) if self.latent else self.heads)
                wanted = (wanted[:, 0] if self.latent else wanted).to(self.pools[0].device)
                yield self.pool(layer, half), wanted

    def compute(self, room: int, pages: list[int], tokens: range) -> None:
        """The forward pass."""
        for pool, wanted in self.each(room, tokens):
            for token, row in zip(tokens, wanted, strict=True):
                pool[pages[token // PAGE], token % PAGE] = row

    def holds(self, room: int, pages: list[int], tokens: range) -> bool:
        return all(
            torch.equal(torch.stack([pool[pages[token // PAGE], token % PAGE] for token in tokens]), wanted)
            for pool, wanted in self.each(room, tokens)
        )

    def is_untouched(self, pages: list[int]) -> bool:
        return all(bool((pool[pages] == UNTOUCHED).all()) for pool in self.pools)


class Engine:
    """The queues of sglang's scheduler, for prefill or for decode."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        sglang_stand_in.context.environment = {"SGLANG_PLUGINS": "kvxfer"}
        from kvxfer.integrations.sglang import plugin

        plugin()
        self.server = None
        if told["role"] == "PREFILL" and not told["port"]:
            self.server = self.classes("BOOTSTRAP_SERVER")(host="127.0.0.1", port=0)
            told["port"] = self.server._meeting.port
        self.group = Group(told["tp"])
        self.ranks: list[Any] = [None] * told["tp"]
        self.errors: list[BaseException] = []
        threads = [threading.Thread(target=self._open, args=(rank,)) for rank in range(told["tp"])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        coarse = sglang_stand_in.settings.get("SGLANG_FORCE_COARSE_WAR_BARRIER", False)
        assert coarse == (told["role"] == "DECODE"), "fetches wait for the pass under way"
        self.free = list(range(1, PAGES))
        self.requests: dict[int, SimpleNamespace] = {}
        self._used: set[int] = set()  # pages that were written once

    def _open(self, rank: int) -> None:
        try:
            self.ranks[rank] = Rank(self.told, rank, self.group, self.classes)
        except BaseException as error:  # noqa: BLE001 - told to whoever opens the engine
            self.errors.append(error)

    @staticmethod
    def classes(kind: str) -> Any:
        """What sglang's `get_kv_class` gives for the backend `nixl`, with the hook of the plugin."""
        hook = sglang_stand_in.hooks["sglang.srt.disaggregation.utils.get_kv_class"]
        found = hook(
            lambda backend, kind: (backend.name, kind.name),
            sglang_stand_in.TransferBackend.NIXL,
            sglang_stand_in.KVClassType[kind],
        )
        assert not isinstance(found, tuple), "the plugin has not taken its place"
        assert sglang_stand_in.settings["SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"] == math.inf
        return found

    # --- what a test asks for

    def said(self, what: str) -> bool:
        """Whether a line of this process's log holds this."""
        return any(what in line for line in LOG)

    def setting(self, name: str) -> Any:
        return getattr(self.ranks[0].manager.rooms.worker.config, name)

    def port(self) -> int:
        return self.told["port"]

    def add(
        self, room: int, length: int, prefix: int = 0, *, hold: bool = False, late: bool = False, address: str = ""
    ) -> None:
        """A request arrives: `prefix` tokens of it are in the cache of a decode engine."""
        request = SimpleNamespace(room=room, length=length, prefix=prefix, hold=hold, late=late, queue="bootstrap")
        request.pages, request.row = [], -1
        request.sent, request.failure, request.exact = request.prefix, "", True
        request.state = "live"
        kind = "SENDER" if self.told["role"] == "PREFILL" else "RECEIVER"
        address = address or f"127.0.0.1:{self.told['port']}"
        made = self.classes(kind)
        request.peers = [made(rank.manager, address, room) for rank in self.ranks]
        self.requests[room] = request

    def state(self, room: int) -> tuple[str, str]:
        return self.requests[room].state, self.requests[room].failure

    def waits(self, room: int) -> bool:
        """Whether the prompt may be computed."""
        return self.requests[room].queue == "waiting"

    def sent(self, room: int) -> int:
        return self.requests[room].sent

    def fetches(self, room: int) -> bool:
        return self.requests[room].queue == "transfer"

    def fail_rank(self, room: int, rank: int) -> None:
        """A transfer breaks at one rank, whatever breaks it."""
        peer = self.requests[room].peers[rank]
        peer._inner._reason = "it broke"
        peer._inner.abort()

    def pretend_rank(self, dp_rank: int) -> None:
        """Another data-parallel rank registers, which nobody reaches."""
        from dataclasses import replace

        from kvxfer.integrations.sglang.meeting import register

        engine = replace(self.ranks[0].manager._engine, dp_rank=dp_rank)
        register(f"127.0.0.1:{self.told['port']}", engine)

    def abort(self, room: int) -> None:
        for peer in self.requests[room].peers:
            peer.abort()

    def idle(self) -> bool:
        """Every page is free again, and no worker has anything under way."""
        return len(self.free) == PAGES - 1 and all(rank.manager.rooms.worker.idle for rank in self.ranks)

    def sleep_and_wake(self) -> None:
        """As sglang does it around a change of weights."""
        threads = []
        for rank in self.ranks:
            rank.manager.deregister_buffer_to_engine()
        for at, rank in enumerate(self.ranks):

            def wake(at: int = at, rank: Any = rank) -> None:
                rank.enter(self.told, at, self.group)
                rank.manager.register_buffer_to_engine()

            threads.append(threading.Thread(target=wake))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.ranks[0].manager._registering.join(20)

    def close(self) -> None:
        for rank in self.ranks:
            rank.manager.teardown()
        if self.server is not None:
            self.server.close()

    def step(self) -> dict[int, str]:
        """One turn of the event loop."""
        if self.told["role"] == "PREFILL":
            self._pop_bootstrapped()
            self._resolve_waiting_queue_bootstrap()
            self._run_batch()
            self._process_inflight_queue()
        else:
            self._resolve_deferred_releases()
            self._ensure_prefill_info()
            self._pop_preallocated()
            self._pop_transferred()
        return {room: request.state for room, request in self.requests.items()}

    # --- both

    def _in(self, queue: str) -> list[SimpleNamespace]:
        return [request for request in self.requests.values() if request.queue == queue]

    def _poll(self, request: SimpleNamespace) -> int:
        return min(peer.poll() for peer in request.peers)

    def _why(self, request: SimpleNamespace) -> None:
        for peer in request.peers:
            try:
                peer.failure_exception()
            except Exception as error:  # noqa: BLE001 - as sglang does
                if not getattr(error, "is_from_another_rank", False):
                    request.failure = request.failure or str(error)

    def _release(self, request: SimpleNamespace, state: str) -> None:
        self.free += request.pages
        request.pages, request.state, request.queue = [], state, "done"

    # --- prefill

    def _pop_bootstrapped(self) -> None:
        for request in self._in("bootstrap"):
            poll = self._poll(request)
            if poll == 0:
                self._why(request)
                self._release(request, "failed")
            elif poll == 2:
                prefixes = {peer.pop_decode_prefix_len() for peer in request.peers}
                request.prefix = request.sent = max(prefixes)
                request.row = request.room % ROWS
                count = -(-(request.length - request.prefix) // PAGE)
                for peer in request.peers:
                    peer.init(count, request.row)
                request.queue = "waiting"
            else:
                assert poll == 1, poll

    def _resolve_waiting_queue_bootstrap(self) -> None:
        for request in self._in("waiting"):
            if self._poll(request) == 0:
                self._why(request)
                self._release(request, "failed")

    def _run_batch(self) -> None:
        """One chunk of each prompt that waits: sglang sends whole pages, and the rest with the last chunk."""
        for request in self._in("waiting"):
            if request.hold:
                continue
            if not request.pages:
                count = -(-request.length // PAGE)
                request.pages, self.free = self.free[:count], self.free[count:]
                request.computed = 0
            stop = min(request.length, request.computed + self.told["chunk"])
            last = stop == request.length
            for rank in self.ranks:
                rank.compute(request.room, request.pages, range(request.computed, stop))
            request.computed = stop
            end = stop if last else stop // PAGE * PAGE
            if last:
                for rank in self.ranks:
                    rank.rooms[request.row, 0] = request.room
                    rank.tokens[request.row] = torch.arange(16) + request.room
                request.queue = "inflight"
            pages = request.pages[request.sent // PAGE : -(-end // PAGE)]
            for peer in request.peers:
                if peer.should_send_kv_chunk(len(pages), last):
                    peer.send(torch.tensor(pages, dtype=torch.int32).numpy(), None, num_kv_tokens=end - request.sent)
            request.sent = max(request.sent, end)

    def _process_inflight_queue(self) -> None:
        for request in self._in("inflight"):
            poll = self._poll(request)
            if poll in (2, 3):
                continue
            assert poll in (0, 4), poll
            if poll == 4:
                for peer in request.peers:
                    peer.clear()
                self._release(request, "done")
            else:
                self._why(request)
                self._release(request, "failed")

    # --- decode

    def _resolve_prefill_dp_rank(self, request: SimpleNamespace) -> int | None:
        info = self.ranks[0].manager.prefill_info_table.get(request.peers[0].bootstrap_addr)
        if info is None:
            return None
        if info.dp_size == 1:
            return 0
        return request.room % info.dp_size if info.follow_bootstrap_room and not self.told["force_query"] else None

    def _ensure_prefill_info(self) -> None:
        for request in self._in("bootstrap"):
            address = request.peers[0].bootstrap_addr
            if all(rank.manager.try_ensure_parallel_info(address) for rank in self.ranks):
                dp_rank = self._resolve_prefill_dp_rank(request)
                if dp_rank is None:
                    found = query_prefill_dp_ranks(address, [request.room])
                    if (dp_rank := found.get(str(request.room))) is None:
                        continue
                for peer in request.peers:
                    peer.init(dp_rank)
                request.queue = "prealloc"

    def _pop_preallocated(self) -> None:
        for request in self._in("bootstrap") + self._in("prealloc"):
            poll = self._poll(request)
            if poll == 0:
                self._why(request)
                for peer in request.peers:
                    peer.clear()
                self._release(request, "failed")
            elif poll == 2 and request.queue == "prealloc" and not request.hold:
                count = -(-request.length // PAGE)
                request.pages, self.free = self.free[:count], self.free[count:]
                request.row = (request.room + 3) % ROWS
                for rank in self.ranks:
                    for pool in rank.pools:
                        pool[request.pages] = UNTOUCHED
                    if request.prefix:
                        rank.compute(request.room, request.pages, range(request.prefix))
                self._ask(request, request.peers[:1] if request.late else request.peers)
                request.queue = "transfer"
            else:
                assert poll in (1, 2), poll

    def _ask(self, request: SimpleNamespace, peers: list[Any]) -> None:
        pages = torch.tensor(request.pages[request.prefix // PAGE :], dtype=torch.int32).numpy()
        for peer in peers:
            peer.send_metadata(pages, request.row, [], decode_prefix_len=request.prefix)

    def ask_late(self, room: int) -> None:
        """All ranks but the first have been slow."""
        self._ask(self.requests[room], self.requests[room].peers[1:])

    def _pop_transferred(self) -> None:
        for request in self._in("transfer"):
            polls = [peer.poll() for peer in request.peers]
            for at, rank in enumerate(self.ranks):  # metadata that has not landed
                if polls[at] == 4 and not rank.rooms[request.row, 0]:
                    polls[at] = 3
            if min(polls) == 4:
                self._commit(request)
                for peer in request.peers:
                    peer.clear()
                self._forget(request)
                self._release(request, "done")
            elif min(polls) == 0:
                self._failed(request)

    def _commit(self, request: SimpleNamespace) -> None:
        """Decoding may begin: what does it begin with?"""
        expected = torch.arange(16, dtype=torch.int32) + request.room
        request.exact = all(
            rank.holds(request.room, request.pages, range(request.length))
            and int(rank.rooms[request.row, 0]) == request.room
            and torch.equal(rank.tokens[request.row], expected)
            and rank.is_untouched([page for page in self.free if page not in self._used])
            for rank in self.ranks
        )
        self._used |= set(request.pages)

    def exact(self, room: int) -> bool:
        return self.requests[room].exact

    def _failed(self, request: SimpleNamespace) -> None:
        self._why(request)
        self._used |= set(request.pages)
        for peer in request.peers:
            if peer.kv_mgr.enable_deferred_decode_kv_release and not peer.abort_notified:
                peer.ensure_abort_notified(force_arm=True)
        if any(peer.kv_mgr.enable_deferred_decode_kv_release and peer.abort_notified for peer in request.peers):
            request.queue = "deferred"
            request.state = "deferred"
            return
        pages = request.pages
        self._release(request, "failed")
        for peer in request.peers:
            peer.clear()
        self._check_safe(request, pages)
        self._forget(request)

    def _resolve_deferred_releases(self) -> None:
        for request in self._in("deferred"):
            ready = [
                peer.kv_mgr.is_abort_release_safe(request.room, len(peer.bootstrap_infos)) for peer in request.peers
            ]
            if all(ready):
                self._check_safe(request, request.pages)  # before `clear`, which would have to wait
                self._release(request, "failed")
                for peer in request.peers:
                    peer.kv_mgr.clear_deferred_abort_state(request.room)
                    peer.clear()
                self._forget(request)

    def _check_safe(self, request: SimpleNamespace, pages: list[int]) -> None:
        """sglang gives the pages to others: kvxfer must not hold them any more."""
        for rank in self.ranks:
            worker = rank.manager.rooms.worker
            held = worker.describe_soon().result(20)["custody"].holders
            assert not held, (request.room, pages, held)

    def _forget(self, request: SimpleNamespace) -> None:
        for rank in self.ranks:
            rank.rooms[request.row] = 0
