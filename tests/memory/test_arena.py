"""The arena's books: extents, gaps, fairness between peers, quarantine."""

import random
import time
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import ArenaError
from kvxfer.memory import books as memory
from kvxfer.memory.books import Gaps

UNIT = 512
BASE = 1 << 40
FREE, RESERVED, WRITING, QUARANTINED = memory.ExtentState


def make(units: int = 64, *, max_overtakes: int = memory.Share.max_overtakes) -> memory.Share:
    share = memory.Share("receive", base=BASE, capacity=units * UNIT)
    share.max_overtakes = max_overtakes
    return share


def ask(share: memory.Share, peer: str, units: int) -> memory.Request:
    return share.request(peer, units * UNIT)


def take(share: memory.Share, peer: str, units: int) -> memory.Extent:
    request = ask(share, peer, units)
    ((served, extent),) = granted(share)
    assert served is request
    return extent


def granted(share: memory.Share) -> list[tuple[memory.Request, memory.Extent]]:
    """Who is served now, and nobody is refused."""
    decisions = share.advance()
    found = [(request, answer) for request, answer in decisions if isinstance(answer, memory.Extent)]
    assert len(found) == len(decisions)
    return found


def names(share: memory.Share) -> list[str]:
    """Who is served now."""
    return [request.peer for request, _ in granted(share)]


class TestGaps:
    @pytest.mark.parametrize(("offset", "length"), [(0, 50), (50, 100), (250, 100), (-10, 10), (390, 20), (120, 0)])
    def test_what_is_free_or_outside_cannot_be_given_back(self, offset, length):
        gaps = Gaps(400)
        gaps.take(400)
        gaps.give(0, 100)
        gaps.give(300, 90)
        before = dict(gaps._lengths)
        with pytest.raises(memory.InvariantError):
            gaps.give(offset, length)
        assert gaps._lengths == before

    @given(st.lists(st.tuples(st.booleans(), st.integers(1, 20), st.integers(0, 1000)), max_size=80))
    def test_gaps_are_what_a_map_of_bytes_says(self, steps):
        gaps = Gaps(100)
        taken: list[tuple[int, int]] = []
        used = [False] * 100
        for grow, length, pick in steps:
            if grow or not taken:
                fitting = [run for run in _runs(used) if run[1] >= length]
                if not fitting:
                    with pytest.raises(memory.InvariantError):
                        gaps.take(length)
                    continue
                best = min(fitting, key=lambda run: (run[1], run[0]))[0]
                assert gaps.take(length) == best
                taken.append((best, length))
                used[best : best + length] = [True] * length
            else:
                offset, given = taken.pop(pick % len(taken))
                gaps.give(offset, given)
                used[offset : offset + given] = [False] * given
            assert [(offset, gaps._lengths[offset]) for offset in gaps._offsets] == _runs(used)
            assert gaps.free == used.count(False)
            assert gaps.largest == max((run[1] for run in _runs(used)), default=0)


def _runs(used: list[bool]) -> list[tuple[int, int]]:
    free = (list(run) for busy, run in groupby(range(len(used)), used.__getitem__) if not busy)
    return [(run[0], len(run)) for run in free]


class TestRefusals:
    def test_an_extent_of_another_share_is_refused(self):
        extent = take(make(), "a", 4)
        other = make()
        take(other, "a", 4)
        with pytest.raises(memory.InvariantError, match="another share"):
            other.release(extent)
        assert extent.state is RESERVED

    def test_larger_than_the_share_is_refused_at_once_with_both_numbers(self):
        share = make(8)
        with pytest.raises(ArenaError, match=f"{8 * UNIT + 1} bytes.*{8 * UNIT} bytes"):
            share.request("a", 8 * UNIT + 1)
        assert share.snapshot().waiting_requests == 0

    def test_a_share_without_bytes_holds_nothing(self):
        share = make(0)
        with pytest.raises(ArenaError, match="is 0 bytes"):
            share.request("a", 1)
        assert share.advance() == []

    def test_too_much_in_quarantine_fails_fast_what_cannot_be_served_from_the_rest(self):
        share = make(16)
        silent = [take(share, "s", 4), take(share, "t", 4), take(share, "u", 1)]
        for extent in silent:
            share.quarantine(extent, "silent")
        take(share, "h", 1)  # which it will give back
        ask(share, "a", 7)
        with pytest.raises(
            ArenaError, match=f"{8 * UNIT} bytes.*{9 * UNIT} are in quarantine.*is {7 * UNIT} bytes"
        ) as caught:
            ask(share, "a", 8)
        assert f"s ({4 * UNIT} bytes)" in str(caught.value)
        share.settle(silent[2])
        ask(share, "a", 9)  # half is not more than half: it waits
        assert share.snapshot().waiting_requests == 2

    def test_who_waits_already_is_refused_when_the_quarantine_grows(self):
        share = make(16)
        extents = [take(share, peer, 3) for peer in "stu"]
        large, small = ask(share, "a", 12), ask(share, "b", 7)
        assert [request for request, _ in granted(share)] == [small]
        for extent in extents:
            assert share.advance() == []
            share.quarantine(extent, "silent")
        ((request, error),) = share.advance()
        assert request is large
        assert isinstance(error, ArenaError)
        assert share.advance() == []

    def test_who_has_waited_in_vain_is_told_for_what(self):
        share = make(4)
        take(share, "h", 4)
        assert "waited 4.000 s for the receive share" in str(share.expiry_error(ask(share, "c", 1), 4.0))


class TestFairness:
    def test_peers_take_turns_and_a_peer_is_first_come_first_served(self):
        share = make(64)
        requests = [ask(share, peer, 1) for peer in "aaabbc"]
        served = granted(share)
        assert [request.peer for request, _ in served] == list("abcaba")
        assert [request for request, _ in served if request.peer == "a"] == requests[:3]

    def test_alone_a_peer_has_at_most_three_quarters(self):
        share = make(16)
        for _ in range(16):
            ask(share, "a", 1)
        served = granted(share)
        assert len(served) == 12
        share.release(served[5][1])
        assert len(granted(share)) == 1

    def test_a_first_request_beyond_the_cap_is_served(self):
        share = make(16)
        assert take(share, "a", 14).length == 14 * UNIT

    @pytest.mark.parametrize(("holding", "waiting"), [("", "abc"), ("h", "ab")])
    def test_with_others_that_wait_or_hold_a_peer_has_its_fair_share(self, holding, waiting):
        share = make(12)
        for peer in holding:
            take(share, peer, 1)
        for peer in waiting:
            for _ in range(12):
                ask(share, peer, 1)
        assert sorted(names(share)) == sorted(waiting * 4)

    def test_over_its_fair_share_a_peer_waits_until_it_holds_nothing_and_blocks_nobody(self):
        share = make(32, max_overtakes=0)
        first = take(share, "a", 12)
        big = ask(share, "a", 14)
        ask(share, "b", 4)
        ask(share, "b", 1)
        assert names(share) == ["b", "b"]
        assert share.snapshot().largest_gap_bytes > big.length
        share.release(first)
        ((request, _),) = granted(share)
        assert request is big

    @pytest.mark.parametrize("most", [0, 3])
    @pytest.mark.parametrize("at_once", [True, False])
    def test_a_large_request_is_overtaken_a_bounded_number_of_times(self, most, at_once):
        share = make(16, max_overtakes=most)
        held = [take(share, peer, 4) for peer in "wxyz"]
        large = ask(share, "large", 16)
        share.release(held.pop())
        for turn in range(10):
            ask(share, f"small{turn}", 1)
            if not at_once:
                held += [extent for _, extent in granted(share)]
        held += [extent for _, extent in granted(share)]
        assert [extent.peer for extent in held[3:]] == [f"small{turn}" for turn in range(most)]
        assert granted(share) == []
        for extent in held:
            share.release(extent)
        assert granted(share)[0][0] is large

    def test_a_withdrawn_request_no_longer_blocks(self):
        share = make(16, max_overtakes=0)
        take(share, "h", 4)
        large = ask(share, "large", 16)
        ask(share, "small", 1)
        share.withdraw(large)
        assert names(share) == ["small"]

    @given(
        seed=st.integers(0, 2**32),
        size=st.integers(1, 32),
        peers=st.integers(1, 5),
        overtakes=st.integers(0, 5),
        own=st.integers(0, 6),
    )
    @settings(max_examples=60, deadline=None)
    def test_nobody_starves_whatever_the_others_do(self, seed, size, peers, overtakes, own):
        """The others always have something small waiting; the victim is served after a bounded number of grants."""
        rng = random.Random(seed)
        share = make(32, max_overtakes=overtakes)
        for _ in range(own):
            ask(share, "victim", rng.randint(1, 4))
        victim = ask(share, "victim", size)
        live: list[memory.Extent] = []
        grants = 0
        for _ in range(2000):
            for peer in range(peers):
                while sum(request.peer == str(peer) for request in share._queue.requests()) < 2:
                    ask(share, str(peer), rng.randint(1, 6))
            for request, extent in granted(share):
                if request is victim:
                    return
                grants += 1
                live.append(extent)
            # what is in use at first, then for each request of the victim: a turn of everybody and those that overtake
            assert grants <= 32 + (own + 1) * (overtakes + 2 * peers + 32)
            share.release(live.pop(rng.randrange(len(live))))
        pytest.fail("the victim was never served")


class TestQuarantine:
    def test_what_only_the_end_of_a_quarantine_can_serve_blocks_nobody(self):
        share = make(16, max_overtakes=0)
        silent = take(share, "s", 4)
        share.quarantine(silent, "silent")
        large = ask(share, "a", 13)
        ask(share, "b", 2)
        ((request, extent),) = granted(share)
        assert request.peer == "b"
        share.settle(silent)
        assert granted(share) == []  # now it blocks, for b still holds two
        share.release(extent)
        ((request, _),) = granted(share)
        assert request is large

    def test_a_peer_with_a_little_in_quarantine_is_still_served_among_many(self):
        share = make(16)
        share.quarantine(take(share, "a", 2), "silent")
        for peer in "abcdefgh" * 2:
            ask(share, peer, 1)
        served = names(share)
        assert served[:8] == list("abcdefgh")  # it is at its fair share, but none of that is of use to it
        assert served[8:] == list("bcdefg")

    def test_who_waits_costs_little_while_much_is_in_quarantine(self):
        share = make(2048)
        for extent in share.take("silent", UNIT, 1536):
            share.quarantine(extent, "silent")
        for peer in "abcdefgh" * 500:
            ask(share, peer, 1)
        (_, extent), *_ = granted(share)
        share.release(extent)
        began = time.perf_counter()
        granted(share)
        assert time.perf_counter() - began < 0.1  # a hundred times as long as it takes, and less than a look at each
