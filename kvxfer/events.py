"""What callers may pass as `after=`: an event, a stream, or `kvxfer.READY`."""

from typing import Any, cast

from kvxfer.copy.port import READY, AllOf, Event
from kvxfer.errors import EventError
from kvxfer.geometry import CacheGeometry

__all__ = ["as_event"]


def as_event(after: Any, geometry: CacheGeometry) -> Event:
    """Turn `after=` into an event that can be queried.

    Args:
        after: A recorded CUDA event, a stream (an event is recorded on it now), `READY`, or None on CPU memory.
        geometry: Tells whether an event is needed.

    Raises:
        EventError: If it is missing for CUDA memory, was never recorded, or is none of these.
    """
    if after is None:
        if geometry.kind == "cuda":
            raise EventError(
                "after= is required for CUDA memory: pass a recorded torch.cuda.Event, a stream, or kvxfer.READY "
                "if the work on these blocks is known to be complete"
            )
        return READY
    if after is READY or isinstance(after, AllOf):
        return READY if after is READY else after
    if isinstance(after, type):  # its methods are there, and none of them can be called
        raise EventError(
            f"after= must be an event, a stream or kvxfer.READY, not the class {after.__name__} itself; "
            "pass an event that was recorded, or a stream"
        )
    record = getattr(after, "record_event", None)
    if callable(record):  # a torch.cuda.Stream
        return cast("Event", record())
    if not callable(getattr(after, "query", None)):
        raise EventError(f"after= must be an event, a stream or kvxfer.READY, not {type(after).__name__}")
    # torch makes the CUDA event when it is first recorded; until then its handle is 0 and query() says True
    if getattr(after, "cuda_event", None) == 0 or getattr(after, "event_id", None) == 0:
        raise EventError("the event passed as after= was never recorded")
    recorded: Event = after
    return recorded
