"""Checks of the GPUs: which there are, which reach each other and how, and what torch's allocator was told."""

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvxfer.errors import KvxferError
from kvxfer.memory.device import call, load, pci_bus_id
from kvxfer.tools.doctor.findings import Finding, fail, ok, skipped, warn

__all__ = ["Gpu", "Reach", "check_allocator", "check_gpus", "check_links", "check_peers", "links", "look"]

_GIB: Final = 1 << 30
_ALLOCATOR: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The newer name first."""
_ROOM: Final = 2 * _GIB
_LINKS: Final = 18
"""Of a GPU at most (NVML_NVLINK_MAX_LINKS)."""
_ACTIVE: Final = 1


@dataclass(frozen=True, slots=True)
class Reach:
    """What one GPU can do with the memory of another."""

    access: bool  # its kernels can address it
    atomics: bool | None = None  # they have atomics on it; None if that is not known


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU."""

    index: int  # among those that this process sees
    name: str
    memory: int
    free: int
    # what it can do with the others' memory, by their indices
    peers: Mapping[int, Reach] = field(default_factory=dict[int, Reach])
    links: int | None = None  # NVLinks that are up; None if that is not known


def look() -> list[Gpu]:
    """The GPUs that CUDA shows to this process; makes contexts on them."""
    import torch

    if not torch.cuda.is_available():
        return []
    indices = range(torch.cuda.device_count())
    buses = {index: _bus(index) for index in indices}
    up = links(bus for bus in buses.values() if bus)
    found: list[Gpu] = []
    for index in indices:
        free, memory = torch.cuda.mem_get_info(index)
        peers = {
            other: Reach(torch.cuda.can_device_access_peer(index, other), _atomics(index, other))
            for other in indices
            if other != index
        }
        found.append(Gpu(index, torch.cuda.get_device_name(index), memory, free, peers, up.get(buses[index])))
    return found


def _bus(index: int) -> str:
    try:
        return pci_bus_id(index)
    except KvxferError:
        return ""


def _atomics(index: int, other: int) -> bool | None:
    try:
        runtime: Any = load("runtime", "asking what two GPUs can do")
        attribute = runtime.cudaDeviceP2PAttr.cudaDevP2PAttrNativeAtomicSupported
        return bool(call(runtime, "cudaDeviceGetP2PAttribute", attribute, index, other))
    except KvxferError:
        return None


def links(buses: Iterable[str], library: Any = None) -> dict[str, int]:
    """How many NVLinks of each GPU are up, by its PCI bus id; nothing where NVML is not there or does not say.

    NVIDIA's management library comes with the driver, so no package is needed.
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


def check_gpus(gpus: Sequence[Gpu], *, expected: bool) -> Iterator[Finding]:
    """Which there are, and whether they have room; `expected` if the kernel has a driver for some."""
    if not gpus and expected:
        yield fail(
            "gpus",
            "the kernel has an NVIDIA driver, but CUDA shows no GPU to this process",
            "look at nvidia-smi and CUDA_VISIBLE_DEVICES, and whether torch's CUDA is older than the driver's",
        )
    elif not gpus:
        yield skipped("gpus", "there are none")
    else:
        shown = "; ".join(
            f"{gpu.index}: {gpu.name}, {gpu.free / _GIB:.0f} of {gpu.memory / _GIB:.0f} GiB free" for gpu in gpus
        )
        full = [gpu.index for gpu in gpus if gpu.free < _ROOM]
        if full:
            yield warn("gpus", shown, f"GPU {full[0]} is nearly full: leave room for the arena (arena_bytes)")
        else:
            yield ok("gpus", shown, names=[gpu.name for gpu in gpus])


def check_peers(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Whether every GPU can address the memory of every other one, atomics included."""
    if len(gpus) < 2:
        yield skipped("peer access", "it takes two GPUs")
        return
    pairs = [(gpu.index, other, reach) for gpu in gpus for other, reach in gpu.peers.items()]
    blind = [f"{one}->{other}" for one, other, reach in pairs if not reach.access]
    bare = [f"{one}->{other}" for one, other, reach in pairs if reach.access and reach.atomics is False]
    if blind:
        yield warn(
            "peer access",
            f"none for {', '.join(blind)}: the route mapped is not possible there, and UCX copies through the host",
            "use GPUs with NVLink or under one PCIe switch; in virtual machines pass them through with their "
            "NVSwitches; switch ACS off in the BIOS",
        )
    elif bare:
        yield warn(
            "peer access",
            f"no atomics for {', '.join(bare)} (PCIe): writes could not be fenced, so mapped is not taken there",
            "use GPUs that are connected by NVLink; the other routes work",
        )
    else:
        yield ok("peer access", f"each of {len(gpus)} GPUs addresses the memory of every other one")


def check_links(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """NVLinks that are up."""
    if len(gpus) < 2:
        yield skipped("nvlink", "it takes two GPUs")
        return
    if any(gpu.links is None for gpu in gpus):
        yield skipped("nvlink", "the driver does not say (libnvidia-ml.so.1)", "look at nvidia-smi topo -m")
        return
    shown = ", ".join(f"GPU {gpu.index}: {gpu.links}" for gpu in gpus)
    if all(gpu.links for gpu in gpus):
        yield ok("nvlink", f"links that are up: {shown}", links=[gpu.links for gpu in gpus])
    else:
        yield warn(
            "nvlink",
            f"links that are up: {shown}; what has none goes over PCIe",
            "look at nvidia-smi nvlink -s; on machines with NVSwitches nvidia-fabricmanager must run",
            links=[gpu.links for gpu in gpus],
        )


def check_allocator(environment: Mapping[str, str]) -> Iterator[Finding]:
    """What torch's allocator was told; whether its memory can be exported is tried by `trial`."""
    told = next(((name, environment[name]) for name in _ALLOCATOR if environment.get(name)), None)
    if told is None:
        yield ok("allocator", "torch allocates with plain cudaMalloc (no PYTORCH_ALLOC_CONF)")
        return
    name, value = told
    wide = value.replace(" ", "").lower()
    if "expandable_segments:true" in wide:
        yield warn(
            "allocator",
            f"{name}={value}: the cache then lies in many pieces of mapped memory, which UCX cannot send over NVLink",
            "allocate the cache with expandable_segments:False (torch.cuda.memory._set_allocator_settings around it), "
            "or rely on the route mapped, if the check of torch's memory below is well",
        )
    elif "backend:cudamallocasync" in wide:
        yield warn(
            "allocator",
            f"{name}={value}: memory of CUDA's own pool has no handle for other processes",
            "allocate the cache with torch's native backend",
        )
    else:
        yield ok("allocator", f"{name}={value}")
