"""What the owner of memory says of it, and what a process that has mapped it makes of that; open files as handles."""

import contextlib
import ctypes
import errno
import os
import resource
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import FabricError

__all__ = [
    "CPU",
    "CUDA",
    "VMM",
    "Export",
    "OpenFiles",
    "Window",
    "Windows",
    "export",
    "files_of",
    "joined",
    "open_window",
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

    def __len__(self) -> int:
        return len(self._held)

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
"""Of exports, by what a process copies with."""


@dataclass(frozen=True, slots=True)
class Export:
    """One allocation that its owner lets others map, or several pieces of memory that lie side by side."""

    kind: str  # `CPU`, `CUDA`, or `VMM` for pieces
    device: str  # identity of the GPU; empty for CPU memory
    address: int  # first byte, as the owner addresses it
    length: int
    handle: bytes  # what a peer needs to map it


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

    def __len__(self) -> int:
        return len(self._windows)

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


def export(kind: str, device: int, spans: Sequence[range], files: OpenFiles) -> list[Export]:
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
    from kvxfer.mapped.cpu import export_shared

    return export_shared(spans)


def joined(exports: Iterable[Export], most: int | None = None) -> list[Export]:
    """Exports by address, pieces that lie side by side as one, as long as a handle has `most` bytes at most."""
    runs: list[list[Export]] = []
    size = 0  # of the handles of the last run
    for one in sorted(exports, key=lambda export: export.address):
        last = runs[-1][-1] if runs else None
        size += len(one.handle)
        if last is None or not _adjoin(last, one) or (most is not None and size > most):
            runs.append([])
            size = len(one.handle)
        runs[-1].append(one)
    return [
        replace(run[0], length=sum(one.length for one in run), handle=b"".join(one.handle for one in run))
        for run in runs
    ]


def _adjoin(one: Export, other: Export) -> bool:
    return (one.kind, one.device) == (other.kind, other.device) == (VMM, one.device) and (
        one.address + one.length == other.address
    )


def open_window(given: Export, kind: str, device: int, *, own: bool = False) -> Window:
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
    from kvxfer.mapped.cpu import open_shared

    return open_shared(given, own=own)
