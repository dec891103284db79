"""Memory that the transport refuses: what can go another way does, what was asked for by name fails."""

import subprocess
import sys

import pytest
from stage import Cache, quiet

from kvxfer import FabricError, MismatchError
from kvxfer.testing import LoopbackTransport


class Choosy(LoopbackTransport):
    """Takes so many registrations (an arena is two), and refuses what follows."""

    def __init__(self, name, network, accepted):
        super().__init__(name, network)
        self.accepted = accepted

    def register(self, memories):
        if self.accepted == 0:
            raise FabricError("these pages cannot be registered")
        self.accepted -= 1
        return super().register(memories)


async def worker(stage, name, accepted=2, **config):
    return await stage.worker(name, Cache(), transport=Choosy(name, stage.network, accepted), **config)


@pytest.mark.parametrize("refused", ["prefill", "decode"])
async def test_blocks_that_cannot_be_registered_are_staged(stage, refused):
    workers = []
    for name in ("prefill", "decode"):
        workers.append(await worker(stage, name, 2 if name == refused else 3))
        seen = workers[-1].describe()
        assert seen["in_place"] is (name != refused)
        assert seen["metrics"]["memory_refused"] == ({"blocks": 1} if name == refused else {})
    prefill, decode = workers
    result, _ = await stage.bring(prefill, decode)
    assert result.stats.route == "staged", "of so few pieces they would go directly"
    await quiet(prefill, decode)


@pytest.mark.parametrize(
    ("accepted", "config"), [(2, {"route": "direct"}), (2, {"route": "pull"}), (0, {"arena_bytes": 0})]
)
async def test_a_route_that_was_asked_for_needs_them_and_so_does_a_worker_without_an_arena(stage, accepted, config):
    with pytest.raises(FabricError, match="these pages"):
        await worker(stage, "w", accepted, **config)


async def test_blocks_that_no_route_needs_are_not_registered(stage):
    for route, trust in (("staged", "full"), ("auto", "none")):
        seen = (await worker(stage, route, route=route, trust=trust)).describe()
        assert seen["metrics"]["memory_refused"] == {}
        assert not seen["in_place"]


async def test_a_peer_that_cannot_stage_is_refused_when_the_two_meet(stage):
    prefill, decode = await worker(stage, "prefill"), await worker(stage, "decode", 1, arena_bytes=0)
    with pytest.raises(MismatchError, match="no common route"):
        await stage.bring(prefill, decode)


DROPPED = """
import asyncio, contextlib, gc, sys, weakref

sys.path[:0] = {path!r}
from stage import Cache, Stage
from kvxfer.testing import LoopbackNetwork

owned = []


async def main():
    stage = Stage(LoopbackNetwork(), contextlib.AsyncExitStack())
    caches = Cache(blocks=160, layers=range(4)), Cache(layout="HND", blocks=160, layers=range(4))
    workers = await stage.pair(*caches, route="staged")
    await stage.bring(*workers, "before")
    _, transfer = stage.begin(*workers, "r", range(150), range(150), range(600))
    for _ in range(30):
        await asyncio.sleep(0)
    assert not transfer.done
    owned.extend(weakref.ref(one) for cache in caches for one in cache.memory.values())
    stage.caches.clear()


loop = asyncio.new_event_loop()
loop.run_until_complete(main())
loop.close()
del loop
gc.collect()
assert owned and all(one() is not None for one in owned), "what the mover may write was freed"
"""


def test_memory_of_a_worker_that_is_dropped_in_mid_fetch_is_never_freed():
    code = DROPPED.format(path=sys.path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
