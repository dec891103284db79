"""What a transfer costs the loop, and that each loop says who is at the other end. On asyncio's and on uvloop's."""

import asyncio
import sys

import pytest
from stage import Cache, eventually, quiet

from kvxfer import KvxferError


@pytest.mark.parametrize(
    ("listen", "secret", "route", "trusted"),
    [
        ("unix", None, "direct", True),  # the same user by the socket's credentials
        ("tcp:127.0.0.1:0", None, "staged", False),  # loopback is treated as remote
        ("tcp:127.0.0.1:0", "a secret of many letters", "direct", True),
    ],
)
async def test_a_peer_is_trusted_by_what_the_socket_says_of_it(stage, listen, secret, route, trusted):
    config = {"listen": listen, "trust": "auto", "secret": secret, "route": "direct"}
    prefill, decode = await stage.pair(Cache(), Cache(layout="HND", block_tokens=8), **config)
    result, _ = await stage.bring(prefill, decode, "r", [3, 1, 2], [4, 0], range(1, 11))
    assert (result.stats.route, decode.describe()["peers"][0]["trusted"]) == (route, trusted)


async def test_a_fetch_is_one_task_at_each_end_at_most_however_many_chunks_it_has(stage, route):
    prefill, decode = await stage.pair(Cache(), Cache(), route=route)
    await stage.bring(prefill, decode, "first")
    made = []

    def factory(loop, work, **options):
        made.append(work.__qualname__)
        return asyncio.Task(work, loop=loop, **options)

    loop = asyncio.get_running_loop()
    loop.set_task_factory(factory)
    try:
        result, _ = await stage.bring(prefill, decode, "second")
    finally:
        loop.set_task_factory(None)
    assert result.stats.chunks > 1
    assert len(made) <= 2
    await quiet(prefill, decode)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="tasks can be eager since then")
async def test_what_fails_as_its_task_is_made_is_not_waited_for_again_and_again(stage, caplog):
    prefill, decode = await stage.pair(Cache(), Cache())
    tickets = [prefill.engine.ticket(request) for request in "rs"]
    claim = decode.claim(tickets[0])
    transfer = decode.start_fetch(tickets[0], [1], tokens=range(4))
    await eventually(lambda: prefill.describe()["sending"])
    transfer.cancel()
    await asyncio.wait({transfer.outcome})
    await prefill.aclose()
    await eventually(lambda: not decode.describe()["peers"])
    loop = asyncio.get_running_loop()
    loop.set_task_factory(vars(asyncio)["eager_task_factory"])
    try:
        failing = decode.start_fetch(tickets[1], [1], tokens=range(4))  # on asyncio's loop it has failed by now
        claim.close()
    finally:
        loop.set_task_factory(None)
    with pytest.raises(KvxferError):
        await failing
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
