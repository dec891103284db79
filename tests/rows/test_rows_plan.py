"""Every case of the catalogue: the planner against the oracle, who sends what, and what is said of the pieces."""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from random import Random

import numpy as np
import pytest
from agree import check_world, scattered
from catalogue import CASES
from ranks import World, contents

from kvxfer.geometry import PairPlan, resolve
from kvxfer.tools.explain import explain


@cache
def world_of(name: str) -> World:
    """A case's world, which these tests only look at."""
    return World.of(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_the_planner_agrees_with_the_oracle(name: str) -> None:
    world = world_of(name)
    moved = check_world(world, Random(name))
    assert moved == sum(len(world.needs(rank)) for rank in world.decode)
    assert moved or not world.request.tokens


@pytest.mark.parametrize("name", CASES)
def test_a_world_is_what_it_says(name: str) -> None:
    """The ranks that are asked are those named, replicas agree, all is held, and no byte has two coordinates."""
    world = world_of(name)
    have = [rank.geometry for rank in world.prefill]
    found = [resolve(rank.geometry, have, rank=rank.number) for rank in world.decode]
    assert tuple(tuple(n for n, share in enumerate(shares) if share) for shares in found) == world.case.senders
    for rank in world.prefill:
        at, codes = rank.cells(world.coder).T
        assert len(np.unique(at)) == len(at)
        assert np.array_equal(rank.memory[at], contents(codes, world.request.seed))
    for rank in world.decode:
        at, codes = rank.cells(world.coder, world.request.tokens).T
        assert len(np.unique(at)) == len(at) == len(np.unique(codes))
        if world.prefill[0].null is None:
            assert len(world.needs(rank)) == len(at)


ROWS = 3
TOUCHING = {
    "hybrid state: channel by channel into time by time",
    "hybrid state: time by time into channel by channel",
    "hybrid state: TP 2:4, B and C replicated",
    "hybrid state: every token held, channel by channel into time by time",
}
"""In these the last time step of the last channel of `conv.C` touches the first element of `ssm`, on both sides: one of
many runs of two bytes, which is not counted as one piece with what follows it."""


def pairs(name: str) -> Iterator[PairPlan]:
    """Every pair of ranks between which something moves."""
    world = world_of(name)
    have = [rank.geometry for rank in world.prefill]
    for rank in world.decode:
        for source, share in zip(have, resolve(rank.geometry, have, rank=rank.number), strict=True):
            if share:
                yield PairPlan(source, rank.geometry, share)


@pytest.mark.parametrize("name", CASES)
def test_pieces_are_as_many_and_as_long_as_is_said(name: str) -> None:
    """What is said of a full row, against the list of all pieces with neighbours merged."""
    touching = False
    for pair in pairs(name):
        copied = scattered(pair, ROWS)
        listed = Counter(copied.copy().enumerate().merged().nbytes.tolist())
        said: Counter[int] = Counter()
        for run in explain(pair).runs:
            assert run.piece_bytes == run.first.nbytes
            assert run.limits
            said[run.piece_bytes] += ROWS * run.pieces
        more, longer = said - listed, listed - said
        assert sum(size * count for size, count in said.items()) == copied.bytes
        assert more.total() == 2 * longer.total() <= 2 * ROWS * 2  # one a page, and there are two layers of them
        touching |= bool(longer)
    assert touching == (name in TOUCHING)
