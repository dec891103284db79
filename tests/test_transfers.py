"""Who waits for a transfer, and what it hears."""

import asyncio

import pytest

from kvxfer.errors import MemoryInDoubtError, PeerLostError
from kvxfer.tally import Tally
from kvxfer.transfers import FetchResult, Transfer

STATS = Tally().stats(route="staged", why="", limited_by="", peers=(), started=0.0, finished=1.0)
RESULT = FetchResult("r", b"", STATS)


async def turns(count=5):
    for _ in range(count):
        await asyncio.sleep(0)


def begun(cancel=lambda: None):
    transfer = Transfer("0-1", "r", asyncio.get_running_loop(), cancel)
    transfer.expect({0: 1, 1: 1})
    return transfer


async def waited(transfer, name, heard, layers=None):
    try:
        await (transfer if layers is None else transfer.layers(*layers))
    except (PeerLostError, MemoryInDoubtError, asyncio.CancelledError) as error:
        heard.append((name, type(error)))
        raise
    heard.append((name, None))


@pytest.mark.parametrize("error", [None, PeerLostError("gone")], ids=["succeeds", "fails"])
async def test_they_go_on_in_the_order_in_which_they_came_and_those_of_layers_first(error):
    transfer, heard = begun(), []
    waiting = [asyncio.create_task(waited(transfer, name, heard)) for name in range(12)]
    waiting += [asyncio.create_task(waited(transfer, "layer", heard, (0, 1)))]
    await turns()
    if error is None:
        transfer.succeed(RESULT)
    else:
        transfer.fail(error)
    await asyncio.gather(*waiting, return_exceptions=True)
    kind = None if error is None else PeerLostError
    assert heard == [("layer", kind), *((name, kind) for name in range(12))]
    await asyncio.gather(waited(transfer, "late", heard), return_exceptions=True)
    assert heard[-1] == ("late", kind)


async def test_one_turn_after_it_has_ended_they_know():
    transfer, heard = begun(), []
    waiting = asyncio.create_task(waited(transfer, "it", heard))
    await turns()
    transfer.succeed(RESULT)
    await asyncio.sleep(0)
    assert heard == [("it", None)]
    await waiting


async def test_who_is_cancelled_cancels_it_and_waits_until_its_memory_is_safe():
    given_up, heard = [], []
    transfer = begun(lambda: given_up.append(1))
    waiting, beside = (asyncio.create_task(waited(transfer, name, heard)) for name in ("it", "beside"))
    await turns()
    for _ in range(3):
        waiting.cancel()
        await turns()
    assert given_up == [1]
    assert not heard
    transfer.fail(asyncio.CancelledError())
    await asyncio.gather(waiting, beside, return_exceptions=True)
    assert sorted(heard) == [("beside", asyncio.CancelledError), ("it", asyncio.CancelledError)]


async def test_memory_in_doubt_is_louder_than_the_cancellation():
    transfer, heard = begun(), []
    waiting = asyncio.create_task(waited(transfer, "it", heard))
    await turns()
    waiting.cancel()
    await turns()
    transfer.fail(MemoryInDoubtError("may be written", settled=turns))
    with pytest.raises(MemoryInDoubtError):
        await waiting
    assert not transfer.memory_safe
