"""Sums of chunks: equal on both sides whatever their layouts, as the protocol says, and damage shows and is named."""

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import copy, pack
from staged import gather
from worlds import Rank, make_world

from kvxfer.copy.walk import total
from kvxfer.geometry import CacheGeometry, CacheTensor, ChunkPlan, PairPlan, Span, SumPlan, common, damage, resolve
from kvxfer.geometry import plan as module
from kvxfer.geometry.copyplan import STAGING_ALIGNMENT
from kvxfer.geometry.plan import keys, mix, selected

MASK = (1 << 64) - 1


def at_source(chunk: ChunkPlan) -> bytes:
    return total(SumPlan.at_source(chunk))


def at_destination(chunk: ChunkPlan) -> bytes:
    return total(SumPlan.at_destination(chunk))


def chunks(rng: Random, *, mixed: bool = False) -> Iterator[tuple[ChunkPlan, Rank, Rank]]:
    """Chunks of a random world, each moved into its destination before it comes."""
    world = make_world(rng, mixed=mixed)
    for ranks in (world.prefill, world.decode):
        for rank in ranks:
            rank.memory[:] = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 256, len(rank.memory))
    for number, target in enumerate(world.decode):
        shares = resolve(target.geometry, [rank.geometry for rank in world.prefill], rank=number)
        for source, selections in zip(world.prefill, shares, strict=True):
            if not selections:
                continue
            pair = PairPlan(source.geometry, target.geometry, selections, convert=mixed)
            plan = pair.bind(source.spans, target.spans, range(*world.tokens))
            grid = pair.grid(
                plan.tokens, target_bytes=rng.choice([64, 512, 1 << 20]), tokens_per_chunk=rng.choice([None, 5])
            )
            for chunk in range(grid.chunks):
                part = plan.chunk(grid, chunk)
                copy(pack(part.copy()))
                yield part, source, target


def by_the_protocol(chunk: ChunkPlan) -> bytes:
    """Section 6.7 word for word, in whole numbers, over the bytes of a staged chunk (6.4)."""

    def mixed(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
        return x ^ (x >> 31)

    staging = np.zeros(chunk.staged_bytes, np.uint8)
    copy(pack(gather(chunk, staging.ctypes.data)))
    regions, rows, start = [], [], 0
    for part in chunk.parts:
        (size,) = {part.slice.row_bytes}
        held = staging[start : start + part.staged_bytes].reshape(len(part.slice.bases), len(part.rows), size)
        at_row = [0] * len(part.rows)
        for places in held:
            at_region = 0
            for n, place in enumerate(places):
                padded = bytes(place) + bytes(-size % 8)
                words = [int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8)]
                key = [mixed((p + 1) * 0x9E3779B97F4A7C15 & MASK) | 1 for p in range(len(words))]
                plain = sum((w ^ (w >> 32)) * k for w, k in zip(words, key, strict=True)) & MASK
                item = mixed(plain ^ mixed(len(regions) << 32 | (len(rows) + n)))
                at_region += item
                at_row[n] += item
            regions.append(at_region & MASK)
        rows += [one & MASK for one in at_row]
        start += -(-part.staged_bytes // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
    return b"".join(number.to_bytes(8, "little") for number in [*regions, *rows])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("mixed", [False, True])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_both_sides_of_any_pair_of_layouts_add_up_alike_as_the_protocol_says(mixed: bool, seed: int) -> None:
    """Elements that are converted are added up as they arrive."""
    for part, _, _ in chunks(Random(seed), mixed=mixed):
        assert at_source(part) == at_destination(part)
        if not mixed and part.bytes < 20_000:
            assert at_source(part) == by_the_protocol(part)


def hit(tensor: dict[str, Any], byte: int) -> tuple[int, str, int] | None:
    """Layer, group and block id of a byte, if it belongs to a tensor."""
    index = np.indices(tensor["shape"]).reshape(len(tensor["shape"]), -1)
    first = tensor["base"] + np.asarray(tensor["strides"]) @ index
    (found,) = np.nonzero((first <= byte) & (byte < first + tensor["item"]))
    if not len(found):
        return None
    at = dict(zip(tensor["axes"].split(), index[:, found[0]].tolist(), strict=True))
    return tensor["layers"][at.get("layer", 0)], tensor["group"], at["block"] // tensor["ratio"]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32))
def test_a_bit_that_flips_anywhere_shows_and_is_named(seed: int) -> None:
    rng = Random(seed)
    for part, _, target in chunks(rng):
        pieces = part.listed()
        if not len(pieces):
            continue
        theirs = at_source(part)
        number = rng.randrange(len(pieces))
        byte = int(pieces.dst[number]) + rng.randrange(int(pieces.nbytes[number])) - target.base
        target.memory[byte] ^= 1 << rng.randrange(8)
        ours = at_destination(part)
        assert ours != theirs
        found = damage(part, ours, theirs)
        places = [place for tensor in target.tensors if (place := hit(tensor, byte)) is not None]
        assert (found.layers, found.blocks) in [((layer,), {group: (block,)}) for layer, group, block in places]


def two(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ChunkPlan]:
    """K and V of two layers in eight blocks of four tokens, three heads and five dims, moved from NHD to HND."""
    rng = torch.Generator().manual_seed(1)
    memory = [torch.zeros(2, 2, 8, *shape, dtype=dtype) for shape in ((4, 3, 5), (3, 4, 5))]
    memory[0].view(torch.uint8).random_(generator=rng)
    axes = ("layer kv block token head dim", "layer kv block head token dim")
    ends = [
        CacheGeometry.of([CacheTensor(held, order, layers=range(2), heads=range(3))])
        for held, order in zip(memory, axes, strict=True)
    ]
    pair = PairPlan(ends[0], ends[1], common(ends[0], ends[1]))
    plan = pair.bind({"default": Span(list(range(8)))}, {"default": Span([5, 0, 2, 7, 1, 3, 6, 4])}, range(1, 31))
    copy(pack(plan.whole.copy()))
    plan.whole.memory = memory  # type: ignore[attr-defined] - keeps it alive
    return memory[1], plan.whole


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, 0, 2), (0, 0, 7)),  # two blocks
        ((0, 1, 2), (0, 0, 2)),  # K and V
        ((0, 1, 2), (1, 1, 2)),  # two layers
        ((1, 0, 3, 0), (1, 0, 3, 2)),  # two heads
        ((1, 0, 3, 0, 1), (1, 0, 3, 0, 2)),  # two tokens
        ((1, 0, 3, 1, 1, 0), (1, 0, 3, 1, 1, 4)),  # two elements
        ((0, 0, 0), (1, 1, 6)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_what_is_swapped_shows_and_is_named(one: tuple[int, ...], other: tuple[int, ...], dtype: torch.dtype) -> None:
    held, part = two(dtype)
    theirs = at_source(part)
    kept = held[one].clone()
    held[one] = held[other]
    held[other] = kept
    found = damage(part, at_destination(part), theirs)
    assert found.layers == tuple(sorted({one[0], other[0]}))
    assert found.blocks == {"default": tuple(sorted({one[2], other[2]}))}
    assert found.tensors == tuple(sorted({f"default/{'kv'[place[1]]}" for place in (one, other)}))


def test_pieces_that_cancel_in_every_row_and_every_layer_show() -> None:
    held, part = two()
    held[0, 0, 2] = held[0, 1, 7] = held[0, 0, 2].clone()
    held[0, 0, 7] = held[0, 1, 2] = held[0, 0, 7].clone()
    before = at_destination(part)
    for half in (0, 1):
        kept = held[0, half, 2].clone()
        held[0, half, 2] = held[0, half, 7]
        held[0, half, 7] = kept
    assert at_destination(part) != before


def test_neighbours_share_sums_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SUMS", 3)
    held, part = two()
    theirs = at_source(part)
    assert len(theirs) == 8 * (2 + 3)  # four regions by two, eight rows by three
    assert theirs == at_destination(part)
    held[1, 1, 7, 0, 3, 2] = 1 - held[1, 1, 7, 0, 3, 2]
    found = damage(part, at_destination(part), theirs)
    assert found.layers == (1,)
    assert found.blocks == {"default": (1, 3, 7)}  # 7 is the fourth of the list


def test_keys_are_those_of_splitmix64() -> None:
    # its first outputs for the seed 0, as its authors' C code gives them
    assert keys(3).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4 | 1, 0x06C45D188009454F]
    assert mix(np.zeros(1, np.uint64)).tolist() == [0]
    with pytest.raises(ValueError, match="read-only"):
        keys(3)[0] = 1


@pytest.mark.parametrize("every", [2, 16, 100])
def test_about_one_chunk_in_so_many_is_selected(every: int) -> None:
    found = sum(selected(transfer, chunk, every) for transfer in range(100) for chunk in range(200))
    assert 0.8 < found * every / 20_000 < 1.2
    assert len({selected(2**63 - 1, chunk, every) for chunk in (2**20 - 1, *range(1000))}) == 2


def test_all_or_none_are_selected() -> None:
    assert all(selected(transfer, 3, 1) for transfer in range(99))
    assert not any(selected(transfer, 3, 0) for transfer in range(99))
