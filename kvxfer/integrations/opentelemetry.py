"""OpenTelemetry traces of fetches and offers: one trace over both sides of a transfer.

A fetch's span begins when it is asked for, as a child of whatever span is current there, and its context travels with
it as a W3C `traceparent`. Everything else is made when a transfer or an offer has ended, of what was measured anyway:
so a transfer that is under way pays for nothing, and there are at most six spans a side, however many chunks there are.

What a peer says of its trace is a claim like any other: it is used as the parent of spans, if it is well formed, and
for nothing else. The sampler decides how far to believe its flag `sampled`.

One module imports opentelemetry, and it is imported only if the setting `traces` asks for it.
"""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from types import MappingProxyType
from typing import Any, Concatenate, Final, ParamSpec, TypeAlias, TypeVar

from kvxfer import __version__
from kvxfer.telemetry import Ended, Intervals, RequestKey, Side, Stage, logger

__all__ = ["Traces", "parsed", "written"]

try:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
except ImportError as error:
    from kvxfer.errors import ConfigError

    raise ConfigError("traces='otel' needs OpenTelemetry: pip install opentelemetry-api") from error


_T = TypeVar("_T")
_P = ParamSpec("_P")
_Clock: TypeAlias = Callable[[float], int]
_log: Final = logger("kvxfer.worker")

_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", re.ASCII)
_MOST_LINKS: Final = 64
"""Transfers that the span of one offer names at most."""
_STAGES: Final[Mapping[Side, Mapping[Stage, str]]] = MappingProxyType(
    {
        "receive": MappingProxyType({"queued": "reserve", "wire": "arrive", "scattering": "scatter"}),
        "send": MappingProxyType({"queued": "reserve", "gathering": "gather", "posting": "post", "wire": "write"}),
    }
)
"""Spans of the stages that each side sees by itself; the decode rank knows of the others only about when they were."""


def parsed(text: str) -> SpanContext | None:
    """The span that a `traceparent` names; None unless it is a well-formed one of version 00."""
    found = _TRACEPARENT.fullmatch(text)
    if found is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    # of the flags only `sampled` has a meaning, so nothing else of them is passed on
    context = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags & TraceFlags.SAMPLED))
    return context if context.is_valid else None


def written(context: SpanContext) -> str:
    """A span as a `traceparent`; empty if it is none, as those of an API without an SDK are."""
    if not context.is_valid:
        return ""
    flags = context.trace_flags & TraceFlags.SAMPLED
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"


@dataclass(slots=True)
class _Offered:
    """An offer that can be found."""

    caller: SpanContext  # the span in which it was made
    began: float
    fetched: SpanContext | None = None  # the first fetch of it that said to which trace it belongs
    links: list[Link] = field(default_factory=list[Link])


def _harmless(method: "Callable[Concatenate[Any, _P], _T]") -> "Callable[Concatenate[Any, _P], _T | None]":
    """A sampler or a span processor of the application that raises is no reason for a transfer to fail."""

    @wraps(method)
    def guarded(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - code of the application, called from the midst of the books
            _log.error("trace_failed", error=repr(error), exc_info=error)
            return None

    return guarded


class Traces:
    """Makes spans of what one worker's metrics hear. For the event loop's thread.

    Spans go to the application's tracer provider; without one, nothing comes of them. What its span processors do when
    a span ends, they do on the loop: they should hand it on, as `BatchSpanProcessor` does.
    """

    def __init__(self, engine: str, rank: int) -> None:
        self._tracer: Final = trace.get_tracer("kvxfer", __version__)
        self._own: Final[Mapping[str, str | int]] = {"kvxfer.engine": engine, "kvxfer.rank": rank}
        self._fetches: Final[dict[str, tuple[Span, _Clock]]] = {}
        self._offers: Final[dict[RequestKey, _Offered]] = {}

    @_harmless
    def fetch_began(self, transfer: str, key: RequestKey, at: float) -> str:
        """A fetch began: what its peers are told."""
        clock = self._clock(at)
        about = self._about(key) | {"kvxfer.transfer": transfer}
        span = self._tracer.start_span("kvxfer.fetch", None, SpanKind.CLIENT, about, start_time=clock(at))
        self._fetches[transfer] = span, clock
        return written(span.get_span_context())

    @_harmless
    def offer_began(self, key: RequestKey, at: float) -> None:
        """An offer can be found: note in which span it was made."""
        self._offers[key] = _Offered(trace.get_current_span().get_span_context(), at)

    @_harmless
    def transfer_ended(self, ended: Ended) -> None:
        """Make the spans of a transfer."""
        stats = ended.stats
        if ended.side == "receive":
            begun = self._fetches.pop(ended.transfer, None)
            if begun is None:
                return
            span, clock = begun
        else:
            clock, parent = self._clock(stats.finished), parsed(ended.trace)
            about = self._about(ended.key) | {"kvxfer.transfer": ended.transfer}
            within, start = _within(parent), clock(stats.started)
            span = self._tracer.start_span("kvxfer.send", within, SpanKind.SERVER, about, start_time=start)
            if (offered := self._offers.get(ended.key)) is not None:
                offered.fetched = offered.fetched or parent
                if len(offered.links) < _MOST_LINKS:
                    offered.links.append(Link(span.get_span_context()))
        if span.is_recording():
            self._describe(span, clock, ended)
        span.end(clock(stats.finished))

    @_harmless
    def offer_ended(self, key: RequestKey, how: str, at: float) -> None:
        """Make the span of an offer: in the span that made it, else in the trace of the first fetch of it."""
        offered = self._offers.pop(key, None)
        if offered is None:
            return
        clock = self._clock(at)
        parent = offered.caller if offered.caller.is_valid else offered.fetched
        about = self._about(key) | {"kvxfer.ending": how}
        start = clock(offered.began)
        span = self._tracer.start_span(
            "kvxfer.offer", _within(parent), attributes=about, links=offered.links, start_time=start
        )
        span.end(clock(at))

    def _clock(self, now: float) -> _Clock:
        """What an instant of the worker's clock is in nanoseconds since the epoch, as both clocks are now."""
        zero_ns = time.time_ns() - int(now * 1e9)
        return lambda at: zero_ns + int(at * 1e9)

    def _about(self, key: RequestKey) -> dict[str, str | int]:
        return {**self._own, "kvxfer.request": key[0], "kvxfer.attempt": key[1]}

    @_harmless  # by itself: a span that is not ended is never exported
    def _describe(self, span: Span, clock: _Clock, ended: Ended) -> None:
        """What became of a transfer, and a span below it of each stage."""
        stats = ended.stats
        span.set_attributes(
            {
                "kvxfer.route": stats.route,
                "kvxfer.why": stats.why,
                "kvxfer.bytes": stats.bytes,
                "kvxfer.pieces": stats.pieces,
                "kvxfer.chunks": stats.chunks,
                "kvxfer.peers": stats.peers,
            }
        )
        if stats.first_byte is not None:
            span.add_event("first_byte", timestamp=clock(stats.first_byte))
        if (report := ended.report) is None:
            span.set_status(Status(StatusCode.OK))
        else:
            span.set_attribute("error.type", report.code.name.lower())
            span.set_attribute("kvxfer.step", report.step.value)
            span.set_attribute("kvxfer.memory_safe", report.memory_safe)
            span.set_status(Status(StatusCode.ERROR, f"{report.code.name}: {report.reason}"))
        within = trace.set_span_in_context(span, Context())
        for stage, name in _STAGES[ended.side].items():
            intervals = ended.stages.get(stage)
            if intervals is not None:
                self._stage(within, clock, "read" if name == "arrive" and stats.route == "pull" else name, intervals)

    def _stage(self, within: Context, clock: _Clock, name: str, intervals: Intervals) -> None:
        """One span from the first chunk to the last, which says in how much of it the stage ran."""
        if (busy := intervals.length) > 0:
            about: dict[str, Any] = {"kvxfer.busy_seconds": busy, "kvxfer.intervals": len(intervals)}
            start, end = clock(intervals[0][0]), clock(intervals[-1][1])
            self._tracer.start_span(f"kvxfer.{name}", within, attributes=about, start_time=start).end(end)


def _within(parent: SpanContext | None) -> Context:
    """A context with this parent, or none: what is current on the worker's loop says nothing."""
    if parent is None or not parent.is_valid:
        return Context()
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())
