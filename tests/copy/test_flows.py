"""Flows: copies that follow one another in the machine, told by counts."""

import os
import random
from contextlib import suppress

import pytest
from packing import packed
from stepped import CANARY, Flag, World, kind

from kvxfer.copy import records
from kvxfer.copy.port import CopyJob, Direction, Turns
from kvxfer.errors import ClosedError, TransferFailedError

ROW = 64


@pytest.fixture
async def world():
    world = World()
    yield world
    await world.close()
    state = world.machine.state
    assert (state[records.LIVE], state[records.FLOW_COUNT], state[records.EAGER]) == (0, 0, 0)
    spare = state[records.SPARE : records.SPARE + state[records.SPARE_COUNT]]
    assert sorted(spare) == list(range(records.JOBS, records.ROWS)), "every row of a step is given back"
    assert (world.mover._flows, world.mover.held_awake) == ({}, 0)
    assert sorted(world.mover._free) == list(range(records.JOBS))


class Progress:
    """A flow of rows of the world's memory, and what was told of it."""

    def __init__(self, world, name, steps, *, first=0, direction=Direction.GATHER, **options) -> None:
        self.world, self.name, self.first, self.counts = world, name, first, []
        self.added = 0
        job = CopyJob(None, world.reports(name), owner=name, **options.pop("job", {}))
        made = self.make(steps, **options.pop("step", {}))
        options.setdefault("total", steps)
        options.setdefault("allowed", steps)
        self.flow = world.mover.flow(job, direction, made, progress=self.told, **options)

    def make(self, steps, **step):
        made = []
        for number in range(self.added, self.added + steps):
            plan = self.world.plan(rows=1, row_bytes=ROW, at=(self.first + number) * ROW)
            made.append(CopyJob(packed(plan), **step))
        self.added += steps
        return made

    def told(self, outcome) -> None:
        assert outcome.steps > (self.counts or [0])[-1]
        self.counts.append(outcome.steps)
        assert self.written() >= outcome.steps

    def written(self) -> int:
        """How many steps are there; in order, since a machine on a CPU copies one after another."""
        found = [self.world.written(nbytes=ROW, at=(self.first + number) * ROW) for number in range(self.added)]
        assert found == sorted(found, reverse=True)
        return sum(found)

    @property
    def outcome(self):
        return self.world.outcomes[self.name]


@pytest.mark.parametrize(("steps", "width"), [(1, 1), (2, 64), (63, 64), (64, 1), (65, 2), (200, 64)])
async def test_its_steps_follow_one_another(world, steps, width):
    flow = Progress(world, "f", steps, width=width)
    await world.run(1)
    assert (kind(flow.outcome), flow.outcome.steps, flow.written()) == ("done", steps, steps)
    assert flow.outcome.copying >= 0
    assert steps not in flow.counts, "the end is told once"
    assert not flow.flow.refs
    assert not flow.flow.steps


async def test_its_end_is_not_told_twice_where_the_machine_had_no_room_to_say_that_more_is_done(world):
    """It counts what is done when its word is written, and by then that may be all."""
    flow = Progress(world, "f", 2, allowed=0)
    needed = list(flow.flow.refs)
    world.mover._on_flow(flow.flow, records.PASSING | 2 * records.COUNTED, 0, 0, 0, 0, 0, 0)
    assert flow.counts == []
    world.mover.allow(flow.flow, 2)
    await world.run(1)
    assert (kind(flow.outcome), flow.written(), len(needed)) == ("done", 2, 2)


async def test_no_step_begins_that_is_not_allowed(world):
    flow = Progress(world, "f", 9, allowed=0)
    for allowed in (0, 2, 3, 8):
        world.mover.allow(flow.flow, allowed)
        for _ in range(20):
            world.step()
        assert flow.written() == allowed == (flow.counts or [0])[-1]
        assert world.step() is None, "it waits for nobody but us"
        assert world.mover.owed_seconds() == 0.0
    world.mover.allow(flow.flow, 9)
    await world.run(1)
    assert kind(flow.outcome) == "done"


async def test_what_is_to_arrive_keeps_the_transport_progressing(world):
    flow = Progress(world, "f", 2, direction=Direction.SCATTER, turns=Turns(2))
    world.step()
    assert world.mover.held_awake == 1
    world.mover.note_peer_steps(flow.flow, 2)
    await world.run(1)
    busy = [Progress(world, n, 1, turns=Turns(1), allowed=0) for n in range(records.JOBS)]
    flow = Progress(world, "g", 1, direction=Direction.SCATTER, turns=Turns(1))
    assert (flow.flow.slot, world.mover.held_awake) == (-1, 1), "nor need there be a place for it"
    for one in (*busy, flow):
        world.mover.cancel(one.flow)
    await world.run(2 + records.JOBS)


async def test_nothing_follows_when_it_is_finished(world):
    flow = Progress(world, "f", 5, total=300, allowed=4)
    world.mover.finish(flow.flow)
    await world.run(1)
    assert (kind(flow.outcome), flow.outcome.steps, flow.written()) == ("done", 4, 4)
    for late in (
        lambda: world.mover.finish(flow.flow),
        lambda: world.mover.allow(flow.flow, 5),
        lambda: world.mover.add(flow.flow, flow.make(1)),
        lambda: world.mover.cancel(flow.flow),
    ):
        late()
    other = Progress(world, "g", 2, first=300)
    assert other.flow.slot == flow.flow.slot, "the next one is in its row"
    await world.run(2)
    assert (kind(other.outcome), flow.written(), other.written()) == ("done", 4, 2)


async def test_a_lease_ends_it_and_can_be_renewed(world):
    flow = Progress(world, "f", 6, allowed=2, job={"until": 2.0})
    for _ in range(10):
        world.step()
    world.runtime.time = 3.0
    world.mover.allow(flow.flow, 4, until=4.0)
    for _ in range(10):
        world.step()
    assert (flow.counts[-1], world.outcomes) == (4, {})
    world.runtime.time = 4.0
    world.mover.allow(flow.flow, 6)
    await world.run(1)
    assert (kind(flow.outcome), flow.outcome.steps, flow.written()) == ("stopped", 4, 4)


async def test_a_step_waits_for_its_event_and_those_behind_it_for_that(world):
    flag = Flag()
    flow = Progress(world, "f", 2, total=5, allowed=5)
    world.mover.add(flow.flow, flow.make(1, after=flag))
    world.mover.add(flow.flow, flow.make(2))
    for _ in range(5):
        world.step()
        await world.settle()
    assert flow.written() == 2
    assert len(world.mover._asked.steps) == 1
    flag.fired = True
    await world.run(1)
    assert (kind(flow.outcome), flow.written()) == ("done", 5)


async def test_an_event_that_cannot_be_asked_ends_it(world):
    flow = Progress(world, "f", 2, total=5, allowed=5)
    world.mover.add(flow.flow, flow.make(1, after=Flag(RuntimeError("gone"))))
    world.mover.add(flow.flow, flow.make(2))
    await world.run(1)
    assert isinstance(flow.outcome.error, TransferFailedError)
    assert flow.outcome.steps == flow.written() <= 2
    assert not flow.outcome.in_doubt


async def test_what_goes_on_by_itself_passes_what_waits_for_peers(world):
    """Else two workers, each full of what waits for the other, would wait for ever."""
    waiting = [
        Progress(world, number, 1, first=0, allowed=0, direction=Direction.SCATTER) for number in range(records.JOBS)
    ]
    assert not world.mover.crowded, "who could go on finds a place"
    world.mover.cancel(waiting.pop().flow)
    await world.settle()
    assert list(world.outcomes) == [records.JOBS - 1]
    flow = Progress(world, "f", 2, first=8)
    await world.run(2)
    assert (kind(flow.outcome), flow.written()) == ("done", 2)
    for one in waiting:
        world.mover.allow(one.flow, 1)
    await world.run(2 + len(waiting))
    assert {kind(one.outcome) for one in waiting} == {"done"}


async def test_it_is_closed(world):
    flow = Progress(world, "f", 3, allowed=1)
    world.step()
    world.mover._refusing = True
    with pytest.raises(ClosedError):
        Progress(world, "g", 1)
    await world.close()
    assert isinstance(flow.outcome.error, ClosedError)
    assert flow.written() == flow.outcome.steps == 1


async def test_nobody_asks_for_the_events_of_a_flow_that_is_over(world):
    flag = Flag()
    flow = Progress(world, "f", 1, total=2, allowed=2, job={"until": world.runtime.now() - 1})
    world.mover.add(flow.flow, flow.make(1, after=flag))
    await world.run(1)
    assert (kind(flow.outcome), flow.written()) == ("stopped", 0)
    assert not world.mover._asked.steps
    asked = flag.asked
    await world.settle()
    assert flag.asked == asked


async def test_it_is_closed_while_a_step_waits_for_its_event(world):
    flow = Progress(world, "f", 2, step={"after": Flag()})
    other = Progress(world, "g", 2, first=8, allowed=1)
    await world.settle()
    world.step()
    await world.close()
    for one in (flow, other):
        assert isinstance(one.outcome.error, ClosedError)
        assert one.written() == one.outcome.steps
    assert world.mover._unreported == 0


async def test_it_does_not_sleep_while_it_owes_news_nor_before_it_has_looked_at_what_waited_behind(world):
    """The loop has read nothing for so long that the pipe is full; when it takes more, nothing else is to be done."""
    unread = 0
    with suppress(BlockingIOError):
        while True:
            unread += os.write(int(world.machine.state[records.NEWS]), bytes(8 * records.EVENT_WORDS))
    flows = []
    for name, total in (("f", 2), ("g", 2), ("h", 1)):
        flows.append(Progress(world, name, 1, first=4 * len(flows), total=total))
        for _ in range(20):
            world.machine.step()
    assert world.machine.step() is not None, "it does not sleep"
    assert len(os.read(world.machine.news, unread)) == unread
    while world.machine.step() is not None:
        pass
    world.mover._read_events()
    assert [*(flow.counts for flow in flows), world.outcomes["h"].steps] == [[1], [1], [], 1]
    for flow in flows[:2]:
        world.mover.finish(flow.flow)
    await world.run(3)


async def test_it_does_not_sleep_while_a_flow_that_was_stopped_waits_for_its_last_news_to_be_written(world):
    """Nothing of it is under way, and the loop has read nothing for so long that the pipe is full."""
    unread = 0
    with suppress(BlockingIOError):
        while True:
            unread += os.write(int(world.machine.state[records.NEWS]), bytes(8 * records.EVENT_WORDS))
    flow = Progress(world, "f", 1, total=2)
    for _ in range(20):
        world.machine.step()
    world.mover.cancel(flow.flow)
    for _ in range(20):
        world.machine.step()
    assert len(os.read(world.machine.news, unread)) == unread
    while world.machine.step() is not None:
        pass
    world.mover._read_events()
    assert world.reports.kinds() == {"f": "stopped"}
    assert flow.outcome.steps == 1


async def test_who_has_to_wait_elsewhere_leaves_its_place_to_those_behind_it(world):
    """There was no place at all when they came, and by now as many wait for peers as may."""
    most = records.JOBS // 2
    directions = [Direction.SCATTER] * (most - 1) + [Direction.GATHER] * (records.JOBS - most + 1)
    busy = [Progress(world, n, 1, allowed=0, direction=one) for n, one in enumerate(directions)]
    scatters = [Progress(world, name, 1, allowed=0, direction=Direction.SCATTER) for name in ("one", "two", "three")]
    gather = Progress(world, "gather", 1, first=8)
    for one in busy[most : most + 2]:
        world.mover.cancel(one.flow)
    await world.run(3)
    assert kind(gather.outcome) == "done"
    for one in (busy[-1], busy[-2]):  # places alone are not enough
        world.mover.cancel(one.flow)
    await world.run(5)
    assert [one.flow.slot >= 0 for one in scatters] == [True, False, False]
    for number in (0, 1):
        world.mover.cancel(busy[number].flow)
        await world.run(6 + number)
        assert [one.flow.slot >= 0 for one in scatters] == [True, True, number > 0], "in the order in which they came"
    for one in (*busy, *scatters):
        if not one.flow.cancelled:
            world.mover.cancel(one.flow)
    await world.run(records.JOBS + 4)


async def test_the_loop_is_told_of_many_steps_at_once(world):
    """Of half of what may begin, of the last that may, and else once in a while."""
    flow = Progress(world, "f", 64, total=65, width=1)
    await world.settle()
    while len(flow.counts) < 2:
        world.step()
    world.runtime.time += 0.002
    for _ in range(1000):
        world.step()
    assert flow.counts == [1, 33, 34, 49, 57, 61, 63, 64]


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_comes_in_whatever_order(world, seed):
    """Added, allowed, cancelled, finished, past its lease: what is told is what is there, and everything ends."""
    rng = random.Random(seed)
    flows = []
    for number in range(rng.randrange(1, 12)):
        total = rng.choice((1, 3, 30, 100))
        options = {"width": rng.choice((1, 2, 5, 64)), "direction": rng.choice(list(Direction))}
        first = min(total, rng.choice((0, 1, 10)))
        until = rng.choice((1e9, 1e9, rng.randrange(2, 20)))
        one = Progress(
            world, number, first, first=100 * number, total=total, allowed=0, job={"until": until}, **options
        )
        flows.append((one, total, until))
    allowed = dict.fromkeys(range(len(flows)), 0)
    for turn in range(400):
        if turn % 20 == 0:
            world.runtime.time += 0.5
        one, total, until = rng.choice(flows)
        what = rng.random()
        if what < 0.3 and one.added < total:
            world.mover.add(one.flow, one.make(min(total - one.added, rng.choice((1, 5, 80)))))
        elif what < 0.6:
            more = rng.randrange(total + 1)
            allowed[one.name] = max(allowed[one.name], more)
            world.mover.allow(one.flow, more)
        elif what < 0.62:
            world.mover.cancel(one.flow)
        elif what < 0.63:
            world.mover.finish(one.flow)
        for _ in range(rng.randrange(4)):
            world.step()
        assert one.written() <= allowed[one.name]
        if rng.random() < 0.2:
            await world.settle()
    for one, total, _ in flows:
        if not one.flow.over and one.flow.total == total:
            world.mover.add(one.flow, one.make(total - one.added))
        world.mover.allow(one.flow, one.flow.total)
    await world.run(len(flows))
    for one, total, until in flows:
        assert one.outcome.steps == one.written()
        if kind(one.outcome) == "done":
            assert one.written() == one.flow.total <= total
        else:
            assert kind(one.outcome) == "stopped"
            assert one.flow.cancelled or until <= world.runtime.time
    assert (world.dst[100 * ROW * len(flows) :] == CANARY).all()
