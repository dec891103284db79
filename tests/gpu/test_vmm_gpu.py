"""GPU memory of CUDA's virtual memory management on `mapped`: many pieces, side by side in another process."""

import contextlib
import ctypes
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
sys.path.append(str(Path(__file__).parent.parent / "integration"))
sys.path.append(str(Path(__file__).parent))

import test_mapped_gpu as mapped_gpu  # noqa: E402  # pyright: ignore[reportMissingImports]
from far import CANARY as GUARDED  # noqa: E402  # pyright: ignore[reportMissingImports]
from far import Far, Ranks  # noqa: E402  # pyright: ignore[reportMissingImports]
from inside import told  # noqa: E402  # pyright: ignore[reportMissingImports]
from scene import IDS, SIZES, Move, sources, tickets  # noqa: E402  # pyright: ignore[reportMissingImports]
from stage import Cache  # noqa: E402  # pyright: ignore[reportMissingImports]
from test_workers_gpu import needs_nixl  # noqa: E402  # pyright: ignore[reportMissingImports]

from kvxfer.copy.port import Gate  # noqa: E402
from kvxfer.errors import FabricError, KvxferError, MemoryInDoubtError  # noqa: E402
from kvxfer.mapped.host import (  # noqa: E402
    OpenFiles,
    joined,
    open_window,
)
from kvxfer.memory.device import call, lay_out, load  # noqa: E402

pytestmark = mapped_gpu.pytestmark  # two GPUs

NONE, FILE, FABRIC = 0, 1, 8
PIECE = 20 * mapped_gpu.MIB
BEFORE = 3 * mapped_gpu.MIB
"""Bytes of the first piece before the tensor."""
EXPANDABLE = "expandable_segments:True"


class ByHand:
    """Pieces of one GPU's memory from cuMemCreate, side by side."""

    def __init__(self, device, nbytes, kinds):
        torch.zeros(1, device=f"cuda:{device}")
        torch.cuda.set_device(device)
        self.driver = load("driver", "this test")
        properties = self.driver.CUmemAllocationProp()
        properties.type = self.driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self.driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        ctypes.c_int.from_address(properties.getPtr() + 4).value = kinds  # the setter takes one kind only
        pieces = [(call(self.driver, "cuMemCreate", PIECE, properties, 0), PIECE) for _ in range(-(-nbytes // PIECE))]
        self.address, self.free = lay_out(self.driver, pieces, device)
        for handle, _ in pieces:
            call(self.driver, "cuMemRelease", handle)
        self.device, self.length = device, len(pieces) * PIECE

    @property
    def memory(self):
        """All of it, as bytes."""
        interface = {"shape": (self.length,), "typestr": "|u1", "data": (self.address, False), "version": 3}
        return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=f"cuda:{self.device}")


def by_hand(device, nbytes, kinds=FILE):
    try:
        return ByHand(device, nbytes, kinds)
    except FabricError as error:
        if kinds & FABRIC:
            pytest.skip(f"this system makes no memory with fabric handles: {error}")
        raise


def pattern(device):
    """Bytes of which no two rows are alike."""
    words = torch.arange(mapped_gpu.SIZE // 8, dtype=torch.int64, device=f"cuda:{device}") * 0x1E3779B97F4A7C15
    torch.cuda.synchronize(device)
    return words.view(torch.uint8)


def serve(make, device, answer):
    """Export what lies within the memory that `make` makes, and say what becomes of it."""
    whole = make()
    whole.fill_(mapped_gpu.CANARY)
    memory = whole[BEFORE : BEFORE + mapped_gpu.SIZE]
    torch.cuda.synchronize(device)
    words, files = mapped_gpu.gate_words(device), OpenFiles()
    exports = mapped_gpu.exported(device, memory, words, files=files)
    answer.send((exports, memory.data_ptr(), words.address))
    while (what := answer.recv()) != "end":
        if what == "check":
            torch.cuda.synchronize(device)
            around = bool((whole[:BEFORE] == mapped_gpu.CANARY).all()) and bool(
                (whole[BEFORE + mapped_gpu.SIZE :] == mapped_gpu.CANARY).all()
            )
            answer.send((around, torch.equal(memory, mapped_gpu.flipped(pattern(device)))))
        elif what == "close":
            files.close()
            answer.send("closed")
        elif what == "free":
            whole = memory = whole.new_empty(0)
            torch.cuda.empty_cache()
            answer.send(torch.cuda.memory_reserved(device))
    words.close()


def hand_made(device, kinds, answer):
    pieces = ByHand(device, BEFORE + mapped_gpu.SIZE + mapped_gpu.MIB, kinds)
    serve(lambda: pieces.memory, device, answer)


def expandable(device, answer):
    serve(
        lambda: torch.empty(BEFORE + mapped_gpu.SIZE + mapped_gpu.MIB, dtype=torch.uint8, device=f"cuda:{device}"),
        device,
        answer,
    )


@pytest.fixture
def segments(monkeypatch):
    """Processes that are started have expandable segments."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE)


@contextlib.contextmanager
def windows_onto(exports, device=0):
    opened = mapped_gpu.opened(exports, device)
    try:
        yield opened
    finally:
        for window in opened:
            window.close()


def kinds_of(exports):
    """Of the handles of all pieces."""
    found = set()
    for given in exports:
        at = 0
        while given.kind == "cuda_vmm" and at < len(given.handle):
            (kind,) = struct.unpack_from("<I", given.handle, at + 4)
            found.add(kind)
            at += 16 + {FILE: 4, FABRIC: 64}[kind]
    return found


def write_and_check(pipe, made, windows, memory, words):
    """Write all of it through the gate, and have its owner compare every byte."""
    gate = Gate(mapped_gpu.located(windows, words), mapped_gpu.GENERATION)
    source = pattern(0)
    assert not made.run(mapped_gpu.plan(source.data_ptr(), mapped_gpu.located(windows, memory)), gate).stopped
    pipe.send("check")
    assert pipe.recv() == (True, True)


# ---- pieces of another process

PLACES = pytest.mark.parametrize("device", [0, 1], ids=["the same gpu", "the other gpu"])


@pytest.mark.parametrize("kinds", [FILE, FABRIC, FILE | FABRIC], ids=["file", "fabric", "both"])
@PLACES
def test_memory_that_was_made_by_hand_is_written_across_its_pieces(device, kinds):
    by_hand(device, PIECE, kinds).free()  # skips where there is none
    with mapped_gpu.process(hand_made, device, kinds) as (_, pipe), mapped_gpu.copies(0) as made:
        exports, memory, words = pipe.recv()
        with windows_onto(exports) as windows:
            assert len(windows) == 2  # all pieces are one window, the gates the other
            write_and_check(pipe, made, windows, memory, words)
            pipe.send("close")
            assert pipe.recv() == "closed"
            write_and_check(pipe, made, windows, memory, words)  # what is mapped needs no file any more
        pipe.send("end")


@PLACES
def test_expandable_segments_are_written_across_their_pieces(segments, device):
    with mapped_gpu.process(expandable, device) as (_, pipe), mapped_gpu.copies(0) as made:
        exports, memory, words = pipe.recv()
        assert {given.kind for given in exports} == {"cuda_vmm", "cuda_ipc"}
        assert sum(given.length for given in exports if given.kind == "cuda_vmm") >= mapped_gpu.SIZE
        with windows_onto(exports) as windows:
            assert len(windows) == 2
            write_and_check(pipe, made, windows, memory, words)
        pipe.send("end")


def test_a_fabric_handle_that_cuda_refuses_makes_way_for_an_open_file():
    pieces, files = by_hand(0, 2 * PIECE), OpenFiles()
    exports = mapped_gpu.exported(0, pieces.memory, files=files)
    assert kinds_of(exports) == {FILE}
    assert len(files._held) == 2
    assert not any(os.get_inheritable(number) for number in files._held)
    files.close()
    pieces.free()


def test_memory_that_was_made_without_a_handle_is_refused_by_name():
    pieces = by_hand(0, PIECE, NONE)
    with pytest.raises(FabricError, match=r"as a fabric handle.*as an open file.*cudaMalloc"):
        mapped_gpu.exported(0, pieces.memory)
    pieces.free()


def without_handles(answer):
    memory = torch.zeros(64 * mapped_gpu.MIB, dtype=torch.uint8, device="cuda:0")
    try:
        mapped_gpu.exported(0, memory)
    except FabricError as error:
        answer.send(str(error))
    else:
        answer.send("exported")


def test_expandable_segments_that_were_told_not_to_have_handles_are_refused_by_name(segments, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC", "0")
    with mapped_gpu.process(without_handles) as (_, pipe):
        assert "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC" in pipe.recv()


def test_within_one_process_another_gpu_is_admitted():
    pieces, files = by_hand(1, BEFORE + mapped_gpu.SIZE), OpenFiles()
    whole = pieces.memory
    whole.fill_(mapped_gpu.CANARY)
    torch.cuda.synchronize(1)
    (given,) = joined(mapped_gpu.exported(1, whole, files=files))
    window = open_window(given, "cuda", 0, own=True)
    source = pattern(0)
    with mapped_gpu.copies(0) as made:
        made.run(mapped_gpu.plan(source.data_ptr(), window.local + BEFORE))
    assert torch.equal(whole[BEFORE : BEFORE + mapped_gpu.SIZE], mapped_gpu.flipped(pattern(1)))
    assert bool((whole[:BEFORE] == mapped_gpu.CANARY).all())
    window.close()
    files.close()
    pieces.free()


# ---- what becomes of it when its owner is gone, or gives it back


@PLACES
def test_what_its_owner_has_freed_is_kept_by_who_has_mapped_it(segments, device):
    kept = torch.zeros(mapped_gpu.SIZE, dtype=torch.uint8, device="cuda:0")
    source = pattern(0)
    with mapped_gpu.process(expandable, device) as (_, pipe), mapped_gpu.copies(0) as made:
        exports, memory, _ = pipe.recv()
        with windows_onto(exports) as windows:
            local = mapped_gpu.located(windows, memory)
            pipe.send("free")
            print(f"\n{pipe.recv()} bytes are still reserved by torch over there")
            made.run(mapped_gpu.plan(source.data_ptr(), local))
            made.run(mapped_gpu.plan(local, kept.data_ptr()))
        pipe.send("end")
    assert torch.equal(kept, source)  # turned round twice


def test_the_owner_dies_under_a_kernel_that_writes_its_memory(segments):
    kept = torch.zeros(mapped_gpu.SIZE, dtype=torch.uint8, device="cuda:0")
    source = pattern(0)
    with mapped_gpu.copies(0) as made, mapped_gpu.process(expandable, 1) as (child, pipe):
        exports, memory, _ = pipe.recv()
        with windows_onto([given for given in exports if given.kind == "cuda_vmm"]) as windows:
            local = mapped_gpu.located(windows, memory)
            what = mapped_gpu.plan(source.data_ptr(), local)
            made.run(what)
            under_way = [made.begin(what) for _ in range(200)]
            assert under_way[5][0].wait(20)
            child.kill()
            while child.is_alive():  # it dies while they run, however long that takes
                under_way.append(made.begin(what))
                under_way[-100][0].wait(20)
            under_way += [made.begin(what) for _ in range(50)]
            for ended, outcomes in under_way:
                assert ended.wait(60)
                assert outcomes[0].error is None
            made.run(mapped_gpu.plan(local, kept.data_ptr()))
            assert torch.equal(kept, source)  # it is still there, and still what was written


def test_nothing_lands_after_the_writer_has_died_under_its_kernel():
    pieces, files = by_hand(0, BEFORE + mapped_gpu.SIZE), OpenFiles()
    mapped_gpu.nothing_lands_after_the_death_of(
        mapped_gpu.writer, pieces.memory[BEFORE : BEFORE + mapped_gpu.SIZE], files=files
    )
    files.close()
    pieces.free()


# ---- whole workers

BLOCKS = 400
INTO = [9, 390, 4, 202, 121, 277]
"""Destination blocks of 32 tokens: 128 KiB each in K and in V, so they lie in many pieces."""
TOKENS = range(5, 12 * 16 - 3)


def large():
    """A rank whose every layer is 50 MiB."""
    return [Cache(blocks=BLOCKS, block_tokens=32, layers=range(3), heads=range(8), dim=64, layout="HND")]


class OnPieces(Ranks):
    """Ranks whose caches lie in memory that was made by hand."""

    def __init__(self, kinds):
        super().__init__()
        self.kinds = kinds
        self.pieces = []

    def placed(self, cache, device):
        index = torch.device(device).index
        placed = super().placed(cache, "cpu")
        for layer, memory in placed.memory.items():
            pieces = by_hand(index, memory.nbytes + 2 * mapped_gpu.MIB, self.kinds)
            self.pieces.append(pieces)
            bytes_of = pieces.memory[mapped_gpu.MIB : mapped_gpu.MIB + memory.nbytes]
            pieces.memory.fill_(GUARDED)
            placed.memory[layer] = bytes_of.view(memory.dtype).view(memory.shape)
            placed.memory[layer].copy_(memory)
            placed.guards += [pieces.memory[: mapped_gpu.MIB], pieces.memory[mapped_gpu.MIB + memory.nbytes :]]
        torch.cuda.synchronize(index)
        return placed

    async def close(self):
        await super().close()
        for pieces in self.pieces:
            pieces.free()


EXPANDED = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == EXPANDABLE
"""Whether what torch allocates in this process lies in expandable segments: it reads that once, as it begins."""
expanded = pytest.mark.skipif(not EXPANDED, reason="runs in a process of its own, with expandable segments")


@pytest.mark.skipif(EXPANDED, reason="is in that process")
@pytest.mark.parametrize("which", ["on_both_sides", "is_killed"])
def test_in_a_process_with_expandable_segments(which):
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-k", f"{which} and expandable_segments"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"], env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout


def told_of(worker):
    """The kinds of memory that a worker's peers are told of, and the bytes of each."""
    found = {}
    for memory in told(worker).mapped:
        found[memory.kind] = found.get(memory.kind, 0) + memory.length
    return found


@pytest.fixture
async def far(segments):
    far = Far()
    yield far
    far.end()


async def bring(far, issuer, move, request):
    await far.offer(0, request, IDS, tokens=len(IDS) * 16)
    (transfer,) = move.fetch(issuer.ticket(request), timeout=60)
    result = await transfer
    move.bring().check()
    return result


async def met(far, near, **config):
    """A prefill engine there, with expandable segments, and a decode engine here."""
    theirs, ours = sources([range(8)]), large()
    issuer = tickets(await far.open("prefill", theirs, device="cuda:0", **{**SIZES, **config}))
    await near.open("decode", ours, device="cuda:1", **{**SIZES, **config})
    return issuer, Move(theirs, near, ours, INTO, TOKENS)


@needs_nixl
@expanded
@pytest.mark.parametrize("route", ["auto", "mapped"])
async def test_every_byte_in_expandable_segments_on_both_sides(far, route):
    near = Ranks()
    try:
        issuer, move = await met(far, near, route=route)
        told = told_of(near.workers[0])
        assert told["cuda_vmm"] >= sum(memory.nbytes for memory in near.caches[0].memory.values())
        for request in "rs":
            result = await bring(far, issuer, move, request)
            assert (result.stats.route, await far.intact()) == ("mapped", True)
    finally:
        await near.close()


@needs_nixl
@expanded
async def test_a_prefill_process_is_killed_in_the_midst_of_a_fetch_into_expandable_segments(far):
    near = Ranks()
    times = {"peer_timeout": 0.5, "revoke_timeout": 1.0, "connect_timeout": 1.0}
    try:
        issuer, move = await met(far, near, route="mapped", **times)
        await bring(far, issuer, move, "warm")
        await far.offer(0, "r", IDS, tokens=len(IDS) * 16, streaming=True)
        await far.ready(0, "r", layers=[0])
        (transfer,) = move.fetch(issuer.ticket("r"), timeout=60)
        await transfer.layers(0, 1)
        far.kill()
        with pytest.raises(KvxferError) as caught:
            await transfer
        assert not isinstance(caught.value, MemoryInDoubtError)
        move.check()  # the same bytes as before, and nothing around them
    finally:
        await near.close()


@needs_nixl
@pytest.mark.parametrize(("kinds", "routes"), [(FILE, {"mapped"}), (NONE, {"staged", "direct"})], ids=["file", "none"])
async def test_memory_made_by_hand_is_mapped_or_another_route_is_taken_and_that_is_said(far, caplog, kinds, routes):
    near = OnPieces(kinds)
    try:
        issuer, move = await met(far, near, route="auto")
        result = await bring(far, issuer, move, "r")
        assert result.stats.route in routes
        assert ("cache_not_exported" in caplog.text) is (kinds == NONE)
        assert ("as an open file" in caplog.text) is (kinds == NONE)
    finally:
        await near.close()
