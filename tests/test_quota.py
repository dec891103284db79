"""Places that peers share."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.prefill.role import Doubts
from kvxfer.runtime import no_op
from kvxfer.site import Quota


@pytest.mark.parametrize(("limit", "alone"), [(1, 1), (2, 2), (3, 3), (4, 3), (8, 6), (1024, 768)])
def test_a_peer_alone_has_three_quarters(limit, alone):
    quota = Quota(limit)
    assert [quota.take("a") for _ in range(limit + 1)].count(True) == alone == len(quota)


@given(limit=st.integers(1, 40), steps=st.lists(st.tuples(st.booleans(), st.integers(0, 5))))
def test_it_is_bounded_and_who_has_none_gets_one(limit, steps):
    quota, held = Quota(limit), dict.fromkeys(range(6), 0)
    for take, peer in steps:
        free = limit - sum(held.values())
        if take:
            got = quota.take(peer)
            assert got == (free > 0 and held[peer] < 3 * free)
            held[peer] += got
        elif held[peer]:
            quota.give(peer)
            held[peer] -= 1
        else:
            with pytest.raises(ValueError, match="no place"):
                quota.give(peer)
        assert len(quota) == sum(held.values()) <= limit
        assert quota._held == {peer: places for peer, places in held.items() if places}


def test_a_doubt_keeps_its_place_without_a_link_only_if_the_end_of_the_process_will_be_told():
    quota, unwatch = Quota(8), iter([no_op, lambda: None])
    site: Any = SimpleNamespace(processes=SimpleNamespace(when_ended=lambda peer, then: next(unwatch)))
    peer = SimpleNamespace(identity=SimpleNamespace(incarnation=b"p"), body=SimpleNamespace(host=None))
    ended: Any = SimpleNamespace(link=SimpleNamespace(peer=peer), peer=peer, severed=False, is_pulled=False)
    doubts = Doubts(site, quota)
    for transfer in (1, 2):
        quota.take(b"p")
        doubts.add(transfer, ended)
    doubts.on_link_lost(b"p")
    assert len(quota) == 1
