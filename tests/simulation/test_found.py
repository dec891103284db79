"""Scenes that schedules have found: each went wrong once."""

import asyncio

import inside
import pytest
from guards import RING
from inside import being_read
from scenes import CHUNKS, IDS, TOKENS, Gate, Scene, a_silent_peer_is_heard_late, play

from kvxfer import READY, MemoryInDoubtError, TransferTimeoutError
from kvxfer.errors import ClosedError

FOUND = []


def found(**settings):
    """A scene, and the settings with which it went wrong."""

    def note(scene):
        FOUND.append((scene, settings))
        return scene

    return note


@found(route="pull")
async def a_puller_that_gave_up_still_says_that_it_reads_nothing(scene: Scene):
    """Its Cancel is lost with the session, after its fetch has ended with nothing in doubt."""
    offer = scene.offer()
    transfer = scene.fetch(after=Gate(), timeout=0.02)
    await scene.until(lambda: being_read(scene.a.worker))
    scene.streams.silence(scene.a.worker)
    assert isinstance(await scene.failure(transfer), TransferTimeoutError)
    assert transfer.memory_safe
    ending = await scene.ending(offer)
    scene.streams.heal()
    if isinstance(ending, MemoryInDoubtError):  # else there was other evidence
        await asyncio.wait_for(ending.settled(), 1.0)


@found(route="pull")
async def a_puller_that_never_heard_of_its_chunks_says_that_it_reads_nothing(scene: Scene):
    """The session is lost with the first answer on its way; the peer may take that for a read."""
    warm_up = scene.fetch("warm-up", [11, 12], timeout=0.01)
    await scene.failure(warm_up)
    offer = scene.offer()
    scene.streams.silence(scene.b.worker)
    transfer = scene.fetch(timeout=0.01)
    await scene.until(lambda: being_read(scene.a.worker))
    scene.cut()
    assert isinstance(await scene.failure(transfer), TransferTimeoutError)
    ending = await scene.ending(offer)
    scene.streams.heal()
    if isinstance(ending, MemoryInDoubtError):  # else there was other evidence
        await asyncio.wait_for(ending.settled(), 1.0)


@found(route="staged")
async def memory_is_given_back_though_the_offer_is_not_finished(scene: Scene):
    """All has arrived and is where it belongs, and the last result comes much later: others want that memory."""
    scene.a.books.take(IDS)
    scene.a.books.offered(IDS)
    offer = scene.a.worker.offer("r", streaming=True)
    transfer = scene.fetch()
    offer.extend(IDS, tokens=TOKENS)
    offer.ready(after=READY)
    await scene.until(lambda: scene.network.log)
    await asyncio.sleep(0.05)
    assert not transfer.done
    assert not scene.b.worker.describe()["arena"]["receive"].extents
    offer.finish(b"")
    await transfer


@found(route="staged")
async def a_fetch_ends_though_its_copies_are_refused(scene: Scene):
    """What was granted with the question has arrived before it is known how to copy it, and nothing is copied then."""

    def refuse(*_, **__):
        raise ClosedError("no more copies are taken")

    inside.mover(scene.b.worker).flow = refuse
    await scene.failure(scene.fetch("warm-up", [11, 12], timeout=0.01))
    scene.offer()
    scene.streams.silence(scene.b.worker)
    transfer = scene.fetch()
    await scene.until(lambda: scene.network.log)
    await asyncio.sleep(0.01)
    scene.streams.heal()
    assert not isinstance(await asyncio.wait_for(scene.failure(transfer), 1.0), MemoryInDoubtError)
    assert transfer.memory_safe
    await scene.until(lambda: not scene.b.worker.describe()["arena"]["receive"].extents)


found(**RING)(a_silent_peer_is_heard_late)


async def two_of_four_have_arrived(scene: Scene):
    """All were granted; two wait until the caller's blocks may be written, and the others are in flight."""
    scene.keep_agents()
    scene.network.hold("*")
    scene.offer()
    transfer = scene.fetch(after=Gate())
    await scene.until(lambda: scene.network.held("*") == CHUNKS)
    scene.network.release("*", CHUNKS // 2)
    await asyncio.sleep(0.06)  # our loop has heard of it too
    return transfer


@found(**RING)
@found(**RING, locks=False, apart=True)
async def places_are_in_doubt_and_its_stream_is_lost_again(scene: Scene):
    """Before the peer has answered: what it may write is kept, however often that is looked at."""
    transfer = await two_of_four_have_arrived(scene)
    scene.cut()
    await scene.failure(transfer)
    await scene.until(lambda: inside.sessions(scene.b.worker))
    await asyncio.sleep(0.01)
    scene.cut()
    await asyncio.sleep(0.001)
    await scene.land()


@found(**RING)
@found(**RING, locks=False, apart=True)
async def its_stream_is_lost_after_it_was_cancelled(scene: Scene):
    """The peer's answer is outstanding then."""
    transfer = await two_of_four_have_arrived(scene)
    transfer.cancel()
    await asyncio.sleep(0.01)
    scene.cut()
    await asyncio.sleep(0.3)
    await scene.land()
    await scene.failure(transfer)


@pytest.mark.parametrize(("scene", "settings"), FOUND, ids=[scene.__name__ for scene, _ in FOUND])
def test_it_goes_well_now(scene, settings, tmp_path):
    for seed in range(3):
        play(scene, tmp_path, seed=seed, **settings)
