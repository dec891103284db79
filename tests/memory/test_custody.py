"""The books of the caller's blocks: who writes them, and who may still touch them."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvxfer.errors import BlocksError
from kvxfer.memory.books import Custody, InvariantError


def refused(custody: Custody, blocks) -> str:
    with pytest.raises(BlocksError) as caught:
        custody.check(blocks)
    return str(caught.value)


def test_snapshot_counts_by_holder():
    custody = Custody()
    custody.hold("fetch-1", {"g": [1, 2], "h": [1]})
    custody.doubt_reads("offer-1", {"g": [5]})
    shot = custody.snapshot()
    assert (shot.held_blocks, shot.doubtful_blocks) == (3, 1)
    assert (shot.holders["fetch-1"].blocks, shot.holders["fetch-1"].in_doubt) == (3, False)
    assert shot.holders["offer-1"].in_doubt


class Books(RuleBasedStateMachine):
    """Any order of calls against a naive model: a list of (holder, kind, set of blocks)."""

    holders = st.sampled_from(["f1", "f2", "f3", "f4"])
    lists = st.dictionaries(st.sampled_from("gh"), st.lists(st.integers(0, 7), max_size=4, unique=True), max_size=2)

    def __init__(self):
        super().__init__()
        self.custody = Custody()
        self.entries: dict[str, tuple[str, set[tuple[str, int]]]] = {}

    def taken(self) -> set[tuple[str, int]]:
        return set().union(*(blocks for _, blocks in self.entries.values()))

    @rule(holder=holders, blocks=lists)
    def hold(self, holder, blocks):
        pairs = [(group, block) for group, ids in blocks.items() for block in ids]
        if holder in self.entries:
            with pytest.raises(InvariantError):
                self.custody.hold(holder, blocks)
        elif self.taken() & set(pairs):
            with pytest.raises(BlocksError):
                self.custody.hold(holder, blocks)
        else:
            self.custody.hold(holder, blocks)
            self.entries[holder] = ("held", set(pairs))

    @rule(holder=holders, blocks=lists)
    def doubt_reads(self, holder, blocks):
        if holder in self.entries:
            with pytest.raises(InvariantError):
                self.custody.doubt_reads(holder, blocks)
        else:
            self.custody.doubt_reads(holder, blocks)
            self.entries[holder] = ("doubt", {(group, block) for group, ids in blocks.items() for block in ids})

    @rule(holder=holders)
    def doubt(self, holder):
        kind, mine = self.entries.get(holder, ("", set()))
        if kind != "held":
            with pytest.raises(InvariantError):
                self.custody.doubt(holder)
        else:
            self.custody.doubt(holder)
            self.entries[holder] = ("doubt", mine)

    @rule(holder=holders, end=st.sampled_from(["release", "settle"]))
    def end(self, holder, end):
        kind, _ = self.entries.get(holder, ("", set()))
        if kind != {"release": "held", "settle": "doubt"}[end]:
            with pytest.raises(InvariantError):
                getattr(self.custody, end)(holder)
        else:
            getattr(self.custody, end)(holder)
            del self.entries[holder]

    @invariant()
    def exactly_the_taken_blocks_are_refused(self):
        taken = self.taken()
        for group in "gh":
            for block in range(8):
                if (group, block) in taken:
                    message = refused(self.custody, {group: [block]})
                    assert any(name in message for name, (_, mine) in self.entries.items() if (group, block) in mine)
                else:
                    self.custody.check({group: [block]})


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
