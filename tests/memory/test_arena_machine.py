"""The books of a share against a naive model, in any order of calls."""

from functools import partial
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer.errors import ArenaError
from kvxfer.memory.books import TRANSITIONS, Extent, ExtentState, InvariantError, Request, Share

UNIT = 512
BASE = 1 << 40
FREE, RESERVED, WRITING, QUARANTINED = ExtentState


def _gaps(used: list[bool]) -> list[int]:
    return [len(gap) for gap in "".join("x" if busy else " " for busy in used).split("x")]


class Books(RuleBasedStateMachine):
    """Any order of calls against a naive model: a list of who should have what."""

    UNITS = 32

    def __init__(self):
        super().__init__()
        self.share = Share("receive", base=BASE, capacity=self.UNITS * UNIT + 100)
        self.share.max_overtakes = 2
        self.waiting: dict[Request, None] = {}
        self.live: dict[Extent, ExtentState] = {}
        self.over: list[Request] = []
        self.released: list[Extent] = []

    @rule(peer=st.sampled_from("abcd"), nbytes=st.integers(1, UNITS * UNIT + 600))
    def request(self, peer, nbytes):
        length = -(-nbytes // UNIT) * UNIT
        doubtful = sum(extent.length for extent, state in self.live.items() if state is QUARANTINED)
        hopeless = length > self.reachable() and 2 * doubtful > self.share.capacity
        if length > self.share.capacity or hopeless:
            with pytest.raises(ArenaError):
                self.share.request(peer, nbytes)
        else:
            self.waiting[self.share.request(peer, nbytes)] = None

    @rule()
    def advance(self):
        self.decided(self.share.advance())
        # a peer that waits alone and holds nothing is served whenever a gap is large enough
        if len({request.peer for request in self.waiting}) == 1:
            first = next(iter(self.waiting))
            if not self.share.held.get(first.peer, 0):
                assert first.length > max(_gaps(self.used())) * UNIT

    def decided(self, decisions: list[tuple[Request, Extent | ArenaError]]) -> None:
        doubtful = sum(extent.length for extent, state in self.live.items() if state is QUARANTINED)
        for request, error in decisions:
            if isinstance(error, ArenaError):
                assert 2 * doubtful > self.share.capacity
                assert request.length > self.reachable()
                del self.waiting[request]
        for request, extent in decisions:
            if isinstance(extent, ArenaError):
                continue
            assert request is next(other for other in self.waiting if other.peer == request.peer)  # first come
            del self.waiting[request]
            held = [other for other in self.live if other.peer == extent.peer]
            quarantined = sum(other.length for other in held if self.live[other] is QUARANTINED)
            assert quarantined * 4 <= self.share.capacity
            if any(self.live[other] is not QUARANTINED for other in held):
                assert sum(other.length for other in held) + extent.length <= self.share.capacity * 3 // 4
            assert extent.state is RESERVED
            assert extent.nbytes == request.nbytes
            assert extent not in self.live
            assert extent not in self.released
            self.live[extent] = RESERVED
            self.over.append(request)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 1000), move=st.sampled_from(["begin_writing", "release", "quarantine", "settle"]))
    def move(self, pick, move):
        extent = list(self.live)[pick % len(self.live)]
        state = self.live[extent]
        target = {"begin_writing": WRITING, "quarantine": QUARANTINED}.get(move, FREE)
        legal = target in TRANSITIONS[state] and (target is not FREE or (move == "settle") == (state is QUARANTINED))
        call = partial(self.share.quarantine, reason="why") if move == "quarantine" else getattr(self.share, move)
        if not legal:
            with pytest.raises(InvariantError):
                call(extent)
            return
        if move == "begin_writing":
            self.more_like_it(extent, pick % 4)
        else:
            call(extent)
        if target is FREE:
            del self.live[extent]
            self.released.append(extent)
        else:
            self.live[extent] = target

    def more_like_it(self, extent: Extent, more: int) -> None:
        first, *others = self.share.begin_writing(extent, more)
        assert first is extent
        assert len(others) <= (0 if self.waiting else more)
        for other in others:
            assert (other.peer, other.nbytes, other.state) == (extent.peer, extent.nbytes, WRITING)
            self.live[other] = WRITING
        if others:  # no more than one peer may have
            assert sum(one.length for one in self.live if one.peer == extent.peer) <= self.share.capacity * 3 // 4
        if len(others) < more and not self.waiting:  # as many as there are
            assert not self.share.take(extent.peer, extent.nbytes)

    @precondition(lambda self: self.released)
    @rule(pick=st.integers(0, 1000), move=st.sampled_from(["begin_writing", "release", "settle"]))
    def stale(self, pick, move):
        with pytest.raises(InvariantError, match="released already"):
            getattr(self.share, move)(self.released[pick % len(self.released)])

    @precondition(lambda self: self.waiting or self.over)
    @rule(pick=st.integers(0, 1000))
    def withdraw(self, pick):
        known = [*self.waiting, *self.over]
        request = known[pick % len(known)]
        self.share.withdraw(request)
        if self.waiting.pop(request, 0) is None:
            self.over.append(request)

    def used(self) -> list[bool]:
        used = [False] * self.UNITS
        for extent in self.live:
            for unit in range(extent.offset // UNIT, (extent.offset + extent.length) // UNIT):
                assert not used[unit], "two live extents overlap"
                used[unit] = True
        return used

    def reachable(self) -> int:
        used = [False] * self.UNITS
        for extent, state in self.live.items():
            if state is QUARANTINED:
                first, last = extent.offset // UNIT, (extent.offset + extent.length) // UNIT
                used[first:last] = [True] * (last - first)
        return max(_gaps(used)) * UNIT

    @invariant()
    def every_byte_is_in_exactly_one_state(self):
        shot = self.share.snapshot()
        gaps = _gaps(self.used())
        assert shot.capacity_bytes == self.UNITS * UNIT
        by_state = {RESERVED: shot.reserved_bytes, WRITING: shot.writing_bytes, QUARANTINED: shot.quarantined_bytes}
        for state, count in by_state.items():
            assert count == sum(extent.length for extent in self.live if self.live[extent] is state)
        assert shot.free_bytes == sum(gaps) * UNIT
        assert shot.free_bytes + sum(by_state.values()) == shot.capacity_bytes
        assert shot.largest_gap_bytes == max(gaps) * UNIT
        assert [row.offset for row in shot.extents] == sorted(extent.offset for extent in self.live)
        assert all(low.offset + low.length <= high.offset for low, high in pairwise(shot.extents))
        for peer in "abcd":
            mine = sum(extent.length for extent in self.live if extent.peer == peer)
            assert self.share.held.get(peer, 0) == mine

    @invariant()
    def extents_are_aligned_and_in_the_state_that_was_asked_for(self):
        for extent, state in self.live.items():
            assert extent.state is state
            assert extent.address == BASE + extent.offset
            assert extent.offset % UNIT == extent.length % UNIT == 0
            assert 0 <= extent.length - extent.nbytes < UNIT

    @invariant()
    def who_waits_is_counted(self):
        assert self.share.snapshot().waiting_requests == len(self.waiting)

    def teardown(self):
        """Once extents are released, everybody who waits is served: nobody is forgotten, and no byte lost."""
        for _ in range(len(self.waiting) + 1):
            for extent, state in list(self.live.items()):
                (self.share.settle if state is QUARANTINED else self.share.release)(extent)
                del self.live[extent]
            self.decided(self.share.advance())
        assert not self.waiting
        assert not self.live
        assert self.share.snapshot().largest_gap_bytes == self.share.capacity
        assert self.share.live == self.share.held == self.share._doubtful == {}


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
