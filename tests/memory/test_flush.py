"""What a GPU needs before it reads what a NIC wrote: the table of its attributes, with a driver that is none."""

from enum import IntEnum
from types import SimpleNamespace

import pytest

from kvxfer.memory import device as module
from kvxfer.memory.device import Arrival, arrival

PREFIX = "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_"
ORDERING, OPTION = "CU_GPU_DIRECT_RDMA_WRITES_ORDERING_", "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_"
Ordering = IntEnum("Ordering", {ORDERING + "NONE": 0, ORDERING + "OWNER": 100, ORDERING + "ALL_DEVICES": 200})
Options = IntEnum("Options", {OPTION + "HOST": 1, OPTION + "MEMOPS": 2})
Code = IntEnum("Code", {"CUDA_SUCCESS": 0})


class Driver:
    """The part of `cuda.bindings.driver` that is called."""

    CUdevice_attribute = SimpleNamespace(
        **{PREFIX + name: name for name in ("WRITES_ORDERING", "FLUSH_WRITES_OPTIONS")}
    )
    CUGPUDirectRDMAWritesOrdering = Ordering
    CUflushGPUDirectRDMAWritesOptions = Options

    def __init__(self, **attributes):
        self.attributes = attributes

    def cuDeviceGet(self, index):
        return Code.CUDA_SUCCESS, f"gpu {index}"

    def cuDeviceGetAttribute(self, name, gpu):
        assert gpu == "gpu 3"
        return Code.CUDA_SUCCESS, self.attributes[name]


@pytest.mark.parametrize(("ordering", "options", "needs"), [
    (0, 0, Arrival.UNKNOWN), (0, 1, Arrival.FLUSHED), (0, 2, Arrival.UNKNOWN), (0, 3, Arrival.FLUSHED),
    (100, 0, Arrival.ORDERED), (100, 3, Arrival.ORDERED), (200, 1, Arrival.ORDERED),
])  # fmt: skip
def test_what_a_device_needs(monkeypatch, ordering, options, needs):
    driver = Driver(WRITES_ORDERING=ordering, FLUSH_WRITES_OPTIONS=options)
    monkeypatch.setattr(module, "load", lambda name, purpose: driver)
    assert arrival(3) is needs
