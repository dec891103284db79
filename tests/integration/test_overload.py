"""More than a worker can take: it refuses and says when to come again, does not grow, and no peer shuts out others."""

import asyncio
import contextlib
import socket
import time
from collections import Counter

import pytest
from inside import early_places, entry, hear, queues, renew_claims, service, session
from msgspec.structs import replace
from stage import Cache, Copied, eventually, frames, quiet, turns
from wire import virtual

from kvxfer import BlockingWorker, BusyError, Code, Config, KvxferError, RefusedError, Released
from kvxfer import blocking as polling
from kvxfer.decode import role as claims_module
from kvxfer.fabric.loopback import LoopbackTransport
from kvxfer.protocol.messages import Accept, Cancel, Fetch, Refuse
from kvxfer.tickets import Ticket

BLOCK = range(4)


def sending(worker):
    return worker.describe()["sending"]


async def test_one_peer_does_not_take_every_transfer(stage):
    prefill = await stage.worker("prefill", Cache(), max_transfers=16)
    greedy = await stage.worker("greedy", Cache(blocks=32))
    modest = await stage.worker("modest", Cache())
    ticket = prefill.engine.ticket
    waiting = [greedy.start_fetch(ticket(f"g{n}"), [n], tokens=BLOCK, keep=True) for n in range(30)]
    await eventually(lambda: sum(transfer.done for transfer in waiting) == 18)
    assert sending(prefill) == 12
    prefill.offer("m", [1], tokens=4)
    await modest.fetch(ticket("m"), [1], tokens=BLOCK, timeout=5)
    parked = modest.start_fetch(ticket("later"), [2], tokens=BLOCK, keep=True)
    await eventually(lambda: sending(prefill) == 13)
    errors = await asyncio.gather(*(one.outcome for one in waiting if one.done), return_exceptions=True)
    assert {(type(error), error.reason, error.retry_after) for error in errors if isinstance(error, RefusedError)} == {
        (RefusedError, Code.TOO_MANY, 1.0)
    }
    for transfer in (*waiting, parked):
        transfer.cancel()
    await quiet(prefill, greedy, modest)
    seen = prefill.describe()
    assert seen["places"] == seen["parked"] == early_places(prefill) == 0


async def test_one_peer_does_not_take_all_that_is_kept_before_offers(stage):
    prefill = await stage.worker("prefill", Cache(), max_transfers=16, unclaimed_timeout=0.3)
    greedy, modest = await stage.worker("greedy", Cache()), await stage.worker("modest", Cache())
    claims = [greedy.claim(prefill.engine.ticket(f"g{n}")) for n in range(30)]
    await eventually(lambda: frames(prefill, "Claim"))
    assert prefill.describe()["parked"] == 12
    for claim in claims:
        claim.close()
    await modest.decline(prefill.engine.ticket("m"))
    await eventually(lambda: frames(prefill, "Release"))
    assert isinstance(await prefill.offer("m", [1], tokens=4).released(), Released)  # it was kept
    await eventually(lambda: not prefill.describe()["parked"])  # what no offer follows is forgotten
    assert early_places(prefill) == 0


async def test_what_was_given_up_before_it_began_keeps_no_place_in_the_queue(stage, tap):
    """Two transfers begin in a turn of the loop: those who asked and left at once were waited for like all others."""
    prefill, decode = await stage.pair(Cache(), Cache())
    await stage.bring(prefill, decode)
    prefill.offer("next", [1, 2], tokens=8)
    (one,), link, ticket = tap.of(Fetch), session(prefill), Ticket.parse(prefill.engine.ticket("next")).ref()
    asked = Fetch(0, ticket, one.selections, one.spans, 0, 8, one.routes, one.max_extent_bytes, 1000)
    for number in range(100, 300):
        hear(prefill, link, replace(asked, transfer=number))
        hear(prefill, link, Cancel(number))
    hear(prefill, link, replace(asked, transfer=300))
    for _ in range(10):
        await asyncio.sleep(0)
    assert tap.of(Accept)[-1].transfer == 300
    hear(prefill, link, Cancel(300))


async def test_who_asks_for_no_token_of_what_has_none_yet_is_told_so(stage, tap):
    """How many rows its plan may have is reckoned from the tokens that are there."""
    prefill, decode = await stage.pair(Cache(), Cache())
    await stage.bring(prefill, decode)
    offer = prefill.offer("next", streaming=True)
    (one,) = tap.of(Fetch)
    ticket = Ticket.parse(offer.ticket).ref()
    empty = replace(one, transfer=100, ticket=ticket, token_start=0, token_stop=0, lease_ms=0)
    hear(prefill, session(prefill), empty)
    await eventually(lambda: tap.of(Refuse))
    assert tap.of(Refuse)[-1].code is Code.TOKENS
    await offer.withdraw()


@virtual
async def test_under_overload_nothing_grows_and_a_retry_cures_all(one):
    """Three decode workers want 240 requests of a prefill worker that takes eight transfers at a time."""
    clients, each, limit = 3, 80, 8
    await one.pair(prefill={"max_transfers": limit}, source=Cache(blocks=each))
    caches = [Cache(blocks=each) for _ in range(clients)]
    decodes = [await one.worker(f"decode{n}", cache) for n, cache in enumerate(caches)]
    copied = [Copied(cache).bring(one.source, [*range(each)], [*range(each)], range(4 * each)) for cache in caches]
    most, refused, done = Counter(), Counter(), Counter()

    def measure():
        seen = one.prefill.describe()
        now = {
            "transfers": seen["sending"],
            "early": seen["parked"],
            "waiting": seen["arena"]["send"].waiting_requests,
            **queues(one.prefill),
        }
        for name, value in now.items():
            most[name] = max(most[name], value)

    handle = service(one.prefill).prefill.on_message

    def counted(link, message):
        handle(link, message)
        measure()

    service(one.prefill).prefill.on_message = counted

    async def fetch(client, number):
        request = f"r{client}-{number}"
        while True:
            try:
                await decodes[client].fetch(one.ticket(request), [number], tokens=BLOCK)
            except RefusedError as error:
                refused[client, error.reason] += 1
                await asyncio.sleep(error.retry_after * (1 + number / each))
            else:
                done[client] += 1
                return

    wanted = asyncio.gather(*(fetch(client, n) for client in range(clients) for n in range(each)))
    await asyncio.sleep(0.5)  # all have asked; nothing is on offer yet
    assert most["transfers"] == most["early"] <= limit
    offers = [one.prefill.offer(f"r{client}-{n}", [n], tokens=4) for client in range(clients) for n in range(each)]
    await wanted
    assert {type(await offer.released()) for offer in offers} == {Released}
    for expected in copied:
        expected.check()
    assert done == dict.fromkeys(range(clients), each)
    assert refused.keys() == {(client, Code.TOO_MANY) for client in range(clients)}
    assert most["transfers"] <= limit
    assert most["early"] <= limit
    assert most["waiting"] <= limit * one.prefill.config.window
    assert most["unsent"] < 65536
    assert most["timers"] <= 2 * (len(offers) + limit)
    assert sending(one.prefill) == 0


@virtual
async def test_a_parked_fetch_whose_time_has_passed_is_dropped(one):
    """Though its decode rank says nothing: it frees its place long before the offer would have to come."""
    await one.pair(revoke_timeout=50, peer_timeout=200, unclaimed_timeout=500)
    transfer = one.start("r", timeout=5)
    await one.until(lambda: sending(one.prefill))
    one.wire.silence()
    began = one.now
    await one.until(lambda: not sending(one.prefill))
    assert 5 <= one.now - began <= 5 + one.prefill.config.heartbeat + 0.1
    assert not one.prefill.describe()["parked"]
    (error,) = await asyncio.gather(transfer.outcome, return_exceptions=True)
    assert isinstance(error, KvxferError)


async def test_thousands_of_claims_in_one_frame(stage):
    """One frame, no lag to speak of, and each of them renews its lease."""
    count = 4096
    prefill = await stage.worker("prefill", Cache(), max_transfers=2 * count, offer_lease=30)
    decode = await stage.worker("decode", Cache())
    offers = [prefill.offer(f"r{n}", [1], tokens=4) for n in range(count)]
    kept = [decode.claim(prefill.engine.ticket(f"r{n}")) for n in range(count)]
    await eventually(lambda: all(entry(offer).engine is not None for offer in offers), timeout=30)
    before = [entry(offer).lease for offer in offers]
    sent = decode.describe()["metrics"]["frames_sent"]["Claim"]
    assert sent <= 3  # what is claimed in one turn is said in one frame
    with turns() as took:
        renew_claims(decode)
        await eventually(lambda: all(entry(offer).lease > lease for offer, lease in zip(offers, before, strict=True)))
    assert decode.describe()["metrics"]["frames_sent"]["Claim"] - sent <= 2  # a heartbeat may have come in between
    for claim in kept:
        claim.close()
    assert max(took) < 0.5


async def test_claims_are_bounded(stage, monkeypatch):
    monkeypatch.setattr(claims_module, "_MAX_CLAIMS", 2)
    prefill, decode = await stage.pair(Cache(), Cache())
    ticket = prefill.engine.ticket
    kept = [decode.claim(ticket(f"r{n}")) for n in range(2)]
    with pytest.raises(BusyError, match="2 claims") as caught:
        decode.claim(ticket("r2"))
    assert caught.value.retry_after is not None
    decode.claim(ticket("r1"))  # one that is kept already
    kept[0].close()
    decode.claim(ticket("r2"))


def test_events_that_nobody_polls_are_bounded(network, monkeypatch):
    monkeypatch.setattr(polling, "MAX_EVENTS", 2)
    transport = lambda: LoopbackTransport("p", network)  # noqa: E731
    with BlockingWorker(Config(engine="p", arena_bytes="64KiB", chunk_bytes="2KiB"), transport=transport) as worker:
        worker.register(Cache().tensors)
        offers = [worker.offer(f"r{n}", [1], tokens=4) for n in range(2)]
        with pytest.raises(BusyError, match=r"0 events wait for poll\(\), 2 are to come"):
            worker.offer("r2", [1], tokens=4)
        for offer in offers:
            offer.withdraw()
        events = []
        while not worker.idle:
            time.sleep(0.001)
        with pytest.raises(BusyError, match="2 events"):
            worker.offer("r2", [1], tokens=4)
        events += worker.poll(1)
        assert len(events) == 2
        worker.offer("r2", [1], tokens=4).withdraw()
        assert worker.poll(5)


async def test_of_those_who_come_at_once_as_many_are_let_in_as_may(stage, monkeypatch):
    """Each was counted before the first of them was let in, so that all were turned away."""
    monkeypatch.setattr("kvxfer.config._MANY", 1)
    prefill = await stage.worker("prefill", Cache(), listen="tcp:127.0.0.1:0", max_transfers=1)
    where = prefill.card.endpoint.removeprefix("tcp:").rpartition(":")
    with contextlib.ExitStack() as stack:  # connected by the kernel, before the worker has a turn to accept any
        socks = [stack.enter_context(socket.create_connection((where[0], int(where[2])))) for _ in range(6)]
        for sock in socks:
            sock.setblocking(False)
        said = [asyncio.create_task(asyncio.get_running_loop().sock_recv(sock, 1000)) for sock in socks]
        await eventually(lambda: sum(one.done() for one in said) == 2)
        assert all(b"max_transfers=1" in one.result() for one in said if one.done())
        assert prefill.describe()["streams"] == 4
        for one in said:
            one.cancel()
        await asyncio.wait(said)


async def test_who_connects_over_and_over_gives_others_their_turns(stage, monkeypatch):
    """Where the kernel has a connection ready, accepting it gives nobody a turn by itself."""
    prefill = await stage.worker("prefill", Cache(), listen="tcp:127.0.0.1:0")
    host, _, port = prefill.card.endpoint.removeprefix("tcp:").rpartition(":")
    accept, accepted = socket.socket.accept, []

    def counted(listener):
        found = accept(listener)
        accepted.append(found)
        return found

    with contextlib.ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(socket.create_connection((host, int(port))))
        monkeypatch.setattr(socket.socket, "accept", counted)
        most = 0
        while len(accepted) < 6:
            before = len(accepted)
            await asyncio.sleep(0)
            most = max(most, len(accepted) - before)
    assert most == 1


async def test_streams_over_tcp_send_at_once(stage):
    """A frame that waited until the one before it was acknowledged took 40 ms."""
    prefill, decode = await stage.pair(Cache(), Cache(), listen="tcp:127.0.0.1:0")
    prefill.offer("r", [1, 2], tokens=8)
    await decode.fetch(prefill.engine.ticket("r"), [3, 4], tokens=range(8), timeout=5)
    for worker in (prefill, decode):
        sock = session(worker)._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
