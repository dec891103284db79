"""Two hosts and a network that fails: every byte arrives or a typed error in time, and all works again once it is back.

A few scenes run always; `make network` runs every scene on every route.
"""

import asyncio
import importlib.util
import os

import pytest
from cable import HOSTS, Impairment
from wired import Pair

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed"),
    pytest.mark.timeout(180),
]

ROUTES = ["staged", "direct", "pull"]
LOST = Impairment(drop="all")
SHORT_SECONDS = 0.6
"""An outage that no time-out notices."""
FRAME_BYTES = 1500
CALLING = {"no_progress_timeout": 12.0}
"""Longer than the transport calls a host that does not answer."""


FULL = pytest.mark.skipif(os.environ.get("NETWORK_SCENES") != "all", reason="runs with `make network`")


def routes(*always):
    """Every route; those that are not named here only in a full run."""
    return pytest.mark.parametrize(
        "route", [route if route in always else pytest.param(route, marks=FULL) for route in ROUTES]
    )


@pytest.fixture
async def pair(hosts, route):
    """Two ranks that have met: the session and the lane are open. Their posts have patience with a network."""
    pair = await Pair(hosts, route).open(no_progress_timeout=60.0)
    before = await pair.crossed()
    await pair.succeeds("first")
    assert await pair.crossed() - before > pair.nbytes, "the bytes took another way than the cable"
    await pair.quiet()
    return pair


async def strike(pair, **impairments):
    """A fetch, in the middle of which frames begin to fare like this."""
    await pair.struck(**impairments)
    await pair.begin("r")
    await pair.burnt()


async def recovers(pair, *, quiet=True):
    """The network is back: fetches succeed, and what was in doubt comes back once a peer has answered."""
    await pair.succeeds_again("later", zone=1)
    await (pair.quiet() if quiet else pair.accounted())
    await pair.succeeds("last", zone=0 if quiet else 2)


@routes()
async def test_a_short_cut_is_ridden_out(pair):
    session = await pair.hosts.decode.session()
    await strike(pair, prefill=LOST, decode=LOST)
    await pair.hosts.cable.cut()
    await asyncio.sleep(SHORT_SECONDS)
    assert not await pair.hosts.decode.over("r")
    await pair.hosts.cable.mend()
    await pair.arrived("r")
    await recovers(pair)
    assert await pair.hosts.decode.session() == session


@routes("staged")
async def test_a_long_cut_fails_in_time(pair):
    session = await pair.hosts.decode.session()
    await strike(pair, prefill=LOST, decode=LOST)
    await pair.hosts.cable.cut()
    await pair.fails("r", within=pair.bounds["silent_peer"])
    await pair.hosts.cable.mend()
    await recovers(pair)
    assert await pair.hosts.decode.session() != session


@routes("staged")
async def test_a_host_that_goes_leaves_nothing_in_doubt(hosts, route):
    """While it is gone: what it may have under way cannot reach an agent that is no more."""
    pair = await Pair(hosts, route).open()
    await pair.succeeds("first")
    await pair.quiet()
    await strike(pair, prefill=LOST, decode=LOST)
    await pair.fails("r", within=max(pair.bounds["silent_peer"], pair.bounds["stuck_link"]))
    await pair.quiet()
    rebuilt = [await host.rebuilt() for host in (hosts.prefill, hosts.decode)]
    assert any(rebuilt), "something else has ended it"
    await hosts.cable.mend()
    await recovers(pair)


@routes("direct")
@pytest.mark.parametrize("how", [pytest.param("timed out", marks=FULL), "cancelled"])
async def test_fetches_that_are_given_up_at_any_moment_end_at_once(pair, how):
    """Whatever the other host may be writing by then: this side helps it to end that."""
    usual, tries = await pair.succeeds("usual"), 8
    for number in range(tries):
        request, moment = f"r{number}", usual * (number + 1) / tries
        await pair.begin(request, timeout=moment if how == "timed out" else None)
        if how == "cancelled":
            await asyncio.sleep(moment)
            await pair.hosts.decode.cancel(request)
        outcome = await pair.hosts.decode.outcome(request)
        assert outcome["safe"], outcome
    await pair.quiet()
    await pair.succeeds("last")


@routes()
@pytest.mark.parametrize("way", HOSTS)
async def test_a_partition_one_way_fails_in_time(pair, way):
    await strike(pair, **{way: LOST})
    await pair.fails("r", within=pair.bounds["silent_peer"])
    await pair.hosts.cable.mend()
    await recovers(pair)


@routes("staged")
async def test_one_frame_in_a_hundred_is_lost(pair):
    rain = Impairment(loss=0.01)
    await pair.hosts.cable.impair(prefill=rain, decode=rain)
    for number in range(3):
        await pair.succeeds(f"r{number}")
    assert (await pair.hosts.cable.carried())["prefill"][1] > pair.nbytes // FRAME_BYTES // 100
    await pair.quiet()


@routes()
async def test_every_frame_takes_fifty_milliseconds(pair):
    slow = Impairment(delay=0.05)
    await pair.hosts.cable.impair(prefill=slow, decode=slow)
    for number in range(3):
        assert await pair.succeeds(f"r{number}") > 4 * slow.delay  # ask and write, there and back
    await pair.quiet()


@routes("direct")
async def test_a_firewall_that_lets_only_control_streams_pass(hosts, route):
    wall = Impairment(drop="bulk")
    await hosts.cable.impair(prefill=wall, decode=wall)
    pair = await Pair(hosts, route).open(**CALLING)
    await pair.begin("r")
    await pair.fails("r", within=pair.bounds["stuck_link"])
    session = await hosts.decode.session()
    await hosts.cable.mend()
    await recovers(pair, quiet=False)
    assert await hosts.decode.session() == session


@routes()
async def test_a_firewall_that_comes_down_on_the_transport(hosts, route):
    pair = await Pair(hosts, route).open()
    await pair.succeeds("first")
    session = await hosts.decode.session()
    wall = Impairment(drop="bulk")
    await strike(pair, prefill=wall, decode=wall)
    await pair.fails("r", within=pair.bounds["stuck_link"])
    await hosts.cable.mend()
    await pair.resumed()
    await recovers(pair, quiet=False)
    assert await hosts.decode.session() == session


@routes("pull")
async def test_a_firewall_that_comes_down_on_control_streams(pair):
    wall = Impairment(drop="control")
    await strike(pair, prefill=wall, decode=wall)
    await pair.fails("r", within=pair.bounds["silent_peer"])
    await pair.hosts.cable.mend()
    await recovers(pair)


@routes()
async def test_a_firewall_that_stops_the_other_side(hosts, route):
    await hosts.cable.impair(**{"prefill" if route == "pull" else "decode": Impairment(drop="bulk_syn")})
    pair = await Pair(hosts, route).open(**CALLING)
    if route != "staged":  # its agents call each other: the one that is written to says when a place is free again
        await pair.succeeds("r")
        return
    await pair.begin("r")
    await pair.fails("r", within=pair.bounds["stuck_link"])
    await hosts.cable.mend()
    await pair.resumed()
    await recovers(pair, quiet=False)


@routes()
async def test_a_firewall_that_stops_whoever_moves_the_bytes(hosts, route):
    mover = "decode" if route == "pull" else "prefill"
    await hosts.cable.impair(**{mover: Impairment(drop="bulk_syn")})
    pair = await Pair(hosts, route).open(**CALLING)
    await pair.begin("r")
    await pair.fails("r", within=pair.bounds["stuck_link"])
    await hosts.cable.mend()
    await recovers(pair, quiet=False)
