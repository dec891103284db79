"""CPU memory that other processes of this host can map: anonymous files, which go with their last user.

Which host this is, and which process is which across its namespaces, is said here too: that is all that a file needs.
"""

import ctypes
import fcntl
import mmap
import os
import socket
import struct
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from kvxfer.errors import ArenaError, FabricError, GeometryError
from kvxfer.mapped.window import CPU, Export, Window

if TYPE_CHECKING:
    import torch

__all__ = [
    "check_process",
    "create",
    "elsewhere",
    "export_shared",
    "handle_of",
    "here",
    "may_be_elsewhere",
    "number_of",
    "open_handle",
    "open_shared",
    "own_number",
    "process_of",
    "process_of_stream",
    "shared_empty",
    "unlike",
]

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
    boot, _, namespace = theirs.partition(" ")
    own_boot, _, own_namespace = ours.partition(" ")
    if boot != own_boot:
        return "it is on another host"
    if namespace != own_namespace:
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
    status = os.fstat(descriptor)
    sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    if (status.st_dev, status.st_ino) != (device, inode) or status.st_size < least or not sealed:
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

    kind = dtype or torch.get_default_dtype()
    if not hasattr(kind, "itemsize"):
        raise GeometryError(f"dtype must be a torch.dtype, not {dtype!r}")
    sizes: Any = shape  # callers may be untyped
    if isinstance(sizes, int) or not all(type(n) is int and n >= 0 for n in sizes):
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
    flat = cast("Any", torch).frombuffer(pages, dtype=kind)
    return cast("torch.Tensor", flat[:count].view(tuple(shape)))


def _address(pages: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(pages))  # what from_buffer returns must not outlive this line


def _forget(file: _File) -> None:
    _files.pop(file.address, None)  # the pages are still there, so nobody else's can be
    os.close(file.descriptor)


def export_shared(spans: Sequence[range]) -> list[Export]:
    """The shared files in which these addresses lie, each once.

    Raises:
        FabricError: If one lies in other memory.
    """
    found = {file.address: file for file in _holding(spans)}
    return [_export(found[address]) for address in sorted(found)]


def _holding(spans: Sequence[range]) -> Iterator[_File]:
    files = list(_files.copy().values())
    for span in spans:
        file = next((f for f in files if f.address <= span.start and span.stop <= f.address + f.length), None)
        if file is None:
            raise FabricError("its memory is private to its process; allocate the cache with kvxfer.shared_empty(...)")
        yield file


def _export(file: _File) -> Export:
    return Export(CPU, "", file.address, file.length, handle_of(file.descriptor))


def _find(given: Export) -> Window:
    """A shared file of this process."""
    file = _files.get(given.address)
    if file is None or _export(file) != given:
        raise FabricError(f"this process shares no memory at {given.address:#x} any more")
    return Window(given.address, given.length, given.address, lambda: None)


def open_shared(given: Export, *, own: bool) -> Window:
    """Map a shared file of another process, or find one of this process.

    Raises:
        FabricError: If it is not there, or is not what was named.
    """
    process = process_of(given.handle)
    if own:
        return _find(given)
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
