"""Puts this folder on the path, so that its tests can import their helper `stage`, and opens the stage for them."""

import contextlib
import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.append(HERE)

from stage import Stage  # noqa: E402 - found by the line above

from kvxfer.fabric.loopback import LoopbackNetwork  # noqa: E402


@pytest.fixture
def network():
    return LoopbackNetwork()


@pytest.fixture
async def stage(network):
    async with contextlib.AsyncExitStack() as stack:
        yield Stage(network, stack)
        network.release("*")
