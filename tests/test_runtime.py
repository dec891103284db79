"""Machines in threads, work that is lent one, and where things live."""
# private state of loops that are there
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import asyncio
import contextlib
import gc
import os
import sys
import threading
import weakref
from types import SimpleNamespace

import anyio.to_thread
import numpy as np
import pytest
import torch

from kvxfer import runtime as module
from kvxfer.blocking import LoopThread
from kvxfer.errors import ClosedError, FabricError
from kvxfer.runtime import Home, ThreadRuntime

LONG = 20.0  # seconds until a test gives up waiting for what takes microseconds


# --- machines


@pytest.fixture
def driven():
    """Runs a function as a machine that may give way, and waits for its end."""

    def drive(runtime, run, *, gives_way=True):
        stop, wake = runtime.drive("kvxfer-probe", SimpleNamespace(run=run), gives_way=gives_way)
        assert wake is None, "it hears of its work by itself"
        assert stop(LONG)
        assert stop(0.0)

    return drive


def test_what_raises_is_reported_and_ends_the_machine(monkeypatch, driven):
    reported = []
    monkeypatch.setattr(threading, "excepthook", reported.append)

    def broken():
        assert threading.current_thread().daemon
        raise ValueError("broken")

    driven(ThreadRuntime(), broken)
    (report,) = reported
    assert (report.exc_type, report.thread.name) == (ValueError, "kvxfer-probe")


def test_stop_is_bounded_and_says_whether_it_ended():
    leave = threading.Event()
    stop, _ = ThreadRuntime().drive("kvxfer-probe", SimpleNamespace(run=leave.wait))
    assert not stop(0.001)
    leave.set()
    assert stop(LONG)


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("kvxfer-probe", lambda: ThreadRuntime().drive("kvxfer-probe", SimpleNamespace(run=lambda: None))),
        ("kvxfer-loop", LoopThread),
    ],
)
def test_where_no_thread_can_be_started_that_is_said(monkeypatch, name, start):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(FabricError, match=f"no thread {name}: can't start new thread"):
        start()


# --- numbers


@pytest.fixture
def flushed():
    """This thread takes subnormal numbers for zero, and so do those that it starts."""
    assert torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


def keeps_subnormals():
    return bool((np.float32([1e-40]) * np.float32(1)).any())


def test_machines_keep_subnormal_numbers(driven, flushed):
    found = []
    driven(ThreadRuntime(), lambda: found.append(keeps_subnormals()))
    assert (found, keeps_subnormals()) == ([True], False)


async def test_worker_threads_keep_them_and_go_back_as_they_were(flushed):
    assert await ThreadRuntime().in_thread(keeps_subnormals) is True
    assert await anyio.to_thread.run_sync(keeps_subnormals) is False


# --- CPUs


@pytest.fixture
def one_cpu():
    """One of the CPUs that this process may use, where it may use more."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("this process may use one CPU only")
    return frozenset({max(allowed)})


def test_machines_run_where_they_are_placed(driven, one_cpu):
    before = os.sched_getaffinity(0)
    found = []
    driven(ThreadRuntime().placed(one_cpu), lambda: found.append(os.sched_getaffinity(0)))
    assert found == [one_cpu]
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


def test_a_place_that_is_gone_since_is_no_reason_to_fail(monkeypatch, driven, one_cpu):
    def gone(cpus):
        raise OSError("offline")

    monkeypatch.setattr(module, "bind", gone)
    ran = []
    driven(ThreadRuntime(one_cpu), lambda: ran.append(True))
    assert ran


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


@pytest.mark.parametrize("gives_way", [True, False])
def test_machines_give_way_if_they_are_to(driven, gives_way):
    if not sys.platform.startswith("linux"):
        pytest.skip("threads have no priority of their own here")
    before, niceness = os.getpriority(os.PRIO_PROCESS, 0), []

    def note():
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    def begin():
        """Behind others already, as a process may be: they are not to come before it."""
        os.nice(7)
        note()
        driven(ThreadRuntime(), note, gives_way=gives_way)

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert niceness[1:] == [min(19, niceness[0] + 5 * gives_way)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_what_lives_on_a_loop_that_was_closed_says_so_to_everybody():
    loop = asyncio.new_event_loop()
    home = Home(loop)
    assert home.own("it") == "it"
    loop.close()

    async def on_another() -> None:
        home.own("it")

    for ask in (lambda: home.own("it"), lambda: asyncio.run(on_another())):
        with pytest.raises(ClosedError, match="its event loop is closed"):
            ask()


async def test_what_fails_in_a_thread_keeps_nothing_of_who_waited_for_it():
    class Held:
        """Tensors, say."""

    def fail():
        raise FabricError("no")

    async def wait(held):
        with contextlib.suppress(FabricError):
            await ThreadRuntime().in_thread(fail)
        return weakref.ref(held)

    gc.disable()
    try:
        kept = await wait(Held())
        await asyncio.sleep(0.1)  # the thread has it until then
        assert kept() is None
    finally:
        gc.enable()
