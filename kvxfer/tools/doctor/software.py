"""Checks of what is installed, and of what is set."""

import platform
import sys
from collections.abc import Generator, Iterator
from typing import Final

from kvxfer import __version__
from kvxfer.errors import KvxferError
from kvxfer.telemetry import overheard
from kvxfer.tools.doctor.findings import Finding, fail, ok, skipped, warn
from kvxfer.tools.doctor.machine import Machine

__all__ = [
    "BEYOND",
    "LEAST",
    "PYTHONS",
    "check_compiled",
    "check_extras",
    "check_python",
    "check_settings",
    "check_torch",
    "check_transport",
]

PYTHONS: Final = ((3, 11), (3, 14))
"""The first that is supported, and the first that is not any more."""
LEAST: Final = {"torch": (2, 8), "nixl": (1, 5)}
BEYOND: Final = {"nixl": (1, 6)}
"""The first versions that are not known any more: of NIXL's C library names stay, and what functions take does not."""
_GPU_EXTRA: Final = {"cuda-bindings": "pip install cuda-bindings", "triton": "pip install triton"}
_SPEAKING: Final = ("UCX_", "NIXL_", "PYTORCH_", "CUDA_", "NCCL_CUMEM")
"""Variables whose values are shown: they are nobody's secrets."""


def check_python(version: tuple[int, ...] = sys.version_info[:3], system: str = sys.platform) -> Iterator[Finding]:
    """Python, the system and kvxfer itself."""
    shown = ".".join(map(str, version))
    least, beyond = PYTHONS
    seen = f"kvxfer {__version__}, Python {shown}, {platform.platform()}"
    supported = f"{least[0]}.{least[1]} to {beyond[0]}.{beyond[1] - 1}"
    if system != "linux":
        yield fail("python", f"{seen}: this is not Linux", "run it on Linux: kvxfer needs its memory and processes")
    elif not least <= version[:2] < beyond:
        yield warn("python", f"{seen}: kvxfer is tested with {supported}", f"use Python {supported}")
    else:
        yield ok("python", seen, kvxfer=__version__, python=shown)


def check_torch(machine: Machine) -> Iterator[Finding]:
    """Torch, and whether it can use the GPUs that the kernel has a driver for."""
    found = yield from _least(machine, "torch")
    cuda = machine.cuda()
    driver = machine.has_gpu_driver
    if not found:
        return
    if cuda and driver:
        yield ok("cuda", f"torch is built for CUDA {cuda}, and the kernel has a driver", cuda=cuda)
    elif cuda:
        yield warn(
            "cuda",
            f"torch is built for CUDA {cuda}, but the kernel has no NVIDIA driver here",
            "install the driver, or give the container its GPUs (docker: --gpus all); without GPUs all is well",
            cuda=cuda,
        )
    elif driver:
        yield fail(
            "cuda",
            "the kernel has an NVIDIA driver, but this torch is built without CUDA",
            "install a torch that is built for CUDA: https://pytorch.org/get-started/locally",
        )
    else:
        yield skipped("cuda", "torch is built without CUDA, and there is no NVIDIA driver: CPU memory only")


def check_transport(machine: Machine) -> Iterator[Finding]:
    """NIXL and UCX; whether they work is tried elsewhere."""
    found = yield from _least(machine, "nixl")
    version = machine.ucx()
    if found and version:
        yield ok("ucx", f"UCX {version}", ucx=version)
    elif found:
        yield warn("ucx", "no UCX was found beside NIXL or in the system", "pip install --force-reinstall nixl")


def check_extras(machine: Machine) -> Iterator[Finding]:
    """What a GPU needs besides."""
    if not machine.has_gpu_driver:
        yield skipped("gpu extras", "cuda-bindings and triton are needed with GPUs only")
        return
    missing = {name: command for name, command in _GPU_EXTRA.items() if not machine.package(name)}
    if missing:
        yield fail("gpu extras", f"not installed: {', '.join(missing)}", " && ".join(missing.values()))
    else:
        yield ok("gpu extras", ", ".join(f"{name} {machine.package(name)}" for name in _GPU_EXTRA))


def check_compiled() -> Iterator[Finding]:
    """Where compiled code is kept."""
    try:
        with overheard({"compiled_code_not_kept"}) as reasons:
            from kvxfer.copy.compiler import cache_folder

            folder = cache_folder()
    except KvxferError as error:
        yield fail("compiled code", str(error), "pip install numba")
        return
    if folder is None:
        yield warn(
            "compiled code",
            f"it cannot be kept, so each process compiles it, for up to a minute: {'; '.join(reasons)}",
            "set XDG_CACHE_HOME or NUMBA_CACHE_DIR to a folder that this user alone may write",
        )
    else:
        yield ok("compiled code", f"it is kept in {folder}", path=str(folder))


def check_settings(machine: Machine) -> Iterator[Finding]:
    """The settings in effect, and what else of the environment speaks to what is below kvxfer."""
    from kvxfer.config import Config

    try:
        changed = [setting for setting in Config.load().effective() if setting.source != "default"]
    except KvxferError as error:
        yield fail("settings", str(error), "mend what the message names; `kvxfer config` says where settings are from")
        return
    shown = ", ".join(f"{setting.name}={setting.value}" for setting in changed)
    yield ok("settings", shown or "all defaults", **{setting.name: setting.value for setting in changed})
    below = {name: value for name, value in sorted(machine.environment.items()) if name.startswith(_SPEAKING)}
    yield ok("environment", ", ".join(f"{name}={value}" for name, value in below.items()) or "nothing is set", **below)


def _least(machine: Machine, name: str) -> Generator[Finding, None, bool]:
    """Whether a package is there, and one that will do; tells the caller whether it is there."""
    version, least, beyond = machine.package(name), LEAST[name], BEYOND.get(name)
    wanted = f">={_dotted(least)}" + (f",<{_dotted(beyond)}" if beyond else "")
    if not version:
        yield fail(name, f"{name} is not installed", f"pip install '{name}{wanted}'")
    elif _numbers(version) < least:
        yield fail(name, f"{name} {version} is older than {_dotted(least)}", f"pip install '{name}{wanted}'")
    elif beyond and _numbers(version) >= beyond:
        yield fail(name, f"{name} {version} is newer than what is known here", f"pip install '{name}{wanted}'")
    else:
        yield ok(name, f"{name} {version}", **{name: version})
    return bool(version)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    parts = version.split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)
