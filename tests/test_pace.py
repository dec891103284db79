"""When to look again: over any times, any durations and any bounds."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.pace import Least, Pace

US = 1e-6
SPINS = Pace(before=60 * US, after=1e-3, shortest=50 * US, longest=2e-3, back_off=1 / 8)
SLEEPS = Pace(60 * US, 60 * US, 50 * US, 1e-3, 1 / 4, worthwhile=50 * US, spun=400 * US)
BLIND = Pace(0.0, 200 * US, 50 * US, 1e-3, 1 / 4)
PACES = st.sampled_from([SPINS, SLEEPS, BLIND])
TIMES = st.floats(0.0, 0.1)
SIZES = st.integers(1, 1 << 40)
TICK = 5 * US
"""What a look costs, so that spinning comes to an end."""


def looks(pace: Pace, takes: float, ends: float) -> list[float]:
    """When it is looked at, from 0 on, until it is seen to have ended."""
    times = [0.0]
    while times[-1] < ends:
        times.append(times[-1] + TICK + pace.delay(times[-1], takes, takes))
    return times


@given(PACES, TIMES, TIMES, TIMES)
def test_a_sleep_has_bounds_and_ends_before_it_is_due(pace, now, due, takes):
    delay = pace.delay(now, due, takes)
    assert 0.0 <= delay <= pace.longest
    early = due - pace.before - takes / 16
    if now < early:
        assert now + delay <= early + 1e-12
    if now > due + pace.after:
        assert pace.shortest <= delay <= max(pace.shortest, (now - due) * pace.back_off)


@given(PACES, TIMES, TIMES)
def test_no_end_is_seen_later_than_by_the_longest_sleep(pace, takes, ends):
    assert looks(pace, takes, ends)[-1] <= ends + pace.longest + 2 * TICK


@given(PACES, st.floats(0.0, 20e-3), st.floats(-1.0, 1.0))
def test_the_end_of_what_was_foreseen_is_seen_closely(pace, takes, off):
    ends = max(0.0, takes + off * (pace.after if off > 0 else pace.before + takes / 16))
    late = looks(pace, takes, ends)[-1] - ends
    assert late <= (0.0 if takes <= pace.spun else max(takes / 32, pace.shortest)) + 2 * TICK


@given(PACES, st.floats(1e-3, 20e-3), st.floats(1.0, 50.0))
def test_a_late_end_is_seen_in_proportion_to_the_wait(pace, takes, factor):
    ends = takes * factor
    late = looks(pace, takes, ends)[-1] - ends
    assert late <= max(takes / 32, pace.shortest, (ends - takes) * pace.back_off) + 2 * TICK


@given(st.floats(0.1e-3, 20e-3))
def test_what_is_foreseen_is_looked_at_a_few_times(takes):
    close = 60 * US + takes / 16
    spun = (close + SLEEPS.worthwhile) / TICK if takes <= SLEEPS.spun else close / max(takes / 32, SLEEPS.shortest)
    assert len(looks(SLEEPS, takes, takes)) <= 3 + takes / SLEEPS.longest + spun


@given(TIMES, TIMES, TIMES)
def test_as_it_is_set_for_copies_on_a_gpu(now, due, takes):
    """Asleep until shortly before, spinning for a millisecond, backing off: as a formula."""
    early = 60 * US + takes / 16
    expected = 0.0
    if now < due - early:
        expected = min(due - early - now, 2e-3)
    elif now >= due + 1e-3:
        expected = min(max((now - due) / 8, 50 * US), 2e-3)
    assert SPINS.delay(now, due, takes) == pytest.approx(expected, abs=1e-12)


def test_short_sleeps_are_spun_through_where_they_are_not_worth_it():
    assert SLEEPS.delay(0.0, 100 * US, 100 * US) == 0.0
    assert SLEEPS.delay(0.0, 175 * US, 175 * US) == pytest.approx(104 * US, rel=0.01)
    assert SPINS.delay(0.0, 100 * US, 100 * US) > 0.0


# ---- durations of which bounds are known -----------------------------------------------------------------------------


def bounds(took):
    """Bounds around a duration."""
    return st.tuples(st.floats(0.0, took), st.floats(took, 2 * took + 1.0))


@given(st.lists(st.tuples(SIZES, TIMES, TIMES), max_size=40), SIZES)
def test_an_estimate_is_within_what_the_last_eight_allow(durations, nbytes):
    least, last = Least(), deque(maxlen=8)
    for size, one, other in durations:
        low, high = sorted((one, other))
        least.learn(size, low, high)
        last.append((low / size, high / size))
    takes = least.takes(nbytes)
    assert takes >= 0.0
    if len(last) < 4:
        assert takes == 0.0
    else:
        lows, highs = zip(*last, strict=True)
        assert takes == pytest.approx(nbytes * min(max(lows), *highs))


@given(st.floats(1e-6, 0.1).flatmap(lambda took: st.tuples(st.just(took), st.lists(bounds(took), min_size=8))))
def test_what_takes_one_time_is_never_expected_later_and_as_close_as_it_was_seen(case):
    took, durations = case
    least = Least()
    for low, high in durations:
        least.learn(1 << 20, low, high)
    closest = max(low for low, _ in durations[-8:])
    assert closest * (1 - 1e-9) - 1e-15 <= least.takes(1 << 20) <= took * (1 + 1e-9)


@given(st.integers(0, 30), st.floats(0.0, 1e3), st.floats(1e-6, 0.1))
def test_one_that_is_far_off_does_not_delay_and_is_forgotten(position, outlier, took):
    least = Least()
    for index in range(40):
        value = outlier if index == position else took
        least.learn(1 << 20, value, value)
        assert least.takes(1 << 20) <= took * (1 + 1e-9)
    assert least.takes(1 << 20) == pytest.approx(took)


@given(st.floats(1e-6, 0.1), st.floats(0.01, 100.0))
def test_another_speed_is_known_after_eight(took, factor):
    least = Least()
    for duration in (took, took * factor):
        for _ in range(8):
            least.learn(3 << 20, duration, duration)
    assert least.takes(6 << 20) == pytest.approx(2 * took * factor)


def test_where_sleeping_prolongs_things_the_estimate_does_not_follow():
    """A library that moves bytes only when it is called: what is slept through takes twice as long."""
    least, honest = Least(), 1e-3
    for _ in range(1000):
        probe = least.probes()
        took = honest + (0.0 if probe else least.takes(1 << 20))
        least.learn(1 << 20, took, took)
    assert least.takes(1 << 20) <= honest * (1 + 1e-9)


def test_one_in_eight_is_a_probe():
    least = Least()
    assert [least.probes() for _ in range(24)] == ([False] * 7 + [True]) * 3
