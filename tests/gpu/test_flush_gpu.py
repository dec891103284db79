"""What a real GPU says of writes by NICs, and the call that flushes them.

    python -m pytest tests/gpu/test_flush_gpu.py -s

prints the attributes.
"""

import queue
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from kvxfer.copy import CopyJob, CopyOutcome, Direction, cuda  # noqa: E402
from kvxfer.copy.cuda import CudaExecutor  # noqa: E402
from kvxfer.geometry.copyplan import CopyPlan  # noqa: E402
from kvxfer.memory.driver import call, load  # noqa: E402
from kvxfer.memory.flush import Arrival, arrival, flush  # noqa: E402
from kvxfer.runtime import ThreadRuntime  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_the_attributes_are_there_and_agree_with_what_is_made_of_them():
    driver = load("driver", "this test")
    names = ("SUPPORTED", "FLUSH_WRITES_OPTIONS", "WRITES_ORDERING")
    for device in range(torch.cuda.device_count()):
        found = arrival(device)
        gpu = call(driver, "cuDeviceGet", device)
        seen = {
            name: int(
                call(
                    driver,
                    "cuDeviceGetAttribute",
                    getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_{name}"),
                    gpu,
                )
            )
            for name in names
        }
        print(f"\nGPU {device}: {seen}, so {found}")
        assert (found is Arrival.ORDERED) == (seen["WRITES_ORDERING"] >= 100)


@pytest.mark.skipif(
    torch.cuda.is_available() and arrival(0) is Arrival.UNKNOWN, reason="the device cannot be flushed from here"
)
def test_a_flush_is_made_on_the_thread_of_the_executor(monkeypatch):
    """The real call, as if the device needed it, in front of jobs with and without anything to copy."""
    took = []

    def timed():
        began = time.perf_counter()
        flush()
        took.append((threading.current_thread().name, time.perf_counter() - began))

    monkeypatch.setattr(cuda, "arrival", lambda device: Arrival.FLUSHED)
    monkeypatch.setattr(cuda, "flush", timed)
    executor = CudaExecutor(ThreadRuntime(), 0)
    try:
        for _ in range(100):
            outcomes: queue.SimpleQueue[CopyOutcome] = queue.SimpleQueue()
            executor.submit(CopyJob(CopyPlan((), from_nic=True), outcomes.put), Direction.SCATTER)
            assert outcomes.get(timeout=60).error is None
    finally:
        assert executor.close(30)
    assert {name for name, _ in took} == {"kvxfer-copy-cuda:0"}
    print(f"\na flush takes {min(seconds for _, seconds in took) * 1e6:.1f} us at best, of {len(took)}")
