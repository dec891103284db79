"""Posts of a flow: one behind the other, a gate for each, and what remains of one that ends in doubt."""

import numpy as np
import pytest
from rigs import PART, Rig

from kvxfer.copy.port import NO_PIECES, CopyJob, Direction, Operation, Outcome, Post
from kvxfer.copy.tables import NOTHING

STEPS = 5


class Posting:
    """A flow that posts so many parts to a peer."""

    def __init__(self, rig: Rig, *, way=None, width=2, allowed=STEPS, peer="b", runs_on=False) -> None:
        self.rig, self.counts = rig, []
        rig.results["x"] = []
        late = rig.late.append
        common = Post(peer, Operation.WRITE, NO_PIECES, NO_PIECES, runs_on, late)
        steps = []
        for number in range(STEPS):
            here, there = rig.piece(PART, peer=peer, at=number * PART)
            steps.append(CopyJob(NOTHING, nbytes=PART, post=Post(peer, Operation.WRITE, here, there, runs_on, late)))
        passage = way.passage if way else None
        job = CopyJob(NOTHING, rig.results["x"].append, until=1e9, passage=passage, owner="x", post=common)
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
        return int(np.count_nonzero(self.rig.memory["b"])) // PART


async def test_steps_are_posted_one_behind_the_other(make):
    rig = await make()
    way = rig.way()
    posting = Posting(rig, way=way, width=2)
    rig.network.hold("b")
    rig.step(10)
    assert (rig.network.held("b"), way.inside, posting.counts) == (2, 2, []), "no more than may be under way"
    rig.network.release("b", posts=1)
    rig.step(10)
    assert (posting.counts, rig.network.held("b"), way.inside) == ([1], 2, 2)
    rig.network.release("b")
    rig.step(20, seconds=0.5)
    result = rig.result()
    assert (result.outcome, result.steps, posting.landed()) == (Outcome.DONE, STEPS, STEPS)
    assert result.wire > 0
    assert (way.inside, way.lent, rig.counted(), rig.late) == (0, 0, [0] * 5, [])


async def test_what_is_not_allowed_is_not_posted(make):
    rig = await make()
    posting = Posting(rig, allowed=3)
    rig.step(20)
    assert (posting.landed(), posting.counts[-1], rig.moved()) == (3, 3, [PART] * 3)
    rig.mover.cancel(posting.flow)
    rig.step(2)
    assert (rig.result().outcome, rig.result().steps, posting.landed()) == (Outcome.STOPPED, 3, 3)


async def test_a_gate_that_was_closed_stops_it(make):
    rig = await make()
    way = rig.way()
    posting = Posting(rig, way=way, allowed=2)
    rig.step(20)
    assert way.file.revoke(0) is not None
    rig.mover.allow(posting.flow, STEPS)
    rig.step(20)
    assert (rig.result().outcome, rig.result().steps, posting.landed()) == (Outcome.STOPPED, 2, 2)
    assert (way.inside, way.lent) == (0, 0)


async def test_what_stands_still_is_in_doubt_until_it_has_ended(make):
    rig = await make(no_progress_timeout=1.0)
    way = rig.way()
    posting = Posting(rig, way=way, width=2, allowed=4)
    rig.network.hold("b")
    rig.step()
    rig.step(12, seconds=0.2)
    result = rig.result()
    assert (result.outcome, result.may_move, result.steps, rig.late) == (Outcome.IN_DOUBT, True, 0, [])
    assert (way.lent, posting.flow.left, rig.mover.watches("b")) == (1, True, True)
    rig.mover.allow(posting.flow, STEPS)
    rig.network.release("b", posts=1)
    rig.step(10, seconds=0.1)
    assert (rig.late, way.lent) == ([], 1), "one of two has ended"
    rig.network.release("b")
    rig.step(10, seconds=0.1)
    assert (rig.late, way.inside, way.lent, rig.counted(), posting.flow.left) == ([True], 0, 0, [0] * 5, False)
    assert posting.landed() == 2, "none was posted since"
    assert rig.mover._copies == {}


async def test_a_doubt_ends_for_this_side_when_the_agent_was_made_anew(make):
    rig = await make(no_progress_timeout=1.0)
    way = rig.way()
    posting = Posting(rig, way=way, width=2)
    rig.network.hold("b")
    rig.step()
    rig.step(12, seconds=0.2)
    assert rig.result().outcome is Outcome.IN_DOUBT
    assert await rig.rebuilt()
    rig.step(3)
    assert rig.late == [False], "what has left this side may land"
    assert (posting.flow.left, way.lent) == (True, 1), "the lock is kept in front of the peer's memory"
    rig.mover.forget(posting.flow)
    rig.step(3)
    assert (rig.late, posting.flow.left, way.lent, rig.counted()) == ([False], False, 0, [0] * 5)


async def test_nobody_asks_any_more(make):
    rig = await make(no_progress_timeout=1.0)
    way = rig.way()
    posting = Posting(rig, way=way, width=2)
    rig.network.hold("b")
    rig.step()
    rig.step(12, seconds=0.2)
    rig.mover.forget(posting.flow)
    rig.step(3, seconds=0.1)
    assert (rig.late, posting.flow.left, way.lent) == ([], False, 0)


@pytest.mark.parametrize("steps", range(1, 8))
async def test_cancelled_between_posts(make, steps):
    """What was posted is waited for; nothing else is."""
    rig = await make()
    way = rig.way()
    posting = Posting(rig, way=way, width=2)
    rig.network.hold("b")
    rig.step(steps)
    posted = rig.network.held("b")
    rig.mover.cancel(posting.flow)
    rig.step(5)
    assert rig.network.held("b") <= posted
    rig.network.release("b")
    rig.step(5)
    result = rig.result()
    assert (result.outcome, result.steps, way.inside, way.lent) == (Outcome.STOPPED, posting.landed(), 0, 0)
    assert posting.landed() <= posted
