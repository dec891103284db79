"""Cancellation at every step and by every means: when the await returns, memory is safe, or says that it is not."""
# what failed has a report, and what is fetched was offered
# pyright: reportOptionalMemberAccess=false

import asyncio
import contextlib
from typing import Any

import pytest
import torch
from inside import before_connecting, begin_copies_by, take_all, time_out
from stage import SOON, Cache, Copied, Gate, eventually, frames, quiet

from kvxfer import BlocksError, KvxferError, MemoryInDoubt, Released, TransferTimeoutError
from kvxfer.copy.mover import Copy

TOKENS = range(8)


class Step:
    """Brings a fetch to one step and keeps it there until `go`."""

    def __init__(self, stage, prefill, decode, source, target):
        self.stage, self.prefill, self.decode = stage, prefill, decode
        self.source, self.target = source, target
        self.offer: Any = None
        self.after = None
        self.untouched: Any = None
        self.canary: Any = None
        self.answers = self.safe_at_once = True
        self.go = lambda: None
        self.reached = lambda: True

    def fetch(self, **options):
        after = {"after": self.after} if self.after else {}
        return self.decode.fetch(self.prefill.engine.ticket("r"), [3, 4], tokens=TOKENS, **after, **options)

    def offered(self):
        self.offer = self.prefill.offer("r", [1, 2], tokens=8)


def held(step):
    step.offered()
    network = step.stage.network
    network.hold("*")
    step.reached = lambda: network.held("*")
    step.go = lambda: network.release("*")


def connecting(step):
    step.offered()
    task: Any = None

    async def never(*_):
        nonlocal task
        task = asyncio.current_task()
        await asyncio.get_running_loop().create_future()

    go_on = before_connecting(step.decode, never)
    step.reached = lambda: task is not None

    def go():
        task.cancel()
        go_on()

    step.go = go


def parked(step):
    step.reached = lambda: step.prefill.describe()["sending"] == 1


def prefill_not_ready(step):
    gate = Gate()
    step.offer = step.prefill.offer("r", [1, 2], tokens=8, after=gate)
    step.reached = lambda: frames(step.decode, "Accept")
    step.go = lambda: setattr(gate, "fired", True)


def own_event(step):
    step.offered()
    step.after = Gate()
    step.reached = lambda: frames(step.decode, "Accept")
    step.go = lambda: setattr(step.after, "fired", True)


def full(worker_name, side):
    def hold(step):
        step.offered()
        worker = getattr(step, worker_name)
        taken = take_all(worker, side)
        step.reached = lambda: worker.describe()["arena"][side].waiting_requests
        step.go = taken.release

    hold.__name__ = f"no_room_to_{side}"
    return hold


def executor(worker_name, name):
    """A gather or a scatter that takes its time."""

    def slow(step):
        step.offered()
        begun = []

        def begin(submit, job, direction):
            if not job.tables.launches:
                return submit(job, direction)
            begun.append((submit, job, direction))
            return Copy(job, 0)

        undo = begin_copies_by(getattr(step, worker_name), begin)
        step.reached = lambda: begun

        def go():
            while begun:
                submit, *job = begun.pop()
                submit(*job)
            undo()

        step.go = go

    slow.__name__ = name
    return slow


EVERY = [connecting, parked, prefill_not_ready, own_event, held]
STAGED = [
    full("prefill", "send"),
    full("decode", "receive"),
    executor("prefill", "gathering"),
    executor("decode", "scattering"),
]
CASES = [(route, step) for route in ("staged", "direct", "pull") for step in EVERY] + [
    ("staged", step) for step in STAGED
]
NOT_SAFE_AT_ONCE = {("direct", "held"), ("pull", "held"), ("staged", "scattering")}
"""Only what may write the caller's blocks at that moment."""
UNANSWERED = {("staged", "held"), ("staged", "gathering")}
"""What is held at the peer keeps the answer back."""


def answered(route, step):
    return SOON if (route, step.__name__) in UNANSWERED else {}


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1].__name__}")
async def at(request, stage, source, target):
    """A fetch that can be brought to a step. When it was given up the `canary` stays so, and it is tried again."""
    route, step = request.param
    prefill, decode = await stage.pair(source, target, route=route, window=2, **answered(route, step))
    at = Step(stage, prefill, decode, source, target)
    step(at)
    at.answers = (route, step.__name__) not in UNANSWERED
    at.safe_at_once = (route, step.__name__) not in NOT_SAFE_AT_ONCE
    at.untouched = Copied(target)
    yield at
    await quiet(prefill, decode)
    assert all(torch.equal(target.memory[layer], kept) for layer, kept in at.canary.items())
    if at.offer is None:
        at.offered()
    at.after = None
    copied = Copied(target).bring(source, [1, 2], [3, 4], TOKENS)
    await asyncio.wait_for(at.fetch(), 5)
    copied.check()
    assert isinstance(await at.offer.released(), Released)
    await quiet(prefill, decode)


async def not_yet(task):
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
async def test_cancel_at_every_step(at, target, again):
    task = asyncio.create_task(at.fetch(keep=True))
    await eventually(at.reached)
    at.untouched.check()
    task.cancel()
    if again:
        await asyncio.sleep(0)
        task.cancel()
    if not at.safe_at_once:
        await eventually(lambda: at.decode.describe()["receiving"])
        await not_yet(task)
        at.go()
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    if at.answers:  # what is not held does not have to be waited for
        assert loop.time() - began < at.decode.config.revoke_timeout
    if at.safe_at_once:
        at.untouched.check()
        for memory in target.memory.values():
            memory.add_(1)  # the caller uses its blocks again
        at.go()
    at.canary = target.clone()


async def test_a_time_out_at_every_step(at, target):
    """As a cancellation: it is told when memory is safe, a second one changes nothing, and the ticket works again."""
    task = asyncio.create_task(at.fetch(timeout=60, keep=True))
    await eventually(at.reached)
    outcome = time_out(at.decode, times=2)
    task.cancel()  # and a caller who gives up in that moment
    if not at.safe_at_once:
        await not_yet(task)
        at.go()
    await asyncio.wait([task, outcome])
    error = outcome.exception()
    assert isinstance(error, TransferTimeoutError)
    assert error.memory_safe
    assert error.report.memory_safe
    if at.safe_at_once:
        at.untouched.check()
        at.go()
    at.canary = target.clone()
    with contextlib.suppress(asyncio.CancelledError, TransferTimeoutError):
        await task


async def test_cancel_between_chunks(stage, target):
    source = Cache(blocks=64)
    target = Cache(blocks=64)
    prefill, decode = await stage.pair(source, target, route="staged", chunk_bytes="1KiB", window=1)
    offer = prefill.offer("r", list(range(64)), tokens=256)
    stage.network.hold("decode")
    transfer = decode.start_fetch(prefill.engine.ticket("r"), list(range(64)), tokens=range(256), keep=True)
    for _ in range(3):
        await eventually(lambda: stage.network.held("decode"))
        stage.network.release("decode", 1)
    await eventually(lambda: stage.network.held("decode"))
    transfer.cancel()
    transfer.cancel()
    assert stage.network.release("decode") == 1
    with pytest.raises(asyncio.CancelledError):
        await transfer
    canary = target.clone()
    await quiet(prefill, decode)
    assert all(torch.equal(target.memory[layer], kept) for layer, kept in canary.items())
    assert len(stage.network.log) == 4  # no chunk was begun after the cancel
    copied = Copied(target).bring(source, list(range(64)), list(range(64)), range(256))
    await decode.fetch(prefill.engine.ticket("r"), list(range(64)), tokens=range(256), timeout=10)
    copied.check()
    await offer.released()


# --- longer than revoke_timeout


async def test_direct_in_doubt_until_the_peer_has_answered(stage, source, target):
    prefill, decode = await stage.pair(source, target, route="direct", **SOON)
    offer, transfer = await stage.in_flight(prefill, decode, "decode", keep=True)
    transfer.cancel()
    with pytest.raises(MemoryInDoubt) as caught:
        await transfer
    doubt = caught.value
    assert isinstance(doubt.__cause__, asyncio.CancelledError)
    assert not doubt.memory_safe
    assert doubt.blocks == {"default": (3, 4)}
    assert doubt.peer.startswith("prefill")
    for use in (
        lambda: decode.start_fetch(prefill.engine.ticket("r"), [4], tokens=range(4)),
        lambda: decode.offer("mine", [3], tokens=4),
    ):
        with pytest.raises(BlocksError, match="may still write it; await settled"):
            use()
    settling = asyncio.create_task(doubt.settled())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not settling.done()
    assert decode.describe()["in_doubt"] == 1
    copied = Copied(target).bring(source, [1, 2], [3, 4], TOKENS)
    stage.network.release("decode")  # the late bytes land
    async with asyncio.timeout(30):
        await settling
        await doubt.settled()
    copied.expected = target.clone()
    await quiet(prefill, decode)
    copied.check()
    copied = Copied(target).bring(source, [1, 2], [3, 4], TOKENS)
    await decode.fetch(prefill.engine.ticket("r"), [3, 4], tokens=TOKENS, timeout=5)
    copied.check()
    assert isinstance(await offer.released(), Released)


async def test_pull_in_doubt_on_both_sides_until_the_read_has_ended(stage, source, target):
    prefill, decode = await stage.pair(source, target, route="pull", **SOON)
    offer, transfer = await stage.in_flight(prefill, decode, "prefill")
    with pytest.raises(MemoryInDoubt) as reading:
        await offer.withdraw()  # the puller does not answer while it reads
    with pytest.raises(MemoryInDoubt) as writing:
        await transfer
    assert reading.value.blocks == {"default": [1, 2]} or reading.value.blocks == {"default": (1, 2)}
    with pytest.raises(BlocksError, match="may still read it"):
        prefill.offer("again", [2], tokens=4)
    with pytest.raises(BlocksError, match="may still write it"):
        decode.offer("again", [3], tokens=4)
    stage.network.release("prefill")
    async with asyncio.timeout(30):
        await reading.value.settled()
        await writing.value.settled()
    await quiet(prefill, decode)
    await stage.bring(prefill, decode, "again")


async def test_who_waits_for_layers_hears_of_the_failure(stage, source, target):
    prefill, decode = await stage.pair(source, target)
    offer, transfer = stage.begin(prefill, decode, offered={"streaming": True})
    waiting = asyncio.create_task(transfer.layers(0, 1))
    await eventually(lambda: prefill.describe()["sending"])
    await offer.withdraw()
    with pytest.raises(KvxferError, match="withdrawn"):
        await waiting
    with pytest.raises(KvxferError, match="withdrawn"):
        await transfer.layers(1, 2)
    assert transfer.failed_blocks == {"default": [3, 4]}
    assert transfer.memory_safe
    await quiet(decode)


async def test_memory_that_is_granted_in_the_moment_of_the_end_is_given_back(stage, source, target, caplog):
    prefill, decode = await stage.pair(source, target, route="staged")
    taken = take_all(prefill, "send")
    offer, transfer = stage.begin(prefill, decode)
    await eventually(lambda: prefill.describe()["arena"]["send"].waiting_requests)
    taken.release()  # granted at once, before the one who waits for it runs again
    await offer.withdraw()
    with pytest.raises(KvxferError, match="withdrawn"):
        await transfer
    await quiet(prefill, decode)
    assert "task_failed" not in caplog.text, "nor is it used"
