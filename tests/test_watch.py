"""A loop that stands still is counted and reported, once for each incident."""

import asyncio
import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inside import watched

from kvxfer.config import Config
from kvxfer.errors import Code
from kvxfer.geometry import CacheTensor
from kvxfer.protocol.messages import Status
from kvxfer.telemetry import Metrics
from kvxfer.testing import LoopbackNetwork, LoopbackTransport
from kvxfer.worker import LoopWatch, TransportWatch, Worker

PERIOD = 0.25


class FakeTimer:
    def __init__(self, when, callback, *, cancelled=False):
        self.when, self.callback, self.cancelled = when, callback, cancelled

    def cancel(self):
        self.cancelled = True


class FakeLoop:
    """A clock that is set by hand, and at most one timer."""

    def __init__(self):
        self.time = 100.0
        self.timers = []

    def now(self):
        return self.time

    def at(self, when, callback):
        assert self.timers == []
        self.timers.append(FakeTimer(when, callback))
        return self.timers[0]

    def beat(self, late=0.0):
        """Run the timer so many seconds after it was due."""
        timer = self.timers.pop()
        assert not timer.cancelled
        self.time = timer.when + late
        timer.callback()


@pytest.fixture
def loop():
    return FakeLoop()


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
def looks():
    """When somebody looked."""
    return []


@pytest.fixture
def watch(loop, metrics, looks):
    return LoopWatch(loop.now, loop.at, metrics, lambda: looks.append(loop.time), own=False)


def warnings(caplog):
    return [record.kvxfer for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.usefixtures("watch")
def test_beats_are_a_period_apart_and_never_pile_up(loop):
    for late in (0.0, 3.0, 0.0):
        loop.beat(late)
        assert loop.timers[0].when == loop.time + PERIOD


@pytest.mark.usefixtures("watch")
def test_one_incident_is_logged_once(loop, metrics, caplog):
    for late in (1.5, 2.5, 0.6, 1.5):  # never in time in between: it is one incident
        loop.beat(late)
    assert metrics.snapshot()["loop_blocked"] == 4
    assert metrics.snapshot()["loop_lag_max_seconds"] == pytest.approx(2.5)
    (said,) = warnings(caplog)
    assert said["event"] == "loop_blocked"
    assert said["lag"] == pytest.approx(1.5)
    assert "loop='own'" in said["reason"]


@pytest.mark.usefixtures("watch")
def test_the_next_incident_is_logged_again(loop, caplog):
    for late in (1.5, 0.0, 1.5):
        loop.beat(late)
    assert len(warnings(caplog)) == 2


@pytest.mark.usefixtures("watch")
def test_others_look_after_each_beat_that_comes_in_time(loop, looks):
    """What looks late right after a process was stopped may be as well as the loop in a moment."""
    in_time = []
    for late in (0.0, 1.5, 0.3, 0.2):
        loop.beat(late)
        in_time += [loop.time] if late < PERIOD else []
    assert looks == in_time
    assert len(looks) == 2


def test_it_goes_on_though_a_look_fails(loop, metrics):
    looks = iter([ValueError("a defect"), None])

    def look():
        if error := next(looks):
            raise error

    LoopWatch(loop.now, loop.at, metrics, look, own=False)
    with pytest.raises(ValueError, match="a defect"):
        loop.beat()
    loop.beat()
    assert next(looks, "none left") == "none left"


class Role:
    """Hears what the watch over the transport says."""

    def __init__(self):
        self.said = []

    def stop_posted(self, failure):
        self.said.append(failure)


@pytest.mark.parametrize("limit", [5.0, 0.3])
def test_who_waits_for_posts_is_told_as_long_as_the_transport_stands_still(caplog, limit):
    """Who asks for less than 5 s is not told that a thread stands still which was only not given a processor."""
    late = [0.0]
    roles: Any = (Role(), Role())
    fabric = SimpleNamespace(health=lambda: (late[0], ""))
    site: Any = SimpleNamespace(fabric=fabric, config=Config(no_progress_timeout=limit))
    watch = TransportWatch(site, roles)
    for late[0] in (0.0, 4.9, 5.0, 5.3, 0.0, 6.0):
        watch.look()
    for role in roles:
        assert [(failure.status, failure.code) for failure in role.said] == [(Status.FAILED, Code.FABRIC)] * 3
        assert "has not returned for 5.3 s" in role.said[1].reason
    said = [record.kvxfer for record in caplog.records if record.levelno == logging.ERROR]
    assert [(line["event"], line["lag"]) for line in said] == [("transport_stalled", 5.0), ("transport_stalled", 6.0)]


async def test_a_worker_watches_the_loop_that_it_runs_on(caplog):
    tensor = CacheTensor(torch.zeros(2, 8, 16, 2, 8), "kv block token head dim", layers=[0], heads=range(2))
    config = Config(arena_bytes="1MiB", chunk_bytes="64KiB")
    async with Worker([tensor], config, transport=LoopbackTransport("a", LoopbackNetwork())) as worker:
        time.sleep(1.5)  # noqa: ASYNC251 - what a model step on the server's loop does
        for _ in range(3):
            await asyncio.sleep(0)  # the beat is due; it needs a turn of the loop
        assert worker.describe()["metrics"]["loop_blocked"] == 1
    (said,) = warnings(caplog)
    assert said["event"] == "loop_blocked"
    assert "loop='own'" in said["reason"]
    assert not watched(worker)
