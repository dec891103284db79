"""Whether a GPU sees what a NIC has written into its memory.

A transport says that a write has ended when the NIC does. On some platforms the bytes may still be on their way to the
GPU's memory then, and a kernel that is launched at once may read what was there before.
"""

from enum import StrEnum
from typing import Any, Final

from kvxfer.memory.driver import call, load

__all__ = ["Arrival", "arrival"]

_PURPOSE: Final = "receiving from a NIC into a GPU"


class Arrival(StrEnum):
    """What has to be done before a GPU reads what a NIC wrote."""

    ORDERED = "ordered"
    """Nothing: kernels that are launched afterwards see it."""
    FLUSHED = "flushed"
    """Its writes have to be flushed."""
    UNKNOWN = "unknown"
    """Neither does the device order them, nor can they be flushed from here: nobody says that they are seen."""


def arrival(device: int) -> Arrival:
    """What a GPU needs, by its attributes.

    Args:
        device: Its index, among those that this process sees.

    Raises:
        MissingExtraError: cuda-bindings is not installed.
        FabricError: CUDA does not know it.
    """
    cuda = load("driver", _PURPOSE)
    gpu = call(cuda, "cuDeviceGet", device)

    def attribute(name: str) -> int:
        which = getattr(cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_{name}")
        return int(call(cuda, "cuDeviceGetAttribute", which, gpu))

    ordered: Any = cuda.CUGPUDirectRDMAWritesOrdering.CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
    by_host: Any = cuda.CUflushGPUDirectRDMAWritesOptions.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
    if attribute("WRITES_ORDERING") >= int(ordered):
        return Arrival.ORDERED
    return Arrival.FLUSHED if attribute("FLUSH_WRITES_OPTIONS") & int(by_host) else Arrival.UNKNOWN
