"""Two hosts, and the cable between them."""

import contextlib

import pytest
from cable import why_not
from hosts import Hosts


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
