"""What is taken for `after=`, and what is refused by name."""

from typing import Any

import pytest
import torch

from kvxfer.copy.port import READY, as_event
from kvxfer.errors import EventError
from kvxfer.geometry import CacheGeometry, CacheTensor


@pytest.fixture
def geometry() -> CacheGeometry:
    return CacheGeometry.of([CacheTensor(torch.zeros(2, 4, 8), "block token dim", layers=[0])])


class Fired:
    def query(self) -> bool:
        return True


class Stream:
    def __init__(self) -> None:
        self.recorded = Fired()

    def record_event(self) -> Fired:
        return self.recorded


def test_events_streams_and_ready_are_taken(geometry: CacheGeometry) -> None:
    event, stream = Fired(), Stream()
    assert as_event(event, geometry) is event
    assert as_event(stream, geometry) is stream.recorded
    assert as_event(READY, geometry) is READY
    assert as_event(None, geometry) is READY, "CPU memory needs none"


@pytest.mark.parametrize("after", [type(READY), Fired, Stream, torch.cuda.Event, torch.cuda.Stream])
def test_a_class_is_no_event(geometry: CacheGeometry, after: Any) -> None:
    with pytest.raises(EventError, match=f"not the class {after.__name__} itself; pass an event that was recorded"):
        as_event(after, geometry)


@pytest.mark.parametrize("after", ["READY", 0, True, object()])
def test_anything_else_is_refused(geometry: CacheGeometry, after: Any) -> None:
    with pytest.raises(EventError, match=f"a stream or kvxfer.READY, not {type(after).__name__}"):
        as_event(after, geometry)
