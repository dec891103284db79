"""What a prefill rank says of a transfer that is over: one line in the log, one call to who counts, a report."""

from collections.abc import Mapping
from typing import Final

from kvxfer.errors import Code, FailureReport, Step
from kvxfer.metrics import Ended, Metrics, Stage
from kvxfer.protocol.sending import Failure, Sending
from kvxfer.telemetry import Intervals, TransferStats, hears_info, logger

__all__ = ["count", "log_transfer", "report"]

_NAME: Final = "kvxfer.send"
_log: Final = logger(_NAME)


def count(
    metrics: Metrics,
    machine: Sending,
    failure: Failure | None,
    stats: TransferStats,
    report: FailureReport | None,
    stages: Mapping[Stage, Intervals],
    *,
    name: str,
) -> None:
    """Tell whoever counts or traces."""
    fetch = machine.fetch
    metrics.transfer_ended(
        Ended(
            side="send",
            code=None if failure is None else failure.code,
            stats=stats,
            report=report,
            transfer=name,
            key=(fetch.ticket.request, fetch.ticket.attempt),
            stages=stages,
            trace=fetch.trace,
        )
    )


def log_transfer(stats: TransferStats, report: FailureReport | None, *, request: str, transfer: str) -> None:
    """Say how a transfer ended; `report` if it failed."""
    if report is not None:
        say = _log.info if report.code is Code.CANCELLED else _log.warning
        say("transfer_failed", **stats.log_fields(), **report.log_fields())
    elif hears_info(_NAME):
        _log.info("transfer_sent", request=request, transfer=transfer, outcome="ok", **stats.log_fields())


def report(
    machine: Sending,
    failure: Failure,
    stats: TransferStats,
    *,
    name: str,
    step: Step,
    blocks: Mapping[str, tuple[int, ...]],
    reads: bool,
) -> FailureReport:
    """What is known of a transfer that failed; `reads` if the offered blocks may still be read."""
    return FailureReport(
        request=machine.fetch.ticket.request,
        transfer=name,
        peer=stats.peers[0],
        step=step,
        elapsed=stats.duration,
        route=stats.route,
        bytes=stats.bytes,
        chunks_done=machine.chunks_done,
        chunks=machine.chunks,
        code=failure.code,
        reason=failure.reason,
        blocks=blocks,
        memory_safe=not reads,
    )
