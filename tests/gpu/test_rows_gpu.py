"""Every case of the catalogue of rows in GPU memory: gathered, carried over, scattered, and compared byte by byte."""

import os
import queue
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is not installed")

TESTS = Path(__file__).parent.parent
for folder in ("rows", "geometry", "copy"):
    sys.path.append(str(TESTS / folder))

from catalogue import CASES  # noqa: E402  # pyright: ignore[reportMissingImports]
from ranks import World  # noqa: E402  # pyright: ignore[reportMissingImports]
from staged import gather, scatter  # noqa: E402  # pyright: ignore[reportMissingImports]
from threaded import Threaded  # noqa: E402  # pyright: ignore[reportMissingImports]

from kvxfer.copy.port import CopyOutcome, Direction  # noqa: E402
from kvxfer.geometry import CacheGeometry, PairPlan, resolve  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 interprets kernels"),
]


class Side:
    """The ranks of one engine, with their memory on a GPU."""

    def __init__(self, ranks, device):
        self.device = device
        self.memory = [torch.from_numpy(rank.memory).to(f"cuda:{device}") for rank in ranks]
        self.geometries = [
            CacheGeometry(
                tuple(
                    replace(spec, base=spec.base - rank.base + memory.data_ptr(), kind="cuda", device=device)
                    for spec in rank.geometry.tensors
                )
            )
            for rank, memory in zip(ranks, self.memory, strict=True)
        ]


@pytest.fixture(scope="module")
def movers():
    """One for each GPU in use: two, if there are two."""
    made = [Threaded(device) for device in range(min(2, torch.cuda.device_count()))]
    yield made
    for one in made:
        assert one.close(10)


def copy(mover, plan, direction):
    ended: queue.SimpleQueue[CopyOutcome] = queue.SimpleQueue()
    mover.submit(plan, ended.put, direction)
    outcome = ended.get(timeout=60)
    assert outcome.error is None, outcome.error
    assert not outcome.stopped


@pytest.mark.parametrize("name", CASES)
def test_every_byte_of_a_row_on_gpus(movers, name):
    world = World.of(CASES[name])
    prefill, decode = Side(world.prefill, 0), Side(world.decode, len(movers) - 1)
    tokens = world.request.tokens
    for number, (target, need) in enumerate(zip(world.decode, decode.geometries, strict=True)):
        for source, have, selections in zip(
            world.prefill, prefill.geometries, resolve(need, prefill.geometries, rank=number), strict=True
        ):
            if not selections:
                continue
            pair = PairPlan(have, need, selections)
            plan = pair.bind(source.spans, target.spans, tokens)
            grid = pair.grid(tokens, target_bytes=max(1, plan.whole.staged_bytes // 3))
            for chunk in range(grid.chunks):
                part = plan.chunk(grid, chunk)
                if not part.bytes:
                    continue
                staging = torch.empty(part.staged_bytes, dtype=torch.uint8, device=f"cuda:{prefill.device}")
                copy(movers[0], gather(part, staging.data_ptr()), Direction.GATHER)
                carried = staging.to(f"cuda:{decode.device}", copy=True)
                torch.cuda.synchronize(decode.device)
                copy(movers[-1], scatter(part, carried.data_ptr()), Direction.SCATTER)
    for target, memory in zip(world.decode, decode.memory, strict=True):
        assert np.array_equal(memory.cpu().numpy(), world.expected(target))
    for source, memory in zip(world.prefill, prefill.memory, strict=True):
        assert np.array_equal(memory.cpu().numpy(), source.memory)
