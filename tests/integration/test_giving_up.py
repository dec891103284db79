"""Whoever cancels a fetch needs the request no more: prefill ranks free its blocks, unless it is kept for a retry."""
# what failed has a report, and what is fetched was offered
# pyright: reportOptionalMemberAccess=false

import asyncio
import contextlib
import itertools

import pytest
from inside import before_connecting, being_stopped, connect, hear, keep_gathers, session, unanswered
from stage import SOON, Cache, Copied, Gate, Tap, eventually, frames, quiet
from wire import virtual

import kvxfer
from kvxfer.errors import Code
from kvxfer.protocol.messages import Cancel, Release, Status, TicketRef
from kvxfer.protocol.transfer import Failure, build_result

TOKENS = range(8)
AT_ONCE = 20.0
"""Seconds: far less than a lease."""
ROUTES = ["staged", "direct", "pull"]


async def freed(offer):
    """The offer ends by itself, long before its lease does."""
    async with asyncio.timeout(AT_ONCE):
        assert isinstance(await offer.released(), kvxfer.Released)


async def kept(offer, prefill):
    """What the prefill rank was told has arrived, and the offer lives."""
    await quiet(prefill)
    assert offer.state.value == "live"


# --- the ways to give up, at every step


async def cancels_the_task(fetch):
    task = asyncio.ensure_future(fetch)
    await asyncio.sleep(0)
    task.cancel()
    await task


async def cancels_the_transfer(fetch):
    fetch.cancel()
    await fetch


async def leaves_the_block(fetch):
    try:
        async with fetch:
            raise LookupError
    except LookupError:
        raise asyncio.CancelledError from None


WAYS = [cancels_the_task, cancels_the_transfer, leaves_the_block]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("step", ["waiting", "moving"])
@pytest.mark.parametrize("route", ROUTES)
async def test_giving_up_frees_the_blocks_at_once(stage, source, target, route, step, way):
    prefill, decode = await stage.pair(source, target, route=route)
    if step == "moving":
        offer, transfer = await stage.in_flight(prefill, decode)
    else:
        offer, transfer = stage.begin(prefill, decode, offered={"streaming": True})
        await eventually(lambda: frames(decode, "Accept"))
    asyncio.get_running_loop().call_later(0.1, stage.network.release, "*")
    with pytest.raises(asyncio.CancelledError):
        await way(transfer)
    await freed(offer)
    await quiet(prefill, decode)
    with pytest.raises(kvxfer.RefusedError, check=lambda error: error.reason is Code.TICKET_RELEASED):
        await decode.fetch(prefill.engine.ticket("r"), [3, 4], tokens=TOKENS)


async def test_a_fetch_that_is_given_up_before_its_offer_ends_it(stage, source, target):
    prefill, decode = await stage.pair(source, target)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(decode.fetch(prefill.engine.ticket("r"), [3, 4], tokens=TOKENS), 0.05)
    await eventually(lambda: frames(prefill, "Release"))
    await freed(prefill.offer("r", [1, 2], tokens=8))


async def test_a_fetch_that_is_given_up_as_it_fails_frees_the_blocks_too(stage, source, target):
    prefill, decode = await stage.pair(source, target, route="direct")
    stage.network.hold("decode")
    offer, transfer = stage.begin(prefill, decode, timeout=0.5)
    await eventually(lambda: being_stopped(decode))
    transfer.cancel()
    stage.network.release("decode")
    with pytest.raises(kvxfer.TransferTimeoutError):
        await transfer
    await freed(offer)


# --- who keeps them


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("by", ["keep", "claim"])
async def test_what_is_kept_can_be_tried_again(stage, source, target, route, by):
    prefill, decode = await stage.pair(source, target, route=route)
    ticket, offer = prefill.engine.ticket("r"), prefill.offer("r", [1, 2], tokens=8)
    claim = decode.claim(ticket) if by == "claim" else None
    for _ in range(3):
        stage.network.hold("*")
        transfer = decode.start_fetch(ticket, [3, 4], tokens=TOKENS, keep=by == "keep")
        await eventually(lambda: stage.network.held("*"))
        asyncio.get_running_loop().call_later(0.05, stage.network.release, "*")
        with pytest.raises(asyncio.CancelledError):
            await cancels_the_task(transfer)
        await kept(offer, prefill)
    copied = Copied(target).bring(source, [1, 2], [3, 4], TOKENS)
    await decode.fetch(ticket, [3, 4], tokens=TOKENS, timeout=20)
    copied.check()
    await freed(offer)
    if claim is not None:
        claim.close()
    await quiet(prefill, decode)


async def test_blocks_are_in_doubt_until_the_peer_has_answered(stage, source, target):
    prefill, decode = await stage.pair(source, target, route="direct", **SOON)
    offer, transfer = await stage.in_flight(prefill, decode, "decode", keep=True)
    transfer.cancel()
    with pytest.raises(kvxfer.MemoryInDoubt) as caught:
        await transfer
    doubt = caught.value
    assert isinstance(doubt.__cause__, asyncio.CancelledError)
    assert not doubt.memory_safe
    assert doubt.blocks == {"default": (3, 4)}
    assert doubt.peer.startswith("prefill")
    assert f": {doubt.peer}, which is silent, may still write" in str(doubt)
    assert str(doubt).endswith("(the caller cancelled)")
    for use in (
        lambda: decode.start_fetch(prefill.engine.ticket("r"), [4], tokens=range(4)),
        lambda: decode.offer("mine", [3], tokens=4),
    ):
        with pytest.raises(kvxfer.BlocksError, match="may still write it; await settled"):
            use()
    settling = asyncio.create_task(doubt.settled())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not settling.done()
    assert decode.describe()["in_doubt"] == 1
    stage.network.release("decode")  # the late bytes land
    async with asyncio.timeout(30):
        await settling
        await doubt.settled()
    settled = Copied(target)
    await quiet(prefill, decode)
    settled.check()
    copied = Copied(target).bring(source, [1, 2], [3, 4], TOKENS)
    await decode.fetch(prefill.engine.ticket("r"), [3, 4], tokens=TOKENS, timeout=5)
    copied.check()
    assert isinstance(await offer.released(), kvxfer.Released)


@pytest.mark.parametrize("order", ["fetch", "cancel", "end"])
async def test_closing_a_claim_after_it_was_given_up_frees_them_at_once(stage, source, target, order):
    """Whether the claim is closed before the fetch is given up, before its memory is safe, or after."""
    prefill, decode = await stage.pair(source, target, route="direct")
    ticket, offer = prefill.engine.ticket("r"), prefill.offer("r", [1, 2], tokens=8)
    claim, other = decode.claim(ticket), decode.claim(ticket)
    stage.network.hold("decode")
    transfer = decode.start_fetch(ticket, [3, 4], tokens=TOKENS)
    await eventually(lambda: stage.network.held("decode"))
    claim.close()
    if order == "fetch":
        other.close()
    transfer.cancel()
    if order == "cancel":
        other.close()
    stage.network.release("decode")
    with pytest.raises(asyncio.CancelledError):
        await transfer
    if order == "end":
        await kept(offer, prefill)
        other.close()
    await freed(offer)
    await quiet(prefill, decode)


@pytest.mark.parametrize("again", ["claim", "fetch"])
async def test_who_wants_it_again_is_not_disturbed_by_a_claim_that_is_closed(stage, source, target, again):
    prefill, decode = await stage.pair(source, target)
    ticket, offer = prefill.engine.ticket("r"), prefill.offer("r", [1, 2], tokens=8, streaming=True)
    claim, first = decode.claim(ticket), decode.start_fetch(ticket, [3, 4], tokens=TOKENS)
    await eventually(lambda: frames(decode, "Accept"))
    with pytest.raises(asyncio.CancelledError):
        await cancels_the_task(first)
    second = decode.claim(ticket) if again == "claim" else None
    fetch = decode.start_fetch(ticket, [3, 4], tokens=TOKENS, timeout=20) if again == "fetch" else None
    await eventually(lambda: fetch is None or frames(decode, "Accept") >= 2)
    claim.close()
    await asyncio.sleep(0.05)
    assert frames(prefill, "Release") == 0
    offer.ready()
    offer.finish()
    await (fetch or decode.fetch(ticket, [3, 4], tokens=TOKENS, timeout=20))
    await freed(offer)
    if second is not None:
        second.close()


async def test_a_retry_that_began_before_the_first_has_ended_is_not_disturbed(stage, source, target):
    prefill, decode = await stage.pair(source, target, route="direct")
    offer, first = await stage.in_flight(prefill, decode, "decode")
    await eventually(lambda: stage.network.held("decode") == 2)  # both of its chunks
    first.cancel()
    in_flight = stage.network.held("decode")
    copied = Copied(target).bring(source, [1, 2], [5, 6], TOKENS)
    second = decode.start_fetch(offer.ticket, [5, 6], tokens=TOKENS, timeout=20)
    await eventually(lambda: stage.network.held("decode") > in_flight)
    stage.network.release("decode", in_flight)
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not second.done
    stage.network.release("decode")
    await second
    copied.bring(source, [1, 2], [3, 4], TOKENS)  # what was in flight landed, before the call returned
    copied.check()
    await freed(offer)


# --- whom it reaches


async def test_who_is_connected_is_told_at_once_and_others_when_they_are(stage, target):
    sources = [Cache(heads=range(2)), Cache(heads=range(2, 4))]
    prefill, _ = await stage.engine("prefill", sources)
    decode = await stage.worker("decode", target)
    open_now, far = asyncio.Event(), prefill[1].card.endpoint

    async def later(endpoint):
        if endpoint == far:
            await open_now.wait()

    before_connecting(decode, later)
    offers = [rank.offer("r", [1, 2], tokens=8) for rank in prefill]
    transfer = decode.start_fetch(prefill[0].engine.ticket("r"), [3, 4], tokens=TOKENS)
    await eventually(lambda: decode.describe()["peers"])
    with pytest.raises(asyncio.CancelledError):
        await cancels_the_task(transfer)
    await freed(offers[0])
    await kept(offers[1], prefill[1])
    open_now.set()
    await freed(offers[1])


async def test_nobody_is_connected_for_it(stage, source, target):
    prefill, decode = await stage.pair(source, target)
    offer = prefill.offer("r", [1, 2], tokens=8)
    nowhere = {**prefill.engine.ticket("r"), "endpoints": {"prefix": "unix:/nobody/listens"}}
    with pytest.raises(kvxfer.UnreachableError):
        await decode.fetch(nowhere, [3, 4], tokens=TOKENS)
    for ticket in (nowhere, prefill.engine.ticket("r")):
        transfer = decode.start_fetch(ticket, [3, 4], tokens=TOKENS)
        transfer.cancel()  # in the turn in which it was begun
        with pytest.raises(asyncio.CancelledError):
            await transfer
    await kept(offer, decode)
    assert not decode.describe()["connecting"]
    assert not decode.describe()["peers"]


async def test_it_waits_until_nothing_is_read_any_more(stage, source, target, monkeypatch):
    """Section 7.5 of the protocol: no `Release` while a read of ours is posted."""
    tap = Tap(monkeypatch)
    prefill, decode = await stage.pair(source, target, route="pull", **SOON)
    offer, transfer = await stage.in_flight(prefill, decode, "prefill")
    claim = decode.claim(offer.ticket)
    with pytest.raises(kvxfer.MemoryInDoubt) as caught:
        await cancels_the_task(transfer)
    claim.close()
    assert not tap.of(Release)
    stage.network.release("prefill")
    async with asyncio.timeout(AT_ONCE):
        await caught.value.settled()
    assert tap.of(Release)
    with contextlib.suppress(kvxfer.MemoryInDoubt):
        await freed(offer)
    await quiet(prefill, decode)


# --- at the prefill rank, in any order


ORDERS = sorted({order for number in (1, 2) for order in itertools.permutations(["Cancel", *["Release"] * number])})


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("state", ["unknown", "parked", "waiting", "in flight", "ended"])
async def test_cancel_and_release_may_come_in_any_order(stage, source, target, state, order):
    prefill, decode = await stage.pair(source, target, route="direct")
    issuer = prefill.engine
    offer = None if state == "parked" else prefill.offer("r", [1, 2], tokens=8, streaming=state == "waiting")
    link = await connect(decode, prefill.card.endpoint)
    transfer, number = None, 1 << 40
    if state != "unknown":
        stage.network.hold("decode" if state == "in flight" else "nobody")
        transfer = decode.start_fetch(issuer.ticket("r"), [3, 4], tokens=TOKENS, keep=True)
        reached = {
            "parked": lambda: prefill.describe()["sending"],
            "waiting": lambda: frames(decode, "Accept"),
            "in flight": lambda: stage.network.held("decode"),
            "ended": lambda: transfer.done,
        }
        await eventually(reached[state])
        number = next(iter(unanswered(decode)), 1)
    ticket = TicketRef("r", 0, bytes.fromhex(issuer.ticket("r")["mac"]))
    for kind in order:
        before = frames(prefill, kind)
        link.send(Cancel(number) if kind == "Cancel" else Release(ticket, Code.CANCELLED))
        await eventually(lambda kind=kind, before=before: frames(prefill, kind) > before)  # each by itself
    if state == "in flight":
        await asyncio.sleep(0.05)
        assert not offer.wait_end().done()  # its blocks are read by a write of ours
        stage.network.release("decode")
    if offer is None:
        offer = prefill.offer("r", [1, 2], tokens=8)
    await freed(offer)
    if transfer is not None and state != "ended":
        with pytest.raises(kvxfer.KvxferError):
            await transfer
    await quiet(prefill, decode)


async def test_a_retry_may_begin_in_the_turn_of_the_cancel(stage, source, target):
    """However far the first one has come: one that only connects ends as it is cancelled."""
    prefill, decode = await stage.pair(source, target)
    offer, first = stage.begin(prefill, decode)
    first.cancel()
    await decode.fetch(offer.ticket, [5, 6], tokens=TOKENS, timeout=5)
    with pytest.raises(asyncio.CancelledError):
        await first
    await freed(offer)


async def test_a_fetch_that_was_cancelled_frees_nothing_that_a_later_one_keeps(stage, source, target):
    """Its doubt ends when the later one has been cancelled too, with `keep`."""
    prefill, decode = await stage.pair(source, target, route="direct", **SOON)
    offer, first = await stage.in_flight(prefill, decode, "decode")
    first.cancel()
    with pytest.raises(kvxfer.MemoryInDoubt) as doubt:
        await first
    second = decode.start_fetch(offer.ticket, [5, 6], tokens=TOKENS, keep=True)
    second.cancel()
    with contextlib.suppress(asyncio.CancelledError, kvxfer.MemoryInDoubt):
        await second
    stage.network.release("decode")
    await doubt.value.settled()
    await kept(offer, prefill)
    await offer.withdraw()


# --- several at a time


@pytest.mark.parametrize("first_ends", ["cancelled", "in doubt"])
async def test_a_retry_that_is_given_up_first_frees_the_blocks_when_both_have_ended(stage, source, target, first_ends):
    """The first one is still being written, or in doubt about that."""
    options = SOON if first_ends == "in doubt" else {}
    prefill, decode = await stage.pair(source, target, route="direct", offer_lease=120.0, **options)
    offer, first = await stage.in_flight(prefill, decode, "decode")
    first.cancel()
    if first_ends == "in doubt":
        with pytest.raises(kvxfer.MemoryInDoubt):
            await first
    second = decode.start_fetch(offer.ticket, [5, 6], tokens=TOKENS, after=Gate())
    await eventually(lambda: frames(prefill, "Fetch") == 2)
    with pytest.raises(asyncio.CancelledError):
        await cancels_the_transfer(second)
    assert offer.state.value == "live"
    stage.network.release("decode")
    if first_ends == "cancelled":
        with pytest.raises(asyncio.CancelledError):
            await first
    await freed(offer)
    await quiet(prefill, decode)


async def test_an_older_fetch_that_was_given_up_frees_nothing_that_the_younger_one_keeps(stage, source, target):
    """Both wind down, and the older one ends first."""
    prefill, decode = await stage.pair(source, target, route="direct", offer_lease=120.0)
    offer, older = await stage.in_flight(prefill, decode, "decode")
    await asyncio.sleep(0.05)
    flying = stage.network.held("decode")
    younger = decode.start_fetch(offer.ticket, [5, 6], tokens=TOKENS, keep=True)
    await eventually(lambda: stage.network.held("decode") > flying)
    older.cancel()
    younger.cancel()
    stage.network.release("decode", posts=flying)
    with pytest.raises(asyncio.CancelledError):
        await older
    assert not younger.done
    stage.network.release("decode")
    with pytest.raises(asyncio.CancelledError):
        await younger
    await asyncio.sleep(0.05)
    await kept(offer, prefill)
    await offer.withdraw()


@virtual
async def test_an_older_fetch_that_fails_is_kept_for_a_retry_and_not_for_its_lease(one):
    """The younger one was given up while it went on."""
    await one.pair(offer_lease=60.0)
    offer = one.prefill.offer("r", streaming=True)
    older = one.start("r", timeout=3.0)
    await asyncio.sleep(1.0)
    younger = one.start("r", ids=(5, 6))
    await asyncio.sleep(0.5)
    younger.cancel()
    outcome, _ = await one.timed(older)
    ended = one.now
    assert isinstance(outcome, kvxfer.TransferTimeoutError)
    assert isinstance(await offer.released(), kvxfer.Released)
    assert 2.0 <= one.now - ended <= 2.1


@pytest.mark.parametrize("route", ROUTES)
async def test_a_request_may_be_fetched_in_parts_at_a_time(stage, source, target, route):
    """The first that has come ends no other, and the last one frees the blocks."""
    prefill, decode = await stage.pair(source, target, route=route)
    copied = Copied(target).bring(source, [1, 2], [3, 4], TOKENS)
    offer, first = stage.begin(prefill, decode, into=[3], tokens=range(4), offered={"tokens": 8})
    second = decode.start_fetch(offer.ticket, kvxfer.Span([4], 4), tokens=range(4, 8), after=(gate := Gate()))
    await first
    await asyncio.sleep(0.05)
    gate.fired = True
    await second
    copied.check()
    await freed(offer)


async def test_a_part_that_fails_as_another_has_come_may_be_fetched_again(stage, source, target):
    """It is over when prefill ranks would hear of the other's success: the request was left to it all the same."""
    prefill, decode = await stage.pair(source, target, route="direct", offer_lease=120.0)
    offer, first = stage.begin(prefill, decode, into=[3], tokens=range(4), offered={"tokens": 8})
    rest = kvxfer.Span([4], 4)
    second = decode.start_fetch(offer.ticket, rest, tokens=range(4, 8), after=Gate())
    await first
    number, failure = int(second.id.rpartition("-")[2]), Failure(Status.FAILED, Code.FAILED, "it was not its day")
    hear(decode, session(decode), build_result(number, Status.FAILED, last=True, failure=failure))
    assert second.done
    with pytest.raises(kvxfer.TransferFailedError, match="not its day"):
        await second
    await asyncio.sleep(0.05)
    await decode.fetch(offer.ticket, rest, tokens=range(4, 8))
    await freed(offer)


@virtual
async def test_a_claim_holds_until_the_last_part_has_come(one):
    """One that fails may be fetched again however much later, though another has come."""
    await one.pair(offer_lease=60.0)
    offer, ticket, rest = one.prefill.offer("r", [1, 2], tokens=8), one.ticket("r"), kvxfer.Span([4], 4)
    claim = one.decode.claim(ticket)
    first = one.start("r", ids=[3], tokens=range(4))
    second = one.decode.start_fetch(ticket, rest, tokens=range(4, 8), after=Gate(), timeout=5.0)
    await first
    with pytest.raises(kvxfer.TransferTimeoutError):
        await second
    await asyncio.sleep(200.0)
    await one.decode.fetch(ticket, rest, tokens=range(4, 8))
    assert isinstance(await offer.released(), kvxfer.Released)
    assert not one.decode.describe()["claims"]
    claim.close()


# --- errors


@pytest.mark.parametrize("again", ["fetch", "claim", "keep", "nothing"])
@virtual
async def test_after_an_error_a_request_is_kept_for_a_retry_and_not_for_its_lease(one, again):
    await one.pair(offer_lease=60.0)
    offer = one.prefill.offer("r", streaming=True)
    outcome, _ = await one.timed(one.start("r", timeout=1.0, keep=again == "keep"))
    assert isinstance(outcome, kvxfer.TransferTimeoutError)
    ended = one.now
    await asyncio.sleep(1.5)
    assert offer.state.value == "live"
    if again == "fetch":
        offer.extend([1, 2], tokens=range(8))
        offer.ready(after=kvxfer.READY)
        offer.finish()
        await one.start("r")
        assert isinstance(await offer.released(), kvxfer.Released)
    elif again == "claim":
        with contextlib.closing(one.decode.claim(one.ticket("r"))):
            await asyncio.sleep(200.0)
            assert offer.state.value == "live"
        assert isinstance(await offer.released(), kvxfer.Released)
    elif again == "keep":
        assert isinstance(await offer.released(), kvxfer.Expired)
        assert one.now - ended >= 50
    else:
        assert isinstance(await offer.released(), kvxfer.Released)
        assert 2.0 <= one.now - ended <= 2.1


async def fails(one, timeout, **options):
    """A fetch that waits in vain; when it has failed."""
    outcome, _ = await one.timed(one.start("r", timeout=timeout, **options))
    assert isinstance(outcome, kvxfer.TransferTimeoutError)
    return one.now


@pytest.mark.parametrize(
    ("retry", "kept"),
    [("fails", False), ("fails, kept", True), ("cancelled, kept", True), ("fails, kept, under a claim", True)],
)
@virtual
async def test_who_tries_again_decides_anew_what_becomes_of_a_request(one, retry, kept):
    await one.pair(offer_lease=60.0)
    offer = one.prefill.offer("r", streaming=True)
    await fails(one, 1.0)
    await asyncio.sleep(0.9)
    keep = retry.endswith("kept") or "kept," in retry
    with contextlib.ExitStack() as claims:
        if "claim" in retry:
            claims.enter_context(contextlib.closing(one.decode.claim(one.ticket("r"))))
        if retry.startswith("fails"):
            await fails(one, 1.0, keep=keep)
        else:
            transfer = one.start("r", keep=keep)
            await asyncio.sleep(0.5)
            transfer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await transfer
        ended = one.now
        await asyncio.sleep(3.0 if "claim" in retry else 0.0)
    assert isinstance(await offer.released(), kvxfer.Expired if kept else kvxfer.Released)
    assert one.now - ended >= (50.0 if kept else 1.95)


@virtual
async def test_a_worker_that_closes_lets_go_of_what_it_could_have_tried_again(one):
    await one.pair(offer_lease=60.0)
    offer = one.prefill.offer("r", streaming=True)
    failed = await fails(one, 1.0)
    await one.decode.aclose()
    assert isinstance(await offer.released(), kvxfer.Released)
    assert one.now - failed < 1.0


async def test_steps_that_are_made_when_their_transfer_is_over_are_made_for_nothing(stage, monkeypatch, caplog):
    """They may be under way in a thread when their memory is given back."""
    source, target = Cache(), Cache(layout="HND")
    prefill, decode = await stage.pair(source, target, route="staged")
    late = keep_gathers(monkeypatch)
    _, transfer = stage.begin(prefill, decode)
    await eventually(lambda: late)
    transfer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await transfer
    await eventually(lambda: not prefill.describe()["sending"])
    for make in late:
        make()
    monkeypatch.undo()
    await stage.bring(prefill, decode, "s")
    await quiet(prefill, decode)
    assert "task_failed" not in caplog.text


@pytest.mark.parametrize("given_up", [False, True])
async def test_what_is_declined_while_it_is_read_is_released_when_it_has_been(stage, tap, given_up):
    """A prefill rank may take `Release` to say that its blocks are not read any more."""
    prefill, decode = await stage.pair(Cache(), Cache(), route="pull")
    offer, transfer = await stage.in_flight(prefill, decode)
    if given_up:
        transfer.cancel()
    await decode.decline(offer.ticket)
    assert not tap.of(Release)
    stage.network.release("*")
    await asyncio.wait({transfer.outcome})
    await freed(offer)
    assert tap.of(Release)
    await quiet(prefill, decode)


async def test_what_is_read_yet_for_an_earlier_try_is_released_when_it_has_been(stage, tap):
    """What succeeds says nothing yet to a prefill rank that the other one reads from."""
    prefill, decode = await stage.pair(Cache(), Cache(), route="pull")
    offer, transfer = await stage.in_flight(prefill, decode)
    transfer.cancel()
    stage.network.mend("*")
    await decode.fetch(offer.ticket, [5, 6], tokens=range(8), timeout=20)
    await asyncio.sleep(0.01)
    assert stage.network.held("*")
    assert not tap.of(Release)
    stage.network.release("*")
    await asyncio.wait({transfer.outcome})
    await freed(offer)
    await quiet(prefill, decode)


async def test_who_gives_a_request_back_reads_it_no_more(stage):
    """Other decode ranks than ours need not say `Cancel` besides."""
    prefill, decode = await stage.pair(Cache(), Cache(), route="pull")
    offer, transfer = await stage.in_flight(prefill, decode)
    hear(prefill, session(prefill), Release(TicketRef("r", 0, bytes.fromhex(offer.ticket["mac"]))))
    await freed(offer)
    stage.network.release("*")
    await asyncio.wait({transfer.outcome})
    await quiet(prefill, decode)
