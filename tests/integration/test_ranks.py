"""Engines of several ranks: who sends what to whom, whose ticket it is, and when the blocks are free."""

import asyncio
import itertools

import pytest
from inside import cut, hear, sessions
from stage import KEY, Cache, Copied, Gate, eventually, frames, quiet, raised
from wire import virtual

from kvxfer import (
    Code,
    Interleave,
    KvxferError,
    MismatchError,
    Released,
    TicketError,
    TransferTimeoutError,
    UnreachableError,
)
from kvxfer.protocol.messages import Release
from kvxfer.tickets import EngineCard, Issuer, Ticket

HEADS = 8


def split(ranks):
    """Ranges of heads that cover all, as even as they come."""
    edges = [HEADS * rank // ranks for rank in range(ranks + 1)]
    return [range(a, b) for a, b in itertools.pairwise(edges)]


async def engines(stage, theirs, ours, **config):
    sources = [Cache(heads=heads) for heads in theirs]
    targets = [Cache(heads=heads, layout="HND", block_tokens=8) for heads in ours]
    prefill, card = await stage.engine("prefill", sources, **config)
    decode, _ = await stage.engine("decode", targets, **config)
    return prefill, decode, sources, targets, card


@pytest.mark.parametrize("issuer", ["first", "last", "scheduler"])
@pytest.mark.parametrize(("theirs", "ours"), [(2, 1), (1, 2), (4, 2), (2, 4), (3, 2)])
async def test_heads_are_divided_and_every_offer_is_released(stage, theirs, ours, issuer):
    prefill, decode, sources, targets, card = await engines(stage, split(theirs), split(ours))
    tokens = range(2, 15)
    offers = [rank.offer("r", [3, 1, 2, 0], tokens=16, payload=b"p") for rank in prefill]
    by = {"first": prefill[0].engine, "last": prefill[-1].engine}
    ticket = (
        by[issuer].ticket("r") if issuer in by else Issuer(prefill[0].engine.card, prefill[0].engine._key).ticket("r")
    )
    copied = [Copied(target) for target in targets]
    for one in copied:
        for source in sources:
            one.bring(source, [3, 1, 2, 0], [5, 4], tokens)
    results = await asyncio.gather(*(rank.fetch(ticket, [5, 4], tokens=tokens, timeout=10) for rank in decode))
    for one in copied:
        one.check()
    assert all(result.payload == b"p" for result in results)
    endings = await asyncio.gather(*(offer.released() for offer in offers))
    assert {type(ending) for ending in endings} == {Released}
    assert sum(stats.bytes for ending in endings for stats in ending.stats) == 13 * HEADS * 2 * 2 * 32
    peers = {peer.split("@")[0] for result in results for peer in result.stats.peers}
    assert peers == {f"prefill[{rank}/{theirs}]" for rank in range(theirs)}
    await quiet(*prefill, *decode)
    assert card.world == theirs


async def test_a_rank_may_be_away_from_which_nothing_is_needed_and_else_fails_the_fetch_by_its_name(stage):
    prefill, _ = await stage.engine("prefill", [Cache(layers=[0]), Cache(layers=[1])])
    needs_it = await stage.worker("needs-it", Cache(layers=[0, 1]))
    needs_none = await stage.worker("needs-none", Cache(layers=[1]))
    offer = prefill[1].offer("r", [1], tokens=4)
    away = prefill[0].card.endpoint
    await prefill[0].aclose()
    untouched = Copied(stage.caches[needs_it])
    with pytest.raises(UnreachableError) as caught:
        await needs_it.fetch(offer.ticket, [2], tokens=range(4), timeout=5)
    assert caught.value.peer == away
    untouched.check()
    await stage.bring(prefill[1], needs_none, "s")
    await offer.withdraw()
    await quiet(prefill[1], needs_it, needs_none)


async def test_a_rank_whose_tokens_are_those_of_another_decode_rank_may_be_away(stage):
    """Equal turns on both sides: each decode rank needs one prefill rank, and hears of no other."""

    def caches():
        return [Cache(turns=Interleave(rank, 2, 4)) for rank in range(2)]

    sources, targets = caches(), caches()
    prefill, _ = await stage.engine("prefill", sources)
    decode, _ = await stage.engine("decode", targets)
    offer = prefill[1].offer("r", [1, 3], tokens=16)
    ticket = prefill[1].engine.ticket("r")
    await prefill[0].aclose()
    copied = Copied(targets[1]).bring(sources[1], [1, 3], [2, 0], range(1, 6))  # of its tokens the second to the sixth
    result = await decode[1].fetch(ticket, [2, 0], tokens=range(5, 14), timeout=5)
    copied.check()
    assert [peer.split("@")[0] for peer in result.stats.peers] == ["prefill[1/2]"]
    with pytest.raises(UnreachableError):
        await decode[0].fetch(ticket, [2, 0], tokens=range(5, 14), timeout=5)
    await offer.withdraw()
    await quiet(prefill[1], *decode)


async def test_nothing_goes_before_join(stage):
    sources = [Cache(heads=heads) for heads in split(2)]
    prefill, card = await stage.engine("prefill", sources, join=False)
    decode = await stage.worker("decode", Cache(heads=range(8)))
    with pytest.raises(TicketError, match=r"rank 0 of 2: call worker\.join"):
        prefill[0].offer("r", [0], tokens=4)
    with pytest.raises(TicketError, match=r"call worker\.join"):
        _ = prefill[1].engine
    with pytest.raises(TicketError, match=r"call worker\.join"):
        prefill[1].start_fetch(Issuer(card, KEY).ticket("r"), [0], tokens=range(4))
    assert prefill[0].describe()["offers"] == 0
    # a decode rank that comes too early waits, as one does that comes before its offer
    transfer = decode.start_fetch(Issuer(card, KEY).ticket("r"), [0], tokens=range(4), timeout=20)
    await eventually(lambda: decode.describe()["connecting"] == [rank.card.endpoint for rank in prefill])
    for rank in prefill:
        assert not transfer.done
        rank.join(card, key=KEY)
    offers = [rank.offer("r", [0], tokens=4) for rank in prefill]
    await transfer
    assert not decode.describe()["connecting"]
    assert {type(await offer.released()) for offer in offers} == {Released}


@virtual
async def test_a_rank_that_never_joins_is_waited_for_as_long_as_a_handshake_may_take(one):
    caches = [Cache(heads=heads) for heads in split(2)]
    ranks = [await one.worker(f"p{rank}", cache, engine="p", rank=rank, world=2) for rank, cache in enumerate(caches)]
    card = EngineCard.of([rank.card for rank in ranks])
    ranks[0].join(card, key=KEY)
    decode = await one.worker("d", Cache(heads=range(HEADS)))
    ticket, at = Issuer(card, KEY).ticket("r"), ranks[1].card.endpoint
    error, took = await one.timed(decode.start_fetch(ticket, [0], tokens=range(4), timeout=2))
    assert isinstance(error, TransferTimeoutError)
    assert f"held up by {at}" in str(error)
    assert took == pytest.approx(2, abs=0.1)
    waits = []
    for block in (0, 1):  # the second one as long as the first, which gives up before
        waits.append(asyncio.create_task(one.timed(decode.start_fetch(ticket, [block], tokens=range(4)))))
        await asyncio.sleep(20)
    for error, took in await asyncio.gather(*waits):
        assert isinstance(error, MismatchError)
        assert took == pytest.approx(30, abs=0.5)
    said = []
    for _ in range(2):
        await asyncio.sleep(90)
        said.append(frames(ranks[0], "Release"))
    assert said[0] == said[1]  # nor is it waited for again and again, to hear that nobody needs the request


@pytest.mark.parametrize("turns", range(16))
async def test_a_rank_may_join_while_it_is_met(stage, turns):
    """Who asks in that moment is served."""
    prefill, card = await stage.engine("prefill", [Cache(heads=heads) for heads in split(2)], join=False)
    decode = await stage.worker("decode", Cache(heads=range(8)))
    early = decode.start_fetch(Issuer(card, KEY).ticket("r"), [0], tokens=range(4), timeout=5)
    for _ in range(turns):
        await asyncio.sleep(0)
    for rank in prefill:
        rank.join(card, key=KEY)
    offers = [rank.offer("r", [0], tokens=4) for rank in prefill]
    await early
    assert {type(await offer.released()) for offer in offers} == {Released}


@virtual
async def test_a_rank_may_join_while_it_is_met_by_another_name(one):
    """Who asks by the one is led to the stream that leads to the other."""
    caches = [Cache(heads=heads) for heads in split(2)]
    ranks = [await one.worker(f"p{rank}", cache, engine="p", rank=rank, world=2) for rank, cache in enumerate(caches)]
    card, decode = EngineCard.of([rank.card for rank in ranks]), await one.worker("d", Cache(heads=range(HEADS)))
    names = {"prefix": "", "parts": [(await one.wire_to(ranks[0])).endpoint, ranks[1].card.endpoint]}
    issuer = Issuer(card, KEY)
    first = decode.start_fetch(issuer.ticket("r"), [0], tokens=range(4))
    await asyncio.sleep(1)
    second = decode.start_fetch(issuer.ticket("s") | {"endpoints": names}, [1], tokens=range(4))
    for _ in range(4):
        await asyncio.sleep(0)
    for rank in ranks:
        rank.join(card, key=KEY)
        rank.offer("r", [0], tokens=4)
        rank.offer("s", [0], tokens=4)
    await asyncio.gather(first, second)


async def test_join_refuses_what_is_not_its_engine(stage):
    prefill, card = await stage.engine("prefill", [Cache(), Cache()], join=False)
    one = await stage.worker("other", Cache())
    with pytest.raises(TicketError, match="the card is of"):
        one.join(card, key=KEY)
    with pytest.raises(TicketError, match="32 bytes"):
        prefill[0].join(card, key=b"short")
    with pytest.raises(TicketError, match="no engine card"):
        prefill[0].join({"engine": "x"}, key=KEY)
    prefill[0].join(card.to_dict(), key=KEY)
    assert prefill[0].engine.ticket("r") == Issuer(card, KEY).ticket("r")


@pytest.mark.parametrize("fetches", [False, True], ids=["declines alone", "fetches"])
async def test_each_rank_releases_for_itself(stage, fetches):
    """Else the blocks of the others would be free."""
    prefill, decode, sources, targets, _ = await engines(stage, split(1), split(2))
    offer = prefill[0].offer("r", [0, 1], tokens=8)
    if fetches:
        await decode[0].fetch(offer.ticket, [3], tokens=range(8), timeout=5)
    await decode[0].decline(offer.ticket)  # the same rank twice is one rank
    await eventually(lambda: frames(prefill[0], "Release") == 1 + fetches)
    assert not offer.wait_end().done()
    copied = Copied(targets[1]).bring(sources[0], [0, 1], [3], range(8))
    await decode[1].fetch(offer.ticket, [3], tokens=range(8), timeout=5)
    copied.check()
    assert isinstance(await offer.released(), Released)


@pytest.mark.parametrize("offered", [True, False])
async def test_a_rank_that_gives_a_request_back_ends_its_own_transfers_of_it(stage, offered):
    """Those of other ranks of its engine go on."""
    prefill = await stage.worker("prefill", Cache())
    decode, _ = await stage.engine("decode", [Cache(heads=heads) for heads in (range(2), range(2, 4))])
    ticket, tokens = prefill.engine.ticket("r"), range(8)
    stage.network.hold("decode0")
    offer = prefill.offer("r", [1, 2], tokens=8) if offered else None
    given_back = decode[0].start_fetch(ticket, [3, 4], tokens=tokens, timeout=20, keep=True)
    await eventually(lambda: stage.network.held("decode0") if offered else prefill.describe()["sending"] == 1)
    (link,) = sessions(prefill)
    hear(prefill, link, Release(Ticket.parse(prefill.engine.ticket("r")).ref()))
    stage.network.release("decode0")
    error = await raised(given_back, KvxferError)
    assert error.reason is Code.TICKET_RELEASED
    offer = offer or prefill.offer("r", [1, 2], tokens=8)
    await decode[1].fetch(ticket, [3, 4], tokens=tokens, timeout=20)
    assert isinstance(await offer.released(), Released)


async def test_a_rank_that_gave_a_request_back_before_it_was_offered_may_fetch_it_anew(stage):
    """As after that: what it releases is what runs then."""
    prefill = await stage.worker("prefill", Cache())
    decode, _ = await stage.engine("decode", [Cache(heads=heads) for heads in (range(2), range(2, 4))])
    ticket, tokens = prefill.engine.ticket("r"), range(8)
    first = decode[0].start_fetch(ticket, [3, 4], tokens=tokens, timeout=20, keep=True)
    await eventually(lambda: prefill.describe()["sending"] == 1)
    (link,) = sessions(prefill)
    hear(prefill, link, Release(Ticket.parse(prefill.engine.ticket("r")).ref()))
    await raised(first, KvxferError)
    again = decode[0].start_fetch(ticket, [3, 4], tokens=tokens, timeout=20)
    await eventually(lambda: prefill.describe()["sending"] == 1)
    offer = prefill.offer("r", [1, 2], tokens=8)
    await again
    await decode[1].fetch(ticket, [3, 4], tokens=tokens, timeout=20)
    assert isinstance(await offer.released(), Released)


async def replicated(stage):
    """Two prefill ranks that hold the same, and what both offer once the gate is open: a decode rank needs one."""
    source, target, gate = Cache(layout="MLA", heads=range(1)), Cache(layout="MLA", heads=range(1)), Gate()
    prefill, _ = await stage.engine("prefill", [source, source], connect_timeout=1.0)
    decode = await stage.worker("decode", target)
    return prefill, decode, [rank.offer("r", [1, 2], tokens=8, after=gate) for rank in prefill], gate, source, target


@pytest.mark.parametrize("how", ["keep", "claim"])
async def test_a_rank_of_which_nothing_is_needed_keeps_a_request_for_a_retry_as_the_others_do(stage, how):
    """It holds the same, and is what is left when the rank is lost that was to send it."""
    prefill, decode, offers, gate, source, target = await replicated(stage)
    claim = decode.claim(offers[0].ticket) if how == "claim" else None
    failed = decode.start_fetch(offers[0].ticket, [3, 4], tokens=range(8), keep=how == "keep")
    await eventually(lambda: any(rank.describe()["sending"] for rank in prefill))
    lost, left = sorted(range(2), key=lambda rank: prefill[rank].describe()["sending"], reverse=True)
    await prefill[lost].aclose(drain=False)
    await raised(failed, KvxferError)
    gate.fired, copied = True, Copied(target).bring(source, [1, 2], [5, 6], range(8))
    await decode.fetch(offers[left].ticket, [5, 6], tokens=range(8), timeout=10)
    copied.check()
    assert isinstance(await offers[left].released(), Released)
    assert claim is None or not decode.describe()["claims"]


async def test_a_rank_that_was_lost_and_met_again_hears_of_a_success_as_well(stage):
    """Nothing of it was needed, so nothing fails, and it keeps the request as the others do."""
    prefill, decode, offers, gate, *_ = await replicated(stage)
    others = [rank.offer("s", [3], tokens=4) for rank in prefill]
    transfer = decode.start_fetch(offers[0].ticket, [3, 4], tokens=range(8), keep=True)
    await eventually(lambda: any(rank.describe()["sending"] for rank in prefill))
    cut(next(rank for rank in prefill if not rank.describe()["sending"]))
    await eventually(lambda: len(sessions(decode)) == 1)
    await decode.fetch(others[0].ticket, [5], tokens=range(4))
    gate.fired = True
    await transfer
    for offer in offers:
        assert isinstance(await asyncio.wait_for(offer.released(), 5), Released)


async def test_a_rank_of_which_nothing_is_needed_is_released_as_a_claim_ends(stage):
    """Who claims a request until its fetch has begun holds no blocks there any longer."""
    prefill, decode, offers, gate, *_ = await replicated(stage)
    claim = decode.claim(offers[0].ticket)
    transfer = decode.start_fetch(offers[0].ticket, [3, 4], tokens=range(8))
    await eventually(lambda: any(rank.describe()["sending"] for rank in prefill))
    idle = next(rank for rank in range(2) if not prefill[rank].describe()["sending"])
    assert not offers[idle].wait_end().done()
    claim.close()
    assert isinstance(await asyncio.wait_for(offers[idle].released(), 5), Released)
    assert not offers[1 - idle].wait_end().done()
    gate.fired = True
    await transfer
