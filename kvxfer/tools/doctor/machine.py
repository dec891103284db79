"""What checks read of this machine. A test gives them another one, made of a folder and a few values."""

import os
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvxfer.tools import versions

__all__ = ["UCX_LOG", "Machine", "let_ucx_tell"]

UCX_LOG: Final = "ucx-{process}.log"
"""Name of the file in which a process's UCX says what it does."""


@dataclass(frozen=True)
class Machine:
    """The system as checks see it."""

    root: Path = Path("/")  # under which `/proc`, `/sys` and `/dev` are
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit  # soft and hard limit of a resource
    package: Callable[[str], str] = versions.package  # version, empty if it is not installed
    cuda: Callable[[], str] = versions.cuda_of_torch  # that torch was built for, empty if for none
    ucx: Callable[[], str] = versions.ucx  # version, empty if there is none

    def read(self, path: str) -> str:
        """What a file says; empty without it."""
        try:
            return (self.root / path.lstrip("/")).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def link(self, path: str) -> str:
        """Where a link leads; empty without it."""
        try:
            return str((self.root / path.lstrip("/")).readlink())
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """What is in a folder, in order; nothing without it."""
        try:
            return sorted(entry.name for entry in (self.root / path.lstrip("/")).iterdir())
        except OSError:
            return []

    @property
    def has_gpu_driver(self) -> bool:
        """Whether the kernel has a driver for GPUs, so that it is worth asking CUDA."""
        return bool(self.read("/proc/driver/nvidia/version")) or "nvidiactl" in self.names("/dev")


def let_ucx_tell(folder: Path) -> None:
    """From the first agent of this process on, let UCX write down which lanes it takes, and nothing on the terminal."""
    os.environ["UCX_PROTO_INFO"] = "y"
    os.environ["UCX_LOG_LEVEL"] = "warn"
    os.environ["UCX_LOG_FILE"] = str(folder / UCX_LOG.format(process="%p"))
