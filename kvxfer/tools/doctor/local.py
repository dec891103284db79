"""Starts and reaps the two processes of the checks that take two; what they do is in `pair`.

This module imports nothing heavy: else this process would load torch only to start others that do so.
"""

from collections.abc import Callable
from typing import Final

from kvxfer.tools.bench.children import BenchFailedError, Side, conduct
from kvxfer.tools.doctor.findings import Finding, fail

__all__ = ["check_pair"]

_SILENCE: Final = 90.0
"""Seconds without any finding after which the two are given up. The first kernels may have to be compiled meanwhile."""


def check_pair(devices: tuple[str, str], report: Callable[[Finding], None]) -> None:
    """Try everything between two processes.

    Args:
        devices: Of the first and of the second one: `cpu`, or `cuda:<index>`.
        report: Hears each finding as it comes.
    """

    def show(item: object) -> None:
        if isinstance(item, Finding):
            report(item)

    one, other = devices
    names = (f"{one} (a)", f"{other} (b)") if one == other else devices
    bodies, where = {"first": _first, "second": _second}, {"first": one, "second": other}
    try:
        conduct(bodies, names, show, devices=where, silence=_SILENCE)
    except (BenchFailedError, OSError) as error:  # the latter: no process could be started, or no folder made
        report(
            fail(
                "two processes",
                f"the checks between two processes did not come to their end: {error}",
                "what would follow was not looked at; NIXL_LOG_LEVEL=INFO lets the layers below say more",
            )
        )


async def _first(side: Side, names: tuple[str, str]) -> None:
    from kvxfer.tools.doctor.pair import examine

    await examine(side, names, first=True)


async def _second(side: Side, names: tuple[str, str]) -> None:
    from kvxfer.tools.doctor.pair import examine

    await examine(side, (names[1], names[0]), first=False)
