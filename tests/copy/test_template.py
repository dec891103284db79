"""What compiled code makes of requests, against the planner: the same numbers, the same words, the same refusals."""

import tracemalloc
from dataclasses import dataclass, replace
from random import Random
from time import thread_time
from typing import Any

import numpy as np
import pytest
from decoded import accesses
from execute import by_destination, table_pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from opened import opened
from packing import pack
from staged import gather, scatter
from worlds import Rank, contiguous, make_world

from kvxfer.copy import binding
from kvxfer.copy.tables import Kind
from kvxfer.copy.template import Template
from kvxfer.errors import BlocksError, GeometryError, KvxferError
from kvxfer.geometry import CacheGeometry, ChunkGrid, CopyPlan, PairPlan, Span, TensorSpec, common, resolve
from kvxfer.plans.pairs import BoundPlan, _planned

STAGING = 1 << 46
SEEDS = st.integers(0, 2**32 - 1)


@dataclass
class Case:
    """A request of a pair."""

    pair: PairPlan
    src: dict[str, Span]
    dst: dict[str, Span]
    tokens: range


def cases(seed):
    """The requests of all ranks of a random world; every third one converts."""
    rng, mixed = Random(seed), seed % 3 == 0
    world = make_world(rng, mixed=mixed)
    for number, target in enumerate(world.decode):
        parts = resolve(target.geometry, [rank.geometry for rank in world.prefill], rank=number)
        for source, selections in zip(world.prefill, parts, strict=True):
            if selections:
                pair = _planned(source.geometry, target.geometry, selections, convert=mixed)
                yield Case(pair, source.spans, target.spans, range(*world.tokens))


def whole(case):
    return ChunkGrid(case.pair.layers, len(case.pair.layers), case.tokens.stop, case.tokens.start, case.tokens.stop)


def drawn_grid(case, rng):
    layers, tokens = rng.randint(1, len(case.pair.layers)), rng.choice([1, 3, 4, 8, 16, 100])
    return replace(whole(case), layers_per_chunk=layers, tokens_per_chunk=tokens)


def fitted(case) -> Any:
    return case.pair.template.bind(case.src, case.dst, case.tokens)


def cut_of(plan, grid) -> Any:
    return plan.cut(grid)


def tables_of(cut, kind, number=0, at=0):
    """The compiled tables of a chunk."""
    (found,) = opened(cut.tables(kind, range(number, number + 1), [at]))
    return found


def packed(chunk, kind, at):
    """The planner's tables of a chunk."""
    return pack(chunk.copy() if kind is Kind.COPY else (gather if kind is Kind.GATHER else scatter)(chunk, at))


def same(found, expected):
    assert found.launches == expected.launches
    np.testing.assert_array_equal(found.words, expected.words)
    assert (found.nbytes, found.blanks) == (expected.nbytes, expected.blanks)


@settings(deadline=None, max_examples=20)
@given(seed=SEEDS)
def test_numbers_and_words_are_the_planners(seed):
    rng = Random(seed)
    for case in cases(seed):
        plan, fit = case.pair.bind(case.src, case.dst, case.tokens), fitted(case)
        for name in ("nbytes", "staged_bytes", "pieces", "most_rows"):
            assert getattr(fit, name) == getattr(plan, name), name
        for grid in (whole(case), drawn_grid(case, rng)):
            assert fit.largest_chunk_bytes(grid) == plan.largest_chunk_bytes(grid) <= BoundPlan(fit, grid).most_bytes
            assert fit.digest(grid) == plan.digest(grid)
            cut = cut_of(fit, grid)
            at = STAGING + 16 * rng.randint(0, 9)
            made = {kind: cut.tables(kind, range(grid.chunks), [at] * grid.chunks) for kind in Kind}
            assert all(one.needed() <= case.pair.template.shapes[kind].needed for kind, one in made.items())
            together = {kind: opened(one) for kind, one in made.items()}
            for number in range(grid.chunks):
                chunk = plan.chunk(grid, number)
                assert tuple(cut.sizes[number]) == (chunk.bytes, chunk.staged_bytes)
                for kind in Kind:
                    expected = packed(chunk, kind, at)
                    same(together[kind][number], expected)
                    same(tables_of(cut, kind, number, at), expected)


def test_the_words_say_which_bytes_go_where():
    """The planner's tables by the formula of its docstring, the compiled ones by that of theirs: nothing is shared."""
    for seed in range(1, 60, 3):
        for case in cases(seed):
            plan, cut = case.pair.bind(case.src, case.dst, case.tokens), cut_of(fitted(case), whole(case))
            for made, expected in (
                (tables_of(cut, Kind.COPY), plan.whole.copy()),
                (tables_of(cut, Kind.GATHER, 0, STAGING), gather(plan.whole, STAGING)),
                (tables_of(cut, Kind.SCATTER, 0, STAGING), scatter(plan.whole, STAGING)),
            ):
                np.testing.assert_array_equal(said(made), by_destination(table_pairs(expected)))


def said(tables):
    """Every byte that tables copy without converting it, read word by word."""
    found = [np.zeros((0, 2), np.int64)]
    for one in accesses(tables):
        inside = np.arange(one.dst_bytes)
        found.append(np.stack([(side[:, None] + inside).ravel() for side in (one.src, one.dst)], axis=1))
    return by_destination(np.concatenate(found))


def ranks(tensors, ids, null=None, *, seed=0):
    """A rank with this memory, filled with random bytes, and the block list of a request."""
    rank = Rank(tensors, {"default": (ids, 0)}, {} if null is None else {"default": null}, (0, 1, 1))
    rank.memory[:] = np.random.default_rng(seed).integers(0, 256, len(rank.memory), np.uint8)
    return rank


def between(source, target):
    """The plan of all that both hold."""
    return _planned(source, target, common(source, target), convert=False)


SIZES = {"block": 24, "token": 16, "head": 2, "dim": 8}
NHD, HND = "block token head dim", "block head token dim"


def pair_of(src_axes=NHD, dst_axes=HND, src_ids=range(8), dst_ids=range(8, 16), null=None, **sizes):
    source = ranks([contiguous(src_axes, SIZES | sizes)], list(src_ids), null, seed=1)
    target = ranks([contiguous(dst_axes, SIZES)], list(dst_ids), seed=2)
    pair = between(source.geometry, target.geometry)
    return source, target, Case(pair, source.spans, target.spans, range(3, 117))


def changed(case, rng):
    """A request in which something is not as it should be, or is after all."""
    src, dst, tokens = dict(case.src), dict(case.dst), case.tokens
    lists = rng.choice([src, dst])
    name = rng.choice(sorted(lists))
    ids, first = np.array(lists[name].ids), lists[name].first_token
    pool = (case.pair.src if lists is src else case.pair.dst).pool_ids[name]
    kind = rng.choice(["large", "negative", "huge", "twice", "null", "short", "long", "empty", "first", "tokens", "no"])
    if kind == "no":
        del lists[name]
    elif kind == "tokens":
        longer = range(rng.randint(0, 3), tokens.stop + rng.randint(0, 40))
        tokens = rng.choice([longer, longer, longer[::2], range(longer.stop, longer.start), range(0), range(1 << 32)])
    else:
        at = rng.randrange(len(ids)) if len(ids) else 0
        if len(ids) and kind in ("large", "negative", "huge", "twice", "null"):
            null = (case.pair.src if lists is src else case.pair.dst).sides[name].null_block
            ids[at] = {"large": pool, "negative": -1 - rng.randint(0, 3), "huge": 2**62, "twice": ids[0],
                       "null": 0 if null is None else null}[kind]  # fmt: skip
        elif kind == "short":
            ids = ids[: rng.randint(0, len(ids))]
        elif kind == "long":
            ids = np.append(ids, rng.randrange(pool))
        elif kind == "empty":
            ids = ids[:0]
        else:
            first = first + rng.randint(0, 20)
        lists[name] = Span(ids, first)
    return Case(case.pair, src, dst, tokens)


def outcome(make) -> Any:
    try:
        return make()
    except KvxferError as error:
        return type(error), str(error)


@settings(deadline=None, max_examples=20)
@given(seed=SEEDS)
def test_what_is_refused_is_refused_with_the_planners_words(seed):
    rng = Random(seed)
    for case in cases(seed):
        for _ in range(4):
            odd = changed(case, rng)
            covered = rng.choice([None, rng.randint(0, odd.tokens.stop)])
            plan = outcome(lambda: odd.pair.bind(odd.src, odd.dst, odd.tokens, covered=covered))  # noqa: B023
            found = outcome(lambda: odd.pair.template.bind(odd.src, odd.dst, odd.tokens, covered=covered))  # noqa: B023
            if isinstance(plan, tuple):
                assert found == plan
                continue
            grid = replace(drawn_grid(odd, rng), band=rng.choice([1, 2, 3, 100]))
            ours = BoundPlan(found, grid)
            assert (plan.most_rows, plan.pieces) == (ours.rows, ours.pieces)
            for number in range(grid.chunks):
                expected = outcome(lambda: plan.chunk(grid, number))  # noqa: B023
                made = outcome(lambda: ours.tables(Kind.GATHER, range(number, number + 1), [STAGING]))  # noqa: B023
                carried = outcome(lambda: ours.carried(number, number + 1))  # noqa: B023
                if isinstance(expected, tuple):  # a block of it is not known yet
                    assert made == carried == expected
                else:
                    sizes = made.nbytes.tolist(), made.staged_bytes.tolist(), carried
                    assert sizes == ([expected.bytes], [expected.staged_bytes], expected.bytes)
                    same(opened(made)[0], pack(gather(expected, STAGING)))


def test_a_request_without_rows_asks_nothing_of_its_lists():
    _, _, case = pair_of()
    src = {"default": Span(case.src["default"].ids, 10)}
    assert not case.pair.template.bind(src, case.dst, range(7, 7)).rows[0].table.size
    assert case.pair.template.bind(src, case.dst, range(7, 7)).nbytes == 0


def test_many_ids_are_told_apart_in_pools_of_any_size():
    for blocks, pool in ((5000, 5001), (5000, 10**6), (40, 10**9), (1, 1)):
        sides = [[contiguous(NHD, SIZES | {"block": pool}, base=base)] for base in (1 << 44, 1 << 50)]
        geometries = [described(side) for side in sides]
        pair = between(*geometries)
        ids = np.asarray(Random(blocks).sample(range(pool), blocks), np.int64)
        tokens = range(16 * blocks)
        spans = {"default": Span(ids)}
        assert pair.template.bind(spans, spans, tokens).most_rows == blocks
        if blocks > 1:
            twice = ids.copy()
            twice[-1] = twice[blocks // 2]
            assert pair.template.bind({"default": Span(twice)}, spans, tokens).most_rows == blocks
            with pytest.raises(BlocksError, match="is named twice, at positions"):
                pair.template.bind(spans, {"default": Span(twice)}, tokens)


def described(tensors):
    """A geometry of memory that nobody has."""
    return CacheGeometry(
        tuple(
            TensorSpec(
                t["group"], t["part"], t["kv"], t["layers"], range(*t["heads"]), t["axes"], t["shape"], t["strides"],
                "bfloat16", t["item"], base=t["base"],
            )
            for t in tensors
        )
    )  # fmt: skip


def test_ids_that_were_made_to_collide_are_told_apart_all_the_same(monkeypatch):
    """A peer names the ids: it must not be able to make this side look for long."""
    pool, number = 1 << 24, 2048
    geometries = [described([contiguous(NHD, SIZES | {"block": pool}, base=base)]) for base in (1 << 44, 1 << 50)]
    pair = between(*geometries)
    ids, size = np.arange(pool), 2 * number
    place = (ids * binding.GOLDEN >> (64 - size.bit_length())) & (size - 1)
    ids = ids[place == 0][:number]
    assert len(ids) == number
    spans, tokens = {"default": Span(ids)}, range(16 * number)
    asked, plan = [], PairPlan.bind
    monkeypatch.setattr(PairPlan, "bind", lambda *given, **more: asked.append(given) or plan(*given, **more))
    assert pair.template.bind(spans, spans, tokens).most_rows == number
    assert len(asked) == 1
    twice = {"default": Span(np.append(ids[:-1], ids[0]))}
    with pytest.raises(BlocksError, match="is named twice, at positions"):
        pair.template.bind(spans, twice, tokens)


def test_a_copy_into_memory_that_is_mapped_elsewhere_begins_there():
    _, _, case = pair_of()
    grid = ChunkGrid(case.pair.layers, 1, 32, case.tokens.start, case.tokens.stop)
    ours = BoundPlan(case.pair.template.bind(case.src, case.dst, case.tokens), grid)
    theirs = case.pair.bind(case.src, case.dst, case.tokens)

    def reached(regions):
        return regions + np.asarray([0, 1 << 30])

    for first in range(grid.chunks):
        chunks = range(first, grid.chunks)
        for chunk, tables in zip(chunks, opened(ours.tables(Kind.COPY, chunks, reached=reached)), strict=True):
            same(
                tables,
                pack(
                    CopyPlan(
                        tuple(
                            replace(one, regions=reached(one.regions))
                            for one in theirs.chunk(grid, chunk).copy().segments
                        )
                    )
                ),
            )


def test_a_pair_with_nothing_in_it_is_refused():
    _, _, case = pair_of()
    with pytest.raises(GeometryError, match="nothing is selected"):
        Template.of(PairPlan(case.pair.src, case.pair.dst, ()))


def test_numbers_beyond_all_memory_are_refused():
    near, far = (described([contiguous(NHD, SIZES, base=base)]) for base in (1 << 20, (1 << 62) + 64))
    with pytest.raises(GeometryError, match="beyond all memory"):
        between(near, far)


def test_tables_of_a_chunk_that_is_too_large_to_be_numbered_are_refused_by_name():
    axes = "block token head dim"
    sizes = {"block": 2, "token": 1 << 20, "head": 1, "dim": 1 << 13}
    wide = [described([contiguous(axes, sizes, base=base)]) for base in (1, 1 << 50)]
    pair = between(*wide)
    spans = {"default": Span(np.asarray([1]))}
    bound = BoundPlan(pair.template.bind(spans, spans, range(1 << 20)), ChunkGrid(pair.layers, 1, 1 << 20, 0, 1 << 20))
    with pytest.raises(KvxferError, match="can be numbered"):
        bound.tables(Kind.COPY, range(1))


def test_to_bind_takes_as_long_as_there_are_blocks_however_small_what_both_sizes_share_is():
    """A peer says how large its blocks are: of 8 kB of ids it could make 16 million cells to be looked at."""
    sides = [[contiguous(NHD, SIZES | {"block": 1 << 20, "token": size})] for size in (16, 8191)]
    pair = between(*map(described, sides))
    src, dst = ({"default": Span(np.arange(count))} for count in (1, 2000))
    took, listed = [], []
    for _ in range(5):
        began = thread_time()
        assert pair.template.bind(src, dst, range(2000 * 8191), covered=16).most_rows == 2000 * 8191
        took.append(thread_time() - began)
        began = thread_time()
        assert np.arange(2000 * 8191).any()
        listed.append(thread_time() - began)
    assert min(took) < min(listed) / 2, "half of what a list of the cells alone takes"


@pytest.mark.parametrize("band", [1, 3])
def test_what_many_small_chunks_carry_is_known_without_a_list_of_them(band):
    """A peer cuts a transfer as it likes, and may say of all chunks at once that they have come."""
    side = described([contiguous(NHD, SIZES | {"block": 1 << 13}, layers=[layer]) for layer in range(2)])
    spans, tokens = {"default": Span(np.arange(1 << 12))}, range(1 << 16)
    plan = between(side, side).template.bind(spans, spans, tokens)
    bound = BoundPlan(plan, ChunkGrid((0, 1), 1, 1, 0, len(tokens), band))
    tracemalloc.start()
    try:
        carried = [bound.carried(0, 1), bound.carried(1, bound.grid.chunks)]
        assert tracemalloc.get_traced_memory()[0] < 24 * bound.grid.chunks
    finally:
        tracemalloc.stop()
    assert carried == [plan.nbytes // bound.grid.chunks, plan.nbytes - plan.nbytes // bound.grid.chunks]
