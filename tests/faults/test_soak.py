"""A short soak; see `soak`."""

import json

import pytest
import soak

pytestmark = pytest.mark.timeout(110)


async def test_a_short_soak(monkeypatch):
    monkeypatch.setattr(soak, "KILLS_PER_TRANSFER", 1 / 100)
    said = []
    figures = await soak.Soak(280, say=said.append).run()
    assert figures.problems() == []
    assert figures.ended >= 280
    assert figures.ok > 210
    assert figures.faults["kill"] >= 1
    assert json.dumps(figures.__dict__)
    assert said


def test_what_grows_or_is_left_is_a_problem():
    held = {"resident_bytes": 1 << 28, "fds": 50, "threads": 9}
    figures = soak.Figures(before=held, after=held)
    assert figures.problems() == []
    grown = {what: number + (1 << 27) for what, number in held.items()}
    assert len(soak.Figures(before=held, after=grown, left={"fd": 1}, wrong=["r: 3 wrong elements"]).problems()) == 5
