"""Every case of the catalogue: the planner against the oracle, and who sends what."""

from functools import cache
from random import Random

import numpy as np
import pytest
from agree import check_world
from catalogue import CASES
from ranks import World, contents

from kvxfer.geometry import resolve


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
