"""Versions of what kvxfer runs on, without importing any of it: for `kvxfer --version` and `kvxfer doctor`."""

import ctypes
import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvxfer import __version__

__all__ = ["MISSING", "cuda_of_torch", "first_match", "package", "ucx", "versions"]

MISSING: Final = "is not installed"
_WHEELS: Final = ("nixl-cu13", "nixl-cu12", "nixl")
"""Packages that may hold NIXL's own copy of UCX, as nixl itself looks for them."""
_CUDA: Final = r"^cuda\b[^=]*=\s*'([\d.]+)'"


def versions() -> dict[str, str]:
    """What to say of each, by its name: a version, or why there is none."""
    from kvxfer.protocol.messages import WIRE_MIN, WIRE_VERSION

    return {
        "kvxfer": __version__,
        "wire": f"{WIRE_VERSION} (speaks {WIRE_MIN} to {WIRE_VERSION})",
        "nixl": package("nixl") or MISSING,
        "ucx": ucx() or "was not found",
        "torch": package("torch") or MISSING,
        "cuda": cuda_of_torch() or "is not in this build of torch",
    }


def package(name: str) -> str:
    """Version of an installed package; empty if it is not there."""
    found = _distribution(name)
    return "" if found is None else found.version


def ucx() -> str:
    """Version of the UCX that NIXL brings, or of the system's; empty without any."""
    for path in [*_bundled(), "libucp.so.0"]:
        try:
            say = ctypes.CDLL(path).ucp_get_version_string
        except (OSError, AttributeError):
            continue
        say.restype = ctypes.c_char_p
        return str(say().decode("ascii", "replace"))
    return ""


def cuda_of_torch() -> str:
    """Version of CUDA that torch was built for; empty if it was built for none, or is not there."""
    try:
        spec = find_spec("torch")
    except ValueError:  # something else is in its place
        return ""
    if spec is None or spec.origin is None:
        return ""
    return first_match(_CUDA, Path(spec.origin).with_name("version.py"))


def _bundled() -> list[str]:
    """Files in which NIXL's wheels may bring UCX."""
    wheels = [found for name in _WHEELS if (found := _distribution(name)) is not None]
    return [
        str(file.locate())
        for wheel in wheels
        for file in wheel.files or []
        if re.match(r"libucp(-[0-9a-f]+)?\.so", file.name)
    ]


def _distribution(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def first_match(pattern: str, file: Path) -> str:
    """What the first group finds in a file; empty if there is no such file or line."""
    try:
        found = re.search(pattern, file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""
