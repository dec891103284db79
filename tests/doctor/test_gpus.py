"""What is said of GPUs that are not there."""

import ctypes
from types import SimpleNamespace

import pytest

from kvxfer.tools.doctor import gpus
from kvxfer.tools.doctor.gpus import Gpu, Reach

GIB = 1 << 30
FAST = Reach(access=True, atomics=True)


def gpu(index, other=FAST, *, free=100 * GIB, links: int | None = 18):
    return Gpu(index, "NVIDIA H200", 140 * GIB, free, {1 - index: other}, links)


@pytest.mark.parametrize(
    ("there", "expected", "status"),
    [
        ([], False, "skipped"),
        ([], True, "fail"),
        ([gpu(0), gpu(1)], True, "ok"),
        ([gpu(0), gpu(1, free=GIB)], True, "warn"),
    ],
)
def test_gpus(there, expected, status):
    (found,) = gpus.check_gpus(there, expected=expected)
    assert found.status == status
    assert "GPU 1 is nearly full" in found.remedy or status != "warn"


@pytest.mark.parametrize(
    ("there", "status", "said"),
    [
        ([gpu(0)], "skipped", "two GPUs"),
        ([gpu(0), gpu(1)], "ok", "each of 2 GPUs"),
        ([gpu(0), gpu(1, Reach(access=False))], "warn", "none for 1->0"),
        ([gpu(0, Reach(access=True, atomics=False)), gpu(1)], "warn", "no atomics for 0->1"),
        ([gpu(0, Reach(access=True)), gpu(1)], "ok", "each of 2 GPUs"),
    ],
)
def test_peer_access(there, status, said):
    (found,) = gpus.check_peers(there)
    assert found.status == status
    assert said in found.seen


@pytest.mark.parametrize(
    ("there", "status"),
    [
        ([gpu(0)], "skipped"),
        ([gpu(0), gpu(1)], "ok"),
        ([gpu(0), gpu(1, links=0)], "warn"),
        ([gpu(0), gpu(1, links=None)], "skipped"),
    ],
)
def test_nvlink(there, status):
    (found,) = gpus.check_links(there)
    assert found.status == status


@pytest.mark.parametrize(
    ("environment", "status"),
    [
        ({}, "ok"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}, "ok"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "ok"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8, expandable_segments: True"}, "warn"),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, "warn"),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:False", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            "ok",
        ),
    ],
)
def test_the_allocator(environment, status):
    (found,) = gpus.check_allocator(environment)
    assert found.status == status
    assert all(f"{name}=" in found.seen for name in list(environment)[:1])


class Library(SimpleNamespace):
    """NVML of a machine with two GPUs, of which the second has no links."""

    shut = 0

    def nvmlInit_v2(self):
        return 0

    def nvmlShutdown(self):
        self.shut += 1

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus, device):
        known = {b"0000:1b:00.0": 1, b"0000:5c:00.0": 2}.get(bus)
        if known is None:
            return 6
        ctypes.cast(device, ctypes.POINTER(ctypes.c_void_p))[0] = known
        return 0

    def nvmlDeviceGetNvLinkState(self, device, link, state):
        if device.value == 2:
            return 3  # not supported
        ctypes.cast(state, ctypes.POINTER(ctypes.c_uint))[0] = int(link.value != 5)
        return 0


def test_links_are_counted():
    library = Library()
    assert gpus.links(["0000:1b:00.0", "0000:5c:00.0", "0000:ff:00.0"], library) == {
        "0000:1b:00.0": 17,
        "0000:5c:00.0": 0,
    }
    assert library.shut == 1
    assert gpus.links(["0000:1b:00.0"], SimpleNamespace(nvmlInit_v2=lambda: 9)) == {}
    assert gpus.links(["0000:1b:00.0"], SimpleNamespace()) == {}
