"""Processes that are killed or stopped, and fetches that are cancelled, in the midst of traffic over NIXL.

The same tests run on CPU memory wherever NIXL is installed.
"""

import asyncio
import contextlib
import copy
import os
import random
import signal
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.append(str(Path(__file__).parent.parent / "integration"))
sys.path.append(str(Path(__file__).parent))

import scene  # noqa: E402  # pyright: ignore[reportMissingImports]
from far import Doomed, Far, idle  # noqa: E402  # pyright: ignore[reportMissingImports]
from test_workers_gpu import ONE_TO_ONE, SAME_KIND, needs_nixl  # noqa: E402  # pyright: ignore[reportMissingImports]

from kvxfer.errors import KvxferError, MemoryInDoubtError, PeerLostError  # noqa: E402

pytestmark = [pytest.mark.timeout(300), needs_nixl]
ROUTES = ["mapped", "staged", "direct"]
TIMES = {"peer_timeout": 0.5, "revoke_timeout": 1.0, "connect_timeout": 1.0}
PATIENT = {"peer_timeout": 5.0}
"""Where a closed stream tells of a death: silence for half a second is what starved cores make."""
CANARY = 0x5A


@pytest.fixture
async def far():
    far = Far()
    yield far
    far.end()


@pytest.fixture
async def doomed():
    far = Far(Doomed)
    yield far
    far.end()


@pytest.fixture
async def survivor():
    far = Far()
    yield far
    far.end()


async def met(far, near, there, here, route, **config):
    """A decode rank here and a prefill rank there, after one request that made connections and kernels."""
    issuer, move = await scene.begin(far, near, ONE_TO_ONE, there=there, here=here, route=route, **{**TIMES, **config})
    await bring(far, issuer, move, "warm")
    for number in range(3):
        with contextlib.suppress(PeerLostError):  # a cold machine stands still for longer than these times allow
            await bring(far, issuer, move, f"again-{number}")  # by now each knows what the other passes
            return issuer, move
    await bring(far, issuer, move, "again")
    return issuer, move


async def survived(survivor, move, there, route, **config):
    """Another prefill engine, in a process of its own, for requests into the same blocks."""
    theirs = scene.sources(ONE_TO_ONE[0])
    issuer = scene.tickets(
        await survivor.open("other", theirs, device=there, route=route, **scene.SIZES, **{**TIMES, **config})
    )
    kept = copy.copy(move)
    kept.sources = theirs
    await bring(survivor, issuer, kept, "before")
    return issuer, kept


async def bring(far, issuer, move, request):
    """Fetch and compare every byte."""
    await far.offer(0, request, scene.IDS, tokens=len(scene.IDS) * 16)
    await asyncio.gather(*move.fetch(issuer.ticket(request), timeout=30))
    move.bring().check()


async def granted(far, issuer, move, request):
    """A fetch whose first layer has landed and whose others were never computed."""
    await far.offer(0, request, scene.IDS, tokens=len(scene.IDS) * 16, streaming=True)
    await far.ready(0, request, layers=[0])
    (transfer,) = move.fetch(issuer.ticket(request), timeout=60)
    await transfer.layers(0, 1)
    return transfer


async def settled(near, seconds=20):
    """Wait until nothing is under way, held or in doubt here."""
    async with asyncio.timeout(seconds):
        while not idle(near.quiet()):  # noqa: ASYNC110 - nobody sets an event for it
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("there", "here"), SAME_KIND)
async def test_a_prefill_process_is_killed_and_another_goes_on(far, survivor, near, there, here, route):
    issuer, move = await met(far, near, there, here, route, **PATIENT)
    other, kept = await survived(survivor, move, there, route, **PATIENT)
    transfer = await granted(far, issuer, move, "r")
    far.kill()
    with pytest.raises(KvxferError) as caught:
        await transfer
    assert not isinstance(caught.value, MemoryInDoubtError)
    await settled(near)
    for request in "abc":
        await bring(survivor, other, kept, request)


@pytest.mark.parametrize("forks", [False, True], ids=["", "having forked"])
@pytest.mark.parametrize(("there", "here"), SAME_KIND)
async def test_a_prefill_process_that_dies_in_the_midst_of_a_write_leaves_no_doubt(
    doomed, near, there, here, forks, monkeypatch, caplog
):
    """It ends with the agent that the write was to reach, which is made anew.

    A child of it has the GPUs open that it had, so they may go on: then the doubt stays.
    """
    issuer, move = await met(doomed, near, there, here, "staged")
    await settled(near)
    if forks:
        await doomed.fork(10 if here != "cpu" else 3)  # seconds that the child outlives it at most
    await doomed.offer(0, "r", scene.IDS, tokens=len(scene.IDS) * 16)
    await doomed.die_when_posting()
    (transfer,) = move.fetch(issuer.ticket("r"), timeout=60)
    with pytest.raises(KvxferError) as caught:
        await transfer
    assert not isinstance(caught.value, MemoryInDoubtError)
    if not forks or here == "cpu":
        await settled(near)
        return
    async with asyncio.timeout(20):
        while "process_had_forked" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    with pytest.raises(TimeoutError):
        await settled(near, 2)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("there", "here"), SAME_KIND)
async def test_a_decode_process_is_killed_and_another_goes_on(far, survivor, near, there, here, route):
    if there == "cpu" and route != "staged":
        pytest.skip("tests/faults kills processes on CPU memory at every step, on every route")
    issuer, move = await met(far, near, there, here, route, offer_lease=1.0, **PATIENT)
    victim = survivor  # its prefill rank and the decode rank here survive it
    await victim.open(
        "other", scene.targets(ONE_TO_ONE[1]), device=here, route=route, **scene.SIZES, **{**TIMES, **PATIENT}
    )
    await far.offer(0, "r", scene.IDS, tokens=len(scene.IDS) * 16, streaming=True)
    await far.ready(0, "r", layers=[0])
    await victim.start_fetch(0, issuer.ticket("r"), scene.INTO, tokens=scene.TOKENS, timeout=60)
    await victim.layers(0, "r", 0, 1)
    await far.offer(0, "beside", scene.IDS, tokens=len(scene.IDS) * 16)
    beside = move.fetch(issuer.ticket("beside"), timeout=30)
    await far.ready(0, "r")  # the others are on their way when it dies, or about to be
    victim.kill()
    await far.finish(0, "r")
    await asyncio.gather(*beside)
    move.bring().check()
    async with asyncio.timeout(30):
        while not idle(await far.quiet()):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    for request in "abc":
        await bring(far, issuer, move, request)
    await settled(near)
    assert await far.intact()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("there", "here"), SAME_KIND)
async def test_a_prefill_process_that_is_stopped_writes_nothing_when_it_goes_on(far, near, there, here, route):
    issuer, move = await met(far, near, there, here, route)
    transfer = await granted(far, issuer, move, "r")
    os.kill(far.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(KvxferError) as caught:
            await transfer
        assert not isinstance(caught.value, MemoryInDoubtError)
        await settled(near)
        cache = near.caches[0]
        for memory in cache.memory.values():
            memory.view(torch.uint8).fill_(CANARY)
        if here != "cpu":
            torch.cuda.synchronize(here)
    finally:
        os.kill(far.process.pid, signal.SIGCONT)
    await far.ready(0, "r")  # the rest of the layers, for a fetch that is over
    await far.finish(0, "r")
    async with asyncio.timeout(20):
        while any(rank["sending"] for rank in await far.quiet()):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert all(bool((memory.view(torch.uint8) == CANARY).all()) for memory in cache.memory.values())


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("there", "here"), SAME_KIND)
async def test_fetches_that_are_cancelled_anywhere(far, near, there, here, route):
    issuer, move = await met(far, near, there, here, route)
    draw = random.Random(7)
    for number in range(24):
        request = f"c{number}"
        await far.offer(0, request, scene.IDS, tokens=len(scene.IDS) * 16)
        (transfer,) = move.fetch(issuer.ticket(request), timeout=30)
        await asyncio.sleep(draw.random() * 0.004)
        transfer.cancel()
        await asyncio.gather(transfer, return_exceptions=True)
        assert transfer.memory_safe
        if number % 6 == 5:
            await bring(far, issuer, move, f"after {number}")
    await settled(near)
