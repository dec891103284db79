"""What arrived is compared with its source: on every route a damaged piece fails the fetch, which names it."""

import asyncio
import threading
from typing import Any

import pytest
from inside import early_sums, hear, lack, session, sessions, unanswered
from stage import Cache, Copied, Gate, eventually, quiet

from kvxfer import Code, IntegrityError, MismatchError, TransferFailedError
from kvxfer.copy import walk
from kvxfer.geometry import selected
from kvxfer.protocol.messages import Accept, Cancel, Capability, Check, Status, Sums
from kvxfer.protocol.transfer import build_result

ROUTES = ["staged", "direct", "pull", "mapped"]
IDS, INTO = [3, 1, 7], [2, 5, 9]
TOKENS = range(2, 11)


@pytest.fixture(params=ROUTES)
def route(request):
    return request.param


def caches(route, **options):
    return Cache(layout="NHD", **options), Cache(layout="HND", shared=route == "mapped", **options)


async def checked_pair(stage, route, source, target, **config):
    config = {"integrity": "full", "chunk_bytes": "16KiB", **config}
    return await stage.pair(source, target, prefill={"integrity": "off"}, decode={"route": route}, **config)


def counted(worker):
    return worker.describe()["metrics"]["chunks_checked"]


async def bring(stage, prefill, decode, request="r", **options):
    await stage.bring(prefill, decode, request, IDS, INTO, TOKENS, **options)
    await quiet(prefill, decode)


async def fails(prefill, decode, error: type[Exception] = IntegrityError, match=None) -> Any:
    """What a fetch raises."""
    prefill.offer("r", IDS, tokens=12)
    with pytest.raises(error, match=match) as caught:
        await decode.fetch(prefill.engine.ticket("r"), INTO, tokens=TOKENS, timeout=10)
    return caught.value


@pytest.fixture
def damage(monkeypatch):
    """Flip a bit of a layer of the destination, once, before it is read back."""

    def arrange(target, layer, at):
        total, left = walk.total, [at]

        def spoilt(plan):
            if plan._side == 1 and left:
                target.view(layer)[left.pop()] ^= 1
            return total(plan)

        monkeypatch.setattr(walk, "total", spoilt)

    return arrange


async def test_a_damaged_block_fails_the_fetch_and_is_named(stage, route, damage, tap):
    source, target = caches(route)
    prefill, decode = await checked_pair(stage, route, source, target)
    damage(target, 1, (0, 5, 2, 3, 4))
    error = await fails(prefill, decode)
    assert (error.code, error.layers, error.damaged) == (Code.INTEGRITY, (1,), {"default": (5,)})
    assert error.blocks == {"default": tuple(INTO)}
    assert error.memory_safe
    assert f"chunk {error.chunk} is not what" in str(error)
    assert "layers 1 (default/k) differ in blocks 5 of group 'default'" in str(error)
    assert "prefill" in error.peer
    assert route in str(error)
    await eventually(lambda: counted(prefill) == {"reported": 1})
    assert counted(decode)["damaged"] == 1
    assert [cancel.code for cancel in tap.of(Cancel)] == [Code.INTEGRITY]
    assert decode.describe()["metrics"]["receive"]["transfers"] == {"integrity": 1}
    await bring_again(prefill, decode, source, target)


async def test_of_damage_only_the_rank_is_told_that_sent_it(stage, damage, tap):
    sources, target = [Cache(heads=range(2)), Cache(heads=range(2, 4))], Cache(layout="HND")
    ranks, _ = await stage.engine("prefill", sources, chunk_bytes="16KiB")
    decode = await stage.worker("decode", target, route="staged", integrity="full", chunk_bytes="16KiB")
    damage(target, 1, (0, 5, 0, 0, 0))
    ranks[0].offer("r", IDS, tokens=12)
    ranks[1].offer("r", streaming=True)  # so that it has not ended by then
    with pytest.raises(IntegrityError):
        await decode.fetch(ranks[0].engine.ticket("r"), INTO, tokens=TOKENS, timeout=10)
    await eventually(lambda: len(tap.of(Cancel)) == 2 and not any(rank.describe()["sending"] for rank in ranks))
    assert {cancel.code for cancel in tap.of(Cancel)} == {Code.INTEGRITY, Code.CANCELLED}
    assert [counted(rank) for rank in ranks] == [{"reported": 1}, {}]


async def bring_again(prefill, decode, source, target):
    """The claim stays, so the same ticket brings it after all."""
    copied = Copied(target).bring(source, IDS, INTO, TOKENS)
    await decode.fetch(prefill.engine.ticket("r"), INTO, tokens=TOKENS, timeout=10)
    copied.check()
    await quiet(prefill, decode)


@pytest.mark.parametrize("route", ["staged", "direct", "pull"])
async def test_a_bit_that_flips_on_the_way_fails_the_fetch(stage, route):
    source, target = caches(route)
    prefill, decode = await checked_pair(stage, route, source, target)
    stage.network.damage_next("prefill" if route == "pull" else "decode", byte=30)
    error = await fails(prefill, decode)
    assert len(error.layers) == 1
    assert len(error.damaged["default"]) == 1
    await bring_again(prefill, decode, source, target)


async def test_room_in_staging_that_no_token_fills_may_hold_anything(stage):
    source, target = caches("staged")
    prefill, decode = await checked_pair(stage, "staged", source, target)
    stage.network.damage_next("decode", byte=70)  # behind the two tokens that the first row has of four
    await bring(stage, prefill, decode)


async def test_nothing_is_asked_and_nothing_added_up_unless_it_is_configured(stage, route, tap, monkeypatch):
    for module, name in (  # whoever called one of these would fail
        ("copy.walk", "total"),
        ("decode.receiver", "Checking.__init__"),
        ("prefill.sender", "SumPlan"),
        ("prefill.sender", "selected"),
    ):
        monkeypatch.setattr(f"kvxfer.{module}.{name}", None)
    prefill, decode = await checked_pair(stage, route, *caches(route), integrity="off")
    await bring(stage, prefill, decode)
    assert not tap.of(Check)
    assert not tap.of(Sums)
    assert counted(decode) == {}


async def test_some_chunks_are_compared_and_both_sides_know_which(stage, route, tap, monkeypatch):
    monkeypatch.setattr("kvxfer.config._SAMPLED_EVERY", 3)
    sizes = {"chunk_bytes": "1KiB"}
    prefill, decode = await checked_pair(stage, route, *caches(route), integrity="sampled", **sizes)
    for number in range(4):
        await bring(stage, prefill, decode, f"r{number}")
    said = {(sums.transfer, sums.chunk) for sums in tap.of(Sums)}
    moved = {(accept.transfer, chunk) for accept in tap.of(Accept) for chunk in range(accept.chunks)}
    assert said == {one for one in moved if selected(*one, 3)}
    assert 0 < len(said) < len(moved)
    assert counted(decode) == {"ok": len(said)}


async def test_sums_that_do_not_come_fail_the_fetch(stage, route, tap):
    prefill, decode = await checked_pair(stage, route, *caches(route))
    tap.change[Sums] = lambda sums: Sums(sums.transfer, sums.chunk, sums.sums[:-8])
    error = await fails(prefill, decode, match="did not say what chunk 0 adds up to")
    assert (error.layers, error.damaged) == ((), {})
    await quiet(decode)


async def test_sums_of_what_nobody_waits_for_are_not_kept(stage):
    """A peer may say them of as many chunks as there are numbers."""
    prefill, decode = await checked_pair(stage, "staged", *caches("staged"))
    offer, transfer = stage.begin(prefill, decode, "r", IDS, INTO, TOKENS, offered={"after": Gate()})
    await eventually(lambda: unanswered(decode) and sessions(decode))
    (number,), link = unanswered(decode), session(decode)
    for chunk in range(100):
        hear(decode, link, Sums(number, 1000 + chunk, bytes(8)))
        hear(decode, link, build_result(number, Status.CANCELLED, chunk=1000 + chunk))
    assert early_sums(decode) == 0
    transfer.cancel()
    await offer.withdraw()


async def test_of_sums_that_pile_up_hashes_are_kept(stage, damage, monkeypatch):
    """Chunks may be many and small, and what is said of each as long as of a large one."""
    monkeypatch.setattr("kvxfer.decode.receiver._WHOLE_BYTES", 1000)
    source, target = caches("direct")
    prefill, decode = await checked_pair(stage, "direct", source, target, chunk_bytes="512")
    stage.network.hold("decode")
    offer, transfer = stage.begin(prefill, decode, "r", IDS, INTO, TOKENS)
    await eventually(lambda: stage.network.held("decode"))
    link, number = session(decode), int(transfer.id.rpartition("-")[2])
    for _ in range(2):
        for chunk in range(4):
            hear(decode, link, Sums(number, chunk, bytes(400)))
    assert early_sums(decode) == 400 + 400 + 33 + 33
    stage.network.release("decode")
    transfer.cancel()
    await offer.released()
    monkeypatch.setattr("kvxfer.decode.receiver._WHOLE_BYTES", 0)
    await stage.bring(prefill, decode, "again", IDS, INTO, TOKENS)
    damage(target, 1, (0, 5, 1, 2, 3))
    prefill.offer("damaged", IDS, tokens=12)
    with pytest.raises(IntegrityError, match=r"chunk [0-9]+ is not what prefill") as caught:
        await decode.fetch(prefill.engine.ticket("damaged"), INTO, tokens=TOKENS, timeout=10)
    assert not caught.value.damaged


async def test_a_peer_that_cannot_add_up_is_refused_when_it_is_met(stage):
    source, target = caches("staged")
    prefill = await stage.worker("prefill", source)
    lack(prefill, Capability.SUMS)
    decode = await stage.worker("decode", target, integrity="sampled")
    with pytest.raises(MismatchError, match="integrity=sampled is set here"):
        await decode.fetch(prefill.engine.ticket("r"), INTO, tokens=TOKENS, timeout=5)


async def test_an_offer_that_grows_is_compared_as_it_does(stage, route):
    source, target = caches(route)
    prefill, decode = await checked_pair(stage, route, source, target, chunk_bytes="1KiB")
    want = Copied(target).bring(source, IDS, INTO, TOKENS)
    offer = prefill.offer("r", streaming=True)
    transfer = decode.start_fetch(prefill.engine.ticket("r"), INTO, tokens=TOKENS, timeout=10)
    for first in range(0, 12, 4):
        offer.extend(IDS[first // 4 : first // 4 + 1], tokens=range(first, first + 4))
        offer.ready()
        await asyncio.sleep(0)
    offer.finish()
    result = await transfer
    want.check()
    assert result.stats.route == route
    assert counted(decode) == {"ok": result.stats.chunks}
    assert counted(prefill) == {}
    await quiet(prefill, decode)


async def test_a_fetch_that_is_cancelled_while_it_is_read_back_ends_when_nothing_reads_any_more(
    stage, route, monkeypatch
):
    prefill, decode = await checked_pair(stage, route, *caches(route))
    go_on, total = threading.Event(), walk.total
    reading = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slowly(plan):
        if plan._side == 1:
            loop.call_soon_threadsafe(reading.set)
            assert go_on.wait(10)
        return total(plan)

    monkeypatch.setattr(walk, "total", slowly)
    _, transfer = stage.begin(prefill, decode, "r", IDS, INTO, TOKENS)
    await reading.wait()
    transfer.cancel()
    await eventually(lambda: prefill.describe()["sending"] == 0)
    assert not transfer.done
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await transfer
    await quiet(decode)


@pytest.mark.parametrize("side", [0, 1], ids=["prefill", "decode"])
async def test_a_side_that_cannot_add_up_fails_the_fetch_and_keeps_nothing(stage, route, monkeypatch, side):
    source, target = caches(route)
    prefill, decode = await checked_pair(stage, route, source, target)
    total = walk.total

    def broken(plan):
        if plan._side == side:
            raise MemoryError("no room for it")
        return total(plan)

    monkeypatch.setattr(walk, "total", broken)
    await fails(prefill, decode, TransferFailedError, match="no room for it")
    monkeypatch.undo()
    await bring_again(prefill, decode, source, target)
    assert counted(decode) == {"ok": 1}
