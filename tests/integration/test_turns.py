"""News that comes in the turns of the loop in which a transfer goes on with something else."""

import asyncio
import math
import threading
from collections import Counter
from itertools import pairwise

import pytest
from inside import before_steps, keep_plans, mover, pause_grants, resume_grants, staging, take, take_all
from stage import Broken, Cache, Copied, Gate, Tap, eventually, extents, frames, quiet, turns

from kvxfer import KvxferError
from kvxfer.copy.tables import Kind
from kvxfer.copy.template import Cut
from kvxfer.decode.receiver import Grants
from kvxfer.plans.pairs import BoundPlan
from kvxfer.prefill.sender import Sender
from kvxfer.protocol.messages import Accept, Ready

IDS, INTO = [3, 2, 1, 0], [4, 5, 6, 7]
SMALL = {"chunk_bytes": "2KiB", "arena_bytes": "64KiB"}


def tasks_of_senders():
    return [task for task in asyncio.all_tasks() if task.get_name().startswith("kvxfer send")]


async def test_block_lists_that_grow_while_the_first_plan_is_made_are_planned_too(stage, route, monkeypatch):
    source, target = Cache(), Cache()
    prefill, decode = await stage.pair(source, target, route=route)
    await stage.bring(prefill, decode, "before")
    plans = keep_plans(decode, monkeypatch)
    offer = prefill.offer("r", streaming=True)
    transfer = decode.start_fetch(prefill.engine.ticket("r"), INTO, tokens=range(16), timeout=20)
    copied = Copied(target).bring(source, IDS, INTO, range(16))
    offer.extend(IDS[:1], tokens=range(4))
    offer.ready()
    await eventually(lambda: plans)
    heard = frames(decode, "Ready")
    offer.extend(IDS[1:], tokens=range(4, 16))
    offer.ready()
    offer.finish()
    await eventually(lambda: frames(decode, "Ready") > heard)

    async def plan():
        while True:
            while plans:
                plans.pop(0)()
            await asyncio.sleep(0)

    planning = asyncio.create_task(plan())
    try:
        await transfer
    finally:
        planning.cancel()
    copied.check()
    await quiet(prefill, decode)


async def test_an_offer_that_is_finished_when_all_was_moved_leaves_no_task_behind(stage, source, target, route):
    prefill, decode = await stage.pair(source, target, route=route)
    copied = Copied(target).bring(source, [1, 2], [3, 4], range(8))
    offer, transfer = stage.begin(prefill, decode, offered={"streaming": True})
    offer.ready()
    await transfer.layers(0, 2)
    copied.check()
    offer.finish()
    await transfer
    await offer.released()
    await quiet(prefill, decode)
    await eventually(lambda: not tasks_of_senders(), timeout=5)


async def test_what_is_to_be_announced_when_the_agent_was_made_anew_is_given_up_with_its_transfer(stage):
    prefill, decode = await stage.pair(Cache(), Cache(), route="pull")
    await stage.bring(prefill, decode, "before")
    pause_grants(prefill)
    _, transfer = stage.begin(prefill, decode)
    await eventually(tasks_of_senders)
    transfer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await transfer
    await eventually(lambda: not tasks_of_senders(), timeout=5)
    resume_grants(prefill)
    await quiet(prefill, decode)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("route", ["staged", "direct", "pull", "mapped"])
async def test_an_event_that_cannot_be_asked_fails_the_fetch_and_is_no_defect(stage, route, side, caplog):
    prefill, decode = await stage.pair(Cache(shared=True), Cache(shared=True), route=route)
    broken = {"after": Broken()}
    _, transfer = stage.begin(prefill, decode, **({"offered": broken} if side == "prefill" else broken))
    with pytest.raises(KvxferError, match="cannot be queried"):
        await transfer
    assert "task_failed" not in caplog.text
    await quiet(decode)


async def test_a_fetch_whose_blocks_are_in_use_yet_leaves_send_memory_to_others(stage):
    """Its prefill rank holds none of it while there is no place at the decode rank, and goes on when there is."""
    source, target = Cache(blocks=32), Cache(blocks=32)
    prefill, decode = await stage.pair(source, target, route="staged", window=2, prefill={"arena_bytes": "8KiB"})
    copied = Copied(target).bring(source, range(16), range(16), range(64))
    gate = Gate()

    _, first = stage.begin(prefill, decode, "first", range(8), range(8), range(32), after=gate)
    await eventually(lambda: len(stage.network.log) == 2 and not extents(prefill, "send"))
    _, second = stage.begin(prefill, decode, "second", range(8, 16), range(8, 16), range(32))
    await second
    assert not first.done
    gate.fired = True
    await first
    copied.check()
    await quiet(prefill, decode)


async def test_chunks_whose_steps_are_made_as_a_flow_is_concluded_go_into_the_next_one(stage, monkeypatch):
    prefill, decode = await stage.pair(Cache(blocks=64), Cache(blocks=64), route="staged", window=2)
    concluded = []

    async def wait(sender):
        if sender._granted and (active := sender._active) and active.flow is not None:
            more, granted = active.allowed < sender._granted[0].stop, sender._granted
            await eventually(lambda: active.finished if more else len(granted) > 1 or granted[-1].stop == 64)
            concluded.append(more and active.finished)

    before_steps(wait, monkeypatch)
    noted: list[int] = []
    monkeypatch.setattr(Grants, "measure_turns", lambda _, copied, *__: noted.append(copied))
    monkeypatch.setattr(Grants, "turns", lambda _: 4 if noted else 2)  # one grant of few after the other
    await stage.bring(prefill, decode, "r", range(64), range(64), range(256))
    assert any(concluded)
    await quiet(prefill, decode)


@pytest.mark.parametrize("late", [False, True])
async def test_whoever_waits_for_a_layer_hears_soon_that_it_is_there(stage, late, monkeypatch):
    """Also if nobody waited as its chunks were begun, where movers tell each other and loops hear seldom."""
    monkeypatch.setattr("kvxfer.copy.mover._LATE_NS", 3600 * 10**9)
    pair = await stage.pair(Cache(layers=range(16)), Cache(layers=range(16)), route="staged", window=4, **SMALL)
    await stage.bring(*pair, "before")
    stage.network.hold("decode")
    _, transfer = stage.begin(*pair, timeout=20)
    waiting = None if late else asyncio.ensure_future(transfer.layers(0, 2))
    for _ in range(2):  # of the first one all hear
        await eventually(lambda: stage.network.held("decode") == 4)
        stage.network.release("decode", posts=1)
    await eventually(lambda: stage.network.held("decode") == 4)  # the next ones are in their places
    await asyncio.wait_for(waiting or transfer.layers(0, 2), 5)
    stage.network.release("decode")
    await transfer
    await quiet(*pair)


async def test_a_ring_that_is_shorter_than_was_wished_for_is_kept_full(stage, monkeypatch):
    """No more is granted of it than there are places, so each is used again by this side's word."""
    monkeypatch.setattr("kvxfer.copy.mover._LATE_NS", 3600 * 10**9)
    pair = await stage.pair(Cache(layers=range(16)), Cache(layers=range(16)), route="staged", window=4, **SMALL)
    await stage.bring(*pair, "before")
    taken = take(pair[1], "receive", staging(pair[1], "receive").length - 3 * 2048)
    _, transfer = await stage.in_flight(*pair, to="decode", timeout=20)
    for _ in range(8):
        await eventually(lambda: stage.network.held("decode") == 3)
        stage.network.release("decode", posts=1)
    stage.network.release("decode")
    await transfer
    taken.release()
    await quiet(*pair)


async def test_a_lease_that_is_renewed_holds_for_what_waits_behind_other_chunks(stage):
    """Chunks that were granted ahead go on in another run of the sender's, as others wait for memory: slowly."""
    source, target = Cache(blocks=32), Cache(blocks=32)
    few = {"arena_bytes": "8KiB", "grant_lease": 20.0}  # which bounds its own wait for send memory too
    prefill, decode = await stage.pair(source, target, route="staged", window=2, prefill=few, grant_lease=1.0)

    await stage.bring(prefill, decode, "before")  # from then on the agents know each other
    copied = Copied(target).bring(source, range(8), range(8), range(32))
    copied.bring(source, range(8, 16), range(8, 16), range(32))
    everything = take_all(prefill, "send")
    stage.network.hold("decode")
    _, first = stage.begin(prefill, decode, "first", range(8), range(8), range(32))
    await eventually(lambda: frames(prefill, "Reserve") >= 2)
    _, second = stage.begin(prefill, decode, "second", range(8, 16), range(8, 16), range(32))
    await eventually(lambda: frames(prefill, "Reserve") >= 3)
    everything.release()
    await eventually(lambda: stage.network.held("decode"))
    await asyncio.sleep(0.6)  # the link is slow: more than half of a lease
    stage.network.release("decode", 1)
    await asyncio.sleep(0.5)
    stage.network.release("decode")
    await first
    await second
    copied.check()
    await quiet(prefill, decode)


@pytest.mark.parametrize("route", ["mapped", "staged"])
async def test_while_tables_of_many_rows_are_made_the_loop_has_turns(stage, route, monkeypatch):
    monkeypatch.setattr("kvxfer.plans.pairs.SMALL_PLAN", 1)  # a chunk has more rows
    tables, turn, made = Cut.tables, [0], Counter[tuple[Kind, int]]()

    def counted(cut, kind, chunks, *given, **named):
        made[kind, turn[0]] += len(chunks)
        return tables(cut, kind, chunks, *given, **named)

    async def count():
        while True:
            turn[0] += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(Cut, "tables", counted)
    source, target = (Cache(layers=range(24), shared=True) for _ in range(2))
    prefill, decode = await stage.pair(source, target, route=route, chunk_bytes="8KiB")
    copied, blocks = Copied(target).bring(source, range(16), range(16), range(64)), range(16)
    offer = prefill.offer("r", streaming=True)
    offer.extend(blocks, tokens=range(64))
    offer.ready(layers=[0], tokens=64)
    counting = asyncio.create_task(count())
    transfer = decode.start_fetch(offer.ticket, blocks, tokens=range(64))
    await transfer.layers(0, 1)
    offer.ready(tokens=64)
    offer.finish()
    await transfer
    counting.cancel()
    copied.check()
    assert made.total() >= 24
    assert max(made.values()) <= 2, "of one chunk at a time; a turn of `count` may see the end of one and another"


async def test_block_lists_that_a_peer_makes_long_are_planned_in_a_thread(stage, monkeypatch):
    """However little of them was asked for: every id of them is looked at."""
    threads, grown, here = set(), BoundPlan.grown, threading.get_ident()

    def recorded(bound, spans, covered):
        if covered == 0:  # at the decode rank
            threads.add(threading.get_ident())
        return grown(bound, spans, covered)

    monkeypatch.setattr(BoundPlan, "grown", recorded)
    monkeypatch.setattr("kvxfer.site.SMALL_PLAN", 64)
    prefill, decode = await stage.pair(Cache(blocks=256), Cache())
    offer = prefill.offer("r", streaming=True)
    offer.extend([1], tokens=range(4))
    transfer = decode.start_fetch(offer.ticket, [3, 4], tokens=range(8), timeout=20)
    await eventually(lambda: frames(decode, "Accept"))
    offer.extend(list(range(2, 202)), tokens=range(4, 804))
    offer.ready()
    offer.finish()
    await transfer
    assert threads
    assert here not in threads


async def test_of_a_stream_in_very_many_chunks_a_few_are_announced_in_a_turn(stage, monkeypatch):
    """The decode rank says how small they are, and the offer's owner may mark all of them as ready at once."""
    monkeypatch.setattr("kvxfer.prefill.sender._LOOKED_AT", 2)
    tap, source, target = Tap(monkeypatch), Cache(layers=range(6)), Cache(layers=range(6))
    prefill, decode = await stage.pair(source, target, chunk_bytes="1KiB")
    copied = Copied(target).bring(source, IDS, INTO, range(16))
    offer = prefill.offer("r", streaming=True)
    offer.extend(IDS, tokens=range(16))
    transfer = decode.start_fetch(offer.ticket, INTO, tokens=range(16), timeout=20)
    await eventually(lambda: tap.of(Accept))
    offer.ready()
    await eventually(lambda: max((message.chunks for message in tap.of(Ready)), default=0) == tap.of(Accept)[0].chunks)
    offer.finish()
    await transfer
    copied.check()
    counts = [0, *(message.chunks for message in tap.of(Ready))]
    assert len(counts) > 3
    assert all(after - before <= 2 for before, after in pairwise(counts))


class Ill(Gate):
    """An event of the caller's: from a query on it raises what it is told to."""

    def __init__(self, error: BaseException, after: float):
        super().__init__()
        self.error, self.left = error, after

    def query(self):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return self.fired


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("side", ["offer", "fetch"])
async def test_an_event_that_says_it_was_cancelled_fails_its_transfer_and_no_other(stage, side, after):
    """As the result of a future that was cancelled does."""
    prefill, decode = await stage.pair(Cache(), Cache(), route="direct")
    await stage.bring(prefill, decode, "before")
    gate, begun = Gate(), []
    for event, request, into in ((gate, "well", (5, 6)), (Ill(asyncio.CancelledError(), after), "ill", (3, 4))):
        late = {"after": event} if side == "fetch" else {"offered": {"after": event}}
        begun.append(stage.begin(prefill, decode, request, into=into, **late))
    (_, second), (offer, first) = begun
    with pytest.raises(KvxferError, match="cannot be queried"):
        await asyncio.wait_for(first, 5)
    gate.fired = True
    await asyncio.wait_for(second, 5)
    await offer.withdraw()
    await quiet(prefill, decode)


async def test_a_signal_while_events_are_asked_loses_none_of_them(stage):
    prefill, decode = await stage.pair(Cache(), Cache(), route="direct")
    await stage.bring(prefill, decode, "before")
    ill, gate, begun = Ill(KeyboardInterrupt(), math.inf), Gate(), []
    for event, request, into in ((ill, "first", (5, 6)), (gate, "second", (3, 4))):
        begun.append(stage.begin(prefill, decode, request, into=into, after=event)[1])
    copies = mover(decode)
    await eventually(lambda: len(copies._asked.steps) == 2)
    ill.left = 0
    with pytest.raises(KeyboardInterrupt):
        copies._asked._ask()
    ill.left, ill.fired, gate.fired = math.inf, True, True
    await asyncio.gather(*(asyncio.wait_for(transfer, 5) for transfer in begun))


@pytest.mark.parametrize("chunk", ["2KiB", "16MiB"])
async def test_a_stream_that_became_ready_token_by_token_holds_no_turn_up(stage, chunk):
    """Each after an event of its own: no chunk is compared with all of them, nor is an event with those before it."""
    source, target = (Cache(blocks=1024, block_tokens=8, layers=[0]) for _ in range(2))
    prefill, decode = await stage.pair(source, target, route="staged", chunk_bytes=chunk, arena_bytes="32MiB")
    await stage.bring(prefill, decode, "before")
    copied = Copied(target).bring(source, range(1024), range(1024), range(8192))
    offer = prefill.offer("r", list(range(1024)), tokens=8192, streaming=True)
    gates = [Gate() for _ in range(8192)]
    for at, gate in enumerate(gates):
        offer.ready(tokens=at + 1, after=gate)
    with turns() as took:
        transfer = decode.start_fetch(offer.ticket, list(range(1024)), tokens=range(8192), timeout=20)
        await eventually(lambda: len(took) > 1000)
        for gate in gates:
            gate.fired = True
        offer.finish()
        await transfer
    copied.check()
    assert max(took) < 0.05


async def test_of_very_many_chunks_that_are_listed_a_few_are_in_a_turn(stage, monkeypatch):
    monkeypatch.setattr("kvxfer.prefill.sender._LISTED_AT_ONCE", 2)
    source, target = Cache(blocks=32, layers=range(4)), Cache(blocks=32, layers=range(4))
    prefill, decode = await stage.pair(source, target, route="direct", chunk_bytes="1KiB")
    listed: Counter[int] = Counter()  # by turn
    make, turn = Sender._listed_step, 0

    def noted(*given):
        listed[turn] += 1
        return make(*given)

    async def count():
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    monkeypatch.setattr(Sender, "_listed_step", noted)
    counting = asyncio.create_task(count())
    result, _ = await stage.bring(prefill, decode, "r", range(32), range(32), range(128))
    counting.cancel()
    assert listed.total() == result.stats.chunks > 100
    assert max(listed.values()) <= 4
