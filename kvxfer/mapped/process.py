"""Which host this is, and which process is which across its namespaces: only within one can memory be mapped.

A pidfd names a process in whatever PID namespace it is; its inode is unlike that of any other process since the host
was booted (Linux 6.9). A Unix socket has the pidfd of the process at its other end (Linux 6.5): of the one that
connected, or listened.
"""

import os
import socket
from functools import cache
from pathlib import Path
from typing import Final

__all__ = ["elsewhere", "here", "may_be_elsewhere", "number_of", "own_number", "process_of_stream", "unlike"]

# --- this host

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
