"""Which process is which, across namespaces: by the number that the kernel gives it in its file system of processes.

A pidfd names a process in whatever PID namespace it is; its inode is unlike that of any other process since the host
was booted (Linux 6.9). A Unix socket has the pidfd of the process at its other end (Linux 6.5): of the one that
connected, or listened.
"""

import os
import socket
from functools import cache
from typing import Final

__all__ = ["number_of", "own_number", "process_of_stream"]

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
