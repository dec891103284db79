"""What a person meets who uses the library for the first time."""

import inspect
import logging
import pydoc

import pytest
import torch
from stage import Cache

from kvxfer import CacheTensor, Config, GeometryError, Released, TransferState, Worker


@pytest.mark.parametrize("loop", ["caller", "own"])
async def test_an_offer_has_its_ticket(stage, loop):
    prefill, decode = await stage.pair(Cache(), Cache(), prefill={"loop": loop})
    offer = prefill.offer("r", [1], tokens=4, attempt=3)
    assert offer.ticket == prefill.engine.ticket("r", attempt=3)
    await decode.fetch(offer.ticket, [2], tokens=range(4))
    assert isinstance(await offer.released(), Released)


async def test_who_leaves_a_worker_hears_at_once_what_is_waited_for(stage, caplog):
    with caplog.at_level(logging.WARNING, "kvxfer"):
        async with stage.make("idle", Cache()):
            pass
        async with stage.make("prefill", Cache(), drain_timeout=0.2) as prefill:
            offers = [prefill.offer(f"unfetched-{number}", [number], tokens=4) for number in range(7)]
            assert not caplog.text
        assert offers
    (line,) = [record.getMessage() for record in caplog.records if "close_delayed" in record.getMessage()]
    assert "timeout=0.2" in line
    assert "7 offers that nobody has released (unfetched-0, " in line
    assert "unfetched-5" not in line


@pytest.mark.parametrize("loop", ["caller", "own"])
def test_tensors_that_cannot_be_are_refused_as_the_worker_is_made(loop):
    tensor = CacheTensor(torch.zeros(4, 16, 2, 8), "block token head dim", layers=[0], heads=range(2))
    with pytest.raises(GeometryError, match="layer 0"):
        Worker([tensor, tensor], Config(), loop=loop)


def test_help_shows_what_a_worker_takes():
    assert list(inspect.signature(Worker).parameters) == ["tensors", "config", "groups", "transport", "runtime", "loop"]
    assert "Worker(tensors:" in pydoc.plain(pydoc.render_doc(Worker))


def test_a_state_is_printed_by_its_name_and_compared_by_its_number():
    assert f"{TransferState.MOVING} {TransferState.DONE!s:>6}" == "MOVING   DONE"
    assert min(TransferState.MOVING, TransferState.WAITING) is TransferState.WAITING
    assert TransferState.DONE == 4
