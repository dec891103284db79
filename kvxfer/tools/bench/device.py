"""What differs between CPU and GPU memory: allocating, waiting, and naming the hardware."""

from collections.abc import Sequence
from typing import Final, Literal

import torch

import kvxfer
from kvxfer.errors import FabricError, UsageError
from kvxfer.mapped.host import tensor_at
from kvxfer.memory.device import Backing, allocate
from kvxfer.tools.shown import size

__all__ = [
    "Buffer",
    "Kind",
    "available_bytes",
    "choose",
    "device_names",
    "empty",
    "index_of",
    "lacking",
    "make_current",
    "sides",
    "synchronize",
]

Kind = Literal["cpu", "cuda"]
_ROOM: Final = 1 << 30


def choose(wanted: str) -> Kind:
    """The kind of device for `cpu`, `cuda` or `auto`.

    Raises:
        UsageError: If there is no such device.
    """
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise UsageError("--device cuda: torch finds no CUDA device here")
    return "cuda" if there and wanted != "cpu" else "cpu"


def sides(kind: Kind) -> dict[str, str]:
    """Devices of the prefill and of the decode side: two GPUs where there are two."""
    if kind == "cpu":
        return {"prefill": "cpu", "decode": "cpu"}
    return {"prefill": "cuda:0", "decode": f"cuda:{min(1, torch.cuda.device_count() - 1)}"}


def index_of(device: str) -> int | None:
    """Index of a GPU; None for `cpu`."""
    return None if device == "cpu" else int(device.partition(":")[2] or 0)


def make_current(device: str) -> None:
    """Make a device this thread's current one; on a CPU, keep torch to one thread: the other side needs one as well."""
    index = index_of(device)
    if index is None:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(index)


def synchronize(device: str) -> None:
    """Wait for everything that was launched on a GPU."""
    index = index_of(device)
    if index is not None:
        torch.cuda.synchronize(index)


def empty(shape: Sequence[int], device: str, *, shared: bool = False) -> torch.Tensor:
    """An uninitialised bfloat16 tensor; `shared` asks for CPU memory that other processes can map."""
    if shared and device == "cpu":
        return kvxfer.shared_empty(tuple(shape), dtype=torch.bfloat16)
    return torch.empty(tuple(shape), dtype=torch.bfloat16, device=device)


def available_bytes(device: str) -> int:
    """Memory that can be had now."""
    index = index_of(device)
    if index is not None:
        return int(torch.cuda.mem_get_info(index)[0])
    with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123 - Linux's own
        found = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return found["MemAvailable"] * 1024


def lacking(nbytes: int, free: int) -> str:
    """Why a benchmark of so many bytes cannot run, beside some room for what is compared; empty if it can."""
    needed = nbytes + _ROOM
    return f"it needs {size(needed)} of memory, and {size(free)} are free" if needed > free else ""


def device_names(kind: Kind) -> list[str]:
    """Names of the devices of both sides; empty on a CPU."""
    return [torch.cuda.get_device_name(index_of(device)) for device in sides(kind).values()] if kind == "cuda" else []


class Buffer:
    """Plain memory with an address, for references: pages, or cudaMalloc, whose start an IPC handle can name.

    `bytes` is the same memory as a tensor, not to be used after `close`. Kind and index are as NIXL has them.
    """

    def __init__(self, device: str, nbytes: int) -> None:
        index = index_of(device)
        self._backing: Final[Backing] = allocate("cpu" if index is None else "cuda", nbytes, index or 0)
        self.address: Final = self._backing.address
        self.nbytes: Final = nbytes
        self.index: Final = index or 0
        self.kind: Final = "DRAM" if index is None else "VRAM"
        self.bytes = tensor_at(self.address, nbytes, torch.device(device))
        if self.bytes.data_ptr() != self.address:
            raise FabricError(f"torch made a copy of {nbytes} bytes on {device} instead of taking them as they are")

    def close(self) -> None:
        """Free it. Nobody may use its address afterwards."""
        self._backing.close()
