"""CUDA for processes without a GPU: `cuda.bindings.driver` and `.runtime`, whose memory is anonymous files.

Memory is mapped with the rules of the real calls (whole reservations, one mapping unmapped at a time, nothing readable
before access was set), so addresses are real, and another process that opens a handle sees the same bytes.
"""

import ctypes
import enum
import itertools
import mmap
import os
import sys
import threading
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

GRANULE = 64 << 10
LEAST = 4 << 20
"""What memory that is made must be a multiple of."""
FILE, FABRIC = 1, 8
PINNED, PORTABLE = 16, 1
FABRIC_SUPPORTED = "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED"
RDMA_SUPPORTED = "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FIXED, _NORESERVE, _NONE = 0x10, 0x4000, 0
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_NOT_PERMITTED = 800


class Code(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInvalidDevice = 101
    cudaErrorPeerAccessAlreadyEnabled = 704


class Kinds(enum.IntEnum):
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = FILE
    CU_MEM_HANDLE_TYPE_FABRIC = FABRIC


class Refusal(Exception):
    """A code other than success."""


@dataclass(eq=False)
class Memory:
    """What cuMemCreate made: a file, and how many handles and mappings keep it; or what was allocated on a device."""

    descriptor: int
    size: int
    kinds: int
    users: int = 0
    device: int = 0

    def leave(self):
        self.users -= 1
        if not self.users:
            os.close(self.descriptor)


@dataclass
class State:
    """Everything that this process has open.

    `fails`: name of a call, and how many succeed before it is refused. `refuses`: the code of another refusal, or what
    the call raises.
    """

    handles: dict[int, Memory] = field(default_factory=dict)
    mappings: dict[int, tuple[int, Memory]] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)
    allocated: dict[int, tuple[int, Memory]] = field(default_factory=dict)
    admitted: list[tuple[int, int, int]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    fails: dict[str, int] = field(default_factory=dict)
    refuses: dict[str, Any] = field(default_factory=dict)
    threads: set[int] = field(default_factory=set)
    made: list[Any] = field(default_factory=list)  # of what properties memory was
    attributes: dict[str, int] = field(default_factory=lambda: dict.fromkeys((FABRIC_SUPPORTED, RDMA_SUPPORTED), 1))
    peers: bool = True
    atomics: bool = True

    def live(self):
        return len(self.handles), len(self.mappings), len(self.reserved)


def new_file(size):
    descriptor = os.memfd_create("gpu", 0)  # not closed in children, as CUDA leaves its own
    os.ftruncate(descriptor, size)
    return descriptor


def place(address, size, protection, descriptor=-1):
    flags = mmap.MAP_SHARED if descriptor >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    got = _libc.mmap(address, size, protection, flags | (_FIXED if address else 0), descriptor, 0)
    if got in {None, ctypes.c_void_p(-1).value}:
        raise Refusal(Result.CUDA_ERROR_OUT_OF_MEMORY)
    return got


def answering(results, errors):
    """A call of cuda-bindings from one that returns a value or raises a refusal."""

    def wrap(function):
        def call(self, *arguments):
            name = function.__name__
            self.state.calls.append(name)
            self.state.threads.add(threading.get_ident())
            try:
                if isinstance(refused := self.state.refuses.get(name), Exception):
                    raise refused
                if refused is not None:
                    raise Refusal(refused)
                if self.state.fails.get(name, 1 << 30) <= 0:
                    raise Refusal(errors)
                if name in self.state.fails:
                    self.state.fails[name] -= 1
                values = function(self, *arguments)
            except Refusal as refusal:
                return refusal.args[0], None
            if isinstance(values, tuple):
                return results, *values
            return (results,) if values is None else (results, values)

        return call

    return wrap


driver_call = answering(Result.CUDA_SUCCESS, Result.CUDA_ERROR_NOT_PERMITTED)
runtime_call = answering(Code.cudaSuccess, Code.cudaErrorInvalidValue)


class Driver(ModuleType):
    CUdevice_attribute = SimpleNamespace(**{name: name for name in (FABRIC_SUPPORTED, RDMA_SUPPORTED)})
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM="minimum")
    CUmemAllocationHandleType = Kinds
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="read and write")

    def __init__(self, state):
        super().__init__("cuda.bindings.driver")
        self.state = state
        self.numbers = itertools.count(1)

    def CUmemAccessDesc(self):
        return SimpleNamespace(location=SimpleNamespace())

    def CUmemAllocationProp(self):
        return SimpleNamespace(location=SimpleNamespace(), allocFlags=SimpleNamespace())

    @driver_call
    def cuInit(self, flags):
        return None

    @driver_call
    def cuDeviceGet(self, index):
        return f"gpu {index}"

    @driver_call
    def cuDeviceGetAttribute(self, name, gpu):
        return self.state.attributes[name]

    @driver_call
    def cuMemGetAllocationGranularity(self, properties, which):
        return LEAST

    @driver_call
    def cuMemCreate(self, size, properties, flags):
        if size % LEAST:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        self.state.made.append(properties)
        return self.create(size, properties.requestedHandleTypes)

    def _handle(self, memory):
        memory.users += 1
        number = next(self.numbers)
        self.state.handles[number] = memory
        return number

    def _memory(self, handle):
        if handle not in self.state.handles:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        return self.state.handles[handle]

    def create(self, size, kinds):
        return self._handle(Memory(new_file(size), size, kinds))

    @driver_call
    def cuMemGetAddressRange(self, address):
        for base, (size, _) in (*self.state.mappings.items(), *self.state.allocated.items()):
            if base <= address < base + size:
                return base, size
        raise Refusal(Result.CUDA_ERROR_NOT_FOUND)

    @driver_call
    def cuMemRetainAllocationHandle(self, address):
        for base, (size, memory) in self.state.mappings.items():
            if base <= address < base + size:
                return self._handle(memory)
        raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)

    @driver_call
    def cuMemRelease(self, handle):
        self._memory(handle).leave()
        del self.state.handles[handle]

    @driver_call
    def cuMemExportToShareableHandle(self, handle, kind, flags):
        memory = self._memory(handle)
        if not memory.kinds & kind:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        if kind == FILE:
            descriptor = os.dup(memory.descriptor)
            os.set_inheritable(descriptor, True)
            return descriptor
        return SimpleNamespace(data=f"/proc/{os.getpid()}/fd/{memory.descriptor}".encode().ljust(64, b"\0"))

    @driver_call
    def cuMemImportFromShareableHandle(self, given, kind):
        try:
            if kind == FABRIC:
                path = ctypes.string_at(given, 64).rstrip(b"\0").decode()
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            else:
                descriptor = os.dup(given)
            size = os.fstat(descriptor).st_size
        except (OSError, ValueError) as error:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE) from error
        return self._handle(Memory(descriptor, size, 0))

    @driver_call
    def cuMemAddressReserve(self, size, alignment, address, flags):
        got = place(None, size, _NONE)
        self.state.reserved[got] = size
        return got

    @driver_call
    def cuMemAddressFree(self, address, size):
        within = any(address <= base < address + size for base in self.state.mappings)
        if self.state.reserved.get(address) != size or within:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        del self.state.reserved[address]
        _libc.munmap(address, size)

    @driver_call
    def cuMemMap(self, address, size, offset, handle, flags):
        memory = self._memory(handle)
        inside = any(base <= address and address + size <= base + room for base, room in self.state.reserved.items())
        if size > memory.size or offset or not inside or address in self.state.mappings:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        place(address, size, _NONE, memory.descriptor)
        memory.users += 1
        self.state.mappings[address] = (size, memory)

    @driver_call
    def cuMemUnmap(self, address, size):
        if self.state.mappings.get(address, (0,))[0] != size:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        _, memory = self.state.mappings.pop(address)
        place(address, size, _NONE)
        memory.leave()

    @driver_call
    def cuMemSetAccess(self, address, size, access, count):
        at = address
        while at < address + size:
            if at not in self.state.mappings:
                raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
            at += self.state.mappings[at][0]
        if at != address + size or _libc.mprotect(address, size, _READ_WRITE):
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        self.state.admitted += [(address, size, one.location.id) for one in access]


class Runtime(ModuleType):
    cudaError_t = Code
    cudaIpcMemLazyEnablePeerAccess = 1
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1)
    cudaDeviceP2PAttr = SimpleNamespace(cudaDevP2PAttrNativeAtomicSupported=4)

    def __init__(self, state):
        super().__init__("cuda.bindings.runtime")
        self.state = state
        self.current = threading.local()

    def cudaIpcMemHandle_t(self):
        return SimpleNamespace(reserved=b"")

    @runtime_call
    def cudaSetDevice(self, device):
        self.current.device = device

    @runtime_call
    def cudaDeviceGetPCIBusId(self, length, device):
        return f"0000:{device:02X}:00.0\0".encode().ljust(length)

    @runtime_call
    def cudaGetDeviceCount(self):
        return 2

    @runtime_call
    def cudaGetDeviceProperties(self, device):
        return SimpleNamespace(uuid=SimpleNamespace(bytes=bytes([device + 1]) * 16))

    @runtime_call
    def cudaDeviceCanAccessPeer(self, device, other):
        return int(self.state.peers)

    @runtime_call
    def cudaDeviceGetP2PAttribute(self, attribute, device, other):
        return int(self.state.atomics)

    @runtime_call
    def cudaDeviceEnablePeerAccess(self, other, flags):
        return None

    @runtime_call
    def cudaGetLastError(self):
        return None

    def _allocate(self, size, kinds):
        memory = Memory(new_file(size), size, kinds, users=1, device=getattr(self.current, "device", 0))
        address = place(None, size, _READ_WRITE, memory.descriptor)
        self.state.allocated[address] = (size, memory)
        return address

    def _free(self, address, kinds):
        size, memory = self.state.allocated[address]
        if (memory.kinds, memory.device) != (kinds, getattr(self.current, "device", 0)):
            raise Refusal(Code.cudaErrorInvalidValue)
        del self.state.allocated[address]
        _libc.munmap(address, size)
        memory.leave()

    @runtime_call
    def cudaMalloc(self, size):
        return self._allocate(size, 0)

    @runtime_call
    def cudaFree(self, address):
        self._free(address, 0)

    @runtime_call
    def cudaHostAlloc(self, size, flags):
        return self._allocate(size, PINNED | flags)

    @runtime_call
    def cudaFreeHost(self, address):
        self._free(address, PINNED | PORTABLE)

    @runtime_call
    def cudaMemcpy(self, target, source, size, kind):
        ctypes.memmove(target, source, size)

    @runtime_call
    def cudaIpcGetMemHandle(self, base):
        if base not in self.state.allocated:
            raise Refusal(Code.cudaErrorInvalidValue)
        return SimpleNamespace(reserved=bytes(64))


def install():
    """Take the place of cuda-bindings in this process."""
    state = State()
    driver, runtime = Driver(state), Runtime(state)
    sys.modules["cuda.bindings.driver"], sys.modules["cuda.bindings.runtime"] = driver, runtime
    return driver


def remove():
    for name in ("cuda.bindings.driver", "cuda.bindings.runtime"):
        sys.modules.pop(name, None)


class Pool:
    """Memory as an allocator of expandable segments has it: one reservation, with pieces mapped where there is need."""

    def __init__(self, driver, mapped="xxxx", kinds=FILE):
        self.driver, self.size = driver, len(mapped) * GRANULE
        _, self.base = driver.cuMemAddressReserve(self.size, 0, 0, 0)
        access = driver.CUmemAccessDesc()
        access.location.id = 0
        for number, there in enumerate(mapped):
            if there == "x":
                handle = driver.create(GRANULE, kinds)
                driver.cuMemMap(self.piece(number), GRANULE, 0, handle, 0)
                driver.cuMemSetAccess(self.piece(number), GRANULE, [access], 1)
                driver.cuMemRelease(handle)
        driver.state.calls.clear()
        driver.state.admitted.clear()

    def piece(self, number):
        return self.base + number * GRANULE
