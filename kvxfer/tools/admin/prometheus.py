"""Metrics of workers for Prometheus: what `describe` says, under names and units that Prometheus asks for.

The names are a promise to dashboards. Every series has the labels `engine` and `rank`; other labels have few values.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector as _Collector

from kvxfer import __version__
from kvxfer.telemetry import SECONDS
from kvxfer.tools.admin.look import PATIENCE_SECONDS, Limits, Look, Watched, given_workers, look

__all__ = ["Collector", "families"]

_State: TypeAlias = Mapping[str, Any]
_Find: TypeAlias = Callable[[_State], Any]
_IDENTITY: Final = ("engine", "rank")
_SIDES: Final = ("receive", "send")
_STATES: Final = ("free", "reserved", "writing", "quarantined")
_BOUNDS: Final = (*(repr(bound) for bound in SECONDS), "+Inf")


def _counted(name: str) -> _Find:
    return lambda state: state["metrics"][name]


def _by_side(name: str) -> _Find:
    return lambda state: {side: state["metrics"][side][name] for side in _SIDES}


def _by_direction(name: str) -> _Find:
    return lambda state: {way: state["metrics"][f"{name}_{way}"] for way in ("sent", "received")}


def _by_share(name: str) -> _Find:
    return lambda state: {side: getattr(state["arena"][side], name) for side in _SIDES}


# name -> (help, labels, what finds it in a worker's state: for each value of the first label, of the next, and so on)
_GAUGES: Final[Mapping[str, tuple[str, str, _Find]]] = {
    "kvxfer_offers": ("Offers that have not ended: each has a lease.", "", lambda state: state["offers"]),
    "kvxfer_claims": ("Requests whose leases are renewed at prefill ranks.", "", lambda state: state["claims"]),
    "kvxfer_fetches_in_doubt": (
        "Fetches that ended while a peer's answer is missing.", "", lambda state: state["in_doubt"]
    ),
    "kvxfer_draining": ("1 if new work is refused.", "", lambda state: state["draining"]),
    "kvxfer_transfers_in_flight": (
        "Transfers that have not ended.",
        "side",
        lambda state: {"receive": state["receiving"], "send": state["sending"]},
    ),
    "kvxfer_sessions": (
        "Control streams that are open.",
        "side",
        lambda state: {
            side: sum(peer["role"] == role for peer in state["peers"])
            for side, role in zip(_SIDES, ("client", "server"), strict=True)
        },
    ),
    "kvxfer_fabric_late_seconds": (
        "For how long the mover, or a call of the transport, stands still.", "", lambda state: state["fabric"]["late"]
    ),
    "kvxfer_loop_lag_max_seconds": ("The latest that the event loop ever was.", "", _counted("loop_lag_max_seconds")),
    "kvxfer_custody_blocks": (
        "The caller's blocks in the books.",
        "state",
        lambda state: {"held": state["custody"].held_blocks, "in_doubt": state["custody"].doubtful_blocks},
    ),
    "kvxfer_arena_bytes": (
        "Bytes of a share of the arena by state.",
        "share state",
        lambda state: {
            side: {kind: getattr(state["arena"][side], f"{kind}_bytes") for kind in _STATES} for side in _SIDES
        },
    ),
    "kvxfer_arena_capacity_bytes": ("Bytes of a share of the arena.", "share", _by_share("capacity_bytes")),
    "kvxfer_arena_waiting_bytes": ("Bytes that wait for a share.", "share", _by_share("waiting_bytes")),
    "kvxfer_arena_waiting_requests": ("Requests that wait for a share.", "share", _by_share("waiting_requests")),
}  # fmt: skip
_COUNTERS: Final[Mapping[str, tuple[str, str, _Find]]] = {
    "kvxfer_transfers": (
        "Transfers that ended, by outcome.",
        "side outcome",
        lambda state: {side: {"ok": 0, **state["metrics"][side]["transfers"]} for side in _SIDES},
    ),
    "kvxfer_transferred_bytes": ("Bytes of cache moved.", "side route", _by_side("bytes")),
    "kvxfer_pieces": ("Contiguous runs of bytes that were moved.", "side", _by_side("pieces")),
    "kvxfer_chunks": ("Chunks that they travelled in.", "side", _by_side("chunks")),
    "kvxfer_quarantine_entered_bytes": (
        "Bytes that ever went into quarantine.", "", _counted("quarantined_bytes_ever")
    ),
    "kvxfer_agents_rebuilt": (
        "Times that the transport's agent was made anew.", "", lambda state: state["agent"]["rebuilt"]
    ),
    "kvxfer_admission_waits": ("Reservations that had to wait for memory.", "", _counted("admission_waits")),
    "kvxfer_admission_wait_seconds": ("Seconds that they waited.", "", _counted("admission_wait_seconds")),
    "kvxfer_loop_blocked": ("Times that the event loop stood still for 0.25 s or more.", "", _counted("loop_blocked")),
    "kvxfer_route_fallbacks": ("Transfers on a slower route than preferred.", "reason", _counted("fallbacks")),
    "kvxfer_memory_refused": (
        "Memory that was refused and replaced by slower one.", "kind", _counted("memory_refused")
    ),
    "kvxfer_results_dropped": ("Results of peers that nothing waited for.", "reason", _counted("results_dropped")),
    "kvxfer_chunks_checked": ("Chunks that were compared with their source.", "outcome", _counted("chunks_checked")),
    "kvxfer_sessions_opened": ("Handshakes that were completed.", "side", _counted("sessions_opened")),
    "kvxfer_offers_ended": ("Offers that are over.", "ending", _counted("offers_ended")),
    "kvxfer_refusals": ("Requests that were refused.", "direction code", _by_direction("refusals")),
    "kvxfer_frames": ("Control frames.", "direction kind", _by_direction("frames")),
}  # fmt: skip
_HISTOGRAMS: Final[Mapping[str, tuple[str, str, _Find]]] = {
    "kvxfer_transfer_duration_seconds": (
        "From asking for a transfer to its success.", "side route", _by_side("durations")
    ),
    "kvxfer_stage_duration_seconds": ("How long a stage of a transfer took.", "side stage", _by_side("stages")),
    "kvxfer_loop_lag_seconds": ("How late the loop came to a periodic callback.", "", _counted("loop_lag")),
}  # fmt: skip


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
        self._workers: Final = given_workers(workers, patience)
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
    info = GaugeMetricFamily("kvxfer_info", "Version of kvxfer; always 1.", labels=[*_IDENTITY, "version"])
    answering = GaugeMetricFamily("kvxfer_answering", "1 if the worker's event loop answered.", labels=_IDENTITY)
    ready = GaugeMetricFamily("kvxfer_ready", "1 if the worker should be given work.", labels=_IDENTITY)
    for one in looks:
        who = (one.engine, str(one.rank))
        info.add_metric([*who, __version__], 1)
        answering.add_metric(who, one.state is not None)
        ready.add_metric(who, not one.reasons(limits))
    yield from (info, answering, ready)
    for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, (text, labels, find) in table.items():
            family = kind(name, text, labels=[*_IDENTITY, *labels.split()])
            for values, number in _found(looks, labels, find):
                family.add_metric(values, number)
            yield family
    for name, (text, labels, find) in _HISTOGRAMS.items():
        histogram = HistogramMetricFamily(name, text, labels=[*_IDENTITY, *labels.split()])
        for values, durations in _found(looks, labels, find):
            counts: list[int] = durations["counts"]
            histogram.add_metric(values, list(zip(_BOUNDS, accumulate(counts), strict=True)), durations["sum"])
        yield histogram


def _found(looks: Sequence[Look], labels: str, find: _Find) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(values of all labels, what is there) for each worker that answered, and each value of these labels."""
    for one in looks:
        if one.state is not None:
            yield from _flat((one.engine, str(one.rank)), find(one.state), len(labels.split()))


def _flat(values: tuple[str, ...], found: Any, depth: int) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not depth:
        yield values, found
        return
    for value, inner in found.items():
        yield from _flat((*values, value), inner, depth - 1)
