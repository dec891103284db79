"""Open files as handles: those of this process that others may take, and taking one from another process.

`/proc/<pid>/fd` would open a file anew, which for memory of a GPU is another file. So one is duplicated
(`pidfd_getfd`), which the kernel allows to whoever may trace the other process.
"""

import contextlib
import ctypes
import errno
import os
import resource
from collections.abc import Callable, Generator
from functools import cache
from typing import Any, Final

from kvxfer.errors import FabricError

__all__ = ["Descriptors", "files_of"]

_PIDFD_GETFD: Final = 438
"""Number of the system call, the same on every architecture; libc has no function for it before glibc 2.36."""
_SHARE: Final = 0.75
"""How much of the open files that this process may have is used at most: the rest is for everything else."""
_REMEDY: Final = (
    "run both as one user, and set kernel.yama.ptrace_scope=0 or give this process CAP_SYS_PTRACE (containers: "
    "--cap-add=SYS_PTRACE, and a seccomp profile that allows pidfd_getfd); or allocate the cache with plain cudaMalloc "
    "(expandable_segments:False), which needs none of this"
)


class Descriptors:
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

    Args:
        process: Its number.

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
