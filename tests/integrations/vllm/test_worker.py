"""The worker's side alone, on a service whose events the test makes: doubt, and the order of ends."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvxfer import blocking
from kvxfer.config import Config
from kvxfer.errors import (
    BusyError,
    ClosedError,
    FabricError,
    KvxferError,
    MemoryInDoubtError,
    RequestError,
    TransferFailedError,
)
from kvxfer.geometry import CacheTensor
from kvxfer.integrations.vllm import worker as module
from kvxfer.integrations.vllm.orders import Load, OfferStep, Orders
from kvxfer.integrations.vllm.seen import Counts
from kvxfer.telemetry import TransferStats
from kvxfer.transfers import FetchResult

NAMES = [f"model.layers.{layer}.attn" for layer in (4, 5)]
TICKET, OTHER = {"request": "p", "epoch": "00"}, {"request": "p", "epoch": "01"}
STATS = TransferStats(route="staged", bytes=5, started=1.0, finished=3.0)


def doubt() -> Any:
    async def settled():
        raise NotImplementedError

    return MemoryInDoubtError("a peer is silent", settled=settled)


def told(blocks):
    return {group: (span.ids, span.first_token) for group, span in blocks.items()}


def plain(given):
    return told(given) if isinstance(given, dict) else given


class Handle:
    """An offer or a transfer, which writes down what is done with it."""

    def __init__(self):
        self.calls: list[Any] = []
        self.done = False
        self.error: KvxferError | None = None
        self.stands_still, self.spared = False, True

    def __getattr__(self, name) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *given, **named: self.calls.append((name, *map(plain, given), *named.items()))

    def wait_layer(self, layer, timeout=None):
        self.calls.append(("wait_layer", layer))
        if self.stands_still and timeout is not None:
            raise TimeoutError
        if self.stands_still:
            self.error = doubt()

    def give_up(self):
        self.calls.append(("give_up",))
        return self.spared


class Service:
    """A `BlockingWorker` that does nothing by itself."""

    def __init__(self, config, groups):
        self.config, self.groups = config, groups
        self.events: list[Any] = []
        self.offers: list[Any] = []
        self.transfers: list[Any] = []
        self.claims: list[Any] = []
        self.declined: list[Any] = []
        self.registered = 0
        self.quiet, self.asleep = True, True
        self.refuses: KvxferError | None = None

    def _made(self, those) -> Any:
        if self.refuses is not None:
            raise self.refuses
        those.append(Handle())
        return those[-1]

    def offer(self, request, *, streaming, attempt):
        assert (request, streaming) == ("name", True)
        return self._made(self.offers)

    def start_fetch(self, ticket, blocks, *, tokens, after):
        assert ticket in (TICKET, OTHER)
        assert (told(blocks), tokens, after) == ({"default": ([1, 2], 20)}, range(20, 48), None)
        return self._made(self.transfers)

    def claim(self, ticket):
        self._check_awake()
        self.claims.append((ticket, Handle()))
        return self.claims[-1][1]

    def decline(self, ticket):
        self._check_awake()
        self.declined.append(ticket)

    def _check_awake(self):
        if self.asleep:
            raise ClosedError("nothing is registered")

    def register(self, tensors):
        self.registered, self.asleep = self.registered + 1, False

    def unregister(self):
        self.asleep = True
        return self.quiet

    def poll(self, timeout=0.0):
        found, self.events = self.events, []
        for event in found:
            if isinstance(
                event, blocking.OfferReleased | blocking.OfferExpired | blocking.OfferInDoubt | blocking.OfferWithdrawn
            ):
                vars(event.offer)["done"] = True
        return found


@pytest.fixture
def side(monkeypatch, request):
    monkeypatch.setattr(module, "BlockingWorker", Service)
    found = module.WorkerSide(Config(), ["default"], layerwise=True, by_block=getattr(request, "param", True))
    found.register(
        {
            name: [CacheTensor(torch.zeros(4, 2, 16, 8), "LBHNC", layers=[layer], heads=range(2))]
            for layer, name in zip((4, 5), NAMES, strict=True)
        }
    )
    return found


def growing(start=0, stop=32, *, last=True):
    return Orders(steps=[OfferStep("r", "name", 0, {"default": ([1, 2], 0), "elsewhere": ([3], 0)}, start, stop, last)])


def loading(ticket=TICKET, *, in_step=False):
    return Orders(claims={"r": ticket}, loads=[Load("r", ticket, {"default": ([1, 2], 20)}, 20, 48, in_step)])


def begun(side, orders):
    side.preempt(orders)
    side.begin_step(orders)
    side.loads.begin(orders)
    return side._worker


def test_layers_are_ready_one_by_one_then_all(side):
    service = begun(side, growing(last=False))
    for name in (*NAMES, "a layer of another's"):
        side.wait_layer(name)
        side.save_layer(name)
    begun(side, growing(32, 40))  # vLLM does not say the end of each step
    side.offers.end_step()
    side.save_layer(NAMES[0])  # no step is under way
    (offer,) = service.offers
    assert offer.calls == [
        ("extend", {"default": ([1, 2], 0)}, ("tokens", range(32))),
        ("ready", ("layers", [4]), ("tokens", 32), ("after", None)),
        ("ready", ("layers", [5]), ("tokens", 32), ("after", None)),
        ("ready", ("tokens", 32), ("after", None)),
        ("extend", {"default": ([1, 2], 0)}, ("tokens", range(32, 40))),
        ("ready", ("tokens", 40), ("after", None)),
        ("finish",),
    ]


def test_a_prompt_waits_for_nobody_while_it_is_computed_unless_layers_may_be_read(side, monkeypatch):
    monkeypatch.setattr(side.offers, "_layerwise", False)
    service = begun(side, growing())
    assert service.offers == [], "a forward pass may take longer than an offer waits"
    side.offers.end_step()
    side.offers.end_step()
    assert [call[0] for call in service.offers[0].calls] == ["extend", "ready", "finish"]


def test_an_offer_ends_with_its_request_where_blocks_are_overwritten_before_that_is_told(side, monkeypatch):
    monkeypatch.setattr(side.offers, "_late", True)
    service = begun(side, growing(last=False))
    side.offers.end_step()
    begun(side, growing(32, 40))
    side.offers.end_step()
    side.poll(())
    (offer,) = service.offers
    assert ("finish",) not in offer.calls, "else all of it could be fetched after the next step has overwritten it"
    service.events = [blocking.OfferWithdrawn("name", offer)]
    begun(side, Orders(preempted=["r"]))
    begun(side, growing())
    side.offers.end_step()
    side.poll(())
    begun(side, Orders())
    side.poll({"r"})
    assert [one.calls[-1] for one in service.offers] == [("withdraw",), ("finish",)]
    begun(side, growing())
    side.offers.end_step()
    begun(side, Orders(withdraws=["r"]))
    side.poll({"r"})
    assert service.offers[-1].calls[-1] == ("withdraw",), "of a request that was aborted"


def test_what_earlier_steps_have_computed_is_ready_at_once_since_no_forward_pass_may_follow(side):
    orders = growing()
    orders.steps = [replace(step, computed=True) for step in orders.steps]
    (offer,) = begun(side, orders).offers
    assert offer.calls[1:] == [("ready", ("tokens", 32), ("after", None)), ("finish",)]
    side.offers.end_step()
    assert len(offer.calls) == 3


def test_an_offer_that_cannot_be_made_holds_nothing(side):
    side._worker.refuses = BusyError("nobody polls")
    begun(side, growing(last=False))
    begun(side, growing(32, 40))
    side.offers.end_step()
    begun(side, Orders(withdraws=["r"]))
    assert side.poll({"r"}) == ({"r"}, set())


def test_a_preempted_offer_that_does_not_end_stops_the_engine(side):
    begun(side, growing())
    with pytest.raises(FabricError, match="'r' has not ended"):
        side.preempt(Orders(preempted=["r"]))


def test_a_preempted_offer_in_doubt_may_be_known_to_be_safe_before_long(side):
    service = begun(side, growing())
    (offer,) = service.offers
    service.events = [blocking.OfferInDoubt("name", offer, doubt())]
    side.poll(())
    service.events = [blocking.OfferSettled("name", offer)]
    side.preempt(Orders(preempted=["r"]))
    begun(side, growing())
    service.events = [blocking.OfferInDoubt("name", service.offers[1], doubt())]
    with pytest.raises(MemoryInDoubtError):
        side.preempt(Orders(preempted=["r"]))


def test_a_load_ends_its_claim_and_is_told_once(side):
    orders = loading()
    side.begin_step(orders)
    ((_, claim),) = side._worker.claims
    side.loads.begin(orders)
    assert claim.calls == [("close",)]
    service = side._worker
    service.events = [blocking.Fetched("p", service.transfers[0], FetchResult("p", b"", STATS))]
    assert side.poll(()) == (set(), {"r"})
    assert side.poll(()) == (set(), set())
    assert (service.declined, side.loads.claims) == ([], {})
    assert side.ledger.take() == Counts([2.0], [5])


def test_a_failed_load_is_told_with_its_blocks_and_declined(side):
    service = begun(side, loading())
    service.events = [blocking.FetchFailed("p", service.transfers[0], TransferFailedError("no"))]
    assert side.poll(()) == (set(), {"r"})
    assert side.loads.take_failed_blocks() == {1, 2}
    assert side.loads.take_failed_blocks() == set()
    assert service.declined == [TICKET]
    assert side.ledger.take() == Counts(load_failures=1)


@pytest.mark.parametrize("stage", ["claimed", "loading", "over"])
def test_who_leaves_takes_nothing_from_another_request_with_the_same_ticket(side, stage):
    service = begun(side, Orders(claims={"r": TICKET, "again": dict(TICKET)}))
    if stage != "claimed":
        side.loads.begin(loading())
    if stage == "over":
        service.events = [blocking.Fetched("p", service.transfers[0], FetchResult("p", b"", STATS))]
        side.poll(())
    begun(side, Orders(declines=[("again", TICKET)]))
    assert service.declined == ([TICKET] if stage == "over" else [])


@pytest.mark.parametrize(("other", "declined"), [({"mac": "00"}, [TICKET]), ({"attempt": 0}, [])])
def test_a_forged_ticket_keeps_nothing_from_being_declined_and_one_that_names_its_first_attempt_does(
    side, other, declined
):
    service = begun(side, Orders(claims={"r": TICKET, "other": TICKET | other}))
    begun(side, Orders(declines=[("r", TICKET)]))
    assert service.declined == declined


def test_a_load_that_holds_up_the_forward_pass_is_given_up_and_told_once(side):
    service = begun(side, loading(in_step=True))
    (transfer,) = service.transfers
    transfer.stands_still = True
    side.wait_layer(NAMES[0])
    side.wait_layer(NAMES[1])
    assert transfer.calls == [("wait_layer", 4), ("give_up",)]
    assert side.poll(()) == (set(), set())
    assert side.loads.take_failed_blocks() == {1, 2}
    service.events = [blocking.FetchFailed("p", transfer, TransferFailedError("at last"))]
    assert side.poll(()) == (set(), set())
    assert side.loads.take_failed_blocks() == set(), "somebody else has these blocks by now"
    assert side.ledger.take() == Counts(load_failures=1)
    assert service.declined == [TICKET]


@pytest.mark.parametrize(("error", "failed"), [(None, set()), (TransferFailedError("in this step"), {1, 2})])
def test_a_load_that_was_read_before_it_failed_fails_nobody(side, error, failed):
    service = begun(side, loading(in_step=True))
    service.transfers[0].error = error
    side.poll(())
    service.events = [blocking.FetchFailed("p", service.transfers[0], TransferFailedError("late"))]
    assert side.poll(()) == (set(), set())
    assert side.loads.take_failed_blocks() == failed, "somebody else may have these blocks by now"
    assert service.declined == [TICKET]


def test_a_forward_pass_waits_once_for_all_of_its_loads(side, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(module, "monotonic", lambda: next(clock))  # a second passes with each look
    orders = loading(in_step=True)
    orders.loads *= 2
    waited = []
    monkeypatch.setattr(Handle, "wait_layer", lambda _, layer, timeout: waited.append((layer, timeout)))
    begun(side, orders)
    side.wait_layer(NAMES[0])
    clock = iter(range(1000, 1100))  # the model computes for long
    side.wait_layer(NAMES[1])
    assert waited == [(4, 2.1), (4, 1.1), (5, 0.1), (5, 0.01)], "time to ask is always left, and not much of it"
    waited.clear()
    begun(side, orders)
    side.wait_layer(NAMES[0])
    assert waited[0] == (4, 2.1), "another step"


def test_a_layer_that_cannot_be_waited_for_is_not_read(side, monkeypatch):
    def refuse(transfer, layer, timeout):
        raise RequestError("no such time")

    monkeypatch.setattr(Handle, "wait_layer", refuse)
    begun(side, loading(in_step=True))
    with pytest.raises(RequestError):
        side.wait_layer(NAMES[0])


def test_while_an_engine_is_silent_nobody_waits_for_its_loads_again(side):
    service = begun(side, loading(in_step=True))
    service.transfers[0].stands_still = True
    side.poll(())
    assert side.loads.take_failed_blocks() == {1, 2}
    begun(side, loading(in_step=True))
    assert len(service.transfers) == 1
    assert side.loads.take_failed_blocks() == {1, 2}
    begun(side, loading(OTHER, in_step=True))
    assert len(service.transfers) == 2
    service.events = [blocking.FetchFailed("p", service.transfers[0], TransferFailedError("it answers"))]
    side.poll(())
    begun(side, loading(in_step=True))
    assert len(service.transfers) == 3


@pytest.mark.parametrize("it", [{"stands_still": True, "spared": False}, {"error": doubt()}], ids=["given up", ""])
def test_a_load_in_doubt_inside_of_the_forward_pass_stops_the_engine(side, it):
    service = begun(side, loading(in_step=True))
    vars(service.transfers[0]).update(it)
    with pytest.raises(MemoryInDoubtError):
        side.poll(())


def test_a_load_in_doubt_fails_at_once_and_keeps_its_blocks(side):
    service = begun(side, loading())
    (transfer,) = service.transfers
    service.events = [blocking.FetchFailed("p", transfer, doubt())]
    assert side.poll(()) == (set(), set())
    assert side.loads.take_failed_blocks() == {1, 2}
    service.events = [blocking.Settled("p", transfer)]
    assert side.poll(()) == (set(), {"r"})


@pytest.mark.parametrize("side", [False], indirect=True)
def test_where_blocks_do_not_tell_the_request_is_named_with_the_end_of_its_load(side):
    service = begun(side, loading())
    (transfer,) = service.transfers
    service.events = [blocking.FetchFailed("p", transfer, doubt())]
    assert side.loads.take_failed(side.poll(())[1]) == set()
    service.events = [blocking.Settled("p", transfer)]
    received = side.poll(())[1]
    assert (received, side.loads.take_failed(received)) == ({"r"}, {"r"})
    assert side.loads.take_failed(received) == set()
    assert side.loads.take_failed_blocks() == set()
    begun(side, loading())
    service.events = [blocking.Fetched("p", service.transfers[1], FetchResult("p", b"", STATS))]
    assert side.loads.take_failed(side.poll(())[1]) == set()


def test_a_block_that_vllm_has_let_go_of_is_not_handed_over(side):
    begun(side, Orders(steps=[OfferStep("r", "name", 0, {"default": ([1, 0], 0)}, 0, 32, last=True)]))
    side.offers.end_step()
    (offer,) = side._worker.offers
    assert offer.calls == [("withdraw",)]
    begun(side, Orders(loads=[Load("r", TICKET, {"default": ([0, 2], 20)}, 20, 48, in_step=False)]))
    assert side.poll(()) == (set(), {"r"})
    assert side.loads.take_failed_blocks() == {0, 2}


def test_a_load_that_is_cancelled_fails_nothing(side):
    service = begun(side, loading())
    begun(side, Orders(cancels=["r"]))
    (transfer,) = service.transfers
    assert ("cancel",) in transfer.calls
    service.events = [blocking.FetchFailed("p", transfer, TransferFailedError("cancelled"))]
    assert side.poll(()) == (set(), {"r"})
    assert side.loads.take_failed_blocks() == set()
    assert service.declined == [TICKET]


def test_a_request_with_the_name_of_one_that_has_ended_keeps_its_claim(side):
    """Names may come again at once: vLLM then orders both in one step."""
    service = begun(side, Orders(claims={"r": OTHER}))
    begun(side, Orders(claims={"r": TICKET}, declines=[("r", OTHER)]))
    assert service.declined == [OTHER]
    assert [(ticket, claim.calls) for ticket, claim in service.claims] == [(OTHER, [("close",)]), (TICKET, [])]


def test_a_request_with_the_name_of_one_that_was_aborted_is_loaded(side):
    service = begun(side, replace(loading(), cancels=["r"]))
    (transfer,) = service.transfers
    assert ("cancel",) not in transfer.calls
    service.events = [blocking.FetchFailed("p", transfer, TransferFailedError("no"))]
    side.poll(())
    assert side.loads.take_failed_blocks() == {1, 2}, "else vLLM takes it for loaded"


def test_a_prompt_with_the_name_of_a_request_that_has_finished_is_not_told_before_it_has(side):
    side._worker.refuses = BusyError("an offer of that name was here")
    begun(side, growing(last=False))
    assert side.poll({"r"}) == (set(), set()), "else vLLM frees the blocks of one that runs, and stops"
    begun(side, growing(32, 40))
    assert side.poll(()) == (set(), set())
    begun(side, Orders())
    assert side.poll({"r"}) == ({"r"}, set())


def test_who_leaves_looks_at_nobody_else(side):
    """All clients may hang up at once."""
    looks = []

    class Known(dict[str, Any]):
        def get(self, *given: Any) -> Any:
            looks.append(given)
            return super().get(*given)

    tickets: dict[str, dict[str, Any]] = {f"r{at}": Known(TICKET, mac=str(at)) for at in range(100)}
    service = begun(side, Orders(claims=tickets))
    looks.clear()
    begun(side, Orders(declines=[*tickets.items()]))
    assert (len(service.declined), side.loads.claims) == (100, {})
    assert len(looks) < 2000


def test_layers_that_no_hook_was_called_for_are_waited_for(side):
    service = begun(side, loading(in_step=True))
    side.wait_layer(NAMES[0])
    side.poll(())
    assert service.transfers[0].calls == [("wait_layer", 4), ("wait_layer", 4), ("wait_layer", 5)]


def test_memory_that_a_peer_may_touch_is_not_given_up(side):
    side._worker.quiet = False
    with pytest.raises(FabricError, match="must not be given up"):
        side.unregister()


def test_requests_come_and_go_while_it_sleeps(side):
    side.unregister()
    assert side.card is None
    begun(side, Orders(claims={"r": TICKET}))
    begun(side, Orders(claims={"r": TICKET}, declines=[("r", TICKET)]))
    side.offers.end_step()
    assert side.poll({"r"}) == (set(), set())
    assert side._worker.declined == []
