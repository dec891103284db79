"""The same worker on uvloop: transports and sockets there derive from nothing of asyncio's."""

import contextlib

import pytest
from stage import Cache, Copied, Stage

from kvxfer.fabric.loopback import LoopbackNetwork

uvloop = pytest.importorskip("uvloop")


async def scenario(listen, secret):
    network = LoopbackNetwork()
    async with contextlib.AsyncExitStack() as stack:
        stage = Stage(network, stack)
        source, target = Cache(), Cache(layout="HND", block_tokens=8)
        config = {"listen": listen, "trust": "auto", "secret": secret}
        prefill, decode = await stage.pair(source, target, prefill=config, decode=config, route="direct")
        wanted = Copied(target).bring(source, [3, 1, 2], [4, 0], range(1, 11))
        offer = prefill.offer("r", [3, 1, 2], tokens=11)
        result = await decode.fetch(prefill.engine.ticket("r"), [4, 0], tokens=range(1, 11), timeout=10)
        wanted.check()
        await offer.released()
        return result.stats.route, decode.describe()["peers"][0]["trusted"]


@pytest.mark.parametrize(
    ("listen", "secret", "route", "trusted"),
    [
        ("unix", None, "direct", True),  # the same user by the socket's credentials
        ("tcp:127.0.0.1:0", None, "staged", False),  # loopback is treated as remote
        ("tcp:127.0.0.1:0", "a secret of many letters", "direct", True),
    ],
)
def test_a_fetch_on_uvloop(listen, secret, route, trusted):
    assert uvloop.run(scenario(listen, secret)) == (route, trusted)
