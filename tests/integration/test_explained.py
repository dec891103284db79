"""What the logs and stats of two workers say of the size of pieces."""

import asyncio
import logging

import torch
from stage import Cache, Copied

from kvxfer.geometry import CacheTensor


def lines(caplog, event):
    return [
        record.kvxfer
        for record in caplog.records
        if record.name.startswith("kvxfer") and record.kvxfer["event"] == event
    ]


async def test_both_sides_say_what_limits_pieces(stage, caplog):
    caplog.set_level(logging.DEBUG, logger="kvxfer")
    source, target = Cache(heads=range(8)), Cache(heads=range(4))
    prefill, decode = await stage.pair(source, target)
    for attempt in range(2):
        offer = prefill.offer(f"r{attempt}", [3, 1], tokens=8)
        copied = Copied(target).bring(source, [3, 1], [0, 2], range(8))
        result = await decode.fetch(prefill.engine.ticket(f"r{attempt}"), [0, 2], tokens=range(8), timeout=5)
        copied.check()
        await asyncio.wait_for(offer.released(), 5)
        assert result.stats.limited_by == "source token stride"
    for event in ("transfer_sent", "fetch_ended"):
        assert [line["limited_by"] for line in lines(caplog, event)] == ["source token stride"] * 2
        assert {line["pieces"] for line in lines(caplog, event)} == {2 * 2 * 8}
    planned = lines(caplog, "pair_planned")
    assert sorted(line["role"] for line in planned) == ["receiving", "sending"]  # once a pair, not once a transfer
    for line in planned:
        assert "x 4 heads = 128 B" in line["explanation"]
        assert "heads are split: 0..7 lie there" in line["explanation"]


def pages(slots: int) -> tuple[torch.Tensor, list[CacheTensor]]:
    """Two layers of state: a page holds the last inputs of a convolution, time by time, and a recurrent state."""
    memory = torch.arange(2 * slots * 256).remainder(251).to(torch.uint8).reshape(2, slots, 256)
    tensors: list[CacheTensor] = []
    for layer, page in enumerate(memory):
        times = page.view(torch.bfloat16)[:, :60].unflatten(1, (3, 20))
        for part, channels in (("conv.x", range(12)), ("conv.B", range(12, 16)), ("conv.C", range(16, 20))):
            view = times[:, :, channels.start : channels.stop]
            heads = range(len(channels))
            tensors.append(CacheTensor(view, "block dim head", layers=[layer], heads=heads, part=part))
        state = page.view(torch.float32)[:, 30:62].unflatten(1, (4, 8))
        tensors.append(CacheTensor(state, "block head dim", layers=[layer], heads=range(4), part="ssm"))
    return memory, tensors


async def test_as_many_pieces_are_posted_as_are_explained(stage, caplog):
    caplog.set_level(logging.DEBUG, logger="kvxfer")
    source, held = pages(6)
    target, needed = pages(4)
    target.zero_()
    prefill = await stage.worker("prefill", [], tensors=held, route="direct")
    decode = await stage.worker("decode", [], tensors=needed, route="direct")
    offer = prefill.offer("r", [5], tokens=8)
    await decode.fetch(prefill.engine.ticket("r"), [2], tokens=range(8), timeout=5)
    released = await asyncio.wait_for(offer.released(), 5)
    assert torch.equal(target[:, 2, :248], source[:, 5, :248])
    planned = lines(caplog, "pair_planned")
    assert len(planned) == 2
    for line in planned:
        assert "layers 0..1: 2 pieces of 248 B a row" in line["explanation"]
        assert "goes on with parts 'conv.B', 'conv.C'" in line["explanation"]
        assert line["limited_by"] == "block stride of both sides"
    assert [stats.descriptors for stats in released.stats] == [2]
