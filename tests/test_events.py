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


@pytest.mark.parametrize(("after", "words"), [
    *((one, f"not the class {one.__name__} itself; pass an event that was recorded")
      for one in (type(READY), Fired, Stream, torch.cuda.Event, torch.cuda.Stream)),
    *((one, f"a stream or kvxfer.READY, not {type(one).__name__}") for one in ("READY", 0, True, object())),
])  # fmt: skip
def test_anything_else_is_refused_and_a_class_by_its_name(geometry: CacheGeometry, after: Any, words: str) -> None:
    with pytest.raises(EventError, match=words):
        as_event(after, geometry)
