"""Memory of cuMemMap: what its owner exports, and what another process makes of it. CUDA is a stand-in."""

import ctypes
import os
import resource
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import fake_cuda
import pytest
from fake_cuda import FABRIC, FILE, GRANULE, Pool, Result
from msgspec.structs import replace
from preloaded import Away

from kvxfer import Config, FabricError
from kvxfer.errors import ArenaError
from kvxfer.mapped.host import OpenFiles, Windows, export, joined, open_window
from kvxfer.protocol.messages import MappedMemory
from kvxfer.safety.fence import Exports, Mappings


@pytest.fixture
def cuda():
    driver = fake_cuda.install()
    yield driver
    fake_cuda.remove()


@pytest.fixture
def files():
    kept = OpenFiles()
    yield kept
    kept.close()


def memory(address, size):
    return (ctypes.c_ubyte * size).from_address(address)


def pattern(size):
    return bytes(number * 31 % 251 for number in range(size))


def open_files():
    return {int(entry.name) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}


class Owner:
    """Has a pool in another process, and exports parts of it."""

    def __init__(self, mapped, kinds, spans, device):
        self._pool, self._kept = Pool(fake_cuda.install(), mapped, kinds), OpenFiles()
        parts = [range(self._pool.base + start, self._pool.base + stop) for start, stop in spans]
        self._exports = export("cuda", device, parts, self._kept)

    def told(self):
        return self._exports, self._pool.base, len(self._kept._held)

    def close_files(self):
        self._kept.close()

    def held(self, start, stop):
        """What lies there."""
        return bytes(memory(self._pool.base + start, stop - start))


@pytest.fixture(scope="module")
def three():
    """What another process says of three pieces that adjoin, on GPU 1; it stays."""
    with Away(Owner, "xxx", FILE, [(0, 3 * GRANULE)], 1) as owner:
        yield joined(owner.told()[0])[0]


# ---- what another process maps


@pytest.mark.parametrize("kinds", [FILE, FABRIC, FILE | FABRIC], ids=["file", "fabric", "both"])
def test_a_tensor_across_pieces_is_written_by_another_process(cuda, kinds):
    start, stop = GRANULE + 100, 4 * GRANULE - 7
    with Away(Owner, "xxxxx", kinds, [(start, stop)], 1) as owner:
        exports, base, held = owner.told()
        assert held == (3 if kinds == FILE else 0)
        before = open_files()
        windows = Windows(open_window(given, "cuda", 0) for given in joined(exports))
        assert len(windows._windows) == 1
        local = windows.locate(base + start, stop - start)
        assert cuda.state.admitted == [(local - 100, 3 * GRANULE, 0)]
        wanted = pattern(stop - start)
        memory(local, stop - start)[:] = wanted
        assert owner.held(0, 5 * GRANULE) == bytes(start) + wanted + bytes(GRANULE + 7)
        assert cuda.state.live() == (0, 3, 1)  # the mappings keep it, and nothing else is left
        assert open_files() - before == {cuda_file.descriptor for _, cuda_file in cuda.state.mappings.values()}
        with pytest.raises(FabricError, match="lies in none"):
            windows.locate(base + GRANULE - 1, 1)
        windows.close()
        assert cuda.state.live() == (0, 0, 0)
        assert open_files() == before


def test_pieces_that_do_not_adjoin_are_windows_of_their_own(cuda):
    spans = [(0, 2 * GRANULE), (3 * GRANULE, 4 * GRANULE)]
    with Away(Owner, "xx.x", FILE, spans, 0) as owner:
        exports, base, _ = owner.told()
        windows = [open_window(given, "cuda", 0) for given in joined(reversed(exports))]
        assert [(w.address - base, w.length) for w in windows] == [(0, 2 * GRANULE), (3 * GRANULE, GRANULE)]
        for window in windows:
            window.close()
        assert cuda.state.live() == (0, 0, 0)


def test_handles_stay_within_their_bound_and_are_joined_again(cuda, files):
    pool = Pool(cuda, "x" * 40)
    exports = export("cuda", 0, [range(pool.base, pool.base + pool.size)], files)
    assert [len(given.handle) for given in exports] == [240, 240, 240, 80]
    assert [given.length for given in exports] == [12 * GRANULE] * 3 + [4 * GRANULE]
    (whole,) = joined([exports[2], exports[0], exports[3], exports[1]])
    assert (whole.address, whole.length, len(whole.handle)) == (pool.base, pool.size, 800)
    assert joined([exports[0], replace(exports[1], device="another")]) == [
        exports[0],
        replace(exports[1], device="another"),
    ]
    assert joined([replace(exports[0], kind="cuda_ipc"), replace(exports[1], kind="cuda_ipc")]) == [
        replace(exports[0], kind="cuda_ipc"),
        replace(exports[1], kind="cuda_ipc"),
    ]


def test_a_worker_that_has_closed_its_files_is_named_and_so_is_one_that_has_ended(cuda):
    with Away(Owner, "x", FILE, [(0, 1)], 0) as owner:
        exports, _, _ = owner.told()
        owner.close_files()
        process = owner.process.pid
        with pytest.raises(FabricError, match=rf"file \d+ of process {process}.*pidfd_getfd: Bad file descriptor"):
            open_window(exports[0], "cuda", 0)
        owner.kill()
        with pytest.raises(FabricError, match=f"process {process} cannot be reached"):
            open_window(exports[0], "cuda", 0)
    assert cuda.state.live() == (0, 0, 0)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (1, r"Operation not permitted\): this process may not trace.*ptrace_scope=0.*SYS_PTRACE.*cudaMalloc"),
        (38, r"Function not implemented\): Linux has it since 5\.6.*seccomp.*cudaMalloc"),
    ],
)
def test_a_process_that_does_not_let_itself_be_reached_is_a_refusal_with_the_remedy(
    cuda, three, monkeypatch, code, said
):
    def refuse(*arguments):
        ctypes.set_errno(code)
        return -1

    before = open_files()
    monkeypatch.setattr("kvxfer.mapped.host._system_call", lambda: refuse)
    with pytest.raises(FabricError, match=said):
        open_window(three, "cuda", 0)
    assert (cuda.state.live(), open_files()) == ((0, 0, 0), before)


STEPS = [
    ("cuMemImportFromShareableHandle", 0),
    ("cuMemImportFromShareableHandle", 2),
    ("cuMemAddressReserve", 0),
    ("cuMemMap", 0),
    ("cuMemMap", 2),
    ("cuMemSetAccess", 0),
]


@pytest.mark.parametrize(("name", "succeed"), STEPS)
def test_a_step_that_is_refused_leaves_nothing(cuda, three, name, succeed):
    before = open_files()
    cuda.state.fails[name] = succeed
    with pytest.raises(FabricError, match=rf"{name}\(.*CUDA_ERROR_NOT_PERMITTED"):
        open_window(three, "cuda", 0)
    assert (cuda.state.live(), open_files()) == ((0, 0, 0), before)


def test_a_window_that_cannot_be_unmapped_whole_says_so_and_gives_back_the_rest(cuda, three):
    window = open_window(three, "cuda", 0)
    unmap = cuda.cuMemUnmap
    cuda.cuMemUnmap = lambda at, size: (Result.CUDA_ERROR_NOT_PERMITTED,) if at == window.local else unmap(at, size)
    with pytest.raises(FabricError, match=r"cuMemUnmap\("):
        window.close()
    assert list(cuda.state.mappings) == [window.local]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peers": False}, "GPU 0 cannot address the memory of GPU 1"),
        ({"atomics": False}, "GPU 0 has no atomics on the memory of GPU 1"),
    ],
)
def test_the_two_gpus_must_reach_each_other(cuda, three, changes, said):
    vars(cuda.state).update(changes)
    with pytest.raises(FabricError, match=said):
        open_window(three, "cuda", 0)
    open_window(three, "cuda", 1).close()  # its own GPU needs none of that


# ---- what is exported


def test_only_pieces_that_hold_tensors_are_exported_and_each_once(cuda, files):
    pool = Pool(cuda, "xxxx")
    third = range(pool.piece(2) + 10, pool.piece(2) + 20)
    (given,) = export("cuda", 0, [third, range(pool.piece(1), pool.piece(2) + 50), third], files)
    assert (given.kind, given.device, given.address, given.length) == (
        "cuda_vmm",
        "01" * 16,
        pool.piece(1),
        2 * GRANULE,
    )
    assert len(files._held) == 2
    assert cuda.state.live() == (0, 4, 1)  # what was asked for is given back


def test_memory_of_cuda_malloc_stays_what_it_was(cuda, files):
    _, address = fake_cuda.sys.modules["cuda.bindings.runtime"].cudaMalloc(GRANULE)
    pool = Pool(cuda, "x")
    exports = export("cuda", 0, [range(address + 5, address + 9), range(pool.base, pool.base + 1)], files)
    assert sorted((given.kind, given.address, len(given.handle)) for given in exports) == [
        ("cuda_ipc", address, 68),
        ("cuda_vmm", pool.base, 20),
    ]


def test_files_are_closed_with_the_worker_and_no_child_gets_them(cuda, files):
    before = open_files()
    pool = Pool(cuda, "xxx")
    of_cuda = open_files() - before
    export("cuda", 0, [range(pool.base, pool.base + pool.size)], files)
    held = open_files() - before - of_cuda
    assert len(held) == len(files._held) == 3
    assert not any(os.get_inheritable(number) for number in held)
    files.close()
    files.close()
    assert open_files() - before == of_cuda


def test_a_fabric_handle_that_is_refused_makes_way_for_an_open_file(cuda, files):
    """As on a host without an IMEX channel: the memory was made for both, and only one can be exported."""
    pool = Pool(cuda, "xx", kinds=FILE | FABRIC)
    export_one = cuda.cuMemExportToShareableHandle

    def refuse(handle, kind, flags):
        if kind == FABRIC:
            return Result.CUDA_ERROR_NOT_PERMITTED, None
        return export_one(handle, kind, flags)

    cuda.cuMemExportToShareableHandle = refuse
    export("cuda", 0, [range(pool.base, pool.base + pool.size)], files)
    assert len(files._held) == 2


def test_memory_without_any_handle_is_refused_with_what_each_kind_said(cuda, files):
    pool = Pool(cuda, "x", kinds=0)
    with pytest.raises(FabricError) as caught:
        export("cuda", 0, [range(pool.base, pool.base + 1)], files)
    said = str(caught.value)
    for part in ("cudaIpcGetMemHandle", "as a fabric handle", "as an open file", "SEGMENTS_IPC=0", "plain cudaMalloc"):
        assert part in said
    assert len(files._held) == 0
    assert cuda.state.live() == (0, 1, 1)


@pytest.mark.parametrize("mapped", ["x.x", "xx."])
def test_a_tensor_with_a_hole_is_refused(cuda, files, mapped):
    pool = Pool(cuda, mapped)
    with pytest.raises(FabricError, match=r"cuMemGetAddressRange\(.*NOT_FOUND"):
        export("cuda", 0, [range(pool.base, pool.base + pool.size)], files)


def test_more_pieces_than_open_files_are_refused_by_the_name_of_the_limit(cuda, files):
    before = open_files()
    pool = Pool(cuda, "x" * 40)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = open_files()
    twentieth = [number for number in range(len(used) + 20) if number not in used][19]  # files may be open far above
    limit = (twentieth + 1) * 4 // 3
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with pytest.raises(FabricError, match=rf"more than \d+ open files, and this process may have {limit}.*ulimit"):
            export("cuda", 0, [range(pool.base, pool.base + pool.size)], files)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert 10 < len(files._held) < 40
    files.close()
    assert open_files() - before == {made.descriptor for _, made in cuda.state.mappings.values()}


# ---- handles as a peer may send them


def test_what_is_no_handle_is_refused(cuda, files):
    pool = Pool(cuda, "xx")
    (given,) = export("cuda", 0, [range(pool.base, pool.base + pool.size)], files)
    own = struct.pack("<I", os.getpid())
    other = struct.pack("<I", os.getppid())
    handles = {
        b"": "of 0 processes",
        given.handle[:-1]: "39 bytes names no GPU memory",
        given.handle + b"\0": "41 bytes names no GPU memory",
        own + struct.pack("<IQI", 7, GRANULE, 3): "20 bytes names no GPU memory",
        given.handle[:20] + other + given.handle[24:]: "of 2 processes",
    }
    for handle, said in handles.items():
        with pytest.raises(FabricError, match=said):
            open_window(replace(given, handle=handle), "cuda", 0)


def with_lengths(given, *lengths):
    """Of the pieces, in their order."""
    handles = (given.handle[at : at + 20] for at in range(0, len(given.handle), 20))
    return b"".join(h[:8] + struct.pack("<Q", n) + h[16:] for h, n in zip(handles, lengths, strict=True))


@pytest.mark.parametrize("lengths", [(1, 1, 2), (3, 0, 0), (1, 1, 0.5)])
def test_pieces_that_are_not_as_long_as_their_memory_are_refused(cuda, three, lengths):
    handle = with_lengths(three, *(int(length * GRANULE) for length in lengths))
    with pytest.raises(FabricError, match="have another length"):
        open_window(replace(three, handle=handle), "cuda", 0)
    assert "cuMemImportFromShareableHandle" not in cuda.state.calls


def test_a_piece_that_is_shorter_than_it_was_said_to_be_is_refused(cuda, three):
    handle = with_lengths(three, GRANULE, GRANULE, 2 * GRANULE)
    with pytest.raises(FabricError, match=r"cuMemMap\(.*INVALID_VALUE"):
        open_window(replace(three, length=4 * GRANULE, handle=handle), "cuda", 0)
    assert cuda.state.live() == (0, 0, 0)


def test_too_little_memory_for_a_mapping_is_an_error_that_a_pair_falls_back_from(cuda, three):
    cuda.cuMemAddressReserve = lambda *arguments: (Result.CUDA_ERROR_OUT_OF_MEMORY, None)
    with pytest.raises(ArenaError, match="cuMemAddressReserve"):
        open_window(three, "cuda", 0)
    assert cuda.state.live() == (0, 0, 0)


def test_within_one_process_it_is_itself_and_another_gpu_is_admitted(cuda, files):
    pool = Pool(cuda, "xx")
    (given,) = export("cuda", 0, [range(pool.base, pool.base + pool.size)], files)
    with pytest.raises(FabricError, match="memory of this process, which is not its own"):
        open_window(given, "cuda", 0)
    for device, admitted in ((0, []), (1, [(pool.base, pool.size, 1)])):
        window = open_window(given, "cuda", device, own=True)
        assert (window.local, cuda.state.admitted) == (pool.base, admitted)
        window.close()
    assert cuda.state.live() == (0, 2, 1)


# ---- a worker's exports


class Threads:
    """The one part of a runtime that exports need."""

    async def in_thread(self, work):
        return work()


async def opened(*spans):
    """The exports of a worker whose cache tensors lie there. It trusts nobody, and so has no file of locks."""
    tensors = [SimpleNamespace(base=span.start, extent_bytes=len(span)) for span in spans]
    geometry, exports = SimpleNamespace(kind="cuda", device=0, tensors=tensors), Exports()
    await exports.open(Config(trust="none"), cast("Any", geometry), cast("Any", Threads()), in_place=True)
    return exports


@pytest.mark.parametrize("end", ["close", "leak"])
async def test_a_workers_files_are_open_until_it_ends(cuda, end):
    before, pool = open_files(), Pool(cuda, "x" * 13)
    exports = await opened(range(pool.base, pool.base + pool.size))
    assert [(frame.kind, len(frame.handle)) for frame in exports.frames] == [
        ("cuda_vmm", 240),
        ("cuda_vmm", 20),
        ("cuda_ipc", 68),
    ]
    assert exports.frames[-1].address == exports.gates
    of_cuda = {made.descriptor for _, made in (*cuda.state.mappings.values(), *cuda.state.allocated.values())}
    assert len(open_files() - before - of_cuda) == 13
    getattr(exports, end)()
    assert open_files() - before <= of_cuda


async def test_a_cache_that_cannot_be_exported_leaves_no_files_and_a_log_line(cuda, caplog):
    whole, bare = Pool(cuda, "xxx"), Pool(cuda, "x", kinds=0)
    before = open_files()
    exports = await opened(range(whole.base, whole.base + whole.size), range(bare.base, bare.base + 1))
    assert exports.frames == []
    assert open_files() == before
    assert "cache_not_exported" in caplog.text
    assert "as a fabric handle" in caplog.text


async def test_more_allocations_than_a_peer_is_told_of_are_refused(cuda, caplog, monkeypatch):
    monkeypatch.setattr("kvxfer.safety.fence.MAX_TENSORS", 2)
    pool = Pool(cuda, "x" * 25)
    before = open_files()
    exports = await opened(range(pool.base, pool.base + pool.size))
    assert (exports.frames, exports.gates, open_files()) == ([], 0, before)
    assert "a peer is told of 2 at most" in caplog.text


def test_a_tensor_across_what_is_told_in_several_handles_is_in_one_window(cuda):
    with Away(Owner, "x" * 30, FILE, [(0, 30 * GRANULE)], 0) as owner:
        exports, base, _ = owner.told()
        assert len(exports) == 3
        told = [MappedMemory(one.kind, one.device, one.address, one.length, one.handle) for one in exports]
        peer = SimpleNamespace(
            identity=SimpleNamespace(incarnation=b"theirs"), body=SimpleNamespace(mapped=told, gates=0), process=0
        )
        theirs = SimpleNamespace(tensors=[SimpleNamespace(base=base + 5, extent_bytes=29 * GRANULE)])
        mappings = Mappings(
            cast("Any", SimpleNamespace(kind="cuda", device=0)), cast("Any", Threads()), lambda windows: None, b"ours"
        )
        windows, _ = mappings._open(cast("Any", peer), cast("Any", theirs))
        assert len(windows._windows) == 1
        windows.close()
        mappings.close()
        assert cuda.state.live() == (0, 0, 0)
