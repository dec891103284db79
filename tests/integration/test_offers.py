"""Offers: in whatever order things happen, how they end, and what a ticket is worth."""

import asyncio

import inside
import pytest
import torch
from stage import Cache, Copied, Gate, eventually, frames, is_quiet, quiet
from wire import virtual

import kvxfer

PAUSED = {"peer_timeout": 10.0, "offer_lease": 10.0, "unclaimed_timeout": 10.0}
FAST = {"peer_timeout": 5.0, "offer_lease": 0.15, "unclaimed_timeout": 0.15}
TOKENS = range(8)


async def parked(prefill, kind="Fetch", count=1):
    await eventually(lambda: frames(prefill, kind) >= count)


def refused(code):
    """What a fetch raises that the peer refused with this code."""
    return pytest.raises(kvxfer.RefusedError, check=lambda error: error.reason is code)


# --- in any order


@virtual
async def test_a_claim_may_come_before_its_offer(one):
    await one.pair(**FAST)
    claim = one.decode.claim(one.ticket("r"))
    await one.until(lambda: frames(one.prefill, "Claim"))
    offer = one.prefill.offer("r", [1, 2], tokens=8)
    await one.until(lambda: frames(one.prefill, "Claim") >= 12)  # many renewals: longer than any lease
    assert not offer.wait_end().done()
    claim.close()
    claim.close()
    ending = await offer.released()
    assert isinstance(ending, kvxfer.Expired)
    assert "stopped renewing" in ending.reason


async def test_what_is_parked_is_bounded_and_releases_are_heard_all_the_same(stage, source, target):
    prefill, decode = await stage.pair(source, target, prefill={"max_transfers": 2})
    waiting = [decode.start_fetch(prefill.engine.ticket(f"r{n}"), [n], tokens=range(4)) for n in range(2)]
    await parked(prefill, count=2)
    with refused(kvxfer.Code.TOO_MANY):
        await decode.fetch(prefill.engine.ticket("r2"), [2], tokens=range(4), timeout=5)
    declined = prefill.offer("r2", [2], tokens=4)
    await decode.decline(declined.ticket)
    async with asyncio.timeout(30):
        assert isinstance(await declined.released(), kvxfer.Released)
    offers = [prefill.offer(f"r{n}", [n], tokens=4) for n in range(2)]
    await asyncio.gather(*waiting)
    assert {type(await offer.released()) for offer in offers} == {kvxfer.Released}


# --- leases


@pytest.mark.parametrize("known", [False, True], ids=["reached for it", "connected before"])
@virtual
async def test_leases_are_renewed_as_often_as_their_owner_asks_for(one, known):
    """The decode engine's own heartbeat is longer than any lease of the prefill engine, and than its patience."""
    patient = {"peer_timeout": 200.0, "offer_lease": 200.0}
    await one.pair(prefill=FAST, decode=patient)
    if known:
        await one.bring("before")
    offer = one.prefill.offer("r", [1, 2], tokens=8)
    one.decode.claim(one.ticket("r"))
    await one.until(lambda: inside.sessions(one.prefill))
    link = inside.session(one.prefill)
    await asyncio.sleep(100 * FAST["offer_lease"])
    assert not offer.wait_end().done()
    assert inside.sessions(one.prefill) == {link}
    await one.start("r")
    assert isinstance(await offer.released(), kvxfer.Released)


@virtual
async def test_a_forged_ticket_takes_nothing_from_the_real_one(one):
    await one.pair(prefill=FAST)
    offer, forged = one.prefill.offer("r", [1, 2], tokens=8), one.ticket("r") | {"mac": "00" * 16}
    one.decode.claim(one.ticket("r"))
    one.decode.claim(forged)
    await asyncio.sleep(10 * FAST["offer_lease"])
    assert not offer.wait_end().done()
    with refused(kvxfer.Code.TICKET_FORGED):
        await one.decode.fetch(forged, [3, 4], tokens=TOKENS)
    await one.decode.decline(forged)
    await asyncio.sleep(10 * FAST["offer_lease"])
    assert not offer.wait_end().done()
    await one.start("r")
    assert isinstance(await offer.released(), kvxfer.Released)


@pytest.mark.parametrize("beyond", [0.06, 0.9, 1.1, 100.0])
@pytest.mark.parametrize("claimed", [True, False], ids=["claimed", "given up"])
@virtual
async def test_a_machine_that_was_paused_until_a_lease_was_over_lets_it_be_renewed(one, claimed, beyond):
    await one.pair(**PAUSED)
    offer = one.prefill.offer("r", [1, 2], tokens=8)
    claim = one.decode.claim(one.ticket("r"))
    await one.until(lambda: frames(one.prefill, "Claim"))
    if not claimed:
        claim.close()
    one.stand_still(inside.entry(offer).lease - one.now + beyond)
    await asyncio.sleep(0.9)
    assert not offer.wait_end().done()
    await asyncio.sleep(0.2)
    assert offer.wait_end().done() != claimed
    if claimed:
        await one.start("r")
        assert isinstance(await offer.released(), kvxfer.Released)


@virtual
async def test_a_transfer_that_ends_as_a_paused_machine_goes_on_takes_no_lease_of_others(one):
    """It has its own offer looked at, at once, and that one's lease was over before theirs."""
    await one.pair(**PAUSED)
    first = one.prefill.offer("first", [1], tokens=4)
    claim = one.decode.claim(one.ticket("first"))
    await one.until(lambda: inside.entry(first).engine)
    claim.close()
    await asyncio.sleep(0.5)
    second = one.prefill.offer("second", [1], tokens=4)
    one.decode.claim(one.ticket("second"))
    await one.until(lambda: inside.entry(second).engine)
    inside.overlook(one.prefill, first)
    one.stand_still(100.0)
    inside.leave(one.prefill, first)
    await asyncio.sleep(0.9)
    assert not first.wait_end().done()
    assert not second.wait_end().done()
    await one.start("second", [3], range(4))


@virtual
async def test_claims_are_renewed_where_they_are_wanted_often_and_nowhere_else(one):
    """An engine that asks for frequent signs of life costs others nothing."""
    often = {"peer_timeout": 1.0, "offer_lease": 5.0}
    await one.pair(prefill=often, decode={"peer_timeout": 40.0})
    seldom = await one.worker("seldom", Cache())
    claims = [one.decode.claim(one.ticket("r")), one.decode.claim(seldom.engine.ticket("r"))]
    await asyncio.sleep(20)
    assert 180 <= frames(one.prefill, "Claim") <= 205
    assert 10 <= frames(seldom, "Claim") <= 11  # every 2 s, its own heartbeat
    for claim in claims:
        claim.close()


@virtual
async def test_a_worker_that_closes_connects_nobody_for_claims(one):
    await one.pair()
    one.decode.claim(one.ticket("r"))
    await one.until(lambda: frames(one.prefill, "Claim"))
    over = asyncio.Event()
    inside.look_out(one.decode, over.wait())
    closing = asyncio.ensure_future(one.decode.aclose(drain=False))
    await asyncio.sleep(10)
    assert not inside.sessions(one.prefill)
    over.set()
    await closing
    await asyncio.sleep(10)
    assert not inside.sessions(one.prefill)


@pytest.mark.parametrize("how", ["declined", "fetched in vain"])
@virtual
async def test_a_claim_ends_with_what_ends_its_request(one, how):
    await one.pair()
    offer = one.prefill.offer("r", [1, 2], tokens=8)
    claim = one.decode.claim(one.ticket("r"))
    await one.until(lambda: frames(one.prefill, "Claim"))
    if how == "declined":
        await one.decode.decline(one.ticket("r"))
    else:
        await offer.withdraw()
        with refused(kvxfer.Code.OFFER_WITHDRAWN):
            await one.start("r")
    before = frames(one.prefill, "Claim")
    await asyncio.sleep(100)
    assert frames(one.prefill, "Claim") == before
    assert one.decode.describe()["claims"] == 0
    again = one.decode.claim(one.ticket("r"))
    claim.close()  # which is over
    assert one.decode.describe()["claims"] == 1
    again.close()


@virtual
async def test_a_lease_that_a_claim_begins_ends_though_nobody_would_have_claimed_it_for_longer(one):
    await one.pair(prefill=PAUSED | {"unclaimed_timeout": 1000.0})
    offer = one.prefill.offer("r", [1, 2], tokens=8)
    claim = one.decode.claim(one.ticket("r"))
    await one.until(lambda: frames(one.prefill, "Claim"))
    claim.close()
    await asyncio.sleep(PAUSED["offer_lease"] + 0.1)
    assert offer.wait_end().done()


@virtual
async def test_leases_run_out_after_what_nobody_foresaw_as_one_did(one, monkeypatch):
    await one.pair(prefill=PAUSED)
    unforeseen = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unforeseen.append(context["exception"]))

    def fails_once(*_):
        monkeypatch.undo()
        raise OSError("no space left on device")

    monkeypatch.setattr(inside.counters(one.prefill), "offer_ended", fails_once)
    offers = [one.prefill.offer(name, [1, 2], tokens=8) for name in "abc"]
    await asyncio.sleep(10)
    offers.append(one.prefill.offer("d", [1, 2], tokens=8))
    await asyncio.sleep(10)
    assert [offer.wait_end().done() for offer in offers[1:]] == [True, True, True]
    assert [type(error) for error in unforeseen] == [OSError]


@virtual
async def test_a_lease_that_ran_out_as_both_stood_still_with_a_transfer_at_work(one):
    await one.pair(route="staged", **PAUSED)
    one.network.hold("decode")
    offer = one.prefill.offer("r", [1], tokens=4)
    transfer = one.start("r", [1], range(4), keep=True)
    await one.until(lambda: inside.entry(offer).transfers)
    await asyncio.sleep(20)
    one.stand_still(100.0)
    transfer.cancel()
    one.network.release("decode")
    await one.until(lambda: not inside.entry(offer).transfers)
    await asyncio.sleep(0.5)
    assert not offer.wait_end().done()
    assert isinstance(await offer.released(), kvxfer.Expired)


# --- withdrawn in every state


@pytest.mark.parametrize("state", ["unclaimed", "claimed", "waiting", "in flight", "released", "withdrawn"])
async def test_withdraw(stage, source, target, route, state):
    prefill, decode = await stage.pair(source, target, route=route)
    ticket = prefill.engine.ticket("r")
    untouched = Copied(target)
    transfer = None
    if state == "in flight":
        offer, transfer = await stage.in_flight(prefill, decode)
    else:
        offer = prefill.offer("r", [1, 2], tokens=8, streaming=state == "waiting")
    if state == "claimed":
        decode.claim(ticket)
        await parked(prefill, "Claim")
    elif state == "waiting":
        transfer = decode.start_fetch(ticket, [1, 2], tokens=TOKENS)
        await eventually(lambda: frames(decode, "Accept"))
    elif state == "released":
        await decode.fetch(ticket, [1, 2], tokens=TOKENS)
        await offer.released()
    elif state == "withdrawn":
        await offer.withdraw()
    withdrawing = asyncio.create_task(offer.withdraw())
    if state == "in flight":
        await eventually(lambda: offer.state.value == "ending")
        await asyncio.sleep(0)
        assert not withdrawing.done()  # our post still reads the blocks, or the peer does
        stage.network.release("*")
    async with asyncio.timeout(30):
        ending = await withdrawing
    assert isinstance(ending, kvxfer.Released if state == "released" else kvxfer.Withdrawn)
    if transfer is not None:
        with pytest.raises(kvxfer.TransferFailedError, match="withdrawn"):
            await transfer
    if state not in {"released", "in flight"}:
        untouched.check()
    code = kvxfer.Code.TICKET_RELEASED if state == "released" else kvxfer.Code.OFFER_WITHDRAWN
    with refused(code):
        await decode.fetch(ticket, [3, 4], tokens=TOKENS, timeout=5)
    await quiet(prefill, decode)


async def test_who_comes_while_a_released_offer_still_ends_hears_that_it_was_released(stage, source, target):
    prefill, decode = await stage.pair(source, target, route="direct")
    offer, transfer = await stage.in_flight(prefill, decode, "decode")
    inside.release(prefill, offer, inside.met(prefill).identity)
    assert offer.state.value == "ending"  # our post still reads the blocks
    with refused(kvxfer.Code.TICKET_RELEASED):
        await decode.fetch(offer.ticket, [5, 6], tokens=TOKENS, timeout=5)
    stage.network.release("decode")
    with pytest.raises(kvxfer.TransferFailedError):
        await transfer
    assert isinstance(await offer.released(), kvxfer.Released)
    await quiet(prefill, decode)


# --- again, and by somebody else


async def test_another_decode_engine_takes_over(stage, source, target):
    prefill, first = await stage.pair(source, target, prefill={"route": "staged"})
    other = Cache()
    second = await stage.worker("second", other)
    offer = prefill.offer("r", [1, 2], tokens=8)
    ticket = prefill.engine.ticket("r")
    stage.network.hold("decode")
    started = first.start_fetch(ticket, [1, 2], tokens=TOKENS, timeout=5)
    await eventually(lambda: stage.network.held("decode"))
    stage.network.hold("second")
    taken = second.start_fetch(ticket, [3, 4], tokens=TOKENS, timeout=5)
    await eventually(lambda: stage.network.held("second"))
    stage.network.release("decode")
    with pytest.raises(kvxfer.TransferFailedError) as caught:
        await started
    assert caught.value.reason is kvxfer.Code.SUPERSEDED
    # what the first engine still sends of its own accord does not take it back
    await first.decline(ticket)
    before = frames(prefill, "Claim")
    late = first.claim(ticket)
    await parked(prefill, "Claim", before + 1)
    late.close()
    assert not offer.wait_end().done()
    copied = Copied(other).bring(source, [1, 2], [3, 4], TOKENS)
    stage.network.release("second")
    await taken
    copied.check()
    assert isinstance(await offer.released(), kvxfer.Released)
    await quiet(prefill, first, second)


async def test_an_id_is_used_once_and_fits_a_ticket(stage, source, target, monkeypatch):
    monkeypatch.setattr("kvxfer.config._MANY", 1)
    prefill, decode = await stage.pair(source, target, prefill={"max_transfers": 1})
    offer = prefill.offer("r", [1], tokens=4)
    with pytest.raises(kvxfer.RequestError, match="is live"):
        prefill.offer("r", [2], tokens=4)
    again = prefill.offer("r", [2], tokens=4, attempt=1)
    for other in "pq":
        prefill.offer(other, [3], tokens=4)
    with pytest.raises(kvxfer.RequestError, match="max_transfers, which is 1"):
        prefill.offer("s", [2], tokens=4)
    await offer.withdraw()
    with pytest.raises(kvxfer.RequestError, match="was just used, less than 600 s ago"):
        prefill.offer("r", [2], tokens=4)
    copied = Copied(target).bring(source, [2], [2], range(4))
    await decode.fetch(prefill.engine.ticket("r", attempt=1), [2], tokens=range(4), timeout=5)
    copied.check()
    await again.released()
    before = prefill.describe()["offers"]
    for request_id, attempt in (("", 0), ("x" * 257, 0), ("r", -1)):
        with pytest.raises(kvxfer.RequestError, match="no ticket can be made"):
            prefill.offer(request_id, [1], tokens=4, attempt=attempt)
    assert prefill.describe()["offers"] == before


async def test_tickets_that_were_forged_cut_or_edited(pair):
    prefill, decode = pair
    prefill.offer("r", [1], tokens=4)
    ticket = prefill.engine.ticket("r")
    edits = [{"mac": "00" * 16}, {"request": "s"}, {"attempt": 1}, {"mac": ticket["mac"][:-2]}]
    for edit in edits:
        with refused(kvxfer.Code.TICKET_FORGED):
            await decode.fetch({**ticket, **edit}, [1], tokens=range(4), timeout=5)
    with pytest.raises(kvxfer.MismatchError, match="have the request prefilled again") as caught:
        await decode.fetch({**ticket, "epoch": "ab" * 16}, [1], tokens=range(4), timeout=5)
    assert caught.value.fields == {"epoch": ("ab" * 16, ticket["epoch"])}
    for one in ({}, None, {**ticket, "v": 2}, {**ticket, "mac": "zz"}):
        with pytest.raises(kvxfer.TicketError):
            decode.start_fetch(one, [1], tokens=range(4))
        with pytest.raises(kvxfer.TicketError):
            decode.claim(one)
    forged = decode.claim({**ticket, "request": "forged"})
    await parked(prefill, "Claim")
    forged.close()
    assert not prefill.describe()["parked"]
    await decode.fetch(ticket, [1], tokens=range(4), timeout=5)
    await quiet(*pair)


# --- streaming


async def test_streaming_mistakes_change_nothing(pair, source, target):
    prefill, decode = pair
    for wrong in ({"payload": b"x"}, {"after": object()}, {"blocks": [1]}, {"tokens": 4}):
        with pytest.raises(kvxfer.RequestError):
            prefill.offer("w", streaming=True, **wrong)
    with pytest.raises(kvxfer.RequestError, match="needs blocks= and tokens="):
        prefill.offer("w", [1])
    offer = prefill.offer("r", streaming=True)
    with pytest.raises(kvxfer.TokensError, match="without any token"):
        offer.finish()
    with pytest.raises(kvxfer.TokensError, match="outside the 0 tokens"):
        offer.ready()
    with pytest.raises(kvxfer.TokensError, match="do not continue"):
        offer.extend([1], tokens=range(4, 8))
    offer.extend([1], tokens=range(4))
    for tokens in (range(3, 8), range(5, 8), range(8)):
        with pytest.raises(kvxfer.TokensError, match="do not continue"):
            offer.extend([2], tokens=tokens)
    with pytest.raises(kvxfer.BlocksError, match="reach up to token 4, but 8 are needed"):
        offer.extend([], tokens=range(4, 8))
    with pytest.raises(kvxfer.BlocksError, match="outside"):
        offer.extend([99], tokens=range(4, 8))
    with pytest.raises(kvxfer.TokensError, match="layer 9 is not held"):
        offer.ready(layers=[0, 9])
    with pytest.raises(kvxfer.TokensError, match="outside the 4 tokens"):
        offer.ready(tokens=5)
    with pytest.raises(kvxfer.TokensError, match="layer 0 is ready up to token 0 of 4; call ready"):
        offer.finish()
    offer.ready(layers=[1])
    with pytest.raises(kvxfer.TokensError, match="layer 0"):
        offer.finish()
    offer.ready(tokens=2)
    with pytest.raises(kvxfer.TokensError, match="layer 0 is ready up to token 2 of 4"):
        offer.finish()
    offer.ready()
    with pytest.raises(kvxfer.TokensError, match="65536"):
        offer.finish(b"x" * 65537)
    offer.finish(b"y")
    for late in (offer.finish, offer.ready, lambda: offer.extend([2], tokens=range(4, 8))):
        with pytest.raises(kvxfer.RequestError, match="finished"):
            late()
    copied = Copied(target).bring(source, [1], [5], range(4))
    result = await decode.fetch(prefill.engine.ticket("r"), [5], tokens=range(4), timeout=5)
    assert result.payload == b"y"
    copied.check()
    await offer.released()
    with pytest.raises(kvxfer.RequestError, match="ended"):
        offer.ready()


async def test_state_is_never_that_of_another_token(stage):
    sources = [Cache(group="full"), Cache(group="state", layers=[7], layout="state", blocks=4)]
    targets = [Cache(group="full"), Cache(group="state", layers=[7], layout="state", blocks=4)]
    prefill, decode = await stage.pair(sources, targets)
    offer = prefill.offer("r", streaming=True)
    offer.extend({"full": [1, 2], "state": [0]}, tokens=range(4))
    offer.ready()
    transfer = decode.start_fetch(prefill.engine.ticket("r"), {"full": [1], "state": [1]}, tokens=range(4), timeout=5)
    await transfer.layers(0, 1)
    offer.extend({"full": [], "state": []}, tokens=range(4, 8))
    with pytest.raises(kvxfer.TransferFailedError) as caught:
        await transfer
    assert caught.value.reason is kvxfer.Code.TOKENS
    sources[1].memory[7] += 1
    offer.ready()
    offer.finish()
    await decode.fetch(prefill.engine.ticket("r"), {"full": [1, 2], "state": [1]}, tokens=range(8), timeout=5)
    assert torch.equal(targets[1].memory[7][:, 1], sources[1].memory[7][:, 0])
    with refused(kvxfer.Code.TICKET_RELEASED):
        await decode.fetch(prefill.engine.ticket("r"), {"full": [1], "state": [1]}, tokens=range(4), timeout=5)


@pytest.mark.parametrize("ending", [kvxfer.Released, kvxfer.Expired, kvxfer.Withdrawn])
@virtual
async def test_streaming_goes_on_after_an_offer_has_ended_by_itself(one, ending):
    """A model's hooks cannot know that the decode engine needs no more, or gave up."""
    await one.pair(prefill=FAST)
    offer = one.prefill.offer("r", streaming=True)
    offer.extend([1], tokens=range(4))
    if ending is kvxfer.Released:
        await one.decode.decline(one.ticket("r"))
    elif ending is kvxfer.Withdrawn:
        await offer.withdraw()
    assert isinstance(await offer.released(), ending)
    calls = (lambda: offer.extend([2], tokens=range(4, 8)), offer.ready, offer.finish)
    for call in calls:
        if ending is kvxfer.Withdrawn:
            with pytest.raises(kvxfer.RequestError, match="is ended"):
                call()
        else:
            call()
    assert offer.tokens == 4
    await one.until(lambda: is_quiet(one.prefill) and is_quiet(one.decode))


async def test_a_ticket_that_is_fetched_twice_at_once_is_released_though_both_end_in_one_turn(pair):
    prefill, decode = pair
    for number in range(5):
        offer = prefill.offer(f"r{number}", [3, 2, 1, 0], tokens=16)
        ticket = prefill.engine.ticket(f"r{number}")
        both = [
            decode.start_fetch(ticket, into, tokens=range(16), timeout=5) for into in ([4, 5, 6, 7], [8, 9, 10, 11])
        ]
        await asyncio.gather(*both, return_exceptions=True)
        await asyncio.wait_for(offer.released(), 5)


async def test_of_transfers_that_are_begun_and_given_up_an_offer_remembers_the_last_ones(stage, monkeypatch):
    monkeypatch.setattr("kvxfer.prefill.offers._STATS", 2)
    prefill, decode = await stage.pair(Cache(), Cache())
    gate = Gate()
    offer = prefill.offer("r", [1, 2], tokens=8, after=gate)
    for _ in range(3):
        transfer = decode.start_fetch(offer.ticket, [3, 4], tokens=TOKENS, keep=True)
        await eventually(lambda: prefill.describe()["sending"])
        transfer.cancel()
        await eventually(lambda: is_quiet(prefill) and is_quiet(decode))
    gate.fired = True
    await decode.fetch(offer.ticket, [3, 4], tokens=TOKENS)
    ending = await offer.released()
    assert [stats.bytes > 0 for stats in ending.stats] == [False, True]
