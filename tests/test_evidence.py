"""How often evidence is looked for: while looking may find some, and not otherwise."""

import asyncio
from functools import cached_property
from types import SimpleNamespace

import pytest

from kvxfer.safety.doubt import seek
from kvxfer.safety.fence import SHARED_GATE, Revoked
from kvxfer.site import Rebuilds, Tasks
from kvxfer.testing import simulate

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
        return self._found

    async def writers_inside(self, number):
        self.looks += 1
        return self._inside

    def retire(self, number):
        pass

    def hold(self, peer):
        return lambda: None

    def end_of(self, peer):
        self.looks += 1
        return self.process

    def has_ended(self, peer):
        return self.process is not None and self.process.done() and not self._survived


class Doubt:
    """Something in doubt."""

    def __init__(self, *, gate=OWN, fenced=True, ends_with_process=True):
        self.link = SimpleNamespace(peer=SimpleNamespace(body=SimpleNamespace(staging=[], host="")))
        self.gate, self.fenced, self.ends_with_process, self.in_doubt = gate, fenced, ends_with_process, True
        self.why = ""

    @cached_property
    def ended_with_agent(self):
        return asyncio.get_running_loop().create_future()

    def on_evidence(self, why):
        self.why = why


def hour(doubt, ending, **found):
    """Looks in an hour of doubt, and its reason if `ending(site, found)` ends it then."""

    async def scenario(runtime):
        site = Looked(**found)
        over = seek(site, doubt, "look")  # pyright: ignore[reportArgumentType]
        await asyncio.sleep(3600)
        looks = site.looks
        ending(site, over)
        assert await site.lookouts.drain(5)
        return looks

    return simulate(scenario)


def closes(site, over):
    site.closing.set_result(None)


def dies(site, over):
    site.process.set_result(None)


def answers(site, over):
    over()


@pytest.mark.parametrize("ending", [closes, dies, answers])
@pytest.mark.parametrize("doubt", [{"fenced": False}, {"gate": SHARED_GATE}])
def test_where_only_the_end_of_a_process_can_show_nobody_looks(doubt, ending):
    one = Doubt(**doubt)
    assert hour(one, ending, process=True) <= 3
    assert one.why == ("its process has ended" if ending is dies else "")


@pytest.mark.parametrize("ending", [closes, answers])
@pytest.mark.parametrize("found", [None, Revoked.DIED])
def test_where_nothing_can_show_nobody_looks(found, ending):
    """A peer on another host; or one that died in its gate, and what it had left to a socket may still land."""
    one = Doubt(fenced=found is not None, ends_with_process=False)
    assert hour(one, ending, found=found) <= 3
    assert not one.why


@pytest.mark.parametrize("found", [{"found": None}, {"found": Revoked.IDLE, "inside": 1}])
def test_a_gate_that_somebody_is_in_is_looked_at_once_a_second(found):
    one = Doubt()
    assert 3600 <= hour(one, closes, process=True, **found) < 5 * 3600
    assert not one.why


@pytest.mark.parametrize(
    ("kind", "staging", "ends"), [("cpu", "DRAM", True), ("cuda", "DRAM", False), ("cpu", "VRAM", False)]
)
def test_who_died_in_a_gate_may_have_left_work_to_a_gpu(kind, staging, ends):
    doubt = Doubt()
    doubt.link.peer.body.staging = [SimpleNamespace(kind=staging)]

    async def scenario(runtime):
        site = Looked(found=Revoked.DIED)
        site.geometry.kind = kind
        over = seek(site, doubt, "look")  # pyright: ignore[reportArgumentType]
        await asyncio.sleep(10)
        over()
        assert await site.lookouts.drain(5)

    simulate(scenario)
    assert bool(doubt.why) is ends


def test_of_a_process_that_ended_and_left_something_nothing_more_is_awaited():
    doubt = Doubt()

    async def scenario(runtime):
        site = Looked(found=Revoked.DIED, inside=1, process=True, survived=True)
        over = seek(site, doubt, "look")  # pyright: ignore[reportArgumentType]
        dies(site, over)
        await asyncio.sleep(3600)
        looks = site.looks
        closes(site, over)
        assert await site.lookouts.drain(5)
        return looks

    assert simulate(scenario) < 10
    assert not doubt.why


def test_that_a_peer_knows_no_more_is_said_though_the_agent_is_wanted_already(monkeypatch):
    monkeypatch.setattr("kvxfer.safety.doubt.severed", lambda site, peer: True)

    async def scenario(runtime):
        site, doubt = Looked(), Doubt(fenced=False)
        over = seek(site, doubt, "look")  # pyright: ignore[reportArgumentType]
        await asyncio.sleep(1)
        assert [want.answered for want in site.rebuilds.requests] == [False]
        doubt.ended_with_agent.set_result(None)
        await asyncio.sleep(1)
        assert [want.answered for want in site.rebuilds.requests] == [True]
        over()
        await asyncio.sleep(1)
        assert not list(site.rebuilds.requests)

    simulate(scenario)
