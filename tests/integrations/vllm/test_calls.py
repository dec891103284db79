"""Both sides together, in any order of vLLM's calls and of what the service says: scheduler, two ranks, no processes.

vLLM's part is as short as it can be: which blocks are free, which steps are under way, which requests still exist. What
must hold at every forward pass: no block that it writes is on offer, or is written by a fetch. And at the end: each
rank has said of each request once that it is over, and nothing is left.
"""

import itertools
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_scheduler import STATUS, Blocks, cards, received, request, side, step
from test_worker import STATS, doubt

from kvxfer.blocking import (
    Fetched,
    FetchFailed,
    OfferExpired,
    OfferInDoubt,
    OfferReleased,
    OfferSettled,
    OfferWithdrawn,
    Settled,
)
from kvxfer.config import Config
from kvxfer.errors import MemoryInDoubtError, TransferFailedError
from kvxfer.geometry import CacheTensor
from kvxfer.integrations.vllm import worker as module
from kvxfer.tickets import EngineCard, Issuer
from kvxfer.transfers import FetchResult

SIZE = 16
BLOCKS = 12
RANKS = (0, 1)
FETCHED = FetchResult("r", b"", STATS)
TICKET = Issuer(EngineCard.of(cards()), bytes(32)).ticket("elsewhere")


class Handle:
    """An offer or a fetch: the blocks that somebody may read, or write, until it is `safe`."""

    def __init__(self, blocks=()):
        self.blocks, self.error = set(blocks), None
        self.over = self.safe = self.given_up = False

    def extend(self, blocks, *, tokens):
        self.blocks |= set(blocks["default"].ids)

    def ready(self, **_):
        pass

    def finish(self):
        pass

    def wait_layer(self, layer, timeout):
        pass

    def withdraw(self):
        self.given_up = True

    cancel = withdraw


class Service:
    """A `BlockingWorker` in which things end when the test says so; an offer that is waited for has been withdrawn."""

    def __init__(self, config, groups):
        self.config, self.events, self.offers, self.fetches = config, [], [], []

    def register(self, tensors):
        pass

    def join(self, card, *, key):
        pass

    def claim(self, ticket):
        return SimpleNamespace(close=lambda: None)

    def decline(self, ticket):
        pass

    def offer(self, request, *, streaming, attempt):
        self.offers.append(Handle())
        return self.offers[-1]

    def start_fetch(self, ticket, blocks, *, tokens, after):
        self.fetches.append(Handle(blocks["default"].ids))
        return self.fetches[-1]

    def poll(self, timeout=0.0):
        for offer in self.offers if timeout else ():
            if offer.given_up and not offer.over:
                self.end(offer, OfferWithdrawn("r", offer))
        found, self.events = self.events, []
        return found

    def end(self, handle, event, *, safe=True):
        """Once, and once more if it was not safe then."""
        handle.over, handle.safe = True, safe
        self.events.append(event)


class Core:
    """vLLM's scheduler and core, as far as blocks and requests go. What can happen takes a number, to choose by."""

    def __init__(self):
        self.scheduler = side()
        self.ranks = [module.WorkerSide(Config(), ["default"], layerwise=False) for _ in RANKS]
        tensor = CacheTensor(torch.zeros(BLOCKS, 2, SIZE, 8), "LBHNC", layers=[0], heads=range(2))
        self.services: list[Any] = [rank._worker for rank in self.ranks]
        for rank in self.ranks:
            rank.register({"model.layers.0.attn": [tensor]})
        self.names, self.free = itertools.count(), list(range(1, BLOCKS))
        self.requests, self.tables = {}, {}
        self.waiting, self.running, self.steps = [], [], deque()
        self.preempted, self.finished = set(), set()
        self.said, self.stopped = Counter(), False

    def finish(self):
        """Everybody leaves, everything ends and is told."""
        for one in list(self.requests):
            self.abort(one)
        for _ in range(8):
            for service, handle in self.open():
                self.conclude(service, handle)
            self.schedule(0)
            self.execute(0)
        if self.stopped:
            return
        assert self.requests == {}, "somebody waits for the end of these for ever"
        assert set(self.said.values()) <= {1}, "a rank has said it twice"
        assert not any(rank._sending or rank._offers or rank._loading for rank in self.ranks)
        books = (self.scheduler._produced, self.scheduler._wanted, self.scheduler._names)
        assert not any(books)

    # --- requests

    def come(self, number):
        prompt, here = number % 3 + 1, number % 4 > 0
        if len(self.requests) == 4:
            return
        name = f"r{next(self.names)}"
        asked = {"do_remote_prefill": True, "ticket": TICKET, "remote_num_tokens": SIZE * prompt}
        one = request({"do_remote_decode": True} if here else asked, tokens=SIZE * prompt, name=name)
        self.requests[name], self.tables[name] = one, []
        self.waiting.append(name)
        self.scheduler.on_new_request(one)

    def leave(self, number):
        live = [*self.waiting, *self.running]
        if live:
            self.abort(live[number % len(live)])

    def reset(self, _):
        """`reset_prefix_cache`, which is no part of a step."""
        for one in list(self.running):
            self.preempt(one)

    def preempt(self, one):
        self.running.remove(one)
        self.release(one)
        self.requests[one].status, self.requests[one].num_computed_tokens = STATUS.PREEMPTED, 0
        self.waiting.insert(0, one)
        self.preempted.add(one)

    def abort(self, one):
        for queue in (self.waiting, self.running):
            if one in queue:
                queue.remove(one)
                self.end(one, "FINISHED_ABORTED")

    def end(self, one, status):
        going = self.requests[one]
        loading, going.status = going.status is STATUS.WAITING_FOR_REMOTE_KVS, STATUS[status]
        later, _ = self.scheduler.request_finished(going)
        self.finished.add(one)
        if not (later or loading):
            self.forget(one)

    def forget(self, one):
        self.release(one)
        del self.requests[one]

    def release(self, one):
        self.free += self.tables[one]
        self.tables[one] = []

    # --- steps

    def schedule(self, number):
        """Two are under way at most. Some that run lose their blocks, if there are others enough."""
        if len(self.steps) == 2 or self.stopped:
            return
        for one in self.running[: number - 5 if number > 5 else 0]:
            self.preempt(one)
        new, cached, writes = [], [], {}
        for one in [*self.running, *self.waiting]:
            going, began = self.requests[one], one in self.running
            if going.status is STATUS.WAITING_FOR_REMOTE_KVS or not self.free:
                continue
            start = going.num_computed_tokens
            external, _ = (0, False) if began else self.scheduler.get_num_new_matched_tokens(going, start)
            need = external // SIZE or int(start < going.num_prompt_tokens)
            if need > len(self.free) or not need:
                continue
            fresh = [self.free.pop() for _ in range(need)]
            self.tables[one] += fresh
            if external:
                self.scheduler.update_state_after_alloc(going, Blocks(*self.tables[one]), external)
                going.status, going.num_computed_tokens = STATUS.WAITING_FOR_REMOTE_KVS, external
                continue
            if not began:
                self.waiting.remove(one)
                self.running.append(one)
            (cached if began or going.status is STATUS.PREEMPTED else new).append((one, fresh, start, SIZE))
            going.status, going.num_computed_tokens = STATUS.RUNNING, start + SIZE
            writes[one] = (set(fresh), going.num_computed_tokens, going)
        orders = self.scheduler.build_connector_meta(step(new, cached, self.preempted))
        self.steps.append((orders, writes, self.finished))
        self.preempted, self.finished = set(), set()

    def execute(self, _):
        """The workers do the first of the steps, and the scheduler hears of it."""
        if not self.steps or self.stopped:
            return
        orders, writes, finished = self.steps.popleft()
        told = [self.run(rank, orders, writes, finished) for rank in RANKS]
        if self.stopped:
            return
        sent, got = (
            {one for one in set().union(*those) if all(self.said[rank, kind, one] for rank in RANKS)}
            for kind, those in zip(("sent", "got"), zip(*told, strict=True), strict=True)
        )
        for one, (_, computed, going) in writes.items():
            if one in self.running and computed == going.num_computed_tokens == going.num_prompt_tokens:
                self.running.remove(one)
                self.end(one, "FINISHED_LENGTH_CAPPED")
        self.scheduler.update_connector_output(received(*got, sent=sent))
        for one in got:
            if one in self.waiting:
                self.abort_loaded(one)
            else:
                self.forget(one)
        for one in sent:
            self.forget(one)

    def abort_loaded(self, one):
        """It was loaded: what it generates is no matter of the connector's."""
        self.requests[one].status = STATUS.WAITING
        self.abort(one)

    def run(self, number, orders, writes, finished):
        rank, service = self.ranks[number], self.services[number]
        try:
            rank.preempt(orders)
        except MemoryInDoubtError:
            self.stopped = True  # the engine
            return set(), set()
        rank.begin_step(orders)
        rank.load(orders)
        own = {rank._sending[one].offer for one in writes if one in rank._sending}
        for one, (blocks, *_) in writes.items():
            for handle in service.offers + service.fetches:
                assert handle.safe or handle in own or not handle.blocks & blocks, f"{one} writes what others use"
        rank.end_step()
        sent, got = rank.poll(finished)
        rank.take_failed_blocks()
        self.said.update([(number, "sent", one) for one in sent] + [(number, "got", one) for one in got])
        return sent, got

    # --- the service

    def open(self):
        handles = [(service, each) for service in self.services for each in service.offers + service.fetches]
        return [(service, each) for service, each in handles if not each.safe]

    def settle(self, number):
        if handles := self.open():
            self.conclude(*handles[number // 2 % len(handles)], well=number % 2 > 0)

    def fall_silent(self, number):
        if handles := self.open():
            self.conclude(*handles[number % len(handles)], safe=False)

    def conclude(self, service, handle, *, well=True, safe=True):
        offered = handle in service.offers
        if handle.over:
            event, safe = (OfferSettled if offered else Settled)("r", handle), True
        elif not safe:
            event = (OfferInDoubt if offered else FetchFailed)("r", handle, doubt())
        elif offered:
            event = OfferReleased("r", handle, ()) if well else OfferExpired("r", handle, "nobody came")
        else:
            event = Fetched("r", handle, FETCHED) if well else FetchFailed("r", handle, TransferFailedError("no"))
        service.end(handle, event, safe=safe)

    def check(self):
        """A block is free or somebody's."""
        held = [block for table in self.tables.values() for block in table]
        assert sorted(held + self.free) == list(range(1, BLOCKS))


OFTEN = [Core.come, Core.schedule, Core.schedule, Core.execute, Core.execute, Core.settle]
SELDOM = [Core.leave, Core.reset, Core.fall_silent]
STEP = [Core.schedule, Core.execute]


@example([(what, 2) for what in (Core.come, *STEP, Core.reset, Core.leave, Core.come, *STEP)])  # the rarest of them
@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from([*OFTEN, *OFTEN, *SELDOM]), st.integers(0, 7)), min_size=30, max_size=60))
def test_every_request_ends_once_and_no_block_is_used_twice(happens):
    with mock.patch.object(module, "BlockingWorker", Service):
        core = Core()
        for what, number in happens:
            what(core, number)
            core.check()
        core.finish()
        core.check()
