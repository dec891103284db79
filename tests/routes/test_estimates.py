"""Predictions that are corrected by what transfers took."""

from functools import partial
from random import Random

import pytest

from kvxfer.plans.routes import PROFILES, Estimates, RouteSupport, acceptable, choose
from kvxfer.protocol.messages import Route

CPU = PROFILES["cpu"]
A, B = b"a" * 16, b"b" * 16
WORK = {"nbytes": 1 << 26, "chunks": 2, "pieces": 2048}


def test_they_come_to_what_transfers_take_and_stay_there():
    estimates, rng = Estimates(CPU), Random(1)
    plain = CPU.routes[Route.DIRECT].seconds(**WORK)
    for _ in range(60):
        estimates.learn(A, Route.DIRECT, plain=plain, seconds=0.040 * rng.uniform(0.9, 1.1))
    assert plain * estimates.factor(A, Route.DIRECT) == pytest.approx(0.040, rel=0.1)


def test_one_slow_transfer_is_no_verdict():
    estimates = Estimates(CPU)
    assert estimates.factor(A, Route.DIRECT) == 1
    estimates.learn(A, Route.DIRECT, plain=1.0, seconds=1000.0)
    assert estimates.factor(A, Route.DIRECT) <= 2.01


def test_what_was_never_tried_is_as_slow_as_what_was():
    estimates = Estimates(CPU)
    for _ in range(50):
        plain = CPU.routes[Route.DIRECT].seconds(**WORK)
        estimates.learn(A, Route.DIRECT, plain=plain, seconds=3 * plain)
    assert estimates.factor(A, Route.STAGED) == pytest.approx(3, rel=0.01)
    assert estimates.factor(B, Route.STAGED) == 1
    estimates.forget(A)
    assert estimates.factor(A, Route.DIRECT) == 1


@pytest.mark.parametrize("times", [0.0, -1.0])
def test_what_cannot_be_is_not_learned(times):
    estimates = Estimates(CPU)
    estimates.learn(A, Route.DIRECT, plain=1.0, seconds=times)
    estimates.learn(A, Route.DIRECT, plain=times, seconds=1.0)
    assert estimates.factor(A, Route.DIRECT) == 1


def test_transfers_that_were_under_way_together_teach_what_each_of_them_took():
    estimates = Estimates(CPU)
    for _ in range(64):  # all of them were predicted before the first one had ended
        estimates.learn(A, Route.DIRECT, plain=1.0, seconds=2.0)
    assert estimates.factor(A, Route.DIRECT) == pytest.approx(2.0, rel=0.01)


def choice(estimates, pieces, nbytes=1 << 26):
    support = RouteSupport(frozenset({Route.STAGED, Route.DIRECT, Route.PULL}))
    return choose(
        "auto",
        support,
        acceptable("auto", support),
        nbytes=nbytes,
        pieces=lambda: pieces,
        seconds=lambda route, count: (
            CPU.routes[route].seconds(nbytes=nbytes, chunks=2, pieces=count) * estimates.factor(A, route)
        ),
        overdue=partial(estimates.overdue, A),
    )


def test_the_route_that_is_predicted_to_be_faster_is_taken_and_a_wrong_prediction_is_mended():
    estimates = Estimates(CPU)
    assert choice(estimates, 256).route is Route.DIRECT
    assert choice(estimates, 1 << 20).route is Route.STAGED
    for _ in range(20):  # a wire on which posts are slow; the other route is tried and is as it was
        estimates.note_choice(A, Route.DIRECT)
        estimates.learn(A, Route.STAGED, plain=0.01, seconds=0.01)
        estimates.learn(A, Route.DIRECT, plain=0.01, seconds=0.04)
    found = choice(estimates, 256)
    assert found.route is Route.STAGED
    assert found.why.startswith("256 pieces of 262144 bytes on average: ")


class Machine:
    """Transfers with A, one after the other; a route takes `slower[route]` times what the profile says."""

    def __init__(self, pieces=2048):
        self.estimates, self.pieces, self.rng = Estimates(CPU), pieces, Random(3)
        self.slower = {Route.STAGED: 1.0, Route.DIRECT: 1.0}

    def seconds(self, route):
        return self.slower[route] * self.plain(route)

    def plain(self, route):
        return CPU.routes[route].seconds(nbytes=1 << 26, chunks=2, pieces=self.pieces)

    def transfers(self, count):
        """How often each route was taken, and the seconds of all."""
        taken, spent = dict.fromkeys(self.slower, 0), 0.0
        for _ in range(count):
            route = choice(self.estimates, self.pieces).route
            seconds = self.seconds(route) * self.rng.uniform(0.95, 1.05)
            self.estimates.note_choice(A, route)
            self.estimates.learn(A, route, plain=self.plain(route), seconds=seconds)
            taken[route] += 1
            spent += seconds
        return taken, spent


def test_what_was_slow_for_a_while_is_taken_again_afterwards():
    machine = Machine()
    assert machine.transfers(50)[0][Route.DIRECT] >= 48
    machine.slower[Route.DIRECT] = 16.0
    assert machine.transfers(200)[0][Route.STAGED] > 100
    machine.slower[Route.DIRECT] = 1.0
    machine.transfers(2000)
    assert machine.transfers(100)[0][Route.DIRECT] >= 95


def test_a_route_that_was_never_tried_is_though_the_other_one_was_always_slow():
    machine = Machine()
    machine.slower[Route.DIRECT] = 8.0
    machine.transfers(200)
    assert machine.transfers(100)[0][Route.STAGED] >= 95


@pytest.mark.parametrize("slower", [1.0, 2.0, 16.0])
def test_trying_what_is_slower_takes_a_small_part_of_the_time(slower):
    machine = Machine()
    machine.slower[Route.STAGED] = slower
    machine.transfers(3000)  # by then it is known how slow it is
    taken, spent = machine.transfers(5000)
    assert taken[Route.STAGED] > 0
    assert taken[Route.STAGED] * machine.seconds(Route.STAGED) <= spent / 25


def test_many_that_are_planned_together_do_not_all_try_the_slower_route():
    machine = Machine()
    machine.transfers(40)
    found = []
    while Route.STAGED not in found:
        machine.transfers(1)
        found = []
        for _ in range(8):
            found.append(choice(machine.estimates, machine.pieces).route)
            machine.estimates.note_choice(A, found[-1])
    assert found.count(Route.STAGED) == 1


def test_a_route_that_no_passing_trouble_makes_slower_is_not_tried():
    tried = {}
    for pieces in (50_000, 100_000):
        machine = Machine(pieces=pieces)
        times = machine.plain(Route.DIRECT) / machine.plain(Route.STAGED)
        tried[times > 4] = machine.transfers(2000)[0][Route.DIRECT] > 0
    assert tried == {False: True, True: False}


def test_who_is_gone_and_comes_back_has_tried_nothing():
    machine = Machine()
    machine.transfers(500)
    machine.estimates.forget(A)
    assert not machine.estimates.overdue(A, Route.STAGED, 1e-9, Route.DIRECT, 1e-9)
    kept = {name: books for name, books in vars(machine.estimates).items() if isinstance(books, dict) and books}
    assert kept == {}, "of who is gone nothing is kept"
