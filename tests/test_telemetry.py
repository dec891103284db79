"""Logs reach the stdlib logger and nothing else; stats and counters add up."""

import dataclasses
import logging
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.telemetry import Intervals, TransferStats, join_logs, logger, overheard

# --- logs


def test_without_configuration_nothing_is_said():
    code = (
        "from kvxfer.telemetry import logger\n"
        "log = logger('kvxfer.test')\n"
        "log.error('peer_lost', peer='a')\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: log.exception('task_failed')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.fixture
def ours():
    """The logger `kvxfer`, which the test may configure."""
    found = logging.getLogger("kvxfer")
    before = found.level, found.handlers[:], found.propagate
    yield found
    found.setLevel(before[0])
    found.handlers[:], found.propagate = before[1:]


def test_lines_go_where_those_of_another_logger_go_and_with_a_name(ours, capsys):
    theirs = logging.getLogger("an engine")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    theirs.addHandler(handler)
    theirs.setLevel(logging.INFO)
    for _ in range(2):
        join_logs("an engine")
        logger("kvxfer.link").info("peer_lost", peer="100%s")
        logger("kvxfer.link").debug("peer_lost", peer="b")
    assert capsys.readouterr().out == "INFO kvxfer.link peer_lost peer=100%s\n" * 2


def test_who_has_configured_our_lines_keeps_them(ours):
    ours.setLevel(logging.ERROR)
    before = ours.handlers[:]
    join_logs("an engine")
    assert (ours.level, ours.handlers, ours.propagate) == (logging.ERROR, before, True)
    ours.setLevel(logging.NOTSET)
    ours.addHandler(logging.StreamHandler())
    before = ours.handlers[:]
    join_logs("an engine")
    assert (ours.handlers, ours.propagate) == (before, True)


def test_a_record_is_readable_and_carries_the_data(caplog):
    caplog.set_level(logging.INFO, logger="kvxfer")
    logger("kvxfer.link").bind(rank=1).info(
        "peer_lost", peer="a b", reason="100%s", bytes=5, lag=1 / 3, error='x="y"', path=""
    )
    (record,) = caplog.records
    assert record.name == "kvxfer.link"
    assert record.levelno == logging.INFO
    assert record.getMessage() == (
        "peer_lost rank=1 peer='a b' reason=100%s bytes=5 lag=0.333333 error='x=\"y\"' path=''"
    )
    assert record.kvxfer["event"] == "peer_lost"
    assert record.kvxfer["bytes"] == 5
    assert record.kvxfer["rank"] == 1


def test_a_line_cannot_be_forged(caplog):
    logger("kvxfer.link").warning("peer_lost", reason="gone\nkvxfer all_good", peer="\x1b[31m")
    assert "\n" not in caplog.records[0].getMessage()
    assert "\x1b" not in caplog.records[0].getMessage()


class Full(logging.Handler):
    """A handler of an application that does not catch what goes wrong in it."""

    def emit(self, record):
        raise OSError("no space left on device")


def test_a_handler_that_raises_harms_nobody_and_is_reported_as_others_are(ours, capsys, monkeypatch):
    ours.addHandler(Full())
    log = logger("kvxfer.link")
    log.warning("peer_lost", peer="a")
    said = capsys.readouterr().err
    assert "OSError: no space left on device" in said
    assert "peer_lost" in said
    monkeypatch.setattr(logging, "raiseExceptions", False)
    log.warning("peer_lost", peer="a")
    assert not capsys.readouterr().err


def test_a_line_says_where_it_was_written(caplog):
    log = logger("kvxfer.link")
    for say in (log.warning, log.error, log.bind(rank=1).warning):
        say("peer_lost", peer="a")
    assert {(record.filename, record.funcName) for record in caplog.records} == {
        ("test_telemetry.py", "test_a_line_says_where_it_was_written")
    }


def test_a_value_is_cut_where_somebody_else_chose_how_long_it_is(caplog):
    logger("kvxfer.link").warning("peer_lost", reason="\x1b" + 5_000_000 * "x", peer="p")
    (record,) = caplog.records
    assert len(record.getMessage()) < 5000
    assert len(record.kvxfer["reason"]) < 5000
    assert record.getMessage().endswith("...' peer=p")


# --- intervals


def union_by_counting(spans):
    """The same by brute force: on a grid of integers, how many cells are covered."""
    return len({cell for start, end in spans for cell in range(start, end)})


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))), max_size=30)


@given(spans)
def test_the_union_of_intervals(pairs):
    intervals = Intervals(pairs)
    assert intervals.length == union_by_counting(pairs)
    intervals.unite()  # of one alone the length is asked without
    kept = [*intervals]
    real = [pair for pair in pairs if pair[0] < pair[1]]
    assert [start for start, _ in kept[:1]] == [start for start, _ in sorted(real)[:1]]
    assert [end for _, end in kept[-1:]] == sorted(end for _, end in real)[-1:]
    assert all(left[1] < right[0] for left, right in pairwise(kept)), "disjoint, apart, in order"


@given(spans, spans)
def test_merging_intervals(pairs, others):
    left, right = Intervals(pairs), Intervals(others)
    left.merge(right)
    assert left.length == union_by_counting(pairs + others)
    assert right.length == union_by_counting(others)


# --- stats


def test_stats():
    stats = TransferStats(
        route="staged", bytes=3 * 10**9, peers=("a", "b"), started=10.0, first_byte=10.5, finished=12.0
    )
    assert stats.duration == 2.0
    assert stats.gbps == 1.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(stats, "bytes", 0)  # noqa: B010 - a type checker refuses the plain form
    fields = stats.log_fields()
    assert fields["first_byte_after"] == 0.5
    assert fields["peers"] == "a,b"
    assert fields["duration"] == 2.0


def test_warnings_of_some_events_are_overheard():
    log = logger("kvxfer.worker")
    with overheard({"memory_leaked"}) as heard:
        log.warning("memory_leaked", reason="one")
        log.warning("cache_not_exported", reason="another event")
        log.info("memory_leaked", reason="no warning")
        log.warning("memory_leaked")
    log.warning("memory_leaked", reason="nobody listens any more")
    assert heard == ["one", ""]
