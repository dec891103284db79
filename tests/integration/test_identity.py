"""A worker that says to be another one, whose incarnation is no secret: it is refused, and the other one goes on."""
# what failed has a report, and what is fetched was offered
# pyright: reportOptionalMemberAccess=false

import asyncio
import contextlib
from itertools import pairwise

import inside
import pytest
from impostor import made_up, posing_as
from inside import cut, forget_unreachable, session, sessions
from stage import SOON, Cache, Copied, eventually, handshakes, quiet

import kvxfer
from kvxfer import worker as assembly
from kvxfer.protocol.session import IdentityKey

TOKENS = range(8)


async def claims_to_be(worker, stage, **config):
    """Another worker, which says of itself all that this one says."""
    engine = worker.config.engine
    with posing_as(worker):
        twin = await stage.worker(f"twin of {engine}", Cache(), engine=engine, **config)
    return made_up(twin, worker)


async def connect(worker, endpoint):
    """Over a new stream, rather than the error of the one before."""
    forget_unreachable(worker)
    return await inside.connect(worker, endpoint)


async def under_way(stage, **config):
    """Two workers, and a fetch between them whose bytes are under way: the last sees it end well when they land."""
    prefill, decode = await stage.pair(Cache(), Cache(layout="HND"), **config)
    copied = Copied(stage.caches[decode]).bring(stage.caches[prefill], [1, 2], [3, 4], TOKENS)
    offer, transfer = await stage.in_flight(prefill, decode, request="moving")

    async def ends_well():
        assert not transfer.done
        stage.network.release("*")
        await transfer
        copied.check()
        assert isinstance(await offer.released(), kvxfer.Released)
        await quiet(prefill, decode)

    return prefill, decode, ends_well


async def test_nobody_takes_the_place_of_a_decode_rank(stage, route):
    prefill, decode, ends_well = await under_way(stage, route=route)
    twin = await claims_to_be(decode, stage)
    link = session(prefill)
    for _ in range(3):
        async with asyncio.timeout(10):
            with pytest.raises(kvxfer.IdentityError, match="said goodbye: nothing proves") as refused:
                await connect(twin, prefill.card.endpoint)
        assert refused.value.code is kvxfer.Code.IDENTITY
        assert sessions(prefill) == {link}
    await ends_well()
    assert link.is_open


async def test_nobody_takes_the_place_of_a_prefill_rank(stage, route):
    """At an endpoint of its own, to which its ticket leads: the other one is asked, which knows no such ticket."""
    prefill, decode, ends_well = await under_way(stage, route=route)
    twin = await claims_to_be(prefill, stage)
    link = session(decode)
    twin.offer("theirs", [1], tokens=4)
    async with asyncio.timeout(10):
        with pytest.raises(kvxfer.RefusedError) as refused:
            await decode.fetch(twin.engine.ticket("theirs"), [7], tokens=range(4))
    assert refused.value.reason is kvxfer.Code.TICKET_FORGED
    assert sessions(decode) == {link}
    assert not sessions(twin)
    await ends_well()


@pytest.mark.parametrize("together", [False, True], ids=["in turn", "at once"])
@pytest.mark.parametrize("scheme", ["unix", "tcp"])
async def test_a_worker_that_has_two_names(stage, scheme, together, tmp_path):
    """The second one leads to the session that there is or will be, or nobody could fetch by it while that is open."""
    source, target = Cache(), Cache(layout="HND")
    listen = {"unix": f"unix:{tmp_path}/here", "tcp": "tcp:127.0.0.1:0"}[scheme]
    prefill, decode = await stage.pair(source, target, prefill={"listen": listen})
    (tmp_path / "there").symlink_to(tmp_path / "here")
    names = prefill.card.endpoint, prefill.card.endpoint.replace("here", "there").replace("127.0.0.1", "localhost")
    copied, transfers = Copied(target).bring(source, range(4), range(4, 8), range(16)), []
    for number in range(4):
        offer = prefill.offer(f"r{number}", [number], tokens=4)
        ticket = offer.ticket | {"endpoints": {"prefix": names[number % 2]}}
        transfers.append(decode.start_fetch(ticket, [4 + number], tokens=range(4)))
        if not together:
            await transfers[-1]
    await asyncio.gather(*transfers)
    copied.check()
    (link,) = sessions(decode)
    assert link.endpoint in names[: 1 + together]  # whoever is the first
    assert decode.describe()["metrics"]["sessions_opened"] == {"receive": 1}


async def test_a_worker_that_has_moved(stage, tmp_path):
    """Nobody answers where it was, or somebody else does, and nothing of it is under way."""
    places = [tmp_path / name for name in ("here", "there", "yonder")]
    prefill, decode = await stage.pair(Cache(), Cache(), prefill={"listen": f"unix:{places[0]}"})
    first = await connect(decode, f"unix:{places[0]}")
    for number, (old, new) in enumerate(pairwise(places)):
        cut(decode)
        await eventually(lambda: not sessions(prefill, decode))
        old.rename(new)
        if number:
            await stage.worker("other", Cache(), listen=f"unix:{old}")
        prefill.offer(f"r{number}", [1], tokens=4)
        ticket = prefill.engine.ticket(f"r{number}") | {"endpoints": {"prefix": f"unix:{new}"}}
        await decode.fetch(ticket, [3], tokens=range(4))
        (link,) = (link for link in sessions(decode) if link.peer.identity == first.peer.identity)
        assert link.endpoint == f"unix:{new}"


async def test_two_workers_that_fetch_from_each_other_meet_again(stage):
    """A stream each way, and each of them cut."""
    one, other = await stage.pair(Cache(), Cache(layout="HND"))
    for turn in range(3):
        for giver, taker in ((one, other), (other, one)):
            await stage.bring(giver, taker, f"r{turn}")
        cut(one, other)
        await eventually(lambda: not sessions(one, other))


@contextlib.asynccontextmanager
async def kept_back(decode, prefill, between):
    """The decode rank is led to somebody who lets the handshake fail; what he goes on with later."""
    kept = []

    async def serve(reader, writer):
        there, back = await asyncio.open_unix_connection(prefill.card.endpoint.removeprefix("unix:"))
        back.write(await reader.read(65536))  # Hello
        writer.write(await there.read(65536))  # Welcome
        kept.extend([there, back, await reader.read(65536)])  # Agent
        writer.close()

    async def go_on():
        there, back, agent = kept[-3:]
        back.write(agent)
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionError):
                while await there.read(65536):
                    pass

    async with await asyncio.start_unix_server(serve, between):
        with pytest.raises(kvxfer.UnreachableError):
            await connect(decode, f"unix:{between}")
        try:
            yield go_on
        finally:
            for back in kept[1::3]:
                back.close()


@pytest.mark.usefixtures("no_locks")
async def test_a_proof_that_was_kept_back_is_of_no_use_when_the_session_is_lost_either(stage, tmp_path):
    """While the decode rank cannot come back, and may read on."""
    here, aside = tmp_path / "here", tmp_path / "aside"
    prefill, decode = await stage.pair(Cache(), Cache(), route="pull", prefill={"listen": f"unix:{here}"}, **SOON)
    async with kept_back(decode, prefill, tmp_path / "between") as go_on:
        _, transfer = await stage.in_flight(prefill, decode)
        here.rename(aside)
        cut(decode)
        await eventually(lambda: not sessions(prefill))
        await go_on()
        assert prefill.describe()["metrics"]["sessions_opened"] == {"send": 1}
        aside.rename(here)
    stage.network.release("*")
    with pytest.raises(kvxfer.KvxferError):
        await transfer
    await quiet(prefill, decode)


async def test_a_proof_that_was_kept_back_is_of_no_use_against_an_older_stream(stage, tmp_path):
    """The one over which the two meet was opened before his, and what they said there was on its way for longer."""
    prefill, decode = await stage.pair(Cache(), Cache())
    opened, go = asyncio.Event(), asyncio.Event()

    async def serve(reader, writer):
        there, back = await asyncio.open_unix_connection(prefill.card.endpoint.removeprefix("unix:"))
        opened.set()
        await go.wait()
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(passed_on(reader, back), passed_on(there, writer))

    async with await asyncio.start_unix_server(serve, tmp_path / "slow"):
        slow = asyncio.create_task(inside.connect(decode, f"unix:{tmp_path}/slow"))
        await opened.wait()
        await eventually(lambda: handshakes(prefill) == 1)
        async with kept_back(decode, prefill, tmp_path / "between") as go_on:
            go.set()
            await slow
            link = session(prefill)
            await go_on()
            assert sessions(prefill) == {link}
            assert link.is_open
        cut(decode)


async def passed_on(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()


async def test_a_handshake_that_the_peer_cuts_is_begun_anew(stage, tmp_path):
    """As it does when the handshake of an older stream completes, of whose end it has yet to hear."""
    prefill, decode = await stage.pair(Cache(), Cache())
    streams = []

    async def serve(reader, writer):
        streams.append(writer)
        there, back = await asyncio.open_unix_connection(prefill.card.endpoint.removeprefix("unix:"))
        if len(streams) == 1:
            back.write(await reader.read(65536))  # Hello
            writer.write(await there.read(65536))  # Welcome
            await reader.read(65536)  # Agent
            back.close()
            writer.close()
            return
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(passed_on(reader, back), passed_on(there, writer))

    async with await asyncio.start_unix_server(serve, tmp_path / "between"):
        await inside.connect(decode, f"unix:{tmp_path}/between")
        assert len(streams) == 2
        cut(decode)


async def test_nobody_comes_first(stage):
    """No side believes who says to be the other one, or itself, and both go on with the real one afterwards."""
    prefill, decode = await stage.pair(Cache(), Cache())
    with pytest.raises(kvxfer.IdentityError):
        await connect(await claims_to_be(decode, stage), prefill.card.endpoint)
    twin = await claims_to_be(prefill, stage)
    twin.offer("theirs", [1], tokens=4)
    async with asyncio.timeout(10):
        with pytest.raises(kvxfer.IdentityError, match="nothing proves"):
            await decode.fetch(twin.engine.ticket("theirs"), [7], tokens=range(4))
    with pytest.raises(kvxfer.IdentityError):
        await connect(twin, prefill.card.endpoint)
    assert not sessions(twin)
    assert not sessions(prefill)
    await stage.bring(prefill, decode)


ALIKE = 38428, 46513
"""Private keys whose public halves begin with the same 32 bits; it took a second to find them."""


@pytest.mark.parametrize("config", [{}, {"chunk_bytes": "32KiB", "arena_bytes": "128KiB"}], ids=["", "granted ahead"])
@pytest.mark.parametrize("alike", ["prefill", "decode"])
async def test_nobody_shares_an_account_with_one_whose_key_begins_alike(stage, alike, config):
    """What it holds, and leaves in quarantine, would count against the other one, which got no memory then."""
    config = {"route": "staged", **config}
    alone = await stage.worker("alone", Cache(), **config)
    two, fetches = [], []
    for number, private in enumerate(ALIKE):
        with pytest.MonkeyPatch.context() as patch:
            key = IdentityKey((8 * private).to_bytes(32, "little"))
            patch.setattr(assembly, "IdentityKey", lambda _, key=key: key)
            two.append(await stage.worker(f"{alike}{number}", Cache(), **config))
    assert len({worker.card.incarnation[:8] for worker in two}) == 1
    stage.network.hold("*")
    for number, worker in enumerate(two):
        prefill, decode = (worker, alone) if alike == "prefill" else (alone, worker)
        prefill.offer(f"r{number}", [1, 2], tokens=8)
        ticket = prefill.engine.ticket(f"r{number}")
        fetches.append(decode.start_fetch(ticket, [2 * number, 2 * number + 1], tokens=TOKENS))
    side = "receive" if alike == "prefill" else "send"
    await eventually(lambda: len({one.peer for one in alone.describe()["arena"][side].extents}) == 2)
    stage.network.release("*")
    await asyncio.gather(*fetches)
