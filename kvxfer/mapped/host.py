"""Memory that processes of a host share: what its owner says of it, and what who has mapped it makes of that.

CPU memory is anonymous files, which go with their last user. Which host this is, and which process is which across its
namespaces, is said here too: that is all that an open file needs to be a handle.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import socket
import struct
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import ArenaError, FabricError, GeometryError
from kvxfer.protocol.messages import MappedMemory

if TYPE_CHECKING:
    import torch

__all__ = [
    "CPU",
    "CUDA",
    "VMM",
    "OpenFiles",
    "Window",
    "Windows",
    "check_process",
    "create",
    "elsewhere",
    "export",
    "export_shared",
    "files_of",
    "handle_of",
    "here",
    "joined",
    "may_be_elsewhere",
    "number_of",
    "open_handle",
    "open_shared",
    "open_window",
    "own_number",
    "process_of",
    "process_of_stream",
    "shared_empty",
    "tensor_at",
    "unlike",
]

# --- open files as handles
#
# `/proc/<pid>/fd` would open a file anew, which for memory of a GPU is another file. So one is duplicated
# (`pidfd_getfd`), which the kernel allows to whoever may trace the other process.

_PIDFD_GETFD: Final = 438
"""Number of the system call, the same on every architecture; libc has no function for it before glibc 2.36."""
_SHARE: Final = 0.75
"""How much of the open files that this process may have is used at most: the rest is for everything else."""
_REMEDY: Final = (
    "run both as one user, and set kernel.yama.ptrace_scope=0 or give this process CAP_SYS_PTRACE (containers: "
    "--cap-add=SYS_PTRACE, and a seccomp profile that allows pidfd_getfd); or allocate the cache with plain cudaMalloc "
    "(expandable_segments:False), which needs none of this"
)


class OpenFiles:
    """Open files of this process that peers may take until it closes them."""

    def __init__(self) -> None:
        self._held: list[int] = []

    def keep(self, descriptor: int) -> int:
        """Own an open file, which no child process inherits from now on. Also a refused one is closed with the others.

        Returns:
            The same.

        Raises:
            FabricError: If this process would be left with too few.
        """
        self._held.append(descriptor)
        os.set_inheritable(descriptor, False)
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit != resource.RLIM_INFINITY and descriptor >= limit * _SHARE:  # the kernel gives the lowest free number
            raise FabricError(
                f"the handles of this memory are more than {len(self._held) - 1} open files, and this process may have "
                f"{limit}, a quarter of them for other things: raise RLIMIT_NOFILE (ulimit -n), or allocate it in "
                "larger pieces or with plain cudaMalloc"
            )
        return descriptor

    def close(self) -> None:
        """Close them all. Who has taken one keeps what it took."""
        held, self._held = self._held, []
        for descriptor in held:
            os.close(descriptor)


@contextlib.contextmanager
def files_of(process: int) -> Generator[Callable[[int], int], None, None]:
    """Reach open files of another process.

    Yields:
        What duplicates the file that has a number there. The caller owns the duplicate, which no child inherits.

    Raises:
        FabricError: If the process is not there, or does not let itself be reached, with the remedy.
    """
    try:
        there = os.pidfd_open(process)
    except (AttributeError, OSError, OverflowError) as error:
        raise FabricError(f"process {process} cannot be reached for the handles of its memory: {error}") from error
    try:
        yield lambda number: _take(there, process, number)
    finally:
        os.close(there)


def _take(there: int, process: int, number: int) -> int:
    descriptor = int(_system_call()(_PIDFD_GETFD, there, number, 0))
    if descriptor >= 0:
        return descriptor
    code = ctypes.get_errno()
    said = f"file {number} of process {process}, a handle of its memory, cannot be taken (pidfd_getfd: "
    match code:
        case errno.EPERM | errno.EACCES:
            raise FabricError(f"{said}{os.strerror(code)}): this process may not trace that one; {_REMEDY}")
        case errno.ENOSYS:
            raise FabricError(
                f"{said}{os.strerror(code)}): Linux has it since 5.6, unless a sandbox forbids it; {_REMEDY}"
            )
        case _:
            raise FabricError(f"{said}{os.strerror(code)})")


@cache
def _system_call() -> Any:
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    function.argtypes = [ctypes.c_long] * 4
    return function


# --- exports and windows

I64: TypeAlias = NDArray[np.int64]

_KEPT: Final = 1024
"""Arrays of regions whose translation is kept."""
_ADDRESSES: Final = 1 << 62
"""No address of a process is beyond; sums of two numbers up to it fit into 64 bits."""
CPU: Final = "shm"
CUDA: Final = "cuda_ipc"
VMM: Final = "cuda_vmm"
_KINDS: Final = {"cpu": (CPU,), "cuda": (CUDA, VMM)}
"""Of what owners let others map (`VMM` for pieces), by what a process copies with."""


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """An allocation of another process, mapped here."""

    address: int  # first byte, as the owner addresses it
    length: int
    local: int  # first byte, as this process addresses it
    close: Callable[[], None]  # unmaps it. Nobody may use its addresses afterwards


class Windows:
    """All windows onto one peer. Whoever opened them owns them, and closes them once.

    Raises:
        FabricError: If one reaches beyond the addresses that a process has.
    """

    def __init__(self, windows: Iterable[Window]) -> None:
        self._windows: Final = sorted(windows, key=lambda window: window.address)
        for window in self._windows:
            _check(window.address, window.length)
        self._starts: Final = np.asarray([window.address for window in self._windows], np.int64)
        self._stops: Final = np.asarray([window.address + window.length for window in self._windows], np.int64)
        self._shifts: Final = np.asarray([window.local - window.address for window in self._windows], np.int64)
        self._reached: OrderedDict[int, tuple[I64, I64]] = OrderedDict()

    def local(self, addresses: I64) -> I64:
        """Addresses of the peer, int64 (N,), as this process sees them.

        Raises:
            FabricError: If one lies in no window.
        """
        at = np.searchsorted(self._starts, addresses, side="right") - 1
        inside = (at >= 0) & (addresses < self._stops[at]) if self._windows else np.zeros(len(addresses), np.bool_)
        if not inside.all():
            first = int(addresses[int(np.argmin(inside))])
            raise FabricError(f"address {first:#x} of the peer lies in none of its mapped memory")
        return addresses + self._shifts[at]

    def reached(self, regions: I64) -> I64:
        """Regions of a copy, int64 (R, 2), whose destinations are the peer's, as this process addresses both.

        Plans of a pair keep their arrays of regions, so those that were asked for before are kept here.

        Raises:
            FabricError: If a destination lies in no window.
        """
        before, found = self._reached.get(id(regions), (None, None))
        if before is not regions or found is None:
            found = np.stack([regions[:, 0], self.local(regions[:, 1])], axis=1)
            self._reached[id(regions)] = (regions, found)  # which keeps the array, so that its id is no other's
            if len(self._reached) > _KEPT:
                self._reached.popitem(last=False)
        return found

    def locate(self, address: int, length: int) -> int:
        """Where this process sees `length` bytes at an address of the peer.

        Raises:
            FabricError: If they do not lie in one window.
        """
        _check(address, length)
        ends = np.asarray([address, address + max(length, 1) - 1], np.int64)
        first, last = self.local(ends).tolist()
        if last - first != ends[1] - ends[0]:
            raise FabricError(f"{length} bytes at address {address:#x} of the peer do not lie in one allocation")
        return int(first)

    def close(self) -> None:
        """Unmap all of them."""
        for window in self._windows:
            window.close()


def _check(address: int, length: int) -> None:
    """See that these bytes may be memory of a process: both numbers are a peer's, of any size."""
    if not (0 <= address <= _ADDRESSES and 0 <= length <= _ADDRESSES - address):
        raise FabricError(f"{length} bytes at {address:#x} are no memory of a process")


def export(kind: str, device: int, spans: Sequence[range], files: OpenFiles) -> list[MappedMemory]:
    """Make the allocations that hold these addresses available to other processes; each allocation once.

    Args:
        kind: "cpu" or "cuda".
        device: Index of the GPU.
        spans: Addresses of memory of this process, each from the first byte to behind the last.
        files: Keeps files open that peers need; the caller closes it when none will come any more, also after an error.

    Raises:
        FabricError: If one of them lies in memory that cannot be mapped elsewhere; it says what to do about it.
    """
    if kind == "cuda":
        from kvxfer.mapped.gpu import export_cuda

        return export_cuda(device, spans, files)

    return export_shared(spans)


def joined(exports: Iterable[MappedMemory], most: int | None = None) -> list[MappedMemory]:
    """Exports by address, pieces that lie side by side as one, as long as a handle has `most` bytes at most."""
    runs: list[list[MappedMemory]] = []
    size = 0  # of the handles of the last run
    for one in sorted(exports, key=lambda export: export.address):
        last = runs[-1][-1] if runs else None
        size += len(one.handle)
        if last is None or not _adjoin(last, one) or (most is not None and size > most):
            runs.append([])
            size = len(one.handle)
        runs[-1].append(one)
    return [
        MappedMemory(
            run[0].kind,
            run[0].device,
            run[0].address,
            sum(one.length for one in run),
            b"".join(one.handle for one in run),
        )
        for run in runs
    ]


def _adjoin(one: MappedMemory, other: MappedMemory) -> bool:
    return (one.kind, one.device) == (other.kind, other.device) == (VMM, one.device) and (
        one.address + one.length == other.address
    )


def open_window(given: MappedMemory, kind: str, device: int, *, own: bool = False) -> Window:
    """Map an allocation of another process, or pieces of its memory that lie side by side.

    Args:
        given: As its owner said; `joined`, else a tensor that lies in two pieces is not found in one window.
        kind: "cpu" or "cuda": what this process copies with.
        device: Index of the GPU that will address it.
        own: Whether its owner is this process, so that there is nothing to map.

    Raises:
        FabricError: If that cannot be done, with the reason.
    """
    _check(given.address, given.length)
    if given.kind not in _KINDS[kind]:
        raise FabricError(f"its cache is {given.kind} memory, and this one copies with the {kind}")
    if kind == "cuda":
        from kvxfer.mapped.gpu import open_cuda

        return open_cuda(given, device, own=own)

    return open_shared(given, own=own)


# --- this host: only within it, and one namespace of processes, can memory be mapped

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")


@cache
def here() -> str:
    """This host and namespace as peers are told of it; empty where the system does not say."""
    try:
        return f"{_BOOT.read_text().strip()} {_NAMESPACE.readlink()}"
    except OSError:
        return ""


def elsewhere(theirs: str) -> bool:
    """Whether a process that said so is on another host: what it writes here comes over a network."""
    ours = here()
    return bool(ours and theirs) and theirs.partition(" ")[0] != ours.partition(" ")[0]


def unlike(theirs: str) -> str:
    """Why memory of a process that said so cannot be mapped here; empty if nothing speaks against it."""
    ours = here()
    if not ours or not theirs:
        return "it is not known whether both are on the same host"
    if elsewhere(theirs):
        return "it is on another host"
    if theirs != ours:
        return "it is in another PID namespace; containers need a common one (hostPID, or one pod with a shared one)"
    return ""


def may_be_elsewhere(theirs: str) -> bool:
    """Whether a process that said so is on another host, or that is not known: then a NIC may write what it sends."""
    ours = here()
    return not ours or not theirs or elsewhere(theirs)


# --- processes
#
# A pidfd names a process in whatever PID namespace it is; its inode is unlike that of any other process since the host
# was booted (Linux 6.9). A Unix socket has the pidfd of the process at its other end (Linux 6.5): of the one that
# connected, or listened.

_SO_PEERPIDFD: Final = 77
_MAX: Final = 0x7FFF_FFFF_FFFF_FFFF
"""What the wire has room for."""


def number_of(descriptor: int) -> int:
    """The number of the process of a pidfd; 0 on a kernel that has none."""
    status = os.fstat(descriptor)
    nameless = (status.st_dev, status.st_ino) == _shared_by_all()
    return 0 if nameless or status.st_ino > _MAX else status.st_ino


def own_number() -> int:
    """The number of this process; 0 on a kernel that has none."""
    try:
        descriptor = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return 0
    try:
        return number_of(descriptor)
    finally:
        os.close(descriptor)


def process_of_stream(sock: socket.socket | None) -> int:
    """A pidfd of the process at the other end of a Unix socket, which the caller owns; -1 if there is none."""
    if sock is None or sock.family != socket.AF_UNIX:
        return -1
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:  # an older kernel, or the process has ended
        return -1


@cache
def _shared_by_all() -> tuple[int, int]:
    """Device and inode of what has no file: on older kernels, of every pidfd too."""
    descriptor = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        return status.st_dev, status.st_ino
    finally:
        os.close(descriptor)


# --- anonymous files
#
# Nothing is left behind by a process that dies, and nobody but the same user (or root) gets at them. Device and inode
# are compared when one is opened: a number of a process or of a descriptor may name something else by then.

_HANDLE: Final = struct.Struct("<IIQQ")
"""Process, descriptor in it, device and inode of the file."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""It stays as long as it is: who touches mapped pages beyond the end of a file is killed."""


def create(name: str, length: int) -> int:
    """A descriptor of a new file of zeros, which the caller owns.

    Raises:
        OSError: If the system gives none; so do `ValueError`, `OverflowError` and `AttributeError`.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, length)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except (OSError, ValueError, OverflowError):
        os.close(descriptor)
        raise
    return descriptor


def handle_of(descriptor: int) -> bytes:
    """What another process needs to open a file of this one."""
    status = os.fstat(descriptor)
    return _HANDLE.pack(os.getpid(), descriptor, status.st_dev, status.st_ino)


def process_of(handle: bytes) -> int:
    """The process that a handle names.

    Raises:
        FabricError: If it is no handle.
    """
    try:
        process, *_ = _HANDLE.unpack(handle)
    except struct.error as error:
        raise FabricError(f"a handle of {len(handle)} bytes names no shared memory") from error
    return int(process)


def check_process(handle: bytes, process: int) -> None:
    """See that a handle is of its owner's own memory, and not of somebody else's, which it has no right to.

    Args:
        handle: Of a file, or of GPU memory: both begin with the process.
        process: The owner's, as the kernel says it; 0 where that is not known, and nothing can be seen.

    Raises:
        FabricError: If it names another process.
    """
    named = int.from_bytes(handle[:4], "little")
    if process and named != process:
        raise FabricError(f"it names memory of process {named}, but its own is {process}")


def open_handle(handle: bytes, name: str, least: int) -> int:
    """A descriptor of another process's file of at least so many bytes, to read and write, which the caller owns.

    `name` is what it was created under: whatever else a process has open is nothing to write to.

    Raises:
        FabricError: If it is not there, or is not what was named.
    """
    process = process_of(handle)
    _, number, device, inode = _HANDLE.unpack(handle)
    path = Path(f"/proc/{process}/fd/{number}")
    try:
        if not str(path.readlink()).startswith(f"/memfd:{name} "):
            raise FabricError(f"{path} is not memory that kvxfer shares")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise FabricError(f"its shared memory cannot be opened: {error}") from error
    status, seals = os.fstat(descriptor), 0
    with contextlib.suppress(OSError):  # other files have none
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    kept = seals & fcntl.F_SEAL_SHRINK and status.st_size >= least
    if not kept or (status.st_dev, status.st_ino) != (device, inode):
        os.close(descriptor)
        raise FabricError(f"descriptor {number} of process {process} is not the shared memory that it named")
    return descriptor


# --- memory

_NAME: Final = "kvxfer"


@dataclass(frozen=True, slots=True)
class _File:
    """One anonymous file of this process."""

    address: int
    length: int
    descriptor: int


_files: Final[dict[int, _File]] = {}
"""By address of the first byte. There is no lock: a collection of garbage may give memory back in the midst of any step
of any thread, and would wait for itself. Each use of it is one step that nothing interrupts."""


def shared_empty(shape: Sequence[int], *, dtype: "torch.dtype | None" = None) -> "torch.Tensor":
    """A CPU tensor of zeros in memory that other processes can map, for the route `mapped`.

    Args:
        shape: Extents.
        dtype: Element type; torch's default if left out.

    Returns:
        The tensor, which owns its memory: it is given back when the last tensor or view of it is gone, in every
        process that has mapped it.

    Each costs this process two file descriptors, and every process that maps it one: cut the layers of a cache from one
    tensor where that counts.

    Raises:
        ArenaError: If the system gives no such memory.
        GeometryError: If shape or dtype are none.
    """
    import torch

    kind: Any = torch.get_default_dtype() if dtype is None else dtype  # callers may be untyped
    if not isinstance(kind, torch.dtype):
        raise GeometryError(f"dtype must be a torch.dtype, not {dtype!r}")
    given: Any = shape
    sizes = cast("Sequence[object]", given) if isinstance(given, Sequence) else [None]
    if not all(type(n) is int and n >= 0 for n in sizes):
        raise GeometryError(f"shape must be a list of whole numbers that are not negative, not {shape!r}")
    count = prod(shape)
    length = max(1, count) * kind.itemsize
    try:
        descriptor = create(_NAME, length)
    except (AttributeError, OSError, ValueError, OverflowError) as error:
        raise ArenaError(f"the system gives no {length} bytes of shared memory: {error}") from error
    try:
        pages = mmap.mmap(descriptor, length)
    except (OSError, ValueError, OverflowError) as error:
        os.close(descriptor)
        raise ArenaError(f"the system gives no {length} bytes of shared memory: {error}") from error
    file = _File(_address(pages), length, descriptor)
    _files[file.address] = file
    weakref.finalize(pages, _forget, file)
    flat = cast("Any", torch).frombuffer(pages, dtype=torch.uint8).view(kind)  # at once, torch dies of quantised ones
    return cast("torch.Tensor", flat[:count].view(tuple(shape)))


def tensor_at(address: int, nbytes: int, device: "torch.device") -> "torch.Tensor":
    """Bytes of memory that somebody else owns as a tensor, without copying them."""
    import torch

    if device.type == "cuda":
        shown = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=shown), device=device)
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)


def _address(pages: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(pages))  # what from_buffer returns must not outlive this line


def _forget(file: _File) -> None:
    _files.pop(file.address, None)  # the pages are still there, so nobody else's can be
    os.close(file.descriptor)


def export_shared(spans: Sequence[range]) -> list[MappedMemory]:
    """The shared files in which these addresses lie, each once.

    Raises:
        FabricError: If one lies in other memory.
    """
    files, found = list(_files.copy().values()), dict[int, _File]()
    for span in spans:
        file = next((f for f in files if f.address <= span.start and span.stop <= f.address + f.length), None)
        if file is None:
            raise FabricError("its memory is private to its process; allocate the cache with kvxfer.shared_empty(...)")
        found[file.address] = file
    return [_export(found[address]) for address in sorted(found)]


def _export(file: _File) -> MappedMemory:
    return MappedMemory(CPU, "", file.address, file.length, handle_of(file.descriptor))


def open_shared(given: MappedMemory, *, own: bool) -> Window:
    """Map a shared file of another process, or find one of this process.

    Raises:
        FabricError: If it is not there, or is not what was named.
    """
    process = process_of(given.handle)
    if own:
        file = _files.get(given.address)
        if file is None or _export(file) != given:
            raise FabricError(f"this process shares no memory at {given.address:#x} any more")
        return Window(given.address, given.length, given.address, lambda: None)
    if process == os.getpid():
        raise FabricError("it names memory of this process, which is not its own")
    descriptor = open_handle(given.handle, _NAME, given.length)
    try:
        pages = mmap.mmap(descriptor, given.length)
    except (OSError, ValueError) as error:
        raise FabricError(f"its shared memory cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)
    return Window(given.address, given.length, _address(pages), pages.close)
