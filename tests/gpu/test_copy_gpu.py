"""Copies on real GPUs: what the interpreter cannot show: alignment, 64-bit addresses, races and streams."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parent.parent.parent
sys.path.append(str(ROOT / "tests" / "copy"))

import conversions  # noqa: E402  # pyright: ignore[reportMissingImports]
import packing  # noqa: E402  # pyright: ignore[reportMissingImports]
from copy_plans import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    CANARY,
    PAIRS,
    contiguous_rows,
    converting,
    expected,
    head_split,
    hnd_to_nhd,
    random_plan,
)
from staged import Blank, Blanked  # noqa: E402  # pyright: ignore[reportMissingImports]
from threaded import Outcome, Threaded  # noqa: E402  # pyright: ignore[reportMissingImports]

from kvxfer.copy import tables  # noqa: E402
from kvxfer.copy.port import READY, Direction, as_event  # noqa: E402
from kvxfer.errors import ClosedError, EventError, KvxferError, TransferFailedError  # noqa: E402
from kvxfer.geometry import CacheGeometry, CacheTensor  # noqa: E402
from kvxfer.geometry.copyplan import (  # noqa: E402
    Box,
    BoxAxis,
    CopyPlan,
    Segment,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 interprets kernels"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
AXES = "layer block token head dim"


class Runner:
    """A mover, and copies that are waited for."""

    def __init__(self, device=0, **options):
        self.copies = Threaded(device, **options)
        self._changed = threading.Condition()
        self.outcomes = {}
        self.order = []

    def submit(self, name, plan, direction=Direction.GATHER, after=READY, **job):
        def done(outcome):
            with self._changed:
                assert name not in self.outcomes, f"{name} was reported twice"
                self.outcomes[name] = outcome
                self.order.append(name)
                self._changed.notify_all()

        self.copies.submit(plan, done, direction, after=after, **job)

    def wait(self, count, timeout=60):
        with self._changed:
            enough = self._changed.wait_for(lambda: len(self.outcomes) >= count, timeout)
        assert enough, f"{len(self.outcomes)} of {count}"

    def copy(self, plan, direction=Direction.GATHER):
        outcome = Outcome()
        self.copies.submit(plan, outcome, direction)
        outcome.get()

    def errors(self):
        return [outcome.error for outcome in self.outcomes.values() if outcome.error is not None]


@pytest.fixture
def runner():
    runner = Runner()
    yield runner
    assert runner.copies.close(30)


@pytest.fixture
def small_ring():
    runner = Runner(ring_bytes=64 * KIB)
    yield runner
    assert runner.copies.close(30)


def noise(nbytes, seed=0, device="cuda:0"):
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device, generator=generator)


def canvas(nbytes, device="cuda:0"):
    return torch.full((nbytes,), CANARY, dtype=torch.uint8, device=device)


def recorded(event):
    """Whether an event may be passed as `after=`."""
    tensor = torch.zeros(1, 2, 4, 1, 8, dtype=torch.uint8, device="cuda:0")
    try:
        return as_event(event, CacheGeometry.of([CacheTensor(tensor, AXES, layers=[0], heads=range(1))])) is event
    except EventError:
        return False


def settle():
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


# ---- right bytes


def every_size(src, dst):
    """One row of every size from 1 to 257 bytes, from every alignment to every alignment. Slots of 288 bytes."""
    slot = 288
    a, b = (axis.ravel() for axis in np.meshgrid(np.arange(16), np.arange(16), indexing="ij"))
    segments = []
    for size in range(1, 258):
        number = (size - 1) * 256 + np.arange(256)
        zero = np.zeros(256, np.int64)
        rows = np.stack([number * slot + a, zero, number * slot + b, zero, zero + 1], axis=1).astype(np.int64)
        box = Box((), size, size, size, token_in_run=True)
        segments.append(Segment(np.asarray([[src, dst]], np.int64), rows, 1, 1, box))
    return CopyPlan(tuple(segments)), 257 * 256 * slot


@pytest.mark.parametrize("memory", ["device", "from pinned", "to pinned"])
def test_every_size_at_every_alignment(runner, memory):
    _, nbytes = every_size(0, 0)
    src, dst = noise(nbytes), canvas(nbytes)
    if memory == "from pinned":
        src = src.cpu().pin_memory()
    if memory == "to pinned":
        dst = dst.cpu().pin_memory()
    plan, _ = every_size(src.data_ptr(), dst.data_ptr())
    assert src.data_ptr() % 16 == dst.data_ptr() % 16 == 0
    settle()
    assert {launch.variant.width for launch in packing.pack(plan).launches} == set(tables.WIDTHS)
    want = expected(plan, src.cpu().numpy(), src.data_ptr(), dst.cpu().numpy(), dst.data_ptr())
    runner.copy(plan)
    np.testing.assert_array_equal(dst.cpu().numpy(), want)


def test_random_plans(runner):
    nbytes = MIB
    src, pinned_src = noise(nbytes), noise(nbytes).cpu().pin_memory()
    host_src = src.cpu().numpy()
    dst, pinned_dst = canvas(nbytes), canvas(nbytes).cpu().pin_memory()
    for seed in range(400):
        source = pinned_src if seed % 10 == 8 else src
        target = pinned_dst if seed % 10 == 9 else dst
        target.fill_(CANARY)
        settle()
        plan, _, _ = random_plan(seed, source.data_ptr(), target.data_ptr(), nbytes)
        want = expected(plan, host_src, source.data_ptr(), target.cpu().numpy(), target.data_ptr())
        runner.copy(plan, Direction.SCATTER if seed % 2 else Direction.GATHER)
        np.testing.assert_array_equal(target.cpu().numpy(), want, err_msg=f"seed {seed}")


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_every_element_is_converted_as_on_a_cpu(runner, src, dst):
    """All elements of 8 and 16 bits, and of 32 those near all others; wide accesses and narrow ones."""
    given = conversions.patterns(src)
    count = len(given) // 8 * 8
    on_gpu = given.to("cuda:0")
    for multiply, divide, count_now in ((1.0, 1.0, count), (0.0123, 1.7, count - 1), (3e38, 1e-3, count)):
        made = torch.zeros(count, dtype=getattr(torch, dst), device="cuda:0")
        at, to = on_gpu.data_ptr(), made.data_ptr()
        settle()
        runner.copy(conversions.line(src, dst, at, to, count_now, [(multiply, divide)]))
        want = conversions.reference(given[:count_now], dst, multiply, divide)
        kind = conversions.INTEGERS[made.itemsize]
        wrong = (made.cpu()[:count_now].view(kind) != want.view(kind)).nonzero().ravel()
        assert not len(wrong), (given[wrong[:5]], made.cpu()[wrong[:5]], want[wrong[:5]])
        assert (made.cpu()[count_now:].view(kind) == 0).all()


def test_random_plans_that_convert(runner):
    nbytes = MIB
    src, dst = noise(nbytes), canvas(nbytes)
    host_src = src.cpu().numpy()
    for seed in range(300):
        dst.fill_(CANARY)
        settle()
        plan = random_plan(seed, src.data_ptr(), dst.data_ptr(), nbytes, converts=True, most=8192)[0]
        want = conversions.expected(plan, host_src, src.data_ptr(), dst.cpu().numpy(), dst.data_ptr())
        runner.copy(plan, Direction.SCATTER if seed % 2 else Direction.GATHER)
        np.testing.assert_array_equal(dst.cpu().numpy(), want, err_msg=f"seed {seed}")


def test_large_conversions_equal_those_on_a_cpu(runner):
    """64 MiB in rows of several heads, from NHD to HND, with numbers of its own in each region."""
    for src_name, dst_name in (("bfloat16", "float8_e4m3fn"), ("float8_e4m3fn", "bfloat16"), ("float16", "bfloat16")):
        e = converting(src_name, dst_name)
        rows, regions, block = 256, 8, 16 * 8 * 128
        given = noise(rows * regions * block * e.src_bytes)
        made, host_made = (
            canvas(rows * regions * block * e.dst_bytes),
            canvas(rows * regions * block * e.dst_bytes).cpu(),
        )
        rng = np.random.default_rng(1)
        zero = np.zeros(rows, np.int64)
        table = np.stack([rng.permutation(rows), zero, rng.permutation(rows), zero, zero + 16], axis=1)
        step = np.arange(regions)[:, None] * rows * block * np.asarray([[e.src_bytes, e.dst_bytes]])
        factors = np.exp2(rng.normal(0, 3, (regions, 2))).astype(np.float32)
        s, d = e.src_bytes, e.dst_bytes
        box = Box((BoxAxis(8, 128 * s, 16 * 128 * d),), 8 * 128 * s, 128 * d, 128, token_in_run=False, elements=e)

        def plan(at, to, table=table, step=step, factors=factors, box=box, blocks=(block * s, block * d)):
            return CopyPlan((Segment(np.asarray([[at, to]]) + step, table, blocks[0], blocks[1], box, factors),))

        on_cpu = given.cpu()
        settle()
        runner.copy(plan(given.data_ptr(), made.data_ptr()))
        packing.copy(packing.pack(plan(on_cpu.data_ptr(), host_made.data_ptr())))
        assert torch.equal(made.cpu(), host_made)


def test_large_layouts_byte_by_byte(runner):
    src, dst = noise(512 * MIB), canvas(512 * MIB)
    rng = np.random.default_rng(3)
    for make in (
        lambda *at: contiguous_rows(*at, rows=700, regions=5, row_bytes=32 * KIB, pool=1000, rng=rng),
        lambda *at: contiguous_rows(*at, rows=9000, regions=7, row_bytes=2 * KIB, pool=20000, rng=rng),
        lambda *at: contiguous_rows(*at, rows=9000, regions=7, row_bytes=132, pool=20000, rng=rng),
        lambda *at: head_split(*at, rows=1000, regions=5, pool=2000, rng=rng),
        lambda *at: head_split(*at, rows=1000, regions=5, pool=2000, rng=rng, row_bytes=33),
        lambda *at: hnd_to_nhd(*at, rows=700, regions=5, pool=1000, rng=rng),
    ):
        dst.fill_(CANARY)
        settle()
        plan = make(src.data_ptr(), dst.data_ptr())
        want = expected(plan, src.cpu().numpy(), src.data_ptr(), dst.cpu().numpy(), dst.data_ptr())
        runner.copy(plan)
        assert torch.equal(dst.cpu(), torch.from_numpy(want))


def test_blocks_far_from_the_base(runner):
    size = 17 * GIB
    if torch.cuda.mem_get_info(0)[0] < 2 * size + 4 * GIB:
        pytest.skip("needs 38 GiB of free GPU memory")
    block = MIB + 48
    src, dst = torch.zeros(size, dtype=torch.uint8, device="cuda:0"), canvas(size)
    pool = size // block
    marks = [n * GIB // block for n in (0, 1, 2, 3, 4, 7, 8, 9, 12, 15, 16)]
    ids = np.asarray(sorted({min(mark + k, pool - 1) for mark in marks for k in (0, 1, 2)}), np.int64)
    rng = np.random.default_rng(5)
    to = rng.permutation(ids)
    for n in ids.tolist():
        src[n * block : (n + 1) * block] = noise(block, seed=n)
    zero = np.zeros(len(ids), np.int64)
    bases = np.asarray([[src.data_ptr(), dst.data_ptr()]], np.int64)
    box = Box((), block, block, block, token_in_run=True)
    plan = CopyPlan((Segment(bases, np.stack([ids, zero, to, zero, zero + 1], axis=1), block, block, box),))
    settle()
    runner.copy(plan)
    for n, m in zip(ids.tolist(), to.tolist(), strict=True):
        assert torch.equal(dst[m * block : (m + 1) * block], src[n * block : (n + 1) * block]), (n, m)
        dst[m * block : (m + 1) * block] = CANARY
    assert all(bool((part == CANARY).all()) for part in dst.split(GIB))


def test_axes_and_tokens_with_strides_beyond_32_bits(runner):
    size = 17 * GIB
    if torch.cuda.mem_get_info(0)[0] < 2 * size + 4 * GIB:
        pytest.skip("needs 38 GiB of free GPU memory")
    src, dst = torch.zeros(size, dtype=torch.uint8, device="cuda:0"), canvas(size)
    box = Box((BoxAxis(3, 5 * GIB + 64, 5 * GIB + 128),), 2 * GIB + 32, 2 * GIB + 16, 4096, token_in_run=False)
    rows = np.asarray([[0, 0, 0, 0, 3], [1, 0, 3, 0, 2]], np.int64)
    segment = Segment(np.asarray([[src.data_ptr(), dst.data_ptr()]], np.int64), rows, 8192, 8192, box)
    pieces = CopyPlan((segment,)).enumerate()
    for n, at in enumerate((pieces.src - src.data_ptr()).tolist()):
        src[at : at + 4096] = noise(4096, seed=n)
    settle()
    runner.copy(CopyPlan((segment,)))
    pairs = list(zip((pieces.src - src.data_ptr()).tolist(), (pieces.dst - dst.data_ptr()).tolist(), strict=True))
    for at, to in pairs:
        assert torch.equal(dst[to : to + 4096], src[at : at + 4096]), (at, to)
    for _, to in pairs:
        dst[to : to + 4096] = CANARY
    assert all(bool((part == CANARY).all()) for part in dst.split(GIB))


@pytest.mark.parametrize("memory", ["device", "to pinned"])
def test_blanks_are_cleared_and_then_written_over(runner, memory):
    """Also where nothing is copied, at odd addresses, and with lines that are far apart; again and again."""
    nbytes = 64 * MIB
    src = noise(nbytes)
    dst = canvas(nbytes)
    if memory == "to pinned":
        dst = dst.cpu().pin_memory()
    lines = Blank(dst.data_ptr() + 3, 1001, 5, 9 * MIB + 1)
    run_of_bytes = Blank(dst.data_ptr() + 50 * MIB, 12 * MIB + 7)
    plan = contiguous_rows(src.data_ptr(), dst.data_ptr(), rows=64, regions=4, row_bytes=32 * KIB, pool=128)
    plan = Blanked(plan.segments, (lines, run_of_bytes))
    cleared = np.full(nbytes, CANARY, np.uint8)
    for line in range(lines.lines):
        cleared[3 + line * lines.pitch :][: lines.width] = 0
    cleared[50 * MIB :][: run_of_bytes.width] = 0
    settle()
    runner.copy(Blanked((), plan.blanks))
    np.testing.assert_array_equal(dst.cpu().numpy(), cleared)
    want = expected(plan, src.cpu().numpy(), src.data_ptr(), cleared, dst.data_ptr())
    for _ in range(20):
        dst.fill_(CANARY)
        settle()
        runner.copy(plan)
        np.testing.assert_array_equal(dst.cpu().numpy(), want)


@two_gpus
def test_random_plans_to_and_from_a_peer(runner):
    nbytes = MIB
    here, there = noise(nbytes), noise(nbytes, device="cuda:1")
    there[:16].copy_(here[:16])  # makes torch open the way between the two
    here[16:32].copy_(there[16:32])
    for seed in range(100):
        source, device = (here, "cuda:1") if seed % 2 else (there, "cuda:0")
        target = canvas(nbytes, device)
        settle()
        plan, _, _ = random_plan(seed, source.data_ptr(), target.data_ptr(), nbytes)
        want = expected(plan, source.cpu().numpy(), source.data_ptr(), target.cpu().numpy(), target.data_ptr())
        runner.copy(plan)
        np.testing.assert_array_equal(target.cpu().numpy(), want, err_msg=f"seed {seed}")


# ---- the mover


def triton_variants():
    from kvxfer.copy.kernel import copy_boxes

    return sum(len(cache[0]) for cache in copy_boxes.device_caches.values())


def test_nothing_is_compiled_after_warming(runner):
    src, dst = noise(MIB), canvas(MIB)
    at = src.data_ptr(), dst.data_ptr()
    runner.copies.warm([head_split(*at, rows=4, regions=1, pool=4)])
    assert runner.copies.compiles == 1
    rows = np.asarray([[0, 0, 1, 0, 16]], np.int64)
    box = Box((), 132, 132, 132, token_in_run=True)
    whole = CopyPlan((Segment(np.asarray([at], np.int64), rows, 2112, 2112, box),))
    assert [launch.variant.width for launch in packing.pack(whole).launches] == [16]
    runner.copies.warm([whole])  # cut at other tokens it needs 8 and 4 bytes too
    assert runner.copies.compiles == 3
    runner.copies.warm([every_size(0, 0)[0]])
    assert runner.copies.compiles == len(tables.WIDTHS)
    before = triton_variants()
    settle()
    for seed in range(100):
        plan, _, _ = random_plan(seed, *at, MIB)
        runner.copy(plan)
    for rows in (1, 2, 16, 17, 1000):
        runner.copy(contiguous_rows(*at, rows=rows, regions=1, row_bytes=16, pool=1024))
    assert runner.copies.compiles == len(tables.WIDTHS)
    assert triton_variants() == before


def test_conversions_are_compiled_by_warming(runner):
    src, dst = noise(MIB), canvas(MIB)
    plan = conversions.line("bfloat16", "float8_e4m3fn", src.data_ptr(), dst.data_ptr(), 1024)
    runner.copies.warm([plan])
    assert runner.copies.compiles == 1
    before = triton_variants()
    settle()
    for count in (8, 16, 1024, 8192):
        runner.copy(conversions.line("bfloat16", "float8_e4m3fn", src.data_ptr(), dst.data_ptr(), count, [(2.0, 3.0)]))
    assert runner.copies.compiles == 1
    assert triton_variants() == before


def test_gathers_run_at_the_highest_priority_that_there_is(runner):
    lowest, highest = torch.cuda.Stream.priority_range()
    assert highest < lowest, "numbers below zero are the higher priorities"
    assert runner.copies.stream(Direction.GATHER).priority == highest
    assert runner.copies.stream(Direction.SCATTER).priority == lowest


def test_gathers_and_scatters_at_once(runner):
    src, staging, dst = noise(64 * MIB), canvas(64 * MIB), canvas(64 * MIB)
    other = noise(64 * MIB, seed=1)
    back = canvas(64 * MIB)
    settle()
    rng = np.random.default_rng(0)
    gathers, scatters = [], []
    for n in range(200):
        to = n * 256 * KIB
        gathers.append(contiguous_rows(src.data_ptr(), staging.data_ptr() + to, rows=128, regions=1, row_bytes=2 * KIB,
                                       pool=4096, rng=rng, flat="dst"))  # fmt: skip
        scatters.append(contiguous_rows(other.data_ptr() + to, back.data_ptr() + to, rows=128, regions=1,
                                        row_bytes=2 * KIB, pool=128, rng=rng, flat="src"))  # fmt: skip

    def submit(direction, plans):
        for n, plan in enumerate(plans):
            runner.submit((direction, n), plan, direction)

    threads = [
        threading.Thread(target=submit, args=pair)
        for pair in ((Direction.GATHER, gathers), (Direction.SCATTER, scatters))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    runner.wait(400)
    assert not runner.errors()
    for plans, source, target in ((gathers, src, staging), (scatters, other, back)):
        whole = CopyPlan(tuple(segment for plan in plans for segment in plan.segments))
        want = expected(whole, source.cpu().numpy(), source.data_ptr(), dst.cpu().numpy(), target.data_ptr())
        assert torch.equal(target.cpu(), torch.from_numpy(want))


@pytest.mark.parametrize("direction", list(Direction))
def test_a_table_slot_is_not_reused_before_its_reader_has_run(small_ring, direction):
    rows, jobs, row_bytes = 96, 1000, 256
    src, dst = noise(16 * MIB), canvas(jobs * rows * row_bytes)
    rng = np.random.default_rng(0)
    settle()
    step = rows * row_bytes
    plans = [
        contiguous_rows(src.data_ptr(), dst.data_ptr() + n * step, rows=rows, regions=1, row_bytes=row_bytes,
                        pool=16 * MIB // row_bytes, rng=rng, flat="dst")
        for n in range(jobs)
    ]  # fmt: skip
    small_ring.copies.warm(plans[:1])  # whatever waits for its kernel to be compiled, others go before
    with torch.cuda.stream(small_ring.copies.stream(direction)):
        torch.cuda._sleep(200_000_000)  # 0.1 s: the queue fills the ring many times over while nothing can run
    for n, plan in enumerate(plans):
        small_ring.submit(n, plan, direction)
    small_ring.wait(jobs)
    assert not small_ring.errors()
    assert small_ring.order == list(range(jobs))
    whole = CopyPlan(tuple(segment for plan in plans for segment in plan.segments))
    want = expected(whole, src.cpu().numpy(), src.data_ptr(), np.full(dst.numel(), CANARY, np.uint8), dst.data_ptr())
    assert torch.equal(dst.cpu(), torch.from_numpy(want))


def test_tables_larger_than_the_ring(small_ring):
    src, dst = noise(16 * MIB), canvas(16 * MIB)
    settle()
    plan = contiguous_rows(src.data_ptr(), dst.data_ptr(), rows=50_000, regions=1, row_bytes=256, pool=65536)
    assert packing.pack(plan).words.nbytes > 64 * KIB
    for n in range(5):
        small_ring.submit(n, plan)
        small_ring.submit(
            ("small", n), contiguous_rows(src.data_ptr(), dst.data_ptr(), rows=1, regions=1, row_bytes=1, pool=1)
        )
    small_ring.wait(10)
    assert not small_ring.errors()
    dst.fill_(CANARY)
    settle()
    small_ring.copy(plan)
    want = expected(plan, src.cpu().numpy(), src.data_ptr(), np.full(dst.numel(), CANARY, np.uint8), dst.data_ptr())
    assert torch.equal(dst.cpu(), torch.from_numpy(want))


def test_jobs_are_launched_in_order_of_their_events(runner):
    src, dst = canvas(MIB), canvas(3 * MIB)
    fresh = noise(MIB)
    slow, quick = torch.cuda.Stream(), torch.cuda.Stream()
    late, early = torch.cuda.Event(), torch.cuda.Event()
    assert not recorded(late)
    plans = [
        contiguous_rows(src.data_ptr(), dst.data_ptr() + n * MIB, rows=32, regions=1, row_bytes=32 * KIB, pool=32)
        for n in range(3)
    ]
    runner.copies.warm(plans)
    settle()
    with torch.cuda.stream(slow):
        torch.cuda._sleep(400_000_000)
        src.copy_(fresh)
        late.record()
    with torch.cuda.stream(quick):
        torch.cuda._sleep(40_000_000)
        early.record()
    assert recorded(late)
    for direction in Direction:
        runner.submit((direction, "late"), plans[0], direction, late)
        runner.submit((direction, "early"), plans[1], direction, early)
        runner.submit((direction, "ready"), plans[2], direction)
    runner.wait(6)
    assert not runner.errors()
    for direction in Direction:
        assert [name for d, name in runner.order if d == direction] == ["ready", "early", "late"]
    want = expected(plans[0], fresh.cpu().numpy(), src.data_ptr(), np.full(3 * MIB, CANARY, np.uint8), dst.data_ptr())
    assert torch.equal(dst[:MIB].cpu(), torch.from_numpy(want[:MIB]))


def test_a_copy_is_visible_to_work_launched_after_its_report(runner):
    src, dst, seen = noise(64 * MIB), canvas(64 * MIB), canvas(64 * MIB)
    stream = torch.cuda.Stream()
    settle()
    for n in range(20):
        dst.fill_(n)
        settle()
        runner.copy(contiguous_rows(src.data_ptr(), dst.data_ptr(), rows=2048, regions=1, row_bytes=32 * KIB, pool=2048,
                                    flat="dst"))  # fmt: skip
        with torch.cuda.stream(stream):
            seen.copy_(dst)
        stream.synchronize()
        ids = np.random.default_rng(0).permutation(2048)
        want = src.view(2048, -1)[torch.from_numpy(ids).to(src.device)].view(-1)
        assert torch.equal(seen, want)


def test_what_counts_as_recorded():
    event = torch.cuda.Event()
    assert event.query(), "torch says that an event that was never recorded has happened"
    assert not recorded(event)
    event.record()
    assert recorded(event)


def test_torchs_newer_events_count_as_recorded_only_when_they_are():
    generic = torch.Event(device="cuda")
    assert not recorded(generic)
    generic.record(torch.cuda.current_stream())
    assert recorded(generic)


def test_failures_are_outcomes_and_the_service_goes_on(runner):
    src, dst = noise(MIB), canvas(MIB)
    settle()
    good = contiguous_rows(src.data_ptr(), dst.data_ptr(), rows=4, regions=1, row_bytes=4096, pool=4)
    no_parts: Any = SimpleNamespace(parts=None)

    class Broken:
        def query(self):
            raise RuntimeError("device gone")

    runner.submit("sums", good, sums=no_parts)
    runner.submit("event", good, after=Broken())
    runner.submit("empty", CopyPlan(()))
    runner.submit("good", good)
    runner.wait(4)
    assert isinstance(runner.outcomes["sums"].error, TransferFailedError)
    assert isinstance(runner.outcomes["event"].error, TransferFailedError)
    assert "device gone" in str(runner.outcomes["event"].error)
    assert runner.outcomes["empty"].error is None
    assert runner.outcomes["good"].error is None


FAULT = """
import torch, sys
sys.path[:0] = {path!r}
from test_copy_gpu import *
runner = Runner()
src = noise(MIB)
runner.copy(contiguous_rows(src.data_ptr(), src.data_ptr() + 65536, rows=1, regions=1, row_bytes=4096, pool=1))
for n in range(3):
    runner.submit(n, contiguous_rows(src.data_ptr(), 4096, rows=4, regions=1, row_bytes=4096, pool=4))
runner.wait(3)
print([type(error).__name__ for error in runner.errors()], runner.errors()[0])
assert len(runner.errors()) == 3
assert runner.copies.close(5)
import os; sys.stdout.flush(); os._exit(0)
"""


def test_a_fault_of_the_device_reaches_every_job():
    code = FAULT.format(path=sys.path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout.strip())


def test_close(runner):
    src, dst = noise(MIB), canvas(MIB)
    settle()
    closing = Runner()

    class Never:
        def query(self):
            return False

    plan = contiguous_rows(src.data_ptr(), dst.data_ptr(), rows=4, regions=1, row_bytes=4096, pool=4)
    closing.submit("stuck", plan, after=Never())
    closing.submit("good", plan)
    assert not closing.copies.close(0.5)
    closing.wait(2)
    assert closing.outcomes["good"].error is None
    assert isinstance(closing.outcomes["stuck"].error, KvxferError)
    assert closing.copies.close(10)
    with pytest.raises(ClosedError):
        closing.submit("late", plan)


def test_an_idle_mover_uses_no_cpu(runner):
    src, dst = noise(MIB), canvas(MIB)
    settle()
    runner.copy(contiguous_rows(src.data_ptr(), dst.data_ptr(), rows=4, regions=1, row_bytes=4096, pool=4))
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(1)
    used = time.process_time() - before
    print(f"idle for 1 s: {used * 1e3:.2f} ms of CPU time")
    assert used < 0.02


def test_the_wide_variant_makes_16_byte_accesses(runner):
    plan = contiguous_rows(0, 0, rows=1, regions=1, row_bytes=16, pool=1)
    runner.copies.warm([plan])
    variant = runner.copies.kernel.compile(tables.Variant(16))
    loads, stores = (variant.asm["ptx"].count(f"{kind}.global.v2.b64") for kind in ("ld", "st"))
    print(f"PTX: {loads} x ld.global.v2.b64, {stores} x st.global.v2.b64; {variant.n_regs} registers, "
          f"{variant.n_spills} spills, {variant.metadata.shared} bytes of shared memory")  # fmt: skip
    assert loads
    assert stores
