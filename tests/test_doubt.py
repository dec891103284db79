"""What is in doubt: how often evidence is looked for, and whether an empty gate tells of all that was granted."""

import asyncio
import sys
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.protocol.messages import Route
from kvxfer.safety.doubt import Exposure
from kvxfer.safety.fence import SHARED_GATE, Revoked
from kvxfer.site import Rebuilds, Tasks
from kvxfer.testing import simulate

# --- how often it is looked for: while looking may find some, and not otherwise


OWN = SHARED_GATE + 1


class Looked:
    """A worker whose gates and processes count how often they are looked at."""

    def __init__(self, *, found=None, inside=0, process=False, survived=False):
        self.loop = asyncio.get_running_loop()
        self.closing = self.loop.create_future()
        self.lookouts = Tasks()
        self.geometry = SimpleNamespace(kind="cpu")
        self.rebuilds = Rebuilds(self.loop.time, self.loop)
        self.gates = self.processes = self
        self.process = self.loop.create_future() if process else None
        self.looks = 0
        self._found, self._inside, self._survived = found, inside, survived

    async def revoke(self, number):
        self.looks += 1
        found, self._found = self._found, self._found and Revoked.IDLE  # who died in it is seen once
        return found

    async def writers_inside(self, number):
        self.looks += 1
        return self._inside

    def retire(self, number):
        pass

    give_back = retire

    def hold(self, peer):
        return lambda: None

    def end_of(self, peer):
        self.looks += 1
        return self.process

    def has_ended(self, peer):
        return self.process is not None and self.process.done() and not self._survived


class Doubt(Exposure):
    """Something in doubt, and what has ended that."""

    why: str = ""

    def on_evidence(self, why):
        self.why = why
        super().on_evidence(why)


def look_after(site, *, gate=OWN, fenced=True, ends_with_process=True, staging=()):
    """Something in doubt, for whose end evidence is looked for from now on."""
    peer = SimpleNamespace(body=SimpleNamespace(staging=staging, host=""), name="p")
    routes = [Route.MAPPED if ends_with_process else Route.DIRECT]
    link: Any = SimpleNamespace(peer=peer, renewals=0)
    doubt = Doubt(site, link, "look", routes=routes, gate=gate, fenced=fenced)
    doubt.seek()
    return doubt


def hour(ending, *, doubt=None, **found):
    """Looks in an hour of doubt, and what was evidence in the end if `ending(site, doubt)` comes then."""

    async def scenario(runtime):
        site = Looked(**found)
        one = look_after(site, **doubt or {})
        await asyncio.sleep(3600)
        looks = site.looks
        ending(site, one)
        assert await site.lookouts.drain(5)
        return looks, one.why

    return simulate(scenario)


def closes(site, _):
    site.closing.set_result(None)


def dies(site, _):
    site.process.set_result(None)


def answers(_, doubt):
    doubt.end()


@pytest.mark.parametrize("ending", [closes, dies, answers])
@pytest.mark.parametrize("doubt", [{"fenced": False}, {"gate": SHARED_GATE}])
def test_where_only_the_end_of_a_process_can_show_nobody_looks(doubt, ending):
    looks, why = hour(ending, doubt=doubt, process=True)
    assert looks <= 3
    assert why == ("its process has ended" if ending is dies else "")


@pytest.mark.parametrize("ending", [closes, answers])
@pytest.mark.parametrize("found", [None, Revoked.DIED])
def test_where_nothing_can_show_nobody_looks(found, ending):
    """A peer on another host; or one that died in its gate, and what it had left to a socket may still land."""
    looks, why = hour(ending, doubt={"fenced": found is not None, "ends_with_process": False}, found=found)
    assert looks <= 3
    assert not why


@pytest.mark.parametrize("found", [{"found": None}, {"found": Revoked.IDLE, "inside": 1}])
def test_a_gate_that_somebody_is_in_is_looked_at_once_a_second(found):
    looks, why = hour(closes, process=True, **found)
    assert 3600 <= looks < 5 * 3600
    assert not why


@pytest.mark.parametrize(
    ("kind", "staging", "ends"), [("cpu", "DRAM", True), ("cuda", "DRAM", False), ("cpu", "VRAM", False)]
)
def test_who_died_in_a_gate_may_have_left_work_to_a_gpu(kind, staging, ends):
    async def scenario(runtime):
        site = Looked(found=Revoked.DIED)
        site.geometry.kind = kind
        doubt = look_after(site, staging=[SimpleNamespace(kind=staging)])
        await asyncio.sleep(10)
        doubt.end()
        assert await site.lookouts.drain(5)
        return bool(doubt.why)

    assert simulate(scenario) is ends


def test_of_a_process_that_ended_and_left_something_nothing_more_is_awaited():
    async def scenario(runtime):
        site = Looked(found=Revoked.DIED, inside=1, process=True, survived=True)
        doubt = look_after(site)
        dies(site, doubt)
        await asyncio.sleep(3600)
        looks = site.looks
        closes(site, doubt)
        assert await site.lookouts.drain(5)
        assert not doubt.why
        return looks

    assert simulate(scenario) < 10


def test_what_a_peer_says_again_has_nobody_look_again():
    async def scenario(runtime):
        site = Looked(process=True)
        doubt = look_after(site)
        await asyncio.sleep(60)
        looks = site.looks
        for _ in range(100):
            doubt.on_renewals(1)
            doubt.on_in_doubt()
            await asyncio.sleep(0.001)
        doubt.end()
        assert await site.lookouts.drain(5)
        return site.looks - looks

    assert simulate(scenario) <= 4


def test_that_a_peer_knows_no_more_is_said_though_the_agent_is_wanted_already(monkeypatch):
    monkeypatch.setattr("kvxfer.safety.doubt.severed", lambda site, peer: True)

    async def scenario(runtime):
        site = Looked()
        doubt = look_after(site, fenced=False)
        doubt.on_in_doubt()
        doubt.on_renewals(sys.maxsize)  # as often as at the last grant
        await asyncio.sleep(1)
        assert [want.answered for want in site.rebuilds.requests] == [False]
        doubt.on_renewals(sys.maxsize + 1)
        await asyncio.sleep(1)
        assert [want.answered for want in site.rebuilds.requests] == [True]
        doubt.end()
        await asyncio.sleep(1)
        assert not list(site.rebuilds.requests)

    simulate(scenario)


# --- whether an empty gate tells of all that a peer was granted


def exposed(**gates):
    """To a peer that passes words in memory of a GPU."""
    site = SimpleNamespace(
        gates=SimpleNamespace(words=1 << 20, **gates), fenced={}, loop=SimpleNamespace(create_future=Future)
    )
    link = SimpleNamespace(peer=SimpleNamespace(identity=SimpleNamespace(incarnation=b"p")), renewals=0)
    return Exposure(site, link, "x", lambda: None, frozenset())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("granted", "fenced"),
    [([], False), ([7], True), ([7, 7], True), ([0], False), ([7, 0], False), ([0, 7], False), ([0, None, 7], True)],
)
def test_one_grant_that_names_no_gate_is_enough_for_it_to_tell_nothing(granted, fenced):
    """None: the peer has said that it does not use what it was granted so far."""
    generations = iter([one for one in granted if one is not None])
    exposure = exposed(allot=lambda: 5, granted=lambda gate: next(generations))
    for one in granted:
        if one is None:
            exposure.void()
        else:
            assert exposure.grant(mapped=True) == one
    assert bool(exposure.fenced) is fenced


def test_it_leads_through_one_gate_though_another_becomes_free():
    """All were taken when it was granted first: an empty gate would say nothing of who passes the shared one."""
    free = iter([SHARED_GATE, 5])
    exposure = exposed(allot=lambda: next(free), granted=lambda gate: gate << 32 | 1)
    assert [exposure.grant(mapped=True) >> 32 for _ in range(2)] == [SHARED_GATE, SHARED_GATE]
    exposure.void()
    assert exposure.grant(mapped=True) >> 32 == 5
