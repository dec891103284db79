"""The scheduler's side alone: what it orders, and when."""

import secrets
from typing import Any

import pytest
import torch
import vllm_stand_in
from vllm_stand_in import make

from kvxfer.errors import RequestError, TicketError
from kvxfer.integrations.vllm.caches import BlockGroup
from kvxfer.integrations.vllm.orders import Load, OfferStep
from kvxfer.integrations.vllm.scheduler import SchedulerSide
from kvxfer.tickets import EngineCard, Issuer, RankCard, Ticket

FULL = [BlockGroup("default", 0, 16, None)]
MIXED = [BlockGroup("window", 1, 4, 8), BlockGroup("full", 0, 16, None)]
STATEFUL = [BlockGroup("full", 0, 16, None), BlockGroup("state", 1, 8, 2, state=True)]
STATUS = vllm_stand_in.stock("RequestStatus")


class Blocks:
    def __init__(self, *ids, more=()):
        self._ids = [list(ids), *more]

    def get_block_ids(self):
        return tuple(self._ids)


def blocks(*ids, first=0):
    return {"default": (list(ids), first)}


def cards(world=2):
    return [
        RankCard(
            engine="e", rank=rank, world=world, endpoint=f"unix:/tmp/{rank}", incarnation=secrets.token_hex(32)
        ).to_dict()
        for rank in range(world)
    ]


def side(groups=FULL, *, cached=False, layerwise=False, **options):
    found = SchedulerSide(groups, cached=cached, layerwise=layerwise, **options)
    found.collect(cards())
    return found


def request(params=None, *, tokens=40, name="r", **fields) -> Any:
    usual = {"num_computed_tokens": 0, "status": STATUS.WAITING, "prompt_embeds": None}
    usual |= {"prompt_token_ids": None, "prompt_is_token_ids": None, "all_token_ids": [], "mm_features": []}
    usual |= {"lora_request": None}
    return make("Request", request_id=name, kv_transfer_params=params, num_prompt_tokens=tokens, **(usual | fields))


def wanted(tokens=40, **changes):
    """What a prefill engine gave, and the request of a decode engine that has it."""
    ticket = Issuer(EngineCard.of(cards()), bytes(32)).ticket("p")
    return request({"do_remote_prefill": True, "ticket": ticket, "remote_num_tokens": tokens} | changes)


def produced(tokens=40, name="r"):
    return request({"do_remote_decode": True, "do_remote_prefill": False}, tokens=tokens, name=name)


def announced(one, *blocks, at=0, tokens=40, **options):
    """A scheduler to which a request has come, and that; with blocks, also these, for tokens to load from there on."""
    scheduler = side(**options)
    scheduler.on_new_request(one)
    if blocks:
        scheduler.update_state_after_alloc(one, Blocks(*blocks), tokens)
        one.num_computed_tokens = at + tokens  # as vLLM counts it then
    return scheduler, one


def step(new=(), cached=(), preempted=()) -> Any:
    """A scheduler's output: (request, blocks, computed, scheduled) of each."""
    return make(
        "SchedulerOutput",
        scheduled_new_reqs=[
            make("NewRequestData", req_id=one, block_ids=_lists(ids), num_computed_tokens=computed)
            for one, ids, computed, _ in new
        ],
        scheduled_cached_reqs=make(
            "CachedRequestData",
            req_ids=[one for one, *_ in cached],
            new_block_ids=[_lists(ids) if ids else None for _, ids, *_ in cached],
            num_computed_tokens=[computed for _, _, computed, _ in cached],
        ),
        num_scheduled_tokens={one: count for one, _, _, count in (*new, *cached)},
        preempted_req_ids=set(preempted),
    )


def _lists(ids):
    return ids if isinstance(ids, tuple) else (ids,)


def declined(scheduler):
    """Requests whose tickets the next step declines."""
    return [one for one, _ in scheduler.build_connector_meta(step()).declines]


def received(*names, sent=()) -> Any:
    return make("KVConnectorOutput", finished_recving=set(names), finished_sending=set(sent))


def test_the_first_step_joins_the_workers_to_one_engine():
    scheduler = side()
    assert scheduler.pending, "the engine steps though no request has come"
    joined = scheduler.build_connector_meta(step()).join
    assert not scheduler.pending
    assert joined is not None
    assert EngineCard.from_dict(joined.card).world == 2
    assert len(joined.key) == 32
    assert joined.key.hex() not in repr(joined)
    assert repr(joined.key) not in repr(joined)
    assert scheduler.build_connector_meta(step()).join is None


def test_a_rank_that_is_missing_is_named():
    with pytest.raises(TicketError, match="every rank of 2"):
        SchedulerSide(FULL, cached=False, layerwise=False).collect(cards()[:1])


# --- from a prefill engine


def test_asking_changes_nothing():
    scheduler, coming = announced(wanted())
    for _ in range(3):
        assert scheduler.get_num_new_matched_tokens(coming, 0) == (40, True)
        assert scheduler.get_num_new_matched_tokens(coming, 32) == (8, True)
        assert scheduler.get_num_new_matched_tokens(coming, 40) == (0, False)
    orders = scheduler.build_connector_meta(step())
    assert (orders.loads, orders.declines, orders.cancels) == ([], [], [])


def test_a_request_is_claimed_as_it_comes():
    scheduler, coming = announced(wanted())
    orders = scheduler.build_connector_meta(step())
    assert list(orders.claims) == ["r"]
    scheduler.on_new_request(coming)
    assert not scheduler.pending, "it may have come while the engine sleeps, which must not step then"
    assert coming.kv_transfer_params["ticket"]["mac"] not in repr(orders)


def test_it_is_loaded_behind_what_is_held_once():
    scheduler, coming = announced(wanted(), 5, 6, 7, at=16, tokens=24)
    ticket = coming.kv_transfer_params["ticket"]
    loads = scheduler.build_connector_meta(step()).loads
    assert loads == [Load("r", ticket, blocks(6, 7, first=16), start=16, stop=40, in_step=False)]
    assert ticket["mac"] not in repr(loads)
    scheduler.update_state_after_alloc(coming, Blocks(5, 6, 7, 8), 0)  # it runs
    assert scheduler.get_num_new_matched_tokens(coming, 0) == (0, False)
    orders = scheduler.build_connector_meta(step())
    assert (orders.loads, orders.declines) == ([], [])


@pytest.mark.parametrize("allocations", [0, 2])
def test_a_request_is_declined_once_if_nothing_is_loaded_or_it_ends_before(allocations):
    scheduler, coming = announced(wanted())
    for _ in range(allocations):
        scheduler.update_state_after_alloc(coming, Blocks(5, 6, 7), 0)
    assert declined(scheduler) == ["r"] * (allocations > 0)
    assert scheduler.request_finished(coming) == (False, None)
    assert declined(scheduler) == ["r"] * (allocations == 0)


def test_two_requests_of_one_name_may_end_before_a_step():
    scheduler, coming = announced(wanted())
    scheduler.request_finished(coming)
    again = wanted(remote_tokens_digest="of another prompt")
    again.kv_transfer_params["ticket"] |= {"attempt": 1}
    scheduler.on_new_request(again)
    tickets = [one.kv_transfer_params["ticket"] for one in (coming, again)]
    assert scheduler.build_connector_meta(step()).declines == [("r", ticket) for ticket in tickets]


@pytest.mark.parametrize(
    ("ordered", "loaded", "cancels"), [(False, False, ["r"]), (True, False, ["r"]), (True, True, [])]
)
def test_a_request_that_ends_before_it_is_loaded_is_cancelled(ordered, loaded, cancels):
    scheduler, coming = announced(wanted(), 5, 6, 7)
    if ordered:
        assert len(scheduler.build_connector_meta(step()).loads) == 1
    if loaded:
        scheduler.update_connector_output(received("r", "unknown"))
    assert scheduler.request_finished(coming) == (False, None)
    orders = scheduler.build_connector_meta(step())
    assert (len(orders.loads), orders.cancels, orders.declines) == (int(not ordered), cancels, [])


def test_layerwise_loads_leave_a_token_to_compute():
    scheduler, coming = announced(wanted(), layerwise=True)
    assert scheduler.get_num_new_matched_tokens(coming, 0) == (39, False)
    scheduler.update_state_after_alloc(coming, Blocks(5, 6, 7), 39)
    coming.num_computed_tokens = 39
    (load,) = scheduler.build_connector_meta(step()).loads
    assert (load.start, load.stop, load.blocks, load.in_step) == (0, 39, blocks(5, 6, 7), True)
    scheduler.request_finished(coming)
    assert scheduler.build_connector_meta(step()).cancels == []


def test_no_load_is_layerwise_where_layers_have_an_indexer_which_workers_alone_know(caplog):
    scheduler, coming = side(layerwise=True), wanted()
    scheduler.collect(cards(), page=16)
    scheduler.on_new_request(coming)
    assert scheduler.get_num_new_matched_tokens(coming, 0) == (40, True)
    assert "layerwise_refused reason='layers have an indexer" in caplog.text


def test_the_last_page_of_an_indexer_is_offered_and_loaded_whole_by_all_workers():
    scheduler, coming, sent = side(), wanted(36), produced(name="sent")
    scheduler.collect(cards(), page=16)
    for one in (coming, sent):
        scheduler.on_new_request(one)
    scheduler.update_state_after_alloc(coming, Blocks(5, 6, 7), 36)
    coming.num_computed_tokens = 36
    orders = scheduler.build_connector_meta(step(new=[("sent", [1, 2], 0, 20)]))
    (load,), (some,) = orders.loads, orders.steps
    assert (load.start, load.stop, load.blocks) == (0, 48, blocks(5, 6, 7))
    assert (some.start, some.stop, some.last) == (0, 20, False), "more will come"
    (rest,) = scheduler.build_connector_meta(step(cached=[("sent", [3], 20, 20)])).steps
    assert (rest.start, rest.stop, rest.last) == (20, 48, True)


def test_another_order_of_calls_is_refused_by_name():
    scheduler, coming = announced(wanted())
    scheduler.update_state_after_alloc(coming, Blocks(5, 6, 7), 40)
    with pytest.raises(RequestError, match="another order"):
        scheduler.build_connector_meta(step())


@pytest.mark.parametrize(
    "params", [{"ticket": None}, {"ticket": "x"}, {"remote_num_tokens": 0}, {"remote_num_tokens": None}]
)
def test_what_is_no_ticket_is_computed_here(params):
    scheduler, coming = announced(wanted(**params))
    assert scheduler.get_num_new_matched_tokens(coming, 0) == (0, False)
    assert scheduler.request_finished(coming) == (False, None)
    orders = scheduler.build_connector_meta(step())
    assert (orders.claims, orders.declines) == ({}, [])


def test_more_tokens_than_the_prompt_has_are_not_loaded():
    scheduler, coming = announced(wanted(64))
    assert scheduler.get_num_new_matched_tokens(coming, 0) == (40, True)


# --- for a decode engine


def test_a_prompt_is_offered_as_it_is_computed():
    scheduler, going = announced(produced())
    steps = [
        scheduler.build_connector_meta(output).steps
        for output in (
            step(new=[("r", [3, 4], 16, 16), ("other", [8], 0, 16)]),  # a block of it was cached here
            step(cached=[("r", None, 32, 4)]),
            step(cached=[("r", [9], 36, 5)]),  # a token beyond the prompt
            step(cached=[("r", None, 41, 1)]),
        )
    ]
    assert steps == [
        [OfferStep("r", "r", 0, blocks(3, 4), 0, 32, last=False)],
        [OfferStep("r", "r", 0, blocks(), 32, 36, last=False)],
        [OfferStep("r", "r", 0, blocks(9), 36, 40, last=True)],
        [],
    ]
    going.status = STATUS.FINISHED_LENGTH_CAPPED
    later, params = scheduler.request_finished(going)
    assert later
    assert params is not None
    assert Ticket.parse(params.pop("ticket")).request == "r"
    assert params.pop("remote_tokens_digest")
    assert params == {"do_remote_prefill": True, "do_remote_decode": False, "remote_num_tokens": 40}
    assert scheduler.build_connector_meta(step()).withdraws == []


@pytest.mark.parametrize(
    ("name", "computed", "status"),
    [("r", 40, "FINISHED_ABORTED"), ("r", 32, "FINISHED_STOPPED"), ("r" * 300, 40, "FINISHED_STOPPED")],
)
def test_a_prompt_that_is_aborted_or_incomplete_or_can_have_no_ticket_is_withdrawn(name, computed, status):
    scheduler, going = announced(produced(name=name))
    scheduler.build_connector_meta(step(new=[(name, [3, 4, 5], 0, computed)]))
    going.status = STATUS[status]
    assert scheduler.request_finished(going) == (True, None)
    assert scheduler.build_connector_meta(step()).withdraws == [name]


def answered(scheduler, coming, ids=(7, 8, 9, 5), *, status="FINISHED_STOPPED", computed=50, tokens=50, shows=()):
    """What the client gets of a request that has loaded its prompt and ends with so many tokens."""
    scheduler.update_connector_output(received("r"))
    coming.status, coming.num_computed_tokens = STATUS[status], computed
    said(coming, range(tokens), mm_features=[*shows])
    return scheduler.request_finished(coming, [list(ids)])


def said(one, ids, **changes):
    """A request of these tokens, and of nothing else."""
    one.prompt_token_ids, one.all_token_ids, one.mm_features, one.lora_request = [*ids], [*ids], [], None
    for name, value in changes.items():
        setattr(one, name, value)
    return one


NO_DIGEST = {"remote_tokens_digest": ""}


def test_an_answer_is_offered_whole_for_the_next_turn_as_far_as_it_is_computed():
    scheduler, coming = announced(wanted(), 7, 8, 9, answers=True)
    scheduler.build_connector_meta(step())
    later, params = answered(scheduler, coming)
    assert later
    assert params is not None
    handed = params.pop("ticket")
    assert Ticket.parse(handed).request == "r"
    digest = params.pop("remote_tokens_digest")
    assert params == {"do_remote_prefill": False, "do_remote_decode": True, "remote_num_tokens": 49}
    given = OfferStep("r", "r", 0, blocks(7, 8, 9, 5), 0, 49, last=True, computed=True)
    assert scheduler.build_connector_meta(step()).steps == [given]

    # the next turn: what the decode engine held is loaded whole, and the prompt is on offer again
    scheduler = side(layerwise=True)
    params |= {"ticket": handed, "remote_tokens_digest": digest}
    turn = said(request(params, tokens=80), range(80))
    scheduler.on_new_request(turn)
    assert scheduler.get_num_new_matched_tokens(turn, 32) == (17, True)
    scheduler.update_state_after_alloc(turn, Blocks(1, 2, 3, 4, 5), 17)
    turn.num_computed_tokens = 49
    (load,) = scheduler.build_connector_meta(step()).loads
    assert (load.start, load.stop, load.in_step) == (32, 49, False)
    (offered,) = scheduler.build_connector_meta(step(new=[("r", [1, 2, 3, 4, 5], 49, 31)])).steps
    assert (offered.blocks, offered.start, offered.stop, offered.last) == (blocks(1, 2, 3, 4, 5), 0, 80, True)

    # one that begins with other tokens, of which other things are asked, or of which nothing tells all, is computed
    others = ({"all_token_ids": [*range(20), 999, *range(21, 80)]}, {"all_token_ids": [*range(48)]})
    others += {"mm_features": shown("cat")}, {"lora_request": ADAPTER}, embedded(), embedded(tokens=range(80))
    for changes in others:
        turns = (said(request(params | more, tokens=80), range(80), **changes) for more in ({}, NO_DIGEST))
        for turn in turns:
            scheduler = side()
            scheduler.on_new_request(turn)
            assert scheduler.get_num_new_matched_tokens(turn, 0) == (0, False)
            assert scheduler.build_connector_meta(step()).declines == [("r", handed)]


def adapter(name="an adapter", path="/adapters/1"):
    return make("LoRARequest", lora_name=name, lora_path=path)


ADAPTER = adapter()


def embedded(value=0.0, *, tokens=None, without=80, grown=False):
    """A prompt of embeddings alone, or where tokens are given one of which these are the tokens until the last ones.

    Those that a layer of the caller's has made want gradients (`grown`).
    """
    rows = torch.full((80, 8), value, dtype=torch.bfloat16, requires_grad=grown)
    given = {"prompt_embeds": rows, "prompt_is_token_ids": None}
    if tokens is None:
        return given | {"prompt_token_ids": None, "all_token_ids": 80 * [0]}
    return given | {"prompt_token_ids": [*tokens], "prompt_is_token_ids": [at >= without for at in range(80)]}


def shown(*images):
    """What a prompt shows behind its tenth token, its thirtieth, and so on, by what vLLM calls it."""
    places = (make("PlaceholderRange", offset=at) for at in range(10, 100, 20))
    shows = zip(places, images, strict=False)
    return [make("MultiModalFeatureSpec", mm_position=at, identifier=one) for at, one in shows]


@pytest.mark.parametrize(
    ("computed", "asked", "loads"),
    [
        ({"lora_request": ADAPTER}, {"lora_request": adapter()}, True),
        ({"lora_request": ADAPTER}, {"lora_request": adapter("another")}, False),
        # loaded in the place of the other, under its name
        ({"lora_request": ADAPTER}, {"lora_request": adapter(path="/adapters/2")}, False),
        ({"lora_request": ADAPTER}, {}, False),
        ({}, {"lora_request": ADAPTER}, False),
        ({"mm_features": shown("cat", "dog")}, {"mm_features": shown("cat", "dog")}, True),
        ({"mm_features": shown("cat", "dog")}, {"mm_features": shown("cat", "cow")}, False),
        ({"mm_features": shown("cat")}, {"mm_features": shown("cat", "dog", "of the question")}, False),
        ({"mm_features": shown("cat", "dog")}, {"mm_features": shown("cat", "dog", "of the question")}, True),
        ({"mm_features": shown("cat")}, {"mm_features": shown("cat"), "lora_request": ADAPTER}, False),
        (embedded(), embedded(), True),
        (embedded(grown=True), embedded(), True),
        (embedded(), embedded(1.0), False),
        (embedded(), {}, False),
        (embedded(), {"all_token_ids": 80 * [0]}, False),
        ({}, embedded(), False),
        (embedded(tokens=range(80), without=40), embedded(tokens=range(80), without=40), True),
        (embedded(tokens=range(80), without=40), embedded(tokens=range(80), without=39), False),
        ({"mm_features": shown("shelf-photo-1")}, {"mm_features": shown("shelf-photo-2")}, False),
    ],
)
def test_a_prompt_is_loaded_if_the_same_was_computed(computed, asked, loads):
    """Forty tokens, or embeddings for some, an adapter and what is shown in them decide what is cached."""
    assert loaded(computed, asked) == loads


def loaded(computed, asked, *, of=range(80), there=None, here=None):
    """Whether forty tokens that were computed there are loaded here, by a prompt of these that is longer."""
    scheduler = side(**there or {})
    prompt = said(request({"do_remote_decode": True}), range(40), **computed)
    scheduler.on_new_request(prompt)
    scheduler.build_connector_meta(step(new=[("r", [1, 2, 3], 0, 40)]))
    prompt.status = STATUS.FINISHED_LENGTH_CAPPED
    _, params = scheduler.request_finished(prompt)
    assert params is not None
    scheduler = side(**here or {})
    coming = said(request(params, tokens=80), of, **asked)
    scheduler.on_new_request(coming)
    matched = scheduler.get_num_new_matched_tokens(coming, 0)
    assert matched in ((40, True), (0, False))
    return matched[1]


def test_where_names_do_not_tell_what_images_show_all_else_is_told():
    numbered, one, other = {"named": False}, {"mm_features": shown("1-image-0")}, {"mm_features": shown("2-image-0")}
    for here in ({}, numbered):
        assert loaded(one, other, there=numbered, here=here)
        assert not loaded(one, other, of=range(1, 81), there=numbered, here=here)
        assert not loaded(one, other | {"lora_request": ADAPTER}, there=numbered, here=here)
        assert not loaded(one, {"mm_features": shown("1-image-0", "1-image-1")}, there=numbered, here=here)
        assert loaded({}, {}, there=numbered, here=here)
    assert loaded({}, {}, here=numbered)
    assert not loaded(one, one, here=numbered), "numbers begin anew in each engine"


def test_an_answer_to_embeddings_is_not_offered_nor_are_they_read():
    """All that the engine computes would wait for that."""
    scheduler, coming = announced(wanted(), 7, 8, 9, answers=True)
    scheduler.build_connector_meta(step())
    assert answered(scheduler, said(coming, range(40), prompt_embeds=object())) == (False, None)


def test_an_answer_about_images_that_names_do_not_tell_is_not_offered():
    for images, names, given in ((("cat",), True, True), (("1-image-0",), False, False), ((), False, True)):
        scheduler, coming = announced(wanted(), 7, 8, 9, answers=True, named=names)
        scheduler.build_connector_meta(step())
        later, params = answered(scheduler, coming, shows=shown(*images))
        assert (later, params is not None) == (given, given)
        if params is not None:  # and is not loaded by an engine that cannot tell
            turn = said(request(params, tokens=80), range(80), mm_features=shown(*images))
            scheduler = side(named=False)
            scheduler.on_new_request(turn)
            assert scheduler.get_num_new_matched_tokens(turn, 0)[1] == (not images)


@pytest.mark.parametrize(
    ("answers", "status", "names"),
    [(False, "FINISHED_STOPPED", {}), (True, "FINISHED_ABORTED", {}), (True, "FINISHED_STOPPED", {"r": "another"})],
)
def test_an_answer_is_not_offered_unless_that_is_asked_for_and_can_be(answers, status, names):
    scheduler, coming = announced(wanted(), 7, 8, 9, answers=answers)
    scheduler.build_connector_meta(step())
    scheduler._names.update(names)
    assert answered(scheduler, coming, status=status) == (False, None)
    assert scheduler.build_connector_meta(step()).steps == []


def test_what_waits_too_long_for_blocks_is_computed(monkeypatch, caplog):
    """Its prefill engine may wait for those that are on offer here."""
    now = 100.0
    monkeypatch.setattr("kvxfer.integrations.vllm.scheduler.monotonic", lambda: now)
    (scheduler, first), second, third = announced(wanted(), patience=60.0), wanted(), wanted()
    second.request_id, third.request_id = "second", "third"
    scheduler.on_new_request(second)
    scheduler.update_state_after_alloc(second, Blocks(1, 2, 3), 40)
    second.num_computed_tokens, now = 40, 130.0
    scheduler.on_new_request(third)
    assert [load.request for load in scheduler.build_connector_meta(step()).loads] == ["second"]
    assert scheduler.get_num_new_matched_tokens(first, 0) == (40, True)
    now = 160.0
    assert scheduler.build_connector_meta(step()).declines == [("r", first.kv_transfer_params["ticket"])]
    matched = [scheduler.get_num_new_matched_tokens(one, 0) for one in (first, third)]
    assert matched == [(0, False), (40, True)]
    assert "load_declined request=r" in caplog.text
    assert declined(scheduler) == []


@pytest.mark.parametrize(("given", "name"), [("mine", "mine"), ("", "r"), (7, "r")])
def test_a_router_may_name_what_it_makes_a_ticket_of(given, name):
    key = secrets.token_bytes(32)
    scheduler = SchedulerSide(FULL, cached=False, layerwise=False, key=key)
    scheduler.collect(cards())
    going = request({"do_remote_decode": True, "transfer_id": given})
    scheduler.on_new_request(going)
    (only,) = scheduler.build_connector_meta(step(new=[("r", [3, 4, 5], 0, 40)])).steps
    assert (only.request, only.name) == ("r", name)
    going.status = STATUS.FINISHED_STOPPED
    _, params = scheduler.request_finished(going)
    assert params is not None
    assert params["ticket"] == Issuer(Ticket.parse(params["ticket"]).card, key).ticket(name)


def test_what_a_client_gives_is_refused_at_no_more_length_than_a_line_has(caplog):
    scheduler, long = side(), 5_000_000 * "n"
    for name, params in enumerate(({}, {"transfer_id": long}, {"transfer_id": 257 * "n"}, {"transfer_id": 256 * "n"})):
        scheduler.on_new_request(request({"do_remote_decode": True} | params, name=f"r{name}"))
    scheduler.on_new_request(wanted(remote_num_tokens=long))
    assert (list(scheduler._produced), list(scheduler._names)) == (["r0", "r3"], ["r0", 256 * "n"])
    assert [record.kvxfer["event"] for record in caplog.records] == 2 * ["transfer_id_refused"] + ["ticket_refused"]
    assert max(len(record.getMessage()) for record in caplog.records) < 500


def test_a_name_is_one_requests_until_its_offer_is_over():
    scheduler = side()

    def came(name):
        """Whether a request of this id, named as the others, gets a ticket; and it once it has ended."""
        one = request({"do_remote_decode": True, "transfer_id": "same"}, name=name)
        scheduler.on_new_request(one)
        scheduler.build_connector_meta(step(new=[(name, [3, 4, 5], 0, 40)]))
        one.status = STATUS.FINISHED_STOPPED
        return scheduler.request_finished(one)[1] is not None

    assert came("a")
    assert not came("b")
    scheduler.update_connector_output(received(sent=["b", "other"]))
    assert not came("c")
    scheduler.update_connector_output(received(sent=["a"]))
    assert came("d")
    never = request({"do_remote_decode": True, "transfer_id": "free"}, name="never")
    scheduler.on_new_request(never)
    scheduler.request_finished(never)
    scheduler.update_connector_output(received(sent=["d"]))
    assert scheduler._names == {}


@pytest.mark.parametrize(("key", "refused"), [(None, []), (bytes(32), ["r"])])
def test_a_prompt_that_never_ran_holds_nothing_and_is_refused_if_it_may_have_a_ticket(key, refused):
    scheduler, going = announced(produced(), key=key)
    going.status = STATUS.FINISHED_ABORTED
    assert scheduler.request_finished(going) == (False, None)
    orders = scheduler.build_connector_meta(step())
    assert (orders.withdraws, orders.refusals) == ([], refused)
    assert scheduler.build_connector_meta(step()).refusals == []


def test_a_preempted_prompt_is_another_attempt():
    scheduler, going = announced(produced())
    scheduler.build_connector_meta(step(new=[("r", [3, 4], 0, 32)]))
    orders = scheduler.build_connector_meta(step(preempted=["r", "other"]))
    assert (orders.preempted, orders.steps) == (["r"], [])
    assert scheduler.build_connector_meta(step(preempted=["r"])).preempted == []
    orders = scheduler.build_connector_meta(step(cached=[("r", [7, 8, 9], 0, 40)]))
    assert orders.steps == [OfferStep("r", "r", 1, blocks(7, 8, 9), 0, 40, last=True)]
    going.status = STATUS.FINISHED_STOPPED
    _, params = scheduler.request_finished(going)
    assert params is not None
    assert params["ticket"]["attempt"] == 1


def test_a_request_that_is_neither_is_left_alone():
    scheduler, plain = announced(request())
    assert scheduler.get_num_new_matched_tokens(plain, 0) == (0, False)
    scheduler.update_state_after_alloc(plain, Blocks(1), 0)
    orders = scheduler.build_connector_meta(step(new=[("r", [3, 4, 5], 0, 40)]))
    assert (orders.claims, orders.loads, orders.declines, orders.steps) == ({}, [], [], [])
    assert scheduler.request_finished(plain) == (False, None)


# --- windows


def test_of_a_window_only_what_outlives_the_prompt_is_offered():
    going = request({"do_remote_decode": True}, tokens=22, max_tokens=9)
    going.prompt_token_ids, going._all_token_ids = list(range(22)), list(range(22))
    scheduler, _ = announced(going, groups=MIXED)
    # the decode engine computes the last token, which sees 14 to 21
    assert (going.num_prompt_tokens, going.max_tokens) == (21, 1)
    assert going.prompt_token_ids == going._all_token_ids == list(range(21))
    outputs = [
        step(new=[("r", ([3], [4, 5]), 0, 8)]),
        step(cached=[("r", ([], [6, 7]), 8, 8)]),
        step(preempted=["r"]),
        step(cached=[("r", ([3], [0, 0, 5]), 8, 4)]),
        step(cached=[("r", ([8], [6, 7, 9]), 12, 9)]),
    ]
    steps = [one for output in outputs for one in scheduler.build_connector_meta(output).steps]
    assert [(one.attempt, one.blocks, one.start, one.stop) for one in steps] == [
        (0, {"window": ([], 12), "full": ([3], 0)}, 0, 8),
        (0, {"window": ([7], 0), "full": ([], 0)}, 8, 16),
        (1, {"window": ([], 12), "full": ([3], 0)}, 0, 12),
        (1, {"window": ([6, 7, 9], 0), "full": ([8], 0)}, 12, 21),
    ]
    going.status, going.all_token_ids = STATUS.FINISHED_LENGTH_CAPPED, [*range(21), 999]
    _, params = scheduler.request_finished(going)
    assert params is not None
    assert params["remote_num_tokens"] == 21
    # a router that gives the ticket to another prompt has that computed
    for tokens, matched in ((range(22), (21, True)), ([*range(20), 7, 21], (0, False))):
        coming = said(request(params, tokens=22), tokens)
        scheduler, _ = announced(coming, groups=MIXED)
        assert scheduler.get_num_new_matched_tokens(coming, 0) == matched
        assert ("r" in declined(scheduler)) == (not matched[1])


def test_with_windows_what_is_offered_is_computed_here_and_only_prompts_of_tokens_are_offered():
    going = request(wanted().kv_transfer_params | {"do_remote_decode": True}, tokens=22, prompt_token_ids=[])
    going._all_token_ids = []
    scheduler, _ = announced(going, groups=MIXED)
    assert scheduler.get_num_new_matched_tokens(going, 0) == (0, False)
    assert declined(scheduler) == ["r"]
    for embedded in ({"prompt_token_ids": None}, {"prompt_token_ids": [7] * 8, "prompt_embeds": torch.zeros(8, 8)}):
        going = request({"do_remote_decode": True}, tokens=8, **dict[str, Any](embedded))
        assert announced(going, groups=MIXED)[0].build_connector_meta(step(new=[("r", ([3], [4]), 0, 8)])).steps == []
        assert going.prompt_token_ids in (None, [7] * 8), "vLLM wants as many embeddings"


def loaded_of(groups, table, *, tokens=22, held=0, cached):
    """What is loaded of all but the last token of a prompt, behind what is held, where it has these blocks."""
    coming = wanted(22 if groups is MIXED else tokens - 1)
    coming.num_prompt_tokens = tokens
    scheduler, _ = announced(coming, groups=groups, cached=cached)
    assert scheduler.get_num_new_matched_tokens(coming, held) == (tokens - 1 - held, True)
    scheduler.update_state_after_alloc(coming, Blocks(5, 6, more=[table]), tokens - 1 - held)
    coming.num_computed_tokens = tokens - 1
    (load,) = scheduler.build_connector_meta(step()).loads
    return load.blocks


@pytest.mark.parametrize(("cached", "held", "window"), [
    (False, 0, ([7, 8, 9], 14)), (True, 0, ([7, 8, 9], 12)), (True, 12, ([7, 8, 9], 12)), (True, 14, ([7, 8, 9], 14)),
    (True, 16, ([8, 9], 16)),
])  # fmt: skip
def test_of_a_window_only_what_the_next_token_sees_is_loaded_or_whole_blocks_of_it(cached, held, window):
    found = loaded_of(MIXED, [0, 0, 0, 7, 8, 9], held=held, cached=cached)
    assert found == {"window": window, "full": ([5, 6][held // 16 :], held)}


# --- state


def test_state_is_on_offer_once_it_is_that_of_the_whole_prompt_and_not_after_a_preemption():
    going = request({"do_remote_decode": True}, tokens=22, max_tokens=9)
    going.prompt_token_ids, going._all_token_ids = list(range(22)), list(range(22))
    scheduler, _ = announced(going, groups=STATEFUL)
    assert (going.num_prompt_tokens, going.max_tokens) == (21, 1), "the last token is the decode engine's"
    outputs = [
        step(new=[("r", ([3], [4]), 0, 8)]),
        step(cached=[("r", ([5], [6, 7]), 8, 10)]),  # the last block, of which something is still to be computed
        step(preempted=["r"]),
        step(cached=[("r", ([3], [0, 5]), 8, 8)]),  # a block before that vLLM has let go of
        step(cached=[("r", ([8], [9]), 16, 4)]),
        step(cached=[("r", None, 20, 1)]),
    ]
    steps = [one for output in outputs for one in scheduler.build_connector_meta(output).steps]
    assert [(one.attempt, one.blocks["state"][0], one.start, one.stop) for one in steps] == [
        (0, [], 0, 8),
        (0, [], 8, 18),
        (1, [], 0, 16),
        (1, [], 16, 20),
        (1, [9], 20, 21),
    ]


def test_a_prompt_that_ends_before_the_state_that_is_on_offer_is_computed():
    coming = wanted(22)
    coming.num_prompt_tokens = 22  # of which the decode engine computes the last
    scheduler, _ = announced(coming, groups=STATEFUL)
    assert scheduler.get_num_new_matched_tokens(coming, 0) == (0, False)
    assert declined(scheduler) == ["r"]


def test_a_prompt_of_one_token_is_not_gone_on_with_since_its_state_would_be_anothers():
    going = request({"do_remote_decode": True}, tokens=1, max_tokens=9, prompt_token_ids=[7])
    announced(going, groups=STATEFUL)
    assert (going.num_prompt_tokens, going.max_tokens) == (1, 1)


@pytest.mark.parametrize(
    ("tokens", "held", "size", "table", "slot"),
    [
        (22, 0, 512, [4], 4),  # one block for all, where prefixes are not cached
        (22, 0, 8, [0, 0, 4], 4),
        (17, 0, 8, [0, 4], 4),  # all of a block
        (22, 16, 8, [0, 9, 4], 4),  # behind the state of a prefix that was cached here
    ],
)
def test_state_is_loaded_into_the_block_that_the_next_token_takes_it_from(tokens, held, size, table, slot):
    groups = [STATEFUL[0], BlockGroup("state", 1, size, 2, state=True)]
    assert loaded_of(groups, table, tokens=tokens, held=held, cached=size == 8)["state"][0] == [slot]
