"""The lane to a decode rank is measured in memory that it lends: once, where it matters, at nobody's cost."""
# the private state of workers that are open
# pyright: reportOptionalMemberAccess=false

import asyncio

import pytest
from msgspec.structs import replace
from stage import Cache, Copied, Tap, eventually, quiet, taken

from kvxfer import PeerLostError, gauging, rebuilding
from kvxfer.gauging import LEAST_LOAN, Gauging, loan_bytes
from kvxfer.lending import Lender
from kvxfer.memory import ExtentState
from kvxfer.protocol.messages import WHOLE, Accept, Cancel, Capability, Fetch, KvAgentResult, Probe, Status

BLOCKS = list(range(4))
TOKENS = range(16)
LARGE = {"arena_bytes": "16MiB"}
MIB = 1 << 20
STATES = {"writing": ExtentState.WRITING, "quarantined": ExtentState.QUARANTINED}


@pytest.fixture
def tap(monkeypatch):
    return Tap(monkeypatch)


async def moved(prefill, decode, source, target, request):
    """One request, every byte of it."""
    copied = Copied(target).bring(source, BLOCKS, BLOCKS[::-1], TOKENS)
    offer = prefill.offer(request, BLOCKS, tokens=len(TOKENS))
    result = await decode.fetch(prefill.engine.ticket(request), BLOCKS[::-1], tokens=TOKENS, timeout=5)
    copied.check()
    await offer.released()
    return result


async def met(stage, **config):
    source, target = Cache(), Cache(layout="HND")
    prefill, decode = await stage.pair(source, target, **{**LARGE, **config})
    return prefill, decode, source, target


def lane(prefill):
    (peer,) = prefill.describe()["peers"]
    return peer["lane"]


def loans(worker, state=None):
    extents = worker._site.receive_desk.share.extents()
    return [extent for extent in extents if state is None or extent.state is STATES[state]]


def measurings(tap):
    return [probe for probe in tap.of(Probe) if not probe.nonce]


def answers(tap, status):
    lent = {probe.transfer for probe in measurings(tap)}
    return [m for m in tap.of(KvAgentResult) if m.transfer in lent and m.status is status]


def cut(worker):
    for link in list(worker._links):
        link._transport.abort()


async def probing(stage, **config):
    """Two workers between which one request has moved, and a measurement is under way."""
    prefill, decode, source, target = await met(stage, **config)
    offer = prefill.offer("first", BLOCKS, tokens=len(TOKENS))
    transfer = decode.start_fetch(prefill.engine.ticket("first"), BLOCKS, tokens=TOKENS, timeout=5)
    await asyncio.wait_for(transfer.outcome, 5)
    stage.network.hold("*")  # before the loop turns again: nothing of the measurement is posted yet
    await offer.released()
    await eventually(lambda: stage.network.held("*"))
    assert loans(decode, "writing")
    return prefill, decode, source, target


async def test_the_first_transfer_over_a_lane_has_it_measured(stage, tap):
    prefill, decode, source, target = await met(stage)
    assert not measurings(tap)
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: lane(prefill) is not None)
    await quiet(prefill, decode)
    (probe,) = measurings(tap)
    assert probe.bytes >= LEAST_LOAN
    assert answers(tap, Status.OK) == [KvAgentResult(probe.transfer, WHOLE, Status.OK, 0, True)]
    found = lane(prefill)
    assert found.bytes_per_s > 0
    assert found.post_s >= 0
    for number in range(3):
        await moved(prefill, decode, source, target, f"later{number}")
    await quiet(prefill, decode)
    assert len(measurings(tap)) == 1
    assert not decode.describe()["peers"][0]["lane"], "the decode rank does not choose"


async def test_who_fetches_without_a_pause_does_not_overtake_it(stage, tap):
    """It is asked for before the caller goes on: a peer that moves the next request already would have no time."""
    prefill, decode, _, _ = await met(stage)
    for number in range(3):
        prefill.offer(str(number), BLOCKS, tokens=len(TOKENS))
    for number in range(3):
        await decode.fetch(prefill.engine.ticket(str(number)), BLOCKS, tokens=TOKENS, timeout=5)
    await quiet(prefill, decode)
    assert len(measurings(tap)) == len(answers(tap, Status.OK)) == 1
    assert lane(prefill) is not None


async def test_what_is_measured_decides(stage):
    prefill, decode, source, target = await met(stage)
    first = await moved(prefill, decode, source, target, "first")
    await eventually(lambda: lane(prefill) is not None)
    incarnation = decode._site.incarnation
    estimates = prefill._site.estimates
    shape = {"nbytes": first.stats.bytes, "chunks": 1, "pieces": 8}
    before = {route: estimates._profile.seconds(route, **shape) for route in estimates._profile.routes}
    after = {route: estimates.seconds(incarnation, route, **shape) for route in estimates._profile.routes}
    assert {route.name for route in after if after[route] != before[route]} >= {"DIRECT"}


@pytest.mark.parametrize(
    "config",
    [
        {"route": "staged"},
        {"route": "direct"},
        {"route": "pull"},
        {"trust": "none"},
        {"arena_bytes": "4MiB"},
        {"arena_bytes": 0, "chunk_bytes": "2KiB"},
        {"max_in_place_bytes": 0},
    ],
    ids=lambda config: "-".join(f"{name}={value}" for name, value in config.items()),
)
async def test_where_there_is_nothing_to_choose_or_no_room_nothing_is_lent(stage, tap, config):
    prefill, decode, source, target = await met(stage, **config)
    for number in range(2):
        await moved(prefill, decode, source, target, f"r{number}")
    await quiet(prefill, decode)
    assert not measurings(tap)


async def test_mapped_memory_needs_no_lane(stage, tap):
    source, target = Cache(shared=True), Cache(shared=True)
    prefill, decode = await stage.pair(source, target, **LARGE)
    result = await moved(prefill, decode, source, target, "r")
    assert result.stats.route == "mapped"
    assert not measurings(tap)


async def test_a_peer_that_does_not_know_it_is_not_asked(stage, tap, monkeypatch):
    prefill, decode, source, target = await met(stage)
    prefill._site.capabilities &= ~Capability.PROBE
    await moved(prefill, decode, source, target, "r")
    await quiet(prefill, decode)
    assert not measurings(tap)


async def test_a_peer_that_is_busy_is_asked_again_but_not_for_ever(stage, tap):
    prefill, decode, source, target = await met(stage)
    growing = prefill.offer("growing", streaming=True)
    growing.extend([9], tokens=range(4))
    moving = decode.start_fetch(prefill.engine.ticket("growing"), [9, 10], tokens=range(8))
    await eventually(lambda: tap.of(Accept))
    for number in range(12):
        await moved(prefill, decode, source, target, f"r{number}")
        await eventually(lambda: not loans(decode))
    assert len(measurings(tap)) == len(answers(tap, Status.CANCELLED)) == 8
    assert lane(prefill) is None
    assert not moving.done
    moving.cancel()


async def test_who_waits_for_an_offer_keeps_nobody_busy(stage):
    prefill, decode, source, target = await met(stage)
    waiting = decode.start_fetch(prefill.engine.ticket("never"), [9], tokens=range(4))
    await eventually(lambda: prefill.describe()["sending"])
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: lane(prefill) is not None)
    waiting.cancel()


async def test_one_loan_at_a_time_however_many_peers(stage, monkeypatch):
    looked, look = [], Lender._look_into

    def into(lender, link):
        look(lender, link)
        looked.append(link)

    monkeypatch.setattr(Lender, "_look_into", into)  # a turn of the loop after a fetch has returned
    decode = await stage.worker("decode", Cache(), **LARGE)
    peers = [await stage.worker(f"p{number}", Cache(), engine=f"p{number}", **LARGE) for number in range(4)]
    stage.network.delay("*", 50)
    for number, peer in enumerate(peers):
        peer.offer(f"r{number}", BLOCKS, tokens=16)
        await decode.fetch(peer.engine.ticket(f"r{number}"), BLOCKS, tokens=TOKENS, timeout=5)
        await eventually(lambda number=number: len(looked) > number)
        assert len(loans(decode)) <= 1
    for peer in peers:  # the others' turns come with later transfers
        await eventually(lambda: not loans(decode))
        while lane(peer) is None:  # also when its turn comes while another lane is being proved
            request, seen = f"again {len(looked)}", len(looked)
            peer.offer(request, BLOCKS, tokens=16)
            await decode.fetch(peer.engine.ticket(request), BLOCKS, tokens=TOKENS, timeout=5)
            await eventually(lambda seen=seen: len(looked) > seen and not loans(decode))


@pytest.mark.parametrize("side", ["receive_desk", "send_desk"])
async def test_who_waits_for_memory_gets_what_is_lent(stage, side):
    prefill, decode, _, _ = await probing(stage)
    desk = getattr({"receive_desk": decode, "send_desk": prefill}[side]._site, side)
    got = []
    assert desk.take("somebody", desk.share.capacity) is None
    desk.ask("somebody", desk.share.capacity, 5, got.append)
    assert not got
    stage.network.release("*", 1)  # the write that was under way ends, and no other follows
    await eventually(lambda: got)
    desk.release(got[0])
    await quiet(prefill, decode)


@pytest.mark.parametrize(
    ("chunk", "capacity", "lent"),
    [
        (64 * MIB, 256 * MIB, 32 * MIB),
        (64 * MIB, 64 * MIB, 0),
        (8 * MIB, 20 * MIB, 20 * MIB // 8),
        (8 * MIB, 18 * MIB, 0),
        (1 * MIB, 4 * MIB, LEAST_LOAN),
        (1 * MIB, 4 * MIB - 1, 0),
        (2048, 1 << 40, 32 * MIB),
        (2048, 0, 0),
    ],
)
def test_beside_a_loan_that_never_comes_back_there_is_room_for_a_chunk(chunk, capacity, lent):
    assert loan_bytes(chunk, capacity) == lent


@pytest.mark.usefixtures("no_locks")
async def test_a_peer_that_never_answers_is_in_doubt_in_time(stage, tap, monkeypatch):
    monkeypatch.setattr(Gauging, "begin", lambda self: None)
    prefill, decode, source, target = await met(stage, grant_lease=0.1, revoke_timeout=0.1)
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: tap.of(Cancel))
    await eventually(lambda: loans(decode, "quarantined"))
    assert not decode._site.fabric._holds
    assert "silent" in str(decode.describe()["arena"]["receive"].reasons)
    await moved(prefill, decode, source, target, "second")
    assert len(measurings(tap)) == 1


@pytest.mark.usefixtures("no_locks")
async def test_a_peer_that_is_back_and_still_says_nothing_is_in_doubt_again(stage, tap, monkeypatch):
    monkeypatch.setattr(Gauging, "begin", lambda self: None)
    prefill, decode, source, target = await met(stage, revoke_timeout=0.1)
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: loans(decode))
    cut(decode)
    await eventually(lambda: tap.of(Cancel))
    assert len(decode._site.fabric._holds) == 1
    await eventually(lambda: not decode._site.fabric._holds)
    assert loans(decode, "quarantined")


async def test_closing_waits_for_no_answer_that_cannot_come(stage, monkeypatch):
    monkeypatch.setattr(Gauging, "begin", lambda self: None)
    prefill, decode, source, target = await met(stage, revoke_timeout=30, close_timeout=30)
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: loans(decode))
    closing = asyncio.create_task(decode.aclose(drain=False))
    await asyncio.sleep(0)
    cut(prefill)
    async with asyncio.timeout(30):
        await closing


async def test_a_defect_is_no_success(stage, tap, monkeypatch):
    monkeypatch.setattr(Gauging, "_learn", lambda self, samples: 1 / 0)
    prefill, decode, source, target = await met(stage)
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: answers(tap, Status.FAILED))
    await quiet(prefill, decode)


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize("change", [{"chunk": 0, "last": False}, {"chunk": 0}, {"last": False}])
async def test_a_result_of_a_part_frees_nothing(stage, tap, change, caplog):
    tap.change[KvAgentResult] = lambda m: replace(m, **change) if m.chunk == WHOLE else m
    prefill, decode, source, target = await met(stage)
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: "has no chunks, and one result" in caplog.text)
    assert loans(decode, "quarantined")


async def test_a_number_stands_for_one_thing(stage, tap, caplog):
    prefill, decode, _, _ = await probing(stage)
    (probe,) = measurings(tap)
    tap.change[Fetch] = lambda fetch: replace(fetch, transfer=probe.transfer)
    prefill.offer("second", BLOCKS, tokens=16)
    transfer = decode.start_fetch(prefill.engine.ticket("second"), BLOCKS, tokens=TOKENS)
    await eventually(lambda: "is under way already" in caplog.text)
    stage.network.release("*")
    with pytest.raises(PeerLostError):
        await transfer
    await quiet(prefill, decode)


async def test_who_is_asked_again_can_still_move_the_bytes(stage, tap):
    prefill, decode, _, _ = await probing(stage)
    cut(decode)
    await eventually(lambda: tap.of(Cancel))
    assert len(decode._site.fabric._holds) == 1  # over TCP the target moves what is under way
    stage.network.release("*")
    await quiet(prefill, decode)
    assert not decode._site.fabric._holds


async def test_memory_that_is_needed_is_not_lent(stage, tap):
    prefill, decode, source, target = await met(stage)
    desk = decode._site.receive_desk
    everything = taken(desk)
    assert (await moved(prefill, decode, source, target, "first")).stats.route == "direct"
    assert not measurings(tap)
    desk.release(everything)
    await moved(prefill, decode, source, target, "second")
    await eventually(lambda: answers(tap, Status.OK))


async def test_a_fetch_does_not_wait_for_it(stage):
    prefill, decode, source, target = await probing(stage)
    stage.network.release("*", 0)
    stage.network._of("*").held = False  # what is held stays so, and what comes now lands
    assert stage.network.held("*") == 1
    await moved(prefill, decode, source, target, "second")
    assert stage.network.held("*") == 1
    stage.network.release("*")
    await quiet(prefill, decode)


async def test_the_stream_is_cut_in_the_middle(stage, tap):
    prefill, decode, source, target = await probing(stage)
    cut(decode)
    await eventually(lambda: loans(decode, "quarantined"))
    await eventually(lambda: tap.of(Cancel))  # the same incarnation is back, and is asked
    assert loans(decode, "quarantined"), "it has not answered: the write is under way"
    stage.network.release("*")
    await quiet(prefill, decode)
    assert answers(tap, Status.CANCELLED)
    await moved(prefill, decode, source, target, "second")
    await eventually(lambda: lane(prefill) is not None)
    await quiet(prefill, decode)


@pytest.mark.parametrize("disconnected", [False, True])
async def test_a_write_that_fails_leaves_a_doubt_that_is_told(stage, tap, disconnected):
    prefill, decode, _, _ = await met(stage, no_progress_timeout=0.2)
    offer = prefill.offer("first", BLOCKS, tokens=len(TOKENS))
    transfer = decode.start_fetch(prefill.engine.ticket("first"), BLOCKS, tokens=TOKENS, timeout=5)
    await asyncio.wait_for(transfer.outcome, 5)
    stage.network.break_next("*", skip=1, after_bytes=100, disconnected=disconnected, lingers=not disconnected)
    await offer.released()
    await eventually(lambda: answers(tap, Status.IN_DOUBT))
    await eventually(lambda: loans(decode, "quarantined"))
    ours = prefill._site.send_desk.share.extents()
    assert [extent.state for extent in ours] == ([] if disconnected else [ExtentState.QUARANTINED])
    cut(decode)  # asked again, it still cannot say
    await eventually(lambda: len(answers(tap, Status.IN_DOUBT)) > 1)
    assert loans(decode, "quarantined")


@pytest.mark.parametrize("runs_on", [False, True])
async def test_a_new_agent_ends_its_write_unless_that_is_a_copy_between_gpus(stage, tap, runs_on, monkeypatch):
    for module in (gauging, rebuilding):
        monkeypatch.setattr(module, "runs_on", lambda site, peer: runs_on)
    prefill, decode, _, _ = await probing(stage, revoke_timeout=0.4)
    await eventually(lambda: stage.network.held("*"))
    prefill._site.rebuilds.want(urgent=True)
    await eventually(lambda: answers(tap, Status.IN_DOUBT))
    ours = prefill._site.send_desk.share.extents()
    assert [extent.state for extent in ours] == ([ExtentState.QUARANTINED] if runs_on else [])
    assert loans(decode)


async def test_a_doubt_that_one_measurement_leaves_keeps_no_other_lane_from_being_measured(stage, tap, monkeypatch):
    prefill, decode, source, target = await met(stage, no_progress_timeout=0.2)
    gone = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(prefill._site.processes, "ended", lambda _: gone)
    offer = prefill.offer("first", BLOCKS, tokens=len(TOKENS))
    transfer = decode.start_fetch(prefill.engine.ticket("first"), BLOCKS, tokens=TOKENS, timeout=5)
    await asyncio.wait_for(transfer.outcome, 5)
    stage.network.break_next("*", skip=1, after_bytes=100, disconnected=True)
    await offer.released()
    await eventually(lambda: answers(tap, Status.IN_DOUBT))
    other = await stage.worker("other", target, **LARGE)
    await moved(prefill, other, source, target, "second")
    await eventually(lambda: any(peer["lane"] for peer in prefill.describe()["peers"]))
    assert len(prefill._sender._doubtful) == 1
    gone.set_result(None)
    await eventually(lambda: not len(prefill._sender._doubtful))


async def test_a_refused_write_is_an_answer(stage, tap):
    prefill, decode, _, _ = await met(stage)
    offer = prefill.offer("first", BLOCKS, tokens=len(TOKENS))
    transfer = decode.start_fetch(prefill.engine.ticket("first"), BLOCKS, tokens=TOKENS, timeout=5)
    await asyncio.wait_for(transfer.outcome, 5)
    stage.network.refuse_next("*", skip=2)
    await offer.released()
    await eventually(lambda: answers(tap, Status.FAILED))
    await quiet(prefill, decode)
    assert lane(prefill) is None


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_side_closes_in_the_middle(stage, side):
    prefill, decode, _, _ = await probing(stage)
    worker, other = (prefill, decode) if side == "prefill" else (decode, prefill)
    arena = worker._assembly.staging
    closing = asyncio.create_task(worker.aclose(drain=False))
    await asyncio.sleep(0)
    stage.network.release("*")
    await closing
    assert arena._backing is None
    await eventually(lambda: not other._site.send_desk.share.extents())


async def test_a_side_that_closes_while_it_may_be_written_leaks_its_memory(stage, caplog):
    _, decode, _, _ = await probing(stage, close_timeout=0.1, revoke_timeout=0.1)
    with caplog.at_level("WARNING"):
        await decode.aclose(drain=False)
    assert "memory_leaked" in caplog.text


async def test_what_was_not_told_of_is_not_written(stage, tap, caplog):
    prefill, decode, source, target = await met(stage)
    tap.change[Probe] = lambda probe: replace(probe, address=probe.address + (1 << 40))
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: "outside the staging memory" in caplog.text)
    await quiet(prefill)


async def test_a_loan_is_answered_once_and_by_whom_it_was_made_to(stage, tap):
    prefill, decode, source, target = await met(stage)
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: answers(tap, Status.OK))
    await quiet(prefill, decode)
    (link,) = prefill._links
    dropped = decode.describe()["metrics"]["results_dropped"]
    link.send(answers(tap, Status.OK)[0])
    await eventually(lambda: decode.describe()["metrics"]["results_dropped"] != dropped)
    await quiet(prefill, decode)
