"""What a plan says about its pieces, held against the pieces themselves, element by element."""

import dataclasses
import json
from collections import Counter
from itertools import groupby, product
from random import Random

import numpy as np
import pytest
import torch
from agree import scattered
from worlds import make_world

from kvxfer.geometry import CacheGeometry, CacheTensor, Interleave, PairPlan, Selection, Span, resolve
from kvxfer.geometry.intersect import SegmentClass
from kvxfer.tools.engine import from_hf_config
from kvxfer.tools.explain import Cause, Explanation, Run, Side, Step, explain, explain_classes

WORLDS = range(120)


# what the tables say, with no formula of the planner


def row_axes(c: SegmentClass) -> list[tuple[str, int, int, int]]:
    """(name, count, source stride, destination stride) of what one full row copies in one region."""
    key = c.key
    axes = [(name, a.count, a.src, a.dst) for name, of in (("dim", key.dims), ("head", key.heads)) for a in of]
    return [*axes, ("token", key.grid, key.src_token, key.dst_token)]


def elements(axes: list[tuple[str, int, int, int]], bases: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """Both addresses of every element of one row."""
    found = set(bases)
    for _, count, src, dst in axes:
        found = {(a + n * src, b + n * dst) for a, b in found for n in range(count)}
    return found


def piece_sizes(cells: set[tuple[int, int]], item: int) -> Counter[int]:
    """Bytes of each longest run of elements that follow each other on both sides."""
    sizes: Counter[int] = Counter()
    for src, dst in cells:
        if (src - item, dst - item) in cells:
            continue
        length = 1
        while (src + length * item, dst + length * item) in cells:
            length += 1
        sizes[length * item] += 1
    return sizes


def pairs() -> "list[tuple[int, PairPlan]]":
    found = []
    for seed in WORLDS:
        world = make_world(Random(seed))
        have = [rank.geometry for rank in world.prefill]
        for number, target in enumerate(world.decode):
            shares = resolve(target.geometry, have, rank=number)
            for source, selections in zip(have, shares, strict=True):
                if selections:
                    found.append((seed, PairPlan(source, target.geometry, selections)))
    return found


@pytest.fixture(scope="module")
def drawn() -> "list[tuple[int, PairPlan, SegmentClass, tuple[Run, ...], Counter[int]]]":
    """Classes of random pairs, with what is said of them and what is so."""
    return [
        (
            seed,
            pair,
            c,
            explain_classes(pair.src, pair.dst, [c]).runs,
            piece_sizes(elements(row_axes(c), listed(c)), item(c)),
        )
        for seed, pair in pairs()
        for c in pair.classes
    ]


def listed(c: SegmentClass) -> list[tuple[int, int]]:
    return [(a, b) for a, b in c.bases.tolist()]


def item(c: SegmentClass) -> int:
    return c.key.item_bytes


def test_pieces_are_as_long_as_is_said(drawn):
    by_chance = 0
    for seed, _, c, runs, sizes in drawn:
        said: Counter[int] = Counter()
        for run in runs:
            said[run.piece_bytes] += run.pieces
            assert run.piece_bytes == (run.first.steps[-1].nbytes if run.first.steps else item(c)), seed
        assert sum(n * size for size, n in said.items()) == sum(n * size for size, n in sizes.items()), seed
        assert sum(said.values()) >= sum(sizes.values()), seed
        by_chance += said != sizes  # the last element of one axis happens to lie before the first of another
    assert len(drawn) > 1000
    assert by_chance * 500 < len(drawn)


def test_pieces_of_a_whole_pair_are_as_many_as_is_said():
    """Pieces that are longer than is said are those in which only some of the runs of two kinds touch."""
    touching = joined = 0
    pairs_drawn = pairs()
    for seed, pair in pairs_drawn:
        copied = scattered(pair, 2)
        listed = Counter(copied.copy().enumerate().merged().nbytes.tolist())
        said: Counter[int] = Counter()
        for run in explain(pair).runs:
            said[run.piece_bytes] += 2 * run.pieces
            joined += any(step.then for step in run.first.steps)
        assert sum(size * count for size, count in said.items()) == copied.bytes, seed
        assert said.total() >= listed.total(), seed
        touching += said != listed
    assert joined
    assert touching * 100 < len(pairs_drawn) > 500


def test_pieces_reach_over_layers_where_it_is_said_that_they_do():
    """What decides how chunks are cut, by a count of pieces, against what is said of them."""
    found = {True: 0, False: 0}
    for pair in (*(pair for _, pair in pairs()), plan(tensors("cross"), tensors("cross"))):
        said = any(step.axis == "layer" for run in explain(pair).runs for one in run.first for step in one.steps)
        assert pair.joins_layers == said
        found[said] += 1
    assert found[True]
    assert found[False]


def test_the_named_side_alone_ends_the_run(drawn):
    """Change nothing but the stride that is named, on the side that is named: pieces become as long as is promised."""
    seen: Counter[tuple[str, Side, Cause]] = Counter()
    for seed, _, c, runs, _ in drawn:
        for run in runs:
            for limit in run.limits:
                seen[limit.axis, limit.side, limit.cause] += 1
                if limit.cause in (Cause.BLOCK_IDS, Cause.TURNS) or limit.axis == "block":
                    continue
                assert limit.expected == run.piece_bytes, seed
                axes, bases = mended(c, limit.axis, limit)
                sizes = piece_sizes(elements(axes, bases), item(c))
                assert max(sizes) >= limit.expected * limit.count > run.piece_bytes, (seed, limit)
    axes = ("dim", "head", "token", "kv", "layer")
    for axis, side in product(axes, (Side.SOURCE, Side.DESTINATION)):
        assert any(seen[axis, side, cause] for cause in Cause), (axis, side)
    assert sum(any(seen[axis, Side.BOTH, cause] for cause in Cause) for axis in axes) > 2  # the nearest alone is named


def mended(c: SegmentClass, name: str, limit) -> tuple[list[tuple[str, int, int, int]], list[tuple[int, int]]]:
    """The class with one axis moved to where it would continue the run, on the side of the limit alone."""
    src, dst = (limit.side in (side, Side.BOTH) for side in (Side.SOURCE, Side.DESTINATION))
    axes, found = [], False
    for axis in row_axes(c):
        if not found and axis == (name, limit.count, limit.src_stride, limit.dst_stride):
            axis = (name, limit.count, limit.expected if src else axis[2], limit.expected if dst else axis[3])  # noqa: PLW2901
            found = True
        axes.append(axis)
    if found:
        return axes, listed(c)
    column = {"layer": 0, "kv": 1, "head": 2, "dim": 3}[name]
    numbers = sorted(set(c.places[:, column].tolist()))
    first: dict[tuple[int, ...], tuple[int, int]] = {}
    bases = []
    for place, base in zip(c.places.tolist(), listed(c), strict=True):
        at = numbers.index(place.pop(column))
        start = first.setdefault(tuple(place), base)
        bases.append(
            tuple(s + at * limit.expected if m else b for s, b, m in zip(start, base, (src, dst), strict=True))
        )
    return axes, bases


def test_where_block_ids_alone_end_a_run_the_next_block_continues_it(drawn):
    counted = 0
    for seed, _, c, runs, _ in drawn:
        key, grid = c.key, c.key.grid
        for run in runs:
            for limit in run.limits:
                if limit.cause is Cause.BLOCK_IDS:
                    counted += 1
                    within = [not s.is_state and s.block_tokens > grid for s in (key.src_rows, key.dst_rows)]
                    steps = (
                        grid * key.src_token if within[0] else key.src_block,
                        grid * key.dst_token if within[1] else key.dst_block,
                    )
                    two = [(a + n * steps[0], b + n * steps[1]) for a, b in listed(c) for n in (0, 1)]
                    assert max(piece_sizes(elements(row_axes(c), two), item(c))) >= 2 * run.piece_bytes, seed
    assert counted > 100


# the same for one transfer


def tensors(layout: str, heads: range = range(8), tokens: int = 16, layers: int = 2, dim: int = 16) -> CacheGeometry:
    count, kind = len(heads), torch.bfloat16
    if layout == "cross":
        whole = torch.empty(9, layers, 2, count, tokens, dim, dtype=kind)
        return CacheGeometry.of(
            [CacheTensor(whole, "block layer kv head token dim", layers=range(layers), heads=heads)]
        )
    shape, axes = {
        "NHD": ((2, 9, tokens, count, dim), "kv block token head dim"),
        "HND": ((2, 9, count, tokens, dim), "kv block head token dim"),
    }[layout]
    return CacheGeometry.of(
        [CacheTensor(torch.empty(shape, dtype=kind), axes, layers=[n], heads=heads) for n in range(layers)]
    )


def plan(src: CacheGeometry, dst: CacheGeometry) -> PairPlan:
    return PairPlan(src, dst, resolve(dst, [src])[0])


def test_classes_of_which_a_transfer_moves_nothing_are_left_out():
    pair = plan(tensors("NHD"), tensors("NHD"))
    transfer = pair.bind({"default": Span([4, 5, 6])}, {"default": Span([1, 2, 3])}, range(3, 48))
    assert explain(transfer) == explain(pair)
    late = pair.bind({"default": Span([4])}, {"default": Span([1], first_token=16)}, range(16))
    assert explain(late) == Explanation(())
    assert explain(late).limited_by == ""


# what people read


@pytest.mark.parametrize(
    ("src", "dst", "limited_by"),
    [
        (tensors("NHD"), tensors("NHD"), "block ids of both sides"),
        (tensors("NHD"), tensors("NHD", range(4)), "source token stride"),
        (tensors("NHD", range(4)), tensors("NHD"), "destination token stride"),
        (tensors("NHD"), tensors("HND"), "destination head stride, source token stride"),
        (tensors("HND"), tensors("cross"), "source kv stride, destination block stride"),
        (tensors("cross"), tensors("cross"), "block ids of both sides"),
        (tensors("cross"), tensors("cross", range(2, 4)), "source kv stride"),
    ],
)
def test_logs_say_it_in_a_few_words(src, dst, limited_by):
    heads = sorted({*src.tensors[0].heads} & {*dst.tensors[0].heads})
    selections = [Selection("default", "", kv, (0, 1), heads[0], heads[-1] + 1) for kv in "kv"]
    assert explain(PairPlan(src, dst, selections)).limited_by == limited_by


def test_what_has_no_classes_is_limited_by_nothing():
    assert explain_classes(tensors("NHD", range(4)), tensors("NHD", range(4, 8)), []).limited_by == ""


def test_a_head_split_reads_as_one():
    found = explain(plan(tensors("NHD", dim=128), tensors("NHD", range(4, 8), dim=128)))
    assert str(found) == (
        "group 'default', k+v, layers 0..1, heads 4..7: 64 pieces of 1 KiB a row of 16 tokens\n"
        "  one piece: 2 B (bfloat16), x 128 dim = 256 B, x 4 heads = 1 KiB\n"
        "  the destination goes on with the next token, but at the source the next token lies 2048 B on, not 1024 B; "
        "heads are split: 0..7 lie there, and only some are copied; 1024 B would make pieces of at least 16 KiB"
    )
    (run,) = found.runs
    assert run.first.steps == (Step("dim", 128, 256), Step("head", 4, 1024))
    assert run.limits[0].held == (0, 8)
    assert json.loads(json.dumps(dataclasses.asdict(found)))["runs"][0]["limits"][0]["side"] == "source"


def test_layers_that_lie_in_tensors_of_their_own_are_said_to():
    (run,) = explain(plan(tensors("NHD"), tensors("cross", tokens=1))).runs
    assert run.first.layers == (0, 1)
    assert run.first.halves == ("k", "v")
    whole = explain(plan(tensors("cross"), tensors("cross")))
    assert "x 2 halves = 8 KiB, x 2 layers = 16 KiB" in str(whole)
    assert "one piece of 16 KiB a row of 16 tokens" in str(whole)
    assert "layers 0..1" in str(whole)


def test_tokens_that_take_turns_end_a_run():
    ranks = [
        CacheGeometry.of(
            [CacheTensor(torch.empty(8, 4, 6), "block token dim", layers=[0], tokens=Interleave(n, of, 4))]
        )
        for n, of in ((1, 2), (0, 1))
    ]
    for (src, dst), side in ((ranks, Side.DESTINATION), (ranks[::-1], Side.SOURCE)):
        found = explain(PairPlan(src, dst, [Selection("default", "", "", (0,), 0, 1)]))
        assert [(limit.cause, limit.side) for limit in found.runs[0].limits] == [(Cause.TURNS, side)]
        assert "the row ends: the tokens that follow take their turn on another rank" in str(found)
        assert found.limited_by == f"{side} turns"


def test_regions_that_are_neighbours_only_in_part_are_told_apart():
    memory = torch.empty(4, 4, 4, 8)
    three = CacheTensor(memory[:, :3], "block layer token dim", layers=[0, 1, 2])
    alone = CacheTensor(torch.empty_strided((4, 4, 8), (128, 8, 1)), "block token dim", layers=[3])
    geometry = CacheGeometry.of([three, alone])
    found = explain(PairPlan(geometry, geometry, [Selection("default", "", "", (0, 1, 2, 3), 0, 1)]))
    assert sorted((run.first.layers, run.piece_bytes) for run in found.runs) == [((0, 2), 384), ((3, 3), 128)]


def of_llama(prefill, decode) -> PairPlan:
    """The first pair of ranks of Llama-like engines that are laid out so."""
    shape = {"num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    src, dst = (from_hf_config({"model_type": "llama", **shape}, **side).ranks for side in (prefill, decode))
    return PairPlan(src[0], dst[0], resolve(dst[0], src, rank=0)[0])


def test_tokens_that_take_turns_alike_go_on_to_the_end_of_the_block() -> None:
    pair = of_llama({"cp": 2}, {"cp": 2})
    text = "the block ends (both sides); within it and where block ids follow each other, the run goes on"
    assert text in str(explain(pair))
    assert explain(pair).limited_by == "block ids of both sides"
    blocks = [7, 3, 11]
    spans = {"default": Span(np.asarray(blocks))}
    plan = pair.bind(spans, spans, range(3 * 2 * 16)).whole
    assert len(plan.listed()) == len(blocks) * 2 * len(pair.layers)


def test_tensors_of_their_own_are_no_stride_apart() -> None:
    """However evenly an allocator has put them."""
    found = explain(of_llama({}, {"layout": "block kv token head dim"}))
    text = str(found)
    assert "at the source the next kv lies in other memory" in text
    assert "the destination goes on with the next kv" in text
    assert "source kv" in [limit.name for run in found.runs for limit in run.limits]


# what lies behind each other in one page


def slots(of: dict[str, tuple[str, int, int]], *, layers: int = 2, inside: bool = False, pad: int = 0) -> CacheGeometry:
    """Pages of state: by part how it lies (channel by channel, time by time), heads and dims; one behind the other.

    Args:
        of: Parts with one order, number of dims and next to each other share a tensor, as those of a convolution do.
        layers: Their number.
        inside: Whether the pages of all layers lie next to each other.
        pad: Elements behind each page.
    """
    places: list[tuple[str, int, int, int, int, int]] = []
    page = 0
    for (order, dim), together in groupby(of.items(), key=lambda part: (part[1][0], part[1][2])):
        parts = [(name, heads) for name, (_, heads, _) in together]
        width = sum(heads for _, heads in parts)
        for name, heads in parts:
            by_head, by_dim = (dim, 1) if order == "channels" else (1, width)
            places.append((name, heads, dim, page, by_head, by_dim))
            page += heads * (dim if order == "channels" else 1)
        page += width * (dim - 1) if order == "times" else 0
    page += pad
    memory = torch.zeros(1 if inside else layers, 6 * page * (layers if inside else 1), dtype=torch.bfloat16)
    block = page * layers if inside else page
    return CacheGeometry.of(
        [
            CacheTensor(
                (memory[0, layer * page :] if inside else memory[layer]).as_strided(
                    (6, heads, dim), (block, by_head, by_dim), layer * page + at if inside else layer * block * 6 + at
                ),
                "block head dim",
                layers=[layer],
                heads=range(heads),
                part=name,
            )
            for layer in range(layers)
            for name, heads, dim, at, by_head, by_dim in places
        ]
    )


MAMBA = {"x": ("times", 12, 3), "B": ("times", 4, 3), "C": ("times", 4, 3), "ssm": ("channels", 4, 16)}


def test_a_run_goes_on_with_another_part_and_then_with_its_own_axis():
    (run,) = explain(plan(slots(MAMBA, pad=8), slots(MAMBA, pad=24))).runs
    assert str(run) == (
        "group 'default', parts 'x', 'B', 'C', 'ssm', layers 0..1: 2 pieces of 248 B a row\n"
        "  one piece: 2 B (bfloat16), x 12 heads = 24 B, goes on with parts 'B', 'C', heads 0..3 (16 B) = 40 B, "
        "x 3 dim = 120 B, goes on with part 'ssm', heads 0..3 (128 B) = 248 B\n"
        "  at the source the next block lies 264 B on and at the destination the next block lies 296 B on, not 248 B"
    )
    stretches = [("x", (0, 12), 248), ("B", (0, 4), 16), ("C", (0, 4), 8), ("ssm", (0, 4), 128)]
    assert [(s.part, s.heads, s.nbytes) for s in run.first] == stretches
    assert json.loads(json.dumps(dataclasses.asdict(run)))["first"]["steps"][1]["then"]["part"] == "B"


def test_pages_of_all_layers_in_a_block_are_one_piece():
    inside = slots(MAMBA, inside=True, layers=3)
    (run,) = explain(plan(inside, inside)).runs
    assert (run.pieces, run.piece_bytes) == (1, 3 * 248)
    assert run.first.steps[-1] == Step("layer", 3, 3 * 248)
    assert [limit.cause for limit in run.limits] == [Cause.BLOCK_IDS]
    (apart,) = explain(plan(inside, slots(MAMBA, layers=3))).runs
    assert (apart.pieces, apart.piece_bytes) == (3, 248)
    ends = [(limit.axis, limit.side) for limit in apart.limits if limit.axis != "block"]
    assert ends == [("layer", Side.DESTINATION)]


def test_a_part_that_lies_elsewhere_on_one_side_is_named():
    behind = slots({"values": ("channels", 4, 8), "scales": ("channels", 4, 2)}, layers=1)
    swapped = slots({"scales": ("channels", 4, 2), "values": ("channels", 4, 8)}, layers=1)
    for pair, side, other in ((plan(behind, swapped), "destination", "source"), (plan(swapped, behind), "source", "")):
        values = next(run for run in explain(pair).runs if run.first.part == "values")
        (limit,) = (limit for limit in values.limits if limit.cause is Cause.KIND)
        assert (limit.axis, limit.side, limit.name) == ("part", side, f"{side} part")
        assert limit.then is not None
        assert (limit.then.part, limit.held) == ("scales", None)
        assert str(limit).endswith(f"part 'scales', layer 0, heads 0..3, but the {side} does not")
        assert str(limit).startswith(f"the {other}")


def test_layers_of_two_kinds_that_take_turns_are_one_piece():
    memory = torch.zeros(6, 4 * 24)
    lie = [(heads, memory[:, at : at + 4 * heads]) for heads, at in ((4, 0), (2, 16), (4, 24), (2, 40))]
    geometry = CacheGeometry.of(
        [
            CacheTensor(cells.unflatten(1, (heads, 4)), "block head dim", layers=[layer], heads=range(heads))
            for layer, (heads, cells) in enumerate(lie)
        ]
    )
    selections = [Selection("default", "", "", layers, 0, heads) for layers, heads in (((0, 2), 4), ((1, 3), 2))]
    (run,) = explain(PairPlan(geometry, geometry, selections)).runs
    assert (run.pieces, run.piece_bytes) == (1, 192)
    assert "x 4 heads = 64 B, goes on with layers 1..3, heads 0..1 (32 B) = 96 B, x 2 layers = 192 B" in str(run)


@pytest.mark.parametrize(
    ("axes", "src", "dst"),
    [
        ("block token dim", ((96, 12), (96, 24)), ((96, 12), (96, 24))),  # the first tokens of a block touch
        ("block dim", ((16,), (32,)), ((16,), (32,))),  # the first blocks do
        ("block token dim", ((96, 12), (96, 24)), ((12, 12), (12, 12))),  # the first tokens do, one of which is a row
    ],
)
def test_parts_that_touch_in_one_place_are_not_taken_for_neighbours(axes, src, dst):
    """Values of 8 elements and, from behind the first of them on, scales of 4 elements, with strides of their own."""

    def side(strides) -> CacheGeometry:
        memory = torch.zeros(1024, dtype=torch.uint8)
        tokens = () if len(strides[0]) == 1 else (min(4, strides[0][0] // 12),)
        return CacheGeometry.of(
            [
                CacheTensor(memory[at:].as_strided((4, *tokens, dim), (*own, 1)), axes, layers=[0], part=part)
                for own, part, at, dim in zip(strides, ("values", "scales"), (0, 8), (8, 4), strict=True)
            ]
        )

    runs = explain(plan(side(src), side(dst))).runs
    assert {(run.first.part, run.piece_bytes) for run in runs} == {("values", 8), ("scales", 4)}


def test_groups_whose_blocks_lie_beside_each_other_count_as_apart():
    memory = torch.zeros(8, 24)
    geometry = CacheGeometry.of(
        [
            CacheTensor(memory[:, 0:16].unflatten(1, (4, 4)), "block token dim", layers=[0], group="values"),
            CacheTensor(memory[:, 16:24].unflatten(1, (4, 2)), "block token dim", layers=[0], group="scales"),
        ]
    )
    assert len(explain(plan(geometry, geometry)).runs) == 2
