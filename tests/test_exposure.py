"""Whether an empty gate tells of all that a peer was granted."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from kvxfer.safety.doubt import Exposure


@pytest.mark.parametrize(
    ("granted", "fenced"),
    [([], False), ([7], True), ([7, 7], True), ([0], False), ([7, 0], False), ([0, 7], False), ([0, None, 7], True)],
)
def test_one_grant_that_names_no_gate_is_enough_for_it_to_tell_nothing(granted, fenced):
    """None: the peer has said that it does not use what it was granted so far."""
    generations = iter([one for one in granted if one is not None])
    site = SimpleNamespace(
        gates=SimpleNamespace(allot=lambda: 5, words=1 << 20, granted=lambda gate: next(generations)),
        fenced=set(),
        loop=SimpleNamespace(create_future=Future),
    )
    link = SimpleNamespace(peer=SimpleNamespace(identity=SimpleNamespace(incarnation=b"p")), renewals=0)
    exposure = Exposure(site, link, "x", lambda: None, frozenset())  # pyright: ignore[reportArgumentType]
    for one in granted:
        if one is None:
            exposure.void()
        else:
            assert exposure.grant(mapped=True) == one
    assert bool(exposure.fenced) is fenced
