"""A machine made of a folder and a few values, and a channel between two tasks."""

import asyncio
import os
import resource

import pytest

from kvxfer.tools.doctor.machine import Machine


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("KVXFER_", "UCX_", "NIXL_", "PYTORCH_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def make_machine(tmp_path):
    """Files by path, limits by name, packages by name."""

    def make(files=(), *, limits=(), packages=(), environment=(), cuda="", ucx="1.23.0", gpu=False):
        for path, text in dict(files).items():
            place = tmp_path / path.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        if gpu:
            place = tmp_path / "proc/driver/nvidia/version"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03")
        set_limits = {getattr(resource, f"RLIMIT_{name}"): pair for name, pair in dict(limits).items()}
        return Machine(
            root=tmp_path,
            environment=dict(environment),
            limit=lambda which: set_limits[which],
            package=lambda name: dict(packages).get(name, ""),
            cuda=lambda: cuda,
            ucx=lambda: ucx,
        )

    return make


class Ends:
    """One end of a way between two tasks."""

    def __init__(self, out, into):
        self._out, self._into = out, into

    def send(self, item):
        self._out.put_nowait(item)

    async def hear(self):
        return await self._into.get()


@pytest.fixture
def channels():
    there, back = asyncio.Queue(), asyncio.Queue()
    return Ends(there, back), Ends(back, there)
