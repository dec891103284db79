"""What one side of a transfer counts while it runs, and the stats that come of it."""

from collections import defaultdict
from typing import Final

from kvxfer.metrics import Stage
from kvxfer.protocol import messages as wire
from kvxfer.telemetry import Intervals, TransferStats

__all__ = ["Tally"]


class Tally:
    """Counts of one transfer, or of one rank's part of it.

    Attributes:
        bytes: Bytes of cache moved.
        pieces: Contiguous runs that they are in, in the blocks.
        chunks: Chunks of the plan.
        descriptors: Pieces that this side handed to its transport.
        first_byte: When the first chunk had landed, or was posted; None before.
        predicted: Seconds that it was expected to take; None without a prediction.
        stages: Intervals of each stage that was seen.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.pieces = 0
        self.chunks = 0
        self.descriptors = 0
        self.first_byte: float | None = None
        self.predicted: float | None = None
        self.stages: Final[defaultdict[Stage, Intervals]] = defaultdict(Intervals)

    def spent(self, stage: Stage, start: float, end: float) -> None:
        """Count an interval of a stage, in seconds of the runtime's clock; one that ends before it starts is empty."""
        spans = self.stages[stage]
        spans.append((start, max(start, end)))
        if len(spans) >= spans.room:
            spans.unite()

    def began(self, now: float) -> None:
        """Note the first byte, once."""
        if self.first_byte is None:
            self.first_byte = now

    def arrived(self, granted: float, now: float, sender: wire.Timings) -> None:
        """Count a chunk that the sender wrote between its grant and now, and what it says of its own work on it."""
        if self.first_byte is None:
            self.first_byte = now
        sent = now - sender.wire_us / 1e6  # about: the sender's durations, on this side's clock
        on_wire = self.stages["wire"]
        on_wire.append((granted, now))
        self.stages["posting"].append((sent, sent + sender.post_us / 1e6))
        self.stages["gathering"].append((sent - sender.gather_us / 1e6, sent))
        if len(on_wire) >= on_wire.room:
            for spans in self.stages.values():
                spans.unite()

    def merge(self, other: "Tally") -> None:
        """Count what another rank's part counted."""
        self.bytes += other.bytes
        self.pieces += other.pieces
        self.chunks += other.chunks
        self.descriptors += other.descriptors
        if other.first_byte is not None:
            self.first_byte = min(other.first_byte, other.first_byte if self.first_byte is None else self.first_byte)
        if other.predicted is not None:  # ranks move their parts at the same time
            self.predicted = max(other.predicted, self.predicted or 0.0)
        for stage, intervals in other.stages.items():
            self.stages[stage].merge(intervals)

    def stats(self, *, route: str, why: str, peers: tuple[str, ...], started: float, finished: float) -> TransferStats:
        """The counts as the caller sees them."""
        seconds: dict[Stage, float] = {}
        for stage, intervals in self.stages.items():
            seconds[stage] = intervals.length
        return TransferStats(
            route=route,
            why=why,
            bytes=self.bytes,
            pieces=self.pieces,
            chunks=self.chunks,
            descriptors=self.descriptors,
            peers=peers,
            started=started,
            first_byte=self.first_byte,
            finished=finished,
            predicted=self.predicted,
            **seconds,
        )
