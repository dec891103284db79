"""Whole workers over the loopback fabric in virtual time: nothing is written that was given back, and nothing stuck.

make simulate                   # forty times as many schedules as `make test` plays
make simulate SEED=1234         # that one, with everything that was done in it
"""

import os

import pytest
from schedule import play

SEED = os.environ.get("SIMULATE_SEED")
SIMULATIONS = 400 * int(os.environ.get("SIMULATE_TIMES", "1"))
BATCH = 100
"""Simulations in one test: a batch takes some seconds."""
FIRST = range(0, SIMULATIONS, BATCH) if SEED is None else [int(SEED)]


@pytest.mark.parametrize("first", FIRST)
def test_schedules(first, tmp_path):
    trail = []
    for number in range(first, first + (BATCH if SEED is None else 1)):
        play(number, tmp_path, trail=trail)
    if SEED is not None:
        print(*trail, sep="\n")


def test_a_number_replays_its_schedule(tmp_path):
    """Also in a world of other addresses: what went before has moved them."""
    first, second = [], []
    numbers = range(40, 48)
    for number in numbers:
        play(number, tmp_path, trail=first)
    for number in reversed(numbers):
        again = []
        play(number, tmp_path, trail=again)
        second = again + second
    assert first == second
    assert len({line.split(" ", 1)[1] for line in first}) > len(numbers)
