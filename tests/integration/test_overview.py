"""`describe`: what is said of sessions and transfers is what was seen; and it can be asked for from any thread."""

import pytest
from stage import Cache, eventually, quiet, written


def session(worker):
    (peer,) = worker.describe()["peers"]
    return peer


@pytest.mark.parametrize("route", ["staged", "direct", "pull", "mapped"])
async def test_a_session_says_what_was_moved_on_which_route(stage, route):
    mapped = route == "mapped"
    prefill, decode = await stage.pair(Cache(shared=mapped), Cache(shared=mapped), route=route)
    await stage.bring(prefill, decode)
    result, _ = await stage.bring(prefill, decode, "s")
    await quiet(prefill, decode)
    assert result.stats.bytes > 0
    for worker in (prefill, decode):
        seen = session(worker)
        assert seen["moved"] == {route: 2 * result.stats.bytes}
        assert seen["host"] == "this"
        assert seen["mapped"] == (["process"] if mapped else [])  # it is its own, on both sides
    assert session(prefill)["not_mapped"] == ""


async def test_a_transfer_that_waits_is_shown_on_both_sides_until_it_ends(stage):
    prefill, decode = await stage.pair(Cache(), Cache())
    transfer = decode.start_fetch(prefill.engine.ticket("r"), [3, 4], tokens=range(8), timeout=20)
    await eventually(lambda: prefill.describe()["transfers"])
    (here,), (there,) = decode.describe()["transfers"], prefill.describe()["transfers"]
    assert here["id"] == there["id"] == transfer.id
    assert (here["side"], there["side"]) == ("receive", "send")
    assert (here["request"], here["step"], here["route"], here["bytes"]) == ("r", "asking", "", 0)
    assert "prefill" in here["peers"][0]
    assert "decode" in there["peers"][0]
    assert 0 <= here["seconds"] < 20
    prefill.offer("r", [1, 2], tokens=8)
    await transfer
    await quiet(prefill, decode)
    assert prefill.describe()["transfers"] == decode.describe()["transfers"] == []


async def test_what_bounds_are_used_up_is_said(stage):
    prefill, decode = await stage.pair(Cache(), Cache(), route="direct")
    await stage.bring(prefill, decode)
    _, bringing = await stage.in_flight(prefill, decode, request="s")
    waiting = decode.start_fetch(prefill.engine.ticket("later"), [5], tokens=range(4))
    await eventually(lambda: prefill.describe()["parked"])
    said = {name: prefill.describe()[name] for name in ("streams", "handshakes", "parked", "places", "sent_in_doubt")}
    assert said == {"streams": 1, "handshakes": 0, "parked": 1, "places": 2, "sent_in_doubt": 0}
    assert decode.describe()["streams"] == 0, "it has opened the only one"
    assert written(decode) > 0
    assert (prefill.describe()["fabric"]["agents"], prefill.describe()["fabric"]["lanes"]) == (1, 1)
    waiting.cancel()
    stage.network.release("*")
    await bringing
    await quiet(prefill, decode)
    assert prefill.describe()["places"] == 0
