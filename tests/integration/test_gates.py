"""Grants that are taken back: a peer that says nothing any more writes nothing any more, and nobody has to ask it.

All of it in one process, where gates are as between two; `tests/mapped/test_locks.py` has those.
"""

import asyncio

import inside
import pytest
from passing import enter
from stage import Broken, Cache, Copied, Gate, eventually, frames, quiet
from wire import play, virtual

from kvxfer.errors import ClosedError, FabricError, MemoryInDoubtError, PeerLostError, TransferFailedError
from kvxfer.protocol.messages import Accept, Fetch, Ready, Reserve
from kvxfer.safety.fence import GATES, SHARED_GATE, Gates, LockFile, PeerGate, PeerGates, Permit, Revoked

TIMES = {"peer_timeout": 3, "revoke_timeout": 5, "connect_timeout": 0.2}
ROUTES = ["mapped", "direct", "staged"]


def caches(route):
    shared = route == "mapped"
    return {"source": Cache(shared=shared), "target": Cache(layout="HND", shared=shared)}


async def granted(play, route):
    """A fetch whose peer holds the grant and waits for its own event when it falls silent; the event."""
    await play.pair(route=route, **TIMES, **caches(route))
    await play.bring("r0")
    computed = Gate()
    play.prefill.offer("r", [1, 2], tokens=8, after=computed)
    transfer = play.start("r")
    await play.until(lambda: frames(play.decode, "Accept") == 2)
    play.wire.silence()
    return transfer, computed


@pytest.mark.parametrize("route", ROUTES)
@virtual
async def test_a_silent_peer_that_writes_nothing_leaves_no_doubt(play, route):
    """By the peer's word alone that would last until it speaks."""
    transfer, computed = await granted(play, route)
    with pytest.raises(PeerLostError):
        await transfer
    assert transfer.memory_safe
    await quiet(play.decode)
    before = Copied(play.target)
    computed.fired = True  # what it would have written goes nowhere
    await play.until(lambda: not play.prefill.describe()["sending"])
    before.check()
    play.wire.speak()
    await play.until(lambda: not play.decode.describe()["connecting"])  # that was begun while the peer was silent
    await play.bring("r2")


@virtual
async def test_a_silent_reader_that_reads_nothing_keeps_no_blocks(play):
    """Its blocks may not be written yet, so it reads nothing; by its word alone they would be in doubt."""
    await play.pair(route="pull", **TIMES)
    await play.bring("r0")
    offer = play.prefill.offer("r", [1, 2], tokens=8)
    before, free = frames(play.decode, "Ready"), Gate()
    transfer = play.start("r", after=free)
    await play.until(lambda: frames(play.decode, "Ready") > before)
    play.wire.silence()
    await play.until(lambda: not play.prefill.describe()["sending"])
    ending, seconds = await play.timed(offer.withdraw())
    assert (type(ending).__name__, seconds < 0.1) == ("Withdrawn", True)
    unwritten = Copied(play.target)
    free.fired = True
    with pytest.raises(PeerLostError):
        await transfer
    unwritten.check()
    await quiet(play.prefill)


@virtual
async def test_a_read_that_stands_still_keeps_no_offer_once_its_reader_has_given_up(play):
    """The reader is there, and answers; only that it reads nothing any more it cannot say."""
    await play.pair(route="pull", **TIMES, offer_lease=6)
    await play.bring("r0")
    offer = play.prefill.offer("r", [1, 2], tokens=8)
    play.network.hold("*")
    transfer = play.start("r")
    await play.until(lambda: play.network.held("*"))
    transfer.cancel()
    with pytest.raises(MemoryInDoubtError) as reading:
        await transfer
    with pytest.raises(MemoryInDoubtError) as read:
        await asyncio.wait_for(offer.released(), play.prefill.config.bounds()["released_by_lease"])
    assert set(read.value.blocks["default"]) == {1, 2}
    assert frames(play.prefill, "Cancel") == 0
    play.network.release("*")
    await reading.value.settled()
    await read.value.settled()
    await quiet(play.prefill, play.decode)
    assert not play.prefill.describe()["sent_in_doubt"]


@pytest.mark.parametrize("route", ["direct", "staged"])
def test_a_worker_that_closes_takes_back_what_a_silent_peer_was_granted(tmp_path, monkeypatch, route):
    """The doubt begins while the worker is closing: one look at the gate ends it."""
    leaked = inside.leaks(monkeypatch)

    async def scenario(play):
        transfer, computed = await granted(play, route)
        await play.decode.aclose(drain=False)
        with pytest.raises(ClosedError):
            await transfer
        assert transfer.memory_safe
        before = Copied(play.target)
        computed.fired = True
        await play.until(lambda: not play.prefill.describe()["sending"])
        before.check()

    play(scenario, tmp_path)
    assert not leaked


@virtual
async def test_a_stream_that_was_cut_is_no_doubt_where_nothing_is_written(play):
    await play.pair(route="direct", **TIMES)
    await play.bring("r0")
    play.prefill.offer("r", [1, 2], tokens=8, after=Gate())
    transfer = play.start("r")
    await play.until(lambda: frames(play.decode, "Accept") == 2)
    play.wire.cut()
    outcome, seconds = await play.timed(transfer)
    assert isinstance(outcome, PeerLostError)
    assert seconds < 0.1  # nobody has to be reached for that


async def test_a_reader_puts_no_gate_before_blocks_that_only_it_writes(stage, tap):
    prefill, decode = await stage.pair(Cache(), Cache(layout="HND"), route="pull")
    await stage.bring(prefill, decode)
    assert {want.generation >> 32 for want in tap.of(Ready)} == {SHARED_GATE + 1}
    await quiet(prefill, decode)
    assert inside.free_gates(prefill) == [SHARED_GATE + 1]
    assert (inside.free_gates(decode), inside.gates_of(decode).allot()) == ([], SHARED_GATE + 1)  # the first of all


async def test_the_grants_of_a_transfer_name_one_gate_and_those_of_two_name_two(stage, tap):
    prefill, decode = await stage.pair(Cache(blocks=64), Cache(blocks=64, layout="HND"), route="staged")
    _, first = stage.begin(prefill, decode, "a", range(20), range(20), range(80))
    _, second = stage.begin(prefill, decode, "b", range(20), range(20, 40), range(80))
    await first
    await second
    named = {}
    for reserve in tap.of(Reserve):
        named.setdefault(reserve.transfer, set()).add(reserve.generation)
    assert [len(generations) for generations in named.values()] == [1, 1]
    assert len(set.union(*named.values())) == 2
    await quiet(prefill, decode)


@pytest.mark.parametrize("route", ["direct", "staged"])
async def test_a_peer_that_cannot_open_the_gates_is_granted_memory_without(stage, tap, monkeypatch, caplog, route):
    inside.open_no_gates(monkeypatch)
    prefill, decode = await stage.pair(Cache(), Cache(layout="HND"), route=route)
    for request in "ab":
        await stage.bring(prefill, decode, request)
    assert [fetch.generation > 0 for fetch in tap.of(Fetch)] == [route == "direct", False]
    assert [(accept.fenced, accept.ahead) for accept in tap.of(Accept)] == [(False, False), (False, True)]
    assert {grant.generation for grant in tap.of(Reserve)} == {0}
    assert caplog.text.count("gates_not_opened") == 2  # either side of the other's
    await quiet(prefill, decode)


@pytest.mark.parametrize("route", ["direct", "pull"])
async def test_a_peer_that_cannot_open_the_gates_is_believed_though_it_is_met_once_more(stage, monkeypatch, route):
    """It has said so, and then it opens a stream of its own, before it is granted anything."""
    inside.open_no_gates(monkeypatch)
    prefill, decode = await stage.pair(Cache(), Cache(layout="HND"), route=route)
    computed, writable = Gate(), Gate()
    computed.fired = route == "direct"
    offer, transfer = stage.begin(prefill, decode, offered={"after": computed}, after=writable)
    await eventually(lambda: frames(decode, "Accept"))
    claim = prefill.claim(decode.engine.ticket("b"))
    await eventually(lambda: len(inside.sessions(prefill)) == len(inside.sessions(decode)) == 2)
    computed.fired = writable.fired = True
    await transfer
    await offer.released()
    claim.close()
    await quiet(prefill, decode)


@pytest.mark.parametrize("route", ["direct", "staged", "pull"])
async def test_a_peer_that_cannot_open_the_gates_again_is_granted_memory_without(stage, monkeypatch, route):
    """It saw the session end, and this side still takes it for one that passes them."""
    prefill, decode = await stage.pair(Cache(), Cache(layout="HND"), route=route)
    await stage.bring(prefill, decode, "a")
    inside.open_no_gates(monkeypatch)
    for worker, other in ((prefill, decode), (decode, prefill)):
        assert inside.met(worker).identity.incarnation.hex() == other.card.incarnation
        inside.meet_keys_again(worker)
    await stage.bring(prefill, decode, "b")


async def test_a_gate_that_is_given_back_by_the_peers_word_is_not_locked_any_more(stage):
    """The transport has ended the read and says that the peer is gone, which it is not: gates are used again."""
    prefill, decode = await stage.pair(Cache(), Cache(layout="HND"), route="pull")
    await stage.bring(prefill, decode, "a")
    stage.network.break_next("*", disconnected=True)
    offer, transfer = stage.begin(prefill, decode, "b")
    with pytest.raises(TransferFailedError):
        await transfer
    await offer.withdraw()
    await quiet(prefill, decode)
    assert inside.free_gates(prefill)
    assert {await inside.gates_of(prefill).revoke(number) for number in inside.free_gates(prefill)} == {Revoked.IDLE}


@pytest.mark.parametrize("end", ["the process", "closing"])
async def test_no_file_stays_open_of_a_peer_that_was_lost_more_than_once_with_somebody_inside(stage, end):
    """Each session opens its gates anew, and what is inside keeps those of before."""
    prefill, decode = await stage.pair(Cache(), Cache(layout="HND"), route="direct")
    await stage.bring(prefill, decode)
    peer = inside.met(prefill)
    keys, opened, entered = PeerGates(), [], []
    for number in range(1, 4):
        keys.on_session(peer)
        opened.append(keys._keys[peer.identity.incarnation])
        passage = keys.passage(peer, inside.gates_of(decode).granted(number))
        assert passage is not None
        entered.append(enter(passage))
        assert entered[-1]
        keys.forget(peer)
    assert not any(key._pages.closed for key in opened)
    if end == "closing":  # the mover has ended, inside of them
        keys.close()
        for one in entered:
            one._passage.give_back()
    else:  # the peer's process has ended, and the mover has forgotten what was in doubt
        for one in entered:
            one.leave()
    assert all(key._pages.closed for key in opened)


async def test_a_fetch_that_could_not_begin_keeps_no_gate(stage):
    prefill, decode = await stage.pair(Cache(), Cache(layout="HND"), route="direct")
    gates = inside.gates_of(decode)
    for number in range(6):
        _, transfer = stage.begin(prefill, decode, f"r{number}", after=Broken())
        with pytest.raises(TransferFailedError, match="cannot be queried"):
            await transfer
    await quiet(decode)
    assert gates.allot() == SHARED_GATE + 1


class Words:
    """Gates in memory of a GPU, as their owner sees them."""

    def __init__(self):
        self.writers, self.generations = {}, {}

    async def look(self, address, raised):
        self.generations[address] = self.generations.get(address, 1) + raised
        return self.writers.get(address, 0)


@pytest.mark.parametrize("locked", [True, False])
async def test_both_generations_of_a_gate_are_raised_or_neither(locked):
    words = Words()
    locks = LockFile(GATES) if locked else None
    gates = Gates(1 << 40, locks, words.look)
    number = gates.allot()
    granted, address = gates.granted(number), (1 << 40) + 128 * number
    words.writers[address] = 2
    if locks is not None:
        passed = enter(Permit(PeerGate(locks.handle), number, granted & 0xFFFF_FFFF))
        assert passed
        assert await gates.revoke(number) is None
        assert (gates.granted(number), words.generations) == (granted, {})
        passed.leave()
    assert await gates.revoke(number) is Revoked.IDLE
    assert (gates.granted(number), words.generations[address]) == (granted + 1, 2)
    assert await gates.writers_inside(number) == 2
    words.writers.clear()
    assert await gates.writers_inside(number) == 0
    assert words.generations[address] == 2


@pytest.mark.parametrize("fails", [False, True])
async def test_a_gate_is_not_allotted_again_while_its_word_is_being_raised(fails):
    """That takes a thread and the GPU; the peer may answer meanwhile, and who came next would be kept out."""
    raised, words = asyncio.Event(), {}

    async def look(address, raise_it):
        if raise_it:
            await raised.wait()
            if fails:
                raise FabricError("the device is broken")
            words[address] = words.get(address, 1) + 1
        return 0

    gates = Gates(1 << 40, LockFile(GATES), look)
    number = gates.allot()
    revoking = asyncio.create_task(gates.revoke(number))
    await asyncio.sleep(0)
    gates.give_back(number)
    other = gates.allot()
    assert other != number
    raised.set()
    await asyncio.gather(revoking, return_exceptions=True)
    again = gates.allot()
    assert (again == number) is not fails  # of one whose word may be behind, nothing is granted any more
    assert gates.granted(again) & 0xFFFF_FFFF == words.get((1 << 40) + 128 * again, 1)


async def test_the_shared_gate_is_never_raised_and_one_in_which_a_writer_died_never_allotted_again():
    words = Words()
    gates = Gates(1 << 40, None, words.look)
    numbers = [gates.allot() for _ in range(GATES)]
    assert numbers[-1] == gates.allot() == SHARED_GATE
    assert await gates.revoke(SHARED_GATE) is None
    gates.retire(numbers[0])
    for number in numbers[:2]:
        gates.give_back(number)
    gates.give_back(SHARED_GATE)
    assert [gates.allot(), gates.allot()] == [numbers[1], SHARED_GATE]
