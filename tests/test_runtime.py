"""Services in threads, which can always be stopped, and work that is lent one."""
# private state of services and loops that are there
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import asyncio
import os
import sys
import threading

import anyio.to_thread
import pytest

from kvxfer import runtime as module
from kvxfer.runtime import ThreadRuntime

LONG = 20.0  # seconds until a test gives up waiting for what takes microseconds


# --- services


class Probe:
    """A step that tells when it ran, and asks for what it is told to."""

    def __init__(self, *delays):
        self.delays = list(delays)
        self.steps = 0
        self.ran = threading.Semaphore(0)
        self.thread = None

    def __call__(self):
        self.thread = threading.current_thread()
        self.steps += 1
        delay = self.delays.pop(0) if self.delays else None
        self.ran.release()
        return delay

    def wait(self, times=1):
        for _ in range(times):
            assert self.ran.acquire(timeout=LONG)


def test_a_service_runs_at_once_then_when_woken():
    probe = Probe()
    service = ThreadRuntime().start("kvxfer-probe", probe)
    probe.wait()
    assert probe.thread.name == "kvxfer-probe"
    assert probe.thread.daemon
    service.wake()
    probe.wait()
    assert probe.steps == 2
    assert service.stop(LONG)
    assert not probe.thread.is_alive()


def test_wake_ups_before_a_step_are_merged():
    entered, leave = threading.Semaphore(0), threading.Semaphore(0)
    steps = []

    def step():
        steps.append(None)
        entered.release()
        assert leave.acquire(timeout=LONG)

    service = ThreadRuntime().start("kvxfer-probe", step)
    assert entered.acquire(timeout=LONG)
    for _ in range(10):
        service.wake()
    leave.release()
    assert entered.acquire(timeout=LONG)  # woken during the first step, so there is a second, and no third
    leave.release(10)
    assert service.stop(LONG)
    assert len(steps) in (2, 3)  # `stop` may come before or after the look at the flag


@pytest.mark.parametrize("where", ["setup", "step"])
def test_what_raises_is_reported_and_ends_the_service(monkeypatch, where):
    reported, told = [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda report: reported.append(report) or told.set())

    def broken():
        raise ValueError("broken")

    steps = []
    service = ThreadRuntime().start(
        "kvxfer-probe",
        broken if where == "step" else lambda: steps.append(None),
        setup=broken if where == "setup" else None,
    )
    assert told.wait(LONG)
    assert service.stop(LONG)
    (report,) = reported
    assert (report.exc_type, report.thread.name) == (ValueError, "kvxfer-probe")
    service.wake()
    assert service.stop(0.0)
    assert steps == []


def test_stop_is_bounded_and_says_whether_it_ended():
    entered, leave = threading.Event(), threading.Event()

    def step():
        entered.set()
        assert leave.wait(LONG)

    service = ThreadRuntime().start("kvxfer-probe", step)
    assert entered.wait(LONG)
    assert not service.stop(0.001)
    leave.set()
    assert service.stop(LONG)
    assert service.stop(LONG)


def test_stop_from_within_does_not_wait_for_itself():
    answers, done = [], threading.Event()
    services = []

    def step():
        if not services:
            return 0.0
        answers.append(services[0].stop(LONG))
        done.set()
        return None

    services.append(ThreadRuntime().start("kvxfer-probe", step))
    assert done.wait(LONG)
    assert services[0].stop(LONG)
    assert answers == [False]


def test_a_stop_just_before_the_flag_is_cleared_is_not_lost(monkeypatch):
    """The thread is stopped between its look around and `clear`, which swallows the only wake-up that there is."""
    started, services = threading.Event(), []

    class Racing(module._Signal):
        def clear(self):
            assert started.wait(LONG)
            services[0]._stopping = True  # what `stop` does, here and now
            self.set()
            super().clear()

    monkeypatch.setattr(module, "_Signal", Racing)
    services.append(ThreadRuntime().start("kvxfer-probe", Probe()))
    monkeypatch.undo()
    started.set()
    services[0]._thread.join(LONG / 4)
    assert not services[0]._thread.is_alive()


# --- CPUs


@pytest.fixture
def one_cpu():
    """One of the CPUs that this process may use, where it may use more."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("this process may use one CPU only")
    return frozenset({max(allowed)})


def test_services_run_where_they_are_placed(one_cpu):
    before = os.sched_getaffinity(0)
    found = []
    probe = Probe()
    service = (
        ThreadRuntime()
        .placed(one_cpu)
        .start(
            "kvxfer-probe",
            lambda: found.append(("step", os.sched_getaffinity(0))) or probe(),
            setup=lambda: found.append(("setup", os.sched_getaffinity(0))),
        )
    )
    probe.wait()
    assert service.stop(LONG)
    assert found == [("setup", one_cpu), ("step", one_cpu)]
    assert os.sched_getaffinity(0) == before


async def test_a_worker_thread_is_lent_and_goes_back_as_it_was(one_cpu):
    """It belongs to whoever uses anyio in this process."""
    before = os.sched_getaffinity(0)

    def fails():
        raise ValueError(os.sched_getaffinity(0))

    placed = ThreadRuntime().placed(one_cpu)
    assert await placed.in_thread(lambda: os.sched_getaffinity(0)) == one_cpu
    with pytest.raises(ValueError, match=str(max(one_cpu))):
        await placed.in_thread(fails)
    threads = [await ThreadRuntime().in_thread(lambda: (os.sched_getaffinity(0), threading.get_ident()))]
    threads.append(await placed.in_thread(lambda: (os.sched_getaffinity(0), threading.get_ident())))
    assert [cpus for cpus, _ in threads] == [before, one_cpu]
    assert threads[0][1] == threads[1][1], "it was the same thread"


def test_a_place_that_is_gone_since_is_no_reason_to_fail(monkeypatch, one_cpu):
    def gone(cpus):
        raise OSError("offline")

    monkeypatch.setattr(module, "bind", gone)
    probe = Probe()
    service = ThreadRuntime(one_cpu).start("kvxfer-probe", probe)
    probe.wait()
    assert service.stop(LONG)


# --- the rest


async def test_a_thread_is_there_though_the_application_has_taken_all_of_its_own():
    """All of which may be waiting for what is to be done."""
    limiter, release, runtime = anyio.to_thread.current_default_thread_limiter(), threading.Event(), ThreadRuntime()
    theirs = [asyncio.ensure_future(anyio.to_thread.run_sync(release.wait)) for _ in range(int(limiter.total_tokens))]
    try:
        while limiter.available_tokens:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert await asyncio.wait_for(runtime.in_thread(lambda: 7), LONG) == 7
    finally:
        release.set()
        await asyncio.gather(*theirs)


async def test_a_runtime_takes_no_more_threads_than_that(monkeypatch):
    monkeypatch.setattr(module, "_MOST_LENT", 2)
    release, runtime = threading.Event(), ThreadRuntime()
    works = [asyncio.ensure_future(runtime.in_thread(release.wait)) for _ in range(5)]
    for _ in range(100):  # each has asked for one by then
        await asyncio.sleep(0)
    seen = runtime._limiter.statistics()
    release.set()
    await asyncio.gather(*works)
    assert (seen.borrowed_tokens, seen.tasks_waiting) == (2, 3)


def test_a_runtime_lends_threads_in_one_loop_after_the_other():
    runtime = ThreadRuntime()
    assert [asyncio.run(runtime.in_thread(lambda: 7)) for _ in range(2)] == [7, 7]


def test_services_give_way():
    if not sys.platform.startswith("linux"):
        pytest.skip("threads have no priority of their own here")
    found = threading.Event()
    niceness = []

    def step():
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        found.set()

    before = os.getpriority(os.PRIO_PROCESS, 0)
    service = ThreadRuntime().start("kvxfer-test", step)
    service.wake()
    assert found.wait(LONG)
    assert service.stop(LONG)
    assert niceness[0] == min(19, before + 5) or before >= 5
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
