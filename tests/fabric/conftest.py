"""Movers and fabrics over the loopback: stepped by hand, and in threads."""

import pytest

from kvxfer.fabric.loopback import LoopbackNetwork, LoopbackTransport


@pytest.fixture
async def make():
    """Rigs that are ended with the test: `await make("b", "c", no_progress_timeout=5.0)`."""
    from rigs import Rig

    made = []

    async def one(*peers, **settings):
        made.append(Rig(*peers, **settings))
        await made[-1].open()
        return made[-1]

    yield one
    for rig in made:
        await rig.end()


@pytest.fixture
async def rig(make):
    """One with agent "b" as its peer."""
    return await make()


@pytest.fixture
def way(rig):
    """Into the memory of its peer."""
    return rig.way()


@pytest.fixture
def network():
    return LoopbackNetwork()


@pytest.fixture
async def threaded(network):
    """Two sides in threads of their own: the first has met the second, whose name is "b"."""
    from ends import Side
    from rigs import SIZE

    sides = [await Side(name, SIZE, over=LoopbackTransport(name, network)).open() for name in "ab"]
    await sides[0].now(sides[0].fabric.connect(sides[1].metadata))
    yield sides
    for side in sides:
        await side.close(10)
