"""Tickets and cards that were cut, edited or made up: a `TicketError`, or what they say; never a forged right."""

import json
from random import Random

import campaign
import pytest
from mutation import NUMBERS, OTHERS, Mutator, Raw

from kvxfer.errors import TicketError
from kvxfer.tickets import EngineCard, Issuer, RankCard, Ticket

KEY = bytes(range(32))
PLACES = {
    "one": ["unix:/run/kvxfer/0.sock"],
    "numbered": [f"tcp:10.0.0.7:{9000 + rank}" for rank in range(4)],
    "listed": ["tcp:a.example:1", "tcp:b.example:77", "unix:/tmp/c"],
}
RANKS = {
    name: [
        RankCard(engine="e", rank=rank, world=len(places), endpoint=place, incarnation=f"{rank:064x}")
        for rank, place in enumerate(places)
    ]
    for name, places in PLACES.items()
}
ISSUERS = [Issuer(EngineCard.of(cards), KEY) for cards in RANKS.values()]
ISSUED = [
    issuer.ticket(request, attempt=attempt) for issuer in ISSUERS for request in ("r", "ä-1") for attempt in (0, 7)
]
RIGHTS = {(ticket["request"], ticket["attempt"]) for ticket in ISSUED}
READERS = {
    "ticket": (Ticket.parse, ISSUED),
    "engine card": (EngineCard.from_dict, [issuer.card.to_dict() for issuer in ISSUERS]),
    "rank card": (RankCard.from_dict, [card.to_dict() for cards in RANKS.values() for card in cards]),
}
STRINGS = ["", "unix", "unix:/", "unix:/" + "x" * 600, "tcp::1", "tcp:h:0", "tcp:h:65536", "tcp:[::1]:80", "unix:/\x00"]
STRINGS += ["0" * 32, "G" * 32, "0" * 15, "0" * 400, "é" * 256, "\ud800", "9" * 5000]


def edited(draw: Random, mutator: Mutator, data):
    """One of these, with a few values changed; strings are cut, doubled or replaced."""
    tree = mutator.changed(draw, data)
    for name in [name for name, value in tree.items() if isinstance(value, str)] if isinstance(tree, dict) else []:
        if draw.random() < 0.1:
            text = tree[name]
            tree = {**tree, name: draw.choice([text[:-1], text * 2, text + "0", text.upper(), draw.choice(STRINGS)])}
    return tree


def as_json(draw: Random, tree):
    """The same after a trip through JSON, which may have been damaged on its way."""
    try:
        text = json.dumps(tree)
    except (TypeError, ValueError):
        return tree
    if draw.random() < 0.2:
        at = draw.randrange(len(text))
        text = text[:at] + draw.choice('{}[],:"\\0e') + text[at + draw.randrange(2) :]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return tree


@pytest.mark.parametrize("kind", READERS)
def test_cards_and_tickets(kind):
    read, valid = READERS[kind]
    mutator = Mutator([])
    mutator.trees = list(valid)
    right = 0
    for number in range(max(2000, campaign.FRAMES // 20)):
        draw = Random(f"{campaign.SEED}/{kind}/{number}")
        tree = as_json(draw, edited(draw, mutator, draw.choice(valid)))
        if isinstance(tree, Raw):
            tree = bytes(tree)
        try:
            made = read(tree)
        except TicketError as error:
            campaign.is_short(error, 2000)
            continue
        except BaseException as error:
            error.add_note(f"FUZZ_SEED={campaign.SEED}, case {number}: {tree!r:.2000}")
            raise
        right += 1
        if isinstance(made, Ticket):
            assert made.mac not in repr(made)
            assert len(made.rank_endpoints) == made.world
            if any(issuer.verify(made.ref()) for issuer in ISSUERS):
                assert (made.request, made.attempt) in RIGHTS
    assert right > 100


@pytest.mark.parametrize("value", [*OTHERS, *NUMBERS[:4]], ids=repr)
def test_what_is_no_mapping_at_all(value):
    for read, _ in READERS.values():
        with pytest.raises(TicketError):
            read(value)


def test_engines_of_mutated_rank_cards():
    for number in range(max(1000, campaign.FRAMES // 100)):
        draw = Random(f"{campaign.SEED}/engines/{number}")
        cards = [card.to_dict() for card in RANKS[draw.choice(list(RANKS))]]
        mutator = Mutator([])
        mutator.trees = cards
        changed = mutator.changed(draw, cards)
        if not isinstance(changed, list):
            continue
        try:
            made = EngineCard.of(changed)
        except TicketError:
            continue
        assert len(made.rank_endpoints) == made.world


def test_a_mac_is_for_one_request_and_attempt():
    draw = Random(campaign.SEED)
    for _ in range(2000):
        issuer, ticket = draw.choice(ISSUERS), Ticket.parse(draw.choice(ISSUED))
        ref = ticket.ref()
        mac = bytearray(ref.mac)
        mac[draw.randrange(len(mac))] ^= 1 << draw.randrange(8)
        assert not issuer.verify(type(ref)(ref.request, ref.attempt, bytes(mac)))
        assert not issuer.verify(type(ref)(ref.request + "x", ref.attempt, ref.mac))
        assert not issuer.verify(type(ref)(ref.request, ref.attempt ^ 1 << draw.randrange(32), ref.mac))
