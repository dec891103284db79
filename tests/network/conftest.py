"""Puts this folder and the folder whose helpers these tests use on the path, and connects two hosts for them."""

import contextlib
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "integration"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

from cable import why_not  # noqa: E402 - found by the lines above
from hosts import Hosts  # noqa: E402


class Machines:
    """Two hosts that scenes use one after the other; new ones after a scene that left them in disorder."""

    def __init__(self):
        self._hosts = None

    async def ready(self):
        if self._hosts is None:
            self._hosts = Hosts()
            await self._hosts.plug()
        return self._hosts

    def end(self):
        hosts, self._hosts = self._hosts, None
        if hosts is not None:
            hosts.end()


@pytest.fixture(scope="module")
def machines():
    if reason := why_not():
        pytest.skip(reason)
    machines = Machines()
    yield machines
    machines.end()


@pytest.fixture
async def hosts(machines):
    """Both hosts, connected, without a worker."""
    with contextlib.ExitStack() as disorder:
        disorder.callback(machines.end)
        hosts = await machines.ready()
        yield hosts
        await hosts.rest()
        disorder.pop_all()
