"""Whole workers over the loopback fabric in virtual time: nothing is written that was given back, and nothing stuck."""

import pytest
from counts import BATCH, SEED, SIMULATIONS, batches
from schedule import play


@pytest.mark.parametrize("numbers", batches(SIMULATIONS, BATCH), ids=lambda numbers: f"{numbers.start}")
def test_schedules(numbers, tmp_path):
    trail = []
    for number in numbers:
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
