"""Copies on a GPU that stand still, over NIXL: the agent is made anew meanwhile, fetches are cancelled, workers close.

A stream of the mover is held up, by a wait for a word in pinned memory or by a kernel that runs until it is set.
The same tests run on CPU memory, where what is launched moves nothing until it may go on.
"""

import asyncio
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.append(str(Path(__file__).parent.parent / "integration"))
sys.path.append(str(Path(__file__).parent))

from far import idle  # noqa: E402  # pyright: ignore[reportMissingImports]
from holding import Holding  # noqa: E402  # pyright: ignore[reportMissingImports]
from scene import IDS, INTO, TOKENS, spoiler  # noqa: E402  # pyright: ignore[reportMissingImports]
from test_faults_gpu import bring, met, settled  # noqa: E402  # pyright: ignore[reportMissingImports]
from test_workers_gpu import gpus, needs_nixl  # noqa: E402  # pyright: ignore[reportMissingImports]

from kvxfer import BlocksError, ClosedError  # noqa: E402
from kvxfer.errors import KvxferError, MemoryInDoubtError, TransferFailedError  # noqa: E402

pytestmark = [pytest.mark.timeout(120), needs_nixl]
TIMES = {"peer_timeout": 5.0, "revoke_timeout": 1.0, "connect_timeout": 5.0, "drain_timeout": 1.0}
SECONDS = 10.0
"""What may come on top of a bound on a machine that is busy."""
HELD = [
    pytest.param("cpu", "cpu", "", id="cpu"),
    pytest.param("cuda:0", "cuda:0", "wait", id="one gpu", marks=gpus(1)),
    pytest.param("cuda:0", "cuda:1", "wait", id="two gpus", marks=gpus(2)),
    pytest.param("cuda:0", "cuda:1", "kernel", id="two gpus, a kernel runs", marks=gpus(2)),
]
held = pytest.mark.parametrize(("there", "here", "how"), HELD)
held_on_gpus = pytest.mark.parametrize(("there", "here", "how"), HELD[1:])
"""On CPU memory the others show that the tests themselves work."""


@pytest.fixture(scope="module")
def kind_of_ranks():
    return Holding


def spoil(move, here):
    """Put junk into the blocks that are fetched into: nothing else tells whether they are written anew."""
    for one in move.expected:
        spoiler(one.placed, INTO)(one.placed)
    if here != "cpu":
        torch.cuda.synchronize(here)
    move.late(prefill=False)
    move.check()  # loads what it launches: CUDA may wait for every stream to do that


async def scatters(far, near, there, here, how):
    """A fetch whose bytes are in the arena here, and are not taken from there."""
    issuer, move = await met(far, near, there, here, "staged", **TIMES)
    spoil(move, here)
    near.hold(0, "scatter", how)
    await far.offer(0, "r", IDS, tokens=len(IDS) * 16)
    (transfer,) = move.fetch(issuer.ticket("r"), timeout=60)
    return issuer, move, transfer, await near.standing(0, "scatter")


async def gathers(far, near, there, here, how):
    """A fetch whose bytes are not yet in the arena there."""
    issuer, move = await met(far, near, there, here, "staged", **TIMES)
    spoil(move, here)
    await far.hold(0, "gather", how)
    await far.offer(0, "r", IDS, tokens=len(IDS) * 16)
    (transfer,) = move.fetch(issuer.ticket("r"), timeout=60)
    return issuer, move, transfer, await far.standing(0, "gather")


async def raised(awaitable):
    (outcome,) = await asyncio.gather(awaitable, return_exceptions=True)
    return outcome


def in_time(how, rebuild, late):
    """On a CPU the agent is made anew meanwhile; on a GPU not before the copy has ended, and nobody waits for it."""
    took, lag = rebuild
    print(f"rebuilt after {took} s, {late} s after the copy had ended; the loop was late by {lag:.3f} s")
    bound = TIMES["peer_timeout"] + 2 * TIMES["revoke_timeout"] + SECONDS
    assert (took is None) == bool(how)
    assert (took or late) <= bound
    assert lag < 2.0, "the whole process waited for the GPU"


@held
async def test_a_scatter_outlives_the_agent(far, near, there, here, how):
    issuer, move, transfer, kept = await scatters(far, near, there, here, how)
    rebuild = await near.rebuild(0)
    assert set(kept) <= set(near.kept(0, "scatter")), "memory of a copy that stands still was given away"
    move.check()  # and nothing has landed yet
    near.go()
    in_time(how, rebuild, await near.rebuilt(0))
    error = await raised(transfer)  # more was granted than there are places, and is taken back
    assert "rebuilt" in str(error)
    assert isinstance(error, MemoryInDoubtError if how else TransferFailedError), error
    if isinstance(error, MemoryInDoubtError):  # while the copy keeps them
        await asyncio.wait_for(error.settled(), 30)
    await settled(near)
    await bring(far, issuer, move, "after")


@held_on_gpus
async def test_a_gather_outlives_the_agent(far, near, there, here, how):
    issuer, move, transfer, kept = await gathers(far, near, there, here, how)
    rebuild = await far.rebuild(0)
    assert set(kept) <= set(await far.kept(0, "gather")), "memory of a copy that stands still was given away"
    move.check()
    await far.go()
    in_time(how, rebuild, await far.rebuilt(0))
    await transfer
    move.bring().check()
    await settled(near)
    await bring(far, issuer, move, "after")
    assert await far.intact()


@held_on_gpus
async def test_blocks_that_a_scatter_may_write_are_in_doubt_until_it_ends(far, near, there, here, how):
    issuer, move, transfer, kept = await scatters(far, near, there, here, how)
    began = time.monotonic()
    transfer.cancel()
    doubt = await raised(transfer)
    assert isinstance(doubt, MemoryInDoubtError), doubt
    assert time.monotonic() - began <= TIMES["revoke_timeout"] + SECONDS
    rebuild = await near.rebuild(0)
    assert set(kept) <= set(near.kept(0, "scatter"))
    assert not transfer.memory_safe, "an agent that was made anew is taken for the end of a copy of our own"
    with pytest.raises(BlocksError):
        near.workers[0].start_fetch(issuer.ticket("s"), INTO, tokens=TOKENS, after=near.settled(near.caches[0]))
    move.check()
    near.go()
    in_time(how, rebuild, await near.rebuilt(0))
    await asyncio.wait_for(doubt.settled(), 30)
    await settled(near)
    await bring(far, issuer, move, "after")


@held
async def test_blocks_that_a_gather_may_read_are_in_doubt_until_it_ends(far, near, there, here, how):
    issuer, move, transfer, kept = await gathers(far, near, there, here, how)
    ended, seconds = await far.withdraw(0, "r")
    assert ended == "MemoryInDoubtError"
    assert seconds <= TIMES["revoke_timeout"] + SECONDS
    rebuild = await far.rebuild(0)
    assert set(kept) <= set(await far.kept(0, "gather"))
    assert isinstance(await raised(transfer), KvxferError)
    await far.go()
    in_time(how, rebuild, await far.rebuilt(0))
    await far.doubt_ended()
    move.check()  # it was not posted any more
    await settled(near)
    async with asyncio.timeout(30):
        while not idle(await far.quiet()):  # noqa: ASYNC110 - nobody sets an event for it
            await asyncio.sleep(0.005)
    await bring(far, issuer, move, "after")
    assert await far.intact()


@held_on_gpus
async def test_closing_does_not_wait_for_a_scatter(far, near, there, here, how, caplog):
    _, _, transfer, _ = await scatters(far, near, there, here, how)
    worker, began = near.workers[0], time.monotonic()
    await worker.aclose(drain=False)
    took = time.monotonic() - began
    near.go()
    assert took <= worker.config.bounds()["close"] + SECONDS
    doubt = await raised(transfer)
    assert isinstance(doubt, MemoryInDoubtError), doubt
    assert "memory_leaked" in caplog.text
    with pytest.raises(ClosedError):
        await doubt.settled()
