"""Two ends of one transfer, under every schedule that hypothesis can think of; see `pair`."""
# HealthCheck is an enum, which its stub does not say
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import pytest
from hypothesis import HealthCheck, settings
from pair import Pair

from kvxfer.protocol.messages import Reserve, Route
from kvxfer.protocol.transfer import ReceiveState, SendState

Pair.TestCase.settings = settings(
    max_examples=120, stateful_step_count=20, deadline=None, suppress_health_check=[*HealthCheck]
)
TestPair = Pair.TestCase


@pytest.mark.parametrize("route", [Route.STAGED, Route.DIRECT, Route.PULL], ids=lambda route: route.name.lower())
def test_undisturbed_it_succeeds(route):
    """The model can reach success: its rules are no tautologies."""
    pair = Pair()
    pair.begin(route, 3, False, False, 0, [])
    pair.teardown()
    assert pair.receiver.state is ReceiveState.DONE


@pytest.mark.parametrize("places", [1, 2, 3])
def test_chunks_take_turns_in_one_ring(places):
    """Each is written to the place that the one before it in the ring has left, and no ring is named again."""
    pair = Pair()
    pair.begin(Route.STAGED, 5, False, False, 0, [])
    pair.deliver_to_sender()
    pair.accept(1)
    pair.announce(5)
    pair.deliver_to_receiver()
    pair.deliver_to_receiver()
    pair.grant(16 * (places - 1))  # as many as there are places, into a new ring
    assert pair.receiver.granted == places
    for chunk in range(5):
        if pair.to_sender:
            pair.deliver_to_sender()
        pair.moved(0)
        pair.news()
        pair.deliver_to_receiver()
        pair.place(0)
        pair.check()
        if pair.grantable():
            assert pair.turns(1)
            pair.grant(1)
            assert pair.to_sender[-1] == Reserve(1, pair.receiver.granted, 1000)
        assert pair.where[chunk] == pair.ring[chunk % places]
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
    assert pair.sender.doubts
    assert pair.receiver.state is ReceiveState.LOST
    pair.teardown()
    assert pair.receiver.state is ReceiveState.STOPPED
