"""The fabric's service: its calls, pauses, the agent made anew, and the end; stepped by hand, over the loopback."""

import asyncio
import threading
from collections import deque
from functools import partial
from typing import Any

import numpy as np
import pytest
from copy_plans import contiguous_rows
from msgspec.structs import replace
from packing import packed
from rigs import PART, SIZE, Moving, Outcome, Rig, ending
from stepped import until

from kvxfer.copy import records
from kvxfer.copy.port import CopyJob, CopyOutcome, Descriptors, Direction, Operation, Post
from kvxfer.errors import FabricError
from kvxfer.fabric import calls
from kvxfer.fabric.calls import Fabric
from kvxfer.fabric.loopback import LoopbackNetwork, LoopbackTransport
from kvxfer.runtime import TURN_SECONDS


def fail(error: Exception, *_: object) -> Any:
    raise error


# ---- calls and defects -----------------------------------------------------------------------------------------------


async def test_calls_are_answered_in_order_and_errors_are_outcomes(rig):
    made: list[str] = []
    for name in ("deregister", "connect", "metadata"):
        real = getattr(rig.transport, name)
        setattr(rig.transport, name, lambda what, name=name, real=real: (made.append(name), real(what))[1])
    unknown = rig.fabric.deregister("nonsense")
    twice = rig.fabric.deregister(rig.token)
    again = rig.fabric.deregister(rig.token)
    garbage = rig.fabric.connect(b"garbage")
    meta = rig.fabric.metadata([])
    rig.serve()
    for future in (unknown, again, garbage):
        with pytest.raises(FabricError):
            future.result(timeout=0)
    assert twice.result(timeout=0) is None
    assert b'"a"' in meta.result(timeout=0)
    assert made == ["deregister", "connect", "metadata"], "nobody is asked about what is not held"
    assert int(rig.state[records.WANTED]) == 0, "the mover may call again"


async def test_a_cancelled_call_is_not_made(rig):
    future = rig.fabric.deregister(rig.token)
    assert future.cancel()
    rig.serve()
    assert rig.transport.keys() == rig.keys


async def test_the_service_sleeps_until_there_is_a_call(rig):
    assert rig.serve() is None
    woken = rig.service.woken
    rig.fabric.metadata([])
    assert rig.service.woken == woken + 1
    assert rig.serve() is None


async def test_a_call_that_comes_in_as_a_thread_forgets_that_it_was_woken_is_made(threaded, monkeypatch):
    side, late = threaded[0], []
    fabric = side.fabric
    clear = fabric._called.clear

    def racing():
        late.append(fabric.deregister("nonsense"))  # wakes it here and now, which it forgets
        clear()

    monkeypatch.setattr(fabric._called, "clear", racing)
    assert await side.now(fabric.metadata([]))
    monkeypatch.undo()
    for call in late:
        with pytest.raises(FabricError):
            await side.now(call)


async def test_a_call_that_is_being_made_as_the_fabric_breaks_is_answered_once(rig):
    """The loop refuses what waits, while the thread takes it."""

    class Looked(deque[Any]):
        """When it has been looked through, the other thread has a turn."""

        def __iter__(self) -> Any:
            yield from list(super().__iter__())
            thread.start()
            thread.join(0.1)

    thread = threading.Thread(target=rig.serve)
    future = rig.fabric.metadata([])
    rig.fabric._inbox = Looked(rig.fabric._inbox)
    rig.state[records.BROKEN] = -1
    assert rig.fabric.health()[1], "it is looked at, and breaks"
    thread.join()
    with pytest.raises(FabricError, match="progress"):
        future.result(timeout=0)


async def test_a_peer_is_forgotten_with_the_last_who_knew_it(rig):
    metadata = rig.others["b"].metadata([])
    assert await rig.now(rig.fabric.connect(metadata)) == "b"
    for agents in (1, 0, 0):
        rig.fabric.disconnect("b")
        rig.serve()
        assert rig.fabric.agents == agents
    rig.post()
    rig.step(2)
    assert ending(rig.result()) is Outcome.FAILED


async def test_whoever_leaves_a_peer_under_posts_to_it_has_them_end_and_no_more_of_them_begun(make):
    rig = await make("b", "c")
    rig.network.hold("b")
    rig.post("whole", PART, peer="b")
    rig.post("begun", peer="b", at=8 * PART)
    rig.step(2)
    rig.post("queued", peer="b", at=16 * PART)
    rig.fabric.disconnect("b")
    rig.serve()
    rig.post("other", peer="c")
    rig.step(10)
    assert ending(rig.result("queued")) is Outcome.FAILED
    assert ending(rig.result("other")) is Outcome.DONE
    assert (rig.results["whole"], rig.results["begun"]) == ([], [])
    rig.network.release("b")
    rig.step(2)
    assert (ending(rig.result("whole")), ending(rig.result("begun"))) == (Outcome.DONE, Outcome.FAILED)
    assert rig.counted() == [0] * 5


async def test_a_defect_breaks_the_fabric_loudly_and_answers_everybody(make, monkeypatch, caplog):
    rig = await make("b", "c")
    rig.network.hold("c")
    rig.post("under way", PART, peer="c")
    rig.step()
    monkeypatch.setattr(rig.transport, "connect", lambda _: 1 // 0)
    first, broken, *behind = rig.fabric.metadata([]), rig.fabric.connect(b""), *(rig.fabric.metadata([]) for _ in "12")
    rig.serve()
    assert first.result(timeout=0)
    errors = [future.exception(timeout=0) for future in (broken, *behind, *(rig.fabric.metadata([]) for _ in "12"))]
    assert {(type(error), type(error and error.__cause__)) for error in errors} == {(FabricError, ZeroDivisionError)}
    assert all("by zero" in str(error) for error in errors)
    assert len(set(map(id, errors))) == 5, "an object of each"
    assert "fabric_broken" in caplog.text
    with pytest.raises(FabricError, match="by zero"):
        await rig.fabric.rebuild(1.0)
    rig.post("after")
    rig.step(2)
    await rig.settle()
    rig.step()
    assert ending(rig.result("after")) is Outcome.FAILED, "nothing is begun any more"
    assert "by zero" in str(rig.result("after").error)
    rig.network.release("c")
    rig.step(2)
    assert ending(rig.result("under way")) is Outcome.DONE, "what is under way ends as it would"
    monkeypatch.undo()
    await rig.close()
    assert rig.service.stopped


@pytest.mark.parametrize("error", [FabricError("open already"), ZeroDivisionError("a bug")])
async def test_a_transport_that_cannot_be_set_up_fails_every_call_and_says_why(monkeypatch, error):
    moving, transport = Moving(), LoopbackTransport("a", LoopbackNetwork())
    monkeypatch.setattr(transport, "setup", partial(fail, error))
    fabric = Fabric(transport, moving.runtime, moving.mover)
    opening = asyncio.ensure_future(fabric.open())
    await asyncio.sleep(0)
    early = fabric.register([])
    moving.runtime.service.step()
    said = repr(error) if not isinstance(error, FabricError) else str(error)
    for future in (early, fabric.metadata([])):
        with pytest.raises(FabricError) as caught:
            future.result(timeout=0)
        assert said in str(caught.value)
    with pytest.raises(FabricError) as caught:
        await opening
    assert said in str(caught.value)
    assert fabric.health()[1] != ""
    moving.serve = moving.runtime.service.step
    await moving.end()
    assert await moving.run(fabric.close()) is True


# ---- one at a time ---------------------------------------------------------------------------------------------------


async def test_in_a_call_the_mover_makes_none_and_still_copies(make):
    rig = await make()
    release = rig.mover.hold_awake()
    rig.network.hold("b")
    rig.post("under way", nbytes=PART)
    rig.step()
    rig.network.release("b")
    source, target = np.arange(256, dtype=np.uint8), np.zeros(256, np.uint8)
    plan = contiguous_rows(
        source.ctypes.data, target.ctypes.data, rows=4, regions=1, row_bytes=64, pool=4, flat="both"
    )  # fmt: skip
    real, seen = rig.transport.metadata, []

    def metadata(tokens: Any) -> bytes:
        before = rig.called()
        rig.post("asked meanwhile", nbytes=PART, at=PART)
        rig.submit("copy", None, tables=packed(plan))
        rig.step(5, seconds=0.01)
        seen.append((rig.called() - before, len(rig.results["copy"]), np.array_equal(source, target)))
        return real(tokens)

    rig.transport.metadata = metadata
    assert await rig.now(rig.fabric.metadata([]))
    assert seen == [(0, 1, True)]
    assert (rig.results["under way"], rig.results["asked meanwhile"]) == ([], [])
    rig.step(3)
    assert {ending(rig.result(tag)) for tag in rig.results} == {Outcome.DONE}
    release()


async def test_a_call_waits_until_the_mover_is_out_of_the_agent(rig):
    rig.state[records.BUSY] = 1
    future = rig.fabric.metadata([])
    for _ in range(3):
        assert rig.serve() == pytest.approx(50e-6)
    assert not future.done()
    assert rig.fabric.health() == (0.0, "")
    rig.runtime.time += 2.0
    assert rig.fabric.health() == (2.0, "")
    rig.state[records.BUSY] = 0
    rig.post(nbytes=PART)
    rig.step(3)
    assert rig.results["x"] == [], "it was asked to let the agent be"
    assert rig.serve() is None
    assert future.done()
    rig.step(2)
    assert ending(rig.result()) is Outcome.DONE
    assert int(rig.state[records.WANTED]) == 0


async def test_the_mover_has_the_agent_again_where_whoever_waited_for_it_was_refused_meanwhile(rig):
    """Else it could never see what is posted end."""
    rig.network.hold("b")
    rig.post(nbytes=PART)
    rig.step(2)
    rig.state[records.BUSY] = 1
    future = rig.fabric.metadata([])
    assert rig.serve() is not None
    rig.state[records.BROKEN] = -1
    assert rig.fabric.health()[1], "it is looked at, and breaks"
    with pytest.raises(FabricError):
        future.result(timeout=0)
    rig.state[records.BUSY] = 0
    assert rig.serve() is None
    rig.network.release("b")
    rig.step(2)
    assert ending(rig.result()) is Outcome.DONE


async def test_in_threads_no_two_calls_of_an_agent_are_made_at_a_time(threaded):
    (side, other), inside, most = threaded, [0], [0]
    for name in ("post", "poll", "release", "progress", "metadata", "register", "deregister"):
        original = getattr(side.transport, name)

        def called(*arguments: Any, real: Any = original) -> Any:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            try:
                return real(*arguments)
            finally:
                inside[0] -= 1

        setattr(side.transport, name, called)
    release = side.mover.hold_awake()
    async with asyncio.timeout(20):
        for _ in range(40):
            ended = side.post("b", other.address, SIZE)
            answers = [side.fabric.metadata([]) for _ in range(5)]
            for answer in answers:
                await asyncio.wrap_future(answer)
            assert ending(await ended) is Outcome.DONE
    release()
    assert most == [1]


# ---- closing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [False, True])
async def test_close_undoes_everything_once(make, monkeypatch, before):
    rig = await make("b", "c")
    left: list[tuple[str, object]] = [
        ("disconnect", "b"),
        ("disconnect", "c"),
        *(("deregister", key) for key in rig.keys),
    ]
    if before:
        await rig.now(rig.fabric.deregister(rig.token))
        rig.fabric.disconnect("b")
        rig.serve()
        left = left[1:2]
    undone: list[tuple[str, object]] = []
    for name in ("disconnect", "deregister"):
        real = getattr(rig.transport, name)
        monkeypatch.setattr(
            rig.transport, name, lambda what, name=name, real=real: (undone.append((name, what)), real(what))
        )
    assert await rig.close() is True
    with pytest.raises(FabricError, match="closed"):
        rig.fabric.register([]).result(timeout=0)
    assert await rig.run(rig.fabric.close()) is True
    assert undone == left
    assert rig.service.stopped
    assert rig.serve() is None
    with pytest.raises(FabricError, match="not open"):
        rig.transport.progress()
    assert rig.fabric.health() == (0.0, "")


async def test_a_mover_that_is_told_to_stop_calls_the_agent_no_more(make):
    """Whoever makes that anew waits for it no longer, though something that was given up was still looked at."""
    rig = await make(no_progress_timeout=0.5)
    rig.network.hold("b")
    await rig.given_up(nbytes=PART)
    rig.runtime.time += 1.0
    before = rig.called()
    assert await rig.mover.close(5.0)
    assert rig.called() == before


async def test_what_came_before_close_is_answered_and_who_waits_for_close_may_give_up(rig):
    await Moving.end(rig)
    waiting = rig.fabric.metadata([])
    closing = asyncio.ensure_future(rig.fabric.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.sleep(0)
    rig.closed = await rig.run(rig.fabric.close())
    assert rig.closed is True
    assert waiting.result(timeout=0)


async def test_close_under_a_write_leaves_the_transport_open(rig):
    rig.network.hold("b")
    rig.post()
    rig.step(2)
    assert await rig.close() is False
    assert ending(rig.result()) is Outcome.IN_DOUBT
    assert rig.service.stopped
    rig.transport.progress()  # still open
    assert rig.transport.keys() == rig.keys
    assert rig.transport in calls._LEAKED
    before = rig.landed()
    rig.network.release("b")
    assert rig.landed() > before, "this is why it was left open"


@pytest.mark.parametrize(("error", "clean"), [(FabricError("no"), True), (ZeroDivisionError("a bug"), False)])
async def test_close_goes_on_when_a_step_of_it_fails(make, monkeypatch, error, clean):
    rig = await make("b", "c")
    monkeypatch.setattr(rig.transport, "disconnect", partial(fail, error))
    assert await rig.close() is clean
    assert rig.transport.keys() == frozenset()


async def test_a_fabric_is_closed_without_having_been_opened_too():
    moving = Moving()
    fabric = Fabric(LoopbackTransport("z", LoopbackNetwork()), moving.runtime, moving.mover)
    await moving.end()
    assert await fabric.close() is True
    with pytest.raises(FabricError, match="closed"):
        fabric.metadata([]).result(timeout=0)
    assert fabric.join(0.0) is True


# ---- made anew -------------------------------------------------------------------------------------------------------


def write_back(rig: Rig, metadata: bytes) -> object:
    """Agent b writes into a's memory, by what it was told of it."""
    other = rig.others["b"]
    address = rig.source.ctypes.data
    rows = [np.array([[base, SIZE]], dtype=np.int64) for base in (rig.memory["b"].ctypes.data, address)]
    here, there = (Descriptors("DRAM", 0, row) for row in rows)
    return other.post(other.connect(metadata), Operation.WRITE, here, there)


async def test_a_rebuilt_agent_keeps_tokens_and_peers_and_is_reached_by_new_metadata_only(rig):
    before = await rig.now(rig.fabric.metadata([rig.token]))
    assert await rig.rebuilt()
    assert rig.transport.name == "a.1"
    after = await rig.now(rig.fabric.metadata([rig.token]))
    assert b'"a.1"' in after
    assert rig.transport.keys().isdisjoint(rig.keys), "registered again, and not as before"
    with pytest.raises(FabricError, match="gone"):
        write_back(rig, before)
    rig.memory["b"][:] = 255
    write_back(rig, after)
    assert (rig.source == 255).all()
    rig.post()
    await rig.now(rig.fabric.metadata([]))
    rig.step(10)
    assert ending(rig.result()) is Outcome.DONE, "b is told of again by the post"
    await rig.now(rig.fabric.deregister(rig.token))
    assert rig.transport.keys() == set()


async def turns(rig: Rig, count: int = 5, *, seconds: float = 0.0) -> None:
    """Let time pass while a rebuild waits."""
    for _ in range(count):
        rig.step(seconds=seconds)
        rig.serve()
        await asyncio.sleep(0.003)  # it looks every 2 ms
        await rig.settle()


async def test_parts_in_flight_have_time_to_end_and_nothing_is_posted_meanwhile(rig):
    rig.network.hold("b")
    rig.post()
    rig.step()
    answer = asyncio.ensure_future(rig.fabric.rebuild(5.0))
    await rig.settle()
    rig.post("later", at=8 * PART)
    await turns(rig, seconds=0.8)
    assert rig.step(), "it does not spin for parts that must wait"
    assert rig.network.held("b") == 1, "no part was posted"
    assert not answer.done()
    rig.network.release("b")
    assert await rig.run(answer) is True
    rig.step(30)
    assert rig.transport.name == "a.1"
    assert ending(rig.result()) is ending(rig.result("later")) is Outcome.DONE
    assert np.array_equal(rig.memory["b"][: 16 * PART], rig.source[: 16 * PART])


async def test_what_ends_late_forgets_no_peer_to_which_something_falls_silent_then(make):
    rig = await make(no_progress_timeout=2.0)
    rig.network.hold("b")
    rig.post("one", nbytes=PART)
    rig.step(8, seconds=0.4)
    rig.network.wedge("b")
    rig.post("two", nbytes=PART)
    rig.step()
    rig.fabric.disconnect("b")
    rig.step(4, seconds=0.4)
    rig.network.release("b")
    rig.step(2, seconds=0.5)
    rig.serve()
    assert rig.late == [True]
    rig.step(3, seconds=0.5)
    assert ending(rig.result("two")) is Outcome.IN_DOUBT
    assert rig.fabric.health()[1] == ""
    assert rig.fabric.agents == 1, "there is something to be seen yet"


async def test_a_peer_that_was_left_is_forgotten_with_what_nobody_can_see_the_end_of(make):
    rig = await make(no_progress_timeout=0.5)
    rig.network.hold("b")
    copy = await rig.given_up(nbytes=PART)
    rig.fabric.disconnect("b")
    rig.network.disconnect("b")
    rig.step(2, seconds=0.2)
    rig.mover.forget(copy)
    rig.step(2, seconds=0.2)
    rig.serve()
    assert (rig.late, rig.fabric.agents, rig.transport.open_handles) == ([], 0, 0)


async def test_a_part_that_is_being_posted_as_that_is_asked_for_has_time_to_end(rig):
    """The mover stands in the call, and has heard of nothing yet."""
    inside, go, real = threading.Event(), threading.Event(), rig.transport.post
    rig.transport.post = lambda *what: (inside.set(), go.wait(10), real(*what))[-1]
    rig.network.hold("b")
    rig.post(nbytes=PART)
    step = asyncio.create_task(asyncio.to_thread(rig.machine.step))
    await until(inside.is_set)
    answer = asyncio.ensure_future(rig.fabric.rebuild(5.0))
    await rig.settle()
    go.set()
    await step
    await turns(rig, 2)
    rig.network.release("b")
    assert await rig.run(answer) is True
    rig.step(2)
    assert ending(rig.result()) is Outcome.DONE


async def test_what_the_old_agent_said_of_peers_is_heard_before_there_is_another_one(rig):
    """Also where that takes long: or a peer that is met again would be taken for gone from then on."""
    native, told = rig.transport.native, []
    rig.transport.native = lambda: replace(native(), for_good=True)
    rig.mover.attach(rig.transport.native())

    def done(outcome: CopyOutcome) -> None:
        told.append(ending(outcome))
        rig.runtime.time += TURN_SECONDS  # everybody else has a turn

    rig.network.hold("b")
    for _ in range(40):
        post = Post("b", Operation.WRITE, *rig.piece(PART))
        rig.mover.submit(CopyJob(None, done, post=post), Direction.GATHER)
        rig.step()
    rig.network.disconnect("b")
    answer = asyncio.ensure_future(rig.fabric.rebuild(0.0))
    await rig.settle()
    rig.step()
    rig.network.mend("b")
    assert await rig.run(answer) is True
    await turns(rig, 20)
    assert len(told) == 40
    rig.post(nbytes=PART)
    await turns(rig)
    assert ending(rig.result()) is Outcome.DONE


async def test_no_agent_is_made_anew_while_what_runs_on_is_seen_to_end(make):
    """Else its end would never be seen."""
    rig = await make(no_progress_timeout=0.5)
    rig.network.hold("b")
    await rig.given_up(nbytes=PART, runs_on=True)
    answer = asyncio.ensure_future(rig.fabric.rebuild(10.0))
    await turns(rig, 2)
    assert not answer.done()
    rig.network.release("b")
    rig.step(2, seconds=0.2)
    assert await rig.run(answer) is True
    assert rig.late == [True]


async def test_an_agent_that_is_being_made_anew_is_called_by_nobody(rig):
    """It was destroyed, and the mover was not told yet which one there is."""
    release = rig.mover.hold_awake()
    rig.network.hold("b")
    rig.post("under way")
    rig.step(2)
    answer = asyncio.ensure_future(rig.fabric.rebuild(0.0))
    await rig.settle()
    rig.step()
    await rig.settle()
    rig.serve()
    assert rig.transport.name == "a.1"
    before = rig.called(), rig.transport.progressed
    rig.post("meanwhile", at=8 * PART)
    rig.step(5, seconds=0.01)
    assert (rig.called(), rig.transport.progressed) == before
    assert await rig.run(answer) is True
    rig.step()
    assert rig.transport.progressed > before[1]
    release()


@pytest.mark.parametrize("gives_up", [True, False])
@pytest.mark.parametrize("end", ["rebuilt", "closed"])
async def test_a_rebuild_is_answered_or_given_up_and_nothing_breaks(rig, end, gives_up, caplog):
    """As by a worker that closes: the agent is made anew all the same."""
    rig.network.wedge("b")
    rig.post()
    rig.step()
    answer = asyncio.ensure_future(rig.fabric.rebuild(5.0))
    await turns(rig, 1)
    assert not answer.done()
    if gives_up:
        answer.cancel()
        await asyncio.sleep(0)
    if end == "rebuilt":
        rig.runtime.time += 6.0
        await turns(rig, 3)
        assert rig.transport.name == "a.1"
        assert await rig.now(rig.fabric.metadata([rig.token]))
    await rig.close()
    async with asyncio.timeout(5):
        (told,) = await asyncio.gather(answer, return_exceptions=True)
    assert gives_up or told is True or "closed" in str(told), "whichever comes first"
    assert "fabric_broken" not in caplog.text


@pytest.mark.parametrize("step", ["renew", "register"])
async def test_an_agent_that_cannot_be_made_again_breaks_the_fabric(rig, monkeypatch, step):
    rig.network.hold("b")
    rig.post()
    rig.step()
    rig.mover.stop_posting()
    rig.post("queued", at=8 * PART)
    monkeypatch.setattr(rig.transport, step, partial(fail, FabricError("there is no device any more")))
    with pytest.raises(FabricError, match="no device"):
        await rig.rebuilt()
    with pytest.raises(FabricError, match="no device"):
        rig.fabric.metadata([]).result(timeout=0)
    rig.step(2)
    assert ending(rig.result()) is Outcome.IN_DOUBT
    assert ending(rig.result("queued")) in {Outcome.STOPPED, Outcome.FAILED}
    rig.post("after", at=8 * PART)
    rig.step(2)
    await rig.settle()
    rig.step()
    assert ending(rig.result("after")) is Outcome.FAILED, "nobody waits for an agent that does not come"
    assert "no device" in str(rig.result("after").error)
    await rig.close()
    assert rig.service.stopped


async def test_what_was_given_up_runs_on_where_the_fabric_breaks_before_the_agent_has_ended(rig):
    """What it reads may land yet, so it must not be told that nothing moves here any more."""
    rig.memory["b"][:] = 7
    rig.network.hold("b")
    rig.post(nbytes=PART, operation=Operation.READ)
    rig.step()
    answer = asyncio.ensure_future(rig.fabric.rebuild(0.0))
    await rig.settle()
    rig.state[records.BROKEN] = -1
    assert rig.fabric.health()[1], "it is looked at, and breaks"
    with pytest.raises(FabricError):
        await rig.run(answer)
    rig.step(2)
    rig.network.release("b")
    assert (rig.source[:PART] == 7).all(), "it has landed"
    rig.ended(Outcome.IN_DOUBT, may_move=True)
    assert (rig.late, await rig.close()) == ([], False)


async def test_a_rebuild_is_refused_after_the_end(rig):
    await rig.close()
    with pytest.raises(FabricError, match="closed"):
        await rig.fabric.rebuild(60.0)


async def test_a_peer_that_is_gone_fails_its_own_post_after_a_rebuild(make):
    rig = await make("b", "c")
    assert await rig.rebuilt()
    rig.others["b"].close()
    for peer in ("b", "c"):
        rig.post(peer, peer=peer)
    await rig.now(rig.fabric.metadata([]))
    rig.step(10)
    assert [ending(rig.result(peer)) for peer in ("b", "c")] == [Outcome.FAILED, Outcome.DONE]
    rig.fabric.disconnect("b")
    rig.serve()
    assert await rig.rebuilt()
    rig.fabric.disconnect("c")  # which the new agent was not told of
    rig.serve()
    assert rig.fabric.agents == 0
    assert await rig.close() is True


async def test_a_peer_that_cannot_be_met_again_fails_its_own_posts(make, monkeypatch):
    rig = await make("b", "c")
    rig.mover.stop_posting()
    for peer in ("b", "c"):
        rig.post(peer, peer=peer)
    rig.step(2)
    connect = rig.transport.connect

    def meets(metadata: bytes) -> str:
        if b'"b"' in metadata:
            raise FabricError("it does not answer")
        return connect(metadata)

    monkeypatch.setattr(rig.transport, "connect", meets)
    assert await rig.rebuilt()
    rig.post("again", peer="b")
    await rig.now(rig.fabric.metadata([]))
    rig.step(10)
    outcomes = {tag: ending(rig.result(tag)) for tag in ("b", "c", "again")}
    assert outcomes == {"b": Outcome.FAILED, "c": Outcome.DONE, "again": Outcome.FAILED}
    assert "does not answer" in str(rig.result("again").error)


# ---- health ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["calls", "posts"])
async def test_whoever_does_not_come_is_late_by_the_oldest_that_waits(rig, what):
    rig.runtime.time += 1.0
    for number, seconds in enumerate((3.0, 4.0)):
        rig.fabric.metadata([]) if what == "calls" else rig.post(str(number))
        rig.runtime.time += seconds
    assert rig.fabric.health() == (pytest.approx(7.0), "")
    rig.serve()
    rig.step(30)
    assert rig.fabric.health() == (0.0, "")


async def test_what_is_left_in_doubt_makes_nobody_late(make):
    rig = await make(no_progress_timeout=0.5)
    rig.network.break_next("b")
    rig.network.break_next("b", skip=1)
    rig.post(nbytes=PART)
    rig.step(5)
    assert rig.mover.lingering == 1
    rig.runtime.time += 50.0
    assert rig.fabric.health() == (0.0, "")


async def test_a_call_that_does_not_return_is_late(make, monkeypatch):
    rig, seen = await make(), []

    def deregister(token: object) -> None:
        rig.runtime.time += 11.0
        seen.append(rig.fabric.health())

    monkeypatch.setattr(rig.transport, "deregister", deregister)
    await rig.now(rig.fabric.deregister(rig.token))
    assert seen == [(11.0, "")]
    assert rig.fabric.health() == (0.0, "")


async def test_what_broke_the_fabric_is_named_until_it_is_closed(rig, monkeypatch):
    monkeypatch.setattr(rig.transport, "progress", partial(fail, FabricError("the device is gone")))
    release = rig.mover.hold_awake()
    rig.step()
    release()
    assert rig.fabric.health() == (0.0, "the device is gone")
    with pytest.raises(FabricError, match="device is gone"):
        rig.fabric.metadata([]).result(timeout=0)
    await rig.close()
    rig.runtime.time += 9.0
    assert rig.fabric.health() == (0.0, "")
