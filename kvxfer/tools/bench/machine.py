"""What a run was made on and with: without it no figure means anything."""

import datetime as dt
import os
import platform
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import torch

import kvxfer
from kvxfer.config import Config
from kvxfer.tools.bench.device import Kind, device_names, sides
from kvxfer.tools.versions import first_match, package

__all__ = ["describe", "headline"]

_PACKAGES: Final = ("torch", "nixl", "triton", "numpy", "cuda-bindings", "uvloop", "mooncake-transfer-engine")


def describe(spec: Any) -> dict[str, Any]:
    """Versions, hardware and settings, and what a benchmark was asked to measure."""
    config, kind = Config(), spec.device
    return {
        "started": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "versions": {"kvxfer": kvxfer.__version__, "python": platform.python_version()} | _versions(),
        "hardware": _hardware(kind),
        "device": kind,
        "devices": sides(kind),
        "arguments": {field.name: getattr(spec, field.name) for field in fields(spec)},
        "settings": {one.name: one.value for one in config.effective() if one.source != "default"},
        "command": " ".join(["kvxfer", *sys.argv[1:]]),
    }


def headline(head: dict[str, Any]) -> str:
    """The machine and the versions in one line."""
    hardware, versions = head["hardware"], head["versions"]
    devices = " and ".join(hardware["gpus"]) or "CPU memory"
    cpu = f"{hardware['cpu']}, {hardware['cores']} cores, {platform.machine()}"
    named = ", ".join(f"{name} {versions[name]}" for name in ("kvxfer", "torch", "nixl") if name in versions)
    driver = f", driver {hardware['driver']}" if hardware["driver"] else ""
    return f"{devices} ({cpu}{driver}); {named}, Python {versions['python']}"


def _versions() -> dict[str, str]:
    found = {name: version for name in _PACKAGES if (version := package(name))}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def _hardware(kind: Kind) -> dict[str, Any]:
    return {
        "cpu": first_match(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo")) or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "gpus": device_names(kind),
        "driver": first_match(r"Kernel Module.*?(\d+\.[\d.]+)", Path("/proc/driver/nvidia/version")),
        "peer_access": kind == "cuda" and torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(0, 1),
    }
