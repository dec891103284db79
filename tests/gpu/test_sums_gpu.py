"""Sums made on a GPU: the same as on a CPU, of what has just been copied, at any address."""

import os
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is not installed")

sys.path.append(str(Path(__file__).parent.parent / "copy"))

from sum_plans import pair_of  # noqa: E402  # pyright: ignore[reportMissingImports]
from threaded import Threaded  # noqa: E402  # pyright: ignore[reportMissingImports]

from kvxfer.copy.port import Direction  # noqa: E402
from kvxfer.copy.walk import total  # noqa: E402
from kvxfer.geometry import CacheGeometry, CacheTensor, CopyPlan, PairPlan, Span, SumPlan, common, damage  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 interprets kernels"),
]
NOTHING = CopyPlan(())


@pytest.fixture
def run():
    """Run a job on the first GPU, and give its outcome."""
    copies = Threaded(0)

    def job(plan, sums=None, direction=Direction.GATHER):
        ended, outcomes = threading.Event(), []

        def done(outcome):
            outcomes.append(outcome)
            ended.set()

        copies.submit(plan, done, direction, sums=sums)
        assert ended.wait(60)
        if outcomes[0].error is not None:
            raise outcomes[0].error
        return outcomes[0]

    job.copies = copies  # type: ignore[attr-defined]
    yield job
    assert copies.close(30)


@pytest.mark.parametrize("converting", [False, True], ids=["bytes", "converted"])
def test_random_layouts_add_up_as_on_a_cpu(run, converting):
    for seed in range(40):
        *here, expected = pair_of(seed, converting=converting)
        *there, chunk = pair_of(seed, converting=converting, device="cuda:0")
        torch.cuda.synchronize()
        want = total(SumPlan.at_source(expected))
        assert run(NOTHING, SumPlan.at_source(chunk)).sums == want, seed
        run(chunk.copy())
        assert run(NOTHING, SumPlan.at_destination(chunk), Direction.SCATTER).sums == want, seed
        del here, there


def large(blocks, device="cuda:0"):
    """One layer of K and V, NHD and HND, 32 KiB a block, and a transfer of some of its blocks."""
    memory = [torch.zeros(2, blocks, *shape, 128, dtype=torch.bfloat16, device=device) for shape in ((16, 8), (8, 16))]
    axes = ("kv block token head dim", "kv block head token dim")
    ends = [
        CacheGeometry.of([CacheTensor(held, order, layers=[0], heads=range(8))])
        for held, order in zip(memory, axes, strict=True)
    ]
    return memory, PairPlan(ends[0], ends[1], common(ends[0], ends[1]))


def test_blocks_beyond_4_gib_and_damage_there(run):
    blocks = 100_000  # 3.05 GiB of K
    memory, pair = large(blocks)
    memory[0][:, -9:].view(torch.int16).random_()
    spans = {"default": Span(list(range(blocks - 9, blocks)))}
    chunk = pair.bind(spans, spans, range(3, 9 * 16 - 1)).whole
    torch.cuda.synchronize()
    run(chunk.copy())
    theirs = run(NOTHING, SumPlan.at_source(chunk)).sums
    assert theirs == run(NOTHING, SumPlan.at_destination(chunk)).sums
    memory[1].view(torch.int16)[1, blocks - 2, 7, 15, 127] ^= 1
    torch.cuda.synchronize()
    found = damage(chunk, run(NOTHING, SumPlan.at_destination(chunk)).sums, theirs)
    assert (found.layers, found.tensors, found.blocks) == ((0,), ("default/v",), {"default": (blocks - 2,)})


def test_sums_and_copies_under_way_together(run):
    """Many jobs in the rings at once: each has its own tables and sums."""
    pairs = [pair_of(seed, device="cuda:0") for seed in range(8)]
    torch.cuda.synchronize()
    for *_, chunk in pairs:
        run(chunk.copy())
    want = [run(NOTHING, SumPlan.at_source(chunk)).sums for *_, chunk in pairs]
    lock, found, ended = threading.Lock(), [], threading.Event()
    count = 400

    def note(number, outcome):
        with lock:
            found.append((number, outcome.error, outcome.sums))
            if len(found) == count:
                ended.set()

    for number in range(count):
        chunk = pairs[number % 8][2]
        plan = SumPlan.at_source(chunk) if number % 3 else SumPlan.at_destination(chunk)
        direction = Direction.GATHER if number % 2 else Direction.SCATTER
        done = lambda outcome, number=number: note(number, outcome)  # noqa: E731
        run.copies.submit(NOTHING, done, direction, sums=plan, owner=number % 5)
    assert ended.wait(60)
    assert all(error is None and sums == want[number % 8] for number, error, sums in found)
