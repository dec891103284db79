"""Which memory the arena gets when some of it is refused, by CUDA or by the transport. CUDA is a stand-in."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from kvxfer import worker as module
from kvxfer.config import Config
from kvxfer.copy.mover import Mover
from kvxfer.errors import ArenaError, ConfigError, FabricError, MissingExtraError
from kvxfer.fabric.calls import Fabric
from kvxfer.memory.device import Backing
from kvxfer.runtime import ThreadRuntime
from kvxfer.telemetry import Metrics
from kvxfer.testing import LoopbackNetwork, LoopbackTransport
from kvxfer.worker import Staging

BYTES = 1 << 16


class Choosy(LoopbackTransport):
    """Refuses memory of some kinds, from the nth registration on."""

    def __init__(self, refused, accepted=0):
        super().__init__("choosy", LoopbackNetwork())
        self.refused, self.accepted = refused, accepted
        self.registered: dict[object, Any] = {}

    def register(self, memories):
        if memories[0].kind in self.refused:
            if not self.accepted:
                raise FabricError(f"{memories[0].kind} cannot be registered")
            self.accepted -= 1
        token = super().register([replace(memory, kind="DRAM", device=0) for memory in memories])  # all that it takes
        self.registered[token] = memories
        return token

    def deregister(self, token):
        super().deregister(token)
        del self.registered[token]


class World:
    """Memory that is handed out as addresses, some of it refused, and a transport that may refuse it too."""

    def __init__(self, monkeypatch):
        self.refused: dict[str, Exception] = {}
        self.asked: list[str] = []
        self.held: list[Backing] = []
        self.staging, self.metrics = Staging(), Metrics()
        self.transport = Choosy(())
        monkeypatch.setattr(module, "allocate", self._allocate)

    def _allocate(self, kind, nbytes, _):
        self.asked.append(kind)
        if kind in self.refused:
            raise self.refused[kind]
        backing = Backing(kind, address=1 << 30, length=nbytes, free=self._free)
        self.held.append(backing)
        return backing

    def _free(self):
        self.held.pop()

    async def open(self, kind="auto", device="cuda", nbytes=BYTES):
        geometry: Any = SimpleNamespace(kind=device, device=3 if device == "cuda" else 0)
        config = Config(arena_kind=kind, arena_bytes=nbytes, chunk_bytes=4096)
        runtime = ThreadRuntime()
        mover = Mover(runtime)
        fabric = Fabric(self.transport, runtime, mover)
        await fabric.open()
        try:
            await self.staging.open(config, geometry, fabric, self.metrics, place=lambda work: work())
            self.kept = dict(self.transport.registered)
        finally:
            assert await mover.close(5)
            assert await fabric.close()

    @property
    def spans(self):
        return [(span.kind, span.device) for span in (self.staging.sending, self.staging.receiving) if span]


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


@pytest.mark.parametrize(("kind", "device", "found", "span"), [
    ("auto", "cuda", "cuda", ("VRAM", 3)), ("cuda", "cuda", "cuda", ("VRAM", 3)),
    ("fabric", "cuda", "fabric", ("VRAM", 3)), ("pinned", "cuda", "pinned", ("DRAM", 0)),
    ("auto", "cpu", "cpu", ("DRAM", 0)), ("cpu", "cpu", "cpu", ("DRAM", 0)), ("pinned", "cpu", "pinned", ("DRAM", 0)),
])  # fmt: skip
async def test_what_is_refused_by_nobody(world, kind, device, found, span):
    await world.open(kind, device)
    assert (world.asked, world.staging.kind, world.staging.refused) == ([found], found, {})
    assert world.spans == [span, span]
    sending, receiving = world.staging.sending, world.staging.receiving
    assert receiving.address == sending.address + sending.length
    assert [[(m.address, m.length) for m in memories] for memories in world.kept.values()] == [
        [(sending.address, sending.length)],
        [(receiving.address, receiving.length)],
    ]
    assert [held.token for held in world.staging.reachable] == list(world.kept)[1:], (
        "peers are told of the receiving share alone"
    )
    assert world.metrics.snapshot()["memory_refused"] == {}
    world.staging.close()
    assert world.held == []


@pytest.mark.parametrize("error", [ArenaError("cudaMalloc failed"), FabricError("cudaMalloc failed")])
async def test_what_cuda_refuses_is_replaced_by_pinned_memory(world, caplog, error):
    caplog.set_level(logging.WARNING, "kvxfer.worker")
    world.refused["cuda"] = error
    await world.open()
    assert (world.asked, world.staging.kind) == (["cuda", "pinned"], "pinned")
    assert world.staging.refused == {"cuda": "cudaMalloc failed"}
    assert world.spans == [("DRAM", 0)] * 2
    assert world.metrics.snapshot()["memory_refused"] == {"cuda": 1}
    assert "arena_fell_back kind=cuda value=pinned reason='cudaMalloc failed'" in caplog.text


@pytest.mark.parametrize("accepted", [0, 1], ids=["both shares", "the second share"])
async def test_what_the_transport_refuses_is_replaced_and_given_back(world, accepted):
    world.transport = Choosy({"VRAM"}, accepted)
    await world.open()
    assert (world.asked, world.staging.kind) == (["cuda", "pinned"], "pinned")
    assert world.staging.refused == {"cuda": "VRAM cannot be registered"}
    assert [backing.kind for backing in world.held] == ["pinned"]
    assert [memory.kind for memories in world.kept.values() for memory in memories] == ["DRAM", "DRAM"]
    assert world.metrics.snapshot()["memory_refused"] == {"cuda": 1}


async def test_when_all_is_refused_every_reason_is_given(world):
    world.transport = Choosy({"VRAM"})
    world.refused["pinned"] = ArenaError("cudaHostAlloc failed")
    with pytest.raises(ArenaError) as caught:
        await world.open()
    assert str(caught.value) == (
        "an arena of kind 'cuda' was refused: VRAM cannot be registered; "
        "an arena of kind 'pinned' was refused: cudaHostAlloc failed"
    )
    assert (world.held, world.staging.kind) == ([], None)


@pytest.mark.parametrize("kind", ["cuda", "fabric", "pinned"])
@pytest.mark.parametrize("by", ["cuda", "transport"])
async def test_a_kind_that_was_asked_for_is_not_replaced(world, kind, by):
    if by == "cuda":
        world.refused[kind] = FabricError("no")
    else:
        world.transport = Choosy({"VRAM", "DRAM"})
    with pytest.raises(FabricError, match=f"an arena of kind '{kind}' was refused: "):
        await world.open(kind)
    assert (world.asked, world.held) == ([kind], [])
    assert world.metrics.snapshot()["memory_refused"] == {}


async def test_a_missing_package_is_no_refusal(world):
    world.refused["cuda"] = MissingExtraError("pip install cuda-bindings")
    with pytest.raises(MissingExtraError):
        await world.open()
    assert world.asked == ["cuda"]


@pytest.mark.parametrize(
    ("kind", "device", "words"),
    [
        ("cpu", "cuda", r"is on a GPU, .* one of \['cuda', 'fabric', 'pinned'\]"),
        ("cuda", "cpu", r"is on a CPU, .* one of \['cpu', 'pinned'\]"),
        ("fabric", "cpu", "is on a CPU"),
    ],
)
async def test_memory_that_copies_cannot_reach_is_refused_before_it_is_made(world, kind, device, words):
    with pytest.raises(ConfigError, match=f"arena_kind is '{kind}' and the cache {words}"):
        await world.open(kind, device)
    assert world.asked == []


@pytest.mark.parametrize("kind", ["auto", "cpu", "cuda"])
async def test_without_an_arena_nothing_is_made(world, kind):
    await world.open(kind, nbytes=0)
    assert (world.asked, world.kept, world.staging.kind, world.spans) == ([], {}, None, [])
    assert [share.capacity for share in world.staging.shares] == [0, 0]
    world.staging.close()
    world.staging.leak()


async def test_what_is_leaked_is_not_freed(world):
    await world.open()
    world.staging.leak()
    assert [backing.closed for backing in world.held] == [True], "closed, and not freed"
    world.staging.close()
    assert len(world.held) == 1
