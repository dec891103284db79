"""What was measured: durations by one monotonic clock, and the few figures that are said of them.

Warm-up runs are counted apart and are in no figure. Nothing is left out as an outlier: minimum and maximum stand beside
every median.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer.telemetry import rate

__all__ = ["Samples", "measured"]


@dataclass(frozen=True, slots=True)
class Samples:
    """Durations of the same work, in seconds."""

    seconds: Sequence[float]  # one a repetition, in the order in which they were measured
    warmups: int = 0  # runs before them, which are not among them

    @property
    def median(self) -> float:
        """The middle one, or the mean of the two in the middle."""
        return statistics.median(self.seconds)

    def percentile(self, percent: float) -> float:
        """The smallest sample that at least `percent` of all are not above (nearest rank)."""
        ordered = sorted(self.seconds)
        return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]

    @property
    def spread(self) -> float:
        """(max - min) / median: how far runs of the same work lie apart; 0.0 for one run."""
        return (max(self.seconds) - min(self.seconds)) / self.median if self.median else 0.0

    def gbps(self, nbytes: int) -> float:
        """Gigabytes (10^9 bytes) a second at the median."""
        return rate(nbytes, self.median)

    def to_json(self) -> dict[str, Any]:
        """Figures and how many runs they are of."""
        return {
            "median_s": self.median,
            "min_s": min(self.seconds),
            "max_s": max(self.seconds),
            "repetitions": len(self.seconds),
            "warmups": self.warmups,
        }

    def percentiles(self) -> dict[str, Any]:
        """The same, and p50, p90 and p99."""
        return {f"p{percent}_s": self.percentile(percent) for percent in (50, 90, 99)} | self.to_json()


def measured(work: Callable[[], object]) -> float:
    """Seconds that one call takes, by the monotonic clock."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
