"""GPU memory with a fabric handle: CUDA's virtual memory management, as far as an arena needs it.

cudaMalloc memory can be opened by other processes of one host only. Memory that was made for fabric handles can be
opened by every host of an NVLink domain. Which memory a transport (UCX) can export is decided when it is made, so it
must be asked for here.
"""

from collections.abc import Callable
from typing import Any

from kvxfer.errors import FabricError, KvxferError
from kvxfer.memory.driver import call, load

__all__ = ["allocate"]


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
        return _mapped(cuda, handle, size, properties.location)
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


def _mapped(cuda: Any, handle: Any, size: int, location: Any) -> tuple[int, Callable[[], None]]:
    """Map memory where this GPU may read and write it."""
    reserved = call(cuda, "cuMemAddressReserve", size, 0, 0, 0)
    undo: list[Callable[[], object]] = [lambda: call(cuda, "cuMemAddressFree", reserved, size)]

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
        call(cuda, "cuMemMap", reserved, size, 0, handle, 0)
        undo.append(lambda: call(cuda, "cuMemUnmap", reserved, size))
        access = cuda.CUmemAccessDesc()
        access.location = location
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call(cuda, "cuMemSetAccess", reserved, size, [access], 1)
    except KvxferError:
        free()
        raise
    return int(reserved), free
