"""A loop that stands still is counted and reported, once for each incident, and so is a transport."""

import asyncio
import logging
import time
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
from kvxfer.worker import Watch, Worker

PERIOD = 0.25


class Role:
    """Hears what is said to those who wait for posts."""

    def __init__(self):
        self.said = []

    @property
    def posted(self):
        return [self.said.append]


class FakeSite:
    """A clock that is set by hand, at most one timer, and a transport that is looked at."""

    def __init__(self, limit=30.0):
        self.time = 100.0
        self.timers = []
        self.looks = []  # when somebody looked at the transport
        self.stalled = lambda: 0.0  # for how long it has been in a call
        self.metrics, self.fabric, self.config = Metrics(), self, Config(no_progress_timeout=limit)
        self.roles: Any = (Role(), Role())
        site: Any = self
        self.watch = Watch(site, self.roles, own_loop=False)

    def now(self):
        return self.time

    def health(self):
        self.looks.append(self.time)
        return self.stalled(), ""

    def call_at(self, when, callback):
        assert self.timers == []
        self.timers.append((when, callback))

    def beat(self, late=0.0):
        """Run the timer so many seconds after it was due."""
        when, callback = self.timers.pop()
        self.time = when + late
        callback()


@pytest.fixture
def site():
    return FakeSite()


def warnings(caplog):
    return [record.kvxfer for record in caplog.records if record.levelno == logging.WARNING]


def test_beats_are_a_period_apart_and_never_pile_up(site):
    for late in (0.0, 3.0, 0.0):
        site.beat(late)
        assert site.timers[0][0] == site.time + PERIOD


def test_one_incident_is_logged_once(site, caplog):
    for late in (1.5, 2.5, 0.6, 1.5):  # never in time in between: it is one incident
        site.beat(late)
    assert site.metrics.snapshot()["loop_blocked"] == 4
    assert site.metrics.snapshot()["loop_lag_max_seconds"] == pytest.approx(2.5)
    (said,) = warnings(caplog)
    assert said["event"] == "loop_blocked"
    assert said["lag"] == pytest.approx(1.5)
    assert "loop='own'" in said["reason"]


def test_the_next_incident_is_logged_again(site, caplog):
    for late in (1.5, 0.0, 1.5):
        site.beat(late)
    assert len(warnings(caplog)) == 2


def test_the_transport_is_looked_at_after_each_beat_that_comes_in_time(site):
    """What looks late right after a process was stopped may be as well as the loop in a moment."""
    in_time = []
    for late in (0.0, 1.5, 0.3, 0.2):
        site.beat(late)
        in_time += [site.time] if late < PERIOD else []
    assert site.looks == in_time
    assert len(site.looks) == 2


def test_it_goes_on_though_a_look_fails(site):
    def fail():
        raise ValueError("a defect")

    site.stalled = fail
    with pytest.raises(ValueError, match="a defect"):
        site.beat()
    site.stalled = lambda: 0.0
    site.beat()
    assert len(site.looks) == 2


@pytest.mark.parametrize("limit", [5.0, 0.3])
def test_who_waits_for_posts_is_told_as_long_as_the_transport_stands_still(caplog, limit):
    """Who asks for less than 5 s is not told that a thread stands still which was only not given a processor."""
    site, late = FakeSite(limit), iter((0.0, 4.9, 5.0, 5.3, 0.0, 6.0))
    site.stalled = lambda: next(late)
    for _ in range(6):
        site.beat()
    for role in site.roles:
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
