"""Layouts have the pieces that they are named after: the planner counts them."""

import pytest

from kvxfer.errors import UsageError
from kvxfer.geometry import CacheGeometry, PairPlan, Span, common
from kvxfer.tools.bench.caches import Slab, draw
from kvxfer.tools.bench.layouts import NAMED, PIECES, SMALLEST_REQUEST, parse_layout, plain
from kvxfer.tools.bench.matrix import draw_unwritten

EVERY = [*map(plain, PIECES), *NAMED.values()]


@pytest.mark.parametrize("layout", EVERY, ids=lambda layout: layout.name)
@pytest.mark.parametrize("size", [SMALLEST_REQUEST, 3 * SMALLEST_REQUEST])
def test_pieces_have_the_size_that_the_name_says(layout, size):
    blocks, pool = layout.blocks(size), layout.pool(size)
    assert blocks * layout.block_bytes == size, "a request is whole blocks"
    caches = [Slab("cpu", [(layout, pool)], source=source).cache(layout, pool) for source in (True, False)]
    source, target = (CacheGeometry.of(cache.cache_tensors()) for cache in caches)
    ours, theirs = ({"default": Span(draw(7, pool, blocks, source=side).ids)} for side in (True, False))
    plan = PairPlan(source, target, common(source, target)).bind(ours, theirs, range(blocks * layout.block_tokens))
    pieces = plan.whole.copy().enumerate().nbytes
    assert set(pieces.tolist()) == {layout.piece_bytes}
    assert len(pieces) * layout.piece_bytes == size


def test_a_cache_has_blocks_that_no_request_uses():
    for layout in EVERY:
        assert layout.pool(SMALLEST_REQUEST) > layout.blocks(SMALLEST_REQUEST) > 0
    assert plain(2 << 20).blocks((2 << 20) - 1) == 0


@pytest.mark.parametrize("layout", EVERY, ids=lambda layout: layout.name)
def test_two_requests_write_every_block(layout):
    blocks, pool = layout.blocks(4 * SMALLEST_REQUEST), layout.pool(4 * SMALLEST_REQUEST)
    unwritten = set(range(pool))
    for seed in (1, 2):
        request = draw_unwritten(seed, pool, blocks, unwritten)
        assert (request.seed, len(set(request.ids))) == (seed, blocks)
        unwritten -= set(request.ids)
    assert not unwritten
    assert draw_unwritten(3, pool, blocks, unwritten) == draw_unwritten(3, pool, blocks, set(range(pool)))


@pytest.mark.parametrize("text", ["100", "300", "2500", "4MiB", "8 KiBi", "0", "hnd"])
def test_what_no_layout_has_is_refused(text):
    with pytest.raises(UsageError):
        parse_layout(text)
