"""Anonymous files that another process of this host can open: through `/proc/<pid>/fd`.

Nothing is left behind by a process that dies, and nobody but the same user (or root) gets at them. Device and inode
are compared when one is opened: a number of a process or of a descriptor may name something else by then.
"""

import fcntl
import os
import struct
from pathlib import Path
from typing import Final

from kvxfer.errors import FabricError

__all__ = ["check_process", "create", "handle_of", "open_handle", "process_of"]

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
    """A descriptor of another process's file, for reading and writing, which the caller owns.

    Args:
        handle: As its owner said.
        name: That it was created under: whatever else a process has open is nothing to write to.
        least: Bytes that it must have.

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
