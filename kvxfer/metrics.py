"""Counters and durations of one worker: plain numbers that belong to the event loop's thread.

`Metrics.snapshot` hands them to whatever exports them. What begins and ends is said here alone, so whoever else wants
to hear of it (traces do) is a `Listener`. Counting is what every transfer pays for, so a duration costs a
search among fixed bounds and an addition, and names of labels are few: those that come of free text are capped.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, TypeAlias, TypedDict

from kvxfer.errors import Code, FailureReport
from kvxfer.telemetry import Intervals, TransferStats

__all__ = [
    "SECONDS",
    "Ended",
    "HistogramSnapshot",
    "Listener",
    "Metrics",
    "RequestKey",
    "Side",
    "SideSnapshot",
    "Snapshot",
    "Stage",
]

_LABELS: Final = 64
"""Distinct free-text labels that one counter keeps; what is over counts as `other`."""

SECONDS: Final = tuple(digits * 10.0**power for power in range(-5, 2) for digits in (1.0, 2.5, 5.0))
"""Upper bounds of the buckets of durations: three in each power of ten, from 10 us to 50 s."""

Side: TypeAlias = Literal["receive", "send"]
"""Which end of a transfer counts it."""
Stage: TypeAlias = Literal["queued", "gathering", "posting", "wire", "scattering"]
"""What takes time in a transfer."""
RequestKey: TypeAlias = tuple[str, int]
"""Request id and attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A transfer that is over.

    Attributes:
        side: Which end of it this is.
        code: Kind of its failure; None if it succeeded.
        stats: What it did.
        report: What is known of its failure.
        transfer: Its name in the logs.
        key: Its request.
        stages: When each stage that this side saw ran.
        trace: To which trace the decode rank says that it belongs; not checked.
    """

    side: Side
    code: Code | None
    stats: TransferStats
    report: FailureReport | None = None
    transfer: str = ""
    key: RequestKey = ("", 0)
    stages: Mapping[Stage, Intervals] = field(default_factory=dict[Stage, Intervals])
    trace: str = ""


class Listener(Protocol):
    """Hears of what begins and ends. It must not raise. Instants are seconds of the worker's clock."""

    def fetch_began(self, transfer: str, key: RequestKey, at: float) -> str:
        """A fetch began. What prefill ranks are told of the trace that it belongs to; empty for nothing."""
        ...

    def offer_began(self, key: RequestKey, at: float) -> None:
        """An offer can be found from now on."""
        ...

    def transfer_ended(self, ended: Ended) -> None:
        """A fetch that began, or what a peer fetched here, is over."""
        ...

    def offer_ended(self, key: RequestKey, how: str, at: float) -> None:
        """An offer is over."""
        ...


class HistogramSnapshot(TypedDict):
    """Durations: how many fell into each bucket (the last one is for what is above all bounds), and their sum."""

    counts: list[int]
    sum: float


class SideSnapshot(TypedDict):
    """What one side counted: transfers by outcome, bytes and durations by route, seconds of each stage."""

    transfers: dict[str, int]
    bytes: dict[str, int]
    pieces: int
    chunks: int
    durations: dict[str, HistogramSnapshot]
    stages: dict[str, HistogramSnapshot]


class Snapshot(TypedDict):
    """Counters by name; those with a label are dicts by label."""

    receive: SideSnapshot
    send: SideSnapshot
    refusals_sent: dict[str, int]
    refusals_received: dict[str, int]
    fallbacks: dict[str, int]
    memory_refused: dict[str, int]
    results_dropped: dict[str, int]
    chunks_checked: dict[str, int]
    frames_sent: dict[str, int]
    frames_received: dict[str, int]
    sessions_opened: dict[str, int]
    offers_ended: dict[str, int]
    quarantined_bytes: int
    quarantined_bytes_ever: int
    agents_rebuilt: int
    admission_waits: int
    admission_wait_seconds: float
    loop_lag: HistogramSnapshot
    loop_blocked: int
    loop_lag_max_seconds: float


class _Histogram:
    """Durations by bucket."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds

    def snapshot(self) -> HistogramSnapshot:
        return {"counts": list(self.counts), "sum": self.sum}


class _Account:
    """What one side counts of the transfers that ended there."""

    def __init__(self) -> None:
        self._transfers: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._pieces = self._chunks = 0
        self._durations: defaultdict[str, _Histogram] = defaultdict(_Histogram)
        self._stages: defaultdict[str, _Histogram] = defaultdict(_Histogram)

    def ended(self, code: Code | None, stats: TransferStats) -> None:
        self._transfers["ok" if code is None else code.name.lower()] += 1
        if stats.bytes:
            self._bytes[stats.route] += stats.bytes
        if code is not None:
            return  # how long a failure took says what was set, not how fast anything is
        self._pieces += stats.pieces
        self._chunks += stats.chunks
        self._durations[stats.route].add(stats.finished - stats.started)
        for stage, seconds in (
            ("queued", stats.queued),
            ("gathering", stats.gathering),
            ("posting", stats.posting),
            ("wire", stats.wire),
            ("scattering", stats.scattering),
        ):
            if seconds:  # not every route has every stage, and not every side sees it
                histogram = self._stages[stage]
                histogram.counts[bisect_left(SECONDS, seconds)] += 1  # as `add`: a transfer has up to five of them
                histogram.sum += seconds

    def snapshot(self) -> SideSnapshot:
        return {
            "transfers": dict(self._transfers),
            "bytes": dict(self._bytes),
            "pieces": self._pieces,
            "chunks": self._chunks,
            "durations": {route: histogram.snapshot() for route, histogram in self._durations.items()},
            "stages": {stage: histogram.snapshot() for stage, histogram in self._stages.items()},
        }


class Metrics:
    """Counters of one worker. Everything only grows, but for `quarantined_bytes`, which is what is in custody now.

    Args:
        listener: Who hears of transfers and offers too.
    """

    def __init__(self, listener: Listener | None = None) -> None:
        self._listener: Final = listener
        self._sides: Final[dict[Side, _Account]] = {"receive": _Account(), "send": _Account()}
        self._refusals_sent: Counter[str] = Counter()
        self._refusals_received: Counter[str] = Counter()
        self._fallbacks: Counter[str] = Counter()
        self._memory_refused: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._checked: Counter[str] = Counter()
        self.frames_sent: Counter[str] = Counter()
        self.frames_received: Counter[str] = Counter()
        self._sessions: Counter[str] = Counter()
        self._offers: Counter[str] = Counter()
        self._quarantined = 0
        self._quarantined_ever = 0
        self._rebuilt = 0
        self._waits = 0
        self._waited = 0.0
        self._loop_lag = _Histogram()
        self._loop_blocked = 0
        self._loop_lag_max = 0.0

    def fetch_began(self, transfer: str, key: RequestKey, at: float) -> str:
        """Take note of a fetch. What prefill ranks are told of the trace that it belongs to; empty for nothing."""
        return self._listener.fetch_began(transfer, key, at) if self._listener is not None else ""

    def transfer_ended(self, ended: Ended) -> None:
        """Count one transfer: its outcome, its bytes, and if it succeeded where its time went."""
        self._sides[ended.side].ended(ended.code, ended.stats)
        if self._listener is not None:
            self._listener.transfer_ended(ended)

    def session_opened(self, side: Side) -> None:
        """Count a handshake that was completed, by what this rank does in the session."""
        self._sessions[side] += 1

    def offer_began(self, key: RequestKey, at: float) -> None:
        """Take note of an offer that can be found from now on."""
        if self._listener is not None:
            self._listener.offer_began(key, at)

    def offer_ended(self, key: RequestKey, how: str, at: float) -> None:
        """Count an offer that is over, by how it ended: there are three ways."""
        self._offers[how] += 1
        if self._listener is not None:
            self._listener.offer_ended(key, how, at)

    def quarantined(self, nbytes: int) -> None:
        """Count memory that went into custody because a peer may still touch it."""
        self._quarantined += nbytes
        self._quarantined_ever += nbytes

    def settled(self, nbytes: int) -> None:
        """Count memory that left custody."""
        self._quarantined -= nbytes

    def agent_rebuilt(self) -> None:
        """Count that the transport's agent was destroyed and made anew, to end doubts."""
        self._rebuilt += 1

    def result_dropped(self, why: str) -> None:
        """Count a result of a peer that changed nothing, by the reason: nothing waited for it (any more)."""
        _count(self._dropped, why)

    def chunk_checked(self, outcome: str) -> None:
        """Count a chunk that was compared with its source: `ok`, `damaged`, or `reported` by the peer as damaged."""
        self._checked[outcome] += 1

    def refused(self, code: Code, *, by_peer: bool) -> None:
        """Count a request that one side refused."""
        (self._refusals_received if by_peer else self._refusals_sent)[code.name.lower()] += 1

    def fell_back(self, reason: str) -> None:
        """Count a transfer that took a slower route than the settings prefer."""
        _count(self._fallbacks, reason)

    def memory_refused(self, kind: str) -> None:
        """Count memory that CUDA or the transport refused and something slower replaced.

        Args:
            kind: The kind of arena, or `blocks` for the caller's.
        """
        _count(self._memory_refused, kind)

    def admission_waited(self, seconds: float) -> None:
        """Count a transfer that had to wait for admission or memory."""
        self._waits += 1
        self._waited += seconds

    def loop_late(self, seconds: float, *, blocked: bool) -> None:
        """Count how late the loop came to a periodic callback; `blocked` if so late that it stood still."""
        self._loop_lag.add(max(0.0, seconds))
        self._loop_lag_max = max(self._loop_lag_max, seconds)
        self._loop_blocked += blocked

    def snapshot(self) -> Snapshot:
        """All counters now, as plain numbers that later changes do not touch."""
        return {
            "receive": self._sides["receive"].snapshot(),
            "send": self._sides["send"].snapshot(),
            "refusals_sent": dict(self._refusals_sent),
            "refusals_received": dict(self._refusals_received),
            "fallbacks": dict(self._fallbacks),
            "memory_refused": dict(self._memory_refused),
            "results_dropped": dict(self._dropped),
            "chunks_checked": dict(self._checked),
            "frames_sent": dict(self.frames_sent),
            "frames_received": dict(self.frames_received),
            "sessions_opened": dict(self._sessions),
            "offers_ended": dict(self._offers),
            "quarantined_bytes": self._quarantined,
            "quarantined_bytes_ever": self._quarantined_ever,
            "agents_rebuilt": self._rebuilt,
            "admission_waits": self._waits,
            "admission_wait_seconds": self._waited,
            "loop_lag": self._loop_lag.snapshot(),
            "loop_blocked": self._loop_blocked,
            "loop_lag_max_seconds": self._loop_lag_max,
        }


def _count(counter: Counter[str], label: str) -> None:
    """Count under a label, or under `other` once there are very many: labels must not grow without bound."""
    counter[label if label in counter or len(counter) < _LABELS else "other"] += 1
