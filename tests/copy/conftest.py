"""Puts this folder on the path, so that its tests, and those in tests/gpu, can import what stands beside them.

Those of requests also use the worlds and the oracle of tests/geometry, and read tables as tests/integration does.
"""

import sys
from pathlib import Path

import pytest

from kvxfer.safety.fence import LockFile, PeerGate

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "geometry", HERE.parent / "integration"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


@pytest.fixture
def gate():
    """The owner's side of gates, and a writer's."""
    file = LockFile(8)
    key = PeerGate(file.handle)
    yield file, key
    key.close()
    assert key._pages.closed
    file.close()


@pytest.fixture
async def world():
    from stepped import World

    world = World()
    yield world
    await world.close()
