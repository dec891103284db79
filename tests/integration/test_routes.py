"""Every route with every shape of request: every byte of the destination, and what both ends say of it."""

import asyncio
import time

import pytest
import torch
from inside import factor, met, run_on, staging
from stage import Cache, Copied, Gate, eventually, frames, quiet

from kvxfer import READY
from kvxfer.protocol.messages import Route
from kvxfer.runtime import ThreadRuntime


async def move(stage, prefill, decode, ids=(1, 2), into=(3, 4), tokens=range(8), **offered):
    """Offer, fetch, compare every byte, release, and see that nothing is left. What both sides say of it."""
    source = stage.caches[prefill]
    before = source.clone()
    result, ending = await stage.bring(prefill, decode, "r", ids, into, tokens, offered=offered)
    assert all(torch.equal(source.memory[layer], kept) for layer, kept in before.items())
    await quiet(prefill, decode)
    (sent,) = ending.stats
    return result, sent


class Elsewhen(ThreadRuntime):
    """Of a machine that was started much earlier."""

    now = staticmethod(lambda: time.monotonic() + 1e6)


@pytest.mark.parametrize("ahead", ["prefill", "decode"])
async def test_clocks_that_have_nothing_in_common(stage, route, ahead, monkeypatch):
    workers = []
    for name in ("prefill", "decode"):
        run_on(Elsewhen if name == ahead else ThreadRuntime, monkeypatch)
        workers.append(await stage.worker(name, Cache(), route=route))
    prefill, decode = workers
    result, sent = await move(stage, prefill, decode)
    got = result.stats
    for stats in (sent, got):
        assert 0 < stats.duration < 10
        assert 0 <= stats.queued <= stats.duration
        assert 0 <= stats.wire <= stats.duration
        assert stats.started <= stats.finished
    assert abs(got.started - sent.started) > 5e5
    _, transfer = await stage.in_flight(prefill, decode, request="held")
    transfer.cancel()  # what is granted and not used yet is asked back
    stage.network.release("*")
    with pytest.raises(asyncio.CancelledError):
        await transfer
    assert transfer.memory_safe
    await quiet(prefill, decode)


@pytest.mark.parametrize("size", [0, 1, 65536])
async def test_both_ends_say_what_happened(stage, route, size):
    prefill, decode = await stage.pair(Cache(blocks=32), Cache(blocks=32, layout="HND"), route=route)
    payload = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    result, sent = await move(stage, prefill, decode, range(32), range(32), range(128), payload=payload)
    assert (result.payload, result.request) == (payload, "r")
    got, nbytes = result.stats, 2 * 2 * 128 * 4 * 8 * 4
    assert sent.route == got.route == route
    assert route in sent.why
    assert sent.bytes == got.bytes == nbytes
    assert sent.chunks == got.chunks > 8
    assert sent.pieces == got.pieces > 0
    mine, theirs = (got, sent) if route == "pull" else (sent, got)
    assert theirs.descriptors == 0
    assert mine.descriptors >= (got.chunks if route == "staged" else 128 * 2 * 2)
    assert len(got.peers) == len(sent.peers) == 1
    assert got.peers[0].startswith("prefill[0/1]@")
    assert sent.peers[0].startswith("decode[0/1]@")
    for stats in (sent, got):
        assert 0 < stats.duration < 10
        assert 0 <= stats.wire <= stats.duration
    assert mine.wire > 0
    assert 0 < mine.posting <= mine.duration
    assert (sent.gathering > 0) == (got.scattering > 0) == (route == "staged")
    assert got.started <= got.first_byte <= got.finished
    counted, theirs = decode.describe()["metrics"]["receive"], prefill.describe()["metrics"]["send"]
    for side, stats in ((counted, got), (theirs, sent)):
        assert (side["bytes"], side["transfers"]) == ({route: nbytes}, {"ok": 1})
        assert (side["pieces"], side["chunks"]) == (stats.pieces, stats.chunks)
        assert side["durations"][route]["sum"] == stats.duration
        assert {stage: seen["sum"] for stage, seen in side["stages"].items()} == {
            stage: getattr(stats, stage)
            for stage in ("queued", "gathering", "posting", "wire", "scattering")
            if getattr(stats, stage)
        }


@pytest.mark.parametrize(
    ("prefill", "decode", "taken"),
    [
        ({"route": "auto"}, {"route": "auto"}, "direct"),  # few pieces
        ({"route": "direct"}, {"route": "staged"}, "staged"),
        ({"route": "staged"}, {"route": "pull"}, "staged"),
        ({"route": "auto"}, {"route": "pull"}, "pull"),
        ({"trust": "none"}, {"route": "direct"}, "staged"),
        ({"route": "direct"}, {"trust": "none"}, "staged"),
        ({"arena_bytes": 0}, {}, "direct"),
        ({"chunk_bytes": 512}, {}, "direct"),  # the smallest staged chunk has 2048
        ({}, {"chunk_bytes": 512, "route": "pull"}, "pull"),
    ],
    ids=str,
)
async def test_the_route_is_one_that_both_can(stage, prefill, decode, taken):
    one, two = await stage.pair(Cache(), Cache(), prefill=prefill, decode=decode)
    result, _ = await move(stage, one, two, tokens=range(1, 8))
    assert result.stats.route == taken


@pytest.mark.parametrize(("layout", "taken"), [("NHD", "direct"), ("HND", "staged")])
async def test_auto_takes_few_large_pieces_one_by_one_and_stages_many_small_ones(stage, layout, taken):
    """At the first transfer of a pair, by the profile alone."""
    sizes = {"arena_bytes": "16MiB", "chunk_bytes": "1MiB"}
    prefill, decode = await stage.pair(Cache(blocks=128), Cache(blocks=128, layout=layout), **sizes)
    result, _ = await move(stage, prefill, decode, range(128), range(128), range(512))
    assert result.stats.route == taken


async def test_an_untrusted_peer_is_told_no_address(stage):
    prefill, decode = await stage.pair(Cache(), Cache(), trust="none")
    await move(stage, prefill, decode)
    for worker in (prefill, decode):
        assert all(tensor.base == 0 for tensor in met(worker).body.tensors)
    arenas = [staging(worker, "receive") for worker in (prefill, decode)]
    for entry in stage.network.log:
        assert any(arena.address <= entry.address < arena.address + arena.length for arena in arenas)


@pytest.mark.parametrize("of", ["fetch", "offer"])
async def test_nothing_is_read_or_written_before_its_event(stage, source, target, route, of):
    prefill, decode = await stage.pair(source, target, route=route)
    gate = Gate()
    _, transfer = stage.begin(prefill, decode, **({"after": gate} if of == "fetch" else {"offered": {"after": gate}}))
    await stage.bring(prefill, decode, "other", [0], [0], range(4), after=READY)  # and nothing else has changed
    assert not transfer.done
    if of == "offer":
        source.memory[0] += 7  # prefill's last kernel
    copied = Copied(target).bring(source, [1, 2], [3, 4], range(8))
    gate.fired = True
    await transfer
    copied.check()


async def test_two_workers_that_fetch_from_each_other_with_small_arenas(stage):
    caches = [Cache(blocks=64), Cache(blocks=64)]
    config = {"route": "staged", "arena_bytes": "4KiB", "chunk_bytes": "1KiB", "window": 1024}
    left, right = await stage.pair(*caches, **config)
    halves = list(range(32)), list(range(32, 64))
    copied = [
        Copied(caches[1]).bring(caches[0], halves[0], halves[1], range(128)),
        Copied(caches[0]).bring(caches[1], halves[0], halves[1], range(128)),
    ]
    for worker in (left, right):
        for part in range(4):
            worker.offer(f"r{part}", halves[0][part * 8 : part * 8 + 8], tokens=32)
    await asyncio.gather(
        *(
            ours.fetch(
                theirs.engine.ticket(f"r{part}"), halves[1][part * 8 : part * 8 + 8], tokens=range(32), timeout=10
            )
            for ours, theirs in ((left, right), (right, left))
            for part in range(4)
        )
    )
    for one in copied:
        one.check()
    await quiet(left, right)


@pytest.mark.parametrize("route", ["mapped", "staged", "direct", "pull"])
async def test_a_small_fetch_does_not_wait_for_a_large_one(stage, route):
    """All chunks of both wait for their blocks; then the small one takes its turn after a few of the large one's."""
    shared, cut = route == "mapped", {"chunk_bytes": "1KiB", "window": 1024}
    source, target = Cache(blocks=130, shared=shared), Cache(blocks=130, shared=shared, layout="HND")
    prefill, decode = await stage.pair(source, target, route=route, **cut)
    ready, many = Gate(), list(range(128))
    prefill.offer("large", many, tokens=512, after=ready)
    prefill.offer("small", [129], tokens=4, after=ready)
    large = decode.start_fetch(prefill.engine.ticket("large"), many, tokens=range(512), timeout=20)
    await eventually(lambda: frames(decode, "Accept") == 1)
    small = decode.start_fetch(prefill.engine.ticket("small"), [129], tokens=range(4), timeout=20)
    await eventually(lambda: frames(decode, "Accept") == 2)
    ready.fired = True
    first, last = (await small).stats, (await large).stats
    assert first.finished < last.finished, "it waited for all of the large one"
    assert last.chunks > 100 > first.chunks


async def test_what_waits_for_its_offer_says_nothing_of_the_pair(stage):
    source, target = Cache(), Cache(layout="HND")
    prefill, decode = await stage.pair(source, target)
    offer = prefill.offer("r", streaming=True)
    transfer = decode.start_fetch(prefill.engine.ticket("r"), [1, 2], tokens=range(8), timeout=10)
    offer.extend([1, 2], tokens=range(8))
    await eventually(lambda: any(one["chunks"] for one in prefill.describe()["transfers"]))  # it is planned, too early
    offer.ready()
    offer.finish()
    await transfer
    assert {factor(prefill, route) for route in Route} == {1.0}


async def test_an_event_that_has_fired_is_not_waited_for(stage):
    """So what the transfer takes tells of the pair; engines on GPUs pass an event with every offer."""
    prefill, decode = await stage.pair(Cache(), Cache(layout="HND"))
    ready = Gate()
    ready.fired = True
    result, _ = await stage.bring(prefill, decode, offered={"after": ready})
    assert factor(prefill, Route[result.stats.route.upper()]) != 1.0


async def test_a_route_that_takes_many_words_to_explain_is_taken(stage, monkeypatch):
    """The peer would have taken the session to be broken."""
    monkeypatch.setattr("kvxfer.plans.routes.Costs.seconds", lambda *_, **__: 1e9)
    monkeypatch.setattr("kvxfer.plans.routes.Estimates.overdue", lambda *_: True)
    prefill, decode = await stage.pair(Cache(), Cache())
    result, ending = await stage.bring(prefill, decode)
    (sent,) = ending.stats
    assert len(sent.why) > 128
    assert sent.why.startswith(result.stats.why)
