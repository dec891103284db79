"""GPU memory through CUDA IPC.

A handle names a whole allocation of cudaMalloc, so addresses inside it are offsets from its base. It is opened with the
GPU current that will address it: opened with the other one current, kernels fault and copies run at a tenth of the
speed. CUDA opens a handle once a process, so openings are counted here.
"""

import os
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvxfer.errors import FabricError
from kvxfer.mapped.window import CUDA, Export, Window
from kvxfer.memory.driver import call, in_thread, load

__all__ = ["export_cuda", "open_cuda"]

_HANDLE: Final = struct.Struct("<I64s")
"""Process, and CUDA's handle."""
_PURPOSE: Final = "the route mapped"
_lock: Final = threading.Lock()


@dataclass(slots=True)
class _Opened:
    """An allocation that is open in this process, and by how many windows."""

    local: int
    users: int = 0


_opened: Final[dict[tuple[int, bytes], _Opened]] = {}
"""By GPU and handle."""


def export_cuda(device: int, addresses: Sequence[int]) -> list[Export]:
    """The allocations of cudaMalloc in which these addresses lie, each once.

    Raises:
        FabricError: If one lies in memory that has no IPC handle.
    """
    runtime, driver = load("runtime", _PURPOSE), load("driver", _PURPOSE)

    def make() -> list[Export]:
        call(runtime, "cudaSetDevice", device)
        bases: dict[int, int] = {}
        for address in addresses:
            base, length = call(driver, "cuMemGetAddressRange", address)
            bases[int(base)] = int(length)
        return [
            Export(CUDA, _identity(runtime, device), base, length, _HANDLE.pack(os.getpid(), _handle(runtime, base)))
            for base, length in sorted(bases.items())
        ]

    return in_thread(make)


def _handle(runtime: Any, base: int) -> bytes:
    try:
        return bytes(call(runtime, "cudaIpcGetMemHandle", base).reserved)
    except FabricError as error:
        raise FabricError(
            f"{error}: this memory has no CUDA IPC handle; allocators with expandable_segments, or pools of virtual "
            "memory, have none, plain cudaMalloc has"
        ) from error


def _identity(runtime: Any, device: int) -> str:
    return bytes(call(runtime, "cudaGetDeviceProperties", device).uuid.bytes).hex()


def open_cuda(given: Export, device: int, *, own: bool) -> Window:
    """Map an allocation of another process for kernels of this GPU, or find one of this process.

    Args:
        given: As its owner said.
        device: The GPU that will address it.
        own: Whether its owner is this process.

    Raises:
        FabricError: If the two GPUs cannot reach each other, or CUDA does not open the handle.
    """
    runtime = load("runtime", _PURPOSE)
    try:
        process, handle = _HANDLE.unpack(given.handle)
    except struct.error as error:
        raise FabricError(f"a handle of {len(given.handle)} bytes names no GPU memory") from error
    if (process == os.getpid()) is not own:
        raise FabricError("it names memory of this process, which is not its own" if not own else "it is not of here")

    def make() -> Window:
        call(runtime, "cudaSetDevice", device)
        other = _find(runtime, given.device)
        if other is not None and other != device:
            _check_peer(runtime, device, other)
        if own:
            if other is not None and other != device:
                _enable_peer(runtime, other)
            return Window(given.address, given.length, given.address, lambda: None)
        local = _open(runtime, device, handle)
        return Window(given.address, given.length, local, lambda: in_thread(_closer(runtime, device, handle)))

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


def _enable_peer(runtime: Any, other: int) -> None:
    """Let kernels of the current GPU address all memory of another one of this process."""
    code, *_ = runtime.cudaDeviceEnablePeerAccess(other, 0)
    fine = (runtime.cudaError_t.cudaSuccess, runtime.cudaError_t.cudaErrorPeerAccessAlreadyEnabled)
    if code not in fine:
        raise FabricError(f"cudaDeviceEnablePeerAccess({other}) failed: {getattr(code, 'name', code)}")
    runtime.cudaGetLastError()  # else the next launch would report that it was enabled before


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
