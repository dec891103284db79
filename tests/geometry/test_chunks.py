"""Chunk grids, and the order of bytes in staging."""

from dataclasses import replace

import numpy as np
import pytest
from execute import by_destination, byte_pairs
from staged import gather
from worlds import Rank, contiguous

from kvxfer.errors import GeometryError
from kvxfer.geometry import ChunkGrid, PairPlan, TransferPlan, common, resolve
from kvxfer.geometry.copyplan import STAGING_ALIGNMENT


def rank(*tensors: dict[str, object], blocks: dict[str, tuple[list[int], int]]) -> Rank:
    """A rank whose tensors lie behind each other."""
    at = 0
    for tensor in tensors:
        tensor["base"] = at
        at += -(-int(str(tensor["extent"])) // 64) * 64
    return Rank(list(tensors), dict(blocks), {}, (0, 1, 1))


def bound(source: Rank, target: Rank, tokens: range) -> TransferPlan:
    selections = resolve(target.geometry, [source.geometry])[0]
    return PairPlan(source.geometry, target.geometry, selections).bind(source.spans, target.spans, tokens)


# grids


def test_windows_begin_at_multiples_and_layers_come_in_runs() -> None:
    grid = ChunkGrid((1, 4, 5), 2, 16, 10, 40)
    assert (grid.chunks, grid.windows, grid.layer_runs) == (6, 3, 2)
    assert [grid.of(n) for n in range(6)] == [
        ((1, 4), 10, 16),
        ((5,), 10, 16),
        ((1, 4), 16, 32),
        ((5,), 16, 32),
        ((1, 4), 32, 40),
        ((5,), 32, 40),
    ]
    for number in (-1, 6):
        for band in (1, 2, 9):
            with pytest.raises(IndexError, match=rf"chunk {number} is outside 0\.\.5"):
                replace(grid, band=band).of(number)


@pytest.mark.parametrize("layers", [2, 3, 5])
@pytest.mark.parametrize("band", range(1, 9))
@pytest.mark.parametrize(("start", "stop"), [(0, 48), (5, 47), (16, 17), (21, 21), (24, 71), (44, 100)])
def test_every_chunk_has_its_number(layers: int, band: int, start: int, stop: int) -> None:
    """By the words of the protocol: band by band, in a band run by run, and of a run window by window."""
    plain = ChunkGrid((0, 3, 7, 8, 9), layers, 8, start, stop)
    ordered = sorted(map(plain.of, range(plain.chunks)), key=lambda cell: (cell[1] // 8 // band, cell[0], cell[1]))
    grid = replace(plain, band=band)
    assert list(map(grid.of, range(grid.chunks))) == ordered
    assert sorted(grid.cell(number) for number in range(grid.chunks)) == list(range(plain.chunks))
    assert [plain.of(grid.cell(number)) for number in range(grid.chunks)] == ordered
    assert grid.cell(np.arange(1, grid.chunks)).tolist() == [grid.cell(number) for number in range(1, grid.chunks)]
    for layer in plain.layers:
        assert grid.last_of(layer) == max(n for n in range(grid.chunks) if layer in grid.of(n)[0])


@pytest.mark.parametrize("wrong", [
    ((), 1, 1, 0, 1, 1), ((0,), 0, 1, 0, 1, 1), ((0,), 1, 0, 0, 1, 1), ((0,), 1, 1, 3, 2, 1), ((0,), 1, 1, 0, 0, 1),
    ((0,), 1, 1, 0, 1, 0),
])  # fmt: skip
def test_an_empty_grid_is_refused(wrong: tuple[tuple[int, ...], int, int, int, int, int]) -> None:
    with pytest.raises(GeometryError, match="a chunk grid needs layers, tokens and positive steps, not ChunkGrid"):
        ChunkGrid(*wrong)


def pair_of(src_tokens: int, dst_tokens: int, layers: int = 4, **state: int) -> PairPlan:
    """Layers of 64 bytes a token; with `state=`, as many bytes of state in one more."""
    sides = []
    for tokens in (src_tokens, dst_tokens):
        sizes = {"block": 3, "layer": layers, "token": tokens, "dim": 32}
        tensors = [contiguous("layer block token dim", sizes, layers=range(layers), group="a")]
        if state:
            held = {"block": 3, "dim": state["state"] // 2}
            tensors.append(contiguous("block dim", held, layers=(layers,), group="s", part="ssm"))
        sides.append(rank(*tensors, blocks={}))
    return PairPlan(sides[0].geometry, sides[1].geometry, resolve(sides[1].geometry, [sides[0].geometry])[0])


@pytest.mark.parametrize(
    ("target", "per_chunk", "expected"),
    [
        (1 << 30, None, (4, 100)),
        (4 * (64 * 112), None, (4, 100)),  # 100 tokens touch 7 sub-blocks of 16
        (4 * (64 * 112) - 1, None, (3, 100)),
        (1 << 30, 2, (2, 100)),
        (64 * 112, None, (1, 100)),
        (64 * 112 - 1, None, (1, 96)),
        (64 * 32, None, (1, 32)),
        (64 * 32 - 1, None, (1, 16)),
        (1, None, (1, 16)),
    ],
)
def test_the_chosen_grid_keeps_to_its_target(target: int, per_chunk: int | None, expected: tuple[int, int]) -> None:
    grid = pair_of(64, 16).grid(range(100), target_bytes=target, layers_per_chunk=per_chunk)
    assert (grid.layers_per_chunk, grid.tokens_per_chunk) == expected


@pytest.mark.parametrize(
    ("target", "per_chunk", "expected"),
    [
        (64 * 4000, None, (4, 1000)),
        (64 * 4000, 2, (2, 2000)),
        (64 * 4000, 1, (1, 4000)),
        (64 * 2 * 64, None, (2, 64)),
        (64 * 127, None, (1, 127)),
    ],
)
def test_windows_of_short_rows_are_of_several_layers(target: int, per_chunk: int | None, expected: object) -> None:
    """A row is 64 bytes of a layer: addresses of one that is in every chunk of its layer would be half as many."""
    grid = pair_of(1, 1).grid(range(10_000), target_bytes=target, layers_per_chunk=per_chunk)
    assert (grid.layers_per_chunk, grid.tokens_per_chunk) == expected
    wide = pair_of(256, 256).grid(range(10_240), target_bytes=64 * 4096, layers_per_chunk=per_chunk)
    assert (wide.layers_per_chunk, wide.tokens_per_chunk) == (1, 4096)


def test_windows_are_aligned_to_every_group() -> None:
    tensors = [
        [
            contiguous("block token dim", {"block": 3, "token": size, "dim": 32}, group=name)
            for name, size in zip("ab", sizes, strict=True)
        ]
        for sizes in ((16, 24), (16, 48))
    ]
    source, target = (rank(*given, blocks={}) for given in tensors)
    pair = PairPlan(source.geometry, target.geometry, resolve(target.geometry, [source.geometry])[0])
    assert pair.grid(range(1000), target_bytes=1).tokens_per_chunk == 48
    assert pair.grid(range(1000), target_bytes=1 << 30, tokens_per_chunk=1).tokens_per_chunk == 48
    assert (
        pair.grid(range(40), target_bytes=1 << 30, tokens_per_chunk=1).tokens_per_chunk == 40
    )  # no larger than need be


@pytest.mark.parametrize(
    ("target", "window"),
    [
        (64 * 512, 2048),  # all that this rank holds: 512 of the tokens
        (64 * 512 - 1, 496),
        (64 * 300, 288),  # less than a turn: some windows are full of them, and some have none
        (1, 16),
    ],
)
def test_turns_that_are_larger_than_a_chunk_are_cut(target: int, window: int) -> None:
    """Four ranks take turns of 512 tokens: a window need not hold one of each, but only rows that are whole."""
    tensors = [
        contiguous("block token dim", {"block": 3, "token": 16, "dim": 32}, interleave=interleave)
        for interleave in ((1, 4, 512), (0, 1, 1))
    ]
    source, target_rank = (rank(tensor, blocks={}) for tensor in tensors)
    pair = PairPlan(source.geometry, target_rank.geometry, common(source.geometry, target_rank.geometry))
    assert pair.grid(range(2048), target_bytes=target).tokens_per_chunk == window
    assert pair.grid(range(2048), target_bytes=1 << 30, tokens_per_chunk=100).tokens_per_chunk == 112


def test_state_alone_does_not_shred_the_tokens() -> None:
    """State that is larger than the target is one chunk, not one for every token."""
    tensors = [contiguous("block dim", {"block": 3, "dim": 500}, group="s") for _ in range(2)]
    source, target = (rank(tensor, blocks={}) for tensor in tensors)
    pair = PairPlan(source.geometry, target.geometry, resolve(target.geometry, [source.geometry])[0])
    assert pair.grid(range(10_000), target_bytes=100).chunks == 1
    mixed = pair_of(16, 16, layers=4, state=10_000)
    assert mixed.grid(range(32), target_bytes=4 * 64 * 32).chunks == 5  # the other layers fit, and are not cut
    assert mixed.grid(range(64), target_bytes=64 * 32).chunks == 5 * 2


# staging


@pytest.mark.parametrize(
    "axes",
    [
        "kv layer block dim head token",
        "kv layer block dim/2 head/2 token head%2 dim%2",
        "dim%2 kv head%2 layer block dim/2 token head/2",
    ],
)
def test_the_order_of_bytes_in_staging(axes: str) -> None:
    """Layer, half, row, head, token, dim in C order, whatever the order on both sides.

    Every row takes the room of a full sub-block, and begins with its first token.
    """
    layers, heads, dim, item = (2, 5), 4, 4, 2
    sizes = {"block": 6, "layer": 2, "kv": 2, "head": heads, "dim": dim, "token": 8}
    source = rank(
        contiguous("block kv token layer head dim", sizes, layers=layers, kv=("k", "v")),
        blocks={"default": ([5, 1], 0)},
    )
    target = rank(
        contiguous(axes, sizes | {"token": 4}, layers=layers[::-1], kv=("v", "k")), blocks={"default": ([4, 0, 2], 0)}
    )
    plan = bound(source, target, range(2, 11)).whole
    found = by_destination(byte_pairs(gather(plan, 0).enumerate()))
    expected: list[tuple[int, int]] = []
    at = 0
    for layer in range(2):
        for kv in range(2):
            for row in range(3):  # sub-blocks of 4 tokens: 0..3, 4..7, 8..11
                for head in range(heads):
                    first = max(2, 4 * row)
                    for token in range(first, first + 4):
                        for byte in range(dim * item):
                            index = ([5, 1][token // 8], kv, token % 8, layer, head)
                            offset = int(np.ravel_multi_index(index, (6, 2, 8, 2, heads))) * dim * item + byte
                            if token < min(11, 4 * row + 4):
                                expected.append((source.base + offset, at))
                            at += 1
    assert plan.staged_bytes == -(-at // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
    assert found.tolist() == [list(pair) for pair in expected]


def test_segments_are_aligned_and_ordered_by_group_part_and_shape() -> None:
    def tensors() -> list[dict[str, object]]:
        sizes = {"block": 2, "token": 4, "dim": 3}
        return [
            contiguous("block token dim", sizes, group="b", item=1),
            contiguous("block token dim", sizes, group="a", part="z", item=1),
            contiguous("block token dim", sizes | {"dim": 5}, group="a", item=1, layers=(1,)),
        ]

    blocks = {"a": ([1], 0), "b": ([0], 0)}
    source, target = rank(*tensors(), blocks=blocks), rank(*tensors(), blocks=blocks)
    plan = bound(source, target, range(4)).whole
    bases = source.tensors[2]["base"], source.tensors[1]["base"], source.tensors[0]["base"]
    found = gather(plan, 1 << 20).enumerate().merged()
    assert (found.src - source.base).tolist() == [bases[0] + 20, bases[1] + 12, bases[2]]
    assert (found.dst - (1 << 20)).tolist() == [0, 32, 48]
    assert (plan.bytes, plan.staged_bytes) == (44, 64)
