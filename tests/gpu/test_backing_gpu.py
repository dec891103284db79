"""The arena's memory on a real GPU."""

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvxfer.errors import ArenaError, FabricError
from kvxfer.memory.device import allocate, pci_bus_id
from kvxfer.runtime import place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="cuda-bindings is not installed"),
]


def as_tensor(address: int, nbytes: int) -> torch.Tensor:
    """GPU memory at `address` as a tensor of bytes that does not own it."""

    interface = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device="cuda:0")


@pytest.mark.parametrize("nbytes", [1, 4096, (64 << 20) + 5])
def test_gpu_memory_is_real_aligned_and_not_torchs(nbytes):
    torch.cuda.init()
    before = torch.cuda.memory_reserved(0)
    memory = allocate("cuda", nbytes, 0)
    assert memory.address % 4096 == 0
    tensor = as_tensor(memory.address, nbytes)
    tensor.fill_(7)
    torch.cuda.synchronize()
    assert int(tensor[-1]) == 7
    del tensor
    assert torch.cuda.memory_reserved(0) - before <= 4 << 20  # scratch of the fill alone
    memory.close()


def test_an_allocation_has_its_range_to_itself():
    """A handle exports the whole cudaMalloc block: nothing else may share it, however small the arena."""
    pointers = [allocate("cuda", 4096, 0) for _ in range(4)]
    for memory in pointers:
        assert memory.address % (2 << 20) == 0
    assert len({memory.address >> 21 for memory in pointers}) == 4
    for memory in pointers:
        memory.close()


def test_close_gives_the_memory_back():
    torch.cuda.init()
    _, total = torch.cuda.mem_get_info(0)
    for _ in range(total >> 30):  # as many would fill it
        memory = allocate("cuda", 1 << 30, 0)
        as_tensor(memory.address, memory.length).fill_(1)
        memory.close()


def test_out_of_memory_is_an_arena_error_and_leaves_no_error_behind():
    with pytest.raises(ArenaError, match="cudaErrorMemoryAllocation"):
        allocate("cuda", 1 << 44, 0)
    assert int((torch.ones(4, device="cuda:0") * 2).sum()) == 8


def test_a_device_that_is_not_there_is_a_fabric_error():
    with pytest.raises(FabricError, match="cudaErrorInvalidDevice"):
        allocate("cuda", 4096, 99)


@pytest.mark.parametrize("nbytes", [5000, 1 << 20, (8 << 20) + 5])
def test_pinned_memory_is_pinned_and_both_sides_see_it(nbytes):
    torch.cuda.init()  # before that torch calls no memory pinned, whoever has pinned it
    memory = allocate("pinned", nbytes, 0)
    assert memory.address % 4096 == 0
    host = torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(memory.address), dtype=torch.uint8)
    assert host.data_ptr() == memory.address
    assert host.is_pinned()
    host.fill_(3)
    device = host.to("cuda:0", non_blocking=True)
    torch.cuda.synchronize()
    assert int(device.sum()) == 3 * nbytes
    del host
    memory.close()


def test_fabric_memory_works_or_is_refused_by_name():
    """Which of the two depends on the machine; either way nothing stays behind: as many would fill the GPU."""
    torch.cuda.init()
    _, total = torch.cuda.mem_get_info(0)
    for _ in range(total >> 30):
        memory, refusal = None, ""
        try:
            memory = allocate("fabric", (1 << 30) + 5, 0)
        except FabricError as error:
            refusal = str(error)
        if memory is None:
            assert "no fabric handles" in refusal or "CUDA_ERROR_NOT" in refusal, refusal
        else:
            tensor = as_tensor(memory.address, memory.length)
            tensor.fill_(7)
            torch.cuda.synchronize()
            assert int(tensor[-1]) == 7
            del tensor
            memory.close()
    assert int((torch.ones(4, device="cuda:0") * 2).sum()) == 8, "a refusal leaves no error behind"


def test_the_gpu_is_found_in_sysfs():
    name = pci_bus_id(0)
    if not Path("/sys/bus/pci/devices", name).exists():
        pytest.skip(f"this system does not show {name} in /sys")
    found = place("auto", 0, bus_id=pci_bus_id)
    assert found.cpus < os.sched_getaffinity(0)
    assert "NUMA node" in found.why


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU only")
def test_the_current_device_stays_and_no_context_appears_on_it():
    program = (
        "import torch\n"
        "from kvxfer.memory.device import allocate\n"
        "memory = allocate('cuda', 4096, 1)\n"
        "has = [torch._C._cuda_hasPrimaryContext(index) for index in (0, 1)]\n"
        "memory.close()\n"
        "assert has == [False, True], has\n"
        "assert torch.cuda.current_device() == 0\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
