"""What a real GPU says of writes by NICs, and the call that flushes them: with `-s` both are printed."""

import ctypes
import queue
import sys
import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.append(str(Path(__file__).parent.parent / "copy"))

from copy_plans import contiguous_rows  # noqa: E402  # pyright: ignore[reportMissingImports]
from threaded import Threaded  # noqa: E402  # pyright: ignore[reportMissingImports]

from kvxfer.copy import cuda, records  # noqa: E402
from kvxfer.copy.port import CopyOutcome, Direction  # noqa: E402
from kvxfer.geometry.copyplan import CopyPlan  # noqa: E402
from kvxfer.memory.device import Arrival, arrival, call, load  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_the_attributes_are_there_and_agree_with_what_is_made_of_them():
    driver = load("driver", "this test")
    for device in range(torch.cuda.device_count()):
        found, seen = arrival(device), dict[str, int]()
        gpu = call(driver, "cuDeviceGet", device)
        for name in ("SUPPORTED", "FLUSH_WRITES_OPTIONS", "WRITES_ORDERING"):
            attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_{name}")
            seen[name] = int(call(driver, "cuDeviceGetAttribute", attribute, gpu))
        print(f"\nGPU {device}: {seen}, so {found}")
        assert (found is Arrival.ORDERED) == (seen["WRITES_ORDERING"] >= 100)


@pytest.mark.skipif(
    torch.cuda.is_available() and arrival(0) is Arrival.UNKNOWN, reason="the device cannot be flushed from here"
)
def test_a_flush_is_made_on_the_thread_of_the_mover(monkeypatch):
    """The real call, as if the device needed it, in front of copies with and without anything to copy."""
    took = []
    monkeypatch.setattr(cuda, "arrival", lambda device: Arrival.FLUSHED)
    gpu = cuda.Gpu(0)
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    flush = function(gpu.functions[records.FLUSH])

    def timed(target, scope):
        began = time.perf_counter()
        code = flush(target, scope)
        took.append((threading.current_thread().name, code, time.perf_counter() - began))
        return code

    watched = function(timed)
    gpu.functions[records.FLUSH] = ctypes.cast(watched, ctypes.c_void_p).value or 0
    mover = Threaded(gpu=gpu)
    memory = torch.zeros(2, 64, dtype=torch.uint8, device="cuda:0")
    at = memory[0].data_ptr(), memory[1].data_ptr()
    torch.cuda.synchronize()
    copying = contiguous_rows(*at, rows=1, regions=1, row_bytes=64, pool=1)
    try:
        for plan in [CopyPlan(()), copying] * 50:
            outcomes: queue.SimpleQueue[CopyOutcome] = queue.SimpleQueue()
            mover.submit(plan, outcomes.put, Direction.SCATTER, from_nic=True)
            assert outcomes.get(timeout=60).error is None
    finally:
        assert mover.close(30)
    assert {(name, code) for name, code, _ in took} == {("kvxfer-mover", 0)}
    assert len(took) == 100
    print(f"\na flush takes {min(seconds for _, _, seconds in took) * 1e6:.1f} us at best, of {len(took)}")
