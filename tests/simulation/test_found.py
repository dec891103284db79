"""Scenes that schedules have found: each went wrong once."""

import asyncio

import pytest
from inside import being_read
from scenes import Gate, Scene, play

from kvxfer import MemoryInDoubtError, TransferTimeoutError

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


@pytest.mark.parametrize(("scene", "settings"), FOUND, ids=[scene.__name__ for scene, _ in FOUND])
def test_it_goes_well_now(scene, settings, tmp_path):
    for seed in range(3):
        play(scene, tmp_path, seed=seed, **settings)
