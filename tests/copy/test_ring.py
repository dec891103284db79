"""The books of a ring: slots never overlap, and what was given back is used again."""

from hypothesis import given
from hypothesis import strategies as st

from kvxfer.copy.ring import Ring


@given(
    capacity=st.integers(1, 40),
    steps=st.lists(st.one_of(st.integers(1, 45), st.just(0)), max_size=80),  # take so many units, or give one back
)
def test_slots_lie_inside_and_never_overlap(capacity, steps):
    ring, taken = Ring(capacity), []
    for size in steps:
        if size == 0:
            if taken:
                ring.give_back()
                taken.pop(0)
            continue
        start = ring.take(size)
        if start is None:
            assert size > capacity or taken, "an empty ring has room for everything up to its capacity"
            continue
        assert start >= 0
        assert start + size <= capacity
        assert all(start + size <= at or at + n <= start for at, n in taken)
        taken.append((start, size))
        assert len(ring) == len(taken)


def test_a_ring_wraps_and_fills_to_the_last_unit():
    ring = Ring(10)
    assert [ring.take(4), ring.take(4), ring.take(4)] == [0, 4, None]
    ring.give_back()
    assert ring.take(4) == 0
    assert ring.take(1) is None
    ring.give_back()
    assert [ring.take(4), ring.take(1)] == [4, 8]
    assert ring.take(1) == 9
    assert ring.take(1) is None
