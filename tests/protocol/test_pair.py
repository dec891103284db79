"""Two ends of one transfer, under every schedule that hypothesis can think of; see `pair`."""
# HealthCheck is an enum, which its stub does not say
# pyright: reportArgumentType=false

import pytest
from hypothesis import HealthCheck, settings
from pair import Pair

from kvxfer.protocol.messages import Route
from kvxfer.protocol.receiving import ReceiveState

Pair.TestCase.settings = settings(
    max_examples=500, stateful_step_count=20, deadline=None, suppress_health_check=[*HealthCheck]
)
TestPair = Pair.TestCase


@pytest.mark.parametrize("route", [Route.STAGED, Route.DIRECT, Route.PULL], ids=lambda route: route.name.lower())
def test_undisturbed_it_succeeds(route):
    """The model can reach success: its rules are no tautologies."""
    pair = Pair()
    pair.begin(route, 3, False, 0, [])
    pair.teardown()
    assert pair.receiver.state is ReceiveState.DONE


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize(("route", "chunks"), [(Route.DIRECT, 3), (Route.STAGED, 1)])
def test_what_is_granted_ahead_is_used_or_void(route, chunks, used):
    pair = Pair()
    pair.begin(route, chunks, True, 0, [])
    assert pair.receiver.exposed
    pair.deliver_to_sender()
    pair.accept(1) if used else pair.void()
    assert (pair.hands == set(range(chunks))) == used
    pair.deliver_to_receiver()
    assert pair.receiver.exposed == used
    pair.teardown()
    assert pair.receiver.state is ReceiveState.DONE
