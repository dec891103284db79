"""The state machines and the books of memory, under schedules of numbers and under those of hypothesis."""
# HealthCheck is an enum, which its stub does not say
# pyright: reportArgumentType=false

import pytest
from counts import CROWDS, MODELS, SEED, batches
from crowd import ROUTES, Crowd, play
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvxfer.protocol.messages import Route
from kvxfer.protocol.transfer import ReceiveState

kept = st.tuples(st.sampled_from(ROUTES), st.integers(1, 3), st.booleans(), st.integers(0, 3), st.booleans())
number = st.integers(0, 1000)


class Crowds(RuleBasedStateMachine):
    """A crowd, one step at a time: what hypothesis finds, it shrinks."""

    @initialize(transfers=st.lists(kept, min_size=1, max_size=3))
    def begin(self, transfers):
        self.crowd = Crowd(transfers)

    @rule(which=number, numbers=st.lists(number, min_size=1, max_size=8))
    def work(self, which, numbers):
        for one in numbers:
            self.crowd.step(which, one, trouble=False)

    @rule(which=number, number=number)
    def trouble(self, which, number):
        self.crowd.step(which, number, trouble=True)

    def teardown(self):
        if hasattr(self, "crowd"):
            self.crowd.finish()


Crowds.TestCase.settings = settings(
    max_examples=CROWDS, stateful_step_count=20, deadline=None, suppress_health_check=[*HealthCheck]
)
TestCrowds = Crowds.TestCase


@pytest.mark.parametrize("numbers", batches(MODELS, 2000), ids=lambda numbers: f"{numbers.start}")
def test_schedules(numbers):
    ends = {play(number) for number in numbers}
    if SEED is None:
        assert ends >= {ReceiveState.DONE, ReceiveState.STOPPED, ReceiveState.LOST}  # it gets everywhere


@pytest.mark.parametrize("route", sorted(set(ROUTES)), ids=lambda route: route.name.lower())
def test_undisturbed_all_of_them_succeed(route):
    crowd = Crowd([(route, 2, True, 0, False)] * 3)
    crowd.finish()
    assert all(one.receiver.state is ReceiveState.DONE for one in crowd.transfers)
    assert route is not Route.STAGED or not crowd.books.receiving.live
