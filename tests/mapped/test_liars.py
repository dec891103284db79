"""A peer that names memory or gates of another process: nothing of that one is opened, and its end is no evidence."""

import asyncio
import os

import pytest
from preloaded import Away

from kvxfer import shared_empty
from kvxfer.errors import FabricError
from kvxfer.geometry import CacheGeometry, CacheTensor
from kvxfer.mapped.host import OpenFiles, export, here
from kvxfer.protocol.framing import encode_body
from kvxfer.protocol.messages import AgentBody, Capability
from kvxfer.protocol.session import Identity, PeerInfo
from kvxfer.runtime import ThreadRuntime
from kvxfer.safety.fence import LockFile, Mappings, PeerGates
from kvxfer.safety.processes import Processes


def cache():
    tensor = shared_empty((4, 4, 2, 8))
    return CacheGeometry.of([CacheTensor(tensor, "block token head dim", kv="k", layers=[0], heads=range(2))]), tensor


class Victim:
    """Another process, with memory to map and gates of its own."""

    def __init__(self):
        (self._geometry, tensor), self._gates = cache(), LockFile(4)
        span = range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        self._tensor, self._exports = tensor, export("cpu", 0, [span], OpenFiles())

    def told(self):
        return self._geometry, self._exports, self._gates.handle


@pytest.fixture(scope="module")
def told():
    """The process that a peer may name, and a peer that is (by the word of the kernel) this process."""
    with Away(Victim) as victim:
        geometry, exports, locks = victim.told()

        def peer(process):
            body = AgentBody("x", b"", [], host=here(), mapped=exports, locks=locks)
            who = Identity("e", b"e" * 16, os.urandom(16), 0, 1, int(Capability.MAPPED), "")
            return PeerInfo(who, encode_body(body), process)

        yield victim.process.pid, peer, geometry


@pytest.mark.parametrize("whose", ["its own", "nobody knows", "another's"])
async def test_only_memory_and_gates_of_its_own_are_opened(told, whose):
    named, peer_of, theirs = told
    peer = peer_of({"its own": named, "nobody knows": 0, "another's": os.getpid()}[whose])
    lies = whose == "another's"
    mappings = Mappings(cache()[0], ThreadRuntime(), lambda windows: windows.close(), b"this")
    await mappings.open(peer, theirs)
    assert bool(mappings.kinds(peer)) is not lies
    keys, processes = PeerGates(), Processes(asyncio.get_running_loop(), gpu=False)
    keys.on_session(peer)
    processes.on_session(peer, lambda: -1)
    assert keys.has(peer) is not lies
    assert (len(processes._processes) == 0) is lies
    if lies:
        assert mappings.reason_unmapped(peer) == f"it names memory of process {named}, but its own is {os.getpid()}"
    mappings.close()
    keys.close()
    processes.close()


async def test_memory_of_a_peer_that_left_while_it_was_opened_is_given_back(told):
    named, peer_of, theirs = told
    peer, retired = peer_of(named), []

    class Meanwhile(ThreadRuntime):
        async def in_thread(self, work):
            found = await super().in_thread(work)
            mappings.forget(peer)
            assert not retired  # nobody holds it yet, and it is on its way
            return found

    mappings = Mappings(cache()[0], Meanwhile(), retired.append, b"this")
    await mappings.open(peer, theirs)
    (windows,) = retired
    windows.close()
    with pytest.raises(FabricError, match="is not mapped"):
        mappings.hold(peer)
    mappings.close()
