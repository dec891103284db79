"""GPU memory of cudaMalloc, through CUDA IPC.

A handle names a whole allocation, so addresses inside it are offsets from its base. It is opened with the GPU current
that will address it: opened with the other one current, kernels fault and copies run at a tenth of the speed. CUDA
opens a handle once a process, so openings are counted here.
"""

import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvxfer.errors import FabricError
from kvxfer.mapped.window import Export, Window
from kvxfer.memory.driver import call, in_thread

__all__ = ["handle_of", "open_allocation", "process_of"]

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


def handle_of(runtime: Any, base: int) -> bytes:
    """What another process needs to map an allocation.

    Args:
        runtime: CUDA's runtime.
        base: Where the allocation begins.

    Raises:
        FabricError: If it is not of cudaMalloc.
    """
    return _HANDLE.pack(os.getpid(), bytes(call(runtime, "cudaIpcGetMemHandle", base).reserved))


def process_of(handle: bytes) -> int:
    """The process whose memory a handle names.

    Raises:
        FabricError: If it is no handle.
    """
    return _read(handle)[0]


def _read(handle: bytes) -> tuple[int, bytes]:
    try:
        process, data = _HANDLE.unpack(handle)
    except struct.error as error:
        raise FabricError(f"a handle of {len(handle)} bytes names no GPU memory") from error
    return int(process), bytes(data)


def open_allocation(runtime: Any, given: Export, device: int) -> Window:
    """Map an allocation of another process. The GPU that will address it is current in this thread.

    Args:
        runtime: CUDA's runtime.
        given: As its owner said.
        device: Index of the GPU.

    Raises:
        FabricError: If CUDA does not open the handle.
    """
    _, handle = _read(given.handle)
    local = _open(runtime, device, handle)
    return Window(given.address, given.length, local, lambda: in_thread(_closer(runtime, device, handle)))


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
