"""GPU memory: which of it other processes can map, by which handle, and what two GPUs must be able to do.

What cudaMalloc made is opened through CUDA IPC (`ipc`), what cuMemMap has put at an address piece by piece (`vmm`).
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvxfer.errors import FabricError, KvxferError
from kvxfer.limits import MAX_HANDLE
from kvxfer.mapped import ipc, vmm
from kvxfer.mapped.descriptors import Descriptors
from kvxfer.mapped.window import CUDA, VMM, Export, Window, joined
from kvxfer.memory.driver import call, in_thread, load
from kvxfer.memory.vmm import admit

__all__ = ["export_cuda", "open_cuda"]

_PURPOSE: Final = "the route mapped"


def export_cuda(device: int, spans: Sequence[range], files: Descriptors) -> list[Export]:
    """The allocations in which these addresses lie, each once.

    Raises:
        FabricError: If one lies in memory that has no handle for other processes.
    """
    runtime, driver = load("runtime", _PURPOSE), load("driver", _PURPOSE)

    def make() -> list[Export]:
        call(runtime, "cudaSetDevice", device)
        identity = _identity(runtime, device)
        found: list[Export] = []
        for base, length in _allocations(driver, spans):
            try:
                found.append(Export(CUDA, identity, base, length, ipc.handle_of(runtime, base)))
            except KvxferError as error:
                try:
                    handle = vmm.handle_of(driver, base, length, files)
                except KvxferError as other:
                    raise FabricError(f"{error}; {other}") from other
                found.append(Export(VMM, identity, base, length, handle))
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


def open_cuda(given: Export, device: int, *, own: bool) -> Window:
    """Map memory of another process for kernels of this GPU, or find it in this process.

    Args:
        given: As its owner said.
        device: The GPU that will address it.
        own: Whether its owner is this process.

    Raises:
        FabricError: If the two GPUs cannot reach each other, or CUDA does not map it.
        ArenaError: If CUDA has too little memory for that.
    """
    runtime, driver = load("runtime", _PURPOSE), load("driver", _PURPOSE)
    process = (vmm if given.kind == VMM else ipc).process_of(given.handle)
    if (process == os.getpid()) is not own:
        raise FabricError("it names memory of this process, which is not its own" if not own else "it is not of here")

    def make() -> Window:
        call(runtime, "cudaSetDevice", device)
        other = _find(runtime, given.device)
        if other is not None and other != device:
            _check_peer(runtime, device, other)
        if not own:
            if given.kind == VMM:
                return vmm.open_pieces(driver, runtime, given, device)
            return ipc.open_allocation(runtime, given, device)
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


def _admit(runtime: Any, driver: Any, given: Export, device: int, other: int) -> None:
    """Let kernels of the current GPU address memory of another one of this process."""
    if given.kind == VMM:
        admit(driver, given.address, given.length, device)  # which what follows would not
        return
    code, *_ = runtime.cudaDeviceEnablePeerAccess(other, 0)
    fine = (runtime.cudaError_t.cudaSuccess, runtime.cudaError_t.cudaErrorPeerAccessAlreadyEnabled)
    if code not in fine:
        raise FabricError(f"cudaDeviceEnablePeerAccess({other}) failed: {getattr(code, 'name', code)}")
    runtime.cudaGetLastError()  # else the next launch would report that it was enabled before
