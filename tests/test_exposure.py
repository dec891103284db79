"""Whether an empty gate tells of all that a peer was granted."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from kvxfer.safety.doubt import Exposure
from kvxfer.safety.fence import SHARED_GATE


def exposed(**gates):
    """To a peer that passes words in memory of a GPU."""
    site = SimpleNamespace(
        gates=SimpleNamespace(words=1 << 20, **gates), fenced={}, loop=SimpleNamespace(create_future=Future)
    )
    link = SimpleNamespace(peer=SimpleNamespace(identity=SimpleNamespace(incarnation=b"p")), renewals=0)
    return Exposure(site, link, "x", lambda: None, frozenset())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("granted", "fenced"),
    [([], False), ([7], True), ([7, 7], True), ([0], False), ([7, 0], False), ([0, 7], False), ([0, None, 7], True)],
)
def test_one_grant_that_names_no_gate_is_enough_for_it_to_tell_nothing(granted, fenced):
    """None: the peer has said that it does not use what it was granted so far."""
    generations = iter([one for one in granted if one is not None])
    exposure = exposed(allot=lambda: 5, granted=lambda gate: next(generations))
    for one in granted:
        if one is None:
            exposure.void()
        else:
            assert exposure.grant(mapped=True) == one
    assert bool(exposure.fenced) is fenced


def test_it_leads_through_one_gate_though_another_becomes_free():
    """All were taken when it was granted first: an empty gate would say nothing of who passes the shared one."""
    free = iter([SHARED_GATE, 5])
    exposure = exposed(allot=lambda: next(free), granted=lambda gate: gate << 32 | 1)
    assert [exposure.grant(mapped=True) >> 32 for _ in range(2)] == [SHARED_GATE, SHARED_GATE]
    exposure.void()
    assert exposure.grant(mapped=True) >> 32 == 5
