"""What callers may pass as `after=`: an event, a stream, or `kvxfer.READY`."""

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from kvxfer.copy.port import READY, Event
from kvxfer.errors import EventError
from kvxfer.geometry import CacheGeometry

__all__ = ["AllOf", "Until", "as_event", "join"]


class AllOf:
    """Has happened when all of its events have."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events: Final = list(events)

    def query(self) -> bool:
        """Whether all have happened; those that have are not asked again."""
        while self._events:
            if not self._events[-1].query():
                return False
            self._events.pop()
        return True


class Until:
    """Has happened when its event has, or when nobody waits for it any more: an event that never fires strands nothing.

    Args:
        event: What is waited for.
        given_up: Whether the wait is over anyway. Whoever asks first must not act as if the event had happened.
    """

    def __init__(self, event: Event, given_up: Callable[[], bool]) -> None:
        self._event: Final = event
        self._given_up: Final = given_up

    def query(self) -> bool:
        """Whether it has happened, or does not matter any more."""
        return self._given_up() or self._event.query()


def join(events: Sequence[Event]) -> Event:
    """One event for several."""
    if not events:
        return READY
    return events[0] if len(events) == 1 else AllOf(events)


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
    if getattr(after, "cuda_event", None) == 0:
        raise EventError("the event passed as after= was never recorded")
    recorded: Event = after
    return recorded
