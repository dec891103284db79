"""GPU memory of another process: mapped, written by our kernel through a gate, and what becomes of it when one dies."""

import contextlib
import multiprocessing as mp
import os
import select
import sys
import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed")

sys.path.append(str(Path(__file__).parent.parent / "copy"))

from threaded import Threaded  # noqa: E402  # pyright: ignore[reportMissingImports]

from kvxfer.copy.port import READY, Gate  # noqa: E402
from kvxfer.errors import FabricError  # noqa: E402
from kvxfer.geometry.copyplan import Box, CopyPlan, Segment  # noqa: E402
from kvxfer.mapped.host import OpenFiles, export, joined, open_window  # noqa: E402
from kvxfer.memory.device import Backing, allocate, call, load, upload  # noqa: E402
from kvxfer.protocol.messages import MappedMemory  # noqa: E402
from kvxfer.safety.fence import GATE_BYTES, first_words  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 interprets kernels"),
]
CONTEXT = mp.get_context("spawn")
MIB = 1 << 20
SIZE = 256 * MIB
CANARY = 0xAB
GENERATION = 1


def plan(src, dst, nbytes=SIZE, row=64 << 10):
    """Rows of one region, in the order of the destination's last one first."""
    rows = torch.arange(nbytes // row)
    table = torch.stack([rows, rows * 0, rows.flip(0), rows * 0, rows * 0 + 1], dim=1).numpy()
    box = Box((), row, row, row, token_in_run=True)
    bases = torch.tensor([[src, dst]], dtype=torch.int64).numpy()
    return CopyPlan((Segment(bases, table, row, row, box),))


class Copies:
    """A mover, and copies that are waited for."""

    def __init__(self, device, ctas=24):
        self.mover = Threaded(device, ctas=ctas)

    def begin(self, what, gate=None, after=READY):
        ended, outcomes = threading.Event(), []

        def done(outcome):
            outcomes.append(outcome)
            ended.set()

        self.mover.submit(what, done, after=after, gate=gate)
        return ended, outcomes

    def run(self, what, gate=None):
        ended, outcomes = self.begin(what, gate)
        assert ended.wait(60)
        assert outcomes[0].error is None, outcomes[0].error
        return outcomes[0]


@contextlib.contextmanager
def copies(device):
    made = Copies(device)
    yield made
    assert made.mover.close(20)


def flipped(memory, row=64 << 10):
    return memory.view(-1, row).flip(0).reshape(-1)


# ---- the gate


def gate_words(device):
    """Gates as a worker makes them, and a view of the first."""
    backing = allocate("cuda", len(first_words()), device)
    upload(device, backing.address, first_words())
    return backing


def word_of(address, device):
    """What a gate holds."""
    runtime = load("runtime", "this test")
    found = torch.zeros(1, dtype=torch.int64)
    torch.cuda.set_device(device)
    call(runtime, "cudaMemcpy", found.data_ptr(), address, 8, runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost)
    return int(found)


def connect():
    """Let each GPU address the other."""
    torch.zeros(1, device="cuda:0").to("cuda:1")
    torch.zeros(1, device="cuda:1").to("cuda:0")


@pytest.mark.parametrize("generation", [GENERATION, GENERATION + 1])
def test_a_gate_in_the_memory_of_the_other_gpu(generation):
    connect()
    source = torch.randint(0, 255, (SIZE,), dtype=torch.uint8, device="cuda:0")
    target = torch.full((SIZE,), CANARY, dtype=torch.uint8, device="cuda:1")
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    words = gate_words(1)
    address = words.address + 3 * GATE_BYTES
    with copies(0) as made:
        outcome = made.run(plan(source.data_ptr(), target.data_ptr()), Gate(address, generation))
    fits = generation == GENERATION
    assert outcome.stopped is not fits
    assert torch.equal(target.to("cuda:0"), flipped(source) if fits else torch.full_like(source, CANARY))
    assert word_of(address, 1) == GENERATION << 32
    words.close()


def test_a_gate_that_is_raised_lets_those_inside_end_and_nobody_else_in():
    """With copies of GPU 0 on their way into memory of GPU 1, whose owner takes it back in their midst."""
    connect()
    source = torch.zeros(SIZE, dtype=torch.uint8, device="cuda:0")
    target = torch.zeros(SIZE, dtype=torch.uint8, device="cuda:1")
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    words = gate_words(1)
    address, what = words.address + 5 * GATE_BYTES, plan(source.data_ptr(), target.data_ptr())
    with copies(0) as writing, copies(1) as owning:
        owner = owning.mover
        assert owner.inside(address, raised=False) == 0  # and is compiled
        under_way = [writing.begin(what, Gate(address, GENERATION)) for _ in range(200)]
        assert under_way[5][0].wait(20)
        began = time.monotonic()
        seen = [owner.inside(address, raised=True)]
        while seen[-1]:
            seen.append(owner.inside(address, raised=False))
        took = time.monotonic() - began
        target.fill_(CANARY)  # it is its owner's now
        torch.cuda.synchronize(1)
        stopped = []
        for ended, outcomes in under_way:
            assert ended.wait(60)
            assert outcomes[0].error is None
            stopped.append(outcomes[0].stopped)
        assert stopped == sorted(stopped)
        assert (stopped[0], stopped[-1]) == (False, True)
        assert bool((target == CANARY).all())
        assert word_of(address, 1) == (GENERATION + 1) << 32
        assert not writing.run(what, Gate(address, GENERATION + 1)).stopped
        assert not target.any()
    print(f"\n{seen[0]} thread blocks inside when it was raised; empty after {len(seen)} looks, {took * 1e6:.0f} us")
    words.close()


# ---- another process


def exported(device, *memories, files=None):
    """What is told of the memory in which these tensors and backings lie."""
    spans = [(m.address, m.length) if isinstance(m, Backing) else (m.data_ptr(), m.nbytes) for m in memories]
    kept = OpenFiles() if files is None else files
    return export("cuda", device, [range(start, start + length) for start, length in spans], kept)


def owner(device, answer):
    """Allocate as torch does, export, and fill with a canary; then wait."""
    memory = torch.full((SIZE,), CANARY, dtype=torch.uint8, device=f"cuda:{device}")
    torch.cuda.synchronize(device)
    words = gate_words(device)
    exports = exported(device, memory, words)
    answer.send((exports, memory.data_ptr(), words.address))
    while answer.recv() == "sum":
        answer.send(int(memory.to(torch.int64).sum()))
    words.close()


@contextlib.contextmanager
def process(work, *arguments):
    here, there = CONTEXT.Pipe()
    child = CONTEXT.Process(target=work, args=(*arguments, there), daemon=True)
    child.start()
    there.close()
    try:
        yield child, here
    finally:
        child.kill()
        child.join()


def opened(exports, device=0):
    return [open_window(given, "cuda", device) for given in joined(exports)]


def located(windows, address):
    window = next(window for window in windows if window.address <= address < window.address + window.length)
    return window.local + address - window.address


@pytest.mark.parametrize("device", [0, 1], ids=["the same gpu", "the other gpu"])
def test_memory_of_another_process_is_written_and_unmapped(device):
    source = torch.randint(0, 255, (SIZE,), dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize(0)
    with process(owner, device) as (_, pipe), copies(0) as made:
        exports, memory, words = pipe.recv()
        windows, again = opened(exports), opened(exports)
        assert [window.local for window in windows] == [window.local for window in again]  # once a process
        for window in again:
            window.close()
        gate = Gate(located(windows, words), GENERATION)
        assert not made.run(plan(source.data_ptr(), located(windows, memory)), gate).stopped
        pipe.send("sum")
        assert pipe.recv() == int(source.to(torch.int64).sum())
        for window in windows:
            window.close()
        pipe.send("end")


def test_an_address_inside_of_what_torch_allocated_is_found():
    memory = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda:0")
    (given,) = exported(0, memory[12345:], memory)
    assert given.address <= memory.data_ptr()
    assert memory.data_ptr() + memory.numel() <= given.address + given.length


def test_memory_without_a_handle_is_refused_by_name():
    pinned = torch.zeros(MIB, dtype=torch.uint8, pin_memory=True)
    with pytest.raises(FabricError, match="cudaMalloc"):
        exported(0, pinned)


def test_a_handle_of_nobody_is_refused():
    with pytest.raises(FabricError, match="cudaIpcOpenMemHandle"):
        open_window(MappedMemory("cuda_ipc", "00" * 16, 1 << 40, MIB, bytes(68)), "cuda", 0)


# ---- death


def test_the_owner_dies_under_a_kernel_that_writes_its_memory():
    source = torch.randint(0, 255, (SIZE,), dtype=torch.uint8, device="cuda:0")
    kept = torch.zeros(SIZE, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize(0)
    with copies(0) as made:
        with process(owner, 1) as (child, pipe):
            exports, memory, words = pipe.recv()
            windows = opened(exports)
            what = plan(source.data_ptr(), located(windows, memory))
            gate = Gate(located(windows, words), GENERATION)
            made.run(what, gate)
            under_way = [made.begin(what, gate) for _ in range(200)]
            under_way[5][0].wait(20)
            child.kill()
            while child.is_alive():  # that takes as long as it takes, and they run all the while
                if under_way[-100][0].is_set():
                    under_way += [made.begin(what, gate) for _ in range(100)]
            child.join()
            assert not under_way[-1][0].is_set()  # it died while they ran
            for ended, outcomes in under_way:
                assert ended.wait(60)
                assert outcomes[0].error is None
        made.run(plan(source.data_ptr(), kept.data_ptr()))  # the context is whole
        assert torch.equal(kept, flipped(source))
        for window in windows:
            window.close()


def writer(exports, memory, words, answer):
    """Write the memory of another process over and over."""
    source = torch.zeros(SIZE, dtype=torch.uint8, device="cuda:1")
    torch.cuda.synchronize(1)
    windows = opened(exports, device=1)
    made = Copies(1)
    what = plan(source.data_ptr(), located(windows, memory))
    gate = Gate(located(windows, words), GENERATION)
    made.run(what, gate)
    answer.send("writing")
    while True:
        for ended, _ in [made.begin(what, gate) for _ in range(50)]:
            ended.wait(60)


def nothing_lands_after_the_death_of(work, memory, **more):
    memory.fill_(CANARY)
    torch.cuda.synchronize(0)
    words = gate_words(0)
    exports = exported(0, memory, words, **more)
    with process(work, exports, memory.data_ptr(), words.address) as (child, pipe):
        assert pipe.recv() == "writing"
        gone = os.pidfd_open(int(child.pid or 0))
        child.kill()
        assert select.select([gone], [], [], 20)[0]
        os.close(gone)
        memory.fill_(CANARY)
        torch.cuda.synchronize(0)
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            assert bool((memory == CANARY).all())
    words.close()


def test_nothing_lands_after_the_writer_has_died_under_its_kernel():
    nothing_lands_after_the_death_of(writer, torch.empty(SIZE, dtype=torch.uint8, device="cuda:0"))
