"""Who moves the bytes of a lane is seen by letting the transport be: once, on this host, at nobody's cost."""
# the private state of workers that are open
# pyright: reportOptionalMemberAccess=false

import asyncio
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from stage import Cache, Copied, Gate, Tap, eventually, quiet, taken

from kvxfer import Config, MemoryInDoubt, PeerLostError, proving
from kvxfer.fabric.pump import Fabric
from kvxfer.gauging import Gauging
from kvxfer.memory import ExtentState
from kvxfer.protocol.messages import WHOLE, Accept, Cancel, Capability, KvAgentResult, Probe, Route, Status
from kvxfer.proving import Prover, proof_bytes

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


def probes(tap):
    return [probe for probe in tap.of(Probe) if probe.nonce]


def tries(decode):
    (link,) = decode._links
    return decode._receiver._lender.prover._lanes[link].tries


async def given_up(decode):
    await eventually(lambda: tries(decode) == proving._TRIES)
    await quiet(decode)


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
    (probe,) = probes(tap)
    assert (probe.bytes, len(probe.nonce)) == (2048, 16)
    assert prefill.describe()["peers"][0]["proved"] == [], "it is the decode rank that is written"
    for number in range(3):
        await moved(prefill, decode, source, target, f"later{number}")
    await quiet(prefill, decode)
    assert len(probes(tap)) == 1


@pytest.fixture
def holds(monkeypatch):
    """Whether each hold on the fabric's thread was said to be needed, in order."""
    seen, awake = [], Fabric.hold_awake

    def count(fabric, *, needed=True):
        seen.append(needed)
        return awake(fabric, needed=needed)

    monkeypatch.setattr(Fabric, "hold_awake", count)
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


async def test_what_is_measured_is_so_first(stage, tap):
    prefill, decode, source, target = await met(stage, route="auto", arena_bytes="16MiB")
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: proved(decode))
    assert [bool(probe.nonce) for probe in tap.of(Probe)] == [False, True]
    assert prefill.describe()["peers"][0]["lane"] is not None


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
    assert len(probes(tap)) > 1
    answers = {m.transfer for m in tap.of(KvAgentResult) if m.chunk == WHOLE and m.status is Status.OK}
    assert {probe.transfer for probe in probes(tap)} <= answers, "each landed once our side made progress again"
    assert not decode._site.fabric._holds
    await moved(prefill, decode, source, target, "second")
    await quiet(prefill, decode)


async def test_a_peer_that_writes_something_else_proves_nothing(stage, tap):
    tap.change[Probe] = lambda probe: replace(probe, nonce=bytes(16)) if probe.nonce else probe
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
    let_go = decode._site.fabric.hold_awake()
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: proved(decode))
    assert tries(decode) == proving._POLITE + 1
    assert len(probes(tap)) == 1, "a try that gave way costs nobody anything"
    let_go()
    await quiet(prefill, decode)


async def test_what_comes_in_meanwhile_is_done_and_proves_nothing(stage, monkeypatch):
    """The transport was called, so something here may have moved the bytes."""
    prefill, decode, source, target = await met(stage)
    show = Gauging._show

    async def interrupted(gauging, extent, nonce):
        await asyncio.wrap_future(decode._site.fabric.metadata([]))
        await show(gauging, extent, nonce)

    monkeypatch.setattr(Gauging, "_show", interrupted)
    await moved(prefill, decode, source, target, "first")
    await given_up(decode)
    assert proved(decode) == []


@pytest.mark.parametrize("how", ["no room", "remote", "unable", "orderly", "attributable"])
async def test_where_it_is_of_no_use_nothing_is_lent(stage, tap, how, monkeypatch):
    config = {"arena_bytes": "16KiB"} if how == "no room" else {}
    prefill, decode, source, target = await met(stage, **config)
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
    assert not probes(tap)


@pytest.mark.parametrize(("arena", "shown"), [("36KiB", True), ("32KiB", False)])
async def test_a_sender_takes_no_memory_beside_which_a_chunk_finds_no_room(stage, monkeypatch, arena, shown):
    """Wherever it lies, and though it be never given back."""
    asked, show = [], Gauging._show

    async def count(gauging, extent, nonce):
        asked.append(extent)
        await show(gauging, extent, nonce)

    monkeypatch.setattr(Gauging, "_show", count)
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
    prover = decode._receiver._lender.prover
    lend = prover._lend

    def count(link, nbytes):
        nonlocal asked
        asked += 1
        return lend(link, nbytes)

    monkeypatch.setattr(prover, "_lend", count)
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: asked > 1100)
    assert not probes(tap)
    assert tries(decode) == 0
    desk.release(everything)
    await eventually(lambda: proved(decode))
    await quiet(prefill, decode)


async def test_memory_that_is_needed_for_hours_is_asked_for_as_long(stage, monkeypatch, caplog):
    monkeypatch.setattr(proving, "_APART_S", 0.0)
    prefill, decode, source, target = await met(stage, route="direct")
    everything = taken(decode._site.receive_desk)
    prover, asked = decode._receiver._lender.prover, []
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
    await asyncio.gather(*fetches)
    await eventually(lambda: all(peer["proved"] for peer in decode.describe()["peers"]))
    assert len(probes(tap)) == len(peers)
    await quiet(decode, *peers)


@pytest.mark.parametrize("places", [1, 64])
async def test_a_look_that_ends_in_doubt_keeps_nobody_else_from_one(stage, tap, monkeypatch, places):
    """As when the decode rank dies in the midst of it."""
    source, target = Cache(), Cache()
    prefill = await stage.worker("prefill", source, route="staged", max_transfers=places)
    other = await stage.worker("other", target, route="staged")
    decode = await stage.worker("decode", target, route="staged")
    show = Gauging._show

    async def shown(gauging, extent, nonce):
        stage.network.break_next("other", disconnected=True)
        await show(gauging, extent, nonce)

    with monkeypatch.context() as patch:
        patch.setattr(Gauging, "_show", shown)
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
    monkeypatch.setattr(Gauging, "begin", lambda self: None)
    prefill, decode, source, target = await met(stage, grant_lease=0.1, revoke_timeout=0.1)
    decode._receiver._lender.prover._possible = lambda link: True
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: tap.of(Cancel))
    share = decode._site.receive_desk.share
    await eventually(lambda: [extent.state for extent in share.extents()] == [ExtentState.QUARANTINED])
    assert not decode._site.fabric._holds
    assert len(probes(tap)) == 1


async def test_the_stream_is_cut_in_the_middle_and_a_new_one_is_proved_anew(stage, tap):
    prefill, decode, source, target = await met(stage)
    await moved(prefill, decode, source, target, "first")
    await eventually(lambda: proved(decode))
    for link in list(decode._links):
        link._transport.abort()
    await eventually(lambda: not decode._links)
    await moved(prefill, decode, source, target, "second")
    await eventually(lambda: proved(decode))
    assert len(probes(tap)) == 2
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
    for link in list(decode._links):
        link._transport.abort()
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
    prefill, decode, _, _ = await met(stage)
    offer = prefill.offer("first", BLOCKS, tokens=len(TOKENS))
    transfer = decode.start_fetch(prefill.engine.ticket("first"), BLOCKS, tokens=TOKENS)
    await asyncio.wait_for(transfer.outcome, 5)
    stage.network.hold("*")  # before the loop turns again: nothing of the proof is posted yet
    await offer.released()
    await eventually(lambda: probes(tap) and stage.network.held("*"))
    decode._peers._links.clear()  # it goes there again, though the old one is open
    await decode._peers.link(prefill.card.endpoint, None)
    stage.network.release("*")
    await quiet(prefill, decode)
    await eventually(lambda: not decode._site.fabric._holds)


@pytest.mark.parametrize("gpu", ["here", "there", None])
async def test_blocks_on_a_gpu_may_go_another_way_than_staging_memory(stage, gpu, monkeypatch):
    prefill, decode, *_ = await met(stage)
    link = await decode._peers.link(prefill.card.endpoint, None)
    site, on_gpu = decode._site, SimpleNamespace(kind="cuda")
    if gpu == "there":
        monkeypatch.setattr(site.plans, "geometry", lambda _: on_gpu)
    elif gpu == "here":
        monkeypatch.setattr(site, "geometry", on_gpu)
    found = decode._receiver._lender.prover._routes(link)
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
    assert len(probes(tap)) == 2
    await quiet(prefill, decode)


@pytest.mark.parametrize("what", ["prefill", "decode", "stream"])
async def test_somebody_goes_while_it_is_being_found_out(stage, tap, what):
    prefill, decode, _, _ = await met(stage)
    offer = prefill.offer("first", BLOCKS, tokens=len(TOKENS))
    await decode.fetch(prefill.engine.ticket("first"), BLOCKS, tokens=TOKENS, timeout=5)
    stage.network.hold("*")
    await offer.released()
    await eventually(lambda: stage.network.held("*"))
    assert probes(tap)
    if what == "stream":
        for link in list(decode._links):
            link._transport.abort()
        stage.network.release("*")
        await quiet(prefill, decode)
        return
    worker, other = (prefill, decode) if what == "prefill" else (decode, prefill)
    closing = asyncio.create_task(worker.aclose(drain=False))
    await asyncio.sleep(0)
    stage.network.release("*")
    await closing
    await eventually(lambda: not other._site.send_desk.share.extents())


@pytest.mark.parametrize("what", ["answer", "recall", "cut"])
async def test_a_loan_that_ends_before_the_peer_is_told_is_not_begun(stage, tap, what, monkeypatch, caplog):
    """A peer answers what it was not asked, somebody needs the memory, or the stream is cut, while the pause begins."""
    prefill, decode, source, target = await met(stage)
    pause, early = decode._site.fabric.pause, []

    def late(seconds, *, firm):
        lender = decode._receiver._lender
        ((number, loan),) = lender.loans.items()
        early.append(number)
        match what:
            case "answer":
                lender.result(loan, KvAgentResult(number, WHOLE, Status.OK, 0, True))
            case "recall":
                lender.recall()
            case _:
                loan.link._transport.abort()
                loan.lost()
        return pause(seconds, firm=firm)

    monkeypatch.setattr(decode._site.fabric, "pause", late)
    await moved(prefill, decode, source, target, "first")
    (lane,) = decode._receiver._lender.prover._lanes.values()
    await eventually(lambda: lane.tries)
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
