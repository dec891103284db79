"""What kvxfer says about itself: log lines, the stats of a transfer, and the counters of a worker.

`Metrics.snapshot` hands them to whatever exports them. What begins and ends is said here alone, so whoever else wants
to hear of it (traces do) is an `Observer`. Counting is what every transfer pays for, so a duration costs a
search among fixed bounds and an addition, and names of labels are few: those that come of free text are capped.
"""

import logging
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final, Literal, Protocol, TypeAlias, cast, get_args

import structlog
from msgspec import Struct, field
from structlog.typing import EventDict, WrappedLogger

from kvxfer.errors import Code, FailureReport

__all__ = [
    "RECENT_SECONDS",
    "SECONDS",
    "Ended",
    "Intervals",
    "Metrics",
    "Observer",
    "RequestKey",
    "Side",
    "Stage",
    "TransferStats",
    "hears_info",
    "join_logs",
    "logger",
    "overheard",
    "printable",
    "quieten",
    "rate",
]

# --- log lines and stats
#
# Logs are structlog events that go through the stdlib logger `kvxfer`. The library configures nothing and is silent
# until the application does (`logging.basicConfig()` suffices). A message reads `event key=value ...`; the same data
# stand as a dict in the record's attribute `kvxfer`, for formatters that write JSON. Events are snake_case in the past
# tense, and keys come from the one list of the house test that reads every call.

_VALUE_CHARACTERS: Final = 4096
"""Of a text in a log line at most: clients and peers choose some of it."""
_ADDED: Final = 256
"""Intervals that are kept as they came before they are united: that is cheaper for many at a time."""

_NOBODY: Final = logging.NullHandler()
logging.getLogger("kvxfer").addHandler(_NOBODY)


def _to_record(_: WrappedLogger, __: str, event: EventDict) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Make the arguments of a stdlib logging call: readable text, and the data in one attribute of the record."""
    passed = {key: event.pop(key) for key in ("exc_info", "stack_info") if key in event}
    for key, value in event.items():
        if isinstance(value, str) and len(value) > _VALUE_CHARACTERS:
            event[key] = f"{value[:_VALUE_CHARACTERS]}..."
    name, *rest = [str(event["event"]), *(f"{key}={_plain(value)}" for key, value in event.items() if key != "event")]
    # as an argument, not as the format: a value may contain a percent sign
    return ("%s", " ".join([name, *rest])), {"extra": {"kvxfer": dict(event)}, "stacklevel": 5, **passed}


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if text.isprintable() and text and not set(text) & {" ", '"', "="} else repr(text)


class _Lines(structlog.stdlib.BoundLogger):
    """Says lines. A handler or a filter of the application that raises is no reason for anything to fail.

    It is reported as `logging` reports what handlers catch themselves.
    """

    def _proxy_to_logger(self, method_name: str, event: str | None = None, *event_args: str, **event_kw: Any) -> Any:
        try:
            return super()._proxy_to_logger(method_name, event, *event_args, **event_kw)
        except Exception:  # noqa: BLE001 - code of the application, called from the midst of the books
            _NOBODY.handleError(logging.makeLogRecord({"name": self.name, "msg": event}))


def logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger whose events reach the stdlib logger of this name, `kvxfer` or below it, filtered by its level."""
    wrapped = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[structlog.stdlib.filter_by_level, _to_record],
        wrapper_class=_Lines,
        context_class=dict,
        cache_logger_on_first_use=True,
    )
    return cast("structlog.stdlib.BoundLogger", wrapped.bind())


def hears_info(name: str) -> Callable[[], bool]:
    """Asks whether anybody hears informational events of this logger: to say one of every transfer is dear."""
    return partial(logging.getLogger(name).isEnabledFor, logging.INFO)


class _Listener(logging.Handler):
    """Keeps the reasons that warnings of some events give."""

    def __init__(self, events: Collection[str]) -> None:
        super().__init__(logging.WARNING)
        self._events = events
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        said: dict[str, Any] = getattr(record, "kvxfer", {})
        if said.get("event") in self._events:
            self.heard.append(str(said.get("reason", "")))


@contextmanager
def overheard(events: Collection[str]) -> Generator[list[str], None, None]:
    """Listen to what this process warns of, beside whoever else does.

    Yields:
        The reasons of these events: a list that grows with each of them.
    """
    listener, log = _Listener(events), logging.getLogger("kvxfer")
    log.addHandler(listener)
    try:
        yield listener.heard
    finally:
        log.removeHandler(listener)


class _Forwarder(logging.Handler):
    """Hands lines to another logger, whose own may not name theirs, with the name of ours."""

    def __init__(self, other: str) -> None:
        super().__init__()
        self._other = other

    def emit(self, record: logging.LogRecord) -> None:
        line = copy(record)
        line.msg, line.args = f"{record.name} {record.getMessage()}", None
        logging.getLogger(self._other).handle(line)


def join_logs(other: str) -> None:
    """Let log lines go where those of another logger go, at its level, unless somebody has configured `kvxfer`."""
    ours = logging.getLogger("kvxfer")
    if ours.level == logging.NOTSET and all(isinstance(one, logging.NullHandler) for one in ours.handlers):
        ours.addHandler(_Forwarder(other))
        ours.setLevel(logging.getLogger(other).getEffectiveLevel())
        ours.propagate = False


def quieten(thread: str, *others: str) -> None:
    """Let other loggers pass nothing of what is said in threads of this name but errors."""
    for other in others:
        logging.getLogger(other).addFilter(
            lambda record: record.threadName != thread or record.levelno >= logging.ERROR
        )


def printable(text: str) -> str:
    """Text that others chose, without what a terminal would obey."""
    return "".join(one if one.isprintable() else "?" for one in text)


class Intervals(list[tuple[float, float]]):
    """Intervals of time as they came, each its start and end in seconds of one clock, and the length of their union.

    A stage of a transfer runs in pieces that overlap (chunks on a wire, copies on a stream); how long the stage took is
    the time in which at least one of them ran. A list, as every chunk adds to several of them.
    """

    room = _ADDED  # whoever appends unites them when there are so many

    def merge(self, other: "Intervals") -> None:
        """Count every interval of another collection too."""
        self += other
        self.unite()

    def unite(self) -> None:
        """Keep only their union: few, however many chunks there were."""
        united: list[tuple[float, float]] = []
        for start, end in sorted(self):
            if united and start <= united[-1][1]:
                if end > united[-1][1]:
                    united[-1] = united[-1][0], end
            elif end > start:
                united.append((start, end))
        self[:] = united
        self.room = len(united) + _ADDED

    @property
    def length(self) -> float:
        """Seconds in which at least one interval ran. Unless it is 0, they are their union from then on."""
        if len(self) > 1:
            self.unite()
        total = 0.0
        for start, end in self:
            total += end - start
        return total


def rate(nbytes: int, seconds: float) -> float:
    """Gigabytes (10^9 bytes) a second; 0.0 if no time passed."""
    return nbytes / seconds / 1e9 if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStats:
    """What one transfer did and where its time went, as one side saw it.

    Times are seconds; a stage's time is the union of its chunks' intervals, so stages may add up to more than the
    duration, and what this side cannot see is 0. The three instants are this process's monotonic clock.

    Attributes:
        route: How the bytes travelled; several, joined by `+`, if peers differed.
        why: Why this route was chosen.
        bytes: Bytes of cache moved; converted elements count in the narrower of their two sizes.
        pieces: Contiguous runs that they were in, in the blocks; neighbours that could be copied as one are not joined.
        chunks: Chunks that they travelled in.
        descriptors: Pieces that this side handed to its transport.
        peers: Names of the other sides.
        queued: Waiting for the offer, for admission and for memory.
        gathering: Copying blocks into staging memory; at the receiver as the sender measured it.
        posting: Inside the transport's post calls; at the receiver of a write as the sender measured it.
        wire: From the post of a chunk to its end; at the receiver of a write from its grant.
        scattering: Copying staging memory into blocks.
        started: When the transfer was asked for.
        first_byte: When the first chunk had landed (sender: was posted); None if none did.
        finished: When it was over.
        predicted: What the cost model expected the transfer to take; None without a prediction.
    """

    route: str
    why: str = ""
    bytes: int = 0
    pieces: int = 0
    chunks: int = 0
    descriptors: int = 0
    peers: tuple[str, ...] = ()
    queued: float = 0.0
    gathering: float = 0.0
    posting: float = 0.0
    wire: float = 0.0
    scattering: float = 0.0
    started: float
    first_byte: float | None = None
    finished: float
    predicted: float | None = None

    @property
    def duration(self) -> float:
        """Seconds from the call to the end."""
        return self.finished - self.started

    @property
    def gbps(self) -> float:
        """Gigabytes (10^9 bytes) a second over the whole duration; 0.0 if no time passed."""
        return rate(self.bytes, self.duration)

    def log_fields(self) -> dict[str, object]:
        """What the one line of a transfer says: durations instead of instants."""
        instants = {"started", "first_byte", "finished"}
        said: dict[str, object] = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name not in instants
        }
        said |= {"peers": ",".join(self.peers), "duration": self.duration, "gbps": self.gbps}
        if self.first_byte is not None:
            said["first_byte_after"] = self.first_byte - self.started
        return {key: value for key, value in said.items() if value is not None}


# --- counters of a worker

_LABELS: Final = 64
"""Reasons in free text that a counter keeps."""

SECONDS: Final = tuple(digits * 10.0**power for power in range(-5, 2) for digits in (1.0, 2.5, 5.0))
"""Upper bounds of the buckets of durations: three in each power of ten, from 10 us to 50 s."""

RECENT_SECONDS: Final = 60.0
"""How far back `loop_lag_recent_seconds` looks."""

Side: TypeAlias = Literal["receive", "send"]
"""Which end of a transfer counts it."""
Stage: TypeAlias = Literal["queued", "gathering", "posting", "wire", "scattering"]
"""What takes time in a transfer."""
_STAGES: Final[tuple[Stage, ...]] = get_args(Stage)
RequestKey: TypeAlias = tuple[str, int]
"""Request id and attempt."""


class Ended(Struct, frozen=True):
    """A transfer that is over."""

    side: Side
    code: Code | None  # why it failed; None if it succeeded
    stats: TransferStats
    report: FailureReport | None = None
    transfer: str = ""  # its name in the logs
    key: RequestKey = ("", 0)
    # when each stage that this side saw ran
    stages: Mapping[Stage, Intervals] = field(default_factory=dict[Stage, Intervals])
    trace: str = ""  # to which trace the decode rank says that it belongs; not checked


class Observer(Protocol):
    """Hears of what begins and ends. It must not raise. Instants are seconds of the worker's clock."""

    def fetch_began(self, transfer: str, key: RequestKey, at: float) -> str | None:
        """A fetch began. What prefill ranks are told of the trace that it belongs to, if anything."""
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


class _Histogram:
    """Durations: how many fell into each bucket (the last one is for what is above all bounds), and their sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds


class _Account:
    """What one side counts of the transfers that ended there."""

    def __init__(self) -> None:
        self.transfers: Final[Counter[str]] = Counter()
        self.bytes: Final[Counter[str]] = Counter()
        self.pieces = self.chunks = 0
        self.durations: Final[defaultdict[str, _Histogram]] = defaultdict(_Histogram)
        self.stages: Final[defaultdict[str, _Histogram]] = defaultdict(_Histogram)


class Metrics:
    """Counters of one worker, by the names that `snapshot` gives; those with a label by label. They only grow."""

    def __init__(self, observer: Observer | None = None) -> None:
        self._observer: Final = observer
        self.receive: Final = _Account()
        self.send: Final = _Account()
        self.refusals_sent: Final[Counter[str]] = Counter()  # requests that this side refused, by code
        self.refusals_received: Final[Counter[str]] = Counter()
        self.fallbacks: Final[Counter[str]] = Counter()  # see `fell_back`
        # what CUDA or the transport refused and something slower replaced: a kind of arena, or `blocks` of the caller's
        self.memory_refused: Final[Counter[str]] = Counter()
        self.results_dropped: Final[Counter[str]] = Counter()  # those of peers that changed nothing, by why
        # chunks that were compared with their source: `ok`, `damaged`, or `reported` by the peer as damaged
        self.chunks_checked: Final[Counter[str]] = Counter()
        self.frames_sent: Final[Counter[str]] = Counter()
        self.frames_received: Final[Counter[str]] = Counter()
        self.sessions_opened: Final[Counter[str]] = Counter()  # handshakes, by what this rank does in the session
        self.offers_ended: Final[Counter[str]] = Counter()
        self.quarantined_bytes_ever = 0  # memory that went into quarantine because a peer may still touch it
        self.admission_waits = 0  # transfers that had to wait for memory
        self.admission_wait_seconds = 0.0
        self.loop_lag: Final = _Histogram()
        self.loop_blocked = 0
        self.loop_lag_max_seconds = 0.0
        self._loop_lags: Final[deque[tuple[float, float]]] = deque()  # when and how late, latenesses falling

    def fetch_began(self, transfer: str, key: RequestKey, at: float) -> str:
        """Take note of a fetch. What prefill ranks are told of the trace that it belongs to; empty for nothing."""
        return (self._observer.fetch_began(transfer, key, at) if self._observer is not None else None) or ""

    def transfer_ended(self, ended: Ended) -> None:
        """Count one transfer: its outcome, its bytes, and if it succeeded where its time went."""
        stats, code = ended.stats, ended.code
        side = self.receive if ended.side == "receive" else self.send
        side.transfers["ok" if code is None else code.name.lower()] += 1
        if stats.bytes:
            side.bytes[stats.route] += stats.bytes
        if code is None:  # how long a failure took says what was set, not how fast anything is
            side.pieces += stats.pieces
            side.chunks += stats.chunks
            side.durations[stats.route].add(stats.finished - stats.started)
            for stage in _STAGES:
                if seconds := getattr(stats, stage):  # not every route or side has each
                    histogram = side.stages[stage]
                    histogram.counts[bisect_left(SECONDS, seconds)] += 1  # as `add`: a transfer has up to five of them
                    histogram.sum += seconds
        if self._observer is not None:
            self._observer.transfer_ended(ended)

    def offer_began(self, key: RequestKey, at: float) -> None:
        """Take note of an offer that can be found from now on."""
        if self._observer is not None:
            self._observer.offer_began(key, at)

    def offer_ended(self, key: RequestKey, how: str, at: float) -> None:
        """Count an offer that is over, by how it ended: there are three ways."""
        self.offers_ended[how] += 1
        if self._observer is not None:
            self._observer.offer_ended(key, how, at)

    def fell_back(self, reason: str) -> None:
        """Count a transfer that took a slower route than the settings prefer.

        Reasons are free text, so very many of them count as `other`.
        """
        known = reason in self.fallbacks or len(self.fallbacks) < _LABELS
        self.fallbacks[reason if known else "other"] += 1

    def admission_waited(self, seconds: float) -> None:
        """Count a transfer that had to wait for memory."""
        self.admission_waits += 1
        self.admission_wait_seconds += seconds

    def loop_late(self, seconds: float, *, blocked: bool, at: float) -> None:
        """Count how late the loop came to a periodic callback `at`; `blocked` if so late that it stood still."""
        self.loop_lag.add(max(0.0, seconds))
        self.loop_lag_max_seconds = max(self.loop_lag_max_seconds, seconds)
        self.loop_blocked += blocked
        lags = self._loop_lags
        while lags and lags[-1][1] <= seconds:  # never again the latest
            lags.pop()
        lags.append((at, seconds))
        while lags[0][0] < at - RECENT_SECONDS:
            lags.popleft()

    def snapshot(self) -> dict[str, Any]:
        """All counters now, as plain numbers that later changes do not touch."""
        recent = max(0.0, self._loop_lags[0][1]) if self._loop_lags else 0.0
        return {"loop_lag_recent_seconds": recent, **_data(self)}


def _data(counted: Any) -> Any:
    """What was counted as plain numbers, by name or by label."""
    match counted:
        case dict():
            labelled = cast("dict[str, Any]", counted)
            return {label: _data(value) for label, value in labelled.items()}
        case list():
            return [*cast("list[int]", counted)]
        case int() | float():
            return counted
        case _:
            named = cast("dict[str, Any]", vars(counted))
            return {name: _data(value) for name, value in named.items() if not name.startswith("_")}
