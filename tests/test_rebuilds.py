"""The books of a new agent: whom it helps, and what waits for it."""

import asyncio
from functools import partial

import pytest

from kvxfer.site import Rebuilds


@pytest.fixture
async def rebuilds():
    loop = asyncio.get_running_loop()
    return Rebuilds(loop.time, loop)


async def test_what_is_wanted_while_it_is_made_is_not_over_with_it(rebuilds):
    """Its post may have been made by the new one."""
    rebuilds.request(urgent=True)
    rebuilds.begin()
    rebuilds.request(urgent=False)
    rebuilds.end(done=True)
    assert (rebuilds.count, [one.urgent for one in rebuilds.requests]) == (1, [False])
    rebuilds.begin()
    rebuilds.end(done=False)
    assert (rebuilds.count, len(rebuilds.requests)) == (1, 1)
    rebuilds.begin()
    rebuilds.end(done=True)
    assert (rebuilds.count, rebuilds.requests) == (2, {})


@pytest.mark.parametrize("done", [True, False])
async def test_what_waits_while_it_is_made_goes_on_once(rebuilds, done):
    said, coming = [], rebuilds.next
    rebuilds.when_done(partial(said.append, "at once"))
    rebuilds.begin()
    rebuilds.when_done(partial(said.append, "later"))
    assert said == ["at once"]
    rebuilds.end(done=done)
    rebuilds.begin()
    rebuilds.end(done=done)
    assert said == ["at once", "later"]
    assert (coming.done(), rebuilds.next.done()) == (done, False)
