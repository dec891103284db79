"""Posts in the mover, over the loopback: by hand, one step at a time, and in a real thread."""

import asyncio
import ctypes
import threading
import time
from typing import Any

import numba
import numpy as np
import pytest
from copy_plans import contiguous_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from packing import packed
from rigs import FLUSH, PART, SIZE, Outcome, Rig, ending, memory_of, pieces
from stepped import Flag

from kvxfer.copy import records
from kvxfer.copy.port import FOREVER, Descriptors, Operation, Post
from kvxfer.errors import ClosedError, FabricError
from kvxfer.protocol.messages import MemorySpan


@numba.cfunc("int64(int64, int64, int64)")
def refuse(descriptor: Any, address: Any, nbytes: Any) -> Any:
    return -1


# ---- what the machine is told ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("here", "there", "listed", "most_pieces", "most_bytes"), [
    ("VRAM", "VRAM", True, 160, 1 << 62), ("VRAM", "VRAM", False, 10, 1 << 62), ("VRAM", "DRAM", True, 10, PART),
    ("DRAM", "VRAM", True, 10, PART),
])  # fmt: skip
async def test_posts_between_gpus_are_not_cut_by_bytes_and_have_longer_parts_where_pieces_are_taken_as_a_list(
    make, here, there, listed, most_pieces, most_bytes
):
    rig = await make(max_descriptors=10)
    rig.mover._native = replace(rig.mover._native, listed=listed)
    rows = pieces((64, 8), (128, 8)).copy("F")  # its columns apart
    near, far = (Descriptors(kind, 0, rows) for kind in (here, there))
    said = rig.submit("x", Post("b", Operation.WRITE, near, far)).table[0]
    assert (said[records.MOST_PIECES], said[records.MOST_BYTES]) == (most_pieces, most_bytes)
    for at in (records.NEAR_PIECES, records.FAR_PIECES):
        assert ctypes.string_at(int(said[at]), rows.nbytes) == rows.tobytes()


# ---- one post --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", list(Operation))
async def test_a_post_is_cut_and_done(rig, operation):
    rig.memory["b"][:] = 7
    rig.source[:] = 9
    rig.post(nbytes=8 * PART + 5, at=3, operation=operation)
    while not rig.results["x"]:
        rig.step()
        rig.runtime.time += 0.25
    result = rig.result()
    assert (ending(result), result.error, result.may_move) == (Outcome.DONE, None, False)
    assert (result.copying, result.posted, result.wire) == (0.0, 100.0, 2.0)
    changed = rig.memory["b"] == 9 if operation is Operation.WRITE else rig.source == 7
    assert np.flatnonzero(changed).tolist() == list(range(3, 8 * PART + 8))
    assert rig.moved() == [PART] * 8 + [5]
    assert rig.transport.open_handles == 0
    assert rig.counted() == [0] * 5
    rig.runtime.time += 1
    assert rig.step() is None, "idle again"


async def test_the_time_in_which_parts_are_posted_is_told(rig):
    """As the clock says: nothing else is measured there."""
    rig.state[records.FIXED] = 0
    real = rig.transport.post

    def post(*arguments: Any) -> object:
        time.sleep(0.002)
        return real(*arguments)

    rig.transport.post = post
    rig.post(nbytes=3 * PART, until=FOREVER)
    for _ in range(4):
        rig.machine._code.step(rig.machine.state, rig.machine.jobs, rig.machine.ports)
    rig.mover._read_events()
    result = rig.result()
    assert 0.006 <= result.posting <= result.wire


async def test_only_a_few_parts_are_under_way_at_once(rig):
    rig.network.hold("b")
    rig.post(nbytes=10 * PART)
    rig.step(20)
    assert rig.network.held("b") == 4
    rig.network.release("b", posts=2)
    rig.step(20)
    assert rig.network.held("b") == 4
    assert len(rig.network.log) == 2
    rig.network.release("b")
    rig.step(20)
    assert ending(rig.result()) is Outcome.DONE


@pytest.mark.parametrize("at_post", [True, False])
@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize("operation", list(Operation))
async def test_an_error_after_bytes_moved_is_in_doubt_until_a_later_one_has_passed_them(
    rig, way, at_post, skip, operation
):
    rig.network.break_next("b", after_bytes=100, skip=skip, at_post=at_post, lingers=True)
    rig.post(way=way, operation=operation)
    rig.step(10)
    assert rig.results["x"] == [], "924 bytes of a part are in flight"
    assert way.inside == 1
    assert rig.moved() == [PART] * skip + [100, FLUSH]
    rig.network.release("b")
    rig.step(2)
    rig.ended(Outcome.FAILED, "told to break")
    assert rig.moved() == [PART] * skip + [100, FLUSH, PART - 100]
    assert (way.inside, way.lent) == (0, 0)
    assert rig.transport.open_handles == 0
    assert rig.counted() == [0] * 5
    rig.post("y")
    rig.step(10)
    assert ending(rig.result("y")) is Outcome.DONE


async def test_what_is_moved_once_more_is_so_though_the_lease_is_over_and_nobody_wants_it(rig):
    copy = rig.post(until=101.0, nbytes=PART)
    rig.network.break_next("b")
    rig.network.delay("b", 1)
    rig.step()
    rig.mover.cancel(copy)
    rig.runtime.time += 2
    rig.step(10)
    assert ending(rig.result()) is Outcome.FAILED
    assert rig.moved() == [FLUSH]


async def test_what_does_not_end_is_given_up_no_later_than_without_another_write(make):
    rig = await make(no_progress_timeout=5.0)
    way = rig.way()
    rig.network.delay("b", 4)
    rig.network.break_next("b", lingers=True)
    rig.post(nbytes=PART, way=way)
    rig.step(1)
    for _ in range(5):
        assert rig.results["x"] == []
        rig.runtime.time += 1.0
        rig.step(2)
    rig.ended(Outcome.IN_DOUBT, may_move=True)
    assert (way.inside, rig.mover.lingering) == (1, 1), "it did not end"
    assert rig.transport.open_handles == 1, "that of the other write, whose end would tell"


async def test_a_transport_that_does_not_flush_leaves_the_doubt(rig):
    rig.mover.attach(replace(rig.mover._native, orderly=False))
    rig.network.break_next("b", after_bytes=100)
    rig.post()
    rig.step(10)
    assert ending(rig.result()) is Outcome.IN_DOUBT
    assert rig.moved() == [100]


async def test_to_a_peer_that_is_gone_for_good_nothing_is_posted_until_it_is_left_and_met_again(rig):
    rig.mover._native = replace(rig.mover._native, for_good=True)
    rig.network.break_next("b", disconnected=True)
    rig.post("lost")
    rig.step(3)
    rig.mover.cancel(rig.post("refused"))
    await rig.settle()
    assert str(rig.result("refused").error) == "b is disconnected"
    rig.fabric.disconnect("b")
    other = rig.others["b"]
    await rig.now(rig.fabric.connect(other.metadata([other.register([memory_of(rig.memory["b"])])])))
    rig.post("again")
    rig.step(9)
    assert ending(rig.result("again")) is Outcome.DONE


@pytest.mark.parametrize("told", [True, False], ids=["", "the pipe is full"])
async def test_a_peer_is_not_taken_for_gone_because_the_agent_was_made_anew_behind_an_error(rig, told):
    """What is under way then has ended for this side, as if the peer were gone; it is met again."""
    # if orderly it is asked whether the rest has ended
    native = replace(rig.mover._native, for_good=True, orderly=told)
    rig.transport.native = lambda: native
    rig.mover.attach(native)
    rig.network.break_next("b", after_bytes=24, lingers=True)
    rig.post("x", PART)
    writes = int(rig.machine.ports[records.WRITE])
    if not told:
        rig.machine.ports[records.WRITE] = refuse.address
    rig.step(6)
    assert rig.results["x"] == []
    rig.mover.stop_posting()
    caught = asyncio.ensure_future(rig.mover.abandon_posts())
    await rig.settle()
    rig.step(3)
    rig.mover.attach(native, anew=True)
    rig.step(3)
    rig.machine.ports[records.WRITE] = writes
    rig.step(3)
    await caught
    rig.network.release("b")
    rig.post("y", PART)
    await rig.settle()
    rig.step(6)
    assert (ending(rig.result()), ending(rig.result("y"))) == (Outcome.IN_DOUBT, Outcome.DONE)
    assert "the agent was rebuilt" in str(rig.result().error)


@pytest.mark.parametrize("operation", list(Operation))
async def test_that_a_peer_is_lost_is_not_said_where_a_part_never_ended(make, operation):
    """Else whoever posted would use memory again that a part may still read or write."""
    rig = await make(no_progress_timeout=5.0)
    way = rig.way()
    rig.network.wedge("b")
    rig.network.break_next("b", disconnected=True, skip=2)
    rig.post(way=way, operation=operation)
    rig.step(4)
    assert rig.results["x"] == []
    rig.step(8, seconds=1.0)
    rig.ended(Outcome.IN_DOUBT, "not every part has ended", may_move=True)
    assert way.inside == 1


async def test_no_progress_gives_up_and_late_bytes_still_land(make):
    rig = await make(no_progress_timeout=5.0)
    way = rig.way()
    rig.network.hold("b")
    rig.post(way=way)
    rig.step(4)
    rig.step(4, seconds=1.0)
    rig.network.release("b", posts=1)  # progress: the time starts anew
    rig.step(6, seconds=1.0)  # seen by the first step; the second posts another part
    assert rig.results["x"] == []
    rig.step(seconds=1.0)
    rig.ended(Outcome.IN_DOUBT, "no progress for 5 s to b", may_move=True)
    assert (way.inside, rig.landed()) == (1, PART)
    assert (rig.mover.lingering, int(rig.state[records.WATCHED])) == (1, 4)
    rig.step(seconds=1.0)
    assert rig.late == []
    rig.network.release("b")
    assert rig.landed() == 5 * PART, "this is why it was in doubt"
    assert way.inside == 1, "nobody has seen it yet"
    rig.step(seconds=1.0)
    assert (rig.late, way.inside, way.lent) == ([True], 0, 0)
    assert rig.transport.open_handles == 0
    assert rig.counted() == [0] * 5
    assert rig.step() is None, "nothing more is looked at"


@pytest.mark.parametrize("timeout", [0.8, 5.0])
async def test_a_process_that_stood_still_does_not_doubt_its_peers(make, timeout):
    rig = await make(no_progress_timeout=timeout)
    rig.network.hold("b")
    rig.post(nbytes=PART)
    rig.step()
    rig.step(seconds=3600.0)
    assert rig.results["x"] == []
    rig.network.release("b")
    rig.step()
    assert ending(rig.result()) is Outcome.DONE


@pytest.mark.parametrize("call", ["post", "poll", "release"])
async def test_a_defect_of_the_transport_is_loud_and_every_post_still_ends(make, monkeypatch, call):
    rig = await make("b", "c")
    defects: list[BaseException | None] = []
    monkeypatch.setattr("sys.unraisablehook", lambda said: defects.append(said.exc_value))
    rig.network.hold("c")
    rig.post("under way", PART, peer="c")
    rig.step()
    with monkeypatch.context() as patch:
        patch.setattr(rig.transport, call, lambda *_: 1 // 0)
        rig.post("next", PART, peer="b")
        rig.step(4)
        rig.network.release("c")
        rig.step(4)
    assert defects
    assert {type(one) for one in defects} == {ZeroDivisionError}
    for tag, before in (("under way", {"poll"}), ("next", {"post", "poll"})):
        result = rig.result(tag)
        assert ending(result) is (Outcome.IN_DOUBT if call in before else Outcome.DONE)
        assert ("by zero" in str(result.error)) is (call in before)


# ---- many posts ------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("bcd"), st.integers(1, 4)), min_size=1, max_size=7))
def test_no_peer_and_no_post_of_one_is_a_turn_ahead_of_another_that_has_parts(posts):
    async def play() -> list[tuple[str, int]]:
        rig = Rig("b", "c", "d")
        await rig.open()
        for number, (peer, parts) in enumerate(posts):
            rig.post(str(number), parts * PART, peer=peer, at=4 * PART * number)
        rig.step(sum(parts for _, parts in posts) + 1)
        assert {ending(rig.result(tag)) for tag in rig.results} == {Outcome.DONE}
        at = {peer: memory.ctypes.data for peer, memory in rig.memory.items()}
        served = [(entry.dst, (entry.address - at[entry.dst]) // (4 * PART)) for entry in rig.network.log]
        await rig.end()
        return served

    served = asyncio.run(play())
    left = {number: parts for number, (_, parts) in enumerate(posts)}
    turns = dict.fromkeys(left, 0)
    by_peer = dict.fromkeys("bcd", 0)
    for peer, number in served:
        turns[number] += 1
        by_peer[peer] += 1
        left[number] -= 1
        waiting = {one for one, parts in left.items() if parts}
        for other in waiting:
            theirs = posts[other][0]
            if theirs == peer:
                assert turns[number] <= turns[other] + 1
            else:
                assert by_peer[peer] <= by_peer[theirs] + 1


async def test_ends_of_a_step_are_told_together_and_a_broken_callback_strands_none(make):
    rig = await make("b", "c")
    heard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, said: heard.append(said))
    rig.network.hold("b")
    rig.network.hold("c")
    rig.post("one", PART, peer="b")
    broken = rig.post("broken", 8, peer="b")
    rig.post("two", PART, peer="c")
    broken.job = replace(broken.job, done=lambda _: 1 // 0)
    rig.step(3)
    rig.network.release("b")
    rig.network.release("c")
    rig.step()
    assert sorted(rig.order) == ["one", "two"]
    assert [type(said["exception"]) for said in heard] == [ZeroDivisionError]
    rig.post("after")
    rig.step(9)
    assert ending(rig.result("after")) is Outcome.DONE


# ---- gathered, then posted -------------------------------------------------------------------------------------------


async def staged(rig: Rig) -> np.ndarray:
    """Memory of this side into which is gathered."""
    staging = np.zeros(SIZE, np.uint8)
    await rig.now(rig.fabric.register([MemorySpan("DRAM", 0, staging.ctypes.data, SIZE)]))
    return staging


def gathered_post(rig: Rig, staging: np.ndarray, nbytes: int, **job: Any) -> Any:
    here = Descriptors("DRAM", 0, pieces((staging.ctypes.data, nbytes)))
    there = Descriptors("DRAM", 0, pieces((rig.memory["b"].ctypes.data, nbytes)))
    post = Post("b", Operation.WRITE, here, there, late=rig.late.append)
    rows, where = nbytes // PART, (rig.source.ctypes.data, staging.ctypes.data)
    plan = contiguous_rows(*where, rows=rows, regions=1, row_bytes=PART, pool=rows, flat="both")
    return rig.submit("x", post, tables=packed(plan), **job)


async def test_what_is_gathered_is_posted_in_the_same_job_and_the_gate_is_passed_for_the_post(rig):
    staging, way, flag = await staged(rig), rig.way(), Flag()
    copy = gathered_post(rig, staging, 4 * PART, passage=way.passage, after=flag)
    rig.step(3)
    assert not staging.any()
    flag.fired = True
    await rig.settle()
    await asyncio.sleep(0.001)
    rig.network.hold("b")
    while not staging[4 * PART - 1]:
        assert way.inside == 0, "nothing of the peer's is touched while it is gathered"
        rig.step()
    rig.step(5, seconds=0.5)
    assert (way.inside, rig.landed()) == (1, 0)
    rig.mover.cancel(copy)
    assert not rig.mover.may_copy(copy)
    rig.network.release("b")
    rig.step()
    result = rig.result()
    assert ending(result) is Outcome.DONE
    assert result.started + result.copying <= result.posted
    assert np.array_equal(rig.memory["b"][: 4 * PART], rig.source[: 4 * PART])
    assert way.inside == 0


@pytest.mark.parametrize("why", ["cancelled", "lease"])
async def test_nothing_is_posted_where_the_copy_was_stopped_or_came_too_late(make, why, monkeypatch):
    monkeypatch.setattr("kvxfer.copy.template.PART_BYTES", PART)
    rig = await make()
    staging = await staged(rig)
    copy = gathered_post(rig, staging, 4 * PART, until=101.0)
    rig.step()
    if why == "cancelled":
        rig.mover.cancel(copy)
    else:
        rig.runtime.time = 101.0
    rig.step(10)
    assert (ending(rig.result()), rig.result().posted, rig.moved()) == (Outcome.STOPPED, 0.0, [])


# ---- idling and looking ----------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0.0, 30.0) | st.floats(0.0, 1e-3), min_size=1, max_size=12).map(sorted),
    st.booleans(),
    st.booleans(),
)
def test_what_is_under_way_is_looked_at_often_enough_and_ever_less_often(waits, flies, held):
    """Without a pause at first; then never more than 1 ms in between, and 100 us, or a thousandth of the wait, before
    that."""

    async def play() -> list[float | None]:
        rig = Rig(no_progress_timeout=1e6)
        await rig.open()
        rig.state[records.SPIN] = 200_000
        rig.network.hold("b")
        if flies:
            rig.post(nbytes=PART)
        if held:
            rig.mover.hold_awake()
        rig.step()
        seen = []
        for waited in waits:
            rig.runtime.time = 100.0 + waited
            seen.append(rig.step())
        rig.network.release("b")
        await rig.end()
        return seen

    delays = asyncio.run(play())
    if not (flies or held):
        assert set(delays) == {None}
        return
    assert None not in delays
    assert delays == sorted(delays, key=lambda delay: delay or 0.0)
    for waited, delay in zip(waits, delays, strict=True):
        assert delay is not None
        assert delay <= 1e-3
        assert delay <= max(100e-6, waited / 1_000) + 1e-9
        if not 199e-6 < waited < 201e-6:
            assert (delay == 0) is (flies and waited < 200e-6)
        assert held or delay <= max(20e-6, waited / 32) + 1e-9, "soon after it was begun, soon again"
        assert delay == 0 or delay >= min(1e-3, max(20e-6, waited / 1_000)) * 0.999


async def test_a_hold_keeps_the_transport_progressing(rig):
    rig.runtime.time += 10
    assert rig.step() is None
    progressed = rig.transport.progressed
    first, second = rig.mover.hold_awake(), rig.mover.hold_awake()
    assert rig.mover.held_awake == 2
    assert rig.step() == 0.0, "it was told so"
    assert rig.step() == pytest.approx(100e-6)
    rig.runtime.time += 0.5
    assert rig.step() == pytest.approx(500e-6)
    rig.runtime.time += 60
    assert rig.step() == pytest.approx(1e-3)
    assert rig.transport.progressed == progressed + 4
    first()
    first()
    assert rig.step() is not None, "releasing one hold twice must not release the other"
    second()
    assert rig.step() is None
    assert rig.transport.progressed == progressed + 5


# ---- in doubt, and made anew -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", Operation)
async def test_what_was_given_up_is_seen_to_end_though_its_peer_was_left_meanwhile(make, operation):
    """A session that ends with a pause leaves the lane; without it no end could be seen."""
    rig = await make(no_progress_timeout=0.5)
    way = rig.way()
    rig.network.hold("b")
    await rig.given_up(operation=operation, way=way, nbytes=PART)
    rig.fabric.disconnect("b")
    rig.serve()
    rig.step(seconds=0.2)
    assert (rig.late, way.inside, rig.fabric.agents) == ([], 1, 1)
    rig.network.release("b")
    rig.step(seconds=0.2)
    rig.serve()
    assert (rig.late, way.inside, rig.fabric.agents) == ([True], 0, 0)
    assert rig.transport.open_handles == 0
    assert await rig.close() is True


async def test_a_flush_that_was_given_up_tells_the_end_of_what_had_failed_before(make):
    rig = await make(no_progress_timeout=0.5)
    way = rig.way()
    rig.network.break_next("b", after_bytes=24, lingers=True)
    await rig.given_up(way=way, nbytes=PART)
    assert (rig.late, way.inside) == ([], 1)
    rig.network.release("b")
    rig.step(seconds=0.2)
    assert (rig.late, way.inside) == ([True], 0)
    assert rig.counted() == [0] * 5


async def test_a_halted_mover_posts_nothing_and_goes_on_looking(rig):
    rig.network.hold("b")
    rig.post()
    rig.step(2)
    rig.mover.stop_posting()
    rig.step(10)
    assert rig.network.held("b") == 2
    assert rig.mover.under_way
    rig.network.release("b")
    rig.step(10)
    assert rig.results["x"] == []
    assert not rig.mover.under_way
    rig.fabric._attach()
    rig.step(10)
    assert ending(rig.result()) is Outcome.DONE


# ---- closing ---------------------------------------------------------------------------------------------------------


async def test_close_lets_accepted_posts_end_and_refuses_more(rig):
    rig.post()
    closing = asyncio.ensure_future(rig.mover.close(5.0))
    await asyncio.sleep(0)
    with pytest.raises(ClosedError):
        rig.post("late")
    assert await rig.run(closing) is True
    assert ending(rig.result()) is Outcome.DONE
    assert rig.results["late"] == []


async def test_close_under_a_post_gives_it_up_in_doubt(rig, way):
    rig.network.hold("b")
    rig.post(way=way)
    rig.step(2)
    rig.post("queued", at=8 * PART, until=1e9)
    assert await rig.close() is False
    rig.ended(Outcome.IN_DOUBT, "the worker was closed", may_move=True)
    assert way.inside == 1
    assert isinstance(rig.result("queued").error, (ClosedError, FabricError))


async def test_close_fails_what_was_never_posted(rig):
    rig.mover.stop_posting()
    rig.post()
    rig.step(2)
    assert await rig.close() is True
    assert ending(rig.result()) is Outcome.FAILED
    assert isinstance(rig.result().error, ClosedError)
    assert rig.landed() == 0


# ---- in a thread -----------------------------------------------------------------------------------------------------


async def test_cancels_from_the_loop_while_parts_fly_leave_no_byte_unaccounted(threaded, network):
    (side, other), rng = threaded, np.random.default_rng(2)
    outcomes: set[Outcome] = set()
    for delay in rng.integers(0, 400, size=60):
        before = len(network.log)
        ended = side.post("b", other.address, SIZE)
        for _ in range(int(delay)):
            time.monotonic()
        side.mover.cancel(side.asked)
        async with asyncio.timeout(10):
            result = await ended
        outcomes.add(ending(result))
        at = len(network.log)
        moved = sum(entry.length for entry in network.log[before:])
        await asyncio.sleep(0)
        assert len(network.log) == at, "nothing is moved after its end"
        assert result.error is None
        assert (ending(result) is Outcome.DONE) == (moved == SIZE)
        assert (result.posted == 0.0) == (moved == 0)
    assert Outcome.STOPPED in outcomes


async def test_idle_threads_use_no_processor_time(threaded):
    async with asyncio.timeout(10):
        await threaded[0].post("b", threaded[1].address, SIZE)
    running = [thread for thread in threading.enumerate() if thread.name in {"kvxfer-fabric", "kvxfer-mover"}]
    assert len(running) == 4
    clocks = [time.pthread_getcpuclockid(thread.ident or 0) for thread in running]
    before = [time.clock_gettime(clock) for clock in clocks]
    threading.Event().wait(0.3)
    for clock, earlier in zip(clocks, before, strict=True):
        used = time.clock_gettime(clock) - earlier
        assert used < 0.003, f"{used} s in 0.3 s"
