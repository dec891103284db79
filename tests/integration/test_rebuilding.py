"""The agent made anew: what only that can end is over, late bytes land nowhere, and nobody else fails for it."""

import asyncio
import itertools
from types import SimpleNamespace

import inside
import pytest
from stage import Cache, eventually, frames, quarantined, quiet, written

from kvxfer import KvxferError, MemoryInDoubt
from kvxfer.decode import receiver
from kvxfer.prefill import sender
from kvxfer.protocol.messages import Capability, Place, Reserve
from kvxfer.protocol.session import Role
from kvxfer.safety import doubt
from kvxfer.safety.fence import Revoked

TOKENS = range(8)
TIMES = {"peer_timeout": 0.4, "revoke_timeout": 2.0}


@pytest.fixture
def hosts(monkeypatch):
    """Every worker says that it is on a host of its own."""
    numbers = itertools.count()
    inside.live_where(lambda: f"boot-{next(numbers)} pid:[1]", monkeypatch)


async def in_flight(stage, victim, decode):
    """A fetch that is being written."""
    _, transfer = await stage.in_flight(victim, decode, "decode")
    stage.network.mend("decode")  # what comes from others is not held
    return transfer


async def test_what_a_host_that_is_gone_may_read_is_the_callers_again(stage, source, target, hosts):
    prefill, decode = await stage.pair(source, target, route="pull", **TIMES)
    offer, transfer = await stage.in_flight(prefill, decode, "prefill")
    inside.never_come_back(decode)
    inside.vanish(decode)
    inside.cut(prefill)
    ending = asyncio.create_task(offer.withdraw())
    await eventually(ending.done)
    await quiet(prefill)
    assert prefill.describe()["agent"]["rebuilt"] == 1
    transfer.cancel()


@pytest.mark.parametrize("said", ["the same host", "nothing"])
async def test_for_a_living_peer_on_this_host_it_would_prove_nothing(
    stage, source, target, monkeypatch, said, no_locks
):
    if said == "nothing":
        inside.live_where(lambda: "", monkeypatch)
    prefill, decode = await stage.pair(source, target, route="staged", **TIMES)
    victim = await stage.worker("victim", Cache(), route="staged", **TIMES)
    transfer = await in_flight(stage, victim, decode)
    inside.vanish(victim)
    with pytest.raises(KvxferError):
        await transfer
    looked = inside.now(decode) + 1.5 * TIMES["peer_timeout"]
    await eventually(lambda: inside.now(decode) > looked)
    assert decode.describe()["agent"] == {"rebuilt": 0, "wanted": 0, "paused": False}
    assert quarantined(decode, "receive")
    inside.rebuild(decode)  # for another reason
    await eventually(lambda: decode.describe()["agent"]["rebuilt"])
    await stage.bring(prefill, decode, "after", (5, 6), (7, 8))
    assert quarantined(decode, "receive"), "and if it is done, it is no evidence"


@pytest.mark.parametrize(
    ("kind", "host", "expected"),
    [("cuda", "here", True), ("cuda", "", True), ("cuda", "there", False), ("cpu", "here", False)],
)
def test_which_posts_go_on_without_an_agent(kind, host, expected, monkeypatch):
    monkeypatch.setattr(doubt, "elsewhere", lambda theirs: theirs == "there")
    site = SimpleNamespace(geometry=SimpleNamespace(kind=kind))
    peer = SimpleNamespace(body=SimpleNamespace(host=host))
    assert doubt.may_outlive_agent(site, peer) is expected  # pyright: ignore[reportArgumentType]


async def test_what_a_gpu_may_copy_on_this_host_stays_in_doubt(stage, source, target, route, monkeypatch, no_locks):
    """A rebuild for another reason gives up our own post, and ends no copy between two GPUs."""
    prefill, decode = await stage.pair(source, target, route=route, **{**TIMES, "revoke_timeout": 0.4})
    poster, far = (decode, "prefill") if route == "pull" else (prefill, "decode")
    monkeypatch.setattr(doubt, "may_outlive_agent", lambda site, peer: True)
    for module in (receiver, sender):
        monkeypatch.setattr(module, "may_outlive_agent", lambda site, peer: True)
    offer, transfer = await stage.in_flight(prefill, decode, far)
    inside.rebuild(poster)
    await eventually(lambda: poster.describe()["agent"]["rebuilt"])
    with pytest.raises(KvxferError) as raised:
        await transfer
    if route == "pull":
        assert isinstance(raised.value, MemoryInDoubt)
    elif route == "direct":
        with pytest.raises(MemoryInDoubt):
            await offer.withdraw()
    else:
        assert quarantined(prefill, "send")


@pytest.mark.parametrize("who", ["decode", "prefill"])
async def test_under_load_nothing_fails_for_it_and_every_byte_is_right(stage, source, target, route, who, monkeypatch):
    prefill, decode = await stage.pair(source, target, route=route, chunk_bytes="1KiB", revoke_timeout=20.0)
    worker = {"decode": decode, "prefill": prefill}[who]
    inside.rebuild_at_once(worker, monkeypatch)
    numbers, failed, stop = itertools.count(), [], asyncio.Event()

    async def keep_fetching(lane):
        while not stop.is_set():
            request, ids = f"r{next(numbers)}", [3 * lane + 1, 3 * lane + 2]
            offer = prefill.offer(request, ids, tokens=8)
            await decode.fetch(prefill.engine.ticket(request), ids[::-1], tokens=TOKENS, timeout=20)
            here, there = source.logical(ids, TOKENS), target.logical(ids[::-1], TOKENS)
            if not here.equal(there):
                failed.append(request)
            await offer.released()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for lane in range(4):
            group.create_task(keep_fetching(lane))
        for wanted in range(1, 5):
            inside.rebuild(worker)
            await eventually(lambda wanted=wanted: worker.describe()["agent"]["rebuilt"] == wanted, timeout=20)
            enough = decode.describe()["metrics"]["receive"]["transfers"].get("ok", 0) + 20
            await eventually(
                lambda enough=enough: decode.describe()["metrics"]["receive"]["transfers"].get("ok", 0) > enough,
                timeout=20,
            )
        stop.set()
    assert failed == []
    await quiet(prefill, decode)
    assert decode.describe()["metrics"]["receive"]["transfers"].keys() == {"ok"}
    for worker in (prefill, decode):
        assert worker.describe()["fabric"]["agents"] <= 1, "agents that are no more were forgotten"


async def test_a_peer_of_before_meets_again(stage, source, target, monkeypatch):
    with monkeypatch.context() as patch:
        inside.build_without(Capability.RENEWED, patch)
        prefill = await stage.worker("prefill", source, **TIMES)
    decode = await stage.worker("decode", target, **TIMES)
    await stage.bring(prefill, decode, "before")
    link = inside.session(decode)
    inside.rebuild(decode)
    await eventually(lambda: decode.describe()["agent"]["rebuilt"])
    assert not link.is_open
    await stage.bring(prefill, decode, "after", (5, 6), (7, 8))


async def test_who_meets_while_it_is_made_anew_is_told_of_the_new_one(stage, source, target, monkeypatch):
    prefill, decode = await stage.pair(source, target, route="staged", **TIMES)
    with monkeypatch.context() as patch:
        kept = inside.hear_later(Role.SERVER, patch)
        fetching = asyncio.create_task(stage.bring(prefill, decode, "r"))
        await eventually(lambda: kept)
        inside.rebuild(decode)
        await eventually(lambda: decode.describe()["agent"]["rebuilt"])
    for late in kept:
        late()
    await fetching


async def test_what_comes_while_it_is_made_anew_is_granted_nothing_in_place(stage, source, target):
    prefill, decode = await stage.pair(source, target, route="direct")
    await stage.bring(prefill, decode, "before")
    inside.pause_grants(decode)
    fetching = asyncio.create_task(stage.bring(prefill, decode, "meanwhile", (5, 6), (7, 8)))
    await eventually(lambda: frames(decode, "Ready"))
    assert not written(decode)
    inside.resume_grants(decode)
    await fetching


async def test_memory_that_was_free_before_it_began_is_granted_when_it_is_over(stage, source, target, monkeypatch):
    """It begins while the name of the peer's agent is waited for, and nothing is in the peer's hands by then."""
    prefill, decode = await stage.pair(source, target, route="staged", chunk_bytes="1KiB", window=2)
    await stage.bring(prefill, decode, "before")
    name_turns, paused = receiver.Receiver._turns_token, []

    async def pause(one):
        found = await name_turns(one)
        if not paused:
            paused.append(one)
            inside.pause_grants(decode)
        return found

    monkeypatch.setattr(receiver.Receiver, "_turns_token", pause)
    monkeypatch.setattr(receiver.Receiver, "_grant_ahead", lambda *_: False)
    fetching = asyncio.create_task(stage.bring(prefill, decode, "meanwhile", (5, 6), (7, 8)))
    await eventually(lambda: paused)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not paused[0].protocol.granted
    inside.resume_grants(decode)
    await fetching


async def breaks(stage, prefill, decode, request="r"):
    """A fetch whose bytes are lost on their way: what has left may still land."""
    _, transfer = stage.begin(prefill, decode, request, timeout=5)
    stage.network.break_next("decode", disconnected=True)
    with pytest.raises(KvxferError, match="was told to break"):
        await transfer


@pytest.mark.parametrize("route", ["staged", "direct"])
async def test_writes_in_doubt_to_an_agent_that_is_no_more_keep_no_place(stage, source, target, hosts, route):
    """The peer lives, and nothing else would ever tell its prefill rank that they do not land."""
    prefill, decode = await stage.pair(source, target, route=route, max_transfers=2, **TIMES)
    for number in range(3):
        await breaks(stage, prefill, decode, f"r{number}")
        await eventually(lambda: not prefill.describe()["sent_in_doubt"])
        assert decode.describe()["agent"]["rebuilt"] == number + 1
    await stage.bring(prefill, decode, "after", (5, 6), (7, 8))
    await quiet(prefill, decode)
    assert prefill.describe()["places"] == 0


@pytest.mark.parametrize("route", ["staged", "direct"])
async def test_nor_do_those_that_end_only_after_their_prefill_rank_was_told(
    stage, source, target, hosts, route, monkeypatch
):
    """It hears of the new agent first, and then that what it had posted to the old one has failed."""
    times = {**TIMES, "revoke_timeout": 0.4}
    prefill, decode = await stage.pair(source, target, route=route, **times)
    transfer = await in_flight(stage, prefill, decode)
    transfer.cancel()
    with monkeypatch.context() as patch:
        patch.setattr(stage.network, "poll", lambda part: False)
        await eventually(lambda: frames(prefill, "Renewed"))
        assert prefill.describe()["sending"] == 1
    await eventually(lambda: not prefill.describe()["sending"])
    with pytest.raises((asyncio.CancelledError, MemoryInDoubt)):
        await transfer
    assert not prefill.describe()["sent_in_doubt"]
    assert prefill.describe()["places"] == 0


@pytest.mark.parametrize("gpus", [False, True])
async def test_those_to_one_on_this_host_are_over_unless_they_run_on(
    stage, source, target, no_locks, monkeypatch, gpus
):
    """It may be written without an agent on its side, by ours as long as that lives, and by a copy between GPUs."""
    monkeypatch.setattr(sender, "may_outlive_agent", lambda *_: gpus)
    prefill, decode = await stage.pair(source, target, route="staged", max_transfers=2, **TIMES)
    await breaks(stage, prefill, decode)
    inside.rebuild(decode)
    await eventually(lambda: decode.describe()["agent"]["rebuilt"])
    await stage.bring(prefill, decode, "after", (5, 6), (7, 8))
    await eventually(lambda: prefill.describe()["sent_in_doubt"] == prefill.describe()["places"] == gpus)
    await eventually(lambda: bool(decode.describe()["arena"]["receive"].quarantined_bytes) == gpus)


@pytest.mark.parametrize("route", ["staged", "direct"])
async def test_what_had_left_for_a_peer_that_lives_is_over_once_both_agents_were_made_anew(
    stage, source, target, route
):
    """Both are, since the prefill rank knows that nothing else would tell, and each gate can be closed again."""
    prefill, decode = await stage.pair(source, target, route=route, **TIMES)
    await stage.bring(prefill, decode, "before")
    await breaks(stage, prefill, decode)
    await eventually(lambda: not prefill.describe()["sent_in_doubt"])
    await quiet(decode)
    assert not decode.describe()["arena"]["receive"].quarantined_bytes
    assert not decode.describe()["custody"].doubtful_blocks
    async with asyncio.timeout(5):  # the prefill rank's mover gives the lock back a moment later, and says nothing
        while {await inside.gates_of(decode).revoke(number) for number in inside.free_gates(decode)} != {Revoked.IDLE}:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await stage.bring(prefill, decode, "after", (5, 6), (3, 4))


@pytest.mark.parametrize("route", ["staged", "direct"])
async def test_that_it_is_over_is_said_where_it_is_heard_also_if_a_stream_the_other_way_brought_the_news(
    stage, source, target, route, no_locks
):
    prefill, decode = await stage.pair(source, target, route=route, **TIMES)
    await stage.bring(prefill, decode, "there")
    await stage.bring(decode, prefill, "and back", (5, 6), (7, 8))
    inside.say_that_it_is_anew_where(decode, Role.SERVER)
    await breaks(stage, prefill, decode)
    await eventually(lambda: not prefill.describe()["sent_in_doubt"])
    await quiet(decode)


@pytest.mark.parametrize("route", ["staged", "direct"])
async def test_what_our_own_post_may_read_is_ours_again_also_once_nothing_more_can_come_of_it_at_the_peer(
    stage, source, target, route, hosts
):
    """The agent that the post went to was made anew on another host, so nobody asks any more; ours may read on."""
    prefill, decode = await stage.pair(source, target, route=route, no_progress_timeout=0.2, **TIMES)
    inside.keep_agent(prefill)
    offer, transfer = await stage.in_flight(prefill, decode, "decode")
    with pytest.raises(KvxferError):
        await transfer
    ending = asyncio.gather(offer.withdraw(), return_exceptions=True)
    await eventually(ending.done)
    inside.rebuild(decode)
    await eventually(lambda: decode.describe()["agent"]["rebuilt"] and not prefill.describe()["sent_in_doubt"])
    (outcome,) = await ending
    assert bool(quarantined(prefill, "send")) == (route == "staged")
    assert isinstance(outcome, MemoryInDoubt) == (route == "direct")
    inside.consider_rebuilding(prefill)
    async with asyncio.timeout(10):
        if isinstance(outcome, MemoryInDoubt):
            await outcome.settled()
        await eventually(lambda: not quarantined(prefill, "send"))


async def test_what_our_own_agent_may_write_by_itself_is_in_doubt_until_that_is_made_anew(
    stage, source, target, no_locks
):
    """On one host the agent of the peer is not needed for it; so that one's end tells nothing alone."""
    prefill, decode = await stage.pair(source, target, route="staged", **TIMES)
    inside.keep_agent(prefill)
    _, transfer = stage.begin(prefill, decode, ids=(1,), into=(3,), tokens=range(4), timeout=5)
    stage.network.break_next("decode", after_bytes=24, lingers=True)
    stage.network.refuse_next("decode")  # the write that would tell that all before it has ended
    with pytest.raises(KvxferError, match="was told to break"):
        await transfer
    inside.rebuild(decode)
    await eventually(lambda: frames(prefill, "Renewed"))
    assert prefill.describe()["sent_in_doubt"] == 1
    assert decode.describe()["arena"]["receive"].quarantined_bytes
    inside.consider_rebuilding(prefill)
    await eventually(lambda: not prefill.describe()["sent_in_doubt"])
    await eventually(lambda: not decode.describe()["arena"]["receive"].quarantined_bytes)
    assert decode.describe()["agent"]["rebuilt"] == 1, "once is enough, in whatever order"


async def test_what_left_only_after_it_was_given_up_has_both_agents_made_anew(stage, source, target, no_locks):
    """Our own one is not wanted for it any more then, but for the peer, who waits for its word."""
    times = {**TIMES, "no_progress_timeout": 0.2}
    prefill, decode = await stage.pair(source, target, route="staged", chunk_bytes="1KiB", **times)
    inside.keep_agent(prefill)
    stage.network.break_next("decode", skip=1, disconnected=True)
    _, transfer = await stage.in_flight(prefill, decode, "decode")
    with pytest.raises(KvxferError, match="was told to break"):
        await transfer
    assert prefill.describe()["agent"]["wanted"]
    stage.network.release("decode")
    await eventually(lambda: prefill.describe()["sent_in_doubt"] and not quarantined(prefill, "send"))
    inside.consider_rebuilding(prefill)
    await eventually(lambda: not prefill.describe()["sent_in_doubt"])
    await quiet(decode)


async def test_what_was_granted_before_is_not_posted_to_the_new_agent_of_which_another_stream_tells(
    stage, source, target, hosts, monkeypatch
):
    """One stream is dead for the decode rank alone; the other one, of fetches the other way, is well."""
    slow = {**TIMES, "peer_timeout": 20.0}
    prefill, decode = await stage.pair(source, target, route="staged", prefill=slow, decode=TIMES)
    await stage.bring(prefill, decode, "there")
    await stage.bring(decode, prefill, "and back")
    late = inside.keep_gathers(monkeypatch)  # a large plan, in a thread
    _, transfer = stage.begin(prefill, decode)
    await eventually(lambda: late)
    monkeypatch.undo()
    inside.never_come_back(decode)
    (link,) = (link for link in inside.sessions(decode) if link.role is Role.CLIENT)
    stream = inside.lose_unheard(link)
    with pytest.raises(KvxferError):
        await transfer
    await eventually(lambda: decode.describe()["agent"]["rebuilt"] and not quarantined(decode, "receive"))
    await eventually(lambda: frames(prefill, "Renewed"))
    moved = len(stage.network.log)
    for gather in late:
        gather()
    await eventually(lambda: not prefill.describe()["sending"])
    assert len(stage.network.log) == moved, "memory that is somebody else's by now was written"
    stream.abort()


async def test_a_grant_that_crosses_the_stop_of_its_transfer_counts_for_nothing(stage, source, target, hosts):
    """Nothing is posted under it: what was, is over as soon as its decode rank has a new agent."""
    prefill, decode = await stage.pair(source, target, route="staged", **TIMES)
    transfer = await in_flight(stage, prefill, decode)
    (link,) = inside.sessions(prefill)
    transfer.cancel()
    await eventually(lambda: inside.being_stopped(prefill))
    link.renewals += 1
    (number,) = (int(one["id"].rpartition("-")[2]) for one in prefill.describe()["transfers"])
    inside.hear(prefill, link, Reserve(number, 1, 1000, ring=[Place(0, 1 << 20)]))
    assert inside.granted_by(prefill) == [0]
    stage.network.release("decode")
    with pytest.raises(asyncio.CancelledError):
        await transfer
    await quiet(prefill, decode)
