"""The house does not grow: what `make house` prints stays within its limits."""

import pytest
from sizes import LIMITS, counted  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(scope="module")
def counts():
    return counted()


@pytest.mark.parametrize("name", LIMITS)
def test_it_stays_within_its_limit(counts, name):
    limit, goal = LIMITS[name]
    assert goal <= limit
    assert counts[name] <= limit


def test_every_figure_has_a_limit(counts):
    assert counts.keys() == LIMITS.keys()
