"""Route `mapped`: the prefill rank's copies reach the decode rank's blocks; where they cannot, others are taken."""

import asyncio
import dataclasses
import os
import threading

import pytest
from inside import hang_up, live_where, look_at, met, open_windows_by, sessions, tell, told
from msgspec.structs import replace
from stage import Cache, eventually, quiet
from standing import Standing

from kvxfer import FabricError, MemoryInDoubtError, MismatchError, TransferFailedError
from kvxfer.copy.port import Direction
from kvxfer.mapped.host import Window
from kvxfer.protocol.framing import encode_body

IDS, INTO = [3, 1, 7], [2, 5, 9]
TOKENS = range(2, 11)


@pytest.fixture
def source():
    return Cache(layout="NHD")


@pytest.fixture
def target():
    return Cache(layout="HND", shared=True)


@pytest.fixture
def opened(monkeypatch):
    """Windows that were opened and closed, by address, as if they were in another process."""
    log = []

    def open_window(given, kind, device, *, own):
        assert own
        log.append(("open", given.address))
        return Window(given.address, given.length, given.address, lambda: log.append(("close", given.address)))

    open_windows_by(open_window, monkeypatch)
    return log


async def bring(stage, prefill, decode, request="r"):
    """A fetch; what both sides say of it."""
    result, ending = await stage.bring(prefill, decode, request, IDS, INTO, TOKENS)
    return result.stats, ending.stats[0]


async def goes_another_way(stage, prefill, decode, request="r"):
    stats, _ = await bring(stage, prefill, decode, request)
    assert stats.route in {"staged", "direct"}
    await quiet(prefill, decode)


async def test_auto_maps_what_can_be_mapped(stage, source, target):
    prefill, decode = await stage.pair(source, target)
    ours, theirs = await bring(stage, prefill, decode)
    assert (ours.route, theirs.route, ours.why) == ("mapped", "mapped", "preferred by the decode rank")
    assert (ours.descriptors, ours.gathering, ours.scattering) == (0, 0, 0)
    assert stage.network.log == []  # the transport moved nothing
    await quiet(prefill, decode)


@pytest.mark.parametrize("listen", ["unix", "tcp:127.0.0.1:0"])
async def test_a_peer_is_the_process_that_the_kernel_says(stage, source, target, listen):
    prefill, decode = await stage.pair(source, target, listen=listen)
    await bring(stage, prefill, decode)
    known = os.getpid() if listen == "unix" else 0
    assert [met(worker).process for worker in (prefill, decode)] == [known, known]


async def test_private_memory_is_not_mapped_and_that_is_said(stage, source, caplog):
    private = Cache(layout="HND")
    prefill, decode = await stage.pair(source, private, decode={"route": "mapped"})
    await goes_another_way(stage, prefill, decode)
    assert "kvxfer.shared_empty" in caplog.text
    assert told(decode).mapped == []
    assert caplog.text.count("route_fell_back") == 1
    assert decode.describe()["metrics"]["fallbacks"] == {"mapped is not possible for this pair": 1}


@pytest.mark.parametrize("preference", ["auto", "mapped"])
async def test_memory_that_cannot_be_mapped_falls_to_another_route_and_that_is_said(
    stage, source, target, monkeypatch, caplog, preference
):
    def refuse(given, kind, device, *, own):
        raise FabricError("no peer access between these two")

    open_windows_by(refuse, monkeypatch)
    prefill, decode = await stage.pair(source, target, route=preference)
    for request in "rs":
        await goes_another_way(stage, prefill, decode, request)
    assert caplog.text.count("peer_not_mapped") == 1
    assert caplog.text.count("no peer access between these two") == 1
    assert caplog.text.count("route_fell_back") == 2
    assert prefill.describe()["metrics"]["fallbacks"] == {"mapped is not possible for this pair": 2}


async def test_another_host_is_not_mapped(stage, source, target, monkeypatch):
    live_where(lambda: "another boot, another pid:[1]", monkeypatch)
    await goes_another_way(stage, *await stage.pair(source, target))


async def test_only_trusted_peers_are_told_how_to_map(stage, target):
    worker = await stage.worker("w", target)
    trusted, untrusted = told(worker), told(worker, trusted=False)
    assert trusted.mapped
    assert untrusted.host == trusted.host, "whether it is on another host matters to everybody"
    assert (untrusted.mapped, untrusted.locks, untrusted.gates) == ([], b"", 0)


async def test_memory_is_mapped_once_and_unmapped_when_the_peer_is_gone(stage, source, target, opened):
    prefill, decode = await stage.pair(source, target)
    for request in "rs":
        await bring(stage, prefill, decode, request)
    bases = sorted(memory.data_ptr() for memory in target.memory.values())
    assert sorted(opened) == [("open", base) for base in bases]
    await decode.aclose()
    await eventually(lambda: len(opened) == 4)
    assert sorted(opened) == [("close", base) for base in bases] + [("open", base) for base in bases]


async def test_what_is_mapped_stays_so_until_the_last_copy_has_ended(stage, source, target, opened):
    prefill, decode = await stage.pair(source, target, decode={"revoke_timeout": 0.05})
    copies = Standing(prefill, Direction.GATHER)
    prefill.offer("r", IDS, tokens=12)
    transfer = decode.start_fetch(prefill.engine.ticket("r"), INTO, tokens=TOKENS)
    await eventually(lambda: copies.held)
    await decode.aclose(drain=False)
    with pytest.raises(MemoryInDoubtError):
        await transfer
    await eventually(lambda: not sessions(prefill))
    assert not [what for what, _ in opened if what == "close"]
    copies.go()
    await eventually(lambda: len([what for what, _ in opened if what == "close"]) == 2)


async def test_a_peer_that_moves_its_cache_within_an_incarnation_is_refused(stage, source, target):
    prefill, decode = await stage.pair(source, target)
    await bring(stage, prefill, decode)
    peer = met(prefill)
    moved = [replace(tensor, base=tensor.base + (1 << 30)) for tensor in peer.body.tensors]
    body = replace(peer.body, tensors=moved)
    with pytest.raises(MismatchError, match="describes another cache than before"):
        await look_at(prefill, dataclasses.replace(peer, told=encode_body(body)))


async def test_who_comes_back_while_its_memory_is_being_opened_waits_for_that(stage, source, target, monkeypatch):
    prefill, decode = await stage.pair(source, target)
    opening, go = threading.Event(), threading.Event()

    def open_window(given, kind, device, *, own):
        opening.set()
        go.wait(5)
        return Window(given.address, given.length, given.address, lambda: None)

    open_windows_by(open_window, monkeypatch)
    first = decode.start_fetch(prefill.engine.ticket("early"), INTO, tokens=TOKENS)
    await eventually(opening.is_set)
    first.cancel()
    hang_up(decode)
    with pytest.raises(asyncio.CancelledError):
        await first
    again = asyncio.create_task(bring(stage, prefill, decode))
    await eventually(lambda: sessions(decode))
    go.set()
    ours, _ = await again
    assert ours.route == "mapped"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"address": (1 << 63) - 100, "length": 4096}, "are no memory of a process"),
        ({"address": 1 << 62, "length": 4096}, "are no memory of a process"),
        ({"kind": "cuda_vmm"}, "its cache is cuda_vmm memory"),
        ({"kind": "of a later version"}, "its cache is of a later version memory"),
    ],
    ids=str,
)
async def test_memory_that_no_peer_can_map_is_not_and_another_route_is_taken(
    stage, source, target, change, words, caplog
):
    prefill, decode = await stage.pair(source, target)
    tell(decode, lambda body: replace(body, mapped=[*body.mapped, *(replace(one, **change) for one in body.mapped)]))
    await goes_another_way(stage, prefill, decode)
    assert words in caplog.text


async def test_chunks_that_must_be_larger_than_was_wished_for_are(stage, target):
    source = Cache(layout="NHD", heads=range(4))
    prefill, decode = await stage.pair(source, target, prefill={"chunk_bytes": 512})
    ours, _ = await bring(stage, prefill, decode)
    assert (ours.route, ours.chunks) == ("mapped", 6)


async def test_a_copy_that_fails_fails_the_fetch(stage, source, target):
    prefill, decode = await stage.pair(source, target)
    copies = Standing(prefill, Direction.GATHER)
    offer = prefill.offer("r", IDS, tokens=12)
    fetch = asyncio.create_task(decode.fetch(prefill.engine.ticket("r"), INTO, tokens=TOKENS, timeout=5))
    await eventually(lambda: copies.held)
    copies.fail(TransferFailedError("an error of the device"))
    copies.go()
    with pytest.raises(TransferFailedError, match="an error of the device"):
        await fetch
    await offer.withdraw()
    await quiet(prefill, decode)
