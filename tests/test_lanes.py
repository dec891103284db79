"""Peers that the fabric knows: how often they are connected, and when they are forgotten."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.errors import FabricError, ProtocolError
from kvxfer.lanes import _MOST_OLD, Lanes


class Agents:
    """A fabric that is told of agents."""

    def __init__(self) -> None:
        self.known: list[str] = []

    def connect(self, metadata: bytes) -> "Future[str]":
        self.known.append(metadata.decode())
        connected: Future[str] = Future()
        connected.set_result(metadata.decode())
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
