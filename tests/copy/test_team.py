"""Threads that copy side by side: everything is done once, and nothing goes on after it was said to be over."""

import os
import threading
import weakref

import pytest

from kvxfer.copy.team import ALONE, Team, usual_threads

MIB = 1 << 20


@pytest.fixture
def team():
    team = Team(3)
    yield team
    team.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvxfer-copy")]


class Meeting:
    """Work that goes on only when so many do it at the same time."""

    def __init__(self, parties):
        self.barrier = threading.Barrier(parties)
        self.done = []

    def __call__(self, steps):
        self.barrier.wait(10)
        self.done.append(list(steps))


@pytest.mark.parametrize(
    ("steps", "nbytes", "copies", "parts"),
    [
        (10, 64 * MIB, 10, 3),
        (2, 64 * MIB, 2, 2),
        (1, 64 * MIB, 64, 1),  # one step cannot be shared
        (64, 2 * MIB, 64, 2),  # 32 KiB each are enough for two
        (64, 2 * MIB, 128, 1),  # and 16 KiB are not
        (64, 2 * MIB - 1, 2, 1),  # no thread is woken for less than a MiB
        (0, 0, 0, 1),
    ],
)
def test_steps_are_shared_as_far_as_that_pays(team, steps, nbytes, copies, parts):
    work = Meeting(parts)
    team.share(work, range(steps), nbytes, copies)
    assert len(work.done) == parts
    assert sorted(step for part in work.done for step in part) == list(range(steps))


def test_alone_it_is_the_callers_thread():
    seen = []
    ALONE.share(lambda steps: seen.append((threading.current_thread(), list(steps))), [1, 2], 64 * MIB, 2)
    assert seen == [(threading.current_thread(), [1, 2])]
    ALONE.close()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_who_fails_is_heard_of_when_the_others_have_ended(team, failing):
    started, ended = threading.Barrier(3), []

    def work(steps):
        started.wait(10)
        if failing in steps:
            raise ValueError(steps)
        ended.append(list(steps))

    with pytest.raises(ValueError, match=str(failing)):
        team.share(work, [0, 1, 2], 64 * MIB, 3)
    assert sorted(ended) == [[step] for step in range(3) if step != failing]
    work_again = Meeting(3)
    team.share(work_again, [0, 1, 2], 64 * MIB, 3)
    assert len(work_again.done) == 3


def test_it_is_done_and_waited_for_where_no_more_threads_can_be_started(team, monkeypatch):
    started, begun, done = threading.Thread.start, [], []

    def one_only(thread):
        if begun:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", one_only)
    team.share(done.extend, range(6), 64 * MIB, 6)
    assert sorted(done) == list(range(6))


@pytest.mark.parametrize("threads", [0, 1, 2], ids="{} others".format)
def test_nothing_of_a_copy_is_kept(team, monkeypatch, threads):
    """Also where no thread can be started: what is meant for one must not pile up."""
    start, alive = threading.Thread.start, []

    def few_only(thread):
        if len(alive) == threads:
            raise RuntimeError("can't start new thread")
        alive.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", few_only)
    copies = [lambda steps, size=size: size for size in range(3)]
    kept = [weakref.ref(copy) for copy in copies]
    while copies:
        team.share(copies.pop(), range(6), 64 * MIB, 6)
    for _ in range(1000):
        if not any(one() for one in kept):
            break
        threading.Event().wait(0.01)  # an other lets go of it a moment after it has said that its part has ended
    assert [one() for one in kept] == [None] * 3


def test_who_came_is_waited_for_whatever_goes_wrong_when_the_next_is_called(team, monkeypatch):
    came, go, done = threading.Event(), threading.Event(), []

    def work(steps):
        if threading.current_thread().name.startswith("kvxfer-copy"):
            came.set()
            go.wait(10)
        done.append(list(steps))

    put = team._calls.put

    def put_one(call):
        if came.is_set():
            threading.Timer(0.05, go.set).start()
            raise MemoryError
        put(call)
        came.wait(10)

    monkeypatch.setattr(team, "_calls", type("Calls", (), {"put": staticmethod(put_one), "get": team._calls.get})())
    with pytest.raises(MemoryError):
        team.share(work, range(6), 64 * MIB, 6)
    assert sorted(step for part in done for step in part) == list(range(6))
    monkeypatch.undo()


def test_the_others_give_way_to_the_loop_and_stay_where_they_are_put():
    cpu, seen, met = min(os.sched_getaffinity(0)), {}, threading.Barrier(2)

    def work(_):
        met.wait(10)
        seen[threading.current_thread().name] = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)

    before = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
    team = Team(2, frozenset({cpu}))
    team.share(work, [1, 2], 64 * MIB, 2)
    team.close()
    assert seen.pop(threading.current_thread().name) == before
    ((cpus, niceness),) = seen.values()
    assert cpus == {cpu}
    assert niceness > before[1] or niceness == 19


@pytest.mark.parametrize(("cpus", "threads"), [(0, 1), (2, 1), (7, 1), (8, 2), (16, 4), (200, 8)])
def test_most_cpus_are_left_to_the_model(monkeypatch, cpus, threads):
    monkeypatch.setattr("kvxfer.copy.team.allowed_cpus", lambda: frozenset(range(cpus)))
    assert usual_threads() == threads
