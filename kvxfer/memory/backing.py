"""The arena's real memory: anonymous pages, memory of a GPU, or pinned host memory.

GPU memory comes from plain cudaMalloc, not from torch's caching allocator: an exported handle names a whole allocation,
and memory of other pools (expandable segments, VMM without fabric handles) silently loses the fast lanes. Who asks for
it gets memory with a fabric handle instead (`vmm`).
"""

import ctypes
import mmap
from collections.abc import Callable
from typing import Final, Literal

from kvxfer.errors import ArenaError, FabricError
from kvxfer.memory import vmm
from kvxfer.memory.driver import call, download, in_thread, load
from kvxfer.memory.extent import InvariantError

__all__ = ["Backing", "Kind", "allocate", "peek"]

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

_leaked: Final[list[object]] = []
"""What keeps leaked memory alive until the process ends."""


class Backing:
    """One allocation. Whoever allocated it owns it, and ends it with `close` or `leak`: one of them, once.

    Attributes:
        kind: Where it lies.
        address: First byte; a multiple of 4096.
        length: Usable bytes, as asked for.
        device: Index of the GPU whose memory it is ("cuda", "fabric"), or that was current when it was
            pinned; None for "cpu".
    """

    __slots__ = ("_free", "_owner", "address", "device", "kind", "length")

    def __init__(
        self, kind: Kind, *, address: int, length: int, device: int | None, owner: object, free: Callable[[], None]
    ) -> None:
        """Wrap an allocation; use `allocate`.

        Args:
            kind: Where it lies.
            address: First byte.
            length: Usable bytes.
            device: Index of the GPU, or None.
            owner: What keeps the memory alive as long as it lives; the mmap of a "cpu" backing.
            free: Gives the memory back; called at most once.
        """
        self.kind: Final[Kind] = kind
        self.address: Final = address
        self.length: Final = length
        self.device: Final = device
        self._owner: object | None = owner
        self._free: Callable[[], None] | None = free

    @property
    def closed(self) -> bool:
        """True after `close` or `leak`."""
        return self._free is None

    def view(self) -> memoryview:
        """The bytes as a writable buffer, for host memory.

        A view of a "cpu" backing keeps the pages mapped even beyond `close`; one of a "pinned" backing must not be used
        after it.

        Raises:
            ArenaError: it is GPU memory, which has no host buffer.
            InvariantError: it was closed.
        """
        if self._free is None:
            raise InvariantError(f"this backing of {self.length} bytes ({self.kind}) is closed")
        if isinstance(self._owner, mmap.mmap):
            return memoryview(self._owner)[: self.length]
        if self.kind in {"cuda", "fabric"}:
            raise ArenaError(f"memory of GPU {self.device} has no host buffer; use its address")
        return memoryview((ctypes.c_ubyte * self.length).from_address(self.address)).cast("B")

    def close(self) -> None:
        """Give the memory back, exactly once. Nobody may use its address afterwards, and no peer may still write it.

        The pages of a "cpu" backing of which a view lives are unmapped when the last view dies.

        Raises:
            InvariantError: it was closed or leaked before.
            FabricError: CUDA refused to free it; it counts as closed, and is lost.
        """
        free, owner = self._free, self._owner
        if free is None:
            raise InvariantError(f"this backing of {self.length} bytes ({self.kind}) was closed before")
        self._free = self._owner = None
        free()
        del owner

    def leak(self) -> None:
        """Keep the memory for the rest of the process instead of closing it: somebody may still touch it.

        Raises:
            InvariantError: it was closed or leaked before.
        """
        if self._free is None:
            raise InvariantError(f"this backing of {self.length} bytes ({self.kind}) was closed before")
        _leaked.append(self._owner)
        self._free = self._owner = None

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<Backing {self.kind} device={self.device} address={self.address:#x} length={self.length} {state}>"


def peek(kind: str, device: int, address: int, nbytes: int) -> bytes:
    """What lies in registered memory now, off the loop: that of a GPU is fetched, past whatever runs there.

    Args:
        kind: `"DRAM"` or `"VRAM"`, as a transport names it.
        device: Index of the GPU.
        address: First byte.
        nbytes: Length.

    Raises:
        FabricError: CUDA failed.
    """
    if kind == "DRAM":
        return ctypes.string_at(address, nbytes)
    data = ctypes.create_string_buffer(nbytes)
    download(device, ctypes.addressof(data), address, nbytes)
    return data.raw


def allocate(kind: Kind, nbytes: int, device: int | None = None) -> Backing:
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
        ArenaError: the memory is not there, `nbytes` is below 1, the kind is unknown, or `device` is missing.
        MissingExtraError: cuda-bindings is not installed, for all but "cpu".
        FabricError: CUDA failed in another way, or has no such memory; the message carries CUDA's name for it.
    """
    if nbytes < 1:
        raise ArenaError(
            f"cannot allocate an arena of {nbytes} bytes; arena_bytes=0 means that there is none to allocate"
        )
    match kind:
        case "cpu":
            return _allocate_pages(nbytes)
        case "cuda" | "fabric" | "pinned":
            if device is None or device < 0:
                raise ArenaError(f"an arena of kind {kind!r} needs the index of a GPU, not {device}")
            return _allocate_cuda(kind, nbytes, device)
        case _:  # pyright: ignore[reportUnnecessaryComparison]
            raise ArenaError(f"arena kind {kind!r} is unknown; it is one of 'cpu', 'cuda', 'fabric', 'pinned'")


def _allocate_pages(nbytes: int) -> Backing:
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # a fork would make the pages copy-on-write, and a registration would go on naming those that were abandoned
        pages.madvise(mmap.MADV_DONTFORK)
    except (OSError, ValueError, OverflowError) as error:
        raise ArenaError(f"the system gives no {nbytes} bytes for the arena: {error}; lower arena_bytes") from error
    # what from_buffer returns keeps the pages from being unmapped, so it must not outlive this line
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(pages))

    def free() -> None:
        try:
            pages.close()
        except BufferError:
            return  # a view lives: the pages go with the last reference to the mmap, which is the view's

    return _checked(Backing("cpu", address=address, length=nbytes, device=None, owner=pages, free=free))


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
                return vmm.allocate(whole, device)
            case "pinned":
                address = int(call(cuda, "cudaHostAlloc", whole, _HOST_ALLOC_PORTABLE))
                return address, lambda: call(cuda, "cudaFreeHost", address)

    address, free = in_thread(malloc)

    def release() -> None:
        call(cuda, "cudaSetDevice", device)
        free()

    backing = Backing(kind, address=address, length=nbytes, device=device, owner=None, free=lambda: in_thread(release))
    return _checked(backing)


def _checked(backing: Backing) -> Backing:
    """Refuse, and give back, memory that does not begin on a page."""
    if backing.address % _ALIGNMENT:
        backing.close()
        raise FabricError(f"{backing} does not begin at a multiple of {_ALIGNMENT} bytes")
    return backing
