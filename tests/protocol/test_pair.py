"""Two ends of one transfer, under every schedule that hypothesis can think of; see `pair`."""
# HealthCheck is an enum, which its stub does not say
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import pytest
from hypothesis import HealthCheck, settings
from pair import Pair

from kvxfer.protocol.messages import Route
from kvxfer.protocol.receiving import ReceiveState
from kvxfer.protocol.sending import SendState

Pair.TestCase.settings = settings(
    max_examples=500, stateful_step_count=20, deadline=None, suppress_health_check=[*HealthCheck]
)
TestPair = Pair.TestCase


@pytest.mark.parametrize("route", [Route.STAGED, Route.DIRECT, Route.PULL], ids=lambda route: route.name.lower())
def test_undisturbed_it_succeeds(route):
    """The model can reach success: its rules are no tautologies."""
    pair = Pair()
    pair.begin(route, 3, False, False, 0, [])
    pair.teardown()
    assert pair.receiver.state is ReceiveState.DONE


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize(("route", "chunks"), [(Route.DIRECT, 3), (Route.STAGED, 1)])
def test_what_is_granted_ahead_is_used_or_void(route, chunks, used):
    pair = Pair()
    pair.begin(route, chunks, True, False, 0, [])
    assert pair.receiver.exposed
    pair.deliver_to_sender()
    pair.accept(1) if used else pair.void()
    assert (pair.hands == set(range(chunks))) == used
    pair.deliver_to_receiver()
    assert pair.receiver.exposed == used
    pair.teardown()
    assert pair.receiver.state is ReceiveState.DONE


def test_a_read_that_does_not_end_keeps_no_offer():
    """Its decode rank cannot say that it reads nothing, but that it has given up."""
    pair = Pair()
    pair.begin(Route.PULL, 2, False, True, 0, [])
    pair.drain()
    assert pair.stuck
    pair.cancel()
    pair.drain()
    assert pair.sender.state is SendState.ENDED
    assert pair.sender.in_doubt
    assert pair.receiver.state is ReceiveState.LOST
    pair.teardown()
    assert pair.receiver.state is ReceiveState.STOPPED
