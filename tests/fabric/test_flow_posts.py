"""Posts of a flow: one behind the other, a gate for each, and what remains of one that ends in doubt."""

import numpy as np
import pytest
from msgspec import structs
from rigs import PART, Outcome, Rig, ending

from kvxfer.copy import records
from kvxfer.copy.port import NO_PIECES, CopyJob, Direction, Operation, Post

STEPS = 5


class Posting:
    """A flow that posts so many parts to a peer, or reads them from it; each has a lease of its own."""

    def __init__(
        self, rig: Rig, *, way=None, width=2, allowed=STEPS, doing=Operation.WRITE, leases=(1e9,) * STEPS
    ) -> None:
        self.rig, self.counts, self.doing = rig, [], doing
        rig.results["x"] = []
        late = rig.late.append
        common = Post("b", doing, NO_PIECES, NO_PIECES, late=late)
        steps = []
        for number, until in enumerate(leases):
            here, there = rig.piece(PART, peer="b", at=number * PART)
            steps.append(CopyJob(None, until=until, post=Post("b", doing, here, there, late=late)))
        passage = way.passage if way else None
        job = CopyJob(None, rig.results["x"].append, until=1e9, passage=passage, owner="x", post=common)
        self.flow = rig.mover.flow(
            job,
            Direction.GATHER,
            steps,
            total=STEPS,
            allowed=allowed,
            width=width,
            progress=lambda told: self.counts.append(told.steps),
        )

    def landed(self):
        written = self.rig.memory["b"] if self.doing is Operation.WRITE else self.rig.source == 0
        return int(np.count_nonzero(written)) // PART


@pytest.mark.parametrize("doing", Operation)
async def test_steps_are_posted_one_behind_the_other(rig, way, doing):
    posting = Posting(rig, way=way, width=2, doing=doing)
    rig.network.hold("b")
    rig.step(10)
    assert (rig.network.held("b"), way.inside, posting.counts) == (2, 2, []), "no more than may be under way"
    rig.network.release("b", posts=1)
    rig.step(10)
    assert (posting.counts, rig.network.held("b"), way.inside) == ([1], 2, 2)
    rig.network.release("b")
    rig.step(20, seconds=0.5)
    result = rig.result()
    assert (ending(result), result.steps, posting.landed()) == (Outcome.DONE, STEPS, STEPS)
    assert result.wire > 0
    assert (way.inside, way.lent, rig.counted(), rig.late) == (0, 0, [0] * 5, [])


async def test_no_step_is_posted_after_its_own_lease(make):
    """Whatever the lease of those behind it, and of them all: that which ends first counts."""
    for ended, of_all, posted in ((3, 1e9, 3), (4, 200.0, 4), (4, 105.0, 3)):
        rig = await make()
        leases = [110.0 if number == ended else 1e9 for number in range(STEPS)]
        posting = Posting(rig, allowed=0, width=1, doing=Operation.READ, leases=leases)
        rig.mover.allow(posting.flow, 3, until=of_all)
        rig.step(20, seconds=0.01)
        rig.runtime.time = 111.0
        rig.mover.allow(posting.flow, STEPS)
        rig.step(20)
        result = rig.result()
        assert (ending(result), result.error, result.steps, posting.landed()) == (Outcome.STOPPED, None, posted, posted)


async def test_a_lease_that_is_renewed_is_not_that_of_a_step_under_way(rig):
    posting = Posting(rig, allowed=0, width=1, leases=(110.0,) * STEPS)
    rig.network.hold("b")
    rig.mover.allow(posting.flow, 2, until=105.0)
    rig.step(5)
    rig.mover.allow(posting.flow, STEPS, until=1e9)
    rig.step(5)
    rig.network.release("b", posts=1)
    rig.runtime.time = 109.0
    rig.step(3)
    assert (posting.counts, rig.network.held("b")) == ([1], 1)
    rig.runtime.time = 110.0
    rig.network.release("b")
    rig.step(9)
    assert (ending(rig.result()), posting.landed()) == (Outcome.STOPPED, 2)


@pytest.mark.parametrize("doing", Operation)
async def test_what_stands_still_is_in_doubt_until_it_has_ended(make, doing):
    rig = await make(no_progress_timeout=1.0)
    way = rig.way()
    posting = Posting(rig, way=way, width=2, allowed=4, doing=doing)
    rig.network.hold("b")
    rig.step()
    rig.step(12, seconds=0.2)
    result = rig.result()
    assert (ending(result), result.may_move, result.steps, rig.late) == (Outcome.IN_DOUBT, True, 0, [])
    parted = []
    rig.mover.part_with("b", lambda: parted.append(len(rig.late)))
    assert (way.lent, bool(posting.flow.lefts), parted) == (1, True, [])
    held = [owner for owner, (_, copies) in rig.mover._owners.items() if copies]
    assert held == [("peer", "b")], "its number is not given to another"
    rig.mover.allow(posting.flow, STEPS)
    rig.network.release("b", posts=1)
    rig.step(10, seconds=0.1)
    assert (rig.late, way.lent, parted) == ([], 1, []), "one of two has ended"
    rig.network.release("b")
    rig.step(10, seconds=0.1)
    assert (rig.late, way.inside, way.lent, rig.counted(), bool(posting.flow.lefts)) == ([True], 0, 0, [0] * 5, False)
    assert parted == [0], "once, when nothing is looked at any more"
    assert posting.landed() == 2, "none was posted since"
    assert (rig.mover._flows, rig.state[records.OWNERS]) == ({}, 0)


@pytest.mark.parametrize("doing", Operation)
async def test_a_doubt_ends_for_this_side_when_the_agent_was_made_anew(make, doing):
    rig = await make(no_progress_timeout=1.0)
    way = rig.way()
    posting = Posting(rig, way=way, width=2, doing=doing)
    rig.network.hold("b")
    rig.step()
    rig.step(12, seconds=0.2)
    assert ending(rig.result()) is Outcome.IN_DOUBT
    assert await rig.rebuilt()
    rig.step(3)
    assert rig.late == [False], "what has left this side may land"
    written = doing is Operation.WRITE
    assert (bool(posting.flow.lefts), way.lent) == (written, written), (
        "the lock is kept where the peer's memory is written"
    )
    rig.mover.forget(posting.flow)
    rig.step(3)
    assert (rig.late, bool(posting.flow.lefts), way.lent, rig.counted()) == ([False], False, 0, [0] * 5)


async def test_one_of_which_a_step_has_left_for_a_peer_that_is_gone_is_in_doubt_until_nobody_asks(rig, way):
    """Nothing of this side moves any more, and nothing tells when the rest has ended."""
    rig.network.break_next("b", skip=1, after_bytes=24, disconnected=True)
    made = Posting(rig, way=way).flow
    rig.step(20)
    outcome = rig.result()
    assert (ending(outcome), outcome.may_move, outcome.steps) == (Outcome.IN_DOUBT, False, 1)
    assert (rig.late, way.inside, way.lent, bool(made.lefts)) == ([], 1, 1, True)
    rig.mover.forget(made)
    rig.step(4)
    assert (rig.late, way.inside, way.lent, bool(made.lefts), rig.counted()) == ([], 0, 0, False, [0] * 5)


async def test_that_a_doubt_is_over_is_told_also_where_a_signal_interrupted_the_end_of_its_flow(make):
    """The step in doubt had ended before the flow did: nothing else is to come."""
    rig = await make(no_progress_timeout=0.5)
    rig.network.hold("b")
    flow = (posting := Posting(rig, allowed=1)).flow
    rig.step(3, seconds=0.1)
    rig.mover.allow(flow, 2)
    rig.step(4, seconds=0.1)
    rig.network.release("b", posts=1)
    rig.step(3, seconds=0.02)

    def interrupted(_):
        raise KeyboardInterrupt

    flow.job = structs.replace(flow.job, done=interrupted)
    assert (posting.landed(), flow.over, rig.late) == (1, False, [])
    rig.network.release("b")
    with pytest.raises(KeyboardInterrupt):
        rig.step(10)
    rig.step(10)
    assert rig.late == [True]


async def test_the_mover_sleeps_behind_what_is_in_doubt_also_of_a_flow_that_had_more_to_do(rig, way):
    rig.network.break_next("b", skip=1, after_bytes=24, disconnected=True)
    flow = Posting(rig, way=way, width=1).flow
    rig.step(20)
    assert (ending(rig.result()), bool(flow.lefts)) == (Outcome.IN_DOUBT, True)
    assert rig.step(seconds=0.1) is None
    rig.mover.forget(flow)
    rig.step(4)


async def test_what_is_not_asked_for_any_more_is_not_what_is_in_its_row_by_now(make):
    """Before the loop hears that something in doubt has ended, another is in doubt there, and keeps its own lock."""
    rig = await make(no_progress_timeout=0.5)
    one, two = rig.way(), rig.way()
    rig.network.hold("b")
    first = await rig.given_up(way=one, nbytes=PART)
    rig.network.release("b")
    rig.runtime.time += 0.2
    rig.machine.step()
    rig.network.break_next("b", after_bytes=24, disconnected=True)
    second = rig.post("y", PART, way=two)
    for _ in range(4):
        rig.machine.step()
    assert (one.inside, two.inside) == (0, 1)
    rig.mover.forget(first)
    rig.step(2)
    assert (rig.late, bool(first.lefts), one.lent) == ([True], False, 0)
    assert (two.inside, two.lent, bool(second.lefts)) == (1, 1, True)
    rig.mover.forget(second)
    rig.step(2)
    assert (two.inside, two.lent, bool(second.lefts)) == (0, 0, False)


@pytest.mark.parametrize("ends", [True, False], ids=["", "not asked for any more"])
async def test_of_two_steps_in_doubt_the_one_that_ends_does_not_speak_for_the_one_that_has_left(make, ends):
    rig = await make(no_progress_timeout=0.5)
    way = rig.way()
    rig.network.hold("b")
    made = Posting(rig, way=way, allowed=1).flow
    rig.step()
    rig.network.mend("b")
    rig.network.break_next("b", after_bytes=24, disconnected=True)
    rig.mover.allow(made, 2)
    rig.step()
    rig.step(8, seconds=0.2)
    outcome = rig.result()
    assert (ending(outcome), outcome.may_move, outcome.steps) == (Outcome.IN_DOUBT, True, 0)
    assert (rig.late, way.inside) == ([], 2)
    if ends:
        rig.network.release("b")
        rig.step(3, seconds=0.2)
        assert (rig.late, way.inside, bool(made.lefts)) == ([False], 1, True)
    rig.mover.forget(made)
    rig.step(4, seconds=0.2)
    assert (rig.late, way.inside, way.lent, bool(made.lefts)) == ([False] * ends, 0, 0, False)
    assert rig.counted() == [0] * 5


async def test_what_nobody_asks_for_gives_its_lock_back_though_the_agent_is_made_anew_before_it_was_looked_at(make):
    rig = await make(no_progress_timeout=0.5)
    way = rig.way()
    rig.network.hold("b")
    made = await rig.given_up(way=way, nbytes=PART)
    rig.mover.forget(made)
    rig.step()
    assert way.inside == 1, "its parts are given back where the agent is called next"
    assert await rig.rebuilt()
    rig.step(4, seconds=0.2)
    assert (rig.late, way.inside, way.lent, bool(made.lefts), rig.counted()) == ([], 0, 0, False, [0] * 5)
