"""Owners of copies take turns, by bytes."""

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kvxfer.copy.port import CopyJob
from kvxfer.copy.turns import Turns
from kvxfer.geometry.copyplan import CopyPlan


def job(owner, nbytes):
    return CopyJob(CopyPlan(()), lambda _: None, nbytes=nbytes, owner=str(owner))


def served(turns, ready=lambda _: True) -> CopyJob:
    one = turns.pop(ready)
    assert one is not None
    return one


def popped(turns, ready=lambda _: True):
    found = []
    while (one := turns.pop(ready)) is not None:
        found.append(one)
    return found


def test_a_small_one_waits_for_one_large_one_only():
    turns = Turns()
    large = [job("large", 1 << 28) for _ in range(8)]
    for one in large:
        turns.add(one)
    assert turns.pop(lambda _: True) is large[0]
    small = job("small", 1 << 16)
    turns.add(small)
    assert turns.pop(lambda _: True) is small
    assert popped(turns) == large[1:]
    assert len(turns) == 0


def test_who_waits_for_an_event_holds_up_nobody():
    turns = Turns()
    late, next_one, other = job("a", 8), job("a", 8), job("b", 8)
    for one in (late, next_one, other):
        turns.add(one)
    assert popped(turns, lambda one: one is not late) == [next_one, other]
    assert len(turns) == 1
    assert popped(turns) == [late]


def test_who_waited_for_an_event_has_gained_nothing_by_it():
    turns, fired = Turns(), False
    late = [job("late", 100) for _ in range(20)]
    for one in late:
        turns.add(one)
    for number in range(20):
        turns.add(job(number, 100))
        assert turns.pop(lambda one: fired or one.owner != "late") not in late
    fired = True
    assert served(turns) is late[0]
    small = job("small", 1)
    turns.add(small)
    assert small in [served(turns), served(turns)]


def test_who_comes_back_has_gained_nothing_by_being_away():
    turns = Turns()
    for _ in range(6):
        turns.add(job("steady", 100))
    found = []
    for _ in range(6):  # comes with one job at a time, as soon as the last one is gone
        turns.add(job("again", 100))
        for _ in range(2):
            found.append(str(served(turns).owner))
    assert Counter(found) == {"steady": 6, "again": 6}
    assert max(len(list(run)) for run in "".join(one[0] for one in found).replace("sa", "|").split("|")) <= 1


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 1000)), min_size=1, max_size=60), st.integers())
def test_no_owner_is_ahead_of_another_by_more_than_one_job_of_each(jobs, seed):
    """All wait from the start: then two owners that still wait never differ by more than their largest jobs."""
    turns, rng = Turns(), Random(seed)
    left = Counter()
    for owner, nbytes in jobs:
        turns.add(job(owner, nbytes))
        left[owner] += 1
    largest = max(nbytes for _, nbytes in jobs)
    got = Counter()
    order = {owner: [nbytes for one, nbytes in jobs if one == owner] for owner in left}
    while (one := turns.pop(lambda _: rng.random() < 2)) is not None:
        owner = int(str(one.owner))
        assert one.nbytes == order[owner].pop(0)  # those of one owner keep their order
        got[owner] += one.nbytes
        left[owner] -= 1
        waiting = [name for name in left if left[name]]
        for a in waiting:
            for b in waiting:
                assert abs(got[a] - got[b]) <= 2 * largest
    assert not +left


def test_owners_who_come_ever_anew_do_not_keep_an_old_one_waiting():
    turns = Turns()
    for _ in range(4):
        turns.add(job("old", 1000))
    found = []
    for number in range(40):
        turns.add(job(number, 100))
        found.append(served(turns).owner)
    assert found.count("old") >= 2


def test_owners_of_long_ago_are_forgotten():
    turns = Turns()
    never = job("never", 8)
    turns.add(never)
    for number in range(5000):
        turns.add(job(number, 8))
        turns.pop(lambda one: one is not never)
    assert len(turns._tags) <= 1100
