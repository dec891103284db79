"""Requests that do not go as planned: ranks that die between others, fan-in of which a part fails, other engines."""
# what failed has a report, and what is fetched was offered
# pyright: reportOptionalMemberAccess=false

import asyncio
import random

import pytest
from inside import cut_session, entry, kept_of_peers, sessions
from stage import KEY, Cache, Copied, Tap, eventually, quiet
from wire import virtual

from kvxfer import Expired, KvxferError, PeerLostError, Released, TransferFailedError
from kvxfer.protocol.messages import Abandon, Cancel, Fetch
from kvxfer.tickets import EngineCard

TOKENS = range(8)


def split(count):
    """Eight heads over so many ranks."""
    return [range(n * 8 // count, (n + 1) * 8 // count) for n in range(count)]


# --- a decode rank that dies between the releases of the others


@pytest.mark.parametrize("retried", [False, True], ids=["given up", "retried elsewhere"])
@virtual
async def test_a_decode_rank_dies_after_another_has_released(one, retried):
    """The offer waits for the release of the dead one no longer than its lease, and less if another engine takes it."""
    one.source = Cache(heads=range(8))
    one.prefill = await one.worker("prefill", one.source)
    caches = [Cache(heads=heads) for heads in split(2)]
    ranks = [
        await one.worker(f"decode{rank}", cache, engine="decode", rank=rank, world=2)
        for rank, cache in enumerate(caches)
    ]
    card = EngineCard.of([rank.card for rank in ranks])
    for rank in ranks:
        rank.join(card, key=KEY)
    wires = [await one.wire_to(one.prefill, f"wire{n}") for n in range(2)]
    offer = one.prefill.offer("r", [1, 2], tokens=8)
    for rank, wire in zip(ranks, wires, strict=True):
        rank.claim(one.ticket("r", wire))
    await one.until(lambda: len(sessions(one.prefill)) == 2)
    await ranks[0].start_fetch(one.ticket("r", wires[0]), [3, 4], tokens=TOKENS)
    await one.until(lambda: entry(offer).engine.released == {0})
    wires[1].cut()  # for good: nobody comes back on it
    began = one.now
    if retried:
        cache = Cache(heads=range(8), layout="HND")
        alone = await one.worker("alone", cache)
        copied = Copied(cache).bring(one.source, [1, 2], [5, 6], TOKENS)
        await alone.start_fetch(one.prefill.engine.ticket("r"), [5, 6], tokens=TOKENS)
        copied.check()
        assert isinstance(await offer.released(), Released)
        assert one.now - began < 1
        return
    assert isinstance(await offer.released(), Expired)
    assert one.now - began <= one.prefill.config.bounds()["released_by_lease"]
    one.prefill.offer("s", [1, 2], tokens=8)  # the blocks are the caller's


# --- one of four senders fails


@pytest.mark.parametrize("fails", ["refuses a post", "loses its stream", "withdraws"])
async def test_one_of_four_senders_fails(stage, monkeypatch, route, fails):
    """The others are told to stop, the fetch fails once, every byte comes back, and the same ticket works again."""
    tap = Tap(monkeypatch)
    monkeypatch.setattr("kvxfer.decode.receiver.Grants.turns", lambda _: 2)  # however quick they are
    sources, target = [Cache(heads=heads) for heads in split(4)], Cache(heads=range(8))
    small = {"route": route, "revoke_timeout": 5, "window": 1, "chunk_bytes": 512}
    ranks, _ = await stage.engine("prefill", sources, **small)
    decode = await stage.worker("decode", target, **small)
    ticket = ranks[0].engine.ticket
    for rank in ranks:
        rank.offer("known", [0], tokens=4)
    await decode.fetch(ticket("known"), [0], tokens=range(4), timeout=5)
    await quiet(decode, *ranks)
    stage.network.hold("*")
    if fails == "refuses a post":  # whichever is the first
        stage.network.refuse_next("prefill1" if route == "pull" else "decode")
    offers = [rank.offer("r", [1, 2], tokens=8) for rank in ranks]
    transfer = decode.start_fetch(ticket("r"), [3, 4], tokens=TOKENS)
    parts = 4 if route == "staged" else 1  # one of each rank, whose further chunks then wait for their turns
    if fails != "refuses a post":
        await eventually(lambda: stage.network.held("*") >= parts)
    withdrawn = [asyncio.ensure_future(offers[1].withdraw())] if fails == "withdraws" else []
    if withdrawn:
        await asyncio.sleep(0)
        stage.network.release("*", parts)  # only what is held itself says that something failed
    if fails == "loses its stream":
        (link,) = (link for link in sessions(decode) if link.endpoint == ranks[2].card.endpoint)
        cut_session(link)
        # who has a read under way, which is held, says that first
        await eventually(lambda: len(tap.of(Abandon)) + len(tap.of(Cancel)) >= 3)
    elif route == "staged":  # the further chunks of the others are held until they were told to stop
        await eventually(lambda: tap.of(Cancel))
    stage.network.release("*")
    ends = []
    transfer.outcome.add_done_callback(ends.append)
    with pytest.raises(KvxferError) as caught:
        await transfer
    assert isinstance(caught.value, PeerLostError if fails == "loses its stream" else TransferFailedError)
    assert caught.value.report.memory_safe
    assert caught.value.report.peer.split("@")[0] in {f"prefill[{rank}/4]" for rank in range(4)}
    await quiet(decode, *ranks)
    await eventually(lambda: ends)
    assert len(ends) == 1
    asked = {message.transfer for message in tap.of(Fetch)[-4:]}
    assert len(asked) == 4
    assert {message.transfer for message in tap.of(Cancel)} <= asked
    # what moves chunk by chunk is stopped in the middle; where all is granted at once, the others may be through
    least = 3 if fails == "loses its stream" else int(route == "staged")
    told = [*tap.of(Cancel), *tap.of(Abandon)]  # a reader whose reads stand says so first, and may need no more
    assert len({message.transfer for message in told}) >= least
    copied = Copied(target)
    for source in sources:
        copied.bring(source, [1, 2], [3, 4], TOKENS)
    if withdrawn:
        await asyncio.gather(*withdrawn, *(offer.withdraw() for offer in offers))
        offers = [rank.offer("r", [1, 2], tokens=8, attempt=1) for rank in ranks]
    again = ranks[0].engine.ticket("r", attempt=len(withdrawn))
    await decode.fetch(again, [3, 4], tokens=TOKENS, timeout=5)
    copied.check()
    assert {type(await offer.released()) for offer in offers} == {Released}
    await quiet(decode, *ranks)


# --- a retry by an engine of another size


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2), (2, 4)])
async def test_an_engine_of_another_size_tries_again(stage, first, second):
    source = Cache(heads=range(8))
    prefill = await stage.worker("prefill", source, route="staged")
    before = [Cache(heads=heads) for heads in split(first)]
    after = [Cache(heads=heads, layout="HND") for heads in split(second)]
    tried, _ = await stage.engine("tried", before)
    again, _ = await stage.engine("again", after)
    offer, ticket = prefill.offer("r", [1, 2], tokens=8), prefill.engine.ticket("r")
    stage.network.refuse_next("tried0")
    with pytest.raises(TransferFailedError):
        await tried[0].fetch(ticket, [3, 4], tokens=TOKENS, timeout=5)
    for rank in tried[1:]:  # the others have what they need, and have released it
        await rank.fetch(ticket, [3, 4], tokens=TOKENS, timeout=5)
    await eventually(lambda: len(getattr(entry(offer).engine, "released", ())) == first - 1)
    copied = [Copied(cache).bring(source, [1, 2], [5, 6], TOKENS) for cache in after]
    *others, last = again if second == 1 else [again[0], *again[2:], again[1]]
    for rank in others:
        await rank.fetch(ticket, [5, 6], tokens=TOKENS, timeout=5)
        assert not offer.wait_end().done()  # the releases of the first engine count no longer
    await last.fetch(ticket, [5, 6], tokens=TOKENS, timeout=5)
    for expected in copied:
        expected.check()
    assert isinstance(await offer.released(), Released)
    await quiet(prefill, *tried, *again)


# --- leases


@pytest.mark.parametrize("seed", range(3))
@virtual
async def test_no_renewal_shortens_a_lease(one, seed):
    """Whoever renews it, however, and whenever: after the first claim, it only grows while it lives."""
    draw = random.Random(seed)
    await one.pair(prefill={"offer_lease": 20, "unclaimed_timeout": 90})
    other = await one.worker("other", Cache())
    offer = one.prefill.offer("r", streaming=True)
    offer.extend([1, 2], tokens=TOKENS)
    engines = dict.fromkeys((one.decode, other))
    for worker in engines:
        worker.claim(one.prefill.engine.ticket("r"))
    await one.until(lambda: entry(offer).engine is not None)
    lease, transfers, grown = entry(offer).lease, [], 8
    for _ in range(60):
        await asyncio.sleep(draw.uniform(0, 3))
        act = draw.randrange(4)
        if act == 0:
            draw.choice(list(engines)).claim(one.prefill.engine.ticket("r"))
        elif act == 1 and not transfers:
            transfers.append(one.decode.start_fetch(one.prefill.engine.ticket("r"), [3, 4], tokens=TOKENS))
        elif act == 2 and grown < 28:
            offer.extend([3 + grown // 4], tokens=range(grown, grown + 4))
            grown += 4
            offer.ready(tokens=grown)
        elif act == 3 and transfers:
            transfers.pop().cancel()
        await asyncio.sleep(0)
        assert entry(offer).lease >= lease
        lease = entry(offer).lease
        assert not offer.wait_end().done()


# --- peers that are gone


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_nothing_is_kept_of_the_dead(stage, side):
    """Ten incarnations come, move a request and go; the one that stays knows as much of them as before."""
    staying = await stage.worker("stays", Cache())
    sizes = []
    for n in range(10):
        coming = await stage.worker("comes", Cache())
        prefill, decode = (coming, staying) if side == "prefill" else (staying, coming)
        offer = prefill.offer(f"r{n}", [1], tokens=4)
        await decode.fetch(prefill.engine.ticket(f"r{n}"), [1], tokens=range(4), timeout=5)
        await offer.released()
        await coming.aclose()
        await eventually(lambda: not sessions(staying))
        sizes.append(kept_of_peers(staying))
    assert sizes[-1] == sizes[0]
    assert {name: size for name, size in sizes[-1].items() if size} == {}
