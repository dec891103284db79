"""Peers that come as somebody else each time: what they leave behind does not grow with their number."""

import asyncio
import gc
import os
import weakref
from collections import Counter
from dataclasses import replace

import inside
import pytest
from msgspec import structs
from stage import Cache, Copied, eventually

from kvxfer import Code, ProtocolError, RefusedError, TransferFailedError, UnreachableError
from kvxfer.names import MAX_WORLD
from kvxfer.prefill import role as doubts
from kvxfer.protocol.messages import Cancel, Fetch, Refuse, Route, Span, Status
from kvxfer.protocol.session import Role
from kvxfer.tickets import Ticket

MANY = 3000


class Stranger:
    """A link to a peer as it was met once, now of another incarnation and engine."""

    role, trusted, is_open = Role.SERVER, True, True
    renewals = 0

    def __init__(self, peer, number):
        name = number.to_bytes(16, "big")
        self.peer = replace(peer, identity=replace(peer.identity, incarnation=name, epoch=name))
        self.heard, self.moved = [], Counter()

    def send(self, *messages, soon=False):
        self.heard += messages
        return True

    @property
    def refused(self):
        """Whether it was told that there is no room for it."""
        return any(isinstance(one, Refuse) and one.code is Code.TOO_MANY for one in self.heard)


async def met(stage, **config):
    """Two workers that know each other, and the decode rank as the prefill rank sees it."""
    prefill, decode = await stage.pair(Cache(), Cache(layout="HND"), **config)
    offer = prefill.offer("met", [1], tokens=4)
    await decode.fetch(prefill.engine.ticket("met"), [1], tokens=range(4))
    await offer.released()
    return prefill, decode, inside.met(prefill)


def kept(prefill):
    """How many transfers it knows to be in doubt, and how many places are taken."""
    seen = prefill.describe()
    return seen["sent_in_doubt"], seen["places"]


async def test_lists_of_fetches_that_wait_are_bounded(stage, monkeypatch):
    """Whoever has one ticket can send 16 MiB of them in each of many fetches, and they are kept."""
    prefill, _, peer = await met(stage)
    monkeypatch.setattr(doubts, "_FEW_BYTES", 100)
    monkeypatch.setattr(doubts, "_MANY_BYTES", 1000)
    ref, link = Ticket.parse(prefill.engine.ticket("r")).ref(), Stranger(peer, 1)

    def is_refused(number, nbytes):
        span = Span("default", 0, bytes(nbytes))
        inside.hear(prefill, link, Fetch(number, ref, [], [span], 0, 1, [Route.PULL], 1, 1000))
        return Refuse in map(type, link.heard) and link.heard.pop().code is Code.TOO_MANY

    assert [is_refused(number, 400) for number in range(4)] == [False, False, True, True]
    assert not is_refused(4, 100), "others are served"
    inside.hear(prefill, link, Cancel(0))
    assert not is_refused(5, 400)


async def test_transfers_in_doubt_keep_their_places_until_the_peer_has_died(stage, monkeypatch):
    """Nobody else could ask what became of them; and whoever leaves many gets no more."""
    prefill, _, peer = await met(stage, max_transfers=64)
    processes = {}
    future = asyncio.get_running_loop().create_future
    inside.doubt_all(monkeypatch)
    monkeypatch.setattr(
        "kvxfer.safety.processes.Processes.end_of",
        lambda _, peer: processes.setdefault(peer.identity.incarnation, future()),
    )
    ref, refused = Ticket.parse(prefill.engine.ticket("r")).ref(), 0
    for number in range(MANY):
        link = Stranger(peer, number)
        inside.hear(prefill, link, Fetch(number, ref, [], [], 0, 1, [Route.PULL], 1, 1000))
        refused += link.refused
        inside.lose(prefill, link)
    assert (*kept(prefill), len(processes), refused) == (64, 64, 64, MANY - 64)
    for process in processes.values():
        process.set_result(None)
    await eventually(lambda: kept(prefill) == (0, 0))


async def test_a_lost_peer_whose_post_is_given_up_later_is_forgotten_when_its_process_ends(stage, monkeypatch):
    """Its process is watched until then, though no link leads there any more."""
    process = await asyncio.create_subprocess_exec("sleep", "60")
    monkeypatch.setattr("kvxfer.safety.processes._by_locks", lambda _: os.pidfd_open(process.pid))
    prefill, decode, _ = await met(stage, route="direct", no_progress_timeout=0.5)
    await stage.in_flight(prefill, decode)
    inside.vanish(prefill)
    await eventually(lambda: kept(prefill) == (1, 1))
    process.kill()
    await process.wait()
    await eventually(lambda: kept(prefill) == (0, 0))
    assert "processes" not in inside.kept_of_the_gone(prefill)


async def test_the_places_of_a_lost_peer_whose_end_nobody_sees_are_for_others_and_its_numbers_are_kept(
    stage, monkeypatch
):
    """Whether a peer on another host will ever come back, and ask, cannot be known."""
    prefill, _, peer = await met(stage, max_transfers=64)
    ref = Ticket.parse(prefill.engine.ticket("r")).ref()
    inside.doubt_all(monkeypatch)
    monkeypatch.setattr(doubts, "_MOST", 1000)
    links = [Stranger(peer, number) for number in range(MANY)]
    for number, link in enumerate(links):
        inside.welcome(prefill, link)
        inside.hear(prefill, link, Fetch(number, ref, [], [], 0, 1, [Route.DIRECT], 1, 1000))
        inside.lose(prefill, link)
    assert [link.refused for link in links] == [False] * 1064 + [True] * (MANY - 1064)
    assert kept(prefill) == (1064, 64)
    for number in (0, 1063, 1064):
        inside.hear(prefill, links[number], Cancel(number))
    said = [links[number].heard[-1].status for number in (0, 1063, 1064)]
    assert said == [Status.IN_DOUBT, Status.IN_DOUBT, Status.CANCELLED]
    with pytest.raises(ProtocolError, match="under way already"):
        inside.hear(prefill, links[0], Fetch(0, ref, [], [], 0, 1, [Route.DIRECT], 1, 1000))


async def test_who_says_to_be_reached_as_another_is_cuts_nobody_off_by_leaving(stage):
    """Whoever has met a rank knows how it is reached."""
    prefill = await stage.worker("prefill", Cache(), route="staged")
    honest = await stage.worker("honest", Cache(), route="staged")
    liar = await stage.worker("liar", Cache(), route="staged")
    metadata = inside.told(honest).metadata
    inside.tell(liar, lambda body: structs.replace(body, metadata=metadata))
    await stage.bring(prefill, honest, "before")
    with pytest.raises(TransferFailedError, match="outside of what honest"):
        await stage.bring(prefill, liar, "of a liar")
    copied = Copied(stage.caches[honest]).bring(stage.caches[prefill], [1, 2], [5, 6], range(8))
    _, transfer = await stage.in_flight(prefill, honest, "honest", into=(5, 6))
    await liar.aclose(drain=False)
    await eventually(lambda: prefill.describe()["fabric"]["lanes"] == 1)
    stage.network.release("honest")
    await transfer
    copied.check()
    await honest.aclose(drain=False)
    await eventually(lambda: not prefill.describe()["fabric"]["agents"])


async def test_few_engines_take_an_offer_from_each_other(stage):
    prefill, decode, peer = await met(stage)
    offer = prefill.offer("r", [1], tokens=4)
    for number in range(MANY):
        inside.renew(prefill, offer, Stranger(peer, number).peer.identity.epoch)
    assert len(inside.entry(offer).superseded) == 16
    bound = inside.entry(offer).engine
    with pytest.raises(RefusedError, match="decode engines have lost this request") as caught:
        await decode.fetch(prefill.engine.ticket("r"), [1], tokens=range(4))
    assert caught.value.reason is Code.TOO_MANY
    assert inside.entry(offer).engine == bound
    await offer.withdraw()


async def test_fetches_of_few_engines_wait_for_an_offer_in_vain(stage):
    prefill, _, peer = await met(stage)
    ref, links = Ticket.parse(prefill.engine.ticket("r")).ref(), [Stranger(peer, number) for number in range(40)]
    for number, link in enumerate(links):
        inside.hear(prefill, link, Fetch(number, ref, [], [], 0, 1, [Route.PULL], 1, 1000))
    offer = prefill.offer("r", [1], tokens=4)
    assert len(inside.entry(offer).superseded) == 16
    assert [link for link in links if link.refused] == links[17:]
    await offer.withdraw()


async def test_the_ranks_of_an_engine_that_never_ends_are_counted_to_a_bound(stage):
    prefill, _, peer = await met(stage)
    offer = prefill.offer("r", [1], tokens=4)
    for rank in range(MAX_WORLD + MANY):
        inside.release(prefill, offer, replace(peer.identity, rank=rank, world=0xFFFF_FFFF))
    assert len(inside.entry(offer).engine.released) == MAX_WORLD
    await offer.withdraw()


class Held:
    """What the caller of a fetch has in its frames."""


async def test_who_cannot_be_reached_keeps_no_frame_alive(stage):
    """An error that is kept must not keep the tensors of whoever it was raised to."""
    _, decode, _ = await met(stage)
    frames = []

    async def connect(endpoint):
        held = Held()
        frames.append(weakref.ref(held))
        raise UnreachableError("nobody answers there", peer=endpoint)

    async def reach(peers):
        held = Held()
        frames.append(weakref.ref(held))
        with pytest.raises(UnreachableError, match="nobody answers there"):
            await peers.link("unix:/nowhere", None)

    peers = inside.peers_by(decode, connect)
    await reach(peers)
    await reach(peers)  # the same again, at once
    assert list(peers.unreachable) == ["unix:/nowhere"]
    assert len(frames) == 3

    def alive():
        gc.collect()
        return [frame() for frame in frames if frame() is not None]

    await eventually(lambda: not alive())  # the loop itself holds the last one for a turn


async def test_an_engine_that_is_lost_as_an_offer_comes_does_not_take_it_back(stage, monkeypatch):
    """It waits twice; the other engine takes the offer from its first fetch, and hearing so is more than it reads."""
    prefill, _, peer = await met(stage)
    ref = Ticket.parse(prefill.engine.ticket("r")).ref()
    lost, other = Stranger(peer, 1), Stranger(peer, 2)
    monkeypatch.setattr(lost, "send", lambda *_, **__: inside.lose(prefill, lost))
    for number, link in enumerate([lost, other, lost]):
        inside.hear(prefill, link, Fetch(number, ref, [], [], 0, 1, [Route.PULL], 1, 1000))
    offer = prefill.offer("r", [1], tokens=4)
    entry = inside.entry(offer)
    assert (entry.engine.epoch, [one.link for one in entry.transfers]) == (other.peer.identity.epoch, [other])
    await offer.withdraw()
