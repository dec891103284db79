"""The arena's real memory: anonymous pages, memory of a GPU, or pinned host memory, and the few calls into CUDA for it.

GPU memory comes from plain cudaMalloc, not from torch's caching allocator: an exported handle names a whole allocation,
and memory of other pools (expandable segments, VMM without fabric handles) silently loses the fast lanes. Who asks for
it gets memory with a fabric handle instead (`allocate_shareable`).
"""

import ctypes
import importlib
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import Any, Final, Literal, TypeVar

from kvxfer.errors import ArenaError, FabricError, KvxferError, MissingExtraError
from kvxfer.memory.books import InvariantError

__all__ = [
    "Arrival",
    "Backing",
    "Kind",
    "admit",
    "allocate",
    "allocate_shareable",
    "arrival",
    "call",
    "in_thread",
    "lay_out",
    "load",
    "pci_bus_id",
    "upload",
]

# --- calls into CUDA
#
# Whatever makes them raises `MissingExtraError` where cuda-bindings is not installed, `ArenaError` where there is not
# enough memory, and `FabricError` where CUDA failed in another way, or has no such thing.

T = TypeVar("T")

_BUS_ID_BYTES: Final = 32
"""Room for a PCI bus id such as `0000:1b:00.0` and the zero behind it."""


def load(module: str, purpose: str) -> Any:
    """A module of cuda-bindings, which are untyped, for a `purpose` that a sentence can begin with."""
    try:
        return importlib.import_module(f"cuda.bindings.{module}")
    except ImportError as error:
        raise MissingExtraError(
            f"{purpose} needs cuda-bindings, which is not installed: pip install cuda-bindings"
        ) from error


def call(cuda: Any, function: str, *arguments: Any) -> Any:
    """Call one function of CUDA's runtime or driver.

    Returns:
        Its value; a list of them where it has several, None where it has none.

    Raises:
        ArenaError: there is not enough memory.
        FabricError: it returned another code than success, or could not be called at all for want of a driver.
    """
    try:
        code, *values = getattr(cuda, function)(*arguments)
    except RuntimeError as error:
        raise FabricError(f"{_shown(function, arguments)} could not be called: {error}") from error
    name: str = getattr(code, "name", str(code))
    match name:
        case "cudaSuccess" | "CUDA_SUCCESS":
            return values[0] if len(values) == 1 else values or None
        case "cudaErrorMemoryAllocation" | "CUDA_ERROR_OUT_OF_MEMORY":
            advice = "lower arena_bytes, or leave more of the memory to it"
            raise ArenaError(f"{_shown(function, arguments)} failed: {name}; {advice}")
        case _:
            raise FabricError(f"{_shown(function, arguments)} failed: {name}")


def _shown(function: str, arguments: Sequence[Any]) -> str:
    return f"{function}({', '.join(str(argument) for argument in arguments if isinstance(argument, int))})"


def upload(device: int, address: int, data: bytes) -> None:
    """Copy bytes to a GPU, and wait for it."""
    cuda = load("runtime", "writing to a GPU")
    source = ctypes.create_string_buffer(data, len(data))

    def copy() -> None:
        call(cuda, "cudaSetDevice", device)
        kind = cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        call(cuda, "cudaMemcpy", address, ctypes.addressof(source), len(data), kind)

    in_thread(copy)


def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own, and return or raise what it does.

    CUDA's current device belongs to a thread. Setting it back afterwards would not do: that can make a context on a
    device which the caller never used.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvxfer-arena") as executor:
        return executor.submit(work).result()


def pci_bus_id(device: int) -> str:
    """Where a GPU sits, as sysfs writes it: `0000:1b:00.0`. Makes no context."""
    cuda = load("runtime", "finding out where a GPU sits")
    name: bytes = call(cuda, "cudaDeviceGetPCIBusId", _BUS_ID_BYTES, device)
    return name.split(b"\0")[0].decode("ascii", "replace").strip().lower()


def allocate_shareable(nbytes: int, device: int) -> tuple[int, Callable[[], None]]:
    """Allocate so many bytes, rounded up, of the GPU that is current in this thread.

    Returns:
        The address, and what gives the memory back; that is called once, in a thread in which the GPU is current.
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
    """Map pieces of memory side by side, where one GPU may read and write them. That GPU is current in this thread.

    Their handles stay the caller's; a mapping keeps the memory without them.

    Returns:
        The first address, and what unmaps all of it; that is called once, in a thread in which the GPU is current.
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
    """Let a GPU read and write memory that is mapped in this process."""
    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    call(cuda, "cuMemSetAccess", address, size, [access], 1)


# --- what a NIC has written
#
# A transport says that a write has ended when the NIC does. On some platforms the bytes may still be on their way to
# the GPU's memory then, and a kernel that is launched at once may read what was there before.

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
    """What a GPU needs, by its attributes."""
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


# --- kinds of memory

Kind = Literal["cpu", "cuda", "fabric", "pinned"]
"""Where arena memory lies: pageable host memory, one GPU's memory (plain, or with a fabric handle), or host memory that
every GPU can reach by DMA."""

_ALIGNMENT: Final = 4096
"""Bytes: every backing begins on a page."""

_CUDA_GRANULE: Final = 2 << 20
"""Bytes: CUDA packs smaller allocations, pinned ones too, into blocks of this size. A whole number of them begins on a
page and shares no block with anybody: a handle exports the whole block."""

_HOST_ALLOC_PORTABLE: Final = 1
"""`cudaHostAllocPortable`: pinned for every CUDA context, not only for the one that is current."""

_leaked: Final[list[Callable[[], None]]] = []
"""What would give leaked memory back, and keeps it alive until the process ends."""


class Backing:
    """One allocation. Whoever allocated it owns it, and ends it with `close` or `leak`: one of them, once.

    Anything else is an `InvariantError`.
    """

    __slots__ = ("_free", "address", "kind", "length")

    def __init__(self, kind: Kind, *, address: int, length: int, free: Callable[[], None]) -> None:
        """Wrap an allocation; use `allocate`. `free` keeps it alive, and is called at most once."""
        self.kind: Final[Kind] = kind
        self.address: Final = address  # first byte; a multiple of 4096
        self.length: Final = length  # usable bytes, as asked for
        self._free: Callable[[], None] | None = free

    @property
    def closed(self) -> bool:
        """True after `close` or `leak`."""
        return self._free is None

    def close(self) -> None:
        """Give the memory back, exactly once. Nobody may use its address afterwards, and no peer may still write it.

        If CUDA refuses to free it, it counts as closed, and is lost.
        """
        self._ended()()

    def leak(self) -> None:
        """Keep the memory for the rest of the process instead of closing it: somebody may still touch it."""
        _leaked.append(self._ended())

    def _ended(self) -> Callable[[], None]:
        free, self._free = self._free, None
        if free is None:
            raise InvariantError(f"this backing of {self.length} bytes ({self.kind}) was closed before")
        return free

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<Backing {self.kind} address={self.address:#x} length={self.length} {state}>"


def allocate(kind: Kind, nbytes: int, device: int = 0) -> Backing:
    """Allocate the arena.

    Args:
        kind: "cpu" (anonymous pages, touched lazily), "cuda" (plain cudaMalloc), "fabric" (memory with a handle that
            other hosts of an NVLink domain can open) or "pinned" (cudaHostAlloc).
        nbytes: Bytes, at least 1.
        device: Index of the GPU, for all but "cpu". The calling thread's current device stays as it is.

    Returns:
        The backing; the caller owns it and closes it once. Fresh "cpu" pages read as zeros; GPU memory holds anything.
        "pinned" memory lies on the NUMA node on which the calling thread may run, as far as that has room.

    Raises:
        ArenaError: the memory is not there.
        MissingExtraError: cuda-bindings is not installed, for all but "cpu".
        FabricError: CUDA failed in another way, or has no such memory; the message carries CUDA's name for it.
    """
    return _allocate_pages(nbytes) if kind == "cpu" else _allocate_cuda(kind, nbytes, device)


def _allocate_pages(nbytes: int) -> Backing:
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # a fork would make the pages copy-on-write, and a registration would go on naming those that were abandoned
        pages.madvise(mmap.MADV_DONTFORK)
    except (OSError, ValueError, OverflowError) as error:
        raise ArenaError(f"the system gives no {nbytes} bytes for the arena: {error}; lower arena_bytes") from error
    # what from_buffer returns keeps the pages from being unmapped, so it must not outlive this line
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(pages))
    return _checked(Backing("cpu", address=address, length=nbytes, free=pages.close))


def _allocate_cuda(kind: Literal["cuda", "fabric", "pinned"], nbytes: int, device: int) -> Backing:
    cuda = load("runtime", f"an arena of kind {kind!r}")

    def malloc() -> tuple[int, Callable[[], None]]:
        call(cuda, "cudaSetDevice", device)
        whole = -(-nbytes // _CUDA_GRANULE) * _CUDA_GRANULE
        match kind:
            case "cuda":
                address = int(call(cuda, "cudaMalloc", whole))
                return address, lambda: call(cuda, "cudaFree", address)
            case "fabric":
                return allocate_shareable(whole, device)
            case "pinned":
                address = int(call(cuda, "cudaHostAlloc", whole, _HOST_ALLOC_PORTABLE))
                return address, lambda: call(cuda, "cudaFreeHost", address)

    address, free = in_thread(malloc)

    def release() -> None:
        call(cuda, "cudaSetDevice", device)
        free()

    return _checked(Backing(kind, address=address, length=nbytes, free=lambda: in_thread(release)))


def _checked(backing: Backing) -> Backing:
    """Refuse, and give back, memory that does not begin on a page."""
    if backing.address % _ALIGNMENT:
        backing.close()
        raise FabricError(f"{backing} does not begin at a multiple of {_ALIGNMENT} bytes")
    return backing
