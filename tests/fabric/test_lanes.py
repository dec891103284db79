"""Peers that the fabric knows: how often they are connected, and when they are forgotten."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.errors import FabricError, ProtocolError
from kvxfer.fabric import agent_name, pack
from kvxfer.fabric.calls import _MOST_OLD, Lanes


class Agents:
    """A fabric that is told of agents."""

    def __init__(self) -> None:
        self.known: list[str] = []

    def connect(self, metadata: bytes) -> "Future[str]":
        self.known.append(metadata.decode("latin1"))
        connected: Future[str] = Future()
        connected.set_result(metadata.decode("latin1"))
        return connected

    def disconnect(self, name: str) -> None:
        self.known.remove(name)


def peer(renewals: int = 0) -> Any:
    body = SimpleNamespace(renewals=renewals, metadata=b"%d" % renewals)
    return SimpleNamespace(identity=SimpleNamespace(incarnation=b"peer"), body=body, name="peer")


async def test_old_agents_are_forgotten_though_somebody_always_posts():
    agents: Any = Agents()
    lanes, one = Lanes(agents), peer()
    leave = lanes.hold(one)
    await lanes.connect(one, 0)
    for renewals in range(1, 3 * _MOST_OLD):
        lanes.renewed(one, renewals, b"%d" % renewals)
        before, leave = leave, lanes.hold(one)
        await lanes.connect(one, renewals)
        await asyncio.sleep(0)
        assert agents.known == [str(renewals - 1), str(renewals)], "who was there before may be posting to it"
        before()
        assert agents.known == [str(renewals)]
    lanes.forget(one)
    assert agents.known
    leave()
    assert (agents.known, len(lanes)) == ([], 0)


async def test_of_a_peer_that_is_never_the_same_not_everything_is_kept():
    agents: Any = Agents()
    lanes, one = Lanes(agents), peer()
    leave = lanes.hold(one)
    with pytest.raises(ProtocolError, match="while one transfer lasted"):  # noqa: PT012 - which of them is what matters
        for renewals in range(3 * _MOST_OLD):
            lanes.renewed(one, renewals, b"%d" % renewals)
            await lanes.connect(one, renewals)
    assert len(agents.known) == _MOST_OLD + 1
    leave()
    assert len(agents.known) == 1


async def test_an_old_grant_does_not_lead_to_a_new_agent():
    lanes, one = Lanes(Agents()), peer()  # type: ignore[arg-type]
    lanes.renewed(one, 1, b"1")
    with pytest.raises(FabricError, match="made its agent anew since"):
        await lanes.connect(one, 0)
    assert await lanes.connect(one, 1) == "1"


@pytest.mark.parametrize("held", [True, False])
async def test_a_peer_that_comes_back_with_a_new_agent_is_reached_at_that(held):
    """It made its agent anew while no link led here, and a transfer of before may still hold its lane."""
    agents: Any = Agents()
    lanes, before, after = Lanes(agents), peer(), peer(2)
    leave = lanes.hold(before)
    await lanes.connect(before, 0)
    await asyncio.sleep(0)
    if held:
        lanes.forget(before)
    else:
        leave()
    lanes.wanted(after)
    assert agents.known == (["0"] if held else []), "whoever was there before may be posting to it"
    again = lanes.hold(after)
    assert await lanes.connect(after, 2) == "2"
    leave()
    assert agents.known == ["2"]
    lanes.forget(after)
    again()
    assert (agents.known, len(lanes)) == ([], 0)


@pytest.mark.parametrize("renewed", ["", ".1"])
async def test_nobody_takes_the_name_of_the_agent_of_another(renewed):
    """The other one could not be connected then, since the transport knows peers by their names."""
    agents: Any = Agents()
    one, other = peer(), peer()
    one.identity.incarnation, other.identity.incarnation = (bytes([number]) * 32 for number in range(2))
    for who in (one, other):
        who.body.metadata = pack(bytes(16), agent_name(other.identity.incarnation) + renewed, [b"blob"])
    lanes = Lanes(agents)
    with pytest.raises(FabricError, match="says to be"):
        await lanes.connect(one, 0)
    assert agents.known == []
    await lanes.connect(other, 0)
    lanes.renewed(one, 1, pack(bytes(16), agent_name(one.identity.incarnation) + ".1", [b"blob"]))
    await lanes.connect(one, 1)
    assert len(agents.known) == 2
