"""What a few timed writes say of a lane, and what that makes of a profile."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.protocol.messages import Route
from kvxfer.routes.cost import PROFILES
from kvxfer.routes.estimates import Estimates
from kvxfer.routes.lane import LaneCosts, Sample

KIB, MIB = 1 << 10, 1 << 20
SHAPES = ((1, 256 * KIB), (1, 4 * MIB), (1, 32 * MIB), (64, 256 * KIB))
CPU, H200 = PROFILES["cpu"], PROFILES["h200-nvlink"]
PEER, OTHER = b"p" * 16, b"o" * 16


def timed(lane, shapes=SHAPES, noise=lambda: 1.0):
    return [
        Sample(pieces, nbytes, noise() * (lane.post_s + (pieces - 1) * lane.piece_s + nbytes / lane.bytes_per_s))
        for pieces, nbytes in shapes
    ]


lanes = st.builds(LaneCosts, st.floats(1e-6, 1e-3), st.floats(1e-7, 1e-4), st.floats(1e8, 2e10))


@given(lanes)
def test_a_lane_is_found_by_its_writes(lane):
    found = LaneCosts.of(timed(lane))
    assert found.bytes_per_s == pytest.approx(lane.bytes_per_s, rel=1e-3)
    assert found.post_s == pytest.approx(lane.post_s, rel=1e-2, abs=1e-6)
    assert found.piece_s == pytest.approx(lane.piece_s, rel=1e-2, abs=1e-8)


@given(lanes, st.integers(0, 1000))
def test_what_now_and_then_takes_longer_changes_little_where_each_is_repeated(lane, seed):
    rng = Random(seed)
    samples = [one for _ in range(3) for one in timed(lane, noise=lambda: rng.choice((1.0, 1.0, 1.02, 30.0)))]
    rng.shuffle(samples)
    samples += timed(lane, noise=lambda: rng.uniform(1.0, 1.02))
    assert LaneCosts.of(samples).bytes_per_s == pytest.approx(lane.bytes_per_s, rel=0.25)


@given(st.lists(st.tuples(st.sampled_from(SHAPES), st.floats(1e-7, 10.0)), max_size=12), st.floats(1e-7, 10.0))
def test_no_times_give_costs_that_cannot_be(timed, seconds):
    samples = [Sample(pieces, nbytes, took) for (pieces, nbytes), took in timed]
    found = LaneCosts.of([*samples, Sample(1, 4 * MIB, seconds)])
    largest = max((sample for sample in [*samples, Sample(1, 4 * MIB, seconds)] if sample.pieces == 1), key=_size)
    assert found.post_s >= 0
    assert found.piece_s >= 0
    assert largest.nbytes / 10.0 <= found.bytes_per_s <= 4 * largest.nbytes / 1e-7


def _size(sample):
    return sample.nbytes


def test_one_write_alone_tells_of_its_bandwidth():
    assert LaneCosts.of([Sample(1, 4 * MIB, 2e-3)]) == LaneCosts(0.0, 0.0, 4 * MIB / 2e-3)


def test_a_slow_wire_slows_both_routes_down_and_leaves_what_the_hosts_do():
    slow = LaneCosts(post_s=1e-3, piece_s=2e-5, bytes_per_s=1e8)
    staged, direct = (slow.refine(CPU, route, listed=True) for route in (Route.STAGED, Route.DIRECT))
    assert (staged.bytes_per_s, direct.bytes_per_s) == (1e8, 1e8)
    assert (staged.piece_s, direct.piece_s) == (CPU.routes[Route.STAGED].piece_s, 2e-5)
    assert (staged.chunk_s, direct.fixed_s) == (CPU.routes[Route.STAGED].chunk_s, CPU.routes[Route.DIRECT].fixed_s)


@pytest.mark.parametrize("route", [Route.STAGED, Route.DIRECT, Route.PULL])
def test_what_is_written_out_of_caches_is_not_believed_to_be_faster(route):
    fast = LaneCosts(post_s=0.0, piece_s=1e-9, bytes_per_s=1e12)
    assert fast.refine(H200, route, listed=True).bytes_per_s == H200.routes[route].bytes_per_s


def test_of_memory_of_another_kind_it_says_nothing():
    lane = LaneCosts(post_s=1e-3, piece_s=2e-5, bytes_per_s=1e8)
    assert lane.refine(H200, Route.DIRECT, listed=False) == H200.routes[Route.DIRECT]
    assert lane.refine(H200, Route.STAGED, listed=False).bytes_per_s == 1e8
    assert lane.refine(H200, Route.MAPPED, listed=True) == H200.routes[Route.MAPPED]


def test_estimates_are_those_of_the_lane_once_it_was_measured():
    estimates, work = Estimates(CPU), {"nbytes": 64 * MIB, "chunks": 2, "pieces": 2048}
    estimates.took(PEER, Route.DIRECT, plain=1.0, seconds=4.0)  # told of the same wire, and is not counted twice
    lane = LaneCosts(post_s=1e-3, piece_s=2e-5, bytes_per_s=1e8)
    estimates.measured(PEER, lane, listed=True)
    assert estimates.lane(PEER) == lane
    expected = lane.refine(CPU, Route.DIRECT, listed=True).seconds(**work)
    assert estimates.seconds(PEER, Route.DIRECT, **work) == expected
    assert estimates.seconds(OTHER, Route.DIRECT, **work) == CPU.seconds(Route.DIRECT, **work)
    estimates.took(PEER, Route.DIRECT, plain=expected, seconds=2 * expected)
    assert estimates.seconds(PEER, Route.DIRECT, **work) > expected
    estimates.forget(PEER)
    assert estimates.lane(PEER) is None
    assert estimates.seconds(PEER, Route.DIRECT, **work) == CPU.seconds(Route.DIRECT, **work)
