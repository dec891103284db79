"""Who moves the bytes of a lane is seen by letting the transport be: once, on this host, at nobody's cost."""
# the private state of workers that are open
# pyright: reportOptionalMemberAccess=false

import asyncio
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from stage import Cache, Copied, Gate, Tap, eventually, quiet, taken

from kvxfer import Config, MemoryInDoubt, PeerLostError, proving, rebuilding
from kvxfer.copy.mover import Mover
from kvxfer.errors import ProtocolError
from kvxfer.memory import ExtentState
from kvxfer.protocol.messages import WHOLE, Accept, Cancel, Capability, Fetch, KvAgentResult, Probe, Route, Status
from kvxfer.proving import Prover, Showing, proof_bytes

BLOCKS = list(range(4))
TOKENS = range(16)
MIB = 1 << 20


@pytest.fixture
def tap(monkeypatch):
    return Tap(monkeypatch)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Further tries follow at once, and none fails because these cores are busy."""
    monkeypatch.setattr(proving, "_APART_S", 0.002)
    monkeypatch.setattr(proving, "_PAUSE_S", 5.0)


async def moved(prefill, decode, source, target, request):
    """One request, every byte of it."""
    copied = Copied(target).bring(source, BLOCKS, BLOCKS[::-1], TOKENS)
    offer = prefill.offer(request, BLOCKS, tokens=len(TOKENS))
    await decode.fetch(prefill.engine.ticket(request), BLOCKS[::-1], tokens=TOKENS, timeout=5)
    copied.check()
    await offer.released()


async def met(stage, route="staged", **config):
    source, target = Cache(), Cache(layout="HND")
    prefill, decode = await stage.pair(source, target, route=route, **config)
    return prefill, decode, source, target


def proved(decode):
    (peer,) = decode.describe()["peers"]
    return peer["proved"]


def loans(worker, *states):
    extents = worker._site.receive_desk.share.extents()
    return [extent for extent in extents if not states or extent.state in states]


def answers(tap, status):
    lent = {probe.transfer for probe in tap.of(Probe)}
    return [m for m in tap.of(KvAgentResult) if m.transfer in lent and m.status is status]


def cut(worker):
    for link in list(worker._links):
        link._transport.abort()


def tried(decode):
    (link,) = decode._links
    return decode._receiver._prover._lanes[link]


async def given_up(decode):
    await eventually(tried(decode).over.done)
    assert tried(decode).tries == proving._TRIES
    await quiet(decode)


async def looking(stage, **config):
    """Two workers between which one request has moved, and the first write of a nonce is under way."""
    prefill, decode, source, target = await met(stage, **config)
    await fetched(prefill, decode)
    stage.network.hold("*")
    await eventually(lambda: stage.network.held("*"))
    assert loans(decode, ExtentState.WRITING)
    return prefill, decode, source, target


async def fetched(prefill, decode):
    """One request has moved, and the loop has not turned since: nothing of a proof is posted yet."""
    prefill.offer("first", BLOCKS, tokens=len(TOKENS))
    transfer = decode.start_fetch(prefill.engine.ticket("first"), BLOCKS, tokens=TOKENS, timeout=5)
    await asyncio.wait_for(transfer.outcome, 5)


@pytest.mark.parametrize("route", ["staged", "direct", "auto"])
async def test_after_the_first_transfer_over_a_lane_it_is_proved(stage, tap, route, caplog):
    prefill, decode, source, target = await met(stage, route=route)
    assert not tap.of(Probe)
    with caplog.at_level("INFO"):
        await moved(prefill, decode, source, target, "first")
        await eventually(lambda: proved(decode))
    assert proved(decode) == ["direct", "staged"]
    assert "lane_proved" in caplog.text
    await quiet(prefill, decode)
    (probe,) = tap.of(Probe)
    assert (probe.bytes, len(probe.nonce)) == (2048, 16)
    assert prefill.describe()["peers"][0]["proved"] == [], "it is the decode rank that is written"
    for number in range(3):
        await moved(prefill, decode, source, target, f"later{number}")
    await quiet(prefill, decode)
    assert len(tap.of(Probe)) == 1


@pytest.fixture
def holds(monkeypatch):
    """Whether each hold was said to be needed, in order."""
    seen, awake = [], Mover.hold_awake

    def count(mover, *, needed=True):
        seen.append(needed)
        return awake(mover, needed=needed)

    monkeypatch.setattr(Mover, "hold_awake", count)
    return seen


async def test_over_a_proved_lane_our_transport_moves_little(stage, holds):
    prefill, decode, source, target = await met(stage)
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: proved(decode))
    assert holds
    assert all(holds)
    await quiet(prefill, decode)
    holds.clear()
    await moved(prefill, decode, source, target, "second")
    assert holds == [False]


async def test_what_is_proved_of_one_route_says_nothing_of_another(stage, holds, monkeypatch):
    """Where blocks are on a GPU and staging memory is not, or in another kind of memory."""
    monkeypatch.setattr(Prover, "_routes", lambda *_: frozenset({Route.STAGED}))
    prefill, decode, source, target = await met(stage, route="direct")
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: proved(decode) == ["staged"])
    await quiet(prefill, decode)
    holds.clear()
    await moved(prefill, decode, source, target, "second")
    assert holds == [True]


async def test_lanes_are_proved_with_the_sizes_that_are_usual(stage):
    usual = Config(engine="e")
    sizes = {name: getattr(usual, name) for name in ("arena_bytes", "chunk_bytes", "in_place_chunk_bytes")}
    prefill, decode, source, target = await met(stage, **sizes)
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: proved(decode))


@pytest.mark.parametrize("route", ["staged", "direct"])
async def test_a_lane_whose_target_moves_the_bytes_is_not(stage, tap, route, caplog, monkeypatch):
    monkeypatch.setattr(proving, "_PAUSE_S", 0.02)
    stage.network.need_target("*")
    prefill, decode, source, target = await met(stage, route=route)
    with caplog.at_level("INFO"):
        await moved(prefill, decode, source, target, "first")
        await given_up(decode)
    assert proved(decode) == []
    assert "lane_not_proved" in caplog.text
    assert len(tap.of(Probe)) > 1
    over = {answer.transfer for status in (Status.OK, Status.CANCELLED) for answer in answers(tap, status)}
    assert {probe.transfer for probe in tap.of(Probe)} <= over, "each ended once our side made progress again"
    assert not decode._site.mover.held_awake
    await moved(prefill, decode, source, target, "second")
    await quiet(prefill, decode)


async def test_a_peer_that_writes_something_else_proves_nothing(stage, tap):
    tap.change[Probe] = lambda probe: replace(probe, nonce=bytes(16))
    prefill, decode, source, target = await met(stage)
    await moved(prefill, decode, source, target, "first")
    await given_up(decode)
    assert proved(decode) == []


async def test_one_byte_that_is_missing_is_seen(stage):
    prefill, decode, source, target = await met(stage)
    peek = proving.peek

    def spoilt(*where):
        found = peek(*where)
        return found[:-1] + bytes([found[-1] ^ 1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proving, "peek", spoilt)
        await moved(prefill, decode, source, target, "first")
        await given_up(decode)
    assert proved(decode) == []


async def test_whoever_is_held_awake_for_goes_first_but_not_for_ever(stage, tap):
    prefill, decode, source, target = await met(stage)
    let_go = decode._site.mover.hold_awake()
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: proved(decode))
    assert tried(decode).tries == proving._POLITE + 1
    assert len(tap.of(Probe)) == 1, "a try that gave way costs nobody anything"
    let_go()
    await quiet(prefill, decode)


async def test_what_comes_in_meanwhile_is_done_and_proves_nothing(stage, monkeypatch):
    """The transport was called, so something here may have moved the bytes."""
    prefill, decode, source, target = await met(stage)
    write = Showing._write

    async def interrupted(showing, *where):
        await asyncio.wrap_future(decode._site.fabric.metadata([]))
        await write(showing, *where)

    monkeypatch.setattr(Showing, "_write", interrupted)
    await moved(prefill, decode, source, target, "first")
    await given_up(decode)
    assert proved(decode) == []


@pytest.mark.parametrize(
    "how", ["no room", "no arena", "pull", "mapped", "remote", "unable", "orderly", "attributable"]
)
async def test_where_it_is_of_no_use_nothing_is_lent(stage, tap, how, monkeypatch):
    config = {
        "no room": {"arena_bytes": "16KiB"},
        "no arena": {"arena_bytes": 0, "route": "direct"},
        "pull": {"route": "pull"},
        "mapped": {"route": "auto"},
    }
    source, target = Cache(shared=how == "mapped"), Cache(layout="HND", shared=how == "mapped")
    prefill, decode = await stage.pair(source, target, **{"route": "staged", **config.get(how, {})})
    if how == "remote":
        monkeypatch.setattr(proving, "unlike", lambda _: "it is on another host")
    elif how == "unable":
        prefill._site.capabilities &= ~Capability.PROBE
    elif how in ("orderly", "attributable"):
        monkeypatch.setattr(type(decode._site.fabric._transport), how, False)
    for number in range(2):
        await moved(prefill, decode, source, target, f"r{number}")
    if how in ("orderly", "attributable"):
        await given_up(decode)
    await quiet(prefill, decode)
    assert not tap.of(Probe)


@pytest.mark.parametrize(("arena", "shown"), [("36KiB", True), ("32KiB", False)])
async def test_a_sender_takes_no_memory_beside_which_a_chunk_finds_no_room(stage, monkeypatch, arena, shown):
    """Wherever it lies, and though it be never given back."""
    asked, write = [], Showing._write

    async def count(showing, *where):
        asked.append(where)
        await write(showing, *where)

    monkeypatch.setattr(Showing, "_write", count)
    settings = {"arena_bytes": arena, "chunk_bytes": "8KiB", "in_place_chunk_bytes": "2KiB"}
    prefill, decode, source, target = await met(stage, prefill=settings)
    await moved(prefill, decode, source, target, "first")
    await (eventually(lambda: proved(decode)) if shown else given_up(decode))
    assert bool(asked) is shown


async def test_memory_that_is_needed_is_not_lent_however_long_that_is(stage, tap, monkeypatch):
    monkeypatch.setattr(proving, "_APART_MAX_S", 1e-5)
    prefill, decode, source, target = await met(stage, route="direct")
    desk, asked = decode._site.receive_desk, 0
    everything = taken(desk)
    prover = decode._receiver._prover
    lend = prover._lend

    def count(link):
        nonlocal asked
        asked += 1
        return lend(link)

    monkeypatch.setattr(prover, "_lend", count)
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: asked > 1100)
    assert not tap.of(Probe)
    assert tried(decode).tries == 0
    desk.release(everything)
    await eventually(lambda: proved(decode))
    await quiet(prefill, decode)


async def test_memory_that_is_needed_for_hours_is_asked_for_as_long(stage, monkeypatch, caplog):
    monkeypatch.setattr(proving, "_APART_S", 0.0)
    prefill, decode, source, target = await met(stage, route="direct")
    everything = taken(decode._site.receive_desk)
    prover, asked = decode._receiver._prover, []
    lend = prover._lend
    monkeypatch.setattr(prover, "_lend", lambda *loan: asked.append(loan) or lend(*loan))
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: len(asked) > 1500)
    assert "task_failed" not in caplog.text
    decode._site.receive_desk.release(everything)
    await eventually(lambda: proved(decode))
    await quiet(prefill, decode)


async def test_many_lanes_are_looked_into_one_after_the_other(stage, tap):
    """However many peers are met at once, none is forgotten for the others."""
    decode = await stage.worker("decode", Cache(), route="staged")
    peers = [await stage.worker(f"p{number}", Cache(), engine=f"p{number}", route="staged") for number in range(8)]
    for number, peer in enumerate(peers):
        peer.offer(f"r{number}", BLOCKS, tokens=16)
    fetches = [
        decode.start_fetch(peer.engine.ticket(f"r{number}"), [number], tokens=range(4), timeout=5)
        for number, peer in enumerate(peers)
    ]
    at_once = []
    tap.change[Probe] = lambda probe: at_once.append(len(loans(decode))) or probe
    await asyncio.gather(*fetches)
    await eventually(lambda: all(peer["proved"] for peer in decode.describe()["peers"]))
    assert set(at_once) == {1}
    assert len(tap.of(Probe)) == len(peers)
    await quiet(decode, *peers)


@pytest.mark.parametrize("places", [1, 64])
async def test_a_look_that_ends_in_doubt_keeps_nobody_else_from_one(stage, tap, monkeypatch, places):
    """As when the decode rank dies in the midst of it."""
    source, target = Cache(), Cache()
    prefill = await stage.worker("prefill", source, route="staged", max_transfers=places)
    other = await stage.worker("other", target, route="staged")
    decode = await stage.worker("decode", target, route="staged")
    write = Showing._write

    async def shown(showing, *where):
        stage.network.break_next("other", disconnected=True)
        await write(showing, *where)

    with monkeypatch.context() as patch:
        patch.setattr(Showing, "_write", shown)
        await moved(prefill, other, source, target, "first")
        await eventually(lambda: prefill._sender._doubtful)
    assert len(prefill._sender._places) == 1, "of one that is connected it counts"
    await other.aclose(drain=False)
    await moved(prefill, decode, source, target, "second")
    await eventually(lambda: proved(decode))
    await quiet(prefill, decode)
    assert (len(prefill._sender._doubtful), len(prefill._sender._places)) == (1, 0)


@pytest.mark.usefixtures("no_locks")
async def test_a_peer_that_never_answers_is_in_doubt_in_time(stage, tap, monkeypatch):
    monkeypatch.setattr(Showing, "begin", lambda self: None)
    monkeypatch.setattr(proving, "_PAUSE_S", 0.02)
    prefill, decode, source, target = await met(stage, revoke_timeout=0.1)
    decode._receiver._prover._possible = lambda link: True
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: tap.of(Cancel))
    await eventually(lambda: loans(decode, ExtentState.QUARANTINED))
    assert not decode._site.mover.held_awake
    assert "silent" in str(decode.describe()["arena"]["receive"].reasons)
    await moved(prefill, decode, source, target, "second")
    assert len(tap.of(Probe)) == len(loans(decode)) == 1, "nothing else is lent meanwhile"


async def test_the_stream_is_cut_in_the_middle_and_a_new_one_is_proved_anew(stage, tap):
    prefill, decode, source, target = await met(stage)
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: proved(decode))
    cut(decode)
    await eventually(lambda: not decode._links)
    await moved(prefill, decode, source, target, "second")
    await eventually(lambda: proved(decode))
    assert len(tap.of(Probe)) == 2
    await quiet(prefill, decode)


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize("route", ["staged", "direct"])
async def test_over_a_lane_that_was_not_proved_the_end_of_a_process_ends_no_doubt(stage, tap, route, monkeypatch):
    """Chunk by chunk: what was granted with `Fetch` is as unsure."""
    prefill, decode, _, _ = await met(stage, route=route)
    decode._site.rebuilds.wanted = lambda: None
    writable = Gate()
    stage.network.hold("decode")
    prefill.offer("first", BLOCKS, tokens=len(TOKENS))
    transfer = decode.start_fetch(prefill.engine.ticket("first"), BLOCKS, tokens=TOKENS, after=writable)
    await eventually(lambda: tap.of(Accept))
    assert not tap.of(Accept)[0].ahead
    writable.fired = True
    await eventually(lambda: stage.network.held("decode"))
    monkeypatch.setattr(decode._site.processes, "gone", lambda peer: True)
    prefill._listener._stop()
    cut(decode)
    with pytest.raises(MemoryInDoubt if route == "direct" else PeerLostError):
        await transfer
    await eventually(lambda: decode.describe()["agent"]["wanted"])
    if route == "staged":
        assert decode._site.receive_desk.share.quarantined_bytes()


async def test_what_was_seen_of_an_agent_that_is_no_more_proves_nothing_of_the_next(stage, monkeypatch):
    """The peer tells of its new one while it is being looked at what the old one has written."""
    prefill, decode, source, target = await met(stage)
    seen, landed = [], Prover._landed

    async def and_then_another(prover, link, loan, *, firm):
        seen.append(await landed(prover, link, loan, firm=firm))
        decode._receiver.renewed(link)
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(Prover, "_landed", and_then_another)
        while True not in seen:  # the first tries give way to others
            tried = len(seen)
            await moved(prefill, decode, source, target, f"{tried}")
            await eventually(lambda tried=tried: len(seen) > tried)
            await quiet(prefill, decode)
        assert not proved(decode)
    await moved(prefill, decode, source, target, "last")
    await eventually(lambda: proved(decode))


async def test_another_stream_in_the_middle_keeps_nothing_awake(stage, tap):
    """The old one is lost, and the new one asks what became of the loan, before who looks at it has his turn."""
    prefill, decode, _, _ = await looking(stage)
    assert tap.of(Probe)
    decode._peers._links.clear()  # it goes there again, though the old one is open
    await decode._peers.link(prefill.card.endpoint, None)
    stage.network.release("*")
    await quiet(prefill, decode)
    await eventually(lambda: not decode._site.mover.held_awake)


@pytest.mark.parametrize("gpu", ["here", "there", None])
async def test_blocks_on_a_gpu_may_go_another_way_than_staging_memory(stage, gpu, monkeypatch):
    prefill, decode, *_ = await met(stage)
    link = await decode._peers.link(prefill.card.endpoint, None)
    site, on_gpu = decode._site, SimpleNamespace(kind="cuda")
    if gpu == "there":
        monkeypatch.setattr(site.plans, "geometry", lambda _: on_gpu)
    elif gpu == "here":
        monkeypatch.setattr(site, "geometry", on_gpu)
    found = decode._receiver._prover._routes(link)
    monkeypatch.undo()
    assert found == ({Route.STAGED} if gpu else {Route.STAGED, Route.DIRECT})


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_an_agent_that_is_made_anew_is_proved_anew(stage, tap, side):
    prefill, decode, source, target = await met(stage, revoke_timeout=0.4)
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: proved(decode))
    await quiet(prefill, decode)
    worker, over = {"prefill": prefill, "decode": decode}[side], []
    worker._site.rebuilds.want(urgent=True)
    worker._site.rebuilds.next.add_done_callback(lambda _: over.append(True))
    await eventually(lambda: over and not proved(decode))
    await moved(prefill, decode, source, target, "second")
    await eventually(lambda: proved(decode))
    assert len(tap.of(Probe)) == 2
    await quiet(prefill, decode)


@pytest.mark.parametrize("what", ["prefill", "decode", "stream"])
async def test_somebody_goes_while_it_is_being_found_out(stage, tap, what):
    prefill, decode, _, _ = await looking(stage)
    assert tap.of(Probe)
    if what == "stream":
        cut(decode)
        stage.network.release("*")
        await quiet(prefill, decode)
        return
    worker, other = (prefill, decode) if what == "prefill" else (decode, prefill)
    arena = worker._assembly.staging
    closing = asyncio.create_task(worker.aclose(drain=False))
    await asyncio.sleep(0)
    stage.network.release("*")
    await closing
    assert arena._backing is None
    await eventually(lambda: not other._site.send_desk.share.extents())


@pytest.mark.parametrize("what", ["answer", "recall", "cut"])
async def test_a_loan_that_ends_before_the_peer_is_told_is_not_begun(stage, tap, what, monkeypatch, caplog):
    """A peer answers what it was not asked, somebody needs the memory, or the stream is cut, while the pause begins."""
    prefill, decode, source, target = await met(stage)
    pause, early, lanes = decode._site.fabric.pause, [], []

    def late(seconds, *, firm):
        prover = decode._receiver._prover
        ((number, loan),) = prover.loans.items()
        early.append(number)
        lanes.append(prover._lanes[loan.link])
        match what:
            case "answer":
                loan.result(loan.link, KvAgentResult(number, WHOLE, Status.OK, 0, True))
            case "recall":
                prover.recall()
            case _:
                loan.link._transport.abort()
                loan.lost()
        return pause(seconds, firm=firm)

    monkeypatch.setattr(decode._site.fabric, "pause", late)
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: lanes and lanes[0].tries)
    monkeypatch.setattr(decode._site.fabric, "pause", pause)
    await quiet(prefill, decode)
    assert not tap.of(Cancel), "there is nothing to ask a peer that knows of nothing"
    assert "task_failed" not in caplog.text
    spoken_of = {message.transfer for message in tap.sent if isinstance(message, Probe | Cancel)}
    assert spoken_of.isdisjoint(early), "an answer to what is asked too early would free what is lent later"


@pytest.mark.parametrize(
    ("chunk", "in_place", "capacity", "lent"),
    [
        (64 * MIB, 256 * MIB, 256 * MIB, MIB),
        (64 * MIB, 64 * MIB, 128 * MIB, 0),  # no room for a chunk beside it, where it lies in the middle
        (2048, 2048, 16384, 2048),
        (2048, 2048, 16383, 0),
        (2048, 4096, 16384, 0),  # less than is written at once
        (2048, 4096, 32768, 4096),
        (MIB, MIB, 8 * MIB, MIB),
        (MIB, MIB, 8 * MIB - 1, 0),
        (2048, 2048, 0, 0),
    ],
)
def test_as_much_is_lent_as_is_written_at_once_and_no_less(chunk, in_place, capacity, lent):
    config = Config(engine="e", arena_bytes="4GiB", chunk_bytes=chunk, in_place_chunk_bytes=in_place)
    assert proof_bytes(config, capacity) == lent


# --- what is lent


@pytest.mark.usefixtures("no_locks")
async def test_a_peer_that_is_back_and_still_says_nothing_is_in_doubt_again(stage, tap, monkeypatch):
    monkeypatch.setattr(Showing, "begin", lambda self: None)
    prefill, decode, source, target = await met(stage, revoke_timeout=0.1)
    decode._receiver._prover._possible = lambda link: True
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: tap.of(Probe))
    cut(decode)
    await eventually(lambda: tap.of(Cancel))
    assert decode._site.mover.held_awake == 1
    await eventually(lambda: not decode._site.mover.held_awake)
    assert loans(decode, ExtentState.QUARANTINED)


async def test_closing_waits_for_no_answer_that_cannot_come(stage, tap, monkeypatch):
    monkeypatch.setattr(Showing, "begin", lambda self: None)
    prefill, decode, source, target = await met(stage, revoke_timeout=30, close_timeout=30)
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: tap.of(Probe))
    closing = asyncio.create_task(decode.aclose(drain=False))
    await asyncio.sleep(0)
    cut(prefill)
    async with asyncio.timeout(30):
        await closing


@pytest.mark.parametrize("side", ["receive_desk", "send_desk"])
async def test_who_waits_for_memory_gets_what_is_lent(stage, side):
    prefill, decode, _, _ = await looking(stage)
    desk = getattr({"receive_desk": decode, "send_desk": prefill}[side]._site, side)
    got = []
    assert desk.take("somebody", desk.share.capacity) is None
    desk.ask("somebody", desk.share.capacity, 5, got.append)
    assert not got
    stage.network.release("*", 1)  # the write that was under way ends, and no other follows
    await eventually(lambda: got)
    desk.release(got[0])
    await quiet(prefill, decode)


async def test_a_peer_that_shows_it_to_another_one_is_asked_again(stage, tap):
    prefill, decode, source, target = await looking(stage)
    other = await stage.worker("other", target, route="staged")
    stage.network._of("*").held = False  # what is held stays so, and what comes now lands
    await moved(prefill, other, source, target, "second")
    await eventually(lambda: answers(tap, Status.CANCELLED))
    assert not proved(other)
    stage.network.release("*")
    await eventually(lambda: proved(other))
    await eventually(lambda: proved(decode))
    await quiet(prefill, decode, other)


async def test_a_fetch_does_not_wait_for_it(stage):
    prefill, decode, source, target = await looking(stage)
    stage.network._of("*").held = False  # what is held stays so, and what comes now lands
    assert stage.network.held("*") == 1
    await moved(prefill, decode, source, target, "second")
    assert stage.network.held("*") == 1
    stage.network.release("*")
    await quiet(prefill, decode)


async def test_a_defect_is_no_success(stage, tap, monkeypatch):
    monkeypatch.setattr(Showing, "_write", lambda self, *where: 1 / 0)
    prefill, decode, source, target = await met(stage)
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: answers(tap, Status.FAILED))
    await given_up(decode)
    assert not proved(decode)
    await quiet(prefill)


async def test_without_a_nonce_nothing_is_written(stage, tap, monkeypatch):
    """Older ranks had their lane measured so."""
    tap.change[Probe] = lambda probe: replace(probe, nonce=b"")
    monkeypatch.setattr(Showing, "begin", lambda self: pytest.fail("it writes"))
    prefill, decode, source, target = await met(stage)
    await moved(prefill, decode, source, target, "first")
    await given_up(decode)
    assert len(answers(tap, Status.CANCELLED)) == proving._TRIES
    await quiet(prefill)


async def test_nothing_is_written_for_whom_this_side_does_not_trust(stage, tap):
    prefill, decode, source, target = await met(stage, trust="none")
    decode._receiver._prover._possible = lambda link: True
    await moved(prefill, decode, source, target, "first")
    await given_up(decode)
    assert len(answers(tap, Status.CANCELLED)) == proving._TRIES
    await quiet(prefill)


async def test_when_its_lease_has_run_out_nothing_is_written(stage, tap):
    tap.change[Probe] = lambda probe: replace(probe, lease_ms=0)
    prefill, decode, source, target = await met(stage)
    await moved(prefill, decode, source, target, "first")
    written = len(stage.network.log)
    await given_up(decode)
    assert len(answers(tap, Status.FAILED)) == proving._TRIES
    assert len(stage.network.log) == written
    await quiet(prefill)


async def test_what_another_peer_says_of_it_is_not_believed(stage, tap):
    prefill, decode, _, _ = await looking(stage)
    (loan,) = decode._receiver._prover.loans.values()
    other = SimpleNamespace(peer=SimpleNamespace(name="other", identity=SimpleNamespace(incarnation=bytes(32))))
    with pytest.raises(ProtocolError, match="belongs to another peer"):
        loan.result(other, KvAgentResult(loan.transfer, WHOLE, Status.CANCELLED, 0, True))
    assert loans(decode, ExtentState.WRITING)
    stage.network.release("*")
    await quiet(prefill, decode)


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize("change", [{"chunk": 0, "last": False}, {"chunk": 0}, {"last": False}])
async def test_a_result_of_a_part_frees_nothing(stage, tap, change, caplog):
    tap.change[KvAgentResult] = lambda m: replace(m, **change) if m.chunk == WHOLE else m
    prefill, decode, source, target = await met(stage)
    decode._receiver._prover._possible = lambda link: True
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: "has no chunks, and one result" in caplog.text)
    assert loans(decode, ExtentState.QUARANTINED)


async def test_a_number_stands_for_one_thing(stage, tap, caplog):
    prefill, decode, _, _ = await looking(stage)
    (probe,) = tap.of(Probe)
    tap.change[Fetch] = lambda fetch: replace(fetch, transfer=probe.transfer)
    prefill.offer("second", BLOCKS, tokens=16)
    transfer = decode.start_fetch(prefill.engine.ticket("second"), BLOCKS, tokens=TOKENS)
    await eventually(lambda: "is under way already" in caplog.text)
    stage.network.release("*")
    with pytest.raises(PeerLostError):
        await transfer
    await quiet(prefill, decode)


async def test_who_is_asked_again_can_still_move_the_bytes(stage, tap):
    prefill, decode, _, _ = await looking(stage)
    cut(decode)
    await eventually(lambda: tap.of(Cancel))
    assert decode._site.mover.held_awake == 1  # over TCP the target moves what is under way
    stage.network.release("*")
    await quiet(prefill, decode)
    assert not decode._site.mover.held_awake


async def test_what_was_lent_on_a_stream_that_was_cut_comes_back_by_the_peers_word(stage, tap):
    prefill, decode, source, target = await looking(stage)
    cut(decode)
    await eventually(lambda: loans(decode, ExtentState.QUARANTINED))
    await eventually(lambda: tap.of(Cancel))  # the same incarnation is back, and is asked
    assert loans(decode, ExtentState.QUARANTINED), "it has not answered: the write is under way"
    stage.network.release("*")
    await quiet(prefill, decode)
    assert answers(tap, Status.CANCELLED)
    await moved(prefill, decode, source, target, "second")
    await eventually(lambda: proved(decode))
    await quiet(prefill, decode)


@pytest.mark.parametrize("disconnected", [False, True])
async def test_a_write_that_fails_leaves_a_doubt_that_is_told(stage, tap, disconnected):
    prefill, decode, _, _ = await met(stage, no_progress_timeout=0.2)
    await fetched(prefill, decode)
    stage.network.break_next("*", skip=1, after_bytes=100, disconnected=disconnected, lingers=not disconnected)
    await eventually(lambda: answers(tap, Status.IN_DOUBT))
    await eventually(lambda: loans(decode, ExtentState.QUARANTINED))
    ours = prefill._site.send_desk.share.extents()
    assert [extent.state for extent in ours] == ([] if disconnected else [ExtentState.QUARANTINED])
    cut(decode)  # asked again, it still cannot say
    await eventually(lambda: len(answers(tap, Status.IN_DOUBT)) > 1)
    assert loans(decode, ExtentState.QUARANTINED)


async def test_a_write_that_ends_after_all_is_told_and_frees_the_memory_of_both(stage, tap):
    prefill, decode, _, _ = await met(stage, no_progress_timeout=0.2)
    await fetched(prefill, decode)
    stage.network.break_next("*", skip=1, after_bytes=100, lingers=True)
    await eventually(lambda: answers(tap, Status.IN_DOUBT))
    (doubted,) = answers(tap, Status.IN_DOUBT)
    assert len(prefill._sender._doubtful) == 1
    stage.network.release("*")
    await eventually(lambda: any(answer.transfer == doubted.transfer for answer in answers(tap, Status.FAILED)))
    await quiet(prefill, decode)
    assert not len(prefill._sender._doubtful)
    assert not prefill.describe()["agent"]["wanted"]


@pytest.mark.parametrize("runs_on", [False, True])
async def test_a_new_agent_ends_its_write_unless_that_is_a_copy_between_gpus(stage, tap, runs_on, monkeypatch):
    for module in (proving, rebuilding):
        monkeypatch.setattr(module, "runs_on", lambda site, peer: runs_on)
    prefill, decode, _, _ = await looking(stage, revoke_timeout=0.4)
    prefill._site.rebuilds.want(urgent=True)
    await eventually(lambda: answers(tap, Status.IN_DOUBT))
    ours = prefill._site.send_desk.share.extents()
    assert [extent.state for extent in ours] == ([ExtentState.QUARANTINED] if runs_on else [])
    assert loans(decode)


async def test_a_doubt_ends_with_the_process_of_whoever_lent(stage, tap, monkeypatch):
    prefill, decode, _, _ = await met(stage, no_progress_timeout=0.2)
    gone = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(prefill._site.processes, "ended", lambda _: gone)
    await fetched(prefill, decode)
    stage.network.break_next("*", skip=1, after_bytes=100, disconnected=True)
    await eventually(lambda: answers(tap, Status.IN_DOUBT))
    assert len(prefill._sender._doubtful) == 1
    gone.set_result(None)
    await eventually(lambda: not len(prefill._sender._doubtful))


async def test_a_refused_write_is_an_answer(stage, tap):
    prefill, decode, _, _ = await met(stage)
    await fetched(prefill, decode)
    stage.network.refuse_next("*", skip=1)
    await eventually(lambda: answers(tap, Status.FAILED))
    await eventually(lambda: proved(decode))
    await quiet(prefill, decode)


async def test_a_side_that_closes_while_it_may_be_written_leaks_its_memory(stage, caplog):
    _, decode, _, _ = await looking(stage, close_timeout=0.1, revoke_timeout=0.1)
    with caplog.at_level("WARNING"):
        await decode.aclose(drain=False)
    assert "memory_leaked" in caplog.text


async def test_what_was_not_told_of_is_not_written(stage, tap, caplog):
    prefill, decode, source, target = await met(stage)
    tap.change[Probe] = lambda probe: replace(probe, address=probe.address + (1 << 40))
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: "outside the staging memory" in caplog.text)
    await quiet(prefill)


async def test_a_loan_is_answered_once(stage, tap):
    prefill, decode, source, target = await met(stage)
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: answers(tap, Status.OK))
    await quiet(prefill, decode)
    (link,) = prefill._links
    dropped = decode.describe()["metrics"]["results_dropped"]
    link.send(answers(tap, Status.OK)[0])
    await eventually(lambda: decode.describe()["metrics"]["results_dropped"] != dropped)
    await quiet(prefill, decode)
