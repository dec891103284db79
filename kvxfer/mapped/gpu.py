"""GPU memory that other processes can map: what cudaMalloc made (CUDA IPC), and what `cuMemMap` put at an address."""

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from kvxfer.errors import FabricError, KvxferError
from kvxfer.mapped.host import CUDA, VMM, OpenFiles, Window, files_of, joined
from kvxfer.memory.device import admit, call, in_thread, lay_out, load
from kvxfer.names import MAX_HANDLE
from kvxfer.protocol.messages import MappedMemory

__all__ = ["export_cuda", "open_cuda"]

# --- what cudaMalloc made
#
# A handle names a whole allocation, so addresses inside it are offsets from its base. It is opened with the GPU
# current that will address it: opened with the other one current, kernels fault and copies run at a tenth of the
# speed. CUDA opens a handle once a process, so openings are counted here.

_HANDLE: Final = struct.Struct("<I64s")
"""Process, and CUDA's handle."""
_lock: Final = threading.Lock()


@dataclass(slots=True)
class _Opened:
    """An allocation that is open in this process, and by how many windows."""

    local: int
    users: int = 0


_opened: Final[dict[tuple[int, bytes], _Opened]] = {}
"""By GPU and handle."""


def _read_allocation(handle: bytes) -> tuple[int, bytes]:
    """The process whose memory a handle names, and CUDA's handle."""
    try:
        process, data = _HANDLE.unpack(handle)
    except struct.error as error:
        raise FabricError(f"a handle of {len(handle)} bytes names no GPU memory") from error
    return int(process), bytes(data)


def _open(runtime: Any, device: int, handle: bytes) -> int:
    with _lock:
        opened = _opened.get((device, handle))
        if opened is None:
            given = runtime.cudaIpcMemHandle_t()
            given.reserved = handle
            flags = int(runtime.cudaIpcMemLazyEnablePeerAccess)
            opened = _Opened(int(call(runtime, "cudaIpcOpenMemHandle", given, flags)))
            _opened[device, handle] = opened
        opened.users += 1
        return opened.local


def _closer(runtime: Any, device: int, handle: bytes) -> Callable[[], None]:
    def close() -> None:
        with _lock:
            opened = _opened[device, handle]
            opened.users -= 1
            if opened.users:
                return
            del _opened[device, handle]
            call(runtime, "cudaSetDevice", device)
            call(runtime, "cudaIpcCloseMemHandle", opened.local)

    return close


# --- what cuMemMap put at an address
#
# Torch's expandable segments are such memory, and pools of fabric memory. It comes in pieces, each with a handle of
# its own, which its owner has put side by side (20 MiB each by torch), and a tensor does not stop where a piece does.
# So all pieces that adjoin are put side by side here too.
#
# A piece has a handle for other processes only if that was asked for when it was made, of one or more kinds: a fabric
# handle (64 bytes that any process on the same IMEX channel may open), or an open file. Which ones were asked for is
# not looked up, since cuda-bindings cannot show several at once: CUDA refuses the others.

_PIECE: Final = struct.Struct("<IIQ")
"""Process, kind of handle, bytes. The handle follows."""
_NUMBER: Final = struct.Struct("<I")
"""An open file."""
_FILE: Final = 1
"""`CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`."""
_FABRIC: Final = 8
"""`CU_MEM_HANDLE_TYPE_FABRIC`."""
_BYTES: Final = {_FILE: _NUMBER.size, _FABRIC: 64}
"""Of a handle, by kind."""

_ADVICE: Final = (
    "allocate the cache with plain cudaMalloc, or ask for a handle when it is made: cuMemCreate by "
    "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, torch's expandable_segments unless TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=0"
)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One piece of another process's memory, as it was described."""

    kind: int
    length: int
    shared: bytes


def _pieces_handle(driver: Any, base: int, length: int, files: OpenFiles) -> bytes:
    """What another process needs to map one piece of memory; `files` keeps the open file, if that is what it takes."""
    try:
        piece = call(driver, "cuMemRetainAllocationHandle", base)
    except FabricError as error:
        raise FabricError(f"{error}: it was not mapped by cuMemMap either; {_ADVICE}") from error
    try:
        kind, shared = _shared(driver, piece)
    finally:
        call(driver, "cuMemRelease", piece)
    data = bytes(shared.data) if kind == _FABRIC else _NUMBER.pack(files.keep(int(shared)))
    return _PIECE.pack(os.getpid(), kind, length) + data


def _shared(driver: Any, piece: Any) -> tuple[int, Any]:
    """The first kind of handle that CUDA gives for a piece, and the handle."""
    refused: list[str] = []
    for kind, name in ((_FABRIC, "a fabric handle"), (_FILE, "an open file")):
        try:
            return kind, call(driver, "cuMemExportToShareableHandle", piece, driver.CUmemAllocationHandleType(kind), 0)
        except KvxferError as error:
            refused.append(f"{error} (as {name})")
    raise FabricError(f"{', '.join(refused)}: it was made without a handle for other processes; {_ADVICE}")


def _read_pieces(handle: bytes) -> tuple[int, list[_Piece]]:
    """The process whose memory a handle names, and the pieces."""
    processes: set[int] = set()
    pieces: list[_Piece] = []
    try:
        for process, piece in _pieces(handle):
            processes.add(process)
            pieces.append(piece)
    except (struct.error, KeyError) as error:
        raise FabricError(f"a handle of {len(handle)} bytes names no GPU memory") from error
    if len(processes) != 1:
        raise FabricError(f"its memory is said to be of {len(processes)} processes, not of one")
    return processes.pop(), pieces


def _pieces(handle: bytes) -> Iterator[tuple[int, _Piece]]:
    at = 0
    while at < len(handle):
        process, kind, length = _PIECE.unpack_from(handle, at)
        (shared,) = struct.unpack_from(f"{_BYTES[kind]}s", handle, at + _PIECE.size)
        at += _PIECE.size + len(shared)
        yield process, _Piece(kind, length, shared)


def _open_pieces(
    driver: Any, runtime: Any, given: MappedMemory, process: int, pieces: Sequence[_Piece], device: int
) -> Window:
    """Map pieces of another process side by side. The GPU that will address them is current in this thread."""
    if sum(piece.length for piece in pieces) != given.length or not all(piece.length for piece in pieces):
        raise FabricError(f"the pieces of its {given.length} bytes at {given.address:#x} have another length")
    with files_of(process) as take, ExitStack() as opened:  # a mapping keeps its memory without the handle
        handles: list[tuple[Any, int]] = []
        for piece in pieces:
            handle = _import(driver, piece, take)
            opened.callback(call, driver, "cuMemRelease", handle)
            handles.append((handle, piece.length))
        local, free = lay_out(driver, handles, device)

    def close() -> None:
        call(runtime, "cudaSetDevice", device)
        free()

    return Window(given.address, given.length, local, lambda: in_thread(close))


def _import(driver: Any, piece: _Piece, take: Callable[[int], int]) -> Any:
    kind = driver.CUmemAllocationHandleType(piece.kind)
    if piece.kind == _FABRIC:
        data = ctypes.create_string_buffer(piece.shared, len(piece.shared))
        return call(driver, "cuMemImportFromShareableHandle", ctypes.addressof(data), kind)
    (number,) = _NUMBER.unpack(piece.shared)
    descriptor = take(number)
    try:
        return call(driver, "cuMemImportFromShareableHandle", descriptor, kind)
    finally:
        os.close(descriptor)


# --- which of it, and how two GPUs reach each other

_PURPOSE: Final = "the route mapped"


def export_cuda(device: int, spans: Sequence[range], files: OpenFiles) -> list[MappedMemory]:
    """The allocations in which these addresses lie, each once.

    Raises:
        FabricError: If one lies in memory that has no handle for other processes.
    """
    runtime, driver = load("runtime", _PURPOSE), load("driver", _PURPOSE)

    def make() -> list[MappedMemory]:
        call(runtime, "cudaSetDevice", device)
        identity = _identity(runtime, device)
        found: list[MappedMemory] = []
        for base, length in _allocations(driver, spans):
            try:
                handle = _HANDLE.pack(os.getpid(), bytes(call(runtime, "cudaIpcGetMemHandle", base).reserved))
                found.append(MappedMemory(CUDA, identity, base, length, handle))
            except KvxferError as error:
                try:
                    handle = _pieces_handle(driver, base, length, files)
                except KvxferError as other:
                    raise FabricError(f"{error}; {other}") from other
                found.append(MappedMemory(VMM, identity, base, length, handle))
        return joined(found, most=MAX_HANDLE)

    return in_thread(make)


def _allocations(driver: Any, spans: Iterable[range]) -> list[tuple[int, int]]:
    """Where what lies under these addresses begins, and its bytes. Each piece that was mapped counts by itself."""
    found: dict[int, int] = {}
    for span in spans:
        at = span.start
        while at < span.stop:
            base, length = map(int, call(driver, "cuMemGetAddressRange", at))
            if not base <= at < base + length:
                raise FabricError(f"CUDA says that {at:#x} lies in the {length} bytes at {base:#x}")
            found[base] = length
            at = base + length
    return sorted(found.items())


def _identity(runtime: Any, device: int) -> str:
    return bytes(call(runtime, "cudaGetDeviceProperties", device).uuid.bytes).hex()


def open_cuda(given: MappedMemory, device: int, *, own: bool) -> Window:
    """Map memory of another process for kernels of this GPU, or find it in this process.

    Raises:
        FabricError: If the two GPUs cannot reach each other, or CUDA does not map it.
        ArenaError: If CUDA has too little memory for that.
    """
    runtime, driver = load("runtime", _PURPOSE), load("driver", _PURPOSE)
    pieces, ipc = list[_Piece](), b""
    if given.kind == VMM:
        process, pieces = _read_pieces(given.handle)
    else:
        process, ipc = _read_allocation(given.handle)
    if (process == os.getpid()) is not own:
        raise FabricError("it names memory of this process, which is not its own" if not own else "it is not of here")

    def make() -> Window:
        call(runtime, "cudaSetDevice", device)
        other = _find(runtime, given.device)
        if other is not None and other != device:
            _check_peer(runtime, device, other)
        if not own:
            if given.kind == VMM:
                return _open_pieces(driver, runtime, given, process, pieces, device)
            local = _open(runtime, device, ipc)
            return Window(given.address, given.length, local, lambda: in_thread(_closer(runtime, device, ipc)))
        if other is not None and other != device:
            _admit(runtime, driver, given, device, other)
        return Window(given.address, given.length, given.address, lambda: None)

    return in_thread(make)


def _find(runtime: Any, identity: str) -> int | None:
    """The index of a GPU in this process; None if it is hidden from it."""
    count = int(call(runtime, "cudaGetDeviceCount"))
    return next((index for index in range(count) if _identity(runtime, index) == identity), None)


def _check_peer(runtime: Any, device: int, other: int) -> None:
    if not call(runtime, "cudaDeviceCanAccessPeer", device, other):
        raise FabricError(f"GPU {device} cannot address the memory of GPU {other}: there is no peer access")
    attribute = runtime.cudaDeviceP2PAttr.cudaDevP2PAttrNativeAtomicSupported
    if not call(runtime, "cudaDeviceGetP2PAttribute", attribute, device, other):
        raise FabricError(
            f"GPU {device} has no atomics on the memory of GPU {other}, so its writes could not be fenced"
        )


def _admit(runtime: Any, driver: Any, given: MappedMemory, device: int, other: int) -> None:
    """Let kernels of the current GPU address memory of another one of this process."""
    if given.kind == VMM:
        admit(driver, given.address, given.length, device)  # which what follows would not
        return
    code, *_ = runtime.cudaDeviceEnablePeerAccess(other, 0)
    fine = (runtime.cudaError_t.cudaSuccess, runtime.cudaError_t.cudaErrorPeerAccessAlreadyEnabled)
    if code not in fine:
        raise FabricError(f"cudaDeviceEnablePeerAccess({other}) failed: {getattr(code, 'name', code)}")
    runtime.cudaGetLastError()  # else the next launch would report that it was enabled before
