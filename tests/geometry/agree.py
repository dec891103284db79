"""One world against the brute-force oracle: who sends what, whole copies, staged chunks, merged pieces, both ends."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, Protocol

import numpy as np
import oracle
from execute import I64, Space, by_destination, byte_pairs, run, table_pairs
from numpy.typing import NDArray
from staged import Blanked, gather, nbytes_of, scatter

from kvxfer.errors import BlocksError
from kvxfer.geometry import CacheGeometry, ChunkGrid, PairPlan, Selection, Span, TransferPlan, resolve
from kvxfer.geometry.copyplan import STAGING_ALIGNMENT

CANARY = -(1 << 62)
GUARD = 64
STAGING = 1 << 46  # where the staging buffer pretends to lie


class Rank(Protocol):
    """One rank: described plainly for the oracle, and as the planner is given it."""

    tensors: list[dict[str, Any]]
    blocks: dict[str, oracle.BlockList]
    memory: NDArray[np.uint8]
    geometry: CacheGeometry
    spans: dict[str, Span]

    @property
    def base(self) -> int:
        """Address of the first byte of its memory."""
        ...


class World(Protocol):
    """Two engines and one request."""

    @property
    def prefill(self) -> Sequence[Rank]:
        """Ranks that hold it."""
        ...

    @property
    def decode(self) -> Sequence[Rank]:
        """Ranks that need it."""
        ...

    @property
    def tokens(self) -> tuple[int, int]:
        """First token and one past the last."""
        ...


def plain(selections: Sequence[Selection]) -> list[oracle.Selection]:
    return [(s.group, s.part, s.kv, s.layers, s.head_start, s.head_stop) for s in selections]


def without_bases(geometry: CacheGeometry) -> CacheGeometry:
    """As the peer sees it."""
    return CacheGeometry(tuple(replace(spec, base=0) for spec in geometry.tensors))


def identities(size: int, owner: int) -> I64:
    return np.arange(size, dtype=np.int64) + (owner << 40)


def check_world(world: World, rng: Random) -> int:
    """Everything that must hold of every world; returns the bytes that moved."""
    moved = 0
    have = [rank.geometry for rank in world.prefill]
    for number, target in enumerate(world.decode):
        shares = resolve(target.geometry, have, rank=number)
        check_division(world, target, shares)
        for owner, (source, selections) in enumerate(zip(world.prefill, shares, strict=True)):
            if selections:
                moved += check_pair(source, target, selections, world.tokens, owner + 1, rng)
    return moved


def check_division(world: World, target: Rank, shares: Sequence[Sequence[Selection]]) -> None:
    """Every coordinate that the decode rank holds comes from one prefill rank that holds it."""
    stop = world.tokens[1]
    everything = [(t["group"], t["part"], kv, t["layers"], *t["heads"]) for t in target.tensors for kv in t["kv"]]
    needed = oracle.holders(target.tensors, everything, stop)
    assert set(needed.values()) <= {1}
    sent: dict[tuple[str, str, str, int, int, int], int] = {}
    for source, selections in zip(world.prefill, shares, strict=True):
        for key, count in oracle.holders(source.tensors, plain(selections), stop).items():
            sent[key] = sent.get(key, 0) + count
    assert {key: sent.get(key, 0) for key in needed} == needed


def check_pair(
    source: Rank, target: Rank, selections: Sequence[Selection], tokens: tuple[int, int], owner: int, rng: Random
) -> int:
    """One prefill rank and one decode rank: three executions against the oracle, and both ends against each other."""
    mine = oracle.byte_pairs(source.tensors, target.tensors, plain(selections), source.blocks, target.blocks, tokens)
    before = identities(len(target.memory), 0)
    data = identities(len(source.memory), owner)
    expected = before.copy()
    expected[mine[:, 1]] = data[mine[:, 0]]

    pair = PairPlan(source.geometry, target.geometry, selections)
    transfer = pair.bind(source.spans, target.spans, range(*tokens))
    whole = transfer.whole
    plan = whole.copy()
    pieces = plan.enumerate()
    assert len(mine) == whole.bytes == nbytes_of(plan) == pieces.nbytes.sum()
    assert plan.pieces == len(pieces)
    assert (pieces.nbytes > 0).all()
    assert np.array_equal(by_destination(table_pairs(plan)), by_destination(byte_pairs(pieces)))
    assert np.array_equal(by_destination(byte_pairs(pieces)) - [source.base, target.base], by_destination(mine))
    for listed in (pieces, pieces.merged()):
        memory = Space(target.base, before.copy())
        run(listed, Space(source.base, data), memory)
        assert np.array_equal(memory.cells, expected)
    merged = pieces.merged()
    assert (np.diff(merged.dst) > 0).all()
    joins = (merged.src[:-1] + merged.nbytes[:-1] == merged.src[1:]) & (
        merged.dst[:-1] + merged.nbytes[:-1] == merged.dst[1:]
    )
    assert not joins.any()

    check_growth(transfer, source, target, tokens, rng)

    # each end knows the peer's addresses as 0
    there = PairPlan(source.geometry, without_bases(target.geometry), selections)
    here = PairPlan(without_bases(source.geometry), target.geometry, selections)
    ends = [end.bind(source.spans, target.spans, range(*tokens)) for end in (there, here)]
    target_bytes = rng.choice([1, 100, 1000, 10_000, 1 << 30])
    chosen = pair.grid(range(*tokens), target_bytes=target_bytes)
    check_chosen_grid(transfer, chosen, target_bytes)
    for grid in (draw_grid(pair, tokens, rng), chosen):
        check_chunks(ends, grid, Space(source.base, data), Space(target.base, before.copy()), expected, mine)
    return len(mine)


def check_growth(transfer: TransferPlan, source: Rank, target: Rank, tokens: tuple[int, int], rng: Random) -> None:
    """While the source's lists grow, what they cover is planned as it will be in the end."""
    pair, covered = transfer.pair, rng.randint(*tokens)
    young = youngest(pair, source, target, tokens, covered)
    grid = draw_grid(pair, tokens, rng)
    assert young.digest(grid) == transfer.digest(grid)
    assert young.outline.bytes == transfer.outline.bytes >= transfer.whole.bytes
    now, then = (plan.window(pair.layers, tokens[0], covered).copy().enumerate() for plan in (young, transfer))
    assert np.array_equal(by_destination(byte_pairs(now)), by_destination(byte_pairs(then)))


def youngest(pair: PairPlan, source: Rank, target: Rank, tokens: tuple[int, int], covered: int) -> TransferPlan:
    """The plan with the shortest source lists that reach so far."""
    for known in range(max(len(span.ids) for span in source.spans.values()) + 1):
        lists = {group: Span(span.ids[:known], span.first_token) for group, span in source.spans.items()}
        with contextlib.suppress(BlocksError):
            return pair.bind(lists, target.spans, range(*tokens), covered=covered)
    raise AssertionError("the whole lists do not cover it")


def draw_grid(pair: PairPlan, tokens: tuple[int, int], rng: Random) -> ChunkGrid:
    """Any grid, also one that cuts sub-blocks."""
    window = rng.choice([tokens[1], rng.randint(1, 20)])
    return ChunkGrid(pair.layers, rng.randint(1, len(pair.layers)), window, *tokens)


def check_chosen_grid(transfer: TransferPlan, grid: ChunkGrid, target: int) -> None:
    """A grid of the planner's choice cuts no row, and keeps to its target unless it is as small as can be."""
    chunks = [transfer.chunk(grid, number) for number in range(grid.chunks)]
    meetings = zip(transfer.pair.meetings, transfer.rows, strict=True)
    one_slot = all(not src.is_state or len(rows) <= src.block_ratio for (_, src, _), rows in meetings)
    assert not one_slot or transfer.whole.staged_bytes <= transfer.pair.most_staged_bytes(transfer.tokens)
    gathers = [gather(plan, 0) for plan in (transfer.whole, *chunks)]
    rows = [sum(len(s.rows) * len(s.regions) for s in one.segments) for one in gathers]
    assert rows[0] == sum(rows[1:])
    smallest = grid.layers_per_chunk == 1 and grid.tokens_per_chunk <= transfer.pair.row_tokens
    if not smallest and not transfer.pair.has_state:
        assert max(chunk.staged_bytes for chunk in chunks) <= target


def check_chunks(
    ends: Sequence[TransferPlan], grid: ChunkGrid, data: Space, memory: Space, expected: I64, mine: I64
) -> None:
    """Gather at one end, scatter at the other, chunk by chunk in any order."""
    sender, receiver = ends
    assert sender.digest(grid) == receiver.digest(grid)
    outlines = [sender.window(*grid.of(number), outline=True) for number in range(grid.chunks)]
    assert sender.largest_chunk_bytes(grid) == max(outline.staged_bytes for outline in outlines)
    everything: list[I64] = []
    total = 0
    for number in range(grid.chunks):
        give, take = sender.chunk(grid, number), receiver.chunk(grid, number)
        assert (give.staged_bytes, give.bytes) == (take.staged_bytes, take.bytes)
        assert give.staged_bytes % STAGING_ALIGNMENT == 0
        assert give.staged_bytes >= give.bytes
        cells = np.full(give.staged_bytes + 2 * GUARD, CANARY, np.int64)
        staging = Space(STAGING - GUARD, cells)
        into, out = gather(give, STAGING), scatter(take, STAGING)
        assert nbytes_of(into) == nbytes_of(out) == give.bytes
        assert all((segment.rows[:, 4] > 0).all() for segment in (*into.segments, *out.segments))
        assert bool(into.blanks) == (give.staged_bytes > give.bytes)
        clear(into, cells[GUARD:-GUARD])
        filled = run(into.enumerate(), data, staging)[1]
        assert (cells[GUARD:-GUARD] != CANARY).all(), "what staging held before would travel"
        assert np.array_equal(by_destination(table_pairs(into)), by_destination(byte_pairs(into.enumerate())))
        assert (cells[:GUARD] == CANARY).all()
        assert (cells[GUARD + give.staged_bytes :] == CANARY).all()
        read, written = run(out.enumerate(), staging, memory)
        assert np.array_equal(np.sort(read), np.sort(filled))
        everything.append(written)
        total += take.bytes
    assert total == len(mine)
    assert np.array_equal(np.sort(np.concatenate(everything)), mine[:, 1])
    assert np.array_equal(memory.cells, expected)


def clear(into: Blanked, room: I64) -> None:
    """Zero what a gather zeroes, in the cells of staging."""
    for blank in into.blanks:
        at = blank.address - STAGING
        assert at >= 0
        assert at + (blank.lines - 1) * blank.pitch + blank.width <= len(room)
        for line in range(blank.lines):
            room[at + line * blank.pitch :][: blank.width] = 0
