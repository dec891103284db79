"""`kvxfer bench plan` at its smallest; and what a plan takes of memory grows with regions and rows, not with pieces."""

import tracemalloc

import numpy as np
import pytest

from kvxfer.geometry import PairPlan, Span, common
from kvxfer.tools.bench import planning


def test_plan(bench):
    code, output, found = bench("plan", "--pieces", "1000", "--seconds", "0")
    assert code == 0
    assert [one["pieces"] for one in found["cells"]] == [1024, 1024, 8192]
    assert all(
        one["regions"] == 64 and one["plan_ns_a_row"] >= 0 and one["list_ns_a_piece"] > 0 for one in found["cells"]
    )
    for name in ("same layout (32 KiB)", "head split (1 KiB)", "NHD to HND (256 B)"):
        assert name in output


def plans(layout, blocks):
    src, dst = layout.sides(blocks)
    pair = PairPlan(src, dst, common(src, dst))
    spans = {"default": Span(np.arange(blocks, dtype=np.int64))}

    def plan():
        return pair.bind(spans, spans, range(blocks * planning.BLOCK))

    return pair, plan


@pytest.mark.parametrize("blocks", [1, 100, 10_000])
def test_the_arrays_of_a_plan_grow_with_regions_and_rows_alone(blocks):
    sizes = set()
    for layout in planning.LAYOUTS:
        pair, plan = plans(layout, blocks)
        bound = plan()
        gather, scatter = bound.whole.gather(0), bound.whole.scatter(0)
        assert bound.whole.copy().pieces == 64 * blocks * layout.pieces_a_block
        regions = sum(len(c.bases) for c in pair.classes)
        rows = sum(map(len, bound.rows))
        assert (regions, rows) == (64, blocks)
        for tables in (gather, scatter):
            size = planning.array_bytes(bound, tables)
            # of a region four coordinates and two pairs of addresses, of a row its table twice and its first token
            assert size == 8 * ((4 + 2 + 2) * regions + (5 + 5 + 1) * rows)
            sizes.add(size)
    assert len(sizes) == 1  # though one layout has 128 times the pieces of another


@pytest.mark.parametrize("blocks", [16, 2000])
def test_making_a_plan_takes_no_memory_for_pieces(blocks):
    layout = planning.LAYOUTS[-1]
    pair, plan = plans(layout, blocks)
    plan().whole.gather(0)
    tracemalloc.start()
    try:
        bound = plan()
        tables = bound.whole.gather(0)
        grid = pair.grid(bound.tokens, target_bytes=1 << 25)
        bound.digest(grid)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tables.pieces == 64 * blocks * 128
    assert peak < 64 * 1024 + 400 * blocks  # a list of the pieces takes 196,608 bytes a block
