"""Claims by themselves, in virtual time: who is told what and how often, whatever comes and goes."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.decode.role import Claims
from kvxfer.errors import IdentityError, UnreachableError
from kvxfer.protocol.messages import MAX_TICKETS
from kvxfer.site import Tasks
from kvxfer.testing import simulate
from kvxfer.tickets import Ticket

HEARTBEAT = 2.0


class Link:
    def __init__(self, peers, endpoint, heartbeat):
        self.peers, self.endpoint, self.heartbeat, self.is_open = peers, endpoint, heartbeat, True

    def send(self, message):
        if self.peers.failures:
            raise self.peers.failures.pop()
        names = [ref.request for ref in message.tickets]
        assert self.is_open
        self.peers.told.append((self.peers.now(), self.endpoint, names))


class Peers:
    """Prefill ranks: those in `away` raise what is said there, and others are reached after `seconds`."""

    def __init__(self, now):
        self.now, self.links, self.away, self.told, self.failures = now, {}, {}, [], []
        self.seconds, self.names, self.tried, self.heartbeat = 0.0, {}, [], HEARTBEAT
        self.connecting, self.most, self.timers = 0, 0, []

    def known(self, endpoint, epoch):
        link = self.links.get(endpoint)
        return link if link is not None and link.is_open else None

    async def link(self, endpoint, epoch):
        self.tried.append((self.now(), endpoint))
        self.connecting += 1
        self.most = max(self.most, self.connecting)
        try:
            await asyncio.sleep(self.seconds)
            if endpoint in self.away:
                raise self.away[endpoint]
        finally:
            self.connecting -= 1
        at = self.names.get(endpoint, endpoint)
        return self.known(at, epoch) or self.links.setdefault(at, Link(self, at, self.heartbeat))

    def heard(self, request, endpoint="unix:/e0"):
        return [when for when, where, names in self.told if where == endpoint and request in names]


def play(scenario, *, heartbeat=HEARTBEAT):
    async def main(runtime):
        def at(when, callback):
            peers.timers.append(runtime.loop.call_later(max(0.0, when - runtime.now()), callback))
            return peers.timers[-1]

        peers: Any = Peers(runtime.now)
        config = SimpleNamespace(heartbeat=heartbeat)
        site: Any = SimpleNamespace(config=config, loop=runtime.loop, now=runtime.now, call_at=at, tasks=Tasks())
        await scenario(Claims(site, peers), peers)

    simulate(main)


def ticket(request, world=1, prefix="unix:/e"):
    endpoints = {"prefix": prefix, "first": 0}
    fields = {"v": 1, "engine": "e", "world": world, "epoch": "ab" * 16, "mac": "cd" * 16}
    return Ticket.parse({**fields, "endpoints": endpoints, "request": request})


def test_more_claims_than_a_frame_holds_are_all_said_and_renewed():
    async def scenario(claims, peers):
        names = [f"r{n}" for n in range(2 * MAX_TICKETS + 1)]
        for name in names:
            claims.add(ticket(name))
        await asyncio.sleep(1.5 * HEARTBEAT)
        assert [len(said) for _, _, said in peers.told] == 2 * [MAX_TICKETS, MAX_TICKETS, 1]
        assert {name for _, _, said in peers.told[3:] for name in said} == set(names)

    play(scenario)


def test_what_is_claimed_no_more_as_the_turn_ends_is_not_said():
    """To say it would take the request over from another engine."""

    async def scenario(claims, peers):
        await peers.link("unix:/e0", b"")
        claims.add(ticket("r"))()
        claims.add(ticket("s"))
        await asyncio.sleep(10 * HEARTBEAT)
        assert not peers.heard("r")
        assert peers.heard("s")

    play(scenario)


def test_a_rank_that_is_away_is_tried_by_one_task_once_a_second(caplog):
    async def scenario(claims, peers):
        peers.seconds, peers.away = 0.5, {"unix:/e0": UnreachableError("away")}
        for n in range(200):
            claims.add(ticket(f"r{n}"))
            await asyncio.sleep(0.1)
        before = len(peers.tried)
        await asyncio.sleep(30)
        assert len(peers.tried) - before == 20
        assert peers.most == 1

    play(scenario, heartbeat=60.0)
    assert sum("claim_not_sent" in record.getMessage() for record in caplog.records) == 1


def away_for(seconds):
    error = UnreachableError("away")
    error.retry_after = seconds
    return error


@pytest.mark.parametrize(
    ("error", "times", "first"),
    [(UnreachableError("away"), 600, 1), (IdentityError("another"), 6 + 9, 1), (away_for(10.0), 60, 10)],
    ids=["away", "no", "it says when"],
)
def test_who_answers_and_is_another_is_asked_less_and_less_often_and_who_says_when_at_that_time(error, times, first):
    """Not at once: a rank that has yet to join its engine is another until then."""

    async def scenario(claims, peers):
        peers.away = {"unix:/e0": error}
        claims.add(ticket("r"))
        await asyncio.sleep(600)
        assert len(peers.tried) == pytest.approx(times, abs=1)
        assert peers.tried[1][0] - peers.tried[0][0] == pytest.approx(first, abs=0.01)

    play(scenario, heartbeat=60.0)


def test_a_rank_with_a_second_name_is_connected_once():
    async def scenario(claims, peers):
        peers.names["unix:/e0"] = "unix:/first-name"
        claims.add(ticket("r"))
        await asyncio.sleep(10.5 * HEARTBEAT)
        assert len(peers.tried) == 1
        assert len(peers.heard("r", "unix:/first-name")) == 11

    play(scenario)


def test_what_nobody_foresaw_at_one_rank_keeps_nothing_from_others(monkeypatch):
    async def scenario(claims, peers):
        for rank in range(3):
            await peers.link(f"unix:/e{rank}", b"")
        unforeseen = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unforeseen.append(context["exception"]))
        peers.failures.append(OSError("no more memory"))
        claims.add(ticket("r", world=3))
        await asyncio.sleep(0.1)
        assert [len(peers.heard("r", f"unix:/e{rank}")) for rank in range(3)] == [0, 1, 1]
        await asyncio.sleep(HEARTBEAT)
        assert [len(peers.heard("r", f"unix:/e{rank}")) for rank in range(3)] == [1, 2, 2]
        assert len(unforeseen) == 1

    play(scenario)


def test_many_ranks_are_told_in_several_turns_of_the_loop():
    async def scenario(claims, peers):
        for rank in range(2000):
            peers.links[f"unix:/e{rank}"] = Link(peers, f"unix:/e{rank}", HEARTBEAT)
        claims.add(ticket("r", world=2000))
        told = []
        while len(peers.told) < 2000:
            await asyncio.sleep(0)
            told.append(len(peers.told))
        assert max(after - before for before, after in zip([0, *told], told, strict=False)) <= 512
        assert len({where for _, where, _ in peers.told}) == 2000

    play(scenario)


@pytest.mark.parametrize("seed", range(25))
def test_whatever_comes_and_goes_is_renewed_in_time_and_forgotten(seed):
    async def scenario(claims, peers):
        rng, now, kept, since = random.Random(seed), peers.now, {}, {f"unix:/e{n}": 0.0 for n in range(3)}
        peers.heartbeat = rng.choice([0.1, 0.5, HEARTBEAT])
        for _ in range(60):
            name, rank = f"r{rng.randrange(4)}", f"unix:/e{rng.randrange(3)}"
            match rng.choice(["claim", "close", "drop", "away", "back", "fetch"]):
                case "claim":
                    _, handles = kept.setdefault(name, (now(), []))
                    handles.append(claims.add(ticket(name, world=3)))
                case "close" if name in kept:
                    kept[name][1].pop()()
                    if not kept[name][1]:
                        del kept[name]
                case "drop":
                    claims.remove(ticket(name).key)
                    kept.pop(name, None)
                case "away" if rank not in peers.away:
                    peers.away[rank] = rng.choice([UnreachableError("away"), OSError("no more descriptors")])
                    if rank in peers.links:
                        peers.links.pop(rank).is_open = False
                case "back":
                    since[rank] = max(since[rank], now() if peers.away.pop(rank, None) else 0.0)
                case "fetch" if rank not in peers.away:
                    await peers.link(rank, b"")
            peers.seconds = rng.choice([0.0, 0.0, 0.1])
            await asyncio.sleep(rng.choice([0, 0, 0.01, 0.3, 1, 5]))
            assert len(claims) == len(kept)
            assert peers.most <= 4  # a task for each rank, and ours
            for request, (claimed, _) in kept.items():
                for rank, back in since.items():
                    if rank not in peers.away and now() > max(claimed, back) + peers.heartbeat + HEARTBEAT + 0.3:
                        assert now() - peers.heard(request, rank)[-1] <= peers.heartbeat + 0.2
        for name in list(kept):
            claims.remove(ticket(name).key)
        await asyncio.sleep(2 * HEARTBEAT)
        assert not claims._engines

    play(scenario)
