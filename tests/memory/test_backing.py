"""The arena's real memory. What needs a GPU is in tests/gpu; here CUDA is a stand-in."""

import ctypes
import importlib
import subprocess
import sys
import threading
from pathlib import Path

import fake_cuda
import pytest
from fake_cuda import Code, Result

from kvxfer.errors import ArenaError, FabricError, MissingExtraError
from kvxfer.memory import device as backing
from kvxfer.memory.books import InvariantError
from kvxfer.memory.device import allocate, pci_bus_id


def mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split(" ", 1)[0].split("-") for line in lines]
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


class TestPages:
    @pytest.mark.parametrize("nbytes", [1, 4096, 5000, 3 << 20])
    def test_pages_are_aligned_zero_and_writable_to_the_last_byte(self, nbytes):
        memory = allocate("cpu", nbytes)
        assert (memory.kind, memory.length, memory.closed) == ("cpu", nbytes, False)
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


@pytest.fixture
def driver():
    """CUDA for a process without a GPU; what is left of it is nothing."""
    made = fake_cuda.install()
    yield made
    fake_cuda.remove()


@pytest.fixture
def cuda(driver):
    return driver.state


def allocated(cuda):
    """What there is: bytes, what kind of memory it is, and of which device."""
    return [(size, memory.kinds, memory.device) for size, memory in cuda.allocated.values()]


class TestCuda:
    @pytest.mark.parametrize(("kind", "made"), [("cuda", 0), ("pinned", fake_cuda.PINNED | fake_cuda.PORTABLE)])
    def test_whole_granules_are_allocated_on_the_device_and_go_back_once(self, cuda, kind, made):
        memory = allocate(kind, (2 << 20) + 1, 1)
        assert (memory.kind, memory.length) == (kind, (2 << 20) + 1)
        assert allocated(cuda) == [(4 << 20, made, 1)]
        assert memory.address in cuda.allocated
        memory.close()
        assert cuda.allocated == {}
        with pytest.raises(InvariantError):
            memory.close()

    @pytest.mark.parametrize("kind", ["cuda", "fabric", "pinned"])
    def test_the_callers_thread_keeps_its_device(self, cuda, kind):
        allocate(kind, 4096, 0).close()
        assert threading.get_ident() not in cuda.threads

    @pytest.mark.parametrize(
        ("kind", "function", "code", "error", "words"),
        [
            ("cuda", "cudaMalloc", Code.cudaErrorMemoryAllocation, ArenaError, r"\(2097152\).*cudaErrorMemoryAll"),
            ("fabric", "cuMemCreate", Result.CUDA_ERROR_OUT_OF_MEMORY, ArenaError, "OUT_OF_MEMORY; lower arena_bytes"),
            ("cuda", "cudaMalloc", Code.cudaErrorInvalidDevice, FabricError, r"\(.*cudaErrorInvalidDevice"),
            ("cuda", "cudaSetDevice", Code.cudaErrorInvalidDevice, FabricError, r"\(.*cudaErrorInvalidDevice"),
            ("pinned", "cudaSetDevice", RuntimeError("Failed to dlopen libcuda.so.1"), FabricError, "dlopen"),
        ],
    )
    def test_only_out_of_memory_is_an_arena_error_and_codes_have_their_names(
        self, cuda, kind, function, code, error, words
    ):
        cuda.refuses[function] = code
        with pytest.raises(error, match=f"{function}.*{words}"):
            allocate(kind, 4096, 9)

    def test_a_failing_free_is_told_and_not_tried_again(self, cuda):
        memory = allocate("cuda", 4096, 0)
        cuda.refuses["cudaFree"] = Code.cudaErrorInvalidDevice
        with pytest.raises(FabricError, match="cudaFree"):
            memory.close()
        with pytest.raises(InvariantError):
            memory.close()
        assert cuda.calls.count("cudaFree") == 1

    def test_misaligned_memory_is_given_back(self, cuda, monkeypatch):
        monkeypatch.setattr(backing, "_ALIGNMENT", 1 << 60)
        with pytest.raises(FabricError, match=str(1 << 60)):
            allocate("cuda", 4096, 0)
        assert cuda.allocated == {}

    def test_leaked_memory_is_never_freed(self, cuda):
        memory = allocate("cuda", 4096, 0)
        memory.leak()
        with pytest.raises(InvariantError):
            memory.close()
        assert len(cuda.allocated) == 1
        backing._leaked.pop()

    def test_where_a_gpu_sits_is_written_as_sysfs_does(self, cuda):
        assert pci_bus_id(0x1B) == "0000:1b:00.0"
        cuda.refuses["cudaDeviceGetPCIBusId"] = Code.cudaErrorInvalidDevice
        with pytest.raises(FabricError, match="cudaErrorInvalidDevice"):
            pci_bus_id(3)

    @pytest.mark.parametrize("kind", ["cuda", "fabric", "pinned"])
    def test_without_the_extra_the_command_is_named(self, monkeypatch, kind):
        def missing(name):
            raise ModuleNotFoundError(name)

        monkeypatch.setattr(importlib, "import_module", missing)
        with pytest.raises(MissingExtraError, match=r"pip install cuda-bindings"):
            allocate(kind, 4096, 0)


class TestFabric:
    def test_memory_is_made_for_fabric_handles_and_for_nics(self, cuda):
        memory = allocate("fabric", 5 << 20, 1)
        assert (memory.kind, memory.length) == ("fabric", 5 << 20)
        (properties,) = cuda.made
        assert (properties.type, properties.allocFlags.gpuDirectRDMACapable) == ("pinned", 1)
        assert properties.requestedHandleTypes == fake_cuda.FABRIC
        assert vars(properties.location) == {"type": "device", "id": 1}
        assert cuda.admitted == [(memory.address, 8 << 20, 1)]
        assert cuda.live() == (0, 1, 1), "the mapping keeps it"
        (ctypes.c_ubyte * memory.length).from_address(memory.address)[-1] = 7
        memory.close()
        assert cuda.live() == (0, 0, 0)

    def test_without_fabric_handles_nothing_is_made(self, cuda):
        cuda.attributes[fake_cuda.FABRIC_SUPPORTED] = 0
        with pytest.raises(FabricError, match="GPU 1 has no fabric handles"):
            allocate("fabric", 4096, 1)
        assert cuda.made == []

    def test_a_gpu_that_no_nic_reaches_is_not_asked_for_it(self, cuda):
        cuda.attributes[fake_cuda.RDMA_SUPPORTED] = 0
        allocate("fabric", 4096, 1).close()
        assert cuda.made[0].allocFlags.gpuDirectRDMACapable == 0

    @pytest.mark.parametrize(
        "function", ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
    )
    def test_a_refusal_is_named_and_what_was_made_goes_back(self, cuda, function):
        cuda.fails[function] = 0
        with pytest.raises(FabricError, match=rf"{function}\(.*CUDA_ERROR_NOT_PERMITTED"):
            allocate("fabric", 4096, 1)
        assert cuda.live() == (0, 0, 0)

    def test_a_failing_unmap_keeps_nothing_else_from_going_back(self, cuda):
        memory = allocate("fabric", 4096, 1)
        cuda.fails["cuMemUnmap"] = 0
        with pytest.raises(FabricError, match="cuMemUnmap"):
            memory.close()
        assert cuda.calls[-2:] == ["cuMemUnmap", "cuMemAddressFree"]
