"""What is said of the size of pieces, beside what two workers post."""

import asyncio

import torch

from kvxfer.geometry import CacheGeometry, CacheTensor, PairPlan, common
from kvxfer.tools.explain import explain


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


async def test_as_many_pieces_are_posted_as_are_explained(stage):
    source, held = pages(6)
    target, needed = pages(4)
    target.zero_()
    prefill = await stage.worker("prefill", [], tensors=held, route="direct")
    decode = await stage.worker("decode", [], tensors=needed, route="direct")
    offer = prefill.offer("r", [5], tokens=8)
    await decode.fetch(prefill.engine.ticket("r"), [2], tokens=range(8), timeout=5)
    released = await asyncio.wait_for(offer.released(), 5)
    assert torch.equal(target[:, 2, :248], source[:, 5, :248])
    src, dst = CacheGeometry.of(held), CacheGeometry.of(needed)
    told = explain(PairPlan(src, dst, common(src, dst)))
    assert "layers 0..1: 2 pieces of 248 B a row" in str(told)
    assert "goes on with parts 'conv.B', 'conv.C'" in str(told)
    assert told.limited_by == "block stride of both sides"
    assert [stats.descriptors for stats in released.stats] == [2]
