"""Closing: twice, under way, after an exception, never; and nothing that is left behind."""
# the private state of workers that are open
# pyright: reportOptionalMemberAccess=false
# ruff: noqa: ASYNC240 - looking at a socket file takes no time

import asyncio
import contextlib
import gc
import socket
import tempfile
import threading
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
from inside import borrow_thread, mover, posted, rebuild
from stage import DEFAULTS, SOON, Cache, Copied, eventually, handshakes, turns
from standing import Stuck

from kvxfer import (
    ClosedError,
    Config,
    ConfigError,
    FabricError,
    KvxferError,
    MemoryInDoubt,
    Released,
    Withdrawn,
    runtime,
)
from kvxfer.fabric.calls import Fabric
from kvxfer.names import Endpoint
from kvxfer.testing import LoopbackNetwork, LoopbackTransport, simulate
from kvxfer.worker import Worker

TOKENS = range(8)


def make(name, cache, network, **config):
    return Worker(cache.tensors, Config(**{**DEFAULTS, **config}), transport=LoopbackTransport(name, network))


def left():
    """What workers leave behind: threads, tasks, socket folders."""
    return (
        {thread.name for thread in threading.enumerate() if thread.name.startswith("kvxfer")},
        {task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("kvxfer")},
        {path.name for path in Path(tempfile.gettempdir()).glob("kvxfer-*")},
    )


NOTHING = (set(), set(), set())


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    """Sockets of these tests alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


async def test_nothing_is_left(network):
    source, target = Cache(), Cache()
    async with make("p", source, network) as prefill, make("d", target, network) as decode:
        prefill.offer("r", [1, 2], tokens=8)
        await decode.fetch(prefill.engine.ticket("r"), [3, 4], tokens=TOKENS, timeout=5)
        never = prefill.offer("never", [1], tokens=4)
        waiting = decode.start_fetch(prefill.engine.ticket("later"), [5], tokens=range(4))
        endpoint = Path(prefill.card.endpoint[5:])
        assert endpoint.is_socket()
        assert endpoint.parent.stat().st_mode & 0o777 == 0o700
        threads, _, folders = left()
        assert threads
        assert folders
        waiting.cancel()
        await never.withdraw()
    assert left() == NOTHING
    assert not network.agents


async def test_a_fabric_whose_thread_takes_its_time_to_end_is_waited_for(network, monkeypatch):
    run = Fabric.run

    def slowly(fabric):
        run(fabric)
        time.sleep(0.2)

    monkeypatch.setattr(Fabric, "run", slowly)
    async with make("p", Cache(), network):
        assert left() != NOTHING
    assert left() == NOTHING


async def test_close_twice_and_at_once(network):
    worker = make("p", Cache(), network)
    await worker.aclose()  # never entered: nothing to do
    async with worker:
        await asyncio.gather(worker.aclose(), worker.aclose(), worker.aclose(drain=False))
        await worker.aclose()
    await worker.aclose()
    with pytest.raises(ClosedError, match="entered once"):
        await worker.__aenter__()


async def test_a_closed_worker_says_so(network):
    other = make("o", Cache(), network)
    worker = make("p", Cache(), network)
    for call in (
        lambda: worker.card,
        lambda: worker.engine,
        lambda: worker.offer("r", [1], tokens=4),
        lambda: worker.start_fetch({}, [1], tokens=range(4)),
    ):
        with pytest.raises(ClosedError, match="not open"):
            call()
    async with other, worker:
        ticket = other.engine.ticket("r")
    for call in (
        lambda: worker.offer("r", [1], tokens=4),
        lambda: worker.claim(ticket),
        lambda: worker.start_fetch(ticket, [1], tokens=range(4)),
    ):
        with pytest.raises(ClosedError, match="draining or closed"):
            call()


async def test_work_under_way_may_end(network):
    source, target = Cache(), Cache()
    async with make("p", source, network) as prefill, make("d", target, network) as decode:
        offer = prefill.offer("r", streaming=True)
        transfer = decode.start_fetch(prefill.engine.ticket("r"), [3, 4], tokens=TOKENS)
        await eventually(lambda: prefill.describe()["sending"])
        closing = [asyncio.create_task(prefill.aclose()), asyncio.create_task(decode.aclose())]
        await eventually(lambda: prefill.describe()["draining"] and decode.describe()["draining"])
        with pytest.raises(ClosedError):
            prefill.offer("s", [1], tokens=4)
        with pytest.raises(ClosedError):
            decode.start_fetch(prefill.engine.ticket("s"), [1], tokens=range(4))
        copied = Copied(target).bring(source, [1, 2], [3, 4], TOKENS)
        offer.extend([1, 2], tokens=TOKENS)
        offer.ready()
        offer.finish(b"end")
        assert (await transfer).payload == b"end"
        copied.check()
        assert isinstance(await offer.released(), Released)
        await asyncio.gather(*closing)


async def test_an_exception_does_not_wait_for_the_drain(network):
    began = time.monotonic()
    offers = []
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the block is what is tested
        async with make("p", Cache(), network, drain_timeout=60) as prefill:
            offers.append(prefill.offer("r", [1], tokens=4))
            raise ZeroDivisionError
    assert time.monotonic() - began < 30
    assert isinstance(await offers[0].released(), Withdrawn)


async def test_a_stuck_post_does_not_keep_the_worker_open(network, caplog):
    """What may still be written is leaked, never freed, and whoever waits is told."""
    source, target = Cache(), Cache()
    prefill, decode = make("p", source, network, route="direct", **SOON), make("d", target, network, **SOON)
    async with prefill, decode:
        offer = prefill.offer("r", [1, 2], tokens=8)
        network.wedge("d")
        transfer = decode.start_fetch(prefill.engine.ticket("r"), [3, 4], tokens=TOKENS)
        await eventually(lambda: posted(prefill))
        began = time.monotonic()
        await prefill.aclose(drain=False)  # while the other is there: of a post to nobody nothing is left
        await decode.aclose(drain=False)
        assert time.monotonic() - began < 20
    with pytest.raises(MemoryInDoubt) as reading:
        await offer.released()
    with pytest.raises(MemoryInDoubt) as writing:
        await transfer
    for doubt in (reading, writing):
        with pytest.raises(ClosedError, match="never reuse"):
            await doubt.value.settled()
    assert "fabric_left_open" in caplog.text
    assert "memory_leaked" in caplog.text


@pytest.mark.parametrize("call", ["close", "renew"])
async def test_a_transport_that_does_not_return_does_not_keep_the_worker_open(network, caplog, call):
    transport = Stuck("p", network, call)
    config = Config(**{**DEFAULTS, **SOON, "peer_timeout": 0.3})
    async with Worker(Cache().tensors, config, transport=transport) as worker:
        if call == "renew":
            rebuild(worker)
            await eventually(transport.inside.is_set)
        await worker.aclose(drain=False)
    assert transport.inside.is_set()
    assert "fabric_not_closed" in caplog.text
    assert "memory_leaked" in caplog.text
    transport.go.set()
    await eventually(lambda: left() == NOTHING)


@pytest.mark.parametrize("loop", ["caller", "own"])
async def test_opening_can_be_cancelled_where_the_transport_does_not_return(network, caplog, loop):
    transport = Stuck("p", network, "register")
    worker = Worker(Cache().tensors, Config(**DEFAULTS | {"revoke_timeout": 0.2}), transport=transport, loop=loop)
    opening = asyncio.ensure_future(worker.__aenter__())
    await eventually(transport.inside.is_set)
    opening.cancel()
    async with asyncio.timeout(30):
        with pytest.raises(asyncio.CancelledError):
            await opening
    assert "fabric_not_closed" in caplog.text
    assert "memory_leaked" in caplog.text, "the call may still register it"
    transport.go.set()
    await eventually(lambda: left() == NOTHING)


async def test_copies_are_given_up_while_the_transport_is_closed(network, caplog):
    """One may wait for the other on a GPU, and the times must not add up."""
    transport = Stuck("p", network, "close")
    worker = Worker(Cache().tensors, Config(**DEFAULTS), transport=transport)
    async with worker:
        close = mover(worker).close
        mover(worker).close = lambda timeout: transport.go.set() or close(timeout)
    assert transport.inside.is_set()
    assert "fabric_not_closed" not in caplog.text
    assert left() == NOTHING


async def test_closing_while_connecting(network):
    """A peer that says nothing is not waited for by who needs nothing of it any more."""
    quiet_server = []
    decode = make("d", Cache(), network, revoke_timeout=30)
    async with decode:
        path = decode.card.endpoint[5:] + ".silent"
        server = await asyncio.start_unix_server(lambda *streams: quiet_server.append(streams), path)
        ticket = {**decode.engine.ticket("r"), "endpoints": {"prefix": f"unix:{path}"}}
        transfer = decode.start_fetch(ticket, [1], tokens=range(4))
        decode.claim(ticket)
        declining = asyncio.create_task(decode.decline(ticket))
        await eventually(lambda: quiet_server)
        began = time.monotonic()
        await decode.aclose(drain=False)
        assert time.monotonic() - began < 20
        with pytest.raises(ClosedError):
            await transfer
        with pytest.raises(ClosedError, match=r"before unix:.*silent was reached"):
            await declining
        server.close()
        quiet_server[0][1].close()
        Path(path).unlink()
        Path(path).parent.rmdir()


async def test_a_worker_that_was_never_closed_is_reported_and_one_that_was_is_collected(network):
    async with make("p", Cache(), network) as worker:
        with pytest.warns(ResourceWarning, match="open> was never closed: use `async with`"):
            worker.__del__()
    worker.__del__()  # closed now: not a word
    ref = weakref.ref(worker)
    del worker
    await eventually(lambda: gc.collect() >= 0 and ref() is None)


async def test_a_worker_closes_though_all_its_threads_wait(network, monkeypatch):
    monkeypatch.setattr(runtime, "_MOST_LENT", 1)
    release = threading.Event()
    worker = make("p", Cache(), network)
    await worker.__aenter__()
    waiting = asyncio.ensure_future(borrow_thread(worker, release.wait))
    try:
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(worker.aclose())
        assert (await asyncio.wait({closing}, timeout=10))[0]  # to cancel it would be waited for as well
        assert not waiting.done()
    finally:
        release.set()
        await waiting
    await closing


async def test_the_loop_is_never_blocked_for_long(network):
    source, target = Cache(blocks=512), Cache(blocks=512, layout="HND")
    async with make("p", source, network) as prefill, make("d", target, network) as decode:
        ids = [list(range(n, n + 32)) for n in range(0, 512, 32)]
        tickets = [prefill.offer(f"r{n}", blocks, tokens=128).ticket for n, blocks in enumerate(ids)]
        fetches = zip(tickets, ids, strict=True)
        with turns() as took:
            await asyncio.gather(*(decode.fetch(given, into, tokens=range(128), timeout=20) for given, into in fetches))
    assert sorted(took)[int(len(took) * 0.99)] < 0.02


async def test_a_failed_opening_leaves_nothing(network, tmp_path):
    async with make("p", Cache(), network, listen=f"unix:{tmp_path}/w.sock"):
        second = make("q", Cache(), network, listen=f"unix:{tmp_path}/w.sock")
        with pytest.raises(ConfigError, match=r"listens at .* already"):
            await second.__aenter__()
        with pytest.raises(KvxferError, match="'p' is open already"):
            await make("p", Cache(), network).__aenter__()
        await eventually(lambda: [thread.name for thread in threading.enumerate()].count("kvxfer-fabric") == 1)
        assert (tmp_path / "w.sock").is_socket()
    assert left() == NOTHING


async def test_a_socket_that_was_left_by_a_killed_worker_is_taken_over(network, tmp_path):
    import socket

    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/w.sock")
    async with make("p", Cache(), network, listen=f"unix:{tmp_path}/w.sock") as worker:
        assert worker.card.endpoint == f"unix:{tmp_path}/w.sock"
    assert not (tmp_path / "w.sock").exists()


async def test_one_that_could_not_be_opened_is_not_opened_again(network, monkeypatch):
    """What it was made of would be half another's: a peer would be told of memory that is nobody else's."""
    worker = make("p", Cache(), network, trust="none")
    with monkeypatch.context() as patched:
        patched.setattr("kvxfer.safety.fence.Exports.open", refuse)
        with pytest.raises(KvxferError, match="no more of it"):
            await worker.__aenter__()
    for _ in range(2):
        with pytest.raises(ClosedError, match="entered once"):
            await worker.__aenter__()
    assert left() == NOTHING


async def refuse(*_, **__):
    raise FabricError("no more of it")


async def test_one_is_not_opened_twice_at_once(network):
    worker = make("p", Cache(), network)
    opened, refused = await asyncio.gather(worker.__aenter__(), worker.__aenter__(), return_exceptions=True)
    assert opened is worker
    assert isinstance(refused, ClosedError)
    await worker.aclose()
    assert left() == NOTHING


@pytest.mark.parametrize("drain", [False, True])
def test_one_that_is_closed_while_it_opens_opens_no_further(drain):
    """Whenever that is."""

    async def late_by(turns, runtime):
        network = LoopbackNetwork()
        worker = Worker(Cache().tensors, Config(**DEFAULTS), transport=LoopbackTransport("p", network), runtime=runtime)
        opening = asyncio.create_task(worker.__aenter__())
        for _ in range(turns):
            await asyncio.sleep(0)
        late = opening.done()
        await worker.aclose(drain=drain)
        assert not network.agents
        (outcome,) = await asyncio.gather(opening, return_exceptions=True)
        assert outcome is worker if late else "closed while it opened" in str(outcome)
        assert "closed" in repr(worker)
        assert left() == NOTHING
        return late

    turns = 1
    while not simulate(partial(late_by, turns)):
        turns += 1
    assert turns > 5


@pytest.mark.parametrize("step", ["setup", "register"])
async def test_one_on_its_own_loop_that_is_closed_while_it_opens_opens_no_further(network, step):
    transport = Stuck("p", network, step)
    worker = Worker(Cache().tensors, Config(**DEFAULTS), transport=transport, loop="own")
    opening = asyncio.create_task(worker.__aenter__())
    await asyncio.to_thread(transport.inside.wait)
    closing = asyncio.create_task(worker.aclose())
    await asyncio.sleep(0.05)
    transport.go.set()
    await closing
    assert not network.agents
    with pytest.raises(ClosedError, match="closed while it opened"):
        await opening
    assert left() == NOTHING


async def test_one_that_is_given_up_while_its_address_is_looked_up_listens_nowhere(network, monkeypatch):
    looking, go, look, bound = threading.Event(), threading.Event(), socket.getaddrinfo, []
    monkeypatch.setattr(socket, "create_server", lambda *_, **__: bound.append(True))

    def slowly(*given, **options):
        looking.set()
        go.wait()
        return look(*given, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    opening = asyncio.create_task(make("p", Cache(), network, listen="tcp:127.0.0.1:0").__aenter__())
    await asyncio.to_thread(looking.wait)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    go.set()
    await asyncio.sleep(0.05)
    assert not bound


@pytest.mark.parametrize("loop", ["caller", "own"])
async def test_a_further_call_without_a_drain_cuts_it_short(network, loop):
    transport = LoopbackTransport("p", network)
    worker = Worker(Cache().tensors, Config(**DEFAULTS | {"drain_timeout": 60}), transport=transport, loop=loop)
    await worker.__aenter__()
    worker.offer("r", [1, 2], tokens=8)
    closing = asyncio.create_task(worker.aclose())
    await eventually(lambda: worker.describe()["draining"])
    async with asyncio.timeout(30):
        await worker.aclose(drain=False)
        await closing


@pytest.mark.parametrize("listen", ["unix", "tcp:127.0.0.1:0"])
async def test_who_connects_as_a_worker_closes_is_not_left_waiting(stage, listen):
    """In whatever turn that is: what was accepted, and is no link yet, is closed with it."""
    for later in range(8):
        worker = await stage.worker("worker", Cache(), listen=listen)
        where = Endpoint.parse(worker.card.endpoint)
        with socket.socket(socket.AF_UNIX if where.path else socket.AF_INET) as stranger:
            stranger.settimeout(0)
            stranger.connect_ex(where.path or (where.host, where.port))
            for _ in range(later):
                await asyncio.sleep(0)
            await worker.aclose(drain=False)
            assert not handshakes(worker)
            await asyncio.sleep(0.01)
            with contextlib.suppress(ConnectionError):
                while stranger.recv(65536):  # raises if nobody has closed it
                    pass
