"""Opens the stage for tests of whole workers."""

import asyncio
import contextlib
import importlib.util
import os
import zlib

import pytest
from inside import share_no_locks
from stage import Cache, Stage, Tap

from kvxfer import Worker
from kvxfer.blocking import OwnLoopWorker
from kvxfer.fabric.loopback import LoopbackNetwork

ON_BOTH_LOOPS = {
    "test_endings",
    "test_errors",
    "test_loop",
    "test_memory",
    "test_peer_loss",
    "test_reconnect",
    "test_refusals",
    "test_routes",
    "test_shutdown",
    "test_tls",
}
"""Scenes that are played on asyncio's loop and on uvloop's, which shares no code with it: each case on one of the two
that its name draws, so that both play every file; those about the loop itself, and all with `make loops`, on both."""


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(config, item):
    """Loops on which to run a test."""
    factories = {"asyncio": asyncio.new_event_loop}
    if item.path.stem in ON_BOTH_LOOPS and importlib.util.find_spec("uvloop") is not None:
        import uvloop

        factories["uvloop"] = uvloop.new_event_loop
    return factories


def pytest_collection_modifyitems(config, items):
    """Leave each case one of its loops."""
    if os.environ.get("LOOPS") == "all":
        return
    dropped = []
    for item in items:
        loop, _, case = item.name.partition("[")[2].partition("-")
        if item.path.stem in ON_BOTH_LOOPS - {"test_loop"} and (loop := loop.strip("]")) in {"asyncio", "uvloop"}:
            drawn = zlib.crc32(f"{item.originalname} {case}".encode()) % 2
            if loop != ("asyncio", "uvloop")[drawn]:
                dropped.append(item)
    config.hook.pytest_deselected(items=dropped)
    gone = set(dropped)
    items[:] = [item for item in items if item not in gone]


@pytest.fixture
def no_locks(monkeypatch):
    """Workers that share no locks, as those on two hosts: what a peer is doing is known by its word alone."""
    share_no_locks(monkeypatch)


@pytest.fixture(autouse=True)
def looked_at(monkeypatch):
    """Somebody looks at every fetch that a scene begins until it has ended: one that is dropped is warned of."""

    def looking(begin):
        def start_fetch(*args, **options):
            transfer = begin(*args, **options)
            _ = transfer.outcome
            return transfer

        return start_fetch

    for worker in (Worker, OwnLoopWorker):
        monkeypatch.setattr(worker, "start_fetch", looking(worker.start_fetch))


@pytest.fixture
def network():
    return LoopbackNetwork()


@pytest.fixture
async def stage(network):
    async with contextlib.AsyncExitStack() as stack:
        yield Stage(network, stack)
        network.release("*")


@pytest.fixture(params=["staged", "direct", "pull"])
def route(request):
    """Each on which a transport moves the bytes."""
    return request.param


@pytest.fixture
def source():
    return Cache()


@pytest.fixture
def target():
    return Cache()


@pytest.fixture
async def pair(stage, source, target):
    return await stage.pair(source, target)


@pytest.fixture
def tap(monkeypatch):
    return Tap(monkeypatch)
