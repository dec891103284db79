"""Streams to prefill ranks: one handshake for many fetches, bounded at each stage, and no more than are needed."""

import asyncio
import contextlib
import socket
import threading
from collections import Counter

import inside
import pytest
from inside import hang_up, look_in_threads, remember_unreachable, service, sessions
from stage import Cache, Copied, eventually, handshakes, quiet, turns
from wire import deaf_port, virtual

from kvxfer import KvxferError, MismatchError, Released, UnreachableError, site
from kvxfer import worker as assembly
from kvxfer.names import Endpoint
from kvxfer.plans import pairs
from kvxfer.prefill import sender
from kvxfer.protocol import session
from kvxfer.protocol.messages import Goodbye
from kvxfer.testing import DeterministicRuntime

BLOCK = range(4)


async def test_a_hundred_first_fetches_make_one_handshake_a_rank(stage, tap, monkeypatch):
    sources = [Cache(blocks=100, heads=heads) for heads in (range(2), range(2, 4))]
    ranks, _ = await stage.engine("prefill", sources)
    target = Cache(blocks=100)
    decode = await stage.worker("decode", target)
    opened = []
    session = type(service(decode)).new_session

    def counted(self, link, process):
        opened.append((self, link.role.value))
        return session(self, link, process)

    monkeypatch.setattr(type(service(decode)), "new_session", counted)
    offers = [rank.offer(f"r{n}", [n], tokens=4) for rank in ranks for n in range(100)]
    copied = Copied(target)
    for source in sources:
        copied.bring(source, [*range(100)], [*range(100)], range(400))
    ticket = ranks[0].engine.ticket
    await asyncio.gather(*(decode.fetch(ticket(f"r{n}"), [n], tokens=BLOCK, timeout=20) for n in range(100)))
    copied.check()
    assert sorted(role for worker, role in opened if worker is service(decode)) == ["client"] * 2
    assert len(opened) == 4
    assert not tap.of(Goodbye)
    assert {type(await offer.released()) for offer in offers} == {Released}
    await quiet(decode, *ranks)


async def test_a_large_engine_is_connected_a_part_a_turn(stage, monkeypatch):
    decode = await stage.worker("decode", Cache())
    begun = Counter()

    async def counted(peers, endpoint, epoch):
        begun[len(took)] += 1
        raise UnreachableError("nobody answers there", peer=endpoint)

    monkeypatch.setattr("kvxfer.peers.connections.Peers.link", counted)
    ticket = decode.engine.ticket("r") | {"world": 1000, "endpoints": {"prefix": "unix:/nowhere/", "first": 0}}
    with turns() as took, pytest.raises(UnreachableError):
        await decode.fetch(ticket, [1], tokens=BLOCK)
    assert sorted(begun.values()) == [232, 256, 256, 256]


class Stranger:
    """Somebody at an endpoint who refuses whoever comes."""

    def __init__(self):
        self.streams = 0  # those that were opened to it

    async def __call__(self, reader, writer):
        self.streams += 1
        writer.close()


def unconnected(worker):
    return not sessions(worker) and not handshakes(worker)


@virtual
async def test_who_refuses_handshakes_over_and_over_is_left_in_peace(one, tmp_path):
    """Ten seconds of fetches, one every 10 ms: each hears at once, and there are few attempts."""
    await one.pair()
    stranger = Stranger()
    server = await asyncio.start_unix_server(stranger, tmp_path / "stranger")
    ticket = one.ticket("r") | {"endpoints": {"prefix": f"unix:{tmp_path}/stranger"}}
    began, fetches, wait = one.now, 0, 0.0
    while one.now < began + 10:
        error, waited = await one.timed(one.decode.start_fetch(ticket, [1], tokens=BLOCK))
        assert isinstance(error, UnreachableError)
        assert waited < 0.1
        wait = error.retry_after or 0.0
        assert 0 < wait <= 2
        fetches += 1
        await asyncio.sleep(0.01)
    assert fetches > 500
    assert 5 <= stranger.streams <= 20
    # who follows the hint gets through to another attempt
    before = stranger.streams
    await asyncio.sleep(wait)
    await one.timed(one.decode.start_fetch(ticket, [1], tokens=BLOCK))
    assert stranger.streams == before + 1
    server.close()


@virtual
async def test_an_engine_that_has_restarted_is_met_at_once(one, tmp_path):
    """A ticket of a new epoch tells that somebody is there again: no wait for the last failure's end."""
    await one.pair(prefill={"listen": f"unix:{tmp_path}/p"})
    ticket = one.prefill.engine.ticket("r")
    await one.prefill.aclose()
    for _ in range(8):
        error, _ = await one.timed(one.decode.start_fetch(ticket, [1], tokens=BLOCK))
        assert isinstance(error, UnreachableError)
        assert one.decode.describe()["unreachable"]
        await asyncio.sleep(error.retry_after or 0.0)
    error, _ = await one.timed(one.decode.start_fetch(ticket, [1], tokens=BLOCK))
    assert error.retry_after > 0.5
    again = await one.worker("again", one.source, engine="prefill", listen=f"unix:{tmp_path}/p")
    again.offer("r", [1, 2], tokens=8)
    copied = Copied(one.target).bring(one.source, [1, 2], [3, 4], range(8))
    await one.decode.start_fetch(again.engine.ticket("r"), [3, 4], tokens=range(8))
    copied.check()
    assert not one.decode.describe()["unreachable"]


@virtual
async def test_an_engine_in_the_place_of_one_whose_host_is_gone_is_met_before_that_is_noticed(one):
    """Its ticket says that another one is there; the stream to the old one is not given up for a ticket alone."""
    await one.pair(peer_timeout=20.0)
    await one.bring("old")
    again = await one.worker("again", one.source, engine="prefill")
    again.offer("new", [1, 2], tokens=8)
    ticket = again.engine.ticket("new") | {"endpoints": {"prefix": one.wire.endpoint}}
    one.wire.lead_to(again.card.endpoint)
    error, _ = await one.timed(one.decode.start_fetch(ticket, [3, 4], tokens=range(8)))
    assert isinstance(error, MismatchError)
    await asyncio.sleep(6)
    assert len(sessions(one.decode)) == 1
    copied = Copied(one.target).bring(one.source, [1, 2], [3, 4], range(8))
    await one.decode.start_fetch(ticket, [3, 4], tokens=range(8))
    copied.check()


@pytest.mark.parametrize("listen", ["unix", "tcp:127.0.0.1:0"])
async def test_many_may_come_while_a_worker_stands_still(stage, listen):
    """As all of a large engine do when it has lost them; the system sets a bound of its own, of 4,096 as a rule."""
    prefill = await stage.worker("prefill", Cache(), listen=listen)
    where = Endpoint.parse(prefill.card.endpoint)
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            peer = stack.enter_context(socket.socket(socket.AF_UNIX if where.path else socket.AF_INET))
            peer.settimeout(0.5)
            peer.connect(where.path or (where.host, where.port))
        await eventually(lambda: handshakes(prefill) == 300)


async def test_an_address_that_does_not_answer_leaves_time_for_the_others_of_its_host(stage, monkeypatch):
    look_up = socket.getaddrinfo
    with deaf_port() as endpoint:
        port = int(endpoint.rpartition(":")[2])
        both = [*look_up("127.0.0.1", port, type=socket.SOCK_STREAM), *look_up("127.0.0.2", port)[:1]]
        prefill = await stage.worker("prefill", Cache(), listen=f"tcp:127.0.0.2:{port}", advertise=f"tcp:two:{port}")
        decode = await stage.worker("decode", Cache(), connect_timeout=0.5)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
        await stage.bring(prefill, decode)


async def test_names_that_nobody_answers_for_leave_threads_for_others(stage, monkeypatch):
    look_up, answered = socket.getaddrinfo, threading.Event()
    stage.stack.callback(answered.set)

    def look_up_slowly(host, port, *arguments, flags=0, **options):
        if host == "nobody" and flags != socket.AI_NUMERICHOST:
            answered.wait(30)
        return look_up(host, port, *arguments, flags=flags, **options)

    caches = (Cache(blocks=64, layers=range(100)) for _ in range(2))  # so many that they are looked at in threads
    there = {"listen": "tcp:127.0.0.1:0"}
    prefill, decode = await stage.pair(*caches, prefill=there, arena_bytes="1MiB", chunk_bytes="128KiB")
    monkeypatch.setattr(socket, "getaddrinfo", look_up_slowly)
    for n in range(10, 60):
        lost = {**prefill.engine.ticket(f"lost {n}"), "endpoints": {"prefix": f"tcp:nobody:{n}"}}
        stage.stack.callback(decode.start_fetch(lost, [n], tokens=BLOCK).cancel)
    await asyncio.sleep(0.1)
    async with asyncio.timeout(5):
        await stage.bring(prefill, decode)


async def test_what_could_not_be_reached_is_bounded(stage, monkeypatch):
    remember_unreachable(3, monkeypatch)
    prefill, decode = await stage.pair(Cache(), Cache())
    for n in range(6):
        with pytest.raises(KvxferError):
            await decode.fetch(
                {**prefill.engine.ticket("r"), "endpoints": {"prefix": f"unix:/nowhere{n}"}}, [1], tokens=BLOCK
            )
    unreachable = decode.describe()["unreachable"]
    assert list(unreachable) == [f"unix:/nowhere{n}" for n in (3, 4, 5)]
    assert all(0 <= seconds <= 0.1 for seconds in unreachable.values())


# --- caches of many tensors


class Recorded:
    """In which threads what takes long with a large cache was done."""

    SLOW = (
        (assembly, "encode_body"),
        (session, "decode_body"),
        (pairs, "geometry_from_wire"),
        (pairs, "differences"),
        (pairs, "common"),
        (pairs, "resolve"),
        (pairs.PairPlan, "__init__"),
        (pairs.PairPlan, "prepare"),
        (pairs, "selection_from_wire"),
    )

    def __init__(self, monkeypatch):
        self.threads = {}
        for place, name in self.SLOW:
            monkeypatch.setattr(place, name, self._wrapped(name, getattr(place, name)))

    def _wrapped(self, name, do):
        def recorded(*arguments, **options):
            self.threads.setdefault(name, set()).add(threading.get_ident())
            return do(*arguments, **options)

        return recorded


async def test_a_large_cache_is_looked_at_in_threads(stage, monkeypatch):
    """By both ends, as they meet, at the first fetch, and as they meet again: the loop serves others meanwhile."""
    recorded = Recorded(monkeypatch)
    source, target = Cache(layers=range(100)), Cache(layers=range(100), layout="HND")
    prefill, decode = await stage.pair(source, target, arena_bytes="1MiB", chunk_bytes="128KiB")
    for number in range(2):
        await stage.bring(prefill, decode, f"r{number}")
        hang_up(decode)
        await eventually(lambda: not sessions(prefill))
    assert recorded.threads.keys() == {name for _, name in Recorded.SLOW}
    here = threading.get_ident()
    assert not [name for name, threads in recorded.threads.items() if here in threads]


@pytest.mark.parametrize(("layers", "known_on_the_loop"), [(60, True), (600, False)])
async def test_a_fetch_of_many_layers_is_answered_in_a_thread(stage, monkeypatch, layers, known_on_the_loop):
    """A known pair's, too: what is made for each layer adds up."""
    answered, here, answer = [], threading.get_ident(), sender.plan_transfer

    def recorded(*arguments):
        answered.append(threading.get_ident() == here)
        return answer(*arguments)

    monkeypatch.setattr(sender, "plan_transfer", recorded)
    source, target = Cache(layers=range(layers)), Cache(layers=range(layers), layout="HND")
    prefill, decode = await stage.pair(source, target, chunk_bytes="8MiB", arena_bytes="64MiB")
    for number in range(2):
        await stage.bring(prefill, decode, f"r{number}")
    assert answered == [False, known_on_the_loop]


def slow(monkeypatch, seconds):
    """A look at any cache takes so long."""

    async def in_thread(runtime, work):
        del runtime
        await asyncio.sleep(seconds)
        return work()

    look_in_threads(monkeypatch)
    monkeypatch.setattr(DeterministicRuntime, "in_thread", in_thread)


@virtual
async def test_a_long_look_is_no_silence(one, monkeypatch):
    """Each end looks at the other for longer than either may be silent, and begins when the other one does not."""
    slow(monkeypatch, 50.0)
    await one.pair(prefill={"peer_timeout": 20.0}, decode={"peer_timeout": 6.0})
    met = one.now
    await one.bring("r")
    assert one.now - met >= 50
    assert [len(sessions(worker)) for worker in (one.prefill, one.decode)] == [1, 1]


@pytest.mark.parametrize("which", ["prefill", "decode"])
@virtual
async def test_a_worker_closes_while_a_look_is_taken(one, monkeypatch, which):
    await one.pair()
    slow(monkeypatch, 3.0)
    transfer = one.decode.start_fetch(one.ticket("r"), [1], tokens=BLOCK)
    await asyncio.sleep(1)
    closed, other = (one.prefill, one.decode) if which == "prefill" else (one.decode, one.prefill)
    assert handshakes(closed)
    await closed.aclose(drain=False)
    with pytest.raises(KvxferError):
        await transfer
    assert unconnected(closed)
    await asyncio.sleep(5)
    assert unconnected(other)


@pytest.fixture
def held(monkeypatch):
    """Looks at peers by a prefill rank end when this is set."""
    examine, go = site.Site.examine, asyncio.Event()

    async def slow(self, peer, *, sending):
        found = await examine(self, peer, sending=sending)
        if sending:
            await go.wait()
        return found

    monkeypatch.setattr(site.Site, "examine", slow)
    return go


async def test_what_a_peer_said_before_it_left_counts_though_it_is_still_looked_at(stage, held):
    prefill, decode = await stage.pair(Cache(), Cache(), peer_timeout=1.0)
    offer = prefill.offer("r", [0, 1], tokens=8)
    await decode.decline(offer.ticket)
    await decode.aclose(drain=False)
    await eventually(lambda: all(map(inside.has_ended, inside.streams(prefill))))  # a ping met nobody
    held.set()
    async with asyncio.timeout(5):
        assert type(await offer.released()) is Released


async def test_nothing_is_kept_of_a_peer_that_left_while_it_was_looked_at(stage, held):
    prefill = await stage.worker("prefill", Cache(shared=True))
    for number in range(3):
        held.clear()
        decode = await stage.worker(f"decode{number}", Cache(shared=True))
        inside.cut_session(await inside.connect(decode, prefill.card.endpoint))
        await eventually(lambda: all(map(inside.has_ended, inside.streams(prefill))))
        held.set()
        await eventually(lambda: not (inside.streams(prefill) or inside.tasks(prefill)))
    kept = inside.kept_of_peers(prefill)
    assert not any(kept.values()), kept


async def test_nothing_is_kept_of_a_prefill_rank_that_leaves_as_it_is_met(stage, tmp_path):
    """The end of its stream comes with its last word of the handshake."""
    prefill, decode = await stage.pair(Cache(), Cache())

    async def serve(reader, writer):
        there, back = await asyncio.open_unix_connection(prefill.card.endpoint.removeprefix("unix:"))
        for _ in range(2):  # what a side says to the other in turn is one frame each
            back.write(await reader.read(65536))
            writer.write(await there.read(65536))
        writer.close()
        back.close()

    async with await asyncio.start_unix_server(serve, tmp_path / "between"):
        link = await inside.connect(decode, f"unix:{tmp_path}/between")
        await eventually(lambda: not link.is_open)
    kept = inside.kept_of_peers(decode)
    assert not any(kept.values()), kept
