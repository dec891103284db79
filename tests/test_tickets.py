"""Cards fix an epoch, tickets are the same from every issuer, and nothing that was edited passes for one."""
# fields of messages whose type the test has fixed, and arguments that are wrong on purpose
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import hashlib
import io
import json
import random
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from kvxfer import tickets
from kvxfer.errors import TicketError
from kvxfer.protocol.framing import decode, encode
from kvxfer.protocol.messages import Claim
from kvxfer.tickets import KEY_BYTES, EngineCard, Issuer, RankCard, Ticket

KEY = bytes(range(KEY_BYTES))


def rank_card(rank, world, endpoint=None, *, engine="prefill", seed=0, **changes):
    incarnation = hashlib.sha256(f"{seed}/{rank}".encode()).hexdigest()
    endpoint = endpoint or f"tcp:10.0.0.7:{9000 + rank}"
    return RankCard(engine=engine, rank=rank, world=world, endpoint=endpoint, incarnation=incarnation, **changes)


def engine_card(endpoints=2, **changes):
    """A card of so many ranks, or of these endpoints."""
    listed = [None] * endpoints if isinstance(endpoints, int) else endpoints
    return EngineCard.of([rank_card(rank, len(listed), where, **changes) for rank, where in enumerate(listed)])


# --- cards


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.randoms(use_true_random=False))
def test_the_order_of_cards_does_not_matter(world, chance):
    cards = [rank_card(rank, world) for rank in range(world)]
    shuffled = [card if chance.random() < 0.5 else card.to_dict() for card in chance.sample(cards, world)]
    assert EngineCard.of(shuffled) == EngineCard.of(cards)


def test_the_epoch_is_the_one_of_the_specification():
    cards = [rank_card(rank, 3) for rank in range(3)]
    whole = b"kvxfer epoch v1" + b"".join(bytes.fromhex(card.incarnation) for card in cards)
    assert EngineCard.of(cards).epoch == hashlib.sha256(whole).hexdigest()[:32]


def test_the_oldest_rank_fixes_the_version():
    assert EngineCard.of([rank_card(0, 2, wire=3), rank_card(1, 2, wire=2)]).wire == 2


@pytest.mark.parametrize(
    ("cards", "message"),
    [
        ([], r"every rank of \?"),
        ([rank_card(0, 2)], r"every rank of 2 once, not \[0\]"),
        ([rank_card(0, 2), rank_card(0, 2)], r"not \[0, 0\]"),
        ([rank_card(0, 2), rank_card(0, 2, engine="other")], "different engines"),
        ([rank_card(0, 2, "unix:/a"), rank_card(1, 2, "unix:/a")], "two ranks are said to be at unix:/a: give each"),
        ([rank_card(0, 2).to_dict() | {"rank": "0"}], "this is no rank card"),
        ([rank_card(0, 2).to_dict() | {"incarnation": "00"}], "this is no rank card"),
        ([rank_card(0, 2).to_dict() | {"endpoint": "unix:/a\n"}], "this is no rank card"),
        ([rank_card(0, 2).to_dict() | {"token": 1}], "this is no rank card"),
    ],
)
def test_cards_that_make_no_engine(cards, message):
    with pytest.raises(TicketError, match=message):
        EngineCard.of(cards)


def test_cards_survive_json():
    card, rank = engine_card(["unix:/a", "tcp:h:1", "tcp:h:2"]), rank_card(1, 4)
    assert EngineCard.from_dict(json.loads(json.dumps(card.to_dict()))) == card
    assert RankCard.from_dict(json.loads(json.dumps(rank.to_dict()))) == rank
    assert hash(card) == hash(EngineCard.from_dict(card.to_dict()))
    with pytest.raises(TicketError, match="engine card"):
        EngineCard.from_dict(card.to_dict() | {"world": 4} | {"epoch": "x"})
    with pytest.raises(TicketError, match="endpoints for 3 ranks, but the engine has 4"):
        EngineCard.from_dict(card.to_dict() | {"world": 4})


@pytest.mark.parametrize("endpoint", ["tcp:host", "tcp:host:0", "tcp:host:65536", "unix", "unix:", "host:1", ""])
def test_an_endpoint_that_nobody_can_connect_to_is_refused_with_the_forms_that_can(endpoint):
    words = "give unix:/path (at most 107 bytes) or tcp:host:port with a port from 1 to 65535"
    with pytest.raises(TicketError) as caught:
        RankCard.from_dict(rank_card(0, 1).to_dict() | {"endpoint": endpoint})
    assert f"{endpoint!r} is no endpoint of a rank: {words}" in str(caught.value)
    ticket = Issuer(engine_card(), KEY).ticket("r") | {"world": 1, "endpoints": {"prefix": endpoint}}
    with pytest.raises(TicketError) as caught:
        Ticket.parse(ticket)
    assert words in str(caught.value)


# --- endpoints as a template

numbers = st.sampled_from(["0", "1", "7", "9", "10", "11", "007", "99", "100", "4294967296", "\u0663", ""])
pieces = st.sampled_from(["", "a", "h1", "h10", ".", ":", "-1", "\u00b2", "\u00e9"])
ports = st.sampled_from(["1", "7", "9", "10", "11", "007", "99", "100", "65535"])
names = st.builds(lambda a, n, port: f"tcp:h{a.replace(':', '-')}{n}:{port}", pieces, numbers, ports)
sockets = st.builds(lambda a, n, b, m: f"unix:/s{a}{n}{b}{m}x", pieces, numbers, pieces, numbers) | st.builds(
    lambda a, n, b: f"unix:/s{a}{n}{b}", pieces, numbers, pieces
)


@settings(max_examples=300, deadline=None)
@given(st.lists(names | sockets, min_size=1, max_size=8, unique=True))
def test_any_endpoints_come_back(endpoints):
    card = engine_card(endpoints)
    assert card.rank_endpoints == tuple(endpoints)
    assert EngineCard.from_dict(json.loads(json.dumps(card.to_dict()))).rank_endpoints == tuple(endpoints)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 99_999), st.integers(1, 40), pieces, pieces)
def test_numbered_endpoints_take_the_room_of_one(first, world, before, after):
    endpoints = [f"unix:/h{before}:{first + rank}{after}" for rank in range(world)]
    card = engine_card(endpoints)
    assert card.rank_endpoints == tuple(endpoints)
    assert card.endpoints.parts is None or before.isdigit() or after.isdigit()


@pytest.mark.parametrize(
    ("endpoints", "template"),
    [
        (["unix:/only"], {"prefix": "unix:/only"}),
        (["tcp:h:9", "tcp:h:10", "tcp:h:11"], {"prefix": "tcp:h:", "first": 9}),
        (["unix:/a0.sock", "unix:/a1.sock"], {"prefix": "unix:/a", "suffix": ".sock", "first": 0}),
        (["tcp:h:10", "tcp:h:9"], {"prefix": "tcp:h:", "parts": ["10", "9"]}),
        (["tcp:h:01", "tcp:h:02"], {"prefix": "tcp:h:", "parts": ["01", "02"]}),
    ],
)
def test_templates(endpoints, template):
    assert engine_card(endpoints).to_dict()["endpoints"] == template


# --- tickets


@settings(max_examples=100, deadline=None)
@given(st.text(min_size=1, max_size=256), st.integers(0, 2**32 - 1))
def test_a_ticket_survives_json_and_the_wire(request_id, attempt):
    try:
        request_id.encode()
    except UnicodeEncodeError:
        return
    issuer = Issuer(engine_card(), KEY)
    ticket = Ticket.parse(json.loads(json.dumps(issuer.ticket(request_id, attempt=attempt))))
    assert (ticket.request, ticket.attempt, ticket.rank_endpoints) == (request_id, attempt, issuer.card.rank_endpoints)
    assert ticket.card == issuer.card, "so a ticket and the key are enough to make others"
    assert Ticket.parse(ticket) is ticket
    (ref,) = decode(encode(Claim([ticket.ref()]))[4:]).tickets
    assert (ref.request, ref.attempt) == (request_id, attempt)
    assert issuer.verify(ref)


def test_every_issuer_makes_the_same_bytes():
    here, there = engine_card(4), EngineCard.from_dict(json.loads(json.dumps(engine_card(4).to_dict())))
    assert json.dumps(Issuer(here, KEY).ticket("r")) == json.dumps(Issuer(there, bytes(KEY)).ticket("r"))
    assert Issuer(here, KEY).ticket("r") != Issuer(here, KEY).ticket("r", attempt=1)
    assert Issuer(here.to_dict(), KEY).ticket("r") == Issuer(here, KEY).ticket("r")


@pytest.mark.parametrize(("card", "key", "words"), [
    *((card, KEY, "no engine card") for card in (None, {}, [], "card", b"", {"engine": "x"})),
    *((engine_card(), bytes(length), f"32 bytes, not {length}") for length in (0, 16, 31, 33)),
])  # fmt: skip
def test_an_issuer_without_a_card_or_a_key(card, key, words):
    with pytest.raises(TicketError, match=words):
        Issuer(card, key)


def test_an_id_of_a_kind_of_text_that_is_not_encoded_travels_as_text():
    class Text(str):
        __slots__ = ()

    issuer = Issuer(engine_card(), KEY)
    (ref,) = decode(encode(Claim([Ticket.parse(issuer.ticket(Text("r"))).ref()]))[4:]).tickets
    assert issuer.verify(ref)


@pytest.mark.parametrize(
    "place",
    [
        lambda rank, chance: f"tcp:10.1.0.7:{9000 + rank}",
        lambda rank, chance: f"tcp:10.1.{chance.randrange(256)}.{chance.randrange(256)}:{chance.randrange(65536)}",
        lambda rank, chance: f"unix:/tmp/kvxfer-{chance.randrange(1 << 40):08x}"[:27] + "/worker.sock",
        lambda rank, chance: f"tcp:node-{rank // 8:03}.cluster.example:{9000 + rank % 8}",
    ],
    ids=["numbered", "anywhere", "private sockets", "eight a node"],
)
def test_a_ticket_of_64_ranks_fits_into_2_kib(place):
    chance = random.Random(1)
    card = engine_card([place(rank, chance) for rank in range(64)])
    ticket = Issuer(card, KEY).ticket("cmpl-0f8fad5b-d9cb-469f-a165-70867728950e", attempt=3)
    assert len(json.dumps(ticket)) <= 2048


@pytest.mark.parametrize(
    ("request_id", "attempt"),
    [("", 0), ("x" * 257, 0), ("\ud800", 0), ("r", -1), ("r", 2**32), ("r", 2**70), ("r", 1.5), (7, 0), ("r", None)],
)
def test_requests_that_get_no_ticket(request_id, attempt):
    with pytest.raises(TicketError):
        Issuer(engine_card(), KEY).ticket(request_id, attempt=attempt)


# --- forged, edited and cut


def test_a_cut_mac_and_another_key_or_epoch():
    issuer = Issuer(engine_card(), KEY)
    ref = Ticket.parse(issuer.ticket("r")).ref()
    assert not any(issuer.verify(msgspec.structs.replace(ref, mac=ref.mac[:cut])) for cut in range(16))
    assert not Issuer(engine_card(), KEY[::-1]).verify(ref)
    assert not Issuer(engine_card(seed=1), KEY).verify(ref)


@pytest.mark.parametrize("edit", [
    {"v": 2}, {"v": True}, {"world": 1 << 20}, {"epoch": "AB" * 16},
    {"endpoints": {"prefix": "tcp:h:", "first": 1, "extra": 0}}, {"endpoints": {"prefix": "tcp:h:", "parts": ["1"]}},
    {"endpoints": {"prefix": "tcp:h:", "first": -1}}, {"endpoints": {"prefix": "http://h:", "first": 1}},
    {"endpoints": {"prefix": "", "parts": ["tcp:h:1", "h:2"]}}, {"endpoints": {"prefix": "tcp:h:1\n"}},
    {"endpoints": {"prefix": "tcp:h:", "first": 0}}, {"endpoints": {"prefix": "tcp:h:", "first": 65_535}},
    {"endpoints": {"prefix": "tcp:h:", "parts": ["1", "http"]}}, {"endpoints": {"prefix": "unix:/" + "a" * 107}},
    {"request": "\ud800"}, {"mac": "zz" * 16}, {"mac": "ab" * 16 + "\n"}, {"more": 1},
], ids=lambda edit: "-".join(f"{name}={str(value)[:40]}" for name, value in edit.items()))  # fmt: skip
def test_what_was_edited_so_that_it_is_no_ticket(edit):
    ticket = Issuer(engine_card(), KEY).ticket("r")
    with pytest.raises(TicketError) as caught:
        Ticket.parse(ticket | edit)
    assert ticket["mac"] not in str(caught.value)


def test_a_refusal_quotes_no_more_than_a_line_holds():
    long = 5_000_000 * "x"
    for data in ({long: 1}, {"request": long}, {"endpoints": {"prefix": "tcp:h", long: 1}}):
        with pytest.raises(TicketError, match="this is no ticket") as caught:
            Ticket.parse(Issuer(engine_card(), KEY).ticket("r") | data)
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize("field", ["engine", "world", "epoch", "endpoints", "request", "mac"])
def test_a_field_that_is_missing(field):
    ticket = Issuer(engine_card(), KEY).ticket("r")
    del ticket[field]
    with pytest.raises(TicketError, match=f"missing required field `{field}`"):
        Ticket.parse(ticket)


# --- secrets stay so


def test_no_text_of_a_ticket_shows_its_mac():
    data = Issuer(engine_card(), KEY).ticket("r", attempt=2)
    ticket = Ticket.parse(data)
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(ticket)
    for text in (repr(ticket), str(ticket), f"{ticket}", console.export_text()):
        assert data["mac"] not in text
        assert data["mac"][:4] in text
        assert "attempt=2" in text


def test_macs_are_compared_in_constant_time(monkeypatch):
    issuer = Issuer(engine_card(), KEY)
    ref, compared = Ticket.parse(issuer.ticket("r")).ref(), []

    def compare(a, b):
        compared.append({a, b})
        return True

    monkeypatch.setattr(tickets.hmac, "compare_digest", compare)
    assert issuer.verify(msgspec.structs.replace(ref, mac=b"other"))
    assert compared == [{ref.mac, b"other"}]


def test_tickets_need_neither_torch_nor_numpy_nor_nixl():
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['torch', 'numpy', 'nixl', 'pydantic', 'anyio', 'structlog']))\n"
        "from kvxfer.tickets import EngineCard, Issuer, RankCard, Ticket\n"
        "card = RankCard(engine='e', rank=0, world=1, endpoint='unix:/a', incarnation='00' * 32)\n"
        "issuer = Issuer(EngineCard.of([card]), bytes(32))\n"
        "print(issuer.verify(Ticket.parse(issuer.ticket('r')).ref()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True\n", "")
