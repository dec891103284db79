"""Counters and durations: each counts what its name says, under labels that stay few."""

import pytest

from kvxfer.errors import Code
from kvxfer.telemetry import SECONDS, Ended, Metrics, TransferStats

EMPTY = {"transfers": {}, "bytes": {}, "pieces": 0, "chunks": 0, "durations": {}, "stages": {}}


def moved(route="staged", nbytes=0, took=1.0, **stages):
    return TransferStats(route=route, bytes=nbytes, started=0.0, finished=took, **stages)


def buckets(histogram):
    """Its counts by upper bound; None for what is above all of them."""
    return {bound: n for bound, n in zip([*SECONDS, None], histogram["counts"], strict=True) if n}


def test_counters():
    metrics = Metrics()
    metrics.offer_ended(("r", 0), "released", 1.0)
    metrics.fell_back("no native atomics")
    metrics.frames_received["Accept"] += 2
    metrics.admission_waited(0.25)
    metrics.admission_waited(0.5)
    metrics.loop_late(0.5, blocked=True, at=0.0)
    metrics.loop_late(-0.001, blocked=False, at=59.0)
    assert metrics.snapshot()["loop_lag_recent_seconds"] == 0.5
    metrics.loop_late(0.25, blocked=False, at=61.0)
    seen = metrics.snapshot()
    assert buckets(seen.pop("loop_lag")) == {1e-5: 1, 0.25: 1, 0.5: 1}
    assert {name: count for name, count in seen.items() if count not in (0, {}, EMPTY)} == {
        "fallbacks": {"no native atomics": 1},
        "frames_received": {"Accept": 2},
        "offers_ended": {"released": 1},
        "admission_waits": 2,
        "admission_wait_seconds": 0.75,
        "loop_blocked": 1,
        "loop_lag_max_seconds": 0.5,
        "loop_lag_recent_seconds": 0.25,
    }


def test_both_sides_of_transfers_are_counted_apart():
    metrics = Metrics()
    metrics.transfer_ended(
        Ended(code=None, stats=moved(nbytes=100, pieces=7, chunks=2, took=0.001, wire=0.0004), side="receive")
    )
    metrics.transfer_ended(
        Ended(
            code=None, stats=moved(nbytes=11, pieces=1, chunks=1, took=99.0, queued=90.0, wire=0.0002), side="receive"
        )
    )
    metrics.transfer_ended(Ended(code=None, stats=moved("mapped", 5), side="send"))
    seen = metrics.snapshot()
    received = seen["receive"]
    assert (received["transfers"], received["bytes"]) == ({"ok": 2}, {"staged": 111})
    assert (received["pieces"], received["chunks"]) == (8, 3)
    durations = received["durations"]["staged"]
    assert buckets(durations) == {0.001: 1, None: 1}  # a bound belongs to its bucket
    assert durations["sum"] == pytest.approx(99.001)
    assert {stage: buckets(histogram) for stage, histogram in received["stages"].items()} == {
        "wire": {0.0005: 1, 0.00025: 1},
        "queued": {None: 1},
    }
    assert seen["send"]["bytes"] == {"mapped": 5}
    assert buckets(seen["send"]["durations"]["mapped"]) == {1.0: 1}


def test_a_failure_counts_its_bytes_and_not_how_long_it_took():
    metrics = Metrics()
    metrics.transfer_ended(
        Ended(code=Code.TIMEOUT, stats=moved(nbytes=5, took=10.0, pieces=3, chunks=1, wire=9.0), side="receive")
    )
    metrics.transfer_ended(Ended(code=Code.CANCELLED, stats=moved(""), side="receive"))
    assert metrics.snapshot()["receive"] == {
        **EMPTY,
        "transfers": {"timeout": 1, "cancelled": 1},
        "bytes": {"staged": 5},
    }


def test_labels_do_not_grow_without_bound():
    metrics = Metrics()
    for number in range(1000):
        metrics.fell_back(f"reason {number}")
    fallbacks = metrics.snapshot()["fallbacks"]
    assert len(fallbacks) <= 65
    assert sum(fallbacks.values()) == 1000
