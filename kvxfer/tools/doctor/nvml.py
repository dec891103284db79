"""NVLink, as NVIDIA's management library knows it. It comes with the driver, so no package is needed."""

import ctypes
from collections.abc import Iterable
from typing import Any, Final

__all__ = ["links"]

_LINKS: Final = 18
"""Of a GPU at most (NVML_NVLINK_MAX_LINKS)."""
_ACTIVE: Final = 1


def links(buses: Iterable[str], library: Any = None) -> dict[str, int]:
    """How many links of each GPU are up, by its PCI bus id; nothing where the library is not there or does not say.

    Args:
        buses: PCI bus ids, as CUDA and sysfs write them.
        library: NVML; loaded if left out.
    """
    try:
        nvml = library or ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return {}
    except (OSError, AttributeError):
        return {}
    try:
        return {bus: found for bus in buses if (found := _links(nvml, bus)) is not None}
    finally:
        nvml.nvmlShutdown()


def _links(nvml: Any, bus: str) -> int | None:
    device = ctypes.c_void_p()
    if nvml.nvmlDeviceGetHandleByPciBusId_v2(bus.encode(), ctypes.byref(device)) != 0:
        return None
    up = 0
    for number in range(_LINKS):
        state = ctypes.c_uint()
        if nvml.nvmlDeviceGetNvLinkState(device, ctypes.c_uint(number), ctypes.byref(state)) == 0:
            up += state.value == _ACTIVE
    return up
