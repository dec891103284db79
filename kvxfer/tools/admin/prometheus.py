"""Metrics of workers for Prometheus: what `describe` says, under names and units that Prometheus asks for.

The names are a promise to dashboards. Every series has the labels `engine` and `rank`; other labels have few values.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector as _Collector

from kvxfer import __version__
from kvxfer.telemetry import SECONDS, HistogramSnapshot
from kvxfer.tools.admin.health import Limits, reasons
from kvxfer.tools.admin.look import PATIENCE_SECONDS, Look, Watched, given_workers, look

__all__ = ["Collector", "families"]

_IDENTITY: Final = ("engine", "rank")
_SIDES: Final = ("receive", "send")
_STATES: Final = ("free", "reserved", "writing", "quarantined")
_BOUNDS: Final = (*(repr(bound) for bound in SECONDS), "+Inf")

# name -> (help, the label's name, the counter's place in the snapshot)
_BY_LABEL: Final = {
    "kvxfer_route_fallbacks": ("Transfers on a slower route than preferred.", "reason", "fallbacks"),
    "kvxfer_memory_refused": ("Memory that was refused and replaced by slower one.", "kind", "memory_refused"),
    "kvxfer_results_dropped": ("Results of peers that nothing waited for.", "reason", "results_dropped"),
    "kvxfer_chunks_checked": ("Chunks that were compared with their source.", "outcome", "chunks_checked"),
    "kvxfer_sessions_opened": ("Handshakes that were completed.", "side", "sessions_opened"),
    "kvxfer_offers_ended": ("Offers that are over.", "ending", "offers_ended"),
}
# name -> (help, the counter's place in the snapshot)
_PLAIN: Final = {
    "kvxfer_quarantine_entered_bytes": ("Bytes that ever went into quarantine.", "quarantined_bytes_ever"),
    "kvxfer_agents_rebuilt": ("Times that the transport's agent was made anew.", "agents_rebuilt"),
    "kvxfer_admission_waits": ("Reservations that had to wait for memory.", "admission_waits"),
    "kvxfer_admission_wait_seconds": ("Seconds that they waited.", "admission_wait_seconds"),
    "kvxfer_loop_blocked": ("Times that the event loop stood still for 0.25 s or more.", "loop_blocked"),
}
# name -> (help, place in the state)
_GAUGES: Final = {
    "kvxfer_offers": ("Offers that have not ended: each has a lease.", "offers"),
    "kvxfer_claims": ("Requests whose leases are renewed at prefill ranks.", "claims"),
    "kvxfer_fetches_in_doubt": ("Fetches that ended while a peer's answer is missing.", "in_doubt"),
    "kvxfer_draining": ("1 if new work is refused.", "draining"),
}


class Collector(_Collector):
    """Gives the metrics of workers to a registry: `registry.register(Collector(worker))`.

    Each scrape asks the workers, on their loops, and waits for them where the registry is collected: do that in another
    thread than that of a worker's loop, as `prometheus_client.start_http_server` and `app` do.

    Args:
        workers: One or several.
        limits: From when on a worker counts as not ready.
        patience: Seconds to wait for them; one that has not answered has only `kvxfer_ready` and `kvxfer_answering`.
    """

    def __init__(
        self, workers: Watched | Iterable[Watched], *, limits: Limits | None = None, patience: float = PATIENCE_SECONDS
    ) -> None:
        self._workers: Final = given_workers(workers)
        self._limits: Final = limits or Limits()
        self._patience: Final = patience

    def describe(self) -> Iterable[Metric]:
        """Nothing: so that registering asks no worker."""
        return []

    def collect(self) -> Iterable[Metric]:
        """All metrics now."""
        return families(look(self._workers, self._patience), self._limits)


def families(looks: Sequence[Look], limits: Limits) -> Iterator[Metric]:
    """The metrics of workers at one moment."""
    yield from _health(looks, limits)
    seen = [((one.engine, str(one.rank)), one.state) for one in looks if one.state is not None]
    yield from _gauges(seen)
    yield from _arena(seen)
    yield from _transfers(seen)
    yield from _counters(seen)


_Seen = Sequence[tuple[tuple[str, str], Mapping[str, Any]]]


def _health(looks: Sequence[Look], limits: Limits) -> Iterator[Metric]:
    info = GaugeMetricFamily("kvxfer_info", "Version of kvxfer; always 1.", labels=[*_IDENTITY, "version"])
    answering = GaugeMetricFamily("kvxfer_answering", "1 if the worker's event loop answered.", labels=_IDENTITY)
    ready = GaugeMetricFamily("kvxfer_ready", "1 if the worker should be given work.", labels=_IDENTITY)
    for one in looks:
        who = (one.engine, str(one.rank))
        info.add_metric([*who, __version__], 1)
        answering.add_metric(who, one.state is not None)
        ready.add_metric(who, not reasons(one, limits))
    yield from (info, answering, ready)


def _gauges(seen: _Seen) -> Iterator[Metric]:
    for name, (text, place) in _GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=_IDENTITY)
        for who, state in seen:
            gauge.add_metric(who, state[place])
        yield gauge
    flight = GaugeMetricFamily(
        "kvxfer_transfers_in_flight", "Transfers that have not ended.", labels=[*_IDENTITY, "side"]
    )
    sessions = GaugeMetricFamily("kvxfer_sessions", "Control streams that are open.", labels=[*_IDENTITY, "side"])
    late = GaugeMetricFamily(
        "kvxfer_fabric_late_seconds",
        "For how long the mover, or a call of the transport, stands still.",
        labels=_IDENTITY,
    )
    lag = GaugeMetricFamily("kvxfer_loop_lag_max_seconds", "The latest that the event loop ever was.", labels=_IDENTITY)
    blocks = GaugeMetricFamily(
        "kvxfer_custody_blocks", "The caller's blocks in the books.", labels=[*_IDENTITY, "state"]
    )
    for who, state in seen:
        roles = [peer["role"] for peer in state["peers"]]
        for side, role, place in (("receive", "client", "receiving"), ("send", "server", "sending")):
            flight.add_metric([*who, side], state[place])
            sessions.add_metric([*who, side], roles.count(role))
        late.add_metric(who, state["fabric"]["late"])
        lag.add_metric(who, state["metrics"]["loop_lag_max_seconds"])
        blocks.add_metric([*who, "held"], state["custody"].held_blocks)
        blocks.add_metric([*who, "in_doubt"], state["custody"].doubtful_blocks)
    yield from (flight, sessions, late, lag, blocks)


def _arena(seen: _Seen) -> Iterator[Metric]:
    labels = [*_IDENTITY, "share"]
    held = GaugeMetricFamily("kvxfer_arena_bytes", "Bytes of a share of the arena by state.", labels=[*labels, "state"])
    size = GaugeMetricFamily("kvxfer_arena_capacity_bytes", "Bytes of a share of the arena.", labels=labels)
    waiting = GaugeMetricFamily("kvxfer_arena_waiting_bytes", "Bytes that wait for a share.", labels=labels)
    requests = GaugeMetricFamily("kvxfer_arena_waiting_requests", "Requests that wait for a share.", labels=labels)
    for who, state in seen:
        for side in _SIDES:
            share = state["arena"][side]
            for kind in _STATES:
                held.add_metric([*who, side, kind], getattr(share, f"{kind}_bytes"))
            size.add_metric([*who, side], share.capacity_bytes)
            waiting.add_metric([*who, side], share.waiting_bytes)
            requests.add_metric([*who, side], share.waiting_requests)
    yield from (held, size, waiting, requests)


def _transfers(seen: _Seen) -> Iterator[Metric]:
    labels = [*_IDENTITY, "side"]
    ended = CounterMetricFamily("kvxfer_transfers", "Transfers that ended, by outcome.", labels=[*labels, "outcome"])
    moved = CounterMetricFamily("kvxfer_transferred_bytes", "Bytes of cache moved.", labels=[*labels, "route"])
    pieces = CounterMetricFamily("kvxfer_pieces", "Contiguous runs of bytes that were moved.", labels=labels)
    chunks = CounterMetricFamily("kvxfer_chunks", "Chunks that they travelled in.", labels=labels)
    lasted = HistogramMetricFamily(
        "kvxfer_transfer_duration_seconds", "From asking for a transfer to its success.", labels=[*labels, "route"]
    )
    stages = HistogramMetricFamily(
        "kvxfer_stage_duration_seconds", "How long a stage of a transfer took.", labels=[*labels, "stage"]
    )
    for who, state in seen:
        for side in _SIDES:
            counted, here = state["metrics"][side], [*who, side]
            for outcome, count in {"ok": 0, **counted["transfers"]}.items():
                ended.add_metric([*here, outcome], count)
            for route, nbytes in counted["bytes"].items():
                moved.add_metric([*here, route], nbytes)
            pieces.add_metric(here, counted["pieces"])
            chunks.add_metric(here, counted["chunks"])
            for route, durations in counted["durations"].items():
                lasted.add_metric([*here, route], _buckets(durations), durations["sum"])
            for stage, durations in counted["stages"].items():
                stages.add_metric([*here, stage], _buckets(durations), durations["sum"])
    yield from (ended, moved, pieces, chunks, lasted, stages)


def _counters(seen: _Seen) -> Iterator[Metric]:
    for name, (text, place) in _PLAIN.items():
        plain = CounterMetricFamily(name, text, labels=_IDENTITY)
        for who, state in seen:
            plain.add_metric(who, state["metrics"][place])
        yield plain
    for name, (text, label, place) in _BY_LABEL.items():
        counter = CounterMetricFamily(name, text, labels=[*_IDENTITY, label])
        for who, state in seen:
            for value, count in state["metrics"][place].items():
                counter.add_metric([*who, value], count)
        yield counter
    for name, text, label, place in (
        ("kvxfer_refusals", "Requests that were refused.", "code", "refusals"),
        ("kvxfer_frames", "Control frames.", "kind", "frames"),
    ):
        counter = CounterMetricFamily(name, text, labels=[*_IDENTITY, "direction", label])
        for who, state in seen:
            for direction in ("sent", "received"):
                for value, count in state["metrics"][f"{place}_{direction}"].items():
                    counter.add_metric([*who, direction, value], count)
        yield counter
    lag = HistogramMetricFamily(
        "kvxfer_loop_lag_seconds", "How late the loop came to a periodic callback.", labels=_IDENTITY
    )
    for who, state in seen:
        lag.add_metric(who, _buckets(state["metrics"]["loop_lag"]), state["metrics"]["loop_lag"]["sum"])
    yield lag


def _buckets(histogram: HistogramSnapshot) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus counts."""
    return list(zip(_BOUNDS, accumulate(histogram["counts"]), strict=True))
