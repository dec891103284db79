"""CUDA's virtual memory management: GPU memory with a fabric handle for an arena, and how memory is mapped.

cudaMalloc memory can be opened by other processes of one host only. Memory that was made for fabric handles can be
opened by every host of an NVLink domain. Which memory a transport (UCX) can export is decided when it is made, so it
must be asked for here.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from kvxfer.errors import FabricError, KvxferError
from kvxfer.memory.driver import call, load

__all__ = ["admit", "allocate", "lay_out"]


def allocate(nbytes: int, device: int) -> tuple[int, Callable[[], None]]:
    """Allocate memory of the GPU that is current in this thread.

    Args:
        nbytes: Bytes; rounded up to the granularity of such memory.
        device: Index of that GPU.

    Returns:
        The address, and what gives the memory back; that is called once, in a thread in which the GPU is current.

    Raises:
        MissingExtraError: cuda-bindings is not installed.
        ArenaError: the memory is not there.
        FabricError: the GPU or the system has no fabric handles, or CUDA failed.
    """
    cuda = load("driver", "an arena of kind 'fabric'")
    call(cuda, "cuInit", 0)
    properties = _properties(cuda, device)
    least = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    granule = int(call(cuda, "cuMemGetAllocationGranularity", properties, least))
    size = -(-nbytes // granule) * granule
    handle = call(cuda, "cuMemCreate", size, properties, 0)
    try:
        # whether a handle can be exported is known only now: that takes an IMEX channel, and the attribute shows none
        call(cuda, "cuMemExportToShareableHandle", handle, properties.requestedHandleTypes, 0)
        return lay_out(cuda, [(handle, size)], device)
    finally:
        call(cuda, "cuMemRelease", handle)  # a mapping keeps the memory; without one it is given back here


def _properties(cuda: Any, device: int) -> Any:
    """What the memory is to be like."""
    attributes = cuda.CUdevice_attribute
    ordinal = call(cuda, "cuDeviceGet", device)
    supported = attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
    if not call(cuda, "cuDeviceGetAttribute", supported, ordinal):
        raise FabricError(f"GPU {device} has no fabric handles (CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED is 0)")
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    properties.requestedHandleTypes = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    rdma = attributes.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
    # NICs can reach such memory only if that was asked for
    properties.allocFlags.gpuDirectRDMACapable = int(bool(call(cuda, "cuDeviceGetAttribute", rdma, ordinal)))
    return properties


def lay_out(cuda: Any, pieces: Sequence[tuple[Any, int]], device: int) -> tuple[int, Callable[[], None]]:
    """Map memory side by side, where one GPU may read and write it. That GPU is current in this thread.

    Args:
        cuda: CUDA's driver.
        pieces: Handles of memory and their bytes, in the order in which they are to lie. The handles stay the caller's;
            a mapping keeps the memory without them.
        device: Index of that GPU.

    Returns:
        The first address, and what unmaps all of it; that is called once, in a thread in which the GPU is current.

    Raises:
        ArenaError: there is not enough memory.
        FabricError: CUDA failed.
    """
    size = sum(length for _, length in pieces)
    reserved = int(call(cuda, "cuMemAddressReserve", size, 0, 0, 0))
    undo: list[Callable[[], object]] = [partial(call, cuda, "cuMemAddressFree", reserved, size)]

    def free() -> None:
        failed: KvxferError | None = None
        while undo:
            try:
                undo.pop()()
            except KvxferError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    try:
        at = reserved
        for handle, length in pieces:
            call(cuda, "cuMemMap", at, length, 0, handle, 0)
            undo.append(partial(call, cuda, "cuMemUnmap", at, length))  # a range of several mappings may be refused
            at += length
        admit(cuda, reserved, size, device)
    except KvxferError:
        with suppress(KvxferError):
            free()
        raise
    return reserved, free


def admit(cuda: Any, address: int, size: int, device: int) -> None:
    """Let a GPU read and write memory that is mapped in this process.

    Args:
        cuda: CUDA's driver.
        address: Where the first mapping begins.
        size: Bytes, to the end of the last one.
        device: Index of that GPU.

    Raises:
        FabricError: CUDA failed.
    """
    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    call(cuda, "cuMemSetAccess", address, size, [access], 1)
