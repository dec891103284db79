"""What a fetch that failed says: its error, and the report that goes with it and into the log.

Where it stood is noted when it fails, before winding down changes that; the report is made when it has ended, since
only then it is known whether memory is safe.
"""

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.decode.receiver import Receiver
from kvxfer.errors import (
    Code,
    FailureReport,
    IntegrityError,
    KvxferError,
    MemoryInDoubtError,
    PeerLostError,
    RefusedError,
    Step,
    TransferFailedError,
)
from kvxfer.lazy import lazy
from kvxfer.protocol.messages import Route
from kvxfer.protocol.sending import Failure

__all__ = ["Cause", "Standing", "Subject", "in_doubt", "reported", "short", "standing", "translated"]

Cause: TypeAlias = KvxferError | asyncio.CancelledError
"""Why a fetch fails; the second: its caller gave up."""


@dataclass(frozen=True)
class Subject:
    """What was fetched, as errors name it.

    Attributes:
        request: The request's id.
        transfer: The fetch's id.
        written: Destination blocks by group: int64 ids.
    """

    request: str
    transfer: str
    written: Mapping[str, NDArray[np.int64]]

    @lazy
    def blocks(self) -> Mapping[str, Sequence[int]]:
        """The same as lists: made for errors only, since there may be many."""
        return {group: ids.tolist() for group, ids in self.written.items()}


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a fetch stood when it failed.

    Attributes:
        step: What was waited for.
        peer: By whom it was held up; all of them, joined by a comma, if nobody stands out.
        bytes: Bytes that had landed.
        chunks_done: Chunks that had.
        chunks: Chunks that there were.
    """

    step: Step
    peer: str = ""
    bytes: int = 0
    chunks_done: int = 0
    chunks: int = 0


def standing(parts: Sequence[Receiver], failed: Receiver | None = None) -> Standing:
    """Where a fetch stands that is about to fail.

    Args:
        parts: What each prefill rank sends; empty if none was asked yet.
        failed: Which of them failed, if one did.
    """
    if not parts:
        return Standing(Step.CONNECTING)
    order = list(Step)
    behind = [failed] if failed is not None else [part for part in parts if not part.machine.ended] or parts
    return Standing(
        min((part.step for part in behind), key=order.index),
        ",".join(part.peer.name for part in behind),
        sum(part.tally.bytes for part in parts),
        sum(part.machine.chunks_done for part in parts),
        sum(part.machine.chunks for part in parts),
    )


def translated(subject: Subject, part: Receiver, failure: Failure) -> KvxferError:
    """The error that says of a whole fetch how one rank's part failed."""
    peer, blocks = part.peer.name, subject.blocks
    what = f"fetch of {subject.request!r} from {peer} failed"
    reason = f"{failure.reason or failure.code.name.lower()} (code {failure.code.name})"
    if failure.code is Code.PEER_LOST:
        return PeerLostError(
            f"{what} while {part.step.value}: {reason}; blocks {short(blocks)} hold no usable data", peer=peer
        )
    if part.route is Route.UNKNOWN:
        retry_after = failure.retry_after_ms / 1000 or None
        return RefusedError(f"{what}: {reason}", peer=peer, reason=failure.code, retry_after=retry_after)
    what = f"{what} while {part.step.value} on route {part.route.name.lower()} after {part.tally.bytes} bytes: {reason}"
    found = part.checking.finding if part.checking is not None else None
    if found is not None:
        return IntegrityError(
            what,
            chunk=found.chunk,
            layers=found.damage.layers,
            damaged=found.damage.blocks,
            peer=peer,
            transfer=subject.transfer,
            blocks=blocks,
        )
    return TransferFailedError(
        what,
        reason=failure.code,
        peer=peer,
        transfer=subject.transfer,
        blocks=blocks,
    )


def in_doubt(
    subject: Subject, cause: Cause | None, settled: Callable[[], Awaitable[None]], peer: str, who: str
) -> MemoryInDoubtError:
    """What is raised instead where somebody may still write the blocks."""
    error = MemoryInDoubtError(
        f"fetch of {subject.request!r}: {who} may still write the blocks {short(subject.blocks)}; await "
        f"settled() before reusing them ({cause})",
        settled=settled,
        peer=peer,
        transfer=subject.transfer,
        blocks=subject.blocks,
    )
    error.__cause__ = cause
    return error


def reported(
    subject: Subject, at: Standing, error: Cause, *, elapsed: float, route: str
) -> tuple[Cause, FailureReport]:
    """The report of a fetch that has ended, and the error that carries it.

    An error that many fetches share (they waited for the same stream) is copied, so that each has its own report.
    """
    code, reason = Code.CANCELLED, "the caller cancelled"
    if isinstance(error, KvxferError):
        code, reason = getattr(error, "reason", error.code), str(error)
    report = FailureReport(
        request=subject.request,
        transfer=subject.transfer,
        peer=getattr(error, "peer", "") or at.peer,
        step=at.step,
        elapsed=elapsed,
        code=code,
        reason=reason,
        route=route,
        bytes=at.bytes,
        chunks_done=at.chunks_done,
        chunks=at.chunks,
        blocks={group: tuple(ids) for group, ids in subject.blocks.items()},
        memory_safe=not isinstance(error, MemoryInDoubtError),
    )
    if isinstance(error, KvxferError):
        if error.report is not None:
            again = copy.copy(error)
            again.__cause__ = error
            error = again
        error.report = report
    return error, report


def short(blocks: Mapping[str, Sequence[int]]) -> str:
    """Block lists as messages show them."""
    parts = [f"{group}: {list(ids[:8])}{'...' if len(ids) > 8 else ''}" for group, ids in blocks.items()]
    return "{" + ", ".join(parts) + "}"
