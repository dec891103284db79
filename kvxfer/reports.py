"""What is known of a transfer that failed: one value for the exception, for the log line, and for both sides."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum, unique

from kvxfer.codes import Code

__all__ = ["FailureReport", "Step"]


@unique
class Step(StrEnum):
    """How far a transfer had come: what it waited for when it failed. In the order in which they are reached."""

    CONNECTING = "connecting"
    """For a stream to a prefill rank and its handshake."""
    ASKING = "asking"
    """For the answer of the prefill rank, which may wait for its offer."""
    PLANNING = "planning"
    """For a plan of its own."""
    WAITING = "waiting"
    """For chunks that the prefill side has not computed yet."""
    RESERVING = "reserving"
    """For memory of chunks that are ready, or for blocks that may be written."""
    MOVING = "moving"
    """For chunks that are granted: to be gathered, posted, on the wire."""
    SCATTERING = "scattering"
    """For the copy of what has landed into the blocks."""
    ENDING = "ending"
    """For the last word: every chunk is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """What is known of a transfer that failed, as one side saw it.

    Attributes:
        request: The request's id.
        transfer: The transfer's id, as in the logs of both sides.
        peer: Whose part failed; where it cannot be told, all that were waited for, joined by a comma.
        step: What was waited for when it failed.
        elapsed: Seconds from its begin to its end.
        route: How its bytes travelled; empty if none was chosen.
        bytes: Bytes of cache that had arrived.
        chunks_done: Chunks that had arrived.
        chunks: Chunks that it was cut into, as far as that was known.
        code: Why, as a number.
        reason: Why, in words.
        blocks: At the decode side the destination blocks, which hold no usable data of the request. At the prefill side
            the offered blocks. By group.
        memory_safe: Whether no peer touches those blocks any more.
    """

    request: str
    transfer: str
    peer: str
    step: Step
    elapsed: float
    code: Code
    reason: str
    route: str = ""
    bytes: int = 0
    chunks_done: int = 0
    chunks: int = 0
    blocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    memory_safe: bool = True

    def log_fields(self) -> dict[str, object]:
        """What the one line of a failed transfer says besides its stats, which have route, bytes and chunks.

        Block ids are many, so they are counted.
        """
        return {
            "request": self.request,
            "transfer": self.transfer,
            "peer": self.peer,
            "step": self.step.value,
            "elapsed": self.elapsed,
            "chunks_done": self.chunks_done,
            "code": self.code.name.lower(),
            "reason": self.reason,
            "blocks": sum(map(len, self.blocks.values())),
            "memory_safe": self.memory_safe,
        }
