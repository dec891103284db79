"""The one line that a prefill rank logs of each transfer."""

from typing import Final

from kvxfer.errors import Code, FailureReport
from kvxfer.telemetry import TransferStats, hears_info, logger

__all__ = ["log_transfer"]

_NAME: Final = "kvxfer.send"
_log: Final = logger(_NAME)


def log_transfer(stats: TransferStats, report: FailureReport | None, *, request: str, transfer: str) -> None:
    """Say how a transfer ended; `report` if it failed."""
    if report is not None:
        say = _log.info if report.code is Code.CANCELLED else _log.warning
        say("transfer_failed", **stats.log_fields(), **report.log_fields())
    elif hears_info(_NAME):
        _log.info("transfer_sent", request=request, transfer=transfer, outcome="ok", **stats.log_fields())
