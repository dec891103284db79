"""What a decode rank accepts, and the rule between the two routes that pairs on different hosts have."""

import pytest

from kvxfer.plans.routes import RouteSupport, acceptable, choose
from kvxfer.protocol.messages import Route


@pytest.mark.parametrize(("direct", "staged", "faster"), [
    (1.0, 2.0, Route.DIRECT), (2.0, 1.0, Route.STAGED), (1.0, 1.0, Route.DIRECT), (1.05, 1.0, Route.DIRECT),
    (1.06, 1.0, Route.STAGED),
])  # fmt: skip
def test_the_faster_one_is_taken_and_direct_if_they_are_about_equal(direct, staged, faster):
    support = RouteSupport(frozenset({Route.STAGED, Route.DIRECT, Route.PULL}))
    choice = choose(
        "auto",
        support,
        acceptable("auto", support),
        nbytes=1 << 20,
        pieces=lambda: 16,
        seconds=lambda route, _: direct if route is Route.DIRECT else staged,
    )
    assert choice.route is faster


@pytest.mark.parametrize(("preference", "order"), [
    ("auto", "mapped staged direct"), ("mapped", "mapped staged direct"), ("staged", "staged"),
    ("direct", "direct mapped staged"), ("pull", "pull staged direct"),
])  # fmt: skip
def test_what_is_preferred_comes_first_and_then_what_it_falls_back_to(preference, order):
    everything = RouteSupport(frozenset(Route))
    assert [route.name.lower() for route in acceptable(preference, everything)] == order.split()
