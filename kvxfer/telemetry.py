"""What kvxfer says about itself: log lines, and the stats of a transfer. `metrics` counts.

Logs are structlog events that go through the stdlib logger `kvxfer`. The library configures nothing and is silent
until the application does (`logging.basicConfig()` suffices). A message reads `event key=value ...`; the same data
stand as a dict in the record's attribute `kvxfer`, for formatters that write JSON. Events are snake_case in the past
tense, and keys come from `KEYS` alone; a house test reads every call.

Counters are plain numbers that belong to the event loop's thread; `Metrics.snapshot` hands them to whatever exports
them.
"""

import hashlib
import logging
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any, Final, cast

import structlog
from structlog.typing import EventDict, WrappedLogger

__all__ = [
    "KEYS",
    "Intervals",
    "TransferStats",
    "hears_info",
    "logger",
    "mask",
    "overheard",
    "printable",
]

KEYS: Final = frozenset(
    {
        # who and what
        "address",
        "agent",
        "backend",
        "backends",
        "cpus",
        "device",
        "endpoint",
        "engine",
        "epoch",
        "group",
        "incarnation",
        "kind",
        "message",
        "name",
        "offer",
        "peer",
        "peers",
        "rank",
        "request",
        "role",
        "task",
        "ticket",
        "transfer",
        "version",
        "world",
        # what happened
        "attempt",
        "blocks",
        "chunk",
        "code",
        "environment",
        "error",
        "explanation",
        "field",
        "fields",
        "limit",
        "memory_safe",
        "outcome",
        "path",
        "reason",
        "route",
        "setting",
        "state",
        "step",
        "value",
        "why",
        # how much
        "bytes",
        "chunks",
        "chunks_done",
        "count",
        "descriptors",
        "dropped",
        "gbps",
        "pieces",
        "quarantined_bytes",
        "tokens",
        # how long, in seconds
        "duration",
        "elapsed",
        "first_byte_after",
        "gathering",
        "lag",
        "posting",
        "predicted",
        "queued",
        "remaining",
        "scattering",
        "timeout",
        "wire",
        # handed on to the stdlib logger
        "exc_info",
        "stack_info",
    }
)
"""Every key that a log line may have."""

_GIGABYTE: Final = 1e9
_MASK_BYTES: Final = 4
_ADDED: Final = 256
"""Intervals that are kept as they came before they are united: that is cheaper for many at a time."""

logging.getLogger("kvxfer").addHandler(logging.NullHandler())

_of_stdlib: Final = cache(logging.getLogger)
"""Loggers live as long as the process, and looking one up takes a lock."""


def _to_record(_: WrappedLogger, __: str, event: EventDict) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Make the arguments of a stdlib logging call: readable text, and the data in one attribute of the record."""
    passed = {key: event.pop(key) for key in ("exc_info", "stack_info") if key in event}
    name, *rest = [str(event["event"]), *(f"{key}={_plain(value)}" for key, value in event.items() if key != "event")]
    # as an argument, not as the format: a value may contain a percent sign
    return ("%s", " ".join([name, *rest])), {"extra": {"kvxfer": dict(event)}, "stacklevel": 4, **passed}


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if text.isprintable() and text and not set(text) & {" ", '"', "="} else repr(text)


def logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger whose events reach the stdlib logger `kvxfer.<name>`, filtered by its level.

    Args:
        name: Module below `kvxfer`, with or without the leading `kvxfer.`.
    """
    full = name if name == "kvxfer" or name.startswith("kvxfer.") else f"kvxfer.{name}"
    wrapped = structlog.wrap_logger(
        logging.getLogger(full),
        processors=[structlog.stdlib.filter_by_level, _to_record],
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=True,
    )
    return cast("structlog.stdlib.BoundLogger", wrapped.bind())


def hears_info(name: str) -> Callable[[], bool]:
    """Asks whether anybody hears informational events of this logger: to say one of every transfer is dear."""
    return partial(_of_stdlib(name).isEnabledFor, logging.INFO)


class _Listener(logging.Handler):
    """Keeps one value of the warnings of some events."""

    def __init__(self, events: Collection[str], key: str) -> None:
        super().__init__(logging.WARNING)
        self._events, self._key = events, key
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        said: dict[str, Any] = getattr(record, "kvxfer", {})
        if said.get("event") in self._events:
            self.heard.append(str(said.get(self._key, "")))


@contextmanager
def overheard(events: Collection[str], key: str) -> Generator[list[str], None, None]:
    """Listen to what this process warns of, beside whoever else does.

    Args:
        events: Names of events.
        key: Of the value that is wanted.

    Yields:
        A list that grows with each of them.
    """
    listener, log = _Listener(events, key), _of_stdlib("kvxfer")
    log.addHandler(listener)
    try:
        yield listener.heard
    finally:
        log.removeHandler(listener)


def mask(secret: str | bytes) -> str:
    """A short fingerprint by which lines about one ticket can be matched, on every side, but the ticket not be used.

    For tickets and keys that were drawn at random. Not for a configured secret: what a person chose can be guessed from
    a fingerprint; such values are never logged at all.
    """
    data = secret.encode() if isinstance(secret, str) else secret
    return f"~{hashlib.sha256(data).hexdigest()[: 2 * _MASK_BYTES]}"


def printable(text: str) -> str:
    """Text that others chose, without what a terminal would obey."""
    return "".join(one if one.isprintable() else "?" for one in text)


class Intervals(list[tuple[float, float]]):
    """Intervals of time as they came, each its start and end in seconds of one clock, and the length of their union.

    A stage of a transfer runs in pieces that overlap (chunks on a wire, copies on a stream); how long the stage took is
    the time in which at least one of them ran. A list, as every chunk adds to several of them.

    Attributes:
        room: Whoever appends by himself unites them when there are so many.
    """

    room = _ADDED

    def add(self, start: float, end: float) -> None:
        """Count the interval from `start` to `end`; an empty one counts nothing.

        Raises:
            ValueError: If it ends before it starts.
        """
        if end < start:
            raise ValueError(f"an interval cannot end ({end}) before it starts ({start})")
        self.append((start, end))
        if len(self) >= self.room:
            self.unite()

    def merge(self, other: "Intervals") -> None:
        """Count every interval of another collection too."""
        self += other
        self.unite()

    def spans(self) -> tuple[tuple[float, float], ...]:
        """The union as disjoint intervals, in order."""
        self.unite()
        return tuple(self)

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
        """Seconds in which at least one interval ran."""
        if len(self) > 1:
            self.unite()
        total = 0.0
        for start, end in self:
            total += end - start
        return total

    @property
    def first(self) -> float | None:
        """Start of the earliest interval, None without one."""
        spans = self.spans()
        return spans[0][0] if spans else None

    @property
    def last(self) -> float | None:
        """End of the latest interval, None without one."""
        spans = self.spans()
        return spans[-1][1] if spans else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStats:
    """What one transfer did and where its time went, as one side saw it.

    Times are seconds; a stage's time is the union of its chunks' intervals, so stages may add up to more than the
    duration, and what this side cannot see is 0. The three instants are this process's monotonic clock.

    Attributes:
        route: How the bytes travelled; several, joined by `+`, if peers differed.
        why: Why this route was chosen.
        bytes: Bytes of cache moved; converted elements count in the narrower of their two sizes.
        pieces: Contiguous runs that they were in, in the blocks.
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
        return self.bytes / self.duration / _GIGABYTE if self.duration > 0 else 0.0

    def log_fields(self) -> dict[str, object]:
        """What the one line of a transfer says: keys of `KEYS`, durations instead of instants."""
        instants = {"started", "first_byte", "finished"}
        said: dict[str, object] = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name not in instants
        }
        said |= {"peers": ",".join(self.peers), "duration": self.duration, "gbps": self.gbps}
        if self.first_byte is not None:
            said["first_byte_after"] = self.first_byte - self.started
        return {key: value for key, value in said.items() if value is not None}
