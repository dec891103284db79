"""Small scenes on which one guard of the memory decides, each in virtual time and under the eyes of the ledger.

A scene passes while its guard stands, and fails (`AssertionError`) when it is taken away: what the ledger saw, or what
the scene itself asserts.
"""

import asyncio
import contextlib
import random

import inside
import pytest
from impostor import made_up, posing_as
from ownership import Ledger, watch
from schedule import Quiet
from stage import Gate, extents, quarantined
from world import World

from kvxfer import READY, IdentityError, KvxferError, MemoryInDoubtError, Withdrawn
from kvxfer.decode.receiver import to_places
from kvxfer.errors import BlocksError
from kvxfer.memory.books import ExtentState
from kvxfer.prefill.offers import Ending
from kvxfer.protocol.framing import encode
from kvxfer.protocol.messages import Cancel, Reserve
from kvxfer.safety.processes import Processes
from kvxfer.testing import simulate

IDS, INTO, TOKENS = [3, 4], [7, 8], range(8)
CHUNKS = 4
"""Of a fetch, where chunks are of 512 bytes."""


class Scene:
    """Two engines of one rank, `a` that offers and `b` that fetches, and blocks of 4 tokens."""

    def __init__(self, world: World):
        self.world = world  # both of them
        self.a, self.b = world.ranks  # the prefill rank; the decode rank
        self.network, self.streams = world.network, world.streams

    def offer(self, request="r", ids=IDS, after=READY):
        """Offer blocks, which the ledger lets be read until `released` has returned."""
        self.a.books.take(ids)
        self.a.books.offered(ids)
        return self.a.worker.offer(request, ids, tokens=len(TOKENS), after=after)

    def fetch(self, request="r", ids=INTO, after=READY, **options):
        """Fetch into blocks, which the ledger lets be written until it has returned or raised."""
        self.b.books.take(ids)
        self.b.books.writes(ids, next(self.world.tags))
        ticket = self.world.engines[0].issuer.ticket(request)
        transfer = self.b.worker.start_fetch(ticket, ids, tokens=TOKENS, after=after, **options)

        def ended(outcome):
            if outcome.cancelled() or not isinstance(outcome.exception(), MemoryInDoubtError):
                self.b.books.writes(ids, 0)

        transfer.outcome.add_done_callback(ended)
        return transfer

    async def until(self, condition):
        """Let virtual time pass until a condition holds."""
        end = self.world.now + 2.0
        while not condition():
            if self.world.now >= end:
                raise TimeoutError("it did not come to pass")  # the scene is wrong: no verdict on the guard
            await asyncio.sleep(1e-4)

    async def in_flight(self, **options):
        """An offer and a fetch whose bytes are kept in flight."""
        self.network.hold("*")
        offer = self.offer()
        transfer = self.fetch(**options)
        await self.until(lambda: self.network.held("*"))
        return offer, transfer

    async def failure(self, transfer) -> BaseException:
        """How a fetch fails."""
        with contextlib.suppress(KvxferError, asyncio.CancelledError):
            await transfer
            pytest.fail("it succeeded")
        await asyncio.sleep(1e-5)  # until the ledger knows
        return transfer.outcome.exception() if not transfer.outcome.cancelled() else asyncio.CancelledError()

    async def ending(self, offer, *, withdraw=False) -> Ending | MemoryInDoubtError:
        """How an offer ends; without a doubt its blocks are not to be read any more."""
        try:
            ending = await (offer.withdraw() if withdraw else offer.released())
        except MemoryInDoubtError as error:
            return error
        self.a.books.released(IDS)
        return ending

    async def land(self):
        """What is in flight lands, and everybody has time to do something about it."""
        self.network.release("*")
        await asyncio.sleep(0.3)

    def keep_agents(self):
        """Whatever only a new agent would end goes on."""
        for rank in (self.a, self.b):
            inside.keep_agent(rank.worker)

    async def rebuilt(self, rank):
        """A rank has made its agent anew, and nothing is in quarantine there any more."""
        worker = rank.worker
        await self.until(
            lambda: (
                worker.describe()["agent"]["rebuilt"]
                and not any(quarantined(worker, side) for side in ("send", "receive"))
            )
        )

    def silence(self):
        """Neither hears of the other any more."""
        for rank in (self.a, self.b):
            self.streams.silence(rank.worker)

    def cut(self):
        """Reset every control stream."""
        inside.cut(self.a.worker, self.b.worker)

    def clear(self):
        """See that nothing was touched that belongs to nobody."""
        faults = [*self.world.ledger.faults, *(one for rank in (self.a, self.b) for one in rank.books.untaken())]
        assert not faults, "\n".join(faults)


def play(scene, folder, *, seed=0, locks=True, apart=False, **settings):
    """Run `scene(Scene)`.

    Args:
        scene: What happens.
        folder: For sockets.
        seed: Of the order of what happens at once.
        locks: Whether memory may be taken back without an answer.
        apart: Whether they are on two hosts.
        **settings: Of both workers.
    """
    for old in folder.iterdir():
        old.unlink()
    with pytest.MonkeyPatch.context() as patch, Quiet() as logs:
        ledger = Ledger()
        watch(patch, ledger)
        if not locks:
            inside.share_no_locks(patch)

        async def run(runtime):
            world = World(runtime, random.Random(7), ledger, folder)
            world.settings |= {"arena_bytes": "16KiB", "chunk_bytes": "4KiB"}
            world.settings |= {"grant_lease": 1.0, "window": 4, **settings}
            world.apart = apart
            world.layouts, world.layers, world.block_tokens, world.shared = ["NHD", "HND"], 2, [4], True
            await world.open(patch, (1, 1))
            one = Scene(world)
            try:
                await scene(one)
                one.clear()
            finally:
                one.network.release("*")
                await world.end()

        try:
            simulate(run, seed=seed, limit=30.0)
        finally:
            if logs.lines:
                raise RuntimeError("\n".join(logs.lines))  # a defect, also of whoever took a guard away


# --- what happens


async def cancelled_before_its_post(scene):
    """The caller gives up while the chunk waits for its event; then the event fires."""
    gate = Gate()
    scene.offer(after=gate)
    transfer = scene.fetch()
    await scene.until(lambda: scene.a.worker.describe()["sending"])
    await asyncio.sleep(0.01)
    transfer.cancel()
    await scene.failure(transfer)
    assert transfer.memory_safe
    gate.fired = True
    await asyncio.sleep(0.05)


async def its_event_fires_after_the_lease(scene):
    """A grant is not used after its lease."""
    gate = Gate()
    scene.offer(after=gate)
    transfer = scene.fetch()
    await asyncio.sleep(0.05)
    moved = len(scene.network.log)
    gate.fired = True
    assert not isinstance(await scene.failure(transfer), MemoryInDoubtError)
    assert len(scene.network.log) == moved, "it was posted after its lease"


async def bytes_of_a_silent_peer(scene):
    """The stream is lost while bytes are in flight, and they land later."""
    scene.keep_agents()
    _, transfer = await scene.in_flight()
    scene.silence()
    await scene.failure(transfer)
    await scene.land()


async def meet(scene):
    """One request goes through, so that both sides know which gates the other passes."""
    scene.offer("warm-up", [13, 14])
    await scene.fetch("warm-up", [11, 12])
    await asyncio.sleep(0.01)


async def bytes_of_a_silent_peer_behind_a_gate(scene):
    """The same where the gate that they came through could be closed."""
    await meet(scene)
    await bytes_of_a_silent_peer(scene)


async def posted_after_its_grant_was_taken_back(scene):
    """A silent peer writes nothing; it is about to begin when its memory is taken back."""
    await meet(scene)
    gate = Gate()
    scene.offer(after=gate)
    transfer = scene.fetch()
    await asyncio.sleep(0.01)
    scene.streams.silence(scene.b.worker)
    await asyncio.sleep(scene.b.worker.config.peer_timeout / 4)
    scene.streams.silence(scene.a.worker)  # hears so much longer of the other one
    assert not isinstance(await scene.failure(transfer), MemoryInDoubtError)
    gate.fired = True
    await asyncio.sleep(0.01)
    await scene.land()


async def cancelled_while_bytes_are_in_flight(scene):
    """The peer says that it is through only when it is."""
    _, transfer = await scene.in_flight()
    transfer.cancel()
    await scene.failure(transfer)
    await scene.land()


async def asked_again_after_a_lost_stream(scene):
    """The stream is lost and found while bytes are in flight: the peer still knows of them."""
    _, transfer = await scene.in_flight()
    scene.cut()
    await scene.failure(transfer)
    await scene.until(lambda: inside.sessions(scene.b.worker))
    await asyncio.sleep(0.05)
    await scene.land()


async def asked_again_after_a_doubt(scene):
    """A post was given up as in doubt; a peer that asks again must not hear that it is over."""
    _, transfer = await scene.in_flight()
    await asyncio.sleep(0.2)
    assert transfer.done
    scene.cut()
    await asyncio.sleep(0.1)  # a stream is opened again, to ask
    await scene.land()


async def another_incarnation_answers(scene):
    """The prefill worker is killed with bytes in flight, and another one answers at the same place."""
    _, transfer = await scene.in_flight()
    scene.world.kill(scene.a)
    scene.world.engines[0] = await scene.world.engine("a", 1)
    assert isinstance(await scene.failure(transfer), MemoryInDoubtError)
    await scene.until(lambda: inside.sessions(scene.b.worker))
    await asyncio.sleep(0.05)
    assert scene.b.worker.describe()["custody"].doubtful_blocks, "who knows nothing of it said that it is over"
    await scene.land()


async def claims_to_be(scene, rank, name):
    """Another worker, which says to be one that is, or was, there."""
    with posing_as(rank.worker):
        engine = await scene.world.engine(name, 1)
    scene.world.engines.append(engine)
    return made_up(engine.ranks[0].worker, rank.worker)


async def somebody_answers_in_its_name(scene):
    """The prefill worker is killed with bytes in flight; who answers at its place says to be the same process."""
    _, transfer = await scene.in_flight()
    scene.world.kill(scene.a)
    await claims_to_be(scene, scene.a, "a")
    assert isinstance(await scene.failure(transfer), MemoryInDoubtError)
    await asyncio.sleep(0.3)  # it is asked meanwhile
    assert scene.b.worker.describe()["custody"].doubtful_blocks, "who knows nothing of it said that it is over"
    await scene.land()


async def withdrawn(scene, offer, transfer):
    """The offer is withdrawn, and only then what was under way lands."""
    ending = asyncio.create_task(scene.ending(offer, withdraw=True))
    await asyncio.sleep(0.02)
    await scene.land()
    with contextlib.suppress(KvxferError):
        await transfer
    await ending


async def somebody_speaks_in_the_name_of_a_reader(scene):
    """It says that nothing is read any more, and so does the offer."""
    offer, transfer = await scene.in_flight()
    (number,) = inside.unanswered(scene.b.worker)
    other = await claims_to_be(scene, scene.b, "c")
    inside.when_connected(other, lambda link: link.send(Cancel(number)))
    scene.streams.silence(scene.b.worker)  # it would come back at once, and the last one to come is believed
    with contextlib.suppress(IdentityError):
        await inside.connect(other, scene.a.worker.card.endpoint)
    await withdrawn(scene, offer, transfer)


async def somebody_stands_between(scene):
    """A reader is led to somebody who passes on what it proves there, and then says that nothing is read any more."""
    offer, transfer = await scene.in_flight()
    (number,) = inside.unanswered(scene.b.worker)
    path = scene.a.worker.card.endpoint.removeprefix("unix:")

    async def passes_on(reader, writer):
        answers, there = await asyncio.open_unix_connection(path)
        there.write(await reader.read(1 << 16))  # Hello
        writer.write(await answers.read(1 << 16))  # Welcome
        if agent := await reader.read(1 << 16):
            scene.streams.silence(scene.b.worker)  # it would come back at once, and the last one to come is believed
            there.write(agent + encode(Cancel(number)))
            await asyncio.sleep(0.05)
        there.close()
        writer.close()

    server = await asyncio.start_unix_server(passes_on, f"{path}.b")
    with contextlib.suppress(KvxferError, TimeoutError):
        async with asyncio.timeout(0.01):
            await inside.connect(scene.b.worker, f"unix:{path}.b")
    await withdrawn(scene, offer, transfer)
    server.close()


async def granted_with_the_request(scene):
    """What a fetch grants from the start may be written before any answer was heard."""
    transfer = scene.fetch("warm-up", [11, 12], timeout=0.02)
    await scene.failure(transfer)
    scene.network.hold("*")
    scene.offer()
    scene.streams.silence(scene.b.worker)
    transfer = scene.fetch(timeout=0.02)
    await scene.until(lambda: scene.network.held("*"))
    await scene.failure(transfer)
    await scene.land()


async def bytes_of_a_host_that_is_gone(scene):
    """The same, once what they were for has been given to others: the agent that they were sent to is no more."""
    _, transfer = await scene.in_flight()
    scene.silence()
    assert not isinstance(await scene.failure(transfer), MemoryInDoubtError)
    await scene.rebuilt(scene.b)
    await scene.land()


async def our_own_post_was_stuck(scene):
    """A post of ours was given up, and then our agent: what it was to read has been given to others."""
    offer, transfer = await scene.in_flight()
    ending = asyncio.create_task(scene.ending(offer))
    await scene.failure(transfer)
    if isinstance(await ending, MemoryInDoubtError):
        pytest.fail("it was in doubt to the end")
    await scene.rebuilt(scene.a)
    await scene.land()


async def our_own_post_is_stuck(scene):
    """A post of ours is given up: what it reads is nobody's to write."""
    scene.keep_agents()
    offer, transfer = await scene.in_flight()
    ending = asyncio.create_task(scene.ending(offer))
    await scene.failure(transfer)
    await ending
    await scene.land()


async def our_own_read_is_in_flight(scene):
    """Cancel says that nothing is read any more, so it waits for our own reads."""
    offer, transfer = await scene.in_flight()
    transfer.cancel()
    ending = asyncio.create_task(scene.ending(offer, withdraw=True))
    await asyncio.sleep(0.02)
    await scene.land()
    await scene.failure(transfer)
    assert isinstance(await ending, Withdrawn)


async def read_from_a_peer_that_is_no_more(scene):
    """What was read counts only when the peer has confirmed that it was held meanwhile."""
    _, transfer = await scene.in_flight()
    scene.streams.silence(scene.b.worker)
    scene.world.kill(scene.a)
    for memory in scene.a.cache.memory.values():
        memory.fill_(0)  # somebody else's by now
    await scene.land()
    await scene.failure(transfer)


async def a_post_fails_and_leaves_bytes_in_flight(scene):
    """Nobody hears of it before they have landed."""
    scene.network.break_next("*", after_bytes=100, lingers=True)
    scene.offer()
    transfer = scene.fetch()
    await scene.until(lambda: scene.network.held("*"))
    await asyncio.sleep(0.1)
    await scene.land()
    assert not isinstance(await scene.failure(transfer), MemoryInDoubtError)


async def its_process_ends_and_bytes_wait_for_this_side(scene):
    """As in a socket: they land long after the writer's end."""
    scene.network.need_target("*")
    offer = scene.offer()
    await scene.fetch()
    await offer.released()
    scene.a.books.released(IDS)
    scene.network.hold("*")
    scene.offer("s")
    transfer = scene.fetch("s")
    await scene.until(lambda: scene.network.held("*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Processes, "has_ended", lambda processes, peer: peer.name.startswith("a["))
        scene.streams.silence(scene.b.worker)
        scene.world.kill(scene.a)
        await scene.failure(transfer)
        await asyncio.sleep(1.0)
        await scene.land()


async def blocks_in_doubt(scene):
    """Blocks that a silent peer may still write are refused to everybody."""
    _, transfer = await scene.in_flight()
    scene.silence()
    assert isinstance(await scene.failure(transfer), MemoryInDoubtError)
    for use in (lambda: scene.fetch("other"), lambda: scene.b.worker.offer("other", INTO, tokens=8, after=READY)):
        with pytest.raises(BlocksError):
            use()


async def two_fetches_into_the_same_blocks(scene):
    """Blocks that a fetch writes are refused to another one."""
    _, transfer = await scene.in_flight()
    with pytest.raises(BlocksError):
        scene.fetch("other")
    transfer.cancel()
    await scene.failure(transfer)
    await scene.land()


async def cancelled_while_it_is_scattered(scene):
    """A fetch ends only when its own copies have."""
    _, transfer = await scene.in_flight()
    scene.network.release("*")
    while not inside.copies_own(scene.b.worker) and not transfer.done:  # noqa: ASYNC110 - to the very turn
        await asyncio.sleep(0)
    assert not transfer.done
    transfer.cancel()
    await scene.failure(transfer)
    await asyncio.sleep(0.05)


async def finished_while_bytes_are_in_flight(scene):
    """The offer is finished, and all is granted: for a success it must have arrived as well."""
    _, transfer = await scene.in_flight()
    await asyncio.sleep(0.01)
    assert not transfer.done
    scene.network.release("*")
    await transfer


# --- chunks that take turns in a ring


def streamed(scene, blocks=2):
    """An offer of which the first layer is ready, of so many blocks."""
    scene.a.books.take(IDS)
    scene.a.books.offered(IDS)
    offer = scene.a.worker.offer("r", streaming=True)
    offer.extend(IDS[:blocks], tokens=TOKENS[: 4 * blocks])
    offer.ready(layers=[0], after=READY)
    return offer


async def chunks_take_turns(scene):
    """Each goes where the one before it was, once that is where it belongs; for the first one that takes a while."""
    gate, offer = Gate(), streamed(scene)
    transfer = scene.fetch(after=gate)
    await scene.until(lambda: scene.network.log)
    await asyncio.sleep(0.01)
    offer.ready(layers=[1], after=READY)
    offer.finish(b"")
    await asyncio.sleep(0.01)
    gate.fired = True
    result = await transfer
    assert result.stats.chunks > 1


async def the_first_arrives(scene):
    """The first chunk of several has arrived and is where it belongs; the others are kept in flight."""
    scene.keep_agents()
    offer, transfer = await scene.in_flight()
    await scene.until(lambda: scene.network.held("*") == CHUNKS)
    scene.network.release("*", posts=1)
    await asyncio.sleep(0.01)
    return offer, transfer


async def a_ring_of_a_silent_peer(scene):
    """Places are in doubt, those that it may still write and no others."""
    _, transfer = await the_first_arrives(scene)
    scene.silence()
    await scene.failure(transfer)
    doubtful = extents(scene.b.worker, "receive", ExtentState.QUARANTINED)
    await scene.land()
    scene.clear()
    assert len(doubtful) == CHUNKS - 1


async def a_silent_peer_is_heard_late(scene):
    """It was given up as silent; then one more of its chunks is said to have arrived, and the rest is in flight."""
    _, transfer = await the_first_arrives(scene)
    scene.streams.silence(scene.b.worker)
    scene.network.release("*", posts=1)
    await asyncio.sleep(0.01)
    transfer.cancel()
    await scene.failure(transfer)
    scene.streams.heal()
    await asyncio.sleep(2 * scene.b.worker.config.revoke_timeout)
    await scene.land()


async def several_posts_are_stuck(scene):
    """They are given up together, and one of them ends long before the others do."""
    scene.keep_agents()
    offer, transfer = await scene.in_flight()
    await scene.until(lambda: scene.network.held("*") == CHUNKS)
    ending = asyncio.create_task(scene.ending(offer))
    await scene.failure(transfer)
    await ending
    scene.network.release("*", posts=1)
    await asyncio.sleep(0.1)
    await scene.land()


async def its_peer_is_said_to_be_gone(scene):
    """What was posted to it past its gate lands all the same."""
    scene.keep_agents()
    await meet(scene)
    _, transfer = await scene.in_flight()
    scene.network.disconnect("*")
    transfer.cancel()
    await scene.failure(transfer)
    scene.network.mend("*")
    await scene.land()


async def cancelled_before_it_is_scattered(scene):
    """The caller gives up while a chunk that has arrived waits until its blocks may be written."""
    gate = Gate()
    scene.offer()
    transfer = scene.fetch(after=gate)
    await scene.until(lambda: scene.network.log)
    await asyncio.sleep(0.01)
    transfer.cancel()
    await asyncio.sleep(2 * scene.b.worker.config.revoke_timeout)
    assert transfer.done
    assert transfer.memory_safe
    gate.fired = True
    await scene.failure(transfer)
    await asyncio.sleep(0.05)


async def a_ring_is_replaced(scene):
    """A stream begins in a place or two; by the time there are more, it is known how the rest would have gone there."""
    offer = streamed(scene, blocks=1)
    transfer = scene.fetch()
    await scene.until(lambda: scene.network.log)
    await asyncio.sleep(0.001)
    offer.extend(IDS[1:], tokens=TOKENS[4:])
    offer.ready(after=READY)
    offer.finish(b"")
    result = await transfer
    assert result.stats.chunks > 1


async def granted_long_before_it_arrives(scene):
    """What is in staging memory before that is not copied anywhere."""
    gate = Gate()
    scene.offer(after=gate)
    transfer = scene.fetch()
    await asyncio.sleep(0.01)
    gate.fired = True
    await asyncio.wait([transfer.outcome])
    scene.clear()
    await transfer


async def crooked_grant(scene, chunks, ring=(), copied=0):
    """The decode rank grants what it must not, behind its own back; what it names is memory that nobody else has."""
    (number,), (link,) = inside.unanswered(scene.b.worker), inside.sessions(scene.b.worker)
    scene.world.ledger.hands.asked(scene, link.peer.identity.incarnation)
    for place in to_places(ring):
        scene.world.ledger.hands.ahead(scene, [place])
    link.send(Reserve(number, chunks, 1000, 0, to_places(ring), copied))
    await asyncio.sleep(0.01)


async def refused(scene, transfer):
    """It was a mistake to grant this, which ends the session, and nothing was moved for it."""
    scene.network.release("*")
    await scene.failure(transfer)
    scene.world.ledger.hands.over(scene)


async def granted_another_ring_too_early(scene):
    """What was granted in one ring, and waits for memory here, does not go to another one."""
    everything = inside.take_all(scene.a.worker, "send")
    scene.network.hold("*")
    scene.offer()
    transfer = scene.fetch()
    await scene.until(lambda: len(extents(scene.b.worker, "receive", ExtentState.WRITING)) == 2)
    await asyncio.sleep(0.01)
    other = inside.take(scene.b.worker, "receive", 512)
    other.write()
    await crooked_grant(scene, 3, [other])
    everything.release()
    await asyncio.sleep(0.01)
    assert not scene.network.held("*"), "it was moved to another one"
    await refused(scene, transfer)
    other.release()


async def granted_what_was_not_announced(scene):
    """A chunk goes when it is ready, whatever was granted."""
    streamed(scene)
    transfer = scene.fetch()
    await scene.until(lambda: scene.network.log)
    await asyncio.sleep(0.01)
    moved, other = len(scene.network.log), inside.take(scene.b.worker, "receive", 512)
    other.write()
    await crooked_grant(scene, 3, [other], copied=2)
    assert len(scene.network.log) == moved, "it was moved before it was ready"
    await refused(scene, transfer)
    other.release()
