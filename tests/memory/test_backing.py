"""The arena's real memory. What needs a GPU is in tests/gpu; here CUDA is a stand-in that counts."""

import ctypes
import enum
import importlib
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import cast

import pytest

from kvxfer.errors import ArenaError, FabricError, MissingExtraError
from kvxfer.memory import device as backing
from kvxfer.memory.books import InvariantError
from kvxfer.memory.device import Kind, allocate, pci_bus_id


def mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split(" ", 1)[0].split("-") for line in lines]
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


class TestPages:
    @pytest.mark.parametrize("nbytes", [1, 4096, 5000, 3 << 20])
    def test_pages_are_aligned_zero_and_writable_to_the_last_byte(self, nbytes):
        memory = allocate("cpu", nbytes)
        assert (memory.kind, memory.length, memory.device, memory.closed) == ("cpu", nbytes, None, False)
        assert memory.address % 4096 == 0
        view = (ctypes.c_ubyte * nbytes).from_address(memory.address)
        assert view[0] == view[-1] == 0
        view[-1] = 7
        assert view[-1] == 7
        memory.close()

    def test_close_unmaps_exactly_once(self):
        memory = allocate("cpu", 1 << 20)
        address = memory.address
        assert mapped(address)
        memory.close()
        assert not mapped(address)
        assert memory.closed
        for again in (memory.close, memory.leak):
            with pytest.raises(InvariantError, match="closed"):
                again()

    def test_what_is_leaked_stays(self):
        memory = allocate("cpu", 4096)
        address = memory.address
        memory.leak()
        assert memory.closed
        del memory
        assert mapped(address)
        backing._leaked.pop()()
        assert not mapped(address)

    def test_pages_are_touched_lazily(self):
        def resident() -> int:
            return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

        before = resident()
        memory = allocate("cpu", 256 << 20)
        assert resident() - before < 16 << 20
        memory.close()

    def test_a_forked_child_does_not_have_them(self):
        program = (
            "import os\n"
            "from kvxfer.memory.device import allocate\n"
            "memory = allocate('cpu', 1 << 20)\n"
            "pid = os.fork()\n"
            "if pid == 0:\n"
            "    maps = open('/proc/self/maps').read()\n"
            "    os._exit(any(int(a, 16) <= memory.address < int(b, 16) for a, b in\n"
            "                 (line.split()[0].split('-') for line in maps.splitlines())))\n"
            "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        )
        assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0

    @pytest.mark.parametrize("nbytes", [0, -1, 1 << 62, 1 << 80])
    def test_impossible_sizes_are_refused(self, nbytes):
        with pytest.raises(ArenaError, match=str(nbytes)):
            allocate("cpu", nbytes)

    def test_an_unknown_kind_is_refused(self):
        with pytest.raises(ArenaError, match="'disk' is unknown"):
            allocate(cast("Kind", "disk"), 4096)

    def test_importing_the_books_imports_neither_torch_nor_cuda_nor_asyncio(self):
        program = (
            "import importlib.util, sys, types\n"
            "package = types.ModuleType('kvxfer')  # without its __init__, which may import more\n"
            "package.__path__ = importlib.util.find_spec('kvxfer').submodule_search_locations\n"
            "sys.modules['kvxfer'] = package\n"
            "import kvxfer.memory.books, kvxfer.memory.device\n"
            "print(sorted({'torch', 'cuda', 'asyncio', 'nixl', 'kvxfer.copy'} & sys.modules.keys()))\n"
        )
        done = subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True)
        assert done.stdout.strip() == "[]"


class Code(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorInvalidDevice = 101


class StandIn(types.ModuleType):
    """`cuda.bindings.runtime` with one device, which hands out host numbers and counts what is freed."""

    success: enum.Enum = Code.cudaSuccess

    def __init__(self, name="cuda.bindings.runtime"):
        super().__init__(name)
        self.calls: list[tuple] = []
        self.threads: set[int] = set()
        self.fails: dict[str, object] = {}
        self.address = 7 << 21

    def _answer(self, name: str, *arguments, value=None):
        self.calls.append((name, *arguments))
        self.threads.add(threading.get_ident())
        failure = self.fails.get(name, self.success)
        if isinstance(failure, Exception):
            raise failure
        return (failure,) if value is None else (failure, value)

    def cudaSetDevice(self, device):
        return self._answer("cudaSetDevice", device)

    def cudaMalloc(self, nbytes):
        return self._answer("cudaMalloc", nbytes, value=self.address)

    def cudaFree(self, address):
        return self._answer("cudaFree", address)

    def cudaHostAlloc(self, nbytes, flags):
        return self._answer("cudaHostAlloc", nbytes, flags, value=self.address)

    def cudaFreeHost(self, address):
        return self._answer("cudaFreeHost", address)

    def cudaDeviceGetPCIBusId(self, length, device):
        return self._answer("cudaDeviceGetPCIBusId", length, device, value=b"0000:1B:00.0\0".ljust(length))


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_PERMITTED = 800


def named(*names):
    """An enumeration of cuda-bindings."""
    return types.SimpleNamespace(**{name: name for name in names})


class DriverStandIn(StandIn):
    """`cuda.bindings.driver`, likewise, with a granularity of 4 MiB."""

    success = Result.CUDA_SUCCESS
    CUdevice_attribute = named(
        "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED",
        "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
    )
    CUmemAllocationType = named("CU_MEM_ALLOCATION_TYPE_PINNED")
    CUmemLocationType = named("CU_MEM_LOCATION_TYPE_DEVICE")
    CUmemAllocationHandleType = named("CU_MEM_HANDLE_TYPE_FABRIC")
    CUmemAllocationGranularity_flags = named("CU_MEM_ALLOC_GRANULARITY_MINIMUM")
    CUmemAccess_flags = named("CU_MEM_ACCESS_FLAGS_PROT_READWRITE")

    def __init__(self):
        super().__init__("cuda.bindings.driver")
        self.attributes = dict.fromkeys(vars(self.CUdevice_attribute), 1)
        self.made: list[types.SimpleNamespace] = []

    def CUmemAllocationProp(self):
        location, flags = types.SimpleNamespace(), types.SimpleNamespace()
        self.made.append(types.SimpleNamespace(location=location, allocFlags=flags))
        return self.made[-1]

    def CUmemAccessDesc(self):
        return types.SimpleNamespace(location=types.SimpleNamespace())

    def cuInit(self, flags):
        return self._answer("cuInit", flags)

    def cuDeviceGet(self, ordinal):
        return self._answer("cuDeviceGet", ordinal, value=ordinal + 100)

    def cuDeviceGetAttribute(self, attribute, device):
        return self._answer("cuDeviceGetAttribute", attribute, device, value=self.attributes[attribute])

    def cuMemGetAllocationGranularity(self, properties, option):
        return self._answer("cuMemGetAllocationGranularity", value=4 << 20)

    def cuMemCreate(self, nbytes, properties, flags):
        return self._answer("cuMemCreate", nbytes, value="handle")

    def cuMemExportToShareableHandle(self, handle, kind, flags):
        return self._answer("cuMemExportToShareableHandle", handle, kind, value=b"shareable")

    def cuMemAddressReserve(self, nbytes, alignment, address, flags):
        return self._answer("cuMemAddressReserve", nbytes, value=self.address)

    def cuMemMap(self, address, nbytes, offset, handle, flags):
        return self._answer("cuMemMap", address, nbytes, handle)

    def cuMemSetAccess(self, address, nbytes, access, count):
        self.made += access
        return self._answer("cuMemSetAccess", address, nbytes, count)

    def cuMemUnmap(self, address, nbytes):
        return self._answer("cuMemUnmap", address, nbytes)

    def cuMemAddressFree(self, address, nbytes):
        return self._answer("cuMemAddressFree", address, nbytes)

    def cuMemRelease(self, handle):
        return self._answer("cuMemRelease", handle)


@pytest.fixture
def cuda(monkeypatch):
    module = StandIn()
    monkeypatch.setattr(importlib, "import_module", {"cuda.bindings.runtime": module}.__getitem__)
    return module


class TestCuda:
    def test_whole_granules_come_from_plain_malloc_and_go_back_once(self, cuda):
        memory = allocate("cuda", (2 << 20) + 1, 1)
        assert (memory.kind, memory.address, memory.length, memory.device) == ("cuda", 7 << 21, (2 << 20) + 1, 1)
        assert cuda.calls == [("cudaSetDevice", 1), ("cudaMalloc", 4 << 20)]
        cuda.calls.clear()
        memory.close()
        with pytest.raises(InvariantError):
            memory.close()
        assert cuda.calls == [("cudaSetDevice", 1), ("cudaFree", 7 << 21)]

    def test_pinned_memory_is_portable_and_goes_back_by_its_own_call(self, cuda):
        memory = allocate("pinned", 5000, 0)
        memory.close()
        assert cuda.calls == [
            ("cudaSetDevice", 0),
            ("cudaHostAlloc", 2 << 20, 1),
            ("cudaSetDevice", 0),
            ("cudaFreeHost", 7 << 21),
        ]

    def test_the_callers_thread_keeps_its_device(self, cuda):
        allocate("cuda", 4096, 0).close()
        assert threading.get_ident() not in cuda.threads

    def test_out_of_memory_is_an_arena_error_with_the_name_of_the_code(self, cuda):
        cuda.fails["cudaMalloc"] = Code.cudaErrorMemoryAllocation
        with pytest.raises(ArenaError, match=r"cudaMalloc\(2097152\).*cudaErrorMemoryAllocation"):
            allocate("cuda", 4096, 0)

    @pytest.mark.parametrize("function", ["cudaSetDevice", "cudaMalloc"])
    def test_any_other_code_is_a_fabric_error_with_its_name(self, cuda, function):
        cuda.fails[function] = Code.cudaErrorInvalidDevice
        with pytest.raises(FabricError, match=rf"{function}\(.*cudaErrorInvalidDevice"):
            allocate("cuda", 4096, 9)

    def test_a_failing_free_is_told_and_not_tried_again(self, cuda):
        memory = allocate("cuda", 4096, 0)
        cuda.fails["cudaFree"] = Code.cudaErrorInvalidDevice
        with pytest.raises(FabricError, match="cudaFree"):
            memory.close()
        with pytest.raises(InvariantError):
            memory.close()
        assert [call[0] for call in cuda.calls].count("cudaFree") == 1

    def test_a_missing_driver_is_a_fabric_error(self, cuda):
        cuda.fails["cudaSetDevice"] = RuntimeError("Failed to dlopen libcuda.so.1")
        with pytest.raises(FabricError, match="dlopen"):
            allocate("pinned", 4096, 0)

    def test_misaligned_memory_is_given_back(self, cuda):
        cuda.address += 512
        with pytest.raises(FabricError, match="4096"):
            allocate("cuda", 4096, 0)
        assert cuda.calls[-1] == ("cudaFree", cuda.address)

    def test_leaked_memory_is_never_freed(self, cuda):
        memory = allocate("cuda", 4096, 0)
        memory.leak()
        with pytest.raises(InvariantError):
            memory.close()
        assert "cudaFree" not in [call[0] for call in cuda.calls]
        backing._leaked.pop()

    def test_where_a_gpu_sits_is_written_as_sysfs_does(self, cuda):
        assert pci_bus_id(3) == "0000:1b:00.0"
        assert cuda.calls == [("cudaDeviceGetPCIBusId", 32, 3)]
        cuda.fails["cudaDeviceGetPCIBusId"] = Code.cudaErrorInvalidDevice
        with pytest.raises(FabricError, match="cudaErrorInvalidDevice"):
            pci_bus_id(3)

    @pytest.mark.parametrize("kind", ["cuda", "fabric", "pinned"])
    @pytest.mark.parametrize("device", [None, -1])
    def test_a_gpu_must_be_named(self, cuda, kind, device):
        with pytest.raises(ArenaError, match="index of a GPU"):
            allocate(kind, 4096, device)
        assert cuda.calls == []

    @pytest.mark.parametrize("kind", ["cuda", "fabric", "pinned"])
    def test_without_the_extra_the_command_is_named(self, monkeypatch, kind):
        def missing(name):
            raise ModuleNotFoundError(name)

        monkeypatch.setattr(importlib, "import_module", missing)
        with pytest.raises(MissingExtraError, match=r"pip install cuda-bindings"):
            allocate(kind, 4096, 0)


@pytest.fixture
def driver(monkeypatch):
    modules = {"cuda.bindings.runtime": StandIn(), "cuda.bindings.driver": DriverStandIn()}
    monkeypatch.setattr(importlib, "import_module", modules.__getitem__)
    return modules["cuda.bindings.driver"]


GIVEN_BACK = {
    "cuMemCreate": [],
    "cuMemExportToShareableHandle": ["cuMemRelease"],
    "cuMemAddressReserve": ["cuMemRelease"],
    "cuMemMap": ["cuMemAddressFree", "cuMemRelease"],
    "cuMemSetAccess": ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"],
}
"""What must be undone when a step fails."""


class TestFabric:
    def test_memory_is_made_for_fabric_handles_and_for_nics(self, driver):
        memory = allocate("fabric", 5 << 20, 1)
        assert (memory.kind, memory.address, memory.length, memory.device) == ("fabric", 7 << 21, 5 << 20, 1)
        properties, access = driver.made
        assert properties.requestedHandleTypes == "CU_MEM_HANDLE_TYPE_FABRIC"
        assert properties.type == "CU_MEM_ALLOCATION_TYPE_PINNED"
        assert properties.allocFlags.gpuDirectRDMACapable == 1
        assert vars(properties.location) == {"type": "CU_MEM_LOCATION_TYPE_DEVICE", "id": 1}
        assert (access.location, access.flags) == (properties.location, "CU_MEM_ACCESS_FLAGS_PROT_READWRITE")
        assert driver.calls[4:] == [
            ("cuMemGetAllocationGranularity",),
            ("cuMemCreate", 8 << 20),
            ("cuMemExportToShareableHandle", "handle", "CU_MEM_HANDLE_TYPE_FABRIC"),
            ("cuMemAddressReserve", 8 << 20),
            ("cuMemMap", 7 << 21, 8 << 20, "handle"),
            ("cuMemSetAccess", 7 << 21, 8 << 20, 1),
            ("cuMemRelease", "handle"),
        ]
        driver.calls.clear()
        memory.close()
        assert driver.calls == [("cuMemUnmap", 7 << 21, 8 << 20), ("cuMemAddressFree", 7 << 21, 8 << 20)]
        assert threading.get_ident() not in driver.threads

    def test_without_fabric_handles_nothing_is_made(self, driver):
        driver.attributes["CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED"] = 0
        with pytest.raises(FabricError, match="GPU 1 has no fabric handles"):
            allocate("fabric", 4096, 1)
        assert "cuMemCreate" not in [call[0] for call in driver.calls]

    def test_a_gpu_that_no_nic_reaches_is_not_asked_for_it(self, driver):
        driver.attributes["CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"] = 0
        allocate("fabric", 4096, 1).close()
        assert driver.made[0].allocFlags.gpuDirectRDMACapable == 0

    @pytest.mark.parametrize("function", GIVEN_BACK)
    def test_a_refusal_is_named_and_what_was_made_goes_back(self, driver, function):
        driver.fails[function] = Result.CUDA_ERROR_NOT_PERMITTED
        with pytest.raises(FabricError, match=rf"{function}\(.*CUDA_ERROR_NOT_PERMITTED"):
            allocate("fabric", 4096, 1)
        names = [call[0] for call in driver.calls]
        assert names[names.index(function) + 1 :] == GIVEN_BACK[function]

    def test_out_of_memory_is_an_arena_error(self, driver):
        driver.fails["cuMemCreate"] = Result.CUDA_ERROR_OUT_OF_MEMORY
        with pytest.raises(ArenaError, match="CUDA_ERROR_OUT_OF_MEMORY; lower arena_bytes"):
            allocate("fabric", 4096, 1)

    def test_a_failing_unmap_keeps_nothing_else_from_going_back(self, driver):
        memory = allocate("fabric", 4096, 1)
        driver.calls.clear()
        driver.fails["cuMemUnmap"] = Result.CUDA_ERROR_NOT_PERMITTED
        with pytest.raises(FabricError, match="cuMemUnmap"):
            memory.close()
        assert [call[0] for call in driver.calls] == ["cuMemUnmap", "cuMemAddressFree"]
