"""GPU memory of CUDA's virtual memory management: what `cuMemCreate` made and `cuMemMap` put at an address.

Torch's expandable segments are such memory, and pools of fabric memory. It comes in pieces, each with a handle of its
own, which its owner has put side by side (20 MiB each by torch), and a tensor does not stop where a piece does. So all
pieces that adjoin are put side by side here too.

A piece has a handle for other processes only if that was asked for when it was made, of one or more kinds: a fabric
handle (64 bytes that any process on the same IMEX channel may open), or an open file. Which ones were asked for is not
looked up, since cuda-bindings cannot show several at once: CUDA refuses the others.
"""

import ctypes
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from kvxfer.errors import FabricError, KvxferError
from kvxfer.mapped.descriptors import Descriptors, files_of
from kvxfer.mapped.window import Export, Window
from kvxfer.memory.driver import call, in_thread
from kvxfer.memory.vmm import lay_out

__all__ = ["handle_of", "open_pieces", "process_of"]

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


def handle_of(driver: Any, base: int, length: int, files: Descriptors) -> bytes:
    """What another process needs to map one piece of memory.

    Args:
        driver: CUDA's driver.
        base: Where the piece begins in this process.
        length: Its bytes.
        files: Keeps the open file, if that is what it takes.

    Raises:
        FabricError: If it has no handle for other processes, or there are too many open files.
    """
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
            return kind, call(driver, "cuMemExportToShareableHandle", piece, _kind(driver, kind), 0)
        except KvxferError as error:
            refused.append(f"{error} (as {name})")
    raise FabricError(f"{', '.join(refused)}: it was made without a handle for other processes; {_ADVICE}")


def _kind(driver: Any, kind: int) -> Any:
    kinds = driver.CUmemAllocationHandleType
    return kinds.CU_MEM_HANDLE_TYPE_FABRIC if kind == _FABRIC else kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def process_of(handle: bytes) -> int:
    """The process whose memory a handle names.

    Raises:
        FabricError: If it is no handle, or names several.
    """
    return _read(handle)[0]


def _read(handle: bytes) -> tuple[int, list[_Piece]]:
    """Process and pieces."""
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


def open_pieces(driver: Any, runtime: Any, given: Export, device: int) -> Window:
    """Map pieces of another process side by side. The GPU that will address them is current in this thread.

    Args:
        driver: CUDA's driver.
        runtime: CUDA's runtime.
        given: As its owner said.
        device: Index of the GPU.

    Raises:
        FabricError: If a piece cannot be taken or mapped, with the reason.
        ArenaError: If CUDA has too little memory for that.
    """
    process, pieces = _read(given.handle)
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
    if piece.kind == _FABRIC:
        data = ctypes.create_string_buffer(piece.shared, len(piece.shared))
        return call(driver, "cuMemImportFromShareableHandle", ctypes.addressof(data), _kind(driver, _FABRIC))
    (number,) = _NUMBER.unpack(piece.shared)
    descriptor = take(number)
    try:
        return call(driver, "cuMemImportFromShareableHandle", descriptor, _kind(driver, _FILE))
    finally:
        os.close(descriptor)
