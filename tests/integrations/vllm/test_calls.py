"""Both sides together, in any order of vLLM's calls and of what the service says: scheduler, two ranks, no processes.

What must hold at every forward pass: no block that it writes is on offer, or is written by a fetch. And at the end:
each rank has said of each request once that it is over, and nothing is left.
"""

import itertools
from collections import deque
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_scheduler import FULL, cards
from test_worker import STATS, doubt
from vllm_engine import Engine
from vllm_stand_in import make

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
from kvxfer.integrations.vllm.scheduler import SchedulerSide
from kvxfer.tickets import EngineCard, Issuer
from kvxfer.transfers import FetchResult

SIZE = 16
BLOCKS = 12
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


class Side(SchedulerSide):
    """The scheduler's side under the names by which vLLM calls a connector."""

    def request_finished_all_groups(self, request, ids):
        return self.request_finished(request, ids)

    def has_pending_push_work(self):
        return self.pending


class Ranks:
    """Both ranks, which take their steps when the scheduler asks how they went."""

    def __init__(self):
        self.sides = [module.WorkerSide(Config(), ["default"], layerwise=False) for _ in range(2)]
        self.services: list[Any] = [rank._worker for rank in self.sides]
        tensor = CacheTensor(torch.zeros(BLOCKS, 2, SIZE, 8), "LBHNC", layers=[0], heads=range(2))
        for rank in self.sides:
            rank.register({"model.layers.0.attn": [tensor]})
        self._steps = deque()

    def send(self, _, output, work):
        self._steps.append((output, work))

    def receive(self):
        step = self._steps.popleft()
        return [(self._run(*rank, *step), ()) for rank in zip(self.sides, self.services, strict=True)]

    def _run(self, rank, service, output, work):
        orders = output.kv_connector_metadata
        rank.preempt(orders)
        rank.begin_step(orders)
        rank.loads.begin(orders)
        own = {rank.offers._sending[one["request"]].offer for one in work if one["request"] in rank.offers._sending}
        for one in work:
            blocks = set(one["blocks"][one["start"] // SIZE : -(-one["stop"] // SIZE)])
            for handle in service.offers + service.fetches:
                assert handle.safe or handle in own or not handle.blocks & blocks, f"{one} writes what others use"
        rank.offers.end_step()
        sent, got = rank.poll(output.finished_req_ids)
        told = {"finished_sending": sent, "finished_recving": got, "kv_connector_stats": None}
        return make("KVConnectorOutput", invalid_block_ids=rank.loads.take_failed_blocks(), **told)


class Core:
    """An engine, and what can happen to it: each takes a number, to choose by."""

    def __init__(self):
        self.scheduler, self.ranks = Side(FULL, cached=False, layerwise=False), Ranks()
        self.scheduler.collect(cards())
        self.engine = Engine(self.scheduler, self.ranks, block_tokens=SIZE, each=SIZE, blocks=BLOCKS)
        self.names, self.stopped = itertools.count(), False

    def finish(self):
        """Everybody leaves, everything ends and is told."""
        for one in list(self.engine.requests):
            self.engine.finish(one)
        for _ in range(8):
            for service, handle in self.open():
                self.conclude(service, handle)
            self.schedule(0)
            self.execute(0)
        if self.stopped:
            return
        assert self.engine.requests == {}, "somebody waits for the end of these for ever"
        assert set(self.engine.reported.values()) <= {1}, "a rank has said it twice"
        assert not any(rank.offers._sending or rank.offers._made or rank.loads._loading for rank in self.ranks.sides)
        books = (self.scheduler._produced, self.scheduler._wanted, self.scheduler._names)
        assert not any(books)

    def come(self, number):
        prompt, here = number % 3 + 1, number % 4 > 0
        if len(self.engine.requests) < 4:
            asked = {"do_remote_prefill": True, "ticket": TICKET, "remote_num_tokens": SIZE * prompt}
            params = {"do_remote_decode": True} if here else asked
            self.engine.add(f"r{next(self.names)}", 0, SIZE * prompt, params=params)

    def leave(self, number):
        live = [one for one in self.engine.requests if one not in self.engine.ended]
        if live:
            self.engine.finish(live[number % len(live)])

    def reset(self, _):
        """`reset_prefix_cache`, which is no part of a step."""
        self.preempt(len(self.engine.running))

    def preempt(self, count):
        for one in self.engine.running[:count]:
            self.engine.preempt(one.request_id)

    def schedule(self, number):
        """Some that run lose their blocks first, if others want them."""
        if not self.stopped:
            self.preempt(max(0, number - 5))
            self.engine.schedule()

    def execute(self, _):
        """The workers do the first of the steps, and the scheduler hears of it."""
        if not self.stopped:
            try:
                self.engine.take()
            except MemoryInDoubtError:
                self.stopped = True  # the engine

    # --- the service

    def open(self):
        handles = [(service, each) for service in self.ranks.services for each in service.offers + service.fetches]
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
        held = [block for table in self.engine.tables.values() for block in table]
        assert sorted(held + self.engine.free) == list(range(1, BLOCKS))


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
