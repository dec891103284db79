"""The scheduler's process of an engine, as vLLM's engine core and scheduler call a connector there. No torch.

Two steps are under way at a time, as with async scheduling: the second is scheduled before the workers have answered
the first. What is left out is what no connector sees: sampling, budgets of several kinds, encoders, LoRA.
"""

import pickle
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import vllm_stand_in

LAYERS = 3
HEADS = 4
DIM = 4
BLOCKS = 24
STEPS_AT_ONCE = 2
STATUS = vllm_stand_in.stock("RequestStatus")
make = vllm_stand_in.make


def configured(engine: dict[str, Any], rank: int | None) -> tuple[Any, Any, Any]:
    """What vLLM passes to a connector: its configuration, the role, and what is known of the caches."""
    make, world = vllm_stand_in.make, engine["world"]
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
    spec = make(
        "FullAttentionSpec",
        block_size=engine["block_tokens"],
        num_kv_heads=HEADS // world,
        head_size=DIM,
        head_size_v=DIM,
    )
    group = make("KVCacheGroupSpec", layer_names=names, kv_cache_spec=spec, enable_kv_transfer=True)
    zeroes = engine.get("zeroes", False)
    caches = make("KVCacheConfig", num_blocks=BLOCKS, kv_cache_groups=[group], needs_kv_cache_zeroing=zeroes)
    layers = {name: vllm_stand_in.layer() for name in names}
    images = make("MultiModalConfig", mm_processor_cache_gb=engine["images"]) if "images" in engine else None
    config = make(
        "VllmConfig",
        compilation_config=make("CompilationConfig", static_forward_context=layers),
        kv_transfer_config=make(
            "KVTransferConfig",
            engine_id=engine["name"],
            kv_role=engine.get("role", "kv_both"),
            kv_connector_extra_config=engine["extra"],
            kv_load_failure_policy=engine.get("policy", "fail"),
        ),
        parallel_config=make(
            "ParallelConfig",
            rank=rank or 0,
            world_size=world,
            tensor_parallel_size=world,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            enable_dbo=False,
            ubatch_size=engine.get("ubatches", 0),
        ),
        cache_config=make("CacheConfig", enable_prefix_caching=engine.get("cached", False)),
        model_config=make(
            "ModelConfig",
            model="model",
            get_total_num_kv_heads=lambda: HEADS,
            get_total_num_hidden_layers=lambda: LAYERS,
            multimodal_config=images,
            **{"revision": None, "hf_text_config": SimpleNamespace(), "max_model_len": 512} | engine.get("model", {}),
        ),
        speculative_config=None,
        max_concurrent_batches=engine.get("batches", 1),
        use_v2_model_runner=engine.get("v2", False),
    )
    role = vllm_stand_in.stock("KVConnectorRole")
    return config, role.SCHEDULER if rank is None else role.WORKER, caches


class Workers:
    """All ranks of one engine, each behind a pipe."""

    def __init__(self, wires: list[Any]) -> None:
        self._wires = wires

    def send(self, name: str, *arguments: Any) -> None:
        message = pickle.dumps((name, arguments))
        for wire in self._wires:
            wire.send_bytes(message)

    def receive(self) -> list[Any]:
        answers = [pickle.loads(wire.recv_bytes()) for wire in self._wires]
        assert not any(error for _, error in answers), [error for _, error in answers]
        return [value for value, _ in answers]

    def call(self, name: str, *arguments: Any) -> list[Any]:
        self.send(name, *arguments)
        return self.receive()


class Blocks:
    """What `update_state_after_alloc` is told."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = list(ids)

    def get_block_ids(self) -> tuple[list[int]]:
        return (list(self._ids),)


class Engine:
    """Scheduler and engine core. A request gets at most so many tokens `each` step, and all together the budget."""

    def __init__(self, connector, workers, *, block_tokens, budget=64, each=64, blocks=BLOCKS):
        self.connector: Any = connector
        self.workers = workers
        self._block_tokens, self.budget, self._each = block_tokens, budget, each
        self.free = list(range(blocks - 1, 0, -1))  # block 0 is vLLM's null block
        self.requests: dict[str, Any] = {}
        self.tables: dict[str, list[int]] = {}
        self.seeds: dict[str, int] = {}
        self.gates: dict[str, dict[Any, str]] = {}
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.sampled: Counter[str] = Counter()
        self.ended: dict[str, str] = {}
        self.params: dict[str, Any] = {}
        self.wrong: list[str] = []
        self.reported: Counter[tuple[str, int, str]] = Counter()
        self.failed_together: list[bool] = []
        self.stats: Any = None
        self._under_way: deque[tuple[Any, dict[str, int]]] = deque()
        self._left = {"recv": Counter[str](), "send": Counter[str]()}
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._finished: set[str] = set()
        self._preempted: set[str] = set()

    def shake_hands(self):
        found = {(0, rank): one for rank, one in enumerate(self.workers.call("handshake"))}
        self.connector.set_xfer_handshake_metadata_pp_aware(found)

    def drain(self):
        """Take the answers of the steps under way."""
        while self._under_way:
            self.take()

    def sleep(self):
        """As `EngineCore.sleep` and `wake_up` of an engine without requests."""
        self.drain()
        self.workers.call("sleep")
        self.workers.call("wake_up")
        self.shake_hands()

    def close(self):
        self.drain()
        self.workers.call("close")
        self.connector.shutdown()

    # --- requests

    def add(self, request_id, seed, prompt, *, params=None, tokens=1, gates=None):
        request = make(
            "Request",
            request_id=request_id,
            kv_transfer_params=params,
            prompt_token_ids=[seed] * prompt,
            all_token_ids=[seed] * prompt,
            prompt_embeds=None,
            mm_features=[],
            lora_request=None,
            num_prompt_tokens=prompt,
            num_computed_tokens=0,
            num_preemptions=0,
            max_tokens=tokens,
            status=STATUS.WAITING,
        )
        self.requests[request_id], self.tables[request_id], self.seeds[request_id] = request, [], seed
        self.gates[request_id] = gates or {}
        self.waiting.append(request)
        self.connector.on_new_request(request)

    def finish(self, request_id):
        """As `Scheduler.finish_requests`."""
        request = self.requests.get(request_id)
        if request is None or request_id in self.ended:
            return
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        delay = request.status is STATUS.WAITING_FOR_REMOTE_KVS and request_id not in self._received
        self._received.discard(request_id)
        self._failed.discard(request_id)
        self._end(request, "FINISHED_ABORTED", delay)

    def _end(self, request, status, delay=False):
        request.status = STATUS[status]
        self.ended[request.request_id] = status
        late, params = self.connector.request_finished_all_groups(request, (list(self.tables[request.request_id]),))
        self.params[request.request_id] = params
        self._finished.add(request.request_id)
        if not (late or delay):
            self._free(request)

    def _free(self, request):
        self._release(request.request_id)
        del self.requests[request.request_id]

    def _release(self, request_id):
        self.free += self.tables[request_id]
        self.tables[request_id] = []

    def preempt(self, request_id):
        request = self.requests[request_id]
        assert request.status is STATUS.RUNNING
        self.running.remove(request)
        self._release(request_id)
        request.status, request.num_computed_tokens = STATUS.PREEMPTED, 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)
        self._preempted.add(request_id)

    # --- steps

    def step(self):
        """As `EngineCore.step_with_batch_queue`: an engine without anything to do stands still."""
        if self._has_requests():
            work = self.schedule()
            if len(self._under_way) < STEPS_AT_ONCE and (work or self._has_requests()):
                return
        self.take()

    def schedule(self):
        """Have the workers begin a step, unless as many are under way as may be."""
        if len(self._under_way) == STEPS_AT_ONCE:
            return []
        output, ends, work = self._schedule()
        self._under_way.append((output, ends))
        self.workers.send("execute", output, work)
        return work

    def take(self):
        """Hear of the first step that is under way."""
        if self._under_way:
            self._take()

    def _has_requests(self):
        return bool(self.requests or self._finished or self.connector.has_pending_push_work())

    def _schedule(self):
        scheduled: dict[str, int] = {}
        new, resumed, grown = [], set(), {}
        budget, loads_in_step = self.budget, False
        for request in list(self.running):
            count = min(self._wanted(request), budget, self._each)
            if count <= 0 or self._lacks(request, count):
                continue
            grown[request.request_id] = self._grow(request, request.num_computed_tokens + count)
            scheduled[request.request_id] = count
            budget -= count
        for request in list(self.waiting):
            if budget <= 0:
                break
            if request.status is STATUS.WAITING_FOR_REMOTE_KVS and not self._promoted(request):
                continue
            external, waits = 0, False
            if request.num_computed_tokens == 0:
                external, waits = self._place(request)
                if external is None:
                    break
            else:
                self.connector.update_state_after_alloc(request, Blocks(self.tables[request.request_id]), 0)
            if waits:
                request.status = STATUS.WAITING_FOR_REMOTE_KVS
                continue
            count = min(self._wanted(request), budget, self._each)
            if self._lacks(request, count):
                continue
            self._grow(request, request.num_computed_tokens + count)
            self.waiting.remove(request)
            self.running.append(request)
            loads_in_step |= external > 0
            (resumed.add if request.status is STATUS.PREEMPTED else new.append)(request.request_id)
            request.status = STATUS.RUNNING
            scheduled[request.request_id] = count
            budget -= count
        return self._ordered(scheduled, new, resumed, grown, loads_in_step)

    def _wanted(self, request):
        """The rest of the prompt, or one token more."""
        prompt, computed = request.num_prompt_tokens, request.num_computed_tokens
        return max(prompt - computed, int(computed < prompt + request.max_tokens - 1))

    def _lacks(self, request, count):
        """Whether there are too few blocks for so many tokens more; vLLM would let others wait for theirs then."""
        blocks = -(-(request.num_computed_tokens + count) // self._block_tokens)
        return blocks - len(self.tables[request.request_id]) > len(self.free)

    def _grow(self, request, stop):
        table = self.tables[request.request_id]
        fresh = [self.free.pop() for _ in range(-(-stop // self._block_tokens) - len(table))]
        table += fresh
        return fresh

    def _place(self, request):
        """Question to the connector, blocks, as for a request that is to run for the first time."""
        asked = [self.connector.get_num_new_matched_tokens(request, 0) for _ in range(3)]
        assert asked[0] == asked[1] == asked[2], "asking changed something"
        external, waits = asked[0]
        assert not waits or external > 0
        if -(-request.num_prompt_tokens // self._block_tokens) > len(self.free):
            return None, False
        self._grow(request, external)
        self.connector.update_state_after_alloc(request, Blocks(self.tables[request.request_id]), external)
        request.num_computed_tokens = external
        return external, waits

    def _promoted(self, request):
        """As `Scheduler._update_waiting_for_remote_kv`."""
        request_id = request.request_id
        if request_id not in self._received:
            return False
        self._received.remove(request_id)
        if request_id in self._failed:
            self._failed.remove(request_id)
            if not request.num_computed_tokens:
                self._release(request_id)
        elif request.num_computed_tokens == request.num_prompt_tokens:
            request.num_computed_tokens -= 1
        request.status = STATUS.PREEMPTED if request.num_preemptions else STATUS.WAITING
        return True

    def _ordered(self, scheduled, new, resumed, grown, loads_in_step):
        requests = {request_id: self.requests[request_id] for request_id in scheduled}
        old = [request_id for request_id in scheduled if request_id not in new]
        tables = {request_id: list(self.tables[request_id]) for request_id in scheduled}
        fresh = [tables[one] if one in resumed else grown.get(one) for one in old]
        output = make(
            "SchedulerOutput",
            scheduled_new_reqs=[
                make(
                    "NewRequestData",
                    req_id=one,
                    block_ids=(tables[one],),
                    num_computed_tokens=requests[one].num_computed_tokens,
                )
                for one in new
            ],
            scheduled_cached_reqs=make(
                "CachedRequestData",
                req_ids=old,
                resumed_req_ids=resumed,
                new_block_ids=[(ids,) if ids else None for ids in fresh],
                num_computed_tokens=[requests[one].num_computed_tokens for one in old],
            ),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            preempted_req_ids=self._preempted,
            finished_req_ids=self._finished,
            has_sync_kv_loads=loads_in_step,
        )
        output.kv_connector_metadata = self.connector.build_connector_meta(output)
        self._preempted, self._finished = set(), set()
        work, ends = [], {}
        for one, count in scheduled.items():
            start = requests[one].num_computed_tokens
            ends[one] = requests[one].num_computed_tokens = start + count
            span = {"blocks": tables[one], "start": start, "stop": start + count}
            work.append({"request": one, "seed": self.seeds[one], "gates": self.gates[one], **span})
        return output, ends, work

    # --- answers

    def _take(self):
        """As `Scheduler.update_from_output`."""
        _, ends = self._under_way.popleft()
        received, sent, invalid, wrong = self._aggregated(self.workers.receive())
        bad = self._handle_invalid(invalid, ends) if invalid else set()
        self.wrong += [one for one in wrong if one not in bad]
        for request_id, end in ends.items():
            request = self.requests.get(request_id)
            if request_id in bad or request is None or request_id in self.ended:
                continue
            if end >= request.num_prompt_tokens and request.status is STATUS.RUNNING:
                self.sampled[request_id] += 1
                if self.sampled[request_id] == request.max_tokens:
                    self.running.remove(request)
                    self._end(request, "FINISHED_LENGTH_CAPPED")
        output = make("KVConnectorOutput", finished_recving=received, finished_sending=sent)
        self.connector.update_connector_output(output)
        for request_id in received:
            request = self.requests[request_id]
            if request.status is STATUS.WAITING_FOR_REMOTE_KVS:
                self._received.add(request_id)
            else:
                assert request_id in self.ended, f"{request_id} was received while {request.status}"
                self._free(request)
        for request_id in sent:
            self._free(self.requests[request_id])

    def _aggregated(self, answers):
        """As `KVOutputAggregator`: what every rank has said."""
        whole: dict[str, set[str]] = {"recv": set(), "send": set()}
        invalid, wrong = set(), set()
        for rank, (answer, differing) in enumerate(answers):
            invalid |= answer.invalid_block_ids
            wrong |= set(differing)
            for kind, those in (("recv", answer.finished_recving), ("send", answer.finished_sending)):
                for one in those:
                    self.reported[kind, rank, one] += 1
                    self._left[kind][one] += 1
                    if self._left[kind][one] == len(answers):
                        whole[kind].add(one)
            if answer.kv_connector_stats:
                self.stats = self.stats.aggregate(answer.kv_connector_stats)
            if answer.invalid_block_ids:
                self.failed_together.append(bool(answer.finished_recving))
        return whole["recv"], whole["send"], invalid, sorted(wrong)

    def _handle_invalid(self, invalid, ends):
        """As `Scheduler._handle_invalid_blocks`; returns the requests whose output does not count."""
        dropped = set()
        for request in [*self.waiting, *self.running]:
            one = request.request_id
            loading = request.status is STATUS.WAITING_FOR_REMOTE_KVS
            if not loading and request.status is not STATUS.RUNNING:
                continue
            computed = request.num_computed_tokens if loading else ends.get(one, 0)
            table = self.tables[one][: -(-computed // self._block_tokens)]
            first = next((at for at, block in enumerate(table) if block in invalid), None)
            if first is None:
                continue
            request.num_computed_tokens = first * self._block_tokens
            if loading:
                self._failed.add(one)
            else:
                dropped.add(one)
        return dropped
