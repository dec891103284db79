"""Predictions that are corrected by what transfers took."""

from random import Random

import pytest

from kvxfer.protocol.messages import Route
from kvxfer.routes.chooser import Means, acceptable, choose
from kvxfer.routes.cost import PROFILES
from kvxfer.routes.estimates import Estimates

CPU = PROFILES["cpu"]
A, B = b"a" * 16, b"b" * 16
WORK = {"nbytes": 1 << 26, "chunks": 2, "pieces": 2048}


def test_at_first_they_are_the_profiles():
    estimates = Estimates(CPU)
    for route in (Route.MAPPED, Route.STAGED, Route.DIRECT, Route.PULL):
        assert estimates.seconds(A, route, **WORK) == CPU.seconds(route, **WORK)


def test_they_come_to_what_transfers_take_and_stay_there():
    estimates, rng = Estimates(CPU), Random(1)
    for _ in range(60):
        predicted = estimates.seconds(A, Route.DIRECT, **WORK)
        estimates.took(A, Route.DIRECT, predicted=predicted, seconds=0.040 * rng.uniform(0.9, 1.1))
    assert estimates.seconds(A, Route.DIRECT, **WORK) == pytest.approx(0.040, rel=0.1)


def test_one_slow_transfer_is_no_verdict():
    estimates = Estimates(CPU)
    before = estimates.seconds(A, Route.DIRECT, **WORK)
    estimates.took(A, Route.DIRECT, predicted=before, seconds=before * 1000)
    assert estimates.seconds(A, Route.DIRECT, **WORK) <= before * 2.01


def test_what_was_never_tried_is_as_slow_as_what_was():
    estimates = Estimates(CPU)
    for _ in range(50):
        predicted = estimates.seconds(A, Route.DIRECT, **WORK)
        estimates.took(A, Route.DIRECT, predicted=predicted, seconds=3 * CPU.seconds(Route.DIRECT, **WORK))
    assert estimates.factor(A, Route.STAGED) == pytest.approx(3, rel=0.01)
    assert estimates.factor(B, Route.STAGED) == 1
    estimates.forget(A)
    assert estimates.factor(A, Route.DIRECT) == 1


@pytest.mark.parametrize("times", [0.0, -1.0])
def test_what_cannot_be_is_not_learned(times):
    estimates = Estimates(CPU)
    estimates.took(A, Route.DIRECT, predicted=1.0, seconds=times)
    estimates.took(A, Route.DIRECT, predicted=times, seconds=1.0)
    assert estimates.factor(A, Route.DIRECT) == 1


def choice(estimates, pieces, nbytes=1 << 26):
    means = Means(staged=True, direct=True, pull=True)
    return choose(
        "auto",
        means,
        acceptable("auto", means),
        nbytes=nbytes,
        pieces=lambda: pieces,
        seconds=lambda route, count: estimates.seconds(A, route, nbytes=nbytes, chunks=2, pieces=count),
    )


def test_the_route_that_is_predicted_to_be_faster_is_taken_and_a_wrong_prediction_is_mended():
    estimates = Estimates(CPU)
    assert choice(estimates, 256).route is Route.DIRECT
    assert choice(estimates, 1 << 20).route is Route.STAGED
    for _ in range(20):  # a wire on which posts are slow; the other route is tried and is as it was
        estimates.took(A, Route.STAGED, predicted=1.0, seconds=1.0)
        estimates.took(A, Route.DIRECT, predicted=1.0, seconds=4.0)
    found = choice(estimates, 256)
    assert found.route is Route.STAGED
    assert found.why.startswith("256 pieces of 262144 bytes on average: ")
